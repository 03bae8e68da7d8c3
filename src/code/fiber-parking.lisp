;;;; the parking lot: who waits for which word

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; All that threads wait for is made of two operations on a word: wait while it has a
;;; certain value, wake those who wait. Mutexes, condition variables, semaphores and what is built
;;; of them call FUTEX-WAIT and FUTEX-WAKE in target-thread.lisp, which come here. A thread
;;; waits in the kernel as ever. A fiber waits in a bucket, chosen by the address of the word;
;;; the object that contains it is pinned, by the caller and by being on the stack. Both may
;;; wait for the same word. (WebKit's parking lot and the kernel's futexes are the models.)
;;;
;;; What is true when nobody is inside:
;;;  - the chain of a bucket holds fibers, the longest waiting first, each with
;;;    WAIT-ADDRESS the word it waits for; a fiber that is in no chain has WAIT-ADDRESS 0;
;;;  - WAITERS counts those in the chain and the threads that wait natively or are about
;;;    to; NATIVE the latter.
;;;
;;; No wake-up is lost. A waiter raises WAITERS (a locked instruction), *then* reads the word,
;;; under the lock or in the kernel. A waker has changed the word (with a locked instruction),
;;; *then* reads WAITERS. So either the waiter sees the new value and does not wait, or
;;; the waker sees that there is one. A waker who sees none does nothing: no lock, no system call.
;;;
;;; Who is woken first if both kinds wait for a word: they take turns, by the bit TURN of
;;; the bucket, so that neither kind starves.
;;;
;;; Time-out, unwinding and wake are decided by who takes the fiber out of the chain, under
;;; the lock: the fiber itself, or the waker.

(defconstant n-buckets 1024)

(defstruct (bucket (:constructor make-bucket ())
                   (:copier nil))
  (lock 0 :type word)
  (waiters 0 :type word)
  (native 0 :type word)
  (turn 0 :type bit)
  (chain nil))
(declaim (freeze-type bucket))

