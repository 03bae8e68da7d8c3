;;;; a pipeline: stages that work at the same time, and wait for each other

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :sb-concurrency)

(defpackage "PIPELINE" (:use "COMMON-LISP" "SB-FIBER" "SB-CONCURRENCY"))
(in-package "PIPELINE")

(defun source (scope items)
  "A channel that gives ITEMS."
  (let ((output (make-channel :capacity 4)))
    (spawn scope (lambda ()
                   (dolist (item items) (send output item))
                   (close-channel output)))
    output))

(defun stage (scope input workers function)
  "A channel that gives what FUNCTION, called by as many fibers as WORKERS says, makes of INPUT. A
stage that is slower than the next one is waited for; one that is faster waits."
  (let ((output (make-channel :capacity 4)))
    (spawn scope (lambda ()
                   (with-fibers (inner)
                     (loop repeat workers
                           do (spawn inner (lambda ()
                                             (do-channel (item input)
                                               (send output (funcall function item)))))))
                   (close-channel output)))
    output))

(defun sum-of-squares (numbers &key (workers 4))
  "The sum of the squares of NUMBERS. If one is no number all stages end, and SCOPE-FAILED is
signalled."
  (with-fibers (scope)
    (let ((squares (stage scope (source scope numbers) workers (lambda (n) (* n n))))
          (sum 0))
      (do-channel (square squares sum)
        (incf sum square)))))
