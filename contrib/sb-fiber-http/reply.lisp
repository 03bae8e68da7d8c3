;;;; replies

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-HTTP")

;;; Head and body of a reply are sent by one system call. They are put into one vector for it, but
;;; for a large body, which is named in the call: copying it would cost more than that.

(defconstant +largest-copied-body+ 16384)

(defstruct (output (:constructor make-output (octets)) (:copier nil))
  "Octets that are going to be sent."
  (octets (sb-int:missing-arg) :type octets)
  (fill 0 :type index))
(declaim (sb-ext:freeze-type output))

(defun have-room (output n)
  "Have room for N octets in OUTPUT."
  (declare (type index n))
  (let* ((octets (output-octets output)) (needed (+ (output-fill output) n)))
    (when (> needed (length octets))
      (setf (output-octets output)
            (replace (make-array (max needed (* 2 (length octets)))
                                 :element-type '(unsigned-byte 8))
                     octets :end2 (output-fill output))))))

(defun put-octets (output octets start end)
  (declare (type octets octets) (type index start end))
  (have-room output (- end start))
  (replace (output-octets output) octets :start1 (output-fill output) :start2 start :end2 end)
  (incf (output-fill output) (- end start)))

(defmacro put-constant (output string)
  "Put STRING, a literal of ASCII, in which | stands for CR LF."
  (let ((octets (loop for character across string
                      append (if (char= character #\|)
                                 (list +cr+ +lf+)
                                 (list (char-code character))))))
    `(put-octets ,output
                 (load-time-value (coerce ',octets 'octets) t)
                 0 ,(length octets))))

(defun refuse-character (code)
  (error "The character ~S must not be in a field of a reply." (code-char code)))

(defmacro define-put (name kind documentation)
  "Define NAME as a function that puts a string into an OUTPUT. All of its octets must be of KIND,
or who has chosen the string could split the reply in two."
  `(defun ,name (output string)
     ,documentation
     (let ((string (coerce string 'simple-string)))
       (have-room output (length string))
       (let ((octets (output-octets output)) (fill (output-fill output)))
         (declare (type index fill))
         (do-codes (code string)
           (unless (and (< code 256) (,kind code)) (refuse-character code))
           (setf (aref octets fill) code)
           (incf fill))
         (setf (output-fill output) fill)))))

(define-put put-token token-octet-p "Put STRING, the name of a field.")
(define-put put-value value-octet-p "Put STRING, of Latin-1, the value of a field.")

(defun put-number (output n)
  "Put the decimal digits of N, which is not negative."
  (declare (type index n))
  (have-room output 20)
  (let* ((octets (output-octets output))
         (n-digits (loop for rest of-type index = n then (floor rest 10)
                         count t until (< rest 10)))
         (end (+ (output-fill output) n-digits)))
    (loop for i from (1- end) downto (output-fill output)
          do (multiple-value-bind (rest digit) (floor n 10)
               (setf (aref octets i) (+ (octet #\0) digit)
                     n rest)))
    (setf (output-fill output) end)))

;;;; status lines

(defparameter *reasons*
  '((100 . "Continue") (101 . "Switching Protocols") (200 . "OK") (201 . "Created")
    (202 . "Accepted") (203 . "Non-Authoritative Information") (204 . "No Content")
    (205 . "Reset Content") (206 . "Partial Content") (207 . "Multi-Status")
    (300 . "Multiple Choices") (301 . "Moved Permanently") (302 . "Found") (303 . "See Other")
    (304 . "Not Modified") (307 . "Temporary Redirect") (308 . "Permanent Redirect")
    (400 . "Bad Request") (401 . "Unauthorized") (402 . "Payment Required") (403 . "Forbidden")
    (404 . "Not Found") (405 . "Method Not Allowed") (406 . "Not Acceptable")
    (407 . "Proxy Authentication Required") (408 . "Request Timeout") (409 . "Conflict")
    (410 . "Gone") (411 . "Length Required") (412 . "Precondition Failed")
    (413 . "Content Too Large") (414 . "URI Too Long") (415 . "Unsupported Media Type")
    (416 . "Range Not Satisfiable") (417 . "Expectation Failed") (421 . "Misdirected Request")
    (422 . "Unprocessable Content") (424 . "Failed Dependency") (425 . "Too Early")
    (426 . "Upgrade Required") (428 . "Precondition Required") (429 . "Too Many Requests")
    (431 . "Request Header Fields Too Large") (451 . "Unavailable For Legal Reasons")
    (500 . "Internal Server Error") (501 . "Not Implemented") (502 . "Bad Gateway")
    (503 . "Service Unavailable") (504 . "Gateway Timeout") (505 . "HTTP Version Not Supported")
    (507 . "Insufficient Storage") (511 . "Network Authentication Required"))
  "The status codes that are registered, and their reason phrases.")

(defun reason-phrase (status)
  "Return the reason phrase of STATUS, a string, which is empty if none is known."
  (or (cdr (assoc status *reasons*)) ""))

(defun status-line (status &optional (phrase (reason-phrase status)))
  "Return the line with STATUS and PHRASE, octets, CR LF included."
  (string-octets (format nil "HTTP/1.1 ~D ~A~C~C" status phrase #\Return #\Newline)))

(sb-ext:define-load-time-global *status-lines*
    (let ((lines (make-array 600 :initial-element nil)))
      (loop for (status) in *reasons* do (setf (aref lines status) (status-line status)))
      lines))
(declaim (type (simple-vector 600) *status-lines*))

(defun put-status-line (output status)
  (declare (type (integer 100 599) status))
  (let ((line (or (aref *status-lines* status) (status-line status))))
    (put-octets output line 0 (length (the octets line)))))

;;;; the date

(defun date-field (universal-time)
  "The field Date for UNIVERSAL-TIME, octets with CR LF."
  (string-octets (format nil "Date: ~A~C~C" (date-string universal-time) #\Return #\Newline)))

(sb-ext:define-load-time-global *date* (cons 0 (make-array 0 :element-type '(unsigned-byte 8))))
(declaim (type cons *date*))

(defun put-date (output)
  "Put the field Date, which is made once a second."
  (let ((now (get-universal-time)) (date *date*))
    (unless (= now (the unsigned-byte (car date)))
      (setf date (cons now (date-field now))
            *date* date))
    (put-octets output (cdr date) 0 (length (the octets (cdr date))))))

;;;; replies

(defun put-field (output name value)
  "Put the field NAME with VALUE, strings."
  (put-token output name)
  (put-constant output ": ")
  (put-value output value)
  (put-constant output "|"))

;;; RFC 9110, 8.6: these have no body, and 1xx and 204 no length either.
(defun body-allowed-p (status)
  (not (or (< status 200) (= status 204) (= status 304))))

;;; Two framings in one head: a proxy may believe the other one.
(defun refuse-field (name)
  (error "The field ~A of a reply is for the server: it must not be among the FIELDS." name))

(defun server-option-p (value)
  "Does VALUE, of the field Connection, tell whether it is kept, as the server does?"
  (or (string-equal value "close") (string-equal value "keep-alive")))

(defun kind-of-field (name value)
  "What a field of a reply, NAME and VALUE, is: :DATE; :OPTION, if the server tells the same; or
NIL. Signals an error if it is for the server alone."
  (flet ((is (other) (string-equal name other)))
    (case (length name)
      (4 (and (is "date") :date))
      (10 (and (is "connection") (server-option-p value) :option))
      (14 (and (is "content-length") (refuse-field name)))
      (17 (and (is "transfer-encoding") (refuse-field name))))))

(defun put-fields (output fields)
  "Put FIELDS, and the date, if it is not among them."
  (let ((date-p nil))
    (loop for (name . value) in fields
          for kind = (kind-of-field name value)
          do (when (eq kind :date) (setf date-p t))
             (unless (eq kind :option) (put-field output name value)))
    (unless date-p (put-date output))))

(defun closing-fields-p (fields)
  "Do FIELDS tell that the connection is going to be closed?"
  (loop for (name . value) in fields
          thereis (and (string-equal name "connection") (string-equal value "close"))))

(defun put-head (output status fields &key length (chunked-p nil) (keep-alive-p t))
  "Put the head of a reply. LENGTH is that of the body, or NIL. KEEP-ALIVE-P is :TOLD if the client
does not expect that the connection is kept."
  (put-status-line output status)
  (put-fields output fields)
  (when length
    (put-constant output "Content-Length: ")
    (put-number output length)
    (put-constant output "|"))
  (when chunked-p (put-constant output "Transfer-Encoding: chunked|"))
  (case keep-alive-p
    ((nil) (put-constant output "Connection: close|"))
    (:told (put-constant output "Connection: keep-alive|")))
  (put-constant output "|"))

(defun send-output (connection output body sent seconds)
  "Send what has been put into OUTPUT, a head, and then SENT octets of BODY. The client must take
them as SEND-OCTETS says."
  (cond ((<= sent +largest-copied-body+)
         (put-octets output body 0 sent)
         (send-octets connection (output-octets output) 0 (output-fill output) seconds))
        (t (send-both connection (output-octets output) (output-fill output) body sent seconds))))

(defmacro with-output ((output) &body body)
  "Execute BODY with OUTPUT bound to an OUTPUT that is empty."
  `(let ((,output (make-output (take-buffer))))
     (multiple-value-prog1 (progn ,@body)
       (give-buffer-back (output-octets ,output)))))

(defun send-reply (connection status fields body &key (head-only-p nil) (keep-alive-p t) seconds)
  "Send a whole reply to the client of CONNECTION: the integer STATUS, FIELDS, an alist of strings,
and BODY, octets. If HEAD-ONLY-P the body is not sent, but its length is. The client must take each
262,144 octets within SECONDS, or any time if that is NIL. Signals TIMED-OUT and CONNECTION-LOST;
and an error if a field has characters that it must not have, or is one of the server's."
  (declare (type octets body))
  (let* ((length (and (body-allowed-p status) (length body)))
         (sent (if (or head-only-p (null length)) 0 length)))
    (with-output (output)
      (put-head output status fields :length length :keep-alive-p keep-alive-p)
      (send-output connection output body sent seconds))))
