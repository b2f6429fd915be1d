#include "meeting.h"

void meeting_begin(Member* member, uint64_t run) {
    member->step = 0;
    member->run = run;
}

void meeting_fail(Member* member, uint64_t run) {
    Meeting* meeting = member->meeting;
    if (meeting->post) {
        meeting->post->fail(run);
        return;
    }
    uint64_t before = atomic_load(&meeting->failed);
    while (before < run && !atomic_compare_exchange_weak(&meeting->failed, &before, run)) {
    }
    ring(&meeting->bell);
}

void meeting_abort(Meeting* meeting) {
    atomic_store(&meeting->failed, UINT64_MAX);
    ring(&meeting->bell);
}
