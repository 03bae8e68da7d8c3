;;;; octets, and the characters of ASCII among them

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-HTTP")

;;; A message is looked at where it lies in the buffer of a connection. What is found is not copied
;;; but told by two indices, START and END, as for sequences.

(deftype octets () '(simple-array (unsigned-byte 8) (*)))
(deftype index () '(integer 0 #.(ash most-positive-fixnum -2)))

(eval-when (:compile-toplevel :load-toplevel :execute)
  (defconstant +tab+ 9)
  (defconstant +lf+ 10)
  (defconstant +cr+ 13)
  (defconstant +space+ 32)
  (defconstant +delete+ 127))

(defmacro octet (character)
  (char-code character))

(declaim (inline string-octets))
(defun string-octets (string)
  "Return the octets that the characters of STRING, all of Latin-1, have as their codes."
  (map 'octets #'char-code string))

(defun octets-string (octets start end)
  "Return the string of the characters whose codes are OCTETS from START to END."
  (declare (type octets octets) (type index start end))
  (assert (<= start end (length octets)))
  (let ((string (make-string (- end start) :element-type 'base-char)))
    (loop for i of-type index from start below end
          for octet = (aref octets i)
          do (when (>= octet 128)
               (return-from octets-string (latin-1-string octets start end)))
             (setf (schar string (- i start)) (code-char octet)))
    string))

(defun latin-1-string (octets start end)
  (declare (type octets octets) (type index start end))
  (let ((string (make-string (- end start))))
    (loop for i of-type index from start below end
          do (setf (schar string (- i start)) (code-char (aref octets i))))
    string))

;;;; kinds of octets

(eval-when (:compile-toplevel :load-toplevel :execute)
  (defun bits-of (predicate)
    (map 'simple-bit-vector (lambda (code) (if (funcall predicate code) 1 0))
         (loop for code below 256 collect code)))

  (defun token-code-p (code)
    "Is CODE that of a tchar of RFC 9110, 5.6.2?"
    (let ((character (code-char code)))
      (and (< code 128)
           (or (alphanumericp character) (find character "!#$%&'*+-.^_`|~"))))))

(defmacro define-kind (name (code) documentation test)
  "Define NAME as a function that looks its argument, an octet, up in a table made by TEST."
  `(progn
     (declaim (inline ,name))
     (defun ,name (octet)
       ,documentation
       (declare (type (unsigned-byte 8) octet))
       (= 1 (sbit (load-time-value (the (simple-bit-vector 256)
                                        (bits-of (lambda (,code) ,test)))
                                   t)
                  octet)))))

(define-kind token-octet-p (code)
  "May OCTET be part of a method, or of the name of a field?"
  (token-code-p code))

;;; What is not of ASCII should have been escaped; browsers send it, and it does no harm.
(define-kind target-octet-p (code)
  "May OCTET be part of a request's target?"
  (and (> code +space+) (/= code +delete+)))

(define-kind value-octet-p (code)
  "May OCTET be part of a field's value?"
  (or (= code +tab+) (and (>= code +space+) (/= code +delete+))))

;;; for the sake of speed: a loop for each of the two ways in which strings are kept
(defmacro do-codes ((code string) &body body)
  "Execute BODY with the CODE of each character of STRING, a simple one, in a block named NIL."
  `(macrolet ((walk ()
                '(loop for character across string
                       do (let ((,code (char-code character))) ,@body))))
     (let ((string ,string))
       (etypecase string
         (simple-base-string (walk))
         ((simple-array character (*)) (walk))))))

(defun value-string-p (string)
  "May STRING be the value of a field of a reply?"
  (do-codes (code (coerce string 'simple-string))
    (unless (and (< code 256) (value-octet-p code)) (return-from value-string-p nil)))
  t)

(declaim (inline blank-p digit-of))
(defun blank-p (octet)
  (or (= octet +space+) (= octet +tab+)))

(defun digit-of (octet)
  "The decimal digit whose character OCTET is the code of, or NIL."
  (and (<= (octet #\0) octet (octet #\9)) (- octet (octet #\0))))

(defun hexadecimal-digit-of (octet)
  (declare (type (unsigned-byte 8) octet))
  (cond ((digit-of octet))
        ((<= (octet #\a) (logior octet 32) (octet #\f)) (- (logior octet 32) (octet #\a) -10))))

;;;; searching and comparing

(defmacro end-of-span (octets start end kind)
  "The first index from START on whose octet is not of KIND, or END."
  `(let ((i ,start))
     (declare (type index i))
     (loop while (and (< i ,end) (,kind (aref ,octets i))) do (incf i))
     i))

(declaim (inline position-of-lf))
(defun position-of-lf (octets start end)
  (declare (type octets octets) (type index start end))
  (loop for i of-type index from start below end
        when (= (aref octets i) +lf+) return i))

(defun name-at-p (name octets start end)
  "Do OCTETS from START to END say NAME, a string in lower case, in either case?"
  (declare (type simple-base-string name) (type octets octets) (type index start end)
           (optimize speed (safety 0)))
  (and (= (length name) (- end start))
       (loop for character across name
             for i of-type index from start
             for octet = (aref octets i)
             always (= (char-code character)
                       (if (<= (octet #\A) octet (octet #\Z)) (logior octet 32) octet)))))

(define-compiler-macro name-at-p (&whole form name &rest arguments)
  (if (and (stringp name) (not (typep name 'simple-base-string)))
      `(name-at-p ,(coerce name 'simple-base-string) ,@arguments)
      form))
