;;;; Making threads in fibers

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/zones.lisp" *load-truename*))
(load (merge-pathnames "support/stack-ends.lisp" *load-truename*))

(def-suite* thread)

(defun call-while-it-waits (group function)
  "Call FUNCTION with a fiber that waits to make a thread; return what the fiber does then."
  (let ((fiber (sb-thread::with-system-mutex (sb-thread::*make-thread-lock*)
                 (let ((fiber (spawn (group) (join-thread (make-thread (lambda () :made))))))
                   (is-true (wait-until (eq sb-thread::*make-thread-lock*
                                            (sb-thread::thread-waiting-for fiber))))
                   (sleep 1/20)
                   (funcall function fiber)
                   fiber))))
    (join fiber)))

(test makes-threads
  (on-carriers (n)
    (is (equal (loop for i below 20 collect i)
               (in-fibers n 20 (lambda (i) (join-thread (make-thread (lambda () i)))))))))

;;; Prevents: a fiber that has been given the lock and waits for a turn behind fibers that are
;;; stuck, while the monitor waits for the lock to make a spare.
(test a-fiber-that-waits-to-make-a-thread-keeps-its-carrier
  (on-carriers (n)
    (with-group (group n)
      (is (eq :made (call-while-it-waits group (lambda (fiber)
                                                 (is (eq :running (fiber-state fiber))))))))))

