/* What the files that ask the kernel for something, fiber-poller.c and its neighbours, share. */

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

#ifndef SBCL_FIBER_PLATFORM_H
#define SBCL_FIBER_PLATFORM_H

#include <stdint.h>
#include "runtime.h"

/* The contract is in code/fiber/poller.lisp; these numbers belong to it. */
enum { INPUT = 1, OUTPUT = 2, KEEP = 4, FRESH = 8, URGENT = 4 };

/* Is FD ready for DIRECTION now? 1, 0, or minus an errno. */
extern int fiber_poll_now(int fd, int direction);

/* Nanoseconds of a clock that does not jump. */
extern uint64_t fiber_now(void);

/* How many mappings of memory this process may have, and how many it has. */
extern sword_t fiber_mapping_limit(void);
extern sword_t fiber_count_mappings(void);

#endif
