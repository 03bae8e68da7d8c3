;;;; What is made of mutexes and the like: SB-CONCURRENCY, hash tables, rwlocks, locks of the system

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :sb-concurrency)
(in-package "SB-FIBER-TESTS")

(def-suite* concurrency)

(test mailbox
  (on-carriers (n)
    (let ((mailbox (sb-concurrency:make-mailbox)))
      (let ((got (mixed n 40 4
                        (lambda (i)
                          (if (evenp i)
                              (loop for k below 50
                                    do (sb-concurrency:send-message mailbox (+ (* 100 i) k))
                                       (yield-at-random))
                              (loop repeat 50
                                    collect (sb-concurrency:receive-message mailbox)))))))
        (is (equal (loop for i below 44 by 2 append (loop for k below 50 collect (+ (* 100 i) k)))
                   (sort (reduce #'append (remove-if-not #'listp got)) #'<)))))
    (is (equal '(nil nil)
               (in-fiber (n)
                 (multiple-value-list
                  (sb-concurrency:receive-message (sb-concurrency:make-mailbox)
                                                  :timeout 1/100)))))))

(test gate
  (on-carriers (n)
    (let ((gate (sb-concurrency:make-gate :open nil))
          (arrived (make-semaphore)))
      (is (equal (make-list 44 :initial-element t)
                 (mixed n 40 4
                        (lambda (i)
                          (cond ((= i 0)
                                 (wait-on-semaphore arrived :n 43)
                                 (sb-concurrency:open-gate gate)
                                 t)
                                (t (signal-semaphore arrived)
                                   (sb-concurrency:wait-on-gate gate)))))))
      (sb-concurrency:close-gate gate)
      (is (eq nil (in-fiber (n) (sb-concurrency:wait-on-gate gate :timeout 1/100)))))))

(test queue-of-items
  (on-carriers (n)
    (let ((queue (sb-concurrency:make-queue)))
      (let ((got (mixed n 20 2
                        (lambda (i)
                          (if (evenp i)
                              (loop for k below 100
                                    do (sb-concurrency:enqueue (+ (* 100 i) k) queue)
                                       (yield-at-random))
                              (loop with n = 0
                                    while (< n 100)
                                    for (item found) = (multiple-value-list
                                                        (sb-concurrency:dequeue queue))
                                    if found collect item and do (incf n)
                                    else do (thread-yield)))))))
        (is (equal (loop for i below 22 by 2 append (loop for k below 100 collect (+ (* 100 i) k)))
                   (sort (reduce #'append (remove-if-not #'listp got)) #'<)))))))

;;; Prevents: a writer that is seen half way.
(test frlock
  (on-carriers (n)
    (let ((lock (sb-concurrency:make-frlock)) (a 0) (b 0))
      (is (equal (make-list 24 :initial-element 0)
                 (mixed n 20 4
                        (lambda (i)
                          (loop repeat 50
                                count (cond ((< (mod i 10) 2)
                                             (sb-concurrency:frlock-write (lock)
                                               (incf a) (incf b))
                                             (yield-at-random)
                                             nil)
                                            (t (multiple-value-bind (a b)
                                                   (sb-concurrency:frlock-read (lock) a b)
                                                 (thread-yield)
                                                 (/= a b)))))))))
      (is (= a b 300)))))

;;; The owner of an RWLOCK is an os-tid: two fibers must not have the same.
(test rwlock
  (on-carriers (n)
    (let ((lock (sb-thread::make-rwlock)) (readers 0) (writing nil) (wrong 0) (count 0))
      (mixed n 30 4
             (lambda (i)
               (loop repeat 40
                     do (cond ((= 0 (mod i 3))
                               (sb-thread::rwlock-wrlock lock)
                               (when (or writing (plusp readers)) (incf wrong))
                               (setf writing t)
                               (slow-increment count)
                               (setf writing nil)
                               (sb-thread::rwlock-unlock lock))
                              (t
                               (sb-thread::rwlock-rdlock lock)
                               (sb-ext:atomic-incf (car (load-time-value (list 0))))
                               (when writing (incf wrong))
                               (yield-at-random)
                               (when writing (incf wrong))
                               (sb-thread::rwlock-unlock lock))))))
      (is (= 0 wrong))
      (is (= (* 40 (ceiling 34 3)) count)))))

(test synchronized-hash-table
  (on-carriers (n)
    (dolist (arguments '((:test equal) (:test eq :weakness :key) (:test eq)))
      (let ((table (apply #'make-hash-table :synchronized t arguments)))
        (mixed n 20 2 (lambda (i)
                        (loop for k below 100
                              do (setf (gethash (+ (* 100 i) k) table) k)
                                 (yield-at-random))))
        (is (= 2200 (hash-table-count table)))))
    (let ((table (make-hash-table :synchronized t)))
      (setf (gethash 0 table) 0)
      (mixed n 20 2 (lambda (i)
                      (declare (ignore i))
                      (loop repeat 50
                            do (sb-ext:with-locked-hash-table (table)
                                 (slow-increment (gethash 0 table))))))
      (is (= 1100 (gethash 0 table))))))

;;; Locks of the system itself: packages, and the world lock around the compiler.
(test system-locks
  (on-carriers (n :counts '(1 2))
    (with-group (group n)
      (is (equal (loop for i below 8 collect (1+ i))
                 (join-all
                  (loop for i below 8
                        collect (let ((i i))
                                  (spawn (group :stack-size (* 2 1024 1024))
                                    (intern (format nil "SOME SYMBOL ~D" i) "SB-FIBER-TESTS")
                                    (funcall (compile nil `(lambda (x) (fiber-yield) (+ x ,i)))
                                             1))))))))))

;;;; Last, since a failure leaves a carrier that spins

;;; Prevents: a reader that spins, on the only carrier, until a parked writer goes on.
(test frlock-with-a-parked-writer
  (let ((*patience* 10) (lock (sb-concurrency:make-frlock)) (a 0) (b 0))
    (is (equal '(nil t)
               (in-fibers 1 2 (lambda (i)
                                (cond ((= i 0)
                                       (sb-concurrency:frlock-write (lock)
                                         (incf a) (fiber-yield) (incf b))
                                       nil)
                                      (t (multiple-value-bind (a b)
                                             (sb-concurrency:frlock-read (lock) a b)
                                           (= a b))))))))))
