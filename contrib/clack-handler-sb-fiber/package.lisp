;;;; the package of Clack's handler

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

;;; Clack finds a handler by the name of its package.
(defpackage "CLACK.HANDLER.SB-FIBER"
  (:documentation "Clack's handler for a server whose connections are fibers.")
  (:use "COMMON-LISP" "SB-FIBER-HTTP")
  (:export "RUN" "STOP" "START"))
