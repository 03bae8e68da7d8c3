;;;; what else operations wait for: semaphores, mailboxes, gates, ends of threads, descriptors

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-CONCURRENCY")

;;; Semaphores and gates are made of a mutex and a waitqueue. A waitqueue may have a line of those
;;; that wait for what it belongs to as one of several things: its WATCH is NIL, or a cons of a
;;; function and a WATCH once somebody has waited so. CONDITION-NOTIFY calls the function, with the
;;; waitqueue and the number of waiters to be woken, and then wakes as many as that returns. What is
;;; true when nobody is inside:
;;;  - a watch is guarded by the mutex that goes with the waitqueue;
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
;;; mutex under which a permit is counted is above the futex. A descriptor gives nothing, nor does
;;; the end of a fiber: for these a fiber waits, which costs little beside the system calls that
;;; arm a poller.

;;; The lock is for claiming: a claimant must not be stopped by the collector, or who waits for the
;;; end of the claim might do so with the collector held off, for ever.
(defstruct (watch (:include line) (:constructor make-watch (object)) (:copier nil))
  (object (missing-arg) :read-only t)
  (lock 0 :type word))
(declaim (freeze-type line watch))

(defmacro claiming-under-mutex ((watch node claim) &body body)
  "As CLAIMING-ONESELF, for who holds the mutex that goes with WATCH, which may be NIL if NODE is."
  `(if ,claim
       (sb-fiber::with-tiny-lock ((watch-lock (truly-the watch ,watch)))
         (claiming-oneself (,node t) ,@body))
       (progn ,@body)))

(declaim (inline watch-of))
(defun watch-of (queue)
  "The watch of QUEUE, or NIL."
  (truly-the (or null watch) (cdr (truly-the list (sb-thread::waitqueue-watch queue)))))

(defun ensure-watched (queue mutex function object)
  "Let QUEUE, which goes with MUTEX and belongs to OBJECT, have a watch, which FUNCTION serves."
  (unless (sb-thread::waitqueue-watch queue)
    (let ((watch (cons function (make-watch object))))
      (holding (mutex)
        (unless (sb-thread::waitqueue-watch queue)
          ;; First, or another could wait by the watch and not be counted.
          (when (typep object 'semaphore)
            (atomic-incf (sb-thread::semaphore-waitcount object)))
          (setf (sb-thread::waitqueue-watch queue) watch))))))

;;; A claimant takes no lock: it does not wait for the caller.
(defun choose-first (watch)
  "Take the first node whose waiter waits out of the line WATCH, choose it, and return it; or NIL."
  (let ((claimant nil))
    (loop
      (let ((partner (take-partner watch nil claimant)))
        (unless (eq partner t) (return partner))
        (await-end-of-claim (truly-the waiter claimant))))))

;;; What they wait for has been changed already.
(defmacro waking-chosen ((queue n) &body body)
  "Execute BODY, which serves those in the line of QUEUE. If the stack is used up the exhaustion is
signalled first, and then, in the room that there is for that, CONDITION-NOTIFY begins again."
  (with-unique-names (room-p)
    `(let ((,room-p nil))
       (unwind-protect (progn (sb-fiber::ensure-waking-room 6144)
                              (setf ,room-p t))
         (if ,room-p
             (sb-fiber::without-interruptions ,@body)
             (condition-notify ,queue ,n))))))

(defun leave-watched (mutex node)
  (when (node-line node)
    (holding (mutex) (remove-node node))))

;;;; semaphores

(defun serve-semaphore (queue n)
  "Give those in the line of QUEUE, of a semaphore, what permits there are. Return how many others
of N are to be woken."
  (declare (type (and fixnum unsigned-byte) n))
  (let* ((watch (truly-the watch (watch-of queue)))
         (semaphore (watch-object watch)))
    (declare (type semaphore semaphore))
    (waking-chosen (queue n)
      (loop until (= 0 (sb-thread::semaphore-%count semaphore))
            do (let ((node (choose-first watch)))
                 (unless node (return))
                 (decf (sb-thread::semaphore-%count semaphore))
                 (wake-waiter (node-waiter (truly-the node node))))))
    ;; N counts the watch as one, however many have been served.
    (min n (sb-thread::semaphore-%count semaphore))))

