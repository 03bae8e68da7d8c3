/*
 * Stacks that no fiber has: which are free, and how their memory comes back
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
#include <sys/mman.h>
#include "fiber-stack.h"
#include "globals.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

/*
 * A slot is *cold* when it has no memory, no guards and no page tables, as when its arena was made,
 * and its context holds nothing. A stack that a fiber has left is *warm*: it keeps what it has for
 * the next one, which saves ten times what it costs to begin a fiber.
 *
 * What is true when nobody is inside:
 *  - a slot is cold or warm, as one of the bitmaps of its arena says, or one of the cached stacks
 *    of a carrier, which are warm; or a thread prepares it, or gives its memory back, or a fiber
 *    has it;
 *  - a warm one has its guards up, and its context is valid;
 *  - no arena before lowest_warm of its class has a warm slot, and none behind highest_warm; no
 *    arena before lowest_cold has a cold one. The lowest are taken first, the highest give their
 *    memory back: so that what is used is together, and what is not is whole arenas;
 *  - arenas, classes and bitmaps are changed by functions "with the lock" only: that is a tiny lock
 *    of code/fiber/stack.lisp, whose holder the collector does not stop. If it did, it would wait
 *    for a thread that cannot stop before it has had the lock. No such function calls malloc(),
 *    whose lock is of the other kind.
 */

#define MAX_STACK_CLASSES 64
#define MOST_GUARDED_WARM 1024

static struct fiber_stack_class stack_classes[MAX_STACK_CLASSES];

/* Powers of two from 64 KiB on, of which there are fewer than MAX_STACK_CLASSES. */
uword_t fiber_round_stack_size(uword_t size)
{
    uword_t rounded = 64*KIB;
    while (rounded < size) rounded *= 2;
    return rounded;
}

struct fiber_stack_class* fiber_find_stack_class(uword_t control_size)
{
    struct fiber_stack_class* class = stack_classes;
    while (class->control_size && class->control_size != control_size) ++class;
    if (!class->control_size) class->memory_of_one = 2*HARD_GUARD_SIZE;
    class->control_size = control_size;
    return class;
}

static int index_of(struct fiber_arena* a, uint32_t i)
{
    return (a - fiber_arenas) * FIBER_SLOTS_PER_ARENA + i;
}

/*
 * Bitmaps
 */
static inline bool bit(uint64_t* bits, uint32_t i) { return bits[i / 64] >> i % 64 & 1; }
static inline void set_bit(uint64_t* bits, uint32_t i) { bits[i / 64] |= (uint64_t)1 << i % 64; }
static inline void clear_bit(uint64_t* bits, uint32_t i)
{
    bits[i / 64] &= ~((uint64_t)1 << i % 64);
}

/* There is one. */
static uint32_t lowest_bit(uint64_t* bits)
{
    uint32_t k = 0;
    while (!bits[k]) ++k;
    return k * 64 + __builtin_ctzll(bits[k]);
}

static uint32_t highest_bit(uint64_t* bits)
{
    uint32_t k = FIBER_SLOTS_PER_ARENA/64 - 1;
    while (!bits[k]) --k;
    return k * 64 + 63 - __builtin_clzll(bits[k]);
}

/*
 * Warm and cold slots. With the lock, unless they say otherwise.
 */
void fiber_put_warm(int index)
{
    struct fiber_arena* a = fiber_arena_at(index);
    struct fiber_stack_class* class = a->class;
    set_bit(a->warm, index % FIBER_SLOTS_PER_ARENA);
    ++a->n_warm;
    ++class->n_warm;
    if (!class->lowest_warm || a < class->lowest_warm) class->lowest_warm = a;
    if (!class->highest_warm || a > class->highest_warm) class->highest_warm = a;
}

static void remove_warm(struct fiber_arena* a, uint32_t i)
{
    clear_bit(a->warm, i);
    --a->n_warm;
    --a->class->n_warm;
}

int fiber_take_warm(struct fiber_stack_class* class)
{
    struct fiber_arena* a = class->lowest_warm;
    while (a && !a->n_warm) a = a->next;
    class->lowest_warm = a;
    if (!a) return -1;
    uint32_t i = lowest_bit(a->warm);
    remove_warm(a, i);
    return index_of(a, i);
}

void fiber_put_cold(int index)
{
    struct fiber_arena* a = fiber_arena_at(index);
    set_bit(a->cold, index % FIBER_SLOTS_PER_ARENA);
    ++a->n_cold;
    if (!a->class->lowest_cold || a < a->class->lowest_cold) a->class->lowest_cold = a;
    while (a->n_carved && bit(a->cold, a->n_carved - 1)) --a->n_carved;
}

static void remove_cold(struct fiber_arena* a, uint32_t i)
{
    clear_bit(a->cold, i);
    --a->n_cold;
    if (a->n_carved <= i) a->n_carved = i + 1;
}

static bool grow(struct fiber_stack_class* class)
{
    struct fiber_arena* a = fiber_add_arena(class->control_size);
    if (!a) return 0;
    a->class = class;
    a->previous = class->last;
    if (class->last) class->last->next = a;
    class->last = a;
    for (uint32_t i = 0; i < a->n_slots; ++i) fiber_put_cold(index_of(a, i));
    fiber_prepare_guards(a->base);
    return 1;
}

