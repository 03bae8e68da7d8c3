;;;; what stands for the rest of the runtime, and for the kernel, in a history

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

;;; The ring of a run queue is so small here that its places are used again.
(defconstant steps::run-queue-capacity 4)
(defconstant steps::run-queue-batch 2)

(defun shorten-queue (queue)
  (setf (sb-fiber::run-queue-ring queue)
        (make-array steps::run-queue-capacity :initial-element 0))
  queue)

(defvar *running* nil
  "The carrier that the actor is.")

;;; First of all, that what follows finds the functions that it calls. MAKE-RUNNABLE is a
;;; stub for what parks; histories of carriers use the real one.
(define-all-from-source)
(define-from-source (subst '*running* 'steps::*carrier* (find-definition "WITH-OWN-SCHEDULER")))
(define-from-source (subst 'steps::queue-fiber 'steps::make-runnable
                           (find-definition "MAKE-RUNNABLE")))
(define-from-source (subst 'steps::compare-file 'steps::same-file-p
                           (find-definition "SAME-FILE-P")))

(defun problem (condition control &rest arguments)
  "What a check returns: a string if CONDITION is true."
  (when condition (apply #'format nil control arguments)))

;;;; memory and clock

(defvar *memory*)
(defvar steps::*pollers*)

;;; The address of a word is its index, that of a slot a list of accessor and object.
(defun read-word (address)
  (if (listp address)
      (apply #'funcall address)
      (steps::svref *memory* address)))

(defun write-word (address value)
  (setf (steps::svref *memory* address) value))

(defun steps::int-sap (address) address)
(defun steps::sap-ref-32 (address offset) (read-word (+ address offset)))
(defun (setf steps::sap-ref-32) (value address offset) (write-word (+ address offset) value))
(defun (sb-ext:cas steps::sap-ref-32) (old new address offset)
  (sb-ext:cas (steps::svref *memory* (+ address offset)) old new))

(defconstant clock-address 9)
(defun steps::fiber-now () (read-word clock-address))

;;;; stacks

;;; A fiber's stack is :MOUNTED, :SUSPENDED once the switch has saved its context, and :RUNNABLE
;;; when somebody may mount it. If it is made runnable when it is not suspended, two carriers will
;;; run on one stack.

(defvar *stacks*)
(defun stack-state (fiber) (gethash fiber *stacks*))
(defun (setf stack-state) (state fiber) (setf (gethash fiber *stacks*) state))

(defun make-test-fiber (&key (phase sb-fiber::+active+) (stack :mounted))
  (let ((fiber (make-fiber #'identity)))
    (setf (sb-fiber::fiber-phase fiber) phase
          (stack-state fiber) stack)
    fiber))

(defun move-stack (fiber from to &optional awaitedp)
  (perform :locked fiber 'stack
           (lambda ()
             (unless (eq (stack-state fiber) from)
               (fail-history "A stack becomes ~A that is ~A." to (stack-state fiber)))
             (setf (stack-state fiber) to))
           (and awaitedp (lambda () (eq (stack-state fiber) from)))))

(defun steps::make-runnable (fiber)
  (move-stack fiber :suspended :runnable))

(defun steps::leave (action)
  (let ((fiber steps::*current-thread*))
    (setf *compared* nil)
    (move-stack fiber :mounted :suspended)
    (assert (eq action :park))
    (steps::finish-parking fiber)
    (move-stack fiber :runnable :mounted t)))

(defun steps::prepare-zone (fiber) (declare (ignore fiber)))

(defmacro in-test-fiber ((fiber) &body body)
  `(let ((steps::*current-thread* ,fiber)) ,@body))

(defun phase-problem (&rest fibers)
  (dolist (fiber fibers)
    (unless (= (sb-fiber::fiber-phase-only fiber) sb-fiber::+active+)
      (return (format nil "At the end a phase is ~D." (sb-fiber::fiber-phase fiber))))))

;;;; interruptions

;;; Whether the signal of an interruption has come, and found the fiber mounted. A history has one
;;; fiber that is interrupted.
(defvar *interrupted-fiber*)
(defvar *signals*)
(defun signal-state (fiber) (gethash fiber *signals*))
(defun (setf signal-state) (state fiber)
  (setf *interrupted-fiber* fiber
        (gethash fiber *signals*) state))

(defun steps::%interrupt-os-thread (number)
  (declare (ignore number))
  (perform :locked *interrupted-fiber* 'signal
           (lambda ()
             (when (eq (signal-state *interrupted-fiber*) :none)
               (setf (signal-state *interrupted-fiber*) :sent)))))

(defun steps::see-interruptions (fiber)
  (when (steps::fiber-interruptions fiber)
    (steps::next-interruption fiber)))

(defun steps::requeue (fiber) (steps::make-runnable fiber))
;;; Only the carrier itself uses them, and the histories have no slices.
(defun steps::requeue-preempted (carrier fiber) (declare (ignore carrier fiber)))
(defun steps::run-preempted (carrier) (declare (ignore carrier)) nil)
(defun steps::preempted-due-p (carrier) (declare (ignore carrier)) nil)
(defun steps::free-stack (fiber) (declare (ignore fiber)))

;;;; deadlines

(defvar *scheduler*)
(defun steps::nearest-scheduler (fiber) (declare (ignore fiber)) *scheduler*)

;;; What the fibers of a history run on; it serves *SCHEDULER*.
(defvar steps::*carrier*)

;;; Pollers have no descriptors: what is called by mistake is to fail.
(defconstant no-descriptor 1000000)

(defun make-test-scheduler (group index &optional keeps-p)
  (let ((poller (sb-fiber::%make-poller index (+ no-descriptor index) keeps-p)))
    (setf (sb-fiber::poller-wakeup poller) (+ no-descriptor index))
    (let ((scheduler (sb-fiber::%make-scheduler group poller)))
      (shorten-queue (sb-fiber::scheduler-queue scheduler))
      scheduler)))

(defun pass-time ()
  "Serve a deadline, once there is one."
  (let ((heap (sb-fiber::scheduler-deadlines *scheduler*)))
    (perform-when-needed :read heap 'steps::deadline-heap-nearest (constantly nil)
                         (lambda () (/= (sb-fiber::deadline-heap-nearest heap)
                                        most-positive-fixnum)))
    (write-word clock-address 10)
    (steps::collect-expired *scheduler*)))

(defun heap-problem ()
  (problem (/= 0 (sb-fiber::deadline-heap-count (sb-fiber::scheduler-deadlines *scheduler*)))
           "A deadline has been left in the heap."))

;;;; futex(2): the word is read under a lock that wakers take too

(defstruct kernel (lock nil) (sleepers '()))
(defstruct sleeper (woken nil))
(defvar *kernel*)

(defun call-in-kernel (function)
  (let ((kernel *kernel*))
    (perform :locked kernel 'lock (lambda () (setf (kernel-lock kernel) t))
             (lambda () (not (kernel-lock kernel))))
    (multiple-value-prog1 (let ((*locks* (cons kernel *locks*))) (funcall function kernel))
      (perform :locked kernel 'lock (lambda () (setf (kernel-lock kernel) nil))))))

(defun fall-asleep (address expected)
  (call-in-kernel (lambda (kernel)
                    (when (= (read-word address) expected)
                      (let ((sleeper (make-sleeper)))
                        (setf (kernel-sleepers kernel)
                              (append (kernel-sleepers kernel) (list (cons address sleeper))))
                        sleeper)))))

;;; A carrier may sleep for ever on its alarm, which is a slot; nobody may on a word. A time-out on
;;; an alarm is over at once.
(defun steps::%futex-wait (address expected seconds microseconds)
  (declare (ignore microseconds))
  (let ((sleeper (and (not (and (listp address) (>= seconds 0)))
                      (fall-asleep address expected))))
    (when sleeper
      (funcall (if (listp address) #'perform-when-needed #'perform)
               :locked sleeper 'woken (constantly nil) (lambda () (sleeper-woken sleeper))))))

(defun steps::%sleep-on (address)
  (steps::%futex-wait address 0 -1 0))

(defun steps::%futex-wake (address n)
  (call-in-kernel
   (lambda (kernel)
     (loop repeat n
           for (nil . sleeper) = (find address (kernel-sleepers kernel) :key #'car :test #'equal)
           while sleeper
           do (setf (kernel-sleepers kernel)
                    (remove sleeper (kernel-sleepers kernel) :key #'cdr))
              (perform :locked sleeper 'woken (lambda () (setf (sleeper-woken sleeper) t)))
           count t))))

;;;; one bucket

(defvar *bucket*)
(defun steps::bucket-of (address) (declare (ignore address)) *bucket*)
(defun steps::announce-blocking ())

(defun bucket-problem ()
  (or (problem (find nil (sb-fiber::bucket-chains *bucket*) :test-not #'eq)
               "There is somebody in a chain.")
      (problem (/= 0 (sb-fiber::bucket-queues *bucket*)) "Queues are counted.")
      (problem (/= 0 (sb-fiber::bucket-waiters *bucket*)) "~D waiters are counted."
               (sb-fiber::bucket-waiters *bucket*))
      (problem (/= 0 (sb-fiber::bucket-native *bucket*)) "Native waiters are counted.")
      (problem (/= 0 (sb-fiber::bucket-claims *bucket*)) "Claims are counted.")))

;;;; one number of a descriptor, and the files that it stands for, one after the other

;;; 0 is the first, 1 none, 2 the next.
(defvar *file*)

(defun current-file ()
  (perform :read *file* 'number (lambda () (car *file*))))

(defun next-file ()
  (perform :locked *file* 'number (lambda () (incf (car *file*)))))

(defun steps::file-identity (fd)
  (declare (ignore fd))
  (svref #(11 0 12) (current-file)))

;;; Whether a fiber has compared since it was last left. Only one fiber of a history calls.
(defvar *compared*)

(defun steps::same-file-p (cell file)
  (setf *compared* (steps::compare-file cell file)))

;;; accept(2) on a socket that does not wait
(defun steps::would-wait-p (result) (= result -1))
(defun steps::nonblocking-by-us-p (fd) (declare (ignore fd)) t)
(defun steps::await-room-elsewhere (cell) (declare (ignore cell)))
(defun steps::spend-budget (cost) (declare (ignore cost)))

;;;; epoll(7) with this number, which is always ready, for READY; a file that is closed is not armed
;;;; any more. What is armed to be kept is reported when it is armed, and after each CHANGE.

(defstruct epoll
  (registrations '()) (closed nil) (log '())
  (ready (logior sb-fiber::+input+ sb-fiber::+output+)) (errno 0))
(defvar *epoll*)
(defvar *cell*)

;;; Of one poller, by its number.
(defstruct (registration (:constructor make-registration (poller armed data)))
  poller armed data (file (car *file*)) (changed 3))

(defun registration-in (epoll number)
  (find number (epoll-registrations epoll) :key #'registration-poller))

(defun forget-registration (epoll number)
  (setf (epoll-registrations epoll)
        (remove number (epoll-registrations epoll) :key #'registration-poller)))

(defun steps::find-fd-cell (fd createp) (declare (ignore fd createp)) *cell*)
(defun steps::map-fd-cells (function) (funcall function *cell*))

(defun epoll-refusal (epoll)
  (if (= (car *file*) 1) sb-unix:ebadf (epoll-errno epoll)))

(defun steps::%poller-arm (number fd directions data)
  (declare (ignore fd))
  (let ((epoll *epoll*)
        (directions (logandc2 directions sb-fiber::+fresh+)))
    (perform :locked epoll 'armed
             (lambda ()
               (when (eql number (epoll-closed epoll))
                 (fail-history "A descriptor is used that the poller has closed."))
               (when (= 0 (epoll-refusal epoll))
                 (forget-registration epoll number)
                 (push (make-registration number directions data) (epoll-registrations epoll))
                 (push (cons number directions) (epoll-log epoll)))
               (epoll-refusal epoll)))))

;;; Closing makes the kernel forget all the same.
(defun steps::forget-in-pollers (fd known-to &optional spared)
  (declare (ignore fd))
  (let ((epoll *epoll*))
    (unless (sb-fiber::fd-cell-closing *cell*)
      (perform :locked epoll 'armed
               (lambda ()
                 (dotimes (i 3)
                   (when (and (logbitp i known-to) (not (member i spared)))
                     (forget-registration epoll (+ no-descriptor i)))))))))

(defun steps::forget-in-poller (index fd)
  (steps::forget-in-pollers fd (ash 1 index)))

(defun close-epoll (poller)
  (let ((epoll *epoll*))
    (perform :locked epoll 'armed
             (lambda () (setf (epoll-closed epoll) (sb-fiber::poller-epoll poller))))))

(defun ready-directions (epoll registration)
  "What is to be reported of REGISTRATION now."
  (if (and registration
           (= (registration-file registration) (car *file*))
           (not (eql (registration-poller registration) (epoll-closed epoll))))
      (logand (registration-armed registration) (epoll-ready epoll)
              (if (logtest sb-fiber::+keep+ (registration-armed registration))
                  (registration-changed registration)
                  3))
      0))

(defun next-report (epoll poller)
  "The data and the directions of a report to POLLER, after which nothing is armed, unless it is
kept."
  (labels ((registration () (registration-in epoll (sb-fiber::poller-epoll poller)))
           (take ()
             (let ((registration (registration)))
               (prog1 (list (registration-data registration)
                            (ready-directions epoll registration))
                 (setf (registration-changed registration) 0)
                 (unless (logtest sb-fiber::+keep+ (registration-armed registration))
                   (setf (registration-armed registration) 0))))))
    (apply #'values
           (perform-when-needed :locked epoll 'armed #'take
                                (lambda () (/= 0 (ready-directions epoll (registration))))))))

(defun note-change (epoll directions)
  (dolist (registration (epoll-registrations epoll))
    (setf (registration-changed registration)
          (logior directions (registration-changed registration)))))

;;; A connection over which octets come.
(defvar *octets*)

(defun send-octet ()
  (let ((epoll *epoll*))
    (perform :locked epoll 'armed
             (lambda ()
               (incf *octets*)
               (setf (epoll-ready epoll) (logior sb-fiber::+input+ (epoll-ready epoll)))
               (note-change epoll sb-fiber::+input+)))))

(defun receive-octet ()
  "1 or minus an errno."
  (let ((epoll *epoll*))
    (perform :locked epoll 'armed
             (lambda ()
               (cond ((= *octets* 0) (- sb-unix:ewouldblock))
                     (t (when (= 0 (decf *octets*))
                          (setf (epoll-ready epoll)
                                (logandc2 (epoll-ready epoll) sb-fiber::+input+)))
                        1))))))

(defun steps::find-out-edges (cell)
  (setf (sb-fiber::fd-cell-kind cell) :stream))

(defun steps::%poll-now (fd direction)
  (declare (ignore fd))
  (let ((epoll *epoll*))
    (perform :locked epoll 'armed (lambda () (logand direction (epoll-ready epoll))))))

(defun serve-epoll (&optional (poller (sb-fiber::scheduler-poller *scheduler*)))
  (loop
    (multiple-value-bind (data directions) (next-report *epoll* poller)
      (multiple-value-bind (reader writer) (steps::handle-report poller data directions)
        (when reader (steps::unpark reader))
        (when writer (steps::unpark writer))))))

(defun cell-problem ()
  (or (problem (or (sb-fiber::fd-cell-input *cell*) (sb-fiber::fd-cell-output *cell*))
               "A waiter has been left in the cell.")
      (problem (/= 0 (sb-fiber::fd-cell-arming *cell*)) "The arming has not ended.")
      (problem (/= 0 (sb-fiber::fd-cell-leaving *cell*)) "A poller has been left to forget.")))

;;;; carriers

(defvar *eventfds*)
(defvar steps::*force-migration* nil)

(defun steps::%poller-wake (wakeup)
  (let ((eventfds *eventfds*)
        (i (- wakeup no-descriptor)))
    (perform :locked eventfds i (lambda () (incf (svref eventfds i))))))

(defun steps::collect-reports (scheduler nanoseconds)
  (cond ((plusp nanoseconds) (write-word clock-address (+ (steps::fiber-now) nanoseconds)))
        ((minusp nanoseconds)
         (let ((eventfds *eventfds*)
               (i (sb-fiber::poller-place (sb-fiber::scheduler-poller scheduler))))
           (perform-when-needed :locked eventfds i (lambda () (setf (svref eventfds i) 0))
                                (lambda () (plusp (svref eventfds i))))))))

(defun steps::run-pending-handlers (carrier) (declare (ignore carrier)))
(defun steps::handlers-wait-p () nil)

(defun steps::carrier-wake-word-address (carrier)
  (list 'steps::carrier-wake-word carrier))
(defun steps::fiber-group-monitor-wake-word-address (group)
  (list 'steps::fiber-group-monitor-wake-word group))

;;; What a fiber of these histories does is its function.
(defun steps::run-on-carrier (carrier fiber)
  (let ((*running* carrier))
    (funcall (sb-fiber::fiber-function fiber))))

(defun steps::in-fiber-p () *running*)
(defun steps::in-scheduler-p (carrier) (declare (ignore carrier)) (null *running*))

(defun steps::poller-to-wait-in (fiber)
  (sb-fiber::scheduler-poller (steps::nearest-scheduler fiber)))

;;; Nobody computes for long.
(defun steps::at-work-p (scheduler now) (declare (ignore scheduler now)) t)

(defun steps::scheduling-p (carrier) (declare (ignore carrier)) nil)

(defun steps::my-scheduler (group)
  (declare (ignore group))
  (and *running* (steps::carrier-scheduler *running*)))

;;; There are at most two of each at a time, and the places that they take are the first.
(defun steps::all-free-p (places)
  (and (eql 0 (steps::svref places 0))
       (eql 0 (steps::svref places 1))))
(defun steps::count-used (places)
  (+ (if (eql 0 (steps::svref places 0)) 0 1)
     (if (eql 0 (steps::svref places 1)) 0 1)))

(defstruct start (carriers '()))
(defvar *start*)

(defun steps::start-carrier (group scheduler)
  (let ((start *start*)
        (carrier (sb-fiber::%make-carrier group)))
    (setf (sb-fiber::carrier-scheduler carrier) scheduler)
    (perform :locked start 'carriers (lambda () (push carrier (start-carriers start))))))

(defun be-new-carrier ()
  "Be the carrier that the monitor starts, if it does."
  (let ((start *start*))
    (steps::carrier-loop
     (perform-when-needed :locked start 'carriers (lambda () (pop (start-carriers start)))
                          (lambda () (start-carriers start))))))

;;;; the monitor

(defun steps::shared-without-scheduler-p (carrier) (declare (ignore carrier)) nil)
(defun steps::look-period (supported) (declare (ignore supported)) nil)
(defun steps::time-until-attempt (group) (declare (ignore group)) nil)
(defun steps::look-at-carriers (group period slice) (declare (ignore group period slice)))
(defun steps::retire-spare-if-quiet (group period) (declare (ignore group period)))

;;; membarrier(2): the stores of all have reached memory.
(defun steps::%barrier-everywhere ()
  (let ((actors (exploration-actors (actor-exploration *actor*))))
    (perform :locked *kernel* 'everywhere (constantly 0)
             (lambda () (every (lambda (actor) (null (actor-buffer actor))) actors)))))

;;; In place of looking again and again: what it looks at has changed, or somebody is to be woken.
(defun await-end-of-use (over-p group carrier scheduler)
  (let ((poller (sb-fiber::scheduler-poller scheduler))
        (epoch (steps::carrier-epoch carrier)))
    (flet ((over-p () (funcall over-p group carrier epoch)))
      (loop until (perform :read carrier 'steps::carrier-epoch #'over-p
                           (lambda () (or (over-p) (= 1 (sb-fiber::poller-sleep poller)))))
            do (steps::wake-poller poller)))))

(defun steps::await-end-of-use (group carrier scheduler)
  (await-end-of-use #'sb-fiber::use-over-p group carrier scheduler))

(defun make-test-group (n)
  (let ((group (sb-fiber::%make-fiber-group nil)))
    (setf (sb-fiber::fiber-group-schedulers group)
          (coerce (loop for i below n collect (make-test-scheduler group i)) 'simple-vector)
          steps::*pollers*
          (map 'simple-vector #'sb-fiber::scheduler-poller
               (sb-fiber::fiber-group-schedulers group)))
    group))

(defun make-test-carrier (group &optional i)
  "A carrier that serves scheduler number I of GROUP, or none."
  (let ((carrier (sb-fiber::%make-carrier group)))
    (when i
      (setf (sb-fiber::carrier-scheduler carrier)
            (svref (sb-fiber::fiber-group-schedulers group) i)))
    carrier))

(defun make-runnable-fiber (group function &optional home)
  (let ((fiber (make-fiber function)))
    (setf (sb-fiber::fiber-phase fiber) sb-fiber::+active+
          (sb-fiber::fiber-home fiber) home
          (sb-fiber::fiber-group fiber) group)
    fiber))

;;;; all of it, as it is before a history

(defun reset-machine ()
  (setf *memory* (make-array 10 :initial-element 0)
        *stacks* (make-hash-table :test 'eq)
        *signals* (make-hash-table :test 'eq)
        *scheduler* (make-test-scheduler nil 0)
        steps::*carrier* (sb-fiber::%make-carrier nil)
        (sb-fiber::carrier-scheduler steps::*carrier*) *scheduler*
        *kernel* (make-kernel)
        *bucket* (sb-fiber::make-bucket)
        *epoll* (make-epoll)
        *cell* (sb-fiber::make-fd-cell 3)
        *octets* 0
        *file* (list 0)
        *compared* nil
        *ended-waiters* '()
        steps::*pollers* (vector (sb-fiber::scheduler-poller *scheduler*) nil)
        *eventfds* (vector 0 0 0)
        *start* (make-start)))

(defmacro history (bindings actors &body check)
  "A history in which ACTORS, lists of a name and forms, share BINDINGS, which are those of LET*.
CHECK has a string as value if something is wrong in the end."
  `(lambda ()
     (reset-machine)
     (let* ,bindings
       (values (list ,@(loop for (name . forms) in actors
                             collect `(cons ,name (lambda () ,@forms))))
               (lambda () ,@check)))))

;;;; channels

(defun steps::own-waiter (n)
  (let ((waiter (sb-concurrency::make-waiter)))
    (setf (sb-concurrency::waiter-sleeper waiter) steps::*current-thread*)
    (sb-concurrency::ensure-nodes waiter n)
    waiter))

(defun steps::wake-sleeper (sleeper) (steps::unpark sleeper))

;;; Those whose use has ended
(defvar *ended-waiters*)

(defun nodes-of (waiter)
  (loop for node = (sb-concurrency::waiter-nodes waiter) then (sb-concurrency::node-sibling node)
        while node collect node))

(defun steps::end-use (waiter)
  (push waiter *ended-waiters*)
  (setf (sb-concurrency::waiter-served-p waiter) :gone)
  (dolist (node (nodes-of waiter))
    (setf (sb-concurrency::node-line node) :gone
          (sb-concurrency::node-value node) :gone)))

(defun waiter-problem ()
  "Has somebody touched what may be another's?"
  (problem (notevery (lambda (waiter)
                       (and (eq :gone (sb-concurrency::waiter-served-p waiter))
                            (loop for node in (nodes-of waiter)
                                  always (eq :gone (sb-concurrency::node-line node)))))
                     *ended-waiters*)
           "A waiter was written to after its use."))

(defun steps::sleep-undisturbed (waiter object deadline)
  (declare (ignore waiter object deadline))
  nil)

(defun steps::sleep-until-chosen (waiter object deadline)
  (loop
    (when (steps::waiter-served-p waiter) (return t))
    (when (steps::deadline-passed-p deadline) (return nil))
    (steps::park object deadline)))

(defun steps::await-end-of-claim (waiter)
  (perform :read waiter 'steps::waiter-state (constantly nil)
           (lambda ()
             (/= (sb-concurrency::waiter-state waiter) sb-concurrency::+claiming+))))

(defun steps::await-service (waiter)
  (perform :read waiter 'steps::waiter-served-p (constantly nil)
           (lambda () (sb-concurrency::waiter-served-p waiter))))

;;; All orders are tried anyway.
(defun steps::shuffle (order n)
  (dotimes (i n order) (setf (aref order i) i)))
