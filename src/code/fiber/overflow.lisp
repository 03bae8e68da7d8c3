;;;; a stack that is used up, or lost

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; Called by the runtime in place of the code that ran into the hard guard.
(defun lose-stack ()
  (atomic-decf **buffer-holders** *holds-of-buffers*)
  (setf (fiber-failure (truly-the fiber *current-thread*)) t) ; there is no room for more
  (throw 'fiber-lost nil))

(define-condition fiber-stack-lost (storage-condition)
  ((fiber :initarg :fiber :reader fiber-stack-lost-fiber))
  (:report (lambda (condition stream)
             (format stream "~@<~S has used up a stack and its reserve as well, and ended without ~
                             running its cleanup forms. A larger :STACK-SIZE given to ~
                             MAKE-FIBER, or SB-FIBER:*DEFAULT-STACK-SIZE*, makes its control ~
                             stack of ~D bytes larger.~:@>"
                     (fiber-stack-lost-fiber condition)
                     (fiber-stack-size (fiber-stack-lost-fiber condition)))))
  (:documentation "What FIBER-FAILED-CAUSE returns for a fiber that exhausted a stack, and then the
reserve of that while it handled the exhaustion. It has ended without running its cleanup forms."))

;;; As the conditions of threads, these are printed without pretty-printing, which needs much stack.
(macrolet ((def (name parent text)
             `(define-condition ,name (,parent)
                ((size :initarg :size))
                (:report (lambda (condition stream)
                           (format stream ,text (slot-value condition 'size)))))))
  (def fiber-control-stack-exhausted sb-kernel::control-stack-exhausted
    "Control stack exhausted: the fiber has ~D bytes of it.
This is probably due to heavily nested or infinitely recursive function
calls, or a tail call that SBCL cannot or has not optimized away.
If it is not: a larger :STACK-SIZE given to MAKE-FIBER makes the stack
larger, or SB-FIBER:*DEFAULT-STACK-SIZE* if none is given.")
  (def fiber-binding-stack-exhausted sb-kernel::binding-stack-exhausted
    "Binding stack exhausted: the fiber has as much of it as is due to ~D bytes
of control stack. A larger :STACK-SIZE given to MAKE-FIBER makes both larger,
or SB-FIBER:*DEFAULT-STACK-SIZE* if none is given."))

(defun stack-exhausted (type)
  "What is signalled where a thread is signalled a condition of TYPE."
  (let ((fiber (current-fiber)))
    (if fiber
        (make-condition (ecase type
                          (sb-kernel::control-stack-exhausted 'fiber-control-stack-exhausted)
                          (sb-kernel::binding-stack-exhausted 'fiber-binding-stack-exhausted))
                        :size (fiber-stack-size fiber))
        (make-condition type))))
