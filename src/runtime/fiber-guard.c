/*
 * Guards of the stacks of fibers: overflow, and signals that find no room
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

#define _GNU_SOURCE // for REG_TRAPNO
#include "genesis/sbcl.h"
#ifdef LISP_FEATURE_SB_FIBER

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include "fiber-stack.h"
#include "globals.h"
#include "arch.h"
#include "gc.h"
#include "interr.h"
#include "interrupt.h"
#include "lispregs.h"
#include "os.h"
#include "pseudo-atomic.h"
#include "validate.h"
#include "genesis/static-symbols.h"
#include "genesis/symbol.h"

/*
 * What is true when nobody is inside:
 *  - struct guards tells which steps are open; it is 0, as context->guards for Lisp, if and only
 *    if nothing is open, told or pending;
 *  - execution is diverted to Lisp only where Lisp could have been interrupted anyway, see
 *    in_critical_section();
 *  - who reports a failure has as much room as a handler of an exhaustion, and is told if that
 *    is used up, whatever it was told before, see fiber_make_room_to_report().
 *
 * A reserve is closed again when its stack has been unwound. That is found out by the *return
 * guard*, some pages of the control stack above what the handlers use, which are made
 * read-only: whoever writes there next, having returned to or beyond it, faults. It lies on
 * the control stack whichever stack overflowed, since the collector writes to binding
 * stacks and never to control stacks. If there is none (no mapping is left), the next park
 * closes the reserve.
 */

// Frames up to this size cannot skip the return guard on the way down.
#define RETURN_GUARD_SIZE (16*KIB)
// What the kernel and the runtime need to handle a signal, the collector apart.
#define SIGNAL_ROOM (32*KIB)
// As near to its end, the control stack counts as exhausted for who overflowed it silently.
#define NEAR_THE_END (16*KIB)

/*
 * Faults. We are on the alternate signal stack, so the fiber's own
 * may be full to the last word.
 */

static char* context_sp(os_context_t* context)
{
    return (char*)*os_context_register_addr(context, reg_SP);
}

/* The context of the fiber that TH executes. The switch changes RSP some instructions before
 * th->fiber_context, and then a signal may come for which the stack has no room. */
struct fiber_context* fiber_in_use(struct thread* th, os_context_t* context)
{
    char* sp = context_sp(context);
    struct fiber_context *fc = th->fiber_context, *other;
    if (!arch_pseudo_atomic_atomic(th)
        || (fc && within(sp, (char*)fc->control_stack_start, (char*)fc - (char*)fc->control_stack_start)))
        return fc;
    return (other = fiber_context_at(sp)) ? other : fc;
}

static struct guards* guards_of(struct fiber_context* fc) { return (struct guards*)&fc->guards; }

static int n_steps(int stack)
{
    return (stack == CONTROL ? CONTROL_RESERVE_SIZE : SIDE_RESERVE_SIZE) / STEP_SIZE;
}

/* How many are for handling the exhaustion. The last quarter is never among them, for a
 * collection (it needs 26 KiB) or an allocation that comes when they are used up. */
static int handler_steps(int stack) { return stack == CONTROL ? 4 : 1; }
static int most_steps(int stack) { return n_steps(stack) - n_steps(stack) / 4; }

/* Where the reserve of a stack begins. */
static char* stack_limit(struct fiber_context* fc, int stack)
{
    return stack == CONTROL ? control_base(fc) : stack == BINDING ? binding_end(fc) : alien_base(fc);
}

/* The steps FROM to TO of a reserve, counted from the stack on. */
static char* steps_start(struct fiber_context* fc, int stack, int from, int to)
{
    return stack_limit(fc, stack) + (stack == BINDING ? from : -to) * STEP_SIZE;
}

