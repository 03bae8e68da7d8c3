;;;; Other people's tests, each run in a thread and in fibers

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(defpackage "IN-FIBERS"
  (:use "COMMON-LISP" "SB-EXT" "SB-FIBER"))

(in-package "IN-FIBERS")

;;; A test is run in a thread first. If it passes there, it has to pass in a fiber, in each mode of
;;; *MODES*; if it does not, it is reported, and nothing is asked of fibers. What a test need not
;;; do in a fiber, and why, is in exclusions.lisp.

(defstruct test
  (name nil :type string :read-only t)
  ;; Returns NIL if the test has passed, or a string that says what went wrong.
  (function nil :type function :read-only t))

(defstruct (mode (:constructor make-mode (name carrier-count all-fibers-p)))
  (name nil :type string :read-only t)
  (carrier-count nil :type integer :read-only t)
  ;; Is a fiber made where the test asks for a thread?
  (all-fibers-p nil :type boolean :read-only t))

(defparameter *modes*
  (loop for (word all-fibers-p) in '(("body" nil) ("all" t))
        append (loop for n in '(1 2 16)
                     collect (make-mode (format nil "~A-~D" word n) n all-fibers-p)))
  "BODY-N: the test is in a fiber of N carriers, and the threads that it makes are threads. ALL-N:
those are fibers as well.")

(defparameter *patience*
  (parse-integer (or (posix-getenv "IN_FIBERS_PATIENCE") "60"))
  "Seconds after which a test is said to hang; in fibers, if it took less than a tenth in a
thread.")

;;; EVAL compiles, and the compiler wants more than a fiber usually has.
(defparameter *stack-size* (* 2 1024 1024))

;;;; fibers in place of threads

(defvar *all-fibers-p* nil
  "True while the threads that fibers make are to be fibers. Not to be bound: all threads look at
it.")

(defun make-thread-or-fiber (make-thread function &rest keys &key name arguments ephemeral)
  (declare (ignore ephemeral))
  (let ((me (current-fiber)))
    (if (and *all-fibers-p* me)
        (submit-fiber (sb-fiber::fiber-group me)
                      (make-fiber (call-with-arguments function arguments)
                                  :name name :stack-size *stack-size*))
        (apply make-thread function keys))))

(defun call-with-arguments (function arguments)
  ;; What is no list is an argument, and an improper list is an error of the caller.
  (let ((arguments (if (listp arguments) (apply #'list arguments) (list arguments))))
    (lambda () (apply function arguments))))

(sb-int:encapsulate 'sb-thread:make-thread 'in-fibers #'make-thread-or-fiber)

;;;; running one test

(defun call-test (test)
  "Run TEST. Return NIL, or what went wrong."
  (let ((problem nil))
    (handler-case (setf problem (funcall (test-function test)))
      (serious-condition (condition)
        (setf problem (format nil "~S: ~A" (type-of condition) condition))))
    problem))

(defun outcome (result problem)
  (case problem
    (:timeout "hangs")
    (:abort "was aborted")
    (t result)))

(defun run-in-thread (test)
  (let ((thread (sb-thread:make-thread #'call-test :arguments (list test))))
    (multiple-value-bind (result problem)
        (sb-thread:join-thread thread :default nil :timeout *patience*)
      (when (eq problem :timeout)
        (ignore-errors (sb-thread:terminate-thread thread)))
      (outcome result problem))))

(defun run-in-fiber (test mode)
  (setf *all-fibers-p* (mode-all-fibers-p mode))
  (let* ((fiber (make-fiber (lambda () (call-test test))
                            :name (test-name test) :stack-size *stack-size*))
         (group (start-fibers fiber :carrier-count (mode-carrier-count mode))))
    (multiple-value-bind (result problem) (fiber-join fiber :default nil :timeout *patience*)
      (when (eq problem :timeout) (report-group group test mode))
      (setf *all-fibers-p* nil)
      (let ((left (end-group group)))
        (or (outcome result problem) left)))))

(defun end-group (group)
  "Stop GROUP. Threads that a test has left behind are its own affair; here they may be fibers."
  (unless (or (finish-fibers group :timeout 1/10)
              (finish-fibers group :timeout 20 :abort t))
    (format nil "these fibers cannot be ended:~{ ~S~}" (fibers-of group))))

(defun fibers-of (group)
  (remove group (list-all-fibers) :key #'sb-fiber::fiber-group :test-not #'eq))

(defun report-group (group test mode)
  "Print what the fibers of GROUP are doing, of which one does not end."
  (format t "~&~A hangs (~A). These fibers are left:~%" (test-name test) (mode-name mode))
  (dolist (fiber (fibers-of group))
    (format t "~&~S~%" fiber)
    ;; It may compute, or wait where it cannot be interrupted: then nobody can tell.
    (let ((thread (sb-thread:make-thread
                   (lambda ()
                     (ignore-errors     ; it may have ended meanwhile
                       (print-fiber-backtrace fiber :stream *standard-output* :count 40))))))
      (when (eq :timeout (nth-value 1 (sb-thread:join-thread thread :default nil :timeout 2)))
        (format t "(no backtrace: it does not park)~%"))))
  (finish-output))

;;;; the harness itself

(defun check-harness ()
  "Signal an error if a test could pass without reason."
  (flet ((run (mode function &optional (*patience* *patience*))
           (let ((*standard-output* (make-broadcast-stream)))
             (run-in-fiber (make-test :name "harness" :function function) mode)))
         (in-another-thread ()
           (unless (sb-thread:join-thread (sb-thread:make-thread #'current-fiber))
             "is no fiber")))
    (dolist (mode *modes*)
      (assert (null (run mode (lambda () (unless (current-fiber) "is no fiber")))))
      (assert (stringp (run mode (lambda () "fails"))))
      (assert (stringp (run mode (lambda () (error "fails")))))
      (assert (stringp (run mode (lambda () (sb-thread:abort-thread)))))
      (assert (stringp (run mode (lambda () (fiber-park)) 1/5)))
      (assert (eq (mode-all-fibers-p mode) (null (run mode #'in-another-thread)))))))

;;;; running a suite

(defvar *exclusions* '()
  "What is not run: lists of a suite, a test or a list of tests or T, modes or T, and the reason.")

(defun matches-p (thing designator)
  (or (eq designator t)
      (member thing (if (listp designator) designator (list designator)) :test #'string=)))

(defun reason-to-exclude (suite test mode)
  (unless (posix-getenv "IN_FIBERS_EXCLUDE_NOTHING")
    (loop for (a-suite tests modes reason) in *exclusions*
          when (and (string= a-suite suite)
                    (matches-p (test-name test) tests)
                    (matches-p (mode-name mode) modes))
            return reason)))

;;; Some tests assert what time something takes, and fail on a busy machine. What hangs is not tried
;;; again.
(defun run-in-fiber-twice (test mode)
  (let ((problem (run-in-fiber test mode)))
    (cond ((or (null problem) (string= problem "hangs")) problem)
          (t (note "~A (~A) is tried again, since it failed: ~A"
                   (test-name test) (mode-name mode) problem)
             (run-in-fiber test mode)))))

(defun run-test (suite test modes)
  "Run TEST in a thread and in MODES. Return how often it has passed in fibers, and how often not."
  (let ((modes (remove-if (lambda (mode) (excluded-p suite test mode)) modes))
        (*patience* *patience*)
        (passed 0)
        (failed 0))
    (when modes
      (let* ((start (get-internal-real-time))
             (problem (run-in-thread test)))
        ;; Some are slow on a busy machine.
        (setf *patience* (max *patience* (* 10 (seconds-since start))))
        (when problem
          (note "~A fails in a thread as well, and is not counted: ~A" (test-name test) problem)
          (setf modes '()))))
    (dolist (mode modes)
      (let ((problem (run-in-fiber-twice test mode)))
        (cond (problem
               (incf failed)
               (note "FAILURE: ~A (~A) ~A" (test-name test) (mode-name mode) problem))
              (t (incf passed)))))
    (values passed failed)))

(defun excluded-p (suite test mode)
  (let ((reason (reason-to-exclude suite test mode)))
    (when reason
      (note "~A is not run (~A): ~A" (test-name test) (mode-name mode) reason)
      t)))

(defun seconds-since (start)
  (/ (- (get-internal-real-time) start) internal-time-units-per-second))

(defun note (control &rest arguments)
  (format t "~&~?~%" control arguments)
  (finish-output))

(defun run-tests (suite tests &key (modes *modes*))
  "Run TESTS, and exit."
  (check-harness)
  (let ((passed 0) (failed 0))
    (dolist (test tests)
      (let ((start (get-internal-real-time)))
        (multiple-value-bind (good bad) (run-test suite test modes)
          (incf passed good)
          (incf failed bad))
        (note "~A: ~,1F s" (test-name test) (seconds-since start))))
    (when (= 0 passed failed)
      (note "No test of ~A has been run in a fiber." suite)
      (setf failed 1))
    (note "~A: ~D passed, ~D failed" suite passed failed)
    (exit :code (if (= failed 0) 0 1) :abort t)))
