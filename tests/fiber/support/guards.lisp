;;;; The ways to make the guards of stacks: 1 for madvise(2), 2 for mprotect(2)

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(sb-alien:define-alien-variable ("fiber_guard_method" guard-method) sb-alien:int)

;;; Set in the processes that CHECK-WITH-GUARD-METHODS starts.
(defparameter *guard-method* (sb-ext:posix-getenv "SB_FIBER_TEST_GUARD_METHOD"))

(when *guard-method*
  (setf guard-method (parse-integer *guard-method*)))

(defparameter *run-file*
  (sb-ext:native-namestring (merge-pathnames "../run.lisp" *load-truename*)))

(defun check-with-guard-methods (suite)
  "Run SUITE in processes that use the one way, and the other. Before Linux 6.13 there is no first."
  (dolist (method (if (= 2 guard-method) '("2") '("1" "2")))
    (multiple-value-bind (code output)
        (call-in-child (list "--load" *run-file* suite)
                       :environment (list (format nil "SB_FIBER_TEST_GUARD_METHOD=~A" method)))
      (is (= 0 code) "With guard method ~A:~%~A" method output))))
