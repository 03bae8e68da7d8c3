;;;; calls that block and cannot park: a pool of threads makes them

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; The kernel cannot be asked to look up a name, to open a file or to run foreign code without
;;; waiting. CALL-BLOCKING hands such a call to a thread of the pool, and parks the fiber until it
;;; has an outcome. All groups share one pool. It starts a thread when there are more calls than
;;; idle threads, up to *BLOCKING-THREAD-LIMIT*; a thread that has been idle for +IDLE-SECONDS+
;;; ends.
;;;
;;; What is true when nobody holds the lock of the pool:
;;;  - the semaphore counts the entries of the queue: these are calls, and NIL for each thread that
;;;    is asked to end. They are served in order;
;;;  - IDLE threads will take an entry before they do anything else;
;;;  - there are not more entries than idle threads, unless THREADS is as long as the limit.
;;; The last is restored by STAFF-POOL, after whatever adds an entry or ends a thread. So no call is
;;; left behind, whichever threads end.
;;;
;;;     state of a call             by
;;;     :QUEUED  -> :RUNNING        the thread that takes it
;;;     :QUEUED  -> :ABANDONED      the fiber, as it is unwound; the entry stays, and is skipped
;;;     :RUNNING -> :ENDED          the thread; the outcome is the fiber's
;;;     :RUNNING -> :ABANDONED      the fiber, which then interrupts the thread; the outcome is lost
;;;
;;; A thread whose call was abandoned stays in the pool, and counts, until the call has been
;;; unwound or has returned: there are never more threads than the limit.
;;;
;;; An ephemeral thread in which EXIT is called would end, and leave *EXIT-LOCK* locked. So
;;;  - nothing that FUNCTION does leaves a call but by MAKE-CALL, which lets a thread go on with
;;;    EXIT;
;;;  - signals are blocked but for the calls: an idle thread would handle those of the process,
;;;    SIGTERM above all, at its next call, or at its end.

(defconstant +idle-seconds+ 5)

