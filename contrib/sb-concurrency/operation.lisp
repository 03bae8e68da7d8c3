;;;; operations: waiting for one of several things

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package :sb-concurrency)

;;; An operation is what a thread or fiber may do, as an object: to send, to receive, to wait for
;;; some time, or one of several others. PERFORM does it. It is what Concurrent ML calls an event,
;;; see John Reppy, "CML: A Higher-order Concurrent Language", PLDI 1991: a library can offer
;;; an operation of its own, made of these by CHOOSE and WRAP, and its users can choose among that
;;; and others, which a macro alone that knew all the things to wait for would not allow. SELECT is
;;; a macro on top.
;;;
;;; To perform one of several, first each is tried, in random order, so that none is preferred. If
;;; none can be done there is a node for each in its line, with the same waiter: see waiter.lisp.
;;; What becomes ready between the trial and the entry is found under the lock where the node is
;;; entered.
;;;
;;; What an operation is made of in the end is leaves: transfers, by channels, and occasions, which
;;; are all else that can be waited for, each in its way, see occasion.lisp. CHOOSE and WRAP make a
;;; vector of branches of them; so PERFORM, which is called more often, makes nothing. The shortest
;;; pause is a time limit for the others.

;;;; leaves

(defstruct (transfer (:constructor make-receipt (channel &aux (kind :receive)))
                     (:constructor make-sending (channel value &aux (kind :send)))
                     (:copier nil))
  (channel (missing-arg) :type channel :read-only t)
  (kind (missing-arg) :type (member :send :receive) :read-only t)
  (value nil :read-only t))

;;; The functions of a way are called with interrupts off, and do not wait. OBJECT is what it is the
;;; way to wait for.
(defstruct (way (:constructor make-way (&key likely-p try prepare leave collect undo))
                (:copier nil))
  ;; (OBJECT) => could it be done now, as far as can be seen without a lock?
  (likely-p (missing-arg) :type function :read-only t)
  ;; (OBJECT NODE CLAIM): as OFFER does
  (try (missing-arg) :type function :read-only t)
  ;; (OBJECT) => the value of a node, before that is entered; may signal an error
  (prepare (constantly nil) :type function :read-only t)
  ;; (OBJECT NODE): NODE, which was prepared, is to be in no line, whether it was entered or not
  (leave (missing-arg) :type function :read-only t)
  ;; (OBJECT VALUE) => the value of the operation: it was done, VALUE is that of the node, if any
  (collect (missing-arg) :type function :read-only t)
  ;; (OBJECT): it was done, and not collected, for one that is unwound
  (undo (constantly nil) :type function :read-only t))

(defstruct (occasion (:constructor make-occasion (object way)) (:copier nil))
  (object (missing-arg) :read-only t)
  (way (missing-arg) :type way :read-only t))
(declaim (freeze-type transfer way occasion))

