;;;; SEARCH-ROOTS, which finds what fibers keep alive

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* trace)

(defvar *kept*)

(defun scrub ()
  (let ((words (make-array 500 :initial-element 0)))
    (declare (dynamic-extent words))
    (opaque words)
    (sb-sys:scrub-control-stack)))

(defun roots (weak-pointer &rest ignored)
  "The root of each path to what WEAK-POINTER points to, which is not in an IGNORED variable."
  (scrub)
  (mapcar #'second (sb-ext:search-roots weak-pointer :print nil :ignore ignored)))

(defun new-object ()
  (list (vector (make-string 10))))

;;; What makes the object leaves nothing of it on the stack of the one that searches.
(defun call-with-object (function)
  "Call FUNCTION with a weak pointer to an object that a fiber shall keep, and the object; return
the fiber and the weak pointer."
  (let* ((object (new-object)) (weak (sb-ext:make-weak-pointer (svref (first object) 0))))
    (multiple-value-prog1 (values (funcall function object) weak)
      (setf object nil))))

;;; What a variable of the fiber has had may stay on its stack.
(defmacro with-keeper ((group fiber weak take &rest arguments) form &body body)
  "Execute BODY with FIBER, which executes FORM and parks in it, and WEAK, which points into what
TAKE, called by FORM, returns."
  `(multiple-value-bind (,fiber ,weak)
       (call-with-object (lambda (object)
                           (let ((cell (list object)))
                             (spawn (,group ,@arguments)
                               (flet ((,take () (pop cell)))
                                 (declare (notinline ,take))
                                 ,form)))))
     (is-true (wait-until (eq :parked (fiber-state ,fiber))))
     (multiple-value-prog1 (progn ,@body)
       (fiber-unpark ,fiber)
       (join ,fiber))))

(test on-the-stack-of-a-parked-fiber
  (on-carriers (n)
    (with-group (group n)
      (with-keeper (group fiber weak take :name "keeper")
          (let ((object (take)))
            (fiber-park)
            (opaque object))
        (destructuring-bind ((who where)) (roots weak)
          (is (equal "keeper" who))
          (is (typep where 'sb-sys:system-area-pointer)))))))

(test a-nameless-fiber
  (with-group (group 1)
    (with-keeper (group fiber weak take)
        (let ((object (take)))
          (fiber-park)
          (opaque object))
      (is (eq fiber (first (first (roots weak))))))))

(test in-a-binding-of-a-parked-fiber
  (on-carriers (n)
    (with-group (group n)
      (with-keeper (group fiber weak take :name "keeper")
          (let ((*kept* (take)))
            (scrub)
            (fiber-park))
        (is (equal '(("keeper" *kept* t)) (roots weak)))
        (is (null (roots weak '*kept*)))))))

(test in-a-shadowed-binding-of-a-parked-fiber
  (on-carriers (n)
    (with-group (group n)
      (with-keeper (group fiber weak take :name "keeper")
          (let ((*kept* (take)))
            (let ((*kept* 1))
              (scrub)
              (fiber-park)))
        (is (equal '(("keeper" *kept* nil)) (roots weak)))
        (is (equal '(("keeper" *kept* nil)) (roots weak '*kept*)))))))

(test in-the-fiber-that-searches
  (on-carriers (n)
    (is (equal '("searcher" *kept* t)
               (in-fiber (n :name "searcher")
                 (multiple-value-bind (none weak)
                     (call-with-object (lambda (object) (setf *kept* nil) (push object *kept*) nil))
                   (declare (ignore none))
                   (let ((*kept* (shiftf *kept* nil)))
                     (first (roots weak)))))))))

(test nobody-keeps-it
  (with-group (group 1)
    (multiple-value-bind (fiber weak)
        (call-with-object (lambda (object)
                            (let ((cell (list object)))
                              (spawn (group) (length (pop cell))))))
      (join fiber)
      (scrub)
      (sb-ext:gc :full t)
      (is (null (roots weak))))))

(test in-a-fiber-that-runs-elsewhere
  (with-group (group 1)
    (let ((running (make-flag)) (stop (make-flag)))
      (multiple-value-bind (fiber weak)
          (call-with-object (lambda (object)
                              (let ((cell (list object)))
                                (spawn (group :name "runner")
                                  (let ((object (pop cell)))
                                    (raise-flag running)
                                    (compute-until stop)
                                    (opaque object))))))
        (wait-until (flag-value running))
        (is (equal "runner" (first (first (roots weak)))))
        (raise-flag stop)
        (join fiber)))))

;;; Prevents: a context that is taken for a thread.
(test the-fiber-has-ended-since
  (with-group (group 1)
    (let* ((fiber (spawn (group) (fiber-park)))
           (context (progn (wait-until-parked fiber) (sb-fiber::fiber-context fiber))))
      (is (eq fiber (sb-fiber::thread-of-root context)))
      (fiber-unpark fiber)
      (join fiber)
      (is (null (sb-fiber::thread-of-root context))))))

;;; Prevents: the end of the process, since it is not known where the stack of such a thread ends.
(test while-others-are-in-handlers
  (with-group (group 1)
    (let* ((inside (make-semaphore)) (proceed (make-semaphore)) (started (make-flag))
           (thread (sb-thread:make-thread (lambda () (wait-on-semaphore proceed))))
           (fiber (computing-fiber (group started) (loop (opaque started))))
           (weak (sb-ext:make-weak-pointer (setf *kept* (vector 1)))))
      (flet ((handler ()
               (signal-semaphore inside)
               (wait-on-semaphore proceed)))
        (sb-thread:interrupt-thread thread #'handler)
        (interrupt-fiber fiber #'handler))
      (wait-on-semaphore inside :n 2)
      (is (= 1 (length (sb-ext:search-roots weak :print nil))))
      (signal-semaphore proceed 3)
      (sb-thread:join-thread thread)
      (terminate-fiber fiber)
      (wait-for-end fiber))))
