;;;; Signals that come to fibers, and handlers that park while their signal contexts are on the
;;;; stack

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* signals)

;;;; Live signal contexts: in a handler of an error that a trap has signalled

(defun trap (n)
  "An error with a signal context on the stack."
  (if (evenp n)
      (car (opaque 1))
      (symbol-value (opaque '*unbound*))))

(defun in-handlers (depth function)
  "Call FUNCTION in DEPTH nested handlers of errors that traps have signalled."
  (if (= depth 0)
      (funcall function)
      (handler-case
          (handler-bind ((error (lambda (condition)
                                  (declare (ignore condition))
                                  (pause)
                                  (return-from in-handlers
                                    (multiple-value-prog1 (in-handlers (1- depth) function)
                                      (pause))))))
            (trap depth))
        (error () :not-reached))))

;;; Prevents: contexts of several fibers of a carrier that share the thread's array of contexts;
;;; leaving in another order than entering; a fiber resumed by another carrier than the one its
;;; context belongs to.
(test handlers-of-traps-that-park
  (on-carriers (n)
    (is (equal (loop for i below 50 collect (list i i (mod i 4) 0))
               (in-fibers n 50
                          (lambda (i)
                            (list i
                                  (in-handlers (mod i 4)
                                               (lambda () (loop repeat (mod i 7) do (pause)) i))
                                  (in-handlers (mod i 4)
                                               (lambda ()
                                                 (pause)
                                                 sb-kernel:*free-interrupt-context-index*))
                                  sb-kernel:*free-interrupt-context-index*)))))))

(test traps-and-unwinding
  (on-carriers (n)
    (is (equal (loop for i below 40 collect (loop for k below 20 collect (+ i k)))
               (in-fibers n 40
                          (lambda (i)
                            (loop for k below 20
                                  collect (handler-case
                                              (unwind-protect
                                                   (handler-bind
                                                       ((error (lambda (condition)
                                                                 (declare (ignore condition))
                                                                 (pause))))
                                                     (trap k))
                                                (pause))
                                            (error () (pause) (+ i k))))))))))

;;; The context holds the registers of the interrupted function: it must go on with them.
(test traps-that-are-continued
  (on-carriers (n)
    (is (equal (loop for i below 40 collect (+ i (* 7 10)))
               (in-fibers n 40
                          (lambda (i)
                            (handler-bind ((unbound-variable (lambda (condition)
                                                               (pause)
                                                               (use-value 7 condition))))
                              (let ((sum i))
                                (loop repeat 10 do (incf sum (symbol-value (opaque '*unbound*))))
                                sum))))))))

;;;; Signals

(defun make-signal-set (signal)
  (let ((set (make-array 128 :element-type '(unsigned-byte 8) :initial-element 0)))
    (multiple-value-bind (byte bit) (floor (1- signal) 8)
      (setf (ldb (byte 1 bit) (aref set byte)) 1))
    set))

(defun change-mask (how signal)
  (let ((set (make-signal-set signal)))
    (sb-sys:with-pinned-objects (set)
      (sb-alien:alien-funcall
       (sb-alien:extern-alien "pthread_sigmask"
                              (function sb-alien:int sb-alien:int sb-sys:system-area-pointer
                                        sb-sys:system-area-pointer))
       how (sb-sys:vector-sap set) (sb-sys:int-sap 0)))))

(defconstant sig-block 0)
(defconstant sig-unblock 1)

(defun call-in-signal-storm (interval handler function)
  "Call FUNCTION while SIGALRM comes every INTERVAL microseconds to the threads that have unblocked
it, and is handled by HANDLER."
  (change-mask sig-block sb-unix:sigalrm)
  (sb-sys:enable-interrupt sb-unix:sigalrm handler)
  (unwind-protect
       (progn (sb-unix::unix-setitimer :real 0 interval 0 interval)
              (funcall function))
    (sb-unix::unix-setitimer :real 0 0 0 0)
    ;; one may be pending
    (sb-sys:enable-interrupt sb-unix:sigalrm (lambda (&rest ignore) (declare (ignore ignore))))
    (change-mask sig-unblock sb-unix:sigalrm)
    (sb-sys:enable-interrupt sb-unix:sigalrm #'sb-unix::sigalrm-handler)))

(sb-ext:defglobal **signals** 0)
(declaim (type fixnum **signals**))

(defun count-signal (&rest ignore)
  (declare (ignore ignore))
  (sb-ext:atomic-incf **signals**))

(defmacro until-signals (n &body body)
  "Execute BODY until N signals have been handled since the test began."
  `(loop until (>= **signals** ,n)
         do (progn ,@body)))

;;; Each kind of code has a switch between a handler deferred while interrupts are enabled and one
;;; found deferred while they are not. Prevents: the end of the process ("pseudo_atomic_interrupted
;;; after interrupt_handle_pending"), and signals that stay blocked.
(defun storm (carrier-count handler &optional (signals 3000))
  (setf **signals** 0)
  (let ((mutex (sb-thread:make-mutex)) (count 0) (increments 0))
    (call-in-signal-storm
     50 handler
     (lambda ()
       (in-fibers carrier-count 12
                  (lambda (i)
                    (change-mask sig-unblock sb-unix:sigalrm)
                    (until-signals signals
                      (change-mask sig-unblock sb-unix:sigalrm) ; the next carrier may be a new one
                      (case (mod i 4)
                        (0 (sb-thread::with-system-mutex (mutex)
                             (let ((old count))
                               (fiber-yield)
                               (setf count (1+ old)))))
                        (1 (sb-sys:without-interrupts
                             (fiber-yield)
                             (sb-sys:with-interrupts (fiber-yield))))
                        (2 (fiber-yield)
                         (let ((*variable* i)) (fiber-yield)))
                        (3 (sleep (opaque 1/20000))
                         (sb-thread:with-mutex (mutex) (incf increments)))))
                    (change-mask sig-block sb-unix:sigalrm)))))
    (values (>= **signals** signals) (sb-thread:mutex-owner mutex))))

(test signal-storm
  (on-carriers (n)
    (is (equal '(t nil) (multiple-value-list (storm n #'count-signal))))))

;;; The handler interrupts a fiber, which parks in it.
(test signal-storm-with-handlers-that-park
  (on-carriers (n)
    (is (equal '(t nil)
               (multiple-value-list
                (storm n
                       (lambda (&rest ignore)
                         (declare (ignore ignore))
                         (when (= 0 (mod (sb-ext:atomic-incf **signals**) 4))
                           (fiber-yield)))
                       2000))))))

(test signal-storm-with-collections
  (on-carriers (n :migration '(nil))
    (is (equal '(t nil)
               (multiple-value-list
                (storm n
                       (lambda (&rest ignore)
                         (declare (ignore ignore))
                         (when (= 0 (mod (sb-ext:atomic-incf **signals**) 100))
                           (sb-ext:gc)))
                       1000))))))

(defun carrier-threads (group)
  (remove nil (mapcar #'sb-thread::thread-os-thread
                      (mapcar #'sb-fiber::carrier-thread (sb-fiber::fiber-group-carriers group)))
          :test #'eql))

;;; SIGURG is what INTERRUPT-THREAD sends. One that comes for nothing must do nothing.
(test stray-sigurg
  (on-carriers (n)
    (with-group-of-same-carriers (group n)
      (let* ((stop nil)
             (fibers (loop for i below 10
                           collect (let ((i i))
                                     (spawn (group)
                                       (let ((*variable* i))
                                         (loop until stop
                                               always (progn (pause) (eql i *variable*)))))))))
        (loop repeat 500
              do (dolist (thread (carrier-threads group))
                   (sb-unix:pthread-kill thread sb-unix:sigurg))
                 (sb-thread:thread-yield))
        (setf stop t)
        (is (all-true-p (join-all fibers)))))))

;;; A signal is deferred, and blocks others; then an error traps, whose handler enables interrupts
;;; and parks. Prevents: other fibers of the carrier that are not interrupted.
(test parked-in-a-handler-with-signals-blocked-below
  (with-group (group 1)
    (let* ((parked (make-flag)) (release (make-flag)) (interrupted (make-flag))
           (first (spawn (group)
                    (block nil
                      (handler-bind ((type-error
                                       (lambda (condition)
                                         (declare (ignore condition))
                                         (sb-sys:with-interrupts
                                           (raise-flag parked)
                                           (loop until (flag-value release) do (fiber-park)))
                                         (return :handled))))
                        (sb-sys:without-interrupts
                          (sb-sys:allow-with-interrupts
                            (sb-unix:raise sb-unix:sigurg)
                            (car (opaque 5)))))))))
      (is-true (wait-until (and (flag-value parked) (eq :parked (fiber-state first)))))
      (let* ((started (make-flag))
             (second (computing-fiber (group started) (compute-until interrupted))))
        (interrupt-fiber second (lambda () (raise-flag interrupted)))
        (is-true (wait-until (flag-value interrupted)))
        (raise-flag interrupted)
        (join second))
      (raise-flag release)
      (fiber-unpark first)
      (is (eq :handled (join first))))))
