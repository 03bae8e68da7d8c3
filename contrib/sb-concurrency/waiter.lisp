;;;; who waits in channels, and how one of several is chosen

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package :sb-concurrency)

;;; A WAITER stands for a thread, or a fiber, that waits until it is chosen. For each thing that it
;;; waits for it has a NODE in the LINE of that; who serves it there must choose it before, so that
;;; it is served once, wherever it waits.
;;;
;;;     STATE                        move                 by
;;;     +WAITING+ -> +CLAIMING+      CLAIMING-ONESELF     the waiter, to serve a node of another
;;;     +CLAIMING+ -> +WAITING+      CLAIMING-ONESELF     the same: there was none
;;;     +CLAIMING+ -> +WITHDRAWN+    CLAIMING-ONESELF     the same: it has served one
;;;     +WAITING+ -> chosen          TAKE-PARTNER         who serves it, under the lock of the line
;;;     +WAITING+ -> +WITHDRAWN+     WITHDRAW             the waiter: time-out, unwinding
;;;
;;; Chosen is +CHOSEN+ and more: twice the number of the node is added, and 1 if its line is no
;;; more. A waiter is claiming for some instructions only, under a lock, and takes no other lock
;;; meanwhile.
;;;
;;; Waiters are used again, with their nodes. So a wait is not left before its nodes have been
;;; taken out of their lines, under the locks of these, and its waiter has withdrawn; or who has
;;; chosen it has said by SERVED-P that it will not touch it or the nodes again, which is the last
;;; thing before it wakes what sleeps. (Who waits for the end of a claim looks at a waiter that may
;;; be another's by then, and be claiming for that.) One whose wait is unwound is left to the
;;; collector.
;;;
;;; What is true when nobody is inside:
;;;  - a line is guarded by the lock of what it is a line of;
;;;  - a node is in the line that LINE names, or in none if that is NIL; one whose waiter is not
;;;    waiting any more may still be there, until it is met, or its waiter takes it out;
;;;  - the VALUE of a node is what its waiter wants to give; or, if it wants to be given something,
;;;    what it was given once the node is chosen, and anything before.

(defconstant +waiting+ 0)
(defconstant +claiming+ 1)
(defconstant +withdrawn+ 2)
(defconstant +chosen+ 3)

(declaim (inline make-waiter make-node))
(defstruct (waiter (:constructor make-waiter ())
                   (:copier nil))
  (state +waiting+ :type word)
  ;; The fiber, or a semaphore on which the thread waits.
  (sleeper nil)
  ;; It was chosen, and all is done that goes with that.
  (served-p nil)
  ;; A chain through SIBLING, in the order of their numbers.
  (nodes nil)
  ;; Those that a carrier has in reserve are a chain; how long it is from here on.
  (next nil)
  (depth 0 :type fixnum))
(declaim (freeze-type waiter))

(defstruct (node (:constructor make-node (waiter number))
                 (:copier nil))
  (waiter (missing-arg) :type waiter :read-only t)
  (number 0 :type (unsigned-byte 16) :read-only t)
  (value nil)
  (line nil)
  (next nil)
  (previous nil)
  (sibling nil))
(declaim (freeze-type node))

(defstruct (line (:constructor make-line ())
                 (:copier nil))
  (first nil)
  (last nil))

;;; They refer to each other, and may be others' soon.
(macrolet ((define (&rest types)
             `(progn ,@(loop for type in types
                             collect `(defmethod print-object ((object ,type) stream)
                                        (print-unreadable-object (object stream :type t
                                                                                :identity t)))))))
  (define waiter node line))

;;;; locks

