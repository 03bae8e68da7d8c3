;;;; frames of foreign code on the stack, see runtime/fiber-foreign.c

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; The bits of *FOREIGN-FRAMES*, which is the fiber's, as other bindings are. The last is the first
;;; of many: it is for calls that are made while no handler is live, the next one for calls that are
;;; made in one handler, and so on.
(defconstant +below-callback+ 1)
(defconstant +frames-to-keep+ 2)
(defconstant +keeps-foreign-frames+ 4)
(defconstant +interruptible-frames+ 8)

(declaim (type (unsigned-byte 16) *foreign-frames*))
(defvar *foreign-frames*)

(declaim (inline frames-if-interruptible see-deferred-signals))
(defun frames-if-interruptible ()
  "*FOREIGN-FRAMES* for a call that may be interrupted."
  (logior *foreign-frames*
          (ash +interruptible-frames+
               (truly-the (integer 0 #.sb-vm:max-interrupts) *free-interrupt-context-index*))))

;;; If signals came before the call, nothing would end it.
(defun see-deferred-signals ()
  (unless (= 0 (sap-int (sb-vm::current-thread-offset-sap sb-vm::thread-deferred-signals-slot)))
    (sb-unix::receive-pending-interrupt)))

(defmacro with-interruptible-system-call (&body body)
  "Execute BODY, a foreign call that holds no lock, such that it may be interrupted, and left by a
non-local exit. Foreign code that has called back is not left by it."
  `(let ((*foreign-frames* (frames-if-interruptible)))
     (see-deferred-signals)
     ,@body))

(defmacro with-interruptible-foreign-calls (&body body)
  "Execute BODY and return its values; foreign calls in it may be interrupted, and left by a
non-local exit, while they have not returned. For calls that wait long and hold no lock. Without
this, interruptions of a fiber wait until the call has returned; in a thread they never do.

In a callback, it is the foreign code that has called back which may be left as well. Neither a
function that interrupts BODY nor what is called back from it is in BODY in this sense."
  `(let ((*foreign-frames* (logandc2 (frames-if-interruptible) +frames-to-keep+)))
     (see-deferred-signals)
     ,@body))
