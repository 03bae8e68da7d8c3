;;;; replies whose body is a file

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-HTTP")

;;; A file goes from the kernel's cache to the socket, by sendfile(2), and is never in our memory.
;;; That call has no flag by which it does not wait: the socket is made non-blocking first, and
;;; stays so, which nothing else here minds.

;;; A piece at a time, each of which the client must take in time; and the disk is not waited for
;;; by one call for as long as the whole file takes.
(defconstant +file-piece+ (expt 2 18))

(defun send-piece (connection file offset count)
  "Have the kernel send COUNT octets of FILE, a descriptor, from OFFSET on. Return how many it has
taken, or NIL, and the error."
  (sb-alien:with-alien ((offset (sb-alien:signed 64) offset))
    (let ((n (sb-alien:alien-funcall
              (sb-alien:extern-alien "sendfile"
                                     (function (sb-alien:signed 64) sb-alien:int sb-alien:int
                                               (* (sb-alien:signed 64)) (sb-alien:unsigned 64)))
              (connection-fd connection) file (sb-alien:addr offset) count)))
      (if (minusp n) (values nil (sb-alien:get-errno)) n))))

(defun send-file (connection file start end seconds)
  "Send octets START to END of FILE, a descriptor, to the client, who must take each piece within
SECONDS. Signals TIMED-OUT and CONNECTION-LOST."
  (declare (type index start end))
  (make-nonblocking connection)
  (loop while (< start end)
        do (let ((piece-end (min end (+ start +file-piece+))) (deadline (deadline-after seconds)))
             (loop while (< start piece-end)
                   do (multiple-value-bind (n errno)
                          (send-piece connection file start (- piece-end start))
                        (cond ((eql n 0) (error "A file has become shorter while it was sent."))
                              (n (incf start n)
                                 (incf (connection-sent connection) n))
                              ((= errno sb-unix:ewouldblock) (await connection :output deadline))
                              ((= errno sb-unix:eintr))
                              (t (error 'connection-lost :errno errno))))))))

;;;; ranges: RFC 9110, 14

(defun parse-digits (string start end)
  "The number that STRING from START to END is, NIL if there are no digits, :BAD if there is more."
  (cond ((= start end) nil)
        ((and (every #'digit-char-p (subseq string start end)) (< (- end start) 16))
         (parse-integer string :start start :end end))
        (t :bad)))

(defun parse-range (value size)
  "What VALUE, of the field Range, asks for of SIZE octets: start and end; :UNSATISFIABLE; or NIL,
if it asks for several parts, or is not understood: then the whole is sent."
  (let ((dash (position #\- value)))
    (when (and dash (eql 6 (mismatch "bytes=" value)) (not (find #\, value)) (> dash 5))
      (let ((first (parse-digits value 6 dash))
            (last (parse-digits value (1+ dash) (length value))))
        (cond ((or (eq first :bad) (eq last :bad) (not (or first last))) nil)
              ((null first) (if (= last 0)
                                :unsatisfiable
                                (if (= size 0) :unsatisfiable (values (max 0 (- size last)) size))))
              ((and last (< last first)) nil)
              ((>= first size) :unsatisfiable)
              (t (values first (if last (min size (1+ last)) size))))))))

(defun request-field (exchange name)
  (let* ((head (exchange-head exchange)) (n (head-field head name)))
    (and n (field-value head n))))

(defun get-p (exchange)
  (let ((head (exchange-head exchange)))
    (name-at-p "get" (head-octets head) (head-start head) (head-method-end head))))

(defun wanted-range (exchange modified size)
  "As PARSE-RANGE, for the request of EXCHANGE for a file that was modified at MODIFIED."
  (let ((range (request-field exchange "range")) (if-range (request-field exchange "if-range")))
    (when (and range (get-p exchange) (or (null if-range) (eql modified (parse-date if-range))))
      (parse-range range size))))

(defun unmodified-p (exchange modified)
  "Does the client of EXCHANGE want a file only if it was modified after MODIFIED?"
  (let ((since (request-field exchange "if-modified-since")))
    (and since
         (null (request-field exchange "if-none-match"))
         (let ((time (parse-date since)))
           (and time (<= modified time))))))

;;;; replying

(defconstant +unix-epoch+ (encode-universal-time 0 0 0 1 1 1970 0))

(defun call-with-open-file (path function)
  "Call FUNCTION with a descriptor of the file at PATH, its size, and when it was modified."
  (let ((name (sb-ext:native-namestring (translate-logical-pathname path) :as-file t)))
    (flet ((refuse (errno)
             (error 'sb-int:simple-file-error :pathname path
                                              :format-control "Cannot send ~A: ~A"
                                              :format-arguments (list name errno))))
      (multiple-value-bind (fd errno) (sb-unix:unix-open name sb-unix:o_rdonly 0)
        (unless fd (refuse (sb-int:strerror errno)))
        (unwind-protect
             (multiple-value-bind (ok device inode mode links uid gid rdev size atime mtime)
                 (sb-unix:unix-fstat fd)
               (declare (ignore ok device inode links uid gid rdev atime))
               (unless (= #o100000 (logand mode #o170000)) (refuse "it is no regular file"))
               (funcall function fd size (+ mtime +unix-epoch+)))
          (sb-unix:unix-close fd))))))

(defun send-part-of-file (exchange status fields file start end)
  (begin-reply exchange status fields :length (- end start))
  (unless (eq (exchange-framing exchange) :none)
    (sending (exchange)
      (send-file (exchange-connection exchange) file start end (exchange-timeout exchange)))
    (setf (exchange-left exchange) 0))
  (end-reply exchange))

(defun reply-with-open-file (exchange fields file size modified)
  (let ((fields (append fields
                        (unless (assoc "last-modified" fields :test #'string-equal)
                          `(("Last-Modified" . ,(date-string modified))))
                        '(("Accept-Ranges" . "bytes")))))
    (multiple-value-bind (start end) (wanted-range exchange modified size)
      (cond ((unmodified-p exchange modified) (reply exchange 304 fields (string-octets "")))
            ((null start) (send-part-of-file exchange 200 fields file 0 size))
            ((eq start :unsatisfiable)
             (reply exchange 416
                    (append fields `(("Content-Range" . ,(format nil "bytes */~D" size))))
                    (string-octets "")))
            (t (send-part-of-file
                exchange 206
                (append fields
                        `(("Content-Range" . ,(format nil "bytes ~D-~D/~D" start (1- end) size))))
                file start end))))))

(defun reply-with-file (exchange path &key (status 200) (fields '()))
  "Reply to EXCHANGE with the contents of the file at PATH, and FIELDS, an alist of strings. If
STATUS is 200, as it is by default, a part of the file is sent if the request asks for one, and
nothing if it asks for what was modified since. Signals FILE-ERROR if there is no such file, and
what REPLY does."
  (call-with-open-file
   path
   (lambda (file size modified)
     (if (= status 200)
         (reply-with-open-file exchange fields file size modified)
         (send-part-of-file exchange status fields file 0 size)))))
