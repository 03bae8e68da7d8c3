;;;; Where a fiber may park, for the suites that go where it may not

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(defun zone-here ()
  (sb-fiber::zone (current-fiber)))

(defun with-pages-pinned (function)
  (sb-vm::with-code-pages-pinned (:dynamic) (funcall function)))

;;; Foreign code that waits.
(defun usleep (microseconds)
  (sb-alien:alien-funcall
   (sb-alien:extern-alien "usleep" (function sb-alien:int sb-alien:unsigned)) microseconds))

(defmacro with-blocked-carrier-action ((action) &body body)
  `(progn (setf *blocked-carrier-action* ,action)
          (unwind-protect (progn ,@body)
            (setf *blocked-carrier-action* nil))))
