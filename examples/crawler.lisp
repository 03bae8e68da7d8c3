;;;; a crawler: all pages of a server that can be reached from one, some at a time

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :sb-bsd-sockets)
(require :sb-concurrency)

(defpackage "CRAWLER" (:use "COMMON-LISP" "SB-FIBER" "SB-CONCURRENCY" "SB-BSD-SOCKETS"))
(in-package "CRAWLER")

(defun fetch (port path)
  "The page PATH of the server at PORT of this machine."
  (let ((socket (make-instance 'inet-socket :type :stream :protocol :tcp)))
    (unwind-protect
         (let ((stream (progn (socket-connect socket #(127 0 0 1) port)
                              (socket-make-stream socket :input t :output t
                                                         :external-format :latin-1))))
           (format stream "GET ~A HTTP/1.0~C~C~C~C" path #\Return #\Newline #\Return #\Newline)
           (finish-output stream)
           (with-output-to-string (page)
             (loop for char = (read-char stream nil)
                   while char do (write-char char page))))
      (socket-close socket))))

(defun links (page)
  (loop for start = (search "href=\"" page) then (search "href=\"" page :start2 end)
        while start
        for end = (position #\" page :start (+ start 6))
        while end collect (subseq page (+ start 6) end)))

(defun links-in-time (port path seconds)
  "The links of PATH; none if it cannot be fetched in SECONDS."
  (handler-case (with-fibers (scope :deadline seconds) (links (fetch port path)))
    ((or scope-timeout error) () '())))

(defun crawl (port path &key (limit 8) (seconds 5))
  "The paths of all pages that can be reached from PATH. At most LIMIT are fetched at a time."
  (let ((seen (make-hash-table :test 'equal))
        (found (make-channel :capacity limit))
        (waiting (list path))
        (running 0))
    (with-fibers (scope)
      (loop
        (loop while (and waiting (< running limit))
              do (let ((path (pop waiting)))
                   (unless (shiftf (gethash path seen) t)
                     (incf running)
                     (spawn scope (lambda () (send found (links-in-time port path seconds)))))))
        (when (= running 0)
          (return (sort (loop for path being the hash-keys of seen collect path) #'string<)))
        (setf waiting (append (receive found) waiting))
        (decf running)))))
