;;;; What threads wait for, in fibers: condition variables, semaphores, joining, polling

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* locks)

;;;; Condition variables

;;; Prevents: a notify between release and wait that is lost; tokens that are the same for two
;;; fibers of one carrier.
(test condition-ping-pong
  (on-carriers (n)
    (let ((mutex (make-mutex)) (queue (make-waitqueue)) (turn 0))
      (flet ((player (me)
               (loop repeat 1000
                     do (with-mutex (mutex)
                          (loop until (= turn me) do (condition-wait queue mutex))
                          (setf turn (- 1 me))
                          (condition-notify queue)))))
        (in-fibers n 2 #'player)
        (is (= 0 turn))
        (mixed n 1 1 #'player)
        (is (= 0 turn))))))

(defun produce-and-consume (carrier-count n-fibers n-threads)
  "Half of them put items in a queue, half take them out. Return the items that were taken."
  (let ((mutex (make-mutex)) (more (make-waitqueue)) (items '()) (taken '()))
    (mixed carrier-count n-fibers n-threads
           (lambda (i)
             (loop for k below 50
                   do (if (evenp i)
                          (with-mutex (mutex)
                            (push (+ (* 100 i) k) items)
                            (condition-notify more))
                          (with-mutex (mutex)
                            (loop until items do (condition-wait more mutex))
                            (push (pop items) taken)))
                      (yield-at-random))))
    (sort taken #'<)))

(test condition-producers-and-consumers
  (on-carriers (n)
    (flet ((expected (participants)
             (loop for i below participants by 2
                   append (loop for k below 50 collect (+ (* 100 i) k)))))
      (is (equal (expected 40) (produce-and-consume n 40 0)))
      (is (equal (expected 24) (produce-and-consume n 20 4))))))

;;; Prevents: a broadcast that leaves some asleep, of either kind.
(test condition-broadcast
  (on-carriers (n)
    (let ((mutex (make-mutex)) (queue (make-waitqueue)) (go nil) (waiting 0))
      (is (equal (make-list 55 :initial-element t)
                 (mixed n 51 4
                        (lambda (i)
                          (cond ((= i 0)
                                 (loop until (= 54 (with-mutex (mutex) waiting))
                                       do (thread-yield))
                                 (with-mutex (mutex)
                                   (setf go t)
                                   (condition-broadcast queue))
                                 t)
                                (t (with-mutex (mutex)
                                     (incf waiting)
                                     (loop until go do (condition-wait queue mutex))
                                     (holding-mutex-p mutex)))))))))))

(defmacro without-holding ((mutex) &body body)
  "Execute BODY with MUTEX, and release it if BODY has not."
  `(progn (grab-mutex ,mutex)
          (multiple-value-prog1 (progn ,@body)
            (when (holding-mutex-p ,mutex) (release-mutex ,mutex)))))

(test condition-timeout
  (is (equal '(nil :error)
             (in-fiber ()
               (let ((mutex (make-mutex)) (queue (make-waitqueue)))
                 (list (without-holding (mutex) (condition-wait queue mutex :timeout 1/100))
                       (handler-case (condition-wait queue mutex :timeout 1/100)
                         (error () :error))))))))

;;; Prevents: a time-out that swallows a notify which another waiter should have got.
(test condition-timeouts-and-notifies
  (on-carriers (n)
    (let ((mutex (make-mutex)) (queue (make-waitqueue)) (items 0) (patient 0))
      (mixed n 62 2
             (lambda (i)
               (case (mod i 3)
                 (0 (loop repeat 60
                          do (with-mutex (mutex)
                               (incf items)
                               (condition-notify queue))
                             (yield-at-random)))
                 (1 (loop repeat 30     ; gives up again and again, and passes on what it got
                          do (without-holding (mutex)
                               (when (condition-wait queue mutex :timeout (random 0.001))
                                 (condition-notify queue)))))
                 (2 (loop repeat 60
                          do (with-mutex (mutex)
                               (loop until (plusp items) do (condition-wait queue mutex))
                               (decf items)
                               (incf patient)))))))
      (is (= (* 60 21) patient))
      (is (= (* 60 (- (ceiling 64 3) 21)) items)))))

;;;; Semaphores

(test semaphore-hands-over-all
  (on-carriers (n)
    (let ((full (make-semaphore)) (free (make-semaphore :count 3))
          (inside 0) (most 0) (mutex (make-mutex)))
      (mixed n 40 4
             (lambda (i)
               (loop repeat 50
                     do (cond ((evenp i)
                               (wait-on-semaphore free)
                               (with-mutex (mutex) (setf most (max most (incf inside))))
                               (signal-semaphore full))
                              (t
                               (wait-on-semaphore full)
                               (with-mutex (mutex) (decf inside))
                               (signal-semaphore free))))))
      (is (= 0 inside))
      (is (<= most 3))
      (is (= 3 (semaphore-count free)))
      (is (= 0 (semaphore-count full))))))

(test semaphore-variants
  (is (equal '(nil nil t 0)
             (in-fiber ()
               (let ((semaphore (make-semaphore)))
                 (list (wait-on-semaphore semaphore :timeout 1/100)
                       (try-semaphore semaphore)
                       (progn (signal-semaphore semaphore 3)
                              (and (wait-on-semaphore semaphore :n 3 :timeout 10) t))
                       (semaphore-count semaphore))))))
  (is (eq :deadline (in-fiber ()
                      (handler-case (sb-sys:with-deadline (:seconds 1/100)
                                      (wait-on-semaphore (make-semaphore)))
                        (sb-sys:deadline-timeout () :deadline))))))

;;; Prevents: a wait of many for one SIGNAL with a large count that wakes too few.
(test semaphore-signal-many
  (on-carriers (n)
    (let ((semaphore (make-semaphore)))
      (is (equal (make-list 101 :initial-element t)
                 (mixed n 99 2 (lambda (i)
                                 (cond ((= i 50)
                                        (loop until (> (sb-thread::semaphore-waitcount semaphore)
                                                       50)
                                              do (thread-yield))
                                        (signal-semaphore semaphore 100))
                                       (t (wait-on-semaphore semaphore)))
                                 t)))))))

;;;; Joining

(test join-in-all-directions
  (on-carriers (n)
    (with-group (group n)
      (let* ((start (make-semaphore))
             (fiber (spawn (group) (wait-on-semaphore start) (values 1 2)))
             (joiner (spawn (group) (multiple-value-list (join fiber))))
             (thread-joiner (make-thread (lambda () (multiple-value-list (join-thread fiber)))))
             ;; the thread waits for a fiber, a fiber of that carrier for the thread
             (thread (make-thread (lambda () (join joiner))))
             (last (spawn (group) (join-thread thread :timeout *patience*))))
        (signal-semaphore start)
        (is (equal '(1 2) (join joiner)))
        (is (equal '(1 2) (join-thread thread-joiner :timeout *patience*)))
        (is (equal '(1 2) (join last)))))))

;;; Prevents: joiners that come while the fiber ends, and are told by nobody.
(test join-at-the-last-moment
  (on-carriers (n)
    (with-group (group n)
      (is (equal (loop for i below 300 collect i)
                 (join-all (loop for i below 300
                                 collect (let* ((i i)
                                                (fiber (spawn (group) (yield-at-random) i)))
                                           (spawn (group) (yield-at-random) (join fiber))))))))))

(test join-timeout
  (with-group (group 1)
    (let ((fiber (spawn (group) (fiber-park) 7)))
      (is (equal '(:no :timeout)
                 (multiple-value-list (fiber-join fiber :default :no :timeout 1/100))))
      (signals sb-thread:join-thread-error (fiber-join fiber :timeout 1/100))
      (is (eq :error (join (spawn (group)
                             (handler-case (fiber-join fiber :timeout 1/100)
                               (sb-thread:join-thread-error () :error))))))
      (fiber-unpark fiber)
      (is (= 7 (join fiber))))))

;;;; Where a fiber must not leave its carrier

;;; The owner is parked on the only carrier; the fiber that wants the lock blocks that carrier in
;;; the kernel. Prevents: a deadlock, since nobody would run the owner.
(defmacro wanted-where-no-fiber-parks (&body zone)
  "In the body, (WANT) takes a mutex that a parked fiber of the only carrier holds."
  `(let ((mutex (make-mutex)) (held nil) (wanted nil))
     (with-group (group 1)
       (flet ((want ()
                (setf wanted t)
                (with-mutex (mutex) :got-it)))
         (let ((owner (spawn (group)
                        (with-mutex (mutex)
                          (setf held t)
                          (loop until wanted do (fiber-yield))
                          (loop repeat 10 do (fiber-yield)))
                        :done))
               (other (spawn (group)
                        (loop until held do (fiber-yield))
                        (let ((result (list (progn ,@zone))))
                          (fiber-yield)
                          (car result)))))
           (is (equal '(:done :got-it) (join-all (list owner other)))))))))

(test lock-wanted-without-gcing
  (wanted-where-no-fiber-parks (sb-sys:without-gcing (want))))

(test lock-wanted-with-code-pinned
  (wanted-where-no-fiber-parks (sb-kernel::with-code-pages-pinned (:dynamic) (want))))

(test lock-wanted-without-interrupts
  (wanted-where-no-fiber-parks (sb-sys:without-interrupts (want))))

(test lock-wanted-in-a-pinned-fiber
  (wanted-where-no-fiber-parks (with-fiber-pinned (want))))

;;; In the handler of a trap there is a live signal context.
(test lock-wanted-in-a-handler
  (wanted-where-no-fiber-parks
    (handler-case
        (handler-bind ((type-error (lambda (condition)
                                     (declare (ignore condition))
                                     (want))))
          (car (eval '(identity 1))))
      (type-error () :got-it))))

(test lock-wanted-in-an-arena
  (let ((arena (sb-vm:new-arena (* 4 1024 1024))))
    (wanted-where-no-fiber-parks (sb-vm:with-arena (arena) (want)))))

(defvar *wanted-in-callback*)
(sb-alien:define-alien-callable want-in-callback sb-alien:int ((n sb-alien:int))
  (funcall *wanted-in-callback*)
  (1+ n))

(test lock-wanted-in-a-callback
  (wanted-where-no-fiber-parks
    (let ((*wanted-in-callback* #'want))
      (if (= 42 (sb-alien:alien-funcall (sb-alien:alien-callable-function 'want-in-callback) 41))
          :got-it
          :wrong))))

;;; Many at once: more carriers blocked than there are spares at first.
(test locks-wanted-in-many-no-park-zones
  (on-carriers (n)
    (let ((mutex (make-mutex)) (count 0))
      (in-fibers n 24 (lambda (i)
                        (loop repeat 10
                              do (if (evenp i)
                                     (with-mutex (mutex) (slow-increment count))
                                     (sb-kernel::with-code-pages-pinned (:dynamic)
                                       (with-mutex (mutex) (incf count)))))))
      (is (= 240 count)))))

;;;; Polling

;;; Prevents: WAIT-FOR that sleeps in the kernel while the fiber that it waits for is on the same
;;; carrier.
(test wait-for
  (on-carriers (n :counts '(1 2))
    (let ((flag nil))
      (is (equal '(:set t)
                 (in-fibers n 2 (lambda (i)
                                  (cond ((= i 0) (and (sb-ext:wait-for flag :timeout 30) :set))
                                        (t (sleep 1/50) (setf flag t)))))))))
  (is (eq nil (in-fiber () (sb-ext:wait-for nil :timeout 1/50)))))

(test fiber-wait-for
  (on-carriers (n)
    (let ((flag nil))
      (is (equal '(:set t)
                 (in-fibers n 2 (lambda (i)
                                  (cond ((= i 0) (fiber-wait-for (lambda () (and flag :set))))
                                        (t (fiber-yield) (setf flag t))))))))
    (is (eq nil (in-fiber (n) (fiber-wait-for (lambda () nil) :timeout 1/50))))))
