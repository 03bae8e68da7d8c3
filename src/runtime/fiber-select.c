/*
 * Sets of descriptors, as select(2) and poll(2) are given them
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
#include <poll.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <unistd.h>
#include "fiber-platform.h"

/*
 * The result is one word: a single descriptor with its directions in bits 32 and 33; or an epoll
 * descriptor that is readable when a descriptor of the set is ready, with bit 40; -1 if something
 * is ready, so that the caller should ask at once; -2 if the set is empty; -3 if it cannot be made.
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

#endif
