;;;; the monitor, which sees that a carrier is stuck, and takes its scheduler away

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
;;; so. The monitor of a group, a thread, looks at the carriers every *STUCK-CARRIER-TIME*, or every
;;; time slice or +LOOK-AT-CROWD+ if that is shorter. From a carrier that has run the same fiber all
;;; the time, and for *STUCK-CARRIER-TIME*, it takes the scheduler away, with the queue, the
;;; deadlines and the poller, and a spare serves that. The carrier becomes a spare when its fiber
;;; parks, and no other has to go on there. The monitor also sees to it that there is a spare.
;;;
;;; For that the carrier is not asked (as it is to end a time slice, see fiber/slice.lisp), and no
;;; signal is sent to it: that would make its system call fail with EINTR, and would not be heard
;;; with interrupts off. Nor may it pay for a locked instruction in each switch. Instead:
;;;
;;;     the carrier                             the monitor
;;;     C1  make EPOCH odd                      M1  take SCHEDULER out of the carrier (atomically)
;;;     C2  read SCHEDULER, use it if not NIL   M2  let all threads execute a barrier: membarrier(2)
;;;     C3  make EPOCH even                     M3  wait until EPOCH is even, or another than at
;;;                                                 first, or the carrier is a spare
;;;                                             M4  pass the scheduler on
;;;
;;; After M3 no other thread uses the scheduler. If the carrier read it in C2, it did so before the
;;; barrier M2, so that C1, which was before, is seen by M3, which waits until this use is over, C3.
;;; A use that begins later finds NIL. A carrier that is asleep in its poller has EPOCH odd: it is
;;; woken, reads SCHEDULER again, and becomes a spare. EPOCH changes when the carrier begins to be a
;;; spare and when it ceases, so that M3 cannot miss a short time of that. If all of it was over
;;; before M3 first read EPOCH, the carrier has been given another scheduler, and may be asleep in
;;; its poller for ever.
;;;
;;; A carrier that gives its scheduler away itself, since it is going to block, does as M1 and M4
;;; do; it is at no C2. Of the carrier and the monitor, one gets the scheduler.
;;;
;;; Deadlines and descriptors need no more: heap and cells have locks, and may be used by
;;; any thread. A fiber that enters its deadline into a heap that has been passed on meanwhile
;;; sees that its carrier does not have it (ENTER-DEADLINE), by the same argument.
;;;
;;; Sleep. While all schedulers are asleep in their pollers, nothing has to be watched, and the
;;; monitor sleeps without a time-out. It sets MONITOR-ASLEEP, *then* reads IDLE; a carrier leaves
;;; IDLE, or ceases to be a spare, *then* reads MONITOR-ASLEEP; with a full barrier in both. So
;;; either the monitor sees that a carrier is awake, or that carrier wakes the monitor.

