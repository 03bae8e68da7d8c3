;;;; fibers: threads of control that a few carrier threads run in turn

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;;; What to know before reading on
;;;;
;;;; A *fiber* is a thread with stacks of its own that no OS thread is tied to. It is
;;;; *mounted* while a carrier runs it, *parked* while it waits for something, and *runnable*
;;;; in between. It parks where a thread would block in the kernel.
;;;;
;;;; A *carrier* is an OS thread that runs fibers. A *scheduler* is what it works from: a
;;;; run queue, a deadline heap, a poller. They are two things because a carrier may be stuck in
;;;; the kernel with a fiber on it; its scheduler is then served by a spare carrier. A *group* is
;;;; some schedulers that steal from each other, and an *injector*, the queue of what
;;;; comes from outside.
;;;;
;;;; The files beside this one, each of which can be read and tested alone:
;;;;   fiber-lock     the spin lock under all that follows
;;;;   fiber-deque    the run queue
;;;;   fiber-injector the queue of what comes from outside
;;;;   fiber-timers   the deadline heap
;;;;   fiber-stack    stacks, and what a fiber starts with; runtime/fiber.c for the collector
;;;;   fiber-poller   who waits for which descriptor
;;;;   fiber-search   where a carrier looks for work, and how it sleeps
;;;;   fiber-wait     where a fiber may wait, deadlines, interruptions
;;;;   fiber-carrier  what becomes of a scheduler whose carrier blocks
;;;;   fiber-parking  who waits for which word: mutexes and all that is made of them
;;;;   fiber-io       what stands in for the system calls that wait
;;;;   fiber-life     a fiber from its making to its end, as users see it
;;;;   fiber-group    groups of carriers, as users see them
;;;;   fiber-debug    errors that nothing handles, the foreground, Ctrl-C
;;;;   fiber-exit     the end of the process, and others made from it: EXIT, fork, saving
;;;;   fiber-inspect  looking into a fiber from outside
;;;;   fiber-describe what DESCRIBE and INSPECT tell
;;;;   fiber-alarm    timers of fibers
;;;;   fiber-pool     threads that make the calls which cannot park
;;;;   fiber-monitor  who sees that a carrier is stuck, and takes its scheduler away
;;;;   fiber-process  waiting for child processes
;;;; The switch itself is assembly/x86-64/fiber.
;;;;
;;;; The phases of a fiber, in its slot PHASE, moved by compare-and-swap:
;;;;
;;;;   new      -> parking   who submits or terminates it     (nobody else does so now)
;;;;   parking  -> active    who submits it                   (and queues it)
;;;;   parking  -> new       the same, if there is no stack or the group is finished
;;;;   active   -> parking   the fiber, about to leave        (no permit there)
;;;;   parking  -> parked    its successor on the carrier     (no permit there)
;;;;   parking  -> active    its successor, finding a permit  (and queues it, takes the permit)
;;;;   parked   -> active    who unparks it                   (and queues it)
;;;;   active   -> dead      the fiber, at its end
;;;;   parking  -> dead      who terminates it while it is new
;;;;
;;;; The *permit* is a bit beside the phase. UNPARK sets it unless the fiber is parked, or has
;;;; not begun; PARK consumes it instead of parking. So an unpark that comes before the park is
;;;; not lost. ACTIVE covers runnable and mounted, which differ in the slot CARRIER only: a yield
;;;; changes no phase.
;;;;
;;;; Why it is the *successor* who ends the parking: until the switch has saved the context, the
;;;; fiber still runs on its stack, and a carrier that resumed it then would run on the same stack.
;;;; So the one who leaves notes in the carrier who he is and what is to become of him, and whoever
;;;; runs next on that carrier, fiber or scheduler, carries it out (AFTER-SWITCH). The same goes
;;;; for a yield (queue me) and an end (free my stack).
;;;;
;;;; Waking carriers. A carrier without work looks everywhere: its poller, the injector, the
;;;; other queues. Then it enters its poller's number in the group's IDLE mask, *looks everywhere
;;;; again*, and sleeps in its poller until the nearest deadline. Whoever makes a fiber runnable
;;;; first queues it, then reads IDLE; if a bit is set there and no carrier is already
;;;; searching, he clears a bit and wakes that carrier. Between "queue, then read IDLE" and
;;;; "enter IDLE, then look" there is a full barrier on both sides (a compare-and-swap), so that one
;;;; of them sees the other: no wake-up is lost, and no carrier wakes by time only to look. One
;;;; searcher is enough, since it wakes another when it finds something and more is left.
;;;;
;;;; Interrupting. Who wants a fiber to call a function queues that in the fiber, and then
;;;; looks whether it is mounted. If so he sends a signal to its carrier, whose handler runs
;;;; what is queued for the fiber that it finds there. If not, the fiber is resumed later, and looks
;;;; then. Again there is a full barrier on both sides: between "queue, then read CARRIER"
;;;; a compare-and-swap, between "write CARRIER, then look" what AFTER-SWITCH does. A signal
;;;; that finds scheduler code or another fiber does nothing, and nothing is lost by it.
;;;;
;;;; Designs that were refused:
;;;;  - a parked fiber's condition as a predicate that the scheduler tests each turn: costs
;;;;    grow with the number of parked fibers, and wake-ups come a turn late;
;;;;  - a single queue and poller for all carriers: at two carriers the lock is already the
;;;;    most expensive thing in a switch;
;;;;  - handing each new fiber to a carrier that is woken for it: on a busy server it is a
;;;;    system call for each fiber;
;;;;  - a scheduler fiber on each carrier to which all switch: two switches for each yield,
;;;;    where going from fiber to fiber needs one.
;;;;
;;;; Scheduler code runs with interrupts off, on the stack of whoever leaves or of the carrier. It
;;;; takes no mutex, calls no generic function, signals nothing and makes no thread: a parked
;;;; fiber of this very carrier may hold any lock. What breaks this rule and has to wait ends the
;;;; process, see SCHEDULER-BUG. The handlers of RUN-PENDING-HANDLERS are no scheduler code.
;;;;
;;;; Fairness. A scheduler serves its queue in order; after at most T = +TURNS-PER-POLL+ fibers it
;;;; looks at its deadlines, its poller and the injector. It does so sooner if a millisecond is
;;;; over: in the next switch if fibers compute all the time, at the latest in the eighth
;;;; (+TURNS-PER-READING+) if they have just begun to. All that it finds is queued behind what waits
;;;; already, but for one fiber: the first of the injector runs next, even if the queue has no room.
;;;; So a fiber in a queue runs after the Q < 256 in front of it and at most Q/T + 1 of those, or Q
;;;; + 1 if each computes for a millisecond; one in an injector behind P others after (P + 1) * (T +
;;;; 1) turns of a scheduler. Of the deadlines that have come, and of the reports, it serves at a
;;;; look as many as fill half of the room in the queue, R = (256 - Q) / 2 rounded down, but at
;;;; least one: however many come together, they hold up others for no longer than 128 wake-ups
;;;; take. A deadline that has come behind D others is served at the look number D/R + 1, that is
;;;; within (D/R + 1) * (T + 1) turns. A scheduler whose queue is empty looks at once, and one that
;;;; has left deadlines does not sleep. This is the worst case, of fibers that wake each other and
;;;; so fill the queue for ever. One that yields while the injector holds any goes to its end, so
;;;; that the queue drains, and N fibers that only yield all get their turn within 2 * N + 256 turns
;;;; of a single carrier.
;;;;
;;;; A fiber that always finds its descriptors ready would never park: before its second read in a
;;;; turn it yields if others wait for theirs (TAKE-TURN), after 32 writes as well. So of clients
;;;; that ask again as soon as they are answered none is served twice while another is not, and when
;;;; there are many the next question has come when its turn has. One that accepts connections,
;;;; which the kernel drops when too many wait, may accept +TURN+ of them.

