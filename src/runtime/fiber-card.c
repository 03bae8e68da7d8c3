/*
 * The cards of stacks, whose marks tell the collector that a stack was written by another
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

#include <string.h>
#include <sys/mman.h>
#include "fiber-stack.h"
#include "gc.h"
#include "globals.h"

/*
 * An object with dynamic extent lies on the stack of a fiber, and another fiber may store into it
 * while the first is suspended. Whoever stores marks the card of the object first, whatever its
 * address: the table of cards covers the address space over and over, once for each *span*. In each
 * span the heap has one part, and stacks lie in the other, so that the marks there are not the
 * heap's, all of whose free pages are marked.
 *
 * The part of the stacks is divided into *windows* of the size of an arena. There are more arenas
 * than windows, so slot i of an arena has its cards in common with slot i of other arenas of the
 * same class in the same window: that is a *position*. What is done once for a position is done for
 * some stacks, which is why a million of them can be tested in a moment; and a mark costs the scan
 * of some stacks. Fibers that run mark cards of their own stacks all the time. So arenas in the
 * same window are shifted against each other, by more than what is usually live of a stack: there
 * are fewer stacks at a position, and the marks of positions that differ by a shift are next to
 * each other, and tested together.
 *
 * What is true when the world is about to be started: of the cards of each position, from the upper
 * end of the stack on, the first deepest[i] are not marked; and the live part of each OLD stack
 * that is at the position has no more cards. A mark there is one that was made since.
 *
 * Threads, and what lies outside of the heap, may mark the same cards, which costs a scan. Nobody
 * else reads them.
 */

static uword_t span() { return (uword_t)(gc_card_table_mask + 1) << GENCGC_CARD_SHIFT; }

/* Called when the table is about to be made, for a heap that needs NBITS. */
int fiber_card_table_bits(int nbits)
{
    uword_t heap = dynamic_space_size;
    uword_t part = heap < FIBER_ARENA_BYTES ? FIBER_ARENA_BYTES : heap;
    // There may be no more than 31, see compute_card_table_size().
    while (nbits < 31 && ((uword_t)1 << (nbits + GENCGC_CARD_SHIFT)) < heap + part) ++nbits;
    return nbits;
}

/*
 * Places. A block is as much of the address space as the part of the stacks in one span: a
 * reservation, of which arenas get a window each.
 */
static char* next_place;
static uword_t n_places_left, n_blocks;
#define SHIFT (8*KIB)
#define N_SHIFTS (FIBER_ARENA_SLACK / SHIFT + 1)

static uword_t n_windows() { return (span() - dynamic_space_size) / FIBER_ARENA_BYTES; }

