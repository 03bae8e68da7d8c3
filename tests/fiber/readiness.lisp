;;;; descriptors that are registered once: fiber/readiness.lisp, without a scheduler

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(require :sb-bsd-sockets)
(load (merge-pathnames "support/pollers.lisp" *load-truename*))

(def-suite* readiness)

(defun enter (fiber fd direction poller)
  "Let FIBER wait as a fiber does that runs, but for parking. Return :READY if it need not."
  (let ((cell (cell fd)))
    (sb-fiber::find-out-edges cell)
    (loop
      (let ((outcome (sb-fiber::add-waiter cell fiber direction poller
                                           (sb-fiber::note-file cell))))
        (unless (eq outcome :unproven) (return outcome))
        (when (sb-fiber::still-ready-p cell direction) (return :ready))))))

(defun keeper (fd) (sb-fiber::fd-cell-keeper (cell fd)))
(defun ready-now (fd) (logand 3 (sb-fiber::fd-cell-readiness (cell fd))))

(defun try-to-read (fd)
  "Read an octet of FD as streams do. Return true if there was one."
  (let ((octets (make-array 1 :element-type '(unsigned-byte 8))))
    (sb-sys:with-pinned-objects (octets)
      (eql 1 (sb-fiber::read-by-kind (cell fd) (sb-fiber::note-file (cell fd)) fd
                                     (sb-sys:vector-sap octets) 1)))))

;;; Prevents: a system call for each wait, which is what :PERSISTENT is for.
(test a-descriptor-is-armed-once
  (with-poller (poller :persistent)
    (with-socket-pair (a b)
      (let ((fiber (make-waiter)))
        (is (eq :arm (enter fiber a input poller)))
        (is (= (sb-fiber::poller-index poller) (keeper a)))
        (is (null (ready poller)))
        (loop repeat 3
              do (send-byte b)
                 (is (equal (list fiber) (ready poller)))
                 (is (try-to-read a))
                 (is (not (try-to-read a)))
                 (is (eq :waits (enter fiber a input poller))))
        (remove-from fiber a input)))))

(test what-comes-when-nobody-waits-is-kept
  (with-poller (poller :persistent)
    (with-socket-pair (a b)
      (let ((fiber (make-waiter)))
        (enter fiber a input poller)
        (remove-from fiber a input)
        (is (not (try-to-read a)))
        (send-byte b)
        (is (null (ready poller)))
        (is (logtest input (ready-now a)))
        (is (eq :ready (enter fiber a input poller)))
        (is (null (readers a)))))))

;;; Prevents: that who reads a part, and waits without trying again, waits for an edge that has
;;; come already; and that it is told of what is there no more.
(test the-kernel-is-asked-where-nobody-has-tried
  (with-poller (poller :persistent)
    (with-socket-pair (a b)
      (let ((fiber (make-waiter)))
        (enter fiber a input poller)
        (loop repeat 2 do (send-byte b))
        (is (equal (list fiber) (ready poller)))
        (is (try-to-read a))
        (is (eq :ready (enter fiber a input poller)))
        (is (try-to-read a))
        (is (eq :waits (enter fiber a input poller)))
        (send-byte b)
        (is (equal (list fiber) (ready poller)))))))

;;; Prevents: a proof that is older than a report.
(test what-was-reported-after-a-call-stays
  (with-poller (poller :persistent)
    (with-socket-pair (a b)
      (let ((fiber (make-waiter)))
        (enter fiber a input poller)
        (remove-from fiber a input)
        (send-byte b)
        (ready poller)
        (let ((seen (sb-fiber::fd-cell-readiness (cell a))))
          (send-byte b)
          (ready poller)
          (sb-fiber::note-blocked (cell a) seen input)
          (is (logtest input (ready-now a))))
        (sb-fiber::note-blocked (cell a) (sb-fiber::fd-cell-readiness (cell a)) input)
        (is (not (logtest input (ready-now a))))))))

(test both-directions-are-kept-at-once
  (with-poller (poller :persistent)
    (with-socket-pair (a b)
      (fill-up a)
      (let ((reader (make-waiter))
            (writer (make-waiter)))
        (is (eq :arm (enter reader a input poller)))
        (is (eq :waits (enter writer a output poller)))
        (send-byte b)
        (is (equal (list reader) (ready poller)))
        (is (equal (list writer) (writers a)))
        (drain b)
        (is (equal (list writer) (ready poller)))))))

;;; An edge is reported once; the second of two that wait must hear of it as well.
(test readers-of-what-is-kept-are-woken-one-by-one
  (with-poller (poller :persistent)
    (with-socket-pair (a b)
      (let ((fibers (loop repeat 3 collect (make-waiter))))
        (dolist (fiber fibers) (enter fiber a input poller))
        (send-byte b)
        (dolist (fiber fibers) (is (equal (list fiber) (ready poller))))
        (is (null (ready poller)))))))

(defun make-datagram-socket ()
  (make-instance 'sb-bsd-sockets:inet-socket :type :datagram :protocol :udp))

;;; Prevents: relying on the edges of files that do not have all.
(test what-is-not-kept
  (with-poller (poller :persistent)
    (let ((event (sb-alien:alien-funcall
                  (sb-alien:extern-alien "fiber_event_open" (function sb-alien:int))))
          (socket (make-datagram-socket)))
      (unwind-protect
           (dolist (fd (list event (sb-bsd-sockets:socket-file-descriptor socket)))
             (let ((fiber (make-waiter)))
               (loop repeat 2
                     do (is (eq :arm (enter fiber fd input poller)))
                        (is (null (keeper fd)))
                        (is-true (remove-from fiber fd input)))))
        (close-fd event)
        (sb-bsd-sockets:socket-close socket)))))

;;; With an octet out of band a socket is ready for input, and a read fails with EAGAIN.
(test what-has-been-urgent-is-kept-no-more
  (with-poller (poller :persistent)
    (with-socket-pair (a b)
      (let ((fibers (loop repeat 2 collect (make-waiter))))
        (dolist (fiber fibers) (enter fiber a input poller))
        (is (equal (list (first fibers))
                   (handle poller (cons (sb-fiber::fd-cell-data (cell a))
                                        (logior input sb-fiber::+urgent+)))))
        (is (null (keeper a)))
        (send-byte b)
        (is (equal (list (second fibers)) (ready poller)))
        (is (eq :arm (enter (first fibers) a input poller)))
        (is (null (keeper a)))))))

;;;; Several pollers

(defun move-keeper (one two)
  (with-socket-pair (a b)
    (let ((fiber (make-waiter)))
      (enter fiber a input one)
      (remove-from fiber a input)
      (is (eq :arm (enter fiber a input two)))
      (is (= (sb-fiber::poller-index two) (keeper a)))
      (send-byte b)
      (is (null (events one)))
      (is (equal (list fiber) (ready two)))
      (is (eq :ready (enter fiber a input two)))
      (is-true (try-to-read a))
      (is (eq :arm (enter fiber a input one)))
      (send-byte b)
      (is (null (events two)))
      (is (equal (list fiber) (ready one))))))

;;; Prevents: that a fiber is woken where it does not run any more; and that both report.
(test the-keeper-moves-with-the-fiber
  (with-poller (one :persistent)
    (with-poller (two :persistent)
      (move-keeper one two))
    (with-numbers-taken ((1- sb-fiber::max-group-pollers))
      (with-poller (two :persistent)
        (is (= (sb-fiber::poller-bit (sb-fiber::poller-index one))
               (sb-fiber::poller-bit (sb-fiber::poller-index two))))
        (move-keeper one two)))))

;;; Prevents: that a poller forgets the descriptor which has the bit of the keeper before.
(test who-waits-in-a-poller-with-the-bit-of-another
  (with-poller (one :persistent)
    (with-poller (two :persistent)
      (with-numbers-taken ((- sb-fiber::max-group-pollers 2))
        (with-poller (other)
          (is (= (sb-fiber::poller-bit (sb-fiber::poller-index one))
                 (sb-fiber::poller-bit (sb-fiber::poller-index other))))
          (with-socket-pair (a b)
            (fill-up a)
            (let ((reader (make-waiter)) (writer (make-waiter)))
              (enter writer a output other)
              (enter reader a input one)
              (remove-from reader a input)
              (is (eq :arm (enter reader a input two)))
              (drain b)
              (is (equal (list writer) (ready other)))
              (is (null (ready one)))
              (send-byte b)
              (is (equal (list reader) (ready two)))
              (is (null (events one))))))))))

(test a-keeper-in-which-another-fiber-waits-stays
  (with-poller (one :persistent)
    (with-poller (two :persistent)
      (with-socket-pair (a b)
        (fill-up a)
        (let ((reader (make-waiter))
              (writer (make-waiter)))
          (enter reader a input one)
          (is (eq :waits (enter writer a output two)))
          (drain b)
          (is (null (ready two)))
          (is (equal (list writer) (ready one)))
          (send-byte b)
          (is (equal (list reader) (ready one))))))))

(test a-poller-of-the-other-kind-reports-as-well
  (with-poller (keeper :persistent)
    (with-poller (other)
      (with-socket-pair (a b)
        (let ((fiber (make-waiter)))
          (enter fiber a input keeper)
          (remove-from fiber a input)
          (is (eq :arm (enter fiber a input other)))
          (send-byte b)
          (is (null (ready keeper)))
          (is (equal (list fiber) (ready other))))))))

;;; Prevents: waiting for a report of a poller that is not there any more.
(test a-keeper-that-is-freed-keeps-nothing
  (with-socket-pair (a b)
    (let ((fiber (make-waiter)))
      (with-poller (poller :persistent)
        (enter fiber a input poller)
        (remove-from fiber a input))
      (is (null (keeper a)))
      (with-poller (poller :persistent)
        (is (eq :arm (enter fiber a input poller)))
        (send-byte b)
        (is (equal (list fiber) (ready poller)))))))

;;;; Closing

;;; A duplicate keeps the file, and with it the registration, alive.
(test what-is-closed-is-kept-no-more
  (with-poller (poller :persistent)
    (with-socket-pair (a b)
      (let ((number (sb-unix:unix-dup a)))
        (enter (make-waiter) number input poller)
        (close-fd number)
        (is (null (keeper number)))
        (send-byte b)
        (is (null (events poller)))))))

(test the-next-file-of-a-number-is-armed
  (with-poller (poller :persistent)
    (with-socket-pair (a b)
      (let ((fiber (make-waiter))
            (number (sb-unix:unix-dup a)))
        (enter fiber number input poller)
        (close-fd number)
        (with-pipe (reader writer)
          (sb-fiber::closing-dup2 reader number)
          (is (eq :arm (enter fiber number input poller)))
          (is (= (sb-fiber::poller-index poller) (keeper number)))
          (send-byte b)
          (is (null (ready poller)))
          (send-byte writer)
          (is (equal (list fiber) (ready poller)))
          (close-fd number))))))

;;; Foreign code has closed the file before.
(test the-number-of-a-connection-that-is-accepted-is-new
  (with-poller (poller :persistent)
    (with-socket-pair (a b)
      (let ((fiber (make-waiter))
            (number (sb-unix:unix-dup a)))
        (enter fiber number input poller)
        (remove-from fiber number input)
        (close-silently number)
        (with-pipe (reader writer)
          (duplicate reader number)
          (sb-sys:without-interrupts (sb-fiber::note-new-file number))
          (is (null (keeper number)))
          (is (eq :arm (enter fiber number input poller)))
          (send-byte writer)
          (is (equal (list fiber) (ready poller)))
          (close-fd number))))))

;;;; All of it

(test random-operations-on-kept
  (with-poller (poller :persistent)
    (with-pipe (reader writer)
      (is (null (random-operations 10000 reader writer poller #'enter #'try-to-read)))
      (sb-fiber::forget-file (cell reader)))))
