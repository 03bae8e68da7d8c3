;;;; Tests of scopes: fibers that do not outlive a form, and how what they do is cancelled

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :sb-concurrency)
(require :sb-bsd-sockets)

(in-package "SB-FIBER-TESTS")

(def-suite* scope)

(defmacro child ((scope &rest arguments) &body body)
  "Spawn a fiber in SCOPE that executes BODY."
  `(sb-fiber:spawn ,scope (lambda () ,@body) ,@arguments))

(defun wait-for-ever () (fiber-park))

;;; What owns a scope: a fiber, or a thread, which has a group by name.
(defun call-in-owners (function)
  "Call FUNCTION, which checks something, with a group, in a fiber and in this thread."
  (on-carriers (n)
    (with-group (group n)
      (check-in-fiber group (lambda () (funcall function group)))
      (funcall function group))))

;;; FiveAM notes the results in variables that are bound.
(defun check-in-fiber (group function)
  "Call FUNCTION, which checks something, in a fiber of GROUP."
  (let* ((test (symbol-value 'fiveam::current-test))
         (results (join (spawn (group)
                          (progv '(fiveam::current-test fiveam::result-list) (list test '())
                            (funcall function)
                            (symbol-value 'fiveam::result-list))))))
    (sb-ext:with-unlocked-packages (fiveam)
      (setf (symbol-value 'fiveam::result-list)
            (append results (symbol-value 'fiveam::result-list))))))

(defmacro in-owners ((group) &body body)
  `(call-in-owners (lambda (,group) (declare (ignorable ,group)) ,@body)))

(defun scope-failure (function)
  "The SCOPE-FAILED that FUNCTION signals, or its values."
  (handler-case (funcall function)
    (scope-failed (condition) condition)))

