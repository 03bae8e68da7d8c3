;;;; Fibers that do all that a fiber may do, in compositions chosen at random, and threads that
;;;; interrupt and end them

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(load (merge-pathnames "descriptors.lisp" *load-truename*))
(require :sb-concurrency)

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "collecting.lisp" *load-truename*))

;;;; What the fibers of a round share

(defstruct (world (:constructor make-world ()))
  (problems (make-flag) :read-only t)
  (mutexes (coerce (loop repeat 5 collect (make-mutex)) 'vector) :read-only t)
  (owners (make-array 5 :initial-element nil) :read-only t)
  (permits (make-semaphore :count 3) :read-only t)
  (queue (make-waitqueue) :read-only t)
  (queue-mutex (make-mutex) :read-only t)
  (mailbox (sb-concurrency:make-mailbox) :read-only t)
  (table (make-hash-table :synchronized t) :read-only t))

(defvar *world*)
(defvar *names* (make-flag))

(defun expect (what true)
  (unless true (note (world-problems *world*) what)))

(defun short-time () (+ 0.00001 (random 0.01)))

;;;; What they do, each around something else

(defvar *actions* '())

(defmacro define-action (name (inner) &body body)
  "Define a thing to do, in the course of which INNER is called, or not."
  `(progn (defun ,name (,inner)
            (declare (function ,inner) (ignorable ,inner))
            ,@body)
          (pushnew ',name *actions*)))

(defun do-something (depth)
  "Do something at random, around something else, DEPTH times."
  (let ((*variable* (list depth)))
    (let ((fiber sb-thread:*current-thread*) (value *variable*))
      (funcall (nth (random (length *actions*)) *actions*)
               (if (= depth 0)
                   #'pause
                   (lambda () (do-something (1- depth)))))
      (expect :binding (eq value *variable*))
      (expect :current (eq fiber sb-thread:*current-thread*)))))

;;; As in a thread, a descriptor is lost if its maker is unwound between the system call and the
;;; finalizer, and closed twice if its closer is. Both may be by a deadline, too: they take locks.
(defmacro undisturbed (&body body)
  "Execute BODY, which neither interruptions nor a deadline unwind."
  `(sb-sys:without-interrupts
     (sb-sys:with-deadline (:seconds nil :override t)
       ,@body)))

(defmacro with-whole-cleanup (body &body cleanup)
  `(sb-sys:without-interrupts
     (unwind-protect (sb-sys:with-local-interrupts ,body)
       (undisturbed ,@cleanup))))

(define-action allocate (inner)
  (let ((data (loop for i below (random 2000) collect i)))
    (funcall inner)
    (expect :data (loop for i from 0 for j in data always (= i j)))))

(define-action bind-at-run-time (inner)
  (let ((base (+ 2 (random 30))))
    (progv '(*print-base* *read-base*) (list base 10)
      (funcall inner)
      (expect :progv (= base *print-base*)))))

(defun call-at-depth (depth function)
  (declare (function function))
  (let ((data (list depth depth)))
    (declare (dynamic-extent data))
    (if (= depth 0)
        (funcall function)
        (call-at-depth (1- depth) function))
    (expect :stack (and (eql depth (first data)) (eql depth (second data))))))

(define-action recurse (inner)
  (call-at-depth (random 60) inner))

(defun recurse-for-ever (n)
  (1+ (the fixnum (recurse-for-ever (opaque n)))))

(define-action exhaust-the-stack (inner)
  (expect :exhausted (handler-case (recurse-for-ever 0)
                       (storage-condition () t)))
  (funcall inner))

(define-action throw-out (inner)
  (expect :thrown (eq :thrown (catch 'out
                                (unwind-protect (progn (funcall inner) (throw 'out :thrown))
                                  (fiber-yield))))))

(define-action handle-a-trap (inner)
  (expect :trap (handler-case (handler-bind ((error (lambda (condition)
                                                      (declare (ignore condition))
                                                      (funcall inner))))
                                (car (opaque 1)))
                  (type-error () t))))

(define-action divide-by-zero (inner)
  (expect :float (handler-case (progn (/ 1d0 (opaque 0d0)) nil)
                   (division-by-zero () (funcall inner) t))))

;;; One at a time: a fiber that holds two may wait for one that holds the other.
(define-action lock (inner)
  (let ((i (random 5)) (mutexes (world-mutexes *world*)) (owners (world-owners *world*))
        (fiber sb-thread:*current-thread*))
    (unless (some #'holding-mutex-p mutexes)
      (with-mutex ((aref mutexes i) :timeout (if (= 0 (random 2)) (short-time)))
        (expect :excluded (null (aref owners i)))
        (unwind-protect (progn (setf (aref owners i) fiber)
                               (funcall inner)
                               (expect :owner (eq fiber (aref owners i))))
          (setf (aref owners i) nil))))))

(define-action take-a-permit (inner)
  (let ((permits (world-permits *world*)) (taken nil))
    (with-whole-cleanup
        (when (sb-sys:without-interrupts
                (sb-sys:allow-with-interrupts
                  (setf taken (wait-on-semaphore permits :timeout (short-time)))))
          (funcall inner))
      (when taken (signal-semaphore permits)))))

(define-action wait-in-a-queue (inner)
  (let ((mutex (world-queue-mutex *world*)))
    (unless (holding-mutex-p mutex)
      (with-mutex (mutex)
        (condition-wait (world-queue *world*) mutex :timeout (short-time))))))

(define-action notify-a-queue (inner)
  (let ((mutex (world-queue-mutex *world*)))
    (unless (holding-mutex-p mutex)
      (with-mutex (mutex) (condition-notify (world-queue *world*))))))

(define-action send (inner)
  (sb-concurrency:send-message (world-mailbox *world*) inner))

(define-action receive (inner)
  (sb-concurrency:receive-message (world-mailbox *world*) :timeout (short-time)))

(define-action use-a-table (inner)
  (let ((table (world-table *world*)))
    (setf (gethash (random 100) table) (format nil "~D" (random 100)))
    (expect :table (typep (gethash (random 100) table) '(or null string)))))

(define-action have-a-timeout (inner)
  (handler-case (sb-ext:with-timeout (+ 0.0005 (short-time))
                  (funcall inner)
                  (sleep (* 2 (short-time))))
    (sb-ext:timeout ())))

(define-action have-a-deadline (inner)
  (handler-case (sb-sys:with-deadline (:seconds (short-time))
                  (lock inner))
    (sb-sys:deadline-timeout ())))

(define-action be-interrupted-by-a-timer (inner)
  (let ((timer (sb-ext:make-timer #'fiber-yield :thread sb-thread:*current-thread*)))
    (sb-ext:schedule-timer timer (short-time) :repeat-interval (if (= 0 (random 2)) 1/1000))
    (unwind-protect (progn (funcall inner) (sleep (short-time)))
      (sb-ext:unschedule-timer timer))))

(define-action stay-on-the-carrier (inner)
  (with-fiber-pinned
    (let ((carrier sb-fiber::*carrier*))
      (funcall inner)
      (expect :carrier (eq carrier sb-fiber::*carrier*)))))

(define-action hold-interruptions-off (inner)
  (sb-sys:without-interrupts
    (sb-sys:allow-with-interrupts
      (sb-sys:with-interrupts (funcall inner)))))

(define-action have-it-called (inner)
  (let ((n (random 1000)))
    (expect :called (eql n (call-blocking (lambda ()
                                            (when (= 0 (random 10)) (sleep 1/500))
                                            n))))))

(define-action write-to-a-pipe (inner)
  (let ((line (format nil "~36R" (random 1000000))) (input nil) (output nil))
    (with-whole-cleanup
        (progn
          (undisturbed
            (multiple-value-bind (in out) (sb-posix:pipe)
              (setf input (sb-sys:make-fd-stream in :input t :buffering :full)
                    output (sb-sys:make-fd-stream out :output t :buffering :full))))
          (let ((writer (submit-fiber (sb-fiber::fiber-group sb-thread:*current-thread*)
                                      (make-fiber (lambda ()
                                                    (ignore-errors (write-line line output)
                                                                   (finish-output output)))))))
            ;; It may have been ended before it began.
            (let ((got (handler-case (sb-ext:with-timeout 1 (read-line input nil))
                         (sb-ext:timeout ()))))
              (expect (list :pipe line got) (or (null got) (string= line got))))
            (fiber-join writer :default nil)))
      (when input (close input :abort t))
      (when output (close output :abort t)))))

(define-action connect (inner)
  (let ((line (format nil "~36R" (random 1000000)))
        (name (temporary-path "mixture-~D" (count-one *names*)))
        (sockets '()))
    (flet ((new (function &rest arguments)
             (undisturbed (first (push (apply function arguments) sockets)))))
      (with-whole-cleanup
          (let ((listener (new #'make-instance 'local-socket :type :stream))
                (a (new #'make-instance 'local-socket :type :stream)))
            (socket-bind listener name)
            (socket-listen listener 1)
            (socket-connect a name)
            (let* ((b (new #'socket-accept listener))
                   (output (socket-make-stream a :output t :buffering :full))
                   (input (socket-make-stream b :input t :buffering :full :timeout 1/200)))
              (write-line line output)
              (finish-output output)
              (expect :socket (handler-case (string= line (read-line input))
                                (sb-sys:io-timeout () t)))
              (funcall inner)
              (expect :timeout (handler-case (read-line input)
                                 (sb-sys:io-timeout () t)))))
        (dolist (socket sockets) (socket-close socket :abort t))
        (when (probe-file name) (delete-file name))))))

;;;; Threads that disturb

(defun disturb-one (fiber)
  (ecase (random 6)
    (0 (terminate-fiber fiber))
    (1 (interrupt-fiber fiber (lambda () (sleep 1/1000))))
    (2 (interrupt-fiber fiber #'fiber-yield))
    (3 (interrupt-fiber fiber (lambda () (opaque (make-list 10000)))))
    (4 (fiber-unpark fiber))
    (5 (sb-thread:symbol-value-in-thread '*variable* fiber nil))))

(defun disturb (stop)
  (loop until (flag-value stop)
        do (let ((fibers (list-all-fibers)))
             (when fibers
               ;; It may have ended.
               (handler-case (disturb-one (nth (random (length fibers)) fibers))
                 (sb-thread:interrupt-thread-error ())))
             (when (= 0 (random 40)) (sb-ext:gc :gen (random 3)))
             (sleep (random 0.003)))))

(defun make-random-fiber (world seed)
  (make-fiber (lambda ()
                (let ((*random-state* (sb-ext:seed-random-state seed)) (*world* world))
                  (loop repeat (1+ (random 20)) do (do-something (random 4)))))))

(defun submit-random-fibers (group world n)
  "Submit N fibers, but not while a hundred are alive. Return them."
  (loop repeat n
        collect (submit-fiber group (make-random-fiber world (random 1000000)))
        do (wait-until (< (sb-fiber::fiber-group-alive group) 100))))

(defun failure-of (fiber)
  "The error that ended FIBER, or NIL: it returned, or was terminated."
  (handler-case (progn (fiber-join fiber :timeout *patience*) nil)
    (fiber-failed (condition) (fiber-failed-cause condition))
    (sb-thread:join-thread-error () (and (fiber-alive-p fiber) :alive))))

(defun check-world (world)
  "Check that nothing went wrong in WORLD, and that fibers have left it as it was."
  (is (null (flag-notes (world-problems world))))
  (is (every #'null (world-owners world)))
  (is (every (lambda (mutex) (null (mutex-owner mutex))) (world-mutexes world)))
  (is (= 3 (semaphore-count (world-permits world)))))

(defun check-random-fibers (group n)
  "Check that N random fibers of GROUP, which a thread disturbs, do no harm."
  (let ((world (make-world)) (stop (make-flag)))
    (let ((disturber (make-thread #'disturb :arguments (list stop))))
      (unwind-protect
           (let ((fibers (submit-random-fibers group world n)))
             (is (null (remove nil (mapcar #'failure-of fibers)))))
        (raise-flag stop)
        (join-thread disturber)))
    (check-world world)))
