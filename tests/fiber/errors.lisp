;;;; What goes wrong in a fiber, or is asked of it: errors that nothing handles, bad arguments, no
;;;; memory

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
                   (join (spawn (group)
                           (multiple-value-list (fiber-join fiber :default :default))))))
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
                       (sb-fiber::fiber-failed (condition)
                         (sb-fiber::fiber-failed-cause condition)))
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
    (is (eq :abort (quietly
                     (wait-for-end (failing-fiber group (lambda () (error 'unprintable-error)))))))
    (is (eq :abort (quietly
                     (wait-for-end
                      (spawn (group :initial-bindings (list (cons '*error-output*
                                                                  (make-string-input-stream ""))))
                        (error 'expected-error))))))
    (is (= 3 (join (spawn (group) (+ 1 2)))))))

(define-condition error-with-report (error)
  ((function :initarg :function :reader report-function))
  (:report (lambda (condition stream)
             (funcall (report-function condition) condition stream))))

(declaim (notinline recurse-for-ever))
(defun recurse-for-ever (n)
  (1+ (recurse-for-ever (1+ n))))

(defstruct (endless (:constructor %make-endless ())) next)
(defmethod print-object ((object endless) stream)
  (print-unreadable-object (object stream :type t)
    (prin1 (endless-next object) stream)))

(defun make-endless ()
  (let ((object (%make-endless)))
    (setf (endless-next object) object)))

(defparameter *reports*
  (list (lambda (condition stream) (prin1-to-string condition) (format stream "~A" condition))
        (lambda (condition stream) (declare (ignore condition stream)) (recurse-for-ever 1))
        (lambda (condition stream) (declare (ignore stream)) (error condition))
        (lambda (condition stream) (declare (ignore condition stream)) (error 'serious-condition))
        (lambda (condition stream) (declare (ignore condition stream)) (error 'storage-condition))
        (lambda (condition stream) (declare (ignore condition stream)) (break "in a report"))
        (lambda (condition stream) (declare (ignore stream)) (invoke-debugger condition))
        (lambda (condition stream) (declare (ignore condition)) (prin1 (make-endless) stream)))
  "Ways in which the report of an error does not end.")

(defun fail-with-mutex (mutex function)
  "Call FUNCTION while MUTEX is taken."
  (with-mutex (mutex) (funcall function)))

;;; Prevents: a fiber that neither ends nor is unwound, and keeps its mutex, since the report of an
;;; error that nothing handled enters the debugger where that is disabled.
(test reports-that-do-not-end
  (on-carriers (n)
    (with-group (group n)
      (dolist (report *reports*)
        (let* ((mutex (make-mutex)) (fiber nil)
               (condition (make-condition 'error-with-report :function report)))
          (with-reports (text)
              (wait-for-end
               (setf fiber (failing-fiber group
                                          (lambda ()
                                            (fail-with-mutex mutex
                                                             (lambda () (error condition)))))))
            (is (search "ERROR-WITH-REPORT" text) "~A" text))
          (is (not (fiber-alive-p fiber)))
          (is (null (mutex-owner mutex)))
          (is (eq condition (handler-case (fiber-join fiber :timeout 0)
                              (fiber-failed (failed) (fiber-failed-cause failed))))))))))

;;; Nobody else gets the error of a report.
(test reports-that-do-not-end-and-handlers
  (with-group (group 1)
    (let ((handled '()))
      (dolist (report *reports*)
        (quietly
          (wait-for-end (failing-fiber group
                                       (lambda ()
                                         (handler-bind ((serious-condition
                                                          (lambda (c)
                                                            (push (type-of c) handled))))
                                           (error 'error-with-report :function report)))))))
      (is (equal (make-list (length *reports*) :initial-element 'error-with-report) handled)))))

(test serious-conditions-and-warnings
  (with-group (group 1)
    (is (eq :abort (quietly
                     (wait-for-end (failing-fiber group (lambda () (error 'serious-condition)))))))
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

;;; As in a thread: a hook may wait, and leave for where it was made.
(test debugger-hook-that-parks-and-exits
  (on-carriers (n)
    (with-group (group n)
      (dolist (variable '(sb-ext:*invoke-debugger-hook* *debugger-hook*))
        (dolist (park (list #'pause (lambda () (sleep 1/1000))
                            (lambda () (loop repeat 20 do (fiber-yield)))
                            (lambda () (call-blocking #'list))))
          (dolist (failing (list (lambda () (error 'expected-error))
                                 (lambda () (car (opaque 1)))
                                 (lambda () (funcall (opaque 'no-such-function)))
                                 (lambda () (sb-sys:without-interrupts (error 'expected-error)))
                                 (lambda () (call-blocking (lambda () (error 'expected-error))))
                                 (lambda () (recurse-for-ever 1))))
            (is (eq :returned
                    (quietly
                      (join (spawn (group)
                              (block nil
                                (progv (list 'sb-ext:*invoke-debugger-hook* variable)
                                    (list nil (lambda (condition hook)
                                                (declare (ignore condition hook))
                                                (funcall park)
                                                (return :returned)))
                                  (funcall failing)))))))
                "~S ~S" variable failing)))))))

;;;; What a report says

(test report-of-a-failure
  (let ((condition (make-condition 'fiber-failed :thread (make-fiber #'list)
                                   :cause (make-condition 'expected-error)
                                                 :problem :abort)))
    (dolist (*print-pretty* '(nil t))
      (let ((text (princ-to-string condition)))
        (is (search (format nil "ended with~%  an error that") text) "~A" text)))))

(defun fail-in-the-call (n)
  (when (opaque n) (error 'expected-error))
  1)

(defun call-that-fails ()
  (opaque (call-blocking (lambda () (1+ (fail-in-the-call 5))))))

;;; Prevents: the backtrace of an error that does not tell where the error was.
(test report-of-a-failed-call
  (with-group (group 1)
    (with-reports (text) (wait-for-end (spawn (group) (call-that-fails)))
      (let ((there (search "FAIL-IN-THE-CALL 5)" text))
            (here (search "CALL-THAT-FAILS" text :from-end t)))
        (is (and there here (< there here)) "~A" text)
        (is (not (search "RUN-POOL-THREAD" text)) "~A" text)))
    ;; Another error after one that was handled has nothing to do with it.
    (with-reports (text) (wait-for-end (spawn (group)
                                         (ignore-errors (call-that-fails))
                                         (error 'expected-error)))
      (is (not (search "FAIL-IN-THE-CALL" text)) "~A" text))))

(defun error-with-few-descriptors (form)
  (child-result `(handler-case ,form
                   (error (condition) (princ condition)))
                :wrapper '("sh" "-c" "ulimit -n 15; exec timeout 20 \"$@\"" "sh")))

(test what-ran-out
  (let ((text (error-with-few-descriptors '(start-fibers nil :carrier-count 40))))
    (is (search "ulimit -n" text) "~A" text)
    (is (search "Too many open files" text) "~A" text)))

;;;; Bad arguments

(test bad-arguments-of-make-fiber
  (signals type-error (make-fiber 42))
  (signals type-error (make-fiber nil))
  (signals type-error (make-fiber "a string"))
  (signals undefined-function (make-fiber 'no-such-function))
  (dolist (size '(-1 0 1 65535 1.5 "64" nil #.(ash 1 40)))
    (signals type-error (make-fiber #'list :stack-size size)))
  (dolist (bindings '(42 ((1 . 2)) (nil) (:a) ((*print-base* . 2) . 3) ((nil . 1)) ((:a . 1))))
    (signals type-error (make-fiber #'list :initial-bindings bindings)))
  (signals type-error (make-fiber #'list :arguments '(1 . 2)))
  (signals error (make-fiber #'list :name 42)))

(test bad-arguments-of-start-fibers
  (dolist (count '(0 -1 "2" 1.5 1000))
    (signals type-error (finish-fibers (start-fibers nil :carrier-count count))))
  (signals type-error (finish-fibers (start-fibers nil :poller :no-such-poller)))
  (dolist (slice '(0 -1 "1" 1/10000 3601 :short))
    (signals type-error (finish-fibers (start-fibers nil :time-slice slice))))
  (signals type-error (start-fibers 42))
  (signals type-error (start-fibers '(42)))
  (signals type-error (run-fibers 42))
  (signals type-error (run-fibers (list (make-fiber #'list) 42)))
  ;; no carriers are left
  (is (null sb-fiber::*groups*)))

(test bad-values-of-settings
  (loop for (variable . values) in '((*stuck-carrier-time* 0 -1 3601 :never)
                                     (*spare-carrier-limit* 0 129 1.0 nil)
                                     (*blocking-thread-limit* 0 10001 1.0 nil)
                                     (*blocked-carrier-action* :note t)
                                     (*cached-stack-bytes* -1 1.0 nil))
        do (let ((usual (symbol-value variable)))
             (dolist (value values)
               (signals type-error (setf (symbol-value variable) value)))
             (is (eql usual (symbol-value variable))))))

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

;;; Prevents: a wait for a fiber that nobody will ever run.
(test join-of-a-fiber-that-was-not-submitted
  (let ((fiber (make-fiber (constantly 1))))
    (dolist (join (list (lambda () (fiber-join fiber))
                        (lambda () (fiber-join fiber :timeout 0))
                        (lambda () (fiber-join fiber :default 1 :timeout 1/100))
                        (lambda () (sb-thread:join-thread fiber :timeout 1/100))
                        (lambda () (sb-thread:join-thread fiber :default 1 :timeout 1/100))))
      (flet ((misused-p ()
               (handler-case (progn (funcall join) nil)
                 (sb-thread:join-thread-error () nil)
                 (sb-thread:thread-error (condition)
                   (and (eq fiber (sb-thread:thread-error-thread condition))
                        (search "SUBMIT-FIBER" (princ-to-string condition))
                        t)))))
        (is (eq t (join-thread (make-thread #'misused-p) :timeout *patience* :default :hangs)))
        (is (eq t (in-fiber () (misused-p))))))
    ;; It is as new.
    (with-group (group 1)
      (is (= 1 (join (submit-fiber group fiber)))))
    (is (= 1 (join fiber))))
  (let ((fiber (make-fiber (constantly 1))))
    (terminate-fiber fiber)
    (is (eq :abort (wait-for-end fiber)))))

;;; While another thread submits the fiber it is joined, or that is an error.
(test join-while-submitted
  (on-carriers (n)
    (with-group (group n)
      (loop repeat 200
            do (let* ((fiber (make-fiber (constantly 1)))
                      (joiner (make-thread (lambda ()
                                             (handler-case (fiber-join fiber :timeout *patience*)
                                               (sb-thread:join-thread-error () :hangs)
                                               (sb-thread:thread-error () 1))))))
                 (submit-fiber group fiber)
                 (unless (eql 1 (join-thread joiner))
                   (fail "A fiber that was submitted is not joined."))
                 (join fiber))))
    (pass)))

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

;;;; Memory that is not to be had

;;; No stack to be had: the fiber can be submitted again later. Handlers run with interrupts on.
(test no-room-for-stacks
  (is (string= "(:UNAVAILABLE 1 2)"
               (child-result
                '(let* ((group (start-fibers nil :carrier-count 1))
                        (fibers (list (submit-fiber group (make-fiber (lambda () (fiber-park) 1)))))
                        (last nil))
                  (prin1
                   (list* (block nil
                            (handler-bind ((sb-fiber::fiber-stack-unavailable
                                             (lambda (condition)
                                               (declare (ignore condition))
                                               (when sb-sys:*interrupts-enabled*
                                                 (return :unavailable)))))
                              (loop (setf last (make-fiber (lambda () (fiber-park))
                                                           :stack-size (* 64 1024 1024)))
                                    (submit-fiber group last)
                                    (push last fibers))))
                    (progn (fiber-unpark (first (last fibers)))
                           (list (fiber-join (first (last fibers)))
                                 (fiber-join (submit-fiber group
                                                           (make-fiber (lambda () 2)))))))))
                :wrapper '("sh" "-c" "ulimit -v 12000000; exec timeout 20 \"$@\"" "sh")))))

(test heap-exhausted
  (let ((result nil))
    (with-reports (text)
        (setf result (in-fiber () (handler-case (make-array (expt 10 11))
                                    (storage-condition () :exhausted))))
      (is (stringp text)))
    (is (eq :exhausted result))))
