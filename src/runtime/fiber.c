/*
 * Stacks of fibers: where they lie, who has them, what the collector sees of them
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
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "fiber-stack.h"
#include "globals.h"
#include "gc.h"
#include "interrupt.h"
#include "os.h"
#include "validate.h"
#include "genesis/static-symbols.h"
#include "genesis/symbol.h"

/*
 * What is true when nobody is inside:
 *  - arenas are only ever added; n_arenas is written last, so that the collector and
 *    fault handlers read the table without a lock;
 *  - state[i] is FREE, or the context of slot i is valid. It becomes SUSPENDED by a
 *    store of the thread that prepared the stack, and changes between SUSPENDED and
 *    MOUNTED only in the switch, inside pseudo-atomic;
 *  - a slot is in the free list of its class, or among the spare stacks of a carrier, or was
 *    handed out by fiber_stack_allocate().
 */

#define SLOTS_PER_ARENA 1024
#define ARENA_BYTES ((uword_t)512*KIB*KIB)
#define MAX_ARENAS 16384
#define MAX_STACK_CLASSES 64

struct fiber_arena {
    char* base;
    uword_t stride;
    struct stack_class* class;
    uint32_t n_slots;
    uint32_t n_carved;            // slots from here on were never used
    unsigned char* state;
};

/* All stacks of one size. */
struct stack_class {
    uword_t control_size;         // usable bytes of control stack, reserve excluded
    struct fiber_context* free;
    struct fiber_arena* last;     // the only one that may have slots to carve
};

static struct fiber_arena arenas[MAX_ARENAS];
static volatile uint32_t n_arenas;
static struct stack_class stack_classes[MAX_STACK_CLASSES];
static pthread_mutex_t arenas_lock = PTHREAD_MUTEX_INITIALIZER;

/* Free stacks beyond this many give their pages back. */
uword_t fiber_stack_high_water = 16384;
static uword_t n_free_stacks;

/*
 * Guards. MADV_GUARD_INSTALL (Linux 6.13) needs no mapping of its own; mprotect
 * needs two for each guard, of which a process has 65,530 by default.
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

static void choose_guard_method(char* page)
{
    if (fiber_guard_method != GUARD_UNKNOWN) return;
    fiber_guard_method = GUARD_MADVISE;
    if (fiber_raise_guard(page, HARD_GUARD_SIZE) || fiber_lower_guard(page, HARD_GUARD_SIZE))
        fiber_guard_method = GUARD_MPROTECT;
}

/* Arenas */

/* Powers of two from 64 KiB on, of which there are fewer than MAX_STACK_CLASSES. */
static uword_t round_stack_size(uword_t size)
{
    uword_t rounded = 64*KIB;
    while (rounded < size) rounded *= 2;
    return rounded;
}

static uword_t binding_stack_size(uword_t control_size)
{
    return control_size / 4 < 64*KIB ? 64*KIB : control_size / 4;
}

/* Where arenas lie and at what stride is decided here and nowhere else.
 * An odd number of pages spreads the first pages of neighbours over the sets of
 * the caches, in which equal strides of a power of two would collide. */
static uword_t slot_stride(uword_t control_size)
{
    uword_t page = HARD_GUARD_SIZE;
    uword_t size = LOW_GUARD_SIZE + control_size
        + binding_stack_size(control_size) + MIDDLE_GUARD_SIZE + FIBER_ALIEN_STACK_SIZE;
    uword_t n_pages = (size + page - 1) / page;
    return (n_pages | 1) * page;
}

