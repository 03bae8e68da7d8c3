;;;; Descriptors that are closed while a fiber uses them, and whose number another file has when it
;;;; goes on

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(dolist (file '("descriptors" "files" "limits"))
  (load (merge-pathnames (format nil "support/~A.lisp" file) *load-truename*)))

(def-suite* reuse)

;;;; Two fibers of one carrier: one uses a socket, the other closes it in the meantime

(defun spend-all ()
  (setf (sb-fiber::carrier-budget sb-fiber::*carrier*) (* -4 sb-fiber::+budget+)))

(defun call-before-other (use other)
  "Call USE in a fiber that has to let OTHER, in a second fiber, go first before its first system
call. Return what they return; for USE, the condition that it signals."
  (with-group-of-same-carriers (group 1)
    (let* ((second nil)
           (first (spawn (group)
                    (setf second (spawn (group) (funcall other)))
                    (spend-all)
                    (handler-case (funcall use) (error (condition) condition)))))
      (values (join first) (join second)))))

(defun call-after-waking (use wake other)
  "Call USE in a fiber, WAKE in another when the first has parked, and OTHER when the first can run
and does not yet. Return what USE and OTHER return, as above."
  (with-group-of-same-carriers (group 1)
    (let* ((first (spawn (group) (handler-case (funcall use) (error (condition) condition))))
           (second (spawn (group)
                     (wait-until-parked first)
                     (funcall wake)
                     (loop while (eq :parked (fiber-state first)) do (fiber-yield))
                     (funcall other))))
      (values (join first) (join second)))))

(defun stranger (fd)
  "A connection with FD for one end; return the other one, from which there is something to read."
  (multiple-value-bind (new peer) (socket-pair)
    (assert (= fd new))
    (write-octets peer (secret))
    peer))

(defun secret () (map '(vector (unsigned-byte 8)) #'char-code "SECRET"))

(defun write-octets (fd octets)
  (let ((octets (coerce octets '(simple-array (unsigned-byte 8) (*)))))
    (assert (eql (length octets) (sb-unix:unix-write fd octets 0 (length octets))))))

(defun readable-octets (fd)
  "What can be read from the socket FD now."
  (let ((buffer (make-array 10000 :element-type '(unsigned-byte 8))))
    (sb-sys:with-pinned-objects (buffer)
      (let ((n (sb-fiber::%receive-now fd (sb-sys:vector-sap buffer) (length buffer))))
        (subseq buffer 0 (max 0 n))))))

(defun stranger-problem (condition fd peer)
  "What happened to the connection of FD and PEER, if anything did, or to the fiber that used FD
before."
  (unwind-protect
       (cond ((not (typep condition 'error)) (format nil "~S was returned" condition))
             ((not (typep condition '(or descriptor-closed stream-error sb-sys:deadline-timeout)))
              (format nil "~S: ~A" condition condition))
             ((not (equalp (readable-octets fd) (secret))) "what came was read by another")
             ((plusp (length (readable-octets peer))) "something was written by another"))
    (mapc #'sb-unix:unix-close (list fd peer))))

(defun close-and-reuse (closer socket stream)
  "Close SOCKET, and return its number and the other end of a new connection with that number."
  (let ((fd (socket-file-descriptor socket)))
    (funcall closer socket stream)
    (list fd (stranger fd))))

(defparameter *uses*
  (list :read-byte (lambda (socket stream) (declare (ignore socket)) (read-byte stream))
        :read-sequence (lambda (socket stream)
                         (declare (ignore socket))
                         (read-sequence (make-array 10 :element-type '(unsigned-byte 8)) stream))
        :receive (lambda (socket stream) (declare (ignore stream)) (socket-receive socket nil 10))
        :receive-all (lambda (socket stream)
                       (declare (ignore stream))
                       (socket-receive socket nil 10 :waitall t))
        :usable (lambda (socket stream)
                  (declare (ignore stream))
                  (sb-sys:wait-until-fd-usable (socket-file-descriptor socket) :input nil nil)))
  "Names and functions that read from a socket or its stream.")

(defparameter *other-uses*
  (list :listen (lambda (socket stream) (declare (ignore socket)) (listen stream))
        :peek (lambda (socket stream)
                (declare (ignore stream))
                (socket-receive socket nil 10 :peek t))
        :write (lambda (socket stream)
                 (declare (ignore socket))
                 (write-byte 1 stream)
                 (finish-output stream))
        :write-sequence (lambda (socket stream)
                          (declare (ignore socket))
                          (write-sequence (octets 100000) stream))
        :send (lambda (socket stream) (declare (ignore stream)) (socket-send socket (octets 10) 10))
        :send-nothing-else (lambda (socket stream)
                             (declare (ignore stream))
                             (socket-send socket (octets 10) 10 :dontwait t)))
  "Others, which do not park for input.")

(defun binary-stream-of (socket)
  (stream-of socket :element-type '(unsigned-byte 8)))

(defmacro with-binary-sockets ((a b stream) &body body)
  `(with-sockets (,a ,b)
     (let ((,stream (binary-stream-of ,a))) ,@body)))

;;; Prevents: bytes of one connection that are read or written by the user of another.
(test closed-while-a-fiber-yields
  (loop for (name use) on (append *uses* *other-uses*) by #'cddr
        unless (eq name :usable)        ; makes no call first
          do (loop for closer in (closers)
                   for i from 0
                   do (with-binary-sockets (a b stream)
                        (multiple-value-bind (result new)
                            (call-before-other (lambda () (funcall use a stream))
                                               (lambda () (close-and-reuse closer a stream)))
                          (let ((problem (apply #'stranger-problem result new)))
                            (is (null problem) "~S, closer ~D: ~A" name i problem)))))))

(test closed-when-a-fiber-is-about-to-read
  (loop for (name use) on *uses* by #'cddr
        do (loop for closer in (closers)
                 for i from 0
                 do (with-binary-sockets (a b stream)
                      (multiple-value-bind (result new)
                          (call-after-waking (lambda () (funcall use a stream))
                                             (lambda () (socket-send b (octets 1) 1))
                                             (lambda () (close-and-reuse closer a stream)))
                        (let ((problem (apply #'stranger-problem result new)))
                          (is (null problem) "~S, closer ~D: ~A" name i problem)))))))

(defun drain-until (predicate socket)
  (loop until (funcall predicate)
        do (readable-octets (socket-file-descriptor socket))
           (fiber-yield)))

(test closed-when-a-fiber-is-about-to-write
  (dolist (use (list (lambda (socket stream)
                       (declare (ignore socket))
                       (write-sequence (octets 20000000) stream)
                       (finish-output stream))
                     (lambda (socket stream)
                       (declare (ignore stream))
                       (socket-send socket (octets 20000000) 20000000))))
    (loop for closer in (closers)
          for i from 0
          do (with-binary-sockets (a b stream)
               (multiple-value-bind (result new)
                   (with-group-of-same-carriers (group 1)
                     (let* ((first (spawn (group)
                                     (handler-case (funcall use a stream)
                                       (error (condition) condition))))
                            (second (spawn (group)
                                      (wait-until-parked first)
                                      (drain-until (lambda () (eq :runnable (fiber-state first))) b)
                                      (close-and-reuse closer a stream))))
                       (values (join first) (join second))))
                 (let ((problem (apply #'stranger-problem result new)))
                   (is (null problem) "closer ~D: ~A" i problem)))))))

;;;; Fibers that are interrupted just before the system call

(defun call-interrupted (use fd interruption)
  "Call USE in a fiber that is interrupted by INTERRUPTION after it has compared the file of FD with
the one that it noted, unless it cannot be there. Return what it returns, or the condition."
  (let ((calls 0) (user nil))
    (flet ((call (f number)
             (prog1 (funcall f number)
               (when (and (eql number fd) (eq user sb-thread:*current-thread*) (= 2 (incf calls)))
                 (interrupt-fiber user interruption)))))
      (sb-int:encapsulate 'sb-fiber::file-identity 'test #'call)
      (unwind-protect
           (in-fiber ()
             (setf user (current-fiber))
             (handler-case (funcall use) (error (condition) condition)))
        (sb-int:unencapsulate 'sb-fiber::file-identity 'test)))))

;;; It is being closed all the time, so that the comparison is a call.
(defun octets-after-interruption (use)
  "Call USE with a socket and its stream; before its system call the number of the socket becomes
another's. Return the octets that arrive where they should, and where they should not."
  (with-binary-sockets (a b stream)
    (let* ((fd (socket-file-descriptor a)) (mark nil) (new-peer nil))
      (socket-send b (octets 10) 10)
      (sb-ext:cancel-finalization stream)
      (call-interrupted (lambda ()
                          (setf mark (sb-fiber::note-close fd))
                          (funcall use a stream))
                        fd
                        (lambda ()
                          (close-for-real fd)
                          (setf new-peer (stranger fd))
                          (sb-fiber::note-closed fd mark)))
      (assert new-peer)
      (prog1 (list (readable-octets (socket-file-descriptor b)) (readable-octets new-peer)
                   (equalp (readable-octets fd) (secret)))
        (sb-unix:unix-close new-peer)))))

;;; Prevents: an answer that is sent to another client, if a fiber is preempted there.
(test interrupted-before-the-call
  (loop for name in '(:write :send :read-byte :receive)
        for use = (getf (append *uses* *other-uses*) name)
        do (destructuring-bind (right wrong untouched) (octets-after-interruption use)
             (is (= (if (member name '(:write :send)) (if (eq name :write) 1 10) 0)
                    (length right))
                 "~S: ~S arrived" name right)
             (is (equalp #() wrong) "~S wrote ~S" name wrong)
             (is-true untouched "~S read what another was to read" name))))

;;; Prevents: lines of one log that are written to another.
(test interrupted-before-writing-to-a-file
  (let* ((paths (list (temporary-path "first") (temporary-path "second")))
         (stream (open (first paths) :direction :output))
         (fd (sb-sys:fd-stream-fd stream)) (mark nil) (new nil))
    (call-interrupted (lambda ()
                        (setf mark (sb-fiber::note-close fd))
                        (write-line "first" stream)
                        (finish-output stream))
                      fd
                      (lambda ()
                        (close-for-real fd)
                        (setf new (open (second paths) :direction :output))
                        (assert (= fd (sb-sys:fd-stream-fd new)))
                        (sb-fiber::note-closed fd mark)))
    (sb-ext:cancel-finalization stream)
    (close new)
    (flet ((line (path) (with-open-file (in path) (read-line in nil))))
      (is (equal '("first" nil) (mapcar #'line paths))))
    (mapc #'delete-file paths)))

;;; Prevents: the same, if it was preempted a little earlier.
(test closed-before-the-file-is-noted
  (dolist (name '(:write :read-byte))
    (with-binary-sockets (a b stream)
      (let ((fd (socket-file-descriptor a)) (user nil) (new '()))
        (sb-int:encapsulate 'sb-fiber::find-fd-cell 'test
                            (lambda (f number createp)
                              (when (and (eql number fd) (eq user sb-thread:*current-thread*))
                                (setf user nil
                                      new (close-and-reuse (fourth (closers)) a stream)))
                              (funcall f number createp)))
        (unwind-protect
             (let ((condition (in-fiber ()
                                (setf user (current-fiber))
                                (handler-case
                                    (funcall (getf (append *uses* *other-uses*) name) a stream)
                                  (error (condition) condition)))))
               (is (null (apply #'stranger-problem condition new))))
          (sb-int:unencapsulate 'sb-fiber::find-fd-cell 'test))))))

;;; Prevents: a carrier that waits in poll(2) for what can never be ready, if a stream is closed
;;; between a call that would wait and the wait.
(test waiting-for-the-number-of-a-closed-stream
  (is (eq t (in-fiber () (sb-sys:wait-until-fd-usable -1 :input nil nil)))))

(defun buffers-of (stream)
  (list (sb-impl::fd-stream-ibuf stream) (sb-impl::fd-stream-obuf stream)))

(defun buffers-after-closing ()
  "The buffers of a stream that is closed then, and those of the next one."
  (with-sockets (a b)
    (let* ((stream (stream-of a)) (buffers (buffers-of stream)))
      (close stream)
      (list buffers (buffers-of (stream-of b))))))

;;; It ends without running cleanup forms. Prevents: buffers that are not recycled any more.
(test buffers-after-a-fiber-has-lost-its-stack
  (labels ((recurse (n) (1+ (the fixnum (recurse (opaque n))))))
    (with-group (group 1)
      (let ((fiber (spawn (group) (loop (fiber-yield)))))
        (interrupt-fiber fiber (lambda ()
                                 (handler-bind ((storage-condition
                                                  (lambda (condition)
                                                    (declare (ignore condition))
                                                    (recurse 0))))
                                   (recurse 0))))
        (is (typep (handler-case (join fiber)
                     (fiber-failed (condition) (fiber-failed-cause condition)))
                   'fiber-stack-lost)))))
  (is (= 0 sb-fiber::**buffer-holders**)))

;;; Prevents: output of one stream that becomes another's, if a fiber that writes is preempted, and
;;; others close the stream.
(test buffers-while-a-fiber-is-interrupted
  (with-group (group 2)
    (let* ((interrupted (make-flag)) (done (make-flag))
           (fiber (spawn (group)
                    (wait-until (flag-value done)))))
      (interrupt-fiber fiber (lambda ()
                               (raise-flag interrupted)
                               (fiber-park)))
      (is-true (wait-until (flag-value interrupted)))
      (is (null (apply #'intersection (buffers-after-closing))))
      (raise-flag done)
      (fiber-unpark fiber)
      (join fiber)
      (is-true (apply #'intersection (buffers-after-closing))))))

;;;; Sockets that listen

(defun listen-instead (listener)
  "Close LISTENER, and return another one of the same number, and a socket that is connected to it."
  (let ((fd (socket-file-descriptor listener)))
    (socket-close listener)
    (let ((new (listening-socket)))
      (assert (= fd (socket-file-descriptor new)))
      (list new (connected-socket (port-of new))))))

(defun listener-problem (condition listener client)
  (unwind-protect
       (cond ((not (typep condition 'error)) (format nil "~S was returned" condition))
             ((non-blocking-mode listener) "the listener does not wait any more")
             ((sb-fiber::nonblocking-p (socket-file-descriptor listener)) "O_NONBLOCK is set")
             ((not (sb-unix:unix-simple-poll (socket-file-descriptor listener) :input 0))
              "the connection was accepted by another"))
    (mapc #'socket-close (list listener client))))

;;; The fiber that calls the function does not park for it, as it could for a thread that it makes.
(defun connector (port)
  "A function that has a thread connect to PORT, and returns the socket."
  (let ((flag (make-flag)) (socket nil))
    (make-thread (lambda ()
                   (wait-until (flag-value flag))
                   (setf socket (connected-socket port))))
    (lambda ()
      (raise-flag flag)
      (loop until socket do (sb-ext:spin-loop-hint))
      socket)))

(test listener-closed-while-a-fiber-yields
  (let ((listener (listening-socket)))
    (multiple-value-bind (result new)
        (call-before-other (lambda () (socket-accept listener))
                           (lambda () (listen-instead listener)))
      (is (null (apply #'listener-problem result new))))))

(test listener-closed-when-a-fiber-is-about-to-accept
  (let* ((listener (listening-socket)) (connect (connector (port-of listener))) (client nil))
    (multiple-value-bind (result new)
        (call-after-waking (lambda () (socket-accept listener))
                           (lambda () (setf client (funcall connect)))
                           (lambda () (listen-instead listener)))
      (is (null (apply #'listener-problem result new))))
    (socket-close client)))

;;;; While the number is being closed

(defun close-for-real (fd)
  (sb-alien:alien-funcall (sb-alien:extern-alien "close" (function sb-alien:int sb-alien:int)) fd))

;;; The generation is the next file's already. Prevents: a fiber that comes late and waits for that.
(test file-noted-while-it-is-being-closed
  (multiple-value-bind (fd peer) (socket-pair)
    (let ((cell (sb-fiber::find-fd-cell fd t)))
      (let* ((mark (sb-fiber::note-close fd))
             (file (sb-fiber::note-file cell)))
        (is (sb-fiber::same-file-p cell file))
        (close-for-real fd)
        (is (not (sb-fiber::same-file-p cell file)))
        (let ((peer (stranger fd)))
          (is (not (sb-fiber::same-file-p cell file)))
          ;; One that has got the new file before the closer says that it is done.
          (let ((new (sb-fiber::note-file cell)))
            (sb-fiber::note-closed fd mark)
            (is (sb-fiber::same-file-p cell new))
            (is (not (sb-fiber::same-file-p cell file)))
            (sb-unix:unix-close fd)
            (is (not (sb-fiber::same-file-p cell new))))
          (sb-unix:unix-close peer))))
    (sb-unix:unix-close peer)))

;;; The first closer says late that it is done, when a second one closes the next file of that
;;; number. Prevents: the third file that is taken for the second.
(test closed-by-two
  (multiple-value-bind (fd peer) (socket-pair)
    (let ((cell (sb-fiber::find-fd-cell fd t))
          (first (sb-fiber::note-close fd)))
      (close-for-real fd)
      (let* ((second-peer (stranger fd))
             (second (sb-fiber::note-close fd)))
        (sb-fiber::note-closed fd first)
        (let ((file (sb-fiber::note-file cell)))
          (close-for-real fd)
          (sb-fiber::note-closed fd second)
          (let ((third-peer (stranger fd)))
            (is (not (sb-fiber::same-file-p cell file)))
            (mapc #'sb-unix:unix-close (list fd peer second-peer third-peer))))))))

;;; Prevents: what is noted of the flag O_NONBLOCK of the old file, and believed of the next.
(test listener-that-is-being-closed
  (let* ((listener (listening-socket))
         (fd (socket-file-descriptor listener))
         (cell (sb-fiber::find-fd-cell fd t)))
    (sb-ext:cancel-finalization listener)
    (with-group-of-same-carriers (group 1)
      (let* ((mark (sb-fiber::note-close fd))
             (fiber (spawn (group)
                      (handler-case (socket-accept listener) (error (condition) condition)))))
        (loop repeat 2 do (join (spawn (group) nil))) ; FIBER had its turn
        (close-for-real fd)
        (let ((new (listening-socket)))
          (assert (= fd (socket-file-descriptor new)))
          (sb-fiber::note-closed fd mark)
          (is (typep (join fiber) 'descriptor-closed))
          (is (not (sb-fiber::fd-cell-nonblocking-by-us cell)))
          (socket-close new))))))

;;; Prevents: the flag set for the next file, since the number stood for the old one a moment ago.
(test listener-closed-when-a-fiber-is-about-to-set-the-flag
  (let* ((listener (listening-socket))
         (fd (socket-file-descriptor listener))
         (cell (sb-fiber::find-fd-cell fd t)))
    (sb-ext:cancel-finalization listener)
    (let* ((before (sb-fiber::note-file cell))
           (mark (sb-fiber::note-close fd))
           (during (sb-fiber::note-file cell)))
      (close-for-real fd)
      (let ((new (listening-socket)))
        (assert (= fd (socket-file-descriptor new)))
        (sb-fiber::note-closed fd mark)
        (dolist (file (list before during))
          (is (not (sb-fiber::prepare-to-accept cell file))))
        (is (not (sb-fiber::nonblocking-p fd)))
        (is-true (sb-fiber::prepare-to-accept cell (sb-fiber::note-file cell)))
        (is-true (sb-fiber::nonblocking-p fd))
        (socket-close new)))))

;;; The flag was ours. Prevents: one who accepts, and is told that nobody has come.
(test listener-closed-after-nobody-has-come
  (let* ((listener (listening-socket)) (fd (socket-file-descriptor listener)) (mark nil))
    (sb-ext:cancel-finalization listener)
    (is (typep (in-fiber ()
                 (handler-case
                     (sb-fiber::call-accepting
                      (lambda ()
                        (setf mark (sb-fiber::note-close fd))
                        (sb-alien:alien-funcall
                         (sb-alien:extern-alien
                          "accept" (function sb-alien:int sb-alien:int
                                             sb-alien:unsigned sb-alien:unsigned))
                         fd 0 0))
                      fd)
                   (error (condition) condition)))
               'descriptor-closed))
    (close-for-real fd)
    (sb-fiber::note-closed fd mark)))

;;; Prevents: the next file that is used as the old one was.
(test kind-found-out-while-the-number-is-being-closed
  (multiple-value-bind (in out) (sb-unix:unix-pipe)
    (let ((mark (sb-fiber::note-close in))
          (octets (octets 1)))
      (is (eql sb-unix:ewouldblock
               (in-fiber ()
                 (sb-sys:with-pinned-objects (octets)
                   (nth-value 1 (sb-fiber:unix-read-now in (sb-sys:vector-sap octets) 1))))))
      (close-for-real in)
      (sb-fiber::note-closed in mark)
      (is (null (sb-fiber::fd-cell-kind (sb-fiber::find-fd-cell in nil)))))
    (sb-unix:unix-close out)))

;;; It has found the old file not ready, before it was closed.
(test parked-while-it-is-being-closed
  (on-carriers (n)
    (with-group (group n)
      (multiple-value-bind (fd peer) (socket-pair)
        (let* ((mark (sb-fiber::note-close fd))
               (fiber (wait-until-parked
                       (spawn (group)
                         (handler-case (sb-sys:wait-until-fd-usable fd :input nil nil)
                           (error (condition) condition))))))
          (close-for-real fd)
          (let ((new-peer (stranger fd)))
            (sb-fiber::note-closed fd mark)
            (is (null (stranger-problem (join fiber) fd new-peer)))))
        (sb-unix:unix-close peer)))))

;;;; Numbers beyond a million

(test large-numbers-have-cells-of-their-own
  (let ((fds (list 5 (+ 5 (ash 1 20)) (+ 5 (ash 1 28)) (1- (ash 1 31)))))
    (let ((cells (mapcar (lambda (fd) (sb-fiber::find-fd-cell fd t)) fds)))
      (is (= 4 (length (remove-duplicates cells))))
      (is (equal fds (mapcar #'sb-fiber::fd-cell-fd cells)))
      (is (equal cells (mapcar (lambda (fd) (sb-fiber::find-fd-cell fd nil)) fds))))))

(defun call-with-file-limit (limit function)
  "Call FUNCTION while the process may have LIMIT descriptors. Return false if that is not to be
had."
  (let ((old (handler-case (exchange-limit +rlimit-nofile+ limit t) (error () nil))))
    (when old
      (unwind-protect (progn (funcall function) t)
        (exchange-limit +rlimit-nofile+ old)))))

;;; fs.nr_open is 2^20 as a rule.
(test waiting-for-a-large-number
  (let ((number (+ 7 (ash 1 20))))
    (unless (call-with-file-limit
             (1+ number)
             (lambda ()
               (multiple-value-bind (reader writer) (sb-unix:unix-pipe)
                 (assert (eql number (sb-posix:dup2 reader number)))
                 (in-fiber ()
                   (let ((fiber (wait-until-parked
                                 (submit-fiber (sb-fiber::fiber-group (current-fiber))
                                               (make-fiber (lambda ()
                                                             (sb-sys:wait-until-fd-usable
                                                              number :input nil nil)))))))
                     (write-octets writer (secret))
                     (is (eq t (join fiber)))))
                 (mapc #'sb-unix:unix-close (list number reader writer)))))
      (skip "The process may not have so many descriptors."))))
