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

(defstruct (operation (:constructor nil) (:copier nil))
  "What can be performed, by PERFORM, alone or as one of several.")

(defstruct (transfer (:include operation)
                     (:constructor make-transfer (channel kind &optional value))
                     (:copier nil))
  (channel (missing-arg) :type channel :read-only t)
  (kind (missing-arg) :type (member :send :receive) :read-only t)
  (value nil :read-only t))

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

(defstruct (branch (:constructor make-branch (transfer functions)) (:copier nil))
  (transfer (missing-arg) :type transfer :read-only t)
  ;; to be called with its values, the first one first
  (functions '() :type list :read-only t)
  (node nil :type (or null node)))
(declaim (freeze-type branch))

(defconstant +most-branches+ 65536)     ; the numbers of nodes

(defun map-leaves (function operation)
  "Call FUNCTION with each transfer and pause of OPERATION, and what that is wrapped in, a list."
  (labels ((walk (operation functions)
             (etypecase operation
               (wrapping (walk (wrapping-operation operation)
                               (cons (wrapping-function operation) functions)))
               (alternative (dolist (operation (alternative-operations operation))
                              (walk operation functions)))
               ((or transfer pause) (funcall function operation functions)))))
    (walk operation '())))

(defun branches-of (operation)
  "The branches of OPERATION that are transfers, a vector; then the shortest time that it waits for,
or NIL, and the functions for that."
  (let ((branches '()) (n 0) (seconds nil) (functions '()))
    (map-leaves (lambda (leaf wrapped)
                  (cond ((transfer-p leaf)
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

(defun try-branch (branch node claim)
  "Do what BRANCH is for, or enter NODE: an outcome, and a value."
  (let* ((transfer (branch-transfer branch)) (channel (transfer-channel transfer)))
    (if (eq (transfer-kind transfer) :send)
        (offer channel (transfer-value transfer) node claim)
        (accept channel node claim))))

(defun likely-p (branch)
  "Could BRANCH be done at once, as far as can be seen without a lock?"
  (let* ((transfer (branch-transfer branch)) (channel (transfer-channel transfer)))
    (if (eq (transfer-kind transfer) :send)
        (offer-likely-p channel)
        (accept-likely-p channel))))

(defun try-branches (branches)
  "The first of BRANCHES that can be done at once, the outcome, and the value; or NIL."
  (loop for branch across (the simple-vector branches)
        when (likely-p branch)
          do (multiple-value-bind (outcome value) (try-branch branch nil nil)
               (unless (eq outcome :refused) (return (values branch outcome value))))))

(defun make-nodes (branches waiter)
  "Give each of BRANCHES a node for WAITER."
  (loop for branch across (the simple-vector branches)
        for i of-type index from 0
        do (setf (branch-node branch)
                 (make-node waiter (transfer-value (branch-transfer branch)) i))))

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
  (loop for branch across (the simple-vector branches)
        do (leave-line (transfer-channel (branch-transfer branch)) (branch-node branch))))

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
    (let ((transfer (branch-transfer branch)))
      (when (and (eq outcome :done) (eq (transfer-kind transfer) :receive))
        (give-back (transfer-channel transfer) value)))))

(defun wait-for-branch (operation branches timeout)
  "Wait until one of BRANCHES, those of OPERATION, can be done; return what CHOSEN-BRANCH does, or
NIL after TIMEOUT seconds. With interrupts off."
  (let ((waiter (make-own-waiter)))
    (flet ((chosen ()
             (leave-lines branches)
             (chosen-branch branches waiter)))
      (make-nodes branches waiter)
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

(defun select-branch (operation branches timeout wait-p)
  "Do one of BRANCHES, those of OPERATION; return that, the outcome and the value, or NIL."
  (shuffle branches)
  (with-room-to-wake
    (multiple-value-bind (branch outcome value) (try-branches branches)
      (if (or branch (not wait-p))
          (values branch outcome value)
          (wait-for-branch operation branches timeout)))))

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
  (let ((transfer (branch-transfer branch)) (functions (branch-functions branch)))
    (cond ((eq (transfer-kind transfer) :send)
           (when (eq outcome :closed)
             (error 'channel-closed :channel (transfer-channel transfer)))
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
