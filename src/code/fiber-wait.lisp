;;;; where a fiber may wait, for how long, and what may come between

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;;; zones: where a fiber may park, and whether it may go elsewhere

(declaim (inline zone))
(defun zone (fiber)
  "How FIBER, which is running, can wait: :FREE it can park and be resumed anywhere, :PINNED
it can park and must be resumed on this OS thread, :NATIVE it must not leave its carrier.
 - GC is inhibited: the collector would find a suspended stack that must not be seen;
 - code pages are pinned, or an arena is in use: that is the OS thread's state;
 - the allocator's mutex is held: its other users wait natively, with GC inhibited;
 - foreign code is on the stack, below a callback or a signal handler: what it holds is the OS
   thread's, and another fiber would ask that thread for it again.
In a signal handler there are addresses of the OS thread on the stack.
WITHOUT-INTERRUPTS is no zone: it is a binding, which goes with the fiber, and holds off interruptions."
  (cond ((or *gc-inhibit*
             (not (eql *gc-pin-code-pages* 0))
             (/= 0 (sap-int (sb-vm::current-thread-offset-sap sb-vm::thread-arena-slot)))
             (sb-thread:holding-mutex-p sb-vm::*allocator-mutex*)
             (logtest *foreign-frames* +below-callback+))
         :native)
        ((live-signal-context-p)
         (if (= 1 (alien-funcall (extern-alien "fiber_above_foreign_code" (function int))))
             :native
             :pinned))
        ((/= (fiber-pin-count fiber) 0) :pinned)
        (t :free)))

;;; A fiber runs at home only, while it has one. So its home changes on this carrier, to it or from
;;; it, and the carrier's count of guests has a single writer.
(declaim (inline set-home))
(defun set-home (fiber home)
  "Let HOME, this carrier or NIL, be where FIBER, which is running, is resumed. With interrupts
off."
  (unless (eq home (fiber-home fiber))
    (let ((carrier (truly-the carrier *carrier*)))
      (setf (fiber-home fiber) home)
      (if home
          (incf (carrier-guests carrier))
          (decf (carrier-guests carrier))))))

(defun prepare-zone (fiber)
  "Tell who resumes FIBER where it must be done."
  (set-home fiber (and (eq (zone fiber) :pinned) *carrier*))
  (when (/= 0 (context-word (context-of fiber) guards))
    (alien-funcall (extern-alien "fiber_rearm_guards" (function void)))))

;;; What a wait needs of the control stack, from the question whether it is possible to its end.
(defconstant waiting-room 8192)

(declaim (inline waiting-room-p ensure-waiting-room))
(defun waiting-room-p (fiber)
  (>= (- (sap-int (current-sp)) waiting-room)
      (+ (fiber-control-stack-start fiber)
         (extern-alien "fiber_control_reserve" unsigned))))

;;; A stack that overflows in the midst of a wait is unwound with the fiber in some chain, or with
;;; its predecessor forgotten.
(defun ensure-waiting-room (fiber)
  "Let FIBER, which is running, be told now if its stack is about to be exhausted."
  (unless (waiting-room-p fiber)
    (%touch (int-sap (- (sap-int (current-sp)) waiting-room)))))

(declaim (ftype (sfunction () boolean) can-park-p))
(defun can-park-p ()
  "Is a fiber running that can leave its carrier here? If it has too little stack for that, let it
be told."
  (let ((fiber (current-fiber)))
    (when (and fiber (not (eq (zone fiber) :native)))
      (ensure-waiting-room fiber)
      t)))

;;;; time

(declaim (ftype (sfunction (unsigned-byte) fixnum) nanoseconds-from-now))
(defun nanoseconds-from-now (nanoseconds)
  "The deadline that is NANOSECONDS away."
  (min (+ (fiber-now) nanoseconds) (1- most-positive-fixnum)))

(defun seconds-to-nanoseconds (seconds)
  "SECONDS, a non-negative real, in nanoseconds, rounded up; thirty years if that is less."
  (declare (type (real 0) seconds))
  (if (< seconds 1000000000)
      (values (ceiling (* (rational seconds) 1000000000)))
      (expt 10 18)))

(defun seconds-from-now (seconds)
  "The deadline that is SECONDS, a non-negative real, away."
  (nanoseconds-from-now (seconds-to-nanoseconds seconds)))

(declaim (inline deadline-passed-p))
(defun deadline-passed-p (deadline)
  (declare (type (or null fixnum) deadline))
  (and deadline (>= (fiber-now) deadline)))

(defun seconds-until (deadline)
  (/ (max 0 (- deadline (fiber-now))) 1000000000))

