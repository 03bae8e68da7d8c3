;;;; who waits for which descriptor, and how readiness is found out

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;;; the contract of the platform, in runtime/fiber-linux.c; nothing else knows epoll
;;;;
;;;;   open    make a poller
;;;;   arm     report once when a descriptor is ready in a direction; at once if it is now
;;;;   wait    sleep until there are reports, a time has come or somebody calls wake
;;;;   wake    end the poller's wait, from any thread
;;;;   forget  report nothing more about a descriptor, which is going to be closed
;;;;
;;;; A direction is +INPUT+ or +OUTPUT+; both may be ored. A report carries the word given
;;;; to arm, by which late ones for a number that was closed and reused are told apart.

(defconstant +input+ 1)
(defconstant +output+ 2)
(defconstant max-pollers 62)            ; a fixnum has a bit for each

(defconstant events-per-wait 128)

(defstruct (poller (:constructor %make-poller (index &optional (epoll -1)))
                   (:copier nil))
  (index 0 :type (mod #.max-pollers) :read-only t)
  (epoll -1 :type (signed-byte 32))
  (wakeup -1 :type (signed-byte 32))
  ;; The state of the scheduler's sleep: 0 awake, 1 asleep or about to be, 2 woken, 3 freed.
  (sleep 0 :type word)
  ;; Who is about to write to WAKEUP.
  (wakers 0 :type word)
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

(defun make-poller ()
  "A poller with a number of its own. Signals an error if the process has too many, or no
descriptor left."
  (let ((poller (%make-poller (claim-poller-index)))
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
    (error "The kernel makes no ~A: ~A" what (strerror (get-errno))))
  fd)

(defun close-poller (poller)
  "Give back the memory, the descriptors and the number of POLLER, which may have no descriptors yet."
  (%free (poller-events poller))
  (dolist (fd (list (poller-wakeup poller) (poller-epoll poller)))
    (unless (minusp fd) (sb-unix:unix-close fd)))
  (setf (svref *pollers* (poller-index poller)) nil))

(defun claim-poller-index ()
  (dotimes (i max-pollers
              (error "There are ~D carriers already, which is the limit." max-pollers))
    (when (null (cas (svref *pollers* i) nil t)) (return i))))

(defun free-poller (poller &optional (heir (constantly nil)))
  ;; T keeps the number until nothing refers to it; CLOSE must not use the descriptors.
  (setf (svref *pollers* (poller-index poller)) t
        (poller-sleep poller) 3)
  (barrier (:memory))
  (loop until (= (poller-wakers poller) 0)
        do (alien-funcall (extern-alien "thread_yield" (function int))))
  (forget-poller-in-cells (poller-index poller) heir)
  (close-poller poller))

;;; Whoever moves SLEEP from 1 to 2 writes; a second waker does not. WAKERS keeps the descriptor, whose
;;; number another file may get otherwise, until he has.
(defun wake-poller (poller)
  (declare (poller poller))
  (barrier (:memory)) ; between what the caller has written and what it reads of the sleeper
  (when (= (poller-sleep poller) 1)
    (without-interrupts
      (atomic-incf (poller-wakers poller))
      (when (= (cas (poller-sleep poller) 1 2) 1)
        (%poller-wake (poller-wakeup poller)))
      (atomic-decf (poller-wakers poller)))))

;;;; the waiter map

;;; One cell for each descriptor of the process, in a table of blocks that do not move.
;;; It is one for all pollers, not one for each, since CLOSE must find the waiters wherever they
;;; are, and since two carriers must not both believe that they own a descriptor.
;;;
;;; What is true when nobody is inside:
;;;  - INPUT and OUTPUT are chains of fibers through WAIT-NEXT, the longest waiting first, each
;;;    with WAIT-RESULT nil; a fiber that was taken out has a result: :READY, :CLOSED or :AGAIN;
;;;  - if a chain is not empty, the descriptor is armed for that direction in the poller whose
;;;    number is INPUT-POLLER or OUTPUT-POLLER, or its report is being handled;
;;;  - KNOWN-TO has the bits of the pollers that have ever heard of the descriptor
;;;    in its present GENERATION.
;;; All moves are made under the tiny lock, arming included: a report can be handled, on
;;; the same or another carrier, only when the waiter is in its chain.
;;;
;;;     state of a waiter          move                     by
;;;     in no chain -> in chain    ADD-WAITER, then arm     the fiber
;;;     in chain    -> :READY      report                   who serves the poller
;;;     in chain    -> :CLOSING    FORGET-FD                who is about to close
;;;                                WAKE-LATE-WAITERS        who has closed
;;;                                HANDLE-REPORT            who serves the poller, and may not
;;;                                                         arm again
;;;     :CLOSING    -> :CLOSED     FORGET-FD, no longer     the same
;;;                                in need of its WAIT-NEXT
;;;     :CLOSING    -> :AGAIN      the others, likewise     the same
;;;     in chain    -> in none     REMOVE-WAITER            the fiber: time-out, unwinding
(defstruct (fd-cell (:constructor make-fd-cell (fd))
                    (:copier nil))
  (lock 0 :type word)
  (fd 0 :type (unsigned-byte 31) :read-only t)
  (generation 0 :type (unsigned-byte 29))
  ;; How to read and write without waiting, see fiber-io.lisp. NIL: not found out yet.
  (kind nil :type symbol)
  ;; True if O_NONBLOCK was set by PREPARE-TO-ACCEPT and not by the user.
  (nonblocking-by-us nil :type boolean)
  (input nil)
  (output nil)
  (input-poller 0 :type (mod #.max-pollers))
  (output-poller 0 :type (mod #.max-pollers))
  (known-to 0 :type (unsigned-byte 62)))
(declaim (freeze-type fd-cell))

(define-load-time-global *fd-table* (make-array 4096 :initial-element 0))
(declaim (type simple-vector *fd-table*))

(defun find-fd-cell (fd createp)
  (declare (type (unsigned-byte 20) fd))
  (let ((block (svref *fd-table* (ash fd -8))))
    (unless (simple-vector-p block)
      (unless createp (return-from find-fd-cell nil))
      (cas (svref *fd-table* (ash fd -8)) 0 (make-array 256 :initial-element 0))
      (setf block (svref *fd-table* (ash fd -8))))
    (let ((cell (svref block (logand fd 255))))
      (cond ((fd-cell-p cell) cell)
            (createp
             (cas (svref block (logand fd 255)) 0 (make-fd-cell fd))
             (svref block (logand fd 255)))))))

(declaim (inline fd-cell-data))
(defun fd-cell-data (cell)
  (logior (fd-cell-fd cell) (ash (fd-cell-generation cell) 32)))

;;; What to arm in poller number INDEX: a one-shot arm replaces the one before, so it
;;; must name all directions that somebody waits for there.
(declaim (inline wanted-directions))
(defun wanted-directions (cell index)
  (logior (if (and (fd-cell-input cell) (= (fd-cell-input-poller cell) index)) +input+ 0)
          (if (and (fd-cell-output cell) (= (fd-cell-output-poller cell) index)) +output+ 0)))

(defmacro append-waiter (place fiber)
  `(if (null ,place)
       (setf ,place ,fiber)
       (let ((last (truly-the fiber ,place)))
         (loop (let ((next (fiber-wait-next last)))
                 (unless next (return))
                 (setf last (truly-the fiber next))))
         (setf (fiber-wait-next last) ,fiber))))

(declaim (inline arm-cell))
(defun arm-cell (cell poller)
  "Arm the descriptor of CELL in POLLER for all that is wanted there. Return 0 or an errno."
  (let ((index (poller-index poller)))
    (setf (fd-cell-known-to cell)
          (logior (fd-cell-known-to cell) (truly-the (unsigned-byte 62) (ash 1 index))))
    (%poller-arm (poller-epoll poller) (fd-cell-fd cell) (wanted-directions cell index)
                 (fd-cell-data cell))))

;;; Who finds others waiting joins them in the poller that serves them. Who is the first and
;;; cannot be served leaves at once: others would join a chain that nobody serves.
(defmacro chain-waiter (place poller-place fiber poller)
  `(if (null ,place)
       (let ((errno (progn (setf ,place ,fiber
                                 ,poller-place (poller-index ,poller))
                           (arm-cell cell ,poller))))
         (unless (= errno 0) (setf ,place nil))
         errno)
       (progn (append-waiter ,place ,fiber) 0)))

(declaim (ftype (sfunction (fd-cell fiber (mod 3) poller) (signed-byte 32)) add-waiter))
(defun add-waiter (cell fiber direction poller)
  "Let FIBER wait for DIRECTION in POLLER. Return 0, or an errno if it cannot be waited for, and then
FIBER does not wait."
  (setf (fiber-wait-next fiber) nil
        (fiber-wait-result fiber) nil)
  (with-tiny-lock ((fd-cell-lock cell))
    (if (= direction +input+)
        (chain-waiter (fd-cell-input cell) (fd-cell-input-poller cell) fiber poller)
        (chain-waiter (fd-cell-output cell) (fd-cell-output-poller cell) fiber poller))))

(defmacro unchain-waiter (place fiber)
  `(let ((this ,place) (previous nil))
     (loop (cond ((null this) (return nil))
                 ((eq this ,fiber)
                  (if previous
                      (setf (fiber-wait-next (truly-the fiber previous)) (fiber-wait-next ,fiber))
                      (setf ,place (fiber-wait-next ,fiber)))
                  (setf (fiber-wait-next ,fiber) nil)
                  (return t))
                 (t (setf previous this
                          this (fiber-wait-next (truly-the fiber this))))))))

(declaim (ftype (sfunction (fd-cell fiber (mod 3)) boolean) remove-waiter))
(defun remove-waiter (cell fiber direction)
  "Let FIBER no longer wait. Return false if it does not wait any more, having a result."
  (with-tiny-lock ((fd-cell-lock cell))
    (if (= direction +input+)
        (unchain-waiter (fd-cell-input cell) fiber)
        (unchain-waiter (fd-cell-output cell) fiber))))

(declaim (inline take-all-waiters))
(defun take-all-waiters (cell)
  "Empty the chains of CELL; return one of all, with the result :CLOSING. For the holder of its lock."
  (declare (optimize (safety 0)))
  (let ((chain (fd-cell-input cell)))
    (if (null chain)
        (setf chain (fd-cell-output cell))
        (append-waiter chain (fd-cell-output cell)))
    (setf (fd-cell-input cell) nil
          (fd-cell-output cell) nil)
    (do ((fiber chain (fiber-wait-next (truly-the fiber fiber))))
        ((null fiber))
      (setf (fiber-wait-result (truly-the fiber fiber)) :closing))
    chain))

;;; A fiber that sees RESULT may enter another chain at once.
(defun release-closed (chain result)
  (loop while chain
        collect (let ((fiber (truly-the fiber chain)))
                  (setf chain (fiber-wait-next fiber)
                        (fiber-wait-next fiber) nil)
                  (barrier (:write))
                  (setf (fiber-wait-result fiber) result)
                  fiber)))

;;; One report wakes the first waiter only; if there are more, arming again tells whether
;;; the descriptor is still ready for the next. A herd of acceptors would otherwise all wake for
;;; each connection.
(defmacro take-waiter (place)
  `(let ((fiber ,place))
     (when fiber
       (let ((fiber (truly-the fiber fiber)))
         (setf ,place (fiber-wait-next fiber)
               (fiber-wait-next fiber) nil
               (fiber-wait-result fiber) :ready))
       fiber)))

(declaim (ftype (sfunction (poller word (mod 4)) (values t t list)) handle-report))
(defun handle-report (poller data directions)
  "The descriptor of DATA has been reported ready for DIRECTIONS. Return the fiber that waited for input
and the one that waited for output, each or NIL, and a list of others that must be woken."
  (let ((cell (find-fd-cell (ldb (byte 20 0) data) nil))
        (index (poller-index poller))
        (reader nil)
        (writer nil)
        (refused nil))
    (when cell
      (with-tiny-lock ((fd-cell-lock cell))
        (when (= data (fd-cell-data cell))
          (when (and (logtest directions +input+) (= (fd-cell-input-poller cell) index))
            (setf reader (take-waiter (fd-cell-input cell))))
          (when (and (logtest directions +output+) (= (fd-cell-output-poller cell) index))
            (setf writer (take-waiter (fd-cell-output cell))))
          ;; Nobody would report to those who still wait: let them try, and be told why.
          (unless (or (= (wanted-directions cell index) 0)
                      (= (arm-cell cell poller) 0))
            (setf refused (take-all-waiters cell))))
        nil))
    (values reader writer (and refused (release-closed refused :again)))))

(declaim (ftype (sfunction (t) t) forget-fd))
(defun forget-fd (fd)
  "The descriptor FD is about to be closed. Return a list of the fibers that waited for it, which have
the result :CLOSED and must be woken. A duplicate of FD would keep the registration alive and report for
another file that gets the number: hence the removal."
  (let ((cell (and (typep fd '(unsigned-byte 20)) (find-fd-cell fd nil))))
    (when cell
      (let ((known-to 0)
            (chain nil))
        (declare (type (unsigned-byte 62) known-to))
        (with-tiny-lock ((fd-cell-lock cell))
          (setf known-to (fd-cell-known-to cell)
                (fd-cell-known-to cell) 0
                (fd-cell-kind cell) nil
                (fd-cell-nonblocking-by-us cell) nil
                (fd-cell-generation cell) (logand (1+ (fd-cell-generation cell))
                                                  (1- (ash 1 29))))
          (setf chain (take-all-waiters cell))
          nil)
        (unless (= known-to 0) (forget-in-pollers fd known-to))
        (release-closed chain :closed)))))

(defun forget-in-pollers (fd known-to)
  (declare (type (unsigned-byte 62) known-to))
  (dotimes (i max-pollers)
    (when (logbitp i known-to)
      (let ((poller (svref *pollers* i)))
        (when (poller-p poller) (%poller-forget (poller-epoll poller) fd))))))

;;; The next poller with this number has heard of nothing, and nobody serves this one.
(defun forget-poller-in-cells (index heir)
  "Let no cell refer to the poller number INDEX. HEIR, a function, returns a poller for the fiber at the
head of a chain that was served by it: one of another group, which had joined others."
  (declare (function heir))
  (flet ((forget (cell)
           (declare (fd-cell cell))
           (let ((reader (fd-cell-input cell))
                 (writer (fd-cell-output cell)))
             (when (and reader (= (fd-cell-input-poller cell) index))
               (rearm-elsewhere cell +input+ (funcall heir reader)))
             (when (and writer (= (fd-cell-output-poller cell) index))
               (rearm-elsewhere cell +output+ (funcall heir writer)))
             (with-tiny-lock ((fd-cell-lock cell))
               (setf (fd-cell-known-to cell)
                     (logandc2 (fd-cell-known-to cell)
                               (truly-the (unsigned-byte 62) (ash 1 index))))
               nil))))
    (loop for block across *fd-table*
          when (simple-vector-p block)
          do (loop for cell across block
                   when (fd-cell-p cell) do (forget cell)))))

;;; FD has been closed, and its number may stand for another file already: nothing is undone.
(defun wake-late-waiters (cell)
  "Return a list of the fibers that wait in CELL, which have the result :AGAIN and must be woken."
  (let ((chain nil))
    (with-tiny-lock ((fd-cell-lock cell))
      (setf chain (take-all-waiters cell))
      nil)
    (release-closed chain :again)))

(defun rearm-elsewhere (cell direction poller)
  (when (and poller
             (/= 0 (with-tiny-lock ((fd-cell-lock cell))
                     (if (= direction +input+)
                         (setf (fd-cell-input-poller cell) (poller-index poller))
                         (setf (fd-cell-output-poller cell) (poller-index poller)))
                     (arm-cell cell poller))))
    (mapc #'unpark (wake-late-waiters cell))))
