/*
 * Stacks of fibers: where they lie, how they are guarded, what the collector sees of them
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
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "fiber.h"
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
 * A stack slot, from low to high addresses:
 *
 *     hard guard               one page, never accessible
 *     critical zone            64 KiB, a guard until a critical section overflows the next
 *     control zone             64 KiB, a guard until the control stack overflows
 *     control stack            grows down
 *     struct fiber_context
 *     binding stack            grows up
 *     binding zone             16 KiB, a guard until the binding stack overflows
 *     critical page            a guard until the fiber is ended for that
 *     hard guard               one page, never accessible
 *     critical page            as above, for the alien stack
 *     alien zone               16 KiB, a guard until the alien stack overflows
 *     alien stack              grows down
 *
 * Control and binding stack meet around the context, in the one page that an idle fiber
 * has touched. A zone is both the guard in front of the hard guard and, once it has been
 * opened, the room in which the handlers of the exhaustion run. A fiber that uses up that
 * room too is ended, but not in the midst of an allocation or of a collection, which
 * go on in the critical zone.
 *
 * What is true when nobody is inside:
 *  - arenas are only ever added; n_arenas is written last, so that the collector and
 *    fault handlers read the table without a lock;
 *  - state[i] is FREE, or the context of slot i is valid. It becomes SUSPENDED by a
 *    store of the thread that prepared the stack, and changes between SUSPENDED and
 *    MOUNTED only in the switch, inside pseudo-atomic;
 *  - a slot is in the free list, or was handed out by fiber_stack_allocate();
 *  - a bit ..._OPEN in context->guards is set if and only if that zone is open.
 *
 * A zone is closed again when its stack has been unwound. That is found out by the *return
 * guard*, a page of the control stack above the frame that overflowed, which is made
 * read-only: whoever writes there next, having returned to or beyond it, faults. It lies on
 * the control stack whichever stack overflowed, since the collector writes to binding
 * stacks and never to control stacks. If there is none (no mapping is left), the next park
 * closes the zone.
 */

#define KIB 1024
#define HARD_GUARD_SIZE ((uword_t)os_reported_page_size)
#define CRITICAL_ZONE_SIZE (64*KIB) // a collection needs 26 KiB
#define CONTROL_ZONE_SIZE (64*KIB)
#define LOW_GUARD_SIZE (HARD_GUARD_SIZE + CRITICAL_ZONE_SIZE + CONTROL_ZONE_SIZE)
#define SIDE_ZONE_SIZE (16*KIB)
#define FIBER_BINDING_STACK_SIZE (64*KIB)
#define FIBER_ALIEN_STACK_SIZE (64*KIB)
#define MIDDLE_GUARD_SIZE (2*SIDE_ZONE_SIZE + 3*HARD_GUARD_SIZE)

enum {
    CONTROL_ZONE_OPEN = 1, CRITICAL_ZONE_OPEN = 2,
    BINDING_ZONE_OPEN = 4, BINDING_CRITICAL_OPEN = 8,
    ALIEN_ZONE_OPEN = 16, ALIEN_CRITICAL_OPEN = 32,
    // the control zone was opened and nobody has been told
    OPENED_SILENTLY = 64,
    // what is to be signalled when the pseudo-atomic section ends
    OVERFLOW_PENDING = 128, LOSS_PENDING = 256,
};

#define SLOTS_PER_ARENA 1024
#define ARENA_BYTES ((uword_t)512*KIB*KIB)
#define MAX_ARENAS 16384
#define MAX_STACK_CLASSES 64

struct fiber_arena {
    char* base;
    uword_t stride;
    struct stack_class* class;
    uint32_t n_slots;
    uint32_t n_carved;            // slots from here on were never used
    unsigned char* state;
};

/* All stacks of one size. */
struct stack_class {
    uword_t control_size;         // usable bytes of control stack, zone excluded
    struct fiber_context* free;
    struct fiber_arena* last;     // the only one that may have slots to carve
};

static struct fiber_arena arenas[MAX_ARENAS];
static volatile uint32_t n_arenas;
static struct stack_class stack_classes[MAX_STACK_CLASSES];
static pthread_mutex_t arenas_lock = PTHREAD_MUTEX_INITIALIZER;

