;;;; cancelling: how a fiber, or the body of a scope, is asked to leave what it does

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; Cancelling asks a fiber, or the body of a scope, to leave what it does. That is heard in a wait,
;;; before it begins or instead of going on, where interrupts are on: FIBER-CANCELLED is signalled,
;;; and if no handler leaves the wait it is unwound, a fiber to its end, a body to its scope. A wait
;;; that has got what it was for is not cancelled: so no wake-up and no message is lost by it. It is
;;; heard once; the cleanup forms that run for it wait undisturbed. INTERRUPT-FIBER and
;;; TERMINATE-FIBER may strike between any two instructions instead.
;;;
;;; What is true when nobody is inside:
;;;  - the low half of POPULATION counts the children that have not ended, on which the owner waits;
;;;    +CLOSED+ beside it says that there will be no more. The children are linked, FIRST to LAST;
;;;  - REASON is NIL, or tells why the scope was cancelled. Then all children have been cancelled,
;;;    or are by who has set REASON. A thread that adds one does so *before* it reads REASON, who
;;;    cancels sets REASON *before* it looks for children: one of them sees the other;
;;;  - a fiber that has something to leave which it has not been told of has the flag +TO-LEAVE+.
;;;
;;;     BODY                    move by
;;;     :RUNNING -> :WANTED     who cancels the scope (then the owner is woken)
;;;     :WANTED  -> :TOLD       the owner, which signals FIBER-CANCELLED
;;;     any      -> :LEAVING    the owner: no handler wanted that. It unwinds, to there or further
;;;     any      -> :LEFT       the owner, which has left the body by whatever way
;;;     :LEFT    -> :ABANDONED  the owner, which was made to leave children behind
;;;
;;; Of a fiber itself the same is told by flags: +CANCELLED+, +TOLD+, +LEAVING+. Of several things
;;; that are to be left the outermost is, of those inside what is being left already: scopes that a
;;; cleanup form has made.

;;; The innermost scope whose body is being executed.
(sb-impl:define-thread-local *scope* nil)

;;; NIL where nothing is cancelled.
(sb-impl:define-thread-local *cancellable* t)

;;; How many signal contexts there are, where a thread, no fiber, waits: it is sent an interruption,
;;; which looks whether it is on top of the wait, and not of something that has interrupted that.
;;; NIL elsewhere.
(sb-impl:define-thread-local *in-native-wait* nil)

;;; What a fiber is in a scope. One that executes the body of a scope and belongs to none has such
;;; an object, too, for the slot INNER.
(defstruct (child (:constructor make-child (scope fiber))
                  (:copier nil))
  (scope nil :type t :read-only t)
  (fiber nil :type t :read-only t)
  ;; The innermost scope whose body it executes
  (inner nil)
  (next nil)
  (previous nil))
(declaim (freeze-type child))

