;;;; What is not run in fibers, and why

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is in the public domain and is provided with
;;;; absolutely no warranty. See the COPYING and CREDITS files for
;;;; more information.

(in-package "IN-FIBERS")

;;; A suite; a test or some; modes, or T for all; the reason.
(setf *exclusions*
      '(("cffi" "BUG-1395242" ("body-1" "body-16" "all-1" "all-2")
         "It calls the C compiler 24 times; twice will do.")
        ("bordeaux-threads" "CONDITION-VARIABLE" t
         "It wakes any waiter, not one that can go on: on a busy machine it hangs in threads.")
        ("usocket" "TIMEOUT-ERROR.1" t
         "A timer of no time races with a connection that is refused at once.")

        ;; What a fiber is not
        ("threads.impure" "(THREADS TRIVIA)" t
         "Fibers are in LIST-ALL-FIBERS, not in LIST-ALL-THREADS.")
        ("threads.impure" "(THREADS MORE-TRIVIA)" ("all-1" "all-2" "all-16")
         "Fibers are neither in LIST-ALL-THREADS nor in SB-THREAD::*ALL-THREADS*.")
        ("threads.pure" "OS-THREAD-NAME" t
         "A fiber has no directory in /proc/self/task, and other threads end while it lists it.")
        ("threads-2.impure" "FP-MODE-INHERITANCE-THREADS" ("all-1" "all-2" "all-16")
         "A fiber begins with the floating point modes of its carrier, not of its maker.")
        ("threads.impure"
         ("(INTERRUPT-THREAD DEFERRABLES-BLOCKED)" "(INTERRUPT-THREAD NLX)") t
         "It asks for the signal mask of a handler; a fiber is interrupted without a signal.")
        ("threads-2.impure" "(INTERRUPT-THREAD INTERRUPT-FOREIGN-LOOP)" t
         "It interrupts foreign code that never returns; that of a fiber is not interrupted.")
        ("timer.impure"
         ("(TIMER DEFERRABLES-BLOCKED)" "(TIMER DEFERRABLES-UNBLOCKED UNWIND)") t
         "It asks for the signal mask of a handler; a fiber is interrupted without a signal.")

        ("threads.pure" ("SYMBOL-VALUE-IN-THREAD.2" "SYMBOL-VALUE-IN-THREAD.3") t
         "It looks at a binding of a thread that runs; of a fiber that must be parked.")))
