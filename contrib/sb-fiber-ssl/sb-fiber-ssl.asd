;;;; the ASDF system that lets CL+SSL do in other threads what takes long

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(defsystem "sb-fiber-ssl"
  :description "CL+SSL in fibers, without stuck carriers"
  :licence "Public Domain"
  :depends-on ("cl+ssl")
  :components ((:file "context")))
