;;;; what else operations wait for: semaphores, mailboxes, gates, ends of threads, descriptors

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-CONCURRENCY")

;;; Semaphores and gates are made of a mutex and a waitqueue. A waitqueue may have a line of those
;;; that wait for what it belongs to as one of several things: WATCH is NIL, or (FUNCTION OBJECT .
;;; LINE) once somebody has waited so. CONDITION-NOTIFY calls FUNCTION, with the waitqueue and the
;;; number of waiters to be woken, and wakes as many others as that returns. What is true when
;;; nobody is inside:
;;;  - a watch and its line are guarded by the mutex that goes with the waitqueue;
;;;  - nobody waits in the line of a semaphore with a count, or of a gate that is open; nodes whose
;;;    waiters wait no more are not counted;
;;;  - the WAITCOUNT of a semaphore with a watch is greater by one than the number of those that
;;;    wait on it, so that SIGNAL-SEMAPHORE calls CONDITION-NOTIFY.
;;; Who is chosen for a semaphore has been given a permit, as receivers of channels a value: so
;;; it comes before those in WAIT-ON-SEMAPHORE, which look for one when they run.
;;;
;;; Why there are no such nodes in the parking lot and the chains of the waiter map: a fiber there
;;; waits for one thing, and a wake-up is but a hint, after which it looks at what it waits for. Who
;;; waits for several must be given one of them and no other, which only those who give can do: the
;;; mutex under which a permit is counted is above the futex. A descriptor gives nothing; for that a
;;; fiber of its own waits, which is cheaper than it seems: it costs little beside the system calls
;;; that arm the poller.

(defun ensure-watched (queue mutex function object)
  "Let QUEUE, which goes with MUTEX, have a watch. Return true if it had none."
  (unless (sb-thread::waitqueue-watch queue)
    (let ((watch (list* function object (make-line))))
      (holding (mutex)
        (unless (sb-thread::waitqueue-watch queue)
          (setf (sb-thread::waitqueue-watch queue) watch)
          t)))))

(declaim (inline watched-object watched-line))
(defun watched-object (queue)
  (second (the cons (sb-thread::waitqueue-watch queue))))

(defun watched-line (queue)
  (the line (cddr (the cons (sb-thread::waitqueue-watch queue)))))

;;; A claimant holds another lock, and takes none: it does not wait for the caller.
(defun choose-first (line)
  "Take the first node whose waiter waits out of LINE, choose it, and return it; or NIL."
  (let ((claimant nil))
    (loop
      (let ((partner (take-partner line nil claimant)))
        (unless (eq partner t) (return partner))
        (await-end-of-claim (truly-the waiter claimant))))))

