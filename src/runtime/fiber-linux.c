/*
 * What the fiber scheduler asks of Linux: readiness of descriptors, a wake-up, a clock.
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
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/select.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#include <x86intrin.h>
#include "fiber-stack.h"
#include "tiny-lock.h"

/* The contract is in code/fiber-poller.lisp; these numbers belong to it. */
enum { INPUT = 1, OUTPUT = 2 };

static uint32_t to_epoll(int directions)
{
    return EPOLLET | EPOLLONESHOT
        | (directions & INPUT ? EPOLLIN | EPOLLPRI | EPOLLRDHUP : 0)
        | (directions & OUTPUT ? EPOLLOUT : 0);
}

/* An error or hang-up is for both sides to find out about by trying. */
static int from_epoll(uint32_t events)
{
    return (events & (EPOLLIN|EPOLLPRI|EPOLLRDHUP|EPOLLHUP|EPOLLERR) ? INPUT : 0)
        | (events & (EPOLLOUT|EPOLLHUP|EPOLLERR) ? OUTPUT : 0);
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

/* Report the next readiness of FD in DIRECTIONS, once. 0 or an errno. The descriptor is
 * registered already, as a rule; if it was closed behind our back it is not, and if its
 * number was closed while a duplicate lives on, ADD finds it there after MOD did not. */
int fiber_poller_arm(int epoll, int fd, int directions, uint64_t data)
{
    struct epoll_event event = { .events = to_epoll(directions), .data.u64 = data };
    for (int tries = 0; tries < 3; ++tries) {
        if (!epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event)) return 0;
        if (errno != ENOENT) return errno;
        if (!epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event)) return 0;
        if (errno != EEXIST) return errno;
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

/* A signal that comes before the kernel waits would not end the wait: its handler is deferred, since the
 * scheduler has interrupts off, and nobody would run it. So signals are let in by the wait itself. */
static int sleep_for_events(int epoll, struct epoll_event* events, int n, int64_t nanoseconds)
{
    sigset_t old;
    block_deferrable_signals(&old);
    bool pending = interrupt_handler_pending_p();
    int found = wait_for_events(epoll, events, n, pending ? 0 : nanoseconds, &old);
    if (!interrupt_handler_pending_p()) pthread_sigmask(SIG_SETMASK, &old, 0);
    // They stay blocked, which goes with a pending handler. What was blocked when it came is not ours.
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

/* Is FD ready for DIRECTION now? 1, 0, or minus an errno. */
int fiber_poll_now(int fd, int direction)
{
    struct pollfd p = { fd, direction == INPUT ? POLLIN|POLLPRI : POLLOUT, 0 };
    int found;
    while ((found = poll(&p, 1, 0)) < 0 && errno == EINTR) {}
    return found < 0 ? -errno : found;
}

/* read(2) and write(2) that never wait, for descriptors for which the kernel has
 * such a thing. Minus an errno: EAGAIN if they would wait, ENOTSOCK or EOPNOTSUPP if the
 * question makes no sense for FD. */
int64_t fiber_receive_now(int fd, void* buffer, uint64_t n)
{
    int64_t count = recv(fd, buffer, n, MSG_DONTWAIT);
    return count < 0 ? -errno : count;
}

int64_t fiber_send_now(int fd, void* buffer, uint64_t n)
{
    int64_t count = send(fd, buffer, n, MSG_DONTWAIT|MSG_NOSIGNAL);
    return count < 0 ? -errno : count;
}

int64_t fiber_read_now(int fd, void* buffer, uint64_t n)
{
    struct iovec v = { buffer, n };
    int64_t count = preadv2(fd, &v, 1, -1, RWF_NOWAIT);
    return count < 0 ? -errno : count;
}

int64_t fiber_write_now(int fd, void* buffer, uint64_t n)
{
    struct iovec v = { buffer, n };
    int64_t count = pwritev2(fd, &v, 1, -1, RWF_NOWAIT);
    return count < 0 ? -errno : count;
}

int64_t fiber_plain_read(int fd, void* buffer, uint64_t n)
{
    int64_t count;
    while ((count = read(fd, buffer, n)) < 0 && errno == EINTR) {}
    return count < 0 ? -errno : count;
}

int64_t fiber_plain_write(int fd, void* buffer, uint64_t n)
{
    int64_t count;
    while ((count = write(fd, buffer, n)) < 0 && errno == EINTR) {}
    return count < 0 ? -errno : count;
}

/* For descriptors that have to be asked: when FD is ready, PIPE_BUF bytes have room. */
int64_t fiber_polled_write(int fd, char* buffer, uint64_t n)
{
    uint64_t done = 0;
    while (done < n && fiber_poll_now(fd, OUTPUT) > 0) {
        uint64_t rest = n - done;
        int64_t count = fiber_plain_write(fd, buffer + done, rest < PIPE_BUF ? rest : PIPE_BUF);
        if (count < 0) return done ? (int64_t)done : count;
        done += count;
    }
    return done || !n ? (int64_t)done : -EAGAIN;
}

/* A number that tells the open file FD from others, of 61 bits; 0 if there is none. */
uint64_t fiber_file_identity(int fd)
{
    struct stat s;
    if (fstat(fd, &s)) return 0;
    return ((uint64_t)s.st_dev << 40 ^ s.st_ino) & (((uint64_t)1 << 61) - 1);
}

int fiber_is_nonblocking(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && (flags & O_NONBLOCK);
}

/* Set O_NONBLOCK. 1 if it was not set before, 0 if it was, -1 if that fails. */
int fiber_set_nonblocking(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0) return -1;
    if (flags & O_NONBLOCK) return 0;
    return fcntl(fd, F_SETFL, flags | O_NONBLOCK) ? -1 : 1;
}

/* The caller wants errno as it is. */
int fiber_set_blocking(int fd)
{
    int saved_errno = errno, flags = fcntl(fd, F_GETFL);
    int result = flags < 0 ? -1 : fcntl(fd, F_SETFL, flags & ~O_NONBLOCK);
    errno = saved_errno;
    return result;
}

/* Does recv(2) with MSG_WAITALL wait for all on FD? */
int fiber_is_stream(int fd)
{
    int type = 0;
    socklen_t size = sizeof type;
    return !getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) && type == SOCK_STREAM;
}

