;;;; groups of carriers, as users see them

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; The state of a group:
;;;
;;;   :RUNNING   -> :STOPPED    who finds it closed, and no fiber alive   carriers and monitor end
;;;   :STOPPED   -> :FINISHED   who has seen them end                     and frees the pollers
;;;
;;; While a group is :STOPPED, any number of threads may try to finish it, and each may be unwound:
;;; all that is done before the last move may be done again, or by several at a time. A group is in
;;; *GROUPS* from before it has anything until it is :FINISHED.

;;; The groups that have carriers.
(define-load-time-global *groups* '())
(declaim (type list *groups*))

;;;; carriers

(defun any-poller (fiber)
  "A poller of the group of FIBER, or NIL if that has none any more."
  (let ((group (fiber-group fiber)))    ; NIL if it has ended since it was seen to wait
    (when (and group (eq (fiber-group-state group) :running))
      (scheduler-poller (svref (fiber-group-schedulers group) 0)))))

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

(define-alien-routine ("fiber_carrier_make" %carrier-make) unsigned)
(define-alien-routine ("fiber_carrier_begin" %carrier-begin) void (context unsigned))
(define-alien-routine ("fiber_carrier_end" %carrier-end) void)

(defun free-spare-stacks ()
  (with-stacks-lock
    (alien-funcall (extern-alien "fiber_carrier_free_spares" (function void)))
    nil))

(defun begin-carrier (carrier)
  (%carrier-begin (carrier-context carrier))
  (setf (carrier-thread carrier) *current-thread*
        *carrier* carrier))

(defun end-carrier ()
  (setf *carrier* nil)
  (free-spare-stacks)
  (%carrier-end))

(defun run-carrier (carrier)
  (without-interrupts
    (begin-carrier carrier)
    (accept-signals)
    (carrier-loop carrier)
    (end-carrier)))

;;; A thread that is not in the list would not be waited for.
(defun start-carrier (group scheduler)
  (without-interrupts
    (let ((carrier (%make-carrier group (%carrier-make) scheduler)))
      (when (= (carrier-context carrier) 0)
        (error "There is no memory for a carrier."))
      (setf (carrier-thread carrier) (make-thread-of carrier))
      (push carrier (fiber-group-carriers group)))))

(defun make-thread-of (carrier)
  (let ((thread nil))
    (unwind-protect
         (setf thread (make-carrier-thread "fiber carrier" #'run-carrier carrier))
      (unless thread (%free (int-sap (carrier-context carrier)))))))

;;; With interrupts off: a fiber that parked in BODY would go on in another thread.
(defmacro with-signals-blocked (&body body)
  "Execute BODY with the signals blocked that START-THREAD blocks; a new thread inherits that."
  (with-unique-names (old)
    `(let ((,old (make-array (* sb-unix::sizeof-sigset_t sb-vm:n-byte-bits)
                             :element-type 'bit :initial-element 0)))
       (with-pinned-objects (,old)
         (sb-unix::pthread-sigmask sb-unix::SIG_BLOCK (foreign-symbol-sap "thread_start_sigset" t) ,old)
         (unwind-protect (progn ,@body)
           (sb-unix::pthread-sigmask sb-unix::SIG_SETMASK ,old nil))))))

;;; Ephemeral, so that it neither keeps the image from exiting nor is asked to unwind.
(defun make-carrier-thread (name function argument)
  "Start a thread that calls FUNCTION with ARGUMENT, and handles no deferrable signal before
FUNCTION calls ACCEPT-SIGNALS: an interruption could unwind it before it has begun."
  (call-with-make-thread-lock
   (lambda ()
     (with-signals-blocked
       (sb-thread::make-system-thread name function (list argument) nil)))))

;;; START-THREAD blocks signals before it takes the lock. A fiber would park with them blocked, and
;;; go on in an OS thread that has them not: the one would receive no more, the other's child would
;;; before it can.
(defun start-thread (thread function arguments)
  "What START-THREAD of threads does, with the lock taken first."
  (call-with-make-thread-lock
   (lambda () (sb-thread::start-thread thread function arguments))))

(defun call-with-make-thread-lock (function)
  (declare (function function))
  (let ((thread (sb-thread::with-system-mutex (sb-thread::*make-thread-lock*)
                  (handler-case (funcall function)
                    (error (condition) condition)))))
    ;; Handlers, or a debugger, run without the lock.
    (when (typep thread 'error) (error thread))
    thread))

(defun accept-signals ()
  "Let this thread, in which interrupts are off, be sent signals."
  (sb-unix::pthread-sigmask sb-unix::SIG_UNBLOCK (foreign-symbol-sap "thread_start_sigset" t) nil)
  (block-timer-signal))

(defun refuse-signals ()
  "Let this thread be sent no signals; those of the process go to others."
  (sb-unix::pthread-sigmask sb-unix::SIG_BLOCK (foreign-symbol-sap "thread_start_sigset" t) nil))

;;;; groups

(define-alien-routine ("fiber_cycles_per_millisecond" %cycles-per-millisecond) (unsigned 40))

(declaim (ftype (sfunction (&optional t &key (:carrier-count t) (:poller t) (:name t)) fiber-group)
                start-fibers))
(defun start-fibers (&optional fibers &key carrier-count (poller :one-shot) name)
  "Start CARRIER-COUNT carriers, by default as many as there are processors that the process may
use, and submit FIBERS, a fiber or a list of fibers, to them. Returns the group of carriers, which
run in the background until FINISH-FIBERS. Without FIBERS, and if no group is the default one, this
becomes the group that SUBMIT-FIBER calls T. POLLER says how descriptors are registered; there is
:ONE-SHOT. NAME is for printing."
  (let ((n (carrier-count-argument carrier-count))
        (fibers (if (listp fibers) fibers (list fibers))))
    (unless (eq poller :one-shot)
      (error 'simple-type-error :datum poller :expected-type '(eql :one-shot)
             :format-control "~@<~S is not a kind of poller; there is :ONE-SHOT.~:@>"
             :format-arguments (list poller)))
    (without-interrupts ; lest the group be lost
      (let ((group (allow-with-interrupts (make-running-group n name)))
            (done nil))
        (unwind-protect
             (setf done (if fibers
                            (with-local-interrupts (submit-all group fibers))
                            (progn (cas *default-group* nil group) t)))
          (unless done (allow-with-interrupts (finish-surely group))))
        group))))

(defun submit-all (group fibers)
  (dolist (fiber fibers t)
    (submit-fiber group fiber)))

;;; EXIT, which unwinds this thread first, ends the fibers afterwards. No deadline holds here: it
;;; may be what has unwound the caller.
(defun finish-surely (group)
  "End GROUP, which nobody else knows. If this is unwound a thread goes on. With interrupts off."
  (without-interrupts
    (let ((aborted (make-hash-table :test 'eq))
          (done *exit-in-progress*))
      (flet ((finish ()
               (abort-until-done (list group) nil aborted)
               (stop-group group)))
        (unwind-protect
             (unless done
               (with-deadline (:seconds nil :override t)
                 (with-local-interrupts (finish)))
               (setf done t))
          (unless (or done *exit-in-progress*)
            (sb-thread:make-thread #'finish :name "finishing of a group of fibers")))))))

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
  (when (equal (posix-getenv "SB_FIBER_FORCE_MIGRATION") "1")
    (setf *force-migration* t))
  (setf *cycles-per-millisecond* (%cycles-per-millisecond))
  (let ((group (%make-fiber-group (and name (string name)))))
    (without-interrupts
      (atomic-push group *groups*)
      (let ((problem (problem-of-equipping group n)))
        (when problem
          (close-group group)
          (stop-group group)
          (with-local-interrupts (error problem)))))
    group))

(defun problem-of-equipping (group n)
  "Give GROUP schedulers, carriers and a monitor. Return NIL, or what was signalled."
  (handler-case
      (progn
        (setf (fiber-group-schedulers group) (make-schedulers group n))
        (loop for scheduler across (fiber-group-schedulers group)
              do (start-carrier group scheduler))
        (setf (fiber-group-monitor group)
              (make-carrier-thread "fiber monitor" #'run-monitor group))
        nil)
    (serious-condition (condition) condition)))

(declaim (ftype (sfunction (fiber-group) boolean) fiber-group-done-p))
(defun fiber-group-done-p (group)
  "True if no fiber of GROUP is alive."
  (= (fiber-group-alive group) 0))

(defun wait-until-done (group deadline)
  "Wait until no fiber of GROUP is alive, and close it. Return false if DEADLINE comes before."
  (loop
    (let ((alive (fiber-group-alive group)))
      (cond ((= alive 0)
             (when (close-if-empty group) (return t)))
            ((not (wait-while-equal group (fiber-group-population-address group) alive
                                    (and deadline (seconds-until deadline))))
             (return nil))))))

(declaim (ftype (sfunction (t &key (:timeout (or null (real 0))) (:abort t)) boolean) finish-fibers))
(defun finish-fibers (group &key timeout abort)
  "Wait until the fibers of GROUP have ended, at most TIMEOUT seconds, and then stop its carriers.
If ABORT is true, terminate the fibers first. Returns true if the group is finished, false if
TIMEOUT is over; then it goes on, but after ABORT takes no more fibers. To be called from outside of
GROUP."
  (let ((group (group-argument group)))
    (when (let ((fiber (current-fiber))) (and fiber (eq (fiber-group fiber) group)))
      (misuse *current-thread* "~@<~S cannot wait for the end of ~S, to which it belongs.~:@>"
              *current-thread* group))
    (let ((deadline (and timeout (seconds-from-now timeout))))
      (when (if abort
                (abort-until-done (list group) deadline)
                (wait-until-done group deadline))
        (stop-group group)
        t))))

;;; A fiber that has been aborted by its group, or by the fiber that runs it, is not aborted again by one
;;; of these, as it may be in a cleanup form; but a second call for a group means that. One that is
;;; being unwound by an error of its own may be in one as well, and is aborted there, as a thread is: it
;;; could also come out of it, and go on.
(defun abort-until-done (groups deadline &optional (aborted (make-hash-table :test 'eq)))
  "End the fibers of GROUPS that are not in ABORTED, enter them there, and wait for the end of all,
or until DEADLINE; then return false."
  (let ((again (remove-if-not #'group-closed-p groups)))
    (mapc #'close-group groups)
    (abort-all groups again deadline aborted)
    (every (lambda (group) (wait-until-done group deadline)) groups)))

;;; The groups are closed. If none was about to enter before the fibers are listed, then all are.
(defun abort-all (groups again deadline aborted)
  "Abort the fibers of GROUPS that are not in ABORTED, and enter them there, unless DEADLINE comes
before all can be found. Those of the groups AGAIN may have been aborted before."
  (flet ((abort-p (fiber)
           (and (memq (fiber-group fiber) groups) (not (gethash fiber aborted)))))
    (loop
      (let* ((more (some #'entries-p groups))
             (fibers (progn (barrier (:read))
                            (remove-if-not #'abort-p (list-all-fibers)))))
        (without-interrupts
          (dolist (fiber fibers) (setf (gethash fiber aborted) t))
          (abort-fibers fibers again))
        (when (or (not more) (deadline-passed-p deadline)) (return))
        (fiber-sleep 1/1000)))))

;;; All are told before any is woken: one that joins another is to learn first that it ends itself, and
;;; not that the other has.
(defun abort-fibers (fibers &optional again)
  "Let FIBERS end, but those that were told so before, if they are of no group of AGAIN. With
interrupts off."
  (flet ((tell (fiber)
           (and (or (null (cas (fiber-aborted fiber) nil t))
                    (memq (fiber-group fiber) again))
                (queue-interruption fiber #'sb-thread:abort-thread))))
    (mapc #'notify-of-interruption (remove-if-not #'tell fibers))))

(defun stop-group (group)
  "End the carriers of GROUP, which is closed and of which no fiber is alive."
  (cas *default-group* group nil)
  (cas (fiber-group-state group) :running :stopped)
  (when (fiber-group-monitor group)
    (ring-monitor group)
    (sb-thread:join-thread (fiber-group-monitor group) :default nil))
  ;; Nobody starts carriers any more. All are woken, and not the spares and schedulers that can be
  ;; seen: a spare that PLACE-ORPHANS has in its hands is in no place.
  (mapc #'wake-carrier (fiber-group-carriers group))
  (dolist (carrier (fiber-group-carriers group))
    (sb-thread:join-thread (carrier-thread carrier) :default nil))
  (dolist (thread (fiber-group-retired group))
    (sb-thread:join-thread thread :default nil))
  (release-group group)
  (unless *groups* (dismiss-idle-threads)))

(defun release-group (group)
  "Free what GROUP has, unless somebody else has done it."
  (without-interrupts
    (when (eq (cas (fiber-group-state group) :stopped :finished) :stopped)
      (loop for scheduler across (fiber-group-schedulers group)
            do (free-poller (scheduler-poller scheduler) #'any-poller))
      (forget-group group))))

(defun forget-group (group)
  (loop (let ((old *groups*))
          (when (eq (cas *groups* old (remove group old)) old) (return)))))

(declaim (ftype (sfunction (t &key (:carrier-count t)) list) run-fibers))
(defun run-fibers (fibers &key carrier-count)
  "Run FIBERS, a list of fibers or a fiber, to their end. Returns a list of what FIBER-JOIN returns
for each as first value. Signals what it signals for the first that ended abnormally. In a thread
they run in a group of CARRIER-COUNT carriers that is started for them, and finished; in a fiber
they run in the group of that fiber, unless CARRIER-COUNT is given. A non-local exit from here ends
FIBERS, and waits for their cleanup forms."
  (let ((fibers (if (listp fibers) fibers (list fibers)))
        (group (and (null carrier-count) (group-to-run-in))))
    (if group
        (run-in-group group fibers)
        (run-in-new-group fibers (carrier-count-argument carrier-count)))))

(defun group-to-run-in ()
  "The group of the running fiber, or NIL if there is none, or if that takes no more fibers."
  (let* ((fiber (current-fiber))
         (group (and fiber (fiber-group fiber))))
    (if (and group (not (group-closed-p group)))
        group
        nil)))

(defun run-in-new-group (fibers carrier-count)
  (without-interrupts ; lest the group be lost
    (let ((group (allow-with-interrupts (make-running-group carrier-count nil)))
          (done nil))
      (unwind-protect
           (with-local-interrupts
             (submit-all group fibers)
             (prog1 (mapcar #'fiber-join-first fibers)
               (finish-fibers group)
               (setf done t)))
        (unless done (allow-with-interrupts (finish-surely group)))))))

(defun run-in-group (group fibers)
  (let ((submitted '()) (done nil))
    (without-interrupts ; what is running is in the list
      (unwind-protect
           (progn
             (dolist (fiber fibers)
               (allow-with-interrupts (submit-fiber group fiber))
               (push fiber submitted))
             (prog1 (with-local-interrupts (mapcar #'fiber-join-first fibers))
               (setf done t)))
        (unless (or done *exit-in-progress*)
          (allow-with-interrupts (end-fibers submitted)))))))

(defun end-fibers (fibers)
  "End FIBERS, and wait for that. If this is unwound they end all the same. With interrupts off."
  (without-interrupts
    (abort-fibers fibers)
    (with-deadline (:seconds nil :override t)
      (with-local-interrupts
        (dolist (fiber fibers)
          (wait-for-end fiber nil))))))

(defun fiber-join-first (fiber)
  (values (fiber-join fiber)))
