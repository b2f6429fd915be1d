/* How a rank waits for what others publish: it looks for a while, then sleeps until something changes. */
#ifndef SPLITC_WAITING_H
#define SPLITC_WAITING_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stdint.h>

#define LINE 64

/* Counts what ranks publish, so that others can sleep until it changes. All ranks together have so many `cores`. */
typedef struct Bell {
    alignas(LINE) _Atomic uint32_t changes;
    _Atomic uint32_t sleepers;
    _Atomic int cores;
} Bell;

/* One wait of a rank, which looks `most` times before it sleeps and gives up after `patience` seconds. */
typedef struct Wait {
    Bell* bell;
    int looked, most;
    double start, patience;
} Wait;

/* To be called after something was published. */
void ring(Bell* bell);
/* The number of changes; to be read before the look at what is waited for. */
uint32_t changes_of(const Bell* bell);
/* A wait of one of `ranks` ranks. */
Wait wait_for(Bell* bell, int ranks, double patience);
/* Wait a little, or until there are other changes than those `seen`. Returns 0 once the patience is over. */
int wait_on(Wait* wait, uint32_t seen);

#endif
