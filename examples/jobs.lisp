;;;; jobs: work that is to be done again and again, and must not take too long

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(defpackage "JOBS" (:use "COMMON-LISP" "SB-FIBER"))
(in-package "JOBS")

(defstruct job
  name
  (period 60 :type (real (0)))
  (time-limit 10 :type (real (0)))
  (function (error "A job needs a function.") :type function))

(defun run-job (job report)
  (handler-case (with-fibers (scope :deadline (job-time-limit job))
                  (funcall (job-function job)))
    (scope-timeout () (funcall report job :late))
    (error (condition) (funcall report job condition))
    (:no-error (&rest values) (funcall report job (first values)))))

(defun run-jobs (jobs report &key (limit 4))
  "Run each of JOBS in its period, at most LIMIT of them at a time, until this is cancelled. Call
REPORT with each job and what has become of it: its value, an error, or :LATE."
  (let ((permits (sb-thread:make-semaphore :count limit)))
    (parallel-do (job jobs)
      (periodically ((job-period job))
        (with-permit (permits)
          (run-job job report))))))
