;;;; time slices: fibers that compute for long yield to others

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; In a group with time slices the monitor interrupts a fiber that has run for as long as a slice,
;;; and the fiber yields in the handler. So it does where it could be interrupted to do anything
;;; else: not in WITHOUT-INTERRUPTS, nor in a foreign call, after which it does, unless that is
;;; interruptible; and not where it must not leave its carrier. There are addresses of the carrier's
;;; thread on a stack with a handler, so the fiber goes on on the same carrier. It waits there among
;;; the PREEMPTED, of which one has a turn when there is nothing else to do, or when the others have
;;; had a slice. What is true when nobody is inside:
;;;  - only the carrier itself uses its PREEMPTED, and these are fibers whose home it is;
;;;  - a carrier neither sleeps nor is listed as a spare while there is one.
;;;
;;; A fiber is asked once in a turn, that is an epoch of its carrier, unless it refuses. By the time
;;; that it sees the interruption it may have had another turn: then it does nothing. A carrier that
;;; has lost its scheduler runs what is at home there, one after the other, and these are asked,
;;; too; it becomes a spare when they have parked or ended.
;;;
;;; It does not yield by FIBER-YIELD: the exhaustion of the stack must not be signalled where there
;;; is too little left to wait, and whoever computes has not asked to leave what is cancelled.

(defun may-yield-here-p (fiber)
  (and (waiting-room-p fiber)
       (not (eq (zone fiber) :native))))

(defun end-turn (fiber epoch)
  "Let others run if FIBER, which is running, has done so since EPOCH of its carrier."
  (let ((carrier (truly-the carrier *carrier*)))
    (cond ((/= epoch (carrier-epoch carrier)))
          ((may-yield-here-p fiber)
           (without-interruptions
             (look-around-next carrier) ; a deadline or a report may wait
             (prepare-zone fiber)
             (leave :preempt))
           (see-interruptions fiber))
          (t (setf (carrier-refused-p carrier) t))))) ; it is asked again

(defun ask-to-yield (carrier epoch)
  "Let the fiber that CARRIER has run since EPOCH yield."
  ;; Before it is asked: it may refuse.
  (setf (carrier-refused-p carrier) nil)
  (let ((fiber (fiber-on carrier)))
    ;; It may have left, and another begun an epoch, before it was found.
    (unless (and fiber
                 (= epoch (carrier-epoch carrier))
                 (%interrupt-fiber fiber (lambda () (end-turn fiber epoch))))
      (setf (carrier-refused-p carrier) t))))

;;;; what the carrier does with those that were preempted

;;; While others have something to run, they have a slice after each turn of what was preempted.
(defun requeue-preempted (carrier fiber)
  "Let FIBER, which has ended its turn on CARRIER, have another one."
  (declare (carrier carrier) (fiber fiber))
  (cond ((fiber-home fiber)             ; that is CARRIER
         (injector-put (carrier-preempted carrier) fiber)
         (let ((group (truly-the fiber-group (carrier-group carrier))))
           (setf (carrier-preempted-until carrier)
                 (truly-the (and unsigned-byte fixnum)
                            (+ (fiber-now)
                               (truly-the fixnum (or (fiber-group-time-slice group) 0)))))))
        (t (requeue fiber))))

(defun run-preempted (carrier)
  "Let one of the fibers go on that were preempted on CARRIER. Return false if there is none."
  (let ((fiber (injector-take (carrier-preempted (truly-the carrier carrier)) 1)))
    (when fiber
      (leave-queue carrier)
      (run-on-carrier carrier fiber)
      t)))

(defun preempted-due-p (carrier)
  "Have others on CARRIER had their time since one that was preempted had a turn?"
  (declare (carrier carrier))
  (and (injector-first (carrier-preempted carrier))
       (>= (fiber-now) (carrier-preempted-until carrier))))
