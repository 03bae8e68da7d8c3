;;;; the ASDF system of the HTTP/1.1 engine

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(defsystem "sb-fiber-http"
  :description "HTTP/1.1 over octet buffers, for servers whose connections are fibers"
  :licence "Public Domain"
  :serial t
  :components ((:file "package")
               (:file "octets")
               (:file "head")
               (:file "framing")
               (:file "parser")
               (:file "body")
               (:file "connection")
               (:file "reply")
               (:file "exchange")
               (:file "body-stream")))
