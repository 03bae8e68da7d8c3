;;;; Making threads in fibers

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/zones.lisp" *load-truename*))

(def-suite* thread)

(defun call-while-it-waits (group function)
  "Call FUNCTION with a fiber that waits to make a thread; return what the fiber does then."
  (let ((fiber (sb-thread::with-system-mutex (sb-thread::*make-thread-lock*)
                 (let ((fiber (spawn (group) (join-thread (make-thread (lambda () :made))))))
                   (is-true (wait-until (eq sb-thread::*make-thread-lock*
                                            (sb-thread::thread-waiting-for fiber))))
                   (sleep 1/20)
                   (funcall function fiber)
                   fiber))))
    (join fiber)))

(test makes-threads
  (on-carriers (n)
    (is (equal (loop for i below 20 collect i)
               (in-fibers n 20 (lambda (i) (join-thread (make-thread (lambda () i)))))))))

;;; Prevents: a fiber that has been given the lock and waits for a turn behind fibers that are stuck,
;;; while the monitor waits for the lock to make a spare.
(test a-fiber-that-waits-to-make-a-thread-keeps-its-carrier
  (on-carriers (n)
    (with-group (group n)
      (is (eq :made (call-while-it-waits group (lambda (fiber)
                                                 (is (eq :running (fiber-state fiber))))))))))

(test a-fiber-that-makes-a-thread-keeps-its-carrier
  (on-carriers (n)
    (is (eq :native (in-fiber (n) (sb-fiber::call-with-make-thread-lock #'zone-here))))))

(test no-complaint-about-that-wait
  (let ((old *blocked-carrier-action*))
    (unwind-protect
         (with-group (group 1)
           (setf *blocked-carrier-action* :error)
           (is (eq :made (call-while-it-waits group #'identity))))
      (setf *blocked-carrier-action* old))))

;;; Prevents: a monitor that waits for a thread whose end waits for a fiber.
(test threads-whose-end-waits-for-a-fiber
  (with-stuck-carrier-time (1/100)
    (let* ((end (make-flag)) (go-on (make-flag)) (stop (make-flag)) (handling (make-flag))
           (thread (make-thread (lambda () (wait-until (flag-value end))))))
      (with-group (group 1)
        ;; It waits in a handler, with the lock of what the thread gives at its end.
        (let ((fiber (spawn (group)
                       (handler-case
                           (handler-bind ((sb-sys:deadline-timeout
                                            (lambda (condition)
                                              (declare (ignore condition))
                                              (raise-flag handling)
                                              (loop until (flag-value go-on) do (fiber-park)))))
                             (sb-sys:with-deadline (:seconds 1/10) (join-thread thread)))
                         (sb-sys:deadline-timeout () :deadline)))))
          (is-true (wait-until (and (flag-value handling) (eq :parked (fiber-state fiber)))))
          (raise-flag end)
          (is-true (wait-until (member thread sb-thread::*joinable-threads*)))
          (let ((stuck (loop repeat 3 collect (spawn (group) (compute-until stop)))))
            (is (eq :runs (fiber-join (spawn (group) :runs) :default nil :timeout *patience*)))
            (raise-flag go-on)
            (fiber-unpark fiber)
            (is (eq :deadline (join fiber)))
            (raise-flag stop)
            (join-all stuck)))))))
