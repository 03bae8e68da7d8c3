/*
 * What the collector sees of the stacks of fibers
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

#include "fiber-stack.h"
#include "gc.h"
#include "globals.h"
#include "immobile-space.h"
#include "interr.h"
#include "search.h"
#include "genesis/symbol.h"

/*
 * The world is stopped, so every stack that is not free is either suspended, or is the current one
 * of some thread, which the collector scans anyway. Of the suspended ones those are scanned that
 *  - have run since they were scanned last, or
 *  - refer to something that is as young as what is collected: what they refer to is pinned, or
 *    older, so it neither moves nor gets younger, or
 *  - may have been written to by others, as a mark on one of their cards tells.
 * The states are in fiber-arena.c, the marks in fiber-card.c. A collection makes a *pass* for each
 * generation, and at its end perhaps one that only marks what is alive. What a stack refers to that
 * was scanned is kept for the passes to come (fiber-roots.c): the stack is not looked at again.
 *
 * What is true when the world is about to be started:
 *  - no state has SCANNED or KEPT, none is MOUNTED, and no roots are kept;
 *  - if a stack is OLD + G, nothing that its live part or its bindings refer to is younger than G,
 *    nor will be, unless it runs or one of its cards gets marked;
 *  - a stack into which some stopped thread, or a parked handler, has a pointer in a register is
 *    ACTIVE: the mark may have been made for a store that is still to come.
 */
enum { OLDEST = 15, SCANNED = 0x40, KEPT = 0x80 };

static inline bool old_p(int state) { return state & FIBER_STACK_OLD; }
static inline int generation_of_state(int state) { return state & OLDEST; }

/*
 * Stacks that are about to be written to
 */
#define MOST_EXPOSED 4096
static int exposed[MOST_EXPOSED], n_exposed;

/* Called for each pointer in a register of what was interrupted, in the first pass. */
void fiber_note_register(lispobj word)
{
    int index = fiber_index_at((char*)word);
    if (index < 0) return;
    if (n_exposed < MOST_EXPOSED) exposed[n_exposed] = index;
    ++n_exposed;
}

static unsigned char* state_of(int index)
{
    return &fiber_arenas[index / FIBER_SLOTS_PER_ARENA].state[index % FIBER_SLOTS_PER_ARENA];
}

static void expose(unsigned char* state)
{
    if (old_p(*state)) *state = FIBER_STACK_ACTIVE | (*state & SCANNED);
}

static void keep_exposed_active()
{
    if (n_exposed <= MOST_EXPOSED) {
        for (int i = 0; i < n_exposed; ++i) expose(state_of(exposed[i]));
        return;
    }
    for (uint32_t n = 0; n < fiber_n_arenas; ++n)
        for (uint32_t i = 0; i < fiber_arenas[n].n_carved; ++i) expose(&fiber_arenas[n].state[i]);
}

/*
 * Generations
 */

/* In which generation something will be that is in GENERATION during a pass. */
static int after_pass(int generation)
{
    if (generation == SCRATCH_GENERATION) return from_space;
    if (generation != from_space) return generation;
    return new_space == SCRATCH_GENERATION ? from_space : new_space;
}

/* The object in which WORD points, or 0. */
static lispobj* immobile_object(lispobj word)
{
    low_page_index_t page = find_fixedobj_page_index((void*)word);
    if (page < 0) return search_immobile_space((void*)word);
    uword_t spacing = fixedobj_page_obj_align(page);
    if (!spacing) return 0;       // the page was never used
    lispobj offset = word & (IMMOBILE_CARD_BYTES - 1);
    lispobj* object = (lispobj*)(word - offset + offset / spacing * spacing);
    return fixnump(*object) ? 0 : object; // free
}

static int generation_of_immobile(lispobj word)
{
    if (find_text_page_index((void*)word) >= 0 && (lispobj*)word < tlsf_mem_start)
        return PSEUDO_STATIC_GENERATION;
    lispobj* object = immobile_object(word);
    return object ? after_pass(immobile_obj_generation(object)) : OLDEST;
}

/* The youngest that what WORD may point to can be after this pass. */
static inline int generation_of(lispobj word)
{
    page_index_t page = find_page_index((void*)word);
    if (page >= 0) return page_words_used(page) ? after_pass(page_table[page].gen) : OLDEST;
    return immobile_space_p(word) ? generation_of_immobile(word) : OLDEST;
}

/*
 * Scanning one stack
 */

struct visitors { fiber_root_visitor *visit, *visit_register; };

struct scan { int youngest; bool kept; };

