;;;; Reports and waits where the stack has no room for them

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/stack-ends.lisp" *load-truename*))

(def-suite* stack-ends)

;;; The report of an error needs stack, where there may be none. Prevents: a fiber that enters the
;;; debugger where that is disabled, and so neither ends nor is unwound; one that reports another
;;; error than it had.
(defun exhaustion-p (type)
  (and (symbolp type) (subtypep type 'sb-kernel::control-stack-exhausted)))

(test errors-at-the-end-of-the-stack
  (on-carriers (n :counts '(1 2) :migration '(nil))
    (with-group (group n)
      (let ((causes '()))
        (loop for distance from 20000 downto -100 by 167
              do (let* ((mutex (sb-thread:make-mutex))
                        (fiber (quietly
                                 (let ((fiber (spawn (group)
                                                (sb-thread:with-mutex (mutex)
                                                  (call-at-distance distance
                                                                    (lambda ()
                                                                      (error 'expected-error)))))))
                                   (fiber-join fiber :default nil :timeout *patience*)
                                   fiber)))
                        (cause (handler-case (fiber-join fiber :timeout 0)
                                 (fiber-failed (failed) (type-of (fiber-failed-cause failed)))
                                 (error (condition) condition))))
                   (push cause causes)
                   (unless (and (or (eq cause 'expected-error) (exhaustion-p cause))
                                (null (mutex-owner mutex)))
                     (fail "At a distance of ~D: ~A, ~A" distance cause mutex))))
        ;; What comes to the debugger is what is reported.
        (is (< (count-if #'exhaustion-p causes) 30) "~S" causes)))))

(define-condition endless-report (error) ()
  (:report (lambda (condition stream)
             (format stream "~A" (keep (princ-to-string condition))))))

;;; A handler of an overflow, which runs on the reserve, fails itself, and its error is printed
;;; without end. Prevents: a fiber that uses up the reserve for the report, and so ends without
;;; being unwound.
(test report-that-overflows-after-an-overflow
  (on-carriers (n)
    (with-group (group n)
      (dolist (way *ways*)
        (let* ((mutex (sb-thread:make-mutex)) (cleaned nil)
               (fiber (quietly
                        (let ((fiber (spawn (group)
                                       (unwind-protect
                                            (handler-bind ((storage-condition
                                                             (lambda (condition)
                                                               (declare (ignore condition))
                                                               (error 'endless-report))))
                                              (sb-thread:with-mutex (mutex) (funcall (cdr way))))
                                         (fiber-yield)
                                         (setf cleaned t)))))
                          (fiber-join fiber :default nil :timeout *patience*)
                          fiber))))
          (is (eq t cleaned))
          (is (null (mutex-owner mutex)))
          (is (typep (handler-case (fiber-join fiber :timeout 0)
                       (fiber-failed (failed) (fiber-failed-cause failed)))
                     'endless-report))
          (is (= 3 (join (spawn (group) (+ 1 2))))))))))

;;; The function that has no more stack has perhaps not stored its arguments. Prevents: a report that
;;; takes for an object what lies there, which ends the process in the next collection.
(test reports-of-overflows-under-collections
  (call-while-collecting
   (lambda ()
     (with-group (group 1)
       (flet ((failing-fiber ()
                (let ((distance (random 1000)))
                  (spawn (group)
                    (call-at-distance distance (lambda () (error 'expected-error)))))))
         (quietly
           (loop repeat 4
                 do (dolist (fiber (loop repeat 50 collect (failing-fiber)))
                      (fiber-join fiber :default nil :timeout *patience*)))))
       (is (= 3 (join (spawn (group) (+ 1 2)))))))))

(defun report-of (function)
  "What is printed when a fiber that calls FUNCTION ends."
  (with-output-to-string (stream)
    (call-with-error-output
     (lambda ()
       (with-group (group 1)
         (fiber-join (spawn (group) (funcall function)) :default nil :timeout *patience*)))
     stream)))

;;; Prevents: the same.
(test arguments-in-reports
  (flet ((call-in-frame (function) (call-at-distance 100000 function)))
    (let ((report (report-of (lambda () (call-in-frame (lambda () (error 'expected-error)))))))
      (is (search "(SB-FIBER-TESTS::CALL-AT-DISTANCE 100000" report) "~A" report)))
  (let ((report (report-of (lambda () (recurse-with-frames 10)))))
    (is (search "SB-FIBER-TESTS::RECURSE-WITH-FRAMES" report))
    (is (not (search "(SB-FIBER-TESTS::RECURSE-WITH-FRAMES" report)) "~A" report)))

;;; Prevents: a fiber that is unwound in the midst of a wait and stays in a chain; one that is
;;; forgotten, since its successor overflowed while it took care of it; a reserve that is closed
;;; with the fiber that closes it inside.
(test waits-at-the-end-of-the-stack
  (on-carriers (n :counts '(1 2))
    (multiple-value-bind (reader writer) (sb-unix:unix-pipe)
      (let* ((queue (sb-thread:make-waitqueue)) (done nil)
             (waits (list (lambda () (sleep 1/100000))
                          #'fiber-yield
                          (lambda () (fiber-park :timeout 1/100000))
                          (lambda () (sb-unix:unix-simple-poll reader :input 1))
                          ;; One that overflows in RELEASE-MUTEX, as a thread may, leaves the mutex
                          ;; taken.
                          (lambda () (let ((mutex (sb-thread:make-mutex)))
                                       (sb-thread:with-mutex (mutex)
                                         (sb-thread:condition-wait queue mutex :timeout 1/100000))))
                          (lambda ()
                            ;; opens the reserve silently
                            (sb-sys:without-gcing (descend-a-little 60))
                            (sleep 1/100000)))))
        (with-group (group n)
          (let ((bystanders (loop repeat 3
                                  collect (spawn (group) (loop until done do (fiber-yield)) t))))
            (dolist (wait waits)
              (is (eq t (join (spawn (group)
                                (loop for distance from 9000 downto -100 by 61
                                      do (handler-case (call-at-distance distance wait)
                                           (storage-condition ())))
                                t)))))
            (setf done t)
            (is (equal '(t t t) (join-all bystanders)))
            (is (null (sb-fiber::fd-cell-input (sb-fiber::find-fd-cell reader t))))))
        (sb-unix:unix-close reader)
        (sb-unix:unix-close writer)))))

;;; Prevents: a fiber that waits in pages that something else has opened silently, and is notified in
;;; the midst of the wait.

(defun ways-to-wake (mutex queue)
  "Functions that wake a fiber, which is in FIBER-PARK or waits in QUEUE."
  (list #'fiber-unpark
        (lambda (fiber) (interrupt-fiber fiber #'list))
        (lambda (fiber)
          (declare (ignore fiber))
          (sb-thread:condition-notify queue))
        (lambda (fiber)
          (submit-fiber (sb-fiber::fiber-group fiber) (make-fiber #'list)))
        (lambda (fiber)
          (declare (ignore fiber))
          (with-mutex (mutex) (sb-thread:condition-broadcast queue)))))

(defun asleep-p (group)
  (= (logcount (sb-fiber::fiber-group-idle group))
     (length (sb-fiber::fiber-group-schedulers group))))

;;; Prevents: a carrier that is thought to be awake, and never is again; a fiber in no queue.
(test wakes-at-the-end-of-the-stack
  (let ((mutex (make-mutex)) (queue (make-waitqueue)) (woken (make-flag)) (stop (make-flag)))
    (dolist (wake (ways-to-wake mutex queue))
      (let ((overflows 0))
        (with-group (woken-group 1)
          (let ((fiber (spawn (woken-group)
                         (loop until (flag-value stop)
                               do (if (= 0 (random 2))
                                      (fiber-park :timeout 1/100)
                                      (with-mutex (mutex)
                                        (condition-wait queue mutex :timeout 1/100)))
                                  (count-one woken)))))
            (with-group (group 1)
              (loop for distance from 1500 downto -300 by 29
                    do (wait-until (asleep-p woken-group))
                       (when (eq :overflow
                                 (join (spawn (group)
                                         (handler-case
                                             (call-at-distance distance
                                                               (lambda () (funcall wake fiber)))
                                           (storage-condition () :overflow)))))
                         (incf overflows))
                       (unless (eql 1 (fiber-join (spawn (woken-group) 1) :default nil :timeout 10))
                         (return (fail "Nobody woke the group at ~D." distance)))))
            (raise-flag stop)
            (fiber-unpark fiber)
            (is (plusp overflows))))
        (setf (flag-value stop) nil)))
    (is (plusp (flag-count woken)))))

(test no-wait-in-a-reserve-that-was-opened-silently
  (flet ((exhausted-at-p (distance)
           (call-at-distance distance
                             (lambda ()
                               (sb-sys:without-gcing (call-at-distance -3000 #'keep))
                               (handler-case (fiber-can-park-p)
                                 (sb-kernel::control-stack-exhausted () :exhausted))))))
    (with-group (group 1)
      (loop for (distance result) in '((20000 t) (9500 t) (6000 :exhausted) (2500 :exhausted))
            do (is (eq result (join (spawn (group) (exhausted-at-p distance)))))))))

;;; What was notified, or reports, has the reserve to wait in.
(test handlers-and-reports-wait-in-the-reserve
  (flet ((waits-p ()
           (and (< (stack-pointer) (+ (control-base) 8192)) (fiber-can-park-p)
                (progn (sleep 1/1000) t))))
    (is (eq t (in-fiber ()
                (block nil
                  (handler-bind ((sb-kernel::control-stack-exhausted
                                   (lambda (condition) (keep condition) (return (waits-p)))))
                    (recurse-with-frames 10))))))
    (is (eq t (in-fiber ()
                (call-at-distance 4000 (lambda ()
                                         (sb-fiber::make-room-to-report)
                                         (waits-p))))))))

;;; All of this again.
(unless *guard-method*
  (test guard-methods
    (check-with-guard-methods "stack-ends")))
