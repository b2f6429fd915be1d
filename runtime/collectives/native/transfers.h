/* Values that the ranks of a meeting send to each other.
 *
 * In shared memory each pair of ranks has a queue in each direction. A sender goes on as long as the queue is not full; a
 * larger value goes in pieces, while the receiver takes them. */
#ifndef SPLITC_TRANSFERS_H
#define SPLITC_TRANSFERS_H

#include "meeting.h"

#define MOST_AXES 32

/* What a receiver must know of a value before it comes: its number type in ONNX, and its shape. */
typedef struct Head {
    int32_t type, axes;
    int64_t sizes[MOST_AXES];
} Head;

/* Bytes of a meeting's memory that its transfers take, from its beginning on. */
size_t transfer_bytes(int ranks);

/* Send a value to the rank `peer`, or its head alone where `bytes` is 0. Returns MEETING_OK, MEETING_FAILED where another
 * rank has failed or the meeting was aborted, MEETING_LATE where the peer did not take it in time, MEETING_APART. */
int transfer_send(Member* member, int peer, const Head* head, const void* value, size_t bytes);
/* Wait for the head of the next value from a rank. Returns as above. */
int transfer_await(Member* member, int peer, Head* head);
/* Take the value whose head was waited for, which has this many bytes. Returns as above. */
int transfer_take(Member* member, int peer, void* value, size_t bytes);

#endif
