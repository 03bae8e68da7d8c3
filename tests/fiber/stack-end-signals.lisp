;;;; Signals where the stack has no room for them

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/stack-ends.lisp" *load-truename*))

(def-suite* stack-end-signals)

(defun call-with-handler (signal default function)
  "Call FUNCTION with a function that tells how often SIGNAL has been handled; DEFAULT handles it
afterwards."
  (let ((handled (make-flag)))
    (sb-sys:enable-interrupt signal (lambda (&rest ignore)
                                      (declare (ignore ignore))
                                      (count-one handled)))
    (unwind-protect (funcall function (lambda () (flag-count handled)))
      (sb-sys:enable-interrupt signal default))))

(defun enable-profiler ()
  "Let SIGPROF be counted as by SB-SPROF."
  (sb-alien:alien-funcall
   (sb-alien:extern-alien "install_handler" (function sb-alien:void sb-alien:int sb-alien:long))
   sb-unix:sigprof -1)
  (setf (sb-alien:extern-alien "sb_sprof_trace_ct_max" sb-alien:int) 100000))

;;; Signals open the reserve for their handlers. Prevents: that they open all of it ahead of a fiber
;;; that overflows, which is then never notified, and the process ends.
(defun recurse-and-raise (signal)
  (declare (notinline recurse-and-raise))
  (let ((bytes (make-array 3000 :element-type '(unsigned-byte 8))))
    (declare (dynamic-extent bytes))
    (sb-unix:raise signal)
    (setf (aref bytes 0) 1)
    (recurse-and-raise signal)
    (keep bytes)))

(test signals-while-it-overflows
  (call-with-handler
   sb-unix:sighup :default
   (lambda (count)
     (on-carriers (n :counts '(1 2))
       (with-group (group n)
         (dotimes (i 5)
           (is (eq :notified (join (spawn (group)
                                     (handler-case (recurse-and-raise sb-unix:sighup)
                                       (sb-kernel::control-stack-exhausted () :notified))))))))
       (is (< 50 (funcall count)))))))

;;; Prevents: a fiber that is unwound out of the midst of a park.
(defun unwound-by (signal distance)
  "Has SIGNAL unwound this fiber with interrupts off, where there was room for RAISE?"
  (let ((raising nil) (went-on nil))
    (handler-case (call-at-distance distance
                                    (lambda ()
                                      (sb-sys:without-interrupts
                                        (sb-fiber::%touch (sb-sys:int-sap (- (stack-pointer) 1000)))
                                        (setf raising t)
                                        (sb-unix:raise signal)
                                        (setf went-on t))))
      (storage-condition ()))
    (and raising (not went-on))))

(test no-signal-unwinds-with-interrupts-off
  (enable-profiler)
  (call-with-handler
   sb-unix:sighup :default
   (lambda (count)
     (dolist (signal (list sb-unix:sighup sb-unix:sigprof))
       (is (null (in-fiber ()
                   (loop for distance from 6000 downto 0 by 16
                         when (unwound-by signal distance) collect distance)))))
     (is (< 100 (funcall count))))))

(defun lost-at (raise count-handled)
  "Call RAISE, which sends a signal to this thread, at the end of the stack, at each distance.
Return how often, or where the signal was lost."
  (let ((n 0))
    (loop for distance from 14000 downto 0 by 61
          do (let ((before (funcall count-handled)) (raised nil))
               (handler-case (call-at-distance distance (lambda ()
                                                          (setf raised t)
                                                          (funcall raise)))
                 (storage-condition ()))
               (when raised
                 (incf n)
                 (unless (sb-ext:wait-for (> (funcall count-handled) before) :timeout 5)
                   (return (list :lost-at distance)))))
          finally (return n))))

;;; In the handler of an overflow; each report may have some more of the reserve.
(defun call-in-the-reserve (depth function)
  "Call FUNCTION where about DEPTH bytes of the reserve are used."
  (sb-fiber::make-room-to-report)
  (let ((next (- (+ (control-base) 30000) (stack-pointer))))
    (if (>= next depth)
        (call-at-distance (- depth) function)
        (call-at-distance (- next) (lambda () (call-in-the-reserve depth function))))))

;;; A signal may open more of the reserve than a report may have, and that is closed for the report.
;;; Prevents: a guard that is raised over the frame of the function that raises it, which ends the
;;; fiber without cleanups, or the process.
(test reports-after-signals-at-the-end-of-the-stack
  (flet ((report-below (depth distance)
           (flet ((raise-and-report ()
                    (sb-unix:raise sb-unix:sighup)
                    (call-at-distance (- distance depth) #'sb-fiber::make-room-to-report)))
             (if (= depth 0)
                 (call-at-distance 4000 #'raise-and-report)
                 (block nil
                   (handler-bind ((storage-condition
                                    (lambda (condition)
                                      (keep condition)
                                      (call-in-the-reserve (- depth 4000) #'raise-and-report)
                                      (return))))
                     (recurse-with-frames 10)))))
           distance))
    (call-with-handler
     sb-unix:sighup :default
     (lambda (count)
       (with-group (group 1)
         (dolist (depth (list 0 (* 1/2 (sb-alien:extern-alien "fiber_control_reserve"
                                                              sb-alien:unsigned))))
           (loop for distance from 600 downto -200 by 8
                 do (let ((distance distance))
                      (is (eql distance (join (spawn (group) (report-below depth distance)))))))))
       (is (<= 202 (funcall count)))))))

;;; The kernel drops a signal for whose frame there is no room. Prevents: a server that does not end
;;; by SIGTERM.
(test signals-at-the-end-of-the-stack
  (loop for (signal default) in `((,sb-unix:sigterm ,#'sb-unix::sigterm-handler)
                                  (,sb-unix:sigint ,#'sb-unix::sigint-handler)
                                  (,sb-unix:sighup :default))
        do (on-carriers (n :counts '(1 2) :migration '(nil))
             (let ((result (call-with-handler
                            signal default
                            (lambda (count)
                              (in-fiber (n) (lost-at (lambda () (sb-unix:raise signal)) count))))))
               (is (typep result '(integer 100)) "Signal ~D: ~S" signal result)))))

(test samples-at-the-end-of-the-stack
  (enable-profiler)
  (is (typep (in-fiber ()
               (lost-at (lambda ()
                          (setf sb-thread::*sprof-enable* 1) ; of this thread
                          (sb-unix:raise sb-unix:sigprof))
                        (lambda () (sb-alien:extern-alien "sb_sprof_trace_ct" sb-alien:int))))
             '(integer 100))))

;;; Prevents: a signal that comes while another is deferred, since the stack ended in a handler:
;;; then the process ends.
(test storms-of-interruptions-at-the-end-of-the-stack
  (with-group (group 1)
    (let* ((stop (make-flag)) (called (make-flag)) (senders-done (make-flag))
           (fiber (spawn (group)
                    (loop until (flag-value senders-done)
                          do (loop for distance from 7900 downto 2000 by 100
                                   do (handler-case
                                          (call-at-distance distance
                                                            (lambda ()
                                                              (dotimes (i 200000) (keep i))))
                                        (storage-condition ())))
                          finally (return t))))
           (senders (loop repeat 2
                          collect (make-thread
                                   (lambda ()
                                     (loop until (flag-value stop)
                                           do (interrupt-fiber fiber (lambda () (count-one called)))
                                              (sleep 1/5000)))))))
      (sleep 3)
      (raise-flag stop)
      (mapc #'join-thread senders)
      (raise-flag senders-done)
      (is (eq t (fiber-join fiber :default nil :timeout *patience*)))
      (is (plusp (flag-count called))))))

;;; All of this again.
(unless *guard-method*
  (test guard-methods
    (check-with-guard-methods "stack-end-signals")))
