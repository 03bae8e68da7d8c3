;;;; the end of the process, and processes made from it

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; EXIT unwinds the thread that calls it, calls the exit hooks, ends the other threads, each of
;;; which it gives the chance to unwind, and ends the process in the main thread. With fibers:
;;;  - a fiber that calls it is unwound, and leaves the rest to a thread that is made for it, as
;;;    does a handler on a carrier's own stack;
;;;  - the fibers of all groups are ended before the other threads, while threads can still
;;;    be made, and spare carriers with them; the time-out is for fibers and threads together;
;;;  - the error in a thread that joins a fiber which was ended so is not reported;
;;;  - carriers are never unwound, and end with the process;
;;;  - SIGTERM may come to a thread that would end, being ephemeral, and leave *EXIT-LOCK* locked;
;;;    the kernel may choose the finalizer thread. There another thread is made, which calls EXIT.

(defun exit-by-thread ()
  "Go on with the EXIT that has unwound the running fiber, or handler."
  (let ((code (shiftf *exit-in-progress* nil))
        (timeout *exit-timeout*))
    ;; The fiber will be dead before that thread runs, and a thread that joins it is told so.
    (set-symbol-global-value '*invoke-debugger-hook* #'end-quietly)
    ;; *EXIT-LOCK* stays locked, as always: another thread that calls EXIT comes too late.
    (handler-case
        (make-os-thread (lambda ()
                          (setf *exit-in-progress* code
                                *exit-timeout* timeout)
                          (throw 'sb-impl::%end-of-the-world t))
                        "exit")
      ;; There is nothing to go back to, and no other thread may call EXIT any more.
      (error (condition) (exit-without-thread code condition)))))

(defun exit-by-signal ()
  "What the handler of SIGTERM does."
  (if (sb-thread::thread-ephemeral-p *current-thread*)
      (handler-case (with-interrupts ; which unblocks signals, for the new thread as well
                      (make-os-thread #'exit "exit"))
        (error (condition) (exit-without-thread 0 condition)))
      (exit)))

(defun exit-without-thread (code condition)
  "End the process at once, since CONDITION is why there is no thread to unwind the others."
  (ignore-errors
    (format *error-output* "~&~@<EXIT unwinds nobody, and calls no exit hooks: ~A~:>~%" condition)
    (finish-output *error-output*))
  (os-exit code :abort t))

(defun end-all-fibers ()
  "Called by EXIT in a thread, to end all fibers. Takes the time for that off *EXIT-TIMEOUT*."
  (when *groups*
    (set-symbol-global-value '*invoke-debugger-hook* #'end-quietly)
    (let ((deadline (and *exit-timeout* (seconds-from-now *exit-timeout*))))
      (abort-until-done *groups* deadline)
      (when deadline (setf *exit-timeout* (seconds-until deadline))))))

(defun end-quietly (condition hook)
  "What stands in for the debugger while fibers and threads are ended."
  (unless (follows-from-exit-p condition)
    (sb-debug::debugger-disabled-hook condition hook :quit nil))
  (sb-thread:abort-thread :allow-exit t))

(defun follows-from-exit-p (condition)
  (typecase condition
    (sb-thread:join-thread-error (fiber-p (sb-thread:thread-error-thread condition)))
    (scope-failed (every #'follows-from-exit-p (mapcar #'cdr (%scope-failures condition))))))

;;; A child made by fork would have the fibers, and no carriers. So would a saved image: carriers
;;; are ephemeral threads, which SAVE-LISP-AND-DIE expects to be able to stop, but it cannot know
;;; what to do with their fibers.
(defun check-no-carriers (what)
  (when *groups*
    (error "~@<Cannot ~A while fibers have carriers: call FINISH-FIBERS first on~{ ~S~^,~}.~:@>"
           what *groups*)))

(defun prepare-to-save ()
  "Refuse to save an image with carriers, else forget what holds for this process only."
  (check-no-carriers "save a core")
  (stop-pool)
  (setf **buffer-holders** 0)
  (fill *fiber-table* 0)
  (fill *fd-table* 0))
