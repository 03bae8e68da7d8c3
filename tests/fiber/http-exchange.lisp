;;;; Tests of a request and its reply: whole, in parts, refused, failing

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/http-server.lisp" *load-truename*))

(def-suite* http-exchange)

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

;;; Prevents: a client that gets no reply, since TIMEOUT is not an error; or since the handler was a
;;; client of another server, which was slow.
(test time-outs-in-handlers
  (let ((errors (make-flag)))
    (with-test-server (server place
                              (lambda (exchange)
                                (if (string= "/other" (target-of exchange))
                                    (error 'sb-fiber-http:timed-out
                                           :connection (sb-fiber-http:make-connection 0))
                                    (sb-ext:with-timeout 1/100 (sleep 1000))))
                              :on-error (lambda (condition) (note errors (type-of condition))))
      (dolist (target '("/" "/other"))
        (is (equal "HTTP/1.1 500 Internal Server Error" (first (ask place target)))))
      (is (equal '(sb-fiber-http:timed-out sb-ext:timeout) (flag-notes errors))))))

;;; Prevents: what is left of a body being taken for the next request.
(test reading-that-was-left
  (with-test-server (server place
                            (lambda (exchange)
                              (handler-case
                                  (sb-ext:with-timeout 1/20
                                    (read-byte (sb-fiber-http:make-body-stream exchange)))
                                (sb-ext:timeout () (reply-with exchange "late")))))
    (with-connection (stream place)
      (send-parts stream (request "/" "Content-Length: 5"))
      (is (equal "late" (third (read-reply stream))))
      (is (null (read-byte stream nil))))))

(test fields-of-the-server
  (with-test-server (server place
                            (lambda (exchange)
                              (let ((target (target-of exchange)))
                                (reply exchange 200
                                       (cond ((string= target "/length")
                                              '(("content-length" . "9")))
                                             ((string= target "/chunks")
                                              '(("Transfer-Encoding" . "chunked")))
                                             ((string= target "/close") '(("Connection" . "close")))
                                             (t '(("Connection" . "X-Y"))))
                                       (string-octets "ok")))))
    (dolist (target '("/length" "/chunks"))
      (is (equal "HTTP/1.1 500 Internal Server Error" (first (ask place target)))))
    (with-connection (stream place)
      (send-parts stream (request "/"))
      (is (equal '("Connection: X-Y" "Content-Length: 2") (second (read-reply stream))))
      (send-parts stream (request "/close"))
      (is (equal '("Content-Length: 2" "Connection: close") (second (read-reply stream))))
      (is (null (read-byte stream nil))))
    (with-connection (stream place)
      (send-parts stream (message "GET /x HTTP/1.0" "Connection: keep-alive" ""))
      (is (member "Connection: keep-alive" (second (read-reply stream)) :test #'string=)))))

;;; Prevents: a proxy that waits for the body of a reply to "head".
(test methods-in-lower-case
  (with-test-server (server place #'serve-parts)
    (is (equal "whole" (third (answer-to place (message "head /whole HTTP/1.1" "Host: x" "")))))))

;;; Prevents: a client cut off that takes its time for a large reply, but takes it.
(test slow-readers-of-large-replies
  (let ((size 30000000))
    (with-test-server (server place
                              (lambda (exchange)
                                (reply exchange 200 *text*
                                       (make-array size :element-type '(unsigned-byte 8))))
                              :timeout 1/2)
      (with-connection (stream place)
        (send-parts stream (request "/" "Connection: close"))
        (let ((buffer (make-array 1000000 :element-type '(unsigned-byte 8))))
          (is (< size (loop for n = (read-sequence buffer stream)
                            sum n while (= n 1000000)
                            do (sleep 1/25)))))))))

(test clients-behind-proxies
  (with-test-server (server place
                            (lambda (exchange)
                              (reply-with exchange "~A"
                                          (sb-fiber-http:client-address
                                           exchange :proxies '("127.0.0.1" "10.0.0.1")))))
    (loop for (address . fields)
            in '(("127.0.0.1")
                 ("192.0.2.7" "X-Forwarded-For: 192.0.2.7")
                 ;; What a client says is not believed.
                 ("192.0.2.7" "X-Forwarded-For: 198.51.100.1, 192.0.2.7")
                 ("192.0.2.7" "X-Forwarded-For: 198.51.100.1" "X-Forwarded-For: 192.0.2.7,10.0.0.1")
                 ("10.0.0.1" "X-Forwarded-For: 10.0.0.1") ("127.0.0.1" "X-Forwarded-For: ,"))
          do (is (equal address (third (apply #'ask place "/" fields)))))))

;;; Prevents: a reply that looks whole to a client which knows its end only by that of the
;;; connection.
(test open-replies-to-http-1.0
  (with-test-server (server place #'serve-parts)
    (with-connection (stream place)
      (send-parts stream (message "GET /open HTTP/1.0" ""))
      (signals stream-error (loop while (read-byte stream nil))))))

;;; Prevents: a part behind a half of another.
(test parts-that-were-cut-off
  (let ((again nil) (large (make-array 30000000 :element-type '(unsigned-byte 8))))
    (with-test-server (server place
                              (lambda (exchange)
                                (begin-reply exchange 200 *text*)
                                (handler-case
                                    (send-part exchange large)
                                  (sb-fiber-http:timed-out ()
                                    (setf again
                                          (handler-case (send-part exchange (octets-of-size 1))
                                            (error () :refused))))))
                              :timeout 1/10)
      (with-connection (stream place)
        (send-parts stream (request "/"))
        (is-true (wait-until again))
        (is (eq :refused again))))))
