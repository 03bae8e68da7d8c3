;;;; alarms: what a timer has in a deadline heap

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

(defstruct (alarm (:constructor make-alarm (fiber timer))
                  (:copier nil))
  (fiber nil :type fiber :read-only t)
  (timer nil :read-only t)
  ;; What the fiber is to call. Changes only while the alarm is in no heap.
  (function nil :type (or null function))
  (heap-index -1 :type fixnum)
  (heap nil))
(declaim (freeze-type alarm))
