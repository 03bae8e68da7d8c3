;;;; The end of the process, scripts and images: fiber/exit.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* exit)

;;;; EXIT

(defun exit-code-of (form)
  ;; One that has begun to EXIT in vain does not end by SIGTERM either.
  (values (call-in-child (list "--eval" *child-package* "--eval" (printed form))
                         :wrapper '("timeout" "-k" "5" "20"))))

;;; EXIT in a fiber ends the process, with its code, after its exit hooks.
(test exit-in-a-fiber
  (flet ((exits-with (form)
           (exit-code-of `(let ((group (start-fibers nil :carrier-count 1)))
                            (push (lambda () (princ :hook) (finish-output)) sb-ext:*exit-hooks*)
                            (submit-fiber group (make-fiber (lambda () (sleep 3600))))
                            (submit-fiber group (make-fiber (lambda () ,form)))
                            (sleep 15)))))
    (is (= 7 (exits-with '(sb-ext:exit :code 7))))
    (is (= 8 (exits-with '(sb-ext:exit :code 8 :abort t))))
    (is (= 9 (exits-with '(unwind-protect (sb-ext:exit :code 9) (sleep 1/100)))))))

;;; Carriers, and fibers that wait, do not keep the process.
(test exit-with-live-fibers
  (is (= 3 (exit-code-of '(progn (start-fibers (list (make-fiber (lambda () (sleep 3600)))
                                                     (make-fiber (lambda () (fiber-park)))
                                                     (make-fiber (lambda () (loop (fiber-yield)))))
                                               :carrier-count 2)
                           (sleep 1/10)
                           (sb-ext:exit :code 3))))))

;;; Prevents: a process that goes on for ever, since the fiber that wanted to end it is no more.
(test exit-without-a-thread-for-it
  (is (= 7 (exit-code-of '(let ((group (start-fibers nil :carrier-count 1)))
                           ;; more than there are addresses
                           (setf (sb-alien:extern-alien "thread_control_stack_size"
                                                        sb-alien:unsigned)
                                 (ash 1 52))
                           (submit-fiber group (make-fiber (lambda () (sb-ext:exit :code 7))))
                           (sleep 15))))))

;;; A cleanup form that parks, and says that it has run to its end.
(defparameter *cleanup*
  '(defmacro cleanup (name &body body)
    `(unwind-protect (progn ,@body)
       (fiber-yield)
       (sleep 1/100)
       (sb-thread:with-mutex (*output*)
         (format t "<~A>" ,name)
         (finish-output)))))

(defun exit-with-cleanups (&rest forms)
  "Exit code of a child that executes FORMS, and a sorted list of the names of the cleanup forms
that have run."
  (multiple-value-bind (code output)
      (call-in-child (list* "--eval" *child-package*
                            "--eval" (printed '(defvar *output* (sb-thread:make-mutex)))
                            "--eval" (printed *cleanup*)
                            (loop for form in forms collect "--eval" collect (printed form)))
                     :wrapper '("timeout" "40"))
    (list code
          (sort (loop for start = (position #\< output) then (position #\< output :start end)
                      for end = (and start (position #\> output :start start))
                      while end collect (subseq output (1+ start) end))
                #'string<)
          (if (search "Unhandled" output) output :quiet))))

;;; A fiber that is ended before it has begun has nothing to clean up.
(defparameter *wait-until-all-have-begun*
  '(loop while (some #'sb-fiber::fiber-function (list-all-fibers))
         do (sleep 1/100)
         finally (sleep 1/10)))

(defparameter *fibers-to-unwind*
  '(defvar *group* (start-fibers (list (make-fiber (lambda () (cleanup "sleep" (sleep 3600))))
                                       (make-fiber (lambda () (cleanup "park" (fiber-park))))
                                       (make-fiber (lambda ()
                                                     (cleanup "yield" (loop (fiber-yield)))))
                                       (make-fiber (lambda ()
                                                     (cleanup "pinned"
                                                       (with-fiber-pinned (sleep 3600)))))
                                       (make-fiber (lambda ()
                                                     (cleanup "thread"
                                                              (unwind-protect (sleep 3600)
                                                                (sb-thread:join-thread
                                                                 (sb-thread:make-thread #'list))))))
                                       (make-fiber (lambda () (cleanup "later" (sleep 3600)))))
                                 :carrier-count 2)))

(defparameter *unwound* '("later" "park" "pinned" "sleep" "thread" "yield"))

;;; Prevents: cleanup forms that do not run, a wrong code, an EXIT that waits for ever.
(test exit-unwinds-fibers
  (flet ((exits-with (&rest forms)
           (apply #'exit-with-cleanups *fibers-to-unwind* *wait-until-all-have-begun* forms)))
    ;; from the main thread, another one, and a fiber
    (is (equal (list 3 *unwound* :quiet) (exits-with '(sb-ext:exit :code 3))))
    (is (equal (list 4 *unwound* :quiet)
               (exits-with '(sb-thread:join-thread
                             (sb-thread:make-thread (lambda () (sb-ext:exit :code 4)))))))
    (is (equal (list 5 (cons "caller" *unwound*) :quiet)
               (exits-with '(fiber-join (submit-fiber *group*
                                         (make-fiber (lambda ()
                                                       (cleanup "caller"
                                                         (sb-ext:exit :code 5)))))))))
    ;; :ABORT unwinds nobody
    (is (equal (list 6 '() :quiet) (exits-with '(sb-ext:exit :code 6 :abort t))))
    (is (equal (list 7 '() :quiet)
               (exits-with '(fiber-join (submit-fiber *group*
                                         (make-fiber (lambda ()
                                                       (cleanup "caller"
                                                         (sb-ext:exit :code 7 :abort t)))))))))
    ;; nor does this
    (is (equal (list 8 '() :quiet)
               (exits-with '(setf sb-impl::*forcibly-terminate-threads-on-exit* nil)
                           '(sb-ext:exit :code 8))))))

;;; The main thread is in RUN-FIBERS, as in most scripts.
(test exit-in-run-fibers
  (is (equal '(9 ("other" "self") :quiet)
             (exit-with-cleanups
              '(run-fibers (list (make-fiber (lambda () (cleanup "other" (sleep 3600))))
                                 (make-fiber (lambda ()
                                               (sleep 1/10)
                                               (cleanup "self" (sb-ext:exit :code 9)))))
                :carrier-count 1)))))

;;; Prevents: a cleanup form that EXIT cuts short, since FINISH-FIBERS has called it forth already.
(test exit-while-a-group-is-aborted
  (is (equal '(4 ("slow") :quiet)
             (exit-with-cleanups
              '(defvar *entered* (sb-thread:make-semaphore))
              '(defvar *group* (start-fibers (make-fiber (lambda ()
                                                           (unwind-protect (fiber-park)
                                                             (sb-thread:signal-semaphore *entered*)
                                                             (sleep 1/2)
                                                             (format t "<slow>")
                                                             (finish-output))))
                                :carrier-count 1))
              *wait-until-all-have-begun*
              '(sb-thread:make-thread (lambda () (finish-fibers *group* :abort t)))
              '(sb-thread:wait-on-semaphore *entered*)
              '(sb-ext:exit :code 4)))))

;;; What handles SIGTERM calls EXIT in whatever thread the kernel chose. Prevents: a carrier that
;;; ends, and a process that goes on without it.
(test exit-in-handlers
  (is (equal (list 0 *unwound* :quiet)
             (exit-with-cleanups *fibers-to-unwind*
                                 *wait-until-all-have-begun*
                                 '(sb-unix:unix-kill (sb-unix:unix-getpid) sb-unix:sigterm)
                                 '(sleep 30))))
  (is (equal (list 13 *unwound* :quiet)
             (exit-with-cleanups *fibers-to-unwind*
                                 *wait-until-all-have-begun*
                                 '(sb-thread:interrupt-thread
                                   (fiber-join
                                    (submit-fiber
                                     *group*
                                     (make-fiber
                                      (lambda ()
                                        (sb-fiber::carrier-thread sb-fiber::*carrier*)))))
                                   (lambda () (sb-ext:exit :code 13)))
                                 '(sleep 30)))))

;;; The signal is for whichever thread does not block it. Prevents: one that finds a thread which
;;; never handles it.
(test term-while-the-main-thread-blocks-signals
  (dolist (forms '(((sb-unix::pthread-sigmask sb-unix::SIG_BLOCK
                     (sb-sys:foreign-symbol-sap "thread_start_sigset" t) nil)
                    (sb-unix:unix-kill (sb-unix:unix-getpid) sb-unix:sigterm)
                    (loop (sleep 1)))
                   ((sb-sys:without-interrupts
                      (sb-unix:unix-kill (sb-unix:unix-getpid) sb-unix:sigterm)
                      (sleep 1/2))
                    (loop (sleep 1)))
                   ;; one that the kernel may choose
                   ((sb-unix:pthread-kill (sb-thread::thread-os-thread sb-impl::*finalizer-thread*)
                                          sb-unix:sigterm)
                    (loop (sleep 1)))))
    ;; Threads of the pool are idle, as well. EXIT waits for the main thread, which cannot be
    ;; unwound.
    (is (equal (list 0 *unwound* :quiet)
               (apply #'exit-with-cleanups *fibers-to-unwind* *wait-until-all-have-begun*
                      '(setf sb-ext:*exit-timeout* 5)
                      '(fiber-join (submit-fiber *group*
                                                 (make-fiber (lambda () (call-blocking #'list)))))
                      forms)))))

;;; Prevents: hooks that are called again where no thread can be made any more, and wait for ever.
(test exit-hooks-that-run-fibers
  (let ((hook '(push (lambda ()
                       (princ "<hook>")
                       (when (equal '(1 2)
                                    (run-fibers (list (make-fiber (lambda () (sleep 1/100) 1))
                                                      (make-fiber (lambda () (fiber-yield) 2)))))
                         (princ "<run>"))
                       (setf *stop* t)
                       (when (eq :stopped (fiber-join *other*)) (princ "<joined>"))
                       (finish-output))
                sb-ext:*exit-hooks*))
        (other '(defvar *other* (submit-fiber *group*
                                 (make-fiber (lambda ()
                                               (loop until *stop* do (sleep 1/1000))
                                               :stopped))))))
    (flet ((exits-with (form)
             (exit-with-cleanups '(defvar *stop* nil)
                                 '(defvar *group* (start-fibers nil :carrier-count 1))
                                 other hook form '(loop (sleep 1)))))
      (is (equal '(3 ("hook" "joined" "run") :quiet) (exits-with '(sb-ext:exit :code 3))))
      (is (equal '(4 ("hook" "joined" "run") :quiet)
                 (exits-with '(submit-fiber *group*
                                            (make-fiber (lambda () (sb-ext:exit :code 4)))))))
      (is (equal '(5 ("hook" "joined" "run") :quiet)
                 (exits-with '(sb-thread:make-thread (lambda () (sb-ext:exit :code 5))))))
      (is (equal '(6 ("hook" "joined" "run") :quiet)
                 (exits-with '(run-fibers (make-fiber (lambda () (sb-ext:exit :code 6)))))))
      (is (equal '(8 ("hook" "joined" "run") :quiet)
                 (exits-with '(run-fibers
                               (make-fiber (lambda ()
                                             (call-blocking
                                              (lambda () (sb-ext:exit :code 8)))))))))
      (is (equal '(0 ("hook" "joined" "run") :quiet)
                 (exits-with '(sb-unix:unix-kill (sb-unix:unix-getpid) sb-unix:sigterm)))))))

;;; Prevents: a second caller that goes on, or whose code wins.
(test several-fibers-exit
  (destructuring-bind (code cleanups quiet)
      (exit-with-cleanups
       '(run-fibers (loop for i below 20
                          collect (let ((i i))
                                    (make-fiber (lambda ()
                                                  (sleep 1/100)
                                                  (cleanup (code-char (+ i 65))
                                                    (sb-ext:exit :code (+ 10 i)))))))
                    :carrier-count 4))
    (is (<= 10 code 29))
    (is (= 20 (length cleanups)) "~S" cleanups)
    (is (eq :quiet quiet) "~A" quiet)))

;;; A fiber that does not end within :TIMEOUT is left behind.
(test exit-timeout
  (is (equal '(11 ("well-behaved") :quiet)
             (exit-with-cleanups
              '(start-fibers (list (make-fiber (lambda ()
                                                 (cleanup "stubborn"
                                                   (sb-sys:without-interrupts (sleep 3600)))))
                                   (make-fiber (lambda () (cleanup "well-behaved" (sleep 3600)))))
                :carrier-count 1)
              *wait-until-all-have-begun*
              '(sb-ext:exit :code 11 :timeout 1)))))

(test errors-during-exit
  (destructuring-bind (code cleanups text)
      (exit-with-cleanups
       '(start-fibers (list (make-fiber (lambda ()
                                          (cleanup "failing"
                                            (unwind-protect (sleep 3600) (error "oops")))))
                            (make-fiber (lambda () (cleanup "other" (sleep 3600)))))
         :carrier-count 1)
       *wait-until-all-have-begun*
       '(sb-ext:enable-debugger)        ; which is not entered
       '(sb-ext:exit :code 12))
    (is (= 12 code))
    (is (equal '("failing" "other")
               (remove-if-not (lambda (name) (member name '("failing" "other") :test #'equal))
                              cleanups)))
    (is (search "oops" (string text)))))

;;;; Scripts, the REPL, and images

(test script
  (uiop:with-temporary-file (:pathname file :stream stream :type "lisp" :direction :output)
    (write-string "(princ (sb-fiber:run-fibers
                            (loop for i below 3
                                  collect (let ((i i))
                                            (sb-fiber:make-fiber (lambda () (sleep 1/100) i))))
                            :carrier-count 2))
                   (sb-fiber:start-fibers (sb-fiber:make-fiber (lambda () (sleep 3600))))"
                  stream)
    :close-stream
    (multiple-value-bind (code output)
        (call-in-child (list "--script" (sb-ext:native-namestring file)) :wrapper '("timeout" "20"))
      (is (= 0 code))
      (is (string= "(0 1 2)" (string-trim '(#\Newline) output))))))

(test repl
  (multiple-value-bind (code output)
      (call-in-child '("--noprint")
                     :wrapper '("timeout" "20")
                     :input "(defvar *g* (sb-fiber:start-fibers nil :carrier-count 2))
                             (defvar *f* (sb-fiber:submit-fiber
                                   *g* (sb-fiber:make-fiber (lambda () (sleep 1/10) 42))))
                             (print (sb-fiber:fiber-join *f*))
                             (defvar *h* (sb-fiber:submit-fiber
                                   *g* (sb-fiber:make-fiber (lambda () (sleep 3600)))))
                             (print :last)
                             (terpri)
                             (sb-ext:exit :code 5)
                             ")
    (is (= 5 code))
    (is (search "42" output))
    (is (search "LAST" output))))

(defun save-image (file &rest forms)
  "Save an image in a child that executes FORMS before."
  (call-in-child
   (list "--eval" *child-package* "--eval"
         (printed `(progn
                     ,@forms
                     (sb-ext:save-lisp-and-die
                      ,(sb-ext:native-namestring file)
                      :executable t
                      :toplevel (lambda ()
                                  (print (run-fibers
                                          (loop for i below 3
                                                collect (let ((i i))
                                                          (make-fiber (lambda () (sleep 1/100) i))))
                                          :carrier-count 2))
                                  (terpri)
                                  (sb-ext:exit :code 6))))))
   :wrapper '("timeout" "60")))

;;; Prevents: contexts, tables or pollers of the process that saved the image, in the one that it
;;; starts.
(test saved-image
  (uiop:with-temporary-file (:pathname file)
    (multiple-value-bind (code output)
        (save-image file
                    '(run-fibers (list (make-fiber (lambda () (sleep 1/100)))) :carrier-count 2)
                    '(let ((group (start-fibers nil :carrier-count 2)))
                      (fiber-join (submit-fiber t (make-fiber #'list)))
                      (finish-fibers group)))
      (is (= 0 code) "~A" output)
      (let* ((text (make-string-output-stream))
             (process (sb-ext:run-program file '() :output text :error :output)))
        (is (= 6 (sb-ext:process-exit-code process)))
        (is (search "(0 1 2)" (get-output-stream-string text)))))))

;;; Prevents: fibers, stacks' tables or pollers that go with an image.
(test images-after-groups-are-no-larger
  (flet ((size-after (&rest forms)
           (uiop:with-temporary-file (:pathname file)
             (apply #'save-image file forms)
             (with-open-file (in file :element-type '(unsigned-byte 8)) (file-length in)))))
    (is (< (size-after '(run-fibers (loop repeat 5000 collect (make-fiber (lambda () (sleep 1/50))))
                                    :carrier-count 4))
           (+ 500000 (size-after))))))

;;; Prevents: a process that nothing but SIGKILL ends, as all wait for the one that has begun to end
;;; it.
(test exit-in-a-fiber-that-loses-its-stack
  (multiple-value-bind (code output)
      (call-in-child
       (list "--eval" *child-package* "--eval"
             (printed '(progn
                        (defun deep (n) (1+ (deep (1+ n))))
                        (defun lose-the-stack ()
                          (handler-bind ((storage-condition (lambda (condition)
                                                              (declare (ignore condition))
                                                              (deep 0))))
                            (deep 0)))
                        (start-fibers (make-fiber (lambda ()
                                                    (unwind-protect (sb-ext:exit :code 3)
                                                      (lose-the-stack)))))
                        (sleep 30))))
       :wrapper '("timeout" "60"))
    (is (= 3 code) "~D: ~A" code output)))

(test image-with-carriers-is-not-saved
  (uiop:with-temporary-file (:pathname file)
    (multiple-value-bind (code output)
        (save-image file '(start-fibers (make-fiber (lambda () (sleep 3600)))))
      (is (/= 0 code))
      (is (search "FINISH-FIBERS" output) "~A" output))))
