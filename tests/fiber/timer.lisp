;;;; time-outs, timers and deadlines of fibers: fiber/timer.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :sb-posix)
(require :sb-bsd-sockets)

(in-package "SB-FIBER-TESTS")

(def-suite* timer)

;;;; WITH-TIMEOUT

(defmacro timed-out-p (&body body)
  `(handler-case (progn ,@body nil)
     (sb-ext:timeout () t)))

;;; Prevents: a time-out that unwinds another fiber, or none.
(test time-outs-of-waits
  (on-carriers (n)
    (let ((held (sb-thread:make-mutex)) (semaphore (sb-thread:make-semaphore)))
      (multiple-value-bind (in out) (sb-posix:pipe)
        (unwind-protect
             (sb-thread:with-mutex (held)
               (let ((waits (list (lambda () (sleep 3600))
                                  (lambda () (fiber-park))
                                  (lambda () (sb-thread:with-mutex (held)))
                                  (lambda () (sb-thread:wait-on-semaphore semaphore))
                                  (lambda () (sb-sys:wait-until-fd-usable in :input))
                                  (lambda () (fiber-wait-for (constantly nil)))
                                  (lambda () (loop (fiber-yield))))))
                 (is (equal (loop for i below 70 collect (evenp i))
                            (in-fibers n 70
                                       (lambda (i)
                                         (if (evenp i)
                                             (timed-out-p
                                               (sb-ext:with-timeout (/ (1+ (random 10)) 1000)
                                                 (funcall (elt waits (mod (floor i 2) 7)))))
                                             (timed-out-p (sleep 1/20)))))))))
          (sb-unix:unix-close in)
          (sb-unix:unix-close out))))))

;;; Another carrier serves the time-outs of one that computes, if somebody has given it the heap.
(test nested-time-outs
  (on-carriers (n)
    (is (equal '(:outer :inner :inner nil)
               (in-fiber (n)
                 (flet ((nest (outer inner wait)
                          (handler-case
                              (sb-ext:with-timeout outer
                                (handler-case (sb-ext:with-timeout inner (sleep wait))
                                  (sb-ext:timeout (condition)
                                    (unless (eql inner (slot-value condition 'sb-kernel::seconds))
                                      (error condition))
                                    :inner)))
                            (sb-ext:timeout () :outer))))
                   (list (nest 1/100 1000 3600)
                         (nest 1000 1/100 3600)
                         (nest 1000 1/1000 1/10)
                         (nest 1000 999 1/1000))))))))

;;; The restart goes on with what was interrupted.
(test continued-time-outs
  (on-carriers (n)
    (is (equal '(1 :slept)
               (in-fiber (n)
                 (let ((count 0))
                   (handler-bind ((sb-ext:timeout (lambda (condition)
                                                    (incf count)
                                                    (continue condition))))
                     (sb-ext:with-timeout 1/1000
                       (sleep 1/10)
                       (list count :slept)))))))))

(defun system-timer-settings (function)
  "How often the system's timer is set while FUNCTION is called."
  (let ((settings (make-flag)))
    (dolist (name '(sb-impl::%set-system-timer sb-impl::%clear-system-timer))
      (sb-int:encapsulate name 'test (lambda (f &rest arguments)
                                       (count-one settings)
                                       (apply f arguments))))
    (unwind-protect (funcall function)
      (sb-int:unencapsulate 'sb-impl::%set-system-timer 'test)
      (sb-int:unencapsulate 'sb-impl::%clear-system-timer 'test))
    (flag-count settings)))

;;; Prevents: SIGALRM for fibers, which comes to any thread.
(test no-system-timer-for-fibers
  (is (= 0 (system-timer-settings
            (lambda ()
              (in-fibers 2 100 (lambda (i)
                                 (timed-out-p (sb-ext:with-timeout (/ (1+ i) 1000) (sleep 3600)))
                                 (sb-ext:with-timeout 3600 (fiber-yield))))))))
  (is (< 0 (system-timer-settings
            (lambda () (timed-out-p (sb-ext:with-timeout 1/1000 (sleep 3600))))))))

;;;; Timers

(test timers-of-fibers
  (on-carriers (n)
    (with-group (group n)
      (let* ((calls '())
             (fiber (wait-until-parked (spawn (group) (fiber-park) :done)))
             (timer (sb-ext:make-timer (lambda () (push (current-fiber) calls)) :thread fiber)))
        (is (not (sb-ext:timer-scheduled-p timer)))
        ;; from a thread
        (sb-ext:schedule-timer timer 1/100)
        (is-true (wait-until calls))
        ;; from another fiber
        (join (spawn (group) (sb-ext:schedule-timer timer 1/100)))
        (is-true (wait-until (= 2 (length calls))))
        (sb-ext:schedule-timer timer (+ 1 (get-universal-time)) :absolute-p t)
        (is (sb-ext:timer-scheduled-p timer))
        (is-true (wait-until (= 3 (length calls))))
        (is (equal (list fiber fiber fiber) calls))
        (fiber-unpark fiber)
        (is (eq :done (join fiber)))))))

(test timers-that-are-cancelled
  (on-carriers (n)
    (with-group (group n)
      (let* ((called nil)
             (fiber (wait-until-parked (spawn (group) (fiber-park) :done)))
             (timer (sb-ext:make-timer (lambda () (setf called t)) :thread fiber)))
        (sb-ext:schedule-timer timer 3600)
        (is (member timer (sb-ext:list-all-timers)))
        (is (sb-ext:timer-scheduled-p timer))
        (is (= 1 (heap-count group)))
        (sb-ext:schedule-timer timer 7200) ; instead
        (is (= 1 (heap-count group)))
        (is (= 1 (count timer (sb-ext:list-all-timers))))
        (sb-ext:unschedule-timer timer)
        (is (= 0 (heap-count group)))
        (is (not (sb-ext:timer-scheduled-p timer)))
        (is (not (member timer (sb-ext:list-all-timers))))
        (dotimes (i 100)
          (sb-ext:schedule-timer timer 1/10000)
          (sb-ext:unschedule-timer timer)
          (let ((before called))
            (join (spawn (group) (sleep 1/1000)))
            (is (eq before called))))
        (fiber-unpark fiber)))))

(test timers-that-repeat
  (on-carriers (n)
    (with-group (group n)
      (let* ((calls (make-flag))
             (fiber (wait-until-parked (spawn (group) (fiber-park) :done)))
             (timer (sb-ext:make-timer (lambda () (count-one calls)) :thread fiber)))
        (sb-ext:schedule-timer timer 0 :repeat-interval 1/1000)
        (is-true (wait-until (<= 10 (flag-count calls))))
        (sb-ext:unschedule-timer timer)
        (let ((count (flag-count calls)))
          (join (spawn (group) (sleep 1/100)))
          (is (= count (flag-count calls))))
        ;; one whose fiber ends stops
        (sb-ext:schedule-timer timer 0 :repeat-interval 1/1000)
        (fiber-unpark fiber)
        (is (eq :done (join fiber)))
        (is-true (wait-until (= 0 (heap-count group))))))))

;;; A fiber that has no scheduler has its timers served as those of threads.
(test timers-of-the-new-and-the-dead
  (let ((timer nil) (called nil))
    (with-group (group 2)
      (let ((fiber (make-fiber (lambda ()
                                 (loop until called do (fiber-yield))
                                 :done))))
        (setf timer (sb-ext:make-timer (lambda () (setf called (current-fiber))) :thread fiber))
        (sb-ext:schedule-timer timer 3600)
        (is (member timer (sb-ext:list-all-timers)))
        (sb-ext:unschedule-timer timer)
        (is (not (member timer (sb-ext:list-all-timers))))
        (sb-ext:schedule-timer timer 1/100)
        (submit-fiber group fiber)
        (is (eq :done (join fiber)))
        (is (eq fiber called))))
    (sb-ext:schedule-timer timer 3600)
    (is (member timer (sb-ext:list-all-timers)))
    (sb-ext:unschedule-timer timer)
    (is (not (member timer (sb-ext:list-all-timers))))))

(test timers-of-threads-made-in-fibers
  (let ((threads '()))
    (with-group (group 2)
      (let ((done (sb-thread:make-semaphore)))
        (join (spawn (group)
                (let ((timer (sb-ext:make-timer (lambda ()
                                                  (push sb-thread:*current-thread* threads)
                                                  (sb-thread:signal-semaphore done))
                                                :thread t)))
                  (sb-ext:schedule-timer timer 1/1000)
                  (sb-thread:wait-on-semaphore done))))))
    (is (= 1 (length threads)))
    (is (not (sb-fiber::fiber-p (first threads))))))

;;;; WITH-DEADLINE

(defmacro deadline-signalled-p (&body body)
  `(handler-case (progn ,@body nil)
     (sb-sys:deadline-timeout () t)))

