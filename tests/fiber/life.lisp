;;;; A fiber from its making to its end, whether it chooses that or others do: fiber/api.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* life)

;;;; Ends that a fiber chooses

(test abort-restart
  (on-carriers (n)
    (with-group (group n)
      (let ((cleaned nil))
        (is (eq :abort (wait-for-end (spawn (group)
                                       (unwind-protect (abort)
                                         (fiber-yield)
                                         (setf cleaned t))))))
        (is (eq t cleaned)))
      (is (eq :abort (wait-for-end (spawn (group)
                                     (handler-bind ((error #'abort)) (car (eval 1)))))))
      (is (search "abort fiber" (join (spawn (group) (princ-to-string (find-restart 'abort)))))))))

(test thread-functions
  (on-carriers (n)
    (with-group (group n)
      (is (eq :abort (wait-for-end (spawn (group) (sb-thread:abort-thread)))))
      (is (equal '(1 2 3)
                 (multiple-value-list
                  (join (spawn (group)
                          (unwind-protect (sb-thread:return-from-thread (values 1 2 3))
                            (fiber-yield)))))))
      (is (equal '() (multiple-value-list (join (spawn (group) (values))))))
      (is (string= "a name" (join (spawn (group :name "a name")
                                    (sb-thread:thread-name sb-thread:*current-thread*)))))
      (is (eq t (join (spawn (group) (sb-thread:thread-alive-p sb-thread:*current-thread*)))))
      (let ((fiber (spawn (group) 1)))
        (join fiber)
        (is (not (sb-thread:thread-alive-p fiber)))))))

(test arguments-of-the-function
  (on-carriers (n)
    (with-group (group n)
      (flet ((values-with (arguments)
               (multiple-value-list
                (join-fiber (submit-fiber group (make-fiber 'values :arguments arguments))))))
        (is (equal '(1 (2 3)) (values-with '(1 (2 3)))))
        (is (equal '(1) (values-with 1)))
        (is (equal '() (values-with '()))))
      (let* ((arguments (list 1 2))
             (fiber (make-fiber #'list :arguments arguments)))
        (setf (first arguments) 3)
        (is (equal '(1 2) (join-fiber (submit-fiber group fiber))))))))

(test join-fiber-is-fiber-join
  (on-carriers (n)
    (with-group (group n)
      (let ((parked (spawn (group) (fiber-park)))
            (ended (spawn (group) (values 1 2))))
        (is (equal '(1 2) (multiple-value-list (join-fiber ended))))
        (is (equal '(:late :timeout)
                   (multiple-value-list (join-fiber parked :default :late :timeout 0))))
        (terminate-fiber parked)
        (is (equal '(nil :abort) (multiple-value-list (join-fiber parked :default nil))))
        (signals sb-thread:join-thread-error (join-fiber parked))))))

;;;; Ended from outside

;;; Prevents: a way to park that cannot be left; a lock that stays taken; an end that is forgotten.
(test terminate-parked-fibers
  (on-carriers (n)
    (with-group (group n)
      (let ((cleaned (list 0)))
        (multiple-value-bind (fibers other) (all-ways-to-park group cleaned)
          (mapc #'terminate-fiber fibers)
          (is (equal (make-list (length fibers) :initial-element :abort)
                     (mapcar #'wait-for-end fibers)))
          (is (= (length fibers) (car cleaned)))
          (fiber-unpark other))))))

(test terminate-a-new-fiber
  (let* ((ran nil)
         (fiber (make-fiber (lambda () (setf ran t)))))
    (terminate-fiber fiber)
    (is (not (fiber-alive-p fiber)))
    (is (eq :aborted (fiber-state fiber)))
    (is (eq :abort (wait-for-end fiber)))
    (with-group (group 1)
      (signals sb-thread:thread-error (submit-fiber group fiber)))
    (is (not ran))
    (signals sb-thread:interrupt-thread-error (terminate-fiber fiber))))

(test terminate-a-running-fiber
  (on-carriers (n)
    (with-group (group n)
      (let ((fibers (loop repeat 20 collect (spawn (group) (loop (fiber-yield))))))
        (mapc #'terminate-fiber fibers)
        (is (equal (make-list 20 :initial-element :abort) (mapcar #'wait-for-end fibers))))
      ;; one that is queued and has not run yet runs no user's code
      (let* ((ran nil)
             (busy (spawn (group) (loop repeat 1000 do (fiber-yield))))
             (fibers (loop repeat 20
                           collect (let ((fiber (spawn (group) (fiber-park) (setf ran t))))
                                     (terminate-fiber fiber)
                                     fiber))))
        (is (equal (make-list 20 :initial-element :abort) (mapcar #'wait-for-end fibers)))
        (is (not ran))
        (join busy)))))

(test terminate-the-dead
  (with-group (group 1)
    (let ((fiber (spawn (group) 1)))
      (join fiber)
      (signals sb-thread:interrupt-thread-error (terminate-fiber fiber))
      (signals sb-thread:interrupt-thread-error (interrupt-fiber fiber #'list))
      (signals sb-thread:interrupt-thread-error (sb-thread:terminate-thread fiber))
      (signals sb-thread:interrupt-thread-error (sb-thread:interrupt-thread fiber #'list))
      (is (= 1 (join fiber))))))

(test terminate-oneself
  (on-carriers (n)
    (let ((cleaned nil))
      (is (eq :abort (with-group (group n)
                       (wait-for-end (spawn (group)
                                       (unwind-protect
                                            (progn (terminate-fiber (current-fiber))
                                                   (fiber-park))
                                         (setf cleaned t)))))))
      (is (eq t cleaned)))))

;;; Prevents: an end in the middle of what WITHOUT-INTERRUPTS protects.
(test terminate-without-interrupts
  (on-carriers (n)
    (with-group (group n)
      (let* ((trace '())
             (fiber (spawn (group)
                      (sb-sys:without-interrupts
                        (push :in trace)
                        (fiber-park)
                        (push :still-in trace))
                      (fiber-yield)
                      (push :out trace))))
        (wait-until-parked fiber)
        (terminate-fiber fiber)
        (loop repeat 20 do (sb-thread:thread-yield))
        (is (equal '(:in) trace))
        (fiber-unpark fiber)
        (is (eq :abort (wait-for-end fiber)))
        (is (equal '(:still-in :in) trace))))))

(test terminate-many
  (on-carriers (n)
    (with-group (group n)
      (let* ((cleaned (list 0))
             (fibers (loop repeat 1000
                           collect (spawn (group)
                                     (unwind-protect (fiber-park)
                                       (sb-ext:atomic-incf (car cleaned)))))))
        (mapc #'wait-until-parked fibers)
        (mapc #'terminate-fiber fibers)
        (is (every (lambda (fiber) (eq :abort (wait-for-end fiber))) fibers))
        (is (= 1000 (car cleaned)))))))

;;;; Interruptions

;;; Prevents: functions that are called elsewhere, twice or never; a wait that ends early because of
;;; them.
(test interruptions
  (on-carriers (n)
    (with-group (group n)
      (let* ((trace '())
             (fiber (wait-until-parked (spawn (group) (fiber-park) :done))))
        (dotimes (i 10)
          (let ((i i))
            (interrupt-fiber fiber (lambda () (push (list i (current-fiber)) trace)))))
        (loop until (= 10 (length trace)) do (sb-thread:thread-yield))
        (is (equal (loop for i below 10 collect (list i fiber)) (reverse trace)))
        (is (eq :parked (fiber-state (wait-until-parked fiber))))
        (sb-thread:interrupt-thread fiber (lambda () (push :thread trace)))
        (loop until (= 11 (length trace)) do (sb-thread:thread-yield))
        (fiber-unpark fiber)
        (is (eq :done (join fiber)))))))

(test interruptions-that-park-or-exit
  (on-carriers (n)
    (with-group (group n)
      (let ((fiber (wait-until-parked (spawn (group) (catch 'tag (fiber-park))))))
        (interrupt-fiber fiber (lambda () (sleep 1/1000) (throw 'tag :thrown)))
        (is (eq :thrown (join fiber))))
      (let ((fiber (wait-until-parked (spawn (group) (handler-case (sleep 3600)
                                                       (expected-error () :handled))))))
        (interrupt-fiber fiber (lambda () (fiber-yield) (error 'expected-error)))
        (is (eq :handled (join fiber))))
      (let ((fiber (wait-until-parked (spawn (group) (fiber-park)))))
        (is (eq :abort (quietly
                         (interrupt-fiber fiber (lambda () (error 'expected-error)))
                         (wait-for-end fiber))))))))

(test interrupt-before-the-start
  (on-carriers (n)
    (with-group (group n)
      (let* ((trace '())
             (fiber (make-fiber (lambda () (push :body trace) :done))))
        (interrupt-fiber fiber (lambda () (push :interruption trace)))
        (is (eq :done (join (submit-fiber group fiber))))
        (is (equal '(:body :interruption) trace))))))

(test interrupt-waiters-for-locks
  (on-carriers (n)
    (with-group (group n)
      (let* ((mutex (sb-thread:make-mutex)) (count (list 0))
             (owner (spawn (group) (sb-thread:with-mutex (mutex) (fiber-park))))
             (fibers (progn (wait-until-parked owner)
                            (loop repeat 20
                                  collect (wait-until-parked
                                           (spawn (group) (sb-thread:with-mutex (mutex) :done)))))))
        (dolist (fiber fibers)
          (interrupt-fiber fiber (lambda () (fiber-yield) (sb-ext:atomic-incf (car count)))))
        (loop until (= 20 (car count)) do (sb-thread:thread-yield))
        (fiber-unpark owner)
        (is (equal (make-list 20 :initial-element :done) (join-all fibers)))))))

;;; They meet at a lock with signals blocked. Prevents: a carrier that receives none any more, and a
;;; thread that receives one before it can handle any.
(defun sigurg-blocked-p ()
  (let ((mask (make-array (* 8 sb-unix::sizeof-sigset_t) :element-type 'bit :initial-element 0)))
    (sb-sys:with-pinned-objects (mask)
      (sb-unix::pthread-sigmask sb-unix::SIG_BLOCK nil mask))
    (= 1 (bit mask (1- sb-unix:sigurg)))))

(test threads-made-by-fibers
  (on-carriers (n)
    (is (all-true-p (in-fibers n 8 (lambda (i)
                                     (declare (ignore i))
                                     (loop repeat 30
                                           never (progn (join-thread (make-thread #'list))
                                                        (sigurg-blocked-p)))))))))

;;;; What one can see

(test states
  (with-group (group 1)
    (let ((fiber (make-fiber (lambda () (fiber-park :reason :lunch) 1) :name "eater")))
      (is (eq :new (fiber-state fiber)))
      (is (search "eater" (princ-to-string fiber)))
      (is (not (member fiber (list-all-fibers))))
      (is (search "has not begun" (with-output-to-string (out)
                                    (print-fiber-backtrace fiber :stream out))))
      (submit-fiber group fiber)
      (wait-until-parked fiber)
      (is (equal '(:parked :lunch) (multiple-value-list (fiber-state fiber))))
      (is (member fiber (list-all-fibers)))
      (is (search "lunch" (string-downcase (princ-to-string fiber))))
      (is (not (member fiber (sb-thread:list-all-threads))))
      (is (search "FIBER-PARK" (with-output-to-string (out)
                                 (print-fiber-backtrace fiber :stream out))))
      (is (eq :running (join (spawn (group) (fiber-state (current-fiber))))))
      (fiber-unpark fiber)
      (join fiber)
      (is (eq :finished (fiber-state fiber)))
      (is (search "has ended" (with-output-to-string (out)
                                (print-fiber-backtrace fiber :stream out))))
      (is (not (member fiber (list-all-fibers))))
      (is (stringp (princ-to-string group)))
      (is (stringp (princ-to-string fiber))))
    (let ((fiber (spawn (group) (fiber-park :reason '(:reading . 5)))))
      (wait-until-parked fiber)
      (is (search "5" (princ-to-string fiber)))
      (fiber-unpark fiber))))

;;; Prevents: a number that is printed as if it were an address.
(defstruct job (name 0 :type sb-ext:word))

(test reasons-with-a-number-for-a-name
  (with-group (group 1)
    (let* ((job (make-job :name (1- (expt 2 64))))
           (fiber (wait-until-parked (spawn (group) (fiber-park :reason (list :job job))))))
      (is (search "parked on job" (princ-to-string fiber)))
      (fiber-unpark fiber)
      (join fiber))))

;;; Prevents: a printed representation without end, which uses up the stack of the thread that
;;; prints, reports or debugs.
(test circles-are-printed
  (with-group (group 2)
    (let* ((fibers (make-array 2 :initial-element nil))
           (one (make-fiber (lambda () (fiber-park :reason (svref fibers 1))) :name "one"))
           (two (make-fiber (lambda () (fiber-park :reason (list 1 (svref fibers 0)))) :name "two"))
           (self (make-fiber (lambda () (fiber-park :reason (current-fiber)) (list (current-fiber)))
                             :name "self")))
      (setf (svref fibers 0) one (svref fibers 1) two)
      (dolist (fiber (list one two self)) (wait-until-parked (submit-fiber group fiber)))
      (flet ((printed-once-p (fiber)
               (let ((text (prin1-to-string fiber)))
                 (and (search " on " text)
                      (not (search " on " text :start2 (+ 4 (search " on " text))))
                      (< (length text) 300)))))
        (dolist (*print-level* '(nil 1 10))
          (dolist (*print-circle* '(nil t))
            (is-true (printed-once-p one))
            (is-true (printed-once-p two))
            (is-true (printed-once-p self)))))
      (mapc #'fiber-unpark (list one two self))
      ;; a value of its own
      (join self)
      (is (< (length (prin1-to-string self)) 300))
      (is (search "self" (prin1-to-string self))))))