/* What the control stack of a fiber is if nobody asks for another size. */
uword_t fiber_default_stack_size = 256*KIB;

/* Free stacks beyond this many give their pages back. */
uword_t fiber_stack_high_water = 16384;
static uword_t n_free_stacks;

/*
 * Guards. MADV_GUARD_INSTALL (Linux 6.13) needs no mapping of its own; mprotect
 * needs two for each guard, of which a process has 65,530 by default.
 *
 * Installing a guard destroys what is in the pages, which is what a zone wants: by then
 * all in it is dead. It would be wrong for the return guard, which lies over live frames.
 */
#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#define MADV_GUARD_REMOVE 103
#endif

enum { GUARD_UNKNOWN, GUARD_MADVISE, GUARD_MPROTECT };
int fiber_guard_method = GUARD_UNKNOWN; // may be set before the first fiber, by tests

static int raise_guard(char* where, uword_t size)
{
    return fiber_guard_method == GUARD_MADVISE
        ? madvise(where, size, MADV_GUARD_INSTALL)
        : mprotect(where, size, PROT_NONE);
}

static int lower_guard(char* where, uword_t size)
{
    return fiber_guard_method == GUARD_MADVISE
        ? madvise(where, size, MADV_GUARD_REMOVE)
        : mprotect(where, size, PROT_READ|PROT_WRITE);
}

static void choose_guard_method(char* page)
{
    if (fiber_guard_method != GUARD_UNKNOWN) return;
    fiber_guard_method = GUARD_MADVISE;
    if (raise_guard(page, HARD_GUARD_SIZE) || lower_guard(page, HARD_GUARD_SIZE))
        fiber_guard_method = GUARD_MPROTECT;
}

/* Geometry. The context knows its bounds, all else follows from them. */

static char* critical_zone(struct fiber_context* fc) { return (char*)fc->control_stack_start; }
static char* control_zone(struct fiber_context* fc) { return critical_zone(fc) + CRITICAL_ZONE_SIZE; }
static char* control_base(struct fiber_context* fc) { return control_zone(fc) + CONTROL_ZONE_SIZE; }
static char* low_hard_guard(struct fiber_context* fc) { return critical_zone(fc) - HARD_GUARD_SIZE; }
static char* alien_zone(struct fiber_context* fc) { return (char*)fc->alien_stack_start; }
static char* alien_critical(struct fiber_context* fc) { return alien_zone(fc) - HARD_GUARD_SIZE; }
static char* binding_critical(struct fiber_context* fc) { return alien_critical(fc) - 2*HARD_GUARD_SIZE; }
static char* binding_zone(struct fiber_context* fc) { return binding_critical(fc) - SIDE_ZONE_SIZE; }
static char* context_page(struct fiber_context* fc) { return (char*)((uword_t)fc & -HARD_GUARD_SIZE); }

static bool within(os_vm_address_t addr, char* start, uword_t size)
{
    return (char*)addr >= start && (char*)addr < start + size;
}

/* Arenas */

/* Powers of two from 64 KiB on, so that MAX_STACK_CLASSES suffice for all sizes. */
static uword_t round_stack_size(uword_t size)
{
    uword_t rounded = 64*KIB;
    while (rounded < size) rounded *= 2;
    return rounded;
}

/* Where arenas lie and at what stride is decided here and nowhere else.
 * An odd number of pages spreads the first pages of neighbours over the sets of
 * the caches, in which equal strides of a power of two would collide. */
static uword_t slot_stride(uword_t control_size)
{
    uword_t page = HARD_GUARD_SIZE;
    uword_t size = LOW_GUARD_SIZE + control_size
        + FIBER_BINDING_STACK_SIZE + MIDDLE_GUARD_SIZE + FIBER_ALIEN_STACK_SIZE;
    uword_t n_pages = (size + page - 1) / page;
    return (n_pages | 1) * page;
}

