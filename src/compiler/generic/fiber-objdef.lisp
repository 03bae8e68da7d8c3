;;;; the machine context of a suspended stack, as Lisp, assembly and C see it

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-VM")

;;; A FIBER-CONTEXT is to a stack what 'struct thread' is to an OS thread. It is not
;;; a Lisp object: that of a fiber lies between its control and its binding stack,
;;; that of a carrier in malloc space. Genesis writes genesis/fiber-context.h from this
;;; definition, so that no offset is ever counted by hand.
;;;
;;; Its slots are written by
;;;  - runtime/fiber-arena.c and fiber-carrier.c, which fill in the constants;
;;;  - the switch (assembly/x86-64/fiber), which saves and loads the rest, inside
;;;    pseudo-atomic, so that a stopped world sees each stack exactly once.
;;;
;;; The order is part of the contract with the switch: pairs that start at an even
;;; slot are moved by one 16-byte instruction from or to the like pair of 'struct thread'.
(define-primitive-object (fiber-context)
  ;; where the collector starts to scan the control stack while it is suspended
  (control-stack-pointer :c-type "lispobj *" :pointer t)
  (mxcsr)
  (binding-stack-pointer :c-type "lispobj *" :pointer t)
  (catch-block)
  (unwind-protect-block)
  (alien-stack-pointer :c-type "lispobj *" :pointer t)
  (alien-stack-start :c-type "lispobj *" :pointer t)
  (binding-stack-start :c-type "lispobj *" :pointer t)
  (control-stack-start :c-type "lispobj *" :pointer t)
  (control-stack-end :c-type "lispobj *" :pointer t)
  ;; what MUTEX-%OWNER holds while this stack is running and owns a mutex
  (mutex-owner-id)
  ;; what 'struct thread' calls its mounted fiber while this stack is running:
  ;; the context itself, or 0 if it is a carrier's own
  (mounted-as)
  ;; one byte in the arena's dense array, which is all that the collector reads
  ;; of a stack that it skips
  (state-cell :c-type "unsigned char *" :pointer t)
  ;; which guards are down, and where the return guard is, see runtime/fiber-reserve.c
  (guards)
  (return-guard)
  ;; The signal contexts that are live on this stack (a handler for a trap that
  ;; parks, say). While the stack is mounted they are the OS thread's.
  (signal-context-count)
  #.(coerce (loop for i below max-interrupts
                  collect (symbolicate "SIGNAL-CONTEXT-" (princ-to-string i)))
            'vector)
  ;; the signal mask of the innermost handler, while the fiber is parked in one
  (signal-mask)
  ;; the fiber's number among the living
  (index)
  ;; the catch block at the base of the fiber, to which a fiber that has run into the
  ;; hard guard is cut back; no unwind-protect block lies above it
  (base-catch-block)
  ;; next in the list of free stacks
  (next-free :c-type "struct fiber_context *" :pointer t))

;;; The values of the byte at STATE-CELL, as in runtime/fiber.h; there are others, which belong to
;;; the collector alone. The states and who makes which move: runtime/fiber-arena.c.
(defconstant fiber-stack-free 0)
(defconstant fiber-stack-active 1)
