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
;;;   :SOCKET  recv(2), send(2), sendmsg(2) with MSG_DONTWAIT; likewise :STREAM and :MESSAGES, if it
;;;            has been asked whether its edges are complete, see fiber/readiness.lisp
;;;   :PIPE    preadv2(2), pwritev2(2) with RWF_NOWAIT
;;;   :POLL    poll(2) before the call: terminals and other devices, named pipes, and all pipes
;;;            before Linux 6.4. A pipe that is ready for output has room for PIPE_BUF bytes, so
;;;            no call writes more. A terminal may have less room, and its carrier be stuck
;;;   :PLAIN   regular files, which are never "not ready". preadv2(2) with RWF_NOWAIT reads what is
;;;            in memory; if it would wait for the disk, a thread of the pool reads. What is
;;;            written, or is on a file system that does not know the flag, keeps the carrier
;;; No flag of the file is changed for it, since others may share the file.
;;;
;;; The number of a descriptor may stand for another file after each yield and each park: some
;;; fiber has closed it, and the kernel has given the number to the next file, a stranger's
;;; connection perhaps. So an operation notes the file at its start (NOTE-FILE), and compares
;;; (SAME-FILE-P) after every yield or park and before each call; if it is another file, the
;;; operation fails. Between the comparison and the call there is no interruption (IF-SAME-FILE),
;;; but for :POLL, since what it calls may park, and a fiber is preempted by one. These keep a
;;; number across a park, or a yield, in SPEND-BUDGET or before a second attempt:
;;;   READ-IN-FIBER, WRITING-NOW       which fail with EBADF; READ-IN-POOL, too, whose thread
;;;                                    compares
;;;   PARK-ON-FILE                     which signals DESCRIPTOR-CLOSED, as all that call it do,
;;;                                    wherever they park: PARK-ON-FD, POLL-HERE, PARK-FOR-SET
;;;   CALL-ON-FILE                     likewise: accept, send, sendto, recvfrom
;;;   CONNECT-IN-FIBER                 likewise
;;; A stream keeps its number in a slot, which has -1 before the number is closed. So the file that
;;; was noted for a number is the stream's if the slot has the number still. It gives back its
;;; buffers after that, and these another stream takes: but not while a fiber is interrupted, or
;;; waits for a disk, which may be about to use them, see RECYCLE. The sets of select and poll hold
;;; numbers, and an answer is about whatever these stand for then, as it is from the kernel. Between
;;; the comparison and the call another OS thread may still close the file: that is so for threads
;;; as well.

