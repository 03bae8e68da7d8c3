;;;; Tests of what is made of scopes: calls in parallel, races, periodic work

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* parallel)

(defmacro in-default-group (&body body)
  "Execute BODY in a fiber with each number of carriers."
  `(on-carriers (n)
     (with-group (group n)
       (multiple-value-call #'check-results
         (join (spawn (group) (values-list (list ,@body))))))))

(defun check-results (&rest results)
  (is (all-true-p results) "~S" results))

(test mapping-in-parallel
  (in-default-group
    (equal '(0 1 4 9 16)
           (parallel-map (lambda (x) (sleep (/ (- 5 x) 1000)) (* x x)) '(0 1 2 3 4)))
    (equal '(2 3) (parallel-map '1+ #(1 2) :limit 1))
    (null (parallel-map #'error '()))))

(test the-limit-of-a-map
  (in-default-group
    (let ((now (make-flag)) (most (make-flag)))
      (parallel-map (lambda (x)
                      (declare (ignore x))
                      (note most (1+ (count-one now)))
                      (pause)
                      (sb-ext:atomic-decf (flag-count now)))
                    (make-list 30) :limit 4)
      (<= 1 (reduce #'max (flag-notes most)) 4))))

(test a-failure-ends-the-others
  (in-default-group
    (let ((cleaned (make-flag)))
      (and (handler-case (parallel-map (lambda (x)
                                         (unwind-protect
                                              (if (= x 3) (error 'expected-error) (sleep 3600))
                                           (count-one cleaned)))
                                       '(1 2 3))
             (scope-failed (condition) (typep (scope-failed-cause condition) 'expected-error)))
           ;; Those that had not begun end without it.
           (<= 1 (flag-count cleaned) 3)))))

(test doing-in-parallel
  (in-default-group
    (let ((flag (make-flag)))
      (and (null (parallel-do (x '(1 2 3) :limit 2) (pause) (note flag x)))
           (null (set-exclusive-or '(1 2 3) (flag-notes flag)))))))

(test races
  (in-default-group
    (let ((cleaned (make-flag)))
      (and (equal '(1 2)
                  (multiple-value-list
                   (race (lambda () (unwind-protect (sleep 3600) (count-one cleaned)))
                         (lambda () (sleep 1/1000) (values 1 2)))))
           (<= (flag-count cleaned) 1)))
    (null (multiple-value-list (race)))
    (null (race (constantly nil)))
    (eq :failed (handler-case (race (lambda () (error 'expected-error)) (lambda () (sleep 3600)))
                  (scope-failed () :failed)))))

(test first-successes
  (in-default-group
    (eq :late (first-success (lambda () (error 'expected-error))
                             (lambda () (sleep 1/500) :late)
                             (lambda () (sleep 3600))))
    (= 2 (length (handler-case (first-success (lambda () (error 'expected-error))
                                              (lambda () (error 'expected-error)))
                   (scope-failed (condition)
                     (cons (scope-failed-cause condition)
                           (scope-failed-suppressed condition))))))))

;;; What fails when there is a winner is no failure of the race, and is told.
(test losers-that-fail
  (in-default-group
    (let ((output (make-string-output-stream)))
      (and (eq :winner
               (call-with-error-output
                (lambda ()
                  (let ((begun (make-flag)))
                    (race (lambda () (unwind-protect (progn (raise-flag begun) (sleep 3600))
                                       (error 'expected-error)))
                          (lambda () (wait-until (flag-value begun)) :winner))))
                output))
           (search "an error that the test expects" (get-output-stream-string output))
           t))
    (eq :error (handler-case (race (lambda () (cancel-fiber (current-fiber)) (sleep 3600)))
                 (error () :error)))))

(test only-the-first-wins
  (in-default-group
    (loop repeat 50
          always (member (race (constantly 1) (constantly 2) (constantly 3)) '(1 2 3)))))

(test again-and-again
  (in-default-group
    (let ((flag (make-flag)))
      (and (eq :done (periodically (1/2000)
                       (when (= 10 (count-one flag)) (return :done))))
           (= 11 (flag-count flag))))
    (eq :type-error (handler-case (periodically ((opaque 0)) (return))
                      (type-error () :type-error)))))

;;; What cannot be done in time is left out, and not done all at once afterwards.
(test periods-that-are-missed
  (in-default-group
    (let ((begin (get-internal-real-time)) (flag (make-flag)))
      (periodically (1/100)
        (sleep 1/40)
        (when (= 4 (count-one flag)) (return)))
      ;; Begun after 0, 3, 6, 9, 12 periods, and none at once after another.
      (>= (- (get-internal-real-time) begin)
          (* 12/100 internal-time-units-per-second)))))

(test permits
  (in-default-group
    (let ((semaphore (make-semaphore :count 1)))
      (and (equal '(1 2) (multiple-value-list (with-permit (semaphore) (values 1 2))))
           (= 1 (semaphore-count semaphore))
           (null (with-permit (semaphore) (with-permit (semaphore :timeout 1/1000) t)))
           (null (with-permit (semaphore) (with-permit (semaphore :timeout 0) t)))
           (with-permit (semaphore :timeout 0) t)
           (eq :thrown (catch 'tag (with-permit (semaphore) (throw 'tag :thrown))))
           (= 1 (semaphore-count semaphore))))))

(test permits-of-who-is-cancelled
  (on-carriers (n)
    (with-group (group n)
      (let ((semaphore (make-semaphore :count 2)))
        (loop repeat 50
              do (let ((fibers (loop repeat 6
                                     collect (spawn (group)
                                               (loop (with-permit (semaphore) (pause)))))))
                   (pause)
                   (mapc #'cancel-fiber fibers)
                   (mapc #'wait-for-end fibers)))
        (is (= 2 (semaphore-count semaphore)))))))
