;;;; all orders in which a few actors can take their steps

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

;;; An actor is a function that calls PERFORM for each access to what it shares with other
;;; actors. The explorer lets all run up to their first access; then, again and again,
;;; it picks one that may take its step, and lets it run up to the next one. Once all have ended,
;;; or none can go on, it makes the same history anew and picks differently, the last choice
;;; first, until there is nothing left to pick. (Actors are fibers of one carrier, which
;;; hand over to each other fifty times faster than threads do.)
;;;
;;; Two steps commute if they belong to different actors, and are at different places or
;;; both read. Of orders that differ by exchanging neighbours that commute only one is tried.
;;; This is done by sleep sets (Godefroid, Partial-Order Methods, 1996): what was picked
;;; before at a choice need not be picked after it, until a step that it does not commute with.
;;;
;;; A step that commutes with all that others ever do is no point at which another actor need
;;; be picked. Such are those at places that one actor uses, or that nobody writes, or that are used
;;; under a lock, always the same (Flanagan and Qadeer, Transactions for Software Model Checking,
;;; 2003). They are found out: a place is taken for one until it is used otherwise; then it is
;;; contended, and the exploration starts again.
;;;
;;; Where there are too many orders, one can have those with few switches from an actor that
;;; could go on: most bugs need one or two (Musuvathi and Qadeer, PLDI 2007).
;;;
;;; With store buffers, a plain write goes into a queue of its actor, from where it gets
;;; to memory by a step of its own; the actor reads it already, the others do not. An access
;;; that locks waits until the queue is empty. That is all that an x86-64 does to the
;;; order of accesses (Sewell et al., x86-TSO, 2010).

(defstruct (access (:constructor make-access (kind object slot function ready)))
  (kind nil :type (member :read :write :locked))
  object
  slot
  (function nil :type function)
  ;; NIL, or a function that looks at the place of the access and says whether the access can be
  ;; taken
  (ready nil :type (or null function)))

