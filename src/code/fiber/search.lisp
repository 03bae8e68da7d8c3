;;;; where a carrier looks for the next fiber, and how it sleeps when there is none

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; The order is: deadlines and reports of its own scheduler, the injector, its own queue; then what
;;; others have queued. What is true when nobody is inside:
;;;  - SEARCHING counts the carriers in SEARCH-ELSEWHERE;
;;;  - NAPPING is 1 only while a carrier in SLEEP-IN-POLLER, which has left something alone, waits
;;;    for no longer than +NAP+;
;;;  - a bit of IDLE is set only while that scheduler's carrier is in SLEEP-IN-POLLER, and cleared
;;;    by it or by the thread that wakes it; SLEEP of its poller is not 0 meanwhile.
;;;  - HELD-UP-P of a scheduler is true from SEEM-HELD-UP, of its carrier or of the monitor, to its
;;;    next LOOK-AROUND. Where the monitor is late it is true for one that is at work, which costs
;;;    a wake-up; who sets it executes a full barrier and calls for what is left.
;;; Why no wake-up is lost between them is told at the head of fiber.lisp.

;;; Where much is queued little is added: what is woken long before it runs is in no cache any more.
(declaim (inline how-many-to-collect))
(defun how-many-to-collect (queue)
  "Half of what QUEUE, which a scheduler looks around for, lacks to two batches, and some if it has
room for them, but at least one."
  (let ((length (run-queue-length queue)))
    (max 1
         (- run-queue-batch (ash length -1))
         (min (ash run-queue-batch -3)
              (truly-the fixnum (- (length (run-queue-ring queue)) length))))))

;;; What is left stays in the heap, whose nearest deadline then is past: TIME-TO-SLEEP is 0, and the
;;; next look comes when what is queued has run, or sooner.
(defun collect-expired (scheduler)
  "Unpark the fibers of SCHEDULER whose deadlines have come, and interrupt those whose alarms have:
the earliest first, and as many as the queue is to get."
  (let ((heap (scheduler-deadlines scheduler)))
    (when (/= (deadline-heap-nearest heap) most-positive-fixnum)
      (let ((now (fiber-now)))
        (loop repeat (how-many-to-collect (scheduler-queue scheduler))
              do (let ((entry (heap-take-expired heap now)))
                   (cond ((null entry) (return))
                         ((fiber-p entry) (unpark (truly-the fiber entry)))
                         (t (ring-alarm (truly-the alarm entry))))))))))

(defun ring-alarm (alarm)
  (%interrupt-fiber (alarm-fiber alarm) (the function (alarm-function alarm))))

(defun collect-reports (scheduler nanoseconds)
  "Unpark the fibers of SCHEDULER whose descriptors are ready; wait for NANOSECONDS if none is."
  ;; If possible no more than the queue has room for: a fiber that overflows to the injector loses
  ;; its place to others, and its carrier.
  (let* ((poller (scheduler-poller scheduler))
         (events (poller-events poller))
         (n (%poller-wait (poller-epoll poller) events
                          (min (how-many-to-collect (scheduler-queue scheduler)) events-per-wait)
                          nanoseconds)))
    (dotimes (i n)
      (let ((data (sap-ref-word events (* i 16)))
            (directions (ldb (byte 3 0) (sap-ref-word events (+ 8 (* i 16))))))
        (unless (= data wakeup-data)
          (multiple-value-bind (reader writer) (handle-report poller data directions)
            (when reader (unpark reader))
            (when writer (unpark writer))))))))

(defun collect-injected (scheduler)
  "Take some of what has come from outside, and leave the rest to others. Queue all but the first,
and return that, or NIL if there is none."
  (let* ((group (truly-the fiber-group (scheduler-group scheduler)))
         (queue (scheduler-queue scheduler))
         (first (injector-take (fiber-group-injector group) (how-many-to-collect queue))))
    (when first
      (do-chain (fiber (shiftf (fiber-next (truly-the fiber first)) nil))
        (run-queue-put queue fiber)))
    first))

;;; A fiber that is alone in a queue, woken by another, is left there for a moment: that other is
;;; about to park, most likely, and what both use is in that processor's caches. It is stolen if it
;;; is there still when this scheduler looks the next time, in this search or in a later one.
(defun left-alone-p (scheduler victim place)
  "True if the first fiber in the queue of VICTIM, at PLACE of its group, is to stay there this
time."
  (let* ((queue (scheduler-queue victim))
         (head (run-queue-head queue))
         (seen (scheduler-seen scheduler)))
    (and (handed-alone-p victim)
         (/= head (aref seen place))
         (setf (aref seen place) head
               (scheduler-left-alone-p scheduler) t))))

