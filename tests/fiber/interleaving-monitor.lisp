;;;; All orders of the steps of carriers that lose their schedulers and of what takes those:
;;;; fiber/monitor.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/histories.lisp" *load-truename*))

(def-suite* interleaving-monitor)

;;; The stuck fiber makes another one runnable, and so does one that the spare runs: two carriers
;;; would put into one queue.
(defun queued-fibers (group)
  "How many fibers are in the first run queue and in the injector of GROUP."
  (+ (length (queue-contents (sb-fiber::scheduler-queue
                              (svref (sb-fiber::fiber-group-schedulers group) 0))))
     (loop for fiber = (sb-fiber::injector-first (sb-fiber::fiber-group-injector group))
             then (sb-fiber::fiber-next fiber)
           while fiber count t)))

(defun make-runnable-on (carrier)
  (let ((*running* carrier))
    (steps::queue-fiber (make-runnable-fiber (sb-fiber::carrier-group carrier) #'identity))))

(defparameter *take-away*
  (history ((group (make-test-group 1))
            (stuck (make-test-carrier group 0))
            (spare (make-test-carrier group)))
      (("stuck" (setf (sb-fiber::carrier-epoch stuck) 2)
                (make-runnable-on stuck))
       ("monitor" (setf (svref (sb-fiber::fiber-group-spares group) 0) spare)
                  (steps::take-scheduler-away group stuck))
       ("spare" (perform :read spare 'steps::carrier-scheduler (constantly nil)
                         (lambda () (sb-fiber::carrier-scheduler spare)))
                (make-runnable-on spare)))
    (problem (/= 2 (queued-fibers group)) "There are ~D fibers." (queued-fibers group))))

;;; The places in between are locked, and with store buffers make too many orders.
(defmacro with-direct-hand-over ((&rest changes) &body body)
  `(with-changes (("TAKE-SCHEDULER-AWAY"
                   "(pass-scheduler-on group scheduler)"
                   "(setf (carrier-scheduler
                           (truly-the carrier (svref (fiber-group-spares group) 0)))
                          scheduler)"
                   ,@changes))
     ,@body))

;;; The carrier is not stuck any more: it is asleep, or looks for work.
(defparameter *take-away-from-who-sleeps*
  (history ((group (make-test-group 1))
            (carrier (make-test-carrier group 0)))
      (("carrier" (steps::carrier-loop carrier))
       ("monitor" (steps::take-scheduler-away group carrier)))
    (problem (null (sb-fiber::carrier-scheduler carrier)) "Nobody serves the scheduler.")))

;;; The carrier is done with it, and has got another one, before the monitor looks.
(defparameter *take-away-from-who-has-another*
  (history ((group (make-test-group 2))
            (carrier (make-test-carrier group 0))
            (blocked (make-test-carrier group 1))
            (passed-on-p nil))
      (("carrier" (steps::carrier-loop carrier))
       ("monitor" (steps::take-scheduler-away group carrier)
                  (setf passed-on-p t))
       ("blocked" (steps::give-scheduler-away blocked)))
    (problem (not passed-on-p) "The monitor waits for a carrier that sleeps.")))

;;; The spare has been given the scheduler, and loses it before it has seen it.
(defparameter *take-away-from-spare*
  (history ((group (make-test-group 1))
            (blocked (make-test-carrier group 0))
            (spare (make-test-carrier group))
            (ran 0))
      (("blocked" (steps::give-scheduler-away blocked))
       ("spare" (steps::carrier-loop spare))
       ("monitor" (steps::take-scheduler-away group spare))
       ("submitter" (steps::inject group (make-runnable-fiber group (lambda () (incf ran))))))
    (ran-problem ran 1)))

;;; Both want to give it away.
(defparameter *take-away-while-given*
  (history ((group (make-test-group 1))
            (carrier (make-test-carrier group 0)))
      (("carrier" (setf (sb-fiber::carrier-epoch carrier) 2)
                  (steps::give-scheduler-away carrier))
       ("monitor" (steps::take-scheduler-away group carrier)))
    (problem (/= 1 (count-if-not #'integerp (sb-fiber::fiber-group-orphans group)))
             "The scheduler is there ~D times."
             (count-if-not #'integerp (sb-fiber::fiber-group-orphans group)))))

;;; A fiber that keeps its carrier until the monitor has seen that it is awake.
(defparameter *rouse*
  (history ((group (make-test-group 1))
            (carrier (make-test-carrier group 0))
            (scheduler (svref (sb-fiber::fiber-group-schedulers group) 0))
            (seen (vector 0)))
      (("carrier" (steps::sleep-in-poller carrier scheduler)
                  (perform :read seen 0 (constantly nil) (lambda () (= 1 (svref seen 0)))))
       ("submitter" (steps::inject group (make-runnable-fiber group #'identity)))
       ("monitor" (loop (steps::doze group 1)
                        (unless (steps::all-idle-p group)
                          (return (perform :locked seen 0 (lambda () (setf (svref seen 0) 1))))))))
    nil))

;;; A fiber comes home to the spare that has been given the scheduler, and leaves its carrier again.
(defun use-scheduler (scheduler)
  (perform :locked scheduler 'user
           (lambda ()
             (when (= 1 (sb-fiber::scheduler-steals scheduler))
               (fail-history "Two use the scheduler."))
             (setf (sb-fiber::scheduler-steals scheduler) 1)))
  (perform :locked scheduler 'user (lambda () (setf (sb-fiber::scheduler-steals scheduler) 0))))

(defun leave-carrier (carrier)
  (steps::end-scheduling carrier)
  (steps::begin-scheduling carrier)
  (let ((scheduler (steps::carrier-scheduler carrier)))
    (when scheduler (use-scheduler scheduler))))

(defparameter *take-away-when-one-comes-home*
  (history ((group (make-test-group 1))
            (blocked (make-test-carrier group 0))
            (spare (make-test-carrier group)))
      (("blocked" (steps::give-scheduler-away blocked)
                  (steps::queue-fiber (make-runnable-fiber group (lambda () (leave-carrier spare))
                                                           spare)))
       ("spare" (steps::carrier-loop spare))
       ("monitor" (steps::take-scheduler-away group spare)))
    nil))

(defmacro with-taker-who-uses-it (&body body)
  `(with-changes (("TAKE-SCHEDULER-AWAY" "(pass-scheduler-on group scheduler)"
                                         "(sb-fiber-tests::use-scheduler scheduler)"))
     ,@body))

(test who-comes-home-does-not-use-what-is-taken-away
  (with-short-searches
    (with-taker-who-uses-it
      (holds *take-away-when-one-comes-home* :switches 2))))

(test bug-a-spare-that-leaves-fibers-while-it-is-listed
  (with-short-searches
    (with-taker-who-uses-it
      (with-changes (("IDLE-AS-SPARE" "(sleep-as-spare carrier)"
                                      "(progn (run-inbox carrier) (sleep-as-spare carrier))"))
        (fails *take-away-when-one-comes-home* :switches 2)))))

(test schedulers-taken-away
  (with-short-searches
    (holds *take-away*)
    (with-direct-hand-over ()
      (holds *take-away* :store-buffers t))
    (holds *take-away-from-who-sleeps*)
    (holds *take-away-from-spare* :switches 2)
    (holds *take-away-from-who-has-another* :switches 2)
    (with-changes (("PUT-IN-PLACE" "(length places)" "2"))
      (holds *take-away-while-given* :store-buffers t))))

(test no-monitor-sleeps-while-a-fiber-runs
  (with-short-searches
    (holds *rouse* :store-buffers t)))

(test bug-not-awaiting-the-end-of-use
  (with-short-searches
    (with-changes (("TAKE-SCHEDULER-AWAY" "(await-end-of-use group carrier scheduler)" "nil"))
      (fails *take-away*))))

(defun epoch-over-p (group carrier epoch)
  (declare (ignore group))
  (or (evenp epoch)
      (/= epoch (sb-fiber::carrier-epoch carrier))
      (sb-fiber::carrier-spare carrier)))

(test bug-awaiting-that-another-scheduler-is-used-no-more
  (with-short-searches
    (with-changes (("TAKE-SCHEDULER-AWAY" "(await-end-of-use group carrier scheduler)"
                    "(sb-fiber-tests::await-end-of-use #'sb-fiber-tests::epoch-over-p
                                                       group carrier scheduler)"))
      (fails *take-away-from-who-has-another* :switches 2))))

(test bug-a-use-that-may-not-be-seen
  (with-short-searches
    (with-direct-hand-over ("(%barrier-everywhere)" "nil")
      (fails *take-away* :store-buffers t))))

(test bug-a-spare-that-waits-for-the-scheduler-that-it-has-lost
  (with-short-searches
    (with-changes (("IDLE-AS-SPARE" "(eq (carrier-spare carrier) :taken)"
                    "(carrier-scheduler carrier)"))
      (fails *take-away-from-spare* :switches 2))))

(test bug-taking-away-without-looking-who-was-faster
  (with-short-searches
    (with-changes (("PUT-IN-PLACE" "(length places)" "2")
                   ("DETACH-SCHEDULER"
                    "(eq (cas (carrier-scheduler carrier) scheduler nil) scheduler)"
                    "(progn (setf (carrier-scheduler carrier) nil) t)"))
      (fails *take-away-while-given*))))

;;; The monitor's alarm is on, and goes on again when there is something to see.
(defparameter *ring*
  (history ((group (make-test-group 1))
            (sawp nil))
      (("monitor" (loop until (= 1 (read-word 0))
                        do (steps::wait-for-wake-up group nil))
                  (setf sawp t))
       ("ringer" (steps::wake-monitor group)
                 (write-word 0 1)
                 (steps::wake-monitor group)))
    (problem (not sawp) "The monitor sleeps.")))

(test the-monitor-does-not-sleep-over-its-alarm
  (holds *ring* :store-buffers t))

(test bug-the-monitor-clears-its-alarm-without-a-barrier
  (with-changes (("WAIT-FOR-WAKE-UP" "(barrier (:memory))" "nil"))
    (fails *ring* :store-buffers t)))

(test bug-dozing-without-a-barrier
  (with-short-searches
    (with-changes (("DOZE" "(barrier (:memory))" "nil"))
      (fails *rouse* :store-buffers t))))

(test bug-a-carrier-that-does-not-rouse-the-monitor
  (with-short-searches
    (with-changes (("SLEEP-IN-POLLER"
                    "(unless (= (fiber-group-monitor-asleep group) 0)
                       (wake-monitor-if-asleep group))"
                    "nil"))
      (fails *rouse*))))
