;;;; fields that tell how a message goes on

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-HTTP")

;;; The values that lists consist of are separated by commas, with blanks around them.
(defmacro do-list-elements ((start end octets from to) &body body)
  "Execute BODY with START and END bound to the ends of each element of the list that OCTETS are
from FROM to TO. Empty elements count."
  (sb-int:once-only ((octets octets) (from from) (to to))
    (sb-int:with-unique-names (comma next)
      `(let ((,next ,from))
         (declare (type index ,next))
         (loop
           (let* ((,comma (or (position (octet #\,) ,octets :start ,next :end ,to) ,to))
                  (,start (end-of-span ,octets ,next ,comma blank-p))
                  (,end ,comma))
             (declare (type index ,comma ,start ,end))
             (loop while (and (> ,end ,start) (blank-p (aref ,octets (1- ,end)))) do (decf ,end))
             ,@body
             (when (= ,comma ,to) (return))
             (setf ,next (1+ ,comma))))))))

;;;; what the engine understands

(defconstant +most-digits-of-length+ 15)

(defun note-content-length (head octets start end)
  (declare (type octets octets) (type index start end))
  (when (head-content-length head)
    (refuse 400 "Content-Length is given twice."))
  (unless (and (< start end)
               (loop for i from start below end always (digit-of (aref octets i))))
    (refuse 400 "Content-Length is not a number."))
  (when (> (- end start) +most-digits-of-length+)
    (refuse 413 "The body is too large."))
  (setf (head-content-length head)
        (let ((length 0))
          (declare (type index length))
          (loop for i from start below end
                do (setf length (+ (* 10 length) (digit-of (aref octets i)))))
          length)))

(defun note-transfer-encoding (head octets start end)
  (when (head-chunked-p head)
    (refuse 400 "Transfer-Encoding is given twice."))
  (unless (name-at-p "chunked" octets start end)
    (refuse 501 "The only Transfer-Encoding that is known is chunked."))
  (setf (head-chunked-p head) t))

(defun note-connection (head octets start end)
  (do-list-elements (element-start element-end octets start end)
    (cond ((name-at-p "close" octets element-start element-end)
           (setf (head-close-p head) t))
          ((name-at-p "keep-alive" octets element-start element-end)
           (setf (head-keep-alive-asked-p head) t))
          ((name-at-p "upgrade" octets element-start element-end)
           (setf (head-upgrade-p head) t)))))

(defun note-expect (head octets start end)
  (unless (name-at-p "100-continue" octets start end)
    (refuse 417 "The only expectation that can be met is 100-continue."))
  (setf (head-expects-continue-p head) t))

(defun note-host (head)
  (when (head-host-p head)
    (refuse 400 "Host is given twice."))
  (setf (head-host-p head) t))

(defun note-field (head name-start name-end value-start value-end)
  "Take note of a field, if it is one that tells how the message goes on."
  (let ((octets (head-octets head)))
    (macrolet ((name-p (name) `(name-at-p ,name octets name-start name-end)))
      (case (- name-end name-start)     ; few have the same length
        (4 (when (name-p "host") (note-host head)))
        (6 (when (name-p "expect") (note-expect head octets value-start value-end)))
        (10 (when (name-p "connection") (note-connection head octets value-start value-end)))
        (14 (when (name-p "content-length")
              (note-content-length head octets value-start value-end)))
        (17 (when (name-p "transfer-encoding")
              (note-transfer-encoding head octets value-start value-end)))))))

(defun check-framing (head)
  "Called when all fields of HEAD have been noted."
  (when (head-chunked-p head)
    (when (head-content-length head)
      (refuse 400 "Content-Length and Transfer-Encoding are both given."))
    (when (= (head-minor-version head) 0)
      (refuse 400 "HTTP/1.0 has no Transfer-Encoding.")))
  (when (and (= (head-minor-version head) 1) (not (head-host-p head)))
    (refuse 400 "Host is missing."))
  ;; RFC 9110, 10.1.1
  (when (= (head-minor-version head) 0)
    (setf (head-expects-continue-p head) nil)))

(defun head-keep-alive-p (head)
  "May the connection be used for another request after that of HEAD?"
  (cond ((head-close-p head) nil)
        ((= (head-minor-version head) 1) t)
        (t (head-keep-alive-asked-p head))))