(defstruct (actor (:constructor make-actor (name function exploration)))
  (name nil :type string)
  (function nil :type function)
  exploration
  (fiber nil)
  ;; What it does next; NIL when it has ended
  (access nil :type (or null access))
  ;; Writes that have not reached the memory, the oldest first, as lists of an access and a value
  (buffer '() :type list)
  ;; True while it waits for what need not come
  (idle nil :type boolean)
  ;; True if it is to unwind: nobody wants to know how this run ends
  (abandoned nil :type (member nil t :unwinding)))

(defstruct (exploration (:constructor make-exploration (history store-buffers switches limit)))
  (history nil :type function)
  (store-buffers nil :type boolean)
  ;; The most switches from an actor that could go on; NIL for as many as there can be
  (switches nil :type (or null integer))
  (limit nil :type integer)
  (fiber nil)
  (actors '() :type list)
  ;; From the beginning of a run to its end, or as far as is known
  (choices (make-array 100 :adjustable t :fill-pointer 0))
  (trace '() :type list)
  ;; Kinds of places at which order matters, as conses of an object's type and a slot
  (contended (make-hash-table :test 'equal) :type hash-table)
  ;; True if one has been added: orders may have been left out
  (incomplete nil :type boolean)
  ;; What is known about the places used in this run: a USE for each slot, by objects
  (uses (make-hash-table :test 'eq) :type hash-table)
  (failure nil :type (or null string))
  ;; Orders that were run to their end, and all that were begun
  (runs 0 :type integer)
  (attempts 0 :type integer))

;;; A choice is among moves. A move is a cons of an actor's number and :STEP, or :FLUSH for the
;;; oldest write in its buffer.
(defstruct (choice (:constructor make-choice (moves picked asleep)))
  moves
  picked
  (done '())
  ;; Moves that would lead to orders that have been tried
  asleep)

;;;; contended places

(defstruct (use (:constructor make-use (actor locks)))
  ;; T if there are several
  actor
  (written nil :type boolean)
  ;; Those that were held at all times
  (locks '() :type list))

(defvar *locks* '()
  "What the actor holds, objects.")

(defun note-use (exploration actor kind object slot)
  "Return true if it is not known any more that order does not matter here."
  (let* ((slots (gethash object (exploration-uses exploration)))
         (use (cdr (assoc slot slots))))
    (unless use
      (setf use (make-use actor *locks*)
            (gethash object (exploration-uses exploration)) (acons slot use slots)))
    (unless (eq (use-actor use) actor) (setf (use-actor use) t))
    (unless (eq kind :read) (setf (use-written use) t))
    (setf (use-locks use) (intersection (use-locks use) *locks*))
    (and (eq (use-actor use) t) (use-written use) (null (use-locks use)))))

(defun contended-p (exploration actor kind object slot &optional ready)
  (let ((key (cons (type-of object) slot))
        (contended (exploration-contended exploration)))
    (or (gethash key contended)
        (when (or ready (note-use exploration actor kind object slot))
          (setf (exploration-incomplete exploration) t
                (gethash key contended) t))
        ;; It is a barrier too.
        (and (eq kind :locked) (exploration-store-buffers exploration)))))

;;;; the actor's side

(defvar *actor*)

(defun hand-over (to)
  "Let the fiber TO run until it hands over to this one."
  (fiber-unpark to)
  (fiber-park))

(defun perform (kind object slot function &optional ready)
  "Call FUNCTION, and return its value, when the explorer comes to it, or at once if that makes no
difference to others. It does everything that the actor
does to SLOT of OBJECT in one step."
  (let* ((actor *actor*)
         (exploration (actor-exploration actor)))
    (cond ((actor-abandoned actor))
          ((contended-p exploration actor kind object slot ready)
           (setf (actor-access actor) (make-access kind object slot function ready))
           (hand-over (exploration-fiber exploration))
           (when (actor-abandoned actor)
             (setf (actor-abandoned actor) :unwinding)
             (throw 'abandoned nil)))
          (t (push (list (actor-name actor) kind slot t) (exploration-trace exploration))))
    (funcall function)))

(defun perform-when-needed (kind object slot function ready)
  "As PERFORM, but it is no failure if READY is never true."
  (setf (actor-idle *actor*) t)
  (multiple-value-prog1 (perform kind object slot function ready)
    (setf (actor-idle *actor*) nil)))

(defun perform-write (object slot value writer)
  "Write VALUE to SLOT of OBJECT by calling WRITER, which takes both."
  (flet ((write-it () (funcall writer value object)))
    (let* ((actor *actor*)
           (exploration (actor-exploration actor)))
      (if (and (exploration-store-buffers exploration)
               (not (actor-abandoned actor))
               (contended-p exploration actor :write object slot))
          (setf (actor-buffer actor)
                (append (actor-buffer actor)
                        (list (list (make-access :write object slot #'write-it nil) value))))
          (perform :write object slot #'write-it)))
    value))

(defun same-place-p (access object slot)
  (and (eq (access-object access) object) (eql (access-slot access) slot)))

(defun perform-read (object slot reader)
  (perform :read object slot
           (lambda ()
             (let ((written (find-if (lambda (entry) (same-place-p (first entry) object slot))
                                     (actor-buffer *actor*) :from-end t)))
               (if written
                   (second written)
                   (funcall reader object))))))

(defun perform-fence ()
  (when (exploration-store-buffers (actor-exploration *actor*))
    (perform :locked *actor* 'fence (constantly nil))))

(defun fail-history (control &rest arguments)
  "What the calling actor has seen must never happen."
  (let ((exploration (actor-exploration *actor*)))
    (unless (or (actor-abandoned *actor*) (exploration-failure exploration))
      (setf (exploration-failure exploration) (apply #'format nil control arguments)))))

(defun run-actor (actor)
  (let ((*actor* actor))
    (catch 'abandoned
      (handler-case (funcall (actor-function actor))
        (error (condition) (fail-history "~A" condition))))
    (setf (actor-access actor) nil)
    (fiber-unpark (exploration-fiber (actor-exploration actor)))))

(defun start-actor (actor group)
  (setf (actor-fiber actor)
        (submit-fiber group (make-fiber (lambda () (run-actor actor)))))
  (fiber-park))

(defun abandon-actor (actor)
  (when (actor-access actor)
    (setf (actor-abandoned actor) t)
    (hand-over (actor-fiber actor))))

;;;; moves

(defun move-actor (exploration move)
  (nth (car move) (exploration-actors exploration)))

(defun move-access (exploration move)
  (let ((actor (move-actor exploration move)))
    (if (eq (cdr move) :step)
        (actor-access actor)
        (first (first (actor-buffer actor))))))

(defun access-possible-p (actor)
  (let ((access (actor-access actor)))
    (and access
         (or (not (eq (access-kind access) :locked)) (null (actor-buffer actor)))
         (or (null (access-ready access)) (funcall (access-ready access))))))

(defun possible-moves (exploration)
  (loop for actor in (exploration-actors exploration)
        for i from 0
        when (access-possible-p actor) collect (cons i :step)
        when (actor-buffer actor) collect (cons i :flush)))

(defun commute-p (exploration move other)
  (or (= (car move) (car other))        ; a step and a flush
      (let ((a (move-access exploration move))
            (b (move-access exploration other)))
        (or (not (same-place-p a (access-object b) (access-slot b)))
            (and (eq (access-kind a) :read) (eq (access-kind b) :read))))))

(defun make-move (exploration move)
  (let ((actor (move-actor exploration move))
        (access (move-access exploration move)))
    (push (list (actor-name actor) (access-kind access) (access-slot access)
                (eq (cdr move) :step))
          (exploration-trace exploration))
    (if (eq (cdr move) :step)
        (hand-over (actor-fiber actor))
        (funcall (access-function (first (pop (actor-buffer actor))))))))

;;;; the explorer's side

(defun begin-run (exploration)
  "Make the history, let all actors run to their first steps, and return the function that
checks the end."
  (multiple-value-bind (functions check) (funcall (exploration-history exploration))
    (setf (exploration-trace exploration) '()
          (exploration-uses exploration) (make-hash-table :test 'eq)
          (exploration-actors exploration)
          (loop for (name . function) in functions
                collect (make-actor name function exploration)))
    (dolist (actor (exploration-actors exploration))
      (start-actor actor (sb-fiber::fiber-group (current-fiber))))
    check))

(defun choose (exploration depth moves asleep)
  "The choice number DEPTH of this run, or NIL if all that could be picked has been tried."
  (let ((choices (exploration-choices exploration)))
    (if (< depth (fill-pointer choices))
        (aref choices depth)
        (let ((fresh (set-difference moves asleep :test #'equal)))
          (when fresh
            (let ((choice (make-choice moves (car (last fresh)) asleep)))
              (vector-push-extend choice choices)
              choice))))))

(defun check-end (exploration check)
  (unless (exploration-failure exploration)
    (let ((waiting (remove-if (lambda (actor) (or (null (actor-access actor)) (actor-idle actor)))
                              (exploration-actors exploration))))
      (setf (exploration-failure exploration)
            (if waiting
                (format nil "~{~A~^, ~} will wait for ever."
                        (loop for actor in waiting
                              collect (format nil "~A for ~A" (actor-name actor)
                                              (access-slot (actor-access actor)))))
                (funcall check))))))

(defun sleeping-after (exploration choice)
  "The moves that are asleep after the picked one of CHOICE."
  (unless (exploration-switches exploration)
    (remove-if-not (lambda (other) (commute-p exploration (choice-picked choice) other))
                   (append (choice-asleep choice) (choice-done choice)))))

(defun moves-without-switch (moves last)
  "Those of MOVES which the actor makes that made the move LAST, or all if it cannot."
  (if (and last (member (cons (car last) :step) moves :test #'equal))
      (remove (car last) moves :key #'car :test #'/=)
      moves))

(defun run-history (exploration)
  "Run the history once. Return false if its order turned out to be an old one."
  (let ((check (begin-run exploration))
        (switches (exploration-switches exploration))
        (last nil)
        (asleep '()))
    (loop for depth from 0
          for moves = (possible-moves exploration)
          while (and moves (not (exploration-failure exploration)))
          do (let* ((free (moves-without-switch moves last))
                    (choice (choose exploration depth (if (eql switches 0) free moves) asleep)))
               (unless choice (return-from run-history nil))
               (setf last (choice-picked choice)
                     asleep (sleeping-after exploration choice))
               (when (and switches (not (member last free :test #'equal)))
                 (decf switches))
               (make-move exploration last)))
    (check-end exploration check)
    t))

(defun next-order (exploration)
  "Change the last choice that can be changed. Return false if there is none."
  (let ((choices (exploration-choices exploration)))
    (loop until (zerop (fill-pointer choices))
          do (let ((choice (vector-pop choices)))
               (push (choice-picked choice) (choice-done choice))
               (let ((fresh (set-difference (choice-moves choice)
                                            (append (choice-done choice) (choice-asleep choice))
                                            :test #'equal)))
                 (when fresh
                   (setf (choice-picked choice) (car (last fresh)))
                   (vector-push-extend choice choices)
                   (return t)))))))

(defun explore-in-fiber (exploration)
  (setf (exploration-fiber exploration) (current-fiber))
  (let ((limit (exploration-limit exploration)))
    (loop
      (when (run-history exploration)
        (incf (exploration-runs exploration)))
      (mapc #'abandon-actor (exploration-actors exploration))
      (when (> (incf (exploration-attempts exploration)) limit)
        (error "The history has more than ~D orders." limit))
      (cond ((exploration-failure exploration) (return exploration))
            ((exploration-incomplete exploration) (start-again exploration))
            ((not (next-order exploration)) (return exploration))))))

(defun start-again (exploration)
  (setf (exploration-incomplete exploration) nil
        (exploration-runs exploration) 0
        (exploration-attempts exploration) 0
        (fill-pointer (exploration-choices exploration)) 0))

(defun explanation (exploration)
  (format nil "~A~%After:~%~:{~&  ~A: ~(~A ~A~)~:[, which reaches memory~;~]~}"
          (exploration-failure exploration)
          (reverse (exploration-trace exploration))))

(defun explore (history &key store-buffers switches (limit 200000))
  "Run HISTORY in all orders, or until one fails; if SWITCHES is a number, in all orders that have
at most so many. HISTORY is a function that returns an alist of names and functions, the actors, and
a function that returns a string if something is wrong when all have ended. Return the number of
orders, and, if one failed, a string that says what it was."
  (let* ((exploration (make-exploration history store-buffers switches limit))
         (fiber (make-fiber (lambda () (explore-in-fiber exploration))))
         (group (start-fibers fiber :carrier-count 1)))
    ;; After an error there may be actors that wait.
    (unwind-protect (fiber-join fiber)
      (finish-fibers group :abort t))
    (values (exploration-runs exploration)
            (and (exploration-failure exploration) (explanation exploration)))))
