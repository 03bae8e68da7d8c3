;;;; descriptors that are registered once, and what is known of their readiness

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; A poller of the kind :PERSISTENT registers a file when a fiber waits for it the first time, edge
;;; triggered and for both directions, and hears of every change from then on. That poller is the
;;; *keeper* of the cell. An edge is reported whether somebody waits or not, and only once, so it
;;; must be kept: READINESS of the cell has the directions that the keeper has reported since a call
;;; would have waited, and, beside them, a count of the times that this was written.
;;;
;;;     a direction of READINESS        move                     by
;;;     not ready -> ready              NOTE-REPORT-OF-KEEPER    the carrier that serves the keeper
;;;     ready     -> not ready          NOTE-BLOCKED             who has tried, in vain
;;;     any       -> not ready          BEGIN-TO-KEEP            the fiber that makes a new keeper
;;;
;;; What is true when nobody is inside, if there is a keeper: unless a direction is ready in
;;; READINESS, the next change of the file for that direction is going to be reported by the keeper.
;;; So a fiber may wait for a direction that is not ready, without a system call. If it is ready, or
;;; was, the fiber asks the kernel first (STILL-READY-P): the file may be ready now, and nothing may
;;; change.
;;;
;;; That a call would have waited proves nothing about what came after it. So who tries reads
;;; READINESS before the call, and NOTE-BLOCKED does nothing if that has changed since.
;;;
;;; Only files whose edges are complete are kept: what makes a call possible that has failed with
;;; EAGAIN, or would have, is always reported. TCP, local stream sockets and pipes are so, as long
;;; as nothing urgent comes: with that a file may be ready, and the call fail. A socket for
;;; datagrams may be ready for output and refuse, since the receiver has no room; of terminals and
;;; other devices each has ways of its own. All these are armed for each wait, with the same poller.
;;;
;;; There is one keeper for both directions. It changes when a fiber of another poller waits, unless
;;; one waits for the other direction, which would not hear from the new keeper. If fibers that have
;;; migrated were woken by the carrier that they came from, two that talk to each other on two
;;; carriers would never meet on one: that takes three to five times as long.
;;;
;;; The kernel forgets a registration when the file is closed. If foreign code closes a descriptor
;;; the cell still has its keeper, and a fiber that waits for the next file of that number would
;;; never be woken. That the number is new is seen where a fiber accepts (NOTE-NEW-FILE), and where
;;; the file is found to be of another kind.

(declaim (inline readiness-with))
(defun readiness-with (readiness directions)
  "What is written instead of READINESS, with DIRECTIONS for those that are ready."
  (declare (word readiness) (type (mod 4) directions))
  (logior directions (logandc2 (logand (+ readiness 4) most-positive-word) 3)))

(defmacro update-readiness ((old cell) directions)
  "Let DIRECTIONS be those that are ready in CELL, and no others; OLD is bound to those before."
  (with-unique-names (word)
    `(loop
       (let* ((,word (fd-cell-readiness ,cell))
              (,old (logand ,word 3)))
         (declare (ignorable ,old))
         (when (= ,word (cas (fd-cell-readiness ,cell) ,word (readiness-with ,word ,directions)))
           (return))))))

(declaim (inline note-blocked))
(defun note-blocked (cell seen direction)
  "A call would have waited for DIRECTION of CELL, before which READINESS was SEEN."
  (declare (word seen) (type (mod 3) direction))
  (when (logtest direction seen)
    (cas (fd-cell-readiness cell) seen
         (readiness-with seen (logandc2 (logand seen 3) direction)))))

(defmacro proving-blocked ((cell direction) call)
  "The value of CALL, which is minus an errno if it fails, with NOTE-BLOCKED if it would have
waited."
  (with-unique-names (seen result)
    `(let* ((,seen (fd-cell-readiness ,cell))
            (,result ,call))
       (declare (type (signed-byte 64) ,result))
       (when (= ,result (- sb-unix:ewouldblock)) (note-blocked ,cell ,seen ,direction))
       ,result)))

;;; That the kernel cannot say is no proof.
(defun still-ready-p (cell direction)
  "Is CELL, whose keeper has reported DIRECTION, ready for it now?"
  (declare (fd-cell cell) (type (mod 3) direction))
  (let ((seen (fd-cell-readiness cell)))
    (cond ((/= 0 (%poll-now (fd-cell-fd cell) direction)))
          (t (note-blocked cell seen direction)
             nil))))

(defun forget-keeper (cell)
  "The file of CELL is found to be another than the one that was registered."
  (without-interrupts
    (with-tiny-lock ((fd-cell-lock cell))
      (setf (fd-cell-keeper cell) nil))))

;;;; keepers; for the holder of the lock

(declaim (inline keepable-p))
(defun keepable-p (cell)
  (and (not (fd-cell-closing cell))
       (member (fd-cell-kind cell) '(:stream :pipe))))

(defun begin-to-keep (cell index)
  "Let the poller number INDEX keep CELL; the caller has it armed there. That tells what is ready."
  (declare (fd-cell cell))
  (setf (fd-cell-keeper cell) index
        (fd-cell-arming cell) (logior +keeper+ (fd-cell-arming cell)))
  (update-readiness (old cell) 0))

(defun note-report-of-keeper (cell directions)
  "The keeper of CELL has reported DIRECTIONS. Return false if it is the keeper no more."
  (declare (fd-cell cell) (type (mod 8) directions))
  (cond ((logtest directions +urgent+)
         (setf (fd-cell-keeper cell) nil
               (fd-cell-kind cell) :messages)
         nil)
        (t
         (update-readiness (old cell) (logior directions old))
         t)))

(defun change-keeper (cell old new)
  "Let the poller number NEW keep CELL instead of number OLD."
  (declare (fd-cell cell))
  (setf (fd-cell-leaving cell) (logior (fd-cell-leaving cell) (poller-bit old)))
  (begin-to-keep cell new))

(declaim (ftype (sfunction (fd-cell poller) (values (mod #.max-pollers) boolean)) choose-keeper))
(defun choose-keeper (cell poller)
  "Return the number of the poller that is to serve fibers which wait for CELL, the first of them
in POLLER, of the kind :PERSISTENT; and true if it need not be armed for that."
  (let ((index (poller-index poller))
        (keeper (fd-cell-keeper cell)))
    (cond ((null keeper)
           (when (keepable-p cell) (begin-to-keep cell index))
           (values index nil))
          ((= keeper index)
           (values index t))
          ((/= 0 (wanted-directions cell keeper))
           (values keeper t))
          (t
           (change-keeper cell keeper index)
           (values index nil)))))
