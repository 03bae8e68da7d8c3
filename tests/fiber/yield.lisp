;;;; Yielding, and what a fiber may do before it must: fiber/yield.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/descriptors.lisp" *load-truename*))

(def-suite* yield)

;;; More runnable fibers than a queue holds. Prevents: those in the queue keeping out those behind
;;; it.
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

;;; The bound that the head of fiber.lisp gives: on one carrier, N that yield come round within
;;; 2 * N + 256 turns.
(test turns-are-even
  (dolist (n (list 2 200 256 257 600 3000 sb-fiber::long-run-queue-capacity
                   (+ sb-fiber::long-run-queue-capacity 1000)))
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

;;; Fibers that only yield must not keep out timers and descriptors.
(test sleepers-among-yielders
  (on-carriers (n)
    (with-group (group n)
      (let* ((done nil)
             (yielders (loop repeat 400
                             collect (spawn (group) (loop until done do (fiber-yield)) t)))
             (sleepers (loop repeat 10
                             collect (spawn (group) (loop repeat 3 do (sleep 1/1000)) t))))
        (is (all-true-p (join-all sleepers)))
        (setf done t)
        (is (all-true-p (join-all yielders)))))))

;;; A loop that waits for no time lets the others run, as it does in a thread. The monitor would
;;; help them.
(test waiting-for-no-time-lets-others-run
  (with-group-of-same-carriers (group 1)
    (let ((semaphore (make-semaphore))
          (sleeper (spawn (group) (fiber-park))))
      (dolist (wait (list (lambda () (sleep 0))
                          (lambda () (sleep 1d-9))
                          (lambda () (fiber-park :timeout 0))
                          (lambda () (fiber-join sleeper :timeout 0 :default nil))
                          (lambda () (sb-sys:serve-all-events 0))
                          (lambda () (wait-on-semaphore semaphore :timeout 1/1000000))))
        (let* ((other nil)
               (first (spawn (group) (fiber-yield)
                        (loop repeat 100000 until other do (funcall wait)
                              finally (return other)))))
          (spawn (group) (setf other t))
          (is (eq t (join first)))))
      (fiber-unpark sleeper))))

;;;; Last, since a failure leaves a carrier that spins

;;; Prevents: a fiber that asks again and again whether there is input, and keeps its carrier from
;;; the fiber that would provide it.
(test polling-lets-others-run
  (let ((*patience* 10))
    (dolist (poll (list #'listen
                        (lambda (in)
                          (sb-sys:wait-until-fd-usable (sb-sys:fd-stream-fd in) :input 0 nil))))
      (with-pipe (in out)
        (is (equal '(#\x nil)
                   (in-fibers 1 2 (lambda (i)
                                    (cond ((= i 0) (loop until (funcall poll in)) (read-char in))
                                          (t (write-char #\x out) (finish-output out)))))))))))
