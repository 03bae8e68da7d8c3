;;;; What a fiber must find again after it was parked: bindings, floating point modes, data on its
;;;; stacks

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* switch)

(defvar *other* :other-global)
(defvar *always* :always-global)
(declaim (sb-ext:always-bound *always*))

;;;; The variables themselves

(test current-thread-is-the-fiber
  (on-carriers (n)
    (is (all-true-p
         (in-fibers n 50 (lambda (i)
                           (declare (ignore i))
                           (let ((me (current-fiber)))
                             (loop repeat 50
                                   always (and (eq me sb-thread:*current-thread*)
                                               (eq me (current-fiber))
                                               (typep me 'fiber)
                                               (typep me 'sb-thread:thread)
                                               (progn (pause) t))))))))))

(defun bind-deeply (depth)
  "Bind the same symbol DEPTH times, parking on the way in and out. T if all values were found
again."
  (or (= depth 0)
      (let ((*variable* depth))
        (pause)
        (and (eql *variable* depth)
             (progn (incf *variable* 1000)
                    (bind-deeply (1- depth)))
             (progn (pause)
                    (eql *variable* (+ depth 1000)))))))

;;; Prevents: entries for one symbol exchanged in the wrong order.
(test same-symbol-many-times
  (on-carriers (n)
    (is (all-true-p (in-fibers n 30 (lambda (i) (bind-deeply (* 2 i))))))
    (is (eq :global *variable*))))

;;; Few can be fresh: a thread-local index is never given back.
(defparameter *symbols*
  (loop repeat 50
        collect (let ((symbol (gensym "VARIABLE")))
                  (proclaim `(special ,symbol))
                  symbol)))

(defun bind-symbols (symbols)
  (let ((values (loop for symbol in symbols collect (list symbol))))
    (progv symbols values
      (pause)
      (and (every #'eq (mapcar #'symbol-value symbols) values)
           (progn (dolist (symbol symbols) (set symbol symbol))
                  (pause)
                  (every (lambda (symbol) (eq symbol (symbol-value symbol))) symbols))))))

;;; Prevents: a number of bindings for which the loops of the switch go wrong.
(test zero-to-fifty-bindings
  (on-carriers (n)
    (is (all-true-p (in-fibers n 51 (lambda (i) (bind-symbols (last *symbols* i))))))
    (is (notany #'boundp *symbols*))))

;;; Symbols that get their thread-local index in a fiber, which then goes elsewhere.
(test symbols-never-bound-before
  (on-carriers (n)
    (is (all-true-p
         (in-fibers n 20 (lambda (i)
                           (declare (ignore i))
                           (let ((symbol (gensym "FRESH")))
                             (proclaim `(special ,symbol))
                             (and (bind-symbols (list symbol))
                                  (not (boundp symbol))
                                  (progn (set symbol 1)
                                         (pause)
                                         (eql 1 (symbol-value symbol)))))))))))

(defun read-unbound (symbol)
  (handler-case (symbol-value symbol)
    (unbound-variable () :unbound)))

