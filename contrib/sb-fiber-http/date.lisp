;;;; dates, as HTTP writes them

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-HTTP")

;;; RFC 9110, 5.6.7. The two obsolete forms are not understood: no client of today sends them, and
;;; a condition that is not understood is passed over.

(defparameter *weekdays* #("Mon" "Tue" "Wed" "Thu" "Fri" "Sat" "Sun"))
(defparameter *months*
  #("Jan" "Feb" "Mar" "Apr" "May" "Jun" "Jul" "Aug" "Sep" "Oct" "Nov" "Dec"))

(defun date-string (universal-time)
  "Return UNIVERSAL-TIME as HTTP writes it."
  (multiple-value-bind (second minute hour day month year weekday)
      (decode-universal-time universal-time 0)
    (format nil "~A, ~2,'0D ~A ~D ~2,'0D:~2,'0D:~2,'0D GMT"
            (aref *weekdays* weekday) day (aref *months* (1- month)) year hour minute second)))

(defun parse-date (string)
  "Return the universal time that STRING, as HTTP writes it, stands for, or NIL."
  (flet ((digits (start end)
           (parse-integer string :start start :end end)))
    (and (= (length string) 29)
         (ignore-errors
          (let ((month (position (subseq string 8 11) *months* :test #'string=)))
            (and month (string= " GMT" string :start2 25)
                 (encode-universal-time (digits 23 25) (digits 20 22) (digits 17 19)
                                        (digits 5 7) (1+ month) (digits 12 16) 0)))))))
