;;;; Run one suite, in the process that loads this:
;;;;
;;;;   sh run-sbcl.sh --non-interactive --load tests/fiber/run.lisp SUITE
;;;;
;;;; A suite is the file SUITE.lisp beside this one and all tests that it
;;;; defines, in FiveAM suites or without. The last line of output counts the
;;;; checks, and run-tests.sh adds such lines up: what prints none has crashed.

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :asdf)
(let ((*standard-output* (make-broadcast-stream))
      (*error-output* (make-broadcast-stream)))
  (asdf:load-system "fiveam"))

(load (merge-pathnames "package.lisp" *load-truename*))

(defun run-suite (name)
  (load (make-pathname :name name :defaults *load-truename*))
  (let* ((results (loop for suite in (cons nil (reverse fiveam::*toplevel-suites*))
                        append (fiveam:run suite)))
         (passed (count-if #'fiveam::test-passed-p results))
         (skipped (count-if #'fiveam::test-skipped-p results))
         (failed (- (length results) passed skipped)))
    (terpri)
    (fiveam:explain! results)
    (when (zerop (+ passed failed))
      (format t "~&No test checked anything.~%")
      (setf failed 1))
    (format t "~&~A: ~D passed, ~D failed~@[, ~D skipped~]~%"
            name passed failed (and (plusp skipped) skipped))
    (exit :code (if (zerop failed) 0 1))))

(run-suite (car (last *posix-argv*)))
