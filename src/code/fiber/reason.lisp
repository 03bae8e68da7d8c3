;;;; what a fiber waits for, in words

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; A fiber that parks for an object gives just that as its reason, so as not to allocate; the
;;; keyword is found when the reason is asked for. An object that a user gives is in a USER-REASON.
(defstruct (user-reason (:constructor make-user-reason (object))
                        (:copier nil))
  (object nil :read-only t))
(declaim (freeze-type user-reason))

(defun what-it-waits-for (fiber)
  (let ((reason (fiber-wait-reason fiber)))
    (typecase reason
      (user-reason (user-reason-object reason))
      (function (list :call-blocking reason))
      (sb-thread:thread (list :join reason))
      (sb-thread:waitqueue (list :condition-variable reason))
      (fiber-group (list :group reason))
      ;; A lock, or an object of a contributed module: its type has the name of the keyword.
      (structure-object (list (keywordicate (type-of reason)) reason))
      (t reason))))

(defun wait-reason-in-words (reason)
  "REASON, a second value of FIBER-STATE, as it is printed."
  (if (typep reason '(cons keyword (cons t null)))
      (format nil "~(~A~)~@[ ~S~]" (first reason) (name-of-waited-for (second reason)))
      reason))

(defun name-of-waited-for (object)
  (typecase object
    ((or string number symbol) object)
    (function (%fun-name object))
    (sb-thread:thread (sb-thread:thread-name object))
    (sb-thread:semaphore (sb-thread:semaphore-name object))
    (structure-object
     (let ((slot (find "NAME" (dd-slots (layout-dd (%instance-layout object)))
                       :key #'dsd-name :test #'string=)))
       (and slot (eq t (dsd-raw-type slot)) (%instance-ref object (dsd-index slot)))))))
