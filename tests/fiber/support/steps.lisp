;;;; functions of the runtime that take their steps when an explorer says so

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

;;; The functions whose orders are tried are not written again here, they are read from src/code
;;; and sb-concurrency: into the package STEPS, in which all symbols are those that SB-FIBER has, or
;;; else SB-CONCURRENCY, but for the accessors of shared slots, the operations on memory, and the
;;; functions so read. So a change of the source is a change of what is tested. A function that is
;;; not named below is called as it is, in one step, and sees the runtime that runs the explorer: if
;;; a new one is made out of such a path, it is to be named here. A test says which are missing.
;;;
;;; A planted bug is a form of such a function that is replaced by another; a test that
;;; plants a form that is not there fails.

(require :sb-concurrency)

(defparameter *source-packages* '("SB-FIBER" "SB-CONCURRENCY"))

(defparameter *source-directory*
  (merge-pathnames "../../../src/code/" *load-truename*))

(defparameter *operations*
  '("SVREF" "STORE-PLACE" "SAP-REF-32" "INT-SAP" "ATOMIC-INCF" "ATOMIC-DECF" "BARRIER"
    "WITH-TINY-LOCK" "WITHOUT-INTERRUPTIONS" "WITHOUT-INTERRUPTS" "WITH-LOCAL-INTERRUPTS"
    "WITH-INTERRUPTS" "*CURRENT-THREAD*" "SPIN-LOOP-HINT" "WITH-LOCK" "WITH-ROOM-TO-WAKE")
  "What stands for something else in STEPS.")

(defparameter *slots*
  '("RUN-QUEUE-HEAD" "RUN-QUEUE-TAIL" "RUN-QUEUE-RING" "RUN-QUEUE-SPARE"
    "INJECTOR-LOCK" "INJECTOR-FIRST" "INJECTOR-LAST"
    "DEADLINE-HEAP-LOCK" "DEADLINE-HEAP-NEAREST" "DEADLINE-HEAP-COUNT" "DEADLINE-HEAP-ENTRIES"
    "DEADLINE-HEAP-TIMES"
    "BUCKET-LOCK" "BUCKET-WAITERS" "BUCKET-NATIVE" "BUCKET-CLAIMS" "BUCKET-PREFERENCE"
    "BUCKET-QUEUES" "BUCKET-CHAINS"
    "FD-CELL-LOCK" "FD-CELL-GENERATION" "FD-CELL-CLOSING" "FD-CELL-ARMING" "FD-CELL-INPUT"
    "FD-CELL-OUTPUT"
    "FD-CELL-INPUT-POLLER" "FD-CELL-OUTPUT-POLLER" "FD-CELL-KNOWN-TO"
    "FD-CELL-KEEPER" "FD-CELL-READINESS" "FD-CELL-LEAVING"
    "POLLER-SLEEP" "POLLER-USERS" "SCHEDULER-HANDED"
    "CARRIER-SCHEDULER" "CARRIER-INBOX" "CARRIER-WAKE-WORD" "CARRIER-EPOCH"
    "CARRIER-SPARE"
    "FIBER-GROUP-IDLE" "FIBER-GROUP-SEARCHING" "FIBER-GROUP-NAPPING"
    "FIBER-GROUP-STATE" "FIBER-GROUP-POPULATION"
    "FIBER-GROUP-MONITOR-WAKE-WORD" "FIBER-GROUP-MONITOR-ASLEEP"
    "FIBER-PHASE" "FIBER-INTERRUPTIONS" "FIBER-NEXT" "FIBER-WAIT-NEXT" "FIBER-WAIT-ADDRESS"
    "FIBER-WAIT-PREVIOUS" "FIBER-WAIT-WORD" "FIBER-WAIT-CLAIM"
    "FIBER-WAIT-RESULT" "FIBER-HEAP-INDEX" "FIBER-HEAP" "FIBER-CARRIER" "FIBER-FLAGS"
    "SCOPE-LOCK" "SCOPE-FIRST" "SCOPE-REASON" "SCOPE-BODY" "SCOPE-POPULATION"
    "CHANNEL-LOCK" "WAITER-STATE" "WAITER-SERVED-P" "NODE-VALUE" "NODE-LINE")
  "Accessors of what several threads use.")

