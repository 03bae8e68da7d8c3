/*
 * Overflow of the stacks of fibers: which fiber is notified, when, and with how much room
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
#include "fiber-stack.h"
#include "globals.h"
#include "arch.h"
#include "gc.h"
#include "interr.h"
#include "lispregs.h"
#include "os.h"
#include "pseudo-atomic.h"
#include "validate.h"
#include "genesis/static-symbols.h"
#include "genesis/symbol.h"

/*
 * What is true when nobody is inside:
 *  - execution is diverted to Lisp only where Lisp could have been interrupted anyway, see
 *    in_critical_section(), and not out of foreign code, but for the end of a fiber that has no
 *    stack left;
 *  - what foreign code opens of a reserve is lent: it is closed again, or the fiber notified, when
 *    the call returns or Lisp is called back, see settle_lent();
 *  - a fiber that reports a failure has as much room as a handler of an exhaustion, and is notified
 *    if that is used up, whatever it was notified of before, see fiber_make_room_to_report().
 */

// A control stack that overflowed silently counts as exhausted when it is as near to its end.
#define NEAR_THE_END (16*KIB)

/* How many steps are for handling the exhaustion. The last quarter is never among them: it is for a
 * collection (which needs 26 KiB) or an allocation that comes when they are used up. */
static int handler_steps(int stack) { return stack == CONTROL ? 4 : 1; }
static int most_steps(int stack) { return n_steps(stack) - n_steps(stack) / 4; }

/*
 * Faults. They are handled on the alternate signal stack, so that the fiber's own may be full to
 * the last word.
 */

static char* context_sp(os_context_t* context)
{
    return (char*)*os_context_register_addr(context, reg_SP);
}

/* How many steps of the control stack's reserve a frame at SP lies in. */
static int steps_used(struct fiber_context* fc, char* sp)
{
    char* base = control_base(fc);
    return sp < base ? (base - sp - 1) / STEP_SIZE + 1 : 0;
}

/* The context of the fiber that TH executes. The switch changes RSP some instructions before
 * th->fiber_context, and then a signal may come for which the stack has no room. */
struct fiber_context* fiber_in_use(struct thread* th, os_context_t* context)
{
    char* sp = context_sp(context);
    struct fiber_context *fc = th->fiber_context, *other;
    if (!arch_pseudo_atomic_atomic(th)
        || (fc && within(sp, (char*)fc->control_stack_start,
                         (char*)fc - (char*)fc->control_stack_start)))
        return fc;
    return (other = fiber_context_at(sp)) ? other : fc;
}

/* If there is much of the control stack left, it was another stack that overflowed. Let the return
 * guard end with the page that SP is in, and continue below it: if the fiber comes again, it meets
 * the guard before it has come as far, the first frames included. */
static char* skip_return_guard(struct fiber_context* fc, char* sp)
{
    char* guard = (char*)fc->return_guard;
    if (guard && within(sp, guard, RETURN_GUARD_SIZE)) return guard; // it was met just now
    char* page = (char*)ALIGN_DOWN((uword_t)sp, HARD_GUARD_SIZE);
    if (page != context_page(fc)) page += HARD_GUARD_SIZE;
    page -= RETURN_GUARD_SIZE;
    if (page < control_base(fc) + SIGNAL_ROOM) { fiber_place_return_guard(fc, sp); return sp; }
    fiber_set_return_guard(fc, page);
    return page;
}

/* The return guard must be far above: the next frames are those of C functions, where the
 * kernel may be about to write, which for it is no fault but an EFAULT. */
static void open_silently(struct thread* th, struct fiber_context* fc, int stack, int n, char* sp)
{
    fiber_open_steps(fc, stack, n);
    if (stack == CONTROL) {
        guards_of(fc)->pending = 1;
        fiber_trap_after_call(th);
    }
    if (!fc->return_guard)
        fiber_place_return_guard(fc, (sp < control_base(fc) ? control_base(fc) : sp) + SIGNAL_ROOM);
}

/* Called by a fiber when nothing has handled an error, which may be that a stack is exhausted. The
 * report of it then runs on top of what has used up the stack, and may be without end. If using up
 * the reserve in it were the end of the fiber, no cleanup form would run. All frames are above
 * SP. */
