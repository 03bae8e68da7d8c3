;;;; the spin lock of the fiber runtime

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; A tiny lock is a word: 0 free, 1 taken. It is held inside pseudo-atomic, that is, for a few
;;; dozen instructions (some for each entry where a deadline heap grows or is listed), or a system
;;; call that does not wait (fcntl(2) of a listener, mmap(2) of an arena of stacks). Meanwhile the
;;; collector does not stop the holder, and no handler runs on top of it. So
;;;  - a thread that spins with GC inhibited does not wait for a stopped one,
;;;  - a handler that wants the lock does not wait for the code that it interrupted.
;;; A thread that spins is outside of pseudo-atomic and can be stopped.
;;;
;;; BODY must not allocate, trap, call Lisp, or exit non-locally: an allocation would end
;;; the section too early, a trap, a call or an exit would hold the lock for ever. It has one value.

(defmacro with-tiny-lock ((place) &body body)
  (with-unique-names (value)
    `(locally (declare (optimize (speed 1) (safety 0) (debug 0) (sb-c:store-source-form 0)
                                 (sb-c:insert-array-bounds-checks 0)))
       (loop (%begin-pseudo-atomic)
             (when (= (cas ,place 0 1) 0) (return))
             (%end-pseudo-atomic)
             (spin-for-tiny-lock))
       (let ((,value (progn ,@body)))
         (barrier (:write))
         (setf ,place 0)
         (%end-pseudo-atomic)
         ,value))))

;;; The holder may have been preempted by the kernel: after some rounds give it the processor.
(defun spin-for-tiny-lock ()
  (loop repeat 100 do (spin-loop-hint))
  (alien-funcall (extern-alien "thread_yield" (function int)))
  nil)
