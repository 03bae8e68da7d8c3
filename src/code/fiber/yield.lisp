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

;;; A yield when no other fiber is queued costs a look around, which is more than a call: it is put
;;; off.
(defun budget-spent-p (carrier overdraft)
  (declare (carrier carrier) (fixnum overdraft))
  (let ((scheduler (carrier-scheduler carrier))
        (left (+ (carrier-budget carrier) overdraft)))
    (and (<= left 0)
         (or (<= left (* -32 +budget+))
             (null scheduler)
             (> (run-queue-length (scheduler-queue scheduler)) 0)
             (injector-first
              (fiber-group-injector (truly-the fiber-group (carrier-group carrier))))))))

(defun spend-budget (cost &optional (overdraft 0))
  "Called in a fiber before a call that perhaps will not wait, and that costs COST: if its budget is
spent, and OVERDRAFT beyond it, and other fibers can run, yield first."
  (declare (fixnum cost overdraft))
  (when (budget-spent-p (truly-the carrier *carrier*) overdraft)
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
             (prepare-zone fiber)
             (leave :yield))
           (see-interruptions fiber)))
        (t (alien-funcall (extern-alien "thread_yield" (function int)))))
  nil)
