;;;; what is made of scopes: calls in parallel, races, periodic work

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; All of this could be a user's.

(declaim (ftype (sfunction ((or symbol function) sequence &key (:limit t)) list) parallel-map))
(defun parallel-map (function sequence &key limit)
  "Call FUNCTION, a function or the name of one, with each element of SEQUENCE, each time in a fiber
of its own, at most LIMIT at a time, a positive integer or NIL. Return a list of the values, in the
order of SEQUENCE. If a call fails the others are cancelled, and SCOPE-FAILED is signalled."
  (with-fibers (scope :limit limit :name "PARALLEL-MAP")
    (let ((fibers (map 'list
                       (lambda (element) (spawn scope function :arguments (list element)))
                       sequence)))
      (mapcar (lambda (fiber) (values (fiber-join fiber))) fibers))))

(defmacro parallel-do ((variable sequence &key limit) &body body)
  "Execute BODY with VARIABLE bound to each element of SEQUENCE, each time in a fiber of its own, at
most LIMIT at a time, a positive integer or NIL. Return NIL when all are done. If one fails the
others are cancelled, and SCOPE-FAILED is signalled."
  (with-unique-names (scope)
    `(with-fibers (,scope :limit ,limit :name "PARALLEL-DO")
       (map nil (lambda (,variable) (spawn ,scope (lambda () ,@body))) ,sequence))))

(defun call-racers (functions on-failure)
  "Call FUNCTIONS at a time. Return the values of the first that returns, when the others, which are
cancelled then, have ended."
  (let ((functions (mapcar #'fiber-function-argument functions))
        (winner (list nil)))
    (flet ((call (scope function)
             (declare (function function))
             (let ((values (multiple-value-list (funcall function))))
               (unless (cas (car winner) nil (list values))
                 (cancel-scope scope))))
           (leave-losers (condition)
             (when (car winner)
               (when (eq on-failure :cancel) (report-lost-failures (failed-scope condition)))
               (return-from call-racers (values-list (caar winner))))))
      (handler-bind ((scope-failed #'leave-losers))
        (with-fibers (scope :on-failure on-failure :name "RACE")
          (dolist (function functions)
            (spawn scope #'call :arguments (list scope function)))))
      (unless (or (car winner) (null functions))
        (error "~@<None of the fibers that ran ~S has returned.~:@>" functions))
      (values-list (caar winner)))))

(declaim (ftype (sfunction (&rest (or symbol function)) *) race first-success))
(defun race (&rest functions)
  "Call FUNCTIONS, functions without arguments or names of such, at a time, each in a fiber of its
own. When the first has returned the others are cancelled, and when these have ended its values are
returned. If one fails before, the others are cancelled, and SCOPE-FAILED is signalled. Of no
FUNCTIONS the values are none."
  (call-racers functions :cancel))

(defun first-success (&rest functions)
  "As RACE, but one of FUNCTIONS that fails is left behind. SCOPE-FAILED is signalled if all fail."
  (call-racers functions :collect))

(defmacro periodically ((seconds) &body body)
  "Execute BODY every SECONDS, a positive real, at once for the first time, until it is left, by
RETURN for instance. The times do not drift. If BODY takes longer than that, what should have come
meanwhile is left out."
  `(block nil
     (call-periodically (lambda () ,@body) ,seconds)))

(defun call-periodically (function seconds)
  (declare (function function) (type (real (0)) seconds) (explicit-check seconds))
  (let ((period (seconds-to-nanoseconds seconds)))
    (loop with next = (fiber-now)
          do (funcall function)
             (let ((now (fiber-now)))
               (incf next (* period (max 1 (ceiling (- now next) period))))
               (sleep (/ (max 0 (- next now)) 1000000000))))))

(defmacro with-permit ((semaphore &key timeout) &body body)
  "Wait until SEMAPHORE can be decremented, at most TIMEOUT seconds, a non-negative real or NIL;
then execute BODY, and return its values; or NIL if the time is over. When BODY is left, by whatever
way, SEMAPHORE is incremented."
  (with-unique-names (permit)
    `(dx-flet ((,permit () ,@body))
       (call-with-permit #',permit ,semaphore ,timeout))))

(defun call-with-permit (function semaphore timeout)
  (declare (function function))
  (without-interrupts
    (when (allow-with-interrupts
            (if (and timeout (zerop timeout))
                (sb-thread:try-semaphore semaphore)
                (sb-thread:wait-on-semaphore semaphore :timeout timeout)))
      (unwind-protect (with-local-interrupts (funcall function))
        (let ((sb-impl::*deadline* nil)) ; which may have unwound FUNCTION
          (sb-thread:signal-semaphore semaphore))))))
