;;;; All orders of the steps of fibers that are cancelled, and of who cancels them:
;;;; fiber/cancel.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/histories.lisp" *load-truename*))

(def-suite* interleaving-cancel)

(defun wait-for-cancellation (fiber)
  (loop (steps::see-cancellation fiber)
        (steps::park nil nil)))

(defmacro in-test-scope ((fiber scope) &body body)
  "Execute BODY as WITH-FIBERS executes it in FIBER."
  `(progn (catch ,scope
            (let ((sb-fiber::*scope* ,scope)) ,@body))
          (setf (steps::scope-body ,scope) :left)
          (steps::look-again ,fiber)))

(defun make-test-scope (owner &optional outer)
  (sb-fiber::%make-scope nil nil nil :cancel owner outer))

;;;; a fiber

(defparameter *cancelled*
  (history ((fiber (make-test-fiber)))
      (("fiber" (in-test-fiber (fiber)
                  (catch 'sb-thread::%abort-thread (wait-for-cancellation fiber))))
       ("canceller" (in-test-fiber (nil) (steps::cancel-fiber fiber))))
    (or (phase-problem fiber)
        (problem (not (logtest sb-fiber::+leaving+ (sb-fiber::fiber-flags fiber)))
                 "The fiber does not know why it ends."))))

;;; It is told once, and then waits undisturbed.
(defparameter *cancelled-twice*
  (history ((fiber (make-test-fiber)) (told 0))
      (("fiber" (in-test-fiber (fiber)
                  (catch 'sb-thread::%abort-thread (wait-for-cancellation fiber))
                  (incf told)
                  (catch 'sb-thread::%abort-thread
                    (loop until (= 1 (read-word 0))
                          do (steps::see-cancellation fiber)
                             (steps::park nil nil))
                    (decf told))
                  (incf told)))
       ("first" (in-test-fiber (nil) (steps::cancel-fiber fiber)))
       ("second" (in-test-fiber (nil)
                   (steps::cancel-fiber fiber)
                   (write-word 0 1)
                   (steps::unpark fiber))))
    (or (phase-problem fiber)
        (problem (/= told 1) "It was told ~D times." told))))

(test no-cancellation-is-lost
  (holds *cancelled* :store-buffers t)
  (holds *cancelled-twice* :switches 3))

(test bug-woken-before-there-is-something-to-see
  (with-changes (("ASK-TO-LEAVE"
                  "(without-interruptions (set-fiber-flag thread +to-leave+) (unpark thread))"
                  "(progn (unpark thread) (set-fiber-flag thread +to-leave+))"))
    (fails *cancelled*)))

;;;; bodies of scopes

;;; Whichever is left first, in the end the outer one is. What waits while the inner one is left
;;; hears of nothing.
(defparameter *inner-and-outer*
  (history ((fiber (make-test-fiber))
            (outer (make-test-scope fiber))
            (inner (make-test-scope fiber outer)))
      (("fiber" (in-test-fiber (fiber)
                  (in-test-scope (fiber outer)
                    (in-test-scope (fiber inner)
                      (unwind-protect (wait-for-cancellation fiber)
                        (steps::see-cancellation fiber)))
                    (wait-for-cancellation fiber))))
       ("inner" (in-test-fiber (nil) (steps::cancel-for :request inner)))
       ("outer" (in-test-fiber (nil) (steps::cancel-for :request outer))))
    (phase-problem fiber)))

(defparameter *body-and-fiber*
  (history ((fiber (make-test-fiber))
            (scope (make-test-scope fiber)))
      (("fiber" (in-test-fiber (fiber)
                  (catch 'sb-thread::%abort-thread
                    (in-test-scope (fiber scope)
                      (wait-for-cancellation fiber))
                    (wait-for-cancellation fiber))))
       ("scope" (in-test-fiber (nil) (steps::cancel-for :request scope)))
       ("canceller" (in-test-fiber (nil) (steps::cancel-fiber fiber))))
    (phase-problem fiber)))

(test bodies-are-left
  (holds *inner-and-outer* :switches 3)
  (holds *body-and-fiber* :switches 3))

(test bug-the-flag-is-cleared-after-the-look
  (with-changes (("LEAVE-WHAT-IS-CANCELLED"
                  "(when (fiber-p thread) (clear-fiber-flag thread +to-leave+))" "nil")
                 ("LEAVE-WHAT-IS-CANCELLED"
                  "(let ((target (what-to-leave thread)))
                     (when target
                       (if (scope-p target) (leave-body target thread) (leave-fiber thread))))"
                  "(let ((target (what-to-leave thread)))
                     (clear-fiber-flag thread +to-leave+)
                     (when target
                       (if (scope-p target) (leave-body target thread) (leave-fiber thread))))"))
    (fails *inner-and-outer* :switches 3)))

(test bug-nothing-is-looked-for-after-a-body
  (with-changes (("LOOK-AGAIN" "(when (fiber-p thread) (set-fiber-flag thread +to-leave+))" "nil"))
    (fails *inner-and-outer* :switches 3)))

;;;; children

(defparameter *child-is-added*
  (history ((owner (make-test-fiber))
            (scope (make-test-scope owner))
            (fiber (make-fiber #'identity))
            (child (sb-fiber::make-child scope fiber)))
      (("spawner" (in-test-fiber (nil)
                    (steps::enter-scope scope)
                    (steps::link-child scope child)))
       ("canceller" (in-test-fiber (nil) (steps::cancel-for :request scope))))
    (problem (not (logtest sb-fiber::+cancelled+ (sb-fiber::fiber-flags fiber)))
             "The child goes on.")))

(test no-child-is-forgotten
  (holds *child-is-added* :store-buffers t))

(test bug-a-child-that-does-not-look
  (with-changes (("LINK-CHILD" "(when (scope-reason scope)
                                  (cancel-fiber (truly-the fiber (child-fiber child))))"
                               "nil"))
    (fails *child-is-added*)))
