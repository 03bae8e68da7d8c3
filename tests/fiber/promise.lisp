;;;; Tests of promises: results that somebody will have

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :sb-concurrency)

(in-package "SB-FIBER-TESTS")

(shadowing-import '(sb-concurrency:make-promise sb-concurrency:fulfil sb-concurrency:break-promise
                    sb-concurrency:await sb-concurrency:promise-state))

(def-suite* promise)

(test what-was-promised
  (let ((promise (make-promise :name "answer")))
    (is (eq :pending (promise-state promise)))
    (is (equal '(nil nil :timeout) (multiple-value-list (await promise :timeout 0))))
    (is (search "answer" (princ-to-string promise)))
    (is-true (fulfil promise 1 2))
    (is-false (fulfil promise 3))
    (is-false (break-promise promise (make-condition 'expected-error)))
    (is (eq :fulfilled (promise-state promise)))
    (is (equal '(1 2) (multiple-value-list (await promise))))
    (is (equal '(1 2) (multiple-value-list (await promise :timeout 0))))
    (is (sb-concurrency:promisep promise))))

(test what-was-broken
  (let ((promise (make-promise)))
    (is-true (break-promise promise (make-condition 'expected-error)))
    (is-false (fulfil promise 3))
    (is (eq :broken (promise-state promise)))
    (signals expected-error (await promise))
    (signals type-error (break-promise (make-promise) (opaque "no condition")))))

(test no-value (is (null (multiple-value-list (let ((promise (make-promise)))
                                                (fulfil promise)
                                                (await promise))))))

;;; Fibers and threads wait for it, and several want to fulfil it: all get what one has given.
(test one-outcome-for-all
  (on-carriers (n)
    (let* ((promise (make-promise)) (kept (make-flag))
           (results (mixed n 20 4
                           (lambda (i)
                             (cond ((= 0 (rem i 5))
                                    (pause)
                                    (when (fulfil promise i) (count-one kept))
                                    (await promise))
                                   (t (await promise :timeout *patience*)))))))
      (is (= 1 (flag-count kept)))
      (is (= 24 (length results)))
      (is (= 1 (length (remove-duplicates results)))))))

(test promises-in-select
  (on-carriers (n)
    (with-group (group n)
      (let ((first (make-promise)) (second (make-promise)))
        (spawn (group) (pause) (fulfil second :second))
        (is (eq :second
                (join (spawn (group)
                        (sb-concurrency:select
                          ((sb-concurrency:promise-operation first) (value) value)
                          ((sb-concurrency:promise-operation second) (value) value)
                          ((:timeout *patience*) () :late))))))
        (spawn (group) (pause) (break-promise first (make-condition 'expected-error)))
        (is (eq :failed
                (join (spawn (group)
                        (handler-case (sb-concurrency:select
                                        ((sb-concurrency:promise-operation first) () :value))
                          (expected-error () :failed))))))))))

;;; Who supervises fibers waits for the end of any.
(test ends-of-fibers
  (on-carriers (n)
    (with-group (group n)
      (let ((good (spawn (group) (pause) (values 1 2)))
            (bad (spawn (group) (fiber-park)))
            (ended (spawn (group) :ended)))
        (is (equal '(1 2) (multiple-value-list (await (sb-concurrency:fiber-promise good)))))
        (wait-for-end ended)
        (is (eq :ended (await (sb-concurrency:fiber-promise ended))))
        (let ((promise (sb-concurrency:fiber-promise (wait-until-parked bad))))
          (terminate-fiber bad)
          (is (eq :aborted
                  (handler-case (await promise)
                    (sb-thread:join-thread-error (condition)
                      (and (eq bad (sb-thread:thread-error-thread condition)) :aborted))))))))))

(test who-waits-for-a-promise-is-cancelled
  (on-carriers (n)
    (with-group (group n)
      (let* ((promise (make-promise))
             (fibers (loop repeat 10 collect (spawn (group) (await promise)))))
        (mapc #'wait-until-parked fibers)
        (mapc #'cancel-fiber (rest fibers))
        (mapc #'wait-for-end (rest fibers))
        (fulfil promise :value)
        (is (eq :value (join (first fibers))))))))

;;; Prevents: somebody waits for a fiber that was aborted before it began. The only carrier is held
;;; until then.
(test promises-are-broken-by-who-has-not-begun
  (with-group (group 1)
    (let* ((watched (spawn (group) (fiber-park)))
           (promise (join (spawn (group)
                            (prog1 (sb-concurrency:fiber-promise watched)
                              (dolist (fiber (list-all-fibers))
                                (unless (or (not (eq group (fiber-group fiber)))
                                            (member fiber (list watched (current-fiber))))
                                  (terminate-fiber fiber))))))))
      (is (eq :aborted (handler-case (await promise :timeout *patience*)
                         (sb-thread:join-thread-error () :aborted))))
      (fiber-unpark watched))))
