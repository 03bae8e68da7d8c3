;;;; stacks alone: fiber/stack.lisp and runtime/fiber-stack.c, without a scheduler

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(dolist (file '("limits" "guards"))
  (load (merge-pathnames (format nil "support/~A.lisp" file) *load-truename*)))

(def-suite* stack)

;;;; Where a stack lies. The picture is at the head of runtime/fiber-stack.h.

(defconstant kib 1024)
(defconstant page 4096)
(defconstant control-zone-size (* 192 kib))
(defun binding-stack-size (size) (max (* 64 kib) (floor size 4)))
(defconstant side-zone-size (* 32 kib))
(defconstant alien-stack-size (* 256 kib))

(defun make-test-fiber (&optional (size (* 256 kib)))
  (make-fiber #'identity :stack-size size))

(defun allocate (fiber)
  (sb-sys:without-interrupts (and (sb-fiber::allocate-stack fiber) fiber)))

(defun release (fiber)
  "What is done at the end of FIBER."
  (sb-fiber::retire-index fiber)
  (sb-fiber::free-stack fiber))

(defmacro with-stack ((fiber &optional (size '(* 256 kib))) &body body)
  `(let ((,fiber (allocate (make-test-fiber ,size))))
     (unwind-protect (progn ,@body)
       (release ,fiber))))

(defun call-with-stacks (function n &optional (size (* 256 kib)))
  (let ((fibers (loop repeat n collect (allocate (make-test-fiber size)))))
    (unwind-protect (funcall function fibers)
      (mapc #'release fibers))))

(defun start (fiber) (sb-fiber::fiber-control-stack-start fiber))
(defun end (fiber) (sb-fiber::fiber-control-stack-end fiber))
(defun context (fiber) (sb-fiber::fiber-context fiber))
(defun index (fiber) (logandc2 (sb-thread::thread-os-tid fiber) (ash 1 31)))

(defun bounds (fiber size)
  "The addresses between the parts of the slot of FIBER, from its low guard to its end."
  (let ((address (- (start fiber) page))
        (parts (list page control-zone-size size (binding-stack-size size) side-zone-size page
                     side-zone-size alien-stack-size)))
    (cons address (loop for part in parts collect (incf address part)))))

;;;; What memory lets one do

;;; The kernel says EFAULT where a program would be sent a signal.
(defun call-with-scratch-pipe (function)
  (multiple-value-bind (reader writer) (sb-unix:unix-pipe)
    (unwind-protect (funcall function reader writer)
      (sb-unix:unix-close reader)
      (sb-unix:unix-close writer))))

(defun usable-p (address)
  "Can the byte at ADDRESS be read and written?"
  (call-with-scratch-pipe
   (lambda (reader writer)
     (let ((sap (sb-sys:int-sap address)))
       (and (eql 1 (sb-unix:unix-write writer sap 0 1))
            (eql 1 (sb-unix:unix-read reader sap 1)))))))

(defun guarded-p (from to)
  "Is each page from FROM to TO out of bounds?"
  (loop for address from from below to by page
        never (or (usable-p address) (usable-p (+ address page -1)))))

(defun open-p (from to)
  (loop for address from from below to by page
        always (and (usable-p address) (usable-p (+ address page -1)))))

(defun guards-up-p (fiber size)
  "Are the guards of FIBER where they must be, and nothing else guarded?"
  (destructuring-bind (low zone base binding binding-zone middle alien-zone alien end)
      (bounds fiber size)
    (declare (ignore zone middle alien-zone))
    (and (guarded-p low base)
         (open-p base binding)
         (open-p binding binding-zone)
         (guarded-p binding-zone alien)
         (open-p alien end))))

;;;; Allocation

(test geometry
  (dolist (size (mapcar (lambda (n) (* n kib)) '(64 128 256 1024 4096)))
    (with-stack (fiber size)
      (is (= (context fiber) (end fiber)))
      (is (<= (+ (start fiber) control-zone-size size (- page)) (end fiber)
              (+ (start fiber) control-zone-size size)))
      (is (= 0 (mod (end fiber) 16)))
      (is (= 0 (mod (start fiber) page)))
      (is (guards-up-p fiber size)))))

;;; Sizes are rounded up to powers of two. Prevents: less than was asked for.
(test sizes-are-rounded-up
  (loop for (size rounded) in '((1 64) (65 128) (100 128) (128 128) (129 256) (257 512))
        do (with-stack (fiber (max (* 64 kib) (* size kib)))
             (is (guards-up-p fiber (* rounded kib)))))
  (with-stack (fiber (1+ (* 128 kib)))
    (is (guards-up-p fiber (* 256 kib)))))

(test a-large-stack
  (with-stack (fiber (ash 1 30))
    (is (<= (ash 1 30) (- (end fiber) (start fiber))))
    (is (usable-p (+ (start fiber) control-zone-size)))
    (is (not (usable-p (+ (start fiber) control-zone-size -1))))))

(defun overlap-p (fibers size)
  (loop for (this next) on (sort (mapcar (lambda (fiber) (bounds fiber size)) fibers)
                                 #'< :key #'first)
        thereis (and next (> (car (last this)) (first next)))))

;;; More than an arena holds. Prevents: two fibers on one stack.
(test stacks-do-not-overlap
  (dolist (size (list (* 64 kib) (* 256 kib)))
    (call-with-stacks
     (lambda (fibers)
       (is (not (overlap-p fibers size)))
       (is (= 1500 (length (remove-duplicates (mapcar #'index fibers))))))
     1500 size)))

;;; Prevents: memory that grows with all fibers that ever were.
(test stacks-are-used-again
  (let ((contexts (call-with-stacks (lambda (fibers) (mapcar #'context fibers)) 100)))
    (loop repeat 3
          do (call-with-stacks
              (lambda (fibers)
                (is (null (set-exclusive-or contexts (mapcar #'context fibers)))))
              100))))

;;; Prevents: a stack of one size that is given to a fiber that needs a larger one.
(test sizes-do-not-mix
  (let ((small (call-with-stacks (lambda (fibers) (mapcar #'context fibers)) 10 (* 64 kib))))
    (call-with-stacks
     (lambda (fibers)
       (is (null (intersection small (mapcar #'context fibers)))))
     10 (* 128 kib))))

;;;; Memory that is given back

(defun words-of (fiber)
  "Addresses in each of its stacks, far from the context."
  (destructuring-bind (low zone base binding binding-zone middle alien-zone alien end)
      (bounds fiber (* 256 kib))
    (declare (ignore low zone middle alien-zone))
    (list base (+ base (* 100 kib)) (+ binding page) (- binding-zone 8) alien (- end 8))))

(defun use-stack-again (in-between)
  "Write all over a stack, free it, call IN-BETWEEN, and return what is left of it when it is used
again."
  (trim-stacks)                         ; so that the lowest stack is the next, both times
  (flet ((word (address) (sb-sys:sap-ref-word (sb-sys:int-sap address) 0)))
    (let (context)
      (with-stack (fiber)
        (setf context (context fiber))
        (dolist (address (words-of fiber))
          (setf (sb-sys:sap-ref-word (sb-sys:int-sap address) 0) 77)))
      (funcall in-between)
      (with-stack (fiber)
        (assert (= context (context fiber)))
        (assert (guards-up-p fiber (* 256 kib)))
        (mapcar #'word (words-of fiber))))))

;;; Prevents: ten thousand fibers that once had deep stacks, whose memory stays the process's.
(test stacks-that-are-trimmed-have-no-memory
  (is (equal '(0 0 0 0 0 0) (use-stack-again #'trim-stacks)))
  (is (equal '(77 77 77 77 77 77) (use-stack-again (lambda ())))))

;;; Prevents: page tables that stay, and memory that stays because the mean is not measured.
(test memory-of-many-stacks-comes-back
  (trim-stacks)
  (flet ((bytes ()
           (list (bytes-of "VmRSS:") (bytes-of "VmPTE:"))))
    (let ((before (bytes)) (between nil) (after nil))
      (call-with-stacks (lambda (fibers)
                          (dolist (fiber fibers)
                            (loop for address in (words-of fiber)
                                  do (setf (sb-sys:sap-ref-8 (sb-sys:int-sap address) 0) 1)))
                          (setf between (bytes)))
                        3000)
      (trim-stacks)
      (setf after (bytes))
      (loop for b in before for m in between for a in after
            do (is (< (- a b) (/ (- m b) 10)) "~D before, ~D with stacks, ~D after" b m a)))))

;;; Prevents: a limit that nobody looks at.
(test stacks-beyond-the-limit-are-trimmed
  (trim-stacks)
  (with-cached-stack-bytes (1000000)
    (let ((before (bytes-of "VmRSS:")))
      (call-with-stacks (lambda (fibers)
                          (dolist (fiber fibers)
                            (dolist (address (words-of fiber))
                              (setf (sb-sys:sap-ref-8 (sb-sys:int-sap address) 0) 1))))
                        3000)
      (is (< (- (bytes-of "VmRSS:") before) 20000000)))))

;;; Prevents: a run that takes along a stack in use between free ones.
(test trimming-leaves-stacks-in-use-alone
  (call-with-stacks
   (lambda (fibers)
     (let ((kept (loop for fiber in fibers for i from 0 when (= 0 (mod i 7)) collect fiber)))
       (dolist (fiber fibers)
         (dolist (address (words-of fiber))
           (setf (sb-sys:sap-ref-word (sb-sys:int-sap address) 0) (index fiber))))
       (mapc #'release (set-difference fibers kept))
       (trim-stacks)
       (is (loop for fiber in kept
                 always (loop for address in (words-of fiber)
                              always (= (index fiber)
                                        (sb-sys:sap-ref-word (sb-sys:int-sap address) 0)))))
       (is (every (lambda (fiber) (guards-up-p fiber (* 256 kib))) kept))
       (dolist (fiber (set-difference fibers kept)) (allocate fiber))
       (is (every (lambda (fiber) (guards-up-p fiber (* 256 kib))) fibers))
       (is (= 2000 (length (remove-duplicates (mapcar #'index fibers)))))))
   2000))

;;;; The table of the living

(test the-living-are-in-the-table
  (let ((fiber (make-test-fiber)))
    (is (not (member fiber (list-all-fibers))))
    (allocate fiber)
    (is (member fiber (list-all-fibers)))
    (is (eq fiber (sb-fiber::fiber-at (index fiber))))
    (let ((index (index fiber)))
      (sb-fiber::retire-index fiber)
      (is (not (member fiber (list-all-fibers))))
      (is (null (sb-fiber::fiber-at index))))
    (sb-fiber::free-stack fiber)
    (is (= 0 (context fiber)))))

;;; OS-TIDs are what condition variables and rwlocks tell waiters apart by.
(test os-tids-are-unique-among-the-living
  (call-with-stacks
   (lambda (fibers)
     (let ((tids (mapcar #'sb-thread::thread-os-tid fibers)))
       (is (= 1500 (length (remove-duplicates tids))))
       (is (every (lambda (tid) (<= (ash 1 31) tid (1- (ash 1 32)))) tids))))
   1500))

;;; Prevents: a mutex id that is taken for a thread's, or for a pointer; and an owner that has
;;; ended being taken for the fiber that has its stack now.
(test mutex-ids
  (flet ((id (index) (sb-fiber::new-mutex-owner-id index)))
    (dolist (index (list 0 1 1023 1024 (1- (ash 1 24))))
      (let ((id (id index)))
        (is (typep id 'sb-ext:word))
        (is (evenp id))
        (is (sb-fiber::fiber-mutex-owner-id-p id))
        (is (= index (ldb (byte 24 2) id)))
        (is (/= id (id index)))))
    (is (not (sb-fiber::fiber-mutex-owner-id-p
              (sb-sys:sap-int (sb-vm::current-thread-offset-sap sb-vm::thread-this-slot)))))
    (with-stack (fiber)
      ;; It has an id of its own: one made now is that of another fiber on this stack.
      (is (eq :thread-dead (sb-fiber::find-mutex-owner (id (index fiber))))))
    (is (eq :thread-dead (sb-fiber::find-mutex-owner (id (1- (ash 1 24))))))))

;;;; Collections

;;; A stack is free to the collector until a fiber has run on it. Prevents: what another left
;;; there being taken for references, or for binding entries.
(test the-collector-does-not-look-at-unused-stacks
  (call-with-stacks
   (lambda (fibers)
     (dolist (fiber fibers)
       (dolist (address (words-of fiber))
         (setf (sb-sys:sap-ref-word (sb-sys:int-sap address) 0) #x1234567F)))
     (finishes (sb-ext:gc :full t)))
   20))

(test allocation-by-several-threads
  (let* ((threads (loop repeat 3
                        collect (sb-thread:make-thread
                                 (lambda ()
                                   (loop repeat 30
                                         always (call-with-stacks
                                                 (lambda (fibers)
                                                   (every (lambda (fiber)
                                                            (eq fiber (sb-fiber::fiber-at
                                                                       (index fiber))))
                                                          fibers))
                                                 50))))))
         (results (loop while (some #'sb-thread:thread-alive-p threads)
                        do (sb-ext:gc)
                        finally (return (mapcar #'sb-thread:join-thread threads)))))
    (is (equal '(t t t) results))))

;;;; No memory

;;; Prevents: a lost process, or a lost fiber, where there could be one less at a time.
(test no-room-for-a-stack
  (let ((fibers (loop repeat 3 collect (make-test-fiber (ash 1 29))))) ; none of this size is free
    (with-limit (+rlimit-as+ (ash 1 30))
      (is (notany #'allocate fibers))
      (is (every (lambda (fiber) (= 0 (context fiber))) fibers)))
    (dolist (fiber fibers)
      (allocate fiber)
      (is (/= 0 (context fiber)))
      (release fiber))))

;;;; Waiting for each other

(defun use-stacks (flag)
  "A form that takes stacks and gives them back until FLAG, a symbol, is true."
  `(let ((fibers (loop repeat 40 collect (make-fiber (function list)))))
     (loop until ,flag
           do (sb-sys:without-interrupts
                (mapc (function sb-fiber::allocate-stack) fibers)
                (dolist (fiber fibers)
                  (sb-fiber::retire-index fiber)
                  (sb-fiber::free-stack fiber))))))

;;; Prevents: a collector that waits for a thread that has GC inhibited and wants a stack, which
;;; waits for another that was stopped while it took one. It would never end: a child.
(test stacks-without-gcing
  (is (equal "(:DONE :DONE :DONE)"
             (child-result
              `(let* ((stop nil)
                      (threads (list* (sb-thread:make-thread
                                       (lambda ()
                                         (loop until stop
                                               do (sb-sys:without-gcing ,(use-stacks t))
                                                  (sb-sys:without-gcing
                                                    (let ((passes 0))
                                                      ,(use-stacks '(> (incf passes) 50)))))
                                         :done))
                                      (loop repeat 2
                                            collect (sb-thread:make-thread
                                                     (lambda () ,(use-stacks 'stop) :done))))))
                 (loop repeat 500 do (sb-ext:gc))
                 (setf stop t)
                 (prin1 (mapcar (function sb-thread:join-thread) threads)))
              :wrapper '("timeout" "-s" "KILL" "60")))))

;;;; A kernel, or what imitates one, that takes an advice and does nothing

(defparameter *ignore-advice-to-guard*
  '(flet ((prctl (option x y)
            (sb-alien:alien-funcall
             (sb-alien:extern-alien "prctl" (function sb-alien:int sb-alien:int sb-alien:unsigned
                                                      sb-alien:unsigned sb-alien:unsigned
                                                      sb-alien:unsigned))
             option x y 0 0)))
    ;; If it is madvise(2), and the third argument MADV_GUARD_INSTALL: say 0 at once.
    (let* ((filter '((#x20 0 0 0) (#x15 0 3 28) (#x20 0 0 32) (#x15 0 1 102)
                     (#x06 0 0 #x50000) (#x06 0 0 #x7fff0000)))
           (code (sb-alien:make-alien (sb-alien:unsigned 64) (length filter)))
           (program (sb-alien:make-alien (sb-alien:unsigned 64) 2)))
      (loop for (operation true false k) in filter and i from 0
            do (setf (sb-alien:deref code i)
                     (logior operation (ash true 16) (ash false 24) (ash k 32))))
      (setf (sb-alien:deref program 0) (length filter)
            (sb-alien:deref program 1) (sb-sys:sap-int (sb-alien:alien-sap code)))
      (and (= 0 (prctl 38 1 0))           ; PR_SET_NO_NEW_PRIVS
           (= 0 (prctl 22 2 (sb-sys:sap-int (sb-alien:alien-sap program))))))) ; PR_SET_SECCOMP
  "A form that makes this process one in which that is so. False if there are no filters.")

;;; Prevents: stacks without guards. One that overflows would write to its neighbour.
(test advice-that-is-ignored
  (let ((result (child-result
                 `(prin1 (if ,*ignore-advice-to-guard*
                             (list (run-fibers
                                    (make-fiber
                                     (lambda ()
                                       (let ((*error-output* (make-broadcast-stream)))
                                         (handler-case (labels ((recurse () (+ 1 (recurse))))
                                                         (recurse))
                                           (storage-condition () :exhausted)))))
                                    :carrier-count 1)
                                   (sb-alien:extern-alien "fiber_guard_method" sb-alien:int))
                             :no-filters)))))
    (if (equal result ":NO-FILTERS")
        (skip "This kernel cannot filter system calls.")
        (is (equal "((:EXHAUSTED) 2)" result)))))

;;; All of this again.
(unless *guard-method*
  (test guard-methods
    (check-with-guard-methods "stack")))
