;;;; Limits of the process

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(sb-alien:define-alien-type nil
    (sb-alien:struct rlimit (soft sb-alien:unsigned-long) (hard sb-alien:unsigned-long)))

(sb-alien:define-alien-routine getrlimit sb-alien:int
  (resource sb-alien:int) (limit (* (sb-alien:struct rlimit))))
(sb-alien:define-alien-routine setrlimit sb-alien:int
  (resource sb-alien:int) (limit (* (sb-alien:struct rlimit))))

(defconstant +rlimit-nofile+ 7)
(defconstant +rlimit-as+ 9)

(defun exchange-limit (resource new &optional raise-hard-limit-p)
  "Make NEW the soft limit of RESOURCE. Return what was. Signals an error if that is not allowed."
  (sb-alien:with-alien ((limit (sb-alien:struct rlimit)))
    (assert (zerop (getrlimit resource (sb-alien:addr limit))))
    (prog1 (sb-alien:slot limit 'soft)
      (setf (sb-alien:slot limit 'soft) new)
      (when (and raise-hard-limit-p (< (sb-alien:slot limit 'hard) new))
        (setf (sb-alien:slot limit 'hard) new))
      (assert (zerop (setrlimit resource (sb-alien:addr limit)))))))

(defmacro with-limit ((resource limit) &body body)
  "Execute BODY with LIMIT as the soft limit of RESOURCE."
  (let ((old (gensym)) (number (gensym)))
    `(let* ((,number ,resource) (,old (exchange-limit ,number ,limit)))
       (unwind-protect (progn ,@body)
         (exchange-limit ,number ,old)))))

(defun lowest-free-descriptor ()
  (let ((descriptor (sb-unix:unix-dup 0)))
    (sb-unix:unix-close descriptor)
    descriptor))

(defmacro with-free-descriptors ((n) &body body)
  "Execute BODY while N descriptors can be opened, as long as those in use are the lowest."
  `(with-limit (+rlimit-nofile+ (+ ,n (lowest-free-descriptor))) ,@body))
