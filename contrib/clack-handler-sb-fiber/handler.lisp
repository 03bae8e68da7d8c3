;;;; Clack's handler

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "CLACK.HANDLER.SB-FIBER")

(defun call-application (application exchange places response-timeout)
  (let* ((socket (make-client-socket exchange))
         (listener (client-listener (exchange-client exchange)))
         (place (or (cdr (assoc listener places)) (listener-address listener)))
         (environment (environment exchange socket place)))
    (unwind-protect
         (send-response exchange (funcall application environment) socket response-timeout)
      (give-socket-up socket))))

(defun start (application &rest arguments &key (response-timeout 60) &allow-other-keys)
  "Start a server that calls APPLICATION, a function as Clack has it, with an environment for each
request, in the fiber of its connection; return what SB-FIBER-HTTP:START-SERVER does.
RESPONSE-TIMEOUT is how many seconds, 60 by default, or NIL, to wait for a response that comes
later, or for its next part. The other ARGUMENTS are those of START-SERVER."
  (let ((application (coerce application 'function)) (places '()) (server nil))
    (setf server (apply #'start-server
                        (lambda (exchange)
                          (call-application application exchange places response-timeout))
                        (loop for (key value) on arguments by #'cddr
                              unless (eq key :response-timeout) collect key and collect value)))
    (setf places (server-listener-places server))
    server))

(defun run (application &rest arguments
            &key (address "127.0.0.1") (port 5000) (drain 10) debug &allow-other-keys)
  "What CLACK:CLACKUP calls. Serve APPLICATION until the server is stopped, or the thread that calls
this is terminated; then wait DRAIN seconds at most, 10 by default, for the requests in progress.
ADDRESS is a string, PORT an integer, by default 5000; the other ARGUMENTS are those of START, and
others are passed over. If DEBUG is true, errors of APPLICATION enter the debugger."
  (let ((server (apply #'start application
                       :address address :port port
                       (append (known-arguments arguments)
                               (when debug (list :on-error #'invoke-debugger))))))
    (unwind-protect (wait-for-server server)
      (stop-server server :drain drain))))

(defparameter *known-arguments*
  '(:listen :backlog :share-port :carrier-count :group :max-head :max-body :max-connections
    :when-full :idle-timeout :timeout :tls :on-error :response-timeout)
  "The arguments of RUN, which Clack calls with its own, that START is called with.")

(defun known-arguments (arguments)
  (loop for (key value) on arguments by #'cddr
        when (member key *known-arguments*)
          collect key and collect value))

(defun stop (server)
  "Stop SERVER, which START has returned."
  (stop-server server))
