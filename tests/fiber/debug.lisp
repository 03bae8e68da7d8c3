;;;; The debugger in fibers, driven through pipes: fiber/debug.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* debug)

(defclass child ()
  ((process :initarg :process :reader child-process)
   (said :initform (make-array 0 :adjustable t :fill-pointer t :element-type 'character)
         :reader child-said)))

(defun start-child (&rest forms)
  "Start a Lisp with the debugger enabled that evaluates FORMS."
  (make-instance
   'child
   :process (sb-ext:run-program "timeout"
                                (list* "--foreground" "60"
                                       (sb-ext:native-namestring sb-ext:*runtime-pathname*)
                                       "--core" (sb-ext:native-namestring sb-ext:*core-pathname*)
                                       "--noinform" "--disable-ldb" "--no-sysinit" "--no-userinit"
                                       "--eval" *child-package* "--eval"
                                       "(in-package \"SB-FIBER-TESTS\")"
                                       (loop for form in forms
                                             collect "--eval" collect (printed form)))
                                :search t :wait nil
                                :input :stream :output :stream :error :output)))

(defun heard (child text)
  "Read what CHILD prints until that is TEXT; false if it ends before."
  (let ((said (child-said child))
        (start (fill-pointer (child-said child))))
    (loop for char = (read-char (sb-ext:process-output (child-process child)) nil)
          while char
          do (vector-push-extend char said)
          thereis (and (>= (- (length said) start) (length text))
                       (string= text said :start2 (- (length said) (length text)))))))

(defun say (child text)
  (write-line text (sb-ext:process-input (child-process child)))
  (finish-output (sb-ext:process-input (child-process child))))

(defun end-of (child)
  "The exit code of CHILD, once it has ended."
  (close (sb-ext:process-input (child-process child)))
  (loop while (read-char (sb-ext:process-output (child-process child)) nil))
  (sb-ext:process-wait (child-process child))
  (sb-ext:process-exit-code (child-process child)))

(defmacro with-child ((child &rest forms) &body body)
  `(let ((,child (start-child ,@forms)))
     (unwind-protect (progn ,@body)
       (sb-ext:process-kill (child-process ,child) sb-unix:sigkill)
       (sb-ext:process-close (child-process ,child)))))

(defmacro is-heard (child text)
  `(is (heard ,child ,text) "~S has not been printed; this has:~%~A" ,text (child-said ,child)))

;;; One carrier: prevents a debugger that blocks it, a queue for the foreground that is not served,
;;; restarts that end the wrong fiber.
(test debugger
  (with-child (child
               '(defvar *ticks* 0)
               '(defvar *group*
                  (start-fibers (make-fiber (lambda () (loop (sleep 1/1000) (incf *ticks*))))
                   :carrier-count 1))
               '(defun failing-fiber (name function)
                 (submit-fiber *group* (make-fiber (lambda ()
                                                     (restart-case (funcall function)
                                                       (take-it ()
                                                         :report "Take it."
                                                         (list :taken name))))
                                                   :name name)))
               '(defvar *errors* (list (failing-fiber "one" (lambda () (error "oops")))))
               ;; Each is in the queue for the foreground before the next comes.
               '(flet ((next (name function)
                        (let ((n (length (sb-thread::interactive-threads))))
                          (push (failing-fiber name function) *errors*)
                          (loop until (> (length (sb-thread::interactive-threads)) n)
                                do (sleep 1/1000)))))
                 (loop until (cdr (sb-thread::interactive-threads)) do (sleep 1/1000))
                 (next "two" (lambda () (car (eval 1))))
                 (next "three"
                       (lambda ()
                         (handler-bind ((error (lambda (c) (invoke-debugger c))))
                           (error "again")))))
               '(sb-thread:release-foreground)
               '(print (mapcar (lambda (fiber)
                                 (multiple-value-list (fiber-join fiber :default :none)))
                        (reverse *errors*)))
               '(sb-thread::get-foreground)
               '(print (cons :queue (length (sb-thread::interactive-threads))))
               '(terpri)
               '(sb-ext:exit :code 7))
    (is-heard child "Resuming thread #<FIBER \"one\"")
    (is-heard child "0: [TAKE-IT")
    (is-heard child "0] ")
    ;; Others go on while the user types.
    (say child "(let ((old *ticks*))
                  (sleep 1/10)
                  (list :in (sb-thread:thread-name sb-thread:*current-thread*) (> *ticks* old)))")
    (is-heard child "(:IN \"one\" T)")
    (say child "(error \"nested\")")
    (is-heard child "0[2] ")
    (say child "(length (sb-thread::interactive-threads))")
    (is-heard child "3")
    (say child "abort")               ; to the first level
    (is-heard child "0] ")
    (say child "take-it")
    (is-heard child "Resuming thread #<FIBER \"two\"")
    (is-heard child "0] ")
    (say child "backtrace")
    (is-heard child "%RUN-FIBER")
    (say child "1")                     ; abort
    (is-heard child "Resuming thread #<FIBER \"three\"")
    (is-heard child "0] ")
    (say child "take-it")
    (is-heard child "(((:TAKEN \"one\")) (:NONE :ABORT) ((:TAKEN \"three\")))")
    (is-heard child "(:QUEUE . 1)")
    (is (= 7 (end-of child)))))

