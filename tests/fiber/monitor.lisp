;;;; Tests of the monitor: fibers that keep their carriers, and others that must not suffer from it

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/zones.lisp" *load-truename*))

(def-suite* monitor)

;;; Each way to be stuck is a function of a descriptor, that keeps the carrier until there is
;;; something to be read from it. That is written by a fiber which runs only if a carrier is
;;; relieved: otherwise the test hangs.

(defun read-blocking (fd)
  "read(2) as foreign code calls it."
  (sb-alien:with-alien ((octet (sb-alien:unsigned 8)))
    (sb-alien:alien-funcall
     (sb-alien:extern-alien "read" (function sb-alien:long sb-alien:int sb-sys:system-area-pointer
                                             sb-alien:unsigned-long))
     fd (sb-alien:alien-sap (sb-alien:addr octet)) 1)))

(defun readable-p (fd)
  (sb-alien:alien-funcall
   (sb-alien:extern-alien "fiber_poll_now" (function sb-alien:int sb-alien:int sb-alien:int)) fd 1))

(defparameter *ways-to-be-stuck*
  (list :read #'read-blocking
        :read-without-interrupts (lambda (fd) (sb-sys:without-interrupts (read-blocking fd)))
        ;; Never more than a millisecond in one call.
        :usleep (lambda (fd)
                  (loop until (= 1 (readable-p fd)) do (usleep 1000)))
        :compute (lambda (fd) (loop until (= 1 (readable-p fd))))
        :compute-without-interrupts
        (lambda (fd) (sb-sys:without-interrupts (loop until (= 1 (readable-p fd)))))
        ;; A fiber that wakes others uses the run queue of its carrier all the time.
        :unpark (lambda (fd)
                  (let ((other (spawn ((fiber-group (current-fiber))) (fiber-park))))
                    (loop until (= 1 (readable-p fd)) do (sb-fiber::unpark other))
                    (fiber-unpark other)))
        :collect (lambda (fd) (loop until (= 1 (readable-p fd)) do (sb-ext:gc)))))

(defmacro with-pipe ((in out) &body body)
  `(multiple-value-bind (,in ,out) (sb-unix:unix-pipe)
     (unwind-protect (progn ,@body)
       (sb-unix:unix-close ,in)
       (sb-unix:unix-close ,out))))

(defun write-octet (fd)
  (sb-unix:unix-write fd (make-array 1 :element-type '(unsigned-byte 8) :initial-element 1) 0 1))

(defmacro do-ways-to-be-stuck ((way function) &body body)
  `(loop for (,way ,function) on *ways-to-be-stuck* by #'cddr
         do (let ((,way ,way) (,function ,function)) ,@body)))

(defun as-many-as-before-p (group)
  "True if all spare carriers of GROUP are idle."
  (let ((statistics (fiber-group-statistics group)))
    (and (= (getf statistics :threads)
            (+ (getf statistics :carriers) (getf statistics :spares)))
         (= 0 (getf statistics :stuck-now)))))

(defun spares-return-p (group)
  (sb-ext:wait-for (as-many-as-before-p group) :timeout *patience*))

(defun all-stuck-but (group n function release)
  "Let N fibers of GROUP call FUNCTION, which returns after RELEASE has been called as often, in
another fiber, which begins later."
  (let ((stuck (loop repeat n collect (spawn (group) (funcall function) :stuck-no-more))))
    (list* (join (spawn (group) (loop repeat n do (funcall release)) :released))
           (remove-duplicates (join-all stuck)))))

;;;; what goes on

(test runnable-fibers-go-on
  (do-ways-to-be-stuck (way function)
    (on-carriers (n)
      (with-pipe (in out)
        (with-group (group n)
          (is (equal '(:released :stuck-no-more)
                     (all-stuck-but group n
                                    (lambda () (funcall function in))
                                    (lambda () (write-octet out))))
              "~S with ~D carriers" way n)
          (is-true (spares-return-p group)))))))

