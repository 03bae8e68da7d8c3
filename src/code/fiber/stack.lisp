;;;; stacks of fibers, as Lisp handles them

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; Where stacks lie is the business of runtime/fiber-arena.c, which are free that of
;;; runtime/fiber-free.c, how they are guarded that of runtime/fiber-reserve.c. Here a fiber gets
;;; one, and what it starts with is laid out on it.
;;;
;;; What is true when nobody is inside:
;;;  - a fiber has a context from its submission to its end, and while it has one it is in
;;;    the table at the index of its stack;
;;;  - its stack is FREE to the collector until PREPARE-STACK has written what a suspended stack
;;;    consists of, and again after its end, when its successor runs on the carrier.
;;;
;;; The lists of free stacks are C's. The lock on them is a tiny one, taken here: if the collector
;;; could stop a thread that holds it, the collector would wait for ever for a thread that wants a
;;; stack within WITHOUT-GCING.

(declaim (type (unsigned-byte 62) *default-stack-size*))
(define-load-time-global *default-stack-size* (* 256 1024)
  "The size in bytes of the control stack of a fiber that is made without :STACK-SIZE, by default
262144. A global variable: it can be set and not be bound.")

(defmacro context-word (sap slot)
  `(sap-ref-word ,sap (ash ,(symbolicate "FIBER-CONTEXT-" slot "-SLOT") sb-vm:word-shift)))

;;; Slots of the context are numbered in SB-VM.
(macrolet ((import-slots (&rest slots)
             `(eval-when (:compile-toplevel :load-toplevel :execute)
                (import ',(mapcar (lambda (slot)
                                    (package-symbolicate "SB-VM" "FIBER-CONTEXT-" slot "-SLOT"))
                                  slots)))))
  (import-slots "CONTROL-STACK-POINTER" "CONTROL-STACK-START" "CONTROL-STACK-END"
                "BINDING-STACK-START" "BINDING-STACK-POINTER" "MUTEX-OWNER-ID" "MXCSR"
                "STATE-CELL" "GUARDS" "INDEX" "BASE-CATCH-BLOCK"
                "SIGNAL-CONTEXT-COUNT"))

(declaim (inline context-of))
(defun context-of (fiber)
  (int-sap (fiber-context fiber)))

(declaim (inline state-cell))
(defun state-cell (fiber)
  (int-sap (context-word (context-of fiber) state-cell)))

;;; The states, and who makes which move: runtime/fiber-arena.c.
(defun stack-state (fiber)
  (sap-ref-8 (state-cell fiber) 0))

(defun (setf stack-state) (state fiber)
  (setf (sap-ref-8 (state-cell fiber) 0) state))

;;;; the table of the living

;;; Two levels, so that it grows without moving.
(define-load-time-global *fiber-table* (make-array 4096 :initial-element 0))
(declaim (type simple-vector *fiber-table*))

(declaim (ftype (sfunction (t) simple-vector) fiber-table-block))
(defun fiber-table-block (index)
  (declare (type (unsigned-byte 24) index))
  (let ((i (ash index -12)))
    (loop
      (let ((block (svref *fiber-table* i)))
        (when (simple-vector-p block) (return block))
        (sb-vm:without-arena
          (cas (svref *fiber-table* i) 0 (make-array 4096 :initial-element 0)))))))

(defun fiber-at (index)
  "The fiber that lives on the stack number INDEX, or NIL."
  (let ((fiber (svref (fiber-table-block index) (logand index 4095))))
    (and (fiber-p fiber) fiber)))

(defun (setf fiber-at) (fiber index)
  (setf (svref (fiber-table-block index) (logand index 4095)) fiber))

;;;; getting a stack and giving it back

;;; A mutex id is a fixnum's worth of bits that is neither a pointer nor the address of
;;; a thread structure, which is a multiple of 32 KiB: bit 1 tells them apart. The index finds
;;; the owner in the table, the serial number tells it from the fiber that had the stack before.
(define-load-time-global *fiber-serial* 0)
(declaim (fixnum *fiber-serial*))