;;;; phases

(defconstant +new+ 0)
(defconstant +active+ 1)
(defconstant +parking+ 2)
(defconstant +parked+ 3)
(defconstant +dead+ 4)
(defconstant +permit+ 8)

(declaim (inline fiber-phase-only phase-becomes-p))
(defun fiber-phase-only (fiber)
  (logand (fiber-phase fiber) 7))

(defun phase-becomes-p (fiber old new)
  (= (cas (fiber-phase fiber) old new) old))

;;;; schedulers, carriers, groups

(defconstant +turns-per-poll+ 61)
;;; Reading the cycle counter takes a sixth of the time of a switch, and so it is not read in each.
(defconstant +turns-per-reading+ 8)
;;; Set by each group at its start. Where cycle counters do not agree, or run at another speed by
;;; now, a scheduler looks around too often, or after +TURNS-PER-POLL+ fibers.
(deftype cycles-per-millisecond () '(unsigned-byte 40))
(declaim (type cycles-per-millisecond *cycles-per-millisecond*))
(define-load-time-global *cycles-per-millisecond* (1- (ash 1 40)))
;;; What a fiber may spend before it lets others go on.
(defconstant +turn+ 1024)
(defconstant +call-cost+ 32)
(defconstant +accept-cost+ 1)

(defstruct (scheduler (:constructor %make-scheduler (group poller))
                      (:copier nil))
  (group nil :type t :read-only t)
  (poller nil :type poller :read-only t)
  (queue (make-run-queue) :type run-queue :read-only t)
  (deadlines (make-deadline-heap) :type deadline-heap :read-only t)
  (turns 0 :type fixnum)
  ;; The cycle count when it last looked around; when the counter was last read, and in which turn
  ;; it is to be read again.
  (looked 0 :type word)
  (read 0 :type word)
  (next-reading 1 :type fixnum)
  ;; How often it has taken work from others.
  (steals 0 :type fixnum))
(declaim (freeze-type scheduler))

(defstruct (carrier (:constructor %make-carrier (group &optional (context 0) scheduler))
                    (:copier nil))
  (group nil :type t :read-only t)
  (thread nil)
  (context 0 :type word :read-only t)
  ;; What it works from. A carrier without one is a spare, or runs the fiber that blocked it.
  (scheduler nil :type (or null scheduler))
  ;; Odd while it uses its scheduler, even while a fiber or a handler runs: then the monitor may
  ;; take the scheduler away. Grows by two in each switch.
  (turn 1 :type (and unsigned-byte fixnum))
  ;; What the monitor has seen: the turn, since when, and the processor time used by then.
  (seen-turn 0 :type (and unsigned-byte fixnum))
  (seen-since 0 :type fixnum)
  (seen-time 0 :type fixnum)
  ;; The turn in which it was found to be stuck.
  (stuck-turn 0 :type (and unsigned-byte fixnum))
  ;; Fibers that only this carrier may run, a chain through NEXT, last in first.
  (inbox nil)
  ;; How many fibers have it as their home. Written by itself, while it runs one of them: see
  ;; SET-HOME.
  (guests 0 :type index)
  ;; :LISTED if it is a spare, :TAKEN once it has been given a scheduler, until it has seen that,
  ;; :RETIRED if it is to end.
  (spare nil :type symbol)
  ;; What a spare sleeps on: 1 when there may be something for it.
  (alarm 0 :type word)
  ;; True while it runs handlers on its own stack, which may wait.
  (handling nil :type boolean)
  ;; What is left of the mounted fiber's +TURN+.
  (budget 0 :type fixnum)
  ;; Who was left by the last switch on this carrier, and what is to become of it.
  (predecessor nil)
  (action nil))
(declaim (freeze-type carrier))

(defstruct (fiber-group (:constructor %make-fiber-group (name))
                        (:copier nil))
  "Carriers, and the fibers that they run."
  (name nil :type (or null string) :read-only t)
  (schedulers #() :type simple-vector)
  (carriers '() :type list)
  (injector (make-injector) :type injector :read-only t)
  ;; Bits of the pollers of sleeping schedulers.
  (idle 0 :type (unsigned-byte 62))
  (searching 0 :type word)
  ;; How many fibers are alive, and whether there may be more: see fiber-life.lisp.
  (population 0 :type word)
  ;; Places for spare carriers, and for schedulers that found none; 0 is a free place.
  (spares (make-array 256 :initial-element 0) :type simple-vector :read-only t)
  (orphans (make-array max-pollers :initial-element 0) :type simple-vector :read-only t)
  ;; What the monitor sleeps on, who sees to it that there is a spare.
  (monitor-alarm 0 :type word)
  ;; 1 while it sleeps until somebody says that a carrier is awake
  (monitor-asleep 0 :type word)
  (monitor nil)
  ;; How many carriers have been found stuck; the turns of those that have ended.
  (stuck 0 :type fixnum)
  (past-turns 0 :type (and unsigned-byte fixnum))
  ;; Threads of spares that have been told to end.
  (retired '() :type list)
  ;; How often the monitor has looked since it found one stuck.
  (quiet-looks 0 :type fixnum)
  ;; :RUNNING, :STOPPED or :FINISHED, see fiber-group.lisp
  (state :running :type symbol))
(declaim (freeze-type fiber-group))

(defconstant +closed+ (ash 1 32))
(defconstant +entry+ (ash 1 33))

(declaim (inline fiber-group-alive))
(defun fiber-group-alive (group)
  "How many fibers of GROUP were submitted and have not ended."
  (ldb (byte 32 0) (fiber-group-population group)))

(defmethod print-object ((group fiber-group) stream)
  (print-unreadable-object (group stream :type t :identity t)
    (format stream "~@[~A ~]~(~A~), ~D carrier~:P, ~D fiber~:P"
            (fiber-group-name group) (fiber-group-state group)
            (length (fiber-group-schedulers group)) (fiber-group-alive group))))

(declaim (inline in-fiber-p current-fiber))
(defun in-fiber-p ()
  (fiber-p *current-thread*))

(declaim (ftype (sfunction () (or null fiber)) current-fiber))
(defun current-fiber ()
  "The fiber that is running, or NIL in a thread that runs none."
  (let ((thread *current-thread*))
    (and (fiber-p thread) thread)))

;;; WITHOUT-INTERRUPTS for code that does not exit non-locally: one binding instead of
;;; two, and no UNWIND-PROTECT.
(defmacro without-interruptions (&body body)
  `(multiple-value-prog1 (let ((*interrupts-enabled* nil)) ,@body)
     (when (and *interrupt-pending* *interrupts-enabled*)
       (sb-unix::receive-pending-interrupt))))

;;; The kernel's own operations. All others go through the parking lot.
(declaim (inline %futex-wait %futex-wake))
(defun %futex-wait (address expected to-sec to-usec)
  (alien-funcall (extern-alien "futex_wait"
                               (function int unsigned (unsigned 32) long unsigned-long))
                 address expected to-sec to-usec))
(defun %futex-wake (address n)
  (alien-funcall (extern-alien "futex_wake" (function int unsigned unsigned-long)) address n))

(define-structure-slot-addressor carrier-alarm-address :structure carrier :slot alarm)
(define-structure-slot-addressor fiber-group-monitor-alarm-address
  :structure fiber-group :slot monitor-alarm)

;;;; making a fiber runnable

(define-load-time-global *force-migration* nil
  "For tests: true if a fiber is to be resumed by another carrier than the last one, where its group
has more than one, and it is not pinned.")

(defmacro push-chain (place fiber)
  "Atomically put FIBER in front of the chain at PLACE."
  `(loop (let ((head ,place))
           (setf (fiber-next ,fiber) head)
           (when (eq (cas ,place head ,fiber) head) (return)))))

(defmacro take-chain (place)
  "Atomically take the whole chain at PLACE, and return it, first in first."
  `(when ,place
     (let ((chain (loop (let ((head ,place))
                          (when (eq (cas ,place head nil) head) (return head)))))
           (reversed nil))
       (loop while chain
             do (let ((fiber (truly-the fiber chain)))
                  (setf chain (fiber-next fiber)
                        (fiber-next fiber) reversed
                        reversed fiber)))
       reversed)))

(defmacro do-chain ((fiber chain) &body body)
  "Execute BODY with each FIBER of CHAIN, which has been taken out of it, and may be put into
another one."
  (with-unique-names (rest)
    `(let ((,rest ,chain))
       (loop while ,rest
             do (let ((,fiber (truly-the fiber ,rest)))
                  (setf ,rest (fiber-next ,fiber)
                        (fiber-next ,fiber) nil)
                  ,@body)))))

(defun wake-carrier (carrier)
  "Let CARRIER look at its inbox, or at the scheduler that it has been given."
  (declare (carrier carrier))
  (let ((scheduler (carrier-scheduler carrier)))
    (when scheduler (wake-poller (scheduler-poller scheduler)))
    ;; Not an alternative: it may be losing or getting a scheduler just now.
    (when (= (cas (carrier-alarm carrier) 0 1) 0)
      (with-pinned-objects (carrier)
        (%futex-wake (carrier-alarm-address carrier) 1)))))

(defun wake-one-idle (group)
  "Wake a carrier of GROUP that sleeps, if one does."
  (declare (fiber-group group))
  (loop
    (let ((idle (fiber-group-idle group)))
      (when (= idle 0) (return))
      (let ((bit (1- (integer-length (logand idle (- idle))))))
        (when (eq (cas (fiber-group-idle group) idle (logandc2 idle (ash 1 (truly-the (mod 62) bit)))) idle)
          ;; If the group has ended meanwhile there is none, or another group's, which looks and
          ;; sleeps again.
          (let ((poller (svref *pollers* bit)))
            (when (poller-p poller) (wake-poller poller)))
          (return))))))

(declaim (inline call-for-help))
(defun call-for-help (group)
  ;; The caller has queued a fiber, and then executed a full barrier.
  (declare (fiber-group group))
  (when (and (/= (fiber-group-idle group) 0) (= (fiber-group-searching group) 0))
    (wake-one-idle group)))

(defun inject (group fiber)
  (injector-put (fiber-group-injector group) fiber)
  (barrier (:memory)) ; what gives the lock back is a plain store
  (call-for-help group))

;;; A group of one carrier has nowhere else to go.
(declaim (inline migration-forced-p))
(defun migration-forced-p (group)
  (and *force-migration*
       (> (length (fiber-group-schedulers group)) 1)))

(defun take-migrant (group)
  "Where migration is forced: remove a fiber from the injector of GROUP that this carrier has not
run last, and return it, or NIL."
  (declare (fiber-group group))
  (let ((injector (fiber-group-injector group)))
    (when (and (injector-first injector) (migration-forced-p group))
      (let ((fiber (injector-take-migrant injector *carrier*)))
        ;; Whoever was woken for what is left may not be the one who may run it.
        (when (injector-first injector) (wake-one-idle group))
        fiber))))

;;; A run queue has one owner, the carrier that serves it. Here it says that it is
;;; going to use the queue, and when that is over, see fiber-monitor.lisp. With interrupts off.
(declaim (inline begin-scheduling end-scheduling))
(defun begin-scheduling (carrier)
  (setf (carrier-turn carrier) (truly-the (and unsigned-byte fixnum) (1+ (carrier-turn carrier)))))
(defun end-scheduling (carrier)
  (setf (carrier-turn carrier) (truly-the (and unsigned-byte fixnum) (1+ (carrier-turn carrier)))))

(defun change-turn (carrier)
  (end-scheduling carrier)
  (begin-scheduling carrier))

(defmacro with-own-scheduler (&body body)
  "Execute BODY while nobody takes the scheduler of this carrier, if it is one, away."
  `(let ((carrier *carrier*))
     (if carrier
         (let* ((carrier (truly-the carrier carrier))
                (turn (carrier-turn carrier)))
           (setf (carrier-turn carrier) (logior turn 1))
           (prog1 (progn ,@body)
             (setf (carrier-turn carrier) turn)))
         (progn ,@body))))

(declaim (inline my-scheduler))
(defun my-scheduler (group)
  "The scheduler that this thread serves, if it is one of GROUP."
  (let ((carrier *carrier*))
    (when carrier
      (let ((scheduler (carrier-scheduler (truly-the carrier carrier))))
        (when (and scheduler (eq (scheduler-group scheduler) group)) scheduler)))))

(defun make-runnable (fiber)
  "Queue FIBER, which is ACTIVE, in no queue, and has left its stack. With interrupts off."
  (declare (fiber fiber))
  (let ((home (fiber-home fiber))
        (group (truly-the fiber-group (fiber-group fiber))))
    (if home
        (let ((home (truly-the carrier home)))
          (push-chain (carrier-inbox home) fiber)
          (wake-carrier home))
        (cond ((with-own-scheduler
                 (let ((mine (my-scheduler group)))
                   (and mine (not *force-migration*)
                        (run-queue-put (scheduler-queue mine) fiber))))
               (barrier (:memory))
               (call-for-help group))
              (t (inject group fiber))))))

;;;; parking and unparking

(declaim (ftype (sfunction (fiber) null) unpark))
(defun unpark (fiber)
  "End the parking of FIBER, or the next one, if it is not parked now. May be called from anywhere."
  (without-interruptions
    (loop
      (let ((phase (fiber-phase fiber)))
        (cond ((= phase +parked+)
               (when (phase-becomes-p fiber +parked+ +active+)
                 (make-runnable fiber)
                 (return)))
              ((or (= phase +dead+) (= phase +new+)) (return))
              ;; Also if the permit is there already: this is the full barrier between what
              ;; the caller has written for the fiber and its next look at it.
              ((phase-becomes-p fiber phase (logior phase +permit+)) (return))))))
  nil)

(declaim (inline take-permit))
(defun take-permit (fiber)
  "Consume the permit of the running FIBER. Return false if there is none."
  (phase-becomes-p fiber (logior +active+ +permit+) +active+))

(defun requeue (fiber)
  "Queue FIBER, which has yielded, behind those who wait for a place in a queue as well."
  (declare (fiber fiber))
  (let ((group (truly-the fiber-group (fiber-group fiber))))
    (if (and (injector-first (fiber-group-injector group)) (null (fiber-home fiber)))
        (inject group fiber)
        (make-runnable fiber))))

(defun finish-parking (fiber)
  (unless (phase-becomes-p fiber +parking+ +parked+)
    (setf (fiber-phase fiber) +active+) ; nobody moves a phase that has a permit
    (make-runnable fiber)))

(declaim (inline after-switch))
(defun after-switch ()
  "Carry out what the stack that was left wanted. All of this contains a full barrier: who looks
for interruptions next has been seen to be mounted by those who have queued none yet."
  (let* ((carrier (truly-the carrier *carrier*))
         (predecessor (carrier-predecessor carrier)))
    (setf (carrier-budget carrier) +turn+)
    (if predecessor
        (let ((fiber (truly-the fiber predecessor))
              (action (carrier-action carrier)))
          (setf (carrier-predecessor carrier) nil)
          (cond ((eq action :yield) (requeue fiber))
                ((eq action :park) (finish-parking fiber))
                (t (free-stack fiber)
                   (barrier (:memory)))))
        (barrier (:memory)))))

(declaim (inline mount))
(defun mount (carrier from fiber)
  "Leave the stack whose context is FROM for that of FIBER. Returns when FROM is switched to."
  (setf (fiber-carrier fiber) carrier)
  (when (= (context-word (context-of fiber) control-stack-pointer)
           (context-word (context-of fiber) control-stack-end))
    (prepare-stack fiber))
  (%switch-context from (context-of fiber)))

;;; Where nothing can be signalled.
(defmacro scheduler-bug (message)
  `(with-pinned-objects (,(coerce message 'simple-base-string))
     (%scheduler-bug (vector-sap ,(coerce message 'simple-base-string)))))

(defun %scheduler-bug (message)
  "End the process, or enter the runtime's monitor."
  (alien-funcall (extern-alien "lose" (function void system-area-pointer)) message))

(declaim (inline live-signal-context-p))
(defun live-signal-context-p ()
  (/= *free-interrupt-context-index* 0))

(declaim (inline cycles-since next-in-turn))
(defun cycles-since (before now)
  (declare (word before now))
  (logand (- now before) most-positive-word)) ; many if another processor's counter is behind

(declaim (ftype (sfunction (scheduler fixnum) boolean) time-to-look-p))
(defun time-to-look-p (scheduler turns)
  "True if SCHEDULER, in whose turn number TURNS the cycle counter is to be read, is to look around.
If not, the counter is read again in the next turn, if as many as are made without reading could
take too long."
  (let* ((now (%cycle-count))
         (used (cycles-since (scheduler-looked scheduler) now))
         (limit *cycles-per-millisecond*))
    (setf (scheduler-read scheduler) now)
    (or (> turns +turns-per-poll+)
        (> used limit)
        (let* ((used (truly-the cycles-per-millisecond used))
               (left (truly-the cycles-per-millisecond (- limit used)))
               (fast (<= (* +turns-per-reading+ used) (* (truly-the (mod 64) turns) left))))
          (setf (scheduler-next-reading scheduler)
                (min (1+ +turns-per-poll+) (+ turns (if fast +turns-per-reading+ 1))))
          nil))))

(defun next-in-turn (carrier scheduler)
  "The next fiber to run, or NIL if it is time to look around, or nothing is queued."
  (unless (or (let ((turns (incf (scheduler-turns scheduler))))
                (and (>= turns (scheduler-next-reading scheduler))
                     (time-to-look-p scheduler turns)))
              (carrier-inbox carrier))
    (or (run-queue-take (scheduler-queue scheduler))
        (and *force-migration*
             (take-migrant (truly-the fiber-group (scheduler-group scheduler)))))))

(declaim (ftype (sfunction (symbol) null) leave))
(defun leave (action)
  "Leave the running fiber, for the next runnable one or else for the carrier. ACTION says
what is to become of the fiber: :YIELD, :PARK or :END. With interrupts off. Returns when
it is resumed."
  (let* ((carrier (truly-the carrier *carrier*))
         (fiber (truly-the fiber *current-thread*))
         (scheduler (progn (begin-scheduling carrier) (carrier-scheduler carrier)))
         (masked (and (live-signal-context-p) (put-back-signal-mask)))
         (next (and scheduler (next-in-turn carrier scheduler))))
    (setf (carrier-predecessor carrier) fiber
          (carrier-action carrier) action
          (fiber-left fiber) (if scheduler (scheduler-read scheduler) (%cycle-count))
          (fiber-carrier fiber) nil)
    (when (and *force-migration* (neq action :end)) (setf (fiber-last-carrier fiber) carrier))
    (if next
        (mount carrier (context-of fiber) (truly-the fiber next))
        (%switch-context (context-of fiber) (int-sap (carrier-context carrier))))
    (after-switch)
    (end-scheduling (truly-the carrier *carrier*))
    (when masked (restore-signal-mask))
    nil))

;;; A handler runs with signals blocked, until it enables interrupts. What runs while it is
;;; parked must not: it would receive no signal, and the runtime gives up when it finds
;;; interrupts enabled and signals blocked.
(defun put-back-signal-mask ()
  "Restore the signal mask of the code that the handlers on the stack interrupted, and return true
if RESTORE-SIGNAL-MASK must be called when the fiber goes on."
  (= 1 (alien-funcall (extern-alien "fiber_put_back_signal_mask" (function int)))))

(defun restore-signal-mask ()
  (alien-funcall (extern-alien "fiber_restore_signal_mask" (function void))))

(declaim (ftype (sfunction (t (or null fixnum)) null) park))
(defun park (reason deadline)
  "Park the running fiber until it is unparked or DEADLINE comes, which is a time of FIBER-NOW
or NIL. May return early for no reason the caller knows of: he looks and parks again. REASON is
what the fiber waits for, for those who look at it from outside. With interrupts off."
  (let ((fiber (truly-the fiber *current-thread*)))
    (setf (fiber-wait-reason fiber) reason)
    (prepare-zone fiber)
    (when deadline (enter-deadline fiber deadline))
    (cond ((phase-becomes-p fiber +active+ +parking+) (leave :park))
          ((take-permit fiber))
          (t (scheduler-bug "fiber scheduler code parks the fiber that is leaving")))
    (when deadline (heap-remove fiber))
    (setf (fiber-wait-reason fiber) nil)))

(defun enter-deadline (fiber deadline)
  (enter-time (nearest-scheduler fiber) fiber deadline))

(defun enter-time (scheduler entry time)
  "Let SCHEDULER serve ENTRY, a fiber or an alarm, at TIME."
  (heap-insert (scheduler-deadlines scheduler) entry time)
  ;; Who serves another one may be asleep until a later time.
  (let ((carrier *carrier*))
    (unless (and carrier (eq scheduler (carrier-scheduler (truly-the carrier carrier))))
      (wake-poller (scheduler-poller scheduler)))))

(defun nearest-scheduler (fiber)
  "The scheduler in whose heap a deadline of FIBER goes: its carrier's, or any if that has none."
  (let ((carrier (truly-the carrier *carrier*)))
    (or (carrier-scheduler carrier)
        (svref (fiber-group-schedulers (truly-the fiber-group (fiber-group fiber))) 0))))

;;;; the work of a carrier

(declaim (inline handlers-wait-p))
(defun handlers-wait-p ()
  "Is there something that this OS thread is to call as a thread?"
  (or *interrupt-pending* (sb-thread::thread-interruptions *current-thread*)))

(defun run-on-carrier (carrier fiber)
  "Run FIBER, and those that follow without returning here."
  (mount carrier (int-sap (carrier-context carrier)) fiber)
  (after-switch))

(defun run-inbox (carrier)
  (do-chain (fiber (take-chain (carrier-inbox carrier)))
    (run-on-carrier carrier fiber)))

;;; Handlers that were deferred while the scheduler ran, and what others want this OS thread
;;; to call. They run on the carrier's own stack, where a wait for a lock is a native one that
;;; is announced.
(defun run-pending-handlers (carrier)
  (when (handlers-wait-p)
    (setf (carrier-handling carrier) t)
    (end-scheduling carrier)
    (catch 'sb-impl::%end-of-the-world
      (unless (eq :done (catch 'sb-thread::%abort-thread (receive-signals) :done))
        ;; Fibers that are pinned to this carrier could never run again.
        (warn "~@<~S runs fibers and is not ended by this; FINISH-FIBERS ends it.~:@>"
              *current-thread*)))
    (when *exit-in-progress* (exit-by-thread)) ; SIGTERM, for instance
    (alien-funcall (extern-alien "fiber_reset_carrier_guard" (function void)))
    (begin-scheduling carrier)
    (setf (carrier-handling carrier) nil)))

(defun receive-signals ()
  (let ((*interrupts-enabled* t))
    (when *interrupt-pending* (sb-unix::receive-pending-interrupt))
    (when (sb-thread::thread-interruptions *current-thread*)
      (sb-unix:raise sb-unix:sigurg))))

(defun serve-scheduler (carrier)
  "Run fibers until CARRIER is left without a scheduler or its group is stopped."
  (loop
    (run-inbox carrier)
    (let ((scheduler (carrier-scheduler carrier)))
      (unless scheduler (return))
      (let ((fiber (search-for-work scheduler)))
        (cond (fiber (run-on-carrier carrier fiber))
              ((eq (fiber-group-state (carrier-group carrier)) :stopped) (return))
              (t (sleep-in-poller carrier scheduler)))))
    (run-pending-handlers carrier)))
