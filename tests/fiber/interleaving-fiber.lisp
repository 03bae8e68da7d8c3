;;;; All orders of the steps of what parks a fiber, wakes it and interrupts it: fiber.lisp,
;;;; fiber/interrupt.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/histories.lisp" *load-truename*))

(def-suite* interleaving-fiber)

;;;; park and unpark

;;; The fiber waits for both words to be set.
(defparameter *two-wakers*
  (history ((fiber (make-test-fiber)))
      (("fiber" (in-test-fiber (fiber)
                  (loop until (and (= 1 (read-word 0)) (= 1 (read-word 1)))
                        do (steps::park nil nil))))
       ("first" (write-word 0 1) (steps::unpark fiber))
       ("second" (write-word 1 1) (steps::unpark fiber)))
    (phase-problem fiber)))

(defparameter *waker-and-deadline*
  (history ((fiber (make-test-fiber)))
      (("fiber" (in-test-fiber (fiber)
                  (loop until (or (= 1 (read-word 0)) (steps::deadline-passed-p 10))
                        do (steps::park nil 10)
                           (unless (= -1 (sb-fiber::fiber-heap-index fiber))
                             (fail-history "The fiber has left its deadline behind.")))))
       ("waker" (write-word 0 1) (steps::unpark fiber))
       ("time" (pass-time)))
    (or (phase-problem fiber) (heap-problem))))

;;; What FIBER-PARK does without a time-out
(defun park-as-user (fiber)
  (loop until (steps::clear-fiber-flag fiber sb-fiber::+user-permit+)
        do (steps::park nil nil)))

;;; The permit of the first may be there still when the second comes.
(defparameter *two-users*
  (history ((fiber (make-test-fiber)))
      (("fiber" (in-test-fiber (fiber)
                  (loop until (= 1 (read-word 0))
                        do (park-as-user fiber))))
       ("first" (steps::fiber-unpark fiber))
       ("second" (write-word 0 1) (steps::fiber-unpark fiber)))
    (phase-problem fiber)))

(test no-permit-of-a-user-is-lost
  (holds *two-users* :store-buffers t))

(test bug-no-barrier-where-the-permit-is-there
  (with-changes (("SET-FIBER-FLAG"
                  "(when (= (cas (fiber-flags fiber) flags (logior flags flag)) flags)
                     (return (not (logtest flag flags))))"
                  "(if (logtest flag flags)
                       (return nil)
                       (when (= (cas (fiber-flags fiber) flags (logior flags flag)) flags)
                         (return t)))"))
    ;; Only the store buffer shows it.
    (fails *two-users* :store-buffers t)))

(test no-unpark-is-lost
  (holds *two-wakers* :store-buffers t)
  (holds *waker-and-deadline*))

(test bug-parked-before-the-context-is-saved
  (with-changes (("PARK" "(leave :park)"
                      "(when (phase-becomes-p fiber +active+ +parked+) (leave :park))")
              ("FINISH-PARKING" "(unless (phase-becomes-p fiber +active+ +parked+)
                                   (setf (fiber-phase fiber) +active+)
                                   (make-runnable fiber))"
                                "nil"))
    (fails *two-wakers*)))

(test bug-no-permit-for-who-is-not-parked
  (with-changes (("UNPARK" "(phase-becomes-p fiber phase (logior phase +permit+))" "t"))
    (fails *two-wakers*)))

(test bug-the-successor-does-not-see-the-permit
  (with-changes (("FINISH-PARKING" "(phase-becomes-p fiber +active+ +parked+)"
                                "(setf (fiber-phase fiber) +parked+)"))
    (fails *two-wakers*)))

(test bug-two-wakers-queue-a-fiber
  (with-changes (("UNPARK" "(phase-becomes-p fiber +parked+ +active+)"
                        "(setf (fiber-phase fiber) +active+)"))
    (fails *two-wakers*)))

(test bug-a-deadline-stays-behind
  (with-changes (("PARK" "(heap-remove fiber)" "nil"))
    (fails *waker-and-deadline*)))

(test bug-a-permit-without-a-barrier
  (with-changes (("UNPARK" "(= phase +dead+)"
                           "(or (logtest phase +permit+) (= phase +dead+))"))
    (fails *two-wakers* :store-buffers t)))

;;;; interruptions

;;; A fiber is left and mounted again, in place of one that is given to AFTER-SWITCH, looks for
;;; interruptions, and then computes: what is queued later must be signalled. A signal that comes
;;; while it is not mounted finds another.
(defun make-mounted-fiber (carrier)
  (let ((fiber (make-test-fiber)))
    (setf (sb-fiber::fiber-carrier fiber) carrier
          (signal-state fiber) :elsewhere) ; it is about to leave, with interrupts off
    fiber))

(defun be-left-and-mounted (fiber carrier predecessor action)
  (setf (steps::fiber-carrier fiber) nil)
  (let ((steps::*carrier* carrier))
    (setf (sb-fiber::carrier-predecessor carrier) predecessor
          (sb-fiber::carrier-action carrier) action)
    (perform :write fiber 'signal (lambda () (setf (signal-state fiber) :none)))
    (setf (steps::fiber-carrier fiber) carrier)
    (steps::after-switch)
    (steps::see-interruptions fiber)))

(defmacro interruption-history (&rest predecessor-and-action)
  `(history ((carrier (make-test-carrier (make-test-group 1) 0))
             (fiber (make-mounted-fiber carrier)))
       (("fiber" (be-left-and-mounted fiber carrier ,@predecessor-and-action))
        ("interrupter" (in-test-fiber (nil) (steps::%interrupt-fiber fiber #'list))))
     (problem (and (sb-fiber::fiber-interruptions fiber)
                   (not (eq (signal-state fiber) :sent)))
              "The interruption is queued, and nobody will look.")))

(defparameter *interruption* (interruption-history nil nil))
(defparameter *interruption-after-an-end* (interruption-history (make-test-fiber) :end))
(defparameter *interruption-after-parking*
  (interruption-history (make-test-fiber :phase sb-fiber::+active+ :stack :suspended) :park))

(test no-interruption-is-lost
  (dolist (history (list *interruption* *interruption-after-an-end* *interruption-after-parking*))
    (holds history :store-buffers t)))

(test bug-no-barrier-before-looking-for-interruptions
  (with-changes (("AFTER-SWITCH" "(barrier (:memory))" "nil"))
    (fails *interruption* :store-buffers t)
    (fails *interruption-after-an-end* :store-buffers t)))

(test bug-looking-for-the-carrier-first
  (with-changes (("%INTERRUPT-FIBER" "(notify-of-interruption fiber)" "nil")
                 ("QUEUE-INTERRUPTION" "(old (fiber-interruptions fiber))"
                                       "(old (prog1 (fiber-interruptions fiber)
                                               (notify-of-interruption fiber)))"))
    (fails *interruption*)))
