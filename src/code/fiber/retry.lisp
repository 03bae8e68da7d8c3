;;;; a read that finds nothing is made again when others have run

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; Of two fibers of one carrier that talk over a pipe or a socket, each has to wait for the other.
;;; To park for that takes a system call that arms the descriptor, and a report. So a fiber whose
;;; read has found nothing first looks for reports, yields, and reads again: by then the other has
;;; answered, if it was queued or reported. From then on both are in the queue, each finds its
;;; answer at the first attempt, and neither arms anything.
;;;
;;; An attempt in vain costs a look and a system call, so a descriptor has a HASTE: how many of its
;;; reads that find nothing are to wait without a second attempt. After each that was in vain it is
;;; twice as long as the last time and one more, and at most +MAX-HASTE+; none after a success.
;;;
;;; The second attempt is not paid for: who makes it had nothing to read in its turn. So it may read
;;; once more before it yields, which those that always find something may not.
;;;
;;; This is done only in a group of one carrier. Two fibers in a queue, where one parked before, are
;;; something to steal: another carrier, which would sleep, parts the two, which then wake each
;;; other across processors. And of two carriers that are both busy with questions from
;;; elsewhere each takes the time that the asking program would use.

(defconstant +max-haste+ 63)

;;; With more in front of it the fiber would wait long for what is most likely not there.
(defconstant +few+ 64)

(declaim (ftype (sfunction (fd-cell boolean) null) note-retry))
(defun note-retry (cell successp)
  "Note whether a second attempt to read the descriptor of CELL had success, or a look for reports."
  (let ((haste (if successp 0 (min +max-haste+ (1+ (* 2 (fd-cell-last-haste cell)))))))
    (setf (fd-cell-haste cell) haste
          (fd-cell-last-haste cell) haste))
  nil)

(defun hasty-p (cell)
  "Is the descriptor of CELL to be waited for at once? Counts this time."
  (let ((haste (fd-cell-haste cell)))
    (and (> haste 0)
         (setf (fd-cell-haste cell) (1- haste))
         t)))

(defun others-come-first-p (scheduler cell)
  "True if some fibers are queued in SCHEDULER, but not many, after what was reported is. If there
are none that is noted for CELL."
  (let ((queue (scheduler-queue scheduler))
        (group (truly-the fiber-group (scheduler-group scheduler))))
    (and (= 1 (length (fiber-group-schedulers group)))
         (< (run-queue-length queue) +few+)
         (null (injector-first (fiber-group-injector group)))
         (progn (collect-reports scheduler 0)
                (or (> (run-queue-length queue) 0)
                    (note-retry cell nil))))))

;;; Prevents: a wake-up that is cut off by the end of the binding stack, with EPOCH odd.
(defun ensure-room-for-bindings ()
  (macrolet ((bind (n)
               (if (= n 0)
                   nil
                   `(let ((*interrupts-enabled* *interrupts-enabled*)) (bind ,(1- n))))))
    (bind 8)))

;;; Reports are for the one that serves the scheduler, which must not be taken away meanwhile; nor
;;; may a stack end there.
(declaim (ftype (sfunction (fd-cell) t) look-before-retry))
(defun look-before-retry (cell)
  "OTHERS-COME-FIRST-P for the scheduler of the running fiber."
  (and (not *force-migration*)
       (waiting-room-p (truly-the fiber *current-thread*) (* 2 waiting-room))
       (progn
         (ensure-room-for-bindings)
         (without-interruptions
           (with-own-scheduler
             (let ((scheduler (carrier-scheduler (truly-the carrier *carrier*))))
               (and scheduler (others-come-first-p (truly-the scheduler scheduler) cell))))))))

(declaim (inline retry-p))
(defun retry-p (cell)
  "Is the running fiber, which can park, to yield and to read the descriptor of CELL again?"
  (and (not (hasty-p cell))
       (look-before-retry cell)))
