;;;; Tests of the parser of heads of requests

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/http.lisp" *load-truename*))

(def-suite* http-parser)

(defparameter *limits* (sb-fiber-http:make-limits))

(defun summary (head end)
  "What a request is, as a list."
  (list :end end
        (sb-fiber-http:head-method head) (sb-fiber-http:head-target head)
        (sb-fiber-http:head-minor-version head)
        (let ((fields '()))
          (sb-fiber-http:map-fields (lambda (name value) (push (cons name value) fields)) head)
          (reverse fields))
        :body (or (sb-fiber-http:head-content-length head) (sb-fiber-http:head-chunked-p head))
        :keep (sb-fiber-http:head-keep-alive-p head)
        :continue (sb-fiber-http:head-expects-continue-p head)))

(defun parsed (octets &key (start 0) (ends (list (length octets))) (limits *limits*))
  "The SUMMARY of the request in OCTETS, which are received up to ENDS; or the status with which it
is refused; or NIL if its head has no end."
  (let ((head (sb-fiber-http:make-head)))
    (handler-case
        (loop for again = nil then t
              for end in ends
              do (let ((head-end (sb-fiber-http:parse-head head octets start end limits
                                                           :again again)))
                   (when head-end (return (summary head head-end)))))
      (sb-fiber-http:bad-request (condition) (sb-fiber-http:bad-request-status condition)))))

(defun parsed-lines (&rest lines)
  (parsed (apply #'message (append lines '("")))))

;;;; Requests

(test what-a-request-says
  (is (equal '(:end 125 "POST" "/a/b?c=d" 1
               (("Host" . "example.org:8080") ("X-Empty" . "") ("X-Blanks" . "a  b	c")
                ("content-LENGTH" . "12") ("Connection" . "foo, close"))
               :body 12 :keep nil :continue nil)
             (parsed-lines "POST /a/b?c=d HTTP/1.1"
                           "Host: example.org:8080" "X-Empty:" "X-Blanks: 	 a  b	c 	"
                           "content-LENGTH:12" "Connection: foo, close")))
  (is (equal '(:end 41 "OPTIONS" "*" 1 (("Host" . "x") ("a" . "b")) :body nil :keep t :continue nil)
             (parsed (message "" "" "OPTIONS * HTTP/1.1" "Host: x" "a: b" "" "garbage"))))
  (is (equal (list "/" (format nil "ü~C" (code-char 255)))
             (let ((request (parsed-lines (format nil "GET /ü~C HTTP/1.1" (code-char 255))
                                          "Host: x")))
               (list (subseq (fourth request) 0 1) (subseq (fourth request) 1))))))

(defun kept-alive-p (&rest lines)
  (getf (nthcdr 6 (apply #'parsed-lines lines)) :keep))

(test connections-that-are-kept
  (is-true (kept-alive-p "GET / HTTP/1.1" "Host: x"))
  (is-true (kept-alive-p "GET / HTTP/1.9" "Host: x"))
  (is-true (kept-alive-p "GET / HTTP/1.0" "Connection: Keep-Alive"))
  (is (null (kept-alive-p "GET / HTTP/1.0")))
  (is (null (kept-alive-p "GET / HTTP/1.1" "Host: x" "Connection: CLOSE")))
  (is (null (kept-alive-p "GET / HTTP/1.1" "Host: x" "Connection: keep-alive"
                          "Connection: a ,close")))
  (is (null (kept-alive-p "GET / HTTP/1.0" "Connection: keep-alive, close"))))

(test expectations
  (flet ((continue-p (&rest lines) (getf (nthcdr 6 (apply #'parsed-lines lines)) :continue)))
    (is-true (continue-p "PUT / HTTP/1.1" "Host: x" "Content-Length: 1" "Expect: 100-Continue"))
    (is (null (continue-p "PUT / HTTP/1.0" "Content-Length: 1" "Expect: 100-continue"))))
  (is (= 417 (parsed-lines "PUT / HTTP/1.1" "Host: x" "Expect: the worst"))))

;;;; Refused

(test lines-that-are-no-request
  (loop for (status line) in '((400 "GET /") (400 "GET  / HTTP/1.1") (400 "GET /  HTTP/1.1")
                               (400 " GET / HTTP/1.1") (400 "GET / HTTP/1.1 ") (400 "GET HTTP/1.1")
                               (400 "G@T / HTTP/1.1") (400 "/ HTTP/1.1") (400 "GET / http/1.1")
                               (400 "GET / HTTP/1") (400 "GET / HTTP/11") (400 "GET / HTTP/1.x")
                               (400 "GET / HTTP/1.10") (400 "GET /a b HTTP/1.1")
                               (505 "GET / HTTP/2.0") (505 "GET / HTTP/0.9"))
        do (is (eql status (parsed-lines line "Host: x")) "~S" line))
  (is (= 400 (parsed (message "" "" "" "GET / HTTP/1.1" "Host: x" "")))))

;;; Prevents: a request that a proxy in front understands otherwise.
(test smuggled-requests
  (loop for (status . fields)
          in '((400 "Content-Length: 5" "Content-Length: 5")
               (400 "Content-Length: 5, 5") (400 "Content-Length: +5") (400 "Content-Length: -5")
               (400 "Content-Length: 0x5") (400 "Content-Length: 5 5") (400 "Content-Length:")
               (413 "Content-Length: 1234567890123456")
               (400 "Content-Length: 5" "Transfer-Encoding: chunked")
               (400 "Transfer-Encoding: chunked" "Content-Length: 5")
               (400 "Transfer-Encoding: chunked" "Transfer-Encoding: chunked")
               (501 "Transfer-Encoding: gzip, chunked") (501 "Transfer-Encoding: chunked, chunked")
               (501 "Transfer-Encoding: xchunked") (501 "Transfer-Encoding: identity")
               (501 "Transfer-Encoding: \"chunked\"") (501 "Transfer-Encoding:")
               (400 "Content-Length : 5") (400 "Transfer-Encoding : chunked")
               (400 " Content-Length: 5") (400 "X: a" " folded") (400 "X: a" "	folded")
               (400 "no colon") (400 ": no name") (400 "two words: a") (400 "Host: y"))
        do (is (eql status (apply #'parsed-lines "POST / HTTP/1.1" "Host: x" fields))
               "~{~A~^ / ~}" fields))
  (is (= 400 (parsed-lines "GET / HTTP/1.1")))
  (is (= 400 (parsed-lines "POST / HTTP/1.0" "Transfer-Encoding: chunked"))))

(test control-characters
  (flet ((with-code (code line)
           (substitute (code-char code) #\@ line)))
    (loop for code in '(0 1 8 10 11 12 13 31 127)
          do (is (eql 400 (parsed-lines "GET / HTTP/1.1" "Host: x" (with-code code "X: a@b"))))
             (is (eql 400 (parsed-lines "GET / HTTP/1.1" "Host: x" (with-code code "X@: a"))))
             (is (eql 400 (parsed-lines (with-code code "GET /@ HTTP/1.1") "Host: x"))))))

(test lines-that-end-otherwise
  (flet ((with-end (octets)
           (parsed (join-octets (sb-fiber-http:string-octets "GET / HTTP/1.1") octets
                                (message "Host: x" "")))))
    (is (listp (with-end #(13 10))))
    (loop for end in '(#(10) #(10 10) #(13 13 10) #(10 13 10) #(13 13))
          do (is (eql 400 (with-end end)) "~S" end))))

(test limits
  (flet ((parsed-with (limits line fields)
           (parsed (apply #'message line (append fields '("")))
                   :limits (apply #'sb-fiber-http:make-limits limits)))
         (fields (n) (cons "Host: x" (loop repeat (1- n) collect "A: b"))))
    (is (listp (parsed-with '(:line 16) "GET / HTTP/1.1" (fields 2))))
    (is (eql 414 (parsed-with '(:line 15) "GET / HTTP/1.1" (fields 2))))
    (is (listp (parsed-with '(:head 27) "GET / HTTP/1.1" (fields 1))))
    (is (eql 431 (parsed-with '(:head 26) "GET / HTTP/1.1" (fields 1))))
    (is (listp (parsed-with '(:fields 40) "GET / HTTP/1.1" (fields 40))))
    (is (eql 431 (parsed-with '(:fields 39) "GET / HTTP/1.1" (fields 40))))))

;;; Prevents: a client that sends one line for ever, and is given memory for it.
(test heads-without-an-end
  (let ((line (make-array 100000 :element-type '(unsigned-byte 8) :initial-element 65)))
    (is (null (parsed line :ends '(1 100 8192))))
    (is (eql 414 (parsed line :ends '(8193))))
    (is (eql 431 (parsed (join-octets (message "GET / HTTP/1.1") line) :ends '(1000 65537))))
    (is (null (parsed (join-octets (message "GET / HTTP/1.1") line) :ends '(1000 65536))))))

;;;; Reading

(defparameter *requests*
  (list (message "GET / HTTP/1.1" "Host: x" "")
        (message "" "POST /form?x=y HTTP/1.1" "Host: localhost:80" "Content-Length: 10"
                 "Expect: 100-continue" "Cookie: a=b; c=d" "" "0123456789")
        (message "PUT /a HTTP/1.1" "Host: x" "Transfer-Encoding: chunked"
                 "Connection: keep-alive, upgrade" "Accept: text/html,*/*;q=0.8" "")
        (message "GET / HTTP/1.0" "Connection: keep-alive" "")))

(defun random-ends (n)
  "Increasing numbers up to N, which is the last."
  (append (sort (loop repeat (random 6) collect (random (1+ n))) #'<) (list n)))

;;; However a request is torn apart by the network, it is the same.
(test each-split
  (dolist (request *requests*)
    (let ((whole (parsed request)))
      (is (listp whole))
      (is (loop for i from 0 to (length request)
                always (equal whole (parsed request :ends (list i (length request))))))
      (is (equal whole (parsed request :ends (loop for i to (length request) collect i)))))))

;;; A request is parsed, refused or not complete; whatever it is, splits change nothing, and neither
;;; does what comes before it in the buffer.
(test mutations
  (is (loop repeat 20000
            for octets = (mutated (random-element *requests*))
            for whole = (parsed octets)
            always (and (equal whole (parsed octets :ends (random-ends (length octets))))
                        (let ((later (parsed (join-octets #(1 2 3) octets) :start 3
                                             :ends (list (+ 3 (length octets))))))
                          (if (consp whole)
                              (and (= (second later) (+ 3 (second whole)))
                                   (equal (cddr later) (cddr whole)))
                              (eql whole later)))))))
