;;;; VOPs for fibers

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-VM")

;;; Suspend the running stack in FROM and go on with the one suspended in TO. This returns when FROM
;;; is switched to, possibly in another OS thread, so nothing that depends on the thread may be kept
;;; across the call. :SAVE-P makes the compiler store all that is live.
(defknown sb-fiber::%switch-context (system-area-pointer system-area-pointer) (values) ())
(define-vop (sb-fiber::%switch-context)
  (:translate sb-fiber::%switch-context)
  (:policy :fast-safe)
  (:args (from :scs (sap-reg) :target rax) (to :scs (sap-reg) :target rdx))
  (:arg-types system-area-pointer system-area-pointer)
  (:temporary (:sc sap-reg :offset rax-offset :from (:argument 0)) rax)
  (:temporary (:sc sap-reg :offset rdx-offset :from (:argument 1)) rdx)
  (:temporary (:sc unsigned-reg :offset rcx-offset) rcx)
  (:temporary (:sc unsigned-reg :offset rsi-offset) rsi)
  (:temporary (:sc unsigned-reg :offset r8-offset) r8)
  (:temporary (:sc unsigned-reg :offset r9-offset) r9)
  (:temporary (:sc unsigned-reg :offset r10-offset) r10)
  (:temporary (:sc unsigned-reg :offset r11-offset) r11)
  (:temporary (:sc complex-double-reg :offset 0) float0)
  (:ignore rcx rsi r8 r9 r10 r11 float0)
  (:save-p t)
  (:vop-var vop)
  (:generator 100
    (move rax from)
    (move rdx to)
    (invoke-asm-routine 'call 'switch-fiber-context vop)))

;;; Between these two the collector does not stop this thread and no deferrable signal
;;; is handled. What stands between them must not allocate, trap or call: a nested section
;;; would end this one. See WITH-TINY-LOCK.
(defknown (sb-fiber::%begin-pseudo-atomic sb-fiber::%end-pseudo-atomic) () (values) ())
(define-vop (sb-fiber::%begin-pseudo-atomic)
  (:translate sb-fiber::%begin-pseudo-atomic)
  (:policy :fast-safe)
  (:generator 1 (emit-begin-pseudo-atomic)))
(define-vop (sb-fiber::%end-pseudo-atomic)
  (:translate sb-fiber::%end-pseudo-atomic)
  (:policy :fast-safe)
  (:generator 3 (emit-end-pseudo-atomic)))

;;; What follows each foreign call: signals that came meanwhile are sent again, see
;;; runtime/fiber-foreign.c. The trap preserves all registers, the call's results among them.
(defun sb-fiber::emit-end-of-call ()
  (assemble ()
    (inst cmp :qword (thread-slot-ea thread-deferred-signals-slot) 0)
    (inst jmp :e OUT)
    (inst break pending-interrupt-trap)
    OUT))

;;; What MUTEX-%OWNER holds when the running thread or fiber owns a mutex.
(defknown sb-fiber::%mutex-owner-id () fixnum (flushable))
(define-vop (sb-fiber::%mutex-owner-id)
  (:translate sb-fiber::%mutex-owner-id)
  (:policy :fast-safe)
  (:results (id :scs (any-reg)))
  (:result-types tagged-num)
  (:generator 1 (inst mov id (thread-slot-ea thread-mutex-owner-id-slot))))

;;; The cycle counter of the processor, which reads it when it likes: no other instruction is waited
;;; for. (%READ-CYCLE-COUNTER waits for all, by CPUID, which on a virtual machine takes as long as
;;; many switches.)
(defknown sb-fiber::%cycle-count () word ())
(define-vop (sb-fiber::%cycle-count)
  (:translate sb-fiber::%cycle-count)
  (:policy :fast-safe)
  (:temporary (:sc unsigned-reg :offset rax-offset) rax)
  (:temporary (:sc unsigned-reg :offset rdx-offset) rdx)
  (:results (count :scs (unsigned-reg)))
  (:result-types unsigned-num)
  (:generator 5
    (inst rdtsc)
    (inst shl rdx 32)
    (inst or rax rdx)
    (move count rax)))

;;; Read a byte for the fault that it may cause.
(defknown sb-fiber::%touch (system-area-pointer) (values) ())
(define-vop (sb-fiber::%touch)
  (:translate sb-fiber::%touch)
  (:policy :fast-safe)
  (:args (where :scs (sap-reg)))
  (:arg-types system-area-pointer)
  (:generator 2 (inst cmp :byte (ea where) 0)))

;;; Have the line at WHERE in the cache soon. It need not be an address of anything.
(defknown sb-fiber::%prefetch (system-area-pointer (signed-byte 32)) (values) ())
(define-vop (sb-fiber::%prefetch)
  (:translate sb-fiber::%prefetch)
  (:policy :fast-safe)
  (:args (where :scs (sap-reg)))
  (:info offset)
  (:arg-types system-area-pointer (:constant (signed-byte 32)))
  (:generator 1 (inst prefetch :t0 (ea offset where))))

;;; A function with dynamic extent sets variables of the frame that made it, which may be on the
;;; stack of another fiber: then the collector must scan that.
(defun mark-ancestor-frame (frame-pointer variable-home card)
  (inst lea card (ea (frame-byte-offset (tn-offset variable-home)) frame-pointer))
  (mark-gc-card card))

;;;; stores that mark a card only if it is not marked, see code/fiber/lines.lisp

;;; A collection between the look and the store leaves the mark, as it does one that was written
;;; just now: the object is in a register of this thread (IMPART_MARK_STICKINESS in gencgc.c).
(defun mark-gc-card-once (card)
  (assemble ()
    (inst shr card gencgc-card-shift)
    (inst and :dword card card-index-mask)
    (inst cmp :byte (ea nil-cardtable-disp null-tn card) CARD-MARKED)
    (inst jmp :e MARKED)
    (inst mov :byte (ea nil-cardtable-disp null-tn card) CARD-MARKED)
    MARKED))

(defknown sb-fiber::%store-slot (instance index t) (values) ())
(define-vop (sb-fiber::%store-slot)
  (:translate sb-fiber::%store-slot)
  (:policy :fast-safe)
  (:args (instance :scs (descriptor-reg)) (value :scs (descriptor-reg any-reg)))
  (:info index)
  (:arg-types instance (:constant index) *)
  (:temporary (:sc unsigned-reg) card)
  (:generator 6
    (move card instance)
    (mark-gc-card-once card)
    (inst mov :qword (object-slot-ea instance (+ index instance-slots-offset)
                                     instance-pointer-lowtag)
          value)))

(defknown sb-fiber::%store-place (simple-vector index t) (values) ())
(define-vop (sb-fiber::%store-place)
  (:translate sb-fiber::%store-place)
  (:policy :fast-safe)
  (:args (vector :scs (descriptor-reg)) (index :scs (any-reg))
         (value :scs (descriptor-reg any-reg)))
  (:arg-types simple-vector tagged-num *)
  (:temporary (:sc unsigned-reg) card)
  (:generator 6
    (let ((place (ea (- (* vector-data-offset n-word-bytes) other-pointer-lowtag)
                     vector index (ash n-word-bytes (- n-fixnum-tag-bits)))))
      (inst lea card place)
      (mark-gc-card-once card)
      (inst mov :qword place value))))
