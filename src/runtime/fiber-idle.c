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
 * likewise. The collector gives them back when it has found the stack not to have run in two visits.
 * It visits so many stacks in a collection, and gives so many back: one that comes to life needs
 * new pages, and many may do so between two collections. A collection of an older generation visits
 * all.
 *
 * What is true when nobody is inside: idle[i] of an arena tells in how many visits slot i was OLD
 * since it was scanned having run; DONE if its pages have been given back since.
 */
enum { IDLE_ENOUGH = 2, DONE = 3, MOST_VISITED = 4096, MOST_GIVEN_BACK = 64 };
enum { NURSERY_GENERATIONS = 2 };

static unsigned char idle[FIBER_MAX_ARENAS][FIBER_SLOTS_PER_ARENA];
static uint32_t next_arena, next_slot; // to be visited

/* The world is stopped, in what follows. */

void fiber_note_not_idle(struct fiber_arena* a, uint32_t i) { idle[a - fiber_arenas][i] = 0; }

static void give_back(char* from, char* to)
{
    from = (char*)ALIGN_UP((uword_t)from, HARD_GUARD_SIZE);
    to = (char*)ALIGN_DOWN((uword_t)to, HARD_GUARD_SIZE);
    if (from < to) madvise(from, to - from, MADV_DONTNEED);
}

/* WITH-ALIEN binds it, so it is what the newest of such bindings holds, see assembly/x86-64/fiber.lisp.
 */
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
static bool visit(struct fiber_arena* a, uint32_t i, int enough)
{
    unsigned char* visits = &idle[a - fiber_arenas][i];
    if (!(a->state[i] & FIBER_STACK_OLD) || *visits == DONE || ++*visits < enough) return 0;
    give_dead_pages_back(fiber_slot_context(a, i));
    *visits = DONE;
    return 1;
}

/* Visit slots of the next arena, as long as MOST_VISITED and *MOST allow. How many were visited? */
static uint32_t visit_arena(uint32_t most_visited, uint32_t* most, int enough)
{
    if (next_arena >= fiber_n_arenas) next_arena = 0;
    struct fiber_arena* a = &fiber_arenas[next_arena];
    uint32_t first = next_slot;
    while (next_slot < a->n_carved && next_slot - first < most_visited && *most)
        *most -= visit(a, next_slot++, enough);
    uint32_t n = next_slot - first;
    if (next_slot >= a->n_carved) { ++next_arena; next_slot = 0; }
    return n;
}

void fiber_visit_idle(int oldest_collected)
{
    bool all = oldest_collected >= NURSERY_GENERATIONS;
    uint32_t most_visited = all ? UINT32_MAX : MOST_VISITED, most = all ? UINT32_MAX : MOST_GIVEN_BACK;
    if (all) next_arena = next_slot = 0;
    for (uint32_t n = fiber_n_arenas; n && most_visited && most; --n)
        most_visited -= visit_arena(most_visited, &most, all ? 1 : IDLE_ENOUGH);
}

#endif
