/* The functions of fibers that the rest of the runtime calls. */

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

#ifndef SBCL_FIBER_H
#define SBCL_FIBER_H

#ifdef LISP_FEATURE_SB_FIBER

#include <signal.h>
#include "runtime.h"
#include "os.h"
#include "genesis/fiber-context.h"
#include "interrupt.h"
#include "thread.h"

/* The values of *context->state_cell, as in compiler/generic/fiber-objdef.lisp. */
enum { FIBER_STACK_FREE, FIBER_STACK_ACTIVE, FIBER_STACK_MOUNTED, FIBER_STACK_OLD = 0x10 };

typedef void fiber_root_visitor(os_context_register_t, void*);

/* fiber-card.c */
extern int fiber_card_table_bits(int nbits);

/* fiber-gc.c: roots, with the world stopped */
extern void fiber_end_collection(void);
extern void fiber_note_register(lispobj);
extern void fiber_scan_control_stacks(fiber_root_visitor* visit,
                                      fiber_root_visitor* visit_register);
extern void fiber_scav_binding_stacks(void (*mark)(lispobj));
extern int fiber_verify_binding_stacks(int (*verify)(lispobj, lispobj*, void*), void* arg);
extern void fiber_exclude_own_stack(struct thread*, lispobj* from, lispobj* to);

/* fiber-filler.c */
extern int fiber_give_filler_back(char* from, char* to);

/* fiber-trace.c: what refers to an object, with the world stopped */
extern void fiber_trace_words(fiber_root_visitor* visit, fiber_root_visitor* visit_register,
                              void* arg);
extern struct fiber_context* fiber_trace_control_stack(bool (*refers)(lispobj, void*), void* arg,
                                                       char** pc);
struct vector;
extern struct fiber_context* fiber_trace_bindings(bool (*refers)(lispobj, void*), void* arg,
                                                  int (*index_ok)(lispobj, struct vector* ignored),
                                                  struct vector* ignored,
                                                  lispobj** where, bool* current);
extern void* fiber_trace_owner(void* root);
extern os_context_t* fiber_trace_context(struct thread*);
extern char* fiber_trace_pc(struct thread*, lispobj* address);

/* The bits of *FOREIGN-FRAMES*, as in code/fiber/foreign.lisp; the last is the first of many. */
enum { BELOW_CALLBACK = 1, FRAMES_TO_KEEP = 2, KEEPS_FOREIGN_FRAMES = 4, INTERRUPTIBLE_FRAMES = 8 };

/* fiber-foreign.c */
extern bool fiber_defer_signal(struct thread*, int signal, os_context_t*);
extern void fiber_send_deferred_signals(struct thread*);
extern bool fiber_trap_to_ignore(struct thread*);
extern bool fiber_in_foreign_code(struct thread*, os_context_t*);
extern void fiber_trap_after_call(struct thread*);
extern bool fiber_trapped_after_call(struct thread*);
extern void fiber_call_back(lispobj arg1, lispobj arg2, lispobj arg0, struct thread*);

/* fiber-overflow.c, fiber-signal.c, fiber-poller.c, fiber-reserve.c: signals and faults */
extern bool fiber_overflow_pending(struct thread*);
extern void fiber_settle_pending(struct thread*, os_context_t*);
extern void fiber_end_sleep(void);
extern struct fiber_context* fiber_in_use(struct thread*, os_context_t*);
extern bool fiber_handle_failed_delivery(siginfo_t*, os_context_t*);
extern void fiber_route_signal(int, struct sigaction*);
extern void fiber_leave_alternate_stack(void);
extern bool fiber_handle_fault(struct thread*, os_context_t*, os_vm_address_t);
extern void fiber_scrub_limits(struct thread*, os_vm_address_t* guard,
                               os_vm_address_t* hard_guard, unsigned* size);

#else
/* So that what calls it needs no condition. */
#define fiber_give_filler_back(from, to) 0
#endif
#endif
