/* Sums and maxima over the ranks of a meeting. */
#ifndef SPLITC_ALL_REDUCE_H
#define SPLITC_ALL_REDUCE_H

#include "meeting.h"

/* Bytes of a meeting's memory that its all-reduces take. */
size_t all_reduce_bytes(int ranks, size_t staging);

/* Combine what all ranks have; `out` may be `in`. Returns MEETING_OK, MEETING_FAILED where another rank has failed or the
 * meeting was aborted, MEETING_LATE where a rank did not come in time, MEETING_DIFFERENT where the ranks' arrays differ in
 * type or length, MEETING_APART. `who` becomes the rank that is late or different. */
int all_reduce(Member* member, int operation, int type, const void* in, void* out, size_t count, int* who);

#endif