(defun time-left (deadline)
  "Seconds and microseconds until DEADLINE; -1 and 0, as for FUTEX-WAIT, if it is NIL."
  (if deadline
      (truncate (ceiling (max 0 (- deadline (fiber-now))) 1000) 1000000)
      (values -1 0)))

;;; DEADLINE-TIMEOUT is signalled here if the time of WITH-DEADLINE is over already.
(defun time-limit (end)
  "The deadline of a wait until END, a deadline or NIL, and true if it is that of WITH-DEADLINE,
which comes first."
  (if sb-impl::*deadline*
      (multiple-value-bind (sec usec stop-sec stop-usec deadlinep)
          (sb-impl::decode-timeout (and end (seconds-until end)))
        (declare (ignore stop-sec stop-usec))
        (if deadlinep
            (values (timeout-to-deadline sec usec) t)
            (values end nil)))
      (values end nil)))

(defmacro until-time-limit ((limit timeout) &body body)
  "Execute BODY again and again, with LIMIT bound to the deadline for what waits in it, until it
exits, or until TIMEOUT seconds are over: then return NIL. The deadline of WITH-DEADLINE is
signalled."
  (with-unique-names (end deadlinep)
    `(let ((,end (and ,timeout (seconds-from-now ,timeout))))
       (multiple-value-bind (,limit ,deadlinep) (time-limit ,end)
         (loop
           ,@body
           (when (deadline-passed-p ,limit)
             (unless ,deadlinep (return nil))
             (sb-sys:signal-deadline)
             (setf (values ,limit ,deadlinep) (time-limit ,end))))))))

;;;; interruptions: functions that others want a fiber to call

;;; They are queued in the fiber, and called by it, in order,
;;;  - where it is interrupted by the signal that is sent to its carrier, if it is mounted;
;;;  - where it has parked or yielded, when it is resumed;
;;;  - before its function, if it has not begun;
;;;  - after a foreign call, if that is what the signal has found: see runtime/fiber-foreign.c.
;;; With interrupts off it calls them when they are on again, as a thread does. So it must not be
;;; resumed without a look at the queue: all who call PARK or LEAVE call SEE-INTERRUPTIONS
;;; afterwards. What is queued when the fiber ends is dropped.

(defun next-interruption (fiber)
  (loop
    (let ((old (fiber-interruptions fiber)))
      (when (or (null old) (eq (cas (fiber-interruptions fiber) old (cdr old)) old))
        (return (car old))))))

;;; What IN-INTERRUPTION does, but for the signal mask: there may have been no signal.
(defun call-interruption (function)
  (without-interrupts
    (sb-unix::with-interrupt-bindings
      (sb-thread::without-thread-waiting-for (:already-without-interrupts t)
        (allow-with-interrupts
          (let ((*waited-for* nil)) ; what FUNCTION waits for is its own affair
            (funcall (or sb-thread::*interrupt-handler* #'funcall) function)))))))

(defun run-interruptions (fiber)
  (loop
    (let ((function (next-interruption fiber)))
      (unless function (return))
      (call-interruption function))))

(declaim (inline see-interruptions))
(defun see-interruptions (fiber)
  "Let FIBER, which is running, call what others want it to, or do so once interrupts are on."
  (when (fiber-interruptions fiber)
    (if (and *interrupts-enabled* (not (logtest *foreign-frames* +frames-to-keep+)))
        (run-interruptions fiber)
        ;; The handler is deferred until they are, or until the call that has called back returns.
        (sb-unix:raise sb-unix:sigurg))))

(define-alien-routine ("fiber_interrupt_os_thread" %interrupt-os-thread) void (tid int))

(declaim (ftype (sfunction (fiber function) boolean) queue-interruption %interrupt-fiber))
(defun queue-interruption (fiber function)
  "Let FIBER call FUNCTION when it looks. Return false if it has ended."
  (loop
    (when (= (fiber-phase-only fiber) +dead+) (return nil))
    (let ((old (fiber-interruptions fiber)))
      (when (eq (cas (fiber-interruptions fiber) old (append old (list function))) old)
        (return t)))))

(defun %interrupt-fiber (fiber function)
  "Let FIBER call FUNCTION as soon as it can. Return false if it has ended. May be called from
anywhere."
  (when (queue-interruption fiber function)
    (notify-of-interruption fiber)
    t))

;;; The interruption has been queued, by an operation that is a full barrier.
(defun notify-of-interruption (fiber)
  "Let FIBER look at its interruptions, if it is not going to do so anyway."
  (if (eq fiber *current-thread*)
      (see-interruptions fiber)
      (let ((carrier (fiber-carrier fiber)))
        (unpark fiber) ; it may be about to park
        (when carrier
          (%interrupt-os-thread
           (sb-thread::thread-os-tid
            (truly-the thread (carrier-thread (truly-the carrier carrier)))))))))

;;; Of the signal contexts that a thread has room for, interruptions take so many at most.
(defconstant max-nested-interruptions 3)

(defun handle-interruption (fiber)
  "What the handler of SIGURG does on the stack of FIBER. One at a time: the next interrupts this
one if it enables interrupts or exits non-locally, as in a thread."
  (note-interruptions-of-carrier (truly-the carrier *carrier*))
  (if (> *free-interrupt-context-index* max-nested-interruptions)
      (interrupt-later fiber)
      (let ((function (next-interruption fiber)))
        (when (fiber-interruptions fiber) (sb-unix:raise sb-unix:sigurg))
        (when function (call-interruption function)))))

;;; Who comes out of a handler by a non-local exit is interrupted before the handler's context
;;; is gone. The process ends when there is no room for another one.
(defun interrupt-later (fiber)
  "Let FIBER, which is running, look at its interruptions again in a millisecond."
  (when (fiber-interruptions fiber)
    (let ((alarm (make-alarm fiber nil)))
      (setf (alarm-function alarm) (constantly nil))
      (enter-time (nearest-scheduler fiber) alarm (nanoseconds-from-now 1000000)))))

;;; System threads have SIGALRM blocked. Who leaves a handler by a non-local exit has unblocked all.
(define-alien-routine ("fiber_block_timer_signal" block-timer-signal) void)

;;;; interruptions of carriers

;;; A carrier is a thread, and may be interrupted as any other. It calls what it is to call on its
;;; own stack, between two fibers, where *CURRENT-THREAD*, bindings and catch tags are its own.

(defun note-interruptions-of-carrier (carrier)
  "Let CARRIER go to its own stack when the fiber on it is left, if there is something to call
there."
  (let ((scheduler (carrier-scheduler carrier)))
    (when (and scheduler (sb-thread::thread-interruptions (carrier-thread carrier)))
      (setf (scheduler-turns scheduler) +turns-per-poll+))))

;;;; callbacks

;;; A deadline ends the wait of who is called back by unwinding, and foreign code with it.
(defmacro without-deadline-of-caller (&body body)
  "Execute BODY, below a callback, without the deadline of a fiber that has called foreign code."
  `(let ((sb-impl::*deadline* (if (logtest *foreign-frames* +below-callback+)
                                  nil
                                  sb-impl::*deadline*)))
     ,@body))

;;;; the simplest things to wait for

(defun park-until (deadline &optional (reason :sleep))
  "Park until DEADLINE, or for ever if it is NIL. Interruptions run, and the wait goes on."
  (let ((fiber (truly-the fiber *current-thread*)))
    ;; Once at least: (SLEEP 0) in a loop lets others run.
    (loop
      (without-interruptions (park reason deadline))
      (see-interruptions fiber)
      (when (deadline-passed-p deadline) (return)))))

(defun sleep-in-fiber (nanoseconds)
  "What SLEEP does in a fiber."
  (park-until (nanoseconds-from-now nanoseconds)))

;;; A yield when nobody else is queued costs a look around, which is more than a call: it is put
;;; off.
(defun turn-over-p (carrier overdraft)
  (declare (carrier carrier) (fixnum overdraft))
  (let ((scheduler (carrier-scheduler carrier))
        (left (+ (carrier-budget carrier) overdraft)))
    (and (<= left 0)
         (or (<= left (* -32 +turn+))
             (null scheduler)
             (> (run-queue-length (scheduler-queue scheduler)) 0)
             (injector-first (fiber-group-injector (truly-the fiber-group (carrier-group carrier))))))))

(defun take-turn (cost &optional (overdraft 0))
  "Called in a fiber before a call that perhaps will not wait, for COST: if what is left of its
turn, and OVERDRAFT, is used up, and others wait for theirs, yield first."
  (declare (fixnum cost overdraft))
  (when (turn-over-p (truly-the carrier *carrier*) overdraft)
    (fiber-yield))
  (decf (carrier-budget (truly-the carrier *carrier*)) cost))

(declaim (ftype (sfunction () null) fiber-yield))
(defun fiber-yield ()
  "Let the other fibers that can run do so before this one goes on. In a thread that runs
no fiber, yield the processor."
  (cond ((can-park-p)
         (let ((fiber (truly-the fiber *current-thread*)))
           (without-interruptions
             (prepare-zone fiber)
             (leave :yield))
           (see-interruptions fiber)))
        (t (alien-funcall (extern-alien "thread_yield" (function int)))))
  nil)
