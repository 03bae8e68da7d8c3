;;;; a web server in fibers:
;;;;
;;;;   sh run-sbcl.sh --load contrib/sb-fiber-hunchentoot/demo.lisp
;;;;
;;;; Then ask it, with curl http://127.0.0.1:4242/ or any browser. (HUNCHENTOOT:STOP *SERVER*)
;;;; stops it.

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :asdf)
(dolist (file '("../sb-fiber-http/sb-fiber-http.asd" "sb-fiber-hunchentoot.asd"))
  (asdf:load-asd (merge-pathnames file *load-truename*)))
(handler-bind ((warning #'muffle-warning))
  (let ((*standard-output* (make-broadcast-stream)))
    (asdf:load-system "sb-fiber-hunchentoot")))

(hunchentoot:define-easy-handler (hello :uri "/") ()
  (setf (hunchentoot:content-type*) "text/plain")
  "Hello, World!")

(defvar *server*
  (make-instance 'sb-fiber-hunchentoot:easy-fiber-acceptor
                 :address "127.0.0.1"
                 :port 4242
                 ;; Clients that come at once wait here; the usual 50 would turn some away.
                 :listen-backlog 4096
                 :access-log-destination nil
                 :taskmaster (make-instance 'sb-fiber-hunchentoot:fiber-taskmaster)))

(hunchentoot:start *server*)
(format t "~&Serving http://127.0.0.1:4242/ from fibers.~%")
(finish-output)

;;; The end of a script's input would end the server too.
(unless (interactive-stream-p sb-sys:*stdin*)
  (loop (sleep 3600)))
