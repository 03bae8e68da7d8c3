;;;; the population of a group: how many fibers it has, and whether there may be more

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; The low half of the word counts the fibers from their submission to their end; it is what
;;; FINISH-FIBERS waits on, as on the word of a mutex. The bit +CLOSED+ above it says that there
;;; will be no more. Both are in one word, so that no fiber is counted between the look at a group
;;; in which none is alive and its end. The bits above that count the fibers that are not in the
;;; table of the living yet, or not with their group: if there are none when a thread looks, after
;;; the group was closed, then LIST-ALL-FIBERS has all that are alive.
;;;
;;;     move                     by
;;;     open n   -> open n+1     the thread that submits a fiber (and one more entry)
;;;     open n   -> closed n     the thread that ends all fibers
;;;     open 0   -> closed 0     the thread that waits for the end of all
;;;     n        -> n-1          a fiber at its end, or the thread that got no stack for it
;;;
;;; A group is never opened again: closed 0 is for ever.

(defconstant +closed+ (ash 1 32))
(defconstant +entry+ (ash 1 33))

(define-structure-slot-addressor fiber-group-population-address
  :structure fiber-group :slot population)

(declaim (inline fiber-group-alive))
(defun fiber-group-alive (group)
  "How many fibers of GROUP were submitted and have not ended."
  (ldb (byte 32 0) (fiber-group-population group)))

(defun enter-population (group)
  "Count one more fiber of GROUP. Return how many there are now, or NIL if it is closed."
  (loop
    (let ((old (fiber-group-population group)))
      (when (logtest old +closed+) (return nil))
      (when (= (cas (fiber-group-population group) old (truly-the word (+ old 1 +entry+))) old)
        (return (1+ (ldb (byte 32 0) old)))))))

(defun leave-entry (group)
  "A fiber that ENTER-POPULATION has counted can be found now, or will not live."
  (atomic-decf (fiber-group-population group) +entry+))

(defun entries-p (group)
  "Are there fibers of GROUP that are counted and perhaps cannot be found?"
  (>= (fiber-group-population group) +entry+))

(defun group-closed-p (group)
  "Does GROUP take no more fibers?"
  (logtest (fiber-group-population (truly-the fiber-group group)) +closed+))

(defun close-group (group)
  "Let no more fibers enter GROUP."
  (loop
    (let ((old (fiber-group-population group)))
      (when (= (cas (fiber-group-population group) old (logior old +closed+)) old)
        (return)))))

(defun close-if-empty (group)
  "Let no more fibers enter GROUP if none is alive. Return false if one is."
  (= 0 (ldb (byte 32 0) (cas (fiber-group-population group) 0 +closed+))))

(defun leave-group (group)
  (when (= (ldb (byte 32 0) (atomic-decf (fiber-group-population group))) 1)
    (with-pinned-objects (group)
      (wake-on-word (fiber-group-population-address group) (ash 1 29)))))

;;; Where memory may run out: a scheduler cannot allocate.
(defun provide-queues (group alive)
  "Let the queues of GROUP become long if with one more it has so many fibers, ALIVE, that they do
not fit."
  (declare (type (unsigned-byte 32) alive))
  (when (= (mod alive run-queue-capacity) 0)
    (loop for scheduler across (fiber-group-schedulers group)
          do (run-queue-provide (scheduler-queue (truly-the scheduler scheduler))))))
