;;;; channels: what one thread sends another receives

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package :sb-concurrency)

;;; A channel has a buffer, of no place perhaps, and two lines. What is true when nobody is inside,
;;; if waiters that wait no more are not counted:
;;;  - SENDERS is empty unless the buffer is full, RECEIVERS is empty unless it is empty and nothing
;;;    was returned: so one of both lines is empty;
;;;  - both are empty once CLOSED-P is true;
;;;  - the COUNT values of BUFFER from START on are in the order in which they were sent; those of
;;;    RETURNED come before them.
;;;
;;; Who finds a partner serves it directly: what wakes up has what it waited for, and cannot be
;;; overtaken. So nothing wakes in vain, and the order of those that wait is that of their calls.
;;;
;;; A receiver that is unwound by an interruption when it has been given a value gives that back, in
;;; front of all others: several that do so may change the order of what they give back. A sender
;;; whose value was taken has sent it, whatever happens to it then.

(define-condition channel-closed (error)
  ((channel :initarg :channel :reader %channel-closed-channel))
  (:report (lambda (condition stream)
             (format stream "~@<Nothing can be sent to ~S, which is closed.~:@>"
                     (channel-closed-channel condition))))
  (:documentation "The error that SEND signals if its channel is closed, before or while it waits.
CHANNEL-CLOSED-CHANNEL returns the channel."))

(defun channel-closed-channel (condition)
  "Return the channel that CONDITION, of type CHANNEL-CLOSED, is about."
  (%channel-closed-channel condition))

(deftype channel-capacity () '(integer 0 #.(ash 1 32)))

(defstruct (channel (:constructor %make-channel (name buffer lock))
                    (:copier nil)
                    (:predicate channelp))
  "A channel, of which MAKE-CHANNEL makes one. What threads and fibers SEND to it others RECEIVE, in
the same order."
  (name nil :type (or null simple-string))
  (lock (missing-arg) :type lock)
  (buffer #() :type simple-vector :read-only t)
  (start 0 :type index)
  (count 0 :type index)
  (returned '() :type list)
  (closed-p nil :type boolean)
  (senders (make-line) :type line :read-only t)
  (receivers (make-line) :type line :read-only t))
(declaim (freeze-type channel))

(setf (documentation 'channelp 'function)
      "Return true if OBJECT is a CHANNEL."
      (documentation 'channel-name 'function)
      "The name of the channel INSTANCE, a string or NIL. SETFable.")

(defun make-channel (&key (capacity 0) name)
  "Return a new channel that keeps up to CAPACITY values, an integer from 0 to 2^32, which were sent
and not received yet. If it is 0, the default, SEND waits until another thread or fiber receives the
value. Their places are made at once, of a word each. NAME is a string designator, or NIL, to be
shown where the channel is printed."
  (unless (typep capacity 'channel-capacity)
    (error 'simple-type-error
           :datum capacity :expected-type 'channel-capacity
           :format-control "~@<The CAPACITY of a channel must be an integer from 0 to 2^32, not ~
                            ~S.~:@>"
           :format-arguments (list capacity)))
  (%make-channel (and name (coerce (string name) 'simple-string))
                 (make-array capacity :initial-element 0)
                 (make-lock)))

(defun channel-capacity (channel)
  "Return how many values CHANNEL keeps at most, an integer."
  (length (channel-buffer channel)))

(defun channel-state (channel)
  "Return :OPEN, or :CLOSED once CHANNEL was closed, or :DRAINED if nothing can be received any more
either. It may be another already."
  (cond ((not (channel-closed-p channel)) :open)
        ((or (plusp (channel-count channel)) (channel-returned channel)) :closed)
        (t :drained)))

(defmethod print-object ((channel channel) stream)
  (print-unreadable-object (channel stream :type t :identity t)
    (format stream "~@[~S ~]~(~A~), ~D of ~D value~:P"
            (channel-name channel) (channel-state channel) (channel-count channel)
            (channel-capacity channel))))

;;;; the buffer, under the lock

(declaim (inline buffer-place put-last take-first take-returned))
(defun buffer-place (channel n)
  "Where the value number N, from 0, of CHANNEL is or goes."
  (declare (type index n))
  (let ((place (+ (channel-start channel) n)) (length (length (channel-buffer channel))))
    (truly-the index (if (>= place length) (- place length) place))))

(defun put-last (channel value)
  (let ((count (channel-count channel)))
    (setf (svref (channel-buffer channel) (buffer-place channel count)) value
          (channel-count channel) (truly-the index (1+ count)))))

(defun take-first (channel)
  (let* ((start (channel-start channel))
         (value (svref (channel-buffer channel) start)))
    (setf (svref (channel-buffer channel) start) 0
          (channel-start channel) (buffer-place channel 1)
          (channel-count channel) (truly-the index (1- (channel-count channel))))
    value))

(defun take-returned (channel)
  (let ((first (truly-the cons (channel-returned channel))))
    (setf (channel-returned channel) (truly-the list (cdr first)))
    (car first)))

;;;; one side of a transfer

;;; Each of these has done its part when it returns :DONE, or has found that CHANNEL is :CLOSED. If
;;; it must wait, it has entered NODE in the line for that, and returns :WAITING; without a NODE it
;;; returns :REFUSED. CLAIM tells whether the waiter of NODE is in other lines: then it may have
;;; been :CHOSEN there. With interrupts off.

(defmacro transferring ((channel node claim) &body clauses)
  "The outcome of the first of CLAUSES, as of COND, whose test is true, executed under the lock of
CHANNEL; again if it is :BUSY. CLAUSES may set PARTNER, a node, whose waiter is woken then; or T if
CLAIMANT is claiming."
  `(let ((partner nil) (claimant nil) (self (and ,claim (node-waiter (truly-the node ,node)))))
     (declare (ignorable claimant self))
     (loop
       (let ((outcome (with-lock ((channel-lock ,channel))
                        (setf partner nil)
                        (claiming-oneself (,node ,claim)
                          (cond ,@clauses)))))
         (unless (eq outcome :busy)
           (when partner (wake-waiter (node-waiter (truly-the node partner))))
           (return outcome))
         (await-end-of-claim (truly-the waiter claimant))))))

(defmacro wait-in-line (line node)
  `(cond (,node (append-node ,line (truly-the node ,node))
                :waiting)
         (t :refused)))

(declaim (ftype (sfunction (channel t (or null node) boolean) symbol) offer))
(defun offer (channel value node claim)
  "Give VALUE to a receiver, or to the buffer."
  (transferring (channel node claim)
    ((channel-closed-p channel) :closed)
    ((setf partner (take-partner (channel-receivers channel) self claimant :value value))
     (if (eq partner t) :busy :done))
    ((< (channel-count channel) (length (channel-buffer channel)))
     (put-last channel value)
     :done)
    (t (wait-in-line (channel-senders channel) node))))

;;; A sender that waits goes on when there is a place for its value, and so with each value that is
;;; taken from a full buffer.
(declaim (ftype (sfunction (channel (or null node) boolean) (values symbol t)) accept))
(defun accept (channel node claim)
  "Take a value. The second value is that."
  (let ((value nil))
    (values (transferring (channel node claim)
              ((channel-returned channel)
               (setf value (take-returned channel))
               :done)
              ((eq t (setf partner (take-partner (channel-senders channel) self claimant))) :busy)
              ((plusp (channel-count channel))
               (setf value (take-first channel))
               (when partner (put-last channel (node-value partner)))
               :done)
              (partner (setf value (node-value partner))
                       :done)
              ((channel-closed-p channel) :closed)
              (t (wait-in-line (channel-receivers channel) node)))
            value)))

(declaim (inline offer-likely-p accept-likely-p))
(defun offer-likely-p (channel)
  "Could OFFER do its part now, as far as can be seen without the lock?"
  (or (< (channel-count channel) (length (channel-buffer channel)))
      (line-first (channel-receivers channel))
      (channel-closed-p channel)))

(defun accept-likely-p (channel)
  "Could ACCEPT do its part now, as far as can be seen without the lock?"
  (or (plusp (channel-count channel))
      (line-first (channel-senders channel))
      (channel-returned channel)
      (channel-closed-p channel)))

;;; Who has taken NODE out of its line does not put it into another.
(defun leave-line (channel node)
  (when (node-line node)
    (with-lock ((channel-lock channel))
      (remove-node node)
      nil)))

(defun give-back (channel value)
  "Let VALUE, which was taken from CHANNEL, be the next that is received. With interrupts off."
  (let ((cell (list value)))
    (transferring (channel nil nil)
      ((setf partner (take-partner (channel-receivers channel) self claimant :value value))
       (if (eq partner t) :busy :done))
      (t (setf (cdr (truly-the cons cell)) (channel-returned channel)
               (channel-returned channel) cell)
         :done))))

;;;; waiting for the other side

;;; After a switch the processor predicts none of the returns to those who called before it: each
;;; costs as much as a locked instruction. So what leads to PARK is inline.

(declaim (inline outcome-of-choice))
(defun outcome-of-choice (node)
  (if (nth-value 1 (chosen-number (node-waiter node))) :closed :done))

(defmacro waiting-in-line ((channel node timeout) &optional undo)
  "Wait until NODE, the only one of its waiter, is chosen, and return :DONE or :CLOSED; or :TIMEOUT
after TIMEOUT seconds. If this is unwound when it was chosen for a transfer, UNDO is executed."
  `(if (sleeping ((node-waiter ,node) ,channel ,timeout)
         :leave (leave-line ,channel ,node)
         :undo ,(when undo `(when (eq :done (outcome-of-choice ,node)) ,undo)))
       (outcome-of-choice ,node)
       :timeout))

(declaim (inline offer-and-wait accept-and-wait))
(defun offer-and-wait (channel value timeout)
  (let* ((waiter (own-waiter 1)) (node (first-node waiter)))
    (setf (node-value node) value)
    (let ((outcome (offer channel value node nil)))
      (when (eq outcome :waiting)
        (setf outcome (waiting-in-line (channel node timeout))))
      (end-use waiter)
      outcome)))

(defun accept-and-wait (channel timeout)
  (let* ((waiter (own-waiter 1)) (node (first-node waiter)))
    (multiple-value-bind (outcome value) (accept channel node nil)
      (when (eq outcome :waiting)
        (setf outcome (waiting-in-line (channel node timeout)
                        (give-back channel (node-value node)))
              value (node-value node)))
      (end-use waiter)
      (values outcome value))))

;;;; as users see it

(defmacro deferring-interrupts (&body body)
  "As (WITHOUT-INTERRUPTS (ALLOW-WITH-INTERRUPTS ,@BODY)), by one binding instead of three, and
without a call."
  `(unwind-protect (let ((sb-sys:*interrupts-enabled* nil)) ,@body)
     (when (and sb-sys:*interrupt-pending* sb-sys:*interrupts-enabled*)
       (sb-unix::receive-pending-interrupt))))

(defmacro with-room-to-wake (&body body)
  "Execute BODY with interrupts off. If the stack is about to be used up that is signalled before."
  `(progn
     #+sb-fiber (sb-fiber::ensure-waking-room 6144)
     (deferring-interrupts ,@body)))

;;; As above, for what does not wait, and so need not turn them on.
(defmacro at-once (&body body)
  `(progn
     #+sb-fiber (sb-fiber::ensure-waking-room 6144)
     (#+sb-fiber sb-fiber::without-interruptions #-sb-fiber without-interrupts ,@body)))

(declaim (inline check-timeout))
(defun check-timeout (timeout)
  (when timeout (%check-timeout timeout)))

(defun %check-timeout (timeout)
  (unless (typep timeout '(or null (real 0)))
    (error 'simple-type-error
           :datum timeout :expected-type '(or null (real 0))
           :format-control "~@<A TIMEOUT is a number of seconds that is not negative, or NIL: not ~
                            ~S.~:@>"
           :format-arguments (list timeout))))

(defun send (channel value &key timeout (wait-p t))
  "Send VALUE to CHANNEL, and return true: when another thread or fiber has received it or, if there
is room, at once. Return NIL if TIMEOUT seconds, a non-negative real, are over before; or, if WAIT-P
is false, if this would have to wait. Signals CHANNEL-CLOSED if CHANNEL is closed, or is closed
while this waits, and SB-SYS:DEADLINE-TIMEOUT."
  (declare (channel channel))
  (check-timeout timeout)
  (let ((outcome (if (offer-likely-p channel)
                     (at-once (offer channel value nil nil))
                     :refused)))
    (when (and (eq outcome :refused) wait-p)
      (setf outcome (with-room-to-wake (offer-and-wait channel value timeout))))
    (case outcome
      (:done t)
      (:closed (error 'channel-closed :channel channel))
      (t nil))))

(defun receive (channel &key timeout (wait-p t))
  "Receive and return a value of CHANNEL, the one that was sent first, and true; wait until there is
one. Return NIL, NIL and a reason, if there is none: :CLOSED if CHANNEL is closed and nothing is
left in it; :TIMEOUT if TIMEOUT seconds, a non-negative real, are over, or if WAIT-P is false and
this would have to wait. Signals SB-SYS:DEADLINE-TIMEOUT. A value that was given to a thread or
fiber which is unwound while it waits here is received by another."
  (declare (channel channel))
  (check-timeout timeout)
  (multiple-value-bind (outcome value)
      (if (accept-likely-p channel)
          (at-once (accept channel nil nil))
          (values :refused nil))
    (when (and (eq outcome :refused) wait-p)
      (setf (values outcome value) (with-room-to-wake (accept-and-wait channel timeout))))
    (case outcome
      (:done (values value t))
      (:closed (values nil nil :closed))
      (t (values nil nil :timeout)))))

(defun close-for-one (channel)
  "Wake one that waits in CHANNEL, which is closed. Return false if there is none."
  (eq :done (transferring (channel nil nil)
              ((setf partner (or (take-partner (channel-senders channel) self claimant
                                               :closing 1)
                                 (take-partner (channel-receivers channel) self claimant
                                               :closing 1)))
               (if (eq partner t) :busy :done))
              (t :none))))

(defun close-channel (channel)
  "Close CHANNEL: nothing can be sent any more, and what was sent before can be received. Those that
wait are woken: SEND signals CHANNEL-CLOSED, RECEIVE returns :CLOSED. Return true if CHANNEL was
open before."
  (declare (channel channel))
  (with-room-to-wake
    (prog1 (with-lock ((channel-lock channel))
             (not (shiftf (channel-closed-p channel) t)))
      (loop while (close-for-one channel)))))

(defmacro do-channel ((value channel &optional result) &body body)
  "Execute BODY with VALUE bound to each value that is received of CHANNEL, until that is closed and
nothing is left in it; then return RESULT. In a block named NIL."
  (with-unique-names (next received-p loop)
    (once-only ((channel channel))
      (multiple-value-bind (body declarations) (parse-body body nil)
        `(block nil
           (loop named ,loop
                 do (multiple-value-bind (,next ,received-p) (receive ,channel)
                      (unless ,received-p (return-from ,loop))
                      (let ((,value ,next))
                        ,@declarations
                        (tagbody ,@body))))
           ,result)))))