(defmacro failure-of (&body body) `(scope-failure (lambda () ,@body)))

(defun no-fiber-left-p (group)
  "True once the fibers of GROUP that have ended are counted no more, and the caller's is the only."
  (wait-until (<= (fiber-group-statistics-fibers group) (if (current-fiber) 1 0))))

(defun fiber-group-statistics-fibers (group)
  (getf (fiber-group-statistics group) :fibers))

;;;; leaving

(test the-form-is-left-when-all-have-ended
  (in-owners (group)
    (let ((ended (make-flag)))
      (is (equal '(1 2)
                 (multiple-value-list
                  (with-fibers (scope :group group)
                    (loop repeat 50 do (child (scope) (sleep (opaque 1/1000)) (count-one ended)))
                    (values 1 2)))))
      (is (= 50 (flag-count ended))))))

(test children-have-children
  (in-owners (group)
    (let ((ended (make-flag)))
      (with-fibers (scope :group group)
        (labels ((grow (depth)
                   (count-one ended)
                   (when (plusp depth)
                     (loop repeat 3 do (child (scope) (grow (1- depth)))))))
          (grow 5)))
      (is (= (/ (1- (expt 3 6)) 2) (flag-count ended))))))

(test children-are-dead-when-the-form-is-left
  (in-owners (group)
    (let ((fibers (with-fibers (scope :group group)
                    (loop repeat 100 collect (child (scope) (fiber-yield))))))
      (is (notany #'fiber-alive-p fibers))
      (is (= 100 (length fibers))))))

(test values-of-children
  (in-owners (group)
    (is (equal '(3 4)
               (with-fibers (scope :group group)
                 (join-all (list (sb-fiber:spawn scope #'+ :arguments '(1 2))
                                 (sb-fiber:spawn scope '1+ :arguments 3 :name "adder"))))))))

(test bindings-of-children
  (in-owners (group)
    (is (eq :bound (with-fibers (scope :group group)
                     (join (child (scope :initial-bindings '((*variable* . :bound))
                                         :name "bound" :stack-size 65536)
                             *variable*)))))
    (is (equal '(:mine 7)
               (let ((*variable* :mine))
                 (with-fibers (scope :group group)
                   (join (child (scope :initial-bindings '(*variable* (*read-base* . 7)
                                                           *read-base*))
                           (list *variable* *read-base*)))))))
    (signals unbound-variable
      (with-fibers (scope :group group)
        (child (scope :initial-bindings '(*unbound*)) nil)))
    (signals type-error
      (with-fibers (scope :group group)
        (child (scope :initial-bindings '(:keyword)) nil)))))

(test children-are-cancelled-by-any-exit
  (in-owners (group)
    (let ((cleaned (make-flag)))
      (flet ((leave-by (exit)
               (with-fibers (scope :group group)
                 (loop repeat 10 do (child (scope) (unwind-protect (wait-for-ever)
                                                     (fiber-yield)
                                                     (count-one cleaned))))
                 (wait-until (= 10 (length (remove :parked (sb-fiber::children-of-scope scope)
                                                   :key #'fiber-state :test-not #'eq))))
                 (funcall exit))))
        (signals expected-error (leave-by (lambda () (error 'expected-error))))
        (is (= 10 (flag-count cleaned)))
        (is (eq :thrown (catch 'tag (leave-by (lambda () (throw 'tag :thrown))))))
        (is (= 20 (flag-count cleaned)))
        (is (eq :returned (block nil (leave-by (lambda () (return :returned))))))
        (is (= 30 (flag-count cleaned)))
        (signals sb-sys:deadline-timeout
          (sb-sys:with-deadline (:seconds 1/100)
            (leave-by (lambda () (sb-thread:wait-on-semaphore (make-semaphore))))))
        (is (= 40 (flag-count cleaned)))
        (is-true (no-fiber-left-p group))))))

;;;; failures

(test a-failure-cancels-the-others-and-the-body
  (in-owners (group)
    (let* ((cleaned (make-flag))
           (failure (failure-of
                      (with-fibers (scope :group group)
                        (loop repeat 10 do (child (scope) (unwind-protect (wait-for-ever)
                                                            (fiber-yield)
                                                            (count-one cleaned))))
                        (child (scope) (fiber-yield) (error 'expected-error))
                        (unwind-protect (sb-thread:wait-on-semaphore (make-semaphore))
                          (count-one cleaned))))))
      (is (typep failure 'scope-failed))
      (is (typep (scope-failed-cause failure) 'expected-error))
      (is (null (scope-failed-suppressed failure)))
      (is (typep (scope-failed-scope failure) 'scope))
      (is (search "an error that the test expects" (princ-to-string failure)))
      (is (plusp (flag-count cleaned)))
      (is-true (no-fiber-left-p group)))))

(test a-failure-after-the-body
  (in-owners (group)
    (is (typep (failure-of (with-fibers (scope :group group)
                             (child (scope) (sleep (opaque 1/1000)) (error 'expected-error))
                             (child (scope) (wait-for-ever))))
               'scope-failed))))

(test other-failures-are-listed
  (in-owners (group)
    (let ((failure (failure-of
                     (with-fibers (scope :group group)
                       (loop repeat 3 do (child (scope) (unwind-protect (wait-for-ever)
                                                          (error "late"))))
                       (wait-until (= 3 (count :parked (sb-fiber::children-of-scope scope)
                                               :key #'fiber-state)))
                       (child (scope) (error 'expected-error))))))
      (is (typep (scope-failed-cause failure) 'expected-error))
      (is (equal '("late" "late" "late")
                 (mapcar #'princ-to-string (scope-failed-suppressed failure)))))))

(test failures-are-collected
  (in-owners (group)
    (let* ((ended (make-flag))
           (failure (failure-of
                      (with-fibers (scope :group group :on-failure :collect)
                        (loop for i below 10
                              do (let ((i i))
                                   (child (scope)
                                     (sleep (opaque (/ i 1000)))
                                     (count-one ended)
                                     (when (evenp i) (error 'expected-error)))))))))
      (is (= 10 (flag-count ended)))
      (is (typep (scope-failed-cause failure) 'expected-error))
      (is (= 4 (length (scope-failed-suppressed failure)))))))

(test who-is-terminated-has-failed
  (in-owners (group)
    (let ((failure (failure-of (with-fibers (scope :group group)
                                 (terminate-fiber (wait-until-parked (child (scope)
                                                                       (wait-for-ever))))
                                 (child (scope) (wait-for-ever))))))
      (is (typep failure 'scope-failed))
      (is (typep (scope-failed-cause failure) 'sb-thread:join-thread-error)))))

(test joining-who-has-failed-is-the-scope's-failure
  (in-owners (group)
    (loop repeat 50
          do (is (typep (failure-of (with-fibers (scope :group group)
                                      (fiber-join (child (scope) (error 'expected-error)))
                                      :not-reached))
                        'scope-failed)))))

(test joining-who-was-cancelled-for-that-as-well
  (in-owners (group)
    (loop repeat 50
          do (is (typep (failure-of (with-fibers (scope :group group)
                                      (let ((others (loop repeat 5 collect (child (scope)
                                                                             (wait-for-ever)))))
                                        (child (scope) (error 'expected-error))
                                        (mapc #'fiber-join others)
                                        :not-reached)))
                        'scope-failed)))))

(test the-debugger-of-a-child-comes-first
  (in-owners (group)
    (is (eq :hook (with-fibers (scope :group group)
                    (join (child (scope)
                            (block nil
                              (let ((sb-ext:*invoke-debugger-hook*
                                      (lambda (condition hook)
                                        (declare (ignore condition hook))
                                        (return :hook))))
                                (error 'expected-error))))))))))

(test failures-are-not-lost-in-an-exit
  (in-owners (group)
    (let ((output (make-string-output-stream)))
      (call-with-error-output
       (lambda ()
         (catch 'tag
           (with-fibers (scope :group group :on-failure :collect)
             (wait-for-end (child (scope) (error 'expected-error)))
             (throw 'tag nil))))
       output)
      (is (search "an error that the test expects" (get-output-stream-string output))))))

;;;; limit, deadline

(test at-most-as-many-as-the-limit
  (in-owners (group)
    (let ((now (make-flag)) (most (make-flag)))
      (with-fibers (scope :group group :limit 3)
        (loop repeat 60
              do (child (scope)
                   (let ((n (1+ (count-one now))))
                     (note most n)
                     (pause)
                     (sb-ext:atomic-decf (flag-count now))))))
      (is (= 60 (length (flag-notes most))))
      (is (<= 1 (reduce #'max (flag-notes most)) 3)))))

(test a-limit-is-no-hindrance-to-cancelling
  (in-owners (group)
    (is (typep (failure-of (with-fibers (scope :group group :limit 2)
                             (child (scope) (wait-for-ever))
                             (child (scope) (fiber-yield) (error 'expected-error))
                             (loop (child (scope) (wait-for-ever)))))
               'scope-failed))))

(test deadlines-of-scopes
  (in-owners (group)
    (let ((cleaned (make-flag)) (name nil))
      (handler-case (with-fibers (scope :group group :deadline 1/50 :name "late")
                      (child (scope) (unwind-protect (wait-for-ever) (count-one cleaned)))
                      (unwind-protect (sb-thread:wait-on-semaphore (make-semaphore))
                        (count-one cleaned)))
        (scope-timeout (condition)
          (setf name (princ-to-string (scope-timeout-scope condition)))
          (is (search "1/50" (princ-to-string condition)))))
      (is (search "late" name))
      (is (plusp (flag-count cleaned)))
      (is (eq :done (with-fibers (scope :group group :deadline 3600)
                      (child (scope) (fiber-yield))
                      :done)))
      ;; What watches the deadline has ended, too.
      (is-true (no-fiber-left-p group)))))

;;;; cancelling

(test cancelling-a-scope
  (in-owners (group)
    (let ((notes (make-flag)))
      (is (null (with-fibers (scope :group group)
                  (child (scope) (wait-for-ever))
                  (child (scope)
                    (note notes (cancel-scope scope))
                    (note notes (cancel-scope scope)))
                  (sb-thread:wait-on-semaphore (make-semaphore)))))
      (is (equal '(nil t) (flag-notes notes))))
    (is (eq :value (with-fibers (scope :group group)
                     (child (scope) (wait-for-ever))
                     (cancel-scope scope)
                     :value)))
    (let ((scope (with-fibers (scope :group group) scope)))
      (is-false (cancel-scope scope)))))

(test what-is-spawned-in-a-cancelled-scope-ends-at-once
  (in-owners (group)
    (let ((called (make-flag)))
      (with-fibers (scope :group group)
        (cancel-scope scope)
        (is (eq :abort (wait-for-end (child (scope) (raise-flag called))))))
      (is-false (flag-value called)))))

(test only-the-inner-scope
  (in-owners (group)
    (is (equal '(:inner nil :outer)
               (with-fibers (outer :group group)
                 (list :inner
                       (with-fibers (inner :group group)
                         (child (inner) (fiber-yield) (cancel-scope inner))
                         (sb-thread:wait-on-semaphore (make-semaphore)))
                       :outer))))))

(test the-outermost-scope
  (in-owners (group)
    (let ((notes (make-flag)))
      (is (null (with-fibers (outer :group group)
                  (with-fibers (inner :group group)
                    (child (inner) (cancel-scope inner) (cancel-scope outer))
                    (unwind-protect (sb-thread:wait-on-semaphore (make-semaphore))
                      (note notes :inner)))
                  ;; Cancelled one by one, the inner one may have been left before.
                  (unwind-protect (sb-thread:wait-on-semaphore (make-semaphore))
                    (note notes :outer)))))
      (is (member :inner (flag-notes notes))))))

(test what-happens-while-a-scope-is-left
  (in-owners (group)
    (let ((notes (make-flag)))
      (is (null (with-fibers (outer :group group)
                  (with-fibers (inner :group group)
                    (child (inner) (cancel-scope inner))
                    (unwind-protect (sb-thread:wait-on-semaphore (make-semaphore))
                      (cancel-scope outer)
                      (sleep (opaque 1/1000)) ; undisturbed
                      (note notes :cleaned)))
                  (note notes :between)
                  (sleep 3600)
                  (note notes :not-reached))))
      (is (equal '(:between :cleaned) (flag-notes notes))))))

(test scopes-of-fiberren
  (in-owners (group)
    (let ((cleaned (make-flag)))
      (with-fibers (outer :group group)
        (loop repeat 5
              do (child (outer)
                   (unwind-protect
                        (with-fibers (inner)
                          (loop repeat 5 do (child (inner) (unwind-protect (wait-for-ever)
                                                             (fiber-yield)
                                                             (count-one cleaned)))))
                     (count-one cleaned))))
        (wait-until (= 25 (loop for fiber in (sb-fiber::children-of-scope outer)
                                sum (loop for inner in (sb-fiber::scopes-of-fiber fiber)
                                          sum (count :parked (sb-fiber::children-of-scope inner)
                                                     :key #'fiber-state)))))
        (cancel-scope outer))
      (is (= 30 (flag-count cleaned)))
      (is-true (no-fiber-left-p group)))))

(defun waits-to-cancel (in)
  "An alist of names and functions that wait for ever, each for something else."
  (let* ((held (make-mutex)) (mutex (make-mutex)) (queue (make-waitqueue))
         (semaphore (make-semaphore)) (channel (sb-concurrency:make-channel))
         (full (sb-concurrency:make-channel :capacity 1))
         (mailbox (sb-concurrency:make-mailbox)) (gate (sb-concurrency:make-gate))
         (word (make-array 1 :element-type '(unsigned-byte 8)))
         (end (make-semaphore))
         (thread (make-thread (lambda () (with-mutex (held) (wait-on-semaphore end))))))
    (sb-concurrency:send full 1)
    (wait-until (mutex-owner held))
    (values
     (list (cons :park #'fiber-park)
           (cons :park-timeout (lambda () (fiber-park :timeout 3600)))
           (cons :sleep (lambda () (sleep (opaque 3600))))
           (cons :wait-for (lambda () (fiber-wait-for (constantly nil))))
           (cons :mutex (lambda () (with-mutex (held))))
           (cons :mutex-timeout (lambda () (grab-mutex held :timeout 3600)))
           (cons :condition (lambda () (with-mutex (mutex) (loop (condition-wait queue mutex)))))
           (cons :condition-timeout
                 (lambda () (with-mutex (mutex)
                              (loop (condition-wait queue mutex :timeout 3600)))))
           (cons :semaphore (lambda () (wait-on-semaphore semaphore)))
           (cons :semaphore-timeout (lambda () (wait-on-semaphore semaphore :timeout 3600)))
           (cons :join (lambda () (join-thread thread)))
           (cons :read (lambda () (sb-sys:wait-until-fd-usable in :input)))
           (cons :read-now (lambda ()
                             (sb-sys:with-pinned-objects (word)
                               (loop (unix-read-now in (sb-sys:vector-sap word) 1)
                                     (sb-sys:wait-until-fd-usable in :input 3600)))))
           (cons :receive (lambda () (sb-concurrency:receive channel)))
           (cons :receive-timeout (lambda () (sb-concurrency:receive channel :timeout 3600)))
           (cons :send (lambda () (sb-concurrency:send full 2)))
           (cons :select (lambda () (sb-concurrency:select
                                      ((sb-concurrency:receive channel) ())
                                      ((sb-concurrency:send full 2) ()))))
           (cons :mailbox (lambda () (sb-concurrency:receive-message mailbox)))
           (cons :gate (lambda () (sb-concurrency:wait-on-gate gate)))
           (cons :call-blocking (lambda () (call-blocking (lambda () (sleep 3600)))))
           (cons :yield (lambda () (loop (fiber-yield)))))
     (lambda ()
       (signal-semaphore end)
       (join-thread thread)))))

(defmacro with-silent-pipe ((in) &body body)
  (let ((out (gensym)))
    `(multiple-value-bind (,in ,out) (sb-unix:unix-pipe)
       (unwind-protect (progn ,@body)
         (sb-unix:unix-close ,in)
         (sb-unix:unix-close ,out)))))

