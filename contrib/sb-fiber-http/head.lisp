;;;; heads of requests: what is known of one, and what can be asked

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-HTTP")

;;; What is true of a HEAD when PARSE-HEAD has returned an index:
;;;  - the octets of its buffer from START to END are the head, with the empty line;
;;;  - PLACES has, for each field, the start and end of its name, and of its value, which is
;;;    trimmed; names are tokens, and values have no control characters but tabs;
;;;  - there is one of CONTENT-LENGTH and CHUNKED-P at most.

(define-condition bad-request (error)
  ((status :initarg :status :reader bad-request-status)
   (reason :initarg :reason :reader bad-request-reason))
  (:report (lambda (condition stream)
             (format stream "A request is refused with status ~D: ~A"
                     (bad-request-status condition) (bad-request-reason condition))))
  (:documentation "The error that is signaled if a message of a client is not understood, or too
large. BAD-REQUEST-STATUS is the status code that the client is to get, BAD-REQUEST-REASON a string.
The connection must be closed: where the next message begins is not known."))

(defun refuse (status reason &rest arguments)
  (error 'bad-request :status status :reason (apply #'format nil reason arguments)))

(defstruct (limits (:copier nil))
  "What a client may send: octets of a request line, octets of a head in all, fields."
  (line 8192 :type index :read-only t)
  (head 65536 :type index :read-only t)
  (fields 100 :type index :read-only t))
(declaim (sb-ext:freeze-type limits))

(defconstant +places-per-field+ 4)

(defstruct (head (:constructor make-head (&aux (places (make-places 16)))) (:copier nil))
  "The head of a request."
  (octets (load-time-value (make-array 0 :element-type '(unsigned-byte 8))) :type octets)
  (begin 0 :type index)                 ; START, but for empty lines
  (start 0 :type index)
  (end 0 :type index)
  ;; how far the end of the head has been searched for, and where the line begins that is there
  (searched 0 :type index)
  (line-start 0 :type index)
  (method-end 0 :type index)
  (target-start 0 :type index)
  (target-end 0 :type index)
  (minor-version 1 :type bit)
  (field-count 0 :type index)
  (places (sb-int:missing-arg) :type (simple-array (unsigned-byte 32) (*)))
  ;; what tells how the message goes on
  (content-length nil :type (or null index))
  (chunked-p nil :type boolean)
  (close-p nil :type boolean)
  (keep-alive-asked-p nil :type boolean)
  (upgrade-p nil :type boolean)
  (expects-continue-p nil :type boolean)
  (host-p nil :type boolean))
(declaim (sb-ext:freeze-type head))

(declaim (inline make-places))
(defun make-places (n-fields)
  (make-array (* +places-per-field+ n-fields) :element-type '(unsigned-byte 32)))

(defun begin-head (head octets start)
  "Let HEAD be that which begins at START of OCTETS."
  (setf (head-octets head) octets
        (head-begin head) start
        (head-start head) start
        (head-searched head) start
        (head-line-start head) start
        (head-field-count head) 0
        (head-content-length head) nil
        (head-chunked-p head) nil
        (head-close-p head) nil
        (head-keep-alive-asked-p head) nil
        (head-upgrade-p head) nil
        (head-expects-continue-p head) nil
        (head-host-p head) nil)
  head)

(defun shifted-places (head)
  "The places of HEAD, as they are if it begins at 0."
  (let ((places (make-places (head-field-count head))))
    (dotimes (i (length places) places)
      (setf (aref places i) (- (aref (head-places head) i) (head-start head))))))

(defun copy-of-head (head)
  "Return a head that says what HEAD does, and goes on doing so when the buffer is used again."
  (let ((copy (copy-structure head)) (start (head-start head)))
    (flet ((shift (place) (- place start)))
      (setf (head-octets copy) (subseq (head-octets head) start (head-end head))
            (head-places copy) (shifted-places head)
            (head-begin copy) 0
            (head-start copy) 0
            (head-end copy) (shift (head-end head))
            (head-method-end copy) (shift (head-method-end head))
            (head-target-start copy) (shift (head-target-start head))
            (head-target-end copy) (shift (head-target-end head))))
    copy))

;;;; what others ask for

(defun head-method (head)
  "Return the method of HEAD, a string."
  (octets-string (head-octets head) (head-start head) (head-method-end head)))

;;; Methods are told apart by case, RFC 9110, 9.1: a proxy takes the reply to a "head" for one with
;;; a body.
(defun head-method-is-p (head method)
  "Is METHOD, a string, that of HEAD?"
  (let ((octets (head-octets head)) (start (head-start head)))
    (and (= (length method) (- (head-method-end head) start))
         (loop for character across method
               for i of-type index from start
               always (= (char-code character) (aref octets i))))))

(defun head-target (head)
  "Return the target of HEAD as it was sent, a string."
  (octets-string (head-octets head) (head-target-start head) (head-target-end head)))

(declaim (inline place-of-field))
(defun place-of-field (head n k)
  (aref (head-places head) (+ (* +places-per-field+ n) k)))

(defun field-name (head n)
  "Return the name of field N of HEAD, counted from 0, as it was sent, a string."
  (octets-string (head-octets head) (place-of-field head n 0) (place-of-field head n 1)))

(defun field-value (head n)
  "Return the value of field N of HEAD, a string."
  (octets-string (head-octets head) (place-of-field head n 2) (place-of-field head n 3)))

(defun head-field (head name &optional (from 0))
  "Return the number, from FROM on, of the first field of HEAD that is called NAME, a string in
lower case; or NIL."
  (declare (type index from))
  (let ((name (coerce name 'simple-base-string)))
    (loop for n from from below (head-field-count head)
          when (name-at-p name (head-octets head) (place-of-field head n 0)
                          (place-of-field head n 1))
            return n)))

(define-compiler-macro head-field (&whole form head name &rest arguments)
  (if (and (stringp name) (every (lambda (c) (typep c 'base-char)) name)
           (not (typep name 'simple-base-string)))
      `(head-field ,head ,(coerce name 'simple-base-string) ,@arguments)
      form))

(defun map-fields (function head)
  "Call FUNCTION with name and value, strings, of each field of HEAD."
  (dotimes (n (head-field-count head))
    (funcall function (field-name head n) (field-value head n))))
