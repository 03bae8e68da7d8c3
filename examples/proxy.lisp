;;;; a proxy: whoever connects to it talks to another server

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :sb-bsd-sockets)

(defpackage "PROXY" (:use "COMMON-LISP" "SB-FIBER" "SB-BSD-SOCKETS"))
(in-package "PROXY")

(defun copy (from to)
  "Send to TO what FROM sends, and its end."
  (let ((buffer (make-array 65536 :element-type '(unsigned-byte 8)))
        (out (socket-make-stream to :output t :element-type '(unsigned-byte 8))))
    (loop for n = (nth-value 1 (socket-receive from buffer nil))
          while (plusp n)
          do (write-sequence buffer out :end n)
             (finish-output out))
    (socket-shutdown to :direction :output)))

(defun serve-client (client address port)
  (let ((server (make-instance 'inet-socket :type :stream :protocol :tcp)))
    (unwind-protect
         (progn (socket-connect server address port)
                (with-fibers (scope)
                  (spawn scope #'copy :arguments (list client server))
                  (copy server client)))
      (socket-close server)
      (socket-close client))))

(defun serve-proxy (listener address port)
  "Connect the clients of LISTENER with the server at ADDRESS and PORT, until this is cancelled."
  (with-fibers (scope)
    (loop
      (let ((client (socket-accept listener)))
        (spawn scope (lambda ()
                       (handler-case (serve-client client address port)
                         ((or stream-error socket-error scope-failed) ()))))))))
