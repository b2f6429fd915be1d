/* Values that ranks which meet send to each other: threads of one process, processes that share memory, or that send each
 * other messages.
 *
 * In memory each pair of ranks has a channel in each direction, first in, first out. A sender goes on as long as there is room in
 * the channel; what does not fit goes in pieces, while the receiver takes them. */
#ifndef SPLITC_TRANSFERS_H
#define SPLITC_TRANSFERS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "meeting.h"
#include "waiting.h"

#define MOST_AXES 32

/* What a receiver must know of a value before it comes: its number type in ONNX, and its shape. */
typedef struct Head {
    int32_t type, axes;
    int64_t sizes[MOST_AXES];
} Head;

/* The channels of a meeting, what its ranks wait by, and the last run that failed. */
typedef struct Channels {
    int ranks;
    Bell* bell;
    const _Atomic uint64_t* failed;
    char* memory; /* zeroed at first */
} Channels;

size_t channels_bytes(int ranks);
/* Defined by the meeting. */
Channels meeting_channels(Meeting* meeting);

/* Send a value to the rank `peer`, or its head alone where `bytes` is 0. Returns MEETING_OK, MEETING_FAILED where another
 * rank has failed or the meeting was aborted, MEETING_LATE where the peer did not take it in time, MEETING_APART. */
int transfer_send(Member* member, int peer, const Head* head, const void* value, size_t bytes);
/* Wait for the head of the next value from a rank. Returns as above. */
int transfer_await(Member* member, int peer, Head* head);
/* Take the value whose head was waited for, which has this many bytes. Returns as above. */
int transfer_take(Member* member, int peer, void* value, size_t bytes);

#endif
