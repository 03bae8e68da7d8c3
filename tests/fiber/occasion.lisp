;;;; Tests of operations that wait for semaphores, mailboxes, gates, ends of threads, descriptors

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :sb-posix)
(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "operation.lisp" *load-truename*))

(import '(sb-concurrency:semaphore-operation sb-concurrency:mailbox-operation
          sb-concurrency:gate-operation sb-concurrency:join-operation
          sb-concurrency:descriptor-operation
          sb-concurrency:make-mailbox sb-concurrency:send-message sb-concurrency:receive-message
          sb-concurrency:make-gate sb-concurrency:open-gate sb-concurrency:close-gate
          sb-concurrency:wait-on-gate))

(def-suite* occasion)

(defun line-of (queue)
  (let ((watch (sb-concurrency::watch-of queue)))
    (and watch (sb-concurrency::line-first watch))))

(defun nobody-selects-p (semaphore)
  "Is nothing left in SEMAPHORE of what has waited there?"
  (and (null (line-of (sb-thread::semaphore-queue semaphore)))
       (= (if (sb-thread::waitqueue-watch (sb-thread::semaphore-queue semaphore)) 1 0)
          (sb-thread::semaphore-waitcount semaphore))))

;;;; alone

(test clauses-for-occasions
  (let ((semaphore (make-semaphore :count 1))
        (mailbox (make-mailbox :initial-contents '(nil)))
        (gate (make-gate :open t))
        (empty (make-channel)))
    (flet ((take ()
             (select ((wait-on-semaphore semaphore) (permit) (list :permit permit))
                     ((receive-message mailbox) (message found-p) (list message found-p))
                     ((receive empty) () :wrong)
                     (:default () :nothing))))
      (is (null (set-exclusive-or '((:permit t) (nil t)) (list (take) (take)) :test #'equal)))
      (is (eq :nothing (take)))
      (is (eq :late (select ((wait-on-semaphore semaphore) () :wrong)
                            ((receive-message mailbox) () :wrong)
                            ((:timeout 1/100) () :late)))))
    (is (eql 0 (semaphore-count semaphore)))
    (is (= 0 (sb-concurrency:mailbox-count mailbox)))
    (is (nobody-selects-p semaphore))
    (is (nobody-selects-p (sb-concurrency::mailbox-semaphore mailbox)))
    (is (eq t (select ((wait-on-gate gate) (open-p) open-p))))
    (close-gate gate)
    (is (eq :late (select ((wait-on-gate gate) () :wrong) ((:timeout 1/100) () :late))))
    (is (null (line-of (sb-concurrency::gate-queue gate))))))

(test what-is-no-occasion
  (signals type-error (semaphore-operation (opaque 1)))
  (signals type-error (mailbox-operation (opaque (make-semaphore))))
  (signals type-error (gate-operation (opaque nil)))
  (signals type-error (join-operation (opaque nil)))
  (signals type-error (descriptor-operation (opaque -1) :input))
  (signals type-error (descriptor-operation 0 (opaque :both))))

(test ended-threads-in-select
  (let ((thread (make-thread (lambda () (values 1 2)))))
    (is (equal '(1 2) (select ((join-thread thread) (one two) (list one two)))))
    (is (equal '(1 2) (select ((join-thread thread) (one two) (list one two)))))
    (is (equal '(1 2) (multiple-value-list (join-thread thread)))))
  (let ((thread (make-thread #'sb-thread:abort-thread)))
    (is (eq :aborted (handler-case (select ((join-thread thread) () :wrong))
                       (sb-thread:join-thread-error () :aborted))))))

;;; Prevents: a clause that is always tried first.
(test no-occasion-is-preferred
  (let ((semaphore (make-semaphore :count 4000)) (gate (make-gate :open t))
        (counts (list 0 0 0)) (channel (channel-with t)))
    (loop repeat 3000
          do (incf (nth (select ((wait-on-semaphore semaphore) () 0)
                                ((wait-on-gate gate) () 1)
                                ((receive channel) (value) (send channel value) 2))
                        counts)))
    (is (every (lambda (count) (< 800 count 1200)) counts))
    (is (= (- 4000 (first counts)) (semaphore-count semaphore)))))

;;;; one of several

;;;; one of several

(defstruct things
  (semaphore (make-semaphore)) (mailbox (make-mailbox)) (channel (make-channel)) (done (make-gate))
  (permits (make-flag)) (got (make-flag)) (givers-left 0 :type sb-ext:word))

(defun give-things (things giver n)
  "Give N permits, messages and values; the last of several who do opens the gate."
  (dotimes (k n)
    (signal-semaphore (things-semaphore things))
    (send-message (things-mailbox things) (list giver k :message))
    (yield-at-random)
    (send (things-channel things) (list giver k :value)))
  (when (= 1 (sb-ext:atomic-decf (things-givers-left things)))
    (open-gate (things-done things))))

(defun taking (things)
  "The operation that takes what is given, and notes it."
  (let ((got (things-got things)))
    (choose (wrap (semaphore-operation (things-semaphore things))
                  (lambda (permit) (when permit (count-one (things-permits things)))))
            (wrap (mailbox-operation (things-mailbox things))
                  (lambda (message found-p) (when found-p (note got message))))
            (wrap (receive-operation (things-channel things))
                  (lambda (value received-p) (when received-p (note got value)))))))

(defun take-until-done (things)
  (loop with taking = (taking things)
        until (select (taking () nil)
                      ((wait-on-gate (things-done things)) () t))))

(defun take-one-kind (things)
  (loop until (sb-concurrency:gate-open-p (things-done things))
        do (when (wait-on-semaphore (things-semaphore things) :timeout 1/100)
             (count-one (things-permits things)))
           (multiple-value-bind (message found-p)
               (receive-message (things-mailbox things) :timeout 1/100)
             (when found-p (note (things-got things) message)))))

(defun take-what-is-left (things)
  (loop with taking = (taking things)
        until (select (taking () nil) (:default () t))))

(defun check-things (things n-permits n-others)
  "Were N-PERMITS permits, and N-OTHERS messages and values, taken once each?"
  (take-what-is-left things)
  (let ((got (flag-notes (things-got things))))
    (is (= n-permits (flag-count (things-permits things))))
    (is (= n-others (length got) (length (remove-duplicates got :test #'equal)))))
  (is (nobody-selects-p (things-semaphore things)))
  (is (nobody-selects-p (sb-concurrency::mailbox-semaphore (things-mailbox things))))
  (is (null (line-of (sb-concurrency::gate-queue (things-done things)))))
  (is (lines-empty-p (things-channel things))))

;;; Some wait for one kind, some for any.
(test everything-is-taken-once
  (on-carriers (n)
    (let ((things (make-things :givers-left 4)))
      (mixed n 12 4
             (lambda (i)
               (case (rem i 4)
                 (0 (give-things things i 100))
                 (1 (take-one-kind things))
                 (t (take-until-done things)))))
      (check-things things 400 800))))

(defun take-while-struck (things)
  (loop with operation = (choose (wrap (taking things) (constantly nil))
                                 (gate-operation (things-done things)))
        until (sb-sys:without-interrupts
                (catch 'struck
                  (sb-sys:allow-with-interrupts (perform operation))))))

;;; Prevents: a permit, and with it a message for ever, that is lost with who is unwound when it has
;;; been given it.
(test interruptions-lose-no-permits
  (on-carriers (n)
    (let ((things (make-things :givers-left 1)))
      (with-group (group n)
        (call-while-struck group #'take-while-struck (list things)
                           (lambda () (give-things things 0 1000))))
      (check-things things 1000 2000))))

(defun selecting-p (semaphore n)
  "Do N wait for SEMAPHORE as one of several things?"
  (= n (loop for node = (line-of (sb-thread::semaphore-queue semaphore))
               then (sb-concurrency::node-next node)
             while node count t)))

(defun waiting-p (semaphore n)
  "Do N wait on SEMAPHORE? At least one selects."
  (= (1+ n) (sb-thread::semaphore-waitcount semaphore)))

;;; Prevents: permits that nobody is woken for, as those that select count as one in WAITCOUNT.
(test those-that-wait-for-one-are-served-too
  (on-carriers (n)
    (let ((semaphore (make-semaphore)) (never (make-channel)))
      (is (equal (make-list 8 :initial-element t)
                 (mixed n 4 4
                        (lambda (i)
                          (case i
                            (0 (prog1 (wait-until (and (selecting-p semaphore 4)
                                                       (waiting-p semaphore 3)))
                                 (signal-semaphore semaphore 7)))
                            ((1 4 5) (and (wait-on-semaphore semaphore :timeout *patience*) t))
                            (t (select ((wait-on-semaphore semaphore) () t)
                                       ((receive never) () :wrong))))))))
      (is (eql 0 (semaphore-count semaphore)))
      (is (nobody-selects-p semaphore)))))

;;; Prevents: a watch that is seen before the signals are told of it.
(test the-first-to-select
  (on-carriers (n)
    (loop repeat 50
          do (let ((semaphore (make-semaphore)))
               (is (equal '(t t t t)
                          (mixed n 3 1
                                 (lambda (i)
                                   (cond ((= i 0) (signal-semaphore semaphore 3) t)
                                         (t (select ((wait-on-semaphore semaphore) () t)
                                                    ((:timeout *patience*) () :late))))))))))))

(test all-that-join-a-thread
  (on-carriers (n)
    (let* ((hurry (make-semaphore))
           (thread (make-thread (lambda () (wait-on-semaphore hurry) :value)))
           (ended (sb-thread::thread-semaphore thread)))
      (is (equal '(t :value :value :value :value)
                 (mixed n 3 2
                        (lambda (i)
                          (case i
                            (0 (prog1 (wait-until (and (selecting-p ended 2) (waiting-p ended 2)))
                                 (signal-semaphore hurry)))
                            ((1 3) (select ((join-thread thread) (value) value)
                                           ((:timeout *patience*) () :late)))
                            (t (join-thread thread :timeout *patience*))))))))))

(test a-gate-lets-all-pass
  (on-carriers (n)
    (let ((gate (make-gate)) (never (make-semaphore)))
      (is (equal (make-list 13 :initial-element t)
                 (mixed n 10 3
                        (lambda (i)
                          (cond ((= i 0) (sleep 1/50) (open-gate gate))
                                ((evenp i) (wait-on-gate gate))
                                (t (select ((wait-on-gate gate) () t)
                                           ((wait-on-semaphore never) () :wrong))))))))
      (is (null (line-of (sb-concurrency::gate-queue gate))))
      (is (nobody-selects-p never)))))

(test the-first-that-ends
  (on-carriers (n)
    (with-group (group n)
      (let* ((hurry (make-semaphore))
             (thread (make-thread (lambda () (wait-on-semaphore hurry) (values 1 2))))
             (fiber (spawn (group) (wait-on-semaphore hurry) (values 1 2)))
             (never (spawn (group) (fiber-park))))
        (flet ((first-end (other)
                 (select ((join-thread other) (one two) (list one two))
                         ((fiber-join never) () :wrong))))
          (signal-semaphore hurry 2)
          (is (equal '((1 2) (1 2))
                     (list (join (spawn (group) (first-end thread)))
                           (join (spawn (group) (first-end fiber))))))
          (terminate-fiber never))))))

;;; Prevents: a watcher that stays until the fiber ends.
(test no-watchers-stay
  (on-carriers (n)
    (let ((mailbox (make-mailbox)))
      (with-group (group n)
        (let ((never (spawn (group) (fiber-park))))
          (is (equal '(0 1 2 3 4 5 6 7 8 9)
                     (join (spawn (group)
                             (spawn (group)
                               (dotimes (i 10) (pause) (send-message mailbox i)))
                             (loop repeat 10
                                   collect (select ((fiber-join never) () :wrong)
                                                   ((receive-message mailbox) (i) i)))))))
          (is-true (wait-until (= 1 (count group (list-all-fibers) :key #'fiber-group))))
          (terminate-fiber never))))))

(test joining-oneself-in-select
  (flet ((join-oneself ()
           (handler-case (select ((join-thread sb-thread:*current-thread*) () :wrong))
             (sb-thread:join-thread-error () :refused))))
    (on-carriers (n)
      (is (equal '(:refused :refused)
                 (mixed n 1 1 (lambda (i) (declare (ignore i)) (join-oneself))))))))

(test cancelled-waits-for-occasions
  (on-carriers (n)
    (with-group (group n)
      (let* ((things (make-things))
             (fibers (loop repeat 10 collect (spawn (group) (perform (taking things))))))
        (mapc #'wait-until-parked fibers)
        (mapc #'cancel-fiber (rest fibers))
        (mapc #'wait-for-end (rest fibers))
        (signal-semaphore (things-semaphore things))
        (join (first fibers))
        (check-things things 1 0)))))

;;;; descriptors

(defmacro with-pipe ((input output) &body body)
  `(multiple-value-bind (,input ,output) (sb-posix:pipe)
     (unwind-protect (progn ,@body)
       (sb-posix:close ,input)
       (sb-posix:close ,output))))

(defun write-octet (fd)
  (let ((octets (make-array 1 :element-type '(unsigned-byte 8) :initial-element 0)))
    (sb-sys:with-pinned-objects (octets)
      (sb-posix:write fd (sb-sys:vector-sap octets) 1))))

(defun await-input (fd other)
  (select ((sb-sys:wait-until-fd-usable fd :input) (usable-p) usable-p)
          ((receive other) (value) value)))

;;; The watchers are gone when it returns, or soon after: the group ends.
(test readable-or-something-else
  (on-carriers (n)
    (let ((channel (make-channel)))
      (with-pipe (in out)
        (with-group (group n)
          (flet ((selecting ()
                   (wait-until-parked (spawn (group) (await-input in channel)))))
            (let ((fiber (selecting)))
              (send channel :sent)
              (is (eq :sent (join fiber))))
            (let ((fiber (selecting)))
              (write-octet out)
              (is (eq t (join fiber))))
            ;; It is ready already.
            (is (eq t (join (spawn (group) (await-input in channel)))))
            (is (eq t (join (spawn (group)
                              (select ((descriptor-operation out :output) () t)
                                      (:default () :wrong)))))))))
      (is (lines-empty-p channel)))))

(test a-descriptor-that-is-closed
  (on-carriers (n)
    (multiple-value-bind (in out) (sb-posix:pipe)
      (with-group (group n)
        (let ((fiber (wait-until-parked
                      (spawn (group)
                        (handler-case (await-input in (make-channel))
                          (descriptor-closed () :closed))))))
          (sb-unix:unix-close in)
          (is (eq :closed (join fiber))))
        (is (eq :closed (join (spawn (group)
                                (handler-case (await-input in (make-channel))
                                  (descriptor-closed () :closed))))))
        (sb-unix:unix-close out)))))

;;; Its watchers run in the default group, which is started for that.
(test descriptors-in-a-thread
  (with-pipe (in out)
    (let ((channel (make-channel)))
      (unwind-protect
           (flet ((selecting () (make-thread #'await-input :arguments (list in channel))))
             (let ((thread (selecting)))
               (is-true (wait-until sb-fiber::*default-group*))
               (send channel :sent)
               (is (eq :sent (join-thread thread :timeout *patience*))))
             (let ((thread (selecting)))
               (write-octet out)
               (is (eq t (join-thread thread :timeout *patience*)))))
        (is-true (finish-fibers t :timeout *patience*)))
      (is (lines-empty-p channel)))))
