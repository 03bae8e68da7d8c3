;;;; who sees that a carrier is stuck, and takes its scheduler away

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; A fiber that computes, or is in a foreign call that waits, keeps its carrier, and does not say
;;; so. The monitor of a group, a thread, looks at the carriers every *STUCK-CARRIER-TIME*.
;;; From one that has run the same fiber all the time it takes the scheduler away, with
;;; the queue, the deadlines and the poller, and a spare serves it. The carrier becomes a
;;; spare when its fiber parks. The monitor also sees to it that there is a spare.
;;;
;;; The carrier is not asked, and no signal is sent to it: that would make its system call fail with
;;; EINTR, and would not be heard with interrupts off. Nor may it pay for a locked instruction in
;;; each switch. Instead:
;;;
;;;     the carrier                             the monitor
;;;     C1  make TURN odd                       M1  take SCHEDULER out of the carrier (atomically)
;;;     C2  read SCHEDULER, use it if not NIL   M2  let all threads execute a barrier: membarrier(2)
;;;     C3  make TURN even                      M3  wait until TURN is even, or another than at first,
;;;                                                 or the carrier is a spare
;;;                                             M4  pass the scheduler on
;;;
;;; Nobody else uses the scheduler after M3. If the carrier read it in C2, it did so before the
;;; barrier M2, so that C1, which was before, is seen by M3, which waits until this use is over, C3.
;;; What begins later finds NIL. A carrier that is asleep in its poller has TURN odd: it is woken,
;;; reads SCHEDULER again, and becomes a spare. TURN changes when it begins to be one and when it
;;; ceases, so that M3 cannot miss a short time of it.
;;;
;;; Who wants to give his scheduler away himself, since he is going to block, does as M1 and M4
;;; do; he is at no C2. Of him and the monitor one gets it.
;;;
;;; Deadlines and descriptors need no more: heap and cells have locks, and may be used by
;;; any thread. A fiber that enters its deadline into a heap that has been passed on meanwhile
;;; sees that its carrier does not have it (ENTER-DEADLINE), by the same argument.
;;;
;;; Sleep. While all schedulers are asleep in their pollers, nothing has to be watched, and the
;;; monitor sleeps without a time-out. It sets MONITOR-ASLEEP, *then* reads IDLE; a carrier leaves
;;; IDLE, *then* reads MONITOR-ASLEEP; with a full barrier in both. So either it sees that one is
;;; awake, or that one rouses it.

(declaim (type (or null (real (0) 3600)) *stuck-carrier-time*))
(define-load-time-global *stuck-carrier-time* 1/100
  "After how many seconds without a switch a carrier counts as stuck. NIL if none ever does.")

(declaim (type (integer 1 128) *spare-carrier-limit*))
(define-load-time-global *spare-carrier-limit* 64
  "The most carriers that a group has in addition to those that serve a scheduler.")

;;;; spares

(defun count-used (places)
  (declare (simple-vector places))
  (count-if-not (lambda (object) (eql object 0)) places))

(defun starting-spare-p (carrier)
  (and (= (carrier-context carrier) 0) (null (carrier-scheduler carrier))))

