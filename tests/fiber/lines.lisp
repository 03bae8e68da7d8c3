;;;; structures and stores that share no cache line: fiber/lines.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* lines)

;;;; stores that mark a card only if it is not marked

(defstruct holder (first nil) (second nil))

(defun store-in-second (holder value)
  (sb-fiber::store-slot (holder second) holder value)
  holder)

(defun store-in-place (vector index value)
  (declare (simple-vector vector) (type (mod 1000) index))
  (sb-fiber::store-place vector index value)
  vector)

(defun survives-p (store read)
  "True if what STORE puts into an old object is there after collections of young ones. In each
round the first store finds the card without a mark, the second with one."
  (loop for round below 20
        always (progn (funcall store (list round))
                      (funcall store (list round))
                      (sb-ext:gc)
                      (equal (list round) (funcall read)))))

;;; Prevents: a young object that only an old one knows, whose card nobody marked, and that is
;;; collected.
(test slots-of-old-structures
  (let ((holder (make-holder)))
    (sb-ext:gc :full t)
    (is (survives-p (lambda (value) (store-in-second holder value))
                    (lambda () (holder-second holder))))
    (is (null (holder-first holder)))))

(test places-of-old-vectors
  (let ((vector (make-array 1000 :initial-element nil)))
    (sb-ext:gc :full t)
    (dolist (index '(0 1 499 998 999))
      (is (survives-p (lambda (value) (store-in-place vector index value))
                      (lambda () (svref vector index)))))
    (is (= 995 (count nil vector)))))

;;;; structures that keep their distance

(defun slot-words (type)
  "The words in which a structure of TYPE has its slots, without padding, and the last one it has."
  (let ((slots (sb-kernel:dd-slots (sb-kernel:find-defstruct-description type))))
    (values (loop for slot in slots
                  unless (let ((name (string (sb-kernel:dsd-name slot))))
                           (or (eql 0 (search "BEFORE-" name)) (eql 0 (search "AFTER-" name))))
                    collect (+ sb-vm:instance-slots-offset (sb-kernel:dsd-index slot)))
            (sb-kernel:dd-length (sb-kernel:find-defstruct-description type)))))

;;; A line has eight words. Wherever the structure lies, what comes before it or after it is not in
;;; the line of a slot. Prevents: run queues side by side, at twice the time for a yield.
(test distances
  (dolist (type '(sb-fiber::run-queue sb-fiber::scheduler sb-fiber::carrier))
    (multiple-value-bind (words last) (slot-words type)
      (is (<= 7 (reduce #'min words)))
      (is (<= 7 (- last (reduce #'max words)))))))
