;;;; connections with TLS

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.
(in-package "SB-FIBER-HTTP-TLS")

;;; OpenSSL reads from and writes to the socket itself, which does not block, and returns when it
;;; must wait: the engine then waits, and calls again. The handshake is a part of the first reads.
;;;
;;; What a call left in the queue of errors belongs to the OS thread, and one SSL object is for one
;;; thread at a time: with interrupts off, and the lock held, none parks and no other comes between.

(defstruct (tls-transport (:include sb-fiber-http:transport)
                          (:constructor make-tls-transport (ssl))
                          (:copier nil))
  "An SSL object of OpenSSL."
  (ssl nil :type (or null sb-sys:system-area-pointer)) ; NIL when it was freed
  (lock (sb-thread:make-mutex :name "SSL") :read-only t)
  ;; Has OpenSSL failed? It must not be asked to say goodbye then.
  (failed-p nil :type boolean))
(declaim (sb-ext:freeze-type tls-transport))

(defmacro openssl (name (&rest types) &rest arguments)
  "Call the function NAME of OpenSSL, which returns an integer."
  `(sb-alien:alien-funcall
    (sb-alien:extern-alien ,name (function sb-alien:int ,@types))
    ,@arguments))

;;; A record that could be sent in part only is sent on from wherever the collector has moved it.
(defconstant +control-mode+ 33)         ; SSL_CTRL_MODE
(defconstant +mode+ #b11)               ; ENABLE_PARTIAL_WRITE, ACCEPT_MOVING_WRITE_BUFFER

(defun new-ssl (tls)
  (with-slots (lock context) tls
    (sb-thread:with-mutex (lock)
      (cffi:foreign-funcall "SSL_new" :pointer (first context) :pointer))))

(defmethod sb-fiber-http:make-transport ((tls tls) fd)
  (sb-sys:without-interrupts
    (clear-errors)
    (let ((ssl (new-ssl tls)))
      (when (cffi:null-pointer-p ssl)
        (error 'tls-error :what "Cannot serve a client" :reason (first-error)))
      (cffi:foreign-funcall "SSL_ctrl" :pointer ssl :int +control-mode+ :long +mode+
                                       :pointer (cffi:null-pointer) :long)
      (cffi:foreign-funcall "SSL_set_fd" :pointer ssl :int fd :int)
      (cffi:foreign-funcall "SSL_set_accept_state" :pointer ssl :void)
      (make-tls-transport ssl))))

(defmacro with-ssl ((ssl transport &optional freed) &body body)
  "Execute BODY with SSL bound to that of TRANSPORT, or FREED if there is none any more."
  `(sb-sys:without-interrupts
     (sb-thread:with-mutex ((tls-transport-lock ,transport))
       (let ((,ssl (tls-transport-ssl ,transport)))
         (if ,ssl (progn ,@body) ,freed)))))

(defconstant +want-read+ 2)             ; of SSL_get_error(3)
(defconstant +want-write+ 3)
(defconstant +zero-return+ 6)

(defconstant +econnreset+ 104)          ; of Linux

;;; It is of no use to know what a client has done wrong, but for others on this carrier to find it
;;; in the queue.
(defun note-failure (transport)
  (clear-errors)
  (setf (tls-transport-failed-p transport) t)
  (values nil +econnreset+))

(defun outcome (transport ssl result)
  "What RESULT of a call means: see TRANSPORT-READ."
  (if (plusp result)
      result
      (let ((error (openssl "SSL_get_error" (sb-sys:system-area-pointer sb-alien:int) ssl result)))
        (cond ((= error +want-read+) (values nil :input))
              ((= error +want-write+) (values nil :output))
              ((= error +zero-return+) 0)
              (t (note-failure transport))))))

(defmacro define-transfer (name function documentation)
  `(defmethod ,name ((transport tls-transport) sap n)
     ,documentation
     (with-ssl (ssl transport (values nil +econnreset+))
       (clear-errors)
       (outcome transport ssl
                (openssl ,function (sb-sys:system-area-pointer sb-sys:system-area-pointer
                                                               sb-alien:int)
                         ssl sap (min n 65536))))))

(define-transfer sb-fiber-http:transport-read "SSL_read" "Receive what the client has encrypted.")
(define-transfer sb-fiber-http:transport-write "SSL_write" "Send something, encrypted.")

(defmethod sb-fiber-http:transport-pending-p ((transport tls-transport))
  (with-ssl (ssl transport)
    (plusp (openssl "SSL_pending" (sb-sys:system-area-pointer) ssl))))

(defmethod sb-fiber-http:transport-end ((transport tls-transport))
  (with-ssl (ssl transport)
    (unless (tls-transport-failed-p transport)
      (clear-errors)
      (let ((result (openssl "SSL_shutdown" (sb-sys:system-area-pointer) ssl)))
        ;; 0 means that the client has not said goodbye yet, which nobody waits for.
        (when (minusp result)
          (let ((direction (nth-value 1 (outcome transport ssl result))))
            (and (eq direction :output) direction)))))))

(defmethod sb-fiber-http:transport-free ((transport tls-transport))
  (with-ssl (ssl transport)
    (setf (tls-transport-ssl transport) nil)
    (cffi:foreign-funcall "SSL_free" :pointer ssl :void)))