(test sleeping-fibers-go-on
  (do-ways-to-be-stuck (way function)
    (on-carriers (n)
      (with-pipe (in out)
        (with-group (group n)
          (let* ((sleeper (spawn (group) (sleep 1/20) (loop repeat n do (write-octet out)) :slept))
                 (stuck (loop repeat n collect (spawn (group) (funcall function in)))))
            (is (eq :slept (join sleeper)) "~S with ~D carriers" way n)
            (join-all stuck)
            (is-true (spares-return-p group))))))))

(test fibers-that-wait-for-descriptors-go-on
  (do-ways-to-be-stuck (way function)
    (on-carriers (n)
      (with-pipe (in out)
        (with-pipe (ready-in ready-out)
          (with-group (group n)
            (let* ((reader (spawn (group)
                             (sb-sys:wait-until-fd-usable ready-in :input)
                             (loop repeat n do (write-octet out))
                             :read))
                   (parked (sb-ext:wait-for (eq :parked (fiber-state reader)) :timeout *patience*))
                   (stuck (loop repeat n collect (spawn (group) (funcall function in)))))
              (is-true parked)
              (write-octet ready-out)
              (is (eq :read (join reader)) "~S with ~D carriers" way n)
              (join-all stuck)
              (is-true (spares-return-p group)))))))))