int fiber_take_cold(struct fiber_stack_class* class)
{
    struct fiber_arena* a = class->lowest_cold;
    while (a && !a->n_cold) a = a->next;
    if (!a && grow(class)) a = class->last;
    class->lowest_cold = a;
    if (!a) return -1;
    uint32_t i = lowest_bit(a->cold);
    remove_cold(a, i);
    return index_of(a, i);
}

/*
 * Memory is given back by runs of slots that are next to each other, of which this thread takes
 * possession for that. A run is told by one word.
 */
typedef uword_t fiber_run;
static fiber_run make_run(int first, uint32_t n, uint32_t n_warm)
{
    return first | (uword_t)n << 32 | (uword_t)n_warm << 48;
}
static int run_first(fiber_run run) { return run & 0xFFFFFFFF; }
static uint32_t run_length(fiber_run run) { return run >> 32 & 0xFFFF; }
static uint32_t run_warm(fiber_run run) { return run >> 48; }

/* How many warm stacks of CLASS are more than what BYTES are enough for. */
uword_t fiber_surplus(struct fiber_stack_class* class, uword_t bytes)
{
    uword_t n = fiber_nearly_no_mappings() ? 0 : bytes / class->memory_of_one;
    if (fiber_guards_are_mappings() && n > MOST_GUARDED_WARM) n = MOST_GUARDED_WARM;
    return class->n_warm > n ? class->n_warm - n : 0;
}

static bool is_free(struct fiber_arena* a, uint32_t i)
{
    return bit(a->warm, i) || bit(a->cold, i);
}

static void remove_free(struct fiber_arena* a, uint32_t i)
{
    if (bit(a->warm, i)) remove_warm(a, i);
    else remove_cold(a, i);
}

/* The highest run in A, with at most MOST that are warm. Cold ones in between and above cost
 * nothing, and may be what lets a page table go. */
static fiber_run take_run(struct fiber_arena* a, uword_t most)
{
    uint32_t first = highest_bit(a->warm), end = first + 1, n_warm = 1;
    while (end < a->n_slots && bit(a->cold, end)) ++end;
    for (; first > 0 && is_free(a, first - 1); --first) {
        if (!bit(a->warm, first - 1)) continue;
        if (n_warm == most) break;
        ++n_warm;
    }
    for (uint32_t i = first; i < end; ++i) remove_free(a, i);
    return make_run(index_of(a, first), end - first, n_warm);
}

static fiber_run take_run_of_class(struct fiber_stack_class* class, uword_t most)
{
    struct fiber_arena* a = class->highest_warm;
    while (a && !a->n_warm) a = a->previous;
    class->highest_warm = a;
    return a ? take_run(a, most) : 0;
}

/* A run of stacks that are more than BYTES for each class are enough for, or 0. */
fiber_run fiber_trim_take(uword_t bytes)
{
    for (struct fiber_stack_class* class = stack_classes; class->control_size; ++class) {
        uword_t n = fiber_surplus(class, bytes);
        if (n) return take_run_of_class(class, n);
    }
    return 0;
}

enum { RUN_AS_IT_WAS, RUN_RELEASED, RUN_LOST };

/* Before Linux 6.12 a mapping that cannot be replaced, for lack of memory, may have gone. Keep
 * others out of the hole. */
static int after_failure(char* start, uword_t size)
{
    unsigned char in_core;
    if (!mincore(start, HARD_GUARD_SIZE, &in_core) || errno != ENOMEM) return RUN_AS_IT_WAS;
    mmap(start, size, PROT_NONE, MAP_FIXED_NOREPLACE|MAP_PRIVATE|MAP_ANONYMOUS|MAP_NORESERVE,
         -1, 0);
    return RUN_LOST;
}

/* Without the lock. New memory in its place takes pages, guards and page tables away at once. What
 * became of it: there may be no mapping left for doing so. */
int fiber_trim_release(fiber_run run)
{
    struct fiber_arena* a = fiber_arena_at(run_first(run));
    char* start = fiber_low_guard(a, run_first(run) % FIBER_SLOTS_PER_ARENA);
    uword_t size = run_length(run) * a->stride;
    int result = RUN_RELEASED;
    if (mmap(start, size, PROT_READ|PROT_WRITE,
             MAP_FIXED|MAP_PRIVATE|MAP_ANONYMOUS|MAP_NORESERVE, -1, 0) == MAP_FAILED) {
        result = after_failure(start, size);
        if (result == RUN_AS_IT_WAS) return result;
    } else madvise(start, size, MADV_NOHUGEPAGE); // so that it is one mapping with its neighbours
    for (uint32_t n = run_warm(run); n > 0; --n) fiber_give_stack_guards_back();
    return result;
}

/* The slots of RUN, which have been RELEASED or are as they were, are anybody's again; those that
 * have been lost are nobody's. */
void fiber_trim_put(fiber_run run, int released)
{
    if (released == RUN_LOST) return;
    for (int i = run_first(run), end = i + run_length(run); i < end; ++i)
        if (!released && fiber_context_of(i)->control_stack_start) fiber_put_warm(i);
        else fiber_put_cold(i);
}

/* There are no mappings for guards on a slot without: take those of a free slot of some size. False
 * if there is none. */
bool fiber_release_one()
{
    for (struct fiber_stack_class* class = stack_classes; class->control_size; ++class) {
        fiber_run run = take_run_of_class(class, 1);
        if (!run) continue;
        int released = fiber_trim_release(run);
        fiber_trim_put(run, released);
        return released == RUN_RELEASED;
    }
    return 0;
}

#endif
