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

/*
 * The world is stopped, so every stack that is not free is either suspended, or is the current one
 * of some thread, which the collector scans anyway.
 */

struct visitors { fiber_root_visitor *visit, *visit_register; };

static void NO_SANITIZE_ADDRESS NO_SANITIZE_MEMORY
scan_suspended(struct fiber_context* fc, void* arg)
{
    extern void visit_context_registers(fiber_root_visitor*, os_context_t*, void*);
    struct visitors* v = arg;
    for (uword_t i = 0; i < fc->signal_context_count; ++i)
        visit_context_registers(v->visit_register, (os_context_t*)(&fc->signal_context_0)[i],
                                (void*)1);
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
    fiber_each_suspended(scan_suspended, &v);
}

static void scav_suspended(struct fiber_context* fc, void* mark)
{
    extern void scav_binding_stack(lispobj*, lispobj*, void (*)(lispobj));
    scav_binding_stack(fc->binding_stack_start, fc->binding_stack_pointer, mark);
}

void fiber_scav_binding_stacks(void (*mark)(lispobj))
{
    fiber_each_suspended(scav_suspended, (void*)mark);
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
