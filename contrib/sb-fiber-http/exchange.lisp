;;;; exchanges: a request, and what is replied to it

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-HTTP")

;;; What a handler of a server is given. Its reply is whole, by REPLY, or comes in parts:
;;;
;;;     STATE        what has been sent           move                 by
;;;     :UNANSWERED  nothing                      -> :OPEN             BEGIN-REPLY
;;;                                               -> :ENDED            REPLY
;;;                                               -> :TAKEN            TAKE-CONNECTION
;;;     :OPEN        a head, perhaps some parts   -> :ENDED            END-REPLY
;;;     :ENDED       a reply, as far as it goes
;;;     :BROKEN      perhaps a part of something    <- all, when sending is unwound
;;;     :TAKEN       what the handler has sent itself
;;;
;;; A reply in parts is framed by one of
;;;  :LENGTH   the head says how many octets come, and LEFT how many of them are not sent yet;
;;;  :CHUNKED  each part is a chunk, with its size;
;;;  :CLOSE    the end of the connection: for clients of HTTP/1.0;
;;;  :NONE     there is no body.
;;;
;;; An exchange belongs to the fiber that serves its connection, or to whom that gives it.

(deftype exchange-state () '(member :unanswered :open :ended :broken :taken))
(deftype framing () '(member :length :chunked :close :none))

(defstruct (exchange (:constructor make-exchange
                         (connection head &key (most-body +unlimited+) timeout client
                                               (keep-alive-p (head-keep-alive-p head))
                          &aux (decoder (make-decoder head most-body))
                               (continue-p (head-expects-continue-p head))))
                     (:copier nil))
  "A request, whose HEAD has been received, and its reply. TIMEOUT is how many seconds the client
may take for some more octets of the body, and for each 262,144 octets of the reply; or NIL."
  (connection (sb-int:missing-arg) :type connection :read-only t)
  (head (sb-int:missing-arg) :type head :read-only t)
  (decoder (sb-int:missing-arg) :type decoder :read-only t)
  (timeout nil :type (or null (real 0)) :read-only t)
  ;; what the server knows of the client, a CLIENT
  (client nil :read-only t)
  (state :unanswered :type exchange-state)
  (framing :none :type framing)
  (left 0 :type index)
  (status 0 :type index)
  ;; May the client send another request on this connection?
  (keep-alive-p nil :type boolean)
  ;; Does the client wait to be told that it may send the body?
  (continue-p nil :type boolean))
(declaim (sb-ext:freeze-type exchange))

(defun upgrade-without-body-p (head)
  (and (head-upgrade-p head) (null (head-content-length head)) (not (head-chunked-p head))))

(defun wrong-state (exchange wanted)
  (error "The reply to ~S cannot be ~A: its state is ~S." exchange wanted
         (exchange-state exchange)))

(defun exchange-deadline (exchange)
  (deadline-after (exchange-timeout exchange)))

;;; After a part of a message the client must not take what is sent next for the rest; nor may the
;;; rest of a body be taken for a request. It may be a time-out that unwinds this, anywhere: what
;;; tells how far the exchange is changes within.
(defmacro receiving ((exchange) &body body)
  "Execute BODY, which receives. If it is unwound the connection of EXCHANGE is going to be closed."
  `(call-unless-unwound (lambda () ,@body)
                        (lambda () (setf (exchange-keep-alive-p ,exchange) nil))))

(defmacro sending ((exchange) &body body)
  "Execute BODY, which sends. If it is unwound nothing more is sent by EXCHANGE, and its connection
is going to be closed."
  `(call-unless-unwound (lambda () ,@body)
                        (lambda ()
                          (setf (exchange-keep-alive-p ,exchange) nil
                                (exchange-state ,exchange) :broken))))

(declaim (inline call-unless-unwound))
(defun call-unless-unwound (function otherwise)
  (declare (function function otherwise))
  (let ((done nil))
    (unwind-protect (multiple-value-prog1 (funcall function)
                      (setf done t))
      (unless done (funcall otherwise)))))

;;;; the body of the request

(defun tell-to-continue (exchange)
  (setf (exchange-continue-p exchange) nil)
  (let ((line (load-time-value
               (string-octets (format nil "HTTP/1.1 100 Continue~C~C~:*~:*~C~C" #\Return #\Newline))
               t)))
    (send-octets (exchange-connection exchange) line 0 (length (the octets line))
                 (exchange-timeout exchange))))

(defun body-left-p (exchange)
  "Has the body of the request of EXCHANGE, or what came by a connection that was taken, not been
received to its end?"
  (or (eq (exchange-state exchange) :taken)
      (not (decoder-done-p (exchange-decoder exchange)))))

(defun receive-part (exchange)
  "Receive some octets of the body of the request. Return the vector that they are in, start and
end, which are equal when the body has ended. The octets are to be used before the next call.
Signals TIMED-OUT, CONNECTION-LOST and BAD-REQUEST. If the connection was taken, this is whatever
comes, and is waited for without a time-out."
  (let ((connection (exchange-connection exchange)) (decoder (exchange-decoder exchange)))
    (cond ((eq (exchange-state exchange) :taken) (receive-anything connection nil))
          (t (receiving (exchange)
               (when (and (exchange-continue-p exchange) (body-left-p exchange)
                          (eq (exchange-state exchange) :unanswered))
                 (tell-to-continue exchange))
               (receive-body connection decoder (exchange-deadline exchange)))))))

(defconstant +most-skipped-octets+ 262144)

(defun skippable-p (exchange)
  "Is there something left of the body which will come, and can be decoded?"
  (and (body-left-p exchange)
       (not (decoder-failed-p (exchange-decoder exchange)))
       (not (exchange-continue-p exchange))))

(defun skip-body (exchange)
  "Receive what the handler has not read of the body. Return false if that is too much, or takes
longer than one part may, or the client was not told to send it."
  (unless (eq (exchange-state exchange) :taken)
    (loop with left of-type fixnum = +most-skipped-octets+
          with deadline = (exchange-deadline exchange)
          while (and (skippable-p exchange) (plusp left))
          do (multiple-value-bind (octets start end)
                 (handler-case (receive-body (exchange-connection exchange)
                                             (exchange-decoder exchange) deadline)
                   (bad-request () (values nil 0 0)) ; the reply has been sent
                   (timed-out () (return-from skip-body nil)))
               (declare (ignore octets))
               (decf left (- end start))))
    (not (body-left-p exchange))))

;;;; whole replies

(defun head-only-p (exchange)
  "Does the request ask for the head of the reply only?"
  (head-method-is-p (exchange-head exchange) "HEAD"))

(defun keep-alive-told (exchange)
  "What PUT-HEAD is to be told of the connection: by HTTP/1.0 it is not kept unless that is said."
  (and (exchange-keep-alive-p exchange)
       (or (= 1 (head-minor-version (exchange-head exchange))) :told)))

(defun note-fields (exchange fields)
  (when (closing-fields-p fields) (setf (exchange-keep-alive-p exchange) nil)))

(defun reply (exchange status fields body)
  "Reply to EXCHANGE with the integer STATUS, FIELDS, an alist of strings, and BODY, octets. The
fields of length and, if it is not among FIELDS, date are added. The connection is closed behind the
reply if FIELDS say so. Signals TIMED-OUT and CONNECTION-LOST; and an error if a field has
characters that it must not have, or is about length or encoding, or if there is a reply already."
  (unless (eq (exchange-state exchange) :unanswered) (wrong-state exchange "sent"))
  (note-fields exchange fields)
  (let ((length (and (body-allowed-p status) (length body))))
    (with-output (output)
      (put-head output status fields :length length :keep-alive-p (keep-alive-told exchange))
      (sending (exchange)
        (setf (exchange-status exchange) status
              (exchange-state exchange) :ended)
        (send-output (exchange-connection exchange) output body
                     (if (head-only-p exchange) 0 (or length 0))
                     (exchange-timeout exchange))))))

;;;; replies in parts

(defun choose-framing (exchange status length)
  (cond ((or (not (body-allowed-p status)) (head-only-p exchange)) :none)
        (length :length)
        ((= 1 (head-minor-version (exchange-head exchange))) :chunked)
        (t :close)))

(defun put-parted-head (output exchange status fields length framing)
  (let ((body-p (body-allowed-p status)))
    (put-head output status fields
              :length (and body-p length)
              :chunked-p (or (eq framing :chunked)
                             ;; Only the head was asked for.
                             (and (eq framing :none) (null length) body-p
                                  (= 1 (head-minor-version (exchange-head exchange)))))
              :keep-alive-p (keep-alive-told exchange))))

(defun begin-reply (exchange status fields &key length)
  "Send the head of a reply to EXCHANGE, whose body SEND-PART sends; the integer STATUS; FIELDS, an
alist of strings; LENGTH, how many octets the body will have, or NIL. END-REPLY must be called.
Signals what REPLY does."
  (unless (eq (exchange-state exchange) :unanswered) (wrong-state exchange "begun"))
  (note-fields exchange fields)
  (let ((framing (choose-framing exchange status length)))
    (when (eq framing :close) (setf (exchange-keep-alive-p exchange) nil))
    (with-output (output)
      (put-parted-head output exchange status fields length framing)
      (sending (exchange)
        (setf (exchange-status exchange) status
              (exchange-framing exchange) framing
              (exchange-left exchange) (or length 0)
              (exchange-state exchange) :open)
        (send-output (exchange-connection exchange) output (output-octets output) 0
                     (exchange-timeout exchange))))))

(defun put-chunk-size (output size)
  (put-token output (string-downcase (write-to-string size :base 16 :radix nil :pretty nil)))
  (put-constant output "|"))

(defun send-chunk (exchange octets start end)
  (let ((connection (exchange-connection exchange)) (seconds (exchange-timeout exchange))
        (size (- end start)))
    (flet ((send (output)
             (send-octets connection (output-octets output) 0 (output-fill output) seconds)
             (setf (output-fill output) 0)))
      (with-output (output)
        (put-chunk-size output size)
        (cond ((<= size +largest-copied-body+) (put-octets output octets start end))
              (t (send output)
                 (send-octets connection octets start end seconds)))
        (put-constant output "|")
        (send output)))))

(defun send-part (exchange octets &optional (start 0) (end (length octets)))
  "Send OCTETS from START to END as the next part of the body of the reply. Signals TIMED-OUT,
CONNECTION-LOST, and an error if the head announced fewer octets."
  (declare (type octets octets) (type index start end))
  (unless (eq (exchange-state exchange) :open) (wrong-state exchange "continued"))
  (when (and (< start end) (not (eq (exchange-framing exchange) :none)))
    (sending (exchange)
      (when (eq (exchange-framing exchange) :length) (count-part exchange (- end start)))
      (if (eq (exchange-framing exchange) :chunked)
          (send-chunk exchange octets start end)
          (send-octets (exchange-connection exchange) octets start end
                       (exchange-timeout exchange))))))

(defun count-part (exchange n)
  (when (> n (exchange-left exchange))
    (error "The body of the reply to ~S is longer than its head has said." exchange))
  (decf (exchange-left exchange) n))

(defun end-reply (exchange)
  "End the reply that BEGIN-REPLY began. If its body is shorter than its head has said, the
connection is going to be closed. Signals TIMED-OUT and CONNECTION-LOST."
  (unless (eq (exchange-state exchange) :open) (wrong-state exchange "ended"))
  (case (exchange-framing exchange)
    (:chunked (let ((end (load-time-value
                          (string-octets (format nil "0~C~C~:*~:*~C~C" #\Return #\Newline)) t)))
                (sending (exchange)
                  (send-octets (exchange-connection exchange) end 0 (length (the octets end))
                               (exchange-timeout exchange)))))
    (:length (when (plusp (exchange-left exchange)) (setf (exchange-keep-alive-p exchange) nil))))
  (setf (exchange-state exchange) :ended))

(defun take-connection (exchange)
  "Return the connection of EXCHANGE, which the caller serves from now on, by another protocol. It
is closed when the handler returns."
  (unless (eq (exchange-state exchange) :unanswered) (wrong-state exchange "left to the handler"))
  (setf (exchange-state exchange) :taken
        (exchange-keep-alive-p exchange) nil)
  (exchange-connection exchange))
