;;;; looking into a fiber from outside

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;;; printing

;;; A fiber may wait for another fiber that waits for it, or for what such a fiber owns, and its
;;; values may contain the fiber itself. *PRINT-LEVEL* does not count that: when a fiber is printed
;;; inside another one, what it waits for and its values are not printed.
(defvar *printing-inside-a-fiber* nil)
(declaim (type boolean *printing-inside-a-fiber*))

(defmethod print-object ((fiber fiber) stream)
  (print-unreadable-object (fiber stream :type t :identity t)
    (multiple-value-bind (state reason) (fiber-state fiber)
      (format stream "~@[~S ~]~(~A~)" (fiber-%name fiber) state)
      (unless *printing-inside-a-fiber*
        (let ((*printing-inside-a-fiber* t)
              (*print-array* nil)
              (*print-length* 2)
              (*print-level* 4))
          (format stream "~@[ on ~A~]" (wait-reason-in-words reason))
          (when (eq state :finished)
            (print-values (fiber-result fiber) stream)))))))

(defun print-values (values stream)
  "What is printed of a thread that has returned VALUES."
  (format stream "~:[ no values~; values: ~:*~{~S~^, ~}~]" values))

;;;; lists and numbers

(declaim (ftype (sfunction () list) list-all-fibers))
(defun list-all-fibers ()
  "Return a fresh list of all fibers of the process that have been submitted and have not ended. As
with SB-THREAD:LIST-ALL-THREADS, some may have ended before the list is returned."
  (let ((fibers '()))
    (loop for block across *fiber-table*
          when (simple-vector-p block)
          do (loop for fiber across block
                   when (fiber-p fiber) do (push fiber fibers)))
    fibers))

(declaim (ftype (sfunction (t) list) fiber-group-statistics))
(defun fiber-group-statistics (group)
  "Return a property list of numbers about GROUP, which START-FIBERS returned, or which is T for
the default group. They were true a moment ago, though not all at the same one.

  :CARRIERS
    how many carriers the group was started with
  :SPARES
    spare carriers that have nothing to do
  :THREADS
    threads that are carriers, spares and stuck ones included
  :FIBERS
    fibers that have been submitted and have not ended
  :SWITCHES
    how often a fiber was left for another or for the scheduler
  :STEALS
    how often a carrier took work from another
  :STUCK-NOW
    carriers that are known to be stuck
  :STUCK-EVER
    how often a carrier was found stuck"
  (let* ((group (group-argument group))
         (carriers (fiber-group-carriers group)))
    (list :carriers (length (fiber-group-schedulers group))
          :spares (count-used (fiber-group-spares group))
          :threads (length carriers)
          :fibers (fiber-group-alive group)
          :switches (ash (+ (fiber-group-past-epochs group)
                            (loop for carrier in carriers sum (carrier-epoch carrier)))
                         -1)
          :steals (loop for scheduler across (fiber-group-schedulers group)
                        sum (scheduler-steals scheduler))
          :stuck-now (count-if (lambda (carrier)
                                 (= (carrier-epoch carrier) (carrier-stuck-epoch carrier)))
                               carriers)
          :stuck-ever (fiber-group-stuck group))))

;;;; backtraces

(declaim (ftype (sfunction (fiber &key (:stream t) (:count t)) null) print-fiber-backtrace))
(defun print-fiber-backtrace (fiber &key (stream *debug-io*) (count 1000))
  "Print FIBER, with what it waits for, and its backtrace, at most COUNT frames, by default 1000,
to STREAM, by default *DEBUG-IO*, and return NIL. The first frame is that of what FIBER has called
and waits in, or else one of its own functions. Another fiber than the running one is interrupted,
makes the backtrace itself, and is waited for; if it is in foreign code, until it has returned."
  (cond ((eq fiber *current-thread*)
         (format stream "~&Backtrace of ~S~%" fiber)
         (print-user-frames 'print-fiber-backtrace stream count))
        ((= (fiber-phase-only fiber) +new+)
         (format stream "~S has not begun.~%" fiber))
        (t
         (let* ((before (format nil "Backtrace of ~S~%" fiber)) ; later it runs
                (text (backtrace-made-by fiber count)))
           (if text
               (format stream "~&~A~A" before text)
               (format stream "~S has ended.~%" fiber)))))
  nil)

(defun print-user-frames (innermost stream count)
  "Print at most COUNT frames of this thread to STREAM, without those up to that of INNERMOST, the
name of a function, and without the system's frames that follow."
  (let* ((frames (frames-below innermost))
         (first (or (find-if-not #'system-frame-p frames)
                    ;; The user's have been left by tail calls.
                    (find-if-not #'our-frame-p frames)
                    (first frames))))
    (sb-debug:print-backtrace :stream stream :count count :print-thread nil
                              :from (or first :current-frame))))

(defun frames-below (name)
  (let ((frames (loop for frame = (sb-di:top-frame) then (sb-di:frame-down frame)
                      while frame collect frame)))
    (member name (member name frames :key #'name-of-frame) :key #'name-of-frame :test #'neq)))

(defun name-of-frame (frame)
  "The symbol that names the function of FRAME, or the function that this one is inside of; NIL if
FRAME is that of no Lisp function."
  (declare (notinline sb-di:frame-debug-fun)) ; which is defined later
  (labels ((walk (name)
             (cond ((symbolp name) name)
                   ((consp name)
                    (let ((in (member :in name)))
                      (walk (if in (second in) (second name))))))))
    (walk (sb-di:debug-fun-name (sb-di:frame-debug-fun frame)))))

(defun our-frame-p (frame)
  (let ((name (name-of-frame frame)))
    (or (null name) (eq (symbol-package name) (load-time-value (find-package "SB-FIBER"))))))

;;; SLEEP, CONDITION-WAIT or READ-LINE tell the user something; what they have called does not.
(defun system-frame-p (frame)
  (let* ((name (name-of-frame frame))
         (package (and name (symbol-package name))))
    (or (null name)
        (and package
             (system-package-p package)
             (or (member package (load-time-value
                                  (mapcar #'find-package
                                          '("SB-KERNEL" "SB-SYS" "SB-INT" "SB-IMPL" "SB-UNIX"
                                            "SB-VM" "SB-ALIEN" "SB-DI" "SB-DEBUG" "SB-C"))))
                 (neq :external (nth-value 1 (find-symbol (symbol-name name) package))))))))

(defun backtrace-made-by (fiber count)
  "The text of a backtrace of FIBER, which is interrupted to make it, or NIL if it has ended
before."
  (let* ((text nil)
         (done (sb-thread:make-semaphore))
         (asked (%interrupt-fiber fiber
                                  (lambda ()
                                    (setf text (with-output-to-string (out)
                                                 (print-user-frames 'call-interruption out count)))
                                    (sb-thread:signal-semaphore done)))))
    (when asked
      (loop until (or (sb-thread:wait-on-semaphore done :timeout 1/10)
                      (not (fiber-alive-p fiber))))
      text)))

;;;; whose stack

(defun fiber-on-stack (address)
  "The fiber on whose control stack ADDRESS is, or NIL."
  (declare (type word address))
  (let* ((index (alien-funcall (extern-alien "fiber_index_at" (function int unsigned)) address))
         (fiber (and (>= index 0) (fiber-at index))))
    (and fiber
         (<= (fiber-control-stack-start fiber) address)
         (< address (fiber-control-stack-end fiber))
         fiber)))

;;;; the bindings of a fiber, for others to look at

;;; Where the value of a fiber's binding is depends on what the fiber does just now: while it
;;; is mounted, in the storage of the OS thread; else in its newest entry for the symbol on its
;;; binding stack. It may be mounted, left and resumed elsewhere at any time, and so the
;;; world is stopped to look: this is for debugging, and need not be fast.

(defun call-with-stopped-world (function)
  "Call FUNCTION, which must neither allocate nor wait, while all other threads are stopped."
  (declare (function function) (dynamic-extent function))
  (loop until (without-gcing
                (when (= 1 (alien-funcall (extern-alien "try_acquire_gc_lock" (function int))))
                  (alien-funcall (extern-alien "gc_stop_the_world" (function void)))
                  (alien-funcall (extern-alien "release_gc_lock" (function void)))
                  (funcall function)
                  (alien-funcall (extern-alien "gc_start_the_world" (function void)))
                  t))))

(declaim (ftype (sfunction (fiber word) word) find-on-binding-stack))
(defun find-on-binding-stack (fiber tls-index)
  "The address of the value in the newest entry for TLS-INDEX of FIBER, which is suspended, or 0."
  (let* ((context (context-of fiber))
         (start (context-word context binding-stack-start))
         (entry (context-word context binding-stack-pointer)))
    (declare (type word start entry))
    (loop
      (when (= entry start) (return 0))
      (decf entry (* sb-vm:binding-size sb-vm:n-word-bytes))
      (when (= tls-index (sap-ref-32 (int-sap entry)
                                     (ash sb-vm:binding-symbol-slot sb-vm:word-shift)))
        (return (+ entry (ash sb-vm:binding-value-slot sb-vm:word-shift)))))))

(declaim (ftype (sfunction (fiber) word) thread-structure-that-runs))
(defun thread-structure-that-runs (fiber)
  "The address of the structure of the thread that runs FIBER, or 0. While the world is stopped."
  (flet ((slot-of (thread slot) (sap-ref-word (int-sap thread) (ash slot sb-vm:word-shift))))
    (declare (inline slot-of))
    (let ((thread (extern-alien "all_threads" unsigned)))
      (declare (type word thread))
      (loop
        (when (or (= thread 0)
                  (= (slot-of thread sb-vm::thread-fiber-context-slot) (fiber-context fiber)))
          (return thread))
        (setf thread (slot-of thread sb-vm::thread-next-slot))))))

(declaim (ftype (sfunction (word word) word) find-in-thread))
(defun find-in-thread (thread tls-index)
  "The address of the value at TLS-INDEX in the THREAD, or 0 if there is none."
  (let ((address (+ thread tls-index)))
    (if (= (sap-ref-word (int-sap address) 0) sb-vm:no-tls-value-marker) 0 address)))

(declaim (ftype (sfunction (fiber word) word) find-binding))
(defun find-binding (fiber tls-index)
  "The address of the value of the symbol with TLS-INDEX in FIBER, or 0 if FIBER has not bound it."
  (if (or (= tls-index 0) (= (fiber-context fiber) 0))
      0
      (let ((state (stack-state fiber))
            (thread (if (eq fiber *current-thread*)
                        (sap-int (sb-vm::current-thread-offset-sap sb-vm::thread-this-slot))
                        (thread-structure-that-runs fiber))))
        (cond ((/= thread 0) (find-in-thread thread tls-index))
              ((= state sb-vm::fiber-stack-free) 0) ; it has not begun
              (t (find-on-binding-stack fiber tls-index))))))

(defun call-with-binding (symbol fiber function)
  "Call FUNCTION with the address of the value of SYMBOL in FIBER, and return its values, or NIL and
why there is none. FUNCTION must neither allocate nor wait."
  (declare (function function) (dynamic-extent function))
  (let ((result nil)
        (status nil)
        (tls-index (symbol-tls-index symbol)))
    (flet ((look ()
             (let ((address (find-binding fiber tls-index)))
               (setf (values result status)
                     (cond ((/= address 0) (funcall function address))
                           ((fiber-alive-p fiber) (values nil :no-tls-value))
                           (t (values nil :thread-dead)))))))
      (declare (dynamic-extent #'look))
      (if (eq fiber *current-thread*)
          (without-interruptions (look)) ; one that parks moves the fiber to another thread
          (call-with-stopped-world #'look)))
    (values result status)))

(defun symbol-value-in-fiber (symbol fiber)
  "What SYMBOL-VALUE-IN-THREAD is made of: the value, and :OK or what is wrong."
  (flet ((value (address)
           (declare (type word address)) ; a SAP would be consed for the call
           (if (= sb-vm:unbound-marker-widetag (sap-ref-8 (int-sap address) 0))
               (values nil :unbound-in-thread)
               (values (sap-ref-lispobj (int-sap address) 0) :ok))))
    (declare (dynamic-extent #'value))
    (call-with-binding symbol fiber #'value)))

(defun set-symbol-value-in-fiber (symbol fiber new-value)
  (flet ((set-value (address)
           (declare (type word address))
           (setf (sap-ref-lispobj (int-sap address) 0) new-value)
           (setf (stack-state fiber) sb-vm::fiber-stack-active) ; NEW-VALUE may be younger
           (values new-value :ok)))
    (declare (dynamic-extent #'set-value))
    (call-with-binding symbol fiber #'set-value)))

;;;; what keeps an object alive

(defun carrier-whose-context-is (address)
  (dolist (group *groups*)
    (dolist (carrier (fiber-group-carriers group))
      (when (= (carrier-context carrier) address)
        (return-from carrier-whose-context-is carrier)))))

(defun thread-of-root (address)
  "The fiber or thread whose stack SEARCH-ROOTS has found, or NIL: ADDRESS is 0, or that of the
context of a stack, or of the structure of a thread. A fiber may have ended since, and then is not
found any more."
  (let ((index (alien-funcall (extern-alien "fiber_index_at" (function int unsigned)) address)))
    (cond ((= address 0) nil)
          ((>= index 0) (fiber-at index))
          ((awhen (carrier-whose-context-is address) (carrier-thread it)))
          (t (sap-ref-lispobj (int-sap address)
                              (ash sb-vm::thread-lisp-thread-slot sb-vm:word-shift))))))
