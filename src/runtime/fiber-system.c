/*
 * What the kernel tells of this process and its threads, and makes them do
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

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "fiber-platform.h"

/* Processors on which this process may run. */
int fiber_processor_count()
{
    cpu_set_t set;
    long count = sched_getaffinity(0, sizeof set, &set) ? sysconf(_SC_NPROCESSORS_ONLN)
                                                         : CPU_COUNT(&set);
    return count < 1 ? 1 : (int)count;
}

/* How many mappings of memory a process may have: the kernel's default, if it does not tell. */
sword_t fiber_mapping_limit()
{
    char text[32] = "";
    int fd = open("/proc/sys/vm/max_map_count", O_RDONLY|O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    sword_t limit = n > 0 ? atol(text) : 0;
    return limit > 0 ? limit : 65530;
}

/* How many this process has: each is a line. One thread counts at a time. */
sword_t fiber_count_mappings()
{
    static char text[64*1024]; // the caller's stack may be a small one
    sword_t count = 0;
    ssize_t n;
    int fd = open("/proc/self/maps", O_RDONLY|O_CLOEXEC);
    if (fd < 0) return 0;
    while ((n = read(fd, text, sizeof text)) > 0)
        for (ssize_t i = 0; i < n; ++i) count += text[i] == '\n';
    close(fd);
    return n < 0 ? 0 : count;
}

/* Join THREAD, which is ending; fail if it has not ended yet, unless WAIT. */
int fiber_join_os_thread(pthread_t thread, int wait)
{
    return wait ? pthread_join(thread, 0) : pthread_tryjoin_np(thread, 0);
}

#define MEMBARRIER_PRIVATE_EXPEDITED 8
#define MEMBARRIER_REGISTER_PRIVATE_EXPEDITED 16

/* When this returns, all running threads of the process have executed a full barrier. -1 if the
 * kernel cannot do that, before Linux 4.14. */
int fiber_barrier_everywhere()
{
    if (!syscall(SYS_membarrier, MEMBARRIER_PRIVATE_EXPEDITED, 0, 0)) return 0;
    if (syscall(SYS_membarrier, MEMBARRIER_REGISTER_PRIVATE_EXPEDITED, 0, 0)) return -1;
    return syscall(SYS_membarrier, MEMBARRIER_PRIVATE_EXPEDITED, 0, 0);
}

/* Does the thread TID of this process wait in the kernel? 0 if it has a processor or
 * could use one; 1 also if that cannot be found out. */
int fiber_thread_waits(int tid)
{
    char name[64], line[512];
    snprintf(name, sizeof name, "/proc/self/task/%d/stat", tid);
    int fd = open(name, O_RDONLY|O_CLOEXEC);
    if (fd < 0) return 1;
    ssize_t n = read(fd, line, sizeof line - 1);
    close(fd);
    line[n < 0 ? 0 : n] = 0;
    char* end = strrchr(line, ')'); // of the thread's name
    return !end || end[1] == 0 || end[2] != 'R';
}

#endif
