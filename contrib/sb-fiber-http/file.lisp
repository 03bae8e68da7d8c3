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

;;; It goes a piece at a time: the disk is not waited for by one call for as long as the whole file
;;; takes, and other fibers run in between though the client may take it as fast as it comes.

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

(defparameter *client-errors* '(32 104 107 110)
  "The errors by which a client is lost: EPIPE, ECONNRESET, ENOTCONN and ETIMEDOUT of Linux.")

(defun send-some-of-file (connection file start end deadline)
  "Send some octets of FILE, or wait until some can be sent. Return how many were sent."
  (multiple-value-bind (n errno) (send-piece connection file start (- end start))
    (cond ((eql n 0) (error "A file has become shorter while it was sent."))
          ((or n (member errno *client-errors*)) (note-sent connection n errno deadline))
          ((= errno sb-unix:ewouldblock) (note-sent connection nil :output deadline))
          ((= errno sb-unix:eintr) 0)
          (t (error "A file cannot be sent: ~A" (sb-int:strerror errno))))))

(defun send-file-as-it-is (connection file start end seconds)
  (declare (type index start end))
  (make-nonblocking (connection-fd connection))
  (by-pieces (start end piece-end)
    (let ((deadline (deadline-after seconds)))
      (loop while (< start piece-end)
            do (incf start (send-some-of-file connection file start piece-end deadline)))
      (sb-thread:thread-yield))))

;;; What a transport changes is read by us first.
(defun read-of-file (file octets n)
  "Read at most N octets of FILE to OCTETS, and return how many there are."
  (multiple-value-bind (count errno)
      (sb-sys:with-pinned-objects (octets)
        (sb-unix:unix-read file (sb-sys:vector-sap octets) n))
    (cond ((null count) (error "A file cannot be read: ~A" (sb-int:strerror errno)))
          ((= count 0) (error "A file has become shorter while it was sent."))
          (t count))))

(defun send-copy-of-file (connection file start end seconds)
  (declare (type index start end))
  (sb-unix:unix-lseek file start sb-unix:l_set)
  (let ((octets (make-array 65536 :element-type '(unsigned-byte 8))))
    (loop while (< start end)
          do (let ((n (read-of-file file octets (min 65536 (- end start)))))
               (send-octets connection octets 0 n seconds)
               (incf start n)
               (sb-thread:thread-yield)))))

(defun send-file (connection file start end seconds)
  "Send octets START to END of FILE, a descriptor, to the client, who must take them as SEND-OCTETS
says, or, with a transport, each 65,536 of them within SECONDS. Signals TIMED-OUT and
CONNECTION-LOST, and an error if FILE cannot be read."
  (if (connection-transport connection)
      (send-copy-of-file connection file start end seconds)
      (send-file-as-it-is connection file start end seconds)))

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
  (head-method-is-p (exchange-head exchange) "GET"))

(defun wanted-range (exchange modified size)
  "As PARSE-RANGE, for the request of EXCHANGE for a file that was modified at MODIFIED."
  (let ((range (request-field exchange "range")) (if-range (request-field exchange "if-range")))
    (when (and range (get-p exchange) (or (null if-range) (eql modified (parse-date if-range))))
      (parse-range range size))))

(defun unmodified-p (exchange modified)
  "Does the client of EXCHANGE want a file only if it was modified after MODIFIED?"
  (let ((since (request-field exchange "if-modified-since")))
    (and since
         (or (get-p exchange) (head-only-p exchange))
         (null (request-field exchange "if-none-match"))
         (let ((time (parse-date since)))
           (and time (<= modified time))))))

;;;; replying

(defconstant +unix-epoch+ (encode-universal-time 0 0 0 1 1 1970 0))

(defconstant +o-cloexec+ #o2000000)     ; of Linux

(defun refuse-file (path format &rest arguments)
  (error 'sb-int:simple-file-error :pathname path
                                   :format-control "Cannot send ~A: ~?"
                                   :format-arguments (list path format arguments)))

(defun file-name (path)
  "The name of the file that OPEN would open for PATH, as the system has it."
  (let ((name (sb-ext:native-namestring (translate-logical-pathname (merge-pathnames path))
                                        :as-file t)))
    ;; Or the name would end there: of "secret<NUL>.png" that is another one.
    (when (find #\Nul name) (refuse-file path "its name has a NUL"))
    name))

;;; Without waiting for somebody who writes, if that is a pipe.
(defun open-file (path)
  "Return a descriptor of the file at PATH."
  (multiple-value-bind (fd errno)
      (sb-unix:unix-open (file-name path)
                         (logior sb-unix:o_rdonly +o-nonblock+ +o-cloexec+) 0)
    (or fd (refuse-file path "~A" (sb-int:strerror errno)))))

(defun size-and-time (fd path)
  "The size of the file with the descriptor FD, and when it was modified."
  (multiple-value-bind (ok device inode mode links uid gid rdev size atime mtime)
      (sb-unix:unix-fstat fd)
    (declare (ignore ok device inode links uid gid rdev atime))
    (unless (= #o100000 (logand mode #o170000)) (refuse-file path "it is no regular file"))
    (values size (+ mtime +unix-epoch+))))

(defun call-with-open-file (path function)
  "Call FUNCTION with a descriptor of the file at PATH, its size, and when it was modified."
  (let ((fd nil))
    (sb-sys:without-interrupts          ; a descriptor that nobody knows stays open
      (unwind-protect
           (progn (setf fd (open-file path))
                  (sb-sys:with-local-interrupts
                    (multiple-value-call function fd (size-and-time fd path))))
        (when fd (sb-unix:unix-close fd))))))

(defun send-part-of-file (exchange status fields file start end)
  (begin-reply exchange status fields :length (- end start))
  (unless (eq (exchange-framing exchange) :none)
    (sending (exchange)
      (send-file (exchange-connection exchange) file start end (exchange-timeout exchange))
      (setf (exchange-left exchange) 0)))
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
