;;;; the deadline heap: fibers in order of the times at which they want to be woken

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; A binary heap in a vector, one for each scheduler. A fiber knows its place, so that a wait
;;; that ends early leaves no entry behind; it is in one heap at most, since it waits once.
;;;
;;; What is true when nobody is inside:
;;;  - ENTRIES[0..COUNT) are fibers, each with HEAP-INDEX its index and HEAP this heap,
;;;    no entry's deadline is earlier than its parent's, the entry at (i-1)/2;
;;;  - a fiber in no heap has HEAP-INDEX -1;
;;;  - NEAREST is the first entry's deadline, or MOST-POSITIVE-FIXNUM. It may be read
;;;    without the lock, by who is content with a value that was true a moment ago.
;;; Any thread may insert and remove, under the tiny lock; the vector is enlarged before.

(defstruct (deadline-heap (:constructor make-deadline-heap ())
                          (:copier nil))
  (lock 0 :type word)
  (nearest most-positive-fixnum :type fixnum)
  (count 0 :type index)
  (entries (make-array 64 :initial-element 0) :type simple-vector))
(declaim (freeze-type deadline-heap))

(declaim (inline heap-place))
(defun heap-place (entries fiber index)
  (declare (simple-vector entries) (index index) (optimize (safety 0)))
  (setf (svref entries index) fiber
        (fiber-heap-index (truly-the fiber fiber)) index))

(declaim (inline heap-sift-up heap-sift-down))
(defun heap-sift-up (entries fiber index)
  (declare (simple-vector entries) (index index) (optimize (safety 0)))
  (loop until (= index 0)
        do (let* ((parent (ash (1- index) -1))
                  (above (truly-the fiber (svref entries parent))))
             (when (<= (fiber-deadline above) (fiber-deadline (truly-the fiber fiber))) (return))
             (heap-place entries above index)
             (setf index parent)))
  (heap-place entries fiber index))

(defun heap-sift-down (entries count fiber index)
  (declare (simple-vector entries) (index index count) (optimize (safety 0)))
  (loop
    (let ((child (truly-the index (1+ (truly-the index (* 2 index))))))
      (when (>= child count) (return))
      (when (and (< (1+ child) count)
                 (< (fiber-deadline (truly-the fiber (svref entries (1+ child))))
                    (fiber-deadline (truly-the fiber (svref entries child)))))
        (setf child (truly-the index (1+ child))))
      (let ((below (truly-the fiber (svref entries child))))
        (when (>= (fiber-deadline below) (fiber-deadline (truly-the fiber fiber))) (return))
        (heap-place entries below index)
        (setf index child))))
  (heap-place entries fiber index))

(declaim (inline heap-note-nearest))
(defun heap-note-nearest (heap)
  (setf (deadline-heap-nearest heap)
        (if (= (deadline-heap-count heap) 0)
            most-positive-fixnum
            (fiber-deadline (truly-the fiber (svref (deadline-heap-entries heap) 0))))))

;;; Take out the entry at INDEX: the last one takes its place and finds its own.
(declaim (inline heap-delete-at))
(defun heap-delete-at (heap fiber index)
  (declare (optimize (safety 0)))
  (let* ((entries (deadline-heap-entries heap))
         (count (truly-the index (1- (deadline-heap-count heap))))
         (last (truly-the fiber (svref entries count))))
    (setf (deadline-heap-count heap) count
          (svref entries count) 0
          (fiber-heap-index (truly-the fiber fiber)) -1)
    (unless (eq last fiber)
      (if (and (> index 0)
               (< (fiber-deadline last)
                  (fiber-deadline (truly-the fiber (svref entries (ash (1- index) -1))))))
          (heap-sift-up entries last index)
          (heap-sift-down entries count last index)))
    (heap-note-nearest heap)
    nil))

;;; Make room for one more. The vector is allocated outside of the lock, which
;;; somebody else may take first.
(defun heap-ensure-room (heap)
  (loop
    (let* ((old (deadline-heap-entries heap))
           (length (length old)))
      (when (< (deadline-heap-count heap) length) (return))
      (let ((new (make-array (* 2 length) :initial-element 0)))
        (with-tiny-lock ((deadline-heap-lock heap))
          (when (eq old (deadline-heap-entries heap))
            (dotimes (i length) (setf (svref new i) (svref old i)))
            (setf (deadline-heap-entries heap) new))
          nil)))))

(declaim (ftype (sfunction (deadline-heap fiber fixnum) null) heap-insert))
(defun heap-insert (heap fiber deadline)
  "Enter FIBER, which is in no heap, into HEAP to be woken at DEADLINE, in the clock of FIBER-NOW."
  (setf (fiber-deadline fiber) deadline
        (fiber-heap fiber) heap)
  (loop
    (heap-ensure-room heap)
    (when (with-tiny-lock ((deadline-heap-lock heap))
            (let ((entries (deadline-heap-entries heap))
                  (count (deadline-heap-count heap)))
              (when (< count (length entries)) ; else others were faster
                (setf (deadline-heap-count heap) (truly-the index (1+ count)))
                (heap-sift-up entries fiber count)
                (heap-note-nearest heap)
                t)))
      (return nil))))

(declaim (ftype (sfunction (fiber) boolean) heap-remove))
(defun heap-remove (fiber)
  "Take FIBER out of the heap that it is in. Return false if its deadline has been served."
  (when (>= (fiber-heap-index fiber) 0)
    (let ((heap (truly-the deadline-heap (fiber-heap fiber))))
      (with-tiny-lock ((deadline-heap-lock heap))
        (let ((index (fiber-heap-index fiber)))
          (when (>= index 0)
            (heap-delete-at heap fiber index)
            t))))))

(declaim (ftype (sfunction (deadline-heap fixnum) (or null fiber)) heap-take-expired))
(defun heap-take-expired (heap now)
  "Remove and return a fiber of HEAP whose deadline is not later than NOW, the earliest first, or NIL."
  (when (<= (deadline-heap-nearest heap) now)
    (with-tiny-lock ((deadline-heap-lock heap))
      (when (<= (deadline-heap-nearest heap) now)
        (let ((fiber (truly-the fiber (svref (deadline-heap-entries heap) 0))))
          (heap-delete-at heap fiber 0)
          fiber)))))
