;;;; A server of the HTTP engine, and handlers for it

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "http.lisp" *load-truename*))

(import '(sb-fiber-http:exchange-head sb-fiber-http:head-target sb-fiber-http:reply
          sb-fiber-http:begin-reply sb-fiber-http:send-part sb-fiber-http:end-reply
          sb-fiber-http:string-octets sb-fiber-http:server-statistics
          sb-fiber-http:start-server sb-fiber-http:stop-server sb-fiber-http:server-places))

(defmacro with-test-server ((server place handler &rest arguments) &body body)
  `(let* ((,server (start-server ,handler ,@arguments :port 0 :on-error #'identity))
          (,place (first (server-places ,server))))
     (declare (ignorable ,place))
     (unwind-protect (progn ,@body)
       (stop-server ,server :drain 0))))

(defun statistic (server key) (getf (server-statistics server) key))

(defun open-descriptors ()
  (length (directory "/proc/self/fd/*" :resolve-symlinks nil)))

;;;; handlers

(defvar *text* '(("Content-Type" . "text/plain")))

(defun octets-of-size (n)
  (map 'sb-fiber-http:octets (lambda (i) (+ 97 (mod i 26))) (loop for i below n collect i)))

(defun target-of (exchange) (head-target (exchange-head exchange)))

(defun reply-with (exchange control &rest arguments)
  (reply exchange 200 *text* (string-octets (apply #'format nil control arguments))))

(defun reply-with-peer (exchange)
  (let ((peer (sb-fiber-http:client-peer (sb-fiber-http:exchange-client exchange))))
    (reply-with exchange "~A" (and peer (sb-fiber-http:address-string (first peer))))))

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