(define-condition descriptor-closed (error)
  ((descriptor :initarg :descriptor :reader %descriptor-closed-descriptor))
  (:report (lambda (condition stream)
             (format stream "The file descriptor ~D was closed while a fiber used it."
                     (descriptor-closed-descriptor condition))))
  (:documentation "The error that is signaled in a fiber that waits for a file descriptor if another
fiber or thread closes that; and in one that was about to use the descriptor, and had waited for
its turn or had just been woken, unless it was to read or write a stream: then a STREAM-ERROR is
signaled. DESCRIPTOR-CLOSED-DESCRIPTOR returns the number of the descriptor."))

;;;; the file behind a number

;;; Two descriptors that are not duplicates may have the same number here: those of a path that was
;;; opened twice, or of files without an inode of their own, as event descriptors are. Sockets and
;;; pipes have one.
(defun file-identity (fd)
  "A number that tells the open file FD from other sockets and pipes, or 0 if FD is not open."
  (alien-funcall (extern-alien "fiber_file_identity" (function (unsigned 61) int)) fd))

;;; While the descriptor is being closed, its generation is that of the next file already, but the
;;; number may still stand for the old one, or already for the next: the file itself must tell.
;;; FORGET-FILE sets CLOSING before GENERATION.
(declaim (inline note-file))
(defun note-file (cell)
  "What SAME-FILE-P needs to know the file again for which CELL stands now: its generation, or a
negative number."
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

(defmacro if-same-file ((cell file) call)
  "The value of CALL, a system call that does not wait, or false if CELL is not for FILE any more."
  `(without-interruptions (and (same-file-p ,cell ,file) ,call)))

(defun descriptor-closed-descriptor (condition)
  "Return the number of the file descriptor that CONDITION, of type DESCRIPTOR-CLOSED, is about."
  (%descriptor-closed-descriptor condition))

;;;; waiting for a descriptor

(defun outcome-of-wait (result)
  "What WAIT-FOR-FD returns for the RESULT that a fiber was given."
  (cond ((eql result sb-unix:eperm) :plain)
        ((eql result sb-unix:ebadf) :closed)
        (t result)))

;;; In that of a carrier that is one too many the report would wake it.
(defun poller-to-wait-in (fiber)
  (let ((scheduler (truly-the scheduler (nearest-scheduler fiber)))
        (group (truly-the fiber-group (fiber-group fiber))))
    (scheduler-poller (or (and (crowded-p group) (scheduler-instead-of scheduler group))
                          scheduler))))

(defun scheduler-instead-of (scheduler group)
  "One of those that are to be at work in GROUP, if it looks at its poller."
  (declare (fiber-group group))
  (let* ((all (fiber-group-schedulers group))
         (place (truly-the index (position scheduler all)))
         (other (truly-the scheduler (svref all (rem place (fiber-group-processors group))))))
    (and (or (idle-p other (fiber-group-idle group))
             (at-work-p other (%cycle-count)))
         other)))

(defun begin-to-wait (fiber cell direction file)
  (let ((poller (poller-to-wait-in fiber)))
    (when (poller-keeps-p poller) (find-out-edges cell))
    (add-waiter cell fiber direction poller file)))

(defun wait-for-fd (fiber cell direction deadline file)
  "Park FIBER until the descriptor of CELL, which stands for FILE, is ready for DIRECTION. Returns
:READY, :AT-ONCE if it did not park, :CLOSED, :AGAIN, :TIMEOUT, :INTERRUPTED, :PLAIN if it is of a
kind that is always ready, or an errno if the kernel refuses to watch it. With interrupts off."
  (loop
    (ecase (begin-to-wait fiber cell direction file)
      (:closed (return-from wait-for-fd :closed))
      (:unproven (when (still-ready-p cell direction) (return-from wait-for-fd :at-once)))
      ((:waits :arm) (return))))
  ;; If the close is over, it wakes no fiber any more.
  (unless (or (>= file 0) (same-file-p cell file) (not (remove-waiter cell fiber direction)))
    (return-from wait-for-fd :closed))
  (loop
    (park (or *waited-for*
              (if (= direction +input+) (fd-cell-reading cell) (fd-cell-writing cell)))
          deadline)
    (let ((result (fiber-wait-result fiber)))
      (cond ((eq result :closing) (setf deadline nil)) ; the closing thread is about to let go
            (result (return (outcome-of-wait result)))
            ;; Not in the chain any more: the thread that took the fiber out has yet to say why.
            ;; First of all, as where interrupts are off the interruptions stay.
            ((deadline-passed-p deadline)
             (when (remove-waiter cell fiber direction) (return :timeout)))
            ((or (fiber-interruptions fiber) (to-leave-p fiber))
             (when (remove-waiter cell fiber direction) (return :interrupted)))))))

(declaim (ftype (sfunction (fd-cell fixnum (mod 3) (or null fixnum)) boolean) park-on-file))
(defun park-on-file (cell file direction deadline)
  "Wait until CELL, which stands for FILE, is ready for DIRECTION; return false when DEADLINE comes
first. Signals DESCRIPTOR-CLOSED. The caller has seen that the fiber can park."
  (let ((fiber (truly-the fiber *current-thread*)))
    (loop
      (see-cancellation fiber)
      (let ((result (without-interruptions (wait-for-fd fiber cell direction deadline file))))
        (see-interruptions fiber)
        (ensure-same-file cell file)
        (case result
          ((:ready :plain) (return t))
          (:at-once                     ; a loop of such waits must not keep the carrier
           (spend-budget +call-cost+)
           (ensure-same-file cell file)
           (return t))
          (:timeout (return nil))
          ((:interrupted :again))
          (:closed (error 'descriptor-closed :descriptor (fd-cell-fd cell)))
          (t (error "~@<The kernel does not watch file descriptor ~D: ~A~@[. ~@?~]~:@>"
                    (fd-cell-fd cell) (strerror result) (remedy result))))))))

(defun park-on-fd (fd direction deadline)
  "PARK-ON-FILE for the file for which FD stands now."
  (let ((cell (find-fd-cell fd t)))
    (park-on-file cell (note-file cell) direction deadline)))

(defmacro within-budget-on-file ((cell file fd cost &rest overdraft) &body body)
  "Execute BODY, when the budget of the running fiber allows it, with CELL bound to the cell of FD,
and FILE to the file for which that stood before a yield. BODY is to compare."
  `(let* ((,cell (truly-the fd-cell (find-fd-cell ,fd t)))
          (,file (note-file ,cell)))
     (spend-budget ,cost ,@overdraft)
     ,@body))

(defun parkable-fd-p (fd)
  (and (typep fd 'descriptor) (can-park-p)))

(defun poll-here-p (fd)
  "Called by UNIX-SIMPLE-POLL: is POLL-HERE to be called instead of the kernel?"
  (or (minusp fd) (parkable-fd-p fd)))

;;; A negative number is that of a stream that another has closed just before. It is never ready,
;;; says poll(2); but the caller is to find out.
(declaim (ftype (sfunction (fixnum symbol fixnum) boolean) poll-here))
(defun poll-here (fd direction milliseconds)
  "What UNIX-SIMPLE-POLL does in a fiber: wait for FD at most MILLISECONDS, for ever if negative."
  (let ((direction (ecase direction (:input +input+) (:output +output+))))
    (cond ((minusp fd) t)
          ((= milliseconds 0)
           (within-budget-on-file (cell file fd +call-cost+) ; as in (LOOP UNTIL (LISTEN ...))
             (ensure-same-file cell file)
             (poll-now fd direction)))
          (t
           (park-on-fd fd direction
                       (and (> milliseconds 0)
                            (nanoseconds-from-now (* milliseconds 1000000))))))))

(defun %poll-now (fd direction)
  (alien-funcall (extern-alien "fiber_poll_now" (function int int int)) fd direction))

(defun poll-now (fd direction)
  (plusp (%poll-now fd direction)))

(defun note-native-poll (fd direction)
  "As NOTE-NATIVE-CALL before poll(2), which waits even if FD does not."
  (when (and (in-fiber-p) (not (poll-now fd (ecase direction (:input +input+) (:output +output+)))))
    (note-native-wait)))

(defun note-native-call (fd direction)
  "Called before a system call that waits until FD is ready for DIRECTION, where no fiber can park
for that: the other end may be some fiber of this very carrier."
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
  (def %plain-write "fiber_plain_write")
  (def %polled-write "fiber_polled_write")
  ;; SAP is that of N parts, each a struct iovec.
  (def %send-parts-now "fiber_send_parts_now")
  (def %write-parts-now "fiber_write_parts_now")
  (def %plain-write-parts "fiber_plain_write_parts")
  (def %polled-write-parts "fiber_polled_write_parts"))

(defun kind-of-fd (fd)
  (case (sb-unix:fd-type fd)
    (:socket :socket)
    (:fifo :pipe)
    ((:regular :directory :block) :plain)
    (t :poll)))

;;; :PLAIN is not kept: if the file was closed by a way that we do not see, and the number is a
;;; socket's now, the plain call would not fail but wait.
(defun find-out-kind (cell)
  (note-kind cell #'kind-of-fd))

;;; It would be the kind of the next file, or be taken for that, if the descriptor was being closed
;;; or is closed meanwhile: GENERATION is read first, since CLOSING was set before it.
(defun note-kind (cell function)
  "Return what FUNCTION says of the descriptor of CELL, and note it if it holds."
  (declare (function function))
  (let* ((generation (fd-cell-generation cell))
         (closing (progn (barrier (:read)) (fd-cell-closing cell)))
         (kind (funcall function (fd-cell-fd cell))))
    (with-tiny-lock ((fd-cell-lock cell))
      (unless (or closing (fd-cell-closing cell) (/= generation (fd-cell-generation cell)))
        (setf (fd-cell-kind cell) (if (eq kind :plain) nil kind)))
      nil)
    kind))

(defun find-out-edges (cell)
  "Let the kind of CELL be one that tells whether its edges are complete."
  (unless (fd-cell-kind cell) (find-out-kind cell))
  (when (eq (fd-cell-kind cell) :socket)
    (note-kind cell (lambda (fd) (if (complete-edges-p fd) :stream :messages)))))

(defun complete-edges-p (fd)
  (= 1 (alien-funcall (extern-alien "fiber_edges_complete" (function int int)) fd)))

;;; The number may stand for another kind of file than when KIND was found out, if it was
;;; closed by a way that we do not see.
(defun wrong-kind-p (result)
  (declare (type (signed-byte 64) result))
  (or (= result (- sb-unix:enotsock))
      (= result (- sb-unix:eopnotsupp))
      (= result (- sb-unix:espipe))))

(defmacro call-by-kind ((cell file) &key socket pipe poll plain)
  "The value of the call for the kind of CELL, or minus EBADF if that is not for FILE any more."
  `(flet ((try (kind)
            (or (case kind
                  ((:socket :stream :messages) (if-same-file (,cell ,file) ,socket))
                  (:pipe (if-same-file (,cell ,file) ,pipe))
                  ;; A terminal may wait: that is left when the fiber is terminated.
                  (:poll (with-interruptible-system-call
                           (and (same-file-p ,cell ,file) ,poll)))
                  (t (if-same-file (,cell ,file) ,plain)))
                (- sb-unix:ebadf))))
     (declare (inline try))
     (let ((result (try (or (fd-cell-kind ,cell) (find-out-kind ,cell)))))
       (declare (type (signed-byte 64) result))
       (cond ((wrong-kind-p result)
              (let ((kind (find-out-kind ,cell)))
                (when (eq kind :pipe) ; a file system without RWF_NOWAIT
                  (cas (fd-cell-kind ,cell) :pipe :poll)
                  (setf kind :poll))
                (try kind)))
             (t result)))))

(declaim (inline count-or-errno))
(defun count-or-errno (result)
  (declare (type (signed-byte 64) result))
  (if (minusp result)
      (values nil (- result))
      (values result 0)))

(declaim (inline number-of-stream-p))
(defun number-of-stream-p (fd stream)
  "Is FD the descriptor of STREAM, if that is not NIL, still?"
  (or (null stream)
      (= fd (sb-impl::fd-stream-fd (truly-the fd-stream stream)))))

(declaim (inline read-buffer-now))
(defun read-buffer-now (fd stream sap n)
  (if (parkable-fd-p fd)
      (count-or-errno (read-in-fiber fd stream sap n))
      (sb-unix:unix-read fd sap n)))

(declaim (inline blocked-p))
(defun blocked-p (result)
  (= (the (signed-byte 64) result) (- sb-unix:ewouldblock)))

(declaim (ftype (sfunction (descriptor t system-area-pointer (and unsigned-byte fixnum))
                           (signed-byte 64))
                read-in-fiber))
(defun read-in-fiber (fd stream sap n)
  "Read at most N bytes, and return their number, or minus an errno; see fiber/retry.lisp for
the second attempt."
  (within-budget-on-file (cell file fd +budget+)
    (flet ((attempt ()
             (if (number-of-stream-p fd stream)
                 (read-by-kind cell file fd sap n)
                 (- sb-unix:ebadf))))
      (let ((result (attempt)))
        (cond ((and (blocked-p result) (retry-p cell))
               (fiber-yield)
               (let ((result (attempt)))
                 (note-retry cell (not (blocked-p result)))
                 result))
              (t result))))))

(defun unix-read-now (fd sap n)
  "Read at most N bytes from the file descriptor FD to memory at SAP, a SYSTEM-AREA-POINTER. Return
the number of bytes read, which is 0 at the end of the file, or NIL and an errno. In a fiber that
can park this does not wait, but fails with SB-UNIX:EWOULDBLOCK; it may yield, before it reads or
before it finds that there is nothing, and fails with SB-UNIX:EBADF if FD is closed by others
meanwhile. See SB-SYS:WAIT-UNTIL-FD-USABLE for waiting. Elsewhere it waits as read(2) does."
  (read-buffer-now fd nil sap n))

(defun read-for-stream (stream fd sap n)
  "UNIX-READ-NOW from FD, which was the descriptor of STREAM a moment ago."
  (if (minusp fd)
      (values nil sb-unix:ebadf)
      (read-buffer-now fd stream sap n)))

(defun read-by-kind (cell file fd sap n)
  (proving-blocked (cell +input+)
    (call-by-kind (cell file)
      :socket (%receive-now fd sap n)
      :pipe (%read-now fd sap n)
      :poll (if (poll-now fd +input+) (%plain-read fd sap n) (- sb-unix:ewouldblock))
      :plain (read-from-file cell file fd sap n))))

(defun read-from-file (cell file fd sap n)
  "read(2) from a regular file: here if it need not wait for the disk."
  (let ((result (%read-now fd sap n)))
    (cond ((= result (- sb-unix:ewouldblock))
           (if (pool-may-read-p)
               (read-in-pool cell file fd sap n)
               (%plain-read fd sap n)))
          ((= result (- sb-unix:eopnotsupp)) (%plain-read fd sap n))
          (t result))))

;;; The fiber cannot be unwound while it waits, as the thread would write to memory that is used for
;;; something else. So there must be room for the wait and for a signal in it, and a thread that
;;; does nothing else: calls of others may last, or wait for this fiber.
(defun pool-may-read-p ()
  (and (waiting-room-p (truly-the fiber *current-thread*) 65536)
       (pool-has-thread-p)))

(defun read-in-pool (cell file fd sap n)
  "read(2) by a thread of the pool, with the fiber parked."
  (without-interrupts
    (sb-sys:with-deadline (:seconds nil :override t)
      (while-holding-buffers
        (call-blocking (lambda ()
                         (without-interrupts
                           (or (if-same-file (cell file) (%plain-read fd sap n))
                               (- sb-unix:ebadf)))))))))

;;; A response of several pieces is not torn apart for the sake of a budget.
(defmacro writing-now ((cell file fd stream) in-fiber &body elsewhere)
  "The values of IN-FIBER, a count or minus an errno, as UNIX-WRITE-NOW returns them, where the
running fiber can park; or else those of ELSEWHERE. FD is that of STREAM, if that is not NIL."
  `(if (parkable-fd-p ,fd)
       (within-budget-on-file (,cell ,file ,fd +call-cost+ +budget+)
         (if (number-of-stream-p ,fd ,stream)
             (count-or-errno ,in-fiber)
             (values nil sb-unix:ebadf)))
       (progn (note-native-call ,fd :output) ,@elsewhere)))

(declaim (inline write-buffer-now))
(defun write-buffer-now (fd stream buffer offset n)
  (writing-now (cell file fd stream)
      (with-pinned-objects (buffer)
        (write-by-kind cell file fd
                       (sap+ (if (system-area-pointer-p buffer) buffer (vector-sap buffer))
                             offset)
                       n))
    (sb-unix:unix-write fd buffer offset n)))

(defun unix-write-now (fd buffer offset n)
  "Write at most N bytes of BUFFER, an octet vector or a SYSTEM-AREA-POINTER, from OFFSET on to the
file descriptor FD. Return the number of bytes written, or NIL and an errno. In a fiber that can
park this does not wait, but fails with SB-UNIX:EWOULDBLOCK; it may yield before it writes, and
fails with SB-UNIX:EBADF if FD is closed by others meanwhile. See SB-SYS:WAIT-UNTIL-FD-USABLE for
waiting. Elsewhere it waits as write(2) does."
  (write-buffer-now fd nil buffer offset n))

(defun write-for-stream (stream buffer offset n)
  "UNIX-WRITE-NOW to the descriptor of STREAM."
  (let ((fd (sb-impl::fd-stream-fd stream)))
    (if (minusp fd)
        (values nil sb-unix:ebadf)
        (write-buffer-now fd stream buffer offset n))))

(defun write-by-kind (cell file fd sap n)
  (proving-blocked (cell +output+)
    (call-by-kind (cell file)
      :socket (%send-now fd sap n)
      :pipe (%write-now fd sap n)
      :poll (%polled-write fd sap n)
      :plain (%plain-write fd sap n))))

(defun unix-writev-now (fd parts n)
  "As UNIX-WRITE-NOW, but write N pieces of memory, one behind the other, to the file descriptor FD,
as writev(2) does; to a terminal or the like no more than the first. PARTS, a SYSTEM-AREA-POINTER,
is the place of N structures iovec, of two words each: the address of a piece, and how many bytes it
has. The pieces, and PARTS, must not be moved meanwhile, see SB-SYS:WITH-PINNED-OBJECTS."
  (writing-now (cell file fd nil)
      (write-parts-by-kind cell file fd parts n)
    (count-or-errno (with-interruptible-system-call (%plain-write-parts fd parts n)))))

(defun write-parts-by-kind (cell file fd parts n)
  (proving-blocked (cell +output+)
    (call-by-kind (cell file)
      :socket (%send-parts-now fd parts n)
      :pipe (%write-parts-now fd parts n)
      :poll (%polled-write-parts fd parts n)
      :plain (%plain-write-parts fd parts n))))

;;;; closing

;;; A fiber that uses the number now for the first time must learn that it is being closed. Numbers
;;; that are not open get no cells: there are programs that close all numbers there may be.
(defun note-close (fd)
  "Called before FD is closed by any of the ways that we know, with interrupts off. Return what
NOTE-CLOSED is to be told."
  (when (typep fd 'descriptor)
    (with-waking-room (4096)            ; the stream does not have the number any more
      (let ((cell (or (find-fd-cell fd nil)
                      (and (/= 0 (file-identity fd)) (find-fd-cell fd t)))))
        (when cell
          (multiple-value-bind (waiters generation) (forget-file cell)
            (mapc #'unpark waiters)
            generation))))))

;;; A fiber that began to wait after NOTE-CLOSE and before the close itself would wait for ever. It
;;; looks whether its file is still there.
(defun note-closed (fd mark)
  "Called after FD has been closed, with interrupts off. MARK is what NOTE-CLOSE has returned."
  (let ((cell (and mark (find-fd-cell fd nil))))
    (when cell
      (with-waking-room (4096)
        (mapc #'unpark (wake-late-waiters cell mark))))))

(defun note-new-file (fd)
  "The kernel has given the number FD to a new file. If foreign code has closed the one before, let
that be known now. With interrupts off."
  (let ((cell (find-fd-cell fd nil)))
    (when (and cell (fd-cell-kind cell))
      (note-closed fd (note-close fd)))))

;;; The system call closes NEW, unless it fails because OLD is not open.
(defun closing-dup2 (old new)
  "dup2(2). Returns NEW; or NIL, and errno."
  (declare (type (signed-byte 32) old new))
  (flet ((dup2 ()
           (let ((result (alien-funcall (extern-alien "dup2" (function int int int)) old new)))
             (if (minusp result)
                 (values nil (get-errno))
                 (values result 0)))))
    (if (or (= old new) (= 0 (file-identity old)))
        (dup2)
        (closing-descriptor (new) (dup2)))))
