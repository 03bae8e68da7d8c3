;;;; clients behind proxies

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-HTTP")

;;; A proxy adds the address that it was asked from to the field X-Forwarded-For, at the end. What
;;; stands before that may be invented: a list is believed from its end on, as long as what has
;;; added to it can be trusted.

(defun split-list (value)
  "The parts of VALUE, a string, between commas, without blanks around them."
  (loop for start = 0 then (1+ end)
        for end = (position #\, value :start start)
        collect (string-trim '(#\Space #\Tab) (subseq value start end))
        while end))

(defun forwarded-addresses (head)
  "What HEAD says in X-Forwarded-For, the last first."
  (let ((addresses '()))
    (loop for n = (head-field head "x-forwarded-for") then (head-field head "x-forwarded-for"
                                                                       (1+ n))
          while n
          do (dolist (address (split-list (field-value head n)))
               (unless (string= address "") (push address addresses))))
    addresses))

(defun client-address (exchange &key (proxies '()))
  "Return the address of who has sent the request of EXCHANGE, a string; or NIL if it came by a
socket in the file system. PROXIES is a list of addresses, strings, of which NIL stands for all who
come by such a socket: if one of these has sent it, this is the address that it names in the field
X-Forwarded-For, as it is written there; which may be a proxy, too."
  (let ((peer (client-peer (exchange-client exchange))))
    (loop for address in (cons (and peer (address-string (first peer)))
                               (forwarded-addresses (exchange-head exchange)))
          while (member address proxies :test #'equal)
          finally (return address))))