static void open_steps(struct fiber_context* fc, int stack, int n)
{
    int open = guards_of(fc)->open[stack];
    if (n > n_steps(stack)) n = n_steps(stack);
    if (n <= open) return;
    if (fiber_lower_guard(steps_start(fc, stack, open, n), (n - open) * STEP_SIZE))
        lose("cannot open the reserve of a fiber's stack: %s", strerror(errno));
    guards_of(fc)->open[stack] = n;
}

/* What is in the reserve is lost: nothing of it may be alive. */
static void close_reserve(struct fiber_context* fc, int stack)
{
    struct guards* g = guards_of(fc);
    if (g->open[stack] && fiber_raise_guard(steps_start(fc, stack, 0, g->open[stack]),
                                      g->open[stack] * STEP_SIZE)) return; // stays open
    g->open[stack] = 0;
    g->told &= ~(1 << stack);
    if (stack == CONTROL) g->pending = g->reporting = 0;
}

static bool anything_open(struct fiber_context* fc)
{
    struct guards* g = guards_of(fc);
    return g->open[CONTROL] || g->open[BINDING] || g->open[ALIEN];
}

/* Handlers below of where the fiber was told, or reports, need the reserve even if they have not
 * come to it: the control stack is exhausted when a signal finds no room any more. */
static bool reserve_left(struct thread* th, struct fiber_context* fc, int stack, char* sp)
{
    struct guards* g = guards_of(fc);
    bool handled = (g->told & (1 << CONTROL) || g->reporting)
        && sp < (char*)fc->control_stack_start + g->told_at;
    return stack == CONTROL ? sp >= control_base(fc) && !handled
        : stack == BINDING ? (char*)th->binding_stack_pointer <= binding_end(fc)
        : (char*)th->alien_stack_pointer >= alien_base(fc);
}

static uword_t return_guard_size(struct fiber_context* fc)
{
    uword_t room = context_page(fc) - (char*)fc->return_guard;
    return room < RETURN_GUARD_SIZE ? room : RETURN_GUARD_SIZE;
}

static void drop_return_guard(struct fiber_context* fc)
{
    if (!fc->return_guard) return;
    mprotect((char*)fc->return_guard, return_guard_size(fc), PROT_READ|PROT_WRITE);
    fiber_give_return_guard_back();
    fc->return_guard = 0;
}

static void set_return_guard(struct fiber_context* fc, char* page)
{
    drop_return_guard(fc);
    if (page >= context_page(fc) || !fiber_take_return_guard()) return;
    fc->return_guard = (lispobj)page;
    if (!mprotect(page, return_guard_size(fc), PROT_READ)) return;
    fc->return_guard = 0;
    fiber_give_return_guard_back();
}

/* Begin it with the first page that lies wholly above SP, and outside of the reserve. */
static void place_return_guard(struct fiber_context* fc, char* sp)
{
    set_return_guard(fc, sp < control_base(fc) ? control_base(fc)
                     : (char*)ALIGN_UP((uword_t)sp, HARD_GUARD_SIZE));
}

/* If there is much of the control stack left, it was another one that overflowed. Let the return
 * guard end with the page that SP is in, and continue below it: who comes again meets it before
 * he has come as far, the first frames included. */
static char* skip_return_guard(struct fiber_context* fc, char* sp)
{
    char* guard = (char*)fc->return_guard;
    if (guard && within(sp, guard, RETURN_GUARD_SIZE)) return guard; // met it, but had come as far
    char* page = (char*)ALIGN_DOWN((uword_t)sp, HARD_GUARD_SIZE);
    if (page != context_page(fc)) page += HARD_GUARD_SIZE;
    page -= RETURN_GUARD_SIZE;
    if (page < control_base(fc) + SIGNAL_ROOM) { place_return_guard(fc, sp); return sp; }
    set_return_guard(fc, page);
    return page;
}

/* The return guard must be far above: the next frames are those of C functions, where the
 * kernel may be about to write, which for it is no fault but an EFAULT. */
