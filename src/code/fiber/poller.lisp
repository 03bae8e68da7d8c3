;;;; pollers: how readiness of descriptors is found out

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;;; the contract of the platform, in runtime/fiber-poller.c; nothing here calls epoll
;;;;
;;;;   open    make a poller
;;;;   arm     report once when a descriptor is ready in a direction; at once if it is now. With
;;;;           +KEEP+: report now, and whenever there is more. With +FRESH+: most likely that
;;;;           descriptor is not armed there
;;;;   wait    sleep until there are reports, a time has come or a thread calls wake
;;;;   wake    end the poller's wait, from any thread
;;;;   forget  report nothing more about a descriptor, which is going to be closed
;;;;
;;;; A direction is +INPUT+ or +OUTPUT+; both may be ored, and in reports +URGENT+ if what has come
;;;; is out of band. A report carries the word given to arm,
;;;; by which late reports for a number that was closed and used again are told from others.

(defconstant +input+ 1)
(defconstant +output+ 2)
(defconstant +keep+ 4)
(defconstant +fresh+ 8)
(defconstant +urgent+ 4)                ; in reports
(defconstant max-group-pollers 62)      ; a fixnum has a bit for each
(defconstant max-pollers (* 16 max-group-pollers))

(deftype descriptor () '(unsigned-byte 31))

(defconstant events-per-wait 128)

(defstruct (poller (:constructor %make-poller (index &optional (epoll -1) keeps-p (place index)))
                   (:copier nil))
  (index 0 :type (mod #.max-pollers) :read-only t)
  ;; Which of its group it is.
  (place 0 :type (mod #.max-group-pollers) :read-only t)
  ;; True if it is :PERSISTENT, see fiber/readiness.lisp.
  (keeps-p nil :type boolean :read-only t)
  (epoll -1 :type (signed-byte 32))
  (wakeup -1 :type (signed-byte 32))
  ;; The state of the scheduler's sleep: 0 awake, 1 asleep or about to be, 2 woken, 3 freed.
  (sleep 0 :type word)
  ;; How many threads are about to use its descriptors, see USING-POLLER.
  (users 0 :type word)
  (events (int-sap 0) :type system-area-pointer))
(declaim (freeze-type poller))

(define-alien-routine ("free" %free) void (memory system-area-pointer))
(define-alien-routine ("fiber_poller_open" %poller-open) int)
(define-alien-routine ("fiber_poller_add_wakeup" %poller-add-wakeup) int
  (epoll int) (data unsigned))

(declaim (inline %poller-arm %poller-forget %poller-wait %poller-wake fiber-now))
(defun %poller-arm (epoll fd directions data)
  (alien-funcall (extern-alien "fiber_poller_arm" (function int int int int unsigned))
                 epoll fd directions data))
(defun %poller-forget (epoll fd)
  (alien-funcall (extern-alien "fiber_poller_forget" (function void int int)) epoll fd))
(defun %poller-wait (epoll events n nanoseconds)
  (alien-funcall (extern-alien "fiber_poller_wait"
                               (function int int system-area-pointer int (signed 64)))
                 epoll events n nanoseconds))
(defun %poller-wake (wakeup)
  (alien-funcall (extern-alien "fiber_poller_wake" (function void int)) wakeup))

(defun fiber-now ()
  "Nanoseconds of the clock in which deadlines of fibers are given."
  (truly-the (unsigned-byte 61)
             (alien-funcall (extern-alien "fiber_now" (function (unsigned 61))))))

;;;; pollers

(define-load-time-global *pollers* (make-array max-pollers :initial-element nil))
(declaim (type simple-vector *pollers*))

;;; The data of the event that WAKE makes: no descriptor has this number.
(defconstant wakeup-data (1- (ash 1 32)))

(defun make-poller (&optional (kind :one-shot) (place 0))
  "A poller of KIND, :ONE-SHOT or :PERSISTENT, number PLACE of its group, with a number of its own
among all. Signals an error if the process has too many, or no descriptor left."
  (let ((poller (%make-poller (claim-poller-index) -1 (eq kind :persistent) place))
        (done nil))
    (unwind-protect
         (setf (poller-events poller) (sb-alien::%make-alien (* events-per-wait 16))
               (poller-epoll poller) (check-descriptor (%poller-open) "poller")
               (poller-wakeup poller)
               (check-descriptor (%poller-add-wakeup (poller-epoll poller) wakeup-data)
                                 "wake-up for a poller")
               (svref *pollers* (poller-index poller)) poller
               done t)
      (unless done (close-poller poller)))
    poller))

(defun check-descriptor (fd what)
  (when (minusp fd)
    (let ((errno (get-errno)))
      (error "~@<The kernel makes no ~A: ~A~@[. ~@?~]~:@>" what (strerror errno) (remedy errno))))
  fd)

(defun remedy (errno)
  "What to raise if the kernel watches no descriptor because of ERRNO: a format control, or NIL."
  (cond ((= errno sb-unix:emfile)
         "The process has as many descriptors as it may have, of which each carrier takes two: ~
          raise the limit by `ulimit -n' (RLIMIT_NOFILE).")
        ((= errno sb-unix:enfile)
         "There are as many open files as the system may have: raise the sysctl fs.file-max.")
        ((= errno sb-unix:enospc)
         "The user watches as many descriptors by epoll as is allowed: raise the sysctl ~
          fs.epoll.max_user_watches.")
        ((= errno sb-unix:enomem)
         "The kernel has no memory for it.")))

(defun close-poller (poller)
  "Give back the memory, the descriptors and the number of POLLER, which may have no descriptors
yet."
  (%free (poller-events poller))
  (dolist (fd (list (poller-wakeup poller) (poller-epoll poller)))
    (unless (minusp fd) (sb-unix:unix-close fd)))
  (setf (svref *pollers* (poller-index poller)) nil))

(defun claim-poller-index ()
  (dotimes (i max-pollers
              (error "~@<There are ~D carriers already, which is the limit. Finish a group by ~
                      FINISH-FIBERS, or start groups with fewer.~:@>"
                     max-pollers))
    (when (null (cas (svref *pollers* i) nil t)) (return i))))

(defun free-poller (poller &optional (heir (constantly nil)))
  ;; T keeps the number until nothing refers to it; a close must not use the descriptors any more.
  (setf (svref *pollers* (poller-index poller)) t
        (poller-sleep poller) 3)
  (barrier (:memory))
  (loop until (= (poller-users poller) 0)
        do (alien-funcall (extern-alien "thread_yield" (function int))))
  (forget-poller-in-cells (poller-index poller) heir)
  (close-poller poller))

;;; While USERS is not 0 the descriptors stay open, whose numbers other files would get otherwise.
(defmacro using-poller ((poller usable) &body body)
  "Execute BODY, which does not exit non-locally, if USABLE is true. From before that is
asked, POLLER cannot be freed. With interrupts off."
  `(progn
     (atomic-incf (poller-users ,poller))
     (multiple-value-prog1 (when ,usable ,@body)
       (atomic-decf (poller-users ,poller)))))

;;; The thread that moves SLEEP from 1 to 2 writes; a second waker does not.
(defun wake-poller (poller)
  (declare (poller poller))
  (barrier (:memory)) ; between what the caller has written and what it reads of the sleeper
  (when (= (poller-sleep poller) 1)
    (without-interrupts
      (using-poller (poller (= (cas (poller-sleep poller) 1 2) 1))
        (%poller-wake (poller-wakeup poller))))))