static void make_room_to_report(struct thread* th, struct fiber_context* fc, char* sp)
{
    struct guards* g = guards_of(fc);
    char* base = control_base(fc);
    fiber_close_left(th, fc, sp);
    g->notified = 0;
    sword_t missing = base + handler_steps(CONTROL) * STEP_SIZE - sp;
    if (missing <= 0) return;
    int n = (missing + STEP_SIZE - 1) / STEP_SIZE, most = most_steps(CONTROL);
    // A signal may have opened more than most.
    int used = steps_used(fc, sp);
    if (n > most) n = most;
    fiber_limit_open_steps(fc, n > used ? n : used);
    g->pending = 0;
    g->reporting = 1;
    char* top = (sp < base ? base : sp) + SIGNAL_ROOM;
    g->notified_at = top - (char*)fc->control_stack_start;
    fiber_place_return_guard(fc, top);
}

void fiber_make_room_to_report()
{
    struct thread* th = get_sb_vm_thread();
    sigset_t old;
    block_blockable_signals(&old); // a fault of theirs would find counts that are not true yet
    make_room_to_report(th, th->fiber_context, (char*)__builtin_frame_address(0) - 4*KIB);
    thread_sigmask(SIG_SETMASK, &old, 0);
}

/* For Lisp, which must not look into such a frame. */
int fiber_frame_cut_off() { return guards_of(get_sb_vm_thread()->fiber_context)->cut_off; }

/* Where execution must not be diverted to Lisp, since what was interrupted would never go on:
 *  - the collector, and Lisp code that holds it off, SUB-GC above all;
 *  - an allocation, and the moment between its end and the trap that it ends with;
 *  - a thread that has been asked to collect or to stop for that, until it has done so;
 *  - a signal handler in C, which has all signals blocked and a signal to take care of. */
static bool in_critical_section(struct thread* th, os_context_t* context)
{
    return gc_active_p || th->pseudo_atomic_bits
        || read_TLS(GC_INHIBIT, th) != NIL
        || read_TLS(GC_PENDING, th) != NIL || read_TLS(STOP_FOR_GC_PENDING, th) != NIL
        || sigismember(os_context_sigmask_addr(context), SIG_STOP_FOR_GC);
}

/* Have the end of the pseudo-atomic section trap, to notify the fiber then; but only for the
 * section itself. A handler that interrupted it has a mask that is not the section's, and if
 * the collector is held off the trap has no right to come. */
static void postpone(struct thread* th, os_context_t* context)
{
    if (!arch_pseudo_atomic_atomic(th) || gc_active_p || read_TLS(GC_INHIBIT, th) != NIL
        || sigismember(os_context_sigmask_addr(context), SIG_STOP_FOR_GC)) return;
    arch_set_pseudo_atomic_interrupted(th);
    // A handler that ran between the end of the section and its trap would begin another
    // section and so wipe out that this one was interrupted.
    maybe_save_gc_mask_and_block_deferrables(context);
}

extern void unblock_signals_in_context_and_maybe_warn(os_context_t*);

/* If this runs on the fiber's stack, in the trap that ends a pseudo-atomic section: begin below
 * this frame. Right below what was interrupted lies the frame from which the kernel restores it. */
static void divert(os_context_t* context, lispobj function)
{
    char *sp = context_sp(context), *here = __builtin_frame_address(0);
    if (here < sp && here > sp - SIGNAL_ROOM)
        *os_context_register_addr(context, reg_SP) =
            (os_context_register_t)ALIGN_DOWN((uword_t)here - KIB, 16);
    // A handler that has them blocked unblocks them when it is left, whether one is deferred by
    // then or not: none must be.
    if (read_TLS(INTERRUPTS_ENABLED, get_sb_vm_thread()) != NIL)
        unblock_signals_in_context_and_maybe_warn(context);
    arrange_return_to_lisp_function(context, function);
}

/* There is no stack to run cleanups on: cut the fiber back to its base, where Lisp ends it.
 * The frames that are overwritten by doing so are among those given up. Reserves stay open
 * until the stack is free, since bindings are still to be undone. */
