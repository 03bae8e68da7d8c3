;;;; All orders of the steps of what submits fibers to a group and what finishes it:
;;;; fiber/population.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/histories.lisp" *load-truename*))

(def-suite* interleaving-group)

(defun population-problem (group entered closed)
  "ENTERED fibers have been counted and not ended; CLOSED is true if somebody believes that there
are none."
  (let ((alive (sb-fiber::fiber-group-alive group)))
    (or (problem (/= alive entered) "~D are counted, and ~D have been accepted." alive entered)
        (problem (and closed (plusp entered)) "~D have been accepted by a group that ends."
                 entered))))

(defun enter-and-leave (group)
  "Be a fiber, and then one more, which stays. Return how many have stayed."
  (flet ((leave ()
           (steps::atomic-decf (steps::fiber-group-population group))))
    (cond ((not (steps::enter-population group)) 0)
          (t (steps::leave-entry group)
             (leave)
             (if (steps::enter-population group) 1 0)))))

(defparameter *submit-and-finish*
  (history ((group (make-test-group 1)) (entered 0) (closed nil))
      (("submitter" (setf entered (enter-and-leave group)))
       ("finisher" (setf closed (steps::close-if-empty group)))
       ("other finisher" (when (steps::close-if-empty group) (setf closed t))))
    (population-problem group entered closed)))

(defparameter *submit-and-abort*
  (history ((group (make-test-group 1)) (first 0) (second 0))
      (("first" (setf first (if (steps::enter-population group) 1 0)))
       ("second" (setf second (if (steps::enter-population group) 1 0)))
       ("finisher" (steps::close-group group)))
    (or (population-problem group (+ first second) nil)
        (problem (sb-fiber::enter-population group) "It is still open."))))

;;; The cell is what the table of the living is to a fiber that is listed.
(defparameter *enter-and-list*
  (history ((group (make-test-group 1)) (cell (vector nil)) (entered nil) (all nil) (seen nil))
      (("submitter" (when (setf entered (steps::enter-population group))
                      (setf (steps::svref cell 0) t)
                      (steps::leave-entry group)))
       ("finisher" (steps::close-group group)
                   (setf all (not (steps::entries-p group))
                         seen (steps::svref cell 0))))
    (problem (and entered all (not seen)) "One is not found.")))

(test who-was-counted-is-found
  (holds *enter-and-list* :store-buffers t))

(test bug-an-entry-that-is-not-counted
  (with-changes (("ENTER-POPULATION" "(+ old 1 +entry+)" "(1+ old)")
                 ("LEAVE-ENTRY" "(atomic-decf (fiber-group-population group) +entry+)" "nil"))
    (fails *enter-and-list*)))

(test no-fiber-enters-a-group-that-ends
  (holds *submit-and-finish*)
  (holds *submit-and-abort*))

(test bug-counting-without-compare-and-swap
  (with-changes (("ENTER-POPULATION"
                  "(cas (fiber-group-population group) old (truly-the word (+ old 1 +entry+)))"
                  "(progn (setf (fiber-group-population group) (+ old 1 +entry+)) old)"))
    (fails *submit-and-finish*)
    (fails *submit-and-abort*)))

(test bug-closing-after-looking
  (with-changes (("CLOSE-IF-EMPTY"
                  "(cas (fiber-group-population group) 0 +closed+)"
                  "(let ((old (fiber-group-population group)))
                     (when (= old 0) (setf (fiber-group-population group) +closed+))
                     old)"))
    (fails *submit-and-finish*)))
