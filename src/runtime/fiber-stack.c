/*
 * Stacks of fibers: where they lie, and which are free
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
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "fiber-stack.h"
#include "globals.h"
#include "interr.h"

/*
 * What is true when nobody is inside:
 *  - arenas are only ever added; n_arenas is written last, so that the collector and
 *    fault handlers read the table without a lock;
 *  - state[i] is FREE, or the context of slot i is valid. It becomes ACTIVE by a store of the
 *    thread that prepared the stack, and FREE by one of the carrier that has left it for good. An
 *    active stack is mounted, and then some thread's fiber_context is its context, or suspended.
 *    The switch writes no state: 64 fibers share a line of it, on any carriers;
 *  - a slot that was reserved once is in a list of its class, or among the cached stacks of a
 *    carrier, or a thread prepares it, or a fiber has it;
 *  - its guards are up if and only if its context has a control_stack_start;
 *  - arenas, classes and their lists are changed by functions "with the lock" only: that is a
 *    tiny lock of code/fiber/stack.lisp, whose holder the collector does not stop. If it did, it
 *    would wait for a thread that cannot stop before it has had the lock. No such function calls
 *    malloc(), whose lock is of the other kind.
 */

#define SLOTS_PER_ARENA 1024
#define ARENA_BYTES ((uword_t)512*KIB*KIB)
#define MAX_ARENAS 16384
#define MAX_STACK_CLASSES 64
#define MOST_GUARDED_FREE 1024

struct fiber_arena {
    char* base;
    uword_t stride;
    struct stack_class* class;
    uint32_t n_slots;
    uint32_t n_carved;            // slots from here on were never reserved
    unsigned char* state;
};

/* All stacks of one size. */
struct stack_class {
    uword_t control_size;         // usable bytes of control stack, reserve excluded
    struct fiber_context* free;
    struct fiber_context* bare;   // likewise free, but without guards
    struct fiber_arena* last;     // the only one that may have slots to carve
};

static struct fiber_arena arenas[MAX_ARENAS];
static volatile uint32_t n_arenas;
static struct stack_class stack_classes[MAX_STACK_CLASSES];
static unsigned char states[MAX_ARENAS][SLOTS_PER_ARENA];

/* Free stacks beyond this many give their pages back. */
uword_t fiber_stack_high_water = 16384;
static uword_t n_free_stacks;
static uword_t n_guarded_free_stacks;

/* Powers of two from 64 KiB on, of which there are fewer than MAX_STACK_CLASSES. */
static uword_t round_stack_size(uword_t size)
{
    uword_t rounded = 64*KIB;
    while (rounded < size) rounded *= 2;
    return rounded;
}

static uword_t binding_stack_size(uword_t control_size)
{
    return control_size / 4 < 64*KIB ? 64*KIB : control_size / 4;
}

/* Where arenas lie and at what stride is decided here and nowhere else.
 * An odd number of pages spreads the pages of neighbours over the sets of the TLB, in which
 * strides that are multiples of a power of two would collide. */
static uword_t slot_stride(uword_t control_size)
{
    uword_t page = HARD_GUARD_SIZE;
    uword_t size = LOW_GUARD_SIZE + control_size
        + binding_stack_size(control_size) + MIDDLE_GUARD_SIZE + FIBER_ALIEN_STACK_SIZE;
    uword_t n_pages = (size + page - 1) / page;
    return (n_pages | 1) * page;
}

static char* reserve_arena(uword_t size)
{
    void* base = mmap(0, size, PROT_READ|PROT_WRITE,
                      MAP_PRIVATE|MAP_ANONYMOUS|MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return 0;
    madvise(base, size, MADV_NOHUGEPAGE); // 2 MiB for an idle fiber otherwise
    *(volatile char*)base = 0; // before it is split, so that the kernel can merge all of it again
    return base;
}

/* With the lock. */
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
    a->state = states[n];
    a->base = reserve_arena(a->n_slots * a->stride);
    if (!a->base) return 0;
    fiber_prepare_guards(a->base);
    __atomic_store_n(&n_arenas, n + 1, __ATOMIC_RELEASE);
    return a;
}

