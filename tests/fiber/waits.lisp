;;;; How waits end that are not simply woken: time-outs, deadlines, interruptions, errors, deadlock

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :sb-concurrency)
(in-package "SB-FIBER-TESTS")

(def-suite* waits)

(defmacro outcome (&body body)
  "The value of BODY, or the type of the error that it signals."
  `(handler-case (progn ,@body)
     (error (condition) (type-of condition))))

;;; Another who holds a mutex until the body of the test has been executed.
(defun call-with-held-mutex (kind carrier-count function)
  (let ((mutex (make-mutex)) (held (make-semaphore)) (done (make-semaphore)))
    (flet ((hold ()
             (with-mutex (mutex)
               (signal-semaphore held)
               (wait-on-semaphore done)
               (holding-mutex-p mutex))))
      (with-group (group carrier-count)
        (let ((holder (if (eq kind :fiber)
                          (submit-fiber group (make-fiber #'hold))
                          (make-thread #'hold))))
          (wait-on-semaphore held)
          (multiple-value-prog1 (funcall function mutex group holder)
            (signal-semaphore done)
            (is (eq t (join-thread holder :timeout *patience*)))))))))

(defmacro with-held-mutex ((mutex group &key (holder (gensym)) (carrier-count 1)) &body body)
  "Execute BODY while a fiber of GROUP, and again while a thread, holds MUTEX, until the end of it."
  `(dolist (kind '(:fiber :thread))
     (call-with-held-mutex kind ,carrier-count
                           (lambda (,mutex ,group ,holder)
                             (declare (ignorable ,group ,holder))
                             ,@body))))

;;;; Nobody is left behind

(defun counted-waiters ()
  "How many waiters the parking lot counts: fibers, threads, claims."
  (loop for bucket across sb-fiber::*buckets*
        sum (sb-fiber::bucket-waiters bucket) into waiters
        sum (sb-fiber::bucket-native bucket) into native
        sum (sb-fiber::bucket-claims bucket) into claims
        count (sb-fiber::bucket-chain bucket) into chains
        finally (return (list waiters native claims chains))))

(defmacro nobody-left (&body body)
  "Check that BODY leaves nobody in the parking lot who was not there."
  `(let ((before (counted-waiters)))
     (multiple-value-prog1 (progn ,@body)
       (is (equal before (counted-waiters))))))

;;;; Misuse

(test release-a-mutex-of-another
  (with-held-mutex (mutex group :holder holder)
    (flet ((release (&rest arguments)
             (join (spawn (group) (outcome (apply #'release-mutex mutex arguments))))))
      (is (eq nil (release)))
      (is (eq nil (release :if-not-owner :punt)))
      (is (eq 'simple-error (release :if-not-owner :error)))
      (is (eq :warned (join (spawn (group)
                              (handler-case (release-mutex mutex :if-not-owner :warn)
                                (warning () :warned))))))
      (is (eq holder (mutex-owner mutex)))
      (is (eq nil (join (spawn (group) (grab-mutex mutex :waitp nil))))))))

;;; Prevents: a forced release that leaves the waiters asleep.
(test release-by-force
  (on-carriers (n)
    (let ((mutex (make-mutex)) (count 0))
      (with-group (group n)
        (let ((holder (spawn (group) (grab-mutex mutex) (fiber-park) (release-mutex mutex))))
          (wait-until-parked holder)
          (let ((waiters (loop repeat 5
                               collect (spawn (group) (with-mutex (mutex) (slow-increment count))))))
            (mapc #'wait-until-parked waiters)
            (join (spawn (group) (release-mutex mutex :if-not-owner :force)))
            (join-all waiters)
            (is (= 5 count))
            (fiber-unpark holder)
            (is (null (join holder)))))))))

(test recursive-grab
  (on-carriers (n)
    (is (equal '(simple-error simple-error simple-error t nil)
               (in-fiber (n)
                 (let ((mutex (make-mutex)))
                   (list (with-mutex (mutex) (outcome (grab-mutex mutex)))
                         (with-mutex (mutex) (outcome (grab-mutex mutex :timeout 0)))
                         (with-mutex (mutex) (outcome (with-mutex (mutex :wait-p nil) :in)))
                         (with-mutex (mutex) (outcome (grab-mutex mutex)) (holding-mutex-p mutex))
                         (mutex-owner mutex))))))))

(test condition-wait-without-the-mutex
  (is (eq 'simple-error
          (in-fiber () (outcome (condition-wait (make-waitqueue) (make-mutex))))))
  (with-held-mutex (mutex group)
    (is (eq 'simple-error
            (join (spawn (group) (outcome (condition-wait (make-waitqueue) mutex))))))))

(test joining-oneself
  (is (equal '(sb-thread:join-thread-error sb-thread:join-thread-error :default)
             (in-fiber ()
               (list (outcome (fiber-join (current-fiber)))
                     (outcome (join-thread sb-thread:*current-thread*))
                     (outcome (handler-case (fiber-join (current-fiber) :default :default)
                                (sb-thread:join-thread-error () :default))))))))

;;; A fiber that never runs is joined in vain, and may still be submitted.
(test joining-what-has-not-begun
  (let ((fiber (make-fiber (constantly 5))))
    (is (eq :no (fiber-join fiber :default :no :timeout 1/100)))
    (is (eq 'sb-thread:join-thread-error (in-fiber () (outcome (fiber-join fiber :timeout 1/100)))))
    (with-group (group 1)
      (let ((joiner (spawn (group) (fiber-join fiber))))
        (wait-until-parked joiner)
        (submit-fiber group fiber)
        (is (eql 5 (join joiner)))))))

(test finished-groups
  (let* ((finished (start-fibers nil :carrier-count 2))
         (fiber (spawn (finished) 7)))
    (is (eq t (finish-fibers finished)))
    (is (eq t (fiber-group-done-p finished)))
    (is (eq t (finish-fibers finished)))
    (is (eq t (finish-fibers finished :abort t :timeout 1)))
    (is (eql 7 (join fiber)))
    (let ((late (make-fiber (constantly 8))))
      (is (eq 'sb-thread::simple-thread-error (outcome (submit-fiber finished late))))
      ;; The same from a fiber, of another group.
      (is (equal '(sb-thread::simple-thread-error t 7)
                 (in-fiber ()
                   (list (outcome (submit-fiber finished late))
                         (finish-fibers finished)
                         (fiber-join fiber)))))
      (is (eq :new (fiber-state late)))
      (is (eq :no (fiber-join late :default :no :timeout 1/100))))))

(test finishing-ones-own-group
  (with-group (group 1)
    (is (eq 'sb-thread::simple-thread-error
            (join (spawn (group) (outcome (finish-fibers group))))))
    ;; Nothing has ended by that.
    (is (eql 1 (join (spawn (group) 1))))))

;;;; Without waiting

(test wait-p-nil
  (with-held-mutex (mutex group)
    (is (equal '(nil nil nil nil)
               (join (spawn (group)
                       (list (grab-mutex mutex :waitp nil)
                             (with-mutex (mutex :wait-p nil) :in)
                             (with-recursive-lock (mutex :wait-p nil) :in)
                             (holding-mutex-p mutex)))))))
  (is (equal '(:in :in t)
             (in-fiber ()
               (let ((mutex (make-mutex)))
                 (list (with-mutex (mutex :wait-p nil) :in)
                       (with-recursive-lock (mutex :wait-p nil) :in)
                       (grab-mutex mutex :waitp nil)))))))

;;; Prevents: a time-out of no seconds, or one that is over before the wait, that waits for ever.
(test time-outs-that-are-over
  (nobody-left
    (on-carriers (n)
      (with-held-mutex (mutex group :carrier-count n)
        (is (equal '(nil nil nil)
                   (join (spawn (group)
                           (list (grab-mutex mutex :timeout 0)
                                 (grab-mutex mutex :timeout 1/100000000)
                                 (with-mutex (mutex :timeout 0.0) :in))))))
        (is (equal '(nil nil nil)
                   (join (spawn (group)
                           (list (wait-on-semaphore (make-semaphore) :timeout 1/100000000)
                                 (wait-on-semaphore (make-semaphore) :timeout 1/1000)
                                 (let ((mutex (make-mutex)))
                                   (grab-mutex mutex)
                                   (condition-wait (make-waitqueue) mutex :timeout 0)))))))))))

;;; What it waits for can be looked at. With a time-out SBCL has it in a cons on the waiter's stack.
(test waiting-for-a-mutex-is-seen
  (with-held-mutex (mutex group)
    (dolist (timeout '(nil 30))
      (let ((waiter (spawn (group) (catch 'enough (grab-mutex mutex :timeout timeout)))))
        (wait-until-parked waiter)
        (is (eq mutex (nth-value 1 (fiber-state waiter))))
        (is (search "parked" (princ-to-string waiter)))
        (interrupt-fiber waiter (lambda () (throw 'enough :enough)))
        (is (eq :enough (join waiter)))))))

;;;; Deadlines

(defmacro deadline-p (&body body)
  "Does BODY run into the deadline?"
  `(handler-case (progn ,@body nil)
     (sb-sys:deadline-timeout () t)))

(defun waits-of-all-kinds (mutex group)
  "A list of functions each of which waits for ever, but for the deadline."
  (let ((never (make-fiber #'identity)))
    (list (lambda () (grab-mutex mutex))
          (lambda () (with-mutex (mutex)))
          (lambda () (grab-mutex mutex :timeout 1000))
          (lambda () (wait-on-semaphore (make-semaphore)))
          (lambda () (wait-on-semaphore (make-semaphore) :timeout 1000))
          (lambda () (let ((own (make-mutex)))
                       (with-mutex (own) (condition-wait (make-waitqueue) own))))
          (lambda () (fiber-join never))
          (lambda () (fiber-join never :timeout 1000))
          (lambda () (join-thread never))
          (lambda () (fiber-join (spawn (group) (sleep 1/4))) (sleep 1000))
          (lambda () (sb-ext:wait-for nil))
          (lambda () (sleep 1000))
          (lambda () (sb-concurrency:receive-message (sb-concurrency:make-mailbox)))
          (lambda () (sb-concurrency:wait-on-gate (sb-concurrency:make-gate :open nil))))))

(test deadlines-end-waits
  (nobody-left
    (on-carriers (n)
      (with-held-mutex (mutex group :carrier-count n)
        (let ((functions (waits-of-all-kinds mutex group)))
          (is (equal (make-list (length functions) :initial-element t)
                     (join-all
                      (loop for function in functions
                            collect (let ((function function))
                                      (spawn (group)
                                        (deadline-p (sb-sys:with-deadline (:seconds 1/50)
                                                      (funcall function))))))))))))))

;;; The nearer one counts, unless the inner one overrides it; the outer one is in force again after.
(test nested-deadlines
  (on-carriers (n)
    (with-held-mutex (mutex group :carrier-count n)
      (is (equal '(t t nil t t)
                 (join
                  (spawn (group)
                    (list (deadline-p (sb-sys:with-deadline (:seconds 1000)
                                        (sb-sys:with-deadline (:seconds 1/100) (grab-mutex mutex))))
                          (deadline-p (sb-sys:with-deadline (:seconds 1/100)
                                        (sb-sys:with-deadline (:seconds 1000) (grab-mutex mutex))))
                          (deadline-p (sb-sys:with-deadline (:seconds 1/100)
                                        (sb-sys:with-deadline (:seconds nil :override t)
                                          (grab-mutex mutex :timeout 1/20))))
                          (deadline-p (sb-sys:with-deadline (:seconds 1/100)
                                        (sb-sys:with-deadline (:seconds 1000 :override t)
                                          (grab-mutex mutex :timeout 1/20))
                                        (grab-mutex mutex)))
                          (deadline-p (sb-sys:with-deadline (:seconds 1/20)
                                        (deadline-p (sb-sys:with-deadline (:seconds 1/100)
                                                      (grab-mutex mutex)))
                                        (grab-mutex mutex)))))))))))

;;; Prevents: a deadline of the fiber before on the carrier, or of who has made the fiber.
(test deadlines-are-not-inherited
  (is (eq nil (sb-sys:with-deadline (:seconds 1000)
                (in-fiber () sb-impl::*deadline*))))
  (on-carriers (n)
    (with-group (group n)
      (flet ((sleep-without-deadline ()
               (list (deadline-p (sleep 1/50)) sb-impl::*deadline*)))
        (is (equal (make-list 10 :initial-element '(nil nil))
                   (join-all
                    (join (spawn (group)
                            (sb-sys:with-deadline (:seconds 1/100)
                              (let ((fibers (loop repeat 10
                                                  collect (submit-fiber
                                                           group
                                                           (make-fiber #'sleep-without-deadline)))))
                                (loop repeat 20 do (fiber-yield))
                                fibers)))))))))))

(test deadlines-that-are-deferred-or-cancelled
  (with-held-mutex (mutex group)
    (is (equal '(2 t)
               (join (spawn (group)
                       (let ((n 0))
                         (list (handler-case
                                   (handler-bind ((sb-sys:deadline-timeout
                                                    (lambda (condition)
                                                      (when (< (incf n) 2)
                                                        (sb-sys:defer-deadline 1/100 condition)))))
                                     (sb-sys:with-deadline (:seconds 1/100)
                                       (grab-mutex mutex)))
                                 (sb-sys:deadline-timeout () n))
                               (handler-bind ((sb-sys:deadline-timeout
                                                #'sb-sys:cancel-deadline))
                                 (sb-sys:with-deadline (:seconds 1/100)
                                   (null (grab-mutex mutex :timeout 1/20))))))))))))

;;;; Interruptions

;;; Prevents: an interruption that ends the wait; one that is not seen by who parks.
(test interruptions-return-to-the-wait
  (on-carriers (n)
    (with-held-mutex (mutex group :holder holder :carrier-count n)
      (let* ((interrupted (make-semaphore))
             (end (make-semaphore))
             (fibers (list (spawn (group) (catch 'end (grab-mutex mutex)))
                           (spawn (group) (wait-on-semaphore end) :end)
                           (spawn (group) (catch 'end (join-thread holder))))))
        (flet ((interrupt (fiber function)
                 (sb-thread:interrupt-thread fiber (lambda ()
                                                     (funcall function)
                                                     (signal-semaphore interrupted)))))
          (dolist (function (list #'list #'thread-yield (lambda () (sleep 1/1000))))
            (dolist (fiber fibers) (interrupt fiber function))
            (is (wait-on-semaphore interrupted :n 3 :timeout *patience*))
            (is (every #'fiber-alive-p fibers))))
        (signal-semaphore end)
        (dolist (fiber (list (first fibers) (third fibers)))
          (interrupt-fiber fiber (lambda () (throw 'end :end))))
        (is (equal '(:end :end :end) (join-all fibers)))))))

;;; An interruption may want the mutex that the interrupted fiber waits for.
(test an-interruption-takes-the-mutex
  (on-carriers (n)
    (let ((mutex (make-mutex)) (count 0))
      (with-group (group n)
        (let ((fibers (loop repeat 20
                            collect (spawn (group)
                                      (loop repeat 20
                                            do (with-mutex (mutex) (slow-increment count)))))))
          (loop repeat 5
                do (dolist (fiber fibers)
                     (when (fiber-alive-p fiber)
                       (handler-case
                           (interrupt-fiber fiber
                                            (lambda ()
                                              (unless (holding-mutex-p mutex)
                                                (with-mutex (mutex) (thread-yield)))))
                         (sb-thread:interrupt-thread-error ()))))
                   (thread-yield))
          (join-all fibers)
          (is (= 400 count))
          (is (null (mutex-owner mutex))))))))

;;; True where there is a catch tag OUT: an interruption may come anywhere.
(defvar *may-leave* nil)

(defmacro with-way-out (&body body)
  `(catch 'out (let ((*may-leave* t)) ,@body)))

(defun leave-by-way-out ()
  (when *may-leave* (throw 'out nil)))

(defmacro noting-what-is-taken (form &body taken)
  "Execute FORM, which waits for a semaphore with NOTIFICATION. Execute TAKEN if that has been decremented,
also when FORM is left by a non-local exit."
  `(let ((notification (sb-thread:make-semaphore-notification)))
     (sb-sys:without-interrupts
       (unwind-protect (sb-sys:with-local-interrupts ,form)
         (when (sb-thread:semaphore-notification-status notification) ,@taken)))))

;;; Prevents: a wake-up that goes to one who leaves the wait, and wakes nobody then. Each is sent once.
(test exits-lose-no-wake-up
  (nobody-left
    (on-carriers (n)
      (let ((mutex (make-mutex)) (queue (make-waitqueue)) (semaphore (make-semaphore))
            (items 0) (got 0) (taken (list 0)))
        (with-group (group n)
          (flet ((take-item ()
                   (with-mutex (mutex)
                     (loop until (plusp items) do (condition-wait queue mutex))
                     (sb-sys:without-interrupts (decf items) (incf got))))
                 (take-from-semaphore ()
                   (noting-what-is-taken (wait-on-semaphore semaphore :notification notification)
                     (sb-ext:atomic-incf (car taken)))))
            (let ((fibers (loop repeat 20
                                collect (spawn (group) (with-way-out (take-item)))
                                collect (spawn (group) (with-way-out (take-from-semaphore))))))
              (mapc #'wait-until-parked fibers)
              (loop for (first second) on fibers by #'cddr
                    for i from 0
                    do (with-mutex (mutex) (incf items) (condition-notify queue))
                       (signal-semaphore semaphore)
                       (when (< i 10)
                         (dolist (fiber (list first second))
                           (handler-case (interrupt-fiber fiber #'leave-by-way-out)
                             (sb-thread:interrupt-thread-error ())))))
              (join-all fibers))))
        (is (= 20 (+ items got)))
        (is (= 20 (+ (semaphore-count semaphore) (car taken))))))))

;;;; Deadlock

(defun cross (n first second ready)
  "Take FIRST, wait until N have done so, and then take SECOND. Return the deadlock, or :GOT-IT."
  (with-mutex (first)
    (signal-semaphore ready)
    (loop until (>= (semaphore-count ready) n) do (thread-yield))
    (handler-case (with-mutex (second) :got-it)
      (sb-thread:thread-deadlock (condition) condition))))

(defun deadlock-in-circle (carrier-count n-fibers n-threads)
  "Let each of some fibers and threads hold a mutex and want the next one's. Return what became of them."
  (let* ((n (+ n-fibers n-threads))
         (mutexes (coerce (loop for i below n collect (make-mutex :name (format nil "~D" i)))
                          'simple-vector))
         (ready (make-semaphore)))
    (values (mixed carrier-count n-fibers n-threads
                   (lambda (i)
                     (cross n (svref mutexes i) (svref mutexes (mod (1+ i) n)) ready)))
            mutexes)))

(defun check-deadlock (results mutexes)
  (let ((deadlocks (remove :got-it results)))
    (is (= 1 (length deadlocks)))
    (let ((cycle (sb-thread:thread-deadlock-cycle (first deadlocks))))
      (is (= (length mutexes) (length cycle)))
      (is (null (set-exclusive-or (coerce mutexes 'list) (mapcar #'cdr cycle))))
      (is (assoc (sb-thread:thread-error-thread (first deadlocks)) cycle))
      (is (search "Deadlock" (princ-to-string (first deadlocks)))))))

(test deadlock-of-fibers
  (on-carriers (n)
    (multiple-value-call #'check-deadlock (deadlock-in-circle n 2 0))
    (multiple-value-call #'check-deadlock (deadlock-in-circle n 5 0))))

(test deadlock-of-fibers-and-threads
  (on-carriers (n)
    (multiple-value-call #'check-deadlock (deadlock-in-circle n 1 1))
    (multiple-value-call #'check-deadlock (deadlock-in-circle n 2 2))))

;;; Two who are mounted at the same time, each on a carrier of its own.
(test deadlock-of-running-fibers
  (let ((a (make-mutex)) (b (make-mutex)) (here (list 0)))
    (flet ((take (first second)
             (with-mutex (first)
               (sb-ext:atomic-incf (car here))
               (loop until (= (car here) 2)
                     do (loop repeat 1000 do (sb-ext:spin-loop-hint))
                        (fiber-yield))
               (handler-case (with-mutex (second) :got-it)
                 (sb-thread:thread-deadlock () :deadlock)))))
      (loop repeat 50
            do (setf (car here) 0)
               (is (equal '(:deadlock :got-it)
                          (sort (in-fibers 2 2 (lambda (i) (if (= i 0) (take a b) (take b a))))
                                #'string<)))))))

(defun try-two (first second patient)
  "Take two mutexes, the second one, unless PATIENT, with a time-out."
  (handler-case
      (with-mutex (first :timeout 10)
        (thread-yield)
        (if patient
            (with-mutex (second) t)
            (with-mutex (second :timeout 1/1000) t)))
    (sb-thread:thread-deadlock () :deadlock)))

;;; One who waits with a time-out will give up: that is no deadlock. What he waits for is in a cons
;;; on his stack; others follow the chain of waiters meanwhile, and must not look into it.
(test no-deadlock-with-a-time-out
  (nobody-left
    (on-carriers (n)
      (let* ((mutexes (coerce (loop repeat 8 collect (make-mutex)) 'simple-vector))
             (outcomes (mixed n 24 4
                              (lambda (i)
                                (loop repeat 30
                                      collect (try-two (svref mutexes (mod i 8))
                                                       (svref mutexes (mod (+ i 3) 8))
                                                       (evenp i)))))))
        (is (null (set-difference (reduce #'append outcomes) '(t nil :deadlock))))
        (is (every (lambda (mutex) (null (mutex-owner mutex))) mutexes))))))

;;;; Nobody waits for ever

;;; Prevents: that the fiber which has just released the mutex always takes it before the one that was
;;; woken. It holds the mutex whenever it parks.
(test a-greedy-fiber
  (on-carriers (n)
    (let ((mutex (make-mutex)) (others 0))
      (is (equal '(t t t t)
                 (in-fibers n 4
                            (lambda (i)
                              (cond ((= i 0)
                                     (loop until (= others 3)
                                           do (with-mutex (mutex) (fiber-yield)))
                                     t)
                                    (t (loop repeat 20 do (fiber-yield))
                                       (with-mutex (mutex) (incf others))
                                       t)))))))))

(test a-greedy-thread
  (on-carriers (n)
    (let ((mutex (make-mutex)) (others 0))
      (is (equal '(t t t t)
                 (mixed n 3 1
                        (lambda (i)
                          (cond ((= i 3)
                                 (loop until (= others 3)
                                       do (with-mutex (mutex) (thread-yield)))
                                 t)
                                (t (loop repeat 20 do (fiber-yield))
                                   (with-mutex (mutex) (incf others))
                                   t)))))))))

;;; Each takes its turn though all want it always: nobody is overtaken again and again.
(test greedy-fibers
  (on-carriers (n)
    (let ((mutex (make-mutex)) (turns (make-array 10 :initial-element 0)))
      (is (equal (make-list 10 :initial-element t)
                 (in-fibers n 10
                            (lambda (i)
                              (loop until (every (lambda (turns) (>= turns 3)) turns)
                                    do (with-mutex (mutex)
                                         (incf (svref turns i))
                                         (thread-yield)))
                              t)))))))

;;; As many waiters as there are connections of a server. Prevents: waking, entering and leaving that
;;; get slower with each waiter.
(test many-waiters-of-one-queue
  (nobody-left
    (on-carriers (n :counts '(1 2) :migration '(nil))
      (let ((mutex (make-mutex)) (queue (make-waitqueue)) (go nil) (arrived 0) (woken 0))
        (with-group (group n)
          (let ((fibers (loop repeat 10000
                              collect (spawn (group)
                                        (with-mutex (mutex)
                                          (incf arrived)
                                          (loop until go do (condition-wait queue mutex))
                                          (incf woken))))))
            (loop until (= 10000 (with-mutex (mutex) arrived)) do (sleep 1/100))
            (with-mutex (mutex)
              (setf go t)
              (condition-broadcast queue))
            (join-all fibers)
            (is (= 10000 woken))))))))

(test many-waiters-give-up
  (nobody-left
    (on-carriers (n :counts '(1 2) :migration '(nil))
      (let ((semaphore (make-semaphore)))
        (is (= 5000 (count nil (in-fibers n 5000
                                          (lambda (i)
                                            (wait-on-semaphore semaphore
                                                               :timeout (/ (1+ (mod i 100)) 500)))))))
        (is (= 0 (semaphore-count semaphore)))
        (is (= 0 (sb-thread::semaphore-waitcount semaphore)))))))

;;;; All of it at once

;;; Victims take and wait in all ways, with time-outs and deadlines, while they are interrupted, thrown out
;;; and terminated. Others do the same work in peace, and must not notice. (Threads among the victims are not
;;; interrupted: SBCL 2.6.4 without fibers loses interruptions of threads that run into deadlines.)

(defstruct storm
  (mutex (make-mutex)) (queue (make-waitqueue)) (semaphore (make-semaphore))
  (count 0) (items 0) (over nil)
  (tally 0 :type sb-ext:word))          ; increments of COUNT

(defun count-in-storm (storm)
  ;; In one piece, whoever is ended.
  (sb-sys:without-interrupts
    (slow-increment (storm-count storm))
    (sb-ext:atomic-incf (storm-tally storm))))

(defun lock-in-storm (storm timeout)
  (let ((mutex (storm-mutex storm)))
    (if timeout
        (with-mutex (mutex :timeout timeout) (count-in-storm storm))
        (with-mutex (mutex) (yield-at-random) (count-in-storm storm)))))

(defun take-in-storm (storm timeout)
  "Decrement the semaphore, and give back what was taken."
  (let ((semaphore (storm-semaphore storm)))
    (noting-what-is-taken (wait-on-semaphore semaphore :timeout timeout :notification notification)
      (sb-sys:with-deadline (:seconds nil :override t)
        (signal-semaphore semaphore)))))

(defun pass-on-in-storm (storm)
  "Who waits with a time-out may have been notified, and too late for the mutex."
  (let ((mutex (storm-mutex storm)))
    (sb-sys:with-deadline (:seconds nil :override t)
      (with-recursive-lock (mutex)
        (condition-notify (storm-queue storm)))
      (when (holding-mutex-p mutex) (release-mutex mutex)))))

(defun look-for-item-in-storm (storm timeout)
  "Wait until there is an item, and leave it to another."
  (let ((mutex (storm-mutex storm)))
    (sb-sys:without-interrupts
      (unwind-protect
           (progn
             (sb-sys:allow-with-interrupts (grab-mutex mutex))
             (sb-sys:with-local-interrupts
               (loop until (plusp (storm-items storm))
                     while (condition-wait (storm-queue storm) mutex :timeout timeout))))
        (pass-on-in-storm storm)))))

(defun suffer (storm)
  "Wait in all ways until ended, or in a thread until the storm is over."
  (loop
    (when (and (storm-over storm) (not (current-fiber))) (return))
    (let ((timeout (+ 1/1000000 (random 0.002))))
      (with-way-out
        (handler-case
            (sb-sys:with-deadline (:seconds (random 0.005))
              (case (random 4)
                (0 (lock-in-storm storm (and (= 0 (random 2)) timeout)))
                (1 (take-in-storm storm timeout))
                (2 (look-for-item-in-storm storm timeout))
                (3 (thread-yield))))
          (sb-sys:deadline-timeout ()))))))

(defun torment (fibers)
  (loop repeat (* 10 (length fibers))
        do (let ((returned nil)
                 (function (case (random 3)
                             (0 #'list)
                             (1 #'thread-yield)
                             (2 #'leave-by-way-out))))
             (sb-thread:interrupt-thread (elt fibers (random (length fibers)))
                                         (lambda ()
                                           (unwind-protect (funcall function)
                                             (setf returned t))))
             (loop until returned do (thread-yield)))))

(defun work-in-peace (storm i)
  (loop repeat 40
        do (lock-in-storm storm nil)
           (case (mod i 4)
             (0 (signal-semaphore (storm-semaphore storm)))
             (1 (with-mutex ((storm-mutex storm))
                  (incf (storm-items storm))
                  (condition-notify (storm-queue storm))))
             (2 (with-mutex ((storm-mutex storm))
                  (loop until (plusp (storm-items storm))
                        do (condition-wait (storm-queue storm) (storm-mutex storm)))
                  (decf (storm-items storm))))
             (3 (wait-on-semaphore (storm-semaphore storm))))))

(defun run-storm (carrier-count)
  "Return the storm, when it is over, and how the victims have ended."
  (let ((storm (make-storm)))
    (with-group (group carrier-count)
      (let* ((fibers (loop repeat 20 collect (spawn (group) (suffer storm))))
             (threads (loop repeat 2 collect (make-thread #'suffer :arguments (list storm))))
             (workers (append (loop for i below 20
                                    collect (let ((i i)) (spawn (group) (work-in-peace storm i))))
                              (loop for i below 4
                                    collect (make-thread #'work-in-peace
                                                         :arguments (list storm i)))))
             (tormentors (list (spawn (group) (torment fibers))
                               (make-thread #'torment :arguments (list fibers)))))
        (dolist (each (append tormentors (reverse workers)))
          (join-thread each :timeout *patience*))
        (setf (storm-over storm) t)
        (dolist (thread threads) (join-thread thread :timeout *patience*))
        (mapc #'sb-thread:terminate-thread fibers)
        (values storm
                (loop for fiber in fibers
                      collect (nth-value 1 (join-thread fiber :default nil
                                                              :timeout *patience*))))))))

(test storm
  (nobody-left
    (on-carriers (n)
      (multiple-value-bind (storm ends) (run-storm n)
        (is (every (lambda (end) (eq end :abort)) ends))
        (is (= (storm-count storm) (storm-tally storm)))
        (is (= 0 (storm-items storm)))
        (is (= 0 (semaphore-count (storm-semaphore storm))))
        (is (= 0 (sb-thread::semaphore-waitcount (storm-semaphore storm))))
        (is (null (mutex-owner (storm-mutex storm))))
        (is (= 0 (sb-thread::mutex-state (storm-mutex storm))))))))
