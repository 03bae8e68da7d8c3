;;;; the package of Hunchentoot's taskmaster with fibers

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

#-sb-fiber
(error "SB-FIBER-HUNCHENTOOT needs an SBCL with fibers, and this one has none.")

(defpackage "SB-FIBER-HUNCHENTOOT"
  (:documentation "Hunchentoot with a fiber for each connection.")
  (:use "COMMON-LISP" "SB-FIBER" "SB-FIBER-HTTP")
  (:shadow "CONNECTION")                ; the class of sockets here
  (:import-from "HUNCHENTOOT"
                "ACCEPTOR" "ACCEPTOR-LOG-MESSAGE" "PARAMETER-ERROR" "PROCESS-CONNECTION"
                "TASKMASTER-ACCEPTOR" "TASKMASTER-THREAD-COUNT")
  (:export "FIBER-TASKMASTER" "FIBER-ACCEPTOR" "EASY-FIBER-ACCEPTOR" "FIBER-REQUEST"))
