;;;; What a fiber must find again after it was parked: bindings, catch tags, cleanups, floating point
;;;; modes, data on its stacks, signal contexts

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* switch)

(defvar *variable* :global)
(defvar *other* :other-global)
(defvar *unbound*)
(defvar *always* :always-global)
(declaim (sb-ext:always-bound *always*))

;;; Something that the compiler cannot see through.
(declaim (notinline opaque))
(defun opaque (x) x)

(defun pause ()
  "Let others run; sometimes by sleeping, so that it is a timer that ends the parking."
  (if (= (random 20) 0)
      (sleep (opaque 1/10000))
      (fiber-yield)))

;;;; The variables themselves

(test current-thread-is-the-fiber
  (on-carriers (n)
    (is (all-true-p
         (in-fibers n 50 (lambda (i)
                           (declare (ignore i))
                           (let ((me (current-fiber)))
                             (loop repeat 50
                                   always (and (eq me sb-thread:*current-thread*)
                                               (eq me (current-fiber))
                                               (typep me 'fiber)
                                               (typep me 'sb-thread:thread)
                                               (progn (pause) t))))))))))

(defun bind-deeply (depth)
  "Bind the same symbol DEPTH times, parking on the way in and out. T if all values were found again."
  (or (= depth 0)
      (let ((*variable* depth))
        (pause)
        (and (eql *variable* depth)
             (progn (incf *variable* 1000)
                    (bind-deeply (1- depth)))
             (progn (pause)
                    (eql *variable* (+ depth 1000)))))))

;;; Prevents: entries for one symbol exchanged in the wrong order.
(test same-symbol-many-times
  (on-carriers (n)
    (is (all-true-p (in-fibers n 30 (lambda (i) (bind-deeply (* 2 i))))))
    (is (eq :global *variable*))))

;;; Few can be fresh: a thread-local index is never given back.
(defparameter *symbols*
  (loop repeat 50
        collect (let ((symbol (gensym "VARIABLE")))
                  (proclaim `(special ,symbol))
                  symbol)))

(defun bind-symbols (symbols)
  (let ((values (loop for symbol in symbols collect (list symbol))))
    (progv symbols values
      (pause)
      (and (every #'eq (mapcar #'symbol-value symbols) values)
           (progn (dolist (symbol symbols) (set symbol symbol))
                  (pause)
                  (every (lambda (symbol) (eq symbol (symbol-value symbol))) symbols))))))

;;; Prevents: a number of bindings for which the loops of the switch go wrong.
(test zero-to-fifty-bindings
  (on-carriers (n)
    (is (all-true-p (in-fibers n 51 (lambda (i) (bind-symbols (last *symbols* i))))))
    (is (notany #'boundp *symbols*))))

;;; Symbols that get their thread-local index in a fiber, which then goes elsewhere.
(test symbols-never-bound-before
  (on-carriers (n)
    (is (all-true-p
         (in-fibers n 20 (lambda (i)
                           (declare (ignore i))
                           (let ((symbol (gensym "FRESH")))
                             (proclaim `(special ,symbol))
                             (and (bind-symbols (list symbol))
                                  (not (boundp symbol))
                                  (progn (set symbol 1)
                                         (pause)
                                         (eql 1 (symbol-value symbol)))))))))))

(defun read-unbound (symbol)
  (handler-case (symbol-value symbol)
    (unbound-variable () :unbound)))

