/* Tiles with AVX-512, for linear.c and prefill.c: multiply rows of a panel by pairs of tiles. */
#ifndef TOKENLOOM_AVX512_H
#define TOKENLOOM_AVX512_H

#include "kernels.h"

#if defined(__AVX512F__) && !defined(HAS_TILES)

#define HELD_ROWS 12 /* rows whose sums of a pair of tiles stay in registers */

#define FETCHING_ROWS 6 /* rows whose products take long enough to hide the prefetch of keys and values */

/* Lines to prefetch into the L2 cache during a product, for each line of a pair of tiles: `count` lines of weights, at most
 * 2, and a line of the upcoming keys and values, unless NULL. */
typedef struct {
    const char *next;
    int64_t count;
    Upcoming *upcoming;
} Fetch;

/* Multiplies `count` rows of a group of `height` rows by weight [num_lines][2 tiles]; adds to the sums, unless they
 * are new. Every call passes a constant `count`. */
INLINE void multiply_rows(float *sums, int64_t stride, bool is_new, const element *x, int64_t height,
                          const element *weight, int64_t num_lines, Fetch *fetch, const int count) {
    __m512 first[HELD_ROWS], second[HELD_ROWS];
    const char *next = fetch->next;
    const int64_t num_fetches = fetch->count;
    const char *keys = NULL;
    if (count >= FETCHING_ROWS && fetch->upcoming != NULL) keys = take_upcoming(fetch->upcoming, num_lines * 16 * 64);
    for (int row = 0; row < count; row++) {
        first[row] = is_new ? _mm512_setzero_ps() : _mm512_load_ps(sums + row * stride);
        second[row] = is_new ? _mm512_setzero_ps() : _mm512_load_ps(sums + row * stride + 16);
    }
    for (int64_t line = 0; line < num_lines; line++, weight += 2 * TILE, x += height * LINE) {
        const int32_t *words = (const int32_t *)x;
#pragma GCC unroll 4
        for (int pair = 0; pair < 16; pair++) {
            if (num_fetches) _mm_prefetch(next, _MM_HINT_T1), next += 64;
            if (num_fetches > 1) _mm_prefetch(next, _MM_HINT_T1), next += 64;
            if (count >= FETCHING_ROWS && keys != NULL) _mm_prefetch(keys, _MM_HINT_T1), keys += 64;
            const element *at = weight + pair * TILE_STEP;
            __m512i a = _mm512_load_si512(at), b = _mm512_load_si512(at + SECOND_TILE);
#pragma GCC unroll 12
            for (int row = 0; row < count; row++) {
                __m512i word = _mm512_set1_epi32(words[row * 16 + pair]);
                first[row] = dot_line(first[row], word, a);
                second[row] = dot_line(second[row], word, b);
            }
        }
    }
    fetch->next = next;
    for (int row = 0; row < count; row++) {
        _mm512_store_ps(sums + row * stride, first[row]);
        _mm512_store_ps(sums + row * stride + 16, second[row]);
    }
}

/* Multiplies the first `num_rows` rows of a group, at most HELD_ROWS at a time. */
static void multiply_group(float *sums, int64_t stride, bool is_new, const element *x, int64_t height, int64_t num_rows,
                           const element *weight, int64_t num_lines, Fetch *fetch) {
#define HELD(rows)                                                                                                     \
    case rows:                                                                                                         \
        multiply_rows(sums, stride, is_new, x, height, weight, num_lines, fetch, rows);                                \
        break;
    int64_t num_pieces = divide_up(num_rows, HELD_ROWS);
    for (int64_t piece = 0, row = 0, end; piece < num_pieces; piece++, row = end) {
        end = num_rows * (piece + 1) / num_pieces;
        switch (end - row) {
            HELD(1)
            HELD(2)
            HELD(3)
            HELD(4)
            HELD(5)
            HELD(6)
            HELD(7)
            HELD(8)
            HELD(9)
            HELD(10)
            HELD(11)
            HELD(12)
        }
        sums += (end - row) * stride;
        x += (end - row) * LINE;
    }
#undef HELD
}

#endif
#endif
