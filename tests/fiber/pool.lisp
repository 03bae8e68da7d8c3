;;;; Tests of the pool that makes blocking calls: outcomes, unwinding, and how many threads it has

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(require :sb-bsd-sockets)
(handler-bind ((warning #'muffle-warning))
  (let ((*standard-output* (make-broadcast-stream)))
    (asdf:load-system "usocket")))

(load (merge-pathnames "support/files.lisp" *load-truename*))
(load (merge-pathnames "support/stack-ends.lisp" *load-truename*))

(def-suite* pool)

(defun pool-threads ()
  (length (sb-fiber::blocking-pool-threads sb-fiber::*blocking-pool*)))

(defun call-with-pool (function limit)
  "Call FUNCTION while there is a fresh pool of LIMIT threads; then check that it has lost none of
them."
  (let ((old-limit *blocking-thread-limit*)
        (pool sb-fiber::*blocking-pool*))
    (sb-fiber::dismiss-idle-threads)
    (setf sb-fiber::*blocking-pool* (sb-fiber::make-blocking-pool)
          *blocking-thread-limit* limit)
    (unwind-protect (funcall function)
      (let ((used sb-fiber::*blocking-pool*))
        (is-true (wait-until (and (= 0 (sb-fiber::blocking-pool-waiting used))
                                  (= (sb-fiber::blocking-pool-idle used)
                                     (length (sb-fiber::blocking-pool-threads used)))))
            "~D of ~D threads are idle, ~D calls are waiting." (sb-fiber::blocking-pool-idle used)
            (length (sb-fiber::blocking-pool-threads used)) (sb-fiber::blocking-pool-waiting used))
        (is (<= (length (sb-fiber::blocking-pool-threads used)) limit))
        (sb-fiber::dismiss-idle-threads))
      (setf sb-fiber::*blocking-pool* pool
            *blocking-thread-limit* old-limit))))

(defmacro with-pool ((&optional (limit 8)) &body body)
  `(call-with-pool (lambda () ,@body) ,limit))

;;;; outcomes

(test values-are-brought-back
  (with-pool ()
    (on-carriers (n)
      (is (equal '(1 2 3)
                 (in-fiber (n) (multiple-value-list (call-blocking (lambda () (values 1 2 3)))))))
      (is (equal '() (in-fiber (n) (multiple-value-list (call-blocking #'values)))))
      (is (equal '(nil) (in-fiber (n) (multiple-value-list (call-blocking 'list))))))))

(test called-in-another-thread
  (with-pool ()
    (is (equal '(t nil t)
               (in-fiber ()
                 (let ((fiber sb-thread:*current-thread*))
                   (list (not (eq fiber (call-blocking (lambda () sb-thread:*current-thread*))))
                         (call-blocking #'current-fiber)
                         (eq fiber sb-thread:*current-thread*))))))))

(test in-a-thread-it-is-just-a-call
  (with-pool ()
    (is (eq sb-thread:*current-thread* (call-blocking (lambda () sb-thread:*current-thread*))))
    (is (= 0 (pool-threads)))
    ;; nor where the fiber must not be left
    (is (eq t (in-fiber ()
                (let ((fiber sb-thread:*current-thread*))
                  (sb-sys:without-gcing
                    (eq fiber (call-blocking (lambda () sb-thread:*current-thread*))))))))
    ;; nor in a thread of the pool
    (is (eq t (in-fiber ()
                (call-blocking (lambda ()
                                 (let ((thread sb-thread:*current-thread*))
                                   (eq thread
                                       (call-blocking (lambda ()
                                                        sb-thread:*current-thread*)))))))))))

(defvar *seen-by-calls* :global)

(test calls-see-global-values
  (with-pool ()
    (is (equal '(:global :fiber)
               (in-fiber ()
                 (let ((*seen-by-calls* :fiber))
                   (list (call-blocking (lambda () *seen-by-calls*)) *seen-by-calls*)))))))

(test not-a-function
  (signals type-error (call-blocking 17))
  (signals undefined-function (call-blocking 'no-function-has-this-name)))

(test errors-are-the-same-objects
  (with-pool ()
    (on-carriers (n)
      (let ((condition (make-condition 'simple-error :format-control "no")))
        (is (eq condition
                (in-fiber (n)
                  (handler-case (call-blocking (lambda () (error condition)))
                    (error (c) c)))))))))

(test handlers-in-the-call-come-first
  (with-pool ()
    (is (equal '(:inner :unhandled-signal)
               (in-fiber ()
                 (handler-case
                     (list (call-blocking (lambda () (handler-case (error "no")
                                                       (error () :inner))))
                           ;; SIGNAL returns if nobody handles it
                           (call-blocking (lambda ()
                                            (signal 'simple-error :format-control "no")
                                            :unhandled-signal)))
                   (error () :outer)))))))

(test cleanup-forms-of-a-failed-call-run
  (with-pool ()
    (let ((cleaned nil))
      (is (eq :failed (in-fiber ()
                        (handler-case
                            (call-blocking (lambda () (unwind-protect (error "no")
                                                        (setf cleaned t))))
                          (error () :failed)))))
      (is (eq t cleaned)))))

(test a-trap-in-the-call
  (with-pool ()
    (is (typep (in-fiber ()
                 (handler-case (call-blocking (lambda () (car (opaque 1))))
                   (error (c) c)))
               'type-error))))

(test a-call-that-unwinds-its-thread
  (with-pool ()
    (flet ((outcome (function)
             (in-fiber () (handler-case (call-blocking function)
                            (sb-thread:thread-error () :unwound)))))
      (is (eq :unwound (outcome (lambda () (sb-thread:abort-thread)))))
      (is (eq :unwound (outcome (lambda () (invoke-restart 'abort)))))
      (is (eq :unwound (outcome (lambda () (sb-thread:return-from-thread 1)))))
      ;; Nothing in Lisp catches this one, and the thread ends.
      (is (eq :unwound (outcome (lambda () (throw 'sb-impl::%end-of-the-world nil)))))
      (is (= 5 (in-fiber () (call-blocking (lambda () (+ 2 3)))))))))

;;; Prevents: a thread of the pool that unwinds to its base, and enters the debugger there.
(test a-call-that-exits-to-its-fiber
  (with-pool ()
    (on-carriers (n)
      (let ((cleaned 0))
        (flet ((outcome (function)
                 (in-fiber (n) (handler-case (funcall function)
                                 (control-error () :control-error)))))
          (is (eq :control-error
                  (outcome (lambda ()
                             (block nil
                               (call-blocking (lambda ()
                                                (unwind-protect (return :returned)
                                                  (incf cleaned)))))))))
          (is (eq :control-error
                  (outcome (lambda ()
                             (tagbody
                                (call-blocking (lambda ()
                                                 (unwind-protect (go out)
                                                   (incf cleaned))))
                              out)))))
          (is (eq :control-error
                  (outcome (lambda ()
                             (catch 'tag-of-the-fiber
                               (call-blocking (lambda () (throw 'tag-of-the-fiber 1)))))))))
        (is (= 2 cleaned))
        (is (= 5 (in-fiber () (call-blocking (lambda () (+ 2 3))))))))))

;;;; many

(test many-calls-few-threads
  (on-carriers (n)
    (dolist (limit '(1 3 8))
      (with-pool (limit)
        (is (equal (loop for i below 300 collect (* i i))
                   (in-fibers n 300 (lambda (i) (call-blocking (lambda () (* i i)))))))))))

(test other-fibers-run-meanwhile
  (on-carriers (n)
    (with-pool ()
      (let ((semaphore (sb-thread:make-semaphore)))
        (is (equal '(:called :signalled)
                   (in-fibers n 2 (lambda (i)
                                    (cond ((= i 0)
                                           (call-blocking
                                            (lambda () (sb-thread:wait-on-semaphore semaphore)))
                                           :called)
                                          (t (sb-thread:signal-semaphore semaphore)
                                             :signalled))))))))))

(test as-many-threads-as-calls-that-wait-for-each-other
  (with-pool (8)
    (let ((count 0) (mutex (sb-thread:make-mutex)) (gate (sb-thread:make-semaphore)))
      (is (equal '(8 8 8 8 8 8 8 8)
                 (in-fibers 2 8 (lambda (i)
                                  (declare (ignore i))
                                  (call-blocking
                                   (lambda ()
                                     (sb-thread:with-mutex (mutex)
                                       (when (= 8 (incf count))
                                         (sb-thread:signal-semaphore gate 8)))
                                     (sb-thread:wait-on-semaphore gate)
                                     count)))))))))

;;; Who cannot be unwound must not wait behind the calls of others, see READ-IN-POOL.
(test a-thread-for-one-more-call
  (with-pool (1)
    (let ((began (make-flag)) (done (make-flag)))
      (is-true (sb-fiber::pool-has-thread-p))
      (is (= 1 (pool-threads)))
      (with-group (group 1)
        (let ((fiber (spawn (group)
                       (call-blocking (lambda ()
                                        (raise-flag began)
                                        (wait-until (flag-value done)))))))
          (is-true (wait-until (flag-value began)))
          (is (not (sb-fiber::pool-has-thread-p)))
          (raise-flag done)
          (join fiber)
          (is-true (wait-until (sb-fiber::pool-has-thread-p))))))))

(test idle-threads-end
  (with-pool ()
    (with-group (group 2)               ; as long as there is one they are not dismissed
      (in-fibers 2 8 (lambda (i) (call-blocking (lambda () i))))
      (is (plusp (pool-threads)))
      (is-true (wait-until (= 0 (pool-threads))))
      (is (= 5 (in-fiber () (call-blocking (lambda () 5))))))))

(test idle-threads-are-dismissed-with-the-last-group
  (with-pool ()
    (in-fibers 2 8 (lambda (i) (call-blocking (lambda () i))))
    (is-true (wait-until (= 0 (pool-threads))))))

(test calls-while-threads-are-dismissed
  (dolist (limit '(1 4))
    (with-pool (limit)
      (with-group (group 2)
        (let ((fibers (loop repeat 10
                            collect (spawn (group)
                                      (loop for i below 200
                                            always (= i (call-blocking (lambda () i))))))))
          (loop until (every (complement #'fiber-alive-p) fibers)
                do (sb-fiber::dismiss-idle-threads)
                   (sb-thread:thread-yield))
          (is (every #'identity (join-all fibers))))))))

;;;; unwinding the fiber

(defmacro with-abandoned-call ((how &key (around 'progn) (call '(loop (sleep 1)))) &body body)
  "A CALL in AROUND that is abandoned by HOW, a function of the fiber; then BODY, where CLEANED is
true if the call was unwound."
  `(let ((begun (sb-thread:make-semaphore)) (cleaned nil))
     (with-group (group 2)
       (let ((fiber (spawn (group)
                      (call-blocking (lambda ()
                                       (unwind-protect (,around (sb-thread:signal-semaphore begun)
                                                                ,call)
                                         (setf cleaned t)))))))
         (is-true (sb-thread:wait-on-semaphore begun :timeout *patience*))
         (funcall ,how fiber)
         (is (eq :abort (nth-value 1 (fiber-join fiber :default nil :timeout *patience*))))
         ,@body))))

(test terminated-fiber
  (with-pool (1)
    (with-abandoned-call (#'terminate-fiber)
      (is-true (wait-until cleaned))
      ;; The thread does the next call.
      (is (= 7 (in-fiber () (call-blocking (lambda () 7))))))))

(test terminated-fiber-whose-call-cannot-be-interrupted
  (with-pool (1)
    (let ((go-on (sb-thread:make-semaphore)))
      (with-abandoned-call (#'terminate-fiber :around sb-sys:without-interrupts
                                               :call (sb-thread:wait-on-semaphore go-on))
        ;; The fiber has ended, the call has not.
        (is (not cleaned))
        (sb-thread:signal-semaphore go-on)
        (is-true (wait-until cleaned))
        (is (= 7 (in-fiber () (call-blocking (lambda () 7)))))))))

(test terminated-fiber-whose-call-is-queued
  (with-pool (1)
    (let ((begun (sb-thread:make-semaphore)) (go-on (sb-thread:make-semaphore)) (called nil))
      (with-group (group 1)
        (let ((first (spawn (group) (call-blocking (lambda ()
                                                     (sb-thread:signal-semaphore begun)
                                                     (sb-thread:wait-on-semaphore go-on) 1))))
              (second (spawn (group)
                        (sb-thread:wait-on-semaphore begun)
                        (call-blocking (lambda () (setf called t))))))
          (is-true (wait-until (= 1 (sb-fiber::blocking-pool-waiting sb-fiber::*blocking-pool*))))
          (terminate-fiber second)
          (is (eq :abort (nth-value 1 (fiber-join second :default nil :timeout *patience*))))
          (sb-thread:signal-semaphore go-on)
          (is (= 1 (join first)))))
      (is (= 7 (in-fiber () (call-blocking (lambda () 7)))))
      (is (null called)))))

(test with-timeout-around-a-call
  (with-pool (2)
    (on-carriers (n)
      (is (eq :timeout
              (in-fiber (n) (handler-case (sb-ext:with-timeout 1/20
                                            (call-blocking (lambda () (loop (sleep 1)))))
                              (sb-ext:timeout () :timeout))))))))

(test deadline-around-a-call
  (with-pool (2)
    (on-carriers (n)
      (is (eq :deadline
              (in-fiber (n)
                (handler-case (sb-sys:with-deadline (:seconds 1/20)
                                (call-blocking (lambda () (loop (sleep 1)))))
                  (sb-sys:deadline-timeout () :deadline))))))))

;;; Prevents: an entry that the semaphore does not count, so that the next call is never made.
(test deadline-while-a-call-is-queued
  (with-pool (2)
    (in-fiber () (call-blocking #'list)) ; makes the semaphore
    (let ((lock (sb-thread::semaphore-mutex
                 (sb-fiber::blocking-pool-entries sb-fiber::*blocking-pool*))))
      (with-group (group 1)
        (let ((fiber (sb-thread::with-system-mutex (lock)
                       (prog1 (spawn (group)
                                (handler-case (sb-sys:with-deadline (:seconds 1/100)
                                                (call-blocking (lambda () (loop (sleep 1)))))
                                  (sb-sys:deadline-timeout () :deadline)))
                         (sleep 1/10)))))
          (is (eq :deadline (join fiber)))))
      (is (= 7 (in-fiber () (call-blocking (lambda () 7))))))))

;;; Prevents: the same, where the wait for the semaphore's lock finds that the stack has too little
;;; room for waits.
(test calls-at-the-end-of-the-stack
  (with-pool (2)
    (in-fiber () (call-blocking #'list)) ; makes the semaphore
    (let ((lock (sb-thread::semaphore-mutex
                 (sb-fiber::blocking-pool-entries sb-fiber::*blocking-pool*)))
          (exhausted 0))
      (with-group (group 1)
        (loop for distance from 12000 downto 6000 by 100
              do (let ((fiber (sb-thread::with-system-mutex (lock)
                                (prog1 (spawn (group)
                                         (handler-case
                                             (call-at-distance distance
                                                               (lambda () (call-blocking #'list) 7))
                                           (storage-condition () (incf exhausted))))
                                  (sleep 1/200)))))
                   (join fiber)
                   (unless (eql 7 (fiber-join (spawn (group) (call-blocking (lambda () 7)))
                                              :default nil :timeout 10))
                     (return (fail "A call was lost at ~D." distance))))))
      (is (plusp exhausted)))))

(test interrupted-fiber-waits-on
  (with-pool ()
    (let ((go-on (sb-thread:make-semaphore)) (interrupted nil))
      (with-group (group 1)
        (let ((fiber (spawn (group) (call-blocking (lambda ()
                                                     (sb-thread:wait-on-semaphore go-on) :done)))))
          (interrupt-fiber fiber (lambda () (setf interrupted sb-thread:*current-thread*)))
          (is-true (wait-until interrupted))
          (is (eq fiber interrupted))
          (sb-thread:signal-semaphore go-on)
          (is (eq :done (join fiber))))))))

;;; An interruption that is meant for an abandoned call must not hit the next one of its thread.
(test abandoned-calls-and-others
  (with-pool (3)
    (with-group (group 2)
      (let ((good (loop repeat 5
                        collect (spawn (group)
                                  (loop for i below 300
                                        always (= i (call-blocking (lambda () i)))))))
            (bad (loop repeat 5
                       collect (spawn (group)
                                 (loop repeat 100
                                       do (handler-case
                                              (sb-sys:with-deadline (:seconds 1/2000)
                                                (call-blocking (lambda () (sleep 1/1000))))
                                            (sb-sys:deadline-timeout ())))
                                 t))))
        (is (every #'identity (join-all good)))
        (is (every #'identity (join-all bad)))))))

(test collections-during-calls
  (with-pool (4)
    (is (equal (loop for i below 40 collect (list i))
               (let ((stop nil))
                 (with-group (group 2)
                   (let ((collector (spawn (group)
                                      (loop until stop do (sb-ext:gc) (sleep 1/1000)))))
                     (prog1 (join-all
                             (loop for i below 40
                                   collect (let ((i i))
                                             (spawn (group)
                                               (loop repeat 20
                                                     do (call-blocking (lambda () (make-list 100))))
                                               (call-blocking (lambda () (list i)))))))
                       (setf stop t)
                       (join collector)))))))))

;;;; names

(test looking-up-a-name
  (with-pool ()
    (on-carriers (n :migration '(nil))
      ;; The idle threads end with the last group.
      (is (equalp '(#(127 0 0 1) t)
                  (in-fiber (n)
                    (list (sb-bsd-sockets:host-ent-address
                           (sb-bsd-sockets:get-host-by-name "localhost"))
                          (plusp (pool-threads))))))
      (is (stringp (in-fiber (n) (sb-bsd-sockets:host-ent-name
                                  (sb-bsd-sockets:get-host-by-address
                                   (sb-bsd-sockets:make-inet-address "127.0.0.1")))))))))

;;; The other fibers of the carrier run while the name is looked up: one of them accepts the
;;; connection.
(test usocket-connects-by-name
  (with-pool ()
    (on-carriers (n)
      (let ((listener (usocket:socket-listen "127.0.0.1" 0 :reuse-address t)))
        (unwind-protect
             (with-group (group n)
               (let ((server (spawn (group)
                               (usocket:with-connected-socket
                                   (socket (usocket:socket-accept listener))
                                 (read-line (usocket:socket-stream socket)))))
                     (client (spawn (group)
                               (usocket:with-client-socket
                                   (socket stream "localhost" (usocket:get-local-port listener)
                                           :timeout 30)
                                 (format stream "by name~%")
                                 (finish-output stream)
                                 (plusp (pool-threads))))))
                 (is (equal "by name" (join server)))
                 (is (eq t (join client)))))
          (usocket:socket-close listener))))))

(test a-name-that-is-not-known
  (with-pool ()
    (is (eq :name-service-error
            (in-fiber () (handler-case (sb-bsd-sockets:get-host-by-name "no.such.host.invalid")
                           (sb-bsd-sockets:name-service-error () :name-service-error)))))))

;;;; the process

;;; Saving stops the pool, and the saved image starts another.
(test image-with-a-pool-is-saved-and-started
  (let ((core (temporary-path "pool.core"))
        (call '(car (run-fibers (make-fiber (lambda () (call-blocking (lambda () (+ 40 2)))))))))
    (unwind-protect
         (progn (call-in-child (list "--eval" *child-package*
                                     "--eval" "(in-package \"SB-FIBER-TESTS\")"
                                     "--eval" (printed call)
                                     "--eval" (printed `(sb-ext:save-lisp-and-die ,core))))
                (is (string= "42" (string-trim '(#\Newline #\Space)
                                               (nth-value 1
                                                          (call-with-core
                                                           core (printed `(princ ,call))))))))
      (when (probe-file core) (delete-file core)))))

(defun call-with-core (core form)
  (let* ((process nil)
         (output (with-output-to-string (out)
                   (setf process (sb-ext:run-program
                                  (sb-ext:native-namestring sb-ext:*runtime-pathname*)
                                  (list "--core" core "--noinform" "--no-sysinit" "--no-userinit"
                                        "--non-interactive" "--eval" form)
                                  :input nil :output out :error :output)))))
    (values (sb-ext:process-exit-code process) output)))

;;; A call that goes on does not keep the process from exiting.
(test exit-during-a-call
  (is (string= "0" (princ-to-string
                    (call-in-child (list "--eval" "(sb-fiber:start-fibers
                                                     (sb-fiber:make-fiber
                                                       (lambda ()
                                                          (sb-fiber:call-blocking
                                                           (lambda () (loop (sleep 1)))))))"
                                         "--eval" "(sleep 1/10)"
                                         "--eval" "(sb-ext:exit)"))))))

;;; Prevents: a process that never ends, since a dead thread holds the lock of EXIT.
(test exit-in-a-call
  (is (= 7 (call-in-child (list "--eval" "(sb-fiber:run-fibers
                                            (sb-fiber:make-fiber
                                              (lambda ()
                                                 (sb-fiber:call-blocking
                                                  (lambda () (sb-ext:exit :code 7))))))")))))

;;; Prevents: the same. The first thread of the pool that EXIT is called in, since nothing handles
;;; an error, was dead then, and had the lock.
(test exit-after-a-call-that-exits-to-its-fiber
  (is (= 7 (call-in-child (list "--eval" "(ignore-errors
                                            (sb-fiber:run-fibers
                                              (sb-fiber:make-fiber
                                                (lambda ()
                                                  (block nil
                                                    (sb-fiber:call-blocking
                                                     (lambda () (return 1))))))))"
                                "--eval" "(sb-ext:exit :code 7)")
                          :wrapper '("timeout" "-k" "5" "30")))))

;;; Prevents: an EXIT that begins in an idle thread of the pool, and never ends.
(defun exit-code-with-term-for-idle-thread (&rest forms)
  (values
   (call-in-child
    (list "--eval" *child-package*
          "--eval"
          (printed
           `(let* ((group (start-fibers nil :carrier-count 1))
                   (pool sb-fiber::*blocking-pool*)
                   (idle (progn
                           (fiber-join (submit-fiber group (make-fiber (lambda ()
                                                                         (call-blocking #'list)))))
                           (loop until (= 1 (sb-fiber::blocking-pool-idle pool))
                                 do (sleep 1/1000))
                           (first (sb-fiber::blocking-pool-threads pool)))))
              (sb-unix:pthread-kill (sb-thread::thread-os-thread idle) sb-unix:sigterm)
              ,@forms)))
    :wrapper '("timeout" "-k" "5" "30"))))

(test term-for-an-idle-thread
  ;; It ends without another call.
  (is (= 7 (exit-code-with-term-for-idle-thread
            '(finish-fibers group)
            '(loop while (sb-thread:thread-alive-p idle) do (sleep 1/100))
            '(sb-ext:exit :code 7))))
  ;; The next call is interrupted by it.
  (is (= 0 (exit-code-with-term-for-idle-thread
            '(submit-fiber group
                           (make-fiber (lambda () (call-blocking (lambda () (loop (sleep 1)))))))
            '(loop (sleep 1))))))

(defun blocks-p (thread signal)
  "Does THREAD block SIGNAL, as the kernel says?"
  (with-open-file (status (format nil "/proc/self/task/~D/status"
                                  (sb-thread::thread-os-tid thread)))
    (loop for line = (read-line status)
          when (eql 0 (search "SigBlk:" line))
            return (logbitp (1- signal) (parse-integer line :start 8 :radix 16)))))

;;; A thread that leaves a handler by a non-local exit has unblocked all.
(test idle-threads-block-signals
  (with-pool (1)
    (with-group (group 1)
      (flet ((idle-thread ()
               (wait-until (= 1 (sb-fiber::blocking-pool-idle sb-fiber::*blocking-pool*)))
               (first (sb-fiber::blocking-pool-threads sb-fiber::*blocking-pool*))))
        (is (equal '(nil nil)
                   (join (spawn (group)
                           (call-blocking (lambda ()
                                            (list (blocks-p sb-thread:*current-thread*
                                                            sb-unix:sigterm)
                                                  (blocks-p sb-thread:*current-thread*
                                                            sb-unix:sigurg))))))))
        (is-true (blocks-p (idle-thread) sb-unix:sigterm))
        (with-abandoned-call (#'terminate-fiber)
          (is-true (wait-until cleaned))
          (is-true (blocks-p (idle-thread) sb-unix:sigterm)))))))
