;;;; contexts of CL+SSL, made in threads that may block

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

#-sb-fiber
(error "SB-FIBER-SSL needs an SBCL with fibers, and this one has none.")

(defpackage "SB-FIBER-SSL"
  (:documentation "CL+SSL in fibers, without stuck carriers.")
  (:use "COMMON-LISP" "SB-FIBER"))

(in-package "SB-FIBER-SSL")

;;; CL+SSL gives OpenSSL sockets that do not block, and waits for them in Lisp, where fibers park.
;;; What takes long is CL+SSL:MAKE-CONTEXT: it reads and parses the certificates of all authorities
;;; that the system trusts, tens of milliseconds, and Drakma makes a context for each request. In a
;;; fiber it is therefore called by CALL-BLOCKING.
;;;
;;; A context is not collected but freed. So that it is not lost if the fiber is unwound meanwhile,
;;; both look at a cell, which is changed by compare-and-swap:
;;;
;;;     NIL       -> a context     the thread that has made it
;;;     NIL       -> :UNWANTED     the fiber, when it is unwound; the thread then frees the context
;;;     a context: what unwinds the fiber frees it

(defun deliver (context cell)
  (when (sb-ext:compare-and-swap (car cell) nil context)
    (cl+ssl:ssl-ctx-free context))
  context)

(defun renounce (cell)
  (let ((context (sb-ext:compare-and-swap (car cell) nil :unwanted)))
    (when context
      (cl+ssl:ssl-ctx-free context))))

(defun call-for-context (function arguments cell)
  "Apply FUNCTION, which makes a context, to ARGUMENTS in a thread, and return the context."
  (let ((directory *default-pathname-defaults*)) ; locations may be relative to it
    (call-blocking (lambda ()
                     (let ((*default-pathname-defaults* directory))
                       (sb-sys:without-interrupts
                         (deliver (apply function arguments) cell)))))))

(defun make-context-in-thread (function &rest arguments)
  (if (fiber-can-park-p)
      (let ((cell (list nil))
            (context nil))
        (sb-sys:without-interrupts
          (unwind-protect
               (setf context (sb-sys:with-local-interrupts
                               (call-for-context function arguments cell)))
            (unless context (renounce cell)))))
      (apply function arguments)))

(sb-int:encapsulate 'cl+ssl:make-context 'sb-fiber-ssl 'make-context-in-thread)
