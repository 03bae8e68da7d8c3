;;;; the ASDF system by which Clack serves from fibers

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(defsystem "clack-handler-sb-fiber"
  :description "Clack's handler for a server whose connections are fibers"
  :licence "Public Domain"
  :depends-on ("sb-fiber-http")
  ;; for websockets, if Clack is there
  :weakly-depends-on ("clack-socket")
  :serial t
  :components ((:file "package")
               (:file "environment")
               (:file "response")
               (:file "socket")
               (:file "handler")))
