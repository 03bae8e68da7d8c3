;;;; a web server in fibers:
;;;;
;;;;   sh run-sbcl.sh --load contrib/sb-fiber-hunchentoot/demo.lisp
;;;;
;;;; Then look at http://127.0.0.1:4242/ with a browser, or curl. (HUNCHENTOOT:STOP *SERVER*) stops
;;;; it.

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :asdf)
(dolist (file '("../sb-fiber-http/sb-fiber-http.asd" "sb-fiber-hunchentoot.asd"))
  (asdf:load-asd (merge-pathnames file *load-truename*)))
(handler-bind ((warning #'muffle-warning))
  (let ((*standard-output* (make-broadcast-stream)))
    (asdf:load-system "sb-fiber-hunchentoot")))

;;;; what is served

(hunchentoot:define-easy-handler (hello :uri "/hello") ()
  (setf (hunchentoot:content-type*) "text/plain")
  "Hello, World!")

;;; The fiber sleeps; its carrier serves others meanwhile.
(hunchentoot:define-easy-handler (slow :uri "/slow") ()
  (setf (hunchentoot:content-type*) "text/plain")
  (sleep 1)
  "A second has passed.")

(defparameter *readme*
  (merge-pathnames "../../README" (make-pathname :name nil :type nil :defaults *load-truename*)))

(hunchentoot:define-easy-handler (readme :uri "/readme") ()
  (hunchentoot:handle-static-file *readme* "text/plain"))

(hunchentoot:define-easy-handler (index :uri "/") ()
  (setf (hunchentoot:content-type*) "text/html; charset=utf-8")
  "<!DOCTYPE html>
<html lang='en'>
<head><meta charset='utf-8'><title>SBCL with fibers</title>
<style>body { font-family: sans-serif; max-width: 40em; margin: 2em auto; line-height: 1.5 }
table { border-collapse: collapse } td { padding: 0 1em 0 0 } td + td { text-align: right }
code { background: #eee; padding: 0 .3em }</style></head>
<body>
<h1>Common Lisp, served from fibers</h1>
<p>This is Hunchentoot on an SBCL that has native fibers. Each connection, also the one by which
this page gets the numbers below, is a fiber: a thread of Lisp that no thread of the operating
system is tied to. A few of those, the carriers, run all fibers in turn.</p>
<table id='numbers'></table>
<ul>
<li><a href='/hello'>/hello</a>, a string</li>
<li><a href='/slow'>/slow</a>, a handler that sleeps for a second</li>
<li><a href='/readme'>/readme</a>, a file</li>
<li><a href='/events'>/events</a>, these numbers, as long as you look</li>
</ul>
<p>Try <code>wrk -t2 -c1000 -d10 http://127.0.0.1:4242/slow</code>: 1,000 handlers that sleep at a
time, and the numbers go on.</p>
<script>
new EventSource('/events').onmessage = function (event) {
  var rows = Object.entries(JSON.parse(event.data)).map(function (entry) {
    return '<tr><td>' + entry[0] + '</td><td>' + entry[1].toLocaleString() + '</td></tr>';
  });
  document.getElementById('numbers').innerHTML = rows.join('');
};
</script>
</body>
</html>
")

;;;; numbers that change

(defclass demo-acceptor (sb-fiber-hunchentoot:easy-fiber-acceptor) ())

(sb-ext:defglobal **requests** 0)
(declaim (type fixnum **requests**))

(defmethod hunchentoot:acceptor-dispatch-request :before ((acceptor demo-acceptor) request)
  (declare (ignore request))
  (sb-ext:atomic-incf **requests**))

(defun numbers (acceptor)
  "What the page shows, an alist."
  (let* ((taskmaster (hunchentoot::acceptor-taskmaster acceptor))
         (statistics (sb-fiber:fiber-group-statistics (sb-fiber-hunchentoot::group taskmaster))))
    `(("requests answered" . ,**requests**)
      ("connections" . ,(hunchentoot:taskmaster-thread-count taskmaster))
      ("fibers" . ,(getf statistics :fibers))
      ("carriers" . ,(getf statistics :carriers))
      ("switches from fiber to fiber" . ,(getf statistics :switches))
      ("bytes of heap in use" . ,(sb-kernel:dynamic-usage)))))

(defun event (numbers)
  "NUMBERS as an event for the page, octets."
  (sb-ext:string-to-octets (format nil "data: {~{\"~A\": ~D~^, ~}}~2%"
                                   (loop for (name . number) in numbers
                                         collect name collect number))))

(hunchentoot:define-easy-handler (events :uri "/events") ()
  (setf (hunchentoot:content-type*) "text/event-stream"
        (hunchentoot:header-out :cache-control) "no-cache")
  (let ((stream (hunchentoot:send-headers)))
    (handler-case
        (loop (write-sequence (event (numbers hunchentoot:*acceptor*)) stream)
              (finish-output stream)
              (sleep 1))
      (stream-error ()))))              ; the client has gone away

;;;; the server

(defvar *server*
  (make-instance 'demo-acceptor
                 :address "127.0.0.1"
                 :port 4242
                 ;; Clients that come at once wait here; the usual 50 would turn some away.
                 :listen-backlog 4096
                 :access-log-destination nil
                 :taskmaster (make-instance 'sb-fiber-hunchentoot:fiber-taskmaster)))

(hunchentoot:start *server*)
(format t "~&Serving http://127.0.0.1:4242/ from fibers. To see how many requests a second:
  wrk -t2 -c100 -d10 http://127.0.0.1:4242/hello~%")
(finish-output)

;;; The end of a script's input would end the server too.
(unless (interactive-stream-p sb-sys:*stdin*)
  (loop (sleep 3600)))
