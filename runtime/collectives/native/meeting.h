/* Where the engines of a group of ranks meet: threads of one process, processes that share memory, or processes of several
 * machines, which send each other messages. What they do there is in transfers.h and all_reduce.h.
 *
 * All ranks take part in the same collectives in the same order. Each begins a run by `meeting_begin`; a rank that fails
 * during a run, or can't begin it, says so by `meeting_fail` before it begins another one, and the others' collectives of
 * that run return at once. A rank that finds another one in a later run, which has not failed in this one, was not given
 * the same runs: its collectives return MEETING_APART. */
#ifndef SPLITC_MEETING_H
#define SPLITC_MEETING_H

#include <stdalign.h>
#include <stddef.h>
#include <stdint.h>

#include "waiting.h"

/* That of meeting.py, which refuses larger meetings. */
#define MOST_RANKS 1024

enum { MEETING_OK = 0, MEETING_FAILED = 1, MEETING_LATE = 2, MEETING_DIFFERENT = 3, MEETING_APART = 4 };

/* Messages between ranks that share no memory. Those of one rank to another arrive in order. All belong to a run. */
typedef struct Post {
    /* Send a message of two parts, which are copied. Returns MEETING_OK, or MEETING_FAILED where a rank failed in the run. */
    int (*send)(uint64_t run, int peer, const void* head, size_t head_bytes, const void* value, size_t bytes);
    /* Wait for the next message of a rank in the run, and copy its first bytes. Returns MEETING_OK, MEETING_FAILED where a
     * rank failed in the run, MEETING_LATE where there is none within `patience` seconds, MEETING_APART. */
    int (*wait)(uint64_t run, int peer, void* head, size_t head_bytes, double patience);
    /* Take the message that was waited for, and copy its last bytes. */
    void (*take)(int peer, void* value, size_t bytes);
    /* Tell all others that this rank fails in the run. */
    void (*fail)(uint64_t run);
} Post;

/* Ranks may be in runs that are up to so many apart: an earlier one is taken to have failed where this one has. */
#define FAILURES 64

/* To be made of zeroed memory, before any rank uses it. */
typedef struct Meeting {
    int ranks;
    /* Ranks that are processes copy what others read to so many bytes each; threads read each other's arrays where they are,
     * and need none. */
    size_t staging;
    const Post* post; /* how ranks that share no memory reach each other; NULL where they share it */
    alignas(LINE) _Atomic uint64_t failed; /* the last run that failed */
    _Atomic uint64_t failures[FAILURES];   /* the last one of each remainder */
    Bell bell;
    alignas(LINE) char memory[]; /* that of transfers, then that of all-reduces; none with a post */
} Meeting;

/* One rank's end. It waits for the others for `patience` seconds at most. */
typedef struct Member {
    Meeting* meeting;
    int rank;
    double patience;
    uint64_t run, step;
} Member;

/* Begin the run of this number, which is at least 1, and larger than those of earlier ones. */
void meeting_begin(Member* member, uint64_t run);
/* The run may be an earlier one than the member's: a device ends its work after the next run has begun. */
void meeting_fail(Member* member, uint64_t run);
/* Whether a rank failed in the run. Ranks that are ahead may have failed in later ones, of which it knows nothing. */
int meeting_has_failed(Meeting* meeting, uint64_t run);
/* No rank may wait any more, now or later. */
void meeting_abort(Meeting* meeting);

#endif
