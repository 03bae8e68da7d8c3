;;;; Deadlocks are found, and nothing waits for ever that is not in one

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* deadlock)

;;;; Deadlock

(defun cross (n first second ready)
  "Take FIRST, wait until N have done so, and then take SECOND. Return the deadlock, or :GOT-IT."
  (with-mutex (first)
    (signal-semaphore ready)
    (loop until (>= (semaphore-count ready) n) do (thread-yield))
    (handler-case (with-mutex (second) :got-it)
      (sb-thread:thread-deadlock (condition) condition))))

(defun deadlock-in-circle (carrier-count n-fibers n-threads)
  "Let each of some fibers and threads hold a mutex and want the next one's. Return what became of
them."
  (let* ((n (+ n-fibers n-threads))
         (mutexes (coerce (loop for i below n collect (make-mutex :name (format nil "~D" i)))
                          'simple-vector))
         (ready (make-semaphore)))
    (values (mixed carrier-count n-fibers n-threads
                   (lambda (i)
                     (cross n (svref mutexes i) (svref mutexes (mod (1+ i) n)) ready)))
            mutexes)))

(defun check-deadlock (results mutexes)
  (let ((deadlocks (remove :got-it results)))
    (is (= 1 (length deadlocks)))
    (let ((cycle (sb-thread:thread-deadlock-cycle (first deadlocks))))
      (is (= (length mutexes) (length cycle)))
      (is (null (set-exclusive-or (coerce mutexes 'list) (mapcar #'cdr cycle))))
      (is (assoc (sb-thread:thread-error-thread (first deadlocks)) cycle))
      (is (search "Deadlock" (princ-to-string (first deadlocks)))))))

(test deadlock-of-fibers
  (on-carriers (n)
    (multiple-value-call #'check-deadlock (deadlock-in-circle n 2 0))
    (multiple-value-call #'check-deadlock (deadlock-in-circle n 5 0))))

(test deadlock-of-fibers-and-threads
  (on-carriers (n)
    (multiple-value-call #'check-deadlock (deadlock-in-circle n 1 1))
    (multiple-value-call #'check-deadlock (deadlock-in-circle n 2 2))))

;;; Two fibers that are mounted at the same time, each on a carrier of its own.
(test deadlock-of-running-fibers
  (let ((a (make-mutex)) (b (make-mutex)) (here (list 0)))
    (flet ((take (first second)
             (with-mutex (first)
               (sb-ext:atomic-incf (car here))
               (loop until (= (car here) 2)
                     do (loop repeat 1000 do (sb-ext:spin-loop-hint))
                        (fiber-yield))
               (handler-case (with-mutex (second) :got-it)
                 (sb-thread:thread-deadlock () :deadlock)))))
      (loop repeat 50
            do (setf (car here) 0)
               (is (equal '(:deadlock :got-it)
                          (sort (in-fibers 2 2 (lambda (i) (if (= i 0) (take a b) (take b a))))
                                #'string<)))))))

(defun try-two (first second patient)
  "Take two mutexes, the second one, unless PATIENT, with a time-out."
  (handler-case
      (with-mutex (first :timeout 10)
        (thread-yield)
        (if patient
            (with-mutex (second) t)
            (with-mutex (second :timeout 1/1000) t)))
    (sb-thread:thread-deadlock () :deadlock)))

;;; A fiber that waits with a time-out will give up: that is no deadlock. What it waits for is in a
;;; cons on its stack; others follow the chain of waiters meanwhile, and must not look into it.
(test no-deadlock-with-a-time-out
  (nobody-left
    (on-carriers (n)
      (let* ((mutexes (coerce (loop repeat 8 collect (make-mutex)) 'simple-vector))
             (outcomes (mixed n 24 4
                              (lambda (i)
                                (loop repeat 30
                                      collect (try-two (svref mutexes (mod i 8))
                                                       (svref mutexes (mod (+ i 3) 8))
                                                       (evenp i)))))))
        (is (null (set-difference (reduce #'append outcomes) '(t nil :deadlock))))
        (is (every (lambda (mutex) (null (mutex-owner mutex))) mutexes))))))

;;;; Nobody waits for ever

;;; As many waiters as there are connections of a server. Prevents: waking, entering and leaving
;;; that get slower with each waiter.
(test many-waiters-of-one-queue
  (nobody-left
    (on-carriers (n :counts '(1 2) :migration '(nil))
      (let ((mutex (make-mutex)) (queue (make-waitqueue)) (go nil) (arrived 0) (woken 0))
        (with-group (group n)
          (let ((fibers (loop repeat 10000
                              collect (spawn (group)
                                        (with-mutex (mutex)
                                          (incf arrived)
                                          (loop until go do (condition-wait queue mutex))
                                          (incf woken))))))
            (loop until (= 10000 (with-mutex (mutex) arrived)) do (sleep 1/100))
            (with-mutex (mutex)
              (setf go t)
              (condition-broadcast queue))
            (join-all fibers)
            (is (= 10000 woken))))))))

(test many-waiters-give-up
  (nobody-left
    (on-carriers (n :counts '(1 2) :migration '(nil))
      (let ((semaphore (make-semaphore)))
        (is (= 5000
               (count nil (in-fibers n 5000
                                     (lambda (i)
                                       (wait-on-semaphore semaphore
                                                          :timeout (/ (1+ (mod i 100)) 500)))))))
        (is (= 0 (semaphore-count semaphore)))
        (is (= 0 (sb-thread::semaphore-waitcount semaphore)))))))