/* WORD points, or may, to something in GENERATION, which may move in a later pass. */
static inline void found(struct scan* s, lispobj word, int generation)
{
    if (generation >= PSEUDO_STATIC_GENERATION) return;
    if (generation < s->youngest) s->youngest = generation;
    if (s->kept) s->kept = fiber_keep_root(word);
}

/* Visit all that FC's control stack refers to. */
static struct scan NO_SANITIZE_ADDRESS NO_SANITIZE_MEMORY
scan_control_stack(struct fiber_context* fc, struct visitors* v)
{
    extern void visit_context_registers(fiber_root_visitor*, os_context_t*, void*);
    for (uword_t i = 0; i < fc->signal_context_count; ++i)
        visit_context_registers(v->visit_register, (os_context_t*)(&fc->signal_context_0)[i],
                                (void*)1);
    struct scan s = { OLDEST, 1 };
    lispobj start = (lispobj)fc->control_stack_start, end = (lispobj)fc->control_stack_end;
    for (lispobj* p = fc->control_stack_pointer; p < fc->control_stack_end; ++p) {
        lispobj word = *p;
        if (word < BACKEND_PAGE_BYTES || (start <= word && word < end)) continue;
        v->visit(word, 0);
        if (compacting_p()) found(&s, word, generation_of(word));
    }
    return s;
}

extern void scav_binding_stack(lispobj*, lispobj*, void (*)(lispobj));

/* The same for the values of bindings, which have been updated: to objects on pages, perhaps, that
 * nothing is known to be used of yet. */
static struct scan scan_bindings(struct fiber_context* fc)
{
    struct scan s = { OLDEST, 1 };
    for (struct binding* b = (void*)fc->binding_stack_start;
         b < (struct binding*)fc->binding_stack_pointer; ++b)
        if (is_lisp_pointer(b->value))
            found(&s, b->value, after_pass(gc_gen_of(b->value, OLDEST)));
    return s;
}

/*
 * Verification, for tests: nothing that a stack refers to has changed since it was scanned. Words
 * that point nowhere may, since others may write to unboxed arrays on it, which mark no cards.
 */
int fiber_verify_skipping; // set by tests
static uint32_t hashes[FIBER_MAX_ARENAS][FIBER_SLOTS_PER_ARENA];

static void NO_SANITIZE_ADDRESS NO_SANITIZE_MEMORY
add_to_hash(uint32_t* hash, int* youngest, lispobj* from, lispobj* to)
{
    for (lispobj* p = from; p < to; ++p) {
        if (find_page_index((void*)*p) < 0 && !immobile_space_p(*p)) continue;
        *hash = (*hash ^ (uint32_t)(p - from)) * 16777619 ^ (uint32_t)(*p >> 3);
        int g = generation_of(*p);
        if (g < *youngest) *youngest = g;
    }
}

static uint32_t hash_of(struct fiber_context* fc, int* youngest)
{
    uint32_t hash = 2166136261;
    add_to_hash(&hash, youngest, fc->control_stack_pointer, fc->control_stack_end);
    add_to_hash(&hash, youngest, fc->binding_stack_start, fc->binding_stack_pointer);
    return hash;
}

static void keep_hash(struct fiber_arena* a, uint32_t i)
{
    int youngest = OLDEST;
    hashes[a - fiber_arenas][i] = hash_of(fiber_slot_context(a, i), &youngest);
}

static void verify_skipped(struct fiber_arena* a, uint32_t i)
{
    int youngest = OLDEST;
    uint32_t hash = hash_of(fiber_slot_context(a, i), &youngest);
    if (hash != hashes[a - fiber_arenas][i] && youngest <= from_space)
        lose("a fiber's stack at %p was written to, and is not scanned", a->base + i * a->stride);
}

/*
 * Prefetching. Stacks are far apart, and what is live of one is some lines of a page of its own:
 * while one is looked at the context of one that comes later is fetched, and the lines that the
 * context of one in between tells of.
 */
enum { LINE = 64, MOST_LINES = 32, CONTEXT_AHEAD = 24, STACK_AHEAD = 8 };

static inline struct fiber_context* to_prefetch(struct fiber_arena* a, uint32_t i)
{
    return i < a->n_carved && a->state[i] > FIBER_STACK_FREE ? fiber_slot_context(a, i) : 0;
}

// Inline, or GCC finds that these do nothing, and drops the calls.
static inline __attribute__((always_inline)) void prefetch_lines(char* from, char* to)
{
    if (from + MOST_LINES*LINE < to) to = from + MOST_LINES*LINE;
    for (; from < to; from += LINE) __builtin_prefetch(from);
}

