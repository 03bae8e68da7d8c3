;;;; Stacks that end in foreign code, which holds a lock

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/foreign-library.lisp" *load-truename*))
(load (merge-pathnames "support/stack-ends.lisp" *load-truename*))

(def-suite* foreign-ends)

(defun reserve ()
  "Whether the reserve of the control stack is open. If not, this is what exhausts the stack."
  (handler-case (progn (setf (sb-sys:sap-ref-8 (sb-sys:int-sap (1- (control-base))) 0) 0) :open)
    (sb-kernel::control-stack-exhausted () :closed)))

;;;; Calls

;;; Prevents: a lock that is never given back, malloc's for instance.
(test stacks-that-end-in-foreign-code
  (dolist (bytes '(1000 20000 150000))
    (let ((calls (foreign-calls)) (begun 0) (overflows 0))
      (no-mistakes
        (with-group (group 1)
          (loop for distance from 5000 downto 0 by 83
                do (unless (eq :returned
                               (join (spawn (group)
                                       (handler-case
                                           (call-at-distance distance
                                                             (lambda ()
                                                               (incf begun)
                                                               (foreign-use-stack bytes)
                                                               :returned))
                                         (storage-condition () :overflow)))))
                     (incf overflows)))))
      (is (= begun (- (foreign-calls) calls)))
      (is (plusp overflows)))))

;;; Prevents: a reserve that stays open, and is missing when the stack overflows; an exhaustion that
;;; is signalled though there is enough left of the stack.
(test calls-that-need-more-than-the-stack
  (no-mistakes
    (is (equal '(20 :closed :unwound)
               (in-fiber ()
                 (let ((returned 0))
                   (call-at-distance 30000
                                     (lambda ()
                                       (loop repeat 20
                                             do (foreign-use-stack 100000)
                                                (incf returned))))
                   (list returned (reserve)
                         (handler-case (recurse-with-frames 10)
                           (sb-kernel::control-stack-exhausted () :unwound)))))))))

;;; Prevents: handlers that must not call what they could have called before.
(test calls-of-handlers
  (no-mistakes
    (is (equal '((1000 30000 90000) :unwound)
               (in-fiber ()
                 (let ((values '()))
                   (handler-case
                       (handler-bind ((storage-condition
                                        (lambda (c) (declare (ignore c))
                                          (setf values (mapcar #'foreign-use-stack
                                                               '(1000 30000 90000))))))
                         (let ((*depth* 0)) (recurse)))
                     (sb-kernel::control-stack-exhausted () (list values :unwound)))))))))

(defun recurse-with-foreign-calls (bytes)
  (foreign-use-stack bytes)
  (+ (recurse-with-foreign-calls bytes) (keep)))

;;; Prevents: a fiber that uses up what its handlers would need, since foreign code is always the
;;; first to come to the end, and then ends without being unwound.
(test recursion-with-foreign-calls
  (on-carriers (n)
    (dolist (bytes '(100 3000 15000 30000))
      (no-mistakes
        (is (eq :unwound
                (in-fiber (n)
                  (handler-case (sb-sys:without-interrupts (recurse-with-foreign-calls bytes))
                    (sb-kernel::control-stack-exhausted () :unwound)))))
        (is (equal '(:unwound :unwound)
                   (in-fiber (n)
                     (loop repeat 2
                           collect (handler-case (recurse-with-foreign-calls bytes)
                                     (sb-kernel::control-stack-exhausted () :unwound))))))))))

;;;; The alien stack

(macrolet ((define (name bytes)
             `(defun ,name ()
                (sb-alien:with-alien ((array (array sb-alien:char ,bytes)))
                  (foreign-fill (sb-alien:alien-sap array) ,bytes)
                  (+ (,name) (sb-alien:deref array 0))))))
  (define recurse-with-filled-aliens 3000)
  (define recurse-with-large-filled-aliens 20000))

;;; Prevents: a reserve that stays open, since the frames of the recursion lie above the return
;;; guard, and is missing when the stack ends again.
(test alien-stacks-that-end-in-foreign-code
  (dolist (recurse (list #'recurse-with-filled-aliens #'recurse-with-large-filled-aliens))
    (is (equal '(:unwound :unwound :unwound)
               (in-fiber ()
                 (loop repeat 3
                       collect (handler-case (funcall recurse)
                                 (sb-kernel::alien-stack-exhausted () :unwound))))))))

;;;; Callbacks

(defun call-back-from-foreign-code (used frame)
  (sb-alien:alien-funcall
   (sb-alien:extern-alien "foreign_call_back"
                          (function sb-alien:int sb-sys:system-area-pointer sb-alien:int
                                    sb-alien:int sb-alien:int))
   (sb-alien:alien-sap (sb-alien::alien-callable-function 'call-back)) 1 used frame))

;;; What binds for a callback is foreign code. The number of other bindings decides who comes to the
;;; end first.
(defun recurse-with-callbacks (bindings bytes)
  (labels ((recurse (argument)
             (declare (ignore argument))
             (progv (subseq *symbols* 0 bindings) '(1)
               (call-back-from-foreign-code 0 bytes))))
    (let ((*called-back* #'recurse)) (recurse 1))))

(test recursion-with-bindings-for-callbacks
  (loop for n from 20 to 40
        do (is (eq :unwound
                   (in-fiber ()
                     (handler-case (recurse-with-callbacks n 0)
                       (sb-kernel::binding-stack-exhausted () :unwound)))))))

;;; Prevents: foreign code that is given step after step of the reserve, and comes to its end.
(test recursion-with-frames-for-callbacks
  (loop for bytes from 1000 to 40000 by 1111
        do (is (equal '(:unwound :unwound)
                      (in-fiber ()
                        (loop repeat 2
                              collect (handler-case (recurse-with-callbacks 0 bytes)
                                        (sb-kernel::control-stack-exhausted () :unwound)))))
               "With frames of ~D bytes" bytes)))

;;; Prevents: a reserve that stays open when the call does not return.
(test callbacks-of-calls-that-have-needed-more-than-the-stack
  (is (equal '(:closed :out :closed)
             (in-fiber ()
               (let* ((reserve nil)
                      (*called-back* (lambda (argument) (declare (ignore argument))
                                       (setf reserve (reserve))
                                       (throw 'out :out)))
                      (value (call-at-distance
                              40000
                              (lambda () (catch 'out (call-back-from-foreign-code 60000 0))))))
                 (list reserve value (reserve)))))))

(defun recurse-with-small-calls ()
  (foreign-inside)
  (+ (recurse-with-small-calls) (keep)))

;;; Each call below such a callback traps when it returns. Prevents: the end of the process.
(test recursion-below-callbacks-of-such-calls
  (dolist (used '(0 60000))
    (dolist (recurse (list #'recurse-with-small-calls
                           (lambda () (sb-sys:without-interrupts (recurse-with-small-calls)))))
      (is (eq :unwound
              (in-fiber ()
                (let* ((result nil)
                       (*called-back* (lambda (argument) (declare (ignore argument))
                                        (setf result (handler-case (funcall recurse)
                                                       (storage-condition () :unwound))))))
                  (call-at-distance 40000 (lambda () (call-back-from-foreign-code used 0)))
                  result)))))))

;;; Prevents: a fiber that is told of the end of its stack since another has left such a call.
(test a-call-after-another-fiber-has-left-one
  (with-group (group 1)
    (join (spawn (group)
            (let ((*called-back* (lambda (argument) (declare (ignore argument)) (throw 'out nil))))
              (call-at-distance 40000
                                (lambda () (catch 'out (call-back-from-foreign-code 60000 0)))))))
    (is (eq :returned (join (spawn (group)
                              (call-at-distance 12000 (lambda () (foreign-inside) :returned))))))))