static void open_silently(struct fiber_context* fc, int stack, int n, char* sp)
{
    open_steps(fc, stack, n);
    if (stack == CONTROL) guards_of(fc)->pending = 1;
    if (!fc->return_guard)
        place_return_guard(fc, (sp < control_base(fc) ? control_base(fc) : sp) + SIGNAL_ROOM);
}

void fiber_close_all_reserves(struct fiber_context* fc)
{
    drop_return_guard(fc);
    for (int stack = 0; stack < N_STACKS; ++stack) close_reserve(fc, stack);
    guards_of(fc)->told_at = 0;
}

/* SP is where the fiber has returned to: close what it has left. Is something still open? In the
 * switch, TH has pointers into the side stacks of another. */
static bool close_left(struct thread* th, struct fiber_context* fc, char* sp)
{
    for (int stack = 0; stack < N_STACKS; ++stack)
        if (fc == th->fiber_context && reserve_left(th, fc, stack, sp)) close_reserve(fc, stack);
    if (anything_open(fc)) return 1;
    drop_return_guard(fc);
    guards_of(fc)->told_at = 0;
    return 0;
}

static void settle_reserves(struct thread* th, struct fiber_context* fc, char* sp)
{
    if (close_left(th, fc, sp) && (char*)fc->return_guard <= sp) place_return_guard(fc, sp);
}

/* Called by a fiber before it parks, if some reserve is open. What it calls itself lies below. */
void fiber_rearm_guards()
{
    struct thread* th = get_sb_vm_thread();
    char* lowest = (char*)__builtin_frame_address(0) - 4*KIB;
    if (th->fiber_context) settle_reserves(th, th->fiber_context, lowest);
}

/* Have just N steps of the control reserve open. Nothing of the others is alive. */
static void limit_open_steps(struct fiber_context* fc, int n)
{
    int open = guards_of(fc)->open[CONTROL];
    if (n < open && !fiber_raise_guard(steps_start(fc, CONTROL, n, open), (open - n) * STEP_SIZE))
        guards_of(fc)->open[CONTROL] = n;
    open_steps(fc, CONTROL, n);
}

/* Called by a fiber when nothing has handled an error, which may be that a stack is exhausted.
 * What is printed of it then runs on top of what has used up the stack, and may be without end. If
 * it were the fiber's end to use up the reserve now, no cleanup form would run. */
