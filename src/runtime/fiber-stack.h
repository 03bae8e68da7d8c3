/* What the files about stacks share: of what a stack consists, and what is above what. */

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
 * has touched. A reserve is opened in steps of 16 KiB, from the stack on. A fiber that runs into
 * it is notified, and has four steps, or one, for handling that; a fiber that uses these up too is
 * ended. Inside of a critical section no fiber can be notified or ended: just as much is opened as
 * the section needs, and the fiber is notified when it is found in the reserve next.
 */
#define KIB 1024
#define HARD_GUARD_SIZE ((uword_t)os_reported_page_size)
#define STEP_SIZE (16*KIB)
#define CONTROL_RESERVE_SIZE (192*KIB)
#define SIDE_RESERVE_SIZE (32*KIB)
#define LOW_GUARD_SIZE (HARD_GUARD_SIZE + CONTROL_RESERVE_SIZE)
#define MIDDLE_GUARD_SIZE (2*SIDE_RESERVE_SIZE + HARD_GUARD_SIZE)
#define FIBER_ALIEN_STACK_SIZE (256*KIB)

// Frames up to this size cannot skip the return guard on the way down.
#define RETURN_GUARD_SIZE (16*KIB)
// What the kernel and the runtime need to handle a signal, the collector apart.
#define SIGNAL_ROOM (32*KIB)

enum { CONTROL, BINDING, ALIEN, N_STACKS };

/* What context->guards consists of. */
struct guards {
    uint8_t open[N_STACKS];       // steps of the reserve
    uint8_t notified : N_STACKS;  // whether the fiber knows, a bit for each stack
    uint8_t pending : 1;          // the control stack overflowed, and the fiber must be notified
    uint8_t reporting : 1;        // the fiber reports a failure, and has what is open for that
    uint8_t cut_off : 1;          // some frame was left where the control stack ended
    uint8_t lent : 1;             // foreign code opened some step
    uint32_t notified_at : 31;    // handlers run below this offset into the control stack
    uint32_t lent_masked : 1;     // with interrupts off
};
_Static_assert(sizeof (struct guards) == sizeof (lispobj), "struct guards is one slot");

/* Geometry. The context knows its bounds, all else follows from them. */

static inline char* control_base(struct fiber_context* fc)
{
    return (char*)fc->control_stack_start + CONTROL_RESERVE_SIZE;
}

static inline char* alien_base(struct fiber_context* fc)
{
    return (char*)fc->alien_stack_start + SIDE_RESERVE_SIZE;
}

static inline char* binding_end(struct fiber_context* fc)
{
    return alien_base(fc) - MIDDLE_GUARD_SIZE;
}

static inline char* context_page(struct fiber_context* fc)
{
    return (char*)((uword_t)fc & -HARD_GUARD_SIZE);
}

static inline bool within(os_vm_address_t addr, char* start, uword_t size)
{
    return (char*)addr >= start && (char*)addr < start + size;
}

static inline struct guards* guards_of(struct fiber_context* fc)
{
    return (struct guards*)&fc->guards;
}

static inline int n_steps(int stack)
{
    return (stack == CONTROL ? CONTROL_RESERVE_SIZE : SIDE_RESERVE_SIZE) / STEP_SIZE;
}

/* Where the reserve of a stack begins. */
static inline char* stack_limit(struct fiber_context* fc, int stack)
{
    return stack == CONTROL ? control_base(fc)
        : stack == BINDING ? binding_end(fc)
        : alien_base(fc);
}

/* The steps FROM to TO of a reserve, counted from the stack on. */
static inline char* steps_start(struct fiber_context* fc, int stack, int from, int to)
{
    return stack_limit(fc, stack) + (stack == BINDING ? from : -to) * STEP_SIZE;
}

/* As much of the address space as the stacks of one size have together, or some of them. */
#define FIBER_SLOTS_PER_ARENA 1024
#define FIBER_MAX_ARENAS 16384
#define FIBER_ARENA_BYTES ((uword_t)512*KIB*KIB)
#define FIBER_ARENA_SLACK ((uword_t)56*KIB) // see fiber-card.c

struct fiber_arena {
    char* base;
    uword_t stride;
    uword_t control_size;         // usable bytes of control stack, reserve excluded
    uint32_t n_slots;
    uint32_t n_carved;            // slots from here on are cold
    unsigned char* state;
    struct fiber_positions* positions; // or 0: its cards may be the heap's
    unsigned char* marked;        // a byte for each slot: is one of its cards marked?
    uint32_t shift;               // see fiber-card.c
    bool looked_at;               // by this collection
    // what fiber-free.c keeps
    struct fiber_stack_class* class;
    struct fiber_arena *previous, *next; // of the same class
    uint32_t n_warm, n_cold;
    uint64_t warm[FIBER_SLOTS_PER_ARENA/64], cold[FIBER_SLOTS_PER_ARENA/64];
};

extern struct fiber_arena fiber_arenas[FIBER_MAX_ARENAS];
extern volatile uint32_t fiber_n_arenas;

/* Contexts lie in the last KiB of a page, whose rest is for the frames of an idle fiber. */
enum { CONTEXT_PLACES = 6, CONTEXT_PLACE_SIZE = 64 };
_Static_assert(sizeof (struct fiber_context) + (CONTEXT_PLACES - 1) * CONTEXT_PLACE_SIZE <= KIB,
               "a context ends with its page at the latest");

/* The context of a slot. Its offset in the page varies from slot to slot, for the
 * sake of the caches: all first lines at one offset would share 12 lines. */
