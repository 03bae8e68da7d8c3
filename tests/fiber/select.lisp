;;;; Select and poll of several descriptors: fiber/select.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/descriptors.lisp" *load-truename*))

(def-suite* select)

;;; Sets of more than 1,024 descriptors, as USOCKET makes them.
(test select-of-large-numbers
  (let ((fillers (loop repeat 1100 collect (sb-unix:unix-dup 0))))
    (unwind-protect
         (on-carriers (n)
           (with-group (group n)
             (with-sockets (a b)
               (let ((fd (socket-file-descriptor a)))
                 (is (< 1024 fd))
                 (flet ((readable-p (seconds)
                          (sb-alien:with-alien ((fds (sb-alien:struct sb-unix:fd-set)))
                            (sb-unix:fd-zero fds)
                            (sb-unix:fd-set fd fds)
                            (sb-unix:unix-fast-select (1+ fd) (sb-alien:addr fds) nil nil seconds 0)
                            (sb-unix:fd-isset fd fds))))
                   (is (eq nil (join (spawn (group) (readable-p 0)))))
                   (let ((fiber (wait-until-parked (spawn (group) (readable-p 3600)))))
                     (socket-send b (octets 1) 1)
                     (is (eq t (join fiber)))))))))
      (mapc #'sb-unix:unix-close fillers))))

(defun poll-set (fds events milliseconds)
  "How many entries poll(2) reports of FDS, each waited for with EVENTS, 1 for POLLIN or 2 for
POLLPRI."
  (let ((set (sb-alien:make-alien (sb-alien:unsigned 64) (length fds))))
    (unwind-protect
         (progn (loop for fd in fds
                      for i from 0
                      do (setf (sb-alien:deref set i) (logior fd (ash events 32))))
                (sb-unix::unix-poll (sb-alien:cast set (* (sb-alien:struct sb-unix::pollfd)))
                                    (length fds) milliseconds))
      (sb-alien:free-alien set))))

;;; Prevents: sets that are found to time out at once.
(test poll-of-odd-sets
  (on-carriers (n :counts '(1 2))
    (with-group (group n)
      (with-sockets (a b)
        (let ((fd (socket-file-descriptor a)))
          (flet ((waits-for-octet-p (fds events octets)
                   (let ((fiber (wait-until-parked (spawn (group) (poll-set fds events 3600000)))))
                     (socket-send b (octets 1) 1)
                     (prog1 (eql octets (join fiber))
                       (socket-receive a nil 1 :element-type '(unsigned-byte 8))))))
            (is (waits-for-octet-p (list fd fd) 1 2))
            (is (waits-for-octet-p (list fd fd fd) 1 3)))
          ;; There is something to read, but nothing exceptional.
          (socket-send b (octets 1) 1)
          (let ((fiber (wait-until-parked (spawn (group) (poll-set (list fd) 2 3600000)))))
            (terminate-fiber fiber)
            (is (eq :aborted (fiber-join fiber :default :aborted)))))))))

;;;; usocket

(defun usocket-pair ()
  (let* ((listener (usocket:socket-listen "127.0.0.1" 0))
         (a (usocket:socket-connect "127.0.0.1" (usocket:get-local-port listener)))
         (b (usocket:socket-accept listener)))
    (usocket:socket-close listener)
    (list a b)))

(test wait-for-input-of-one
  (on-carriers (n)
    (with-group (group n)
      (destructuring-bind (a b) (usocket-pair)
        (is (equal '(nil nil)
                   (join (spawn (group)
                           (list (usocket:wait-for-input a :timeout 0 :ready-only t)
                                 (usocket:wait-for-input a :timeout 1/100 :ready-only t))))))
        (let ((waiter (spawn (group) (usocket:wait-for-input a :ready-only t))))
          (wait-until-parked waiter)
          (send-line (usocket:socket-stream b) "x")
          (is (equal (list a) (join waiter))))
        (is (string= "x" (join (spawn (group) (read-line (usocket:socket-stream a))))))
        (mapc #'usocket:socket-close (list a b))))))

(test wait-for-input-of-several
  (on-carriers (n)
    (with-group (group n)
      (let* ((pairs (loop repeat 5 collect (usocket-pair)))
             (ours (mapcar #'first pairs))
             (theirs (mapcar #'second pairs)))
        (flet ((wait (timeout)
                 (spawn (group) (usocket:wait-for-input ours :timeout timeout :ready-only t))))
          (is (null (join (wait 1/100))))
          (is (null (join (wait 0))))
          (dotimes (i 5)
            (let ((waiter (wait 30)))
              (wait-until-parked waiter)
              (send-line (usocket:socket-stream (nth i theirs)) "x")
              (is (equal (list (nth i ours)) (join waiter)))
              (is (string= "x"
                           (join (spawn (group)
                                   (read-line (usocket:socket-stream (nth i ours)))))))))
          (send-line (usocket:socket-stream (first theirs)) "x")
          (send-line (usocket:socket-stream (third theirs)) "x")
          (is (null (set-exclusive-or (list (first ours) (third ours)) (join (wait 30))))))
        (mapc #'usocket:socket-close (append ours theirs))))))
