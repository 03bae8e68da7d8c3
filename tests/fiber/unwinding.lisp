;;;; Transfer of control in fibers that park on the way: catch tags, cleanups, handlers, restarts,
;;;; dead frames

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* unwinding)

;;;; Transfer of control

(test catch-and-throw
  (on-carriers (n)
    (is (equal (loop for i below 50 collect (list i :inner :outer))
               (in-fibers n 50 (lambda (i)
                                 (let ((trace '()))
                                   (push (catch 'tag
                                           (push (catch 'tag
                                                   (pause)
                                                   (push i trace)
                                                   (catch 'other (pause) (throw 'tag :inner)))
                                                 trace)
                                           (pause)
                                           (throw 'tag :outer))
                                         trace)
                                   (reverse trace))))))))

;;; Prevents: chains of catch and unwind blocks exchanged wrongly; cleanups that park while a throw
;;; is under way.
(test cleanups-that-park
  (on-carriers (n)
    (is (equal (make-list 50 :initial-element '((1 2 3) :c :b :a))
               (in-fibers n 50 (lambda (i)
                                 (declare (ignore i))
                                 (let ((trace '()))
                                   (push (multiple-value-list
                                          (block nil
                                            (unwind-protect
                                                 (unwind-protect
                                                      (unwind-protect
                                                           (progn (pause)
                                                                  (return (values 1 2 3)))
                                                        (pause)
                                                        (push :c trace))
                                                   (pause)
                                                   (push :b trace)
                                                   (pause))
                                              (pause)
                                              (push :a trace)
                                              (pause))))
                                         trace)
                                   (list* (first trace) (reverse (rest trace))))))))))

(test multiple-values
  (on-carriers (n)
    (is (all-true-p
         (in-fibers n 30 (lambda (i)
                           (flet ((many () (values-list (loop for k below i collect (+ i k)))))
                             (equal (multiple-value-list
                                     (multiple-value-prog1 (many) (pause) (values :other :values)))
                                    (multiple-value-list
                                     (catch 'tag
                                       (unwind-protect
                                            (multiple-value-call
                                                (lambda (&rest values)
                                                  (pause)
                                                  (throw 'tag (values-list values)))
                                              (many))
                                         (pause))))))))))))

(test handlers
  (on-carriers (n)
    (is (equal (loop for i below 50 collect (list :handled i :declined))
               (in-fibers n 50
                          (lambda (i)
                            (let ((declined nil))
                              (list (handler-case
                                        (handler-bind
                                            ((simple-error (lambda (condition)
                                                             (declare (ignore condition))
                                                             (pause)
                                                             (setf declined :declined))))
                                          (pause)
                                          (error "error ~D" i))
                                      (simple-error (condition)
                                        (pause)
                                        (setf i (first (simple-condition-format-arguments
                                                        condition)))
                                        :handled))
                                    i declined)))))))
  ;; the handlers of one fiber are not those of another
  (with-group (group 1)
    (let ((other (spawn (group) (handler-bind ((warning (lambda (condition)
                                                          (declare (ignore condition))
                                                          (fail "a foreign handler"))))
                                  (fiber-park)))))
      (join (spawn (group) (signal 'warning)))
      (fiber-unpark other)
      (is (null (join (spawn (group) (signal 'warning))))))))

(test restarts
  (on-carriers (n)
    (is (equal (loop for i below 50 collect (list :chosen i))
               (in-fibers n 50 (lambda (i)
                                 (handler-bind ((error (lambda (condition)
                                                         (declare (ignore condition))
                                                         (pause)
                                                         (invoke-restart 'choose i))))
                                   (restart-case (progn (pause) (error "choose"))
                                     (choose (i) (pause) (list :chosen i)))))))))
  ;; the restarts of one fiber are not those of another
  (with-group (group 1)
    (let ((other (spawn (group) (with-simple-restart (foreign "foreign") (fiber-park)))))
      (is (null (join (spawn (group) (find-restart 'foreign)))))
      (fiber-unpark other))))

;;;; Frames that are not there, or not here

;;; The error may be signalled where the exit is tried, and can be handled there, or, as in a
;;; thread, when the cleanups of the fiber have run; then it ends the fiber.
(defun exit-result (group function)
  (quietly
    (handler-case (join (spawn (group)
                          (handler-case (funcall function)
                            (control-error () :control-error))))
      (sb-fiber::fiber-failed (condition)
        (if (typep (sb-fiber::fiber-failed-cause condition) 'control-error)
            :control-error
            condition)))))

(defun foreign-exits ()
  "A function to be run by a fiber, which parks it, and a function that returns exits to its
frames."
  (let ((exits nil))
    (values (lambda ()
              (catch 'foreign-tag
                (block foreign-block
                  (tagbody
                     (setf exits (list (lambda () (return-from foreign-block 1))
                                       (lambda () (go foreign-tag))
                                       (lambda () (throw 'foreign-tag 2))))
                     (fiber-park)
                     (return-from foreign-block :untouched)
                   foreign-tag
                     (return-from foreign-block :wrong)))))
            (lambda () exits))))

;;; Prevents: unwinding on somebody else's stack.
(test exit-to-a-frame-of-another-fiber
  (on-carriers (n)
    (with-group (group n)
      (multiple-value-bind (function exits) (foreign-exits)
        (let ((owner (submit-fiber group (make-fiber function)))
              (cleanups 0))
          (loop until (funcall exits) do (sb-thread:thread-yield))
          (dolist (exit (funcall exits))
            (is (eq :control-error (exit-result group exit)))
            ;; with a cleanup in between, which parks
            (is (eq :control-error
                    (exit-result group (lambda ()
                                         (unwind-protect (funcall exit)
                                           (pause)
                                           (incf cleanups)))))))
          (is (= 3 cleanups))
          (fiber-unpark owner)
          (is (eq :untouched (join owner)))
          ;; now the owner is dead and its stack is free, perhaps somebody's
          (dolist (exit (funcall exits))
            (is (eq :control-error (exit-result group exit)))))))))

(defun make-dead-return () (block nil (lambda () (return 1))))
(defun make-dead-go ()
  (tagbody
     (return-from make-dead-go (lambda () (go tag)))
   tag))

(test exit-to-a-dead-frame
  (on-carriers (n)
    (with-group (group n)
      (dolist (maker '(make-dead-return make-dead-go))
        (is (eq :control-error
                (exit-result group (lambda ()
                                     (let ((exit (funcall maker)))
                                       (pause)
                                       (funcall exit)))))))
      (is (eq :control-error (exit-result group (lambda () (throw 'no-such-tag 1))))))))

;;; Prevents: a thread's frame taken for one of the fiber's.
(test exit-to-a-frame-of-a-thread
  (on-carriers (n)
    (with-group (group n)
      (is (eq :control-error
              (block nil
                (exit-result group (lambda () (return :wrong))))))
      (is (eq :control-error
              (catch 'tag-of-the-thread
                (exit-result group (lambda () (throw 'tag-of-the-thread :wrong)))))))))
