;;;; benchmarks of fibers, or threads, that talk to each other over descriptors; see run.sh

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :sb-bsd-sockets)
(load (merge-pathnames "measure.lisp" *load-truename*))

(in-package "SB-FIBER-BENCH")

;;;; Fibers or threads

(defvar *group* nil "The group whose fibers run what is STARTed, or NIL for threads.")

(defun start (function)
  "Call FUNCTION in a fiber of *GROUP* or in a thread. Returns that."
  #+sb-fiber (when *group*
               (return-from start (submit-fiber *group* (make-fiber function))))
  (make-thread function))

(defun join (one)
  #+sb-fiber (when *group* (return-from join (fiber-join one)))
  (join-thread one))

(defun use (kind)
  "Let START make what KIND names."
  (cond ((string= kind "threads") (setf *group* nil))
        #+sb-fiber ((string= kind "fibers")
                    (setf *group* (start-fibers nil :carrier-count *carriers*)))
        (t (error "~S is none of the kinds that this Lisp has: ~A" kind
                  #+sb-fiber "fibers, threads" #-sb-fiber "threads"))))

;;; Connections are not closed one by one, and who waits for them is not woken.
(defun leave (control &rest arguments)
  (format t "RESULT ~?~%" control arguments)
  (finish-output)
  (sb-ext:exit :code 0 :abort t))

(defun runtime-name (kind)
  (if (string= kind "fibers") "sbcl-fiber" "sbcl-threads"))

;;;; Reading and writing octets

(defun await (fd direction errno)
  (cond ((= errno sb-unix:ewouldblock) (sb-sys:wait-until-fd-usable fd direction nil nil))
        ((/= errno sb-unix:eintr) (error "Descriptor ~D: ~A" fd (sb-int:strerror errno)))))

(defun read-octets (fd sap n)
  "Read N octets from FD to SAP; return false at the end of the file."
  (declare (fixnum fd n))
  (loop with start fixnum = 0
        while (< start n)
        do (multiple-value-bind (count errno)
               (#+sb-fiber unix-read-now #-sb-fiber sb-unix:unix-read
                fd (sb-sys:sap+ sap start) (- n start))
             (cond ((null count) (await fd :input errno))
                   ((= count 0) (return nil))
                   (t (incf start (the fixnum count)))))
        finally (return t)))

(defun write-octets (fd sap n)
  (declare (fixnum fd n))
  (loop with start fixnum = 0
        while (< start n)
        do (multiple-value-bind (count errno)
               (#+sb-fiber unix-write-now #-sb-fiber sb-unix:unix-write
                fd (sb-sys:sap+ sap start) 0 (- n start))
             (if count
                 (incf start (the fixnum count))
                 (await fd :output errno)))))

(defmacro with-octets ((sap n) &body body)
  "Execute BODY with SAP bound to the address of N octets."
  (let ((octets (gensym)))
    `(let ((,octets (make-array ,n :element-type '(unsigned-byte 8))))
       (sb-sys:with-pinned-objects (,octets)
         (let ((,sap (sb-sys:vector-sap ,octets))) ,@body)))))

(defun ask (in out sap n)
  (write-octets out sap n)
  (or (read-octets in sap n) (error "Nobody answers.")))

(defun answer-all (in out n)
  (with-octets (sap n)
    (loop while (read-octets in sap n)
          do (write-octets out sap n))))

;;;; Pipes

(defun pipe-pair ()
  (multiple-value-bind (in out) (sb-unix:unix-pipe)
    (unless in (error "No pipe: ~A" (sb-int:strerror out)))
    (cons in out)))

(defun start-worker-and-master (requests)
  "Start one that answers, and one that asks it REQUESTS times, over two pipes."
  (let ((question (pipe-pair)) (answer (pipe-pair)))
    (list (start (lambda ()
                   (answer-all (car question) (cdr answer) 8)
                   (sb-unix:unix-close (cdr answer))))
          (start (lambda ()
                   (with-octets (sap 8)
                     (loop repeat requests do (ask (car answer) (cdr question) sap 8)))
                   (sb-unix:unix-close (cdr question)))))))

(defun bench-pipe (workers requests &optional (kind "fibers"))
  (use kind)
  (let ((start (nanoseconds)))
    (mapc #'join (loop repeat workers append (start-worker-and-master requests)))
    (let ((time (- (nanoseconds) start)))
      (leave "pipe ~A p=~D workers=~D requests=~D s=~,3F us_per_request=~,3F"
             (runtime-name kind) *carriers* workers requests (/ time 1000000000)
             (/ time 1000 workers requests)))))

;;;; Echo over loopback TCP

(defun descriptor (socket)
  "The descriptor of SOCKET, which nothing closes."
  (setf (sb-bsd-sockets:sockopt-tcp-nodelay socket) t)
  (sb-ext:cancel-finalization socket)
  (sb-bsd-sockets:socket-file-descriptor socket))

(defun start-echo-server ()
  "Start one that accepts, and one for each connection. Returns the port."
  (let ((listener (make-instance 'sb-bsd-sockets:inet-socket :type :stream :protocol :tcp)))
    (sb-bsd-sockets:socket-bind listener #(127 0 0 1) 0)
    (sb-bsd-sockets:socket-listen listener 4096)
    (start (lambda ()
             (loop (let ((fd (descriptor (sb-bsd-sockets:socket-accept listener))))
                     (start (lambda () (answer-all fd fd 1)))))))
    (nth-value 1 (sb-bsd-sockets:socket-name listener))))

(defun connect (port)
  (let ((socket (make-instance 'sb-bsd-sockets:inet-socket :type :stream :protocol :tcp)))
    (sb-bsd-sockets:socket-connect socket #(127 0 0 1) port)
    (descriptor socket)))

;;; A count for each client, on a line of its own.
(deftype tallies () '(simple-array (unsigned-byte 62) (*)))
(defconstant +stride+ 8)

(defun counts (tallies)
  (declare (type tallies tallies))
  (loop for i from 0 below (length tallies) by +stride+ collect (aref tallies i)))

(defun start-client (port tallies place note-latency)
  "Start one that asks the server at PORT for ever, counts that at PLACE of TALLIES, and calls
NOTE-LATENCY, if it is not NIL, with the nanoseconds of each."
  (declare (type tallies tallies) (type (or null function) note-latency))
  (let ((fd (connect port)))
    (flet ((ask-once (sap)
             (if note-latency
                 (let ((start (nanoseconds)))
                   (ask fd fd sap 1)
                   (funcall note-latency (- (nanoseconds) start)))
                 (ask fd fd sap 1))))
      (start (lambda ()
               (with-octets (sap 1)
                 (loop (ask-once sap)
                       (incf (aref tallies place)))))))))

(defun count-round-trips (clients seconds &optional (note-latency (constantly nil)))
  "Let CLIENTS ask for SECONDS. Returns how often each did, and the nanoseconds that it took.
NOTE-LATENCY, called with the number of a client, returns a function for START-CLIENT, or NIL."
  (let ((port (start-echo-server))
        (tallies (make-array (* +stride+ clients) :element-type '(unsigned-byte 62)
                                                  :initial-element 0)))
    (dotimes (i clients)
      (start-client port tallies (* i +stride+) (funcall note-latency i)))
    (sleep 0.7)
    (let ((before (counts tallies))
          (start (nanoseconds)))
      (sleep seconds)
      (values (mapcar #'- (counts tallies) before) (- (nanoseconds) start)))))

(defun bench-rpc (clients &optional (seconds 3) (kind "fibers"))
  (use kind)
  (multiple-value-bind (counts time) (count-round-trips clients seconds)
    (leave "rpc ~A p=~D conns=~D ops_per_s=~D" (runtime-name kind) *carriers* clients
           (round (* 1000000000 (reduce #'+ counts)) time))))

;;;; Fairness

;;; R. Jain, D. Chiu, W. Hawe, "A Quantitative Measure of Fairness and Discrimination", DEC
;;; TR-301, 1984.
(defun jain-index (numbers)
  "1 if all NUMBERS are equal; 1/n if all but one of n are 0."
  (let ((squares (reduce #'+ (mapcar (lambda (x) (* x x)) numbers))))
    (if (= squares 0)
        0
        (/ (expt (reduce #'+ numbers) 2) (* (length numbers) squares)))))

;;; Eight buckets for each doubling of the latency.
(defconstant +buckets+ 320)

(defun bucket (nanoseconds)
  (let ((n (max 8 nanoseconds)))
    (min (1- +buckets+)
         (+ (* 8 (- (integer-length n) 4)) (ldb (byte 3 (- (integer-length n) 4)) n)))))

(defun bucket-end (bucket)
  "The nanoseconds below which all of BUCKET are."
  (multiple-value-bind (doublings eighth) (floor bucket 8)
    (ash (+ 9 eighth) doublings)))

(defun percentile (share histogram)
  (loop with rest = (* share (reduce #'+ histogram))
        for bucket from 0
        for count across histogram
        do (decf rest count)
           (when (<= rest 0) (return (bucket-end bucket)))))

(defun bench-fairness (clients &optional (seconds 10))
  (use "fibers")
  (let ((histograms (loop repeat clients
                          collect (make-array +buckets+ :element-type '(unsigned-byte 32)
                                                        :initial-element 0))))
    (multiple-value-bind (counts time)
        (count-round-trips clients seconds
                           (lambda (i)
                             (let ((histogram (nth i histograms)))
                               (declare (type (simple-array (unsigned-byte 32) (*)) histogram))
                               (lambda (latency) (incf (aref histogram (bucket latency)))))))
      (let ((all (apply #'map 'vector #'+ (list* histograms))))
        (leave "fairness sbcl-fiber p=~D conns=~D ops_per_s=~D jain=~,4F p50_us=~D p99_us=~D"
               *carriers* clients (round (* 1000000000 (reduce #'+ counts)) time)
               (jain-index counts)
               (round (percentile 1/2 all) 1000) (round (percentile 99/100 all) 1000))))))

;;;; Waking

;;; This thread is none of a group's.
(defun bench-wake (n)
  (use "fibers")
  (let* ((ping (make-semaphore)) (pong (make-semaphore))
         (fiber (start (lambda ()
                         (loop repeat (* 2 n)
                               do (wait-on-semaphore ping)
                                  (signal-semaphore pong))))))
    (flet ((round-trips ()
             (let ((start (nanoseconds)))
               (loop repeat n
                     do (signal-semaphore ping)
                        (wait-on-semaphore pong))
               (- (nanoseconds) start))))
      (round-trips)
      (let ((time (round-trips)))
        (join fiber)
        (leave "wake sbcl-fiber p=~D n=~D ns=~,1F" *carriers* n (/ time n))))))

(apply #'main (rest sb-ext:*posix-argv*))
