;;;; benchmark of connections that wait: what one costs a Hunchentoot in fibers; see run.sh

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :sb-bsd-sockets)
(load (merge-pathnames "measure.lisp" *load-truename*))

(in-package "SB-FIBER-BENCH")

(defparameter *port* 4299)
(defparameter *file* (namestring *load-truename*))

;;;; The client, a process of its own, so that its memory is not counted

(defparameter *request*
  (format nil "GET / HTTP/1.1~C~CHost: localhost~C~C~C~C"
          #\Return #\Newline #\Return #\Newline #\Return #\Newline))

(defun connected-socket ()
  (let ((socket (make-instance 'sb-bsd-sockets:inet-socket :type :stream :protocol :tcp)))
    (sb-bsd-sockets:socket-connect socket #(127 0 0 1) *port*)
    socket))

(defun ask (socket)
  "Make a request, and receive all of the answer, which ends with an exclamation mark."
  (sb-bsd-sockets:socket-send socket *request* nil)
  (loop until (let ((text (sb-bsd-sockets:socket-receive socket nil 4096)))
                (find #\! text))))

(defun bench-client (n)
  "Make a request on each of N connections, say so, and keep them until the input ends."
  (let ((sockets (loop repeat n collect (connected-socket))))
    (mapc #'ask sockets)
    (write-line "asked")
    (finish-output)
    (read-line *standard-input* nil)
    (mapc #'sb-bsd-sockets:socket-close sockets)))

(defun call-with-clients (n function)
  (let* ((process (sb-ext:run-program sb-ext:*runtime-pathname*
                                      (list "--core" (namestring sb-ext:*core-pathname*) "--script"
                                            *file* "client" (princ-to-string n))
                                      :input :stream :output :stream :error nil :wait nil))
         (answer (read-line (sb-ext:process-output process) nil)))
    (unless (equal answer "asked") (error "The client could not make ~D connections." n))
    (multiple-value-prog1 (funcall function)
      (close (sb-ext:process-input process))
      (sb-ext:process-wait process))))

;;;; The server

(unless (equal "client" (second sb-ext:*posix-argv*))
  (load (merge-pathnames "http.lisp" *load-truename*)))

(defun bench-httpidle (n &optional (kind "fibers"))
  (let ((acceptor (start-server *port* kind *carriers*)))
    (call-with-clients 100 #'list)      ; what is made once
    (sleep 1)
    (sb-ext:gc :full t)
    (let ((resident (resident-bytes)) (tables (page-table-bytes)) (heap (sb-kernel:dynamic-usage)))
      (call-with-clients
       n
       (lambda ()
         (sb-ext:gc :full t)
         (flet ((each (after before) (round (- after before) n)))
           (format t "RESULT httpidle sbcl-fiber mode=~A p=~D n=~D bytes_per_connection=~D ~
                      heap_bytes=~D page_table_bytes=~D~%"
                   kind *carriers* n (each (resident-bytes) resident)
                   (each (sb-kernel:dynamic-usage) heap)
                   (each (page-table-bytes) tables))))))
    (stop-server acceptor)))

(apply #'main (rest sb-ext:*posix-argv*))
