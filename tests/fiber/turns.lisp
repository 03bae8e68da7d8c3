;;;; Who runs when: parking, waking, turns, work that is stolen

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* turns)

;;;; Parking and turns

(defun play-ping-pong (turns call-as-1 call-as-2)
  "Two players, started by the functions, that wait for each other TURNS times."
  (let ((turn 0) (players (list nil nil)))
    (flet ((player (me)
             (loop until (every #'identity players) do (sb-thread:thread-yield))
             (loop repeat turns
                   do (loop until (= turn me) do (fiber-park))
                      (setf turn (- 1 me))
                      (fiber-unpark (nth (- 1 me) players)))
             t))
      (setf (first players) (funcall call-as-1 (lambda () (player 0)))
            (second players) (funcall call-as-2 (lambda () (player 1))))
      (join-all players))))

;;; Prevents: an unpark between the test and the park that is lost.
(test park-and-unpark
  (on-carriers (n)
    (with-group (group n)
      (flet ((start (function) (submit-fiber group (make-fiber function))))
        (is (equal '(t t) (play-ping-pong 1000 #'start #'start)))
        (with-group (other 1)
          (is (equal '(t t)
                     (play-ping-pong 300 #'start
                                     (lambda (function) (submit-fiber other (make-fiber function)))))))))))

(test unpark-from-threads
  (on-carriers (n)
    (with-group (group n)
      (let* ((count 0) (stop nil)
             (fiber (spawn (group) (loop (fiber-park) (incf count) (when stop (return :ended)))))
             (threads (loop repeat 3
                            collect (sb-thread:make-thread
                                     (lambda () (loop repeat 500 do (fiber-unpark fiber)))))))
        (mapc #'sb-thread:join-thread threads)
        (setf stop t)
        (fiber-unpark fiber)
        (is (eq :ended (join fiber)))
        (is (<= 1 count 1501))))))

(test park-timeout
  (on-carriers (n)
    (is (equal '(nil t nil)
               (in-fiber (n)
                 (list (fiber-park :timeout 1/1000)
                       (progn (fiber-unpark (current-fiber)) (fiber-park :timeout 3600))
                       (fiber-park :timeout 0)))))))

;;; More runnable fibers than a queue holds. Prevents: those in the queue keeping out those behind it.
(test everybody-gets-a-turn
  (on-carriers (n)
    (with-group (group n)
      (let ((turns (make-array 1000 :initial-element 0)))
        (is (= 1000 (length (join-all
                             (loop for i below 1000
                                   collect (let ((i i))
                                             (spawn (group)
                                               (loop until (every (lambda (n) (>= n 2)) turns)
                                                     do (incf (aref turns i))
                                                        (fiber-yield)))))))))))))

;;; The bound that the head of fiber.lisp gives: on one carrier, N that yield come round within 2 * N + 256 turns.
(test turns-are-even
  (dolist (n '(2 200 256 257 600 3000))
    (let ((turn 0) (widest 0))
      (flet ((take-turns ()
               (loop repeat 10
                     for last = nil then this
                     for this = (incf turn)
                     do (when last (setf widest (max widest (- this last))))
                        (fiber-yield))))
        (with-group (group 1)
          (join (spawn (group)
                  (join-all (loop repeat n collect (spawn (group) (take-turns))))))))
      (is (<= widest (+ (* 2 n) 256))))))

;;; Pairs that wake each other keep the queue full without a yield. Prevents: those in the injector being kept
;;; out for ever.
(test pairs-that-fill-the-queue
  (on-carriers (n)
    (with-group (group n)
      (let* ((begun (list 0))
             (fibers (make-array 800)))
        (flet ((play (i)
                 (let ((partner (svref fibers (logxor i 1))))
                   (sb-ext:atomic-incf (car begun))
                   (loop until (= (car begun) (length fibers))
                         do (fiber-unpark partner)
                            (fiber-park))
                   (fiber-unpark partner)
                   t)))
          (dotimes (i (length fibers))
            (setf (svref fibers i) (let ((i i)) (make-fiber (lambda () (play i))))))
          (map nil (lambda (fiber) (submit-fiber group fiber)) fibers)
          (is (all-true-p (join-all (coerce fibers 'list)))))))))

;;; Fibers that only yield must not keep out timers and descriptors.
(test sleepers-among-yielders
  (on-carriers (n)
    (with-group (group n)
      (let* ((done nil)
             (yielders (loop repeat 400 collect (spawn (group) (loop until done do (fiber-yield)) t)))
             (sleepers (loop repeat 10 collect (spawn (group) (loop repeat 3 do (sleep 1/1000)) t))))
        (is (all-true-p (join-all sleepers)))
        (setf done t)
        (is (all-true-p (join-all yielders)))))))

;;; For more than the time after which a scheduler looks around.
(defun compute-for-a-look ()
  (let ((start (sb-fiber::%cycle-count)))
    (loop until (> (sb-fiber::cycles-since start (sb-fiber::%cycle-count)) sb-fiber::*cycles-per-millisecond*))))

;;; The sleeper's time has come when it parks. It waits for the look, at most eight turns, and two of the others.
;;; Prevents: timers and descriptors that wait for 61 fibers that compute.
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
                  (list (loop do (fiber-yield) collect (heap-count group) until (= 0 (heap-count group)))
                        fibers))))
      ;; One yield may be two looks; with other carriers, more.
      (unless (migration-wanted-p)
        (is (loop for (before after) on (cons 1000 left) while after always (<= (- before after) 256)) "~A" left))
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

(test submission-from-many-threads
  (on-carriers (n)
    (with-group (group n)
      (let* ((count (list 0))
             (threads (loop repeat 4
                            collect (sb-thread:make-thread
                                     (lambda ()
                                       (loop repeat 500
                                             collect (spawn (group)
                                                       (sb-ext:atomic-incf (car count)))))))))
        (mapc #'join-all (mapcar #'sb-thread:join-thread threads))
        (is (= 2000 (car count)))))))

;;;; Numbers

(test ten-thousand-fibers
  (on-carriers (n :counts '(1 2) :migration '(nil))
    (with-group (group n)
      (let ((fibers (loop for i below 10000
                          collect (let ((i i))
                                    (spawn (group)
                                      (let ((list (list i)))
                                        (fiber-park)
                                        (car list)))))))
        (mapc #'wait-until-parked fibers)
        (is (<= 10000 (length (list-all-fibers))))
        (sb-ext:gc)
        (mapc #'fiber-unpark fibers)
        (is (equal (loop for i below 10000 collect i) (join-all fibers)))))))

(test ten-thousand-waiters
  (on-carriers (n :counts '(1 2) :migration '(nil))
    (with-group (group n)
      (let* ((semaphore (sb-thread:make-semaphore))
             (fibers (loop repeat 10000
                           collect (spawn (group) (sb-thread:wait-on-semaphore semaphore) t))))
        (sb-thread:signal-semaphore semaphore 10000)
        (is (all-true-p (join-all fibers)))))))
