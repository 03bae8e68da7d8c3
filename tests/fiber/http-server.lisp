;;;; Tests of the servers of the HTTP engine: exchanges, files, listeners, limits, stopping

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(require :sb-posix)
(load (merge-pathnames "support/http.lisp" *load-truename*))

(def-suite* http-server)

(import '(sb-fiber-http:exchange-head sb-fiber-http:head-target sb-fiber-http:reply
          sb-fiber-http:begin-reply sb-fiber-http:send-part sb-fiber-http:end-reply
          sb-fiber-http:string-octets sb-fiber-http:server-statistics
          sb-fiber-http:start-server sb-fiber-http:stop-server sb-fiber-http:server-places))

(defvar *text* '(("Content-Type" . "text/plain")))

(defun octets-of-size (n)
  (map 'sb-fiber-http:octets (lambda (i) (+ 97 (mod i 26))) (loop for i below n collect i)))

(defun target-of (exchange) (head-target (exchange-head exchange)))

(defun reply-with (exchange control &rest arguments)
  (reply exchange 200 *text* (string-octets (apply #'format nil control arguments))))

;;;; A server

(defmacro with-test-server ((server place handler &rest arguments) &body body)
  `(let* ((,server (start-server ,handler ,@arguments :port 0 :on-error #'identity))
          (,place (first (server-places ,server))))
     (declare (ignorable ,place))
     (unwind-protect (progn ,@body)
       (stop-server ,server :drain 0))))

(defun statistic (server key) (getf (server-statistics server) key))

;;;; Replies, whole and in parts

(defun reply-in-parts (exchange parts &rest arguments)
  (apply #'begin-reply exchange 200 *text* arguments)
  (dolist (part parts) (send-part exchange part))
  (end-reply exchange))

(defun serve-parts (exchange)
  (let ((target (target-of exchange)))
    (cond ((string= target "/whole") (reply-with exchange "whole"))
          ((string= target "/none") (reply-in-parts exchange '()))
          ((string= target "/length")
           (reply-in-parts exchange (list (string-octets "abc") (string-octets "de")) :length 5))
          ((string= target "/short")
           (reply-in-parts exchange (list (string-octets "abc")) :length 5))
          ((string= target "/open")
           (begin-reply exchange 200 *text*)
           (send-part exchange (string-octets "abc")))
          (t (reply-in-parts exchange
                             (loop for size in '(1 0 5 16384 16385 100000)
                                   collect (octets-of-size size)))))))

(test replies-in-parts
  (on-carriers (n :counts '(1 2))
    (with-test-server (server place #'serve-parts :carrier-count n)
      (with-connection (stream place)
        (loop for (target body) in `(("/whole" "whole") ("/none" "") ("/length" "abcde")
                                     ("/parts" ,(octets-string-of
                                                 (apply #'join-octets
                                                        (mapcar #'octets-of-size
                                                                '(1 5 16384 16385 100000)))))
                                     ("/whole" "whole"))
              do (send-parts stream (request target))
                 (is (equal body (third (read-reply stream))) target))))))

;;; Prevents: a body that looks whole to a client, and is not.
(test replies-that-do-not-end
  (with-test-server (server place #'serve-parts)
    (with-connection (stream place)
      (send-parts stream (request "/short"))
      (is (equal "abc" (third (read-reply stream))))
      (is (null (read-byte stream nil))))
    (with-connection (stream place)
      (send-parts stream (request "/open"))
      (is (search "MISSING END" (third (read-reply stream)))))))

(test clients-of-http-1.0
  (with-test-server (server place #'serve-parts)
    (flet ((answer (target)
             (answer-to place (message (format nil "GET ~A HTTP/1.0" target) ""))))
      (is (equal `("HTTP/1.1 200 OK" ("Content-Type: text/plain" "Connection: close")
                   ,(octets-string-of (apply #'join-octets
                                             (mapcar #'octets-of-size '(1 5 16384 16385 100000)))))
                 (answer "/parts")))
      (is (equal "whole" (third (answer "/whole")))))))

(test requests-for-heads
  (with-test-server (server place #'serve-parts)
    (with-connection (stream place)
      (loop for (target field) in '(("/whole" "Content-Length: 5") ("/length" "Content-Length: 5")
                                    ("/parts" "Transfer-Encoding: chunked"))
            do (send-parts stream (message (format nil "HEAD ~A HTTP/1.1" target) "Host: x" ""))
               (is (member field (second (read-reply stream :head-only-p t)) :test #'string=))))))

(test errors-of-handlers
  (let ((errors '()))
    (with-test-server (server place
                              (lambda (exchange)
                                (let ((target (target-of exchange)))
                                  (cond ((string= target "/error") (error "The handler fails."))
                                        ((string= target "/twice")
                                         (reply-with exchange "once")
                                         (reply-with exchange "twice"))
                                        ((string= target "/longer")
                                         (begin-reply exchange 200 '() :length 1)
                                         (send-part exchange (string-octets "ab")))
                                        ((string= target "/split")
                                         (reply exchange 200 `(("X" . ,(format nil "a~%b")))
                                                (string-octets ""))))))
                              :on-error (lambda (condition)
                                          (push (princ-to-string condition) errors)))
      (is (equal '("HTTP/1.1 500 Internal Server Error"
                   ("Content-Type: text/plain" "Content-Length: 22" "Connection: close")
                   "Internal Server Error
")
                 (ask place "/error")))
      (is (equal '("The handler fails.") errors))
      (is (equal "HTTP/1.1 500 Internal Server Error" (first (ask place "/nothing"))))
      (is (= 1 (length errors)))
      (is (equal "once" (third (ask place "/twice"))))
      (is (equal "" (third (ask place "/longer"))))
      (is (equal "HTTP/1.1 500 Internal Server Error" (first (ask place "/split"))))
      (is (= 4 (length errors)))
      (is (= 4 (statistic server :errors))))))

(test requests-that-are-refused
  (with-test-server (server place (lambda (exchange)
                                    (loop with stream = (sb-fiber-http:make-body-stream exchange)
                                          while (read-byte stream nil))
                                    (reply-with exchange "read"))
                            :max-head 1000 :max-body 10)
    (loop for (status . parts)
            in `((431 ,(request "/" (format nil "X: ~A" (make-string 2000 :initial-element #\a))))
                 (414 ,(request (format nil "/~A" (make-string 2000 :initial-element #\a))))
                 (400 ,(message "GET  / HTTP/1.1" ""))
                 (413 ,(request "/" "Content-Length: 11"))
                 (413 ,(request "/" "Transfer-Encoding: chunked")
                      ,(message "b" "01234567890" "0" ""))
                 (200 ,(request "/" "Content-Length: 10") ,(string-octets "0123456789")))
          do (is (eql status (parse-integer (first (apply #'answer-to place parts))
                                            :start 9 :end 12))))
    (is (= 0 (statistic server :errors)))))

(test bodies-as-streams
  (with-test-server (server place
                            (lambda (exchange)
                              (let* ((stream (sb-fiber-http:make-body-stream exchange))
                                     (first (read-byte stream nil))
                                     (rest (make-array 100000 :element-type '(unsigned-byte 8)))
                                     (n (read-sequence rest stream)))
                                (reply-with exchange "~S ~D ~S ~S" first n
                                            (read-byte stream nil :end)
                                            (second (stream-element-type stream))))))
    (with-connection (stream place)
      (loop for size in '(0 1 2 50000)
            do (send-parts stream (request "/" (format nil "Content-Length: ~D" size))
                           (octets-of-size size))
               (is (equal (format nil "~S ~D :END 8" (and (plusp size) 97) (max 0 (1- size)))
                          (third (read-reply stream)))))
      (send-parts stream (request "/" "Content-Length: 2" "Expect: 100-continue"))
      (is (equal "HTTP/1.1 100 Continue" (first (read-reply stream))))
      (send-parts stream (string-octets "ab"))
      (is (equal "97 1 :END 8" (third (read-reply stream)))))))

;;; Prevents: bodies without limits, and connections that are closed, for clients that would like
;;; another protocol.
(test upgrades-that-nobody-wants
  (with-test-server (server place
                            (lambda (exchange)
                              (reply-with exchange "~S"
                                          (read-byte (sb-fiber-http:make-body-stream exchange)
                                                     nil :end))))
    (with-connection (stream place)
      (loop repeat 2
            do (send-parts stream (request "/" "Connection: Upgrade" "Upgrade: h2c"))
               (is (equal ":END" (third (read-reply stream))))))))

;;; Prevents: an interim reply in the midst of another.
(test bodies-that-are-read-after-the-reply-began
  (with-test-server (server place
                            (lambda (exchange)
                              (begin-reply exchange 200 *text*)
                              (send-part exchange (string-octets "begun "))
                              (let ((stream (sb-fiber-http:make-body-stream exchange)))
                                (send-part exchange
                                           (string-octets (format nil "~S" (read-byte stream)))))
                              (end-reply exchange)))
    (with-connection (stream place)
      (send-parts stream (request "/" "Content-Length: 1" "Expect: 100-continue")
                  (string-octets "a"))
      (is (equal "begun 97" (third (read-reply stream)))))))

;;; Prevents: a second reply behind a part of the first one.
(test replies-that-were-cut-off
  (let ((again nil))
    (with-test-server (server place
                              (lambda (exchange)
                                (handler-case
                                    (reply exchange 200 *text*
                                           (make-array 30000000 :element-type '(unsigned-byte 8)))
                                  (sb-fiber-http:timed-out ()
                                    (setf again (handler-case (reply-with exchange "again")
                                                  (error () :refused))))))
                              :timeout 1/10)
      (with-connection (stream place)
        (send-parts stream (request "/"))
        (wait-until again)
        (is (eq :refused again))
        (is (> 30000000 (length (third (read-reply stream)))))
        (is (null (read-byte stream nil)))))))

(test stacks-that-are-used-up
  (labels ((recurse (n) (if (= n 0) 0 (1+ (recurse (1- n))))))
    (with-test-server (server place (lambda (exchange)
                                      (if (string= "/deep" (target-of exchange))
                                          (reply-with exchange "~D" (recurse 100000000))
                                          (reply-with exchange "flat"))))
      (loop repeat 3
            do (is (equal "HTTP/1.1 500 Internal Server Error" (first (ask place "/deep"))))
               (is (equal "flat" (third (ask place "/")))))
      (is (= 3 (statistic server :errors))))))

;;;; Files

(defun serve-file (path)
  (lambda (exchange)
    (sb-fiber-http:reply-with-file exchange path :fields *text*)))

(test files-of-all-sizes
  (on-carriers (n :counts '(1 2))
    (loop for size in '(0 1 100000 3000000)
          do (call-with-file
              (lambda (path)
                (with-test-server (server place (serve-file path) :carrier-count n)
                  (with-connection (stream place)
                    (loop repeat 2
                          do (send-parts stream (request "/"))
                             (is (equalp (octets-string-of (octets-of-size size))
                                         (third (read-reply stream))))))))
              (octets-of-size size)))))

;;; Each carrier has clients to serve while another client takes its time.
(test files-for-slow-readers
  (call-with-file
   (lambda (path)
     (with-test-server (server place (serve-file path) :carrier-count 1)
       (with-connection (slow place)
         (send-parts slow (request "/"))
         (wait-until (= 1 (statistic server :in-progress)))
         (is (equal "HTTP/1.1 206 Partial Content" (first (ask place "/" "Range: bytes=0-9"))))
         (is (= 20000000 (length (third (read-reply slow))))))))
   (octets-of-size 20000000)))

(test ranges
  (call-with-file
   (lambda (path)
     (with-test-server (server place (serve-file path))
       (loop for (range status body content-range)
               in '(("bytes=0-3" 206 "abcd" "bytes 0-3/26") ("bytes=24-" 206 "yz" "bytes 24-25/26")
                    ("bytes=-2" 206 "yz" "bytes 24-25/26")
                    ("bytes=20-100" 206 "uvwxyz" "bytes 20-25/26")
                    ("bytes=-100" 206 "abcdefghijklmnopqrstuvwxyz" "bytes 0-25/26")
                    ("bytes=26-" 416 "" "bytes */26") ("bytes=-0" 416 "" "bytes */26")
                    ("bytes=3-1" 200 "abcdefghijklmnopqrstuvwxyz" nil)
                    ("bytes=0-1,3-4" 200 "abcdefghijklmnopqrstuvwxyz" nil)
                    ("bytes=a-b" 200 "abcdefghijklmnopqrstuvwxyz" nil)
                    ("octets=0-1" 200 "abcdefghijklmnopqrstuvwxyz" nil))
             do (destructuring-bind (line fields answer)
                    (ask place "/" (format nil "Range: ~A" range))
                  (is (equal (list status body content-range)
                             (list (parse-integer line :start 9 :end 12) answer
                                   (field-of "Content-Range" fields)))
                      range)))))
   (octets-of-size 26)))

(test conditions
  (call-with-file
   (lambda (path)
     (with-test-server (server place (serve-file path))
       (let ((date (field-of "Last-Modified" (second (ask place "/")))))
         (flet ((status (&rest fields)
                  (parse-integer (first (apply #'ask place "/" fields)) :start 9 :end 12)))
           (is (= 304 (status (format nil "If-Modified-Since: ~A" date))))
           (is (= 200 (status "If-Modified-Since: Sun, 06 Nov 1994 08:49:37 GMT")))
           (is (= 200 (status "If-Modified-Since: yesterday")))
           (is (= 206 (status "Range: bytes=0-1" (format nil "If-Range: ~A" date))))
           (is (= 200 (status "Range: bytes=0-1"
                              "If-Range: Sun, 06 Nov 1994 08:49:37 GMT")))))))
   (octets-of-size 26)))

(test files-that-are-none
  (with-test-server (server place (serve-file "/no/such/file"))
    (is (equal "HTTP/1.1 500 Internal Server Error" (first (ask place "/")))))
  (with-test-server (server place (serve-file "/"))
    (is (equal "HTTP/1.1 500 Internal Server Error" (first (ask place "/"))))))

(test dates-of-requests
  (flet ((both (time) (sb-fiber-http:parse-date (sb-fiber-http:date-string time))))
    (loop for time = (random (* 200 365 86400)) repeat 100
          do (is (= time (both time)))))
  (is (null (sb-fiber-http:parse-date "")))
  (is (null (sb-fiber-http:parse-date "Sun, 06 Nov 1994 08:49:37 CET")))
  (is (null (sb-fiber-http:parse-date "Sun, 06 Nop 1994 08:49:37 GMT")))
  (is (null (sb-fiber-http:parse-date "Sun, 66 Nov 1994 08:49:37 GMT"))))

;;;; Listeners

(defun reply-with-peer (exchange)
  (let ((peer (sb-fiber-http:client-peer (sb-fiber-http:exchange-client exchange))))
    (reply-with exchange "~A" (and peer (sb-fiber-http:address-string (first peer))))))

(test several-places
  (let ((path (temporary-path "socket")))
    (with-test-server (server place #'reply-with-peer
                              :listen `((:tcp "127.0.0.1" 0) (:unix ,path)))
      (is (equal '("127.0.0.1" "NIL")
                 (loop for place in (server-places server) collect (third (ask place "/"))))))
    (is (null (probe-file path)))))

(defun ipv6-p ()
  (handler-case
      (let ((socket (make-instance 'sb-bsd-sockets:inet6-socket :type :stream :protocol :tcp)))
        (unwind-protect
             (progn (sb-bsd-sockets:socket-bind socket (sb-bsd-sockets:make-inet6-address "::1") 0)
                    t)
          (sb-bsd-sockets:socket-close socket)))
    (sb-bsd-sockets:socket-error () nil)))

(test addresses-of-ipv6
  (if (ipv6-p)
      (with-test-server (server place #'reply-with-peer :address "::1")
        (is (equal "::1" (third (ask place "/")))))
      (skip "The machine has no IPv6.")))

;;; Prevents: a server that does not start since the one before was killed; one that takes the place
;;; of another which is alive.
(test places-in-the-file-system
  (let ((path (temporary-path "socket")))
    (let ((socket (make-instance 'sb-bsd-sockets:local-socket :type :stream)))
      (sb-bsd-sockets:socket-bind socket path)
      (sb-bsd-sockets:socket-close socket))
    (is-true (probe-file path))
    (with-test-server (server place #'reply-with-peer :listen `((:unix ,path)))
      (signals sb-bsd-sockets:address-in-use-error
        (start-server #'identity :listen `((:unix ,path))))
      (is (equal "NIL" (third (ask place "/"))))))
  ;; A file that is no socket stays.
  (call-with-file
   (lambda (path)
     (signals sb-bsd-sockets:socket-error (start-server #'identity :listen `((:unix ,path))))
     (is-true (probe-file path)))
   (string-octets "precious")))

(test inherited-sockets
  (let ((socket (make-instance 'sb-bsd-sockets:inet-socket :type :stream :protocol :tcp)))
    (sb-bsd-sockets:socket-bind socket #(127 0 0 1) 0)
    (sb-bsd-sockets:socket-listen socket 5)
    (sb-ext:cancel-finalization socket)
    (with-test-server (server place #'reply-with-peer
                              :listen `((:fd ,(sb-bsd-sockets:socket-file-descriptor socket))))
      ;; No finalizer closes it.
      (loop repeat 3 do (sb-ext:gc :full t) (sb-impl::run-pending-finalizers))
      (is (equal "127.0.0.1" (third (ask place "/"))))))
  (flet ((places (pid n)
           (sb-posix:setenv "LISTEN_PID" (princ-to-string pid) 1)
           (sb-posix:setenv "LISTEN_FDS" n 1)
           (unwind-protect (sb-fiber-http:inherited-places)
             (sb-posix:unsetenv "LISTEN_PID")
             (sb-posix:unsetenv "LISTEN_FDS"))))
    (is (equal '((:fd 3) (:fd 4)) (places (sb-posix:getpid) "2")))
    (is (null (places 1 "2")))
    (is (null (places (sb-posix:getpid) "many")))
    (is (null (sb-fiber-http:inherited-places)))))

(test shared-ports
  (with-test-server (server place #'reply-with-peer :share-port t)
    (with-test-server (other place-2 #'reply-with-peer :listen (list place) :share-port t)
      (is (equal place place-2)))
    (signals sb-bsd-sockets:address-in-use-error
      (start-server #'identity :listen (list place)))))

(test bad-arguments
  (signals type-error (start-server #'identity :listen '((:tcp "127.0.0.1" 70000))))
  (signals type-error (start-server #'identity :listen '("127.0.0.1")))
  (signals error (start-server #'identity :address "no address" :port 0))
  (signals error (start-server #'identity :port 0 :when-full :forget))
  (with-group (group 1)
    (signals error (start-server #'identity :port 0 :group group :carrier-count 1))))

;;;; Limits

(test more-clients-than-may-be
  (with-test-server (server place #'reply-with-peer :max-connections 1 :when-full :refuse)
    (with-connection (stream place)
      (send-parts stream (request "/"))
      (is (equal "127.0.0.1" (third (read-reply stream))))
      (is (equal "HTTP/1.1 503 Service Unavailable"
                 (with-connection (refused place) (first (read-reply refused))))))
    (wait-until (= 0 (statistic server :connections)))
    (is (equal "127.0.0.1" (third (ask place "/"))))
    (is (= 1 (statistic server :refused)))))

(test clients-that-wait-for-others
  (with-test-server (server place #'reply-with-peer :max-connections 1)
    (with-connection (stream place)
      (send-parts stream (request "/"))
      (is (equal "127.0.0.1" (third (read-reply stream))))
      (let ((other (make-thread (lambda () (third (ask place "/"))))))
        (send-parts stream (request "/"))
        (is (equal "127.0.0.1" (third (read-reply stream))))
        (is (= 1 (statistic server :connections)))
        (close stream)
        (is (equal "127.0.0.1" (join-thread other)))))
    (is (= 2 (statistic server :accepted)))))

;;; Prevents: clients that are refused though they may wait, when there are two that accept.
(test clients-that-wait-at-two-places
  (with-test-server (server place #'reply-with-peer
                            :max-connections 1
                            :listen '((:tcp "127.0.0.1" 0) (:tcp "127.0.0.1" 0)))
    (let ((clients (loop for place in (append (server-places server) (server-places server))
                         collect (let ((place place))
                                   (make-thread
                                    (lambda ()
                                      (loop repeat 20 collect (third (ask place "/")))))))))
      (is (equal (loop repeat 80 collect "127.0.0.1") (mapcan #'join-thread clients)))
      (is (= 0 (statistic server :refused))))))

(test counters
  (with-test-server (server place #'serve-parts)
    (with-connection (stream place)
      (loop repeat 3 do (send-parts stream (request "/whole")) (read-reply stream))
      (let ((numbers (server-statistics server)))
        (is (= 1 (getf numbers :connections)))
        (is (= 3 (getf numbers :requests)))
        (is (= (* 3 (length (request "/whole"))) (getf numbers :received)))
        (is (< 300 (getf numbers :sent)))))
    (wait-until (= 0 (statistic server :connections)))
    (is (= 3 (statistic server :requests)))
    (is (= (* 3 (length (request "/whole"))) (statistic server :received)))))

(test clients-that-take-too-long
  (with-test-server (server place #'reply-with-peer :timeout 1/20 :idle-timeout 1/20)
    (with-connection (stream place)
      (is (null (read-byte stream nil))))
    (with-connection (stream place)
      (send-parts stream (subseq (request "/") 0 5))
      (is (null (read-byte stream nil))))
    (wait-until (= 0 (statistic server :connections)))
    (is (= 0 (statistic server :errors)))))

;;;; Hostile and unlucky clients

(defun reset (socket)
  "Close SOCKET such that the other end sees that it was reset."
  (sb-alien:with-alien ((linger (array sb-alien:int 2)))
    (setf (sb-alien:deref linger 0) 1
          (sb-alien:deref linger 1) 0)
    (sb-alien:alien-funcall
     (sb-alien:extern-alien "setsockopt" (function sb-alien:int sb-alien:int sb-alien:int
                                                   sb-alien:int (* t) sb-alien:unsigned))
     (sb-bsd-sockets:socket-file-descriptor socket) sb-bsd-sockets-internal::sol-socket
     13                                 ; SO_LINGER of Linux
     (sb-alien:addr linger) 8))
  (sb-bsd-sockets:socket-close socket))

(defun send-and-reset (place octets)
  (let ((socket (connect-to place)))
    (sb-bsd-sockets:socket-send socket octets nil)
    (reset socket)))

(defun random-octets (n)
  (map-into (make-array n :element-type '(unsigned-byte 8)) (lambda () (random 256))))

(defun send-without-reading (place octets)
  (with-connection (stream place)
    (handler-case (progn (write-sequence octets stream)
                         (finish-output stream)
                         (loop while (read-byte stream nil)))
      (stream-error () nil))))

(defparameter *hostile-clients*
  (list (lambda (place) (sb-bsd-sockets:socket-close (connect-to place)))
        (lambda (place) (reset (connect-to place)))
        (lambda (place) (send-and-reset place (request "/large")))
        (lambda (place) (send-and-reset place (subseq (request "/") 0 9)))
        (lambda (place) (send-and-reset place (request "/" "Content-Length: 100")))
        (lambda (place) (send-without-reading place (random-octets 500)))
        (lambda (place) (send-without-reading place (mutated (request "/" "Cookie: a=b"))))
        (lambda (place)
          (send-without-reading place (request "/" (format nil "X: ~A" (make-string 100000)))))
        (lambda (place)                 ; a flood, of which nothing is read for long
          (send-without-reading place (apply #'join-octets
                                             (append (loop repeat 200 collect (request "/large"))
                                                     (list (request "/" "Connection: close"))))))
        (lambda (place)                 ; says nothing
          (with-connection (stream place) (read-byte stream nil)))
        (lambda (place)                 ; an octet now and then
          (with-connection (stream place)
            (handler-case (loop for octet across (request "/" (make-string 20))
                                do (write-byte octet stream)
                                   (finish-output stream)
                                   (sleep 1/50))
              (stream-error () nil)))))
  "What clients do, given a place.")

(defun open-descriptors ()
  (length (directory "/proc/self/fd/*" :resolve-symlinks nil)))

(defun be-hostile (place stop)
  (loop until (flag-value stop)
        do (handler-case (funcall (random-element *hostile-clients*) place)
             (sb-bsd-sockets:socket-error () nil))))

;;; Prevents: a client that gets the answers of others, or none; descriptors, fibers or clients that
;;; are left.
(test hostile-clients
  (on-carriers (n :counts '(1 2))
    (let ((before (open-descriptors)))
      (with-test-server (server place
                                (lambda (exchange)
                                  (if (string= "/large" (target-of exchange))
                                      (reply exchange 200 *text* (octets-of-size 30000))
                                      (reply-with exchange "~A" (target-of exchange))))
                                :carrier-count n :timeout 1/5 :idle-timeout 1/5)
        (let* ((stop (make-flag))
               (clients (loop repeat 12
                              collect (make-thread (lambda () (be-hostile place stop))))))
          (loop for i below 300
                for target = (format nil "/~D" i)
                do (is (equal target (third (ask place target)))))
          (raise-flag stop)
          (mapc #'join-thread clients)
          (is-true (wait-until (= 0 (statistic server :connections))))
          (is (= 0 (statistic server :errors)))))
      (is (<= (open-descriptors) before)))))

;;;; Stopping

(test requests-in-progress-are-waited-for
  (on-carriers (n :counts '(1 2))
    (let* ((begun (make-flag)) (go-on (make-flag))
           (server (start-server (lambda (exchange)
                                   (raise-flag begun)
                                   (wait-until (flag-value go-on))
                                   (reply-with exchange "done"))
                                 :port 0 :carrier-count n))
           (place (first (server-places server))))
      (with-connection (idle place)
        (let ((client (make-thread (lambda ()
                                     (with-connection (stream place)
                                       (send-parts stream (request "/"))
                                       (list (third (read-reply stream))
                                             (read-byte stream nil)))))))
          (wait-until (flag-value begun))
          (let ((stopper (make-thread (lambda () (stop-server server)))))
            ;; The one that is idle is closed, and no other is accepted.
            (is (null (read-byte idle nil)))
            (signals sb-bsd-sockets:connection-refused-error (connect-to place))
            (is (null (stop-server server)))
            (raise-flag go-on)
            (is-true (join-thread stopper))
            (is (equal '("done" nil) (join-thread client))))))
      (is (null (sb-fiber-http:wait-for-server server))))))

(test requests-that-take-too-long
  (let* ((begun (make-flag)) (unwound (make-flag))
         (server (start-server (lambda (exchange)
                                 (declare (ignore exchange))
                                 (raise-flag begun)
                                 (unwind-protect (sleep 1000)
                                   (raise-flag unwound)))
                               :port 0)))
    (with-connection (stream (first (server-places server)))
      (send-parts stream (request "/"))
      (wait-until (flag-value begun))
      (is (null (stop-server server :drain 1/100)))
      (is-true (flag-value unwound))
      (is (null (read-byte stream nil))))))

(test stopped-by-a-handler
  (let ((server nil) (drained :unknown))
    (setf server (start-server (lambda (exchange)
                                 (setf drained (stop-server server))
                                 (reply-with exchange "stopped"))
                               :port 0))
    (is (equal "stopped" (third (ask (first (server-places server)) "/"))))
    (sb-fiber-http:wait-for-server server)
    (is (eq t drained))))

;;; Prevents: descriptors, fibers or clients that are left when connections come and go while the
;;; server is stopped.
(test stopped-at-any-time
  (on-carriers (n :counts '(1 2))
    (let ((before nil))
      (loop for i below 12
            do (let* ((server (start-server #'reply-with-peer :port 0 :carrier-count n
                                                              :on-error #'identity))
                      (place (first (server-places server)))
                      (clients (loop repeat 4
                                     collect (make-thread
                                              (lambda ()
                                                (handler-case (loop (ask place "/"))
                                                  (error () :ended)))))))
                 (sleep (random 0.02))
                 (stop-server server)
                 (is (equal '(:ended :ended :ended :ended) (mapcar #'join-thread clients)))
                 (is (= 0 (statistic server :connections))))
               (when (= i 3) (setf before (open-descriptors))))
      (is (<= (open-descriptors) before)))))
