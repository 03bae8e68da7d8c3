;;;; Foreign code that holds a lock: interruptions, time-outs and collections at random

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/foreign-library.lisp" *load-truename*))

(def-suite* foreign-random)

(defun work-in-foreign-code (i)
  (ecase (mod i 6)
    (0 (foreign-sleep (random 100)))
    (1 (foreign-compute (random 100)))
    (2 (call-in-callback (lambda (j) (declare (ignore j)) (fiber-yield))))
    (3 (call-in-callback (lambda (j) (declare (ignore j)) (sleep 1/10000))))
    (4 (call-blocking (lambda () (foreign-compute (random 100)))))
    (5 (fiber-yield) (foreign-compute 1))))

;;; An interruption that waits is interrupted itself: those that come faster than a busy machine
;;; runs them would use up the stack.
(defvar *nested* 0)

(defun wait-in-interruption ()
  (ecase (random 5)
    (0 (foreign-compute 10))
    (1 (fiber-yield))
    (2 (sleep 1/10000))
    (3 (sb-sys:with-interrupts (foreign-sleep 10) (fiber-yield)))
    (4 (call-in-callback (lambda (j) (declare (ignore j)) (fiber-yield))))))

(defun what-is-interrupted (fiber ran)
  "A function for FIBER to call, which does what must not be done where a lock of foreign code is
held."
  (lambda ()
    (unless (eq fiber (current-fiber)) (error "in the wrong fiber"))
    (count-one ran)
    (let ((*nested* (1+ *nested*)))
      (when (< *nested* 20) (wait-in-interruption)))))

(defun call-in-a-storm (fibers function)
  "Call FUNCTION with one of FIBERS after the other, until all have ended."
  (let ((threads (loop repeat 2
                       collect (make-thread
                                (lambda ()
                                  (loop while (some #'fiber-alive-p fibers)
                                        do (handler-case
                                               (funcall function
                                                        (elt fibers (random (length fibers))))
                                             (sb-thread:interrupt-thread-error () nil))
                                           (sleep (/ (random 200) 1000000))))))))
    (mapc #'join-thread threads)))

(test interruptions-of-foreign-code-at-random
  (on-carriers (n)
    (no-mistakes
      (let ((ran (make-flag)))
        (with-group (group n)
          (let ((fibers (loop for i below 20
                              collect (let ((i i))
                                        (spawn (group)
                                          (dotimes (j 40 t) (work-in-foreign-code (+ i j))))))))
            (call-in-a-storm fibers (lambda (fiber)
                                      (interrupt-fiber fiber (what-is-interrupted fiber ran))))
            (is (all-true-p (join-all fibers)))))
        (is (plusp (flag-count ran)))))))

(test time-outs-of-foreign-code-at-random
  (on-carriers (n)
    (no-mistakes
      (let ((timed-out (make-flag)) (calls (foreign-calls)))
        (is (all-true-p
             (in-fibers n 40
                        (lambda (i)
                          (dotimes (j 40 t)
                            (handler-case
                                (handler-case
                                    (sb-ext:with-timeout (/ (1+ (random 20)) 10000)
                                      (sb-sys:with-deadline (:seconds (/ (1+ (random 20)) 10000))
                                        (loop (work-in-foreign-code (+ i j)))))
                                  ((or sb-ext:timeout sb-sys:deadline-timeout) ()
                                    (count-one timed-out)))
                              ;; while the other was being signalled
                              (sb-ext:timeout () (count-one timed-out))))))))
        (is (= (* 40 40) (flag-count timed-out)))
        (is (< calls (foreign-calls)))))))

(test terminations-of-foreign-code-at-random
  (on-carriers (n)
    (no-mistakes
      (dotimes (round 5)
        (with-group (group n)
          (let ((fibers (loop for i below 30
                              collect (let ((i i))
                                        (spawn (group)
                                          (loop for j from i do (work-in-foreign-code j)))))))
            (sleep (/ (random 10) 1000))
            (dolist (fiber fibers)
              (loop repeat (random 1000) do (sb-ext:spin-loop-hint))
              (terminate-fiber fiber))
            (is (every (lambda (fiber) (eq :abort (wait-for-end fiber))) fibers)))))
      ;; What they have abandoned comes to its end.
      (is-true (wait-until (= (sb-fiber::blocking-pool-idle sb-fiber::*blocking-pool*)
                              (length (sb-fiber::blocking-pool-threads
                                       sb-fiber::*blocking-pool*))))))))

(test foreign-code-and-collections
  (no-mistakes
    (let* ((stop (make-flag)) (ran (make-flag))
           (collector (make-thread (lambda ()
                                     ;; The kernel counts a sleep from anew, with its slack, after
                                     ;; each collection: back to back they would not let others'
                                     ;; end.
                                     (loop until (flag-value stop)
                                           do (sb-ext:gc :gen (random 2))
                                              (sleep 1/100))))))
      (unwind-protect
           (with-group (group 2)
             (let ((fibers (loop for i below 10
                                 collect (let ((i i))
                                           (spawn (group)
                                             (dotimes (j 40 t)
                                               (make-list 1000)
                                               (work-in-foreign-code (+ i j))))))))
               (call-in-a-storm fibers (lambda (fiber)
                                         (interrupt-fiber fiber (what-is-interrupted fiber ran))))
               (is (all-true-p (join-all fibers)))))
        (raise-flag stop)
        (join-thread collector)))))
