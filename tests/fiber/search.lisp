;;;; How carriers look for work, and what they find: fiber/search.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* search)

;;; For more than the time after which a scheduler looks around.
(defun compute-for-a-look ()
  (let ((start (sb-fiber::%cycle-count)))
    (loop until (> (sb-fiber::cycles-since start (sb-fiber::%cycle-count))
                   sb-fiber::*cycles-per-millisecond*))))

;;; The sleeper's time has come when it parks. It waits for the look, at most eight turns, and two
;;; of the others. Prevents: timers and descriptors that wait for 61 fibers that compute.
(test looks-come-by-time-too
  (with-group-of-same-carriers (group 1)
    (let* ((turns 0) (stop (make-flag))
           (others (loop repeat 2
                         collect (spawn (group)
                                   (loop until (flag-value stop)
                                         do (compute-for-a-look) (incf turns) (fiber-yield))
                                   t))))
      ;; With other carriers, whose turns count too, there is no such bound.
      (is (<= (join (spawn (group)
                      (prog1 (loop repeat 10
                                   maximize (let ((before turns))
                                              (sb-fiber::park-until (sb-fiber::fiber-now))
                                              (- turns before)))
                        (raise-flag stop))))
              (if (migration-wanted-p) most-positive-fixnum 11)))
      (is (all-true-p (join-all others))))))

(defun parked-with-past-deadlines (group n)
  "N fibers, parked until they are unparked, whose deadlines come at once. To be called in a fiber."
  (let ((fibers (loop repeat n collect (spawn (group) (fiber-park)))))
    (loop until (every (lambda (fiber) (eq :parked (fiber-state fiber))) fibers) do (fiber-yield))
    (dolist (fiber fibers fibers)
      (sb-sys:without-interrupts
        (sb-fiber::enter-time (svref (sb-fiber::fiber-group-schedulers group) 0) fiber 1)))))

;;; Prevents: fibers that are held up by the wake-ups of as many others as have a common deadline.
(test deadlines-are-served-some-at-a-time
  (with-group-of-same-carriers (group 1)
    (destructuring-bind (left fibers)
        (join (spawn (group)
                (let ((fibers (parked-with-past-deadlines group 1000)))
                  (list (loop do (fiber-yield)
                              collect (heap-count group)
                              until (= 0 (heap-count group)))
                        fibers))))
      ;; One yield may be two looks; with other carriers, more.
      (unless (migration-wanted-p)
        (is (loop for (before after) on (cons 1000 left)
                  while after
                  always (<= (- before after) 256))
            "~A" left))
      (mapc #'fiber-unpark fibers)
      (is (all-true-p (join-all fibers))))))

;;; Prevents: a scheduler that sleeps while there are deadlines left that have come.
(test deadlines-that-are-left-are-served
  (on-carriers (n)
    (with-group (group n)
      (dolist (count '(100 129 1000))
        (let ((fibers (join (spawn (group)
                              (prog1 (parked-with-past-deadlines group count)
                                ;; It is the last to be served, and nobody else does anything.
                                (sb-fiber::park-until (sb-fiber::fiber-now)))))))
          (is-true (wait-until (= 0 (heap-count group))))
          (mapc #'fiber-unpark fibers)
          (is (all-true-p (join-all fibers))))))))

;;; A fiber that computes must not keep those behind it from the other carriers.
(test work-is-stolen
  (on-carriers (n :counts '(2 16))
    (with-group (group n)
      (let ((done nil))
        (is (eq t (join (spawn (group)
                          (let ((others (loop repeat 10 collect (spawn (group) (setf done t)))))
                            (loop until done)
                            (all-true-p (join-all others)))))))))))

;;;; what is stolen

(defun schedulers (n)
  "A list of N schedulers of a group that does not run."
  (let* ((group (sb-fiber::%make-fiber-group nil))
         (schedulers (loop for i below n
                           collect (sb-fiber::%make-scheduler group (sb-fiber::%make-poller i)))))
    (setf (sb-fiber::fiber-group-schedulers group) (coerce schedulers 'simple-vector))
    schedulers))

(defun queue-in (scheduler fiber &key handed)
  "Queue FIBER, HANDED over by another fiber or not."
  (let ((queue (sb-fiber::scheduler-queue scheduler)))
    (sb-fiber::run-queue-put queue fiber)
    (when handed (setf (sb-fiber::scheduler-handed scheduler) (sb-fiber::run-queue-tail queue)))))

(defun take-from (scheduler) (sb-fiber::run-queue-take (sb-fiber::scheduler-queue scheduler)))

;;; Prevents: two fibers that talk to each other, and are taken apart each time.
(test who-was-woken-is-left-alone-for-a-moment
  (destructuring-bind (victim thief) (schedulers 2)
    (let ((a (make-fiber #'identity)) (b (make-fiber #'identity)))
      (flet ((steal () (sb-fiber::steal-work thief)))
        (queue-in victim a :handed t)
        (is (null (steal)))
        (is (eq a (steal)))
        (queue-in victim a :handed t)
        (is (null (steal)))
        (is (eq a (take-from victim)))
        (queue-in victim b :handed t)
        (is (null (steal)) "It is not the one that was seen.")
        (queue-in victim a :handed t)
        (is (eq b (steal)) "It is not alone.")
        (is (eq a (take-from victim)))
        (queue-in victim a)
        (is (eq a (steal)) "Nobody has handed it over.")
        (is (null (steal)))))))

;;; Prevents: two such fibers, each of which makes the thief forget the other.
(test each-of-several-is-stolen
  (destructuring-bind (thief &rest victims) (schedulers 4)
    (let ((fibers (loop for victim in victims
                        collect (let ((fiber (make-fiber #'identity)))
                                  (queue-in victim fiber :handed t)
                                  fiber))))
      (is (null (sb-fiber::steal-work thief)))
      (is (null (set-exclusive-or fibers (loop repeat 3 collect (sb-fiber::steal-work thief))))))))

;;; Nor must it wait for the one that woke it.
(test who-was-woken-is-stolen-after-that
  (on-carriers (n :counts '(4 16))
    (with-group (group n)
      (flet ((waker ()
               (let* ((done nil)
                      (parked (wait-until-parked (spawn (group) (fiber-park) (setf done t)))))
                 (spawn (group)
                   (fiber-unpark parked)
                   (loop until done)
                   t))))
        (dotimes (i 20)
          (is (all-true-p (join-all (list (waker) (waker))))))))))