static char* reserve_arena(uword_t size)
{
    void* base = mmap(0, size, PROT_READ|PROT_WRITE,
                      MAP_PRIVATE|MAP_ANONYMOUS|MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return 0;
    madvise(base, size, MADV_NOHUGEPAGE); // 2 MiB for an idle fiber otherwise
    return base;
}

static struct fiber_arena* add_arena(struct stack_class* class)
{
    uint32_t n = n_arenas;
    if (n == MAX_ARENAS) { errno = ENOMEM; return 0; }
    struct fiber_arena* a = &arenas[n];
    a->class = class;
    a->stride = slot_stride(class->control_size);
    uword_t fit = ARENA_BYTES / a->stride;
    a->n_slots = fit < 1 ? 1 : fit > SLOTS_PER_ARENA ? SLOTS_PER_ARENA : fit;
    a->n_carved = 0;
    a->state = calloc(a->n_slots, 1);
    a->base = a->state ? reserve_arena(a->n_slots * a->stride) : 0;
    if (!a->base) { free(a->state); errno = ENOMEM; return 0; }
    choose_guard_method(a->base);
    __atomic_store_n(&n_arenas, n + 1, __ATOMIC_RELEASE);
    return a;
}

/* The context of a slot. Its offset in the page varies from slot to slot, for the
 * sake of the caches again: all first lines at one offset would share 12 lines. */
static struct fiber_context* slot_context(struct fiber_arena* a, uint32_t i)
{
    char* boundary = a->base + i * a->stride + LOW_GUARD_SIZE + a->class->control_size;
    return (void*)(boundary - 2*KIB + (i % 8) * 64);
}

static int carve_slot(struct fiber_arena* a, uint32_t i)
{
    struct fiber_context* fc = slot_context(a, i);
    char* slot = a->base + i * a->stride;
    char* middle = slot + LOW_GUARD_SIZE + a->class->control_size + FIBER_BINDING_STACK_SIZE;
    if (raise_guard(slot, LOW_GUARD_SIZE)) return -1;
    if (raise_guard(middle, MIDDLE_GUARD_SIZE)) return -1;
    fc->control_stack_start = (lispobj*)(slot + HARD_GUARD_SIZE);
    fc->control_stack_end = (lispobj*)fc;
    fc->binding_stack_start = (lispobj*)ALIGN_UP((uword_t)(fc + 1), 16); // for MOVAPS
    fc->alien_stack_start = (lispobj*)(middle + MIDDLE_GUARD_SIZE - SIDE_ZONE_SIZE);
    fc->mounted_as = (lispobj)fc;
    fc->state_cell = &a->state[i];
    fc->index = (a - arenas) * SLOTS_PER_ARENA + i;
    return 0;
}

static struct fiber_arena* arena_of(struct fiber_context* fc)
{
    return &arenas[fc->index / SLOTS_PER_ARENA];
}

static uword_t slot_end(struct fiber_arena* a, struct fiber_context* fc)
{
    uint32_t i = fc->index % SLOTS_PER_ARENA;
    return (uword_t)a->base + (i + 1) * a->stride;
}

static struct stack_class* find_stack_class(uword_t control_size)
{
    for (int i = 0; i < MAX_STACK_CLASSES; ++i) {
        struct stack_class* class = &stack_classes[i];
        if (!class->control_size) class->control_size = control_size;
        if (class->control_size == control_size) return class;
    }
    return 0;
}

static struct fiber_context* carve(struct stack_class* class)
{
    struct fiber_arena* a = class->last;
    if (!a || a->n_carved == a->n_slots) a = class->last = add_arena(class);
    if (!a || carve_slot(a, a->n_carved)) return 0;
    return slot_context(a, a->n_carved++);
}

static struct fiber_context* take_stack(struct stack_class* class)
{
    struct fiber_context* fc = class->free;
    if (!fc) return carve(class);
    class->free = fc->next_free;
    --n_free_stacks;
    return fc;
}

/* A stack with CONTROL_SIZE usable bytes of control stack, or 0 if there is no
 * memory or no mapping left for it. The caller has interrupts disabled: an
 * interruption that came to allocate would wait for itself. */
struct fiber_context* fiber_stack_allocate(uword_t control_size)
{
    pthread_mutex_lock(&arenas_lock);
    struct stack_class* class = find_stack_class(round_stack_size(control_size));
    struct fiber_context* fc = class ? take_stack(class) : 0;
    pthread_mutex_unlock(&arenas_lock);
    if (!fc) return 0;
    fc->alien_stack_pointer = (lispobj*)slot_end(arena_of(fc), fc);
    fc->binding_stack_pointer = fc->binding_stack_start;
    fc->control_stack_pointer = fc->control_stack_end;
    fc->catch_block = fc->unwind_protect_block = 0;
    fc->base_catch_block = 0;
    fc->signal_context_count = 0;
    return fc;
}

static void close_all_zones(struct fiber_context* fc);

/* Give back the pages of a stack but the one that holds its context. */
static void release_pages(struct fiber_arena* a, struct fiber_context* fc)
{
    char* above = context_page(fc) + HARD_GUARD_SIZE;
    madvise(control_base(fc), context_page(fc) - control_base(fc), MADV_DONTNEED);
    madvise(above, binding_zone(fc) - above, MADV_DONTNEED);
    char* alien = alien_zone(fc) + SIDE_ZONE_SIZE;
    madvise(alien, slot_end(a, fc) - (uword_t)alien, MADV_DONTNEED);
}

/* The stack is nobody's: its fiber has ended, and another stack is running. */
void fiber_stack_free(struct fiber_context* fc)
{
    struct fiber_arena* a = arena_of(fc);
    *fc->state_cell = FIBER_STACK_FREE;
    close_all_zones(fc);
    pthread_mutex_lock(&arenas_lock);
    bool surplus = n_free_stacks >= fiber_stack_high_water;
    fc->next_free = a->class->free;
    a->class->free = fc;
    ++n_free_stacks;
    if (surplus) release_pages(a, fc);
    pthread_mutex_unlock(&arenas_lock);
}

/* A carrier's own context, kept while the thread is a carrier. */
struct fiber_context* fiber_carrier_begin()
{
    struct thread* th = get_sb_vm_thread();
    static unsigned char state_of_carriers; // the collector finds carriers by their threads
    struct fiber_context* fc = aligned_alloc(16, ALIGN_UP(sizeof *fc, 16));
    if (!fc) return 0;
    memset(fc, 0, sizeof *fc);
    fc->control_stack_start = th->control_stack_start;
    fc->control_stack_end = th->control_stack_end;
    fc->binding_stack_start = th->binding_stack_start;
    fc->alien_stack_start = th->alien_stack_start;
    fc->mutex_owner_id = th->mutex_owner_id;
    fc->state_cell = &state_of_carriers;
    unsigned int mxcsr;
    asm ("stmxcsr %0" : "=m" (mxcsr));
    fc->mxcsr = mxcsr & ~0x3F;    // without the accrued exceptions
    th->carrier_context = fc;
    return fc;
}

void fiber_carrier_end()
{
    struct thread* th = get_sb_vm_thread();
    struct fiber_context* fc = th->carrier_context;
    if (th->fiber_context) lose("a carrier ends while a fiber is mounted");
    th->carrier_context = 0;
    free(fc);
}

/*
 * The collector's view. The world is stopped, so every stack that is not free is
 * either suspended or some thread's current one, which the collector scans anyway.
 */

/* CALL for each context that is suspended. */
static inline void each_suspended(void (*call)(struct fiber_context*, void*), void* arg)
{
    struct thread* th;
    for_each_thread(th) {
        if (th->fiber_context) call(th->carrier_context, arg);
    }
    for (uint32_t n = 0; n < n_arenas; ++n) {
        struct fiber_arena* a = &arenas[n];
        for (uint32_t i = 0; i < a->n_carved; ++i)
            if (a->state[i] == FIBER_STACK_SUSPENDED) call(slot_context(a, i), arg);
    }
}

struct visitors { fiber_root_visitor *visit, *visit_register; };

static void NO_SANITIZE_ADDRESS NO_SANITIZE_MEMORY
scan_suspended(struct fiber_context* fc, void* arg)
{
    extern void visit_context_registers(fiber_root_visitor*, os_context_t*, void*);
    struct visitors* v = arg;
    for (uword_t i = 0; i < fc->signal_context_count; ++i)
        visit_context_registers(v->visit_register, (os_context_t*)(&fc->signal_context_0)[i], (void*)1);
    lispobj start = (lispobj)fc->control_stack_start, end = (lispobj)fc->control_stack_end;
    for (lispobj* p = fc->control_stack_pointer; p < fc->control_stack_end; ++p) {
        lispobj word = *p;
        if (word >= BACKEND_PAGE_BYTES && !(start <= word && word < end)) v->visit(word, 0);
    }
}

/* VISIT_REGISTER is for what signal contexts hold: a card may have been marked for a
 * store that is still to come, so the mark must stay, as for a thread's context. */
void fiber_scan_control_stacks(fiber_root_visitor* visit, fiber_root_visitor* visit_register)
{
    struct visitors v = { visit, visit_register };
    each_suspended(scan_suspended, &v);
}

static void scav_suspended(struct fiber_context* fc, void* mark)
{
    extern void scav_binding_stack(lispobj*, lispobj*, void (*)(lispobj));
    scav_binding_stack(fc->binding_stack_start, fc->binding_stack_pointer, mark);
}

void fiber_scav_binding_stacks(void (*mark)(lispobj))
{
    each_suspended(scav_suspended, (void*)mark);
}

struct verification { int (*verify)(lispobj, lispobj*, void*); void* arg; int errors; };

static void verify_suspended(struct fiber_context* fc, void* arg)
{
    struct verification* v = arg;
    v->errors += v->verify((lispobj)fc->binding_stack_start, fc->binding_stack_pointer, v->arg);
}

int fiber_verify_binding_stacks(int (*verify)(lispobj, lispobj*, void*), void* arg)
{
    struct verification v = { verify, arg, 0 };
    each_suspended(verify_suspended, &v);
    return v.errors;
}

/* Words that point into the stack being scanned are no roots. For a thread this range
 * reaches from the stack to the thread structure; with a fiber's stack below the heap
 * it would contain the heap, and nothing would be pinned. */
void fiber_exclude_own_stack(struct thread* th, lispobj* from, lispobj* to)
{
    if (!th->fiber_context) return;
    *from = (lispobj)th->control_stack_start;
    *to = (lispobj)th->control_stack_end;
}

/* The scrubber clears dead words down to the guard; it must not touch a raised one. */
void fiber_scrub_limits(struct thread* th, os_vm_address_t* guard,
                        os_vm_address_t* hard_guard, unsigned* size)
{
    struct fiber_context* fc = th->fiber_context;
    if (!fc) return;
    *size = HARD_GUARD_SIZE;
    *hard_guard = low_hard_guard(fc);
    *guard = fc->guards & CRITICAL_ZONE_OPEN ? *hard_guard
        : (fc->guards & CONTROL_ZONE_OPEN ? control_zone(fc) : control_base(fc)) - HARD_GUARD_SIZE;
}

/*
 * Faults on a fiber's stack. We are on the alternate signal stack, so the fiber's own
 * may be full to the last word.
 */

static uword_t context_sp(os_context_t* context) { return *os_context_register_addr(context, reg_SP); }

/* The zones, and how to tell that nothing of a mounted stack is in one. */

struct zone { int open; char* (*where)(struct fiber_context*); uword_t size; };

static const struct zone zones[] = {
    { CONTROL_ZONE_OPEN, control_zone, CONTROL_ZONE_SIZE },
    { CRITICAL_ZONE_OPEN, critical_zone, CRITICAL_ZONE_SIZE },
    { BINDING_ZONE_OPEN, binding_zone, SIDE_ZONE_SIZE },
    { BINDING_CRITICAL_OPEN, binding_critical, 0 },
    { ALIEN_ZONE_OPEN, alien_zone, SIDE_ZONE_SIZE },
    { ALIEN_CRITICAL_OPEN, alien_critical, 0 },
};
#define ZONE_OPEN (CONTROL_ZONE_OPEN | CRITICAL_ZONE_OPEN | BINDING_ZONE_OPEN \
                   | BINDING_CRITICAL_OPEN | ALIEN_ZONE_OPEN | ALIEN_CRITICAL_OPEN)

