;;;; What users can read of our packages: docstrings, and entries in the manual; without a scheduler

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(require :sb-introspect)
(require :sb-concurrency)

(in-package "SB-FIBER-TESTS")

(def-suite* docstrings)

(defparameter *manual*
  (uiop:read-file-lines (merge-pathnames "../../doc/manual/fibers.texinfo" *load-truename*)))

(defun external-symbols (package)
  (let ((symbols '()))
    (do-external-symbols (symbol package) (push symbol symbols))
    (sort symbols #'string<)))

;;; Not what upstream has in the same package
(defun defined-by-us-p (symbol)
  (loop for kind in '(:function :macro :structure :condition)
        thereis (loop for source in (sb-introspect:find-definition-sources-by-name symbol kind)
                      for path = (sb-introspect:definition-source-pathname source)
                      thereis (and path (member (pathname-name path)
                                                '("channel" "operation" "select"
                                                  "promise" "occasion")
                                                :test #'string-equal)))))

(defparameter *public*
  (append (external-symbols "SB-FIBER")
          (remove-if-not #'defined-by-us-p (external-symbols "SB-CONCURRENCY"))))

;;;; What kinds of things a symbol names, as upstream's docstrings.lisp sorts them

(defun deprecated-p (symbol)
  (sb-int:deprecated-thing-p 'variable symbol))

(defun variable-p (symbol)
  (member (sb-int:info :variable :kind symbol) '(:special :global :always-bound :macro)))

(defun kinds (symbol)
  "A list of conses: a second argument of DOCUMENTATION, and the start of the entry's file name."
  (let ((class (find-class symbol nil)))
    (append (when (fboundp symbol)
              `((function . ,(if (macro-function symbol) "macro" "fun"))))
            (when (variable-p symbol)
              '((variable . "var")))
            (when class
              `((type . ,(if (subtypep class 'condition) "condition" "struct")))))))

;;;; Whatever is missing

(defun undocumented (symbols)
  "Those of SYMBOLS that name nothing, or something without a docstring."
  (remove-if (lambda (symbol)
               (and (kinds symbol)
                    (loop for (kind) in (kinds symbol) always (documentation symbol kind))))
             symbols))

(defun part (keyword lambda-list)
  (loop for x in (rest (member keyword lambda-list))
        until (member x lambda-list-keywords)
        collect x))

(defun parameter-names (parameter)
  "The names in PARAMETER, which may be a lambda list of a macro, or a parameter with its default."
  (cond ((symbolp parameter) (list (symbol-name parameter)))
        ((member (first parameter) lambda-list-keywords)
         (mapcan #'parameter-names (rest parameter)))
        (t (parameter-names (first parameter)))))

(defun parameters (symbol)
  "The names of what SYMBOL requires, and may be given by position, by keyword and as a body."
  (let ((list (sb-introspect:function-lambda-list symbol)))
    (loop for parameter in (append (part '&required (cons '&required list))
                                   (part '&optional list)
                                   (part '&body list)
                                   (part '&key list))
          append (parameter-names parameter))))

(defun mentioned-p (word text)
  "Is WORD, as it is written, a word of TEXT?"
  (flet ((apart-p (position)
           (or (not (< -1 position (length text)))
               (not (or (alphanumericp (char text position))
                        (find (char text position) "-*:"))))))
    (loop for start = (search word text) then (search word text :start2 (1+ start))
          while start
          thereis (and (apart-p (1- start))
                       (or (apart-p (+ start (length word)))
                           ;; A colon may end a clause.
                           (eql #\: (char text (+ start (length word)))))))))

(defun unmentioned (symbols)
  "A list of those of SYMBOLS whose docstrings do not name all parameters, with these."
  (loop for symbol in symbols
        for names = (and (fboundp symbol)
                         (remove-if (lambda (name)
                                      (mentioned-p name (or (documentation symbol 'function) "")))
                                    (parameters symbol)))
        when names collect (cons symbol names)))

(defun entry-line (symbol prefix)
  "The line by which the manual includes the docstring of SYMBOL."
  (let ((name (string-downcase symbol)))
    (format nil "@include ~A-~(~A~)-~A.texinfo" prefix (package-name (symbol-package symbol))
            (if (char= (char name 0) #\*)
                (format nil "star-~A-star" (string-trim "*" name))
                name))))

(defun missing-entries (symbols lines)
  (loop for symbol in symbols
        append (loop for (nil . prefix) in (kinds symbol)
                     for entry = (entry-line symbol prefix)
                     unless (find entry lines :test #'string=)
                       collect entry)))

;;;; Tests

;;; Also prevents an internal function that has the name of something that is exported.
(test documented
  (is (member 'sb-concurrency:select *public*))
  (is (equal '() (undocumented *public*)))
  (is (not (fboundp 'fiber-stack-lost))))

(test parameters
  (is (equal '() (unmentioned *public*))))

(test entries
  (let ((symbols (remove-if #'deprecated-p *public*)))
    (is (equal '() (missing-entries symbols *manual*)))
    ;; An entry twice is an anchor twice.
    (let ((includes (remove-if-not (lambda (line) (eql 0 (search "@include " line))) *manual*)))
      (is (equal includes (remove-duplicates includes :test #'string=)))
      (is (equal '() (set-difference includes
                                     (loop for symbol in symbols
                                           append (loop for (nil . prefix) in (kinds symbol)
                                                        collect (entry-line symbol prefix)))
                                     :test #'string=))))))

;;; The tests above see what is missing.
(defun nothing-said (first &optional second &key third) (list first second third))
(defun half-said (first &key second third)
  "FIRST is mentioned, SECOND-RATE things and :THIRD are others."
  (list first second third))
(defvar *nothing-said*)

(test what-is-missing-is-seen
  (is (equal '(nothing-said *nothing-said* names-nothing)
             (undocumented '(nothing-said half-said *nothing-said* names-nothing))))
  (is (equal '((nothing-said "FIRST" "SECOND" "THIRD") (half-said "SECOND" "THIRD"))
             (unmentioned '(nothing-said half-said))))
  (is (equal '("@include fun-sb-fiber-make-fiber.texinfo")
             (missing-entries '(make-fiber fiber-name)
                              (remove "@include fun-sb-fiber-make-fiber.texinfo" *manual*
                                      :test #'string=))))
  (is (equal '("@include struct-sb-fiber-fiber-group.texinfo"
               "@include var-sb-fiber-star-stuck-carrier-time-star.texinfo")
             (missing-entries '(fiber-group *stuck-carrier-time*)
                              '("@include fun-sb-fiber-fiber-group.texinfo")))))
