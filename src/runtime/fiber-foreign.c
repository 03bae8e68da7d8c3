/*
 * Foreign code: what may interrupt it, and when
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

#include "genesis/sbcl.h"
#ifdef LISP_FEATURE_SB_FIBER

#include <pthread.h>
#include <signal.h>
#include "fiber.h"
#include "globals.h"
#include "arch.h"
#include "gc.h"
#include "interrupt.h"
#include "os.h"
#include "pseudo-atomic.h"
#include "validate.h"
#include "genesis/static-symbols.h"
#include "genesis/symbol.h"

/*
 * Foreign code may hold a lock wherever it is: malloc's, or one of OpenSSL's. If it is left by
 * unwinding, the lock is never given back. If Lisp runs on top of it and calls foreign code, or
 * parks so that the carrier runs another fiber, the same OS thread asks for the lock again, and
 * waits for itself. What is true in fibers, and in the threads of the pool:
 *
 *  - the handler of a deferrable signal does not run while frames of C that are to be kept lie on
 *    the stack. The signal is noted in thread->deferred_signals, and sent again when the call
 *    returns: the code that follows each call (emit-c-call) traps if that word is not 0;
 *  - a stack that ends in foreign code lends it the reserve, see fiber-overflow.c;
 *  - all frames of C are to be kept but those of calls in WITH-INTERRUPTIBLE-FOREIGN-CALLS. They
 *    are found by the program counter of what was interrupted, and of what each live handler
 *    has interrupted; below a callback, where program counters are Lisp's, by *FOREIGN-FRAMES*.
 *    That is bound before Lisp is entered and unbound after it has been left, both of it here: so
 *    there is no moment between, and what unwinds the callback unbinds it as well;
 *  - below a callback, and in a handler above foreign code, a fiber does not leave its carrier:
 *    see ZONE in code/fiber/zone.lisp.
 *
 * A call that has been unwound by its own callback does not return. What was noted meanwhile is
 * sent again after the next call.
 */

static uword_t foreign_frames(struct thread* th)
{
    return fixnum_value(read_TLS(FOREIGN_FRAMES, th));
}

static bool keeps_foreign_frames(struct thread* th)
{
    return th->fiber_context || foreign_frames(th) & KEEPS_FOREIGN_FRAMES;
}

/* The stubs through which C calls Lisp are vectors in static space, and there is no other code. */
static bool lisp_pc(os_context_t* context)
{
    uword_t pc = os_context_pc(context);
    return gc_managed_heap_space_p(pc) && !(STATIC_SPACE_START <= pc && pc < STATIC_SPACE_END);
}

static int n_live_contexts(struct thread* th)
{
    return fixnum_value(read_TLS(FREE_INTERRUPT_CONTEXT_INDEX, th));
}

/* LEVEL is how many handlers were live when CONTEXT was interrupted. */
static bool frame_to_keep(struct thread* th, os_context_t* context, int level)
{
    return !(foreign_frames(th) & INTERRUPTIBLE_FRAMES << level) && !lisp_pc(context);
}

static bool frames_to_keep(struct thread* th, os_context_t* context)
{
    int n = n_live_contexts(th);
    if (foreign_frames(th) & FRAMES_TO_KEEP || frame_to_keep(th, context, n)) return 1;
    while (n-- > 0)
        if (frame_to_keep(th, nth_interrupt_context(n, th), n)) return 1;
    return 0;
}

/* SIGNAL interrupts CONTEXT, where interrupts are enabled. Return false if its handler may run. */
bool fiber_defer_signal(struct thread* th, int signal, os_context_t* context)
{
    if (!keeps_foreign_frames(th) || !frames_to_keep(th, context)) return 0;
    th->deferred_signals |= (uword_t)1 << (signal - 1);
    return 1;
}

/* Was TH in foreign code that is to be kept when CONTEXT was interrupted? */
bool fiber_in_foreign_code(struct thread* th, os_context_t* context)
{
    return frame_to_keep(th, context, n_live_contexts(th));
}

/* A bit of deferred_signals that stands for none: the C library keeps the number to itself. */
#define TRAP_ALONE ((uword_t)1 << (32 - 1))

/* TH is in foreign code. Let the code that follows the call trap. */
void fiber_trap_after_call(struct thread* th) { th->deferred_signals |= TRAP_ALONE; }

/* Has it? Then it does again when the outer call returns, if there is one. */
bool fiber_trapped_after_call(struct thread* th)
{
    bool trapped = th->deferred_signals & TRAP_ALONE;
    if (!(foreign_frames(th) & FRAMES_TO_KEEP)) th->deferred_signals &= ~TRAP_ALONE;
    return trapped;
}

/* Called at a trap for pending interrupts, which may have come because a call has returned. Below a
 * callback the outer call has not returned yet. Signals are blocked, so that those that are sent
 * here arrive when the trap is over. */
void fiber_send_deferred_signals(struct thread* th)
{
    uword_t signals = th->deferred_signals & ~TRAP_ALONE;
    if (foreign_frames(th) & FRAMES_TO_KEEP) return;
    th->deferred_signals &= TRAP_ALONE;
    for (int i = 0; signals >> i; ++i)
        if (signals >> i & 1) pthread_kill(pthread_self(), i + 1);
}

/* Nothing can be handled in pseudo-atomic, nor where the collector is held off, and no other trap
 * for pending interrupts comes there. */
bool fiber_trap_to_ignore(struct thread* th)
{
    return th->deferred_signals
        && (read_TLS(GC_INHIBIT, th) != NIL || arch_pseudo_atomic_atomic(th));
}

extern void funcall_alien_callback(lispobj arg1, lispobj arg2, lispobj arg0, struct thread*);

void fiber_call_back(lispobj arg1, lispobj arg2, lispobj arg0, struct thread* th)
{
    bool keeps = keeps_foreign_frames(th);
    // What is called here is not interruptible because the call that calls back is.
    uword_t frames = foreign_frames(th) & (INTERRUPTIBLE_FRAMES - 1);
    if (keeps)
        bind_variable(FOREIGN_FRAMES, make_fixnum(frames | BELOW_CALLBACK | FRAMES_TO_KEEP), th);
    funcall_alien_callback(arg1, arg2, arg0, th);
    if (keeps) unbind(th);
}

/* Has a handler that is live interrupted foreign code? */
int fiber_above_foreign_code()
{
    struct thread* th = get_sb_vm_thread();
    for (int n = n_live_contexts(th); n-- > 0; )
        if (!lisp_pc(nth_interrupt_context(n, th))) return 1;
    return 0;
}

#endif