(defparameter *definitions*
  '("RUN-QUEUE-PLACE" "RUN-QUEUE-LENGTH" "RUN-QUEUE-PUT" "RUN-QUEUE-TAKE" "RUN-QUEUE-STEAL"
    "RUN-QUEUE-MOVE" "RUN-QUEUE-FORGET"
    "INJECTOR-PUT" "INJECTOR-TAKE" "MIGRANT-P" "INJECTOR-HAS-MIGRANT-P" "INJECTOR-TAKE-MIGRANT"
    "ENTRY-SLOT" "SET-ENTRY-SLOT" "HEAP-PLACE" "HEAP-SIFT-UP" "HEAP-SIFT-DOWN" "HEAP-NOTE-NEAREST"
    "HEAP-DELETE-AT"
    "HEAP-ENSURE-ROOM" "HEAP-INSERT" "HEAP-REMOVE" "HEAP-TAKE-EXPIRED"
    "USING-POLLER" "APPEND-WAITER" "UNCHAIN-WAITER" "TAKE-WAITER" "TAKE-WAITERS" "RELEASE-WAITERS"
    "WANTED-DIRECTIONS" "FD-CELL-DATA" "WISH-TO-ARM" "POLLER-BIT" "DIRECTIONS-OF-POLLER"
    "WISHES-FOR-POLLER" "NEXT-ARMING" "HOW-TO-ARM" "ARM-IN-POLLER" "ARM-CELL" "ARM-FOR-ALL"
    "END-KEEPING" "READINESS-WITH" "UPDATE-READINESS" "NOTE-REPORT-OF-KEEPER" "NOTE-BLOCKED"
    "PROVING-BLOCKED" "STILL-READY-P"
    "KEEPABLE-P" "BEGIN-TO-KEEP" "CHANGE-KEEPER" "CHOOSE-KEEPER"
    "REFUSE-WAITERS" "CHAIN-WAITER" "ADD-WAITER" "REMOVE-WAITER" "HANDLE-REPORT"
    "FORGET-FILE" "WAKE-LATE-WAITERS" "WAKE-POLLER" "DROP-KEEPER" "FORGET-POLLER-IN-CELLS"
    "FIRST-IN-POLLER"
    "FIND-HEIR" "REARM-ELSEWHERE"
    "PHASE-BECOMES-P" "FIBER-PHASE-ONLY" "TAKE-PERMIT" "UNPARK" "FINISH-PARKING" "PARK"
    "SET-FIBER-FLAG" "CLEAR-FIBER-FLAG" "FIBER-UNPARK"
    "ENTER-DEADLINE" "ENTER-TIME"
    "AFTER-SWITCH" "NEXT-INTERRUPTION" "QUEUE-INTERRUPTION" "%INTERRUPT-FIBER"
    "NOTIFY-OF-INTERRUPTION" "RING-ALARM"
    "DEADLINE-PASSED-P"
    "BEGIN-SCHEDULING" "END-SCHEDULING" "ADVANCE-EPOCH" "WITH-OWN-SCHEDULER"
    "PUSH-CHAIN" "TAKE-CHAIN" "DO-CHAIN" "WAKE-CARRIER" "WAKE-ONE-IDLE"
    "IDLE-P" "CROWDED-P" "COUNT-AT-WORK" "ENOUGH-AT-WORK-P"
    "CALL-FOR-HELP" "INJECT"
    "MIGRATION-FORCED-P" "TAKE-MIGRANT" "INJECTED-FOR-P"
    "HANDED-ALONE-P" "CALL-FOR-THIEF" "QUEUE-HERE" "HOW-MANY-TO-COLLECT" "COLLECT-INJECTED"
    "LEFT-ALONE-P" "STEAL-WORK" "LOOK-AROUND"
    "ENOUGH-SEARCH-P"
    "SEARCH-ELSEWHERE" "SEEM-HELD-UP" "LIMIT-CARRIERS" "WORK-LEFT-P" "CALL-FOR-WHAT-IS-LEFT"
    "PASS-SEARCH-ON" "SHED-WORK"
    "CALL-FOR-THE-REST" "SEARCH-FOR-WORK" "ENTER-IDLE" "LEAVE-IDLE"
    "SOMETHING-TO-STEAL-P" "SOMETHING-TO-DO-P" "TIME-TO-SLEEP" "BEGIN-NAP-P" "TIME-TO-NAP"
     "SLEEP-IN-POLLER" "RUN-QUEUE-FORGET" "COLLECT-EXPIRED"
    "LEAVE-QUEUE" "RUN-INBOX"
    "SERVE-SCHEDULER" "SLEEP-AS-SPARE" "PUT-IN-PLACE" "TAKE-FROM-PLACE" "PUT-SPARE-BACK"
    "WAKE-MONITOR" "PLACE-ORPHANS"
    "DETACH-SCHEDULER" "PASS-SCHEDULER-ON" "GIVE-SCHEDULER-AWAY" "TAKE-SCHEDULER-AWAY"
    "CARRIER-TO-END-P"
    "LIST-SPARE" "UNLIST-SPARE" "IDLE-AS-SPARE" "CARRIER-LOOP"
    "NOTE-FILE" "SAME-FILE-P" "ENSURE-SAME-FILE" "OUTCOME-OF-WAIT" "BEGIN-TO-WAIT" "WAIT-FOR-FD"
    "PARK-ON-FILE"
    "IF-SAME-FILE" "CALL-ON-FILE"
    "NOTE-CLOSE" "NOTE-CLOSED"
    "SCOPE-ALIVE" "APPEND-CHILD" "REMOVE-CHILD" "NEXT-CHILD" "TO-LEAVE-P" "SEE-CANCELLATION"
    "DO-OWN-SCOPES" "WHAT-TO-LEAVE" "BEGIN-TO-LEAVE" "TELL" "LEAVE-WHAT-IS-CANCELLED" "LEAVE-FIBER"
    "LEAVE-BODY" "LOOK-AGAIN" "ASK-TO-LEAVE" "FIBER-ALIVE-P" "LEAVE-NATIVE-WAIT"
    "ASK-AGAIN-TO-LEAVE" "WITH-CANCELLABLE-NATIVE-WAIT" "CANCEL-FIBER" "CANCEL-FOR"
    "CANCEL-CHILDREN" "ENTER-SCOPE" "LINK-CHILD"
    "FIRST-WAITER" "REPLACE-FIRST" "PUSH-QUEUE" "GROW-BUCKET" "GROW-BUCKET-IF-POSSIBLE"
    "BUCKET-ENSURE-ROOM"
    "APPEND-TO-QUEUE" "PUT-BEFORE-QUEUE" "COUNT-CLAIM" "UNLINK-WAITER"
    "ENTER-BUCKET" "LEAVE-BUCKET" "TAKE-FROM-BUCKET" "TAKE-CLAIMANT"
    "WAIT-IN-BUCKET" "WAIT-NATIVELY"
    "WAKE-FIBER" "WAKE-FIBERS" "WAKE-NATIVES" "NEXT-PREFERENCE" "WAKE-BY-PREFERENCE" "WAKE-ON-WORD"
    "TAKE-MUTEX-OR-MARK" "CONTEND-FOR-MUTEX" "GRANT-CLAIM" "HAND-OVER"
    "STARTING-SPARE-P" "NEED-SPARE-P" "START-SPARE-IF-NEEDED" "WAKE-MONITOR-IF-ASLEEP" "ALL-IDLE-P"
    "SLEEP-AS-MONITOR" "WAIT-FOR-WAKE-UP"
    "DOZE" "TIME-UNTIL-LOOK"
    "RUN-MONITOR"
    "ENTER-POPULATION" "LEAVE-ENTRY" "ENTRIES-P" "CLOSE-GROUP" "CLOSE-IF-EMPTY"
    "CHOSEN-P" "STATE-BECOMES-P" "CHOSEN-NUMBER" "CHOICE" "TAKE-PARTNER" "CLAIMING-ONESELF"
    "APPEND-NODE" "REMOVE-NODE" "WITHDRAW" "SLEEPING" "WAKE-WAITER" "TRANSFERRING"
    "WAIT-IN-LINE" "OFFER" "ACCEPT" "LEAVE-LINE" "GIVE-BACK"
    "OUTCOME-OF-CHOICE" "WAITING-IN-LINE" "OFFER-AND-WAIT" "ACCEPT-AND-WAIT" "CLOSE-FOR-ONE"
    "CLOSE-CHANNEL"
    "TRY-BRANCH" "LIKELY-P" "TRY-IN-ORDER" "TRY-BRANCHES" "DO-NODES" "PREPARE-NODES"
    "ENTER-LINES" "LEAVE-LINES" "CHOSEN-BRANCH"
    "UNDO-CHOICE" "ENTER-OR-LEAVE" "WAIT-IN-LINES" "WAIT-FOR-BRANCH" "SELECT-BRANCH")
  "Names of the functions and macros that are read, each macro before its users.")

