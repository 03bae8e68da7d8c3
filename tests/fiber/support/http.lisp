;;;; The HTTP engine, and messages to give it

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "files.lisp" *load-truename*))

(asdf:load-asd (merge-pathnames "../../../contrib/sb-fiber-http/sb-fiber-http.asd"
                                *load-truename*))
(handler-bind ((warning #'muffle-warning))
  (let ((*standard-output* (make-broadcast-stream)))
    (asdf:load-system "sb-fiber-http")))

(defun message (&rest lines)
  "The octets of LINES, strings, each of which ends with CR LF."
  (sb-fiber-http:string-octets (format nil "~{~A~C~C~}"
                                       (loop for line in lines
                                             append (list line #\Return #\Newline)))))

(defun join-octets (&rest octets)
  (apply #'concatenate 'sb-fiber-http:octets octets))

(defun octets-string-of (octets)
  (sb-fiber-http:octets-string (coerce octets 'sb-fiber-http:octets) 0 (length octets)))

(defun random-element (sequence)
  (elt sequence (random (length sequence))))

(defun mutated (octets)
  "A copy of OCTETS in which some octets were exchanged, left out, doubled or moved."
  (let ((octets (copy-seq octets)))
    (loop repeat (1+ (random 4))
          do (let* ((i (random (length octets)))
                    (j (min (length octets) (+ i 1 (random 8)))))
               (ecase (random 4)
                 (0 (setf (aref octets i)
                          (random-element #(0 9 10 13 32 43 44 45 48 58 59 65 97 127 128 255))))
                 (1 (when (< (- j i) (length octets))
                      (setf octets (join-octets (subseq octets 0 i) (subseq octets j)))))
                 (2 (setf octets (join-octets (subseq octets 0 j) (subseq octets i))))
                 (3 (rotatef (aref octets i) (aref octets (random (length octets))))))))
    octets))

;;;; files

(defun call-with-file (function octets)
  "Call FUNCTION with the path, a string, of a file that consists of OCTETS."
  (let ((path (temporary-path "file")))
    (unwind-protect
         (progn (with-open-file (out path :direction :output :if-exists :supersede
                                          :element-type '(unsigned-byte 8))
                  (write-sequence octets out))
                (funcall function path))
      (when (probe-file path) (delete-file path)))))

;;;; a client

(defun connect-to (place)
  "Return a socket that is connected to PLACE of a server."
  (destructuring-bind (kind address &optional port) place
    (let* ((inet6-p (and (eq kind :tcp) (find #\: address)))
           (socket (make-instance (cond ((eq kind :unix) 'sb-bsd-sockets:local-socket)
                                        (inet6-p 'sb-bsd-sockets:inet6-socket)
                                        (t 'sb-bsd-sockets:inet-socket))
                                  :type :stream))
           (done nil))
      (unwind-protect
           (progn (apply #'sb-bsd-sockets:socket-connect socket
                         (cond ((eq kind :unix) (list address))
                               (inet6-p (list (sb-bsd-sockets:make-inet6-address address) port))
                               (t (list (sb-bsd-sockets:make-inet-address address) port))))
                  (setf done t)
                  socket)
        (unless done (sb-bsd-sockets:socket-close socket))))))

(defun call-with-connection (function place)
  "Call FUNCTION with a stream to the server at PLACE, which gives up after 20 seconds."
  (let ((socket (connect-to place)))
    (unwind-protect
         (funcall function (sb-bsd-sockets:socket-make-stream
                            socket :input t :output t :buffering :full :timeout 20
                                   :element-type '(unsigned-byte 8)))
      (sb-bsd-sockets:socket-close socket :abort t))))

(defmacro with-connection ((stream place) &body body)
  `(call-with-connection (lambda (,stream) ,@body) ,place))

(defun send-parts (stream &rest parts)
  "Send PARTS, octets, one after another."
  (dolist (part parts)
    (write-sequence part stream)
    (finish-output stream)
    (sleep 1/200)))

(defun request (target &rest fields)
  (apply #'message (format nil "GET ~A HTTP/1.1" target) "Host: x" (append fields '(""))))

(defun read-message-line (stream)
  (let ((line (loop for octet = (read-byte stream nil 10)
                    until (= octet 10) collect (code-char octet))))
    (string-right-trim '(#\Return) (coerce line 'string))))

(defun field-of (name fields)
  "The value of the field NAME in FIELDS, lines, or NIL."
  (let ((line (find-if (lambda (line) (eql (length name) (mismatch name line :test #'char-equal)))
                       fields)))
    (and line (string-trim " " (subseq line (1+ (length name)))))))

(defun read-octets (stream n)
  (let ((octets (make-array n :element-type '(unsigned-byte 8))))
    (subseq octets 0 (read-sequence octets stream))))

(defun read-chunks (stream)
  (loop for size = (parse-integer (read-message-line stream) :radix 16 :junk-allowed t)
        while (and size (plusp size))   ; no size: the connection was closed
        collect (read-octets stream size) into chunks
        do (read-message-line stream)
        finally (when size (read-message-line stream))
                (return (append chunks (unless size (list (message "MISSING END")))))))

(defun read-body-of-reply (stream fields)
  (let ((length (field-of "Content-Length" fields)))
    (cond (length (read-octets stream (parse-integer length)))
          ((field-of "Transfer-Encoding" fields) (apply #'join-octets (read-chunks stream)))
          (t (coerce (loop for octet = (read-byte stream nil) while octet collect octet)
                     'sb-fiber-http:octets)))))

(defun status-without-body-p (status)
  (let ((code (parse-integer status :start 9 :end 12)))
    (or (< code 200) (member code '(204 304)))))

(defun read-reply (stream &key (head-only-p nil))
  "Return status line, fields but the date, and body of a reply, as strings."
  (let* ((status (read-message-line stream))
         (fields (loop for line = (read-message-line stream)
                       until (string= line "") collect line))
         (body (if (or head-only-p (string= status "") (status-without-body-p status))
                   #()
                   (read-body-of-reply stream fields))))
    (list status
          (remove-if (lambda (field) (eql 0 (search "Date: " field))) fields)
          (octets-string-of body))))

(defun answer-to (place &rest parts)
  "The reply of the server at PLACE to PARTS, octets, as by READ-REPLY."
  (with-connection (stream place)
    (apply #'send-parts stream parts)
    (read-reply stream)))

(defun ask (place target &rest fields)
  (answer-to place (apply #'request target fields)))
