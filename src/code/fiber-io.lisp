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
;;;   :POLL    poll(2) before the call: terminals and other devices, named pipes, and all pipes
;;;            before Linux 6.4. Ready for output means that PIPE_BUF bytes have room, so no
;;;            call writes more
;;;   :PLAIN   the call itself: regular files, which are never "not ready"
;;; No flag of the file is changed for it, since others may share the file.
;;;
;;; The number of a descriptor may stand for another file after each yield and each park: some
;;; fiber has closed it, and the kernel has given the number to the next file, a stranger's
;;; connection perhaps. So an operation notes the file at its start (NOTE-FILE), and compares
;;; (SAME-FILE-P) after every yield or park and before each call; if it is another one, the
;;; operation fails. These keep a number across a park, or a yield in TAKE-TURN:
;;;   UNIX-READ-NOW, UNIX-WRITE-NOW    which fail with EBADF
;;;   PARK-ON-FILE                     which signals DESCRIPTOR-CLOSED, as all that call it do,
;;;                                    wherever they park: PARK-ON-FD, POLL-IN-FIBER,
;;;                                    PARK-FOR-SET
;;;   CALL-ON-FILE                     likewise: accept, send, sendto, recvfrom
;;;   CONNECT-IN-FIBER                 likewise
;;; Streams keep theirs in a slot, which has -1 before the number is closed, and give back their
;;; buffers after that: one that goes on after a wait finds either. The sets of select and poll hold numbers, and an answer is about whatever
;;; these stand for then, as from the kernel. Between the comparison and the call another OS
;;; thread may still close: that is so for threads as well.

