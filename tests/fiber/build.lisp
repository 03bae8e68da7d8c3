;;;; What a build of the fork promises about itself

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/files.lisp" *load-truename*))

(def-suite* build)

(test version
  (let ((version (lisp-implementation-version)))
    (is (eql (search ".fibers" version) (- (length version) (length ".fibers")))
        "The version is ~S" version)))

(test feature
  (is (member :sb-fiber *features*))
  (is (find-package "SB-FIBER"))
  ;; A fasl is not for a build with other mutexes than those it was made for.
  (is (search "SB-FIBER" (sb-fasl::compute-features-affecting-fasl-format)))
  ;; Nor for one whose compiler left out marks that the collector needs.
  (is (/= 78 sb-fasl::+fasl-file-version+)))

;;; Prevents: patches that are not tried where nothing has been built, so that a release seems to
;;; take them all.
(defun directory-of (file relative)
  (merge-pathnames relative (make-pathname :name nil :type nil :version nil :defaults file)))

(defparameter *root* (directory-of *load-truename* "../../"))

(test patches-apply-without-a-build
  (let ((n (loop for directory in '("src/" "contrib/" "doc/" "tests/" "tools-for-build/")
                 sum (length (directory (merge-pathnames (format nil "~A**/*.patch" directory)
                                                         *root*)))))
        (upstream (directory-of sb-ext:*runtime-pathname* "../../../upstream/")))
    (is (search (format nil "~D patches apply, 0 files" n)
                (with-output-to-string (out)
                  (sb-ext:run-program "sh" (list (sb-ext:native-namestring
                                                  (merge-pathnames "tools-for-build/try-patches.sh"
                                                                   *root*))
                                                 (sb-ext:native-namestring (truename upstream)))
                                      :search t :output out :error out
                                      :environment (cons "SBCL_BUILD=/nonexistent"
                                                         (sb-ext:posix-environ))))))))

(test heap
  (is (= (* 8 1024 1024 1024) (sb-ext:dynamic-space-size))))

(test contribs
  (dolist (module '("SB-BSD-SOCKETS" "SB-POSIX" "SB-CONCURRENCY" "SB-SPROF"))
    (finishes (require module))))

;;;; Installing

(defun call-with-scratch-directory (function)
  (let ((directory (concatenate 'string (make-temporary-directory) "/")))
    (unwind-protect (funcall function directory)
      (sb-ext:delete-directory directory :recursive t))))

(defmacro with-scratch-directory ((directory) &body body)
  `(call-with-scratch-directory (lambda (,directory) ,@body)))

(defun run-for-output (program arguments &optional environment)
  "What PROGRAM prints; ENVIRONMENT is a list of NAME=VALUE, instead of what has the NAMEs here."
  (flet ((replaced-p (entry)
           (let ((end (position #\= entry)))
             (find (subseq entry 0 end) environment
                   :key (lambda (new) (subseq new 0 (position #\= new)))
                   :test #'string=))))
    (with-output-to-string (out)
      (sb-ext:run-program program arguments
                          :search t :output out :error :output
                          :environment (append environment
                                               (remove-if #'replaced-p (sb-ext:posix-environ)))))))

(defun install (prefix &optional environment)
  "Install to PREFIX; return what is printed."
  (let ((build (truename (directory-of sb-ext:*runtime-pathname* "../../../"))))
    (run-for-output "sh" (list (sb-ext:native-namestring (merge-pathnames "install.sh" *root*))
                               (format nil "--prefix=~A" prefix))
                    (cons (format nil "SBCL_BUILD=~A"
                                  (string-right-trim "/" (sb-ext:native-namestring build)))
                          environment))))

(defun installed-p (prefix file text)
  "Was a file installed that is called FILE below PREFIX, a wild name perhaps, and has TEXT in it?"
  (loop for path in (directory (concatenate 'string prefix file))
        thereis (search text (uiop:read-file-string path :external-format :latin-1))))

(defun check-installed (prefix)
  (is (search (lisp-implementation-version)
              (run-for-output (concatenate 'string prefix "bin/sbcl") '("--version"))))
  (is (installed-p prefix "share/doc/sbcl/README" "SBCL WITH FIBERS"))
  (is (installed-p prefix "share/doc/sbcl/NEWS.fibers" "native fibers"))
  (is (installed-p prefix "share/man/man1/sbcl.1" "fiber"))
  (dolist (system '("sb-fiber-http" "sb-fiber-hunchentoot" "sb-fiber-ssl"))
    (is (probe-file (format nil "~Alib/sbcl/systems/~A.asd" prefix system)))))

(defun manual-missing-p (output)
  (search "The manual was NOT installed" output))

(test install
  (with-scratch-directory (prefix)
    (let ((output (install prefix)))
      (check-installed prefix)
      (if (manual-missing-p output)
          (skip "There is no makeinfo.")
          (progn
            (is (installed-p prefix "share/info/sbcl.info*" "Function: make-fiber"))
            (is (installed-p prefix "share/doc/sbcl/sbcl.html" "index-make_002dfiber")))))))

;;; Prevents: no installation at all where there is no makeinfo, or one that does not say so.
(test install-without-makeinfo
  (with-scratch-directory (tools)
    (run-for-output "sh" (list "-c" "for file in /bin/* /usr/bin/*; do
                                       case ${file##*/} in
                                         makeinfo | texi2any | apt-get) ;;
                                         *) ln -sf \"$file\" \"$1\" ;;
                                       esac
                                     done"
                               "sh" tools))
    (with-scratch-directory (prefix)
      (is (manual-missing-p (install prefix (list (format nil "PATH=~A" tools)))))
      (check-installed prefix)
      (is (not (installed-p prefix "share/doc/sbcl/sbcl.html" "index"))))))
