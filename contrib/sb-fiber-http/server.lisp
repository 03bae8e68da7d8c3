;;;; servers: a fiber for each connection

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-HTTP")

;;; A server has a fiber for each listener, which accepts, and one for each client that is
;;; connected. What is true when nobody holds its lock:
;;;  - CLIENTS has each client whose socket is open, but for one that is just being accepted, and
;;;    perhaps one whose socket has just been closed;
;;;  - the totals count what the clients have done that are not in CLIENTS any more.
;;; The fiber of a client closes its socket, and takes it out. A client whose fiber was terminated
;;; before it began is taken out by STOP-SERVER.
;;;
;;;     state of a server           by
;;;     :RUNNING  -> :DRAINING      STOP-SERVER: no connection is accepted any more
;;;     :DRAINING -> :STOPPED       the same: all clients are gone
;;;
;;;     state of a client           by
;;;     :IDLE     -> :BUSY          its fiber: a request has been received
;;;     :BUSY     -> :IDLE          its fiber: the request has been served
;;;     :IDLE     -> :ENDING        STOP-SERVER, which then terminates its fiber
;;; So no fiber is terminated that serves a request, as long as requests may take their time.

(deftype client-state () '(member :idle :busy :ending))

(defstruct (client (:constructor make-client (connection socket listener peer))
                   (:copier nil))
  "A client that is connected."
  (connection (sb-int:missing-arg) :type connection :read-only t)
  (socket (sb-int:missing-arg) :type sb-bsd-sockets:socket :read-only t)
  (listener (sb-int:missing-arg) :type listener :read-only t)
  ;; its address and port, or NIL
  (peer '() :type list :read-only t)
  (state :idle :type t)                 ; of type CLIENT-STATE, for the sake of CAS
  (requests 0 :type index))
(declaim (sb-ext:freeze-type client))

(defstruct (totals (:copier nil))
  "What clients have done, and what has happened to them."
  (accepted 0 :type index)
  (refused 0 :type index)
  (requests 0 :type index)
  (errors 0 :type sb-ext:word)
  (received 0 :type index)
  (sent 0 :type index))
(declaim (sb-ext:freeze-type totals))

(defstruct (server (:constructor %make-server) (:copier nil))
  "What START-SERVER has started."
  (handler (sb-int:missing-arg) :type function :read-only t)
  (on-error (sb-int:missing-arg) :type function :read-only t)
  (limits (sb-int:missing-arg) :type limits :read-only t)
  (most-body (sb-int:missing-arg) :type index :read-only t)
  (most-connections nil :type (or null index) :read-only t)
  (when-full :wait :type (member :wait :refuse) :read-only t)
  (idle-timeout nil :type (or null (real 0)) :read-only t)
  (timeout nil :type (or null (real 0)) :read-only t)
  (tls nil :read-only t)                ; what MAKE-TRANSPORT takes, or NIL
  (group nil)                           ; NIL until it is started
  (own-group-p nil :type boolean :read-only t)
  (listeners '() :type list)
  (acceptors '() :type list)
  (lock (sb-thread:make-mutex :name "server") :read-only t)
  (changed (sb-thread:make-waitqueue) :read-only t)
  (clients (make-hash-table :test 'eq) :type hash-table :read-only t) ; under their fibers
  (totals (make-totals) :type totals :read-only t)
  (state :running :type (member :running :draining :stopped)))
(declaim (sb-ext:freeze-type server))

(defmethod print-object ((server server) stream)
  (print-unreadable-object (server stream :type t :identity t)
    (format stream "~(~A~)~{ ~S~}" (server-state server)
            (mapcar #'listener-place (server-listeners server)))))

(defmacro with-server ((server) &body body)
  `(sb-thread:with-mutex ((server-lock ,server)) ,@body))

(defun await-change (server test deadline)
  "Wait until TEST, called with the lock of SERVER held, returns true. Return that, or NIL at
DEADLINE."
  (with-server (server)
    (loop
      (let ((value (funcall test)))
        (when value (return value)))
      (let ((left (and deadline (/ (- deadline (get-internal-real-time))
                                   internal-time-units-per-second))))
        (unless (and (or (null left) (plusp left))
                     ;; If it comes to the deadline it does not have the lock.
                     (sb-thread:condition-wait (server-changed server) (server-lock server)
                                               :timeout left))
          (return nil))))))

;;;; clients

(defun client-becomes-p (client old new)
  (eq old (sb-ext:compare-and-swap (client-state client) old new)))

(defun add-to-totals (server client)
  (let ((totals (server-totals server)) (connection (client-connection client)))
    (incf (totals-requests totals) (client-requests client))
    (incf (totals-received totals) (connection-received connection))
    (incf (totals-sent totals) (connection-sent connection))))

;;; In this order: when STOP-SERVER sees that a client is gone it may end the fiber, which would not
;;; close the socket any more.
(defun remove-client (server fiber)
  "Close the socket of the client of FIBER, and take it out of SERVER."
  (let ((client (with-server (server) (gethash fiber (server-clients server)))))
    (when client
      ;; A fiber that was ended just behind the close leaves a number that may be another's.
      (when (sb-bsd-sockets:socket-open-p (client-socket client))
        (end-connection (client-connection client)))
      (sb-bsd-sockets:socket-close (client-socket client) :abort t)
      (with-server (server)
        (when (remhash fiber (server-clients server))
          (add-to-totals server client)
          (sb-thread:condition-broadcast (server-changed server)))))))

(defun count-error (server)
  (sb-ext:atomic-incf (totals-errors (server-totals server))))

(defun note-error (server condition)
  (count-error server)
  (funcall (server-on-error server) condition))

(defun log-error (condition)
  "Tell *ERROR-OUTPUT* of CONDITION, which a handler signalled."
  (ignore-errors                        ; or else the client would get no reply
    (format *error-output* "~&SB-FIBER-HTTP: ~A~%" condition)
    (finish-output *error-output*)))

;;; ON-ERROR may be a debugger: meanwhile nobody would be served.
(defun note-server-error (server condition)
  (count-error server)
  (log-error condition))

;;;; requests

(defun refuse-request (server connection condition)
  "Tell the client what was wrong."
  (send-reply connection (bad-request-status condition) '(("Content-Type" . "text/plain"))
              (string-octets (format nil "~A~%" (bad-request-reason condition)))
              :keep-alive-p nil :seconds (server-timeout server)))

(defun reply-with-error (exchange)
  (setf (exchange-keep-alive-p exchange) nil)
  (reply exchange 500 '(("Content-Type" . "text/plain"))
         (load-time-value (string-octets (format nil "Internal Server Error~%")) t)))

(deftype failure ()
  "What a handler may signal that its server deals with. After a STORAGE-CONDITION there may be no
room for more than leaving."
  '(and (or error sb-ext:timeout) (not storage-condition)))

(defun of-client-p (condition exchange)
  "Is CONDITION something that the client of EXCHANGE did? A handler may be a client itself."
  (typecase condition
    (bad-request t)
    (client-error (eq (client-error-connection condition) (exchange-connection exchange)))))

(defun call-handler-noting-failures (server exchange)
  (handler-bind ((failure (lambda (condition)
                            (unless (of-client-p condition exchange)
                              (note-error server condition)
                              (return-from call-handler-noting-failures)))))
    (funcall (server-handler server) exchange)))

(defun call-handler (server exchange)
  "Call the handler of SERVER."
  (handler-case (call-handler-noting-failures server exchange)
    (storage-condition (condition) (note-error server condition))))

(defun refuse-in-exchange (server exchange condition)
  (setf (exchange-keep-alive-p exchange) nil)
  (when (eq (exchange-state exchange) :unanswered)
    (setf (exchange-state exchange) :ended)
    (refuse-request server (exchange-connection exchange) condition)))

(defun cut-off (exchange)
  (setf (exchange-keep-alive-p exchange) nil)
  (when (eq (exchange-framing exchange) :close)
    (setf (connection-cut-off-p (exchange-connection exchange)) t)))

(defun serve-exchange (server exchange)
  (handler-case
      (case (progn (call-handler server exchange)
                   (exchange-state exchange))
        (:unanswered (reply-with-error exchange))
        ;; Nobody knows whether the body is whole: the client must see that it is not.
        ((:open :broken) (cut-off exchange)))
    (bad-request (condition) (refuse-in-exchange server exchange condition))))

(defconstant +linger-seconds+ 2)

(defun serve-request (server client head)
  "Serve the request with HEAD. Return true if the client may send another."
  (let* ((connection (client-connection client))
         (exchange (make-exchange connection head
                                  :most-body (server-most-body server)
                                  :timeout (server-timeout server)
                                  :client client
                                  :keep-alive-p (and (eq (server-state server) :running)
                                                     (head-keep-alive-p head)))))
    (incf (client-requests client))
    (serve-exchange server exchange)
    (cond ((eq (exchange-state exchange) :taken) nil)
          ((and (exchange-keep-alive-p exchange) (skip-body exchange)))
          ;; Something else may be there, if the client has not waited.
          (t (unless (connection-cut-off-p connection)
               (end-transport connection +linger-seconds+)
               (when (or (body-left-p exchange) (usable-now-p connection))
                 (linger connection +linger-seconds+)))
             nil))))

(defun serve-requests (server client)
  (let ((connection (client-connection client)))
    (handler-case
        (loop
          (let ((head (receive-head connection (deadline-after (server-idle-timeout server))
                                    (server-timeout server))))
            (unless (and head
                         (client-becomes-p client :idle :busy)
                         (serve-request server client head)
                         (client-becomes-p client :busy :idle)
                         (eq (server-state server) :running))
              (return))))
      (bad-request (condition)
        (refuse-request server connection condition)
        (linger connection +linger-seconds+)))))

(defun begin-transport (server connection)
  (when (server-tls server)
    (make-nonblocking (connection-fd connection))
    (sb-sys:without-interrupts          ; or nobody would free it
      (setf (connection-transport connection)
            (make-transport (server-tls server) (connection-fd connection))))))

(defun transport-begun-p (server connection)
  (handler-case (progn (begin-transport server connection) t)
    ((or error storage-condition) (condition)
      (note-server-error server condition)
      nil)))

(defun serve-client (server client)
  (unwind-protect
       (handler-case (when (transport-begun-p server (client-connection client))
                       (serve-requests server client))
         (client-error ()))             ; not worth a message
    (remove-client server (sb-fiber:current-fiber))))

;;;; accepting

(defconstant +longest-delay+ 1)

(defun full-p (server)
  (let ((most (server-most-connections server)))
    (and most (>= (hash-table-count (server-clients server)) most))))

(defun accept-patiently (server listener)
  "Accept and return a socket, and its peer's address. When there are no descriptors left, say,
wait, twice as long each time."
  (loop for delay = 1/100 then (min +longest-delay+ (* 2 delay))
        do (handler-case
               (let ((socket+peer (multiple-value-list (sb-bsd-sockets:socket-accept
                                                        (listener-socket listener)))))
                 (when (first socket+peer) (return (values-list socket+peer))))
             (sb-bsd-sockets:bad-file-descriptor-error (condition) (error condition))
             ((or sb-bsd-sockets:socket-error storage-condition) (condition)
               (note-server-error server condition)
               (sb-fiber:fiber-sleep delay)))))

(defun refuse-client (server socket)
  (with-server (server) (incf (totals-refused (server-totals server))))
  (unless (server-tls server) (send-refusal socket)) ; a handshake would be too much
  nil)

(defun send-refusal (socket)
  (let ((connection (make-connection (sb-bsd-sockets:socket-file-descriptor socket))))
    (handler-case
        (send-reply connection 503 '(("Content-Type" . "text/plain") ("Retry-After" . "1"))
                    (string-octets (format nil "The server has as many clients as it may.~%"))
                    :keep-alive-p nil :seconds 0)
      (client-error ())
      (:no-error (&rest values)
        (declare (ignore values))
        (linger connection 0)))))

(defun enter-client (server fiber client)
  "Enter CLIENT in SERVER, whose lock is held, unless there are as many as may be."
  (unless (full-p server)
    (incf (totals-accepted (server-totals server)))
    (setf (gethash fiber (server-clients server)) client)))

;;; A fiber that has lost its stack has run no cleanup.
(defun remove-dead-clients (server)
  (dolist (fiber (with-server (server)
                   (loop for fiber being the hash-keys of (server-clients server)
                         when (member (sb-fiber:fiber-state fiber) '(:finished :aborted))
                           collect fiber)))
    (remove-client server fiber)))

(defun await-place (server test)
  "Wait until TEST, called with the lock of SERVER held, is true. Return what it returns."
  (loop
    (let ((value (await-change server test (deadline-after 1))))
      (when value (return value)))
    (remove-dead-clients server)))

(defun enter-client-when-allowed (server fiber client)
  (flet ((enter () (enter-client server fiber client)))
    (ecase (server-when-full server)
      (:wait (await-place server #'enter))
      (:refuse (with-server (server) (enter))))))

(defun start-client (server client)
  "Start a fiber that serves CLIENT, and return true; return false if there are too many."
  (let ((fiber (sb-fiber:make-fiber (lambda () (serve-client server client)) :name "HTTP client"))
        (started nil))
    (unwind-protect
         (when (enter-client-when-allowed server fiber client)
           (sb-fiber:submit-fiber (server-group server) fiber)
           (setf started t))
      (unless started (remove-client server fiber)))))

(defun make-client-of-socket (server listener socket peer)
  (when (typep socket '(or sb-bsd-sockets:inet-socket sb-bsd-sockets:inet6-socket))
    (setf (sb-bsd-sockets:sockopt-tcp-nodelay socket) t))
  (make-client (make-connection (sb-bsd-sockets:socket-file-descriptor socket)
                                :limits (server-limits server))
               socket listener peer))

(defun start-or-refuse-client (server listener socket peer)
  "Return true if a fiber has been started, which closes SOCKET."
  (handler-case (or (start-client server (make-client-of-socket server listener socket peer))
                    (refuse-client server socket))
    ;; No memory for a stack, say: the others are to be served.
    ((or error storage-condition) (condition)
      (note-server-error server condition)
      nil)))

(defun accept-client (server listener)
  (when (with-server (server) (full-p server)) (remove-dead-clients server))
  (when (eq (server-when-full server) :wait)
    (await-place server (lambda () (not (full-p server)))))
  (multiple-value-bind (socket address port) (accept-patiently server listener)
    (let ((started nil))
      ;; It may be ended where it waits for a lock, too.
      (unwind-protect
           (setf started (start-or-refuse-client server listener socket
                                                 (and port (list address port))))
        (unless started (sb-bsd-sockets:socket-close socket :abort t))))))

;;; It is ended where it waits, and nowhere else: a socket that has just been accepted is nobody's
;;; yet.
(defun accept-clients (server listener)
  (sb-sys:without-interrupts
    (sb-sys:allow-with-interrupts
      (loop (accept-client server listener)))))

;;;; starting

(defun check-place (place)
  (unless (typep place 'place)
    (error 'type-error :datum place :expected-type 'place))
  place)

(defun open-listeners (places backlog shared-p)
  (let ((listeners '()) (done nil))
    (unwind-protect
         (dolist (place places (progn (setf done t) (nreverse listeners)))
           (push (open-listener (check-place place) :backlog backlog :shared-p shared-p) listeners))
      (unless done (mapc #'close-listener listeners)))))

(defun start-acceptors (server)
  (dolist (listener (server-listeners server) server)
    (let* ((listener listener)
           (fiber (sb-fiber:make-fiber (lambda () (accept-clients server listener))
                                       :name "HTTP acceptor")))
      (sb-fiber:submit-fiber (server-group server) fiber)
      (push fiber (server-acceptors server)))))

(defun check-limit (value name)
  (unless (typep value '(or null index))
    (error 'sb-int:simple-program-error
           :format-control "~S must be NIL or an integer that is not negative, not ~S."
           :format-arguments (list name value))))

(defun check-tls (tls)
  (unless (or (null tls) (compute-applicable-methods #'make-transport (list tls 0)))
    (error 'sb-int:simple-program-error
           :format-control ":TLS must be what SB-FIBER-HTTP-TLS:MAKE-TLS returns, or NIL, not ~S."
           :format-arguments (list tls))))

(defun begin-serving (server places backlog shared-p carrier-count)
  (setf (server-listeners server) (open-listeners places backlog shared-p))
  (when (server-own-group-p server)
    (setf (server-group server) (sb-fiber:start-fibers nil :name "HTTP server"
                                                           :carrier-count carrier-count)))
  (start-acceptors server))

(defun end-serving (server)
  "Undo what BEGIN-SERVING has done of SERVER, which could not be started."
  (end-fibers (server-acceptors server))
  (mapc #'close-listener (server-listeners server))
  (end-clients server (other-clients server))
  (when (server-group server) (finish-own-group server)))

(defun start-server (handler &key (address "127.0.0.1") (port 8080)
                                  (listen (list (list :tcp address port)))
                                  (backlog 1024) (share-port nil)
                                  (carrier-count nil) (group nil)
                                  (max-head 65536) (max-body nil)
                                  (max-connections nil) (when-full :wait)
                                  (idle-timeout 60) (timeout 20) (tls nil) (on-error #'log-error))
  "Start a server that calls HANDLER, a function, with an EXCHANGE for each request, in the fiber of
the connection that it came by; and return the SERVER. HANDLER must REPLY, or BEGIN-REPLY and
END-REPLY, or TAKE-CONNECTION; the client gets status 500 if it has not, or if it has signalled an
error, with which ON-ERROR is called first, or a STORAGE-CONDITION. The other arguments are
  :ADDRESS          where to listen: a string with an address of IPv4 or IPv6, or NIL for all
                    addresses of IPv4; \"127.0.0.1\" by default;
  :PORT             an integer, 8080 by default; 0 lets the kernel choose one;
  :LISTEN           a list of places instead of the two: (:TCP ADDRESS PORT), (:UNIX PATH),
                    (:FD DESCRIPTOR), see INHERITED-PLACES;
  :BACKLOG          how many connections the kernel keeps until they are accepted, 1024 by default;
  :SHARE-PORT       true if other processes may listen at the same port (SO_REUSEPORT);
  :CARRIER-COUNT    how many OS threads run the fibers, or NIL for the default of
                    SB-FIBER:START-FIBERS;
  :GROUP            a group of fibers to be used instead;
  :MAX-HEAD         how many octets the head of a request may have, 65,536 by default, of which its
                    first line may have 8,192, with at most 100 fields; others are answered with
                    status 431, or 414;
  :MAX-BODY         how many octets a body may have, or NIL for any number; longer ones are answered
                    with 413;
  :MAX-CONNECTIONS  how many clients may be connected, or NIL for any number. If there are as many
                    others wait to be accepted; or, if WHEN-FULL is :REFUSE, get status 503 or, with
                    TLS, nothing;
  :IDLE-TIMEOUT     after how many seconds without a request a connection is closed, 60 by default;
  :TIMEOUT          how many seconds a client may take for a head, for some more octets of a body,
                    or for each 262,144 octets of a reply, 20 by default.
  :TLS              what SB-FIBER-HTTP-TLS:MAKE-TLS returns, if clients are to speak TLS, or NIL.
Time-outs may be NIL. Signals TYPE-ERROR, PROGRAM-ERROR, and SB-BSD-SOCKETS:SOCKET-ERROR if it
cannot listen."
  (when (and group carrier-count)
    (error "A GROUP has its carriers: give it or a CARRIER-COUNT, not both."))
  (check-limit max-connections :max-connections)
  (check-limit max-body :max-body)
  (check-tls tls)
  (let ((server (%make-server
                 :handler (coerce handler 'function) :on-error (coerce on-error 'function)
                 :limits (make-limits :head max-head :line (min 8192 max-head))
                 :most-body (min (or max-body +unlimited+) +unlimited+)
                 :most-connections max-connections :when-full when-full
                 :idle-timeout idle-timeout :timeout timeout :tls tls
                 :group group :own-group-p (null group)))
        (started nil))
    (unwind-protect (prog1 (begin-serving server listen backlog share-port carrier-count)
                      (setf started t))
      (unless started (end-serving server)))))

(defun server-listener-places (server)
  "Return an alist of the listeners of SERVER and their places."
  (mapcar (lambda (listener) (cons listener (listener-address listener)))
          (server-listeners server)))

(defun server-places (server)
  "Return the list of places where SERVER listens, with the ports that it really has."
  (mapcar #'cdr (server-listener-places server)))

;;;; looking

(defun sum-over-clients (server function)
  (loop for client being the hash-values of (server-clients server)
        sum (funcall function client)))

(defun server-statistics (server)
  "Return a property list of numbers about SERVER:
  :CONNECTIONS  clients that are connected;
  :IN-PROGRESS  those whose request is being served;
  :ACCEPTED     connections that were accepted since it started;
  :REFUSED      those that got status 503, or nothing, since there were too many;
  :REQUESTS     requests that came, but for those whose head was refused;
  :ERRORS       errors of the handler, of which ON-ERROR was told, and of accepting;
  :RECEIVED     octets that were received;
  :SENT         octets that were sent."
  (with-server (server)
    (flet ((sum (function) (sum-over-clients server function)))
      (let ((totals (server-totals server)))
        (list :connections (hash-table-count (server-clients server))
              :in-progress (sum (lambda (client) (if (eq (client-state client) :busy) 1 0)))
              :accepted (totals-accepted totals)
              :refused (totals-refused totals)
              :requests (+ (totals-requests totals) (sum #'client-requests))
              :errors (totals-errors totals)
              :received (+ (totals-received totals)
                           (sum (lambda (client)
                                  (connection-received (client-connection client)))))
              :sent (+ (totals-sent totals)
                       (sum (lambda (client) (connection-sent (client-connection client))))))))))

;;;; stopping

(defun end-fibers (fibers)
  "Terminate FIBERS and wait until all have ended."
  (dolist (fiber fibers)
    (handler-case (sb-fiber:terminate-fiber fiber)
      (sb-thread:interrupt-thread-error ()))) ; it has ended in the meantime
  (dolist (fiber fibers)
    (sb-fiber:fiber-join fiber :default nil)))

(defun other-clients (server &optional (test (constantly t)))
  "The fibers of the clients for which TEST is true, but not the one that calls this."
  (with-server (server)
    (loop for fiber being the hash-keys of (server-clients server) using (hash-value client)
          when (and (not (eq fiber (sb-fiber:current-fiber))) (funcall test client))
            collect fiber)))

(defun end-clients (server fibers)
  (end-fibers fibers)
  ;; Those that have not begun, or were ended in their last moments.
  (dolist (fiber fibers) (remove-client server fiber)))

(defun end-idle-clients (server)
  (end-clients server
               (other-clients server (lambda (client) (client-becomes-p client :idle :ending)))))

(defun others-gone-p (server)
  (let ((clients (server-clients server)))
    (= (hash-table-count clients) (if (gethash (sb-fiber:current-fiber) clients) 1 0))))

(defun finish-own-group (server)
  (let ((group (server-group server)) (self (sb-fiber:current-fiber)))
    (cond ((not (server-own-group-p server)))
          ((and self (gethash self (server-clients server)))
           ;; A handler that waited for its own group would wait for itself.
           (sb-fiber::make-os-thread (lambda ()
                                       (sb-fiber:fiber-join self :default nil)
                                       (sb-fiber:finish-fibers group :abort t))
                                     "finishing of a group of fibers"))
          (t (sb-fiber:finish-fibers group :abort t)))))

(defun begin-draining (server)
  "Return false if SERVER is being stopped already."
  (with-server (server)
    (when (eq (server-state server) :running)
      (setf (server-state server) :draining))))

(defun drain (server deadline)
  "Wait until DEADLINE for the clients of SERVER. Return true if they are gone."
  (end-fibers (server-acceptors server))
  (mapc #'close-listener (server-listeners server))
  (remove-dead-clients server)
  (end-idle-clients server)
  (await-change server (lambda () (others-gone-p server)) deadline))

(defun end-server (server)
  (end-clients server (other-clients server))
  (finish-own-group server)
  (with-server (server)
    (setf (server-state server) :stopped)
    (sb-thread:condition-broadcast (server-changed server))))

(defun stop-server (server &key (drain 10))
  "Stop SERVER. It accepts no connection any more, closes those that wait for a request, and waits
DRAIN seconds at most, 10 by default, for the requests in progress; then it ends their fibers.
Returns true if none had to be ended like that; and NIL, without waiting, if SERVER is being stopped
already. A handler may call this: its own request is not waited for."
  (when (begin-draining server)
    (unwind-protect (drain server (deadline-after drain))
      (end-server server))))

(defun wait-for-server (server)
  "Wait until SERVER has been stopped. Returns NIL."
  (await-change server (lambda () (eq (server-state server) :stopped)) nil)
  nil)
