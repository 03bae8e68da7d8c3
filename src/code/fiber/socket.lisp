;;;; sockets

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; Of local sockets the kernel does not always tell when there is room in a queue of the other
;;; end's: in that of a listener, it does not tell a socket that is to be connected; in that of a
;;; receiver of datagrams, it does not tell a sender that is not connected, whose own socket it
;;; reports to be writable.
(defun await-room-elsewhere (cell)
  (park-until (nanoseconds-from-now 10000000) (fd-cell-writing cell)))

(declaim (inline would-wait-p direction-number))
(defun would-wait-p (result)
  (and (eql result -1) (eql (get-errno) sb-unix:ewouldblock)))

(defun direction-number (direction)
  (ecase direction (:input +input+) (:output +output+)))

(defmacro with-parking ((fd direction &key (when t)) &body call)
  "The value of CALL, a system call on FD that returns -1 and sets errno if it fails. While it fails
with EAGAIN only because we do not want it to wait, wait for DIRECTION and do it again, if WHEN."
  `(flet ((call () ,@call))
     (call-with-parking #'call ,fd ,direction ,when)))

(defun call-with-parking (function fd direction when)
  (declare (function function) (dynamic-extent function))
  (if (parkable-fd-p fd)
      (within-budget-on-file (cell file fd +call-cost+)
        (call-on-file function cell file (direction-number direction) when))
      (call-natively function fd direction when)))

(defun call-on-file (function cell file direction when &optional proves)
  "What WITH-PARKING does in a fiber, with FUNCTION for the call. It is called only while CELL
stands for FILE. If PROVES, it would wait only if the descriptor is not ready for DIRECTION."
  (declare (function function))
  (let ((fd (fd-cell-fd cell)))
    (loop for tries of-type fixnum from 1
          for seen of-type word = (fd-cell-readiness cell)
          do (let ((result (if-same-file (cell file) (funcall function))))
               (unless result (error 'descriptor-closed :descriptor fd))
               (when (and proves (would-wait-p result)) (note-blocked cell seen direction))
               (unless (and when
                            (would-wait-p result)
                            (or (nonblocking-by-us-p fd)
                                (not (nonblocking-p fd))
                                ;; The flag was ours if the file has been closed since.
                                (not (same-file-p cell file))))
                 (return result))
               (with-interrupts
                 (if (and (> tries 2) (= direction +output+) (not (stream-socket-p fd)))
                     (await-room-elsewhere cell)
                     (park-on-file cell file direction nil)))))))

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

;;; Only a flag of the file tells accept(2) not to wait. So the flag is set when a fiber accepts; a
;;; thread that accepts from the same socket then waits and tries again. If the user had set the
;;; flag, the user gets EAGAIN.
(defun prepare-to-accept (cell file)
  "Make accept(2) on the descriptor of CELL not wait. Return false if that does not stand for FILE,
or is being closed: what is noted of the flag then would hold for the next file."
  (or (fd-cell-nonblocking-by-us cell)
      ;; Of two fibers that come at once the second must not take the flag for the user's.
      (with-tiny-lock ((fd-cell-lock cell))
        (when (and (not (fd-cell-closing cell)) (same-file-p cell file))
          (when (= 1 (set-nonblocking (fd-cell-fd cell))) (setf (fd-cell-nonblocking-by-us cell) t))
          t))))

(defmacro with-accepting ((fd) &body call)
  "WITH-PARKING for CALL of accept(2) on FD."
  `(flet ((call () ,@call))
     (call-accepting #'call ,fd)))

;;; In a thread, too, EAGAIN may mean that the call must wait. Whether it does is asked after the
;;; call, since a fiber may accept for the first time just before it.
(defun call-accepting (function fd)
  (declare (function function) (dynamic-extent function))
  (if (parkable-fd-p fd)
      (within-budget-on-file (cell file fd +accept-cost+)
        (loop (ensure-same-file cell file)
              (when (prepare-to-accept cell file) (return))
              (fiber-yield))
        (let ((new (call-on-file function cell file +input+ t t)))
          (when (typep new 'descriptor) (without-interrupts (note-new-file new)))
          new))
      (call-natively function fd :input t)))

(defun nonblocking-by-us-p (fd)
  (let ((cell (and (typep fd 'descriptor) (find-fd-cell fd nil))))
    (and cell
         ;; The lock: a thread that sees the flag must not ask before it is noted whose flag it is.
         (with-tiny-lock ((fd-cell-lock cell))
           (fd-cell-nonblocking-by-us cell)))))

(defun user-sets-nonblocking (fd)
  (let ((cell (and (typep fd 'descriptor) (find-fd-cell fd nil))))
    (when cell (setf (fd-cell-nonblocking-by-us cell) nil))))

;;; If the queue of a local listener is full, connect(2) that does not wait fails with EAGAIN.
(defun local-address-p (address)
  (= sb-unix:af-unix (sap-ref-16 (alien-sap address) 0)))

(defun %connect (fd address size)
  (alien-funcall (extern-alien "connect" (function int int system-area-pointer int))
                 fd (alien-sap address) size))

(defun parking-connect (fd address size)
  "connect(2) to ADDRESS, an alien pointer; a fiber parks while it is in progress. Returns 0, or -1,
with errno set."
  (declare (type (signed-byte 32) fd))
  (without-interrupts ; else the flag could stay set
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
      (let ((result (if-same-file (cell file) (%connect fd address size)))
            (errno (get-errno)))
        (cond ((null result)
               (error 'descriptor-closed :descriptor fd))
              ((= result 0)
               (return 0))
              ((= errno sb-unix:einprogress)
               (return (loop (park-on-file cell file +output+ nil)
                             (let ((result (if-same-file (cell file)
                                             (finish-connecting fd address size))))
                               (unless result (error 'descriptor-closed :descriptor fd))
                               (unless (eq result :in-progress) (return result))))))
              ((and (= errno sb-unix:ewouldblock) (local-address-p address))
               (await-room-elsewhere cell))
              (t (return -1)))))))

(defun finish-connecting (fd address size)
  (let ((result (alien-funcall (extern-alien "fiber_connect_result" (function int int)) fd)))
    ;; Only after a second call does the kernel take the socket for connected, and refuse to
    ;; connect it again. A report may have been about what was before the first.
    (if (and (= result 0) (/= 0 (%connect fd address size)) (connecting-p (get-errno)))
        :in-progress
        result)))

(defun connecting-p (errno)
  (= 1 (alien-funcall (extern-alien "fiber_is_connecting" (function int int)) errno)))

(defun parking-flags (fd flags)
  "FLAGS for a call on FD that must not wait if this is a fiber."
  (if (parkable-fd-p fd) (logior flags sb-unix:msg-dontwait) flags))

(defun %send (fd sap length flags)
  (alien-funcall (extern-alien "send" (function (signed 64) int system-area-pointer unsigned int))
                 fd sap length flags))

(defun parking-send (fd sap length flags)
  "send(2) of all of LENGTH bytes, as a call that waits does it."
  (declare (type (unsigned-byte 32) flags) (type index length))
  (let ((waitp (not (logtest flags sb-unix:msg-dontwait))))
    (if (parkable-fd-p fd)
        (within-budget-on-file (cell file fd +call-cost+)
          (dx-flet ((send-rest (sent)
                      (dx-flet ((call ()
                                  (%send fd (sap+ sap sent) (- length sent)
                                         (logior flags sb-unix:msg-dontwait))))
                        (call-on-file #'call cell file +output+ waitp t))))
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

(defun %receive (fd sap length flags address size)
  (alien-funcall (extern-alien "recvfrom" (function (signed 64) int system-area-pointer unsigned
                                                    int system-area-pointer system-area-pointer))
                 fd sap length flags (alien-sap address) (alien-sap size)))

;;; What is out of band, or in the queue of errors, or peeked at from an offset on, is not there
;;; when a read would not wait.
(defun only-about-data-p (flags)
  (not (logtest flags (lognot (logior sb-unix:msg-waitall sb-unix:msg-dontwait)))))

;;; What is only looked at stays: asking again would give the same bytes.
(defun peeks-at-all-p (flags)
  (let ((both (logior sb-unix:msg-peek sb-unix:msg-waitall)))
    (= both (logand flags both))))

(defun parking-receive (fd buffer length flags address size)
  "recvfrom(2) into BUFFER, an alien pointer, of LENGTH bytes; with MSG_WAITALL of all of them, as a
call that waits does it. -1 and errno if it fails."
  (declare (type (unsigned-byte 32) flags) (type index length))
  (let ((sap (alien-sap buffer))
        (waitp (not (logtest flags sb-unix:msg-dontwait))))
    (cond ((and (parkable-fd-p fd) (not (peeks-at-all-p flags)))
           (within-budget-on-file (cell file fd +call-cost+)
             (dx-flet ((receive-rest (received)
                         (dx-flet ((call ()
                                     (%receive fd (sap+ sap received) (- length received)
                                               (logior flags sb-unix:msg-dontwait) address size)))
                           (call-on-file #'call cell file +input+ waitp
                                         (only-about-data-p flags)))))
               (transfer-all length
                             (and waitp (logtest flags sb-unix:msg-waitall) (stream-socket-p fd))
                             #'receive-rest))))
          (t
           (when (and (logtest flags sb-unix:msg-waitall) (in-fiber-p))
             (announce-blocking))       ; a part of it may be there
           (dx-flet ((call () (%receive fd sap length flags address size)))
             (call-natively #'call fd :input waitp))))))
