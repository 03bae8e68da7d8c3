;;;; Waits that are interrupted or left: no wake-up is lost, no lock stays taken

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* disturbances)

;;;; Interruptions

;;; Prevents: an interruption that ends the wait; one that the fiber that parks does not see.
(test interruptions-return-to-the-wait
  (on-carriers (n)
    (with-held-mutex (mutex group :holder holder :carrier-count n)
      (let* ((interrupted (make-semaphore))
             (end (make-semaphore))
             (fibers (list (spawn (group) (catch 'end (grab-mutex mutex)))
                           (spawn (group) (wait-on-semaphore end) :end)
                           (spawn (group) (catch 'end (join-thread holder))))))
        ;; Interruptions come before a fiber begins, too, and there the tag is not.
        (mapc #'wait-until-parked fibers)
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
  "Execute FORM, which waits for a semaphore with NOTIFICATION. Execute TAKEN if that has been
decremented, also when FORM is left by a non-local exit."
  `(let ((notification (sb-thread:make-semaphore-notification)))
     (sb-sys:without-interrupts
       (unwind-protect (sb-sys:with-local-interrupts ,form)
         (when (sb-thread:semaphore-notification-status notification) ,@taken)))))

;;; Prevents: a wake-up that goes to a fiber that leaves the wait, and wakes no other then. Each is
;;; sent once.
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

;;;; Time-outs, interruptions and exits at random

(defun lock-something (mutexes inside random)
  "Enter one of MUTEXES, perhaps with a time-out, perhaps not. False if it was not alone in there."
  (let ((i (random (length mutexes) random))
        (alone t))
    (flet ((critical-section ()
             (sb-sys:without-interrupts ; counting must not be interrupted, but only that
               (unwind-protect
                    (progn (unless (= 1 (incf (aref inside i))) (setf alone nil))
                           (sb-sys:with-local-interrupts
                             (when (= 0 (random 2 random)) (fiber-yield))))
                 (decf (aref inside i))))))
      (if (= 0 (random 2 random))
          (with-mutex ((aref mutexes i)) (critical-section))
          (with-mutex ((aref mutexes i) :timeout (random 0.0005 random)) (critical-section))))
    alone))

(defun wait-for-something (mutex queue semaphore random)
  (case (random 5 random)
    (0 (with-mutex (mutex) (condition-wait queue mutex :timeout (random 0.002 random))))
    (1 (with-mutex (mutex) (condition-notify queue)))
    (2 (wait-on-semaphore semaphore :timeout (random 0.002 random)))
    (3 (signal-semaphore semaphore))
    (4 (sleep (random 0.002 random)))))

(defun disturb (fibers stop)
  "Interrupt FIBERS at random, and make some leave what they do."
  (loop until (car stop)
        do (handler-case
               (interrupt-fiber (nth (random (length fibers)) fibers)
                                (if (= 0 (random 2))
                                    (lambda () (ignore-errors (throw 'disturbed nil)))
                                    #'thread-yield))
             (sb-thread:interrupt-thread-error ()))
           (sleep 1/5000)))

;;; Time-outs, wake-ups, interruptions and exits that meet. Prevents: each of them lost because of
;;; another.
(test everything-at-once
  (on-carriers (n)
    (let ((mutexes (coerce (loop repeat 5 collect (make-mutex)) 'vector))
          (inside (make-array 5 :initial-element 0))
          (queue (make-waitqueue)) (semaphore (make-semaphore)) (stop (list nil)))
      (with-group (group n)
        (let* ((fibers (loop for i below 40
                             collect (let ((random (sb-ext:seed-random-state i)))
                                       (spawn (group)
                                         (loop repeat 40
                                               always (block nil
                                                        (catch 'disturbed
                                                          (return
                                                            (if (= 0 (random 2 random))
                                                                (lock-something mutexes inside
                                                                                random)
                                                                (progn (wait-for-something
                                                                        (aref mutexes 0) queue
                                                                        semaphore random)
                                                                       t))))
                                                        t))))))
               (disturber (make-thread #'disturb :arguments (list fibers stop))))
          (unwind-protect (is (equal (make-list 40 :initial-element t) (join-all fibers)))
            (setf (car stop) t)
            (join-thread disturber))))
      (is (every #'zerop inside))
      (is (every (lambda (mutex) (null (mutex-owner mutex))) mutexes)))))

;;;; Victims, and others that must not notice

;;; Victims take and wait in all ways, with time-outs and deadlines, while they are interrupted,
;;; thrown out and terminated. Others do the same work in peace, and must not notice. (Threads among
;;; the victims are not interrupted: SBCL 2.6.4 without fibers loses interruptions of threads that
;;; run into deadlines.)

(defstruct storm
  (mutex (make-mutex)) (queue (make-waitqueue)) (semaphore (make-semaphore))
  (count 0) (items 0) (over nil)
  (tally 0 :type sb-ext:word))          ; increments of COUNT

(defun count-in-storm (storm)
  ;; In one piece, whichever fiber is ended.
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
  "A fiber that waits with a time-out may have been notified, and too late for the mutex."
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
