;;;; The package of the fiber tests, and what several suites need

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(defpackage "SB-FIBER-TESTS"
  (:use "COMMON-LISP" "FIVEAM"
        ;; A plain build has no such package: every suite says so itself.
        . #.(when (find-package "SB-FIBER") '("SB-FIBER"))))
