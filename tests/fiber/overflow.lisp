;;;; Stacks that are used up: an error of the fiber that did it, which can be handled, more than
;;;; once

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/guards.lisp" *load-truename*))

(def-suite* overflow)

;;;; Ways to use up a stack

(declaim (notinline keep recurse recurse-with-frames recurse-with-bindings recurse-with-aliens))
(defun keep (&rest ignore) (declare (ignore ignore)) 1)

(defvar *depth*)

(defun recurse ()
  (incf *depth*)
  (+ (recurse) (keep)))

(defun recurse-with-frames (words)
  "Frames of a size that is chosen, so that the stack ends at different places in them."
  (let ((vector (make-array words :initial-element 0)))
    (declare (dynamic-extent vector))
    (+ (recurse-with-frames words) (keep vector))))

(defun recurse-with-conses (list)
  (+ (recurse-with-conses (list* list (make-array 3) (make-list 5))) (keep list)))

(defun recurse-with-large-objects (n)
  "The allocator is in foreign code, inside of pseudo-atomic, when the stack ends."
  (+ (recurse-with-large-objects n) (keep (make-array n))))

(defun recurse-with-rest (&rest arguments)
  (+ (apply #'recurse-with-rest (cons 1 (if (cddddr arguments) '() arguments))) (keep arguments)))

(defparameter *symbols*
  (loop repeat 40
        collect (let ((symbol (gensym "VARIABLE")))
                  (proclaim `(special ,symbol))
                  symbol)))

(defun recurse-with-bindings ()
  (progv *symbols* '(1 2 3)
    (+ (recurse-with-bindings) (keep))))

(defun recurse-with-aliens (n)
  (sb-alien:with-alien ((array (array sb-alien:char 2048)))
    (setf (sb-alien:deref array 0) 1
          (sb-alien:deref array 2047) 1)
    (+ (recurse-with-aliens (1+ n)) (sb-alien:deref array 0))))

(defparameter *ways*
  `((sb-kernel::control-stack-exhausted . ,(lambda () (let ((*depth* 0)) (recurse))))
    (sb-kernel::control-stack-exhausted . ,(lambda () (recurse-with-frames 10)))
    (sb-kernel::control-stack-exhausted . ,(lambda () (recurse-with-frames 57)))
    (sb-kernel::control-stack-exhausted . ,(lambda () (recurse-with-frames 400)))
    (sb-kernel::control-stack-exhausted . ,(lambda () (recurse-with-conses '())))
    (sb-kernel::control-stack-exhausted . ,(lambda () (recurse-with-large-objects 600)))
    (sb-kernel::control-stack-exhausted . ,(lambda () (recurse-with-rest 1)))
    (sb-kernel::binding-stack-exhausted . ,#'recurse-with-bindings)
    (sb-kernel::alien-stack-exhausted . ,(lambda () (recurse-with-aliens 0))))
  "Functions that use up a stack, and which error they end with.")

(defun exhausted-p (way)
  "T if WAY ends in the error that it should."
  (handler-case (progn (funcall (cdr way)) nil)
    (storage-condition (condition) (typep condition (car way)))))

(defun usual-depth ()
  "How deep a recursion gets, which tells whether the whole stack is there."
  (let ((*depth* 0))
    (handler-case (recurse)
      (storage-condition () *depth*))))

;;;; Overflow, handled

;;; Prevents: the end of the process; a guard that is not raised again.
(test each-way-several-times
  (on-carriers (n :counts '(1 2))
    (dolist (way *ways*)
      (is (equal '(t t t t)
                 (in-fiber (n) (loop repeat 4 collect (exhausted-p way))))
          "~S" way))))

(test one-way-after-another
  (on-carriers (n)
    (is (all-true-p (in-fiber (n)
                      (loop repeat 3
                            append (loop for way in *ways* collect (exhausted-p way))))))))

(test with-parks-in-between
  (on-carriers (n)
    (is (all-true-p
         (in-fibers n 20 (lambda (i)
                           (loop for k below 6
                                 always (progn (fiber-yield)
                                               (exhausted-p (nth (mod (+ i k) (length *ways*))
                                                                 *ways*)))))))
        "~D carriers" n)))

(test in-stacks-of-all-sizes
  (on-carriers (n :counts '(1 2) :migration '(nil))
    (dolist (size (list (* 64 1024) (* 256 1024) (* 2 1024 1024)))
      (with-group (group n)
        (is (all-true-p (join (spawn (group :stack-size size)
                                (loop repeat 2
                                      append (loop for way in *ways* collect (exhausted-p way))))))
            "~D bytes" size)))))

;;; The report is read elsewhere, when the fiber has ended.
(test the-report-says-what-to-enlarge
  (with-group (group 1)
    (dolist (type '(sb-kernel::control-stack-exhausted sb-kernel::binding-stack-exhausted))
      (let ((text (princ-to-string
                   (join (spawn (group :stack-size 131072)
                           (handler-case (funcall (cdr (assoc type *ways*)))
                             (storage-condition (condition) condition)))))))
        (dolist (part '(":STACK-SIZE" "MAKE-FIBER" "*DEFAULT-STACK-SIZE*" "131072"))
          (is (search part text) "~A" text))))))

;;; Prevents: a stack that is smaller after the first overflow, or after it has had another user.
(test same-depth-each-time
  (on-carriers (n :counts '(1 2) :migration '(nil))
    (with-group (group n)
      (let ((depths (loop repeat 3
                          append (join (spawn (group) (loop repeat 3 collect (usual-depth)))))))
        (is (< (- (reduce #'max depths) (reduce #'min depths)) 100) "~S" depths))
      (let ((small (join (spawn (group :stack-size (* 64 1024)) (usual-depth))))
            (large (join (spawn (group :stack-size (* 2 1024 1024)) (usual-depth)))))
        (is (> large (* 20 small)))))))

(test cleanups-run
  (on-carriers (n)
    (is (all-true-p
         (in-fibers n 10 (lambda (i)
                           (keep i)
                           (loop for way in *ways*
                                 always (let ((cleaned nil))
                                          (and (handler-case
                                                   (unwind-protect (funcall (cdr way))
                                                     (fiber-yield)
                                                     (setf cleaned t))
                                                 (storage-condition () t))
                                               cleaned)))))))))

;;; A handler runs on top of what used up the stack: there must be room for it, and it may park.
(test handlers-run-on-the-reserve
  (on-carriers (n)
    (is (all-true-p
         (in-fibers n 10 (lambda (i)
                           (keep i)
                           (loop for way in *ways*
                                 always (block nil
                                          (handler-bind ((storage-condition
                                                           (lambda (condition)
                                                             (fiber-yield)
                                                             (princ-to-string condition)
                                                             (with-output-to-string (out)
                                                               (sb-debug:print-backtrace :stream out
                                                                                         :count 10))
                                                             (fiber-yield)
                                                             (return t))))
                                            (funcall (cdr way)))))))))))

;;; Bindings and data of the frames that remain are what they were.
(test nothing-else-is-lost
  (on-carriers (n)
    (is (all-true-p
         (in-fibers n 10 (lambda (i)
                           (let ((*depth* i) (list (list i i)))
                             (declare (dynamic-extent list))
                             (sb-alien:with-alien ((number sb-alien:int))
                               (setf number i)
                               (loop for way in *ways*
                                     always (and (exhausted-p way)
                                                 (eql *depth* i)
                                                 (equal list (list i i))
                                                 (= number i)
                                                 (notany #'boundp *symbols*)))))))))))

(test in-the-handler-of-a-trap
  (on-carriers (n)
    (is (all-true-p
         (in-fibers n 10 (lambda (i)
                           (keep i)
                           (loop for way in *ways*
                                 always (block nil
                                          (handler-bind ((type-error (lambda (condition)
                                                                       (keep condition)
                                                                       (fiber-yield)
                                                                       (return (exhausted-p way)))))
                                            (car (keep)))))))))))

;;; Prevents: a large object of dynamic extent that reaches beyond the guards.
(test objects-larger-than-the-stack
  (flet ((allocate (n)
           (handler-case (let ((vector (make-array (the fixnum n) :initial-element 0)))
                           (declare (dynamic-extent vector))
                           (keep vector)
                           nil)
             (storage-condition () t))))
    (declare (notinline allocate))
    (is (equal '(nil t nil t t)
               (in-fiber () (mapcar #'allocate '(10 40000 10 100000 10000000)))))))

;;;; Many at once, with others that do something else

(test everywhere-at-once
  (on-carriers (n)
    (with-group (group n)
      (let* ((stop nil)
             (others (loop for i below 10
                           collect (let ((i i))
                                     (spawn (group)
                                       (let ((*depth* i) (list (list i)))
                                         (loop until stop
                                               always (progn (fiber-yield)
                                                             (and (eql *depth* i)
                                                                  (equal list (list i))))))))))
             (fibers (loop for i below 60
                           collect (let ((way (nth (mod i (length *ways*)) *ways*)))
                                     (spawn (group)
                                       (loop repeat 5 always (exhausted-p way)))))))
        (is (all-true-p (join-all fibers)))
        (setf stop t)
        (is (all-true-p (join-all others)))))))

(defun call-while-collecting (function)
  (let* ((stop nil)
         (thread
           (sb-thread:make-thread (lambda ()
                                    (loop until stop do (sb-ext:gc) (sb-thread:thread-yield))))))
    (unwind-protect (funcall function)
      (setf stop t)
      (sb-thread:join-thread thread))))

;;; A collection needs some stack itself, perhaps when there is none.
(test under-collections
  (on-carriers (n)
    (call-while-collecting
     (lambda ()
       (is (all-true-p
            (in-fibers n 20 (lambda (i)
                              (let ((way (nth (mod i (length *ways*)) *ways*)))
                                (loop repeat 5
                                      always (and (exhausted-p way)
                                                  (progn (fiber-yield) t))))))))))))

(defun collect-at-the-bottom (depth)
  (if (= depth 0)
      (progn (sb-ext:gc) 0)
      (+ 1 (collect-at-the-bottom (1- depth)))))

;;; A collection that is asked for where hardly any stack is left, at each depth up to the end.
(test collections-at-the-end-of-the-stack
  (with-group (group 2)
    (let* ((size (* 64 1024))
           (results (join (spawn (group :stack-size size)
                            (loop for depth from 0 below 4000 by 90
                                  collect (handler-case (= depth (collect-at-the-bottom depth))
                                            (storage-condition () :exhausted)))))))
      (is (every (lambda (result) (member result '(t :exhausted))) results))
      (is (eq t (first results)))
      (is (eq :exhausted (first (last results)))))))

;;;; Overflow, not handled

(test unhandled-overflow-ends-the-fiber
  (on-carriers (n :counts '(1 2))
    (dolist (way *ways*)
      (with-group (group n)
        (let ((fiber (quietly (let ((fiber (spawn (group) (funcall (cdr way)))))
                                (fiber-join fiber :default nil :timeout *patience*)
                                fiber))))
          (is (not (fiber-alive-p fiber)))
          (is (typep (handler-case (fiber-join fiber)
                       (sb-fiber::fiber-failed (condition)
                         (sb-fiber::fiber-failed-cause condition)))
                     (car way)))
          (is (= 3 (join (spawn (group) (+ 1 2))))))))))

(defun overflow-in-the-handler (way)
  (handler-bind ((storage-condition (lambda (condition)
                                      (keep condition)
                                      (funcall (cdr way)))))
    (funcall (cdr way))))

;;; The reserve is used up as well: there is no room for anything that the fiber could do. Prevents:
;;; the end of the process; a stack that its next user finds without guards.
(test overflow-in-the-handler-ends-the-fiber
  (on-carriers (n)
    (with-group (group n)
      (let* ((others (loop for i below 10
                           collect (let ((i i)) (spawn (group) (fiber-park) i))))
             (lost (loop repeat 3
                         append (loop for way in (list (first *ways*) (third *ways*) (fifth *ways*))
                                      collect (let ((way way))
                                                (spawn (group) (overflow-in-the-handler way)))))))
        (is (equal (make-list 9 :initial-element :abort)
                   (quietly
                     (loop for fiber in lost
                           collect (nth-value 1
                                              (fiber-join fiber :default nil
                                                          :timeout *patience*))))))
        (is (notany #'fiber-alive-p lost))
        (signals sb-thread:join-thread-error (fiber-join (first lost)))
        ;; on the same stacks
        (is (all-true-p (join-all (loop repeat 20
                                        collect (spawn (group)
                                                  (loop for way in *ways*
                                                        always (and (exhausted-p way)
                                                                    (exhausted-p way))))))))
        (mapc #'fiber-unpark others)
        (is (equal '(0 1 2 3 4 5 6 7 8 9) (join-all others)))))))

(test lost-fibers-under-collections
  (on-carriers (n :migration '(nil))
    (call-while-collecting
     (lambda ()
       (with-group (group n)
         (let ((lost (quietly
                       (loop for fiber in (loop repeat 30
                                                collect (spawn (group)
                                                          (overflow-in-the-handler (first *ways*))))
                             collect (nth-value 1
                                                (fiber-join fiber :default nil
                                                            :timeout *patience*))))))
           (is (equal (make-list 30 :initial-element :abort) lost))
           (is (= 3 (join (spawn (group) (+ 1 2)))))))))))

;;;; Threads keep their own ways

(test threads-overflow-as-ever
  (is (equal '(t t) (sb-thread:join-thread
                     (sb-thread:make-thread
                      (lambda () (loop repeat 2 collect (exhausted-p (first *ways*)))))))))

;;; How many mappings of memory the control stack of FIBER consists of.
(defun mappings-of-stack (fiber)
  (let ((start (sb-thread::thread-control-stack-start fiber))
        (end (sb-thread::thread-control-stack-end fiber)))
    (with-open-file (maps "/proc/self/maps")
      (loop for line = (read-line maps nil)
            while line
            count (multiple-value-bind (from hyphen) (parse-integer line :radix 16 :junk-allowed t)
                    (and (< from end)
                         (> (parse-integer line :start (1+ hyphen) :radix 16 :junk-allowed t)
                            start)))))))

;;; The carrier leaves its handler by a throw, which its return guard does not notice. Prevents: the
;;; guards of the carrier's own stack, which are moved when the world stops, set up on that of the
;;; fiber.
(test carriers-overflow-in-handlers
  (with-group-of-same-carriers (group 1)
    (let* ((overflowed nil) (started (make-flag)) (stop (make-flag))
           (carrier (join (spawn (group) (sb-fiber::carrier-thread sb-fiber::*carrier*)))))
      (sb-thread:interrupt-thread carrier
                                  (lambda () (setf overflowed (exhausted-p (first *ways*)))))
      (is-true (wait-until overflowed))
      (let* ((fiber (computing-fiber (group started) (compute-until stop)))
             (before (mappings-of-stack fiber)))
        (loop repeat 5 do (sb-ext:gc))
        (is (= before (mappings-of-stack fiber)))
        (raise-flag stop)))))

;;; All of this again.
(unless *guard-method*
  (test guard-methods
    (check-with-guard-methods "overflow")))

;;;; At the very end of the stack

(defun control-base ()
  (+ (sb-thread::thread-control-stack-start sb-thread:*current-thread*)
     (sb-alien:extern-alien "fiber_control_reserve" sb-alien:unsigned)))

(defun stack-pointer () (sb-sys:sap-int (sb-vm::current-sp)))

(declaim (notinline call-at-distance))
(defun call-at-distance (distance function)
  "Call FUNCTION with about DISTANCE bytes of control stack left."
  (declare (optimize (speed 1) (debug 1)))
  (let ((n (- (stack-pointer) (control-base) distance)))
    (cond ((> n 2000) (multiple-value-prog1 (call-at-distance distance function) (stack-pointer)))
          ((<= n 250) (funcall function))
          (t (let ((filler (make-array (- n 200) :element-type '(unsigned-byte 8))))
               (declare (dynamic-extent filler) (optimize (safety 0) (debug 0)))
               (setf (aref filler 0) 1)
               (multiple-value-prog1 (funcall function)
                 (setf (aref filler 1) (aref filler 0))))))))

(defun descend-a-little (n)
  (if (= n 0) 0 (1+ (descend-a-little (1- n)))))

;;; The report of an error needs stack, where there may be none. Prevents: a fiber that enters the
;;; debugger where that is disabled, and so neither ends nor is unwound; one that reports another
;;; error than it had.
(defun exhaustion-p (type)
  (and (symbolp type) (subtypep type 'sb-kernel::control-stack-exhausted)))

(test errors-at-the-end-of-the-stack
  (on-carriers (n :counts '(1 2) :migration '(nil))
    (with-group (group n)
      (let ((causes '()))
        (loop for distance from 20000 downto -100 by 167
              do (let* ((mutex (sb-thread:make-mutex))
                        (fiber (quietly
                                 (let ((fiber (spawn (group)
                                                (sb-thread:with-mutex (mutex)
                                                  (call-at-distance distance
                                                                    (lambda ()
                                                                      (error 'expected-error)))))))
                                   (fiber-join fiber :default nil :timeout *patience*)
                                   fiber)))
                        (cause (handler-case (fiber-join fiber :timeout 0)
                                 (fiber-failed (failed) (type-of (fiber-failed-cause failed)))
                                 (error (condition) condition))))
                   (push cause causes)
                   (unless (and (or (eq cause 'expected-error) (exhaustion-p cause))
                                (null (mutex-owner mutex)))
                     (fail "At a distance of ~D: ~A, ~A" distance cause mutex))))
        ;; What comes to the debugger is what is reported.
        (is (< (count-if #'exhaustion-p causes) 30) "~S" causes)))))

(define-condition endless-report (error) ()
  (:report (lambda (condition stream)
             (format stream "~A" (keep (princ-to-string condition))))))

;;; A handler of an overflow, which runs on the reserve, fails itself, and its error is printed
;;; without end. Prevents: a fiber that uses up the reserve for the report, and so ends without
;;; being unwound.
(test report-that-overflows-after-an-overflow
  (on-carriers (n)
    (with-group (group n)
      (dolist (way *ways*)
        (let* ((mutex (sb-thread:make-mutex)) (cleaned nil)
               (fiber (quietly
                        (let ((fiber (spawn (group)
                                       (unwind-protect
                                            (handler-bind ((storage-condition
                                                             (lambda (condition)
                                                               (declare (ignore condition))
                                                               (error 'endless-report))))
                                              (sb-thread:with-mutex (mutex) (funcall (cdr way))))
                                         (fiber-yield)
                                         (setf cleaned t)))))
                          (fiber-join fiber :default nil :timeout *patience*)
                          fiber))))
          (is (eq t cleaned))
          (is (null (mutex-owner mutex)))
          (is (typep (handler-case (fiber-join fiber :timeout 0)
                       (fiber-failed (failed) (fiber-failed-cause failed)))
                     'endless-report))
          (is (= 3 (join (spawn (group) (+ 1 2))))))))))

;;; The function that has no more stack has perhaps not stored its arguments. Prevents: a report that
;;; takes for an object what lies there, which ends the process in the next collection.
(test reports-of-overflows-under-collections
  (call-while-collecting
   (lambda ()
     (with-group (group 1)
       (flet ((failing-fiber ()
                (let ((distance (random 1000)))
                  (spawn (group)
                    (call-at-distance distance (lambda () (error 'expected-error)))))))
         (quietly
           (loop repeat 4
                 do (dolist (fiber (loop repeat 50 collect (failing-fiber)))
                      (fiber-join fiber :default nil :timeout *patience*)))))
       (is (= 3 (join (spawn (group) (+ 1 2)))))))))

(defun report-of (function)
  "What is printed when a fiber that calls FUNCTION ends."
  (with-output-to-string (stream)
    (call-with-error-output
     (lambda ()
       (with-group (group 1)
         (fiber-join (spawn (group) (funcall function)) :default nil :timeout *patience*)))
     stream)))

;;; Prevents: the same.
(test arguments-in-reports
  (flet ((call-in-frame (function) (call-at-distance 100000 function)))
    (let ((report (report-of (lambda () (call-in-frame (lambda () (error 'expected-error)))))))
      (is (search "(SB-FIBER-TESTS::CALL-AT-DISTANCE 100000" report) "~A" report)))
  (let ((report (report-of (lambda () (recurse-with-frames 10)))))
    (is (search "SB-FIBER-TESTS::RECURSE-WITH-FRAMES" report))
    (is (not (search "(SB-FIBER-TESTS::RECURSE-WITH-FRAMES" report)) "~A" report)))

;;; Prevents: a fiber that is unwound in the midst of a wait and stays in a chain; one that is
;;; forgotten, since its successor overflowed while it took care of it; a reserve that is closed
;;; with the fiber that closes it inside.
(test waits-at-the-end-of-the-stack
  (on-carriers (n :counts '(1 2))
    (multiple-value-bind (reader writer) (sb-unix:unix-pipe)
      (let* ((queue (sb-thread:make-waitqueue)) (done nil)
             (waits (list (lambda () (sleep 1/100000))
                          #'fiber-yield
                          (lambda () (fiber-park :timeout 1/100000))
                          (lambda () (sb-unix:unix-simple-poll reader :input 1))
                          ;; One that overflows in RELEASE-MUTEX, as a thread may, leaves the mutex
                          ;; taken.
                          (lambda () (let ((mutex (sb-thread:make-mutex)))
                                       (sb-thread:with-mutex (mutex)
                                         (sb-thread:condition-wait queue mutex :timeout 1/100000))))
                          (lambda ()
                            ;; opens the reserve silently
                            (sb-sys:without-gcing (descend-a-little 60))
                            (sleep 1/100000)))))
        (with-group (group n)
          (let ((bystanders (loop repeat 3
                                  collect (spawn (group) (loop until done do (fiber-yield)) t))))
            (dolist (wait waits)
              (is (eq t (join (spawn (group)
                                (loop for distance from 9000 downto -100 by 61
                                      do (handler-case (call-at-distance distance wait)
                                           (storage-condition ())))
                                t)))))
            (setf done t)
            (is (equal '(t t t) (join-all bystanders)))
            (is (null (sb-fiber::fd-cell-input (sb-fiber::find-fd-cell reader t))))))
        (sb-unix:unix-close reader)
        (sb-unix:unix-close writer)))))

;;; Prevents: a fiber that waits in pages that something else has opened silently, and is notified in
;;; the midst of the wait.
(test no-wait-in-a-reserve-that-was-opened-silently
  (flet ((exhausted-at-p (distance)
           (call-at-distance distance
                             (lambda ()
                               (sb-sys:without-gcing (call-at-distance -3000 #'keep))
                               (handler-case (fiber-can-park-p)
                                 (sb-kernel::control-stack-exhausted () :exhausted))))))
    (with-group (group 1)
      (loop for (distance result) in '((20000 t) (9500 t) (6000 :exhausted) (2500 :exhausted))
            do (is (eq result (join (spawn (group) (exhausted-at-p distance)))))))))

;;; What was notified, or reports, has the reserve to wait in.
(test handlers-and-reports-wait-in-the-reserve
  (flet ((waits-p ()
           (and (< (stack-pointer) (+ (control-base) 8192)) (fiber-can-park-p)
                (progn (sleep 1/1000) t))))
    (is (eq t (in-fiber ()
                (block nil
                  (handler-bind ((sb-kernel::control-stack-exhausted
                                   (lambda (condition) (keep condition) (return (waits-p)))))
                    (recurse-with-frames 10))))))
    (is (eq t (in-fiber ()
                (call-at-distance 4000 (lambda ()
                                         (sb-fiber::make-room-to-report)
                                         (waits-p))))))))

;;;; Signals at the very end of the stack

(defun call-with-handler (signal default function)
  "Call FUNCTION with a function that tells how often SIGNAL has been handled; DEFAULT handles it
afterwards."
  (let ((handled (make-flag)))
    (sb-sys:enable-interrupt signal (lambda (&rest ignore)
                                      (declare (ignore ignore))
                                      (count-one handled)))
    (unwind-protect (funcall function (lambda () (flag-count handled)))
      (sb-sys:enable-interrupt signal default))))

(defun enable-profiler ()
  "Let SIGPROF be counted as by SB-SPROF."
  (sb-alien:alien-funcall
   (sb-alien:extern-alien "install_handler" (function sb-alien:void sb-alien:int sb-alien:long))
   sb-unix:sigprof -1)
  (setf (sb-alien:extern-alien "sb_sprof_trace_ct_max" sb-alien:int) 100000))

;;; Signals open the reserve for their handlers. Prevents: that they open all of it ahead of a fiber
;;; that overflows, which is then never notified, and the process ends.
(defun recurse-and-raise (signal)
  (declare (notinline recurse-and-raise))
  (let ((bytes (make-array 3000 :element-type '(unsigned-byte 8))))
    (declare (dynamic-extent bytes))
    (sb-unix:raise signal)
    (setf (aref bytes 0) 1)
    (recurse-and-raise signal)
    (keep bytes)))

(test signals-while-it-overflows
  (call-with-handler
   sb-unix:sighup :default
   (lambda (count)
     (on-carriers (n :counts '(1 2))
       (with-group (group n)
         (dotimes (i 5)
           (is (eq :notified (join (spawn (group)
                                     (handler-case (recurse-and-raise sb-unix:sighup)
                                       (sb-kernel::control-stack-exhausted () :notified))))))))
       (is (< 50 (funcall count)))))))

;;; Prevents: a fiber that is unwound out of the midst of a park.
(defun unwound-by (signal distance)
  "Has SIGNAL unwound this fiber with interrupts off, where there was room for RAISE?"
  (let ((raising nil) (went-on nil))
    (handler-case (call-at-distance distance
                                    (lambda ()
                                      (sb-sys:without-interrupts
                                        (sb-fiber::%touch (sb-sys:int-sap (- (stack-pointer) 1000)))
                                        (setf raising t)
                                        (sb-unix:raise signal)
                                        (setf went-on t))))
      (storage-condition ()))
    (and raising (not went-on))))

(test no-signal-unwinds-with-interrupts-off
  (enable-profiler)
  (call-with-handler
   sb-unix:sighup :default
   (lambda (count)
     (dolist (signal (list sb-unix:sighup sb-unix:sigprof))
       (is (null (in-fiber ()
                   (loop for distance from 6000 downto 0 by 16
                         when (unwound-by signal distance) collect distance)))))
     (is (< 100 (funcall count))))))

(defun lost-at (raise count-handled)
  "Call RAISE, which sends a signal to this thread, at the end of the stack, at each distance.
Return how often, or where the signal was lost."
  (let ((n 0))
    (loop for distance from 14000 downto 0 by 61
          do (let ((before (funcall count-handled)) (raised nil))
               (handler-case (call-at-distance distance (lambda ()
                                                          (setf raised t)
                                                          (funcall raise)))
                 (storage-condition ()))
               (when raised
                 (incf n)
                 (unless (sb-ext:wait-for (> (funcall count-handled) before) :timeout 5)
                   (return (list :lost-at distance)))))
          finally (return n))))

;;; In the handler of an overflow; each report may have some more of the reserve.
(defun call-in-the-reserve (depth function)
  "Call FUNCTION where about DEPTH bytes of the reserve are used."
  (sb-fiber::make-room-to-report)
  (let ((next (- (+ (control-base) 30000) (stack-pointer))))
    (if (>= next depth)
        (call-at-distance (- depth) function)
        (call-at-distance (- next) (lambda () (call-in-the-reserve depth function))))))

;;; A signal may open more of the reserve than a report may have, and that is closed for the report.
;;; Prevents: a guard that is raised over the frame of the function that raises it, which ends the
;;; fiber without cleanups, or the process.
(test reports-after-signals-at-the-end-of-the-stack
  (flet ((report-below (depth distance)
           (flet ((raise-and-report ()
                    (sb-unix:raise sb-unix:sighup)
                    (call-at-distance (- distance depth) #'sb-fiber::make-room-to-report)))
             (if (= depth 0)
                 (call-at-distance 4000 #'raise-and-report)
                 (block nil
                   (handler-bind ((storage-condition
                                    (lambda (condition)
                                      (keep condition)
                                      (call-in-the-reserve (- depth 4000) #'raise-and-report)
                                      (return))))
                     (recurse-with-frames 10)))))
           distance))
    (call-with-handler
     sb-unix:sighup :default
     (lambda (count)
       (with-group (group 1)
         (dolist (depth (list 0 (* 1/2 (sb-alien:extern-alien "fiber_control_reserve"
                                                              sb-alien:unsigned))))
           (loop for distance from 600 downto -200 by 8
                 do (let ((distance distance))
                      (is (eql distance (join (spawn (group) (report-below depth distance)))))))))
       (is (<= 202 (funcall count)))))))

;;; The kernel drops a signal for whose frame there is no room. Prevents: a server that does not end
;;; by SIGTERM.
(test signals-at-the-end-of-the-stack
  (loop for (signal default) in `((,sb-unix:sigterm ,#'sb-unix::sigterm-handler)
                                  (,sb-unix:sigint ,#'sb-unix::sigint-handler)
                                  (,sb-unix:sighup :default))
        do (on-carriers (n :counts '(1 2) :migration '(nil))
             (let ((result (call-with-handler
                            signal default
                            (lambda (count)
                              (in-fiber (n) (lost-at (lambda () (sb-unix:raise signal)) count))))))
               (is (typep result '(integer 100)) "Signal ~D: ~S" signal result)))))

(test samples-at-the-end-of-the-stack
  (enable-profiler)
  (is (typep (in-fiber ()
               (lost-at (lambda ()
                          (setf sb-thread::*sprof-enable* 1) ; of this thread
                          (sb-unix:raise sb-unix:sigprof))
                        (lambda () (sb-alien:extern-alien "sb_sprof_trace_ct" sb-alien:int))))
             '(integer 100))))
