;;;; SELECT, the macro on top of operations

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package :sb-concurrency)

(defparameter *makers*
  '((receive make-receipt) (send make-sending) (:timeout pause-operation) (await promise-operation)
    . #-sb-fiber ()
      #+sb-fiber
      ((wait-on-semaphore semaphore-operation) (receive-message mailbox-operation)
       (wait-on-gate gate-operation) (join-thread join-operation)
       (sb-fiber:fiber-join join-operation)
       (sb-sys:wait-until-fd-usable descriptor-operation)))
  "What waits, and what makes the operation that waits for the same, or the leaf of that.")

(defun select-operation-form (head)
  "The form whose value is the operation, or leaf, that HEAD, of a clause of SELECT, stands for."
  (let ((maker (and (consp head) (second (assoc (first head) *makers*)))))
    (if maker (cons maker (rest head)) head)))

(defun ignoring-more-values (lambda-list)
  "LAMBDA-LIST, of required parameters, as one that takes any number of arguments."
  (let ((more (gensym "MORE")))
    (values `(&optional ,@lambda-list &rest ,more)
            `(declare (ignore ,more)))))

(defun check-clause (clause)
  (unless (and (listp clause) (listp (cdr clause)) (cdr clause)
               (listp (second clause)) (every #'symbolp (second clause))
               (null (intersection (second clause) lambda-list-keywords))
               (or (neq (first clause) :default) (null (second clause))))
    (error 'sb-int:simple-program-error
           :format-control "~@<A clause of SELECT is (OPERATION (VARIABLE...) FORM...) or ~
                            (:DEFAULT () FORM...), not ~S.~:@>"
           :format-arguments (list clause))))

(defun clause-function (clause)
  (multiple-value-bind (lambda-list ignore) (ignoring-more-values (second clause))
    `(lambda ,lambda-list ,ignore ,@(cddr clause))))

(defmacro select (&rest clauses)
  "Wait until one of several things can be done, do it, execute the forms that go with it, and
return their values. Each of CLAUSES is

  (OPERATION (VARIABLE...) FORM...)

where OPERATION is one of

  (RECEIVE channel)     which gives the values of RECEIVE
  (SEND channel value)  which gives true
  (AWAIT promise)       which gives the values of the promise
  (:TIMEOUT seconds)    which can be done after SECONDS, and gives NIL
  any other form        whose value is an operation, see PERFORM

or, in builds with fibers, one of

  (WAIT-ON-SEMAPHORE semaphore)  which takes one permit, and gives true
  (RECEIVE-MESSAGE mailbox)      which gives the message and true
  (WAIT-ON-GATE gate)            which gives true
  (JOIN-THREAD thread)           which gives the values of the thread or fiber
  (SB-SYS:WAIT-UNTIL-FD-USABLE descriptor direction)
                                 which gives true

The VARIABLEs are bound to the values that it gives while the FORMs are executed. Forms in
OPERATIONs are evaluated first, in order. If several things can be done, any of them is. One of
CLAUSES may be

  (:DEFAULT () FORM...)

which is taken if no other can be done at once. Signals CHANNEL-CLOSED if a channel to which
something was to be sent is closed, what the operation that was done signals, and
SB-SYS:DEADLINE-TIMEOUT."
  (mapc #'check-clause clauses)
  (when (< 1 (count :default clauses :key #'first))
    (error 'sb-int:simple-program-error
           :format-control "A SELECT has one :DEFAULT at most."))
  (let* ((default (find :default clauses :key #'first))
         (clauses (remove default clauses))
         (operation `(select-operation
                      (list ,@(mapcar (lambda (clause) (select-operation-form (first clause)))
                                      clauses))
                      ,@(mapcar #'clause-function clauses))))
    (if default
        `(perform-or ,operation nil nil (lambda () ,@(cddr default)))
        `(perform ,operation))))