static uword_t zone_size(const struct zone* z) { return z->size ? z->size : HARD_GUARD_SIZE; }

static void open_zone(struct fiber_context* fc, const struct zone* z)
{
    if (lower_guard(z->where(fc), zone_size(z)))
        lose("cannot open the reserve of a fiber's stack: %s", strerror(errno));
    fc->guards |= z->open;
}

/* The pages of a zone are lost when it is closed: nothing in it may be alive. */
static void close_zones(struct fiber_context* fc, int which)
{
    for (unsigned i = 0; i < sizeof zones / sizeof *zones; ++i)
        if (fc->guards & which & zones[i].open) {
            raise_guard(zones[i].where(fc), zone_size(&zones[i]));
            fc->guards &= ~zones[i].open;
        }
    if (!(fc->guards & CONTROL_ZONE_OPEN)) fc->guards &= ~OPENED_SILENTLY;
}

static int zones_left_by(struct thread* th, struct fiber_context* fc, char* sp)
{
    return (sp >= control_base(fc) ? CONTROL_ZONE_OPEN | CRITICAL_ZONE_OPEN : 0)
        | ((char*)th->binding_stack_pointer < binding_zone(fc)
           ? BINDING_ZONE_OPEN | BINDING_CRITICAL_OPEN : 0)
        | ((char*)th->alien_stack_pointer >= alien_zone(fc) + SIDE_ZONE_SIZE
           ? ALIEN_ZONE_OPEN | ALIEN_CRITICAL_OPEN : 0);
}