;;; Prevents: a user who has to leave the debugger thirty times; a report that is far above what it
;;; is about.
(test many-in-the-debugger
  (with-child (child
               '(defvar *group* (start-fibers nil :carrier-count 2))
               '(defun fail-as (i) (error "oops number ~D" i))
               '(defvar *fibers*
                  (loop for i below 30
                        collect (let ((i i))
                                  (submit-fiber *group*
                                                (make-fiber (lambda () (fail-as i))
                                                 :name (format nil "failing ~D" i))))))
               '(loop until (= 31 (length (sb-thread::interactive-threads))) do (sleep 1/1000))
               '(print (count '(:parked :debugger) *fibers* :test #'equal
                        :key (lambda (fiber) (multiple-value-list (fiber-state fiber)))))
               '(sb-thread:release-foreground)
               '(print (count-if (lambda (fiber)
                                   (eq :abort (nth-value 1 (fiber-join fiber :default nil))))
                                 *fibers*))
               '(sb-thread::get-foreground)
               '(print (cons :queue (length (sb-thread::interactive-threads))))
               '(terpri)
               '(sb-ext:exit :code 7))
    (is-heard child "30")
    (is-heard child "Resuming thread #<FIBER \"failing ")
    (is-heard child "oops number ")
    (is-heard child "29 other fibers wait for the debugger")
    (is-heard child "#<FIBER \"failing ")
    (is-heard child "and 19 more")
    (is-heard child "abort this fiber and the 29 others that wait for the debugger")
    (is-heard child "0] ")
    (say child "abort")
    (is-heard child "Resuming thread #<FIBER \"failing ")
    (is-heard child "28 other fibers wait")
    (is-heard child "0] ")
    (say child "abort-all")
    (is-heard child "30")
    (is-heard child "(:QUEUE . 1)")
    (is (= 7 (end-of child)))))

(test failed-call-in-the-debugger
  (with-child (child
               '(defvar *group* (start-fibers nil :carrier-count 1))
               '(defun fail-in-the-call () (error "oops"))
               '(defvar *fiber*
                  (submit-fiber *group*
                                (make-fiber (lambda ()
                                              (call-blocking (lambda ()
                                                               (list (fail-in-the-call))))))))
               '(loop until (= 2 (length (sb-thread::interactive-threads))) do (sleep 1/1000))
               '(sb-thread:release-foreground)
               '(print (multiple-value-list (fiber-join *fiber* :default :none)))
               '(terpri)
               '(sb-ext:exit :code 7))
    (is-heard child "(FAIL-IN-THE-CALL)")
    (is-heard child "0] ")
    (say child "abort")
    (is-heard child "(:NONE :ABORT)")
    (is (= 7 (end-of child)))))

;;; Prevents: the foreground passed on to a dead fiber, for ever.
(test foreground-of-the-dead
  (with-child (child
               '(defvar *group* (start-fibers nil :carrier-count 2))
               '(defvar *fibers*
                  (loop repeat 3
                        collect (submit-fiber *group*
                                              (make-fiber (lambda () (error "oops"))))))
               '(loop until (= 4 (length (sb-thread::interactive-threads))) do (sleep 1/1000))
               '(mapc #'terminate-fiber *fibers*)
               '(print (mapcar (lambda (fiber)
                                 (multiple-value-list (fiber-join fiber :default :none)))
                               *fibers*))
               '(print (length (sb-thread::interactive-threads)))
               ;; One that ends with the foreground.
               '(defvar *last*
                  (submit-fiber *group* (make-fiber (lambda () (sb-thread::get-foreground) 5))))
               '(sb-thread:release-foreground)
               '(print (fiber-join *last*))
               '(sb-thread::get-foreground)
               '(print :back)
               '(terpri)
               '(sb-ext:exit :code 7))
    (is-heard child "((:NONE :ABORT) (:NONE :ABORT) (:NONE :ABORT))")
    (is-heard child "1")
    (is-heard child "5")
    (is-heard child ":BACK")
    (is (= 7 (end-of child)))))

(defun interrupt-child (child)
  ;; timeout(1) passes it on, once where it is told --foreground.
  (sb-ext:process-kill (child-process child) sb-unix:sigint))

