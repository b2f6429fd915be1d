#include "all_reduce.h"

#include <stdlib.h>
#include <string.h>

#include "combine.h"
#include "transfers.h"

/* Elements that a rank combines for all are a multiple of this, so that no two write to one line of the cache. */
#define ALIGNED 64

/* What a rank brings to a collective. `ready` and `done` are the position in the run up to which it has come. */
typedef struct Slot {
    alignas(LINE) _Atomic uint64_t ready;
    _Atomic uint64_t done;
    const void* in;
    void* out;
    size_t count;
    int type, operation;
} Slot;

/* Behind the slots each rank has the bytes that it stages its arrays in. */
typedef struct Table {
    /* The last position of which it was decided whether it takes place: twice its number, plus 1 where it does not. */
    alignas(LINE) _Atomic uint64_t verdict;
    Slot slots[];
} Table;

static size_t staged_bytes(size_t staging) { return (staging + LINE - 1) / LINE * LINE; }

size_t all_reduce_bytes(int ranks, size_t staging) {
    return sizeof(Table) + (size_t)ranks * (sizeof(Slot) + staged_bytes(staging));
}

static Table* table_of(Meeting* meeting) { return (Table*)(meeting->memory + transfer_bytes(meeting->ranks)); }

static char* staged(Meeting* meeting, int rank) {
    return (char*)&table_of(meeting)->slots[meeting->ranks] + (size_t)rank * staged_bytes(meeting->staging);
}

static uint64_t position(const Member* member) { return member->run << 24 | member->step; }

/* The first rank that has not come to `at`; -1 where all have. */
static int missing(Meeting* meeting, uint64_t at, int done) {
    const Slot* slots = table_of(meeting)->slots;
    for (int rank = 0; rank < meeting->ranks; rank++)
        if (atomic_load(done ? &slots[rank].done : &slots[rank].ready) < at) return rank;
    return -1;
}

/* Whether a rank is past `at`. */
static int is_passed(Meeting* meeting, uint64_t at) {
    const Slot* slots = table_of(meeting)->slots;
    for (int rank = 0; rank < meeting->ranks; rank++)
        if (atomic_load(&slots[rank].ready) > at) return 1;
    return 0;
}

/* Decide whether the collective at a position takes place. The first to decide does so for all: none reads the array of
 * a rank that has gone, and none goes whose array another one reads. */
static void decide(Meeting* meeting, uint64_t at, int abandoned) {
    uint64_t before = atomic_load(&table_of(meeting)->verdict);
    while (before >> 1 < at && !atomic_compare_exchange_weak(&table_of(meeting)->verdict, &before, at << 1 | abandoned)) {
    }
    ring(&meeting->bell);
}

/* Wait until all ranks are at the position, or one has failed. */
static int await_ready(Member* member, uint64_t at, int* who) {
    Meeting* meeting = member->meeting;
    Wait wait = wait_for(&meeting->bell, meeting->ranks, member->patience);
    int result = MEETING_FAILED;
    for (;;) {
        uint32_t seen = changes_of(&meeting->bell);
        uint64_t verdict = atomic_load(&table_of(meeting)->verdict);
        if (verdict >> 1 == at) return verdict & 1 ? result : MEETING_OK;
        if (verdict >> 1 > at) return result;
        int late = missing(meeting, at, 0), passed = is_passed(meeting, at);
        /* First of all: a rank that has failed may be in a later run by now, and so not be missing. Where nothing was
         * decided, none has come past this collective. */
        if (atomic_load(&meeting->failed) >= member->run) {
            decide(meeting, at, 1);
        } else if (passed) { /* a rank says first that it has failed */
            result = MEETING_APART;
            decide(meeting, at, 1);
        } else if (late < 0) {
            decide(meeting, at, 0);
        } else if (!wait_on(&wait, seen)) {
            *who = late;
            result = MEETING_LATE;
            meeting_fail(member, member->run);
            decide(meeting, at, 1);
        }
    }
}

/* Wait until all ranks have read what others brought. None of them waits for anything meanwhile, so this ends unless a
 * process was killed. */
static int await_done(Member* member, uint64_t at, int* who) {
    Meeting* meeting = member->meeting;
    Wait wait = wait_for(&meeting->bell, meeting->ranks, member->patience);
    for (;;) {
        uint32_t seen = changes_of(&meeting->bell);
        int late = missing(meeting, at, 1);
        if (late < 0) return MEETING_OK;
        if (!wait_on(&wait, seen)) {
            *who = late;
            meeting_fail(member, member->run);
            return MEETING_LATE;
        }
    }
}

