;;;; the parking lot alone: fiber/parking.lisp, without a scheduler

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* parking)

;;; Words in foreign memory, which does not move
(defmacro with-words ((&rest names) &body body)
  (let ((memory (gensym)))
    `(let ((,memory (sb-alien:make-alien (sb-alien:unsigned 64) ,(length names))))
       (unwind-protect
            (let ,(loop for name in names
                        for i from 0
                        collect `(,name (+ (sb-sys:sap-int (sb-alien:alien-sap ,memory))
                                           ,(* 8 i))))
              ,@(loop for name in names collect `(setf (word ,name) 0))
              ,@body)
         (sb-alien:free-alien ,memory)))))

(defun word (address)
  (sb-sys:sap-ref-32 (sb-sys:int-sap address) 0))
(defun (setf word) (value address)
  (setf (sb-sys:sap-ref-32 (sb-sys:int-sap address) 0) value))

(defun make-waiter () (make-fiber #'identity))

(defun queues (bucket)
  "The first fibers of the queues of BUCKET."
  (loop for first across (sb-fiber::bucket-chains bucket)
        nconc (loop for fiber = first then (sb-fiber::fiber-wait-word fiber)
                    while fiber collect fiber)))

(defun queue-of (bucket address)
  "The fibers that wait for ADDRESS in BUCKET, the longest waiting first."
  (loop for fiber = (find address (queues bucket) :key #'address-of)
          then (sb-fiber::fiber-wait-next fiber)
        while fiber collect fiber))

(defun address-of (fiber) (sb-fiber::fiber-wait-address fiber))
(defun enter (bucket fiber address &optional (expected 0) claim)
  (sb-fiber::enter-bucket bucket fiber address expected claim))
(defun leave (bucket fiber) (sb-fiber::leave-bucket bucket fiber))
(defun take (bucket address) (sb-fiber::take-from-bucket bucket address))
(defun grant (bucket address) (sb-fiber::take-claimant bucket address))
(defun claim-of (fiber) (sb-fiber::fiber-wait-claim fiber))
(defun n-waiters (bucket) (sb-fiber::bucket-waiters bucket))

;;;; The chain of a bucket

;;; Prevents: waiting for what has happened; and being counted although one does not wait.
(test a-word-that-has-changed
  (with-words (word)
    (let ((bucket (sb-fiber::make-bucket))
          (fiber (make-waiter)))
      (setf (word word) 1)
      (is (not (enter bucket fiber word 0)))
      (is (= 0 (n-waiters bucket)))
      (is (= 0 (address-of fiber)))
      (is (enter bucket fiber word 1))
      (is (= 1 (n-waiters bucket)))
      (is (= word (address-of fiber))))))

;;; Only the low half of the slot is the word: what is above it is another's.
(test the-low-half-is-compared
  (with-words (word)
    (let ((bucket (sb-fiber::make-bucket)))
      (setf (word (+ word 4)) 77)
      (is (enter bucket (make-waiter) word 0))
      (setf (word word) (ldb (byte 32 0) -1))
      (is (enter bucket (make-waiter) word (ldb (byte 32 0) -1))))))

(test the-longest-waiting-is-taken
  (with-words (word)
    (let ((bucket (sb-fiber::make-bucket))
          (fibers (loop repeat 5 collect (make-waiter))))
      (dolist (fiber fibers) (enter bucket fiber word))
      (is (= 5 (n-waiters bucket)))
      (dolist (fiber fibers)
        (is (eq fiber (take bucket word)))
        (is (= 0 (address-of fiber))))
      (is (null (take bucket word)))
      (is (= 0 (n-waiters bucket))))))

;;; Words share buckets. Prevents: waking what waits for another one.
(test two-words-in-a-bucket
  (with-words (one two)
    (let ((bucket (sb-fiber::make-bucket))
          (first (make-waiter))
          (second (make-waiter))
          (third (make-waiter)))
      (enter bucket first one)
      (enter bucket second two)
      (enter bucket third one)
      (is (eq second (take bucket two)))
      (is (null (take bucket two)))
      (is (eq first (take bucket one)))
      (is (eq third (take bucket one))))))

;;; Time-out and wake are decided by what takes the fiber out. Prevents that both think so.
(test leaving-a-bucket
  (with-words (word)
    (let ((bucket (sb-fiber::make-bucket))
          (fibers (loop repeat 4 collect (make-waiter))))
      (dolist (fiber fibers) (enter bucket fiber word))
      (is (eq (first fibers) (take bucket word)))
      (is (not (leave bucket (first fibers))))
      (is (leave bucket (third fibers)))
      (is (not (leave bucket (third fibers))))
      (is (leave bucket (fourth fibers)))
      (is (equal (list (second fibers)) (queue-of bucket word)))
      (is (= 1 (n-waiters bucket)))
      ;; The end of the queue has moved.
      (enter bucket (first fibers) word)
      (is (equal (list (second fibers) (first fibers)) (queue-of bucket word))))))

;;; Prevents: a waiter that was overtaken and waits behind those that came later; a mutex that is
;;; handed to one that does not expect it.
(test claims
  (with-words (word other)
    (let ((bucket (sb-fiber::make-bucket))
          (patient (make-waiter))
          (claimer (make-waiter)))
      (enter bucket patient word)
      (is (null (grant bucket word)))
      (enter bucket claimer word 0 :wanted)
      (is (equal (list claimer patient) (queue-of bucket word)))
      (is (= 1 (sb-fiber::bucket-claims bucket)))
      (is (null (grant bucket other)))
      (is (eq claimer (grant bucket word)))
      (is (eq :granted (claim-of claimer)))
      (is (= 0 (address-of claimer)))
      (is (= 2 (word word)))            ; the mutex remains taken
      (is (= 0 (sb-fiber::bucket-claims bucket)))
      (is (null (grant bucket word)))
      (is (eq patient (take bucket word)))
      (is (null (claim-of patient)))
      (is (= 0 (n-waiters bucket))))))

;;; A claim that is given up, or answered by an ordinary wake-up.
(test claims-that-end
  (with-words (word)
    (let ((bucket (sb-fiber::make-bucket))
          (claimer (make-waiter)))
      (enter bucket claimer word 0 :wanted)
      (is (leave bucket claimer))
      (is (= 0 (sb-fiber::bucket-claims bucket)))
      (enter bucket claimer word 0 :wanted)
      (is (eq claimer (take bucket word)))
      (is (not (eq :granted (claim-of claimer))))
      (is (= 0 (sb-fiber::bucket-claims bucket) (n-waiters bucket)))
      (is (= 0 (word word))))))

(defun links (fiber)
  (list (sb-fiber::fiber-wait-next fiber) (sb-fiber::fiber-wait-previous fiber)
        (sb-fiber::fiber-wait-word fiber)))

(defun first-waiter (address model)
  (car (find address model :key #'cdr)))

(defun sound-bucket-p (bucket words model spare)
  "Does BUCKET hold what MODEL says, and is it linked as it must be?"
  (and (loop for word across words
             for queue = (queue-of bucket word)
             always (equal queue (loop for (fiber . address) in model
                                       when (= address word) collect fiber))
             always (loop for (fiber next) on (cons (car (last queue)) queue)
                          always (or (null next)
                                     (eq fiber (sb-fiber::fiber-wait-previous next)))))
       (= (length (queues bucket))
          (sb-fiber::bucket-queues bucket)
          (length (remove-duplicates (mapcar #'cdr model))))
       (every (lambda (fiber) (and (= 0 (address-of fiber)) (equal '(nil nil nil) (links fiber))))
              spare)
       (= (n-waiters bucket) (length model))
       (= (sb-fiber::bucket-claims bucket)
          (count :wanted model :key (lambda (entry) (claim-of (car entry)))))))

(defun random-operations (n words)
  "Do N operations on a bucket and on a list of conses of a fiber and its word. Return the number of
the first that differs, or NIL."
  (let ((bucket (sb-fiber::make-bucket))
        (model '())
        (spare (loop repeat 30 collect (make-waiter))))
    (dotimes (i n)
      (let ((word (aref words (random (length words)))))
        (ecase (random 5)
          ((0 1) (when spare
                   (let ((fiber (pop spare)))
                     (cond ((enter bucket fiber word (random 2))
                            (setf model (append model (list (cons fiber word)))))
                           (t (push fiber spare))))))
          (4 (when spare
               (let ((fiber (pop spare)))
                 (enter bucket fiber word 0 :wanted)
                 (push (cons fiber word) model))))
          (2 (let ((fiber (take bucket word)))
               (unless (eq fiber (first-waiter word model)) (return i))
               (when fiber
                 (push fiber spare)
                 (setf model (remove fiber model :key #'car)))))
          (3 (when model
               (let ((fiber (car (nth (random (length model)) model))))
                 (unless (leave bucket fiber) (return i))
                 (push fiber spare)
                 (setf model (remove fiber model :key #'car))))))
        (unless (sound-bucket-p bucket words model spare) (return i))))))

(test random-operations
  (with-words (one two three)
    (is (null (random-operations 10000 (vector one two three))))))

(test random-operations-on-many-words
  (with-words (first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth)
    (is (null (random-operations 5000 (vector first second third fourth fifth sixth seventh eighth
                                              ninth tenth eleventh twelfth))))))

(defun longest-chain (bucket)
  (loop for first across (sb-fiber::bucket-chains bucket)
        maximize (loop for fiber = first then (sb-fiber::fiber-wait-word fiber)
                       while fiber count t)))

;;; Prevents: wake-ups that take the longer the more other words fibers wait for.
(test chains-stay-short
  (loop for shift from 3 to 16
        do (let ((bucket (sb-fiber::make-bucket)) (n 1000))
             (with-words (base)
               (dotimes (i n)
                 ;; ENTER-BUCKET reads the word, of which there are not so many.
                 (let ((fiber (make-waiter)))
                   (sb-fiber::bucket-ensure-room bucket)
                   (setf (sb-fiber::fiber-wait-address fiber) (+ base (ash i shift)))
                   (sb-sys:without-interrupts
                     (sb-fiber::append-to-queue bucket nil fiber)))))
             (is (= n (length (queues bucket)) (sb-fiber::bucket-queues bucket)))
             (is (<= (longest-chain bucket) 16) "Distance ~D" (ash 1 shift)))))

;;; Prevents: objects that lie at like distances, as those of an allocation region do, in
;;; one bucket.
(test words-are-spread
  (loop for shift from 4 to 16
        do (let ((buckets (loop for i below sb-fiber::n-buckets
                                collect (sb-fiber::bucket-of (+ #x1200000008 (ash i shift))))))
             (is (<= (/ sb-fiber::n-buckets 16) (length (remove-duplicates buckets)))
                 "Distance ~D" (ash 1 shift)))))

;;;; Time-outs

(test deadlines-of-time-outs
  (is (null (sb-fiber::timeout-to-deadline nil nil)))
  (is (null (sb-fiber::timeout-to-deadline -1 0)))
  (is (<= (sb-fiber::fiber-now) (sb-fiber::timeout-to-deadline 0 0)))
  (is (<= (+ (sb-fiber::fiber-now) 1500000000) (sb-fiber::timeout-to-deadline 1 500000)))
  ;; A heap's NEAREST is MOST-POSITIVE-FIXNUM if there is none.
  (is (< (sb-fiber::timeout-to-deadline most-positive-fixnum 0) most-positive-fixnum)))

;;;; Threads

(defun wait-in-thread (address expected &optional (seconds -1) (microseconds 0))
  (sb-fiber::wait-on-word address expected seconds microseconds))

(defun uncounted-p (address)
  "Is nobody counted as waiting in the bucket of ADDRESS?"
  (let ((bucket (sb-fiber::bucket-of address)))
    (and (= 0 (n-waiters bucket)) (= 0 (sb-fiber::bucket-native bucket)))))

(test results-in-a-thread
  (with-words (word)
    (is (= sb-fiber::futex-changed (wait-in-thread word 1)))
    (is (= sb-fiber::futex-timed-out (wait-in-thread word 0 0 1000)))
    (is (uncounted-p word))))

(defun sleeping-p (address n)
  "Are N threads counted for ADDRESS?"
  (= n (sb-fiber::bucket-native (sb-fiber::bucket-of address))))

(defun start-waiters (address n)
  "Threads that wait until the word at ADDRESS is not 0, once all of them are counted."
  (let ((threads (loop repeat n
                       collect (sb-thread:make-thread
                                (lambda ()
                                  (loop while (= 0 (word address))
                                        do (wait-in-thread address 0)))))))
    (loop until (sleeping-p address n) do (sb-thread:thread-yield))
    threads))

(defun join-in-time (thread)
  (sb-thread:join-thread thread :timeout *patience* :default :hangs))

(test a-thread-is-woken
  (with-words (word)
    (loop repeat 200
          do (setf (word word) 0)
             (let ((thread (first (start-waiters word 1))))
               (setf (word word) 1)
               (sb-fiber::wake-on-word word 1)
               (is (null (join-in-time thread)))))
    (is (uncounted-p word))))

(test all-threads-are-woken
  (with-words (word)
    (let ((threads (start-waiters word 10)))
      (setf (word word) 1)
      (sb-fiber::wake-on-word word (ash 1 29))
      (dolist (thread threads)
        (is (null (join-in-time thread)))))
    (is (uncounted-p word))))

;;; Prevents: a waiter that is counted for ever, so that each wake of the bucket is a system call.
(test a-thread-that-is-unwound-is-counted-out
  (with-words (word)
    (let ((thread (first (start-waiters word 1))))
      (sb-thread:terminate-thread thread)
      (is (eq :abort (nth-value 1 (sb-thread:join-thread thread :timeout *patience* :default nil))))
      (is (uncounted-p word)))))

(defun pass-around (address me n rounds)
  "Wait until the word at ADDRESS is ME, and make it the number of the next of N."
  (loop repeat rounds
        do (loop (let ((value (word address)))
                   (when (= value me) (return))
                   (wait-in-thread address value)))
           (setf (word address) (mod (1+ me) n))
           (sb-fiber::wake-on-word address (ash 1 29))))

;;; Prevents: a wake between the look at the word and the sleep that is lost. The store is a plain
;;; one: the waker must not look for waiters before others see it.
(test no-wake-is-lost-between-threads
  (with-words (word)
    (let ((threads (loop for i below 3
                         collect (sb-thread:make-thread #'pass-around
                                                        :arguments (list word i 3 3000)))))
      (dolist (thread threads)
        (is (null (join-in-time thread)))))
    (is (uncounted-p word))))

;;;; Fibers

;;; Prevents: a permit that makes a new fiber look like one that was submitted.
(test unparking-what-has-not-begun
  (with-group (group 1)
    (let ((fiber (make-fiber (lambda () (fiber-park) :done))))
      (fiber-unpark fiber)
      (is (eq :done (join (submit-fiber group fiber)))))
    (let* ((log '())
           (fiber (make-fiber (lambda () (push :begun log)))))
      (interrupt-fiber fiber (lambda () (push :interruption log)))
      (is (equal '(:begun :interruption) (join (submit-fiber group fiber)))))
    (let ((fiber (make-fiber #'identity)))
      (fiber-unpark fiber)
      (terminate-fiber fiber)
      (is (not (fiber-alive-p fiber))))))

;;; As in a thread, a wait within WITHOUT-INTERRUPTS is not interrupted. Prevents: an unwinding of
;;; code that has asked not to be unwound.
(test interruptions-come-when-they-are-allowed
  (with-group (group 1)
    (let* ((semaphore (sb-thread:make-semaphore))
           (log '())
           (fiber (spawn (group)
                    (sb-sys:without-interrupts
                      (push :in log)
                      (sb-thread:wait-on-semaphore semaphore)
                      (push :out log))
                    (fiber-yield))))
      (loop until (eq :parked (fiber-state fiber)) do (sb-thread:thread-yield))
      (interrupt-fiber fiber (lambda () (push :interruption log)))
      ;; Now it has looked at it, and waits again.
      (loop until (and (eq :parked (fiber-state fiber))
                       (= sb-fiber::+parked+ (sb-fiber::fiber-phase fiber)))
            do (sb-thread:thread-yield))
      (sb-thread:signal-semaphore semaphore)
      (join fiber)
      (is (equal '(:in :out :interruption) (reverse log))))))
