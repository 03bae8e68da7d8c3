/*
 * Guard pages, and the mappings of memory that they cost
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
#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include "fiber-platform.h"
#include "fiber-stack.h"

/*
 * Guards. MADV_GUARD_INSTALL (Linux 6.13) needs no mapping of its own; mprotect
 * needs two mappings for each guard, and a process may have 65,530 by default.
 *
 * Installing a guard destroys what is in the pages, which is right for a reserve: by then
 * all in it is dead. It would be wrong for the return guard, which lies over live frames.
 */
#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#define MADV_GUARD_REMOVE 103
#endif

enum { GUARD_UNKNOWN, GUARD_MADVISE, GUARD_MPROTECT };
int fiber_guard_method = GUARD_UNKNOWN; // may be set before the first fiber, by tests

int fiber_raise_guard(char* where, uword_t size)
{
    return fiber_guard_method == GUARD_MADVISE
        ? madvise(where, size, MADV_GUARD_INSTALL)
        : mprotect(where, size, PROT_NONE);
}

int fiber_lower_guard(char* where, uword_t size)
{
    return fiber_guard_method == GUARD_MADVISE
        ? madvise(where, size, MADV_GUARD_REMOVE)
        : mprotect(where, size, PROT_READ|PROT_WRITE);
}

/* Would a program that reads PAGE be sent a signal? If so, a name there is an EFAULT. */
static bool out_of_bounds(char* page)
{
    return access(page, F_OK) && errno == EFAULT;
}

/* A kernel that imitates Linux, or a filter of system calls, may accept an advice and ignore it. */
static void choose_guard_method(char* page)
{
    if (fiber_guard_method != GUARD_UNKNOWN) return;
    fiber_guard_method = GUARD_MADVISE;
    if (fiber_raise_guard(page, HARD_GUARD_SIZE) || !out_of_bounds(page)
        || fiber_lower_guard(page, HARD_GUARD_SIZE) || out_of_bounds(page))
        fiber_guard_method = GUARD_MPROTECT;
}

/*
 * Mappings. Once the process has no more, the collector, make-thread and run-program fail. So
 *  - fiber_guard_mappings counts those that guards made by mprotect have split off, from before
 *    they do so: four for a stack whose guards are up, two for a return guard. The steps of a
 *    reserve that is open are part of the stack's mapping;
 *  - for stacks it stays below mapping_budget: what the kernel allows less what others have
 *    (libraries, threads, arenas) and what they may get while nobody counts them again;
 *  - free stacks lower their guards if there are many, or the budget is nearly used up.
 * Pieces of an arena are one mapping again when all is accessible, since they have the first
 * page's anon_vma: see place_arena() in fiber-arena.c.
 */
#define MAPPINGS_OF_STACK 4
#define MAPPINGS_OF_RETURN_GUARD 2
#define MAPPINGS_FOR_OTHERS 4096

sword_t fiber_guard_mappings; // tests look at it
static sword_t mapping_budget, mapping_limit;

static bool take_mappings(int n, sword_t beyond_budget)
{
    sword_t used = __atomic_add_fetch(&fiber_guard_mappings, n, __ATOMIC_SEQ_CST);
    if (used <= mapping_budget + beyond_budget) return 1;
    __atomic_sub_fetch(&fiber_guard_mappings, n, __ATOMIC_SEQ_CST);
    return 0;
}

static void give_mappings_back(int n)
{
    __atomic_sub_fetch(&fiber_guard_mappings, n, __ATOMIC_SEQ_CST);
}

static void compute_mapping_budget()
{
    sword_t before = fiber_guard_mappings, count = fiber_count_mappings();
    sword_t guards = fiber_guard_mappings, others = count - guards;
    sword_t limit = fiber_mapping_limit();
    // There was no descriptor to count with, or guards have come and gone meanwhile.
    if (mapping_limit && (!count || labs(guards - before) > MAPPINGS_FOR_OTHERS / 16)) return;
    mapping_limit = limit;
    mapping_budget = limit - (others > 0 ? others : 0)
        - (limit / 4 < MAPPINGS_FOR_OTHERS ? limit / 4 : MAPPINGS_FOR_OTHERS);
}

/* Others may have come or gone, and the limit have been raised. Counting takes some 15 ms if
 * there are 60,000, so it is not done more than once a second, nor as long as there are few. */
static void refresh_mapping_budget()
{
    static uint64_t last;
    static int counting;
    uint64_t now = fiber_now();
    if (fiber_guard_mappings < mapping_budget / 4
        || now - __atomic_load_n(&last, __ATOMIC_RELAXED) < 1000000000) return;
    if (__atomic_exchange_n(&counting, 1, __ATOMIC_SEQ_CST)) return;
    __atomic_store_n(&last, now, __ATOMIC_RELAXED);
    compute_mapping_budget();
    __atomic_store_n(&counting, 0, __ATOMIC_SEQ_CST);
}

/* Does a guard cost mappings? */
bool fiber_guards_are_mappings() { return fiber_guard_method == GUARD_MPROTECT; }

/* Called before anything is guarded. PAGE may be used for a trial. */
void fiber_prepare_guards(char* page)
{
    choose_guard_method(page);
    if (!mapping_limit) compute_mapping_budget();
}

/* May the guards of one more stack be raised? */
bool fiber_take_stack_guards()
{
    if (!fiber_guards_are_mappings()) return 1;
    refresh_mapping_budget();
    return take_mappings(MAPPINGS_OF_STACK, 0);
}
void fiber_give_stack_guards_back()
{
    if (fiber_guards_are_mappings()) give_mappings_back(MAPPINGS_OF_STACK);
}

/* Return guards may have some of what is left for others: a fiber that has overflowed, and gets no
 * return guard, keeps its reserve open until it parks. */
bool fiber_take_return_guard()
{
    return take_mappings(MAPPINGS_OF_RETURN_GUARD, MAPPINGS_FOR_OTHERS/2);
}
void fiber_give_return_guard_back() { give_mappings_back(MAPPINGS_OF_RETURN_GUARD); }

bool fiber_nearly_no_mappings()
{
    return fiber_guards_are_mappings()
        && fiber_guard_mappings > mapping_budget - mapping_budget / 16;
}

/* For Lisp: how many mappings there may be, if that is why there is no stack, else 0. */
sword_t fiber_mappings_exhausted()
{
    return fiber_guards_are_mappings()
        && fiber_guard_mappings + MAPPINGS_OF_STACK > mapping_budget ? mapping_limit : 0;
}

#endif
