;;;; what benchmarks of fibers have in common

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(defpackage "SB-FIBER-BENCH"
  (:use "COMMON-LISP" #+sb-fiber "SB-FIBER" "SB-THREAD"))

(in-package "SB-FIBER-BENCH")

(declaim (optimize (speed 1) (safety 1) (debug 0)))

(defparameter *carriers* (parse-integer (sb-ext:posix-getenv "P")))

#+sb-fiber
(when (equal (sb-ext:posix-getenv "POLLER") "persistent")
  (setf sb-fiber::*default-poller* :persistent))

(defun nanoseconds ()
  (multiple-value-bind (seconds nanoseconds)
      (sb-unix:clock-gettime sb-unix:clock-monotonic)
    (+ (* seconds 1000000000) nanoseconds)))

(defun median (numbers)
  (nth (floor (length numbers) 2) (sort (copy-list numbers) #'<)))

;;;; The process

(defun proc-field (file name)
  "The number after NAME in a FILE of /proc/self."
  (with-open-file (in (format nil "/proc/self/~A" file))
    (loop for line = (read-line in)
          when (and (> (length line) (length name)) (string= name line :end2 (length name)))
            return (parse-integer line :start (1+ (length name)) :junk-allowed t))))

(defun resident-bytes () (* 1024 (proc-field "status" "VmRSS")))
(defun page-table-bytes () (* 1024 (proc-field "status" "VmPTE")))

(defun main (name &rest arguments)
  (let ((bench (find-symbol (format nil "BENCH-~:@(~A~)" name) "SB-FIBER-BENCH")))
    (apply bench (mapcar (lambda (argument)
                           (or (ignore-errors (parse-integer argument)) argument))
                         arguments))))
