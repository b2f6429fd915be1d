#include "transfers.h"

#include <stdalign.h>
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
typedef struct Channel {
    alignas(LINE) _Atomic uint64_t written;
    alignas(LINE) _Atomic uint64_t taken;
    Packet packets[PACKETS];
} Channel;

size_t channels_bytes(int ranks) { return (size_t)ranks * (size_t)ranks * sizeof(Channel); }

static Channel* channel_of(const Channels* all, int source, int target) {
    return (Channel*)all->memory + (size_t)source * (size_t)all->ranks + (size_t)target;
}

static size_t least(size_t one, size_t other) { return one < other ? one : other; }

/* Wait until there is room for another packet. */
static int await_room(Member* member, const Channels* all, Channel* channel) {
    Wait wait = wait_for(all->bell, all->ranks, member->patience);
    for (;;) {
        uint32_t seen = changes_of(all->bell);
        if (atomic_load(all->failed) >= member->run) return MEETING_FAILED;
        if (atomic_load(&channel->written) - atomic_load(&channel->taken) < PACKETS) return MEETING_OK;
        if (!wait_on(&wait, seen)) {
            meeting_fail(member, member->run);
            return MEETING_LATE;
        }
    }
}

/* Wait for the next packet of this run. Those of earlier runs, which failed, are dropped. A rank that has left a run before
 * its end has said first that it failed. */
static int await_packet(Member* member, const Channels* all, Channel* channel, Packet** found) {
    Wait wait = wait_for(all->bell, all->ranks, member->patience);
    for (;;) {
        uint32_t seen = changes_of(all->bell);
        uint64_t taken = atomic_load(&channel->taken);
        if (atomic_load(&channel->written) > taken) {
            *found = &channel->packets[taken % PACKETS];
            if ((*found)->run == member->run) return MEETING_OK;
            uint64_t failed = atomic_load(all->failed), run = (*found)->run;
            if (run > member->run) return failed >= member->run ? MEETING_FAILED : MEETING_APART;
            if (run > failed) return MEETING_APART;
            atomic_store(&channel->taken, taken + 1);
            ring(all->bell);
        } else if (atomic_load(all->failed) >= member->run) {
            return MEETING_FAILED;
        } else if (!wait_on(&wait, seen)) {
            meeting_fail(member, member->run);
            return MEETING_LATE;
        }
    }
}

int transfer_send(Member* member, int peer, const Head* head, const void* value, size_t bytes) {
    const Post* post = meeting_post(member->meeting);
    if (post) return post->send(member->run, peer, head, sizeof *head, value, bytes);
    Channels all = meeting_channels(member->meeting);
    Channel* channel = channel_of(&all, member->rank, peer);
    size_t sent = 0;
    do {
        int status = await_room(member, &all, channel);
        if (status != MEETING_OK) return status;
        uint64_t written = atomic_load(&channel->written);
        Packet* packet = &channel->packets[written % PACKETS];
        size_t some = least(bytes - sent, PIECE);
        packet->run = member->run;
        packet->head = *head;
        if (some) memcpy(packet->piece, (const char*)value + sent, some);
        atomic_store(&channel->written, written + 1);
        ring(all.bell);
        sent += some;
    } while (sent < bytes);
    return MEETING_OK;
}

int transfer_await(Member* member, int peer, Head* head) {
    const Post* post = meeting_post(member->meeting);
    if (post) {
        int status = post->wait(member->run, peer, head, sizeof *head, member->patience);
        if (status == MEETING_LATE) meeting_fail(member, member->run);
        return status;
    }
    Channels all = meeting_channels(member->meeting);
    Packet* packet;
    int status = await_packet(member, &all, channel_of(&all, peer, member->rank), &packet);
    if (status == MEETING_OK) *head = packet->head;
    return status;
}

int transfer_take(Member* member, int peer, void* value, size_t bytes) {
    const Post* post = meeting_post(member->meeting);
    if (post) return post->take(peer, value, bytes), MEETING_OK;
    Channels all = meeting_channels(member->meeting);
    Channel* channel = channel_of(&all, peer, member->rank);
    size_t taken = 0;
    do {
        Packet* packet;
        int status = await_packet(member, &all, channel, &packet);
        if (status != MEETING_OK) return status;
        size_t some = least(bytes - taken, PIECE);
        if (some) memcpy((char*)value + taken, packet->piece, some);
        atomic_store(&channel->taken, atomic_load(&channel->taken) + 1);
        ring(all.bell);
        taken += some;
    } while (taken < bytes);
    return MEETING_OK;
}