/* The context of a slot. Its offset in the page varies from slot to slot, for the
 * sake of the caches: all first lines at one offset would share 12 lines. */
static struct fiber_context* slot_context(struct fiber_arena* a, uint32_t i)
{
    char* boundary = a->base + i * a->stride + LOW_GUARD_SIZE + a->class->control_size;
    return (void*)(boundary - 2*KIB + (i % 8) * 64);
}

/* The two guards of a slot. */
static char* low_guard(struct fiber_arena* a, uint32_t i) { return a->base + i * a->stride; }
static char* middle_guard(struct fiber_arena* a, uint32_t i)
{
    uword_t control_size = a->class->control_size;
    return low_guard(a, i) + LOW_GUARD_SIZE + control_size + binding_stack_size(control_size);
}

static void lower_guards(struct fiber_arena* a, uint32_t i)
{
    fiber_lower_guard(low_guard(a, i), LOW_GUARD_SIZE);
    fiber_lower_guard(middle_guard(a, i), MIDDLE_GUARD_SIZE);
    fiber_give_stack_guards_back();
    slot_context(a, i)->control_stack_start = 0;
}

static int raise_guards(struct fiber_arena* a, uint32_t i)
{
    if (!fiber_take_stack_guards()) return -1;
    if (!fiber_raise_guard(low_guard(a, i), LOW_GUARD_SIZE)
        && !fiber_raise_guard(middle_guard(a, i), MIDDLE_GUARD_SIZE)) return 0;
    lower_guards(a, i);
    return -1;
}

static int carve_slot(struct fiber_arena* a, uint32_t i)
{
    struct fiber_context* fc = slot_context(a, i);
    fc->index = (a - arenas) * SLOTS_PER_ARENA + i; // a slot that has no guards can be put back
    if (raise_guards(a, i)) return -1;
    fc->control_stack_start = (lispobj*)(low_guard(a, i) + HARD_GUARD_SIZE);
    fc->control_stack_end = (lispobj*)fc;
    fc->binding_stack_start = (lispobj*)ALIGN_UP((uword_t)(fc + 1), 16); // for MOVAPS
    fc->alien_stack_start = (lispobj*)(middle_guard(a, i) + MIDDLE_GUARD_SIZE - SIDE_RESERVE_SIZE);
    fc->mounted_as = (lispobj)fc;
    fc->state_cell = &a->state[i];
    return 0;
}

/* The number of the slot that ADDR is in, or -1. */
int fiber_index_at(char* addr)
{
    uint32_t n = __atomic_load_n(&n_arenas, __ATOMIC_ACQUIRE);
    for (struct fiber_arena* a = arenas; a < arenas + n; ++a)
        if (within(addr, a->base, a->n_slots * a->stride))
            return (a - arenas) * SLOTS_PER_ARENA + (addr - a->base) / a->stride;
    return -1;
}

static struct fiber_context* context_of(int index)
{
    return slot_context(&arenas[index / SLOTS_PER_ARENA], index % SLOTS_PER_ARENA);
}

/* The context of the slot that ADDR is in, or 0. */
struct fiber_context* fiber_context_at(char* addr)
{
    int index = fiber_index_at(addr);
    return index < 0 ? 0 : context_of(index);
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
    struct stack_class* class = stack_classes;
    while (class->control_size && class->control_size != control_size) ++class;
    class->control_size = control_size;
    return class;
}

static struct fiber_context* pop(struct fiber_context** list)
{
    struct fiber_context* fc = *list;
    *list = fc->next_free;
    return fc;
}

static void push(struct fiber_context** list, struct fiber_context* fc)
{
    fc->next_free = *list;
    *list = fc;
}

/* A carrier's own context, and the stacks that it keeps for itself, guards up, so that carriers
 * which start and end fibers do not meet at the lock. */
struct carrier {
    struct fiber_context context; // first, since it is what thread->carrier_context points to
    struct fiber_context* cached;
    int n_cached;
};
#define MOST_CACHED 64

