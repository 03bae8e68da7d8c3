;;;; Tests with hostile and unlucky clients

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/http-server.lisp" *load-truename*))

(def-suite* http-clients)

(defun reset (socket)
  "Close SOCKET such that the other end sees that it was reset."
  (sb-fiber-http::reset-when-closed (sb-fiber-http:make-connection
                                     (sb-bsd-sockets:socket-file-descriptor socket)))
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