void fiber_make_room_to_report()
{
    struct thread* th = get_sb_vm_thread();
    struct fiber_context* fc = th->fiber_context;
    struct guards* g = guards_of(fc);
    char *sp = __builtin_frame_address(0), *base = control_base(fc);
    close_left(th, fc, sp);
    g->told = 0;
    sword_t missing = base + handler_steps(CONTROL) * STEP_SIZE - sp;
    if (missing <= 0) return;
    int n = (missing + STEP_SIZE - 1) / STEP_SIZE, most = most_steps(CONTROL);
    int used = sp < base ? (base - sp) / STEP_SIZE + 1 : 0; // a signal may have opened more than most
    if (n > most) n = most;
    limit_open_steps(fc, n > used ? n : used);
    g->pending = 0;
    g->reporting = 1;
    char* top = (sp < base ? base : sp) + SIGNAL_ROOM;
    g->told_at = top - (char*)fc->control_stack_start;
    place_return_guard(fc, top);
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

/* Where execution must not be diverted to Lisp, since what was interrupted would never go on:
 *  - the collector, and Lisp code that holds it off, SUB-GC above all;
 *  - an allocation, and the moment between its end and the trap that it ends with;
 *  - whoever has been asked to collect or to stop for that, until it has done so;
 *  - a signal handler in C, which has all signals blocked and a signal to take care of. */
static bool in_critical_section(struct thread* th, os_context_t* context)
{
    return gc_active_p || th->pseudo_atomic_bits
        || read_TLS(GC_INHIBIT, th) != NIL
        || read_TLS(GC_PENDING, th) != NIL || read_TLS(STOP_FOR_GC_PENDING, th) != NIL
        || sigismember(os_context_sigmask_addr(context), SIG_STOP_FOR_GC);
}

/* Have the end of the pseudo-atomic section trap, to tell the fiber then; but only for the
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

/* If we are on the fiber's stack, in the trap that ends a pseudo-atomic section: begin below
 * of us. Right below what was interrupted lies the frame from which the kernel restores it. */
static void divert(os_context_t* context, lispobj function)
{
    char *sp = context_sp(context), *here = __builtin_frame_address(0);
    if (here < sp && here > sp - SIGNAL_ROOM)
        *os_context_register_addr(context, reg_SP) =
            (os_context_register_t)ALIGN_DOWN((uword_t)here - KIB, 16);
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
    drop_return_guard(fc);
    *os_context_register_addr(context, reg_SP) =
        (os_context_register_t)(control_base(fc) + SIGNAL_ROOM);
    write_TLS(FREE_INTERRUPT_CONTEXT_INDEX, 0, th); // they lie where new frames will
    // The binding that ran into the hard guard was not made; undoing it would fault again.
    lispobj* end = (lispobj*)(binding_end(fc) + SIDE_RESERVE_SIZE);
    if (th->binding_stack_pointer > end) th->binding_stack_pointer = end;
    th->current_catch_block = fc->base_catch_block;
    th->current_unwind_protect_block = 0;
    divert(context, StaticSymbolFunction(LOSE_STACK));
}

/* Signal that a stack is exhausted, with room for the handlers. If they are what has used that
 * up, or nothing is left, end the fiber. They run below of where the fiber was told: above, it has
 * left them without meeting the return guard. */
static void tell(struct thread* th, struct fiber_context* fc, os_context_t* context,
                 int stack, int step)
{
    struct guards* g = guards_of(fc);
    char *sp = context_sp(context), *start = (char*)fc->control_stack_start;
    int room = step + handler_steps(stack), most = most_steps(stack);
    bool again = (g->told & (1 << stack)) && sp < start + g->told_at;
    if (!again) open_steps(fc, stack, room < most ? room : most);
    char* end = steps_start(fc, CONTROL, 0, g->open[CONTROL]);
    // It may have been moved beyond the stack for a large object. Nothing is in this step yet.
    if (stack == CONTROL && sp < end + KIB) sp = steps_start(fc, CONTROL, 0, step);
    if (again || sp < end + KIB) {
        open_steps(fc, stack, step + 1);
        end_fiber(th, fc, context);
        return;
    }
    if (stack == CONTROL) g->pending = 0;
    sp = skip_return_guard(fc, sp);
    *os_context_register_addr(context, reg_SP) = (os_context_register_t)sp;
    g->told |= 1 << stack;
    g->reporting = 0;
    g->told_at = sp - start;
    divert(context, stack == CONTROL ? StaticSymbolFunction(CONTROL_STACK_EXHAUSTED_ERROR)
           : stack == BINDING ? StaticSymbolFunction(BINDING_STACK_EXHAUSTED_ERROR)
           : StaticSymbolFunction(ALIEN_STACK_EXHAUSTED_ERROR));
}

/* The fiber was told that a side stack is exhausted, and has come as far again: it would have met
 * the reserve, were that not open still. The return guard stays, else the next time would be deeper. */
static bool told_again(struct thread* th, struct fiber_context* fc, os_context_t* context)
{
    struct guards* g = guards_of(fc);
    int stack = g->told & (1 << BINDING) ? BINDING : ALIEN;
    if (!(g->told & (1 << stack)) || in_critical_section(th, context)
        || fc->return_guard > (lispobj)fc->control_stack_start + g->told_at) return 0;
    g->told &= ~(1 << stack);
    tell(th, fc, context, stack, 0);
    return 1;
}

static void reserve_hit(struct thread* th, struct fiber_context* fc, os_context_t* context,
                        int stack, int step)
{
    if (step == n_steps(stack)) end_fiber(th, fc, context); // the hard guard
    else if (!in_critical_section(th, context)) tell(th, fc, context, stack, step);
    else {
        open_silently(fc, stack, step + 1, context_sp(context));
        if (stack == CONTROL) postpone(th, context);
    }
}

/* A frame below the guard that writes to an object above has not returned, or it is a cleanup
 * form, which runs on top of the frames that are being unwound. Watch another place. */
static void return_guard_hit(struct thread* th, struct fiber_context* fc, os_context_t* context)
{
    char *sp = context_sp(context), *guard = (char*)fc->return_guard;
    if (sp >= guard) {
        if (close_left(th, fc, sp) && !told_again(th, fc, context)) place_return_guard(fc, sp);
        return;
    }
    place_return_guard(fc, guard + return_guard_size(fc));
    if (!fc->return_guard) place_return_guard(fc, sp);
    if ((char*)fc->return_guard == guard) drop_return_guard(fc);
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

/* Make room for a signal. The return guard comes first: it is nearer. If it is the end of the
 * stack then it has overflowed, as far as signals are concerned. */
static bool make_signal_room(struct thread* th, struct fiber_context* fc, os_context_t* context)
{
    char* sp = context_sp(context);
    if (near_return_guard(fc, sp)) {
        restart_breakpoint(context);
        settle_reserves(th, fc, sp);
        return 1;
    }
    int needed = steps_for_signal(fc, sp);
    if (!needed) return 0;
    restart_breakpoint(context);
    if (in_critical_section(th, context)) {
        open_silently(fc, CONTROL, needed, sp);
        postpone(th, context);
    } else tell(th, fc, context, CONTROL, guards_of(fc)->open[CONTROL]);
    return 1;
}

extern lispobj lisp_sig_handlers[];
static const int resent[] = { SIGURG, SIGALRM, SIGCHLD };
enum { N_RESENT = sizeof resent / sizeof resent[0] };

/* A signal came when the stack had no room for its frame above a guard. The kernel has dropped
 * it and sends SIGSEGV instead; were it the signal that stops for the collector, the world
 * would wait for ever. Make room and send again what may have been lost: the others are
 * harmless when they come for nothing. What is not, is not lost: see fiber_route_signal(). */
bool fiber_handle_failed_delivery(siginfo_t* info, os_context_t* context)
{
    struct thread* th = get_sb_vm_thread();
    struct fiber_context* fc = th ? fiber_in_use(th, context) : 0;
    if (!fc || info->si_code != SI_KERNEL || !make_signal_room(th, fc, context)) return 0;
    if (th->stop_signal_sent) pthread_kill(pthread_self(), SIG_STOP_FOR_GC);
    for (int i = 0; i < N_RESENT; ++i) // what one without a handler does may be the end of the process
        if (lisp_sig_handlers[resent[i]]) pthread_kill(pthread_self(), resent[i]);
    return 1;
}

/*
 * SIGTERM, SIGINT and others must neither be lost nor come for nothing. They come on the alternate
 * stack, which has room. But Lisp cannot run there. So the handler only notes them, and sends
 * SIGURG to its thread, the handler of which calls theirs on the stack that was interrupted. What
 * runs there must not be unwound because the stack ends, so it gets room first.
 */
typedef void signal_handler(int, siginfo_t*, void*);
static signal_handler* handle_deferrable; // SBCL's, the same for all of them
static __thread uint32_t noted;           // a bit for each
static __thread siginfo_t noted_info[32];

static void make_handler_room(os_context_t* context)
{
    struct thread* th = get_sb_vm_thread();
    struct fiber_context* fc = th ? fiber_in_use(th, context) : 0;
    if (!fc) return;
    char* sp = context_sp(context);
    if (near_return_guard(fc, sp)) settle_reserves(th, fc, sp);
    int needed = steps_for_signal(fc, sp);
    if (needed) open_steps(fc, CONTROL, needed); // until it parks
}

static void note_signal(int signal, siginfo_t* info, void* context)
{
    make_handler_room(context);
    noted |= 1u << signal;
    noted_info[signal] = *info;
    pthread_kill(pthread_self(), SIGURG);
}

/* One at a time: if it is deferred, the next may come only when that is over. Signals are
 * blocked. */
static void handle_noted(int signal, siginfo_t* info, void* context)
{
    if (!noted) {
        handle_deferrable(signal, info, context);
        return;
    }
    int first = __builtin_ctz(noted);
    noted &= ~(1u << first);
    siginfo_t its_info = noted_info[first]; // the handler may park, and go on in another thread
    pthread_kill(pthread_self(), SIGURG);   // for the next, and for who has sent this one
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

/* Called instead of handle_guard_page_triggered(), which computes its
 * addresses from the geometry of a thread's stacks. */
bool fiber_handle_fault(struct thread* th, os_context_t* context, os_vm_address_t addr)
{
    struct fiber_context* fc = fiber_in_use(th, context);
    if (fc->return_guard && within(addr, (char*)fc->return_guard, return_guard_size(fc))) {
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

/* The signal mask belongs to the OS thread, and while a handler runs it is the handler's. When
 * a fiber is about to park in one, put back what was before, which the outermost live context
 * tells. If a handler is pending then that is why signals are blocked, and the next
 * stack with interrupts enabled runs it. */
int fiber_put_back_signal_mask()
{
    struct thread* th = get_sb_vm_thread();
    sigset_t old, *outer = os_context_sigmask_addr(nth_interrupt_context(0, th));
    thread_sigmask(SIG_BLOCK, &deferrable_sigset, &old); // none is deferred after this test
    if (interrupt_handler_pending_p()) return 0;
    thread_sigmask(SIG_SETMASK, outer, 0);
    memcpy(&th->fiber_context->signal_mask, &old, sizeof th->fiber_context->signal_mask);
    return 1;
}

/* In a handler signals are blocked and none is deferred, or they come. What has been deferred
 * on this carrier, and why it has signals blocked, is another's: let it come again, to be pending
 * in the kernel or be deferred anew, according to the mask of the handler. */
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

/* Called by a carrier at the base of its own stack, where a handler may have used that up and left it by
 * a throw, of which the return guard knows nothing. With a fiber mounted, who stops for the collector
 * would put up that guard on the fiber's stack. */
void fiber_reset_carrier_guard()
{
    struct thread* th = get_sb_vm_thread();
    if (!th->state_word.control_stack_guard_page_protected) reset_thread_control_stack_guard_page(th);
}

bool fiber_overflow_pending(struct thread* th)
{
    return th->fiber_context && guards_of(th->fiber_context)->pending;
}

/* The last thing that a trap for pending interrupts does. See the head of
 * assembly/x86-64/fiber.lisp for the first case; the second is an overflow of which the
 * fiber could not be told before. A collection alone does not count, which needs more stack
 * than what comes next may need. */
void fiber_settle_pending(struct thread* th, os_context_t* context)
{
    fiber_send_deferred_signals(th);
    if (thread_interrupt_data(th).pending_handler && read_TLS(INTERRUPTS_ENABLED, th) == NIL) {
        write_TLS(INTERRUPT_PENDING, LISP_T, th);
        clear_pseudo_atomic_interrupted(th);
    }
    struct fiber_context* fc = th->fiber_context;
    if (!fc || !guards_of(fc)->pending) return;
    clear_pseudo_atomic_interrupted(th);
    // Told at the end of a switch, the fiber would be unwound before it has done what its predecessor
    // on the carrier wants. There, interrupts are off.
    if (context_sp(context) < control_base(fc) + NEAR_THE_END
        && read_TLS(INTERRUPTS_ENABLED, th) != NIL && !in_critical_section(th, context))
        tell(th, fc, context, CONTROL, guards_of(fc)->open[CONTROL]);
}

#endif
