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
;;; the session. If it were, the foreground would be passed on to it, and no other thread got it.

(defun leave-session (fiber)
  "FIBER, which is running, is about to end: it wants the foreground no more."
  (when (memq fiber (sb-thread::interactive-threads))
    ;; No interruption: there is nothing left to which it could unwind.
    (without-interrupts (sb-thread::%delete-thread-from-session fiber))))

;;; The list is read without the lock: it is changed by DELETE and APPEND, and a thread that has
;;; just left or joined it may be missed or not. This is called whenever a restart is looked for.
(defun others-in-debugger ()
  "A list of other fibers that wait for the foreground, as a rule to enter the debugger."
  (loop for thread in (sb-thread::session-interactive-threads sb-thread::*session*)
        when (and (fiber-p thread) (neq thread *current-thread*)) collect thread))

(defun report-abort-all (stream)
  (let ((n (length (others-in-debugger))))
    (format stream "~@<abort this fiber and ~[~;the other one~:;the ~:*~D others~] ~
                    that wait~[~;s~:;~] for the debugger~:@>" n n)))

;;; What the restart ABORT-ALL does.
(defun abort-all-in-debugger ()
  (dolist (fiber (others-in-debugger))
    (%interrupt-fiber fiber #'sb-thread:abort-thread))
  (sb-thread:abort-thread))

;;; The error was announced when the fiber began to wait for the foreground, long ago perhaps, and
;;; before those of other fibers.
(defun note-debugger-entry (condition restarts)
  "Called when the debugger for CONDITION has got the foreground, before it shows RESTARTS. Returns
the restarts that there are now."
  (let ((others (others-in-debugger)))
    (when (in-fiber-p)
      (ignore-errors (sb-debug::%print-debugger-invocation-reason condition *debug-io*))
      ;; The fibers that wait now may not have waited when RESTARTS were computed.
      (setf restarts (compute-restarts condition)))
    (print-frames-of-blocking-call condition *debug-io*)
    (when others
      (format *debug-io* "~&~D other fiber~:P wait~[~;s~:;~] for the debugger:~%~
                          ~{  ~A~%~}~@[  and ~D more~%~]"
              (length others) (length others)
              (subseq others 0 (min 10 (length others)))
              (and (> (length others) 10) (- (length others) 10))))
    restarts))

;;; An error in a call for CALL-BLOCKING is signalled in the fiber when the thread that made the
;;; call has unwound it. Where it was signalled first is kept until it has been handled or reported:
;;; a cons of the condition and a list of frames.
(defvar *failure-of-blocking-call* nil)

(defun print-frames-of-blocking-call (condition stream)
  "If CONDITION is from a call that CALL-BLOCKING has made, print where it was signalled there."
  (when (eq condition (car *failure-of-blocking-call*))
    (let ((*suppress-print-errors* 'error) ; else the rest of the report would be lost
          (*print-length* 8)
          (*print-level* 4))
      (format stream "~&The function given to CALL-BLOCKING signalled it here, in a thread:~%~
                      ~:{~D: ~S~%~}~%"
              (loop for frame in (cdr *failure-of-blocking-call*)
                    for i from 0 collect (list i frame))))))

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

;;; The fiber ends: what has failed is reported, and then the fiber is unwound. A report calls
;;; functions of users, on what is left of a stack, where *INVOKE-DEBUGGER-HOOK* is NIL:
;;;  - INVOKE-DEBUGGER makes room for it before it binds the hook: an overflow before that is an
;;;    error as any other, and a later overflow is an error within the report;
;;;  - whatever would enter the debugger in it ends a part of the report, and nothing else.
;;; So a fiber that fails is unwound, whatever becomes of the report.

(define-alien-routine ("fiber_make_room_to_report" %make-room-to-report) void)

(defun before-debugger (condition)
  "Called by INVOKE-DEBUGGER."
  (fail-as-child condition)
  (make-room-to-report))

(defun make-room-to-report ()
  "Let a fiber that is running have a reserve of its control stack now."
  (when (in-fiber-p)
    (%touch (int-sap (- (sap-int (current-sp)) 2048))) ; so that the stack overflows here, not in C
    (without-interruptions (%make-room-to-report))))

;;; Called instead of ending the process, where the debugger is disabled.
(defun fail-with (condition)
  "End the running fiber because of CONDITION, which nothing has handled."
  (let ((fiber (truly-the fiber *current-thread*)))
    (report-failure fiber condition)
    (begin-to-leave fiber nil)
    (setf (fiber-failure fiber) condition)
    (throw 'sb-thread::%abort-thread nil)))

;;; A function that was left where the stack ended had perhaps not stored its arguments yet. What
;;; lies there instead is no object any more, and the next collection would fail.
(defun print-names-of-frames (stream)
  "Print a backtrace that does not look into frames, the most recent 100 of them."
  (declare (notinline sb-di:frame-debug-fun sb-di:debug-fun-name))
  (format stream "~&Backtrace, without arguments:~%")
  (loop for frame = (sb-di:top-frame) then (sb-di:frame-down frame)
        for i below 100
        while frame
        do (format stream "~D: ~S~%" i (sb-di:debug-fun-name (sb-di:frame-debug-fun frame)))))

(defun report-failure (fiber condition)
  (flet ((print-condition ()
           (format *error-output* "~&~@<Unhandled ~S in ~S, which ends: ~2I~_~A~:>~2%"
                   (type-of condition) fiber condition))
         (print-type ()
           (format *error-output* "~&Unhandled ~S in the fiber~@[ ~S~], which ends; ~
                                   it cannot be printed.~2%"
                   (type-of condition) (fiber-%name fiber)))
         (print-backtrace ()
           (print-frames-of-blocking-call condition *error-output*)
           (if (= 1 (alien-funcall (extern-alien "fiber_frame_cut_off" (function int))))
               (print-names-of-frames *error-output*)
               (sb-debug:print-backtrace :stream *error-output* :count 100
                                         :emergency-best-effort t))))
    (declare (dynamic-extent #'print-condition #'print-type #'print-backtrace))
    (unless (reported-p #'print-condition)
      (reported-p #'print-type))
    (reported-p #'print-backtrace)))

(defun reported-p (function)
  "Call FUNCTION, which prints to *ERROR-OUTPUT*. Return false if it would enter the debugger."
  (declare (function function))
  (flet ((give-up (&rest arguments)
           (declare (ignore arguments))
           (return-from reported-p nil)))
    (let ((*cancellable* nil)
          (sb-impl::*deadline* nil)
          (*invoke-debugger-hook* #'give-up)) ; BREAK is no condition that is signalled as an error
      (handler-bind ((serious-condition #'give-up))
        (make-room-to-report)           ; again, if a part of the report has used it up
        (with-standard-io-syntax
          (let ((*print-readably* nil))
            (funcall function)))
        (finish-output *error-output*)
        t))))
