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
 - the allocator's mutex is held: its other users wait natively, with GC inhibited.
In a signal handler and in a foreign callback there are addresses of the OS thread on the stack."
  (cond ((or *gc-inhibit*
             (not (eql *gc-pin-code-pages* 0))
             (/= 0 (sap-int (sb-vm::current-thread-offset-sap sb-vm::thread-arena-slot)))
             (sb-thread:holding-mutex-p sb-vm::*allocator-mutex*))
         :native)
        ((or (/= (fiber-pin-count fiber) 0) (live-signal-context-p)) :pinned)
        (t :free)))

(defun prepare-zone (fiber)
  "Tell who resumes FIBER where it must be done."
  (setf (fiber-home fiber)
        (and (eq (zone fiber) :pinned)
             *carrier*))
  (when (/= 0 (context-word (context-of fiber) guards))
    (alien-funcall (extern-alien "fiber_rearm_guards" (function void)))))

(declaim (ftype (sfunction () boolean) can-park-p))
(defun can-park-p ()
  "Is a fiber running that can leave its carrier here?"
  (let ((fiber (current-fiber)))
    (and fiber (not (eq (zone fiber) :native)))))

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

;;;; interruptions: functions that others want a fiber to call

;;; They are called at the points where a fiber parks. Who parks with interrupts off, and did
;;; not ask to be interruptible, is interrupted later, as a thread is.
(declaim (ftype (sfunction (fiber function) boolean) %interrupt-fiber))
(defun %interrupt-fiber (fiber function)
  "Let FIBER call FUNCTION when it next parks, or now if it is parked. Return false if it has ended."
  (loop
    (when (= (fiber-phase-only fiber) +dead+) (return nil))
    (let ((old (fiber-interruptions fiber)))
      (when (eq (cas (fiber-interruptions fiber) old (append old (list function))) old)
        (unpark fiber)
        (return t)))))

(defun next-interruption (fiber)
  (loop
    (let ((old (fiber-interruptions fiber)))
      (when (or (null old) (eq (cas (fiber-interruptions fiber) old (cdr old)) old))
        (return (car old))))))

(defun run-interruptions (fiber)
  (loop
    (let ((function (next-interruption fiber)))
      (unless function (return))
      (without-interrupts
        (allow-with-interrupts (funcall (the function function)))))))

(defun run-allowed-interruptions (fiber)
  (when (and *interrupts-enabled* (fiber-interruptions fiber))
    (run-interruptions fiber)))

;;;; the simplest things to wait for

(defun park-until (deadline)
  "Park until DEADLINE, or for ever if it is NIL. Interruptions run, and the wait goes on."
  (let ((fiber (truly-the fiber *current-thread*)))
    (loop
      (run-allowed-interruptions fiber)
      (when (deadline-passed-p deadline) (return))
      (without-interruptions (park :sleep deadline)))))

(defun sleep-in-fiber (nanoseconds)
  "What SLEEP does in a fiber."
  (park-until (nanoseconds-from-now nanoseconds)))

;;; A yield when nobody else is queued costs a look around, which is more than a call: it is put off.
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
  "Called in a fiber before a call that perhaps will not wait, for COST: if what is left of its turn, and
OVERDRAFT, is used up, and others wait for theirs, yield first."
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
           (run-allowed-interruptions fiber)
           (without-interruptions
             (prepare-zone fiber)
             (leave :yield))))
        (t (alien-funcall (extern-alien "thread_yield" (function int)))))
  nil)
