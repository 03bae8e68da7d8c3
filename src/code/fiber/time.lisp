;;;; time, as users and the heap count it

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

(declaim (ftype (sfunction (unsigned-byte) fixnum) nanoseconds-from-now))
(defun nanoseconds-from-now (nanoseconds)
  "The deadline that is NANOSECONDS away."
  (min (+ (fiber-now) nanoseconds) (1- most-positive-fixnum)))

(defun seconds-to-nanoseconds (seconds)
  "SECONDS, a non-negative real, in nanoseconds, rounded up; thirty years if that is less."
  (declare (type (real 0) seconds))
  (if (< seconds 1000000000)
      (values (ceiling (* (rational seconds) 1000000000)))
      (expt 10 18)))

(defun seconds-from-now (seconds)
  "The deadline that is SECONDS, a non-negative real, away."
  (nanoseconds-from-now (seconds-to-nanoseconds seconds)))

(declaim (inline deadline-passed-p))
(defun deadline-passed-p (deadline)
  (declare (type (or null fixnum) deadline))
  (and deadline (>= (fiber-now) deadline)))

(defun seconds-until (deadline)
  (/ (max 0 (- deadline (fiber-now))) 1000000000))

(defun time-left (deadline)
  "Seconds and microseconds until DEADLINE; -1 and 0, as for FUTEX-WAIT, if it is NIL."
  (if deadline
      (truncate (ceiling (max 0 (- deadline (fiber-now))) 1000) 1000000)
      (values -1 0)))

;;; DEADLINE-TIMEOUT is signalled here if the time of WITH-DEADLINE is over already.
(defun time-limit (end)
  "The deadline of a wait until END, a deadline or NIL; and true if it is that of WITH-DEADLINE,
which comes before END."
  (if sb-impl::*deadline*
      (multiple-value-bind (sec usec stop-sec stop-usec deadlinep)
          (sb-impl::decode-timeout (and end (seconds-until end)))
        (declare (ignore stop-sec stop-usec))
        (if deadlinep
            (values (timeout-to-deadline sec usec) t)
            (values end nil)))
      (values end nil)))

(defmacro until-time-limit ((limit timeout) &body body)
  "Execute BODY again and again, with LIMIT bound to the deadline for what waits in it, until it
exits, or until TIMEOUT seconds are over: then return NIL. If the deadline of WITH-DEADLINE comes
before, it is signalled."
  (with-unique-names (end deadlinep)
    `(let ((,end (and ,timeout (seconds-from-now ,timeout))))
       (multiple-value-bind (,limit ,deadlinep) (time-limit ,end)
         (loop
           ,@body
           (when (deadline-passed-p ,limit)
             (unless ,deadlinep (return nil))
             (sb-sys:signal-deadline)
             (setf (values ,limit ,deadlinep) (time-limit ,end))))))))
