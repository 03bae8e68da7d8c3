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
;;; What an operation is made of in the end is pauses, which are a time limit for the others, and
;;; leaves: transfers, by channels, and occasions, which are all else that can be waited for, each in
;;; its way. See occasion.lisp.

(defstruct (operation (:constructor nil) (:copier nil))
  "What can be performed, by PERFORM, alone or as one of several.")

(defstruct (transfer (:include operation)
                     (:constructor make-transfer (channel kind &optional value))
                     (:copier nil))
  (channel (missing-arg) :type channel :read-only t)
  (kind (missing-arg) :type (member :send :receive) :read-only t)
  (value nil :read-only t))

;;; The functions of a way are called with interrupts off, and do not wait. OBJECT is what it is the
;;; way to wait for.
(defstruct (way (:constructor make-way (&key likely-p try prepare leave collect undo)) (:copier nil))
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
(declaim (freeze-type way))

(defstruct (occasion (:include operation) (:constructor make-occasion (object way)) (:copier nil))
  (object (missing-arg) :read-only t)
  (way (missing-arg) :type way :read-only t))

(defstruct (pause (:include operation) (:constructor make-pause (seconds)) (:copier nil))
  (seconds (missing-arg) :type (real 0) :read-only t))

(defstruct (alternative (:include operation) (:constructor make-alternative (operations))
                        (:copier nil))
  (operations '() :type list :read-only t))

(defstruct (wrapping (:include operation) (:constructor make-wrapping (operation function))
                     (:copier nil))
  (operation (missing-arg) :type operation :read-only t)
  (function (missing-arg) :type function :read-only t))

(declaim (freeze-type operation))

(defun send-operation (channel value)
  "Return the operation that sends VALUE to CHANNEL, as SEND does, and returns true."
  (declare (channel channel))
  (make-transfer channel :send value))

(defun receive-operation (channel)
  "Return the operation that receives a value of CHANNEL, and returns what RECEIVE does."
  (declare (channel channel))
  (make-transfer channel :receive))

(defun pause-operation (seconds)
  "Return the operation that waits for SECONDS, a non-negative real, and returns NIL."
  (check-timeout seconds)
  (make-pause seconds))

(defun choose (&rest operations)
  "Return the operation that performs one of OPERATIONS, the first that can be; if several can be,
any of them. With no OPERATIONS it waits for ever."
  (dolist (operation operations) (check-type operation operation))
  (make-alternative operations))

(defun wrap (operation function)
  "Return the operation that performs OPERATION, calls FUNCTION with the values of that, and returns
the values of that."
  (check-type operation operation)
  (make-wrapping operation (coerce function 'function)))

;;;; the branches of an operation

(deftype leaf () '(or transfer occasion))

(defstruct (branch (:constructor make-branch (leaf functions)) (:copier nil))
  (leaf (missing-arg) :type leaf :read-only t)
  ;; to be called with its values, the first one first
  (functions '() :type list :read-only t)
  (node nil :type (or null node)))
(declaim (freeze-type branch))

(defconstant +most-branches+ 65536)     ; the numbers of nodes

(defun map-leaves (function operation)
  "Call FUNCTION with each leaf and pause of OPERATION, and what that is wrapped in, a list."
  (labels ((walk (operation functions)
             (etypecase operation
               (wrapping (walk (wrapping-operation operation)
                               (cons (wrapping-function operation) functions)))
               (alternative (dolist (operation (alternative-operations operation))
                              (walk operation functions)))
               ((or leaf pause) (funcall function operation functions)))))
    (walk operation '())))

(defun branches-of (operation)
  "The branches of OPERATION, for its leaves, a vector; then the shortest time that it waits for, or
NIL, and the functions for that."
  (let ((branches '()) (n 0) (seconds nil) (functions '()))
    (map-leaves (lambda (leaf wrapped)
                  (cond ((typep leaf 'leaf)
                         (push (make-branch leaf wrapped) branches)
                         (incf n))
                        ((or (null seconds) (< (pause-seconds leaf) seconds))
                         (setf seconds (pause-seconds leaf)
                               functions wrapped))))
                operation)
    (when (> n +most-branches+)
      (error "~@<An operation cannot be one of ~D; ~D are the most.~:@>" n +most-branches+))
    (values (coerce (nreverse branches) 'simple-vector) seconds functions)))

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

(defun shuffle (vector)
  "Bring the elements of VECTOR into random order."
  (declare (simple-vector vector))
  (let ((x (aref **seed** 0)))
    (declare (type word x))
    (loop for n of-type index from (length vector) above 1
          do (setf x (next-random x))
             (rotatef (svref vector (1- n)) (svref vector (rem (ash x -8) n))))
    (setf (aref **seed** 0) (next-random x))
    vector))

;;;; choosing a branch

(defmacro call-way (name occasion &rest arguments)
  "Call what NAME reads of the way of OCCASION, with the object of that and ARGUMENTS."
  `(funcall (,name (occasion-way ,occasion)) (occasion-object ,occasion) ,@arguments))

(defun try-branch (branch node claim)
  "Do what BRANCH is for, or enter NODE: an outcome, and a value."
  (let ((leaf (branch-leaf branch)))
    (cond ((occasion-p leaf) (call-way way-try leaf node claim))
          ((eq (transfer-kind leaf) :send)
           (offer (transfer-channel leaf) (transfer-value leaf) node claim))
          (t (accept (transfer-channel leaf) node claim)))))

(defun likely-p (branch)
  "Could BRANCH be done at once, as far as can be seen without a lock?"
  (let ((leaf (branch-leaf branch)))
    (cond ((occasion-p leaf) (call-way way-likely-p leaf))
          ((eq (transfer-kind leaf) :send) (offer-likely-p (transfer-channel leaf)))
          (t (accept-likely-p (transfer-channel leaf))))))

(defun try-branches (branches)
  "The first of BRANCHES that can be done at once, the outcome, and the value; or NIL."
  (loop for branch across (the simple-vector branches)
        when (likely-p branch)
          do (multiple-value-bind (outcome value) (try-branch branch nil nil)
               (unless (eq outcome :refused) (return (values branch outcome value))))))

(defun prepare-value (leaf)
  (if (occasion-p leaf) (call-way way-prepare leaf) (transfer-value leaf)))

(defun make-nodes (branches waiter)
  "Give each of BRANCHES a node for WAITER."
  (loop for branch across (the simple-vector branches)
        for i of-type index from 0
        do (setf (branch-node branch)
                 (make-node waiter (prepare-value (branch-leaf branch)) i))))

;;; From the first entry on nothing is allocated: an error would leave a waiter there that is gone.
(defun enter-lines (branches)
  "Enter the nodes of BRANCHES, and return NIL; or, if one can be done meanwhile, return as
TRY-BRANCHES; or NIL and :CHOSEN."
  (loop for branch across (the simple-vector branches)
        for claim = nil then t
        do (multiple-value-bind (outcome value) (try-branch branch (branch-node branch) claim)
             (case outcome
               (:waiting)
               (:chosen (return (values nil :chosen)))
               (t (return (values branch outcome value)))))))

(defun leave-lines (branches)
  "Let those of BRANCHES that have a node be in no line."
  (loop for branch across (the simple-vector branches)
        for leaf = (branch-leaf branch)
        for node = (branch-node branch)
        do (cond ((null node))
                 ((occasion-p leaf) (call-way way-leave leaf node))
                 (t (leave-line (transfer-channel leaf) node)))))

(defun chosen-branch (branches waiter)
  "The branch for which WAITER was chosen, the outcome, and the value."
  (multiple-value-bind (number closing) (chosen-number waiter)
    (let ((branch (svref branches number)))
      (values branch
              (if closing :closed :done)
              (node-value (branch-node branch))))))

(defun undo-choice (branches waiter)
  "WAITER, which was chosen, is being unwound."
  (leave-lines branches)
  (multiple-value-bind (branch outcome value) (chosen-branch branches waiter)
    (let ((leaf (branch-leaf branch)))
      (cond ((occasion-p leaf) (call-way way-undo leaf))
            ((and (eq outcome :done) (eq (transfer-kind leaf) :receive))
             (give-back (transfer-channel leaf) value))))))

(defun wait-for-branch (operation branches timeout)
  "Wait until one of BRANCHES, those of OPERATION, can be done; return what CHOSEN-BRANCH does, or
NIL after TIMEOUT seconds. With interrupts off."
  (let ((waiter (make-own-waiter)))
    (flet ((chosen ()
             (leave-lines branches)
             (chosen-branch branches waiter)))
      (let ((made nil))
        (unwind-protect (progn (make-nodes branches waiter)
                               (setf made t))
          (unless made (leave-lines branches))))
      (multiple-value-bind (branch outcome value) (enter-lines branches)
        (cond ((null outcome)
               (when (sleeping (waiter operation timeout)
                       :leave (leave-lines branches)
                       :undo (undo-choice branches waiter))
                 (chosen)))
              ((eq outcome :chosen) (chosen))
              ;; It may have been chosen where it is not closed.
              ((and (eq outcome :closed) (not (withdraw waiter))) (chosen))
              (t (leave-lines branches)
                 (values branch outcome value)))))))

(defun collect-value (branch value)
  (let ((leaf (branch-leaf branch)))
    (if (occasion-p leaf)
        (call-way way-collect leaf value)
        value)))

(defun select-branch (operation branches timeout wait-p)
  "Do one of BRANCHES, those of OPERATION; return that, the outcome and the value, or NIL."
  (shuffle branches)
  (with-room-to-wake
    (multiple-value-bind (branch outcome value) (try-branches branches)
      (unless (or branch (not wait-p))
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

(defun sooner-p (seconds timeout)
  (and seconds (or (null timeout) (<= seconds timeout))))

(defun perform-or (operation timeout wait-p nothing)
  "What PERFORM does, but call NOTHING if nothing was done."
  (declare (function nothing))
  (multiple-value-bind (branches seconds functions) (branches-of operation)
    (let ((pause-p (sooner-p seconds timeout)))
      (multiple-value-bind (branch outcome value)
          (select-branch operation branches (if pause-p seconds timeout) wait-p)
        (cond (branch (end-branch branch outcome value))
              ((and pause-p (or wait-p (= seconds 0))) (call-wrapped functions nil))
              (t (funcall nothing)))))))

(defun perform (operation &key timeout (wait-p t))
  "Perform OPERATION, and return its values. Return NIL, NIL and :TIMEOUT if TIMEOUT seconds, a
non-negative real, are over before; or, if WAIT-P is false, if this would have to wait. Signals what
SEND does, and SB-SYS:DEADLINE-TIMEOUT. If OPERATION is one of several, just one of them is done. If
this is unwound while it waits, one at most: something may have been sent, but a value that was
given to it is received by others."
  (declare (operation operation))
  (check-timeout timeout)
  (perform-or operation timeout wait-p (lambda () (values nil nil :timeout))))
