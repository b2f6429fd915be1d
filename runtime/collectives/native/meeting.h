/* Where ranks on CPU devices meet: threads of one process, or processes that share memory.
 *
 * All ranks take part in the same collectives in the same order. Each begins a run by `meeting_begin`; a rank that fails
 * during a run, or can't begin it, says so by `meeting_fail`, and the others' collectives of that run return at once. */
#ifndef SPLITC_MEETING_H
#define SPLITC_MEETING_H

#include <stddef.h>
#include <stdint.h>

enum { MEETING_OK = 0, MEETING_FAILED = 1, MEETING_LATE = 2, MEETING_DIFFERENT = 3 };

typedef struct Meeting Meeting;

/* Bytes of a meeting. Ranks that are processes need `staging` bytes each, to which they copy what others read; ranks that
 * are threads read each other's arrays where they are, and need none. */
size_t meeting_bytes(int ranks, size_t staging);
/* Make zeroed memory a meeting. To be called once, before any rank uses it. */
void meeting_init(Meeting* meeting, int ranks, size_t staging);

/* One rank's end. It waits for the others for `patience` seconds at most. */
typedef struct Member {
    Meeting* meeting;
    int rank;
    double patience;
    uint64_t run, step;
} Member;

void meeting_begin(Member* member);
void meeting_fail(Member* member);
/* No rank may wait any more, now or later. */
void meeting_abort(Meeting* meeting);

/* Combine what all ranks have; `out` may be `in`. Returns MEETING_OK, MEETING_FAILED where another rank has failed or the
 * meeting was aborted, MEETING_LATE where a rank did not come in time, MEETING_DIFFERENT where the ranks' arrays differ in
 * type or length. `who` becomes the rank that is late or different. */
int meeting_all_reduce(Member* member, int operation, int type, const void* in, void* out, size_t count, int* who);

#endif