;;; What the stuck fiber has made runnable itself, in the queue of its carrier.
(test fibers-in-the-queue-of-who-is-stuck
  (do-ways-to-be-stuck (way function)
    (on-carriers (n :migration '(nil))
      (with-pipe (in out)
        (with-group (group n)
          (is (equal '(:stuck-no-more (0 1 2 3 4 5 6 7 8 9))
                     (join
                      (spawn (group)
                        (let ((others (loop for i below 10
                                            collect (let ((i i)) (spawn (group)
                                                                   (when (= i 9) (write-octet out))
                                                                   i)))))
                          (funcall function in)
                          (list :stuck-no-more (join-all others))))))
              "~S with ~D carriers" way n))))))

;;; Two carriers must not run one fiber, nor may one be lost, while schedulers change hands all the
;;; time.
(test nothing-is-lost-or-run-twice
  (with-stuck-carrier-time (1/2000)
    (on-carriers (n)
      (with-group (group n)
        (let* ((counters (make-array 20 :initial-element 0))
               (fibers (loop for i below 20
                             collect (let ((i i))
                                       (spawn (group)
                                         (loop for epoch below 200
                                               do (incf (svref counters i))
                                                  (cond ((= 0 (mod (+ epoch i) 50))
                                                         (spin-for 1/500))
                                                        ((= 0 (mod epoch 20)) (sleep 1/10000))
                                                        (t (fiber-yield)))
                                               finally (return (svref counters i))))))))
          (is (every (lambda (count) (= count 200)) (join-all fibers)))
          (is-true (spares-return-p group)))))))

(defun spin-for (seconds)
  (loop with end = (+ (get-internal-real-time) (* seconds internal-time-units-per-second))
        while (< (get-internal-real-time) end)))

;;;; groups

(test many-stuck-at-once-stay-under-the-limit
  (let ((old *spare-carrier-limit*))
    (unwind-protect
         (dolist (limit '(2 16))
           (setf *spare-carrier-limit* limit)
           (on-carriers (n :counts '(1 2) :migration '(nil))
             (with-group (group n)
               (let ((most 0))
                 (flet ((look ()
                          (setf most (max most (getf (fiber-group-statistics group) :threads)))))
                   (let ((fibers (loop repeat 100
                                       collect (spawn (group)
                                                 (usleep 30000)
                                                 (look)
                                                 t))))
                     (is (every #'identity (join-all fibers)))
                     (is (<= most (+ n limit)))
                     (is (plusp (getf (fiber-group-statistics group) :stuck-ever)))
                     (is-true (spares-return-p group))))))))
      (setf *spare-carrier-limit* old))))

(test finishing-while-one-is-stuck
  (on-carriers (n)
    (with-pipe (in out)
      (let* ((group (start-fibers nil :carrier-count n))
             (stuck (spawn (group) (read-blocking in) :done))
             (other (spawn (group) :other)))
        (is (eq :other (join other)))
        (is (eq nil (finish-fibers group :timeout 1/20)))
        (write-octet out)
        (is (eq :done (join stuck)))
        (is (eq t (finish-fibers group :timeout *patience*)))))))

(test aborting-while-one-is-stuck
  (on-carriers (n)
    (with-pipe (in out)
      (let* ((group (start-fibers nil :carrier-count n))
             (began nil)
             (stuck (spawn (group) (setf began t) (sb-sys:without-interrupts (read-blocking in))
                      (loop (fiber-yield))))
             (sleeper (spawn (group) (sleep 1000))))
        (is-true (sb-ext:wait-for began :timeout *patience*))
        (is (eq nil (finish-fibers group :timeout 1/20 :abort t)))
        (is (eq :abort (nth-value 1 (fiber-join sleeper :default nil :timeout *patience*))))
        (write-octet out)
        (is (eq t (finish-fibers group :timeout *patience* :abort t)))
        (is (eq :abort (nth-value 1 (fiber-join stuck :default nil))))))))

(test collections-while-one-is-stuck
  (on-carriers (n)
    (with-pipe (in out)
      (with-group (group n)
        (let ((stuck (loop repeat n collect (spawn (group)
                                              (let ((list (list 1 2 3)))
                                                (read-blocking in)
                                                list)))))
          (is (eq :collected (join (spawn (group)
                                     (loop repeat 5 do (sb-ext:gc) (fiber-yield))
                                     :collected))))
          (loop repeat n do (write-octet out))
          (is (every (lambda (list) (equal '(1 2 3) list)) (join-all stuck))))))))

;;; The carrier that a fiber is pinned to has lost its scheduler meanwhile.
(defun os-thread ()
  (sb-alien:alien-funcall (sb-alien:extern-alien "gettid" (function sb-alien:int))))

(test pinned-fibers-come-home
  (on-carriers (n)
    (with-pipe (in out)
      (with-group (group n)
        (let ((stuck (loop repeat n
                           collect (spawn (group)
                                     (with-fiber-pinned
                                       (let ((thread (os-thread)))
                                         (read-blocking in)
                                         (sleep 1/100)
                                         (eql thread (os-thread))))))))
          (is (eq :released (join (spawn (group) (loop repeat n do (write-octet out)) :released))))
          (is (every #'identity (join-all stuck))))))))

;;;; what is told

(defun stuck-ever (group) (getf (fiber-group-statistics group) :stuck-ever))

(test statistics
  (with-pipe (in out)
    (with-group (group 2)
      (let ((before (fiber-group-statistics group)))
        (is (= 2 (getf before :carriers)))
        (is (= 0 (getf before :fibers) (getf before :stuck-now) (getf before :stuck-ever)))
        (let ((stuck (spawn (group) (read-blocking in))))
          (is-true (sb-ext:wait-for (= 1 (getf (fiber-group-statistics group) :stuck-now))
                                    :timeout *patience*))
          (is (= 1 (getf (fiber-group-statistics group) :fibers)))
          (join-all (loop repeat 10 collect (spawn (group) (loop repeat 100 do (fiber-yield)))))
          (write-octet out)
          (join stuck)
          (is-true (spares-return-p group))
          (let ((after (fiber-group-statistics group)))
            (is (= 0 (getf after :stuck-now)))
            (is (<= 1 (getf after :stuck-ever)))
            (is (<= 1000 (getf after :switches)))))))))

(test statistics-of-no-group
  (signals type-error (fiber-group-statistics 1)))

;;; What several threads may use at a time.
(defclass shared-output (sb-gray:fundamental-character-output-stream)
  ((lock :initform (sb-thread:make-mutex) :reader shared-output-lock)
   (characters :initform '() :accessor shared-output-characters)))

(defmethod sb-gray:stream-write-char ((stream shared-output) character)
  (sb-thread:with-mutex ((shared-output-lock stream))
    (push character (shared-output-characters stream)))
  character)

(defmethod sb-gray:stream-line-column ((stream shared-output)) nil)

(defun shared-output-text (stream)
  (sb-thread:with-mutex ((shared-output-lock stream))
    (coerce (reverse (shared-output-characters stream)) 'string)))

(defun check-warning-of-a-stuck-carrier (call-while-waiting)
  (let ((output (make-instance 'shared-output)))
    (with-blocked-carrier-action (:warn)
      (with-pipe (in out)
        (call-with-error-output
         (lambda ()
           (with-group (group 1)
             (let ((stuck (spawn (group :name "sticky") (read-blocking in))))
               (funcall call-while-waiting
                        (lambda ()
                          (is-true (wait-until (search "has kept its"
                                                       (shared-output-text output))))))
               (write-octet out)
               (join stuck))))
         output)))
    (is (search "sticky" (shared-output-text output)))))

(test warning-of-a-stuck-carrier
  (check-warning-of-a-stuck-carrier #'funcall))

;;; A fiber that has the lock may wait for a turn behind the one that is stuck. Prevents: a monitor
;;; that waits for it.
(test warning-while-the-pool-is-locked
  (check-warning-of-a-stuck-carrier
   (lambda (function)
     (sb-thread::with-system-mutex ((sb-fiber::blocking-pool-lock sb-fiber::*blocking-pool*))
       (funcall function)))))

(test error-in-a-stuck-fiber
  (with-blocked-carrier-action (:error)
    (with-pipe (in out)
      (with-group (group 1)
        (let ((stuck (spawn (group)
                       (handler-case (progn (sb-sys:without-interrupts (read-blocking in))
                                            (fiber-yield)
                                            :no-error)
                         (sb-thread:thread-error () :error)))))
          (is-true (sb-ext:wait-for (= 1 (stuck-ever group)) :timeout *patience*))
          ;; It has been relieved: another fiber can run.
          (spawn (group) (write-octet out))
          (is (eq :error (join stuck))))))))

;;; The kernel has no thread for the first few spares.
(defun call-with-spares-refused (n function)
  (let ((attempts 0))
    (sb-int:encapsulate 'sb-fiber::start-carrier 'refused
                        (lambda (start group scheduler)
                          (if (or scheduler (> (incf attempts) n))
                              (funcall start group scheduler)
                              (error "There is no thread."))))
    (unwind-protect (funcall function)
      (sb-int:unencapsulate 'sb-fiber::start-carrier 'refused))))

(test spares-that-cannot-be-started-at-once
  (dolist (seconds '(1/100 nil))
    (with-stuck-carrier-time (seconds)
      (call-with-spares-refused
       5
       (lambda ()
         (with-group (group 1)
           (let* ((semaphore (sb-thread:make-semaphore))
                  (waiter (spawn (group)
                            (sb-vm::with-code-pages-pinned (:dynamic)
                              (sb-thread:wait-on-semaphore semaphore))
                            :waited))
                  (other (spawn (group) (sb-thread:signal-semaphore semaphore) :signalled)))
             (is (eq :signalled (join other)) "~S" seconds)
             (is (eq :waited (join waiter)) "~S" seconds))))))))

;;; Carriers that were needed once end, but for those that a pinned fiber will return to.
(test spares-end
  (with-group (group 2)
    (let* ((pinned (loop repeat 3 collect (spawn (group)
                                            (with-fiber-pinned
                                              (let ((thread (os-thread)))
                                                (usleep 100000)
                                                (fiber-park)
                                                (eql thread (os-thread)))))))
           (others (loop repeat 12 collect (spawn (group) (usleep 100000)))))
      (join-all others)
      (is-true (sb-ext:wait-for (every (lambda (fiber) (eq :parked (fiber-state fiber))) pinned)
                                :timeout *patience*))
      (is (< 4 (getf (fiber-group-statistics group) :threads)))
      (is-true (sb-ext:wait-for (<= (getf (fiber-group-statistics group) :threads) 5)
                                :timeout *patience*))
      (mapc #'fiber-unpark pinned)
      (is (every #'identity (join-all pinned)))
      ;; The monitor looks again when there is something to do.
      (is-true (sb-ext:wait-for (progn (join (spawn (group) (sleep 1/100)))
                                       (<= (getf (fiber-group-statistics group) :threads) 4))
                                :timeout *patience*))
      (is-true (spares-return-p group)))))

(defun homes-are-counted-p (group)
  (loop for carrier in (sb-fiber::fiber-group-carriers group)
        always (= (sb-fiber::carrier-guests carrier)
                  (count carrier (list-all-fibers) :key #'sb-fiber::fiber-home))))

;;; Prevents: a spare that ends while somebody is to return to it, and one that never ends.
(test homes-are-counted
  (on-carriers (n)
    (with-group (group n)
      (let ((stop nil) (fibers '()))
        (flet ((park () (loop repeat 2 do (fiber-park) until stop)))
          (setf fibers (loop for i below 60
                             collect (let ((i i))
                                       (spawn (group)
                                         (loop repeat (mod i 7)
                                               do (with-fiber-pinned (fiber-yield) (usleep 500))
                                                  (when (oddp i) (fiber-yield)))
                                         (ecase (mod i 3)
                                           (0 (with-fiber-pinned (park)))
                                           (1 (park))
                                           (2 (ignore-errors
                                               (handler-bind ((error (lambda (condition)
                                                                       (declare (ignore condition))
                                                                       (park))))
                                                 (car (opaque 1)))))))))))
        (mapc #'wait-until-parked fibers)
        (is-true (homes-are-counted-p group))
        (is (<= 20 (loop for carrier in (sb-fiber::fiber-group-carriers group)
                         sum (sb-fiber::carrier-guests carrier))))
        (mapc #'sb-thread:terminate-thread (subseq fibers 0 20))
        (mapc #'wait-for-end (subseq fibers 0 20))
        (is-true (homes-are-counted-p group))
        (setf stop t)
        (mapc #'fiber-unpark fibers)
        (mapc #'wait-for-end fibers)
        (is-true (wait-until (homes-are-counted-p group)))))))

;;; While fibers are pinned to spares, the monitor looks again and again whether one may end.
;;; Prevents: looks that cost as much as there are fibers. It may cons a little for each look, but
;;; no list of them.
(test looks-at-homes-are-cheap
  (let ((n 20000) (go-on (make-flag)) (done (make-flag)))
    (with-group (group 2)
      (let ((pinned (loop repeat 3 collect (spawn (group)
                                             (with-fiber-pinned
                                               (loop until (flag-value go-on) do (usleep 10000))
                                               (fiber-park)))))
            (busy (spawn (group) (loop until (flag-value done) do (sleep 1/1000))))
            (others (loop repeat n collect (spawn (group) (fiber-park)))))
        ;; Each has a spare in its place.
        (is-true (wait-until (<= 5 (getf (fiber-group-statistics group) :threads))))
        (raise-flag go-on)
        (mapc #'wait-until-parked pinned)
        (mapc #'wait-until-parked others)
        (flet ((looks () (sb-fiber::fiber-group-quiet-looks group)))
          ;; It looks for a spare that may end.
          (is-true (wait-until (> (looks) sb-fiber::+periods-before-retiring+)))
          (let ((from (looks)) (bytes (sb-ext:get-bytes-consed)))
            (is-true (wait-until (>= (looks) (+ from 50))))
            (is (< (- (sb-ext:get-bytes-consed) bytes) (* 50 8 n)))))
        (raise-flag done)
        (mapc #'fiber-unpark others)
        (mapc #'fiber-unpark pinned)
        (mapc #'join (list* busy (append pinned others)))))))

(test switched-off
  (with-stuck-carrier-time (nil)
    (with-pipe (in out)
      (with-group (group 1)
        (let* ((n (getf (fiber-group-statistics group) :carriers)) ; more if migration is forced
               (began (list 0))
               (stuck (loop repeat n collect (spawn (group)
                                               (sb-ext:atomic-incf (car began))
                                               (spin-for 1/10)
                                               (read-blocking in)))))
          (is-true (sb-ext:wait-for (= n (car began)) :timeout *patience*))
          (let ((other (spawn (group) :other)))
            (is (eq nil (fiber-join other :default nil :timeout 1/5)))
            (is (= 0 (stuck-ever group)))
            (loop repeat n do (write-octet out))
            (join-all stuck)
            (is (eq :other (join other)))))))))

;;;; the monitor itself

(defun context-switches (thread)
  "How often THREAD has gone to sleep or was preempted."
  (with-open-file (in (format nil "/proc/self/task/~D/status" (sb-thread:thread-os-tid thread)))
    (loop for line = (read-line in nil)
          while line
          when (search "ctxt_switches" line)
            sum (parse-integer line :start (1+ (position #\: line))))))

(test an-idle-group-is-left-in-peace
  (with-group (group 2)
    (join (spawn (group) (sleep 1/100)))
    (is-true (sb-ext:wait-for (= 1 (sb-fiber::fiber-group-monitor-asleep group))
                              :timeout *patience*))
    (let* ((monitor (sb-fiber::fiber-group-monitor group))
           (before (context-switches monitor)))
      (sleep 1/2)
      ;; It may have been about to fall asleep, and a collection wakes it; looking would wake it 50
      ;; times.
      (is (< (- (context-switches monitor) before) 10)))))

;;; Prevents: a look that never ends, since each collection prolongs the sleep in it. The alarm on
;;; which it sleeps belongs to no monitor: a ring wakes one sleeper.
(test a-look-ends-under-collections
  (with-group (group 1)
    (join (spawn (group) nil))
    (let* ((stop nil)
           (carrier (first (sb-fiber::fiber-group-carriers group)))
           (alone (sb-fiber::%make-fiber-group nil))
           (collector (make-thread (lambda () (loop until stop do (sb-ext:gc)))))
           (looks
             (make-thread (lambda ()
                            (loop repeat 100
                                  do (sb-fiber::keeps-waiting-p alone carrier
                                                                (sb-fiber::carrier-epoch carrier)))
                            :ended))))
      (is (eq :ended (join-thread looks :timeout *patience* :default :hangs)))
      (setf stop t)
      (join-thread collector))))

(test a-parked-fiber-is-not-stuck
  (with-group (group 2)
    (join-all (loop repeat 10 collect (spawn (group) (loop repeat 20 do (sleep 1/200)))))
    (is (= 0 (stuck-ever group)))))

;;; Prevents: a thread for each look at a carrier, while the first ones wait for the stream.
(test one-warning-of-a-carrier-at-a-time
  (with-group (group 1)
    (let ((carrier (first (sb-fiber::fiber-group-carriers group)))
          (go-on (make-flag)) (warnings (make-flag)))
      (flet ((warn-slowly ()
               (sb-fiber::call-warner carrier (lambda ()
                                                (count-one warnings)
                                                (wait-until (flag-value go-on)))))
             (warner () (sb-fiber::carrier-warner carrier)))
        (dotimes (i 5) (warn-slowly))
        (raise-flag go-on)
        (is-true (wait-until (not (sb-thread:thread-alive-p (warner)))))
        (is (= 1 (flag-count warnings)))
        (warn-slowly)
        (is-true (wait-until (not (sb-thread:thread-alive-p (warner)))))
        (is (= 2 (flag-count warnings)))))))

;;; Prevents: another spare at each look, while the first one is being started.
(test a-spare-that-is-being-started
  (with-group (group 1)
    (let ((carrier (sb-fiber::%make-carrier group)))
      (is-true (sb-fiber::starting-spare-p carrier))
      (sb-fiber::advance-epoch carrier)
      (is (not (sb-fiber::starting-spare-p carrier))))
    (is-true (wait-until (notany #'sb-fiber::starting-spare-p
                                 (sb-fiber::fiber-group-carriers group))))))
