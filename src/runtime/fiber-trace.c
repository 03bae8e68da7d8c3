/*
 * What SEARCH-ROOTS finds on suspended stacks: which of them refers to an object
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
#include "lispregs.h"

/*
 * With the world stopped. The answer to "whose stack is it" is what Lisp finds the fiber or the
 * thread by: the context. Stacks that are mounted, and what is bound there, are found by
 * traceroot.c itself, as those of a thread.
 */

struct words { fiber_root_visitor *visit, *visit_register; void* arg; };

static void NO_SANITIZE_ADDRESS NO_SANITIZE_MEMORY
visit_words(struct fiber_context* fc, void* arg)
{
    extern void visit_context_registers(fiber_root_visitor*, os_context_t*, void*);
    struct words* w = arg;
    for (uword_t i = 0; i < fc->signal_context_count; ++i)
        visit_context_registers(w->visit_register, (os_context_t*)(&fc->signal_context_0)[i],
                                w->arg);
    for (lispobj* p = fc->control_stack_pointer; p < fc->control_stack_end; ++p)
        w->visit(*p, w->arg);
}

/* Call VISIT with each word on a suspended control stack and ARG, and VISIT_REGISTER with those in
 * a signal context there. */
void fiber_trace_words(fiber_root_visitor* visit, fiber_root_visitor* visit_register, void* arg)
{
    struct words w = { visit, visit_register, arg };
    fiber_each_suspended(visit_words, &w);
}

/* The return address of the frame that ADDRESS is in, or 0. FRAME and those above it, up to END,
 * are a frame pointer, and above that the address to return to. */
static char* NO_SANITIZE_ADDRESS NO_SANITIZE_MEMORY
return_address_of_frame(lispobj* frame, lispobj* end, lispobj* address)
{
    char* pc = 0;
    while (frame <= address) {
        lispobj* next = (lispobj*)frame[0];
        pc = (char*)frame[1];
        if (next <= frame || next >= end) break;
        frame = next;
    }
    return pc;
}

struct search {
    bool (*refers)(lispobj word, void* arg);
    void* arg;
    int (*index_ok)(lispobj index, struct vector* ignored); // of a current binding
    struct vector* ignored;
    struct fiber_context* owner; // 0 until one is found
    lispobj* where;
};

static void NO_SANITIZE_ADDRESS NO_SANITIZE_MEMORY
search_control_stack(struct fiber_context* fc, void* arg)
{
    struct search* s = arg;
    for (lispobj* p = fc->control_stack_pointer; !s->owner && p < fc->control_stack_end; ++p)
        if (s->refers(*p, s->arg)) {
            s->owner = fc;
            s->where = p;
        }
}

/* The context of a suspended control stack of which some word REFERS, which is called with each and
 * with ARG, or 0. *PC is an address in the function whose frame has it. */
struct fiber_context* fiber_trace_control_stack(bool (*refers)(lispobj, void*), void* arg,
                                                char** pc)
{
    struct search s = { refers, arg };
    fiber_each_suspended(search_control_stack, &s);
    struct fiber_context* fc = s.owner; // the switch leaves a frame pointer at its stack pointer
    if (fc)
        *pc = return_address_of_frame(fc->control_stack_pointer, fc->control_stack_end, s.where);
    return fc;
}

/* The newest binding of a variable has the current value, since a switch exchanges them. */
static bool newest_p(struct fiber_context* fc, lispobj* binding)
{
    for (lispobj* p = binding + 2; p < (lispobj*)fc->binding_stack_pointer; p += 2)
        if (p[1] == binding[1]) return 0;
    return 1;
}

static void search_bindings(struct fiber_context* fc, void* arg)
{
    struct search* s = arg;
    for (lispobj* p = (lispobj*)fc->binding_stack_start;
         !s->owner && p < (lispobj*)fc->binding_stack_pointer; p += 2)
        if (s->refers(*p, s->arg) && (!newest_p(fc, p) || s->index_ok(p[1], s->ignored))) {
            s->owner = fc;
            s->where = p;
        }
}

/* The same for bindings, but for values of variables that are not INDEX_OK. *WHERE is the one that
 * REFERS, and *CURRENT says whether it has the variable's value there, or one that is shadowed. */
struct fiber_context* fiber_trace_bindings(bool (*refers)(lispobj, void*), void* arg,
                                           int (*index_ok)(lispobj, struct vector* ignored),
                                           struct vector* ignored, lispobj** where, bool* current)
{
    struct search s = { refers, arg, index_ok, ignored };
    fiber_each_suspended(search_bindings, &s);
    if (!s.owner) return 0;
    *where = s.where;
    *current = newest_p(s.owner, s.where);
    return s.owner;
}

/* ROOT is a context, or a thread; if that runs a fiber, the fiber's context is meant, as long as
 * the world is stopped. */
void* fiber_trace_owner(void* root)
{
    struct thread* th;
    for_each_thread(th)
        if (th == root && th->fiber_context) return th->fiber_context;
    return root;
}

/* What of TH, another thread, is alive. It may be in a handler, and have been interrupted twice; or
 * not have begun, or have ended, and then nothing is. */
os_context_t* fiber_trace_context(struct thread* th)
{
    static os_context_t nothing;
    int n = fixnum_value(read_TLS(FREE_INTERRUPT_CONTEXT_INDEX, th));
    if (n) return nth_interrupt_context(n - 1, th);
    *os_context_sp_addr(&nothing) = (os_context_register_t)th->control_stack_end;
    return &nothing;
}

/* The return address of the frame that ADDRESS, on the stack of TH, is in, or 0. C may use the
 * frame pointer for something else. */
char* fiber_trace_pc(struct thread* th, lispobj* address)
{
    os_context_t* context = fiber_trace_context(th);
    lispobj* frame = (lispobj*)*os_context_register_addr(context, reg_FP);
    lispobj* sp = (lispobj*)*os_context_sp_addr(context);
    if (frame < sp || frame >= th->control_stack_end) return 0;
    return return_address_of_frame(frame, th->control_stack_end, address);
}

#endif