/* How a connect(2) that was in progress has ended, in its own form. */
int fiber_connect_result(int fd)
{
    int error = 0;
    socklen_t size = sizeof error;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size)) return -1;
    errno = error;
    return error ? -1 : 0;
}

/*
 * Sets of descriptors. The result is one word: a single descriptor with its directions in
 * bits 32 and 33, or an epoll descriptor that is readable when one of the set is ready,
 * with bit 40. -1 if something is ready, so that one should ask at once; -2 if the set is empty;
 * -3 if it cannot be made.
 */
#define SET_IS_EPOLL ((int64_t)1 << 40)
enum { EXCEPTION = 4 }; // a direction in sets only

struct set_builder { int64_t single; int epoll; int count; struct pollfd* fds; int n_fds; };

static int directions_of(struct pollfd* p)
{
    int directions = (p->events & POLLIN ? INPUT : 0) | (p->events & POLLOUT ? OUTPUT : 0)
        | (p->events & POLLPRI ? EXCEPTION : 0);
    return directions ? directions : EXCEPTION; // an error is reported even so
}

/* What is wanted of FD, which is in the set more than once. */
static int all_directions(struct set_builder* b, int fd)
{
    int directions = 0;
    for (int i = 0; i < b->n_fds; ++i)
        if (b->fds[i].fd == fd) directions |= directions_of(&b->fds[i]);
    return directions;
}

static uint32_t level_events(int directions)
{
    return (directions & INPUT ? EPOLLIN | EPOLLRDHUP : 0) | (directions & OUTPUT ? EPOLLOUT : 0)
        | (directions & EXCEPTION ? EPOLLPRI : 0);
}

static int add_to_epoll(struct set_builder* b, int fd, int directions)
{
    if (b->epoll < 0 && (b->epoll = epoll_create1(EPOLL_CLOEXEC)) < 0) return -1;
    struct epoll_event event = { .events = level_events(directions) };
    if (!epoll_ctl(b->epoll, EPOLL_CTL_ADD, fd, &event)) return 0;
    if (errno == EPERM || errno == EBADF) return 1; // poll(2) reports these at once
    if (errno != EEXIST) return -1;
    event.events = level_events(all_directions(b, fd));
    return epoll_ctl(b->epoll, EPOLL_CTL_MOD, fd, &event);
}

/* 1 if FD is ready, as far as that can be seen here; -1 if the set cannot be made. */
static int add_to_set(struct set_builder* b, int fd, int directions)
{
    if (b->count++ == 0) {
        b->single = fd | (int64_t)directions << 32;
        return directions == INPUT || directions == OUTPUT ? 0 : add_to_epoll(b, fd, directions);
    }
    int result = b->epoll < 0 ? add_to_epoll(b, b->single & 0x7fffffff, b->single >> 32) : 0;
    return result ? result : add_to_epoll(b, fd, directions);
}