(defun steal-work (scheduler)
  (let* ((all (fiber-group-schedulers (truly-the fiber-group (scheduler-group scheduler))))
         (n (length all))
         (start (poller-place (scheduler-poller scheduler))))
    (dotimes (i n)
      (let* ((place (rem (+ start i 1) n))
             (victim (truly-the scheduler (svref all place))))
        (unless (or (eq victim scheduler) (left-alone-p scheduler victim place))
          (let ((fiber (run-queue-steal (scheduler-queue victim) (scheduler-queue scheduler))))
            (when fiber
              (setf (scheduler-steals scheduler)
                    (truly-the fixnum (1+ (scheduler-steals scheduler))))
              (return fiber))))))))

(defun look-around (scheduler &optional too-many-p)
  "Serve deadlines, poller and injector of SCHEDULER without waiting; return a fiber to run, or
NIL. If TOO-MANY-P, others serve the injector."
  (setf (scheduler-held-up-p scheduler) nil
        (scheduler-ticks scheduler) 0
        (scheduler-next-reading scheduler) 1
        (scheduler-looked scheduler) (%cycle-count))
  (collect-expired scheduler)
  (collect-reports scheduler 0)
  (let ((group (truly-the fiber-group (scheduler-group scheduler))))
    (or (and (not too-many-p)
             (injector-first (fiber-group-injector group))
             (if (migration-forced-p group)
                 (take-migrant group)
                 (collect-injected scheduler)))
        (run-queue-take (scheduler-queue scheduler)))))

(declaim (inline enough-search-p))
(defun enough-search-p (group)
  "True if, with one more, over half of the carriers of GROUP that are awake would search: these
would take processors from carriers that work."
  (declare (fiber-group group))
  (> (* 2 (1+ (fiber-group-searching group)))
     (- (length (fiber-group-schedulers group)) (logcount (fiber-group-idle group)))))

;;; Where others' queues are looked at too often, these have to fetch them back each time.
(defun pause-search (scheduler)
  (loop repeat (if (scheduler-left-alone-p scheduler) 250 50)
        do (spin-loop-hint)))

(defun search-elsewhere (scheduler group)
  "Steal for SCHEDULER, which has nothing to do. While one searches no other needs to be woken."
  (atomic-incf (fiber-group-searching group))
  (setf (scheduler-left-alone-p scheduler) nil)
  (let ((fiber (loop repeat 4
                     do (let ((fiber (or (steal-work scheduler) (look-around scheduler))))
                          (when fiber (return fiber)))
                        (pause-search scheduler))))
    (atomic-decf (fiber-group-searching group)) ; a full barrier before the last look
    (when fiber (call-for-what-is-left group))
    fiber))

(defun call-for-what-is-left (group)
  "Called by a carrier that does not search any more: for what was queued meanwhile nobody was
called."
  (when (work-left-p group) (call-for-help group)))

(defun work-left-p (group)
  (declare (fiber-group group))
  (or (injector-first (fiber-group-injector group))
      (loop for scheduler across (fiber-group-schedulers group)
            thereis (> (run-queue-length (scheduler-queue (truly-the scheduler scheduler))) 0))))

;;; Nobody was woken for the fiber that it has left alone: it was searching.
(defun pass-search-on (scheduler)
  "Called when SCHEDULER is going to do something else than to search on."
  (when (shiftf (scheduler-left-alone-p scheduler) nil)
    (call-for-what-is-left (truly-the fiber-group (scheduler-group scheduler)))))

;;; For what the scheduler itself has queued nobody was called; and other carriers may have looked
;;; while it was between two queues.
(defun call-for-the-rest (scheduler)
  "Called before the carrier of SCHEDULER runs something that is not in its queue any more. Return
false if nothing is left there."
  (when (> (run-queue-length (scheduler-queue scheduler)) 0)
    (setf (scheduler-left-alone-p scheduler) nil)
    (barrier (:memory))
    (call-for-help (truly-the fiber-group (scheduler-group scheduler)))
    t))

(defun leave-queue (carrier)
  "CARRIER is going to do something else than to serve its queue, and the injector."
  (let ((scheduler (carrier-scheduler carrier)))
    (when scheduler
      (let* ((scheduler (truly-the scheduler scheduler))
             (group (truly-the fiber-group (scheduler-group scheduler))))
        (cond ((crowded-p group)
               (seem-held-up scheduler)
               (setf (scheduler-left-alone-p scheduler) nil)
               (barrier (:memory))
               (call-for-what-is-left group))
              ((call-for-the-rest scheduler))
              (t (pass-search-on scheduler)))))))

(defun seem-held-up (scheduler)
  "Let SCHEDULER not be counted as at work until it looks around again."
  (setf (scheduler-held-up-p scheduler) t))

