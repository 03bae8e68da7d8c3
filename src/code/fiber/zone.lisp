;;;; zones: where a fiber may park, and whether it may go elsewhere

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

(declaim (inline zone))
(defun zone (fiber)
  "How FIBER, which is running, can wait: if :FREE it can park and be resumed anywhere, if :PINNED
it can park and must be resumed on this OS thread, if :NATIVE it must not leave its carrier:
 - GC is inhibited: the collector would find a suspended stack that must not be seen;
 - code pages are pinned, or an arena is in use: that is the OS thread's state;
 - the allocator's mutex is held: its other users wait natively, with GC inhibited;
 - foreign code is on the stack, below a callback or a signal handler: what it holds is the OS
   thread's, and another fiber would ask that thread for it again.
In a signal handler it is :PINNED at least: there are addresses of the OS thread on the stack.
WITHOUT-INTERRUPTS is no zone: it is a binding, which goes with the fiber, and holds off
interruptions."
  (cond ((or *gc-inhibit*
             (not (eql *gc-pin-code-pages* 0))
             (/= 0 (sap-int (sb-vm::current-thread-offset-sap sb-vm::thread-arena-slot)))
             (sb-thread:holding-mutex-p sb-vm::*allocator-mutex*)
             (logtest *foreign-frames* +below-callback+))
         :native)
        ((live-signal-context-p)
         (if (= 1 (alien-funcall (extern-alien "fiber_above_foreign_code" (function int))))
             :native
             :pinned))
        ((/= (fiber-pin-count fiber) 0) :pinned)
        (t :free)))

;;; A fiber that has a home runs there only. So its home changes on this carrier, to it or from it,
;;; and the carrier's count of guests has a single writer.
(declaim (inline set-home))
(defun set-home (fiber home)
  "Let HOME, this carrier or NIL, be where FIBER, which is running, is resumed. With interrupts
off."
  (unless (eq home (fiber-home fiber))
    (let ((carrier (truly-the carrier *carrier*)))
      (setf (fiber-home fiber) home)
      (if home
          (incf (carrier-guests carrier))
          (decf (carrier-guests carrier))))))

(defun prepare-zone (fiber)
  "Before FIBER, which is running, is left: note where it must be resumed, and settle its reserves."
  (set-home fiber (and (eq (zone fiber) :pinned) *carrier*))
  (when (/= 0 (context-word (context-of fiber) guards))
    (alien-funcall (extern-alien "fiber_rearm_guards" (function void)))))

(declaim (ftype (sfunction () boolean) can-park-p))
(defun can-park-p ()
  "Is a fiber running that can leave its carrier here? If it has too little stack for that, the
exhaustion of the stack is signalled."
  (let ((fiber (current-fiber)))
    (when (and fiber (not (eq (zone fiber) :native)))
      (ensure-waiting-room fiber)
      t)))
