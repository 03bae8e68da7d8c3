/*
 * Reserves of stacks: how they are opened, and closed again
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

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include "fiber-stack.h"
#include "globals.h"
#include "interr.h"
#include "os.h"

/*
 * What is true when nobody is inside: struct guards tells which steps are open. Lisp sees it as
 * the word context->guards, which is 0 if and only if nothing is open, notified or pending.
 *
 * A reserve is closed again when its stack has been unwound. That is found out by the *return
 * guard*, some pages of the control stack above what the handlers use, which are made
 * read-only: whatever writes there next, having returned to or beyond it, faults. It lies on
 * the control stack whichever stack overflowed, since the collector writes to binding
 * stacks and never to control stacks. If there is none (no mapping is left), the next park
 * closes the reserve.
 */

void fiber_open_steps(struct fiber_context* fc, int stack, int n)
{
    int open = guards_of(fc)->open[stack];
    if (n > n_steps(stack)) n = n_steps(stack);
    if (n <= open) return;
    if (fiber_lower_guard(steps_start(fc, stack, open, n), (n - open) * STEP_SIZE))
        lose("cannot open the reserve of a fiber's stack: %s", strerror(errno));
    guards_of(fc)->open[stack] = n;
}

/* The contents of the reserve are lost: nothing of them may be alive. */
static void close_reserve(struct fiber_context* fc, int stack)
{
    struct guards* g = guards_of(fc);
    if (g->open[stack] && fiber_raise_guard(steps_start(fc, stack, 0, g->open[stack]),
                                      g->open[stack] * STEP_SIZE)) return; // stays open
    g->open[stack] = 0;
    g->notified &= ~(1 << stack);
    if (stack == CONTROL) g->pending = g->reporting = g->cut_off = 0;
}

static bool anything_open(struct fiber_context* fc)
{
    struct guards* g = guards_of(fc);
    return g->open[CONTROL] || g->open[BINDING] || g->open[ALIEN];
}

/* Handlers that run below where the fiber was notified, or reports, need the reserve even if they
 * have not come to it: the control stack is exhausted when a signal finds no room any more. */
bool fiber_may_use_reserve(struct fiber_context* fc, char* sp)
{
    struct guards* g = guards_of(fc);
    return (g->notified & (1 << CONTROL) || g->reporting)
        && sp < (char*)fc->control_stack_start + g->notified_at;
}

static bool reserve_left(struct thread* th, struct fiber_context* fc, int stack, char* sp)
{
    return stack == CONTROL ? sp >= control_base(fc) && !fiber_may_use_reserve(fc, sp)
        : stack == BINDING ? (char*)th->binding_stack_pointer <= binding_end(fc)
        : (char*)th->alien_stack_pointer >= alien_base(fc);
}

uword_t fiber_return_guard_size(struct fiber_context* fc)
{
    uword_t room = context_page(fc) - (char*)fc->return_guard;
    return room < RETURN_GUARD_SIZE ? room : RETURN_GUARD_SIZE;
}

void fiber_drop_return_guard(struct fiber_context* fc)
{
    if (!fc->return_guard) return;
    mprotect((char*)fc->return_guard, fiber_return_guard_size(fc), PROT_READ|PROT_WRITE);
    fiber_give_return_guard_back();
    fc->return_guard = 0;
}

void fiber_set_return_guard(struct fiber_context* fc, char* page)
{
    fiber_drop_return_guard(fc);
    if (page >= context_page(fc) || !fiber_take_return_guard()) return;
    fc->return_guard = (lispobj)page;
    if (!mprotect(page, fiber_return_guard_size(fc), PROT_READ)) return;
    fc->return_guard = 0;
    fiber_give_return_guard_back();
}

/* Begin it with the first page that lies wholly above the word at SP, and outside of the reserve.
 * What writes to that word would fault for ever. */
void fiber_place_return_guard(struct fiber_context* fc, char* sp)
{
    fiber_set_return_guard(fc, sp < control_base(fc) ? control_base(fc)
                     : (char*)ALIGN_UP((uword_t)sp + 1, HARD_GUARD_SIZE));
}

static void forget_overflows(struct fiber_context* fc)
{
    struct guards* g = guards_of(fc);
    g->notified_at = g->lent_masked = g->lent = 0;
}

void fiber_close_all_reserves(struct fiber_context* fc)
{
    fiber_drop_return_guard(fc);
    for (int stack = 0; stack < N_STACKS; ++stack) close_reserve(fc, stack);
    forget_overflows(fc);
}

/* SP is where the fiber has returned to: close what it has left. Is something still open? In the
 * switch, TH has pointers into the side stacks of another. */
bool fiber_close_left(struct thread* th, struct fiber_context* fc, char* sp)
{
    for (int stack = 0; stack < N_STACKS; ++stack)
        if (fc == th->fiber_context && reserve_left(th, fc, stack, sp)) close_reserve(fc, stack);
    if (anything_open(fc)) return 1;
    fiber_drop_return_guard(fc);
    forget_overflows(fc);
    return 0;
}

void fiber_settle_reserves(struct thread* th, struct fiber_context* fc, char* sp)
{
    if (fiber_close_left(th, fc, sp) && (char*)fc->return_guard <= sp)
        fiber_place_return_guard(fc, sp);
}

/* Called by a fiber before it parks, if some reserve is open. What it calls itself lies below. */
void fiber_rearm_guards()
{
    struct thread* th = get_sb_vm_thread();
    char* lowest = (char*)__builtin_frame_address(0) - 4*KIB;
    sigset_t old;
    if (!th->fiber_context) return;
    block_blockable_signals(&old); // a fault of theirs would find counts that are not true yet
    fiber_settle_reserves(th, th->fiber_context, lowest);
    thread_sigmask(SIG_SETMASK, &old, 0);
}

/* Have just N steps of the control reserve open. Nothing of the others is alive. */
void fiber_limit_open_steps(struct fiber_context* fc, int n)
{
    int open = guards_of(fc)->open[CONTROL];
    if (n < open && !fiber_raise_guard(steps_start(fc, CONTROL, n, open), (open - n) * STEP_SIZE))
        guards_of(fc)->open[CONTROL] = n;
    fiber_open_steps(fc, CONTROL, n);
}

/* The scrubber clears dead words down to the guard; it must not touch a raised one. */
void fiber_scrub_limits(struct thread* th, os_vm_address_t* guard,
                        os_vm_address_t* hard_guard, unsigned* size)
{
    struct fiber_context* fc = th->fiber_context;
    if (!fc) return;
    *size = HARD_GUARD_SIZE;
    *hard_guard = (char*)fc->control_stack_start - HARD_GUARD_SIZE;
    *guard = steps_start(fc, CONTROL, 0, guards_of(fc)->open[CONTROL]) - HARD_GUARD_SIZE;
}

#endif