static void drop_return_guard(struct fiber_context* fc)
{
    if (!fc->return_guard) return;
    mprotect((char*)fc->return_guard, HARD_GUARD_SIZE, PROT_READ|PROT_WRITE);
    fc->return_guard = 0;
}

/* Make the first page that lies wholly above SP, and outside of the zones, the return guard. */
static void place_return_guard(struct fiber_context* fc, char* sp)
{
    drop_return_guard(fc);
    char* page = sp < control_base(fc) ? control_base(fc)
        : (char*)ALIGN_UP((uword_t)sp, HARD_GUARD_SIZE);
    if (page >= context_page(fc)) return;
    if (!mprotect(page, HARD_GUARD_SIZE, PROT_READ)) fc->return_guard = (lispobj)page;
}

static void close_all_zones(struct fiber_context* fc)
{
    drop_return_guard(fc);
    close_zones(fc, ZONE_OPEN);
    fc->guards = 0;
}

/* SP is where the fiber has returned to: close what it has left, wait for the rest. */
static void settle_zones(struct thread* th, struct fiber_context* fc, char* sp)
{
    close_zones(fc, zones_left_by(th, fc, sp));
    if (fc->guards & ZONE_OPEN) place_return_guard(fc, sp); else drop_return_guard(fc);
}

