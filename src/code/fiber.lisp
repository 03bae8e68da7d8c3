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
;;;; The rooms of this house are the files of the folder fiber/, in the order in which they are
;;;; loaded. Those with a star need no scheduler, and can be read and tested alone.
;;;;   structs        the fiber, which is a thread, and what the files of threads need of it
;;;;   foreign        frames of foreign code on a stack, and which of them may be left
;;;;   spinlock    *  the lock under all that follows
;;;;   lines          structures and stores for what each switch writes
;;;;   run-queue   *  the queue of a scheduler, from which others steal
;;;;   injector    *  the queue of what comes from outside
;;;;   alarm          what a timer has in a deadline heap
;;;;   deadlines   *  the heap of the fibers and alarms that are to be served at some time
;;;;   stack       *  stacks, and what a fiber starts with; runtime/fiber-stack.c for where they lie
;;;;   poller      *  how readiness is found out; runtime/fiber-poller.c for epoll
;;;;   waiter-map  *  which fibers wait for which descriptor
;;;;   readiness   *  descriptors that are registered once, and what was reported meanwhile
;;;;   scheduler      the structures of schedulers, carriers and groups
;;;;   headroom       how much of the stack must be left for a wait, or a wake-up
;;;;   population     how many fibers a group has, and whether it takes more
;;;;   (fiber.lisp)   phases, parking and unparking, the way from one fiber to the next
;;;;   search         where a carrier looks for work, and how it sleeps
;;;;   carrier        how a carrier is made, what it does, how it ends
;;;;   handoff        what becomes of a scheduler whose carrier blocks
;;;;   zone           where a fiber may park, and whether it may go elsewhere
;;;;   time           time, as users and the heap count it
;;;;   interrupt      functions that others want a fiber to call
;;;;   cancel         how a fiber, or the body of a scope, is asked to leave what it does
;;;;   yield          sleeping, yielding, and what a fiber may spend before it must
;;;;   retry          a read that finds nothing is made again when others have run
;;;;   parking     *  the parking lot: which fibers wait for which word
;;;;   thread         what MAKE-THREAD does: OS threads, made without parking, or fibers
;;;;   mutex          mutexes, which are handed over to fibers that were woken too late
;;;;   io             what stands in for the system calls that wait: reading, writing, closing
;;;;   select         select and poll of several descriptors
;;;;   socket         accepting, connecting, sending, receiving
;;;;   reason         what a fiber waits for, in words
;;;;   overflow       a stack that is used up, or lost
;;;;   life           the first and last moments of a fiber
;;;;   api            a fiber from its making to its end, as users see it
;;;;   group          groups of carriers, as users see them
;;;;   scope          fibers that do not outlive a form
;;;;   parallel       what is made of scopes: calls in parallel, races, periodic work
;;;;   inspect        looking at fibers from outside: printing, lists, backtraces, bindings
;;;;   debug          errors that nothing handles, the foreground, Ctrl-C
;;;;   exit           the end of the process, and others made from it: EXIT, fork, saving
;;;;   pool           threads that make the calls which cannot park
;;;;   processors     how many there are for the process
;;;;   slice          time slices: fibers that compute for long yield to others
;;;;   monitor        the thread that finds a carrier stuck, and takes its scheduler away
;;;;   process        waiting for child processes
;;;;   timer          timers of fibers
;;;;   describe       what DESCRIBE and INSPECT tell
;;;; The switch itself is assembly/x86-64/fiber.
;;;;
;;;; The phases of a fiber, in its slot PHASE, moved by compare-and-swap:
;;;;
;;;;   move                  by
;;;;   new      -> claimed   the thread that submits or terminates it   (no other does so now)
;;;;   claimed  -> active    the thread that submits it                 (and queues it)
;;;;   claimed  -> new       the same, if there is no stack or the group is finished
;;;;   claimed  -> dead      the thread that terminates it while it is new
;;;;   active   -> parked    the successor on its carrier of a fiber that leaves to park
;;;;                         (no permit there; if there is one the successor takes it and queues
;;;;                         the fiber)
;;;;   parked   -> active    the thread that unparks it                 (and queues it)
;;;;   active   -> dead      the fiber, at its end
;;;;
;;;; The *permit* is a bit beside the phase. UNPARK sets it unless the fiber is parked, or has
;;;; not begun; PARK consumes it instead of parking. So an unpark that comes before the park is
;;;; not lost. ACTIVE covers runnable and mounted, which differ in the slot CARRIER only: a yield
;;;; changes no phase.
;;;;
;;;; Why it is the *successor* that ends the parking: until the switch has saved the context, the
;;;; fiber still runs on its stack, and a carrier that resumed it then would run on the same stack.
;;;; So a fiber that is about to leave enters itself in the carrier, and what is to become of it;
;;;; and whatever runs next on that carrier, fiber or scheduler, carries that out (AFTER-SWITCH).
;;;; The same goes for a yield (queue the fiber) and an end (free its stack).
;;;;
;;;; Waking carriers. A carrier without work looks everywhere: its poller, the injector, the
;;;; other queues. Then it enters its poller's place in the group's IDLE mask, *looks everywhere
;;;; again*, and sleeps in its poller until the nearest deadline. A thread that makes a fiber
;;;; runnable first queues it, then reads IDLE; if a bit is set there and no carrier is searching
;;;; already, it clears a bit and wakes that carrier. In "queue, then read IDLE" as in "enter IDLE,
;;;; then look" there is a full barrier between the two steps, so that one side sees the other: no
;;;; wake-up is lost, and no carrier wakes by time only to look. One searcher is enough, since it
;;;; wakes another when it finds something and more is left. A fiber that is alone in a queue, where
;;;; another fiber has put it, is not stolen before the same searcher has seen it there twice: most
;;;; likely that other is about to park. A searcher that has left such fibers alone, and does not
;;;; find the same again, *naps*: it sleeps for no longer than +NAP+, and looks again. Only one
;;;; does so at a time, and while it does nobody is woken for another fiber of that kind: two that
;;;; talk to each other would wake a carrier with each word. So a fiber whose waker does not
;;;; park waits for others at most as long as a nap, if there is a carrier that searches, and no
;;;; limit on those that may. If the one that naps finds something else to do it wakes another.
;;;;
;;;; A group may have more carriers than there are processors. Then no more than these are to be *at
;;;; work*: not idle, and with a turn that is no older than some milliseconds, so that those that
;;;; compute for long are not counted, but those that wait for a processor are, and so is at once
;;;; who has been woken. Nor are those whose fibers the monitor sees wait in the kernel, where it
;;;; looks more often for that, nor, for some looks after it has, those whose turn is older than a
;;;; millisecond: they are likely to do so, too. While so many are, nobody is woken; a carrier that
;;;; finds so many in front of it in the group puts what it has into the injector and sleeps, and
;;;; does not care for the queues of others: the last to go to sleep do. So it is always the same
;;;; that work, and what waits for descriptors does so in their pollers. If one of these begins to
;;;; compute when nobody is called, the monitor calls another as soon as it is not counted any more;
;;;; where it does not look every few milliseconds there is no limit.
;;;;
;;;; Interrupting. A thread that wants a fiber to call a function queues the function in the fiber,
;;;; and then looks whether the fiber is mounted. If so, it sends a signal to the carrier, whose
;;;; handler runs what is queued for the fiber that it finds there. If not, the fiber is resumed
;;;; later, and looks then. Again there is a full barrier on both sides: in "queue, then read
;;;; CARRIER" a compare-and-swap, in "write CARRIER, then look" what AFTER-SWITCH does. A signal
;;;; that finds scheduler code or another fiber does nothing, and nothing is lost by it.
;;;;
;;;; Designs that were refused:
;;;;  - a parked fiber's condition as a predicate that the scheduler tests again and again: costs
;;;;    grow with the number of parked fibers, and wake-ups come late;
;;;;  - a single queue and poller for all carriers: at two carriers the lock is already the
;;;;    most expensive thing in a switch;
;;;;  - handing each new fiber to a carrier that is woken for it: on a busy server it is a
;;;;    system call for each fiber;
;;;;  - a scheduler fiber on each carrier to which all switch: two switches for each yield,
;;;;    where going from fiber to fiber needs one.
;;;;
;;;; Scheduler code runs with interrupts off, on the stack of the fiber that leaves or of the
;;;; carrier. It takes no mutex, calls no generic function, signals nothing and makes no thread: a
;;;; parked fiber of this very carrier may hold any lock. If scheduler code breaks this rule and has
;;;; to wait, the process ends, see SCHEDULER-BUG. The handlers that RUN-PENDING-HANDLERS calls are
;;;; not scheduler code.
;;;;
;;;; Fairness. A scheduler serves its queue in order; after at most T = +TICKS-PER-LOOK+ fibers it
;;;; looks at its deadlines, its poller and the injector. It does so sooner if a millisecond is
;;;; over: in the next switch if fibers compute all the time, at the latest in the eighth
;;;; (+TICKS-PER-READING+) if they have just begun to. All that it finds is queued behind what
;;;; waits already, but for one fiber: the first of the injector runs next, even if the queue has
;;;; no room. So a fiber that has Q others in front of it in a queue runs after these and after at
;;;; most Q/T + 1 from the injector, or Q + 1 if each fiber computes for a millisecond. A fiber in
;;;; an injector, behind P others, is taken out after (P + 1) * (T + 1) ticks of a scheduler, and
;;;; has Q others in front of it then, or runs; a tick is one fiber that a scheduler runs. Of the
;;;; deadlines that have come, and of the reports, a scheduler serves at a look at least one, and
;;;; at most a batch, R of them (HOW-MANY-TO-COLLECT): however many come together, they hold up
;;;; others for no longer than 256 wake-ups take. A deadline that has come behind D others is
;;;; served at the look number D/R + 1, that is within (D/R + 1) * (T + 1) ticks, and its fiber
;;;; queued behind what waits then. A scheduler whose queue is empty looks at once, and one that
;;;; has left deadlines does not sleep. A fiber that yields where nothing is queued goes on at
;;;; once, and that is a tick: its scheduler looks as if it ran others. This is the worst case, of
;;;; fibers that wake each other and so fill the queue for ever. A fiber that yields while the
;;;; injector holds others goes to the end of the injector, so that the queue drains; and of N
;;;; fibers that only yield, each runs again within 2 * N + 256 ticks of a single carrier. With
;;;; time slices one turn of a preempted fiber may come after each look.
;;;;
;;;; A fiber that always finds its descriptors ready would never park: so it has a budget, which it
;;;; gets anew whenever it is resumed. A read costs all of it: before the next one the fiber yields
;;;; (SPEND-BUDGET). After 32 writes it does so as well. So of clients that ask again as soon as
;;;; they are answered, none is served twice while another is not; and when there are many, the next
;;;; question has come when its fiber runs again. Where there are few a read that finds nothing is
;;;; made again when the others have run, see fiber/retry.lisp. A fiber that accepts connections,
;;;; which the kernel drops when too many wait, may accept +BUDGET+ of them.

