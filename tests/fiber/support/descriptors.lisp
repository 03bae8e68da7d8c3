;;;; Pipes and sockets to play with

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :sb-bsd-sockets)
(handler-bind ((warning #'muffle-warning))
  (let ((*standard-output* (make-broadcast-stream)))
    (asdf:load-system "usocket")))

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "files.lisp" *load-truename*))

(import '(sb-bsd-sockets:inet-socket sb-bsd-sockets:local-socket sb-bsd-sockets:socket-bind
          sb-bsd-sockets:socket-listen sb-bsd-sockets:socket-accept sb-bsd-sockets:socket-connect
          sb-bsd-sockets:socket-send sb-bsd-sockets:socket-receive sb-bsd-sockets:socket-close
          sb-bsd-sockets:socket-name sb-bsd-sockets:socket-make-stream
          sb-bsd-sockets:socket-shutdown
          sb-bsd-sockets:socket-file-descriptor sb-bsd-sockets:non-blocking-mode
          sb-thread:make-thread sb-thread:join-thread sb-thread:thread-yield))

(defun call-with-pipe (function &rest arguments)
  (multiple-value-bind (in out) (sb-posix:pipe)
    (let ((input (apply #'sb-sys:make-fd-stream in :input t :buffering :full arguments))
          (output (apply #'sb-sys:make-fd-stream out :output t :buffering :full arguments)))
      (unwind-protect (funcall function input output)
        (close input :abort t)
        (close output :abort t)))))

(defmacro with-pipe ((input output &rest arguments) &body body)
  `(call-with-pipe (lambda (,input ,output) ,@body) ,@arguments))

(defun call-with-named-pipe (function)
  (let ((path (temporary-path "pipe-~D" (random 1000000))))
    (sb-posix:mkfifo path #o600)
    (unwind-protect (funcall function path)
      (sb-posix:unlink path))))

(defmacro with-named-pipe ((path) &body body)
  `(call-with-named-pipe (lambda (,path) ,@body)))

(defparameter *loopback* (coerce '(127 0 0 1) '(vector (unsigned-byte 8) 4)))

(defun listening-socket ()
  (let ((socket (make-instance 'inet-socket :type :stream :protocol :tcp)))
    (setf (sb-bsd-sockets:sockopt-reuse-address socket) t)
    (socket-bind socket *loopback* 0)
    (socket-listen socket 128)
    socket))

(defun port-of (socket)
  (nth-value 1 (socket-name socket)))

(defun connected-socket (port)
  (let ((socket (make-instance 'inet-socket :type :stream :protocol :tcp)))
    (socket-connect socket *loopback* port)
    socket))

(defun call-with-sockets (function)
  (let* ((listener (listening-socket))
         (a (connected-socket (port-of listener)))
         (b (socket-accept listener)))
    (socket-close listener)
    (unwind-protect (funcall function a b)
      (socket-close a :abort t)
      (socket-close b :abort t))))

(defmacro with-sockets ((a b) &body body)
  "A and B are the two ends of a connection."
  `(call-with-sockets (lambda (,a ,b) ,@body)))

(defun socket-pair ()
  "The numbers of the two ends of a local connection."
  (sb-alien:with-alien ((fds (array sb-alien:int 2)))
    (assert (= 0 (sb-alien:alien-funcall
                  (sb-alien:extern-alien "socketpair"
                                         (function sb-alien:int sb-alien:int sb-alien:int
                                                   sb-alien:int (* (array sb-alien:int 2))))
                  sb-bsd-sockets-internal::af-local sb-bsd-sockets-internal::sock-stream 0
                  (sb-alien:addr fds))))
    (values (sb-alien:deref fds 0) (sb-alien:deref fds 1))))

(defun stream-of (socket &rest arguments)
  (apply #'socket-make-stream socket :input t :output t :buffering :full arguments))

(defun send-line (stream line)
  (write-line line stream)
  (finish-output stream))

(defun closers ()
  "Ways to close a socket, or the stream STREAM on it."
  (list (lambda (socket stream) (declare (ignore stream)) (socket-close socket))
        (lambda (socket stream) (declare (ignore stream)) (socket-close socket :abort t))
        (lambda (socket stream) (declare (ignore socket)) (close stream))
        (lambda (socket stream) (declare (ignore socket)) (close stream :abort t))
        (lambda (socket stream)
          (declare (ignore stream))
          (sb-unix:unix-close (socket-file-descriptor socket)))
        (lambda (socket stream)
          (declare (ignore stream))
          (sb-posix:close (socket-file-descriptor socket)))))

(defun octets (n &optional (seed 0))
  (let ((octets (make-array n :element-type '(unsigned-byte 8))))
    (dotimes (i n octets)
      (setf (aref octets i) (mod (+ seed (* i 7) (ash i -8)) 256)))))
