;;;; TLS in fibers, by cl+ssl

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :sb-bsd-sockets)
(handler-bind ((warning #'muffle-warning))
  (let ((*standard-output* (make-broadcast-stream))
        (*error-output* (make-broadcast-stream)))
    (asdf:load-asd (merge-pathnames "../../contrib/sb-fiber-ssl/sb-fiber-ssl.asd" *load-truename*))
    (asdf:load-system "sb-fiber-ssl")))

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/certificates.lisp" *load-truename*))

(def-suite* ssl)

;;;; A certificate

(defvar *certificate*)
(defvar *key*)
(setf (values *certificate* *key*) (make-certificate "localhost"))

;;; Now, not when the first fiber needs it: it takes some milliseconds.
(cl+ssl:ensure-initialized)

;;;; Server and clients

(defun make-socket ()
  (make-instance 'sb-bsd-sockets:inet-socket :type :stream :protocol :tcp))

(defun tls-stream (socket kind)
  (let ((fd (sb-bsd-sockets:socket-file-descriptor socket)))
    (ecase kind
      (:server (cl+ssl:make-ssl-server-stream fd :certificate *certificate* :key *key*))
      (:client (cl+ssl:make-ssl-client-stream fd :verify nil)))))

(defmacro with-socket ((socket form) &body body)
  `(let ((,socket ,form))
     (unwind-protect (progn ,@body)
       (sb-bsd-sockets:socket-close ,socket))))

(defun call-with-tls-server (group serve function)
  "Call FUNCTION with the port on which fibers of GROUP call SERVE with a socket for each
connection."
  (with-socket (listener (make-socket))
    (sb-bsd-sockets:socket-bind listener #(127 0 0 1) 0)
    (sb-bsd-sockets:socket-listen listener 1024)
    (let ((acceptor (spawn (group)
                      (loop
                        (let ((socket (sb-bsd-sockets:socket-accept listener)))
                          (spawn (group)
                            (with-socket (socket socket)
                              ;; A client that times out, or is late, breaks the connection.
                              (handler-case (funcall serve socket)
                                (error () nil)))))))))
      (unwind-protect (funcall function (nth-value 1 (sb-bsd-sockets:socket-name listener)))
        (terminate-fiber acceptor)
        (wait-for-end acceptor)))))

(defmacro with-tls-server ((port group) serve &body body)
  `(call-with-tls-server ,group ,serve (lambda (,port) ,@body)))

(defun bytes (n)
  (let ((bytes (make-array n :element-type '(unsigned-byte 8))))
    (dotimes (i n bytes) (setf (aref bytes i) (mod (* i i) 251)))))

(defmacro with-tls-stream ((stream socket kind) &body body)
  `(let ((,stream (tls-stream ,socket ,kind)))
     (unwind-protect (progn ,@body)
       (close ,stream :abort t))))

(defun echo (socket &optional (pause 0))
  "Read a length of two bytes and as many blocks of 256 bytes from SOCKET, and send the blocks back;
wait for PAUSE seconds before each step."
  (sleep pause)
  (with-tls-stream (stream socket :server)
    (sleep pause)
    (let* ((n (+ (* 256 (read-byte stream)) (read-byte stream)))
           (bytes (make-array (* 256 n) :element-type '(unsigned-byte 8))))
      (sleep pause)
      (read-sequence bytes stream)
      (sleep pause)
      (write-sequence bytes stream)
      (force-output stream)
      ;; until the client closes
      (handler-case (read-byte stream) (error () nil)))))

(defun ask (port n)
  "Send N blocks to the server at PORT, and return true if they come back."
  (with-socket (socket (make-socket))
    (sb-bsd-sockets:socket-connect socket #(127 0 0 1) port)
    (with-tls-stream (stream socket :client)
      (let ((bytes (bytes (* 256 n)))
            (answer (make-array (* 256 n) :element-type '(unsigned-byte 8))))
        (write-byte (floor n 256) stream)
        (write-byte (mod n 256) stream)
        (write-sequence bytes stream)
        (force-output stream)
        (read-sequence answer stream)
        (equalp bytes answer)))))

(defun stuck (group)
  (getf (fiber-group-statistics group) :stuck-ever))

;;;; Tests

(test one-connection
  (on-carriers (n)
    (with-group (group n)
      (with-tls-server (port group) #'echo
        (is (eq t (join (spawn (group) (ask port 3)))))
        (is (eq t (ask port 3)))))))

;;; The server lets its clients wait in the handshake, for answers and for room to write. Prevents:
;;; a carrier that waits in OpenSSL.
(test waits-park
  (with-stuck-carrier-time (1/2)
    (with-group (group 1)
      (with-tls-server (port group) (lambda (socket) (echo socket 1))
        (let ((fibers (loop for n in '(1 10 1000 5000 20000)
                            collect (let ((n n)) (spawn (group) (ask port n)))))
              (ticks 0))
          (spawn (group) (loop while (some #'fiber-alive-p fibers) do (sleep 1/100) (incf ticks)))
          (is (all-true-p (join-all fibers)))
          (is (= 0 (stuck group)))
          (is (plusp ticks)))))))

(test many-connections
  (on-carriers (n :counts '(2) :migration '(nil t))
    (with-stuck-carrier-time (1)
      (with-group (group n)
        (with-tls-server (port group) (lambda (socket) (echo socket (/ (random 100) 1000)))
          (is (all-true-p (join-all (loop for i below 250
                                          collect (let ((i i))
                                                    (spawn (group) (ask port (mod i 50))))))))
          (is (= 0 (stuck group))))))))

;;; Prevents: a lock of OpenSSL that nobody gives back, or the memory allocator's.
(test time-outs-at-random
  (on-carriers (n)
    (with-group (group n)
      (with-tls-server (port group) (lambda (socket) (echo socket (/ (random 20) 1000)))
        (let* ((timed-out (make-flag)) (answered (make-flag))
               (fibers (loop for i below 100
                             collect (let ((i i))
                                       (spawn (group)
                                         (dotimes (j 4 t)
                                           (handler-case
                                               (handler-case
                                                   (sb-ext:with-timeout (/ (1+ (random 200)) 1000)
                                                     (sb-sys:with-deadline
                                                         (:seconds (/ (1+ (random 200)) 1000))
                                                       (ask port (mod (+ i j) 20)))
                                                     (count-one answered))
                                                 ((or sb-ext:timeout sb-sys:deadline-timeout) ()
                                                   (count-one timed-out))
                                                 (error () nil))
                                             ;; while something else was being signalled
                                             (sb-ext:timeout () (count-one timed-out)))))))))
          (is (all-true-p (join-all fibers)))
          (is (plusp (flag-count timed-out)))
          (is (eq t (join (spawn (group) (ask port 3))))))))))

;;;; Contexts

;;; Prevents: a carrier that is busy with certificates. Nobody else would run the other fiber.
(test others-run-while-a-context-is-made
  (with-stuck-carrier-time (nil)
    (with-group (group 1)
      (let* ((ticks 0) (stop (make-flag)) (ticker (spawn (group)
                                                    (loop until (flag-value stop)
                                                          do (incf ticks) (fiber-yield)))))
        (is (< 1 (join (spawn (group)
                         (let ((before ticks))
                           (cl+ssl:ssl-ctx-free (cl+ssl:make-context))
                           (- ticks before))))))
        (raise-flag stop)
        (join ticker)))))

(test contexts-are-made-as-ever
  (is (eq :made (in-fiber () (cl+ssl:ssl-ctx-free (cl+ssl:make-context)) :made)))
  (cl+ssl:ssl-ctx-free (cl+ssl:make-context))
  (is (eq :failed (in-fiber ()
                    (handler-case (cl+ssl:make-context :verify-location "/no/such/file")
                      (error () :failed))))))

(defun freed-contexts (function)
  "Call FUNCTION, and return how many contexts have been freed by then."
  (let ((freed (make-flag)))
    (sb-int:encapsulate 'cl+ssl:ssl-ctx-free 'count
                        (lambda (free context)
                          (funcall free context)
                          (count-one freed)))
    (unwind-protect (funcall function freed)
      (sb-int:unencapsulate 'cl+ssl:ssl-ctx-free 'count))
    (flag-count freed)))

;;; Prevents: memory that is lost with each time-out.
(test unwanted-contexts-are-freed
  (on-carriers (n)
    (is (= 1 (freed-contexts
              (lambda (freed)
                (with-group (group n)
                  (let* ((started (make-semaphore)) (go-on (make-semaphore))
                         (fiber (spawn (group)
                                  (sb-fiber-ssl::make-context-in-thread
                                   (lambda ()
                                     (signal-semaphore started)
                                     (wait-on-semaphore go-on)
                                     (cl+ssl:make-context))))))
                    (wait-on-semaphore started)
                    (terminate-fiber fiber)
                    (is (eq :abort (wait-for-end fiber)))
                    (signal-semaphore go-on)
                    (is-true (wait-until (= 1 (flag-count freed))))))))))
    ;; Each is freed by one of the two, or by the fiber that has got it.
    (let ((made (make-flag)))
      (is (= (freed-contexts
              (lambda (freed)
                (declare (ignore freed))
                (in-fibers n 20
                           (lambda (i) (declare (ignore i))
                             (handler-case
                                 (sb-ext:with-timeout (/ (1+ (random 30)) 1000)
                                   (sb-sys:without-interrupts
                                     (cl+ssl:ssl-ctx-free
                                      (sb-sys:allow-with-interrupts
                                        (sb-fiber-ssl::make-context-in-thread
                                         (lambda ()
                                           (prog1 (cl+ssl:make-context :verify-location nil)
                                             (count-one made))))))))
                               (sb-ext:timeout ()))))
                ;; What they have abandoned comes to its end.
                (wait-until (= (sb-fiber::blocking-pool-idle sb-fiber::*blocking-pool*)
                               (length (sb-fiber::blocking-pool-threads
                                        sb-fiber::*blocking-pool*))))))
             (flag-count made))))))
