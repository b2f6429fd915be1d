/* Where ranks on CPU devices meet: threads of one process, processes that share memory, or processes of several machines,
 * which send each other messages.
 *
 * All ranks take part in the same collectives in the same order. Each begins a run by `meeting_begin`; a rank that fails
 * during a run, or can't begin it, says so by `meeting_fail` before it begins another one, and the others' collectives of
 * that run return at once. A rank that finds another one in a later run, which has not failed in this one, was not given
 * the same runs: its collectives return MEETING_APART. */
#ifndef SPLITC_MEETING_H
#define SPLITC_MEETING_H

#include <stddef.h>
#include <stdint.h>

enum { MEETING_OK = 0, MEETING_FAILED = 1, MEETING_LATE = 2, MEETING_DIFFERENT = 3, MEETING_APART = 4 };

typedef struct Meeting Meeting;

/* Bytes of a meeting. Ranks that are processes need `staging` bytes each, to which they copy what others read; ranks that
 * are threads read each other's arrays where they are, and need none. */
size_t meeting_bytes(int ranks, size_t staging);
/* Make zeroed memory a meeting. To be called once, before any rank uses it. */
void meeting_init(Meeting* meeting, int ranks, size_t staging);

/* Say how many cores the ranks have together: where they are more than those, none looks for long for what others do. */
void meeting_set_cores(Meeting* meeting, int cores);

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

/* Make zeroed memory the meeting of a rank that shares none: `meeting_bytes(0, 0)` bytes, which nobody else uses. */
void meeting_init_post(Meeting* meeting, int ranks, const Post* post);
/* How ranks that share no memory reach each other; NULL where they share it. */
const Post* meeting_post(const Meeting* meeting);

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
/* No rank may wait any more, now or later. */
void meeting_abort(Meeting* meeting);

/* Combine what all ranks have; `out` may be `in`. Returns MEETING_OK, MEETING_FAILED where another rank has failed or the
 * meeting was aborted, MEETING_LATE where a rank did not come in time, MEETING_DIFFERENT where the ranks' arrays differ in
 * type or length, MEETING_APART. `who` becomes the rank that is late or different. */
int meeting_all_reduce(Member* member, int operation, int type, const void* in, void* out, size_t count, int* who);

#endif
