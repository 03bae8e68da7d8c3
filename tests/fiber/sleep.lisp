;;;; Waiting for time: SLEEP, deadlines, WITH-TIMEOUT, timers

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/descriptors.lisp" *load-truename*))

(def-suite* sleep)

(defun slept-long-enough-p (seconds)
  (let ((start (sb-fiber::fiber-now)))
    (sleep seconds)
    (>= (- (sb-fiber::fiber-now) start) (floor (* (rational seconds) 1000000000)))))

(test thousand-fibers-sleep-at-random
  (on-carriers (n)
    (is (all-true-p (in-fibers n 1000 (lambda (i)
                                        (declare (ignore i))
                                        (loop repeat 3
                                              always (slept-long-enough-p (random 0.03)))))))))

;;; SLEEP of a constant is compiled in another way than that of a variable. Prevents: a carrier that
;;; sleeps itself.
(test all-ways-to-sleep
  (with-group (group 1)
    (let ((sleepers (list (spawn (group) (sleep 3600))
                          (spawn (group) (sleep 3600.0))
                          (spawn (group) (sleep 3600.5d0))
                          (spawn (group) (sleep 7201/2))
                          (spawn (group)
                            (let ((seconds (+ 3600 (random 10))))
                              (declare (fixnum seconds))
                              (sleep seconds)))
                          (spawn (group) (sleep (parse-integer "3600")))
                          (spawn (group) (sleep (expt 10 30)))
                          (spawn (group) (fiber-sleep 3600))
                          (spawn (group) (sb-unix:nanosleep 3600 0))
                          (spawn (group) (sb-ext:wait-for nil :timeout 3600))
                          (spawn (group) (sb-sys:with-deadline (:seconds 3600) (sleep 3000)))
                          (spawn (group) (usocket:wait-for-input '() :timeout 3600)))))
      (is (= 3 (join (spawn (group) (+ 1 2)))))
      (is (= 3 (join (spawn (group) (sleep 1/1000) 3))))
      (mapc #'terminate-fiber (remove-if-not #'fiber-alive-p sleepers))
      (is (= 3 (join (spawn (group) (+ 1 2))))))))

(test sleep-of-nothing
  (on-carriers (n)
    (is (equal '(nil nil nil) (in-fiber (n) (list (sleep 0) (sleep 0.0) (sleep 1/1000000000)))))))

(test sleep-with-a-deadline
  (on-carriers (n)
    (is (equal '(:deadline :deadline nil :inner)
               (in-fiber (n)
                 (list (handler-case (sb-sys:with-deadline (:seconds 1/100) (sleep 3600))
                         (sb-sys:deadline-timeout () :deadline))
                       (let ((seconds 3600))
                         (handler-case (sb-sys:with-deadline (:seconds 1/100) (sleep seconds))
                           (sb-sys:deadline-timeout () :deadline)))
                       (sb-sys:with-deadline (:seconds 3600) (sleep 1/100))
                       (handler-case (sb-sys:with-deadline (:seconds 3600)
                                       (sb-sys:with-deadline (:seconds 1/100) (sleep 3600)))
                         (sb-sys:deadline-timeout () :inner))))))))

(test read-with-a-deadline
  (on-carriers (n)
    (with-pipe (in out)
      (is (eq :deadline (in-fiber (n)
                          (handler-case (sb-sys:with-deadline (:seconds 1/100) (read-line in))
                            (sb-sys:deadline-timeout () :deadline)))))
      (send-line out "line")
      (is (string= "line" (in-fiber (n) (read-line in)))))))

(defmacro timeout-p (&body body)
  `(handler-case (sb-ext:with-timeout 1/100 ,@body)
     (sb-ext:timeout () t)))

;;; Prevents: a time-out that unwinds another fiber than the one that set it, or ends the process.
(test with-timeout
  (on-carriers (n)
    (with-pipe (in out)
      (let ((mutex (sb-thread:make-mutex)))
        (sb-thread:with-mutex (mutex)
          (is (equal '(t t t t t t (:in-time))
                     (in-fiber (n)
                       (list (timeout-p (sleep 3600))
                             (timeout-p (fiber-park))
                             (timeout-p (loop (fiber-yield)))
                             (timeout-p (read-line in))
                             (timeout-p (sb-thread:with-mutex (mutex) nil))
                             (timeout-p (sb-thread:wait-on-semaphore (sb-thread:make-semaphore)))
                             (list (sb-ext:with-timeout 3600 (sleep 1/1000) :in-time)))))))))))

(test with-timeout-in-many
  (on-carriers (n)
    (is (equal (loop for i below 60 collect (if (evenp i) :timeout i))
               (in-fibers n 60
                          (lambda (i)
                            (let ((result i))
                              (loop repeat 3
                                    do (setf result
                                             (handler-case
                                                 (sb-ext:with-timeout (if (evenp i) 1/200 3600)
                                                   (if (evenp i) (sleep 3600) (sleep 1/200))
                                                   i)
                                               (sb-ext:timeout () :timeout))))
                              result)))))))

(test timers
  (on-carriers (n)
    (with-group (group n)
      (let* ((ran-in nil)
             (fiber (wait-until-parked (spawn (group) (catch 'woken (fiber-park)))))
             (timer (sb-ext:make-timer (lambda ()
                                         (setf ran-in (current-fiber))
                                         (throw 'woken :woken))
                                       :thread fiber)))
        (sb-ext:schedule-timer timer 1/100)
        (is (eq :woken (join fiber)))
        (is (eq fiber ran-in))))))