(test deadlines-of-waits
  (on-carriers (n)
    (let ((held (sb-thread:make-mutex)) (semaphore (sb-thread:make-semaphore))
          (mutex (sb-thread:make-mutex)) (queue (sb-thread:make-waitqueue)))
      (multiple-value-bind (in out) (sb-posix:pipe)
        (unwind-protect
             (sb-thread:with-mutex (held)
               (with-group (group n)
                 (let ((other (spawn (group) (fiber-park))))
                   (is (every #'identity
                              (mapcar (lambda (wait)
                                        (join (spawn (group)
                                                (deadline-signalled-p
                                                  (sb-sys:with-deadline (:seconds 1/100)
                                                    (funcall wait))))))
                                      (list (lambda () (sleep 3600))
                                            (lambda () (fiber-sleep 3600))
                                            (lambda () (fiber-park))
                                            (lambda () (fiber-park :timeout 3600))
                                            (lambda () (sb-thread:with-mutex (held)))
                                            (lambda ()
                                              (sb-thread:with-mutex (mutex)
                                                (loop (sb-thread:condition-wait queue mutex))))
                                            (lambda () (sb-thread:wait-on-semaphore semaphore))
                                            (lambda () (sb-sys:wait-until-fd-usable in :input))
                                            (lambda () (fiber-join other))
                                            (lambda () (fiber-join other :timeout 3600))
                                            (lambda () (sb-thread:join-thread other))
                                            (lambda () (fiber-wait-for (constantly nil)))
                                            (lambda () (sb-ext:wait-for nil))))))
                   ;; a time-out that is over first
                   (is (equal '(nil (nil :timeout) nil)
                              (join (spawn (group)
                                      (sb-sys:with-deadline (:seconds 3600)
                                        (list (fiber-park :timeout 1/100)
                                              (multiple-value-list
                                               (fiber-join other :timeout 1/100 :default nil))
                                              (sleep 1/100)))))))
                   (fiber-unpark other))))
          (sb-unix:unix-close in)
          (sb-unix:unix-close out))))))

