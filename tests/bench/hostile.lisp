;;;; clients of an HTTP server that are slow, silent or confused; see hostile.sh

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :sb-bsd-sockets)

(defun call-with-connection (port function)
  "Call FUNCTION with a stream to the server at PORT, until that closes it, or is not there."
  (let ((socket (make-instance 'sb-bsd-sockets:inet-socket :type :stream :protocol :tcp)))
    (unwind-protect
         (handler-case
             (progn (sb-bsd-sockets:socket-connect socket #(127 0 0 1) port)
                    (funcall function (sb-bsd-sockets:socket-make-stream
                                       socket :input t :output t :buffering :full
                                              :external-format :latin-1)))
           ((or stream-error sb-bsd-sockets:socket-error) ()))
      (sb-bsd-sockets:socket-close socket :abort t))))

(defun line (control &rest arguments)
  (format nil "~?~C~C" control arguments #\Return #\Newline))

(defun send (stream text)
  (write-string text stream)
  (finish-output stream))

(defun send-slowly (stream text)
  (loop for character across text
        do (send stream (string character))
           (sleep 1/5)))

(defun await-end (stream)
  (loop while (read-char stream nil)))

(defparameter *request* (concatenate 'string (line "GET / HTTP/1.1") (line "Host: x") (line "")))

(defparameter *kinds*
  `((10000 silent ,#'await-end)
    (200 slow-head ,(lambda (stream) (send-slowly stream (make-string 10000 :initial-element #\a))))
    (200 slow-body ,(lambda (stream)
                      (send stream (concatenate 'string (line "POST / HTTP/1.1") (line "Host: x")
                                                (line "Content-Length: 10000") (line "")))
                      (send-slowly stream (make-string 10000 :initial-element #\a))))
    (100 slow-reader ,(lambda (stream)
                        (loop repeat 1000
                              do (send stream *request*)
                                 (loop repeat 20 do (read-char stream))
                                 (sleep 1/5))))
    (20 storm ,(lambda (stream) (declare (ignore stream)) (sleep 1/10)))
    (20 garbage ,(lambda (stream)
                   (send stream (map-into (make-string 500) (lambda () (code-char (random 256)))))
                   (await-end stream)
                   (sleep 1/5))))
  "How many clients of what kind, and what they do with a connection, again and again.")

(defun be-hostile (port)
  (let ((fibers (loop for (n name function) in *kinds*
                      append (loop repeat n
                                   collect (let ((function function))
                                             (sb-fiber:make-fiber
                                              (lambda ()
                                                (loop (call-with-connection port function)
                                                      (sleep 1/10)))
                                              :name (string name)))))))
    (loop for (fiber . rest) on fibers
          with group = (sb-fiber:start-fibers nil :carrier-count 1)
          do (sb-fiber:submit-fiber group fiber)
             (when (= 0 (mod (length rest) 100)) (sleep 1/20)))
    (format t "Hostile~%")
    (finish-output)
    (loop (sleep 3600))))

(be-hostile (parse-integer (second sb-ext:*posix-argv*)))
