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
;;; It has many places, since what it has no room for goes through the injector, a chain of
;;; fibers that are in no cache. What is moved at once, from wherever, is a small part of it: the
;;; others are to have some, too, and the carrier is to look around meanwhile.
;;;
;;; HEAD and TAIL only grow; place N is at index N modulo the capacity.
;;; What is true when nobody is inside:
;;;  - HEAD <= TAIL <= HEAD + capacity;
;;;  - places [HEAD,TAIL) hold what was put and not yet taken, in that order.
;;; What the threads may do:
;;;  - only the owner writes TAIL, and places, and only places outside of [HEAD,TAIL);
;;;  - all take by compare-and-swap of HEAD, having read the places before. As long as HEAD has not
;;;    moved the owner cannot have reused them, so that what a successful taker has read is right.
;;; The owner does this with interrupts off: a handler that woke a fiber would put it into
;;; the middle of a put.

(defconstant run-queue-capacity 16384)
(defconstant run-queue-batch 128)

(defstruct-apart (run-queue (:constructor make-run-queue ())
                            (:copier nil))
  (head 0 :type (and unsigned-byte fixnum))
  (tail 0 :type (and unsigned-byte fixnum))
  (ring (make-array run-queue-capacity :initial-element 0)
   :type (simple-vector #.run-queue-capacity) :read-only t)
  ;; what TAIL was when the owner last forgot
  (forgotten 0 :type (and unsigned-byte fixnum)))
(declaim (freeze-type run-queue))

(declaim (inline run-queue-place))
(defun run-queue-place (n)
  (declare (fixnum n))
  (logand n (1- run-queue-capacity)))

(declaim (inline run-queue-length))
(defun run-queue-length (queue)
  (let ((head (run-queue-head queue)))
    (truly-the fixnum (- (run-queue-tail queue) head))))

(declaim (ftype (sfunction (run-queue t) boolean) run-queue-put))
(defun run-queue-put (queue object)
  "Add OBJECT at the end of QUEUE. Return false if it is full. For the owner."
  (declare (optimize speed (safety 0)))
  (let ((tail (run-queue-tail queue)))
    (when (< (truly-the fixnum (- tail (run-queue-head queue))) run-queue-capacity)
      (store-place (run-queue-ring queue) (run-queue-place tail) object)
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
      (let* ((place (run-queue-place head))
             (object (svref (run-queue-ring queue) place)))
        (when (eq (cas (run-queue-head queue) head (truly-the fixnum (1+ head))) head)
          ;; The place is the owner's until its next put; what it holds could be garbage soon.
          (setf (svref (run-queue-ring queue) place) 0)
          (return object))))))

(declaim (ftype (sfunction (run-queue run-queue) t) run-queue-steal))
(defun run-queue-steal (victim thief)
  "Move half of what is in VICTIM, rounded up, but at most a batch, to the empty queue THIEF, which
the caller owns, and return one of those, or NIL."
  (declare (optimize speed (safety 0)))
  (loop
    (let* ((head (run-queue-head victim))
           (length (truly-the fixnum (- (run-queue-tail victim) head)))
           (n (min (ash (truly-the fixnum (1+ length)) -1) run-queue-batch)))
      (declare (fixnum length n))
      (cond ((<= length 0) (return nil))
            ((> length run-queue-capacity)) ; HEAD was stale when TAIL was read
            (t
             (let ((tail (run-queue-tail thief)))
               (dotimes (i n)
                 (setf (svref (run-queue-ring thief) (run-queue-place (+ tail i)))
                       (svref (run-queue-ring victim) (run-queue-place (+ head i)))))
               (when (eq (cas (run-queue-head victim) head (truly-the fixnum (+ head n))) head)
                 (barrier (:write))
                 (setf (run-queue-tail thief) (truly-the fixnum (+ tail n)))
                 (return (run-queue-take thief)))))))))

;;; What thieves took is still in the ring, and what an attempt to steal copied, which is at most a
;;; batch beyond TAIL.
(declaim (ftype (sfunction (run-queue) null) run-queue-forget))
(defun run-queue-forget (queue)
  "If QUEUE is empty let it no longer keep alive what was in it. For the owner."
  (when (= (run-queue-length queue) 0)
    (let* ((tail (run-queue-tail queue))
           (end (truly-the fixnum (+ tail run-queue-batch))))
      (loop for n of-type fixnum from (max (run-queue-forgotten queue)
                                           (truly-the fixnum (- end run-queue-capacity)))
              below end
            do (setf (svref (run-queue-ring queue) (run-queue-place n)) 0))
      (setf (run-queue-forgotten queue) tail)))
  nil)
