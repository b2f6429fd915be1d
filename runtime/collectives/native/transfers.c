#include "transfers.h"

#include <string.h>

/* Values of up to PIECE bytes take one packet. A sender is ahead of the receiver by up to PACKETS of them. */
#define PACKETS 8
#define PIECE (64 * 1024)

/* A value, or a piece of it. The head is that of the whole value. */
typedef struct Packet {
    uint64_t run;
    Head head;
    alignas(LINE) char piece[PIECE];
} Packet;

/* What one rank sends to another. The sender counts packets that it has written, the receiver those that it has taken. */
typedef struct Queue {
    alignas(LINE) _Atomic uint64_t written;
    alignas(LINE) _Atomic uint64_t taken;
    Packet packets[PACKETS];
} Queue;

size_t transfer_bytes(int ranks) { return (size_t)ranks * (size_t)ranks * sizeof(Queue); }

static Queue* queue_of(Meeting* meeting, int source, int target) {
    return (Queue*)meeting->memory + (size_t)source * (size_t)meeting->ranks + (size_t)target;
}

static size_t least(size_t one, size_t other) { return one < other ? one : other; }

/* Wait until the queue is not full. */
static int await_slot(Member* member, Queue* queue) {
    Meeting* meeting = member->meeting;
    Wait wait = wait_for(&meeting->bell, meeting->ranks, member->patience);
    for (;;) {
        uint32_t seen = changes_of(&meeting->bell);
        if (meeting_has_failed(meeting, member->run)) return MEETING_FAILED;
        if (atomic_load(&queue->written) - atomic_load(&queue->taken) < PACKETS) return MEETING_OK;
        if (!wait_on(&wait, seen)) {
            meeting_fail(member, member->run);
            return MEETING_LATE;
        }
    }
}

/* Wait for the next packet of this run. Those of earlier runs, which failed, are dropped. A rank that has left a run before
 * its end has said first that it failed. */
static int await_packet(Member* member, Queue* queue, Packet** packet) {
    Meeting* meeting = member->meeting;
    Wait wait = wait_for(&meeting->bell, meeting->ranks, member->patience);
    for (;;) {
        uint32_t seen = changes_of(&meeting->bell);
        uint64_t taken = atomic_load(&queue->taken);
        if (atomic_load(&queue->written) > taken) {
            *packet = &queue->packets[taken % PACKETS];
            if ((*packet)->run == member->run) return MEETING_OK;
            uint64_t run = (*packet)->run;
            if (run > member->run) return meeting_has_failed(meeting, member->run) ? MEETING_FAILED : MEETING_APART;
            if (!meeting_has_failed(meeting, run)) return MEETING_APART;
            atomic_store(&queue->taken, taken + 1);
            ring(&meeting->bell);
        } else if (meeting_has_failed(meeting, member->run)) {
            return MEETING_FAILED;
        } else if (!wait_on(&wait, seen)) {
            meeting_fail(member, member->run);
            return MEETING_LATE;
        }
    }
}

int transfer_send(Member* member, int peer, const Head* head, const void* value, size_t bytes) {
    const Post* post = member->meeting->post;
    if (post) return post->send(member->run, peer, head, sizeof *head, value, bytes);
    Queue* queue = queue_of(member->meeting, member->rank, peer);
    size_t sent = 0;
    do {
        int status = await_slot(member, queue);
        if (status != MEETING_OK) return status;
        uint64_t written = atomic_load(&queue->written);
        Packet* packet = &queue->packets[written % PACKETS];
        size_t some = least(bytes - sent, PIECE);
        packet->run = member->run;
        packet->head = *head;
        if (some) memcpy(packet->piece, (const char*)value + sent, some);
        atomic_store(&queue->written, written + 1);
        ring(&member->meeting->bell);
        sent += some;
    } while (sent < bytes);
    return MEETING_OK;
}

int transfer_await(Member* member, int peer, Head* head) {
    const Post* post = member->meeting->post;
    if (post) {
        int status = post->wait(member->run, peer, head, sizeof *head, member->patience);
        if (status == MEETING_LATE) meeting_fail(member, member->run);
        return status;
    }
    Packet* packet;
    int status = await_packet(member, queue_of(member->meeting, peer, member->rank), &packet);
    if (status == MEETING_OK) *head = packet->head;
    return status;
}

int transfer_take(Member* member, int peer, void* value, size_t bytes) {
    const Post* post = member->meeting->post;
    if (post) return post->take(peer, value, bytes), MEETING_OK;
    Queue* queue = queue_of(member->meeting, peer, member->rank);
    size_t taken = 0;
    do {
        Packet* packet;
        int status = await_packet(member, queue, &packet);
        if (status != MEETING_OK) return status;
        size_t some = least(bytes - taken, PIECE);
        if (some) memcpy((char*)value + taken, packet->piece, some);
        atomic_store(&queue->taken, atomic_load(&queue->taken) + 1);
        ring(&member->meeting->bell);
        taken += some;
    } while (taken < bytes);
    return MEETING_OK;
}
