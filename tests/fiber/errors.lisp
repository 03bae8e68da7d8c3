;;;; What goes wrong: errors that nothing handles, bad arguments, fibers that are ended from outside, images and
;;;; scripts

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* errors)

(defun occurrences (string text)
  (loop for start = (search string text) then (search string text :start2 (1+ start))
        while start count t))

(defmacro with-reports ((text) form &body body)
  "Bind TEXT to what fibers write to *ERROR-OUTPUT* during FORM, and execute BODY."
  `(let ((,text (with-output-to-string (out)
                  (call-with-error-output (lambda () ,form) out))))
     ,@body))

;;;; Errors that nothing handles

(define-condition expected-error (error) ()
  (:report "an error that the test expects"))

(defun failing-fiber (group &optional (function (lambda () (error 'expected-error))))
  (submit-fiber group (make-fiber function :name "failing")))

;;; Prevents: the end of the process or of the carrier; no report, or two.
(test unhandled-error
  (on-carriers (n)
    (with-group (group n)
      (let ((fiber nil) (other (spawn (group) (fiber-park) :alive)))
        (with-reports (text) (wait-for-end (setf fiber (failing-fiber group)))
          (is (= 1 (occurrences "an error that the test expects" text)) "~A" text)
          (is (= 1 (occurrences "Unhandled" text)) "~A" text)
          (is (search "failing" text) "~A" text))
        (is (not (fiber-alive-p fiber)))
        (is (eq :aborted (fiber-state fiber)))
        (is (typep (handler-case (join fiber)
                     (sb-fiber::fiber-failed (condition) (sb-fiber::fiber-failed-cause condition)))
                   'expected-error))
        (signals sb-thread:join-thread-error (join fiber))
        (signals sb-thread:join-thread-error (sb-thread:join-thread fiber))
        (is (equal '(:default :abort) (multiple-value-list (fiber-join fiber :default :default))))
        (is (equal '(:default :abort)
                   (multiple-value-list (sb-thread:join-thread fiber :default :default))))
        (is (equal '(:default :abort)
                   (join (spawn (group) (multiple-value-list (fiber-join fiber :default :default))))))
        (fiber-unpark other)
        (is (eq :alive (join other)))))))

;;; An error that a trap has signalled, and one in a handler of such an error.
(test unhandled-traps
  (on-carriers (n)
    (with-group (group n)
      (dolist (function (list (lambda () (car (eval 1)))
                              (lambda () (funcall (eval ''no-such-function)))
                              (lambda () (eval '*no-such-variable*))
                              (lambda () (handler-bind ((type-error (lambda (condition)
                                                                      (declare (ignore condition))
                                                                      (fiber-yield)
                                                                      (/ 1 (eval 0)))))
                                           (car (eval 1))))))
        (let ((fiber nil))
          (with-reports (text) (wait-for-end (setf fiber (failing-fiber group function)))
            (is (= 1 (occurrences "Unhandled" text)) "~A" text))
          (is (typep (handler-case (join fiber)
                       (sb-fiber::fiber-failed (condition) (sb-fiber::fiber-failed-cause condition)))
                     'error)))))))

(test many-unhandled-errors
  (on-carriers (n)
    (with-group (group n)
      (is (equal (make-list 300 :initial-element :abort)
                 (quietly (mapcar #'wait-for-end (loop repeat 300 collect (failing-fiber group))))))
      (is (= 3 (join (spawn (group) (+ 1 2))))))))

(test cleanups-run-before-the-end
  (on-carriers (n)
    (with-group (group n)
      (let ((trace '()))
        (quietly
          (wait-for-end (failing-fiber group
                                       (lambda ()
                                         (unwind-protect
                                              (unwind-protect (error 'expected-error)
                                                (fiber-yield)
                                                (push :inner trace))
                                           (sleep 1/1000)
                                           (push :outer trace))))))
        (is (equal '(:outer :inner) trace))))))

(define-condition unprintable-error (error) ()
  (:report (lambda (condition stream)
             (declare (ignore condition stream))
             (error "This error cannot even be printed."))))

;;; Prevents: an error in the report of an error.
(test error-that-cannot-be-reported
  (with-group (group 1)
    (is (eq :abort (quietly (wait-for-end (failing-fiber group (lambda () (error 'unprintable-error)))))))
    (is (eq :abort (quietly
                     (wait-for-end (spawn (group :initial-bindings (list (cons '*error-output* (make-string-input-stream ""))))
                                     (error 'expected-error))))))
    (is (= 3 (join (spawn (group) (+ 1 2)))))))

(test serious-conditions-and-warnings
  (with-group (group 1)
    (is (eq :abort (quietly (wait-for-end (failing-fiber group (lambda () (error 'serious-condition)))))))
    (with-reports (text) (is (eq nil (wait-for-end (spawn (group) (warn "a warning") 1))))
      (is (= 1 (occurrences "a warning" text))))
    (is (null (join (spawn (group) (signal 'expected-error)))))))

;;; As in a thread: the hook is called in the fiber, which can end itself.
(test debugger-hook
  (on-carriers (n)
    (let ((called '()) (usual (sb-ext:symbol-global-value 'sb-ext:*invoke-debugger-hook*)))
      (unwind-protect
           (with-group (group n)
             (setf (sb-ext:symbol-global-value 'sb-ext:*invoke-debugger-hook*)
                   (lambda (condition hook)
                     (declare (ignore hook))
                     (push (list (type-of condition) (current-fiber)) called)
                     (abort)))
             (let ((fiber (failing-fiber group)))
               (is (eq :abort (wait-for-end fiber)))
               (is (equal (list (list 'expected-error fiber)) called))))
        (setf (sb-ext:symbol-global-value 'sb-ext:*invoke-debugger-hook*) usual)))))

;;;; Ends that a fiber chooses

(test abort-restart
  (on-carriers (n)
    (with-group (group n)
      (let ((cleaned nil))
        (is (eq :abort (wait-for-end (spawn (group)
                                       (unwind-protect (abort)
                                         (fiber-yield)
                                         (setf cleaned t))))))
        (is (eq t cleaned)))
      (is (eq :abort (wait-for-end (spawn (group)
                                     (handler-bind ((error #'abort)) (car (eval 1)))))))
      (is (search "abort fiber" (join (spawn (group) (princ-to-string (find-restart 'abort)))))))))

(test thread-functions
  (on-carriers (n)
    (with-group (group n)
      (is (eq :abort (wait-for-end (spawn (group) (sb-thread:abort-thread)))))
      (is (equal '(1 2 3)
                 (multiple-value-list
                  (join (spawn (group)
                          (unwind-protect (sb-thread:return-from-thread (values 1 2 3))
                            (fiber-yield)))))))
      (is (equal '() (multiple-value-list (join (spawn (group) (values))))))
      (is (string= "a name" (join (spawn (group :name "a name")
                                    (sb-thread:thread-name sb-thread:*current-thread*)))))
      (is (eq t (join (spawn (group) (sb-thread:thread-alive-p sb-thread:*current-thread*)))))
      (let ((fiber (spawn (group) 1)))
        (join fiber)
        (is (not (sb-thread:thread-alive-p fiber)))))))

(defun exit-code-of (form)
  (values (call-in-child (list "--eval" *child-package* "--eval" (printed form))
                         :wrapper '("timeout" "20"))))

;;; EXIT in a fiber ends the process, with its code, after its exit hooks.
(test exit-in-a-fiber
  (flet ((exits-with (form)
           (exit-code-of `(let ((group (start-fibers nil :carrier-count 1)))
                            (push (lambda () (princ :hook) (finish-output)) sb-ext:*exit-hooks*)
                            (submit-fiber group (make-fiber (lambda () (sleep 3600))))
                            (submit-fiber group (make-fiber (lambda () ,form)))
                            (sleep 15)))))
    (is (= 7 (exits-with '(sb-ext:exit :code 7))))
    (is (= 8 (exits-with '(sb-ext:exit :code 8 :abort t))))
    (is (= 9 (exits-with '(unwind-protect (sb-ext:exit :code 9) (sleep 1/100)))))))

;;; Carriers, and fibers that wait, do not keep the process.
(test exit-with-live-fibers
  (is (= 3 (exit-code-of '(progn (start-fibers (list (make-fiber (lambda () (sleep 3600)))
                                                     (make-fiber (lambda () (fiber-park)))
                                                     (make-fiber (lambda () (loop (fiber-yield)))))
                                               :carrier-count 2)
                           (sleep 1/10)
                           (sb-ext:exit :code 3))))))

;;; A cleanup form that parks, and says that it has run to its end.
(defparameter *cleanup*
  '(defmacro cleanup (name &body body)
    `(unwind-protect (progn ,@body)
       (fiber-yield)
       (sleep 1/100)
       (sb-thread:with-mutex (*output*)
         (format t "<~A>" ,name)
         (finish-output)))))

(defun exit-with-cleanups (&rest forms)
  "Exit code of a child that executes FORMS, and a sorted list of the names of the cleanup forms that have run."
  (multiple-value-bind (code output)
      (call-in-child (list* "--eval" *child-package*
                            "--eval" (printed '(defvar *output* (sb-thread:make-mutex)))
                            "--eval" (printed *cleanup*)
                            (loop for form in forms collect "--eval" collect (printed form)))
                     :wrapper '("timeout" "40"))
    (list code
          (sort (loop for start = (position #\< output) then (position #\< output :start end)
                      for end = (and start (position #\> output :start start))
                      while end collect (subseq output (1+ start) end))
                #'string<)
          (if (search "Unhandled" output) output :quiet))))

;;; A fiber that is ended before it has begun has nothing to clean up.
(defparameter *wait-until-all-have-begun*
  '(loop while (some #'sb-fiber::fiber-function (list-all-fibers))
         do (sleep 1/100)
         finally (sleep 1/10)))

(defparameter *fibers-to-unwind*
  '(defvar *group* (start-fibers (list (make-fiber (lambda () (cleanup "sleep" (sleep 3600))))
                                       (make-fiber (lambda () (cleanup "park" (fiber-park))))
                                       (make-fiber (lambda () (cleanup "yield" (loop (fiber-yield)))))
                                       (make-fiber (lambda ()
                                                     (cleanup "pinned" (with-fiber-pinned (sleep 3600)))))
                                       (make-fiber (lambda ()
                                                     (cleanup "thread"
                                                              (unwind-protect (sleep 3600)
                                                                (sb-thread:join-thread
                                                                 (sb-thread:make-thread #'list))))))
                                       (make-fiber (lambda () (cleanup "later" (sleep 3600)))))
                                 :carrier-count 2)))

(defparameter *unwound* '("later" "park" "pinned" "sleep" "thread" "yield"))

;;; Prevents: cleanup forms that do not run, a wrong code, an EXIT that waits for ever.
(test exit-unwinds-fibers
  (flet ((exits-with (&rest forms)
           (apply #'exit-with-cleanups *fibers-to-unwind* *wait-until-all-have-begun* forms)))
    ;; from the main thread, another one, and a fiber
    (is (equal (list 3 *unwound* :quiet) (exits-with '(sb-ext:exit :code 3))))
    (is (equal (list 4 *unwound* :quiet)
               (exits-with '(sb-thread:join-thread
                             (sb-thread:make-thread (lambda () (sb-ext:exit :code 4)))))))
    (is (equal (list 5 (cons "caller" *unwound*) :quiet)
               (exits-with '(fiber-join (submit-fiber *group*
                                         (make-fiber (lambda () (cleanup "caller" (sb-ext:exit :code 5)))))))))
    ;; :ABORT unwinds nobody
    (is (equal (list 6 '() :quiet) (exits-with '(sb-ext:exit :code 6 :abort t))))
    (is (equal (list 7 '() :quiet)
               (exits-with '(fiber-join (submit-fiber *group*
                                         (make-fiber (lambda ()
                                                       (cleanup "caller" (sb-ext:exit :code 7 :abort t)))))))))
    ;; nor does this
    (is (equal (list 8 '() :quiet)
               (exits-with '(setf sb-impl::*forcibly-terminate-threads-on-exit* nil)
                           '(sb-ext:exit :code 8))))))

;;; The main thread is in RUN-FIBERS, as in most scripts.
(test exit-in-run-fibers
  (is (equal '(9 ("other" "self") :quiet)
             (exit-with-cleanups
              '(run-fibers (list (make-fiber (lambda () (cleanup "other" (sleep 3600))))
                                 (make-fiber (lambda () (sleep 1/10) (cleanup "self" (sb-ext:exit :code 9)))))
                :carrier-count 1)))))

;;; What handles SIGTERM calls EXIT in whatever thread the kernel chose. Prevents: a carrier that ends, and a
;;; process that goes on without it.
(test exit-in-handlers
  (is (equal (list 0 *unwound* :quiet)
             (exit-with-cleanups *fibers-to-unwind*
                                 *wait-until-all-have-begun*
                                 '(sb-unix:unix-kill (sb-unix:unix-getpid) sb-unix:sigterm)
                                 '(sleep 30))))
  (is (equal (list 13 *unwound* :quiet)
             (exit-with-cleanups *fibers-to-unwind*
                                 *wait-until-all-have-begun*
                                 '(sb-thread:interrupt-thread
                                   (fiber-join (submit-fiber *group*
                                                (make-fiber (lambda ()
                                                              (sb-fiber::carrier-thread sb-fiber::*carrier*)))))
                                   (lambda () (sb-ext:exit :code 13)))
                                 '(sleep 30)))))

;;; Prevents: a second caller who goes on, or whose code wins.
(test several-fibers-exit
  (destructuring-bind (code cleanups quiet)
      (exit-with-cleanups '(run-fibers (loop for i below 20
                                             collect (let ((i i))
                                                       (make-fiber (lambda ()
                                                                     (sleep 1/100)
                                                                     (cleanup (code-char (+ i 65))
                                                                              (sb-ext:exit :code (+ 10 i)))))))
                            :carrier-count 4))
    (is (<= 10 code 29))
    (is (= 20 (length cleanups)) "~S" cleanups)
    (is (eq :quiet quiet) "~A" quiet)))

;;; Who does not end within :TIMEOUT is left behind.
(test exit-timeout
  (is (equal '(11 ("well-behaved") :quiet)
             (exit-with-cleanups
              '(start-fibers (list (make-fiber (lambda ()
                                                 (cleanup "stubborn" (sb-sys:without-interrupts (sleep 3600)))))
                                   (make-fiber (lambda () (cleanup "well-behaved" (sleep 3600)))))
                :carrier-count 1)
              *wait-until-all-have-begun*
              '(sb-ext:exit :code 11 :timeout 1)))))

(test errors-during-exit
  (destructuring-bind (code cleanups text)
      (exit-with-cleanups
       '(start-fibers (list (make-fiber (lambda () (cleanup "failing" (unwind-protect (sleep 3600) (error "oops")))))
                            (make-fiber (lambda () (cleanup "other" (sleep 3600)))))
         :carrier-count 1)
       *wait-until-all-have-begun*
       '(sb-ext:enable-debugger)        ; which is not entered
       '(sb-ext:exit :code 12))
    (is (= 12 code))
    (is (equal '("failing" "other") (remove-if-not (lambda (name) (member name '("failing" "other") :test #'equal))
                                                   cleanups)))
    (is (search "oops" (string text)))))

;;;; Bad arguments

(test bad-arguments-of-make-fiber
  (signals type-error (make-fiber 42))
  (signals type-error (make-fiber nil))
  (signals type-error (make-fiber "a string"))
  (signals undefined-function (make-fiber 'no-such-function))
  (dolist (size '(-1 0 1 65535 1.5 "64" nil #.(ash 1 40)))
    (signals type-error (make-fiber #'list :stack-size size)))
  (dolist (bindings '(42 ((1 . 2)) (*print-base*) ((*print-base* . 2) . 3) ((nil . 1)) ((:a . 1))))
    (signals type-error (make-fiber #'list :initial-bindings bindings)))
  (signals error (make-fiber #'list :name 42)))

(test bad-arguments-of-start-fibers
  (dolist (count '(0 -1 "2" 1.5 1000))
    (signals type-error (finish-fibers (start-fibers nil :carrier-count count))))
  (signals type-error (finish-fibers (start-fibers nil :poller :no-such-poller)))
  (signals type-error (start-fibers 42))
  (signals type-error (start-fibers '(42)))
  (signals type-error (run-fibers 42))
  (signals type-error (run-fibers (list (make-fiber #'list) 42)))
  ;; no carriers are left
  (is (null sb-fiber::*groups*)))

(test bad-arguments-of-submit-fiber
  (with-group (group 1)
    (signals type-error (submit-fiber group 42))
    (signals type-error (submit-fiber 42 (make-fiber #'list)))
    (signals type-error (submit-fiber nil (make-fiber #'list)))
    (let ((fiber (submit-fiber group (make-fiber #'list))))
      (signals sb-thread:thread-error (submit-fiber group fiber))
      (join fiber)
      (signals sb-thread:thread-error (submit-fiber group fiber))
      (is (eq fiber (handler-case (submit-fiber group fiber)
                      (sb-thread:thread-error (condition)
                        (sb-thread:thread-error-thread condition)))))))
  (let ((group (start-fibers nil :carrier-count 1))
        (fiber (make-fiber (constantly 5))))
    (is (eq t (finish-fibers group)))
    (signals sb-thread:thread-error (submit-fiber group fiber))
    ;; it can be submitted elsewhere then
    (with-group (other 1)
      (is (eql 5 (join (submit-fiber other fiber)))))))

(test default-group
  (signals program-error (submit-fiber t (make-fiber #'list)))
  (let ((group (start-fibers)))
    (unwind-protect
         (is (eql 5 (join (submit-fiber t (make-fiber (constantly 5))))))
      (finish-fibers group))
    (signals program-error (submit-fiber t (make-fiber #'list)))))

(test bad-arguments-of-the-others
  (with-group (group 1)
    (signals type-error (fiber-join 42))
    (signals type-error (fiber-name 42))
    (signals type-error (fiber-state nil))
    (signals type-error (fiber-alive-p 42))
    (signals type-error (fiber-unpark 42))
    (signals type-error (terminate-fiber 42))
    (signals type-error (finish-fibers 42))
    (signals type-error (finish-fibers group :timeout -1))
    (signals type-error (fiber-sleep -1))
    (signals type-error (fiber-sleep "1"))
    (let ((fiber (spawn (group) (fiber-park))))
      (signals type-error (fiber-join fiber :timeout -1))
      (signals type-error (fiber-join fiber :timeout "1"))
      (signals type-error (interrupt-fiber fiber 42))
      (signals type-error (interrupt-fiber fiber "function"))
      (fiber-unpark fiber))
    (flet ((type-error-in-fiber-p (function)
             (join (spawn (group) (handler-case (progn (funcall function) nil)
                                    (type-error () t))))))
      (is (all-true-p (mapcar #'type-error-in-fiber-p
                              (list (lambda () (fiber-park :timeout -1))
                                    (lambda () (fiber-park :timeout "1"))
                                    (lambda () (fiber-sleep -1))
                                    (lambda () (sleep -1))
                                    (lambda () (sleep (eval "1")))
                                    (lambda () (fiber-wait-for 42)))))))))

(test misuse
  (with-group (group 1)
    (signals sb-thread:thread-error (fiber-park)) ; in a thread
    (is (eq t (join (spawn (group)
                      (handler-case (fiber-join (current-fiber))
                        (sb-thread:join-thread-error () t))))))
    (is (eq t (join (spawn (group)
                      (handler-case (finish-fibers group)
                        (sb-thread:thread-error () t))))))
    (is (eq t (join (spawn (group)
                      (handler-case (sb-sys:without-gcing (fiber-park))
                        (sb-thread:thread-error () t))))))))

;;; No stack to be had: the fiber can be submitted again later.
(test no-room-for-stacks
  (is (string= "(:UNAVAILABLE 1 2)"
               (child-result
                '(let* ((group (start-fibers nil :carrier-count 1))
                        (fibers (list (submit-fiber group (make-fiber (lambda () (fiber-park) 1)))))
                        (last nil))
                  (prin1
                   (list* (handler-case
                              (loop (setf last (make-fiber (lambda () (fiber-park)) :stack-size (* 64 1024 1024)))
                                    (submit-fiber group last)
                                    (push last fibers))
                            (sb-fiber::fiber-stack-unavailable () :unavailable))
                    (progn (fiber-unpark (first (last fibers)))
                           (list (fiber-join (first (last fibers)))
                                 (fiber-join (submit-fiber group
                                                           (make-fiber (lambda () 2)))))))))
                :wrapper '("sh" "-c" "ulimit -v 12000000; exec timeout 20 \"$@\"" "sh")))))

;;; 62 carriers are all that there can be. Prevents: numbers of pollers, or descriptors, that an attempt to
;;; start too many keeps.
(test too-many-carriers
  (flet ((start (n) (finish-fibers (start-fibers nil :carrier-count n))))
    (is (eq t (start 62)))
    (let ((group (start-fibers nil :carrier-count 40)))
      (signals error (start 40))
      (finish-fibers group))
    (is (eq t (start 62)))))

(defun pollers-in-use ()
  (count-if-not #'null sb-fiber::*pollers*))

;;; A poller needs two descriptors. Prevents: one of them, or a poller, that is left behind.
(test no-descriptors-left
  (let ((descriptors (loop for fd = (sb-unix:unix-open "/dev/null" sb-unix:o_rdonly 0)
                           while fd collect fd))
        (pollers (pollers-in-use)))
    (unwind-protect
         (loop repeat 6
               do (signals error (start-fibers nil :carrier-count 4))
                  (is (= pollers (pollers-in-use)))
                  (sb-unix:unix-close (pop descriptors)))
      (mapc #'sb-unix:unix-close descriptors)))
  (is (equal '(0 1 2) (in-fibers 4 3 #'identity))))

;;; Prevents: pollers and carriers that a group has got when there is no thread for the next one.
(test no-threads-left
  (let ((pollers (pollers-in-use)) (groups sb-fiber::*groups*) (made '()))
    (dotimes (enough 5)
      (let ((left enough))
        (sb-int:encapsulate 'sb-thread::make-system-thread 'test
                            (lambda (f &rest arguments)
                              (when (minusp (decf left)) (error 'expected-error))
                              (let ((thread (apply f arguments)))
                                (push thread made)
                                thread)))
        (unwind-protect (signals expected-error (start-fibers nil :carrier-count 4))
          (sb-int:unencapsulate 'sb-thread::make-system-thread 'test))))
    (is (<= 10 (length made)))
    (is (notany #'sb-thread:thread-alive-p made))
    (is (= pollers (pollers-in-use)))
    (is (eq groups sb-fiber::*groups*)))
  (is (equal '(0 1 2) (in-fibers 4 3 #'identity))))

;;; A carrier is not ended by this, with a warning; before it has begun it was.
(test terminate-carriers-that-begin
  (let ((terminated 0))
    (sb-int:encapsulate 'sb-thread::make-system-thread 'test
                        (lambda (f name &rest arguments)
                          (let ((thread (apply f name arguments)))
                            (when (equal name "fiber carrier")
                              (ignore-errors (sb-thread:terminate-thread thread)
                                             (incf terminated)))
                            thread)))
    (unwind-protect
         (quietly (loop repeat 20 do (is (equal '(0 1 2) (in-fibers 4 3 #'identity)))))
      (sb-int:unencapsulate 'sb-thread::make-system-thread 'test))
    (is (plusp terminated))))

(test heap-exhausted
  (let ((result nil))
    (with-reports (text)
        (setf result (in-fiber () (handler-case (make-array (expt 10 11))
                                    (storage-condition () :exhausted))))
      (is (stringp text)))
    (is (eq :exhausted result))))

;;;; Ended from outside

(defmacro parked-fibers (group &body forms)
  "A list of parked fibers, each of which has executed one of FORMS, with a cleanup that counts in CLEANED."
  `(mapcar #'wait-until-parked
           (list ,@(loop for form in forms
                         collect `(spawn (,group)
                                    (unwind-protect ,form
                                      (fiber-yield)
                                      (sb-ext:atomic-incf (car cleaned))))))))

(defun all-ways-to-park (group cleaned)
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
       ;; OTHER may be ended before: the error would unwind this fiber, and its end come in a cleanup form.
       (progn (fiber-join other :default nil) (fiber-park))
       (with-fiber-pinned (fiber-park))
       (handler-bind ((error (lambda (condition) (declare (ignore condition)) (fiber-park))))
         (car (eval 1)))
       (sb-ext:with-timeout 3600 (sleep 3600))
       (sb-sys:with-deadline (:seconds 3600) (fiber-park)))
     other)))

;;; Prevents: a way to park that cannot be left; a lock that stays taken; an end that is forgotten.
(test terminate-parked-fibers
  (on-carriers (n)
    (with-group (group n)
      (let ((cleaned (list 0)))
        (multiple-value-bind (fibers other) (all-ways-to-park group cleaned)
          (mapc #'terminate-fiber fibers)
          (is (equal (make-list (length fibers) :initial-element :abort) (mapcar #'wait-for-end fibers)))
          (is (= (length fibers) (car cleaned)))
          (fiber-unpark other))))))

(test terminate-a-new-fiber
  (let* ((ran nil)
         (fiber (make-fiber (lambda () (setf ran t)))))
    (terminate-fiber fiber)
    (is (not (fiber-alive-p fiber)))
    (is (eq :aborted (fiber-state fiber)))
    (is (eq :abort (wait-for-end fiber)))
    (with-group (group 1)
      (signals sb-thread:thread-error (submit-fiber group fiber)))
    (is (not ran))
    (signals sb-thread:interrupt-thread-error (terminate-fiber fiber))))

(test terminate-a-running-fiber
  (on-carriers (n)
    (with-group (group n)
      (let ((fibers (loop repeat 20 collect (spawn (group) (loop (fiber-yield))))))
        (mapc #'terminate-fiber fibers)
        (is (equal (make-list 20 :initial-element :abort) (mapcar #'wait-for-end fibers))))
      ;; one that is queued and has not run yet runs no user's code
      (let* ((ran nil)
             (busy (spawn (group) (loop repeat 1000 do (fiber-yield))))
             (fibers (loop repeat 20
                           collect (let ((fiber (spawn (group) (fiber-park) (setf ran t))))
                                     (terminate-fiber fiber)
                                     fiber))))
        (is (equal (make-list 20 :initial-element :abort) (mapcar #'wait-for-end fibers)))
        (is (not ran))
        (join busy)))))

(test terminate-the-dead
  (with-group (group 1)
    (let ((fiber (spawn (group) 1)))
      (join fiber)
      (signals sb-thread:interrupt-thread-error (terminate-fiber fiber))
      (signals sb-thread:interrupt-thread-error (interrupt-fiber fiber #'list))
      (signals sb-thread:interrupt-thread-error (sb-thread:terminate-thread fiber))
      (signals sb-thread:interrupt-thread-error (sb-thread:interrupt-thread fiber #'list))
      (is (= 1 (join fiber))))))

(test terminate-oneself
  (on-carriers (n)
    (let ((cleaned nil))
      (is (eq :abort (with-group (group n)
                       (wait-for-end (spawn (group)
                                       (unwind-protect
                                            (progn (terminate-fiber (current-fiber))
                                                   (fiber-park))
                                         (setf cleaned t)))))))
      (is (eq t cleaned)))))

;;; Prevents: an end in the middle of what WITHOUT-INTERRUPTS protects.
(test terminate-without-interrupts
  (on-carriers (n)
    (with-group (group n)
      (let* ((trace '())
             (fiber (spawn (group)
                      (sb-sys:without-interrupts
                        (push :in trace)
                        (fiber-park)
                        (push :still-in trace))
                      (fiber-yield)
                      (push :out trace))))
        (wait-until-parked fiber)
        (terminate-fiber fiber)
        (loop repeat 20 do (sb-thread:thread-yield))
        (is (equal '(:in) trace))
        (fiber-unpark fiber)
        (is (eq :abort (wait-for-end fiber)))
        (is (equal '(:still-in :in) trace))))))

(test terminate-many
  (on-carriers (n)
    (with-group (group n)
      (let* ((cleaned (list 0))
             (fibers (loop repeat 1000
                           collect (spawn (group)
                                     (unwind-protect (fiber-park)
                                       (sb-ext:atomic-incf (car cleaned)))))))
        (mapc #'wait-until-parked fibers)
        (mapc #'terminate-fiber fibers)
        (is (every (lambda (fiber) (eq :abort (wait-for-end fiber))) fibers))
        (is (= 1000 (car cleaned)))))))

;;;; Interruptions

;;; Prevents: functions that are called elsewhere, twice or never; a wait that ends early because of them.
(test interruptions
  (on-carriers (n)
    (with-group (group n)
      (let* ((trace '())
             (fiber (wait-until-parked (spawn (group) (fiber-park) :done))))
        (dotimes (i 10)
          (let ((i i))
            (interrupt-fiber fiber (lambda () (push (list i (current-fiber)) trace)))))
        (loop until (= 10 (length trace)) do (sb-thread:thread-yield))
        (is (equal (loop for i below 10 collect (list i fiber)) (reverse trace)))
        (is (eq :parked (fiber-state (wait-until-parked fiber))))
        (sb-thread:interrupt-thread fiber (lambda () (push :thread trace)))
        (loop until (= 11 (length trace)) do (sb-thread:thread-yield))
        (fiber-unpark fiber)
        (is (eq :done (join fiber)))))))

(test interruptions-that-park-or-exit
  (on-carriers (n)
    (with-group (group n)
      (let ((fiber (wait-until-parked (spawn (group) (catch 'tag (fiber-park))))))
        (interrupt-fiber fiber (lambda () (sleep 1/1000) (throw 'tag :thrown)))
        (is (eq :thrown (join fiber))))
      (let ((fiber (wait-until-parked (spawn (group) (handler-case (sleep 3600)
                                                       (expected-error () :handled))))))
        (interrupt-fiber fiber (lambda () (fiber-yield) (error 'expected-error)))
        (is (eq :handled (join fiber))))
      (let ((fiber (wait-until-parked (spawn (group) (fiber-park)))))
        (is (eq :abort (quietly
                         (interrupt-fiber fiber (lambda () (error 'expected-error)))
                         (wait-for-end fiber))))))))

(test interrupt-before-the-start
  (on-carriers (n)
    (with-group (group n)
      (let* ((trace '())
             (fiber (make-fiber (lambda () (push :body trace) :done))))
        (interrupt-fiber fiber (lambda () (push :interruption trace)))
        (is (eq :done (join (submit-fiber group fiber))))
        (is (equal '(:body :interruption) trace))))))

(test interrupt-waiters-for-locks
  (on-carriers (n)
    (with-group (group n)
      (let* ((mutex (sb-thread:make-mutex)) (count (list 0))
             (owner (spawn (group) (sb-thread:with-mutex (mutex) (fiber-park))))
             (fibers (progn (wait-until-parked owner)
                            (loop repeat 20
                                  collect (wait-until-parked
                                           (spawn (group) (sb-thread:with-mutex (mutex) :done)))))))
        (dolist (fiber fibers)
          (interrupt-fiber fiber (lambda () (fiber-yield) (sb-ext:atomic-incf (car count)))))
        (loop until (= 20 (car count)) do (sb-thread:thread-yield))
        (fiber-unpark owner)
        (is (equal (make-list 20 :initial-element :done) (join-all fibers)))))))

;;;; The end of a group

(test finish-with-abort
  (on-carriers (n)
    (let ((group (start-fibers nil :carrier-count n))
          (cleaned (list 0)))
      (let ((fibers (append (all-ways-to-park group cleaned)
                            (loop repeat 50 collect (spawn (group) (loop (fiber-yield)))))))
        (is (eq nil (finish-fibers group :timeout 1/100)))
        (is (eq t (finish-fibers group :abort t :timeout *patience*)))
        (is (notany #'fiber-alive-p fibers))
        (is (= (- (length fibers) 50) (car cleaned)))
        (is (eq t (fiber-group-done-p group)))))))

;;; A fiber may make another just while all are being ended. Prevents: one that is forgotten.
(test finish-with-abort-while-fibers-are-made
  (on-carriers (n)
    (loop repeat 10
          do (let ((group (start-fibers nil :carrier-count n)))
               (spawn (group) (handler-case (loop repeat 1000
                                                  do (spawn (group) (fiber-park))
                                                     (fiber-yield)
                                                  finally (fiber-park))
                                (sb-thread:thread-error () nil)))
               (spawn (group) (unwind-protect (fiber-park)
                                (handler-case (spawn (group) (sleep 3600))
                                  (error () nil))))
               (loop repeat 20 do (sb-thread:thread-yield))
               (unless (finish-fibers group :abort t :timeout *patience*)
                 (fail "~D fibers were not ended: ~S" (length (list-all-fibers)) (describe-fibers))
                 (finish-fibers group :abort t :timeout 5)
                 (return))))
    (pass)))

(test finish-without-abort
  (on-carriers (n)
    (let* ((group (start-fibers nil :carrier-count n))
           (fiber (spawn (group) (fiber-park) 1)))
      (is (eq nil (finish-fibers group :timeout 0)))
      (is (= 2 (join (spawn (group) 2))))
      (fiber-unpark fiber)
      (is (eq t (finish-fibers group :timeout *patience*)))
      (is (= 1 (join fiber)))
      (is (eq t (finish-fibers group))))))

(test finish-an-idle-group
  (on-carriers (n :migration '(nil))
    (loop repeat 20
          do (is (eq t (finish-fibers (start-fibers nil :carrier-count n)))))))

;;; Call ARRIVE before FUNCTION, a symbol, whenever that is called in BODY.
(defmacro with-call-before ((function arrive) &body body)
  `(progn
     (sb-int:encapsulate ,function 'test (lambda (f &rest arguments)
                                           (apply ,arrive arguments)
                                           (apply f arguments)))
     (unwind-protect (progn ,@body)
       (sb-int:unencapsulate ,function 'test))))

;;; Prevents: a fiber that comes when the finisher has found nobody alive, and is lost.
(test submit-when-nobody-is-alive
  (on-carriers (n)
    (let ((group (start-fibers nil :carrier-count n))
          (fiber nil))
      (with-call-before ('sb-fiber::close-if-empty
                         (lambda (group)
                           (unless fiber (setf fiber (spawn (group) (fiber-yield) :done)))))
        (is (eq t (finish-fibers group :timeout *patience*))))
      (is (eq :done (join fiber)))
      (signals sb-thread:thread-error (spawn (group) 1)))))

(defun submit-until-refused (group)
  "Return a fiber that was accepted and has not run, or NIL."
  (handler-case (loop (let ((fiber (submit-fiber group (make-fiber (constantly t)))))
                        (unless (fiber-join fiber :timeout *patience* :default nil)
                          (return fiber))))
    (sb-thread:thread-error () nil)))

(test submit-until-refused
  (on-carriers (n)
    (loop repeat 20
          do (let* ((group (start-fibers nil :carrier-count n))
                    (thread (make-thread #'submit-until-refused :arguments (list group))))
               (sb-thread:thread-yield)
               (is (eq t (finish-fibers group :timeout *patience*)))
               (is (null (join-thread thread)))))))

;;; A fiber that was not accepted is as new.
(test submit-again-after-refusal
  (let ((group (start-fibers nil :carrier-count 1))
        (fiber (make-fiber (constantly 1))))
    (finish-fibers group)
    (signals sb-thread:thread-error (submit-fiber group fiber))
    (is (eq :new (fiber-state fiber)))
    (with-group (other 1)
      (is (= 1 (join (submit-fiber other fiber)))))))

(defun carrier-threads-of (group)
  (mapcar #'sb-fiber::carrier-thread (sb-fiber::fiber-group-carriers group)))

;;; Prevents: pollers that nobody frees; a second call that says it is done while carriers run.
(test finish-again-after-unwinding
  (on-carriers (n)
    (let* ((pollers (pollers-in-use))
           (group (start-fibers nil :carrier-count n))
           (entered (make-semaphore))
           (leave (make-semaphore))
           (carrier (first (carrier-threads-of group)))
           (finisher nil))
      ;; It does not end while it executes this.
      (sb-thread:interrupt-thread carrier (lambda ()
                                            (signal-semaphore entered)
                                            (wait-on-semaphore leave)))
      (wait-on-semaphore entered)
      (setf finisher (make-thread #'finish-fibers :arguments (list group)))
      (loop until (eq (sb-fiber::fiber-group-state group) :stopped)
            do (sb-thread:thread-yield))
      (sb-thread:terminate-thread finisher)
      (is (eq :unwound (join-thread finisher :default :unwound)))
      (is (eq :stopped (sb-fiber::fiber-group-state group)))
      (signal-semaphore leave)
      (is (eq t (finish-fibers group)))
      (is (eq t (finish-fibers group)))
      (is (notany #'sb-thread:thread-alive-p (carrier-threads-of group)))
      (is (= pollers (pollers-in-use)))
      (is (not (member group sb-fiber::*groups*))))))

(test finish-several-times-at-once
  (on-carriers (n)
    (let ((pollers (pollers-in-use)))
      (loop repeat 10
            do (let* ((group (start-fibers (make-fiber #'fiber-yield) :carrier-count n))
                      (threads (loop repeat 4
                                     collect (make-thread #'finish-fibers :arguments (list group)))))
                 (is (equal '(t t t t) (mapcar #'join-thread threads)))
                 (is (notany #'sb-thread:thread-alive-p (carrier-threads-of group)))))
      (is (= pollers (pollers-in-use))))))

;;; A thread that has been joined exists for a moment still. Prevents: carriers, descriptors or pollers that are
;;; left behind.
(test groups-leave-nothing-behind
  (flet ((descriptors () (length (directory "/proc/self/fd/*" :resolve-symlinks nil)))
         (threads () (length (directory "/proc/self/task/*/" :resolve-symlinks nil)))
         (use-group ()
           (let ((group (start-fibers nil :carrier-count 4)))
             (join (spawn (group) (sleep 1/1000)))
             (finish-fibers group))))
    (use-group)
    (let ((descriptors (descriptors)) (threads (threads)))
      (loop repeat 70 do (use-group))
      (is-true (wait-until (<= (descriptors) descriptors)))
      (is-true (wait-until (<= (threads) threads))))))

(test groups-in-fibers
  (on-carriers (n)
    (is (equal '((1 2 3) (1 2 3))
               (in-fibers n 2 (lambda (i)
                                (declare (ignore i))
                                (run-fibers (loop for k from 1 to 3
                                                  collect (let ((k k)) (make-fiber (lambda () (fiber-yield) k))))
                                            :carrier-count 2)))))))

(test run-fibers-signals
  (quietly
    (signals sb-thread:join-thread-error
      (run-fibers (list (make-fiber #'list) (make-fiber (lambda () (error 'expected-error))))
                  :carrier-count 1)))
  (is (equal '() (run-fibers '())))
  (is (equal '(1) (run-fibers (make-fiber (constantly 1)) :carrier-count 1))))

;;;; What one can see

(test states
  (with-group (group 1)
    (let ((fiber (make-fiber (lambda () (fiber-park :reason :lunch) 1) :name "eater")))
      (is (eq :new (fiber-state fiber)))
      (is (search "eater" (princ-to-string fiber)))
      (is (not (member fiber (list-all-fibers))))
      (is (search "has not begun" (with-output-to-string (out)
                                    (print-fiber-backtrace fiber :stream out))))
      (submit-fiber group fiber)
      (wait-until-parked fiber)
      (is (equal '(:parked :lunch) (multiple-value-list (fiber-state fiber))))
      (is (member fiber (list-all-fibers)))
      (is (search "lunch" (string-downcase (princ-to-string fiber))))
      (is (not (member fiber (sb-thread:list-all-threads))))
      (is (search "FIBER-PARK" (with-output-to-string (out)
                                 (print-fiber-backtrace fiber :stream out))))
      (is (eq :running (join (spawn (group) (fiber-state (current-fiber))))))
      (fiber-unpark fiber)
      (join fiber)
      (is (eq :finished (fiber-state fiber)))
      (is (not (member fiber (list-all-fibers))))
      (is (stringp (princ-to-string group)))
      (is (stringp (princ-to-string fiber))))
    (let ((fiber (spawn (group) (fiber-park :reason '(:descriptor . 5)))))
      (wait-until-parked fiber)
      (is (search "5" (princ-to-string fiber)))
      (fiber-unpark fiber))))

;;; Also when the fiber is not mounted, when a collection has moved the value, and from a fiber.
(test symbol-value-in-thread
  (on-carriers (n)
    (with-group (group n)
      (let ((fiber (wait-until-parked (spawn (group) (let ((*print-base* 7) (*print-radix* (list 1)))
                                                       (fiber-park)
                                                       (list *print-base* *print-radix*))))))
        (sb-ext:gc)
        (flet ((value (symbol) (sb-thread:symbol-value-in-thread symbol fiber)))
          (is (eql 7 (value '*print-base*)))
          (is (equal '(1) (value '*print-radix*)))
          (is (equal '(1) (join (spawn (group) (value '*print-radix*)))))
          (setf (sb-thread:symbol-value-in-thread '*print-base* fiber) 8)
          (is (eql 8 (value '*print-base*)))
          (fiber-unpark fiber)
          (is (equal '(8 (1)) (join fiber)))
          (signals error (value '*print-base*)))))))

;;; As for a thread; the fiber that is mounted just then must not notice.
(test interrupt-a-carrier
  (on-carriers (n)
    (with-group-of-same-carriers (group n)
      (let* ((stop nil) (count (list 0))
             (fibers (loop for i below 5
                           collect (let ((i i))
                                     (spawn (group)
                                       (let ((*print-base* (+ 2 i)))
                                         (loop until stop do (fiber-yield))
                                         *print-base*)))))
             (carriers (remove-if-not #'sb-thread:thread-alive-p
                                      (mapcar #'sb-fiber::carrier-thread
                                              (sb-fiber::fiber-group-carriers group)))))
        (dolist (carrier carriers)
          (sb-thread:interrupt-thread carrier (lambda () (sb-ext:atomic-incf (car count)))))
        (loop repeat 20 do (sb-thread:thread-yield))
        (setf stop t)
        (is (equal '(2 3 4 5 6) (join-all fibers)))
        (is (<= (car count) (length carriers)))))))

;;;; Scripts, the REPL, and images

(test script
  (uiop:with-temporary-file (:pathname file :stream stream :type "lisp" :direction :output)
    (write-string "(princ (sb-fiber:run-fibers
                            (loop for i below 3
                                  collect (let ((i i))
                                            (sb-fiber:make-fiber (lambda () (sleep 1/100) i))))
                            :carrier-count 2))
                   (sb-fiber:start-fibers (sb-fiber:make-fiber (lambda () (sleep 3600))))"
                  stream)
    :close-stream
    (multiple-value-bind (code output)
        (call-in-child (list "--script" (sb-ext:native-namestring file)) :wrapper '("timeout" "20"))
      (is (= 0 code))
      (is (string= "(0 1 2)" (string-trim '(#\Newline) output))))))

(test repl
  (multiple-value-bind (code output)
      (call-in-child '("--noprint")
                     :wrapper '("timeout" "20")
                     :input "(defvar *g* (sb-fiber:start-fibers nil :carrier-count 2))
                             (defvar *f* (sb-fiber:submit-fiber *g* (sb-fiber:make-fiber (lambda () (sleep 1/10) 42))))
                             (print (sb-fiber:fiber-join *f*))
                             (defvar *h* (sb-fiber:submit-fiber *g* (sb-fiber:make-fiber (lambda () (sleep 3600)))))
                             (print :last)
                             (terpri)
                             (sb-ext:exit :code 5)
                             ")
    (is (= 5 code))
    (is (search "42" output))
    (is (search "LAST" output))))

(defun save-image (file &rest forms)
  "Save an image in a child that executes FORMS before."
  (call-in-child
   (list "--eval" *child-package* "--eval"
         (printed `(progn
                     ,@forms
                     (sb-ext:save-lisp-and-die
                      ,(sb-ext:native-namestring file)
                      :executable t
                      :toplevel (lambda ()
                                  (print (run-fibers
                                          (loop for i below 3
                                                collect (let ((i i))
                                                          (make-fiber (lambda () (sleep 1/100) i))))
                                          :carrier-count 2))
                                  (terpri)
                                  (sb-ext:exit :code 6))))))
   :wrapper '("timeout" "60")))

;;; Prevents: contexts, tables or pollers of the process that saved the image, in the one that it starts.
(test saved-image
  (uiop:with-temporary-file (:pathname file)
    (multiple-value-bind (code output)
        (save-image file '(run-fibers (list (make-fiber (lambda () (sleep 1/100)))) :carrier-count 2)
                    '(let ((group (start-fibers nil :carrier-count 2)))
                      (fiber-join (submit-fiber t (make-fiber #'list)))
                      (finish-fibers group)))
      (is (= 0 code) "~A" output)
      (let* ((text (make-string-output-stream))
             (process (sb-ext:run-program file '() :output text :error :output)))
        (is (= 6 (sb-ext:process-exit-code process)))
        (is (search "(0 1 2)" (get-output-stream-string text)))))))

(test image-with-carriers-is-not-saved
  (uiop:with-temporary-file (:pathname file)
    (multiple-value-bind (code output)
        (save-image file '(start-fibers (make-fiber (lambda () (sleep 3600)))))
      (is (/= 0 code))
      (is (search "FINISH-FIBERS" output) "~A" output))))
