;;;; Descriptors that are closed while fibers wait for them, and numbers that are used again

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/descriptors.lisp" *load-truename*))

(def-suite* closing)

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
                                                             (socket-file-descriptor a)
                                                             :input nil nil)
                                                            :usable)
                                         (error () :error))))))
          (mapc #'wait-until-parked readers)
          (join (spawn (group) (socket-close a)))
          (is (equal (make-list 5 :initial-element :error) (join-all readers))))))))

;;; dup2(2) closes what its second argument stands for, unless both are the same.
(test duplicated-while-a-fiber-waits
  (on-carriers (n)
    (with-group (group n)
      (multiple-value-bind (reader writer) (sb-posix:pipe)
        (multiple-value-bind (other-reader other-writer) (sb-posix:pipe)
          (let ((fiber (wait-until-parked
                        (spawn (group)
                          (handler-case (sb-sys:wait-until-fd-usable reader :input)
                            (error (condition) (descriptor-closed-descriptor condition)))))))
            (is (eql reader (sb-posix:dup2 reader reader)))
            (is (eql sb-posix:ebadf
                     (handler-case (sb-posix:dup2 1000000 reader)
                       (sb-posix:syscall-error (condition) (sb-posix:syscall-errno condition)))))
            (is (eql :timeout (nth-value 1 (fiber-join fiber :timeout 1/20 :default nil))))
            (is (eql reader (sb-posix:dup2 other-reader reader)))
            (is (eql reader (join fiber))))
          (mapc #'sb-unix:unix-close (list reader writer other-reader other-writer)))))))

;;; Prevents: a fiber that begins to wait between NOTE-CLOSE and the close, and waits for ever.
(test closed-just-after-a-fiber-began-to-wait
  (on-carriers (n)
    (with-group (group n)
      (multiple-value-bind (reader writer) (sb-unix:unix-pipe)
        (let* ((mark (sb-fiber::note-close reader))
               (fiber (wait-until-parked
                       (spawn (group)
                         (handler-case (sb-sys:wait-until-fd-usable reader :input)
                           (error (condition) (descriptor-closed-descriptor condition)))))))
          (sb-alien:alien-funcall (sb-alien:extern-alien "close"
                                                         (function sb-alien:int sb-alien:int))
                                  reader)
          (sb-fiber::note-closed reader mark)
          (is (eql reader (join fiber))))
        (sb-unix:unix-close writer)))))

;;; The number of a closed descriptor is given to the next one that is opened. Prevents: a report
;;; for the old file that wakes the fiber that waits for the new one; one for the new one that is
;;; dropped as late.
(test number-used-again
  (on-carriers (n)
    (with-group (group n)
      (is (all-true-p
           (loop for k below 30
                 collect (multiple-value-bind (in out) (sb-posix:pipe)
                           (let ((duplicate (sb-posix:dup in))
                                 (old (spawn (group)
                                        (handler-case (sb-sys:wait-until-fd-usable in
                                                                                   :input nil nil)
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
                                   (mapc #'sb-unix:unix-close
                                         (list out duplicate in-2 out-2)))))))))))))

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

;;; Prevents: a socket that a time-out leaves closed but does not know it. Its finalizer, or whoever
;;; closes it again, closes the file that has the number by then.
(defun closed-in-part-p ()
  "Close a socket while a time-out comes. Return true if its number is not open and it has it."
  (let* ((socket (make-instance 'sb-bsd-sockets:inet-socket :type :stream :protocol :tcp))
         (fd (sb-bsd-sockets:socket-file-descriptor socket)))
    (handler-case (sb-ext:with-timeout (/ (1+ (random 60)) 1000000)
                    (sb-bsd-sockets:socket-close socket))
      (sb-ext:timeout ()))
    (let ((open-p (sb-unix:unix-fstat fd)))
      (when open-p (sb-bsd-sockets:socket-close socket))
      (and (not open-p) (/= -1 (sb-bsd-sockets:socket-file-descriptor socket))))))

(test sockets-closed-while-a-time-out-comes
  (flet ((count-bad () (loop repeat 10000 count (closed-in-part-p))))
    (is (= 0 (count-bad)))
    (on-carriers (n :counts '(1 2) :migration '(nil))
      (is (= 0 (in-fiber (n) (count-bad)))))))

;;; Prevents: the finalizer of a socket whose stream has closed it, which closes the next file of
;;; that number: of a time-out just before the socket gives its finalizer up.
(defun call-with-interruption-before (name function)
  "Call FUNCTION, which is left by an interruption when the function NAME is about to be called, if
interruptions are allowed there, and else when they are."
  (let ((thread sb-thread:*current-thread*))
    (sb-int:encapsulate name 'closing
                        (lambda (original &rest arguments)
                          (when (eq thread sb-thread:*current-thread*)
                            (sb-thread:interrupt-thread thread (lambda () (throw 'left nil))))
                          (apply original arguments)))
    (unwind-protect (catch 'left (funcall function))
      (sb-int:unencapsulate name 'closing))))

(defun number-of-closed-socket ()
  "Make a stream of a socket, and close it when that has been interrupted. Return its number."
  (let* ((socket (make-instance 'sb-bsd-sockets:inet-socket :type :stream :protocol :tcp))
         (fd (sb-bsd-sockets:socket-file-descriptor socket)))
    (call-with-interruption-before 'sb-ext:cancel-finalization
                                   (lambda ()
                                     (sb-bsd-sockets:socket-make-stream socket :input t)))
    (sb-bsd-sockets:socket-close socket)
    fd))

(defun open-after-collections-p (files)
  "Are FILES, numbers, still open when garbage has been finalized? They are closed then."
  (loop repeat 3
        do (sb-ext:gc :full t)
           (sb-impl::run-pending-finalizers)
           (sleep 1/20))
  (prog1 (every #'sb-unix:unix-fstat files)
    (mapc #'sb-unix:unix-close files)))

(test streams-of-sockets-made-while-a-time-out-comes
  (let* ((numbers (loop repeat 20 collect (number-of-closed-socket)))
         (files (loop repeat 20 collect (sb-unix:unix-open "/dev/null" sb-unix:o_rdonly 0))))
    (is-true (intersection numbers files))
    (is-true (open-after-collections-p files))))

;;; The number is closed then. Prevents: a finalizer that closes another file which has it.
(test sockets-whose-streams-cannot-be-made
  (loop repeat 20
        do (let ((socket (make-instance 'sb-bsd-sockets:inet-socket :type :stream :protocol :tcp)))
             (signals error
               (sb-bsd-sockets:socket-make-stream socket :external-format :none))))
  (is-true (open-after-collections-p
            (loop repeat 20 collect (sb-unix:unix-open "/dev/null" sb-unix:o_rdonly 0)))))