static void end_fiber(struct thread* th, struct fiber_context* fc, os_context_t* context)
{
    if (in_critical_section(th, context) || !fc->base_catch_block)
        lose("stack of a fiber exhausted in a critical section");
    fiber_drop_return_guard(fc);
    *os_context_register_addr(context, reg_SP) =
        (os_context_register_t)(control_base(fc) + SIGNAL_ROOM);
    write_TLS(FREE_INTERRUPT_CONTEXT_INDEX, 0, th); // they lie where new frames will
    // The binding that ran into the hard guard was not made; undoing it would fault again.
    lispobj* end = (lispobj*)(binding_end(fc) + SIDE_RESERVE_SIZE);
    if (th->binding_stack_pointer > end) th->binding_stack_pointer = end;
    th->current_catch_block = fc->base_catch_block;
    th->current_unwind_protect_block = 0;
    unblock_signals_in_context_and_maybe_warn(context); // no handler does
    divert(context, StaticSymbolFunction(LOSE_STACK));
}

/* A fiber at SP is notified of a side stack's end and has no room for that: of the control stack's
 * as well. */
static void make_control_room(struct fiber_context* fc, char* sp)
{
    struct guards* g = guards_of(fc);
    int room = g->open[CONTROL] + handler_steps(CONTROL), most = most_steps(CONTROL);
    if (sp >= steps_start(fc, CONTROL, 0, g->open[CONTROL]) + KIB || g->open[CONTROL] >= most)
        return;
    fiber_open_steps(fc, CONTROL, room < most ? room : most);
    g->notified |= 1 << CONTROL;
    g->cut_off = 1;
}

/* A recursion that has used up a side stack in few frames lies above the return guard, and does not
 * meet it when it comes again: see after each call whether the reserve was left. Where the control
 * stack's is open as well a trap would take room from handlers. */
static void trap_until_left(struct thread* th, struct fiber_context* fc)
{
    struct guards* g = guards_of(fc);
    if (!g->open[CONTROL] && (g->open[BINDING] || g->open[ALIEN])) fiber_trap_after_call(th);
}

/* Signal that a stack is exhausted, with room for the handlers. If it is the handlers that have
 * used that up, or nothing is left, end the fiber. Handlers run below where the fiber was notified:
 * if it is above that, it has left them without meeting the return guard. */
static void notify(struct thread* th, struct fiber_context* fc, os_context_t* context,
                 int stack, int step)
{
    struct guards* g = guards_of(fc);
    char *sp = context_sp(context), *start = (char*)fc->control_stack_start;
    int room = step + handler_steps(stack), most = most_steps(stack);
    bool again = (g->notified & (1 << stack)) && sp < start + g->notified_at;
    if (!again) fiber_open_steps(fc, stack, room < most ? room : most);
    if (!again && stack != CONTROL) make_control_room(fc, sp);
    char* end = steps_start(fc, CONTROL, 0, g->open[CONTROL]);
    // SP may have been moved beyond the stack for a large object. Nothing is in this step yet.
    if (stack == CONTROL && sp < end + KIB) sp = steps_start(fc, CONTROL, 0, step);
    if (again || sp < end + KIB) {
        fiber_open_steps(fc, stack, step + 1);
        end_fiber(th, fc, context);
        return;
    }
    if (stack == CONTROL) {
        g->pending = 0;
        g->cut_off = 1;
    }
    sp = skip_return_guard(fc, sp);
    *os_context_register_addr(context, reg_SP) = (os_context_register_t)sp;
    g->notified |= 1 << stack;
    g->reporting = 0;
    g->notified_at = sp - start;
    trap_until_left(th, fc);
    divert(context, stack == CONTROL ? StaticSymbolFunction(CONTROL_STACK_EXHAUSTED_ERROR)
           : stack == BINDING ? StaticSymbolFunction(BINDING_STACK_EXHAUSTED_ERROR)
           : StaticSymbolFunction(ALIEN_STACK_EXHAUSTED_ERROR));
}

/* The fiber was notified that a side stack is exhausted, and has come as far again: it would have
 * met the reserve, were that not open still. The return guard stays, or the next time would be
 * deeper. */
static bool notify_again(struct thread* th, struct fiber_context* fc, os_context_t* context)
{
    struct guards* g = guards_of(fc);
    int stack = g->notified & (1 << BINDING) ? BINDING : ALIEN;
    if (!(g->notified & (1 << stack))
        || in_critical_section(th, context) || fiber_in_foreign_code(th, context)
        || fc->return_guard > (lispobj)fc->control_stack_start + g->notified_at) return 0;
    g->notified &= ~(1 << stack);
    notify(th, fc, context, stack, 0);
    return 1;
}

