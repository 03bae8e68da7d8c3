;;;; What a build of the fork promises about itself

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(def-suite* build)

(test version
  (let ((version (lisp-implementation-version)))
    (is (eql (search ".fibers" version) (- (length version) (length ".fibers")))
        "The version is ~S" version)))

(test feature
  (is (member :sb-fiber *features*))
  (is (find-package "SB-FIBER"))
  ;; A fasl is not for a build with other mutexes than those it was made for.
  (is (search "SB-FIBER" (sb-fasl::compute-features-affecting-fasl-format))))

;;; Prevents: patches that are not tried where nothing has been built, so that a release seems to take them all.
(defun directory-of (file relative)
  (merge-pathnames relative (make-pathname :name nil :type nil :version nil :defaults file)))

(defparameter *root* (directory-of *load-truename* "../../"))

(test patches-apply-without-a-build
  (let ((n (loop for directory in '("src/" "contrib/" "doc/" "tests/" "tools-for-build/")
                 sum (length (directory (merge-pathnames (format nil "~A**/*.patch" directory) *root*)))))
        (upstream (directory-of sb-ext:*runtime-pathname* "../../../upstream/")))
    (is (search (format nil "~D patches apply, 0 files" n)
                (with-output-to-string (out)
                  (sb-ext:run-program "sh" (list (sb-ext:native-namestring
                                                  (merge-pathnames "tools-for-build/try-patches.sh" *root*))
                                                 (sb-ext:native-namestring (truename upstream)))
                                      :search t :output out :error out
                                      :environment (cons "SBCL_BUILD=/nonexistent"
                                                         (sb-ext:posix-environ))))))))

(test heap
  (is (= (* 8 1024 1024 1024) (sb-ext:dynamic-space-size))))

(test contribs
  (dolist (module '("SB-BSD-SOCKETS" "SB-POSIX" "SB-CONCURRENCY" "SB-SPROF"))
    (finishes (require module))))
