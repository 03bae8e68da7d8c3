;;;; The explorer of orders itself: that it tries each once, and has read whatever takes steps

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "support/histories.lisp" *load-truename*))

(def-suite* interleaving)

;;;; the explorer itself

(defun count-orders (history &rest options)
  (values (apply #'explore history options)))

(test orders-are-counted-once
  (flet ((write-thrice (address)
           (loop repeat 3 do (write-word address 1)))
         (read-thrice (address)
           (loop repeat 3 do (read-word address))))
    (is (= 20 (count-orders (history () (("a" (write-thrice 0)) ("b" (write-thrice 0)))))))
    (is (= 1 (count-orders (history () (("a" (write-thrice 0)) ("b" (write-thrice 1)))))))
    (is (= 1 (count-orders (history () (("a" (read-thrice 0)) ("b" (read-thrice 0)))))))
    (is (= 4 (count-orders (history () (("a" (read-thrice 0)) ("b" (write-word 0 1)))))))
    (is (= 2 (count-orders (history () (("a" (write-thrice 0)) ("b" (write-thrice 0))))
                           :switches 0)))))

(defun results-of-all-orders (first second &rest options)
  (let ((all '()))
    (apply #'explore
           (history ((a nil) (b nil))
               (("a" (setf a (funcall first)))
                ("b" (setf b (funcall second))))
             (pushnew (list a b) all :test #'equal)
             nil)
           options)
    all))

(test orders-under-a-lock-do-not-count
  (flet ((write-thrice (bucket)
           (steps::with-tiny-lock ((steps::bucket-lock bucket))
             (loop repeat 3 do (write-word 0 1)))))
    (is (= 2 (count-orders (history ((bucket (sb-fiber::make-bucket)))
                               (("a" (write-thrice bucket)) ("b" (write-thrice bucket)))))))
    (is (= 4 (count-orders (history ((bucket (sb-fiber::make-bucket)))
                               (("a" (write-thrice bucket)) ("b" (write-word 0 1)))))))
    ;; Each has a lock of its own, which is no use.
    (is (= 20 (count-orders (history ()
                                (("a" (write-thrice (sb-fiber::make-bucket)))
                                 ("b" (write-thrice (sb-fiber::make-bucket))))))))))

;;; What Intel's and AMD's manuals promise: a read may be early, all else is in order.
(test store-buffers
  (flet ((both-read (&rest options)
           (apply #'results-of-all-orders
                  (lambda () (write-word 0 1) (read-word 1))
                  (lambda () (write-word 1 1) (read-word 0))
                  options))
         (pass-message (&rest options)
           (apply #'results-of-all-orders
                  (lambda () (write-word 0 1) (write-word 1 1))
                  (lambda () (list (read-word 1) (read-word 0)))
                  options)))
    (is (not (member '(0 0) (both-read) :test #'equal)))
    (is (member '(0 0) (both-read :store-buffers t) :test #'equal))
    (is (not (member '(1 (1 0)) (pass-message :store-buffers t) :test #'equal)))))

;;;; the source

(test all-that-is-called-is-read
  (is (null (missing-definitions))))

;;; Prevents: planted bugs that every history notices, since they do not compile.
(test planted-bugs-compile
  (flet ((plant (old new)
           (call-with-changes (constantly t) (list (list "RUN-QUEUE-LENGTH" old new)))))
    (is-true (plant "(run-queue-tail queue)" "(run-queue-head queue)"))
    (signals error (plant "(run-queue-tail queue)" "(run-queue-tail no-such-variable)"))
    (signals error (plant "(run-queue-tail queue)" "(run-queue-tail)"))
    (signals error (plant "(no-such-function queue)" "0"))))
