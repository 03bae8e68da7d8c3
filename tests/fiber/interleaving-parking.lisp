;;;; All orders of the steps of what waits for a word and what wakes its waiters: fiber/parking.lisp

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/histories.lisp" *load-truename*))

(def-suite* interleaving-parking)

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
      (("fiber" (setf (sb-fiber::bucket-preference *bucket*) 1)
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

;;; A fiber that a waker has taken must say that it was woken: it may have been the only wake.
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

;;; A fiber that is in no chain any more is never woken.
(defun enter-in-setup (fiber address)
  (setf (sb-fiber::fiber-wait-address fiber) address)
  (incf (sb-fiber::bucket-waiters *bucket*))
  (sb-fiber::append-to-queue *bucket* nil fiber))

(defparameter *growth*
  (history ((fibers (loop for i from 1 to 3
                          for fiber = (make-test-fiber)
                          do (enter-in-setup fiber (* 8 i))
                          collect fiber))
            (left nil))
      (("one" (steps::grow-bucket *bucket*))
       ("other" (steps::grow-bucket *bucket*))
       ("leaver" (setf left (steps::leave-bucket *bucket* (second fibers)))))
    (or (problem (not left) "The second has not left.")
        (problem (= 1 (length (sb-fiber::bucket-chains *bucket*))) "It has not grown.")
        (loop for fiber in (list (first fibers) (third fibers))
              for taken = (sb-fiber::take-from-bucket *bucket*
                                                      (sb-fiber::fiber-wait-address fiber))
              thereis (problem (not (eq fiber taken)) "~A is in no chain." fiber))
        (bucket-problem))))

(test nobody-is-lost-in-growth (holds *growth*))

(test bug-two-grow-at-a-time
  (with-changes (("GROW-BUCKET" "(eq old (bucket-chains bucket))" "t"))
    (fails *growth*)))

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
  (with-changes (("WAKE-BY-PREFERENCE"
                  "(wake-fibers bucket address (wake-natives bucket address n))"
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
  (or (problem (/= 0 (svref *memory* word-address)) "The state is ~D."
               (svref *memory* word-address))
      (problem (/= holders (svref *memory* counter-address))
               "~D have held the mutex, and ~D counted."
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
