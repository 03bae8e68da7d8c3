;;;; The HTTP engine, and messages to give it

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(asdf:load-asd (merge-pathnames "../../../contrib/sb-fiber-http/sb-fiber-http.asd"
                                *load-truename*))
(handler-bind ((warning #'muffle-warning))
  (let ((*standard-output* (make-broadcast-stream)))
    (asdf:load-system "sb-fiber-http")))

(defun message (&rest lines)
  "The octets of LINES, strings, each of which ends with CR LF."
  (sb-fiber-http:string-octets (format nil "~{~A~C~C~}"
                                       (loop for line in lines
                                             append (list line #\Return #\Newline)))))

(defun join-octets (&rest octets)
  (apply #'concatenate 'sb-fiber-http:octets octets))

(defun octets-string-of (octets)
  (sb-fiber-http:octets-string (coerce octets 'sb-fiber-http:octets) 0 (length octets)))

(defun random-element (sequence)
  (elt sequence (random (length sequence))))

(defun mutated (octets)
  "A copy of OCTETS in which some octets were exchanged, left out, doubled or moved."
  (let ((octets (copy-seq octets)))
    (loop repeat (1+ (random 4))
          do (let* ((i (random (length octets)))
                    (j (min (length octets) (+ i 1 (random 8)))))
               (ecase (random 4)
                 (0 (setf (aref octets i)
                          (random-element #(0 9 10 13 32 43 44 45 48 58 59 65 97 127 128 255))))
                 (1 (when (< (- j i) (length octets))
                      (setf octets (join-octets (subseq octets 0 i) (subseq octets j)))))
                 (2 (setf octets (join-octets (subseq octets 0 j) (subseq octets i))))
                 (3 (rotatef (aref octets i) (aref octets (random (length octets))))))))
    octets))