;;;; phases

(defconstant +new+ 0)
(defconstant +active+ 1)
(defconstant +claimed+ 2)
(defconstant +parked+ 3)
(defconstant +dead+ 4)
(defconstant +permit+ 8)

(declaim (inline fiber-phase-only phase-becomes-p))
(defun fiber-phase-only (fiber)
  (logand (fiber-phase fiber) 7))

(defun phase-becomes-p (fiber old new)
  (= (cas (fiber-phase fiber) old new) old))

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
  (ensure-waking-room 1536)
  (let ((scheduler (carrier-scheduler carrier)))
    (when scheduler (wake-poller (scheduler-poller scheduler)))
    ;; In any case: it may be losing or getting a scheduler just now.
    (when (= (cas (carrier-wake-word carrier) 0 1) 0)
      (with-pinned-objects (carrier)
        (%futex-wake (carrier-wake-word-address carrier) 1)))))

(declaim (inline cycles-since calls-block-p at-work-p))
(defun cycles-since (before now)
  (declare (word before now))
  (logand (- now before) most-positive-word)) ; many if another processor's counter is behind

(defun calls-block-p (group)
  "Has the monitor of GROUP lately seen a fiber that waited in the kernel?"
  (declare (fiber-group group))
  (> (fiber-group-blocking-looks group) 0))

