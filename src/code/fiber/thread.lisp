;;;; making OS threads: carriers, monitors, threads of the pool, and threads of users; or fibers
;;;; in their place

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; The monitor makes a thread when all carriers are stuck, and needs *MAKE-THREAD-LOCK* for it. If
;;; a fiber parked for that lock, it might be given it and then wait for its turn behind fibers that
;;; are stuck: they would never be relieved. What is true in fibers: who waits for the lock, and who
;;; has it, is on its carrier.

(defmacro with-native-waits (&body body)
  "Execute BODY, which waits for short times only, such that a fiber keeps its carrier in it, and
that no deadline cuts its waits off. The caller sees to it that the end of the stack does not."
  `(let ((*foreign-frames* (logior *foreign-frames* +below-callback+))
         (*noting-blocked-carrier* t)
         (sb-impl::*deadline* nil))
     ,@body))

;;; A thread that ends gives its semaphore, and may have to wait for that, when it is in the list
;;; already. Who waits for such a thread with *MAKE-THREAD-LOCK* waits for whoever has the
;;; semaphore: that may be a fiber, which has no turn.
(defun pop-joined-thread (wait)
  "A thread out of *JOINABLE-THREADS* that pthread_join() has been called for, or NIL. Those that
have not ended yet remain there, unless WAIT."
  (let ((thread (atomic-pop sb-thread::*joinable-threads*)))
    (cond ((null thread) nil)
          ((= 0 (alien-funcall (extern-alien "fiber_join_os_thread" (function int unsigned int))
                               (sb-thread::thread-os-thread thread) (if wait 1 0)))
           thread)
          (t (locally (declare (sb-c::tlab :system)) ; an arena may be rewound
               (atomic-push thread sb-thread::*joinable-threads*))
             nil))))

;;; With interrupts off: a fiber that parked in BODY would go on in another thread.
(defmacro with-signals-blocked (&body body)
  "Execute BODY with those signals blocked that START-THREAD blocks; a new thread inherits that."
  (with-unique-names (old)
    `(let ((,old (make-array (* sb-unix::sizeof-sigset_t sb-vm:n-byte-bits)
                             :element-type 'bit :initial-element 0)))
       (with-pinned-objects (,old)
         (sb-unix::pthread-sigmask sb-unix::SIG_BLOCK
                                   (foreign-symbol-sap "thread_start_sigset" t) ,old)
         (unwind-protect (progn ,@body)
           (sb-unix::pthread-sigmask sb-unix::SIG_SETMASK ,old nil))))))

;;; The thread is ephemeral, so that it neither keeps the image from exiting nor is asked to unwind.
(defun make-carrier-thread (name function argument)
  "Start a thread that calls FUNCTION with ARGUMENT, and handles no deferrable signal before
FUNCTION calls ACCEPT-SIGNALS: an interruption could unwind it before it has begun."
  (call-with-make-thread-lock
   (lambda ()
     (with-signals-blocked
       (sb-thread::make-system-thread name function (list argument) nil)))))

;;;; fibers in place of threads

(defvar *group-of-threads* nil
  "The group that runs, as fibers, what is made by MAKE-THREAD, or NIL. Fibers that are made so
inherit it.")

;;; Prevents: a fiber in an arena, which may be rewound while it runs, as no thread is.
(defun start-as-fiber (name function arguments)
  (submit-fiber *group-of-threads*
                (sb-vm:without-arena
                  (make-fiber function :name name :arguments arguments
                                       :initial-bindings `((*group-of-threads*
                                                            . ,*group-of-threads*))))))

(defun group-for-threads (group)
  "What *GROUP-OF-THREADS* is to be if the user has named GROUP, or NIL."
  (group-argument (or group
                      (if (in-fiber-p) (fiber-group (truly-the fiber *current-thread*)) t))))

(defmacro with-threads-as-fibers ((&key group) &body body)
  "Execute BODY such that SB-THREAD:MAKE-THREAD, called in it, makes fibers, and returns them; they
do so themselves, too. GROUP, which is evaluated, is the group that runs them: what START-FIBERS
returned, T for the default group, or NIL, the default, for the group of the fiber that executes
this, or else the default group. BODY's values are returned.

Code that was written for threads, a server that starts one for each connection, say, has fibers
like that without being changed. It must not be such that a thread computes for long, or that
foreign code finds the same OS thread again. Signals what SUBMIT-FIBER does; so does MAKE-THREAD."
  `(let ((*group-of-threads* (group-for-threads ,group))) ,@body))

;;;; threads of users

;;; START-THREAD blocks signals before it takes the lock. A fiber would park with them blocked, and
;;; go on in an OS thread that has not blocked them: the first OS thread would receive no signal any
;;; more, and the new thread, made by the second, would receive signals before it can handle them.
(defun start-os-thread (thread function arguments)
  "What START-THREAD of threads does, with the lock taken first."
  (call-with-make-thread-lock
   (lambda () (sb-thread::start-thread thread function arguments))))

(defun start-thread (thread function arguments)
  "What MAKE-THREAD does, by way of START-THREAD of threads. That is called again for an OS thread,
and goes on then, since it finds the lock taken."
  (if (and *group-of-threads* (not (sb-thread::thread-ephemeral-p thread)))
      (start-as-fiber (sb-thread::thread-%name thread) function arguments)
      (start-os-thread thread function arguments)))

(defun make-os-thread (function name)
  "What MAKE-THREAD does if threads are not to be fibers."
  (let ((*group-of-threads* nil))
    (sb-thread:make-thread function :name name)))

(defun call-with-make-thread-lock (function)
  (declare (function function))
  (ensure-waking-room 6144)
  (let ((thread (with-native-waits
                  (sb-thread::with-system-mutex (sb-thread::*make-thread-lock*)
                    (handler-case (funcall function)
                      (serious-condition (condition) condition))))))
    ;; Handlers, or a debugger, run without the lock, and park.
    (when (typep thread 'serious-condition) (error thread))
    thread))

;;;; threads of the runtime

;;; It is a thread as those of users are, which EXIT ends, and SAVE-LISP-AND-DIE tells of.
(defun call-in-thread (function)
  "Let a thread of its own call FUNCTION, whose outcome is dropped. The thread is returned."
  (declare (function function))
  (make-os-thread (lambda ()
                    (without-interrupts
                      (accept-signals)
                      (with-local-interrupts (ignore-errors (funcall function)))))
                  "fiber warning"))

(defun accept-signals ()
  "Let this thread, in which interrupts are off, be sent signals."
  (sb-unix::pthread-sigmask sb-unix::SIG_UNBLOCK (foreign-symbol-sap "thread_start_sigset" t) nil)
  (block-timer-signal))

(defun refuse-signals ()
  "Let this thread be sent no signals; those of the process go to others."
  (sb-unix::pthread-sigmask sb-unix::SIG_BLOCK (foreign-symbol-sap "thread_start_sigset" t) nil))
