/* What fiber.c and fiber-guard.c both know: what a stack consists of. */

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

#ifndef SBCL_FIBER_STACK_H
#define SBCL_FIBER_STACK_H

#include <stdint.h>
#include "fiber.h"

/*
 * A stack slot, from low to high addresses:
 *
 *     hard guard               one page, never accessible
 *     control reserve          192 KiB, guarded until the control stack overflows
 *     control stack            grows down
 *     struct fiber_context
 *     binding stack            grows up
 *     binding reserve          32 KiB, guarded until the binding stack overflows
 *     hard guard               one page, never accessible
 *     alien reserve            32 KiB, guarded until the alien stack overflows
 *     alien stack              grows down
 *
 * Control and binding stack meet around the context, in the one page that an idle fiber
 * has touched. A reserve is opened in steps of 16 KiB, from the stack on. Who runs into it is
 * told, and has four steps, or one, for handling that; who uses them up too is ended. Inside of
 * a critical section nothing can be told or ended: just as much is opened as it needs, and the
 * fiber is told when it is found in the reserve next.
 */
#define KIB 1024
#define HARD_GUARD_SIZE ((uword_t)os_reported_page_size)
#define STEP_SIZE (16*KIB)
#define CONTROL_RESERVE_SIZE (192*KIB)
#define SIDE_RESERVE_SIZE (32*KIB)
#define LOW_GUARD_SIZE (HARD_GUARD_SIZE + CONTROL_RESERVE_SIZE)
#define MIDDLE_GUARD_SIZE (2*SIDE_RESERVE_SIZE + HARD_GUARD_SIZE)
#define FIBER_ALIEN_STACK_SIZE (256*KIB)

enum { CONTROL, BINDING, ALIEN, N_STACKS };

/* What context->guards consists of. */
struct guards {
    uint8_t open[N_STACKS];       // steps of the reserve
    uint8_t told : N_STACKS;      // whether the fiber knows, a bit for each stack
    uint8_t pending : 1;          // the control stack overflowed, but that could not be told
    uint8_t reporting : 1;        // the fiber reports a failure, and has what is open for that
    uint32_t told_at;             // handlers run below this offset into the control stack
};
_Static_assert(sizeof (struct guards) == sizeof (lispobj), "struct guards is one slot");

/* Geometry. The context knows its bounds, all else follows from them. */

static inline char* control_base(struct fiber_context* fc) { return (char*)fc->control_stack_start + CONTROL_RESERVE_SIZE; }
static inline char* alien_base(struct fiber_context* fc) { return (char*)fc->alien_stack_start + SIDE_RESERVE_SIZE; }
static inline char* binding_end(struct fiber_context* fc) { return alien_base(fc) - MIDDLE_GUARD_SIZE; }
static inline char* context_page(struct fiber_context* fc) { return (char*)((uword_t)fc & -HARD_GUARD_SIZE); }

static inline bool within(os_vm_address_t addr, char* start, uword_t size)
{
    return (char*)addr >= start && (char*)addr < start + size;
}

/* Make pages inaccessible or accessible again. They return 0, or -1 and errno. */
extern int fiber_raise_guard(char* where, uword_t size);
extern int fiber_lower_guard(char* where, uword_t size);

/* A return guard splits a mapping. Is there one for it? */
extern bool fiber_take_return_guard(void);
extern void fiber_give_return_guard_back(void);

/* See fiber-linux.c. */
extern sword_t fiber_mapping_limit(void);
extern sword_t fiber_count_mappings(void);
extern uint64_t fiber_now(void);

extern struct fiber_context* fiber_context_at(char* addr);

/* Close what the fiber that has left the stack may have opened. */
extern void fiber_close_all_reserves(struct fiber_context* fc);

#endif
