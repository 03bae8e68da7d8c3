;;;; What a fiber waits for, in words: fiber/reason.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(load (merge-pathnames "support/descriptors.lisp" *load-truename*))
(require :sb-concurrency)

(in-package "SB-FIBER-TESTS")

(def-suite* reason)

(defun reason-seen (group function)
  "The second value of FIBER-STATE of a fiber that calls FUNCTION, which waits, and how it is
printed; the fiber is ended then. FUNCTION may wait by looking again and again."
  (let ((fiber (submit-fiber group (make-fiber function :name "waiter"))))
    (unwind-protect
         (loop
           (wait-until-parked fiber)
           (multiple-value-bind (state reason) (fiber-state fiber)
             (let ((printed (princ-to-string fiber)))
               (when (and (eq :parked state) (search " parked" printed))
                 (return (list reason printed))))))
      (terminate-fiber fiber)
      (wait-for-end fiber))))

(defmacro reason-is (reason words &body body)
  "Check that a fiber that executes BODY waits for REASON, and is printed to be parked on WORDS."
  `(destructuring-bind (seen printed) (reason-seen group (lambda () ,@body))
     (is (equal ,reason seen))
     (is (search (format nil "\"waiter\" parked on ~A" ,words) printed) "~A" printed)))

(test reasons-of-locks
  (on-carriers (n)
    (with-group (group n)
      (let ((mutex (make-mutex :name "the mutex")) (held (make-mutex))
            (queue (make-waitqueue :name "the queue"))
            (semaphore (make-semaphore :name "the semaphore"))
            (gate (sb-concurrency:make-gate :name "the gate"))
            (mailbox (sb-concurrency:make-mailbox :name "the mailbox"))
            (rwlock (sb-thread::make-rwlock)))
        (grab-mutex mutex)
        (sb-thread::rwlock-wrlock rwlock)
        (dolist (timeout '(nil 3600))
          (reason-is (list :mutex mutex) "mutex \"the mutex\"" (grab-mutex mutex :timeout timeout))
          (reason-is (list :condition-variable queue) "condition-variable \"the queue\""
            (with-mutex (held) (loop (condition-wait queue held :timeout timeout))))
          (reason-is (list :semaphore semaphore) "semaphore \"the semaphore\""
            (wait-on-semaphore semaphore :timeout timeout))
          (reason-is (list :gate gate) "gate \"the gate\""
            (sb-concurrency:wait-on-gate gate :timeout timeout))
          (reason-is (list :mailbox mailbox) "mailbox \"the mailbox\""
            (sb-concurrency:receive-message mailbox :timeout timeout)))
        (reason-is (list :rwlock rwlock) "rwlock" (sb-thread::rwlock-rdlock rwlock))
        (sb-thread::rwlock-unlock rwlock)
        (release-mutex mutex)))))

(defun call-the-blocking-function ()
  (loop (sleep 1/100)))

(test reasons-of-other-waits
  (on-carriers (n)
    (with-group (group n)
      (let* ((other (spawn (group :name "the other") (fiber-park)))
             (done (make-semaphore))
             (thread (make-thread (lambda () (wait-on-semaphore done)) :name "the thread")))
        (with-group (another 1)
          (let ((of-another (spawn (another) (fiber-park))))
            (reason-is (list :group another) "group" (finish-fibers another))
            (fiber-unpark of-another)))
        (reason-is (list :join other) "join \"the other\"" (fiber-join other))
        (reason-is (list :join other) "join \"the other\"" (join-thread other :timeout 3600))
        (reason-is (list :join thread) "join \"the thread\"" (join-thread thread))
        (reason-is :sleep "SLEEP" (sleep 3600))
        (reason-is :sleep "SLEEP" (sb-ext:wait-for (opaque nil)))
        (reason-is :debugger "DEBUGGER" (sb-thread::get-foreground))
        (reason-is (list :call-blocking #'call-the-blocking-function)
            "call-blocking CALL-THE-BLOCKING-FUNCTION"
          (call-blocking #'call-the-blocking-function))
        (fiber-unpark other)
        (signal-semaphore done)
        (join-thread thread)))))

(test reasons-of-descriptors
  (on-carriers (n)
    (with-group (group n)
      (with-pipe (input output)
        (let ((in (sb-sys:fd-stream-fd input)) (out (sb-sys:fd-stream-fd output)))
          (reason-is (list :read in) (format nil "read ~D" in) (read-char input))
          (reason-is (list :read in) (format nil "read ~D" in)
            (sb-sys:wait-until-fd-usable in :input))
          (reason-is (list :write out) (format nil "write ~D" out)
            (loop (write-string "much" output)))))
      (with-sockets (a b)
        (let ((fd (socket-file-descriptor a)))
          (reason-is :poll "POLL"
            (sb-sys:with-fd-handler (fd :input #'identity)
              (sb-sys:with-fd-handler ((socket-file-descriptor b) :input #'identity)
                (sb-sys:serve-event 3600))))
          (reason-is (list :read fd) (format nil "read ~D" fd) (socket-receive a nil 1))
          (reason-is (list :write fd) (format nil "write ~D" fd)
            (loop (socket-send a (octets 100000) nil))))))))

;;; What the user says is not touched, be it what others wait for.
(test reasons-of-users
  (with-group (group 1)
    (let ((mutex (make-mutex)))
      (dolist (reason (list :lunch '(:mutex 5) '(:a :b :c) "text" 5 mutex #'car (make-semaphore)))
        (is (eq reason (first (reason-seen group (lambda () (fiber-park :reason reason)))))))
      (is (eq :park (first (reason-seen group (lambda () (fiber-park)))))))))

;;; Prevents: a wait that says what an earlier one has waited for, and keeps it alive.
(test reasons-are-forgotten
  (on-carriers (n)
    (with-group (group n)
      (let ((semaphore (make-semaphore)) (mailbox (sb-concurrency:make-mailbox)))
        (is (equal '(nil nil)
                   (join (spawn (group)
                           (wait-on-semaphore semaphore :timeout 1/1000)
                           (sb-concurrency:receive-message mailbox :timeout 1/1000)
                           (handler-case
                               (sb-sys:with-deadline (:seconds 1/1000)
                                 (sb-concurrency:receive-message mailbox))
                             (sb-sys:deadline-timeout ()))
                           (handler-case (sb-ext:with-timeout 1/1000 (wait-on-semaphore semaphore))
                             (sb-ext:timeout ()))
                           (list (sb-fiber::fiber-wait-reason (current-fiber))
                                 sb-fiber::*waited-for*)))))
        (let ((fiber (spawn (group)
                       (handler-case
                           (sb-sys:with-deadline (:seconds 1/1000)
                             (sb-concurrency:receive-message mailbox))
                         (sb-sys:deadline-timeout ()))
                       (sleep 3600))))
          (is-true (wait-until (eq :sleep (nth-value 1 (fiber-state fiber)))))
          (terminate-fiber fiber))))))

;;; What a function waits for that interrupts a wait is its own affair, and the wait goes on.
(test reasons-of-interruptions
  (on-carriers (n)
    (with-group (group n)
      (let* ((mailbox (sb-concurrency:make-mailbox))
             (go-on (make-semaphore))
             (fiber (wait-until-parked (spawn (group) (sb-concurrency:receive-message mailbox)))))
        (flet ((waits-for-p (reason)
                 (wait-until (equal (list :parked reason)
                                    (multiple-value-list (fiber-state fiber))))))
          (is-true (waits-for-p (list :mailbox mailbox)))
          (interrupt-fiber fiber (lambda () (sb-sys:with-interrupts (wait-on-semaphore go-on))))
          (is-true (waits-for-p (list :semaphore go-on)))
          (signal-semaphore go-on)
          (is-true (waits-for-p (list :mailbox mailbox)))
          (sb-concurrency:send-message mailbox :message)
          (is (eq :message (join fiber))))))))