(defun watch-semaphore (semaphore)
  (ensure-watched (sb-thread::semaphore-queue semaphore) (sb-thread::semaphore-mutex semaphore)
                  #'serve-semaphore semaphore)
  nil)

(defun has-permit-p (semaphore) (plusp (semaphore-count semaphore)))

(defun take-permit-or-wait (semaphore node claim)
  (declare (type semaphore semaphore))
  (holding ((sb-thread::semaphore-mutex semaphore))
    (let ((watch (watch-of (sb-thread::semaphore-queue semaphore))))
      (claiming-under-mutex (watch node claim)
        (cond ((= 0 (sb-thread::semaphore-%count semaphore))
               (wait-in-line (truly-the watch watch) node))
              (t (setf (sb-thread::semaphore-%count semaphore)
                       (truly-the index (1- (sb-thread::semaphore-%count semaphore))))
                 :done))))))

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
  (operation-of-leaf (make-occasion semaphore **permit**)))

;;;; mailboxes

(defmacro through (reader function &rest parameters)
  "A function that calls FUNCTION with what READER reads of its argument, and what PARAMETERS name."
  `(lambda (object ,@parameters) (,function (,reader object) ,@parameters)))

(defun take-message (mailbox value)
  (declare (ignore value))
  (multiple-value-bind (message found-p) (dequeue (mailbox-queue mailbox))
    (unless found-p (sb-int:bug "~S has fewer messages than permits." mailbox))
    message))

(sb-ext:define-load-time-global **message**
  (make-way :likely-p (through mailbox-semaphore has-permit-p)
            :try (through mailbox-semaphore take-permit-or-wait node claim)
            :prepare (through mailbox-semaphore watch-semaphore)
            :leave (through mailbox-semaphore leave-semaphore node)
            :collect #'take-message
            :undo (through mailbox-semaphore return-permit)))

(defun mailbox-operation (mailbox)
  "Return the operation that removes the oldest message from MAILBOX, when there is one, and returns
it, and true. It comes before those that wait by RECEIVE-MESSAGE."
  (check-type mailbox mailbox)
  (wrap (operation-of-leaf (make-occasion mailbox **message**))
        (lambda (message) (values message t))))

;;;; gates

(defun serve-gate (queue n)
  "Choose those in the line of QUEUE, of a gate, which is open. Return N."
  (let ((watch (truly-the watch (watch-of queue))))
    (waking-chosen (queue n)
      (loop
        (let ((node (choose-first watch)))
          (unless node (return))
          (wake-waiter (node-waiter (truly-the node node)))))))
  n)

(defun watch-gate (gate)
  (ensure-watched (gate-queue gate) (gate-mutex gate) #'serve-gate gate)
  nil)

(defun pass-or-wait (gate node claim)
  (declare (type gate gate))
  (holding ((gate-mutex gate))
    (let ((watch (watch-of (gate-queue gate))))
      (claiming-under-mutex (watch node claim)
        (if (eq (gate-state gate) :open)
            :done
            (wait-in-line (truly-the watch watch) node))))))

(defun leave-gate (gate node) (leave-watched (gate-mutex gate) node))

(sb-ext:define-load-time-global **opening**
  (make-way :likely-p #'gate-open-p :try #'pass-or-wait :prepare #'watch-gate
            :leave #'leave-gate :collect (constantly t)))

(defun gate-operation (gate)
  "Return the operation that waits until GATE is open, and returns true."
  (check-type gate gate)
  (operation-of-leaf (make-occasion gate **opening**)))

;;;; descriptors

;;; What a fiber has to wait for
(defstruct (watched (:constructor make-watched (ready-p wait)) (:copier nil))
  ;; () => is it ready?
  (ready-p (missing-arg) :type function :read-only t)
  ;; () waits until it is ready, or signals an error.
  (wait (missing-arg) :type function :read-only t))

;;; Who waits for it, on behalf of one wait for several things
(defstruct (watcher (:constructor make-watcher (promise fiber)) (:copier nil))
  (promise (missing-arg) :type promise :read-only t)
  (fiber (missing-arg) :type sb-fiber:fiber :read-only t))
(declaim (freeze-type watched watcher))

(defun start-watcher (watched)
  (let ((promise (make-promise)))
    (without-interrupts ; a watcher that nobody knows would stay
      (let ((sb-impl::*deadline* nil))
        (make-watcher promise
                      (submit-for promise (sb-fiber::group-of-scope nil)
                                  (lambda ()
                                    (funcall (watched-wait watched))
                                    t)
                                  :name "watcher"))))))

(defun ready-or-wait (watched node claim)
  (cond (node
         (let ((watcher (node-value node)))
           (values (accept (promise-channel (watcher-promise watcher)) node claim) watcher)))
        ((funcall (watched-ready-p watched)) :done)
        (t :refused)))

(defun end-watcher (watched node)
  (declare (ignore watched))
  (let ((watcher (node-value node)))
    (when watcher                     ; else it could not be started
      (leave-line (promise-channel (watcher-promise watcher)) node)
      (sb-fiber:cancel-fiber (watcher-fiber watcher)))))

(defun what-watcher-saw (watched watcher)
  "Return NIL if what was WATCHED is ready, or a condition to be signalled."
  (declare (ignore watched))
  (when watcher
    (let ((promise (watcher-promise watcher)))
      (and (eq (promise-outcome promise) :broken) (promise-result promise)))))

(sb-ext:define-load-time-global **watched**
  (make-way :likely-p (constantly t) :try #'ready-or-wait :prepare #'start-watcher
            :leave #'end-watcher :collect #'what-watcher-saw))

(defun descriptor-operation (fd direction)
  "Return the operation that waits until the descriptor FD, a non-negative integer, can be read or
written without waiting, as DIRECTION, :INPUT or :OUTPUT, says, or something is wrong with it, and
returns true. If it has to wait, a fiber does that: of the group of the one that calls PERFORM, or
of the default group, which is started if there is none. Signals what SB-SYS:WAIT-UNTIL-FD-USABLE
signals, as when FD is closed, and what SB-FIBER:SUBMIT-FIBER signals."
  (check-type fd (unsigned-byte 31))
  (check-type direction (member :input :output))
  (wrap (operation-of-leaf
         (make-occasion
          (make-watched (lambda ()
                          (and (sb-unix:unix-simple-poll fd direction 0)
                               (/= 0 (sb-fiber::file-identity fd))))
                        (lambda () (sb-sys:wait-until-fd-usable fd direction)))
          **watched**))
        (lambda (problem)
          (when problem (error problem))
          t)))

;;;; ends of threads

;;; Until it ends a thread has a semaphore, which gets a million permits then; they are given back.
(defstruct (ending (:constructor make-ending (thread semaphore)) (:copier nil))
  (thread (missing-arg) :type thread :read-only t)
  (semaphore (missing-arg) :type semaphore :read-only t))
(declaim (freeze-type ending))

(defun watched-fiber (fiber)
  (make-watched (lambda ()
                  ;; To join oneself is an error, which is not to be waited for.
                  (or (eq fiber *current-thread*) (not (sb-fiber:fiber-alive-p fiber))))
                (lambda () (join-thread fiber :default nil))))

(defun join-at-once (thread)
  "The operation that joins THREAD, which has ended, or is the one that performs it."
  (wrap (pause-operation 0) (lambda (nothing) (declare (ignore nothing)) (join-thread thread))))

(defun watch-thread (ending)
  (when (eq (ending-thread ending) *current-thread*)
    (join-thread (ending-thread ending))) ; which signals that it is the same
  (watch-semaphore (ending-semaphore ending)))

(sb-ext:define-load-time-global **ending**
  (make-way :likely-p (through ending-semaphore has-permit-p)
            :try (through ending-semaphore take-permit-or-wait node claim)
            :prepare #'watch-thread
            :leave (through ending-semaphore leave-semaphore node)
            :collect (lambda (ending value)
                       (declare (ignore value))
                       (return-permit (ending-semaphore ending)))
            :undo (through ending-semaphore return-permit)))

(defun join-operation (thread)
  "Return the operation that waits until THREAD, which may be a fiber that was submitted, has ended,
and returns its values, or signals JOIN-THREAD-ERROR, as JOIN-THREAD does. If it has to wait for a
fiber, another fiber does that, of the group of the one that calls PERFORM, or of the default group,
which is started if there is none; then it signals what SB-FIBER:SUBMIT-FIBER signals, too."
  (check-type thread thread)
  (let ((semaphore (sb-thread::thread-semaphore thread)))
    (cond ((typep thread 'sb-fiber:fiber)
           (wrap (operation-of-leaf (make-occasion (watched-fiber thread) **watched**))
                 (lambda (problem)
                   (declare (ignore problem))
                   (join-thread thread))))
          (semaphore
           (wrap (operation-of-leaf (make-occasion (make-ending thread semaphore) **ending**))
                 (lambda (permit)
                   (declare (ignore permit))
                   (join-thread thread))))
          (t (join-at-once thread)))))
