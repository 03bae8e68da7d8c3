;;;; the waiter map: which fibers wait for which descriptor

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; One cell for each descriptor of the process, in a table whose blocks do not move.
;;; It is one for all pollers, not one for each, since CLOSE must find the waiters wherever they
;;; are, and since two carriers must not both believe that they own a descriptor.
;;;
;;; What is true when nobody is inside:
;;;  - INPUT and OUTPUT are chains of fibers through WAIT-NEXT, the longest waiting first, each
;;;    with WAIT-RESULT NIL; a fiber that was taken out has a result: :READY, :CLOSED, :AGAIN or
;;;    the errno with which the kernel refused to arm;
;;;  - if a chain is not empty, the descriptor is armed for that direction in the poller whose
;;;    number is INPUT-POLLER or OUTPUT-POLLER, or its report is being handled; or that poller is
;;;    the KEEPER, which will report the next change, see fiber/readiness.lisp;
;;;  - KNOWN-TO has the bits of the pollers that have heard of the descriptor in its present
;;;    GENERATION (a poller may hear of it late, from a thread that arms while it is being closed:
;;;    the reports of that one are dropped). One bit stands for several pollers; so it may be set
;;;    for others that have not heard of it, as for those that have forgotten it or are no more;
;;;  - ARMING is 0, and so is LEAVING.
;;;
;;;     state of a waiter          move                     by
;;;     in no chain -> in chain    ADD-WAITER, then arm     the fiber
;;;     in chain    -> :READY      report                   the carrier that serves the poller
;;;     in chain    -> :CLOSING    FORGET-FILE              the thread that is about to close
;;;                                WAKE-LATE-WAITERS        the thread that has closed
;;;                                REFUSE-WAITERS           the thread that arms, in vain
;;;     :CLOSING    -> :CLOSED     FORGET-FILE, no longer   the same
;;;                                in need of its WAIT-NEXT
;;;     :CLOSING    -> :AGAIN,     the others, likewise     the same
;;;                    errno
;;;     in chain    -> in none     REMOVE-WAITER            the fiber: time-out, unwinding
;;;
;;; All moves are made under the tiny lock. The system call that arms is not, since it may have to
;;; wait in the kernel for other threads that use the poller. So that an older wish does not replace
;;; a younger one there, one thread at a time arms a descriptor: ARMING has the directions for which
;;; that is wished, and +ARMING-NOW+ while a thread is at it. That thread takes a direction out
;;; under the lock, and the other as well if the same poller serves it; it arms there for all that
;;; is wanted then, and ends when ARMING has no direction any more. A direction is entered in ARMING
;;; under the lock, after its waiter, and is taken out under the same lock as the chains are read
;;; for the system call that serves it; so each waiter is seen by one such call.
;;;
;;;     ARMING                          move                  by
;;;     0             -> now, wishes    WISH-TO-ARM           the thread that will arm
;;;     now, wishes   -> now, more      WISH-TO-ARM           any other
;;;     now, wishes   -> now, fewer     NEXT-ARMING           the thread that arms
;;;     now           -> 0              NEXT-ARMING           the same
;;;
;;; A wish for a direction is one for the poller that serves it by then. That the keeper is armed is
;;; a wish of its own, +KEEPER+: the next fibers will rely on it, even if all that waited are gone.
(defstruct (fd-cell (:constructor make-fd-cell (fd))
                    (:copier nil))
  (lock 0 :type word)
  (fd 0 :type descriptor :read-only t)
  (generation 0 :type (unsigned-byte 29))
  ;; True from FORGET-FILE until the thread that called it last has closed the descriptor.
  (closing nil :type boolean)
  ;; How many reads that find nothing are to wait at once, and how many were to when that was
  ;; noted last: see fiber/retry.lisp. A count that is lost between two threads does no harm.
  (haste 0 :type (unsigned-byte 6))
  (last-haste 0 :type (unsigned-byte 6))
  ;; How to read and write without waiting, see fiber/io.lisp. NIL: not found out yet.
  (kind nil :type symbol)
  ;; True if O_NONBLOCK was set by PREPARE-TO-ACCEPT and not by the user.
  (nonblocking-by-us nil :type boolean)
  (input nil)
  (output nil)
  (input-poller 0 :type (mod #.max-pollers))
  (output-poller 0 :type (mod #.max-pollers))
  (arming 0 :type (unsigned-byte 4))
  ;; The number of the poller that has the file registered for good, or NIL, and what it has
  ;; reported, see fiber/readiness.lisp.
  (keeper nil :type (or null (mod #.max-pollers)))
  (readiness 0 :type word)
  ;; The bits of pollers that are to forget the descriptor, of the thread that arms.
  (leaving 0 :type (unsigned-byte 62))
  ;; What the fibers in INPUT and in OUTPUT show as what they wait for.
  (reading (list :read fd) :type list :read-only t)
  (writing (list :write fd) :type list :read-only t)
  (known-to 0 :type (unsigned-byte 62)))
(declaim (freeze-type fd-cell))

;;; Blocks of 256 cells, of which there are 4096 in each of 2048 parts. A thread may use an arena,
;;; which will be used for other things.
(define-load-time-global *fd-table* (make-array 2048 :initial-element 0))
(declaim (type simple-vector *fd-table*))

(declaim (inline subtable))
(defun subtable (table index length createp)
  "The vector of LENGTH at INDEX of TABLE, or NIL if there is none and CREATEP is false."
  (declare (simple-vector table) (index index))
  (let ((entry (svref table index)))
    (cond ((simple-vector-p entry) entry)
          (createp
           (sb-vm:without-arena
             (cas (svref table index) 0 (make-array length :initial-element 0)))
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
               (sb-vm:without-arena (cas (svref block i) 0 (make-fd-cell fd)))
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
(defconstant +keeper+ 8)

;;; What to arm in poller number INDEX: a one-shot registration replaces the one before, so it must
;;; name all directions for which fibers wait there.
(declaim (inline wanted-directions))
(defun wanted-directions (cell index)
  (logior (if (and (fd-cell-input cell) (= (fd-cell-input-poller cell) index)) +input+ 0)
          (if (and (fd-cell-output cell) (= (fd-cell-output-poller cell) index)) +output+ 0)))

(declaim (inline wish-to-arm))
(defun wish-to-arm (cell directions)
  "Let CELL be armed for DIRECTIONS. Return true if the caller, which holds the lock of CELL, has to
call ARM-CELL when it has released that."
  (let ((old (fd-cell-arming cell)))
    (setf (fd-cell-arming cell) (logior old directions +arming-now+))
    (not (logtest old +arming-now+))))

(declaim (inline poller-bit directions-of-poller next-arming))
(defun poller-bit (index)
  (declare (type (mod #.max-pollers) index))
  (truly-the (unsigned-byte 62) (ash 1 (rem index max-group-pollers))))

(defun directions-of-poller (cell index)
  (logior (if (= (fd-cell-input-poller cell) index) +input+ 0)
          (if (= (fd-cell-output-poller cell) index) +output+ 0)))

;;; All the wishes that one system call fulfils are taken out, and no other: a wish for a direction
;;; whose waiters are in another poller by now is one for that.
(declaim (inline wishes-for-poller))
(defun wishes-for-poller (cell index)
  (logior (directions-of-poller cell index)
          (if (eql index (fd-cell-keeper cell)) +keeper+ 0)))

(defun next-arming (cell)
  "Take wishes out of ARMING of CELL, and return the number of the poller in which to arm, and
whether that most likely does not know the descriptor; or else NIL and be done. For the thread that
arms, which holds the lock of CELL."
  (let ((wishes (logandc2 (fd-cell-arming cell)
                          (if (fd-cell-keeper cell)
                              +arming-now+
                              (logior +arming-now+ +keeper+)))))
    (cond ((= wishes 0)
           (setf (fd-cell-arming cell) 0)
           nil)
          (t
           (let ((index (cond ((logtest wishes +keeper+) (fd-cell-keeper cell))
                              ((logtest wishes +input+) (fd-cell-input-poller cell))
                              (t (fd-cell-output-poller cell))))
                 (known-to (fd-cell-known-to cell)))
             (setf (fd-cell-arming cell)
                   (logior +arming-now+ (logandc2 wishes (wishes-for-poller cell index)))
                   (fd-cell-known-to cell) (logior known-to (poller-bit index)))
             (values index
                     (or (logtest wishes +keeper+) ; the one before has been told to forget it
                         (not (logtest (poller-bit index) known-to)))))))))

(declaim (inline how-to-arm))
(defun how-to-arm (cell index)
  "What %POLLER-ARM is to be told for CELL in poller number INDEX, or 0."
  (if (eql (fd-cell-keeper cell) index)
      (logior +keep+ +input+ +output+)
      (wanted-directions cell index)))

;;; FORGET-POLLER-IN-CELLS deals with the fibers that wait in a poller that is being freed.
(declaim (ftype (sfunction ((mod #.max-pollers) descriptor (mod 16) word) (signed-byte 32))
                arm-in-poller))
(defun arm-in-poller (index fd directions data)
  "Arm FD in poller number INDEX for DIRECTIONS, as %POLLER-ARM takes them. Return 0 or an errno."
  (let ((poller (svref *pollers* index)))
    (or (and (poller-p poller)
             (using-poller (poller (eq poller (svref *pollers* index)))
               (%poller-arm (poller-epoll poller) fd directions data)))
        0)))

(defun arm-cell (cell)
  "Arm CELL for all that is wanted, until nothing new is. For the thread to which WISH-TO-ARM has
returned true."
  (loop
    (let ((index nil) (freshp nil) (directions 0) (data 0)
          (leaving 0) (keeper nil) (reader nil) (writer nil))
      (declare (type (or null (mod #.max-pollers)) index) (type (mod 16) directions) (word data)
               (type (unsigned-byte 62) leaving))
      (with-tiny-lock ((fd-cell-lock cell))
        (setf (values index freshp) (next-arming cell))
        (when index
          (setf directions (how-to-arm cell index)
                data (fd-cell-data cell)
                leaving (shiftf (fd-cell-leaving cell) 0)
                keeper (fd-cell-keeper cell)
                reader (and (fd-cell-input cell) (fd-cell-input-poller cell))
                writer (and (fd-cell-output cell) (fd-cell-output-poller cell))))
        nil)
      (unless index (return))
      (unless (= leaving 0)
        (let ((spared (list index keeper reader writer)))
          (declare (dynamic-extent spared))
          (forget-in-pollers (fd-cell-fd cell) leaving spared)))
      (unless (= directions 0)          ; it may have been woken meanwhile
        (arm-for-all cell index (if freshp (logior directions +fresh+) directions) data)))))

;;; What is kept in vain would report for ever. No other thread arms the next file of this number
;;; meanwhile, so only what was armed here is forgotten.
(defun arm-for-all (cell index directions data)
  "Arm CELL, with DATA, in poller number INDEX, and tell its waiters if that is refused."
  (declare (type (mod 16) directions) (word data))
  (let ((errno (arm-in-poller index (fd-cell-fd cell) directions data)))
    (unless (= errno 0) (refuse-waiters cell index data errno))
    (when (logtest directions +keep+)
      (unless (and (= data (fd-cell-data cell)) (eql index (fd-cell-keeper cell)))
        (forget-in-poller index (fd-cell-fd cell))))))

(declaim (inline end-keeping))
(defun end-keeping (cell index)
  "Do not rely on poller number INDEX any more. For the holder of the lock."
  (when (eql (fd-cell-keeper cell) index) (setf (fd-cell-keeper cell) nil)))

;;; No report would come for these fibers.
(declaim (ftype (sfunction (fd-cell (mod #.max-pollers) word (signed-byte 32)) t) refuse-waiters))
(defun refuse-waiters (cell index data errno)
  "Wake the fibers that wait for CELL in poller number INDEX, and tell them ERRNO, if DATA is still
that of CELL."
  (let ((chain nil))
    (with-tiny-lock ((fd-cell-lock cell))
      (when (= data (fd-cell-data cell))
        (end-keeping cell index)
        (setf chain (take-waiters cell (wanted-directions cell index))))
      nil)
    (mapc #'unpark (release-waiters chain errno))))

;;;; waiting

;;; A fiber that finds others waiting joins them in the poller that serves them; one that comes
;;; first must not rely on a keeper that has reported since a call would have waited.
(defmacro chain-waiter (place poller-place direction fiber poller)
  "Let FIBER wait. Return :ARM if the caller is to call ARM-CELL, :UNPROVEN if FIBER does not wait,
or else :WAITS."
  `(cond (,place
          (append-waiter ,place ,fiber)
          :waits)
         (t
          (multiple-value-bind (index keptp)
              (if (poller-keeps-p ,poller)
                  (choose-keeper cell ,poller)
                  (values (poller-index ,poller) nil))
            (cond ((and keptp (logtest ,direction (fd-cell-readiness cell)))
                   :unproven)
                  (t
                   (setf ,place ,fiber
                         ,poller-place index)
                   (cond (keptp :waits)
                         ((wish-to-arm cell ,direction) :arm)
                         (t :waits))))))))

(declaim (ftype (sfunction (fd-cell fiber (mod 3) poller fixnum)
                           (member :waits :arm :unproven :closed))
                add-waiter))
(defun add-waiter (cell fiber direction poller file)
  "Let FIBER wait in POLLER until CELL is ready for DIRECTION. Return :CLOSED if CELL does not stand
for FILE any more, see NOTE-FILE, and :UNPROVEN if it may be ready now, and no report would come:
then FIBER does not wait."
  (setf (fiber-wait-next fiber) nil
        (fiber-wait-result fiber) nil)
  (let ((outcome (with-tiny-lock ((fd-cell-lock cell))
                   (cond ((and (>= file 0) (/= file (fd-cell-generation cell)))
                          :closed)
                         ((= direction +input+)
                          (chain-waiter (fd-cell-input cell) (fd-cell-input-poller cell) +input+
                                        fiber poller))
                         (t
                          (chain-waiter (fd-cell-output cell) (fd-cell-output-poller cell) +output+
                                        fiber poller))))))
    (when (eq outcome :arm) (arm-cell cell))
    outcome))

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
  "Let FIBER no longer wait. Return false if it has been taken out already, and has a result."
  (with-tiny-lock ((fd-cell-lock cell))
    (if (= direction +input+)
        (unchain-waiter (fd-cell-input cell) fiber)
        (unchain-waiter (fd-cell-output cell) fiber))))

;;;; reports

;;; One report wakes the first waiter only; if there are more, arming again tells whether the
;;; descriptor is still ready for the next. Otherwise all of many fibers that accept would wake for
;;; each connection.
(defmacro take-waiter (place)
  `(let ((fiber ,place))
     (when fiber
       (let ((fiber (truly-the fiber fiber)))
         (setf ,place (fiber-wait-next fiber)
               (fiber-wait-next fiber) nil
               (fiber-wait-result fiber) :ready))
       fiber)))

(declaim (ftype (sfunction (poller word (mod 8)) (values t t)) handle-report))
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
                     ;; The keeper goes on to report the other direction.
                     (when (and (eql (fd-cell-keeper cell) index)
                                (note-report-of-keeper cell directions))
                       (setf wanted (logand wanted directions)))
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
            (fd-cell-keeper cell) nil
            (fd-cell-haste cell) 0
            (fd-cell-last-haste cell) 0
            (fd-cell-leaving cell) 0
            (fd-cell-kind cell) nil
            (fd-cell-nonblocking-by-us cell) nil
            (fd-cell-closing cell) t
            (fd-cell-generation cell) generation
            chain (take-waiters cell 3))
      nil)
    (unless (= known-to 0) (forget-in-pollers (fd-cell-fd cell) known-to))
    (values (release-waiters chain :closed) generation)))

(defun forget-in-pollers (fd bits &optional spared)
  "Let the pollers whose bits are in BITS forget FD, but for those whose numbers are in SPARED."
  (declare (type (unsigned-byte 62) bits) (list spared))
  (dotimes (bit max-group-pollers)
    (when (logbitp bit bits)
      (loop for index of-type index from bit below max-pollers by max-group-pollers
            do (unless (member index spared)
                 (forget-in-poller index fd))))))

(defun forget-in-poller (index fd)
  (declare (type (mod #.max-pollers) index))
  (let ((poller (svref *pollers* index)))
    (when (poller-p poller)
      (using-poller (poller (eq poller (svref *pollers* index)))
        (%poller-forget (poller-epoll poller) fd)))))

;;; FD has been closed, and its number may stand for another file already: nothing is undone.
(declaim (ftype (sfunction (fd-cell (unsigned-byte 29)) list) wake-late-waiters))
(defun wake-late-waiters (cell generation)
  "Return a list of the fibers that wait in CELL, which have the result :AGAIN and must be woken.
The descriptor is not being closed any more, unless by a thread that has begun another generation
than GENERATION."
  (let ((chain nil))
    (with-tiny-lock ((fd-cell-lock cell))
      (when (= generation (fd-cell-generation cell))
        (setf (fd-cell-closing cell) nil))
      (setf chain (take-waiters cell 3))
      nil)
    (release-waiters chain :again)))

;;;; a poller that is freed

;;; No carrier serves it any more.
(defun forget-poller-in-cells (index heir)
  "Let no cell refer to the poller number INDEX. HEIR, a function, returns a poller for a fiber at
the head of a chain that was served by it: for a fiber of another group, which had joined others."
  (declare (type (mod #.max-pollers) index))
  (flet ((forget (cell)
           (declare (fd-cell cell))
           (drop-keeper cell index)     ; first: nobody begins to wait for its reports then
           (find-heir cell +input+ index heir)
           (find-heir cell +output+ index heir)))
    (map-fd-cells #'forget)))

(defun drop-keeper (cell index)
  (with-tiny-lock ((fd-cell-lock cell))
    (end-keeping cell index)
    nil))

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
      (when (if poller
                (rearm-elsewhere cell direction first index poller)
                (eq first (first-in-poller cell direction index)))
        (return)))))

;;; Once FIRST has left, POLLER may have been freed as well, and the fibers that wait now have
;;; another one.
(defun rearm-elsewhere (cell direction first index poller)
  "Let POLLER serve the fibers that wait for DIRECTION of CELL in poller number INDEX. Return false
if FIRST is not the first of them any more."
  (let ((arm nil))
    (when (with-tiny-lock ((fd-cell-lock cell))
            (when (eq first (first-in-poller cell direction index))
              (if (= direction +input+)
                  (setf (fd-cell-input-poller cell) (poller-index poller))
                  (setf (fd-cell-output-poller cell) (poller-index poller)))
              (setf arm (wish-to-arm cell direction))
              t))
      (when arm (arm-cell cell))
      t)))