static struct carrier* this_carrier()
{
    return (struct carrier*)get_sb_vm_thread()->carrier_context;
}

/* With the lock, as all that follow until make_empty(). */
static struct fiber_context* take_guarded(struct stack_class* class)
{
    --n_free_stacks;
    --n_guarded_free_stacks;
    return pop(&class->free);
}

static void put_stack(struct fiber_context* fc)
{
    struct stack_class* class = arena_of(fc)->class;
    bool guarded = fc->control_stack_start != 0;
    push(guarded ? &class->free : &class->bare, fc);
    ++n_free_stacks;
    n_guarded_free_stacks += guarded;
}

static void keep_cached(struct carrier* c, struct fiber_context* fc)
{
    push(&c->cached, fc);
    ++c->n_cached;
}

/* Take from the free stacks what the next fibers of the same size will need. */
static void add_cached(struct carrier* c, struct stack_class* class)
{
    if (!c || fiber_nearly_no_mappings()) return;
    while (c->n_cached < MOST_CACHED/2 && class->free) keep_cached(c, take_guarded(class));
}

static void free_cached(struct carrier* c, int but)
{
    for (; c->n_cached > but; --c->n_cached) put_stack(pop(&c->cached));
}

/* There are no mappings for guards on a slot without: take those of a free slot of some size. */
static void lower_guards_of_one()
{
    for (struct stack_class* class = stack_classes; class->control_size; ++class)
        if (class->free) {
            struct fiber_context* fc = take_guarded(class);
            lower_guards(arena_of(fc), fc->index % SLOTS_PER_ARENA);
            put_stack(fc);
            return;
        }
}

static int reserve_slot(struct stack_class* class)
{
    struct fiber_arena* a = class->last;
    if (!a || a->n_carved == a->n_slots) a = class->last = add_arena(class);
    if (!a) return -1;
    return (a - arenas) * SLOTS_PER_ARENA + a->n_carved++;
}

/* The number of a slot for CONTROL_SIZE usable bytes of control stack that is the caller's now, or
 * -1 if there is no memory for it. To the collector it is free. */
int fiber_stack_reserve(uword_t control_size)
{
    struct stack_class* class = find_stack_class(round_stack_size(control_size));
    if (class->free) {
        int index = take_guarded(class)->index;
        add_cached(this_carrier(), class);
        return index;
    }
    if (fiber_mappings_exhausted()) lower_guards_of_one();
    if (!class->bare) return reserve_slot(class);
    --n_free_stacks;
    return pop(&class->bare)->index;
}

/* Let others have the slot number INDEX. */
void fiber_stack_put_back(int index)
{
    struct carrier* c = this_carrier();
    if (c) free_cached(c, MOST_CACHED/2);
    put_stack(context_of(index));
}

/* This carrier is about to end. */
void fiber_carrier_free_cached() { free_cached(this_carrier(), 0); }

static struct fiber_context* make_empty(struct fiber_context* fc)
{
    fc->alien_stack_pointer = (lispobj*)slot_end(arena_of(fc), fc);
    fc->binding_stack_pointer = fc->binding_stack_start;
    fc->control_stack_pointer = fc->control_stack_end;
    fc->catch_block = fc->unwind_protect_block = 0;
    fc->base_catch_block = 0;
    fc->signal_context_count = 0;
    return fc;
}

/* A stack with CONTROL_SIZE usable bytes of control stack that this carrier has kept, or 0. */
struct fiber_context* fiber_stack_take_cached(uword_t control_size)
{
    struct carrier* c = this_carrier();
    control_size = round_stack_size(control_size);
    if (!c || !c->cached || arena_of(c->cached)->class->control_size != control_size) return 0;
    --c->n_cached;
    return make_empty(pop(&c->cached));
}

/* The stack in the slot number INDEX, which is the caller's; or 0 if there is no memory or no
 * mapping left for its guards: then put it back. */
