;;;; mutexes of fibers and threads

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; The state of a mutex is a word: 0 free, 1 taken, 2 taken and perhaps waited for. A release that
;;; finds 2 makes it 0 and wakes one waiter, which then tries to take the mutex; others that try may
;;; come first, since they run already. For threads this is fast, and what comes of it is left to
;;; chance. But if a fiber holds the mutex whenever it parks, it would come first every time among
;;; the fibers of its carrier, and the others would wait for ever. So a fiber that was woken in vain
;;; waits again with a claim, in front of the others, and a release hands it the mutex, whose state
;;; stays 2:
;;;
;;;     WAIT-CLAIM           move                         by
;;;     NIL     -> :WANTED   it was woken, and too late   the fiber, out of the bucket
;;;     :WANTED -> :GRANTED  TAKE-CLAIMANT                the thread that releases, under the lock
;;;     :WANTED -> NIL       time-out, interruption       the fiber
;;;
;;; So a fiber is overtaken once; and once more by each release that finds it the turn of a thread,
;;; for which the mutex is freed as ever.

(defun take-mutex-or-mark (address)
  "Take the mutex whose state is at ADDRESS if it is free, else note that it is waited for."
  (flet ((state-becomes (old new)
           (cas (sap-ref-32 (int-sap address) 0) old new)))
    (declare (inline state-becomes))
    (loop
      (let ((state (state-becomes 0 2)))
        (cond ((= state 0) (return t))
              ((or (= state 2) (= (state-becomes 1 2) 1)) (return nil)))))))

(declaim (inline contend-for-mutex))
(defun contend-for-mutex (fiber address deadline interruptible)
  "Let FIBER take the mutex whose state is at ADDRESS. Return T, or NIL if DEADLINE comes before, or
:INTERRUPTED if INTERRUPTIBLE and it is. With interrupts off."
  (let ((claim nil))
    (loop
      (when (take-mutex-or-mark address) (return t))
      ;; A wake-up that is followed by an interruption is not passed on: the state is 2.
      (when (and interruptible (fiber-interruptions fiber)) (return :interrupted))
      (let ((result (wait-in-bucket fiber address 2 deadline claim)))
        (declare (fixnum result))
        (cond ((= result futex-timed-out) (return nil))
              ((= result futex-interrupted) (when interruptible (return :interrupted)))
              ((= result futex-woken)
               (when (eq (fiber-wait-claim fiber) :granted) (return t))
               (setf claim :wanted)))))))

(declaim (ftype (sfunction (word (or null fixnum) (or null word)) boolean) lock-mutex))
(defun lock-mutex (address to-sec to-usec)
  "What %MUTEX-TIMEDLOCK does in a fiber that can park, but for noting the owner. The state of the
mutex, which is pinned, is at ADDRESS."
  (let ((fiber (truly-the fiber *current-thread*))
        (deadline (timeout-to-deadline to-sec to-usec))
        (interruptible (or *interrupts-enabled* *allow-with-interrupts*)))
    (leave-interrupted-wait fiber)
    (loop
      (let ((result (without-interruptions
                      (let ((result (contend-for-mutex fiber address deadline interruptible)))
                        ;; No exit may come here with a mutex whose owner is not noted yet.
                        (unless (eq result :interrupted) (see-interruptions fiber))
                        result))))
        (unless (eq result :interrupted) (return result))
        (run-interruptions-of-wait fiber)
        (leave-interrupted-wait fiber)))))

(defun take-claimant (bucket address)
  "Take the first fiber that waits in BUCKET for the mutex with state at ADDRESS out of it, if it
has claimed the mutex. Grant it, and return the fiber, else NIL."
  (let ((fiber (with-tiny-lock ((bucket-lock bucket))
                 (let ((fiber (first-waiter bucket address)))
                   (cond ((and fiber (eq (fiber-wait-claim (truly-the fiber fiber)) :wanted))
                          (unlink-waiter bucket (truly-the fiber fiber) (truly-the fiber fiber))
                          ;; In this order: once its address is 0 it may run, as the owner.
                          (setf (fiber-wait-claim (truly-the fiber fiber)) :granted
                                (sap-ref-32 (int-sap address) 0) 2)
                          (barrier (:write))
                          (setf (fiber-wait-address (truly-the fiber fiber)) 0)
                          fiber)
                         (t nil))))))
    (when fiber (atomic-decf (bucket-waiters bucket)))
    fiber))

(defun grant-claim (bucket address)
  (unless (and (/= (bucket-native bucket) 0) (= (bucket-preference bucket) 1))
    (without-interruptions
      (let ((fiber (take-claimant bucket address)))
        (when fiber
          (setf (bucket-preference bucket) 1)
          (unpark fiber)
          t)))))

;;; A control stack that overflowed in here would leave the mutex taken, with no owner. So near the
;;; end of its stack a fiber grants no claim, but frees the mutex: then the stack may overflow in
;;; the wake-up, as that of a thread may.
(declaim (ftype (sfunction (word) boolean) hand-over))
(defun hand-over (address)
  "Give the pinned mutex whose state is at ADDRESS, and which the caller was about to release, to a
fiber that has claimed it. Return false if there is none."
  (let ((bucket (bucket-of address))
        (fiber (current-fiber)))
    (and (/= (bucket-claims bucket) 0)
         (or (null fiber) (waiting-room-p fiber))
         (grant-claim bucket address))))
