;;;; responses: what a Clack application returns

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "CLACK.HANDLER.SB-FIBER")

;;; A response is a list of status, fields and body, or a function, which is given a function to
;;; call with such a list: at once, later, or in another thread. If the list has no body, that
;;; returns a function, the writer, by which the body comes in parts.

;;;; fields

(defun field-string (name)
  "The name of a field, a symbol, as it is sent."
  (or (get name 'field-string)
      (setf (get name 'field-string) (string-capitalize name))))

(defun value-string (value)
  (if (stringp value) value (princ-to-string value)))

(defun fields-alist (fields)
  "FIELDS, a property list, as an alist, without those that the engine is to know; content length,
or NIL; and whether the connection is to be closed."
  (let ((length nil) (close-p nil))
    (values (loop for (name value) on fields by #'cddr
                  if (eq name :content-length)
                    do (setf length (if (stringp value) (parse-integer value) value))
                  else if (eq name :connection)
                    do (setf close-p (string-equal value "close"))
                  else unless (or (null value) (eq name :transfer-encoding))
                    collect (cons (field-string name) (value-string value)))
            length
            close-p)))

(defmacro with-fields (((alist length) fields exchange) &body body)
  "Execute BODY with ALIST and LENGTH bound to what FIELDS-ALIST returns for FIELDS, when EXCHANGE
has been told whether its connection is to be closed."
  `(multiple-value-bind (,alist ,length close-p) (fields-alist ,fields)
     (when close-p (setf (exchange-keep-alive-p ,exchange) nil))
     ,@body))

;;;; bodies

(defun octets-of (part)
  "PART, a string or a vector of octets, as octets."
  (etypecase part
    (octets part)
    (string (sb-ext:string-to-octets part :external-format :utf-8))
    (vector (coerce part 'octets))))

(defun octets-of-parts (parts)
  (if (and parts (null (rest parts)))
      (octets-of (first parts))
      (let* ((parts (mapcar #'octets-of parts))
             (whole (make-array (reduce #'+ parts :key #'length) :element-type '(unsigned-byte 8)))
             (end 0))
        (dolist (part parts whole)
          (replace whole (the octets part) :start1 end)
          (incf end (length part))))))

(defun send-whole (exchange status fields body)
  (with-fields ((alist length) fields exchange)
    (etypecase body
      (pathname (reply-with-file exchange body :status status :fields alist))
      ((or list vector)
       (let ((octets (if (listp body) (octets-of-parts body) (octets-of body))))
         (if (and length (head-only-p exchange))
             ;; The application has left the body out.
             (progn (begin-reply exchange status alist :length length)
                    (end-reply exchange))
             (reply exchange status alist octets)))))))

;;;; responses that are functions

;;; They may be called in any thread, and the fiber of the connection may have given up waiting:
;;; each holds LOCK while it uses the exchange, which is the fiber's again once GIVEN-UP-P is true.
(defstruct (delay (:constructor make-delay (exchange)) (:copier nil))
  "A response that is awaited."
  (exchange (sb-int:missing-arg) :read-only t)
  (lock (sb-thread:make-mutex :name "delayed response") :read-only t)
  (over (sb-thread:make-semaphore) :read-only t)
  (parts 0 :type fixnum)                ; of the response, how many have been sent
  (given-up-p nil :type boolean))
(declaim (sb-ext:freeze-type delay))

(defun note-failure (delay)
  "The response of DELAY cannot go on."
  (unless (eq (exchange-state (delay-exchange delay)) :unanswered)
    (setf (delay-given-up-p delay) t)
    (sb-thread:signal-semaphore (delay-over delay))))

(defun call-with-delayed-exchange (function delay)
  (sb-thread:with-mutex ((delay-lock delay))
    (when (delay-given-up-p delay)
      (error "The response comes too late: its request has ended."))
    (let ((done nil))
      (unwind-protect (multiple-value-prog1 (funcall function (delay-exchange delay))
                        (incf (delay-parts delay))
                        (setf done t))
        (unless done (note-failure delay))))))

(defmacro with-delayed-exchange ((exchange delay) &body body)
  "Execute BODY with EXCHANGE bound to that of DELAY, for a step of its response."
  `(call-with-delayed-exchange (lambda (,exchange) ,@body) ,delay))

(defun note-end (delay)
  (unless (member (exchange-state (delay-exchange delay)) '(:unanswered :open))
    (sb-thread:signal-semaphore (delay-over delay))))

(defun write-part (delay octets close)
  (with-delayed-exchange (exchange delay)
    (when octets (send-part exchange octets))
    (when close (end-reply exchange))
    (note-end delay)))

(defun writer (delay)
  "The function that is called with the parts of a body: strings or octets."
  (lambda (part &key (start 0) end close)
    (write-part delay
                (and part (octets-of (if (or (plusp start) end) (subseq part start end) part)))
                close)))

(defun respond (delay response)
  (destructuring-bind (status fields &optional (body nil body-p)) response
    (with-delayed-exchange (exchange delay)
      (cond (body-p (send-whole exchange status fields body)
                    (note-end delay))
            (t (with-fields ((alist length) fields exchange)
                 (begin-reply exchange status alist :length length))
               (writer delay))))))

(defun give-up (delay)
  "The response of DELAY is not awaited any more: what comes yet is an error. Wait for who is just
sending some of it."
  (setf (delay-given-up-p delay) t)
  (sb-thread:barrier (:memory))         ; who takes the lock now sees that, or is seen
  (sb-thread:with-mutex ((delay-lock delay))))

(defun give-up-at-once (delay)
  "As GIVE-UP, when the fiber is unwound: cut short what would take as long as the client likes."
  (sb-sys:without-interrupts            ; or it would be used when it is another's
    (setf (delay-given-up-p delay) t)
    (sb-thread:barrier (:memory))
    (when (sb-thread:mutex-owner (delay-lock delay))
      (shut-down (exchange-connection (delay-exchange delay))))
    (give-up delay)))

(defun response-ends-p (delay seconds)
  "Wait until the response of DELAY has ended. Return false if nothing has come for SECONDS."
  (loop
    (let ((parts (delay-parts delay)))
      (cond ((sb-thread:wait-on-semaphore (delay-over delay) :timeout seconds) (return t))
            ((sb-thread:mutex-owner (delay-lock delay))) ; the client may take its time
            ((= parts (delay-parts delay)) (return nil))))))

(defun await-response (delay exchange seconds)
  (unless (response-ends-p delay seconds)
    (give-up delay)
    (setf (exchange-keep-alive-p exchange) nil)
    (when (eq (exchange-state exchange) :unanswered)
      (reply exchange 503 '(("Content-Type" . "text/plain"))
             (string-octets (format nil "The application has not responded in time.~%"))))))

(defun call-and-await-response (exchange function socket delay seconds)
  (funcall function (lambda (response) (respond delay response)))
  (cond ((socket-used-p socket) (serve-socket socket))
        ((member (exchange-state exchange) '(:unanswered :open))
         (await-response delay exchange seconds))))

(defun call-for-response (exchange function socket seconds)
  "Call FUNCTION, a response, and wait SECONDS for what it responds, if that comes later."
  (let ((delay (make-delay exchange)) (done nil))
    (unwind-protect
         (progn (call-and-await-response exchange function socket delay seconds)
                (give-up delay)         ; others may still have the responder
                (setf done t))
      (unless done (give-up-at-once delay)))))

(defun send-response (exchange response socket seconds)
  (etypecase response
    (cons (destructuring-bind (status fields &optional body) response
            (send-whole exchange status fields body)))
    (function (call-for-response exchange response socket seconds))))
