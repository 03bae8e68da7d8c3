;;;; Tests of the decoder of bodies

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/http.lisp" *load-truename*))

(def-suite* http-body)

(defun head-with (&rest fields)
  "A head with FIELDS, strings."
  (let ((head (sb-fiber-http:make-head))
        (octets (apply #'message "POST / HTTP/1.1" "Host: x" (append fields '("")))))
    (sb-fiber-http:parse-head head octets 0 (length octets) (sb-fiber-http:make-limits))
    head))

(defun decoded (octets &key (ends (list (length octets))) (most 1000)
                            (field "Transfer-Encoding: chunked"))
  "The body that OCTETS begin with, as a string, and how many octets it has taken; or the status
with which it is refused; or NIL if it has no end. The octets are received up to ENDS."
  (handler-case
      (let ((decoder (sb-fiber-http:make-decoder (head-with field) most))
            (start 0) (body ""))
        (dolist (end ends)
          (loop
            (multiple-value-bind (from to next) (sb-fiber-http:decode decoder octets start end)
              (setf body (concatenate 'string body (sb-fiber-http:octets-string octets from to))
                    start next)
              (when (sb-fiber-http:decoder-done-p decoder)
                (return-from decoded (list body start)))
              (when (= from to) (return))))))
    (sb-fiber-http:bad-request (condition) (sb-fiber-http:bad-request-status condition))))

(test bodies-of-a-length
  (flet ((decoded-length (length octets &rest arguments)
           (apply #'decoded octets :field (format nil "Content-Length: ~D" length) arguments)))
    (is (equal '("01234" 5) (decoded-length 5 (message "01234567"))))
    (is (equal '("" 0) (decoded-length 0 (message "01234567"))))
    (is (equal '("01234" 5) (decoded-length 5 (message "01234567") :ends '(0 2 2 5))))
    (is (null (decoded-length 20 (message "01234567"))))
    (is (equal '("012345" 6) (decoded-length 6 (message "01234567") :most 6)))
    (is (eql 413 (decoded-length 7 (message "01234567") :most 6)))
    (is (equal '("" 0) (decoded (message "01234567") :field "X: y")))))

(defparameter *chunked*
  (message "5" "Hello" "a;name=value;other" "0123456789" "0001;x" "!" "00" "Trailer: a" "B: c" ""))

(test chunks
  (is (equal (list "Hello0123456789!" (length *chunked*))
             (decoded (join-octets *chunked* (message "the next message")))))
  (is (equal '("" 5) (decoded (message "0" ""))))
  (is (equal '("0123456789abcdefg" 28) (decoded (message "11" "0123456789abcdefg" "0" ""))))
  (is (null (decoded (message "5" "Hello" "0")))))

(test chunks-that-are-refused
  (loop for (status . lines) in '((400 "") (400 "g" "x") (400 "-1" "x") (400 "+1" "x")
                                  (400 "0x1" "x")
                                  (400 " 1" "x") (400 "1 " "x") (400 "1 1" "x") (400 "1,;" "x")
                                  (400 "1" "xy" "0" "") (400 "2" "x" "0" "")
                                  (413 "3e9" "x") (413 "1000000000000" "x"))
        do (is (eql status (decoded (apply #'message lines))) "~S" lines))
  (is (eql 400 (decoded (sb-fiber-http:string-octets (format nil "1~%x~%0~%~%")))))
  (is (eql 400 (decoded (message (format nil "1;~C" (code-char 0)) "x" "0" ""))))
  (is (eql 413 (decoded (message "5" "Hello" "6" "Hello!" "0" "") :most 10)))
  (is (equal '("HelloHello!" 26) (decoded (message "5" "Hello" "6" "Hello!" "0" "") :most 11))))

;;; Prevents: a body that was refused being taken up in the middle.
(test refused-for-good
  (let ((decoder (make-decoder-of-chunks)) (octets (message "" "0" "x" "")))
    (setf (sb-fiber-http::decoder-state decoder) :chunk-end
          (aref octets 5) 10)           ; a line that does not end with CR LF
    (loop repeat 3
          do (is (eq :refused (handler-case (sb-fiber-http:decode decoder octets 0 (length octets))
                                (sb-fiber-http:bad-request () :refused)))))
    (is-true (sb-fiber-http:decoder-failed-p decoder))))

(defun make-decoder-of-chunks ()
  (sb-fiber-http:make-decoder (head-with "Transfer-Encoding: chunked") 1000))

;;; Prevents: a client that sends chunks' lines for ever, and no body.
(test lines-without-an-end
  (let ((digits (make-array 10000 :element-type '(unsigned-byte 8) :initial-element 48)))
    (is (eql 400 (decoded digits)))
    (is (eql 400 (decoded (join-octets (message "0") digits))))
    (is (eql 400 (decoded (apply #'message "0" (loop repeat 1000 collect "Trailer: x")))))))

;;; Prevents: a client that sends much, hardly anything of which counts.
(test chunks-with-long-extensions
  (flet ((chunks (n extension)
           (apply #'join-octets
                  (append (loop repeat n collect (message (format nil "1~A" extension) "x"))
                          (list (message "0" ""))))))
    (is (eql 400 (decoded (chunks 900 (format nil ";x=~A"
                                              (make-string 100 :initial-element #\y))))))
    (is (equal 900 (length (first (decoded (chunks 900 ""))))))))

(test each-split-of-chunks
  (let ((whole (decoded *chunked*)))
    (is (loop for i to (length *chunked*)
              always (equal whole (decoded *chunked* :ends (list i (length *chunked*))))))
    (is (equal whole (decoded *chunked* :ends (loop for i to (length *chunked*) collect i))))))

(test mutations-of-chunks
  (is (loop repeat 20000
            for octets = (mutated *chunked*)
            for n = (length octets)
            always (equal (decoded octets)
                          (decoded octets :ends (list (random (1+ n)) n))))))
