;;;; All orders of the steps of carriers that go to sleep and of what has work for them: fiber.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/histories.lisp" *load-truename*))

(def-suite* interleaving-carriers)

(defparameter *inject*
  (history ((group (make-test-group 1))
            (carrier (make-test-carrier group 0))
            (ran 0))
      (("carrier" (steps::carrier-loop carrier))
       ("submitter" (steps::inject group (make-runnable-fiber group (lambda () (incf ran))))))
    (ran-problem ran 1)))

(defparameter *send-home*
  (history ((group (make-test-group 1))
            (carrier (make-test-carrier group 0))
            (ran 0))
      (("carrier" (steps::carrier-loop carrier))
       ("waker" (steps::queue-fiber (make-runnable-fiber group (lambda () (incf ran)) carrier))))
    (ran-problem ran 1)))

(defparameter *send-home-to-spare*
  (history ((group (make-test-group 1))
            (carrier (make-test-carrier group))
            (ran 0))
      (("carrier" (steps::carrier-loop carrier))
       ("waker" (steps::queue-fiber (make-runnable-fiber group (lambda () (incf ran)) carrier))))
    (ran-problem ran 1)))

;;; The carrier goes to sleep when the fiber comes, or gets a scheduler.
(defparameter *send-home-while-given*
  (history ((group (make-test-group 1))
            (blocked (make-test-carrier group 0))
            (spare (make-test-carrier group))
            (ran 0))
      (("blocked" (steps::give-scheduler-away blocked))
       ("spare" (steps::carrier-loop spare))
       ("waker" (steps::queue-fiber (make-runnable-fiber group (lambda () (incf ran)) spare))))
    (ran-problem ran 1)))

;;; A spare that runs a fiber cannot serve a scheduler that it is given.
(defparameter *give-to-who-runs-a-fiber*
  (history ((group (make-test-group 1))
            (blocked (make-test-carrier group 0))
            (spare (make-test-carrier group)))
      (("blocked" (steps::give-scheduler-away blocked))
       ("waker" (steps::queue-fiber
                 (make-runnable-fiber
                  group
                  (lambda ()
                    (unless (steps::carrier-scheduler spare)
                      (when (steps::carrier-scheduler spare)
                        (fail-history "A carrier that runs a fiber is given a scheduler."))))
                  spare)))
       ("spare" (steps::carrier-loop spare)))
    nil))

;;; What has taken a spare finds no scheduler for it. Meanwhile a fiber has come home to it.
(defparameter *put-back*
  (history ((group (make-test-group 1))
            (blocked (make-test-carrier group 0))
            (spare (make-test-carrier group))
            (ran 0))
      (("blocked" (steps::put-in-place (sb-fiber::fiber-group-orphans group)
                                       (steps::detach-scheduler blocked))
                  (steps::take-from-place (sb-fiber::fiber-group-orphans group)))
       ("placer" (steps::place-orphans group))
       ("spare" (steps::carrier-loop spare))
       ("waker" (steps::queue-fiber (make-runnable-fiber group (lambda () (incf ran)) spare))))
    (ran-problem ran 1)))

