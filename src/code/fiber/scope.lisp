;;;; scopes: fibers that do not outlive a form

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; A scope is made by WITH-FIBERS, whose body its *owner* executes, a fiber or a thread. The
;;; fibers that SPAWN makes in it are its children. The form is left when all children have ended,
;;; however it is left; so scopes are a tree, of which each fiber of a scope is a branch, and what
;;; is written around a form knows that nothing of it goes on behind its back. (Martin Sústrik's
;;; structured concurrency; the nurseries of Nathaniel J. Smith's Trio; Eio's switches.)

(declaim (type (real (0)) *cancellation-grace*))
(define-load-time-global *cancellation-grace* 10
  "After how many seconds, a positive real, by default 10, a scope that waits for fibers which it
has cancelled warns of those that have not ended. A global variable: it can be set and not be
bound.")

(defmethod print-object ((scope scope) stream)
  (print-unreadable-object (scope stream :type t :identity t)
    (format stream "~@[~A ~]~D fiber~:P~@[, cancelled: ~(~A~)~]"
            (scope-name scope) (scope-alive scope) (scope-reason scope))))

;;;; the population

(defun enter-scope (scope)
  "Count one more child of SCOPE. Return false if it has been left."
  (loop
    (let ((old (scope-population scope)))
      (when (logtest old +closed+) (return nil))
      (when (= (cas (scope-population scope) old (truly-the word (1+ old))) old)
        (return t)))))

(defun leave-scope (scope)
  "One child of SCOPE is no more."
  (declare (scope scope))
  (when (= (ldb (byte 32 0) (atomic-decf (scope-population scope))) 1)
    (with-pinned-objects (scope)
      (wake-on-word (scope-population-address scope) (ash 1 29)))))

(defun await-children (scope timeout)
  "Wait until SCOPE has no child, and let it have none any more. Return false if TIMEOUT seconds are
over before."
  (let ((deadline (and timeout (seconds-from-now timeout))))
    (loop
      (let ((alive (scope-alive scope)))
        (cond ((/= alive 0)
               (unless (wait-while-equal scope (scope-population-address scope) alive
                                         (and deadline (seconds-until deadline)))
                 (return nil)))
              ((= 0 (cas (scope-population scope) 0 +closed+)) (return t)))))))

;;;; the life of a child

(defun child-scope-of (fiber)
  "The scope of which FIBER is a child, or NIL."
  (let ((child (fiber-child fiber)))
    (and (child-p child) (child-scope child))))

(defun link-child (scope child)
  (with-tiny-lock ((scope-lock scope))
    (append-child scope child)
    nil)
  (when (scope-reason scope) (cancel-fiber (truly-the fiber (child-fiber child)))))

(defun unlink-child (scope child)
  (declare (scope scope) (child child))
  (with-tiny-lock ((scope-lock scope))
    (remove-child scope child)
    nil)
  (leave-scope scope))

(defun failure-of-child (fiber scope)
  "The condition for which FIBER, which is ending, counts as failed in SCOPE, or NIL."
  (let ((failure (fiber-failure fiber)))
    (cond ((listp (fiber-result fiber)) nil)
          ((typep failure 'fiber-cancelled) nil)
          (failure)
          ((scope-reason scope) nil)
          (t (make-condition 'sb-thread:join-thread-error :thread fiber :problem :abort)))))

(defun report-to-scope (child fiber)
  "FIBER, the fiber of CHILD, is about to end."
  (declare (child child))
  (let* ((scope (truly-the scope (child-scope child)))
         (failure (failure-of-child fiber scope))
         (permits (scope-permits scope)))
    (when failure
      (atomic-push (cons fiber failure) (scope-failures scope))
      (when (eq (scope-on-failure scope) :cancel)
        (cancel-for :failure scope))
      (when (eq (scope-body scope) :abandoned)
        (report-lost-failure scope fiber failure)))
    (when permits (sb-thread:signal-semaphore permits))))

(defun end-child (child)
  "The fiber of CHILD has ended."
  (declare (child child))
  (unlink-child (truly-the scope (child-scope child)) child))

;;; Handlers, and debuggers that the fiber has bound itself, come first: what is left is for the
;;; scope.
(defun fail-as-child (condition)
  "Called by INVOKE-DEBUGGER: let the running fiber end because of CONDITION if it is in a scope."
  (let ((fiber *current-thread*))
    (when (and (fiber-p fiber)
               (child-scope-of fiber)
               (typep condition '(and serious-condition (not interactive-interrupt)))
               (eq *invoke-debugger-hook* (symbol-global-value '*invoke-debugger-hook*))
               (eq *debugger-hook* (symbol-global-value '*debugger-hook*)))
      (begin-to-leave fiber nil)        ; else a cancellation could take the place of CONDITION
      (setf (fiber-failure fiber) condition)
      (throw 'sb-thread::%abort-thread nil))))

;;;; spawning

(declaim (ftype (sfunction (t (or symbol function)
                            &key (:arguments t) (:name t) (:stack-size unsigned-byte)
                                 (:initial-bindings t))
                           fiber)
                spawn))
(defun spawn (scope function &key arguments name (stack-size *default-stack-size*) initial-bindings)
  "Make a fiber that calls FUNCTION, a function or the name of one, with ARGUMENTS, a list of
arguments or one that is no list; let it run, and return it. SCOPE is what WITH-FIBERS has bound its
variable to: the form is not left before the fiber has ended. If the scope has a limit, wait until
another of its fibers has ended, which is never if all these wait here; if it was cancelled, the
fiber ends at once. If SCOPE is NIL the fiber belongs to no scope: it runs in the group of the fiber
that calls this, or else in the default group.

NAME, STACK-SIZE and INITIAL-BINDINGS are as MAKE-FIBER takes them. Signals what MAKE-FIBER and
SUBMIT-FIBER signal, and a SB-THREAD:THREAD-ERROR if the WITH-FIBERS of SCOPE has been left."
  (let ((fiber (make-fiber function :arguments arguments :name name :stack-size stack-size
                                    :initial-bindings initial-bindings)))
    (cond ((null scope) (submit-fiber (group-for-threads nil) fiber))
          ((scope-p scope) (add-child scope fiber))
          (t (error 'simple-type-error :datum scope :expected-type '(or scope null)
                    :format-control "~@<~S is not a scope; WITH-FIBERS binds a variable to one.~:@>"
                    :format-arguments (list scope))))))

(defun add-child (scope fiber)
  (let* ((permits (scope-permits scope))
         (start (fiber-start fiber))
         (child (make-child scope fiber))
         (added nil)
         (problem nil))
    (setf (fiber-start fiber) (list (fiber-function fiber) (fiber-initial-bindings fiber) child))
    (ensure-waking-room 6144)
    (without-interrupts ; a fiber that is counted and not submitted would be waited for
      (when permits (allow-with-interrupts (sb-thread:wait-on-semaphore permits)))
      (unwind-protect
           (when (enter-scope scope)
             (setf (values added problem) (submit-child scope child)))
        (unless added
          (setf (fiber-start fiber) start)
          (when permits
            (let ((sb-impl::*deadline* nil)) ; which may have unwound the wait
              (sb-thread:signal-semaphore permits))))))
    (cond (added fiber)
          (problem (error problem))
          (t (misuse fiber "~@<~S cannot run in ~S, which has been left.~:@>" fiber scope)))))

(defun submit-child (scope child)
  "Submit the fiber of CHILD, which has been counted. Return true; or NIL and the condition that was
signalled, and count it no more."
  (link-child scope child)
  (handler-case (progn (submit-fiber (scope-group scope) (child-fiber child)) t)
    (serious-condition (condition)
      (unlink-child scope child)
      (values nil condition))))

;;;; the form

(define-condition scope-failed (error)
  ((scope :initarg :scope :reader failed-scope)
   (failures :initarg :failures :reader %scope-failures))
  (:report (lambda (condition stream)
             (format stream "~S failed." (failed-scope condition))
             (loop for (fiber . cause) in (%scope-failures condition)
                   do (format stream "~%~S ended with~%~@<  ~@;~A~:>" fiber cause))))
  (:documentation "The error that WITH-FIBERS signals if fibers of it were ended by errors that
nothing handled. SCOPE-FAILED-CAUSE returns the first of these, SCOPE-FAILED-SUPPRESSED a list of
the others, SCOPE-FAILED-SCOPE the scope."))

(defun scope-failed-scope (condition)
  "Return the scope that CONDITION, a SCOPE-FAILED, is about."
  (failed-scope condition))

(defun scope-failed-cause (condition)
  "Return the condition that ended the first fiber of those which CONDITION, a SCOPE-FAILED, is
about."
  (cdr (first (%scope-failures condition))))

(defun scope-failed-suppressed (condition)
  "Return a list of the conditions that ended the other fibers which CONDITION, a SCOPE-FAILED, is
about, in the order in which they ended."
  (mapcar #'cdr (rest (%scope-failures condition))))

(define-condition scope-timeout (timeout)
  ((scope :initarg :scope :reader late-scope)
   (seconds :initarg :seconds :reader late-scope-seconds))
  (:report (lambda (condition stream)
             (format stream "~@<~S was not done in ~A second~:P.~:@>"
                     (late-scope condition) (late-scope-seconds condition))))
  (:documentation "The condition, a TIMEOUT, that WITH-FIBERS signals if its deadline came before it
was done. SCOPE-TIMEOUT-SCOPE returns the scope."))

(defun scope-timeout-scope (condition)
  "Return the scope that CONDITION, a SCOPE-TIMEOUT, is about."
  (late-scope condition))

(defmacro with-fibers ((scope &key limit deadline (on-failure :cancel) name group) &body body)
  "Execute BODY with the variable SCOPE bound to a new scope, in which SPAWN makes fibers. Wait
until all of them have ended, and return BODY's values.

If BODY is left otherwise, by an error, a throw or an interruption, the fibers are cancelled, and
the exit goes on when they have ended. If a fiber is ended by an error that nothing handles, the
others and BODY are cancelled, and when all have ended SCOPE-FAILED is signalled; if ON-FAILURE is
:COLLECT, instead of :CANCEL, nothing is cancelled, and it is signalled when all are done. Fibers
that have not ended *CANCELLATION-GRACE* seconds after they were cancelled are warned of, and
waited for; from then on an interruption that unwinds the wait leaves them behind.

At most LIMIT fibers run at a time, a positive integer, or any number if it is NIL: SPAWN waits
for the next to end. If DEADLINE seconds, a positive real or NIL, are over before all is done,
that is cancelled, and SCOPE-TIMEOUT signalled. NAME is a string designator, for printing. GROUP,
what START-FIBERS returned or T for the default group, runs the fibers; by default that is the
group of the fiber that executes this, or else the default group, which is started if there is
none. Signals a TYPE-ERROR if one of these is something else."
  (with-unique-names (function)
    `(dx-flet ((,function (,scope) (declare (ignorable ,scope)) ,@body))
       (call-with-scope #',function :limit ,limit :deadline ,deadline :on-failure ,on-failure
                                    :name ,name :group ,group))))

(defun group-of-scope (group)
  (cond (group (group-argument group))
        ((in-fiber-p) (fiber-group (truly-the fiber *current-thread*)))
        (*default-group*)
        (t (let ((group (start-fibers)))
             (if (eq group *default-group*)
                 group
                 (progn (finish-fibers group) ; another thread was faster
                        (group-argument t)))))))

(defun check-scope-arguments (limit deadline on-failure)
  (flet ((check (datum type control)
           (unless (typep datum type)
             (error 'simple-type-error :datum datum :expected-type type
                    :format-control control :format-arguments (list datum)))))
    (check limit '(or null (integer 1))
           "~@<The limit ~S of a scope is neither NIL nor a positive integer.~:@>")
    (check deadline '(or null (real (0)))
           "~@<The deadline ~S of a scope is neither NIL nor a positive number of seconds.~:@>")
    (check on-failure '(member :cancel :collect)
           "~@<~S does not say what becomes of a scope when a fiber fails; :CANCEL and :COLLECT ~
            do.~:@>")))

(defun make-scope (limit name group on-failure)
  (%make-scope (and name (string name))
               (group-of-scope group)
               (and limit (sb-thread:make-semaphore :name "limit of a scope" :count limit))
               on-failure *current-thread* *scope*))

(defun call-with-scope (function &key limit deadline on-failure name group)
  (declare (function function))
  (check-scope-arguments limit deadline on-failure)
  (let ((scope (make-scope limit name group on-failure))
        (values (list nil))
        (joined nil)
        (left nil)
        (ended nil))
    (ensure-waking-room 16384) ; else the cleanup could be cut off
    (without-interrupts
      (enter-tree scope)
      (unwind-protect
           (progn
             (when deadline (watch-deadline scope deadline))
             (with-local-interrupts
               (catch scope
                 (let ((*scope* scope))
                   (setf values (multiple-value-list (funcall function scope)))
                   (await-children scope nil)
                   (setf joined t))))
             (setf left t))
        (setf (scope-body scope) :left)
        (look-again *current-thread*) ; what it heard nothing of while it left the body
        (unwind-protect
             (let ((*cancellable* nil) (sb-impl::*deadline* nil))
               (unless (or joined (end-children scope))
                 ;; From now on the user can leave them behind.
                 (with-local-interrupts (await-children scope nil)))
               (setf ended t))
          (unless ended (setf (scope-body scope) :abandoned))
          (end-watch scope)
          (leave-tree scope)
          (unless (and left ended) (report-lost-failures scope)))))
    (signal-failures scope (and (not joined) deadline))
    (values-list values)))

(defun watch-deadline (scope seconds)
  "Make a fiber that cancels SCOPE after SECONDS unless it is cancelled before."
  (let ((deadline (seconds-from-now seconds)))
    (setf (scope-watch scope)
          (submit-fiber (scope-group scope)
                        (make-fiber (lambda ()
                                      (park-until deadline)
                                      (cancel-for :deadline scope))
                                    :name "deadline of a scope")))))

;;; It is not waited for: it may have no turn for long.
(defun end-watch (scope)
  (when (scope-watch scope) (cancel-fiber (scope-watch scope))))

;;; EXIT unwinds threads that have scopes, and does not wait for ever.
(defun end-children (scope)
  "Cancel the children of SCOPE, whose body is being left, and wait for their end. Return false, and
tell the user, if that takes longer than the grace."
  (cancel-for :exit scope)
  (or (await-children scope *cancellation-grace*)
      (progn (warn-of-lingering-children scope)
             *exit-in-progress*)))

(defun warn-of-lingering-children (scope)
  (let ((children (children-of-scope scope)))
    (reported-p (lambda ()
                  (format *error-output*
                          "~&~@<WARNING: ~S was cancelled more than ~A s ago, and waits for ~
                           ~D fiber~:P yet: ~2I~_~{~S~^, ~_~}~@[ and ~D more~]~:>~%"
                          scope *cancellation-grace* (length children)
                          (subseq children 0 (min 10 (length children)))
                          (and (> (length children) 10) (- (length children) 10)))))))

(defun report-lost-failures (scope)
  "The form of SCOPE is left by an exit of its body: its failures are not signalled."
  (loop for (fiber . failure) in (reverse (scope-failures scope))
        do (report-lost-failure scope fiber failure)))

(defun report-lost-failure (scope fiber failure)
  (reported-p (lambda ()
                (format *error-output*
                        "~&~@<~S, in ~S, which was left meanwhile, ended with: ~2I~_~A~:>~%"
                        fiber scope failure))))

(defun signal-failures (scope deadline)
  (let ((failures (reverse (scope-failures scope))))
    (cond ((and deadline (eq (scope-reason scope) :deadline))
           (report-lost-failures scope)
           (error 'scope-timeout :scope scope :seconds deadline))
          (failures
           (error 'scope-failed :scope scope :failures failures)))))

;;;; the tree

(defun enter-tree (scope)
  "The owner of SCOPE begins to execute its body."
  (let ((owner (scope-owner scope)))
    (when (fiber-p owner)
      (unless (fiber-child owner) (setf (fiber-start owner) (make-child nil owner)))
      (setf (child-inner (truly-the child (fiber-child owner))) scope))))

(defun leave-tree (scope)
  (let ((owner (scope-owner scope)))
    (when (fiber-p owner)
      (setf (child-inner (truly-the child (fiber-child owner))) (scope-outer scope)))))

(defun scopes-of-fiber (fiber)
  "The scopes whose bodies FIBER executes, the outermost first."
  (let ((child (fiber-child fiber)) (scopes '()))
    (when (child-p child)
      (loop for scope = (child-inner child) then (scope-outer scope)
            while (and scope (eq (scope-owner scope) fiber))
            do (push scope scopes)))
    scopes))

;;; The cleanup form of WITH-FIBERS has not run.
(defun end-scopes-of-lost-stack (fiber)
  "Let the children of FIBER, which has lost its stack and is about to end, end before."
  (without-interrupts
    (let ((*cancellable* nil))
      (dolist (scope (reverse (scopes-of-fiber fiber)))
        (setf (scope-body scope) :left)
        (cancel-for :exit scope)
        (await-children scope nil)
        (end-watch scope)
        (report-lost-failures scope)))))