(declaim (type (integer 1 10000) *blocking-thread-limit*))
(define-load-time-global *blocking-thread-limit* 64
  "The most threads that make calls for CALL-BLOCKING at a time, an integer from 1 to 10000, by
default 64. More calls wait, in order, until a thread is free; so calls that wait for each other
need as many threads as there are of them. A global variable: it can be set and not be bound.")

(defstruct (blocking-call (:constructor make-blocking-call (function))
                          (:copier nil))
  (function nil :type (or null function))
  (state :queued :type symbol)
  (thread nil)
  ;; How it ended: :RETURNED, RESULT being a list of values; :FAILED, RESULT being a condition;
  ;; or :UNWOUND
  (outcome :unwound :type symbol)
  (result nil)
  ;; If it has :FAILED, the frames from its function to the error.
  (frames '() :type list)
  ;; 1 when it is :ENDED
  (ended 0 :type word))
(declaim (freeze-type blocking-call))

(define-structure-slot-addressor blocking-call-ended-address :structure blocking-call :slot ended)

(defstruct (blocking-pool (:constructor make-blocking-pool ())
                          (:copier nil))
  (lock (sb-thread:make-mutex :name "pool of blocking calls") :read-only t)
  ;; Made with the first entry or thread: a semaphore in the saved core would never be collected.
  (entries nil :type (or null sb-thread:semaphore))
  (first '() :type list)
  (last '() :type list)
  ;; How many entries are in the queue. A thread that has passed the semaphore may yet have to take
  ;; its entry.
  (waiting 0 :type index)
  (idle 0 :type index)
  (threads '() :type list))
(declaim (freeze-type blocking-pool))

(define-load-time-global *blocking-pool* (make-blocking-pool))
(declaim (type blocking-pool *blocking-pool*))

;;; The call that the thread makes; an interruption that comes late finds another, or NIL.
(defvar *blocking-call* nil)

(defmacro with-pool-lock ((pool) &body body)
  `(sb-thread::with-system-mutex ((blocking-pool-lock ,pool)) ,@body))

;;;; the queue; all of this with the lock held

;;; Prevents: a fiber that is unwound, by its deadline or as its stack ends, and leaves an entry
;;; that the semaphore does not count, or a thread that the pool does not know.
(defmacro with-whole-pool (&body body)
  `(progn (ensure-waking-room 6144)
          (with-native-waits ,@body)))

(defun add-entry (pool entry)
  (with-whole-pool (sb-vm:without-arena (%add-entry pool entry))))

(defun ensure-semaphore (pool)
  (or (blocking-pool-entries pool)
      (setf (blocking-pool-entries pool) (sb-thread:make-semaphore :name "blocking calls"))))

(defun %add-entry (pool entry)
  (let ((cell (list entry)))
    (if (blocking-pool-first pool)
        (setf (cdr (blocking-pool-last pool)) cell)
        (setf (blocking-pool-first pool) cell))
    (setf (blocking-pool-last pool) cell)
    (incf (blocking-pool-waiting pool))
    (sb-thread:signal-semaphore (ensure-semaphore pool))))

(defun take-entry (pool)
  (decf (blocking-pool-waiting pool))
  (pop (blocking-pool-first pool)))

(defun staff-pool (pool &optional (entries (blocking-pool-waiting pool)))
  "Start a thread if there are more ENTRIES than idle threads and the limit allows it."
  (when (and (> entries (blocking-pool-idle pool))
             (< (length (blocking-pool-threads pool)) *blocking-thread-limit*))
    (with-whole-pool
      (sb-vm:without-arena (ensure-semaphore pool))
      (let ((place (list nil)))
        (setf (car place) (make-carrier-thread "fiber blocking call" #'run-pool-thread pool)
              (cdr place) (blocking-pool-threads pool)
              (blocking-pool-threads pool) place)
        (incf (blocking-pool-idle pool))))))

(defun leave-pool (pool)
  (setf (blocking-pool-threads pool) (delete *current-thread* (blocking-pool-threads pool)))
  (unless *exit-in-progress* (staff-pool pool)))

;;;; the threads

(defun next-call (pool)
  "Take the next call, or return NIL, having left POOL, if the thread is to end."
  (let ((found (sb-thread:wait-on-semaphore (blocking-pool-entries pool) :timeout +idle-seconds+)))
    (with-pool-lock (pool)
      (decf (blocking-pool-idle pool))
      (or (and (or found
                   ;; A thread that has added an entry meanwhile counts on this one.
                   (sb-thread:try-semaphore (blocking-pool-entries pool)))
               (take-entry pool))
          (progn (leave-pool pool) nil)))))

(defun run-pool-thread (pool)
  (catch 'sb-impl::%end-of-the-world
    (serve-pool pool))
  (when *exit-in-progress* (exit-by-thread)))

;;; Interrupts are enabled in the calls only: nothing can unwind the thread in between.
(defun serve-pool (pool)
  (without-interrupts
    (loop
      (handle-late-signals)
      (let ((call (next-call pool))
            (whole nil))
        (unless call (return))
        (unwind-protect (progn (accept-signals)
                               (allow-with-interrupts (make-call call))
                               (setf whole t))
          (refuse-signals)
          (with-pool-lock (pool)
            (if whole
                (incf (blocking-pool-idle pool))
                (leave-pool pool))))))))

(defun handle-late-signals ()
  "Handle what came between the end of a call and the blocking of signals."
  (loop while *interrupt-pending*
        do (catch 'sb-impl::%end-of-the-world
             (catch 'sb-thread::%abort-thread (receive-signals)))
           (when *exit-in-progress* (exit-by-thread))
           (refuse-signals)))

(defun make-call (call)
  "Make CALL, unless it was abandoned. Returns whatever becomes of it."
  (declare (blocking-call call))
  (setf (blocking-call-thread call) *current-thread*)
  (when (eq (cas (blocking-call-state call) :queued :running) :queued)
    (let ((exits nil))
      (unwind-protect
           (setf exits (catch 'sb-impl::%end-of-the-world
                         (catch 'abandoned
                           (catch 'sb-thread::%abort-thread
                             (catch 'sb-thread::%return-from-thread
                               (let ((*blocking-call* call)
                                     (*foreign-frames* +keeps-foreign-frames+))
                                 (call-for-fiber call)))))
                         nil))
        ;; This thread, being ephemeral, would end and leave *EXIT-LOCK* locked. The fiber
        ;; waits for the end of the process.
        (if exits (exit-by-thread) (end-call call))))))

(defun call-for-fiber (call)
  ;; The debugger is what remains if no handler wants a condition that ERROR signals.
  (let ((*invoke-debugger-hook* (lambda (condition hook)
                                  (declare (ignore hook))
                                  (setf (blocking-call-frames call) (frames-of-call)
                                        (blocking-call-result call) condition
                                        (blocking-call-outcome call) :failed)
                                  (return-from call-for-fiber nil))))
    (let ((values (multiple-value-list
                   ;; An exit to a frame of the fiber, which is on another stack, is an error here.
                   (sb-c::inspect-unwinding
                    (with-interrupts (funcall (the function (blocking-call-function call))))
                    #'sb-di::catch-runaway-unwind))))
      (setf (blocking-call-result call) values
            (blocking-call-outcome call) :returned))))

(defun frames-of-call ()
  "The frames of the function that a thread of the pool has called, which has signalled an error."
  (ignore-errors
    (let* ((frames (sb-debug:list-backtrace :count 100))
           (first (or (rest (member 'invoke-debugger frames :key #'car)) frames)))
      (ldiff first (member 'call-for-fiber first :key #'car)))))

(defun end-call (call)
  (setf (blocking-call-function call) nil) ; which could keep much from being collected
  (when (eq (cas (blocking-call-state call) :running :ended) :running)
    (with-pinned-objects (call)
      (setf (blocking-call-ended call) 1)
      (wake-on-word (blocking-call-ended-address call) 1))))

;;;; the fiber's side

(declaim (ftype (sfunction ((or symbol function)) *) call-blocking))
(defun call-blocking (function)
  "Call FUNCTION, a function without arguments or the name of one, in a thread of a pool, and
return its values. The fiber is parked meanwhile, and its carrier runs others.

* FUNCTION runs in another thread: it sees the global values of special variables and not the
  bindings of the fiber, it does not own the mutexes of the fiber, and SB-THREAD:*CURRENT-THREAD*
  is a thread.

* Handlers and restarts of the fiber are not seen by FUNCTION. An error that nothing in FUNCTION
  handles unwinds it, and then the same condition object is signaled in the fiber, by ERROR, where
  handlers of the fiber see it.

* If FUNCTION unwinds its thread, by SB-THREAD:ABORT-THREAD or the restart ABORT for instance, a
  SB-THREAD:THREAD-ERROR is signaled in the fiber. An exit to a block or tag of the fiber, which
  is on another stack, unwinds FUNCTION, and a CONTROL-ERROR is signaled in the fiber.

* If the fiber is unwound while it waits, by TERMINATE-FIBER, a time-out, a deadline, or an
  interruption, it does not wait for FUNCTION. If that has not begun it is never called. Otherwise
  its thread is interrupted and unwinds it, running cleanup forms, as soon as that has interrupts
  enabled and is not in foreign code; its values and errors are lost. Until then the thread is not
  available for other calls.

In a thread that runs no fiber, and where the fiber must not leave its carrier, FUNCTION is just
called."
  (let ((function (coerce function 'function)))
    (if (can-park-p)
        (let ((call (make-blocking-call function)))
          (ensure-waking-room 4096)
          (without-interrupts           ; it is abandoned once the fiber is being unwound
            (unwind-protect (with-local-interrupts (wait-for-call call))
              (abandon-call call)))
          (call-outcome call))
        (funcall function))))

;;; A library of C that is unwound may leave its locks taken behind it.
(defun call-uninterrupted (function argument)
  "As CALL-BLOCKING, but if the fiber is unwound, FUNCTION, called with ARGUMENT, is left alone
until it returns."
  (declare (function function))
  (call-blocking (lambda () (without-interrupts (funcall function argument)))))

(defun queue-call (call)
  (let ((pool *blocking-pool*))
    (with-pool-lock (pool)
      (add-entry pool call)
      (staff-pool pool))))

(defun pool-has-thread-p ()
  "Is there a thread that would make one more call at once? It is started if need be."
  (let ((pool *blocking-pool*))
    (with-pool-lock (pool)
      (let ((entries (1+ (blocking-pool-waiting pool))))
        (handler-case (progn (staff-pool pool entries)
                             (<= entries (blocking-pool-idle pool)))
          (error () nil))))))           ; no memory for a thread, perhaps

(defun wait-for-call (call)
  (let ((function (blocking-call-function call))) ; END-CALL forgets it
    (queue-call call)
    (with-pinned-objects (call)
      (waiting-for function
        (wait-while-equal call (blocking-call-ended-address call) 0 nil)))))

(defun abandon-call (call)
  "If CALL has not ended, no fiber waits for it any more: let it be skipped, or be unwound."
  (unless (or (eq (blocking-call-state call) :ended)
              (eq (cas (blocking-call-state call) :queued :abandoned) :queued))
    (when (eq (cas (blocking-call-state call) :running :abandoned) :running)
      (with-native-waits
        (sb-thread::%interrupt-thread
         (blocking-call-thread call)
         (lambda () (when (eq *blocking-call* call) (throw 'abandoned nil))))))))

(defun call-outcome (call)
  (let ((result (blocking-call-result call)))
    (ecase (blocking-call-outcome call)
      (:returned (values-list result))
      (:failed
       (let ((*failure-of-blocking-call* (cons result (blocking-call-frames call))))
         (error result)))
      (:unwound
       (error 'sb-thread::simple-thread-error
              :thread (blocking-call-thread call)
              :format-control "~@<The function given to CALL-BLOCKING did not return, but unwound ~
                               its thread, ~S.~:@>"
              :format-arguments (list (blocking-call-thread call)))))))

;;;; stopping

(defun dismiss-idle-threads ()
  "Ask the threads that have nothing to do to end."
  (let ((pool *blocking-pool*))
    (with-pool-lock (pool)
      (loop repeat (- (blocking-pool-idle pool)
                      (blocking-pool-waiting pool))
            do (add-entry pool nil)))))

(defun stop-pool ()
  "End the threads of the pool before an image is saved; the next call starts others. No fiber is
alive, so that all calls there are have been abandoned."
  (dismiss-idle-threads)
  (dolist (thread (blocking-pool-threads *blocking-pool*))
    (when (eq :timeout (nth-value 1 (sb-thread:join-thread thread :default nil :timeout 10)))
      (error "~@<Cannot save a core while a call goes on that a fiber made by CALL-BLOCKING, and ~
              then abandoned: ~S.~:@>" thread)))
  (setf *blocking-pool* (make-blocking-pool)))
