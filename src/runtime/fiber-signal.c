/*
 * Signals to fibers: none is lost on a full stack, and masks go with the OS thread
 */

/*
 * This software is part of the SBCL system. See the README file for
 * more information.
 *
 * This software is derived from the CMU CL system, which was
 * written at Carnegie Mellon University and released into the
 * public domain. The software is in the public domain and is
 * provided with absolutely no warranty. See the COPYING and CREDITS
 * files for more information.
 */

#define _GNU_SOURCE
#include "genesis/sbcl.h"
#ifdef LISP_FEATURE_SB_FIBER

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "fiber-stack.h"
#include "globals.h"
#include "genesis/static-symbols.h"
#include "genesis/symbol.h"

/* Let the handler for interruptions run in a thread of this process, if it has not ended. The
 * thread is given by its number in the kernel: unlike pthread_kill() this may be used for a thread
 * that has ended, and takes no lock to keep it. If another thread has the number by then, that one
 * handles a signal that has no cause. */
void fiber_interrupt_os_thread(int tid)
{
    int saved_errno = errno;
    syscall(SYS_tgkill, getpid(), tid, SIGURG);
    errno = saved_errno;
}

/* Let this thread not handle the expiry of the timer of the process: another thread will. */
void fiber_block_timer_signal()
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &set, 0);
}

extern lispobj lisp_sig_handlers[];
static const int resent[] = { SIGURG, SIGALRM, SIGCHLD };
enum { N_RESENT = sizeof resent / sizeof resent[0] };

/* The handlers of SIGALRM and SIGCHLD take locks that all threads need. Cut off at the end of this
 * stack they would never give them back, so let another thread handle these, the main thread as a
 * rule. */
static void send_again(int signal)
{
    if (signal == SIGURG) pthread_kill(pthread_self(), signal);
    else kill(getpid(), signal);
}

/* A signal came when the stack had no room for its frame above a guard. The kernel has dropped
 * it and sends SIGSEGV instead; were it the signal that stops for the collector, the world
 * would wait for ever. Make room, and send all signals again that may have been lost: those that
 * come for nothing are harmless. A signal of which that is not true is never lost: see
 * fiber_route_signal(). */
bool fiber_handle_failed_delivery(siginfo_t* info, os_context_t* context)
{
    struct thread* th = get_sb_vm_thread();
    struct fiber_context* fc = th ? fiber_in_use(th, context) : 0;
    if (!fc || info->si_code != SI_KERNEL || !fiber_make_signal_room(th, fc, context)) return 0;
    if (th->stop_signal_sent) pthread_kill(pthread_self(), SIG_STOP_FOR_GC);
    for (int i = 0; i < N_RESENT; ++i) // a signal without a handler may end the process
        if (lisp_sig_handlers[resent[i]]
            && !sigismember(os_context_sigmask_addr(context), resent[i])) send_again(resent[i]);
    return 1;
}

/*
 * SIGTERM, SIGINT and others must neither be lost nor come for nothing. They come on the alternate
 * stack, which has room. But Lisp cannot run there. So the handler only notes them, and sends
 * SIGURG to its thread; the handler of SIGURG calls their own on the stack that was interrupted.
 * What runs there must not be unwound because the stack ends, so it gets room first.
 */
typedef void signal_handler(int, siginfo_t*, void*);
static signal_handler* handle_deferrable; // SBCL's, the same for all of them
static __thread uint32_t noted;           // a bit for each
static __thread siginfo_t noted_info[32];

static void note_signal(int signal, siginfo_t* info, void* context)
{
    fiber_make_handler_room(context);
    noted |= 1u << signal;
    noted_info[signal] = *info;
    pthread_kill(pthread_self(), SIGURG);
}

/* Handle one noted signal at a time: if it is deferred, the next may come only when that is over.
 * Signals are blocked. */
static void handle_noted(int signal, siginfo_t* info, void* context)
{
    if (!noted) {
        handle_deferrable(signal, info, context);
        return;
    }
    int first = __builtin_ctz(noted);
    noted &= ~(1u << first);
    siginfo_t its_info = noted_info[first]; // the handler may park, and go on in another thread
    pthread_kill(pthread_self(), SIGURG);   // for the next noted one, and for what sent this SIGURG
    handle_deferrable(first, &its_info, context);
}

/* SIGNAL has a handler of Lisp: change ACTION such that it is not lost for lack of room. */
void fiber_route_signal(int signal, struct sigaction* action)
{
    if (!sigismember(&deferrable_sigset, signal) || signal >= 32) return;
    handle_deferrable = action->sa_sigaction;
    if (signal == SIGURG) action->sa_sigaction = handle_noted;
    for (int i = 0; i < N_RESENT; ++i) if (signal == resent[i]) return;
    action->sa_sigaction = note_signal;
    action->sa_flags |= SA_ONSTACK;
}

/* Called by a thread of C that has called Lisp, with signals blocked. Its alternate stack is in
 * what is about to be another thread's memory, or no memory. */
void fiber_leave_alternate_stack()
{
    stack_t none = { .ss_flags = SS_DISABLE };
    sigaltstack(&none, 0);
}

/* The signal mask belongs to the OS thread, and while a handler runs it is the handler's. When a
 * fiber is about to park in one, put back the carrier's own. The outermost live context may not
 * tell: if a handler was deferred before that, it has signals blocked. If a handler is pending then
 * that is why signals are blocked, and the next stack with interrupts enabled runs it. */
int fiber_put_back_signal_mask()
{
    struct thread* th = get_sb_vm_thread();
    sigset_t old;
    thread_sigmask(SIG_BLOCK, &deferrable_sigset, &old); // none is deferred after this test
    if (interrupt_handler_pending_p()) return 0;
    thread_sigmask(SIG_SETMASK, &fiber_this_carrier()->signal_mask, 0);
    memcpy(&th->fiber_context->signal_mask, &old, sizeof th->fiber_context->signal_mask);
    return 1;
}

/* In a handler either signals are blocked and none is deferred, or they come. A signal that has
 * been deferred on this carrier, for which it has signals blocked, came to another stack: let it
 * come again, to be pending in the kernel or be deferred anew, according to the mask of the
 * handler. */
static void send_deferred_signal_again(struct thread* th)
{
    struct interrupt_data* data = &thread_interrupt_data(th);
    if (!data->pending_handler) return;
    data->pending_handler = 0;
    write_TLS(INTERRUPT_PENDING, NIL, th);
    pthread_kill(pthread_self(), data->pending_signal);
}

/* The fiber goes on in its handler. */
void fiber_restore_signal_mask()
{
    sigset_t mask;
    thread_sigmask(SIG_BLOCK, &deferrable_sigset, 0); // none is deferred behind our back
    send_deferred_signal_again(get_sb_vm_thread());
    sigemptyset(&mask);
    memcpy(&mask, &get_sb_vm_thread()->fiber_context->signal_mask, sizeof (lispobj));
    thread_sigmask(SIG_SETMASK, &mask, 0);
}

#endif
