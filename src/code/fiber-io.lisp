;;;; what stands in for the system calls that wait

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; The callers are streams, SB-UNIX and SB-BSD-SOCKETS. In a thread each function here does
;;; what the system call does. In a fiber the call is tried in a way that cannot
;;; wait; if it would, the fiber parks until the descriptor is ready and tries again.
;;;
;;; What cannot wait differs from file to file, and is kept in the descriptor's cell:
;;;   :SOCKET  recv(2), send(2) with MSG_DONTWAIT
;;;   :PIPE    preadv2(2), pwritev2(2) with RWF_NOWAIT
;;;   :POLL    poll(2) before the call: terminals and other devices
;;;   :PLAIN   the call itself: regular files, which are never "not ready"
;;; No flag of the file is changed for it, since others may share the file.

(define-condition descriptor-closed (error)
  ((descriptor :initarg :descriptor :reader descriptor-closed-descriptor))
  (:report (lambda (condition stream)
             (format stream "The file descriptor ~D was closed while a fiber waited for it."
                     (descriptor-closed-descriptor condition))))
  (:documentation "Signalled in a fiber that waits for a descriptor when another closes it."))

;;;; waiting for a descriptor

(defconstant errno-eperm 1)
(defconstant errno-ebadf 9)
(defconstant errno-einprogress 115)

(defun wait-for-fd (fiber cell direction deadline)
  "Park FIBER until the descriptor of CELL is ready for DIRECTION. Returns :READY, :CLOSED, :AGAIN,
:TIMEOUT, :INTERRUPTED, :PLAIN if it is of a kind that is always ready, or an errno if the kernel
refuses to watch it. With interrupts off."
  (let* ((scheduler (nearest-scheduler fiber))
         (errno (add-waiter cell fiber direction (scheduler-poller scheduler))))
    (unless (= errno 0)
      (return-from wait-for-fd
        (cond ((= errno errno-eperm) :plain)
              ((= errno errno-ebadf) :closed)
              (t errno))))
    (loop
      (park cell deadline)
      (let ((result (fiber-wait-result fiber)))
        (cond ((eq result :closing) (setf deadline nil)) ; the closer is about to let go
              (result (return result))
              ;; Not in the chain any more: who took the fiber out has yet to say why.
              ((fiber-interruptions fiber)
               (when (remove-waiter cell fiber direction) (return :interrupted)))
              ((deadline-passed-p deadline)
               (when (remove-waiter cell fiber direction) (return :timeout))))))))