(deftype leaf () '(or transfer occasion))

(defmacro call-way (name occasion &rest arguments)
  "Call what NAME reads of the way of OCCASION, with the object of that and ARGUMENTS."
  `(funcall (,name (occasion-way ,occasion)) (occasion-object ,occasion) ,@arguments))

;;;; operations

;;; It is one of its branches, or none of them for SECONDS: then FUNCTIONS are called. Functions are
;;; called with the values of what was done, the first one first, the next with its values.
(defstruct (operation (:constructor make-operation (branches &optional seconds functions))
                      (:copier nil))
  "What can be performed, by PERFORM, alone or as one of several."
  (branches #() :type simple-vector :read-only t)
  (seconds nil :type (or null (real 0)) :read-only t)
  (functions '() :type list :read-only t))

(defstruct (branch (:constructor make-branch (leaf functions)) (:copier nil))
  (leaf (missing-arg) :type leaf :read-only t)
  (functions '() :type list :read-only t))
(declaim (freeze-type operation branch))

(defconstant +most-branches+ 65536)     ; the numbers of nodes

(defun operation-of-leaf (leaf)
  (make-operation (vector (make-branch leaf '()))))

(defun send-operation (channel value)
  "Return the operation that sends VALUE to CHANNEL, as SEND does, and returns true."
  (operation-of-leaf (make-sending channel value)))

(defun receive-operation (channel)
  "Return the operation that receives a value of CHANNEL, and returns what RECEIVE does."
  (operation-of-leaf (make-receipt channel)))

(defun pause-operation (seconds)
  "Return the operation that waits for SECONDS, a non-negative real, and returns NIL."
  (check-timeout seconds)
  (make-operation #() seconds))

(declaim (inline sooner-p))
(defun sooner-p (seconds timeout)
  (and seconds (or (null timeout) (<= seconds timeout))))

(defun count-branches (things)
  (let ((n 0))
    (declare (fixnum n))
    (dolist (thing things) (incf n (if (operation-p thing) (length (operation-branches thing)) 1)))
    (when (> n +most-branches+)
      (error "~@<An operation cannot be one of ~D; ~D are the most.~:@>" n +most-branches+))
    n))

(defun combine (things functions)
  "The operation that is one of THINGS, operations and leaves, each wrapped in one of FUNCTIONS, a
list that may be shorter."
  (let ((branches (make-array (count-branches things))) (i 0) (seconds nil) (pause-functions '()))
    (declare (type index i))
    (dolist (thing things (make-operation branches seconds pause-functions))
      (let ((last (and functions (list (pop functions)))))
        (flet ((add (branch)
                 (setf (svref branches i) branch)
                 (incf i)))
          (cond ((operation-p thing)
                 (loop for branch across (operation-branches thing)
                       do (add (if last
                                   (make-branch (branch-leaf branch)
                                                (append (branch-functions branch) last))
                                   branch)))
                 (when (sooner-p (operation-seconds thing) seconds)
                   (setf seconds (operation-seconds thing)
                         pause-functions (append (operation-functions thing) last))))
                (t (add (make-branch thing last)))))))))

(defun choose (&rest operations)
  "Return the operation that performs one of OPERATIONS, the first that can be; if several can be,
any of them. With no OPERATIONS it waits for ever."
  (dolist (operation operations) (check-type operation operation))
  (combine operations '()))

(defun wrap (operation function)
  "Return the operation that performs OPERATION, calls FUNCTION with the values of that, and returns
the values of that."
  (check-type operation operation)
  (combine (list operation) (list (coerce function 'function))))

(defun select-operation (things &rest functions)
  "What SELECT performs; THINGS has been evaluated first."
  (declare (dynamic-extent functions))
  (dolist (thing things) (check-type thing (or operation leaf)))
  (combine things functions))

;;;; random order

;;; Several threads may draw at a time, and get the same number: that does no harm.
(declaim (type (simple-array word (1)) **seed**))
(sb-ext:defglobal **seed** (make-array 1 :element-type 'word :initial-element 88172645463325252))

(declaim (inline next-random))
(defun next-random (x)
  "The number after X of a sequence: George Marsaglia, \"Xorshift RNGs\", 2003."
  (declare (type word x))
  (setf x (logxor x (logand most-positive-word (ash x 13)))
        x (logxor x (ash x -7)))
  (logxor x (logand most-positive-word (ash x 17))))

(deftype order () '(simple-array (unsigned-byte 16) (*)))

(defun shuffle (order n)
  "Let the first N elements of ORDER be the numbers below N, in random order, and return it. See
Donald Knuth, The Art of Computer Programming, volume 2, section 3.4.2."
  (declare (type order order) (type (integer 1 #.+most-branches+) n))
  (let ((x (aref **seed** 0)))
    (declare (type word x))
    (setf (aref order 0) 0)
    (loop for i of-type index from 1 below n
          for place of-type index = (ash (* (ldb (byte 32 0) (setf x (next-random x))) (1+ i)) -32)
          do (setf (aref order i) (aref order place)
                   (aref order place) i))
    (setf (aref **seed** 0) x)
    order))

;;;; doing one of several

(defun try-branch (branch node claim)
  "Do what BRANCH is for, or enter NODE: an outcome, and a value."
  (let ((leaf (branch-leaf branch)))
    (cond ((occasion-p leaf) (call-way way-try leaf node claim))
          ((eq (transfer-kind leaf) :send)
           (offer (transfer-channel leaf) (transfer-value leaf) node claim))
          (t (accept (transfer-channel leaf) node claim)))))

(declaim (inline likely-p))
(defun likely-p (branch)
  "Could BRANCH be done at once, as far as can be seen without a lock?"
  (let ((leaf (branch-leaf branch)))
    (cond ((occasion-p leaf) (call-way way-likely-p leaf))
          ((eq (transfer-kind leaf) :send) (offer-likely-p (transfer-channel leaf)))
          (t (accept-likely-p (transfer-channel leaf))))))

(defun try-in-order (branches order)
  (declare (simple-vector branches) (type order order))
  (dotimes (i (length branches))
    (let ((branch (svref branches (aref order i))))
      (when (likely-p branch)
        (multiple-value-bind (outcome value) (try-branch branch nil nil)
          (unless (eq outcome :refused) (return (values branch outcome value))))))))

(defconstant +few+ 32)

(defun try-branches (branches)
  "Any of BRANCHES that can be done at once, the outcome, and the value; or NIL."
  (declare (simple-vector branches))
  (let ((n (length branches)))
    (cond ((= n 0) nil)
          ((<= n +few+)
           (let ((order (make-array +few+ :element-type '(unsigned-byte 16))))
             (declare (dynamic-extent order))
             (try-in-order branches (shuffle order n))))
          (t (try-in-order branches
                           (shuffle (make-array n :element-type '(unsigned-byte 16)) n))))))

;;;; waiting for one of several

(defun prepare-value (leaf)
  "What a node for LEAF has as value before it is entered."
  (cond ((occasion-p leaf)
         ;; To enter and leave may be to wait for a mutex, which must not be cut off.
         #+sb-fiber (sb-fiber::ensure-waking-room 16384)
         (call-way way-prepare leaf))
        (t (transfer-value leaf))))

(defmacro do-nodes ((branch node branches waiter) &body body)
  "Execute BODY with BRANCH and NODE bound to each of BRANCHES and the node of WAITER for it. In a
block named NIL."
  `(loop for ,branch across (the simple-vector ,branches)
         for ,node = (first-node ,waiter) then (truly-the node (node-sibling ,node))
         do ,@body))

(defun leave-lines (branches waiter)
  "Let the nodes of WAITER, for BRANCHES, be in no line."
  (do-nodes (branch node branches waiter)
    (let ((leaf (branch-leaf branch)))
      (if (occasion-p leaf)
          (call-way way-leave leaf node)
          (leave-line (transfer-channel leaf) node)))))

(defun prepare-nodes (branches waiter)
  (let ((prepared nil))
    (unwind-protect
         (progn (do-nodes (branch node branches waiter)
                  (setf (node-value node) (prepare-value (branch-leaf branch))))
                (setf prepared t))
      (unless prepared (leave-lines branches waiter)))))

(defun enter-lines (branches waiter)
  "Enter the nodes of WAITER, for BRANCHES, and return NIL; or, if one can be done meanwhile, return
as TRY-BRANCHES; or NIL and :CHOSEN."
  (let ((claim nil))
    (do-nodes (branch node branches waiter)
      (multiple-value-bind (outcome value) (try-branch branch node claim)
        (case outcome
          (:waiting (setf claim t))
          (:chosen (return (values nil :chosen)))
          (t (return (values branch outcome value))))))))

(defun chosen-branch (branches waiter)
  "The branch for which WAITER was chosen, the outcome, and the value."
  (multiple-value-bind (number closing) (chosen-number waiter)
    (do-nodes (branch node branches waiter)
      (when (= (node-number node) number)
        (return (values branch (if closing :closed :done) (node-value node)))))))

(defun undo-choice (branches waiter)
  "WAITER, which was chosen, is being unwound."
  (leave-lines branches waiter)
  (multiple-value-bind (branch outcome value) (chosen-branch branches waiter)
    (let ((leaf (branch-leaf branch)))
      (cond ((occasion-p leaf) (call-way way-undo leaf))
            ((and (eq outcome :done) (eq (transfer-kind leaf) :receive))
             (give-back (transfer-channel leaf) value))))))

(defun enter-or-leave (branches waiter)
  "Do what ENTER-LINES does. If that is unwound, as by a lock that the thread has already, leave."
  (let ((entered nil))
    (unwind-protect (multiple-value-prog1 (enter-lines branches waiter)
                      (setf entered t))
      (unless entered
        (if (withdraw waiter)
            (leave-lines branches waiter)
            (undo-choice branches waiter))))))

;;; Inline for the same reason as in channel.lisp.
(declaim (inline wait-in-lines wait-for-branch))
(defun wait-in-lines (operation branches waiter timeout)
  "Wait until WAITER is chosen in the lines of BRANCHES. Return as WAIT-FOR-BRANCH."
  (flet ((chosen ()
           (leave-lines branches waiter)
           (chosen-branch branches waiter)))
    (prepare-nodes branches waiter)
    (multiple-value-bind (branch outcome value) (enter-or-leave branches waiter)
      (cond ((null outcome)
             (when (sleeping (waiter operation timeout)
                       :leave (leave-lines branches waiter)
                       :undo (undo-choice branches waiter))
               (chosen)))
            ((eq outcome :chosen)
             (await-service waiter)
             (chosen))
            ;; It may have been chosen where it is not closed.
            ((and (eq outcome :closed) (not (withdraw waiter))) (chosen))
            (t (leave-lines branches waiter)
               (values branch outcome value))))))

(defun wait-for-branch (operation branches timeout)
  "Wait until one of BRANCHES, those of OPERATION, can be done; return that, the outcome and the
value, or NIL after TIMEOUT seconds. With interrupts off."
  (let ((waiter (own-waiter (length (the simple-vector branches)))))
    (multiple-value-prog1 (wait-in-lines operation branches waiter timeout)
      (end-use waiter))))

(declaim (inline collect-value))
(defun collect-value (branch value)
  (let ((leaf (branch-leaf branch)))
    (if (occasion-p leaf)
        (call-way way-collect leaf value)
        value)))

(defun select-branch (operation branches timeout wait-p)
  "Do one of BRANCHES, those of OPERATION; return that, the outcome and the value, or NIL."
  (with-room-to-wake
    (multiple-value-bind (branch outcome value) (try-branches branches)
      (unless (or branch (not wait-p) (eql timeout 0))
        (setf (values branch outcome value) (wait-for-branch operation branches timeout)))
      (values branch outcome (and branch (collect-value branch value))))))

;;;; performing

(defun call-wrapped (functions &rest values)
  "Call the first of FUNCTIONS with VALUES, the next with its values, and so on. Return the last
values."
  (cond ((null functions) (values-list values))
        ((rest functions)
         (multiple-value-call #'call-wrapped
           (rest functions) (apply (the function (first functions)) values)))
        (t (apply (the function (first functions)) values))))

(defun end-branch (branch outcome value)
  "Return what BRANCH does, which has OUTCOME and VALUE."
  (let ((leaf (branch-leaf branch)) (functions (branch-functions branch)))
    (cond ((occasion-p leaf) (call-wrapped functions value))
          ((eq (transfer-kind leaf) :send)
           (when (eq outcome :closed)
             (error 'channel-closed :channel (transfer-channel leaf)))
           (call-wrapped functions t))
          ((eq outcome :closed) (call-wrapped functions nil nil :closed))
          (t (call-wrapped functions value t)))))

(defun perform-or (operation timeout wait-p nothing)
  "What PERFORM does, but call NOTHING if nothing was done."
  (declare (function nothing))
  (let* ((seconds (operation-seconds operation)) (pause-p (sooner-p seconds timeout)))
    (multiple-value-bind (branch outcome value)
        (select-branch operation (operation-branches operation) (if pause-p seconds timeout) wait-p)
      (cond (branch (end-branch branch outcome value))
            ((and pause-p (or wait-p (= seconds 0)))
             (call-wrapped (operation-functions operation) nil))
            (t (funcall nothing))))))

(defun perform (operation &key timeout (wait-p t))
  "Perform OPERATION, and return its values. Return NIL, NIL and :TIMEOUT if TIMEOUT seconds, a
non-negative real, are over before; or, if WAIT-P is false, if this would have to wait. Signals what
SEND does, and SB-SYS:DEADLINE-TIMEOUT. If OPERATION is one of several, just one of them is done. If
this is unwound while it waits, one at most: something may have been sent, but a value that was
given to it is received by others."
  (declare (operation operation))
  (check-timeout timeout)
  (perform-or operation timeout wait-p (lambda () (values nil nil :timeout))))
