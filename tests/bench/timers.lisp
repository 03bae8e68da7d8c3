;;;; benchmarks of deadlines; see run.sh

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(load (merge-pathnames "measure.lisp" *load-truename*))

(in-package "SB-FIBER-BENCH")

;;; Random deadlines, so that what is put in rises and what is taken out sinks as it does in life.
(defun nanoseconds-of-heap-operation (n)
  "Fill a heap with N, then replace each once. Returns half of the time of a removal and an
insertion."
  (let ((heap (sb-fiber::make-deadline-heap))
        (fibers (make-array n))
        (random (make-random-state nil)))
    (flet ((insert (i) (sb-fiber::heap-insert heap (svref fibers i) (random (ash 1 50) random))))
      (dotimes (i n)
        (setf (svref fibers i) (make-fiber #'list))
        (insert i))
      (let ((start (nanoseconds)))
        (dotimes (i n)
          (sb-fiber::heap-remove (svref fibers i))
          (insert i))
        (/ (- (nanoseconds) start) (* 2 n))))))

(defun sleeper (due latenesses i)
  (declare (type (simple-array (signed-byte 64) (*)) latenesses))
  (lambda ()
    (fiber-sleep (/ (- due (nanoseconds)) 1000000000))
    (setf (aref latenesses i) (- (nanoseconds) due))))

;;; The first wakes when all are asleep: 25 us for each are enough for making them.
(defun latenesses (n)
  "How many nanoseconds too late N fibers woke that slept at the same time."
  (let* ((group (start-fibers nil :carrier-count *carriers*))
         (random (make-random-state nil))
         (latenesses (make-array n :element-type '(signed-byte 64)))
         (fibers (make-array n))
         (first (+ (nanoseconds) (* n 25000))))
    (dotimes (i n)
      (setf (svref fibers i)
            (submit-fiber group (make-fiber (sleeper (+ first (random 10000000000 random))
                                                     latenesses i)))))
    (map nil #'fiber-join fibers)
    (finish-fibers group)
    latenesses))

(defun bench-timers (n)
  (let ((latenesses (sort (latenesses n) #'<)))
    (format t "RESULT timers sbcl-fiber p=~D n=~D mean_us=~,1F p99_us=~,1F worst_us=~,1F ~
               heap_ns=~,1F~%"
            *carriers* n
            (/ (reduce #'+ latenesses) n 1000)
            (/ (aref latenesses (floor (* 99 n) 100)) 1000)
            (/ (aref latenesses (1- n)) 1000)
            (nanoseconds-of-heap-operation n))))

(apply #'main (rest sb-ext:*posix-argv*))