/* A signal that came to foreign code in the last of the control stack's would end the process. */
static int most_lent(int stack)
{
    return stack == CONTROL ? n_steps(stack) - SIGNAL_ROOM / STEP_SIZE : n_steps(stack);
}

/* Let foreign code, which may hold a lock, have N steps until it returns. */
static void lend(struct thread* th, struct fiber_context* fc, int stack, int n)
{
    fiber_open_steps(fc, stack, n);
    if (read_TLS(INTERRUPTS_ENABLED, th) == NIL) guards_of(fc)->lent_masked = 1;
    guards_of(fc)->lent = 1;
    fiber_trap_after_call(th);
}

static void reserve_hit(struct thread* th, struct fiber_context* fc, os_context_t* context,
                        int stack, int step)
{
    if (step == n_steps(stack)) end_fiber(th, fc, context); // the hard guard
    else if (in_critical_section(th, context)) {
        open_silently(th, fc, stack, step + 1, context_sp(context));
        if (stack == CONTROL) postpone(th, context);
    } else if (!fiber_in_foreign_code(th, context)) notify(th, fc, context, stack, step);
    else if (step >= most_lent(stack)) end_fiber(th, fc, context);
    else lend(th, fc, stack, step + 1);
}

/* How many steps of the control stack's reserve a fiber with its stack pointer at SP may use. */
static int steps_granted(struct fiber_context* fc, char* sp)
{
    struct guards* g = guards_of(fc);
    int most = most_steps(CONTROL);
    if (!fiber_may_use_reserve(fc, sp)) return 0;
    if (g->reporting) return most;
    int n = steps_used(fc, (char*)fc->control_stack_start + g->notified_at)
        + handler_steps(CONTROL);
    return n < most ? n : most;
}

static int exhausted_side_stack(struct fiber_context* fc)
{
    struct guards* g = guards_of(fc);
    for (int stack = BINDING; stack <= ALIEN; ++stack)
        if (g->open[stack] && !(g->notified & (1 << stack))) return stack;
    return CONTROL;
}

/* Foreign code that was lent some steps has returned, or called back. A fiber that is as near to
 * its end as the last of a recursion is notified, or else each call would open some steps more,
 * which are then missing for the handlers. Where interrupts are off, that may cut a wake-up off,
 * unless they were when the steps were lent. */
static void settle_lent(struct thread* th, struct fiber_context* fc, os_context_t* context)
{
    struct guards* g = guards_of(fc);
    char *sp = context_sp(context), *lowest = (char*)__builtin_frame_address(0) - 4*KIB;
    bool may = (g->lent_masked || read_TLS(INTERRUPTS_ENABLED, th) != NIL)
        && !in_critical_section(th, context);
    int granted = steps_granted(fc, sp), stack = CONTROL;
    bool near = sp < control_base(fc) - granted * STEP_SIZE + NEAR_THE_END;
    g->lent_masked = g->lent = 0;
    int used = steps_used(fc, lowest), open = g->open[CONTROL];
    fiber_limit_open_steps(fc, !near ? granted : may || used < open ? used : open);
    fiber_close_left(th, fc, near ? lowest : sp);
    if (!near && (stack = exhausted_side_stack(fc)) == CONTROL) return;
    if (may) notify(th, fc, context, stack, g->open[stack]);
    else if (near) g->pending = 1;
}

/* If SP is below the guard, the frame that writes has not returned, and writes to an object above;
 * or it is a cleanup form, which runs on top of the frames that are being unwound. Then watch
 * another place. */
static void return_guard_hit(struct thread* th, struct fiber_context* fc, os_context_t* context)
{
    char *sp = context_sp(context), *guard = (char*)fc->return_guard;
    if (sp >= guard) {
        if (fiber_close_left(th, fc, sp) && !notify_again(th, fc, context))
            fiber_place_return_guard(fc, sp);
        return;
    }
    fiber_place_return_guard(fc, guard + fiber_return_guard_size(fc));
    if (!fc->return_guard) fiber_place_return_guard(fc, sp);
    if ((char*)fc->return_guard == guard) fiber_drop_return_guard(fc);
}

/* If the signal was SIGTRAP: the program counter is behind the breakpoint already, where
 * no code is. Other traps leave it where it was. */