;;; Prevents: unbound markers lost, or an indirection word that is not mended: a symbol bound
;;; without a value reads as something else.
(test bindings-without-values
  (on-carriers (n)
    (is (all-true-p
         (in-fibers n 40 (lambda (i)
                           (let ((symbols (last *symbols* (1+ (mod i 7)))))
                             (progv symbols '(1)
                               (loop repeat 10
                                     always (and (eql 1 (symbol-value (first symbols)))
                                                 (every (lambda (symbol)
                                                          (eq :unbound (read-unbound symbol)))
                                                        (rest symbols))
                                                 (not (some #'boundp (rest symbols)))
                                                 (progn (pause) t)))))))))
    (is (all-true-p
         (in-fibers n 40 (lambda (i)
                           (declare (ignore i))
                           (let ((*variable* 1))
                             (pause)
                             (makunbound '*variable*)
                             (pause)
                             (and (not (boundp '*variable*))
                                  (eq :unbound (read-unbound '*variable*))
                                  (progn (setf *variable* 2)
                                         (pause)
                                         (eql 2 *variable*))))))))
    (is (not (boundp '*unbound*)))
    (is (eq :global *variable*))))

(test always-bound-variable
  (on-carriers (n)
    (is (all-true-p
         (in-fibers n 20 (lambda (i)
                           (and (eq *always* :always-global)
                                (let ((*always* i))
                                  (pause)
                                  (incf *always*)
                                  (pause)
                                  (eql *always* (1+ i)))
                                (progn (pause) (eq *always* :always-global)))))))))

;;; Prevents: an indirection word that still points to the thread-local cell of a parked fiber's
;;; binding: the next fiber, or the carrier, would not see the global value, nor set it.
(test global-value-behind-a-binding
  (on-carriers (n)
    (setf *variable* :global)
    (with-group (group n)
      (let* ((changed nil)
             (fibers (loop for i below 20
                           collect (let ((i i))
                                     (spawn (group)
                                       (list (let ((*variable* i))
                                               (loop until changed do (pause))
                                               *variable*)
                                             *variable*)))))
             (setters (loop repeat 5
                            collect (spawn (group)
                                      (loop repeat 20
                                            always (progn (pause)
                                                          (member *variable*
                                                                  '(:global :changed))))))))
        (loop repeat 20 do (sb-thread:thread-yield))
        (join (spawn (group) (setf *variable* :changed)))
        (is (eq :changed *variable*))
        (setf changed t)
        (is (equal (loop for i below 20 collect (list i :changed)) (join-all fibers)))
        (is (not (member nil (join-all setters))))))
    (setf *variable* :global)))

;;; As MAKE-THREAD: bindings of the creator are not inherited.
(test what-a-fiber-starts-with
  (on-carriers (n)
    (let ((*variable* :mine))
      (is (eq :global (in-fiber (n) *variable*)))
      (is (equal '(1 nil :unbound)
                 (with-group (group n)
                   (join (submit-fiber
                          group
                          (make-fiber (lambda ()
                                        (pause)
                                        (list *variable* *other* (read-unbound '*unbound*)))
                                      :initial-bindings '((*variable* . 1) (*other* . nil)
                                                          (*variable* . 2)))))))))
    (is (eq :global *variable*))))

;;; Variables of the system that each thread has for itself, and some that are only set, not bound.
;;; Prevents: a fiber that finds those of the fiber before it on the carrier.
(test variables-of-the-system
  (on-carriers (n)
    (is (all-true-p
         (in-fibers n 40 (lambda (i)
                           (let ((clusters sb-kernel:*handler-clusters*)
                                 (restarts sb-kernel:*restart-clusters*))
                             (handler-bind ((warning #'identity))
                               (restart-case
                                   (let ((*print-base* (+ 2 (mod i 30)))
                                         (*standard-output* (make-string-output-stream)))
                                     (loop repeat 10 do (princ i) (pause))
                                     (and (string= (get-output-stream-string *standard-output*)
                                                   (with-output-to-string (out)
                                                     (loop repeat 10 do (princ i out))))
                                          (not (eq clusters sb-kernel:*handler-clusters*))))
                                 (nothing () nil))
                               (pause))
                             (and (eq clusters sb-kernel:*handler-clusters*)
                                  (eq restarts sb-kernel:*restart-clusters*)
                                  (null sb-impl::*deadline*)
                                  (eq t sb-sys:*interrupts-enabled*)
                                  (eql 0 sb-kernel:*free-interrupt-context-index*)
                                  (null sb-kernel:*gc-inhibit*)
                                  t))))))))

;;;; Data on the stacks

(defun recurse-with-data (depth i)
  "Check data of dynamic extent in each of DEPTH frames after what is below has parked."
  (let ((list (list i depth (+ i depth)))
        (vector (make-array 20 :element-type '(unsigned-byte 64) :initial-element (+ i depth)))
        (floats (make-array 4 :element-type 'double-float
                            :initial-element (float (* i depth) 1d0))))
    (declare (dynamic-extent list vector floats))
    (flet ((check ()
             (and (equal list (list i depth (+ i depth)))
                  (every (lambda (x) (= x (+ i depth))) vector)
                  (every (lambda (x) (= x (* i depth))) floats))))
      (declare (dynamic-extent #'check))
      (if (= depth 0)
          (loop repeat 5 always (progn (pause) (check)))
          (and (recurse-with-data (1- depth) i)
               (check)
               (progn (when (= 0 (mod depth 16)) (pause)) (check)))))))

(test dynamic-extent-data
  (on-carriers (n)
    (is (all-true-p (in-fibers n 40 (lambda (i) (recurse-with-data (* 4 i) i)))))))

(test dynamic-extent-closures
  (on-carriers (n)
    (is (equal (loop for i below 40 collect (+ i 30))
               (in-fibers n 40 (lambda (i)
                                 (sb-int:dx-flet ((add () (pause) (incf i)))
                                   (flet ((call (function) (funcall function)))
                                     (declare (notinline call))
                                     (loop repeat 30 do (call #'add)))
                                   i)))))))

(defun alien-data (depth i)
  (sb-alien:with-alien ((array (array sb-alien:int 16)))
    (dotimes (k 16) (setf (sb-alien:deref array k) (+ (* 1000 depth) i k)))
    (pause)
    (and (or (= depth 0) (alien-data (1- depth) i))
         (progn (pause)
                (loop for k below 16
                      always (= (sb-alien:deref array k) (+ (* 1000 depth) i k)))))))

;;; Prevents: an alien stack that is the carrier's.
(test alien-data-on-the-stack
  (on-carriers (n)
    (is (all-true-p (in-fibers n 40 (lambda (i) (alien-data (mod i 10) i)))))))

(test numbers-in-registers
  (on-carriers (n)
    (is (all-true-p
         (in-fibers n 40 (lambda (i)
                           (let ((a (float i 1d0)) (b (float i 1f0)) (c (complex (float i 1d0) 1d0))
                                 (word (ash (logand i 255) 50)))
                             (declare (double-float a) (single-float b)
                                      (type (unsigned-byte 64) word)
                                      (type (complex double-float) c))
                             (loop repeat 50
                                   do (incf a 1d0) (incf b 1f0)
                                      (setf word (logxor word 1))
                                      (incf c 1)
                                      (pause))
                             (and (= a (+ i 50)) (= b (+ i 50)) (= word (ash (logand i 255) 50))
                                  (= c (complex (+ i 50d0) 1d0))))))))))

;;;; Floating point modes

(defun traps-p ()
  (handler-case (progn (/ (opaque 1d0) (opaque 0d0)) nil)
    (division-by-zero () t)))

;;; Prevents: modes that belong to the carrier, so that one fiber's masks are another's.
(test traps-masked-in-some
  (on-carriers (n)
    (is (equal (loop for i below 40 collect (evenp i))
               (in-fibers n 40
                          (lambda (i)
                            (flet ((check (expected)
                                     (loop repeat 20
                                           always (progn (pause) (eq expected (traps-p))))))
                              (if (evenp i)
                                  (check t)
                                  (not (and (check t)
                                            (sb-int:with-float-traps-masked
                                                (:divide-by-zero :invalid)
                                              (check nil))
                                            (check t)))))))))
    ;; a fiber that ends with its traps masked leaves them to nobody
    (with-group (group n)
      (dotimes (k 20)
        (join (spawn (group) (sb-int:set-floating-point-modes :traps '())))
        (is (eq t (join (spawn (group) (traps-p)))))))))

(defun a-third () (/ (opaque 1d0) (opaque 3d0)))

(test rounding-modes
  (on-carriers (n)
    (let ((near (a-third)))
      (is (all-true-p
           (in-fibers n 30
                      (lambda (i)
                        (sb-int:set-floating-point-modes
                         :rounding-mode (if (oddp i) :positive-infinity :nearest))
                        (loop repeat 30
                              always (progn (pause)
                                            (eq (oddp i) (> (a-third) near))))))))
      (is (= near (a-third))))))

;;;; Depth

(declaim (notinline plus))
(defun plus (a b) (+ a b))

(defun recurse-and-park (depth)
  (if (= depth 0)
      (progn (pause) (pause) 0)
      (plus 1 (recurse-and-park (1- depth)))))

(test park-at-the-bottom
  (on-carriers (n)
    (is (equal (loop for i below 60 collect (* i 40))
               (in-fibers n 60 (lambda (i) (recurse-and-park (* i 40))))))))

(test switch-in-stacks-of-all-sizes
  (on-carriers (n)
    (with-group (group n)
      (is (equal (loop for i below 60 collect (* 10 i))
                 (join-all (loop for i below 60
                                 collect (let ((i i))
                                           (spawn (group :stack-size (* (1+ (mod i 5)) 64 1024))
                                             (recurse-and-park (* 10 i)))))))))))

;;; An argument list longer than a page, in the smallest stack.
(test many-arguments
  (with-group (group 1)
    (is (= 3000 (join (spawn (group :stack-size (* 64 1024))
                        (apply (lambda (&rest arguments) (fiber-yield) (length arguments))
                               (make-list 3000))))))))

;;;; Foreign frames

(sb-alien:define-alien-callable compare-and-pause sb-alien:int ((a sb-alien:unsigned-long)
                                                                (b sb-alien:unsigned-long))
  (pause)
  (let ((x (sb-sys:sap-ref-32 (sb-sys:int-sap a) 0))
        (y (sb-sys:sap-ref-32 (sb-sys:int-sap b) 0)))
    (cond ((< x y) -1) ((> x y) 1) (t 0))))

(defun sort-by-qsort (vector)
  (sb-sys:with-pinned-objects (vector)
    (sb-alien:alien-funcall
     (sb-alien:extern-alien "qsort" (function sb-alien:void sb-sys:system-area-pointer
                                              sb-alien:unsigned-long sb-alien:unsigned-long (* t)))
     (sb-sys:vector-sap vector) (length vector) 4
     (sb-alien:alien-sap (sb-alien:alien-callable-function 'compare-and-pause))))
  vector)

;;; qsort(3) in each fiber, the comparisons of which park. Prevents: a fiber that goes on in another
;;; OS thread with frames that keep addresses of the first; a thread's state left by one callback
;;; and found by the next.
(test callbacks-that-park
  (on-carriers (n)
    (is (all-true-p
         (in-fibers n 30 (lambda (i)
                           (let ((vector (make-array (+ 2 i) :element-type '(unsigned-byte 32))))
                             (dotimes (k (length vector)) (setf (aref vector k) (random 1000)))
                             (let ((sorted (sort (copy-seq vector) #'<)))
                               (equalp sorted (sort-by-qsort vector))))))))))
