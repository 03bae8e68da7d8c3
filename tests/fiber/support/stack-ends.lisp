;;;; Using up stacks, and what is done at their very end

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "guards.lisp" *load-truename*))

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

(defun call-while-collecting (function)
  (let* ((stop nil)
         (thread
           (sb-thread:make-thread (lambda ()
                                    (loop until stop do (sb-ext:gc) (sb-thread:thread-yield))))))
    (unwind-protect (funcall function)
      (setf stop t)
      (sb-thread:join-thread thread))))


;;;; At the very end of the stack

(defun control-base ()
  (+ (sb-thread::thread-control-stack-start sb-thread:*current-thread*)
     (sb-alien:extern-alien "fiber_control_reserve" sb-alien:unsigned)))

(defun stack-pointer () (sb-sys:sap-int (sb-vm::current-sp)))

(declaim (notinline call-at-distance))
(defun call-at-distance (distance function &optional (end #'control-base))
  "Call FUNCTION with about DISTANCE bytes of control stack left, before the address that END
returns."
  (declare (optimize (speed 1) (debug 1)))
  (let ((n (- (stack-pointer) (funcall end) distance)))
    (cond ((> n 2000)
           (multiple-value-prog1 (call-at-distance distance function end) (stack-pointer)))
          ((<= n 250) (funcall function))
          (t (let ((filler (make-array (- n 200) :element-type '(unsigned-byte 8))))
               (declare (dynamic-extent filler) (optimize (safety 0) (debug 0)))
               (setf (aref filler 0) 1)
               (multiple-value-prog1 (funcall function)
                 (setf (aref filler 1) (aref filler 0))))))))

(defun descend-a-little (n)
  (if (= n 0) 0 (1+ (descend-a-little (1- n)))))