(define-load-time-global *buckets* (make-array n-buckets))
(declaim (type (simple-vector #.n-buckets) *buckets*))
(dotimes (i n-buckets) (setf (svref *buckets* i) (make-bucket)))

(declaim (inline bucket-of))
(defun bucket-of (address)
  (declare (type word address))
  (truly-the bucket
             (svref *buckets* (logand (logxor (ash address -3) (ash address -13))
                                      (1- n-buckets)))))

;;;; the chain of a bucket

(declaim (ftype (sfunction (bucket fiber word (unsigned-byte 32)) boolean) enter-bucket))
(defun enter-bucket (bucket fiber address expected)
  "Let FIBER wait for ADDRESS in BUCKET unless the word there is not EXPECTED."
  (setf (fiber-wait-next fiber) nil)
  (atomic-incf (bucket-waiters bucket))
  (or (with-tiny-lock ((bucket-lock bucket))
        (when (= (sap-ref-32 (int-sap address) 0) expected)
          (setf (fiber-wait-address fiber) address)
          (append-waiter (bucket-chain bucket) fiber)
          t))
      (progn (atomic-decf (bucket-waiters bucket)) nil)))

(declaim (ftype (sfunction (bucket fiber) boolean) leave-bucket))
(defun leave-bucket (bucket fiber)
  "Let FIBER no longer wait in BUCKET. Return false if a waker was faster."
  (when (with-tiny-lock ((bucket-lock bucket))
          (when (unchain-waiter (bucket-chain bucket) fiber)
            (setf (fiber-wait-address fiber) 0)
            t))
    (atomic-decf (bucket-waiters bucket))
    t))

(declaim (ftype (sfunction (bucket word) (or null fiber)) take-from-bucket))
(defun take-from-bucket (bucket address)
  "Take the fiber that has waited longest for ADDRESS out of BUCKET, and return it, or NIL."
  (let ((fiber (with-tiny-lock ((bucket-lock bucket))
                 (let ((fiber (bucket-chain bucket)))
                   (loop until (or (null fiber)
                                   (= (fiber-wait-address (truly-the fiber fiber)) address))
                         do (setf fiber (fiber-wait-next (truly-the fiber fiber))))
                   (when fiber
                     (unchain-waiter (bucket-chain bucket) fiber)
                     (setf (fiber-wait-address (truly-the fiber fiber)) 0))
                   fiber))))
    (when fiber (atomic-decf (bucket-waiters bucket)))
    fiber))

;;;; waiting

(declaim (type (member nil :warn :error) *pinned-blocking-action*))
(define-load-time-global *pinned-blocking-action* nil
  "What happens when a fiber blocks its carrier in the kernel because it must not leave it:
NIL for nothing, :WARN for a warning, :ERROR for an error.")

(defun note-pinned-blocking ()
  ;; Nothing can be signalled where the collector is held off.
  (unless (or (null *pinned-blocking-action*) *gc-inhibit*)
    (let ((control "~@<~S blocks its carrier, which it must not leave here.~:@>"))
      (if (eq *pinned-blocking-action* :error)
          (error 'sb-thread::simple-thread-error
                 :thread *current-thread*
                 :format-control control :format-arguments (list *current-thread*))
          (warn control *current-thread*)))))

(defun timeout-to-deadline (to-sec to-usec)
  (declare (type (or null integer) to-sec to-usec))
  (when (and to-sec (>= to-sec 0))
    (nanoseconds-from-now (+ (* to-sec 1000000000) (* to-usec 1000)))))

;;; The values of FUTEX-WAIT, which its callers know.
(defconstant futex-woken 0)
(defconstant futex-timed-out 1)
(defconstant futex-interrupted 2)
(defconstant futex-changed -1)

(defun wait-in-bucket (fiber address expected deadline)
  "Park FIBER while the word at ADDRESS is EXPECTED. With interrupts off."
  (let ((bucket (bucket-of address)))
    (unless (enter-bucket bucket fiber address expected)
      (return-from wait-in-bucket futex-changed))
    (loop
      (park (or (sb-thread::thread-waiting-for fiber) :word) deadline)
      (cond ((= (fiber-wait-address fiber) 0) (return futex-woken))
            ((deadline-passed-p deadline)
             (return (if (leave-bucket bucket fiber) futex-timed-out futex-woken)))
            ((fiber-interruptions fiber)
             (return (if (leave-bucket bucket fiber) futex-interrupted futex-woken)))))))

;;; The bucket is told before the kernel: a waker who finds nobody makes no system call.
(defun wait-natively (address expected to-sec to-usec)
  (let ((bucket (bucket-of address)))
    (when (in-fiber-p) (note-pinned-blocking))
    (announce-blocking)
    (without-interrupts
      (unwind-protect
           (progn (atomic-incf (bucket-native bucket))
                  (atomic-incf (bucket-waiters bucket))
                  (with-local-interrupts
                    (%futex-wait address expected to-sec to-usec)))
        (atomic-decf (bucket-waiters bucket))
        (atomic-decf (bucket-native bucket))))))

(declaim (ftype (sfunction (word (unsigned-byte 32) (or null fixnum) (or null word)) fixnum)
                wait-on-word))
(defun wait-on-word (address expected to-sec to-usec)
  "Wait while the word at ADDRESS, the low half of a raw slot of a pinned object, is EXPECTED, at most
TO-SEC seconds and TO-USEC microseconds; for ever if TO-SEC is negative. Returns 0 if woken, 1 if
the time is over, 2 after an interruption, -1 if the word is not EXPECTED."
  (if (can-park-p)
      (let* ((fiber (truly-the fiber *current-thread*))
             (result (without-interruptions
                       (wait-in-bucket fiber address expected
                                       (timeout-to-deadline to-sec to-usec)))))
        (when (fiber-interruptions fiber)
          (with-interrupts (see-interruptions fiber)))
        result)
      (wait-natively address expected to-sec to-usec)))

;;;; waking

(defun wake-fiber (bucket address)
  "Wake one fiber that waits for ADDRESS in BUCKET. Return false if there is none."
  (let ((fiber (take-from-bucket bucket address)))
    (when fiber
      (unpark fiber)
      t)))

(defun wake-natives (bucket address n)
  (if (= (bucket-native bucket) 0) 0 (%futex-wake address n)))

(defun wake-in-turn (bucket address)
  "Wake one who waits for ADDRESS in BUCKET, of the kind whose turn it is if both wait."
  (flet ((native () (wake-natives bucket address 1))
         (fiber () (wake-fiber bucket address)))
    (let ((turn (bucket-turn bucket)))
      (setf (bucket-turn bucket) (logxor turn 1))
      (if (= turn 0)
          (or (fiber) (native))
          (when (<= (native) 0) (fiber))))))

(declaim (ftype (sfunction (word unsigned-byte) null) wake-on-word))
(defun wake-on-word (address n)
  "Wake at most N of each kind of those who wait for the word at ADDRESS; if N is 1, one of both kinds."
  (let ((bucket (bucket-of address)))
    (barrier (:memory))
    (unless (= (bucket-waiters bucket) 0)
      (without-interruptions
        (cond ((= n 1) (wake-in-turn bucket address))
              (t (wake-natives bucket address n)
                 ;; One woken may wait for the word again: count, lest we wake it for ever.
                 (loop repeat (min n (bucket-waiters bucket))
                       while (wake-fiber bucket address))))))
    nil))