static inline __attribute__((always_inline)) void prefetch_beyond(struct fiber_arena* a, uint32_t i)
{
    struct fiber_context* fc = to_prefetch(a, i + CONTEXT_AHEAD);
    if (fc) prefetch_lines((char*)fc, (char*)(&fc->signal_context_0));
    if ((fc = to_prefetch(a, i + STACK_AHEAD))) {
        prefetch_lines((char*)fc->control_stack_pointer, (char*)fc);
        prefetch_lines((char*)fc->binding_stack_start, (char*)fc->binding_stack_pointer);
    }
}

/*
 * Each suspended stack
 */

/* Have the state cells of mounted stacks hold STATE. */
static void set_state_of_mounted(int state)
{
    struct thread* th;
    for_each_thread(th)
        if (th->fiber_context) *th->fiber_context->state_cell = state;
}

static void each_carrier(void (*call)(struct fiber_context*, void*), void* arg)
{
    struct thread* th;
    for_each_thread(th)
        if (th->fiber_context) call(th->carrier_context, arg);
}

void fiber_each_suspended(void (*call)(struct fiber_context*, void*), void* arg)
{
    each_carrier(call, arg);
    set_state_of_mounted(FIBER_STACK_MOUNTED);
    for (uint32_t n = 0; n < fiber_n_arenas; ++n) {
        struct fiber_arena* a = &fiber_arenas[n];
        for (uint32_t i = 0; i < a->n_carved; ++i)
            if (a->state[i] != FIBER_STACK_FREE && a->state[i] != FIBER_STACK_MOUNTED) {
                prefetch_beyond(a, i);
                call(fiber_slot_context(a, i), arg);
            }
    }
    set_state_of_mounted(FIBER_STACK_ACTIVE);
}

static void scan_suspended(struct fiber_context* fc, void* visitors)
{
    scan_control_stack(fc, visitors);
}

static void scav_suspended(struct fiber_context* fc, void* mark)
{
    scav_binding_stack(fc->binding_stack_start, fc->binding_stack_pointer, mark);
}

/*
 * A pass over one generation, in which most are skipped
 */

/* Which states can be skipped unless a card is marked. */
static unsigned char skippable[256];

static void find_skippable()
{
    for (int state = 0; state < 256; ++state)
        skippable[state] = state == FIBER_STACK_FREE || state == FIBER_STACK_MOUNTED
            || (old_p(state) && generation_of_state(state) > from_space);
}

static inline uint64_t eight(unsigned char* bytes) { return *(uint64_t*)bytes; }

/* Is every eight of 64 states SKIPPED, and none of them marked? */
static inline bool all_skipped(unsigned char* states, unsigned char* marked, uint64_t skipped)
{
    uint64_t other = 0;
    for (int i = 0; i < 64; i += 8) other |= (eight(states + i) ^ skipped) | eight(marked + i);
    return !other;
}

static inline bool to_be_scanned(struct fiber_arena* a, uint32_t i)
{
    int state = a->state[i];
    return !(state & KEPT) && (!skippable[state] || (old_p(state) && a->marked[i]));
}

static void scan_slot(struct fiber_arena* a, uint32_t i, struct visitors* v)
{
    struct fiber_context* fc = fiber_slot_context(a, i);
    struct scan s = scan_control_stack(fc, v);
    if (!old_p(a->state[i])) fiber_note_not_idle(a, i);
    bool skip = a->positions && !fc->signal_context_count;
    a->state[i] = SCANNED
        | (skip ? FIBER_STACK_OLD | s.youngest | (s.kept ? KEPT : 0) : FIBER_STACK_ACTIVE);
    if (a->positions) fiber_note_depth(a, i, (char*)fc->control_stack_pointer);
    a->looked_at = 1;
}

/* All that it refers to has been visited, and what was in from_space gets older with it. */
static void age_kept(unsigned char* state)
{
    if (generation_of_state(*state) == from_space)
        *state = KEPT | FIBER_STACK_OLD | after_pass(from_space);
}

static void scan_arena(struct fiber_arena* a, struct visitors* v)
{
    static unsigned char unmarked[FIBER_SLOTS_PER_ARENA];
    unsigned char* marked = a->positions ? a->marked : unmarked;
    uint64_t skipped = 0;         // eight states that were found to be skippable last
    for (uint32_t i = 0; i < a->n_carved; i += 8) {
        while (i + 64 <= a->n_carved && all_skipped(a->state + i, marked + i, skipped)) i += 64;
        if (i >= a->n_carved) break;
        uint64_t states = eight(a->state + i);
        if (states == skipped && !eight(marked + i)) continue;
        for (uint32_t k = i; k < i + 8 && k < a->n_carved; ++k)
            if (a->state[k] & KEPT) age_kept(&a->state[k]);
            else if (to_be_scanned(a, k)) {
                prefetch_beyond(a, k);
                scan_slot(a, k, v);
            }
        if (eight(a->state + i) == states && !eight(marked + i)) skipped = states;
    }
}

