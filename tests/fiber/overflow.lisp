;;;; Stacks that are used up: an error of the fiber that did it, which can be handled, more than
;;;; once

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/stack-ends.lisp" *load-truename*))

(def-suite* overflow)

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

;;; Prevents: the end of the process, since each overflow is in a critical section, and nothing
;;; looks at it afterwards.
(test with-interrupts-off
  (on-carriers (n :counts '(1 2))
    (dolist (way (cons (cons 'sb-kernel::control-stack-exhausted
                             (lambda () (recurse-with-large-objects 300)))
                       *ways*))
      (is (equal '(t t t)
                 (in-fiber (n)
                   (loop repeat 3 collect (sb-sys:without-interrupts (exhausted-p way)))))
          "~S" way))))

(defun recurse-with-collections ()
  (sb-ext:gc :gen 0)
  (+ (recurse-with-collections) (keep)))

(test collections-in-each-frame
  (with-group (group 1)
    (flet ((exhausted () (exhausted-p (cons 'sb-kernel::control-stack-exhausted
                                            #'recurse-with-collections))))
      (is (equal '(t t)
                 (join (spawn (group :stack-size (* 64 1024))
                         (list (exhausted) (sb-sys:without-interrupts (exhausted))))))))))

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
