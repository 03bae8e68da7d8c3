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

(defclass client-stream (body-stream chunga:chunked-io-stream)
  (;; Hardly any reply needs it.
   (chunga::output-buffer :initform nil)
   (connection :initarg :connection
               :reader client-connection)
   (exchange :initform nil
             :documentation "The request that is being served, once there is one."))
  (:documentation "A stream of octets from and to a client."))

(defmethod chunga:chunked-stream-input-chunking-p ((stream client-stream))
  (let ((exchange (stream-exchange stream)))
    (and exchange (head-chunked-p (exchange-head exchange)))))

(defmethod (setf chunga:chunked-stream-output-chunking-p) :before (new-value (stream client-stream))
  (when (and new-value (null (chunga::output-buffer stream)))
    (setf (chunga::output-buffer stream)
          (make-array chunga::+output-buffer-size+ :element-type '(unsigned-byte 8)))))

(defun end-output (stream)
  (setf (chunga:chunked-stream-output-chunking-p stream) nil)
  (finish-output stream))