static void restart_breakpoint(os_context_t* context)
{
    enum { TRAP_BREAKPOINT = 3, INT3 = 0xCC };
    unsigned char* pc = (unsigned char*)os_context_pc(context);
    if (context->uc_mcontext.gregs[REG_TRAPNO] == TRAP_BREAKPOINT && pc[-1] == INT3)
        set_os_context_pc(context, (uword_t)(pc - 1));
}

/* Is the return guard so near above the stack pointer that a signal meets it? */
static bool near_return_guard(struct fiber_context* fc, char* sp)
{
    char* guard = (char*)fc->return_guard;
    return guard && sp >= guard && sp < guard + RETURN_GUARD_SIZE + SIGNAL_ROOM;
}

/* How many steps of the control stack's reserve must be open to have room for a signal; 0 if there
 * is room, or can be none. SP may be in the reserve already, if nothing of the newest frame has
 * been touched. */
static int steps_for_signal(struct fiber_context* fc, char* sp)
{
    int needed = (control_base(fc) - sp + SIGNAL_ROOM + STEP_SIZE - 1) / STEP_SIZE;
    int open = guards_of(fc)->open[CONTROL];
    char* start = (char*)fc->control_stack_start;
    if (!within(sp, start, (char*)fc - start) || open == n_steps(CONTROL)) return 0;
    return needed > open ? needed : 0;
}

/* A fiber with interrupts off may be in the midst of a park, out of which it must not be unwound.
 * If it may have what a signal needs, it is notified later: when it overflows, or before it waits
 * again. fiber_place_for_waiting() sees to it that a park may have it. */
static bool left_alone(struct thread* th, struct fiber_context* fc, char* sp, int needed)
{
    int most = fiber_may_use_reserve(fc, sp) ? n_steps(CONTROL) : most_steps(CONTROL);
    return read_TLS(INTERRUPTS_ENABLED, th) == NIL && needed <= most;
}

/* Have NEEDED steps, for a signal. The stack has overflowed, as far as signals are concerned. */
static void overflow_for_signal(struct thread* th, struct fiber_context* fc, os_context_t* context,
                                int needed)
{
    if (in_critical_section(th, context)) {
        open_silently(th, fc, CONTROL, needed, context_sp(context));
        postpone(th, context);
    } else if (left_alone(th, fc, context_sp(context), needed))
        fiber_open_steps(fc, CONTROL, needed);
    else if (fiber_in_foreign_code(th, context)) lend(th, fc, CONTROL, needed);
    else notify(th, fc, context, CONTROL, guards_of(fc)->open[CONTROL]);
}

/* Called before a fiber waits whose stack, below SP, has not ROOM bytes outside of the reserve: the
 * place that it must touch to be notified, or ended, now and not in the midst of the wait. One that
 * may use the reserve may wait there, if there is room for a signal as well. */
char* fiber_place_for_waiting(char* sp, uword_t room)
{
    struct fiber_context* fc = get_sb_vm_thread()->fiber_context;
    char *start = (char*)fc->control_stack_start, *lowest = sp - room;
    if (!fiber_may_use_reserve(fc, sp))
        return steps_start(fc, CONTROL, 0, guards_of(fc)->open[CONTROL]) - 1;
    return lowest - SIGNAL_ROOM < start ? start - 1 : lowest;
}

/* Make room for a signal. The return guard comes first: it is nearer. */
bool fiber_make_signal_room(struct thread* th, struct fiber_context* fc, os_context_t* context)
{
    char* sp = context_sp(context);
    if (near_return_guard(fc, sp)) {
        restart_breakpoint(context);
        fiber_settle_reserves(th, fc, sp);
        return 1;
    }
    int needed = steps_for_signal(fc, sp);
    if (!needed) return 0;
    restart_breakpoint(context);
    overflow_for_signal(th, fc, context, needed);
    return 1;
}

/* Make room for what a signal's handler will call. A fiber that is about to overflow may have what
 * it needs for one, until it parks. One that has come into that is notified, or else signals
 * would open the whole reserve ahead of it. */
