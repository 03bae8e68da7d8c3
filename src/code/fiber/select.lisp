;;;; select and poll of several descriptors

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; An epoll descriptor is itself a file that becomes readable: a fiber that waits for several
;;; descriptors waits for one made of them, and then asks without waiting which it was.
(defun park-for-set (make-set deadline)
  "Park for a set as runtime/fiber-select.c describes it, which MAKE-SET returns. Return :READY if
something is ready, :REFUSED if there can be no such set, else NIL: look again."
  (declare (function make-set) (dynamic-extent make-set))
  (without-interrupts ; else the descriptor could be lost
    (let* ((set (funcall make-set))
           (fd (ldb (byte 31 0) set)))
      (declare (type (signed-byte 64) set))
      (cond ((= set -1) :ready)
            ((= set -3) :refused)
            ((= set -2) (with-local-interrupts (park-until deadline))
                        nil)
            ((logtest set (ash 1 40))
             (unwind-protect (waiting-for :poll
                               (with-local-interrupts (park-on-fd fd +input+ deadline)))
               (sb-unix:unix-close fd))
             nil)
            (t (with-local-interrupts (park-on-fd fd (ldb (byte 2 32) set) deadline))
               nil)))))

(defun park-on-set (make-set deadline)
  "Park until one of a set is ready, or DEADLINE has come. Return false if the system call must wait
itself."
  (declare (function make-set) (dynamic-extent make-set))
  (spend-budget +accept-cost+) ; the fiber accepts connections, most likely
  (loop
    (let ((result (park-for-set make-set deadline)))
      (cond ((eq result :refused) (announce-blocking)
                                  (return nil))
            ((or result (deadline-passed-p deadline)) (return t))))))

(defun park-before-select (n read-fds write-fds exception-fds seconds microseconds)
  "Park until select(2) with these arguments would not wait, or its time is over. Return false if it
must wait itself. Called when it has been found that select(2) would wait."
  (flet ((sap (fds) (if fds (alien-sap fds) (int-sap 0))))
    (park-on-set (lambda ()
                   (alien-funcall
                    (extern-alien "fiber_select_set"
                                  (function (signed 64) int system-area-pointer system-area-pointer
                                            system-area-pointer))
                    n (sap read-fds) (sap write-fds) (sap exception-fds)))
                 (and (or seconds microseconds)
                      (timeout-to-deadline (or seconds 0) (or microseconds 0))))))

(defun park-before-poll (pollfds n milliseconds)
  "Park until poll(2) with these arguments would not wait, or its time is over. Return false if it
must wait itself."
  (cond ((= milliseconds 0)
         (spend-budget +call-cost+) ; as in (LOOP UNTIL ... DO (SERVE-ALL-EVENTS 0))
         t)
        (t
         (park-on-set (lambda ()
                        (alien-funcall (extern-alien "fiber_poll_set"
                                                     (function (signed 64) system-area-pointer int))
                                       pollfds n))
                      (and (> milliseconds 0) (nanoseconds-from-now (* milliseconds 1000000)))))))
