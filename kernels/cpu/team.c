/* Barriers between the stages of a team, and scratch memory per thread. */
#include "kernels.h"

#include <sched.h>
#include <stdlib.h>

#define SPINS 2000 /* pauses of about 40 ns; a thread that is later than that may have lost its core */

void end_stage(Team *team) {
    for (int spins = 0; atomic_load_explicit(&team->shared->taken, memory_order_acquire) >> 32 == team->stage; spins++) {
        if (spins < SPINS) _mm_pause();
        else sched_yield();
    }
    team->stage++;
}

void await_early(const Team *team, int64_t num_pieces) {
    long long all = (long long)team->stage << 32 | num_pieces;
    for (int spins = 0; atomic_load_explicit(&team->shared->early_finished, memory_order_acquire) != all; spins++) {
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
        if (kept == NULL) abort(); /* without a few MiB per thread nothing can run */
    }
    return kept;
}
