;;;; what the tests of orders say about a history

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(dolist (file '("explore" "steps" "machine"))
  (load (merge-pathnames (concatenate 'string file ".lisp") *load-truename*)))

;;; The functions are those of src/code, see steps.lisp; those that they call and that are not
;;; read from there are in machine.lisp. A test of a bug plants it: it is a test of the history
;;; above it, that this would notice.

(defmacro holds (history &rest options)
  `(multiple-value-bind (orders failure) (explore ,history ,@options)
     (is (null failure) "~A" failure)
     ;; With one order only nothing has been tried.
     (is (> orders 1))))

(defmacro fails (history &rest options)
  `(is (stringp (nth-value 1 (explore ,history ,@options)))))

(defun queue-contents (queue)
  (loop for n from (sb-fiber::run-queue-head queue) below (sb-fiber::run-queue-tail queue)
        collect (svref (sb-fiber::run-queue-ring queue)
                       (steps::run-queue-place (sb-fiber::run-queue-ring queue) n))))

(defmacro with-short-searches (&body body)
  "A search that finds nothing is not repeated, and looks at two places at most."
  `(with-changes (("SEARCH-ELSEWHERE" "4" "1")
                  ("UNLIST-SPARE" "(length spares)" "1")
                  ("PUT-IN-PLACE" "(length places)" "1")
                  ("TAKE-FROM-PLACE" "(length places)" "1"))
     ,@body))

(defun ran-problem (ran n)
  (problem (/= ran n) "~D of ~D fibers ran, and all carriers sleep." ran n))
