;;;; Groups of carriers, how they begin and how they end: fiber/group.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* group)

;;;; The end of a group

(test finish-with-abort
  (on-carriers (n)
    (let ((group (start-fibers nil :carrier-count n))
          (cleaned (list 0)))
      (let ((fibers (append (all-ways-to-park group cleaned)
                            (loop repeat 50 collect (spawn (group) (loop (fiber-yield)))))))
        (is (eq nil (finish-fibers group :timeout 1/100)))
        (is (eq t (finish-fibers group :abort t :timeout *patience*)))
        (is (notany #'fiber-alive-p fibers))
        (is (= (- (length fibers) 50) (car cleaned)))
        (is (eq t (fiber-group-done-p group)))))))

;;; A fiber may make another just while all are being ended. Prevents: one that is forgotten.
(test finish-with-abort-while-fibers-are-made
  (on-carriers (n)
    (loop repeat 10
          do (let ((group (start-fibers nil :carrier-count n)))
               (spawn (group) (handler-case (loop repeat 1000
                                                  do (spawn (group) (fiber-park))
                                                     (fiber-yield)
                                                  finally (fiber-park))
                                (sb-thread:thread-error () nil)))
               (spawn (group) (unwind-protect (fiber-park)
                                (handler-case (spawn (group) (sleep 3600))
                                  (error () nil))))
               (loop repeat 20 do (sb-thread:thread-yield))
               (unless (finish-fibers group :abort t :timeout *patience*)
                 (fail "~D fibers were not ended: ~S" (length (list-all-fibers)) (describe-fibers))
                 (finish-fibers group :abort t :timeout 5)
                 (return))))
    (pass)))

(test finish-without-abort
  (on-carriers (n)
    (let* ((group (start-fibers nil :carrier-count n))
           (fiber (spawn (group) (fiber-park) 1)))
      (is (eq nil (finish-fibers group :timeout 0)))
      (is (= 2 (join (spawn (group) 2))))
      (fiber-unpark fiber)
      (is (eq t (finish-fibers group :timeout *patience*)))
      (is (= 1 (join fiber)))
      (is (eq t (finish-fibers group))))))

(test finish-an-idle-group
  (on-carriers (n :migration '(nil))
    (loop repeat 20
          do (is (eq t (finish-fibers (start-fibers nil :carrier-count n)))))))

;;; Prevents: an abort that makes lists of all fibers again and again until the last has ended.
(test aborted-fibers-are-listed-once
  (on-carriers (n)
    (let* ((group (start-fibers nil :carrier-count n))
           (cleaning (make-flag)) (go-on (make-flag)) (lists (make-flag))
           (fiber (spawn (group) (unwind-protect (fiber-park)
                                   (raise-flag cleaning)
                                   (loop until (flag-value go-on) do (sleep 1/1000)))))
           (finisher nil))
      (wait-until-parked fiber)
      (with-call-before ('list-all-fibers (lambda () (count-one lists)))
        (setf finisher (make-thread #'finish-fibers :arguments (list group :abort t)))
        (is-true (wait-until (flag-value cleaning)))
        (sleep 1/2)
        (raise-flag go-on)
        (is (eq t (join-thread finisher :timeout *patience*))))
      (is (= 1 (flag-count lists))))))

(defun carrier-threads-of (group)
  (mapcar #'sb-fiber::carrier-thread (sb-fiber::fiber-group-carriers group)))

(test a-group-has-pollers-of-the-kind-that-was-asked-for
  (flet ((keeps-p (group)
           (unwind-protect
                (loop for scheduler across (sb-fiber::fiber-group-schedulers group)
                      collect (sb-fiber::poller-keeps-p (sb-fiber::scheduler-poller scheduler)))
             (finish-fibers group))))
    (is (equal '(t t) (keeps-p (start-fibers nil :carrier-count 2 :poller :persistent))))
    (is (equal '(nil) (keeps-p (start-fibers nil :carrier-count 1 :poller :one-shot))))))

;;; Prevents: pollers that nobody frees; a second call that says it is done while carriers run.
(test finish-again-after-unwinding
  (on-carriers (n)
    (let* ((pollers (pollers-in-use))
           (group (start-fibers nil :carrier-count n))
           (entered (make-semaphore))
           (leave (make-semaphore))
           (carrier (first (carrier-threads-of group)))
           (finisher nil))
      ;; It does not end while it executes this.
      (sb-thread:interrupt-thread carrier (lambda ()
                                            (signal-semaphore entered)
                                            (wait-on-semaphore leave)))
      (wait-on-semaphore entered)
      (setf finisher (make-thread #'finish-fibers :arguments (list group)))
      (loop until (eq (sb-fiber::fiber-group-state group) :stopped)
            do (sb-thread:thread-yield))
      (sb-thread:terminate-thread finisher)
      (is (eq :unwound (join-thread finisher :default :unwound)))
      (is (eq :stopped (sb-fiber::fiber-group-state group)))
      (signal-semaphore leave)
      (is (eq t (finish-fibers group)))
      (is (eq t (finish-fibers group)))
      (is (notany #'sb-thread:thread-alive-p (carrier-threads-of group)))
      (is (= pollers (pollers-in-use)))
      (is (not (member group sb-fiber::*groups*))))))

;;; Only RUN-FIBERS knows its group. Prevents: carriers that nobody can ever stop.
(test run-fibers-unwound-twice
  (on-carriers (n)
    (let* ((pollers (pollers-in-use)) (started (make-flag)) (stop (make-flag))
           (cleanups (make-flag))
           (waiting (lambda ()
                      (unwind-protect (progn (raise-flag started) (fiber-park))
                        (loop until (flag-value stop) do (sleep 1/1000))
                        (count-one cleanups))))
           (runner (make-thread (lambda () (run-fibers (make-fiber waiting) :carrier-count n)))))
      (is-true (wait-until (flag-value started)))
      (loop while (sb-thread:thread-alive-p runner)
            do (ignore-errors (sb-thread:terminate-thread runner))
               (sleep 1/100))
      (is (eq :unwound (join-thread runner :default :unwound)))
      (raise-flag stop)
      (is-true (wait-until (= pollers (pollers-in-use))))
      (is (= 1 (flag-count cleanups))))))

;;; Prevents: the same, of START-FIBERS that is unwound before it has returned its group.
(test start-fibers-unwound
  (let ((pollers (pollers-in-use)) (fiber (in-fiber () (current-fiber))))
    (flet ((start ()
             (loop (handler-case (start-fibers (list (make-fiber #'list) fiber) :carrier-count 1)
                     (error ())))))
      (loop repeat 30
            do (let ((starter (make-thread #'start)))
                 (sleep (random 0.01))
                 (loop while (sb-thread:thread-alive-p starter)
                       do (ignore-errors (sb-thread:terminate-thread starter))
                          (sleep 1/100)))) ; a thread has room for eight handlers at a time
      (is-true (wait-until (= pollers (pollers-in-use)))))))

(test finish-several-times-at-once
  (on-carriers (n)
    (let ((pollers (pollers-in-use)))
      (loop repeat 10
            do (let* ((group (start-fibers (make-fiber #'fiber-yield) :carrier-count n))
                      (threads (loop repeat 4
                                     collect (make-thread #'finish-fibers
                                                          :arguments (list group)))))
                 (is (equal '(t t t t) (mapcar #'join-thread threads)))
                 (is (notany #'sb-thread:thread-alive-p (carrier-threads-of group)))))
      (is (= pollers (pollers-in-use))))))

;;; A thread that has been joined exists for a moment still. Prevents: carriers, descriptors or
;;; pollers that are left behind.
(test groups-leave-nothing-behind
  (flet ((descriptors () (length (directory "/proc/self/fd/*" :resolve-symlinks nil)))
         (threads () (length (directory "/proc/self/task/*/" :resolve-symlinks nil)))
         (use-group ()
           (let ((group (start-fibers nil :carrier-count 4)))
             (join (spawn (group) (sleep 1/1000)))
             (finish-fibers group))))
    (use-group)
    (let ((descriptors (descriptors)) (threads (threads)))
      (loop repeat 70 do (use-group))
      (is-true (wait-until (<= (descriptors) descriptors)))
      (is-true (wait-until (<= (threads) threads))))))

;;; A frame has some 30 bytes.
(defun park-deep (depth)
  (if (= depth 0)
      (progn (fiber-park) 0)
      (1+ (park-deep (1- depth)))))

;;; Prevents: memory of a burst of fibers that stays the process's when all have ended.
(test groups-leave-little-memory
  (flet ((resident ()
           (with-open-file (in "/proc/self/statm") (read in) (* 4096 (read in))))
         (use-memory (n)
           (with-group (group 2)
             (let ((fibers (loop repeat n
                                 collect (spawn (group)
                                           (park-deep 400)))))
               (is-true (wait-until (every (lambda (fiber) (eq :parked (fiber-state fiber)))
                                            fibers)))
               (mapc #'fiber-unpark fibers)
               (join-all fibers)))
           (sb-ext:gc :full t)))
    (use-memory 3000)                   ; what is made once
    (sb-fiber:trim-stacks)
    (let ((before (resident)))
      (use-memory 3000)
      ;; they have had 50 MB
      (is (< (- (resident) before) 10000000)))))

(test groups-in-fibers
  (on-carriers (n)
    (is (equal '((1 2 3) (1 2 3))
               (in-fibers n 2
                          (lambda (i)
                            (declare (ignore i))
                            (run-fibers (loop for k from 1 to 3
                                              collect (let ((k k))
                                                        (make-fiber (lambda () (fiber-yield) k))))
                                        :carrier-count 2)))))))

;;; Prevents: a group, and its threads, for each call; there cannot be more than 62.
(test run-fibers-in-fibers
  (on-carriers (n)
    (with-group (group n)
      (let ((groups sb-fiber::*groups*) (started 0))
        (sb-int:encapsulate 'sb-fiber::make-running-group 'test
                            (lambda (f &rest arguments) (incf started) (apply f arguments)))
        (unwind-protect
             (is (all-true-p
                  (join-all
                   (loop for i below 80
                         collect (let ((i i))
                                   (spawn (group)
                                     (equal
                                      (list (list i group) (list (1+ i) group))
                                      (run-fibers
                                       (loop for k from i to (1+ i)
                                             collect (let ((k k))
                                                       (make-fiber
                                                        (lambda ()
                                                          (fiber-yield)
                                                          (list k (fiber-group
                                                                   (current-fiber)))))))))))))))
          (sb-int:unencapsulate 'sb-fiber::make-running-group 'test))
        (is (= 0 started))
        (is (eq groups sb-fiber::*groups*))
        ;; a single one, and none
        (is (equal '((1) ())
                   (join (spawn (group)
                           (list (run-fibers (make-fiber (constantly 1))) (run-fibers '()))))))
        ;; in a group of its own, if that is asked for
        (is (not (eq group (join (spawn (group)
                                   (first (run-fibers (make-fiber (lambda ()
                                                                    (fiber-group (current-fiber))))
                                                      :carrier-count 1)))))))))))

;;; A cleanup form may run fibers, when its group takes no more.
(test run-fibers-in-a-group-that-is-closed
  (on-carriers (n)
    (let* ((group (start-fibers nil :carrier-count n)) (values nil)
           (fiber (spawn (group)
                    (unwind-protect (fiber-park)
                      (setf values (run-fibers (list (make-fiber (constantly 1))
                                                     (make-fiber (constantly 2)))))))))
      (wait-until-parked fiber)
      (is (eq t (finish-fibers group :abort t :timeout *patience*)))
      (is (equal '(1 2) values)))))

(defparameter *places-to-run-fibers*
  (list (lambda (function) (join-thread (make-thread function) :timeout *patience* :default :hangs))
        (lambda (function) (in-fiber () (funcall function)))
        (lambda (function) (in-fiber (2) (funcall function)))
        (lambda (function) (in-fiber (1) (with-fiber-pinned (funcall function)))))
  "Functions that call another one in a thread and in fibers.")

(defun endless-fibers (flag cleanups)
  "Fibers that never end by themselves; each counts in FLAG when it has begun, and in CLEANUPS when
it has been unwound."
  (flet ((endless (function)
           (make-fiber (lambda ()
                         (unwind-protect (progn (count-one flag) (funcall function))
                           (fiber-yield)
                           (sleep 1/1000)
                           (count-one cleanups))))))
    (list (endless #'fiber-park)
          (endless (lambda () (loop (fiber-yield))))
          (endless (lambda () (sleep 3600))))))

(defun call-with-endless-fibers (function)
  "Call FUNCTION with a function that runs endless fibers, after others that it may be given, and
one that waits until all have begun. Return what it returns, :ALIVE if a fiber is alive then, or
:UNCLEAN if one was not unwound."
  (let* ((begun (make-flag)) (cleanups (make-flag)) (fibers (endless-fibers begun cleanups))
         (result (funcall function
                          (lambda (&optional others) (run-fibers (append others fibers)))
                          (lambda () (wait-until (= 3 (flag-count begun)))))))
    (cond ((some #'fiber-alive-p fibers) :alive)
          ((/= 3 (flag-count cleanups)) (list :unclean (flag-count cleanups)))
          (t result))))

(defun failing-run (run all-begun)
  (handler-case (funcall run
                         (list (make-fiber (lambda ()
                                             (funcall all-begun)
                                             (error 'expected-error)))))
    (fiber-failed (condition)
      (and (typep (fiber-failed-cause condition) 'expected-error) :unwound))))

(defun run-with-timeout (run all-begun)
  (declare (ignore all-begun))
  (handler-case (sb-ext:with-timeout 1/4 (funcall run))
    (sb-ext:timeout () :unwound)))

(defun run-with-deadline (run all-begun)
  (declare (ignore all-begun))
  (handler-case (sb-sys:with-deadline (:seconds 1/4) (funcall run))
    (sb-sys:deadline-timeout () :unwound)))

(defun interrupted-run (run all-begun)
  (let ((runner sb-thread:*current-thread*))
    (catch 'unwound
      (make-thread (lambda ()
                     (funcall all-begun)
                     (sb-thread:interrupt-thread runner (lambda () (throw 'unwound :unwound)))))
      (funcall run))))

(defun refused-run ()
  "Run fibers of which one cannot be submitted; those before it have been."
  (let ((fibers (list (make-fiber #'fiber-park) (make-fiber #'fiber-park)))
        (ended (make-fiber #'list)))
    (run-fibers ended :carrier-count 1)
    (handler-case (run-fibers (append fibers (list ended) fibers))
      (sb-thread:thread-error ()
        (if (some #'fiber-alive-p fibers) :alive :unwound)))))

;;; Prevents: fibers that go on for ever in a group that nobody has; a wait for what never ends.
(test run-fibers-unwound
  (let ((pollers (pollers-in-use)))
    (dolist (place *places-to-run-fibers*)
      (dolist (way '(failing-run run-with-timeout run-with-deadline interrupted-run))
        (is (eq :unwound (quietly (funcall place (lambda () (call-with-endless-fibers way)))))
            "~S" way))
      (is (eq :unwound (funcall place #'refused-run))))
    (is-true (wait-until (= pollers (pollers-in-use))))
    (is (null sb-fiber::*groups*))))

;;; Terminated, the runner ends them before it goes on unwinding.
(test run-fibers-terminated
  (on-carriers (n)
    (with-group (group n)
      (let* ((begun (make-flag)) (cleanups (make-flag)) (fibers (endless-fibers begun cleanups))
             (trace nil)
             (runner (spawn (group)
                       (unwind-protect (run-fibers fibers)
                         (setf trace (list (flag-count cleanups) (some #'fiber-alive-p fibers)))))))
        (is-true (wait-until (= 3 (flag-count begun))))
        (terminate-fiber runner)
        (is (eq :abort (wait-for-end runner)))
        (is (equal '(3 nil) trace))))
    (let* ((begun (make-flag)) (cleanups (make-flag)) (fibers (endless-fibers begun cleanups))
           (trace nil)
           (runner (make-thread (lambda ()
                                  (unwind-protect (run-fibers fibers :carrier-count n)
                                    (setf trace (list (flag-count cleanups)
                                                      (some #'fiber-alive-p fibers))))))))
      (is-true (wait-until (= 3 (flag-count begun))))
      (sb-thread:terminate-thread runner)
      (is (eq :unwound (join-thread runner :timeout *patience* :default :unwound)))
      (is (equal '(3 nil) trace)))))

;;; Terminated once more, while it waits for a cleanup form, the fiber does not wait for it; it runs
;;; to its end.
(test run-fibers-in-a-fiber-unwound-twice
  (on-carriers (n)
    (with-group (group n)
      (let* ((started (make-flag)) (cleaning (make-flag)) (stop (make-flag)) (cleanups (make-flag))
             (runner (spawn (group)
                       (run-fibers (make-fiber (lambda ()
                                                 (unwind-protect (progn (raise-flag started)
                                                                        (fiber-park))
                                                   (raise-flag cleaning)
                                                   (loop until (flag-value stop) do (sleep 1/1000))
                                                   (count-one cleanups))))))))
        (is-true (wait-until (flag-value started)))
        (terminate-fiber runner)
        (is-true (wait-until (flag-value cleaning)))
        (loop while (fiber-alive-p runner)
              do (ignore-errors (terminate-fiber runner))
                 (sleep 1/100))
        (is (= 0 (flag-count cleanups)))
        (raise-flag stop)
        (is-true (wait-until (= 1 (flag-count cleanups))))))))

(test run-fibers-signals
  (quietly
    (signals sb-thread:join-thread-error
      (run-fibers (list (make-fiber #'list) (make-fiber (lambda () (error 'expected-error))))
                  :carrier-count 1)))
  (is (equal '() (run-fibers '())))
  (is (equal '(1) (run-fibers (make-fiber (constantly 1)) :carrier-count 1))))

;;;; Aborting

;;; Prevents: a cleanup form that is unwound, since the fiber's group and the one that runs it both
;;; end it.
(test aborted-by-two
  (on-carriers (n)
    (with-group (group n)
      (let* ((started (make-flag))
             (flag (make-flag))
             (fiber (spawn (group)
                      (sb-sys:without-interrupts
                        (raise-flag started)
                        (loop until (flag-value flag) do (fiber-yield)))
                      (fiber-park))))
        (is-true (wait-until (flag-value started)))
        (sb-sys:without-interrupts
          (loop repeat 2 do (sb-fiber::abort-fibers (list fiber)))
          (is (= 1 (length (sb-thread::thread-interruptions fiber))))
          (sb-fiber::abort-fibers (list fiber) (list group))
          (is (= 2 (length (sb-thread::thread-interruptions fiber)))))
        (raise-flag flag)
        (is (eq :aborted (fiber-join fiber :default :aborted)))))))

;;; Prevents: a cleanup form that is cut short, since two want the end of the group, as EXIT may.
(test aborted-by-two-at-once
  (on-carriers (n)
    (let* ((group (start-fibers nil :carrier-count (if (migration-wanted-p) (max 2 n) n)))
           (entered (make-flag)) (leave (make-flag)) (whole (make-flag))
           (fiber (spawn (group)
                    (unwind-protect (fiber-park)
                      (raise-flag entered)
                      (loop until (flag-value leave) do (sleep 1/1000))
                      (raise-flag whole))))
           (first (progn (wait-until-parked fiber)
                         (make-thread #'finish-fibers :arguments (list group :abort t)))))
      (is-true (wait-until (flag-value entered)))
      (is (eq nil (finish-fibers group :abort t :timeout 1/100)))
      (raise-flag leave)
      (is (eq t (join-thread first :timeout *patience*)))
      (is-true (flag-value whole)))))

;;; Prevents: a fiber that cannot be ended, as it waits in a cleanup form.
(test aborted-again
  (on-carriers (n)
    (let* ((group (start-fibers nil :carrier-count (if (migration-wanted-p) (max 2 n) n)))
           (fiber (spawn (group) (unwind-protect (fiber-park) (fiber-park)))))
      (wait-until-parked fiber)
      (is (eq nil (finish-fibers group :abort t :timeout 1/100)))
      (is (eq t (finish-fibers group :abort t :timeout *patience*))))))

;;; Prevents: a fiber that learns that those which it runs were aborted, before it learns that it is
;;; aborted itself, and fails with an error of its own.
(test parents-are-aborted-as-their-children
  (on-carriers (n)
    (let ((group (start-fibers nil :carrier-count (if (migration-wanted-p) (max 2 n) n))))
      (flet ((parent ()
               (run-fibers (loop repeat 3 collect (make-fiber (lambda () (fiber-park)))))))
        (let ((parents (loop repeat 100 collect (spawn (group) (parent)))))
          (mapc #'wait-until-parked parents)
          (is (eq t (finish-fibers group :abort t :timeout *patience*)))
          (is (null (remove nil (mapcar #'sb-fiber::fiber-failure parents)))))))))
