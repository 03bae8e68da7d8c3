;;;; Names for files that are needed for a while

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(require :sb-posix)

(defparameter *temporary-directory* (or (sb-ext:posix-getenv "TMPDIR") "/tmp"))

(defun temporary-path (control &rest arguments)
  "A path, a string, that no other process uses, with a name as by FORMAT."
  (format nil "~A/sb-fiber-~D-~?" *temporary-directory* (sb-posix:getpid) control arguments))

(defun make-temporary-directory ()
  "The path, a string without a slash at the end, of a new directory."
  (sb-posix:mkdtemp (format nil "~A/sb-fiber-XXXXXX" *temporary-directory*)))
