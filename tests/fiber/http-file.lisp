;;;; Tests of files as replies

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/http-server.lisp" *load-truename*))

(def-suite* http-file)

(defun serve-file (path)
  (lambda (exchange)
    (sb-fiber-http:reply-with-file exchange path :fields *text*)))

(test files-of-all-sizes
  (on-carriers (n :counts '(1 2))
    (loop for size in '(0 1 100000 3000000)
          do (call-with-file
              (lambda (path)
                (with-test-server (server place (serve-file path) :carrier-count n)
                  (with-connection (stream place)
                    (loop repeat 2
                          do (send-parts stream (request "/"))
                             (is (equalp (octets-string-of (octets-of-size size))
                                         (third (read-reply stream))))))))
              (octets-of-size size)))))

;;; Each carrier has clients to serve while another client takes its time.
(test files-for-slow-readers
  (call-with-file
   (lambda (path)
     (with-test-server (server place (serve-file path) :carrier-count 1)
       (with-connection (slow place)
         (send-parts slow (request "/"))
         (wait-until (= 1 (statistic server :in-progress)))
         (is (equal "HTTP/1.1 206 Partial Content" (first (ask place "/" "Range: bytes=0-9"))))
         (is (= 20000000 (length (third (read-reply slow))))))))
   (octets-of-size 20000000)))

(test ranges
  (call-with-file
   (lambda (path)
     (with-test-server (server place (serve-file path))
       (loop for (range status body content-range)
               in '(("bytes=0-3" 206 "abcd" "bytes 0-3/26") ("bytes=24-" 206 "yz" "bytes 24-25/26")
                    ("bytes=-2" 206 "yz" "bytes 24-25/26")
                    ("bytes=20-100" 206 "uvwxyz" "bytes 20-25/26")
                    ("bytes=-100" 206 "abcdefghijklmnopqrstuvwxyz" "bytes 0-25/26")
                    ("bytes=26-" 416 "" "bytes */26") ("bytes=-0" 416 "" "bytes */26")
                    ("bytes=3-1" 200 "abcdefghijklmnopqrstuvwxyz" nil)
                    ("bytes=0-1,3-4" 200 "abcdefghijklmnopqrstuvwxyz" nil)
                    ("bytes=a-b" 200 "abcdefghijklmnopqrstuvwxyz" nil)
                    ("octets=0-1" 200 "abcdefghijklmnopqrstuvwxyz" nil))
             do (destructuring-bind (line fields answer)
                    (ask place "/" (format nil "Range: ~A" range))
                  (is (equal (list status body content-range)
                             (list (parse-integer line :start 9 :end 12) answer
                                   (field-of "Content-Range" fields)))
                      range)))))
   (octets-of-size 26)))

(test conditions
  (call-with-file
   (lambda (path)
     (with-test-server (server place (serve-file path))
       (let ((date (field-of "Last-Modified" (second (ask place "/")))))
         (flet ((status (&rest fields)
                  (parse-integer (first (apply #'ask place "/" fields)) :start 9 :end 12)))
           (is (= 304 (status (format nil "If-Modified-Since: ~A" date))))
           (is (= 200 (status "If-Modified-Since: Sun, 06 Nov 1994 08:49:37 GMT")))
           (is (= 200 (status "If-Modified-Since: yesterday")))
           (is (= 206 (status "Range: bytes=0-1" (format nil "If-Range: ~A" date))))
           (is (= 200 (status "Range: bytes=0-1"
                              "If-Range: Sun, 06 Nov 1994 08:49:37 GMT")))))))
   (octets-of-size 26)))

(test files-that-are-none
  (with-test-server (server place (serve-file "/no/such/file"))
    (is (equal "HTTP/1.1 500 Internal Server Error" (first (ask place "/")))))
  (with-test-server (server place (serve-file "/"))
    (is (equal "HTTP/1.1 500 Internal Server Error" (first (ask place "/"))))))

(test dates-of-requests
  (flet ((both (time) (sb-fiber-http:parse-date (sb-fiber-http:date-string time))))
    (loop for time = (random (* 200 365 86400)) repeat 100
          do (is (= time (both time)))))
  (is (null (sb-fiber-http:parse-date "")))
  (is (null (sb-fiber-http:parse-date "Sun, 06 Nov 1994 08:49:37 CET")))
  (is (null (sb-fiber-http:parse-date "Sun, 06 Nop 1994 08:49:37 GMT")))
  (is (null (sb-fiber-http:parse-date "Sun, 66 Nov 1994 08:49:37 GMT"))))

;;; Prevents: a carrier that waits for who writes to a pipe.
(test pipes
  (let ((path (temporary-path "pipe")))
    (sb-posix:mkfifo path #o600)
    (unwind-protect
         (with-test-server (server place (serve-file path) :carrier-count 1)
           (is (equal "HTTP/1.1 500 Internal Server Error" (first (ask place "/")))))
      (sb-posix:unlink path))))

(test names-of-files
  (call-with-file
   (lambda (path)
     (let ((directory (make-pathname :name nil :type nil :defaults path))
           (name (file-namestring path)))
       (with-test-server (server place (lambda (exchange)
                                         (let ((*default-pathname-defaults* directory))
                                           (sb-fiber-http:reply-with-file exchange name))))
         (is (equal "abc" (third (ask place "/"))))))
     ;; It must not end where C thinks that it does.
     (with-test-server (server place (serve-file (format nil "~A~C.png" path (code-char 0))))
       (is (equal "HTTP/1.1 500 Internal Server Error" (first (ask place "/"))))))
   (octets-of-size 3)))

(test conditions-of-other-methods
  (call-with-file
   (lambda (path)
     (with-test-server (server place (serve-file path))
       (let ((condition (format nil "If-Modified-Since: ~A"
                                (field-of "Last-Modified" (second (ask place "/"))))))
         (loop for (method status) in '(("GET" 304) ("HEAD" 304) ("POST" 200))
               do (is (eql status
                           (parse-integer (first (answer-to place
                                                            (message (format nil "~A / HTTP/1.1"
                                                                             method)
                                                                     "Host: x" condition "")))
                                          :start 9 :end 12)))))))
   (octets-of-size 3)))
