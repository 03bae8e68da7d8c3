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

(test heap
  (is (= (* 8 1024 1024 1024) (sb-ext:dynamic-space-size))))

(test contribs
  (dolist (module '("SB-BSD-SOCKETS" "SB-POSIX" "SB-CONCURRENCY" "SB-SPROF"))
    (finishes (require module))))