(defparameter *stubs*
  '("*CARRIER*" "REQUEUE" "FREE-STACK" "SEE-INTERRUPTIONS" "%INTERRUPT-OS-THREAD" "PREPARE-ZONE"
    "NEAREST-SCHEDULER" "POLLER-TO-WAIT-IN" "LEAVE" "MAKE-RUNNABLE" "FIBER-NOW"
    "BUCKET-OF" "%FUTEX-WAIT" "%FUTEX-WAKE" "%SLEEP-ON" "ANNOUNCE-BLOCKING"
    "FIND-FD-CELL" "MAP-FD-CELLS" "%POLLER-ARM" "FORGET-IN-POLLERS" "FORGET-IN-POLLER" "%POLL-NOW"
    "FIND-OUT-EDGES"
    "FILE-IDENTITY" "WOULD-WAIT-P" "NONBLOCKING-BY-US-P" "AWAIT-ROOM-ELSEWHERE"
    "SPEND-BUDGET"
    "*POLLERS*" "%POLLER-WAKE" "COLLECT-REPORTS" "RUN-ON-CARRIER"
    "RUN-PENDING-HANDLERS" "HANDLERS-WAIT-P" "MY-SCHEDULER" "IN-FIBER-P"
    "IN-SCHEDULER-P" "SCHEDULING-P" "AT-WORK-P" "*FORCE-MIGRATION*"
    "CARRIER-WAKE-WORD-ADDRESS"
    "FIBER-GROUP-MONITOR-WAKE-WORD-ADDRESS" "ALL-FREE-P" "COUNT-USED" "START-CARRIER"
    "%BARRIER-EVERYWHERE" "AWAIT-END-OF-USE" "LOOK-PERIOD" "TIME-UNTIL-ATTEMPT" "LOOK-AT-CARRIERS"
    "RETIRE-SPARE-IF-QUIET" "SHARED-WITHOUT-SCHEDULER-P" "REQUEUE-PREEMPTED" "RUN-PREEMPTED"
    "PREEMPTED-DUE-P"
    "RUN-QUEUE-CAPACITY" "RUN-QUEUE-BATCH"
    "OWN-WAITER" "END-USE" "WAKE-SLEEPER" "SLEEP-UNDISTURBED" "SLEEP-UNTIL-CHOSEN"
    "AWAIT-END-OF-CLAIM" "AWAIT-SERVICE" "SHUFFLE")
  "What machine.lisp defines in place of the runtime.")

