;;;; acceptors whose connections are served by the HTTP engine

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-HUNCHENTOOT")

(defstruct (request-count (:copier nil))
  (in-progress 0 :type sb-ext:word))
(declaim (sb-ext:freeze-type request-count))

(defclass fiber-acceptor (hunchentoot:acceptor)
  ((max-head :initarg :max-head
             :initform 65536
             :reader max-head)
   (max-body :initarg :max-body
             :initform nil
             :reader max-body)
   (limits :accessor acceptor-limits)
   (request-count :initform (make-request-count)
                  :reader acceptor-request-count))
  (:default-initargs :request-class 'fiber-request
                     :taskmaster (make-instance 'fiber-taskmaster))
  (:documentation
   "An acceptor that serves each connection in a fiber, and leaves to Hunchentoot only what it is
asked for: requests are parsed where they lie in the buffer of the connection, what no handler reads
of them is not computed, and a reply that is a string or octets is sent by one call. The initargs
beside those of HUNCHENTOOT:ACCEPTOR are
  :MAX-HEAD   how many octets the head of a request may have, 65,536 by default; a longer one is
              answered with status 431, or 414 if it is the request line;
  :MAX-BODY   how many octets a body may have, or NIL for any number; a longer one is answered with
              status 413.
The default TASKMASTER is a FIBER-TASKMASTER, and the default REQUEST-CLASS is FIBER-REQUEST.
Time-outs are of whole heads, and of each 262,144 octets of a reply: a client that sends or takes an
octet now and then does not stay."))

(defclass easy-fiber-acceptor (fiber-acceptor hunchentoot:easy-acceptor)
  ()
  (:documentation "A FIBER-ACCEPTOR that is an EASY-ACCEPTOR."))

(defmethod initialize-instance :after ((acceptor fiber-acceptor) &key)
  (with-slots (max-head max-body limits) acceptor
    (unless (typep max-head '(integer 256 100000000))
      (parameter-error "MAX-HEAD must be an integer from 256 to 100,000,000, not ~S." max-head))
    (unless (typep max-body '(or null (integer 0 #.most-positive-fixnum)))
      (parameter-error "MAX-BODY must be a fixnum that is not negative, or NIL, not ~S." max-body))
    (setf limits (make-limits :head max-head :line (min 8192 max-head)))))

(sb-ext:define-load-time-global *server-name*
    (format nil "Hunchentoot ~A" hunchentoot:*hunchentoot-version*))

(defmethod hunchentoot::acceptor-server-name ((acceptor fiber-acceptor))
  *server-name*)

;;;; accepting

(defun accept-connection (acceptor listener)
  (let ((socket (handler-case (usocket:socket-accept listener)
                  (usocket:connection-aborted-error ()))))
    (when socket
      (hunchentoot::set-timeouts socket
                                 (hunchentoot:acceptor-read-timeout acceptor)
                                 (hunchentoot:acceptor-write-timeout acceptor))
      (hunchentoot:handle-incoming-connection (hunchentoot::acceptor-taskmaster acceptor)
                                              socket))))

;;; As for stock acceptors, but the listener is not asked before whether there is a connection: with
;;; thousands of fibers that can run, each such question waits for all of them, and the kernel drops
;;; the clients that come at once.
(defmethod hunchentoot:accept-connections ((acceptor fiber-acceptor))
  (usocket:with-server-socket (listener (hunchentoot::acceptor-listen-socket acceptor))
    (loop until (hunchentoot::acceptor-shutdown-p acceptor)
          do (accept-connection acceptor listener))))

;;;; how many requests are in progress

;;; Hunchentoot counts under a mutex of the acceptor. All carriers would write it twice a request;
;;; and a mutex for which fibers wait is handed to one that has yet to run, behind all that are
;;; queued: they would form a line there that does not end while the server is busy.

(defmethod hunchentoot::accessor-requests-in-progress ((acceptor fiber-acceptor))
  (if (hunchentoot:acceptor-ssl-p acceptor)
      (call-next-method)
      (request-count-in-progress (acceptor-request-count acceptor))))

;;; ATOMIC-DECF is a full barrier before the flag is read. STOP sets the flag, and takes the lock
;;; before it reads the count: one of the two sees what the other wrote.
(defun request-has-ended (acceptor)
  (sb-sys:without-interrupts            ; or STOP would wait for it for ever
    (sb-ext:atomic-decf (request-count-in-progress (acceptor-request-count acceptor)))
    (when (hunchentoot::acceptor-shutdown-p acceptor)
      (hunchentoot::with-lock-held ((hunchentoot::acceptor-shutdown-lock acceptor))
        (hunchentoot::condition-variable-signal
         (hunchentoot::acceptor-shutdown-queue acceptor))))))

(defmacro with-request-counted ((acceptor) &body body)
  "Execute BODY, which serves a request. STOP with :SOFT true waits for that."
  (sb-int:with-unique-names (begun-p)
    `(let ((,begun-p nil))
       (unwind-protect
            (progn
              (sb-sys:without-interrupts
                (sb-ext:atomic-incf (request-count-in-progress (acceptor-request-count ,acceptor)))
                (setf ,begun-p t))
              ,@body)
         (when ,begun-p (request-has-ended ,acceptor))))))

;;;; a request

(defun refuse-body (condition)
  "Tell the client that the body which a handler wanted is none, or too large."
  (let ((status (bad-request-status condition)))
    (hunchentoot:log-message* :warning "~A" condition)
    (setf (hunchentoot:header-out :connection) "close"
          ;; or START-OUTPUT would read it
          (slot-value hunchentoot:*request* 'hunchentoot:raw-post-data) t)
    (hunchentoot::start-output status
                               (hunchentoot:acceptor-status-message hunchentoot:*acceptor* status))
    (setf hunchentoot::*finish-processing-socket* t)))

(defun report-error (error backtrace)
  "Tell the client, and the log, of ERROR in a handler."
  (when hunchentoot:*log-lisp-errors-p*
    (hunchentoot:log-message* hunchentoot:*lisp-errors-log-level* "~A~@[~%~A~]" error
                              (and hunchentoot:*log-lisp-backtraces-p* backtrace)))
  (hunchentoot::start-output
   hunchentoot:+http-internal-server-error+
   (hunchentoot:acceptor-status-message hunchentoot:*acceptor*
                                        hunchentoot:+http-internal-server-error+
                                        :error (princ-to-string error)
                                        :backtrace (princ-to-string backtrace))))

(defvar *cut-off-p* nil
  "Has the reply to the request that is being served ended before its end?")

;;; If the head was sent the client waits for what it has announced, and must not take the next
;;; reply for that.
(defun report-failure (error backtrace)
  "As REPORT-ERROR; the connection is closed if the reply has begun."
  (let ((sent-p hunchentoot::*headers-sent*))
    (report-error error backtrace)
    (when sent-p (setf *cut-off-p* t
                       hunchentoot::*finish-processing-socket* t))))

(defun of-client-p (condition)
  "Was CONDITION signalled since the client of this request is gone, or slow?"
  (and (typep condition 'client-error)
       (typep hunchentoot::*hunchentoot-stream* 'client-stream)
       (eq (client-error-connection condition)
           (client-connection hunchentoot::*hunchentoot-stream*))))

(defun send-contents (acceptor request reply contents)
  "Send what a handler has returned, or the page for its status."
  (let ((contents (or contents
                      (hunchentoot:acceptor-status-message acceptor
                                                           (hunchentoot:return-code reply)))))
    (if (and (simple-reply-p reply request contents) (simple-fields-p reply))
        (send-simple-reply acceptor request reply contents hunchentoot::*hunchentoot-stream*)
        (hunchentoot::start-output (hunchentoot:return-code reply) contents))))

(defun report-outcome (failure backtrace)
  "Deal with FAILURE, the error that a handler has signalled, or NIL."
  (cond ((null failure))
        ((typep failure 'bad-request) (refuse-body failure))
        ((of-client-p failure) (error failure)) ; the body did not come
        (t (report-failure failure backtrace))))

(defun send-contents-or-error (acceptor request contents)
  (handler-case
      (hunchentoot::with-debugger
        (send-contents acceptor request hunchentoot:*reply* contents))
    (error (condition)
      (if (of-client-p condition)
          (error condition)
          (report-failure condition nil)))))

(defun reply-to-request (acceptor request)
  (multiple-value-bind (contents failure backtrace)
      (when (eql (hunchentoot:return-code hunchentoot:*reply*) hunchentoot:+http-ok+)
        (catch 'hunchentoot::handler-done
          (hunchentoot:handle-request acceptor request)))
    (report-outcome failure backtrace)
    (unless hunchentoot::*headers-sent*
      (send-contents-or-error acceptor request contents))))

(defun delete-temporary-files ()
  (dolist (path hunchentoot::*tmp-files*)
    (when (and (pathnamep path) (probe-file path))
      (hunchentoot::ignore-errors* (delete-file path)))))

(defmethod hunchentoot:process-request ((request fiber-request))
  (catch 'hunchentoot::request-processed
    (let ((hunchentoot::*tmp-files* '())
          (hunchentoot::*headers-sent* nil)
          (hunchentoot:*request* request))
      (unwind-protect
           (hunchentoot::with-mapped-conditions ()
             (reply-to-request hunchentoot:*acceptor* request))
        (delete-temporary-files)))))

;;;; a connection

(defun serve-request (acceptor socket head stream)
  "Serve the request with HEAD. Return true if the client may send another."
  (let ((hunchentoot::*finish-processing-socket* t)
        (*cut-off-p* nil)
        (*past-stream-p* nil)
        (hunchentoot:*reply* (make-instance (hunchentoot:acceptor-reply-class acceptor)))
        (hunchentoot:*session* nil)
        (hunchentoot::*hunchentoot-stream* stream)
        (exchange (make-exchange (client-connection stream) head
                                 :most-body (min (or (max-body acceptor) +unlimited+) +unlimited+)
                                 :timeout (hunchentoot:acceptor-read-timeout acceptor))))
    (read-another-body stream exchange)
    ;; If the handler answers that by 101, what comes next is its own.
    (when (upgrade-without-body-p head) (take-connection exchange))
    (with-request-counted (acceptor)
      (hunchentoot:process-request (make-request acceptor socket head stream)))
    (cond (*past-stream-p*)
          (*cut-off-p* (finish-output stream))
          (t (end-output stream)))
    (and (not hunchentoot::*finish-processing-socket*)
         (exchange-keep-alive-p exchange) ; or a part of the body may be lost
         (skip-body exchange))))

(defun refuse-request (acceptor connection condition)
  "Tell the client what was wrong, and the log."
  (hunchentoot:acceptor-log-message acceptor :warning "~A" condition)
  (send-reply connection (bad-request-status condition) '(("Content-Type" . "text/plain"))
              (string-octets (format nil "~A~%" (bad-request-reason condition)))
              :keep-alive-p nil :seconds (hunchentoot:acceptor-write-timeout acceptor)))

(defconstant +linger-seconds+ 2)

(defun unread-p (stream)
  "Does the client perhaps still send what belongs to its last request?"
  (let ((exchange (stream-exchange stream)))
    (and exchange
         (or (body-left-p exchange) (usable-now-p (client-connection stream))))))

(defun serve-requests (acceptor socket connection stream)
  (let ((timeout (hunchentoot:acceptor-read-timeout acceptor)))
    (handler-case
        (loop until (hunchentoot::acceptor-shutdown-p acceptor)
              do (let ((head (receive-head connection (deadline-after timeout) timeout)))
                   (unless (and head
                                ;; It may have come while others were waited for.
                                (not (hunchentoot::acceptor-shutdown-p acceptor))
                                (serve-request acceptor socket head stream))
                     (when (and hunchentoot::*close-hunchentoot-stream* (unread-p stream))
                       (linger connection +linger-seconds+))
                     (return))))
      (client-error ())                 ; as for stock acceptors, not worth a message
      (bad-request (condition)
        (handler-case (refuse-request acceptor connection condition)
          (client-error ())
          (:no-error (&rest values)
            (declare (ignore values))
            (linger connection +linger-seconds+)))))))

(defun close-quietly (stream)
  (hunchentoot::ignore-errors* (finish-output stream))
  (hunchentoot::ignore-errors* (close stream :abort t)))

(defmethod hunchentoot:process-connection ((acceptor fiber-acceptor) socket)
  (if (hunchentoot:acceptor-ssl-p acceptor)
      (call-next-method)
      (let* ((hunchentoot::*close-hunchentoot-stream* t)
             (socket-stream (hunchentoot::make-socket-stream socket acceptor))
             (connection (make-connection (sb-sys:fd-stream-fd socket-stream)
                                          :limits (acceptor-limits acceptor)))
             (stream (make-instance 'client-stream
                                    :real-stream socket-stream :connection connection)))
        (unwind-protect (serve-requests acceptor socket connection stream)
          ;; A connection that was detached goes on, with what was received.
          (when hunchentoot::*close-hunchentoot-stream*
            (drop-all-input connection)
            (close-quietly socket-stream))))))
