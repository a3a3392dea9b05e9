/* Teams: where threads of one parallel region meet. */
#include "kernels.h"

#include <sched.h>

#define SPINS 2000 /* pauses of about 40 ns: a thread that is late by more may have lost its core */

void team_wait(const Team *team) {
    if (team->size == 1) return;
    Shared *shared = team->shared;
    int generation = atomic_load_explicit(&shared->generation, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&shared->arrived, 1, memory_order_acq_rel) == team->size - 1) {
        atomic_store_explicit(&shared->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&shared->generation, generation + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&shared->generation, memory_order_acquire) == generation; spins++) {
        if (spins < SPINS) _mm_pause();
        else sched_yield();
    }
}
