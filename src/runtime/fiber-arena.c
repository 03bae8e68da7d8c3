/*
 * Arenas: where stacks lie, and of what a slot for one consists
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

/*
 * What is true when nobody is inside:
 *  - arenas are only ever added, by functions "with the lock"; fiber_n_arenas is written last, so
 *    that the collector and fault handlers read the table without one;
 *  - state[i] of an arena is FREE, or the context of slot i is valid.
 *
 * The states of a stack, and who makes each move. Every one is made where the collector cannot stop
 * the thread, or with the world stopped; but for those to FREE, before which the stack is a
 * suspended one that nobody needs.
 *
 *     FREE                     no fiber has it, or one does not begin yet; fiber-free.c knows
 *                              whether it has memory
 *       -> ACTIVE              PREPARE-STACK in code/fiber/stack.lisp, all that is on it being laid
 *                              out
 *     ACTIVE                   it has run since it was scanned last, or may have been written to;
 *                              mounted if it is some thread's fiber_context, else suspended
 *       -> OLD + G             fiber-gc.c, when it has scanned a suspended one: G is the youngest
 *                              generation of what it refers to
 *       -> FREE                fiber_stack_retire(): its carrier has left it for good
 *     OLD + G                  unchanged since then
 *       -> ACTIVE              the switch, which mounts it, and writes nothing if it is ACTIVE:
 *                              64 fibers, on any carriers, share a line of states; who writes to
 *                              it: SET-SYMBOL-VALUE-IN-FIBER, and fiber-gc.c for those that others
 *                              are about to write to
 *     MOUNTED, | SCANNED       while fiber-gc.c looks at all stacks
 */

struct fiber_arena fiber_arenas[FIBER_MAX_ARENAS];
volatile uint32_t fiber_n_arenas;
static unsigned char states[FIBER_MAX_ARENAS][FIBER_SLOTS_PER_ARENA];
static char *lowest, *highest;    // all arenas lie between these

static uword_t binding_stack_size(uword_t control_size)
{
    return control_size / 4 < 64*KIB ? 64*KIB : control_size / 4;
}

/* An odd number of pages spreads the pages of neighbours over the sets of the TLB, in which
 * strides that are multiples of a power of two would collide. */
static uword_t slot_stride(uword_t control_size)
{
    uword_t page = HARD_GUARD_SIZE;
    uword_t size = LOW_GUARD_SIZE + control_size
        + binding_stack_size(control_size) + MIDDLE_GUARD_SIZE + FIBER_ALIEN_STACK_SIZE;
    uword_t n_pages = (size + page - 1) / page;
    return (n_pages | 1) * page;
}

/* Anywhere, if there is no place whose cards are not the heap's: its stacks are never skipped. */
static bool place_arena(struct fiber_arena* a)
{
    uword_t size = a->n_slots * a->stride;
    a->positions = 0;
    a->base = fiber_place_beside_heap(size);
    if (a->base) fiber_find_positions(a);
    else if ((a->base = mmap(0, size, PROT_READ|PROT_WRITE,
                             MAP_PRIVATE|MAP_ANONYMOUS|MAP_NORESERVE, -1, 0)) == MAP_FAILED)
        return 0;
    madvise(a->base, size, MADV_NOHUGEPAGE); // 2 MiB for an idle fiber otherwise
    *(volatile char*)a->base = 0; // before it is split, so that the kernel can merge it again
    return 1;
}

/* With the lock. 0 and errno if there is no memory. */
struct fiber_arena* fiber_add_arena(uword_t control_size)
{
    uint32_t n = fiber_n_arenas;
    if (n == FIBER_MAX_ARENAS) { errno = ENOMEM; return 0; }
    struct fiber_arena* a = &fiber_arenas[n];
    a->control_size = control_size;
    a->stride = slot_stride(control_size);
    uword_t fit = (FIBER_ARENA_BYTES - FIBER_ARENA_SLACK) / a->stride;
    a->n_slots = fit < 1 ? 1 : fit > FIBER_SLOTS_PER_ARENA ? FIBER_SLOTS_PER_ARENA : fit;
    a->n_carved = 0;
    a->state = states[n];
    if (!place_arena(a)) return 0;
    char* end = a->base + a->n_slots * a->stride;
    if (!lowest || a->base < lowest) lowest = a->base;
    if (end > highest) highest = end;
    __atomic_store_n(&fiber_n_arenas, n + 1, __ATOMIC_RELEASE);
    return a;
}

/* The number of the slot that ADDR is in, or -1. */
int fiber_index_at(char* addr)
{
    uint32_t n = __atomic_load_n(&fiber_n_arenas, __ATOMIC_ACQUIRE);
    if (addr < lowest || addr >= highest) return -1;
    for (struct fiber_arena* a = fiber_arenas; a < fiber_arenas + n; ++a)
        if (within(addr, a->base, a->n_slots * a->stride))
            return (a - fiber_arenas) * FIBER_SLOTS_PER_ARENA + (addr - a->base) / a->stride;
    return -1;
}

/* For tests: none, when no fiber is alive and all free stacks have been trimmed. */
uword_t fiber_count_carved()
{
    uword_t n = 0;
    for (uint32_t i = 0; i < fiber_n_arenas; ++i) n += fiber_arenas[i].n_carved;
    return n;
}

/* The context of the slot that ADDR is in, or 0. */
struct fiber_context* fiber_context_at(char* addr)
{
    int index = fiber_index_at(addr);
    return index < 0 ? 0 : fiber_context_of(index);
}

/* The two guards of a slot. */
char* fiber_low_guard(struct fiber_arena* a, uint32_t i) { return a->base + i * a->stride; }
char* fiber_middle_guard(struct fiber_arena* a, uint32_t i)
{
    return fiber_low_guard(a, i) + LOW_GUARD_SIZE + a->control_size
        + binding_stack_size(a->control_size);
}

/* Fill in what never changes in the context of slot I. */
void fiber_lay_out_slot(struct fiber_arena* a, uint32_t i)
{
    struct fiber_context* fc = fiber_slot_context(a, i);
    fc->control_stack_start = (lispobj*)(fiber_low_guard(a, i) + HARD_GUARD_SIZE);
    fc->control_stack_end = (lispobj*)fc;
    fc->binding_stack_start = (lispobj*)ALIGN_UP((uword_t)(fc + 1), 16); // for MOVAPS
    fc->alien_stack_start =
        (lispobj*)(fiber_middle_guard(a, i) + MIDDLE_GUARD_SIZE - SIDE_RESERVE_SIZE);
    fc->mounted_as = (lispobj)fc;
    fc->state_cell = &a->state[i];
}

/* For Lisp, which looks whether there is room for a wait. */
const uword_t fiber_control_reserve = CONTROL_RESERVE_SIZE;

#endif
