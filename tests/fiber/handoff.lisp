;;;; What becomes of a scheduler whose carrier blocks: fiber/handoff.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :sb-bsd-sockets)

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/zones.lisp" *load-truename*))

(def-suite* handoff)

;;; More carriers wait natively than there are.
(test many-native-waits
  (on-carriers (n)
    (with-group (group n)
      (let* ((semaphore (sb-thread:make-semaphore))
             (fibers (loop repeat 20
                           collect (spawn (group)
                                     (with-pages-pinned (lambda ()
                                                          (sb-thread:wait-on-semaphore semaphore)))
                                     :done)))
             (last (spawn (group) (fiber-yield) (sb-thread:signal-semaphore semaphore 20) :last)))
        (is (eq :last (join last)))
        (is (equal (make-list 20 :initial-element :done) (join-all fibers)))))))

;;; Prevents: a big write, of which the reader in the same group has to make room for the rest.
(test native-write
  (on-carriers (n)
    (with-group (group n)
      (multiple-value-bind (in out) (sb-unix:unix-pipe)
        (let* ((length (* 300 1024))
               (writer (spawn (group)
                         (let ((stream (sb-sys:make-fd-stream out :output t :buffering :full
                                                                  :element-type '(unsigned-byte 8)))
                               (bytes (make-array length :element-type '(unsigned-byte 8)
                                                  :initial-element 7)))
                           (with-pages-pinned (lambda ()
                                                (write-sequence bytes stream)
                                                (finish-output stream)))
                           (close stream)
                           :written)))
               (reader (spawn (group)
                         (let ((stream (sb-sys:make-fd-stream in :input t
                                                              :element-type '(unsigned-byte 8))))
                           (prog1 (loop while (read-byte stream nil) count t)
                             (close stream))))))
          (is (= length (join reader)))
          (is (eq :written (join writer))))))))

;;; Prevents: a socket's call that waits natively, for what a fiber of the same scheduler does.
(test sockets-in-a-native-zone
  (on-carriers (n)
    (with-group (group n)
      (let ((listener (make-instance 'sb-bsd-sockets:inet-socket :type :stream :protocol :tcp))
            (home (sb-bsd-sockets:make-inet-address "127.0.0.1")))
        (sb-bsd-sockets:socket-bind listener home 0)
        (sb-bsd-sockets:socket-listen listener 5)
        (flet ((bytes-from (socket)
                 (subseq (sb-bsd-sockets:socket-receive
                          socket nil 3 :waitall t :element-type '(unsigned-byte 8))
                         0 3)))
          (let ((server (spawn (group)
                          (let* ((socket (with-pages-pinned
                                           (lambda () (sb-bsd-sockets:socket-accept listener))))
                                 (bytes (with-pages-pinned (lambda () (bytes-from socket)))))
                            (sb-bsd-sockets:socket-send socket bytes 1)
                            (sleep 1/100)
                            (sb-bsd-sockets:socket-send socket (subseq bytes 1) 2)
                            (sb-bsd-sockets:socket-close socket))
                          :served))
                (client (spawn (group)
                          (fiber-yield)
                          (let ((socket (make-instance 'sb-bsd-sockets:inet-socket
                                                       :type :stream :protocol :tcp)))
                            (with-pages-pinned
                              (lambda ()
                                (sb-bsd-sockets:socket-connect
                                 socket home (nth-value 1 (sb-bsd-sockets:socket-name listener)))))
                            (dolist (byte '(1 2 3))
                              (sb-bsd-sockets:socket-send
                               socket
                               (make-array 1 :element-type '(unsigned-byte 8) :initial-element byte)
                               1)
                              (fiber-yield))
                            ;; A part of what it wants is there when it waits natively.
                            (sb-sys:wait-until-fd-usable
                             (sb-bsd-sockets:socket-file-descriptor socket) :input)
                            (prog1 (coerce (with-pages-pinned (lambda () (bytes-from socket)))
                                           'list)
                              (sb-bsd-sockets:socket-close socket))))))
            (is (equal '(1 2 3) (join client)))
            (is (eq :served (join server)))))
        (sb-bsd-sockets:socket-close listener)))))
