;;;; Sockets: accepting, connecting, sending, receiving: fiber/socket.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/descriptors.lisp" *load-truename*))

(def-suite* socket)

;;;; SB-BSD-SOCKETS

(defun serve-echo (listener)
  "Accept one connection and send back each line."
  (let* ((socket (socket-accept listener))
         (stream (stream-of socket)))
    (unwind-protect (loop for line = (read-line stream nil)
                          while line do (send-line stream line))
      (socket-close socket))))

(defun talk-to-echo (socket i)
  (unwind-protect (let ((stream (stream-of socket)))
                    (loop for k below 20
                          for line = (format nil "~D ~D" i k)
                          always (progn (send-line stream line)
                                        (string= line (read-line stream)))))
    (socket-close socket)))

(defun call-as (kind group function)
  "Call FUNCTION in a fiber or in a thread; return a function that returns its value."
  (ecase kind
    (:fiber (let ((fiber (spawn (group) (funcall function))))
              (lambda () (join fiber))))
    (:thread (let ((thread (make-thread function)))
               (lambda () (join-thread thread :timeout *patience*))))))

;;; Prevents: O_NONBLOCK that a fiber has set, seen by a thread.
(test echo-between-fibers-and-threads
  (on-carriers (n)
    (dolist (kinds '((:fiber :fiber) (:thread :fiber) (:fiber :thread)))
      (with-group (group n)
        (let* ((listener (listening-socket))
               (port (port-of listener))
               (servers (loop repeat 10
                              collect (call-as (first kinds) group
                                               (lambda () (serve-echo listener)))))
               (clients (loop for i below 10
                              collect (let ((i i))
                                        (call-as (second kinds) group
                                                 (lambda ()
                                                   (talk-to-echo (connected-socket port) i)))))))
          (is (all-true-p (mapcar #'funcall clients)) "~S" kinds)
          (mapc #'funcall servers)
          (socket-close listener))))))

(test acceptors-of-both-kinds
  (on-carriers (n :counts '(1 2))
    (with-group (group n)
      (let* ((listener (listening-socket))
             (port (port-of listener))
             (servers (loop for i below 12
                            collect (call-as (if (evenp i) :fiber :thread) group
                                             (lambda () (serve-echo listener))))))
        (is (all-true-p (join-all (loop for i below 12
                                        collect (let ((i i))
                                                  (spawn (group)
                                                    (talk-to-echo (connected-socket port) i)))))))
        (mapc #'funcall servers)
        (socket-close listener)))))

;;; Prevents: a thread that takes EAGAIN for what the user wanted, since a fiber makes the listener
;;; one that does not wait when the thread has just looked.
(test a-fiber-accepts-just-before-a-thread
  (with-group (group 1)
    (let* ((listener (listening-socket))
           (fd (socket-file-descriptor listener))
           (looked nil)
           (thread (make-thread
                    (lambda ()
                      (sb-fiber::with-accepting (fd)
                        (unless looked
                          (setf looked t)
                          (join (spawn (group)
                                  (let ((cell (sb-fiber::find-fd-cell fd t)))
                                    (sb-fiber::prepare-to-accept cell
                                                                 (sb-fiber::note-file cell))))))
                        (sb-alien:alien-funcall
                         (sb-alien:extern-alien "accept" (function sb-alien:int sb-alien:int
                                                                   sb-alien:unsigned
                                                                   sb-alien:unsigned))
                         fd 0 0))))))
      (is (eq :waits (join-thread thread :timeout 1/10 :default :waits)))
      (let ((client (connected-socket (port-of listener)))
            (accepted (join-thread thread)))
        (is (<= 0 accepted))
        (sb-unix:unix-close accepted)
        (socket-close client)
        (socket-close listener)))))

(test local-sockets
  (on-carriers (n)
    (with-group (group n)
      (uiop:with-temporary-file (:pathname file)
        (let ((listener (make-instance 'local-socket :type :stream))
              (name (format nil "~A.socket" (sb-ext:native-namestring file))))
          (socket-bind listener name)
          (socket-listen listener 10)
          (let ((server (spawn (group) (serve-echo listener) :served))
                (client (spawn (group)
                          (let ((socket (make-instance 'local-socket :type :stream)))
                            (socket-connect socket name)
                            (talk-to-echo socket 1)))))
            (is (equal '(t :served) (join-all (list client server)))))
          (socket-close listener)
          (delete-file name))))))

(defun udp-socket ()
  (let ((socket (make-instance 'inet-socket :type :datagram :protocol :udp)))
    (socket-bind socket *loopback* 0)
    socket))

(test datagrams
  (on-carriers (n)
    (dolist (kind '(:fiber :thread))
      (with-group (group n)
        (let* ((a (udp-socket)) (b (udp-socket))
               (server (call-as kind group
                                (lambda ()
                                  (loop repeat 30
                                        do (multiple-value-bind (buffer length address port)
                                               (socket-receive a nil 100
                                                               :element-type '(unsigned-byte 8))
                                             (socket-send a buffer length
                                                          :address (list address port))))))))
          (is (eq t (join (spawn (group)
                            (loop for i from 1 to 30
                                  always (let ((data (octets i i)))
                                           (socket-send b data i
                                                        :address (list *loopback* (port-of a)))
                                           (multiple-value-bind (buffer length)
                                               (socket-receive b nil 100
                                                               :element-type '(unsigned-byte 8))
                                             (and (= length i)
                                                  (equalp data (subseq buffer 0 length))))))))))
          (funcall server)
          (socket-close a)
          (socket-close b))))))

;;; As in a thread: all or, at the end of the stream, what there is.
(test receiving-all
  (on-carriers (n :counts '(1 2))
    (with-group (group n)
      (with-sockets (a b)
        (flet ((receive (length)
                 (spawn (group) (nth-value 1 (socket-receive a nil length :waitall t
                                                             :element-type '(unsigned-byte 8))))))
          (let ((fiber (receive 10)))
            (socket-send b (octets 4) 4)
            (wait-until-parked fiber)
            (socket-send b (octets 6) 6)
            (is (eql 10 (join fiber))))
          (let ((fiber (receive 10)))
            (wait-until-parked fiber)
            (socket-send b (octets 3) 3)
            (socket-shutdown b :direction :output)
            (is (eql 3 (join fiber)))))))))

;;; Prevents: flags of another file being changed, which has got the number meanwhile.
(test closed-while-connecting
  (with-group (group 1)
    (let* ((listener (let ((socket (make-instance 'inet-socket :type :stream :protocol :tcp)))
                       (socket-bind socket *loopback* 0)
                       (socket-listen socket 0)
                       socket))
           (port (port-of listener))
           (fillers (loop repeat 4
                          collect (let ((socket (make-instance 'inet-socket
                                                               :type :stream :protocol :tcp)))
                                    (setf (non-blocking-mode socket) t)
                                    (ignore-errors (socket-connect socket *loopback* port))
                                    socket)))
           (socket (make-instance 'inet-socket :type :stream :protocol :tcp))
           (fd (socket-file-descriptor socket))
           (connector (wait-until-parked (spawn (group)
                                           (handler-case (socket-connect socket *loopback* port)
                                             (error () :error)))))
           (other (join (spawn (group)
                          (socket-close socket)
                          (let ((other (make-instance 'inet-socket :type :stream :protocol :tcp)))
                            (setf (non-blocking-mode other) t)
                            other)))))
      (is (= fd (socket-file-descriptor other)))
      (is (eq :error (join connector)))
      (is (non-blocking-mode other))
      (mapc #'socket-close (list* other listener fillers)))))

;;; SOCKET-SEND sends all, as in a thread.
(test sending-more-than-fits
  (with-group (group 1)
    (with-sockets (a b)
      (let* ((data (octets 5000000))
             (sender (spawn (group) (socket-send a data (length data)))))
        (wait-until-parked sender)
        (let ((buffer (make-array 5000000 :element-type '(unsigned-byte 8))))
          (is (= 5000000 (read-sequence buffer (stream-of b :element-type '(unsigned-byte 8)))))
          (is (equalp buffer data)))
        (is (= 5000000 (join sender)))))))

(test connection-refused
  (on-carriers (n)
    (let* ((listener (listening-socket))
           (port (port-of listener)))
      (socket-close listener)
      (is (eq :refused (in-fiber (n)
                         (handler-case (connected-socket port)
                           (sb-bsd-sockets:connection-refused-error () :refused))))))))

;;; A mode that the user has chosen stays; what we set is not seen.
(test non-blocking-mode
  (on-carriers (n)
    (with-group (group n)
      (let ((listener (listening-socket)))
        (setf (non-blocking-mode listener) t)
        (is (equal '(nil t) (join (spawn (group)
                                    (list (socket-accept listener) (non-blocking-mode listener))))))
        (setf (non-blocking-mode listener) nil)
        (is (equal '(t nil nil)
                   (let ((acceptor (spawn (group)
                                     (let ((socket (socket-accept listener)))
                                       (list (typep socket 'sb-bsd-sockets:socket)
                                             (non-blocking-mode listener)
                                             (non-blocking-mode socket))))))
                     (wait-until-parked acceptor)
                     (is (eq nil (non-blocking-mode listener)))
                     (let ((client (connected-socket (port-of listener))))
                       (prog1 (join acceptor)
                         (socket-close client))))))
        ;; after a fiber has accepted, a thread still waits
        (let ((thread
                (make-thread (lambda () (typep (socket-accept listener) 'sb-bsd-sockets:socket)))))
          (loop repeat 10 do (thread-yield))
          (let ((client (connected-socket (port-of listener))))
            (is (eq t (join-thread thread :timeout *patience*)))
            (socket-close client)))
        (socket-close listener))
      (with-sockets (a b)
        (setf (non-blocking-mode a) t)
        (is (equal '(nil t)
                   (join (spawn (group) (list (socket-receive a nil 10) (non-blocking-mode a))))))
        (setf (non-blocking-mode a) nil)
        (let ((reader (spawn (group) (nth-value 1 (socket-receive a nil 10)))))
          (wait-until-parked reader)
          (is (eq nil (non-blocking-mode a)))
          (socket-send b "1234" 4)
          (is (= 4 (join reader))))
        (is (equal '(nil nil) (join (spawn (group)
                                      (list (socket-receive a nil 10 :dontwait t)
                                            (non-blocking-mode a))))))))))

;;;; What differs between a call that waits, and one that must not

(defun in-thread-and-fiber (function)
  "The values of FUNCTION in a thread and in a fiber."
  (list (join-thread (make-thread function) :timeout *patience*)
        (in-fiber () (funcall function))))

(test sending-without-waiting
  (is (equal '(nil nil)
             (in-thread-and-fiber
              (lambda ()
                (with-sockets (a b)
                  (let ((octets (octets 100000)))
                    (loop repeat 1000 always (socket-send a octets nil :dontwait t)))))))))

(test looking-at-all-of-a-message
  (is (equal '("abcd" "abcd")
             (in-thread-and-fiber
              (lambda ()
                (with-sockets (a b)
                  (let ((sender (make-thread (lambda ()
                                               (socket-send a "ab" 2)
                                               (sleep 1/10)
                                               (socket-send a "cd" 2)))))
                    (prog1 (subseq (socket-receive b nil 4 :peek t :waitall t) 0 4)
                      (join-thread sender)))))))))

(test connecting-twice
  (is (equal '(106 106)
             (in-thread-and-fiber
              (lambda ()
                (let* ((listener (listening-socket))
                       (socket (connected-socket (port-of listener))))
                  (unwind-protect (handler-case (socket-connect socket *loopback*
                                                                (port-of listener))
                                    (sb-bsd-sockets:socket-error (c)
                                      (sb-bsd-sockets::socket-error-errno c)))
                    (socket-close socket)
                    (socket-close listener))))))))

;;; One that is accepted makes room for the next.
(test connecting-where-many-wait
  (on-carriers (n)
    (with-group (group n)
      (let ((listener (make-instance 'local-socket :type :stream))
            (name (temporary-path "socket")))
        (flet ((client ()
                 (let ((socket (make-instance 'local-socket :type :stream)))
                   (socket-connect socket name)
                   (socket-close socket)
                   t)))
          (unwind-protect
               (progn
                 (socket-bind listener name)
                 (socket-listen listener 0)
                 (let ((clients (loop repeat 5 collect (spawn (group) (client)))))
                   (spawn (group)
                     (sleep 1/50)
                     (loop repeat 5 do (socket-close (socket-accept listener))))
                   (is (all-true-p (join-all clients)))))
            (socket-close listener)
            (delete-file name)))))))

;;; The kernel says that the sender's socket is writable, since it is not connected.
(defun call-with-sender (function)
  "Call FUNCTION with two local sockets for datagrams, and the name of the first."
  (let ((receiver (make-instance 'local-socket :type :datagram))
        (sender (make-instance 'local-socket :type :datagram))
        (name (temporary-path "socket")))
    (unwind-protect
         (progn (socket-bind receiver name)
                (funcall function receiver sender name))
      (socket-close receiver)
      (socket-close sender)
      (delete-file name))))

;;; Prevents: a sender that tries again and again as fast as it can.
(test a-receiver-whose-queue-is-full
  (on-carriers (n)
    (with-group (group n)
      (call-with-sender
       (lambda (receiver sender name)
         (let* ((sent 0)
                (fiber (spawn (group)
                         (loop repeat 1000 do (socket-send sender "x" 1 :address (list name))
                                              (incf sent)))))
           (wait-until-parked fiber)
           (let ((sent sent)
                 (before (getf (fiber-group-statistics group) :switches)))
             (sleep 1/5)
             (is (< (- (getf (fiber-group-statistics group) :switches) before) 1000))
             (is (< sent 1000)))
           (loop repeat 1000 do (socket-receive receiver nil 1))
           (join fiber)
           (is (= 1000 sent))))))))

;;; Prevents: a datagram that is sent from another file that has got the number.
(test closed-while-a-queue-is-full
  (on-carriers (n)
    (with-group (group n)
      (call-with-sender
       (lambda (receiver sender name)
         (declare (ignore receiver))
         (let ((fiber (spawn (group)
                        (handler-case (loop (socket-send sender "x" 1 :address (list name)))
                          (descriptor-closed () :closed)))))
           (wait-until-parked fiber)
           (socket-close sender)
           (is (eq :closed (join fiber)))))))))

;;;; usocket

(test usocket-server
  (on-carriers (n)
    (with-group (group n)
      (let* ((listener (usocket:socket-listen "127.0.0.1" 0 :backlog 100))
             (port (usocket:get-local-port listener))
             (server (spawn (group)
                       (loop repeat 30
                             do (usocket:wait-for-input listener)
                                (let ((socket (usocket:socket-accept listener)))
                                  (spawn (group)
                                    (let ((stream (usocket:socket-stream socket)))
                                      (send-line stream (read-line stream))
                                      (usocket:socket-close socket))))))))
        (is (all-true-p
             (join-all (loop for i below 30
                             collect (let ((line (format nil "~D" i)))
                                       (spawn (group)
                                         (usocket:with-client-socket
                                             (socket stream "127.0.0.1" port)
                                           (send-line stream line)
                                           (string= line (read-line stream)))))))))
        (join server)
        (usocket:socket-close listener)))))
