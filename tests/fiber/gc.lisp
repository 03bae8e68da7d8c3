;;;; The collector and the stacks of fibers: nothing is lost, nothing stays for ever

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/collecting.lisp" *load-truename*))

(def-suite* gc)

;;;; Collections while fibers run

(defvar *other* :global)

(defun recurse-with-data (depth i)
  "Hold data in DEPTH frames: in the heap, bound, of dynamic extent, and foreign; check it after the
frames below have parked."
  (let* ((data (fresh-data i))
         (*variable* (fresh-data (+ i depth)))
         (dynamic (list data (+ i depth))))
    (declare (dynamic-extent dynamic))
    (sb-alien:with-alien ((foreign (array sb-alien:int 8)))
      (dotimes (k 8) (setf (sb-alien:deref foreign k) (+ i k)))
      (fiber-yield)
      (flet ((check ()
               (and (intact-p data i)
                    (intact-p *variable* (+ i depth))
                    (eq (first dynamic) data)
                    (eql (second dynamic) (+ i depth))
                    (loop for k below 8 always (= (sb-alien:deref foreign k) (+ i k))))))
        (and (if (= depth 0)
                 (during-collections (fiber-yield) (check))
                 (recurse-with-data (1- depth) i))
             (check))))))

;;; Prevents: stacks that are not scanned, or scanned with wrong bounds; binding stacks that are not
;;; updated; a fiber that is seen twice or not at all while it is being switched.
(test parked-stacks
  (on-carriers (n)
    (while-collecting (12)
      (is (all-true-p (in-fibers n 100 (lambda (i) (recurse-with-data (mod i 12) i))))))))

(test hundreds-of-parked-stacks
  (while-collecting (10)
    (is (all-true-p (in-fibers 2 600 (lambda (i) (recurse-with-data (mod i 20) i)))))))

