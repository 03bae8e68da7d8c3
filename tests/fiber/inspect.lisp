;;;; What one sees of a fiber from outside: DESCRIBE and INSPECT, backtraces; and what is left of
;;;; one that has ended: fiber/inspect.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* inspect)

;;;; DESCRIBE and INSPECT

(defun description (object)
  (with-output-to-string (*standard-output*) (describe object)))

(defun inspection (object)
  (with-output-to-string (*standard-output*)
    (let ((*standard-input* (make-string-input-stream "q"))) (inspect object))))

(defmacro is-told (object &rest texts)
  "Check that all TEXTS are in what DESCRIBE and INSPECT print of OBJECT, and no slots of the
implementation are."
  `(let ((object ,object))
     (dolist (told (list (description object) (inspection object)))
       (dolist (text (list ,@texts))
         (is (search text told) "~S is not in~%~A" text told))
       (dolist (slot '("WAIT-NEXT" "HEAP-INDEX" "Slots with"))
         (is (not (search slot told)) "~S is in~%~A" slot told))
       (is (< (count #\Newline told) 40) "~A" told))))

(test what-is-told
  (with-group (group 1)
    (let* ((mutex (make-mutex :name "the mutex"))
           (holder (wait-until-parked (spawn (group :name "the holder")
                                        (with-mutex (mutex) (fiber-park)))))
           (waiter (wait-until-parked (spawn (group :name "the waiter")
                                        (with-mutex (mutex) (list 1 2)))))
           (sleeper (wait-until-parked (spawn (group) (sleep 3600)))))
      (is-told waiter "\"the waiter\"" "PARKED" "MUTEX" "the mutex" "the holder" "s ago" "bytes"
               "Group")
      (is-told sleeper "SLEEP")
      (is-told (make-fiber #'list) "NEW" "LIST")
      (let ((scheduler (svref (sb-fiber::fiber-group-schedulers group) 0)))
        (is-told group "1" "Carriers" "Fibers alive")
        (is-told scheduler "Fibers queued" "Poller")
        (is-told (find-if #'plusp (map 'list #'sb-fiber::scheduler-deadlines
                                       (sb-fiber::fiber-group-schedulers group))
                          :key #'sb-fiber::deadline-heap-count)
                 "Nearest" "in 3" "SLEEP")
        (is-told (first (sb-fiber::fiber-group-carriers group)) "Thread" "Fiber"))
      (terminate-fiber sleeper)
      (fiber-unpark holder)
      (is (equal '(1 2) (join waiter)))
      (is-told waiter "FINISHED" "(1 2)")
      (let ((failed (quietly (let ((fiber (spawn (group) (error 'expected-error))))
                               (wait-for-end fiber)
                               fiber))))
        (is-told failed "ABORTED" "EXPECTED-ERROR"))
      (is-told (join (spawn (group) (opaque (current-fiber)))) "FINISHED"))
    (is-told group "RUNNING")))

;;; It is looked at while all of it changes.
(test telling-while-it-changes
  (on-carriers (n)
    (with-group (group n)
      (let* ((stop (make-flag))
             (fibers (loop repeat 20
                           collect (spawn (group)
                                     (loop until (flag-value stop) do (pause))
                                     t)))
             (short (loop repeat 3
                          collect (spawn (group)
                                    (loop until (flag-value stop)
                                          do (join (spawn (group) (fiber-yield))))
                                    t))))
        (loop repeat 30
              do (dolist (object (append (list group) (list-all-fibers)
                                         (sb-fiber::fiber-group-carriers group)
                                         (coerce (sb-fiber::fiber-group-schedulers group) 'list)
                                         (map 'list #'sb-fiber::scheduler-deadlines
                                              (sb-fiber::fiber-group-schedulers group))))
                   (unless (plusp (length (description object))) (fail "nothing is told"))))
        (raise-flag stop)
        (is (all-true-p (join-all (append fibers short))))))))

;;;; Backtraces

(defun wait-in-vain ()
  (sleep 3600)
  (opaque 1))

(defun compute-in-vain (started)
  (raise-flag started)
  (compute-until (make-flag)))

(defun backtrace-lines (fiber)
  (let ((text (with-output-to-string (out) (print-fiber-backtrace fiber :stream out))))
    (with-input-from-string (in text)
      (loop for line = (read-line in nil) while line collect line))))

(test backtraces-begin-with-the-user
  (on-carriers (n)
    (with-group (group n)
      (let ((mutex (make-mutex :name "the mutex")) (started (make-flag)))
        (grab-mutex mutex)
        (flet ((check (function &rest texts)
                 (let ((fiber (submit-fiber group (make-fiber function :name "watched"))))
                   (if (eq (first texts) :computes)
                       (progn (wait-until (flag-value started)) (pop texts))
                       (wait-until-parked fiber))
                   (let ((lines (backtrace-lines fiber)))
                     (is (search "watched" (first lines)))
                     (loop for text in texts for line in lines
                           do (is (search text line) "~S is not in ~S~%~{~A~%~}" text line lines)))
                   (terminate-fiber fiber)
                   (wait-for-end fiber))))
          (check #'wait-in-vain "parked on SLEEP" "WAIT-IN-VAIN")
          (check (lambda () (with-mutex (mutex) (opaque 1)) 1) "parked on mutex \"the mutex\""
                 "TESTS")
          ;; Left by a tail call
          (check (lambda () (grab-mutex mutex)) "parked on mutex \"the mutex\"" "SB-THREAD::")
          (check (lambda () (fiber-park :reason :lunch)) "parked on LUNCH" "FIBER-PARK")
          (check (lambda () (compute-in-vain started)) :computes "running" "TESTS"))
        (release-mutex mutex)
        (let ((lines (join (spawn (group) (backtrace-lines (current-fiber))))))
          (is (search "BACKTRACE-LINES" (second lines)) "~{~A~%~}" lines))))))

;;;; What is left of a fiber that has ended

(defun references (fiber)
  "What the slots of FIBER refer to, but for what all fibers share."
  (loop for slot in (sb-kernel:dd-slots (sb-kernel:find-defstruct-description 'fiber))
        when (eq t (sb-kernel::dsd-raw-type slot))
        collect (sb-kernel:%instance-ref fiber (sb-kernel:dsd-index slot))))

(defun ended-fibers (n)
  "Fibers that have ended in different ways in a group of N carriers, which is finished."
  (with-group (group n)
    (quietly
     (let* ((mutex (make-mutex)) (semaphore (make-semaphore))
           (neighbours (loop repeat 5 collect (spawn (group) (wait-on-semaphore semaphore))))
           (fibers (list* (spawn (group) (sleep 1/1000) 1)
                          (spawn (group) (fiber-park :timeout 1/1000))
                          (spawn (group) (with-fiber-pinned (sleep 1/1000)))
                          (spawn (group) (with-mutex (mutex) (fiber-yield)) 1)
                          (spawn (group) (with-mutex (mutex) (sleep 1/1000)))
                          (spawn (group) (error 'expected-error))
                          (spawn (group) (fiber-join (spawn (group) (sleep 1/1000))))
                          neighbours))
           (killed (wait-until-parked (spawn (group) (sleep 3600)))))
      (terminate-fiber killed)
      (mapc #'wait-until-parked neighbours)
      (signal-semaphore semaphore (length neighbours))
      (mapc #'wait-for-end fibers)
      (cons killed fibers)))))

;;; Prevents: a heap, a group or other fibers that live as long as somebody has one fiber's result.
(test the-dead-keep-nothing-alive
  (on-carriers (n)
    (dolist (fiber (ended-fibers n))
      (is (not (fiber-alive-p fiber)))
      (dolist (object (references fiber))
        (is (not (typep object '(or fiber fiber-group sb-fiber::carrier sb-fiber::scheduler
                                 sb-fiber::deadline-heap sb-fiber::fd-cell)))
            "~S keeps ~S" fiber object))
      (is (null (fiber-group fiber))))))

(defun groups-that-die (n)
  "N weak pointers to groups that are finished, and to their heaps, and a list of fibers that have
ended in them."
  (let ((pointers '()) (fibers '()))
    (dotimes (i n)
      (with-group (group 1)
        (push (sb-ext:make-weak-pointer group) pointers)
        (push (sb-ext:make-weak-pointer (sb-fiber::scheduler-deadlines
                                         (svref (sb-fiber::fiber-group-schedulers group) 0)))
              pointers)
        (let ((fiber (spawn (group) (sleep 1/1000))))
          (join fiber)
          (push fiber fibers))))
    (values pointers fibers)))

;;; A stack may seem to refer to some.
(test groups-of-the-dead-are-collected
  (multiple-value-bind (pointers fibers) (groups-that-die 20)
    (sb-sys:scrub-control-stack)
    (sb-ext:gc :full t)
    (is (<= (count-if #'sb-ext:weak-pointer-value pointers) 8))
    (is (= 20 (length fibers)))))
