;;;; Tests of the programs in examples/

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(require :sb-bsd-sockets)
(require :asdf)

(def-suite* examples)

(dolist (name '("chat" "crawler" "proxy" "pipeline" "jobs"))
  (load (merge-pathnames (format nil "../../examples/~A.lisp" name) *load-truename*)))

(defun listening-socket ()
  "A socket that listens on a port of its own, and the port."
  (let ((socket (make-instance 'sb-bsd-sockets:inet-socket :type :stream :protocol :tcp)))
    (sb-bsd-sockets:socket-bind socket #(127 0 0 1) 0)
    (sb-bsd-sockets:socket-listen socket 100)
    (values socket (nth-value 1 (sb-bsd-sockets:socket-name socket)))))

(defun call-with-server (group function test)
  "Call TEST with a port, while a fiber of GROUP calls FUNCTION with a socket that listens there."
  (multiple-value-bind (socket port) (listening-socket)
    (let ((server (spawn (group) (funcall function socket))))
      (unwind-protect (funcall test port)
        (cancel-fiber server)
        (wait-for-end server)
        (sb-bsd-sockets:socket-close socket)))))

(defmacro with-server ((port group function) &body body)
  `(call-with-server ,group ,function (lambda (,port) ,@body)))

(defun connect (port)
  "A stream to what listens on PORT."
  (let ((socket (make-instance 'sb-bsd-sockets:inet-socket :type :stream :protocol :tcp)))
    (sb-bsd-sockets:socket-connect socket #(127 0 0 1) port)
    (sb-bsd-sockets:socket-make-stream socket :input t :output t :buffering :line :auto-close t)))

(defun say (stream line)
  (write-line line stream)
  (finish-output stream))

(defun hears-p (stream line)
  "Does LINE come from STREAM, after others perhaps?"
  (loop for other = (read-line stream nil)
        while other thereis (string= line other)))

(defun nothing-left-p (group)
  (wait-until (= 0 (getf (fiber-group-statistics group) :fibers))))

(test chat
  (on-carriers (n)
    (with-group (group n)
      (with-server (port group #'chat::serve-chat)
        (let ((streams (loop repeat 5 collect (connect port))))
          ;; Each hears itself, and so is known to be there.
          (dolist (stream streams)
            (say stream "hello")
            (is (equal "hello" (read-line stream))))
          (say (first streams) "last")
          (is (notany #'null (mapcar (lambda (stream) (hears-p stream "last")) streams)))
          ;; One that goes away disturbs nobody.
          (close (first streams) :abort t)
          (say (second streams) "still here")
          (is-true (hears-p (third streams) "still here"))
          (mapc #'close (rest streams))))
      (is-true (nothing-left-p group)))))

(defun serve-pages (socket pages)
  "Answer requests for PAGES, an alist of paths and texts; others are never answered."
  (with-fibers (scope)
    (loop
      (let ((client (sb-bsd-sockets:socket-accept socket)))
        (sb-fiber:spawn scope
               (lambda ()
                 (unwind-protect
                      (let* ((stream (sb-bsd-sockets:socket-make-stream client :input t :output t))
                             (line (read-line stream))
                             (path (subseq line 4 (position #\Space line :start 4)))
                             (page (cdr (assoc path pages :test #'string=))))
                        (if page
                            (format stream "HTTP/1.0 200 OK~2%~A" page)
                            (sleep (opaque 3600)))
                        (finish-output stream))
                   (sb-bsd-sockets:socket-close client))))))))

(test crawler
  (on-carriers (n)
    (with-group (group n)
      (with-server (port group (lambda (socket)
                                 (serve-pages socket
                                              '(("/" . "<a href=\"/a\"> <a href=\"/b\">")
                                                ("/a" . "<a href=\"/\"> <a href=\"/c\">")
                                                ("/b" . "<a href=\"/silent\">")
                                                ("/c" . "nothing")))))
        (is (equal '("/" "/a" "/b" "/c" "/silent")
                   (join (spawn (group) (crawler::crawl port "/" :limit 2 :seconds 1/10))))))
      (is-true (nothing-left-p group)))))

(test proxy
  (on-carriers (n)
    (with-group (group n)
      (with-server (server-port group #'chat::serve-chat)
        (with-server (port group (lambda (socket)
                                   (proxy::serve-proxy socket #(127 0 0 1) server-port)))
          (quietly ; clients that go away make the copying fail
            (let ((streams (loop repeat 3 collect (connect port))))
              (dolist (stream streams)
                (say stream "hello")
                (is (equal "hello" (read-line stream))))
              (mapc #'close streams)))))
      (is-true (nothing-left-p group)))))

(test pipeline
  (on-carriers (n)
    (with-group (group n)
      (is (= 338350 (join (spawn (group)
                            (pipeline::sum-of-squares (loop for i from 1 to 100 collect i))))))
      (is (= 0 (join (spawn (group) (pipeline::sum-of-squares '())))))
      ;; An error in a stage ends all of them, and hangs nothing.
      (is (typep (join (spawn (group)
                         (handler-case (pipeline::sum-of-squares
                                        (append (make-list 100 :initial-element 1) '(:no-number)
                                                (make-list 100 :initial-element 1)))
                           (scope-failed (condition) condition))))
                 'scope-failed))
      (is-true (nothing-left-p group)))))

(test jobs
  (on-carriers (n)
    (with-group (group n)
      (let* ((reports (make-flag))
             (fiber (spawn (group)
                      (jobs::run-jobs
                       (list (jobs::make-job :name :good :period 1/200 :function (constantly 1))
                             (jobs::make-job :name :bad :period 1/200
                                             :function (lambda () (error 'expected-error)))
                             (jobs::make-job :name :slow :period 1/200 :time-limit 1/500
                                             :function (lambda () (sleep (opaque 3600)))))
                       (lambda (job outcome)
                         (note reports (cons (jobs::job-name job) outcome)))
                       :limit 2))))
        (flet ((reported-p (name type)
                 (wait-until (<= 3 (count-if (lambda (report)
                                               (and (eq name (car report))
                                                    (typep (cdr report) type)))
                                             (flag-notes reports))))))
          (is-true (reported-p :good '(eql 1)))
          (is-true (reported-p :bad 'expected-error))
          (is-true (reported-p :slow '(eql :late))))
        (cancel-fiber fiber)
        (is (eq :abort (wait-for-end fiber))))
      (is-true (nothing-left-p group)))))
