;;;; the package of the HTTP engine's TLS

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.
(defpackage "SB-FIBER-HTTP-TLS"
  (:documentation "TLS for the servers of SB-FIBER-HTTP.")
  (:use "COMMON-LISP")
  (:export "TLS" "MAKE-TLS" "RENEW-TLS" "TLS-ERROR"))
