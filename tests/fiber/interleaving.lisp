;;;; run queue, park cell, interruptions, parking lot, waiter map, sleeping carriers: all orders of their steps

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(dolist (file '("explore" "source" "machine"))
  (load (merge-pathnames (concatenate 'string "interleavings/" file ".lisp") *load-truename*)))

(def-suite* interleaving)

;;; The functions are those of src/code, see interleavings/source.lisp; those that they call
;;; and that are not read from there are in interleavings/machine.lisp. A test of a bug
;;; plants it: it is a test of the history above it, that this would notice.

(defmacro holds (history &rest options)
  `(multiple-value-bind (orders failure) (explore ,history ,@options)
     (is (null failure) "~A" failure)
     ;; With one order only nothing has been tried.
     (is (> orders 1))))

(defmacro fails (history &rest options)
  `(is (stringp (nth-value 1 (explore ,history ,@options)))))

;;;; the explorer itself

(defun count-orders (history &rest options)
  (values (apply #'explore history options)))

(test orders-are-counted-once
  (flet ((write-thrice (address)
           (loop repeat 3 do (write-word address 1)))
         (read-thrice (address)
           (loop repeat 3 do (read-word address))))
    (is (= 20 (count-orders (history () (("a" (write-thrice 0)) ("b" (write-thrice 0)))))))
    (is (= 1 (count-orders (history () (("a" (write-thrice 0)) ("b" (write-thrice 1)))))))
    (is (= 1 (count-orders (history () (("a" (read-thrice 0)) ("b" (read-thrice 0)))))))
    (is (= 4 (count-orders (history () (("a" (read-thrice 0)) ("b" (write-word 0 1)))))))
    (is (= 2 (count-orders (history () (("a" (write-thrice 0)) ("b" (write-thrice 0))))
                           :switches 0)))))

(defun results-of-all-orders (first second &rest options)
  (let ((all '()))
    (apply #'explore
           (history ((a nil) (b nil))
               (("a" (setf a (funcall first)))
                ("b" (setf b (funcall second))))
             (pushnew (list a b) all :test #'equal)
             nil)
           options)
    all))

(test orders-under-a-lock-do-not-count
  (flet ((write-thrice (bucket)
           (steps::with-tiny-lock ((steps::bucket-lock bucket))
             (loop repeat 3 do (write-word 0 1)))))
    (is (= 2 (count-orders (history ((bucket (sb-fiber::make-bucket)))
                               (("a" (write-thrice bucket)) ("b" (write-thrice bucket)))))))
    (is (= 4 (count-orders (history ((bucket (sb-fiber::make-bucket)))
                               (("a" (write-thrice bucket)) ("b" (write-word 0 1)))))))
    ;; Each has a lock of its own, which is no use.
    (is (= 20 (count-orders (history ()
                                (("a" (write-thrice (sb-fiber::make-bucket)))
                                 ("b" (write-thrice (sb-fiber::make-bucket))))))))))

;;; What Intel's and AMD's manuals promise: a read may be early, all else is in order.
(test store-buffers
  (flet ((both-read (&rest options)
           (apply #'results-of-all-orders
                  (lambda () (write-word 0 1) (read-word 1))
                  (lambda () (write-word 1 1) (read-word 0))
                  options))
         (pass-message (&rest options)
           (apply #'results-of-all-orders
                  (lambda () (write-word 0 1) (write-word 1 1))
                  (lambda () (list (read-word 1) (read-word 0)))
                  options)))
    (is (not (member '(0 0) (both-read) :test #'equal)))
    (is (member '(0 0) (both-read :store-buffers t) :test #'equal))
    (is (not (member '(1 (1 0)) (pass-message :store-buffers t) :test #'equal)))))

;;;; the source

(test all-that-is-called-is-read
  (is (null (missing-definitions))))

;;;; the run queue

(defun make-test-queue (&rest objects)
  (let ((queue (sb-fiber::make-run-queue)))
    (dolist (object objects queue)
      (let ((tail (sb-fiber::run-queue-tail queue)))
        (setf (svref (sb-fiber::run-queue-ring queue) (steps::run-queue-place tail)) object
              (sb-fiber::run-queue-tail queue) (1+ tail))))))

(defun queue-contents (queue)
  (loop for n from (sb-fiber::run-queue-head queue) below (sb-fiber::run-queue-tail queue)
        collect (svref (sb-fiber::run-queue-ring queue) (steps::run-queue-place n))))

(defun queue-problem (put &rest lists)
  "LISTS are what was taken and what is left, in the order in which it was put; PUT is all that
was put."
  (or (problem (set-exclusive-or put (reduce #'append lists))
               "Of ~S something is not in ~S." put lists)
      (problem (/= (length put) (reduce #'+ lists :key #'length))
               "Of ~S something is twice in ~S." put lists)
      (problem (notevery (lambda (list) (equal list (sort (copy-list list) #'<))) lists)
               "The order of ~S is not that of putting." lists)))

;;; Owner and thief want the last object; the place of what the thief takes is used again.
(defparameter *take-and-steal*
  (history ((victim (make-test-queue 1 2 3 4))
            (thief (make-test-queue))
            (put '(1 2 3 4))
            (taken '())
            (stolen '()))
      (("owner" (flet ((take () (let ((object (steps::run-queue-take victim)))
                                  (when object (push object taken))))
                       (put (object) (when (steps::run-queue-put victim object)
                                       (push object put))))
                  (take) (put 5) (put 6) (take) (take)))
       ("thief" (let ((object (steps::run-queue-steal victim thief)))
                  (when object (push object stolen)))))
    (queue-problem put (reverse taken) (append stolen (queue-contents thief))
                   (queue-contents victim))))

;;; The second thief steals what the first one is just getting.
(defparameter *steal-from-thief*
  (history ((victim (make-test-queue 1 2 3 4))
            (first (make-test-queue))
            (second (make-test-queue))
            (taken '()) (first-got '()) (second-got '()))
      (("owner" (setf taken (list (steps::run-queue-take victim))))
       ("first" (setf first-got (list (steps::run-queue-steal victim first))))
       ("second" (setf second-got (list (steps::run-queue-steal first second)))))
    (queue-problem '(1 2 3 4) (remove nil taken)
                   (remove nil first-got) (queue-contents first)
                   (remove nil (append second-got (queue-contents second)))
                   (queue-contents victim))))

(defparameter *two-thieves*
  (history ((victim (make-test-queue 1 2 3))
            (first (make-test-queue))
            (second (make-test-queue))
            (put '(1 2 3))
            (taken '()) (first-got '()) (second-got '()))
      (("owner" (when (steps::run-queue-put victim 4) (push 4 put))
                (setf taken (list (steps::run-queue-take victim))))
       ("first" (setf first-got (list (steps::run-queue-steal victim first))))
       ("second" (setf second-got (list (steps::run-queue-steal victim second)))))
    (queue-problem put (remove nil taken)
                   (remove nil (append first-got (queue-contents first)))
                   (remove nil (append second-got (queue-contents second)))
                   (queue-contents victim))))

(test each-object-is-taken-once
  (holds *take-and-steal* :store-buffers t)
  (holds *two-thieves*)
  (holds *steal-from-thief* :store-buffers t))

(test bug-reading-a-place-after-taking-it
  (with-changes (("RUN-QUEUE-STEAL"
               "(when (eq (cas (run-queue-head victim) head (truly-the fixnum (+ head n))) head)
                  (barrier (:write))
                  (setf (run-queue-tail thief) (truly-the fixnum (+ tail n)))
                  (return (run-queue-take thief)))"
               "(when (eq (cas (run-queue-head victim) head (truly-the fixnum (+ head n))) head)
                  (dotimes (i n)
                    (setf (svref (run-queue-ring thief) (run-queue-place (+ tail i)))
                          (svref (run-queue-ring victim) (run-queue-place (+ head i)))))
                  (setf (run-queue-tail thief) (truly-the fixnum (+ tail n)))
                  (return (run-queue-take thief)))"))
    (fails *take-and-steal*)))

(test bug-taking-without-compare-and-swap
  (with-changes (("RUN-QUEUE-TAKE"
               "(eq (cas (run-queue-head queue) head (truly-the fixnum (1+ head))) head)"
               "(progn (setf (run-queue-head queue) (1+ head)) t)"))
    (fails *take-and-steal*)))

(test bug-publishing-a-place-before-it-is-filled
  (with-changes (("RUN-QUEUE-STEAL"
               "(dotimes (i n)
                  (setf (svref (run-queue-ring thief) (run-queue-place (+ tail i)))
                        (svref (run-queue-ring victim) (run-queue-place (+ head i)))))"
               "(setf (run-queue-tail thief) (+ tail n))"
               "(return (run-queue-take thief))"
               "(dotimes (i n (return (run-queue-take thief)))
                  (setf (svref (run-queue-ring thief) (run-queue-place (+ tail i)))
                        (svref (run-queue-ring victim) (run-queue-place (+ head i)))))"))
    (fails *steal-from-thief*)))

(test bug-clearing-a-place-that-may-not-be-ours
  (with-changes (("RUN-QUEUE-TAKE"
               "(object (svref (run-queue-ring queue) place))"
               "(object (prog1 (svref (run-queue-ring queue) place)
                          (setf (svref (run-queue-ring queue) place) 0)))"))
    (fails *take-and-steal*)))

;;;; park and unpark

;;; The fiber waits for both words to be set.
(defparameter *two-wakers*
  (history ((fiber (make-test-fiber)))
      (("fiber" (in-test-fiber (fiber)
                  (loop until (and (= 1 (read-word 0)) (= 1 (read-word 1)))
                        do (steps::park nil nil))))
       ("first" (write-word 0 1) (steps::unpark fiber))
       ("second" (write-word 1 1) (steps::unpark fiber)))
    (phase-problem fiber)))

(defparameter *waker-and-deadline*
  (history ((fiber (make-test-fiber)))
      (("fiber" (in-test-fiber (fiber)
                  (loop until (or (= 1 (read-word 0)) (steps::deadline-passed-p 10))
                        do (steps::park nil 10)
                           (unless (= -1 (sb-fiber::fiber-heap-index fiber))
                             (fail-history "The fiber has left its deadline behind.")))))
       ("waker" (write-word 0 1) (steps::unpark fiber))
       ("time" (pass-time)))
    (or (phase-problem fiber) (heap-problem))))

(test no-unpark-is-lost
  (holds *two-wakers* :store-buffers t)
  (holds *waker-and-deadline*))

(test bug-parked-before-the-context-is-saved
  (with-changes (("PARK" "(phase-becomes-p fiber +active+ +parking+)"
                      "(phase-becomes-p fiber +active+ +parked+)")
              ("FINISH-PARKING" "(unless (phase-becomes-p fiber +parking+ +parked+)
                                   (setf (fiber-phase fiber) +active+)
                                   (make-runnable fiber))"
                                "nil"))
    (fails *two-wakers*)))

(test bug-no-permit-for-who-is-not-parked
  (with-changes (("UNPARK" "(phase-becomes-p fiber phase (logior phase +permit+))" "t"))
    (fails *two-wakers*)))

(test bug-the-successor-does-not-see-the-permit
  (with-changes (("FINISH-PARKING" "(phase-becomes-p fiber +parking+ +parked+)"
                                "(setf (fiber-phase fiber) +parked+)"))
    (fails *two-wakers*)))

(test bug-two-wakers-queue-a-fiber
  (with-changes (("UNPARK" "(phase-becomes-p fiber +parked+ +active+)"
                        "(setf (fiber-phase fiber) +active+)"))
    (fails *two-wakers*)))

(test bug-a-deadline-stays-behind
  (with-changes (("PARK" "(heap-remove fiber)" "nil"))
    (fails *waker-and-deadline*)))

;;;; interruptions

;;; A fiber is left and mounted again, in place of one that is given to AFTER-SWITCH, looks for
;;; interruptions, and then computes: what is queued later must be signalled. A signal that comes
;;; while it is not mounted finds another.
(defun make-mounted-fiber (carrier)
  (let ((fiber (make-test-fiber)))
    (setf (sb-fiber::fiber-carrier fiber) carrier
          (signal-state fiber) :elsewhere) ; it is about to leave, with interrupts off
    fiber))

(defun be-left-and-mounted (fiber carrier predecessor action)
  (setf (steps::fiber-carrier fiber) nil)
  (let ((steps::*carrier* carrier))
    (setf (sb-fiber::carrier-predecessor carrier) predecessor
          (sb-fiber::carrier-action carrier) action)
    (perform :write fiber 'signal (lambda () (setf (signal-state fiber) :none)))
    (setf (steps::fiber-carrier fiber) carrier)
    (steps::after-switch)
    (steps::see-interruptions fiber)))

(defmacro interruption-history (&rest predecessor-and-action)
  `(history ((carrier (make-test-carrier (make-test-group 1) 0))
             (fiber (make-mounted-fiber carrier)))
       (("fiber" (be-left-and-mounted fiber carrier ,@predecessor-and-action))
        ("interrupter" (in-test-fiber (nil) (steps::%interrupt-fiber fiber #'list))))
     (problem (and (sb-fiber::fiber-interruptions fiber)
                   (not (eq (signal-state fiber) :sent)))
              "The interruption is queued, and nobody will look.")))

(defparameter *interruption* (interruption-history nil nil))
(defparameter *interruption-after-an-end* (interruption-history (make-test-fiber) :end))
(defparameter *interruption-after-parking*
  (interruption-history (make-test-fiber :phase sb-fiber::+parking+ :stack :suspended) :park))

(test no-interruption-is-lost
  (dolist (history (list *interruption* *interruption-after-an-end* *interruption-after-parking*))
    (holds history :store-buffers t)))

(test bug-no-barrier-before-looking-for-interruptions
  (with-changes (("AFTER-SWITCH" "(barrier (:memory))" "nil"))
    (fails *interruption* :store-buffers t)
    (fails *interruption-after-an-end* :store-buffers t)))

(test bug-looking-for-the-carrier-first
  (with-changes (("%INTERRUPT-FIBER" "(notify-of-interruption fiber)" "nil"
                                     "(fiber-interruptions fiber)"
                                     "(prog1 (fiber-interruptions fiber)
                                        (notify-of-interruption fiber))"))
    (fails *interruption*)))

;;;; the parking lot

;;; The address of the word that all wait for
(defconstant word-address 1)

(defun wait-in-fiber (fiber)
  (in-test-fiber (fiber)
    (loop while (= 0 (read-word word-address))
          do (steps::wait-in-bucket fiber word-address 0 nil))))

(defun wait-in-thread ()
  (loop while (= 0 (read-word word-address))
        do (steps::wait-natively word-address 0 -1 0)))

(defparameter *fiber-waits*
  (history ((fiber (make-test-fiber)))
      (("fiber" (wait-in-fiber fiber))
       ("waker" (write-word word-address 1)
                (steps::wake-on-word word-address 1)))
    (or (phase-problem fiber) (bucket-problem))))

;;; It would be a thread's turn.
(defparameter *fiber-waits-alone*
  (history ((fiber (make-test-fiber)))
      (("fiber" (setf (sb-fiber::bucket-turn *bucket*) 1)
                (wait-in-fiber fiber))
       ("waker" (write-word word-address 1)
                (steps::wake-on-word word-address 1)))
    (or (phase-problem fiber) (bucket-problem))))

(defparameter *thread-waits*
  (history ()
      (("thread" (wait-in-thread))
       ("waker" (write-word word-address 1)
                (steps::wake-on-word word-address 1)))
    (bucket-problem)))

(defparameter *both-wait*
  (history ((fiber (make-test-fiber)))
      (("fiber" (wait-in-fiber fiber))
       ("thread" (wait-in-thread))
       ("waker" (write-word word-address 1)
                (steps::wake-on-word word-address 1)
                (steps::wake-on-word word-address 1)))
    (or (phase-problem fiber) (bucket-problem))))

(defparameter *wake-all*
  (history ((first (make-test-fiber))
            (second (make-test-fiber)))
      (("first" (wait-in-fiber first))
       ("second" (wait-in-fiber second))
       ("waker" (write-word word-address 1)
                (steps::wake-on-word word-address (ash 1 29))))
    (or (phase-problem first second) (bucket-problem))))

;;; Who is taken by a waker must say that he was woken: it may have been the only wake.
(defparameter *wake-or-time-out*
  (history ((fiber (make-test-fiber))
            (result nil)
            (taken nil))
      (("fiber" (in-test-fiber (fiber)
                  (setf result (steps::wait-in-bucket fiber word-address 0 10))))
       ("waker" (setf taken (steps::wake-fiber *bucket* word-address)))
       ("time" (pass-time)))
    (or (problem (not (eq taken (eql result sb-fiber::futex-woken)))
                 "The fiber ~:[was not~;was~] woken, and its result is ~A." taken result)
        (phase-problem fiber) (bucket-problem) (heap-problem))))

(defparameter *wake-or-interruption*
  (history ((fiber (make-test-fiber))
            (result nil)
            (taken nil))
      (("fiber" (in-test-fiber (fiber)
                  (setf result (steps::wait-in-bucket fiber word-address 0 nil))))
       ("waker" (setf taken (steps::wake-fiber *bucket* word-address)))
       ("interrupter" (setf (steps::fiber-interruptions fiber) (list #'identity))
                      (steps::unpark fiber)))
    (or (problem (not (eq taken (eql result sb-fiber::futex-woken)))
                 "The fiber ~:[was not~;was~] woken, and its result is ~A." taken result)
        (phase-problem fiber) (bucket-problem))))

(test no-wake-is-lost
  (holds *fiber-waits* :store-buffers t)
  (holds *fiber-waits-alone*)
  (holds *thread-waits* :store-buffers t)
  (holds *both-wait*))

(test wake-time-out-and-interruption-exclude-each-other
  (holds *wake-or-time-out*)
  (holds *wake-or-interruption*))

(test bug-looking-before-announcing
  (with-changes (("ENTER-BUCKET"
               "(atomic-incf (bucket-waiters bucket))" "nil"
               "(append-to-queue bucket first fiber)"
               "(progn (atomic-incf (bucket-waiters bucket))
                       (append-to-queue bucket first fiber))"
               "(progn (atomic-decf (bucket-waiters bucket)) nil)" "nil"))
    (fails *fiber-waits*)))

(test bug-waiting-without-looking
  (with-changes (("ENTER-BUCKET" "(= (sap-ref-32 (int-sap address) 0) expected)" "t"))
    (fails *fiber-waits*)))

(test bug-not-announcing-a-native-wait
  (with-changes (("WAIT-NATIVELY" "(atomic-incf (bucket-waiters bucket))" "nil"
                               "(atomic-decf (bucket-waiters bucket))" "nil"))
    (fails *thread-waits*)))

(test bug-no-barrier-before-looking-for-waiters
  (with-changes (("WAKE-ON-WORD" "(barrier (:memory))" "nil"))
    ;; Only the store buffer shows it.
    (fails *fiber-waits* :store-buffers t)))

(test bug-one-kind-starves
  (with-changes (("WAKE-IN-TURN" "(wake-fibers bucket address (wake-natives bucket address n))"
                                 "(wake-natives bucket address n)"))
    (fails *fiber-waits-alone*)))

(test bug-timing-out-after-a-wake
  (with-changes (("WAIT-IN-BUCKET"
               "(if (leave-bucket bucket fiber) futex-timed-out futex-woken)"
               "(progn (leave-bucket bucket fiber) futex-timed-out)"))
    (fails *wake-or-time-out*)))

(test bug-forgetting-that-others-wait-for-the-word
  (with-changes (("APPEND-TO-QUEUE"
               "(setf (fiber-wait-next last) fiber
                      (fiber-wait-previous fiber) last
                      (fiber-wait-previous first) fiber)"
               "(setf (fiber-wait-previous fiber) last
                      (fiber-wait-previous first) fiber)"))
    (fails *wake-all*)))

(test bug-leaving-without-being-counted-out
  (with-changes (("LEAVE-BUCKET" "(atomic-decf (bucket-waiters bucket))" "nil"))
    (fails *wake-or-interruption*)))

;;;; mutexes in the parking lot

;;; What RELEASE-MUTEX does with the state
(defun release-word ()
  (unless (= 1 (perform :locked *memory* word-address
                        (lambda ()
                          (prog1 (svref *memory* word-address)
                            (decf (svref *memory* word-address))))))
    (unless (steps::hand-over word-address)
      (write-word word-address 0)
      (steps::wake-on-word word-address 1))))

(defconstant counter-address 2)

(defun work-and-release ()
  (write-word counter-address (1+ (read-word counter-address)))
  (release-word))

(defun mutex-problem (holders)
  (or (problem (/= 0 (svref *memory* word-address)) "The state is ~D." (svref *memory* word-address))
      (problem (/= holders (svref *memory* counter-address)) "~D have held the mutex, and ~D counted."
               holders (svref *memory* counter-address))))

(defun lock-and-work (fiber)
  (in-test-fiber (fiber)
    (steps::contend-for-mutex fiber word-address nil nil)
    (work-and-release)))

;;; One that was woken in vain before. Returns true if it held the mutex.
(defun claim-and-work (fiber deadline)
  (in-test-fiber (fiber)
    (loop
      (let ((result (if (steps::take-mutex-or-mark word-address)
                        t
                        (steps::wait-in-bucket fiber word-address 2 deadline :wanted))))
        (cond ((eql result sb-fiber::futex-timed-out) (return nil))
              ((or (eq result t)
                   (and (eql result sb-fiber::futex-woken)
                        (eq :granted (steps::fiber-wait-claim fiber))))
               (work-and-release)
               (return t)))))))

(defun barge ()
  (when (= 0 (sb-ext:cas (steps::svref *memory* word-address) 0 1))
    (work-and-release)
    t))

(defparameter *two-contenders*
  (history ((first (make-test-fiber))
            (second (make-test-fiber)))
      (("first" (lock-and-work first))
       ("second" (lock-and-work second)))
    (or (mutex-problem 2) (phase-problem first second) (bucket-problem))))

(defparameter *claim-and-barge*
  (history ((fiber (make-test-fiber))
            (claimed nil) (barged nil))
      (("claimer" (setf claimed (claim-and-work fiber nil)))
       ("holder" (setf barged (barge))))
    (or (mutex-problem (count t (list claimed barged))) (phase-problem fiber) (bucket-problem))))

(defparameter *claim-or-time-out*
  (history ((fiber (make-test-fiber))
            (claimed nil) (barged nil))
      (("claimer" (setf claimed (claim-and-work fiber 10)))
       ("holder" (setf barged (barge)))
       ("time" (pass-time)))
    (or (mutex-problem (count t (list claimed barged)))
        (phase-problem fiber) (bucket-problem) (heap-problem))))

(test a-mutex-has-one-holder
  (holds *two-contenders*)
  (holds *claim-and-barge*)
  (holds *claim-or-time-out*))

(test bug-granting-before-the-state-is-written
  (with-changes (("TAKE-CLAIMANT"
               "(setf (fiber-wait-claim (truly-the fiber fiber)) :granted
                      (sap-ref-32 (int-sap address) 0) 2)"
               "nil"
               "(setf (fiber-wait-address (truly-the fiber fiber)) 0)"
               "(setf (fiber-wait-claim (truly-the fiber fiber)) :granted
                      (fiber-wait-address (truly-the fiber fiber)) 0
                      (sap-ref-32 (int-sap address) 0) 2)"))
    (fails *claim-or-time-out*)))

;;;; the waiter map

(defun wait-for-input (fiber &optional deadline)
  (in-test-fiber (fiber)
    (steps::wait-for-fd fiber *cell* sb-fiber::+input+ deadline)))

(defun wait-for-output (fiber)
  (in-test-fiber (fiber)
    (steps::wait-for-fd fiber *cell* sb-fiber::+output+ nil)))

(defun results-problem (expected &rest results)
  (problem (notevery (lambda (result) (eq result expected)) results)
           "The results are ~S." results))

(defparameter *both-directions*
  (history ((reader (make-test-fiber))
            (writer (make-test-fiber))
            (read nil) (written nil))
      (("reader" (setf read (wait-for-input reader)))
       ("writer" (setf written (wait-for-output writer)))
       ("epoll" (serve-epoll)))
    (or (results-problem :ready read written) (phase-problem reader writer) (cell-problem))))

;;; One who waits for output, in vain, must not make the poller forget the other.
(defparameter *input-only*
  (history ((reader (make-test-fiber))
            (writer (make-test-fiber))
            (result nil))
      (("reader" (setf result (wait-for-input reader)))
       ("writer" (setf (epoll-ready *epoll*) sb-fiber::+input+)
                 (steps::add-waiter *cell* writer sb-fiber::+output+
                                    (sb-fiber::scheduler-poller *scheduler*)))
       ("epoll" (serve-epoll)))
    (results-problem :ready result)))

(defparameter *two-readers*
  (history ((first (make-test-fiber))
            (second (make-test-fiber))
            (first-result nil) (second-result nil))
      (("first" (setf first-result (wait-for-input first)))
       ("second" (setf second-result (wait-for-input second)))
       ("epoll" (serve-epoll)))
    (or (results-problem :ready first-result second-result)
        (phase-problem first second) (cell-problem))))

;;; Who joins one that cannot wait must not wait for a report that nobody has asked for.
(defparameter *two-failures*
  (history ((first (make-test-fiber))
            (second (make-test-fiber))
            (first-result nil) (second-result nil))
      (("first" (setf (epoll-errno *epoll*) 9
                      first-result (wait-for-input first)))
       ("second" (setf (epoll-errno *epoll*) 9
                       second-result (wait-for-input second))))
    (or (results-problem :closed first-result second-result) (cell-problem))))

(defparameter *report-or-time-out*
  (history ((fiber (make-test-fiber))
            (result nil))
      (("fiber" (setf result (wait-for-input fiber 10)))
       ("time" (pass-time))
       ("epoll" (serve-epoll)))
    (or (problem (not (eq result (or (sb-fiber::fiber-wait-result fiber) :timeout)))
                 "The result is ~S, in the fiber it is ~S."
                 result (sb-fiber::fiber-wait-result fiber))
        (phase-problem fiber) (cell-problem) (heap-problem))))

;;; Somebody unparks the fiber for another reason; what it waits for must not be lost by that.
(defparameter *report-and-unpark*
  (history ((fiber (make-test-fiber))
            (result nil))
      (("fiber" (setf result (wait-for-input fiber)))
       ("other" (steps::unpark fiber))
       ("epoll" (serve-epoll)))
    (or (results-problem :ready result) (phase-problem fiber) (cell-problem))))

(defun close-when-waited-for ()
  "Close the descriptor once a fiber waits for input."
  (let ((cell *cell*))
    (perform :read cell 'steps::fd-cell-input (constantly nil)
             (lambda () (sb-fiber::fd-cell-input cell))))
  (steps::note-close 3))

(defun wait-in-another-chain (fiber)
  (let ((cell (sb-fiber::make-fd-cell 4)))
    (steps::add-waiter cell fiber sb-fiber::+input+ (sb-fiber::scheduler-poller *scheduler*))
    cell))

(defun other-chain-problem (cell fiber)
  (problem (not (and (eq (sb-fiber::fd-cell-input cell) fiber)
                     (null (sb-fiber::fiber-wait-next fiber))
                     (null (sb-fiber::fiber-wait-result fiber))))
           "The chain in which the fiber waits now is broken."))

(defun make-waiting-writer ()
  (let ((fiber (make-test-fiber :phase sb-fiber::+parked+ :stack :suspended)))
    (setf (sb-fiber::fd-cell-output *cell*) fiber)))

(defun writer-problem (fiber)
  (problem (not (and (eq (sb-fiber::fiber-wait-result fiber) :closed)
                     (eq (stack-state fiber) :runnable)))
           "Who waited for output does not know that the descriptor is closed."))

;;; The fiber is woken early, and waits elsewhere as soon as it can: the closer's chain
;;; must be whole until its end.
(defparameter *close*
  (history ((fiber (make-test-fiber))
            (writer (make-waiting-writer))
            (other-cell nil)
            (result nil))
      (("fiber" (setf result (wait-for-input fiber))
                (setf other-cell (wait-in-another-chain fiber)))
       ("other" (steps::unpark fiber))
       ("closer" (close-when-waited-for)))
    (or (results-problem :closed result) (writer-problem writer)
        (other-chain-problem other-cell fiber))))

(defparameter *close-and-interruption*
  (history ((fiber (make-test-fiber))
            (writer (make-waiting-writer))
            (other-cell nil))
      (("fiber" (wait-for-input fiber)
                (setf other-cell (wait-in-another-chain fiber)))
       ("interrupter" (setf (steps::fiber-interruptions fiber) (list #'identity))
                      (steps::unpark fiber))
       ("closer" (steps::note-close 3)
                 ;; It may have come too late.
                 (setf (steps::fiber-interruptions fiber) (list #'identity))
                 (steps::unpark fiber)))
    (or (writer-problem writer) (other-chain-problem other-cell fiber))))

(defparameter *close-and-failure*
  (history ((fiber (make-test-fiber))
            (writer (make-waiting-writer))
            (other-cell nil))
      (("fiber" (setf (epoll-errno *epoll*) 9)
                (wait-for-input fiber)
                (setf (epoll-errno *epoll*) 0
                      other-cell (wait-in-another-chain fiber)))
       ("closer" (steps::note-close 3)))
    (or (writer-problem writer) (other-chain-problem other-cell fiber))))

(test no-report-is-lost
  (holds *both-directions*)
  (holds *input-only*)
  (holds *two-readers*)
  (holds *two-failures*)
  (holds *report-or-time-out* :switches 3)
  (holds *report-and-unpark* :store-buffers t))

(test closing-wakes-all
  (holds *close*)
  (holds *close-and-interruption*)
  (holds *close-and-failure*))

(test bug-arming-for-one-direction-only
  (with-changes (("ARM-CELL" "(wanted-directions cell index)"
                             "(if (fd-cell-output cell) +output+ +input+)"))
    (fails *input-only*)))

(test bug-not-arming-for-the-next-in-the-chain
  (with-changes (("HANDLE-REPORT" "(unless (= wanted 0)
                                     (%poller-arm epoll (fd-cell-fd cell) wanted data))"
                                  "nil"))
    (fails *two-readers*)))

(test bug-arming-before-waiting
  (with-changes (("ADD-WAITER" "(with-tiny-lock ((fd-cell-lock cell))
                                  (if (= direction +input+)
                                      (chain-waiter (fd-cell-input cell) (fd-cell-input-poller cell)
                                                    fiber poller)
                                      (chain-waiter (fd-cell-output cell) (fd-cell-output-poller cell)
                                                    fiber poller)))"
                               "(progn
                                  (with-tiny-lock ((fd-cell-lock cell)) (arm-cell cell poller))
                                  (append-waiter (fd-cell-input cell) fiber)
                                  0)")
                 ("ARM-CELL" "(wanted-directions cell index)" "+input+"))
    (fails *report-and-unpark*)))

(test bug-timing-out-after-a-report
  (with-changes (("WAIT-FOR-FD" "(when (remove-waiter cell fiber direction) (return :timeout))"
                                "(return :timeout)"))
    (fails *report-or-time-out*)))

(test bug-saying-closed-too-early
  (with-changes (("TAKE-ALL-WAITERS" ":closing" ":closed"))
    (fails *close*)))

;;;; carriers that sleep

(defmacro with-short-searches (&body body)
  "A search that finds nothing is not repeated, and looks at two places at most."
  `(with-changes (("SEARCH-ELSEWHERE" "4" "1" "50" "1")
                  ("UNLIST-SPARE" "(length spares)" "1")
                  ("PUT-IN-PLACE" "(length places)" "1")
                  ("TAKE-FROM-PLACE" "(length places)" "1"))
     ,@body))

(defun ran-problem (ran n)
  (problem (/= ran n) "~D of ~D fibers ran, and all carriers sleep." ran n))

(defparameter *inject*
  (history ((group (make-test-group 1))
            (carrier (make-test-carrier group 0))
            (ran 0))
      (("carrier" (steps::carrier-loop carrier))
       ("submitter" (steps::inject group (make-runnable-fiber group (lambda () (incf ran))))))
    (ran-problem ran 1)))

(defparameter *send-home*
  (history ((group (make-test-group 1))
            (carrier (make-test-carrier group 0))
            (ran 0))
      (("carrier" (steps::carrier-loop carrier))
       ("waker" (steps::queue-fiber (make-runnable-fiber group (lambda () (incf ran)) carrier))))
    (ran-problem ran 1)))

(defparameter *send-home-to-spare*
  (history ((group (make-test-group 1))
            (carrier (make-test-carrier group))
            (ran 0))
      (("carrier" (steps::carrier-loop carrier))
       ("waker" (steps::queue-fiber (make-runnable-fiber group (lambda () (incf ran)) carrier))))
    (ran-problem ran 1)))

;;; The carrier goes to sleep when the fiber comes, or gets a scheduler.
(defparameter *send-home-while-given*
  (history ((group (make-test-group 1))
            (blocked (make-test-carrier group 0))
            (spare (make-test-carrier group))
            (ran 0))
      (("blocked" (steps::give-scheduler-away blocked))
       ("spare" (steps::carrier-loop spare))
       ("waker" (steps::queue-fiber (make-runnable-fiber group (lambda () (incf ran)) spare))))
    (ran-problem ran 1)))

;;; A spare that runs a fiber cannot serve a scheduler that it is given.
(defparameter *give-to-who-runs-a-fiber*
  (history ((group (make-test-group 1))
            (blocked (make-test-carrier group 0))
            (spare (make-test-carrier group)))
      (("blocked" (steps::give-scheduler-away blocked))
       ("waker" (steps::queue-fiber
                 (make-runnable-fiber
                  group
                  (lambda ()
                    (unless (steps::carrier-scheduler spare)
                      (when (steps::carrier-scheduler spare)
                        (fail-history "Who runs a fiber is given a scheduler."))))
                  spare)))
       ("spare" (steps::carrier-loop spare)))
    nil))

;;; Who has taken a spare finds no scheduler for it. Meanwhile a fiber has come home to it.
(defparameter *put-back*
  (history ((group (make-test-group 1))
            (blocked (make-test-carrier group 0))
            (spare (make-test-carrier group))
            (ran 0))
      (("blocked" (steps::put-in-place (sb-fiber::fiber-group-orphans group)
                                       (steps::detach-scheduler blocked))
                  (steps::take-from-place (sb-fiber::fiber-group-orphans group)))
       ("placer" (steps::place-orphans group))
       ("spare" (steps::carrier-loop spare))
       ("waker" (steps::queue-fiber (make-runnable-fiber group (lambda () (incf ran)) spare))))
    (ran-problem ran 1)))

;;; The first fiber computes until the second one has run: a carrier must not keep both while another
;;; sleeps. That one has looked for work already when both are injected.
(defun make-dependent-fibers (group)
  (let ((cell (vector 0)))
    (list (make-runnable-fiber
           group (lambda ()
                   (perform :read cell 'second-ran (constantly nil)
                            (lambda () (= 1 (svref cell 0))))))
          (make-runnable-fiber
           group (lambda ()
                   (perform :write cell 'second-ran (lambda () (setf (svref cell 0) 1))))))))

(defun inject-at-once (group fibers)
  (let ((injector (sb-fiber::fiber-group-injector group)))
    (dolist (fiber fibers) (sb-fiber::injector-put injector fiber))))

(defparameter *share*
  (history ((group (make-test-group 2))
            (first (make-test-carrier group 0))
            (second (make-test-carrier group 1)))
      (("first" (inject-at-once group (make-dependent-fibers group))
                (steps::carrier-loop first))
       ("second" (steps::sleep-in-poller second (steps::carrier-scheduler second))
                 (steps::carrier-loop second)))
    nil))

(defparameter *give-away*
  (history ((group (make-test-group 1))
            (blocked (make-test-carrier group 0))
            (spare (make-test-carrier group)))
      (("blocked" (steps::give-scheduler-away blocked))
       ("spare" (steps::carrier-loop spare))
       ("monitor" (steps::run-monitor group))
       ("new" (be-new-carrier)))
    (problem (not (eql 0 (svref (sb-fiber::fiber-group-orphans group) 0)))
             "Nobody serves the scheduler.")))

;;; The first new carrier is a spare when the monitor looks, and then it is none.
(defparameter *give-two-away*
  (history ((group (make-test-group 2))
            (first (make-test-carrier group 0))
            (second (make-test-carrier group 1)))
      (("first" (steps::give-scheduler-away first))
       ("second" (steps::give-scheduler-away second))
       ("monitor" (steps::run-monitor group))
       ("new" (be-new-carrier))
       ("newer" (be-new-carrier)))
    (problem (find 0 (sb-fiber::fiber-group-orphans group) :test-not #'eql)
             "Nobody serves the scheduler.")))

(defmacro with-two-places (&body body)
  `(with-changes (("SEARCH-ELSEWHERE" "4" "1" "50" "1")
                  ("UNLIST-SPARE" "(length spares)" "2")
                  ("PUT-IN-PLACE" "(length places)" "2")
                  ("TAKE-FROM-PLACE" "(length places)" "2"))
     ,@body))

;;; A fiber whose carrier has no scheduler gives its deadline to one that is served by another.
(defparameter *deadline-for-another*
  (history ((group (make-test-group 1))
            (carrier (make-test-carrier group 0))
            (fiber (make-test-fiber)))
      (("fiber" (setf *scheduler* (sb-fiber::carrier-scheduler carrier))
                (in-test-fiber (fiber)
                  (loop until (steps::deadline-passed-p 10) do (steps::park nil 10))))
       ("carrier" (steps::carrier-loop carrier)))
    (or (phase-problem fiber) (heap-problem))))

;;; Migration is forced, and the fiber was last run by the carrier that may be woken for it.
(defparameter *pass-on*
  (history ((group (make-test-group 2))
            (first (make-test-carrier group 0))
            (second (make-test-carrier group 1))
            (ran-on nil))
      (("first" (let ((steps::*carrier* first)) (steps::carrier-loop first)))
       ("second" (let ((steps::*carrier* second)) (steps::carrier-loop second)))
       ("submitter" (let ((fiber (make-runnable-fiber
                                  group (lambda () (setf ran-on steps::*carrier*)))))
                      (setf (sb-fiber::fiber-last-carrier fiber) first)
                      (steps::inject group fiber))))
    (problem (not (eq ran-on second)) "The fiber was run on ~S." ran-on)))

(defmacro with-forced-steps (&body body)
  `(unwind-protect (progn (setf steps::*force-migration* t) ,@body)
     (setf steps::*force-migration* nil)))

(test who-may-not-run-a-fiber-passes-it-on
  (with-short-searches
    (with-forced-steps
      (holds *pass-on* :switches 2))))

(test bug-not-passing-a-fiber-on
  (with-short-searches
    (with-forced-steps
      ;; Who finds that another one sleeps would not sleep himself, and try for ever.
      (with-changes (("TAKE-MIGRANT" "(wake-one-idle group)" "nil")
                     ("INJECTED-FOR-P" "(logandc2 (fiber-group-idle group)
                                         (ash 1 (poller-index (scheduler-poller scheduler))))"
                                       "0"))
        (fails *pass-on* :switches 2)))))

(test bug-going-to-sleep-over-what-others-must-run
  (with-short-searches
    (with-forced-steps
      (with-changes (("INJECTED-FOR-P" "(/= 0 (logandc2 (fiber-group-idle group)
                                         (ash 1 (poller-index (scheduler-poller scheduler)))))"
                                       "nil"))
        (fails *pass-on* :switches 2)))))

(test no-carrier-sleeps-while-there-is-work
  (with-short-searches
    (holds *inject* :store-buffers t)
    (holds *send-home* :store-buffers t)
    (holds *send-home-to-spare* :store-buffers t)
    (holds *send-home-while-given* :switches 2)
    (holds *share* :switches 2)
    (holds *give-away* :switches 1)))

(test no-scheduler-is-given-to-who-runs-a-fiber
  (with-short-searches
    (holds *give-to-who-runs-a-fiber* :switches 2)))

(test bug-a-spare-that-runs-fibers
  (with-short-searches
    (with-changes (("IDLE-AS-SPARE" "(unlist-spare carrier group)" "(run-inbox carrier)"))
      (fails *give-to-who-runs-a-fiber*))))

(test a-spare-that-is-put-back-looks-at-its-inbox
  (with-short-searches
    (holds *put-back* :switches 2)))

(test bug-putting-a-spare-back-to-sleep
  (with-short-searches
    (with-changes (("PUT-SPARE-BACK" "(wake-carrier spare)" "nil"))
      (fails *put-back* :switches 2))))

(test no-carrier-sleeps-longer-than-a-deadline
  (with-short-searches
    (holds *deadline-for-another* :store-buffers t)))

(test bug-not-waking-for-a-deadline
  (with-short-searches
    (with-changes (("ENTER-TIME" "(wake-poller (scheduler-poller scheduler))" "nil"))
      (fails *deadline-for-another*))))

(test bug-saying-that-one-sleeps-after-looking
  (with-short-searches
    (with-changes (("SLEEP-IN-POLLER" "(setf (poller-sleep poller) 1)" "nil"
                                      "(time-to-sleep scheduler)"
                                      "(prog1 (time-to-sleep scheduler)
                                         (setf (poller-sleep poller) 1))"))
      (fails *deadline-for-another*))))

(test bug-not-looking-again-before-sleep
  (with-short-searches
    (with-changes (("SLEEP-IN-POLLER" "(something-to-do-p carrier scheduler)" "nil"))
      (fails *inject*)
      (fails *send-home*))))

(test bug-looking-before-being-known-as-idle
  (with-short-searches
    (with-changes (("SLEEP-IN-POLLER" "(enter-idle group bit)" "nil"
                                      "(if (something-to-do-p carrier scheduler)
                                           0
                                           (time-to-sleep scheduler))"
                                      "(prog1 (if (something-to-do-p carrier scheduler) 0 -1)
                                         (enter-idle group bit))"))
      (fails *inject*))))

(test bug-waking-only-who-is-said-to-be-asleep
  (with-short-searches
    (with-changes (("WAKE-CARRIER" "(cas (carrier-alarm carrier) 0 1)" "1"))
      (fails *send-home-to-spare*))))

(test bug-clearing-the-alarm-after-looking
  (with-short-searches
    (with-changes (("IDLE-AS-SPARE" "(sleep-on-alarm carrier)"
                                    "(progn (setf (carrier-alarm carrier) 0)
                                            (sleep-on-alarm carrier))"))
      (fails *send-home-to-spare*))))

(test two-schedulers-are-given-away
  (with-two-places
    (holds *give-two-away* :switches 1)))

(test bug-a-spare-that-does-not-look-for-orphans
  (with-short-searches
    (with-changes (("LIST-SPARE" "(place-orphans group)" "nil"))
      (fails *give-away* :switches 1))))

(test bug-an-injector-without-a-barrier
  (with-short-searches
    (with-changes (("INJECT" "(barrier (:memory))" "nil"))
      (fails *inject* :store-buffers t))))

(test bug-a-permit-without-a-barrier
  (with-changes (("UNPARK" "(= phase +dead+)"
                           "(or (logtest phase +permit+) (= phase +dead+))"))
    (fails *two-wakers* :store-buffers t)))

;;;; schedulers that are taken away

;;; The stuck fiber makes another one runnable, and so does one that the spare runs: two carriers would
;;; put into one queue.
(defun queued-fibers (group)
  "How many fibers are in the first run queue and in the injector of GROUP."
  (+ (length (queue-contents (sb-fiber::scheduler-queue
                              (svref (sb-fiber::fiber-group-schedulers group) 0))))
     (loop for fiber = (sb-fiber::injector-first (sb-fiber::fiber-group-injector group))
             then (sb-fiber::fiber-next fiber)
           while fiber count t)))

(defun make-runnable-on (carrier)
  (let ((*running* carrier))
    (steps::queue-fiber (make-runnable-fiber (sb-fiber::carrier-group carrier) #'identity))))

(defparameter *take-away*
  (history ((group (make-test-group 1))
            (stuck (make-test-carrier group 0))
            (spare (make-test-carrier group)))
      (("stuck" (setf (sb-fiber::carrier-turn stuck) 2)
                (make-runnable-on stuck))
       ("monitor" (setf (svref (sb-fiber::fiber-group-spares group) 0) spare)
                  (steps::take-scheduler-away group stuck))
       ("spare" (perform :read spare 'steps::carrier-scheduler (constantly nil)
                         (lambda () (sb-fiber::carrier-scheduler spare)))
                (make-runnable-on spare)))
    (problem (/= 2 (queued-fibers group)) "There are ~D fibers." (queued-fibers group))))

;;; The places in between are locked, and with store buffers make too many orders.
(defmacro with-direct-hand-over ((&rest changes) &body body)
  `(with-changes (("TAKE-SCHEDULER-AWAY" "(pass-scheduler-on group scheduler)"
                                         "(setf (carrier-scheduler
                                                 (truly-the carrier (svref (fiber-group-spares group) 0)))
                                                scheduler)"
                                         ,@changes))
     ,@body))

;;; The carrier is not stuck any more: it is asleep, or looks for work.
(defparameter *take-away-from-who-sleeps*
  (history ((group (make-test-group 1))
            (carrier (make-test-carrier group 0)))
      (("carrier" (steps::carrier-loop carrier))
       ("monitor" (steps::take-scheduler-away group carrier)))
    (problem (null (sb-fiber::carrier-scheduler carrier)) "Nobody serves the scheduler.")))

;;; The spare has been given the scheduler, and loses it before it has seen it.
(defparameter *take-away-from-spare*
  (history ((group (make-test-group 1))
            (blocked (make-test-carrier group 0))
            (spare (make-test-carrier group))
            (ran 0))
      (("blocked" (steps::give-scheduler-away blocked))
       ("spare" (steps::carrier-loop spare))
       ("monitor" (steps::take-scheduler-away group spare))
       ("submitter" (steps::inject group (make-runnable-fiber group (lambda () (incf ran))))))
    (ran-problem ran 1)))

;;; Both want to give it away.
(defparameter *take-away-while-given*
  (history ((group (make-test-group 1))
            (carrier (make-test-carrier group 0)))
      (("carrier" (setf (sb-fiber::carrier-turn carrier) 2)
                  (steps::give-scheduler-away carrier))
       ("monitor" (steps::take-scheduler-away group carrier)))
    (problem (/= 1 (count-if-not #'integerp (sb-fiber::fiber-group-orphans group)))
             "The scheduler is there ~D times."
             (count-if-not #'integerp (sb-fiber::fiber-group-orphans group)))))

;;; A fiber that keeps its carrier until the monitor has seen that it is awake.
(defparameter *rouse*
  (history ((group (make-test-group 1))
            (carrier (make-test-carrier group 0))
            (scheduler (svref (sb-fiber::fiber-group-schedulers group) 0))
            (seen (vector 0)))
      (("carrier" (steps::sleep-in-poller carrier scheduler)
                  (perform :read seen 0 (constantly nil) (lambda () (= 1 (svref seen 0)))))
       ("submitter" (steps::inject group (make-runnable-fiber group #'identity)))
       ("monitor" (loop (steps::doze group 1)
                        (unless (steps::all-idle-p group)
                          (return (perform :locked seen 0 (lambda () (setf (svref seen 0) 1))))))))
    nil))

;;; A fiber comes home to the spare that has been given the scheduler, and leaves its carrier again.
(defun use-scheduler (scheduler)
  (perform :locked scheduler 'user
           (lambda ()
             (when (= 1 (sb-fiber::scheduler-steals scheduler))
               (fail-history "Two use the scheduler."))
             (setf (sb-fiber::scheduler-steals scheduler) 1)))
  (perform :locked scheduler 'user (lambda () (setf (sb-fiber::scheduler-steals scheduler) 0))))

(defun leave-carrier (carrier)
  (steps::end-scheduling carrier)
  (steps::begin-scheduling carrier)
  (let ((scheduler (steps::carrier-scheduler carrier)))
    (when scheduler (use-scheduler scheduler))))

(defparameter *take-away-when-one-comes-home*
  (history ((group (make-test-group 1))
            (blocked (make-test-carrier group 0))
            (spare (make-test-carrier group)))
      (("blocked" (steps::give-scheduler-away blocked)
                  (steps::queue-fiber (make-runnable-fiber group (lambda () (leave-carrier spare)) spare)))
       ("spare" (steps::carrier-loop spare))
       ("monitor" (steps::take-scheduler-away group spare)))
    nil))

(defmacro with-taker-who-uses-it (&body body)
  `(with-changes (("TAKE-SCHEDULER-AWAY" "(pass-scheduler-on group scheduler)"
                                         "(sb-fiber-tests::use-scheduler scheduler)"))
     ,@body))

(test who-comes-home-does-not-use-what-is-taken-away
  (with-short-searches
    (with-taker-who-uses-it
      (holds *take-away-when-one-comes-home* :switches 2))))

(test bug-a-spare-that-leaves-fibers-while-it-is-listed
  (with-short-searches
    (with-taker-who-uses-it
      (with-changes (("IDLE-AS-SPARE" "(sleep-on-alarm carrier)"
                                      "(progn (run-inbox carrier) (sleep-on-alarm carrier))"))
        (fails *take-away-when-one-comes-home* :switches 2)))))

(test schedulers-taken-away
  (with-short-searches
    (holds *take-away*)
    (with-direct-hand-over ()
      (holds *take-away* :store-buffers t))
    (holds *take-away-from-who-sleeps*)
    (holds *take-away-from-spare* :switches 2)
    (with-changes (("PUT-IN-PLACE" "(length places)" "2"))
      (holds *take-away-while-given* :store-buffers t))))

(test no-monitor-sleeps-while-a-fiber-runs
  (with-short-searches
    (holds *rouse* :store-buffers t)))

(test bug-not-awaiting-the-end-of-use
  (with-short-searches
    (with-changes (("TAKE-SCHEDULER-AWAY" "(await-end-of-use group carrier scheduler)" "nil"))
      (fails *take-away*))))

(test bug-a-use-that-may-not-be-seen
  (with-short-searches
    (with-direct-hand-over ("(%barrier-everywhere)" "nil")
      (fails *take-away* :store-buffers t))))

(test bug-a-spare-that-waits-for-the-scheduler-that-it-has-lost
  (with-short-searches
    (with-changes (("IDLE-AS-SPARE" "(eq (carrier-spare carrier) :taken)" "(carrier-scheduler carrier)"))
      (fails *take-away-from-spare* :switches 2))))

(test bug-taking-away-without-looking-who-was-faster
  (with-short-searches
    (with-changes (("PUT-IN-PLACE" "(length places)" "2")
                   ("DETACH-SCHEDULER" "(eq (cas (carrier-scheduler carrier) scheduler nil) scheduler)"
                                       "(progn (setf (carrier-scheduler carrier) nil) t)"))
      (fails *take-away-while-given*))))

;;; The monitor's alarm is on, and goes on again when there is something to see.
(defparameter *ring*
  (history ((group (make-test-group 1))
            (sawp nil))
      (("monitor" (loop until (= 1 (read-word 0))
                        do (steps::wait-for-alarm group nil))
                  (setf sawp t))
       ("ringer" (steps::ring-monitor group)
                 (write-word 0 1)
                 (steps::ring-monitor group)))
    (problem (not sawp) "The monitor sleeps.")))

(test the-monitor-does-not-sleep-over-its-alarm
  (holds *ring* :store-buffers t))

(test bug-the-monitor-clears-its-alarm-without-a-barrier
  (with-changes (("WAIT-FOR-ALARM" "(barrier (:memory))" "nil"))
    (fails *ring* :store-buffers t)))

(test bug-dozing-without-a-barrier
  (with-short-searches
    (with-changes (("DOZE" "(barrier (:memory))" "nil"))
      (fails *rouse* :store-buffers t))))

(test bug-a-carrier-that-does-not-rouse-the-monitor
  (with-short-searches
    (with-changes (("SLEEP-IN-POLLER"
                    "(unless (= (fiber-group-monitor-asleep group) 0) (rouse-monitor group))" "nil"))
      (fails *rouse*))))

;;;; submitting to a group that is being finished

(defun population-problem (group entered closed)
  "ENTERED fibers have been counted and not ended; CLOSED is true if somebody believes that there are none."
  (let ((alive (sb-fiber::fiber-group-alive group)))
    (or (problem (/= alive entered) "~D are counted, and ~D have been accepted." alive entered)
        (problem (and closed (plusp entered)) "~D have been accepted by a group that ends." entered))))

(defun enter-and-leave (group)
  "Be a fiber, and then one more, which stays. Return how many have stayed."
  (flet ((leave ()
           (steps::atomic-decf (steps::fiber-group-population group))))
    (cond ((not (steps::enter-population group)) 0)
          (t (leave)
             (if (steps::enter-population group) 1 0)))))

(defparameter *submit-and-finish*
  (history ((group (make-test-group 1)) (entered 0) (closed nil))
      (("submitter" (setf entered (enter-and-leave group)))
       ("finisher" (setf closed (steps::close-if-empty group)))
       ("other finisher" (when (steps::close-if-empty group) (setf closed t))))
    (population-problem group entered closed)))

(defparameter *submit-and-abort*
  (history ((group (make-test-group 1)) (first 0) (second 0))
      (("first" (setf first (if (steps::enter-population group) 1 0)))
       ("second" (setf second (if (steps::enter-population group) 1 0)))
       ("finisher" (steps::close-group group)))
    (or (population-problem group (+ first second) nil)
        (problem (sb-fiber::enter-population group) "It is still open."))))

(test no-fiber-enters-a-group-that-ends
  (holds *submit-and-finish*)
  (holds *submit-and-abort*))

(test bug-counting-without-compare-and-swap
  (with-changes (("ENTER-POPULATION" "(cas (fiber-group-population group) old (truly-the word (1+ old)))"
                                     "(progn (setf (fiber-group-population group) (1+ old)) old)"))
    (fails *submit-and-finish*)
    (fails *submit-and-abort*)))

(test bug-closing-after-looking
  (with-changes (("CLOSE-IF-EMPTY" "(cas (fiber-group-population group) 0 +closed+)"
                                   "(let ((old (fiber-group-population group)))
                                      (when (= old 0) (setf (fiber-group-population group) +closed+))
                                      old)"))
    (fails *submit-and-finish*)))
