;;;; transports: what carries the octets of a connection above its socket

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.
(in-package "SB-FIBER-HTTP")

;;; A connection without a transport sends and receives its octets as they are. TLS is a transport,
;;; see sb-fiber-http-tls. The functions here return at once; they wait for nothing.
;;;
;;; A transport is used by the fiber of its connection; and, if that has given the connection away,
;;; by other threads at the same time, so its methods lock.

(defstruct (transport (:constructor nil) (:copier nil))
  "What carries the octets of a connection.")

(defgeneric make-transport (security fd)
  (:documentation "Return the transport of a new connection, whose socket has the descriptor FD, to
a server that was started with SECURITY as its TLS."))

(defgeneric transport-read (transport sap n)
  (:documentation "Receive at most N octets to SAP. Return how many, 0 at the end; or NIL and the
direction, :INPUT or :OUTPUT, in which the socket must be ready before; or NIL and an errno."))

(defgeneric transport-write (transport sap n)
  (:documentation "Send at most N octets from SAP. Returns what TRANSPORT-READ does."))

(defgeneric transport-pending-p (transport)
  (:documentation "Has something been received that was not read?"))

(defgeneric transport-end (transport)
  (:documentation "Tell the client that nothing more will be sent. Return :OUTPUT if the socket must
be ready for that before this is called again, or else NIL."))

(defgeneric transport-free (transport)
  (:documentation "Free what TRANSPORT has. It may be used, and freed, again, and does nothing
then."))