(defun cancelled-while-waiting-p (group function)
  "True if a fiber that calls FUNCTION is cancelled in it, cleans up, and is found to be cancelled."
  (let* ((notes (make-flag))
         (fiber (spawn (group)
                  (unwind-protect
                       (handler-bind ((fiber-cancelled (lambda (condition)
                                                         (note notes
                                                               (fiber-cancelled-scope condition)))))
                         (raise-flag notes)
                         (funcall function))
                    (sleep (opaque 1/1000))
                    (note notes :cleaned)))))
    (wait-until (flag-value notes))
    (when (= 0 (random 2)) (sb-ext:wait-for (eq :parked (fiber-state fiber)) :timeout 1/100))
    (and (cancel-fiber fiber)
         (not (cancel-fiber fiber))
         (eq :abort (wait-for-end fiber))
         (equal '(:cleaned nil) (flag-notes notes))
         (handler-case (fiber-join fiber)
           (fiber-failed (condition) (typep (fiber-failed-cause condition) 'fiber-cancelled))))))

(test every-wait-is-cancelled
  (on-carriers (n)
    (with-group (group n)
      (with-silent-pipe (in)
        (multiple-value-bind (waits release) (waits-to-cancel in)
          (unwind-protect
               (loop for (name . function) in waits
                     do (is-true (cancelled-while-waiting-p group function) "~S" name))
            (funcall release)))))))

(defun body-cancelled-while-waiting-p (group function)
  "True if the body of a scope that calls FUNCTION is left when a child says so."
  (let ((notes (make-flag)))
    (and (null (with-fibers (scope :group group)
                 (child (scope)
                   (wait-until (flag-value notes))
                   (cancel-scope scope))
                 (unwind-protect (progn (raise-flag notes) (funcall function))
                   (note notes :cleaned))
                 :not-reached))
         (equal '(:cleaned) (flag-notes notes)))))

;;; A thread hears of it where it waits for other threads, or sleeps.
(test every-wait-of-a-body-is-cancelled
  (on-carriers (n)
    (with-group (group n)
      (with-silent-pipe (in)
        (multiple-value-bind (waits release) (waits-to-cancel in)
          (unwind-protect
               (loop for (name . function) in waits
                     do (is-true (join (spawn (group)
                                         (body-cancelled-while-waiting-p group function)))
                                 "~S" name)
                        (unless (member name '(:park :park-timeout :read :read-now :yield
                                               :call-blocking))
                          (is-true (body-cancelled-while-waiting-p group function)
                                   "~S in a thread" name)))
            (funcall release)))))))

(test nothing-is-lost-by-a-cancelled-wait
  (on-carriers (n)
    (with-group (group n)
      (let ((semaphore (make-semaphore)) (mutex (make-mutex))
            (channel (sb-concurrency:make-channel)) (taken (make-flag)) (sent 2000))
        ;; Fibers that are cancelled at any time, and one that is not.
        (with-fibers (scope :group group)
          (let ((receiver (child (scope)
                            (loop until (eq :end (sb-concurrency:receive channel))
                                  do (count-one taken)))))
            (child (scope)
              (loop repeat 200
                    do (let ((fibers (loop repeat 5
                                           collect (child (scope)
                                                     (wait-on-semaphore semaphore)
                                                     (with-mutex (mutex) (pause))
                                                     (when (eql 1 (sb-concurrency:receive channel))
                                                       (count-one taken))))))
                         (signal-semaphore semaphore 3)
                         (pause)
                         (mapc #'cancel-fiber fibers)
                         (mapc #'wait-for-end fibers))))
            (loop repeat sent do (sb-concurrency:send channel 1))
            (loop while (fiber-alive-p receiver)
                  do (sb-concurrency:send channel :end :timeout 1/100))))
        ;; A child that has received is not cancelled before it counts: nothing waits in between.
        (is (= sent (flag-count taken)))
        (is-true (with-mutex (mutex) t))
        (is (<= 0 (semaphore-count semaphore) 600))))))

(test a-mutex-of-who-is-cancelled-is-released
  (on-carriers (n)
    (with-group (group n)
      (let ((mutex (make-mutex)))
        (loop repeat 30
              do (let ((fibers (loop repeat 5
                                     collect (spawn (group)
                                               (loop (with-mutex (mutex) (pause)))))))
                   (pause)
                   (mapc #'cancel-fiber fibers)
                   (mapc #'wait-for-end fibers)
                   (is-true (not (mutex-owner mutex)))))
        (is-true (with-mutex (mutex :timeout *patience*) t))))))

(test not-where-it-must-not-be
  (on-carriers (n)
    (with-group (group n)
      (let* ((notes (make-flag))
             (fiber (spawn (group)
                      (without-cancellation
                        (raise-flag notes)
                        (sleep (opaque 1/50))
                        (note notes :slept))
                      (note notes :outside)
                      (sb-sys:without-interrupts
                        (sleep (opaque 1/1000))
                        (note notes :slept-again))
                      (sleep (opaque 3600))
                      (note notes :not-reached))))
        (wait-until (flag-value notes))
        (cancel-fiber fiber)
        (is (eq :abort (wait-for-end fiber)))
        (is (equal '(:slept-again :outside :slept) (flag-notes notes)))))))

(test a-new-fiber
  (with-group (group)
    (let* ((called (make-flag)) (fiber (make-fiber (lambda () (raise-flag called)))))
      (is-true (cancel-fiber fiber))
      (submit-fiber group fiber)
      (is (eq :abort (wait-for-end fiber)))
      (is-false (cancel-fiber fiber))
      (is-false (flag-value called)))))

(test a-handler-may-leave-the-wait
  (in-owners (group)
    (is (equal '(:handled :slept :value)
               (with-fibers (scope :group group)
                 (child (scope) (cancel-scope scope))
                 (list (handler-case (sb-thread:wait-on-semaphore (make-semaphore))
                         (fiber-cancelled (condition)
                           (is (eq scope (fiber-cancelled-scope condition)))
                           :handled))
                       (progn (sleep (opaque 1/1000)) :slept)
                       :value)))))
  (with-group (group)
    (let ((fiber (spawn (group)
                   (handler-case (wait-for-ever)
                     (fiber-cancelled () (sleep (opaque 1/1000)) :value)))))
      (wait-until-parked fiber)
      (cancel-fiber fiber)
      (is (eq :value (join fiber))))))

(test errors-are-handled-and-cancellations-are-not
  (with-group (group)
    (let ((fiber (spawn (group) (ignore-errors (wait-for-ever)) :not-reached)))
      (wait-until-parked fiber)
      (cancel-fiber fiber)
      (is (eq :abort (wait-for-end fiber))))))

(test who-does-not-end-is-warned-of
  (in-owners (group)
    (let ((output (make-string-output-stream)) (go (make-flag)) (begun (make-flag))
          (old *cancellation-grace*))
      (unwind-protect
           (call-with-error-output
            (lambda ()
              (setf *cancellation-grace* 1/50)
              (catch 'tag
                (with-fibers (scope :group group :name "slow")
                  (child (scope :name "stubborn")
                    (without-cancellation
                      (raise-flag begun)
                      (loop until (flag-value go) do (sleep (opaque 1/1000)))))
                  (make-thread (lambda ()
                                 (wait-until (plusp (file-position output)))
                                 (raise-flag go)))
                  (wait-until (flag-value begun))
                  (throw 'tag nil))))
            output)
        (setf *cancellation-grace* old))
      (let ((text (get-output-stream-string output)))
        (is (search "stubborn" text))
        (is (search "slow" text))))))

;;;; where cancelling was once lost, or came too far

(test a-handler-of-one-and-another-to-come
  (with-group (group)
    (let* ((notes (make-flag))
           (fiber (spawn (group)
                    (with-fibers (scope)
                      (child (scope)
                        (wait-until (flag-value notes))
                        (cancel-scope scope))
                      (without-cancellation
                        (raise-flag notes)
                        (sleep (opaque 1/50)))
                      ;; Of the two that have come, the fiber's own is told first.
                      (handler-case (sleep (opaque 3600))
                        (fiber-cancelled (condition)
                          (note notes (fiber-cancelled-scope condition))))
                      (sleep (opaque 3600))
                      (note notes :not-reached))
                    :value)))
      (wait-until (flag-value notes))
      (cancel-fiber fiber)
      (is (eq :value (join fiber)))
      (is (equal '(nil) (flag-notes notes))))))

(test the-first-wait-after-what-must-not-be-cancelled
  (on-carriers (n)
    (with-group (group n)
      (with-silent-pipe (in)
        (multiple-value-bind (waits release) (waits-to-cancel in)
          (unwind-protect
               (loop for (name . function) in waits
                     do (let* ((begun (make-flag))
                               (fiber (let ((function function))
                                        (spawn (group)
                                          (without-cancellation
                                            (raise-flag begun)
                                            (sleep (opaque 1/100)))
                                          (funcall function)))))
                          (wait-until (flag-value begun))
                          (cancel-fiber fiber)
                          (is (eq :abort (wait-for-end fiber)) "~S" name)))
            (funcall release)))))))

(test scopes-in-cleanup-forms
  (in-owners (group)
    (let ((notes (make-flag)))
      (is (null (with-fibers (outer :group group)
                  (child (outer) (cancel-scope outer))
                  (unwind-protect (sleep 3600)
                    (handler-case (with-fibers (inner :group group :deadline 1/100)
                                    (sleep 3600))
                      (scope-timeout () (note notes :timeout)))
                    (handler-case (with-fibers (inner :group group)
                                    (child (inner) (error 'expected-error))
                                    (sleep 3600))
                      (scope-failed () (note notes :failed)))
                    (sleep (opaque 1/1000))
                    (note notes :cleaned)))))
      (is (equal '(:cleaned :failed :timeout) (flag-notes notes))))))

(test an-error-is-not-replaced-by-a-cancellation
  (in-owners (group)
    (let ((failure (failure-of
                     (with-fibers (scope :group group)
                       (child (scope)
                         (unwind-protect (error 'expected-error)
                           (cancel-scope scope)
                           (sleep (opaque 1/1000))))))))
      (is (typep failure 'scope-failed))
      (is (typep (scope-failed-cause failure) 'expected-error)))))

(test looking-at-a-scope-disturbs-no-cancelling
  (on-carriers (n)
    (with-group (group n)
      (loop repeat 30
            do (let ((stop (make-flag)) (looker nil))
                 (with-fibers (scope :group group)
                   (setf looker (make-thread (lambda ()
                                               (loop until (flag-value stop)
                                                     do (sb-fiber::children-of-scope scope)))))
                   (loop repeat 100 do (child (scope) (wait-for-ever)))
                   (cancel-scope scope))
                 (raise-flag stop)
                 (join-thread looker)
                 (is-true t))))))

(test who-stays-can-be-left-behind
  (with-group (group)
    (let ((old *cancellation-grace*) (go (make-flag)) (begun (make-flag)) (stubborn nil))
      (unwind-protect
           (quietly
             (setf *cancellation-grace* 1/100)
             (let ((owner (spawn (group)
                            (with-fibers (scope)
                              (setf stubborn (child (scope)
                                               (without-cancellation
                                                 (raise-flag begun)
                                                 (loop until (flag-value go)
                                                       do (sleep (opaque 1/1000))))))
                              (wait-until (flag-value begun))
                              (error 'expected-error)))))
               ;; Within the grace nothing comes through; after it the first does.
               (loop until (eq :abort (nth-value 1 (fiber-join owner :default nil :timeout 1/50)))
                     do (handler-case (terminate-fiber owner)
                          (sb-thread:interrupt-thread-error ())))
               (is-true (fiber-alive-p stubborn))))
        (setf *cancellation-grace* old)
        (raise-flag go))
      (join stubborn))))

;;; Neither what failed before nor what fails later is lost with those that are left behind.
(test failures-of-who-is-left-behind
  (with-group (group)
    (let ((old *cancellation-grace*) (go (make-flag)) (begun (make-flag)) (stubborn nil)
          (output (make-string-output-stream)))
      (unwind-protect
           (call-with-error-output
            (lambda ()
              (setf *cancellation-grace* 1/100)
              (let ((owner (spawn (group)
                             (with-fibers (scope)
                               (setf stubborn (child (scope)
                                                (without-cancellation
                                                  (raise-flag begun)
                                                  (loop until (flag-value go)
                                                        do (sleep (opaque 1/1000))))
                                                (error "too late")))
                               (wait-until (flag-value begun))
                               (child (scope) (error 'expected-error))
                               (wait-for-ever)))))
                (loop until (eq :abort (nth-value 1 (fiber-join owner :default nil :timeout 1/50)))
                      do (handler-case (terminate-fiber owner)
                           (sb-thread:interrupt-thread-error ())))
                (raise-flag go)
                (wait-for-end stubborn)))
            output)
        (setf *cancellation-grace* old)
        (raise-flag go))
      (let ((text (get-output-stream-string output)))
        (is (search "an error that the test expects" text))
        (is (search "too late" text))))))

(test permits-and-deadlines
  (on-carriers (n)
    (with-group (group n)
      (let ((semaphore (make-semaphore :count 1)))
        (join-all (loop repeat 20
                        collect (spawn (group)
                                  (handler-case
                                      (sb-sys:with-deadline (:seconds 1/200)
                                        (with-permit (semaphore) (sleep (opaque 1/1000))))
                                    (sb-sys:deadline-timeout () nil)))))
        (is (= 1 (semaphore-count semaphore)))))))

(defun recurse-with-handler (depth)
  (handler-bind ((storage-condition (lambda (condition)
                                      (declare (ignore condition))
                                      (opaque (list (recurse-with-handler (1+ depth)))))))
    (opaque (list (recurse-with-handler (1+ depth)) depth))))

(test children-of-who-has-lost-the-stack
  (with-group (group)
    (let* ((cleaned (make-flag))
           (owner (quietly
                    (let ((owner (spawn (group :stack-size 65536)
                                   (with-fibers (scope)
                                     (loop repeat 5
                                           do (child (scope)
                                                (unwind-protect (wait-for-ever)
                                                  (count-one cleaned))))
                                     (sleep (opaque 1/100))
                                     (recurse-with-handler 0)))))
                      (wait-for-end owner)
                      owner))))
      (handler-case (fiber-join owner)
        (fiber-failed (condition)
          (is (typep (fiber-failed-cause condition) 'fiber-stack-lost))))
      (is (= 5 (flag-count cleaned))))))

;;; What a thread does in a handler is not the wait that it interrupts.
(test an-interruption-of-a-thread-is-not-left
  (with-group (group)
    (let ((notes (make-flag)) (thread nil) (scope nil))
      (setf thread (make-thread
                    (lambda ()
                      (with-fibers (s :group group)
                        (setf scope s)
                        (sb-sys:with-interrupts
                          (unwind-protect (sb-thread:wait-on-semaphore (make-semaphore))
                            (note notes :left)))))))
      (wait-until scope)
      (sleep 1/50)
      (sb-thread:interrupt-thread thread
                                  (lambda ()
                                    (sb-sys:with-interrupts
                                      (raise-flag notes)
                                      (let ((until (+ (get-internal-real-time)
                                                      (/ internal-time-units-per-second 10))))
                                        (loop while (< (get-internal-real-time) until)))
                                      (note notes :interruption-done))))
      (wait-until (flag-value notes))
      (cancel-scope scope)
      (is (null (join-thread thread)))
      (is (equal '(:left :interruption-done) (flag-notes notes))))))

(test exit-in-a-scope
  (is (search "(:CLEANED)"
              (child-result '(progn
                              (setf *cancellation-grace* 1/10)
                              (push (lambda () (print (list :cleaned))) sb-ext:*exit-hooks*)
                              (with-fibers (scope)
                                (spawn scope (lambda ()
                                               (without-cancellation
                                                 (loop (ignore-errors (sleep 1))))))
                                (sleep 1/10)
                                (sb-ext:exit :timeout 1)))))))

;;;; what is told

(test scopes-are-described
  (with-group (group)
    (with-fibers (outer :group group :name "outer")
      (let ((fiber (child (outer :name "parent")
                     (with-fibers (inner :name "inner")
                       (child (inner :name "grandchild") (wait-for-ever))))))
        (wait-until (eq :scope (car (sb-int:ensure-list (nth-value 1 (fiber-state fiber))))))
        (let ((text (with-output-to-string (s) (describe outer s))))
          (dolist (name '("outer" "parent" "inner" "grandchild"))
            (is (search name text) "~A in ~A" name text)))
        (is (search "outer" (with-output-to-string (s) (describe fiber s))))
        (is (search "inner" (princ-to-string fiber)))
        (cancel-scope outer)))))

;;;; misuse

(test bad-arguments-of-scopes
  (with-group (group)
    (signals type-error (with-fibers (scope :limit (opaque 0)) scope))
    (signals type-error (with-fibers (scope :limit (opaque "many")) scope))
    (signals type-error (with-fibers (scope :deadline (opaque -1)) scope))
    (signals type-error (with-fibers (scope :on-failure (opaque :ignore)) scope))
    (signals type-error (with-fibers (scope :group (opaque 1)) scope))
    (signals type-error (sb-fiber:spawn (opaque 1) #'identity))
    (signals type-error (with-fibers (scope :group group) (sb-fiber:spawn scope (opaque 1))))
    (signals type-error (cancel-fiber (opaque 1)))
    (signals type-error (cancel-scope (opaque 1)))))

(test a-scope-that-was-left-takes-no-fiber
  (in-owners (group)
    (let ((scope (with-fibers (scope :group group :limit 1) scope)))
      (signals sb-thread:thread-error (child (scope) nil))
      (signals sb-thread:thread-error (child (scope) nil)))))

(test spawning-without-a-scope
  (with-group (group)
    (is (eq group
            (join (spawn (group)
                    (join (sb-fiber:spawn nil (lambda () (fiber-group (current-fiber)))))))))))

(test a-group-is-started-if-there-is-none
  (is (equal "(1 2)"
             (child-result '(progn
                             (print (with-fibers (scope)
                                      (list (fiber-join (spawn scope (lambda () 1)))
                                            (fiber-join (spawn nil (lambda () 2))))))
                             (finish-fibers t))))))

(test a-group-that-is-aborted
  (on-carriers (n)
    (let ((cleaned (make-flag)) (group (start-fibers nil :carrier-count n)))
      (let ((owner (spawn (group)
                     (unwind-protect
                          (with-fibers (scope)
                            (loop repeat 20
                                  do (child (scope) (unwind-protect (wait-for-ever)
                                                      (count-one cleaned))))
                            (wait-for-ever))
                       (count-one cleaned)))))
        (wait-until (and (eq :parked (fiber-state owner))
                         (= 21 (fiber-group-statistics-fibers group))
                         (= 21 (count :parked (list-all-fibers) :key #'fiber-state))))
        (is-true (finish-fibers group :abort t :timeout *patience*))
        (is (= 21 (flag-count cleaned)))))))

;;;; all at once

;;; Scopes in scopes, that are cancelled, fail, time out and are left at random: whatever becomes of
;;; them, no fiber is left, and no lock is held. Where there is a limit only the body spawns: if all
;;; whom it lets run waited for each other, none would end.
(defun grow-at-random (scope depth mutex semaphore counts)
  (count-one (car counts))
  (unwind-protect
       (loop repeat (random 4)
             do (case (random 8)
                  (0 (pause))
                  (1 (with-mutex (mutex) (pause)))
                  (2 (signal-semaphore semaphore) (wait-on-semaphore semaphore :timeout 1/100))
                  (3 (cancel-scope scope))
                  (4 (when (= 0 (random 3)) (error 'expected-error)))
                  (5 (without-cancellation (pause)))
                  (t (when (plusp depth)
                       (if (and (= 0 (random 2)) (null (sb-fiber::scope-permits scope)))
                           (child (scope)
                             (grow-at-random scope (1- depth) mutex semaphore counts))
                           (grow-inner-scope (1- depth) mutex semaphore counts))))))
    (without-cancellation
      (when (= 0 (random 3)) (pause))
      (count-one (cdr counts)))))

(defun grow-inner-scope (depth mutex semaphore counts)
  (handler-case
      (with-fibers (scope :limit (and (= 0 (random 4)) 2)
                          :deadline (and (= 0 (random 4)) 1/200)
                          :on-failure (if (= 0 (random 2)) :cancel :collect))
        (loop repeat 5
              do (child (scope) (grow-at-random scope depth mutex semaphore counts)))
        (grow-at-random scope depth mutex semaphore counts))
    ((or scope-failed scope-timeout expected-error) () nil)))

(test cancel-storm
  (on-carriers (n)
    (with-group (group n)
      (let ((mutex (make-mutex)) (semaphore (make-semaphore))
            (counts (cons (make-flag) (make-flag))))
        (quietly
          (loop repeat 40
                do (is-true (progn (join (spawn (group)
                                           (grow-inner-scope 3 mutex semaphore counts)))
                                   t))))
        (is (= (flag-count (car counts)) (flag-count (cdr counts))))
        (is (null (mutex-owner mutex)))
        (is (= 0 (sb-thread::semaphore-waitcount semaphore)))
        (is-true (no-fiber-left-p group))
        (is (= 0 (heap-count group)))))))
