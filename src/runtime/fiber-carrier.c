/*
 * Carriers: the context of a thread's own stack, while it runs fibers
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
#include <stdlib.h>
#include <string.h>
#include "fiber-stack.h"
#include "globals.h"
#include "interr.h"
#include "interrupt.h"

/*
 * What is true when nobody is inside: a thread is a carrier if and only if its carrier_context is
 * not 0, and then that is the first member of a struct fiber_carrier. To the collector its stack is
 * always active: the switch finds it in that state, and leaves it.
 */

struct fiber_carrier* fiber_this_carrier()
{
    return (struct fiber_carrier*)get_sb_vm_thread()->carrier_context;
}

/* Called by the thread that starts the carrier, and can signal that there is no memory: then 0. */
struct fiber_carrier* fiber_carrier_make()
{
    struct fiber_carrier* c = aligned_alloc(16, ALIGN_UP(sizeof *c, 16));
    if (c) memset(c, 0, sizeof *c);
    return c;
}

/* The context is the carrier's own, kept while the thread is a carrier. */
void fiber_carrier_begin(struct fiber_carrier* c)
{
    struct thread* th = get_sb_vm_thread();
    struct fiber_context* fc = &c->context;
    fc->control_stack_start = th->control_stack_start;
    fc->control_stack_end = th->control_stack_end;
    fc->binding_stack_start = th->binding_stack_start;
    fc->alien_stack_start = th->alien_stack_start;
    fc->mutex_owner_id = th->mutex_owner_id;
    fc->mxcsr = fiber_floating_point_modes();
    fc->state_cell = &c->state;
    c->state = FIBER_STACK_ACTIVE;
    th->carrier_context = fc;
}

/* Note which signals this carrier has blocked while no handler runs, and none is deferred, which
 * may be the case now: of those that can be, the timer's, which is for other threads. */
void fiber_carrier_note_mask()
{
    sigset_t* mask = &fiber_this_carrier()->signal_mask;
    pthread_sigmask(SIG_SETMASK, 0, mask);
    for (int signal = 1; signal < NSIG; ++signal)
        if (sigismember(&deferrable_sigset, signal)) sigdelset(mask, signal);
    sigaddset(mask, SIGALRM);
}

void fiber_carrier_end()
{
    struct thread* th = get_sb_vm_thread();
    struct fiber_carrier* c = fiber_this_carrier();
    if (th->fiber_context) lose("a carrier ends while a fiber is mounted");
    th->carrier_context = 0;
    free(c);
}

#endif
