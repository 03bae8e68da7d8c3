;;;; Tests of a server: how many clients it serves, how long, and its end

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/http-server.lisp" *load-truename*))

(def-suite* http-server)

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
