;;;; environments: what a Clack application is called with

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "CLACK.HANDLER.SB-FIBER")

;;; A client must not fill the package of keywords: a method that neither this list has nor any
;;; program is not interned.
(defparameter *methods*
  (loop for method in '(:get :head :post :put :delete :options :trace :patch :connect
                        :propfind :proppatch :mkcol :copy :move :lock :unlock :report)
        collect (cons (string method) method))
  "Methods, and what they are in an environment.")

(defun method-keyword (head)
  "The method of HEAD as a keyword."
  (let ((method (head-method head)))
    (or (cdr (assoc method *methods* :test #'string=))
        (find-symbol method "KEYWORD")
        (error 'bad-request :status 501
                            :reason (format nil "The method ~A is not known." method)))))

;;;; targets

(defun path-start (target)
  "Where the path of TARGET begins, which may be a whole URI."
  (let ((scheme (and (plusp (length target)) (char/= #\/ (char target 0))
                     (search "://" target))))
    (if scheme
        (or (position #\/ target :start (+ scheme 3)) (length target))
        0)))

(defun hexadecimal-value (string start)
  "The octet that the two characters of STRING at START stand for, or NIL."
  (and (<= (+ start 2) (length string))
       (let ((high (digit-char-p (char string start) 16))
             (low (digit-char-p (char string (1+ start)) 16)))
         (and high low (+ (* 16 high) low)))))

(defun decoded-octets (string)
  (let ((octets (make-array (length string) :element-type '(unsigned-byte 8))) (n 0) (i 0))
    (loop while (< i (length string))
          do (let ((escaped (and (char= #\% (char string i)) (hexadecimal-value string (1+ i)))))
               (setf (aref octets n) (or escaped (char-code (char string i))))
               (incf n)
               (incf i (if escaped 3 1))))
    (subseq octets 0 n)))

(defun decode-path (path)
  "PATH, whose characters stand for octets, with what is escaped decoded, as UTF-8."
  (if (every (lambda (character) (and (char/= character #\%) (< (char-code character) 128))) path)
      path
      (sb-ext:octets-to-string (decoded-octets path)
                               :external-format '(:utf-8 :replacement #\ufffd))))

;;;; fields

(defun fields-table (head)
  "The fields of HEAD in a table of strings, under their names in lower case. Values of the same
name are joined."
  (let ((table (make-hash-table :test 'equal :size (max 7 (head-field-count head)))))
    (map-fields (lambda (name value)
                  (let* ((name (string-downcase name)) (before (gethash name table)))
                    (setf (gethash name table)
                          (if before
                              (concatenate 'string before (if (string= name "cookie") "; " ", ")
                                           value)
                              value))))
                head)
    table))

(defun host-name (host)
  "The name in HOST, the value of the field, without the port."
  (let ((colon (and host (position #\: host :from-end t))))
    (if (and colon (every #'digit-char-p (subseq host (1+ colon))))
        (subseq host 0 colon)
        host)))

;;;; environments

(defun server-place (exchange)
  (listener-address (client-listener (exchange-client exchange))))

(defun environment (exchange socket place)
  "The environment for the request of EXCHANGE, which came by PLACE. SOCKET is what it is to have as
its socket."
  (let* ((head (exchange-head exchange))
         (target (head-target head))
         (start (path-start target))
         (mark (position #\? target))
         (fields (fields-table head))
         (peer (client-peer (exchange-client exchange))))
    (list :request-method (method-keyword head)
          :script-name ""
          :path-info (decode-path (subseq target (min start (or mark start)) mark))
          :query-string (and mark (subseq target (1+ mark)))
          :request-uri target
          :server-name (or (host-name (gethash "host" fields)) "localhost")
          :server-port (cond ((eq (first place) :tcp) (third place))
                             ((connection-transport (exchange-connection exchange)) 443)
                             (t 80))
          :server-protocol (if (= 1 (head-minor-version head)) :http/1.1 :http/1.0)
          :url-scheme (if (connection-transport (exchange-connection exchange)) "https" "http")
          :remote-addr (and peer (address-string (first peer)))
          :remote-port (second peer)
          :content-type (gethash "content-type" fields)
          :content-length (head-content-length head)
          :headers fields
          :raw-body (make-body-stream exchange)
          :clack.streaming t
          :clack.io socket)))
