;;;; the deadline heap alone: fiber/deadlines.lisp, without a scheduler

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* deadlines)

(defun make-entries (n)
  "N entries of a heap, fibers and alarms by turns."
  (loop for i below n
        for fiber = (make-fiber #'identity)
        collect (if (evenp i) fiber (sb-fiber::make-alarm fiber :timer))))

(defun heap-index (entry)
  (if (sb-fiber::alarm-p entry)
      (sb-fiber::alarm-heap-index entry)
      (sb-fiber::fiber-heap-index entry)))
(defun heap-of (entry)
  (if (sb-fiber::alarm-p entry) (sb-fiber::alarm-heap entry) (sb-fiber::fiber-heap entry)))

;;; The deadlines with which entries were last inserted: the heap forgets that of one it takes out.
(defvar *deadlines* (make-hash-table :test 'eq :weakness :key :synchronized t))
(defun deadline (entry) (gethash entry *deadlines*))

(defun make-heap () (sb-fiber::make-deadline-heap))
(defun insert (heap entry deadline)
  (setf (gethash entry *deadlines*) deadline)
  (sb-fiber::heap-insert heap entry deadline))
(defun take-expired (heap now) (sb-fiber::heap-take-expired heap now))

(defun take-all-expired (heap now)
  (loop for fiber = (take-expired heap now)
        while fiber collect fiber))

(defun broken-p (heap)
  "What is wrong with HEAP, by the invariants at the head of fiber/deadlines.lisp; NIL if nothing
is."
  (let ((entries (sb-fiber::deadline-heap-entries heap))
        (times (sb-fiber::deadline-heap-times heap))
        (count (sb-fiber::deadline-heap-count heap)))
    (flet ((at (i) (svref entries i)))
      (cond ((loop for i below count thereis (/= i (heap-index (at i)))) :index)
            ((loop for i below count thereis (not (eq heap (heap-of (at i))))) :heap)
            ((loop for i from 1 below count
                   thereis (< (deadline (at i)) (deadline (at (floor (1- i) 2)))))
             :order)
            ((loop for i below count thereis (/= (aref times i) (deadline (at i)))) :time)
            ((loop for i from count below (length entries) thereis (not (eql 0 (at i))))
             :garbage)
            ((/= (sb-fiber::deadline-heap-nearest heap)
                 (if (= count 0) most-positive-fixnum (deadline (at 0))))
             :nearest)))))

;;;; One thread

(test in-order-of-deadlines
  (let* ((heap (make-heap))
         (deadlines '(5 3 9 3 1 7 5 2))
         (fibers (make-entries (length deadlines))))
    (mapc (lambda (fiber deadline) (insert heap fiber deadline)) fibers deadlines)
    (is (= 1 (sb-fiber::deadline-heap-nearest heap)))
    (is (null (take-expired heap 0)))
    (is (equal '(1 2 3 3) (mapcar #'deadline (take-all-expired heap 4))))
    (is (= 5 (sb-fiber::deadline-heap-nearest heap)))
    (is (equal '(5 5 7 9) (mapcar #'deadline (take-all-expired heap 9))))
    (is (= most-positive-fixnum (sb-fiber::deadline-heap-nearest heap)))
    (is (every (lambda (fiber) (= -1 (heap-index fiber))) fibers))))

;;; Prevents: a fiber whose wait is over and that its old deadline wakes from another wait.
(test removed-entries-are-not-served
  (let ((heap (make-heap))
        (fibers (make-entries 10)))
    (loop for fiber in fibers for i from 0 do (insert heap fiber i))
    (is (sb-fiber::heap-remove (fifth fibers)))
    (is (not (sb-fiber::heap-remove (fifth fibers))))
    (is (eq (first fibers) (take-expired heap 100)))
    (is (not (sb-fiber::heap-remove (first fibers))))
    (is (equal (remove (fifth fibers) (rest fibers)) (take-all-expired heap 100)))))

;;; The vector begins with room for 64. Prevents: a new one that has less in it than the old.
(test the-heap-grows
  (let ((heap (make-heap))
        (fibers (make-entries 1000)))
    (dolist (fiber fibers)
      (insert heap fiber (random 100)))
    (is (null (broken-p heap)))
    (let ((taken (take-all-expired heap 100)))
      (is (= 1000 (length (remove-duplicates taken))))
      (is (apply #'<= (mapcar #'deadline taken))))
    (is (null (broken-p heap)))))

(defun random-operations (n)
  "Do N operations on a heap and on a list of what is in it. Return what went wrong first, or NIL."
  (let* ((heap (make-heap))
         (fibers (coerce (make-entries 200) 'vector))
         (inside '()))
    (dotimes (i n)
      (let ((fiber (aref fibers (random 200))))
        (case (random 3)
          (0 (unless (member fiber inside)
               (insert heap fiber (random 1000))
               (push fiber inside)))
          (1 (unless (eq (sb-fiber::heap-remove fiber) (and (member fiber inside) t))
               (return (list i :remove)))
             (setf inside (remove fiber inside)))
          (2 (let* ((now (random 300))
                    (earliest (if inside (reduce #'min inside :key #'deadline) 1000))
                    (taken (take-expired heap now)))
               (unless (eql (and taken (deadline taken)) (and (<= earliest now) earliest))
                 (return (list i :take)))
               (setf inside (remove taken inside)))))
        (when (broken-p heap) (return (list i (broken-p heap))))))))

;;; Prevents: alarms that LIST-ALL-TIMERS does not find, and fibers that it takes for some.
(test alarms-are-listed
  (let ((heap (make-heap))
        (entries (make-entries 200)))
    (dolist (entry entries) (insert heap entry (random 1000)))
    (take-all-expired heap 500)
    (is (null (set-exclusive-or (sb-fiber::heap-alarms heap)
                                (remove-if-not (lambda (entry)
                                                 (and (sb-fiber::alarm-p entry)
                                                      (> (deadline entry) 500)))
                                               entries))))))

(test random-operations
  (is (null (random-operations 10000))))

;;;; Several threads

;;; Each of them has fibers of its own, whose deadlines one serves. So each insertion is followed by
;;; one removal that succeeds, or by one service.
(defun insert-and-remove (heap fibers n)
  "Return how often a removal was in time, and how often a fiber was inserted."
  (let ((removed 0)
        (inserted 0))
    (dotimes (i n (list removed inserted))
      (let ((fiber (aref fibers (random (length fibers)))))
        (if (and (= -1 (heap-index fiber)) (= 0 (random 2)))
            (progn (insert heap fiber (random 1000))
                   (incf inserted))
            (when (sb-fiber::heap-remove fiber) (incf removed)))))))

(defun serve (heap donep)
  (loop for over = (funcall donep)
        count (take-expired heap (random 500))
        until over))

;;; Prevents: a deadline that is served after the wait was ended, or twice, or never.
(test each-deadline-is-served-or-removed
  (loop repeat 3
        do (let* ((heap (make-heap))
                  (threads (loop repeat 3
                                 collect (sb-thread:make-thread
                                          #'insert-and-remove
                                          :arguments (list heap (coerce (make-entries 100) 'vector)
                                                           20000))))
                  (server (sb-thread:make-thread
                           (lambda ()
                             (serve heap (lambda ()
                                           (notany #'sb-thread:thread-alive-p threads))))))
                  (results (mapcar #'sb-thread:join-thread threads))
                  (served (sb-thread:join-thread server)))
             (is (null (broken-p heap)))
             (is (= (reduce #'+ results :key #'second)
                    (+ (reduce #'+ results :key #'first)
                       served
                       (length (take-all-expired heap 1000))))))))

;;;; Deadlines in a heap of others

;;; Before a carrier blocks in the kernel it gives its scheduler away, so the deadlines of
;;; the fiber on it go into a heap that another serves, which may be asleep for ever. Prevents that
;;; it sleeps on.
(test a-deadline-without-a-scheduler-of-ones-own
  (with-group (group 1)
    (let ((fiber (spawn (group)
                   (sb-fiber::announce-blocking)
                   ;; until the other has taken over, has found nothing to do, and sleeps
                   (loop until (/= 0 (sb-fiber::fiber-group-idle group))
                         do (sb-ext:spin-loop-hint))
                   (sleep 1/10)
                   :woken)))
      (is (eq :woken (fiber-join fiber :timeout 10 :default :lost)))
      (fiber-unpark fiber))))