(test a-fiber-that-makes-a-thread-keeps-its-carrier
  (on-carriers (n)
    (is (eq :native (in-fiber (n) (sb-fiber::call-with-make-thread-lock #'zone-here))))))

(test no-complaint-about-that-wait
  (let ((old *blocked-carrier-action*))
    (unwind-protect
         (with-group (group 1)
           (setf *blocked-carrier-action* :error)
           (is (eq :made (call-while-it-waits group #'identity))))
      (setf *blocked-carrier-action* old))))

;;; Prevents: a monitor that waits for a thread whose end waits for a fiber.
(test threads-whose-end-waits-for-a-fiber
  (with-stuck-carrier-time (1/100)
    (let* ((end (make-flag)) (go-on (make-flag)) (stop (make-flag)) (handling (make-flag))
           (thread (make-thread (lambda () (wait-until (flag-value end))))))
      (with-group (group 1)
        ;; It waits in a handler, with the lock of what the thread gives at its end.
        (let ((fiber (spawn (group)
                       (handler-case
                           (handler-bind ((sb-sys:deadline-timeout
                                            (lambda (condition)
                                              (declare (ignore condition))
                                              (raise-flag handling)
                                              (loop until (flag-value go-on) do (fiber-park)))))
                             (sb-sys:with-deadline (:seconds 1/10) (join-thread thread)))
                         (sb-sys:deadline-timeout () :deadline)))))
          (is-true (wait-until (and (flag-value handling) (eq :parked (fiber-state fiber)))))
          (raise-flag end)
          (is-true (wait-until (member thread sb-thread::*joinable-threads*)))
          (let ((stuck (loop repeat 3 collect (spawn (group) (compute-until stop)))))
            (is (eq :runs (fiber-join (spawn (group) :runs) :default nil :timeout *patience*)))
            (raise-flag go-on)
            (fiber-unpark fiber)
            (is (eq :deadline (join fiber)))
            (raise-flag stop)
            (join-all stuck)))))))

;;; Prevents: *MAKE-THREAD-LOCK*, or one of the C library, that is held by handlers or by nobody.
(test threads-made-at-the-end-of-the-stack
  (on-carriers (n)
    (with-group (group n)
      (let ((overflows 0) (held 0))
        (loop for distance from 9000 downto 0 by 181
              do (unless (eql 1
                              (join
                               (spawn (group)
                                 (block nil
                                   (handler-bind ((storage-condition
                                                    (lambda (condition)
                                                      (declare (ignore condition))
                                                      (when (holding-mutex-p
                                                             sb-thread::*make-thread-lock*)
                                                        (incf held))
                                                      (return))))
                                     (call-at-distance
                                      distance
                                      (lambda () (join-thread (make-thread (lambda () 1))))))))))
                   (incf overflows)))
        (is (plusp overflows))
        (is (= 0 held))
        (is (eq :made (join (spawn (group) (join-thread (make-thread (lambda () :made)))))))))))

;;; Prevents: *JOINABLE-THREADS* with conses in an arena, which is used again.
(test threads-that-are-ending-in-an-arena
  (is (equal "NIL"
             (child-result
              '(let ((threads (loop repeat 3 collect (make-thread (lambda () (sleep 60)))))
                     (arena (sb-vm:new-arena 1048576)))
                (setf sb-thread::*joinable-threads* (copy-list threads))
                (sb-vm:with-arena (arena) (sb-fiber::pop-joined-thread nil))
                (prin1 (sb-vm:find-containing-arena
                        (sb-kernel:get-lisp-obj-address sb-thread::*joinable-threads*)))
                (finish-output)
                (sb-ext:exit :code 0 :abort t))))))

;;; Prevents: SAVE-LISP-AND-DIE that finds out too late that there is another thread; EXIT that
;;; cannot end it.
(test a-thread-that-warns-is-like-those-of-users
  (let* ((go-on (make-flag))
         (thread (sb-fiber::call-in-thread (lambda () (loop until (flag-value go-on)
                                                            do (sleep 1/100))))))
    (is-true (member thread (sb-thread:list-all-threads)))
    (sb-thread:terminate-thread thread)
    (is-true (wait-until (not (sb-thread:thread-alive-p thread))))
    (raise-flag go-on)))

;;;; Fibers in place of threads

(defun kind (&optional (thread sb-thread:*current-thread*))
  (if (typep thread 'fiber) :fiber :thread))

(test threads-as-fibers
  (on-carriers (n)
    (with-group (group n)
      (let ((thread (with-threads-as-fibers (:group group)
                      (make-thread (lambda (a b) (values (kind) a b))
                                   :name "as a thread" :arguments '(1 2)))))
        (is (eq :fiber (kind thread)))
        (is (equal "as a thread" (sb-thread:thread-name thread)))
        (is (equal '(:fiber 1 2) (multiple-value-list (join-thread thread))))
        (is (eq :thread (join-thread (make-thread #'kind)))))
      ;; In a fiber the group is known; and what is made so makes fibers, too.
      (is (eq :fiber
              (join (spawn (group)
                      (with-threads-as-fibers ()
                        (join-thread
                         (make-thread (lambda () (join-thread (make-thread #'kind)))))))))))))

(test threads-as-fibers-of-the-default-group
  (signals program-error (with-threads-as-fibers () (make-thread #'list)))
  (signals type-error (with-threads-as-fibers (:group 1) (make-thread #'list)))
  (start-fibers nil :carrier-count 1)
  (unwind-protect (is (eq :fiber (with-threads-as-fibers ()
                                   (join-thread (make-thread #'kind)))))
    (finish-fibers t)))

;;; Prevents: a timer that runs as a fiber of the group of what its signal interrupts.
(test timers-of-others-are-threads
  (with-group (group 1)
    (let* ((kinds (make-flag))
           (timer (sb-ext:make-timer (lambda () (note kinds (kind))) :thread t)))
      (with-threads-as-fibers (:group group)
        (loop for i from 1 to 20
              do (sb-ext:schedule-timer timer 1/1000)
                 (wait-until (= i (length (flag-notes kinds))))))
      (is (equal '(:thread) (remove-duplicates (flag-notes kinds)))))))

;;; Prevents: what the runtime makes threads for waiting for a fiber's turn.
(test threads-of-the-runtime-are-none
  (with-group (group 1)
    (with-threads-as-fibers (:group group)
      (is (eq :thread (kind (sb-fiber::make-os-thread #'list "test"))))
      (is (eq :thread (join (spawn (group) (with-threads-as-fibers () (call-blocking #'kind))))))
      ;; Its carrier is a thread.
      (with-group (other 1) (is (eq :ran (join (spawn (other) :ran))))))))

(test threads-of-bordeaux-threads-as-fibers
  (let ((*standard-output* (make-broadcast-stream)))
    (asdf:load-system "bordeaux-threads"))
  (with-group (group 2)
    (let ((names '()) (lock (make-mutex)))
      (flet ((note ()
               (with-mutex (lock)
                 (push (sb-thread:thread-name sb-thread:*current-thread*) names))
               (kind)))
        (is (equal '(:fiber :fiber :fiber)
                   (mapcar (lambda (thread)
                             (uiop:symbol-call "BORDEAUX-THREADS" "JOIN-THREAD" thread))
                           (with-threads-as-fibers (:group group)
                             (loop for name in '("a" "b" "c")
                                   collect (uiop:symbol-call "BORDEAUX-THREADS" "MAKE-THREAD"
                                                             #'note :name name))))))
        (is (equal '("a" "b" "c") (sort names #'string<)))))))
