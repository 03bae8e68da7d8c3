;;;; Carriers: how they begin and end, and that others interrupt them as threads: fiber/carrier.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/pollers.lisp" *load-truename*))

(def-suite* carrier)

;;;; Carriers that are not to be had

;;; Prevents: numbers of pollers, or descriptors, that an attempt to start too many keeps; and that
;;; the carriers of one group leave too few for another.
(test too-many-carriers
  (flet ((start (n) (finish-fibers (start-fibers nil :carrier-count n))))
    (is (eq t (start 62)))
    (let ((group (start-fibers nil :carrier-count 62)))
      (is (eq t (start 62)))
      (with-numbers-taken ((- sb-fiber::max-pollers 100))
        (signals error (start 62))
        (is (eq t (start 38))))
      (finish-fibers group))
    (is (eq t (start 62)))))

;;; Prevents: carriers that are taken for those of another group, whose places have the same bits.
(test groups-of-many-carriers-at-once
  (let ((groups (loop repeat 3 collect (start-fibers nil :carrier-count 40))))
    (is (every (lambda (group)
                 (equal (loop for i below 100 collect i)
                        (join-all (loop for i below 100
                                        collect (let ((i i))
                                                  (spawn (group)
                                                    (fiber-sleep 1/1000)
                                                    (fiber-yield)
                                                    i))))))
               groups))
    (is-true (every #'finish-fibers groups))))

;;; A poller needs two descriptors. Prevents: one of them, or a poller, that is left behind.
(test no-descriptors-left
  (let ((descriptors (loop for fd = (sb-unix:unix-open "/dev/null" sb-unix:o_rdonly 0)
                           while fd collect fd))
        (pollers (pollers-in-use)))
    (unwind-protect
         (loop repeat 6
               do (signals error (start-fibers nil :carrier-count 4))
                  (is (= pollers (pollers-in-use)))
                  (sb-unix:unix-close (pop descriptors)))
      (mapc #'sb-unix:unix-close descriptors)))
  (is (equal '(0 1 2) (in-fibers 4 3 #'identity))))

;;; Prevents: pollers and carriers that a group has got when there is no thread for the next one.
(test no-threads-left
  (let ((pollers (pollers-in-use)) (groups sb-fiber::*groups*) (made '()))
    (dotimes (enough 5)
      (let ((left enough))
        (sb-int:encapsulate 'sb-thread::make-system-thread 'test
                            (lambda (f &rest arguments)
                              (when (minusp (decf left)) (error 'expected-error))
                              (let ((thread (apply f arguments)))
                                (push thread made)
                                thread)))
        (unwind-protect (signals expected-error (start-fibers nil :carrier-count 4))
          (sb-int:unencapsulate 'sb-thread::make-system-thread 'test))))
    (is (<= 10 (length made)))
    (is (notany #'sb-thread:thread-alive-p made))
    (is (= pollers (pollers-in-use)))
    (is (eq groups sb-fiber::*groups*)))
  (is (equal '(0 1 2) (in-fibers 4 3 #'identity))))

;;; A carrier is not ended by this, with a warning; before it has begun it was.
(test terminate-carriers-that-begin
  (let ((terminated 0))
    (sb-int:encapsulate 'sb-thread::make-system-thread 'test
                        (lambda (f name &rest arguments)
                          (let ((thread (apply f name arguments)))
                            (when (equal name "fiber carrier")
                              (ignore-errors (sb-thread:terminate-thread thread)
                                             (incf terminated)))
                            thread)))
    (unwind-protect
         (quietly (loop repeat 20 do (is (equal '(0 1 2) (in-fibers 4 3 #'identity)))))
      (sb-int:unencapsulate 'sb-thread::make-system-thread 'test))
    (is (plusp terminated))))

;;;; Carriers are threads

;;; Prevents: functions that a carrier takes for those of its fiber, or the fiber for its own, or
;;; nobody.
(test interrupt-a-carrier
  (on-carriers (n)
    (with-group-of-same-carriers (group n)
      (let* ((stop (make-flag)) (of-carriers (make-flag)) (of-fibers (make-flag))
             (threads (busy-carriers group n))
             (fibers (loop repeat (* 2 n)
                           collect (spawn (group)
                                     (loop until (flag-value stop) do (fiber-yield))))))
        (flet ((note-carrier (expected)
                 (lambda () (note of-carriers (eq expected sb-thread:*current-thread*))))
               (note-fiber (expected)
                 (lambda () (note of-fibers (eq expected (current-fiber))))))
          (loop repeat 20
                do (dolist (thread threads)
                     (sb-thread:interrupt-thread thread (note-carrier thread)))
                   (dolist (fiber fibers)
                     (interrupt-fiber fiber (note-fiber fiber))))
          (is-true (wait-until (= (length (flag-notes of-carriers)) (* 20 n))))
          (is-true (wait-until (= (length (flag-notes of-fibers)) (* 20 2 n))))
          (is (every #'identity (flag-notes of-carriers)))
          (is (every #'identity (flag-notes of-fibers))))
        (raise-flag stop)
        (join-all fibers)))))

;;; Prevents: a signal that comes when a carrier has looked for something to do and is about to
;;; sleep, so that nothing ends its sleep.
(test interrupt-carriers-that-go-to-sleep
  (on-carriers (n :counts '(1 2) :migration '(nil))
    (with-group-of-same-carriers (group n)
      (let ((threads (busy-carriers group n)) (calls (make-flag)))
        (is (eql (* 1000 n)
                 (dotimes (i 1000 (flag-count calls))
                   (join (spawn (group) nil))
                   (loop repeat (random 2000) do (sb-ext:spin-loop-hint))
                   (dolist (thread threads)
                     (sb-thread:interrupt-thread thread (lambda () (count-one calls))))
                   (unless (wait-until (= (flag-count calls) (* (1+ i) n)))
                     (return (list :lost i))))))))))

;;; With a fiber that never parks the carrier waits.
(test interrupt-the-carrier-of-a-computation
  (on-carriers (n)
    (with-group (group n)
      (let* ((started (make-flag)) (stop (make-flag)) (carrier nil) (trace '())
             (fiber (computing-fiber (group started)
                      (setf carrier (sb-fiber::carrier-thread sb-fiber::*carrier*))
                      (compute-until stop))))
        (wait-until carrier)
        (sb-thread:interrupt-thread carrier
                                    (lambda () (push sb-thread:*current-thread* trace)))
        (interrupt-fiber fiber (lambda () (push (current-fiber) trace)))
        (is-true (wait-until trace))
        (is (equal (list fiber) trace))
        (raise-flag stop)
        (is-true (wait-until (rest trace)))
        (is (equal (list carrier fiber) trace))))))

;;; Prevents: fibers without a carrier, those that are pinned above all.
(test terminate-carriers
  (on-carriers (n)
    (quietly
      (with-group-of-same-carriers (group n)
        (let* ((threads (busy-carriers group n))
               (fibers (loop for i below 20
                             collect (let ((i i))
                                       (spawn (group)
                                         (if (evenp i)
                                             (with-fiber-pinned (fiber-park) i)
                                             (progn (fiber-park) i)))))))
          (mapc #'wait-until-parked fibers)
          (mapc #'sb-thread:terminate-thread threads)
          (is (eq :alive (join (spawn (group) (sleep 1/100) :alive))))
          (mapc #'fiber-unpark fibers)
          (is (equal (loop for i below 20 collect i) (join-all fibers)))
          (is (every #'sb-thread:thread-alive-p threads)))))))

;;;; Memory

;;; Prevents: stacks that keep their memory as long as the group that has run their fibers; carriers
;;; that give it back while there is something to run.
(test idle-carriers-give-memory-back
  (trim-stacks)
  (with-cached-stack-bytes (1000000)
    (with-group (group 2)
      (let ((before (bytes-of "VmRSS:"))
            (fibers (loop repeat 10000 collect (spawn (group) (fiber-park) t))))
        (is-true (wait-until (every (lambda (fiber) (eq :parked (fiber-state fiber))) fibers)))
        (is (> (- (bytes-of "VmRSS:") before) 30000000))
        (mapc #'fiber-unpark fibers)
        (is (all-true-p (join-all fibers)))
        (is-true (wait-until (= 0 sb-fiber::*surplus-notes*)))
        (is (< (- (bytes-of "VmRSS:") before) 20000000))))))
