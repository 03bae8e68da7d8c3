;;;; the parking lot: which fibers wait for which word

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; All that threads wait for is made of two operations on a word: wait while it has a certain
;;; value, and wake waiters. Mutexes, condition variables, semaphores and what is built of them call
;;; FUTEX-WAIT and FUTEX-WAKE in target-thread.lisp, which come here. A thread waits in the kernel
;;; as ever. A fiber waits in a bucket, chosen by the address of the word; the object that contains
;;; the word is pinned, by the caller and by being on the stack. Fibers and threads may wait for the
;;; same word. (WebKit's parking lot and the kernel's futexes are the models.)
;;;
;;; What is true when nobody is inside:
;;;  - a bucket has QUEUES queues, one for each word that a fiber waits for there. CHAINS[i] is the
;;;    first fiber of one of these queues, whose WAIT-WORD is the first of the next one, and so on;
;;;    i is CHAIN-INDEX of all these words;
;;;  - a queue is linked by WAIT-NEXT and WAIT-PREVIOUS, the longest waiting first; the
;;;    WAIT-PREVIOUS of the first is the last. Each has WAIT-ADDRESS the word it waits for;
;;;  - a fiber that is in no queue has WAIT-ADDRESS 0 and no links;
;;;  - WAITERS counts the fibers in queues and the threads that wait natively or are about
;;;    to; NATIVE the latter; CLAIMS the fibers with WAIT-CLAIM :WANTED.
;;; So entering, leaving and taking cost no more when ten thousand fibers wait for the word, which
;;; matters as they are done with the collector held off; nor when fibers wait for a million words,
;;; as a bucket gets more chains when its queues become many. It keeps them. The buckets themselves
;;; are never more or fewer, since a thread that waits natively is counted in one, and which word it
;;; waits for is not known there.
;;;
;;; No wake-up is lost. A waiter raises WAITERS (a locked instruction), *then* reads the word,
;;; under the lock or in the kernel. A waker has changed the word (with a locked instruction),
;;; *then* reads WAITERS. So either the waiter sees the new value and does not wait, or the waker
;;; sees that there is a waiter. A waker that sees none does nothing: no lock, no system call.
;;;
;;; If both fibers and threads wait for a word, the two kinds take turns in being woken first, by
;;; the bit PREFERENCE of the bucket, so that neither kind starves. Words that share a bucket share
;;; the bit, so that now and then one kind is preferred twice.
;;;
;;; Whether a wait ends by a wake-up, or by time-out or unwinding, is decided by which thread takes
;;; the fiber out of its queue, under the lock: the waker, or the fiber itself.

(defconstant n-buckets 4096)

(defstruct (bucket (:constructor make-bucket ())
                   (:copier nil))
  (lock 0 :type word)
  (waiters 0 :type word)
  (native 0 :type word)
  (claims 0 :type fixnum)
  (preference 0 :type bit)
  (queues 0 :type index)
  (chains (make-array 1 :initial-element nil) :type simple-vector))
(declaim (freeze-type bucket))

