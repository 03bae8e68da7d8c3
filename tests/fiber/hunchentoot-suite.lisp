;;;; Hunchentoot's own tests: its acceptors in fibers do what they do in threads

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

;;; They are in the release, and not in Debian's package cl-hunchentoot: run-tests.sh fetches them,
;;; and lets HUNCHENTOOT_SOURCE name the directory.

(defparameter *hunchentoot-tests*
  (let ((directory (sb-ext:posix-getenv "HUNCHENTOOT_SOURCE")))
    (and directory
         (probe-file (format nil "~A/test/" directory))))
  "The directory of the tests, or NIL.")

(load (merge-pathnames "support/http.lisp" *load-truename*))
(asdf:load-asd (merge-pathnames "../../contrib/sb-fiber-hunchentoot/sb-fiber-hunchentoot.asd"
                                *load-truename*))
(handler-bind ((warning #'muffle-warning))
  (let ((*standard-output* (make-broadcast-stream)))
    (asdf:load-system "sb-fiber-hunchentoot")
    (when *hunchentoot-tests*
      (mapc #'asdf:load-system '("drakma" "cl-who"))
      (dolist (name '("packages" "test-handlers" "script-engine" "script"))
        (load (merge-pathnames (make-pathname :name name :type "lisp") *hunchentoot-tests*))))))

;;; Drakma asks for it where *DEFAULT-PATHNAME-DEFAULTS* has a type, and it is read from a file that
;;; has none.
(software-version)

(def-suite* hunchentoot-suite)

(defun from-suite (name) (uiop:find-symbol* name "HUNCHENTOOT-TEST"))

;;; The arguments say which assertion it is, but for those that are made at random.
(defun describe-assertion (condition)
  (let ((*print-pretty* nil))
    (format nil "~S ~@[~S ~]~S"
            (funcall (from-suite "CONDITION-REPLY-SLOT-NAME") condition)
            (and (typep condition (from-suite "HEADER-ASSERTION-FAILED"))
                 (funcall (from-suite "CONDITION-HEADER-NAME") condition))
            (remove-if (lambda (argument) (and (vectorp argument) (not (stringp argument))))
                       (funcall (from-suite "CONDITION-ARGS") condition)))))

(defvar *requests*)

(defun failed-assertions (acceptor)
  "Run the tests with ACCEPTOR. Return descriptions of the assertions that fail, and how many
requests were made."
  (hunchentoot:start acceptor)
  (unwind-protect
       (let ((failed '()) (*requests* 0))
         (handler-bind ((condition
                          (lambda (condition)
                            (when (typep condition (from-suite "ASSERTION-FAILED"))
                              (push (describe-assertion condition) failed)))))
           (let ((*standard-output* (make-broadcast-stream)))
             (sb-int:encapsulate (from-suite "HTTP-REQUEST") 'count
                                 (lambda (function &rest arguments)
                                   (incf *requests*)
                                   (apply function arguments)))
             (unwind-protect
                  (funcall (from-suite "TEST-HUNCHENTOOT")
                           (format nil "http://127.0.0.1:~D" (hunchentoot:acceptor-port acceptor)))
               (sb-int:unencapsulate (from-suite "HTTP-REQUEST") 'count))))
         (values (nreverse failed) *requests*))
    (hunchentoot:stop acceptor)
    (funcall (from-suite "CLEAN-TMP-DIR"))))

(defun make-acceptor-for-suite (class carriers)
  (apply #'make-instance class
         :address "127.0.0.1" :port 0
         :access-log-destination nil :message-log-destination nil
         (and carriers
              (list :taskmaster (make-instance (uiop:find-symbol* "FIBER-TASKMASTER"
                                                                  "SB-FIBER-HUNCHENTOOT")
                                               :carrier-count carriers)))))

;;; Some fail with stock Hunchentoot as well.
(test as-in-threads
  (if (null *hunchentoot-tests*)
      (skip "HUNCHENTOOT_SOURCE names no directory with the tests of Hunchentoot.")
      (multiple-value-bind (expected requests)
          (failed-assertions (make-acceptor-for-suite 'hunchentoot:easy-acceptor nil))
        (is (> requests 20))
        (dolist (class (list 'hunchentoot:easy-acceptor
                             (uiop:find-symbol* "EASY-FIBER-ACCEPTOR" "SB-FIBER-HUNCHENTOOT")))
          (dolist (carriers '(1 4))
            (multiple-value-bind (failed n)
                (failed-assertions (make-acceptor-for-suite class carriers))
              (is (equal expected failed))
              (is (= requests n))))))))
