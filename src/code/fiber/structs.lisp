;;;; the FIBER structure, which must be known when the thread functions are compiled

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; A fiber is a thread to all code that asks: it is *CURRENT-THREAD* while it runs. Slots
;;; of THREAD that name an OS thread have these values in a fiber:
;;;  - PRIMITIVE-THREAD, which tells the living from the dead, holds the address of its
;;;    FIBER-CONTEXT, never that of a thread structure;
;;;  - OS-THREAD is 0: no signal can be sent to a fiber;
;;;  - OS-TID is 2^31 plus the index of its stack, unique among the living and greater than
;;;    any thread's, which is all that condition variables and RWLOCKs ask of it;
;;;  - SEMAPHORE is NIL: threads that wait for its end wait on the word ENDED;
;;;  - STORAGE-LOCK is one for all fibers.
(sb-xc:defstruct (fiber (:include sb-thread:thread)
                        (:copier nil)
                        (:constructor %make-fiber
                            (%name storage-lock function stack-size initial-bindings
                             &aux (start (if initial-bindings
                                             (list function initial-bindings)
                                             function)))))
  "A thread of control that carrier threads run in turn, a subtype of SB-THREAD:THREAD. Made by
MAKE-FIBER, run by SUBMIT-FIBER, START-FIBERS or RUN-FIBERS."
  ;; What happens next in the life of the fiber; changed by compare-and-swap only.
  ;; The table is in fiber.lisp.
  (phase 0 :type sb-vm:word)
  ;; The address of its FIBER-CONTEXT, from its submission until its stack is free.
  (context 0 :type sb-vm:word)
  ;; The sum of some flags, see below; changed by compare-and-swap only.
  (flags 0 :type sb-vm:word)
  ;; What it begins with, until it does, and what it is in a scope: see FIBER-FUNCTION.
  (start nil)
  (stack-size 0 :type sb-vm:word :read-only t)
  (group nil)
  ;; The carrier that runs it, or NIL. Written by that carrier.
  (carrier nil)
  ;; The carrier that must run it next, since it parked pinned, or NIL.
  (home nil)
  ;; The carrier that ran it last, if migration is forced.
  (last-carrier nil)
  (pin-count 0 :type fixnum)
  ;; What it waits for while it is parked, see WHAT-IT-WAITS-FOR.
  (wait-reason nil)
  ;; The cycle count when it was last left, or a few switches before.
  (left 0 :type sb-vm:word)
  ;; NEXT is the link of the chains of fibers that can run: an injector, an inbox. WAIT-NEXT is
  ;; that of the chains of waiters. They are two, since a deadline makes a fiber runnable that is
  ;; still in a chain of waiters, from which it takes itself out when it runs.
  (next nil)
  (wait-next nil)
  ;; Its place in a deadline heap (-1: in none), and which heap that is.
  (heap-index -1 :type fixnum)
  (heap nil)
  ;; The word that it waits on in the parking lot, 0 once it has been taken out; the links of the
  ;; queue of that word: see fiber/parking.lisp. How it waits for a mutex: see fiber/mutex.lisp.
  (wait-address 0 :type sb-vm:word)
  (wait-previous nil)
  (wait-word nil)
  (wait-claim nil)
  ;; How a wait for a descriptor ended, see fiber/waiter-map.lisp.
  (wait-result nil)
  ;; The condition that ended it, if it ended abnormally.
  (failure nil))

(declaim (sb-ext:freeze-type fiber sb-thread:thread))

;;; There may be a million of fibers, and each word of one makes collections longer.

#-sb-xc-host
(progn
  (declaim (inline fiber-function fiber-initial-bindings fiber-child))
  (defun fiber-function (fiber)
    "What FIBER is to call, or NIL if it has begun."
    (let ((start (fiber-start fiber)))
      (cond ((consp start) (first start))
            ((functionp start) start))))
  (defun fiber-initial-bindings (fiber)
    "A list of symbols and values, conses, or NIL if FIBER has begun."
    (let ((start (fiber-start fiber)))
      (and (consp start) (second start))))
  (defun fiber-child (fiber)
    "What FIBER is in a scope, a CHILD, or NIL."
    (let ((start (fiber-start fiber)))
      (cond ((consp start) (third start))
            ((functionp start) nil)
            (t start)))))