(defun at-work-p (scheduler now)
  "Has SCHEDULER, which is not idle and not known to be held up, run something else, or been woken,
a short time before NOW, a count of cycles, or later? It may have since then."
  (declare (scheduler scheduler) (word now))
  (let ((limit (* (if (calls-block-p (truly-the fiber-group (scheduler-group scheduler)))
                      +milliseconds-where-calls-block+
                      +milliseconds-at-work+)
                  *cycles-per-millisecond*)))
    (flet ((recent-p (then)
             (<= (cycles-since then (logand (+ now limit) most-positive-word)) (* 2 limit))))
      (and (not (scheduler-held-up-p scheduler))
           (or (recent-p (scheduler-looked scheduler))
               (recent-p (scheduler-read scheduler)))))))

(declaim (inline idle-p))
(defun idle-p (scheduler idle)
  (logbitp (poller-place (scheduler-poller scheduler)) (truly-the (unsigned-byte 62) idle)))

(defun count-at-work (group last)
  "How many schedulers of GROUP, of those in front of LAST if that is one, do not sleep, and are not
held up by what they run."
  (declare (fiber-group group))
  (let ((idle (fiber-group-idle group)) (now (%cycle-count)))
    (loop for scheduler across (fiber-group-schedulers group)
          until (eq scheduler last)
          count (let ((scheduler (truly-the scheduler scheduler)))
                  (and (not (idle-p scheduler idle))
                       (at-work-p scheduler now))))))

