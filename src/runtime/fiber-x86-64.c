/*
 * What the runtime of fibers needs of an x86-64 that C cannot say
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

/* Those of this thread, without the exceptions that have accrued. */
unsigned int fiber_floating_point_modes()
{
    enum { ACCRUED = 0x3F };
    unsigned int mxcsr;
    asm ("stmxcsr %0" : "=m" (mxcsr));
    return mxcsr & ~ACCRUED;
}

#endif
