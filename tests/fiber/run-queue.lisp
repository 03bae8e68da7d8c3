;;;; the run queue alone: fiber/run-queue.lisp, without a scheduler

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* run-queue)

(defconstant capacity sb-fiber::run-queue-capacity)
(defconstant long-capacity sb-fiber::long-run-queue-capacity)
(defconstant batch sb-fiber::run-queue-batch)

;;; HEAD and TAIL count for ever, so a queue in use is one whose places begin anywhere.
(defun make-queue (&optional (start 0))
  (let ((queue (sb-fiber::make-run-queue)))
    (setf (sb-fiber::run-queue-head queue) start
          (sb-fiber::run-queue-tail queue) start)
    queue))

(defun make-long-queue (&optional (start 0))
  (let ((queue (make-queue start)))
    (sb-fiber::run-queue-provide queue)
    queue))

(defun put (queue object) (sb-fiber::run-queue-put queue object))
(defun take (queue) (sb-fiber::run-queue-take queue))
(defun steal (victim thief) (sb-fiber::run-queue-steal victim thief))
(defun queue-length (queue) (sb-fiber::run-queue-length queue))

(defun take-all (queue)
  (loop for object = (take queue)
        while object collect object))

;;;; One thread

(test first-in-first-out
  (let ((queue (make-queue)))
    (is (null (take queue)))
    (dotimes (i 10) (is (put queue (1+ i))))
    (is (= 10 (queue-length queue)))
    (is (equal '(1 2 3 4 5 6 7 8 9 10) (take-all queue)))
    (is (null (take queue)))))

;;; Prevents: a put that overwrites the oldest object.
(test full-queue
  (loop for (queue size) in (list (list (make-queue 1000) capacity)
                                  (list (make-long-queue 1000) long-capacity))
        do (dotimes (i size) (put queue i))
           (is (not (put queue :one-too-many)))
           (is (= size (queue-length queue)))
           (is (eql 0 (take queue)))
           (is (put queue :last))
           (is (not (put queue :one-too-many)))
           (is (equal (append (loop for i from 1 below size collect i) '(:last))
                      (take-all queue)))))

;;; Prevents: a queue that stays in the long ring, or that keeps alive what was in either.
(test long-ring-is-left
  (let* ((queue (make-long-queue 100))
         (rings (list (sb-fiber::run-queue-ring queue) (sb-fiber::run-queue-spare queue))))
    (loop repeat 3
          do (dotimes (i (* 3 capacity)) (put queue (list i)))
             (is (eq (second rings) (sb-fiber::run-queue-ring queue)))
             (sb-fiber::run-queue-provide queue)
             (is (eq (first rings) (sb-fiber::run-queue-spare queue)))
             (steal queue (make-queue))
             (is (= (- (* 3 capacity) batch) (length (take-all queue))))
             (sb-fiber::run-queue-forget queue)
             (is (eq (first rings) (sb-fiber::run-queue-ring queue)))
             (is (eq (second rings) (sb-fiber::run-queue-spare queue)))
             (dolist (ring rings) (is (every #'numberp ring))))))

;;; Prevents: fibers kept alive by the places that they were in.
(test forget
  (let ((victim (make-queue 250)) (thief (make-queue 3)))
    (loop repeat 300                    ; several times around
          do (dotimes (i 100) (put victim (1+ i)))
             (steal victim thief)
             (sb-fiber::run-queue-forget victim)
             (is (= 50 (length (take-all victim))))
             (is (= 49 (length (take-all thief))))
             (dolist (queue (list victim thief))
               (sb-fiber::run-queue-forget queue)
               (is (every #'zerop (sb-fiber::run-queue-ring queue)))))
    (put victim :one)
    (is (eq :one (take victim)))))

;;; Prevents: a thief that leaves the last object to an owner that may be busy for long.
;;; And one that fills the carrier's own queue with what many could run.
(test steal-half-rounded-up
  (dolist (n '(0 1 2 3 4 5 255 256 257 1000))
    (let ((victim (make-long-queue 77))
          (thief (make-queue 5)))
      (dotimes (i n) (put victim (1+ i)))
      (let* ((half (min (ceiling n 2) batch))
             (stolen (steal victim thief)))
        (is (eql (and (plusp n) 1) stolen))
        (is (equal (loop for i from 2 to half collect i) (take-all thief)))
        (is (equal (loop for i from (1+ half) to n collect i) (take-all victim)))))))

;;; Prevents: objects that nobody can forget, because their old places still hold them.
(test taken-objects-are-let-go
  (let ((queue (make-queue)))
    (dotimes (i 3) (put queue (list i)))
    (dotimes (i 3) (take queue))
    (is (notany #'consp (sb-fiber::run-queue-ring queue)))))

(defun numbers-between (first end)
  (loop for i from first below end collect i))

(defun random-operations (n)
  "Do N operations on a queue, and keep count of the numbers that are to be in it. Return a
description of the first that differs, or NIL."
  (let* ((queue (make-long-queue (random 1000)))
         (thief (make-queue (random 1000)))
         (first 0)
         (next (- long-capacity 200)))
    (flet ((expect (what got wanted)
             (unless (equal got wanted)
               (return-from random-operations
                 (format nil "~S: ~S and not ~S" what got wanted)))))
      (dotimes (i next) (put queue i))
      (dotimes (i n)
        ;; It fills up and is nearly full, and runs empty.
        (case (if (< i (floor n 2)) (random 5) (+ 2 (random 6)))
          ((0 1 2) (let ((fits (< (- next first) long-capacity)))
                     (expect :put (put queue next) fits)
                     (when fits (incf next))))
          ((3 4 5) (expect :take (take queue) (when (< first next) (1- (incf first)))))
          (6 (let ((end (+ first (min batch (ceiling (- next first) 2)))))
               (expect :steal (let ((stolen (steal queue thief)))
                                (and stolen (cons stolen (take-all thief))))
                       (numbers-between first end))
               (setf first end)))
          (7 (expect :length (queue-length queue) (- next first)))))
      (expect :rest (take-all queue) (numbers-between first next)))
    nil))

(test random-operations
  (loop repeat 5
        do (is (null (random-operations 10000)))))

;;;; Several threads

(defstruct (hunt (:constructor make-hunt (n queues)))
  "N objects are put into the first of QUEUES by the thread that owns it; each other thread owns
one of the others, and steals."
  n
  queues
  (found 0 :type sb-ext:word)
  (deadline (+ (get-universal-time) *patience*)))

(defun hunt-over-p (hunt)
  (or (= (hunt-found hunt) (hunt-n hunt))
      (> (get-universal-time) (hunt-deadline hunt))))

(defun note-found (hunt)
  (sb-ext:atomic-incf (hunt-found hunt)))

(defun be-owner (hunt)
  "Put all objects; take some in between, and what nobody has stolen at the end."
  (let ((queue (first (hunt-queues hunt)))
        (next 0)
        (found '()))
    (flet ((take-one ()
             (let ((object (take queue)))
               (when object
                 (push (car object) found)
                 (note-found hunt)))))
      (loop until (hunt-over-p hunt)
            do (loop repeat (random 20)
                     while (and (< next (hunt-n hunt)) (put queue (list next)))
                     do (incf next))
               (loop repeat (random 10) do (take-one))
               ;; Objects are fresh conses: the collector must find them in the ring.
               (when (= 0 (random 500)) (sb-ext:gc))))
    (nreverse found)))

(defun be-thief (hunt number)
  "Steal from all others, thieves too, and take what has been stolen."
  (let ((own (nth number (hunt-queues hunt)))
        (found '()))
    (loop until (hunt-over-p hunt)
          do (let ((object (or (take own)
                               (loop for queue in (hunt-queues hunt)
                                     unless (eq queue own)
                                       do (let ((object (steal queue own)))
                                            (when object (return object)))))))
               (when object
                 (push (car object) found)
                 (note-found hunt))))
    (nreverse found)))

(defun run-hunt (n n-thieves)
  "A list of what the owner found, and what each of the thieves did."
  (let* ((hunt (make-hunt n (loop repeat (1+ n-thieves) collect (make-queue (random 1000)))))
         (threads (list* (sb-thread:make-thread #'be-owner :arguments (list hunt))
                         (loop for i from 1 to n-thieves
                               collect (sb-thread:make-thread #'be-thief
                                                              :arguments (list hunt i))))))
    (mapcar #'sb-thread:join-thread threads)))

;;; Prevents: an object that two have, or nobody; a ring that the collector does not see through.
(test each-object-is-found-once
  (dolist (n-thieves '(1 2 3))
    (let ((n 200000)
          (found (run-hunt 200000 n-thieves)))
      (is (equal (loop for i below n collect i)
                 (sort (reduce #'append found) #'<)))
      (is (equal (first found) (sort (copy-list (first found)) #'<))
          "The owner does not find the objects in the order in which it put them."))))
