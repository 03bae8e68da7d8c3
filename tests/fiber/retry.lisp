;;;; Reads that find nothing, and are made again: fiber/retry.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/descriptors.lisp" *load-truename*))

(def-suite* retry)

;;;; How hasty a descriptor is

(defun hastes (cell successes)
  "The haste of CELL after each of SUCCESSES has been noted."
  (loop for success in successes
        do (sb-fiber::note-retry cell success)
        collect (sb-fiber::fd-cell-haste cell)))

(test attempts-in-vain-become-rare
  (let ((cell (sb-fiber::make-fd-cell 3)))
    (is (equal '(1 3 7 15 31 63 63 63 0 1 3)
               (hastes cell '(nil nil nil nil nil nil nil nil t nil nil))))))

(test haste-is-used-up
  (let ((cell (sb-fiber::make-fd-cell 3)))
    (is (null (sb-fiber::hasty-p cell)))
    (hastes cell '(nil nil))
    (is (equal '(t t t nil nil) (loop repeat 5 collect (sb-fiber::hasty-p cell))))
    (is (equal '(7) (hastes cell '(nil))))))

;;; Prevents: a connection whose reads wait since those of an earlier one with its number did.
(test a-new-file-has-no-haste
  (let ((cell (sb-fiber::make-fd-cell 3)))
    (hastes cell '(nil nil nil))
    (sb-fiber::forget-file cell)
    (is (null (sb-fiber::hasty-p cell)))
    (is (equal '(1) (hastes cell '(nil))))))

;;;; When there is a second attempt. Where migration is forced there is none.

(defmacro on-one-carrier ((group) &body body)
  "The value of BODY in a fiber of GROUP, which is of one carrier."
  `(with-group-of-same-carriers (,group 1)
     (join (spawn (,group) ,@body))))

(defun others-first-p ()
  (sb-fiber::look-before-retry (sb-fiber::make-fd-cell 3)))

;;; Without interrupts, lest the end of a time slice lets the others run before.
(test only-behind-a-few-others
  (unless (migration-wanted-p)
    (flet ((behind-p (n)
             (on-one-carrier (group)
               (multiple-value-bind (others firstp)
                   (sb-sys:without-interrupts
                     (values (loop repeat n collect (spawn (group) t)) (others-first-p)))
                 (join-all others)
                 firstp))))
      (is (equal '(nil t t nil) (mapcar #'behind-p '(0 1 63 64)))))))

;;; Prevents: a fiber that is taken out of the waiter map, and is in no queue.
(test what-is-reported-comes-first
  (unless (migration-wanted-p)
    (with-pipe (in out)
      (is (equal '(t :runnable #\x)
                 (on-one-carrier (group)
                   (let ((reader (spawn (group) (read-char in))))
                     (loop until (eq :parked (fiber-state reader)) do (fiber-yield))
                     (append (sb-sys:without-interrupts
                               (write-char #\x out)
                               (finish-output out)
                               (list (others-first-p) (values (fiber-state reader))))
                             (list (join reader))))))))))

;;; Prevents: looks in vain at each read of one that is alone.
(test looks-in-vain-make-hasty
  (let ((cell (sb-fiber::make-fd-cell 3)))
    (on-one-carrier (group)
      (loop repeat 100 do (sb-fiber::retry-p cell)))
    (is (= (if (migration-wanted-p) 0 63) (sb-fiber::fd-cell-last-haste cell)))))

;;; A thief would part the two.
(test not-in-a-group-of-two
  (with-group-of-same-carriers (group 2)
    (is (equal '(nil nil nil)
               (join (spawn (group)
                       (loop repeat 3
                             collect (let ((other (spawn (group) t)))
                                       (prog1 (others-first-p)
                                         (join other))))))))))

;;;; Conversations

(defun converse (in out n)
  "Ask N times over OUT, and be answered over IN. True if each answer is right."
  (loop for i below n
        do (format out "~D~%" i)
           (finish-output out)
        always (equal (read-line in) (format nil "~D" (- i)))))

(defun answer-questions (in out)
  (loop for line = (read-line in nil)
        while line
        do (format out "~D~%" (- (parse-integer line)))
           (finish-output out)))

(defun talk (group pairs n)
  "Let PAIRS of fibers of GROUP, one of which asks the other N times, talk at the same time."
  (all-true-p
   (join-all
    (loop repeat pairs
          collect (spawn (group)
                    (with-pipe (question-in question-out)
                      (with-pipe (answer-in answer-out)
                        (let ((other (spawn (group)
                                       (answer-questions question-in answer-out))))
                          (prog1 (converse answer-in question-out n)
                            (close question-out)
                            (join other))))))))))

(defun arms-of-a-talk (pairs n)
  (let ((arms 0))
    (values
     (with-call-before ('sb-fiber::arm-cell (lambda (cell)
                                              (declare (ignore cell))
                                              (incf arms)))
       (with-group-of-same-carriers (group 1)
         (talk group pairs n)))
     arms)))

;;; Without second attempts it is two for each question.
(test those-that-talk-arm-nothing
  (dolist (pairs '(1 5 20))
    (multiple-value-bind (rightp arms) (arms-of-a-talk pairs 200)
      (is-true rightp)
      (unless (migration-wanted-p)
        (is (< arms (* pairs 50)))))))

(test talks-on-many-carriers
  (on-carriers (n)
    (with-group (group n)
      (is-true (talk group 20 100)))))