(defun import-others (from own package)
  "Import the symbols of the package FROM, but those with a name in OWN or in PACKAGE."
  (with-package-iterator (next from :internal :external)
    (loop
      (multiple-value-bind (more symbol) (next)
        (unless more (return))
        (unless (or (member (symbol-name symbol) own :test #'string=)
                    (find-symbol (symbol-name symbol) package))
          (import symbol package))))))

(defun make-steps-package ()
  (let ((package (make-package "STEPS" :use (package-use-list "SB-FIBER")))
        (own (append *operations* *slots* *stubs* *definitions*)))
    (shadow own package)
    (dolist (from *source-packages*) (import-others from own package))))

(defun original (name)
  "The symbol of the runtime that is called NAME."
  (some (lambda (package) (find-symbol name package)) *source-packages*))

(unless (find-package "STEPS") (make-steps-package))

;;;; slots

(defun slot-reader (accessor) (get accessor 'reader))
(defun slot-writer (accessor) (get accessor 'writer))

(defun update-slot (accessor object function &optional ready)
  "Replace the value of a slot by what FUNCTION makes of it, by an access that locks; return the
old value. With READY, wait until that is true of the value."
  (let ((reader (slot-reader accessor)))
    (perform :locked object accessor
             (lambda ()
               (let ((old (funcall reader object)))
                 (funcall (slot-writer accessor) (funcall function old) object)
                 old))
             (and ready (lambda () (funcall ready (funcall reader object)))))))

(defmacro define-slots ()
  `(progn
     ,@(loop for name in *slots*
             for accessor = (intern name "STEPS")
             for original = (original name)
             collect
             `(progn
                (setf (get ',accessor 'reader) #',original
                      (get ',accessor 'writer) (lambda (value object)
                                                 (setf (,original object) value)))
                (defun ,accessor (object)
                  (perform-read object ',accessor #',original))
                (defun (setf ,accessor) (value object)
                  (perform-write object ',accessor value (slot-writer ',accessor)))
                (defun (sb-ext:cas ,accessor) (old new object)
                  (update-slot ',accessor object
                               (lambda (value) (if (eql value old) new value))))))))

(define-slots)

;;;; operations on memory

(defun steps::svref (vector index)
  (perform-read vector index (lambda (vector) (svref vector index))))
(defun (setf steps::svref) (value vector index)
  (perform-write vector index value
                 (lambda (value vector) (setf (svref vector index) value))))
(defun (sb-ext:cas steps::svref) (old new vector index)
  (perform :locked vector index (lambda ()
                                  (let ((value (svref vector index)))
                                    (when (eql value old) (setf (svref vector index) new))
                                    value))))

(defmacro steps::store-place (vector index value)
  `(setf (steps::svref ,vector ,index) ,value))

(defmacro steps::atomic-incf (place &optional (delta 1))
  (destructuring-bind (accessor object) place
    `(update-slot ',accessor ,object (lambda (value) (+ value ,delta)))))
(defmacro steps::atomic-decf (place &optional (delta 1))
  `(steps::atomic-incf ,place (- ,delta)))

(defmacro steps::barrier ((kind) &body body)
  `(multiple-value-prog1 (progn ,@body)
     ,@(when (eq kind :memory) '((perform-fence)))))

(defmacro steps::with-tiny-lock ((place) &body body)
  (destructuring-bind (accessor object) place
    (let ((holder (gensym)))
      `(let ((,holder ,object))
         (update-slot ',accessor ,holder (constantly 1) #'zerop)
         (multiple-value-prog1 (let ((*locks* (cons ,holder *locks*))) ,@body)
           (setf (,accessor ,holder) 0))))))

(defvar steps::*current-thread*)
(defmacro steps::without-interruptions (&body body) `(progn ,@body))
(defmacro steps::without-interrupts (&body body) `(progn ,@body))
(defmacro steps::with-local-interrupts (&body body) `(progn ,@body))
(defmacro steps::with-interrupts (&body body) `(progn ,@body))
(defmacro steps::with-lock ((place) &body body) `(steps::with-tiny-lock (,place) ,@body))
(defmacro steps::with-room-to-wake (&body body) `(progn ,@body))

;;;; reading the source

(defun steps::spin-loop-hint ())

(defun read-from (string &optional (start 0))
  (let ((*package* (find-package "STEPS")))
    (read-from-string string t nil :start start)))

(defun file-contents (file)
  (with-open-file (stream file :external-format :utf-8)
    (let* ((contents (make-string (file-length stream)))
           (end (read-sequence contents stream)))
      (subseq contents 0 end))))

(defparameter *source*
  (apply #'concatenate 'string
         (mapcar #'file-contents
                 (cons (merge-pathnames "fiber.lisp" *source-directory*)
                       (append (directory (merge-pathnames "fiber/*.lisp" *source-directory*))
                               (directory (merge-pathnames "../../contrib/sb-concurrency/*.lisp"
                                                           *source-directory*)))))))

;;; Only what is wanted is read: other definitions have symbols that no longer exist.
(defun find-in-source (name)
  (dolist (definer '("defun" "defmacro"))
    (dolist (indentation '("" "  "))    ; it may be in a PROGN
      (let ((start (search (format nil "~%~A(~A ~(~A~) " indentation definer name) *source*)))
        (when start (return-from find-in-source (read-from *source* start)))))))

(defun find-definition (name)
  "The form by which the function or macro NAME, a string, is defined."
  (or (find-in-source name) (error "There is no ~A in the source." name)))

(defun names-in (form)
  "The names of those symbols in FORM that the runtime has, or that are replaced."
  (let ((names '()))
    (labels ((walk (form)
               (typecase form
                 (cons (walk (car form)) (walk (cdr form)))
                 (sb-impl::comma (walk (sb-impl::comma-expr form)))
                 (symbol (when (member (symbol-package form)
                                       (mapcar #'find-package (cons "STEPS" *source-packages*)))
                           (pushnew (symbol-name form) names :test #'string=))))))
      (walk form))
    names))

(defun missing-definitions ()
  "Names of functions that those that are read call, and that use what is replaced, but are not
read."
  (let ((replaced (append *slots* *stubs* *definitions*))
        (seen '())
        (missing '()))
    (labels ((look-at-names (form)
               (dolist (name (names-in form))
                 (unless (or (member name replaced :test #'string=)
                             (member name seen :test #'string=))
                   (push name seen)
                   (look-at-function name))))
             (look-at-function (name)
               (let ((form (ignore-errors (find-in-source name))))
                 (when (intersection (names-in (cddr form)) replaced :test #'string=)
                   (push name missing))
                 (look-at-names (cddr form)))))
      (dolist (name *definitions*) (look-at-names (find-definition name))))
    missing))

;;; What the explorer counts on is that errors are errors.
(defun remove-optimization (form)
  (remove-if (lambda (part)
               (and (consp part) (eq (car part) 'declare) (consp (second part))
                    (eq (car (second part)) 'optimize)))
             form))

;;; The slot constants of the build are not in the image, so the functions that are read warn of
;;; those. What a planted bug warns of besides would be noticed by any history: it stops there.
(defun definer-from-source (form)
  "A function that defines what FORM does, and a list of the texts the compiler warned with."
  (let ((warnings '()))
    (handler-bind ((warning (lambda (warning)
                              (push (princ-to-string warning) warnings)
                              (muffle-warning warning)))
                   (sb-ext:compiler-note #'muffle-warning))
      (multiple-value-bind (definer warnings-p failure-p)
          (with-compilation-unit (:override t)
            (compile nil `(lambda ()
                            (declare (optimize (speed 0) (safety 1)))
                            ,(remove-optimization form))))
        (declare (ignore warnings-p))
        (when failure-p (error "~S does not compile." (second form)))
        (values definer warnings)))))

(defun about-unused-variable-p (text)
  (search "is defined but never used" text))

(defun define-from-source (form &optional (known-warnings nil limited-p))
  "Define what FORM does, and return what the compiler warned of: with KNOWN-WARNINGS, only those
may occur, and variables without a use."
  (multiple-value-bind (definer warnings) (definer-from-source form)
    (let ((new (remove-if #'about-unused-variable-p
                          (set-difference warnings known-warnings :test #'string=))))
      (when (and limited-p new)
        (error "~S does not compile: ~{~A~^; ~}" (second form) new)))
    (funcall definer)
    warnings))

(defun define-all-from-source ()
  (dolist (name *definitions*)
    (define-from-source (find-definition name))))

;;;; planting bugs

(defun replace-form (old new form)
  "FORM with OLD, which must be in it, replaced by NEW; both are strings."
  (let* ((old (read-from old))
         (result (subst (read-from new) old form :test #'equal)))
    (when (equal result form) (error "There is no ~S in ~S." old (second form)))
    result))

(defun changed-definition (name replacements)
  (let ((form (find-definition name)))
    (loop for (old new) on replacements by #'cddr
          do (setf form (replace-form old new form)))
    form))

(defun call-with-changes (function changes)
  (unwind-protect
       (progn (loop for (name . replacements) in changes
                    do (define-from-source (changed-definition name replacements)
                                           (define-from-source (find-definition name))))
              (funcall function))
    (loop for (name) in changes
          do (define-from-source (find-definition name)))))

(defmacro with-changes ((&rest changes) &body body)
  "Execute BODY while there are CHANGES, lists of a function's name, a form in it, what is there
instead, and perhaps more such pairs, all strings."
  `(call-with-changes (lambda () ,@body) ',changes))
