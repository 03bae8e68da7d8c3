;;;; Where fibers must not move, and where they must not park: every zone with every way to wait

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/zones.lisp" *load-truename*))

(def-suite* zone)

;;;; The zones: functions that call a function in them

(sb-ext:defglobal **called-back** nil)

(defun call-what-is-called-back () (funcall **called-back**))

(sb-alien:define-alien-callable call-back sb-alien:unsigned ()
  (call-what-is-called-back)
  0)

(defun below-callback (function)
  (let ((result nil))
    ;; No fiber runs between this and the call.
    (setf **called-back** (lambda () (setf result (funcall function))))
    (sb-alien:alien-funcall (sb-alien::alien-callable-function 'call-back))
    result))

(defun in-trap-handler (function)
  (block nil
    (handler-bind ((type-error (lambda (condition)
                                 (declare (ignore condition))
                                 (return (funcall function)))))
      (car (eval 1)))))

(defun in-nested-trap-handler (function)
  (in-trap-handler (lambda ()
                     (fiber-yield)
                     (in-trap-handler function))))

(defun pinned (function)
  (with-fiber-pinned (funcall function)))

(defun nested-pinned (function)
  (with-fiber-pinned
    (catch 'out (with-fiber-pinned (fiber-yield) (throw 'out nil)))
    (with-fiber-pinned (fiber-yield))
    (funcall function)))

