;;;; time slices: fiber/slice.lisp, and what the monitor does about them

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/zones.lisp" *load-truename*))

(def-suite* slice)

(defmacro with-sliced-group ((group) &body body)
  "Execute BODY with GROUP bound to a group of one carrier, which nobody relieves, and with slices
of a millisecond."
  `(with-stuck-carrier-time (nil)
     (let ((,group (start-fibers nil :carrier-count 1 :time-slice 1/1000)))
       (unwind-protect (progn ,@body)
         (is-true (finish-fibers ,group :timeout *patience* :abort t))))))

;;; Turns that fibers see: none of those that take part ends before each has had as many.
(defstruct (contest (:constructor make-contest (n &optional (turns 10)
                                                &aux (counts (make-array n :initial-element 0)))))
  turns counts (last nil))

(defun over-p (contest)
  (every (lambda (count) (>= count (contest-turns contest))) (contest-counts contest)))

(defun note-turn (contest i)
  (unless (eql i (contest-last contest))
    (setf (contest-last contest) i)
    (incf (svref (contest-counts contest) i))))

(defun compete (contest i)
  "Compute until each has had its turns. Return how often the loop ran."
  (loop until (over-p contest)
        do (note-turn contest i)
        count t))

;;; Without slices the first would never end.
(test endless-fibers-share-a-carrier
  (with-sliced-group (group)
    (let* ((contest (make-contest 3))
           (fibers (loop for i below 3
                         collect (let ((i i)) (spawn (group) (compete contest i))))))
      (is (every #'plusp (join-all fibers))))))

(test an-endless-fiber-does-not-hold-up-timers-and-descriptors
  (with-sliced-group (group)
    (multiple-value-bind (in out) (sb-unix:unix-pipe)
      (let* ((woken nil) (read nil)
             (endless (spawn (group) (loop until (and woken read))))
             (reader (spawn (group)
                       (sb-sys:wait-until-fd-usable in :input)
                       (setf read t)))
             (sleeper (spawn (group) (sleep 1/100) (setf woken t))))
        (wait-until-parked reader)
        (sb-unix:unix-write out (make-array 1 :element-type '(unsigned-byte 8)) 0 1)
        (is (equal '(nil t t) (join-all (list endless reader sleeper))))
        (mapc #'sb-unix:unix-close (list in out))))))

(defun spin-until-refused ()
  "Compute until the running fiber, which must not leave, has been asked to."
  (let ((carrier sb-fiber::*carrier*))
    (loop until (sb-fiber::carrier-refused-p carrier))))

(defun spin-for-slices ()
  "Compute for as long as ten slices."
  (let ((end (+ (get-internal-real-time) (/ internal-time-units-per-second 100))))
    (loop until (> (get-internal-real-time) end))))

(defun others-run-while (function)
  "Call FUNCTION in a fiber while another can run. Return whether that has run when FUNCTION
returned, and whether it did afterwards."
  (with-sliced-group (group)
    (let* ((ran nil)
           (inside :not-called)
           (one (spawn (group)
                  (funcall function (lambda ()
                                      (spawn (group) (setf ran t))
                                      (spin-for-slices)
                                      (setf inside ran)))
                  (loop until ran))))
      (join one)
      (list inside ran))))

(test a-fiber-yields-where-it-may
  (is (equal '(t t) (others-run-while (lambda (spin) (loop repeat 100 until (funcall spin)))))))

;;; Prevents: a fiber that is left where it holds what must not be held by one that does not run.
(test a-fiber-does-not-yield-where-it-must-not
  (is (equal '(nil t) (others-run-while (lambda (spin)
                                          (sb-sys:without-interrupts (funcall spin)))))))

;;; The first is asked where it must not leave; without a second question the other would not run
;;; before it has ended.
(test who-has-refused-is-asked-again
  (is (equal '(nil t) (others-run-while (lambda (spin)
                                          (with-pages-pinned (lambda ()
                                                               (funcall spin)
                                                               (spin-until-refused))))))))

;;; A fiber that has been preempted goes on on its carrier. Another, in a system call there, makes
;;; the monitor take the scheduler away; both must end their turns all the same.
(test fibers-of-a-carrier-that-was-relieved
  (let ((group (start-fibers nil :carrier-count 1 :time-slice 1/1000)))
    (unwind-protect
         (let* ((contest (make-contest 2))
                (in-call nil)
                (calls (spawn (group)
                         (loop until (plusp (svref (contest-counts contest) 1)))
                         (setf in-call t)
                         (loop while (sb-fiber::carrier-scheduler sb-fiber::*carrier*)
                               do (usleep 20000))
                         (compete contest 0)))
                (other (spawn (group)
                         (setf (svref (contest-counts contest) 1) 1)
                         (loop until in-call)
                         (compete contest 1))))
           (is (every #'integerp (join-all (list calls other))))
           (is-true (plusp (getf (fiber-group-statistics group) :stuck-ever))))
      (is-true (finish-fibers group :timeout *patience* :abort t)))))

;;; Prevents: a turn of what computes for each turn of what does not. They may share the time.
(test who-computes-has-no-turn-for-each-of-the-others
  (with-sliced-group (group)
    (let* ((n 1000) (left n) (turns 0)
           (computes (spawn (group)
                       (let ((seen left))
                         (loop until (= left 0)
                               do (unless (= left seen)
                                    (setf seen left)
                                    (incf turns))))))
           (others (loop repeat n collect (make-fiber (lambda () (fiber-yield) (decf left))))))
      (spawn (group) (dolist (other others) (submit-fiber group other)))
      (join-all (cons computes others))
      (is (<= turns (floor n 4))))))

;;; With one of them preempted and nothing else to do, a carrier sleeps no more.
(test who-was-preempted-is-no-cause-to-sleep
  (with-sliced-group (group)
    (flet ((epoch () (sb-fiber::carrier-epoch sb-fiber::*carrier*)))
      (is (= 20 (join (spawn (group)
                        (loop repeat 20
                              count (loop with epoch = (epoch)
                                          until (/= epoch (epoch))
                                          finally (return t))))))))))

;;; A signal would end the system call.
(test system-calls-that-wait-are-not-ended
  (with-sliced-group (group)
    (is (eql 0 (join (spawn (group)
                       (usleep 50000)))))))

;;; Prevents: a fiber that is unwound in the midst of what it computes.
(test who-is-cancelled-computes-on
  (with-sliced-group (group)
    (let* ((contest (make-contest 2))
           (one (spawn (group)
                  (cancel-fiber (current-fiber))
                  (compete contest 0)
                  :not-unwound))
           (other (spawn (group) (compete contest 1))))
      (is (eq :not-unwound (join one)))
      (join other))))

(defun rounded-sum (n)
  "A sum that depends on how the processor rounds."
  (let ((sum 0d0))
    (declare (double-float sum) (fixnum n))
    (loop for i fixnum from 1 to n do (incf sum (/ (coerce i 'double-float))))
    sum))

;;; Prevents: modes or registers of one fiber in another.
(test floating-point-state-survives
  (flet ((sum-rounded (mode)
           (let ((old (getf (sb-int:get-floating-point-modes) :rounding-mode)))
             (unwind-protect (progn (sb-int:set-floating-point-modes :rounding-mode mode)
                                    (rounded-sum 1000))
               (sb-int:set-floating-point-modes :rounding-mode old)))))
    (let* ((modes '(:positive-infinity :negative-infinity :nearest))
           (expected (mapcar #'sum-rounded modes))
           (contest (make-contest 3 20)))
      (is (= 3 (length (remove-duplicates expected))))
      (with-sliced-group (group)
        (let ((fibers (loop for mode in modes
                            for sum in expected
                            for i from 0
                            collect (let ((mode mode) (sum sum) (i i))
                                      (spawn (group)
                                        (sb-int:set-floating-point-modes :rounding-mode mode)
                                        (loop until (over-p contest)
                                              do (note-turn contest i)
                                              always (= sum (rounded-sum 1000))))))))
          (is (equal '(t t t) (join-all fibers))))))))

;;; With several carriers, and collections. The fibers of each pair wait for each other while both
;;; compute. Without slices the first two of different pairs would keep both carriers.
(test slices-on-several-carriers
  (with-stuck-carrier-time (nil)
    (let ((group (start-fibers nil :carrier-count 2 :time-slice 1/1000)))
      (unwind-protect
           (flet ((conses (i)
                    (let ((list (loop for j below 2000 collect (+ i j))))
                      (= (+ i 1999) (car (last list))))))
             (let* ((contests (loop repeat 4 collect (make-contest 2 5)))
                    (fibers (loop for i below 8
                                  collect (let ((contest (nth (mod i 4) contests)) (i i))
                                            (spawn (group)
                                              (loop until (over-p contest)
                                                    do (note-turn contest (floor i 4))
                                                    always (conses i)))))))
               (is (equal '(t t t t t t t t) (join-all fibers)))))
        (is-true (finish-fibers group :timeout *patience* :abort t))))))

;;; Without slices of its own the first would wait for the second for ever.
(test run-fibers-takes-a-time-slice
  (with-stuck-carrier-time (nil)
    (let ((contest (make-contest 2)))
      (is (every #'plusp
                 (run-fibers (loop for i below 2
                                   collect (let ((i i))
                                             (make-fiber (lambda () (compete contest i)))))
                             :carrier-count 1 :time-slice 1/1000)))))
  (signals type-error (run-fibers '() :time-slice 0))
  (signals type-error (run-fibers '() :poller :epoll)))
