;;;; Where the tests come from

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "IN-FIBERS")

(defvar *suites* '()
  "An alist of names and functions that load a suite and return its tests.")

(defmacro define-suite (name &body body)
  `(setf *suites* (append *suites* (list (cons ,name (lambda () ,@body))))))

(defun call (package symbol &rest arguments)
  "Call a function of a package that was not there when this was read."
  (apply (find-symbol symbol package) arguments))

(defun value (package symbol)
  (symbol-value (find-symbol symbol package)))

(defun load-systems (&rest names)
  (let ((*standard-output* (make-broadcast-stream))
        (*error-output* (make-broadcast-stream)))
    (dolist (name names) (asdf:load-system name))))

(defparameter *libraries* #P"/usr/share/common-lisp/source/"
  "Where Debian's packages have the sources of libraries, their tests included.")

;;;; tests of FiveAM

(defun fiveam-problem (name)
  (let ((results (call "FIVEAM" "RUN" name)))
    (cond ((null results) "checked nothing")
          ((call "FIVEAM" "RESULTS-STATUS" results) nil)
          (t (with-output-to-string (out)
               (call "FIVEAM" "EXPLAIN"
                     (make-instance (find-symbol "DETAILED-TEXT-EXPLAINER" "FIVEAM"))
                     results out))))))

(defun fiveam-tests (suite)
  (loop for name being the hash-keys of (call "FIVEAM" "TESTS" (call "FIVEAM" "GET-TEST" suite))
        collect (let ((name name))
                  (make-test :name (string name) :function (lambda () (fiveam-problem name))))))

;;; They end with checks of what threads have done that nobody has waited for.
(define-suite "bordeaux-threads"
  (load-systems "bordeaux-threads/test")
  (setf (symbol-value (find-symbol "*TEST-DRIBBLE*" "FIVEAM")) (make-broadcast-stream))
  (fiveam-tests :bordeaux-threads))

;;;; tests of RT

(defun rt-problem (entry)
  (let ((log (make-string-output-stream)))
    (unless (handler-bind ((sb-ext:code-deletion-note #'muffle-warning))
              (call "RTEST" "DO-ENTRY" entry log))
      (get-output-stream-string log))))

(defun rt-tests (package)
  (loop for entry in (rest (value "RTEST" "*ENTRIES*"))
        collect (let ((entry entry))
                  (make-test :name (string (call "RTEST" "NAME" entry))
                             :function (lambda ()
                                         (let ((*package* (find-package package)))
                                           (rt-problem entry)))))))

;;; usocket's tests want a web server on common-lisp.net. They get one that is here.
(defun start-web-server ()
  "Return the port of a server that answers one line, once it was asked."
  (let ((socket (make-instance 'sb-bsd-sockets:inet-socket :type :stream :protocol :tcp)))
    (sb-bsd-sockets:socket-bind socket #(127 0 0 1) 0)
    (sb-bsd-sockets:socket-listen socket 20)
    (sb-thread:make-thread
     (lambda ()
       (loop (let ((connection (sb-bsd-sockets:socket-accept socket)))
               (sb-thread:make-thread #'serve-connection :arguments (list connection)))))
     :name "web server")
    (nth-value 1 (sb-bsd-sockets:socket-name socket))))

(defun serve-connection (connection)
  (let ((stream (sb-bsd-sockets:socket-make-stream connection :input t :output t)))
    (with-open-stream (stream stream)
      (ignore-errors
        (when (read-line stream nil)
          (format stream "HTTP/1.0 200 OK~2%"))))))

(defun replaced (old new text)
  (with-output-to-string (out)
    (loop for start = 0 then (+ end (length old))
          for end = (search old text :start2 start)
          do (write-string text out :start start :end end)
          while end do (write-string new out))))

(defun load-usocket-tests (file port)
  (let ((text (uiop:read-file-string
               (merge-pathnames (format nil "usocket/test/~A.lisp" file) *libraries*))))
    (with-input-from-string
        (in (replaced " 80)" (format nil " ~D)" port)
                      (replaced "common-lisp.net" "localhost" text)))
      (let ((*package* *package*))
        (load in)))))

(define-suite "usocket"
  (load-systems "usocket-server" "rt")
  (let ((port (start-web-server)))
    (dolist (file '("package" "test-usocket" "test-condition" "test-datagram" "wait-for-input"))
      (load-usocket-tests file port)))
  (mapcar #'with-own-echo-server (rt-tests "USOCKET-TEST")))

;;; The first test that needs it starts it, in a thread that is a fiber of that test's group
;;; perhaps.
(defun with-own-echo-server (test)
  (make-test :name (test-name test)
             :function (lambda ()
                         (setf (symbol-value (find-symbol "*ECHO-SERVER*" "USOCKET-TEST")) nil)
                         (funcall (test-function test)))))

;;; CFFI's tests write beside their sources: they are run in a copy.
(define-suite "cffi"
  (let ((copy (merge-pathnames "cffi/" (uiop:getcwd))))
    (uiop:run-program (list "cp" "-Rp" (namestring (merge-pathnames "cl-cffi" *libraries*))
                            (namestring copy)))
    (push copy asdf:*central-registry*)
    (load-systems "cffi-tests")
    (rt-tests "CFFI-TESTS")))

;;;; SBCL's own tests

(defparameter *sbcl-tests*
  (truename (concatenate 'string (posix-getenv "SBCL_HOME") "/../../tests/")))

(defvar *collected* '())

(defun load-sbcl-test-utilities ()
  (dolist (file '("test-util" "assertoid"))
    (load (merge-pathnames (concatenate 'string file ".lisp") *sbcl-tests*)))
  (use-package '("TEST-UTIL" "ASSERTOID") "CL-USER")
  (setf (symbol-value (find-symbol "*ELAPSED-TIMES*" "TEST-UTIL")) '())
  ;; The macro as it is runs the test.
  (eval `(defmacro ,(find-symbol "WITH-TEST" "TEST-UTIL")
             ((&rest options &key name &allow-other-keys) &body body)
           `(collect-sbcl-test ',name ',options (lambda () ,@body)))))

(defun collect-sbcl-test (name options function)
  (flet ((applies-p (option)
           (let ((expression (getf options option)))
             (and expression (call "TEST-UTIL" "SKIPPED-P" expression)))))
    (unless (or (applies-p :broken-on) (applies-p :skipped-on) (applies-p :fails-on))
      (push (make-test :name (princ-to-string name)
                       :function (lambda () (sbcl-problem function name)))
            *collected*))))

(defun sbcl-problem (function name)
  "Let SBCL's RUN-TEST call FUNCTION. Return NIL, or what it printed as it found failures."
  (let ((log (make-string-output-stream)))
    (progv (list (find-symbol "*FAILURES*" "TEST-UTIL")) '(())
      (let ((*trace-output* log))
        (call "TEST-UTIL" "RUN-TEST" function name nil))
      (when (value "TEST-UTIL" "*FAILURES*") (get-output-stream-string log)))))

(defun sbcl-tests (&rest files)
  (let ((*features* (append *features* sb-impl:+internal-features+))
        (*package* (find-package "CL-USER")))
    (load-sbcl-test-utilities)
    (dolist (file files)
      (let ((*package* *package*))
        (load (merge-pathnames (concatenate 'string file ".lisp") *sbcl-tests*)))))
  (reverse *collected*))

(macrolet ((define (&rest files)
             `(progn ,@(loop for file in files
                             collect `(define-suite ,file (sbcl-tests ,file))))))
  (define "threads.pure" "threads.impure" "threads-2.impure" "mutex.impure" "make-thread.pure"
    "join-thread-timeout.impure" "deadline.impure" "timer.impure" "timer-dead-thread.impure"))

(define-suite "sb-concurrency"
  (require :sb-concurrency)
  (apply #'sbcl-tests
         (loop for file in '("package" "test-utils" "test-frlock" "test-gate" "test-mailbox"
                             "test-queue")
               collect (concatenate 'string "../contrib/sb-concurrency/tests/" file))))
