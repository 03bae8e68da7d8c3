;;;; the switch between two stacks

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-VM")

;;; What is true outside of SWITCH-FIBER-CONTEXT, and hence whenever the world is
;;; stopped, since all of it is one pseudo-atomic section:
;;;
;;;  1. RSP lies in [control_stack_start, control_stack_end) of 'struct thread', and
;;;     the binding stack pointer on the binding stack that the struct names.
;;;  2. A suspended stack's live words are [control-stack-pointer, control-stack-end).
;;;     No register holds anything of it: the VOP saves all that is live.
;;;  3. An entry of the binding stack of a mounted stack holds the value that was shadowed,
;;;     the thread-local cell the stack's own; with a suspended stack it is the other way round.
;;;     So the collector, which updates both, loses nothing and finds nothing twice.
;;;  4. *FREE-INTERRUPT-CONTEXT-INDEX* counts the contexts in the array behind
;;;     'struct thread', all of which belong to the mounted stack.
;;;  5. The word in front of a thread-local cell points to the cell if that holds
;;;     a value, else to the symbol (see TLS-LOAD-INDIRECT in compiler/x86-64/tls).
;;;
;;; A deferrable signal may be deferred during the section, when what decides about
;;; its fate changes: *INTERRUPTS-ENABLED* is one of the values exchanged.
;;;  - It was T and is NIL at the end: fiber_settle_pending() in runtime/fiber-overflow.c, called
;;;    by the trap that ends the section, turns the pending handler into an *INTERRUPT-PENDING*.
;;;    Without that the runtime gives up: "pseudo_atomic_interrupted after
;;;    interrupt_handle_pending".
;;;  - It was NIL and is T: *INTERRUPT-PENDING* was set, and nothing would look at it before
;;;    the next WITHOUT-INTERRUPTS, deferrable signals staying blocked until then.
;;;    The routine makes the end of the section trap.
;;;
;;; In and out: RAX is the context to save, RDX the one to load. Everything but
;;; RBP, R12 and R13 may be destroyed; the caller has saved what it needs.