(define-load-time-global *buckets* (make-array n-buckets))
(declaim (type (simple-vector #.n-buckets) *buckets*))
(dotimes (i n-buckets) (setf (svref *buckets* i) (make-bucket)))

(declaim (inline bucket-of))
(defun bucket-of (address)
  (declare (type word address))
  (truly-the bucket
             (svref *buckets* (logand (logxor (ash address -3) (ash address -15))
                                      (1- n-buckets)))))

;;;; the queues of a bucket, under its lock

;;; Words of one bucket have much in common, which multiplying by 2^64 over the golden ratio
;;; scatters: Donald Knuth, The Art of Computer Programming, volume 3, section 6.4.
(declaim (inline chain-index))
(defun chain-index (chains address)
  "The index of the chain, of CHAINS, a vector whose length is a power of two, for ADDRESS."
  (declare (simple-vector chains) (word address) (optimize (safety 0)))
  (logand (ash (logand (* address #x9E3779B97F4A7C15) most-positive-word) -40)
          (1- (length chains))))

(declaim (inline first-waiter replace-first append-to-queue put-before-queue count-claim
                 unlink-waiter))
(defun first-waiter (bucket address)
  "The fiber that has waited longest for ADDRESS in BUCKET, or NIL."
  (declare (word address) (optimize (safety 0)))
  (let* ((chains (bucket-chains bucket))
         (fiber (svref chains (chain-index chains address))))
    (loop until (or (null fiber) (= (fiber-wait-address (truly-the fiber fiber)) address))
          do (setf fiber (fiber-wait-word (truly-the fiber fiber))))
    fiber))

(defun replace-first (bucket old new)
  "Let NEW, the first of a queue or NIL, stand where OLD does among the queues of BUCKET."
  (declare (fiber old) (optimize (safety 0)))
  (let* ((chains (bucket-chains bucket))
         (index (chain-index chains (fiber-wait-address old)))
         (first (svref chains index)))
    (if (eq first old)
        (setf (svref chains index) new)
        (let ((other (truly-the fiber first)))
          (loop until (eq (fiber-wait-word other) old)
                do (setf other (truly-the fiber (fiber-wait-word other))))
          (setf (fiber-wait-word other) new)))))

(defmacro push-queue (first chains)
  "Let the queue whose first fiber is FIRST be the first of its chain, of CHAINS."
  `(let ((index (chain-index ,chains (fiber-wait-address ,first))))
     (setf (fiber-wait-word ,first) (svref ,chains index)
           (svref ,chains index) ,first)))

(defun append-to-queue (bucket first fiber)
  "Let FIBER be the last of the queue that FIRST is the first of, or the only one of a new queue."
  (declare (optimize (safety 0)))
  (setf (fiber-wait-next fiber) nil)
  (if (null first)
      (let ((chains (bucket-chains bucket)))
        (setf (fiber-wait-previous fiber) fiber
              (bucket-queues bucket) (truly-the index (1+ (bucket-queues bucket))))
        (push-queue fiber chains))
      (let* ((first (truly-the fiber first))
             (last (truly-the fiber (fiber-wait-previous first))))
        (setf (fiber-wait-next last) fiber
              (fiber-wait-previous fiber) last
              (fiber-wait-previous first) fiber))))

(defun put-before-queue (bucket first fiber)
  "Let FIBER be the first of the queue that FIRST is the first of."
  (declare (fiber first) (optimize (safety 0)))
  (replace-first bucket first fiber)
  (setf (fiber-wait-next fiber) first
        (fiber-wait-previous fiber) (fiber-wait-previous first)
        (fiber-wait-word fiber) (fiber-wait-word first)
        (fiber-wait-previous first) fiber
        (fiber-wait-word first) nil))

(defun count-claim (bucket n)
  (declare (fixnum n))
  (setf (bucket-claims bucket) (truly-the fixnum (+ (bucket-claims bucket) n))))

(defun unlink-waiter (bucket first fiber)
  "Take FIBER out of the queue that FIRST is the first of."
  (declare (fiber first) (optimize (safety 0)))
  (let ((next (fiber-wait-next fiber))
        (previous (fiber-wait-previous fiber)))
    (if (eq fiber first)
        (replace-first bucket fiber (or next (fiber-wait-word fiber)))
        (setf (fiber-wait-next (truly-the fiber previous)) next))
    (when (and (eq fiber first) (null next))
      (setf (bucket-queues bucket) (truly-the index (1- (bucket-queues bucket)))))
    (cond ((null next)
           (unless (eq fiber first) (setf (fiber-wait-previous first) previous)))
          (t
           (setf (fiber-wait-previous (truly-the fiber next)) previous)
           (when (eq fiber first)
             (setf (fiber-wait-word (truly-the fiber next)) (fiber-wait-word fiber)))))
    (when (eq (fiber-wait-claim fiber) :wanted) (count-claim bucket -1))
    (setf (fiber-wait-next fiber) nil
          (fiber-wait-previous fiber) nil
          (fiber-wait-word fiber) nil)))

;;; The vector is allocated outside of the lock, which another thread may take first.
(defun grow-bucket (bucket)
  (let* ((old (bucket-chains bucket))
         (new (sb-vm:without-arena
                (make-array (* 4 (length old)) :initial-element nil))))
    (with-tiny-lock ((bucket-lock bucket))
      (when (eq old (bucket-chains bucket))
        (dotimes (i (length old))
          (let ((first (svref old i)))
            (loop until (null first)
                  do (let* ((this (truly-the fiber first)))
                       (setf first (fiber-wait-word this))
                       (push-queue this new)))))
        (setf (bucket-chains bucket) new))
      nil)))

;;; A wait must not be unwound for want of what would only make it quicker.
(defun grow-bucket-if-possible (bucket)
  (handler-case (grow-bucket bucket)
    (storage-condition ())))

(declaim (inline bucket-ensure-room))
(defun bucket-ensure-room (bucket)
  "Let BUCKET have as many chains as are good for the queues that it has."
  (when (> (bucket-queues bucket) (* 2 (length (bucket-chains bucket))))
    (grow-bucket-if-possible bucket)))

(declaim (ftype (sfunction (bucket fiber word (unsigned-byte 32) &optional t) boolean)
                enter-bucket))
(defun enter-bucket (bucket fiber address expected &optional claim)
  "Let FIBER wait for ADDRESS in BUCKET unless the word there is not EXPECTED: as the first if CLAIM
is :WANTED, as the last if CLAIM is NIL. Return false if it is not to wait."
  (bucket-ensure-room bucket)
  (atomic-incf (bucket-waiters bucket))
  (or (with-tiny-lock ((bucket-lock bucket))
        (when (= (sap-ref-32 (int-sap address) 0) expected)
          (let ((first (first-waiter bucket address)))
            (setf (fiber-wait-address fiber) address
                  (fiber-wait-claim fiber) claim)
            (when claim (count-claim bucket 1))
            (if (and claim first)
                (put-before-queue bucket (truly-the fiber first) fiber)
                (append-to-queue bucket first fiber)))
          t))
      (progn (atomic-decf (bucket-waiters bucket)) nil)))

(declaim (ftype (sfunction (bucket fiber) boolean) leave-bucket))
(defun leave-bucket (bucket fiber)
  "Let FIBER no longer wait in BUCKET. Return false if a waker was faster."
  (when (with-tiny-lock ((bucket-lock bucket))
          (let ((address (fiber-wait-address fiber)))
            (unless (= address 0)
              (unlink-waiter bucket (truly-the fiber (first-waiter bucket address)) fiber)
              (setf (fiber-wait-address fiber) 0)
              t)))
    (atomic-decf (bucket-waiters bucket))
    t))

(declaim (ftype (sfunction (bucket word) (or null fiber)) take-from-bucket take-claimant))
(defun take-from-bucket (bucket address)
  "Take the first fiber that waits for ADDRESS out of BUCKET, and return it, or NIL."
  (let ((fiber (with-tiny-lock ((bucket-lock bucket))
                 (let ((fiber (first-waiter bucket address)))
                   (when fiber
                     (unlink-waiter bucket (truly-the fiber fiber) (truly-the fiber fiber))
                     (setf (fiber-wait-address (truly-the fiber fiber)) 0))
                   fiber))))
    (when fiber (atomic-decf (bucket-waiters bucket)))
    fiber))

;;;; waiting

(declaim (type (member nil :warn :error) *blocked-carrier-action*))
(define-load-time-global *blocked-carrier-action* nil
  "What to do when a fiber blocks its carrier: before it waits where it must not leave the carrier,
and when it is found to have kept the carrier for *STUCK-CARRIER-TIME*. NIL, the default, for
nothing, :WARN for a warning, :ERROR for an error, both signaled in the fiber; but the warning
about a carrier that is stuck is signaled in another thread. Nothing is signaled in WITHOUT-GCING.
A global variable: it can be set and not be bound.")
(define-symbol-macro *pinned-blocking-action* *blocked-carrier-action*)
(declaim (deprecated :early ("SBCL with fibers" "2.6.4")
                     (variable *pinned-blocking-action* :replacement *blocked-carrier-action*)))

;;; True while the warning is being printed, which may have to wait for the stream.
(defvar *noting-blocked-carrier* nil)

(defun note-blocked-carrier ()
  "Do what *BLOCKED-CARRIER-ACTION* says."
  ;; Nothing can be signalled where the collector is held off.
  (unless (or (null *blocked-carrier-action*) *gc-inhibit* *noting-blocked-carrier*)
    (let ((control "~@<~S blocks its carrier, which it must not leave here.~:@>")
          (*noting-blocked-carrier* t))
      (if (eq *blocked-carrier-action* :error)
          (error 'sb-thread::simple-thread-error
                 :thread *current-thread*
                 :format-control control :format-arguments (list *current-thread*))
          (warn control *current-thread*)))))

(defun note-native-wait ()
  "The running fiber is going to wait in the kernel, as it must not leave its carrier."
  (note-blocked-carrier)
  (announce-blocking))

(declaim (ftype (sfunction (&optional t) boolean) park-or-announce))
(defun park-or-announce (&optional (waits t))
  "Called before a system call that waits if WAITS. True if a fiber is running and can park instead;
if it must not leave its carrier, give the carrier's work to another."
  (cond ((can-park-p) t)
        (t (when (and waits (in-fiber-p)) (note-native-wait))
           nil)))

(defun timeout-to-deadline (to-sec to-usec)
  (declare (type (or null fixnum) to-sec) (type (or null word) to-usec))
  (when (and to-sec (>= to-sec 0))
    (nanoseconds-from-now (+ (* to-sec 1000000000) (* to-usec 1000)))))

;;; The values of FUTEX-WAIT, which its callers know.
(defconstant futex-woken 0)
(defconstant futex-timed-out 1)
(defconstant futex-interrupted 2)
(defconstant futex-changed -1)

(declaim (inline wait-in-bucket))
(defun wait-in-bucket (fiber address expected deadline &optional claim)
  "Park FIBER while the word at ADDRESS is EXPECTED. With interrupts off."
  (let ((bucket (bucket-of address)))
    (unless (enter-bucket bucket fiber address expected claim)
      (return-from wait-in-bucket futex-changed))
    (loop
      (park (what-is-waited-for fiber) deadline)
      (cond ((= (fiber-wait-address fiber) 0) (return futex-woken))
            ((deadline-passed-p deadline)
             (return (if (leave-bucket bucket fiber) futex-timed-out futex-woken)))
            ((or (fiber-interruptions fiber) (to-leave-p fiber))
             (return (if (leave-bucket bucket fiber) futex-interrupted futex-woken)))))))

;;; With a time-out it is a cons on the stack of FIBER, into which no other thread may look.
(defun what-is-waited-for (fiber)
  (or *waited-for*
      (let ((object (sb-thread::thread-waiting-for fiber)))
        (if (consp object) (cdr object) object))
      :futex)) ; its user calls FUTEX-WAIT directly

;;; The waiter is counted in the bucket before it waits in the kernel: a waker that finds none there
;;; makes no system call.
(defun wait-natively (address expected to-sec to-usec)
  (let ((bucket (bucket-of address)))
    (when (in-fiber-p) (note-blocked-carrier))
    (announce-blocking)
    (without-interrupts
      (unwind-protect
           (progn (atomic-incf (bucket-native bucket))
                  (atomic-incf (bucket-waiters bucket))
                  (with-local-interrupts
                    (with-cancellable-native-wait
                      (with-interruptible-system-call
                        (%futex-wait address expected to-sec to-usec)))))
        (atomic-decf (bucket-waiters bucket))
        (atomic-decf (bucket-native bucket))))))

(declaim (inline run-interruptions-of-wait))
(defun run-interruptions-of-wait (fiber)
  (when (fiber-interruptions fiber)
    (with-interrupts (see-interruptions fiber))))

(declaim (inline leave-interrupted-wait))
(defun leave-interrupted-wait (fiber)
  "FIBER is about to wait, or has waited for nothing: let it leave what is cancelled, if it may."
  (when (to-leave-p fiber)
    (with-interrupts (leave-what-is-cancelled fiber))))

(declaim (ftype (sfunction (word (unsigned-byte 32) (or null fixnum) (or null word)) fixnum)
                wait-on-word))
(defun wait-on-word (address expected to-sec to-usec)
  "Wait while the word at ADDRESS, the low half of a raw slot of a pinned object, is EXPECTED, at
most TO-SEC seconds and TO-USEC microseconds; for ever if TO-SEC is negative. Returns 0 if woken, 1
if the time is over, 2 after an interruption, -1 if the word is not EXPECTED."
  (if (can-park-p)
      (let ((fiber (truly-the fiber *current-thread*))
            (deadline (timeout-to-deadline to-sec to-usec)))
        ;; Before the wait, for interruptions that came while its user held a mutex.
        (run-interruptions-of-wait fiber)
        (leave-interrupted-wait fiber)
        (let ((result (without-interruptions (wait-in-bucket fiber address expected deadline))))
          (run-interruptions-of-wait fiber)
          (when (= result futex-interrupted) (leave-interrupted-wait fiber))
          result))
      (wait-natively address expected to-sec to-usec)))

;;;; waking

(defun wake-fiber (bucket address)
  "Wake one fiber that waits for ADDRESS in BUCKET. Return false if there is none."
  (let ((fiber (take-from-bucket bucket address)))
    (when fiber
      (unpark fiber)
      t)))

;;; A fiber that is woken may wait for the word again: without a count it could be woken for ever.
(defun wake-fibers (bucket address n)
  "Wake at most N fibers that wait for ADDRESS in BUCKET. Return the number of others that may be
woken."
  (declare (fixnum n))
  (loop repeat (min n (bucket-waiters bucket))
        while (wake-fiber bucket address)
        do (decf n))
  n)

(defun wake-natives (bucket address n)
  "As WAKE-FIBERS, for threads."
  (declare (fixnum n))
  (if (or (= n 0) (= (bucket-native bucket) 0))
      n
      (- n (max 0 (%futex-wake address n)))))

(declaim (inline next-preference))
(defun next-preference (bucket)
  "Return whose turn it is in BUCKET, 0 for fibers, 1 for threads; it is the others' the next time."
  (let ((preference (bucket-preference bucket)))
    (setf (bucket-preference bucket) (logxor preference 1))
    preference))

(defun wake-by-preference (bucket address n)
  "Wake at most N waiters for ADDRESS in BUCKET, first of the kind that is preferred now."
  (if (= (next-preference bucket) 0)
      (wake-natives bucket address (wake-fibers bucket address n))
      (wake-fibers bucket address (wake-natives bucket address n))))

(defconstant max-woken (ash 1 29)) ; the kernel's number is an int

(declaim (ftype (sfunction (word unsigned-byte) null) wake-on-word))
(defun wake-on-word (address n)
  "Wake at most N of the fibers and threads that wait for the word at ADDRESS."
  (let ((bucket (bucket-of address)))
    (barrier (:memory))
    (unless (= (bucket-waiters bucket) 0)
      (with-waking-room (3072)          ; the word has been changed
        (without-interruptions
          (wake-by-preference bucket address (min n max-woken)))))
    nil))
