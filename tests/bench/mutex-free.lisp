;;;; what a mutex costs that nobody else wants: in a fiber, in a thread, without the fork; see
;;;; run.sh

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

;;; This file runs in a plain SBCL as well, as the other end of a pipe: it measures a round
;;; whenever it is told to. So the rounds of all three alternate, and what else the
;;; machine does meanwhile disturbs them alike.

(defpackage "SB-FIBER-BENCH"
  (:use "COMMON-LISP" "SB-THREAD"))

(in-package "SB-FIBER-BENCH")

(declaim (optimize (speed 1) (safety 1) (debug 0)))

(defparameter *rounds* 101)

(defvar *mutex* (make-mutex))

(defun nanoseconds ()
  (multiple-value-bind (seconds nanoseconds)
      (sb-unix:clock-gettime sb-unix:clock-monotonic)
    (+ (* seconds 1000000000) nanoseconds)))

(defun work (n)
  (declare (fixnum n))
  (let ((mutex *mutex*)
        (count 0))
    (declare (fixnum count))
    (loop repeat n do (with-mutex (mutex) (incf count)))
    (assert (= count n))))

;;; Once before: a new thread or fiber must touch its stack first.
(defun one-round (n)
  "The nanoseconds that each of N executions of WITH-MUTEX takes."
  (work (floor n 10))
  (let ((start (nanoseconds)))
    (work n)
    (/ (- (nanoseconds) start) n 1.0)))

(defun round-in-thread (n)
  (join-thread (make-thread #'one-round :arguments (list n))))

(defun serve-rounds (n)
  "Measure a round for each line of input."
  (loop while (read-line *standard-input* nil)
        do (format t "~F~%" (round-in-thread n))
           (finish-output)))

#+sb-fiber
(progn
(defun start-plain (command n)
  "The process of a plain SBCL that COMMAND starts, which measures rounds, or NIL."
  (when command
    (sb-ext:run-program "/bin/sh"
                        (list "-c" (format nil "exec ~A --script ~A ~D" command
                                           (sb-ext:native-namestring *load-truename*) n))
                        :input :stream :output :stream :error nil :wait nil)))

(defun round-in-plain (process)
  (let ((input (sb-ext:process-input process)))
    (terpri input)
    (finish-output input)
    (let ((*read-default-float-format* 'single-float))
      (read (sb-ext:process-output process)))))

(defun round-in-fiber (group n)
  (sb-fiber:fiber-join
   (sb-fiber:submit-fiber group (sb-fiber:make-fiber (lambda () (one-round n))))))

(defun median (numbers)
  (nth (floor (length numbers) 2) (sort (copy-list numbers) #'<)))

(defun compare (n)
  (let ((group (sb-fiber:start-fibers nil :carrier-count 1))
        (plain (start-plain (sb-ext:posix-getenv "PLAIN") n))
        (fiber '()) (thread '()) (without '()))
    (loop repeat *rounds*
          do (push (round-in-fiber group n) fiber)
             (push (round-in-thread n) thread)
             (when plain (push (round-in-plain plain) without)))
    (sb-fiber:finish-fibers group)
    (format t "RESULT mutex-free sbcl-fiber n=~D fiber_ns=~,2F thread_ns=~,2F fiber/thread=~,3F"
            n (median fiber) (median thread) (/ (median fiber) (median thread)))
    (when plain
      (close (sb-ext:process-input plain))
      (format t " plain_ns=~,2F fiber/plain=~,3F" (median without)
              (/ (median fiber) (median without))))
    (terpri))))

(let ((n (parse-integer (car (last sb-ext:*posix-argv*)))))
  #+sb-fiber (compare n)
  #-sb-fiber (serve-rounds n))
