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
;;; scheduler. The group keeps a spare carrier ready, asleep on its wake word, because a thread
;;; cannot be made at this point: MAKE-THREAD takes locks. The spare keeps the scheduler; the old
;;; carrier becomes a spare once its fiber parks. From a carrier that is stuck elsewhere the
;;; monitor takes the scheduler away, see fiber/monitor.lisp.

;;; A handler that is deferred sets the wake word, too: nothing else would end the next sleep.
(define-alien-routine ("fiber_sleep_on" %sleep-on) void (word unsigned))

(defun sleep-as-spare (carrier)
  (with-pinned-objects (carrier)
    (%sleep-on (carrier-wake-word-address carrier)))
  (setf (carrier-wake-word carrier) 0)
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

(defun wake-monitor (group)
  (ensure-waking-room 1024)
  (when (= (cas (fiber-group-monitor-wake-word group) 0 1) 0)
    (with-pinned-objects (group)
      (%futex-wake (fiber-group-monitor-wake-word-address group) 1))))

(defun all-free-p (places)
  (declare (simple-vector places))
  (loop for object across places always (eql object 0)))

(defun place-orphans (group)
  "Give schedulers of GROUP that no carrier serves to spares. Called by a thread that has added a
scheduler or a spare: if one thread adds a scheduler and another a spare, the second sees both."
  (let ((orphans (fiber-group-orphans group))
        (spares (fiber-group-spares group)))
    (loop
      (when (all-free-p orphans) (return))
      (let ((spare (take-from-place spares)))
        (unless spare (return))
        (let ((orphan (take-from-place orphans)))
          (cond (orphan
                 (setf (carrier-scheduler (truly-the carrier spare)) orphan
                       (carrier-spare (truly-the carrier spare)) :taken)
                 (wake-carrier spare))
                (t (put-spare-back group spare))))))))

(defun detach-scheduler (carrier)
  "Let CARRIER have no scheduler; return the one that it had, or NIL. Only one thread gets it."
  (loop
    (let ((scheduler (carrier-scheduler carrier)))
      (when (or (null scheduler)
                (eq (cas (carrier-scheduler carrier) scheduler nil) scheduler))
        (return scheduler)))))

(defun pass-scheduler-on (group scheduler)
  "Let a spare of GROUP serve SCHEDULER, which no thread uses."
  (put-in-place (fiber-group-orphans group) scheduler)
  (place-orphans group)
  (wake-monitor group))

(defun give-scheduler-away (carrier)
  "Let a spare of the group serve the scheduler of CARRIER, which is going to block."
  (ensure-waking-room 3072)
  (without-interruptions
    (let ((scheduler (detach-scheduler carrier)))
      (when scheduler
        (pass-scheduler-on (truly-the fiber-group (carrier-group carrier)) scheduler)))))

(defun announce-blocking ()
  "This thread is going to block in the kernel, perhaps until some fiber has run."
  (let ((carrier *carrier*))
    (when carrier
      (let ((carrier (truly-the carrier carrier)))
        (when (in-scheduler-p carrier)
          (scheduler-bug "fiber scheduler code waits for a lock"))
        (give-scheduler-away carrier)))))

;;; The slot SPARE of a carrier, while it has no scheduler and runs nothing:
;;;
;;;   move                 by
;;;   NIL     -> :LISTED   the carrier, before it puts itself into a place of SPARES
;;;   :LISTED -> :TAKEN    the thread that has taken it out of there, and given it a scheduler
;;;   :LISTED -> :RETIRED  the monitor, having taken it out of there: it is to end
;;;   :LISTED -> NIL       the carrier, having taken itself out, since it has something to do
;;;   :TAKEN  -> NIL       the carrier
;;;
;;; A thread that takes a spare out wakes it, also if it has put the spare back: that may have tried
;;; to take itself out meanwhile.

(defun carrier-to-end-p (carrier group)
  (or (eq (fiber-group-state group) :stopped) (eq (carrier-spare carrier) :retired)))

(defun put-spare-back (group spare)
  (put-in-place (fiber-group-spares group) spare)
  (wake-carrier spare))

(defun list-spare (carrier group)
  (advance-epoch carrier)
  (setf (carrier-spare carrier) :listed)
  (put-in-place (fiber-group-spares group) carrier)
  (place-orphans group)
  ;; The monitor may have seen this spare, which has got a scheduler now, and count on it for the
  ;; next orphan; or it may be asleep while there are more spares than are needed.
  (wake-monitor group))

(defun unlist-spare (carrier group)
  "Return false if CARRIER is not in a place any more."
  (let ((spares (fiber-group-spares group)))
    (dotimes (i (length spares))
      (when (eq (cas (svref spares i) carrier 0) carrier) (return t)))))

;;; That a scheduler has been given is told by :TAKEN, which the giving thread writes after the
;;; scheduler; it writes neither slot again. The monitor may have taken the scheduler away by then;
;;; if so the carrier comes back. If a spare ran a fiber while it is listed, it would be given a
;;; scheduler that no carrier serves meanwhile.
(defun idle-as-spare (carrier group)
  "Sleep until CARRIER has been given a scheduler, or there is something else to do."
  (list-spare carrier group)
  (loop until (or (eq (carrier-spare carrier) :taken)
                  (carrier-to-end-p carrier group)
                  (and (or (carrier-inbox carrier) (handlers-wait-p))
                       (unlist-spare carrier group)))
        do (sleep-as-spare carrier))
  (advance-epoch carrier)
  (unless (eq (carrier-spare carrier) :retired)
    (setf (carrier-spare carrier) nil)
    (barrier (:memory))                 ; see DOZE
    (unless (= (fiber-group-monitor-asleep group) 0) (wake-monitor-if-asleep group))))
