;;;; waiting for a child process

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; PROCESS-WAIT serves the events of its fiber or thread until the process has ended, since it may
;;; have to copy what the process prints. So a change of the process must be such an event:
;;;  - its end makes a pidfd readable, of which each waiter has its own. So it does not matter which
;;;    thread is sent SIGCHLD, and whether that has interrupts enabled;
;;;  - if it was stopped or continued, or another thread has taken its status from the kernel, the
;;;    thread that finds this out writes to the event descriptors of all waiters.
;;; Both descriptors belong to the waiter. *ACTIVE-PROCESSES-LOCK* is held when an event descriptor
;;; is written to, and when it is entered into or removed from the list: so none is written to that
;;; was closed.

(define-alien-routine ("fiber_event_open" %event-open) int)
(define-alien-routine ("fiber_process_open" %process-open) int (pid int))

(defun open-event ()
  (let ((fd (%event-open)))
    (if (minusp fd)
        (let ((errno (get-errno)))
          (with-interrupts
            (simple-perror "Cannot make an event descriptor to wait for a process" :errno errno)))
        fd)))

(defun drain-event (fd)
  (with-alien ((count (unsigned 64)))
    (sb-unix:unix-read fd (alien-sap (addr count)) 8)))

;;; Interrupts are enabled in FUNCTION only: so no thread is unwound with a descriptor that it has
;;; not noted, or before it has closed that.
(defun call-with-event-fd (open on-event function)
  "Call FUNCTION with the descriptor that OPEN returns while ON-EVENT is called when that is
readable, and then close it; with a negative number, if OPEN returns that."
  (declare (function open function))
  (let ((fd -1))
    (without-interrupts
      (unwind-protect
           (if (minusp (setf fd (allow-with-interrupts (funcall open))))
               (with-local-interrupts (funcall function fd))
               (with-fd-handler (fd :input on-event)
                 (with-local-interrupts (funcall function fd))))
        (unless (minusp fd) (sb-unix:unix-close fd))))))

(defun call-with-process-events (pid function)
  "Call FUNCTION, while the end of process PID is an event, with a descriptor: another event is that
WAKE-PROCESS-WAITER is called on it."
  (declare (function function))
  (call-with-event-fd
   #'open-event #'drain-event
   (lambda (event)
     (call-with-event-fd
      ;; It fails on old kernels, and if the process has been forgotten: then it has ended already.
      (lambda () (%process-open pid))
      #'invalidate-descriptor           ; it stays readable
      (lambda (pidfd)
        (declare (ignore pidfd))
        (funcall function event))))))

(defmacro with-process-waiter ((pid waiters &rest lock) &body body)
  "Execute BODY such that all changes of process PID are events. WAITERS is the place of the list
that LOCK, a form without its body, protects."
  (with-unique-names (event)
    `(call-with-process-events
      ,pid
      (lambda (,event)
        (ensure-waking-room 4096)
        (without-interrupts
          (unwind-protect (progn (,@lock (push ,event ,waiters))
                                 (with-local-interrupts ,@body))
            ;; Were this cut off, others would write to a descriptor that is closed, and perhaps
            ;; another file's by then.
            (with-native-waits
              (,@lock (setf ,waiters (remove ,event ,waiters :count 1))))))))))

(defun wake-process-waiter (event)
  (%poller-wake event))