/* The kernel chooses where; what lies before and behind the block is given back. */
static bool reserve_block()
{
    uword_t size = n_windows() * FIBER_ARENA_BYTES, all = span() + size;
    char* start = mmap(0, all, PROT_NONE, MAP_PRIVATE|MAP_ANONYMOUS|MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return 0;
    uword_t behind_heap = DYNAMIC_SPACE_START + dynamic_space_size;
    char* block = start + (behind_heap - (uword_t)start) % span();
    if (block > start) munmap(start, block - start);
    if (block + size < start + all) munmap(block + size, start + all - block - size);
    next_place = block;
    n_places_left = n_windows();
    ++n_blocks;
    return 1;
}

/* With the lock. SIZE bytes whose cards are none of the heap's, or 0. */
char* fiber_place_beside_heap(uword_t size)
{
    if (size > FIBER_ARENA_BYTES - FIBER_ARENA_SLACK || !n_windows()
        || (!n_places_left && !reserve_block())) return 0;
    void* place = mmap(next_place + n_blocks % N_SHIFTS * SHIFT, size, PROT_READ|PROT_WRITE,
                       MAP_FIXED|MAP_PRIVATE|MAP_ANONYMOUS|MAP_NORESERVE, -1, 0);
    next_place += FIBER_ARENA_BYTES; // in any case: a place that failed may be another's by now
    --n_places_left;
    return place == MAP_FAILED ? 0 : place;
}

/*
 * Positions. Those of slot I with all shifts are near each other: if none of a *band* of cards is
 * marked, which has all of these unless a stack was deep, none of them is.
 */
enum {
    CARDS_OF_SHIFT = SHIFT / GENCGC_CARD_BYTES,
    BAND_DEPTH = 8                // of each position
};
_Static_assert(CARDS_OF_SHIFT % 8 == 0 && BAND_DEPTH == 8, "a band is looked at by words");

struct fiber_positions {
    struct fiber_positions* next;
    struct fiber_arena* arena;    // one of those that have them
    char* base;                   // where an arena of the window lies that is not shifted
    uword_t band;                 // how many cards a band has
    unsigned char used[FIBER_SLOTS_PER_ARENA];  // some stack that is here was scanned
    unsigned char deep[FIBER_SLOTS_PER_ARENA];  // one of them has cards outside of the band
    unsigned char dirty[FIBER_SLOTS_PER_ARENA]; // MARKED is not all 0
    unsigned char marked[N_SHIFTS][FIBER_SLOTS_PER_ARENA];
    uint32_t deepest[N_SHIFTS][FIBER_SLOTS_PER_ARENA];
};

static struct fiber_positions* all_positions;

static struct fiber_positions* make_positions(struct fiber_arena* a, char* base)
{
    struct fiber_positions* p =
        mmap(0, sizeof *p, PROT_READ|PROT_WRITE, MAP_PRIVATE|MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return 0;
    p->arena = a;
    p->base = base;
    p->next = all_positions;
    __atomic_store_n(&all_positions, p, __ATOMIC_RELEASE);
    return p;
}

/* With the lock. A has been placed just now; it gets none if there is no memory. */
void fiber_find_positions(struct fiber_arena* a)
{
    uword_t shift = n_blocks % N_SHIFTS;
    char* base = a->base - shift * SHIFT;
    struct fiber_positions* p = all_positions;
    while (p && !(p->arena->stride == a->stride
                  && ((uword_t)p->base - (uword_t)base) % span() == 0)) p = p->next;
    if (!p && !(p = make_positions(a, base))) return;
    uword_t band = shift * CARDS_OF_SHIFT + BAND_DEPTH;
    if (band > p->band) p->band = band;
    a->positions = p;
    a->shift = shift;
    a->marked = p->marked[shift];
}

/* The number of the card of the last word of the stacks in slot I that are not shifted, from which
 * others count down. It is not reduced to the table. */
static uword_t last_card(struct fiber_positions* p, uint32_t i)
{
    uword_t offset = (char*)fiber_slot_context(p->arena, i) - p->arena->base;
    return ((uword_t)p->base + offset - 1) >> GENCGC_CARD_SHIFT;
}

static bool any_marked(uword_t first, uword_t n)
{
    for (uword_t card = first; card < first + n; ++card)
        if (gc_card_mark[card & gc_card_table_mask] != CARD_UNMARKED) return 1;
    return 0;
}

static bool band_marked(uword_t first, uword_t n)
{
    uword_t start = first & gc_card_table_mask;
    if (start + n > (uword_t)gc_card_table_mask) return any_marked(first, n);
    uint64_t all = ~(uint64_t)0;
    for (uword_t k = 0; k < n; k += 8) all &= *(uint64_t*)&gc_card_mark[start + k];
    return ~all != 0;
}

/* All functions from here on are called with the world stopped. */

static void test_slot(struct fiber_positions* p, uint32_t i)
{
    uword_t last = last_card(p, i);
    bool look = band_marked(last - BAND_DEPTH + 1, p->band) || p->deep[i];
    if (!look && !p->dirty[i]) return;
    p->dirty[i] = look;
    for (uword_t s = 0; s < N_SHIFTS; ++s) {
        uint32_t depth = p->deepest[s][i];
        p->marked[s][i] = look && any_marked(last + s * CARDS_OF_SHIFT - depth + 1, depth);
    }
}

void fiber_test_positions()
{
    enum { AHEAD = 12 };          // each band has lines of its own
    for (struct fiber_positions* p = all_positions; p; p = p->next)
        for (uint32_t i = 0, n = p->arena->n_slots; i < n; ++i) {
            if (i + AHEAD < n && p->used[i + AHEAD]) {
                uword_t card = last_card(p, i + AHEAD);
                __builtin_prefetch(&gc_card_mark[card & gc_card_table_mask]);
                __builtin_prefetch(&gc_card_mark[(card + p->band) & gc_card_table_mask]);
            }
            if (p->used[i]) test_slot(p, i);
        }
}

/* Slot I of A has been scanned, and SP is its lowest live address. */
void fiber_note_depth(struct fiber_arena* a, uint32_t i, char* sp)
{
    struct fiber_positions* p = a->positions;
    uword_t last = ((uword_t)fiber_slot_context(a, i) - 1) >> GENCGC_CARD_SHIFT;
    uword_t depth = last - ((uword_t)sp >> GENCGC_CARD_SHIFT) + 1;
    if (depth <= p->deepest[a->shift][i]) return;
    p->deepest[a->shift][i] = depth;
    p->used[i] = p->dirty[i] = 1; // its cards have not been looked at
    if (depth > BAND_DEPTH) p->deep[i] = 1;
}

static void unmark(uword_t first, uword_t n)
{
    for (uword_t card = first; card < first + n; ++card)
        gc_card_mark[card & gc_card_table_mask] = CARD_UNMARKED;
}

/* When all stacks have been tested, and those on marked cards scanned: then no mark of the part of
 * the stacks is needed any more. */
void fiber_unmark_positions()
{
    for (struct fiber_positions* p = all_positions; p; p = p->next)
        for (uint32_t i = 0, n = p->arena->n_slots; i < n; ++i) {
            if (!p->dirty[i]) continue;
            uword_t last = last_card(p, i);
            unmark(last - BAND_DEPTH + 1, p->band);
            for (uword_t s = 0; s < N_SHIFTS; ++s) {
                uint32_t depth = p->deepest[s][i];
                if (depth > BAND_DEPTH) unmark(last + s * CARDS_OF_SHIFT - depth + 1, depth);
            }
        }
}

#endif
