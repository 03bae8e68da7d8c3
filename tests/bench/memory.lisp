;;;; benchmarks of fibers that wait: memory, and what the collector feels of them; see run.sh

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(load (merge-pathnames "measure.lisp" *load-truename*))

(in-package "SB-FIBER-BENCH")

(defun milliseconds-of (function)
  (let ((start (nanoseconds)))
    (funcall function)
    (/ (- (nanoseconds) start) 1000000)))

(defun in-fiber (group function)
  (fiber-join (submit-fiber group (make-fiber function))))

(defun parked (group n function)
  "N fibers of GROUP that have called FUNCTION, which parks, in a vector. A fiber makes them."
  (let ((fibers (make-array n)) (left (list n)))
    (flet ((begin ()
             (sb-ext:atomic-decf (car left))
             (funcall function)))
      (in-fiber group (lambda ()
                        (dotimes (i n)
                          (setf (svref fibers i) (submit-fiber group (make-fiber #'begin)))))))
    (loop until (= 0 (car left)) do (sleep 1/1000))
    fibers))

(defun wake-all (group fibers)
  "Unpark FIBERS from a fiber of GROUP, and return when they have ended."
  (in-fiber group (lambda () (map nil #'fiber-unpark fibers)))
  (map nil #'fiber-join fibers))

(defun bench-idle (n)
  (sb-ext:gc :full t)
  (let* ((group (start-fibers nil :carrier-count *carriers*))
         (resident (resident-bytes))
         (tables (page-table-bytes))
         (fibers nil)
         (create (milliseconds-of (lambda () (setf fibers (parked group n #'fiber-park)))))
         (bytes (progn (sb-ext:gc :full t) (- (resident-bytes) resident)))
         (page-tables (- (page-table-bytes) tables))
         (wake (milliseconds-of (lambda () (wake-all group fibers)))))
    (finish-fibers group)
    (format t "RESULT idle sbcl-fiber p=~D n=~D bytes_per_fiber=~D page_table_bytes=~D ~
               create_ms=~,1F wake_ms=~,1F~%"
            *carriers* n (round bytes n) (round page-tables n) create wake)))

(defvar *garbage*)

(defun nursery-pauses (n)
  "The milliseconds of N collections, each after a megabyte has been allocated."
  (loop repeat n
        collect (progn
                  (dotimes (i 1000) (setf *garbage* (make-list 64)))
                  (milliseconds-of #'sb-ext:gc))))

(defun print-pauses (n)
  (loop repeat 5 do (sb-ext:gc))        ; until what the fibers refer to is not young any more
  (let ((pauses (nursery-pauses 51)))
    (format t "RESULT gcpause sbcl-fiber p=~D n=~D ms=~,3F worst_ms=~,3F full_ms=~,1F~%"
            *carriers* n (median pauses) (reduce #'max pauses)
            (milliseconds-of (lambda () (sb-ext:gc :full t))))))

(defun bench-gcpause (n)
  (let ((group (start-fibers nil :carrier-count *carriers*)))
    (sb-ext:gc :full t)
    (print-pauses 0)
    (let ((fibers (parked group n #'fiber-park)))
      (print-pauses n)
      (wake-all group fibers))
    (finish-fibers group)))

(defun deep (bytes)
  "Use BYTES of stack, and come back."
  (let ((vector (make-array 1000 :element-type '(unsigned-byte 8))))
    (declare (dynamic-extent vector))
    (setf (aref vector 0) 1)
    (if (> bytes 0)
        (+ (deep (- bytes 1000)) (aref vector 0))
        0)))

;;; A function of its own, so that no frame holds the fibers that have ended.
(declaim (notinline burst))
(defun burst (group n)
  "Make N fibers that go deep, and end them. Return the resident bytes in between."
  (let ((fibers (parked group n (lambda () (deep 100000) (fiber-park)))))
    (prog1 (resident-bytes) (wake-all group fibers))))

(defun bench-burst (n)
  (sb-ext:gc :full t)
  (let ((group (start-fibers nil :carrier-count *carriers*)))
    (burst group 100)
    (let* ((resident (resident-bytes))
           (tables (page-table-bytes))
           (peak (burst group n)))
      (finish-fibers group)
      (sb-sys:scrub-control-stack)
      (sb-ext:gc :full t)
      (format t "RESULT burst sbcl-fiber p=~D n=~D before_bytes=~D peak_bytes=~D after_bytes=~D ~
                 ratio=~,2F page_table_bytes=~D~%"
              *carriers* n resident peak (resident-bytes) (/ (resident-bytes) resident)
              (- (page-table-bytes) tables)))))

(apply #'main (rest sb-ext:*posix-argv*))
