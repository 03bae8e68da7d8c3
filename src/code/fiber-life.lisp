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

(define-structure-slot-addressor fiber-ended-address :structure fiber :slot ended)
(define-structure-slot-addressor fiber-group-population-address
  :structure fiber-group :slot population)

(define-load-time-global *default-group* nil)
(declaim (type (or null fiber-group) *default-group*))

(define-load-time-global *fiber-storage-lock* (sb-thread:make-mutex :name "fiber memory"))

(define-condition fiber-failed (sb-thread:join-thread-error)
  ((cause :initarg :cause :reader %fiber-failed-cause))
  (:report (lambda (condition stream)
             (format stream "Joining ~S failed: it ended with~%~@<  ~@;~A~:>"
                     (sb-thread:thread-error-thread condition)
                     (fiber-failed-cause condition))))
  (:documentation "Signalled by FIBER-JOIN when the fiber was ended by an error that nothing handled.
FIBER-FAILED-CAUSE is that error."))

(defun fiber-failed-cause (condition)
  "The condition that ended the fiber of CONDITION, a FIBER-FAILED."
  (%fiber-failed-cause condition))

;;;; the fiber

;;; What a fiber waits for may be another that waits for it, or have such an owner, and its values
;;; may contain it. *PRINT-LEVEL* does not count that: neither is printed of a fiber inside.
(defvar *printing-inside-a-fiber* nil)
(declaim (type boolean *printing-inside-a-fiber*))

(defmethod print-object ((fiber fiber) stream)
  (print-unreadable-object (fiber stream :type t :identity t)
    (multiple-value-bind (state reason) (fiber-state fiber)
      (format stream "~@[~S ~]~(~A~)" (fiber-%name fiber) state)
      (unless *printing-inside-a-fiber*
        (let ((*printing-inside-a-fiber* t)
              (*print-array* nil)
              (*print-length* 2)
              (*print-level* 4))
          (format stream "~@[ on ~A~]" (wait-reason-in-words reason))
          (when (eq state :finished)
            (print-values (fiber-result fiber) stream)))))))

(defun print-values (values stream)
  "What is printed of a thread that has returned VALUES."
  (format stream "~:[ no values~; values: ~:*~{~S~^, ~}~]" values))

(declaim (ftype (sfunction ((or symbol function) &key (:name t) (:stack-size unsigned-byte)
                                                 (:initial-bindings list))
                           fiber)
                make-fiber))
(defun make-fiber (function &key name (stack-size *default-stack-size*) initial-bindings)
  "Return a new fiber that will call FUNCTION, a function designator, without arguments once it has
been submitted. NAME is a string or NIL. STACK-SIZE is in bytes of control stack, at least 64 KiB
and at most 1 GiB; it is rounded up. INITIAL-BINDINGS is an alist of symbols and the values to which
they are bound in the fiber."
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
  "A copy of BINDINGS, an alist: the first entry for a symbol counts."
  (unless (and (proper-list-p bindings)
               (every (lambda (entry)
                        (and (consp entry) (symbolp (car entry)) (not (constantp (car entry)))))
                      bindings))
    (error 'simple-type-error
           :datum bindings :expected-type 'list
           :format-control "~@<The initial bindings ~S are not a list of conses of a symbol, the name of a ~
                            variable, and a value.~:@>"
           :format-arguments (list bindings)))
  (copy-alist (remove-duplicates bindings :key #'car :from-end t)))

(declaim (ftype (sfunction (fiber) (or null string)) fiber-name))
(defun fiber-name (fiber)
  "The name of FIBER, a string or NIL."
  (fiber-%name fiber))

(setf (documentation 'fiber-group 'function)
      "The group that FIBER was submitted to, from its submission to its end, else NIL.")

(declaim (ftype (sfunction (fiber) (values symbol t)) fiber-state))
(defun fiber-state (fiber)
  "The state of FIBER: :NEW, :RUNNABLE, :RUNNING, :PARKED, :FINISHED, or :ABORTED, and as second
value what it waits for if it is parked: a list of a keyword and an object, such as (:MUTEX mutex),
(:CONDITION-VARIABLE waitqueue), (:SEMAPHORE semaphore), (:JOIN thread), (:GATE gate), (:MAILBOX
mailbox), (:READ descriptor), (:WRITE descriptor), (:CALL-BLOCKING function); a keyword if there is
no object, such as :SLEEP, :DEBUGGER, :POLL; or the REASON of FIBER-PARK. It may have changed when
this returns."
  (let ((phase (fiber-phase-only fiber)))
    (cond ((= phase +new+) (values :new nil))
          ((= phase +dead+) (values (if (listp (fiber-result fiber)) :finished :aborted) nil))
          ((= phase +active+) (values (if (fiber-carrier fiber) :running :runnable) nil))
          (t (values :parked (what-it-waits-for fiber))))))

;;; Who parks for an object gives just that as a reason, so as not to allocate; the keyword is found
;;; when somebody asks. An object that a user gives is in a USER-REASON.
(defstruct (user-reason (:constructor make-user-reason (object))
                        (:copier nil))
  (object nil :read-only t))
(declaim (freeze-type user-reason))

(defun what-it-waits-for (fiber)
  (let ((reason (fiber-wait-reason fiber)))
    (typecase reason
      (user-reason (user-reason-object reason))
      (function (list :call-blocking reason))
      (sb-thread:thread (list :join reason))
      (sb-thread:waitqueue (list :condition-variable reason))
      (fiber-group (list :group reason))
      ;; A lock, or what a contributed module calls so.
      (structure-object (list (keywordicate (type-of reason)) reason))
      (t reason))))

(defun wait-reason-in-words (reason)
  "REASON, a second value of FIBER-STATE, as it is printed."
  (if (typep reason '(cons keyword (cons t null)))
      (format nil "~(~A~)~@[ ~S~]" (first reason) (name-of-waited-for (second reason)))
      reason))

(defun name-of-waited-for (object)
  (typecase object
    ((or string number symbol) object)
    (function (%fun-name object))
    (sb-thread:thread (sb-thread:thread-name object))
    (sb-thread:semaphore (sb-thread:semaphore-name object))
    (structure-object
     (let ((slot (find "NAME" (dd-slots (layout-dd (%instance-layout object)))
                       :key #'dsd-name :test #'string=)))
       (and slot (%instance-ref object (dsd-index slot)))))))

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
        (let ((outer (fiber-pin-count fiber)))
          (unwind-protect
               (progn (setf (fiber-pin-count fiber) (1+ outer))
                      (funcall function))
            (setf (fiber-pin-count fiber) outer)))
        (funcall function))))

;;;; a fiber's first and last moments

;;; The catch tags are those of a thread, see RUN in target-thread.lisp; 'FIBER-LOST is where
;;; a fiber without any stack left is cut back to.
(defun %run-fiber ()
  (after-switch)
  (end-scheduling (truly-the carrier *carrier*))
  (let ((fiber (truly-the fiber *current-thread*)))
    (catch 'fiber-lost
      (setf (context-word (context-of fiber) base-catch-block)
            (get-lisp-obj-address sb-vm:*current-catch-block*))
      ;; CATCH-RUNAWAY-UNWIND takes the end of the chain of cleanups for the end of the
      ;; stack: the catch tags of the fiber must lie within one.
      (unwind-protect (call-fiber-function fiber)
        (setq *interrupts-enabled* nil)))
    (when (eq (fiber-failure fiber) t) (report-loss fiber))
    (end-fiber fiber)))

(defun report-loss (fiber)
  (setf (fiber-failure fiber) (make-condition 'fiber-stack-lost :fiber fiber))
  (reported-p (lambda () (format *error-output* "~&~A~%" (fiber-failure fiber)))))

(defun call-fiber-function (fiber)
  (catch 'sb-impl::toplevel-catcher
    (catch 'sb-impl::%end-of-the-world
      (catch 'sb-thread::%abort-thread
        (restart-bind ((abort (lambda () (throw 'sb-thread::%abort-thread nil))
                         :report-function
                         (lambda (stream) (format stream "~@<abort fiber (~a)~@:>" fiber)))
                       (abort-all #'abort-all-in-debugger
                         :report-function #'report-abort-all
                         :test-function (lambda (condition)
                                          (declare (ignore condition))
                                          (others-in-debugger))))
          ;; Bound inside of all tags: an interruption that came between the end of a tag and a
          ;; SETQ would throw to a tag that is no more.
          (let ((*interrupts-enabled* t))
            (when *interrupt-pending* (sb-unix::receive-pending-interrupt))
            (setf (fiber-result fiber)
                  (multiple-value-list
                   (catch 'sb-thread::%return-from-thread
                     (sb-c::inspect-unwinding
                      (call-with-initial-bindings fiber)
                      #'sb-di::catch-runaway-unwind)))))))))
  (when *exit-in-progress* (exit-by-thread)))

(defun call-with-initial-bindings (fiber)
  (let ((function (the function (shiftf (fiber-function fiber) nil)))
        (bindings (shiftf (fiber-initial-bindings fiber) nil)))
    (see-interruptions fiber)
    (if bindings
        (progv (mapcar #'car bindings) (mapcar #'cdr bindings)
          (funcall function))
        (funcall function))))

;;; Once the fiber is dead, it may be joined and forgotten, while it still runs here: what
;;; comes after is between the carrier and the stack.
(defun end-fiber (fiber)
  (let ((group (truly-the fiber-group (fiber-group fiber))))
    (leave-session fiber)
    (set-home fiber nil)
    (declare-dead fiber)
    (leave-group group)
    (leave :end)
    (bug "A fiber was resumed after its end.")))

(defun declare-dead (fiber)
  (setf (fiber-function fiber) nil
        (fiber-initial-bindings fiber) nil
        (fiber-interruptions fiber) nil
        (sb-thread::thread-waiting-for fiber) nil)
  (forget-surroundings fiber)
  (loop (let ((phase (fiber-phase fiber)))
          (when (phase-becomes-p fiber phase +dead+) (return))))
  (setf (fiber-interruptions fiber) nil) ; some may have come before that
  ;; Who has joined it must not find it among the living.
  (unless (= (fiber-context fiber) 0) (retire-index fiber))
  (setf (fiber-ended fiber) 1)
  (with-pinned-objects (fiber)
    (wake-on-word (fiber-ended-address fiber) (ash 1 29))))

(defun leave-group (group)
  (when (= (ldb (byte 32 0) (atomic-decf (fiber-group-population group))) 1)
    (with-pinned-objects (group)
      (wake-on-word (fiber-group-population-address group) (ash 1 29)))))

;;; Who keeps a fiber that has ended for the sake of its values keeps nothing else. Others may have
;;; FIBER in their hands still: they must not take its group for there.
(defun forget-surroundings (fiber)
  (setf (fiber-group fiber) nil
        (fiber-home fiber) nil
        (fiber-last-carrier fiber) nil
        (fiber-heap fiber) nil
        (fiber-next fiber) nil
        (fiber-wait-next fiber) nil
        (fiber-wait-previous fiber) nil
        (fiber-wait-word fiber) nil
        (fiber-wait-reason fiber) nil))

;;; Called by the runtime in place of what ran into the hard guard.
(defun lose-stack ()
  (setf (fiber-failure (truly-the fiber *current-thread*)) t) ; there is no room for more
  (throw 'fiber-lost nil))

(define-condition fiber-stack-lost (storage-condition)
  ((fiber :initarg :fiber :reader fiber-stack-lost-fiber))
  (:report (lambda (condition stream)
             (format stream "~@<~S has used up a stack and its reserve as well, and ended without ~
                             running its cleanup forms. A larger :STACK-SIZE given to MAKE-FIBER, or ~
                             SB-FIBER:*DEFAULT-STACK-SIZE*, makes its control stack of ~D bytes larger.~:@>"
                     (fiber-stack-lost-fiber condition)
                     (fiber-stack-size (fiber-stack-lost-fiber condition)))))
  (:documentation "What FIBER-FAILED-CAUSE returns for a fiber that exhausted a stack while it handled
the exhaustion."))

;;; As the conditions of threads, these are printed without pretty-printing, which needs much stack.
(macrolet ((def (name parent text)
             `(define-condition ,name (,parent)
                ((size :initarg :size))
                (:report (lambda (condition stream)
                           (format stream ,text (slot-value condition 'size)))))))
  (def fiber-control-stack-exhausted sb-kernel::control-stack-exhausted
    "Control stack exhausted: the fiber has ~D bytes of it.
This is probably due to heavily nested or infinitely recursive function
calls, or a tail call that SBCL cannot or has not optimized away.
If it is not: a larger :STACK-SIZE given to MAKE-FIBER makes the stack
larger, or SB-FIBER:*DEFAULT-STACK-SIZE* if none is given.")
  (def fiber-binding-stack-exhausted sb-kernel::binding-stack-exhausted
    "Binding stack exhausted: the fiber has as much of it as is due to ~D bytes
of control stack. A larger :STACK-SIZE given to MAKE-FIBER makes both larger,
or SB-FIBER:*DEFAULT-STACK-SIZE* if none is given."))

(defun stack-exhausted (type)
  "What is signalled where a thread is signalled a condition of TYPE."
  (let ((fiber (current-fiber)))
    (if fiber
        (make-condition (ecase type
                          (sb-kernel::control-stack-exhausted 'fiber-control-stack-exhausted)
                          (sb-kernel::binding-stack-exhausted 'fiber-binding-stack-exhausted))
                        :size (fiber-stack-size fiber))
        (make-condition type))))

;;;; the population of a group

;;; The low half of the word counts the fibers from their submission to their end; it is what
;;; FINISH-FIBERS waits on, as on the word of a mutex. The bit +CLOSED+ above it says that there
;;; will be no more. Both are in one word, so that nobody is counted in between the look at a group
;;; in which nobody is alive and its end. The bits above that count those of them that are not in
;;; the table of the living yet, or not with their group: if there were none when somebody looked,
;;; after the group was closed, then LIST-ALL-FIBERS has all that are alive.
;;;
;;;     open n   -> open n+1     who submits a fiber, and one more entry
;;;     open n   -> closed n     who ends all fibers
;;;     open 0   -> closed 0     who waits for the end of all
;;;     n        -> n-1          a fiber at its end, or who got no stack for it
;;;
;;; Nobody opens a group again: closed 0 is for ever.

(defun enter-population (group)
  "Count one more fiber of GROUP. Return false if it is closed."
  (loop
    (let ((old (fiber-group-population group)))
      (when (logtest old +closed+) (return nil))
      (when (= (cas (fiber-group-population group) old (truly-the word (+ old 1 +entry+))) old)
        (return t)))))

(defun leave-entry (group)
  "One whom ENTER-POPULATION has counted can be found now, or will not live."
  (atomic-decf (fiber-group-population group) +entry+))

(defun entries-p (group)
  "Are there fibers of GROUP that are counted and perhaps cannot be found?"
  (>= (fiber-group-population group) +entry+))

(defun group-closed-p (group)
  "Does GROUP take no more fibers?"
  (logtest (fiber-group-population (truly-the fiber-group group)) +closed+))

(defun close-group (group)
  "Let no more fibers enter GROUP."
  (loop
    (let ((old (fiber-group-population group)))
      (when (= (cas (fiber-group-population group) old (logior old +closed+)) old)
        (return)))))

(defun close-if-empty (group)
  "Let no more fibers enter GROUP if none is alive. Return false if one is."
  (= 0 (ldb (byte 32 0) (cas (fiber-group-population group) 0 +closed+))))

;;;; submitting and joining

(declaim (ftype (sfunction (t t) fiber) submit-fiber))
(defun submit-fiber (group fiber)
  "Let the carriers of GROUP run FIBER, which is new, and return it. GROUP is what START-FIBERS
returned, or T for the default group. Signals an error if FIBER was submitted before or GROUP is
finished, and FIBER-STACK-UNAVAILABLE, a STORAGE-CONDITION, if there is no stack to be had."
  (let ((group (group-argument group)))
    (unless (fiber-p fiber)
      (error 'simple-type-error :datum fiber :expected-type 'fiber
             :format-control "~@<~S is not a fiber; MAKE-FIBER makes one.~:@>"
             :format-arguments (list fiber)))
    ;; What is counted and not queued would never end.
    (without-interrupts
      (allow-with-interrupts (enter-group group fiber))
      (make-runnable fiber))
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
  (with-interrupts
    (error 'sb-thread::simple-thread-error :thread fiber
           :format-control control :format-arguments arguments)))

(defun enter-group (group fiber)
  (unless (phase-becomes-p fiber +new+ +parking+) ; nobody else submits it now
    (misuse fiber "~@<~S has been submitted already; make another fiber to call its function ~
                   again.~:@>" fiber))
  (unless (enter-population group)
    (setf (fiber-phase fiber) +new+)
    (misuse fiber "~@<~S cannot run in ~S, which is finished or about to be; START-FIBERS starts ~
                   another group.~:@>" fiber group))
  (let ((done nil) (limit 0))
    (unwind-protect (setf done (allocate-stack fiber))
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
  "Wait until FIBER has ended and return the values of its function. Waits at most TIMEOUT seconds.
If that is over, or FIBER ended abnormally, return DEFAULT and :TIMEOUT or :ABORT, or
signal a JOIN-THREAD-ERROR if DEFAULT is not given: FIBER-FAILED if it ended by an error.
FIBER must have been submitted before, or terminated, else a THREAD-ERROR is signalled, also if
DEFAULT is given."
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
          ((and (eq problem :abort) (fiber-failure fiber))
           (error 'fiber-failed :thread fiber :problem :abort :cause (fiber-failure fiber)))
          (t (error 'sb-thread:join-thread-error :thread fiber :problem problem)))))

(defun wait-for-end (fiber timeout)
  (wait-while-equal fiber (fiber-ended-address fiber) 0 timeout))

(defun wait-while-equal (object address value timeout)
  "Wait until the word at ADDRESS, in the pinned OBJECT, is not VALUE. Return false if TIMEOUT
seconds are over before."
  (with-pinned-objects (object)
    (until-time-limit (limit timeout)
      (unless (= (sap-ref-32 (int-sap address) 0) value) (return t))
      ;; Also for no time: who polls lets others run.
      (waiting-for object
        (multiple-value-call #'wait-on-word address value (time-left limit))))))

;;;; interrupting

(declaim (ftype (sfunction (fiber function) null) interrupt-fiber))
(defun interrupt-fiber (fiber function)
  "Let FIBER call FUNCTION, without arguments, whatever it is doing, unless it is in
WITHOUT-INTERRUPTS. If FUNCTION returns, what was interrupted goes on. Signals an
INTERRUPT-THREAD-ERROR if FIBER has ended. All that is said of INTERRUPT-THREAD holds for this."
  (unless (%interrupt-fiber fiber function)
    (error 'sb-thread:interrupt-thread-error :thread fiber))
  nil)

(declaim (ftype (sfunction (fiber) null) terminate-fiber))
(defun terminate-fiber (fiber)
  "End FIBER, unwinding its stack from wherever it is: cleanup forms run, and joining it finds
it aborted. A fiber that was not submitted never runs. Signals an INTERRUPT-THREAD-ERROR if
FIBER has ended. All that is said of TERMINATE-THREAD holds for this."
  (unless (without-interrupts ; nobody else moves it from +PARKING+
            (when (phase-becomes-p fiber +new+ +parking+)
              (declare-dead fiber)
              t))
    (interrupt-fiber fiber #'sb-thread:abort-thread))
  nil)

;;;; what users park for

(declaim (ftype (sfunction ((real 0)) null) fiber-sleep))
(defun fiber-sleep (seconds)
  "As SLEEP."
  (sleep seconds))

(declaim (ftype (sfunction (&key (:timeout (or null (real 0))) (:reason t)) boolean) fiber-park))
(defun fiber-park (&key timeout (reason :park))
  "Park the running fiber until FIBER-UNPARK is called on it, or return at once if that has been
done since it last returned from here. Returns false if TIMEOUT seconds are over before. REASON is
for those who look at the fiber."
  (unless (can-park-p)
    (misuse *current-thread* "~@<~S cannot park here: ~:[it is no fiber~;it must not leave its ~
                              carrier~].~:@>" *current-thread* (in-fiber-p)))
  (let ((fiber (truly-the fiber *current-thread*)))
    (until-time-limit (limit timeout)
      (when (= (cas (fiber-user-permit fiber) 1 0) 1) (return t))
      (without-interruptions ; also for no time: who polls lets others run
        (park (if (typep reason '(or function instance)) (make-user-reason reason) reason) limit))
      (see-interruptions fiber))))

(declaim (ftype (sfunction (fiber) null) fiber-unpark))
(defun fiber-unpark (fiber)
  "End the FIBER-PARK of FIBER, or the next one if it is not parked there."
  (setf (fiber-user-permit fiber) 1)
  (barrier (:memory))
  (unpark fiber))

(declaim (ftype (sfunction (function &key (:timeout (or null (real 0)))) t) fiber-wait-for))
(defun fiber-wait-for (predicate &key timeout)
  "Wait until PREDICATE, a function without arguments, returns true, and return what it returned;
NIL if TIMEOUT seconds are over before. It is called now and then, as by SB-EXT:WAIT-FOR: where
somebody can tell, use FIBER-UNPARK or a condition variable."
  (values (sb-thread::%wait-for predicate timeout)))
