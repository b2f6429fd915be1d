#include "meeting.h"

void meeting_begin(Member* member, uint64_t run) {
    member->step = 0;
    member->run = run;
}

static void raise_to(_Atomic uint64_t* place, uint64_t run) {
    uint64_t before = atomic_load(place);
    while (before < run && !atomic_compare_exchange_weak(place, &before, run)) {
    }
}

void meeting_fail(Member* member, uint64_t run) {
    Meeting* meeting = member->meeting;
    if (meeting->post) {
        meeting->post->fail(run);
        return;
    }
    raise_to(&meeting->failures[run % FAILURES], run);
    raise_to(&meeting->failed, run);
    ring(&meeting->bell);
}

int meeting_has_failed(Meeting* meeting, uint64_t run) {
    uint64_t last = atomic_load(&meeting->failed);
    if (last < run) return 0;
    return last - run >= FAILURES || atomic_load(&meeting->failures[run % FAILURES]) == run;
}

void meeting_abort(Meeting* meeting) {
    atomic_store(&meeting->failed, UINT64_MAX);
    ring(&meeting->bell);
}