/* Called by a fiber before it parks, if some zone is open. */
void fiber_rearm_guards()
{
    struct thread* th = get_sb_vm_thread();
    if (th->fiber_context) settle_zones(th, th->fiber_context, (char*)__builtin_frame_address(0));
}

extern void unblock_signals_in_context_and_maybe_warn(os_context_t*);

static void signal_exhaustion(os_context_t* context, lispobj function)
{
    unblock_signals_in_context_and_maybe_warn(context);
    arrange_return_to_lisp_function(context, function);
}

/* Where nothing may be signalled: the collector, an allocation, and Lisp code that holds the
 * collector off, SUB-GC above all, whose unwinding would leave a collection pending. */
static bool in_critical_section(struct thread* th)
{
    return gc_active_p || arch_pseudo_atomic_atomic(th) || read_TLS(GC_INHIBIT, th) != NIL;
}

/* Signal it at the end of the pseudo-atomic section, or if that is part of a greater
 * critical section not at all. */
static void postpone(struct thread* th, struct fiber_context* fc, os_context_t* context,
                     int pending)
{
    if (gc_active_p || read_TLS(GC_INHIBIT, th) != NIL) {
        fc->guards |= OPENED_SILENTLY;
        return;
    }
    fc->guards |= pending;
    arch_set_pseudo_atomic_interrupted(th);
    // A handler that ran between the end of the section and its trap would begin another
    // section and so wipe out that this one was interrupted.
    maybe_save_gc_mask_and_block_deferrables(context);
}