static inline struct fiber_context* fiber_slot_context(struct fiber_arena* a, uint32_t i)
{
    char* boundary = a->base + i * a->stride + LOW_GUARD_SIZE + a->control_size;
    return (struct fiber_context*)(boundary - KIB + i % CONTEXT_PLACES * CONTEXT_PLACE_SIZE);
}

static inline struct fiber_arena* fiber_arena_at(int index)
{
    return &fiber_arenas[index / FIBER_SLOTS_PER_ARENA];
}

static inline struct fiber_context* fiber_context_of(int index)
{
    return fiber_slot_context(fiber_arena_at(index), index % FIBER_SLOTS_PER_ARENA);
}

/* All stacks of one size. */
struct fiber_stack_class {
    uword_t control_size;         // usable bytes of control stack, reserve excluded
    struct fiber_arena *last, *lowest_warm, *highest_warm, *lowest_cold;
    uword_t n_warm;
    uword_t memory_of_one;        // bytes, the mean of some that were measured
};

/* A carrier's own context, and the stacks that it keeps for itself, guards up, so that carriers
 * which start and end fibers do not meet at the lock. */
struct fiber_carrier {
    struct fiber_context context; // first, since it is what thread->carrier_context points to
    unsigned char state;
    struct fiber_context* cached;
    int n_cached;
    unsigned int n_unmeasured, interval; // see sample() in fiber-stack.c
    sigset_t signal_mask;         // when no handler runs
};

/*
 * The files, each of which calls those above it only:
 */

/* fiber-mapping.c: make pages inaccessible or accessible again. 0, or -1 and errno. */
extern int fiber_raise_guard(char* where, uword_t size);
extern int fiber_lower_guard(char* where, uword_t size);

/* What guards cost. */
extern void fiber_prepare_guards(char* page);
extern bool fiber_guards_are_mappings(void);
extern bool fiber_nearly_no_mappings(void);
extern sword_t fiber_mappings_exhausted(void);
extern bool fiber_take_stack_guards(void);
extern void fiber_give_stack_guards_back(void);
extern bool fiber_take_return_guard(void);
extern void fiber_give_return_guard_back(void);

/* fiber-reserve.c: open steps of a reserve, close what has been left, watch for the return. */
extern void fiber_open_steps(struct fiber_context*, int stack, int n);
extern void fiber_limit_open_steps(struct fiber_context*, int n);
extern bool fiber_may_use_reserve(struct fiber_context*, char* sp);
extern bool fiber_close_left(struct thread*, struct fiber_context*, char* sp);
extern void fiber_close_all_reserves(struct fiber_context*);
extern void fiber_settle_reserves(struct thread*, struct fiber_context*, char* sp);
extern void fiber_set_return_guard(struct fiber_context*, char* page);
extern void fiber_place_return_guard(struct fiber_context*, char* sp);
extern void fiber_drop_return_guard(struct fiber_context*);
extern uword_t fiber_return_guard_size(struct fiber_context*);

/* fiber-card.c: where arenas lie, and which of their stacks were written by others. */
extern char* fiber_place_beside_heap(uword_t size);
extern void fiber_find_positions(struct fiber_arena*);
extern void fiber_test_positions(void);
extern void fiber_note_depth(struct fiber_arena*, uint32_t i, char* sp);
extern void fiber_unmark_positions(void);

/* fiber-arena.c: of what slots consist, and which slot is where. */
extern struct fiber_arena* fiber_add_arena(uword_t control_size);
extern void fiber_lay_out_slot(struct fiber_arena*, uint32_t i);
extern char* fiber_low_guard(struct fiber_arena*, uint32_t i);
extern char* fiber_middle_guard(struct fiber_arena*, uint32_t i);
extern int fiber_index_at(char* addr);
extern struct fiber_context* fiber_context_at(char* addr);

/* fiber-free.c: which stacks are free, and which of these have memory. */
extern uword_t fiber_round_stack_size(uword_t);
extern struct fiber_stack_class* fiber_find_stack_class(uword_t control_size);
extern void fiber_put_warm(int index);
extern void fiber_put_cold(int index);
extern int fiber_take_warm(struct fiber_stack_class*);
extern int fiber_take_cold(struct fiber_stack_class*);
extern uword_t fiber_surplus(struct fiber_stack_class*, uword_t bytes);
extern bool fiber_release_one(void);

/* fiber-roots.c: what the collector need not look up on a stack again. */
struct fiber_roots { struct chunk* chunk; uword_t n_words; };
extern void fiber_drop_roots(void);
extern bool fiber_keep_root(lispobj);
extern struct fiber_roots fiber_kept_roots(void);
extern void fiber_visit_roots(struct fiber_roots, fiber_root_visitor*);

/* fiber-idle.c: give back what lies below the stack pointers of stacks that do not run. */
extern void fiber_note_not_idle(struct fiber_arena*, uint32_t i);
extern void fiber_visit_idle(int oldest_collected);

/* fiber-gc.c: call CALL with each context whose stack is suspended, a carrier's included. */
extern void fiber_each_suspended(void (*call)(struct fiber_context*, void*), void* arg);

/* fiber-x86-64.c */
extern unsigned int fiber_floating_point_modes(void);

/* fiber-carrier.c */
extern struct fiber_carrier* fiber_this_carrier(void);

/* fiber-overflow.c: room for a signal, or a handler, on the fiber's stack. */
extern bool fiber_make_signal_room(struct thread*, struct fiber_context*, os_context_t*);
extern void fiber_make_handler_room(os_context_t*);

#endif
