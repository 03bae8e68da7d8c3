;;;; Forced migration: that each fiber is resumed by another carrier than the one it left

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* migration)

(defmacro with-forced-migration (&body body)
  `(call-on-carriers (lambda (n) (declare (ignore n)) ,@body) '(2) '(t)))

;;; A carrier, that is, an OS thread: its scheduler may be served by another one.
(declaim (notinline my-carrier))
(defun my-carrier ()
  sb-fiber::*carrier*)

(defmacro moved-p (&body body)
  "Has BODY, which parks once, brought this fiber to another carrier?"
  `(let ((before (my-carrier)))
     ,@body
     (not (eq before (my-carrier)))))

(defun stays (n-carriers n-fibers function)
  "Call FUNCTION in N-FIBERS fibers, each with a number, 100 times. Return how often it returned
false."
  (reduce #'+ (in-fibers n-carriers n-fibers
                         (lambda (i)
                           (loop repeat 100 count (not (funcall function i)))))))

;;; One fiber, which finds only itself in the injector; as many as there are carriers; many.
(test yielding-fibers-move
  (dolist (n '(2 16))
    (dolist (n-fibers (list 1 n 200))
      (with-forced-migration
        (is (= 0 (stays n n-fibers (lambda (i)
                                     (declare (ignore i))
                                     (moved-p (fiber-yield))))))))))

(test sleeping-fibers-move
  (dolist (n '(2 16))
    (dolist (n-fibers '(1 50))
      (with-forced-migration
        (is (= 0 (stays n n-fibers (lambda (i) (moved-p (sleep (/ (1+ (mod i 3)) 10000)))))))))))

;;; A fiber that finds a permit, or takes a lock at once, does not park, and stays. But one that
;;; leaves a carrier notes it.
(defun elsewhere-p ()
  (not (eq (my-carrier) (sb-fiber::fiber-last-carrier (current-fiber)))))

(test unparked-fibers-move
  (dolist (n '(2 16))
    (with-forced-migration
      (with-group (group n)
        (let* ((ended nil)
               (fibers (loop repeat 10
                             collect (spawn (group)
                                       (loop repeat 100
                                             count (progn (fiber-park) (not (elsewhere-p)))))))
               (wakers (list (spawn (group)
                               (loop until ended do (mapc #'fiber-unpark fibers) (fiber-yield)))
                             (sb-thread:make-thread
                              (lambda ()
                                (loop until ended do (mapc #'fiber-unpark fibers)))))))
          (is (= 0 (reduce #'+ (join-all fibers))))
          (setf ended t)
          (join (first wakers))
          (sb-thread:join-thread (second wakers)))))))

(defun lock-and-look (lock)
  (sb-thread:with-mutex (lock)
    (and (elsewhere-p)
         (progn (fiber-yield) (elsewhere-p)))))

(defun read-and-look (in out)
  (and (loop for i below 100
             always (progn (write-byte i out)
                           (finish-output out)
                           (and (= i (read-byte in)) (elsewhere-p))))
       :moved))

(test fibers-that-wait-for-locks-move
  (dolist (n '(2 16))
    (with-forced-migration
      (let ((lock (sb-thread:make-mutex)))
        (is (= 0 (stays n 20 (lambda (i) (declare (ignore i)) (lock-and-look lock)))))))))

(defun pipe-streams ()
  (multiple-value-bind (in out) (sb-unix:unix-pipe)
    (flet ((stream (fd &rest arguments)
             (apply #'sb-sys:make-fd-stream fd :element-type '(unsigned-byte 8) arguments)))
      (list (stream in :input t) (stream out :output t)))))

(test fibers-that-read-move
  (dolist (n '(2 16))
    (with-forced-migration
      (let ((there (pipe-streams))
            (back (pipe-streams)))
        (unwind-protect
             (is (equal '(:moved :moved)
                        (in-fibers n 2 (lambda (i)
                                         (if (= i 0)
                                             (read-and-look (first back) (second there))
                                             (read-and-look (first there) (second back)))))))
          (mapc #'close (append there back)))))))

(test pinned-fibers-stay
  (dolist (n '(2 16))
    (with-forced-migration
      (is (= 2000 (stays n 20 (lambda (i)
                                (declare (ignore i))
                                (moved-p (with-fiber-pinned (fiber-yield))))))))))

;;; A fiber whose only other carrier computes waits for that one; with a third, it must not.
(test a-busy-carrier-keeps-nobody-waiting
  (with-forced-migration
    (with-group (group 3)
      (let* ((done nil)
             (busy (spawn (group) (loop until done do (sb-ext:spin-loop-hint)))))
        (unwind-protect
             (is (= 0 (join (spawn (group)
                              (loop repeat 100 count (not (moved-p (fiber-yield))))))))
          (setf done t))
        (join busy)))))

(test one-carrier-goes-on
  (with-forced-migration
    (is (= 1000 (stays 1 10 (lambda (i) (declare (ignore i)) (moved-p (fiber-yield))))))))

(test the-environment-forces-migration
  (let ((form '(let ((fiber (make-fiber
                             (lambda ()
                               (loop repeat 100
                                     count (let ((before sb-fiber::*carrier*))
                                             (fiber-yield)
                                             (eq before sb-fiber::*carrier*)))))))
                (print (first (run-fibers fiber :carrier-count 2))))))
    (is (string= "0" (child-result form :environment '("SB_FIBER_FORCE_MIGRATION=1"))))
    (is (string/= "0" (child-result form :environment '("SB_FIBER_FORCE_MIGRATION=0"))))))
