;;;; What looks at the heap, or is called by the collector, in fibers and beside them

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* heap)

(defun instances-of (type)
  (let ((n 0))
    (sb-vm:map-allocated-objects (lambda (object widetag bytes)
                                   (declare (ignore widetag bytes))
                                   (when (typep object type) (incf n)))
                                 :dynamic)
    n))

(defstruct kept-by-a-fiber)

(test map-allocated-objects-in-fibers
  (on-carriers (n)
    (with-group (group n)
      (let ((keepers (loop repeat 10
                           collect (spawn (group)
                                     (let ((object (opaque (make-kept-by-a-fiber))))
                                       (fiber-park)
                                       (kept-by-a-fiber-p (opaque object)))))))
        (is-true (wait-until (every (lambda (fiber) (eq :parked (fiber-state fiber))) keepers)))
        (sb-ext:gc)
        (is (<= 10 (join (spawn (group) (instances-of 'kept-by-a-fiber)))))
        (mapc #'fiber-unpark keepers)
        (is (all-true-p (join-all keepers)))))))

(test room-in-fibers
  (on-carriers (n)
    (dolist (verbosity '(nil :default t))
      (let ((text (in-fiber (n) (with-output-to-string (*standard-output*) (room verbosity)))))
        (is (search "Dynamic space usage is:" text))))))

(defun make-garbage (n finalizer)
  (dotimes (i n)
    (sb-ext:finalize (list i) finalizer :dont-save t)))

;;; A finalizer is called by a thread of its own. Prevents: one that never has its turn.
(test finalizers-that-run-fibers
  (on-carriers (n)
    (let ((ran (make-flag)))
      (with-group (group n)
        (make-garbage 20 (lambda ()
                           (join (spawn (group) (sleep 1/1000) (count-one ran)))
                           (run-fibers (make-fiber (lambda () (sleep 1/1000) (count-one ran)))
                                       :carrier-count 1)))
        (is-true (wait-until (progn (in-fiber () (make-list 10000) (sb-ext:gc :full t))
                                    ;; the last ones may be on some stack
                                    (<= 30 (flag-count ran)))))))))

(test finalizers-called-by-fibers
  (on-carriers (n)
    (let ((ran (make-flag)))
      (is-true (in-fiber (n)
                 (make-garbage 20 (lambda () (sleep 1/10000) (count-one ran)))
                 (wait-until (progn (sb-ext:gc :full t)
                                    (sb-impl::run-pending-finalizers)
                                    (<= 15 (flag-count ran)))))))))

(defun weak-table-of (n)
  (let ((table (make-hash-table :weakness :key :test 'eq)))
    (dotimes (i n table) (setf (gethash (list i) table) i))))

;;; Keys that only parked stacks refer to stay, others go.
(test weak-tables-and-parked-fibers
  (on-carriers (n)
    (with-group (group n)
      (let* ((table (weak-table-of 100))
             (fibers (loop for i below 100 by 10
                           collect (let ((i i))
                                     (spawn (group)
                                       (let ((key (loop for key being each hash-key of table
                                                          using (hash-value value)
                                                        when (= value i) return key)))
                                         (fiber-park)
                                         (gethash key table)))))))
        (is-true (wait-until (every (lambda (fiber) (eq :parked (fiber-state fiber))) fibers)))
        (loop repeat 3 do (sb-ext:gc :full t))
        (is (> 30 (hash-table-count table)))
        (mapc #'fiber-unpark fibers)
        (is (equal (loop for i below 100 by 10 collect i) (join-all fibers)))))))
