;;;; Tests of waiting for child processes in fibers and threads

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* process)

(defun start-shell (command &rest arguments)
  (apply #'sb-ext:run-program "/bin/sh" (list "-c" command) :wait nil arguments))

(defun exit-code (command)
  (sb-ext:process-exit-code (sb-ext:run-program "/bin/sh" (list "-c" command))))

(defun open-descriptors ()
  (length (directory "/proc/self/fd/*" :resolve-symlinks nil)))

(test run-program-waits
  (on-carriers (n)
    (is (equal '(7 0) (in-fiber (n) (list (exit-code "exit 7") (exit-code "sleep 0.05")))))))

(test run-program-many
  (on-carriers (n)
    (is (equal (loop for i below 20 collect i)
               (in-fibers n 20
                          (lambda (i)
                            (exit-code (format nil "sleep 0.0~D; exit ~D" (mod i 5) i))))))))

;;; The process goes on until the fiber that would be blocked has opened its way.
(test other-fibers-run-meanwhile
  (on-carriers (n)
    (is (equal '(3 :written)
               (let ((process nil) (started (sb-thread:make-semaphore)))
                 (in-fibers n 2
                            (lambda (i)
                              (cond ((= i 0)
                                     (setf process (start-shell "read line; exit $line"
                                                                :input :stream))
                                     (sb-thread:signal-semaphore started)
                                     (sb-ext:process-exit-code (sb-ext:process-wait process)))
                                    (t (sb-thread:wait-on-semaphore started)
                                       (write-line "3" (sb-ext:process-input process))
                                       (finish-output (sb-ext:process-input process))
                                       :written)))))))))

(test output-to-a-stream
  (on-carriers (n)
    (is (equal (loop for i below 8 collect (format nil "~D~%~D~%" i i))
               (in-fibers n 8 (lambda (i)
                                (with-output-to-string (out)
                                  (sb-ext:run-program
                                   "/bin/sh"
                                   (list "-c" (format nil "echo ~D; sleep 0.02; echo ~:*~D" i))
                                   :output out))))))))

(test much-output
  (is (= 200000 (in-fiber (2)
                  (length (with-output-to-string (out)
                            (sb-ext:run-program "/bin/sh"
                                                '("-c" "head -c 200000 /dev/zero | tr '\\0' x")
                                                :output out)))))))

;;; All that wait for one process are told, fibers and threads.
(test several-wait-for-one-process
  (on-carriers (n)
    (let* ((process (start-shell "sleep 0.2; exit 5"))
           (threads (loop repeat 3 collect (sb-thread:make-thread
                                            (lambda () (sb-ext:process-exit-code
                                                        (sb-ext:process-wait process)))))))
      (is (equal '(5 5 5 5 5)
                 (in-fibers n 5 (lambda (i)
                                  (declare (ignore i))
                                  (sb-ext:process-exit-code (sb-ext:process-wait process))))))
      (is (equal '(5 5 5) (mapcar #'sb-thread:join-thread threads))))))

(test fibers-and-threads-wait-for-different-processes
  (on-carriers (n :migration '(nil))
    (let ((threads (loop for i below 4
                         collect (let ((i i))
                                   (sb-thread:make-thread
                                    (lambda ()
                                      (exit-code (format nil "sleep 0.0~D; exit ~D" i i))))))))
      (is (equal '(10 11 12 13 14 15)
                 (in-fibers n 6
                            (lambda (i)
                              (exit-code (format nil "sleep 0.0~D; exit ~D" i (+ i 10)))))))
      (is (equal '(0 1 2 3) (mapcar #'sb-thread:join-thread threads))))))

;;; Prevents: a descriptor that was opened and not noted yet when the waiter was unwound, or one
;;; that is in the list of those to be written to and has been closed.
(test waits-that-are-unwound
  (let ((process (start-shell "exec sleep 60")))
    (unwind-protect
         (on-carriers (n)
           (with-group (group n)
             (let ((descriptors (open-descriptors)))
               (loop for i below 100
                     do (let ((fiber (spawn (group) (sb-ext:process-wait process)))
                              (thread
                                (make-thread #'sb-ext:process-wait :arguments (list process))))
                          (loop repeat (random 20) do (sb-thread:thread-yield))
                          (terminate-fiber fiber)
                          (sb-thread:terminate-thread thread)
                          (is (eq :abort (nth-value 1
                                                    (fiber-join fiber :default nil
                                                                :timeout *patience*))))
                          (join-thread thread :default nil :timeout *patience*)))
               (is (= descriptors (open-descriptors)))
               (is (null (sb-impl::process-serve-event-pipe process))))))
      (sb-ext:process-kill process sb-unix:sigkill)
      (sb-ext:process-wait process))))

(test a-process-that-has-ended
  (is (eql 4 (in-fiber ()
               (let ((process (start-shell "exit 4")))
                 (sleep 1/10)
                 (sb-ext:process-exit-code (sb-ext:process-wait (sb-ext:process-wait process))))))))

(defun call-with-sleeper (function)
  (let ((process (start-shell "exec sleep 100")))
    (unwind-protect (funcall function process)
      ;; Its number may be that of another by now.
      (when (sb-ext:process-alive-p process) (sb-ext:process-kill process sb-unix:sigkill))
      (sb-ext:process-wait process))))

(test a-process-that-is-stopped
  (on-carriers (n)
    (is (equal '(:stopped :killed :signaled 9)
               (in-fiber (n)
                 (let ((process (start-shell "exec sleep 100")) (waiting nil))
                   (let ((waiter (spawn ((fiber-group (current-fiber)))
                                   (setf waiting t)
                                   (sb-ext:process-status (sb-ext:process-wait process t)))))
                     (loop until waiting do (fiber-yield))
                     (sb-ext:process-kill process sb-unix:sigstop)
                     (list (join waiter)
                           (progn (sb-ext:process-kill process sb-unix:sigkill) :killed)
                           (sb-ext:process-status (sb-ext:process-wait process))
                           (sb-ext:process-exit-code process)))))))))

;;; A waiter that does not ask for it is not told that the process was stopped.
(test a-stopped-process-that-goes-on
  (is (eql 0 (in-fiber (2)
               (let* ((process (start-shell "kill -STOP $$; exit 0"))
                      (waiter (spawn ((fiber-group (current-fiber)))
                                (sb-ext:process-exit-code (sb-ext:process-wait process)))))
                 (loop until (eq :stopped (sb-ext:process-status process)) do (sleep 1/100))
                 (sb-ext:process-kill process sb-unix:sigcont)
                 (join waiter))))))

(test a-terminated-waiter-leaves-nothing-behind
  (let ((before (open-descriptors)))
    (call-with-sleeper
     (lambda (process)
       (with-group (group 2)
         (let ((fibers (loop repeat 5 collect (spawn (group) (sb-ext:process-wait process)))))
           (loop until (every (lambda (fiber) (eq :parked (fiber-state fiber))) fibers)
                 do (sleep 1/100))
           (dolist (fiber (rest fibers)) (terminate-fiber fiber))
           (dolist (fiber (rest fibers))
             (is (eq :abort (nth-value 1 (fiber-join fiber :default nil :timeout *patience*)))))
           ;; The one that is left is still told.
           (sb-ext:process-kill process sb-unix:sigkill)
           (is (eq process (join (first fibers))))))))
    (is (= before (open-descriptors)))))

(test with-timeout-around-process-wait
  (call-with-sleeper
   (lambda (process)
     (is (eq :timeout (in-fiber () (handler-case (sb-ext:with-timeout 1/20
                                                   (sb-ext:process-wait process))
                                     (sb-ext:timeout () :timeout))))))))

(test status-hook
  (on-carriers (n :migration '(nil))
    (let ((statuses '()))
      (in-fiber (n)
        (sb-ext:process-wait
         (start-shell "exit 0" :status-hook (lambda (process)
                                              (push (sb-ext:process-status process) statuses)))))
      (is (sb-ext:wait-for (equal '(:exited) statuses) :timeout *patience*)))))

(test process-close-in-a-fiber
  (is (equal '(nil :exited)
             (in-fiber ()
               (let ((process (start-shell "cat" :input :stream :output :stream)))
                 (close (sb-ext:process-input process))
                 (list (read-line (sb-ext:process-output process) nil)
                       (prog1 (sb-ext:process-status (sb-ext:process-wait process))
                         (sb-ext:process-close process))))))))

;;; Prevents: a descriptor that is closed, and still written to, when it is another file's.
(test deadline-while-a-wait-ends
  (let ((held (make-semaphore)) (wanted (make-semaphore)) (armed t) (process nil))
    (let ((holder (make-thread (lambda ()
                                 (wait-on-semaphore wanted)
                                 (sb-thread::with-system-mutex (sb-impl::*active-processes-lock*)
                                   (signal-semaphore held)
                                   (sleep 1))))))
      (setf process (sb-ext:run-program "/bin/sh" '("-c" "sleep 0.2; kill -STOP $$; exit 3")
                                        :wait nil))
      (sb-int:encapsulate 'sb-ext:process-status 'test
                          (lambda (status process)
                            (let ((result (funcall status process)))
                              (when (and armed (eq result :stopped))
                                (setf armed nil)
                                (signal-semaphore wanted)
                                (wait-on-semaphore held))
                              result)))
      (unwind-protect
           (in-fiber ()
             (handler-case (sb-sys:with-deadline (:seconds 1/2)
                             (sb-ext:process-wait process t))
               (sb-sys:deadline-timeout ())))
        (sb-int:unencapsulate 'sb-ext:process-status 'test))
      (join-thread holder)
      (is (null (sb-impl::process-serve-event-pipe process)))
      (sb-ext:process-kill process 18)  ; SIGCONT
      (sb-ext:process-wait process)
      (is (= 3 (sb-ext:process-exit-code process))))))
