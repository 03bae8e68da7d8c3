;;;; schedulers, carriers, groups: what all that follows shares

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

(defconstant +ticks-per-look+ 61)
;;; Reading the cycle counter takes a sixth of the time of a switch, and so it is not read in each.
(defconstant +ticks-per-reading+ 8)
;;; Set at the start of each group. Where cycle counters do not agree, or run at another speed by
;;; now, a scheduler looks around too often, or after +TICKS-PER-LOOK+ fibers.
(deftype cycles-per-millisecond () '(unsigned-byte 40))
(declaim (type cycles-per-millisecond *cycles-per-millisecond*))
(define-load-time-global *cycles-per-millisecond* (1- (ash 1 40)))
;;; Whoever waits for a processor is at work as long as others of the machine have one for a turn or
;;; two. Where calls that block are seen, a long turn is taken for such a call.
(defconstant +milliseconds-at-work+ 8)
(defconstant +milliseconds-where-calls-block+ 1)
;;; What a fiber may spend before it lets others go on.
(defconstant +budget+ 1024)
(defconstant +call-cost+ 32)
(defconstant +accept-cost+ 1)

(defstruct-apart (scheduler (:constructor %make-scheduler (group poller))
                            (:copier nil))
  (group nil :type t :read-only t)
  (poller nil :type poller :read-only t)
  (queue (make-run-queue) :type run-queue :read-only t)
  (deadlines (make-deadline-heap) :type deadline-heap :read-only t)
  ;; How many fibers it has run since it last looked around.
  (ticks 0 :type fixnum)
  ;; The cycle count when it last looked around, or was woken to do so, which others write; when the
  ;; counter was last read, and at which tick it is to be read again.
  (looked 0 :type word)
  (read 0 :type word)
  (next-reading 1 :type fixnum)
  ;; The TAIL of its queue when a fiber last woke another.
  (handed 0 :type (and unsigned-byte fixnum))
  ;; The HEADs of the queues of others where it has left a fiber alone; whether it has in its last
  ;; search, and nobody has been called for that fiber.
  (seen (make-array max-group-pollers :element-type 'fixnum :initial-element -1)
   :type (simple-array fixnum (#.max-group-pollers)) :read-only t)
  (left-alone-p nil :type boolean)
  ;; What others see of it: true while it is not to be counted as at work, until it looks around.
  (held-up-p nil :type boolean)
  ;; How often it has taken work from others.
  (steals 0 :type fixnum))
(declaim (freeze-type scheduler))

(defstruct-apart (carrier (:constructor %make-carrier (group &optional (context 0) scheduler))
                          (:copier nil))
  (group nil :type t :read-only t)
  (thread nil)
  (context 0 :type word :read-only t)
  ;; What it works from. A carrier without one is a spare, or runs the fiber that blocked it.
  (scheduler nil :type (or null scheduler))
  ;; Odd while it uses its scheduler, even while a fiber or a handler runs: then the monitor may
  ;; take the scheduler away. Grows by two in each switch.
  (epoch 1 :type (and unsigned-byte fixnum))
  ;; What the monitor has seen: the epoch, since when, and the processor time used by then.
  (seen-epoch 0 :type (and unsigned-byte fixnum))
  (seen-since 0 :type fixnum)
  (seen-time 0 :type fixnum)
  ;; The epoch in which a look found it waiting in the kernel.
  (waiting-epoch 0 :type (and unsigned-byte fixnum))
  ;; The epoch in which its fiber was asked to yield, and whether it has refused; fibers that have
  ;; yielded so, and until when others go first: see fiber/slice.lisp.
  (asked-epoch 0 :type (and unsigned-byte fixnum))
  (refused-p nil :type boolean)
  (preempted (make-injector) :type injector :read-only t)
  (preempted-until 0 :type (and unsigned-byte fixnum))
  ;; The epoch in which it was found to be stuck.
  (stuck-epoch 0 :type (and unsigned-byte fixnum))
  ;; The thread that warns of that, or has.
  (warner nil)
  ;; Fibers that only this carrier may run, a chain through NEXT, of which the last is first.
  (inbox nil)
  ;; How many fibers have it as their home. Written by itself, while it runs one of them: see
  ;; SET-HOME.
  (guests 0 :type index)
  ;; :LISTED if it is a spare, :TAKEN once it has been given a scheduler, until it has seen that,
  ;; :RETIRED if it is to end: see fiber/handoff.lisp.
  (spare nil :type symbol)
  ;; What a spare sleeps on: 1 when there may be something for it.
  (wake-word 0 :type word)
  ;; True while it runs handlers on its own stack, which may wait.
  (handling nil :type boolean)
  ;; What is left of the mounted fiber's +BUDGET+.
  (budget 0 :type fixnum)
  ;; What SB-CONCURRENCY keeps for those that will wait: see WAITER there.
  (waiters nil)
  ;; The fiber that the last switch on this carrier has left, and what is to become of it.
  (predecessor nil)
  (action nil))
(declaim (freeze-type carrier))

(defstruct (fiber-group (:constructor %make-fiber-group (name))
                        (:copier nil))
  "A group of carriers, and the fibers that they run. START-FIBERS makes one, FINISH-FIBERS ends
it."
  (name nil :type (or null string) :read-only t)
  (schedulers #() :type simple-vector)
  ;; How many are to be at work at most, while LIMITED-P, which the monitor writes.
  (processors 1 :type (and unsigned-byte fixnum))
  ;; Why there are no more processors: the second value of PROCESSOR-COUNT.
  (limit :affinity :type symbol)
  (limited-p nil :type boolean)
  ;; For how many looks of the monitor calls that block are expected, since one was seen.
  (blocking-looks 0 :type index)
  ;; After how many nanoseconds a fiber is to yield, or NIL.
  (time-slice nil :type (or null (and unsigned-byte fixnum)))
  (carriers '() :type list)
  (injector (make-injector) :type injector :read-only t)
  ;; Bits of the pollers of sleeping schedulers.
  (idle 0 :type (unsigned-byte 62))
  (searching 0 :type word)
  ;; 1 while a carrier is to look again soon at what it has left alone.
  (napping 0 :type word)
  ;; How many fibers are alive, and whether there may be more: see fiber/population.lisp.
  (population 0 :type word)
  ;; How many threads are aborting its fibers.
  (aborters 0 :type word)
  ;; Places for spare carriers, and for schedulers that found none; 0 is a free place.
  (spares (make-array 256 :initial-element 0) :type simple-vector :read-only t)
  (orphans (make-array max-group-pollers :initial-element 0) :type simple-vector :read-only t)
  ;; What the monitor sleeps on: 1 when there may be something for it.
  (monitor-wake-word 0 :type word)
  ;; 1 while it sleeps until a carrier says that it is awake
  (monitor-asleep 0 :type word)
  (monitor nil)
  ;; How many carriers have been found stuck; the epochs of the carriers that have ended.
  (stuck 0 :type fixnum)
  (past-epochs 0 :type (and unsigned-byte fixnum))
  ;; Threads of spares that have been told to end.
  (retired '() :type list)
  ;; How often the monitor has looked since it found one stuck.
  (quiet-looks 0 :type fixnum)
  ;; :RUNNING, :STOPPED or :FINISHED, see fiber/group.lisp
  (state :running :type symbol))
(declaim (freeze-type fiber-group))

(declaim (inline in-fiber-p in-scheduler-p current-fiber))
(defun in-fiber-p ()
  (fiber-p *current-thread*))

(defun in-scheduler-p (carrier)
  "Does this thread, which is CARRIER, execute neither a fiber nor a handler?"
  (declare (carrier carrier))
  (not (or (in-fiber-p) (carrier-handling carrier))))

(declaim (ftype (sfunction () (or null fiber)) current-fiber))
(defun current-fiber ()
  "Return the fiber that is running, or NIL in a thread that runs none."
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

(define-structure-slot-addressor carrier-wake-word-address :structure carrier :slot wake-word)
(define-structure-slot-addressor fiber-group-monitor-wake-word-address
  :structure fiber-group :slot monitor-wake-word)