static char* reserve_arena(uword_t size)
{
    void* base = mmap(0, size, PROT_READ|PROT_WRITE,
                      MAP_PRIVATE|MAP_ANONYMOUS|MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return 0;
    madvise(base, size, MADV_NOHUGEPAGE); // 2 MiB for an idle fiber otherwise
    return base;
}

static struct fiber_arena* add_arena(struct stack_class* class)
{
    uint32_t n = n_arenas;
    if (n == MAX_ARENAS) { errno = ENOMEM; return 0; }
    struct fiber_arena* a = &arenas[n];
    a->class = class;
    a->stride = slot_stride(class->control_size);
    uword_t fit = ARENA_BYTES / a->stride;
    a->n_slots = fit < 1 ? 1 : fit > SLOTS_PER_ARENA ? SLOTS_PER_ARENA : fit;
    a->n_carved = 0;
    a->state = calloc(a->n_slots, 1);
    a->base = a->state ? reserve_arena(a->n_slots * a->stride) : 0;
    if (!a->base) { free(a->state); errno = ENOMEM; return 0; }
    choose_guard_method(a->base);
    __atomic_store_n(&n_arenas, n + 1, __ATOMIC_RELEASE);
    return a;
}

/* The context of a slot. Its offset in the page varies from slot to slot, for the
 * sake of the caches again: all first lines at one offset would share 12 lines. */
static struct fiber_context* slot_context(struct fiber_arena* a, uint32_t i)
{
    char* boundary = a->base + i * a->stride + LOW_GUARD_SIZE + a->class->control_size;
    return (void*)(boundary - 2*KIB + (i % 8) * 64);
}

static int carve_slot(struct fiber_arena* a, uint32_t i)
{
    struct fiber_context* fc = slot_context(a, i);
    char* slot = a->base + i * a->stride;
    char* middle = slot + LOW_GUARD_SIZE + a->class->control_size
        + binding_stack_size(a->class->control_size);
    if (fiber_raise_guard(slot, LOW_GUARD_SIZE)) return -1;
    if (fiber_raise_guard(middle, MIDDLE_GUARD_SIZE)) return -1;
    fc->control_stack_start = (lispobj*)(slot + HARD_GUARD_SIZE);
    fc->control_stack_end = (lispobj*)fc;
    fc->binding_stack_start = (lispobj*)ALIGN_UP((uword_t)(fc + 1), 16); // for MOVAPS
    fc->alien_stack_start = (lispobj*)(middle + MIDDLE_GUARD_SIZE - SIDE_RESERVE_SIZE);
    fc->mounted_as = (lispobj)fc;
    fc->state_cell = &a->state[i];
    fc->index = (a - arenas) * SLOTS_PER_ARENA + i;
    return 0;
}

/* The context of the slot that ADDR is in, or 0. */
struct fiber_context* fiber_context_at(char* addr)
{
    uint32_t n = __atomic_load_n(&n_arenas, __ATOMIC_ACQUIRE);
    for (struct fiber_arena* a = arenas; a < arenas + n; ++a)
        if (within(addr, a->base, a->n_slots * a->stride))
            return slot_context(a, (addr - a->base) / a->stride);
    return 0;
}

static struct fiber_arena* arena_of(struct fiber_context* fc)
{
    return &arenas[fc->index / SLOTS_PER_ARENA];
}

static uword_t slot_end(struct fiber_arena* a, struct fiber_context* fc)
{
    uint32_t i = fc->index % SLOTS_PER_ARENA;
    return (uword_t)a->base + (i + 1) * a->stride;
}

static struct stack_class* find_stack_class(uword_t control_size)
{
    struct stack_class* class = stack_classes;
    while (class->control_size && class->control_size != control_size) ++class;
    class->control_size = control_size;
    return class;
}

static struct fiber_context* carve(struct stack_class* class)
{
    struct fiber_arena* a = class->last;
    if (!a || a->n_carved == a->n_slots) a = class->last = add_arena(class);
    if (!a || carve_slot(a, a->n_carved)) return 0;
    return slot_context(a, a->n_carved++);
}

static struct fiber_context* take_stack(struct stack_class* class)
{
    struct fiber_context* fc = class->free;
    if (!fc) return carve(class);
    class->free = fc->next_free;
    --n_free_stacks;
    return fc;
}

static void put_stack(struct fiber_context* fc)
{
    struct stack_class* class = arena_of(fc)->class;
    fc->next_free = class->free;
    class->free = fc;
    ++n_free_stacks;
}

/* A carrier's own context, and the stacks that it keeps for itself, so that carriers which start
 * and end fibers do not meet at the lock. */
struct carrier {
    struct fiber_context context; // first, since it is what thread->carrier_context points to
    struct fiber_context* spare;
    int n_spare;
};
#define MOST_SPARE 64

static struct carrier* this_carrier()
{
    return (struct carrier*)get_sb_vm_thread()->carrier_context;
}

static void keep_spare(struct carrier* c, struct fiber_context* fc)
{
    fc->next_free = c->spare;
    c->spare = fc;
    ++c->n_spare;
}

static struct fiber_context* take_spare(struct carrier* c, uword_t control_size)
{
    struct fiber_context* fc = c ? c->spare : 0;
    if (!fc || arena_of(fc)->class->control_size != control_size) return 0;
    c->spare = fc->next_free;
    --c->n_spare;
    return fc;
}

/* Take from the free stacks what the next fibers of the same size will need. */
static void add_spares(struct carrier* c, struct stack_class* class)
{
    while (c->n_spare < MOST_SPARE/2 && class->free) keep_spare(c, take_stack(class));
}

static void free_spares(struct carrier* c, int but)
{
    while (c->n_spare > but) {
        struct fiber_context* fc = c->spare;
        c->spare = fc->next_free;
        --c->n_spare;
        put_stack(fc);
    }
}

/* A stack with CONTROL_SIZE usable bytes of control stack, or 0 if there is no
 * memory or no mapping left for it. The caller has interrupts disabled: an
 * interruption that came to allocate would wait for itself. */
struct fiber_context* fiber_stack_allocate(uword_t control_size)
{
    struct carrier* c = this_carrier();
    uword_t rounded = round_stack_size(control_size);
    struct fiber_context* fc = take_spare(c, rounded);
    if (!fc) {
        pthread_mutex_lock(&arenas_lock);
        struct stack_class* class = find_stack_class(rounded);
        fc = take_stack(class);
        if (c && fc) add_spares(c, class);
        pthread_mutex_unlock(&arenas_lock);
    }
    if (!fc) return 0;
    fc->alien_stack_pointer = (lispobj*)slot_end(arena_of(fc), fc);
    fc->binding_stack_pointer = fc->binding_stack_start;
    fc->control_stack_pointer = fc->control_stack_end;
    fc->catch_block = fc->unwind_protect_block = 0;
    fc->base_catch_block = 0;
    fc->signal_context_count = 0;
    return fc;
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

/* The stack is nobody's: its fiber has ended, and another stack is running. */
void fiber_stack_free(struct fiber_context* fc)
{
    struct carrier* c = this_carrier();
    *fc->state_cell = FIBER_STACK_FREE;
    fiber_close_all_reserves(fc);
    bool surplus = n_free_stacks >= fiber_stack_high_water;
    if (surplus) release_pages(arena_of(fc), fc);
    if (c && !surplus && c->n_spare < MOST_SPARE) {
        keep_spare(c, fc);
        return;
    }
    pthread_mutex_lock(&arenas_lock);
    if (c) free_spares(c, MOST_SPARE/2);
    put_stack(fc);
    pthread_mutex_unlock(&arenas_lock);
}

/* Made by who starts the carrier, and can tell when there is no memory. 0 if so. */
struct carrier* fiber_carrier_make()
{
    struct carrier* c = aligned_alloc(16, ALIGN_UP(sizeof *c, 16));
    if (c) memset(c, 0, sizeof *c);
    return c;
}

/* The context is the carrier's own, kept while the thread is a carrier. */
void fiber_carrier_begin(struct carrier* c)
{
    struct thread* th = get_sb_vm_thread();
    static unsigned char state_of_carriers; // the collector finds carriers by their threads
    struct fiber_context* fc = &c->context;
    fc->control_stack_start = th->control_stack_start;
    fc->control_stack_end = th->control_stack_end;
    fc->binding_stack_start = th->binding_stack_start;
    fc->alien_stack_start = th->alien_stack_start;
    fc->mutex_owner_id = th->mutex_owner_id;
    fc->state_cell = &state_of_carriers;
    unsigned int mxcsr;
    asm ("stmxcsr %0" : "=m" (mxcsr));
    fc->mxcsr = mxcsr & ~0x3F;    // without the accrued exceptions
    th->carrier_context = fc;
}

void fiber_carrier_end()
{
    struct thread* th = get_sb_vm_thread();
    struct carrier* c = this_carrier();
    if (th->fiber_context) lose("a carrier ends while a fiber is mounted");
    th->carrier_context = 0;
    pthread_mutex_lock(&arenas_lock);
    free_spares(c, 0);
    pthread_mutex_unlock(&arenas_lock);
    free(c);
}

/* For Lisp, which looks whether there is room for a wait. */
const uword_t fiber_control_reserve = CONTROL_RESERVE_SIZE;

/*
 * The collector's view. The world is stopped, so every stack that is not free is
 * either suspended or some thread's current one, which the collector scans anyway.
 */

/* CALL for each context that is suspended. */
static inline void each_suspended(void (*call)(struct fiber_context*, void*), void* arg)
{
    struct thread* th;
    for_each_thread(th) {
        if (th->fiber_context) call(th->carrier_context, arg);
    }
    for (uint32_t n = 0; n < n_arenas; ++n) {
        struct fiber_arena* a = &arenas[n];
        for (uint32_t i = 0; i < a->n_carved; ++i)
            if (a->state[i] == FIBER_STACK_SUSPENDED) call(slot_context(a, i), arg);
    }
}

struct visitors { fiber_root_visitor *visit, *visit_register; };

static void NO_SANITIZE_ADDRESS NO_SANITIZE_MEMORY
scan_suspended(struct fiber_context* fc, void* arg)
{
    extern void visit_context_registers(fiber_root_visitor*, os_context_t*, void*);
    struct visitors* v = arg;
    for (uword_t i = 0; i < fc->signal_context_count; ++i)
        visit_context_registers(v->visit_register, (os_context_t*)(&fc->signal_context_0)[i], (void*)1);
    lispobj start = (lispobj)fc->control_stack_start, end = (lispobj)fc->control_stack_end;
    for (lispobj* p = fc->control_stack_pointer; p < fc->control_stack_end; ++p) {
        lispobj word = *p;
        if (word >= BACKEND_PAGE_BYTES && !(start <= word && word < end)) v->visit(word, 0);
    }
}

/* VISIT_REGISTER is for what signal contexts hold: a card may have been marked for a
 * store that is still to come, so the mark must stay, as for a thread's context. */
void fiber_scan_control_stacks(fiber_root_visitor* visit, fiber_root_visitor* visit_register)
{
    struct visitors v = { visit, visit_register };
    each_suspended(scan_suspended, &v);
}

static void scav_suspended(struct fiber_context* fc, void* mark)
{
    extern void scav_binding_stack(lispobj*, lispobj*, void (*)(lispobj));
    scav_binding_stack(fc->binding_stack_start, fc->binding_stack_pointer, mark);
}

void fiber_scav_binding_stacks(void (*mark)(lispobj))
{
    each_suspended(scav_suspended, (void*)mark);
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
    each_suspended(verify_suspended, &v);
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
