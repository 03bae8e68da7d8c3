;;;; where a server listens

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-HTTP")

;;; A place is one of
;;;  (:TCP address port)   address is a string, of IPv4 or IPv6, or NIL for all of IPv4; port 0
;;;                        stands for one that the kernel chooses;
;;;  (:UNIX path)          a socket in the file system, which exists as long as the listener; the
;;;                        processes that start at one path must do so one after another;
;;;  (:FD descriptor)      a socket that listens already, inherited from who started the process.

(deftype place ()
  '(or (cons (eql :tcp) (cons (or string null) (cons (unsigned-byte 16) null)))
       (cons (eql :unix) (cons (or string pathname) null))
       (cons (eql :fd) (cons (integer 0 #.(1- (expt 2 31))) null))))

(defstruct (listener (:constructor make-listener (place socket &optional file)) (:copier nil))
  "A socket that connections are accepted from."
  (place (sb-int:missing-arg) :type place :read-only t)
  ;; in the file system: its device and inode
  (file nil :type list :read-only t)
  (socket (sb-int:missing-arg) :type sb-bsd-sockets:socket :read-only t))
(declaim (sb-ext:freeze-type listener))

;;;; addresses

(defun parse-address (address)
  "Return the socket class for ADDRESS, a string, and the address as a vector."
  (handler-case
      (if (find #\: address)
          (values 'sb-bsd-sockets:inet6-socket (sb-bsd-sockets:make-inet6-address address))
          (values 'sb-bsd-sockets:inet-socket (sb-bsd-sockets:make-inet-address address)))
    (error ()
      (error "~S is no address: give a string like \"127.0.0.1\" or \"::1\", or NIL for all."
             address))))

(defun mapped-p (address)
  "Is ADDRESS, of IPv6, one of IPv4 that came to a socket for both?"
  (not (mismatch address #(0 0 0 0 0 0 0 0 0 0 255 255) :end1 12)))

(defun address-string (address)
  "Return ADDRESS, a vector of octets, as a string; NIL if it is not of IPv4 or IPv6."
  (when (vectorp address)
    (case (length address)
      (4 (format nil "~{~D~^.~}" (coerce address 'list)))
      (16 (if (mapped-p address)
              (address-string (subseq address 12))
              (string-downcase (sb-bsd-sockets::unparse-inet6-address address)))))))

;;;; opening and closing

(defconstant +so-reuseport+ 15)         ; of Linux
(defconstant +so-domain+ 39)

(defun socket-option (fd option)
  (sb-alien:with-alien ((value sb-alien:int 0) (size (sb-alien:unsigned 32) 4))
    (sb-alien:alien-funcall
     (sb-alien:extern-alien "getsockopt" (function sb-alien:int sb-alien:int sb-alien:int
                                                   sb-alien:int (* t) (* t)))
     fd sb-bsd-sockets-internal::sol-socket option
     (sb-alien:addr value) (sb-alien:addr size))
    value))

(defun share-port (socket)
  "Let other processes listen at the place of SOCKET, too."
  (sb-alien:with-alien ((value sb-alien:int 1))
    (unless (= 0 (sb-alien:alien-funcall
                  (sb-alien:extern-alien "setsockopt" (function sb-alien:int sb-alien:int
                                                                sb-alien:int sb-alien:int (* t)
                                                                (sb-alien:unsigned 32)))
                  (sb-bsd-sockets:socket-file-descriptor socket)
                  sb-bsd-sockets-internal::sol-socket +so-reuseport+ (sb-alien:addr value) 4))
      (error "The port cannot be shared: ~A" (sb-int:strerror)))))

(defun open-tcp-socket (address port shared-p)
  (multiple-value-bind (class address) (parse-address (or address "0.0.0.0"))
    (let ((socket (make-instance class :type :stream :protocol :tcp)))
      (setf (sb-bsd-sockets:sockopt-reuse-address socket) t)
      (when shared-p (share-port socket))
      (values socket (list address port)))))

(defun native-path (path)
  (if (stringp path) path (sb-ext:native-namestring path)))

(defun socket-file (path)
  "Device and inode of the socket at PATH, a list; NIL if there is none."
  (multiple-value-bind (ok device inode mode) (sb-unix:unix-lstat path)
    (and ok (= #o140000 (logand mode #o170000)) (list device inode))))

(defun remove-stale-socket (path)
  "Remove the socket at PATH if nobody listens there."
  (when (socket-file path) (remove-socket-unless-used path)))

(defun remove-socket-unless-used (path)
  (let ((socket (make-instance 'sb-bsd-sockets:local-socket :type :stream)))
    (unwind-protect
         (handler-case (sb-bsd-sockets:socket-connect socket path)
           (sb-bsd-sockets:connection-refused-error () (sb-unix:unix-unlink path))
           (sb-bsd-sockets:socket-error ()))
      (sb-bsd-sockets:socket-close socket))))

(defun open-unix-socket (path)
  (let ((path (native-path path)))
    (remove-stale-socket path)
    (values (make-instance 'sb-bsd-sockets:local-socket :type :stream) (list path))))

(defun inherited-socket (fd)
  (let ((domain (socket-option fd +so-domain+)))
    (make-instance (cond ((= domain sb-bsd-sockets-internal::af-inet) 'sb-bsd-sockets:inet-socket)
                         ((= domain sb-bsd-sockets-internal::af-inet6)
                          'sb-bsd-sockets:inet6-socket)
                         ((= domain sb-bsd-sockets-internal::af-local)
                          'sb-bsd-sockets:local-socket)
                         (t (error "Descriptor ~D is no socket that a server can listen at." fd)))
                   :type :stream :descriptor fd)))

(defun listen-at (backlog socket address)
  "Let SOCKET listen at ADDRESS, a list. Return SOCKET."
  (let ((done nil))
    (unwind-protect
         (progn (apply #'sb-bsd-sockets:socket-bind socket address)
                (sb-bsd-sockets:socket-listen socket backlog)
                (setf done t)
                socket)
      (unless done (sb-bsd-sockets:socket-close socket)))))

(defun open-listener (place &key (backlog 1024) (shared-p nil))
  "Return a LISTENER at PLACE, where BACKLOG connections may wait to be accepted. If SHARED-P, other
processes may listen there, too. Signals SB-BSD-SOCKETS:SOCKET-ERROR, for example if the port is in
use."
  (sb-int:aver (typep place 'place))
  (ecase (first place)
    (:fd (make-listener place (inherited-socket (second place))))
    (:tcp (make-listener place (multiple-value-call #'listen-at backlog
                                 (open-tcp-socket (second place) (third place) shared-p))))
    (:unix (let ((socket (multiple-value-call #'listen-at backlog
                           (open-unix-socket (second place)))))
             (make-listener place socket (socket-file (native-path (second place))))))))

;;; Prevents: the socket of another process removed, which has taken the place over.
(defun close-listener (listener)
  (when (listener-file listener)
    (let ((path (native-path (second (listener-place listener)))))
      (when (equal (listener-file listener) (socket-file path)) (sb-unix:unix-unlink path))))
  (sb-bsd-sockets:socket-close (listener-socket listener)))

(defun listener-address (listener)
  "Where LISTENER listens: a place, in which the port is the real one."
  (let ((place (listener-place listener)) (socket (listener-socket listener)))
    (if (typep socket 'sb-bsd-sockets:local-socket)
        place
        (multiple-value-bind (address port) (sb-bsd-sockets:socket-name socket)
          (list :tcp (address-string address) port)))))

;;;; listeners of systemd

(defun inherited-places ()
  "Return the places of the sockets that systemd, or whoever else follows its protocol, has left to
this process, see sd_listen_fds(3): LISTEN_FDS tells how many there are, LISTEN_PID for whom."
  (flet ((number-in (variable)
           (let ((value (sb-ext:posix-getenv variable)))
             (and value (ignore-errors (parse-integer value))))))
    (when (eql (number-in "LISTEN_PID") (sb-unix:unix-getpid))
      (loop for fd from 3
            repeat (or (number-in "LISTEN_FDS") 0)
            collect (list :fd fd)))))
