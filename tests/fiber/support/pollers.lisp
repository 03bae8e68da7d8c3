;;;; pollers and descriptors without a scheduler, and fibers that wait there and never run

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(defconstant input sb-fiber::+input+)
(defconstant output sb-fiber::+output+)
(defconstant eperm 1)
(defconstant ebadf 9)

(defmacro with-poller ((poller &optional (kind :one-shot)) &body body)
  `(let ((,poller (sb-fiber::make-poller ,kind)))
     (unwind-protect (progn ,@body)
       (sb-fiber::free-poller ,poller))))

;;; Pollers whose numbers are apart by as many as a group may have share a bit of KNOWN-TO.
(defmacro with-numbers-taken ((n) &body body)
  "Execute BODY while N numbers of pollers are not to be had, the lowest ones."
  `(let ((numbers (loop repeat ,n collect (sb-fiber::claim-poller-index))))
     (unwind-protect (progn ,@body)
       (dolist (i numbers) (setf (svref sb-fiber::*pollers* i) nil)))))

;;;; Descriptors

(defun close-fd (fd)
  "Close FD as Lisp code does, so that the waiter map is told."
  (sb-unix:unix-close fd))

(defun close-silently (fd)
  "Close FD as foreign code does."
  (sb-alien:alien-funcall (sb-alien:extern-alien "close" (function sb-alien:int sb-alien:int)) fd))

(defun duplicate (fd new)
  (assert (= new (sb-alien:alien-funcall
                  (sb-alien:extern-alien "dup2" (function sb-alien:int sb-alien:int sb-alien:int))
                  fd new))))

(defun socket-pair ()
  (sb-alien:with-alien ((fds (array sb-alien:int 2)))
    (assert (= 0 (sb-alien:alien-funcall
                  (sb-alien:extern-alien "socketpair"
                                         (function sb-alien:int sb-alien:int sb-alien:int
                                                   sb-alien:int (* (array sb-alien:int 2))))
                  1 1 0 (sb-alien:addr fds))))
    (values (sb-alien:deref fds 0) (sb-alien:deref fds 1))))

(defun call-with-fds (function opener)
  (multiple-value-bind (a b) (funcall opener)
    (unwind-protect (funcall function a b)
      (close-fd a)
      (close-fd b))))

(defmacro with-pipe ((reader writer) &body body)
  `(call-with-fds (lambda (,reader ,writer) (declare (ignorable ,reader ,writer)) ,@body)
                  #'sb-unix:unix-pipe))

(defmacro with-socket-pair ((a b) &body body)
  `(call-with-fds (lambda (,a ,b) (declare (ignorable ,a ,b)) ,@body) #'socket-pair))

(defun send-byte (fd)
  (assert (eql 1 (sb-unix:unix-write fd (make-array 1 :element-type '(unsigned-byte 8)) 0 1))))

(defun receive-byte (fd)
  (let ((buffer (make-array 1 :element-type '(unsigned-byte 8))))
    (sb-sys:with-pinned-objects (buffer)
      (assert (eql 1 (sb-unix:unix-read fd (sb-sys:vector-sap buffer) 1))))))

(defun transfer-all (function fd)
  (let ((buffer (make-array 4096 :element-type '(unsigned-byte 8))))
    (sb-sys:with-pinned-objects (buffer)
      (loop while (plusp (funcall function fd (sb-sys:vector-sap buffer) 4096))))))

(defun fill-up (fd)
  "Write to the socket FD until it is not ready for output."
  (transfer-all #'sb-fiber::%send-now fd))

(defun drain (fd)
  (transfer-all #'sb-fiber::%receive-now fd))

(defun count-descriptors ()
  (length (directory "/proc/self/fd/*" :resolve-symlinks nil)))

;;;; Waiting

(defun make-waiter () (make-fiber #'identity))
(defun cell (fd) (sb-fiber::find-fd-cell fd t))

(defun add (fiber fd direction poller)
  "Let FIBER wait; return 0 or an errno."
  (sb-fiber::add-waiter (cell fd) fiber direction poller (sb-fiber::note-file (cell fd)))
  (or (sb-fiber::fiber-wait-result fiber) 0))

(defun remove-from (fiber fd direction)
  (sb-fiber::remove-waiter (cell fd) fiber direction))

(defun events (poller &optional (nanoseconds 0))
  "What the kernel reports now: a list of conses of the data of an event and its directions."
  (let* ((events (sb-fiber::poller-events poller))
         (n (sb-fiber::%poller-wait (sb-fiber::poller-epoll poller) events
                                    sb-fiber::events-per-wait nanoseconds)))
    (loop for i below n
          collect (cons (sb-sys:sap-ref-word events (* i 16))
                        (sb-sys:sap-ref-word events (+ 8 (* i 16)))))))

(defun handle (poller event)
  "The fibers that EVENT has taken out of their chains."
  (multiple-value-bind (reader writer)
      (sb-fiber::handle-report poller (car event) (cdr event))
    (remove nil (list reader writer))))

(defun ready (poller)
  "The fibers that are ready now, in the order in which they are reported."
  (loop for event in (events poller) append (handle poller event)))

(defun chain (fiber)
  (loop while fiber
        collect fiber
        do (setf fiber (sb-fiber::fiber-wait-next fiber))))

(defun readers (fd) (chain (sb-fiber::fd-cell-input (cell fd))))
(defun writers (fd) (chain (sb-fiber::fd-cell-output (cell fd))))
(defun result (fiber) (sb-fiber::fiber-wait-result fiber))

;;;; All of it

(defun random-operations (n reader writer poller enter receive)
  "Do N operations on the waiters for READER and on a list. Return the number of the first
that differs, or NIL. ENTER is called as ADD, and may return :READY; RECEIVE takes an octet."
  (let ((model '())
        (spare (loop repeat 50 collect (make-waiter)))
        (bytes 0))
    (dotimes (i n)
      (case (random 5)
        (0 (when spare
             (let* ((fiber (pop spare))
                    (readyp (eq :ready (funcall enter fiber reader input poller))))
               (when (and readyp (or model (= bytes 0))) (return i))
               (if readyp
                   (push fiber spare)
                   (setf model (append model (list fiber)))))))
        (1 (when model
             (let ((fiber (nth (random (length model)) model)))
               (unless (remove-from fiber reader input) (return i))
               (push fiber spare)
               (setf model (remove fiber model)))))
        (2 (when (< bytes 10)
             (send-byte writer)
             (incf bytes)))
        (3 (when (plusp bytes)
             (funcall receive reader)
             (decf bytes)))
        (4 (let ((ready (ready poller)))
             (unless (equal ready (and (plusp bytes) model (list (first model)))) (return i))
             (setf spare (append ready spare)
                   model (nthcdr (length ready) model)))))
      (unless (equal model (readers reader)) (return i)))))
