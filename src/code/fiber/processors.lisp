;;;; how many processors there are for this process

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; Both are asked anew for each group: they change while a process runs.
(define-alien-routine ("fiber_processor_count" %processor-count) int)
(define-alien-routine ("fiber_quota_below" %quota-below) long (root c-string))

(declaim (ftype (sfunction (&optional string) (or null (integer 1))) quota-of-processors))
(defun quota-of-processors (&optional (root ""))
  "How many processors it takes to use up the quota of the control groups, or NIL if there is none.
The files of the kernel are looked for in the directory ROOT."
  (let ((thousandths (%quota-below root)))
    (and (plusp thousandths) (values (ceiling thousandths 1000)))))

(declaim (ftype (sfunction () (values (integer 1) symbol)) processor-count))
(defun processor-count ()
  "Return how many processors this process may use, an integer, as START-FIBERS counts them; and
what limits it: :QUOTA, the time that its control group or one above that may use, of version 1 or
2, in whole processors, rounded up; or else :AFFINITY, the processors that there are, or that
sched_setaffinity(2) allows."
  (let ((allowed (%processor-count))
        (quota (quota-of-processors)))
    (if (and quota (< quota allowed))
        (values quota :quota)
        (values allowed :affinity))))
