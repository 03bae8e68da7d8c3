;;;; the injector alone: fiber/injector.lisp, without a scheduler

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* injector)

(defun make-fibers (n)
  (loop repeat n collect (make-fiber #'identity)))

(defun put-all (injector fibers)
  (dolist (fiber fibers) (sb-fiber::injector-put injector fiber)))

(defun take-at-most (injector n)
  "A list of what INJECTOR-TAKE returns."
  (loop for fiber = (sb-fiber::injector-take injector n) then (sb-fiber::fiber-next fiber)
        while fiber collect fiber))

(test first-in-first-out
  (let ((injector (sb-fiber::make-injector))
        (fibers (make-fibers 10)))
    (is (null (take-at-most injector 5)))
    (put-all injector fibers)
    (is (equal (subseq fibers 0 3) (take-at-most injector 3)))
    (is (equal (subseq fibers 3 4) (take-at-most injector 1)))
    (is (equal (subseq fibers 4) (take-at-most injector 100)))
    (is (null (take-at-most injector 1)))))

;;; Prevents: LAST of a chain that has been taken as the end of the next one.
(test taking-all-leaves-an-empty-injector
  (let ((injector (sb-fiber::make-injector))
        (fibers (make-fibers 4)))
    (put-all injector (subseq fibers 0 2))
    (take-at-most injector 2)
    (put-all injector (subseq fibers 2))
    (is (equal (subseq fibers 2) (take-at-most injector 10)))))

(defun random-operations (n)
  "Do N operations on an injector and on a list. Return the number of the first that differs, or
NIL."
  (let ((injector (sb-fiber::make-injector))
        (model '())
        (spare (make-fibers 100)))
    (dotimes (i n)
      (if (and spare (= 0 (random 2)))
          (let ((fiber (pop spare)))
            (sb-fiber::injector-put injector fiber)
            (setf model (append model (list fiber))))
          (let* ((n (1+ (random 5)))
                 (taken (take-at-most injector n)))
            (unless (equal taken (subseq model 0 (min n (length model)))) (return i))
            (setf model (nthcdr (length taken) model)
                  spare (append spare taken)))))))

(test random-operations
  (is (null (random-operations 10000))))

(defun put-slowly (injector fibers)
  (dolist (fiber fibers)
    (sb-fiber::injector-put injector fiber)
    (when (= 0 (random 20)) (sb-thread:thread-yield))))

(defun take-until (injector donep)
  (loop for over = (funcall donep)
        append (take-at-most injector (1+ (random 5)))
        until over))

(defun in-order-p (taken put)
  "Are those of TAKEN that are in PUT in the order of PUT?"
  (let ((mine (intersection taken put)))
    (equal (remove-if-not (lambda (fiber) (member fiber mine)) taken)
           (remove-if-not (lambda (fiber) (member fiber mine)) put))))

(defun set-last-carriers (fibers numbers)
  (mapc (lambda (fiber number) (setf (sb-fiber::fiber-last-carrier fiber) number)) fibers numbers))

(defun differ-p (a b) (not (eql a b)))

(defun take-migrants (injector carrier)
  (loop for fiber = (sb-fiber::injector-take-migrant injector carrier)
        while fiber collect fiber))

;;; From the front, from the middle, from the end.
(test taking-those-that-others-ran
  (dolist (numbers '((1 2 2 2) (2 1 2 2) (2 2 2 1) (1 2 1 2) (2 1 1 2) (1 1 1 1) (2 2 2 2)
                     (nil 1 2 nil)))
    (let ((injector (sb-fiber::make-injector))
          (fibers (make-fibers 4))
          (more (make-fibers 2)))
      (set-last-carriers fibers numbers)
      (put-all injector fibers)
      (flet ((those (test)
               (loop for fiber in fibers
                     when (funcall test (sb-fiber::fiber-last-carrier fiber) 1) collect fiber)))
        (is (eq (and (those #'differ-p) t) (sb-fiber::injector-has-migrant-p injector 1)))
        (is (equal (those #'differ-p) (take-migrants injector 1)))
        (is (eq nil (sb-fiber::injector-has-migrant-p injector 1)))
        ;; LAST is right, too.
        (put-all injector more)
        (is (equal (append (those #'eql) more) (take-at-most injector 10)))))))

;;; Prevents: two threads that put at once, one of which is forgotten; places that are given away.
(test several-threads
  (loop repeat 10
        do (let* ((injector (sb-fiber::make-injector))
                  (batches (loop repeat 3 collect (make-fibers 200)))
                  (putters (loop for batch in batches
                                 collect (sb-thread:make-thread #'put-slowly
                                                                :arguments (list injector batch))))
                  (takers (loop repeat 2
                                collect (sb-thread:make-thread
                                         (lambda ()
                                           (take-until injector
                                                       (lambda ()
                                                         (notany #'sb-thread:thread-alive-p
                                                                 putters)))))))
                  (taken (mapcar #'sb-thread:join-thread takers))
                  (left (take-at-most injector 1000)))
             (is (= 600 (+ (length left) (reduce #'+ taken :key #'length))))
             (is (= 600 (length (remove-duplicates (reduce #'append (cons left taken))))))
             (is (loop for list in taken
                       always (loop for batch in batches always (in-order-p list batch)))))))
