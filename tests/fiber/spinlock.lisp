;;;; the spin lock: fiber/spinlock.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* spinlock)

;;; Two words that are only equal when nobody is inside
(defstruct twins
  (lock 0 :type sb-ext:word)
  (first 0 :type fixnum)
  (second 0 :type fixnum))

(defun step-twins (twins)
  "Step both; return true if they were equal."
  (sb-fiber::with-tiny-lock ((twins-lock twins))
    (let ((equal (= (twins-first twins) (twins-second twins))))
      (setf (twins-first twins) (1+ (twins-first twins)))
      ;; long enough to be interrupted in
      (dotimes (i 20) (sb-ext:spin-loop-hint))
      (setf (twins-second twins) (1+ (twins-second twins)))
      equal)))

(defun step-until (stopp step)
  "Call STEP until STOPP returns true. Return how often, or :BROKEN if it returned false."
  (loop until (funcall stopp)
        unless (funcall step) return :broken
        count t))

(defun call-with-steppers (function n step)
  "Call FUNCTION, with a list of N threads, while these call STEP. Return how often they did."
  (let* ((stop nil)
         (threads (loop repeat n
                        collect (sb-thread:make-thread
                                 (lambda () (step-until (lambda () stop) step))))))
    (funcall function threads)
    (setf stop t)
    (reduce #'+ (mapcar #'join-stepper threads))))

;;; A lock that is never released would have us wait for ever.
(defun join-stepper (thread)
  (let ((result (sb-thread:join-thread thread :timeout *patience* :default :hangs)))
    (if (integerp result) result (error "A thread ~(~A~)." result))))

(defun wait-for-steps (twins n)
  (let ((end (+ n (twins-first twins)))
        (deadline (+ (get-universal-time) *patience*)))
    (loop until (>= (twins-first twins) end)
          do (when (> (get-universal-time) deadline) (error "The threads hang."))
             (sb-thread:thread-yield))))

(defun twins-problem (twins n)
  (cond ((/= 0 (twins-lock twins)) "The lock was not released.")
        ((/= n (twins-first twins)) (format nil "~D steps, not ~D." (twins-first twins) n))
        ((/= n (twins-second twins)) (format nil "~D steps, not ~D." (twins-second twins) n))))

(test one-value
  (let ((twins (make-twins)))
    (is (eq :value (sb-fiber::with-tiny-lock ((twins-lock twins)) :value)))
    (is (= 0 (twins-lock twins)))))

(test exclusion
  (let* ((twins (make-twins))
         (n (call-with-steppers (lambda (threads)
                                  (declare (ignore threads))
                                  (wait-for-steps twins 200000))
                                4 (lambda () (step-twins twins)))))
    (is (null (twins-problem twins n)))))

;;; Prevents: a holder that the collector stops while others spin for the lock where they cannot be
;;; stopped, so that they do it for ever.
(test collections
  (let* ((twins (make-twins))
         (n (call-with-steppers
             (lambda (threads)
               (declare (ignore threads))
               (loop repeat 100
                     do (sb-ext:gc)
                        (wait-for-steps twins 100)))
             3 (lambda ()
                 (if (= 0 (random 2))
                     (step-twins twins)
                     (sb-sys:without-gcing (step-twins twins)))))))
    (is (null (twins-problem twins n)))))

;;; Prevents: a handler that spins for the lock that the code under it holds.
(test handlers-that-take-the-lock
  (let* ((twins (make-twins))
         (in-handlers 0)
         (n (call-with-steppers
             (lambda (threads)
               (loop repeat 2000
                     do (sb-thread:interrupt-thread (first threads)
                                                    (lambda ()
                                                      (when (step-twins twins)
                                                        (incf in-handlers))))
                        (wait-for-steps twins 10)))
             2 (lambda () (step-twins twins)))))
    (is (plusp in-handlers))
    (is (null (twins-problem twins (+ n in-handlers))))))