(defun need-spare-p (group)
  "Are there not more spares, those that are being started included, than schedulers that want one?"
  (let ((carriers (fiber-group-carriers group)))
    (and (<= (+ (count-used (fiber-group-spares group))
                (count-if #'starting-spare-p carriers))
             (count-used (fiber-group-orphans group)))
         (< (length carriers)
            (+ *spare-carrier-limit* (length (fiber-group-schedulers group)))))))

;;; If the kernel has no thread for us now it may have one at the next look.
(defun start-spare-if-needed (group)
  (when (need-spare-p group)
    (ignore-errors (start-carrier group nil))))

(defun spare-coming-p (group)
  "Will a scheduler that is given away find a spare?"
  (start-spare-if-needed group)
  (not (need-spare-p group)))

;;;; spares that are not needed any more

;;; A second, as a rule: threads that are needed again and again are not made again and again.
(defconstant +looks-before-retiring+ 100)

;;; Only a fiber that runs on a carrier gets it as its home, and ceases to have it there. So none
;;; will return to a carrier that idles and is the home of none; and once a spare is in no place any
;;; more it cannot run one, and its count does not change.
(defun home-of-none-p (carrier)
  (= 0 (carrier-guests (truly-the carrier carrier))))

(defun take-homeless-spare (group)
  (let ((places (fiber-group-spares group)))
    (dotimes (i (length places))
      (let ((spare (svref places i)))
        (when (and (not (eql spare 0))
                   (home-of-none-p spare)
                   (eq (cas (svref places i) spare 0) spare))
          (return spare))))))

(defun retire-spare (group)
  "Let a spare of GROUP end. Return false if all are wanted by pinned fibers."
  (let ((spare (take-homeless-spare group)))
    (when spare
      (let ((spare (truly-the carrier spare)))
        (cond ((home-of-none-p spare)
               (end-spare group spare))
              (t ; it has served since it was looked at
               (put-spare-back group spare)
               (place-orphans group))))
      t)))

(defun end-spare (group spare)
  (incf (fiber-group-past-turns group) (carrier-turn spare))
  (setf (fiber-group-carriers group) (remove spare (fiber-group-carriers group))
        (fiber-group-retired group)
        (cons (carrier-thread spare)
              (delete-if-not #'sb-thread:thread-alive-p (fiber-group-retired group)))
        (carrier-spare spare) :retired)
  (wake-carrier spare))

(defun retire-spare-if-quiet (group)
  "If GROUP has more spares than it needs, and nothing has been stuck for some time, let one end.
Return true if there is more to do."
  (and (> (count-used (fiber-group-spares group)) (length (fiber-group-schedulers group)))
       (or (< (incf (fiber-group-quiet-looks group)) +looks-before-retiring+)
           (retire-spare group))))

;;;; taking a scheduler away

(defun %barrier-everywhere ()
  (alien-funcall (extern-alien "fiber_barrier_everywhere" (function int))))

(defun await-end-of-use (group carrier scheduler)
  (let ((turn (carrier-turn carrier)))
    (loop until (or (evenp turn)
                    (/= turn (carrier-turn carrier))
                    (carrier-spare carrier)
                    (eq (fiber-group-state group) :stopped))
          do (wake-poller (scheduler-poller scheduler))
             (spin-for-tiny-lock))))

(defun take-scheduler-away (group carrier)
  "Let a spare of GROUP serve the scheduler of CARRIER, whatever CARRIER is doing."
  (let ((scheduler (detach-scheduler carrier)))
    (when scheduler
      (%barrier-everywhere)
      (await-end-of-use group carrier scheduler)
      (pass-scheduler-on group scheduler))))

;;;; sleeping

(defun sleep-until-alarm (group nanoseconds)
  "Sleep until the alarm of the monitor of GROUP is set, for NANOSECONDS at most if that is not NIL,
or until a signal comes."
  (with-pinned-objects (group)
    (if nanoseconds
        (multiple-value-bind (seconds rest) (truncate nanoseconds 1000000000)
          (wait-natively (fiber-group-monitor-alarm-address group) 0 seconds (ceiling rest 1000)))
        (wait-natively (fiber-group-monitor-alarm-address group) 0 -1 0))))

;;;; what is stuck

(defun thread-time (carrier)
  "Nanoseconds for which the thread of CARRIER has had a processor."
  (alien-funcall (extern-alien "fiber_thread_time" (function (signed 62) int))
                 (sb-thread:thread-os-tid (carrier-thread carrier))))

(defun waits-in-kernel-p (carrier)
  (= 1 (alien-funcall (extern-alien "fiber_thread_waits" (function int int))
                      (sb-thread:thread-os-tid (carrier-thread carrier)))))

;;; After a collection some threads are still about to be released when others, we among them, run.
;;; We do not call NANOSLEEP: the kernel counts from anew, with its slack, after each signal of the
;;; collector, which may be for ever.
(defun keeps-waiting-p (group carrier turn)
  (let ((until (nanoseconds-from-now 500000)))
    (and (waits-in-kernel-p carrier)
         (progn (sleep-until-alarm group 500000)
                (deadline-passed-p until))
         (waits-in-kernel-p carrier)
         (= turn (carrier-turn carrier)))))

(defun stuck-p (group carrier now period)
  "Has CARRIER, which has a scheduler, run the same fiber for PERIOD? A thread that just has had no
processor is not stuck."
  (let ((turn (carrier-turn carrier)))
    (cond ((or (oddp turn) (null (carrier-scheduler carrier)))
           (setf (carrier-seen-turn carrier) 1)
           nil)
          ((/= turn (carrier-seen-turn carrier))
           (setf (carrier-seen-turn carrier) turn
                 (carrier-seen-since carrier) now
                 (carrier-seen-time carrier) (thread-time carrier))
           nil)
          ((< (- now (carrier-seen-since carrier)) period) nil)
          (t (or (keeps-waiting-p group carrier turn)
                 (>= (- (thread-time carrier) (carrier-seen-time carrier)) (ash period -1)))))))

(defun look-at-carriers (group period)
  (let ((now (fiber-now)))
    (dolist (carrier (fiber-group-carriers group))
      (when (stuck-p group carrier now period)
        (relieve group carrier (carrier-seen-turn carrier) period)))))

(defun relieve (group carrier turn period)
  "CARRIER is stuck in TURN. If there is no spare it keeps its scheduler, and may have it back
sooner."
  (let ((known (= turn (carrier-stuck-turn carrier))))
    (unless known
      (setf (carrier-stuck-turn carrier) turn
            (fiber-group-quiet-looks group) 0)
      (incf (fiber-group-stuck group)))
    (when (spare-coming-p group)
      (take-scheduler-away group carrier))
    (unless known
      (report-stuck carrier turn period))))

;;;; telling the user

;;; Contexts are never unmapped; what is found may have left CARRIER just now, or be another on its
;;; stack.
(defun fiber-on (carrier)
  "The fiber that CARRIER runs, or NIL. May be called by any thread."
  (let ((fiber (sb-thread::with-tls-lock ((carrier-thread carrier) thread)
                 (let ((context (if (= thread 0)
                                    0
                                    (sap-ref-word (int-sap thread)
                                                  (ash sb-vm::thread-fiber-context-slot
                                                       sb-vm:word-shift)))))
                   (and (/= context 0)
                        (fiber-at (context-word (int-sap context) index)))))))
    (and fiber (eq (fiber-carrier fiber) carrier) fiber)))

;;; A warning is printed by a thread of the pool: the stream's lock may belong to the fiber that is
;;; stuck. An error is signalled in the fiber, where that can be interrupted. If the pool gets no
;;; thread the warning waits.
(defun report-stuck (carrier turn period)
  (let* ((action *pinned-blocking-action*)
         (fiber (and action (fiber-on carrier))))
    (when (and fiber (= turn (carrier-turn carrier)))
      (let ((control "~@<~S has kept its carrier for more than ~D ms.~:@>")
            (time (ceiling period 1000000)))
        (if (eq action :error)
            (%interrupt-fiber fiber (lambda () (misuse fiber control fiber time)))
            (ignore-errors (call-in-pool (lambda () (warn control fiber time)))))))))

(declaim (ftype (sfunction (t) list) fiber-group-statistics))
(defun fiber-group-statistics (group)
  "A property list of what the carriers of GROUP have done: numbers, true a moment ago."
  (let* ((group (group-argument group))
         (carriers (fiber-group-carriers group)))
    (list :carriers (length (fiber-group-schedulers group))
          :spares (count-used (fiber-group-spares group))
          :threads (length carriers)
          :fibers (fiber-group-alive group)
          :switches (ash (+ (fiber-group-past-turns group)
                            (loop for carrier in carriers sum (carrier-turn carrier)))
                         -1)
          :steals (loop for scheduler across (fiber-group-schedulers group)
                        sum (scheduler-steals scheduler))
          :stuck-now (count-if (lambda (carrier)
                                 (= (carrier-turn carrier) (carrier-stuck-turn carrier)))
                               carriers)
          :stuck-ever (fiber-group-stuck group))))

;;;; the monitor's thread

(defun rouse-monitor (group)
  "Called by a carrier that is going to run fibers, if the monitor is asleep."
  (when (= (cas (fiber-group-monitor-asleep group) 1 0) 1)
    (ring-monitor group)))

(defun all-idle-p (group)
  (loop for scheduler across (fiber-group-schedulers group)
        always (logbitp (poller-index (scheduler-poller scheduler)) (fiber-group-idle group))))

(defun wait-for-alarm (group nanoseconds)
  (sleep-until-alarm group nanoseconds)
  (setf (fiber-group-monitor-alarm group) 0)
  (barrier (:memory)))

(defun doze (group period)
  "Sleep for PERIOD, or until a carrier wakes if PERIOD is NIL, or all are asleep and no spares are
to end."
  (setf (fiber-group-monitor-asleep group) (if period 1 0))
  (barrier (:memory))
  (cond ((or (null period)
             (and (not (retire-spare-if-quiet group)) (all-idle-p group)))
         (wait-for-alarm group nil)
         (setf (fiber-group-monitor-asleep group) 0))
        (t
         (setf (fiber-group-monitor-asleep group) 0)
         (wait-for-alarm group period))))

;;; Without membarrier(2), before Linux 4.14, no scheduler can be taken away.
(defun look-period (supported)
  (let ((time *stuck-carrier-time*))
    (and supported time (seconds-to-nanoseconds time))))

;;; Where nobody looks at carriers, a spare that the kernel had no thread for is still wanted.
(defun time-until-attempt (group)
  (and (need-spare-p group) 10000000))

(defun run-monitor (group)
  (let ((supported (= 0 (%barrier-everywhere))))
    (loop until (eq (fiber-group-state group) :stopped)
          do (let ((period (look-period supported)))
               (start-spare-if-needed group)
               (when period (look-at-carriers group period))
               (doze group (or period (time-until-attempt group)))))))
