;;;; How waits end that are not simply woken, or do not begin: misuse, time-outs, deadlines

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :sb-concurrency)
(in-package "SB-FIBER-TESTS")

(def-suite* waits)

(defmacro outcome (&body body)
  "The value of BODY, or the type of the error that it signals."
  `(handler-case (progn ,@body)
     (error (condition) (type-of condition))))

;;;; Misuse

(test release-a-mutex-of-another
  (with-held-mutex (mutex group :holder holder)
    (flet ((release (&rest arguments)
             (join (spawn (group) (outcome (apply #'release-mutex mutex arguments))))))
      (is (eq nil (release)))
      (is (eq nil (release :if-not-owner :punt)))
      (is (eq 'simple-error (release :if-not-owner :error)))
      (is (eq :warned (join (spawn (group)
                              (handler-case (release-mutex mutex :if-not-owner :warn)
                                (warning () :warned))))))
      (is (eq holder (mutex-owner mutex)))
      (is (eq nil (join (spawn (group) (grab-mutex mutex :waitp nil))))))))

;;; Prevents: a forced release that leaves the waiters asleep.
(test release-by-force
  (on-carriers (n)
    (let ((mutex (make-mutex)) (count 0))
      (with-group (group n)
        (let ((holder (spawn (group) (grab-mutex mutex) (fiber-park) (release-mutex mutex))))
          (wait-until-parked holder)
          (let ((waiters (loop repeat 5
                               collect (spawn (group)
                                         (with-mutex (mutex) (slow-increment count))))))
            (mapc #'wait-until-parked waiters)
            (join (spawn (group) (release-mutex mutex :if-not-owner :force)))
            (join-all waiters)
            (is (= 5 count))
            (fiber-unpark holder)
            (is (null (join holder)))))))))

(test recursive-grab
  (on-carriers (n)
    (is (equal '(simple-error simple-error simple-error t nil)
               (in-fiber (n)
                 (let ((mutex (make-mutex)))
                   (list (with-mutex (mutex) (outcome (grab-mutex mutex)))
                         (with-mutex (mutex) (outcome (grab-mutex mutex :timeout 0)))
                         (with-mutex (mutex) (outcome (with-mutex (mutex :wait-p nil) :in)))
                         (with-mutex (mutex) (outcome (grab-mutex mutex)) (holding-mutex-p mutex))
                         (mutex-owner mutex))))))))

(test condition-wait-without-the-mutex
  (is (eq 'simple-error
          (in-fiber () (outcome (condition-wait (make-waitqueue) (make-mutex))))))
  (with-held-mutex (mutex group)
    (is (eq 'simple-error
            (join (spawn (group) (outcome (condition-wait (make-waitqueue) mutex))))))))

(test joining-oneself
  (is (equal '(sb-thread:join-thread-error sb-thread:join-thread-error :default)
             (in-fiber ()
               (list (outcome (fiber-join (current-fiber)))
                     (outcome (join-thread sb-thread:*current-thread*))
                     (outcome (handler-case (fiber-join (current-fiber) :default :default)
                                (sb-thread:join-thread-error () :default))))))))

;;; A fiber that never runs is joined in vain, and may still be submitted.
(test joining-what-has-not-begun
  (with-group-of-same-carriers (group 1)
    (let* ((ended (make-flag))
           (busy (loop repeat (length (sb-fiber::fiber-group-schedulers group))
                       collect (let ((started (make-flag)))
                                 (computing-fiber (group started) (compute-until ended)))))
           (fiber (spawn (group) 5)))
      (is (eq :no (fiber-join fiber :default :no :timeout 1/100)))
      (is (eq 'sb-thread:join-thread-error (outcome (fiber-join fiber :timeout 1/100))))
      (raise-flag ended)
      (is (eql 5 (join fiber)))
      (join-all busy))))

(test finished-groups
  (let* ((finished (start-fibers nil :carrier-count 2))
         (fiber (spawn (finished) 7)))
    (is (eq t (finish-fibers finished)))
    (is (eq t (fiber-group-done-p finished)))
    (is (eq t (finish-fibers finished)))
    (is (eq t (finish-fibers finished :abort t :timeout 1)))
    (is (eql 7 (join fiber)))
    (let ((late (make-fiber (constantly 8))))
      (is (eq 'sb-thread::simple-thread-error (outcome (submit-fiber finished late))))
      ;; The same from a fiber, of another group.
      (is (equal '(sb-thread::simple-thread-error t 7)
                 (in-fiber ()
                   (list (outcome (submit-fiber finished late))
                         (finish-fibers finished)
                         (fiber-join fiber)))))
      (is (eq :new (fiber-state late)))
      (is (eq 'sb-thread::simple-thread-error (outcome (fiber-join late)))))))

(test finishing-ones-own-group
  (with-group (group 1)
    (is (eq 'sb-thread::simple-thread-error
            (join (spawn (group) (outcome (finish-fibers group))))))
    ;; Nothing has ended by that.
    (is (eql 1 (join (spawn (group) 1))))))

;;;; Without waiting

(test wait-p-nil
  (with-held-mutex (mutex group)
    (is (equal '(nil nil nil nil)
               (join (spawn (group)
                       (list (grab-mutex mutex :waitp nil)
                             (with-mutex (mutex :wait-p nil) :in)
                             (with-recursive-lock (mutex :wait-p nil) :in)
                             (holding-mutex-p mutex)))))))
  (is (equal '(:in :in t)
             (in-fiber ()
               (let ((mutex (make-mutex)))
                 (list (with-mutex (mutex :wait-p nil) :in)
                       (with-recursive-lock (mutex :wait-p nil) :in)
                       (grab-mutex mutex :waitp nil)))))))

;;; Prevents: a time-out of no seconds, or one that is over before the wait, that waits for ever.
(test time-outs-that-are-over
  (nobody-left
    (on-carriers (n)
      (with-held-mutex (mutex group :carrier-count n)
        (is (equal '(nil nil nil)
                   (join (spawn (group)
                           (list (grab-mutex mutex :timeout 0)
                                 (grab-mutex mutex :timeout 1/100000000)
                                 (with-mutex (mutex :timeout 0.0) :in))))))
        (is (equal '(nil nil nil)
                   (join (spawn (group)
                           (list (wait-on-semaphore (make-semaphore) :timeout 1/100000000)
                                 (wait-on-semaphore (make-semaphore) :timeout 1/1000)
                                 (let ((mutex (make-mutex)))
                                   (grab-mutex mutex)
                                   (condition-wait (make-waitqueue) mutex :timeout 0)))))))))))

;;; What it waits for can be looked at. With a time-out SBCL has it in a cons on the waiter's stack.
(test waiting-for-a-mutex-is-seen
  (with-held-mutex (mutex group)
    (dolist (timeout '(nil 30))
      (let ((waiter (spawn (group) (catch 'enough (grab-mutex mutex :timeout timeout)))))
        (wait-until-parked waiter)
        (is (equal (list :mutex mutex) (nth-value 1 (fiber-state waiter))))
        (is (search "parked" (princ-to-string waiter)))
        (interrupt-fiber waiter (lambda () (throw 'enough :enough)))
        (is (eq :enough (join waiter)))))))

;;;; Deadlines

(defmacro deadline-p (&body body)
  "Does BODY run into the deadline?"
  `(handler-case (progn ,@body nil)
     (sb-sys:deadline-timeout () t)))