;;; It has ended. Alone in the half of the word on which those wait that join it.
(defconstant +ended+ 1)
;;; FIBER-UNPARK has been called since FIBER-PARK last returned.
(defconstant +user-permit+ (ash 1 32))
;;; Its group, or the fiber that runs it, has asked it to end.
(defconstant +aborted+ (ash 1 33))
;;; It is to look whether it is to leave something; it was cancelled, was told so, is leaving for
;;; that: see fiber/cancel.lisp.
(defconstant +to-leave+ (ash 1 34))
(defconstant +cancelled+ (ash 1 35))
(defconstant +told+ (ash 1 36))
(defconstant +leaving+ (ash 1 37))
;;; Its function is called with interrupts off, whatever it has been asked by then.
(defconstant +begins-deaf+ (ash 1 38))

#-sb-xc-host
(progn
  (declaim (inline set-fiber-flag clear-fiber-flag))
  ;; Also if it is set already: this is the full barrier between what the caller has written and
  ;; its look at the flag, which the fiber may be about to clear.
  (defun set-fiber-flag (fiber flag)
    "Return false if FLAG of FIBER was set already."
    (declare (type sb-vm:word flag))
    (loop (let ((flags (fiber-flags fiber)))
            (when (= (cas (fiber-flags fiber) flags (logior flags flag)) flags)
              (return (not (logtest flag flags)))))))
  (defun clear-fiber-flag (fiber flag)
    "Return false if FLAG of FIBER was not set."
    (declare (type sb-vm:word flag))
    (loop (let ((flags (fiber-flags fiber)))
            (unless (logtest flag flags) (return nil))
            (when (= (cas (fiber-flags fiber) flags (logandc2 flags flag)) flags) (return t))))))

;;; What the running fiber is going to wait for, if that is made of what it then waits for in the
;;; parking lot, as a semaphore is made of a condition variable: what was bound first is what its
;;; user knows. It is bound only where there has been something to wait for: so nothing is kept
;;; alive by it, and no fast path is longer.
#-sb-xc-host
(sb-impl:define-thread-local *waited-for* nil)

#-sb-xc-host
(defmacro waited-for (object)
  "What *WAITED-FOR* is to be bound to by what waits for OBJECT."
  `(or *waited-for* ,object))

#-sb-xc-host
(defmacro waiting-for (object &body body)
  "Execute BODY, which waits for OBJECT: a fiber that parks in it shows that as its reason."
  `(let ((*waited-for* (waited-for ,object))) ,@body))

;;; The carrier that the current OS thread is, or NIL. No fiber binds it, so it stays with the OS
;;; thread when a fiber goes elsewhere.
#-sb-xc-host
(sb-impl:define-thread-local *carrier* nil)

;;;; closing a stream or a descriptor, see fiber/io.lisp

;;; How many fibers let others run where they may be about to use the buffer of a stream: they are
;;; executing what has interrupted them, or preempted in it, or a thread reads for them.
#-sb-xc-host
(progn (declaim (type fixnum **buffer-holders**))
       (define-load-time-global **buffer-holders** 0))

;;; How often the running fiber is counted there, for one that ends without running cleanup forms.
#-sb-xc-host
(progn (declaim (type fixnum *holds-of-buffers*))
       (defvar *holds-of-buffers* 0))

#-sb-xc-host
(defmacro while-holding-buffers (&body body)
  `(let ((*holds-of-buffers* (1+ *holds-of-buffers*)))
     (unwind-protect (progn (atomic-incf **buffer-holders**) ,@body)
       (atomic-decf **buffer-holders**))))

;;; Such a fiber goes on with its buffer even if others have closed the stream: its output would be
;;; that of the next stream. Nobody but it has a buffer that is not recycled.
#-sb-xc-host
(defmacro recycle (buffer list)
  "Add BUFFER to LIST of those that new streams take, unless some fiber may use it still."
  `(when (= **buffer-holders** 0)
     (sb-ext:atomic-push ,buffer ,list)))

;;; A thread that was unwound in between would leave a file that is open, and whose users have been
;;; told that it is closed; or, before CLOSE has noted that it is closed, a number that is closed
;;; again when it is another file's.
#-sb-xc-host
(defmacro closing-descriptor ((fd) &body close)
  "The values of CLOSE, which closes FD by a system call, and notes that it has: fibers that use FD
are told."
  (with-unique-names (mark)
    `(without-interrupts
       (let ((,mark (note-close ,fd)))
         (unwind-protect (progn ,@close)
           (note-closed ,fd ,mark))))))
