;;;; errors that nothing handles, the foreground, and Ctrl-C

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; The debugger is entered in the fiber, by the same functions as in a thread: the fiber waits
;;; until it is the foreground thread of the session, which parks it; it owns the foreground
;;; whichever carrier it is on, and parks while the user types. *SESSION* is a global
;;; variable, and fibers are in the session of their carriers, but not in its list of
;;; threads: they are too many to be entered there one by one, under a lock.
;;;
;;; What is true when nobody is inside: a fiber that is dead is not among the interactive threads of
;;; the session. If it were, the foreground would be passed on to it, and nobody else got it.

(defun leave-session (fiber)
  "FIBER, which is running, is about to end: it wants the foreground no more."
  (when (memq fiber (sb-thread::interactive-threads))
    ;; No interruption: there is nothing left to which it could unwind.
    (without-interrupts (sb-thread::%delete-thread-from-session fiber))))

;;; SIGINT makes the foreground thread call a function that looks at the context of a signal.
;;; A fiber calls it where it is parked, and may have none.
(defun break-where-parked ()
  "Enter the debugger, or call handlers, because the user has typed Ctrl-C."
  (with-interrupts
    (let ((interrupt (make-condition 'interactive-interrupt
                                     :context nil
                                     :address (sb-fasl:get-asm-routine
                                               'sb-vm::switch-fiber-context))))
      (signal interrupt)
      (%break 'sb-unix::sigint interrupt))))

;;;; with the debugger disabled

;;; Called instead of ending the process, where the debugger is disabled.
(defun fail-with (condition)
  "End the running fiber because of CONDITION, which nothing has handled."
  (let ((fiber (truly-the fiber *current-thread*)))
    (report-failure fiber condition)
    (setf (fiber-failure fiber) condition)
    (throw 'sb-thread::%abort-thread nil)))

(defun report-failure (fiber condition)
  (ignore-errors
    (with-standard-io-syntax
      (let ((*print-readably* nil))
        (format *error-output* "~&~@<Unhandled ~S in ~S, which ends: ~2I~_~A~:>~2%"
                (type-of condition) fiber condition)
        (sb-debug:print-backtrace :stream *error-output* :count 100 :emergency-best-effort t)
        (finish-output *error-output*)))))