(defun waits-of-all-kinds (mutex group)
  "A list of functions each of which waits for ever, but for the deadline."
  (let ((never (spawn (group) (with-mutex (mutex)))))
    (list (lambda () (grab-mutex mutex))
          (lambda () (with-mutex (mutex)))
          (lambda () (grab-mutex mutex :timeout 1000))
          (lambda () (wait-on-semaphore (make-semaphore)))
          (lambda () (wait-on-semaphore (make-semaphore) :timeout 1000))
          (lambda () (let ((own (make-mutex)))
                       (with-mutex (own) (condition-wait (make-waitqueue) own))))
          (lambda () (fiber-join never))
          (lambda () (fiber-join never :timeout 1000))
          (lambda () (join-thread never))
          (lambda () (fiber-join (spawn (group) (sleep 1/4))) (sleep 1000))
          (lambda () (sb-ext:wait-for nil))
          (lambda () (sleep 1000))
          (lambda () (sb-concurrency:receive-message (sb-concurrency:make-mailbox)))
          (lambda () (sb-concurrency:wait-on-gate (sb-concurrency:make-gate :open nil))))))

(test deadlines-end-waits
  (nobody-left
    (on-carriers (n)
      (with-held-mutex (mutex group :carrier-count n)
        (let ((functions (waits-of-all-kinds mutex group)))
          (is (equal (make-list (length functions) :initial-element t)
                     (join-all
                      (loop for function in functions
                            collect (let ((function function))
                                      (spawn (group)
                                        (deadline-p (sb-sys:with-deadline (:seconds 1/50)
                                                      (funcall function))))))))))))))

