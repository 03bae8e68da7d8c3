;;;; a fiber from its making to its end, as users see it

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

(define-load-time-global *default-group* nil)
(declaim (type (or null fiber-group) *default-group*))

(define-load-time-global *fiber-storage-lock* (sb-thread:make-mutex :name "fiber memory"))

(define-condition fiber-failed (sb-thread:join-thread-error)
  ((cause :initarg :cause :reader %fiber-failed-cause))
  (:report (lambda (condition stream)
             (format stream "Joining ~S failed: it ended with~%~@<  ~@;~A~:>"
                     (sb-thread:thread-error-thread condition)
                     (fiber-failed-cause condition))))
  (:documentation "The error that FIBER-JOIN signals for a fiber that was ended by an error that
nothing handled. FIBER-FAILED-CAUSE returns that."))

(defun fiber-failed-cause (condition)
  "Return the condition that ended the fiber that CONDITION, of type FIBER-FAILED, is about."
  (%fiber-failed-cause condition))

;;;; the fiber

(declaim (ftype (sfunction ((or symbol function)
                            &key (:name t) (:arguments t) (:stack-size unsigned-byte)
                                 (:initial-bindings list))
                           fiber)
                make-fiber))
(defun make-fiber (function &key name arguments (stack-size *default-stack-size*) initial-bindings)
  "Return a new fiber that will call FUNCTION, a function or the name of one, with ARGUMENTS, a
list of arguments, or one argument that is no list. It does so when SUBMIT-FIBER, START-FIBERS or
RUN-FIBERS has submitted it and a carrier is free.

NAME is a string designator, or NIL. STACK-SIZE is the size of the control stack in bytes, an
integer from 65536 to 1073741824, by default *DEFAULT-STACK-SIZE*; it is rounded up to a power of
two. INITIAL-BINDINGS is a list of conses of a symbol and a value, and of symbols: the fiber begins
with these symbols bound to these values, or to the values that they have where MAKE-FIBER is
called; of several entries for a symbol the first counts. The lists are copied, and may be changed
afterwards.

A TYPE-ERROR is signaled if one of these is something else, an UNDEFINED-FUNCTION error if FUNCTION
is a symbol that names none, and an UNBOUND-VARIABLE error if there is no value to be inherited. A
new fiber takes no stack and no other resource; if it is never submitted, it is garbage."
  (declare (explicit-check))
  (let ((function (function-with-arguments (fiber-function-argument function) arguments)))
    (unless (typep stack-size `(integer ,(* 64 1024) ,(ash 1 30)))
      (error 'simple-type-error
             :datum stack-size :expected-type `(integer ,(* 64 1024) ,(ash 1 30))
             :format-control "~@<The stack size ~S is not an integer between 64 KiB and 1 GiB.~:@>"
             :format-arguments (list stack-size)))
    (%make-fiber (and name (possibly-base-stringize-to-heap (string name)))
                 *fiber-storage-lock* function stack-size
                 (and initial-bindings (check-initial-bindings initial-bindings)))))

(defun fiber-function-argument (function)
  (typecase function
    (function function)
    ((and symbol (not null)) (coerce function 'function))
    (t (error 'simple-type-error
              :datum function :expected-type '(or function symbol)
              :format-control "~@<~S is not a function to be run by a fiber; give MAKE-FIBER a ~
                               function or its name, and :ARGUMENTS if it takes any.~:@>"
              :format-arguments (list function)))))

(defun function-with-arguments (function arguments)
  "A function without arguments that calls FUNCTION with ARGUMENTS. A list of these is copied."
  (declare (function function))
  (unless (or (atom arguments) (proper-list-p arguments))
    (error 'simple-type-error
           :datum arguments :expected-type 'list
           :format-control "~@<The arguments ~S of a fiber's function are an improper list.~:@>"
           :format-arguments (list arguments)))
  (if arguments
      (let ((arguments (copy-list (ensure-list arguments))))
        (lambda () (apply function arguments)))
      function))

(defun check-initial-bindings (bindings)
  "An alist of what BINDINGS stand for: the first entry for a symbol counts."
  (flet ((variable (entry)
           (if (consp entry) (car entry) entry))
         (binding (entry)
           (if (consp entry) (cons (car entry) (cdr entry)) (cons entry (symbol-value entry)))))
    (unless (and (proper-list-p bindings)
                 (every (lambda (entry)
                          (let ((variable (variable entry)))
                            (and (symbolp variable) (not (constantp variable)))))
                        bindings))
      (error 'simple-type-error
             :datum bindings :expected-type 'list
             :format-control "~@<The initial bindings ~S are not a list of names of variables, and ~
                              of conses of such a name and a value.~:@>"
             :format-arguments (list bindings)))
    (mapcar #'binding (remove-duplicates bindings :key #'variable :from-end t))))

(declaim (ftype (sfunction (fiber) (or null string)) fiber-name))
(defun fiber-name (fiber)
  "Return the name of FIBER, a string or NIL."
  (fiber-%name fiber))

(setf (documentation 'fiber-group 'function)
      "Return the group that INSTANCE, a fiber, was submitted to; NIL if it was not submitted, or
has ended. A fiber that has ended keeps nothing alive but its values, or the error that ended it.")

(declaim (ftype (sfunction (fiber) (values symbol t)) fiber-state))
(defun fiber-state (fiber)
  "Return the state of FIBER, a keyword, and as second value what it waits for if it is parked,
else NIL. Both may have changed by the time that they are returned. The states are

  :NEW
    It was not submitted.
  :RUNNABLE
    It waits for a carrier.
  :RUNNING
    A carrier runs it.
  :PARKED
    It waits for what the second value tells.
  :FINISHED
    Its function returned.
  :ABORTED
    It ended abnormally.

What a parked fiber waits for is told by a list of a keyword and an object, or by a keyword alone
if there is no object, or by the REASON of FIBER-PARK, by default :PARK. Of several, as when a
mailbox waits by a semaphore, that is told which the code of the fiber itself knows.

  :SLEEP
    until a time has come
  :POLL
    until one of several file descriptors is ready
  :DEBUGGER
    until it gets the foreground, so as to enter the debugger as a rule
  (:READ NUMBER), (:WRITE NUMBER)
    until a file descriptor is ready
  (:MUTEX MUTEX)
    to get a mutex
  (:CONDITION-VARIABLE WAITQUEUE)
    in CONDITION-WAIT
  (:SEMAPHORE SEMAPHORE)
    in WAIT-ON-SEMAPHORE
  (:GATE GATE), (:MAILBOX MAILBOX)
    in SB-CONCURRENCY:WAIT-ON-GATE and SB-CONCURRENCY:RECEIVE-MESSAGE
  (:JOIN THREAD)
    for the end of a fiber or another thread
  (:GROUP GROUP)
    in FINISH-FIBERS
  (:SCOPE SCOPE)
    for the end of the fibers of a scope
  (:CALL-BLOCKING FUNCTION)
    until a thread has called a function"
  (let ((phase (fiber-phase-only fiber)))
    (cond ((= phase +new+) (values :new nil))
          ((= phase +dead+) (values (if (listp (fiber-result fiber)) :finished :aborted) nil))
          ((= phase +active+) (values (if (fiber-carrier fiber) :running :runnable) nil))
          (t (values :parked (what-it-waits-for fiber))))))

(declaim (ftype (sfunction (fiber) boolean) fiber-alive-p))
(defun fiber-alive-p (fiber)
  "Return true if FIBER has not ended. A new fiber is alive."
  (/= (fiber-phase-only fiber) +dead+))

(declaim (ftype (sfunction () boolean) fiber-can-park-p))
(defun fiber-can-park-p ()
  "Return true if what waits here parks a fiber: one is running, and it is at no place where it
must not leave its carrier."
  (can-park-p))

(defmacro with-fiber-pinned (&body body)
  "Execute BODY such that a fiber that parks in it is resumed by the same thread of the operating
system, and return its values. For foreign libraries that keep something for each thread. In a
thread that runs no fiber, the same as PROGN."
  (with-unique-names (thunk)
    `(dx-flet ((,thunk () ,@body))
       (call-with-fiber-pinned #',thunk))))

(defun call-with-fiber-pinned (function)
  (declare (function function) (dynamic-extent function))
  (let ((fiber (current-fiber)))
    (if fiber
        (let ((outer (fiber-pin-count fiber)))
          (unwind-protect
               (progn (setf (fiber-pin-count fiber) (1+ outer))
                      (funcall function))
            (setf (fiber-pin-count fiber) outer)))
        (funcall function))))

;;;; submitting and joining

(declaim (ftype (sfunction (t t) fiber) submit-fiber))
(defun submit-fiber (group fiber)
  "Let the carriers of GROUP run FIBER, which is new, and return FIBER. GROUP is what START-FIBERS
returned, or T for the default group; without a default group a PROGRAM-ERROR is signaled.

Signals a SB-THREAD:THREAD-ERROR if FIBER was submitted before or has ended, and if GROUP is
finished or about to be. If no stack can be had for FIBER, a FIBER-STACK-UNAVAILABLE, which is a
STORAGE-CONDITION, is signaled, and FIBER stays new."
  (let ((group (group-argument group)))
    (unless (fiber-p fiber)
      (error 'simple-type-error :datum fiber :expected-type 'fiber
             :format-control "~@<~S is not a fiber; MAKE-FIBER makes one.~:@>"
             :format-arguments (list fiber)))
    ;; A fiber that is counted and not queued would never end.
    (ensure-waking-room 3072)
    (without-interrupts
      (allow-with-interrupts (enter-group group fiber))
      (make-runnable fiber))
    fiber))

;;; For who has promised something by then.
(defun submit-deaf (group fiber)
  "As SUBMIT-FIBER, but the function of FIBER begins with interrupts off, and in any case: it hears
that FIBER is to end, or was cancelled, where it turns them on, or waits."
  (set-fiber-flag fiber +begins-deaf+)
  (submit-fiber group fiber))

(defun group-argument (group)
  (cond ((fiber-group-p group) group)
        ((eq group t)
         (or *default-group*
             (error 'simple-program-error
                    :format-control "~@<There is no default group of fibers: call (START-FIBERS) ~
                                     first.~:@>")))
        (t (error 'simple-type-error :datum group :expected-type '(or fiber-group (eql t))
                  :format-control "~@<~S is not a group of fibers; START-FIBERS returns one.~:@>"
                  :format-arguments (list group)))))

(defun misuse (fiber control &rest arguments)
  (with-interrupts
    (error 'sb-thread::simple-thread-error :thread fiber
           :format-control control :format-arguments arguments)))

(defun enter-group (group fiber)
  (unless (phase-becomes-p fiber +new+ +claimed+) ; no other thread submits it now
    (misuse fiber "~@<~S has been submitted already; make another fiber to call its function ~
                   again.~:@>" fiber))
  (let ((alive (enter-population group)) (done nil) (limit 0))
    (unless alive
      (setf (fiber-phase fiber) +new+)
      (misuse fiber "~@<~S cannot run in ~S, which is finished or about to be; START-FIBERS starts ~
                     another group.~:@>" fiber group))
    (unwind-protect (progn (provide-queues group alive)
                           (setf done (allocate-stack fiber)))
      (unless done
        (setf limit (alien-funcall (extern-alien "fiber_mappings_exhausted" (function unsigned)))
              (fiber-phase fiber) +new+)
        (leave-entry group)
        (leave-group group)))
    (unless done
      (with-interrupts
        (error 'fiber-stack-unavailable :size (fiber-stack-size fiber) :mapping-limit limit))))
  (setf (fiber-group fiber) group
        (fiber-phase fiber) +active+)
  (leave-entry group))

(declaim (ftype (sfunction (fiber &key (:default t) (:timeout (or null (real 0)))) *) fiber-join))
(defun fiber-join (fiber &key (default nil defaultp) timeout)
  "Wait until FIBER has ended, at most TIMEOUT seconds, a non-negative real, or without limit if
that is NIL, and return the values of its function. Any number of threads and fibers may join a
fiber.

If the time is over, or FIBER ended abnormally, return DEFAULT, and as second value :TIMEOUT or
:ABORT; if DEFAULT is not given, signal a SB-THREAD:JOIN-THREAD-ERROR, which is a FIBER-FAILED if
it was an error that ended FIBER.

FIBER must have been submitted, or terminated: before SUBMIT-FIBER has returned a
SB-THREAD:THREAD-ERROR is signaled, also if DEFAULT is given, or FIBER is joined, if another thread
is submitting it just then. A fiber that joins itself is signaled a SB-THREAD:JOIN-THREAD-ERROR."
  (when (eq fiber *current-thread*)
    (error 'sb-thread:join-thread-error :thread fiber :problem :self-join))
  ;; It has a context once its submission cannot fail any more, and keeps it until it is dead: while
  ;; another thread submits it, either may happen.
  (unless (or (/= (fiber-context fiber) 0) (not (fiber-alive-p fiber)))
    (misuse fiber "~@<~S was not submitted, and would never end: SUBMIT-FIBER lets it run, and ~
                   then it can be joined.~:@>" fiber))
  (let ((problem (cond ((not (wait-for-end fiber timeout)) :timeout)
                       ((not (listp (fiber-result fiber))) :abort))))
    (cond ((not problem) (values-list (fiber-result fiber)))
          (defaultp (values default problem))
          ((and (eq problem :abort) (see-failure-of-scope) (fiber-failure fiber))
           (error 'fiber-failed :thread fiber :problem :abort :cause (fiber-failure fiber)))
          (t (error 'sb-thread:join-thread-error :thread fiber :problem problem)))))

(declaim (ftype (sfunction (fiber &key (:default t) (:timeout (or null (real 0)))) *) join-fiber))
(defun join-fiber (fiber &rest options &key default timeout)
  "The same as FIBER-JOIN, by the name that goes with SB-THREAD:JOIN-THREAD, with the same FIBER,
DEFAULT and TIMEOUT."
  (declare (ignore default timeout) (dynamic-extent options))
  (apply #'fiber-join fiber options))

(defun wait-for-end (fiber timeout)
  (wait-while-equal fiber (fiber-flags-address fiber) 0 timeout))

(defun wait-while-equal (object address value timeout)
  "Wait until the word at ADDRESS, in the pinned OBJECT, is not VALUE. Return false if TIMEOUT
seconds are over before."
  (with-pinned-objects (object)
    (until-time-limit (limit timeout)
      (unless (= (sap-ref-32 (int-sap address) 0) value) (return t))
      ;; Also for no time: a fiber that polls lets others run.
      (waiting-for object
        (multiple-value-call #'wait-on-word address value (time-left limit))))))

;;;; interrupting

(declaim (ftype (sfunction (fiber function) null) interrupt-fiber))
(defun interrupt-fiber (fiber function)
  "Let FIBER call FUNCTION, without arguments, and then go on with what it was doing. In
WITHOUT-INTERRUPTS, and in foreign code, FUNCTION is called when FIBER leaves that. Signals a
SB-THREAD:INTERRUPT-THREAD-ERROR if FIBER has ended. All that is said of
SB-THREAD:INTERRUPT-THREAD, which does the same, holds for this. Returns NIL at once."
  (unless (%interrupt-fiber fiber function)
    (error 'sb-thread:interrupt-thread-error :thread fiber))
  nil)

(declaim (ftype (sfunction (fiber) null) terminate-fiber))
(defun terminate-fiber (fiber)
  "End FIBER by unwinding its stack from wherever it is: cleanup forms run, and joining FIBER finds
it aborted. Does not wait for that. A new fiber ends at once, and cannot be submitted. Signals a
SB-THREAD:INTERRUPT-THREAD-ERROR if FIBER has ended. SB-THREAD:TERMINATE-THREAD, all that is said
of which holds for this, does the same to a fiber that was submitted. Returns NIL."
  (unless (without-interrupts ; nothing else moves it from +CLAIMED+
            (when (phase-becomes-p fiber +new+ +claimed+)
              (declare-dead fiber)
              t))
    (interrupt-fiber fiber #'sb-thread:abort-thread))
  nil)

;;;; what users park for

(declaim (ftype (sfunction ((real 0)) null) fiber-sleep))
(defun fiber-sleep (seconds)
  "Sleep for SECONDS, a non-negative real, and return NIL: the same as SLEEP."
  (sleep seconds))

(declaim (ftype (sfunction (&key (:timeout (or null (real 0))) (:reason t)) boolean) fiber-park))
(defun fiber-park (&key timeout (reason :park))
  "Park the running fiber until FIBER-UNPARK is called on it, and return true; at once if that has
been done since it last returned from here. Return NIL if TIMEOUT seconds, a non-negative real, are
over before. REASON is any object, which FIBER-STATE and the printed representation of the fiber
show; it is not shown inside of what another fiber waits for. Signals a SB-THREAD:THREAD-ERROR
where the fiber cannot park, and in a thread that runs none."
  (unless (can-park-p)
    (misuse *current-thread* "~@<~S cannot park here: ~:[it is no fiber~;it must not leave its ~
                              carrier~].~:@>" *current-thread* (in-fiber-p)))
  (let ((fiber (truly-the fiber *current-thread*)))
    (until-time-limit (limit timeout)
      (when (clear-fiber-flag fiber +user-permit+) (return t))
      (see-cancellation fiber)
      (without-interruptions ; also for no time: a fiber that polls lets others run
        (park (if (typep reason '(or function instance)) (make-user-reason reason) reason) limit))
      (see-interruptions fiber))))

(declaim (ftype (sfunction (fiber) null) fiber-unpark))
(defun fiber-unpark (fiber)
  "End the FIBER-PARK of FIBER, which has been submitted, or the next one if it is not parked
there. May be called from any thread or fiber. Several calls before FIBER returns from there count
as one."
  (ensure-waking-room 3072)
  (without-interruptions ; unwound in between, it would leave FIBER asleep
    (set-fiber-flag fiber +user-permit+)
    (unpark fiber)))

(declaim (ftype (sfunction (function &key (:timeout (or null (real 0)))) t) fiber-wait-for))
(defun fiber-wait-for (predicate &key timeout)
  "Wait until PREDICATE, a function without arguments, returns true, and return that; return NIL if
TIMEOUT seconds, a non-negative real, are over before. PREDICATE is called after ever longer
pauses, of a tenth of a second in the end, as by SB-EXT:WAIT-FOR: where it is known who makes it
true, FIBER-UNPARK or a condition variable is better."
  (values (sb-thread::%wait-for predicate timeout)))
