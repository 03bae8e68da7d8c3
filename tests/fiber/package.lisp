;;;; The package of the fiber tests, and what several suites need

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

;;;; The suites
;;;;
;;;; Most test one room of src/code/fiber/, and have its name (see the table in the head of
;;;; fiber.lisp): spinlock, run-queue, injector, deadlines, stack, poller (with the waiter map),
;;;; population, search, carrier, handoff, zone, interrupt, yield, retry, parking, mutex, io,
;;;; select, socket, reason, overflow, life (with the api), group, inspect (with describe), debug,
;;;; exit, pool, monitor, process, timer, scope (with cancel), parallel, processors. Those of the
;;;; rooms without a scheduler make none.
;;;;
;;;; The others go across the rooms:
;;;;   fairness        parking, unparking and submitting, so that every fiber runs
;;;;   sleep           all ways to wait for time
;;;;   locks           condition variables, semaphores, joining, and locks in zones
;;;;   waits           how waits end that are not simply woken, or do not begin
;;;;   deadlock        deadlocks, and waiters by the thousand
;;;;   disturbances    waits that are interrupted or left
;;;;   concurrency     what is made of mutexes: SB-CONCURRENCY, tables, locks of the system
;;;;   channel         channels of SB-CONCURRENCY; operation, what chooses among them; promise
;;;;   closing         descriptors that are closed while fibers wait for them
;;;;   reuse           descriptors that are closed while a fiber uses them
;;;;   errors          errors that nothing handles, bad arguments, no memory
;;;;   identity        that a fiber is a thread to all that ask
;;;;   switch          what a fiber finds again after it was parked
;;;;   unwinding       transfer of control past waits
;;;;   signals         signals, and handlers that park
;;;;   foreign         foreign code that holds a lock; callbacks
;;;;   gc              the collector and the stacks of fibers
;;;;   mappings        as many mappings of memory as the kernel allows
;;;;   migration       forced migration itself
;;;;   mixture         all of this in random compositions
;;;;   interleaving-*  all orders of the steps of a few threads, see support/explore.lisp;
;;;;                   interleaving tests the explorer
;;;;   http-*          sb-fiber-http
;;;;   hunchentoot     sb-fiber-hunchentoot, its taskmaster; hunchentoot-acceptor, its acceptors
;;;;   ssl             sb-fiber-ssl
;;;;   build           what a build promises about itself, and an installation
;;;;   docstrings      what is documented, in the image and in the manual
;;;;   manual          the examples of the manual and of README
;;;;   examples        the programs in examples/

