;;;; what DESCRIBE and INSPECT tell of fibers, groups and their parts

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; What is told of an object is a list of facts, conses of a string and a value. It is collected
;;; while the object is in use: each fact was true a moment ago, not all at the same one. A slot
;;; that another thread changes is read once.

(defun facts (&rest labels-and-values)
  "An alist of those facts that have a value."
  (loop for (label value) on labels-and-values by #'cddr
        when value collect (cons label value)))

(defun time-since-left (fiber)
  "How long ago FIBER was left, in words: as exactly as its scheduler knew the time then. NIL if the
cycle counters of two processors do not agree."
  (let ((cycles (cycles-since (fiber-left fiber) (%cycle-count))))
    (and (< cycles (ash 1 62))
         (format nil "about ~,3F s ago" (/ (float cycles) *cycles-per-millisecond* 1000)))))

(defun seconds-to-come (deadline)
  (if (= deadline most-positive-fixnum)
      "none"
      (format nil "in ~,3F s" (float (/ (- deadline (fiber-now)) 1000000000)))))

(defun stack-in-use (fiber)
  "How much of its control stack FIBER uses, in words; NIL if it is running or has none."
  (let ((context (fiber-context fiber)) ; its memory stays readable when FIBER has ended
        (size (- (fiber-control-stack-end fiber) (fiber-control-stack-start fiber)
                 (extern-alien "fiber_control_reserve" unsigned))))
    (unless (or (= context 0) (fiber-carrier fiber))
      (let ((used (- (fiber-control-stack-end fiber)
                     (context-word (int-sap context) control-stack-pointer))))
        (when (<= 0 used size)
          (format nil "~D of ~D bytes" used size))))))