static void verify_arena(struct fiber_arena* a)
{
    for (uint32_t i = 0; i < a->n_carved; ++i)
        if (old_p(a->state[i]) && !to_be_scanned(a, i)) verify_skipped(a, i);
}

static int oldest_collected;

static void scan_some(struct visitors* v)
{
    if (from_space > oldest_collected) oldest_collected = from_space;
    each_carrier(scan_suspended, v);
    set_state_of_mounted(FIBER_STACK_MOUNTED);
    fiber_test_positions();
    find_skippable();
    fiber_visit_roots(fiber_kept_roots(), v->visit);
    for (uint32_t n = 0; n < fiber_n_arenas; ++n) {
        if (fiber_verify_skipping) verify_arena(&fiber_arenas[n]);
        scan_arena(&fiber_arenas[n], v);
    }
    fiber_unmark_positions();
    keep_exposed_active();
    set_state_of_mounted(FIBER_STACK_ACTIVE);
}

/* The values of bindings have moved, so their generation is known after that only. */
static void scav_slot(struct fiber_arena* a, uint32_t i)
{
    struct fiber_context* fc = fiber_slot_context(a, i);
    scav_suspended(fc, 0);
    int state = a->state[i] & ~SCANNED;
    if (old_p(state)) {
        struct scan s = scan_bindings(fc);
        if (!s.kept) state &= ~KEPT;
        if (s.youngest < generation_of_state(state))
            state = (state & ~OLDEST) | s.youngest;
    }
    a->state[i] = state;
    if (fiber_verify_skipping) keep_hash(a, i);
}

static void scav_scanned()
{
    each_carrier(scav_suspended, 0);
    for (uint32_t n = 0; n < fiber_n_arenas; ++n) {
        struct fiber_arena* a = &fiber_arenas[n];
        for (uint32_t i = 0; a->looked_at && i < a->n_carved; i += 8) {
            if (!(eight(a->state + i) & SCANNED * 0x0101010101010101)) continue;
            for (uint32_t k = i; k < i + 8; ++k)
                if (a->state[k] & SCANNED) {
                    prefetch_beyond(a, k);
                    scav_slot(a, k);
                }
        }
    }
}

static void forget_kept(struct fiber_arena* a)
{
    for (uint32_t i = 0; i < a->n_carved; ++i) a->state[i] &= ~KEPT;
    a->looked_at = 0;
}

/*
 * What the collector calls
 */

/* VISIT_REGISTER is for what signal contexts hold: a card may have been marked for a
 * store that is still to come, so the mark must stay, as for a thread's context. */
void fiber_scan_control_stacks(fiber_root_visitor* visit, fiber_root_visitor* visit_register)
{
    struct visitors v = { visit, visit_register };
    if (compacting_p()) scan_some(&v);
    else fiber_each_suspended(scan_suspended, &v);
}

void fiber_scav_binding_stacks(void (*mark)(lispobj))
{
    if (mark) fiber_each_suspended(scav_suspended, (void*)mark);
    else scav_scanned();
}

void fiber_end_collection()
{
    for (uint32_t n = 0; n < fiber_n_arenas; ++n)
        if (fiber_arenas[n].looked_at) forget_kept(&fiber_arenas[n]);
    fiber_drop_roots();
    n_exposed = 0;
    fiber_visit_idle(oldest_collected);
    oldest_collected = 0;
}

struct verification { int (*verify)(lispobj, lispobj*, void*); void* arg; int errors; };

static void verify_suspended(struct fiber_context* fc, void* arg)
{
    struct verification* v = arg;
    v->errors += v->verify((lispobj)fc->binding_stack_start, fc->binding_stack_pointer, v->arg);
}

int fiber_verify_binding_stacks(int (*verify)(lispobj, lispobj*, void*), void* arg)
{
    struct verification v = { verify, arg, 0 };
    fiber_each_suspended(verify_suspended, &v);
    return v.errors;
}

/* Words that point into the stack being scanned are no roots. For a thread this range
 * reaches from the stack to the thread structure; with a fiber's stack below the heap
 * it would contain the heap, and nothing would be pinned. */
void fiber_exclude_own_stack(struct thread* th, lispobj* from, lispobj* to)
{
    if (!th->fiber_context) return;
    *from = (lispobj)th->control_stack_start;
    *to = (lispobj)th->control_stack_end;
}

#endif
