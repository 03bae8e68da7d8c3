;;;; Tests of the places at which a server listens

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/http-server.lisp" *load-truename*))

(def-suite* http-listener)

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
        (is (equal "::1" (third (ask place "/"))))
        ;; One socket for both: the addresses of the old kind are as ever.
        (with-test-server (both place #'reply-with-peer :address "::")
          (is (equal "127.0.0.1" (third (ask (list :tcp "127.0.0.1" (third place)) "/"))))))
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

;;; Prevents: a server that removes, as it stops, the socket of the one that has taken its place.
(test places-that-others-have-taken-over
  (let ((path (temporary-path "socket"))
        (other (make-instance 'sb-bsd-sockets:local-socket :type :stream)))
    (unwind-protect
         (progn (with-test-server (server place #'reply-with-peer :listen `((:unix ,path)))
                  (sb-posix:unlink path)
                  (sb-bsd-sockets:socket-bind other path))
                (is-true (probe-file path)))
      (sb-bsd-sockets:socket-close other)
      (sb-posix:unlink path))))

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
  (let ((groups (length sb-fiber::*groups*)))
    (signals error (start-server #'identity :port 0 :when-full :forget))
    (signals error (start-server #'identity :port 0 :max-connections -1))
    (is (= groups (length sb-fiber::*groups*))))
  (with-group (group 1)
    (signals error (start-server #'identity :port 0 :group group :carrier-count 1))))
