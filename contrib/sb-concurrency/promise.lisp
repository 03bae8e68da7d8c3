;;;; promises: results that somebody will have

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-CONCURRENCY")

;;; Who waits for a promise waits to receive from its channel, to which nothing is ever sent: it is
;;; closed when there is an outcome. So whatever can be done with a channel can be done with a
;;; promise, and what is true of how a channel wakes is true here.
;;;
;;;     OUTCOME                         move by
;;;     NIL      -> :KEPT, :BROKEN      the first that calls FULFIL or BREAK-PROMISE, with
;;;                                     interrupts off: then it writes RESULT, and closes the
;;;                                     channel

(defstruct (promise (:constructor %make-promise (name)) (:copier nil) (:predicate promisep))
  "A result that somebody will have. Made by MAKE-PROMISE."
  (name nil :type (or null string))
  (channel (make-channel) :type channel :read-only t)
  (outcome nil :type symbol)
  (result nil))
(declaim (freeze-type promise))

(setf (documentation 'promisep 'function)
      "Return true if OBJECT is a PROMISE."
      (documentation 'promise-name 'function)
      "The name of the promise INSTANCE, a string or NIL. SETFable.")

(defun make-promise (&key name)
  "Return a new promise. NAME is a string designator, or NIL, to be shown where it is printed."
  (%make-promise (and name (string name))))

(defun promise-state (promise)
  "Return :PENDING, or :FULFILLED or :BROKEN once PROMISE is."
  (if (channel-closed-p (promise-channel promise))
      (if (eq (promise-outcome promise) :kept) :fulfilled :broken)
      :pending))

(defmethod print-object ((promise promise) stream)
  (print-unreadable-object (promise stream :type t :identity t)
    (format stream "~@[~A ~]~(~A~)" (promise-name promise) (promise-state promise))))

(defun end-promise (promise outcome result)
  (without-interrupts
    (when (null (cas (promise-outcome promise) nil outcome))
      (setf (promise-result promise) result)
      (close-channel (promise-channel promise))
      t)))

(defun fulfil (promise &rest values)
  "Let the values of PROMISE be VALUES, for all that wait for it, or will. Return false if it was
fulfilled or broken before; then this does nothing."
  (end-promise promise :kept values))

(defun break-promise (promise condition)
  "Let CONDITION, a condition, be signalled by ERROR where PROMISE is waited for, or will be. Return
false if it was fulfilled or broken before; then this does nothing."
  (check-type condition condition)
  (end-promise promise :broken condition))

(defun promise-operation (promise)
  "Return the operation that waits until PROMISE is fulfilled, and returns its values; or until it
is broken, and signals why."
  (wrap (receive-operation (promise-channel promise))
        (lambda (value received-p state)
          (declare (ignore value received-p state))
          (if (eq (promise-outcome promise) :kept)
              (values-list (promise-result promise))
              (error (promise-result promise))))))

(defun await (promise &key timeout)
  "Wait until PROMISE is fulfilled, and return its values. Return NIL, NIL and :TIMEOUT if TIMEOUT
seconds, a non-negative real or NIL, are over before. Signals the condition with which it was
broken, and SB-SYS:DEADLINE-TIMEOUT."
  (perform (promise-operation promise) :timeout timeout))

#+sb-fiber
(defun end-by (promise function thread)
  "Fulfil PROMISE with the values of FUNCTION, or break it with the error that it signals; if it is
unwound, with what tells that THREAD was aborted. With interrupts off."
  (unwind-protect
       (handler-case (multiple-value-call #'fulfil promise (with-interrupts (funcall function)))
         (error (condition) (break-promise promise condition)))
    ;; If it is unwound; else this does nothing.
    (break-promise promise (make-condition 'sb-thread:join-thread-error
                                           :thread thread :problem :abort))))

#+sb-fiber
(defun submit-for (promise group function &key name thread)
  "Let a fiber of GROUP, which is returned, do END-BY. THREAD may be NIL for that fiber."
  (sb-fiber::submit-deaf
   group
   (sb-fiber:make-fiber
    (lambda ()
      (end-by promise
              (lambda ()
                ;; A descriptor may be another's by now.
                (sb-fiber::see-cancellation (sb-fiber:current-fiber))
                (funcall function))
              (or thread *current-thread*)))
    :name name)))

#+sb-fiber
(defun fiber-promise (fiber)
  "Return a promise that is fulfilled with the values of FIBER, which was submitted, when that has
ended, or broken with what SB-FIBER:FIBER-JOIN signals: so SELECT can wait for the end of fibers.
Another fiber of the same group waits for it. Signals what SB-FIBER:SUBMIT-FIBER signals."
  (let ((promise (make-promise :name (sb-fiber:fiber-name fiber)))
        (group (sb-fiber:fiber-group fiber)))
    (flet ((join () (sb-fiber:fiber-join fiber)))
      (if group
          (submit-for promise group #'join :thread fiber)
          (handler-case (multiple-value-call #'fulfil promise (join))
            (sb-thread:join-thread-error (condition) (break-promise promise condition))))
      promise)))
