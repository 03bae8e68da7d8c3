;;;; How carriers look for work, and what they find: fiber/search.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/descriptors.lisp" *load-truename*))

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

(defun parked-with-past-deadlines (group n &optional (then (constantly t)))
  "N fibers, parked until they are woken, and then to call THEN, whose deadlines come at once. To be
called in a fiber."
  (let ((fibers (loop repeat n
                      collect (spawn (group)
                                (sb-fiber::without-interruptions (sb-fiber::park :sleep nil))
                                (funcall then)))))
    (loop until (every (lambda (fiber) (eq :parked (fiber-state fiber))) fibers) do (fiber-yield))
    (dolist (fiber fibers fibers)
      (sb-sys:without-interrupts
        (sb-fiber::enter-time (svref (sb-fiber::fiber-group-schedulers group) 0) fiber 1)))))

;;; Prevents: fibers that are held up by the wake-ups of as many others as have a common deadline.
;;; Each that is woken sees how many are left; between two of them there may be two looks.
(test deadlines-are-served-some-at-a-time
  (with-group-of-same-carriers (group 1)
    (let* ((left (list 1000))
           (fibers (join (spawn (group)
                           (parked-with-past-deadlines
                            group 1000 (lambda () (push (heap-count group) left)))))))
      (is-true (wait-until (= 0 (heap-count group))))
      (join-all fibers)
      (unless (migration-wanted-p)      ; then others do the same
        (is (loop for (after before) on left
                  while before
                  always (<= (- before after) (* 2 sb-fiber::run-queue-batch)))
            "~A" left)))))

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

;;;; more carriers than processors

