/*
 * How much of the processors the control groups of this process let it use
 *
 * A quota is so much time in each period. It is for all of a group, so that those of the ancestors
 * hold as well, and the least of all counts. /proc/self/cgroup names the group, as a path in a
 * hierarchy; /proc/self/mountinfo tells where the hierarchy is mounted, and from which of its
 * groups on. In a container that may be the very group, or one that is not above it by name: then
 * what is mounted is all that can be asked.
 *
 *                /proc/self/cgroup     mountinfo                  file
 *   version 2    0::PATH               cgroup2                    cpu.max: "QUOTA PERIOD" or
 *                                                                 "max PERIOD"
 *   version 1    N:...,cpu,...:PATH    cgroup, with option cpu    cpu.cfs_quota_us, -1 for none;
 *                                                                 cpu.cfs_period_us
 *
 * A process may be in a group of each version; only one of them has quotas.
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

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "fiber-platform.h"

/* All files are below this directory; it is "" but in tests. */
static FILE* open_below(const char* root, const char* name)
{
    char path[3*PATH_MAX + 32];
    snprintf(path, sizeof path, "%s%s", root, name);
    return fopen(path, "re");
}

static int has_word(const char* list, const char* word)
{
    size_t n = strlen(word);
    for (const char* p = list; (p = strstr(p, word)); ++p)
        if ((p == list || p[-1] == ',') && (p[n] == ',' || p[n] == 0 || p[n] == '\n')) return 1;
    return 0;
}

/* The group of this process in the hierarchy of VERSION. */
static int group_path(const char* root, int version, char path[PATH_MAX])
{
    FILE* f = open_below(root, "/proc/self/cgroup");
    char *line = 0, *controllers, *end;
    size_t size = 0;
    int found = 0;
    while (f && !found && getline(&line, &size, f) > 0) {
        if (!(controllers = strchr(line, ':')) || !(end = strchr(++controllers, ':'))) continue;
        *end++ = 0;
        end[strcspn(end, "\n")] = 0;
        found = version == 2 ? !*controllers : has_word(controllers, "cpu");
        if (found) snprintf(path, PATH_MAX, "%s", end);
    }
    free(line);
    if (f) fclose(f);
    return found;
}

/* What follows TOP in PATH, or 0 if that is not at or below it. */
static const char* path_below(const char* path, const char* top)
{
    size_t n = strcmp(top, "/") ? strlen(top) : 0;
    return !strncmp(path, top, n) && (path[n] == '/' || !path[n]) ? path + n : 0;
}

/* Where that hierarchy is mounted, and from which group on; if it is mounted in several places, the
 * first that shows the group PATH. */
static int mount_point(const char* root, int version, const char* path, char top[PATH_MAX],
                       char point[PATH_MAX])
{
    FILE* f = open_below(root, "/proc/self/mountinfo");
    char *line = 0, type[64], options[PATH_MAX];
    size_t size = 0;
    int found = 0;
    while (f && !(found && path_below(path, top)) && getline(&line, &size, f) > 0) {
        char* rest = strstr(line, " - ");
        if (rest && sscanf(rest, " - %63s %*s %4095s", type, options) == 2
            && (version == 2 ? !strcmp(type, "cgroup2")
                : !strcmp(type, "cgroup") && has_word(options, "cpu")))
            found |= sscanf(line, "%*s %*s %*s %4095s %4095s", top, point) == 2;
    }
    free(line);
    if (f) fclose(f);
    return found;
}

static int read_number(const char* root, const char* directory, const char* name, long* number)
{
    char path[2*PATH_MAX + 32];
    snprintf(path, sizeof path, "%s%s", directory, name);
    FILE* f = open_below(root, path);
    int found = f && fscanf(f, "%ld", number) == 1;
    if (f) fclose(f);
    return found;
}

/* The quota of the group at DIRECTORY, in thousandths of a processor; 0 if it has none. */
static long quota_of_group(const char* root, int version, const char* directory)
{
    long quota = 0, period = 0;
    if (version == 2) {
        char path[2*PATH_MAX + 32];
        snprintf(path, sizeof path, "%s/cpu.max", directory);
        FILE* f = open_below(root, path);
        if (f && fscanf(f, "%ld %ld", &quota, &period) != 2) quota = 0;
        if (f) fclose(f);
    } else if (!read_number(root, directory, "/cpu.cfs_quota_us", &quota)
               || !read_number(root, directory, "/cpu.cfs_period_us", &period))
        return 0;
    if (quota <= 0 || period <= 0) return 0;
    long thousandths = (long)((double)quota / period * 1000);
    return thousandths ? thousandths : 1;
}

static long quota_of_version(const char* root, int version)
{
    char path[PATH_MAX], top[PATH_MAX], point[PATH_MAX], directory[2*PATH_MAX];
    if (!group_path(root, version, path) || !mount_point(root, version, path, top, point))
        return 0;
    const char* below = path_below(path, top);
    snprintf(directory, sizeof directory, "%s%s", point, below ? below : "");
    long least = 0;
    for (;;) {
        long quota = quota_of_group(root, version, directory);
        if (quota && (!least || quota < least)) least = quota;
        char* last = strrchr(directory, '/');
        if (strlen(directory) <= strlen(point) || !last) return least;
        *last = 0;
    }
}

/* The least quota, in thousandths of a processor; 0 if there is none. */
long fiber_quota_below(const char* root)
{
    long second = quota_of_version(root, 2), first = quota_of_version(root, 1);
    return !first || (second && second < first) ? second : first;
}

#endif
