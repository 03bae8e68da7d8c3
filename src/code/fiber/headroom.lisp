;;;; how much of the control stack must be left for a wait, or for waking another fiber

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; The stack may end anywhere, and what runs then is unwound. What is true when nobody is inside: a
;;; fiber that is in some chain waits; one that has been taken out of it has been made runnable.

;;;; waits

;;; What a wait needs of the control stack, from the question whether it is possible to its end.
(defconstant waiting-room 8192)

(declaim (inline waiting-room-p))
(defun waiting-room-p (fiber &optional (bytes waiting-room))
  (>= (- (sap-int (current-sp)) bytes)
      (+ (fiber-control-stack-start fiber)
         (extern-alien "fiber_control_reserve" unsigned))))

;;; A stack that overflows in the midst of a wait is unwound with the fiber in some chain, or with
;;; its predecessor forgotten.
(declaim (ftype (sfunction () (values)) exhaust-stack-before-waiting))
(defun exhaust-stack-before-waiting ()
  "Let the exhaustion of the stack be signalled unless the running fiber handles one already, and
has the room to wait in that."
  (let ((sp (current-sp)))
    (%touch (sap+ sp -2048))            ; so that the stack overflows here, not in C
    (%touch (alien-funcall (extern-alien "fiber_place_for_waiting"
                                         (function system-area-pointer system-area-pointer
                                                   unsigned))
                           sp waiting-room)))
  (values))

(declaim (inline ensure-waiting-room))
(defun ensure-waiting-room (fiber)
  "If the stack of FIBER, which is running, is about to be exhausted, let that be signalled now."
  (unless (waiting-room-p fiber)
    (exhaust-stack-before-waiting)))

;;;; wake-ups

;;; A wake-up that is cut off by the end of the stack leaves a fiber that is in no queue, or a
;;; poller that is thought to be awake. So whatever changes state and then wakes lets the stack
;;; overflow before that; what it calls needs less. Where the state has been changed by the caller,
;;; a fiber uses the reserve of its stack, which overflows silently where the collector is held off;
;;; but only if nothing of it is open, or a recursion would use it up so. A thread has none.
;;; Below its guard page a thread has met that, and it is open. Above, the page must be met with the
;;; stack pointer in it: there is the return guard, which puts it up again at once.
(declaim (ftype (sfunction (index) (values)) ensure-room-of-thread))
(defun ensure-room-of-thread (bytes)
  (let ((sp (sap-int (current-sp)))
        (guard (+ (sap-int (sb-vm::current-thread-offset-sap
                            sb-vm::thread-control-stack-start-slot))
                  (* 2 (extern-alien "os_vm_page_size" unsigned)))))
    (when (< (- sp bytes) guard (1+ sp))
      (meet-guard-page)))
  (values))

(defun meet-guard-page ()
  (let ((frame (make-array 8192 :element-type '(unsigned-byte 8))))
    (declare (dynamic-extent frame))
    (%touch (vector-sap frame))))

(declaim (inline ensure-waking-room))
(defun ensure-waking-room (bytes)
  "Let the exhaustion of the stack be signalled now if it has not BYTES left."
  (if (current-fiber)
      (%touch (sap+ (current-sp) (- bytes)))
      (ensure-room-of-thread bytes)))

(defmacro with-waking-room ((bytes) &body body)
  "Execute BODY, which needs at most BYTES of the stack and must not be cut off. It does not wait."
  (with-unique-names (wake fiber)
    `(flet ((,wake () ,@body))
       (let ((,fiber (current-fiber)))
         (cond ((and ,fiber (waiting-room-p ,fiber)) (,wake))
               ((and ,fiber (= 0 (context-word (context-of ,fiber) guards)))
                (without-gcing (,wake)))
               (t (ensure-waking-room ,bytes) (,wake)))))))
