/*
 * Stacks that have not run for a while: the pages that they do not need
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

#include <stddef.h>
#include <sys/mman.h>
#include "fiber-stack.h"
#include "gc.h"
#include "thread.h"

/*
 * A fiber that has been deep and waits for long, such as one that serves an idle connection, holds
 * pages on which nothing is alive: the control stack below its stack pointer, and the alien stack
 * likewise. The collector gives them back when it has found the stack not to have run in two
 * visits. It visits so many stacks in a collection, and gives those of so many back: one that comes
 * to life needs new pages, and many may do so between two collections. A collection of an older
 * generation, which takes longer and comes seldom, visits more, and does not wait for a second
 * visit.
 *
 * What is true when nobody is inside: idle[i] of an arena tells in how many visits slot i was OLD
 * since it was scanned having run; DONE if its pages have been given back since.
 */
enum { NURSERY_GENERATIONS = 2, DONE = 3 };
struct budget { uint32_t visits, gifts, enough; };
static const struct budget of_nursery = { 4096, 16, 2 }, of_older = { 65536, 16384, 1 };

static unsigned char idle[FIBER_MAX_ARENAS][FIBER_SLOTS_PER_ARENA];
static uint32_t next_arena, next_slot; // to be visited

/* The world is stopped, in what follows. */

void fiber_note_not_idle(struct fiber_arena* a, uint32_t i) { idle[a - fiber_arenas][i] = 0; }

/* The page below END is the first that a stack which grows down comes to, but for one large frame.
 * To ask costs less than to give nothing back. */
static bool used(char* end)
{
    unsigned char in_memory[2];
    return !mincore(end - 2*HARD_GUARD_SIZE, 2*HARD_GUARD_SIZE, in_memory)
        && (in_memory[0] | in_memory[1]) & 1;
}

/* START is that of a page, with two more below it. */
static void give_back(char* start, char* sp)
{
    char* end = (char*)ALIGN_DOWN((uword_t)sp, HARD_GUARD_SIZE);
    if (start < end && used(end)) madvise(start, end - start, MADV_DONTNEED);
}

/* WITH-ALIEN binds it, so the newest of such bindings has it: the switch exchanges them. */
static char* alien_stack_pointer(struct fiber_context* fc)
{
    struct binding* b = (struct binding*)fc->binding_stack_pointer;
    while (b-- > (struct binding*)fc->binding_stack_start)
        if ((uint32_t)b->symbol == offsetof(struct thread, alien_stack_pointer))
            return (char*)b->value;
    return (char*)fc->alien_stack_pointer;
}

/* With a reserve open, what is where on the stack is known to fiber-reserve.c alone. */
static void give_dead_pages_back(struct fiber_context* fc)
{
    if (fc->guards) return;
    give_back(control_base(fc), (char*)fc->control_stack_pointer);
    give_back(alien_base(fc), alien_stack_pointer(fc));
}

/* Were pages given back? */
static bool visit(struct fiber_arena* a, uint32_t i, uint32_t enough)
{
    unsigned char* visits = &idle[a - fiber_arenas][i];
    if (!(a->state[i] & FIBER_STACK_OLD) || *visits == DONE || ++*visits < enough) return 0;
    give_dead_pages_back(fiber_slot_context(a, i));
    *visits = DONE;
    return 1;
}

static void visit_arena(struct fiber_arena* a, struct budget* b)
{
    for (; next_slot < a->n_carved && b->visits && b->gifts; --b->visits)
        b->gifts -= visit(a, next_slot++, b->enough);
    if (next_slot < a->n_carved) return;
    ++next_arena;
    next_slot = 0;
}

void fiber_visit_idle(int oldest_collected)
{
    struct budget b = oldest_collected < NURSERY_GENERATIONS ? of_nursery : of_older;
    for (uint32_t n = fiber_n_arenas; n && b.visits && b.gifts; --n) {
        if (next_arena >= fiber_n_arenas) next_arena = next_slot = 0;
        visit_arena(&fiber_arenas[next_arena], &b);
    }
}

#endif
