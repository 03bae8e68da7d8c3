;;;; All orders of the steps of what puts into a run queue and takes from it: fiber/run-queue.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/histories.lisp" *load-truename*))

(def-suite* interleaving-queue)

(defun make-test-queue (&rest objects)
  (let ((queue (shorten-queue (sb-fiber::make-run-queue))))
    (dolist (object objects queue)
      (let ((tail (sb-fiber::run-queue-tail queue)))
        (setf (svref (sb-fiber::run-queue-ring queue)
                     (mod tail steps::run-queue-capacity))
              object
              (sb-fiber::run-queue-tail queue) (1+ tail))))))

(defun queue-problem (put &rest lists)
  "LISTS are what was taken and what is left, in the order in which it was put; PUT is all that
was put."
  (or (problem (set-exclusive-or put (reduce #'append lists))
               "Of ~S something is not in ~S." put lists)
      (problem (/= (length put) (reduce #'+ lists :key #'length))
               "Of ~S something is twice in ~S." put lists)
      (problem (notevery (lambda (list) (equal list (sort (copy-list list) #'<))) lists)
               "The order of ~S is not that of putting." lists)))

;;; Owner and thief want the last object; the place of what the thief takes is used again.
(defparameter *take-and-steal*
  (history ((victim (make-test-queue 1 2 3 4))
            (thief (make-test-queue))
            (put '(1 2 3 4))
            (taken '())
            (stolen '()))
      (("owner" (flet ((take () (let ((object (steps::run-queue-take victim)))
                                  (when object (push object taken))))
                       (put (object) (when (steps::run-queue-put victim object)
                                       (push object put))))
                  (take) (put 5) (put 6) (take) (take)))
       ("thief" (let ((object (steps::run-queue-steal victim thief)))
                  (when object (push object stolen)))))
    (queue-problem put (reverse taken) (append stolen (queue-contents thief))
                   (queue-contents victim))))

;;; The second thief steals what the first one is just getting.
(defparameter *steal-from-thief*
  (history ((victim (make-test-queue 1 2 3 4))
            (first (make-test-queue))
            (second (make-test-queue))
            (taken '()) (first-got '()) (second-got '()))
      (("owner" (setf taken (list (steps::run-queue-take victim))))
       ("first" (setf first-got (list (steps::run-queue-steal victim first))))
       ("second" (setf second-got (list (steps::run-queue-steal first second)))))
    (queue-problem '(1 2 3 4) (remove nil taken)
                   (remove nil first-got) (queue-contents first)
                   (remove nil (append second-got (queue-contents second)))
                   (queue-contents victim))))

(defparameter *two-thieves*
  (history ((victim (make-test-queue 1 2 3))
            (first (make-test-queue))
            (second (make-test-queue))
            (put '(1 2 3))
            (taken '()) (first-got '()) (second-got '()))
      (("owner" (when (steps::run-queue-put victim 4) (push 4 put))
                (setf taken (list (steps::run-queue-take victim))))
       ("first" (setf first-got (list (steps::run-queue-steal victim first))))
       ("second" (setf second-got (list (steps::run-queue-steal victim second)))))
    (queue-problem put (remove nil taken)
                   (remove nil (append first-got (queue-contents first)))
                   (remove nil (append second-got (queue-contents second)))
                   (queue-contents victim))))

;;; The owner moves into its long ring while a thief reads the short one.
(defun provide-test-queue (queue)
  (setf (sb-fiber::run-queue-spare queue)
        (make-array (* 2 steps::run-queue-capacity) :initial-element 0))
  queue)

(defparameter *steal-while-moving*
  (history ((victim (provide-test-queue (make-test-queue 1 2 3 4)))
            (thief (make-test-queue))
            (put '(1 2 3 4))
            (taken '()) (stolen '()))
      (("owner" (when (steps::run-queue-put victim 5) (push 5 put))
                (push (steps::run-queue-take victim) taken))
       ("thief" (push (steps::run-queue-steal victim thief) stolen)))
    (queue-problem put taken (append stolen (queue-contents thief)) (queue-contents victim))))

;;; It comes back while a thief reads the long one.
(defun make-moved-queue (object)
  (let ((queue (provide-test-queue (make-test-queue object))))
    (rotatef (sb-fiber::run-queue-ring queue) (sb-fiber::run-queue-spare queue))
    (setf (svref (sb-fiber::run-queue-ring queue) 0) object)
    queue))

(defparameter *steal-while-leaving*
  (history ((victim (make-moved-queue 1))
            (thief (make-test-queue))
            (put '(1))
            (taken '()) (stolen '()))
      (("owner" (let ((object (steps::run-queue-take victim)))
                  (when object (push object taken)))
                (steps::run-queue-forget victim)
                (when (steps::run-queue-put victim 2) (push 2 put)))
       ("thief" (let ((object (steps::run-queue-steal victim thief)))
                  (when object (push object stolen)))))
    (queue-problem put taken (append stolen (queue-contents thief)) (queue-contents victim))))

(test each-object-is-taken-once-though-the-queue-moves
  (holds *steal-while-moving*)
  (holds *steal-while-leaving* :store-buffers t))

(defvar steps::*early-ring*)

(test bug-reading-the-ring-before-the-tail
  (with-changes (("RUN-QUEUE-STEAL"
                  "(truly-the fixnum (- (run-queue-tail victim) head))"
                  "(progn (setf *early-ring* (run-queue-ring victim))
                          (truly-the fixnum (- (run-queue-tail victim) head)))"
                  "(from (run-queue-ring victim))"
                  "(from *early-ring*)"))
    (fails *steal-while-leaving*)))

(test bug-moving-before-the-copy
  (with-changes (("RUN-QUEUE-MOVE"
                  "(loop for n of-type fixnum from (run-queue-head queue)
                           below (run-queue-tail queue)
                         do (setf (svref long (run-queue-place long n))
                                  (svref ring (run-queue-place ring n))))"
                  "(progn
                     (setf (run-queue-ring queue) long)
                     (loop for n of-type fixnum from (run-queue-head queue)
                             below (run-queue-tail queue)
                           do (setf (svref long (run-queue-place long n))
                                    (svref ring (run-queue-place ring n)))))"))
    (fails *steal-while-moving*)))

(test each-object-is-taken-once
  (holds *take-and-steal* :store-buffers t)
  (holds *two-thieves*)
  (holds *steal-from-thief* :store-buffers t))

(test bug-reading-a-place-after-taking-it
  (with-changes (("RUN-QUEUE-STEAL"
               "(when (eq (cas (run-queue-head victim) head (truly-the fixnum (+ head n))) head)
                  (barrier (:write))
                  (setf (run-queue-tail thief) (truly-the fixnum (+ tail n)))
                  (return (run-queue-take thief)))"
               "(when (eq (cas (run-queue-head victim) head (truly-the fixnum (+ head n))) head)
                  (dotimes (i n)
                    (setf (svref to (run-queue-place to (+ tail i)))
                          (svref from (run-queue-place from (+ head i)))))
                  (setf (run-queue-tail thief) (truly-the fixnum (+ tail n)))
                  (return (run-queue-take thief)))"))
    (fails *take-and-steal*)))

(test bug-taking-without-compare-and-swap
  (with-changes (("RUN-QUEUE-TAKE"
               "(eq (cas (run-queue-head queue) head (truly-the fixnum (1+ head))) head)"
               "(progn (setf (run-queue-head queue) (1+ head)) t)"))
    (fails *take-and-steal*)))

(test bug-publishing-a-place-before-it-is-filled
  (with-changes (("RUN-QUEUE-STEAL"
               "(dotimes (i n)
                  (setf (svref to (run-queue-place to (+ tail i)))
                        (svref from (run-queue-place from (+ head i)))))"
               "(setf (run-queue-tail thief) (+ tail n))"
               "(return (run-queue-take thief))"
               "(dotimes (i n (return (run-queue-take thief)))
                  (setf (svref to (run-queue-place to (+ tail i)))
                        (svref from (run-queue-place from (+ head i)))))"))
    (fails *steal-from-thief*)))

(test bug-clearing-a-place-that-may-not-be-ours
  (with-changes (("RUN-QUEUE-TAKE"
               "(object (svref ring place))"
               "(object (prog1 (svref ring place)
                          (setf (svref ring place) 0)))"))
    (fails *take-and-steal*)))
