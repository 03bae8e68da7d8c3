;;;; the injector: the queue of fibers that no scheduler has yet

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; What comes from outside of the carriers, and what a full run queue has no room for. Any
;;; thread may put; schedulers take some at a time, from the front.
;;;
;;; What is true when nobody is inside: FIRST is the head of a chain through NEXT, in the
;;; order in which fibers were put, and LAST its end; both are NIL if it is empty.

(defstruct (injector (:constructor make-injector ())
                     (:copier nil))
  (lock 0 :type word)
  (first nil)
  (last nil))
(declaim (freeze-type injector))

(declaim (ftype (sfunction (injector fiber) null) injector-put))
(defun injector-put (injector fiber)
  "Put FIBER, which is in no queue, at the end of INJECTOR."
  (with-tiny-lock ((injector-lock injector))
    (setf (fiber-next fiber) nil)
    (if (injector-first injector)
        (setf (fiber-next (truly-the fiber (injector-last injector))) fiber)
        (setf (injector-first injector) fiber))
    (setf (injector-last injector) fiber)
    nil))

(declaim (ftype (sfunction (injector index) t) injector-take))
(defun injector-take (injector n)
  "Remove at most N fibers, N > 0, from the front of INJECTOR, and return their chain."
  (with-tiny-lock ((injector-lock injector))
    (let ((first (injector-first injector)))
      (when first
        (let ((end (truly-the fiber first)))
          (loop (setf n (truly-the index (1- n)))
                (let ((next (fiber-next end)))
                  (when (or (= n 0) (null next)) (return))
                  (setf end (truly-the fiber next))))
          (setf (injector-first injector) (fiber-next end)
                (fiber-next end) nil)
          (unless (injector-first injector) (setf (injector-last injector) nil))))
      first)))

;;;; for tests: fibers that must go elsewhere

(declaim (inline migrant-p))
(defun migrant-p (fiber carrier)
  (neq (fiber-last-carrier (truly-the fiber fiber)) carrier))

(declaim (ftype (sfunction (injector t) boolean) injector-has-migrant-p))
(defun injector-has-migrant-p (injector carrier)
  "Is there a fiber in INJECTOR that CARRIER has not run last?"
  (with-tiny-lock ((injector-lock injector))
    (let ((fiber (injector-first injector)))
      (loop until (or (null fiber) (migrant-p fiber carrier))
            do (setf fiber (fiber-next (truly-the fiber fiber))))
      (and fiber t))))

(declaim (ftype (sfunction (injector t) t) injector-take-migrant))
(defun injector-take-migrant (injector carrier)
  "Remove the first fiber from INJECTOR that CARRIER has not run last. Return it, or NIL."
  (with-tiny-lock ((injector-lock injector))
    (let ((before nil)
          (fiber (injector-first injector)))
      (loop until (or (null fiber) (migrant-p fiber carrier))
            do (setf before fiber
                     fiber (fiber-next (truly-the fiber fiber))))
      (when fiber
        (let ((after (fiber-next (truly-the fiber fiber))))
          (if before
              (setf (fiber-next (truly-the fiber before)) after)
              (setf (injector-first injector) after))
          (unless after (setf (injector-last injector) before))
          (setf (fiber-next (truly-the fiber fiber)) nil)))
      fiber)))
