;;;; Reports where the stack has no room for them

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

;;; The function that has no more stack has perhaps not stored its arguments. Prevents: a report
;;; that takes for an object what lies there, which ends the process in the next collection.
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

;;; All of this again.
(unless *guard-method*
  (test guard-methods
    (check-with-guard-methods "stack-ends")))
