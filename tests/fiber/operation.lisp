;;;; Operations: one of several sends, receipts and pauses

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "channel.lisp" *load-truename*))

(import '(sb-concurrency:select sb-concurrency:perform sb-concurrency:choose sb-concurrency:wrap
          sb-concurrency:send-operation sb-concurrency:receive-operation
          sb-concurrency:pause-operation))

(def-suite* operation)

(defun channel-with (&rest values)
  "A channel from which VALUES can be received."
  (let ((channel (make-channel :capacity (length values))))
    (dolist (value values channel) (send channel value))))

;;;; alone

(test clauses-of-select
  (let ((empty (make-channel)) (full (channel-with 1)))
    (is (equal '(1 t) (select ((receive full) (value received-p) (list value received-p))
                              ((receive empty) () :wrong))))
    (is (eq :sent (select ((send full 2) () :sent)
                          ((send empty 3) () :wrong))))
    (is (eql 2 (select ((receive full) (value) value))))
    (is (eq :nothing (select ((receive empty) () :wrong) (:default () :nothing))))
    (is (eq :late (select ((receive empty) () :wrong) ((:timeout 1/100) () :late))))
    (is (equal '(1 2) (multiple-value-list (select ((pause-operation 0) () (values 1 2))))))
    (is (eq :now (select ((receive empty) () :wrong) ((:timeout 0) () :now)
                         (:default () :wrong))))
    (is (lines-empty-p empty))))

(test clauses-that-are-none
  (dolist (form '((select 1) (select ((:timeout 1))) (select ((:timeout 1) (1)))
                  (select ((:timeout 1) (&rest values)))
                  (select (:default (value) value))
                  (select (:default () 1) (:default () 2))))
    (signals program-error (macroexpand-1 form)))
  (signals type-error (choose 1))
  (signals type-error (perform (opaque 1)))
  (signals type-error (pause-operation -1))
  (signals type-error (perform (choose) :timeout :soon)))

