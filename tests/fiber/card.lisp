;;;; Stacks that the collector skips, and that others write to: runtime/fiber-card.c

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/collecting.lisp" *load-truename*))

(def-suite* card)

(defparameter *run-file*
  (sb-ext:native-namestring (merge-pathnames "run.lisp" *load-truename*)))

(defun collect-until-old ()
  "Collect until what parked fibers refer to is not young any more."
  (dotimes (i 5) (sb-ext:gc)))

(defun old-p (fiber)
  (logtest #x10 (sb-fiber::stack-state fiber)))

;;; Prevents: that nothing is ever skipped; that a stack is that has run.
(test stacks-that-do-not-run-become-old
  (on-carriers (n)
    (with-group (group n)
      (let ((fibers (loop repeat 100
                          collect (wait-until-parked
                                   (spawn (group)
                                     (fiber-park)
                                     (sb-fiber::stack-state (current-fiber)))))))
        (is (notany #'old-p fibers))
        (collect-until-old)
        (is (every #'old-p fibers))
        (mapc #'fiber-unpark fibers)
        (is (equal '(1)
                   (remove-duplicates (join-all fibers))))))))

;;;; Objects on a parked stack, into which others store what is young

(defstruct slots a b)

(declaim (notinline publish))
(defun publish (holder object)
  (setf (car holder) object))

(defmacro with-published ((holder object form) &body check)
  "Park with OBJECT, which FORM makes on the stack, in the car of HOLDER; return what CHECK does."
  `(let ((,object ,form))
     (declare (dynamic-extent ,object))
     (publish ,holder ,object)
     (fiber-park)
     (publish ,holder nil)
     ,@check))

(defun young (i) (list i (list (+ i 1) (format nil "~D" i))))

(defun intact-young-p (object i)
  (and (consp object) (eql i (first object)) (equal (list (+ i 1) (format nil "~D" i))
                                                    (second object))))

(declaim (notinline store))
(defun store (kind holder i)
  "Store what is young into the object in HOLDER. The store has a barrier, as this function does not
know where the object is."
  (let ((object (car holder)))
    (ecase kind
      (:vector (setf (svref object 3) (young i)))
      (:large-vector (setf (svref object 2500) (young i)))
      (:cons (setf (cdr object) (young i)))
      (:list (setf (third object) (young i)))
      (:structure (setf (slots-b object) (young i)))
      (:closure (funcall (the function object) (young i)))))
  nil)

(defun park-with (kind holder i)
  "Publish an object of KIND that lies on the stack, park, and tell whether it holds what I tells."
  (ecase kind
    (:vector (with-published (holder object (make-array 8 :initial-element nil))
               (intact-young-p (svref object 3) i)))
    (:large-vector (with-published (holder object (make-array 5000 :initial-element nil))
                     (intact-young-p (svref object 2500) i)))
    (:cons (with-published (holder object (cons nil nil)) (intact-young-p (cdr object) i)))
    (:list (with-published (holder object (list 1 2 3 4)) (intact-young-p (third object) i)))
    (:structure (with-published (holder object (make-slots)) (intact-young-p (slots-b object) i)))
    (:closure (let ((value nil))
                (flet ((set-value (new) (setf value new)))
                  (declare (dynamic-extent #'set-value))
                  (publish holder #'set-value)
                  (fiber-park)
                  (publish holder nil)
                  (intact-young-p value i))))))

(defparameter *kinds* '(:vector :large-vector :cons :list :structure :closure))

(defun kind-of (i) (nth (mod i (length *kinds*)) *kinds*))

(defun check-stores (n-fibers n-carriers)
  "Let fibers store into the stacks of N-FIBERS others that are skipped, collect, and look."
  (with-group (group n-carriers)
    (let* ((holders (loop repeat n-fibers collect (list nil)))
           (fibers (loop for holder in holders
                         for i from 0
                         collect (let ((holder holder) (i i))
                                   (spawn (group) (park-with (kind-of i) holder i))))))
      (mapc #'wait-until-parked fibers)
      (collect-until-old)
      (is (every #'old-p fibers))
      (join-all (loop for holder in holders
                      for i from 0
                      collect (let ((holder holder) (i i))
                                (spawn (group) (store (kind-of i) holder i)))))
      (dotimes (i 6)
        (if (= i 4) (sb-ext:gc :gen 2) (sb-ext:gc))
        (make-list 200000))
      (is (every #'old-p fibers))
      (mapc #'fiber-unpark fibers)
      (is (null (set-difference (join-all fibers) '(t)))))))

;;; Prevents: objects that die or move although a stack refers to them, which has not run.
(test stores-into-parked-stacks
  (on-carriers (n)
    (check-stores 120 n)))

;;; Prevents: a mark that is forgotten because a stack with the same card is scanned.
(test stores-into-many-parked-stacks
  (check-stores 1500 2))

(declaim (notinline store-often))
(defun store-often (vector object)
  (declare (simple-vector vector))
  (loop repeat 3000
        do (setf (svref vector 1) object
                 (svref vector 6) object))
  nil)

(defun await-collections (n)
  (let ((count (sb-alien:extern-alien "n_lisp_gcs" sb-alien:int)))
    (loop while (and **collecting**
                     (< (sb-alien:extern-alien "n_lisp_gcs" sb-alien:int) (+ count n)))
          do (sleep 1/10000))))

(defun lost-stores (holder)
  "Store what is young into the vector in HOLDER while **COLLECTING**, and look after a while; how
often was it lost?"
  (let ((vector (car holder)))
    (declare (simple-vector vector))
    (loop while **collecting**
          for i from 0
          count (progn
                  (store-often vector (list i (list i)))
                  (await-collections 4)
                  (not (and (equal (list i (list i)) (svref vector 1))
                            (eq (svref vector 1) (svref vector 6))))))))

;;; Prevents: a mark that a collection overlooks in the midst of stores.
(test stores-during-collections
  (on-carriers (n :counts '(1 2))
    (with-group (group n)
      (let* ((holder (list nil))
             (fiber (wait-until-parked
                     (spawn (group)
                       (with-published (holder vector (make-array 8 :initial-element nil)) t)))))
        (collect-until-old)
        (is (eql 0 (while-collecting (200) (lost-stores holder))))
        (fiber-unpark fiber)
        (is (eq t (join fiber)))))))

;;; Who was interrupted may have made the mark, and not the store yet. Prevents: a mark that is
;;; forgotten then.
(test registers-that-point-into-parked-stacks
  (on-carriers (n)
    (with-group (group n)
      (let* ((holder (list nil))
             (fiber (wait-until-parked
                     (spawn (group)
                       (with-published (holder vector (make-array 8 :initial-element nil)) t))))
             (interrupted (wait-until-parked
                           (spawn (group)
                             (handler-case
                                 (handler-bind ((error (lambda (condition)
                                                         (declare (ignore condition))
                                                         (fiber-park))))
                                   (svref (car holder) (opaque 9)))
                               (error () t))))))
        (collect-until-old)
        (is (not (old-p fiber)))
        (fiber-unpark interrupted)
        (is (eq t (join interrupted)))
        (collect-until-old)
        (is (old-p fiber))
        (fiber-unpark fiber)
        (is (eq t (join fiber)))))))

;;; Prevents: the same for a value of a binding.
(defvar *value-in-fiber*)

(test values-that-are-set-in-parked-fibers
  (with-group (group 1)
    (let ((fibers (loop for i below 50
                        collect (let ((i i))
                                  (wait-until-parked
                                   (spawn (group)
                                     (let ((*value-in-fiber* nil))
                                       (fiber-park)
                                       (intact-young-p *value-in-fiber* i))))))))
      (collect-until-old)
      (loop for fiber in fibers
            for i from 0
            do (setf (sb-thread:symbol-value-in-thread '*value-in-fiber* fiber) (young i)))
      (dotimes (i 5) (sb-ext:gc) (make-list 200000))
      (mapc #'fiber-unpark fibers)
      (is (null (set-difference (join-all fibers) '(t)))))))

;;;; Where stacks lie

(defun card-distance (address)
  "How far behind the start of the heap ADDRESS is, as far as cards are concerned."
  (let ((span (ash (1+ (sb-alien:extern-alien "gc_card_table_mask" sb-alien:long)) 10)))
    (mod (- address sb-vm:dynamic-space-start) span)))

(defun beside-heap-p (fiber)
  (loop for address in (list (sb-fiber::fiber-control-stack-start fiber)
                             (sb-fiber::fiber-control-stack-end fiber))
        always (>= (card-distance address) (sb-ext:dynamic-space-size))))

;;; Prevents: marks of the heap, all of whose free pages are marked.
(test stacks-have-other-cards-than-the-heap
  (with-group (group 2)
    (let ((fibers (loop repeat 2000
                        collect (submit-fiber group (make-fiber #'fiber-park)))))
      (mapc #'wait-until-parked fibers)
      (is (every #'beside-heap-p fibers))
      (mapc #'fiber-unpark fibers))))

;;; The smaller the heap, the fewer cards there are for stacks.
(unless (sb-ext:posix-getenv "SB_FIBER_TEST_HEAP")
  (test heaps-of-other-sizes
    (dolist (size '("300MB" "1GB" "12GB" "64GB"))
      (multiple-value-bind (code output)
          (call-in-child (list "--load" *run-file* "card")
                         :heap size
                         :environment '("SB_FIBER_TEST_HEAP=1"))
        (is (= 0 code) "With ~A of heap:~%~A" size output)))))

;;; The table of cards cannot be as large as it would have to be: stacks are never skipped.
(test heap-without-cards-for-stacks
  (is (equal "(NIL 2)"
             (child-result
              '(let* ((group (start-fibers nil :carrier-count 1))
                      (fiber (submit-fiber group (make-fiber (lambda () (fiber-park) 2)))))
                (loop until (eq :parked (fiber-state fiber)) do (sleep 0.01))
                (dotimes (i 6) (sb-ext:gc))
                (princ (list (logtest #x10 (sb-fiber::stack-state fiber))
                             (progn (fiber-unpark fiber) (fiber-join fiber)))))
              :heap "2048GB"))))
