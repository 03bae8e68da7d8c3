;;;; Tests of the connections of the HTTP engine, and of its replies

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/descriptors.lisp" *load-truename*))
(load (merge-pathnames "support/http.lisp" *load-truename*))

(def-suite* http-connection)

(import '(sb-fiber-http:make-connection sb-fiber-http:receive-head sb-fiber-http:receive-body
          sb-fiber-http:make-decoder sb-fiber-http:send-reply sb-fiber-http:deadline-after
          sb-fiber-http:string-octets sb-fiber-http:octets-string sb-fiber-http:head-target
          sb-fiber-http:head-keep-alive-p))

;;;; A server of one connection, and a client

(defun whole-body (connection head)
  "The body behind HEAD, as a string."
  (let ((decoder (make-decoder head 1000000)) (parts '()))
    (loop
      (multiple-value-bind (octets start end)
          (receive-body connection decoder (deadline-after 20))
        (when (= start end) (return (apply #'concatenate 'string (reverse parts))))
        (push (octets-string octets start end) parts)))))

(defun serve (connection &key (idle 20) (seconds 20))
  "Reply to each request with its target and body. Return how it ended."
  (handler-case
      (loop
        (let ((head (receive-head connection (deadline-after idle) seconds)))
          (unless head (return :end))
          (let ((keep-alive-p (head-keep-alive-p head))
                (body (whole-body connection head)))
            ;; The head is still there.
            (send-reply connection 200 '()
                        (string-octets (format nil "~A ~A" (head-target head) body))
                        :keep-alive-p keep-alive-p :seconds 20)
            (unless keep-alive-p (return :closed)))))
    (error (condition) (type-of condition))))

(defun call-with-client (function carriers serve)
  "Call FUNCTION with a stream to and from a fiber that calls SERVE with a connection. Return its
values, and what SERVE has returned."
  (with-group (group carriers)
    (multiple-value-bind (fd peer) (socket-pair)
      (let ((fiber (spawn (group) (unwind-protect (funcall serve (make-connection fd))
                                    (sb-unix:unix-close fd))))
            (stream (sb-sys:make-fd-stream peer :input t :output t :buffering :full
                                                :element-type '(unsigned-byte 8))))
        (let ((values (multiple-value-list (unwind-protect (funcall function stream)
                                             (close stream :abort t)))))
          (values-list (append values (list (join fiber)))))))))

(defmacro with-client ((stream &key (carriers 1) (serve '#'serve)) &body body)
  `(call-with-client (lambda (,stream) (declare (ignorable ,stream)) ,@body) ,carriers ,serve))

(defun body-of-reply (stream) (third (read-reply stream)))

;;;; Requests

(test one-after-another
  (on-carriers (n :counts '(1 2))
    (is (equal '("/a " "/b " :end)
               (multiple-value-list
                (with-client (stream :carriers n)
                  (values (progn (send-parts stream (request "/a")) (body-of-reply stream))
                          (progn (send-parts stream (request "/b")) (body-of-reply stream)))))))))

(test pipelined
  (is (equal '("/0 /1 /2 /3 /4 " :closed)
             (multiple-value-list
              (with-client (stream)
                (send-parts stream
                            (apply #'join-octets
                                   (append (loop for i below 4
                                                 collect (request (format nil "/~D" i)))
                                           (list (request "/4" "Connection: close")
                                                 (request "/5")))))
                (apply #'concatenate 'string
                       (loop repeat 5 collect (body-of-reply stream))))))))

(defun octets-of-size (n)
  (map 'sb-fiber-http:octets (lambda (i) (+ 97 (mod i 26))) (loop for i below n collect i)))

;;; Prevents: a head that is overwritten by the body behind it; one that is not found again when
;;; what was received of it was moved.
(test bodies-of-all-sizes
  (with-client (stream)
    (loop for size in '(0 1 5000 8000 8192 20000 300000)
          for target = (format nil "/~A" (octets-string (octets-of-size (min size 7000))
                                                        0 (min size 7000)))
          do (let ((head (request target (format nil "Content-Length: ~D" size)))
                   (body (octets-of-size size)))
               (send-parts stream (subseq head 0 7) (subseq head 7)
                           (subseq body 0 (floor size 2)) (subseq body (floor size 2)))
               (is (equal (format nil "~A ~A" target (octets-string body 0 size))
                          (body-of-reply stream))
                   "~D octets" size)))))

;;; Prevents: a body that is received an octet at a time behind a head that nearly fills the buffer.
(test room-behind-a-large-head
  (let* ((connection (make-connection 0)) (size sb-fiber-http::+buffer-size+))
    (setf (sb-fiber-http::connection-input connection)
          (make-array size :element-type '(unsigned-byte 8))
          (sb-fiber-http::connection-kept connection) (- size 2)
          (sb-fiber-http::connection-start connection) size
          (sb-fiber-http::connection-end connection) size)
    (sb-fiber-http::make-room connection)
    (is (<= 4096 (- (length (sb-fiber-http::connection-input connection))
                    (sb-fiber-http::connection-end connection))))))

(test chunked-bodies-in-parts
  (with-client (stream)
    (let ((octets (join-octets (request "/" "Transfer-Encoding: chunked")
                               (message "5" "Hello" "1" "!" "0" ""))))
      (loop for i from 1 below (length octets) by 7
            do (send-parts stream (subseq octets 0 i) (subseq octets i))
               (is (equal "/ Hello!" (body-of-reply stream)))))))

(test large-heads
  (with-client (stream)
    (let ((head (request "/" (format nil "Cookie: ~A"
                                     (octets-string (octets-of-size 60000) 0 60000)))))
      (is (equal "/ " (progn (apply #'send-parts stream
                                    (loop for i from 0 below (length head) by 9000
                                          collect (subseq head i (min (length head) (+ i 9000)))))
                             (body-of-reply stream)))))))

;;;; Clients that do not do what they should

(test clients-that-go-away
  (flet ((end-after (&rest parts)
           (nth-value 1 (with-client (stream) (apply #'send-parts stream parts) 1))))
    (is (eq :end (end-after)))
    (is (eq 'sb-fiber-http:connection-lost (end-after (subseq (request "/") 0 9))))
    (is (eq 'sb-fiber-http:connection-lost
            (end-after (request "/" "Content-Length: 5") (string-octets "Hell"))))
    (is (eq 'sb-fiber-http:connection-lost
            (end-after (request "/" "Transfer-Encoding: chunked") (message "5" "Hello"))))
    (is (eq 'sb-fiber-http:bad-request (end-after (message "GET" ""))))))

(test clients-that-say-nothing
  (flet ((end-after (serve &rest parts)
           (nth-value 1 (with-client (stream :serve serve)
                          (handler-case (progn (apply #'send-parts stream parts)
                                               (read-byte stream nil))
                            (stream-error ())))))) ; the server has closed the connection
    (is (eq 'sb-fiber-http:timed-out
            (end-after (lambda (connection) (serve connection :idle 1/50)))))
    ;; The time for a head begins with its first octet, and ends whatever comes.
    (is (eq 'sb-fiber-http:timed-out
            (apply #'end-after (lambda (connection) (serve connection :seconds 1/20))
                   (loop repeat 30 collect (string-octets "a")))))))

;;; Prevents: a carrier, or a fiber, that waits for ever for a client that does not read.
(test clients-that-do-not-read
  (let ((body (make-array 10000000 :element-type '(unsigned-byte 8) :initial-element 65))
        (ended (make-flag)))
    (is (eq 'sb-fiber-http:timed-out
            (with-client (stream :serve (lambda (connection)
                                          (unwind-protect
                                               (handler-case
                                                   (send-reply connection 200 '() body
                                                               :seconds 1/20)
                                                 (error (condition) (type-of condition)))
                                            (raise-flag ended))))
              (wait-until (flag-value ended))
              (values))))))

;;; In a thread, too, time passes.
(test in-a-thread
  (multiple-value-bind (fd peer) (socket-pair)
    (is (eq 'sb-fiber-http:timed-out (serve (make-connection fd) :idle 1/100)))
    (sb-unix:unix-close peer)
    (is (eq :end (serve (make-connection fd) :idle 20)))
    (sb-unix:unix-close fd)))

;;;; Memory

(defun parked-with-buffer-p (octets)
  "Has a connection a buffer when its fiber waits for what comes behind OCTETS?"
  (with-group (group 1)
    (multiple-value-bind (fd peer) (socket-pair)
      (let* ((connection (make-connection fd))
             (fiber (spawn (group) (serve connection)))
             (stream (sb-sys:make-fd-stream peer :output t :buffering :full
                                                 :element-type '(unsigned-byte 8))))
        (send-parts stream octets)
        (wait-until-parked fiber)
        (prog1 (and (sb-fiber-http::connection-input connection) t)
          (close stream)
          (join fiber)
          (sb-unix:unix-close fd))))))

;;; Prevents: buffers for all connections that wait for another request.
(test idle-connections-have-no-buffer
  (is (null (parked-with-buffer-p #())))
  (is (null (parked-with-buffer-p (request "/"))))
  (is-true (parked-with-buffer-p (subseq (request "/") 0 5))))

;;;; Replies

(defun replied (&rest arguments)
  "The reply that SEND-REPLY sends, called with ARGUMENTS after the connection, as by READ-REPLY."
  (values (with-client (stream :serve (lambda (connection)
                                        (apply #'send-reply connection arguments)))
            (read-reply stream :head-only-p (getf (nthcdr 3 arguments) :head-only-p)))))

(test what-a-reply-says
  (is (equal '("HTTP/1.1 200 OK" ("Content-Type: text/plain" "X: a	é" "Content-Length: 5") "Hello")
             (replied 200 '(("Content-Type" . "text/plain") ("X" . "a	é"))
                      (string-octets "Hello"))))
  (is (equal '("HTTP/1.1 404 Not Found" ("Content-Length: 0" "Connection: close") "")
             (replied 404 '() (string-octets "") :keep-alive-p nil)))
  (is (equal '("HTTP/1.1 299 " ("Content-Length: 1") "a") (replied 299 '() (string-octets "a"))))
  (is (equal '("HTTP/1.1 200 OK" ("Content-Length: 5") "")
             (replied 200 '() (string-octets "Hello") :head-only-p t)))
  (is (equal '("HTTP/1.1 204 No Content" () "") (replied 204 '() (string-octets "Hello"))))
  (is (equal '("HTTP/1.1 304 Not Modified" () "") (replied 304 '() (string-octets "Hello")))))

(test replies-of-all-sizes
  (loop for size in '(0 1 9 10 8000 8192 16384 16385 1000000)
        for body = (octets-of-size size)
        do (is (equal (octets-string body 0 size) (third (replied 200 '() body)))
               "~D octets" size)))

;;; Prevents: a reply that is split in two by who has chosen a field.
(test characters-that-fields-must-not-have
  (loop for (name . value) in `(("X" . ,(format nil "a~%b")) ("X" . ,(format nil "a~Cb" #\Return))
                                ("X" . ,(format nil "~C" (code-char 0))) ("X Y" . "a") ("X:" . "a")
                                ("X" . ,(format nil "~C" (code-char 8364))))
        do (flet ((serve (connection)
                    (handler-case
                        (send-reply connection 200 (list (cons name value)) (string-octets ""))
                      (error () :refused))))
             (is (eq :refused (nth-value 1 (with-client (stream :serve #'serve) 1)))
                 "~S" value))))

(test dates
  (flet ((date (&rest time)
           (octets-string-of (sb-fiber-http::date-field (apply #'encode-universal-time
                                                               (append time '(0)))))))
    (is (string= (format nil "Date: Sun, 06 Nov 1994 08:49:37 GMT~C~C" #\Return #\Newline)
                 (date 37 49 8 6 11 1994)))
    (is (string= (format nil "Date: Thu, 29 Feb 2024 00:00:00 GMT~C~C" #\Return #\Newline)
                 (date 0 0 0 29 2 2024)))))
