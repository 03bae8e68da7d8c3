;;;; Channels, between fibers, threads, and both

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :sb-concurrency)
(in-package "SB-FIBER-TESTS")

(import '(sb-concurrency:make-channel sb-concurrency:send sb-concurrency:receive
          sb-concurrency:close-channel sb-concurrency:do-channel sb-concurrency:channel-state
          sb-concurrency:channel-closed))

(def-suite* channel)

(defmacro received (&rest arguments)
  "The values of RECEIVE, a list."
  `(multiple-value-list (receive ,@arguments)))

(defun all-received (channel)
  (let ((values '()))
    (do-channel (value channel (nreverse values))
      (push value values))))

(defun lines-empty-p (channel)
  "Does nothing wait in CHANNEL, and is nothing left there of what has waited?"
  (and (null (sb-concurrency::line-first (sb-concurrency::channel-senders channel)))
       (null (sb-concurrency::line-first (sb-concurrency::channel-receivers channel)))))

;;;; alone

(test values-come-in-order
  (dolist (capacity '(1 2 3 7))
    (let ((channel (make-channel :capacity capacity)))
      (loop with sent = 0 and got = 0
            repeat 20
            do (loop while (send channel sent :wait-p nil) do (incf sent))
               (is (= capacity (- sent got)))
               (loop repeat (1+ (random capacity))
                     do (is (equal (list got t) (received channel)))
                        (incf got))))))

(test nothing-waits-if-it-is-not-to
  (let ((channel (make-channel)))
    (is (equal '(nil nil :timeout) (received channel :wait-p nil)))
    (is (null (send channel 1 :wait-p nil)))
    (is (null (send channel 1 :timeout 1/100)))
    (is (equal '(nil nil :timeout) (received channel :timeout 1/100)))
    (is (lines-empty-p channel))))

(test closed-channels
  (let ((channel (make-channel :capacity 2 :name "pipe")))
    (send channel nil)
    (send channel 2)
    (is (eq :open (channel-state channel)))
    (is (eq t (close-channel channel)))
    (is (eq nil (close-channel channel)))
    (is (eq :closed (channel-state channel)))
    (handler-case (progn (send channel 3) (fail "Something was sent to a closed channel."))
      (channel-closed (condition)
        (is (eq channel (sb-concurrency:channel-closed-channel condition)))
        (is (search "pipe" (princ-to-string condition)))))
    (is (equal '(nil t) (received channel)))
    (is (equal '(2 t) (received channel :timeout 0)))
    (is (equal '(nil nil :closed) (received channel)))
    (is (eq :drained (channel-state channel)))))

(test what-is-no-channel
  (signals type-error (make-channel :capacity -1))
  (signals type-error (make-channel :capacity 1.5))
  (signals type-error (send (make-channel) 1 :timeout -1))
  (signals type-error (receive (make-channel) :timeout :soon))
  (signals type-error (receive (opaque "channel")))
  (is (search "1 of 3 values"
              (let ((channel (make-channel :capacity 3 :name :numbers)))
                (send channel 1)
                (prin1-to-string channel)))))

(test do-channel-is-a-loop
  (let ((channel (make-channel :capacity 9)))
    (dotimes (i 5) (send channel i))
    (is (= 3 (do-channel (i channel)
               (when (= i 3) (return i)))))
    (close-channel channel)
    (is (equal '(4 :end)
               (let ((got '()))
                 (do-channel (i channel (nreverse (cons :end got)))
                   (declare (type fixnum i))
                   (when (= i 5) (go again))
                   (push i got)
                  again))))))

;;;; between two, and many

(test one-gives-another-takes
  (on-carriers (n)
    (dolist (capacity '(0 1 10))
      (let ((channel (make-channel :capacity capacity)))
        (with-group (group n)
          (let ((sender (spawn (group)
                          (dotimes (i 1000) (send channel i) (yield-at-random))
                          (close-channel channel)))
                (receiver (spawn (group) (all-received channel))))
            (is (eq t (join sender)))
            (is (equal (loop for i below 1000 collect i) (join receiver)))))))))

(defun exchange (channel senders i)
  "What the function number I of some does: the first SENDERS send 100 numbers each, and the last of
them closes; the others receive what they can."
  (cond ((< i senders)
         (loop for k below 100
               do (send channel (+ (* 100 i) k))
                  (yield-at-random)))
        (t (all-received channel))))

(test many-give-and-take
  (on-carriers (n)
    (dolist (capacity '(0 3))
      (let ((channel (make-channel :capacity capacity)) (left (list 20)))
        (let ((got (mixed n 30 10
                          (lambda (i)
                            (prog1 (exchange channel 20 i)
                              (when (and (< i 20) (= 1 (sb-ext:atomic-decf (car left))))
                                (close-channel channel)))))))
          (is (equal (loop for i below 2000 collect i)
                     (sort (reduce #'append (remove-if-not #'listp got)) #'<)))
          (is (lines-empty-p channel)))))))

(test those-that-wait-longest-come-first
  (with-group (group 1)
    (let ((channel (make-channel)))
      (let ((receivers (loop repeat 5 collect (wait-until-parked
                                               (spawn (group) (values (receive channel)))))))
        (dotimes (i 5) (send channel i))
        (is (equal '(0 1 2 3 4) (join-all receivers))))
      (let ((senders (loop for i below 5
                           collect (wait-until-parked
                                    (let ((i i)) (spawn (group) (send channel i)))))))
        (is (equal '(0 1 2 3 4) (loop repeat 5 collect (receive channel))))
        (is (all-true-p (join-all senders)))))))

(test closing-wakes-all
  (on-carriers (n)
    (let ((empty (make-channel)) (full (make-channel :capacity 1)))
      (send full 0)
      (let ((results (mixed n 20 5
                            (lambda (i)
                              (cond ((= i 0)
                                     (sleep 1/20)
                                     (list (close-channel empty) (close-channel full)))
                                    ((evenp i) (received empty))
                                    (t (handler-case (send full i)
                                         (channel-closed () :refused))))))))
        (is (equal '(t t) (first results)))
        (loop for i from 1 for result in (rest results)
              do (is (equal (if (evenp i) '(nil nil :closed) :refused) result)))
        (is (equal '(0 t) (received full)))
        (is (equal '(nil nil :closed) (received full)))
        (is (lines-empty-p full))))))

;;;; not to the end

(test time-outs-lose-nothing
  (on-carriers (n)
    (let* ((channel (make-channel)) (sent (make-flag)) (got (make-flag)))
      (mixed n 20 4
             (lambda (i)
               (loop for k below 100
                     do (if (evenp i)
                            (when (send channel (+ (* 1000 i) k) :timeout (random 1d-3))
                              (note sent (+ (* 1000 i) k)))
                            (multiple-value-bind (value received-p)
                                (receive channel :timeout (random 1d-3))
                              (when received-p (note got value)))))))
      (is (equal (sort (flag-notes sent) #'<) (sort (flag-notes got) #'<)))
      (is (lines-empty-p channel)))))

(test deadlines-are-signalled
  (on-carriers (n)
    (let ((channel (make-channel)))
      (flet ((deadline-p (function)
               (handler-case (sb-sys:with-deadline (:seconds 1/50) (funcall function))
                 (sb-sys:deadline-timeout () t))))
        (is (all-true-p (mixed n 2 2
                               (lambda (i)
                                 (deadline-p (if (evenp i)
                                               (lambda () (receive channel))
                                               (lambda () (receive channel :timeout 60))))))))
        (is (lines-empty-p channel))))))

;;; The next one comes when the last one has begun: a thread survives eight on top of each other.
(defun strike (victim pending)
  "Interrupt VICTIM, such that it throws to STRUCK, if the last interruption is not PENDING."
  (when (= 0 (sb-ext:compare-and-swap (car pending) 0 1))
    (handler-case
        (sb-thread:interrupt-thread victim
                                    (lambda ()
                                      (setf (car pending) 0)
                                      (ignore-errors (throw 'struck nil))))
      (sb-thread:interrupt-thread-error ()))))

(defun strike-until (victims done)
  (let ((pending (mapcar (lambda (victim) (declare (ignore victim)) (list 0)) victims)))
    (loop until (flag-value done)
          do (mapc #'strike victims pending)
             (sleep 1/5000))))

(defun call-while-struck (group function arguments send)
  "Call FUNCTION with ARGUMENTS in four fibers of GROUP and in two threads, which are interrupted
until all have returned; and SEND in a fiber meanwhile."
  (let* ((done (make-flag))
         (receivers (append (loop repeat 4 collect (spawn (group) (apply function arguments)))
                            (loop repeat 2 collect (make-thread function :arguments arguments))))
         (storm (make-thread #'strike-until :arguments (list receivers done))))
    (join (spawn (group) (funcall send)))
    (dolist (receiver receivers) (join-thread receiver :timeout *patience*))
    (raise-flag done)
    (join-thread storm :timeout *patience*)))

(defun receive-while-struck (channel got)
  "Receive until CHANNEL is closed, and note in GOT what was received, though interruptions unwind
the waits."
  (loop
    (sb-sys:without-interrupts
      (catch 'struck
        (multiple-value-bind (value received-p why)
            (sb-sys:allow-with-interrupts (receive channel))
          (cond (received-p (note got value))
                ((eq why :closed) (return))))))))

;;; Prevents: a value that is lost with a receiver which is unwound when it has been given it.
(test interruptions-lose-nothing
  (on-carriers (n)
    (dolist (capacity '(0 2))
      (let ((channel (make-channel :capacity capacity)) (got (make-flag)))
        (with-group (group n)
          (call-while-struck group #'receive-while-struck (list channel got)
                             (lambda ()
                               (dotimes (i 2000) (send channel i) (yield-at-random))
                               (close-channel channel))))
        (is (equal (loop for i below 2000 collect i) (sort (flag-notes got) #'<)))
        (is (lines-empty-p channel))))))

;;; Prevents: a fiber that asks for ever whether it may be interrupted, and keeps its carrier.
(test waits-that-are-not-interrupted
  (with-group (group 1)
    (let* ((channel (make-channel))
           (fiber (wait-until-parked
                   (spawn (group)
                     (sb-sys:without-interrupts (receive channel))))))
      (terminate-fiber fiber)
      (join (spawn (group) (fiber-yield) (send channel 1)))
      (is (eq :abort (wait-for-end fiber)))
      (is (lines-empty-p channel)))))

(test terminated-waiters-are-forgotten
  (on-carriers (n)
    (let ((channel (make-channel)))
      (with-group (group n)
        (let ((fibers (loop for i below 20
                            collect (wait-until-parked
                                     (spawn (group) (receive channel))))))
          (mapc #'terminate-fiber (butlast fibers))
          (is (every (lambda (fiber) (eq :abort (wait-for-end fiber))) (butlast fibers)))
          (send channel :value)
          (is (eq :value (join (first (last fibers)))))))
      (is (lines-empty-p channel)))))
