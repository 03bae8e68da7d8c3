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

;;; The life of a group:
;;;
;;;   :RUNNING    fibers may be submitted
;;;   :ABORTING   FINISH-FIBERS ends the fibers; none may be submitted
;;;   :STOPPED    no fiber is alive, and carriers end
;;;
;;; FINISH-FIBERS makes all moves, from :RUNNING to the others, or by way of :ABORTING.
;;;
;;; ALIVE counts the fibers from submission to end. Who waits for the end of all waits in the
;;; parking lot for its low half to change, as for a word of a mutex; it is the last
;;; fiber that wakes him.

;;; The groups that have carriers.
(define-load-time-global *groups* '())
(declaim (type list *groups*))

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
    (setf (carrier-scheduler carrier) scheduler
          (carrier-thread carrier) (make-carrier-thread "fiber carrier" #'run-carrier carrier))
    (push carrier (fiber-group-carriers group))))

;;; Ephemeral, so that it neither keeps the image from exiting nor is asked to unwind.
(defun make-carrier-thread (name function argument)
  (sb-thread::with-system-mutex (sb-thread::*make-thread-lock*)
    (sb-thread::make-system-thread name function (list argument) nil)))

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
  (when (equal (posix-getenv "SB_FIBER_FORCE_MIGRATION") "1")
    (setf *force-migration* t))
  (let ((group (%make-fiber-group (and name (string name)))))
    (setf (fiber-group-schedulers group) (make-schedulers group n))
    (loop for scheduler across (fiber-group-schedulers group)
          do (start-carrier group scheduler))
    (setf (fiber-group-monitor group)
          (make-carrier-thread "fiber monitor" #'run-monitor group))
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
      (when (if abort
                (abort-until-done (list group) deadline)
                (wait-until-done group deadline))
        (stop-group group)
        t))))

;;; Who was about to submit a fiber when the state changed may do so after the fibers have
;;; been listed: they are listed again. None is aborted twice, as it may be in a cleanup form. One that
;;; is being unwound by an error of its own may be in one as well, and is aborted there, as a thread is:
;;; it could also come out of it, and go on.
(defun abort-until-done (groups deadline)
  (dolist (group groups) (cas (fiber-group-state group) :running :aborting))
  (let ((aborted (make-hash-table :test 'eq)))
    (loop
      (dolist (fiber (list-all-fibers))
        (when (and (memq (fiber-group fiber) groups) (not (gethash fiber aborted)))
          (setf (gethash fiber aborted) t)
          (%interrupt-fiber fiber #'sb-thread:abort-thread)))
      (let ((group (find-if-not #'fiber-group-done-p groups))
            (soon (seconds-from-now 1/20)))
        (cond ((null group) (return t))
              ((deadline-passed-p deadline) (return nil))
              (t (wait-until-done group (if deadline (min soon deadline) soon))))))))

(defun stop-group (group)
  "End the carriers of GROUP, of which no fiber is alive."
  (cas *default-group* group nil)
  (when (stop-state group)
    (ring-monitor group)
    (sb-thread:join-thread (fiber-group-monitor group) :default nil)
    (loop for scheduler across (fiber-group-schedulers group)
          do (wake-poller (scheduler-poller scheduler)))
    (loop for spare across (fiber-group-spares group)
          unless (eql spare 0) do (wake-carrier spare))
    (dolist (carrier (fiber-group-carriers group))
      (sb-thread:join-thread (carrier-thread carrier) :default nil))
    (dolist (thread (fiber-group-retired group))
      (sb-thread:join-thread thread :default nil))
    (loop for scheduler across (fiber-group-schedulers group)
          do (free-poller (scheduler-poller scheduler) #'any-poller))
    (forget-group group)
    (unless *groups* (dismiss-idle-threads))))

(defun stop-state (group)
  "Let the state of GROUP be :STOPPED. Return false if somebody else has done it."
  (or (eq (cas (fiber-group-state group) :running :stopped) :running)
      (eq (cas (fiber-group-state group) :aborting :stopped) :aborting)))

(defun forget-group (group)
  (loop (let ((old *groups*))
          (when (eq (cas *groups* old (remove group old)) old) (return)))))

(declaim (ftype (sfunction (t &key (:carrier-count t)) list) run-fibers))
(defun run-fibers (fibers &key carrier-count)
  "Run FIBERS, a list of fibers or a fiber, to their end, on CARRIER-COUNT carriers started for them.
Returns a list of what FIBER-JOIN returns for each as first value. Signals what it signals."
  (let* ((fibers (if (listp fibers) fibers (list fibers)))
         (group (make-running-group (carrier-count-argument carrier-count) nil)))
    (submit-all group fibers)
    (unwind-protect (mapcar #'fiber-join-first fibers)
      ;; EXIT, which unwinds this thread first, ends the fibers afterwards.
      (unless *exit-in-progress* (finish-fibers group)))))

(defun fiber-join-first (fiber)
  (values (fiber-join fiber)))
