;;;; a chat: what one client says all others hear

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :sb-bsd-sockets)
(require :sb-concurrency)

(defpackage "CHAT" (:use "COMMON-LISP" "SB-FIBER" "SB-CONCURRENCY" "SB-BSD-SOCKETS"))
(in-package "CHAT")

(defun run-hub (events)
  "Know who is there, and tell everybody what is said. Who is too slow misses something."
  (let ((clients '()))
    (do-channel (event events)
      (destructuring-bind (kind what) event
        (ecase kind
          (:join (push what clients))
          (:leave (setf clients (remove what clients)))
          (:say (dolist (client clients) (send client what :timeout 0))))))))

(defun write-lines (lines stream)
  (do-channel (line lines)
    (write-line line stream)
    (finish-output stream)))

(defun serve-client (socket events)
  (let ((stream (socket-make-stream socket :input t :output t))
        (lines (make-channel :capacity 100)))
    (unwind-protect
         (with-fibers (scope)
           (send events (list :join lines))
           (spawn scope #'write-lines :arguments (list lines stream))
           (loop for line = (read-line stream nil)
                 while line do (send events (list :say line)))
           (cancel-scope scope))
      (without-cancellation (send events (list :leave lines)))
      (socket-close socket))))

(defun serve-chat (listener)
  "Serve the clients that connect to LISTENER, until this is cancelled."
  (let ((events (make-channel :capacity 100)))
    (with-fibers (scope)
      (spawn scope #'run-hub :arguments (list events))
      (loop
        (let ((socket (socket-accept listener)))
          (spawn scope (lambda ()
                         (handler-case (serve-client socket events)
                           ((or stream-error socket-error scope-failed) ())))))))))
