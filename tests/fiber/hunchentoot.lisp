;;;; tests of Hunchentoot on fibers

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(dolist (name '("sb-fiber-http" "sb-fiber-hunchentoot"))
  (asdf:load-asd (merge-pathnames (format nil "../../contrib/~A/~:*~A.asd" name)
                                  *load-truename*)))
(handler-bind ((warning #'muffle-warning))
  (let ((*standard-output* (make-broadcast-stream)))
    (asdf:load-system "sb-fiber-hunchentoot")))

(def-suite* hunchentoot)

;;;; A server

(defclass test-acceptor ()
  ((messages :initform nil
             :accessor acceptor-messages
             :documentation "What has been logged, as strings, the last one first."))
  (:default-initargs :address "127.0.0.1" :port 0 :access-log-destination nil))

(defmethod hunchentoot:acceptor-log-message ((acceptor test-acceptor) level control
                                             &rest arguments)
  (declare (ignore level))
  (sb-ext:atomic-push (apply #'format nil control arguments)
                      (slot-value acceptor 'messages)))

(defclass stock-test-acceptor (test-acceptor hunchentoot:easy-acceptor) ())
(defclass fiber-test-acceptor (test-acceptor sb-fiber-hunchentoot:easy-fiber-acceptor) ())

(defvar *acceptor-class*)

(defmacro acceptor-test (name &body body)
  "Define a test that executes BODY for each class of acceptors."
  `(test ,name
     (dolist (*acceptor-class* '(stock-test-acceptor fiber-test-acceptor))
       ,@body)))

(defun make-server (&rest initargs)
  "Start and return a server. INITARGS are those of its taskmaster."
  (hunchentoot:start
   (make-instance *acceptor-class*
                  :taskmaster (apply #'make-instance 'sb-fiber-hunchentoot:fiber-taskmaster
                                     initargs))))

(defun call-with-server (function &rest initargs)
  (let ((server (apply #'make-server initargs)))
    (unwind-protect (funcall function server)
      (when (hunchentoot:started-p server)
        (hunchentoot:stop server)))))

(defmacro with-server ((server &rest initargs) &body body)
  `(call-with-server (lambda (,server) ,@body) ,@initargs))

(defun connection-count (server)
  (hunchentoot:taskmaster-thread-count (hunchentoot::acceptor-taskmaster server)))

(defun wait-until (predicate)
  (loop until (funcall predicate) do (sleep 1/100)))

;;;; A client

(defun server-connect (server)
  (usocket:socket-connect "127.0.0.1" (hunchentoot:acceptor-port server)
                          :element-type '(unsigned-byte 8)))

(defmacro with-client ((socket server) &body body)
  `(usocket:with-connected-socket (,socket (server-connect ,server))
     ,@body))

(defparameter *line-end* (coerce '(#\Return #\Newline) 'string))

(defun send-request (socket path)
  (let ((stream (usocket:socket-stream socket))
        (request (format nil "GET ~A HTTP/1.1~AHost: test~:*~A~:*~A" path *line-end*)))
    (write-sequence (sb-ext:string-to-octets request) stream)
    (finish-output stream)))

(defun read-header-line (stream)
  (let ((octets (loop for octet = (read-byte stream)
                      until (= octet 10)
                      unless (= octet 13) collect octet)))
    (map 'string #'code-char octets)))

(defun content-length (headers)
  (let ((header (find-if (lambda (line) (eql (search "content-length:" (string-downcase line)) 0))
                         headers)))
    (parse-integer header :start (length "content-length:"))))

(defun read-response (socket)
  "Return status and body of the response that comes through SOCKET, or NIL if the
connection has ended."
  (handler-case
      (let* ((stream (usocket:socket-stream socket))
             (status (read-header-line stream))
             (headers (loop for line = (read-header-line stream)
                            until (string= line "") collect line))
             (body (make-array (content-length headers) :element-type '(unsigned-byte 8))))
        (when (= (read-sequence body stream) (length body))
          (values (parse-integer status :start 9 :end 12)
                  (map 'base-string #'code-char body))))
    ((or end-of-file stream-error) () nil)))

(defun request (socket path)
  (send-request socket path)
  (read-response socket))

(defun one-request (server path)
  (with-client (socket server)
    (request socket path)))

(defun says-hello-p (server)
  (equal (multiple-value-list (one-request server "/hello")) '(200 "hello")))

(defun refused-p (server)
  (handler-case (progn (usocket:socket-close (server-connect server)) nil)
    (usocket:connection-refused-error () t)))

;;;; Handlers

(hunchentoot:define-easy-handler (say-hello :uri "/hello") ()
  "hello")

(hunchentoot:define-easy-handler (always-fail :uri "/fail") ()
  (error "This handler always fails."))

(defun descend (n)
  (1+ (descend (1+ n))))

(hunchentoot:define-easy-handler (overflow :uri "/overflow") ()
  (princ-to-string (descend 0)))

(hunchentoot:define-easy-handler (stop-server :uri "/stop") ()
  (hunchentoot:stop hunchentoot:*acceptor*)
  "stopped")

(defparameter *much* (* 32 1024 1024)
  "More octets than the buffers of both ends of a connection hold.")

(hunchentoot:define-easy-handler (send-much :uri "/much") ()
  (make-array *much* :element-type '(unsigned-byte 8) :initial-element 65))

(hunchentoot:define-easy-handler (stream-much :uri "/stream") ()
  (setf (hunchentoot:content-length*) *much*)
  (let ((stream (hunchentoot:send-headers)))
    (write-sequence (make-array *much* :element-type '(unsigned-byte 8) :initial-element 65)
                    stream)))

(defvar *entered* (sb-thread:make-semaphore)
  "Signalled by each handler that is going to wait.")
(defvar *gate* (sb-thread:make-semaphore)
  "What handlers wait for.")
(defvar *waiting-fiber* nil)
(defvar *unwound* nil)

(hunchentoot:define-easy-handler (wait-at-gate :uri "/gate") ()
  (sb-thread:signal-semaphore *entered*)
  (sb-thread:wait-on-semaphore *gate*)
  "passed")

(hunchentoot:define-easy-handler (sleep-an-hour :uri "/sleep") ()
  (setf *waiting-fiber* (current-fiber) *unwound* nil)
  (unwind-protect (progn (sb-thread:signal-semaphore *entered*)
                         (sleep 3600))
    (setf *unwound* t)))

(defvar *count* 0)

(hunchentoot:define-easy-handler (count-requests :uri "/count") ()
  (princ-to-string (incf *count*)))

(hunchentoot:define-easy-handler (tell-addresses :uri "/addresses") ()
  (format nil "~A ~D ~A ~D" (hunchentoot:remote-addr*) (hunchentoot:remote-port*)
          (hunchentoot:local-addr*) (hunchentoot:local-port*)))

;;;; Serving

(acceptor-test addresses-of-a-connection
  (with-server (server)
    (loop repeat 2
          do (with-client (socket server)
               (let ((expected (format nil "127.0.0.1 ~D 127.0.0.1 ~D"
                                       (usocket:get-local-port socket)
                                       (hunchentoot:acceptor-port server))))
                 (loop repeat 2
                       do (is (equal expected (nth-value 1 (request socket "/addresses"))))))))))

(acceptor-test a-connection-has-a-fiber
  (with-server (server :carrier-count 1)
    (with-client (socket server)
      (is (equal '(200 "hello") (multiple-value-list (request socket "/hello"))))
      (is (= 1 (connection-count server)))
      (with-client (other server)
        (is (equal '(200 "hello") (multiple-value-list (request other "/hello"))))
        (is (= 2 (connection-count server)))
        (is (equal '(200 "hello") (multiple-value-list (request socket "/hello"))))))
    (wait-until (lambda () (= 0 (connection-count server))))))

(acceptor-test default-carriers
  (with-server (server)
    (is (says-hello-p server))))

(acceptor-test handlers-that-wait-do-not-stop-others
  (with-server (server :carrier-count 1)
    (with-client (socket server)
      (send-request socket "/gate")
      (sb-thread:wait-on-semaphore *entered*)
      (is (says-hello-p server))
      (sb-thread:signal-semaphore *gate*)
      (is (equal '(200 "passed") (multiple-value-list (read-response socket)))))))

(acceptor-test a-client-that-does-not-read-does-not-stop-others
  (with-server (server :carrier-count 1)
    (dolist (path '("/much" "/stream"))
      (with-client (lazy server)
        (send-request lazy path)
        (loop repeat 3 do (is (says-hello-p server)))
        (multiple-value-bind (status body) (read-response lazy)
          (is (eql 200 status))
          (is (= *much* (length body))))))))

(acceptor-test a-client-that-leaves-does-not-stop-others
  (with-server (server :carrier-count 1)
    (with-client (socket server)
      (send-request socket "/much"))
    (is (says-hello-p server))
    (wait-until (lambda () (= 0 (connection-count server))))))

(acceptor-test an-error-in-a-handler
  (with-server (server :carrier-count 1)
    (with-client (socket server)
      (is (eql 500 (request socket "/fail"))))
    (is (says-hello-p server))
    (is (find-if (lambda (message) (search "always fails" message))
                 (acceptor-messages server)))))

(acceptor-test connections-have-the-bindings-of-threads
  (let ((old bt:*default-special-bindings*))
    (with-server (server)
      (unwind-protect
           (progn (setf bt:*default-special-bindings* '((*count* . (* 10 10)) (*count* . 1)))
                  (with-client (first server)
                    (with-client (second server)
                      (dolist (expected '("101" "102"))
                        (is (equal expected (nth-value 1 (request first "/count"))))
                        (is (equal expected (nth-value 1 (request second "/count"))))))))
        (setf bt:*default-special-bindings* old)))
    (is (= 0 *count*))))

(acceptor-test a-stack-overflow-in-a-handler
  (with-server (server :carrier-count 1)
    (with-client (socket server)
      (is (null (request socket "/overflow"))))
    (is (says-hello-p server))))

(defun request-repeatedly (server times)
  "Return how many of TIMES requests through one connection were answered."
  (with-client (socket server)
    (loop repeat times
          count (equal (multiple-value-list (request socket "/hello")) '(200 "hello"))
          do (fiber-yield))))

(acceptor-test many-connections-from-fibers
  (with-server (server :carrier-count 2)
    (let ((clients (start-fibers nil :carrier-count 1 :name "clients")))
      (unwind-protect
           (let ((fibers (loop repeat 400
                               collect (submit-fiber clients
                                                     (make-fiber
                                                      (lambda ()
                                                        (request-repeatedly server 5)))))))
             (is (= 2000 (reduce #'+ fibers :key #'fiber-join))))
        (finish-fibers clients :abort t)))))

;;;; Starting and stopping

(acceptor-test server-with-large-descriptors
  (let ((fillers (loop repeat 1100 collect (sb-unix:unix-dup 0))))
    (unwind-protect (with-server (server)
                      (is (says-hello-p server))
                      (hunchentoot:stop server)
                      (is (refused-p server)))
      (mapc #'sb-unix:unix-close fillers))))

(acceptor-test start-stop-start
  (with-server (server)
    (let ((port (hunchentoot:acceptor-port server)))
      (loop repeat 3
            do (is (says-hello-p server))
               (hunchentoot:stop server)
               (is (not (hunchentoot:started-p server)))
               (is (refused-p server))
               (hunchentoot:start server)
               (is (= port (hunchentoot:acceptor-port server))))
      (is (says-hello-p server)))))

(acceptor-test stop-ends-idle-connections
  (with-server (server)
    (with-client (used server)
      (request used "/hello")
      (with-client (unused server)
        (wait-until (lambda () (= 2 (connection-count server))))
        (hunchentoot:stop server)
        (is (= 0 (connection-count server)))
        (is (null (read-response used)))
        (is (null (read-response unused)))))))

(acceptor-test stop-ends-a-handler-that-sleeps
  (dolist (carriers '(1 2))
    (with-server (server :carrier-count carriers)
      (with-client (socket server)
        (send-request socket "/sleep")
        (sb-thread:wait-on-semaphore *entered*)
        (hunchentoot:stop server)
        (is (eq t *unwound*))
        (is (not (fiber-alive-p *waiting-fiber*)))
        (is (= 0 (connection-count server)))
        (is (null (read-response socket)))
        (is (refused-p server))))))

(acceptor-test stop-does-not-wait-for-a-client-that-does-not-read
  (dolist (path '("/much" "/stream"))
    (with-server (server :carrier-count 1)
      (with-client (lazy server)
        (send-request lazy path)
        (is (says-hello-p server))
        (hunchentoot:stop server)
        (is (= 0 (connection-count server)))))))

(acceptor-test soft-stop-waits-for-all-requests
  (with-server (server)
    (with-client (idle server)
      (request idle "/hello")
      (with-client (first server)
        (with-client (second server)
          (send-request first "/gate")
          (send-request second "/gate")
          (sb-thread:wait-on-semaphore *entered* :n 2)
          (let ((stopper (sb-thread:make-thread
                          (lambda () (hunchentoot:stop server :soft t)))))
            (wait-until (lambda () (hunchentoot::acceptor-shutdown-p server)))
            (sb-thread:signal-semaphore *gate*)
            (wait-until (lambda () (= 1 (hunchentoot::accessor-requests-in-progress server))))
            (is (sb-thread:thread-alive-p stopper))
            (sb-thread:signal-semaphore *gate*)
            (is (eq server (sb-thread:join-thread stopper))))
          (is (equal '(200 "passed") (multiple-value-list (read-response first))))
          (is (equal '(200 "passed") (multiple-value-list (read-response second))))
          (is (= 0 (connection-count server)))
          (is (null (read-response idle))))))))

(acceptor-test a-handler-can-stop-its-server
  (with-server (server)
    (with-client (socket server)
      (is (equal '(200 "stopped") (multiple-value-list (request socket "/stop"))))
      (is (null (read-response socket))))
    (is (refused-p server))
    (wait-until (lambda () (= 0 (connection-count server))))
    (hunchentoot:start server)
    (is (says-hello-p server))))

(acceptor-test a-fiber-can-stop-a-server
  (with-server (server)
    (let ((group (start-fibers nil :carrier-count 1)))
      (unwind-protect
           (is (eq server (fiber-join (submit-fiber group
                                                    (make-fiber (lambda ()
                                                                  (hunchentoot:stop server)))))))
        (finish-fibers group :abort t)))
    (is (refused-p server))))

(acceptor-test servers-that-share-a-group
  (let ((group (start-fibers nil :carrier-count 1)))
    (unwind-protect
         (with-server (first :group group)
           (with-server (second :group group)
             (is (says-hello-p first))
             (is (says-hello-p second))
             (hunchentoot:stop first)
             (is (refused-p first))
             (is (says-hello-p second))
             (hunchentoot:start first)
             (is (says-hello-p first))))
      (finish-fibers group :abort t))))

(acceptor-test arguments-of-the-taskmaster
  (flet ((make (&rest initargs)
           (apply #'make-instance 'sb-fiber-hunchentoot:fiber-taskmaster initargs)))
    (signals hunchentoot:parameter-error (make :carrier-count 0))
    (signals hunchentoot:parameter-error (make :carrier-count "2"))
    (let ((group (start-fibers nil :carrier-count 1)))
      (signals hunchentoot:parameter-error (make :carrier-count 2 :group group))
      (finish-fibers group))))

;;;; Without descriptors

(load (merge-pathnames "support/limits.lisp" *load-truename*))

(acceptor-test accepting-without-descriptors
  (with-server (server :carrier-count 1)
    (let ((socket (make-instance 'sb-bsd-sockets:inet-socket :type :stream :protocol :tcp)))
      (unwind-protect
           (progn
             (with-free-descriptors (0)
               (sb-bsd-sockets:socket-connect socket #(127 0 0 1)
                                              (hunchentoot:acceptor-port server))
               (wait-until (lambda () (acceptor-messages server))))
             (is (search "Cannot accept a connection" (car (acceptor-messages server))))
             (wait-until (lambda () (= 1 (connection-count server)))))
        (sb-bsd-sockets:socket-close socket)))
    (is (says-hello-p server))))

(acceptor-test stopping-without-descriptors
  (with-server (server :carrier-count 1)
    (let ((socket (make-instance 'sb-bsd-sockets:inet-socket :type :stream :protocol :tcp)))
      (unwind-protect
           (with-free-descriptors (0)
             (sb-bsd-sockets:socket-connect socket #(127 0 0 1)
                                            (hunchentoot:acceptor-port server))
             (wait-until (lambda () (acceptor-messages server)))
             (hunchentoot:stop server))
        (sb-bsd-sockets:socket-close socket)))
    (is (refused-p server))
    (hunchentoot:start server)
    (is (says-hello-p server))))

;;; Prevents: Clack's handler for Hunchentoot, which waits for the acceptor, stopping at once, or
;;; with an error.
(acceptor-test waiting-for-the-acceptor
  (let* ((server (make-server))
         (taskmaster (hunchentoot::acceptor-taskmaster server))
         (process (hunchentoot::acceptor-process taskmaster)) ; none when it is over
         (waiter (make-thread (lambda ()
                                (bordeaux-threads:join-thread process)
                                :over))))
    (is (typep taskmaster 'hunchentoot:multi-threaded-taskmaster))
    (with-client (socket server)
      (is (eql 200 (request socket "/hello"))))
    (is-true (sb-thread:thread-alive-p waiter))
    (hunchentoot:stop server)
    (is (eq :over (join-thread waiter)))))

;;;; Without a taskmaster for fibers

;;; What was written for threads is not changed: the taskmaster's threads are fibers.
(hunchentoot:define-easy-handler (tell-kind :uri "/kind") ()
  (string-downcase (type-of sb-thread:*current-thread*)))

(test threads-of-stock-taskmasters-as-fibers
  (with-group (group 2)
    (let ((server (make-instance 'stock-test-acceptor
                                 :taskmaster (make-instance
                                              'hunchentoot:one-thread-per-connection-taskmaster))))
      (with-threads-as-fibers (:group group) (hunchentoot:start server))
      (unwind-protect
           (is (equal (loop repeat 20 collect '(200 "fiber"))
                      (loop repeat 20
                            collect (with-client (socket server)
                                      (multiple-value-list (request socket "/kind"))))))
        (hunchentoot:stop server)))))
