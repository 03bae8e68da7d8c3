;;;; the package of the HTTP/1.1 engine

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

#-sb-fiber
(error "SB-FIBER-HTTP needs an SBCL with fibers, and this one has none.")

(defpackage "SB-FIBER-HTTP"
  (:documentation "HTTP/1.1 over octet buffers, for servers whose connections are fibers.")
  (:use "COMMON-LISP")
  (:export
   ;; octets
   "OCTETS" "OCTETS-STRING" "STRING-OCTETS"
   ;; heads
   "HEAD" "MAKE-HEAD" "COPY-OF-HEAD" "PARSE-HEAD" "LIMITS" "MAKE-LIMITS"
   "HEAD-METHOD" "HEAD-TARGET" "HEAD-MINOR-VERSION" "HEAD-FIELD-COUNT"
   "HEAD-FIELD" "FIELD-NAME" "FIELD-VALUE" "MAP-FIELDS"
   "HEAD-CONTENT-LENGTH" "HEAD-CHUNKED-P" "HEAD-KEEP-ALIVE-P" "HEAD-KEEP-ALIVE-ASKED-P"
   "HEAD-UPGRADE-P" "HEAD-EXPECTS-CONTINUE-P"
   ;; bodies
   "DECODER" "MAKE-DECODER" "DECODE" "DECODER-DONE-P" "DECODER-FAILED-P" "+UNLIMITED+"
   ;; connections
   "CONNECTION" "MAKE-CONNECTION" "CONNECTION-FD" "DEADLINE-AFTER"
   "RECEIVE-HEAD" "RECEIVE-BODY" "RECEIVE-ANYTHING" "INPUT-WAITING-P" "SEND-OCTETS" "LINGER"
   ;; replies
   "SEND-REPLY" "REASON-PHRASE" "STATUS-LINE"
   "OUTPUT" "WITH-OUTPUT" "PUT-CONSTANT" "PUT-OCTETS" "PUT-FIELD" "PUT-NUMBER"
   "PUT-DATE" "SEND-OUTPUT"
   ;; exchanges
   "EXCHANGE" "MAKE-EXCHANGE" "EXCHANGE-CONNECTION" "EXCHANGE-HEAD" "EXCHANGE-DECODER"
   "EXCHANGE-STATE" "EXCHANGE-STATUS" "EXCHANGE-KEEP-ALIVE-P"
   "RECEIVE-PART" "BODY-LEFT-P" "SKIP-BODY" "UPGRADE-WITHOUT-BODY-P"
   "REPLY" "BEGIN-REPLY" "SEND-PART" "END-REPLY" "TAKE-CONNECTION"
   "BODY-STREAM" "MAKE-BODY-STREAM" "READ-ANOTHER-BODY" "STREAM-EXCHANGE"
   ;; what a client did wrong
   "TIMED-OUT" "CONNECTION-LOST"
   "BAD-REQUEST" "BAD-REQUEST-STATUS" "BAD-REQUEST-REASON"))