static void control_stack_overflow(struct thread* th, struct fiber_context* fc,
                                   os_context_t* context)
{
    open_zone(fc, &zones[0]);
    place_return_guard(fc, (char*)context_sp(context));
    if (in_critical_section(th)) postpone(th, fc, context, OVERFLOW_PENDING);
    else signal_exhaustion(context, StaticSymbolFunction(CONTROL_STACK_EXHAUSTED_ERROR));
}

/* There is no stack to run cleanups on: cut the fiber back to its base, where Lisp ends it.
 * The frames that are overwritten by doing so are among those given up. Zones stay open
 * until the stack is free, since bindings are still to be undone. */
static void end_fiber(struct thread* th, struct fiber_context* fc, os_context_t* context)
{
    if (in_critical_section(th) || !fc->base_catch_block)
        lose("stack of a fiber exhausted in a critical section");
    *os_context_register_addr(context, reg_SP) =
        (os_context_register_t)(control_base(fc) + 32*KIB);
    drop_return_guard(fc);
    fc->guards &= ZONE_OPEN;
    th->current_catch_block = fc->base_catch_block;
    th->current_unwind_protect_block = 0;
    signal_exhaustion(context, StaticSymbolFunction(FIBER_STACK_LOST));
}

/* The reserve is used up as well, by the handlers of the exhaustion as a rule. */
static void control_zone_overflow(struct thread* th, struct fiber_context* fc,
                                  os_context_t* context)
{
    bool silent = fc->guards & OPENED_SILENTLY, critical = in_critical_section(th);
    if (!silent && !critical) { end_fiber(th, fc, context); return; }
    open_zone(fc, &zones[1]);
    if (critical) { postpone(th, fc, context, silent ? OVERFLOW_PENDING : LOSS_PENDING); return; }
    fc->guards &= ~OPENED_SILENTLY;
    signal_exhaustion(context, StaticSymbolFunction(CONTROL_STACK_EXHAUSTED_ERROR));
}

static void side_stack_overflow(struct fiber_context* fc, os_context_t* context,
                                const struct zone* z, lispobj function)
{
    open_zone(fc, z);
    place_return_guard(fc, (char*)context_sp(context));
    signal_exhaustion(context, function);
}

static void side_zone_overflow(struct thread* th, struct fiber_context* fc,
                               os_context_t* context, const struct zone* z)
{
    open_zone(fc, z);
    end_fiber(th, fc, context);
}

