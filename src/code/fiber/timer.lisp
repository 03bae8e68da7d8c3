;;;; the timers of fibers

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; A TIMER whose thread is a fiber is in the deadline heap of a scheduler, and not in the
;;; schedule of timer.lisp, for which the process has one clock, and a signal that comes to any
;;; thread. When its time has come, scheduler code has the fiber interrupted (RING-ALARM).
;;; All else is as for other timers: WITH-TIMEOUT, repetition, cancellation.
;;;
;;; What is true when nobody is inside: a timer that is scheduled is either in *SCHEDULE*, or its
;;; alarm is in a heap. Both change under the scheduler lock only, but for timers that expire.
;;; A timer of a fiber that has not been submitted, or has ended, is in *SCHEDULE*: that
;;; fiber has no scheduler.

(defun scheduler-for-alarm (group)
  "A scheduler of GROUP; if possible that of this thread."
  (declare (fiber-group group))
  (or (my-scheduler group)
      (svref (fiber-group-schedulers group) 0)))

(defun set-alarm (timer)
  "Schedule TIMER, which is not scheduled, if its thread is a fiber that has a scheduler. Return
false if it is to be scheduled otherwise."
  (let* ((fiber (sb-impl::%timer-thread timer))
         (group (and (fiber-p fiber) (fiber-group fiber)))) ; which it may lose now, by ending
    (when (and group (fiber-alive-p fiber))
      (let ((alarm (or (sb-impl::%timer-alarm timer)
                       (setf (sb-impl::%timer-alarm timer) (make-alarm fiber timer)))))
        (setf (alarm-function alarm) (sb-impl::%timer-interrupt-function timer))
        (enter-time (scheduler-for-alarm group) alarm (expiry timer)))
      t)))

(defun expiry (timer)
  "When TIMER expires, in the clock of FIBER-NOW."
  (nanoseconds-from-now (ceiling (* (max 0 (sb-impl::time-left timer)) 1000000000)
                                 internal-time-units-per-second)))

(defun remove-alarm (timer)
  "Let TIMER no longer be in the heap of a scheduler. Return false if it was in none."
  (let ((alarm (sb-impl::%timer-alarm timer)))
    (and alarm (heap-remove alarm))))

(defun timers-with-alarms ()
  (loop for group in *groups*
        nconc (loop for scheduler across (fiber-group-schedulers group)
                    nconc (loop for alarm in (heap-alarms (scheduler-deadlines scheduler))
                                ;; the alarm of INTERRUPT-LATER has no timer
                                when (alarm-timer alarm) collect it))))