;;; The state that they wait for has been changed.
(defmacro waking-chosen (&body body)
  #+sb-fiber `(flet ((wake () (sb-fiber::without-interruptions ,@body)))
                (declare (dynamic-extent #'wake))
                (sb-fiber::call-with-waking-room #'wake))
  #-sb-fiber `(without-interrupts ,@body))

(defun leave-watched (mutex node)
  (when (node-line node)
    (holding (mutex) (remove-node node))))

;;;; semaphores

(defun serve-semaphore (queue n)
  "Give those in the line of QUEUE, of a semaphore, what permits there are. Return how many others
of N may be woken."
  (declare (type (and fixnum unsigned-byte) n))
  (let ((semaphore (watched-object queue)) (line (watched-line queue)))
    (declare (type semaphore semaphore))
    (waking-chosen
      (loop until (= 0 (sb-thread::semaphore-%count semaphore))
            do (let ((node (choose-first line)))
                 (unless node (return))
                 (decf (sb-thread::semaphore-%count semaphore))
                 (setf n (max 0 (1- n)))
                 (wake-waiter (node-waiter (truly-the node node))))))
    n))

(defun watch-semaphore (semaphore)
  (when (ensure-watched (sb-thread::semaphore-queue semaphore)
                        (sb-thread::semaphore-mutex semaphore)
                        #'serve-semaphore semaphore)
    (atomic-incf (sb-thread::semaphore-waitcount semaphore)))
  nil)

(defun has-permit-p (semaphore) (plusp (semaphore-count semaphore)))

(defun take-permit-or-wait (semaphore node claim)
  (declare (type semaphore semaphore))
  (holding ((sb-thread::semaphore-mutex semaphore))
    (claiming-oneself (node claim)
      (cond ((plusp (sb-thread::semaphore-%count semaphore))
             (decf (sb-thread::semaphore-%count semaphore))
             :done)
            (t (wait-in-line (watched-line (sb-thread::semaphore-queue semaphore)) node))))))

(defun leave-semaphore (semaphore node)
  (leave-watched (sb-thread::semaphore-mutex semaphore) node))

(defun return-permit (semaphore)
  (without-interrupts ; unwound where it waits for the mutex, it would lose the permit
    (let ((sb-impl::*deadline* nil)) (signal-semaphore semaphore))))

(sb-ext:define-load-time-global **permit**
  (make-way :likely-p #'has-permit-p :try #'take-permit-or-wait :prepare #'watch-semaphore
            :leave #'leave-semaphore :collect (constantly t) :undo #'return-permit))

(defun semaphore-operation (semaphore)
  "Return the operation that decrements the count of SEMAPHORE by one, when it is not zero, and
returns true. It comes before those that wait by WAIT-ON-SEMAPHORE."
  (check-type semaphore semaphore)
  (make-occasion semaphore **permit**))

;;;; mailboxes

(defmacro through-semaphore (function &rest parameters)
  "A function that calls FUNCTION with the semaphore of a mailbox, and what PARAMETERS name."
  `(lambda (mailbox ,@parameters) (,function (mailbox-semaphore mailbox) ,@parameters)))

(defun take-message (mailbox value)
  (declare (ignore value))
  (multiple-value-bind (message found-p) (dequeue (mailbox-queue mailbox))
    (unless found-p (sb-int:bug "~S has fewer messages than permits." mailbox))
    message))

(sb-ext:define-load-time-global **message**
  (make-way :likely-p (through-semaphore has-permit-p)
            :try (through-semaphore take-permit-or-wait node claim)
            :prepare (through-semaphore watch-semaphore)
            :leave (through-semaphore leave-semaphore node)
            :collect #'take-message
            :undo (through-semaphore return-permit)))

(defun mailbox-operation (mailbox)
  "Return the operation that removes the oldest message from MAILBOX, when there is one, and returns
it, and true. It comes before those that wait by RECEIVE-MESSAGE."
  (check-type mailbox mailbox)
  (wrap (make-occasion mailbox **message**) (lambda (message) (values message t))))

;;;; gates

(defun serve-gate (queue n)
  "Choose those in the line of QUEUE, of a gate, which is open. Return N."
  (let ((line (watched-line queue)))
    (waking-chosen
      (loop
        (let ((node (choose-first line)))
          (unless node (return))
          (wake-waiter (node-waiter (truly-the node node)))))))
  n)

(defun watch-gate (gate)
  (ensure-watched (gate-queue gate) (gate-mutex gate) #'serve-gate gate)
  nil)

(defun pass-or-wait (gate node claim)
  (declare (type gate gate))
  (holding ((gate-mutex gate))
    (claiming-oneself (node claim)
      (if (gate-open-p gate)
          :done
          (wait-in-line (watched-line (gate-queue gate)) node)))))

(defun leave-gate (gate node) (leave-watched (gate-mutex gate) node))

(sb-ext:define-load-time-global **opening**
  (make-way :likely-p #'gate-open-p :try #'pass-or-wait :prepare #'watch-gate
            :leave #'leave-gate :collect (constantly t)))

(defun gate-operation (gate)
  "Return the operation that waits until GATE is open, and returns true."
  (check-type gate gate)
  (make-occasion gate **opening**))

;;;; ends of threads

;;; What needs no waiting
(sb-ext:define-load-time-global **always**
  (make-way :likely-p (constantly t) :try (constantly :done) :leave (constantly nil)
            :collect (constantly t)))

;;; A thread has a semaphore until it ends, and then so many permits that nobody takes the last.
(defun join-operation (thread)
  "Return the operation that waits until THREAD, which may be a fiber that was submitted, has ended,
and returns its values, or signals JOIN-THREAD-ERROR, as JOIN-THREAD does. For a fiber another fiber
of its group waits, see FIBER-PROMISE."
  (check-type thread thread)
  #+sb-fiber (when (typep thread 'sb-fiber:fiber)
               (return-from join-operation (promise-operation (fiber-promise thread))))
  (let ((semaphore (sb-thread::thread-semaphore thread)))
    (wrap (if semaphore (semaphore-operation semaphore) (make-occasion nil **always**))
          (lambda (ended-p)
            (declare (ignore ended-p))
            (join-thread thread)))))

;;;; descriptors

#+sb-fiber
(progn
  (defstruct (readiness (:constructor make-readiness (fd direction)) (:copier nil))
    (fd (missing-arg) :type (unsigned-byte 31) :read-only t)
    (direction (missing-arg) :type (member :input :output) :read-only t))

  ;; What waits for a descriptor, on behalf of one wait for several things
  (defstruct (watcher (:constructor make-watcher (promise fiber)) (:copier nil))
    (promise (missing-arg) :type promise :read-only t)
    (fiber (missing-arg) :type sb-fiber:fiber :read-only t))
  (declaim (freeze-type readiness watcher))

  (defun watch-until-ready (promise fd direction)
    (unwind-protect
         (handler-case (progn (sb-sys:wait-until-fd-usable fd direction)
                              (fulfil promise t))
           (error (condition) (break-promise promise condition)))
      ;; If it is unwound; else this does nothing.
      (break-promise promise (make-condition 'sb-thread:join-thread-error
                                             :thread *current-thread* :problem :abort))))

  (defun start-watcher (readiness)
    (let* ((promise (make-promise))
           (fiber (sb-fiber:make-fiber #'watch-until-ready
                                       :arguments (list promise (readiness-fd readiness)
                                                        (readiness-direction readiness))
                                       :name "watcher"))
           (watcher (make-watcher promise fiber)))
      (without-interrupts               ; a watcher that nobody knows would stay
        (let ((sb-impl::*deadline* nil))
          (sb-fiber:submit-fiber (sb-fiber::group-of-scope nil) fiber)))
      watcher))

  (defun ready-or-wait (readiness node claim)
    (cond (node
           (let ((watcher (node-value node)))
             (values (accept (promise-channel (watcher-promise watcher)) node claim) watcher)))
          ((sb-unix:unix-simple-poll (readiness-fd readiness) (readiness-direction readiness) 0)
           :done)
          (t :refused)))

  (defun end-watcher (readiness node)
    (declare (ignore readiness))
    (let ((watcher (node-value node)))
      (leave-line (promise-channel (watcher-promise watcher)) node)
      (sb-fiber:cancel-fiber (watcher-fiber watcher))))

  (defun what-watcher-saw (readiness watcher)
    "Return NIL if the descriptor is ready, or a condition to be signalled."
    (declare (ignore readiness))
    (when watcher
      (let ((promise (watcher-promise watcher)))
        (and (eq (promise-outcome promise) :broken) (promise-result promise)))))

  (sb-ext:define-load-time-global **readiness**
    (make-way :likely-p (constantly t) :try #'ready-or-wait :prepare #'start-watcher
              :leave #'end-watcher :collect #'what-watcher-saw))

  (defun descriptor-operation (fd direction)
    "Return the operation that waits until the descriptor FD, a non-negative integer, can be read or
written without waiting, as DIRECTION, :INPUT or :OUTPUT, says, or something is wrong with it, and
returns true. If it has to wait, a fiber does that: of the group of the one that calls PERFORM, or
of the default group, which is started if there is none. Signals what SB-SYS:WAIT-UNTIL-FD-USABLE
signals, as when FD is closed, and what SB-FIBER:SUBMIT-FIBER signals."
    (wrap (make-occasion (make-readiness fd direction) **readiness**)
          (lambda (problem)
            (when problem (error problem))
            t))))
