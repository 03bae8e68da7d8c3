;;;; connections: octets in and out, with deadlines

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-HTTP")

;;; A connection has a buffer for what was received, as long as there is something in it, or a
;;; request is served. A client that keeps its connection and says nothing costs a stack and a few
;;; objects, but no buffer.
;;;
;;; What is true when nobody is inside:
;;;  - the octets of INPUT from START to END were received and not used yet; without a buffer
;;;    there are none;
;;;  - those below KEPT belong to the head that is being served, and stay where they are: if there
;;;    is no room behind them, what is received goes to another buffer, and the head keeps the old;
;;;  - EOF-P is true if the client sends no more.
;;;
;;; In a fiber what waits here parks it. Deadlines are in internal real time; NIL is none.

(define-condition client-error (error)
  ((connection :initarg :connection :initform nil :reader client-error-connection))
  (:documentation "An error that a client has made, and that is no use telling it."))

(define-condition timed-out (client-error)
  ()
  (:report "A client did not send, or take, in time what it should have.")
  (:documentation "The error that is signaled when a deadline of a connection comes."))

(define-condition connection-lost (client-error)
  ((errno :initarg :errno :initform 0 :reader connection-lost-errno))
  (:report (lambda (condition stream)
             (format stream "A connection was lost: ~A"
                     (if (= 0 (connection-lost-errno condition))
                         "the client sends no more."
                         (sb-int:strerror (connection-lost-errno condition))))))
  (:documentation "The error that is signaled when a client goes away before it has sent a whole
request, or taken a whole reply."))

(defconstant +buffer-size+ 8192)

(sb-ext:define-load-time-global *free-buffers* '())
(declaim (type list *free-buffers*))
(sb-ext:define-load-time-global *free-buffer-count* 0)
(declaim (type fixnum *free-buffer-count*))
(defconstant +most-free-buffers+ 1024)

;;; Without interrupts: a count that is wrong stays wrong.
(defun take-buffer ()
  (sb-sys:without-interrupts
    (let ((buffer (sb-ext:atomic-pop *free-buffers*)))
      (cond (buffer (sb-ext:atomic-decf *free-buffer-count*)
                    (the octets buffer))
            (t (make-array +buffer-size+ :element-type '(unsigned-byte 8)))))))

(defun give-buffer-back (buffer)
  (when (and (= (length buffer) +buffer-size+) (< *free-buffer-count* +most-free-buffers+))
    (sb-sys:without-interrupts
      (sb-ext:atomic-incf *free-buffer-count*)
      (sb-ext:atomic-push buffer *free-buffers*))))

(defstruct (connection (:constructor make-connection (fd &key (limits (make-limits))))
                       (:copier nil))
  "What a server has of a client: the socket with descriptor FD, and what was received."
  (fd (sb-int:missing-arg) :type (signed-byte 32) :read-only t)
  (limits (sb-int:missing-arg) :type limits :read-only t)
  (transport nil :type (or null transport))
  (head (make-head) :type head :read-only t)
  (input nil :type (or null octets))
  (start 0 :type index)
  (end 0 :type index)
  (kept 0 :type index)
  (eof-p nil :type boolean)
  ;; Must the client not take the end for that of a reply?
  (cut-off-p nil :type boolean)
  ;; octets in all
  (received 0 :type index)
  (sent 0 :type index))
(declaim (sb-ext:freeze-type connection))

;;;; deadlines

(defun deadline-after (seconds)
  "The deadline that comes in SECONDS, a real; NIL if that is NIL."
  (and seconds
       (+ (get-internal-real-time) (ceiling (* seconds internal-time-units-per-second)))))

(defun await (connection direction deadline)
  "Wait until the socket of CONNECTION is ready for DIRECTION. Signals TIMED-OUT at DEADLINE."
  (let ((timeout (and deadline
                      (/ (max 0 (- deadline (get-internal-real-time)))
                         (float internal-time-units-per-second 1d0)))))
    (unless (sb-sys:wait-until-fd-usable (connection-fd connection) direction timeout)
      (error 'timed-out :connection connection))))

;;;; receiving

(defun lose (connection &optional (errno 0))
  (error 'connection-lost :connection connection :errno errno))

(defun drop-used-input (connection)
  "Nothing that CONNECTION has received is used any more but what comes next: give its buffer back
if that is nothing."
  (setf (connection-kept connection) 0)
  (when (and (connection-input connection) (= (connection-start connection)
                                              (connection-end connection)))
    (give-buffer-back (shiftf (connection-input connection) nil))
    (setf (connection-start connection) 0
          (connection-end connection) 0)))

(defun drop-all-input (connection)
  "Nothing is received of CONNECTION any more."
  (setf (connection-start connection) (connection-end connection))
  (drop-used-input connection))

(defun move-input (connection buffer index)
  "Have what was received, and not used, in BUFFER at INDEX."
  (let ((start (connection-start connection)) (end (connection-end connection)))
    (when (connection-input connection)
      (replace buffer (connection-input connection) :start1 index :start2 start :end2 end))
    (setf (connection-input connection) buffer
          (connection-start connection) index
          (connection-end connection) (+ index (- end start)))))

(defun make-room (connection)
  "Have room in the buffer of CONNECTION, so that something can be received."
  (let* ((buffer (connection-input connection))
         (start (connection-start connection))
         (end (connection-end connection))
         (kept (connection-kept connection)))
    (cond ((null buffer) (move-input connection (take-buffer) 0))
          ((< end (length buffer)))
          ;; Not for the sake of some octets, or each call would receive but these.
          ((>= (- (length buffer) kept (- end start)) (ash +buffer-size+ -1))
           (move-input connection buffer kept))
          (t (setf (connection-kept connection) 0)
             (move-input connection
                         (make-array (max +buffer-size+ (* 2 (- end start)))
                                     :element-type '(unsigned-byte 8))
                         0)))))

;;; Prevents: a client of a transport that is always ready, and keeps all others of its carrier
;;; waiting. Without one the calls themselves spend the budget.
(defun spend-budget (cost &optional (overdraft 0))
  (when (sb-fiber:fiber-can-park-p) (sb-fiber::spend-budget cost overdraft)))

(defun read-now (connection sap n)
  "What TRANSPORT-READ does, with or without a transport."
  (let ((transport (connection-transport connection)))
    (if transport
        (progn (spend-budget sb-fiber::+budget+)
               (transport-read transport sap n))
        (multiple-value-bind (n errno)
            (sb-fiber:unix-read-now (connection-fd connection) sap n)
          (if (eql errno sb-unix:ewouldblock) (values nil :input) (values n errno))))))

(defun check-outcome (connection n reason)
  "Return N, how many octets went, if it is not NIL; or else NIL and the direction to wait for, or
NIL if there is none. REASON is that, or an errno."
  (cond (n)
        ((symbolp reason) (values nil reason))
        ((= reason sb-unix:eintr) (values nil nil))
        (t (lose connection reason))))

(defun try-to-receive (connection)
  "Receive what there is. Returns what CHECK-OUTCOME does."
  (make-room connection)
  (let ((buffer (connection-input connection)) (end (connection-end connection)))
    (multiple-value-bind (n reason)
        (sb-sys:with-pinned-objects (buffer)
          (read-now connection (sb-sys:sap+ (sb-sys:vector-sap buffer) end)
                    (- (length buffer) end)))
      (when n
        (when (= n 0) (setf (connection-eof-p connection) t))
        (incf (connection-end connection) n)
        (incf (connection-received connection) n))
      (check-outcome connection n reason))))

(defun receive (connection deadline)
  "Receive some octets. Return false if the client sends no more. Signals TIMED-OUT at DEADLINE, and
CONNECTION-LOST."
  (loop
    (when (connection-eof-p connection) (return nil))
    ;; Where this cannot park it would wait without a deadline.
    (when (and deadline (null (connection-transport connection))
               (not (sb-fiber:fiber-can-park-p)))
      (await connection :input deadline))
    (multiple-value-bind (n direction) (try-to-receive connection)
      (when n (return (plusp n)))
      (when (= 0 (connection-kept connection)) (drop-used-input connection))
      (when direction (await connection direction deadline)))))

;;;; heads and bodies

(defun receive-head (connection idle-deadline seconds)
  "Receive and return the head of the next request of CONNECTION, or NIL if the client sends none
any more. Its first octet must come before IDLE-DEADLINE, and all of it SECONDS later. Signals
TIMED-OUT, CONNECTION-LOST and BAD-REQUEST. The head is used until the next call."
  (drop-used-input connection)
  (when (= (connection-start connection) (connection-end connection))
    (unless (receive connection idle-deadline) (return-from receive-head nil)))
  (loop with deadline = nil
        for again = nil then (head-in-place-p connection)
        do (when (parse-input connection again) (return (connection-head connection)))
           (unless deadline (setf deadline (deadline-after seconds)))
           (unless (receive connection deadline) (lose connection))))

(defun head-in-place-p (connection)
  "Does what was received of a head lie where it lay when it was parsed?"
  (let ((head (connection-head connection)))
    (and (eq (head-octets head) (connection-input connection))
         (= (head-begin head) (connection-start connection)))))

(defun parse-input (connection again)
  "Parse what CONNECTION has received, AGAIN perhaps. Return true if a head is complete."
  (let ((end (parse-head (connection-head connection) (connection-input connection)
                         (connection-start connection) (connection-end connection)
                         (connection-limits connection) :again again)))
    (when end
      (setf (connection-start connection) end
            (connection-kept connection) end))))

(defun receive-body (connection decoder deadline)
  "Receive some octets of the body that DECODER decodes. Return the vector that they are in, start
and end; start and end are equal when the body has ended. Signals TIMED-OUT, CONNECTION-LOST and
BAD-REQUEST. The octets are to be used before the next call."
  (loop
    (when (connection-input connection)
      (multiple-value-bind (start end next)
          (decode decoder (connection-input connection) (connection-start connection)
                  (connection-end connection))
        (setf (connection-start connection) next)
        (when (or (< start end) (decoder-done-p decoder))
          (return (values (connection-input connection) start end)))))
    (when (decoder-done-p decoder) (return (values (head-octets (connection-head connection)) 0 0)))
    (unless (receive connection deadline) (lose connection))))

(defun receive-anything (connection deadline)
  "As RECEIVE-BODY, but of whatever comes behind the head, up to the end of the connection."
  (when (or (< (connection-start connection) (connection-end connection))
            (receive connection deadline))
    (let ((start (shiftf (connection-start connection) (connection-end connection))))
      (return-from receive-anything
        (values (connection-input connection) start (connection-end connection)))))
  (values (head-octets (connection-head connection)) 0 0))

(defun input-waiting-p (connection)
  "Can something, or the end, be received of CONNECTION without asking the kernel?"
  (or (< (connection-start connection) (connection-end connection))
      (connection-eof-p connection)
      (let ((transport (connection-transport connection)))
        (and transport (transport-pending-p transport)))))

(defun usable-now-p (connection)
  "Can something, or the end, be received of CONNECTION without waiting?"
  (or (input-waiting-p connection)
      (if (connection-transport connection)
          ;; What is there may be less than a record.
          (and (try-to-receive connection) t)
          (sb-sys:wait-until-fd-usable (connection-fd connection) :input 0))))

;;;; sending

(defconstant +f-getfl+ 3)               ; of Linux
(defconstant +f-setfl+ 4)
(defconstant +o-nonblock+ #o4000)

(defun control-descriptor (fd command argument)
  (sb-alien:alien-funcall
   (sb-alien:extern-alien "fcntl" (function sb-alien:int sb-alien:int sb-alien:int sb-alien:int))
   fd command argument))

(defun make-nonblocking (fd)
  (let ((flags (control-descriptor fd +f-getfl+ 0)))
    (unless (logtest flags +o-nonblock+)
      (control-descriptor fd +f-setfl+ (logior flags +o-nonblock+)))))

;;; Who takes a large reply slowly, but takes it, is served.
(defconstant +piece-size+ (expt 2 18))

(defmacro by-pieces ((start end piece-end) &body body)
  "Execute BODY, which increases START up to PIECE-END, for each piece up to END."
  `(loop while (< ,start ,end)
         do (let ((,piece-end (min ,end (+ ,start +piece-size+)))) ,@body)))

(defun send-octets (connection octets start end seconds)
  "Send OCTETS from START to END to the client, who must take each 262,144 of them within SECONDS,
or any time if that is NIL. Signals TIMED-OUT and CONNECTION-LOST."
  (declare (type octets octets) (type index start end))
  ;; Where this cannot park it would wait without a deadline.
  (unless (sb-fiber:fiber-can-park-p) (make-nonblocking (connection-fd connection)))
  (by-pieces (start end piece-end)
    (let ((deadline (deadline-after seconds)))
      (loop while (< start piece-end)
            do (incf start (send-some connection octets start piece-end deadline))))))

(defun write-now (connection octets start end)
  "What TRANSPORT-WRITE does with OCTETS, with or without a transport."
  (let ((transport (connection-transport connection)))
    (if transport
        (sb-sys:with-pinned-objects (octets)
          (spend-budget sb-fiber::+call-cost+ sb-fiber::+budget+)
          (transport-write transport (sb-sys:sap+ (sb-sys:vector-sap octets) start) (- end start)))
        (multiple-value-bind (n errno)
            (sb-fiber:unix-write-now (connection-fd connection) octets start (- end start))
          (if (eql errno sb-unix:ewouldblock) (values nil :output) (values n errno))))))

(defun note-sent (connection n reason deadline)
  "N octets have gone, or NIL, for REASON: then wait. Return how many have gone."
  (multiple-value-bind (n direction) (check-outcome connection n reason)
    (when n (incf (connection-sent connection) n))
    (when direction (await connection direction deadline))
    (or n 0)))

(defun send-some (connection octets start end deadline)
  "Send some of OCTETS, or wait until some can be sent. Return how many were sent."
  (declare (type octets octets) (type index start end))
  (multiple-value-bind (n reason) (write-now connection octets start end)
    (note-sent connection n reason deadline)))

;;; Transports have their own way to send. Where this cannot park the call would wait.
(defun try-to-send-both (connection first n second end)
  "Send what can be sent now of N octets of FIRST, and of SECOND up to END, by one call. Return how
many octets have gone."
  (if (or (connection-transport connection) (not (sb-fiber:fiber-can-park-p)))
      0
      (let ((parts (make-array 4 :element-type 'sb-ext:word)))
        (declare (dynamic-extent parts))
        (sb-sys:with-pinned-objects (first second parts)
          (flet ((address (octets) (sb-sys:sap-int (sb-sys:vector-sap (the octets octets)))))
            (setf (aref parts 0) (address first)
                  (aref parts 1) n
                  (aref parts 2) (address second)
                  (aref parts 3) end))
          (multiple-value-bind (n errno)
              (sb-fiber:unix-writev-now (connection-fd connection) (sb-sys:vector-sap parts) 2)
            (note-sent connection n (if (eql errno sb-unix:ewouldblock) nil errno) nil))))))

(defun send-both (connection first n second end seconds)
  "Send N octets of FIRST, and then SECOND up to END, as SEND-OCTETS does, by one call if it can."
  (let ((sent (try-to-send-both connection first n second (min end +piece-size+))))
    (send-octets connection first (min sent n) n seconds)
    (send-octets connection second (max 0 (- sent n)) end seconds)))

;;;; closing

(defun shut-down (connection &optional (how 2))
  "Send no more to the client of CONNECTION, and, unless HOW is 1, receive no more."
  (sb-alien:alien-funcall (sb-alien:extern-alien "shutdown" (function sb-alien:int sb-alien:int
                                                                      sb-alien:int))
                          (connection-fd connection) how))

(defun end-transport (connection &optional (seconds 0))
  "Tell the client of CONNECTION that nothing more will be sent, if it takes that within SECONDS."
  (let ((transport (connection-transport connection)))
    (when transport
      (handler-case
          (loop with deadline = (deadline-after seconds)
                for direction = (transport-end transport)
                while direction do (await connection direction deadline))
        (client-error ())))))

(defconstant +so-linger+ 13)            ; of Linux

(defun reset-when-closed (connection)
  "Have the client of CONNECTION see that it was reset, when it is closed."
  (sb-alien:with-alien ((linger (array sb-alien:int 2)))
    (setf (sb-alien:deref linger 0) 1
          (sb-alien:deref linger 1) 0)
    (sb-alien:alien-funcall
     (sb-alien:extern-alien "setsockopt" (function sb-alien:int sb-alien:int sb-alien:int
                                                   sb-alien:int (* t) (sb-alien:unsigned 32)))
     (connection-fd connection) sb-bsd-sockets-internal::sol-socket +so-linger+
     (sb-alien:addr linger) 8)))

(defun end-connection (connection)
  "Nothing is sent or received by CONNECTION any more, whose socket is about to be closed."
  (drop-all-input connection)
  (if (connection-cut-off-p connection)
      (reset-when-closed connection)
      (end-transport connection))
  (let ((transport (connection-transport connection)))
    (when transport (transport-free transport))))

(defun drop-what-comes (connection seconds)
  "Receive, and drop, what comes to CONNECTION for SECONDS, and what is there in any case, but for a
flood."
  (loop with deadline = (deadline-after seconds)
        with left of-type fixnum = +piece-size+
        do (setf (connection-start connection) (connection-end connection))
        while (and (receive connection deadline)
                   (or (< (get-internal-real-time) deadline)
                       (plusp (decf left +buffer-size+))))))

(defun linger (connection seconds)
  "Send no more to the client of CONNECTION, and drop what it still sends for SECONDS at most, and
what is there in any case. If a connection is closed with something unread the kernel resets it, and
the client may lose the reply."
  (end-transport connection seconds)
  (shut-down connection 1)
  (setf (connection-kept connection) 0)
  (handler-case (drop-what-comes connection seconds)
    (client-error ()))
  (drop-all-input connection))
