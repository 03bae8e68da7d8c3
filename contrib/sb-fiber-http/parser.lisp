;;;; parsing heads of requests

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-HTTP")

;;; A head is parsed where it lies: method, target and fields are noted by their places in the
;;; buffer, and become strings if somebody asks. A table-driven parser that is given octets as they
;;; come, such as fast-http, keeps a state per octet and calls back per part; heads nearly always
;;; come whole, so here a head is only searched for its end until it is there, and then parsed in
;;; one go.
;;;
;;; It is strict where the recipients of a message could understand it differently, one of them
;;; being a proxy in front: request smuggling. So are refused: lines that do not end with CR LF,
;;; fields on several lines, space before a colon, control characters, a length given twice or
;;; beside a transfer coding, and codings that are not known.
;;;
;;;; the end of a head

;;; RFC 9112, 2.2: some clients send an empty line too many behind a body.
(defconstant +most-empty-lines+ 2)

(defun skip-empty-lines (head end)
  (let ((octets (head-octets head)) (start (head-start head)))
    (loop while (and (< (1+ start) end)
                     (< (- start (head-begin head)) (* 2 +most-empty-lines+))
                     (= (aref octets start) +cr+)
                     (= (aref octets (1+ start)) +lf+))
          do (incf start 2))
    (when (> start (head-searched head))
      (setf (head-searched head) start
            (head-line-start head) start))
    (setf (head-start head) start)))

(defun check-lengths (head end limits)
  "Refuse what is longer than LIMITS allow, as far as that can be told from the octets up to END."
  (let ((octets (head-octets head)) (start (head-start head)))
    (when (> (- end start) (limits-line limits))
      (unless (position-of-lf octets start (+ start (limits-line limits)))
        (refuse 414 "The request line has more than ~D octets." (limits-line limits))))
    (when (> (- end start) (limits-head limits))
      (refuse 431 "The head has more than ~D octets." (limits-head limits)))))

(defun find-head-end (head end)
  "Return the index behind the empty line that ends HEAD, or NIL if it is not in the octets up to
END."
  (declare (type index end))
  (let ((octets (head-octets head)) (line-start (head-line-start head)))
    (loop
      (let ((lf (position-of-lf octets (head-searched head) end)))
        (unless lf
          (setf (head-searched head) end
                (head-line-start head) line-start)
          (return nil))
        (unless (and (> lf line-start) (= (aref octets (1- lf)) +cr+))
          (refuse 400 "A line does not end with CR LF."))
        (when (= (- lf line-start) 1)
          (return (1+ lf)))
        (setf (head-searched head) (1+ lf)
              line-start (1+ lf))))))

;;;; the request line

(defun refuse-request-line ()
  (refuse 400 "The request line is not METHOD TARGET HTTP/VERSION."))

(defun parse-version (octets start end)
  "Return the digit behind the point of the version, all of OCTETS from START to END."
  (declare (type octets octets) (type index start end))
  (unless (and (= (- end start) 8) (name-at-p "http/" octets start (+ start 5))
               ;; the name of the protocol is in upper case
               (= (aref octets start) (octet #\H))
               (digit-of (aref octets (+ start 5)))
               (= (aref octets (+ start 6)) (octet #\.))
               (digit-of (aref octets (+ start 7))))
    (refuse-request-line))
  (unless (= (aref octets (+ start 5)) (octet #\1))
    (refuse 505 "This server speaks HTTP/1.1."))
  (min 1 (digit-of (aref octets (+ start 7)))))

(defun parse-request-line (head end)
  "END is where the CR of the line is."
  (declare (type index end))
  (let* ((octets (head-octets head))
         (start (head-start head))
         (method-end (end-of-span octets start end token-octet-p))
         (target-start (min end (1+ method-end)))
         (target-end (end-of-span octets target-start end target-octet-p)))
    (unless (and (< start method-end) (< target-start target-end) (< target-end end)
                 (= (aref octets method-end) (aref octets target-end) +space+))
      (refuse-request-line))
    (setf (head-method-end head) method-end
          (head-target-start head) target-start
          (head-target-end head) target-end
          (head-minor-version head) (parse-version octets (1+ target-end) end))))

;;;; fields

(defun add-field (head name-start name-end value-start value-end)
  (let* ((n (* +places-per-field+ (head-field-count head)))
         (places (head-places head)))
    (when (= n (length places))
      (setf places (replace (make-places (* 2 (head-field-count head))) places)
            (head-places head) places))
    (setf (aref places n) name-start
          (aref places (+ n 1)) name-end
          (aref places (+ n 2)) value-start
          (aref places (+ n 3)) value-end)
    (incf (head-field-count head))))

(defun parse-field (head start end)
  "END is where the CR of the line is that begins at START."
  (declare (type index start end))
  (let* ((octets (head-octets head))
         (name-end (end-of-span octets start end token-octet-p)))
    (unless (and (< start name-end end) (= (aref octets name-end) (octet #\:)))
      (refuse 400 "A line of the head is not NAME: VALUE."))
    (let* ((value-start (end-of-span octets (1+ name-end) end blank-p))
           (value-end end))
      (declare (type index value-start value-end))
      (loop while (and (> value-end value-start) (blank-p (aref octets (1- value-end))))
            do (decf value-end))
      (unless (= value-end (end-of-span octets value-start value-end value-octet-p))
        (refuse 400 "The value of a field has a control character."))
      (add-field head start name-end value-start value-end)
      (note-field head start name-end value-start value-end))))

(defun parse-fields (head start end limits)
  "Parse the lines from START to END, behind which is the empty one."
  (declare (type index start end))
  (let ((octets (head-octets head)))
    (loop while (< start end)
          do (let ((lf (position-of-lf octets start end)))
               (when (= (head-field-count head) (limits-fields limits))
                 (refuse 431 "The head has more than ~D fields." (limits-fields limits)))
               (parse-field head start (1- lf))
               (setf start (1+ lf))))))

;;;; all of it

(defun parse-head (head octets start end limits &key (again nil))
  "Parse the head of the request that begins at START of OCTETS, of which those up to END have been
received. Return the index behind it, or NIL if END comes before; then call this AGAIN, with AGAIN
true, when there are more. OCTETS must not change as long as HEAD is used. Signals BAD-REQUEST."
  (declare (type octets octets) (type index start end))
  (unless again (begin-head head octets start))
  (skip-empty-lines head end)
  (let ((head-end (find-head-end head end)))
    (check-lengths head (or head-end end) limits) ; a body may have come with it
    (when head-end
      (let ((lf (position-of-lf octets (head-start head) head-end)))
        (parse-request-line head (1- lf))
        (parse-fields head (1+ lf) (- head-end 2) limits)
        (check-framing head)
        (setf (head-end head) head-end)))))