;;; Prevents: a deadline that is signalled again at once after it was deferred.
(test deadlines-that-are-deferred
  (on-carriers (n)
    (with-group (group n)
      (let ((other (spawn (group) (fiber-park))))
        (flet ((count-deadlines (wait last)
                 (join (spawn (group)
                         (let ((count 0))
                           (list (handler-case
                                     (handler-bind ((sb-sys:deadline-timeout
                                                      (lambda (condition)
                                                        (if (< (incf count) 3)
                                                            (sb-sys:defer-deadline 1/100 condition)
                                                            (funcall last condition)))))
                                       (sb-sys:with-deadline (:seconds 1/100) (funcall wait)))
                                   (sb-sys:deadline-timeout () :signalled))
                                 count))))))
          (dolist (wait (list (lambda () (sleep 3600))
                              (lambda () (fiber-park))
                              (lambda () (fiber-join other))))
            (is (equal '(:signalled 3) (count-deadlines wait #'identity))))
          ;; a time-out that is over last, or between two of the deadlines
          (destructuring-bind (result count)
              (count-deadlines (lambda () (fiber-park :timeout 1/10)) #'sb-sys:cancel-deadline)
            (is (null result))
            (is (<= 1 count 3)))
          (destructuring-bind (result count)
              (count-deadlines (lambda ()
                                 (multiple-value-list
                                  (fiber-join other :timeout 1/10 :default :late)))
                               #'sb-sys:cancel-deadline)
            (is (equal '(:late :timeout) result))
            (is (<= 1 count 3))))
        (fiber-unpark other)))))

(test nested-deadlines
  (on-carriers (n)
    (is (equal '(t t nil t)
               (in-fiber (n)
                 (list (deadline-signalled-p
                         (sb-sys:with-deadline (:seconds 1/100)
                           (sb-sys:with-deadline (:seconds 3600) (sleep 3600))))
                       (deadline-signalled-p
                         (sb-sys:with-deadline (:seconds 3600)
                           (sb-sys:with-deadline (:seconds 1/100) (fiber-park))))
                       (deadline-signalled-p
                         (sb-sys:with-deadline (:seconds 1/1000)
                           (sb-sys:with-deadline (:seconds 1 :override t) (sleep 1/100))))
                       (deadline-signalled-p
                         (sb-sys:with-deadline (:seconds 1/1000)
                           (sb-sys:with-deadline (:seconds nil :override t) (sleep 1/100))
                           (sleep 1/1000)))))))
    ;; that of one fiber is no other's
    (is (equal '(t nil t nil)
               (in-fibers n 4 (lambda (i)
                                (deadline-signalled-p
                                  (if (evenp i)
                                      (sb-sys:with-deadline (:seconds 1/100) (sleep 3600))
                                      (sleep 1/20)))))))))

;;;; Connecting

(defun call-with-deaf-listener (function)
  "Call FUNCTION with the port of a socket that nobody accepts from; it keeps some connections
waiting, and does not answer others."
  (let ((listener (make-instance 'sb-bsd-sockets:inet-socket :type :stream :protocol :tcp)))
    (unwind-protect
         (progn (sb-bsd-sockets:socket-bind listener #(127 0 0 1) 0)
                (sb-bsd-sockets:socket-listen listener 0)
                (funcall function (nth-value 1 (sb-bsd-sockets:socket-name listener))))
      (sb-bsd-sockets:socket-close listener))))

;;; How usocket does it. Prevents: O_NONBLOCK on a socket whose user has not asked for it.
(test time-out-of-a-connection
  (on-carriers (n)
    (call-with-deaf-listener
     (lambda (port)
       (let ((results (in-fibers
                       n 8
                       (lambda (i)
                         (declare (ignore i))
                         (let ((socket (make-instance 'sb-bsd-sockets:inet-socket
                                                      :type :stream :protocol :tcp)))
                           (unwind-protect
                                (list (timed-out-p
                                        (sb-ext:with-timeout 1/5
                                          (sb-bsd-sockets:socket-connect socket #(127 0 0 1) port)))
                                      (sb-bsd-sockets:non-blocking-mode socket))
                             (sb-bsd-sockets:socket-close socket)))))))
         (is (find t results :key #'first))
         (is (every #'null (mapcar #'second results))))))))

;;; Prevents: a timer that is not scheduled again, since the deadline of the fiber that it
;;; interrupts comes while others have the lock.
(test repeating-timers-and-deadlines
  (let ((ticks (make-flag)) (held (make-flag)) (wanted (make-flag)))
    (let ((holder (make-thread
                   (lambda ()
                     (wait-until (flag-value wanted))
                     (sb-thread::with-system-mutex (sb-impl::*scheduler-lock*)
                       (raise-flag held)
                       (sleep 1/2))))))
      (is-true
       (in-fiber ()
         (let ((timer (sb-ext:make-timer (lambda ()
                                           (when (= 3 (count-one ticks))
                                             (raise-flag wanted)
                                             (loop until (flag-value held))))
                                         :thread sb-thread:*current-thread*)))
           (sb-ext:schedule-timer timer 1/50 :repeat-interval 1/50)
           (handler-case (sb-sys:with-deadline (:seconds 1/5)
                           (sleep 1))
             (sb-sys:deadline-timeout ()))
           (prog1 (wait-until (< 6 (flag-count ticks)))
             (sb-ext:unschedule-timer timer)))))
      (join-thread holder))))
