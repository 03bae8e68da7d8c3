;;;; what a server shows to its clients: certificate and key

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.
(in-package "SB-FIBER-HTTP-TLS")

;;; CL+SSL loads OpenSSL and makes its contexts; what it has no function for, or waits in, is called
;;; here. A context is counted by OpenSSL: one that was renewed is freed when the last connection
;;; that it was made for has ended.

(defclass tls ()
  ((context :initform (list nil)
            :documentation "A list of the context, a foreign pointer; or of NIL.")
   (lock :initform (sb-thread:make-mutex :name "TLS")))
  (:documentation "A certificate and its key, for SB-FIBER-HTTP:START-SERVER."))

(defun free-context (context)
  (when context (cl+ssl:ssl-ctx-free context)))

(defmethod initialize-instance :after ((tls tls) &key)
  (let ((context (slot-value tls 'context)))
    (sb-ext:finalize tls (lambda () (free-context (first context))) :dont-save t)))

(define-condition tls-error (error)
  ((what :initarg :what)
   (reason :initarg :reason))
  (:report (lambda (condition stream)
             (with-slots (what reason) condition
               (format stream "~A: ~A" what reason))))
  (:documentation "The error that is signaled when OpenSSL does not take a certificate or a key."))

(defun clear-errors ()
  "Let the queue of errors of this OS thread, which other fibers have used, be empty."
  (cffi:foreign-funcall "ERR_clear_error" :void))

(defun first-error ()
  "What the queue of errors of this OS thread begins with, a string."
  (let ((code (cffi:foreign-funcall "ERR_get_error" :unsigned-long)))
    (if (= code 0)
        "OpenSSL gives no reason."
        (cffi:with-foreign-pointer-as-string (buffer 256)
          (cffi:foreign-funcall "ERR_error_string_n" :unsigned-long code :pointer buffer :size 256
                                                     :void)))))

;;; No other fiber of this carrier comes in between and has the queue of errors for itself; nor
;;; finds ours there, and takes it for what its own call has done, as CL+SSL would.
(defun reason-unless-done (call)
  "Call CALL, which calls OpenSSL. Return NIL if that returns 1, or else the reason."
  (declare (function call))
  (sb-sys:without-interrupts
    (clear-errors)
    (unless (= 1 (the fixnum (funcall call)))
      (prog1 (first-error)
        (clear-errors)))))

(defmacro checked ((control &rest arguments) &body call)
  "Execute CALL, a call of OpenSSL, and signal a TLS-ERROR unless it returns 1."
  `(let ((reason (reason-unless-done (lambda () ,@call))))
     (when reason
       (error 'tls-error :what (format nil ,control ,@arguments) :reason reason))))

(defconstant +file-of-pem+ 1)

(defun load-key (context key password)
  ;; An error must not be signalled within OpenSSL, which asks for it by a callback.
  (unless (every (lambda (character) (typep character 'base-char)) password)
    (error 'tls-error :what (format nil "Cannot use the key ~A" key)
                      :reason "its password has characters that are not of ASCII."))
  (cl+ssl:with-pem-password ((or password ""))
    (checked ("Cannot use the key ~A" key)
      (cffi:foreign-funcall "SSL_CTX_use_PrivateKey_file" :pointer context :string key
                                                          :int +file-of-pem+ :int))))

(defun load-certificate (context certificate key password)
  (let ((certificate (sb-ext:native-namestring (merge-pathnames certificate)))
        (key (sb-ext:native-namestring (merge-pathnames key))))
    (checked ("Cannot use the certificate ~A" certificate)
      (cffi:foreign-funcall "SSL_CTX_use_certificate_chain_file" :pointer context
                                                                 :string certificate :int))
    (load-key context key password)
    (checked ("The key ~A is not that of the certificate ~A" key certificate)
      (cffi:foreign-funcall "SSL_CTX_check_private_key" :pointer context :int))))

(defconstant +no-renegotiation+ (ash 1 30)) ; SSL_OP_NO_RENEGOTIATION

;;; A client that renegotiates has us compute; and a writer would then read what its reader awaits.
(defun new-context ()
  (let ((context (cl+ssl:make-context :verify-mode cl+ssl:+ssl-verify-none+ :verify-location nil
                                      :min-proto-version cl+ssl::+tls1-2-version+
                                      :options '() :cipher-list "DEFAULT")))
    (cffi:foreign-funcall "SSL_CTX_set_options" :pointer context :uint64 +no-renegotiation+
                                                :uint64)
    context))

(defun make-context (certificate key password)
  (let ((context (new-context)) (done nil))
    (unwind-protect (progn (load-certificate context certificate key password)
                           (setf done t)
                           context)
      (unless done (free-context context)))))

(defun make-tls (certificate key &key password)
  "Return a TLS, which SB-FIBER-HTTP:START-SERVER takes as its argument :TLS, for the files at
CERTIFICATE and KEY, pathname designators: a certificate, with those that it depends on behind it,
and its key, both in PEM format. PASSWORD is that of the key, a string, or NIL. Signals TLS-ERROR.
Clients must know TLS 1.2 or 1.3."
  (renew-tls (make-instance 'tls) certificate key :password password))

(defun renew-tls (tls certificate key &key password)
  "Let servers with TLS use the files at CERTIFICATE and KEY, as for MAKE-TLS, for all connections
that begin from now on. Returns TLS. Signals TLS-ERROR, and nothing has changed then."
  (let ((new (make-context certificate key password)))
    (with-slots (lock context) tls
      (sb-sys:without-interrupts
        (free-context (sb-thread:with-mutex (lock)
                        (shiftf (first context) new)))))
    tls))