(defparameter *pinned-zones* '(pinned nested-pinned in-trap-handler in-nested-trap-handler))

(defun without-interrupts (function)
  (sb-sys:without-interrupts (funcall function)))

(defparameter *free-zones* '(funcall without-interrupts))

(defun without-gcing (function)
  (sb-sys:without-gcing (funcall function)))

(defvar *arena* nil)

(defun in-arena (function)
  (sb-vm:with-arena ((or *arena* (setf *arena* (sb-vm:new-arena (* 4 1024 1024)))))
    (funcall function)))

(defun with-allocator-mutex (function)
  (sb-thread:with-mutex (sb-vm::*allocator-mutex*) (funcall function)))

(defparameter *native-zones*
  '(without-gcing with-pages-pinned in-arena with-allocator-mutex below-callback))

;;;; Ways to wait, each for what another fiber does

(defstruct meeting
  (mutex (sb-thread:make-mutex) :read-only t)
  (locked (sb-thread:make-semaphore) :read-only t)
  (wanted (sb-thread:make-semaphore) :read-only t)
  (given (sb-thread:make-semaphore) :read-only t)
  in out)

(defun os-thread ()
  "The OS thread that runs this fiber."
  (sb-fiber::carrier-thread sb-fiber::*carrier*))

(defun byte-from (fd)
  (sb-alien:with-alien ((byte (sb-alien:array (sb-alien:unsigned 8) 1)))
    (sb-unix:unix-read fd (sb-alien:alien-sap byte) 1)))

(defun byte-to (fd)
  (sb-alien:with-alien ((byte (sb-alien:array (sb-alien:unsigned 8) 1)))
    (sb-unix:unix-write fd (sb-alien:alien-sap byte) 0 1)))

(defun wait-in-all-ways (meeting threads)
  "Wait in all ways, and note after each in the vector THREADS which thread runs this now. Allocates
no lasting object."
  (let ((i -1))
    (flet ((note () (setf (svref threads (incf i)) (os-thread))))
      (note)
      (fiber-yield) (note)
      (sleep 1/1000) (note)
      (sb-thread:signal-semaphore (meeting-wanted meeting))
      (sb-thread:wait-on-semaphore (meeting-given meeting)) (note)
      (sb-thread:wait-on-semaphore (meeting-locked meeting))
      (sb-thread:with-mutex ((meeting-mutex meeting)) (note)) ; its owner has yet to run
      (sb-thread:signal-semaphore (meeting-wanted meeting))
      (sb-sys:wait-until-fd-usable (meeting-in meeting) :input)
      (byte-from (meeting-in meeting)) (note)
      t)))

(defconstant n-ways 6)

(defun help-waiter (meeting)
  "Do what WAIT-IN-ALL-WAYS waits for."
  (sb-thread:wait-on-semaphore (meeting-wanted meeting))
  (loop repeat 3 do (fiber-yield))
  (sb-thread:with-mutex ((meeting-mutex meeting))
    (sb-thread:signal-semaphore (meeting-given meeting))
    (sb-thread:signal-semaphore (meeting-locked meeting))
    (loop repeat 10 do (fiber-yield)))
  (sb-thread:wait-on-semaphore (meeting-wanted meeting))
  (loop repeat 3 do (fiber-yield))
  (byte-to (meeting-out meeting)))

(defmacro with-meeting ((meeting) &body body)
  `(multiple-value-bind (in out) (sb-unix:unix-pipe)
     (let ((,meeting (make-meeting :in in :out out)))
       (unwind-protect (progn ,@body)
         (sb-unix:unix-close in)
         (sb-unix:unix-close out)))))

(defun threads-in-zone (group zone &optional (after (constantly nil)))
  "The OS threads that a fiber has had in ZONE, and what AFTER returned in the end, outside of it."
  (with-meeting (meeting)
    (let* ((threads (make-array n-ways :initial-element nil))
           (fiber (spawn (group)
                    (funcall zone (lambda () (wait-in-all-ways meeting threads)))
                    (funcall after)))
           (helper (spawn (group) (help-waiter meeting)))
           (result (join fiber)))
      (join helper)
      (values (coerce threads 'list) result))))

(defun same-p (list)
  (and (first list) (every (lambda (element) (eq element (first list))) list)))

(defmacro while-collecting (&body body)
  "Execute BODY while another thread collects garbage."
  `(let* ((stop nil)
          (collector (sb-thread:make-thread (lambda ()
                                              (loop until stop do (sb-ext:gc) (sleep 1/1000))))))
     (unwind-protect (progn ,@body)
       (setf stop t)
       (sb-thread:join-thread collector))))

;;;; Tests

(test which-zone
  (with-group (group 1)
    (flet ((zone-in (name) (join (spawn (group) (funcall name #'zone-here)))))
      (dolist (name *free-zones*) (is (eq :free (zone-in name)) "~S" name))
      (dolist (name *pinned-zones*) (is (eq :pinned (zone-in name)) "~S" name))
      (dolist (name *native-zones*) (is (eq :native (zone-in name)) "~S" name))
      ;; Native wins, and each ends where it ends.
      (dolist (native *native-zones*)
        (dolist (pinned *pinned-zones*)
          (unless (and (eq native 'without-gcing) (search "TRAP" (string pinned)))
            (is (equal '(:native :pinned :free)
                       (let ((zones '()))
                         (join (spawn (group)
                                 (funcall pinned (lambda ()
                                                   (push (funcall native #'zone-here) zones)
                                                   (push (zone-here) zones)))
                                 (push (zone-here) zones)))
                         (reverse zones)))
                "~S in ~S" native pinned)))))))

(test can-park
  (with-group (group 1)
    (flet ((can-park-in (name) (join (spawn (group) (funcall name #'fiber-can-park-p)))))
      (dolist (name (append *free-zones* *pinned-zones*)) (is (eq t (can-park-in name)) "~S" name))
      (dolist (name *native-zones*) (is (eq nil (can-park-in name)) "~S" name)))
    (is (eq nil (fiber-can-park-p)))))

;;; Prevents: a fiber that is resumed elsewhere, where C's frames, signal contexts or the user's
;;; thread are not.
(test pinned-fibers-stay
  (on-carriers (n)
    (with-group (group n)
      (while-collecting
        (dolist (zone *pinned-zones*)
          (let ((threads (threads-in-zone group zone)))
            (is (same-p threads) "~S: ~S" zone threads)))))))

;;; Many at a time, and others that move.
(test many-pinned-fibers
  (on-carriers (n)
    (with-group (group n)
      (let ((movers (loop repeat 20
                          collect (spawn (group)
                                    (loop repeat 100 do (fiber-yield) (sleep 1/10000)))))
            (fibers (loop for i below 30
                          collect (let ((zone (elt '(pinned nested-pinned in-trap-handler
                                                     in-nested-trap-handler)
                                                   (mod i 4))))
                                    (spawn (group)
                                      (funcall
                                       zone
                                       (lambda ()
                                         (let ((thread (os-thread)))
                                           (loop repeat 50
                                                 always (progn (fiber-yield)
                                                               (sleep 1/10000)
                                                               (eq thread (os-thread))))))))))))
        (is (every #'identity (join-all fibers)))
        (join-all movers)))))

;;; Prevents: a fiber that is pinned for ever, or pinned no more while it should be.
(test pins-are-unwound
  (on-carriers (n)
    (with-group (group n)
      (is (equal '(0 :free)
                 (join (spawn (group)
                         (catch 'out
                           (with-fiber-pinned (with-fiber-pinned (fiber-yield) (throw 'out nil))))
                         (ignore-errors (with-fiber-pinned (error "out")))
                         (block nil (with-fiber-pinned (sleep 1/1000) (return)))
                         (list (sb-fiber::fiber-pin-count (current-fiber)) (zone-here))))))
      (let* ((count nil)
             (fiber (spawn (group)
                      (unwind-protect (with-fiber-pinned (with-fiber-pinned (fiber-park)))
                        (setf count (sb-fiber::fiber-pin-count (current-fiber)))))))
        (loop until (eq :parked (fiber-state fiber)) do (sb-thread:thread-yield))
        (terminate-fiber fiber)
        (fiber-join fiber :default nil :timeout *patience*)
        (is (eql 0 count))))))

(test a-thread-can-be-pinned
  (is (equal '(1 2) (multiple-value-list (with-fiber-pinned (values 1 2))))))

;;; One carrier: prevents that it waits for a fiber which none but itself would run.
(test native-waits-leave-the-rest-to-a-spare
  (on-carriers (n)
    (with-group (group n)
      (dolist (zone *native-zones*)
        (flet ((check ()
                 (multiple-value-bind (threads result)
                     (threads-in-zone group zone
                                      (lambda ()
                                        (list (sb-fiber::carrier-scheduler sb-fiber::*carrier*)
                                              ;; The fiber parks, and goes on elsewhere.
                                              (progn (sleep 1/1000) (fiber-yield) :parked))))
                   (is (same-p threads) "~S: ~S" zone threads)
                   (is (equal '(nil :parked) result) "~S: ~S" zone result))))
          (if (eq zone 'without-gcing)
              ;; The collector would wait for it, and it for what is stopped.
              (check)
              (while-collecting (check))))))))

;;; Prevents: a wait that is not announced, since a call on the descriptor itself would not wait.
(test poll-in-a-native-zone
  (with-group-of-same-carriers (group 1)
    (multiple-value-bind (in out) (sb-unix:unix-pipe)
      (sb-fiber::set-nonblocking in)
      (is (eq t (join (spawn (group)
                        (spawn (group) (byte-to out)) ; it runs when this one waits
                        (with-pages-pinned
                          (lambda () (sb-unix:unix-simple-poll in :input 10000)))))))
      (mapc #'sb-unix:unix-close (list in out)))))

;;;; *BLOCKED-CARRIER-ACTION*

(defvar *pipe*)

(defun waits ()
  "Functions that wait for a moment each, all of which block the carrier in a native zone."
  (let ((semaphore (sb-thread:make-semaphore)) (mutex (sb-thread:make-mutex)))
    (values (list (lambda () (sleep 1/1000))
                  (lambda () (sleep 1d-3))
                  (lambda () (sb-thread:wait-on-semaphore semaphore :timeout 1/1000))
                  (lambda () (sb-thread:grab-mutex mutex :timeout 1/1000))
                  (lambda () (sb-sys:wait-until-fd-usable (first *pipe*) :input 1/1000)))
            mutex)))

(defun outcomes (group zone)
  "What becomes of each way to wait in ZONE: :ERROR, or the number of warnings."
  (multiple-value-bind (waits mutex) (waits)
    (multiple-value-bind (in out) (sb-unix:unix-pipe)
      (setf *pipe* (list in out))
      (unwind-protect
           (sb-thread:with-mutex (mutex)
             (loop for wait in waits
                   collect (join (spawn (group :initial-bindings `((*pipe* . ,*pipe*)))
                                   (let ((warnings 0))
                                     (handler-case
                                         (handler-bind ((warning (lambda (condition)
                                                                   (incf warnings)
                                                                   (muffle-warning condition))))
                                           (funcall zone wait)
                                           warnings)
                                       (sb-thread:thread-error () :error)))))))
        (sb-unix:unix-close in)
        (sb-unix:unix-close out)))))

(test blocked-carrier-action
  (setf *pipe* nil)
  (on-carriers (n :counts '(1 2))
    (with-group (group n)
      (dolist (zone (append *free-zones* *pinned-zones*))
        (with-blocked-carrier-action (:error)
          (is (equal '(0 0 0 0 0) (outcomes group zone)) "~S" zone)))
      (dolist (zone (remove 'without-gcing *native-zones*))
        (is (equal '(0 0 0 0 0) (outcomes group zone)) "~S" zone)
        (with-blocked-carrier-action (:warn)
          (is (every #'plusp (outcomes group zone)) "~S" zone))
        (with-blocked-carrier-action (:error)
          (is (equal '(:error :error :error :error :error) (outcomes group zone)) "~S" zone)))
      ;; Nothing can be signalled there.
      (with-blocked-carrier-action (:error)
        (is (equal '(0 0 0 0 0) (outcomes group 'without-gcing))))
      ;; What does not wait is no matter, and a thread is none.
      (with-blocked-carrier-action (:error)
        (is (eq t (join (spawn (group)
                          (with-pages-pinned
                              (lambda ()
                                (let ((mutex (sb-thread:make-mutex)))
                                  (sb-thread:with-mutex (mutex))
                                  (fiber-yield)
                                  t)))))))
        (is (null (with-pages-pinned (lambda () (sleep 1/1000)))))))))

(test old-name-of-blocked-carrier-action
  (with-blocked-carrier-action (nil)
    (let ((name (intern "*PINNED-BLOCKING-ACTION*" "SB-FIBER")))
      (signals sb-ext:early-deprecation-warning (compile nil `(lambda () ,name)))
      (handler-bind ((warning #'muffle-warning)) (eval `(setf ,name :warn)))
      (is (eq :warn *blocked-carrier-action*)))))

(test bad-blocked-carrier-action
  (signals type-error (setf *blocked-carrier-action* (eval :no-such-action)))
  (is (null *blocked-carrier-action*)))

;;;; Scheduler code waits for nothing

(defun child-that-waits-in (function &rest forms)
  "What a child prints in which FUNCTION, which the scheduler calls, takes a lock that another has,
during FORMS."
  (nth-value 1 (call-in-child
                (list "--eval" *child-package* "--eval"
                      (printed `(progn
                                  (sb-ext:unlock-package "SB-FIBER")
                                  (defvar *held* (sb-thread:make-mutex))
                                  (sb-ext:defglobal **armed** nil)
                                  (sb-thread:grab-mutex *held*)
                                  (sb-int:encapsulate ',function :armed
                                                      (lambda (function &rest arguments)
                                                        (when **armed**
                                                          (sb-thread:grab-mutex *held*))
                                                        (apply function arguments)))
                                  ,@forms
                                  (print :survived)
                                  (finish-output)
                                  (sb-ext:exit :abort t))))
                :wrapper '("timeout" "30"))))

(test scheduler-code-waits-for-nothing
  (let ((text (child-that-waits-in 'sb-fiber::run-inbox
                                   '(setf **armed** t)
                                   '(run-fibers (make-fiber (lambda () (sleep 1/100)))
                                                :carrier-count 1))))
    (is (search "fiber scheduler code waits for a lock" text) "~A" text)
    (is (not (search "SURVIVED" text)) "~A" text))
  (let ((text (child-that-waits-in 'sb-fiber::put-back-signal-mask
                                   '(run-fibers
                                     (make-fiber (lambda ()
                                                   (ignore-errors
                                                    (handler-bind ((error (lambda (c)
                                                                            (declare (ignore c))
                                                                            (setf **armed** t)
                                                                            (sleep 1/100))))
                                                      (car (eval 1))))))
                                     :carrier-count 1))))
    (is (search "fiber scheduler code parks the fiber that is leaving" text) "~A" text)
    (is (not (search "SURVIVED" text)) "~A" text))
  ;; The same without the lock.
  (let ((text (child-that-waits-in 'sb-fiber::run-inbox
                                   '(run-fibers (make-fiber (lambda () (sleep 1/100)))
                                                :carrier-count 1))))
    (is (search "SURVIVED" text) "~A" text)))

;;; A handler may wait, though it runs on the carrier's own stack: a spare serves the fibers.
(test handlers-may-wait
  (is (search "HANDLED"
              (child-result
               '(let ((group (start-fibers nil :carrier-count 1))
                      (mutex (sb-thread:make-mutex))
                      (handled (sb-thread:make-semaphore)))
                 (sb-thread:grab-mutex mutex)
                 (sb-thread:interrupt-thread
                  (fiber-join (submit-fiber group (make-fiber (lambda ()
                                                                (sb-fiber::carrier-thread
                                                                 sb-fiber::*carrier*)))))
                  (lambda ()
                    (sb-thread:with-mutex (mutex) nil)
                    (sb-thread:signal-semaphore handled)))
                 (fiber-join (submit-fiber group (make-fiber (lambda () (sleep 1/10)))))
                 (sb-thread:release-mutex mutex)
                 (sb-thread:wait-on-semaphore handled)
                 (finish-fibers group)
                 (print :handled)
                 (terpri))
               :wrapper '("timeout" "60")))))