static size_t slice_start(size_t count, int ranks, int rank) {
    size_t width = (count + (size_t)ranks - 1) / (size_t)ranks;
    width = (width + ALIGNED - 1) / ALIGNED * ALIGNED;
    size_t start = width * (size_t)rank;
    return start < count ? start : count;
}

/* One collective of arrays that all ranks can read and write, or that fit where they are staged. */
static int reduce(Member* member, int operation, int type, const void* in, void* out, size_t count, int* who) {
    Meeting* meeting = member->meeting;
    int ranks = meeting->ranks, mine = member->rank;
    Slot *slots = table_of(meeting)->slots, *own = &slots[mine];
    size_t bytes = count * number_bytes(type);
    uint64_t at = (member->step++, position(member));
    if (meeting->staging) memcpy(staged(meeting, mine), in, bytes);
    own->in = in, own->out = out, own->count = count, own->type = type, own->operation = operation;
    atomic_store(&own->ready, at);
    ring(&meeting->bell);
    int status = await_ready(member, at, who);
    if (status != MEETING_OK) return status;
    const void* inputs[MOST_RANKS];
    void* outputs[MOST_RANKS];
    for (int rank = 0; rank < ranks; rank++) {
        const Slot* slot = &slots[rank];
        const Slot* first = &slots[0];
        if (slot->count != first->count || slot->type != first->type || slot->operation != first->operation) {
            *who = rank;
            status = MEETING_DIFFERENT;
        }
        inputs[rank] = meeting->staging ? staged(meeting, rank) : slot->in;
        outputs[rank] = meeting->staging ? out : slot->out;
    }
    Combine combine = number_type(type)->combine;
    if (status == MEETING_OK && meeting->staging)
        combine(operation, ranks, inputs, outputs, 0, count); /* each for itself: others' memory is not ours */
    else if (status == MEETING_OK)
        combine(operation, ranks, inputs, outputs, slice_start(count, ranks, mine), slice_start(count, ranks, mine + 1));
    atomic_store(&own->done, at);
    ring(&meeting->bell);
    int waited = await_done(member, at, who);
    return status != MEETING_OK ? status : waited;
}

/* One collective of ranks that share no memory: each sends all others what it has, and combines for itself. */
static int reduce_by_post(Member* member, int operation, int type, const void* in, void* out, size_t count, int* who) {
    int ranks = member->meeting->ranks, mine = member->rank, status = MEETING_OK;
    size_t bytes = count * number_bytes(type);
    char* received = malloc((size_t)ranks * bytes + 1);
    const void* inputs[MOST_RANKS];
    void* outputs[MOST_RANKS];
    Head own = {.type = type, .axes = 2, .sizes = {operation, (int64_t)count}}, head;
    if (!received) return MEETING_FAILED;
    for (int rank = 0; rank < ranks && status == MEETING_OK; rank++)
        if (rank != mine) status = transfer_send(member, rank, &own, in, bytes);
    for (int rank = 0; rank < ranks && status == MEETING_OK; rank++) {
        inputs[rank] = rank == mine ? in : received + (size_t)rank * bytes;
        outputs[rank] = out;
        if (rank == mine) continue;
        status = transfer_await(member, rank, &head);
        if (status == MEETING_OK && memcmp(&own, &head, sizeof head)) status = MEETING_DIFFERENT;
        if (status == MEETING_OK) status = transfer_take(member, rank, (char*)received + (size_t)rank * bytes, bytes);
        if (status != MEETING_OK) *who = rank;
    }
    if (status == MEETING_OK) number_type(type)->combine(operation, ranks, inputs, outputs, 0, count);
    free(received);
    return status;
}

int all_reduce(Member* member, int operation, int type, const void* in, void* out, size_t count, int* who) {
    if (member->meeting->post) return reduce_by_post(member, operation, type, in, out, count, who);
    size_t width = number_bytes(type), staging = member->meeting->staging;
    size_t most = staging ? staging / width : count;
    size_t first = 0;
    do {
        size_t some = count - first < most ? count - first : most;
        int status =
            reduce(member, operation, type, (const char*)in + first * width, (char*)out + first * width, some, who);
        if (status != MEETING_OK) return status;
        first += some;
    } while (first < count);
    return MEETING_OK;
}
