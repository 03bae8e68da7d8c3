;;;; How many fibers a group has, and whether it takes more: fiber/population.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* population)

;;; Prevents: a fiber that comes when the finisher has found nobody alive, and is lost.
(test submit-when-nobody-is-alive
  (on-carriers (n)
    (let ((group (start-fibers nil :carrier-count n))
          (fiber nil))
      (with-call-before ('sb-fiber::close-if-empty
                         (lambda (group)
                           (unless fiber (setf fiber (spawn (group) (fiber-yield) :done)))))
        (is (eq t (finish-fibers group :timeout *patience*))))
      (is (eq :done (join fiber)))
      (signals sb-thread:thread-error (spawn (group) 1)))))

(defun submit-until-refused (group)
  "Return a fiber that was accepted and has not run, or NIL."
  (handler-case (loop (let ((fiber (submit-fiber group (make-fiber (constantly t)))))
                        (unless (fiber-join fiber :timeout *patience* :default nil)
                          (return fiber))))
    (sb-thread:thread-error () nil)))

(test submit-until-refused
  (on-carriers (n)
    (loop repeat 20
          do (let* ((group (start-fibers nil :carrier-count n))
                    (thread (make-thread #'submit-until-refused :arguments (list group))))
               (sb-thread:thread-yield)
               (is (eq t (finish-fibers group :timeout *patience*)))
               (is (null (join-thread thread)))))))

;;; A fiber that was not accepted is as new.
(test submit-again-after-refusal
  (let ((group (start-fibers nil :carrier-count 1))
        (fiber (make-fiber (constantly 1))))
    (finish-fibers group)
    (signals sb-thread:thread-error (submit-fiber group fiber))
    (is (eq :new (fiber-state fiber)))
    (with-group (other 1)
      (is (= 1 (join (submit-fiber other fiber)))))))