(defpackage "SB-FIBER-TESTS"
  (:shadow "SPAWN")                     ; the tests have one of their own
  (:use "COMMON-LISP" "FIVEAM"
        ;; A plain build has no such package: every suite says so itself.
        . #.(when (find-package "SB-FIBER") '("SB-FIBER"))))

(in-package "SB-FIBER-TESTS")

#+sb-fiber
(import '(sb-thread:make-mutex sb-thread:with-mutex sb-thread:grab-mutex sb-thread:release-mutex
          sb-thread:mutex-owner sb-thread:holding-mutex-p sb-thread:with-recursive-lock
          sb-thread:make-waitqueue sb-thread:condition-wait sb-thread:condition-notify
          sb-thread:condition-broadcast sb-thread:make-semaphore sb-thread:signal-semaphore
          sb-thread:wait-on-semaphore sb-thread:try-semaphore sb-thread:semaphore-count
          sb-thread:make-thread sb-thread:join-thread sb-thread:thread-yield))

;;;; Groups that cannot hang a suite: what has not ended after *PATIENCE* is reported as an error.
;;;; Only a bug makes a test wait that long.

#+sb-fiber
(progn
(defparameter *patience* 60)

(define-condition fibers-hang (error)
  ((report :initarg :report :reader fibers-hang-report))
  (:report (lambda (condition stream)
             (format stream "These fibers do not end:~{~%  ~S~}" (fibers-hang-report condition)))))

(defun describe-fibers ()
  (loop for fiber in (list-all-fibers)
        repeat 20
        collect (list* fiber (multiple-value-list (fiber-state fiber)))))

(defun migration-wanted-p ()
  "Is the environment such that START-FIBERS forces migration?"
  (equal (sb-ext:posix-getenv "SB_FIBER_FORCE_MIGRATION") "1"))

;;; All suites pass with pollers of both kinds, and with time slices.
(when (equal (sb-ext:posix-getenv "SB_FIBER_POLLER") "persistent")
  (setf sb-fiber::*default-poller* :persistent))
(let ((milliseconds (sb-ext:posix-getenv "SB_FIBER_TIME_SLICE")))
  (unless (member milliseconds '(nil "") :test #'equal)
    (setf sb-fiber::*default-time-slice* (/ (parse-integer milliseconds) 1000))))

(defun call-with-group (function carrier-count)
  ;; From one carrier there is nowhere to go.
  (let ((group (start-fibers nil :carrier-count (if (migration-wanted-p)
                                                    (max 2 carrier-count)
                                                    carrier-count)))
        (ok nil))
    (unwind-protect (multiple-value-prog1 (funcall function group)
                      (setf ok t))
      (unless (finish-fibers group :timeout (if ok *patience* 1))
        (let ((report (describe-fibers)))
          (finish-fibers group :timeout 5 :abort t)
          (when ok
            (error 'fibers-hang :report report)))))))

(defmacro with-group ((group &optional (carrier-count 2)) &body body)
  "Execute BODY with GROUP bound to a running group, and wait until its fibers have ended."
  `(call-with-group (lambda (,group) (declare (ignorable ,group)) ,@body) ,carrier-count))

(defmacro with-stuck-carrier-time ((seconds) &body body)
  "Execute BODY with another value of *STUCK-CARRIER-TIME*, NIL if no carrier is to be replaced by
another."
  (let ((old (gensym)))
    `(let ((,old *stuck-carrier-time*))
       (unwind-protect (progn (setf *stuck-carrier-time* ,seconds) ,@body)
         (setf *stuck-carrier-time* ,old)))))

(defmacro with-group-of-same-carriers ((group carrier-count) &body body)
  "WITH-GROUP for a group whose carriers are not replaced: spares end, and BODY deals with their
threads."
  `(with-stuck-carrier-time (nil)
     (with-group (,group ,carrier-count) ,@body)))

(defmacro spawn ((group &rest arguments) &body body)
  "Submit a fiber that executes BODY. ARGUMENTS are those of MAKE-FIBER."
  `(submit-fiber ,group (make-fiber (lambda () ,@body) ,@arguments)))

(defun join (fiber)
  "Join FIBER, and signal an error instead of waiting for ever."
  (fiber-join fiber :timeout *patience*))

(defun join-all (fibers)
  (mapcar (lambda (fiber) (values (join fiber))) fibers))

(defmacro in-fiber ((&optional (carrier-count 1) &rest arguments) &body body)
  "The values of BODY, executed in a fiber."
  `(with-group (group ,carrier-count)
     (join (spawn (group ,@arguments) ,@body))))

(defun in-fibers (carrier-count n function)
  "Call FUNCTION with 0..N-1 in a fiber each; return a list of the results."
  (with-group (group carrier-count)
    (join-all (loop for i below n
                    collect (let ((i i)) (spawn (group) (funcall function i)))))))

(define-condition expected-error (error) ()
  (:report "an error that the test expects"))

(defun call-with-error-output (function stream)
  "Call FUNCTION while STREAM is the global *ERROR-OUTPUT*, the one that fibers and threads have."
  (let ((old (sb-ext:symbol-global-value '*error-output*)))
    (unwind-protect
         (progn (setf (sb-ext:symbol-global-value '*error-output*) stream)
                (funcall function))
      (setf (sb-ext:symbol-global-value '*error-output*) old))))

(defmacro quietly (&body body)
  "Execute BODY, in which fibers are to fail, without the reports of it."
  `(call-with-error-output (lambda () ,@body) (make-broadcast-stream)))

(defun call-in-child (arguments &key input environment (wrapper nil) heap)
  "Run this Lisp with ARGUMENTS in a process of its own, whose dynamic space has the size HEAP;
return exit code and output, errors included. WRAPPER is the start of a command line that the Lisp
is appended to."
  (let* ((command (append wrapper
                          (list (sb-ext:native-namestring sb-ext:*runtime-pathname*) "--core"
                                (sb-ext:native-namestring sb-ext:*core-pathname*)
                                "--noinform" "--disable-ldb")
                          (and heap (list "--dynamic-space-size" heap))
                          '("--no-sysinit" "--no-userinit" "--disable-debugger")
                          arguments))
         (process nil)
         (output (with-output-to-string (out)
                   (with-input-from-string (in (or input ""))
                     (setf process (sb-ext:run-program
                                    (first command) (rest command)
                                    :search t :input in :output out :error :output
                                    :environment (append environment (sb-ext:posix-environ))))))))
    (values (sb-ext:process-exit-code process) output)))

;;; A child knows nothing of these tests.
(defparameter *child-package*
  "(defpackage \"SB-FIBER-TESTS\" (:use \"COMMON-LISP\" \"SB-FIBER\"))")

(defun printed (form)
  "FORM as text that can be read in any package."
  (with-standard-io-syntax
    (let ((*package* (find-package "KEYWORD")))
      (prin1-to-string form))))

(defun child-result (form &rest arguments)
  "What a child prints, as it evaluates FORM and quits, after the last newline but one; or all if it
failed."
  (multiple-value-bind (code output)
      (apply #'call-in-child (list* "--eval" *child-package* "--eval" (printed form) '("--quit"))
             arguments)
    (if (= code 0)
        (string-trim '(#\Newline #\Space) output)
        (format nil "exit code ~D~%~A" code output))))

(defmacro on-carriers ((carrier-count &key (counts ''(1 2 16)) (migration ''(nil t)))
                       &body body)
  "Execute BODY with each number of carriers, and again such that each fiber is resumed by another
carrier than before; only so, if the environment wants it."
  `(call-on-carriers (lambda (,carrier-count) ,@body) ,counts ,migration))

(defun call-on-carriers (function counts migration)
  (unwind-protect
       (dolist (migration (if (migration-wanted-p) (remove nil migration) migration))
         (setf sb-fiber::*force-migration* migration)
         (dolist (count (if migration (remove 1 counts) counts))
           (funcall function count)))
    (setf sb-fiber::*force-migration* nil)))

;;;; Waiting for what others do

(defmacro wait-until (condition)
  "Wait until CONDITION is true; return false if that takes too long."
  `(sb-ext:wait-for ,condition :timeout *patience*))

(defun wait-until-parked (fiber)
  (wait-until (eq :parked (fiber-state fiber)))
  fiber)

(defmacro parked-fibers (group &body forms)
  "A list of parked fibers, each of which has executed one of FORMS, with a cleanup that counts in
CLEANED."
  `(mapcar #'wait-until-parked
           (list ,@(loop for form in forms
                         collect `(spawn (,group)
                                    (unwind-protect ,form
                                      (fiber-yield)
                                      (sb-ext:atomic-incf (car cleaned))))))))

(defun all-ways-to-park (group cleaned)
  "A list of fibers of GROUP, parked in each of these ways, that count in CLEANED when they are
ended; and a fiber that one of them waits for."
  (let ((mutex (sb-thread:make-mutex)) (queue (sb-thread:make-waitqueue))
        (semaphore (sb-thread:make-semaphore)) (held (sb-thread:make-mutex))
        (other (spawn (group) (fiber-park))))
    (sb-thread:grab-mutex held)
    (values
     (parked-fibers group
       (fiber-park)
       (fiber-park :timeout 3600)
       (sleep 3600)
       (sleep 1e6)
       (sleep 3601/2)
       (fiber-wait-for (constantly nil))
       (sb-thread:with-mutex (held))
       (sb-thread:grab-mutex held :timeout 3600)
       ;; It may return for nothing, as when two begin to wait at a time.
       (sb-thread:with-mutex (mutex) (loop (sb-thread:condition-wait queue mutex)))
       (sb-thread:with-mutex (mutex) (loop (sb-thread:condition-wait queue mutex :timeout 3600)))
       (sb-thread:wait-on-semaphore semaphore)
       ;; OTHER may be ended before: the error would unwind this fiber, and its end come in a
       ;; cleanup form.
       (progn (fiber-join other :default nil) (fiber-park))
       (with-fiber-pinned (fiber-park))
       (handler-bind ((error (lambda (condition) (declare (ignore condition)) (fiber-park))))
         (car (eval 1)))
       (sb-ext:with-timeout 3600 (sleep 3600))
       (sb-sys:with-deadline (:seconds 3600) (fiber-park)))
     other)))

(defun wait-for-end (fiber)
  "How FIBER ended: :ABORT, or NIL if it returned."
  (nth-value 1 (fiber-join fiber :default nil :timeout *patience*)))

(defun all-true-p (results)
  (every (lambda (result) (eq result t)) results))

;;; A cell that is shared, not a variable: the compiler knows that nobody else writes that.
(defstruct (flag (:constructor make-flag ()))
  (value nil) (count 0 :type sb-ext:word) (notes '() :type list))
(defun raise-flag (flag) (setf (flag-value flag) t))
(defun count-one (flag) (sb-ext:atomic-incf (flag-count flag)))
(defun note (flag value) (sb-ext:atomic-push value (flag-notes flag)))

(defun compute-until (flag)
  "Compute, without ever parking, until FLAG is raised."
  (loop until (flag-value flag) do (sb-ext:spin-loop-hint)))

(defmacro computing-fiber ((group started) &body body)
  "A fiber that raises STARTED and then executes BODY, after STARTED was seen to be raised."
  `(prog1 (spawn (,group) (raise-flag ,started) ,@body)
     (wait-until (flag-value ,started))))

(defun pollers-in-use ()
  (count-if-not #'null sb-fiber::*pollers*))

;;; Nothing parks here: where migration is forced, a fiber that waited for a lock might be left to a
;;; carrier that computes.
(defun busy-carriers (group n)
  "The threads of the N carriers of GROUP, when each of them has run a fiber."
  (let ((threads (list '())) (go (make-flag)))
    (join-all (loop repeat n
                    collect (spawn (group)
                              (sb-ext:atomic-push (sb-fiber::carrier-thread sb-fiber::*carrier*)
                                                  (car threads))
                              (when (= n (length (car threads))) (raise-flag go))
                              (compute-until go))))
    (car threads)))

;;; Call ARRIVE before FUNCTION, a symbol, whenever that is called in BODY.
(defmacro with-call-before ((function arrive) &body body)
  `(progn
     (sb-int:encapsulate ,function 'test (lambda (f &rest arguments)
                                           (apply ,arrive arguments)
                                           (apply f arguments)))
     (unwind-protect (progn ,@body)
       (sb-int:unencapsulate ,function 'test))))

(defun bytes-of (field)
  "What FIELD, a string such as VmRSS:, of the process's status tells, in bytes."
  (with-open-file (in "/proc/self/status")
    (loop for line = (read-line in)
          when (eql 0 (search field line))
            return (* 1024 (parse-integer line :start (length field) :junk-allowed t)))))

(defmacro with-cached-stack-bytes ((bytes) &body body)
  `(let ((usual *cached-stack-bytes*))
     (setf *cached-stack-bytes* ,bytes)
     (unwind-protect (progn ,@body)
       (setf *cached-stack-bytes* usual))))

(defun heap-count (group)
  (loop for scheduler across (sb-fiber::fiber-group-schedulers group)
        sum (sb-fiber::deadline-heap-count (sb-fiber::scheduler-deadlines scheduler))))

;;;; What a switch could spoil

(defvar *variable* :global)
(defvar *unbound*)

;;; Something that the compiler cannot see through.
(declaim (notinline opaque))
(defun opaque (x) x)

(defun pause ()
  "Let others run; sometimes by sleeping, so that it is a timer that ends the parking."
  (if (= (random 20) 0)
      (sleep (opaque 1/10000))
      (fiber-yield)))

;;;; Fibers and threads at the same time

(defun mixed (carrier-count n-fibers n-threads function)
  "Call FUNCTION with 0, 1, ... in fibers and in threads at the same time; return the results."
  (with-group (group carrier-count)
    (let ((fibers (loop for i below n-fibers
                        collect (let ((i i)) (spawn (group) (funcall function i)))))
          (threads (loop for i from n-fibers repeat n-threads
                         collect (make-thread function :arguments i))))
      (append (join-all fibers)
              (mapcar (lambda (thread) (join-thread thread :timeout *patience*)) threads)))))

(defun yield-at-random ()
  (when (= (random 3) 0) (thread-yield)))

;;; What a lock protects: two increments at once are seen as a lost one.
(defmacro slow-increment (place)
  `(let ((old ,place))
     (yield-at-random)
     (setf ,place (1+ old))))

;;; Another fiber or thread, which holds a mutex until the body of the test has been executed.
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
        sum (sb-fiber::bucket-queues bucket) into queues
        finally (return (list waiters native claims queues))))

(defmacro nobody-left (&body body)
  "Check that BODY leaves nothing in the parking lot that was not there."
  `(let ((before (counted-waiters)))
     (multiple-value-prog1 (progn ,@body)
       (is (equal before (counted-waiters))))))
)