;;; The first fiber computes until the second one has run: a carrier must not keep both while
;;; another sleeps. That one has looked for work already when both are injected.
(defun make-dependent-fibers (group)
  (let ((cell (vector 0)))
    (list (make-runnable-fiber
           group (lambda ()
                   (perform :read cell 'second-ran (constantly nil)
                            (lambda () (= 1 (svref cell 0))))))
          (make-runnable-fiber
           group (lambda ()
                   (perform :write cell 'second-ran (lambda () (setf (svref cell 0) 1))))))))

(defun inject-at-once (group fibers)
  (let ((injector (sb-fiber::fiber-group-injector group)))
    (dolist (fiber fibers) (sb-fiber::injector-put injector fiber))))

(defparameter *share*
  (history ((group (make-test-group 2))
            (first (make-test-carrier group 0))
            (second (make-test-carrier group 1)))
      (("first" (inject-at-once group (make-dependent-fibers group))
                (steps::carrier-loop first))
       ("second" (steps::sleep-in-poller second (steps::carrier-scheduler second))
                 (steps::carrier-loop second)))
    nil))

(defparameter *give-away*
  (history ((group (make-test-group 1))
            (blocked (make-test-carrier group 0))
            (spare (make-test-carrier group)))
      (("blocked" (steps::give-scheduler-away blocked))
       ("spare" (steps::carrier-loop spare))
       ("monitor" (steps::run-monitor group))
       ("new" (be-new-carrier)))
    (problem (not (eql 0 (svref (sb-fiber::fiber-group-orphans group) 0)))
             "Nobody serves the scheduler.")))

;;; The first new carrier is a spare when the monitor looks, and then it is none.
(defparameter *give-two-away*
  (history ((group (make-test-group 2))
            (first (make-test-carrier group 0))
            (second (make-test-carrier group 1)))
      (("first" (steps::give-scheduler-away first))
       ("second" (steps::give-scheduler-away second))
       ("monitor" (steps::run-monitor group))
       ("new" (be-new-carrier))
       ("newer" (be-new-carrier)))
    (problem (find 0 (sb-fiber::fiber-group-orphans group) :test-not #'eql)
             "Nobody serves the scheduler.")))

(defmacro with-two-places (&body body)
  `(with-changes (("SEARCH-ELSEWHERE" "4" "1")
                  ("UNLIST-SPARE" "(length spares)" "2")
                  ("PUT-IN-PLACE" "(length places)" "2")
                  ("TAKE-FROM-PLACE" "(length places)" "2"))
     ,@body))

;;; A fiber whose carrier has no scheduler gives its deadline to one that is served by another.
(defparameter *deadline-for-another*
  (history ((group (make-test-group 1))
            (carrier (make-test-carrier group 0))
            (fiber (make-test-fiber)))
      (("fiber" (setf *scheduler* (sb-fiber::carrier-scheduler carrier))
                (in-test-fiber (fiber)
                  (loop until (steps::deadline-passed-p 10) do (steps::park nil 10))))
       ("carrier" (steps::carrier-loop carrier)))
    (or (phase-problem fiber) (heap-problem))))

;;; Migration is forced, and the fiber was last run by the carrier that may be woken for it.
(defparameter *pass-on*
  (history ((group (make-test-group 2))
            (first (make-test-carrier group 0))
            (second (make-test-carrier group 1))
            (ran-on nil))
      (("first" (let ((steps::*carrier* first)) (steps::carrier-loop first)))
       ("second" (let ((steps::*carrier* second)) (steps::carrier-loop second)))
       ("submitter" (let ((fiber (make-runnable-fiber
                                  group (lambda () (setf ran-on steps::*carrier*)))))
                      (setf (sb-fiber::fiber-last-carrier fiber) first)
                      (steps::inject group fiber))))
    (problem (not (eq ran-on second)) "The fiber was run on ~S." ran-on)))

;;; Two fibers have talked to each other on one carrier; then the one computes until the other,
;;; which it has woken, has run. The other carrier has left them alone, and naps.
(defparameter *compute-after-a-talk*
  (history ((group (make-test-group 2))
            (first (make-test-carrier group 0))
            (second (make-test-carrier group 1)))
      (("first" (let ((*running* first))
                  (destructuring-bind (waits writes) (make-dependent-fibers group)
                    (steps::queue-fiber (make-runnable-fiber group (constantly nil)))
                    (steps::run-queue-take
                     (sb-fiber::scheduler-queue (steps::carrier-scheduler first)))
                    (steps::queue-fiber writes)
                    (funcall (sb-fiber::fiber-function waits)))))
       ("second" (let ((scheduler (steps::carrier-scheduler second)))
                   (setf (sb-fiber::scheduler-left-alone-p scheduler) t)
                   (steps::sleep-in-poller second scheduler)
                   (steps::carrier-loop second))))
    nil))

(test who-was-left-alone-is-not-forgotten
  (with-short-searches
    (holds *compute-after-a-talk* :switches 2)))

(test bug-a-nap-without-an-end
  (with-short-searches
    (with-changes (("TIME-TO-NAP" "+nap+" "time"))
      (fails *compute-after-a-talk* :switches 2))))

(test bug-nobody-naps-any-more
  (with-short-searches
    (with-changes (("SLEEP-IN-POLLER" "(setf (fiber-group-napping group) 0)" "nil"))
      (fails *compute-after-a-talk* :switches 2))))

(test bug-sleeping-over-what-was-left-alone
  (with-short-searches
    (with-changes (("SLEEP-IN-POLLER" "(begin-nap-p scheduler group)" "nil"))
      (fails *compute-after-a-talk* :switches 2))))

;;; One carrier more than there are processors: each may leave what comes to the other.
(defparameter *inject-for-too-many*
  (history ((group (let ((group (make-test-group 2)))
                     (setf (sb-fiber::fiber-group-limited-p group) t)
                     group))
            (first (make-test-carrier group 0))
            (second (make-test-carrier group 1))
            (ran 0))
      (("first" (steps::carrier-loop first))
       ("second" (steps::carrier-loop second))
       ("submitter" (steps::inject group (make-runnable-fiber group (lambda () (incf ran))))))
    (ran-problem ran 1)))

(test the-last-to-sleep-looks-for-all
  (with-short-searches
    (holds *inject-for-too-many* :switches 2)))

(test bug-nobody-looks-for-all
  (with-short-searches
    (with-changes (("SOMETHING-TO-DO-P" "(not (enough-at-work-p group))" "nil"))
      (fails *inject-for-too-many* :switches 2))))

(test bug-counting-before-being-known-as-idle
  (with-short-searches
    (with-changes (("SLEEP-IN-POLLER" "(enter-idle group bit)" "nil"
                                      "(something-to-do-p carrier scheduler)"
                                      "(prog1 (something-to-do-p carrier scheduler)
                                         (enter-idle group bit))"))
      (fails *inject-for-too-many* :switches 2))))

(defmacro with-forced-steps (&body body)
  `(unwind-protect (progn (setf steps::*force-migration* t) ,@body)
     (setf steps::*force-migration* nil)))

(test who-may-not-run-a-fiber-passes-it-on
  (with-short-searches
    (with-forced-steps
      (holds *pass-on* :switches 2))))

(test bug-not-passing-a-fiber-on
  (with-short-searches
    (with-forced-steps
      ;; A carrier that finds another one asleep would not sleep itself, and try for ever.
      (with-changes (("TAKE-MIGRANT" "(wake-one-idle group)" "nil")
                     ("INJECTED-FOR-P" "(logandc2 (fiber-group-idle group)
                                         (ash 1 (poller-place (scheduler-poller scheduler))))"
                                       "0"))
        (fails *pass-on* :switches 2)))))

(test bug-going-to-sleep-over-what-others-must-run
  (with-short-searches
    (with-forced-steps
      (with-changes (("INJECTED-FOR-P" "(/= 0 (logandc2 (fiber-group-idle group)
                                         (ash 1 (poller-place (scheduler-poller scheduler)))))"
                                       "nil"))
        (fails *pass-on* :switches 2)))))

(test no-carrier-sleeps-while-there-is-work
  (with-short-searches
    (holds *inject* :store-buffers t)
    (holds *send-home* :store-buffers t)
    (holds *send-home-to-spare* :store-buffers t)
    (holds *send-home-while-given* :switches 2)
    (holds *share* :switches 2)
    (holds *give-away* :switches 1)))

(test no-scheduler-is-given-to-who-runs-a-fiber
  (with-short-searches
    (holds *give-to-who-runs-a-fiber* :switches 2)))

(test bug-a-spare-that-runs-fibers
  (with-short-searches
    (with-changes (("IDLE-AS-SPARE" "(unlist-spare carrier group)" "(run-inbox carrier)"))
      (fails *give-to-who-runs-a-fiber*))))

(test a-spare-that-is-put-back-looks-at-its-inbox
  (with-short-searches
    (holds *put-back* :switches 2)))

(test bug-putting-a-spare-back-to-sleep
  (with-short-searches
    (with-changes (("PUT-SPARE-BACK" "(wake-carrier spare)" "nil"))
      (fails *put-back* :switches 2))))

(test no-carrier-sleeps-longer-than-a-deadline
  (with-short-searches
    (holds *deadline-for-another* :store-buffers t)))

(test bug-not-waking-for-a-deadline
  (with-short-searches
    (with-changes (("ENTER-TIME" "(wake-poller (scheduler-poller scheduler))" "nil"))
      (fails *deadline-for-another*))))

(test bug-saying-that-one-sleeps-after-looking
  (with-short-searches
    (with-changes (("SLEEP-IN-POLLER" "(setf (poller-sleep poller) 1)" "nil"
                                      "(t (collect-reports scheduler (time-to-sleep scheduler)))"
                                      "(t (let ((time (time-to-sleep scheduler)))
                                            (setf (poller-sleep poller) 1)
                                            (collect-reports scheduler time)))"))
      (fails *deadline-for-another*))))

(test bug-not-looking-again-before-sleep
  (with-short-searches
    (with-changes (("SLEEP-IN-POLLER" "(something-to-do-p carrier scheduler)" "nil"))
      (fails *inject*)
      (fails *send-home*))))

(test bug-looking-before-being-known-as-idle
  (with-short-searches
    (with-changes (("SLEEP-IN-POLLER" "(enter-idle group bit)" "nil"
                                      "(something-to-do-p carrier scheduler)"
                                      "(prog1 (something-to-do-p carrier scheduler)
                                         (enter-idle group bit))"))
      (fails *inject*))))

(test bug-waking-only-who-is-said-to-be-asleep
  (with-short-searches
    (with-changes (("WAKE-CARRIER" "(cas (carrier-wake-word carrier) 0 1)" "1"))
      (fails *send-home-to-spare*))))

(test bug-clearing-the-alarm-after-looking
  (with-short-searches
    (with-changes (("IDLE-AS-SPARE" "(sleep-as-spare carrier)"
                                    "(progn (setf (carrier-wake-word carrier) 0)
                                            (sleep-as-spare carrier))"))
      (fails *send-home-to-spare*))))

(test two-schedulers-are-given-away
  (with-two-places
    (holds *give-two-away* :switches 1)))

(test bug-a-spare-that-does-not-look-for-orphans
  (with-short-searches
    (with-changes (("LIST-SPARE" "(place-orphans group)" "nil"))
      (fails *give-away* :switches 1))))

(test bug-an-injector-without-a-barrier
  (with-short-searches
    (with-changes (("INJECT" "(barrier (:memory))" "nil"))
      (fails *inject* :store-buffers t))))
