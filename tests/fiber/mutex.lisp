;;;; Mutexes: exclusion, ownership, time-outs, handing over: fiber/mutex.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* mutex)

(defun count-under-mutex (carrier-count n-fibers n-threads)
  (let ((mutex (make-mutex))
        (count 0))
    (mixed carrier-count n-fibers n-threads
           (lambda (i)
             (declare (ignore i))
             (loop repeat 200 do (with-mutex (mutex) (slow-increment count)))))
    count))

;;; Prevents: two holders at once; a release that wakes nobody; a fiber that is woken and forgotten.
(test mutex-excludes
  (on-carriers (n)
    (is (= 6000 (count-under-mutex n 30 0)))
    (is (= 6000 (count-under-mutex n 26 4)))))

;;; More mutexes than the parking lot has buckets: waiters for different words share one. Prevents
;;; that a wake-up for one word goes to a waiter for another.
(test mutexes-that-share-buckets
  (on-carriers (n)
    (let* ((mutexes (coerce (loop repeat 3000 collect (make-mutex)) 'vector))
           (counts (make-array 3000 :initial-element 0)))
      (in-fibers n 100 (lambda (i)
                         (loop for k below 300
                               do (let ((j (* 10 (mod (+ k (floor i 2)) 300))))
                                    (with-mutex ((aref mutexes j))
                                      (slow-increment (aref counts j)))))))
      (is (= 30000 (reduce #'+ counts))))))

;;; Prevents: ownership by the carrier, which other fibers of it would then seem to have, and
;;; which does not go along when the fiber migrates.
(test mutex-owner-is-the-fiber
  (on-carriers (n)
    (let ((mutex (make-mutex))
          (wrong 0))
      (with-group (group n)
        (let ((owner (spawn (group)
                       (with-mutex (mutex)
                         (loop repeat 500
                               do (fiber-yield)
                                  (unless (and (holding-mutex-p mutex)
                                               (eq (mutex-owner mutex) (current-fiber)))
                                    (incf wrong)))))))
          (join-all (loop repeat 10
                          collect (spawn (group)
                                    (loop while (fiber-alive-p owner)
                                          do (when (holding-mutex-p mutex) (incf wrong))
                                             ;; it is racy
                                             (unless (member (mutex-owner mutex)
                                                             (list owner nil :thread-dead))
                                               (incf wrong))
                                             (fiber-yield)))))))
      (is (= 0 wrong)))))

;;; Prevents: an owner of an earlier fiber on the same stack taken for this one.
(test mutex-of-a-dead-fiber
  (let ((mutex (make-mutex)))
    (with-group (group 1)
      (join (spawn (group) (grab-mutex mutex)))
      (is (eq :thread-dead (mutex-owner mutex)))
      (is (equal '(nil nil) (join (spawn (group)
                                    (list (holding-mutex-p mutex)
                                          (grab-mutex mutex :waitp nil)))))))))

(test mutex-errors
  (is (eq :error (in-fiber ()
                   (let ((mutex (make-mutex)))
                     (with-mutex (mutex)
                       (handler-case (grab-mutex mutex) (error () :error)))))))
  ;; a mutex that another fiber of the same carrier holds
  (let ((mutex (make-mutex)))
    (with-group (group 1)
      (let ((owner (spawn (group) (with-mutex (mutex) (fiber-park) (holding-mutex-p mutex)))))
        (is (eq :error (join (spawn (group)
                               (handler-case (release-mutex mutex :if-not-owner :error)
                                 (error () :error))))))
        (fiber-unpark owner)
        (is (eq t (join owner)))))))

;;; Prevents: a recursive lock that the other fibers of a carrier enter as if they held it.
(test recursive-lock
  (on-carriers (n)
    (let ((mutex (make-mutex))
          (count 0))
      (mixed n 20 2 (lambda (i)
                      (declare (ignore i))
                      (loop repeat 50
                            do (with-recursive-lock (mutex)
                                 (yield-at-random)
                                 (with-recursive-lock (mutex)
                                   (slow-increment count))))))
      (is (= 1100 count)))))

;;; Prevents: a wait that ends in time-out and grant at once, or in neither.
(test mutex-with-timeout
  (on-carriers (n)
    (let ((mutex (make-mutex))
          (holders 0)
          (most 0))
      (let ((got (mixed n 60 2
                        (lambda (i)
                          (loop repeat 20
                                count (when (grab-mutex mutex :timeout (* i 1/20000))
                                        (setf most (max most (incf holders)))
                                        (yield-at-random)
                                        (decf holders)
                                        (release-mutex mutex)
                                        t))))))
        (is (= 1 most))
        (is (= 0 holders))
        (is (plusp (reduce #'+ got)))
        (is (null (mutex-owner mutex)))
        (is (eq t (in-fiber () (grab-mutex mutex :timeout 10))))))))

(test mutex-timeout-is-over
  (let ((mutex (make-mutex)))
    (with-mutex (mutex)
      (is (eq nil (in-fiber () (grab-mutex mutex :timeout 1/100))))
      (is (eq nil (in-fiber () (grab-mutex mutex :timeout 0))))
      (is (eq nil (in-fiber () (grab-mutex mutex :waitp nil))))
      (is (eq :deadline (in-fiber ()
                          (handler-case (sb-sys:with-deadline (:seconds 1/100)
                                          (grab-mutex mutex))
                            (sb-sys:deadline-timeout () :deadline))))))))

;;; Prevents: a cycle of waiting fibers that is not found, since owners are looked up as threads
;;; only.
(test deadlock-is-detected
  (on-carriers (n :counts '(1 2))
    (let* ((a (make-mutex)) (b (make-mutex))
           (both (make-semaphore))
           (results (in-fibers n 2
                               (lambda (i)
                                 (destructuring-bind (first second)
                                     (if (= i 0) (list a b) (list b a))
                                   (with-mutex (first)
                                     (signal-semaphore both)
                                     (loop until (>= (semaphore-count both) 2) do (thread-yield))
                                     (handler-case (with-mutex (second) :got-it)
                                       (sb-thread:thread-deadlock () :deadlock))))))))
      (is (equal '(:deadlock :got-it) (sort results #'string<))))))

;;; Prevents: a wake-up that goes to a fiber that is about to be ended, and wakes nobody then.
(test terminated-waiters-lose-no-wake-up
  (on-carriers (n)
    (let ((mutex (make-mutex))
          (count 0))
      (with-group (group n)
        (let* ((victims (loop repeat 60
                              collect (spawn (group)
                                        (loop (with-mutex (mutex) (thread-yield))))))
               (others (loop repeat 20
                             collect (spawn (group)
                                       (loop repeat 20
                                             do (with-mutex (mutex) (slow-increment count)))))))
          (dolist (victim victims)
            (terminate-fiber victim)
            (thread-yield))
          (join-all others)
          (is (= 400 count))
          (is (every (lambda (victim)
                       (eq :abort (nth-value 1 (fiber-join victim :default nil
                                                                  :timeout *patience*))))
                     victims))
          (is (null (mutex-owner mutex))))))))

;;;; A mutex is handed over to a waiter that was overtaken

;;; Prevents: that the fiber which has just released the mutex always takes it before the one that
;;; was woken. It holds the mutex whenever it parks.
(test a-greedy-fiber
  (on-carriers (n)
    (let ((mutex (make-mutex)) (others 0))
      (is (equal '(t t t t)
                 (in-fibers n 4
                            (lambda (i)
                              (cond ((= i 0)
                                     (loop until (= others 3)
                                           do (with-mutex (mutex) (fiber-yield)))
                                     t)
                                    (t (loop repeat 20 do (fiber-yield))
                                       (with-mutex (mutex) (incf others))
                                       t)))))))))

(test a-greedy-thread
  (on-carriers (n)
    (let ((mutex (make-mutex)) (others 0))
      (is (equal '(t t t t)
                 (mixed n 3 1
                        (lambda (i)
                          (cond ((= i 3)
                                 (loop until (= others 3)
                                       do (with-mutex (mutex) (thread-yield)))
                                 t)
                                (t (loop repeat 20 do (fiber-yield))
                                   (with-mutex (mutex) (incf others))
                                   t)))))))))

;;; Each takes its turn though all want it always: nobody is overtaken again and again.
(test greedy-fibers
  (on-carriers (n)
    (let ((mutex (make-mutex)) (turns (make-array 10 :initial-element 0)))
      (is (equal (make-list 10 :initial-element t)
                 (in-fibers n 10
                            (lambda (i)
                              (loop until (every (lambda (turns) (>= turns 3)) turns)
                                    do (with-mutex (mutex)
                                         (incf (svref turns i))
                                         (thread-yield)))
                              t)))))))
