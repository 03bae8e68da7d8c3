;;;; A library of C that takes a lock, calls back, allocates and sleeps

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "SB-FIBER-TESTS")

(load (merge-pathnames "files.lisp" *load-truename*))

;;; The lock tells when the thread that has it wants it again, or another gives it back. A thread
;;; that cannot get it in five seconds goes without it, and is counted.
(defparameter *library* "
#define _GNU_SOURCE
#include <alloca.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP;
static volatile int mistakes, calls, go, inside;

static int take(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_sec += 5;
    if (!pthread_mutex_timedlock(&lock, &t)) return inside = 1;
    __atomic_fetch_add(&mistakes, 1, __ATOMIC_SEQ_CST);
    return 0;
}

static void give_back(int taken)
{
    if (taken && pthread_mutex_unlock(&lock)) __atomic_fetch_add(&mistakes, 1, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&calls, 1, __ATOMIC_SEQ_CST);
}

/* How often the sleep was interrupted. */
static int sleep_for(long microseconds)
{
    struct timespec t = { microseconds / 1000000, microseconds % 1000000 * 1000 };
    int n = 0;
    while (nanosleep(&t, &t)) ++n;
    return n;
}

static void compute(int n) { for (volatile int i = 0; i < n; ++i) free(malloc(100 + i % 1000)); }

int foreign_sleep(long microseconds)
{
    int taken = take();
    int n = sleep_for(microseconds);
    give_back(taken);
    return n;
}

int foreign_compute(int n)
{
    int taken = take();
    compute(n);
    give_back(taken);
    return n;
}

int foreign_call(int (*function)(int), int argument)
{
    int taken = take();
    int result = function(argument);
    compute(10);
    give_back(taken);
    return result;
}

/* From the upper end on, as deeper and deeper calls would. */
static __attribute__((noinline)) void use_stack(int bytes)
{
    volatile char* p = alloca(bytes);
    for (int i = bytes - 1; i >= 0; i -= i < 256 ? i + 1 : 256) p[i] = 1;
}

/* Use some bytes of stack, and then call back below a frame of which nothing has been touched. */
int foreign_call_back(int (*function)(int), int argument, int used, int frame)
{
    use_stack(used);
    volatile char* p = alloca(frame);
    int result = function(argument);
    p[0] = 1;
    return result + 1;
}

void foreign_fill(volatile char* p, int bytes) { while (bytes > 0) p[--bytes] = 1; }

static void* call_in_thread(void* function)
{
    stack_t stack;
    ((int (*)(int))function)(1);
    return (void*)(long)(sigaltstack(0, &stack) || !(stack.ss_flags & SS_DISABLE));
}

/* Has a thread that has called Lisp, and returned, an alternate stack for signals still? */
int foreign_alternate_stack(int (*function)(int))
{
    pthread_t thread;
    void* result;
    if (pthread_create(&thread, 0, call_in_thread, function)) return -1;
    pthread_join(thread, &result);
    return (int)(long)result;
}

int foreign_wait(void)
{
    int taken = take();
    while (!go) sleep_for(1000);
    give_back(taken);
    return 1;
}

int foreign_use_stack(int bytes)
{
    int taken = take();
    use_stack(bytes);
    give_back(taken);
    return bytes;
}

int foreign_divide(int x, int y) { return x / y; }

void foreign_go(int how) { go = how; inside = 0; }
int foreign_inside(void) { return inside; }
int foreign_calls(void) { return calls; }
/* And whether the lock is taken. */
int foreign_mistakes(void)
{
    int n = mistakes;
    mistakes = 0;
    if (pthread_mutex_trylock(&lock)) return n + 1000000;
    pthread_mutex_unlock(&lock);
    return n;
}
")

(defun load-library ()
  (let* ((directory (make-temporary-directory))
         (source (concatenate 'string directory "/foreign.c"))
         (library (concatenate 'string directory "/foreign.so")))
    (unwind-protect
         (progn
           (with-open-file (out source :direction :output) (write-string *library* out))
           (sb-ext:run-program "/bin/sh"
                               (list "-c"
                                     (format nil "${CC:-cc} -O1 -shared -fPIC -pthread -o ~A ~A"
                                             library source))
                               :error *error-output*)
           (sb-alien:load-shared-object library :dont-save t))
      (sb-ext:delete-directory directory :recursive t))))

(load-library)

(macrolet ((def (lisp-name name result &rest arguments)
             `(sb-alien:define-alien-routine (,name ,lisp-name) ,result
                ,@(mapcar (lambda (argument) `(,(gensym) ,argument)) arguments))))
  (def foreign-sleep "foreign_sleep" sb-alien:int sb-alien:long)
  (def foreign-compute "foreign_compute" sb-alien:int sb-alien:int)
  (def foreign-wait "foreign_wait" sb-alien:int)
  (def foreign-use-stack "foreign_use_stack" sb-alien:int sb-alien:int)
  (def foreign-fill "foreign_fill" sb-alien:void sb-sys:system-area-pointer sb-alien:int)
  (def foreign-divide "foreign_divide" sb-alien:int sb-alien:int sb-alien:int)
  (def foreign-go "foreign_go" sb-alien:void sb-alien:int)
  (def foreign-inside "foreign_inside" sb-alien:int)
  (def foreign-calls "foreign_calls" sb-alien:int)
  (def foreign-mistakes "foreign_mistakes" sb-alien:int))

(defvar *called-back* #'identity)

(sb-alien:define-alien-callable call-back sb-alien:int ((argument sb-alien:int))
  (funcall *called-back* argument)
  argument)

(defun call-in-callback (function &optional (argument 1))
  "Have foreign code, which holds its lock, call FUNCTION with ARGUMENT. Return the values of that."
  (let* ((values nil)
         (*called-back* (lambda (argument)
                          (setf values (multiple-value-list (funcall function argument))))))
    (sb-alien:alien-funcall
     (sb-alien:extern-alien "foreign_call"
                            (function sb-alien:int sb-sys:system-area-pointer sb-alien:int))
     (sb-alien:alien-sap (sb-alien::alien-callable-function 'call-back)) argument)
    (values-list values)))

(defmacro no-mistakes (&body body)
  "Check that BODY leaves the foreign lock free, and that no thread asked for it while it had it."
  `(progn
     (foreign-go 0)
     (foreign-mistakes)
     (multiple-value-prog1 (progn ,@body)
       (is (= 0 (foreign-mistakes))))))
