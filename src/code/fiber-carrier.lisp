;;;; what becomes of a scheduler whose carrier blocks

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; Before a carrier blocks in the kernel with a fiber on it, or in a handler on its own
;;; stack, it gives its scheduler away: what it waits for may be done by a fiber of that very
;;; scheduler. The group keeps a spare carrier ready, asleep on its alarm, because a thread cannot
;;; be made at this point: MAKE-THREAD takes locks. It keeps the scheduler; the old
;;; carrier becomes a spare once its fiber parks.

;;; A handler that is deferred sets the alarm, too: nothing else would end the sleep that follows.
(define-alien-routine ("fiber_sleep_on" %sleep-on) void (word unsigned))

(defun sleep-on-alarm (carrier)
  (with-pinned-objects (carrier)
    (%sleep-on (carrier-alarm-address carrier)))
  (setf (carrier-alarm carrier) 0)
  (barrier (:memory)))

(defun put-in-place (places object)
  "Put OBJECT in a free place of PLACES. Return false if there is none."
  (declare (simple-vector places))
  (dotimes (i (length places))
    (when (eql (cas (svref places i) 0 object) 0) (return t))))

(defun take-from-place (places)
  "Remove and return an object from PLACES, or return NIL."
  (declare (simple-vector places))
  (dotimes (i (length places))
    (let ((object (svref places i)))
      (when (and (not (eql object 0)) (eq (cas (svref places i) object 0) object))
        (return object)))))

(defun ring-manager (group)
  (when (= (cas (fiber-group-manager-alarm group) 0 1) 0)
    (with-pinned-objects (group)
      (%futex-wake (fiber-group-manager-alarm-address group) 1))))

(defun all-free-p (places)
  (declare (simple-vector places))
  (loop for object across places always (eql object 0)))

(defun place-orphans (group)
  "Give schedulers of GROUP that nobody serves to spares. Called by who has added one of either: of two
who do so at a time the second sees both."
  (let ((orphans (fiber-group-orphans group))
        (spares (fiber-group-spares group)))
    (loop
      (when (all-free-p orphans) (return))
      (let ((spare (take-from-place spares)))
        (unless spare (return))
        (let ((orphan (take-from-place orphans)))
          (cond (orphan
                 (setf (carrier-scheduler (truly-the carrier spare)) orphan)
                 (wake-carrier spare))
                (t (put-in-place spares spare))))))))

(defun give-scheduler-away (carrier)
  "Let a spare of the group serve the scheduler of CARRIER, which is going to block."
  (let ((scheduler (carrier-scheduler carrier))
        (group (truly-the fiber-group (carrier-group carrier))))
    (when scheduler
      (setf (carrier-scheduler carrier) nil)
      (put-in-place (fiber-group-orphans group) scheduler)
      (place-orphans group)
      (ring-manager group))))

(defun announce-blocking ()
  "This thread is going to block in the kernel, perhaps until some fiber has run."
  (let ((carrier *carrier*))
    (when carrier
      (let ((carrier (truly-the carrier carrier)))
        (unless (or (in-fiber-p) (carrier-handling carrier))
          (scheduler-bug "fiber scheduler code waits for a lock"))
        (give-scheduler-away carrier)))))

(defun idle-as-spare (carrier group)
  "Sleep until there is a scheduler for CARRIER, or a fiber in its inbox."
  (put-in-place (fiber-group-spares group) carrier)
  (place-orphans group)
  ;; It may have seen this spare, which has got a scheduler now, and think that there is one for the
  ;; next orphan.
  (ring-manager group)
  (loop until (or (carrier-scheduler carrier) (eq (fiber-group-state group) :stopped))
        do (run-inbox carrier)
           (run-pending-handlers carrier)
           (sleep-on-alarm carrier)))

(defun carrier-loop (carrier)
  (let ((group (truly-the fiber-group (carrier-group carrier))))
    (loop until (eq (fiber-group-state group) :stopped)
          do (if (carrier-scheduler carrier)
                 (serve-scheduler carrier)
                 (idle-as-spare carrier group)))))