(defun holder (reason)
  "The owner of the mutex that REASON, a second value of FIBER-STATE, has, or NIL."
  (when (typep reason '(cons (eql :mutex) (cons sb-thread:mutex null)))
    (sb-thread:mutex-owner (second reason))))

(defun carrier-of-scheduler (scheduler)
  (find scheduler (fiber-group-carriers (scheduler-group scheduler)) :key #'carrier-scheduler))

(defun fiber-of-carrier (carrier)
  (find carrier (list-all-fibers) :key #'fiber-carrier))

(defun chain-length (chain)
  (loop for fiber = chain then (fiber-next fiber)
        while fiber count t))

(defun fiber-facts (fiber)
  (multiple-value-bind (state reason) (fiber-state fiber)
    (let ((result (fiber-result fiber))
          (parked (eq state :parked)))
      (facts "Name" (fiber-name fiber)
             "State" state
             "Waits for" reason
             "Held by" (holder reason)
             "Parked" (and parked (time-since-left fiber))
             "Pinned" (and (fiber-home fiber) t)
             "Carrier" (fiber-carrier fiber)
             "Group" (fiber-group fiber)
             "Scope" (child-scope-of fiber)
             "Control stack" (or (stack-in-use fiber)
                                 (format nil "~D bytes" (fiber-stack-size fiber)))
             "Function" (and (eq state :new) (fiber-function fiber))
             "Initial bindings" (fiber-initial-bindings fiber)
             "Interruptions to come" (length (fiber-interruptions fiber))
             "Values" (and (eq state :finished) result)
             "Ended by" (fiber-failure fiber)))))

(defun scope-tree (scope)
  "The fibers of SCOPE; one that executes bodies of scopes is in a list, with what these have."
  (let ((fibers (children-of-scope scope)))
    (append (loop for fiber in (subseq fibers 0 (min 100 (length fibers)))
                  for scopes = (scopes-of-fiber fiber)
                  collect (if scopes
                              (cons fiber (loop for inner in scopes
                                                collect (cons inner (scope-tree inner))))
                              fiber))
            (when (> (length fibers) 100)
              (list (format nil "and ~D more" (- (length fibers) 100)))))))

(defun scope-facts (scope)
  (facts "Name" (scope-name scope)
         "Body executed by" (scope-owner scope)
         "Body" (scope-body scope)
         "Inside of" (scope-outer scope)
         "Group" (scope-group scope)
         "May yet be added" (let ((permits (scope-permits scope)))
                              (and permits (sb-thread:semaphore-count permits)))
         "Cancelled for" (scope-reason scope)
         "Failures" (scope-failures scope)
         "Fibers alive" (scope-alive scope)
         "Fibers" (scope-tree scope)))

(defun group-facts (group)
  (destructuring-bind (&key carriers spares threads fibers switches steals stuck-now stuck-ever)
      (fiber-group-statistics group)
    (facts "Name" (fiber-group-name group)
           "State" (fiber-group-state group)
           "Takes fibers" (if (logtest +closed+ (fiber-group-population group)) "no" "yes")
           "Fibers alive" fibers
           "Fibers in the injector" (chain-length (injector-first (fiber-group-injector group)))
           "Carriers" carriers
           "Processors" (format nil "~D, by ~(~A~)" (fiber-group-processors group)
                                (fiber-group-limit group))
           "Threads" threads
           "Spare carriers" spares
           "Switches" switches
           "Steals" steals
           "Carriers stuck" (format nil "~D now, ~D ever" stuck-now stuck-ever)
           "Idle pollers" (format nil "#b~B" (fiber-group-idle group))
           "Carriers searching" (fiber-group-searching group)
           "Schedulers" (coerce (fiber-group-schedulers group) 'list))))

(defun scheduler-facts (scheduler)
  (let ((poller (scheduler-poller scheduler)))
    (facts "Group" (scheduler-group scheduler)
           "Carrier" (or (carrier-of-scheduler scheduler) "none")
           "Fibers queued" (run-queue-length (scheduler-queue scheduler))
           "Deadlines" (scheduler-deadlines scheduler)
           "Poller" (format nil "number ~D, epoll descriptor ~D, ~[awake~;asleep~;woken~;freed~]"
                            (poller-index poller) (poller-epoll poller) (poller-sleep poller))
           "Fibers run since it looked around" (scheduler-ticks scheduler)
           "Steals" (scheduler-steals scheduler))))

(defun carrier-facts (carrier)
  (facts "Group" (carrier-group carrier)
         "Thread" (carrier-thread carrier)
         "Fiber" (or (fiber-of-carrier carrier) "none")
         "Scheduler" (or (carrier-scheduler carrier) "none")
         "Spare" (carrier-spare carrier)
         "Stuck" (and (= (carrier-epoch carrier) (carrier-stuck-epoch carrier)) "yes")
         "Fibers only for it" (chain-length (carrier-inbox carrier))
         "Fibers preempted there" (chain-length (injector-first (carrier-preempted carrier)))
         "Switches" (ash (carrier-epoch carrier) -1)))

(defun heap-facts (heap)
  (let ((count (deadline-heap-count heap))
        (entries (deadline-heap-entries heap)))
    (facts "Deadlines" count
           "Nearest" (seconds-to-come (deadline-heap-nearest heap))
           "Alarms" (length (heap-alarms heap))
           "Some of those who wait" (remove 0 (coerce (subseq entries 0
                                                              (min 10 count (length entries)))
                                                      'list)))))

(macrolet ((def (type function article)
             `(progn
                (defmethod describe-object ((object ,type) stream)
                  (sb-impl::print-standard-describe-header object stream)
                  (loop for (label . value) in (,function object)
                        do (format stream "~%  ~A: ~:[~S~;~A~]" label (stringp value) value))
                  (terpri stream))
                (defmethod sb-impl::inspected-parts ((object ,type))
                  (values ,(format nil "The object is ~A.~%" article) t (,function object))))))
  (def fiber fiber-facts "a fiber")
  (def fiber-group group-facts "a group of fibers")
  (def scope scope-facts "the scope of some fibers")
  (def scheduler scheduler-facts "the scheduler of a carrier")
  (def carrier carrier-facts "a carrier of fibers")
  (def deadline-heap heap-facts "the deadlines of a scheduler"))

;;; The slots of these objects refer to all there is.
(macrolet ((def (type &optional control &rest arguments)
             `(defmethod print-object ((object ,type) stream)
                (print-unreadable-object (object stream :type t :identity t)
                  ,@(when control
                      `((format stream ,control ,@arguments)))))))
  (def scheduler "~D" (poller-index (scheduler-poller object)))
  (def carrier "~:[~;spare~]" (carrier-spare object))
  (def deadline-heap "~D deadline~:P" (deadline-heap-count object))
  (def run-queue "~D fiber~:P" (run-queue-length object))
  (def poller "~D" (poller-index object))
  (def fd-cell "~D" (fd-cell-fd object))
  (def bucket)
  (def injector)
  (def alarm)
  (def blocking-pool)
  (def blocking-call))
