/*
 * System calls on descriptors that never wait, and questions about descriptors
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
#include <netinet/in.h>
#include <poll.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#include "fiber-platform.h"

/* Is FD ready for DIRECTION now? 1, 0, or minus an errno. */
int fiber_poll_now(int fd, int direction)
{
    struct pollfd p = { fd, direction == INPUT ? POLLIN|POLLPRI : POLLOUT, 0 };
    int found;
    while ((found = poll(&p, 1, 0)) < 0 && errno == EINTR) {}
    return found < 0 ? -errno : found;
}

/* read(2) and write(2) that never wait, for descriptors for which the kernel has such calls. Return
 * a count, or minus an errno: EAGAIN if the call would wait, ENOTSOCK or EOPNOTSUPP if the kernel
 * has no such call for FD. */
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

/* The same for N parts, one behind the other. */
int64_t fiber_send_parts_now(int fd, struct iovec* parts, uint64_t n)
{
    struct msghdr message = { .msg_iov = parts, .msg_iovlen = n };
    int64_t count = sendmsg(fd, &message, MSG_DONTWAIT|MSG_NOSIGNAL);
    return count < 0 ? -errno : count;
}

int64_t fiber_write_parts_now(int fd, struct iovec* parts, uint64_t n)
{
    int64_t count = pwritev2(fd, parts, n, -1, RWF_NOWAIT);
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

int64_t fiber_plain_write_parts(int fd, struct iovec* parts, uint64_t n)
{
    int64_t count;
    while ((count = writev(fd, parts, n)) < 0 && errno == EINTR) {}
    return count < 0 ? -errno : count;
}

int64_t fiber_polled_write_parts(int fd, struct iovec* parts, uint64_t n)
{
    while (n > 1 && !parts->iov_len) parts++, n--;
    return n ? fiber_polled_write(fd, parts->iov_base, parts->iov_len) : 0;
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

/* Clear O_NONBLOCK, and leave errno, which the caller wants, as it is. */
int fiber_set_blocking(int fd)
{
    int saved_errno = errno, flags = fcntl(fd, F_GETFL);
    int result = flags < 0 ? -1 : fcntl(fd, F_SETFL, flags & ~O_NONBLOCK);
    errno = saved_errno;
    return result;
}

/* Is FD a stream socket, on which recv(2) with MSG_WAITALL waits for all bytes? */
int fiber_is_stream(int fd)
{
    int type = 0;
    socklen_t size = sizeof type;
    return !getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) && type == SOCK_STREAM;
}

/* Does epoll report everything after which a read or write of FD, which would have waited, would
 * not? It does for TCP and local streams. */
int fiber_edges_complete(int fd)
{
    int domain = 0, protocol = 0;
    socklen_t size = sizeof domain;
    if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size)) return 0;
    if (domain == AF_UNIX) return fiber_is_stream(fd);
    size = sizeof protocol;
    return (domain == AF_INET || domain == AF_INET6)
        && !getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &size) && protocol == IPPROTO_TCP;
}

/* Does connect(2) fail with ERROR because it is in progress? */
int fiber_is_connecting(int error) { return error == EINPROGRESS || error == EALREADY; }

/* How a connect(2) that was in progress has ended, in its own form. */
int fiber_connect_result(int fd)
{
    int error = 0;
    socklen_t size = sizeof error;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size)) return -1;
    errno = error;
    return error ? -1 : 0;
}

#endif
