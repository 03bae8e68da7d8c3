;;;; hello world with Hunchentoot, to be measured from outside; see run.sh

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :asdf)
(load (merge-pathnames "measure.lisp" *load-truename*))
(dolist (name '("sb-fiber-http" "sb-fiber-hunchentoot" "clack-handler-sb-fiber"))
  (asdf:load-asd (merge-pathnames (format nil "../../contrib/~A/~:*~A.asd" name)
                                  *load-truename*)))
(handler-bind ((warning #'muffle-warning))
  (let ((*standard-output* (make-broadcast-stream)))
    ;; An image without fibers can serve from threads.
    (asdf:load-system #+sb-fiber "sb-fiber-hunchentoot" #-sb-fiber "hunchentoot")
    #+sb-fiber (asdf:load-system "clack-handler-sb-fiber")))

(defparameter *body*
  (let ((size (sb-ext:posix-getenv "BODY")))
    (if size
        (make-string (parse-integer size) :initial-element #\a)
        "Hello, World!")))

(defparameter *delay*
  (let ((milliseconds (sb-ext:posix-getenv "DELAY")))
    (and milliseconds (/ (parse-integer milliseconds) 1000)))
  "How many seconds a handler waits before it answers, or NIL.")

(defparameter *octets*
  (and (sb-ext:posix-getenv "OCTETS")
       (sb-ext:string-to-octets *body*))
  "What Hunchentoot's handler returns instead of a string, or NIL.")

(defun answer ()
  (when *delay* (sleep *delay*))
  *body*)

(defun make-taskmaster (kind carriers)
  (cond ((or (string= kind "fibers") (string= kind "fast"))
         (make-instance (uiop:find-symbol* "FIBER-TASKMASTER" "SB-FIBER-HUNCHENTOOT")
                        :carrier-count carriers))
        ((string= kind "threads")
         (make-instance 'hunchentoot:one-thread-per-connection-taskmaster
                        :max-thread-count 20000 :max-accept-count 40000))
        (t (error "~S is none of fibers, fast, threads, clack, engine, file, raw, raw-threads and ~
                    woo." kind))))

(defun acceptor-class (kind)
  (if (string= kind "fast")
      (uiop:find-symbol* "EASY-FIBER-ACCEPTOR" "SB-FIBER-HUNCHENTOOT")
      'hunchentoot:easy-acceptor))

(hunchentoot:define-easy-handler (hello :uri "/") ()
  (setf (hunchentoot:content-type*) (if *octets* "application/octet-stream" "text/plain"))
  (or *octets* (answer)))

(defun start-hunchentoot (port kind carriers)
  (hunchentoot:start
   (make-instance (acceptor-class kind)
                  :address "127.0.0.1" :port port
                  :listen-backlog 4096
                  :access-log-destination nil :message-log-destination nil
                  :taskmaster (make-taskmaster kind carriers))))

;;;; servers without Hunchentoot

#+sb-fiber
(defun start-clack (port carriers)
  (clack.handler.sb-fiber:start
   (lambda (environment)
     (declare (ignore environment))
     `(200 (:content-type "text/plain") (,(answer))))
   :port port :carrier-count carriers :backlog 4096))

#+sb-fiber
(defun start-engine (port carriers)
  (let ((fields '(("Content-Type" . "text/plain")))
        (body (sb-fiber-http:string-octets *body*)))
    (sb-fiber-http:start-server
     (lambda (exchange) (sb-fiber-http:reply exchange 200 fields body))
     :port port :carrier-count carriers :backlog 4096)))

#+sb-fiber
(defun start-file-server (port carriers)
  (uiop:with-temporary-file (:stream out :pathname path :keep t)
    (write-string *body* out)
    (finish-output out)
    (sb-fiber-http:start-server
     (lambda (exchange)
       (sb-fiber-http:reply-with-file exchange path :fields '(("Content-Type" . "text/plain"))))
     :port port :carrier-count carriers :backlog 4096)))

;;; Woo, an event loop for each worker, by its sources.
(defun start-woo (port carriers)
  (asdf:initialize-source-registry
   `(:source-registry (:tree ,(sb-ext:posix-getenv "WOO_SOURCE")) :inherit-configuration))
  (asdf:load-system "woo")
  (sb-thread:make-thread
   (lambda ()
     (uiop:symbol-call "WOO" "RUN"
                       (lambda (environment)
                         (declare (ignore environment))
                         `(200 (:content-type "text/plain") (,(answer))))
                       :address "127.0.0.1" :port port :worker-num carriers
                       :backlog 4096 :debug nil))))

;;; What fibers, or threads, can do at most: what comes is taken for a request, and not looked at.
#+sb-fiber
(defun answer-all (socket reply)
  (let ((connection (sb-fiber-http:make-connection
                     (sb-bsd-sockets:socket-file-descriptor socket))))
    (unwind-protect
         (handler-case
             (loop while (sb-fiber-http::receive connection nil)
                   do (sb-fiber-http::drop-all-input connection)
                      (sb-fiber-http:send-octets connection reply 0 (length reply) nil))
           (sb-fiber-http:connection-lost () nil))
      (sb-bsd-sockets:socket-close socket :abort t))))

(defun listen-at (port)
  (let ((listener (make-instance 'sb-bsd-sockets:inet-socket :type :stream :protocol :tcp)))
    (setf (sb-bsd-sockets:sockopt-reuse-address listener) t)
    (sb-bsd-sockets:socket-bind listener #(127 0 0 1) port)
    (sb-bsd-sockets:socket-listen listener 4096)
    listener))

#+sb-fiber
(defun accept-all (listener begin)
  "Let BEGIN call ANSWER-ALL for each connection, with arguments, apart from what others do."
  (let ((reply (sb-fiber-http:string-octets
                (format nil "HTTP/1.1 200 OK~C~CContent-Type: text/plain~:*~:*~C~C~
                             Content-Length: 13~:*~:*~C~C~:*~:*~C~CHello, World!"
                        #\Return #\Newline))))
    (loop (funcall begin #'answer-all
                   (list (sb-bsd-sockets:socket-accept listener) reply)))))

#+sb-fiber
(defun start-raw (port carriers)
  (let ((group (sb-fiber:start-fibers nil :carrier-count carriers))
        (listener (listen-at port)))
    (flet ((begin (function arguments)
             (sb-fiber:submit-fiber group (sb-fiber:make-fiber function :arguments arguments))))
      (begin #'accept-all (list listener #'begin)))
    group))

#+sb-fiber
(defun start-raw-in-threads (port)
  (flet ((begin (function arguments)
           (sb-thread:make-thread function :arguments arguments)))
    (begin #'accept-all (list (listen-at port) #'begin))))

;;;; all servers

(defun start-server (port kind carriers)
  (cond #+sb-fiber ((string= kind "clack") (start-clack port carriers))
        #+sb-fiber ((string= kind "engine") (start-engine port carriers))
        #+sb-fiber ((string= kind "file") (start-file-server port carriers))
        #+sb-fiber ((string= kind "raw") (start-raw port carriers))
        #+sb-fiber ((string= kind "raw-threads") (start-raw-in-threads port))
        ((string= kind "woo") (start-woo port carriers))
        (t (start-hunchentoot port kind carriers))))

(defun stop-server (server)
  (cond ((typep server 'hunchentoot:acceptor) (hunchentoot:stop server))
        #+sb-fiber ((typep server 'sb-fiber:fiber-group)
                    (sb-fiber:finish-fibers server :abort t))
        ((typep server 'sb-thread:thread) (sb-thread:terminate-thread server))
        #+sb-fiber (t (sb-fiber-http:stop-server server))))

;;; The first collection would move all that loading has left, for 50 ms: longer than any later one.
(defun serve (port kind &optional (carriers (sb-ext:posix-getenv "P")))
  (gc :full t)
  (start-server (parse-integer port) kind (parse-integer carriers))
  (format t "Listening on 127.0.0.1:~A, serving from ~A~%" port kind)
  (finish-output)
  (loop (sleep 3600)))

(when (equal "http" (second sb-ext:*posix-argv*))
  (apply #'serve (cddr sb-ext:*posix-argv*)))