(define-condition descriptor-closed (error)
  ((descriptor :initarg :descriptor :reader %descriptor-closed-descriptor))
  (:report (lambda (condition stream)
             (format stream "The file descriptor ~D was closed while a fiber used it."
                     (descriptor-closed-descriptor condition))))
  (:documentation "Signalled in a fiber that waits for a descriptor, or for its turn to use it,
when that is closed."))

;;;; the file behind a number

;;; Two descriptors may be equal in this that are not duplicates: of a path that was opened twice, or of
;;; files that have no inode of their own, as event descriptors. Sockets and pipes have one.
(defun file-identity (fd)
  "A number that tells the open file FD from sockets and pipes that are others, or 0 if there is none."
  (alien-funcall (extern-alien "fiber_file_identity" (function (unsigned 61) int)) fd))

;;; While the descriptor is being closed, its generation is that of the next file already, but the
;;; number may still stand for the old one, or already for the next: the file itself must tell.
;;; FORGET-FILE sets CLOSING before GENERATION.
(declaim (inline note-file))
(defun note-file (cell)
  "What SAME-FILE-P tells the file by for which CELL stands now: its generation, or a negative
number."
  (let ((generation (fd-cell-generation cell)))
    (if (fd-cell-closing cell)
        (- -1 (file-identity (fd-cell-fd cell)))
        generation)))

(declaim (inline same-file-p))
(defun same-file-p (cell file)
  "Does CELL still stand for FILE?"
  (declare (fixnum file))
  (if (minusp file)
      (= file (- -1 (file-identity (fd-cell-fd cell))))
      (= file (fd-cell-generation cell))))

(defun ensure-same-file (cell file)
  (unless (same-file-p cell file)
    (error 'descriptor-closed :descriptor (fd-cell-fd cell))))

(defun descriptor-closed-descriptor (condition)
  "The number of the descriptor of CONDITION, a DESCRIPTOR-CLOSED."
  (%descriptor-closed-descriptor condition))

;;;; waiting for a descriptor

(defconstant errno-eperm 1)
(defconstant errno-einprogress 115)

(defun outcome-of-wait (result)
  "What WAIT-FOR-FD returns for the RESULT that a fiber was given."
  (cond ((eql result errno-eperm) :plain)
        ((eql result sb-unix:ebadf) :closed)
        (t result)))

(defun wait-for-fd (fiber cell direction deadline file)
  "Park FIBER until the descriptor of CELL, which stands for FILE, is ready for DIRECTION. Returns
:READY, :CLOSED, :AGAIN, :TIMEOUT, :INTERRUPTED, :PLAIN if it is of a kind that is always ready, or
an errno if the kernel refuses to watch it. With interrupts off."
  (unless (and (add-waiter cell fiber direction (scheduler-poller (nearest-scheduler fiber)) file)
               ;; If the close is over, it wakes nobody any more.
               (or (>= file 0) (same-file-p cell file) (not (remove-waiter cell fiber direction))))
    (return-from wait-for-fd :closed))
  (loop
    (park (or *waited-for*
              (if (= direction +input+) (fd-cell-reading cell) (fd-cell-writing cell)))
          deadline)
    (let ((result (fiber-wait-result fiber)))
      (cond ((eq result :closing) (setf deadline nil)) ; the closer is about to let go
            (result (return (outcome-of-wait result)))
            ;; Not in the chain any more: the thread that took the fiber out has yet to say why.
            ((fiber-interruptions fiber)
             (when (remove-waiter cell fiber direction) (return :interrupted)))
            ((deadline-passed-p deadline)
             (when (remove-waiter cell fiber direction) (return :timeout)))))))

(declaim (ftype (sfunction (fd-cell fixnum (mod 3) (or null fixnum)) boolean) park-on-file))
(defun park-on-file (cell file direction deadline)
  "Wait until CELL, which stands for FILE, is ready for DIRECTION; return false when DEADLINE comes
first. Signals DESCRIPTOR-CLOSED. The caller has seen that the fiber can park."
  (let ((fiber (truly-the fiber *current-thread*)))
    (loop
      (let ((result (without-interruptions (wait-for-fd fiber cell direction deadline file))))
        (see-interruptions fiber)
        (ensure-same-file cell file)
        (case result
          ((:ready :plain) (return t))
          (:timeout (return nil))
          ((:interrupted :again))
          (:closed (error 'descriptor-closed :descriptor (fd-cell-fd cell)))
          (t (error "~@<The kernel does not watch file descriptor ~D: ~A~@[. ~@?~]~:@>"
                    (fd-cell-fd cell) (strerror result) (remedy result))))))))

(defun park-on-fd (fd direction deadline)
  "PARK-ON-FILE for the file for which FD stands now."
  (let ((cell (find-fd-cell fd t)))
    (park-on-file cell (note-file cell) direction deadline)))

(defmacro in-turn-on-file ((cell file fd cost &rest overdraft) &body body)
  "Execute BODY, when it is the turn of the running fiber, with CELL that of FD, and FILE what it
stood for before that. BODY is to compare."
  `(let* ((,cell (truly-the fd-cell (find-fd-cell ,fd t)))
          (,file (note-file ,cell)))
     (take-turn ,cost ,@overdraft)
     ,@body))

(defun parkable-fd-p (fd)
  (and (typep fd 'descriptor) (can-park-p)))

(declaim (ftype (sfunction (descriptor symbol fixnum) boolean) poll-in-fiber))
(defun poll-in-fiber (fd direction milliseconds)
  "What UNIX-SIMPLE-POLL does in a fiber: wait for FD at most MILLISECONDS, for ever if negative."
  (let ((direction (ecase direction (:input +input+) (:output +output+))))
    (if (= milliseconds 0)
        (in-turn-on-file (cell file fd +call-cost+) ; as in (LOOP UNTIL (LISTEN ...))
          (ensure-same-file cell file)
          (poll-now fd direction))
        (park-on-fd fd direction
                    (and (> milliseconds 0) (nanoseconds-from-now (* milliseconds 1000000)))))))

(defun poll-now (fd direction)
  (plusp (alien-funcall (extern-alien "fiber_poll_now" (function int int int)) fd direction)))

(defun note-native-call (fd direction)
  "Called before a system call that waits until FD is ready for DIRECTION, where no fiber can park
for that: the other end may be some fiber of this very carrier."
  (when (and (in-fiber-p) (not (nonblocking-p fd)))
    (cond ((not (poll-now fd (ecase direction (:input +input+) (:output +output+))))
           (note-native-wait))
          ((eq direction :output)
           (announce-blocking)))))      ; there may be room for a part of it only

;;;; reading and writing

(macrolet ((def (name c-name &optional (how 'progn))
             `(progn
                (declaim (inline ,name))
                (defun ,name (fd sap n)
                  (,how (alien-funcall (extern-alien ,c-name
                                                     (function (signed 64) int system-area-pointer
                                                               (unsigned 64)))
                                       fd sap n))))))
  (def %receive-now "fiber_receive_now")
  (def %send-now "fiber_send_now")
  (def %read-now "fiber_read_now")
  (def %write-now "fiber_write_now")
  (def %plain-read "fiber_plain_read" with-interruptible-system-call)
  (def %plain-write "fiber_plain_write" with-interruptible-system-call)
  (def %polled-write "fiber_polled_write"))

(defun kind-of-fd (fd)
  (case (sb-unix:fd-type fd)
    (:socket :socket)
    (:fifo :pipe)
    ((:regular :directory :block) :plain)
    (t :poll)))

;;; :PLAIN is not kept: if the file was closed by a way that we do not see, and the number is a
;;; socket's now, the plain call would not fail but wait.
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

(defmacro call-by-kind (cell &key socket pipe poll plain)
  `(flet ((try (kind)
            (case kind
              (:socket ,socket)
              (:pipe ,pipe)
              (:poll ,poll)
              (t ,plain))))
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
  "UNIX-READ, but in a fiber it fails with EWOULDBLOCK instead of waiting, and with EBADF if FD is
closed while the fiber waits for its turn."
  (if (parkable-fd-p fd)
      (in-turn-on-file (cell file fd +turn+)
        (if (same-file-p cell file)
            (count-or-errno (read-by-kind cell fd sap n))
            (values nil sb-unix:ebadf)))
      (sb-unix:unix-read fd sap n)))

(defun read-by-kind (cell fd sap n)
  (call-by-kind cell
                :socket (%receive-now fd sap n)
                :pipe (%read-now fd sap n)
                :poll (if (poll-now fd +input+) (%plain-read fd sap n) (- sb-unix:ewouldblock))
                :plain (%plain-read fd sap n)))

(defun unix-write-now (fd buffer offset n)
  "UNIX-WRITE, but in a fiber it fails with EWOULDBLOCK instead of waiting, and with EBADF if FD is
closed while the fiber waits for its turn."
  (if (parkable-fd-p fd)
      ;; A response of several pieces is not torn apart for the sake of a turn.
      (in-turn-on-file (cell file fd +call-cost+ +turn+)
        (if (same-file-p cell file)
            (with-pinned-objects (buffer)
              (count-or-errno
               (write-by-kind cell fd
                              (sap+ (if (system-area-pointer-p buffer) buffer (vector-sap buffer))
                                    offset)
                              n)))
            (values nil sb-unix:ebadf)))
      (progn (note-native-call fd :output)
             (sb-unix:unix-write fd buffer offset n))))

(defun write-by-kind (cell fd sap n)
  (call-by-kind cell
                :socket (%send-now fd sap n)
                :pipe (%write-now fd sap n)
                :poll (%polled-write fd sap n)
                :plain (%plain-write fd sap n)))

;;;; closing

;;; A fiber that first uses the number now must learn that it is being closed. Numbers that are not
;;; open have no cells: there are programs that close all there may be.
(defun note-close (fd)
  "Called before FD is closed by any of the ways that we know, with interrupts off. Return what
NOTE-CLOSED is to be told."
  (when (typep fd 'descriptor)
    (let ((cell (or (find-fd-cell fd nil)
                    (and (/= 0 (file-identity fd)) (find-fd-cell fd t)))))
      (when cell
        (multiple-value-bind (waiters generation) (forget-file cell)
          (mapc #'unpark waiters)
          generation)))))

;;; A fiber that began to wait after NOTE-CLOSE and before the close itself would wait for ever. It
;;; looks whether its file is still there.
(defun note-closed (fd mark)
  "Called after FD has been closed, with interrupts off. MARK is what NOTE-CLOSE has returned."
  (let ((cell (and mark (find-fd-cell fd nil))))
    (when cell
      (mapc #'unpark (wake-late-waiters cell mark)))))

;;; The system call closes NEW, unless it fails because OLD is not open.
(defun closing-dup2 (old new)
  "dup2(2). Returns NEW; or NIL, and errno."
  (declare (type (signed-byte 32) old new))
  (flet ((dup2 ()
           (alien-funcall (extern-alien "dup2" (function int int int)) old new)))
    (let ((result (if (or (= old new) (= 0 (file-identity old)))
                      (dup2)
                      (closing-descriptor (new) (dup2)))))
      (if (minusp result)
          (values nil (get-errno))
          (values result 0)))))

;;;; select and poll of several descriptors

;;; An epoll descriptor is itself a file that becomes readable: a fiber that waits for several
;;; descriptors waits for one made of them, and then asks without waiting which it was.
(defun park-for-set (make-set deadline)
  "Park for a set as runtime/fiber-linux.c describes it, which MAKE-SET returns. Return :READY if
something is ready, :REFUSED if there can be no such set, else NIL: look again."
  (declare (function make-set) (dynamic-extent make-set))
  (without-interrupts ; lest the descriptor be lost
    (let* ((set (funcall make-set))
           (fd (ldb (byte 31 0) set)))
      (declare (type (signed-byte 64) set))
      (cond ((= set -1) :ready)
            ((= set -3) :refused)
            ((= set -2) (with-local-interrupts (park-until deadline))
                        nil)
            ((logtest set (ash 1 40))
             (unwind-protect (waiting-for :poll
                               (with-local-interrupts (park-on-fd fd +input+ deadline)))
               (sb-unix:unix-close fd))
             nil)
            (t (with-local-interrupts (park-on-fd fd (ldb (byte 2 32) set) deadline))
               nil)))))

(defun park-on-set (make-set deadline)
  "Park until one of a set is ready, or DEADLINE has come. Return false if the system call must wait
itself."
  (declare (function make-set) (dynamic-extent make-set))
  (take-turn +accept-cost+) ; an acceptor, most likely
  (loop
    (let ((result (park-for-set make-set deadline)))
      (cond ((eq result :refused) (announce-blocking)
                                  (return nil))
            ((or result (deadline-passed-p deadline)) (return t))))))

(defun park-before-select (n read-fds write-fds exception-fds seconds microseconds)
  "Park until select(2) with these arguments would not wait, or its time is over. Return false if it
must wait itself. To be called when it has been found that it would."
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
  "Park until poll(2) with these arguments would not wait, or its time is over. Return false if it
must wait itself."
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

;;; Of local sockets the kernel does not always tell when there is room in a queue of the other
;;; end's: that of a listener, to whom wants to connect, and that of a receiver of datagrams, to a
;;; sender who is not connected, and whose own socket it says to be writable.
(defun await-room-elsewhere (cell)
  (park-until (nanoseconds-from-now 10000000) (fd-cell-writing cell)))

(defmacro with-parking ((fd direction &key (when t)) &body call)
  "The value of CALL, a system call on FD that returns -1 and sets errno if it fails. While it fails
with EAGAIN only because we do not want it to wait, wait for DIRECTION and do it again, if WHEN."
  `(flet ((call () ,@call))
     (call-with-parking #'call ,fd ,direction ,when)))

(defun call-with-parking (function fd direction when)
  (declare (function function) (dynamic-extent function))
  (if (parkable-fd-p fd)
      (in-turn-on-file (cell file fd +call-cost+)
        (call-on-file function cell file direction when))
      (call-natively function fd direction when)))

(declaim (inline would-wait-p direction-number))
(defun would-wait-p (result)
  (and (eql result -1) (eql (get-errno) sb-unix:ewouldblock)))

(defun direction-number (direction)
  (ecase direction (:input +input+) (:output +output+)))

(defun call-on-file (function cell file direction when)
  "What WITH-PARKING does in a fiber, with FUNCTION for the call. It is called only while CELL
stands for FILE."
  (declare (function function))
  (let ((fd (fd-cell-fd cell)))
    (loop for tries of-type fixnum from 1
          do (ensure-same-file cell file)
             (let ((result (funcall function)))
               (unless (and when
                            (would-wait-p result)
                            (or (nonblocking-by-us-p fd) (not (nonblocking-p fd))))
                 (return result))
               (with-interrupts
                 (if (and (> tries 2) (eq direction :output) (not (stream-socket-p fd)))
                     (await-room-elsewhere cell)
                     (park-on-file cell file (direction-number direction) nil)))))))

(defun call-natively (function fd direction when)
  "What WITH-PARKING does where no fiber can park."
  (declare (function function))
  (when when (note-native-call fd direction))
  (loop
    (let ((result (with-interruptible-system-call (funcall function))))
      (unless (and when (would-wait-p result) (nonblocking-by-us-p fd)) (return result))
      (with-interrupts (sb-unix:unix-simple-poll fd direction -1)))))

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
(defun prepare-to-accept (cell)
  "Make accept(2) on the descriptor of CELL not wait."
  (unless (fd-cell-nonblocking-by-us cell)
    ;; Of two who come at once the second must not take the flag for the user's.
    (with-tiny-lock ((fd-cell-lock cell))
      (when (= 1 (set-nonblocking (fd-cell-fd cell))) (setf (fd-cell-nonblocking-by-us cell) t))
      nil)))

(defmacro with-accepting ((fd) &body call)
  "WITH-PARKING for CALL of accept(2) on FD."
  `(flet ((call () ,@call))
     (call-accepting #'call ,fd)))

;;; In a thread, too, EAGAIN may mean that one must wait: whether it does is asked then, since a
;;; fiber may accept for the first time just before the call.
(defun call-accepting (function fd)
  (declare (function function) (dynamic-extent function))
  (if (parkable-fd-p fd)
      (in-turn-on-file (cell file fd +accept-cost+)
        (ensure-same-file cell file)
        (prepare-to-accept cell)
        (call-on-file function cell file :input t))
      (call-natively function fd :input t)))

(defun nonblocking-by-us-p (fd)
  (let ((cell (and (typep fd 'descriptor) (find-fd-cell fd nil))))
    (and cell
         ;; A thread that sees the flag must not ask before it is noted whose it is.
         (with-tiny-lock ((fd-cell-lock cell))
           (fd-cell-nonblocking-by-us cell)))))

(defun user-sets-nonblocking (fd)
  (let ((cell (and (typep fd 'descriptor) (find-fd-cell fd nil))))
    (when cell (setf (fd-cell-nonblocking-by-us cell) nil))))

(defconstant af-unix 1)

;;; If the queue of a local listener is full, connect(2) that does not wait fails with EAGAIN.
(defun local-address-p (address)
  (= af-unix (sap-ref-16 (alien-sap address) 0)))

(defun %connect (fd address size)
  (alien-funcall (extern-alien "connect" (function int int system-area-pointer int))
                 fd (alien-sap address) size))

(defun parking-connect (fd address size)
  "connect(2) to ADDRESS, an alien pointer, parking while it is in progress if this is a fiber. -1
and errno if it fails."
  (declare (type (signed-byte 32) fd))
  (without-interrupts ; lest the flag stay set
    (if (and (parkable-fd-p fd) (= 1 (set-nonblocking fd)))
        (let* ((cell (find-fd-cell fd t))
               (file (note-file cell)))
          (unwind-protect (with-local-interrupts (connect-in-fiber cell file address size))
            (when (same-file-p cell file)
              (alien-funcall (extern-alien "fiber_set_blocking" (function int int)) fd))))
        (with-local-interrupts
          (note-native-call fd :output)
          (with-interruptible-system-call (%connect fd address size))))))

(defun connect-in-fiber (cell file address size)
  (let ((fd (fd-cell-fd cell)))
    (loop
      (ensure-same-file cell file)
      (when (= 0 (%connect fd address size)) (return 0))
      (let ((errno (get-errno)))
        (cond ((= errno errno-einprogress)
               (park-on-file cell file +output+ nil)
               (return (finish-connecting fd address size)))
              ((and (= errno sb-unix:ewouldblock) (local-address-p address))
               (await-room-elsewhere cell))
              (t (return -1)))))))

(defun finish-connecting (fd address size)
  (let ((result (alien-funcall (extern-alien "fiber_connect_result" (function int int)) fd)))
    ;; The kernel takes the socket for connected, and refuses to do it again, once it has been
    ;; asked again.
    (when (= result 0) (%connect fd address size))
    result))

(defconstant msg-dontwait #x40)

(defun parking-flags (fd flags)
  "FLAGS for a call on FD that must not wait if this is a fiber."
  (if (parkable-fd-p fd) (logior flags msg-dontwait) flags))

(defun %send (fd sap length flags)
  (alien-funcall (extern-alien "send" (function (signed 64) int system-area-pointer unsigned int))
                 fd sap length flags))

(defun parking-send (fd sap length flags)
  "send(2) of all of LENGTH bytes, as a call that waits does it."
  (declare (type (unsigned-byte 32) flags) (type index length))
  (let ((waitp (not (logtest flags msg-dontwait))))
    (if (parkable-fd-p fd)
        (in-turn-on-file (cell file fd +call-cost+)
          (dx-flet ((send-rest (sent)
                      (dx-flet ((call ()
                                  (%send fd (sap+ sap sent) (- length sent)
                                         (logior flags msg-dontwait))))
                        (call-on-file #'call cell file :output waitp))))
            (transfer-all length waitp #'send-rest)))
        (dx-flet ((call () (%send fd sap length flags)))
          (call-natively #'call fd :output waitp)))))

(defun transfer-all (length all call)
  "Call CALL with the number of bytes transferred so far, until these are LENGTH, or it transfers no
more or fails; once, if not ALL. Return their number, or what CALL returned if there are none."
  (declare (function call) (type index length))
  (let ((done 0))
    (declare (type index done))
    (loop
      (let ((count (funcall call done)))
        (declare (type (signed-byte 64) count))
        (when (minusp count) (return (if (= done 0) count done)))
        (setf done (truly-the index (+ done count)))
        (when (or (not all) (= count 0) (>= done length)) (return done))))))

(defconstant msg-peek 2)
(defconstant msg-waitall #x100)

(defun %receive (fd sap length flags address size)
  (alien-funcall (extern-alien "recvfrom" (function (signed 64) int system-area-pointer unsigned
                                                    int system-area-pointer system-area-pointer))
                 fd sap length flags (alien-sap address) (alien-sap size)))

;;; What is only looked at stays: asking again would give the same bytes.
(defun peeks-at-all-p (flags)
  (let ((both (logior msg-peek msg-waitall)))
    (= both (logand flags both))))

(defun parking-receive (fd buffer length flags address size)
  "recvfrom(2) into BUFFER, an alien pointer, of LENGTH bytes; with MSG_WAITALL of all of them, as a
call that waits does it. -1 and errno if it fails."
  (declare (type (unsigned-byte 32) flags) (type index length))
  (let ((sap (alien-sap buffer))
        (waitp (not (logtest flags msg-dontwait))))
    (cond ((and (parkable-fd-p fd) (not (peeks-at-all-p flags)))
           (in-turn-on-file (cell file fd +call-cost+)
             (dx-flet ((receive-rest (received)
                         (dx-flet ((call ()
                                     (%receive fd (sap+ sap received) (- length received)
                                               (logior flags msg-dontwait) address size)))
                           (call-on-file #'call cell file :input waitp))))
               (transfer-all length
                             (and waitp (logtest flags msg-waitall) (stream-socket-p fd))
                             #'receive-rest))))
          (t
           (when (and (logtest flags msg-waitall) (in-fiber-p))
             (announce-blocking))       ; a part of it may be there
           (dx-flet ((call () (%receive fd sap length flags address size)))
             (call-natively #'call fd :input waitp))))))
