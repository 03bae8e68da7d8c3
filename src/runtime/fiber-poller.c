/*
 * Readiness of descriptors, as epoll reports it, and how a carrier sleeps
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

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "fiber-platform.h"
#include "fiber.h"
#include "tiny-lock.h"

static uint32_t to_epoll(int directions)
{
    return EPOLLET | (directions & KEEP ? 0 : EPOLLONESHOT)
        | (directions & INPUT ? EPOLLIN | EPOLLPRI | EPOLLRDHUP : 0)
        | (directions & OUTPUT ? EPOLLOUT : 0);
}

/* An error or a hang-up concerns both directions, which find out about it by trying. */
static int from_epoll(uint32_t events)
{
    return (events & (EPOLLIN|EPOLLPRI|EPOLLRDHUP|EPOLLHUP|EPOLLERR) ? INPUT : 0)
        | (events & (EPOLLOUT|EPOLLHUP|EPOLLERR) ? OUTPUT : 0)
        | (events & EPOLLPRI ? URGENT : 0);
}

int fiber_poller_open()
{
    return epoll_create1(EPOLL_CLOEXEC);
}

/* An eventfd in EPOLL whose events carry DATA; edge triggered, so it is never read. */
int fiber_poller_add_wakeup(int epoll, uint64_t data)
{
    int fd = eventfd(0, EFD_CLOEXEC|EFD_NONBLOCK);
    struct epoll_event event = { .events = EPOLLIN|EPOLLET, .data.u64 = data };
    if (fd >= 0 && epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event)) {
        close(fd);
        return -1;
    }
    return fd;
}

/* A descriptor that fiber_poller_wake() makes readable until it is read. */
int fiber_event_open()
{
    return eventfd(0, EFD_CLOEXEC|EFD_NONBLOCK);
}

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

/* A descriptor that is readable once the child PID has ended, or -1: before Linux 5.3. */
int fiber_process_open(int pid)
{
    return syscall(SYS_pidfd_open, pid, 0);
}

void fiber_poller_wake(int wakeup)
{
    uint64_t one = 1;
    int saved_errno = errno;
    while (write(wakeup, &one, sizeof one) < 0 && errno == EINTR) {}
    errno = saved_errno;
}

/* Report the next readiness of FD in DIRECTIONS, once, or with KEEP each time that there is more.
 * 0 or an errno. The descriptor is registered already unless it is FRESH, as a rule; if it was
 * closed behind our back it is not, and if its number was closed while a duplicate lives on, or a
 * poller heard of it late, ADD finds it there. */
int fiber_poller_arm(int epoll, int fd, int directions, uint64_t data)
{
    struct epoll_event event = { .events = to_epoll(directions), .data.u64 = data };
    bool add = directions & FRESH;
    for (int tries = 0; tries < 6; ++tries, add = !add) {
        if (!epoll_ctl(epoll, add ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &event)) return 0;
        if (errno != (add ? EEXIST : ENOENT)) return errno;
    }
    return errno;
}

void fiber_poller_forget(int epoll, int fd)
{
    struct epoll_event event;
    epoll_ctl(epoll, EPOLL_CTL_DEL, fd, &event);
}

#define MAX_EVENTS 256

/* With MASK as the signal mask meanwhile. */
static int wait_for_events(int epoll, struct epoll_event* events, int n, int64_t nanoseconds,
                           sigset_t* mask)
{
    static int no_pwait2;
    if (nanoseconds <= 0 || no_pwait2)
        return epoll_pwait(epoll, events, n,
                           nanoseconds < 0 ? -1
                           : nanoseconds > (int64_t)86400*1000*1000*1000 ? 86400*1000
                           : (int)((nanoseconds + 999999) / 1000000), mask);
    struct timespec timeout = { nanoseconds / 1000000000, nanoseconds % 1000000000 };
    int found = syscall(SYS_epoll_pwait2, epoll, events, n, &timeout, mask, _NSIG / 8);
    if (found < 0 && errno == ENOSYS) { // before Linux 5.11
        no_pwait2 = 1;
        return wait_for_events(epoll, events, n, nanoseconds, mask);
    }
    return found;
}

/* A signal that comes before the kernel waits would not end the wait: its handler is deferred,
 * since the scheduler has interrupts off, and would not be run. So the wait itself lets them in. */
static int sleep_for_events(int epoll, struct epoll_event* events, int n, int64_t nanoseconds)
{
    sigset_t old;
    block_deferrable_signals(&old);
    bool pending = interrupt_handler_pending_p();
    int found = wait_for_events(epoll, events, n, pending ? 0 : nanoseconds, &old);
    if (!interrupt_handler_pending_p()) pthread_sigmask(SIG_SETMASK, &old, 0);
    // With a pending handler signals stay blocked; but its mask must be that of before this call.
    else if (!pending) thread_interrupt_data(get_sb_vm_thread()).pending_mask = old;
    return found;
}

/* futex(2) does not let signals in: here a handler that is deferred changes the word. */
static __thread int* volatile sleeping_on;

/* Sleep while the word is 0, until a signal comes. */
void fiber_sleep_on(int* word)
{
    sleeping_on = word;
    if (!interrupt_handler_pending_p()) futex_wait(word, 0, -1, 0);
    sleeping_on = 0;
}

void fiber_end_sleep() { if (sleeping_on) __atomic_store_n(sleeping_on, 1, __ATOMIC_SEQ_CST); }

/* Wait at most NANOSECONDS, for ever if negative. Writes pairs of words to OUT, which has room
 * for N: an event's data and its directions. Returns their number; 0 also if a
 * signal came. */
int fiber_poller_wait(int epoll, uint64_t* out, int n, int64_t nanoseconds)
{
    struct epoll_event events[MAX_EVENTS];
    if (n > MAX_EVENTS) n = MAX_EVENTS;
    int found = nanoseconds ? sleep_for_events(epoll, events, n, nanoseconds)
        : epoll_wait(epoll, events, n, 0);
    for (int i = 0; i < found; ++i) {
        out[2*i] = events[i].data.u64;
        out[2*i+1] = from_epoll(events[i].events);
    }
    return found < 0 ? 0 : found;
}

#endif
