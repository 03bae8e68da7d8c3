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
 *  - a slot that was reserved once is in a list of its class, or among the cached stacks of a
 *    carrier, or a thread prepares it, or a fiber has it;
 *  - its guards are up if and only if its context has a control_stack_start;
 *  - arenas, classes and their lists are changed by functions "with the lock" only: that is a
 *    tiny lock of code/fiber/stack.lisp, whose holder the collector does not stop. If it did, it
 *    would wait for a thread that cannot stop before it has had the lock. No such function calls
 *    malloc(), whose lock is of the other kind.
 */

#define MAX_STACK_CLASSES 64
#define MOST_GUARDED_FREE 1024
#define MOST_CACHED 64            // of a carrier

/* All stacks of one size. */
struct fiber_stack_class {
    uword_t control_size;         // usable bytes of control stack, reserve excluded
    struct fiber_context* free;
    struct fiber_context* bare;   // likewise free, but without guards
    struct fiber_arena* last;     // the only one that may have slots to carve
};

static struct fiber_stack_class stack_classes[MAX_STACK_CLASSES];

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

static void lower_guards(struct fiber_arena* a, uint32_t i)
{
    fiber_lower_guard(fiber_low_guard(a, i), LOW_GUARD_SIZE);
    fiber_lower_guard(fiber_middle_guard(a, i), MIDDLE_GUARD_SIZE);
    fiber_give_stack_guards_back();
    fiber_slot_context(a, i)->control_stack_start = 0;
}

static int raise_guards(struct fiber_arena* a, uint32_t i)
{
    if (!fiber_take_stack_guards()) return -1;
    if (!fiber_raise_guard(fiber_low_guard(a, i), LOW_GUARD_SIZE)
        && !fiber_raise_guard(fiber_middle_guard(a, i), MIDDLE_GUARD_SIZE)) return 0;
    lower_guards(a, i);
    return -1;
}

static int carve_slot(int index)
{
    struct fiber_arena* a = &fiber_arenas[index / FIBER_SLOTS_PER_ARENA];
    uint32_t i = index % FIBER_SLOTS_PER_ARENA;
    fiber_slot_context(a, i)->index = index; // a slot that has no guards can be put back
    if (raise_guards(a, i)) return -1;
    fiber_lay_out_slot(a, i);
    return 0;
}

static struct fiber_arena* arena_of(struct fiber_context* fc)
{
    return &fiber_arenas[fc->index / FIBER_SLOTS_PER_ARENA];
}

static uword_t slot_end(struct fiber_arena* a, struct fiber_context* fc)
{
    uint32_t i = fc->index % FIBER_SLOTS_PER_ARENA;
    return (uword_t)a->base + (i + 1) * a->stride;
}

static struct fiber_stack_class* find_stack_class(uword_t control_size)
{
    struct fiber_stack_class* class = stack_classes;
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

/* With the lock, as all that follow until make_empty(). */
static struct fiber_context* take_guarded(struct fiber_stack_class* class)
{
    --n_free_stacks;
    --n_guarded_free_stacks;
    return pop(&class->free);
}

static void put_stack(struct fiber_context* fc)
{
    struct fiber_stack_class* class = arena_of(fc)->class;
    bool guarded = fc->control_stack_start != 0;
    push(guarded ? &class->free : &class->bare, fc);
    ++n_free_stacks;
    n_guarded_free_stacks += guarded;
}

static void keep_cached(struct fiber_carrier* c, struct fiber_context* fc)
{
    push(&c->cached, fc);
    ++c->n_cached;
}

/* Take from the free stacks what the next fibers of the same size will need. */
static void add_cached(struct fiber_carrier* c, struct fiber_stack_class* class)
{
    if (!c || fiber_nearly_no_mappings()) return;
    while (c->n_cached < MOST_CACHED/2 && class->free) keep_cached(c, take_guarded(class));
}

static void free_cached(struct fiber_carrier* c, int but)
{
    for (; c->n_cached > but; --c->n_cached) put_stack(pop(&c->cached));
}

/* There are no mappings for guards on a slot without: take those of a free slot of some size. */
static void lower_guards_of_one()
{
    for (struct fiber_stack_class* class = stack_classes; class->control_size; ++class)
        if (class->free) {
            struct fiber_context* fc = take_guarded(class);
            lower_guards(arena_of(fc), fc->index % FIBER_SLOTS_PER_ARENA);
            put_stack(fc);
            return;
        }
}

static int reserve_slot(struct fiber_stack_class* class)
{
    struct fiber_arena* a = class->last;
    if (!a || a->n_carved == a->n_slots) {
        a = class->last = fiber_add_arena(class->control_size);
        if (!a) return -1;
        a->class = class;
        fiber_prepare_guards(a->base);
    }
    return (a - fiber_arenas) * FIBER_SLOTS_PER_ARENA + a->n_carved++;
}

/* The number of a slot for CONTROL_SIZE usable bytes of control stack that is the caller's now, or
 * -1 if there is no memory for it. To the collector it is free. */
int fiber_stack_reserve(uword_t control_size)
{
    struct fiber_stack_class* class = find_stack_class(round_stack_size(control_size));
    if (class->free) {
        int index = take_guarded(class)->index;
        add_cached(fiber_this_carrier(), class);
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
    struct fiber_carrier* c = fiber_this_carrier();
    if (c) free_cached(c, MOST_CACHED/2);
    put_stack(fiber_context_of(index));
}

/* This carrier is about to end. */
void fiber_carrier_free_cached() { free_cached(fiber_this_carrier(), 0); }

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
    struct fiber_carrier* c = fiber_this_carrier();
    control_size = round_stack_size(control_size);
    if (!c || !c->cached || arena_of(c->cached)->class->control_size != control_size) return 0;
    --c->n_cached;
    return make_empty(pop(&c->cached));
}

/* The stack in the slot number INDEX, which is the caller's; or 0 if there is no memory or no
 * mapping left for its guards: then put it back. */
struct fiber_context* fiber_stack_prepare(int index)
{
    struct fiber_context* fc = fiber_context_of(index);
    if (!fc->control_stack_start && carve_slot(index)) return 0;
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
    struct fiber_carrier* c = fiber_this_carrier();
    *fc->state_cell = FIBER_STACK_FREE;
    fiber_close_all_reserves(fc);
    bool surplus = n_free_stacks >= fiber_stack_high_water, too_many = too_many_guarded();
    if (surplus) release_pages(arena_of(fc), fc);
    if (too_many) lower_guards(arena_of(fc), fc->index % FIBER_SLOTS_PER_ARENA);
    if (!c || surplus || too_many || c->n_cached == MOST_CACHED) return 0;
    keep_cached(c, fc);
    return 1;
}

#endif