;;; The nearer one counts, unless the inner one overrides it; the outer one is in force again after.
(test nested-deadlines
  (on-carriers (n)
    (with-held-mutex (mutex group :carrier-count n)
      (is (equal '(t t nil t t)
                 (join
                  (spawn (group)
                    (list (deadline-p (sb-sys:with-deadline (:seconds 1000)
                                        (sb-sys:with-deadline (:seconds 1/100) (grab-mutex mutex))))
                          (deadline-p (sb-sys:with-deadline (:seconds 1/100)
                                        (sb-sys:with-deadline (:seconds 1000) (grab-mutex mutex))))
                          (deadline-p (sb-sys:with-deadline (:seconds 1/100)
                                        (sb-sys:with-deadline (:seconds nil :override t)
                                          (grab-mutex mutex :timeout 1/20))))
                          (deadline-p (sb-sys:with-deadline (:seconds 1/100)
                                        (sb-sys:with-deadline (:seconds 1000 :override t)
                                          (grab-mutex mutex :timeout 1/20))
                                        (grab-mutex mutex)))
                          (deadline-p (sb-sys:with-deadline (:seconds 1/20)
                                        (deadline-p (sb-sys:with-deadline (:seconds 1/100)
                                                      (grab-mutex mutex)))
                                        (grab-mutex mutex)))))))))))

;;; Prevents: a deadline of the fiber before on the carrier, or of the thread that has made the
;;; fiber.
(test deadlines-are-not-inherited
  (is (eq nil (sb-sys:with-deadline (:seconds 1000)
                (in-fiber () sb-impl::*deadline*))))
  (on-carriers (n)
    (with-group (group n)
      (flet ((sleep-without-deadline ()
               (list (deadline-p (sleep 1/50)) sb-impl::*deadline*)))
        (is (equal (make-list 10 :initial-element '(nil nil))
                   (join-all
                    (join (spawn (group)
                            (sb-sys:with-deadline (:seconds 1/100)
                              (let ((fibers (loop repeat 10
                                                  collect (submit-fiber
                                                           group
                                                           (make-fiber #'sleep-without-deadline)))))
                                (loop repeat 20 do (fiber-yield))
                                fibers)))))))))))

(test deadlines-that-are-deferred-or-cancelled
  (with-held-mutex (mutex group)
    (is (equal '(2 t)
               (join (spawn (group)
                       (let ((n 0))
                         (list (handler-case
                                   (handler-bind ((sb-sys:deadline-timeout
                                                    (lambda (condition)
                                                      (when (< (incf n) 2)
                                                        (sb-sys:defer-deadline 1/100 condition)))))
                                     (sb-sys:with-deadline (:seconds 1/100)
                                       (grab-mutex mutex)))
                                 (sb-sys:deadline-timeout () n))
                               (handler-bind ((sb-sys:deadline-timeout
                                                #'sb-sys:cancel-deadline))
                                 (sb-sys:with-deadline (:seconds 1/100)
                                   (null (grab-mutex mutex :timeout 1/20))))))))))))
