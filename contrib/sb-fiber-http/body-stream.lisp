;;;; streams that read the body of a request

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-HTTP")

;;; Octets from START to END of OCTETS have been received, and not read yet.
(defclass body-stream (sb-gray:fundamental-binary-input-stream)
  ((exchange :initarg :exchange
             :reader stream-exchange)
   (octets :initform nil)
   (start :initform 0 :type fixnum)
   (end :initform 0 :type fixnum))
  (:documentation "A stream of the octets that the body of a request consists of."))

(defun make-body-stream (exchange)
  "Return a stream of the octets of the body of the request of EXCHANGE. Reading signals TIMED-OUT,
CONNECTION-LOST and BAD-REQUEST."
  (make-instance 'body-stream :exchange exchange))

(defun fill-body-stream (stream)
  "Receive some octets for STREAM. Return false at the end of the body."
  (with-slots (exchange octets start end) stream
    (multiple-value-setq (octets start end) (receive-part exchange))
    (< start end)))

(defmethod stream-element-type ((stream body-stream))
  '(unsigned-byte 8))

(defmethod sb-gray:stream-read-byte ((stream body-stream))
  (with-slots (octets start end) stream
    (if (or (< start end) (fill-body-stream stream))
        (prog1 (aref (the octets octets) start)
          (incf start))
        :eof)))

(defmethod sb-gray:stream-read-sequence ((stream body-stream) sequence &optional (from 0) to)
  (with-slots (octets start end) stream
    (loop with to = (or to (length sequence))
          while (and (< from to) (or (< start end) (fill-body-stream stream)))
          do (let ((n (min (- to from) (- end start))))
               (replace sequence (the octets octets) :start1 from :start2 start :end2 (+ start n))
               (incf start n)
               (incf from n)))
    from))

(defmethod sb-gray:stream-listen ((stream body-stream))
  (with-slots (exchange start end) stream
    (or (< start end)
        (and (body-left-p exchange) (usable-now-p (exchange-connection exchange))))))

(defmethod sb-gray:stream-clear-input ((stream body-stream))
  (setf (slot-value stream 'start) (slot-value stream 'end))
  nil)

(defun read-another-body (stream exchange)
  "Let STREAM read the body of the request of EXCHANGE from now on."
  (setf (slot-value stream 'exchange) exchange
        (slot-value stream 'start) 0
        (slot-value stream 'end) 0))