#+sb-assembling
(macrolet ((context (base slot) `(ea (ash ,slot word-shift) ,base))
           (copy-pair (to from)
             `(progn (inst movaps float0-tn ,from)
                     (inst movaps ,to float0-tn)))
           ;; Point R10 to the signal contexts of the OS thread.
           (load-thread-contexts ()
             `(progn (inst mov r10-tn (thread-slot-ea thread-tls-size-slot))
                     (inst add r10-tn thread-tn)))
           (tls (symbol) `(ea (load-time-tls-offset ',symbol) thread-tn)))

(define-assembly-routine (switch-fiber-context (:return-style :raw)) ()
  (inst push rbp-tn)
  (emit-begin-pseudo-atomic)

  ;; The collector must scan the next stack again. Once a collection only is that a store.
  (inst mov rcx-tn (context rdx-tn fiber-context-state-cell-slot))
  (inst cmp :byte (ea rcx-tn) fiber-stack-active)
  (inst jmp :ne SET-ACTIVE)
  ACTIVE

  ;; Take along the live signal contexts: the next stack's take their places.
  (inst mov rcx-tn (tls *free-interrupt-context-index*))
  (inst shr rcx-tn n-fixnum-tag-bits)
  (inst mov (context rax-tn fiber-context-signal-context-count-slot) rcx-tn)
  (inst jmp :nz SAVE-SIGNAL-CONTEXTS)
  CONTEXTS-SAVED

  ;; Exchange bindings, newest first.
  (inst mov rcx-tn (thread-slot-ea thread-binding-stack-pointer-slot))
  (inst mov r8-tn (thread-slot-ea thread-binding-stack-start-slot))
  (inst jmp UNBIND-TEST)
  UNBIND-LOOP
  (inst sub rcx-tn (* binding-size n-word-bytes))
  (inst mov :dword r9-tn (ea (ash binding-symbol-slot word-shift) rcx-tn))
  (inst test :dword r9-tn r9-tn) ; an entry in the making, or one that was thrown away
  (inst jmp :z UNBIND-TEST)
  (inst mov r10-tn (ea (ash binding-value-slot word-shift) rcx-tn))
  (inst mov r11-tn (ea r9-tn thread-tn))
  (inst mov (ea (ash binding-value-slot word-shift) rcx-tn) r11-tn)
  (inst mov (ea r9-tn thread-tn) r10-tn)
  (inst cmp r10-tn no-tls-value-marker)
  (inst jmp :e UNBOUND)
  UNBIND-TEST
  (inst cmp rcx-tn r8-tn)
  (inst jmp :ne UNBIND-LOOP)

  ;; Save one side, ...
  (copy-pair (context rax-tn fiber-context-binding-stack-pointer-slot)
             (thread-slot-ea thread-binding-stack-pointer-slot)) ; and the catch block
  (inst mov rcx-tn (thread-slot-ea thread-current-unwind-protect-block-slot))
  (inst mov (context rax-tn fiber-context-unwind-protect-block-slot) rcx-tn)
  (inst mov rcx-tn (thread-slot-ea thread-alien-stack-pointer-slot))
  (inst mov (context rax-tn fiber-context-alien-stack-pointer-slot) rcx-tn)
  (inst stmxcsr (context rax-tn fiber-context-mxcsr-slot))
  (inst mov (context rax-tn fiber-context-control-stack-pointer-slot) rsp-tn)

  ;; ... load the other. A profiler's signal between the next instructions finds
  ;; RSP outside of the bounds, and bounds that are those of one stack, never a
  ;; range that spans two: start and end change in one store. No instruction faults
  ;; before FIBER-CONTEXT, by which a handler knows the stack, is that of RSP: they read and write
  ;; the struct, the contexts, and words of the stacks that were written when those were left. But
  ;; the frame of a signal may find no room: fiber_in_use() in runtime/fiber-overflow.c.
  (inst mov rsp-tn (context rdx-tn fiber-context-control-stack-pointer-slot))
  (copy-pair (thread-slot-ea thread-control-stack-start-slot)
             (context rdx-tn fiber-context-control-stack-start-slot))
  (inst pop rbp-tn)
  (copy-pair (thread-slot-ea thread-alien-stack-start-slot)
             (context rdx-tn fiber-context-alien-stack-start-slot))
  (copy-pair (thread-slot-ea thread-binding-stack-pointer-slot)
             (context rdx-tn fiber-context-binding-stack-pointer-slot)) ; and the catch block
  (inst mov rcx-tn (context rdx-tn fiber-context-unwind-protect-block-slot))
  (inst mov (thread-slot-ea thread-current-unwind-protect-block-slot) rcx-tn)
  (inst mov rcx-tn (context rdx-tn fiber-context-alien-stack-pointer-slot))
  (inst mov (thread-slot-ea thread-alien-stack-pointer-slot) rcx-tn)
  (inst mov rcx-tn (context rdx-tn fiber-context-mutex-owner-id-slot))
  (inst mov (thread-slot-ea thread-mutex-owner-id-slot) rcx-tn)
  (inst mov rcx-tn (context rdx-tn fiber-context-mounted-as-slot))
  (inst mov (thread-slot-ea thread-fiber-context-slot) rcx-tn)
  (inst mov :dword rcx-tn (context rax-tn fiber-context-mxcsr-slot))
  (inst cmp :dword rcx-tn (context rdx-tn fiber-context-mxcsr-slot))
  (inst jmp :ne LOAD-MXCSR) ; loading it always would cost more than comparing
  MXCSR-LOADED

  ;; Exchange bindings, oldest first.
  (inst mov rcx-tn (thread-slot-ea thread-binding-stack-start-slot))
  (inst mov r8-tn (thread-slot-ea thread-binding-stack-pointer-slot))
  (inst jmp BIND-TEST)
  BIND-LOOP
  (inst mov :dword r9-tn (ea (ash binding-symbol-slot word-shift) rcx-tn))
  (inst mov r10-tn (ea (ash binding-value-slot word-shift) rcx-tn))
  (inst add rcx-tn (* binding-size n-word-bytes))
  (inst test :dword r9-tn r9-tn)
  (inst jmp :z BIND-TEST)
  (inst lea rsi-tn (ea r9-tn thread-tn))
  (inst mov r11-tn (ea rsi-tn))
  (inst mov (ea (ash (- binding-value-slot binding-size) word-shift) rcx-tn) r11-tn)
  (inst mov (ea rsi-tn) r10-tn)
  (inst cmp r11-tn no-tls-value-marker)
  (inst jmp :e BOUND)
  BIND-TEST
  (inst cmp rcx-tn r8-tn)
  (inst jmp :ne BIND-LOOP)

  (inst mov rcx-tn (context rdx-tn fiber-context-signal-context-count-slot))
  (inst test rcx-tn rcx-tn)
  (inst jmp :nz RESTORE-SIGNAL-CONTEXTS)
  CONTEXTS-RESTORED

  (inst cmp (tls *interrupt-pending*) null-tn)
  (inst jmp :ne INTERRUPT-PENDING)
  DONE
  (emit-end-pseudo-atomic)
  (inst ret)

  SAVE-SIGNAL-CONTEXTS
  (load-thread-contexts)
  (inst lea r9-tn (context rax-tn fiber-context-signal-context-0-slot))
  SAVE-ONE
  (inst mov r11-tn (ea (- n-word-bytes) r10-tn rcx-tn n-word-bytes))
  (inst mov (ea (- n-word-bytes) r9-tn rcx-tn n-word-bytes) r11-tn)
  (inst dec rcx-tn)
  (inst jmp :nz SAVE-ONE)
  (inst jmp CONTEXTS-SAVED)

  RESTORE-SIGNAL-CONTEXTS
  (load-thread-contexts)
  (inst lea r9-tn (context rdx-tn fiber-context-signal-context-0-slot))
  RESTORE-ONE
  (inst mov r11-tn (ea (- n-word-bytes) r9-tn rcx-tn n-word-bytes))
  (inst mov (ea (- n-word-bytes) r10-tn rcx-tn n-word-bytes) r11-tn)
  (inst dec rcx-tn)
  (inst jmp :nz RESTORE-ONE)
  (inst mov :qword (context rdx-tn fiber-context-signal-context-count-slot) 0)
  (inst jmp CONTEXTS-RESTORED)

  ;; The last binding of a symbol goes: reads must find the symbol again. Leaving
  ;; NO-TLS-VALUE in the indirection word would be correct and cost a fault for each read.
  UNBOUND
  (inst mov r10-tn (static-symbol-value-ea '*tls-symbol-map*))
  (inst shr :dword r9-tn 1)             ; see UNBIND-TO-HERE
  (inst mov r10-tn (ea -4 r10-tn r9-tn))
  (inst mov (ea -8 thread-tn r9-tn 2) r10-tn)
  (inst jmp UNBIND-TEST)

  BOUND
  (inst dec rsi-tn)
  (inst mov (ea -7 rsi-tn) rsi-tn)
  (inst jmp BIND-TEST)

  SET-ACTIVE
  (inst mov :byte (ea rcx-tn) fiber-stack-active)
  (inst jmp ACTIVE)

  LOAD-MXCSR
  (inst ldmxcsr (context rdx-tn fiber-context-mxcsr-slot))
  (inst jmp MXCSR-LOADED)

  INTERRUPT-PENDING
  (inst cmp (tls *interrupts-enabled*) null-tn)
  (inst jmp :e DONE)
  (inst or :byte (thread-slot-ea thread-pseudo-atomic-bits-slot) 1)
  (inst jmp DONE)))

;;; Where a fresh fiber "returns" to. The frame pointer is 0, which ends backtraces.
#+sb-assembling
(define-assembly-routine (fiber-entry (:return-style :none)) ()
  (call-lisp-fun 'sb-fiber::%run-fiber 0)
  (inst break halt-trap))
