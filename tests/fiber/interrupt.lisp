;;;; interruptions and termination of fibers: fiber/interrupt.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(require :sb-posix)
(require :sb-bsd-sockets)

(def-suite* interrupt)

(defun all-aborted-p (fibers)
  (every (lambda (fiber) (eq :abort (wait-for-end fiber))) fibers))

;;;; A fiber that computes

;;; Prevents: an interruption that waits for a fiber to park that never does.
(test interrupt-a-computation
  (on-carriers (n)
    (with-group (group n)
      (let* ((started (make-flag)) (done (make-flag)) (who '())
             (fiber (computing-fiber (group started) (compute-until done) :done)))
        (dotimes (i 10)
          (let ((i i))
            (interrupt-fiber fiber (lambda () (push (list i (current-fiber)) who)))))
        (is-true (wait-until (= 10 (length who))))
        (is (equal (loop for i below 10 collect (list i fiber)) (reverse who)))
        (sb-thread:interrupt-thread fiber (lambda () (raise-flag done)))
        (is (eq :done (join fiber)))))))

(test terminate-a-computation
  (on-carriers (n)
    (with-group (group n)
      (let* ((cleaned (make-flag)) (other (spawn (group) (fiber-park) :alive))
             (fibers (loop repeat n
                           collect (let ((started (make-flag)))
                                     (computing-fiber (group started)
                                       (unwind-protect (compute-until (make-flag))
                                         (count-one cleaned)))))))
        (mapc #'sb-thread:terminate-thread fibers)
        (is (all-aborted-p fibers))
        (is (= n (flag-count cleaned)))
        (fiber-unpark other)
        (is (eq :alive (join other)))))))

;;; Prevents: a fiber that was told to do something, and sleeps on, since the thread that told it
;;; was unwound before it woke the fiber.
(test unwound-while-waking
  (flet ((unwound-in (function &rest arguments)
           "How a thread ends that calls ARGUMENTS, and is terminated when that calls FUNCTION."
           (let* ((thread nil) (ready (make-flag)))
             (sb-int:encapsulate function 'unwound-in
                                 (lambda (f fiber)
                                   (when (eq sb-thread:*current-thread* thread)
                                     (sb-thread:terminate-thread thread))
                                   (funcall f fiber)))
             (unwind-protect
                  (progn (setf thread (make-thread (lambda ()
                                                     (wait-until (flag-value ready))
                                                     (apply #'funcall arguments))))
                         (raise-flag ready)
                         (join-thread thread :default :unwound :timeout *patience*))
               (sb-int:unencapsulate function 'unwound-in)))))
    (with-group (group 1)
      (let ((fiber (wait-until-parked (spawn (group) (fiber-park)))))
        (is (eq :unwound (unwound-in 'sb-fiber::unpark #'fiber-unpark fiber)))
        (is (eq t (join fiber))))
      (let ((fiber (wait-until-parked (spawn (group) (fiber-park)))))
        (is (eq :unwound (unwound-in 'sb-fiber::notify-of-interruption #'terminate-fiber fiber)))
        (is (all-aborted-p (list fiber)))))))

;;; The function parks where the computation was, which goes on on the same stack.
(test interruptions-of-computations-that-park
  (on-carriers (n)
    (with-group (group n)
      (let* ((started (make-flag)) (done (make-flag)) (parked (make-flag))
             (fiber (computing-fiber (group started) (compute-until done) :done)))
        (interrupt-fiber fiber (lambda ()
                                 (fiber-yield)
                                 (sleep 1/1000)
                                 (raise-flag parked)))
        (is-true (wait-until (flag-value parked)))
        (interrupt-fiber fiber (lambda () (sb-sys:with-interrupts (sleep 3600))))
        (wait-until-parked fiber)
        (interrupt-fiber fiber (lambda () (throw 'sb-thread::%return-from-thread :thrown)))
        (is (eq :thrown (join fiber)))))))

(test interruptions-of-computations-that-exit
  (on-carriers (n)
    (with-group (group n)
      (let* ((started (make-flag))
             (fiber (computing-fiber (group started)
                      (list (catch 'tag (compute-until (make-flag)))
                            sb-sys:*interrupts-enabled*
                            sb-kernel:*free-interrupt-context-index*
                            (progn (fiber-yield) :went-on)))))
        (interrupt-fiber fiber (lambda () (throw 'tag :thrown)))
        (is (equal '(:thrown t 0 :went-on) (join fiber)))))))

;;;; WITHOUT-INTERRUPTS

;;; Prevents: an interruption where none may be, and one that is forgotten because its signal came
;;; then.
(test computing-without-interrupts
  (on-carriers (n)
    (with-group (group n)
      (let* ((started (make-flag)) (leave (make-flag)) (interrupted (make-flag))
             (fiber (computing-fiber (group started)
                      (list (sb-sys:without-interrupts
                              (compute-until leave)
                              (flag-value interrupted))
                            (progn (compute-until interrupted) :seen)))))
        (interrupt-fiber fiber (lambda () (raise-flag interrupted)))
        (sleep 1/100)
        (is (not (flag-value interrupted)))
        (raise-flag leave)
        (is (equal '(nil :seen) (join fiber)))))))

;;; The signal was sent to a carrier that the fiber has left meanwhile, or was never sent.
;;; Afterwards the fiber does not park.
(test parking-without-interrupts
  (on-carriers (n)
    (with-group (group n)
      (dolist (wait (list (lambda () (fiber-park))
                          (lambda () (loop repeat 100 do (fiber-yield)))
                          (lambda () (sleep 1/100))
                          (let ((semaphore (sb-thread:make-semaphore)))
                            (lambda () (sb-thread:wait-on-semaphore semaphore :timeout 1/100)))))
        (let* ((started (make-flag)) (interrupted (make-flag))
               (fiber (computing-fiber (group started)
                        (list (sb-sys:without-interrupts
                                (funcall wait)
                                (flag-value interrupted))
                              (progn (compute-until interrupted) :seen)))))
          (interrupt-fiber fiber (lambda () (raise-flag interrupted)))
          (fiber-unpark fiber)
          (is (equal '(nil :seen) (join fiber))))))))

;;;; The beginning and the end

(test interrupt-oneself
  (on-carriers (n)
    (is (equal '(:now :after :inside :late :end)
               (let ((trace '()))
                 (in-fiber (n)
                   (interrupt-fiber (current-fiber) (lambda () (push :now trace)))
                   (push :after trace)
                   (sb-sys:without-interrupts
                     (sb-thread:interrupt-thread (current-fiber) (lambda () (push :late trace)))
                     (push :inside trace))
                   (push :end trace)
                   (reverse trace)))))
    (is (eq :abort (with-group (group n)
                     (wait-for-end (spawn (group) (terminate-fiber (current-fiber)))))))))

;;; Short fibers that are interrupted all the time: nobody knows which of the functions are called.
;;; Prevents: an interruption of a fiber that has left its catch tags, a call on a stack that is
;;; another's, an end that is lost.
(test interrupt-until-the-end
  (on-carriers (n)
    (let ((calls (make-flag)) (reports nil))
      (setf reports
            (with-output-to-string (out)
              (call-with-error-output
               (lambda ()
                 (with-group (group n)
                   (dotimes (i 300)
                     (let ((fiber (spawn (group) (dotimes (i 10) (fiber-yield)) :done)))
                       (handler-case
                           (loop repeat 50
                                 do (interrupt-fiber fiber (lambda ()
                                                             (assert (eq fiber (current-fiber)))
                                                             (count-one calls)))
                                    (loop repeat (random 500) do (sb-ext:spin-loop-hint)))
                         (sb-thread:interrupt-thread-error ()))
                       (is (eq :done (join fiber)))))))
               out)))
      (is (string= "" reports))
      (is (plusp (flag-count calls))))))

;;; Several terminate it. Prevents: a throw to a tag that is no more.
(test terminate-again-and-again
  (on-carriers (n)
    (is (string=
         ""
         (with-output-to-string (out)
           (call-with-error-output
            (lambda ()
              (with-group (group n)
                (dotimes (i 200)
                  (let* ((started (make-flag))
                         (fiber (computing-fiber (group started)
                                  (if (evenp i) (loop (fiber-yield)) (compute-until (make-flag))))))
                    (handler-case (loop (terminate-fiber fiber)
                                        (loop repeat (random 200) do (sb-ext:spin-loop-hint)))
                      (sb-thread:interrupt-thread-error ()))
                    (is (eq :abort (wait-for-end fiber)))))))
            out))))))

;;; In the middle of being submitted: what counts as alive must be in a queue.
(test terminate-who-submits
  (on-carriers (n)
    (with-group (group n)
      (let ((submitted (make-flag)) (ended (make-flag)))
        (dotimes (i 100)
          (let* ((started (make-flag))
                 (fiber (computing-fiber (group started)
                          (loop (count-one submitted)
                                (spawn (group) (count-one ended))
                                (when (zerop (random 10)) (fiber-yield))))))
            (loop repeat (random 2000) do (sb-ext:spin-loop-hint))
            (terminate-fiber fiber)
            (is (eq :abort (wait-for-end fiber)))))
        ;; WITH-GROUP waits for all of them.
        (is (plusp (flag-count submitted)))))))

;;;; Collections

(defvar *garbage*)

(defun allocate-until-collected ()
  (loop with epoch = sb-kernel::*gc-epoch*
        while (eq epoch sb-kernel::*gc-epoch*)
        do (setf *garbage* (make-array 1000))))

;;; The sender is stopped by the collection, too, and sends when it goes on, which is when the fiber
;;; does. Prevents: a signal that is deferred there, of which the runtime loses track; it ends the
;;; process when it sees that.
(test interrupted-just-after-a-collection
  (let ((old (sb-ext:bytes-consed-between-gcs)))
    (with-group (group 1)
      (let* ((stop nil) (collecting nil) (sent 0) (calls (make-flag))
             (fiber (spawn (group) (loop until stop do (fiber-park))))
             (sender (sb-thread:make-thread
                      (lambda ()
                        (loop until stop
                              do (let ((epoch sb-kernel::*gc-epoch*))
                                   (loop while (and collecting (eq epoch sb-kernel::*gc-epoch*))
                                         do (sb-ext:spin-loop-hint))
                                   (unless (eq epoch sb-kernel::*gc-epoch*)
                                     (interrupt-fiber fiber (lambda () (count-one calls)))
                                     (incf sent))
                                   (loop until (or collecting stop)
                                         do (sb-thread:thread-yield))))))))
        (unwind-protect
             (progn
               (setf (sb-ext:bytes-consed-between-gcs) (* 256 1024))
               (loop repeat 500
                     do (wait-until-parked fiber)
                        (interrupt-fiber fiber (lambda ()
                                                 (setf collecting t)
                                                 (allocate-until-collected)
                                                 (setf collecting nil)))))
          (setf (sb-ext:bytes-consed-between-gcs) old
                stop t))
        (sb-thread:join-thread sender)
        (fiber-unpark fiber)
        (join fiber)
        (is (= sent (flag-count calls)))))))

;;;; Ten thousand

(defun waiter-count ()
  (loop for bucket across sb-fiber::*buckets* sum (sb-fiber::bucket-waiters bucket)))

(defun chained-fd-p (fd)
  (let ((cell (sb-fiber::find-fd-cell fd nil)))
    (and cell (or (sb-fiber::fd-cell-input cell) (sb-fiber::fd-cell-output cell)) t)))

(defun terminate-ten-thousand (n function &optional (aborted 10000))
  "Call FUNCTION in 10,000 fibers, which park in it, end them, and check that nothing stays behind."
  (let ((waiters (waiter-count)) (cleaned (make-flag)) (started (make-flag)) (heap nil))
    (with-group (group n)
      (let ((fibers (loop repeat 10000
                          collect (spawn (group)
                                    (unwind-protect
                                         (progn (count-one started)
                                                (funcall function))
                                      (count-one cleaned))))))
        (is-true (wait-until (= 10000 (flag-count started))))
        (mapc #'wait-until-parked fibers)
        (mapc #'terminate-fiber fibers)
        (is (= aborted (count :abort fibers :key #'wait-for-end)))
        (is (= 10000 (flag-count cleaned)))
        (setf heap (heap-count group))
        ;; their stacks are free once their carriers have left them
        (is-true (wait-until (every (lambda (fiber) (= 0 (sb-fiber::fiber-context fiber))) fibers)))
        (is (fiber-group-done-p group))))
    (is (eql 0 heap))
    (is (= waiters (waiter-count)))))

(test terminate-ten-thousand-sleepers
  (terminate-ten-thousand 2 (lambda () (sleep 3600))))

(test terminate-ten-thousand-with-time-outs
  (terminate-ten-thousand 2 (lambda () (sb-ext:with-timeout 3600 (fiber-park :timeout 7200)))))

(test terminate-ten-thousand-waiters
  (let ((mutex (sb-thread:make-mutex)))
    (sb-thread:with-mutex (mutex)
      (terminate-ten-thousand 2 (lambda () (sb-thread:with-mutex (mutex)))))
    (is (not (sb-thread:mutex-owner mutex)))
    (is (sb-thread:grab-mutex mutex :waitp nil))))

(test terminate-ten-thousand-readers
  (multiple-value-bind (in out) (sb-posix:pipe)
    (unwind-protect
         (progn
           (terminate-ten-thousand 2 (lambda () (sb-sys:wait-until-fd-usable in :input)))
           (is (not (chained-fd-p in))))
      (sb-unix:unix-close in)
      (sb-unix:unix-close out))))

;;;; Storms

;;; Each fiber is in a handler that lets others interrupt it, and parks there again and again.
;;; Prevents: a handler that finds signals unblocked although one has been deferred, which is the
;;; end of the process.
(test signals-for-handlers-that-park
  (on-carriers (n :counts '(1 2)) ; with more carriers than processors each has its turn rarely
    (with-group-of-same-carriers (group n)
      (let* ((stop (make-flag)) (entered (make-flag)) (left (make-flag))
             (threads (busy-carriers group n))
             (fibers (loop repeat (* 2 n)
                           collect (let ((started (make-flag)))
                                     (computing-fiber (group started)
                                       (loop until (flag-value left)
                                             do (fiber-yield)
                                                (loop repeat 100 do (sb-ext:spin-loop-hint)))
                                       :done)))))
        (dolist (fiber fibers)
          (interrupt-fiber fiber (lambda ()
                                   (count-one entered)
                                   (loop until (flag-value stop)
                                         do (if (= 0 (random 2))
                                                (fiber-yield)
                                                (sb-sys:with-interrupts (fiber-yield)))
                                            (sb-sys:with-interrupts nil)))))
        (is-true (wait-until (= (* 2 n) (flag-count entered))))
        (loop repeat 300
              do (dolist (thread threads)
                   (sb-fiber::%interrupt-os-thread (sb-thread:thread-os-tid thread)))
                 (sb-thread:thread-yield))
        (raise-flag stop)
        (raise-flag left)
        (is (equal (make-list (* 2 n) :initial-element :done) (join-all fibers)))))))

(defun call-in-interruption-storm (n-fibers function &key (group nil) (donep (constantly nil)))
  "Call FUNCTION with 0..N-FIBERS-1 in fibers that are interrupted at random, in threads and by each
other, until all have ended. Return their results, and how many interruptions were made and how many
ran."
  (let* ((made (make-flag)) (ran (make-flag)) (stop (make-flag))
         (fibers (loop for i below n-fibers
                       collect (let ((i i)) (spawn (group) (funcall function i)))))
         (threads (loop repeat 2
                        collect (sb-thread:make-thread
                                 (lambda ()
                                   (loop until (or (flag-value stop) (funcall donep))
                                         do (let ((fiber (elt fibers (random n-fibers))))
                                              (handler-case
                                                  (progn
                                                    (count-one made)
                                                    (interrupt-fiber
                                                     fiber
                                                     (lambda ()
                                                       (unless (eq fiber (current-fiber))
                                                         (error "in the wrong fiber"))
                                                       (count-one ran)
                                                       (case (random 4)
                                                         (0 (fiber-yield))
                                                         (1 (sb-sys:with-interrupts
                                                              (fiber-yield)))))))
                                                (sb-thread:interrupt-thread-error () nil))
                                              (sleep (/ (random 200) 1000000)))))))))
    (let ((results (join-all fibers)))
      (raise-flag stop)
      (mapc #'sb-thread:join-thread threads)
      (values results (flag-count made) (flag-count ran)))))

(defun work-in-a-storm (mutex counter rounds in out)
  "A function of an index that does some of everything ROUNDS times."
  (lambda (i)
    (let ((mine 0))
      (dotimes (j rounds mine)
        (ecase (mod (+ i j) 6)
          (0 (sb-thread:with-mutex (mutex) (incf (car counter))))
          (1 (fiber-yield) (sb-thread:with-mutex (mutex) (incf (car counter))))
          (2 (sleep 1/10000) (sb-thread:with-mutex (mutex)
                               (fiber-yield)
                               (incf (car counter))))
          (3 (fiber-park :timeout 1/10000) (sb-thread:with-mutex (mutex) (incf (car counter))))
          (4 (write-byte 1 out) (finish-output out) (read-byte in)
           (sb-thread:with-mutex (mutex) (incf (car counter))))
          (5 (loop repeat 1000 do (sb-ext:spin-loop-hint))
           (sb-sys:without-interrupts
             (sb-thread:with-mutex (mutex) (incf (car counter))))))
        (incf mine)))))

(defun call-with-pipe-streams (function)
  (multiple-value-bind (in out) (sb-posix:pipe)
    (let ((in (sb-sys:make-fd-stream in :input t :element-type '(unsigned-byte 8) :buffering :none))
          (out (sb-sys:make-fd-stream out :output t :element-type '(unsigned-byte 8)
                                          :buffering :none)))
      (unwind-protect (funcall function in out)
        (close in) (close out)))))

;;; Each fiber has a pipe of its own: fd-streams are not for several.
(defun storm-of-interruptions (n n-fibers rounds)
  (let ((mutex (sb-thread:make-mutex)) (counter (list 0)))
    (with-group (group n)
      (let ((results (call-in-interruption-storm
                      n-fibers
                      (lambda (i)
                        (call-with-pipe-streams
                         (lambda (in out)
                           (funcall (work-in-a-storm mutex counter rounds in out) i))))
                      :group group)))
        (is (equal (make-list n-fibers :initial-element rounds) results))
        (is (= (* n-fibers rounds) (car counter)))
        (is (not (sb-thread:mutex-owner mutex)))))))

;;; Prevents: locks that stay taken, counts that are lost, results that are another's.
(test interruption-storm
  (on-carriers (n)
    (storm-of-interruptions n 12 120)))

(test interruption-storm-with-collections
  (on-carriers (n :migration '(nil))
    (let* ((stop (make-flag))
           (collector (sb-thread:make-thread
                       (lambda ()
                         (loop until (flag-value stop)
                               do (sb-ext:gc :gen (random 2))
                                  (sleep 1/1000))))))
      (unwind-protect (storm-of-interruptions n 8 60)
        (raise-flag stop)
        (sb-thread:join-thread collector)))))

;;; They are ended at random moments, with locks held and cleanups to run. Prevents: a lock that
;;; nobody can take any more, a cleanup that is not run, a fiber that does not end.
(test termination-storm
  (on-carriers (n)
    (let ((mutex (sb-thread:make-mutex)) (entered (make-flag)) (left (make-flag)))
      (dotimes (round 10)
        (with-group (group n)
          (let ((fibers
                  (loop for i below 30
                        collect (let ((i i))
                                  (spawn (group)
                                    (loop
                                      (sb-sys:without-interrupts
                                        (unwind-protect
                                             (progn
                                               (count-one entered)
                                               (sb-sys:with-local-interrupts
                                                 (case (mod i 5)
                                                   (0 (sb-thread:with-mutex (mutex) (fiber-yield)))
                                                   (1 (sb-thread:with-mutex (mutex)))
                                                   (2 (sleep 1/1000))
                                                   (3 (fiber-yield))
                                                   (4 (loop repeat 1000
                                                            do (sb-ext:spin-loop-hint))
                                                    (fiber-yield)))))
                                          (count-one left)))))))))
            (sleep (/ (random 10) 1000))
            (dolist (fiber fibers)
              (loop repeat (random 1000) do (sb-ext:spin-loop-hint))
              (terminate-fiber fiber))
            (is (all-aborted-p fibers)))))
      (is (= (flag-count entered) (flag-count left)))
      (is (sb-thread:grab-mutex mutex :waitp nil)))))

;;; Prevents: a time-out that comes when it has been cancelled, or unwinds another.
(test time-out-storm
  (on-carriers (n)
    (let ((mutex (sb-thread:make-mutex)))
      (is (equal (make-list 30 :initial-element 40)
                 (in-fibers n 30
                            (lambda (i)
                              (let ((count 0))
                                (dotimes (j 40 count)
                                  (let ((tag (list i j)))
                                    (handler-case
                                        (sb-ext:with-timeout (/ (1+ (random 3)) 2000)
                                          (case (mod (+ i j) 4)
                                            (0 (sleep 1/1000))
                                            (1 (sb-thread:with-mutex (mutex) (sleep 1/2000)))
                                            (2 (fiber-park :timeout 1/1000))
                                            (3 (loop repeat 10 do (fiber-yield)))))
                                      (sb-ext:timeout ()))
                                    (when (equal tag (list i j)) (incf count)))))))))
      (is (sb-thread:grab-mutex mutex :waitp nil)))))