;;; Prevents: unbound markers lost, or an indirection word that is not mended: a symbol bound without a value
;;; reads as something else.
(test bindings-without-values
  (on-carriers (n)
    (is (all-true-p
         (in-fibers n 40 (lambda (i)
                           (let ((symbols (last *symbols* (1+ (mod i 7)))))
                             (progv symbols '(1)
                               (loop repeat 10
                                     always (and (eql 1 (symbol-value (first symbols)))
                                                 (every (lambda (symbol) (eq :unbound (read-unbound symbol)))
                                                        (rest symbols))
                                                 (not (some #'boundp (rest symbols)))
                                                 (progn (pause) t)))))))))
    (is (all-true-p
         (in-fibers n 40 (lambda (i)
                           (declare (ignore i))
                           (let ((*variable* 1))
                             (pause)
                             (makunbound '*variable*)
                             (pause)
                             (and (not (boundp '*variable*))
                                  (eq :unbound (read-unbound '*variable*))
                                  (progn (setf *variable* 2)
                                         (pause)
                                         (eql 2 *variable*))))))))
    (is (not (boundp '*unbound*)))
    (is (eq :global *variable*))))

(test always-bound-variable
  (on-carriers (n)
    (is (all-true-p
         (in-fibers n 20 (lambda (i)
                           (and (eq *always* :always-global)
                                (let ((*always* i))
                                  (pause)
                                  (incf *always*)
                                  (pause)
                                  (eql *always* (1+ i)))
                                (progn (pause) (eq *always* :always-global)))))))))

;;; Prevents: an indirection word that still points to the thread-local cell of a parked fiber's binding: the
;;; next fiber, or the carrier, would not see the global value, nor set it.
(test global-value-behind-a-binding
  (on-carriers (n)
    (setf *variable* :global)
    (with-group (group n)
      (let* ((changed nil)
             (fibers (loop for i below 20
                           collect (let ((i i))
                                     (spawn (group)
                                       (list (let ((*variable* i))
                                               (loop until changed do (pause))
                                               *variable*)
                                             *variable*)))))
             (setters (loop repeat 5
                            collect (spawn (group)
                                      (loop repeat 20
                                            always (progn (pause)
                                                          (member *variable* '(:global :changed))))))))
        (loop repeat 20 do (sb-thread:thread-yield))
        (join (spawn (group) (setf *variable* :changed)))
        (is (eq :changed *variable*))
        (setf changed t)
        (is (equal (loop for i below 20 collect (list i :changed)) (join-all fibers)))
        (is (not (member nil (join-all setters))))))
    (setf *variable* :global)))

;;; As MAKE-THREAD: bindings of the creator are not inherited.
(test what-a-fiber-starts-with
  (on-carriers (n)
    (let ((*variable* :mine))
      (is (eq :global (in-fiber (n) *variable*)))
      (is (equal '(1 nil :unbound)
                 (with-group (group n)
                   (join (submit-fiber
                          group
                          (make-fiber (lambda ()
                                        (pause)
                                        (list *variable* *other* (read-unbound '*unbound*)))
                                      :initial-bindings '((*variable* . 1) (*other* . nil) (*variable* . 2)))))))))
    (is (eq :global *variable*))))

;;; Variables of the system that each thread has for itself, and some that are only set, not bound. Prevents: a
;;; fiber that finds those of the fiber before it on the carrier.
(test variables-of-the-system
  (on-carriers (n)
    (is (all-true-p
         (in-fibers n 40 (lambda (i)
                           (let ((clusters sb-kernel:*handler-clusters*)
                                 (restarts sb-kernel:*restart-clusters*))
                             (handler-bind ((warning #'identity))
                               (restart-case
                                   (let ((*print-base* (+ 2 (mod i 30)))
                                         (*standard-output* (make-string-output-stream)))
                                     (loop repeat 10 do (princ i) (pause))
                                     (and (string= (get-output-stream-string *standard-output*)
                                                   (with-output-to-string (out)
                                                     (loop repeat 10 do (princ i out))))
                                          (not (eq clusters sb-kernel:*handler-clusters*))))
                                 (nothing () nil))
                               (pause))
                             (and (eq clusters sb-kernel:*handler-clusters*)
                                  (eq restarts sb-kernel:*restart-clusters*)
                                  (null sb-impl::*deadline*)
                                  (eq t sb-sys:*interrupts-enabled*)
                                  (eql 0 sb-kernel:*free-interrupt-context-index*)
                                  (null sb-kernel:*gc-inhibit*)
                                  t))))))))

;;;; Transfer of control

(test catch-and-throw
  (on-carriers (n)
    (is (equal (loop for i below 50 collect (list i :inner :outer))
               (in-fibers n 50 (lambda (i)
                                 (let ((trace '()))
                                   (push (catch 'tag
                                           (push (catch 'tag
                                                   (pause)
                                                   (push i trace)
                                                   (catch 'other (pause) (throw 'tag :inner)))
                                                 trace)
                                           (pause)
                                           (throw 'tag :outer))
                                         trace)
                                   (reverse trace))))))))

;;; Prevents: chains of catch and unwind blocks exchanged wrongly; cleanups that park while a throw is under way.
(test cleanups-that-park
  (on-carriers (n)
    (is (equal (make-list 50 :initial-element '((1 2 3) :c :b :a))
               (in-fibers n 50 (lambda (i)
                                 (declare (ignore i))
                                 (let ((trace '()))
                                   (push (multiple-value-list
                                          (block nil
                                            (unwind-protect
                                                 (unwind-protect
                                                      (unwind-protect
                                                           (progn (pause)
                                                                  (return (values 1 2 3)))
                                                        (pause)
                                                        (push :c trace))
                                                   (pause)
                                                   (push :b trace)
                                                   (pause))
                                              (pause)
                                              (push :a trace)
                                              (pause))))
                                         trace)
                                   (list* (first trace) (reverse (rest trace))))))))))

(test multiple-values
  (on-carriers (n)
    (is (all-true-p
         (in-fibers n 30 (lambda (i)
                           (flet ((many () (values-list (loop for k below i collect (+ i k)))))
                             (equal (multiple-value-list
                                     (multiple-value-prog1 (many) (pause) (values :other :values)))
                                    (multiple-value-list
                                     (catch 'tag
                                       (unwind-protect (multiple-value-call (lambda (&rest values)
                                                                              (pause)
                                                                              (throw 'tag (values-list values)))
                                                         (many))
                                         (pause))))))))))))

(test handlers
  (on-carriers (n)
    (is (equal (loop for i below 50 collect (list :handled i :declined))
               (in-fibers n 50 (lambda (i)
                                 (let ((declined nil))
                                   (list (handler-case
                                             (handler-bind ((simple-error (lambda (condition)
                                                                            (declare (ignore condition))
                                                                            (pause)
                                                                            (setf declined :declined))))
                                               (pause)
                                               (error "error ~D" i))
                                           (simple-error (condition)
                                             (pause)
                                             (setf i (first (simple-condition-format-arguments condition)))
                                             :handled))
                                         i declined)))))))
  ;; the handlers of one fiber are not those of another
  (with-group (group 1)
    (let ((other (spawn (group) (handler-bind ((warning (lambda (condition)
                                                          (declare (ignore condition))
                                                          (fail "a foreign handler"))))
                                  (fiber-park)))))
      (join (spawn (group) (signal 'warning)))
      (fiber-unpark other)
      (is (null (join (spawn (group) (signal 'warning))))))))

(test restarts
  (on-carriers (n)
    (is (equal (loop for i below 50 collect (list :chosen i))
               (in-fibers n 50 (lambda (i)
                                 (handler-bind ((error (lambda (condition)
                                                         (declare (ignore condition))
                                                         (pause)
                                                         (invoke-restart 'choose i))))
                                   (restart-case (progn (pause) (error "choose"))
                                     (choose (i) (pause) (list :chosen i)))))))))
  ;; the restarts of one fiber are not those of another
  (with-group (group 1)
    (let ((other (spawn (group) (with-simple-restart (foreign "foreign") (fiber-park)))))
      (is (null (join (spawn (group) (find-restart 'foreign)))))
      (fiber-unpark other))))

;;;; Frames that are not there, or not here

;;; The error may be signalled where the exit is tried, and can be handled there, or, as in a
;;; thread, when the cleanups of the fiber have run; then it ends the fiber.
(defun exit-result (group function)
  (quietly
    (handler-case (join (spawn (group)
                          (handler-case (funcall function)
                            (control-error () :control-error))))
      (sb-fiber::fiber-failed (condition)
        (if (typep (sb-fiber::fiber-failed-cause condition) 'control-error)
            :control-error
            condition)))))

(defun foreign-exits ()
  "A function to be run by a fiber, which parks it, and a function that returns exits to its frames."
  (let ((exits nil))
    (values (lambda ()
              (catch 'foreign-tag
                (block foreign-block
                  (tagbody
                     (setf exits (list (lambda () (return-from foreign-block 1))
                                       (lambda () (go foreign-tag))
                                       (lambda () (throw 'foreign-tag 2))))
                     (fiber-park)
                     (return-from foreign-block :untouched)
                   foreign-tag
                     (return-from foreign-block :wrong)))))
            (lambda () exits))))

;;; Prevents: unwinding on somebody else's stack.
(test exit-to-a-frame-of-another-fiber
  (on-carriers (n)
    (with-group (group n)
      (multiple-value-bind (function exits) (foreign-exits)
        (let ((owner (submit-fiber group (make-fiber function)))
              (cleanups 0))
          (loop until (funcall exits) do (sb-thread:thread-yield))
          (dolist (exit (funcall exits))
            (is (eq :control-error (exit-result group exit)))
            ;; with a cleanup in between, which parks
            (is (eq :control-error
                    (exit-result group (lambda ()
                                         (unwind-protect (funcall exit)
                                           (pause)
                                           (incf cleanups)))))))
          (is (= 3 cleanups))
          (fiber-unpark owner)
          (is (eq :untouched (join owner)))
          ;; now the owner is dead and its stack is free, perhaps somebody's
          (dolist (exit (funcall exits))
            (is (eq :control-error (exit-result group exit)))))))))

(defun make-dead-return () (block nil (lambda () (return 1))))
(defun make-dead-go ()
  (tagbody
     (return-from make-dead-go (lambda () (go tag)))
   tag))

(test exit-to-a-dead-frame
  (on-carriers (n)
    (with-group (group n)
      (dolist (maker '(make-dead-return make-dead-go))
        (is (eq :control-error
                (exit-result group (lambda ()
                                     (let ((exit (funcall maker)))
                                       (pause)
                                       (funcall exit)))))))
      (is (eq :control-error (exit-result group (lambda () (throw 'no-such-tag 1))))))))

;;; Prevents: a thread's frame taken for one of the fiber's.
(test exit-to-a-frame-of-a-thread
  (on-carriers (n)
    (with-group (group n)
      (is (eq :control-error
              (block nil
                (exit-result group (lambda () (return :wrong))))))
      (is (eq :control-error
              (catch 'tag-of-the-thread
                (exit-result group (lambda () (throw 'tag-of-the-thread :wrong)))))))))

;;;; Data on the stacks

(defun recurse-with-data (depth i)
  "Check data of dynamic extent in each of DEPTH frames after what is below has parked."
  (let ((list (list i depth (+ i depth)))
        (vector (make-array 20 :element-type '(unsigned-byte 64) :initial-element (+ i depth)))
        (floats (make-array 4 :element-type 'double-float :initial-element (float (* i depth) 1d0))))
    (declare (dynamic-extent list vector floats))
    (flet ((check ()
             (and (equal list (list i depth (+ i depth)))
                  (every (lambda (x) (= x (+ i depth))) vector)
                  (every (lambda (x) (= x (* i depth))) floats))))
      (declare (dynamic-extent #'check))
      (if (= depth 0)
          (loop repeat 5 always (progn (pause) (check)))
          (and (recurse-with-data (1- depth) i)
               (check)
               (progn (when (= 0 (mod depth 16)) (pause)) (check)))))))

(test dynamic-extent-data
  (on-carriers (n)
    (is (all-true-p (in-fibers n 40 (lambda (i) (recurse-with-data (* 4 i) i)))))))

(test dynamic-extent-closures
  (on-carriers (n)
    (is (equal (loop for i below 40 collect (+ i 30))
               (in-fibers n 40 (lambda (i)
                                 (sb-int:dx-flet ((add () (pause) (incf i)))
                                   (flet ((call (function) (funcall function)))
                                     (declare (notinline call))
                                     (loop repeat 30 do (call #'add)))
                                   i)))))))

(defun alien-data (depth i)
  (sb-alien:with-alien ((array (array sb-alien:int 16)))
    (dotimes (k 16) (setf (sb-alien:deref array k) (+ (* 1000 depth) i k)))
    (pause)
    (and (or (= depth 0) (alien-data (1- depth) i))
         (progn (pause)
                (loop for k below 16
                      always (= (sb-alien:deref array k) (+ (* 1000 depth) i k)))))))

;;; Prevents: an alien stack that is the carrier's.
(test alien-data-on-the-stack
  (on-carriers (n)
    (is (all-true-p (in-fibers n 40 (lambda (i) (alien-data (mod i 10) i)))))))

(test numbers-in-registers
  (on-carriers (n)
    (is (all-true-p
         (in-fibers n 40 (lambda (i)
                           (let ((a (float i 1d0)) (b (float i 1f0)) (c (complex (float i 1d0) 1d0))
                                 (word (ash (logand i 255) 50)))
                             (declare (double-float a) (single-float b) (type (unsigned-byte 64) word)
                                      (type (complex double-float) c))
                             (loop repeat 50
                                   do (incf a 1d0) (incf b 1f0) (setf word (logxor word 1)) (incf c 1)
                                      (pause))
                             (and (= a (+ i 50)) (= b (+ i 50)) (= word (ash (logand i 255) 50))
                                  (= c (complex (+ i 50d0) 1d0))))))))))

;;;; Floating point modes

(defun traps-p ()
  (handler-case (progn (/ (opaque 1d0) (opaque 0d0)) nil)
    (division-by-zero () t)))

;;; Prevents: modes that belong to the carrier, so that one fiber's masks are another's.
(test traps-masked-in-some
  (on-carriers (n)
    (is (equal (loop for i below 40 collect (evenp i))
               (in-fibers n 40
                          (lambda (i)
                            (flet ((check (expected)
                                     (loop repeat 20
                                           always (progn (pause) (eq expected (traps-p))))))
                              (if (evenp i)
                                  (check t)
                                  (not (and (check t)
                                            (sb-int:with-float-traps-masked (:divide-by-zero :invalid)
                                              (check nil))
                                            (check t)))))))))
    ;; a fiber that ends with its traps masked leaves them to nobody
    (with-group (group n)
      (dotimes (k 20)
        (join (spawn (group) (sb-int:set-floating-point-modes :traps '())))
        (is (eq t (join (spawn (group) (traps-p)))))))))

(defun a-third () (/ (opaque 1d0) (opaque 3d0)))

(test rounding-modes
  (on-carriers (n)
    (let ((near (a-third)))
      (is (all-true-p
           (in-fibers n 30
                      (lambda (i)
                        (sb-int:set-floating-point-modes
                         :rounding-mode (if (oddp i) :positive-infinity :nearest))
                        (loop repeat 30
                              always (progn (pause)
                                            (eq (oddp i) (> (a-third) near))))))))
      (is (= near (a-third))))))

;;;; Depth

(declaim (notinline plus))
(defun plus (a b) (+ a b))

(defun recurse-and-park (depth)
  (if (= depth 0)
      (progn (pause) (pause) 0)
      (plus 1 (recurse-and-park (1- depth)))))

(test park-at-the-bottom
  (on-carriers (n)
    (is (equal (loop for i below 60 collect (* i 40))
               (in-fibers n 60 (lambda (i) (recurse-and-park (* i 40))))))))

(test switch-in-stacks-of-all-sizes
  (on-carriers (n)
    (with-group (group n)
      (is (equal (loop for i below 60 collect (* 10 i))
                 (join-all (loop for i below 60
                                 collect (let ((i i))
                                           (spawn (group :stack-size (* (1+ (mod i 5)) 64 1024))
                                             (recurse-and-park (* 10 i)))))))))))

;;; An argument list longer than a page, in the smallest stack.
(test many-arguments
  (with-group (group 1)
    (is (= 3000 (join (spawn (group :stack-size (* 64 1024))
                        (apply (lambda (&rest arguments) (fiber-yield) (length arguments))
                               (make-list 3000))))))))

;;;; Foreign frames

(sb-alien:define-alien-callable compare-and-pause sb-alien:int ((a sb-alien:unsigned-long)
                                                                (b sb-alien:unsigned-long))
  (pause)
  (let ((x (sb-sys:sap-ref-32 (sb-sys:int-sap a) 0))
        (y (sb-sys:sap-ref-32 (sb-sys:int-sap b) 0)))
    (cond ((< x y) -1) ((> x y) 1) (t 0))))

(defun sort-by-qsort (vector)
  (sb-sys:with-pinned-objects (vector)
    (sb-alien:alien-funcall
     (sb-alien:extern-alien "qsort" (function sb-alien:void sb-sys:system-area-pointer
                                              sb-alien:unsigned-long sb-alien:unsigned-long (* t)))
     (sb-sys:vector-sap vector) (length vector) 4
     (sb-alien:alien-sap (sb-alien:alien-callable-function 'compare-and-pause))))
  vector)

;;; qsort(3) in each fiber, the comparisons of which park. Prevents: a fiber that goes on in another OS
;;; thread with frames that keep addresses of the first; a thread's state left by one callback and
;;; found by the next.
(test callbacks-that-park
  (on-carriers (n)
    (is (all-true-p
         (in-fibers n 30 (lambda (i)
                           (let ((vector (make-array (+ 2 i) :element-type '(unsigned-byte 32))))
                             (dotimes (k (length vector)) (setf (aref vector k) (random 1000)))
                             (let ((sorted (sort (copy-seq vector) #'<)))
                               (equalp sorted (sort-by-qsort vector))))))))))

;;;; Parking and turns

(defun play-ping-pong (turns call-as-1 call-as-2)
  "Two players, started by the functions, that wait for each other TURNS times."
  (let ((turn 0) (players (list nil nil)))
    (flet ((player (me)
             (loop until (every #'identity players) do (sb-thread:thread-yield))
             (loop repeat turns
                   do (loop until (= turn me) do (fiber-park))
                      (setf turn (- 1 me))
                      (fiber-unpark (nth (- 1 me) players)))
             t))
      (setf (first players) (funcall call-as-1 (lambda () (player 0)))
            (second players) (funcall call-as-2 (lambda () (player 1))))
      (join-all players))))

;;; Prevents: an unpark between the test and the park that is lost.
(test park-and-unpark
  (on-carriers (n)
    (with-group (group n)
      (flet ((start (function) (submit-fiber group (make-fiber function))))
        (is (equal '(t t) (play-ping-pong 1000 #'start #'start)))
        (with-group (other 1)
          (is (equal '(t t)
                     (play-ping-pong 300 #'start
                                     (lambda (function) (submit-fiber other (make-fiber function)))))))))))

(test unpark-from-threads
  (on-carriers (n)
    (with-group (group n)
      (let* ((count 0) (stop nil)
             (fiber (spawn (group) (loop (fiber-park) (incf count) (when stop (return :ended)))))
             (threads (loop repeat 3
                            collect (sb-thread:make-thread
                                     (lambda () (loop repeat 500 do (fiber-unpark fiber)))))))
        (mapc #'sb-thread:join-thread threads)
        (setf stop t)
        (fiber-unpark fiber)
        (is (eq :ended (join fiber)))
        (is (<= 1 count 1501))))))

(test park-timeout
  (on-carriers (n)
    (is (equal '(nil t nil)
               (in-fiber (n)
                 (list (fiber-park :timeout 1/1000)
                       (progn (fiber-unpark (current-fiber)) (fiber-park :timeout 3600))
                       (fiber-park :timeout 0)))))))

;;; More runnable fibers than a queue holds. Prevents: those in the queue keeping out those behind it.
(test everybody-gets-a-turn
  (on-carriers (n)
    (with-group (group n)
      (let ((turns (make-array 1000 :initial-element 0)))
        (is (= 1000 (length (join-all
                             (loop for i below 1000
                                   collect (let ((i i))
                                             (spawn (group)
                                               (loop until (every (lambda (n) (>= n 2)) turns)
                                                     do (incf (aref turns i))
                                                        (fiber-yield)))))))))))))

;;; The bound that the head of fiber.lisp gives: on one carrier, N that yield come round within 2 * N + 256 turns.
(test turns-are-even
  (dolist (n '(2 200 256 257 600 3000))
    (let ((turn 0) (widest 0))
      (flet ((take-turns ()
               (loop repeat 10
                     for last = nil then this
                     for this = (incf turn)
                     do (when last (setf widest (max widest (- this last))))
                        (fiber-yield))))
        (with-group (group 1)
          (join (spawn (group)
                  (join-all (loop repeat n collect (spawn (group) (take-turns))))))))
      (is (<= widest (+ (* 2 n) 256))))))

;;; Pairs that wake each other keep the queue full without a yield. Prevents: those in the injector being kept
;;; out for ever.
(test pairs-that-fill-the-queue
  (on-carriers (n)
    (with-group (group n)
      (let* ((begun (list 0))
             (fibers (make-array 800)))
        (flet ((play (i)
                 (let ((partner (svref fibers (logxor i 1))))
                   (sb-ext:atomic-incf (car begun))
                   (loop until (= (car begun) (length fibers))
                         do (fiber-unpark partner)
                            (fiber-park))
                   (fiber-unpark partner)
                   t)))
          (dotimes (i (length fibers))
            (setf (svref fibers i) (let ((i i)) (make-fiber (lambda () (play i))))))
          (map nil (lambda (fiber) (submit-fiber group fiber)) fibers)
          (is (all-true-p (join-all (coerce fibers 'list)))))))))

;;; Fibers that only yield must not keep out timers and descriptors.
(test sleepers-among-yielders
  (on-carriers (n)
    (with-group (group n)
      (let* ((done nil)
             (yielders (loop repeat 400 collect (spawn (group) (loop until done do (fiber-yield)) t)))
             (sleepers (loop repeat 10 collect (spawn (group) (loop repeat 3 do (sleep 1/1000)) t))))
        (is (all-true-p (join-all sleepers)))
        (setf done t)
        (is (all-true-p (join-all yielders)))))))

;;; A fiber that computes must not keep those behind it from the other carriers.
(test work-is-stolen
  (on-carriers (n :counts '(2 16))
    (with-group (group n)
      (let ((done nil))
        (is (eq t (join (spawn (group)
                          (let ((others (loop repeat 10 collect (spawn (group) (setf done t)))))
                            (loop until done)
                            (all-true-p (join-all others)))))))))))

(test submission-from-many-threads
  (on-carriers (n)
    (with-group (group n)
      (let* ((count (list 0))
             (threads (loop repeat 4
                            collect (sb-thread:make-thread
                                     (lambda ()
                                       (loop repeat 500
                                             collect (spawn (group)
                                                       (sb-ext:atomic-incf (car count)))))))))
        (mapc #'join-all (mapcar #'sb-thread:join-thread threads))
        (is (= 2000 (car count)))))))

;;;; Live signal contexts: in a handler of an error that a trap has signalled

(defun trap (n)
  "An error with a signal context on the stack."
  (if (evenp n)
      (car (opaque 1))
      (symbol-value (opaque '*unbound*))))

(defun in-handlers (depth function)
  "Call FUNCTION in DEPTH nested handlers of errors that traps have signalled."
  (if (= depth 0)
      (funcall function)
      (handler-case
          (handler-bind ((error (lambda (condition)
                                  (declare (ignore condition))
                                  (pause)
                                  (return-from in-handlers
                                    (multiple-value-prog1 (in-handlers (1- depth) function)
                                      (pause))))))
            (trap depth))
        (error () :not-reached))))

;;; Prevents: contexts of several fibers of a carrier that share the thread's array of contexts; leaving in
;;; another order than entering; a fiber resumed by another carrier than the one its context belongs to.
(test handlers-of-traps-that-park
  (on-carriers (n)
    (is (equal (loop for i below 50 collect (list i i (mod i 4) 0))
               (in-fibers n 50
                          (lambda (i)
                            (list i
                                  (in-handlers (mod i 4)
                                               (lambda () (loop repeat (mod i 7) do (pause)) i))
                                  (in-handlers (mod i 4)
                                               (lambda ()
                                                 (pause)
                                                 sb-kernel:*free-interrupt-context-index*))
                                  sb-kernel:*free-interrupt-context-index*)))))))

(test traps-and-unwinding
  (on-carriers (n)
    (is (equal (loop for i below 40 collect (loop for k below 20 collect (+ i k)))
               (in-fibers n 40
                          (lambda (i)
                            (loop for k below 20
                                  collect (handler-case
                                              (unwind-protect
                                                   (handler-bind ((error (lambda (condition)
                                                                           (declare (ignore condition))
                                                                           (pause))))
                                                     (trap k))
                                                (pause))
                                            (error () (pause) (+ i k))))))))))

;;; The context holds the registers of the interrupted function: it must go on with them.
(test traps-that-are-continued
  (on-carriers (n)
    (is (equal (loop for i below 40 collect (+ i (* 7 10)))
               (in-fibers n 40
                          (lambda (i)
                            (handler-bind ((unbound-variable (lambda (condition)
                                                               (pause)
                                                               (use-value 7 condition))))
                              (let ((sum i))
                                (loop repeat 10 do (incf sum (symbol-value (opaque '*unbound*))))
                                sum))))))))

;;;; Signals

(defun make-signal-set (signal)
  (let ((set (make-array 128 :element-type '(unsigned-byte 8) :initial-element 0)))
    (multiple-value-bind (byte bit) (floor (1- signal) 8)
      (setf (ldb (byte 1 bit) (aref set byte)) 1))
    set))

(defun change-mask (how signal)
  (let ((set (make-signal-set signal)))
    (sb-sys:with-pinned-objects (set)
      (sb-alien:alien-funcall
       (sb-alien:extern-alien "pthread_sigmask"
                              (function sb-alien:int sb-alien:int sb-sys:system-area-pointer
                                        sb-sys:system-area-pointer))
       how (sb-sys:vector-sap set) (sb-sys:int-sap 0)))))

(defconstant sig-block 0)
(defconstant sig-unblock 1)

(defun call-in-signal-storm (interval handler function)
  "Call FUNCTION while SIGALRM comes every INTERVAL microseconds to whoever has unblocked it, and is handled
by HANDLER."
  (change-mask sig-block sb-unix:sigalrm)
  (sb-sys:enable-interrupt sb-unix:sigalrm handler)
  (unwind-protect
       (progn (sb-unix::unix-setitimer :real 0 interval 0 interval)
              (funcall function))
    (sb-unix::unix-setitimer :real 0 0 0 0)
    ;; one may be pending
    (sb-sys:enable-interrupt sb-unix:sigalrm (lambda (&rest ignore) (declare (ignore ignore))))
    (change-mask sig-unblock sb-unix:sigalrm)
    (sb-sys:enable-interrupt sb-unix:sigalrm #'sb-unix::sigalrm-handler)))

(sb-ext:defglobal **signals** 0)
(declaim (type fixnum **signals**))

(defun count-signal (&rest ignore)
  (declare (ignore ignore))
  (sb-ext:atomic-incf **signals**))

(defmacro until-signals (n &body body)
  "Execute BODY until N signals have been handled since the test began."
  `(loop until (>= **signals** ,n)
         do (progn ,@body)))

;;; Each kind of code has a switch between a handler deferred while interrupts are enabled and one found deferred
;;; while they are not. Prevents: the end of the process ("pseudo_atomic_interrupted after
;;; interrupt_handle_pending"), and signals that stay blocked.
(defun storm (carrier-count handler &optional (signals 3000))
  (setf **signals** 0)
  (let ((mutex (sb-thread:make-mutex)) (count 0) (increments 0))
    (call-in-signal-storm
     50 handler
     (lambda ()
       (in-fibers carrier-count 12
                  (lambda (i)
                    (change-mask sig-unblock sb-unix:sigalrm)
                    (until-signals signals
                      (change-mask sig-unblock sb-unix:sigalrm) ; the next carrier may be a new one
                      (case (mod i 4)
                        (0 (sb-thread::with-system-mutex (mutex)
                             (let ((old count))
                               (fiber-yield)
                               (setf count (1+ old)))))
                        (1 (sb-sys:without-interrupts
                             (fiber-yield)
                             (sb-sys:with-interrupts (fiber-yield))))
                        (2 (fiber-yield)
                         (let ((*variable* i)) (fiber-yield)))
                        (3 (sleep (opaque 1/20000))
                         (sb-thread:with-mutex (mutex) (incf increments)))))
                    (change-mask sig-block sb-unix:sigalrm)))))
    (values (>= **signals** signals) (sb-thread:mutex-owner mutex))))

(test signal-storm
  (on-carriers (n)
    (is (equal '(t nil) (multiple-value-list (storm n #'count-signal))))))

;;; The handler interrupts a fiber, which parks in it.
(test signal-storm-with-handlers-that-park
  (on-carriers (n)
    (is (equal '(t nil)
               (multiple-value-list
                (storm n
                       (lambda (&rest ignore)
                         (declare (ignore ignore))
                         (when (= 0 (mod (sb-ext:atomic-incf **signals**) 4))
                           (fiber-yield)))
                       2000))))))

(test signal-storm-with-collections
  (on-carriers (n :migration '(nil))
    (is (equal '(t nil)
               (multiple-value-list
                (storm n
                       (lambda (&rest ignore)
                         (declare (ignore ignore))
                         (when (= 0 (mod (sb-ext:atomic-incf **signals**) 100))
                           (sb-ext:gc)))
                       1000))))))

(defun carrier-threads (group)
  (remove nil (mapcar #'sb-thread::thread-os-thread
                      (mapcar #'sb-fiber::carrier-thread (sb-fiber::fiber-group-carriers group)))
          :test #'eql))

;;; SIGURG is what INTERRUPT-THREAD sends. One that comes for nothing must do nothing.
(test stray-sigurg
  (on-carriers (n)
    (with-group-of-same-carriers (group n)
      (let* ((stop nil)
             (fibers (loop for i below 10
                           collect (let ((i i))
                                     (spawn (group)
                                       (let ((*variable* i))
                                         (loop until stop
                                               always (progn (pause) (eql i *variable*)))))))))
        (loop repeat 500
              do (dolist (thread (carrier-threads group))
                   (sb-unix:pthread-kill thread sb-unix:sigurg))
                 (sb-thread:thread-yield))
        (setf stop t)
        (is (all-true-p (join-all fibers)))))))