(declaim (inline crowded-p))
(defun crowded-p (group)
  "Has GROUP more schedulers than are to be at work?"
  (and (fiber-group-limited-p group)
       (> (length (fiber-group-schedulers group)) (fiber-group-processors group))
       (not *force-migration*)))

(defun enough-at-work-p (group &optional last)
  "True if as many schedulers of GROUP, or of those in front of LAST, are at work as there are
processors."
  (declare (fiber-group group))
  (and (crowded-p group)
       (>= (truly-the index (count-at-work group last)) (fiber-group-processors group))))

(defun wake-one-idle (group)
  "Wake a carrier of GROUP that sleeps, if one does."
  (declare (fiber-group group))
  (loop
    (let ((idle (fiber-group-idle group)))
      (when (= idle 0) (return))
      (let* ((bit (1- (integer-length (logand idle (- idle)))))
             (scheduler (truly-the scheduler (svref (fiber-group-schedulers group) bit))))
        ;; Until it has a processor others would be woken in its place.
        (setf (scheduler-looked scheduler) (%cycle-count))
        (when (eq (cas (fiber-group-idle group) idle
                       (logandc2 idle (ash 1 (truly-the (mod 62) bit))))
                  idle)
          ;; If the group has ended meanwhile the poller has been freed, and is not asleep.
          (wake-poller (scheduler-poller scheduler))
          (return))))))

(declaim (inline call-for-help))
(defun call-for-help (group)
  ;; The caller has queued a fiber, and then executed a full barrier.
  (declare (fiber-group group))
  (when (and (/= (fiber-group-idle group) 0)
             (= (fiber-group-searching group) 0)
             (not (enough-at-work-p group)))
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
        ;; The carrier that was woken for what is left may be the one that must not run it.
        (when (injector-first injector) (wake-one-idle group))
        fiber))))

;;; A run queue has one owner, the carrier that serves it. With these it says that it is going to
;;; use the queue, and that it has done so, see fiber/monitor.lisp. With interrupts off.
(declaim (inline begin-scheduling end-scheduling))
(defun begin-scheduling (carrier)
  (setf (carrier-epoch carrier)
        (truly-the (and unsigned-byte fixnum) (1+ (carrier-epoch carrier)))))
(defun end-scheduling (carrier)
  (setf (carrier-epoch carrier)
        (truly-the (and unsigned-byte fixnum) (1+ (carrier-epoch carrier)))))