(declaim (ftype (sfunction ((unsigned-byte 20) (mod 3) (or null fixnum)) boolean) park-on-fd))
(defun park-on-fd (fd direction deadline)
  "Wait until FD is ready for DIRECTION; return false when DEADLINE comes first. Signals
DESCRIPTOR-CLOSED. The caller has seen that the fiber can park."
  (let ((fiber (truly-the fiber *current-thread*))
        (cell (find-fd-cell fd t)))
    (loop
      (let ((result (without-interruptions (wait-for-fd fiber cell direction deadline))))
        (see-interruptions fiber)
        (cond ((eq result :ready) (return t))
              ((eq result :timeout) (return nil))
              ((member result '(:interrupted :again)))
              ((eq result :closed) (error 'descriptor-closed :descriptor fd))
              ((eq result :plain) (return t))
              (t (error "~@<The kernel does not watch file descriptor ~D: ~A~:@>" fd (strerror result))))))))

(defun parkable-fd-p (fd)
  (and (typep fd '(unsigned-byte 20)) (can-park-p)))

(declaim (ftype (sfunction (t symbol fixnum) boolean) poll-in-fiber))
(defun poll-in-fiber (fd direction milliseconds)
  "What UNIX-SIMPLE-POLL does in a fiber: wait for FD at most MILLISECONDS, for ever if negative."
  (let ((direction (ecase direction (:input +input+) (:output +output+))))
    (cond ((= milliseconds 0)
           (take-turn +call-cost+) ; as in (LOOP UNTIL (LISTEN ...))
           (poll-now fd direction))
          ((park-on-fd fd direction
                       (and (> milliseconds 0) (nanoseconds-from-now (* milliseconds 1000000))))))))

(defun poll-now (fd direction)
  (plusp (alien-funcall (extern-alien "fiber_poll_now" (function int int int)) fd direction)))

(defun note-native-call (fd direction)
  "Called before a system call that waits until FD is ready for DIRECTION, where no fiber can park for
that: the other end may be some fiber of this very carrier."
  (when (and (in-fiber-p) (not (nonblocking-p fd)))
    (cond ((not (poll-now fd (ecase direction (:input +input+) (:output +output+))))
           (note-native-wait))
          ((eq direction :output)
           (announce-blocking)))))      ; there may be room for a part of it only

;;;; reading and writing

(macrolet ((def (name c-name)
             `(progn
                (declaim (inline ,name))
                (defun ,name (fd sap n)
                  (alien-funcall (extern-alien ,c-name
                                               (function (signed 64) int system-area-pointer
                                                         (unsigned 64)))
                                 fd sap n)))))
  (def %receive-now "fiber_receive_now")
  (def %send-now "fiber_send_now")
  (def %read-now "fiber_read_now")
  (def %write-now "fiber_write_now")
  (def %plain-read "fiber_plain_read")
  (def %plain-write "fiber_plain_write"))

(defun kind-of-fd (fd)
  (case (sb-unix:fd-type fd)
    (:socket :socket)
    (:fifo :pipe)
    ((:regular :directory :block) :plain)
    (t :poll)))

;;; :PLAIN is not kept: if the file was closed by a way that we do not see, and the number is a socket's
;;; now, the plain call would not fail but wait.
(defun find-out-kind (cell)
  (let ((kind (kind-of-fd (fd-cell-fd cell))))
    (setf (fd-cell-kind cell) (if (eq kind :plain) nil kind))
    kind))

(defconstant errno-enotsock 88)
(defconstant errno-eopnotsupp 95)
(defconstant errno-espipe 29)

;;; The number may stand for another kind of file than when KIND was found out, if it was
;;; closed by a way that we do not see.
(defun wrong-kind-p (result)
  (declare (type (signed-byte 64) result))
  (or (= result (- errno-enotsock)) (= result (- errno-eopnotsupp)) (= result (- errno-espipe))))

(defmacro call-by-kind (cell direction socket-call pipe-call plain-call)
  `(flet ((try (kind)
            (case kind
              (:socket ,socket-call)
              (:pipe ,pipe-call)
              (:poll (if (poll-now (fd-cell-fd ,cell) ,direction)
                         ,plain-call
                         (- sb-unix:ewouldblock)))
              (t ,plain-call))))
     (declare (inline try))
     (let ((result (try (or (fd-cell-kind ,cell) (find-out-kind ,cell)))))
       (declare (type (signed-byte 64) result))
       (cond ((wrong-kind-p result)
              (let ((kind (find-out-kind ,cell)))
                (when (eq kind :pipe) ; a file system without RWF_NOWAIT
                  (setf kind (setf (fd-cell-kind ,cell) :poll)))
                (try kind)))
             (t result)))))

(declaim (inline count-or-errno))
(defun count-or-errno (result)
  (declare (type (signed-byte 64) result))
  (if (minusp result)
      (values nil (- result))
      (values result 0)))

(defun unix-read-now (fd sap n)
  "UNIX-READ, but in a fiber it fails with EWOULDBLOCK instead of waiting."
  (if (parkable-fd-p fd)
      (let ((cell (find-fd-cell fd t)))
        (take-turn +turn+)
        (count-or-errno
         (call-by-kind cell +input+
                       (%receive-now fd sap n) (%read-now fd sap n) (%plain-read fd sap n))))
      (sb-unix:unix-read fd sap n)))

(defun unix-write-now (fd buffer offset n)
  "UNIX-WRITE, but in a fiber it fails with EWOULDBLOCK instead of waiting."
  (if (parkable-fd-p fd)
      (with-pinned-objects (buffer)
        (let ((cell (find-fd-cell fd t))
              (sap (sap+ (if (system-area-pointer-p buffer) buffer (vector-sap buffer)) offset)))
          ;; A response of several pieces is not torn apart for the sake of a turn.
          (take-turn +call-cost+ +turn+)
          (count-or-errno
           (call-by-kind cell +output+
                         (%send-now fd sap n) (%write-now fd sap n) (%plain-write fd sap n)))))
      (progn (note-native-call fd :output)
             (sb-unix:unix-write fd buffer offset n))))

;;;; closing

(defun note-close (fd)
  "Called before FD is closed by any of the ways that we know."
  (without-interruptions ; those who are taken out and not woken would wait for ever
    (dolist (fiber (forget-fd fd))
      (unpark fiber))))

;;; Who began to wait after NOTE-CLOSE and before the close itself would wait for ever. He tries again,
;;; and fails, or waits for the next file of that number.
(defun note-closed (fd)
  "Called after FD has been closed."
  (let ((cell (and (typep fd '(unsigned-byte 20)) (find-fd-cell fd nil))))
    (when (and cell (or (fd-cell-input cell) (fd-cell-output cell)))
      (without-interruptions
        (dolist (fiber (wake-late-waiters cell))
          (unpark fiber))))))

;;; The system call closes NEW.
(defun closing-dup2 (old new)
  "dup2(2). Returns NEW; or NIL, and errno."
  (declare (type (signed-byte 32) old new))
  (let ((closes (/= old new)))
    (when closes (note-close new))
    (let* ((result (alien-funcall (extern-alien "dup2" (function int int int)) old new))
           (errno (get-errno)))
      (when closes (note-closed new))
      (if (minusp result)
          (values nil errno)
          (values result 0)))))

;;;; select and poll of several descriptors

;;; An epoll descriptor is itself a file that becomes readable: a fiber that waits for several
;;; descriptors waits for one made of them, and then asks without waiting which it was.
(defun park-for-set (make-set deadline)
  "Park for a set as runtime/fiber-linux.c describes it, which MAKE-SET returns. Return :READY if something
is ready, :REFUSED if there can be no such set, else NIL: look again."
  (declare (function make-set) (dynamic-extent make-set))
  (without-interrupts ; lest the descriptor be lost
    (let* ((set (funcall make-set))
           (fd (ldb (byte 20 0) set)))
      (declare (type (signed-byte 64) set))
      (cond ((= set -1) :ready)
            ((= set -3) :refused)
            ((= set -2) (with-local-interrupts (park-until deadline))
                        nil)
            ((logtest set (ash 1 40))
             (unwind-protect (with-local-interrupts (park-on-fd fd +input+ deadline))
               (sb-unix:unix-close fd))
             nil)
            (t (with-local-interrupts (park-on-fd fd (ldb (byte 2 32) set) deadline))
               nil)))))

(defun park-on-set (make-set deadline)
  "Park until one of a set is ready, or DEADLINE has come. Return false if the system call must wait itself."
  (declare (function make-set) (dynamic-extent make-set))
  (take-turn +accept-cost+) ; an acceptor, most likely
  (loop
    (let ((result (park-for-set make-set deadline)))
      (cond ((eq result :refused) (announce-blocking)
                                  (return nil))
            ((or result (deadline-passed-p deadline)) (return t))))))

(defun park-before-select (n read-fds write-fds exception-fds seconds microseconds)
  "Park until select(2) with these arguments would not wait, or its time is over. Return false if it must
wait itself. To be called when it has been found that it would."
  (flet ((sap (fds) (if fds (alien-sap fds) (int-sap 0))))
    (park-on-set (lambda ()
                   (alien-funcall
                    (extern-alien "fiber_select_set"
                                  (function (signed 64) int system-area-pointer system-area-pointer
                                            system-area-pointer))
                    n (sap read-fds) (sap write-fds) (sap exception-fds)))
                 (and (or seconds microseconds)
                      (timeout-to-deadline (or seconds 0) (or microseconds 0))))))

(defun park-before-poll (pollfds n milliseconds)
  "Park until poll(2) with these arguments would not wait, or its time is over. Return false if it must
wait itself."
  (cond ((= milliseconds 0)
         (take-turn +call-cost+) ; as in (LOOP UNTIL ... DO (SERVE-ALL-EVENTS 0))
         t)
        (t
         (park-on-set (lambda ()
                        (alien-funcall (extern-alien "fiber_poll_set"
                                                     (function (signed 64) system-area-pointer int))
                                       pollfds n))
                      (and (> milliseconds 0) (nanoseconds-from-now (* milliseconds 1000000)))))))

;;;; sockets

;;; Of local sockets the kernel does not always tell when there is room in a queue of the other end's: that of
;;; a listener, to whom wants to connect, and that of a receiver of datagrams, to a sender who is not connected,
;;; and whose own socket it says to be writable.
(defun await-room-elsewhere (fd)
  (let* ((cell (find-fd-cell fd t))
         (generation (fd-cell-generation cell)))
    (park-until (nanoseconds-from-now 10000000))
    ;; The number may be another file's by now.
    (unless (= generation (fd-cell-generation cell))
      (error 'descriptor-closed :descriptor fd))))

(defmacro with-parking ((fd direction &key (when t)) &body call)
  "The value of CALL, a system call on FD that returns -1 and sets errno if it fails. While it fails
with EAGAIN only because we do not want it to wait, wait for DIRECTION and do it again, if WHEN."
  `(flet ((call () ,@call))
     (call-with-parking #'call ,fd ,direction ,when)))

(defun call-with-parking (function fd direction when)
  (declare (function function) (dynamic-extent function))
  (unless (or (not when) (parkable-fd-p fd)) (note-native-call fd direction))
  (loop for tries of-type fixnum from 1
        do (let ((result (funcall function)))
             (unless (and (eql result -1)
                          when
                          (eql (get-errno) sb-unix:ewouldblock)
                          (or (nonblocking-by-us-p fd)
                              (and (parkable-fd-p fd) (not (nonblocking-p fd)))))
               (return result))
             (with-interrupts
               (if (and (> tries 2) (eq direction :output) (not (stream-socket-p fd)))
                   (await-room-elsewhere fd)
                   (sb-unix:unix-simple-poll fd direction -1))))))

(defun stream-socket-p (fd)
  (= 1 (alien-funcall (extern-alien "fiber_is_stream" (function int int)) fd)))

(defun nonblocking-p (fd)
  (= 1 (alien-funcall (extern-alien "fiber_is_nonblocking" (function int int)) fd)))

(declaim (inline set-nonblocking))
(defun set-nonblocking (fd)
  (alien-funcall (extern-alien "fiber_set_nonblocking" (function int int)) fd))

;;; accept(2) can be told not to wait by the flag of the file alone. So the flag is set when a
;;; fiber accepts; a thread that accepts from the same socket then waits and tries again. If the
;;; user had set it, EAGAIN is his.
(defun prepare-to-accept (fd)
  "Make accept(2) on FD not wait if this is a fiber. True if EAGAIN may mean that one must wait: whether it
does is asked then, since another may do this just before the call."
  (when (typep fd '(unsigned-byte 20))
    (when (can-park-p)
      (take-turn +accept-cost+)
      (let ((cell (find-fd-cell fd t)))
        (unless (fd-cell-nonblocking-by-us cell)
          ;; Of two who come at once the second must not take the flag for the user's.
          (with-tiny-lock ((fd-cell-lock cell))
            (when (= 1 (set-nonblocking fd)) (setf (fd-cell-nonblocking-by-us cell) t))
            nil))))
    t))

(defun nonblocking-by-us-p (fd)
  (let ((cell (and (typep fd '(unsigned-byte 20)) (find-fd-cell fd nil))))
    (and cell
         ;; Who sees the flag must not ask before it is noted whose it is.
         (with-tiny-lock ((fd-cell-lock cell))
           (fd-cell-nonblocking-by-us cell)))))

(defun user-sets-nonblocking (fd)
  (let ((cell (and (typep fd '(unsigned-byte 20)) (find-fd-cell fd nil))))
    (when cell (setf (fd-cell-nonblocking-by-us cell) nil))))

(defconstant af-unix 1)

;;; If the queue of a local listener is full, connect(2) that does not wait fails with EAGAIN.
(defun local-address-p (address)
  (= af-unix (sap-ref-16 (alien-sap address) 0)))

(defun parking-connect (fd address size)
  "connect(2) to ADDRESS, an alien pointer, parking while it is in progress if this is a fiber. -1 and
errno if it fails."
  (declare (type (signed-byte 32) fd))
  (flet ((connect ()
           (alien-funcall (extern-alien "connect" (function int int system-area-pointer int))
                          fd (alien-sap address) size))
         (finish ()
           (alien-funcall (extern-alien "fiber_connect_result" (function int int)) fd)))
    (without-interrupts ; lest the flag stay set
      (if (and (parkable-fd-p fd) (= 1 (set-nonblocking fd)))
          (let* ((cell (find-fd-cell fd t))
                 (generation (fd-cell-generation cell)))
            (unwind-protect
                 (loop
                   (when (= 0 (connect)) (return 0))
                   (let ((errno (get-errno)))
                     (cond ((= errno errno-einprogress)
                            (with-local-interrupts (park-on-fd fd +output+ nil))
                            (let ((result (finish)))
                              ;; The kernel takes the socket for connected, and refuses to do it
                              ;; again, once it has been asked again.
                              (when (= result 0) (connect))
                              (return result)))
                           ((and (= errno sb-unix:ewouldblock) (local-address-p address))
                            (with-local-interrupts (await-room-elsewhere fd)))
                           (t (return -1)))))
              ;; As above.
              (when (= generation (fd-cell-generation cell))
                (alien-funcall (extern-alien "fiber_set_blocking" (function int int)) fd))))
          (with-local-interrupts
            (note-native-call fd :output)
            (connect))))))

(defconstant msg-dontwait #x40)

(defun parking-flags (fd flags)
  "FLAGS for a call that must not wait if this is a fiber, whose turn it is."
  (cond ((parkable-fd-p fd)
         (take-turn +call-cost+)
         (logior flags msg-dontwait))
        (t flags)))

(defun parking-send (fd sap length flags)
  "send(2) of all of LENGTH bytes, as a call that waits does it."
  (declare (type (unsigned-byte 32) flags) (type index length))
  (let ((sent 0)
        (now (parking-flags fd flags)))
    (declare (type index sent))
    (loop
      (let ((count (with-parking (fd :output :when (not (logtest flags msg-dontwait)))
                     (alien-funcall (extern-alien "send" (function (signed 64) int
                                                                   system-area-pointer
                                                                   unsigned int))
                                    fd (sap+ sap sent) (- length sent) now))))
        (when (minusp count) (return (if (= sent 0) count sent)))
        (setf sent (truly-the index (+ sent count)))
        (when (or (= now flags) (>= sent length)) (return sent))))))

(defconstant msg-peek 2)
(defconstant msg-waitall #x100)

(defun parking-receive (fd buffer length flags address size)
  "recvfrom(2) into BUFFER, an alien pointer, of LENGTH bytes; with MSG_WAITALL of all of them, as a call
that waits does it. -1 and errno if it fails."
  (declare (type (unsigned-byte 32) flags) (type index length))
  (let* ((received 0)
         ;; What is only looked at stays: asking again would give the same bytes.
         (now (if (= (logand flags (logior msg-peek msg-waitall)) (logior msg-peek msg-waitall))
                  flags
                  (parking-flags fd flags)))
         (all (and (/= now flags)
                   (logtest flags msg-waitall)
                   (stream-socket-p fd))))
    (declare (type index received))
    (when (and (= now flags) (logtest flags msg-waitall) (in-fiber-p))
      (announce-blocking))              ; a part of it may be there
    (loop
      (let ((count (with-parking (fd :input :when (not (logtest flags msg-dontwait)))
                     (alien-funcall (extern-alien "recvfrom"
                                                  (function (signed 64) int system-area-pointer unsigned
                                                            int system-area-pointer system-area-pointer))
                                    fd (sap+ (alien-sap buffer) received) (- length received) now
                                    (alien-sap address) (alien-sap size)))))
        (when (minusp count) (return (if (= received 0) count received)))
        (setf received (truly-the index (+ received count)))
        (when (or (not all) (= count 0) (>= received length)) (return received))))))
