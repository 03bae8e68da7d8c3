;;;; The mappings of memory that guards have before Linux 6.13, and that others need as well

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/guards.lisp" *load-truename*))

(def-suite* mappings)

;;; mprotect, whatever the kernel.
(setf guard-method 2)

(defun count-mappings ()
  (with-open-file (maps "/proc/self/maps" :external-format :latin-1)
    (loop while (read-line maps nil) count t)))

(defun mapping-limit ()
  (with-open-file (limit "/proc/sys/vm/max_map_count") (read limit)))

(defconstant mappings-per-fiber 4)
(defconstant mappings-for-others 4096)

(defun submit-until-refused (group &optional (size (* 256 1024)))
  "A list of fibers of GROUP that park, and the condition that there can be no more."
  (let ((fibers '()))
    (handler-case (loop (push (spawn (group :stack-size size) (fiber-park) t) fibers))
      (storage-condition (condition) (values fibers condition)))))

(defun end-all (fibers)
  (mapc #'fiber-unpark fibers)
  (every #'join fibers))

(defun usual-number () (floor (- (mapping-limit) mappings-for-others 1000) mappings-per-fiber))

;;; What mappings free stacks keep, those of carriers included, and some that others may get.
(defconstant most-kept (+ (* 4 (+ 1024 128)) 500))

(defun recurse () (+ 1 (the fixnum (recurse))))

(defun exhausted-p ()
  (handler-case (recurse)
    (storage-condition () t)))

(defun overflowing-fibers (group n)
  "N fibers of GROUP that park, and return true if they can exhaust their stacks several times."
  (loop repeat n
        collect (spawn (group)
                  (fiber-park)
                  (loop repeat 3 always (exhausted-p)))))

(defmacro if-the-limit-is-usual (&body body)
  `(if (> (mapping-limit) 200000)
       (skip "vm.max_map_count is ~D: that is too many fibers for a test." (mapping-limit))
       (progn ,@body)))

;;; Prevents: the end of the process in the next collection, or MAKE-THREAD; RUN-PROGRAM that fails;
;;; a process that stays at the wall when all fibers have ended; a fiber at the wall that is not
;;; told of its overflow.
(test at-the-wall
  (if-the-limit-is-usual
    (let ((before (count-mappings)))
      (with-group (group 2)
        (let ((overflows (overflowing-fibers group 20)))
          (multiple-value-bind (fibers condition) (submit-until-refused group)
            (is (typep condition 'sb-fiber::fiber-stack-unavailable))
            (is (search "vm.max_map_count" (remove #\Newline (princ-to-string condition))))
            (is (< (usual-number) (length fibers)))
            (is (< (count-mappings) (- (mapping-limit) (- mappings-for-others 500))))
            (finishes (sb-ext:gc :full t))
            (is (equal '(0 1 2 3 4 5 6 7 8 9)
                       (mapcar #'sb-thread:join-thread
                               (loop for i below 10
                                     collect (make-thread (lambda (i) (sb-ext:gc) i)
                                                          :arguments i)))))
            (is (equal "here" (with-output-to-string (out)
                                (sb-ext:run-program "printf" '("here") :search t :output out))))
            (is-true (end-all overflows))
            ;; Those stacks are free.
            (is (= 3 (join (spawn (group) (+ 1 2)))))
            (is-true (end-all fibers)))))
      (is-true (wait-until (< (count-mappings) (+ before most-kept)))))))

;;; Prevents: a wall that is nearer each time.
(test at-the-wall-again
  (if-the-limit-is-usual
    (with-group (group 2)
      (loop repeat 2
            do (let ((fibers (submit-until-refused group)))
                 (is (< (usual-number) (length fibers)))
                 (is-true (end-all fibers)))))))

;;; Prevents: mappings that only stacks of one size can have.
(test free-stacks-of-another-size
  (if-the-limit-is-usual
    (with-group (group 2)
      (loop for size in '(65536 131072 65536)
            do (let ((fibers (submit-until-refused group size)))
                 (is (< (usual-number) (length fibers)))
                 (is-true (end-all fibers)))))))

;;; Budgets are computed anew each second, and others want more then. Prevents: a stack that is
;;; refused just then, though free ones could do without their mappings.
(test at-the-wall-for-a-while
  (if-the-limit-is-usual
    (with-group (group 2)
      (is-true (end-all (submit-until-refused group 65536)))
      (let* ((n (floor (usual-number) 1.03))
             (fibers (loop repeat n
                           collect (spawn (group :stack-size 131072) (fiber-park) t)))
             (stop (make-flag))
             (threads (loop repeat 10 collect (make-thread (lambda ()
                                                             (wait-until (flag-value stop)))))))
        (sleep 1.2)
        (let ((more (submit-until-refused group 131072)))
          (is (< (usual-number) (+ n (length more))))
          (is-true (end-all more)))
        (is-true (end-all fibers))
        (raise-flag stop)
        (mapc #'join-thread threads)))))

;;; Prevents: a count of mappings that grows with overflows, for which return guards come and go.
(test return-guards-are-given-back
  (flet ((mappings () (sb-alien:extern-alien "fiber_guard_mappings" sb-alien:long)))
    (with-group (group 2)
      (flet ((overflow () (end-all (overflowing-fibers group 100))))
        (overflow)
        (let ((before (mappings)))
          (loop repeat 5 do (is-true (overflow)))
          ;; Two carriers may keep 64 stacks each.
          (is (<= (mappings) (+ before (* 2 64 4)))))))))