(declaim (inline scheduling-p))
(defun scheduling-p (carrier)
  "Does CARRIER, which is this thread, use its scheduler?"
  (logtest 1 (carrier-epoch carrier)))

(defun advance-epoch (carrier)
  (end-scheduling carrier)
  (begin-scheduling carrier))

(defmacro with-own-scheduler (&body body)
  "Execute BODY. If this thread is a carrier, its scheduler is not taken away meanwhile."
  `(let ((carrier *carrier*))
     (if carrier
         (let* ((carrier (truly-the carrier carrier))
                (epoch (carrier-epoch carrier)))
           (setf (carrier-epoch carrier) (logior epoch 1))
           (prog1 (progn ,@body)
             (setf (carrier-epoch carrier) epoch)))
         (progn ,@body))))

(declaim (inline my-scheduler))
(defun my-scheduler (group)
  "The scheduler that this thread serves, if it is one of GROUP."
  (let ((carrier *carrier*))
    (when carrier
      (let ((scheduler (carrier-scheduler (truly-the carrier carrier))))
        (when (and scheduler (eq (scheduler-group scheduler) group)) scheduler)))))

(declaim (inline queue-here handed-alone-p call-for-thief))
(defun queue-here (scheduler fiber)
  "Queue FIBER in SCHEDULER, which this thread serves. Return false if its queue is full."
  (let ((queue (scheduler-queue scheduler)))
    ;; First, else a thief takes it for one that was not handed over.
    (when (in-fiber-p)
      (setf (scheduler-handed scheduler) (truly-the fixnum (1+ (run-queue-tail queue))))
      (barrier (:write)))
    (run-queue-put queue fiber)))

(defun handed-alone-p (scheduler)
  "True if there is one fiber in the queue of SCHEDULER, and another fiber has put it there."
  (let ((queue (scheduler-queue scheduler)))
    (and (= (run-queue-length queue) 1)
         (= (run-queue-tail queue) (scheduler-handed scheduler)))))

(defun call-for-thief (group scheduler)
  ;; As for CALL-FOR-HELP; SCHEDULER is where the caller has queued it.
  (declare (fiber-group group))
  (when (and (/= (fiber-group-idle group) 0)
             (= (fiber-group-searching group) 0)
             (not (and (= (fiber-group-napping group) 1) (handed-alone-p scheduler)))
             (not (enough-at-work-p group)))
    (wake-one-idle group)))

(defun make-runnable (fiber)
  "Queue FIBER, which is ACTIVE, in no queue, and has left its stack. With interrupts off."
  (declare (fiber fiber))
  (let ((home (fiber-home fiber))
        (group (truly-the fiber-group (fiber-group fiber))))
    (if home
        (let ((home (truly-the carrier home)))
          (push-chain (carrier-inbox home) fiber)
          (wake-carrier home))
        (let ((mine (with-own-scheduler
                      (let ((mine (my-scheduler group)))
                        (and mine (not *force-migration*)
                             (queue-here mine fiber)
                             mine)))))
          (cond ((null mine) (inject group fiber))
                ;; What it does next is to take one, and call for what is left: CALL-FOR-THE-REST.
                ((in-scheduler-p (truly-the carrier *carrier*)))
                (t (barrier (:memory))
                   (call-for-thief group (truly-the scheduler mine))))))))

;;;; parking and unparking

(declaim (ftype (sfunction (fiber) null) unpark))
(defun unpark (fiber)
  "End the parking of FIBER, or the next one, if it is not parked now. May be called from anywhere."
  (ensure-waking-room 2048)
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
  (and (logtest (fiber-phase fiber) +permit+)
       (phase-becomes-p fiber (logior +active+ +permit+) +active+)))

(defun requeue (fiber)
  "Queue FIBER, which has yielded, behind the fibers that wait for a place in a queue as well."
  (declare (fiber fiber))
  (let ((group (truly-the fiber-group (fiber-group fiber))))
    (if (and (injector-first (fiber-group-injector group)) (null (fiber-home fiber)))
        (inject group fiber)
        (make-runnable fiber))))

(defun finish-parking (fiber)
  (unless (phase-becomes-p fiber +active+ +parked+)
    (setf (fiber-phase fiber) +active+) ; nothing else moves a phase that has a permit
    (make-runnable fiber)))

(declaim (inline after-switch))
(defun after-switch ()
  "Carry out what the stack that was left wanted. All of this contains a full barrier: if the fiber
that looks for interruptions next finds none, a thread that queues one later sees it mounted."
  (let* ((carrier (truly-the carrier *carrier*))
         (predecessor (carrier-predecessor carrier)))
    (setf (carrier-budget carrier) +budget+)
    (if predecessor
        (let ((fiber (truly-the fiber predecessor))
              (action (carrier-action carrier)))
          (setf (carrier-predecessor carrier) nil)
          (cond ((eq action :yield) (requeue fiber))
                ((eq action :park) (finish-parking fiber))
                ((eq action :preempt) (requeue-preempted carrier fiber))
                (t (free-stack fiber)
                   (barrier (:memory)))))
        (barrier (:memory)))))

(declaim (inline mount))
(defun mount (carrier from fiber)
  "Leave the stack whose context is FROM for that of FIBER. Returns when FROM is switched to."
  (store-slot (fiber carrier) fiber carrier)
  (when (= (context-word (context-of fiber) control-stack-pointer)
           (context-word (context-of fiber) control-stack-end))
    (prepare-stack fiber))
  (%switch-context from (context-of fiber)))

;;; For code that can signal nothing.
(defmacro scheduler-bug (message)
  `(with-pinned-objects (,(coerce message 'simple-base-string))
     (%scheduler-bug (vector-sap ,(coerce message 'simple-base-string)))))

(defun %scheduler-bug (message)
  "End the process, or enter the runtime's monitor."
  (alien-funcall (extern-alien "lose" (function void system-area-pointer)) message))

(declaim (inline live-signal-context-p))
(defun live-signal-context-p ()
  (/= *free-interrupt-context-index* 0))

(declaim (inline next-in-queue))
(declaim (ftype (sfunction (scheduler fixnum) boolean) time-to-look-p))
(defun time-to-look-p (scheduler ticks)
  "True if SCHEDULER, at whose tick number TICKS the cycle counter is to be read, is to look around.
If not, the counter is read again at the next tick, if as many as are made without reading could
take too long."
  (let* ((now (%cycle-count))
         (used (cycles-since (scheduler-looked scheduler) now))
         (limit *cycles-per-millisecond*))
    (setf (scheduler-read scheduler) now)
    (or (> ticks +ticks-per-look+)
        (> used limit)
        (let* ((used (truly-the cycles-per-millisecond used))
               (left (truly-the cycles-per-millisecond (- limit used)))
               (fast (<= (* +ticks-per-reading+ used) (* (truly-the (mod 64) ticks) left))))
          (setf (scheduler-next-reading scheduler)
                (min (1+ +ticks-per-look+) (+ ticks (if fast +ticks-per-reading+ 1))))
          nil))))

;;; When many fibers are runnable, what each needs to go on has left the caches since it ran last:
;;; its structure, its context, and the newest frames, which lie right below that. The structure is
;;; fetched first, as it tells where the rest is. A prefetch ends when its page has been found, and
;;; the tables for that are in no cache either: so the pages of four fibers are looked for at once.
(declaim (inline prefetch-queued))
(defun prefetch-queued (queue)
  "Prefetch what fibers need that have their turn some time after the next of QUEUE. For the owner."
  (declare (optimize speed (safety 0)))
  (let ((head (run-queue-head queue)) (ring (run-queue-ring queue)))
    (macrolet ((queued (n)
                 `(svref ring (run-queue-place ring (truly-the fixnum (+ head ,n)))))
               (lines (address &rest offsets)
                 `(let ((address ,address))
                    ,@(mapcar (lambda (offset) `(%prefetch address ,offset)) offsets)))
               (context-lines (n &rest offsets) ; a thief may have taken the fiber
                 `(let ((fiber (queued ,n)))
                    (when (fiber-p fiber) (lines (context-of fiber) ,@offsets)))))
      (when (> (truly-the fixnum (- (run-queue-tail queue) head)) 12)
        (lines (int-sap (get-lisp-obj-address (queued 12))) 0 64 128 192)
        (when (= (logand head 3) 0)
          (context-lines 5 0)
          (context-lines 6 0)
          (context-lines 7 0)
          (context-lines 8 0))
        (context-lines 4 64 -64 -128 -192)))
    nil))

(defun next-in-queue (carrier scheduler)
  "The next fiber to run, or NIL if it is time to look around, or nothing is queued."
  (unless (or (let ((ticks (incf (scheduler-ticks scheduler))))
                (and (>= ticks (scheduler-next-reading scheduler))
                     (time-to-look-p scheduler ticks)))
              (carrier-inbox carrier))
    (prefetch-queued (scheduler-queue scheduler))
    (or (run-queue-take (scheduler-queue scheduler))
        (and *force-migration*
             (take-migrant (truly-the fiber-group (scheduler-group scheduler)))))))

;;; Inline, as the processor does not predict where a function returns to that has left the stack.
(declaim (inline leave))
(defun leave (action)
  "Leave the running fiber, for the next runnable one or else for the carrier. ACTION says
what is to become of the fiber: :YIELD, :PREEMPT, :PARK or :END. With interrupts off. Returns when
it is resumed."
  (let* ((carrier (truly-the carrier *carrier*))
         (fiber (truly-the fiber *current-thread*))
         (scheduler (progn (begin-scheduling carrier) (carrier-scheduler carrier)))
         (masked (and (live-signal-context-p) (put-back-signal-mask)))
         (next (and scheduler (next-in-queue carrier scheduler))))
    (store-slot (carrier predecessor) carrier fiber)
    (store-slot (carrier action) carrier action)
    (setf (fiber-left fiber) (if scheduler (scheduler-read scheduler) (%cycle-count))
          (fiber-carrier fiber) nil)
    (when (and *force-migration* (neq action :end)) (setf (fiber-last-carrier fiber) carrier))
    (if next
        (mount carrier (context-of fiber) (truly-the fiber next))
        (%switch-context (context-of fiber) (int-sap (carrier-context carrier))))
    (after-switch)
    (end-scheduling (truly-the carrier *carrier*))
    (when masked (restore-signal-mask))
    nil))

;;; A handler runs with signals blocked, until it enables interrupts. What runs while it is parked
;;; must not have them blocked: it would receive no signal, and the runtime gives up when it finds
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
or NIL. This may return early, for no reason that the caller knows of: the caller looks, and parks
again. REASON is what the fiber waits for, to be shown to users. With interrupts off."
  (let ((fiber (truly-the fiber *current-thread*)))
    (setf (fiber-wait-reason fiber) reason)
    (prepare-zone fiber)
    (when deadline (enter-deadline fiber deadline))
    (when (scheduling-p (truly-the carrier *carrier*))
      (scheduler-bug "fiber scheduler code parks the fiber that is leaving"))
    (unless (take-permit fiber) (leave :park))
    (when deadline (heap-remove fiber))
    (setf (fiber-wait-reason fiber) nil)))

(defun enter-deadline (fiber deadline)
  (enter-time (nearest-scheduler fiber) fiber deadline))

(defun enter-time (scheduler entry time)
  "Let SCHEDULER serve ENTRY, a fiber or an alarm, at TIME."
  (with-waking-room (2048)
    (heap-insert (scheduler-deadlines scheduler) entry time)
    ;; The carrier of another scheduler may be asleep until a later time.
    (let ((carrier *carrier*))
      (unless (and carrier (eq scheduler (carrier-scheduler (truly-the carrier carrier))))
        (wake-poller (scheduler-poller scheduler))))))

(defun nearest-scheduler (fiber)
  "The scheduler in whose heap a deadline of FIBER goes: its carrier's, or any if that has none."
  (let ((carrier (truly-the carrier *carrier*)))
    (or (carrier-scheduler carrier)
        (svref (fiber-group-schedulers (truly-the fiber-group (fiber-group fiber))) 0))))
