;;;; benchmarks of fibers that run; see run.sh

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :sb-concurrency)
(load (merge-pathnames "measure.lisp" *load-truename*))

(in-package "SB-FIBER-BENCH")

;;;; Measuring

(defun run-together (group functions)
  "Call each of FUNCTIONS in a fiber of GROUP. Return the nanoseconds until all have returned."
  (let* ((start (nanoseconds))
         (fibers (mapcar #'make-fiber functions)))
    (dolist (fiber fibers) (submit-fiber group fiber))
    (mapc #'fiber-join fibers)
    (- (nanoseconds) start)))

;;; The fibers are made and joined by a fiber: on one carrier none runs before all are made.
(defun one-round (group functions)
  (fiber-join (submit-fiber group (make-fiber (lambda () (run-together group functions))))))

(defun rounds (make-functions)
  "Measure six rounds of what MAKE-FUNCTIONS returns, a list of functions to call in fibers.
Return the nanoseconds of the first round and the median of the others."
  (let* ((group (start-fibers nil :carrier-count *carriers*))
         (results (loop repeat 6
                        collect (one-round group (funcall make-functions)))))
    (finish-fibers group)
    (values (first results) (median (rest results)))))

;;;; The benchmarks

(defun bench-switch (n &optional (bindings 0))
  (let ((symbols (loop repeat bindings collect (gensym))))
    (flet ((yield-repeatedly ()
             (progv symbols symbols
               (loop repeat n do (fiber-yield)))))
      (multiple-value-bind (first later)
          (rounds (lambda () (list #'yield-repeatedly #'yield-repeatedly)))
        (format t "RESULT switch sbcl-fiber n=~D bindings=~D first_ns=~,1F ns=~,1F~%"
                n bindings (/ first (* 2 n)) (/ later (* 2 n)))))))

(defun bench-create (n)
  (multiple-value-bind (first later)
      (rounds (lambda () (make-list n :initial-element #'fiber-yield)))
    (format t "RESULT create sbcl-fiber n=~D first_ms=~,3F ms=~,3F us_per_fiber=~,4F~%"
            n (/ first 1000000) (/ later 1000000) (/ later 1000 n))))

;;; The same as children of a scope.
(defun bench-scope (n)
  (multiple-value-bind (first later)
      (rounds (lambda ()
                (list (lambda ()
                        (with-fibers (scope)
                          (loop repeat n do (spawn scope #'fiber-yield)))))))
    (format t "RESULT scope sbcl-fiber n=~D first_ms=~,3F ms=~,3F us_per_fiber=~,4F~%"
            n (/ first 1000000) (/ later 1000000) (/ later 1000 n))))

(defun take-turns (name n make-functions)
  "Print the time of one of N turns of each of the two functions that MAKE-FUNCTIONS returns."
  (multiple-value-bind (first later) (rounds make-functions)
    (format t "RESULT ~A sbcl-fiber p=~D n=~D first_ns=~,1F ns=~,1F~%"
            name *carriers* n (/ first (* 2 n)) (/ later (* 2 n)))))

;;; Two fibers, three mutexes in a circle. Each fiber holds one, takes the next, and then releases
;;; the one that it held. On one carrier the next is always held by the other fiber, which is
;;; woken by the release: each turn is one wait and one wake-up. None begins before both
;;; hold their first one, else the first would go around N times alone.
(defun climber (mutexes first n ready)
  "Return a function that goes N times from a mutex of MUTEXES to the next, from FIRST on, once
two have incremented the car of READY."
  (declare (fixnum first n))
  (flet ((mutex (i) (svref mutexes (mod (the fixnum (+ first (the fixnum i))) 3))))
    (lambda ()
      (grab-mutex (mutex 0))
      (sb-ext:atomic-incf (car ready))
      (loop until (= (car ready) 2) do (fiber-yield))
      (loop for i fixnum from 0 below n
            do (grab-mutex (mutex (1+ i)))
               (release-mutex (mutex i)))
      (release-mutex (mutex n)))))

(defun bench-mutex (n)
  (take-turns "mutex" n
              (lambda ()
                (let ((mutexes (coerce (loop repeat 3 collect (make-mutex)) 'simple-vector))
                    (ready (list 0)))
                (list (climber mutexes 0 n ready) (climber mutexes 1 n ready))))))

(defun player (mutex queue ball me other n)
  "Return a function that waits until the car of BALL is ME and makes it OTHER, N times."
  (lambda ()
    (with-mutex (mutex)
      (loop repeat n
            do (loop until (eq (car ball) me) do (condition-wait queue mutex))
               (setf (car ball) other)
               (condition-notify queue)))))

(defun bench-condvar (n)
  (take-turns "condvar" n
              (lambda ()
                (let ((mutex (make-mutex)) (queue (make-waitqueue)) (ball (list :ping)))
                  (list (player mutex queue ball :ping :pong n)
                        (player mutex queue ball :pong :ping n))))))

;;; As in Go's program: one sends N numbers, another receives them.
(defun bench-channel (n &optional (capacity 0))
  (multiple-value-bind (first later)
      (rounds (lambda ()
                (let ((channel (sb-concurrency:make-channel :capacity capacity)))
                  (list (lambda () (dotimes (i n) (sb-concurrency:send channel i)))
                        (lambda () (loop repeat n do (sb-concurrency:receive channel)))))))
    (format t "RESULT channel sbcl-fiber p=~D n=~D capacity=~D first_ns=~,1F ns=~,1F~%"
            *carriers* n capacity (/ first n) (/ later n))))

;;; A fiber for each channel sends to it, and one selects among all.
(defun bench-select (n &optional (channels 2))
  (let ((share (ceiling n channels)))
    (multiple-value-bind (first later)
        (rounds (lambda ()
                  (let* ((channels (loop repeat channels collect (sb-concurrency:make-channel)))
                         (operation (apply #'sb-concurrency:choose
                                           (mapcar #'sb-concurrency:receive-operation channels))))
                    (cons (lambda ()
                            (loop repeat (* share (length channels))
                                  do (sb-concurrency:perform operation)))
                          (loop for channel in channels
                                collect (let ((channel channel))
                                          (lambda ()
                                            (dotimes (i share)
                                              (sb-concurrency:send channel i)))))))))
      (format t "RESULT select sbcl-fiber p=~D n=~D channels=~D first_ns=~,1F ns=~,1F~%"
              *carriers* n channels (/ first n) (/ later n)))))

(apply #'main (rest sb-ext:*posix-argv*))
