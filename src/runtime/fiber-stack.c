/*
 * A stack from when a fiber gets it until it has left it
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

#include <sys/mman.h>
#include "fiber-stack.h"
#include "globals.h"

/*
 * What is true when nobody is inside: the cached stacks of a carrier are warm, and nobody else
 * looks at them. A slot that has been reserved is the caller's until it puts it back.
 */

#define MOST_CACHED 64            // of a carrier
// How many stacks are left unmeasured after one that was measured.
#define SHORTEST_INTERVAL 15
#define LONGEST_INTERVAL 255
#define MOST_SAMPLED_PAGES 256

static struct fiber_arena* arena_of(struct fiber_context* fc) { return fiber_arena_at(fc->index); }

/*
 * Guards
 */
static void lower_guards(struct fiber_arena* a, uint32_t i)
{
    fiber_lower_guard(fiber_low_guard(a, i), LOW_GUARD_SIZE);
    fiber_lower_guard(fiber_middle_guard(a, i), MIDDLE_GUARD_SIZE);
    fiber_give_stack_guards_back();
}

static int raise_guards(struct fiber_arena* a, uint32_t i)
{
    if (!fiber_take_stack_guards()) return -1;
    if (!fiber_raise_guard(fiber_low_guard(a, i), LOW_GUARD_SIZE)
        && !fiber_raise_guard(fiber_middle_guard(a, i), MIDDLE_GUARD_SIZE)) return 0;
    lower_guards(a, i);
    return -1;
}

/*
 * The cached stacks of a carrier
 */
static struct fiber_context* pop_cached(struct fiber_carrier* c)
{
    struct fiber_context* fc = c->cached;
    c->cached = fc->next_free;
    --c->n_cached;
    return fc;
}

static void push_cached(struct fiber_carrier* c, struct fiber_context* fc)
{
    fc->next_free = c->cached;
    c->cached = fc;
    ++c->n_cached;
}

/* Take from the warm stacks what the next fibers of the same size will need. */
static void add_cached(struct fiber_carrier* c, struct fiber_stack_class* class)
{
    if (!c || fiber_nearly_no_mappings()) return;
    while (c->n_cached < MOST_CACHED/2 && class->n_warm)
        push_cached(c, fiber_context_of(fiber_take_warm(class)));
}

static void free_cached(struct fiber_carrier* c, int but)
{
    while (c->n_cached > but) fiber_put_warm(pop_cached(c)->index);
}

/*
 * What Lisp calls
 */

/* The number of a slot for CONTROL_SIZE usable bytes of control stack that is the caller's now, or
 * -1 if there is no memory for it. To the collector it is free. With the lock. */
int fiber_stack_reserve(uword_t control_size)
{
    struct fiber_stack_class* class = fiber_find_stack_class(fiber_round_stack_size(control_size));
    int index = fiber_take_warm(class);
    if (index >= 0) add_cached(fiber_this_carrier(), class);
    else if (fiber_mappings_exhausted()) fiber_release_one();
    return index >= 0 ? index : fiber_take_cold(class);
}

/* A stack was refused for lack of mappings: have there been some that a free one could do without?
 * With the lock. */
int fiber_stack_release_another()
{
    return fiber_guards_are_mappings() && fiber_release_one();
}

/* Let others have the slot number INDEX. With the lock. True if there is more memory now in warm
 * stacks of its class than there should be, which is BYTES, and it is worth while to trim them. */
int fiber_stack_put_back(int index, uword_t bytes)
{
    struct fiber_carrier* c = fiber_this_carrier();
    struct fiber_stack_class* class = fiber_arena_at(index)->class;
    if (c) free_cached(c, MOST_CACHED/2);
    if (fiber_context_of(index)->control_stack_start) fiber_put_warm(index);
    else fiber_put_cold(index);
    return fiber_surplus(class, bytes) > class->n_warm / 8 + MOST_CACHED;
}

/* This carrier keeps none any more. With the lock. */
void fiber_carrier_free_cached() { free_cached(fiber_this_carrier(), 0); }

static struct fiber_context* make_empty(struct fiber_context* fc)
{
    struct fiber_arena* a = arena_of(fc);
    fc->alien_stack_pointer =
        (lispobj*)(fiber_low_guard(a, fc->index % FIBER_SLOTS_PER_ARENA) + a->stride);
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
    struct fiber_carrier* c = fiber_this_carrier();
    control_size = fiber_round_stack_size(control_size);
    if (!c || !c->cached || arena_of(c->cached)->control_size != control_size) return 0;
    return make_empty(pop_cached(c));
}

/* The stack in the slot number INDEX, which is the caller's; or 0 if there is no memory or no
 * mapping left for its guards: then put it back. */
struct fiber_context* fiber_stack_prepare(int index)
{
    struct fiber_arena* a = fiber_arena_at(index);
    uint32_t i = index % FIBER_SLOTS_PER_ARENA;
    struct fiber_context* fc = fiber_context_of(index);
    // Written before anything is read. To read a fresh page maps the page of zeros, and to write it
    // then is a second fault, after which other processors must be interrupted.
    fc->index = index;
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    if (!fc->control_stack_start) {
        if (raise_guards(a, i)) return 0;
        fiber_lay_out_slot(a, i);
    }
    return make_empty(fc);
}

/* How much memory has the control stack of FC? What lies deeper than what is looked at is rare. */
static uword_t memory_of(struct fiber_context* fc)
{
    unsigned char pages[MOST_SAMPLED_PAGES];
    uword_t page = HARD_GUARD_SIZE, size = context_page(fc) - control_base(fc), n = 1;
    if (size > sizeof pages * page) size = sizeof pages * page;
    if (!mincore(context_page(fc) - size, size, pages))
        for (uword_t i = 0; i < size / page; ++i) n += pages[i] & 1;
    return n * page;
}

/* The longer all have the like amount, the fewer are measured. */
static void choose_interval(struct fiber_carrier* c, uword_t mean, uword_t measured)
{
    bool alike = measured >= mean - mean / 8 && measured <= mean + mean / 8;
    c->n_unmeasured = 0;
    c->interval = !alike || c->interval < SHORTEST_INTERVAL ? SHORTEST_INTERVAL
        : c->interval < LONGEST_INTERVAL ? 2 * c->interval + 1
        : LONGEST_INTERVAL;
}

static void sample(struct fiber_carrier* c, struct fiber_context* fc)
{
    uword_t* mean = &arena_of(fc)->class->memory_of_one;
    if (c && c->n_unmeasured++ < c->interval) return;
    uword_t old = __atomic_load_n(mean, __ATOMIC_RELAXED), measured = memory_of(fc);
    __atomic_store_n(mean, old - old / 8 + measured / 8, __ATOMIC_RELAXED);
    if (c) choose_interval(c, old, measured);
}

/* The stack belongs to no fiber: its own has ended, and another stack is running. True if this
 * carrier keeps it: else put it back. */
int fiber_stack_retire(struct fiber_context* fc)
{
    struct fiber_carrier* c = fiber_this_carrier();
    *fc->state_cell = FIBER_STACK_FREE;
    fiber_close_all_reserves(fc);
    sample(c, fc);
    if (!c || c->n_cached == MOST_CACHED || fiber_nearly_no_mappings()) return 0;
    push_cached(c, fc);
    return 1;
}

#endif
