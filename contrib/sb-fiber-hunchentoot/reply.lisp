;;;; replies that are strings or octets

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-HUNCHENTOOT")

;;; Nearly all handlers return what is to be sent, and the reply of Hunchentoot's own class says
;;; how. Head and body are then put together and sent in one go. All else is done by Hunchentoot's
;;; START-OUTPUT: chunks, replies to HEAD, classes and log streams of users, sessions in URLs.

(defun simple-reply-p (reply request contents)
  "Does the reply consist of CONTENTS and of what REPLY says?"
  (and (request-head request)
       (typep contents '(or string (vector (unsigned-byte 8))))
       (eq (class-of reply) (load-time-value (find-class 'hunchentoot:reply)))
       (not (eq (hunchentoot:request-method request) :head))
       (null hunchentoot:*header-stream*)
       (not (and hunchentoot:*rewrite-for-session-urls* hunchentoot:*session*))
       (< 199 (hunchentoot:return-code reply) 600)
       (not (member (hunchentoot:return-code reply) '(204 304)))))

;;;; contents

(defun utf-8-or-latin-1 (external-format)
  "The encoding of EXTERNAL-FORMAT, one of FLEXI-STREAMS, if it is one of SBCL's own, or NIL."
  (and (eq (flexi-streams:external-format-eol-style external-format) :lf)
       (case (flexi-streams:external-format-name external-format)
         (:utf-8 :utf-8)
         (:iso-8859-1 :latin-1))))

(defun encoded (contents external-format)
  "CONTENTS, a string or octets, as simple octets."
  (etypecase contents
    (octets contents)
    (string
     (let ((encoding (utf-8-or-latin-1 external-format)))
       (coerce (if encoding
                   (sb-ext:string-to-octets contents :external-format encoding)
                   (flexi-streams:string-to-octets contents :external-format external-format))
               'octets)))
    (vector (coerce contents 'octets))))

(sb-ext:define-load-time-global *content-types* '())

(defun content-type-of-string (content-type external-format)
  "CONTENT-TYPE with the character set of EXTERNAL-FORMAT, if it has none and is one of text."
  (loop for (type format . result) in *content-types*
        when (and (eq format external-format) (equal type content-type))
          do (return-from content-type-of-string result))
  (let ((result (hunchentoot::maybe-add-charset-to-content-type-header content-type
                                                                       external-format)))
    ;; There are few; a program that makes them up must not fill the heap.
    (when (< (length *content-types*) 32)
      (sb-ext:atomic-push (list* content-type external-format result) *content-types*))
    result))

;;;; fields

(defun simple-value-p (value)
  (or (null value) (integerp value)
      (and (stringp value) (value-string-p value))))

(defun simple-fields-p (reply)
  "Has REPLY only fields that can be put as they are?"
  (and (loop for (nil . value) in (hunchentoot:headers-out reply) always (simple-value-p value))
       (null (hunchentoot:cookies-out reply))))

(defun put-fields (output reply)
  (loop for (key . value) in (hunchentoot:headers-out reply)
        when (and value (not (member key '(:content-length :date))))
          do (put-field output (chunga:as-capitalized-string key)
                        (if (stringp value) value (princ-to-string value)))))

(defun set-connection-fields (acceptor request keep-alive-p)
  "Set the fields that tell whether the connection is kept, as START-OUTPUT does."
  (let ((timeout (hunchentoot:acceptor-read-timeout acceptor)))
    (cond ((not keep-alive-p)
           (unless (hunchentoot::header-out-set-p :connection)
             (setf (hunchentoot:header-out :connection) "Close")))
          ((and timeout (or (head-keep-alive-asked-p (request-head request))
                           (not (eq (hunchentoot:server-protocol request) :http/1.1))))
           (unless (hunchentoot:header-out :connection)
             (setf (hunchentoot:header-out :connection) "Keep-Alive"))
           (setf (hunchentoot:header-out :keep-alive) (format nil "timeout=~D" timeout))))))

(defun set-server-field (acceptor)
  (unless (hunchentoot::header-out-set-p :server)
    (setf (hunchentoot:header-out :server) (hunchentoot::acceptor-server-name acceptor))))

(defun keep-alive-p (acceptor request)
  (and (hunchentoot:acceptor-persistent-connections-p acceptor)
       ;; What follows a request to upgrade may be anything.
       (not (eq :taken (exchange-state (stream-exchange hunchentoot::*hunchentoot-stream*))))
       (head-keep-alive-p (request-head request))))

(defun set-fields (acceptor request reply contents format)
  "Set in REPLY what START-OUTPUT sets, but for length and date."
  (let ((keep-alive-p (keep-alive-p acceptor request)))
    (when keep-alive-p (setf hunchentoot::*finish-processing-socket* nil))
    (when (stringp contents)
      (setf (hunchentoot:content-type*)
            (content-type-of-string (hunchentoot:content-type reply) format)))
    (set-connection-fields acceptor request keep-alive-p)
    (set-server-field acceptor)))

(sb-ext:define-load-time-global *status-lines* (make-array 600 :initial-element nil))
(declaim (type (simple-vector 600) *status-lines*))

(defun put-status (output status)
  "Put the status line with Hunchentoot's own reason phrase."
  (let ((line (or (aref *status-lines* status)
                  (setf (aref *status-lines* status)
                        (status-line status (hunchentoot:reason-phrase status))))))
    (put-octets output line 0 (length (the octets line)))))

(defun put-reply-head (output reply length)
  (put-status output (hunchentoot:return-code reply))
  (put-date output)
  (put-fields output reply)
  (put-constant output "Content-Length: ")
  (put-number output length)
  (put-constant output "||"))

;;; Ending the output of a stream that was not used is a look at a dozen cold cache lines.
(defvar *past-stream-p* nil
  "Was the reply to the request that is being served sent past its stream, and whole?")

(defun send-simple-reply (acceptor request reply contents stream)
  "Send CONTENTS with what REPLY says to the client at STREAM."
  (let* ((format (hunchentoot:reply-external-format reply))
         (octets (encoded contents format))
         (length (length octets)))
    (set-fields acceptor request reply contents format)
    (setf hunchentoot::*headers-sent* t
          (hunchentoot:content-length*) length)
    (hunchentoot:acceptor-log-access acceptor :return-code (hunchentoot:return-code reply))
    (with-output (output)
      (put-reply-head output reply length)
      (send-output (client-connection stream) output octets length
                   (hunchentoot:acceptor-write-timeout acceptor)))
    (setf *past-stream-p* t)))
