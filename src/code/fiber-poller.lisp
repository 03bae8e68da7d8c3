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

(deftype descriptor () '(unsigned-byte 31))

(defconstant events-per-wait 128)

(defstruct (poller (:constructor %make-poller (index &optional (epoll -1)))
                   (:copier nil))
  (index 0 :type (mod #.max-pollers) :read-only t)
  (epoll -1 :type (signed-byte 32))
  (wakeup -1 :type (signed-byte 32))
  ;; The state of the scheduler's sleep: 0 awake, 1 asleep or about to be, 2 woken, 3 freed.
  (sleep 0 :type word)
  ;; How many threads are about to use its descriptors.
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
    (let ((errno (get-errno)))
      (error "~@<The kernel makes no ~A: ~A~@[. ~@?~]~:@>" what (strerror errno) (remedy errno))))
  fd)

(defconstant errno-enomem 12)
(defconstant errno-enfile 23)
(defconstant errno-emfile 24)
(defconstant errno-enospc 28)

(defun remedy (errno)
  "What to raise if the kernel watches no descriptor because of ERRNO: a format control, or NIL."
  (cond ((= errno errno-emfile)
         "The process has as many descriptors as it may have, of which each carrier takes two: raise the ~
          limit by `ulimit -n' (RLIMIT_NOFILE).")
        ((= errno errno-enfile)
         "There are as many open files as the system may have: raise the sysctl fs.file-max.")
        ((= errno errno-enospc)
         "The user watches as many descriptors by epoll as he may: raise the sysctl ~
          fs.epoll.max_user_watches.")
        ((= errno errno-enomem)
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
              (error "There are ~D carriers already, which is the limit." max-pollers))
    (when (null (cas (svref *pollers* i) nil t)) (return i))))

(defun free-poller (poller &optional (heir (constantly nil)))
  ;; T keeps the number until nothing refers to it; CLOSE must not use the descriptors.
  (setf (svref *pollers* (poller-index poller)) t
        (poller-sleep poller) 3)
  (barrier (:memory))
  (loop until (= (poller-users poller) 0)
        do (alien-funcall (extern-alien "thread_yield" (function int))))
  (forget-poller-in-cells (poller-index poller) heir)
  (close-poller poller))

;;; USERS keeps the descriptors open, whose numbers other files may get otherwise.
(defmacro using-poller ((poller usable) &body body)
  "Execute BODY, which does not exit non-locally, if POLLER is USABLE, which is asked while it
cannot be freed. With interrupts off."
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

;;;; the waiter map

;;; One cell for each descriptor of the process, in a table whose blocks do not move.
;;; It is one for all pollers, not one for each, since CLOSE must find the waiters wherever they
;;; are, and since two carriers must not both believe that they own a descriptor.
;;;
;;; What is true when nobody is inside:
;;;  - INPUT and OUTPUT are chains of fibers through WAIT-NEXT, the longest waiting first, each
;;;    with WAIT-RESULT nil; a fiber that was taken out has a result: :READY, :CLOSED, :AGAIN or
;;;    the errno with which the kernel refused to arm;
;;;  - if a chain is not empty, the descriptor is armed for that direction in the poller whose
;;;    number is INPUT-POLLER or OUTPUT-POLLER, or its report is being handled;
;;;  - KNOWN-TO has the bits of the pollers that have ever heard of the descriptor
;;;    in its present GENERATION (one may hear of it late, from a thread that arms while it is closed:
;;;    its report is dropped);
;;;  - ARMING is 0.
;;;
;;;     state of a waiter          move                     by
;;;     in no chain -> in chain    ADD-WAITER, then arm     the fiber
;;;     in chain    -> :READY      report                   the carrier that serves the poller
;;;     in chain    -> :CLOSING    FORGET-FILE              the thread that is about to close
;;;                                WAKE-LATE-WAITERS        the thread that has closed
;;;                                REFUSE-WAITERS           the thread that arms, in vain
;;;     :CLOSING    -> :CLOSED     FORGET-FILE, no longer     the same
;;;                                in need of its WAIT-NEXT
;;;     :CLOSING    -> :AGAIN,     the others, likewise     the same
;;;                    errno
;;;     in chain    -> in none     REMOVE-WAITER            the fiber: time-out, unwinding
;;;
;;; All moves are made under the tiny lock. The system call that arms is not, since it may have to
;;; wait in the kernel for others that use the poller. So that an older wish does not
;;; replace a younger one there, one thread at a time arms a descriptor: ARMING has the directions
;;; for which somebody wants that, and +ARMING-NOW+ while a thread is at it. That thread takes a
;;; direction out under the lock, and the other if it is served by the same poller, arms there for all
;;; that is wanted then, and ends when ARMING has no direction any more. A direction is entered there,
;;; after its waiter, under the lock, and taken out together with the look at the chains for the system
;;; call that serves it; so each waiter is seen by one.
;;;
;;;     ARMING                          move                  by
;;;     0             -> now, wishes    WISH-TO-ARM           the thread that will arm
;;;     now, wishes   -> now, more      WISH-TO-ARM           any other
;;;     now, wishes   -> now, fewer     NEXT-ARMING           the thread that arms
;;;     now           -> 0              NEXT-ARMING           the same
(defstruct (fd-cell (:constructor make-fd-cell (fd))
                    (:copier nil))
  (lock 0 :type word)
  (fd 0 :type descriptor :read-only t)
  (generation 0 :type (unsigned-byte 29))
  ;; True from FORGET-FILE until the thread that called it last has closed the descriptor.
  (closing nil :type boolean)
  ;; How to read and write without waiting, see fiber-io.lisp. NIL: not found out yet.
  (kind nil :type symbol)
  ;; True if O_NONBLOCK was set by PREPARE-TO-ACCEPT and not by the user.
  (nonblocking-by-us nil :type boolean)
  (input nil)
  (output nil)
  (input-poller 0 :type (mod #.max-pollers))
  (output-poller 0 :type (mod #.max-pollers))
  (arming 0 :type (unsigned-byte 3))
  ;; What those who wait say that they wait for.
  (reading (list :read fd) :type list :read-only t)
  (writing (list :write fd) :type list :read-only t)
  (known-to 0 :type (unsigned-byte 62)))
(declaim (freeze-type fd-cell))

;;; Blocks of 256 cells, of which there are 4096 in each of 2048 parts.
(define-load-time-global *fd-table* (make-array 2048 :initial-element 0))
(declaim (type simple-vector *fd-table*))

(declaim (inline subtable))
(defun subtable (table index length createp)
  "The vector of LENGTH at INDEX of TABLE, or NIL if there is none and CREATEP is false."
  (declare (simple-vector table) (index index))
  (let ((entry (svref table index)))
    (cond ((simple-vector-p entry) entry)
          (createp
           (cas (svref table index) 0 (make-array length :initial-element 0))
           (truly-the simple-vector (svref table index))))))

(defun find-fd-cell (fd createp)
  (declare (type descriptor fd))
  (let* ((part (subtable *fd-table* (ash fd -20) 4096 createp))
         (block (and part (subtable part (ldb (byte 12 8) fd) 256 createp)))
         (i (ldb (byte 8 0) fd)))
    (when block
      (let ((cell (svref block i)))
        (cond ((fd-cell-p cell) cell)
              (createp
               (cas (svref block i) 0 (make-fd-cell fd))
               (svref block i)))))))

(defun map-fd-cells (function)
  (declare (function function))
  (labels ((walk (table)
             (declare (simple-vector table))
             (loop for entry across table
                   do (cond ((fd-cell-p entry) (funcall function entry))
                            ((simple-vector-p entry) (walk entry))))))
    (walk *fd-table*)))

(declaim (inline fd-cell-data))
(defun fd-cell-data (cell)
  (logior (fd-cell-fd cell) (ash (fd-cell-generation cell) 32)))

;;;; chains

(defmacro append-waiter (place fiber)
  `(if (null ,place)
       (setf ,place ,fiber)
       (let ((last (truly-the fiber ,place)))
         (loop (let ((next (fiber-wait-next last)))
                 (unless next (return))
                 (setf last (truly-the fiber next))))
         (setf (fiber-wait-next last) ,fiber))))

(declaim (inline take-waiters))
(defun take-waiters (cell directions)
  "Empty the chains of CELL for DIRECTIONS; return one of all, with the result :CLOSING. For the
holder of its lock."
  (declare (type (mod 4) directions) (optimize (safety 0)))
  (let ((chain nil))
    (when (logtest directions +input+)
      (setf chain (fd-cell-input cell)
            (fd-cell-input cell) nil))
    (when (logtest directions +output+)
      (append-waiter chain (fd-cell-output cell))
      (setf (fd-cell-output cell) nil))
    (do ((fiber chain (fiber-wait-next (truly-the fiber fiber))))
        ((null fiber))
      (setf (fiber-wait-result (truly-the fiber fiber)) :closing))
    chain))

;;; A fiber that sees RESULT may enter another chain at once.
(defun release-waiters (chain result)
  "Let the fibers of CHAIN, which were taken out, have RESULT; return a list of them. They must be
woken."
  (loop while chain
        collect (let ((fiber (truly-the fiber chain)))
                  (setf chain (fiber-wait-next fiber)
                        (fiber-wait-next fiber) nil)
                  (barrier (:write))
                  (setf (fiber-wait-result fiber) result)
                  fiber)))

;;;; arming

(defconstant +arming-now+ 4)

;;; What to arm in poller number INDEX: a one-shot arm replaces the one before, so it
;;; must name all directions that somebody waits for there.
(declaim (inline wanted-directions))
(defun wanted-directions (cell index)
  (logior (if (and (fd-cell-input cell) (= (fd-cell-input-poller cell) index)) +input+ 0)
          (if (and (fd-cell-output cell) (= (fd-cell-output-poller cell) index)) +output+ 0)))

(declaim (inline wish-to-arm))
(defun wish-to-arm (cell directions)
  "Let CELL be armed for DIRECTIONS. Return true if the caller has to call ARM-CELL, once it has left
the lock of CELL, which it holds."
  (let ((old (fd-cell-arming cell)))
    (setf (fd-cell-arming cell) (logior old directions +arming-now+))
    (not (logtest old +arming-now+))))

(declaim (inline directions-of-poller next-arming))
(defun directions-of-poller (cell index)
  (logior (if (= (fd-cell-input-poller cell) index) +input+ 0)
          (if (= (fd-cell-output-poller cell) index) +output+ 0)))

;;; All the wishes that one system call fulfils are taken out, and no other: a wish for a direction
;;; whose waiters are in another poller by now is one for that.
(defun next-arming (cell)
  "Take wishes out of ARMING of CELL, and return the number of the poller in which to arm, or else
NIL and be done. For the thread that arms, which holds the lock of CELL."
  (let ((wishes (logand (fd-cell-arming cell) (logior +input+ +output+))))
    (cond ((= wishes 0)
           (setf (fd-cell-arming cell) 0)
           nil)
          (t
           (let ((index (if (logtest wishes +input+)
                            (fd-cell-input-poller cell)
                            (fd-cell-output-poller cell))))
             (setf (fd-cell-arming cell)
                   (logior +arming-now+ (logandc2 wishes (directions-of-poller cell index)))
                   (fd-cell-known-to cell)
                   (logior (fd-cell-known-to cell) (truly-the (unsigned-byte 62) (ash 1 index))))
             index)))))

;;; FORGET-POLLER-IN-CELLS deals with those who wait in a poller that is being freed.
(declaim (ftype (sfunction ((mod #.max-pollers) descriptor (mod 4) word) (signed-byte 32))
                arm-in-poller))
(defun arm-in-poller (index fd directions data)
  "Arm FD in poller number INDEX. Return 0 or an errno."
  (let ((poller (svref *pollers* index)))
    (or (and (poller-p poller)
             (using-poller (poller (eq poller (svref *pollers* index)))
               (%poller-arm (poller-epoll poller) fd directions data)))
        0)))

(defun arm-cell (cell)
  "Arm CELL for all that is wanted, until nothing new is. For the thread to which WISH-TO-ARM said
so."
  (loop
    (let ((index nil) (directions 0) (data 0))
      (declare (type (or null (mod #.max-pollers)) index) (type (mod 4) directions) (word data))
      (with-tiny-lock ((fd-cell-lock cell))
        (setf index (next-arming cell))
        (when index
          (setf directions (wanted-directions cell index)
                data (fd-cell-data cell)))
        nil)
      (unless index (return))
      (unless (= directions 0)          ; it may have been woken meanwhile
        (let ((errno (arm-in-poller index (fd-cell-fd cell) directions data)))
          (unless (= errno 0) (refuse-waiters cell index data errno)))))))

;;; Nobody would report to them.
(declaim (ftype (sfunction (fd-cell (mod #.max-pollers) word (signed-byte 32)) t) refuse-waiters))
(defun refuse-waiters (cell index data errno)
  "Wake those who wait for CELL in poller number INDEX, and tell them ERRNO, if DATA is still that
of CELL."
  (let ((chain nil))
    (with-tiny-lock ((fd-cell-lock cell))
      (when (= data (fd-cell-data cell))
        (setf chain (take-waiters cell (wanted-directions cell index))))
      nil)
    (mapc #'unpark (release-waiters chain errno))))

;;;; waiting

;;; A fiber that finds others waiting joins them in the poller that serves them.
(defmacro chain-waiter (place poller-place direction fiber poller)
  `(cond ((null ,place)
          (setf ,place ,fiber
                ,poller-place (poller-index ,poller))
          (wish-to-arm cell ,direction))
         (t (append-waiter ,place ,fiber)
            nil)))

(declaim (ftype (sfunction (fd-cell fiber (mod 3) poller fixnum) boolean) add-waiter))
(defun add-waiter (cell fiber direction poller file)
  "Let FIBER wait in POLLER until CELL is ready for DIRECTION. Return false if CELL does not stand
for FILE any more, see NOTE-FILE, or is closed already."
  (setf (fiber-wait-next fiber) nil
        (fiber-wait-result fiber) nil)
  (when (with-tiny-lock ((fd-cell-lock cell))
          (cond ((and (>= file 0) (/= file (fd-cell-generation cell)))
                 (setf (fiber-wait-result fiber) :closed)
                 nil)
                ((= direction +input+)
                 (chain-waiter (fd-cell-input cell) (fd-cell-input-poller cell) +input+
                               fiber poller))
                (t
                 (chain-waiter (fd-cell-output cell) (fd-cell-output-poller cell) +output+
                               fiber poller))))
    (arm-cell cell))
  (neq (fiber-wait-result fiber) :closed))

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

;;;; reports

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

(declaim (ftype (sfunction (poller word (mod 4)) (values t t)) handle-report))
(defun handle-report (poller data directions)
  "The descriptor of DATA has been reported ready for DIRECTIONS. Return the fiber that waited for
input and the one that waited for output, each or NIL, which must be woken."
  (let ((cell (find-fd-cell (ldb (byte 31 0) data) nil))
        (index (poller-index poller))
        (reader nil)
        (writer nil))
    (when (and cell
               (with-tiny-lock ((fd-cell-lock cell))
                 (when (= data (fd-cell-data cell))
                   (when (and (logtest directions +input+) (= (fd-cell-input-poller cell) index))
                     (setf reader (take-waiter (fd-cell-input cell))))
                   (when (and (logtest directions +output+) (= (fd-cell-output-poller cell) index))
                     (setf writer (take-waiter (fd-cell-output cell))))
                   (let ((wanted (wanted-directions cell index)))
                     (and (/= wanted 0) (wish-to-arm cell wanted))))))
      (arm-cell cell))
    (values reader writer)))

;;;; closing

(declaim (ftype (sfunction (fd-cell) (values list (unsigned-byte 29))) forget-file))
(defun forget-file (cell)
  "The descriptor of CELL is about to be closed. Return a list of the fibers that waited for it,
which have the result :CLOSED and must be woken, and the generation that begins. A duplicate would
keep the registration alive and report for another file that gets the number: hence the removal."
  (let ((known-to 0)
        (generation 0)
        (chain nil))
    (declare (type (unsigned-byte 62) known-to) (type (unsigned-byte 29) generation))
    (with-tiny-lock ((fd-cell-lock cell))
      (setf generation (logand (1+ (fd-cell-generation cell)) (1- (ash 1 29)))
            known-to (fd-cell-known-to cell)
            (fd-cell-known-to cell) 0
            (fd-cell-kind cell) nil
            (fd-cell-nonblocking-by-us cell) nil
            (fd-cell-closing cell) t
            (fd-cell-generation cell) generation
            chain (take-waiters cell 3))
      nil)
    (unless (= known-to 0) (forget-in-pollers (fd-cell-fd cell) known-to))
    (values (release-waiters chain :closed) generation)))

(defun forget-in-pollers (fd known-to)
  (declare (type (unsigned-byte 62) known-to))
  (dotimes (i max-pollers)
    (when (logbitp i known-to)
      (let ((poller (svref *pollers* i)))
        (when (poller-p poller)
          (using-poller (poller (eq poller (svref *pollers* i)))
            (%poller-forget (poller-epoll poller) fd)))))))

;;; FD has been closed, and its number may stand for another file already: nothing is undone.
(declaim (ftype (sfunction (fd-cell (unsigned-byte 29)) list) wake-late-waiters))
(defun wake-late-waiters (cell generation)
  "Return a list of the fibers that wait in CELL, which have the result :AGAIN and must be woken. The
descriptor is not being closed any more, unless by another than the one who made GENERATION begin."
  (let ((chain nil))
    (with-tiny-lock ((fd-cell-lock cell))
      (when (= generation (fd-cell-generation cell))
        (setf (fd-cell-closing cell) nil))
      (setf chain (take-waiters cell 3))
      nil)
    (release-waiters chain :again)))

;;;; a poller that is freed

;;; The next poller with this number has heard of nothing, and nobody serves this one.
(defun forget-poller-in-cells (index heir)
  "Let no cell refer to the poller number INDEX. HEIR, a function, returns a poller for the fiber at
the head of a chain that was served by it: one of another group, which had joined others."
  (declare (type (mod #.max-pollers) index))
  (flet ((forget (cell)
           (declare (fd-cell cell))
           (find-heir cell +input+ index heir)
           (find-heir cell +output+ index heir)
           (with-tiny-lock ((fd-cell-lock cell))
             (setf (fd-cell-known-to cell)
                   (logandc2 (fd-cell-known-to cell)
                             (truly-the (unsigned-byte 62) (ash 1 index))))
             nil)))
    (map-fd-cells #'forget)))

(defun first-in-poller (cell direction index)
  "The fiber that waits first for DIRECTION of CELL in poller number INDEX, or NIL."
  (declare (type (mod #.max-pollers) index))
  (if (= direction +input+)
      (and (= (fd-cell-input-poller cell) index) (fd-cell-input cell))
      (and (= (fd-cell-output-poller cell) index) (fd-cell-output cell))))

;;; A fiber that has left the chain may have ended, and belongs to no group any more.
(defun find-heir (cell direction index heir)
  (declare (function heir))
  (loop
    (let* ((first (first-in-poller cell direction index))
           (poller (and first (funcall heir first))))
      (when poller
        (rearm-elsewhere cell direction poller))
      (when (or poller (eq first (first-in-poller cell direction index)))
        (return)))))

(defun rearm-elsewhere (cell direction poller)
  (when (and poller
             (with-tiny-lock ((fd-cell-lock cell))
               (if (= direction +input+)
                   (setf (fd-cell-input-poller cell) (poller-index poller))
                   (setf (fd-cell-output-poller cell) (poller-index poller)))
               (wish-to-arm cell direction)))
    (arm-cell cell)))
