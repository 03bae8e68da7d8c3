;;;; sockets of Clack: connections that an application takes, for websockets

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "CLACK.HANDLER.SB-FIBER")

;;; What an environment has as :CLACK.IO. An application that wants the connection sets the read
;;; callback, and writes whatever it likes, from any thread; the fiber of the connection then calls
;;; that with all octets that come, until the client or the application closes the connection.

(defclass client-socket ()
  ((exchange :initarg :exchange
             :reader socket-exchange)
   (read-callback :initform nil
                  :accessor socket-read-callback)
   (buffer :initform '()
           :documentation "Octets that wait to be flushed, the last first.")
   (closed-p :initform nil
             :accessor socket-closed-p)
   (lock :initform (sb-thread:make-mutex :name "Clack socket")
         :reader socket-lock))
  (:documentation "A connection, for an application that takes it."))

(defun make-client-socket (exchange)
  (make-instance 'client-socket :exchange exchange))

(defun socket-used-p (socket)
  (and (socket-read-callback socket) t))

(defun take-socket (socket)
  "Have the connection of SOCKET taken."
  (let ((exchange (socket-exchange socket)))
    (unless (eq (exchange-state exchange) :taken) (take-connection exchange))
    (exchange-connection exchange)))

(defun write-octets (socket octets)
  (sb-thread:with-recursive-lock ((socket-lock socket))
    (unless (socket-closed-p socket)
      (let ((octets (octets-of octets)))
        (send-octets (take-socket socket) octets 0 (length octets)
                     (deadline-after (exchange-timeout (socket-exchange socket))))))))

(defun buffer-octets (socket octets)
  (sb-thread:with-recursive-lock ((socket-lock socket))
    (push octets (slot-value socket 'buffer))))

(defun flush-octets (socket)
  (sb-thread:with-recursive-lock ((socket-lock socket))
    (let ((parts (reverse (shiftf (slot-value socket 'buffer) '()))))
      (when parts (write-octets socket (octets-of-parts parts))))))

(defun end-socket (socket)
  "Let the client see the end of the connection, and the fiber that serves it, too."
  (sb-thread:with-recursive-lock ((socket-lock socket))
    (unless (shiftf (socket-closed-p socket) t)
      (shut-down (exchange-connection (socket-exchange socket))))))

(defun serve-socket (socket)
  "Call the read callback of SOCKET with all that comes."
  (take-socket socket)
  (unwind-protect
       (loop
         (multiple-value-bind (octets start end) (receive-part (socket-exchange socket))
           (when (or (= start end) (socket-closed-p socket)) (return))
           (funcall (socket-read-callback socket) (subseq octets start end))))
    (setf (socket-closed-p socket) t)))

;;;; Clack's protocol

(defun call-back (callback)
  (when callback (funcall callback)))

(macrolet ((define-protocol (&body methods)
             ;; Its package is there only if Clack is.
             (when (find-package "CLACK.SOCKET")
               `(progn
                  ,@(loop for (name lambda-list . body) in methods
                          collect
                          (flet ((clack-name (name) (intern name "CLACK.SOCKET")))
                            `(defmethod ,(if (consp name)
                                             (list 'setf (clack-name (second name)))
                                             (clack-name name))
                                 ,lambda-list
                               ,@body)))))))
  (define-protocol
    ("SOCKET-ASYNC-P" ((socket client-socket)) nil)
    ("READ-CALLBACK" ((socket client-socket)) (socket-read-callback socket))
    (("SETF" "READ-CALLBACK") (callback (socket client-socket))
     (setf (socket-read-callback socket) callback))
    ("CLOSE-SOCKET" ((socket client-socket)) (end-socket socket))
    ("WRITE-SEQUENCE-TO-SOCKET" ((socket client-socket) data &key callback)
     (write-octets socket data)
     (call-back callback))
    ("WRITE-BYTE-TO-SOCKET" ((socket client-socket) byte &key callback)
     (write-octets socket (vector byte))
     (call-back callback))
    ("WRITE-SEQUENCE-TO-SOCKET-BUFFER" ((socket client-socket) data)
     (buffer-octets socket data))
    ("WRITE-BYTE-TO-SOCKET-BUFFER" ((socket client-socket) byte)
     (buffer-octets socket (vector byte)))
    ("FLUSH-SOCKET-BUFFER" ((socket client-socket) &key callback)
     (flush-octets socket)
     (call-back callback))))
