;;;; Certificates that are good for a while

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "files.lisp" *load-truename*))

(defvar *certificates*
  (let ((directory (make-temporary-directory)))
    (push (lambda () (sb-ext:delete-directory directory :recursive t)) sb-ext:*exit-hooks*)
    directory)
  "A directory.")

(defun make-certificate (name &key (password nil)
                                   (key-kind '("ec" "-pkeyopt" "ec_paramgen_curve:prime256v1")))
  "Return the paths of a new certificate of NAME, and of its key."
  (let ((certificate (format nil "~A/~A-certificate.pem" *certificates* name))
        (key (format nil "~A/~A-key.pem" *certificates* name)))
    (sb-ext:run-program "openssl"
                        `("req" "-x509" "-newkey" ,@key-kind
                                ,@(if password
                                      (list "-passout" (format nil "pass:~A" password))
                                      '("-nodes"))
                                "-days" "2" "-subj" ,(format nil "/CN=~A" name) "-keyout" ,key
                                "-out" ,certificate)
                        :search t)
    (values certificate key)))