;;; Under a lock nothing is allocated, nothing is called, and nothing exits: with fibers it is a
;;; tiny lock, which the collector does not interrupt.
#+sb-fiber
(progn
  (deftype lock () 'word)
  (defmacro make-lock () 0)
  (defmacro with-lock ((place) &body body)
    "The value of BODY, executed while the lock at PLACE is held. With interrupts off."
    `(sb-fiber::with-tiny-lock (,place) ,@body)))

(defmacro holding ((mutex) &body body)
  "The value of BODY, executed while MUTEX is held. Nothing but BODY unwinds this."
  ;; A deadline that is over would, as an interruption would.
  `(without-interrupts
     (let ((sb-impl::*deadline* nil))
       (sb-thread::with-system-mutex (,mutex) (values (progn ,@body))))))

#-sb-fiber
(progn
  (deftype lock () 'mutex)
  (defmacro make-lock () '(make-mutex :name "channel"))
  (defmacro with-lock ((place) &body body)
    "The value of BODY, executed while the lock at PLACE is held. With interrupts off."
    `(holding (,place) ,@body)))

;;;; lines, under their locks

(declaim (inline append-node remove-node))
(defun append-node (line node)
  (let ((last (line-last line)))
    (setf (node-line node) line
          (node-next node) nil
          (node-previous node) last
          (line-last line) node)
    (if last
        (setf (node-next (truly-the node last)) node)
        (setf (line-first line) node))))

(defun remove-node (node)
  "Take NODE out of its line, if it is in one."
  (when (node-line node)
    (let ((line (truly-the line (node-line node)))
          (next (node-next node))
          (previous (node-previous node)))
      (if next
          (setf (node-previous (truly-the node next)) previous)
          (setf (line-last line) previous))
      (if previous
          (setf (node-next (truly-the node previous)) next)
          (setf (line-first line) next))
      (setf (node-next node) nil
            (node-previous node) nil)
      ;; Last: its waiter may see that without the lock, and be gone.
      (barrier (:write))
      (setf (node-line node) nil))))

;;;; choosing

(declaim (inline chosen-p state-becomes-p chosen-number))
(defun chosen-p (waiter)
  (>= (waiter-state waiter) +chosen+))

(defun state-becomes-p (waiter old new)
  (= (cas (waiter-state waiter) old new) old))

(defun chosen-number (waiter)
  "The number of the chosen node of WAITER, and true if it was chosen since its line is no more."
  (let ((choice (- (waiter-state waiter) +chosen+)))
    (values (ash choice -1) (logtest choice 1))))

(declaim (inline choice))
(defun choice (node closing)
  (truly-the word (+ +chosen+ (* 2 (node-number node)) closing)))

(defmacro take-partner (line self claimant &key (value nil value-p) (closing 0))
  "Take the first node whose waiter waits, and is not SELF, out of LINE, choose that, and return the
node; or NIL if there is none; or T if the waiter of one before it, which is stored in CLAIMANT, is
claiming just now. The waiter is given VALUE; or told, if CLOSING is 1, that it gets none."
  `(let ((next (line-first ,line)))
     (loop
       (when (null next) (return nil))
       (let* ((node (truly-the node next))
              (waiter (node-waiter node)))
         (setf next (node-next node))
         (unless (eq waiter ,self)
           ;; Once it is chosen it may look.
           ,@(when value-p `((setf (node-value node) ,value)
                             (barrier (:write))))
           (let ((state (cas (waiter-state waiter) +waiting+ (choice node ,closing))))
             (when (= state +claiming+)
               (setf ,claimant waiter)
               (return t))
             (remove-node node)
             (when (= state +waiting+) (return node))))))))

(defmacro claiming-oneself ((node claim) &body body)
  "The outcome of BODY, which serves another node, puts NODE in a line, or does nothing. If CLAIM is
true the waiter of NODE is in other lines already: :CHOSEN if it has been chosen there, or else BODY
is executed while nobody can choose it, and then it is withdrawn if the outcome is :DONE."
  `(if ,claim
       (let* ((node (truly-the node ,node)) (waiter (node-waiter node)))
         (if (state-becomes-p waiter +waiting+ +claiming+)
             (let ((outcome (progn ,@body)))
               (setf (waiter-state waiter) (if (eq outcome :done) +withdrawn+ +waiting+))
               outcome)
             :chosen))
       (progn ,@body)))

(defun await-end-of-claim (waiter)
  "Wait until WAITER is not claiming. The caller is not, and has no lock."
  (loop while (= (waiter-state waiter) +claiming+)
        do #+sb-fiber (sb-fiber::spin-for-tiny-lock)
           #-sb-fiber (thread-yield)))

;;;; sleeping

(declaim (inline own-sleeper))
(defun own-sleeper ()
  "What sleeps if what is running waits."
  (or #+sb-fiber (and (sb-fiber::can-park-p) *current-thread*)
      (make-semaphore)))

(declaim (inline take-reserve))
(defun take-reserve ()
  "A waiter that the carrier has in reserve, or NIL."
  #-sb-fiber nil
  #+sb-fiber
  (let* ((carrier (truly-the sb-fiber::carrier sb-fiber::*carrier*))
         (waiter (sb-fiber::carrier-waiters carrier)))
    (when waiter
      (setf (sb-fiber::carrier-waiters carrier) (waiter-next (truly-the waiter waiter)))
      waiter)))

;;; Where it cannot park its user may allocate in an arena.
(declaim (inline fiber-sleeps-p))
(defun fiber-sleeps-p (sleeper)
  (declare (ignorable sleeper))
  #-sb-fiber nil
  #+sb-fiber (sb-fiber::fiber-p sleeper))

(defun ensure-nodes (waiter n)
  "Let WAITER have N nodes, at least."
  (declare (type (integer 0 65536) n))
  (let ((last nil) (node (waiter-nodes waiter)))
    (dotimes (i n)
      (unless node
        (setf node (make-node waiter i))
        (if last
            (setf (node-sibling last) node)
            (setf (waiter-nodes waiter) node)))
      (setf last (truly-the node node)
            node (node-sibling last)))))

(declaim (inline first-node))
(defun first-node (waiter)
  (truly-the node (waiter-nodes waiter)))

(defun own-waiter (n)
  "A waiter for what is running, with N nodes at least. With interrupts off."
  (let* ((sleeper (own-sleeper))
         (waiter (truly-the waiter (or (and (fiber-sleeps-p sleeper) (take-reserve))
                                       (make-waiter)))))
    (setf (waiter-state waiter) +waiting+
          (waiter-sleeper waiter) sleeper
          (waiter-served-p waiter) nil
          (waiter-next waiter) nil)
    (ensure-nodes waiter n)
    waiter))

(defconstant +most-in-reserve+ 64)      ; waiters of a carrier
(defconstant +few-nodes+ 8)

(defun clear-nodes (waiter)
  "Let the nodes of WAITER have no values. Return false if they are too many for the reserve."
  (let ((n 0))
    (declare (fixnum n))
    (do ((node (waiter-nodes waiter) (node-sibling (truly-the node node))))
        ((null node) t)
      (when (> (incf n) +few-nodes+) (return nil))
      (setf (node-value (truly-the node node)) nil))))

(defun end-use (waiter)
  "Nobody knows WAITER any more: it may be used again. With interrupts off."
  #-sb-fiber (declare (ignore waiter))
  #+sb-fiber
  (when (fiber-sleeps-p (waiter-sleeper waiter))
    (let* ((carrier (truly-the sb-fiber::carrier sb-fiber::*carrier*))
           (reserve (sb-fiber::carrier-waiters carrier))
           (depth (if reserve (waiter-depth (truly-the waiter reserve)) 0)))
      (when (and (< depth +most-in-reserve+) (clear-nodes waiter))
        (setf (waiter-sleeper waiter) nil
              (waiter-next waiter) reserve
              (waiter-depth waiter) (1+ depth)
              (sb-fiber::carrier-waiters carrier) waiter)))))

(defun wake-sleeper (sleeper)
  (if (typep sleeper 'semaphore)
      ;; Unwound where it waits for the semaphore's mutex, it would leave who sleeps there.
      (without-interrupts
        (let ((sb-impl::*deadline* nil))
          (signal-semaphore sleeper)))
      #+sb-fiber (sb-fiber::unpark sleeper)))

(defun wake-waiter (waiter)
  "Called after WAITER was chosen, by who has done so, and who has no use for it any more."
  (let ((sleeper (waiter-sleeper waiter)))
    (barrier (:write))
    (setf (waiter-served-p waiter) t)
    (wake-sleeper sleeper))
  nil)

(defun await-service (waiter)
  "Wait until WAITER, which was chosen, is served: that is being done."
  (loop until (waiter-served-p waiter)
        do #+sb-fiber (sb-fiber::spin-for-tiny-lock)
           #-sb-fiber (thread-yield)))

(defun withdraw (waiter)
  "Let WAITER not be chosen any more. Return false if it has been, and is served."
  (cond ((state-becomes-p waiter +waiting+ +withdrawn+) t)
        ((chosen-p waiter) (await-service waiter)
                           nil)
        (t t)))

#+sb-fiber
(defun park-until-chosen (waiter fiber object timeout)
  ;; Interruptions that SLEEP-UNDISTURBED has found wake nobody again.
  (sb-fiber::until-time-limit (limit timeout)
    (sb-fiber::see-interruptions fiber)
    (unless (chosen-p waiter) (sb-fiber::see-cancellation fiber))
    (sb-fiber::without-interruptions
      (unless (waiter-served-p waiter) (sb-fiber::park object limit)))
    ;; First of all, or the deadline would be signalled for what was done in time.
    (when (chosen-p waiter)
      (await-service waiter)
      (sb-fiber::see-interruptions fiber)
      (return t))))

;;; Nearly all waits are such, and so cost no frames that care for others.
(declaim (inline sleep-undisturbed))
(defun sleep-undisturbed (waiter object timeout)
  "Sleep until WAITER, which waits for OBJECT, is chosen, and return true; or NIL if it is no fiber,
may have to end sooner, or is interrupted. With interrupts off."
  (declare (ignorable waiter object timeout))
  #+sb-fiber
  (let ((fiber (waiter-sleeper waiter)))
    (and (sb-fiber::fiber-p fiber)
         (null timeout)
         (null sb-impl::*deadline*)
         (loop
           (when (sb-fiber::fiber-interruptions fiber) (return nil))
           (when (waiter-served-p waiter) (return t))
           (when (sb-fiber::to-leave-p fiber) (return nil))
           (sb-fiber::park object nil)))))

(defun sleep-until-chosen (waiter object timeout)
  "Wait until WAITER, which waits for OBJECT, is chosen. Return false if TIMEOUT seconds, or NIL,
are over before. Signals DEADLINE-TIMEOUT."
  (declare (ignorable object))
  (let ((sleeper (waiter-sleeper waiter)))
    (if (typep sleeper 'semaphore)
        (unless (eql timeout 0)
          (wait-on-semaphore sleeper :timeout (and timeout (max timeout 1d-9))))
        #+sb-fiber (park-until-chosen waiter sleeper object timeout))))

(defmacro sleeping ((waiter object timeout) &key leave undo)
  "Sleep until WAITER, which waits for OBJECT, is chosen, and return true; or NIL after TIMEOUT
seconds. LEAVE is executed if it cannot be chosen any more. If this is unwound when it was chosen
UNDO is executed. With interrupts off."
  (with-unique-names (outcome)
    `(or (sleep-undisturbed ,waiter ,object ,timeout)
         (let ((,outcome nil))
           (flet ((leave-p ()
                    (when (withdraw ,waiter)
                      ,leave
                      t)))
             (unwind-protect
                  (setf ,outcome (if (with-interrupts
                                       (sleep-until-chosen ,waiter ,object ,timeout))
                                     :chosen
                                     :timeout))
               (unless (or ,outcome (leave-p)) ,undo))
             (not (and (eq ,outcome :timeout) (leave-p))))))))
