;;;; the stream between a handler and its client

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-HUNCHENTOOT")

;;; What Hunchentoot has in *HUNCHENTOOT-STREAM*, and as content stream of a request. It reads the
;;; body of the request, which the engine decodes, and no more; a request that asks to upgrade the
;;; connection has everything that comes. What is written goes to the socket's own stream, in
;;; chunks or not, by CHUNGA's methods. A reply that is a string or octets does not come here.

(defclass client-stream (chunga:chunked-io-stream)
  (;; Hardly any reply needs it.
   (chunga::output-buffer :initform nil)
   (connection :initarg :connection
               :reader client-connection)
   (decoder :initform nil
            :accessor decoder
            :documentation "What decodes the body, or NIL if all that comes is to be read.")
   (chunked-p :initform nil
              :accessor body-chunked-p)
   (continue-p :initform nil
               :accessor continue-p
               :documentation "Whether the client waits to be told that it may send the body.")
   (timeout :initarg :timeout
            :reader timeout)
   (octets :initform nil)
   (start :initform 0 :type fixnum)
   (end :initform 0 :type fixnum))
  (:documentation "A stream of octets from and to a client."))

(defmethod chunga:chunked-stream-input-chunking-p ((stream client-stream))
  (body-chunked-p stream))

(defmethod (setf chunga:chunked-stream-output-chunking-p) :before (new-value (stream client-stream))
  (when (and new-value (null (chunga::output-buffer stream)))
    (setf (chunga::output-buffer stream)
          (make-array chunga::+output-buffer-size+ :element-type '(unsigned-byte 8)))))

(defun begin-body (stream decoder head)
  "Let STREAM read the body that DECODER decodes, behind HEAD."
  (setf (decoder stream) decoder
        (body-chunked-p stream) (head-chunked-p head)
        (continue-p stream) (head-expects-continue-p head)
        (slot-value stream 'start) 0
        (slot-value stream 'end) 0))

(defun body-left-p (stream)
  "Has the body not been received to its end?"
  (let ((decoder (decoder stream)))
    (and decoder (not (decoder-done-p decoder)))))

(defun tell-to-continue (stream)
  (setf (continue-p stream) nil)
  (let ((line (load-time-value
               (string-octets (format nil "HTTP/1.1 100 Continue~C~C~:*~:*~C~C" #\Return #\Newline))
               t)))
    (send-octets (client-connection stream) line 0 (length line)
                 (deadline-after (timeout stream)))))

(defun fill-input (stream)
  "Receive some octets for STREAM. Return false at the end of the body."
  (when (and (continue-p stream) (body-left-p stream)) (tell-to-continue stream))
  (with-slots (connection decoder octets start end) stream
    (multiple-value-setq (octets start end)
      (if decoder
          (receive-body connection decoder (deadline-after (timeout stream)))
          (receive-anything connection nil)))
    (< start end)))

(defmethod trivial-gray-streams:stream-read-byte ((stream client-stream))
  (with-slots (octets start end) stream
    (if (or (< start end) (fill-input stream))
        (prog1 (aref (the octets octets) start)
          (incf start))
        :eof)))

(defmethod trivial-gray-streams:stream-read-sequence ((stream client-stream) sequence from to &key)
  (with-slots (octets start end) stream
    (loop while (and (< from to) (or (< start end) (fill-input stream)))
          do (let ((n (min (- to from) (- end start))))
               (replace sequence (the octets octets) :start1 from :start2 start :end2 (+ start n))
               (incf start n)
               (incf from n)))
    from))

(defmethod trivial-gray-streams:stream-listen ((stream client-stream))
  (with-slots (start end) stream
    (or (< start end)
        (and (or (null (decoder stream)) (body-left-p stream))
             (or (input-waiting-p (client-connection stream))
                 (listen (chunga:chunked-stream-stream stream)))))))

(defmethod trivial-gray-streams:stream-clear-input ((stream client-stream))
  (setf (slot-value stream 'start) (slot-value stream 'end))
  nil)

(defconstant +most-skipped-octets+ 262144)

(defun skip-body (stream)
  "Receive what the handler has not read of the body. Return false if that is too much, or the
client was not told to send it."
  (loop repeat (ceiling +most-skipped-octets+ 1024)
        while (and (body-left-p stream) (not (decoder-failed-p (decoder stream)))
                   (not (continue-p stream)))
        do (handler-case (fill-input stream)
             (bad-request ())))         ; the reply has been sent
  (not (body-left-p stream)))
