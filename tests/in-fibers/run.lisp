;;;; Run one suite of somebody else's, in the process that loads this:
;;;;
;;;;   sh run-sbcl.sh --non-interactive --load tests/in-fibers/run.lisp SUITE [K/N] [MODE...]
;;;;
;;;; K/N: only every Nth test, beginning with the Kth. The last line of output
;;;; counts the runs in fibers, as that of tests/fiber/run.lisp counts checks.
;;;; What is written goes to the current directory.

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :asdf)
(require :sb-bsd-sockets)

(with-compilation-unit ()
  (dolist (file '("harness" "exclusions" "suites"))
    (load (merge-pathnames (concatenate 'string file ".lisp") *load-truename*))))

(in-package "IN-FIBERS")

(defun every-nth (list k n)
  (loop for rest = (nthcdr (1- k) list) then (nthcdr n rest)
        while rest collect (first rest)))

(defun run-suite (name &optional (part "1/1") &rest mode-names)
  (let* ((slash (position #\/ part))
         (tests (funcall (or (cdr (assoc name *suites* :test #'string=))
                             (error "There is no suite ~A." name))))
         (modes (remove-if-not (lambda (mode)
                                 (or (null mode-names) (matches-p (mode-name mode) mode-names)))
                               *modes*)))
    (run-tests name
               (every-nth tests (parse-integer part :end slash)
                          (parse-integer part :start (1+ slash)))
               :modes modes)))

(apply #'run-suite (rest (member "--" *posix-argv* :test #'string=)))
