;;;; fibers and groups of carriers, as users see them

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; The life of a group:
;;;
;;;   :RUNNING   fibers may be submitted
;;;   :STOPPED   carriers end; set by FINISH-FIBERS when no fiber is alive, or no more is to run
;;;
;;; ALIVE counts the fibers from submission to end. Who waits for the end of all waits in the
;;; parking lot for its low half to change, as for a word of a mutex; it is the last
;;; fiber that wakes him.

(define-structure-slot-addressor fiber-ended-address :structure fiber :slot ended)
(define-structure-slot-addressor fiber-group-alive-address :structure fiber-group :slot alive)

(define-load-time-global *default-group* nil)
(declaim (type (or null fiber-group) *default-group*))

;;; The groups that have carriers.
(define-load-time-global *groups* '())
(declaim (type list *groups*))

(define-load-time-global *fiber-storage-lock* (sb-thread:make-mutex :name "fiber memory"))

(define-condition fiber-failed (sb-thread:join-thread-error)
  ((cause :initarg :cause :reader fiber-failed-cause))
  (:report (lambda (condition stream)
             (format stream "Joining ~S failed: it ended with~@:_~@<  ~@;~A~:>"
                     (sb-thread:thread-error-thread condition)
                     (fiber-failed-cause condition))))
  (:documentation "Signalled by FIBER-JOIN when the fiber was ended by an error that nothing handled.
FIBER-FAILED-CAUSE is that error."))

;;;; the fiber

(defmethod print-object ((fiber fiber) stream)
  (print-unreadable-object (fiber stream :type t :identity t)
    (multiple-value-bind (state reason) (fiber-state fiber)
      (format stream "~@[~S ~]~(~A~)~@[ on ~A~]" (fiber-%name fiber) state
              (typecase reason
                (null nil)
                (fd-cell (format nil "descriptor ~D" (fd-cell-fd reason)))
                (cons "a lock, with a time-out") ; its owner's, and on its stack
                (t reason))))))

(declaim (ftype (sfunction ((or symbol function) &key (:name t) (:stack-size unsigned-byte)
                                                 (:initial-bindings list))
                           fiber)
                make-fiber))
(defun make-fiber (function &key name (stack-size *default-stack-size*) initial-bindings)
  "Return a new fiber that will call FUNCTION, a function designator, without arguments once it has
been submitted. NAME is a string or NIL. STACK-SIZE is in bytes of control stack, at least 64 KiB and
at most 1 GiB; it is rounded up. INITIAL-BINDINGS is an alist of symbols and the values
to which they are bound in the fiber."
  (declare (explicit-check))
  (let ((function (fiber-function-argument function)))
    (unless (typep stack-size `(integer ,(* 64 1024) ,(ash 1 30)))
      (error 'simple-type-error
             :datum stack-size :expected-type `(integer ,(* 64 1024) ,(ash 1 30))
             :format-control "~@<The stack size ~S is not an integer between 64 KiB and 1 GiB.~:@>"
             :format-arguments (list stack-size)))
    (%make-fiber (and name (possibly-base-stringize-to-heap (string name)))
                 *fiber-storage-lock* function stack-size
                 (check-initial-bindings initial-bindings))))

(defun fiber-function-argument (function)
  (typecase function
    (function function)
    ((and symbol (not null)) (coerce function 'function))
    (t (error 'simple-type-error
              :datum function :expected-type '(or function symbol)
              :format-control "~@<~S is not a function to be run by a fiber; give MAKE-FIBER a ~
                               function without arguments.~:@>"
              :format-arguments (list function)))))

(defun check-initial-bindings (bindings)
  (unless (and (proper-list-p bindings)
               (every (lambda (entry) (and (consp entry) (symbolp (car entry)))) bindings))
    (error 'simple-type-error
           :datum bindings :expected-type 'list
           :format-control "~@<The initial bindings ~S are not a list of conses of a symbol and ~
                            a value.~:@>"
           :format-arguments (list bindings)))
  (copy-alist bindings))

(declaim (ftype (sfunction (fiber) (or null string)) fiber-name))
(defun fiber-name (fiber)
  "The name of FIBER, a string or NIL."
  (fiber-%name fiber))

(declaim (ftype (sfunction (fiber) (values symbol t)) fiber-state))
(defun fiber-state (fiber)
  "The state of FIBER: :NEW, :RUNNABLE, :RUNNING, :PARKED, :FINISHED, or :ABORTED, and
as second value what it waits for if it is parked. It may have changed when this returns."
  (let ((phase (fiber-phase-only fiber)))
    (cond ((= phase +new+) (values :new nil))
          ((= phase +dead+) (values (if (listp (fiber-result fiber)) :finished :aborted) nil))
          ((= phase +active+) (values (if (fiber-carrier fiber) :running :runnable) nil))
          (t (values :parked (fiber-wait-reason fiber))))))

(declaim (ftype (sfunction (fiber) boolean) fiber-alive-p))
(defun fiber-alive-p (fiber)
  "True if FIBER has not ended."
  (/= (fiber-phase-only fiber) +dead+))

(declaim (ftype (sfunction () boolean) fiber-can-park-p))
(defun fiber-can-park-p ()
  "True if what waits here parks a fiber: one is running, and it is in no place where it must not
leave its carrier."
  (can-park-p))

(defmacro with-fiber-pinned (&body body)
  "Execute BODY such that a fiber that parks in it is resumed by the same OS thread. In a thread
that runs no fiber this is PROGN."
  (with-unique-names (thunk)
    `(dx-flet ((,thunk () ,@body))
       (call-with-fiber-pinned #',thunk))))

(defun call-with-fiber-pinned (function)
  (declare (function function) (dynamic-extent function))
  (let ((fiber (current-fiber)))
    (if fiber
        (unwind-protect
             (progn (incf (fiber-pin-count fiber))
                    (funcall function))
          (decf (fiber-pin-count fiber)))
        (funcall function))))

;;;; a fiber's first and last moments

;;; The catch tags are those of a thread, see RUN in target-thread.lisp; 'FIBER-LOST is where
;;; a fiber without any stack left is cut back to.
(defun %run-fiber ()
  (after-switch)
  (let ((fiber (truly-the fiber *current-thread*)))
    (catch 'fiber-lost
      (setf (context-word (context-of fiber) base-catch-block)
            (get-lisp-obj-address sb-vm:*current-catch-block*))
      ;; CATCH-RUNAWAY-UNWIND takes the end of the chain of cleanups for the end of the
      ;; stack: the catch tags of the fiber must lie within one.
      (unwind-protect
           (progn (setq *interrupts-enabled* t)
                  (call-fiber-function fiber))
        (setq *interrupts-enabled* nil)))
    (setq *interrupts-enabled* nil) ; FIBER-LOST does not pass the cleanup
    (when (eq (fiber-failure fiber) t) (report-loss fiber))
    (end-fiber fiber)))

(defun report-loss (fiber)
  (setf (fiber-failure fiber) (make-condition 'fiber-stack-lost :fiber fiber))
  (ignore-errors
    (format *error-output* "~&~A~%" (fiber-failure fiber))
    (finish-output *error-output*)))

(defun call-fiber-function (fiber)
  (when *interrupt-pending* (sb-unix::receive-pending-interrupt))
  (catch 'sb-impl::toplevel-catcher
    (catch 'sb-impl::%end-of-the-world
      (catch 'sb-thread::%abort-thread
        (restart-bind ((abort (lambda () (throw 'sb-thread::%abort-thread nil))
                         :report-function
                         (lambda (stream) (format stream "~@<abort fiber (~a)~@:>" fiber))))
          (setf (fiber-result fiber)
                (multiple-value-list
                 (catch 'sb-thread::%return-from-thread
                   (sb-c::inspect-unwinding
                    (call-with-initial-bindings fiber)
                    #'sb-di::catch-runaway-unwind))))))))
  (when *exit-in-progress* (exit-from-thread)))

;;; EXIT has unwound the fiber that called it. What comes next is for a thread: it waits
;;; for the others, and ends the process in the main one.
(defun exit-from-thread ()
  (let ((code (shiftf *exit-in-progress* nil))
        (timeout *exit-timeout*))
    (when (sb-thread:holding-mutex-p sb-impl::*exit-lock*)
      (sb-thread:release-mutex sb-impl::*exit-lock*))
    (sb-thread:make-thread (lambda () (exit :code code :timeout timeout)) :name "exit")))

(defun call-with-initial-bindings (fiber)
  (let ((function (the function (shiftf (fiber-function fiber) nil)))
        (bindings (shiftf (fiber-initial-bindings fiber) nil)))
    (run-allowed-interruptions fiber)
    (if bindings
        (progv (mapcar #'car bindings) (mapcar #'cdr bindings)
          (funcall function))
        (funcall function))))

;;; Once the fiber is dead, it may be joined and forgotten, while it still runs here: what
;;; comes after is between the carrier and the stack.
(defun end-fiber (fiber)
  (let ((group (truly-the fiber-group (fiber-group fiber))))
    (declare-dead fiber)
    (leave-group group)
    (leave :end)
    (bug "A fiber was resumed after its end.")))

(defun declare-dead (fiber)
  (setf (fiber-function fiber) nil
        (fiber-initial-bindings fiber) nil
        (fiber-interruptions fiber) nil
        (sb-thread::thread-waiting-for fiber) nil)
  (loop (let ((phase (fiber-phase fiber)))
          (when (phase-becomes-p fiber phase +dead+) (return))))
  ;; Who has joined it must not find it among the living.
  (unless (= (fiber-context fiber) 0) (retire-index fiber))
  (setf (fiber-ended fiber) 1)
  (with-pinned-objects (fiber)
    (wake-on-word (fiber-ended-address fiber) (ash 1 29))))

(defun leave-group (group)
  (when (= (atomic-decf (fiber-group-alive group)) 1)
    (with-pinned-objects (group)
      (wake-on-word (fiber-group-alive-address group) (ash 1 29)))))

;;; Called by the runtime in place of what ran into the hard guard.
(defun fiber-stack-lost ()
  (setf (fiber-failure (truly-the fiber *current-thread*)) t) ; there is no room for more
  (throw 'fiber-lost nil))

(define-condition fiber-stack-lost (storage-condition)
  ((fiber :initarg :fiber :reader fiber-stack-lost-fiber))
  (:report (lambda (condition stream)
             (format stream "~@<~S has used up a stack and its reserve as well, and ended without ~
                             running its cleanup forms.~:@>"
                     (fiber-stack-lost-fiber condition))))
  (:documentation "What FIBER-FAILED-CAUSE returns for a fiber that exhausted a stack while it handled
the exhaustion."))

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

;;;; submitting and joining

(declaim (ftype (sfunction (t t) fiber) submit-fiber))
(defun submit-fiber (group fiber)
  "Let the carriers of GROUP run FIBER, which is new, and return it. GROUP is what START-FIBERS
returned, or T for the default group. Signals an error if FIBER was submitted before or
GROUP is finished, and FIBER-STACK-UNAVAILABLE, a STORAGE-CONDITION, if there is no stack to be had."
  (let ((group (group-argument group)))
    (unless (fiber-p fiber)
      (error 'simple-type-error :datum fiber :expected-type 'fiber
             :format-control "~@<~S is not a fiber; MAKE-FIBER makes one.~:@>"
             :format-arguments (list fiber)))
    (enter-group group fiber)
    (without-interruptions (make-runnable fiber))
    fiber))

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
  (error 'sb-thread::simple-thread-error :thread fiber
         :format-control control :format-arguments arguments))

(defun enter-group (group fiber)
  (unless (phase-becomes-p fiber +new+ +parking+) ; nobody else submits it now
    (misuse fiber "~@<~S has been submitted already; make another fiber to call its function ~
                   again.~:@>" fiber))
  (atomic-incf (fiber-group-alive group))
  (handler-bind ((storage-condition (lambda (condition)
                                      (declare (ignore condition))
                                      (undo-enter-group group fiber))))
    (unless (eq (fiber-group-state group) :running)
      (undo-enter-group group fiber)
      (misuse fiber "~@<~S cannot run in ~S, which is finished; START-FIBERS starts another ~
                     group.~:@>" fiber group))
    (allocate-stack fiber))
  (setf (fiber-group fiber) group
        (fiber-phase fiber) +active+))

(defun undo-enter-group (group fiber)
  (setf (fiber-phase fiber) +new+)
  (leave-group group))

(declaim (ftype (sfunction (fiber &key (:default t) (:timeout (or null (real 0)))) *) fiber-join))
(defun fiber-join (fiber &key (default nil defaultp) timeout)
  "Wait until FIBER has ended and return the values of its function. Waits at most TIMEOUT seconds.
If that is over, or FIBER ended abnormally, return DEFAULT and :TIMEOUT or :ABORT, or
signal a JOIN-THREAD-ERROR if DEFAULT is not given: FIBER-FAILED if it ended by an error."
  (when (eq fiber *current-thread*)
    (error 'sb-thread:join-thread-error :thread fiber :problem :self-join))
  (let ((problem (cond ((not (wait-for-end fiber timeout)) :timeout)
                       ((not (listp (fiber-result fiber))) :abort))))
    (cond ((not problem) (values-list (fiber-result fiber)))
          (defaultp (values default problem))
          ((and (eq problem :abort) (fiber-failure fiber))
           (error 'fiber-failed :thread fiber :problem :abort :cause (fiber-failure fiber)))
          (t (error 'sb-thread:join-thread-error :thread fiber :problem problem)))))

(defun wait-for-end (fiber timeout)
  (wait-while-equal fiber (fiber-ended-address fiber) 0 timeout))

(defun wait-while-equal (object address value timeout)
  "Wait until the word at ADDRESS, in the pinned OBJECT, is not VALUE. Return false if TIMEOUT seconds
are over before."
  (with-pinned-objects (object)
    (multiple-value-bind (to-sec to-usec stop-sec stop-usec deadlinep)
        (sb-impl::decode-timeout timeout)
      (loop
        (unless (= (sap-ref-32 (int-sap address) 0) value) (return t))
        (when (eql futex-timed-out (wait-on-word address value (or to-sec -1) (or to-usec 0)))
          (if deadlinep (sb-sys:signal-deadline) (return nil)))
        (when to-sec
          (setf (values to-sec to-usec)
                (sb-impl::relative-decoded-times stop-sec stop-usec)))))))

;;;; interrupting

(declaim (ftype (sfunction (fiber function) null) interrupt-fiber))
(defun interrupt-fiber (fiber function)
  "Let FIBER call FUNCTION, without arguments, where it is parked or when it parks next. If FUNCTION
returns, the wait goes on. Signals an INTERRUPT-THREAD-ERROR if FIBER has ended."
  (unless (%interrupt-fiber fiber function)
    (error 'sb-thread:interrupt-thread-error :thread fiber))
  nil)

(declaim (ftype (sfunction (fiber) null) terminate-fiber))
(defun terminate-fiber (fiber)
  "End FIBER where it is parked, or when it parks next, unwinding its stack: cleanup forms run, and
joining it finds it aborted. A fiber that was not submitted never runs. Signals an
INTERRUPT-THREAD-ERROR if FIBER has ended."
  (if (phase-becomes-p fiber +new+ +parking+)
      (declare-dead fiber)
      (interrupt-fiber fiber #'sb-thread:abort-thread)))

;;;; carriers

(defun any-poller (fiber)
  "A poller of the group of FIBER, or NIL if that has none any more."
  (let ((schedulers (fiber-group-schedulers (fiber-group fiber))))
    (unless (eq (fiber-group-state (fiber-group fiber)) :stopped)
      (scheduler-poller (svref schedulers 0)))))

(defun make-schedulers (group n)
  "A vector of N schedulers for GROUP; none is left over if there are not enough descriptors."
  (let ((schedulers '()) (done nil))
    (unwind-protect
         (loop repeat n
               do (push (%make-scheduler group (make-poller)) schedulers)
               finally (setf done t))
      (unless done
        (dolist (scheduler schedulers) (free-poller (scheduler-poller scheduler) #'any-poller))))
    (coerce schedulers 'simple-vector)))

(defun begin-carrier (carrier)
  (let ((context (alien-funcall (extern-alien "fiber_carrier_begin" (function unsigned)))))
    (when (= context 0) (error "no memory for a carrier"))
    (setf (carrier-context carrier) context
          (carrier-thread carrier) *current-thread*
          *carrier* carrier)))

(defun end-carrier ()
  (setf *carrier* nil)
  (alien-funcall (extern-alien "fiber_carrier_end" (function void))))

(defun run-carrier (carrier)
  (without-interrupts
    (begin-carrier carrier)
    (carrier-loop carrier)
    (end-carrier)))

(defun start-carrier (group scheduler)
  (let ((carrier (%make-carrier group)))
    (setf (carrier-scheduler carrier) scheduler)
    (push (make-carrier-thread "fiber carrier" #'run-carrier carrier)
          (fiber-group-carriers group))))

;;; Ephemeral, so that it neither keeps the image from exiting nor is asked to unwind.
(defun make-carrier-thread (name function argument)
  (sb-thread::with-system-mutex (sb-thread::*make-thread-lock*)
    (sb-thread::make-system-thread name function (list argument) nil)))

(defconstant max-spare-carriers 64)

(defun need-spare-p (group)
  (and (all-free-p (fiber-group-spares group))
       (< (length (fiber-group-carriers group))
          (+ max-spare-carriers (length (fiber-group-schedulers group))))))

(defun run-manager (group)
  "Keep a spare carrier ready until GROUP is stopped."
  (loop
    (when (eq (fiber-group-state group) :stopped) (return))
    (when (need-spare-p group) (start-carrier group nil))
    (with-pinned-objects (group)
      (wait-natively (fiber-group-manager-alarm-address group) 0 -1 0))
    (setf (fiber-group-manager-alarm group) 0)))

;;;; groups

(declaim (ftype (sfunction (&optional t &key (:carrier-count t) (:poller t) (:name t)) fiber-group)
                start-fibers))
(defun start-fibers (&optional fibers &key carrier-count (poller :one-shot) name)
  "Start CARRIER-COUNT carriers, by default as many as there are processors that the process may use,
and submit FIBERS, a fiber or a list of fibers, to them. Returns the group of carriers, which
run in the background until FINISH-FIBERS. Without FIBERS, and if no group is the
default one, this becomes the group that SUBMIT-FIBER calls T. POLLER says how descriptors are
registered; there is :ONE-SHOT. NAME is for printing."
  (let ((n (carrier-count-argument carrier-count))
        (fibers (if (listp fibers) fibers (list fibers))))
    (unless (eq poller :one-shot)
      (error 'simple-type-error :datum poller :expected-type '(eql :one-shot)
             :format-control "~@<~S is not a kind of poller; there is :ONE-SHOT.~:@>"
             :format-arguments (list poller)))
    (let ((group (make-running-group n name)))
      (if fibers
          (submit-all group fibers)
          (cas *default-group* nil group))
      group)))

(defun submit-all (group fibers)
  "Submit FIBERS to GROUP, or abort it."
  (let ((done nil))
    (unwind-protect (progn (dolist (fiber fibers) (submit-fiber group fiber))
                           (setf done t))
      (unless done (finish-fibers group :abort t)))))

(defun carrier-count-argument (count)
  (cond ((null count)
         (min (alien-funcall (extern-alien "fiber_processor_count" (function int)))
              max-pollers))
        ((typep count `(integer 1 ,max-pollers)) count)
        (t (error 'simple-type-error
                  :datum count :expected-type `(integer 1 ,max-pollers)
                  :format-control "~@<The carrier count ~S is not an integer from 1 to ~D.~:@>"
                  :format-arguments (list count max-pollers)))))

(defun make-running-group (n name)
  (let ((group (%make-fiber-group (and name (string name)))))
    (setf (fiber-group-schedulers group) (make-schedulers group n))
    (loop for scheduler across (fiber-group-schedulers group)
          do (start-carrier group scheduler))
    (setf (fiber-group-manager group)
          (make-carrier-thread "fiber carrier manager" #'run-manager group))
    (atomic-push group *groups*)
    group))

(declaim (ftype (sfunction (fiber-group) boolean) fiber-group-done-p))
(defun fiber-group-done-p (group)
  "True if no fiber of GROUP is alive."
  (= (fiber-group-alive group) 0))

(defun wait-until-done (group deadline)
  "Wait until no fiber of GROUP is alive. Return false if DEADLINE comes before."
  (loop
    (let ((alive (fiber-group-alive group)))
      (when (= alive 0) (return t))
      (unless (wait-while-equal group (fiber-group-alive-address group)
                                (ldb (byte 32 0) alive)
                                (and deadline (seconds-until deadline)))
        (return nil)))))

(defun seconds-until (deadline)
  (/ (max 0 (- deadline (fiber-now))) 1000000000))

(declaim (ftype (sfunction (t &key (:timeout (or null (real 0))) (:abort t)) boolean) finish-fibers))
(defun finish-fibers (group &key timeout abort)
  "Wait until the fibers of GROUP have ended, at most TIMEOUT seconds, and then stop its carriers. If
ABORT is true, terminate the fibers first. Returns true if the group is finished, false if
TIMEOUT is over; then it goes on. To be called from outside of GROUP."
  (let ((group (group-argument group)))
    (when (let ((fiber (current-fiber))) (and fiber (eq (fiber-group fiber) group)))
      (misuse *current-thread* "~@<~S cannot wait for the end of ~S, to which it belongs.~:@>"
              *current-thread* group))
    (let ((deadline (and timeout (seconds-from-now timeout))))
      (when (if abort (abort-until-done group deadline) (wait-until-done group deadline))
        (stop-group group)
        t))))

;;; Who was about to submit a fiber when the state changed may do so after the fibers have
;;; been listed: they are listed again. None is aborted twice, as it may be in a cleanup form.
(defun abort-until-done (group deadline)
  (cas (fiber-group-state group) :running :aborting)
  (let ((aborted (make-hash-table :test 'eq)))
    (loop
      (dolist (fiber (list-all-fibers))
        (when (and (eq (fiber-group fiber) group) (not (gethash fiber aborted)))
          (setf (gethash fiber aborted) t)
          (%interrupt-fiber fiber #'sb-thread:abort-thread)))
      (let ((soon (seconds-from-now 1/20)))
        (cond ((wait-until-done group (if deadline (min soon deadline) soon)) (return t))
              ((deadline-passed-p deadline) (return nil)))))))

(defun stop-group (group)
  "End the carriers of GROUP, of which no fiber is alive."
  (cas *default-group* group nil)
  (when (stop-state group)
    (ring-manager group)
    (sb-thread:join-thread (fiber-group-manager group) :default nil)
    (loop for scheduler across (fiber-group-schedulers group)
          do (wake-poller (scheduler-poller scheduler)))
    (loop for spare across (fiber-group-spares group)
          unless (eql spare 0) do (wake-carrier spare))
    (dolist (thread (fiber-group-carriers group))
      (sb-thread:join-thread thread :default nil))
    (loop for scheduler across (fiber-group-schedulers group)
          do (free-poller (scheduler-poller scheduler) #'any-poller))
    (forget-group group)))

(defun stop-state (group)
  "Let the state of GROUP be :STOPPED. Return false if somebody else has done it."
  (or (eq (cas (fiber-group-state group) :running :stopped) :running)
      (eq (cas (fiber-group-state group) :aborting :stopped) :aborting)))

(defun forget-group (group)
  (loop (let ((old *groups*))
          (when (eq (cas *groups* old (remove group old)) old) (return)))))

;;; Carriers are ephemeral threads, which SAVE-LISP-AND-DIE expects to be able to stop. It
;;; cannot know what to do with their fibers.
(defun prepare-to-save ()
  "Refuse to save an image with carriers, else forget what holds for this process only."
  (when *groups*
    (error "~@<Cannot save a core while fibers have carriers: call FINISH-FIBERS first on~
            ~{ ~S~^,~}.~:@>" *groups*))
  (fill *fiber-table* 0)
  (fill *fd-table* 0))

(declaim (ftype (sfunction (t &key (:carrier-count t)) list) run-fibers))
(defun run-fibers (fibers &key carrier-count)
  "Run FIBERS, a list of fibers or a fiber, to their end, on CARRIER-COUNT carriers started for them.
Returns a list of what FIBER-JOIN returns for each as first value. Signals what it signals."
  (let* ((fibers (if (listp fibers) fibers (list fibers)))
         (group (make-running-group (carrier-count-argument carrier-count) nil)))
    (submit-all group fibers)
    (unwind-protect (mapcar #'fiber-join-first fibers)
      (finish-fibers group))))

(defun fiber-join-first (fiber)
  (values (fiber-join fiber)))

;;;; what users park for

(declaim (ftype (sfunction ((real 0)) null) fiber-sleep))
(defun fiber-sleep (seconds)
  "As SLEEP."
  (sleep seconds))

(declaim (ftype (sfunction (&key (:timeout (or null (real 0))) (:reason t)) boolean) fiber-park))
(defun fiber-park (&key timeout (reason :park))
  "Park the running fiber until FIBER-UNPARK is called on it, or return at once if that has been done
since it last returned from here. Returns false if TIMEOUT seconds are over before. REASON is for those
who look at the fiber."
  (unless (can-park-p)
    (misuse *current-thread* "~@<~S cannot park here: ~:[it is no fiber~;it must not leave its ~
                              carrier~].~:@>" *current-thread* (in-fiber-p)))
  (let ((fiber (truly-the fiber *current-thread*))
        (deadline (and timeout (seconds-from-now timeout))))
    (loop
      (run-allowed-interruptions fiber)
      (when (= (cas (fiber-user-permit fiber) 1 0) 1) (return t))
      (when (deadline-passed-p deadline) (return nil))
      (without-interruptions (park reason deadline)))))

(declaim (ftype (sfunction (fiber) null) fiber-unpark))
(defun fiber-unpark (fiber)
  "End the FIBER-PARK of FIBER, or the next one if it is not parked there."
  (setf (fiber-user-permit fiber) 1)
  (barrier (:memory))
  (unpark fiber))

(declaim (ftype (sfunction (function &key (:timeout (or null (real 0)))) t) fiber-wait-for))
(defun fiber-wait-for (predicate &key timeout)
  "Wait until PREDICATE, a function without arguments, returns true, and return what it returned;
NIL if TIMEOUT seconds are over before. It is called now and then, at most every tenth of a second,
as SB-EXT:WAIT-FOR does it: where somebody can tell, use FIBER-UNPARK or a condition variable."
  (let ((deadline (and timeout (seconds-from-now timeout)))
        (pause 1/1000))
    (loop
      (let ((value (funcall predicate)))
        (cond (value (return value))
              ((deadline-passed-p deadline) (return nil))))
      (sleep (if deadline
                 (min pause (seconds-until deadline))
                 pause))
      (setf pause (min 1/10 (* 2 pause))))))

(declaim (ftype (sfunction (fiber &key (:stream t) (:count t)) null) print-fiber-backtrace))
(defun print-fiber-backtrace (fiber &key (stream *debug-io*) (count 1000))
  "Print what FIBER is doing to STREAM, at most COUNT frames. A fiber that is parked or runnable is
interrupted for it: it prints the backtrace itself, at the point where it is parked."
  (cond ((eq fiber *current-thread*)
         (sb-debug:print-backtrace :stream stream :count count))
        (t
         (let ((text nil)
               (done (sb-thread:make-semaphore)))
           (interrupt-fiber fiber
                            (lambda ()
                              (setf text (with-output-to-string (out)
                                           (sb-debug:print-backtrace :stream out :count count)))
                              (sb-thread:signal-semaphore done)))
           (loop until (or (sb-thread:wait-on-semaphore done :timeout 1/10)
                           (not (fiber-alive-p fiber))))
           (if text
               (write-string text stream)
               (format stream "~S ended before it parked.~%" fiber)))))
  nil)

;;;; the bindings of a fiber, for others to look at

;;; A suspended fiber's newest entry for a symbol holds its value. The fiber must not be
;;; mounted meanwhile: it is held back in the phase in which one is that has not yet left
;;; its stack. One that is runnable, or mounted elsewhere, is asked to do it when it parks.
(defun call-with-fiber-held (fiber function)
  "Call FUNCTION while FIBER, which is parked, stays so. Return false if it is not parked."
  (declare (function function) (dynamic-extent function))
  (without-interrupts
    (when (phase-becomes-p fiber +parked+ +parking+)
      (unwind-protect (funcall function)
        (finish-parking fiber))
      t)))

(defun find-binding (fiber symbol)
  "The address of the newest entry for SYMBOL on the binding stack of FIBER, or NIL."
  (let* ((context (context-of fiber))
         (start (context-word context binding-stack-start))
         (size (* sb-vm:binding-size sb-vm:n-word-bytes))
         (tls-index (symbol-tls-index symbol)))
    (loop for entry of-type word = (context-word context binding-stack-pointer) then (- entry size)
          until (= entry start)
          when (= tls-index (sap-ref-32 (int-sap (- entry size))
                                        (ash sb-vm:binding-symbol-slot sb-vm:word-shift)))
          return (- entry size))))

(defun call-with-binding (fiber symbol function)
  "The values of FUNCTION, called with the address of the newest binding of SYMBOL in FIBER, or NIL and
why not."
  (declare (function function) (dynamic-extent function))
  (let ((result nil)
        (status (if (fiber-alive-p fiber) :no-tls-value :thread-dead)))
    (call-with-fiber-held
     fiber
     (lambda ()
       (let ((entry (find-binding fiber symbol)))
         (when entry
           (setf (values result status) (funcall function (int-sap entry)))))))
    (values result status)))

(defconstant binding-value-offset (ash sb-vm:binding-value-slot sb-vm:word-shift))

(defun symbol-value-in-fiber (symbol fiber)
  "What SYMBOL-VALUE-IN-THREAD is made of: the value, and :OK or what is wrong."
  (if (eq fiber *current-thread*)
      (if (boundp symbol)
          (values (symbol-value symbol) :ok)
          (values nil :unbound-in-thread))
      (call-with-binding fiber symbol
        (lambda (entry)
          (if (= sb-vm:unbound-marker-widetag (sap-ref-8 entry binding-value-offset))
              (values nil :unbound-in-thread)
              (values (sap-ref-lispobj entry binding-value-offset) :ok))))))

(defun set-symbol-value-in-fiber (symbol fiber new-value)
  (if (eq fiber *current-thread*)
      (values (set symbol new-value) :ok)
      (call-with-binding fiber symbol
        (lambda (entry)
          (setf (sap-ref-lispobj entry binding-value-offset) new-value)
          (values new-value :ok)))))
