;;;; All orders of the steps of those who wait for descriptors, report and close them: fiber-poller.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/histories.lisp" *load-truename*))

(def-suite* interleaving-poller)

(defun wait-for-input (fiber &optional deadline)
  (in-test-fiber (fiber)
    (steps::wait-for-fd fiber *cell* sb-fiber::+input+ deadline)))

(defun wait-for-output (fiber)
  (in-test-fiber (fiber)
    (steps::wait-for-fd fiber *cell* sb-fiber::+output+ nil)))

(defun results-problem (expected &rest results)
  (problem (notevery (lambda (result) (eq result expected)) results)
           "The results are ~S." results))

(defparameter *both-directions*
  (history ((reader (make-test-fiber))
            (writer (make-test-fiber))
            (read nil) (written nil))
      (("reader" (setf read (wait-for-input reader)))
       ("writer" (setf written (wait-for-output writer)))
       ("epoll" (serve-epoll)))
    (or (results-problem :ready read written) (phase-problem reader writer) (cell-problem))))

;;; One who waits for output, in vain, must not make the poller forget the other.
(defparameter *input-only*
  (history ((reader (make-test-fiber))
            (writer (make-test-fiber))
            (result nil))
      (("reader" (setf result (wait-for-input reader)))
       ("writer" (setf (epoll-ready *epoll*) sb-fiber::+input+)
                 (steps::add-waiter *cell* writer sb-fiber::+output+
                                    (sb-fiber::scheduler-poller *scheduler*)))
       ("epoll" (serve-epoll)))
    (results-problem :ready result)))

(defparameter *two-readers*
  (history ((first (make-test-fiber))
            (second (make-test-fiber))
            (first-result nil) (second-result nil))
      (("first" (setf first-result (wait-for-input first)))
       ("second" (setf second-result (wait-for-input second)))
       ("epoll" (serve-epoll)))
    (or (results-problem :ready first-result second-result)
        (phase-problem first second) (cell-problem))))

;;; Who joins one that cannot wait must not wait for a report that nobody has asked for.
(defparameter *two-failures*
  (history ((first (make-test-fiber))
            (second (make-test-fiber))
            (first-result nil) (second-result nil))
      (("first" (setf (epoll-errno *epoll*) 9
                      first-result (wait-for-input first)))
       ("second" (setf (epoll-errno *epoll*) 9
                       second-result (wait-for-input second))))
    (or (results-problem :closed first-result second-result) (cell-problem))))

(defparameter *report-or-time-out*
  (history ((fiber (make-test-fiber))
            (result nil))
      (("fiber" (setf result (wait-for-input fiber 10)))
       ("time" (pass-time))
       ("epoll" (serve-epoll)))
    (or (problem (not (eq result (or (sb-fiber::fiber-wait-result fiber) :timeout)))
                 "The result is ~S, in the fiber it is ~S."
                 result (sb-fiber::fiber-wait-result fiber))
        (phase-problem fiber) (cell-problem) (heap-problem))))

;;; Somebody unparks the fiber for another reason; what it waits for must not be lost by that.
(defparameter *report-and-unpark*
  (history ((fiber (make-test-fiber))
            (result nil))
      (("fiber" (setf result (wait-for-input fiber)))
       ("other" (steps::unpark fiber))
       ("epoll" (serve-epoll)))
    (or (results-problem :ready result) (phase-problem fiber) (cell-problem))))

(defun close-when-waited-for ()
  "Close the descriptor once a fiber waits for input."
  (let ((cell *cell*))
    (perform :read cell 'steps::fd-cell-input (constantly nil)
             (lambda () (sb-fiber::fd-cell-input cell))))
  (steps::note-close 3))

(defun wait-in-another-chain (fiber)
  (let ((cell (sb-fiber::make-fd-cell 4)))
    (steps::add-waiter cell fiber sb-fiber::+input+ (sb-fiber::scheduler-poller *scheduler*))
    cell))

(defun other-chain-problem (cell fiber)
  (problem (not (and (eq (sb-fiber::fd-cell-input cell) fiber)
                     (null (sb-fiber::fiber-wait-next fiber))
                     (null (sb-fiber::fiber-wait-result fiber))))
           "The chain in which the fiber waits now is broken."))

