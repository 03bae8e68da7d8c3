;;;; carriers: how they are made, what they do, how they end

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;;; its work

(defun run-on-carrier (carrier fiber)
  "Run FIBER, and those that follow without returning here."
  (mount carrier (int-sap (carrier-context carrier)) fiber)
  (after-switch))

(defun run-inbox (carrier)
  (do-chain (fiber (take-chain (carrier-inbox carrier)))
    (run-on-carrier carrier fiber)))

;;; Handlers that were deferred while the scheduler ran, and functions that others want this OS
;;; thread to call. They run on the carrier's own stack, where a wait for a lock is a native one,
;;; and is announced.
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

(defun carrier-loop (carrier)
  (let ((group (truly-the fiber-group (carrier-group carrier))))
    (loop until (carrier-to-end-p carrier group)
          do (cond ((carrier-scheduler carrier)
                    (serve-scheduler carrier))
                   (t
                    (run-inbox carrier)
                    (run-pending-handlers carrier)
                    (idle-as-spare carrier group))))))

;;;; its beginning and its end

(define-alien-routine ("fiber_carrier_make" %carrier-make) unsigned)
(define-alien-routine ("fiber_carrier_begin" %carrier-begin) void (context unsigned))
(define-alien-routine ("fiber_carrier_end" %carrier-end) void)

(defun free-cached-stacks ()
  (with-stacks-lock
    (alien-funcall (extern-alien "fiber_carrier_free_cached" (function void)))
    nil))

(defun begin-carrier (carrier)
  (%carrier-begin (carrier-context carrier))
  (setf (carrier-thread carrier) *current-thread*
        *carrier* carrier))

(defun end-carrier ()
  (setf *carrier* nil)
  (free-cached-stacks)
  (%carrier-end))

(defun run-carrier (carrier)
  (without-interrupts
    (begin-carrier carrier)
    (accept-signals)
    (carrier-loop carrier)
    (end-carrier)))

;;; A thread that is not in the list would not be waited for.
(defun start-carrier (group scheduler)
  (without-interrupts
    (let ((carrier (%make-carrier group (%carrier-make) scheduler)))
      (when (= (carrier-context carrier) 0)
        (error "There is no memory for a carrier."))
      (setf (carrier-thread carrier) (make-thread-of carrier))
      (push carrier (fiber-group-carriers group)))))

(defun make-thread-of (carrier)
  (let ((thread nil))
    (unwind-protect
         (setf thread (make-carrier-thread "fiber carrier" #'run-carrier carrier))
      (unless thread (%free (int-sap (carrier-context carrier)))))))

;;; With interrupts off: a fiber that parked in BODY would go on in another thread.
(defmacro with-signals-blocked (&body body)
  "Execute BODY with those signals blocked that START-THREAD blocks; a new thread inherits that."
  (with-unique-names (old)
    `(let ((,old (make-array (* sb-unix::sizeof-sigset_t sb-vm:n-byte-bits)
                             :element-type 'bit :initial-element 0)))
       (with-pinned-objects (,old)
         (sb-unix::pthread-sigmask sb-unix::SIG_BLOCK
                                   (foreign-symbol-sap "thread_start_sigset" t) ,old)
         (unwind-protect (progn ,@body)
           (sb-unix::pthread-sigmask sb-unix::SIG_SETMASK ,old nil))))))

;;; The thread is ephemeral, so that it neither keeps the image from exiting nor is asked to unwind.
(defun make-carrier-thread (name function argument)
  "Start a thread that calls FUNCTION with ARGUMENT, and handles no deferrable signal before
FUNCTION calls ACCEPT-SIGNALS: an interruption could unwind it before it has begun."
  (call-with-make-thread-lock
   (lambda ()
     (with-signals-blocked
       (sb-thread::make-system-thread name function (list argument) nil)))))

;;; START-THREAD blocks signals before it takes the lock. A fiber would park with them blocked, and
;;; go on in an OS thread that has not blocked them: the first OS thread would receive no signal any
;;; more, and the new thread, made by the second, would receive signals before it can handle them.
(defun start-thread (thread function arguments)
  "What START-THREAD of threads does, with the lock taken first."
  (call-with-make-thread-lock
   (lambda () (sb-thread::start-thread thread function arguments))))

(defun call-with-make-thread-lock (function)
  (declare (function function))
  (let ((thread (sb-thread::with-system-mutex (sb-thread::*make-thread-lock*)
                  (handler-case (funcall function)
                    (error (condition) condition)))))
    ;; Handlers, or a debugger, run without the lock.
    (when (typep thread 'error) (error thread))
    thread))

(defun accept-signals ()
  "Let this thread, in which interrupts are off, be sent signals."
  (sb-unix::pthread-sigmask sb-unix::SIG_UNBLOCK (foreign-symbol-sap "thread_start_sigset" t) nil)
  (block-timer-signal))

(defun refuse-signals ()
  "Let this thread be sent no signals; those of the process go to others."
  (sb-unix::pthread-sigmask sb-unix::SIG_BLOCK (foreign-symbol-sap "thread_start_sigset" t) nil))
