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

;;; A frame that was sent in part would be completed by the next.
(defun send-or-end (socket octets)
  (let ((done nil))
    (unwind-protect
         (progn (send-octets (take-socket socket) octets 0 (length octets)
                             (exchange-timeout (socket-exchange socket)))
                (setf done t))
      (unless done (end-socket socket)))))

(defun write-octets (socket octets)
  (sb-thread:with-recursive-lock ((socket-lock socket))
    (unless (socket-closed-p socket) (send-or-end socket (octets-of octets)))))

(defun buffer-octets (socket octets)
  (sb-thread:with-recursive-lock ((socket-lock socket))
    (push octets (slot-value socket 'buffer))))

(defun flush-octets (socket)
  (sb-thread:with-recursive-lock ((socket-lock socket))
    (let ((parts (reverse (shiftf (slot-value socket 'buffer) '()))))
      (when parts (write-octets socket (octets-of-parts parts))))))

(defun end-and-shut-down (connection)
  (end-transport connection)
  (shut-down connection))

(defun end-socket (socket)
  "Let the client see the end of the connection, and the fiber that serves it, too."
  (sb-thread:with-recursive-lock ((socket-lock socket))
    (unless (shiftf (socket-closed-p socket) t)
      (end-and-shut-down (exchange-connection (socket-exchange socket))))))

(defun serve-socket (socket)
  "Call the read callback of SOCKET with all that comes."
  (sb-thread:with-recursive-lock ((socket-lock socket)) (take-socket socket))
  (loop
    (multiple-value-bind (octets start end) (receive-part (socket-exchange socket))
      (when (or (= start end) (socket-closed-p socket)) (return))
      (funcall (socket-read-callback socket) (subseq octets start end)))))

;;; Whoever writes holds the lock: when this has it, nobody does any more, and the descriptor may
;;; become another client's.
(defun give-socket-up (socket)
  "Nothing is written to SOCKET any more, whose connection is going to be closed, or to be used for
another request."
  (let ((exchange (socket-exchange socket)))
    (when (eq (exchange-state exchange) :taken)
      (end-and-shut-down (exchange-connection exchange)))
    (sb-thread:with-recursive-lock ((socket-lock socket))
      (setf (socket-closed-p socket) t))))

;;;; Clack's protocol

;;; Its package is there only if Clack is, and what was compiled with it may be loaded without: the
;;; methods are made when this is loaded.

(defun call-back (callback)
  (when callback (funcall callback)))

(defun write-and-call-back (socket octets &key callback)
  (write-octets socket octets)
  (call-back callback))

(defun flush-and-call-back (socket &key callback)
  (flush-octets socket)
  (call-back callback))

(defparameter *protocol*
  `(("SOCKET-ASYNC-P" (socket) ,(constantly nil))
    ("READ-CALLBACK" (socket) socket-read-callback)
    ((setf "READ-CALLBACK") (callback socket)
     ,(lambda (callback socket) (setf (socket-read-callback socket) callback)))
    ("CLOSE-SOCKET" (socket) end-socket)
    ("WRITE-SEQUENCE-TO-SOCKET" (socket data &key callback) write-and-call-back)
    ("WRITE-BYTE-TO-SOCKET" (socket byte &key callback)
     ,(lambda (socket byte &rest arguments)
        (apply #'write-and-call-back socket (vector byte) arguments)))
    ("WRITE-SEQUENCE-TO-SOCKET-BUFFER" (socket data) buffer-octets)
    ("WRITE-BYTE-TO-SOCKET-BUFFER" (socket byte)
     ,(lambda (socket byte) (buffer-octets socket (vector byte))))
    ("FLUSH-SOCKET-BUFFER" (socket &key callback) flush-and-call-back))
  "For each function of Clack's package its name, its parameters, and what does it.")

(defun specializers (lambda-list)
  (loop for parameter in lambda-list
        until (eq parameter '&key)
        collect (find-class (if (eq parameter 'socket) 'client-socket t))))

(defun define-method (name lambda-list function)
  (add-method (fdefinition name)
              (make-instance 'standard-method
                             :qualifiers '() :lambda-list lambda-list
                             :specializers (specializers lambda-list)
                             :function (lambda (arguments next-methods)
                                         (declare (ignore next-methods))
                                         (apply function arguments)))))

(defun define-protocol ()
  (flet ((clack-name (name) (intern name "CLACK.SOCKET")))
    (loop for (name lambda-list function) in *protocol*
          do (define-method (if (consp name)
                                (list 'setf (clack-name (second name)))
                                (clack-name name))
               lambda-list function))))

(when (find-package "CLACK.SOCKET") (define-protocol))