(defun make-waiting-writer ()
  (let ((fiber (make-test-fiber :phase sb-fiber::+parked+ :stack :suspended)))
    (setf (sb-fiber::fd-cell-output *cell*) fiber)))

(defun writer-problem (fiber)
  (problem (not (and (eq (sb-fiber::fiber-wait-result fiber) :closed)
                     (eq (stack-state fiber) :runnable)))
           "Who waited for output does not know that the descriptor is closed."))

;;; The fiber is woken early, and waits elsewhere as soon as it can: the closer's chain
;;; must be whole until its end.
(defparameter *close*
  (history ((fiber (make-test-fiber))
            (writer (make-waiting-writer))
            (other-cell nil)
            (result nil))
      (("fiber" (setf result (wait-for-input fiber))
                (setf other-cell (wait-in-another-chain fiber)))
       ("other" (steps::unpark fiber))
       ("closer" (close-when-waited-for)))
    (or (results-problem :closed result) (writer-problem writer)
        (other-chain-problem other-cell fiber))))

(defparameter *close-and-interruption*
  (history ((fiber (make-test-fiber))
            (writer (make-waiting-writer))
            (other-cell nil))
      (("fiber" (wait-for-input fiber)
                (setf other-cell (wait-in-another-chain fiber)))
       ("interrupter" (setf (steps::fiber-interruptions fiber) (list #'identity))
                      (steps::unpark fiber))
       ("closer" (steps::note-close 3)
                 ;; It may have come too late.
                 (setf (steps::fiber-interruptions fiber) (list #'identity))
                 (steps::unpark fiber)))
    (or (writer-problem writer) (other-chain-problem other-cell fiber))))

(defparameter *close-and-failure*
  (history ((fiber (make-test-fiber))
            (writer (make-waiting-writer))
            (other-cell nil))
      (("fiber" (setf (epoll-errno *epoll*) 9)
                (wait-for-input fiber)
                (setf (epoll-errno *epoll*) 0
                      other-cell (wait-in-another-chain fiber)))
       ("closer" (steps::note-close 3)))
    (or (writer-problem writer) (other-chain-problem other-cell fiber))))

(test no-report-is-lost
  (holds *both-directions*)
  (holds *input-only*)
  (holds *two-readers*)
  (holds *two-failures*)
  (holds *report-or-time-out* :switches 3)
  (holds *report-and-unpark* :store-buffers t))

(test closing-wakes-all
  (holds *close*)
  (holds *close-and-interruption*)
  (holds *close-and-failure*))

(test bug-arming-for-one-direction-only
  (with-changes (("ARM-CELL" "(wanted-directions cell index)"
                             "(if (fd-cell-output cell) +output+ +input+)"))
    (fails *input-only*)))

(test bug-not-arming-for-the-next-in-the-chain
  (with-changes (("HANDLE-REPORT" "(= (arm-cell cell poller) 0)" "t"))
    (fails *two-readers*)))

(test bug-arming-before-waiting
  (with-changes (("ADD-WAITER" "(with-tiny-lock ((fd-cell-lock cell))
                                  (if (= direction +input+)
                                      (chain-waiter (fd-cell-input cell) (fd-cell-input-poller cell)
                                                    fiber poller)
                                      (chain-waiter (fd-cell-output cell) (fd-cell-output-poller cell)
                                                    fiber poller)))"
                               "(progn
                                  (with-tiny-lock ((fd-cell-lock cell)) (arm-cell cell poller))
                                  (append-waiter (fd-cell-input cell) fiber)
                                  0)")
                 ("ARM-CELL" "(wanted-directions cell index)" "+input+"))
    (fails *report-and-unpark*)))

(test bug-timing-out-after-a-report
  (with-changes (("WAIT-FOR-FD" "(when (remove-waiter cell fiber direction) (return :timeout))"
                                "(return :timeout)"))
    (fails *report-or-time-out*)))

(test bug-saying-closed-too-early
  (with-changes (("TAKE-ALL-WAITERS" ":closing" ":closed"))
    (fails *close*)))
