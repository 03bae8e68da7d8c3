;;;; Parking, waking and submitting, so that every fiber runs; many of them

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* fairness)

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
                                     (lambda (function)
                                       (submit-fiber other (make-fiber function)))))))))))

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

;;; Pairs that wake each other keep the queue full without a yield. Prevents: those in the injector
;;; being kept out for ever.
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

;;;; Numbers

(test ten-thousand-fibers
  (on-carriers (n :counts '(1 2) :migration '(nil))
    (with-group (group n)
      (let ((fibers (loop for i below 10000
                          collect (let ((i i))
                                    (spawn (group)
                                      (let ((list (list i)))
                                        (fiber-park)
                                        (car list)))))))
        (mapc #'wait-until-parked fibers)
        (is (<= 10000 (length (list-all-fibers))))
        (sb-ext:gc)
        (mapc #'fiber-unpark fibers)
        (is (equal (loop for i below 10000 collect i) (join-all fibers)))))))

(test ten-thousand-waiters
  (on-carriers (n :counts '(1 2) :migration '(nil))
    (with-group (group n)
      (let* ((semaphore (sb-thread:make-semaphore))
             (fibers (loop repeat 10000
                           collect (spawn (group) (sb-thread:wait-on-semaphore semaphore) t))))
        (sb-thread:signal-semaphore semaphore 10000)
        (is (all-true-p (join-all fibers)))))))
