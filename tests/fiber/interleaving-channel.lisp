;;;; All orders of the steps of those that send, receive and choose: contrib/sb-concurrency

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/histories.lisp" *load-truename*))

(def-suite* interleaving-channel)

(defun neq (a b) (not (eq a b)))

(defun test-channel (&optional (capacity 0))
  (sb-concurrency:make-channel :capacity capacity))

(defun give (fiber channel value &optional deadline)
  "The outcome."
  (in-test-fiber (fiber) (steps::offer-and-wait channel value deadline)))

(defun take (fiber channel &optional deadline)
  "The value, or the outcome if that is not :DONE."
  (in-test-fiber (fiber)
    (multiple-value-bind (outcome value) (steps::accept-and-wait channel deadline)
      (if (eq outcome :done) value outcome))))

(defun branches (&rest transfers)
  "Branches for lists of a channel, a kind, and a value."
  (sb-concurrency::operation-branches
   (apply #'sb-concurrency:choose
          (loop for (channel kind . value) in transfers
                collect (if (eq kind :send)
                            (sb-concurrency:send-operation channel (first value))
                            (sb-concurrency:receive-operation channel))))))

(defun take-one (fiber deadline &rest transfers)
  "Do one of TRANSFERS: the channel, the kind, and the value or another outcome than :DONE."
  (in-test-fiber (fiber)
    (multiple-value-bind (branch outcome value)
        (steps::select-branch nil (apply #'branches transfers) deadline t)
      (if branch
          (let ((transfer (sb-concurrency::branch-leaf branch)))
            (list (sb-concurrency::transfer-channel transfer)
                  (sb-concurrency::transfer-kind transfer)
                  (cond ((neq outcome :done) outcome)
                        ((eq :send (sb-concurrency::transfer-kind transfer)) :done)
                        (t value))))
          :timeout))))

(defun line-problem (&rest channels)
  (or (waiter-problem)
      (loop for channel in channels
            thereis (problem (or (sb-concurrency::line-first
                                  (sb-concurrency::channel-senders channel))
                                 (sb-concurrency::line-first
                                  (sb-concurrency::channel-receivers channel)))
                             "Something is left in a line."))))

(defun sorted (values) (sort (copy-list values) #'string< :key #'princ-to-string))

;;;; one sends, another receives

(defparameter *send-and-receive*
  (history ((sender (make-test-fiber)) (receiver (make-test-fiber)) (channel (test-channel))
            (sent nil) (got nil))
      (("sender" (setf sent (give sender channel :value)))
       ("receiver" (setf got (take receiver channel))))
    (or (problem (not (equal '(:done :value) (list sent got))) "Sent: ~A, received: ~A." sent got)
        (line-problem channel) (phase-problem sender receiver))))

(defparameter *two-receive*
  (history ((sender (make-test-fiber)) (first (make-test-fiber)) (second (make-test-fiber))
            (channel (test-channel 1)) (a nil) (b nil))
      (("sender" (give sender channel 1) (give sender channel 2))
       ("first" (setf a (take first channel)))
       ("second" (setf b (take second channel))))
    (or (problem (/= 3 (+ a b)) "Received: ~A and ~A." a b)
        (line-problem channel) (phase-problem sender first second))))

(defparameter *send-or-time-out*
  (history ((sender (make-test-fiber)) (receiver (make-test-fiber)) (channel (test-channel))
            (sent nil) (got nil))
      (("sender" (setf sent (give sender channel :value 10)))
       ("receiver" (setf got (take receiver channel 10)))
       ("time" (pass-time)))
    (or (problem (neq (eq sent :done) (eq got :value)) "Sent: ~A, received: ~A." sent got)
        (line-problem channel) (phase-problem sender receiver)
        (heap-problem))))

(defparameter *send-or-close*
  (history ((sender (make-test-fiber)) (receiver (make-test-fiber)) (closer (make-test-fiber))
            (channel (test-channel)) (sent nil) (got nil))
      (("sender" (setf sent (give sender channel :value)))
       ("receiver" (setf got (take receiver channel)))
       ("closer" (in-test-fiber (closer) (steps::close-channel channel))))
    (or (problem (not (member (list sent got) '((:done :value) (:closed :closed)) :test #'equal))
                 "Sent: ~A, received: ~A." sent got)
        (line-problem channel) (phase-problem sender receiver))))

(test what-is-sent-is-received
  (holds *send-and-receive* :store-buffers t)
  (holds *two-receive* :switches 3))

(test transfer-and-time-out-exclude-each-other
  (holds *send-or-time-out* :switches 3))

(test transfer-and-close-exclude-each-other
  (holds *send-or-close* :switches 3))

(test bug-timing-out-though-chosen
  (with-changes (("WITHDRAW" "(state-becomes-p waiter +waiting+ +withdrawn+)" "t"))
    (fails *send-or-time-out* :switches 3)))

(test bug-staying-in-the-line
  (with-changes (("LEAVE-LINE" "(remove-node node)" "nil"))
    (fails *send-or-time-out* :switches 3)))

(test bug-leaving-before-one-is-served
  (with-changes (("WITHDRAW" "(await-service waiter)" "nil"))
    (fails *send-or-time-out* :switches 3)))

(test bug-serving-who-was-woken
  (with-changes (("WAKE-WAITER" "(setf (waiter-served-p waiter) t)" "nil"
                                "(wake-sleeper sleeper)"
                                "(progn (wake-sleeper sleeper) (setf (waiter-served-p waiter) t))"))
    (fails *send-or-time-out* :switches 3)))

(test bug-closed-is-taken-for-sent
  (with-changes (("OUTCOME-OF-CHOICE"
                  "(if (nth-value 1 (chosen-number (node-waiter node))) :closed :done)" ":done"))
    (fails *send-or-close* :switches 3)))

;;;; choosing

(defparameter *choose-of-two*
  (history ((receiver (make-test-fiber)) (first (make-test-fiber)) (second (make-test-fiber))
            (a (test-channel)) (b (test-channel)) (got '()))
      (("receiver" (dotimes (i 2)
                     (push (third (take-one receiver nil (list a :receive) (list b :receive)))
                           got)))
       ("first" (give first a 1))
       ("second" (give second b 2)))
    (or (problem (not (equal '(1 2) (sorted got))) "Received: ~A." got)
        (line-problem a b) (phase-problem receiver first second))))

(defun facing-problem (a b one other)
  "ONE has sent to A or received of B, OTHER the reverse."
  (or (problem (not (member (list one other)
                            (list (list (list a :send :done) (list a :receive 1))
                                  (list (list b :receive 2) (list b :send :done)))
                            :test #'equal))
               "One: ~A, the other: ~A." one other)
      (line-problem a b)))

(defparameter *two-face-each-other*
  (history ((first (make-test-fiber)) (second (make-test-fiber))
            (a (test-channel)) (b (test-channel)) (one nil) (other nil))
      (("first" (setf one (take-one first nil (list a :send 1) (list b :receive))))
       ("second" (setf other (take-one second nil (list b :send 2) (list a :receive)))))
    (or (facing-problem a b one other) (phase-problem first second))))

(defparameter *choose-or-time-out*
  (history ((receiver (make-test-fiber)) (sender (make-test-fiber))
            (a (test-channel)) (b (test-channel)) (sent nil) (got nil))
      (("receiver" (setf got (take-one receiver 10 (list a :receive) (list b :receive))))
       ("sender" (setf sent (give sender b 1 10)))
       ("time" (pass-time)))
    (or (problem (neq (eq sent :done) (equal got (list b :receive 1)))
                 "Sent: ~A, received: ~A." sent got)
        (line-problem a b) (phase-problem receiver sender) (heap-problem))))

(defparameter *choose-or-close*
  (history ((receiver (make-test-fiber)) (sender (make-test-fiber)) (closer (make-test-fiber))
            (a (test-channel)) (b (test-channel)) (sent nil) (got nil))
      (("receiver" (setf got (take-one receiver nil (list a :receive) (list b :receive))))
       ("sender" (setf sent (give sender a 1 10)))
       ("closer" (in-test-fiber (closer) (steps::close-channel b)))
       ("time" (pass-time)))
    (or (problem (neq (eq sent :done) (equal got (list a :receive 1)))
                 "Sent: ~A, received: ~A." sent got)
        (problem (not (member (third got) '(1 :closed))) "Received: ~A." got)
        (line-problem a b) (phase-problem receiver sender))))

(test one-of-two-is-chosen
  (holds *choose-of-two* :switches 2))

(test those-that-face-each-other-agree
  (holds *two-face-each-other* :switches 3))

(test choice-and-time-out-exclude-each-other
  (holds *choose-or-time-out* :switches 2))

(test choice-and-close-exclude-each-other
  (holds *choose-or-close* :switches 2))

(test bug-not-claiming-oneself
  (with-changes (("ENTER-LINES" "(try-branch branch node claim)"
                                "(try-branch branch node nil)"))
    (fails *two-face-each-other* :switches 3)))

(test bug-not-leaving-other-lines
  (with-changes (("WAIT-IN-LINES" "(leave-lines branches waiter)" "nil"))
    (fails *choose-of-two* :switches 2)))

(test bug-closed-though-chosen
  (with-changes (("WAIT-IN-LINES" "(not (withdraw waiter))" "nil"))
    (fails *choose-or-close* :switches 2)))