void fiber_make_handler_room(os_context_t* context)
{
    struct thread* th = get_sb_vm_thread();
    struct fiber_context* fc = th ? fiber_in_use(th, context) : 0;
    if (!fc) return;
    struct guards* g = guards_of(fc);
    char* sp = context_sp(context);
    if (near_return_guard(fc, sp)) fiber_settle_reserves(th, fc, sp);
    int needed = steps_for_signal(fc, sp);
    if (!needed) return;
    if (sp < control_base(fc) && !g->notified && !g->reporting && !g->pending
        && !left_alone(th, fc, sp, needed))
        overflow_for_signal(th, fc, context, needed);
    else if (needed <= most_steps(CONTROL)) fiber_open_steps(fc, CONTROL, needed);
}

/* Called instead of handle_guard_page_triggered(), which computes its
 * addresses from the geometry of a thread's stacks. */
bool fiber_handle_fault(struct thread* th, os_context_t* context, os_vm_address_t addr)
{
    struct fiber_context* fc = fiber_in_use(th, context);
    if (fc->return_guard && within(addr, (char*)fc->return_guard, fiber_return_guard_size(fc))) {
        return_guard_hit(th, fc, context);
        return 1;
    }
    for (int stack = 0; stack < N_STACKS; ++stack) {
        char* limit = stack_limit(fc, stack);
        sword_t beyond = stack == BINDING ? (char*)addr - limit : limit - 1 - (char*)addr;
        int n = n_steps(stack);
        if (beyond < guards_of(fc)->open[stack] * STEP_SIZE
            || beyond >= n * STEP_SIZE + (sword_t)HARD_GUARD_SIZE) continue;
        reserve_hit(th, fc, context, stack, beyond / STEP_SIZE);
        return 1;
    }
    if (!within(addr, (char*)undefined_alien_address, os_vm_page_size)) return 0;
    arrange_return_to_lisp_function(context, StaticSymbolFunction(UNDEFINED_ALIEN_VARIABLE_ERROR));
    return 1;
}

/* Called by a carrier at the base of its own stack, where a handler may have used that up and left
 * it by a throw, of which the return guard of threads knows nothing. With a fiber mounted, a stop
 * for the collector would put up the thread's guard on the fiber's stack. */
void fiber_reset_carrier_guard()
{
    struct thread* th = get_sb_vm_thread();
    if (!th->state_word.control_stack_guard_page_protected)
        reset_thread_control_stack_guard_page(th);
}

bool fiber_overflow_pending(struct thread* th)
{
    return th->fiber_context && guards_of(th->fiber_context)->pending;
}

/* Where the stack pointer of a fiber is that has overflowed silently, and is not to go on. With
 * interrupts off it may be in a park or a wake-up, of which the end of a switch is a part, and
 * which must not be cut off; but these make sure of their room before. */
static char* must_be_notified_below(struct thread* th, struct fiber_context* fc, char* sp)
{
    char* base = control_base(fc);
    return read_TLS(INTERRUPTS_ENABLED, th) != NIL ? base + NEAR_THE_END
        : base - steps_granted(fc, sp) * STEP_SIZE - NEAR_THE_END;
}

/* The last thing that a trap for pending interrupts does. See the head of
 * assembly/x86-64/fiber.lisp for the first case; the second is an overflow of which the
 * fiber could not be notified before, or one in foreign code. An overflow by a collection alone
 * does not count, which needs more stack than what comes next may need. */
void fiber_settle_pending(struct thread* th, os_context_t* context)
{
    bool trapped = fiber_trapped_after_call(th);
    fiber_send_deferred_signals(th);
    if (thread_interrupt_data(th).pending_handler && read_TLS(INTERRUPTS_ENABLED, th) == NIL) {
        write_TLS(INTERRUPT_PENDING, LISP_T, th);
        clear_pseudo_atomic_interrupted(th);
    }
    struct fiber_context* fc = th->fiber_context;
    if (!fc || !(trapped || guards_of(fc)->pending)) return;
    clear_pseudo_atomic_interrupted(th);
    if (trapped && guards_of(fc)->lent) { settle_lent(th, fc, context); return; }
    // What was lent has been settled below a callback, or was another fiber's.
    if (trapped && fiber_close_left(th, fc, (char*)__builtin_frame_address(0) - 4*KIB))
        trap_until_left(th, fc);
    if (!guards_of(fc)->pending) return;
    if (in_critical_section(th, context)) fiber_trap_after_call(th);
    else if (context_sp(context) < must_be_notified_below(th, fc, context_sp(context)))
        notify(th, fc, context, CONTROL, guards_of(fc)->open[CONTROL]);
}

#endif
