;;;; the first and last moments of a fiber

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

(define-structure-slot-addressor fiber-flags-address :structure fiber :slot flags)

;;; The catch tags are those of a thread, see RUN in target-thread.lisp; 'FIBER-LOST is where
;;; a fiber without any stack left is cut back to.
(defun %run-fiber ()
  (after-switch)
  (end-scheduling (truly-the carrier *carrier*))
  (let ((fiber (truly-the fiber *current-thread*)))
    (catch 'fiber-lost
      (setf (context-word (context-of fiber) base-catch-block)
            (get-lisp-obj-address sb-vm:*current-catch-block*))
      ;; CATCH-RUNAWAY-UNWIND takes the end of the chain of cleanups for the end of the
      ;; stack: the catch tags of the fiber must lie within one.
      (unwind-protect (call-fiber-function fiber)
        (setq *interrupts-enabled* nil)))
    ;; Also if the stack was lost on the way: others wait for the end that this fiber has begun.
    (when *exit-in-progress* (exit-by-thread))
    (when (eq (fiber-failure fiber) t)
      (report-loss fiber)
      (end-scopes-of-lost-stack fiber))
    (end-fiber fiber)))

(defun report-loss (fiber)
  (setf (fiber-failure fiber) (make-condition 'fiber-stack-lost :fiber fiber))
  (reported-p (lambda () (format *error-output* "~&~A~%" (fiber-failure fiber)))))

(declaim (inline begins-deaf-p))
(defun begins-deaf-p (fiber)
  (logtest +begins-deaf+ (fiber-flags fiber)))

(defun call-fiber-function (fiber)
  (catch 'sb-impl::toplevel-catcher
    (catch 'sb-impl::%end-of-the-world
      (catch 'sb-thread::%abort-thread
        (restart-bind ((abort (lambda () (throw 'sb-thread::%abort-thread nil))
                         :report-function
                         (lambda (stream) (format stream "~@<abort fiber (~a)~@:>" fiber)))
                       (abort-all #'abort-all-in-debugger
                         :report-function #'report-abort-all
                         :test-function (lambda (condition)
                                          (declare (ignore condition))
                                          (others-in-debugger))))
          ;; Bound inside of all tags: an interruption that came between the end of a tag and a
          ;; SETQ would throw to a tag that is no more.
          (let ((*interrupts-enabled* (not (begins-deaf-p fiber))))
            (when (and *interrupt-pending* *interrupts-enabled*)
              (sb-unix::receive-pending-interrupt))
            (setf (fiber-result fiber)
                  (multiple-value-list
                   (catch 'sb-thread::%return-from-thread
                     (sb-c::inspect-unwinding
                      (call-with-initial-bindings fiber)
                      #'sb-di::catch-runaway-unwind))))))))))

(defun call-with-initial-bindings (fiber)
  (let ((function (the function (fiber-function fiber)))
        (bindings (fiber-initial-bindings fiber)))
    (setf (fiber-start fiber) (fiber-child fiber))
    (see-interruptions fiber)
    (unless (begins-deaf-p fiber) (see-cancellation fiber))
    (if bindings
        (progv (mapcar #'car bindings) (mapcar #'cdr bindings)
          (funcall function))
        (funcall function))))

;;; Once the fiber is dead, it may be joined and forgotten, while it still runs here: what
;;; comes after concerns only the carrier and the stack.
(defun end-fiber (fiber)
  (declare (notinline leave))
  (let ((group (truly-the fiber-group (fiber-group fiber)))
        (child (and (child-scope-of fiber) (fiber-child fiber))))
    ;; No interruption or error in here: there is nothing left to which it could unwind.
    (setf (fiber-start fiber) nil)
    (leave-session fiber)
    (when child (without-interrupts (report-to-scope child fiber)))
    (set-home fiber nil)
    (declare-dead fiber)
    (when child (end-child child))
    (leave-group group)
    (leave :end)
    (bug "A fiber was resumed after its end.")))

(defun declare-dead (fiber)
  (setf (fiber-start fiber) nil
        (fiber-interruptions fiber) nil
        (sb-thread::thread-waiting-for fiber) nil)
  (forget-surroundings fiber)
  (loop (let ((phase (fiber-phase fiber)))
          (when (phase-becomes-p fiber phase +dead+) (return))))
  (setf (fiber-interruptions fiber) nil) ; some may have come before that
  ;; A thread that has joined it must not find it among the living.
  (unless (= (fiber-context fiber) 0) (retire-index fiber))
  (set-fiber-flag fiber +ended+)
  (with-pinned-objects (fiber)
    (wake-on-word (fiber-flags-address fiber) (ash 1 29))))

;;; So a program that keeps a fiber that has ended, for its values, keeps nothing else. Other
;;; threads may look at FIBER still: they must not count on its having a group.
(defun forget-surroundings (fiber)
  (setf (fiber-group fiber) nil
        (fiber-home fiber) nil
        (fiber-last-carrier fiber) nil
        (fiber-heap fiber) nil
        (fiber-next fiber) nil
        (fiber-wait-next fiber) nil
        (fiber-wait-previous fiber) nil
        (fiber-wait-word fiber) nil
        (fiber-wait-reason fiber) nil))