(defstruct (scope (:constructor %make-scope (name group permits on-failure owner outer))
                  (:copier nil))
  "What WITH-FIBERS binds its variable to: it stands for the fibers that are spawned in the form."
  (name nil :type (or null string) :read-only t)
  (group nil :type t :read-only t)
  ;; As many as children may yet be added at a time, or NIL if there is no limit.
  (permits nil :type (or null sb-thread:semaphore) :read-only t)
  (on-failure :cancel :type (member :cancel :collect) :read-only t)
  (owner nil :read-only t)
  ;; The scope whose body contains the form, or NIL.
  (outer nil :type t :read-only t)
  (lock 0 :type word)
  (first nil)
  (last nil)
  ;; Conses of a child's fiber and a condition, the latest first.
  (failures '() :type list)
  (reason nil :type symbol)
  (body :running :type symbol)
  ;; The fiber that cancels it when its deadline has come, or NIL.
  (watch nil)
  (population 0 :type word))
(declaim (freeze-type scope))

(define-structure-slot-addressor scope-population-address :structure scope :slot population)

(declaim (inline scope-alive))
(defun scope-alive (scope)
  "How many fibers of SCOPE have not ended."
  (ldb (byte 32 0) (scope-population scope)))

;;;; the chain of children, under its lock

(declaim (inline append-child remove-child))
(defun append-child (scope child)
  (declare (scope scope) (child child) (optimize (safety 0)))
  (let ((last (scope-last scope)))
    (setf (child-next child) nil
          (child-previous child) last
          (scope-last scope) child)
    (if last
        (setf (child-next (truly-the child last)) child)
        (setf (scope-first scope) child))))

(defun remove-child (scope child)
  (declare (scope scope) (child child) (optimize (safety 0)))
  (let ((next (child-next child))
        (previous (child-previous child)))
    (if next
        (setf (child-previous (truly-the child next)) previous)
        (setf (scope-last scope) previous))
    (if previous
        (setf (child-next (truly-the child previous)) next)
        (setf (scope-first scope) next))))

(defun next-child (scope)
  "The first child of SCOPE, which becomes the last; or NIL."
  (with-tiny-lock ((scope-lock scope))
    (let ((child (scope-first scope)))
      (when child
        (remove-child scope (truly-the child child))
        (append-child scope (truly-the child child)))
      child)))

(defun children-of-scope (scope)
  "A list of the fibers of SCOPE that have not ended, or had not a moment ago."
  (let* ((n (scope-alive scope))        ; some may have yet to be linked
         (fibers (make-array n :initial-element nil)))
    (with-tiny-lock ((scope-lock scope)) ; not by NEXT-CHILD: CANCEL-CHILDREN would miss some
      (let ((child (scope-first scope)) (i 0))
        (declare (type index i))
        (loop until (or (null child) (= i n))
              do (setf (svref fibers i) (child-fiber (truly-the child child))
                       child (child-next (truly-the child child)))
                 (incf i)))
      nil)
    (coerce (remove nil fibers) 'list)))

(define-condition fiber-cancelled (serious-condition)
  ((thread :initarg :thread :reader cancelled-thread)
   (scope :initarg :scope :reader cancelled-scope))
  (:report (lambda (condition stream)
             (format stream "~@<~S is to leave ~:[what it does~;~:*~S~].~:@>"
                     (cancelled-thread condition) (cancelled-scope condition))))
  (:documentation "Signalled in a wait of a fiber that was cancelled, or of the body of a scope that
was. A handler may do what is to be done before the stack is unwound. It may also leave the wait for
some place of its own: then that is all that comes of it."))

(defun fiber-cancelled-scope (condition)
  "Return the scope whose body is to be left, by CONDITION, a FIBER-CANCELLED, or NIL if it is a
fiber that is to end."
  (cancelled-scope condition))

(defmacro without-cancellation (&body body)
  "Execute BODY such that no wait in it is cancelled, and return its values. What was cancelled
meanwhile is left by the first wait after that."
  `(let ((*cancellable* nil)) ,@body))

;;;; being cancelled

(declaim (inline to-leave-p see-cancellation))
(defun to-leave-p (fiber)
  (logtest +to-leave+ (fiber-flags fiber)))

(defun see-cancellation (fiber)
  "Called by FIBER before a wait, and when it has been woken for nothing."
  (when (to-leave-p fiber) (leave-what-is-cancelled fiber)))

(defmacro do-own-scopes ((scope thread) &body body)
  "Execute BODY with each SCOPE whose body THREAD, which is running, executes, the innermost first."
  `(loop for ,scope = *scope* then (scope-outer ,scope)
         while (and ,scope (eq (scope-owner (truly-the scope ,scope)) ,thread))
         do (let ((,scope (truly-the scope ,scope))) ,@body)))

(defun what-to-leave (thread)
  "The outermost scope whose body THREAD, which is running, is to leave, or THREAD itself, but
nothing outside of what it is leaving; NIL if there is none."
  (let ((target nil))
    (do-own-scopes (scope thread)
      (case (scope-body scope)
        (:wanted (setf target scope))
        (:leaving (return-from what-to-leave target))))
    (if (and (fiber-p thread)
             (= (logand (logior +cancelled+ +told+ +leaving+) (fiber-flags thread)) +cancelled+))
        thread
        target)))

(defun begin-to-leave (thread target)
  "THREAD, which is running, is about to be unwound to TARGET, one of its scopes, or to its end."
  (do-own-scopes (scope thread)
    (setf (scope-body scope) :leaving)
    (when (eq scope target) (return-from begin-to-leave nil)))
  (when (fiber-p thread) (set-fiber-flag thread +leaving+)))

(defun leave-what-is-cancelled (thread)
  "If THREAD, which is running, is to leave something, and can here, do it."
  (when (and *cancellable* *interrupts-enabled* (not (logtest *foreign-frames* +frames-to-keep+)))
    ;; Before the look: who cancels sets it afterwards.
    (when (fiber-p thread) (clear-fiber-flag thread +to-leave+))
    (let ((target (what-to-leave thread)))
      (when target
        (if (scope-p target) (leave-body target thread) (leave-fiber thread))))))

(defun leave-fiber (fiber)
  (let ((condition (make-condition 'fiber-cancelled :thread fiber :scope nil)))
    (set-fiber-flag fiber +told+)
    (look-again fiber)
    (tell condition)
    (begin-to-leave fiber nil)
    (setf (fiber-failure fiber) condition)
    (throw 'sb-thread::%abort-thread nil)))

(defun leave-body (scope owner)
  (setf (scope-body scope) :told)
  (look-again owner)
  (tell (make-condition 'fiber-cancelled :thread owner :scope scope))
  (begin-to-leave owner scope)
  (throw scope nil))

(defun tell (condition)
  (let ((*in-native-wait* nil)) ; what handlers do is not the wait
    (signal condition)))

(defun look-again (thread)
  "THREAD, which is running, may have something else to leave."
  (when (fiber-p thread) (set-fiber-flag thread +to-leave+)))

(defun leave-native-wait (&optional again)
  "The interruption of a thread that is to leave the body of a scope."
  (let ((contexts *in-native-wait*)
        (target (what-to-leave *current-thread*)))
    (cond ((or (null contexts) (null target)))
          ((= contexts (1- *free-interrupt-context-index*))
           (with-interrupts (leave-what-is-cancelled *current-thread*)))
          ((not again) (ask-again-to-leave *current-thread* target)))))

;;; The kernel restarts the wait when what has interrupted it returns.
(defun ask-again-to-leave (thread scope)
  "Interrupt THREAD now and then, from another thread, until it leaves SCOPE."
  (flet ((ask ()
           (loop for pause = 1/100 then (min 1 (* 2 pause))
                 do (fiber-sleep pause)
                 while (eq (scope-body (truly-the scope scope)) :wanted)
                 do (sb-thread:interrupt-thread thread (lambda () (leave-native-wait t))))))
    (ignore-errors (call-in-thread #'ask))))

(defmacro with-cancellable-native-wait (&body body)
  "Execute BODY, which waits and has no result that may be lost."
  `(if *scope*
       (let ((*in-native-wait* *free-interrupt-context-index*))
         (leave-what-is-cancelled *current-thread*)
         ,@body)
       (progn ,@body)))

;;; A child has failed, and its scope knew it before.
(defun see-failure-of-scope ()
  "The running thread has found a fiber that has failed: if its own scope is cancelled, that is
why."
  (when *scope* (leave-what-is-cancelled *current-thread*))
  t)

;;;; cancelling

(defun ask-to-leave (thread)
  "There is something that THREAD is to leave: let it look."
  (if (fiber-p thread)
      (without-interruptions ; unwound in between, it would leave THREAD asleep
        (set-fiber-flag thread +to-leave+)
        (unpark thread))
      (ignore-errors (sb-thread:interrupt-thread thread #'leave-native-wait))))

(declaim (ftype (sfunction (fiber) boolean) cancel-fiber))
(defun cancel-fiber (fiber)
  "Ask FIBER to leave what it does: in the wait in which it is, or which it begins next, where
interrupts are on and it is not in WITHOUT-CANCELLATION, FIBER-CANCELLED is signalled, and unless a
handler prevents that its stack is unwound; cleanup forms may wait. Where a fiber must not leave its
carrier it hears of nothing. A new fiber that is submitted later ends without calling its function.
Return true, without waiting for any of that; NIL if FIBER has been asked before or has ended."
  (ensure-waking-room 3072)
  (and (fiber-alive-p fiber)
       (without-interrupts
         (when (set-fiber-flag fiber +cancelled+)
           (ask-to-leave fiber)
           t))))

(declaim (ftype (sfunction (scope) boolean) cancel-scope))
(defun cancel-scope (scope)
  "Ask all fibers of SCOPE, those to come included, and the body of its WITH-FIBERS to leave what
they do, as CANCEL-FIBER does. WITH-FIBERS returns NIL if its body was left by that, and the values
of the body if that had returned, unless a fiber fails. In a thread that is no fiber the body hears
of it where it waits for a lock, or for another thread, or sleeps, and not where it reads or writes.
May be called from anywhere. Return true, without waiting for any of that; NIL if SCOPE was
cancelled before, or has been left."
  (cancel-for :request scope))

(defun cancel-for (reason scope)
  (ensure-waking-room 6144)
  (without-interrupts ; unwound in between, it would leave some uncancelled
    (when (and (not (logtest +closed+ (scope-population scope)))
               (null (cas (scope-reason scope) nil reason)))
      ;; First, or the body could join a child that has ended for this and not know why.
      (let ((asked (eq (cas (scope-body scope) :running :wanted) :running))
            (sb-impl::*deadline* nil))
        (cancel-children scope)
        (when asked (ask-to-leave (scope-owner scope))))
      t)))

;;; Each child goes to the end of the chain when it has been cancelled. Those that are added
;;; meanwhile see that the scope is.
(defun cancel-children (scope)
  (loop repeat (scope-alive scope)
        do (let ((child (next-child scope)))
             (when child (cancel-fiber (truly-the fiber (child-fiber (truly-the child child))))))))