;;; Prevents: an allocation region that belongs to a fiber in place of its carrier.
(test allocation-everywhere
  (on-carriers (n)
    (while-collecting (10)
      (is (all-true-p
           (in-fibers n 50
                      (lambda (i)
                        (let ((list '()))
                          (during-collections
                            (when (= 0 (random 50)) (setf list '()))
                            (loop repeat (random 20) do (push (cons i (random 10)) list))
                            (fiber-yield)
                            (every (lambda (cell) (eql i (car cell))) list))))))))))

;;; Prevents: objects that move although a stack refers to them, which tables with address-based
;;; keys tell.
(test tables-with-address-based-keys
  (on-carriers (n)
    (while-collecting (12)
      (is (all-true-p
           (in-fibers n 30
                      (lambda (i)
                        (let ((table (make-hash-table :test 'eq))
                              (keys (loop repeat 20 collect (list i))))
                          (dolist (key keys) (setf (gethash key table) key))
                          (during-collections
                            (fiber-yield)
                            (every (lambda (key) (eq key (gethash key table))) keys))))))))))

(test pinned-objects-stay
  (on-carriers (n)
    (while-collecting (12)
      (is (all-true-p
           (in-fibers n 30
                      (lambda (i)
                        (let ((vector (make-array 10 :initial-element i)))
                          (sb-sys:with-pinned-objects (vector)
                            (let ((address (sb-kernel:get-lisp-obj-address vector)))
                              (during-collections
                                (fiber-yield)
                                (and (= address (sb-kernel:get-lisp-obj-address vector))
                                     (every (lambda (x) (eql x i)) vector)))))))))))))

;;; Prevents: the code that a parked frame returns to being moved or freed.
(test code-that-only-a-stack-refers-to
  (on-carriers (n :counts '(1 2))
    (let ((functions (loop for i below 10
                           collect (compile nil `(lambda (pause)
                                                   (let ((list (list ,i)))
                                                     (loop while **collecting** do (funcall pause))
                                                     (car list)))))))
      (while-collecting (10)
        (with-group (group n)
          (let ((fibers (loop for function in functions
                              collect (let ((function function))
                                        (spawn (group) (funcall function #'fiber-yield))))))
            (setf functions nil)
            (is (equal '(0 1 2 3 4 5 6 7 8 9) (join-all fibers)))))))))

;;;; Roots in saved signal contexts

;;; Prevents: registers of a function that a trap has interrupted being forgotten while its fiber is
;;; parked in the handler.
(test handlers-of-traps
  (on-carriers (n)
    (while-collecting (12)
      (is (all-true-p
           (in-fibers n 40
                      (lambda (i)
                        (let ((data (fresh-data i)))
                          (handler-bind ((unbound-variable (lambda (condition)
                                                             (fiber-yield)
                                                             (use-value (fresh-data 7) condition))))
                            (during-collections
                              (let ((more (list i)))
                                (and (intact-p (symbol-value (opaque '*unbound*)) 7)
                                     (equal more (list i))
                                     (intact-p data i)))))))))))))

;;;; What lives, what dies

(defun full-gc ()
  (sb-ext:gc :full t))

(defmacro parked-with-object ((group object make) &body check)
  "A fiber that makes OBJECT, parks, and returns the value of CHECK; and a weak pointer to OBJECT.
It is parked when this returns."
  `(let* ((pointer nil)
          (fiber (spawn (,group)
                   (let ((,object ,make))
                     (setf pointer (sb-ext:make-weak-pointer ,object))
                     (fiber-park)
                     ,@check))))
     (loop until (and pointer (eq :parked (fiber-state fiber))) do (sb-thread:thread-yield))
     (cons fiber pointer)))

(defun all-alive-p (pairs)
  (every (lambda (pair) (sb-ext:weak-pointer-value (cdr pair))) pairs))

;;; Prevents: a parked stack that is no root.
(test objects-of-parked-stacks-live
  (on-carriers (n :migration '(nil))
    (with-group (group n)
      (let ((pairs (loop for i below 50
                         collect (let ((i i))
                                   (parked-with-object (group object (list i))
                                     (equal object (list i)))))))
        (full-gc)
        (is (all-alive-p pairs))
        (full-gc)
        (is (all-alive-p pairs))
        (mapc #'fiber-unpark (mapcar #'car pairs))
        (is (all-true-p (join-all (mapcar #'car pairs))))))))

(defun park-with-bindings (i pointers)
  "Bind variables to objects that only the bindings refer to, and park. T if the objects are found
again."
  (let ((*variable* (list i))
        (*other* (make-array 3 :initial-element i)))
    (sb-ext:atomic-push (sb-ext:make-weak-pointer *variable*) (car pointers))
    (sb-ext:atomic-push (sb-ext:make-weak-pointer *other*) (car pointers))
    (fiber-park)
    (and (equal *variable* (list i))
         (equalp *other* (vector i i i)))))

;;; Prevents: a binding stack that is no root, or not updated when its objects move.
(test objects-of-parked-bindings-live
  (on-carriers (n :migration '(nil))
    (with-group (group n)
      (let* ((pointers (list nil))
             (fibers (loop for i below 50
                           collect (let ((i i)) (spawn (group) (park-with-bindings i pointers))))))
        (loop until (and (= 100 (length (car pointers)))
                         (every (lambda (fiber) (eq :parked (fiber-state fiber))) fibers))
              do (sb-thread:thread-yield))
        (loop repeat 3 do (full-gc))
        (is (= 100 (count-alive (car pointers))))
        (mapc #'fiber-unpark fibers)
        (is (all-true-p (join-all fibers)))))))

(defun count-alive (pointers)
  (count-if #'sb-ext:weak-pointer-value pointers))

(defun run-and-forget (group n)
  "Weak pointers to objects of fibers that have ended."
  (let ((pairs (loop for i below n
                     collect (let ((i i))
                               (parked-with-object (group object
                                                          (make-array 100 :initial-element i))
                                 (length object))))))
    (mapc #'fiber-unpark (mapcar #'car pairs))
    (assert (every (lambda (length) (eql length 100)) (join-all (mapcar #'car pairs))))
    (mapcar #'cdr pairs)))

(defun clear-stack (n)
  "Overwrite what is dead on the caller's stack."
  (let ((vector (make-array 10000 :initial-element 0)))
    (declare (dynamic-extent vector))
    (keep vector)
    (when (> n 0) (clear-stack (1- n)))))

;;; Prevents: stacks of ended fibers, or what is kept of the fibers, being roots for ever. A few
;;; words on a conservative stack may always look like addresses.
(test objects-of-ended-fibers-die
  (on-carriers (n :migration '(nil))
    (with-group (group n)
      (let ((pointers (run-and-forget group 200)))
        (clear-stack 2)
        (full-gc)
        (is (< (count-alive pointers) 10))
        ;; with the stacks in use again
        (in-fibers n 200 (lambda (i) (recurse-with-data (mod i 5) i)))
        (full-gc)
        (is (< (count-alive pointers) 10))))))

;;; A fiber that has ended, and that somebody still refers to, holds nothing but its values.
(test ended-fibers-hold-their-values-only
  (with-group (group 1)
    (let* ((pointers '())
           (fibers (loop repeat 100
                         collect (let ((object (make-array 100)))
                                   (push (sb-ext:make-weak-pointer object) pointers)
                                   (spawn (group :initial-bindings (list (cons '*variable* object)))
                                     (length object))))))
      (join-all fibers)
      (clear-stack 2)
      (full-gc)
      (is (< (count-alive pointers) 5))
      (is (every (lambda (fiber) (eql 100 (join fiber))) fibers)))))

;;; Fibers themselves are garbage once they have ended, and also when they never ran.
(test fibers-die
  (with-group (group 2)
    (let ((pointers (loop for i below 200
                          collect (let ((fiber (make-fiber #'list)))
                                    (when (evenp i) (join (submit-fiber group fiber)))
                                    (sb-ext:make-weak-pointer fiber)))))
      (in-fibers 2 10 #'keep)
      (clear-stack 2)
      (full-gc)
      (is (< (count-alive pointers) 10)))))

;;;; Birth and death

;;; Prevents: a stack that the collector sees before it is laid out, or after it was given back.
(test birth-and-death
  (on-carriers (n)
    (while-collecting (10)
      (is (all-true-p
           (with-group (group n)
             (let ((ok t))
               (loop while **collecting**
                     do (unless (all-true-p
                                 (join-all (loop for i below 100
                                                 collect (let ((i i))
                                                           (spawn (group)
                                                             (let ((data (fresh-data i)))
                                                               (when (oddp i) (fiber-yield))
                                                               (intact-p data i)))))))
                          (setf ok nil)))
               (list ok))))))))

;;; Fibers that make fibers, of several stack sizes.
(test birth-in-fibers
  (on-carriers (n)
    (while-collecting (10)
      (with-group (group n)
        (labels ((tree (depth)
                   (if (= depth 0)
                       1
                       (let ((fibers (loop for i below 3
                                           collect (let ((size (* 64 1024 (1+ i))))
                                                     (spawn (group :stack-size size)
                                                       (tree (1- depth)))))))
                         (reduce #'+ (join-all fibers))))))
          (is (= 243 (join (spawn (group) (tree 5))))))))))

(test termination-under-collections
  (on-carriers (n :migration '(nil))
    (while-collecting (10)
      (with-group (group n)
        (let ((started (list 0)) (cleaned (list 0)))
          (loop while **collecting**
                do (let ((fibers
                            (loop for i below 50
                                  collect (let ((i i))
                                            (spawn (group)
                                              (let ((*variable* (fresh-data i)))
                                                (sb-sys:without-interrupts
                                                  (sb-ext:atomic-incf (car started))
                                                  (unwind-protect
                                                       (sb-sys:with-local-interrupts (fiber-park))
                                                    (when (intact-p *variable* i)
                                                      (sb-ext:atomic-incf (car cleaned)))))))))))
                     (mapc #'terminate-fiber fibers)
                     (dolist (fiber fibers)
                       (fiber-join fiber :default nil :timeout *patience*))))
          (is (= (car started) (car cleaned))))))))

;;; Prevents: pages of a stack given back while somebody uses them.
(test stacks-that-give-back-their-pages
  (let ((usual *cached-stack-bytes*))
    (unwind-protect
         (progn (setf *cached-stack-bytes* 0)
                (on-carriers (n)
                  (loop repeat 5
                        do (is (all-true-p
                                (in-fibers n 200
                                           (lambda (i)
                                             (when (= 0 (mod i 10)) (trim-stacks))
                                             (recurse-with-data (mod i 12) i))))))))
      (setf *cached-stack-bytes* usual))))

;;;; Dead pages of idle stacks

(defun descend (n)
  "Go deep, with memory on the alien stack as well."
  (sb-alien:with-alien ((array (array sb-alien:char 60)))
    (setf (sb-alien:deref array 0) 1)
    (if (= n 0) 0 (+ (sb-alien:deref array 0) (descend (1- n))))))

(defun control-base (fiber)
  (+ (sb-thread::thread-control-stack-start fiber)
     (sb-alien:extern-alien "fiber_control_reserve" sb-alien:unsigned)))

(defun resident-bytes (start bytes)
  "How many of the BYTES from START on are in memory."
  (let* ((page (sb-alien:extern-alien "os_reported_page_size" sb-alien:int))
         (n (floor bytes page))
         (flags (make-array n :element-type '(unsigned-byte 8))))
    (sb-sys:with-pinned-objects (flags)
      (unless (= 0 (sb-alien:alien-funcall
                    (sb-alien:extern-alien "mincore" (function sb-alien:int sb-alien:unsigned
                                                               sb-alien:unsigned
                                                               sb-sys:system-area-pointer))
                    start (* n page) (sb-sys:vector-sap flags)))
        (error "mincore(2) failed.")))
    (* page (count-if #'plusp flags))))

(defstruct diver fiber alien-base)

(defun resident-bytes-of (diver)
  "How many bytes of DIVER's control stack, and of its alien stack, are in memory."
  (list (resident-bytes (control-base (diver-fiber diver)) (* 200 1024))
        (resident-bytes (diver-alien-base diver) (* 200 1024))))

(defun dive-and-park (park)
  "Wait having been deep, with data on the stacks. Return whether these are what they were."
  (descend 3000)
  (let ((data (make-array 100 :initial-element 7)))
    (declare (dynamic-extent data))
    (sb-alien:with-alien ((aliens (array sb-alien:char 10000)))
      (dotimes (i 10000) (setf (sb-alien:deref aliens i) 7))
      (funcall park)
      (descend 3000)
      (and (every (lambda (x) (eql x 7)) data)
           (loop for i below 10000 always (= 7 (sb-alien:deref aliens i)))))))

(defun make-parked-diver (group park)
  (let* ((alien-base nil)
         (fiber (spawn (group)
                  (setf alien-base
                        (- (sb-sys:sap-int (sb-vm::current-thread-offset-sap
                                            sb-vm::thread-alien-stack-pointer-slot))
                           (* 224 1024)))
                  (dive-and-park park))))
    (wait-until-parked fiber)
    (make-diver :fiber fiber :alien-base alien-base)))

(test dead-pages-of-idle-stacks-are-given-back
  (dolist (collect (list (lambda () (sb-ext:gc :full t))
                         (lambda () (loop repeat 12 do (sb-ext:gc)))))
    (with-group (group 1)
      (let* ((semaphore (make-semaphore))
             (divers (loop repeat 50
                           collect (make-parked-diver group
                                                      (lambda () (wait-on-semaphore semaphore))))))
        (is (loop for diver in divers
                  always (every (lambda (n) (> n 20000)) (resident-bytes-of diver))))
        (funcall collect)
        (is (equal '((0 0))
                   (remove-duplicates (mapcar #'resident-bytes-of divers) :test #'equal)))
        (signal-semaphore semaphore 50)
        (is (all-true-p (join-all (mapcar #'diver-fiber divers))))))))

;;;; pages of the heap that stacks pin

(defun data-among-garbage (i)
  "Return new data, behind 20 KiB of garbage."
  (dotimes (j 20) (keep (make-array 128 :initial-element j)))
  (fresh-data i))

(defun keep-on-stack (n i wait)
  "Call WAIT with new data on the stack, at N places. Return whether they are what they were."
  (if (= n 0)
      (progn (funcall wait) t)
      (let ((data (data-among-garbage i)))
        (and (keep-on-stack (1- n) (1+ i) wait)
             (intact-p data i)))))

(defun resident-heap-bytes ()
  "How many bytes of the pages of the heap that have objects are in memory."
  (loop with end = (sb-alien:extern-alien "next_free_page" sb-alien:signed)
        for i below end
        unless (= 0 (sb-alien:slot (sb-alien:deref sb-vm::page-table i) 'sb-vm::flags))
          sum (resident-bytes (+ sb-vm:dynamic-space-start (* i sb-vm:gencgc-page-bytes))
                              sb-vm:gencgc-page-bytes)))

;;; Prevents: a page of the collector's, of 32 KiB, in memory for each small object on a stack.
(test dead-pages-of-the-heap-are-given-back
  (let ((n 2000) (semaphore (make-semaphore)))
    (with-group (group 1)
      (sb-ext:gc :full t)
      (let* ((before (resident-heap-bytes))
             (fibers (loop for i below n
                           collect (let ((i i))
                                     (spawn (group)
                                       (keep-on-stack 5 i (lambda ()
                                                            (wait-on-semaphore semaphore))))))))
        (mapc #'wait-until-parked fibers)
        (loop repeat 2 do (sb-ext:gc :full t))
        ;; Some 14 KB; 35 if nothing is given back.
        (is (> 28000 (/ (- (resident-heap-bytes) before) n)))
        ;; The pages are used again, and collected in all ways.
        (loop repeat 5
              do (loop repeat 1000 collect (make-array 1000 :initial-element '(a)))
                 (sb-ext:gc)
                 (sb-ext:gc :gen 3))
        (signal-semaphore semaphore n)
        (is (all-true-p (join-all fibers)))))))

;;; Prevents: a stack that needs new pages whenever its fiber runs.
(test stacks-that-run-keep-their-pages
  (with-group (group 1)
    (let* ((stop nil)
           (semaphore (make-semaphore))
           (diver (make-parked-diver group (lambda ()
                                             (loop until stop do (wait-on-semaphore semaphore)))))
           (before (resident-bytes-of diver)))
      (loop repeat 10
            do (sb-ext:gc)
               (signal-semaphore semaphore)
               (wait-until-parked (diver-fiber diver)))
      (is (equal before (resident-bytes-of diver)))
      (setf stop t)
      (signal-semaphore semaphore)
      (is-true (join (diver-fiber diver))))))

;;;; Collections by fibers

(test full-collections-in-fibers
  (on-carriers (n)
    (is (all-true-p
         (in-fibers n 6 (lambda (i)
                          (let ((data (fresh-data i)))
                            (loop repeat 2
                                  always (progn (full-gc) (fiber-yield) (intact-p data i))))))))))

(test collections-in-many-fibers
  (on-carriers (n)
    (is (all-true-p
         (in-fibers n 30 (lambda (i)
                           (let ((data (fresh-data i)))
                             (loop repeat 5
                                   always (progn (sb-ext:gc)
                                                 (fiber-yield)
                                                 (intact-p data i))))))))))

(defun collect-at-depth (depth i)
  (let ((data (list i)))
    (and (if (= depth 0)
             (progn (sb-ext:gc) (sb-sys:scrub-control-stack) (fiber-yield) (sb-ext:gc :gen 1) t)
             (collect-at-depth (1- depth) i))
         (equal data (list i)))))

;;; Prevents: scrubbing of what is below the stack pointer that runs into a guard, or beyond.
(test collections-at-all-depths
  (on-carriers (n :counts '(1 2))
    (with-group (group n)
      (is (all-true-p (join-all (loop for i below 20
                                      collect (let ((i i))
                                                (spawn (group :stack-size (* 64 1024))
                                                  (collect-at-depth (* 20 i) i))))))))))

(test functions-after-collections
  (let ((count 0))
    (push (lambda () (incf count)) sb-ext:*after-gc-hooks*)
    (unwind-protect
         (progn (is (all-true-p (in-fibers 2 10 (lambda (i) (keep i) (sb-ext:gc) t))))
                (loop repeat 1000
                      until (plusp count)
                      do (sb-ext:gc) (sleep 1/100))
                (is (plusp count)))
      (pop sb-ext:*after-gc-hooks*))))

;;;; Verification: the collector checks the heap and the roots, before and after, and ends the
;;;; process if something is wrong

(defmacro verified-generation ()
  `(sb-alien:extern-alien "verify_gens" sb-alien:char))

(defmacro verified-before-p ()
  `(sb-alien:extern-alien "pre_verify_gen_0" sb-alien:int))

(defun call-with-verification (function)
  (let ((usual (verified-generation)))
    (unwind-protect
         (progn (setf (verified-generation) 0
                      (verified-before-p) 1)
                (funcall function))
      (setf (verified-generation) usual
            (verified-before-p) 0))))

(test verification
  (call-with-verification
   (lambda ()
     (while-collecting (6)
       (is (all-true-p (in-fibers 2 100 (lambda (i) (recurse-with-data (mod i 12) i)))))))))
