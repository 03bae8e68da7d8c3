;;;; A fiber is a thread to all that ask: bindings, names, stacks, lists, owners, the debugger,
;;;; Ctrl-C, fork, profiling

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* identity)

;;;; SYMBOL-VALUE-IN-THREAD

(defvar *bound* :global)
(defvar *never-bound-by-fibers* :global)
(defvar *without-value*)

(defun value-in (symbol fiber)
  (multiple-value-list (sb-thread:symbol-value-in-thread symbol fiber nil)))

(defun problem-in (symbol fiber)
  (handler-case (progn (sb-thread:symbol-value-in-thread symbol fiber) nil)
    (sb-thread:symbol-value-in-thread-error (condition)
      (second (sb-thread::symbol-value-in-thread-error-info condition)))))

(defmacro with-fibers-in-all-states ((group carrier-count fibers) &body body)
  "Execute BODY with FIBERS bound to a fiber that is parked, one that is mounted and computes, and
one that is or is not as it likes: in each *BOUND* is 1, below which it is 0, and *WITHOUT-VALUE* is
bound to nothing."
  `(with-group (,group ,carrier-count)
     (let ((stop nil))
       (flet ((begin (function)
                (spawn (,group)
                  (let ((*bound* 0))
                    (let ((*bound* 1) (*without-value*))
                      (makunbound '*without-value*)
                      (funcall function)
                      *bound*)))))
         (let* ((parked (begin #'fiber-park))
                (restless (begin (lambda () (loop until stop do (fiber-yield)))))
                (ready (sb-thread:make-semaphore))
                (mounted (progn (wait-until-parked parked)
                                (begin (lambda ()
                                         (sb-thread:signal-semaphore ready)
                                         (loop until stop))))))
           (sb-thread:wait-on-semaphore ready)
           (let ((,fibers (list parked mounted restless)))
             (unwind-protect (progn ,@body)
               (setf stop t)
               (fiber-unpark parked))))))))

;;; Prevents: the carrier's value, a value that the fiber had bound before, or none, in one of the
;;; states.
(test symbol-value-in-fibers
  (on-carriers (n :counts '(2 16))
    (with-fibers-in-all-states (group n fibers)
      (dolist (fiber fibers)
        (loop repeat 20
              do (unless (equal '(1 t) (value-in '*bound* fiber))
                   (fail "~S in ~S" (value-in '*bound* fiber) fiber)))
        (is (equal '(1 t) (value-in '*bound* fiber)))
        (is (equal '(nil nil) (value-in '*never-bound-by-fibers* fiber)))
        (is (eq :no-tls-value (problem-in '*never-bound-by-fibers* fiber)))
        (is (eq :unbound-in-thread (problem-in '*without-value* fiber)))
        (is (equal (list fiber t) (value-in 'sb-thread:*current-thread* fiber))))
      ;; A fiber asks for those of others, and for its own.
      (is (equal '((1 t) (1 t) (1 t) (nil nil) (2 t))
                 (join (spawn (group)
                         (append (mapcar (lambda (fiber) (value-in '*bound* fiber)) fibers)
                                 (list (value-in '*bound* (current-fiber))
                                       (let ((*bound* 2))
                                         (value-in '*bound* (current-fiber)))))))))
      (dolist (fiber fibers)
        (setf (sb-thread:symbol-value-in-thread '*bound* fiber) (list fiber))
        (is (equal (list (list fiber) t) (value-in '*bound* fiber)))
        (signals sb-thread:symbol-value-in-thread-error
          (setf (sb-thread:symbol-value-in-thread '*never-bound-by-fibers* fiber) 2)))
      (is (eq :global *bound*))
      (is (eq :global *never-bound-by-fibers*))
      (sb-ext:gc)
      (is (every (lambda (fiber) (equal (list (list fiber) t) (value-in '*bound* fiber))) fibers))
      (setf stop t)
      (fiber-unpark (first fibers))
      (is (equal (mapcar #'list fibers) (join-all fibers)))
      (is (eq :thread-dead (problem-in '*bound* (first fibers)))))
    (is (eq :no-tls-value (problem-in '*bound* (make-fiber #'list))))))

;;; Prevents: an allocation while the world is stopped.
(test symbol-value-conses-nothing
  (with-group (group 1)
    (let ((fiber (wait-until-parked (spawn (group) (let ((*bound* 1)) (fiber-park) *bound*))))
          (before (sb-ext:get-bytes-consed)))
      (is (loop repeat 20000
                always (eql 1 (sb-fiber::symbol-value-in-fiber '*bound* fiber))
                do (sb-fiber::set-symbol-value-in-fiber '*bound* fiber 1)))
      (is (< (- (sb-ext:get-bytes-consed) before) (* 20000 16)))
      (fiber-unpark fiber)
      (is (eql 1 (join fiber))))))

;;; While many fibers change their states and carriers, and the world is stopped for others too.
(test symbol-value-while-switching
  (on-carriers (n)
    (let ((stop nil))
      (with-group (group n)
        (let ((fibers (loop for i below 40
                            collect (let ((i i))
                                      (spawn (group)
                                        (let ((*bound* i))
                                          (loop until stop
                                                do (if (evenp i) (fiber-yield) (sleep 1/10000)))
                                          (eql *bound* i)))))))
          (unwind-protect
               (is (loop repeat 5
                         always (loop for fiber in fibers
                                      for i from 0
                                      for (value found) = (value-in '*bound* fiber)
                                      always (or (eql value i) (not found))) ; it may not have begun
                         do (sb-ext:gc)))
            (setf stop t))
          (is (every #'identity (join-all fibers))))))))

;;; Also when the fiber is not mounted, when a collection has moved the value, and from a fiber.
(test symbol-value-in-thread
  (on-carriers (n)
    (with-group (group n)
      (let ((fiber (wait-until-parked (spawn (group)
                                        (let ((*print-base* 7) (*print-radix* (list 1)))
                                          (fiber-park)
                                          (list *print-base* *print-radix*))))))
        (sb-ext:gc)
        (flet ((value (symbol) (sb-thread:symbol-value-in-thread symbol fiber)))
          (is (eql 7 (value '*print-base*)))
          (is (equal '(1) (value '*print-radix*)))
          (is (equal '(1) (join (spawn (group) (value '*print-radix*)))))
          (setf (sb-thread:symbol-value-in-thread '*print-base* fiber) 8)
          (is (eql 8 (value '*print-base*)))
          (fiber-unpark fiber)
          (is (equal '(8 (1)) (join fiber)))
          (signals error (value '*print-base*)))))))

;;;; Names, numbers, lists

(defun os-thread-names ()
  (loop for file in (directory "/proc/self/task/*/comm" :resolve-symlinks nil)
        collect (ignore-errors (with-open-file (in file) (read-line in)))))

(defun rename-oneself (name)
  "Rename the current thread; return its name, and whether an OS thread has it too."
  (setf (sb-thread:thread-name sb-thread:*current-thread*) (coerce name 'simple-base-string))
  (list (sb-thread:thread-name sb-thread:*current-thread*)
        (consp (member name (os-thread-names) :test #'equal))))

;;; Prevents: the carrier's OS thread under the name of a fiber.
(test renaming-oneself
  (with-group (group 1)
    (is (equal '("renamed fiber" nil)
               (join (spawn (group :name "a name") (rename-oneself "renamed fiber")))))
    (is (equal '("renamed thread" t)
               (sb-thread:join-thread (sb-thread:make-thread #'rename-oneself
                                                             :arguments '("renamed thread")))))
    (let ((fiber (make-fiber #'list)))
      (setf (sb-thread:thread-name fiber) "late")
      (is (string= "late" (fiber-name fiber))))))

(test slots-that-name-an-os-thread
  (with-group (group 2)
    (let* ((fibers (loop repeat 50 collect (wait-until-parked (spawn (group) (fiber-park)))))
           (numbers (mapcar #'sb-thread::thread-os-tid fibers)))
      (is (= 50 (length (remove-duplicates numbers))))
      (is (every (lambda (number) (>= number (expt 2 31))) numbers))
      (is (every (lambda (fiber) (= 0 (sb-thread::thread-os-thread fiber))) fibers))
      (is (every #'sb-thread:thread-alive-p fibers))
      (is (notany #'sb-thread::thread-ephemeral-p fibers))
      (mapc #'fiber-unpark fibers)
      (join-all fibers)
      (is (notany #'sb-thread:thread-alive-p fibers)))))

;;; Prevents: a fiber where a thread structure is expected.
(test lists-of-threads
  (with-group (group 2)
    (let ((fiber (wait-until-parked (spawn (group) (fiber-park)))))
      (flet ((lists ()
               (list (sb-thread:list-all-threads)
                     (sb-thread::avltree-filter #'sb-thread::avlnode-data
                                                sb-thread::*all-threads*))))
        (dolist (list (append (lists) (join (spawn (group) (lists)))))
          (is (notany #'sb-fiber::fiber-p list))))
      ;; carriers are hidden, and are among all threads
      (is (equal (list sb-thread:*current-thread*) (sb-thread:list-all-threads)))
      (is (member fiber (list-all-fibers)))
      (is (eq nil (join (spawn (group) (sb-thread:main-thread-p)))))
      (is (eq t (join (spawn (group)
                        (sb-thread:main-thread-p (sb-thread:main-thread))))))
      (fiber-unpark fiber))))

(test states-for-users
  (with-group (group 1)
    (let ((mutex (sb-thread:make-mutex :name "the mutex"))
          (semaphore (sb-thread:make-semaphore)))
      (multiple-value-bind (in out) (sb-unix:unix-pipe)
        (sb-thread:with-mutex (mutex)
          (flet ((reason (fiber)
                   (wait-until-parked fiber)
                   (prog1 (nth-value 1 (fiber-state fiber))
                     (is (stringp (princ-to-string fiber)))
                     (terminate-fiber fiber))))
            (is (equal (list :mutex mutex) (reason (spawn (group) (sb-thread:grab-mutex mutex)))))
            (is (equal (list :mutex mutex)
                       (reason (spawn (group) (sb-thread:grab-mutex mutex :timeout 3600)))))
            (is (equal (list :semaphore semaphore)
                       (reason (spawn (group) (sb-thread:wait-on-semaphore semaphore)))))
            (is (eq :sleep (reason (spawn (group) (sleep 3600)))))
            (is (equal (list :read in)
                       (reason (spawn (group) (sb-sys:wait-until-fd-usable in :input)))))
            (is (equal '(:a :b) (reason (spawn (group) (fiber-park :reason '(:a :b))))))))
        (let ((fiber (wait-until-parked (spawn (group :name "reader")
                                          (sb-sys:wait-until-fd-usable in :input)))))
          (is (search (format nil "\"reader\" parked on read ~D" in) (princ-to-string fiber)))
          (is (search "READ" (with-output-to-string (*standard-output*) (describe fiber))))
          (is (search "FIBER" (with-output-to-string (*standard-output*)
                                (let ((*standard-input* (make-string-input-stream "q")))
                                  (inspect fiber)))))
          (terminate-fiber fiber)
          (fiber-join fiber :default nil :timeout *patience*))
        (sb-unix:unix-close in)
        (sb-unix:unix-close out)))))

;;;; Owners

(test owners-of-mutexes
  (on-carriers (n)
    (with-group (group n)
      (let* ((mutex (sb-thread:make-mutex))
             (fiber (wait-until-parked (spawn (group :name "the owner")
                                         (sb-thread:grab-mutex mutex)
                                         (fiber-park)
                                         (prog1 (list (sb-thread:holding-mutex-p mutex)
                                                      (sb-thread:mutex-owner mutex))
                                           (fiber-park))))))
        (is (eq fiber (sb-thread:mutex-owner mutex)))
        (is (not (sb-thread:holding-mutex-p mutex)))
        (is (search "the owner" (princ-to-string mutex)))
        (fiber-unpark fiber)
        (wait-until-parked fiber)
        (fiber-unpark fiber)
        (is (equal (list t fiber) (join fiber)))
        ;; It has not released it.
        (is (eq :thread-dead (sb-thread:mutex-owner mutex)))))))

;;; Prevents: a dead fiber that waits for something in the eyes of the deadlock detection.
(test the-dead-wait-for-nothing
  (on-carriers (n)
    (with-group (group n)
      (let ((mutex (sb-thread:make-mutex)))
        (sb-thread:with-mutex (mutex)
          (let ((fiber (wait-until-parked (spawn (group) (sb-thread:grab-mutex mutex)))))
            (is (eq mutex (sb-thread::thread-waiting-for fiber)))
            (terminate-fiber fiber)
            (fiber-join fiber :default nil :timeout *patience*)
            (is (null (sb-thread::thread-waiting-for fiber)))))))))

;;;; Stacks

(test whose-stack
  (on-carriers (n)
    (with-group (group n)
      (let* ((object nil)
             (fiber (wait-until-parked
                     (spawn (group)
                       (let ((list (list 1 2)))
                         (declare (dynamic-extent list))
                         (setf object list)
                         (fiber-park)
                         (list (sb-debug::stack-allocated-p list)
                               (sb-debug::stack-allocated-p list t)
                               (sb-debug::stack-allocated-p (list 1))))))))
        (is (null (sb-debug::stack-allocated-p object)))
        (is (eq fiber (sb-debug::stack-allocated-p object t)))
        (is (eq fiber (join (spawn (group) (sb-debug::stack-allocated-p object t)))))
        (setf object nil)
        (fiber-unpark fiber)
        (is (equal (list fiber fiber nil) (join fiber)))))))

(defun deeper (n)
  (if (= n 0)
      (sb-kernel::control-stack-usage)
      (let ((list (list n n)))
        (declare (dynamic-extent list))
        (max (deeper (1- n)) (length list)))))

(test stack-usage
  (with-group (group 2)
    (destructuring-bind (shallow deep start end)
        (join (spawn (group :stack-size (* 1024 1024))
                (list (deeper 0) (deeper 1000)
                      (sb-thread::thread-control-stack-start sb-thread:*current-thread*)
                      (sb-thread::thread-control-stack-end sb-thread:*current-thread*))))
      (is (< 0 shallow (* 16 1024)))
      (is (< (+ shallow 16000) deep (* 1024 1024)))
      (is (<= (* 1024 1024) (- end start) (* 2 1024 1024))))))

(test backtraces
  (on-carriers (n)
    (with-group (group n)
      (flet ((names (frames)
               (mapcar #'first frames)))
        (let ((names (names (join (spawn (group) (fiber-yield) (sb-debug:list-backtrace))))))
          (is (member 'sb-fiber::%run-fiber names))
          (is (< (length names) 20)))
        (is (search "SB-FIBER::%RUN-FIBER"
                    (join (spawn (group)
                            (with-output-to-string (out)
                              (sb-debug:print-backtrace :stream out :print-thread t))))))))))

;;;; Threads that are no carriers

(sb-ext:defglobal **to-do** nil)
(sb-ext:defglobal **result** nil)

(defun do-what-is-to-do ()
  (setf **result** (handler-case (funcall **to-do**)
                     (error (condition) (princ-to-string condition)))))

(sb-alien:define-alien-callable called-in-foreign-thread sb-alien:unsigned ()
  (do-what-is-to-do)
  0)

(defun result-in-foreign-thread (function)
  "What FUNCTION returns, called back in a thread that C has made."
  (setf **to-do** function **result** nil)
  (sb-alien:with-alien ((thread sb-alien:unsigned))
    (assert (= 0 (sb-alien:alien-funcall
                  (sb-alien:extern-alien "pthread_create"
                                         (function sb-alien:int (* sb-alien:unsigned)
                                                   sb-alien:unsigned
                                                   sb-sys:system-area-pointer sb-alien:unsigned))
                  (sb-alien:addr thread) 0
                  (sb-alien:alien-sap (sb-alien::alien-callable-function 'called-in-foreign-thread))
                  0)))
    (sb-alien:alien-funcall
     (sb-alien:extern-alien "pthread_join"
                            (function sb-alien:int sb-alien:unsigned sb-alien:unsigned))
     thread 0))
  **result**)

;;; It has no carrier: it waits natively, for fibers too.
(test foreign-threads
  (on-carriers (n)
    (with-group (group n)
      (let* ((mutex (sb-thread:make-mutex))
             (fiber (wait-until-parked (spawn (group)
                                         (sb-thread:with-mutex (mutex) (fiber-park))
                                         :done))))
        (is (equal '(nil nil :unparked :done t)
                   (result-in-foreign-thread
                    (lambda ()
                      (list (current-fiber)
                            (fiber-can-park-p)
                            (progn (fiber-unpark fiber)
                                   (sb-thread:with-mutex (mutex) :unparked))
                            (join fiber)
                            (progn (sleep 1/1000) (fiber-yield) t))))))))))

;;;; Ends

(test ends-of-threads
  (on-carriers (n)
    (with-group (group n)
      (is (equal '(1 2) (multiple-value-list
                         (join (spawn (group) (sb-thread:return-from-thread (values 1 2)))))))
      (is (equal '(1 2) (multiple-value-list
                         (join (spawn (group)
                                 (sb-thread:return-from-thread (values 1 2) :allow-exit t))))))
      (is (eq :abort (nth-value 1 (fiber-join (spawn (group) (sb-thread:abort-thread :allow-exit t))
                                              :default nil))))
      (is (eq :abort (nth-value 1 (fiber-join (spawn (group) (throw 'sb-impl::toplevel-catcher nil))
                                              :default nil))))
      ;; The carriers live on.
      (is (eq :alive (join (spawn (group) :alive)))))))

;;;; Processes made from this one

(test fork
  (is (string= "(:REFUSED 11 :REFUSED 12)"
               (child-result
                '(progn
                  (require :sb-posix)
                  (flet ((fork (code)
                           (handler-case
                               (let ((pid (funcall (intern "FORK" "SB-POSIX"))))
                                 (when (= pid 0)
                                   ;; fibers work in the child
                                   (sb-ext:exit
                                    :code (first (run-fibers
                                                  (make-fiber (lambda () (sleep 1/100) code))
                                                  :carrier-count 2))
                                    :abort t))
                                 (ash (nth-value 1 (funcall (intern "WAITPID" "SB-POSIX") pid 0))
                                      -8))
                             (error (condition)
                               (if (search "FINISH-FIBERS" (princ-to-string condition))
                                   :refused
                                   condition)))))
                    (let* ((first (fork 11))
                           (group (start-fibers nil :carrier-count 2))
                           (refused (fork 1))
                           (refused-too (fiber-join
                                         (submit-fiber group (make-fiber (lambda () (fork 2)))))))
                      (finish-fibers group)
                      (prin1 (list refused first refused-too (fork 12)))
                      (terpri))))
                :wrapper '("timeout" "60")))))

;;;; sb-sprof

(defun profile (mode)
  (child-result
   `(progn
      (require :sb-sprof)
      (defun burn (n) (loop repeat n sum (length (make-list 100)) do (fiber-yield)))
      (let ((stop nil)
            (group (start-fibers nil :carrier-count 4)))
        (funcall (intern "START-PROFILING" "SB-SPROF") :mode ,mode :sample-interval 0.0005
                 :max-samples 100000)
        (let ((fibers (loop repeat 20
                            collect (submit-fiber
                                     group
                                     (make-fiber (lambda ()
                                                   (handler-bind ((warning #'muffle-warning))
                                                     (loop until stop
                                                           do (burn 100)
                                                              (sleep 1/1000)))))))))
          (sleep 1)
          (sb-ext:gc)
          (setf stop t)
          (mapc #'fiber-join fibers)
          (funcall (intern "STOP-PROFILING" "SB-SPROF")))
        (finish-fibers group)
        (let ((found nil) (threads '()))
          (let ((*standard-output* (make-broadcast-stream)))
            (funcall (intern "REPORT" "SB-SPROF") :type :flat :max 1))
          (funcall (intern "MAP-TRACES" "SB-SPROF")
                   (lambda (thread trace)
                     (pushnew thread threads)
                     (funcall (intern "MAP-TRACE-PC-LOCS" "SB-SPROF")
                              (lambda (info pc)
                                (declare (ignore pc))
                                (when (search "%RUN-FIBER" (princ-to-string info)) (setf found t)))
                              trace))
                   (symbol-value (intern "*SAMPLES*" "SB-SPROF")))
          (terpri)
          (prin1 (list found
                       (and (some #'sb-thread::thread-ephemeral-p threads)
                            (notany #'sb-fiber::fiber-p threads))))
          (terpri))))
   :wrapper '("timeout" "60")))

;;; Prevents: a crash of the handler on a fiber's stack. A trace leads through the fiber's stack to
;;; its base, and counts for the carrier.
(test sb-sprof
  (dolist (mode '(:cpu :alloc :time))
    (let ((text (profile mode)))
      (is (string= "(T T)" (subseq text (max 0 (- (length text) 5)))) "~A: ~A" mode text))))
