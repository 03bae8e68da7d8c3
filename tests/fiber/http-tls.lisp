;;;; Tests of TLS on the HTTP engine

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/http-server.lisp" *load-truename*))
(load (merge-pathnames "support/certificates.lisp" *load-truename*))

(asdf:load-asd (merge-pathnames "../../contrib/sb-fiber-ssl/sb-fiber-ssl.asd" *load-truename*))
(asdf:load-asd (merge-pathnames "../../contrib/sb-fiber-http-tls/sb-fiber-http-tls.asd"
                                *load-truename*))
(handler-bind ((warning #'muffle-warning))
  (let ((*standard-output* (make-broadcast-stream)) (*error-output* (make-broadcast-stream)))
    (asdf:load-system "sb-fiber-http-tls")))

(def-suite* http-tls)

(import '(sb-fiber-http-tls:make-tls sb-fiber-http-tls:renew-tls sb-fiber-http-tls:tls-error))

(defvar *one* (multiple-value-list (make-certificate "one")))
(defvar *two* (multiple-value-list (make-certificate "two")))

(defun tls-of (names) (make-tls (first names) (second names)))

;;;; Clients

(defun call-with-tls-connection (function place)
  (let ((socket (connect-to place)) (stream nil))
    (unwind-protect
         (progn (setf stream (cl+ssl:make-ssl-client-stream
                              (sb-bsd-sockets:socket-file-descriptor socket) :verify nil))
                (funcall function stream))
      (when stream (close stream :abort t))
      (sb-bsd-sockets:socket-close socket))))

(defmacro with-tls-connection ((stream place) &body body)
  `(call-with-tls-connection (lambda (,stream) ,@body) ,place))

(defun ask-by-tls (place target)
  (with-tls-connection (stream place)
    (send-parts stream (request target))
    (read-reply stream)))

(defun answer-of-openssl (place &rest arguments)
  "What openssl s_client prints when it has connected to PLACE, and sent a request."
  (with-output-to-string (out)
    (with-input-from-string (in (octets-string-of (request "/" "Connection: close")))
      (sb-ext:run-program "openssl"
                          (list* "s_client" "-connect" (format nil "127.0.0.1:~D" (third place))
                                 "-ign_eof" arguments)
                          :search t :input in :output out :error nil))))

;;;; Exchanges

(defun read-whole-body (exchange)
  (let ((octets (make-array 300000 :element-type '(unsigned-byte 8))))
    (subseq octets 0 (read-sequence octets (sb-fiber-http:make-body-stream exchange)))))

(defun serve-by-tls (exchange)
  (let ((target (target-of exchange)))
    (cond ((string= target "/echo") (reply exchange 200 *text* (read-whole-body exchange)))
          ((string= target "/large") (reply exchange 200 *text* (octets-of-size 3000000)))
          (t (serve-parts exchange)))))

(test exchanges-by-tls
  (on-carriers (n :counts '(1 2))
    (with-test-server (server place #'serve-by-tls :carrier-count n :tls (tls-of *one*))
      (flet ((talk ()
               (with-tls-connection (stream place)
                 (loop for (target length) in '(("/whole" 5) ("/parts" 132775) ("/large" 3000000))
                       do (send-parts stream (request target))
                          (unless (= length (length (third (read-reply stream)))) (return nil))
                       finally (return t)))))
        (is-true (talk))
        (is (all-true-p (in-fibers n 5 (lambda (i) (declare (ignore i)) (talk)))))))))

(test bodies-by-tls
  (with-test-server (server place #'serve-by-tls :tls (tls-of *one*))
    (with-tls-connection (stream place)
      (dolist (size '(0 1 16384 16385 250000))
        (let ((octets (octets-of-size size)))
          (send-parts stream (request "/echo" (format nil "Content-Length: ~D" size)) octets)
          (is (equal (octets-string-of octets) (third (read-reply stream)))))))))

(test files-by-tls
  (call-with-file
   (lambda (path)
     (with-test-server (server place (lambda (exchange)
                                       (sb-fiber-http:reply-with-file exchange path))
                               :tls (tls-of *one*))
       (with-tls-connection (stream place)
         (send-parts stream (request "/"))
         (is (equal (octets-string-of (octets-of-size 1000000)) (third (read-reply stream))))
         (send-parts stream (request "/" "Range: bytes=26-28"))
         (is (equal "abc" (third (read-reply stream)))))))
   (octets-of-size 1000000)))

;;; Prevents: an SSL object that two threads use at a time.
(test read-and-written-by-two-threads
  (with-test-server (server place
                            (lambda (exchange)
                              (begin-reply exchange 200 *text*)
                              (let ((writer (make-thread
                                             (lambda ()
                                               (loop repeat 100
                                                     do (send-part exchange
                                                                   (octets-of-size 1000)))))))
                                (read-whole-body exchange)
                                (join-thread writer))
                              (end-reply exchange))
                            :tls (tls-of *one*))
    (loop repeat 5
          do (with-tls-connection (stream place)
               (let ((sender (make-thread
                              (lambda ()
                                (send-parts stream (request "/" "Content-Length: 250000"))
                                (loop repeat 250
                                      do (send-parts stream (octets-of-size 1000)))))))
                 (join-thread sender)
                 (is (= 100000 (length (third (read-reply stream))))))))))

(test many-clients-by-tls
  (with-test-server (server place #'serve-by-tls :carrier-count 2 :tls (tls-of *one*))
    (is (all-true-p
         (in-fibers 2 150
                    (lambda (i)
                      (declare (ignore i))
                      (with-tls-connection (stream place)
                        (loop repeat 3
                              do (send-parts stream (request "/whole"))
                              always (equal "whole" (third (read-reply stream)))))))))
    (is-true (wait-until (= 0 (statistic server :connections))))
    (is (= 0 (statistic server :errors)))))

;;; Prevents: clients that stay, or descriptors, or SSL objects, when a handshake fails or does not
;;; come; errors that are none.
(test clients-without-tls
  (with-test-server (server place #'serve-by-tls :tls (tls-of *one*)
                            :timeout 1/5 :idle-timeout 1/5)
    (let ((freed (make-flag)))
      (with-call-before ('sb-fiber-http:transport-free (lambda (transport)
                                                         (declare (ignore transport))
                                                         (count-one freed)))
        (with-connection (stream place)
          (send-parts stream (request "/"))
          (handler-case (loop while (read-byte stream nil))
            (stream-error () "reset")))
        (with-connection (stream place)
          (is (null (read-byte stream nil))))
        (sb-bsd-sockets:socket-close (connect-to place))
        (is (equal "whole" (third (ask-by-tls place "/whole"))))
        (is-true (wait-until (= 0 (statistic server :connections)))))
      (is (= 4 (flag-count freed))))
    (is (= 0 (statistic server :errors)))))

;;;; Certificates

(test sessions-are-resumed
  (with-test-server (server place #'serve-by-tls :tls (tls-of *one*))
    (is-true (search "Reused, TLSv1.2" (answer-of-openssl place "-tls1_2" "-reconnect")))
    (let ((session (temporary-path "session")))
      (unwind-protect
           (progn (answer-of-openssl place "-sess_out" session)
                  (is-true (search "Reused, TLSv1.3"
                                   (answer-of-openssl place "-sess_in" session))))
        (delete-file session)))))

(test certificates-are-renewed
  (let ((tls (tls-of *one*)))
    (with-test-server (server place #'serve-by-tls :tls tls)
      (with-tls-connection (old place)
        (send-parts old (request "/whole"))
        (is (equal "whole" (third (read-reply old))))
        (is-true (search "CN = one" (answer-of-openssl place)))
        (renew-tls tls (first *two*) (second *two*))
        (is-true (search "CN = two" (answer-of-openssl place)))
        ;; What has begun goes on; and what cannot be used is not.
        (signals tls-error (renew-tls tls "/no/such/file" (second *one*)))
        (signals tls-error (renew-tls tls (first *one*) (second *two*)))
        (is-true (search "CN = two" (answer-of-openssl place)))
        (send-parts old (request "/whole"))
        (is (equal "whole" (third (read-reply old))))))))

(test keys-with-passwords
  (multiple-value-bind (certificate key) (make-certificate "secret" :password "open sesame")
    (signals tls-error (make-tls certificate key :password "wrong"))
    (with-test-server (server place #'serve-by-tls
                              :tls (make-tls certificate key :password "open sesame"))
      (is-true (search "CN = secret" (answer-of-openssl place))))))

;;; Prevents: a good pair that is given up for one that serves nobody: OpenSSL keeps one certificate
;;; for each kind of key.
(test keys-of-another-kind
  (let ((certificate (make-certificate "rsa" :key-kind '("rsa:2048"))))
    (signals tls-error (make-tls certificate (second *one*)))))

(test no-certificate-at-all
  (signals error (start-server #'identity :port 0 :tls t))
  (signals error (start-server #'identity :port 0 :tls "certificate.pem")))

;;; Prevents: an error of one connection that another fiber of the carrier finds, and takes for its
;;; own.
(test errors-are-not-left-to-others
  (with-test-server (server place #'serve-by-tls :carrier-count 1 :tls (tls-of *one*))
    (loop repeat 20
          do (with-connection (stream place)
               (send-parts stream (string-octets "no handshake"))
               (handler-case (loop while (read-byte stream nil))
                 (stream-error () "reset")))
             (is (equal "whole" (third (ask-by-tls place "/whole"))))
             (is (equal '(0) (join-all
                              (list (spawn ((sb-fiber-http::server-group server))
                                      (cffi:foreign-funcall "ERR_peek_error"
                                                            :unsigned-long)))))))))
