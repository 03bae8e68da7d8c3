;;;; The examples of the manual and of README, run as they stand there

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :sb-concurrency)
(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/descriptors.lisp" *load-truename*))
(load (merge-pathnames "support/certificates.lisp" *load-truename*))
(dolist (system '("sb-fiber-http" "sb-fiber-hunchentoot" "sb-fiber-ssl"
                  "sb-fiber-http-tls" "clack-handler-sb-fiber"))
  (asdf:load-asd (merge-pathnames (format nil "../../contrib/~A/~:*~A.asd" system)
                                  *load-truename*)))

(def-suite* manual)

;;;; What stands there

(defparameter *here* (uiop:pathname-directory-pathname *load-truename*))

(defun file-lines (name)
  (uiop:read-file-lines (merge-pathnames name *here*)))

(defun without-escapes (line)
  "LINE of Texinfo as it is printed: of @@, @{ and @} the second character."
  (with-output-to-string (out)
    (loop with i = 0
          while (< i (length line))
          do (when (char= (char line i) #\@) (incf i))
             (write-char (char line i) out)
             (incf i))))

(defun joined (lines)
  (format nil "~{~A~%~}" lines))

(defun blocks-of (kind)
  "What stands between lines with @KIND and @end KIND."
  (loop with lines = (file-lines "../../doc/manual/fibers.texinfo")
        for start = (member (format nil "@~A" kind) lines :test #'string=)
        while start
        do (setf lines (member (format nil "@end ~A" kind) start :test #'string=))
        collect (joined (mapcar #'without-escapes (ldiff (rest start) lines)))))

(defparameter *blocks* (append (blocks-of "lisp") (blocks-of "example")))

;;; The first lines that are indented.
(defparameter *readme*
  (flet ((code-p (line) (or (string= line "") (char= (char line 0) #\Space))))
    (let ((lines (member-if (lambda (line) (search "    (" line)) (file-lines "../../README"))))
      (joined (ldiff lines (member-if-not #'code-p lines))))))

(defun block-with (key)
  "The only block of the manual that contains KEY."
  (let ((found (remove-if-not (lambda (text) (search key text)) *blocks*)))
    (if (= (length found) 1)
        (first found)
        (error "~D blocks of the manual contain ~S." (length found) key))))

(defun replaced (old new text)
  "TEXT with NEW instead of OLD, which is in it."
  (let ((position (or (search old text) (error "~S is not in ~S." old text))))
    (concatenate 'string (subseq text 0 position) new
                 (let ((rest (subseq text (+ position (length old)))))
                   (if (search old rest) (replaced old new rest) rest)))))

;;;; Running it

;;; Not bound: fibers look at it.
(sb-ext:defglobal *example-package* nil)

(defun call-with-example-package (function)
  (let ((outer *example-package*))
    (setf *example-package* (make-package (gensym "EXAMPLE") :use '("COMMON-LISP" "SB-FIBER")))
    (unwind-protect (funcall function)
      (delete-package (shiftf *example-package* outer)))))

(defun run-text (text &optional (output (make-broadcast-stream)))
  "Evaluate the forms of TEXT one by one, printing to OUTPUT; return a list of their values."
  (let ((*package* *example-package*)
        (*standard-output* output))
    (with-input-from-string (in text)
      (handler-bind ((warning #'muffle-warning))
        (loop for form = (read in nil in)
              until (eq form in)
              collect (eval form))))))

(defun call (name &rest arguments)
  (apply (find-symbol name *example-package*) arguments))

(defvar *keys* '())

(defmacro example (name key &body body)
  "Define the test NAME for the block that contains KEY; BODY has that as TEXT."
  `(progn
     (pushnew ,key *keys* :test #'string=)
     (test ,name
       (let ((text (block-with ,key)))
         (declare (ignorable text))
         (call-with-example-package (lambda () ,@body))))))

(defun free-port ()
  (let ((socket (make-instance 'inet-socket :type :stream :protocol :tcp)))
    (unwind-protect
         (progn (socket-bind socket #(127 0 0 1) 0)
                (nth-value 1 (socket-name socket)))
      (socket-close socket))))

(defun call-with-text-in-file (function text name)
  (let* ((directory (make-temporary-directory)) (path (format nil "~A/~A" directory name)))
    (unwind-protect (progn (with-open-file (out path :direction :output) (write-string text out))
                           (funcall function path))
      (sb-ext:delete-directory directory :recursive t))))

(defmacro with-text-in-file ((path text name) &body body)
  `(call-with-text-in-file (lambda (,path) ,@body) ,text ,name))

;;;; The basics

(defparameter *sum-of-squares* (loop for n below 10000 sum (* n n)))

(test readme
  (call-with-example-package
   (lambda ()
     (is (search (princ-to-string *sum-of-squares*)
                 (with-output-to-string (out) (run-text *readme* out))))
     (is (equal '() (list-all-fibers))))))

(example slow-square "(defun slow-square"
  (is (eql *sum-of-squares* (second (run-text text)))))

;;; A fiber that computes lets another run.
(example sliced "(start-fibers nil :time-slice"
  (destructuring-bind (group) (run-text text)
    (is (= 10000000 (sb-fiber::fiber-group-time-slice group)))
    (is-true (finish-fibers group :timeout *patience*))))

;;;; Scopes

(example lengths "(defun lengths (files)"
  (run-text text)
  (with-text-in-file (first "12345" "first")
    (with-text-in-file (second "123" "second")
      (is (equal '(5 3) (call "LENGTHS" (list first second))))
      (is (eq :failed (handler-case (call "LENGTHS" (list first "/no such file" second))
                        (scope-failed (condition)
                          (and (typep (scope-failed-cause condition) 'file-error) :failed))))))
    (finish-fibers t)))

(example first-answer "(defun first-answer"
  (is (equal '(42 (1 2 3)) (rest (run-text text))))
  (finish-fibers t))

;;;; Channels

(example total-words "(defun total-words"
  (is (eql 5 (first (last (run-text text)))))
  (finish-fibers t))

(example relay "(defun relay"
  (run-text text)
  (flet ((relayed (close)
           (let ((source (sb-concurrency:make-channel :capacity 2))
                 (target (sb-concurrency:make-channel :capacity 2))
                 (stop (sb-concurrency:make-channel)))
             (sb-concurrency:send source 1)
             (sb-concurrency:send source 2)
             (let ((relay (make-thread #'call :arguments (list "RELAY" source target stop))))
               (list (sb-concurrency:receive target)
                     (sb-concurrency:receive target)
                     (progn (sb-concurrency:close-channel (if close source stop))
                            (join-thread relay)))))))
    (is (equal '(1 2 :closed) (relayed t)))
    (is (equal '(1 2 :stopped) (relayed nil)))))

(example serve-until "(defun serve-until"
  (run-text text)
  (let* ((jobs (sb-concurrency:make-mailbox)) (stop (sb-concurrency:make-gate)) (done (make-flag))
         (server (make-thread #'call :arguments (list "SERVE-UNTIL" stop jobs))))
    (loop repeat 3 do (sb-concurrency:send-message jobs (lambda () (count-one done))))
    (is-true (wait-until (= 3 (flag-count done))))
    (sb-concurrency:open-gate stop)
    (is (null (join-thread server :timeout *patience*)))))

(defun ask-once (port question)
  "What the server at PORT answers, or NIL if it does not listen yet."
  (let ((socket (make-instance 'inet-socket :type :stream :protocol :tcp)))
    (unwind-protect
         (handler-case
             (let ((stream (progn (socket-connect socket #(127 0 0 1) port)
                                  (socket-make-stream socket :input t :output t
                                                             :buffering :line))))
               (write-line question stream)
               (read-line stream))
           (sb-bsd-sockets:connection-refused-error () nil))
      (socket-close socket))))

(defun call-with-echo-server (function)
  "Call FUNCTION with the port of the manual's server, when that answers."
  (call-with-example-package
   (lambda ()
     (let ((port (free-port)))
       (run-text (replaced "7007" (princ-to-string port) (block-with "(defun listen-for-echo")))
       (unwind-protect (progn (is (equal "hello" (wait-until (ask-once port "hello"))))
                              (funcall function port))
         (is (finish-fibers (symbol-value (find-symbol "*GROUP*" *example-package*))
                            :abort t)))))))

(example echo "(defun listen-for-echo"
  (call-with-echo-server (lambda (port) (is (equal "again" (ask-once port "again"))))))

(example repl ":name \"repl\""
  (let ((*debug-io* (make-two-way-stream *standard-input* (make-broadcast-stream))))
    (destructuring-bind (group sleeper list backtrace terminated finished) (run-text text)
      (declare (ignore group backtrace terminated))
      (setf sleeper (symbol-value sleeper))
      (is (equal (list sleeper) list))
      (is (not (fiber-alive-p sleeper)))
      (is (eq t finished)))))

(example initial-bindings "(*session* . ,(make-session))"
  (run-text "(defvar *session*)
             (defun make-session () :session)
             (defun serve () (list *print-base* *session*))")
  (is (equal '((16 :session)) (run-fibers (run-text text)))))

(example output ":initial-bindings `((*standard-output*"
  (run-text "(defun report () (write-string \"reported\"))")
  (is (equal "reported"
             (with-output-to-string (out)
               (run-fibers (run-text text out))))))

;;;; What may wait long

(example foreign-call "(defun wait-for-child"
  (run-text text)
  (is (eql sb-posix:echild
           (in-fiber ()
             (handler-case (call "WAIT-FOR-CHILD" (sb-posix:getpid))
               (sb-posix:syscall-error (condition) (sb-posix:syscall-errno condition)))))))

(example blocking-call "/net/far/away"
  (uiop:with-temporary-file (:stream out :pathname path)
    (write-line "first line" out)
    (finish-output out)
    (let ((text (replaced "/net/far/away" (sb-ext:native-namestring path) text)))
      (is (equal '("first line") (in-fiber () (run-text text)))))))

(defun check-time-out (name)
  "What is not there yet is waited for, NAME being a function of a stream and a number of seconds."
  (with-pipe (in out)
    (is (equal '(nil :there)
               (in-fiber ()
                 (list (call name in 1/100)
                       (progn (write-line ":there" out)
                              (finish-output out)
                              (let ((read (call name in *patience*)))
                                (if (stringp read) (read-from-string read) read)))))))))

(example deadline "(defun read-line-until-deadline"
  (run-text text)
  (check-time-out "READ-LINE-UNTIL-DEADLINE"))

(example time-out "(defun read-form-until-timeout"
  (run-text text)
  (check-time-out "READ-FORM-UNTIL-TIMEOUT"))

;;;; Several fibers

(example permits "(defun call-with-permit"
  (run-text text)
  (let ((now 0) (most 0) (mutex (make-mutex)))
    (flet ((work (n)
             (with-mutex (mutex) (setf most (max most (incf now))))
             (unwind-protect (progn (fiber-yield) (sleep 1/1000))
               (with-mutex (mutex) (decf now)))
             (* n n)))
      (is (equal (loop for n below 30 collect (* n n))
                 (call "MAP-IN-FIBERS" #'work (loop for n below 30 collect n) :at-once 3)))
      (is (<= 1 most 3))))
  ;; Neither a fiber that waits nor one that works takes a permit with it.
  (let ((permits (make-semaphore :count 1)))
    (with-group (group 1)
      (let ((fibers (loop repeat 2
                          collect (wait-until-parked
                                   (spawn (group)
                                     (call "CALL-WITH-PERMIT" permits #'sleep 3600))))))
        (mapc #'terminate-fiber (reverse fibers))
        (mapc #'wait-for-end fibers)))
    (is (= 1 (semaphore-count permits)))))

(example failures "(defun values-or-errors"
  (run-text text)
  (quietly
    (with-group (group 1)
      (destructuring-bind (good bad)
          (call "VALUES-OR-ERRORS" (list (spawn (group) 1) (spawn (group) (error 'expected-error))))
        (is (eql 1 good))
        (is (typep bad 'expected-error))))))

(example pipeline "(defun pipeline"
  (run-text text)
  (is (equal '(4 6 8) (call "PIPELINE" '(1 2 3) #'1+ (lambda (n) (* 2 n)))))
  (is (equal '(1 2 3) (call "PIPELINE" '(1 2 3)))))

(example cancel "(defun beat"
  (run-text text)
  (with-pipe (in out)
    (with-group (group 1)
      (let ((fiber (spawn (group) (call "BEAT" out 3600))))
        (is (equal "beat" (read-line in)))
        (is (eq :abort (nth-value 1 (call "CANCEL" fiber))))
        (is (not (open-stream-p out)))
        (is (eq :abort (nth-value 1 (call "CANCEL" fiber))))))))

(example usocket "(defun ask-all"
  (run-text text)
  (let ((ask-all (find-symbol "ASK-ALL" *example-package*)))
    (call-with-echo-server (lambda (port)
                             (is (equal '("a" "b" "c")
                                        (funcall ask-all "127.0.0.1" port '("a" "b" "c"))))))))

;;;; Other systems

(defun check-answer (port)
  (usocket:with-client-socket (socket stream "127.0.0.1" port)
    (format stream "GET / HTTP/1.0~C~C~:*~:*~C~C" #\Return #\Newline)
    (finish-output stream)
    (is (eql 0 (search "HTTP/1.1 " (read-line stream))))))

(defun check-server (text variable)
  "Run TEXT, which starts a server, the value of VARIABLE, and ask it for something."
  (let ((server nil) (port (free-port)))
    (run-text (replaced "4242" (format nil "~D :address \"127.0.0.1\"" port) text))
    (setf server (symbol-value (find-symbol variable *example-package*)))
    (unwind-protect (check-answer port)
      (uiop:symbol-call "HUNCHENTOOT" "STOP" server))))

(example hunchentoot "hunchentoot:easy-acceptor"
  (check-server text "*SERVER*"))

(example fast-hunchentoot "hunchentoot:easy-fiber-acceptor"
  (check-server text "*FAST-SERVER*"))

;;; Clack is not here: what it calls is.
(example clack "(clack:clackup"
  (is (search ":server :sb-fiber" text))
  (handler-bind ((warning #'muffle-warning))
    (let ((*standard-output* (make-broadcast-stream)))
      (asdf:load-system "clack-handler-sb-fiber")))
  (is (eq :external (nth-value 1 (find-symbol "RUN" "CLACK.HANDLER.SB-FIBER")))))

(example http-server "(defvar *hello-server*"
  (let ((port (free-port)) (end (search "(sb-fiber-http:server-statistics" text)))
    (run-text (replaced "4242" (princ-to-string port) (subseq text 0 end)))
    (check-answer port)
    (run-text (subseq text end))
    (signals usocket:connection-refused-error (check-answer port))))

(example ssl "\"sb-fiber-ssl\""
  (if (asdf:find-system "cl+ssl" nil)
      (finishes (run-text text))
      (skip "There is no CL+SSL here.")))

(defun stop-http-server (variable)
  (uiop:symbol-call "SB-FIBER-HTTP" "STOP-SERVER"
                    (symbol-value (find-symbol variable *example-package*))))

(example tls "(defvar *secret-server*"
  (if (asdf:find-system "cl+ssl" nil)
      (multiple-value-bind (certificate key) (make-certificate "manual")
        (let ((text (replaced "\"certificate.pem\"" (prin1-to-string certificate)
                              (replaced "\"key.pem\"" (prin1-to-string key) text)))
              (*error-output* (make-broadcast-stream)))
          (run-text (replaced "4243" (princ-to-string (free-port)) text))
          (is-true (stop-http-server "*SECRET-SERVER*"))))
      (skip "There is no CL+SSL here.")))

;;;; HTTP servers in production

(defun call-with-process (function program arguments)
  "Call FUNCTION with a process that runs PROGRAM, and end it. Return its exit code."
  (let ((process (sb-ext:run-program program arguments :search t :wait nil
                                                       :output nil :error nil)))
    (unwind-protect (funcall function)
      (sb-ext:process-kill process sb-unix:sigterm)
      (sb-ext:process-wait process))
    (sb-ext:process-exit-code process)))

(defun lisp-script (path)
  "A command line that runs the script at PATH with this Lisp."
  (list (sb-ext:native-namestring sb-ext:*runtime-pathname*) "--core"
        (sb-ext:native-namestring sb-ext:*core-pathname*) "--script" path))

(defun answer-of-server (port)
  "The last line that the server at PORT answers, or NIL if it does not listen yet."
  (handler-case
      (usocket:with-client-socket (socket stream "127.0.0.1" port)
        (format stream "GET / HTTP/1.1~C~C~:*~:*Host: x~C~C~:*~:*Connection: close~C~C~:*~:*~C~C"
                #\Return #\Newline)
        (finish-output stream)
        (loop for line = (read-line stream nil) and last = nil then line
              while line finally (return last)))
    (error () nil)))

(defun program-p (name)
  (zerop (nth-value 2 (uiop:run-program (list "which" name) :ignore-error-status t))))

(defmacro if-there-is ((program) &body body)
  `(if (program-p ,program)
       (progn ,@body)
       (skip "There is no ~A here." ,program)))

(defun production-program (directory)
  "The manual's program, and a path where it listens if nobody has left a socket to it."
  (let ((path (format nil "~A/http" directory)))
    (values (replaced "/run/hello.http" path (block-with "(defun hello (exchange)")) path)))

(example production "(defun hello (exchange)"
  (with-text-in-file (path "" "none")
    (multiple-value-bind (program socket) (production-program (directory-namestring path))
      (with-text-in-file (script program "hello.lisp")
        (let ((command (lisp-script script)))
          (is (eql 0 (call-with-process
                       (lambda () (is-true (wait-until (probe-file socket))))
                       (first command) (rest command))))
          (is (null (probe-file socket))))))))

(example systemd-socket "ListenStream"
  (if-there-is ("systemd-socket-activate")
    (with-text-in-file (script (block-with "(defun hello (exchange)") "hello.lisp")
      (let ((port (free-port)))
        (call-with-process
         (lambda ()
           (is (equal "Hello, 127.0.0.1!" (wait-until (answer-of-server port)))))
         "systemd-socket-activate"
         (append (list "-l" (format nil "127.0.0.1:~D" port))
                 (loop for name in '("SBCL_HOME" "ASDF_OUTPUT_TRANSLATIONS" "HOME")
                       when (sb-ext:posix-getenv name)
                         collect (format nil "--setenv=~A=~A" name (sb-ext:posix-getenv name)))
                 (lisp-script script)))))))

(example systemd-service "ExecStart"
  (if-there-is ("systemd-analyze")
    (with-text-in-file (path (replaced "/usr/local/bin/sbcl" "/bin/sh" text) "hello.service")
      (is (equal "" (nth-value 1 (uiop:run-program (list "systemd-analyze" "verify" path)
                                                   :error-output :string
                                                   :ignore-error-status t)))))))

(example nginx "proxy_pass"
  (if-there-is ("nginx")
    (with-text-in-file (path "" "none")
      (multiple-value-bind (program socket) (production-program (directory-namestring path))
        (let ((port (free-port)))
          (with-text-in-file (script program "hello.lisp")
            (with-text-in-file (configuration
                                (format nil "daemon off; master_process off; pid ~A.pid;~%~A"
                                        socket
                                        (replaced "8080" (format nil "127.0.0.1:~D" port)
                                                  (replaced "/run/hello.http" socket text)))
                                "nginx.conf")
              (let ((command (lisp-script script)))
                (call-with-process
                 (lambda ()
                   (is-true (wait-until (probe-file socket)))
                   (call-with-process
                    (lambda ()
                      (is (equal "Hello, 127.0.0.1!"
                                 (wait-until (answer-of-server port)))))
                    "nginx" (list "-c" configuration)))
                 (first command) (rest command))))))))))

;;;; Nothing is left out

(test all-examples
  (is (equal '() (remove-if (lambda (text)
                              (some (lambda (key) (search key text)) *keys*))
                            *blocks*))))