(defun shed-work (scheduler group fiber)
  "Let other schedulers of GROUP, of which enough are at work, run FIBER, if it is not NIL, and what
is queued in SCHEDULER."
  (declare (fiber-group group))
  (pass-search-on scheduler)
  (loop while fiber
        do (injector-put (fiber-group-injector group) fiber)
           (setf fiber (run-queue-take (scheduler-queue scheduler)))))

(defun search-for-work (scheduler)
  "Return a fiber for SCHEDULER to run, or NIL."
  (let* ((group (truly-the fiber-group (scheduler-group scheduler)))
         (too-many-p (enough-at-work-p group scheduler))
         (found (look-around scheduler too-many-p)))
    (cond (too-many-p
           (shed-work scheduler group found)
           nil)
          (found
           (or (call-for-the-rest scheduler) (pass-search-on scheduler))
           found)
          ((enough-search-p group) nil)
          (t (search-elsewhere scheduler group)))))

(defun time-to-sleep (scheduler)
  "Nanoseconds until the nearest deadline of SCHEDULER, or -1."
  (let ((nearest (deadline-heap-nearest (scheduler-deadlines scheduler))))
    (if (= nearest most-positive-fixnum)
        -1
        (max 0 (- nearest (fiber-now))))))

(defun enter-idle (group bit)
  (loop (let ((idle (fiber-group-idle group)))
          (when (eq (cas (fiber-group-idle group) idle (logior idle bit)) idle) (return)))))

(defun leave-idle (group bit)
  (loop (let ((idle (fiber-group-idle group)))
          (when (eq (cas (fiber-group-idle group) idle (logandc2 idle bit)) idle) (return)))))

(defun injected-for-p (carrier scheduler group)
  "Is there something in the injector of GROUP for CARRIER, or for another one that it can wake?"
  (declare (fiber-group group))
  (let ((injector (fiber-group-injector group)))
    (and (injector-first injector)
         (or (not (migration-forced-p group))
             (injector-has-migrant-p injector carrier)
             (/= 0 (logandc2 (fiber-group-idle group)
                             (ash 1 (poller-place (scheduler-poller scheduler)))))))))

(declaim (inline handlers-wait-p))
(defun handlers-wait-p ()
  "Is there something that this OS thread is to call as a thread?"
  (or *interrupt-pending* (sb-thread::thread-interruptions *current-thread*)))

(defun something-to-do-p (carrier scheduler)
  (let ((group (truly-the fiber-group (scheduler-group scheduler))))
    (or (carrier-inbox carrier)
        (eq (fiber-group-state group) :stopped)
        (handlers-wait-p)
        (and (not (enough-at-work-p group))
             (or (injected-for-p carrier scheduler group)
                 (loop for other across (fiber-group-schedulers group)
                       thereis (something-to-steal-p scheduler (truly-the scheduler other))))))))

;;; Whether it is still the same fiber will be seen after the nap.
(defun something-to-steal-p (scheduler victim)
  (and (> (run-queue-length (scheduler-queue victim)) 0)
       (not (and (scheduler-left-alone-p scheduler) (handed-alone-p victim)))))

;;; Long beside the time in which one of two that talk to each other answers, short beside what
;;; a carrier that sleeps takes to wake.
(defconstant +nap+ 100000)

;;; Where all others sleep nothing is queued: who queues something later finds this one asleep.
(defun begin-nap-p (scheduler group)
  "True if SCHEDULER is to nap, and not to sleep: what it has left alone nobody else looks after."
  (declare (fiber-group group))
  (and (scheduler-left-alone-p scheduler)
       (or (and (< (logcount (fiber-group-idle group)) (length (fiber-group-schedulers group)))
                (= (cas (fiber-group-napping group) 0 1) 0))
           (setf (scheduler-left-alone-p scheduler) nil))))

(defun time-to-nap (scheduler)
  (let ((time (time-to-sleep scheduler)))
    (if (<= 0 time +nap+) time +nap+)))

(defun sleep-in-poller (carrier scheduler)
  "Sleep until there is something to do."
  (let* ((group (truly-the fiber-group (scheduler-group scheduler)))
         (poller (scheduler-poller scheduler))
         (bit (ash 1 (poller-place poller))))
    (run-queue-forget (scheduler-queue scheduler))
    (setf (poller-sleep poller) 1)
    (enter-idle group bit)              ; a full barrier, see the head of fiber.lisp
    (cond ((something-to-do-p carrier scheduler)
           (collect-reports scheduler 0))
          ((begin-nap-p scheduler group)
           (collect-reports scheduler (time-to-nap scheduler))
           (setf (fiber-group-napping group) 0))
          (t (collect-reports scheduler (time-to-sleep scheduler))))
    (leave-idle group bit)              ; a full barrier, see DOZE
    (setf (poller-sleep poller) 0)
    (unless (= (fiber-group-monitor-asleep group) 0) (wake-monitor-if-asleep group))))