(defun new-mutex-owner-id (index)
  (let ((serial (atomic-incf *fiber-serial*)))
    (logior (ash (ldb (byte 36 0) serial) 27) (ash index 2) 2)))

(defun fiber-mutex-owner-id-p (word)
  (declare (type word word))
  (logtest word 2))

(defun find-mutex-owner (word)
  "The fiber whose mutex id is WORD, or :THREAD-DEAD."
  (declare (type word word))
  (let* ((fiber (fiber-at (ldb (byte 24 2) word)))
         (context (if fiber (fiber-context fiber) 0))) ; 0 if it ends just now
    (if (and (/= context 0) (= word (context-word (int-sap context) mutex-owner-id)))
        fiber
        :thread-dead)))

;;; Before Linux 6.13 the guards of stacks have mappings of memory of their own.
(define-condition fiber-stack-unavailable (storage-condition)
  ((size :initarg :size :reader fiber-stack-unavailable-size)
   (mapping-limit :initarg :mapping-limit :initform 0
                  :reader fiber-stack-unavailable-mapping-limit))
  (:report (lambda (condition stream)
             (let ((limit (fiber-stack-unavailable-mapping-limit condition)))
               (format stream "~@<There is no room for another fiber's stack of ~D bytes. ~:[~
                               The guards of stacks have nearly all of the ~D mappings of memory ~
                               that the kernel allows this process. Use fewer fibers, or let the ~
                               administrator raise the setting: sysctl -w vm.max_map_count=~D. ~
                               Linux 6.13 and later need no mappings for guards.~;~
                               Use fewer fibers, or more memory.~]~@:>"
                       (fiber-stack-unavailable-size condition)
                       (= limit 0) limit (* 16 limit)))))
  (:documentation "What SUBMIT-FIBER signals if no stack can be had for the fiber, which stays new.
If that is for lack of memory mappings, which guards of stacks need before Linux 6.13, the report
says so."))

(define-load-time-global *stacks-lock* 0)
(declaim (type (integer 0 1) *stacks-lock*))

(defmacro with-stacks-lock (&body body)
  `(with-tiny-lock (*stacks-lock*) ,@body))

(declaim (type (unsigned-byte 62) *cached-stack-bytes*))
(define-load-time-global *cached-stack-bytes* (* 128 1024 1024)
  "How many bytes of memory stacks that no fiber has may keep for the next fibers, about, for each
size of stacks; by default 134217728. What is more is given back to the operating system. A global
variable: it can be set and not be bound.")

;;; The slots of a run belong to nobody but this thread meanwhile. With interrupts off.
(declaim (ftype (sfunction ((unsigned-byte 62)) boolean) trim-one-run))
(defun trim-one-run (bytes)
  "Let a run of free stacks give its memory back, if free stacks have more than BYTES for each size.
Return false if there was none, or it was not possible."
  (let ((run (with-stacks-lock
               (truly-the (unsigned-byte 62)
                          (alien-funcall (extern-alien "fiber_trim_take"
                                                       (function unsigned unsigned))
                                         bytes)))))
    (unless (= run 0)
      (let ((released 0))
        (declare (type (signed-byte 32) released))
        (unwind-protect                 ; the stack may be exhausted
             (setf released (alien-funcall (extern-alien "fiber_trim_release"
                                                         (function int unsigned))
                                           run))
          (with-stacks-lock
            (alien-funcall (extern-alien "fiber_trim_put" (function void unsigned int))
                           run released)
            nil))
        (= released 1)))))

(declaim (ftype (sfunction ((unsigned-byte 62)) null) trim-stacks-to))
(defun trim-stacks-to (bytes)
  (loop while (without-interrupts (trim-one-run bytes))))

(defun trim-stacks ()
  "Give the memory of all stacks that no fiber has back to the operating system, but for those that
carriers keep for themselves, which are at most 64 each. Return no values. It is done without being
asked for what is more than *CACHED-STACK-BYTES*, and when a group is finished."
  (trim-stacks-to 0)
  (values))

;;; It takes longer to give a stack's memory back than to end its fiber. So carriers do so when they
;;; have nothing to run, a run of stacks at a time; and if they always have something, one run for
;;; so many notes, each of which comes when some dozen stacks have been freed.
(defconstant +surplus-notes-per-run+ 128)

(declaim (type (unsigned-byte 61) *surplus-notes*))
(define-load-time-global *surplus-notes* 0) ; 0 if they do not have too much, as far as is known

(defun note-surplus ()
  "Free stacks have more than *CACHED-STACK-BYTES*. With interrupts off."
  (let ((notes (logand (1+ *surplus-notes*) most-positive-fixnum)))
    (setf *surplus-notes* notes)
    (when (= 0 (rem notes +surplus-notes-per-run+))
      (trim-one-run *cached-stack-bytes*))
    nil))

;;; What is noted between the last run and the assignment is noted again by the next to free a
;;; stack, or is less than is worth while.
(defun trim-surplus ()
  "Let a run of free stacks give its memory back, if there are too many. Return false if not. With
interrupts off."
  (and (/= 0 *surplus-notes*)
       (or (trim-one-run *cached-stack-bytes*)
           (progn (setf *surplus-notes* 0) nil))))

(declaim (ftype (sfunction ((unsigned-byte 24)) null) put-stack-back))
(defun put-stack-back (index)
  (when (/= 0 (with-stacks-lock
                (alien-funcall (extern-alien "fiber_stack_put_back" (function int int unsigned))
                               index *cached-stack-bytes*)))
    (note-surplus)))

(defun reserve-stack (size)
  "The index of a stack of SIZE bytes that no other fiber can get, or NIL."
  (declare (type word size))
  (let ((index (with-stacks-lock
                 (alien-funcall (extern-alien "fiber_stack_reserve" (function int unsigned))
                                size))))
    (and (>= index 0) index)))

;;; Raising guards takes a few system calls, and a page fault: so it is done without the lock.
(defun prepare-reserved-stack (index)
  (let ((context 0))
    (declare (type word context))
    (unwind-protect
         (setf context (alien-funcall (extern-alien "fiber_stack_prepare" (function unsigned int))
                                      index))
      (when (= context 0) (put-stack-back index)))
    context))

(declaim (ftype (sfunction (word) word) %allocate-stack))
(defun %allocate-stack (size)
  "The context of a stack of SIZE bytes, or 0. With interrupts off."
  (let ((cached (alien-funcall (extern-alien "fiber_stack_take_cached" (function unsigned unsigned))
                               size)))
    (if (/= cached 0)
        cached
        (allocate-uncached-stack size))))

;;; Others may have taken the mappings that were released for this stack, or the kernel may allow
;;; fewer than it seemed.
(defun allocate-uncached-stack (size)
  (loop
    (let ((index (reserve-stack size)))
      (unless index (return 0))
      (let ((context (prepare-reserved-stack index)))
        (when (or (/= context 0) (not (release-another-stack)))
          (return context))))))

(defun release-another-stack ()
  "Let a free stack do without mappings, if that is why there is none. Return false if none can."
  (/= 0 (with-stacks-lock
          (alien-funcall (extern-alien "fiber_stack_release_another" (function int))))))

(declaim (ftype (sfunction (word) null) %free-stack))
(defun %free-stack (context)
  (when (= 0 (alien-funcall (extern-alien "fiber_stack_retire" (function int unsigned)) context))
    (put-stack-back (context-word (int-sap context) index))))

;;; OS-TID is read-only to all but what makes the thread, which for other threads is C.
(defmacro %instance-os-tid (thread)
  `(%instance-ref ,thread (get-dsd-index sb-thread::thread sb-thread::os-tid)))

(defun allocate-stack (fiber)
  "Give FIBER a stack and enter it into the table. Return false if there is no stack to be had. With
interrupts off."
  (let ((context (%allocate-stack (fiber-stack-size fiber))))
    (unless (= context 0)
      (let* ((sap (int-sap context))
             (index (context-word sap index))
             (there nil))
        (unwind-protect (setf there (fiber-table-block index))
          (unless there (%free-stack context))) ; the heap is exhausted
        (setf (context-word sap mutex-owner-id) (new-mutex-owner-id index)
              (fiber-control-stack-start fiber) (context-word sap control-stack-start)
              (fiber-control-stack-end fiber) (context-word sap control-stack-end)
              (%instance-os-tid fiber) (logior (ash 1 31) index)
              (fiber-context fiber) context
              (fiber-primitive-thread fiber) context
              (fiber-at index) fiber)))))

(defun retire-index (fiber)
  "FIBER is about to leave its stack for good; from now on it is not among the living."
  (setf (fiber-primitive-thread fiber) 0
        (fiber-at (context-word (context-of fiber) index)) 0))

(defun free-stack (fiber)
  "FIBER has left its stack for good and its carrier runs on another: let others use it."
  (let ((context (fiber-context fiber)))
    (setf (fiber-context fiber) 0)
    (%free-stack context)))

;;;; what a fiber starts with

;;; The bindings at the base of each fiber, chosen one by one, since each is exchanged
;;; in every switch. A variable that is only ever bound needs none: the bindings of the carrier
;;; are exchanged too, so that a fiber sees what a fresh thread sees. These variables are also set:
;;;  - *CURRENT-THREAD*;
;;;  - *INTERRUPTS-ENABLED* is NIL at first, so that no handler runs before
;;;    the stack that was left has been published, see AFTER-SWITCH;
;;;  - *DESCRIPTOR-HANDLERS*: handlers belong to the fiber that added them;
;;;  - *EXIT-IN-PROGRESS*: EXIT sets it, and unwinds the fiber that called it.
(defmacro do-base-bindings ((symbol value) fiber &body body)
  `(macrolet ((entry (,symbol ,value) ,(car body)))
     (entry *current-thread* ,fiber)
     (entry *interrupts-enabled* nil)
     (entry sb-impl::*descriptor-handlers* nil)
     (entry *exit-in-progress* nil)))

(defun prepare-stack (fiber)
  "Lay out on the stack of FIBER what the switch finds on that of a suspended one: as
if FIBER had called the switch from FIBER-ENTRY with its base bindings made."
  (with-pinned-objects (fiber)
    (let* ((context (context-of fiber))
           (binding (context-word context binding-stack-start))
           (sp (- (context-word context control-stack-end) 32)))
      (declare (type word binding sp))
      (do-base-bindings (symbol value) fiber
        `(progn
           (setf (sap-ref-lispobj (int-sap binding) (ash sb-vm:binding-value-slot sb-vm:word-shift))
                 ,value
                 (sap-ref-word (int-sap binding) (ash sb-vm:binding-symbol-slot sb-vm:word-shift))
                 (symbol-tls-index ',symbol)
                 binding (+ binding (* sb-vm:binding-size sb-vm:n-word-bytes)))))
      (setf (sap-ref-word (int-sap sp) 0) 0 ; frame pointer
            (sap-ref-word (int-sap sp) 8) (sb-fasl:get-asm-routine 'sb-vm::fiber-entry)
            (context-word context control-stack-pointer) sp
            (context-word context binding-stack-pointer) binding
            ;; as a new OS thread inherits its creator's floating point modes
            (context-word context mxcsr)
            (context-word (sb-vm::current-thread-offset-sap sb-vm::thread-carrier-context-slot)
                          mxcsr))
      (barrier (:write))
      (setf (stack-state fiber) sb-vm::fiber-stack-active)
      nil)))
