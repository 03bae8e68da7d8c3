;;;; Hunchentoot's taskmaster with fibers

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-HUNCHENTOOT")

;;; What closes the socket of a connection:
;;;  - The acceptor's fiber accepts it, enters it in CONNECTIONS under a new fiber, and
;;;    submits that. If it does not get so far it closes the socket.
;;;  - The connection's fiber runs PROCESS-CONNECTION, which closes the socket unless the
;;;    handler has detached it, and then takes the entry out.
;;;  - SHUTDOWN ends the acceptor's fiber first, so that no entry is added any more, then
;;;    all fibers in CONNECTIONS. An entry that outlives its fiber is of one that was
;;;    terminated before it began: SHUTDOWN closes the socket.

(defclass fiber-taskmaster (hunchentoot:multi-threaded-taskmaster)
  ((carrier-count :initarg :carrier-count
                  :initform nil
                  :reader carrier-count)
   (stack-size :initarg :stack-size
               :initform nil
               :reader stack-size)
   (shared-group :initarg :group
                 :initform nil
                 :reader shared-group)
   (group :initform nil
          :accessor group
          :documentation "The group that runs the fibers, from start to stop.")
   ;; for what waits until the acceptor ends, as Clack does
   (hunchentoot::acceptor-process :initform nil
                                  :accessor acceptor-fiber)
   (connections :initform (make-hash-table :test 'eq :synchronized t)
                :reader connections
                :documentation "The socket of each connection, under its fiber.")
   (soft-stop-p :initform nil
                :accessor soft-stop-p
                :documentation "Whether the last call of STOP was a soft one."))
  (:documentation
   "A taskmaster that accepts connections in one fiber and serves each of them in a
fiber of its own. The initargs are
  :CARRIER-COUNT  how many OS threads run the fibers, a positive integer, or NIL
                  for the default of SB-FIBER:START-FIBERS;
  :STACK-SIZE     the stack of a connection's fiber in bytes, or NIL for the
                  default of SB-FIBER:MAKE-FIBER;
  :GROUP          a group from SB-FIBER:START-FIBERS to run the fibers in, or NIL to
                  start one for the time from START to STOP.
STOP ends all fibers, with whatever they wait for, before it returns. With :SOFT
true it waits for the requests in progress first, and ends the others after. A
request handler may call STOP, not softly: its own fiber is spared, and ends with
the connection."))

(defmethod initialize-instance :after ((taskmaster fiber-taskmaster) &key)
  (with-slots (carrier-count shared-group) taskmaster
    (unless (typep carrier-count '(or null (integer 1)))
      (parameter-error "CARRIER-COUNT must be a positive integer or NIL, not ~S."
                       carrier-count))
    (when (and carrier-count shared-group)
      (parameter-error "A GROUP has its carriers: give it or a CARRIER-COUNT, not both."))))

;;;; Accepting

(defclass patient-listener (usocket:stream-server-usocket)
  ((acceptor :initarg :acceptor
             :reader listener-acceptor)
   (delay :initform 1/100
          :accessor listener-delay
          :documentation "How many seconds to wait when accepting next fails."))
  (:documentation "A listening socket that waits when no connection can be accepted."))

(defconstant +longest-delay+ 1)

(deftype passing-accept-error ()
  "An error of accept(2) that is over one day: no descriptors left, no memory, or
one that belongs to the connection. The others say that the listener is no more."
  '(and usocket:socket-error
        (not (or usocket:bad-file-descriptor-error
                 usocket:invalid-argument-error
                 usocket:operation-not-supported-error))))

;;; ACCEPT-CONNECTIONS tries again when this returns NIL; an error would end it.
(defmethod usocket:socket-accept :around ((listener patient-listener)
                                          &key &allow-other-keys)
  (handler-case (call-next-method)
    (passing-accept-error (condition)
      (wait-after-failed-accept listener condition)
      nil)
    (:no-error (socket)
      (setf (listener-delay listener) 1/100)
      socket)))

(defun wait-after-failed-accept (listener condition)
  "Log CONDITION, which accepting from LISTENER ended with, and sleep, twice as long
as after the last failure."
  (let ((delay (listener-delay listener)))
    (setf (listener-delay listener) (min (* 2 delay) +longest-delay+))
    (log-error (listener-acceptor listener)
               "Cannot accept a connection, will try again in ~D ms: ~A"
               (round delay 1/1000) condition)
    (fiber-sleep delay)))

(defun log-error (acceptor control &rest arguments)
  ;; A log that is a file cannot be opened either when there are no descriptors left.
  (ignore-errors (apply #'acceptor-log-message acceptor :error control arguments)))

(defmethod hunchentoot:execute-acceptor ((taskmaster fiber-taskmaster))
  (let* ((acceptor (taskmaster-acceptor taskmaster))
         (name (format nil "hunchentoot ~A:~D" (or (hunchentoot:acceptor-address acceptor) "*")
                       (hunchentoot:acceptor-port acceptor))))
    (change-class (hunchentoot::acceptor-listen-socket acceptor) 'patient-listener
                  :acceptor acceptor)
    (setf (group taskmaster)
          (or (shared-group taskmaster)
              (start-fibers nil :name name :carrier-count (carrier-count taskmaster)))
          (acceptor-fiber taskmaster)
          (submit-fiber (group taskmaster)
                        (make-fiber (lambda () (accept-connections acceptor)) :name name)))))

;;; It is ended where it waits for a connection, and nowhere else: a socket that has just been
;;; accepted is in nobody's list yet. It then returns, and is not aborted: who waits for its end, as
;;; Clack does, must get no error.
(defun accept-connections (acceptor)
  (catch 'end-of-accepting
    (sb-sys:without-interrupts
      (sb-sys:allow-with-interrupts
        (hunchentoot:accept-connections acceptor)))))

(defun end-accepting ()
  "Called in the acceptor's fiber. If it has not begun it sees that its acceptor is shut down."
  (handler-case (throw 'end-of-accepting nil)
    (control-error () nil)))

;;;; Connections

(defclass connection (usocket:stream-usocket)
  ((peer-name :initform nil
              :accessor peer-name)
   (local-name :initform nil
               :accessor local-name))
  (:documentation "The socket of a connection, which remembers the addresses of both ends:
Hunchentoot asks for them at each request, and each answer is a system call."))

(macrolet ((remembering (function slot)
             `(defmethod ,function :around ((socket connection))
                (values-list (or (,slot socket)
                                 (setf (,slot socket) (multiple-value-list (call-next-method))))))))
  (remembering usocket:get-peer-name peer-name)
  (remembering usocket:get-local-name local-name))

;;; This runs in the loop that accepts, which an error would end.
(defmethod hunchentoot:handle-incoming-connection ((taskmaster fiber-taskmaster) socket)
  (handler-case (start-connection taskmaster socket)
    (error (condition)
      (log-error (taskmaster-acceptor taskmaster)
                 "Cannot start a fiber for a connection: ~A" condition))))

(defun start-connection (taskmaster socket)
  "Start a fiber that serves the client at the other end of SOCKET, or close SOCKET."
  (let ((fiber nil) (started nil))
    (unwind-protect
         (progn (change-class socket 'connection)
                (setf fiber (make-connection-fiber taskmaster socket)
                      (gethash fiber (connections taskmaster)) socket)
                (submit-fiber (group taskmaster) fiber)
                (setf started t))
      (unless started
        (remhash fiber (connections taskmaster))
        (abort-connection socket)))))

(defun make-connection-fiber (taskmaster socket)
  (let ((stack-size (stack-size taskmaster)))
    (apply #'make-fiber
           (lambda () (serve-connection taskmaster socket))
           ;; The name of the stream tells the addresses of both ends.
           :name (sb-impl::fd-stream-name (usocket:socket-stream socket))
           (when stack-size (list :stack-size stack-size)))))

(defun serve-connection (taskmaster socket)
  (unwind-protect
       (call-with-thread-bindings
        (lambda () (process-connection (taskmaster-acceptor taskmaster) socket)))
    (remhash (current-fiber) (connections taskmaster))))

;;; Programs that set BORDEAUX-THREADS:*DEFAULT-SPECIAL-BINDINGS* rely on it that connections
;;; do not share those variables.
(defun call-with-thread-bindings (function)
  "Call FUNCTION with the bindings that a thread from BORDEAUX-THREADS would have."
  ;; Of several entries for a variable the first one counts, for PROGV the last one.
  (let ((bindings (reverse bordeaux-threads:*default-special-bindings*)))
    (progv (mapcar #'car bindings) (loop for (nil . form) in bindings collect (eval form))
      (funcall function))))

(defun abort-connection (socket)
  (ignore-errors (close (usocket:socket-stream socket) :abort t)))

(defmethod taskmaster-thread-count ((taskmaster fiber-taskmaster))
  "Return the number of connections, each of which has a fiber."
  (hash-table-count (connections taskmaster)))

;;;; Stopping

;;; SHUTDOWN is not told what kind of stop it is part of.
(defmethod hunchentoot:stop :before ((acceptor acceptor) &key soft)
  (let ((taskmaster (hunchentoot::acceptor-taskmaster acceptor)))
    (when (typep taskmaster 'fiber-taskmaster)
      (setf (soft-stop-p taskmaster) soft))))

(defmethod hunchentoot:shutdown ((taskmaster fiber-taskmaster))
  (when (acceptor-fiber taskmaster)
    (end-fibers (list (acceptor-fiber taskmaster)) #'end-acceptor-fiber))
  (when (soft-stop-p taskmaster)
    (wait-for-requests (taskmaster-acceptor taskmaster)))
  (end-connections taskmaster)
  (finish-group taskmaster)
  (setf (acceptor-fiber taskmaster) nil
        (group taskmaster) nil)
  taskmaster)

(defun end-acceptor-fiber (fiber)
  (interrupt-fiber fiber #'end-accepting))

(defun end-fibers (fibers &optional (end #'terminate-fiber))
  "Call END with each of FIBERS, and wait until all have ended."
  (dolist (fiber fibers)
    (handler-case (funcall end fiber)
      ;; It has ended in the meantime.
      (sb-thread:interrupt-thread-error ())))
  (dolist (fiber fibers)
    (fiber-join fiber :default nil)))

;;; Hunchentoot's soft STOP waits for one request, the first one to end: its threads can
;;; go on with the others afterwards, our fibers cannot.
(defun wait-for-requests (acceptor)
  "Wait until ACCEPTOR has no request in progress."
  (hunchentoot::with-lock-held ((hunchentoot::acceptor-shutdown-lock acceptor))
    (loop while (plusp (hunchentoot::accessor-requests-in-progress acceptor))
          do (hunchentoot::condition-variable-wait
              (hunchentoot::acceptor-shutdown-queue acceptor)
              (hunchentoot::acceptor-shutdown-lock acceptor)))))

(defun end-connections (taskmaster)
  "End all connections of TASKMASTER but the one that this is called from."
  (let* ((table (connections taskmaster))
         (connections (sb-ext:with-locked-hash-table (table)
                        (loop for fiber being the hash-keys of table using (hash-value socket)
                              unless (eq fiber (current-fiber))
                              collect (cons fiber socket)))))
    (unless (soft-stop-p taskmaster)
      (mapc #'give-up-output (mapcar #'cdr connections)))
    (end-fibers (mapcar #'car connections))
    (loop for (fiber . socket) in connections
          when (remhash fiber table)
          do (abort-connection socket))))

;;; Before it closes the stream PROCESS-CONNECTION writes what is left in its buffer: with a
;;; client that does not read, that would take as long as the time-out.
(defun give-up-output (socket)
  (setf (sb-impl::fd-stream-timeout (usocket:socket-stream socket)) 0f0))

(defun finish-group (taskmaster)
  "Finish the group of TASKMASTER, unless others share it."
  (let ((group (group taskmaster))
        (self (current-fiber)))
    (cond ((or (null group) (eq group (shared-group taskmaster))))
          ((and self (eq (sb-fiber::fiber-group self) group))
           ;; A handler that waited for its own group would wait for itself.
           (sb-fiber::make-os-thread (lambda ()
                                       (fiber-join self :default nil)
                                       (finish-fibers group :abort t))
                                     "finishing of a group of fibers"))
          (t
           (finish-fibers group :abort t)))))