;;; Ctrl-C goes to the thread that the terminal belongs to.
(test ctrl-c
  (with-child (child
               '(defvar *group* (start-fibers nil :carrier-count 1))
               '(defun in-foreground (function)
                 (let ((fiber
                          (submit-fiber *group*
                           (make-fiber (lambda ()
                                         (sb-thread::get-foreground)
                                         (unwind-protect
                                              (handler-case (funcall function)
                                                (sb-sys:interactive-interrupt (condition)
                                                  (princ-to-string condition)
                                                  (list :interrupted
                                                        (fiber-alive-p (current-fiber)))))
                                           (sb-thread:release-foreground)))))))
                   (sb-thread:release-foreground)
                   (prog1 (fiber-join fiber)
                     (sb-thread::get-foreground))))
               ;; parked
               '(print (in-foreground (lambda () (print :now-1) (finish-output) (sleep 3600))))
               ;; in the debugger
               '(print (in-foreground (lambda () (error "oops"))))
               ;; Fibers are mounted, and the main thread has the foreground.
               '(defvar *stop* nil)
               '(defvar *computing*
                  (submit-fiber *group* (make-fiber (lambda () (loop until *stop*) :computed))))
               '(print (handler-case (progn (print :now-2) (finish-output) (sleep 3600))
                        (sb-sys:interactive-interrupt () :interrupted)))
               '(setf *stop* t)
               '(print (fiber-join *computing*))
               ;; Nobody has it.
               '(sb-thread:release-foreground)
               '(print (handler-case (progn (print :now-3) (finish-output) (sleep 3600))
                        (sb-sys:interactive-interrupt () :interrupted-too)))
               '(terpri)
               '(sb-ext:exit :code 7))
    (is-heard child ":NOW-1")
    (interrupt-child child)
    (is-heard child "(:INTERRUPTED T)")
    (is-heard child "0] ")
    (interrupt-child child)
    (is-heard child "(:INTERRUPTED T)")
    (is-heard child ":NOW-2")
    (interrupt-child child)
    (is-heard child ":INTERRUPTED")
    (is-heard child ":COMPUTED")
    (is-heard child ":NOW-3")
    (interrupt-child child)
    (is-heard child ":INTERRUPTED-TOO")
    (is (= 7 (end-of child)))))

;;; Prevents: fibers that go on in a group that nobody has, or a REPL that waits for them for ever.
(test ctrl-c-in-run-fibers
  (with-child (child
               '(defvar *cleaned* 0)
               '(defun endless ()
                 (make-fiber (lambda ()
                               (unwind-protect (progn (print :now)
                                                      (finish-output)
                                                      (loop (sleep 1/1000)))
                                 (sleep 1/100)
                                 (incf *cleaned*)))))
               '(with-simple-restart (go-on "Go on.") (run-fibers (endless) :carrier-count 1))
               '(print (list :cleaned *cleaned* (list-all-fibers) sb-fiber::*groups*))
               ;; in a fiber that has the foreground
               '(let ((group (start-fibers nil :carrier-count 1)))
                 (sb-thread:release-foreground)
                 (fiber-join (submit-fiber group (make-fiber (lambda ()
                                                               (sb-thread::get-foreground)
                                                               (run-fibers (endless)))))
                  :default nil)
                 (sb-thread::get-foreground)
                 (finish-fibers group))
               '(print (list :cleaned *cleaned* (list-all-fibers) sb-fiber::*groups*))
               '(terpri)
               '(sb-ext:exit :code 7))
    (is-heard child ":NOW")
    (interrupt-child child)
    (is-heard child "0] ")
    (say child "(invoke-restart 'go-on)")
    (is-heard child "(:CLEANED 1 NIL NIL)")
    (is-heard child ":NOW")
    (interrupt-child child)
    (is-heard child "0] ")
    (say child "abort")
    (is-heard child "(:CLEANED 2 NIL NIL)")
    (is (= 7 (end-of child)))))

;;; Prevents: a fiber that is lost with its cleanup forms because of what the user evaluates in the
;;; debugger.
(test overflow-in-the-debugger
  (with-child (child
               '(defvar *cleaned* nil)
               '(defun recurse (n) (1+ (recurse (1+ n))))
               '(defvar *group* (start-fibers nil :carrier-count 1))
               '(defvar *fiber* (submit-fiber *group* (make-fiber (lambda ()
                                                                    (unwind-protect (recurse 1)
                                                                      (setf *cleaned* t))))))
               '(sb-thread:release-foreground)
               '(print (list (multiple-value-list (fiber-join *fiber* :default :none))
                             :cleaned *cleaned*))
               '(sb-thread::get-foreground)
               '(terpri)
               '(sb-ext:exit :code 7))
    (is-heard child "0] ")
    (say child "(recurse 1)")
    (is-heard child "0[2] ")
    (say child "abort")
    (is-heard child "0] ")
    (say child "abort")
    (is-heard child "((:NONE :ABORT) :CLEANED T)")
    (is (= 7 (end-of child)))))
