;;;; the run queue: one owner puts, the owner and thieves take

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; A ring after that of Go's runtime (runtime/proc.go, runqput and runqsteal),
;;; served first in, first out: a queue that its owner served from the end where it puts
;;; (Chase and Lev's) would let a fiber that yields run again at once, for ever.
;;;
;;; HEAD and TAIL only grow; place N is at index N modulo the length of the ring.
;;; What is true when nobody is inside:
;;;  - HEAD <= TAIL <= HEAD + the length of RING;
;;;  - places [HEAD,TAIL) hold what was put and not yet taken, in that order.
;;; What the threads may do:
;;;  - only the owner writes TAIL, RING, and places, and only places outside of [HEAD,TAIL);
;;;  - all take by compare-and-swap of HEAD, having read the places before. As long as HEAD has not
;;;    moved the owner cannot have reused them, so that what a successful taker has read is right.
;;; The owner does this with interrupts off: a handler that woke a fiber would put it into
;;; the middle of a put.
;;;
;;; The ring is short, so that it stays in the cache. What it has no room for would go through the
;;; injector, a chain of fibers that are in no cache; so the queue of a group with many fibers has a
;;; spare ring, a long one, into which the owner moves when the short one is full, and which it
;;; leaves when it is empty and the carrier is about to sleep (RUN-QUEUE-FORGET). A taker that still
;;; reads the ring that was left finds there what it would find in the other, or HEAD has moved:
;;; [HEAD,TAIL) is copied before RING is written, and the old places stay as they are until then.
;;; SPARE: NIL -> the long ring, by any thread; then it is the owner's, and always the one of the
;;; two that is not RING.

(defconstant run-queue-capacity 256)
(defconstant long-run-queue-capacity 16384)
;;; What is moved at once, from wherever: the others are to have some, too, and the carrier is to
;;; look around meanwhile.
(defconstant run-queue-batch 128)

(defstruct-apart (run-queue (:constructor make-run-queue ())
                            (:copier nil))
  (head 0 :type (and unsigned-byte fixnum))
  (tail 0 :type (and unsigned-byte fixnum))
  (ring (make-array run-queue-capacity :initial-element 0) :type simple-vector)
  (spare nil))
(declaim (freeze-type run-queue))

(declaim (inline run-queue-place))
(defun run-queue-place (ring n)
  (declare (simple-vector ring) (fixnum n))
  (logand n (truly-the fixnum (1- (length ring)))))

(declaim (inline run-queue-length))
(defun run-queue-length (queue)
  (let ((head (run-queue-head queue)))
    (truly-the fixnum (- (run-queue-tail queue) head))))

(declaim (ftype (sfunction (run-queue) null) run-queue-provide))
(defun run-queue-provide (queue)
  "Let QUEUE have a long ring when it needs one. For any thread."
  (unless (run-queue-spare queue)
    (cas (run-queue-spare queue) nil
         (make-array long-run-queue-capacity :initial-element 0)))
  nil)

(declaim (ftype (sfunction (run-queue) t) run-queue-move))
(defun run-queue-move (queue)
  "Move QUEUE, which is full, into its long ring, and return that, or NIL if it has none or is
there. For the owner."
  (let ((ring (run-queue-ring queue)) (spare (run-queue-spare queue)))
    (when (and spare (= (length ring) run-queue-capacity))
      (let ((long (truly-the simple-vector spare)))
        (loop for n of-type fixnum from (run-queue-head queue) below (run-queue-tail queue)
              do (setf (svref long (run-queue-place long n))
                       (svref ring (run-queue-place ring n))))
        (setf (run-queue-spare queue) ring)
        (barrier (:write))
        (setf (run-queue-ring queue) long)))))

(declaim (ftype (sfunction (run-queue t) boolean) run-queue-put))
(defun run-queue-put (queue object)
  "Add OBJECT at the end of QUEUE. Return false if it is full. For the owner."
  (declare (optimize speed (safety 0)))
  (let ((tail (run-queue-tail queue))
        (ring (run-queue-ring queue)))
    (when (or (< (truly-the fixnum (- tail (run-queue-head queue))) (length ring))
              (let ((long (run-queue-move queue)))
                (and long (setf ring (truly-the simple-vector long)) t)))
      (store-place ring (run-queue-place ring tail) object)
      (barrier (:write))
      (setf (run-queue-tail queue) (truly-the fixnum (1+ tail)))
      t)))

(declaim (ftype (sfunction (run-queue) t) run-queue-take))
(defun run-queue-take (queue)
  "Remove and return what was put into QUEUE first, or NIL. For the owner."
  (declare (optimize speed (safety 0)))
  (loop
    (let ((head (run-queue-head queue)))
      (when (= head (run-queue-tail queue)) (return nil))
      (let* ((ring (run-queue-ring queue))
             (place (run-queue-place ring head))
             (object (svref ring place)))
        (when (eq (cas (run-queue-head queue) head (truly-the fixnum (1+ head))) head)
          ;; The place is the owner's until its next put; what it holds could be garbage soon.
          (setf (svref ring place) 0)
          (return object))))))

(declaim (ftype (sfunction (run-queue run-queue) t) run-queue-steal))
(defun run-queue-steal (victim thief)
  "Move half of what is in VICTIM, rounded up, but at most a batch, to the empty queue THIEF, which
the caller owns, and return one of those, or NIL."
  (declare (optimize speed (safety 0)))
  (loop
    (let* ((head (run-queue-head victim))
           (length (truly-the fixnum (- (run-queue-tail victim) head)))
           (n (min (ash (truly-the fixnum (1+ length)) -1) run-queue-batch))
           (from (run-queue-ring victim)) ; after TAIL: all up to there is in it, or was taken
           (to (run-queue-ring thief)))
      (declare (fixnum length n))
      (when (<= length 0) (return nil))
      (let ((tail (run-queue-tail thief)))
        (dotimes (i n)
          (setf (svref to (run-queue-place to (+ tail i)))
                (svref from (run-queue-place from (+ head i)))))
        (when (eq (cas (run-queue-head victim) head (truly-the fixnum (+ head n))) head)
          (barrier (:write))
          (setf (run-queue-tail thief) (truly-the fixnum (+ tail n)))
          (return (run-queue-take thief)))))))

;;; What thieves took is still in the ring, and what an attempt to steal copied.
(declaim (ftype (sfunction (run-queue) null) run-queue-forget))
(defun run-queue-forget (queue)
  "If QUEUE is empty let it no longer keep alive what was in it. For the owner."
  (when (= (run-queue-length queue) 0)
    (let ((ring (run-queue-ring queue)))
      (unless (= (length ring) run-queue-capacity)
        (fill ring 0)
        (let ((short (truly-the simple-vector (run-queue-spare queue))))
          (setf (run-queue-spare queue) ring
                (run-queue-ring queue) short)))
      (fill (truly-the simple-vector (run-queue-ring queue)) 0)))
  nil)
