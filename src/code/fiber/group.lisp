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
;;;   move                     by
;;;   :RUNNING -> :STOPPED     a thread that finds it closed, and no fiber alive (carriers and
;;;                            monitor end)
;;;   :STOPPED -> :FINISHED    a thread that has seen them end (and frees the pollers)
;;;
;;; While a group is :STOPPED, any number of threads may try to finish it, and each may be unwound:
;;; all that is done before the last move may be done again, or by several at a time. A group is in
;;; *GROUPS* from before it has anything until it is :FINISHED.

;;; The groups that have carriers.
(define-load-time-global *groups* '())
(declaim (type list *groups*))

(declaim (type (member :one-shot :persistent) *default-poller*))
(define-load-time-global *default-poller* :one-shot
  "The kind of the pollers of groups that are started with no other.")

(declaim (type (or null (real (0))) *default-time-slice*))
(define-load-time-global *default-time-slice* nil
  "The time slice, in seconds, of groups that are started with no other.")

(defmethod print-object ((group fiber-group) stream)
  (print-unreadable-object (group stream :type t :identity t)
    (format stream "~@[~A ~]~(~A~), ~D carrier~:P, ~D fiber~:P"
            (fiber-group-name group) (fiber-group-state group)
            (length (fiber-group-schedulers group)) (fiber-group-alive group))))

(defun any-poller (fiber)
  "A poller of the group of FIBER, or NIL if that has none any more."
  (let ((group (fiber-group fiber)))    ; NIL if it has ended since it was seen to wait
    (when (and group (eq (fiber-group-state group) :running))
      (scheduler-poller (svref (fiber-group-schedulers group) 0)))))

(defun make-schedulers (group n kind)
  "A vector of N schedulers for GROUP, with pollers of KIND; none is left over if there are not
enough descriptors."
  (let ((schedulers '()) (done nil))
    (unwind-protect
         (loop for place below n
               do (push (%make-scheduler group (make-poller kind place)) schedulers)
               finally (setf done t))
      (unless done
        (dolist (scheduler schedulers) (free-poller (scheduler-poller scheduler) #'any-poller))))
    (coerce (nreverse schedulers) 'simple-vector)))

;;;; groups

(define-alien-routine ("fiber_cycles_per_millisecond" %cycles-per-millisecond) (unsigned 40))

(declaim (ftype (sfunction (&optional t &key (:carrier-count t) (:poller t) (:time-slice t)
                                             (:name t))
                           fiber-group)
                start-fibers))
(defun start-fibers (&optional fibers &key carrier-count (poller *default-poller*)
                                        (time-slice *default-time-slice*) name)
  "Start a group of CARRIER-COUNT carriers, an integer from 1 to 62, submit FIBERS, a fiber or a
list of fibers, to it, and return the group. The carriers run in the background until
FINISH-FIBERS. By default there are as many as PROCESSOR-COUNT returns. Of more than that the rest
sleep, unless fibers compute for longer than 8 ms, or wait in the kernel for longer than 2 ms, on
those that do not.

If FIBERS is NIL and there is no default group, the group becomes the default group, which
SUBMIT-FIBER, FINISH-FIBERS and FIBER-GROUP-STATISTICS call T. POLLER says how descriptors for
which fibers wait are registered: with :ONE-SHOT, which is the default, for each wait anew; with
:PERSISTENT once, which saves a system call for each wait after the first, but needs to be told of
each close. TIME-SLICE is a real from 1/1000 to 3600: a fiber that has run for so many seconds is
interrupted, and yields, if it can, see the manual; or it is NIL, the default: fibers run until they
park or yield. NAME is a string designator, for printing.

A TYPE-ERROR is signaled if an argument is something else, and an ERROR if the system has not
enough descriptors or threads, or all groups together would have more than 992 carriers."
  (let ((n (carrier-count-argument carrier-count))
        (fibers (if (listp fibers) fibers (list fibers))))
    (check-poller-kind poller)
    (check-time-slice time-slice)
    (without-interrupts ; else the group could be lost
      (let ((group (allow-with-interrupts
                     (make-running-group n :name name :poller poller :time-slice time-slice)))
            (done nil))
        (unwind-protect
             (setf done (if fibers
                            (with-local-interrupts (submit-all group fibers))
                            (progn (cas *default-group* nil group) t)))
          (unless done (allow-with-interrupts (finish-surely group))))
        group))))

(defun check-poller-kind (kind)
  (unless (typep kind '(member :one-shot :persistent))
    (error 'simple-type-error :datum kind :expected-type '(member :one-shot :persistent)
           :format-control "~@<~S is not a kind of poller; there are ~S and ~S.~:@>"
           :format-arguments (list kind :one-shot :persistent))))

(defun check-time-slice (seconds)
  (unless (typep seconds '(or null (real 1/1000 3600)))
    (error 'simple-type-error :datum seconds :expected-type '(or null (real 1/1000 3600))
           :format-control "~@<The time slice ~S is not NIL or a real from 1/1000 to 3600, in ~
                            seconds.~:@>"
           :format-arguments (list seconds))))

(defun submit-all (group fibers)
  (dolist (fiber fibers t)
    (submit-fiber group fiber)))

;;; EXIT, which unwinds this thread first, ends the fibers afterwards. No deadline holds here: it
;;; may be what has unwound the caller.
(defun finish-surely (group)
  "End GROUP, which no other thread knows. If this is unwound, a thread is made that goes on. With
interrupts off."
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
            (make-os-thread #'finish "finishing of a group of fibers")))))))

(defun carrier-count-argument (count)
  (cond ((null count) (min (processor-count) max-group-pollers))
        ((typep count `(integer 1 ,max-group-pollers)) count)
        (t (error 'simple-type-error
                  :datum count :expected-type `(integer 1 ,max-group-pollers)
                  :format-control "~@<The carrier count ~S is not an integer from 1 to ~D.~:@>"
                  :format-arguments (list count max-group-pollers)))))

(defun make-running-group (n &key name (poller *default-poller*) (time-slice *default-time-slice*))
  (when (equal (posix-getenv "SB_FIBER_FORCE_MIGRATION") "1")
    (setf *force-migration* t))
  (setf *cycles-per-millisecond* (%cycles-per-millisecond))
  (let ((group (%make-fiber-group (and name (string name)))))
    (setf (values (fiber-group-processors group) (fiber-group-limit group)) (processor-count)
          (fiber-group-time-slice group) (and time-slice (seconds-to-nanoseconds time-slice)))
    (without-interrupts
      (atomic-push group *groups*)
      (let ((problem (problem-of-equipping group n poller)))
        (when problem
          (close-group group)
          (stop-group group)
          (with-local-interrupts (error problem)))))
    group))

(defun problem-of-equipping (group n poller)
  "Give GROUP N schedulers with pollers of the kind POLLER, carriers and a monitor. Return NIL, or
what was signalled."
  (handler-case
      (progn
        (setf (fiber-group-schedulers group) (make-schedulers group n poller))
        (loop for scheduler across (fiber-group-schedulers group)
              do (start-carrier group scheduler))
        (setf (fiber-group-monitor group)
              (make-carrier-thread "fiber monitor" #'run-monitor group))
        nil)
    (serious-condition (condition) condition)))

(declaim (ftype (sfunction (fiber-group) boolean) fiber-group-done-p))
(defun fiber-group-done-p (group)
  "Return true if no fiber of GROUP, which START-FIBERS returned, is alive."
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

(declaim (ftype (sfunction (t &key (:timeout (or null (real 0))) (:abort t)) boolean)
                finish-fibers))
(defun finish-fibers (group &key timeout abort)
  "Wait until all fibers of GROUP, which START-FIBERS returned, or which is T for the default
group, have ended, at most TIMEOUT seconds, a non-negative real, and then end its carriers. If
ABORT is true, terminate the fibers first, as TERMINATE-FIBER does.

Return true if GROUP is finished, and NIL if the time was over; then GROUP goes on, and fibers can
still be submitted unless ABORT is true. If the call is unwound, another one does what is left.
Signals a SB-THREAD:THREAD-ERROR when a fiber of GROUP calls it."
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

;;; A fiber that has been aborted by its group, or by the fiber that runs it, is not aborted again
;;; by either, since it may be in a cleanup form; but a second call for a group does abort it again,
;;; if the first has given up. A call that comes before that, EXIT's for instance, only waits as
;;; well. A fiber that is being unwound by an error of its own may be in a cleanup form as well, and
;;; is aborted there, as a thread is: it could also come out of the form, and go on.
(defun abort-until-done (groups deadline &optional (aborted (make-hash-table :test 'eq)))
  "End the fibers of GROUPS that are not in ABORTED, enter them there, and wait for the end of all,
or until DEADLINE; then return false."
  (without-interrupts ; unwound in between, it would be counted for ever
    (let ((again (remove-if-not #'begin-to-abort-p groups)))
      (unwind-protect
           (with-local-interrupts
             (abort-all groups again deadline aborted)
             (every (lambda (group) (wait-until-done group deadline)) groups))
        (dolist (group groups)
          (atomic-decf (fiber-group-aborters group)))))))

(defun begin-to-abort-p (group)
  "Count one more thread that aborts the fibers of GROUP, and close it. Return true if no other does
that now, but its fibers may have been aborted before."
  (prog1 (and (= 0 (atomic-incf (fiber-group-aborters group)))
              (group-closed-p group))
    (close-group group)))

;;; The groups are closed. If no fiber was about to enter before the fibers are listed, the list has
;;; all of them.
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

;;; All fibers are told before any is woken: a fiber that joins another is to learn that it ends
;;; itself before it learns that the other has ended.
(defun abort-fibers (fibers &optional again)
  "Let FIBERS end, but those that have been aborted before, if they are of no group of AGAIN. With
interrupts off."
  (flet ((abort-p (fiber)
           (and (or (set-fiber-flag fiber +aborted+)
                    (memq (fiber-group fiber) again))
                (queue-interruption fiber #'sb-thread:abort-thread))))
    (mapc #'notify-of-interruption (remove-if-not #'abort-p fibers))))

;;; Programs that run some fibers again and again are not to make the stacks anew.
(defconstant +stack-bytes-without-group+ (* 1024 1024))

(defun stop-group (group)
  "End the carriers of GROUP, which is closed and of which no fiber is alive."
  (cas *default-group* group nil)
  (cas (fiber-group-state group) :running :stopped)
  (when (fiber-group-monitor group)
    (wake-monitor group)
    (sb-thread:join-thread (fiber-group-monitor group) :default nil))
  ;; No thread starts carriers any more. All carriers are woken, and not only the spares and
  ;; schedulers that can be found: a spare that PLACE-ORPHANS has taken is in no place.
  (mapc #'wake-carrier (fiber-group-carriers group))
  (dolist (carrier (fiber-group-carriers group))
    (sb-thread:join-thread (carrier-thread carrier) :default nil))
  (dolist (thread (fiber-group-retired group))
    (sb-thread:join-thread thread :default nil))
  (release-group group)
  (trim-stacks-to (min *cached-stack-bytes* +stack-bytes-without-group+))
  (unless *groups* (dismiss-idle-threads)))

(defun release-group (group)
  "Free what GROUP has, unless another thread has done so."
  (without-interrupts
    (when (eq (cas (fiber-group-state group) :stopped :finished) :stopped)
      (loop for scheduler across (fiber-group-schedulers group)
            do (free-poller (scheduler-poller scheduler) #'any-poller))
      (forget-group group))))

(defun forget-group (group)
  (loop (let ((old *groups*))
          (when (eq (cas *groups* old (remove group old)) old) (return)))))

(declaim (ftype (sfunction (t &key (:carrier-count t) (:poller t) (:time-slice t)) list)
                run-fibers))
(defun run-fibers (fibers &key carrier-count
                            (poller *default-poller* poller-p)
                            (time-slice *default-time-slice* time-slice-p))
  "Run FIBERS, a fiber or a list of fibers, to their end, and return a list of the first value of
each one's function, in the same order.

In a thread a group of CARRIER-COUNT carriers is started for them, as START-FIBERS does, which tells
of POLLER and TIME-SLICE, and finished when they have ended. In a fiber they run in the group of
that fiber; only if CARRIER-COUNT, POLLER or TIME-SLICE is given, or if that group takes no more
fibers, is another started, with carriers of its own.

If a fiber ended abnormally, signal the error that FIBER-JOIN signals for it, for the first such
fiber of the list. A non-local exit from here, because of this error or for another reason, ends
FIBERS, as TERMINATE-FIBER does, and waits until they have run their cleanup forms. If there is a
non-local exit from this wait too, they end all the same, and a thread finishes the group that was
started for them."
  (let ((fibers (if (listp fibers) fibers (list fibers)))
        (group (and (null carrier-count) (not poller-p) (not time-slice-p) (group-to-run-in))))
    (check-poller-kind poller)
    (check-time-slice time-slice)
    (if group
        (run-in-group group fibers)
        (run-in-new-group fibers (carrier-count-argument carrier-count) poller time-slice))))

(defun group-to-run-in ()
  "The group of the running fiber, or NIL if there is none, or if that takes no more fibers."
  (let* ((fiber (current-fiber))
         (group (and fiber (fiber-group fiber))))
    (if (and group (not (group-closed-p group)))
        group
        nil)))

(defun run-in-new-group (fibers carrier-count poller time-slice)
  (without-interrupts ; else the group could be lost
    (let ((group (allow-with-interrupts
                   (make-running-group carrier-count :poller poller :time-slice time-slice)))
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
    (without-interrupts ; all that have been submitted are in the list
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
