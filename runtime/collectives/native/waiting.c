#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "waiting.h"

#include <limits.h>
#include <stddef.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

/* Looks at the others before a rank sleeps, some 30 microseconds; a rank that shares a core with another does not look so
 * long, since the other can't come meanwhile. */
#define LOOKS 2000
/* Seconds that a rank sleeps at most before it looks at the clock. */
#define NAP 0.02

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void sleep_until_change(Bell* bell, uint32_t seen) {
    struct timespec nap = {0, (long)(1e9 * NAP)};
#ifdef __linux__
    atomic_fetch_add(&bell->sleepers, 1);
    syscall(SYS_futex, &bell->changes, FUTEX_WAIT, seen, &nap, NULL, 0);
    atomic_fetch_sub(&bell->sleepers, 1);
#else
    (void)bell, (void)seen;
    nap.tv_nsec = 20000;
    nanosleep(&nap, NULL);
#endif
}

void ring(Bell* bell) {
    atomic_fetch_add(&bell->changes, 1);
#ifdef __linux__
    if (atomic_load(&bell->sleepers)) syscall(SYS_futex, &bell->changes, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
#endif
}

uint32_t changes_of(const Bell* bell) { return atomic_load(&bell->changes); }

Wait wait_for(Bell* bell, int ranks, double patience) {
    return (Wait){.bell = bell, .most = ranks > atomic_load(&bell->cores) ? LOOKS / 50 : LOOKS, .patience = patience};
}

int wait_on(Wait* wait, uint32_t seen) {
    if (wait->looked++ < wait->most) {
        pause_briefly();
        return 1;
    }
    if (wait->start == 0) wait->start = now();
    if (now() - wait->start > wait->patience) return 0;
    sleep_until_change(wait->bell, seen);
    return 1;
}
