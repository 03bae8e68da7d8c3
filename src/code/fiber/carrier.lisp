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
    (leave-queue carrier)               ; what the last has left there, too
    (run-on-carrier carrier fiber)))

;;; Handlers that were deferred while the scheduler ran, and functions that others want this OS
;;; thread to call. They run on the carrier's own stack, where a wait for a lock is a native one,
;;; and is announced.
(defun run-pending-handlers (carrier)
  (when (handlers-wait-p)
    (leave-queue carrier)
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
        (cond (fiber
               (run-on-carrier carrier fiber)
               (when (preempted-due-p carrier) (run-preempted carrier)))
              ((eq (fiber-group-state (carrier-group carrier)) :stopped) (return))
              ((run-preempted carrier))
              ((trim-surplus))
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
                    (unless (run-preempted carrier) (idle-as-spare carrier group)))))))

;;;; its beginning and its end

(define-alien-routine ("fiber_carrier_make" %carrier-make) unsigned)
(define-alien-routine ("fiber_carrier_begin" %carrier-begin) void (context unsigned))
(define-alien-routine ("fiber_carrier_note_mask" %carrier-note-mask) void)
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
  (setf (carrier-waiters (truly-the carrier *carrier*)) nil
        *carrier* nil)
  (free-cached-stacks)
  (%carrier-end))

(defun run-carrier (carrier)
  (without-interrupts
    (begin-carrier carrier)
    (accept-signals)
    (%carrier-note-mask)
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
