/*
 * Pages of the heap that hold nothing but garbage between pinned objects
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

#include <stdint.h>
#include <sys/mman.h>
#include "fiber-stack.h"
#include "gc.h"
#include "lispobj.h"

/*
 * A parked stack pins the objects that it refers to, and with each a page of the collector's, of 32
 * KiB. What else was there becomes filler. The pages of the operating system that are nothing but
 * filler are given back, and then are zero: the collector does not look into a filler but where it
 * begins, and at the beginning of each card, where a zero is as good as a header: no pointer.
 *
 * Only in a collection of an older generation, which comes seldom, and in which hardly any page is
 * pinned but by stacks that are parked: a page that is given back costs a fault when it is used
 * again.
 */
enum { NURSERY_GENERATIONS = 2, OS_PAGE_SIZE = 4096 };

/* So that a card which is scanned alone begins with a header: CARD and the others up to END, in the
 * filler that ends at TO. */
static void fill_cards(char* card, char* end, char* to)
{
    for (; card < end; card += GENCGC_CARD_BYTES)
        *(lispobj*)card = make_filler_header((uword_t)(to - card) >> WORD_SHIFT);
}

/* Pages of a core that is mapped would come back as they are there. */
static bool mapped_from_core(char* start)
{
    return (os_vm_address_t)start < anon_dynamic_space_start;
}

/* Called with a filler, whose header is there. Was it given back, with headers where they are
 * needed? If the world is not stopped it is no filler between pinned objects. */
int fiber_give_filler_back(char* from, char* to)
{
    if (!gc_active_p || from_space < NURSERY_GENERATIONS) return 0;
    char *start = PTR_ALIGN_UP(from + N_WORD_BYTES, OS_PAGE_SIZE),
         *end = PTR_ALIGN_DOWN(to, OS_PAGE_SIZE);
    if (start >= end || mapped_from_core(start) || madvise(start, end - start, MADV_DONTNEED))
        return 0;
    fill_cards(PTR_ALIGN_DOWN(from, GENCGC_CARD_BYTES) + GENCGC_CARD_BYTES, start, to);
    fill_cards(end, to, to);
    return 1;
}

#endif
