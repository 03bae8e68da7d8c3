;;;; Waiting for descriptors: streams, pipes, time-outs of both, several fibers for one of them

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(dolist (file '("descriptors" "files"))
  (load (merge-pathnames (format nil "support/~A.lisp" file) *load-truename*)))

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

;;; One fiber reads, one writes, on each of the two sides. Prevents: an arm for one direction that
;;; cancels the other.
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

;;; The kernel cannot be told not to wait for those. Prevents: a carrier that waits for a fiber of
;;; its own.
(test named-pipe-whose-reader-is-slow
  (with-group-of-same-carriers (group 1)
    (with-named-pipe (path)
      (let* ((in (sb-posix:open path (logior sb-posix:o-rdonly sb-posix:o-nonblock)))
             (out (sb-posix:open path sb-posix:o-wronly))
             (data (octets 1000000)))
        (sb-posix:fcntl in sb-posix:f-setfl 0)
        (let* ((input (sb-sys:make-fd-stream in :input t :element-type '(unsigned-byte 8)
                                                :buffering :full :auto-close t))
               (output (sb-sys:make-fd-stream out :output t :element-type '(unsigned-byte 8)
                                                  :buffering :full :auto-close t))
               (writer (spawn (group) (write-sequence data output) (close output) :written))
               (reader (spawn (group)
                         (wait-until-parked writer)
                         (let ((buffer (make-array 1000000 :element-type '(unsigned-byte 8))))
                           (loop with n = 0
                                 while (< n 1000000)
                                 do (setf n (read-sequence
                                             buffer input
                                             :start n :end (min 1000000 (+ n 30000))))
                                    (fiber-yield))
                           (equalp buffer data)))))
          (is (equal '(:written t) (join-all (list writer reader)))))))))

;;; Each open(2) waits for the other.
(test ends-of-a-named-pipe-opened-by-fibers
  (on-carriers (n)
    (with-group (group n)
      (with-named-pipe (path)
        (let* ((reader (spawn (group) (with-open-file (stream path) (read-line stream))))
               (writer (spawn (group)
                         (with-open-file (stream path :direction :output :if-exists :append)
                           (write-line "through a named pipe" stream)
                           :written))))
          (is (equal '("through a named pipe" :written) (join-all (list reader writer)))))))))

;;; The only carrier must not wait in the kernel for a peer that does not read, or does not write.
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
                        (handler-case
                            (loop with stream = (stream-of a :element-type '(unsigned-byte 8))
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
        (let* ((line (map 'string #'code-char
                          (loop for i below 3000 collect (+ 32 (mod (* i 37) 3000)))))
               (writer (spawn (group)
                         (loop repeat 50
                               do (write-line line out) (when (= 0 (random 5)) (finish-output out)))
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
                         (with-open-file (in "/dev/zero" :element-type '(unsigned-byte 8))
                           (read-byte in))
                         (with-open-file (out "/dev/null" :direction :output :if-exists :append)
                           (write-line "a line" out)
                           t))))))))

(test process-output
  (on-carriers (n :counts '(1 2))
    (is (equal '("hello" 3)
               (in-fiber (n)
                 (let ((process (sb-ext:run-program "/bin/sh"
                                                    '("-c" "sleep 0.05; echo hello; exit 3")
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
                               (let ((stream (stream-of a :element-type '(unsigned-byte 8)
                                                        :timeout 1/50)))
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
                            (sb-sys:wait-until-fd-usable (sb-sys:fd-stream-fd out)
                                                         :output 1 nil))))))))))

;;; Prevents: a fiber that does not learn that its time is over, but waits for no time again and
;;; again, since
;;; there is something that it cannot be interrupted by now.
(test time-out-while-interruptions-are-held-off
  (on-carriers (n)
    (with-group (group n)
      (with-pipe (in out)
        (let* ((interrupted (make-flag))
               (waiter (spawn (group)
                         (sb-sys:without-interrupts
                           (interrupt-fiber (current-fiber) (lambda () (raise-flag interrupted)))
                           (list (sb-sys:wait-until-fd-usable (sb-sys:fd-stream-fd in)
                                                              :input 1/10 nil)
                                 (flag-value interrupted))))))
          (is (equal '(nil nil) (join waiter)))
          (is-true (flag-value interrupted)))))))

;;; Prevents: a byte or a wake-up that is lost because a time-out comes at the same time.
(test timeouts-and-data-at-once
  (on-carriers (n)
    (with-group (group n)
      (with-pipe (in out :element-type '(unsigned-byte 8) :buffering :none)
        (let* ((fd (sb-sys:fd-stream-fd in))
               (reader (spawn (group)
                         (loop with i = 0
                               while (< i 200)
                               do (when (or (listen in)
                                            (sb-sys:wait-until-fd-usable fd
                                                                         :input (random 0.004) nil))
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

;;; What the kernel does not take is written by the fiber that finishes the output, not by a handler
;;; of a fiber that is dead.
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

;;;; Several fibers for one descriptor

;;; Prevents: a connection that is not accepted since the wake-up went to a fiber that had got
;;; another.
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
                                                              (sb-fiber:unix-read-now
                                                               in (sb-sys:vector-sap buffer) 1))
                                               do (cond ((null result)
                                                         (sb-sys:wait-until-fd-usable
                                                          in :input nil nil))
                                                        ((= result 0) (return sum))
                                                        (t (incf sum (aref buffer 0))))))))))
          (let ((data (make-array 1000 :element-type '(unsigned-byte 8) :initial-element 3)))
            (sb-sys:with-pinned-objects (data)
              (dotimes (i 10) (sb-posix:write out (sb-sys:vector-sap data) 100) (thread-yield))))
          (sb-unix:unix-close out)
          (is (= 3000 (reduce #'+ (join-all readers))))
          (sb-unix:unix-close in))))))

;;;; Regular files

(defmacro with-file-of-octets ((path octets) &body body)
  `(let ((,path (temporary-path "octets")))
     (unwind-protect
          (progn (with-open-file (out ,path :direction :output :element-type '(unsigned-byte 8))
                   (write-sequence ,octets out))
                 ,@body)
       (delete-file ,path))))

(defun forget-contents (path)
  "Let the file PATH be on the disk only, if the kernel does so."
  (let ((fd (sb-posix:open path sb-posix:o-rdonly)))
    (sb-posix:fsync fd)
    (sb-alien:alien-funcall
     (sb-alien:extern-alien "posix_fadvise"
                            (function sb-alien:int sb-alien:int sb-alien:long sb-alien:long
                                      sb-alien:int))
     fd 0 0 4)                          ; POSIX_FADV_DONTNEED
    (sb-posix:close fd)))

(defun octets-of-file (path length)
  "LENGTH octets of the file PATH, in an octet vector, read in parts of several sizes."
  (let ((octets (make-array length :element-type '(unsigned-byte 8))))
    (with-open-file (in path :element-type '(unsigned-byte 8))
      (loop for start = 0 then end
            for size in '#1=(1 100 5000 100000 . #1#)
            while (< start length)
            for end = (read-sequence octets in :start start :end (min length (+ start size)))
            until (= start end)))
    octets))

(test files-that-are-not-in-memory
  (let ((octets (octets 500000)))
    (with-file-of-octets (path octets)
      (on-carriers (n)
        (with-group (group n)
          (forget-contents path)
          (is-true (every (lambda (read) (equalp octets read))
                          (join-all (loop repeat 5
                                          collect (spawn (group)
                                                    (octets-of-file path 500000)))))))))))

(defmacro with-reading-from-disk ((fd octets read) path &body body)
  "Execute BODY in a fiber, with FD open for the file PATH. (READ) reads ten octets from it to
OCTETS as if they were not in memory."
  `(in-fiber ()
     (let* ((,fd (sb-posix:open ,path sb-posix:o-rdonly))
            (,octets (make-array 10 :element-type '(unsigned-byte 8)))
            (cell (sb-fiber::find-fd-cell ,fd t))
            (file (sb-fiber::note-file cell)))
       (sb-sys:with-pinned-objects (,octets)
         (flet ((,read ()
                  (sb-fiber::read-in-pool cell file ,fd (sb-sys:vector-sap ,octets) 10)))
           (unwind-protect (progn ,@body)
             (sb-unix:unix-close ,fd)))))))

(test a-thread-reads-from-the-disk
  (with-file-of-octets (path (octets 20))
    (let ((calls 0))
      (with-call-before ('sb-fiber:call-blocking
                         (lambda (function)
                           (declare (ignore function))
                           (incf calls sb-fiber::**buffer-holders**)))
        (is (equalp (list 10 (octets 10) 10 (subseq (octets 20) 10) 0)
                    (with-reading-from-disk (fd octets read-ten) path
                      (list (read-ten) (copy-seq octets) (read-ten) (copy-seq octets)
                            (read-ten))))))
      (is (= 3 calls)))))

;;; Prevents: what a thread of the pool reads from the file that has the number now.
(test closed-before-a-thread-reads
  (with-file-of-octets (path (octets 20))
    (is (equalp (list (- sb-unix:ebadf) (make-array 10 :initial-element 0))
                (with-reading-from-disk (fd octets read-ten) path
                  (let ((number fd))
                    (with-call-before ('sb-fiber:call-blocking
                                       (lambda (function)
                                         (declare (ignore function))
                                         (sb-unix:unix-close number)
                                         (assert (= number (sb-posix:open path 0)))))
                      (list (read-ten) octets))))))))

;;; Prevents: a thread that writes to a stack or a buffer that is used for something else.
(test terminated-while-a-thread-reads
  (with-file-of-octets (path (octets 20))
    (let ((seen nil))
      (handler-case
          (with-reading-from-disk (fd octets read-ten) path
            (let ((fiber (current-fiber)))
              (unwind-protect
                   (with-call-before ('sb-fiber:call-blocking
                                      (lambda (function)
                                        (declare (ignore function))
                                        (terminate-fiber fiber)))
                     (read-ten))
                (setf seen (copy-seq octets)))))
        (sb-thread:join-thread-error ()))
      (is (equalp (octets 10) seen)))))

;;;; calls with several pieces of memory

(defun write-parts-now (fd parts)
  "Write the PARTS, lists of octets and a start, by one call."
  (let ((words (make-array (* 2 (length parts)) :element-type 'sb-ext:word)))
    (sb-sys:with-pinned-objects (words)
      (labels ((pin-and-write (rest i)
                 (if rest
                     (destructuring-bind (octets start) (first rest)
                       (sb-sys:with-pinned-objects (octets)
                         (setf (aref words i)
                               (+ start (sb-sys:sap-int (sb-sys:vector-sap octets)))
                               (aref words (1+ i)) (- (length octets) start))
                         (pin-and-write (rest rest) (+ i 2))))
                     (sb-fiber:unix-writev-now fd (sb-sys:vector-sap words) (length parts)))))
        (pin-and-write parts 0)))))

(defun parts-after (n parts)
  "What is left of PARTS once N octets are written."
  (loop for ((octets start) . rest) on parts
        for size = (- (length octets) start)
        when (< n size) return (cons (list octets (+ start n)) rest)
        do (decf n size)))

(defun write-parts (fd &rest vectors)
  "Write VECTORS to FD. Return how many calls would have waited."
  (loop with parts = (mapcar (lambda (octets) (list octets 0)) vectors)
        with refused = 0
        while parts
        do (multiple-value-bind (n errno) (write-parts-now fd parts)
             (cond (n (setf parts (parts-after n parts)))
                   ((/= errno sb-unix:ewouldblock) (return errno))
                   (t (incf refused)
                      (sb-sys:wait-until-fd-usable fd :output nil nil))))
        finally (return refused)))

(defun octets-of (fd n)
  "The next N octets of FD."
  (let ((octets (make-array n :element-type '(unsigned-byte 8)))
        (stream (sb-sys:make-fd-stream fd :input t :element-type '(unsigned-byte 8))))
    (read-sequence octets stream)
    octets))

(defun in-one-vector (&rest vectors)
  (apply #'concatenate '(simple-array (unsigned-byte 8) (*)) vectors))

(defun check-parts (group in out)
  "Write to OUT by parts, while the other end, IN, is read by a fiber that begins late."
  (let* ((vectors (list (octets 100000) (octets 0) (octets 200000 1) (octets 3 2)))
         (writer (spawn (group) (apply #'write-parts out vectors)))
         (reader (spawn (group)
                   (wait-until-parked writer)
                   (octets-of in 300003))))
    (is (plusp (join-fiber writer)))
    (is (equalp (apply #'in-one-vector vectors) (join-fiber reader)))))

(test parts-of-memory-are-written-by-one-call
  (on-carriers (n)
    (with-group (group n)
      (dolist (opener (list #'sb-unix:unix-pipe #'socket-pair))
        (multiple-value-bind (in out) (funcall opener)
          (check-parts group in out)
          (sb-unix:unix-close in)
          (sb-unix:unix-close out)))
      (with-named-pipe (path)
        (let ((in (sb-posix:open path (logior sb-posix:o-rdonly sb-posix:o-nonblock)))
              (out (sb-posix:open path sb-posix:o-wronly)))
          (sb-posix:fcntl in sb-posix:f-setfl 0)
          (check-parts group in out)
          (sb-unix:unix-close in)
          (sb-unix:unix-close out))))))

(defun parts-in-a-file ()
  "What WRITE-PARTS has written to a file."
  (let ((path (temporary-path "parts")))
    (with-open-file (stream path :direction :io :element-type '(unsigned-byte 8))
      (delete-file path)
      (write-parts (sb-sys:fd-stream-fd stream) (octets 5) (octets 0) (octets 7))
      (file-position stream 0)
      (octets-of (sb-sys:fd-stream-fd stream) 12))))

(test parts-of-a-file
  (with-group (group 1)
    (let ((expected (in-one-vector (octets 5) (octets 7))))
      (is (equalp expected (join-fiber (spawn (group) (parts-in-a-file)))))
      (is (equalp expected (parts-in-a-file))))))

(test parts-for-a-closed-descriptor
  (with-group (group 1)
    (is (eql sb-unix:ebadf
             (join-fiber (spawn (group) (write-parts 1000000 (octets 1) (octets 1))))))))

;;; Prevents: a table that refers to what is in an arena, which is used again.
(test descriptors-closed-in-an-arena
  (is (equal "(T NIL)"
             (child-result
              '(let ((arena (sb-vm:new-arena 1048576)))
                (multiple-value-bind (reader writer) (sb-unix:unix-pipe)
                  (declare (ignore writer))
                  (sb-vm:with-arena (arena) (sb-unix:unix-close reader))
                  (let ((cell (sb-fiber::find-fd-cell reader nil)))
                    (princ (list (not (null cell))
                                 (sb-vm:find-containing-arena
                                  (sb-kernel:get-lisp-obj-address cell)))))))))))

;;; Prevents: a fiber that has nothing to wait for, and asks again and again, and so keeps its
;;; carrier from the one that would change that.
(test waiting-for-what-is-ready-lets-others-run
  (dolist (kind '(:one-shot :persistent))
    (with-stuck-carrier-time (nil)
      (let ((group (start-fibers nil :carrier-count 1 :poller kind)))
        (multiple-value-bind (a b) (socket-pair)
          (let* ((over nil)
                 (waiter (spawn (group)
                           (loop until over do (sb-sys:wait-until-fd-usable a :input))
                           :over))
                 (other (spawn (group) (setf over t))))
            (sb-unix:unix-write b (make-array 1 :element-type '(unsigned-byte 8)) 0 1)
            (is (eq :over (join waiter)))
            (join other)
            (mapc #'sb-unix:unix-close (list a b))))
        (is-true (finish-fibers group :timeout *patience*))))))
