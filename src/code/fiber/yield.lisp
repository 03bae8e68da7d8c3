;;;; the simplest things to wait for: time, and other fibers

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

(defun park-until (deadline &optional (reason :sleep))
  "Park until DEADLINE, or for ever if it is NIL. Interruptions run, and the wait goes on."
  (let ((fiber (truly-the fiber *current-thread*)))
    ;; Once at least: (SLEEP 0) in a loop lets others run.
    (loop
      (see-cancellation fiber)
      (without-interruptions (park reason deadline))
      (see-interruptions fiber)
      (when (deadline-passed-p deadline) (return)))))

;;; nanosleep(2) would not be left when the body of a scope is cancelled.
(defun sleep-here-p ()
  "Called by SLEEP: is SLEEP-HERE to be called instead of the kernel?"
  (or (park-or-announce)
      (and *scope* (not (in-fiber-p)))))

(defun sleep-here (nanoseconds)
  (let ((deadline (nanoseconds-from-now nanoseconds)))
    (if (in-fiber-p)
        (park-until deadline)
        (sleep-natively deadline))))

(defun sleep-natively (deadline)
  "Wait, in a thread, for a word that nobody changes."
  (let ((word (make-array 1 :element-type 'word)))
    (declare (dynamic-extent word))
    (loop until (deadline-passed-p deadline)
          do (multiple-value-call #'wait-natively (sap-int (vector-sap word)) 0
               (time-left deadline)))))

;;; Not to leave saves two switches, and a call of the kernel in each look around. The carrier looks
;;; as often as if it ran others meanwhile.
(declaim (inline look-put-off-p))
(defun look-put-off-p (scheduler)
  "True if SCHEDULER, for which another tick is over, has nothing to run, as far as it knows, and it
is not yet time to look around."
  (and (= (run-queue-length (scheduler-queue scheduler)) 0)
       (null (injector-first
              (fiber-group-injector (truly-the fiber-group (scheduler-group scheduler)))))
       (let ((ticks (incf (scheduler-ticks scheduler))))
         (or (< ticks (scheduler-next-reading scheduler))
             (not (time-to-look-p scheduler ticks))))))

(defun yield-in-place-p (carrier)
  "True if the running fiber has yielded without leaving CARRIER, where no other can run now. With
interrupts off."
  (declare (carrier carrier))
  (begin-scheduling carrier)
  (let ((scheduler (carrier-scheduler carrier)))
    (prog1 (and scheduler
                (null (carrier-inbox carrier))
                (not *force-migration*)
                (look-put-off-p (truly-the scheduler scheduler))
                (setf (carrier-budget carrier) +budget+))
      (end-scheduling carrier))))

(defun spend-budget (cost &optional (overdraft 0))
  "Called in a fiber before a call that perhaps will not wait, and that costs COST: if its budget is
spent, and OVERDRAFT beyond it, yield first."
  (declare (fixnum cost overdraft))
  (when (<= (+ (carrier-budget (truly-the carrier *carrier*)) overdraft) 0)
    (fiber-yield))
  (decf (carrier-budget (truly-the carrier *carrier*)) cost))

(declaim (ftype (sfunction () null) fiber-yield))
(defun fiber-yield ()
  "Let the other fibers that can run do so before this one goes on. In a thread that runs no fiber,
and where a fiber must not leave its carrier, yield the processor. Returns NIL."
  (cond ((can-park-p)
         (let ((fiber (truly-the fiber *current-thread*)))
           (see-cancellation fiber)
           (without-interruptions
             (unless (yield-in-place-p (truly-the carrier *carrier*))
               (prepare-zone fiber)
               (leave :yield)))
           (see-interruptions fiber)))
        (t (alien-funcall (extern-alien "thread_yield" (function int)))))
  nil)
