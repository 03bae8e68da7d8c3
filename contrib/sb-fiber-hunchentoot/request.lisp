;;;; requests whose parts are computed when they are asked for

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-HUNCHENTOOT")

;;; Most handlers look at few parts of a request: the rest are slots that are unbound until somebody
;;; reads them. A request of this very class is made without MAKE-INSTANCE, whose :AFTER method
;;; would compute them all; for subclasses everything is done as in Hunchentoot.

(defclass fiber-request (hunchentoot:request)
  ((head :initarg :head
         :initform nil
         :reader request-head
         :documentation "The head as it was received, or NIL.")
   (socket :initarg :socket
           :initform nil
           :reader request-socket))
  (:documentation "The class of requests of a FIBER-ACCEPTOR."))

;;;; fields

;;; Hunchentoot interns the name of each field that a client sends. Here a name becomes a keyword if
;;; there is one: if a program asks for it by a keyword there is.
(defun field-key (name)
  (or (gethash name chunga::+string-to-keyword-hash+)
      (find-symbol (string-upcase name) "KEYWORD")
      (string-upcase name)))

(defun fields-alist (head)
  "The fields of HEAD as an alist of keywords and strings; values of the same name are combined."
  (let ((fields '()))
    (map-fields (lambda (name value)
                  (let* ((key (field-key name))
                         (field (assoc key fields :test #'equal)))
                    (if field
                        (setf (cdr field) (concatenate 'string (cdr field) "," value))
                        (push (cons key value) fields))))
                head)
    (nreverse fields)))

(defun named-field (head name)
  "The value of the first field of HEAD that is called NAME, in lower case, or NIL."
  (let ((n (head-field head name)))
    (and n (field-value head n))))

;;;; what is computed at once

(defun method-keyword (head)
  (cond ((head-method-is-p head "GET") :get)
        ((head-method-is-p head "POST") :post)
        (t (let ((method (head-method head)))
             ;; A client must not fill the package. To a proxy, "get" is another method.
             (or (find-symbol method "KEYWORD")
                 (refuse-method method))))))

(defun refuse-method (method)
  (error 'bad-request :status 501 :reason (format nil "The method ~A is not known." method)))

(defun external-format-of-request (head)
  (let ((type (named-field head "content-type")))
    (or (and type (hunchentoot::external-format-from-content-type type))
        hunchentoot::+utf-8+)))

(defun plain-uri-p (uri)
  "Does URI say what it says, with nothing to be decoded?"
  (and (plusp (length uri)) (char= (char uri 0) #\/)
       (not (find-if (lambda (character)
                       (or (char= character #\%) (char= character #\+) (char> character #\~)))
                     uri))))

(defun decoded-script-name (path head)
  (cl-ppcre:regex-replace "^https?://[^/]+"
                          (hunchentoot:url-decode path (external-format-of-request head))
                          ""))

(defun set-uri (request uri head)
  "Set what REQUEST says of URI."
  (with-slots (hunchentoot::uri hunchentoot:script-name hunchentoot:query-string) request
    (let* ((end (position #\? uri)) (path (if end (subseq uri 0 end) uri)))
      (setf hunchentoot::uri uri
            hunchentoot:query-string (and end (subseq uri (1+ end)))
            hunchentoot:script-name (if (plain-uri-p path) path (decoded-script-name path head))))))

;;; A session is looked up, which keeps it alive, if the client may have one.
(defun verify-session (request head)
  (when (or (head-field head "cookie") (hunchentoot:query-string request))
    (setf (slot-value request 'hunchentoot:session) (hunchentoot:session-verify request)
          hunchentoot:*session* (slot-value request 'hunchentoot:session))))

(defun protocol-keyword (head)
  (if (= 1 (head-minor-version head)) :http/1.1 :http/1.0))

;;; What cannot be decoded is the client's fault, and is found out now.
(defun set-what-uri-says (request head)
  (hunchentoot::handler-case*
   (progn
     (set-uri request (head-target head) head)
     (when (find #\% (hunchentoot:query-string request))
       (hunchentoot:get-parameters request))
     (verify-session request head))
   (error (condition)
     (hunchentoot:log-message* :error "Error when creating REQUEST object: ~A" condition)
     (setf (hunchentoot:return-code*) hunchentoot:+http-bad-request+))))

(defun make-lazy-request (acceptor socket head stream)
  "Make a FIBER-REQUEST for what HEAD says, without computing more than is nearly always needed."
  (let ((request (allocate-instance (load-time-value (find-class 'fiber-request))))
        (head (copy-of-head head)))     ; the request may outlive the connection
    (macrolet ((set-slots (&rest slots-and-values)
                 `(setf ,@(loop for (slot value) on slots-and-values by #'cddr
                                append `((slot-value request ',slot) ,value)))))
      (set-slots head head
                 socket socket
                 hunchentoot:acceptor acceptor
                 hunchentoot::method (method-keyword head)
                 hunchentoot:server-protocol (protocol-keyword head)
                 hunchentoot::content-stream stream
                 hunchentoot:post-parameters nil
                 hunchentoot:session nil
                 hunchentoot::aux-data nil
                 hunchentoot:raw-post-data nil))
    (set-what-uri-says request head)
    request))

(defun make-full-request (acceptor socket head stream)
  (hunchentoot::acceptor-make-request acceptor socket
                                      :headers-in (fields-alist head)
                                      :content-stream stream
                                      :method (method-keyword head)
                                      :uri (head-target head)
                                      :server-protocol (protocol-keyword head)))

(defun make-request (acceptor socket head stream)
  "Make the request that HEAD is the head of, of the class that ACCEPTOR wants."
  (if (eq (hunchentoot:acceptor-request-class acceptor) 'fiber-request)
      (make-lazy-request acceptor socket head stream)
      (make-full-request acceptor socket head stream)))

;;;; what is computed when it is asked for

(defun compute-get-parameters (request)
  (let ((hunchentoot::*substitution-char* #\?))
    (hunchentoot::form-url-encoded-list-to-alist
     (cl-ppcre:split "&" (hunchentoot:query-string request))
     (external-format-of-request (request-head request)))))

(defun compute-cookies (request)
  (hunchentoot::cookies-to-alist
   (cl-ppcre:split "\\s*[,;]\\s*" (cdr (assoc :cookie (hunchentoot:headers-in request))))))

(defun compute-slot (request slot)
  "What the slot named SLOT of REQUEST, which is unbound, should hold; and whether it is known."
  (flet ((end (function n)
           (nth n (multiple-value-list (funcall function (request-socket request))))))
    (values
     (case slot
       (hunchentoot:headers-in (fields-alist (request-head request)))
       (hunchentoot:get-parameters (compute-get-parameters request))
       (hunchentoot:cookies-in (compute-cookies request))
       (hunchentoot:remote-addr (end 'hunchentoot::get-peer-address-and-port 0))
       (hunchentoot:remote-port (end 'hunchentoot::get-peer-address-and-port 1))
       (hunchentoot:local-addr (end 'hunchentoot::get-local-address-and-port 0))
       (hunchentoot:local-port (end 'hunchentoot::get-local-address-and-port 1))
       (t (return-from compute-slot (values nil nil))))
     t)))

(defmethod slot-unbound (class (request fiber-request) slot)
  (multiple-value-bind (value known-p) (compute-slot request slot)
    (if known-p
        (setf (slot-value request slot) value)
        (call-next-method))))