(declaim (type (or null (real (0) 3600)) *stuck-carrier-time*))
(define-load-time-global *stuck-carrier-time* 1/100
  "After how many seconds without a switch a carrier counts as stuck: a positive real of at most
3600, by default 1/100, or NIL if none ever does. A thread that has had no processor because others
had it is not stuck. A global variable: it can be set and not be bound.")

(declaim (type (integer 1 128) *spare-carrier-limit*))
(define-load-time-global *spare-carrier-limit* 64
  "The most threads that a group has besides as many carriers as it was started with, an integer
from 1 to 128, by default 64. If as many carriers are stuck, others that get stuck keep their work
until they are back. A global variable: it can be set and not be bound.")

;;;; spares

(defun count-used (places)
  (declare (simple-vector places))
  (count-if-not (lambda (object) (eql object 0)) places))

;;; Its first act is LIST-SPARE.
(defun starting-spare-p (carrier)
  (and (= (carrier-epoch carrier) 1) (null (carrier-scheduler carrier))))

(defun need-spare-p (group)
  "Are there not more spares, those that are being started included, than schedulers that want one?"
  (let ((carriers (fiber-group-carriers group)))
    (and (<= (+ (count-used (fiber-group-spares group))
                (count-if #'starting-spare-p carriers))
             (count-used (fiber-group-orphans group)))
         (< (length carriers)
            (+ *spare-carrier-limit* (length (fiber-group-schedulers group)))))))

;;; If the kernel has no thread for the group now, it may have one at the next look.
(defun start-spare-if-needed (group)
  (when (need-spare-p group)
    (ignore-errors (start-carrier group nil))))

(defun spare-coming-p (group)
  "Will a scheduler that is given away find a spare?"
  (start-spare-if-needed group)
  (not (need-spare-p group)))

;;;; spares that are not needed any more

;;; That is a second, as a rule: threads that are needed again and again are not made each time.
(defconstant +periods-before-retiring+ 100)

;;; A fiber gets a carrier as its home, and ceases to have it, only while it runs there. So no fiber
;;; will return to a carrier that idles and is the home of none; and once a spare is in no place any
;;; more it cannot run a fiber, and its count does not change.
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
  "Let a spare of GROUP end. Return false if each is the home of some fiber."
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
  (incf (fiber-group-past-epochs group) (carrier-epoch spare))
  (setf (fiber-group-carriers group) (remove spare (fiber-group-carriers group))
        (fiber-group-retired group)
        (cons (carrier-thread spare)
              (delete-if-not #'sb-thread:thread-alive-p (fiber-group-retired group)))
        (carrier-spare spare) :retired)
  (wake-carrier spare))

(defun note-quiet-look (group period)
  "Called at each look, every PERIOD: return true if none has been stuck for so long that spares are
not needed."
  (>= (* period (incf (fiber-group-quiet-looks group)))
      (* +periods-before-retiring+ (or (look-period t) period))))

(defun retire-spare-if-quiet (group period)
  "If GROUP has more spares than it needs, and nothing has been stuck for some time, let one end.
Return true if there is more to do."
  (and (> (count-used (fiber-group-spares group)) (length (fiber-group-schedulers group)))
       (or (not (note-quiet-look group period)) (retire-spare group))))

;;;; taking a scheduler away

(defun %barrier-everywhere ()
  (alien-funcall (extern-alien "fiber_barrier_everywhere" (function int))))

(defun use-over-p (group carrier epoch)
  "Has CARRIER, whose epoch was EPOCH after its scheduler was taken away, ceased to use that?"
  (or (evenp epoch)
      (/= epoch (carrier-epoch carrier))
      (carrier-spare carrier)
      (carrier-scheduler carrier)
      (eq (fiber-group-state group) :stopped)))

(defun await-end-of-use (group carrier scheduler)
  (let ((epoch (carrier-epoch carrier)))
    (loop until (use-over-p group carrier epoch)
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

(defun sleep-as-monitor (group nanoseconds)
  "Sleep until the monitor of GROUP is woken, for NANOSECONDS at most if that is not NIL,
or until a signal comes."
  (with-pinned-objects (group)
    (if nanoseconds
        (multiple-value-bind (seconds rest) (truncate nanoseconds 1000000000)
          (wait-natively (fiber-group-monitor-wake-word-address group)
                         0 seconds (ceiling rest 1000)))
        (wait-natively (fiber-group-monitor-wake-word-address group) 0 -1 0))))

;;;; what is stuck

(defun thread-time (carrier)
  "Nanoseconds for which the thread of CARRIER has had a processor."
  (alien-funcall (extern-alien "fiber_thread_time" (function (signed 62) int))
                 (sb-thread:thread-os-tid (carrier-thread carrier))))

(defun waits-in-kernel-p (carrier)
  (= 1 (alien-funcall (extern-alien "fiber_thread_waits" (function int int))
                      (sb-thread:thread-os-tid (carrier-thread carrier)))))

;;; After a collection some threads are still about to be released when others, the monitor among
;;; them, run already. This is not NANOSLEEP, for which the kernel begins to count again, with its
;;; slack, after each signal of the collector: that may be for ever.
(defun keeps-waiting-p (group carrier epoch)
  (let ((until (nanoseconds-from-now 500000)))
    (and (waits-in-kernel-p carrier)
         (progn (sleep-as-monitor group 500000)
                (deadline-passed-p until))
         (waits-in-kernel-p carrier)
         (= epoch (carrier-epoch carrier)))))

(defun begin-to-count (carrier now)
  (setf (carrier-seen-since carrier) now
        (carrier-seen-time carrier) (thread-time carrier)))

;;; A carrier whose scheduler has been taken away goes on with the fibers whose home it is.
(defun length-of-turn (carrier now)
  "For how many nanoseconds CARRIER has been seen to run the same fiber, or NIL if no other can wait
for that."
  (let ((epoch (carrier-epoch carrier)))
    (cond ((or (oddp epoch)
               (and (null (carrier-scheduler carrier)) (home-of-none-p carrier)))
           (setf (carrier-seen-epoch carrier) 1)
           nil)
          ((/= epoch (carrier-seen-epoch carrier))
           (setf (carrier-seen-epoch carrier) epoch)
           (begin-to-count carrier now)
           nil)
          (t (- now (carrier-seen-since carrier))))))

;;; What computes has been asked to yield, and has had PERIOD to do so.
(defun stuck-p (group carrier length period slice)
  "Is CARRIER stuck, which has run the same fiber for LENGTH, or for LENGTH since that was asked to
yield? A thread that has only had no processor is not."
  (declare (fixnum length period))
  (let ((epoch (carrier-seen-epoch carrier)))
    (and (>= length period)
         (carrier-scheduler carrier)
         (or (keeps-waiting-p group carrier epoch)
             (and (or (null slice) (= epoch (carrier-asked-epoch carrier)))
                  (>= (- (thread-time carrier) (carrier-seen-time carrier)) (ash period -1)))))))

(defun to-be-asked-p (carrier length slice)
  "Is the fiber to yield that CARRIER has run for LENGTH? A signal would end a system call that
waits."
  (declare (fixnum length slice))
  (and (>= length slice)
       (or (/= (carrier-seen-epoch carrier) (carrier-asked-epoch carrier))
           (carrier-refused-p carrier))
       (not (waits-in-kernel-p carrier))))

(defun end-slice (carrier now)
  "Let the fiber yield that CARRIER has run for a slice. From the first question on its time is
counted anew."
  (let ((epoch (carrier-seen-epoch carrier)))
    (unless (= epoch (carrier-asked-epoch carrier))
      (setf (carrier-asked-epoch carrier) epoch)
      (begin-to-count carrier now))
    (ask-to-yield carrier epoch)))

;;; In nanoseconds, where some carriers of a group sleep because others are at work.
(defconstant +look-at-crowd+ 1000000)
(defconstant +blocking-looks+ 100)

;;; A carrier that runs the same fiber for some looks, and has a processor or waits for one, is at
;;; work; one whose fiber waits in the kernel leaves a processor to another. It is to do so at two
;;; looks, else each collection, after which threads are released one by one, would call others.
;;; LIMIT-CARRIERS, after the look, calls for what nobody was called for.
(defun note-who-waits (group carrier)
  "If the scheduler of CARRIER, which runs the same fiber as at the last look, is held up by a
system call of that, let it not be counted as at work in GROUP, and expect more of that."
  (let ((scheduler (carrier-scheduler carrier)) (epoch (carrier-seen-epoch carrier)))
    (when (and scheduler
               (crowded-p group)
               (not (scheduler-held-up-p (truly-the scheduler scheduler)))
               (waits-in-kernel-p carrier)
               (= (carrier-epoch carrier) epoch)
               (= (shiftf (carrier-waiting-epoch carrier) epoch) epoch))
      (setf (fiber-group-blocking-looks group) +blocking-looks+)
      (seem-held-up (truly-the scheduler scheduler)))))

(defun look-at-carrier (group carrier now period slice)
  (let ((length (length-of-turn carrier now)))
    (when length
      (note-who-waits group carrier)
      (when (and slice (to-be-asked-p carrier length slice))
        (end-slice carrier now))
      (let ((length (- now (carrier-seen-since carrier))))
        (when (and period (stuck-p group carrier length period slice))
          (relieve group carrier (carrier-seen-epoch carrier) length))))))

(defun look-at-carriers (group period slice)
  "Relieve the carriers of GROUP that are stuck, if PERIOD is the time after which they are, and ask
the fibers to yield that have run for as long as SLICE; both in nanoseconds, or NIL."
  (when (calls-block-p group) (decf (fiber-group-blocking-looks group)))
  (let ((now (fiber-now)))
    (dolist (carrier (fiber-group-carriers group))
      (look-at-carrier group carrier now period slice))))

(defun relieve (group carrier epoch time)
  "CARRIER is stuck in EPOCH, and has been for TIME: let a spare serve its scheduler. If there is no
spare CARRIER keeps it, and may have it back sooner."
  (let ((known (= epoch (carrier-stuck-epoch carrier))))
    (unless known
      (setf (carrier-stuck-epoch carrier) epoch
            (fiber-group-quiet-looks group) 0)
      (incf (fiber-group-stuck group)))
    (when (spare-coming-p group)
      (take-scheduler-away group carrier))
    (unless known
      (report-stuck carrier epoch time))))

;;;; telling the user

;;; The lock may belong to a fiber that has no turn.
(defmacro with-free-tls-lock ((thread structure) &body body)
  "If nobody has the lock of THREAD execute BODY, with STRUCTURE bound to the address of what C has
of it."
  `(sb-thread:with-mutex ((sb-thread::thread-storage-lock ,thread) :wait-p nil)
     (let ((,structure (sb-thread::thread-primitive-thread ,thread)))
       ,@body)))

;;; Contexts are never unmapped; but the fiber that is found may have left CARRIER just now, or be
;;; another one that has got its stack.
(defun fiber-on (carrier)
  "The fiber that CARRIER runs, or NIL. May be called by any thread."
  (let ((fiber (with-free-tls-lock ((carrier-thread carrier) thread)
                 (let ((context (if (= thread 0)
                                    0
                                    (sap-ref-word (int-sap thread)
                                                  (ash sb-vm::thread-fiber-context-slot
                                                       sb-vm:word-shift)))))
                   (and (/= context 0)
                        (fiber-at (context-word (int-sap context) index)))))))
    (and fiber (eq (fiber-carrier fiber) carrier) fiber)))

;;; A warning is printed by a thread of its own: the stream's lock may belong to the fiber that is
;;; stuck, and that of the pool to one that waits behind it. While the last one waits for the lock
;;; no other is begun for the same carrier. An error is signalled in the fiber, where that can be
;;; interrupted.
(defun report-stuck (carrier epoch time)
  (let* ((action *blocked-carrier-action*)
         (fiber (and action (fiber-on carrier))))
    (when (and fiber (= epoch (carrier-epoch carrier)))
      (let ((control "~@<~S has kept its carrier for more than ~D ms.~:@>")
            (time (floor time 1000000)))
        (if (eq action :error)
            (%interrupt-fiber fiber (lambda () (misuse fiber control fiber time)))
            (call-warner carrier (lambda () (warn control fiber time))))))))

(defun call-warner (carrier function)
  (let ((last (carrier-warner carrier)))
    (unless (and last (sb-thread:thread-alive-p last))
      (setf (carrier-warner carrier) (ignore-errors (call-in-thread function))))))

;;;; the monitor's thread

(defun wake-monitor-if-asleep (group)
  "Called by a carrier that is going to run fibers, if the monitor is asleep."
  (when (= (cas (fiber-group-monitor-asleep group) 1 0) 1)
    (wake-monitor group)))

(defun all-idle-p (group)
  (loop for scheduler across (fiber-group-schedulers group)
        always (logbitp (poller-place (scheduler-poller scheduler)) (fiber-group-idle group))))

;;; Only in groups with slices; in others nobody is asked.
(defun shared-without-scheduler-p (carrier)
  "Does CARRIER run fibers that are to take turns, and have to go on there?"
  (and (fiber-group-time-slice (truly-the fiber-group (carrier-group carrier)))
       (null (carrier-scheduler carrier))
       (null (carrier-spare carrier))
       (not (home-of-none-p carrier))))

(defun wait-for-wake-up (group nanoseconds)
  (sleep-as-monitor group nanoseconds)
  (setf (fiber-group-monitor-wake-word group) 0)
  (barrier (:memory)))

(defun doze (group period)
  "Sleep for PERIOD, or until a carrier wakes if PERIOD is NIL, or all are asleep and no spares are
to end."
  (setf (fiber-group-monitor-asleep group) (if period 1 0))
  (barrier (:memory))
  (cond ((or (null period)
             (and (not (retire-spare-if-quiet group period))
                  (all-idle-p group)
                  (notany #'shared-without-scheduler-p (fiber-group-carriers group))))
         (wait-for-wake-up group nil)
         (setf (fiber-group-monitor-asleep group) 0))
        (t
         (setf (fiber-group-monitor-asleep group) 0)
         (wait-for-wake-up group period))))

;;; Without membarrier(2), before Linux 4.14, no scheduler can be taken away.
(defun look-period (supported)
  (let ((time *stuck-carrier-time*))
    (and supported time (seconds-to-nanoseconds time))))

;;; Where the monitor does not look at carriers, a spare may still be wanted, for which the kernel
;;; had no thread before.
(defun time-until-attempt (group)
  (and (need-spare-p group) 10000000))

;;; Nobody but the monitor sees that all those begin to compute who are to be at work.
(defconstant +longest-period-of-limit+ 20000000)

(defun limit-carriers (group limited-p)
  "Let no more schedulers of GROUP be at work than there are processors if LIMITED-P, and call for
what nobody was called for, now or before."
  (let ((was (fiber-group-limited-p group)))
    (setf (fiber-group-limited-p group) limited-p)
    (barrier (:memory))
    (when (and (or was limited-p)
               (> (length (fiber-group-schedulers group)) (fiber-group-processors group)))
      (call-for-what-is-left group))))

(defun time-until-look (group period slice)
  "Nanoseconds until the monitor of GROUP looks again, or NIL if it need not."
  (cond ((and period slice) (min period slice))
        ((and period (crowded-p group) (/= 0 (fiber-group-idle group)))
         (min period +look-at-crowd+))
        (t (or period slice (time-until-attempt group)))))

(defun run-monitor (group)
  (let ((supported (= 0 (%barrier-everywhere)))
        (slice (fiber-group-time-slice group)))
    (loop until (eq (fiber-group-state group) :stopped)
          do (let ((period (look-period supported)))
               (start-spare-if-needed group)
               (look-at-carriers group period slice)
               (limit-carriers group (and period (<= period +longest-period-of-limit+)))
               (doze group (time-until-look group period slice))))))
