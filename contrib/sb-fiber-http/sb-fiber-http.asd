;;;; the ASDF system of the HTTP/1.1 engine

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(defsystem "sb-fiber-http"
  :description "An engine for HTTP/1.1 servers whose connections are fibers"
  :licence "Public Domain"
  :depends-on ("sb-bsd-sockets")
  :serial t
  :components ((:file "package")
               (:file "octets")
               (:file "head")
               (:file "framing")
               (:file "parser")
               (:file "body")
               (:file "transport")
               (:file "connection")
               (:file "date")
               (:file "reply")
               (:file "exchange")
               (:file "body-stream")
               (:file "file")
               (:file "listener")
               (:file "server")
               (:file "forwarded")))
