;;;; bodies of messages

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-HTTP")

;;; A decoder tells which octets of the buffer of a connection are the body's. It has been given
;;; all octets up to some place, and is asked again when there are more:
;;;
;;;     STATE       next comes                     move
;;;     :LENGTH     REMAINING octets of the body   -> :DONE when there are none
;;;     :SIZE       the line of a chunk's size     -> :CHUNK, or :TRAILER if the size is 0
;;;     :CHUNK      REMAINING octets of the body   -> :CHUNK-END when there are none
;;;     :CHUNK-END  CR LF                          -> :SIZE
;;;     :TRAILER    a line                         -> :DONE if it is empty
;;;     :DONE       the next message
;;;     :FAILED     nobody knows what          <- all but :DONE, when BAD-REQUEST is signalled
;;;
;;; DECODE makes all moves. Extensions of chunks and trailers are passed over, as most servers do:
;;; nobody is known to need them, and merged into the head they would be a way around its checks.

;;; As many octets as are more than any body has.
(defconstant +unlimited+ (ash most-positive-fixnum -3))

(deftype decoder-state () '(member :length :size :chunk :chunk-end :trailer :done :failed))

(defstruct (decoder (:constructor %make-decoder (state remaining most)) (:copier nil))
  "What is known of a body that is being received."
  (state (sb-int:missing-arg) :type decoder-state)
  (remaining 0 :type index)
  (received 0 :type index)              ; octets of the body
  (overhead 0 :type index)              ; other octets
  (most 0 :type index :read-only t))
(declaim (sb-ext:freeze-type decoder))

(defun make-decoder (head most)
  "Return a decoder for the body behind HEAD, which may have MOST octets. Signals BAD-REQUEST if it
has more."
  (declare (type index most))
  (let ((length (or (head-content-length head) 0)))
    (cond ((head-chunked-p head) (%make-decoder :size 0 most))
          ((> length most) (refuse-body most))
          ((= length 0) (%make-decoder :done 0 most))
          (t (%make-decoder :length length most)))))

(defun decoder-done-p (decoder)
  "Has all of the body been decoded?"
  (eq (decoder-state decoder) :done))

(defun decoder-failed-p (decoder)
  "Has DECODE signalled BAD-REQUEST?"
  (eq (decoder-state decoder) :failed))

(defun refuse-body (most)
  (refuse 413 "The body has more than ~D octets." most))

(defconstant +longest-chunk-line+ 4096)
(defconstant +overhead-per-octet+ 16)

;;; Prevents: a client that sends without end, but hardly anything that counts.
(defun pass-over (decoder n)
  "Count N octets that are not of the body."
  (when (> (incf (decoder-overhead decoder) n)
           (+ +longest-chunk-line+ (* +overhead-per-octet+ (decoder-received decoder))))
    (refuse 400 "The lines between chunks, or behind the last one, are too long.")))

(defun line-end (octets start end)
  "Return the index of the CR of the line that begins at START, or NIL if it does not end before
END."
  (declare (type octets octets) (type index start end))
  (let ((lf (position-of-lf octets start end)))
    (cond ((null lf)
           (when (> (- end start) +longest-chunk-line+)
             (refuse 400 "A line between chunks is too long."))
           nil)
          ((and (> lf start) (= (aref octets (1- lf)) +cr+)) (1- lf))
          (t (refuse 400 "A line between chunks does not end with CR LF.")))))

(defun parse-chunk-size (octets start end)
  (declare (type octets octets) (type index start end))
  (let ((digits (position-if-not #'hexadecimal-digit-of octets :start start :end end)))
    (when (or (eql digits start) (= start end))
      (refuse 400 "The size of a chunk is not a hexadecimal number."))
    (when (> (- (or digits end) start) 12)
      (refuse 413 "A chunk is too large."))
    (when digits
      (let ((next (end-of-span octets digits end blank-p)))
        (unless (and (< next end) (= (aref octets next) (octet #\;))
                     (= end (end-of-span octets next end value-octet-p)))
          (refuse 400 "Something behind the size of a chunk is not an extension."))))
    (let ((size 0))
      (declare (type index size))
      (loop for i from start below (or digits end)
            do (setf size (+ (* 16 size) (hexadecimal-digit-of (aref octets i)))))
      size)))

(defun begin-chunk (decoder size)
  (when (> (+ size (decoder-received decoder)) (decoder-most decoder))
    (refuse-body (decoder-most decoder)))
  (setf (decoder-remaining decoder) size
        (decoder-state decoder) (if (= size 0) :trailer :chunk)))

(defun decode-line (decoder octets start end)
  "Make the move that the line from START to END, where its CR is, means."
  (pass-over decoder (- (+ end 2) start))
  (ecase (decoder-state decoder)
    (:size (begin-chunk decoder (parse-chunk-size octets start end)))
    (:chunk-end (unless (= start end) (refuse 400 "A chunk has more octets than its size."))
     (setf (decoder-state decoder) :size))
    (:trailer (when (= start end) (setf (decoder-state decoder) :done)))))

(defun take-octets (decoder n)
  "N octets of the body have been found."
  (incf (decoder-received decoder) n)
  (when (= 0 (decf (decoder-remaining decoder) n))
    (setf (decoder-state decoder) (if (eq (decoder-state decoder) :length) :done :chunk-end))))

;;; Behind a chunk its CR LF must come at once: without this a line that is none would be awaited.
(defun check-chunk-end (octets start end)
  (unless (or (= start end) (= (aref octets start) +cr+))
    (refuse 400 "A chunk has more octets than its size.")))

(defun decode (decoder octets start end)
  "Decode OCTETS from START, where the last call came to, to END. Returns where the next octets of
the body are, as start and end, which are equal if there are none; and up to where OCTETS have been
used. When DECODER is not done and none are found, more must be received. Signals BAD-REQUEST."
  (declare (type octets octets) (type index start end))
  (handler-bind ((bad-request (lambda (condition)
                                (declare (ignore condition))
                                (setf (decoder-state decoder) :failed))))
    (decode-some decoder octets start end)))

(defun decode-some (decoder octets start end)
  (declare (type octets octets) (type index start end))
  (loop
    (case (decoder-state decoder)
      ((:length :chunk)
       (let ((body-end (+ start (min (- end start) (decoder-remaining decoder)))))
         (when (> body-end start) (take-octets decoder (- body-end start)))
         (return (values start body-end body-end))))
      (:done (return (values start start start)))
      (:failed (refuse 400 "The body was refused before.")))
    (when (eq (decoder-state decoder) :chunk-end) (check-chunk-end octets start end))
    (let ((line-end (line-end octets start end)))
      (unless line-end (return (values start start start)))
      (decode-line decoder octets start line-end)
      (setf start (+ line-end 2)))))
