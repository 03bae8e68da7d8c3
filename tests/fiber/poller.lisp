;;;; the waiter map and pollers alone: fiber/poller.lisp, without a scheduler

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(dolist (file '("limits" "pollers"))
  (load (merge-pathnames (format nil "support/~A.lisp" file) *load-truename*)))

(def-suite* poller)

;;;; Chains

(test a-reader-waits-until-there-is-something
  (with-poller (poller)
    (with-pipe (reader writer)
      (let ((fiber (make-waiter)))
        (is (= 0 (add fiber reader input poller)))
        (is (null (ready poller)))
        (is (equal (list fiber) (readers reader)))
        (is (null (result fiber)))
        (send-byte writer)
        (is (equal (list fiber) (ready poller)))
        (is (null (readers reader)))
        (is (eq :ready (result fiber)))
        ;; one shot
        (send-byte writer)
        (is (null (ready poller)))))))

;;; Edge triggered: prevents that what was there before the arming is never reported.
(test what-is-ready-already-is-reported
  (with-poller (poller)
    (with-pipe (reader writer)
      (send-byte writer)
      (loop repeat 3
            do (let ((fiber (make-waiter)))
                 (add fiber reader input poller)
                 (is (equal (list fiber) (ready poller))))))))

;;; Prevents: a herd; and those behind the first being forgotten.
(test readers-of-one-descriptor-are-woken-one-by-one
  (with-poller (poller)
    (with-pipe (reader writer)
      (let ((fibers (loop repeat 4 collect (make-waiter))))
        (dolist (fiber fibers) (add fiber reader input poller))
        (is (equal fibers (readers reader)))
        (send-byte writer)
        (is (equal (list (first fibers)) (ready poller)))
        (is (equal (list (second fibers)) (ready poller)))
        (receive-byte reader)
        (is (null (ready poller)))
        (send-byte writer)
        (is (equal (list (third fibers)) (ready poller)))
        (is (equal (list (fourth fibers)) (readers reader)))
        (remove-from (fourth fibers) reader input)))))

(test leaving-a-chain
  (with-poller (poller)
    (with-pipe (reader writer)
      (let ((fibers (loop repeat 5 collect (make-waiter))))
        (dolist (fiber fibers) (add fiber reader input poller))
        (dolist (i '(2 0 4)) ; in the middle, at the front, at the end
          (is (remove-from (nth i fibers) reader input))
          (is (not (remove-from (nth i fibers) reader input))))
        (is (equal (list (second fibers) (fourth fibers)) (readers reader)))
        (add (first fibers) reader input poller)
        (is (equal (list (second fibers) (fourth fibers) (first fibers)) (readers reader)))
        (send-byte writer)
        (is (equal (list (second fibers)) (ready poller)))
        (is (not (remove-from (second fibers) reader input)))
        (is (eq :ready (result (second fibers))))
        (sb-fiber::forget-file (cell reader))))))

(test random-operations
  (with-poller (poller)
    (with-pipe (reader writer)
      (is (null (random-operations 10000 reader writer poller #'add #'receive-byte)))
      (sb-fiber::forget-file (cell reader)))))

;;;; Two directions

;;; Prevents: arming for one direction, or a report of one, that makes epoll forget the other.
(defun call-with-both-waiting (function first-direction)
  "Call FUNCTION with a poller, both ends of a connection, and the fibers that wait at the first of
these, for FIRST-DIRECTION first."
  (with-poller (poller)
    (with-socket-pair (a b)
      (fill-up a)
      (let ((fibers (list (make-waiter) (make-waiter)))
            (directions (list first-direction (logxor first-direction input output))))
        (mapc (lambda (fiber direction) (add fiber a direction poller)) fibers directions)
        (is (null (ready poller)))
        (funcall function poller a b fibers)))))

(test both-directions-of-one-descriptor
  (call-with-both-waiting (lambda (poller a b fibers)
                            (destructuring-bind (reader writer) fibers
                              (send-byte b)
                              (is (equal (list reader) (ready poller)))
                              (is (equal (list writer) (writers a)))
                              (drain b)
                              (is (equal (list writer) (ready poller)))))
                          input)
  (call-with-both-waiting (lambda (poller a b fibers)
                            (destructuring-bind (writer reader) fibers
                              (drain b)
                              (is (equal (list writer) (ready poller)))
                              (is (equal (list reader) (readers a)))
                              (send-byte b)
                              (is (equal (list reader) (ready poller)))))
                          output))

;;; Prevents: one of the two sleeping on when the other side has gone.
(test hang-up-wakes-both-directions
  (with-poller (poller)
    (with-socket-pair (a b)
      (let ((reader (make-waiter))
            (writer (make-waiter)))
        (fill-up a)
        (add reader a input poller)
        (add writer a output poller)
        (close-fd b)
        (is (null (set-exclusive-or (list reader writer) (ready poller))))))))

;;;; Two pollers

(test directions-in-two-pollers
  (with-poller (one)
    (with-poller (two)
      (with-socket-pair (a b)
        (let ((reader (make-waiter))
              (writer (make-waiter)))
          (add reader a input one)
          (add writer a output two)
          (is (null (ready one)))
          (is (equal (list writer) (ready two)))
          (send-byte b)
          (is (null (ready two)))
          (is (equal (list reader) (ready one))))))))

;;; A fiber that has migrated waits in another poller than before.
(test a-poller-that-was-left-reports-nothing
  (with-poller (one)
    (with-poller (two)
      (with-pipe (reader writer)
        (let ((fiber (make-waiter)))
          (add fiber reader input one)
          (remove-from fiber reader input)
          (add fiber reader input two)
          (send-byte writer)
          (is (null (ready one)))
          (is (equal (list fiber) (ready two))))))))

;;; The second group ends while a fiber of the first waits. Prevents that it waits for ever.
(test ending-a-poller-does-not-end-waits-in-others
  (with-poller (one)
    (with-pipe (reader writer)
      (let ((first (make-waiter))
            (second (make-waiter)))
        (add first reader input one)
        (with-poller (two)
          (add second reader input two)
          (remove-from second reader input))
        (send-byte writer)
        (is (equal (list first) (ready one)))
        (remove-from first reader input)))))

;;;; Closing and reuse

(test forgetting-returns-all-waiters
  (with-poller (poller)
    (with-socket-pair (a b)
      (let ((readers (loop repeat 3 collect (make-waiter)))
            (writers (loop repeat 2 collect (make-waiter))))
        (fill-up a)
        (dolist (fiber readers) (add fiber a input poller))
        (dolist (fiber writers) (add fiber a output poller))
        (is (equal (append readers writers) (values (sb-fiber::forget-file (cell a)))))
        (is (every (lambda (fiber) (eq :closed (result fiber))) (append readers writers)))
        (is (every (lambda (fiber) (null (sb-fiber::fiber-wait-next fiber)))
                   (append readers writers)))
        (is (null (readers a)))
        (is (null (writers a)))
        (is (null (sb-fiber::forget-file (cell a))))))))

(test closing-what-nobody-has-heard-of
  (dolist (fd (list 999999 -1 (ash 1 40)))
    (is (null (sb-fiber::note-close fd)))
    (sb-fiber::note-closed fd nil))
  (is (null (sb-fiber::find-fd-cell 999999 nil))))

;;; A report has been got from the kernel, and before it is handled the number is closed and
;;; stands for another file. Prevents that it wakes the fiber that waits for that.
(test late-reports-are-dropped
  (with-poller (poller)
    (with-pipe (reader writer)
      (let ((old (make-waiter))
            (new (make-waiter)))
        (add old reader input poller)
        (send-byte writer)
        (let ((events (events poller)))
          (is (= 1 (length events)))
          (sb-fiber::forget-file (cell reader))
          (receive-byte reader)
          (add new reader input poller)
          (is (null (handle poller (first events))))
          (is (equal (list new) (readers reader)))
          (is (null (result new))))
        (send-byte writer)
        (is (equal (list new) (ready poller)))))))

;;; A report for a fiber that does not wait any more must not be an error, nor wake the one that
;;; waits for the other direction.
(test reports-for-nobody
  (with-poller (poller)
    (with-socket-pair (a b)
      (let ((reader (make-waiter))
            (writer (make-waiter)))
        (fill-up a)
        (add reader a input poller)
        (send-byte b)
        (let ((event (first (events poller))))
          (remove-from reader a input)
          (add writer a output poller)
          (is (null (handle poller event)))
          (is (equal (list writer) (writers a))))
        (sb-fiber::forget-file (cell a))))))

;;; A duplicate keeps the file, and with it the registration, alive. Prevents reports for a number
;;; that is closed.
(test duplicates-of-a-closed-descriptor-are-not-reported
  (with-poller (poller)
    (with-pipe (reader writer)
      (let ((number (sb-unix:unix-dup reader)))
        (add (make-waiter) number input poller)
        (close-fd number)
        (send-byte writer)
        (is (null (events poller)))))))

;;; Foreign code closes a descriptor, and its number is used again. Prevents: MOD of what is
;;; not registered any more.
(test a-number-that-was-closed-silently
  (with-poller (poller)
    (with-pipe (first first-writer)
      (with-pipe (second second-writer)
        (let ((number (sb-unix:unix-dup first))
              (fiber (make-waiter)))
          (add fiber number input poller)
          (remove-from fiber number input)
          (close-silently number)
          (duplicate second number)
          (is (= 0 (add fiber number input poller)))
          (send-byte second-writer)
          (is (equal (list fiber) (ready poller)))
          (close-fd number))))))

;;; A fiber that cannot wait is told so, and is in no chain.
(test files-that-are-always-ready
  (with-poller (poller)
    (with-open-file (stream *load-truename*)
      (let ((fd (sb-sys:fd-stream-fd stream))
            (fiber (make-waiter)))
        (is (= eperm (add fiber fd input poller)))
        (is (null (readers fd)))
        (is (= eperm (add fiber fd output poller)))
        (is (null (writers fd)))))))

(test a-descriptor-that-is-not-open
  (with-poller (poller)
    (let ((fd (sb-unix:unix-dup 0))
          (fiber (make-waiter)))
      (close-fd fd)
      (is (= ebadf (add fiber fd input poller)))
      (is (null (readers fd))))))

;;;; Pollers

(test wakers-of-a-sleeping-poller
  (with-poller (poller)
    ;; awake: nobody writes
    (sb-fiber::wake-poller poller)
    (is (null (events poller)))
    (setf (sb-fiber::poller-sleep poller) 1)
    (sb-fiber::wake-poller poller)
    (sb-fiber::wake-poller poller)
    (is (= 2 (sb-fiber::poller-sleep poller)))
    (is (equal (list sb-fiber::wakeup-data) (mapcar #'car (events poller -1))))
    (is (null (events poller)))
    ;; The eventfd is never read: it must report each time.
    (setf (sb-fiber::poller-sleep poller) 1)
    (sb-fiber::wake-poller poller)
    (is (equal (list sb-fiber::wakeup-data) (mapcar #'car (events poller -1))))))

(test a-wait-ends-with-its-time
  (with-poller (poller)
    (with-pipe (reader writer)
      (add (make-waiter) reader input poller)
      (dolist (nanoseconds '(0 1 1000000))
        (is (null (events poller nanoseconds))))
      (sb-fiber::forget-file (cell reader)))))

(test a-waker-in-another-thread
  (with-poller (poller)
    (loop repeat 100
          do (setf (sb-fiber::poller-sleep poller) 1)
             (let ((waker (sb-thread:make-thread #'sb-fiber::wake-poller
                                                 :arguments (list poller))))
               (is (= 1 (length (events poller -1))))
               (sb-thread:join-thread waker)))))

(defun free-all (pollers)
  (mapc #'sb-fiber::free-poller pollers))

;;; Prevents: numbers, descriptors that are used up by groups that come and go.
(test pollers-come-and-go
  (let ((descriptors (count-descriptors)))
    (loop repeat 3
          do (with-numbers-taken ((- sb-fiber::max-pollers 100))
               (let ((pollers (loop repeat 100 collect (sb-fiber::make-poller))))
                 (is (= 100
                        (length (remove-duplicates (mapcar #'sb-fiber::poller-index pollers)))))
                 (signals error (sb-fiber::make-poller))
                 (free-all pollers))))
    (is (= descriptors (count-descriptors)))))

;;; A poller gets the number of one that has heard of a descriptor, which it has not itself.
(test a-number-of-a-poller-is-used-again
  (with-pipe (reader writer)
    (let ((fiber (make-waiter)))
      (dotimes (i 3)
        (with-poller (poller)
          (is (= 0 (add fiber reader input poller)))
          (send-byte writer)
          (is (equal (list fiber) (ready poller)))
          (receive-byte reader)
          (add fiber reader input poller)
          (remove-from fiber reader input))))))

;;; With a duplicate of the descriptor a poller that does not forget it goes on to report. Prevents:
;;; that of two pollers which share a bit only one forgets.
(test pollers-that-share-a-bit-forget-both
  (with-poller (one)
    (with-numbers-taken ((1- sb-fiber::max-group-pollers))
      (with-poller (two)
        (is (= (sb-fiber::poller-bit (sb-fiber::poller-index one))
               (sb-fiber::poller-bit (sb-fiber::poller-index two))))
        (with-socket-pair (a b)
          (let ((reader (make-waiter)) (writer (make-waiter))
                (duplicate (sb-unix:unix-dup a)))
            (add writer a output two)
            (is (equal (list writer) (ready two)))
            (add writer a output two)
            (add reader a input one)
            (close-fd a)
            (send-byte b)
            (is (equal '(:closed :closed) (list (result reader) (result writer))))
            (is (null (events one)))
            (is (null (events two)))
            (close-fd duplicate)))))))

;;; The kernel has reported the first of the fibers that wait, and then refuses to watch the
;;; descriptor for the others.
(test closed-silently-after-a-report
  (with-poller (poller)
    (with-pipe (reader writer)
      (let ((first (make-waiter)) (second (make-waiter)))
        (add first reader input poller)
        (add second reader input poller)
        (send-byte writer)
        (let ((events (events poller))
              (duplicate (sb-unix:unix-dup reader)))
          (is (= 1 (length events)))
          (close-silently reader)
          (is (equal (list first) (handle poller (first events))))
          (is (equal (list :ready ebadf) (list (result first) (result second))))
          (is (null (readers reader)))
          (duplicate duplicate reader)
          (close-fd duplicate))))))

;;;; Without descriptors

;;; A poller needs two descriptors. Prevents: one that nobody can wake, because it got only one; and
;;; numbers and descriptors that are lost by the attempt.
(test no-poller-without-descriptors
  (let ((descriptors (count-descriptors)))
    (dotimes (left 2)
      (with-free-descriptors (left)
        (signals error (sb-fiber::make-poller))))
    (is (= descriptors (count-descriptors)))
    (is (every #'null sb-fiber::*pollers*))))