(test operations-are-objects
  (flet ((doubled (operation)
           (wrap operation (lambda (value received-p) (values (* 2 value) received-p)))))
    (let ((operation (doubled (doubled (choose (choose) (receive-operation
                                                         (channel-with 1 2 3)))))))
      (is (equal '(4 t) (multiple-value-list (perform operation))))
      (is (equal '(8 t) (multiple-value-list (perform operation :timeout 5))))
      (is (equal '(12 t) (multiple-value-list (perform operation :wait-p nil))))
      (is (equal '(nil nil :timeout) (multiple-value-list (perform operation :wait-p nil))))
      (is (equal '(nil nil :timeout) (multiple-value-list (perform operation :timeout 1/100)))))
    (is (equal '(nil nil :timeout) (multiple-value-list (perform (choose) :timeout 1/100))))
    (is (eq :first (perform (choose (wrap (pause-operation 1/100) (constantly :first))
                                    (wrap (pause-operation 3600) (constantly :second)))
                            :timeout 60)))))

(test closed-channels-can-be-chosen
  (let ((closed (make-channel)))
    (close-channel closed)
    (is (equal '(nil nil :closed)
               (select ((receive closed) (value received-p why) (list value received-p why)))))
    (signals channel-closed (select ((send closed 1) () :wrong)))
    (signals channel-closed (perform (choose (send-operation closed 1))))))

;;; Each of four is taken a quarter of the time; 800 of 4,000 is eight standard deviations away.
(test none-is-preferred
  (let* ((channels (loop repeat 4 collect (channel-with t)))
         (operation (apply #'choose
                           (loop for channel in channels for i from 0
                                 collect (let ((channel channel) (i i))
                                           (wrap (receive-operation channel)
                                                 (lambda (value received-p)
                                                   (declare (ignore received-p))
                                                   (send channel value)
                                                   i))))))
         (counts (make-array 4 :initial-element 0)))
    (loop repeat 4000 do (incf (svref counts (perform operation))))
    (is (every (lambda (count) (< 800 count 1200)) counts))))

;;;; among others

(test one-of-several-channels
  (on-carriers (n)
    (dolist (capacity '(0 2))
      (let ((channels (loop repeat 5 collect (make-channel :capacity capacity))))
        (with-group (group n)
          (let ((receiver (spawn (group)
                            (loop with operation = (apply #'choose
                                                          (mapcar #'receive-operation channels))
                                  repeat 1000
                                  collect (perform operation))))
                (senders (loop for channel in channels for i from 0
                               collect (let ((channel channel) (i i))
                                         (spawn (group)
                                           (dotimes (k 200) (send channel (+ (* 200 i) k))))))))
            (join-all senders)
            (is (equal (loop for i below 1000 collect i) (sort (join receiver) #'<)))))
        (is (every #'lines-empty-p channels))))))

(defun swap (mine other value)
  "Give VALUE, and return what the other gives, in whatever order."
  (select
    ((send mine value) () (values (receive other)))
    ((receive other) (got) (send mine value) got)))

;;; Both may choose at a time. Prevents: two that both think that the other gives, or neither.
(test selects-that-face-each-other
  (on-carriers (n)
    (let ((a (make-channel)) (b (make-channel)))
      (with-group (group n)
        (flet ((swapper (mine other)
                 (spawn (group)
                   (loop for i below 500
                         always (= i (swap mine other i))
                         do (yield-at-random)))))
          (is (all-true-p (join-all (list (swapper a b) (swapper b a)))))))
      (is (lines-empty-p a))
      (is (lines-empty-p b)))))

(test sending-and-receiving-at-once
  (let ((channel (make-channel)))
    (is (eq :alone (select ((send channel 1) () :wrong)
                           ((receive channel) () :wrong)
                           ((:timeout 1/50) () :alone))))
    (is (lines-empty-p channel))
    (on-carriers (n)
      (let ((sent (make-flag)) (got (make-flag)))
        (mixed n 8 4
               (lambda (i)
                 (dotimes (k 200)
                   (let ((value (+ (* 200 i) k)))
                     (select
                       ((send channel value) () (note sent value))
                       ((receive channel) (value) (note got value))
                       ((:timeout (random 2d-3)) ()))))))
        (is (equal (sort (flag-notes sent) #'<) (sort (flag-notes got) #'<)))
        (is (lines-empty-p channel))))))

(test closing-wakes-those-that-choose
  (on-carriers (n)
    (let ((a (make-channel)) (b (make-channel)) (c (make-channel)))
      (let ((results (mixed n 10 3
                            (lambda (i)
                              (cond ((= i 0)
                                     (sleep 1/50)
                                     (mapcar #'close-channel (list b c)))
                                    ((evenp i) (select ((receive a) () :wrong)
                                                       ((receive b) (v r why) (list v r why))))
                                    (t (handler-case (select ((receive a) () :wrong)
                                                             ((send c i) () :wrong))
                                         (channel-closed () :refused))))))))
        (loop for i from 1 for result in (rest results)
              do (is (equal (if (evenp i) '(nil nil :closed) :refused) result)))
        (is (every #'lines-empty-p (list a b c)))))))

;;;; not to the end

(defun choose-while-struck (channels got)
  "As RECEIVE-WHILE-STRUCK, of any of CHANNELS, until the first is closed."
  (let ((operation (apply #'choose (mapcar #'receive-operation channels))))
    (loop
      (sb-sys:without-interrupts
        (catch 'struck
          (multiple-value-bind (value received-p why)
              (sb-sys:allow-with-interrupts (perform operation))
            (cond (received-p (note got value))
                  ((eq why :closed) (return)))))))))

(test interruptions-lose-nothing-of-several
  (on-carriers (n)
    (let ((channels (loop repeat 3 collect (make-channel))) (got (make-flag)))
      (with-group (group n)
        (call-while-struck group #'choose-while-struck (list channels got)
                           (lambda ()
                             (dotimes (i 1500)
                               (send (nth (mod i 3) channels) i)
                               (yield-at-random))
                             (mapc #'close-channel channels))))
      ;; They end when one channel is closed, which may be before another is drained.
      (let ((left (loop for channel in channels append (all-received channel))))
        (is (equal (loop for i below 1500 collect i) (sort (append left (flag-notes got)) #'<))))
      (is (every #'lines-empty-p channels)))))

(test deadlines-of-choices
  (on-carriers (n)
    (let ((channel (make-channel)))
      (is (all-true-p (mixed n 2 2
                             (lambda (i)
                               (declare (ignore i))
                               (handler-case (sb-sys:with-deadline (:seconds 1/50)
                                               (select ((receive channel) () :wrong)
                                                       ((:timeout 60) () :wrong)))
                                 (sb-sys:deadline-timeout () t))))))
      (is (lines-empty-p channel)))))
