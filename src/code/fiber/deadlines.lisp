;;;; the deadline heap: what is to be served at what time

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; A binary heap in two vectors, one heap for each scheduler. An entry is a fiber that is parked
;;; until some time, or an alarm, which is what a TIMER of a fiber has here. It knows its
;;; place, so that a wait that ends early leaves nothing behind; it is in one heap at most.
;;;
;;; What is true when nobody is inside:
;;;  - ENTRIES[0..COUNT) are fibers and alarms, each with HEAP-INDEX its index and HEAP this
;;;    heap; TIMES[i] is the deadline of ENTRIES[i], and not earlier than that of its parent,
;;;    the entry at (i-1)/2;
;;;  - an entry that is in no heap has HEAP-INDEX -1;
;;;  - NEAREST is the first deadline, or MOST-POSITIVE-FIXNUM. Code for which a value is enough that
;;;    was true a moment ago may read it without the lock.
;;; Any thread may insert and remove, under the tiny lock; the vectors are enlarged before.

(deftype times () '(simple-array fixnum (*)))

(defstruct (deadline-heap (:constructor make-deadline-heap ())
                          (:copier nil))
  (lock 0 :type word)
  (nearest most-positive-fixnum :type fixnum)
  (count 0 :type index)
  (entries (make-array 64 :initial-element 0) :type simple-vector)
  (times (make-array 64 :element-type 'fixnum) :type times))
(declaim (freeze-type deadline-heap))

(deftype heap-entry () '(or fiber alarm))

;;; Not SETF functions: inside of the tiny lock nothing may be called.
(defmacro entry-slot (entry fiber-slot alarm-slot)
  `(if (fiber-p ,entry)
       (,fiber-slot (truly-the fiber ,entry))
       (,alarm-slot (truly-the alarm ,entry))))

(defmacro set-entry-slot (entry fiber-slot alarm-slot value)
  `(if (fiber-p ,entry)
       (setf (,fiber-slot (truly-the fiber ,entry)) ,value)
       (setf (,alarm-slot (truly-the alarm ,entry)) ,value)))

(declaim (inline heap-place))
(defun heap-place (entries times entry deadline index)
  (declare (simple-vector entries) (type times times) (fixnum deadline) (index index)
           (optimize (safety 0)))
  (setf (svref entries index) entry
        (aref times index) deadline)
  (set-entry-slot entry fiber-heap-index alarm-heap-index index))

(declaim (inline heap-sift-up heap-sift-down))
(defun heap-sift-up (entries times entry deadline index)
  (declare (simple-vector entries) (type times times) (fixnum deadline) (index index)
           (optimize (safety 0)))
  (loop until (= index 0)
        do (let ((parent (ash (1- index) -1)))
             (when (<= (aref times parent) deadline) (return))
             (heap-place entries times (svref entries parent) (aref times parent) index)
             (setf index parent)))
  (heap-place entries times entry deadline index))

(defun heap-sift-down (entries times count entry deadline index)
  (declare (simple-vector entries) (type times times) (fixnum deadline) (index index count)
           (optimize (safety 0)))
  (loop
    (let ((child (truly-the index (1+ (truly-the index (* 2 index))))))
      (when (>= child count) (return))
      (when (and (< (1+ child) count) (< (aref times (1+ child)) (aref times child)))
        (setf child (truly-the index (1+ child))))
      (when (>= (aref times child) deadline) (return))
      (heap-place entries times (svref entries child) (aref times child) index)
      (setf index child)))
  (heap-place entries times entry deadline index))

(declaim (inline heap-note-nearest))
(defun heap-note-nearest (heap)
  (setf (deadline-heap-nearest heap)
        (if (= (deadline-heap-count heap) 0)
            most-positive-fixnum
            (aref (deadline-heap-times heap) 0))))

;;; Take out the entry at INDEX: the last one takes its place and finds its own.
(declaim (inline heap-delete-at))
(defun heap-delete-at (heap index)
  (declare (index index) (optimize (safety 0)))
  (let* ((entries (deadline-heap-entries heap))
         (times (deadline-heap-times heap))
         (entry (svref entries index))
         (count (truly-the index (1- (deadline-heap-count heap))))
         (last (svref entries count))
         (deadline (aref times count)))
    (setf (deadline-heap-count heap) count
          (svref entries count) 0)
    (set-entry-slot entry fiber-heap-index alarm-heap-index -1)
    (unless (= index count)
      (if (and (> index 0) (< deadline (aref times (ash (1- index) -1))))
          (heap-sift-up entries times last deadline index)
          (heap-sift-down entries times count last deadline index)))
    (heap-note-nearest heap)
    nil))

;;; Make room for one more. The vectors are allocated outside of the lock, which another thread may
;;; take first.
(defun heap-ensure-room (heap)
  (loop
    (let* ((old (deadline-heap-entries heap))
           (length (length old)))
      (when (< (deadline-heap-count heap) length) (return))
      (multiple-value-bind (new times)
          (sb-vm:without-arena
            (values (make-array (* 2 length) :initial-element 0)
                    (make-array (* 2 length) :element-type 'fixnum)))
        (with-tiny-lock ((deadline-heap-lock heap))
          (when (eq old (deadline-heap-entries heap))
            (dotimes (i length)
              (setf (svref new i) (svref old i)
                    (aref times i) (aref (deadline-heap-times heap) i)))
            (setf (deadline-heap-entries heap) new
                  (deadline-heap-times heap) times))
          nil)))))

(declaim (ftype (sfunction (deadline-heap heap-entry fixnum) null) heap-insert))
(defun heap-insert (heap entry deadline)
  "Enter ENTRY, which is in no heap, into HEAP to be served at DEADLINE, in the clock of FIBER-NOW."
  (set-entry-slot entry fiber-heap alarm-heap heap)
  (loop
    (heap-ensure-room heap)
    (when (with-tiny-lock ((deadline-heap-lock heap))
            (let ((entries (deadline-heap-entries heap))
                  (count (deadline-heap-count heap)))
              (when (< count (length entries)) ; else others were faster
                (setf (deadline-heap-count heap) (truly-the index (1+ count)))
                (heap-sift-up entries (deadline-heap-times heap) entry deadline count)
                (heap-note-nearest heap)
                t)))
      (return nil))))

(declaim (ftype (sfunction (heap-entry) boolean) heap-remove))
(defun heap-remove (entry)
  "Take ENTRY out of the heap that it is in. Return false if its deadline has been served."
  (when (>= (entry-slot entry fiber-heap-index alarm-heap-index) 0)
    (let ((heap (truly-the deadline-heap (entry-slot entry fiber-heap alarm-heap))))
      (with-tiny-lock ((deadline-heap-lock heap))
        (let ((index (entry-slot entry fiber-heap-index alarm-heap-index)))
          (when (>= index 0)
            (heap-delete-at heap index)
            t))))))

(declaim (ftype (sfunction (deadline-heap fixnum) (or null heap-entry)) heap-take-expired))
(defun heap-take-expired (heap now)
  "Remove and return an entry of HEAP whose deadline is not later than NOW, the earliest first, or
NIL."
  (when (<= (deadline-heap-nearest heap) now)
    (with-tiny-lock ((deadline-heap-lock heap))
      (when (<= (deadline-heap-nearest heap) now)
        (let ((entry (svref (deadline-heap-entries heap) 0)))
          (heap-delete-at heap 0)
          entry)))))

(declaim (ftype (sfunction (deadline-heap) list) heap-alarms))
(defun heap-alarms (heap)
  "A list of the alarms in HEAP."
  (loop
    (let ((all (make-array (length (deadline-heap-entries heap)) :initial-element 0)))
      (when (with-tiny-lock ((deadline-heap-lock heap))
              (let ((count (deadline-heap-count heap)))
                (when (<= count (length all)) ; else it has grown
                  (dotimes (i count) (setf (svref all i) (svref (deadline-heap-entries heap) i)))
                  t)))
        (return (loop for entry across all when (alarm-p entry) collect entry))))))
