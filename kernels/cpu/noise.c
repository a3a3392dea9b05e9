/* The noise of kernels/noise.py, bit for bit: Philox4x32-10 for 64 neighbouring tokens at a time. */
#include "noise.h"

#include <string.h>

/* The bits of every token at one position. */
EXPORT void vocabulary_bits(uint32_t *bits, int64_t vocab_size, uint32_t position, uint32_t purpose, uint32_t seed_low,
                            uint32_t seed_high) {
    for (int64_t first = 0; first < vocab_size; first += 64) {
        _Alignas(64) uint32_t run[64];
        Ints words[4];
        token_bits(words, first, position, purpose, seed_low, seed_high);
        for (int i = 0; i < 4; i++) store_any(run + 16 * i, words[i]);
        memcpy(bits + first, run, (size_t)min64(64, vocab_size - first) * sizeof *bits);
    }
}
