;;;; Waits, and wake-ups of others, where the stack has no room for them

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/stack-ends.lisp" *load-truename*))

(def-suite* headroom)

;;;; Waits

;;; Prevents: a fiber that is unwound in the midst of a wait and stays in a chain; one that is
;;; forgotten, since its successor overflowed while it took care of it; a reserve that is closed
;;; with the fiber that closes it inside.
(test waits-at-the-end-of-the-stack
  (on-carriers (n :counts '(1 2))
    (multiple-value-bind (reader writer) (sb-unix:unix-pipe)
      (let* ((queue (sb-thread:make-waitqueue)) (done nil)
             (waits (list (lambda () (sleep 1/100000))
                          #'fiber-yield
                          (lambda () (fiber-park :timeout 1/100000))
                          (lambda () (sb-unix:unix-simple-poll reader :input 1))
                          ;; One that overflows in RELEASE-MUTEX, as a thread may, leaves the mutex
                          ;; taken.
                          (lambda () (let ((mutex (sb-thread:make-mutex)))
                                       (sb-thread:with-mutex (mutex)
                                         (sb-thread:condition-wait queue mutex :timeout 1/100000))))
                          (lambda ()
                            ;; opens the reserve silently
                            (sb-sys:without-gcing (descend-a-little 60))
                            (sleep 1/100000)))))
        (with-group (group n)
          (let ((bystanders (loop repeat 3
                                  collect (spawn (group) (loop until done do (fiber-yield)) t))))
            (dolist (wait waits)
              (is (eq t (join (spawn (group)
                                (loop for distance from 9000 downto -100 by 61
                                      do (handler-case (call-at-distance distance wait)
                                           (storage-condition ())))
                                t)))))
            (setf done t)
            (is (equal '(t t t) (join-all bystanders)))
            (is (null (sb-fiber::fd-cell-input (sb-fiber::find-fd-cell reader t))))))
        (sb-unix:unix-close reader)
        (sb-unix:unix-close writer)))))

;;; Prevents: a fiber that waits in pages that something else has opened silently, and is notified
;;; in the midst of the wait.
(test no-wait-in-a-reserve-that-was-opened-silently
  (flet ((exhausted-at-p (distance)
           (call-at-distance distance
                             (lambda ()
                               (sb-sys:without-gcing (call-at-distance -3000 #'keep))
                               (handler-case (fiber-can-park-p)
                                 (sb-kernel::control-stack-exhausted () :exhausted))))))
    (with-group (group 1)
      (loop for (distance result) in '((20000 t) (9500 t) (6000 :exhausted) (2500 :exhausted))
            do (is (eq result (join (spawn (group) (exhausted-at-p distance)))))))))

;;; What was notified, or reports, has the reserve to wait in.
(test handlers-and-reports-wait-in-the-reserve
  (flet ((waits-p ()
           (and (< (stack-pointer) (+ (control-base) 8192)) (fiber-can-park-p)
                (progn (sleep 1/1000) t))))
    (is (eq t (in-fiber ()
                (block nil
                  (handler-bind ((sb-kernel::control-stack-exhausted
                                   (lambda (condition) (keep condition) (return (waits-p)))))
                    (recurse-with-frames 10))))))
    (is (eq t (in-fiber ()
                (call-at-distance 4000 (lambda ()
                                         (sb-fiber::make-room-to-report)
                                         (waits-p))))))))

;;;; Wake-ups

(defun ways-to-wake (mutex queue)
  "Functions that wake a fiber, which is in FIBER-PARK or waits in QUEUE."
  (list #'fiber-unpark
        (lambda (fiber) (interrupt-fiber fiber #'list))
        (lambda (fiber)
          (declare (ignore fiber))
          (sb-thread:condition-notify queue))
        (lambda (fiber)
          (submit-fiber (sb-fiber::fiber-group fiber) (make-fiber #'list)))
        ;; One that overflows in the midst of taking or releasing the mutex, as a thread may, leaves
        ;; it taken.
        (lambda (fiber)
          (declare (ignore fiber))
          (with-mutex (mutex :timeout 1/10) (sb-thread:condition-broadcast queue)))))

(defun asleep-p (group)
  (= (logcount (sb-fiber::fiber-group-idle group))
     (length (sb-fiber::fiber-group-schedulers group))))

;;; Prevents: a carrier that is thought to be awake, and never is again; a fiber in no queue.
(test wakes-at-the-end-of-the-stack
  (let ((mutex (make-mutex)) (queue (make-waitqueue)) (woken (make-flag)) (stop (make-flag)))
    (dolist (wake (ways-to-wake mutex queue))
      (let ((overflows 0))
        (with-group (woken-group 1)
          (let ((fiber (spawn (woken-group)
                         (loop until (flag-value stop)
                               do (if (= 0 (random 2))
                                      (fiber-park :timeout 1/100)
                                      (with-mutex (mutex :timeout 1/10)
                                        (condition-wait queue mutex :timeout 1/100)))
                                  (count-one woken)))))
            (with-group (group 1)
              (loop for distance from 1500 downto -300 by 29
                    do (wait-until (asleep-p woken-group))
                       (when (eq :overflow
                                 (join (spawn (group)
                                         (handler-case
                                             (call-at-distance distance
                                                               (lambda () (funcall wake fiber)))
                                           (storage-condition () :overflow)))))
                         (incf overflows))
                       (unless (eql 1 (fiber-join (spawn (woken-group) 1) :default nil :timeout 10))
                         (return (fail "Nobody woke the group at ~D." distance)))))
            (raise-flag stop)
            (fiber-unpark fiber)
            (is (plusp overflows))))
        (setf (flag-value stop) nil)))
    (is (plusp (flag-count woken)))))

;;; Prevents: a waiter that nobody wakes, since it was the wake-up that was cut off, and that is in
;;; a cleanup form.
(test mutexes-released-at-the-end-of-the-stack
  (with-group (group 1)
    (let ((lost '()))
      (loop for distance from 6000 downto 600 by 97
            do (let* ((mutex (make-mutex)) (taken (make-flag))
                      (holder (spawn (group)
                                (handler-case
                                    (call-at-distance
                                     distance
                                     (lambda ()
                                       (with-mutex (mutex)
                                         (raise-flag taken)
                                         (loop until (= 2 (sb-thread::mutex-state mutex))))))
                                  (storage-condition () (raise-flag taken)))))
                      (waiter (progn (wait-until (flag-value taken))
                                     (make-thread (lambda ()
                                                    (with-mutex (mutex :timeout 10) :taken))))))
                 (join holder)
                 (unless (eq :taken (join-thread waiter)) (push distance lost))))
      (is (null lost)))))

;;; Prevents: a number that is in no stream any more, and open.
(test streams-closed-at-the-end-of-the-stack
  (with-group (group 1)
    (let ((lost '()))
      (loop for distance from 6000 downto 700 by 97
            do (multiple-value-bind (reader writer) (sb-unix:unix-pipe)
                 (let ((stream (sb-sys:make-fd-stream reader :input t)))
                   (join (spawn (group)
                           (handler-case (call-at-distance distance (lambda () (close stream)))
                             (storage-condition ()))))
                   (close stream)
                   (when (sb-unix:unix-fstat reader)
                     (sb-unix:unix-close reader)
                     (push distance lost))
                   (sb-unix:unix-close writer))))
      (is (null lost)))))

(defun compute-for (seconds)
  (let ((end (+ (get-internal-real-time) (* seconds internal-time-units-per-second))))
    (loop while (< (get-internal-real-time) end))))

;;; Prevents: a timer in no heap. With less than some five kilobytes left it may be the interruption
;;; that is cut off.
(test repeating-timers-at-the-end-of-the-stack
  (with-group (group 1)
    (let ((lost '()))
      (join (spawn (group)
              (loop for distance from 9000 downto 5500 by 97
                    do (let* ((ticks 0)
                              (timer (sb-ext:make-timer (lambda () (incf ticks))
                                                        :thread (current-fiber))))
                         (sb-ext:schedule-timer timer 1/500 :repeat-interval 1/500)
                         (handler-case (call-at-distance distance (lambda () (compute-for 1/100)))
                           (storage-condition ()))
                         (let ((before ticks))
                           (unless (wait-until (> ticks before)) (push distance lost)))
                         (sb-ext:unschedule-timer timer)))))
      (is (null lost)))))

(defun recurse-with-closes ()
  (sb-unix:unix-close 900)
  (+ (recurse-with-closes) (keep)))

;;; Prevents: a recursion that uses the reserve up, step by step, without being told.
(test recursion-with-closes
  (is (eq :unwound (in-fiber ()
                     (handler-case (recurse-with-closes)
                       (sb-kernel::control-stack-exhausted () :unwound))))))

;;;; In threads

(defun guard-of-thread ()
  "Where the control stack of this thread, which is no fiber, ends for it."
  (+ (sb-thread::thread-control-stack-start sb-thread:*current-thread*)
     (* 2 (sb-alien:extern-alien "os_vm_page_size" sb-alien:int))))

(defun call-in-thread-at-distance (distance function)
  (join-thread
   (make-thread (lambda ()
                  (handler-case
                      (progn (call-at-distance distance function #'guard-of-thread) :called)
                    (storage-condition () :overflow))))))

;;; Prevents: a process that ends, since its stack did in a tiny lock; a fiber in no queue.
(test wakes-at-the-end-of-a-thread-s-stack
  (with-group (group 1)
    (join (spawn (group) 1))
    (let ((overflows 0))
      (loop for distance from 5000 downto 300 by 193
            do (let ((fiber (make-fiber (lambda () (fiber-park) :woken))))
                 (flet ((call (function)
                          (when (eq :overflow (call-in-thread-at-distance distance function))
                            (incf overflows)
                            (funcall function))))
                   (call (lambda () (submit-fiber group fiber)))
                   (wait-until-parked fiber)
                   (call (lambda () (fiber-unpark fiber)))
                   (is (eq :woken (fiber-join fiber :default nil :timeout *patience*))))))
      (is (plusp overflows)))))

;;; All of this again.
(unless *guard-method*
  (test guard-methods
    (check-with-guard-methods "headroom")))