;;; A second stands for a millisecond: this thread may be kept from a processor for longer than
;;; that.
(defmacro with-limit (&body body)
  "Execute BODY where migration is not forced, and cycles are measured: else there is no limit."
  `(progn
     (with-group (group 1))
     (let ((forced sb-fiber::*force-migration*) (cycles sb-fiber::*cycles-per-millisecond*))
       (unwind-protect
            (progn (setf sb-fiber::*force-migration* nil
                         sb-fiber::*cycles-per-millisecond* (* 1000 cycles))
                   ,@body)
         (setf sb-fiber::*force-migration* forced
               sb-fiber::*cycles-per-millisecond* cycles)))))

(defun note-look (scheduler milliseconds)
  "Let SCHEDULER have looked around MILLISECONDS ago."
  (setf (sb-fiber::scheduler-held-up-p scheduler) nil
        (sb-fiber::scheduler-looked scheduler)
        (- (sb-fiber::%cycle-count) (* milliseconds sb-fiber::*cycles-per-millisecond*))))

;;; Prevents: one that computes, or sleeps, and keeps others from being woken.
(test who-is-at-work
  (with-limit
    (destructuring-bind (first second third) (schedulers 3)
      (let ((group (sb-fiber::scheduler-group first)))
        (flet ((enough-p (&optional last) (sb-fiber::enough-at-work-p group last)))
          (dolist (scheduler (list first second third)) (note-look scheduler 0))
          (setf (sb-fiber::fiber-group-processors group) 2)
          (is-false (enough-p) "No monitor looks.")
          (setf (sb-fiber::fiber-group-limited-p group) t)
          (is-true (enough-p))
          (is-true (enough-p third))
          (is-false (enough-p second) "There is one in front of the second.")
          (note-look first 20)
          (is-true (enough-p))
          (is-false (enough-p third) "The first computes.")
          (sb-fiber::enter-idle group 2)
          (is-false (enough-p) "The second sleeps.")
          (sb-fiber::leave-idle group 2)
          (note-look first 3)
          (is-true (enough-p third) "It waits for a processor, perhaps.")
          (setf (sb-fiber::fiber-group-blocking-looks group) 1)
          (is-false (enough-p third) "Calls block.")
          (setf (sb-fiber::fiber-group-blocking-looks group) 0)
          (note-look first -1)
          (is-true (enough-p third) "Another processor's counter may be ahead.")
          (setf (sb-fiber::fiber-group-processors group) 3)
          (is-false (enough-p)))))))

;;; Prevents: calls that block carriers, and carriers that sleep meanwhile, or are woken for those
;;; that only have no processor.
(test who-waits-in-the-kernel-is-not-at-work
  (with-limit
    (destructuring-bind (first second) (schedulers 2)
      (declare (ignore second))
      (let ((group (sb-fiber::scheduler-group first))
            (carrier (sb-fiber::%make-carrier nil 0 first))
            (began (make-semaphore))
            (semaphore (make-semaphore))
            (stop (make-flag)))
        (setf (sb-fiber::fiber-group-processors group) 1
              (sb-fiber::fiber-group-limited-p group) t
              (sb-fiber::fiber-group-carriers group) (list carrier))
        (flet ((held-up-p (&key (looks 1) new-epoch-p)
                 (note-look first 0)
                 (loop repeat looks
                       do (when new-epoch-p (incf (sb-fiber::carrier-epoch carrier) 2))
                          (sb-fiber::look-at-carriers group nil nil))
                 (not (sb-fiber::enough-at-work-p group)))
               (begin (function)
                 (setf (sb-fiber::carrier-thread carrier)
                       (sb-thread:make-thread (lambda ()
                                                (sb-thread:signal-semaphore began)
                                                (funcall function)))
                       (sb-fiber::carrier-epoch carrier)
                       (+ 2 (logandc2 (sb-fiber::carrier-epoch carrier) 1)))
                 (sb-thread:wait-on-semaphore began)))
          (begin (lambda () (sb-thread:wait-on-semaphore semaphore)))
          (is-false (held-up-p :looks 2) "It may have waited for a moment only.")
          (is-true (wait-until (held-up-p :looks 2)))
          (is-true (sb-fiber::calls-block-p group))
          (is-false (held-up-p :looks sb-fiber::+blocking-looks+ :new-epoch-p t)
                    "It runs something else each time.")
          (is-false (sb-fiber::calls-block-p group))
          (setf (sb-fiber::fiber-group-processors group) 2)
          (held-up-p :looks 5)
          (is-false (sb-fiber::scheduler-held-up-p first) "No other sleeps for it.")
          (setf (sb-fiber::fiber-group-processors group) 1)
          (sb-thread:signal-semaphore semaphore)
          (sb-thread:join-thread (sb-fiber::carrier-thread carrier))
          (begin (lambda () (loop until (flag-value stop))))
          (is-true (wait-until (not (held-up-p :looks 5))) "It computes.")
          (raise-flag stop)
          (sb-thread:join-thread (sb-fiber::carrier-thread carrier)))))))

;;; Prevents: blocked carriers that are seen late, and looks for which nobody waits.
(test when-the-monitor-looks-more-often
  (with-limit
    (destructuring-bind (first second) (schedulers 2)
      (declare (ignore second))
      (let* ((group (sb-fiber::scheduler-group first))
             (long (* 10 sb-fiber::+look-at-crowd+)))
        (setf (sb-fiber::fiber-group-processors group) 1
              (sb-fiber::fiber-group-limited-p group) t)
        (flet ((looks (period slice) (sb-fiber::time-until-look group period slice)))
          (is (= long (looks long nil)) "All are awake.")
          (sb-fiber::enter-idle group 2)
          (is (= sb-fiber::+look-at-crowd+ (looks long nil)))
          (is (= 1000 (looks 1000 nil)))
          (is (= 5000 (looks long 5000)))
          (is (= 5000 (looks nil 5000)))
          (setf (sb-fiber::fiber-group-processors group) 2)
          (is (= long (looks long nil)) "There is a processor for each."))
        (sb-fiber::leave-idle group 2)))))

;;; Prevents: a carrier that does something else, and is counted since another has just tried to
;;; wake it.
(test who-is-held-up-is-not-at-work-when-it-is-woken
  (with-limit
    (destructuring-bind (first second) (schedulers 2)
      (declare (ignore second))
      (let ((group (sb-fiber::scheduler-group first)))
        (setf (sb-fiber::fiber-group-processors group) 1
              (sb-fiber::fiber-group-limited-p group) t)
        (sb-fiber::seem-held-up first)
        (setf (sb-fiber::scheduler-looked first) (sb-fiber::%cycle-count))
        (is-false (sb-fiber::enough-at-work-p group))
        (sb-fiber::look-around first)
        (is-true (sb-fiber::enough-at-work-p group))))))

;;; Prevents: a second carrier that is woken in place of one that has no processor yet.
(test who-has-been-woken-is-at-work
  (with-limit
    (destructuring-bind (first second third) (schedulers 3)
      (let ((group (sb-fiber::scheduler-group first)))
        (setf (sb-fiber::fiber-group-processors group) 2
              (sb-fiber::fiber-group-limited-p group) t)
        (note-look first 0)
        (note-look second 20)
        (sb-fiber::enter-idle group 2)
        (sb-fiber::enter-idle group 4)
        (sb-fiber::call-for-help group)
        (is (= 4 (sb-fiber::fiber-group-idle group)) "The second is woken.")
        (is-true (sb-fiber::enough-at-work-p group third))
        (sb-fiber::call-for-help group)
        (is (= 4 (sb-fiber::fiber-group-idle group)) "The third is not.")
        (sb-fiber::leave-idle group 4)))))

;;; Prevents: carriers that are called for nothing, and fibers for which nobody is.
(test who-is-called-for-what-is-left
  (with-limit
    (destructuring-bind (first second) (schedulers 2)
      (let ((group (sb-fiber::scheduler-group first)))
        (setf (sb-fiber::fiber-group-limited-p group) t)
        (sb-fiber::enter-idle group 2)
        (flet ((called-p (call)
                 (note-look first 0)
                 (funcall call)
                 (prog1 (= 0 (sb-fiber::fiber-group-idle group))
                   (sb-fiber::enter-idle group 2))))
          (let ((tick (lambda () (sb-fiber::limit-carriers group t)))
                (other-work (let ((carrier (sb-fiber::%make-carrier group 0 first)))
                              (lambda () (sb-fiber::leave-queue carrier)))))
            (is-false (called-p tick) "Nothing is left.")
            (is-false (called-p other-work) "Nothing is left.")
            (queue-in first (make-fiber #'identity))
            (is-false (called-p tick) "The first is at work.")
            (is-true (called-p other-work) "It is about to do something else.")
            (is-true (called-p (lambda ()
                                 (note-look first 20)
                                 (funcall tick)))
                     "It computes.")
            (take-from first)
            (sb-fiber::injector-put (sb-fiber::fiber-group-injector group) (make-fiber #'identity))
            (is-true (called-p other-work) "Something is in the injector.")
            (is-true (called-p (lambda () (sb-fiber::limit-carriers group nil)))
                     "There is no limit any more."))
          (is (eq second (svref (sb-fiber::fiber-group-schedulers group) 1))))))))

;;; Prevents: fibers that wait for descriptors where nobody looks, or where a report wakes one too
;;; many.
(test where-those-wait-who-run-on-one-too-many
  (with-limit
    (let* ((schedulers (schedulers 5))
           (group (sb-fiber::scheduler-group (first schedulers))))
      (setf (sb-fiber::fiber-group-processors group) 3)
      (dolist (scheduler schedulers) (note-look scheduler 0))
      (flet ((places ()
               (loop for scheduler in schedulers
                     collect (position (sb-fiber::scheduler-instead-of scheduler group)
                                       schedulers))))
        (is (equal '(0 1 2 0 1) (places)))
        (note-look (first schedulers) 20)
        (is (equal '(nil 1 2 nil 1) (places)) "The first computes.")
        (sb-fiber::enter-idle group 1)
        (is (equal '(0 1 2 0 1) (places)) "It sleeps, and will be woken.")))))

;;; Prevents: fibers that are lost, or turned round, where a carrier is one too many.
(test what-is-too-much-is-injected
  (destructuring-bind (scheduler) (schedulers 1)
    (let ((group (sb-fiber::scheduler-group scheduler))
          (fibers (loop repeat 5 collect (make-fiber #'identity))))
      (dolist (fiber (rest fibers)) (queue-in scheduler fiber))
      (sb-fiber::shed-work scheduler group (first fibers))
      (is (null (take-from scheduler)))
      (is (equal fibers (loop repeat 5
                              collect (sb-fiber::injector-take
                                       (sb-fiber::fiber-group-injector group) 1)))))))

;;; Prevents: wake-ups that are lost between those that leave work to each other.
(test too-many-carriers-do-all
  (dolist (processors '(1 2))
    (with-group (group 5)
      (setf (sb-fiber::fiber-group-processors group) processors)
      (let ((semaphore (make-semaphore)))
        (is (all-true-p
             (join-all
              (loop repeat 300
                    collect (spawn (group)
                              (with-pipe (in out)
                                (loop repeat 10
                                      do (sleep 1/1000)
                                         (write-char #\x out)
                                         (finish-output out)
                                         (read-char in)
                                         (signal-semaphore semaphore)
                                         (fiber-yield)
                                         (wait-on-semaphore semaphore)))
                              t)))))))))

;;; Nor does one that computes hold up others until it is done.
(test who-computes-among-too-many-is-helped
  (with-group (group 3)
    (setf (sb-fiber::fiber-group-processors group) 1)
    (let ((done nil))
      (is (eq t (join (spawn (group)
                        (let ((other (spawn (group) (sleep 1/100) (setf done t))))
                          (loop until done)
                          (join other)))))))))
