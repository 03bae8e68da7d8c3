;;;; Tests of Hunchentoot's acceptors on the HTTP engine: they do what stock ones do in threads

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/http.lisp" *load-truename*))
(asdf:load-asd (merge-pathnames "../../contrib/sb-fiber-hunchentoot/sb-fiber-hunchentoot.asd"
                                *load-truename*))
(handler-bind ((warning #'muffle-warning))
  (let ((*standard-output* (make-broadcast-stream)))
    (asdf:load-system "sb-fiber-hunchentoot")))

(def-suite* hunchentoot-acceptor)

;;;; Handlers

(defmacro define-handler (name (&rest parameters) &body body)
  `(hunchentoot:define-easy-handler (,(intern (format nil "HANDLE-~A" name))
                                     :uri ,(format nil "/~(~A~)" name))
       ,parameters
     ,@body))

(defun sorted (alist)
  (sort (copy-alist alist) #'string< :key (lambda (pair) (string (car pair)))))

(define-handler echo (a (n :parameter-type 'integer) (list :parameter-type 'list))
  (setf (hunchentoot:content-type*) "text/plain")
  (let ((*print-pretty* nil))
    (format nil "~S" (list (hunchentoot:request-method*) (hunchentoot:request-uri*)
                           (hunchentoot:script-name*) (hunchentoot:query-string*)
                           (hunchentoot:server-protocol*) a n list
                           (hunchentoot:get-parameters*) (hunchentoot:post-parameters*)
                           (sorted (remove :host (hunchentoot:headers-in*) :key #'car))
                           (hunchentoot:cookies-in*) (hunchentoot:remote-addr*)
                           (hunchentoot:user-agent) (hunchentoot:header-in* "x-one")
                           (hunchentoot:header-in* :x-one)
                           (multiple-value-list (hunchentoot:authorization))))))

(define-handler raw ()
  (let ((*print-pretty* nil))
    (format nil "~S" (hunchentoot:raw-post-data))))

(define-handler octets ()
  (setf (hunchentoot:content-type*) "application/octet-stream")
  (sb-fiber-http:string-octets "0123456789"))

(define-handler adjustable-octets ()
  (make-array 3 :element-type '(unsigned-byte 8) :adjustable t :fill-pointer 2
                :initial-element 65))

(define-handler greek ()
  (format nil "~C~C" (code-char 945) (code-char 8364)))

(define-handler latin ()
  (setf (hunchentoot:reply-external-format*)
        (flexi-streams:make-external-format :latin-1 :eol-style :lf))
  (format nil "é"))

(define-handler empty () "")

(define-handler nothing () nil)

(define-handler large ()
  (make-string 300000 :initial-element #\a))

(define-handler written ()
  (let ((stream (hunchentoot:send-headers)))
    (loop repeat 3 do (write-sequence (sb-fiber-http:string-octets "written ") stream)
                      (finish-output stream))))

(define-handler written-length ()
  (setf (hunchentoot:content-length*) 7)
  (write-sequence (sb-fiber-http:string-octets "written") (hunchentoot:send-headers)))

(define-handler status ((code :parameter-type 'integer))
  (setf (hunchentoot:return-code*) code)
  (format nil "status ~D" code))

(define-handler page ((code :parameter-type 'integer))
  (setf (hunchentoot:return-code*) code)
  nil)

(define-handler fields ()
  (setf (hunchentoot:header-out :x-number) 17
        (hunchentoot:header-out "X-String") "a b"
        (hunchentoot:header-out :x-null) nil
        (hunchentoot:header-out :server) "another")
  (hunchentoot:no-cache)
  "fields")

(define-handler lines ()
  (setf (hunchentoot:header-out :x-lines) (format nil "a~%b"))
  "lines")

(define-handler cookies ()
  (hunchentoot:set-cookie "one" :value "1" :path "/")
  (hunchentoot:set-cookie "two" :value "2" :http-only t)
  "cookies")

(define-handler fails () (error "an error of the test"))

(define-handler fails-late ()
  (hunchentoot:send-headers)
  (error "an error of the test"))

(define-handler fails-in-between ()
  (setf (hunchentoot:content-length*) 1000)
  (write-sequence (make-array 10 :element-type '(unsigned-byte 8) :initial-element 65)
                  (hunchentoot:send-headers))
  (error "an error of the test"))

(define-handler away () (hunchentoot:redirect "/elsewhere" :protocol :http))

(define-handler aborts ()
  (setf (hunchentoot:return-code*) 402)
  (hunchentoot:abort-request-handler "aborted"))

(define-handler ignores-the-body () "ignored")

(define-handler closes ()
  (setf (hunchentoot:header-out :connection) "close")
  "closes")

;;;; Servers and a client

(defclass silent-acceptor ()
  ()
  (:default-initargs :address "127.0.0.1" :port 0 :access-log-destination nil
                     :message-log-destination nil))

(defclass stock-acceptor (silent-acceptor hunchentoot:easy-acceptor) ())
(defclass engine-acceptor (silent-acceptor sb-fiber-hunchentoot::easy-fiber-acceptor) ())

(defclass users-request (hunchentoot:request) ())
(defclass users-fiber-request (sb-fiber-hunchentoot::fiber-request) ())
(defclass users-reply (hunchentoot:reply) ())

(defun call-with-acceptor (function class &rest initargs)
  (let ((acceptor (hunchentoot:start (apply #'make-instance class initargs))))
    (unwind-protect (funcall function (hunchentoot:acceptor-port acceptor))
      (hunchentoot:stop acceptor))))

(defmacro with-acceptor ((port class &rest initargs) &body body)
  `(call-with-acceptor (lambda (,port) ,@body) ,class ,@initargs))

(defun fibers (carriers)
  (make-instance 'sb-fiber-hunchentoot::fiber-taskmaster :carrier-count carriers))

(defun call-with-server-socket (function port)
  (let ((socket (usocket:socket-connect "127.0.0.1" port :element-type '(unsigned-byte 8)
                                                         :timeout 20)))
    (unwind-protect (funcall function (usocket:socket-stream socket))
      (close (usocket:socket-stream socket) :abort t))))

(defun answer (port octets)
  "What a server sends for OCTETS until it closes the connection, as a string."
  (call-with-server-socket
   (lambda (stream)
     (write-sequence octets stream)
     (finish-output stream)
     (let ((answer (make-array 1000 :adjustable t :fill-pointer 0
                                    :element-type '(unsigned-byte 8))))
       (loop for octet = (handler-case (read-byte stream nil)
                           (stream-error () nil)) ; reset
             while octet do (vector-push-extend octet answer))
       (octets-string-of answer)))
   port))

;;; The second may be another one by then.
(defun without-time (line)
  "LINE, without what tells when the reply was made."
  (let ((name (find-if (lambda (name) (eql 0 (search name line))) '("Date: " "Last-Modified: "))))
    (if name
        (subseq line 0 (length name))
        line)))

(defun split-reply (answer)
  "Status line, sorted fields without times, and rest of ANSWER."
  (let* ((crlf (coerce '(#\Return #\Newline) 'string))
         (end (search (concatenate 'string crlf crlf) answer))
         (lines (loop with start = 0
                      for next = (and end (search crlf answer :start2 start :end2 end))
                      collect (subseq answer start (or next end))
                      while next do (setf start (+ next 2)))))
    (list (first lines)
          (sort (mapcar #'without-time (rest lines)) #'string<)
          (and end (subseq answer (+ end 4))))))

;;;; The same as stock

(defun without-port (answer port)
  "ANSWER, in which the number of the server's port is replaced."
  (cl-ppcre:regex-replace-all (format nil ":~D|port ~:*~D" port) answer ":PORT"))

(defun reply-of (port octets)
  (split-reply (without-port (answer port octets) port)))

(defun closing-request (method target version fields &optional (body #()))
  (join-octets (apply #'message (format nil "~A ~A HTTP/~A" method target version)
                      "Host: localhost" "Connection: close" (append fields '("")))
               body))

(defparameter *targets*
  '("/echo" "/echo?a=b&n=17" "/echo?a=%C3%A9+x&list=1&list=2" "/echo?a" "/echo?=&&" "/echo?a=%zz"
    "/ec%68o?n=x" "/echo/" "//echo" "/echo?a=b?c" "http://localhost/echo?a=b" "/missing" "/"
    "/octets" "/adjustable-octets" "/greek" "/latin" "/empty" "/nothing" "/large" "/written"
    "/written-length" "/status?code=201" "/status?code=404" "/status?code=599" "/page?code=403"
    "/page?code=500" "/fields" "/lines" "/cookies" "/fails" "/away" "/aborts"
    "/closes" "/%" "/%zz" "/echo?a=%E4%F6" "/status?code=204" "/status?code=304"))

(defparameter *field-lists*
  '(()
    ("X-One: 1" "x-one: 2" "User-Agent: a test" "Accept: */*" "X-Never-Asked-For: x")
    ("Cookie: a=b; c=d" "Cookie: e" "Authorization: Basic dXNlcjpwYXNzd29yZA==")
    ("Cookie: hunchentoot-session=1%3Aabc" "Content-Type: text/plain; charset=utf-8")))

(defun plain-requests ()
  (loop for target in *targets*
        append (loop for fields in *field-lists*
                     append (loop for (method version) in '(("GET" "1.1") ("HEAD" "1.1")
                                                            ("GET" "1.0"))
                                  collect (closing-request method target version fields)))))

(defun form (string &rest fields)
  (closing-request "POST" "/echo?n=1" "1.1"
                   (list* (format nil "Content-Length: ~D" (length string)) fields)
                   (sb-fiber-http:string-octets string)))

(defparameter *multipart*
  (octets-string-of (message "--xx" "Content-Disposition: form-data; name=\"a\"" "" "value"
                             "--xx--")))

(defun requests-with-bodies ()
  (append
   (list (form "a=b&list=1&list=2" "Content-Type: application/x-www-form-urlencoded")
         (form "a=%C3%A9" "Content-Type: application/x-www-form-urlencoded; charset=utf-8")
         (form "" "Content-Type: application/x-www-form-urlencoded")
         (form "a=b")
         (form *multipart* "Content-Type: multipart/form-data; boundary=xx"))
   (loop for target in '("/raw" "/ignores-the-body" "/echo" "/missing" "/fails")
         append (loop for type in '("text/plain" "application/octet-stream")
                      collect (closing-request "PUT" target "1.1"
                                               (list "Content-Length: 5"
                                                     (format nil "Content-Type: ~A" type))
                                               (sb-fiber-http:string-octets "01234"))
                      collect (closing-request "POST" target "1.1"
                                               (list "Transfer-Encoding: chunked"
                                                     (format nil "Content-Type: ~A" type))
                                               (message "5" "Hello" "1" "!" "0" ""))))))

(defun call-with-both (function)
  "Call FUNCTION with the ports of a stock acceptor in threads, and of acceptors on the engine."
  (with-acceptor (stock 'stock-acceptor)
    (with-acceptor (one 'engine-acceptor :taskmaster (fibers 1))
      (with-acceptor (four 'engine-acceptor :taskmaster (fibers 4))
        (with-acceptor (users 'engine-acceptor :taskmaster (fibers 2)
                                               :request-class 'users-request
                                               :reply-class 'users-reply)
          (with-acceptor (users-fiber 'engine-acceptor :taskmaster (fibers 2)
                                                       :request-class 'users-fiber-request)
            (funcall function stock (list one four users users-fiber))))))))

(test the-same-as-stock
  (call-with-both
   (lambda (stock ports)
     (dolist (request (append (plain-requests) (requests-with-bodies)))
       (let ((expected (reply-of stock request)))
         (dolist (port ports)
           (let ((reply (reply-of port request)))
             (unless (equal expected reply)
               (fail "~A~%stock: ~S~%engine: ~S" (octets-string-of request) expected reply))))
         (pass))))))

;;; Where the two differ, and why. Stock takes the first number of several lengths, or of a length
;;; and chunks, and whatever a line is for a request: a proxy in front may understand another.
(defparameter *refused-requests*
  `((400 ,(message "GET" "")) (400 ,(message "GET /echo" "")) (505 ,(message "GET / HTTP/3.0" ""))
    (400 ,(message "GET  /echo HTTP/1.1" "Host: x" ""))
    (400 ,(message "GET /echo HTTP/1.1" ""))
    (400 ,(message "GET /echo HTTP/1.1" "Host: x" "Host: y" ""))
    (400 ,(message "GET /echo HTTP/1.1" "Host: x" "X: a" " folded" ""))
    (400 ,(message "GET /echo HTTP/1.1" "Host: x" "X : a" ""))
    (400 ,(sb-fiber-http:string-octets (format nil "GET /echo HTTP/1.1~%Host: x~%~%")))
    (400 ,(message "POST /raw HTTP/1.1" "Host: x" "Content-Length: 5" "Content-Length: 5" ""
                   "Hello"))
    (400 ,(message "POST /raw HTTP/1.1" "Host: x" "Content-Length: 5" "Transfer-Encoding: chunked"
                   "" "0" ""))
    (400 ,(message "POST /raw HTTP/1.1" "Host: x" "Transfer-Encoding: chunked" "" "x" "0" ""))
    (501 ,(message "POST /raw HTTP/1.1" "Host: x" "Transfer-Encoding: gzip" "" "0" ""))
    (417 ,(message "POST /raw HTTP/1.1" "Host: x" "Content-Length: 5" "Expect: more" ""))
    (501 ,(message "NOBODY-KNOWS-THIS /raw HTTP/1.1" "Host: x" ""))
    (414 ,(message (format nil "GET /~A HTTP/1.1" (make-string 9000 :initial-element #\a)) ""))
    (431 ,(message "GET / HTTP/1.1" "Host: x"
                   (format nil "X: ~A" (make-string 70000 :initial-element #\a))
                   ""))))

(defun status-of (answer)
  (and (> (length answer) 12) (parse-integer answer :start 9 :end 12 :junk-allowed t)))

(defun keyword-count ()
  (loop for symbol being the present-symbols of "KEYWORD" count t))

;;; Prevents: requests that are smuggled; names that are kept for ever.
(test requests-that-are-refused
  (with-acceptor (port 'engine-acceptor :taskmaster (fibers 1))
    (loop for (status request) in *refused-requests*
          do (is (eql status (status-of (answer port request)))
                 "~A" (octets-string-of (subseq request 0 (min 80 (length request))))))
    (let ((before (keyword-count)))
      (loop for i below 50
            do (let ((name (format nil "X-Random-~36R" (random (expt 10 20)))))
                 (answer port (closing-request "GET" "/echo" "1.1"
                                               (list (format nil "~A: x" name))))
                 (answer port (closing-request name "/echo" "1.1" '()))))
      (is (= before (keyword-count))))))

(test limits-of-an-acceptor
  (with-acceptor (port 'engine-acceptor :taskmaster (fibers 1) :max-head 300 :max-body 5)
    (flet ((status (target fields body)
             (status-of (answer port (closing-request "PUT" target "1.1" fields body)))))
      (is (= 200 (status "/raw" '("Content-Length: 5") (sb-fiber-http:string-octets "01234"))))
      (is (= 413 (status "/raw" '("Content-Length: 6") (sb-fiber-http:string-octets "012345"))))
      (is (= 200 (status "/raw" '("Transfer-Encoding: chunked") (message "5" "01234" "0" ""))))
      (is (eql 413 (status "/raw" '("Transfer-Encoding: chunked")
                           (message "5" "01234" "1" "5" "0" ""))))
      (is (= 431 (status "/raw" (list (format nil "X: ~A" (make-string 300 :initial-element #\a)))
                         #()))))))

;;; Prevents: a body that came with the head being counted as part of it.
(test bodies-that-come-with-their-heads
  (with-acceptor (port 'engine-acceptor :taskmaster (fibers 1) :max-head 300)
    (is (eql 200 (status-of (answer port (closing-request
                                          "PUT" "/raw" "1.1" '("Content-Length: 4000")
                                          (make-array 4000 :element-type '(unsigned-byte 8)
                                                           :initial-element 65))))))))

(test arguments-of-an-acceptor
  (flet ((refused-p (&rest initargs)
           (handler-case (progn (apply #'make-instance 'engine-acceptor initargs) nil)
             (hunchentoot:parameter-error () t))))
    (is-true (refused-p :max-head 10))
    (is-true (refused-p :max-head nil))
    (is-true (refused-p :max-body -1))
    (is-true (refused-p :max-body "all"))
    (is (typep (hunchentoot::acceptor-taskmaster (make-instance 'engine-acceptor))
               'sb-fiber-hunchentoot::fiber-taskmaster))))

;;;; Several requests

(defun read-answer (stream)
  "Status and body of a reply on STREAM."
  (destructuring-bind (status fields body) (read-reply stream)
    (declare (ignore fields))
    (list (status-of status) body)))

(test requests-on-one-connection
  (with-acceptor (port 'engine-acceptor :taskmaster (fibers 1))
    (call-with-server-socket
     (lambda (stream)
       (flet ((put (octets) (write-sequence octets stream) (finish-output stream)))
         (put (join-octets (message "GET /octets HTTP/1.1" "Host: x" "")
                           (message "PUT /ignores-the-body HTTP/1.1" "Host: x"
                                    "Content-Length: 5" "")
                           (sb-fiber-http:string-octets "01234")
                           (message "GET /greek HTTP/1.1" "Host: x" "")))
         (is (equal '(200 "0123456789") (read-answer stream)))
         (is (equal '(200 "ignored") (read-answer stream)))
         (is (equal 200 (first (read-answer stream))))
         ;; The client is told to go on when the handler wants the body.
         (put (message "PUT /raw HTTP/1.1" "Host: x" "Content-Length: 5" "Content-Type: text/plain"
                       "Expect: 100-continue" ""))
         (is (equal '(100 "") (read-answer stream)))
         (put (sb-fiber-http:string-octets "01234"))
         (is (equal '(200 "#(48 49 50 51 52)") (read-answer stream)))
         ;; If it does not, the body must not be taken for a request.
         (put (message "PUT /ignores-the-body HTTP/1.1" "Host: x" "Content-Length: 5"
                       "Expect: 100-continue" ""))
         (is (equal '(200 "ignored") (read-answer stream)))
         (is (null (read-byte stream nil)))))
     port)))

;;; Prevents: a reply that the client loses, since the connection is reset when it is closed.
(test bodies-that-nobody-reads
  (with-acceptor (port 'engine-acceptor :taskmaster (fibers 1) :max-body 3000000)
    (flet ((reply (length)
             (reply-of port (closing-request "PUT" "/ignores-the-body" "1.1"
                                             (list (format nil "Content-Length: ~D" length))
                                             (make-array length :element-type '(unsigned-byte 8)
                                                                :initial-element 65)))))
      (is (equal "ignored" (third (reply 1000))))
      (is (equal "ignored" (third (reply 2000000))))
      (is (eql 413 (status-of (first (reply 4000000))))))))

;;; Prevents: a second reply to one request, which a proxy takes for that to its next.
(test bodies-that-are-none-and-nobody-reads
  (with-acceptor (port 'engine-acceptor :taskmaster (fibers 1))
    (let ((answer (answer port (message "PUT /ignores-the-body HTTP/1.1" "Host: x"
                                        "Transfer-Encoding: chunked" "" "x" "0" ""
                                        "GET /octets HTTP/1.1" "Host: x" ""))))
      (is (eql 200 (status-of answer)))
      (is (null (search "HTTP/1.1" answer :start2 8))))))

;;; Prevents: the next reply being taken for the rest of one that was cut off; a body that looks
;;; whole and is not.
(test replies-that-are-cut-off
  (with-acceptor (port 'engine-acceptor :taskmaster (fibers 1))
    (flet ((body-of (target)
             (let* ((answer (answer port (join-octets
                                          (message (format nil "GET ~A HTTP/1.1" target) "Host: x"
                                                   "")
                                          (message "GET /octets HTTP/1.1" "Host: x" ""))))
                    (end (search (coerce '(#\Return #\Newline #\Return #\Newline) 'string) answer)))
               (and end (subseq answer (+ end 4))))))
      (is (equal "AAAAAAAAAA" (body-of "/fails-in-between")))
      (is (equal "" (body-of "/fails-late"))))))

;;; Prevents: a proxy that waits for the body which a "head" has, to its mind.
(test methods-in-lower-case
  (with-acceptor (port 'engine-acceptor :taskmaster (fibers 1))
    (is (eql 501 (status-of (answer port (closing-request "head" "/octets" "1.1" '())))))))

;;; Prevents: a client that waits for a reply whose head cannot be sent.
(define-handler field-of-another-alphabet ()
  (setf (hunchentoot:header-out :x-name) (format nil "~C" (code-char 945)))
  "field")

(test fields-that-cannot-be-sent
  (with-acceptor (port 'engine-acceptor :taskmaster (fibers 1))
    (is (eql 0 (search "HTTP/1.1 " (answer port (closing-request
                                                 "GET" "/field-of-another-alphabet" "1.1" '())))))))

;;; Prevents: a request that is another's when it is looked at later.
(defvar *kept-request*)

(define-handler keeps-the-request ()
  (setf *kept-request* hunchentoot:*request*)
  "kept")

(test requests-that-outlive-their-connection
  (with-acceptor (port 'engine-acceptor :taskmaster (fibers 1))
    (answer port (closing-request "GET" "/keeps-the-request?a=b" "1.1" '("X-One: 1" "Cookie: c=d")))
    (loop repeat 20 do (answer port (closing-request "GET" "/octets?y=z" "1.1" '("X-One: 2"))))
    (is (equal '("1" "b" "d" "/keeps-the-request")
               (list (hunchentoot:header-in :x-one *kept-request*)
                     (hunchentoot:get-parameter "a" *kept-request*)
                     (hunchentoot:cookie-in "c" *kept-request*)
                     (hunchentoot:script-name *kept-request*))))))

;;;; Connections that are taken over

(define-handler upgrades ()
  (let ((stream (hunchentoot::content-stream hunchentoot:*request*)))
    (flet ((put (octets) (write-sequence octets stream) (finish-output stream)))
      (put (message "HTTP/1.1 101 Switching Protocols" ""))
      (loop for octet = (read-byte stream nil)
            until (or (null octet) (= octet 46))
            do (put (vector octet octet)))
      (hunchentoot:abort-request-handler ""))))

(test connections-that-are-upgraded
  (with-acceptor (port 'engine-acceptor :taskmaster (fibers 1))
    (call-with-server-socket
     (lambda (stream)
       (write-sequence (join-octets (message "GET /upgrades HTTP/1.1" "Host: x"
                                             "Connection: Upgrade" "")
                                    (sb-fiber-http:string-octets "ab"))
                       stream)
       (finish-output stream)
       (is (equal '(101 "") (read-answer stream)))
       (is (equal '(97 97 98 98) (loop repeat 4 collect (read-byte stream))))
       (write-byte 99 stream)
       (finish-output stream)
       (is (equal '(99 99) (loop repeat 2 collect (read-byte stream)))))
     port)))

(defvar *detached*)

(define-handler detaches ()
  (hunchentoot:detach-socket hunchentoot:*acceptor*)
  (setf *detached* (chunga:chunked-stream-stream hunchentoot::*hunchentoot-stream*))
  "detached")

(test sockets-that-are-detached
  (with-acceptor (port 'engine-acceptor :taskmaster (fibers 1))
    (call-with-server-socket
     (lambda (stream)
       (write-sequence (message "GET /detaches HTTP/1.1" "Host: x" "") stream)
       (finish-output stream)
       (is (equal '(200 "detached") (read-answer stream)))
       (sleep 1/20)
       (write-byte 65 *detached*)
       (close *detached*)
       (is (= 65 (read-byte stream)))
       (is (null (read-byte stream nil))))
     port)))

;;;; Clients that are slow

(test heads-have-a-time
  (with-acceptor (port 'engine-acceptor :taskmaster (fibers 1) :read-timeout 1/5 :write-timeout 1/5)
    (call-with-server-socket
     (lambda (stream)
       (is (eq :closed
               (handler-case
                   (loop for octet across (message "GET /octets HTTP/1.1" "Host: x" "")
                         do (write-byte octet stream)
                            (finish-output stream)
                            (sleep 1/50)
                         finally (return (read-byte stream nil :closed)))
                 (stream-error () :closed)))))
     port)))

;;; Prevents: what a connection has received, and who has taken that over has not read, being
;;; lost, or another's.
(defvar *go-on* (make-flag))

(define-handler takes-over ()
  (hunchentoot:detach-socket hunchentoot:*acceptor*)
  (let ((stream hunchentoot::*hunchentoot-stream*))
    (make-thread (lambda ()
                   (wait-until (flag-value *go-on*))
                   (write-sequence (read-octets stream 6) stream)
                   (finish-output stream)
                   (close stream))))
  nil)

(test connections-that-are-taken-over
  (with-acceptor (port 'engine-acceptor :taskmaster (fibers 1))
    (let ((answer (make-thread
                   (lambda ()
                     (answer port (join-octets
                                   (message "GET /takes-over HTTP/1.1" "Host: x"
                                            "Connection: upgrade" "Upgrade: x" "")
                                   (sb-fiber-http:string-octets "frames")))))))
      (sleep 1/10)
      (loop repeat 20 do (answer port (closing-request "GET" "/octets?y=z" "1.1" '())))
      (raise-flag *go-on*)
      (is-true (search "frames" (join-thread answer))))))

;;; Prevents: what is left of a body, when reading it was unwound, being taken for a request.
(define-handler gives-up-reading ()
  (handler-case (sb-ext:with-timeout 1/20
                  (read-byte (hunchentoot:raw-post-data :want-stream t)))
    (sb-ext:timeout () "late")))

(test bodies-whose-reading-was-left
  (with-acceptor (port 'engine-acceptor :taskmaster (fibers 1))
    (call-with-server-socket
     (lambda (stream)
       (write-sequence (message "PUT /gives-up-reading HTTP/1.1" "Host: x" "Content-Length: 5"
                                "Content-Type: text/plain" "")
                       stream)
       (finish-output stream)
       (is (equal '(200 "late") (read-answer stream)))
       (write-sequence (join-octets (sb-fiber-http:string-octets "01234")
                                    (message "GET /octets HTTP/1.1" "Host: x" ""))
                       stream)
       (finish-output stream)
       (is (null (read-byte stream nil))))
     port)))

;;; Prevents: an acceptor that waits in accept(2) for ever, where no fiber accepts.
(test threads-for-an-acceptor-of-fibers
  (loop repeat 3
        do (with-acceptor (port 'engine-acceptor
                                :taskmaster (make-instance
                                             'hunchentoot:one-thread-per-connection-taskmaster))
             (is (eql 200 (status-of (answer port (closing-request "GET" "/octets" "1.1"
                                                                   '()))))))))
