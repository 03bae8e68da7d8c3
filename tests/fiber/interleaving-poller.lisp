;;;; All orders of the steps of fibers that wait for descriptors, and of what reports and closes
;;;; those: fiber/waiter-map.lisp

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
    (steps::wait-for-fd fiber *cell* sb-fiber::+input+ deadline (steps::note-file *cell*))))

(defun wait-for-output (fiber)
  (in-test-fiber (fiber)
    (steps::wait-for-fd fiber *cell* sb-fiber::+output+ nil (steps::note-file *cell*))))

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

;;; A fiber that waits for output, in vain, must not make the poller forget the other.
(defparameter *input-only*
  (history ((reader (make-test-fiber))
            (writer (make-test-fiber))
            (result nil))
      (("reader" (setf result (wait-for-input reader)))
       ("writer" (setf (epoll-ready *epoll*) sb-fiber::+input+)
                 (steps::add-waiter *cell* writer sb-fiber::+output+
                                    (sb-fiber::scheduler-poller *scheduler*)
                                    (steps::note-file *cell*)))
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

;;; A fiber that joins one that cannot wait must not wait for a report that was never asked for.
(defparameter *two-failures*
  (history ((first (make-test-fiber))
            (second (make-test-fiber))
            (first-result nil) (second-result nil))
      (("first" (setf (epoll-errno *epoll*) sb-unix:ebadf
                      first-result (wait-for-input first)))
       ("second" (setf (epoll-errno *epoll*) sb-unix:ebadf
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
    (steps::add-waiter cell fiber sb-fiber::+input+ (sb-fiber::scheduler-poller *scheduler*) 0)
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
  (problem (not (and (eq (steps::outcome-of-wait (sb-fiber::fiber-wait-result fiber)) :closed)
                     (eq (stack-state fiber) :runnable)))
           "The fiber that waited for output does not know that the descriptor is closed."))

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
      (("fiber" (setf (epoll-errno *epoll*) sb-unix:ebadf)
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
  (holds *close* :switches 3)
  (holds *close-and-interruption* :switches 3)
  (holds *close-and-failure* :switches 3))

(test bug-arming-for-one-direction-only
  (with-changes (("HOW-TO-ARM" "(wanted-directions cell index)"
                               "(if (fd-cell-output cell) +output+ +input+)"))
    (fails *input-only*)))

(test bug-not-arming-for-the-next-in-the-chain
  (with-changes (("HANDLE-REPORT" "(/= wanted 0)" "nil"))
    (fails *two-readers*)))

;;; The older of two wishes replaces the younger in the kernel.
(test bug-arming-two-at-a-time
  (with-changes (("WISH-TO-ARM" "(not (logtest old +arming-now+))" "t"))
    (fails *input-only*)))

(test bug-a-wish-that-is-overlooked
  (with-changes (("NEXT-ARMING" "(= wishes 0)" "(or (= wishes 0) (= wishes +output+))"))
    (fails *both-directions*)))

(test bug-arming-before-waiting
  (with-changes (("BEGIN-TO-WAIT" "(add-waiter cell fiber direction poller file)"
                                  "(progn
                                     (wish-to-arm cell direction)
                                     (arm-cell cell)
                                     (append-waiter (fd-cell-input cell) fiber)
                                     :waits)")
                 ("HOW-TO-ARM" "(wanted-directions cell index)" "+input+"))
    (fails *report-and-unpark*)))

(test bug-timing-out-after-a-report
  (with-changes (("WAIT-FOR-FD" "(when (remove-waiter cell fiber direction) (return :timeout))"
                                "(return :timeout)"))
    (fails *report-or-time-out*)))

(test bug-saying-closed-too-early
  (with-changes (("TAKE-WAITERS" ":closing" ":closed"))
    (fails *close*)))

;;;; Two pollers

(defun make-waiter (place next)
  "A parked fiber in front of NEXT in the chain of *CELL*, by PLACE, a SETF function."
  (let ((fiber (make-test-fiber :phase sb-fiber::+parked+ :stack :suspended)))
    (setf (sb-fiber::fiber-wait-next fiber) next)
    (funcall place fiber *cell*)
    fiber))

(defun armed-in-p (poller direction)
  (find-if (lambda (entry)
             (and (= (car entry) (sb-fiber::poller-epoll poller))
                  (logtest direction (cdr entry))))
           (epoll-log *epoll*)))

;;; A report disarms both directions. Those that wait for input go away, and the next waits in
;;; another poller.
(defparameter *exchange-of-readers*
  (history ((second (make-waiter #'(setf sb-fiber::fd-cell-input) nil))
            (first (make-waiter #'(setf sb-fiber::fd-cell-input) second))
            (writer (make-waiter #'(setf sb-fiber::fd-cell-output) nil))
            (third (make-test-fiber))
            (poller (sb-fiber::scheduler-poller *scheduler*))
            (other (sb-fiber::scheduler-poller (make-test-scheduler nil 1))))
      (("report" (steps::handle-report poller (sb-fiber::fd-cell-data *cell*) sb-fiber::+input+))
       ("second" (steps::remove-waiter *cell* second sb-fiber::+input+))
       ("third" (setf (svref steps::*pollers* 1) other)
                (steps::add-waiter *cell* third sb-fiber::+input+ other 0)))
    (let ((input-poller (svref steps::*pollers* (sb-fiber::fd-cell-input-poller *cell*))))
      (or (problem (sb-fiber::fiber-wait-next first) "The first of two is still in a chain.")
          (problem (not (and (eq writer (sb-fiber::fd-cell-output *cell*))
                             (armed-in-p poller sb-fiber::+output+)))
                   "Nobody would report to the writer.")
          (problem (not (and (sb-fiber::fd-cell-input *cell*)
                             (armed-in-p input-poller sb-fiber::+input+)))
                   "Nobody would report to the reader.")))))

(test readers-that-are-exchanged
  (holds *exchange-of-readers*))

(test bug-a-wish-for-one-direction-only
  (with-changes (("HANDLE-REPORT"
                  "(wish-to-arm cell wanted)"
                  "(wish-to-arm cell (if (logtest wanted +input+) +input+ +output+))"))
    (fails *exchange-of-readers*)))

(test bug-a-wish-that-is-taken-out-too-early
  (with-changes (("WISHES-FOR-POLLER" "(directions-of-poller cell index)"
                                       "(logior +input+ +output+)"))
    (fails *exchange-of-readers*)))

;;;; A poller that is freed while a fiber of another group waits in it

(defun free-first-poller (heir)
  (let ((poller (svref steps::*pollers* 0)))
    (setf (steps::svref steps::*pollers* 0) t)
    (perform-fence)
    (perform-when-needed :read poller 'steps::poller-users (constantly nil)
                         (lambda () (= 0 (sb-fiber::poller-users poller))))
    (steps::forget-poller-in-cells 0 (constantly heir))
    (close-epoll poller)))

(defparameter *free-poller*
  (history ((fiber (make-test-fiber))
            (heir (sb-fiber::scheduler-poller (make-test-scheduler nil 1)))
            (result nil))
      (("fiber" (setf (svref steps::*pollers* 1) heir
                      result (wait-for-input fiber)))
       ("freer" (let ((cell *cell*))
                  (perform :read cell 'steps::fd-cell-input (constantly nil)
                           (lambda () (sb-fiber::fd-cell-input cell))))
                (free-first-poller heir))
       ("epoll" (serve-epoll heir)))
    (or (results-problem :ready result) (phase-problem fiber) (cell-problem))))

;;; The first of two ends by its time-out, and belongs to no group then.
(defparameter *free-poller-and-end*
  (history ((second (make-waiter #'(setf sb-fiber::fd-cell-input) nil))
            (first (make-waiter #'(setf sb-fiber::fd-cell-input) second))
            (heir (sb-fiber::scheduler-poller (make-test-scheduler nil 1))))
      (("first" (when (steps::remove-waiter *cell* first sb-fiber::+input+)
                  (setf (steps::fiber-heap first) :ended)))
       ("freer" (setf (svref steps::*pollers* 1) heir)
                (steps::forget-poller-in-cells
                 0 (lambda (fiber) (if (eq :ended (steps::fiber-heap fiber)) nil heir)))))
    (problem (not (and (eq second (first (last (chain-of (sb-fiber::fd-cell-input *cell*)))))
                       (armed-in-p heir sb-fiber::+input+)))
             "Nobody would report to the second.")))

;;; The first ends, and its group, which frees the heir. The next who waits has a poller of its own.
(defparameter *free-poller-and-heir*
  (history ((first (make-waiter #'(setf sb-fiber::fd-cell-input) nil))
            (next (make-test-fiber))
            (heir (sb-fiber::scheduler-poller (make-test-scheduler nil 1)))
            (other (sb-fiber::scheduler-poller (make-test-scheduler nil 2)))
            (pollers (setf steps::*pollers* (vector t heir other))))
      (("first" (when (steps::remove-waiter *cell* first sb-fiber::+input+)
                  (steps::forget-poller-in-cells 1 (constantly nil))
                  (setf (steps::svref pollers 1) nil)
                  (steps::add-waiter *cell* next sb-fiber::+input+ other 0)))
       ("freer" (steps::forget-poller-in-cells 0 (lambda (fiber) (if (eq fiber next) other heir)))))
    (problem (not (and (= 2 (sb-fiber::fd-cell-input-poller *cell*))
                       (armed-in-p other sb-fiber::+input+)))
             "Nobody would report to the next.")))

(defun chain-of (fiber)
  (loop while fiber collect fiber do (setf fiber (sb-fiber::fiber-wait-next fiber))))

(test a-poller-that-is-freed
  (holds *free-poller*)
  (holds *free-poller-and-end*))

(test a-poller-and-its-heir-that-are-freed
  (holds *free-poller-and-heir*))

(test bug-rearming-for-one-who-has-left
  (with-changes (("REARM-ELSEWHERE" "(eq first (first-in-poller cell direction index))" "t"))
    (fails *free-poller-and-heir*)))

(test bug-asking-one-for-the-heir
  (with-changes (("FIND-HEIR" "(eq first (first-in-poller cell direction index))" "t"))
    (fails *free-poller-and-end*)))

(test bug-arming-in-a-poller-that-is-freed
  (with-changes (("ARM-IN-POLLER" "(eq poller (svref *pollers* index))" "t"))
    (fails *free-poller*)))

(test bug-not-arming-in-the-next-poller
  (with-changes (("REARM-ELSEWHERE" "(wish-to-arm cell direction)" "nil"))
    (fails *free-poller*)))

;;;; Numbers that are closed and used again

(defun close-and-reuse ()
  "Close the descriptor, and give its number to another file."
  (let ((mark (steps::note-close 3)))
    (next-file)
    (next-file)
    (steps::note-closed 3 mark)))

(defun noted-file ()
  "What NOTE-FILE returns, and the last file that this may stand for."
  (let ((file (steps::note-file *cell*)))
    (values file (current-file))))

;;; Any number of comparisons: none finds the noted file once there is another one.
(defparameter *compare-and-close*
  (history ((mistaken nil))
      (("fiber" (multiple-value-bind (file last) (noted-file)
                  (loop repeat 2
                        do (let ((before (current-file)))
                             (when (and (steps::same-file-p *cell* file) (> before last))
                               (setf mistaken t))))))
       ("closer" (close-and-reuse)))
    (problem mistaken "Another file was taken for the same.")))

(define-condition called-without-comparing (error) ())

(defun call-in-history (fiber)
  "Call a function on the descriptor, as accept or recv are, that would wait the first time."
  (in-test-fiber (fiber)
    (let ((calls 0))
      (handler-case
          (steps::call-on-file (lambda ()
                                 (unless *compared* (error 'called-without-comparing))
                                 (if (= 1 (incf calls)) -1 1))
                               *cell* (steps::note-file *cell*) sb-fiber::+input+ t)
        (descriptor-closed () :closed)
        (called-without-comparing () :another)))))

(defparameter *call-and-close*
  (history ((fiber (make-test-fiber))
            (result nil))
      (("fiber" (setf result (call-in-history fiber)))
       ("closer" (close-and-reuse))
       ("epoll" (serve-epoll)))
    (or (problem (not (member result '(1 :closed))) "The result is ~S." result)
        (phase-problem fiber) (cell-problem))))

;;; Neither the old file nor the next is ever ready.
(defun wait-for-file (fiber file)
  (in-test-fiber (fiber)
    (handler-case (steps::park-on-file *cell* file sb-fiber::+input+ nil)
      (descriptor-closed () :closed))))

(defparameter *wait-and-close*
  (history ((fiber (make-test-fiber))
            (result nil))
      (("fiber" (multiple-value-bind (file last) (noted-file)
                  (setf result (if (= last 2) :next (wait-for-file fiber file)))))
       ("closer" (close-and-reuse)))
    (or (problem (not (member result '(:closed :next))) "The result is ~S." result)
        (phase-problem fiber) (cell-problem))))

(test numbers-that-are-used-again
  (holds *compare-and-close*)
  (holds *call-and-close*)
  (holds *wait-and-close*))

(test bug-noting-the-generation-only
  (with-changes (("NOTE-FILE" "(fd-cell-closing cell)" "nil"))
    (fails *compare-and-close*)))

(test bug-noting-the-generation-last
  (with-changes (("NOTE-FILE" "(let ((generation (fd-cell-generation cell)))
                                 (if (fd-cell-closing cell)
                                     (- -1 (file-identity (fd-cell-fd cell)))
                                     generation))"
                              "(if (fd-cell-closing cell)
                                   (- -1 (file-identity (fd-cell-fd cell)))
                                   (fd-cell-generation cell))"))
    (fails *compare-and-close*)))

(test bug-not-comparing-after-a-wait
  (with-changes (("PARK-ON-FILE" "(ensure-same-file cell file)" "nil")
                 ("CALL-ON-FILE" "(if-same-file (cell file) (funcall function))"
                  "(progn (setf sb-fiber-tests::*compared* (= tries 1)) (funcall function))"))
    (fails *call-and-close*)))

(test bug-waiting-for-the-next-file
  (with-changes (("ADD-WAITER" "(and (>= file 0) (/= file (fd-cell-generation cell)))" "nil"))
    (fails *wait-and-close*)))

(test bug-waiting-for-the-next-file-when-late
  (with-changes (("WAIT-FOR-FD" "(or (>= file 0) (same-file-p cell file)
                                     (not (remove-waiter cell fiber direction)))" "t"))
    (fails *wait-and-close*)))

(test bug-not-waking-the-late
  (with-changes (("NOTE-CLOSED" "(wake-late-waiters cell mark)" "nil"))
    (fails *wait-and-close*)))

;;;; A descriptor that is kept

(defun use-keepers (&optional (epoll-ready sb-fiber::+output+))
  "Let the pollers be :PERSISTENT. Nothing can be read yet. Return a second poller."
  (setf *scheduler* (make-test-scheduler nil 0 t)
        (epoll-ready *epoll*) epoll-ready
        (sb-fiber::fd-cell-kind *cell*) :stream)
  (let ((other (make-test-scheduler nil 1 t)))
    (setf steps::*pollers* (vector (sb-fiber::scheduler-poller *scheduler*)
                                   (sb-fiber::scheduler-poller other)
                                   nil))
    other))

(defun receive-or-wait (fiber)
  "Receive an octet as UNIX-READ-NOW does and those who call it. Return true at the end."
  (in-test-fiber (fiber)
    (loop
      (when (= 1 (steps::proving-blocked (*cell* sb-fiber::+input+) (receive-octet)))
        (return t))
      (steps::wait-for-fd fiber *cell* sb-fiber::+input+ nil 0))))

(defun received-problem (received n)
  (or (problem (/= received n) "~D octets have been received." received)
      (cell-problem)))

(defparameter *kept-reader*
  (history ((poller (use-keepers))
            (reader (make-test-fiber))
            (received 0))
      (("reader" (loop repeat 2 do (receive-or-wait reader) (incf received)))
       ("sender" (loop repeat 2 do (send-octet)))
       ("epoll" (serve-epoll)))
    (received-problem received 2)))

(defparameter *two-kept-readers*
  (history ((poller (use-keepers))
            (first (make-test-fiber))
            (second (make-test-fiber))
            (received 0))
      (("first" (receive-or-wait first) (incf received))
       ("second" (receive-or-wait second) (incf received))
       ("sender" (loop repeat 2 do (send-octet)))
       ("epoll" (serve-epoll)))
    (received-problem received 2)))

;;; Who has read a part waits for the rest, which has been there as long, without trying.
(defparameter *kept-and-not-tried*
  (history ((poller (use-keepers))
            (reader (make-test-fiber))
            (received 0))
      (("reader" (receive-or-wait reader)
                 (in-test-fiber (reader)
                   (steps::wait-for-fd reader *cell* sb-fiber::+input+ nil 0))
                 (setf received (receive-octet)))
       ("sender" (loop repeat 2 do (send-octet)))
       ("epoll" (serve-epoll)))
    (received-problem received 1)))

;;; It reads once on each of two carriers.
(defparameter *kept-by-another*
  (history ((other (use-keepers))
            (here *scheduler*)
            (reader (make-test-fiber))
            (received 0))
      (("reader" (dolist (scheduler (list here other))
                   (let ((*scheduler* scheduler)) (receive-or-wait reader))
                   (incf received)))
       ("sender" (loop repeat 2 do (send-octet)))
       ("epoll" (serve-epoll))
       ("other epoll" (serve-epoll (sb-fiber::scheduler-poller other))))
    (received-problem received 2)))

;;; One waits for input and one for output, on two carriers; there is room once it has been read.
(defparameter *kept-for-both*
  (history ((other (use-keepers 0))
            (reader (make-test-fiber))
            (writer (make-test-fiber))
            (received 0) (written nil))
      (("reader" (receive-or-wait reader)
                 (incf received)
                 (let ((epoll *epoll*))
                   (perform :locked epoll 'armed
                            (lambda ()
                              (setf (epoll-ready epoll) sb-fiber::+output+)
                              (note-change epoll sb-fiber::+output+)))))
       ("writer" (let ((*scheduler* other))
                   (setf written (wait-for-output writer))))
       ("sender" (send-octet))
       ("epoll" (serve-epoll))
       ("other epoll" (serve-epoll (sb-fiber::scheduler-poller other))))
    (or (received-problem received 1) (results-problem :ready written))))

;;; The keeper is freed while a fiber of another group waits in it, or is about to.
(defparameter *keeper-that-is-freed*
  (history ((other (use-keepers))
            (heir (sb-fiber::scheduler-poller other))
            (reader (make-test-fiber))
            (poller (sb-fiber::scheduler-poller *scheduler*))
            (keeper (setf (sb-fiber::fd-cell-keeper *cell*) 0))
            (armed (push (make-registration (sb-fiber::poller-epoll poller)
                                            (logior sb-fiber::+keep+ 3)
                                            (sb-fiber::fd-cell-data *cell*))
                         (epoll-registrations *epoll*)))
            (writer (make-waiter #'(setf sb-fiber::fd-cell-output) nil))
            (received 0))
      (("reader" (let ((*scheduler* other)) (receive-or-wait reader))
                 (incf received))
       ("freer" (free-first-poller heir))
       ("sender" (send-octet))
       ("other epoll" (serve-epoll heir)))
    (problem (/= received 1) "~D octets have been received." received)))

(defparameter *kept-and-closed*
  (history ((poller (use-keepers))
            (reader (make-test-fiber))
            (result nil))
      (("reader" (setf result (multiple-value-bind (file last) (noted-file)
                                (if (= last 2) :next (wait-for-file reader file)))))
       ("closer" (close-and-reuse))
       ("epoll" (serve-epoll)))
    (or (problem (not (member result '(:closed :next))) "The result is ~S." result)
        (phase-problem reader) (cell-problem))))

(test no-edge-is-lost
  (holds *kept-reader* :switches 3)
  (holds *two-kept-readers* :switches 2)
  (holds *kept-and-not-tried* :switches 3))

(test keepers-that-change
  (holds *kept-by-another* :switches 2)
  (holds *kept-for-both* :switches 2)
  (holds *keeper-that-is-freed* :switches 2)
  (holds *kept-and-closed* :switches 3))

(test bug-not-keeping-an-edge
  (with-changes (("NOTE-REPORT-OF-KEEPER" "(update-readiness (old cell) (logior directions old))"
                                          "nil"))
    (fails *kept-reader*)))

(test bug-forgetting-an-edge-that-came-since
  (with-changes (("NOTE-BLOCKED" "(cas (fd-cell-readiness cell) seen
                                       (readiness-with seen
                                                       (logandc2 (logand seen 3) direction)))"
                                 "(setf (fd-cell-readiness cell) 0)"))
    (fails *kept-reader*)))

(test bug-relying-on-a-keeper-that-has-reported
  (with-changes (("CHOOSE-KEEPER" "(values index t)"
                                  "(progn (setf (fd-cell-readiness cell) 0) (values index t))"))
    (fails *kept-and-not-tried*)))

(test bug-trusting-what-was-reported
  (with-changes (("WAIT-FOR-FD" "(still-ready-p cell direction)" "t"))
    (fails *kept-and-not-tried*)))

(test bug-leaving-who-waits-in-the-old-keeper
  (with-changes (("CHOOSE-KEEPER" "(/= 0 (wanted-directions cell keeper))" "nil"))
    (fails *kept-for-both*)))

(test bug-a-new-keeper-that-is-not-armed
  (with-changes (("HOW-TO-ARM" "(logior +keep+ +input+ +output+)" "(wanted-directions cell index)"))
    (fails *kept-reader*)))

(test bug-forgetting-what-was-armed
  (with-changes (("ARM-FOR-ALL" "(and (= data (fd-cell-data cell))
                                      (eql index (fd-cell-keeper cell)))"
                                "nil"))
    (fails *kept-reader* :switches 3)))

;;; Who made the keeper has gone before it was armed, and fibers of a group with other pollers wait
;;; for the same direction. The next relies on the keeper.
(defparameter *keeper-of-one-who-has-gone*
  (history ((other (use-keepers))
            (first (make-test-fiber))
            (second (make-test-fiber))
            (reader (make-test-fiber))
            (one-shot (sb-fiber::scheduler-poller (make-test-scheduler nil 2)))
            (received 0))
      (("arming" (when (with-first-wish) (steps::arm-cell *cell*)))
       ("first" (steps::add-waiter *cell* first sb-fiber::+input+
                                   (sb-fiber::scheduler-poller *scheduler*) 0)
                (steps::remove-waiter *cell* first sb-fiber::+input+)
                (setf (svref steps::*pollers* 2) one-shot)
                (steps::add-waiter *cell* second sb-fiber::+input+ one-shot 0)
                (steps::remove-waiter *cell* second sb-fiber::+input+)
                (receive-or-wait reader)
                (incf received))
       ("sender" (send-octet))
       ("epoll" (serve-epoll)))
    (received-problem received 1)))

(defun with-first-wish ()
  "Become the thread that arms, for output of which nobody is in want."
  (steps::with-tiny-lock ((steps::fd-cell-lock *cell*))
    (steps::wish-to-arm *cell* sb-fiber::+output+)))

(test a-keeper-of-one-who-has-gone
  (holds *keeper-of-one-who-has-gone* :switches 2))

(test bug-no-wish-for-the-keeper
  (with-changes (("BEGIN-TO-KEEP" "(logior +keeper+ (fd-cell-arming cell))"
                                  "(fd-cell-arming cell)"))
    (fails *keeper-of-one-who-has-gone* :switches 2)))

(test bug-a-keeper-of-the-past
  (with-changes (("FORGET-POLLER-IN-CELLS" "(drop-keeper cell index)" "nil"))
    (fails *keeper-that-is-freed*)))
