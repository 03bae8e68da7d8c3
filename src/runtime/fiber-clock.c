/*
 * Clocks: a steady one, that of a processor, and that of a thread
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

#define _GNU_SOURCE
#include "genesis/sbcl.h"
#ifdef LISP_FEATURE_SB_FIBER

#include <stdint.h>
#include <time.h>
#include <x86intrin.h>
#include "fiber-platform.h"

/* Nanoseconds of a clock that does not jump. No alien stack is used for it in Lisp. */
uint64_t fiber_now()
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static uint64_t measure_cycles()
{
    uint64_t start = fiber_now(), cycles = __rdtsc(), now;
    while ((now = fiber_now()) < start + 20000) {}
    return (__rdtsc() - cycles) * 1000000 / (now - start);
}

/* The median of five: if the kernel interrupts the thread between two readings, the result may be
 * anything. */
uint64_t fiber_cycles_per_millisecond()
{
    static uint64_t result;
    if (!result) {
        uint64_t sorted[5];
        for (int n = 0; n < 5; ++n) {
            uint64_t cycles = measure_cycles();
            int i = n;
            for (; i > 0 && sorted[i-1] > cycles; --i) sorted[i] = sorted[i-1];
            sorted[i] = cycles;
        }
        result = sorted[2];
    }
    return result;
}

/* Nanoseconds of processor time that the thread TID of this process has used. */
int64_t fiber_thread_time(int tid)
{
    struct timespec t;
    clockid_t clock = ~(clockid_t)tid << 3 | 6; // as pthread_getcpuclockid() makes it
    return clock_gettime(clock, &t) ? 0 : (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#endif
