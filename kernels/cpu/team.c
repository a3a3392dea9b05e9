/* Teams: where threads of one parallel region meet, and what memory each keeps. */
#include "kernels.h"

#include <sched.h>
#include <stdlib.h>

#define SPINS 2000 /* pauses of about 40 ns: a thread that is late by more may have lost its core */

void team_wait(const Team *team) {
    Shared *shared = team->shared;
    int generation = atomic_load_explicit(&shared->generation, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&shared->arrived, 1, memory_order_acq_rel) == team->size - 1) {
        atomic_store_explicit(&shared->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&shared->next_task, 0, memory_order_relaxed);
        atomic_store_explicit(&shared->generation, generation + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&shared->generation, memory_order_acquire) == generation; spins++) {
        if (spins < SPINS) _mm_pause();
        else sched_yield();
    }
}

void *thread_scratch(int64_t num_bytes) {
    static _Thread_local void *kept;
    static _Thread_local int64_t kept_bytes;
    if (kept_bytes < num_bytes) {
        free(kept);
        kept_bytes = round_up(num_bytes, 4096);
        kept = aligned_alloc(64, (size_t)kept_bytes);
        if (kept == NULL) abort(); /* a few MiB for each thread: the machine is lost */
    }
    return kept;
}