/* A frame below the guard that writes to an object above has not returned. */
static void return_guard_hit(struct thread* th, struct fiber_context* fc, os_context_t* context)
{
    char *sp = (char*)context_sp(context), *above = (char*)fc->return_guard + HARD_GUARD_SIZE;
    if (sp >= (char*)fc->return_guard) settle_zones(th, fc, sp);
    else place_return_guard(fc, above);
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

/* A signal came when the stack had no room for its frame above a guard. The kernel has dropped
 * it and sends SIGSEGV instead; were it the signal that stops for the collector, the world
 * would wait for ever. Make room and send again what may have been lost: the others are
 * harmless when they come for nothing. */
bool fiber_handle_failed_delivery(siginfo_t* info, os_context_t* context)
{
    struct thread* th = get_sb_vm_thread();
    struct fiber_context* fc = th ? th->fiber_context : 0;
    if (!fc || info->si_code != SI_KERNEL) return 0;
    char* sp = (char*)context_sp(context);
    if (fc->return_guard && sp >= (char*)fc->return_guard) {
        settle_zones(th, fc, sp);
    } else if (!(fc->guards & CONTROL_ZONE_OPEN)
               && sp >= control_base(fc) && sp < control_base(fc) + 32*KIB) {
        open_zone(fc, &zones[0]);
        fc->guards |= OPENED_SILENTLY;
        place_return_guard(fc, sp);
    } else if ((fc->guards & CONTROL_ZONE_OPEN) && !(fc->guards & CRITICAL_ZONE_OPEN)
               && sp >= control_zone(fc)) {
        open_zone(fc, &zones[1]);
    } else return 0;
    restart_breakpoint(context);
    if (th->stop_signal_sent) pthread_kill(pthread_self(), SIG_STOP_FOR_GC);
    static const int lost[] = { SIGURG, SIGALRM, SIGCHLD };
    for (int i = 0; i < 3; ++i) pthread_kill(pthread_self(), lost[i]);
    return 1;
}

/* Called instead of handle_guard_page_triggered(), which computes its
 * addresses from the geometry of a thread's stacks. */
bool fiber_handle_fault(struct thread* th, os_context_t* context, os_vm_address_t addr)
{
    struct fiber_context* fc = th->fiber_context;
    const struct zone* z = 0;
    for (unsigned i = 0; i < sizeof zones / sizeof *zones; ++i)
        if (within(addr, zones[i].where(fc), zone_size(&zones[i]))
            && !(fc->guards & zones[i].open)) z = &zones[i];
    if (fc->return_guard && within(addr, (char*)fc->return_guard, HARD_GUARD_SIZE))
        return_guard_hit(th, fc, context);
    else if (within(addr, (char*)undefined_alien_address, os_vm_page_size))
        arrange_return_to_lisp_function
            (context, StaticSymbolFunction(UNDEFINED_ALIEN_VARIABLE_ERROR));
    else if (!z && within(addr, low_hard_guard(fc), HARD_GUARD_SIZE))
        end_fiber(th, fc, context);
    else if (!z) return 0;
    else switch (z->open) {
        case CONTROL_ZONE_OPEN: control_stack_overflow(th, fc, context); break;
        case CRITICAL_ZONE_OPEN: control_zone_overflow(th, fc, context); break;
        case BINDING_ZONE_OPEN:
            side_stack_overflow(fc, context, z, StaticSymbolFunction(BINDING_STACK_EXHAUSTED_ERROR));
            break;
        case ALIEN_ZONE_OPEN:
            side_stack_overflow(fc, context, z, StaticSymbolFunction(ALIEN_STACK_EXHAUSTED_ERROR));
            break;
        default: side_zone_overflow(th, fc, context, z);
    }
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
    if (interrupt_handler_pending_p()) return 0;
    thread_sigmask(SIG_SETMASK, outer, &old);
    memcpy(&th->fiber_context->signal_mask, &old, sizeof th->fiber_context->signal_mask);
    return 1;
}

/* The fiber goes on in its handler. */
void fiber_restore_signal_mask()
{
    sigset_t mask;
    sigemptyset(&mask);
    memcpy(&mask, &get_sb_vm_thread()->fiber_context->signal_mask, sizeof (lispobj));
    thread_sigmask(SIG_SETMASK, &mask, 0);
}

bool fiber_overflow_pending(struct thread* th)
{
    struct fiber_context* fc = th->fiber_context;
    return fc && (fc->guards & (OVERFLOW_PENDING | LOSS_PENDING));
}

/* The last thing that a trap for pending interrupts does. See the head of
 * assembly/x86-64/fiber.lisp for the first case; the second is an overflow of which the
 * fiber could not be told inside pseudo-atomic. */
void fiber_settle_pending(struct thread* th, os_context_t* context)
{
    if (get_pseudo_atomic_interrupted(th) && thread_interrupt_data(th).pending_handler
        && read_TLS(INTERRUPTS_ENABLED, th) == NIL) {
        write_TLS(INTERRUPT_PENDING, LISP_T, th);
        clear_pseudo_atomic_interrupted(th);
    }
    struct fiber_context* fc = th->fiber_context;
    if (fc && (fc->guards & LOSS_PENDING)) {
        clear_pseudo_atomic_interrupted(th);
        end_fiber(th, fc, context);
    } else if (fc && (fc->guards & OVERFLOW_PENDING)) {
        fc->guards &= ~OVERFLOW_PENDING;
        clear_pseudo_atomic_interrupted(th);
        if (!(fc->guards & CONTROL_ZONE_OPEN)) { // for the handler
            open_zone(fc, &zones[0]);
            place_return_guard(fc, (char*)context_sp(context));
        }
        signal_exhaustion(context, StaticSymbolFunction(CONTROL_STACK_EXHAUSTED_ERROR));
    }
}

#endif