/* A loop that accepts connections would otherwise park once for each. */
static int ready_at_once(struct set_builder* b)
{
    struct pollfd p = { b->epoll >= 0 ? b->epoll : (int)(b->single & 0x7fffffff), 0, 0 };
    p.events = b->epoll >= 0 || b->single >> 32 == INPUT ? POLLIN : POLLOUT;
    return poll(&p, 1, 0) != 0;
}

static int64_t finish_set(struct set_builder* b, int result)
{
    if (!result && b->count && ready_at_once(b)) result = 1;
    if (result) {
        if (b->epoll >= 0) close(b->epoll);
        return result > 0 ? -1 : -3;
    }
    return b->epoll >= 0 ? b->epoll | SET_IS_EPOLL : b->count ? b->single : -2;
}

/* Not FD_ISSET, which may refuse the numbers beyond FD_SETSIZE; Lisp's sets have room for more. */
static int fd_is_set(fd_set* set, int fd)
{
    return set && (((unsigned long*)set)[fd / 64] >> (fd % 64) & 1);
}

int64_t fiber_select_set(int n, fd_set* input, fd_set* output, fd_set* exceptions)
{
    struct set_builder b = { -1, -1, 0 };
    int result = 0;
    for (int fd = 0; fd < n && !result; ++fd) {
        int directions = (fd_is_set(input, fd) ? INPUT : 0) | (fd_is_set(output, fd) ? OUTPUT : 0)
            | (fd_is_set(exceptions, fd) ? EXCEPTION : 0);
        if (directions) result = add_to_set(&b, fd, directions);
    }
    return finish_set(&b, result);
}

int64_t fiber_poll_set(struct pollfd* fds, int n)
{
    struct set_builder b = { -1, -1, 0, fds, n };
    int result = 0;
    for (int i = 0; i < n && !result; ++i)
        if (fds[i].fd >= 0) result = add_to_set(&b, fds[i].fd, directions_of(&fds[i]));
    return finish_set(&b, result);
}

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

/* The median of five: a thread that the kernel interrupts between two readings measures anything. */
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

/* Let the handler for interruptions run in a thread of this process, if it has not ended. By its
 * number in the kernel: unlike pthread_kill() this may be asked of a thread that has ended, and
 * takes no lock to keep it. Who has the number by then handles a signal that has no cause. */
void fiber_interrupt_os_thread(int tid)
{
    int saved_errno = errno;
    syscall(SYS_tgkill, getpid(), tid, SIGURG);
    errno = saved_errno;
}

/* Let this thread not handle the expiry of the process's timer: another one will. */
void fiber_block_timer_signal()
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &set, 0);
}

/* Processors that this process may use: by affinity, and by the quota of its cgroup. */
static long quota_of_cgroup()
{
    char text[64] = "";
    int fd = open("/sys/fs/cgroup/cpu.max", O_RDONLY|O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    long quota = 0, period = 0;
    char* p = text;
    if (n <= 0 || *p == 'm') return 0; // "max"
    while (*p >= '0' && *p <= '9') quota = quota*10 + (*p++ - '0');
    while (*p == ' ') ++p;
    while (*p >= '0' && *p <= '9') period = period*10 + (*p++ - '0');
    return period ? (quota + period - 1) / period : 0;
}

int fiber_processor_count()
{
    cpu_set_t set;
    long count = sched_getaffinity(0, sizeof set, &set) ? sysconf(_SC_NPROCESSORS_ONLN)
                                                         : CPU_COUNT(&set);
    long quota = quota_of_cgroup();
    if (quota > 0 && quota < count) count = quota;
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

/* How many this process has: each is a line. One counts at a time. */
sword_t fiber_count_mappings()
{
    static char text[64*KIB]; // the caller's stack may be a small one
    sword_t count = 0;
    ssize_t n;
    int fd = open("/proc/self/maps", O_RDONLY|O_CLOEXEC);
    if (fd < 0) return 0;
    while ((n = read(fd, text, sizeof text)) > 0)
        for (ssize_t i = 0; i < n; ++i) count += text[i] == '\n';
    close(fd);
    return count;
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

/* Nanoseconds of processor time that the thread TID of this process has used. */
int64_t fiber_thread_time(int tid)
{
    struct timespec t;
    clockid_t clock = ~(clockid_t)tid << 3 | 6; // as pthread_getcpuclockid() makes it
    return clock_gettime(clock, &t) ? 0 : (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
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
