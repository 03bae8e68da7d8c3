;;;; the ASDF system of Hunchentoot's taskmaster with fibers

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(defsystem "sb-fiber-hunchentoot"
  :description "Hunchentoot with a fiber for each connection"
  :licence "Public Domain"
  :depends-on ("hunchentoot" "sb-fiber-http")
  :serial t
  :components ((:file "package")
               (:file "taskmaster")
               (:file "stream")
               (:file "request")
               (:file "reply")
               (:file "acceptor")))