struct fiber_context* fiber_stack_prepare(int index)
{
    struct fiber_context* fc = context_of(index);
    if (!fc->control_stack_start
        && carve_slot(&arenas[index / SLOTS_PER_ARENA], index % SLOTS_PER_ARENA)) return 0;
    return make_empty(fc);
}

static bool too_many_guarded()
{
    return fiber_nearly_no_mappings()
        || (fiber_guards_are_mappings() && n_guarded_free_stacks >= MOST_GUARDED_FREE);
}

/* Give back the pages of a stack but the one that holds its context. */
static void release_pages(struct fiber_arena* a, struct fiber_context* fc)
{
    char* above = context_page(fc) + HARD_GUARD_SIZE;
    madvise(control_base(fc), context_page(fc) - control_base(fc), MADV_DONTNEED);
    madvise(above, binding_end(fc) - above, MADV_DONTNEED);
    char* alien = alien_base(fc);
    madvise(alien, slot_end(a, fc) - (uword_t)alien, MADV_DONTNEED);
}

/* The stack belongs to no fiber: its own has ended, and another stack is running. True if this
 * carrier keeps it: else put it back. */
int fiber_stack_retire(struct fiber_context* fc)
{
    struct carrier* c = this_carrier();
    *fc->state_cell = FIBER_STACK_FREE;
    fiber_close_all_reserves(fc);
    bool surplus = n_free_stacks >= fiber_stack_high_water, too_many = too_many_guarded();
    if (surplus) release_pages(arena_of(fc), fc);
    if (too_many) lower_guards(arena_of(fc), fc->index % SLOTS_PER_ARENA);
    if (!c || surplus || too_many || c->n_cached == MOST_CACHED) return 0;
    keep_cached(c, fc);
    return 1;
}

/* Called by the thread that starts the carrier, and can signal that there is no memory: then 0. */
struct carrier* fiber_carrier_make()
{
    struct carrier* c = aligned_alloc(16, ALIGN_UP(sizeof *c, 16));
    if (c) memset(c, 0, sizeof *c);
    return c;
}

/* The context is the carrier's own, kept while the thread is a carrier. */
void fiber_carrier_begin(struct carrier* c)
{
    struct thread* th = get_sb_vm_thread();
    struct fiber_context* fc = &c->context;
    fc->control_stack_start = th->control_stack_start;
    fc->control_stack_end = th->control_stack_end;
    fc->binding_stack_start = th->binding_stack_start;
    fc->alien_stack_start = th->alien_stack_start;
    fc->mutex_owner_id = th->mutex_owner_id;
    unsigned int mxcsr;
    asm ("stmxcsr %0" : "=m" (mxcsr));
    fc->mxcsr = mxcsr & ~0x3F;    // without the accrued exceptions
    th->carrier_context = fc;
}

void fiber_carrier_end()
{
    struct thread* th = get_sb_vm_thread();
    struct carrier* c = this_carrier();
    if (th->fiber_context) lose("a carrier ends while a fiber is mounted");
    th->carrier_context = 0;
    free(c);
}

/* For Lisp, which looks whether there is room for a wait. */
const uword_t fiber_control_reserve = CONTROL_RESERVE_SIZE;

/* Have the state cells of mounted stacks hold STATE. */
static void set_state_of_mounted(int state)
{
    struct thread* th;
    for_each_thread(th)
        if (th->fiber_context) *th->fiber_context->state_cell = state;
}

/* CALL for each context that is suspended. The world is stopped. */
void fiber_each_suspended(void (*call)(struct fiber_context*, void*), void* arg)
{
    struct thread* th;
    for_each_thread(th)
        if (th->fiber_context) call(th->carrier_context, arg);
    set_state_of_mounted(FIBER_STACK_MOUNTED);
    for (uint32_t n = 0; n < n_arenas; ++n) {
        struct fiber_arena* a = &arenas[n];
        for (uint32_t i = 0; i < a->n_carved; ++i)
            if (a->state[i] == FIBER_STACK_ACTIVE) call(slot_context(a, i), arg);
    }
    set_state_of_mounted(FIBER_STACK_ACTIVE);
}

#endif
