;;;; A soak: fibers are made and end in all ways for twenty minutes, and nothing is lost
;;;;
;;;; SB_FIBER_LONG_SECONDS is for how long. The counters of each round are printed: they are what a
;;;; leak shows in first.

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/mixture.lisp" *load-truename*))

(def-suite* long)

(defparameter *seconds*
  (parse-integer (or (sb-ext:posix-getenv "SB_FIBER_LONG_SECONDS") "1200")))

(setf (sb-ext:bytes-consed-between-gcs) (* 8 1024 1024))

;;;; What could be lost

(defun entries-of (directory)
  (length (directory (format nil "/proc/self/~A/*" directory) :resolve-symlinks nil)))

(defun count-lines (file)
  (with-open-file (in file :external-format :latin-1)
    (loop while (read-line in nil) count t)))

(defun kibibytes-of (field)
  (with-open-file (in "/proc/self/status")
    (loop for line = (read-line in)
          when (eql 0 (search field line))
            return (parse-integer line :start (length field) :junk-allowed t))))

;;; Idle threads of the pool end some time after their last call.
(defun wait-for-pool ()
  (sb-fiber::dismiss-idle-threads)
  (wait-until (null (sb-fiber::blocking-pool-threads sb-fiber::*blocking-pool*))))

(defun counters ()
  "What the process has while it has no fiber, as a property list."
  (wait-for-pool)
  (trim-stacks)
  (sb-ext:gc :full t)
  (list :resident (kibibytes-of "VmRSS:")
        :page-tables (kibibytes-of "VmPTE:")
        :mappings (count-lines "/proc/self/maps")
        :descriptors (entries-of "fd")
        :threads (length (sb-thread:list-all-threads))
        :stacks (sb-alien:alien-funcall
                 (sb-alien:extern-alien "fiber_count_carved" (function sb-alien:unsigned)))
        :timers (length (sb-ext:list-all-timers))
        :fibers (length (list-all-fibers))))

;;;; What fibers do

(defun use-much (i)
  "What most fibers of a server do: they use some stack and bindings, allocate, wait, and end."
  (call-at-depth (random 200)
                 (lambda ()
                   (let ((*variable* (list i)))
                     (case (mod i 4)
                       (0 (fiber-yield))
                       (1 (sleep (random 0.002)))
                       (2 (opaque (make-list (random 1000)))))
                     (expect :variable (equal *variable* (list i)))))))

(defun make-many (group n)
  "Let N fibers be made by some of GROUP, as fast as they can."
  (let ((world *world*))
    (join-all (loop repeat 4
                    collect (spawn (group)
                              (dotimes (i (floor n 4))
                                (let ((i i))
                                  (spawn (group) (let ((*world* world)) (use-much i))))
                                (when (> (sb-fiber::fiber-group-alive group) 5000)
                                  (sleep 1/100))))))))

(defun fail-in-all-ways (group n)
  "N fibers of GROUP end by errors, or use up their stacks."
  (quietly
    (mapc #'wait-for-end
          (loop for i below n
                collect (if (evenp i)
                            (spawn (group) (error 'expected-error))
                            (spawn (group) (recurse-for-ever 0)))))))

(defun end-by-others (group n)
  "N fibers of GROUP are ended while they wait, or before."
  (let ((fibers (loop repeat n
                      collect (spawn (group) (unwind-protect (sleep 3600) (fiber-yield))))))
    (dolist (fiber fibers) (terminate-fiber fiber))
    (mapc #'wait-for-end fibers)))

(defun soak (n)
  "A round with N carriers."
  (let ((*world* (make-world)))
    (with-group (group n)
      (make-many group 20000)
      (fail-in-all-ways group 100)
      (end-by-others group 1000)
      (check-random-fibers group 300))
    (is (null (flag-notes (world-problems *world*))))))

;;;; The test

(defun values-of (key rounds) (mapcar (lambda (counters) (getf counters key)) rounds))

(defun median (numbers)
  (elt (sort (copy-list numbers) #'<) (floor (length numbers) 2)))

;;; The kernel's view of the heap is coarse, and varies; what leaks in each round does not.
(defun check-flat (key early late slack)
  (let ((before (median (values-of key early))) (after (median (values-of key late))))
    (is (<= after (+ before slack)) "~A: ~D early, ~D late" key before after)))

(test nothing-is-lost
  (let ((end (+ (get-universal-time) *seconds*))
        (*random-state* (make-random-state t))
        (rounds '()))
    (loop until (and (> (get-universal-time) end) (>= (length rounds) 6))
          do (on-carriers (n) (soak n))
             (push (counters) rounds)
             (format t "~&~{~(~A~) ~D~^, ~}~%" (first rounds))
             (finish-output))
    (setf rounds (nreverse rounds))
    (dolist (key '(:stacks :fibers))
      (is (every #'zerop (values-of key rounds)) "~A: ~A" key (values-of key rounds)))
    (let* ((third (floor (length rounds) 3))
           (early (subseq rounds (max 1 (floor third 2)) (+ 1 third)))
           (late (last rounds third)))
      (dolist (key '(:descriptors :threads :timers))
        (check-flat key early late 0))
      (check-flat :mappings early late 30)
      (check-flat :resident early late 15000)
      (check-flat :page-tables early late 1000))))
