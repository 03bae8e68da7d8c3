;;;; looking into a fiber from outside

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;;; backtraces

(declaim (ftype (sfunction (fiber &key (:stream t) (:count t)) null) print-fiber-backtrace))
(defun print-fiber-backtrace (fiber &key (stream *debug-io*) (count 1000))
  "Print what FIBER is doing to STREAM, at most COUNT frames. Another fiber than the running one is
interrupted for it, and makes the backtrace itself."
  (cond ((eq fiber *current-thread*)
         (sb-debug:print-backtrace :stream stream :count count))
        (t
         (let ((text nil)
               (done (sb-thread:make-semaphore)))
           (interrupt-fiber fiber
                            (lambda ()
                              (setf text (with-output-to-string (out)
                                           (sb-debug:print-backtrace :stream out :count count)))
                              (sb-thread:signal-semaphore done)))
           (loop until (or (sb-thread:wait-on-semaphore done :timeout 1/10)
                           (not (fiber-alive-p fiber))))
           (if text
               (write-string text stream)
               (format stream "~S has ended.~%" fiber)))))
  nil)

;;;; the bindings of a fiber, for others to look at

;;; A suspended fiber's newest entry for a symbol holds its value. The fiber must not be
;;; mounted meanwhile: it is held back in the phase in which one is that has not yet left
;;; its stack. One that is runnable, or mounted elsewhere, is asked to do it when it parks.
(defun call-with-fiber-held (fiber function)
  "Call FUNCTION while FIBER, which is parked, stays so. Return false if it is not parked."
  (declare (function function) (dynamic-extent function))
  (without-interrupts
    (when (phase-becomes-p fiber +parked+ +parking+)
      (unwind-protect (funcall function)
        (finish-parking fiber))
      t)))

(defun find-binding (fiber symbol)
  "The address of the newest entry for SYMBOL on the binding stack of FIBER, or NIL."
  (let* ((context (context-of fiber))
         (start (context-word context binding-stack-start))
         (size (* sb-vm:binding-size sb-vm:n-word-bytes))
         (tls-index (symbol-tls-index symbol)))
    (loop for entry of-type word = (context-word context binding-stack-pointer) then (- entry size)
          until (= entry start)
          when (= tls-index (sap-ref-32 (int-sap (- entry size))
                                        (ash sb-vm:binding-symbol-slot sb-vm:word-shift)))
          return (- entry size))))

(defun call-with-binding (fiber symbol function)
  "The values of FUNCTION, called with the address of the newest binding of SYMBOL in FIBER, or NIL and
why not."
  (declare (function function) (dynamic-extent function))
  (let ((result nil)
        (status (if (fiber-alive-p fiber) :no-tls-value :thread-dead)))
    (call-with-fiber-held
     fiber
     (lambda ()
       (let ((entry (find-binding fiber symbol)))
         (when entry
           (setf (values result status) (funcall function (int-sap entry)))))))
    (values result status)))

(defconstant binding-value-offset (ash sb-vm:binding-value-slot sb-vm:word-shift))

(defun symbol-value-in-fiber (symbol fiber)
  "What SYMBOL-VALUE-IN-THREAD is made of: the value, and :OK or what is wrong."
  (if (eq fiber *current-thread*)
      (if (boundp symbol)
          (values (symbol-value symbol) :ok)
          (values nil :unbound-in-thread))
      (call-with-binding fiber symbol
        (lambda (entry)
          (if (= sb-vm:unbound-marker-widetag (sap-ref-8 entry binding-value-offset))
              (values nil :unbound-in-thread)
              (values (sap-ref-lispobj entry binding-value-offset) :ok))))))

(defun set-symbol-value-in-fiber (symbol fiber new-value)
  (if (eq fiber *current-thread*)
      (values (set symbol new-value) :ok)
      (call-with-binding fiber symbol
        (lambda (entry)
          (setf (sap-ref-lispobj entry binding-value-offset) new-value)
          (values new-value :ok)))))
