;;;; Waiting for descriptors and for time: streams, pipes, closing, sleep

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/descriptors.lisp" *load-truename*))

(def-suite* io)

;;;; Streams

;;; Prevents: a wake-up for a descriptor that is lost.
(test ping-pong-through-pipes
  (on-carriers (n)
    (with-group (group n)
      (is (all-true-p
           (join-all
            (loop for i below 20
                  collect (let ((i i))
                            (spawn (group)
                              (with-pipe (in-1 out-1)
                                (with-pipe (in-2 out-2)
                                  (let ((other (spawn (group)
                                                 (loop for line = (read-line in-1 nil)
                                                       while line do (send-line out-2 line)))))
                                    (prog1 (loop for k below 50
                                                 for line = (format nil "~D ~D" i k)
                                                 do (send-line out-1 line)
                                                 always (string= line (read-line in-2)))
                                      (close out-1)
                                      (join other)))))))))))))) 

;;; One fiber reads, one writes, on each of the two sides. Prevents: an arm for one direction that cancels the
;;; other.
(test both-directions-on-one-descriptor
  (on-carriers (n)
    (with-group (group n)
      (with-sockets (a b)
        (let ((data (octets 1000000)))
          (flet ((writer (stream)
                   (spawn (group) (write-sequence data stream) (finish-output stream) t))
                 (reader (stream)
                   (spawn (group)
                     (let ((buffer (make-array 1000000 :element-type '(unsigned-byte 8))))
                       (and (= 1000000 (read-sequence buffer stream))
                            (equalp buffer data))))))
            (let ((a (stream-of a :element-type '(unsigned-byte 8)))
                  (b (stream-of b :element-type '(unsigned-byte 8))))
              (is (equal '(t t t t)
                         (join-all (list (writer a) (reader a) (writer b) (reader b))))))))))))

(test pipe-larger-than-its-buffer
  (on-carriers (n)
    (with-group (group n)
      (with-pipe (in out :element-type '(unsigned-byte 8))
        (let* ((data (octets 500000))
               (writer (spawn (group) (write-sequence data out) (finish-output out) :written))
               (reader (spawn (group)
                         (loop for i below 500000
                               always (= (read-byte in) (aref data i))))))
          (is (equal '(:written t) (join-all (list writer reader)))))))))

;;; The only carrier must not wait in the kernel for somebody who does not read, or does not write.
(test peer-that-does-not-read
  (with-group (group 1)
    (with-sockets (a b)
      (let* ((data (octets 20000000))
             (writer (spawn (group)
                       (let ((stream (stream-of a :element-type '(unsigned-byte 8))))
                         (write-sequence data stream)
                         (finish-output stream))
                       :written))
             (sender (spawn (group) (sleep 1/1000) :slept)))
        (wait-until-parked writer)
        (is (eq :slept (join sender)))
        (is (= 3 (join (spawn (group) (+ 1 2)))))
        (is (fiber-alive-p writer))
        (let ((buffer (make-array 20000000 :element-type '(unsigned-byte 8))))
          (is (= 20000000 (read-sequence buffer (stream-of b :element-type '(unsigned-byte 8)))))
          (is (equalp buffer data)))
        (is (eq :written (join writer)))))))

(test peer-that-does-not-write
  (with-group (group 1)
    (with-sockets (a b)
      (with-pipe (in out)
        (let ((readers (list (spawn (group) (read-line in))
                             (spawn (group) (read-line (stream-of a)))
                             (spawn (group) (socket-receive b nil 10)))))
          (mapc #'wait-until-parked readers)
          (is (= 3 (join (spawn (group) (+ 1 2)))))
          (send-line out "to the pipe")
          (is (string= "to the pipe" (join (first readers))))
          (send-line (stream-of b) "to the socket")
          (is (string= "to the socket" (join (second readers))))
          (socket-send a "to b" 4)
          (is (string= "to b" (string-trim '(#\Nul) (join (third readers))))))))))

(test end-of-file
  (on-carriers (n)
    (with-group (group n)
      (with-sockets (a b)
        (let ((reader (spawn (group) (read-line (stream-of a) nil :eof))))
          (wait-until-parked reader)
          (socket-close b)
          (is (eq :eof (join reader)))))
      (with-pipe (in out)
        (let ((reader (spawn (group) (handler-case (read-char in) (end-of-file () :eof)))))
          (wait-until-parked reader)
          (close out)
          (is (eq :eof (join reader))))))))

;;; Prevents: SIGPIPE, and a writer that waits for a peer that has gone.
(test broken-pipe
  (on-carriers (n)
    (with-group (group n)
      (with-sockets (a b)
        (let ((writer (spawn (group)
                        (handler-case (loop with stream = (stream-of a :element-type '(unsigned-byte 8))
                                            do (write-sequence (octets 100000) stream)
                                               (finish-output stream))
                          (stream-error () :broken)))))
          (wait-until-parked writer)
          (socket-close b)
          (is (eq :broken (join writer)))))
      (with-pipe (in out)
        (close in)
        (is (eq :broken (join (spawn (group)
                                (prog1 (handler-case (send-line out "nobody reads this")
                                         (stream-error () :broken))
                                  (clear-output out))))))))))

(test listening-to-streams
  (with-group (group 1)
    (with-pipe (in out)
      (is (equal '(nil nil t #\x)
                 (join (spawn (group)
                         (list (listen in)
                               (read-char-no-hang in)
                               (progn (write-char #\x out) (finish-output out) (listen in))
                               (read-char-no-hang in)))))))))

(test character-streams
  (on-carriers (n)
    (with-group (group n)
      (with-pipe (in out :external-format :utf-8)
        (let* ((line (map 'string #'code-char (loop for i below 3000 collect (+ 32 (mod (* i 37) 3000)))))
               (writer (spawn (group)
                         (loop repeat 50 do (write-line line out) (when (= 0 (random 5)) (finish-output out)))
                         (close out))))
          (is (eq t (join (spawn (group)
                            (and (loop repeat 50
                                       always (progn (unread-char (read-char in) in)
                                                     (string= line (read-line in))))
                                 (eq :eof (read-line in nil :eof)))))))
          (join writer))))))

(test files-and-devices
  (on-carriers (n :counts '(1 2))
    (uiop:with-temporary-file (:pathname file)
      (is (equal '("a line" 0 t)
                 (in-fiber (n)
                   (with-open-file (out file :direction :output :if-exists :supersede)
                     (write-line "a line" out))
                   (list (with-open-file (in file) (read-line in))
                         (with-open-file (in "/dev/zero" :element-type '(unsigned-byte 8)) (read-byte in))
                         (with-open-file (out "/dev/null" :direction :output :if-exists :append)
                           (write-line "a line" out)
                           t))))))))

(test process-output
  (on-carriers (n :counts '(1 2))
    (is (equal '("hello" 3)
               (in-fiber (n)
                 (let ((process (sb-ext:run-program "/bin/sh" '("-c" "sleep 0.05; echo hello; exit 3")
                                                    :output :stream :wait nil)))
                   (list (read-line (sb-ext:process-output process))
                         (progn (sb-ext:process-wait process)
                                (sb-ext:process-exit-code process)))))))))

;;;; Time-outs of streams

(test stream-timeout
  (on-carriers (n)
    (with-group (group n)
      (with-sockets (a b)
        (let ((stream (stream-of a :timeout 1/50)))
          (is (eq :timeout (join (spawn (group)
                                   (handler-case (read-line stream)
                                     (sb-sys:io-timeout () :timeout))))))
          ;; it can be read from after that
          (let ((reader (spawn (group) (loop (handler-case (return (read-line stream))
                                               (sb-sys:io-timeout ()))))))
            (send-line (stream-of b) "late")
            (is (string= "late" (join reader)))))))))

(test write-timeout
  (with-group (group 1)
    (with-sockets (a b)
      (is (eq :timeout (join (spawn (group)
                               (let ((stream (stream-of a :element-type '(unsigned-byte 8) :timeout 1/50)))
                                 (prog1 (handler-case
                                            (loop repeat 1000
                                                  do (write-sequence (octets 100000) stream)
                                                     (finish-output stream))
                                          (sb-sys:io-timeout () :timeout))
                                   (clear-output stream)))))))
      (is (sb-bsd-sockets:socket-open-p b)))))

(test wait-until-fd-usable
  (on-carriers (n)
    (with-group (group n)
      (with-pipe (in out)
        (let ((fd (sb-sys:fd-stream-fd in)))
          (flet ((usable (timeout) (sb-sys:wait-until-fd-usable fd :input timeout nil)))
            (is (equal '(nil nil) (join (spawn (group) (list (usable 0) (usable 1/100))))))
            (let ((waiter (spawn (group) (usable nil))))
              (wait-until-parked waiter)
              (send-line out "x")
              (is (eq t (join waiter))))
            (is (equal '(t t) (join (spawn (group) (list (usable 0) (usable 1)))))))
          (is (eq t (join (spawn (group)
                            (sb-sys:wait-until-fd-usable (sb-sys:fd-stream-fd out) :output 1 nil))))))))))

;;; Prevents: a byte or a wake-up that is lost because a time-out comes at the same time.
(test timeouts-and-data-at-once
  (on-carriers (n)
    (with-group (group n)
      (with-pipe (in out :element-type '(unsigned-byte 8) :buffering :none)
        (let* ((fd (sb-sys:fd-stream-fd in))
               (reader (spawn (group)
                         (loop with i = 0
                               while (< i 200)
                               do (when (or (listen in) (sb-sys:wait-until-fd-usable fd :input (random 0.004) nil))
                                    (unless (= i (read-byte in)) (return :wrong))
                                    (incf i))
                               finally (return t))))
               (writer (spawn (group)
                         (dotimes (i 200)
                           (when (= 0 (random 4)) (sleep (random 0.001)))
                           (write-byte i out)
                           (finish-output out)))))
          (is (eq t (join reader)))
          (join writer))))))

(test descriptor-handlers
  (with-group (group 2)
    (with-pipe (in out)
      (let* ((fd (sb-sys:fd-stream-fd in))
             (fiber (spawn (group)
                      (let ((line nil))
                        (sb-sys:with-fd-handler (fd :input (lambda (fd)
                                                             (declare (ignore fd))
                                                             (setf line (read-line in))))
                          (loop until line do (sb-sys:serve-event 1)))
                        line))))
        (is (eq t (join (spawn (group) (loop repeat 10 do (fiber-yield)) t))))
        (send-line out "handled")
        (is (string= "handled" (join fiber)))))))

;;; What the kernel does not take is written by who finishes, not by a handler of a fiber that is dead.
(test output-of-a-stream-that-serves-events
  (on-carriers (n)
    (with-group (group n)
      (multiple-value-bind (in out) (sb-posix:pipe)
        (let ((stream (sb-sys:make-fd-stream out :output t :buffering :full :serve-events t))
              (input (sb-sys:make-fd-stream in :input t :buffering :full))
              (length 300000))
          (let ((reader (spawn (group) (sleep 1/100) (loop while (read-char input nil) count t))))
            (loop repeat 2
                  do (join (spawn (group)
                             (write-string (make-string length :initial-element #\x) stream)
                             (force-output stream))))
            (join (spawn (group) (finish-output stream) (close stream)))
            (is (= (* 2 length) (join reader)))
            (close input)))))))

;;;; Closing

(defun closers ()
  "Ways to close a socket, or the stream STREAM on it."
  (list (lambda (socket stream) (declare (ignore stream)) (socket-close socket))
        (lambda (socket stream) (declare (ignore stream)) (socket-close socket :abort t))
        (lambda (socket stream) (declare (ignore socket)) (close stream))
        (lambda (socket stream) (declare (ignore socket)) (close stream :abort t))
        (lambda (socket stream)
          (declare (ignore stream))
          (sb-unix:unix-close (socket-file-descriptor socket)))
        (lambda (socket stream)
          (declare (ignore stream))
          (sb-posix:close (socket-file-descriptor socket)))))

;;; Prevents: a fiber that waits for ever for a descriptor that is no more.
(test closed-while-a-fiber-waits
  (on-carriers (n)
    (with-group (group n)
      (loop for closer in (closers)
            for i from 0
            do (with-sockets (a b)
                 (let* ((stream (stream-of a))
                        (reader (spawn (group)
                                  (handler-case (read-line stream nil :eof)
                                    (error () :error)))))
                   (wait-until-parked reader)
                   (funcall closer a stream)
                   (is (member (fiber-join reader :timeout 5 :default :hangs) '(:error :eof))
                       "closer ~D: ~S" i reader)
                   (when (fiber-alive-p reader) (terminate-fiber reader))))))))

(test closed-by-a-fiber
  (on-carriers (n)
    (with-group (group n)
      (with-sockets (a b)
        (let ((readers (loop repeat 5
                             collect (spawn (group)
                                       (handler-case (progn (sb-sys:wait-until-fd-usable
                                                             (socket-file-descriptor a) :input nil nil)
                                                            :usable)
                                         (error () :error))))))
          (mapc #'wait-until-parked readers)
          (join (spawn (group) (socket-close a)))
          (is (equal (make-list 5 :initial-element :error) (join-all readers))))))))

;;; Prevents: one who begins to wait between NOTE-CLOSE and the close waiting for ever.
(test closed-just-after-a-fiber-began-to-wait
  (on-carriers (n)
    (with-group (group n)
      (multiple-value-bind (reader writer) (sb-unix:unix-pipe)
        (sb-fiber::note-close reader)
        (let ((fiber (wait-until-parked
                      (spawn (group)
                        (handler-case (sb-sys:wait-until-fd-usable reader :input)
                          (error (condition) (descriptor-closed-descriptor condition)))))))
          (sb-alien:alien-funcall (sb-alien:extern-alien "close" (function sb-alien:int sb-alien:int))
                                  reader)
          (sb-fiber::note-closed reader)
          (is (eql reader (join fiber))))
        (sb-unix:unix-close writer)))))

;;; Sets of more than 1,024 descriptors, as USOCKET makes them.
(test select-of-large-numbers
  (let ((fillers (loop repeat 1100 collect (sb-unix:unix-dup 0))))
    (unwind-protect
         (on-carriers (n)
           (with-group (group n)
             (with-sockets (a b)
               (let ((fd (socket-file-descriptor a)))
                 (is (< 1024 fd))
                 (flet ((readable-p (seconds)
                          (sb-alien:with-alien ((fds (sb-alien:struct sb-unix:fd-set)))
                            (sb-unix:fd-zero fds)
                            (sb-unix:fd-set fd fds)
                            (sb-unix:unix-fast-select (1+ fd) (sb-alien:addr fds) nil nil seconds 0)
                            (sb-unix:fd-isset fd fds))))
                   (is (eq nil (join (spawn (group) (readable-p 0)))))
                   (let ((fiber (wait-until-parked (spawn (group) (readable-p 3600)))))
                     (socket-send b (octets 1) 1)
                     (is (eq t (join fiber)))))))))
      (mapc #'sb-unix:unix-close fillers))))

;;; The number of a closed descriptor is given to the next one that is opened. Prevents: a report for the old
;;; file that wakes who waits for the new one; one for the new one that is dropped as late.
(test number-used-again
  (on-carriers (n)
    (with-group (group n)
      (is (all-true-p
           (loop for k below 30
                 collect (multiple-value-bind (in out) (sb-posix:pipe)
                           (let ((duplicate (sb-posix:dup in))
                                 (old (spawn (group)
                                        (handler-case (sb-sys:wait-until-fd-usable in :input nil nil)
                                          (error () :closed)))))
                             (wait-until-parked old)
                             (sb-unix:unix-close in)
                             (multiple-value-bind (in-2 out-2) (sb-posix:pipe)
                               (let ((new (spawn (group)
                                            (sb-sys:wait-until-fd-usable in-2 :input nil nil)
                                            (sb-unix:unix-simple-poll in-2 :input 0))))
                                 (wait-until-parked new)
                                 ;; the old file, which lives on in the duplicate, becomes ready
                                 (sb-posix:write out (sb-sys:vector-sap (octets 1)) 1)
                                 (loop repeat 5 do (thread-yield))
                                 (sb-posix:write out-2 (sb-sys:vector-sap (octets 1)) 1)
                                 (prog1 (and (= in in-2)
                                             (eq :closed (join old))
                                             (join new))
                                   (mapc #'sb-unix:unix-close (list out duplicate in-2 out-2)))))))))))))

(test numbers-used-again-at-random
  (on-carriers (n)
    (is (all-true-p
         (in-fibers n 20
                    (lambda (i)
                      (loop for k below 20
                            always (with-pipe (in out)
                                     (let ((line (format nil "~D ~D" i k)))
                                       (when (= 0 (random 3)) (fiber-yield))
                                       (write-line line out)
                                       (if (= 0 (random 2))
                                           (finish-output out)
                                           (close out))
                                       (string= line (read-line in)))))))))))

;;;; Several fibers for one descriptor

;;; Prevents: a connection that is accepted by nobody since the wake-up went to one who had got another.
(test many-acceptors
  (on-carriers (n)
    (with-group (group n)
      (let* ((listener (listening-socket))
             (port (port-of listener))
             (acceptors (loop repeat 8
                              collect (spawn (group)
                                        (loop for socket = (socket-accept listener)
                                              for line = (read-line (stream-of socket))
                                              do (send-line (stream-of socket) line)
                                                 (socket-close socket)
                                              until (string= line "stop")))))
             (clients (loop for i below 60
                            collect (let ((line (format nil "client ~D" i)))
                                      (spawn (group)
                                        (let ((socket (connected-socket port)))
                                          (unwind-protect
                                               (let ((stream (stream-of socket)))
                                                 (send-line stream line)
                                                 (string= line (read-line stream)))
                                            (socket-close socket))))))))
        (is (all-true-p (join-all clients)))
        (loop repeat 8
              do (let ((socket (connected-socket port)))
                   (send-line (stream-of socket) "stop")
                   (read-line (stream-of socket) nil)
                   (socket-close socket)))
        (is (every #'null (join-all acceptors)))
        (socket-close listener)))))

(test many-readers
  (on-carriers (n)
    (with-group (group n)
      (multiple-value-bind (in out) (sb-posix:pipe)
        (let ((readers (loop repeat 10
                             collect (spawn (group)
                                       (let ((buffer (octets 1)))
                                         (loop with sum = 0
                                               for result = (sb-sys:with-pinned-objects (buffer)
                                                              (sb-fiber::unix-read-now
                                                               in (sb-sys:vector-sap buffer) 1))
                                               do (cond ((null result)
                                                         (sb-sys:wait-until-fd-usable in :input nil nil))
                                                        ((= result 0) (return sum))
                                                        (t (incf sum (aref buffer 0))))))))))
          (let ((data (make-array 1000 :element-type '(unsigned-byte 8) :initial-element 3)))
            (sb-sys:with-pinned-objects (data)
              (dotimes (i 10) (sb-posix:write out (sb-sys:vector-sap data) 100) (thread-yield))))
          (sb-unix:unix-close out)
          (is (= 3000 (reduce #'+ (join-all readers))))
          (sb-unix:unix-close in))))))

;;;; Time

(defun slept-long-enough-p (seconds)
  (let ((start (sb-fiber::fiber-now)))
    (sleep seconds)
    (>= (- (sb-fiber::fiber-now) start) (floor (* (rational seconds) 1000000000)))))

(test thousand-fibers-sleep-at-random
  (on-carriers (n)
    (is (all-true-p (in-fibers n 1000 (lambda (i)
                                        (declare (ignore i))
                                        (loop repeat 3 always (slept-long-enough-p (random 0.03)))))))))

;;; SLEEP of a constant is compiled in another way than that of a variable. Prevents: a carrier that sleeps itself.
(test all-ways-to-sleep
  (with-group (group 1)
    (let ((sleepers (list (spawn (group) (sleep 3600))
                          (spawn (group) (sleep 3600.0))
                          (spawn (group) (sleep 3600.5d0))
                          (spawn (group) (sleep 7201/2))
                          (spawn (group) (let ((seconds (+ 3600 (random 10)))) (declare (fixnum seconds)) (sleep seconds)))
                          (spawn (group) (sleep (parse-integer "3600")))
                          (spawn (group) (sleep (expt 10 30)))
                          (spawn (group) (fiber-sleep 3600))
                          (spawn (group) (sb-unix:nanosleep 3600 0))
                          (spawn (group) (sb-ext:wait-for nil :timeout 3600))
                          (spawn (group) (sb-sys:with-deadline (:seconds 3600) (sleep 3000)))
                          (spawn (group) (usocket:wait-for-input '() :timeout 3600)))))
      (is (= 3 (join (spawn (group) (+ 1 2)))))
      (is (= 3 (join (spawn (group) (sleep 1/1000) 3))))
      (mapc #'terminate-fiber (remove-if-not #'fiber-alive-p sleepers))
      (is (= 3 (join (spawn (group) (+ 1 2))))))))

(test sleep-of-nothing
  (on-carriers (n)
    (is (equal '(nil nil nil) (in-fiber (n) (list (sleep 0) (sleep 0.0) (sleep 1/1000000000)))))))

(test sleep-with-a-deadline
  (on-carriers (n)
    (is (equal '(:deadline :deadline nil :inner)
               (in-fiber (n)
                 (list (handler-case (sb-sys:with-deadline (:seconds 1/100) (sleep 3600))
                         (sb-sys:deadline-timeout () :deadline))
                       (let ((seconds 3600))
                         (handler-case (sb-sys:with-deadline (:seconds 1/100) (sleep seconds))
                           (sb-sys:deadline-timeout () :deadline)))
                       (sb-sys:with-deadline (:seconds 3600) (sleep 1/100))
                       (handler-case (sb-sys:with-deadline (:seconds 3600)
                                       (sb-sys:with-deadline (:seconds 1/100) (sleep 3600)))
                         (sb-sys:deadline-timeout () :inner))))))))

(test read-with-a-deadline
  (on-carriers (n)
    (with-pipe (in out)
      (is (eq :deadline (in-fiber (n)
                          (handler-case (sb-sys:with-deadline (:seconds 1/100) (read-line in))
                            (sb-sys:deadline-timeout () :deadline)))))
      (send-line out "line")
      (is (string= "line" (in-fiber (n) (read-line in)))))))

(defmacro timeout-p (&body body)
  `(handler-case (sb-ext:with-timeout 1/100 ,@body)
     (sb-ext:timeout () t)))

;;; Prevents: a time-out that unwinds another fiber than the one that set it, or ends the process.
(test with-timeout
  (on-carriers (n)
    (with-pipe (in out)
      (let ((mutex (sb-thread:make-mutex)))
        (sb-thread:with-mutex (mutex)
          (is (equal '(t t t t t t (:in-time))
                     (in-fiber (n)
                       (list (timeout-p (sleep 3600))
                             (timeout-p (fiber-park))
                             (timeout-p (loop (fiber-yield)))
                             (timeout-p (read-line in))
                             (timeout-p (sb-thread:with-mutex (mutex) nil))
                             (timeout-p (sb-thread:wait-on-semaphore (sb-thread:make-semaphore)))
                             (list (sb-ext:with-timeout 3600 (sleep 1/1000) :in-time)))))))))))

(test with-timeout-in-many
  (on-carriers (n)
    (is (equal (loop for i below 60 collect (if (evenp i) :timeout i))
               (in-fibers n 60
                          (lambda (i)
                            (let ((result i))
                              (loop repeat 3
                                    do (setf result
                                             (handler-case
                                                 (sb-ext:with-timeout (if (evenp i) 1/200 3600)
                                                   (if (evenp i) (sleep 3600) (sleep 1/200))
                                                   i)
                                               (sb-ext:timeout () :timeout))))
                              result)))))))

(test timers
  (on-carriers (n)
    (with-group (group n)
      (let* ((ran-in nil)
             (fiber (wait-until-parked (spawn (group) (catch 'woken (fiber-park)))))
             (timer (sb-ext:make-timer (lambda ()
                                         (setf ran-in (current-fiber))
                                         (throw 'woken :woken))
                                       :thread fiber)))
        (sb-ext:schedule-timer timer 1/100)
        (is (eq :woken (join fiber)))
        (is (eq fiber ran-in))))))

;;; A loop that waits for no time lets the others run, as it does in a thread. The monitor would help them.
(test waiting-for-no-time-lets-others-run
  (let ((stuck *stuck-carrier-time*)
        (semaphore (make-semaphore)))
    (unwind-protect
         (progn
           (setf *stuck-carrier-time* nil)
           (with-group (group 1)
             (let ((sleeper (spawn (group) (fiber-park))))
               (dolist (wait (list (lambda () (sleep 0))
                                   (lambda () (sleep 1d-9))
                                   (lambda () (fiber-park :timeout 0))
                                   (lambda () (fiber-join sleeper :timeout 0 :default nil))
                                   (lambda () (sb-sys:serve-all-events 0))
                                   (lambda () (wait-on-semaphore semaphore :timeout 1/1000000))))
                 (let* ((other nil)
                        (first (spawn (group) (fiber-yield)
                                 (loop repeat 100000 until other do (funcall wait) finally (return other)))))
                   (spawn (group) (setf other t))
                   (is (eq t (join first)))))
               (fiber-unpark sleeper))))
      (setf *stuck-carrier-time* stuck))))

;;;; Last, since a failure leaves a carrier that spins

;;; Prevents: a fiber that asks again and again whether there is input, and keeps its carrier from whoever would
;;; provide it.
(test polling-lets-others-run
  (let ((*patience* 10))
    (dolist (poll (list #'listen
                        (lambda (in)
                          (sb-sys:wait-until-fd-usable (sb-sys:fd-stream-fd in) :input 0 nil))))
      (with-pipe (in out)
        (is (equal '(#\x nil)
                   (in-fibers 1 2 (lambda (i)
                                    (cond ((= i 0) (loop until (funcall poll in)) (read-char in))
                                          (t (write-char #\x out) (finish-output out)))))))))))
