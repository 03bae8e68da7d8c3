;;;; Collections while fibers run, and data to check that nothing was lost in them

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

;;; Each stack that a collection skips is checked to be as it was when it was scanned last.
(setf (sb-alien:extern-alien "fiber_verify_skipping" sb-alien:int) 1)

(sb-ext:defglobal **collecting** nil)

(defun collect-at-random (n)
  "Collect N times, a younger or an older generation, with the mutators running in between."
  (loop for i below n
        do (case (mod i 8)
             (5 (sb-ext:gc :gen 1))
             (7 (sb-ext:gc :gen 2))
             (t (sb-ext:gc)))
           (loop repeat (random 5) do (sb-thread:thread-yield)))
  (setf **collecting** nil))

;;; Not the SETF function, which would lower the trigger of the next collection as well, perhaps
;;; below zero.
(defmacro nursery-size ()
  `(sb-alien:extern-alien "bytes_consed_between_gcs" sb-alien:unsigned-long))

(defun call-while-collecting (n function)
  "Call FUNCTION while a thread collects N times, and each 4 MiB that are allocated are a reason for
another collection. FUNCTION is to go on while **COLLECTING**."
  (let ((usual-size (nursery-size)))
    (setf (nursery-size) (* 4 1024 1024)
          **collecting** t)
    (let ((thread (sb-thread:make-thread #'collect-at-random :arguments n)))
      (unwind-protect (funcall function)
        (sb-thread:join-thread thread)
        (setf (nursery-size) usual-size)))))

(defmacro while-collecting ((n) &body body)
  `(call-while-collecting ,n (lambda () ,@body)))

(defmacro during-collections (&body body)
  "Execute BODY, which is a check, again and again; false if it ever was."
  `(loop always (progn ,@body)
         while **collecting**))

(defun fresh-data (i)
  "A new structure of several kinds of objects that only the caller refers to."
  (list i (list (float i 1d0) (expt 10 (+ 20 (mod i 10))))
        (make-array 5 :initial-element (cons i i))
        (format nil "~D" i)
        (lambda () i)))

(defun intact-p (data i)
  (destructuring-bind (n (float bignum) vector string function) data
    (and (eql n i)
         (= float i)
         (= bignum (expt 10 (+ 20 (mod i 10))))
         (every (lambda (cell) (and (eq (car cell) i) (eq (cdr cell) i))) vector)
         (string= string (format nil "~D" i))
         (eql i (funcall function)))))

(declaim (notinline keep))
(defun keep (&rest ignore) (declare (ignore ignore)) t)
