;;;; Tests of Clack's handler, by the interface that Clack calls, without Clack

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(dolist (file '("http" "limits"))
  (load (merge-pathnames (format nil "support/~A.lisp" file) *load-truename*)))

;;; What Clack's system "clack-socket" defines, for the methods that the handler has if it is there.
(unless (find-package "CLACK.SOCKET")
  (defpackage "CLACK.SOCKET"
    (:use "COMMON-LISP")
    (:export "READ-CALLBACK" "CLOSE-SOCKET" "FLUSH-SOCKET-BUFFER" "WRITE-SEQUENCE-TO-SOCKET"
             "WRITE-BYTE-TO-SOCKET" "WRITE-SEQUENCE-TO-SOCKET-BUFFER"
             "WRITE-BYTE-TO-SOCKET-BUFFER" "SOCKET-ASYNC-P")))
(defgeneric clack.socket:read-callback (socket))
(defgeneric (setf clack.socket:read-callback) (callback socket))
(defgeneric clack.socket:close-socket (socket))
(defgeneric clack.socket:flush-socket-buffer (socket &key callback))
(defgeneric clack.socket:write-sequence-to-socket (socket data &key callback))
(defgeneric clack.socket:write-byte-to-socket (socket byte &key callback))
(defgeneric clack.socket:write-sequence-to-socket-buffer (socket data))
(defgeneric clack.socket:write-byte-to-socket-buffer (socket byte))
(defgeneric clack.socket:socket-async-p (socket))

(asdf:load-asd (merge-pathnames
                "../../contrib/clack-handler-sb-fiber/clack-handler-sb-fiber.asd"
                *load-truename*))
(handler-bind ((warning #'muffle-warning))
  (let ((*standard-output* (make-broadcast-stream)))
    (asdf:load-system "clack-handler-sb-fiber")))

(def-suite* clack)

(import '(sb-fiber-http:string-octets sb-fiber-http:server-statistics))

;;;; A server

(defmacro with-application ((place application &rest arguments) &body body)
  (let ((server (gensym)))
    `(let* ((,server (clack.handler.sb-fiber:start ,application ,@arguments
                                                   :port 0 :on-error #'identity))
            (,place (first (sb-fiber-http:server-places ,server))))
       (unwind-protect (progn ,@body)
         (clack.handler.sb-fiber:stop ,server)))))

(defun path-p (path environment) (string= path (getf environment :path-info)))

;;;; Environments

(defun seen (keys &rest parts)
  "What an application sees under KEYS when it gets the request that PARTS, octets, are."
  (let ((seen nil))
    (with-application (place (lambda (environment)
                               (setf seen (mapcar (lambda (key) (getf environment key)) keys))
                               '(200 () ("seen"))))
      (is (equal "seen" (third (apply #'answer-to place parts)))))
    seen))

(test what-an-environment-has
  (is (equal '(:get "" "/a b" "x=%20&y" "/a%20b?x=%20&y" "x" :http/1.1 "http" "127.0.0.1" nil nil t)
             (seen '(:request-method :script-name :path-info :query-string :request-uri
                     :server-name :server-protocol :url-scheme :remote-addr :content-type
                     :content-length :clack.streaming)
                   (request "/a%20b?x=%20&y"))))
  (is (equal '(:post "text/plain" 5 :http/1.0 nil)
             (seen '(:request-method :content-type :content-length :server-protocol :query-string)
                   (message "POST / HTTP/1.0" "Content-Length: 5" "Content-Type: text/plain" "")
                   (string-octets "01234"))))
  (is (equal '("/p" "q" "localhost" :options)
             (seen '(:path-info :query-string :server-name :request-method)
                   (message "OPTIONS http://host:80/p?q HTTP/1.0" "")))))

(test paths
  (loop for (target path) in `(("/" "/") ("/%41" "/A")
                               ("/%c3%a9" ,(format nil "/~C" (code-char 233)))
                               ("/%" "/%") ("/%4" "/%4") ("/%zz" "/%zz") ("/a+b" "/a+b")
                               ("/%ff" ,(format nil "/~C" (code-char #xfffd)))
                               ("http://h" ""))
        do (is (equal (list path) (seen '(:path-info) (request target))) target)))

(test names-of-hosts
  (loop for (host name) in '(("example.org" "example.org") ("example.org:8080" "example.org")
                             ("[::1]" "[::1]") ("[::1]:80" "[::1]"))
        do (is (equal (list name)
                      (seen '(:server-name)
                            (message "GET / HTTP/1.1" (format nil "Host: ~A" host) ""))))))

(test fields-of-requests
  (let ((fields (first (seen '(:headers)
                             (request "/" "X-A: 1" "x-a: 2" "Cookie: a=1" "Cookie: b=2")))))
    (is (equal "1, 2" (gethash "x-a" fields)))
    (is (equal "a=1; b=2" (gethash "cookie" fields)))
    (is (equal "x" (gethash "host" fields)))))

;;; Prevents: a client that fills the package of keywords.
(test methods-that-nobody-knows
  (with-application (place (constantly '(200 () ("ok"))))
    (is (equal "HTTP/1.1 501 Not Implemented"
               (first (answer-to place (message "NONSUCHMETHOD / HTTP/1.1" "Host: x" "")))))
    (is (null (find-symbol "NONSUCHMETHOD" "KEYWORD")))))

(test bodies-of-requests
  (with-application (place (lambda (environment)
                             (let* ((body (make-array 100 :element-type '(unsigned-byte 8)))
                                    (n (read-sequence body (getf environment :raw-body))))
                               (list 200 '() (list (octets-string-of (subseq body 0 n)))))))
    (with-connection (stream place)
      (send-parts stream (request "/" "Content-Length: 5") (string-octets "01234"))
      (is (equal "01234" (third (read-reply stream))))
      (send-parts stream (request "/" "Transfer-Encoding: chunked") (message "3" "abc" "0" ""))
      (is (equal "abc" (third (read-reply stream)))))))

;;;; Responses

(defun answer-with (response)
  (with-application (place (constantly response)) (ask place "/")))

(test bodies-of-all-kinds
  (loop for (body expected) in `((("Hello, " "world") "Hello, world") (() "") (("") "")
                                 (,(string-octets "octets") "octets")
                                 (#(97 98) "ab")
                                 ((,(string #\GREEK_SMALL_LETTER_ALPHA))
                                  ,(octets-string-of #(206 177))))
        do (is (equal `("HTTP/1.1 200 OK" (,(format nil "Content-Length: ~D" (length expected)))
                                          ,expected)
                      (answer-with (list 200 '() body)))))
  (call-with-file
   (lambda (path)
     (destructuring-bind (status fields body)
         (answer-with (list 200 '(:content-type "text/plain") (pathname path)))
       (is (equal "HTTP/1.1 200 OK" status))
       (is (equal "text/plain" (field-of "Content-Type" fields)))
       (is (equal "a file" body))))
   (string-octets "a file")))

(test fields-of-responses
  (is (equal '("HTTP/1.1 302 Found"
               ("Location: /x" "X-Count: 3" "Set-Cookie: a=1" "Set-Cookie: b=2" "Content-Length: 0")
               "")
             (answer-with '(302 (:location "/x" :x-count 3 :x-nothing nil :set-cookie "a=1"
                                 :set-cookie "b=2" :transfer-encoding "chunked"
                                 :content-length 100)
                            ()))))
  (is (member "Connection: close" (second (answer-with '(200 (:connection "close") ("a"))))
              :test #'string=))
  (is (equal '("HTTP/1.1 204 No Content" () "") (answer-with '(204 () ()))))
  (is (equal '("HTTP/1.1 304 Not Modified" () "") (answer-with '(304 () ())))))

(test requests-for-heads
  (with-application (place (lambda (environment)
                             (if (path-p "/told" environment)
                                 '(200 (:content-length 1000) ())
                                 '(200 () ("body")))))
    (with-connection (stream place)
      (loop for (target length) in '(("/" 4) ("/told" 1000))
            do (send-parts stream (message (format nil "HEAD ~A HTTP/1.1" target) "Host: x" ""))
               (is (equal (list (format nil "Content-Length: ~D" length))
                          (second (read-reply stream :head-only-p t))))))))

(test errors-of-applications
  (let ((errors '()))
    (with-application (place (lambda (environment)
                               (cond ((path-p "/error" environment) (error "fails"))
                                     ((path-p "/nil" environment) nil)
                                     (t '(200 () (3)))))
                             :on-error (lambda (condition) (push condition errors)))
      (dolist (target '("/error" "/nil" "/number"))
        (is (equal "HTTP/1.1 500 Internal Server Error" (first (ask place target))) target))
      (is (= 3 (length errors))))))

;;;; Responses that are functions

(defun respond-by-function (environment)
  (cond ((path-p "/whole" environment)
         (lambda (responder) (funcall responder '(200 () ("whole")))))
        ((path-p "/parts" environment)
         (lambda (responder)
           (let ((writer (funcall responder '(200 (:content-type "text/plain")))))
             (funcall writer "one ")
             (funcall writer (string-octets "two "))
             (funcall writer "a three b" :start 2 :end 7)
             (funcall writer nil :close t))))
        ((path-p "/length" environment)
         (lambda (responder)
           (funcall (funcall responder '(200 (:content-length 3))) "abc" :close t)))
        ((path-p "/later" environment)
         (lambda (responder)
           (make-thread (lambda ()
                          (sleep 1/50)
                          (let ((writer (funcall responder '(200 ()))))
                            (funcall writer "la")
                            (sleep 1/50)
                            (funcall writer "ter" :close t))))))
        ((path-p "/never" environment) #'identity)
        ((path-p "/open" environment)
         (lambda (responder) (funcall (funcall responder '(200 ())) "begun")))
        (t (lambda (responder) (declare (ignore responder)) (error "fails")))))

(test delayed-responses
  (on-carriers (n :counts '(1 2))
    (with-application (place #'respond-by-function :carrier-count n)
      (with-connection (stream place)
        (loop for (target body) in '(("/whole" "whole") ("/parts" "one two three")
                                     ("/length" "abc") ("/later" "later") ("/whole" "whole"))
              do (send-parts stream (request target))
                 (is (equal body (third (read-reply stream))) target))))))

;;; Prevents: a fiber that waits for ever; a responder that writes to another client.
(test responses-that-do-not-come
  (with-application (place #'respond-by-function :response-timeout 1/20)
    (is (equal "HTTP/1.1 503 Service Unavailable" (first (ask place "/never"))))
    (is (search "MISSING END" (third (ask place "/open"))))
    (is (equal "HTTP/1.1 500 Internal Server Error" (first (ask place "/error"))))))

(test responses-that-come-too-late
  (let ((late nil))
    (with-application (place (lambda (environment)
                               (declare (ignore environment))
                               (lambda (responder) (setf late responder)))
                             :response-timeout 1/50)
      (is (equal "HTTP/1.1 503 Service Unavailable" (first (ask place "/"))))
      (signals error (funcall late '(200 () ("late")))))))

;;;; Connections that an application takes

(defun echo-application (environment)
  "Send back what comes, in capitals, until it is a Q."
  (lambda (responder)
    (declare (ignore responder))
    (let ((socket (getf environment :clack.io)))
      (setf (clack.socket:read-callback socket)
            (lambda (octets)
              (clack.socket:write-sequence-to-socket
               socket (string-octets (string-upcase (octets-string-of octets))))
              (when (find (char-code #\q) octets) (clack.socket:close-socket socket))))
      (clack.socket:write-sequence-to-socket-buffer socket (message "HTTP/1.1 101 X" "Upgrade: x"))
      (clack.socket:write-sequence-to-socket-buffer socket (message ""))
      (clack.socket:flush-socket-buffer socket))))

(defun octet-stream (socket)
  (sb-bsd-sockets:socket-make-stream socket :input t :output t :buffering :full :timeout 20
                                            :element-type '(unsigned-byte 8)))

(test upgraded-connections
  (on-carriers (n :counts '(1 2))
    (with-application (place #'echo-application :carrier-count n)
      (let ((streams (loop repeat 20 collect (connect-to place))))
        (unwind-protect
             (let ((streams (loop for socket in streams
                                  collect (octet-stream socket))))
               (dolist (stream streams)
                 (send-parts stream (request "/" "Connection: upgrade" "Upgrade: x"))
                 (is (equal "HTTP/1.1 101 X" (first (read-reply stream)))))
               (loop for text in '("hello" "echo" "q")
                     do (dolist (stream streams)
                          (send-parts stream (string-octets text))
                          (is (equal (string-upcase text)
                                     (octets-string-of (read-octets stream (length text)))))))
               (dolist (stream streams) (is (null (read-byte stream nil)))))
          (mapc #'sb-bsd-sockets:socket-close streams))))))

(test written-from-other-threads
  (let ((sockets '()) (lock (make-mutex)))
    (with-application (place (lambda (environment)
                               (lambda (responder)
                                 (declare (ignore responder))
                                 (let ((socket (getf environment :clack.io)))
                                   (setf (clack.socket:read-callback socket) #'identity)
                                   (with-mutex (lock) (push socket sockets))))))
      (with-connection (stream place)
        (send-parts stream (request "/" "Connection: upgrade" "Upgrade: x"))
        (wait-until sockets)
        (let ((threads
                (loop with digits = (string-octets "0123456789")
                      repeat 4
                      collect (make-thread
                               (lambda ()
                                 (loop repeat 100
                                       do (clack.socket:write-sequence-to-socket
                                           (first sockets) digits)))))))
          (is (equal (apply #'concatenate 'string (loop repeat 400 collect "0123456789"))
                     (octets-string-of (read-octets stream 4000))))
          (mapc #'join-thread threads))))))

;;; A word that is echoed, and one that a thread pushes, are each whole.
(defun words-of (octets)
  (let ((text (octets-string-of octets)))
    (sort (loop for start from 0 below (length text) by 5
                collect (subseq text start (+ start 5)))
          #'string<)))

(defun send-at-once (stream octets)
  (write-sequence octets stream)
  (finish-output stream))

(test a-thousand-sockets-and-threads-that-push
  (exchange-limit +rlimit-nofile+ 4096 t)
  (let ((sockets '()) (lock (make-mutex)))
    (with-application (place (lambda (environment)
                               (with-mutex (lock) (push (getf environment :clack.io) sockets))
                               (echo-application environment))
                             :carrier-count 2)
      (let ((streams (loop repeat 1000 collect (octet-stream (connect-to place)))))
        (unwind-protect
             (progn
               (dolist (stream streams)
                 (send-at-once stream (request "/" "Connection: upgrade" "Upgrade: x")))
               (is (every (lambda (stream) (equal "HTTP/1.1 101 X" (first (read-reply stream))))
                          streams))
               (let ((threads (loop for word in '("01234" "56789")
                                    collect (make-thread
                                             (lambda (octets)
                                               (dolist (socket sockets)
                                                 (clack.socket:write-sequence-to-socket
                                                  socket octets)))
                                             :arguments (list (string-octets word))))))
                 (dolist (stream streams) (send-at-once stream (string-octets "hello")))
                 (mapc #'join-thread threads))
               (is (= 1000 (count-if (lambda (stream)
                                       (equal '("01234" "56789" "HELLO")
                                              (words-of (read-octets stream 15))))
                                     streams))))
          (mapc #'close streams))))))

;;;; What Clack calls

;;; CLACKUP runs this in a thread, which it destroys to stop the server.
(test run-until-destroyed
  (let* ((path (temporary-path "socket"))
         (place (list :unix path))
         (port 0)
         (thread (make-thread
                  (lambda ()
                    (clack.handler.sb-fiber:run
                     (lambda (environment)
                       (setf port (getf environment :server-port))
                       '(200 () ("served")))
                     :listen (list place) :debug nil :use-default-middlewares nil)))))
    (is (equal "served" (wait-until (handler-case (third (ask place "/"))
                                      (sb-bsd-sockets:socket-error () nil)))))
    (is (= 80 port))
    (sb-thread:terminate-thread thread)
    (join-thread thread :default nil)
    (is (null (probe-file path)))))

(test large-lists-of-strings
  (is (equal (make-string 40000 :initial-element #\a)
             (third (answer-with (list 200 '() (loop repeat 40000 collect "a")))))))

;;; Prevents: what one client is sent getting to another, whose descriptor has the same number.
(test sockets-of-clients-that-are-gone
  (let ((old nil))
    (with-application (place (lambda (environment)
                               (let ((socket (getf environment :clack.io)))
                                 (if (path-p "/old" environment)
                                     (progn (setf old socket) '(200 () ("old")))
                                     (progn (clack.socket:write-sequence-to-socket
                                             old (string-octets "stray"))
                                            (clack.socket:close-socket old)
                                            '(200 () ("new")))))))
      (with-connection (stream place)
        (send-parts stream (request "/old"))
        (is (equal "old" (third (read-reply stream))))
        (send-parts stream (request "/new"))
        (is (equal "new" (third (read-reply stream))))))))

;;; Prevents: a fiber, and the server that is stopped, waiting for a thread that waits for ever for
;;; a client that does not read.
(test writers-in-threads-have-deadlines
  (let* ((ended (make-flag)) (outcome nil)
         (application
          (lambda (environment)
            (declare (ignore environment))
            (lambda (responder)
              (make-thread
               (lambda ()
                 (setf outcome
                       (handler-case
                           (loop with writer = (funcall responder '(200 ()))
                                 with part = (make-array 1000000 :element-type '(unsigned-byte 8))
                                 repeat 100 do (funcall writer part)
                                 finally (return :sent))
                         (error (condition) (type-of condition))))
                 (raise-flag ended)))))))
    (with-application (place application :timeout 1/10)
      (with-connection (stream place)
        (send-parts stream (request "/"))
        (is-true (wait-until (flag-value ended)))
        (is (eq 'sb-fiber-http:timed-out outcome))))))

(defun flood (responder outcome)
  "Send more than any client takes unread; raise OUTCOME when that ends."
  (handler-case
      (loop with writer = (funcall responder '(200 ()))
            with part = (make-array 1000000 :element-type '(unsigned-byte 8))
            do (funcall writer part))
    (error () (raise-flag outcome))))

(defun flooding-application (outcome)
  (lambda (environment)
    (declare (ignore environment))
    (lambda (responder) (make-thread #'flood :arguments (list responder outcome)))))

;;; Prevents: a server that cannot be stopped while a thread sends to a client that does not read.
(test stopped-while-a-thread-sends
  (let* ((outcome (make-flag))
         (server (clack.handler.sb-fiber:start (flooding-application outcome)
                                               :port 0 :timeout nil :response-timeout nil)))
    (with-connection (stream (first (sb-fiber-http:server-places server)))
      (send-parts stream (request "/"))
      (wait-until (< 1000000 (getf (server-statistics server) :sent)))
      (is (null (sb-fiber-http:stop-server server :drain 1/20)))
      (is-true (wait-until (flag-value outcome))))))

;;; Prevents: a connection that is kept for ever when its client is gone.
(test clients-that-leave-threads-behind
  (let* ((outcome (make-flag))
         (server (clack.handler.sb-fiber:start (flooding-application outcome)
                                               :port 0 :response-timeout nil)))
    (unwind-protect
         (progn
           (with-connection (stream (first (sb-fiber-http:server-places server)))
             (send-parts stream (request "/"))
             (read-byte stream))
           (is-true (wait-until (flag-value outcome)))
           (is-true (wait-until (= 0 (getf (server-statistics server) :connections)))))
      (sb-fiber-http:stop-server server :drain 0))))

;;; Prevents: a frame that begins in the midst of another.
(test sockets-end-when-a-frame-is-cut-off
  (let ((closed-p (make-flag)))
    (with-application (place (lambda (environment)
                               (lambda (responder)
                                 (declare (ignore responder))
                                 (let ((socket (getf environment :clack.io)))
                                   (setf (clack.socket:read-callback socket) #'identity)
                                   (handler-case
                                       (clack.socket:write-sequence-to-socket
                                        socket
                                        (make-array 30000000 :element-type '(unsigned-byte 8)))
                                     (sb-fiber-http:timed-out ()
                                       (when (clack.handler.sb-fiber::socket-closed-p socket)
                                         (raise-flag closed-p)))))))
                             :timeout 1/10)
      (with-connection (stream place)
        (send-parts stream (request "/"))
        (is-true (wait-until (flag-value closed-p)))))))
