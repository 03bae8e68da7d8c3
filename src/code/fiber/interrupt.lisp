;;;; interruptions: functions that others want a fiber to call

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; Interruptions are queued in the fiber, and called by it, in order,
;;;  - where it is interrupted by the signal that is sent to its carrier, if it is mounted;
;;;  - where it has parked or yielded, when it is resumed;
;;;  - before its function, if it has not begun;
;;;  - after a foreign call, if that is what the signal has found: see runtime/fiber-foreign.c.
;;; With interrupts off the fiber calls them when interrupts are on again, as a thread does. So it
;;; must not be resumed without a look at the queue: all code that calls PARK or LEAVE calls
;;; SEE-INTERRUPTIONS afterwards. What is queued when the fiber ends is dropped.

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
            (while-holding-buffers
              (funcall (or sb-thread::*interrupt-handler* #'funcall) function))))))))

(defun run-interruptions (fiber)
  (loop
    (let ((function (next-interruption fiber)))
      (unless function (return))
      (call-interruption function))))

(declaim (inline see-interruptions))
(defun see-interruptions (fiber)
  "Let FIBER, which is running, call its interruptions now, or once interrupts are on."
  (when (fiber-interruptions fiber)
    (if (and *interrupts-enabled* (not (logtest *foreign-frames* +frames-to-keep+)))
        (run-interruptions fiber)
        ;; The handler is deferred until they are on, or the call that has called back returns.
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
  (ensure-waking-room 3072)
  (flet ((interrupt ()
           (when (queue-interruption fiber function)
             (notify-of-interruption fiber)
             t)))
    (declare (inline interrupt))
    (if (eq fiber *current-thread*)
        (interrupt)
        (without-interruptions (interrupt))))) ; unwound in between, it would leave FIBER asleep

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

;;; Interruptions take at most so many of the signal contexts that a thread has room for.
(defconstant max-nested-interruptions 3)

(defun handle-interruption (fiber)
  "What the handler of SIGURG does on the stack of FIBER. It calls one interruption: the next one
interrupts this if it enables interrupts or exits non-locally, as in a thread."
  (note-interruptions-of-carrier (truly-the carrier *carrier*))
  (if (> *free-interrupt-context-index* max-nested-interruptions)
      (interrupt-later fiber)
      (let ((function (next-interruption fiber)))
        (when (fiber-interruptions fiber) (sb-unix:raise sb-unix:sigurg))
        (when function (call-interruption function)))))

;;; A fiber that comes out of a handler by a non-local exit is interrupted before the handler's
;;; context is gone. The process ends if there is no room for another context.
(defun interrupt-later (fiber)
  "Let FIBER, which is running, look at its interruptions again in a millisecond."
  (when (fiber-interruptions fiber)
    (let ((alarm (make-alarm fiber nil)))
      (setf (alarm-function alarm) (constantly nil))
      (enter-time (nearest-scheduler fiber) alarm (nanoseconds-from-now 1000000)))))

;;; System threads have SIGALRM blocked. A non-local exit from a handler unblocks all signals.
(define-alien-routine ("fiber_block_timer_signal" block-timer-signal) void)

;;;; interruptions of carriers

;;; A carrier is a thread, and may be interrupted as any other. It calls its interruptions on its
;;; own stack, between two fibers, where *CURRENT-THREAD*, bindings and catch tags are its own.

(defun note-interruptions-of-carrier (carrier)
  "Let CARRIER go to its own stack when the fiber on it is left, if there is something to call
there."
  (when (sb-thread::thread-interruptions (carrier-thread carrier))
    (look-around-next carrier)))

(defun look-around-next (carrier)
  "Let the scheduler of CARRIER look around when the fiber is left that runs now."
  (let ((scheduler (carrier-scheduler carrier)))
    (when scheduler
      (setf (scheduler-ticks (truly-the scheduler scheduler)) +ticks-per-look+))))

;;;; callbacks

;;; A deadline would end a wait in a callback by unwinding, and would unwind foreign code with it.
;;; A stack that has ended in foreign code ends here, or else a recursion through callbacks would
;;; end in foreign code for good.
(defun deadline-in-callback ()
  "The deadline of what is called back: none of a fiber that has called foreign code."
  (see-deferred-signals)
  (if (logtest *foreign-frames* +below-callback+) nil sb-impl::*deadline*))
