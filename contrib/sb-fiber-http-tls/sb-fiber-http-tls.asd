;;;; the ASDF system of the HTTP engine's TLS

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.
(defsystem "sb-fiber-http-tls"
  :description "TLS for the servers of sb-fiber-http, by CL+SSL"
  :licence "Public Domain"
  :depends-on ("cl+ssl" "sb-fiber-ssl" "sb-fiber-http")
  :serial t
  :components ((:file "package")
               (:file "context")
               (:file "transport")))
