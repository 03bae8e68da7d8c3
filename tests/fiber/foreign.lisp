;;;; Foreign code that holds a lock: what interrupts it, and what is called back from it

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/zones.lisp" *load-truename*))
(load (merge-pathnames "support/foreign-library.lisp" *load-truename*))

(def-suite* foreign)

;;;; One at a time

(defun wait-until-inside ()
  "Wait until somebody has taken the foreign lock."
  (wait-until (= 1 (foreign-inside))))

(defun call-while-in-foreign-code (function &optional (call #'foreign-wait))
  "Call FUNCTION with a fiber that is in CALL, which ends after a tenth of a second; return how that
ended, and what had been noted."
  (with-group (group 1)
    (let* ((started (make-flag)) (notes (make-flag))
           (fiber (computing-fiber (group started)
                    (unwind-protect (progn (funcall call)
                                           (note notes :returned)
                                           (fiber-yield)
                                           (note notes :went-on))
                      (note notes :unwound)))))
      (wait-until-inside)
      (funcall function fiber notes)
      (sleep 1/10)
      (note notes :go)
      (foreign-go 1)
      (values (wait-for-end fiber) (reverse (flag-notes notes))))))

;;; Prevents: a function on top of foreign code that holds a lock.
(test interrupted-when-the-call-returns
  (no-mistakes
    (is (equal '(nil (:go (:interrupted :pinned) :returned :went-on :unwound))
               (multiple-value-list
                (call-while-in-foreign-code
                 (lambda (fiber notes)
                   (interrupt-fiber fiber
                                    (lambda () (note notes (list :interrupted (zone-here))))))))))))

(test several-interruptions-of-one-call
  (no-mistakes
    (is (equal '(nil (:go 0 1 2 3 4 :returned :went-on :unwound))
               (multiple-value-list
                (call-while-in-foreign-code
                 (lambda (fiber notes)
                   (dotimes (i 5)
                     (let ((i i)) (interrupt-fiber fiber (lambda () (note notes i))))))))))))

;;; Prevents: a lock that nobody gives back.
(test terminated-when-the-call-returns
  (no-mistakes
    (is (equal '(:abort (:go :unwound))
               (multiple-value-list
                (call-while-in-foreign-code (lambda (fiber notes)
                                              (declare (ignore notes))
                                              (terminate-fiber fiber))))))))

(test time-out-when-the-call-returns
  (no-mistakes
    (is (equal '(nil (:go :timed-out :returned :went-on :unwound))
               (let ((timed-out nil))
                 (multiple-value-list
                  (call-while-in-foreign-code
                   (lambda (fiber notes) (declare (ignore fiber)) (setf timed-out notes))
                   (lambda ()
                     (handler-case (sb-ext:with-timeout 1/20 (foreign-wait))
                       (sb-ext:timeout () (note timed-out :timed-out)))))))))))

(test without-interrupts-too
  (no-mistakes
    (is (equal '(nil (:go :back :interrupted :returned :went-on :unwound))
               (let ((flag nil))
                 (multiple-value-list
                  (call-while-in-foreign-code
                   (lambda (fiber notes)
                     (setf flag notes)
                     (interrupt-fiber fiber (lambda () (note notes :interrupted))))
                   (lambda ()
                     (sb-sys:without-interrupts
                       (foreign-wait)
                       (note flag :back))))))))))

;;; Prevents: a long call whose system calls fail again and again, since it is asked whether it is
;;; over.
(test a-call-is-disturbed-once
  (no-mistakes
    (with-group (group 1)
      (let* ((started (make-flag)) (interrupted (make-flag))
             (fiber (computing-fiber (group started)
                      (list (foreign-sleep 200000) (flag-value interrupted)))))
        (wait-until-inside)
        (interrupt-fiber fiber (lambda () (raise-flag interrupted)))
        (destructuring-bind (times interrupted) (join fiber)
          (is (<= times 1))
          (is (eq t interrupted)))))))

;;; Any handler, not only that of INTERRUPT-FIBER.
(test handlers-run-when-the-call-returns
  (let ((notes nil))
    (sb-sys:enable-interrupt sb-posix:sigvtalrm
                             (lambda (signal info context)
                               (declare (ignore signal info context))
                               (note notes (zone-here))))
    (unwind-protect
         (no-mistakes
           (is (equal '(nil (:go :pinned :returned :went-on :unwound))
                      (multiple-value-list
                       (call-while-in-foreign-code
                        (lambda (fiber flag)
                          (setf notes flag)
                          (sb-unix::pthread-kill
                           (sb-thread::thread-os-thread
                            (sb-fiber::carrier-thread (sb-fiber::fiber-carrier fiber)))
                           sb-posix:sigvtalrm)))))))
      (sb-sys:enable-interrupt sb-posix:sigvtalrm :default))))

;;; Prevents: a fiber that parks on top of foreign code, whose carrier another fiber then runs on.
(test handlers-of-errors-in-foreign-code-do-not-park
  (is (eq :native
          (in-fiber ()
            (block nil
              (handler-bind ((error (lambda (condition)
                                      (declare (ignore condition))
                                      (return (zone-here)))))
                (foreign-divide (opaque 1) (opaque 0))))))))

;;;; Callbacks

(test callbacks-do-not-park
  (no-mistakes
    (on-carriers (n)
      (is (equal '(:native nil :free t)
                 (in-fiber (n)
                   (multiple-value-bind (zone can-park)
                       (call-in-callback (lambda (i) (declare (ignore i))
                                           (values (zone-here) (fiber-can-park-p))))
                     (list zone can-park (zone-here) (fiber-can-park-p)))))))))

;;; Prevents: two fibers in turn in the same foreign code on one carrier.
(test others-run-elsewhere-while-a-callback-waits
  (no-mistakes
    (on-carriers (n)
      (is (all-true-p
           (in-fibers n 20
                      (lambda (i)
                        (loop for j below 5
                              always (call-in-callback
                                      (lambda (k)
                                        (let ((thread sb-fiber::*carrier*))
                                          (ecase (mod (+ i j) 4)
                                            (0 (fiber-yield))
                                            (1 (sleep 1/10000))
                                            (2 (sb-thread:thread-yield) (sleep (opaque 1/10000)))
                                            (3
                                             (sb-thread:with-mutex ((load-time-value (make-mutex)))
                                               (sleep 1/10000))))
                                          (and (= j k) (eq thread sb-fiber::*carrier*))))
                                      j)))))))))

(test interrupted-when-the-callers-call-returns
  (no-mistakes
    (is (equal '(nil (:go :called-back :interrupted :returned :went-on :unwound))
               (let ((flag nil))
                 (multiple-value-list
                  (call-while-in-foreign-code
                   (lambda (fiber notes)
                     (setf flag notes)
                     (interrupt-fiber fiber (lambda () (note notes :interrupted))))
                   (lambda ()
                     (call-in-callback
                      (lambda (i) (declare (ignore i))
                        ;; in Lisp, in a wait and in foreign code
                        (let ((end (+ (get-internal-real-time)
                                      (/ internal-time-units-per-second 20))))
                          (loop until (> (get-internal-real-time) end)))
                        (sleep 1/20)
                        (sb-alien:alien-funcall
                         (sb-alien:extern-alien "usleep" (function sb-alien:int sb-alien:int))
                         50000)
                        (note flag :called-back)))))))))))

(test an-interruption-of-oneself-waits-too
  (no-mistakes
    (is (equal '(:after :interrupted)
               (in-fiber ()
                 (let ((trace '()))
                   (call-in-callback (lambda (i) (declare (ignore i))
                                       (interrupt-fiber (current-fiber)
                                                        (lambda () (push :interrupted trace)))
                                       (push :after trace)))
                   (reverse trace)))))))

;;; Prevents: a deadline that unwinds foreign code.
(test deadlines-end-no-callback
  (no-mistakes
    (is (equal '(:slept :deadline)
               (in-fiber ()
                 (let ((trace '()))
                   (handler-case
                       (sb-sys:with-deadline (:seconds 1/50)
                         (call-in-callback (lambda (i) (declare (ignore i))
                                             (wait-on-semaphore (make-semaphore) :timeout 1/10)
                                             (push :slept trace)))
                         (wait-on-semaphore (make-semaphore)))
                     (sb-sys:deadline-timeout () (push :deadline trace)))
                   (reverse trace)))))
    ;; But one of its own does.
    (is (eq :deadline
            (in-fiber ()
              (call-in-callback (lambda (i) (declare (ignore i))
                                  (handler-case
                                      (sb-sys:with-deadline (:seconds 1/50)
                                        (wait-on-semaphore (make-semaphore)))
                                    (sb-sys:deadline-timeout () :deadline)))))))))

;;; Code that unwinds a callback wants that. Prevents: a fiber that is not interrupted ever after.
(test callbacks-that-are-unwound
  (is (equal '(:out :free (:interrupted))
             (in-fiber ()
               (let ((trace '()))
                 (list (catch 'out
                         (let ((*called-back* (lambda (i) (declare (ignore i))
                                                (interrupt-fiber (current-fiber)
                                                                 (lambda ()
                                                                   (push :interrupted trace)))
                                                (throw 'out :out))))
                           (sb-alien:alien-funcall (sb-alien::alien-callable-function 'call-back)
                                                   1)))
                       (zone-here)
                       (progn (fiber-yield) trace)))))))

;;; What has been noted is sent after the next call, which here is one within a tiny lock. Prevents:
;;; the end of the process.
(test fibers-submitted-in-a-callback
  (on-carriers (n)
    (with-group (group n)
      (let ((fibers '()))
        (join (spawn (group)
                (call-in-callback
                 (lambda (i)
                   (declare (ignore i))
                   (interrupt-fiber (current-fiber) #'list)
                   ;; no stack of that size is kept by a carrier
                   (loop repeat 100 do (push (spawn (group :stack-size 100000) 1) fibers))))))
        (is (= 100 (reduce #'+ (join-all fibers))))))))

;;; Prevents: a wait for ever, since the next call after the callback is one that only a signal
;;; ends.
(test interrupted-in-a-callback-that-is-unwound-before-a-wait
  (with-group (group 1)
    (let* ((inside (make-flag)) (proceed (make-flag)) (unwound (make-flag))
           (semaphore (make-semaphore))
           (fiber (spawn (group)
                    (call-blocking
                     (lambda ()
                       (catch 'out
                         (let ((*called-back* (lambda (i)
                                                (declare (ignore i))
                                                (raise-flag inside)
                                                (compute-until proceed)
                                                (throw 'out nil))))
                           (sb-alien:alien-funcall (sb-alien::alien-callable-function 'call-back)
                                                   1)))
                       (unwind-protect (wait-on-semaphore semaphore)
                         (raise-flag unwound)))))))
      (is-true (wait-until (flag-value inside)))
      (terminate-fiber fiber)
      (is (eq :aborted (fiber-join fiber :default :aborted)))
      (raise-flag proceed)
      (is-true (wait-until (flag-value unwound)))
      (signal-semaphore semaphore))))

;;;; Calls that may be cut off

(defun foreign-usleep (microseconds)
  (sb-alien:alien-funcall
   (sb-alien:extern-alien "usleep" (function sb-alien:int sb-alien:int)) microseconds))

(test interruptible-foreign-calls
  (no-mistakes
    (on-carriers (n)
      (with-group (group n)
        (let* ((started (make-flag)) (interrupted (make-flag))
               (fiber (computing-fiber (group started)
                        (with-interruptible-foreign-calls (loop (foreign-usleep 100000000))))))
          (sleep 1/50)
          (interrupt-fiber fiber (lambda () (raise-flag interrupted)))
          (is-true (wait-until (flag-value interrupted)))
          (terminate-fiber fiber)
          (is (eq :abort (wait-for-end fiber))))))))

;;; Neither what is called in an interruption of them, ...
(test calls-in-an-interruption-are-not-interruptible
  (no-mistakes
    (with-group (group 1)
      (let* ((started (make-flag)) (notes (make-flag))
             (fiber (computing-fiber (group started)
                      (catch 'out
                        (with-interruptible-foreign-calls (foreign-usleep 100000000))))))
        (interrupt-fiber fiber (lambda ()
                                 (sb-sys:with-interrupts
                                   (foreign-wait)
                                   (note notes :back))
                                 (throw 'out :out)))
        (wait-until-inside)
        (interrupt-fiber fiber (lambda () (note notes :again)))
        (sleep 1/10)
        (note notes :go)
        (foreign-go 1)
        (is (eq :out (join fiber)))
        (is (equal '(:go :again :back) (reverse (flag-notes notes))))))))

;;; ... nor what they call back, if that does not say so as well.
(test callbacks-of-interruptible-calls
  (on-carriers (n)
    (with-group (group n)
      (let* ((started (make-flag)) (trace '())
             (fiber (spawn (group)
                      (catch 'out
                        (with-interruptible-foreign-calls
                          (let ((*called-back*
                                  (lambda (i) (declare (ignore i))
                                    (raise-flag started)
                                    (sleep 1/10)
                                    (push :slept trace)
                                    (with-interruptible-foreign-calls (sleep 3600)))))
                            (sb-alien:alien-funcall (sb-alien::alien-callable-function 'call-back)
                                                    1))))
                      (zone-here))))
        (wait-until (flag-value started))
        (interrupt-fiber fiber (lambda () (push :interrupted trace) (throw 'out nil)))
        (is (eq :free (join fiber)))
        (is (equal '(:slept :interrupted) (reverse trace)))))))

;;; Prevents: a fiber that nobody can end, since it waits in the kernel for one of the runtime's own
;;; calls.
(test native-waits-can-be-ended
  (multiple-value-bind (in out) (sb-unix:unix-pipe)
    (unwind-protect
         (let ((mutex (make-mutex)))
           (grab-mutex mutex)
           (on-carriers (n)
             (with-group (group n)
               (dolist (wait (list (lambda () (sleep 3600))
                                   (lambda () (sleep 1e6))
                                   (lambda () (sleep 3601/2))
                                   (lambda () (grab-mutex mutex))
                                   (lambda () (wait-on-semaphore (make-semaphore)))
                                   (lambda () (wait-on-semaphore (make-semaphore) :timeout 3600))
                                   (lambda () (sb-sys:wait-until-fd-usable in :input))
                                   (lambda () (sb-unix:unix-read in (sb-sys:int-sap 0) 1))
                                   (lambda () (fiber-join (spawn (group) (sleep 1/2)))
                                     (sleep 3600))))
                 (flet ((ended-p (fiber)
                          (sleep 1/100)
                          (terminate-fiber fiber)
                          (eq :abort (wait-for-end fiber))))
                   (let ((started (make-flag)))
                     (is-true (ended-p (computing-fiber (group started)
                                         (sb-vm::with-code-pages-pinned (:dynamic)
                                           (funcall wait))))))
                   (let ((started (make-flag)))
                     (is-true (ended-p (computing-fiber (group started)
                                         (with-interruptible-foreign-calls (funcall wait)))))))))))
      (sb-unix:unix-close in)
      (sb-unix:unix-close out))))

;;; Prevents: a signal whose frame is written to memory that another thread has, or none. The timer
;;; of a profiler expires at any time.
(test threads-of-foreign-code-keep-no-alternate-stack
  (is (= 0 (sb-alien:alien-funcall
            (sb-alien:extern-alien "foreign_alternate_stack"
                                   (function sb-alien:int sb-sys:system-area-pointer))
            (sb-alien:alien-sap (sb-alien::alien-callable-function 'call-back))))))

;;;; The pool

;;; Prevents: what was abandoned being unwound out of foreign code.
(test abandoned-calls-return
  (on-carriers (n)
    (no-mistakes
      (let ((unwound (make-flag)) (returned (make-flag)))
        (with-group (group n)
          (let ((fiber (spawn (group)
                         (call-blocking (lambda ()
                                          (unwind-protect (progn (foreign-wait)
                                                                 (raise-flag returned))
                                            (raise-flag unwound)))))))
            (wait-until-inside)
            (terminate-fiber fiber)
            (is (eq :abort (wait-for-end fiber)))
            (sleep 1/50)
            (is (not (flag-value unwound)))
            (foreign-go 1)
            (is-true (wait-until (flag-value unwound)))
            (is (not (flag-value returned)))))))))
