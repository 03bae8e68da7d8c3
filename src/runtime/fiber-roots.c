/*
 * Roots that are kept, so that a collection of several generations looks at each stack once
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

#include <string.h>
#include <sys/mman.h>
#include "fiber-stack.h"

/*
 * What the stacks refer to that were scanned in this collection. What is here in one pass is
 * pinned in the next ones, so that it does not move and nothing on the stacks must be updated.
 *
 * What is true when nobody is inside: the chunks are a list, newest first, of which only the newest
 * has room; n_words counts what is in it. Most words are on many stacks, or many times on one:
 * what is in the table of recent ones is in some chunk. Between collections there are none.
 */
#define CHUNK_WORDS 131072
#define N_RECENT 4096

struct chunk {
    struct chunk* next;
    lispobj words[CHUNK_WORDS];
};
static struct chunk* chunks;
static uword_t n_words;
static lispobj recent[N_RECENT];

void fiber_drop_roots()
{
    if (!chunks) return;
    while (chunks) {
        struct chunk* next = chunks->next;
        munmap(chunks, sizeof *chunks);
        chunks = next;
    }
    n_words = 0;
    memset(recent, 0, sizeof recent);
}

static bool add_chunk()
{
    struct chunk* c = mmap(0, sizeof *c, PROT_READ|PROT_WRITE, MAP_PRIVATE|MAP_ANONYMOUS, -1, 0);
    if (c == MAP_FAILED) return 0;
    c->next = chunks;
    chunks = c;
    n_words = 0;
    return 1;
}

/* False if there is no memory: then the stack must be scanned again. */
bool fiber_keep_root(lispobj word)
{
    lispobj* r = &recent[(word >> N_LOWTAG_BITS) % N_RECENT];
    if (*r == word) return 1;
    if ((!chunks || n_words == CHUNK_WORDS) && !add_chunk()) return 0;
    chunks->words[n_words++] = *r = word;
    return 1;
}

struct fiber_roots fiber_kept_roots()
{
    return (struct fiber_roots){ chunks, n_words };
}

/* VISIT those that were there when ROOTS were asked for. */
void fiber_visit_roots(struct fiber_roots roots, fiber_root_visitor* visit)
{
    uword_t n = roots.n_words;
    for (struct chunk* c = roots.chunk; c; c = c->next, n = CHUNK_WORDS)
        for (uword_t i = 0; i < n; ++i) visit(c->words[i], 0);
}

#endif
