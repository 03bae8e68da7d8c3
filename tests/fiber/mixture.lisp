;;;; All that a fiber may do, in compositions chosen at random, while others interrupt and end it,
;;;; and the collector runs

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/mixture.lisp" *load-truename*))

(def-suite* mixture)

;;; Most collections are to be made by the thread that allocates, wherever it is.
(setf (sb-ext:bytes-consed-between-gcs) (* 4 1024 1024))

(test random-compositions
  (on-carriers (n)
    (let ((*random-state* (make-random-state t)))
      (with-group (group n)
        (check-random-fibers group 1000)))))
