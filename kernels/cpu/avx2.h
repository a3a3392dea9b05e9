/* Tiles with AVX2, for linear.c and attention.c: multiply rows by tiles, pack keys and values into tiles. */
#ifndef TOKENLOOM_AVX2_H
#define TOKENLOOM_AVX2_H

#include "kernels.h"

#ifndef __AVX512F__

#define HELD_ROWS 6 /* rows whose sums of 16 outputs stay in registers */

/* Loads the weights of 8 adjacent outputs for one input; in bf16 for the first input of a pair. */
INLINE __m256 first_weights(const element *at) {
#ifdef ELEMENT_BF16
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_load_si256((const __m256i *)at), 16));
#else
    return _mm256_load_ps(at);
#endif
}
#ifdef ELEMENT_BF16
INLINE __m256 second_weights(const element *at) { /* the mask stays in memory to leave registers for 6 rows */
    _Alignas(32) static const uint16_t upper[16] = {0, 0xffff, 0, 0xffff, 0, 0xffff, 0, 0xffff,
                                                    0, 0xffff, 0, 0xffff, 0, 0xffff, 0, 0xffff};
    __m256i words = _mm256_load_si256((const __m256i *)at);
    __asm__("vpand %1, %0, %0" : "+x"(words) : "m"(upper));
    return _mm256_castsi256_ps(words);
}
#endif

/* sum += a * b in place: with its own choice of instruction forms the compiler runs out of registers. */
INLINE void accumulate(__m256 *sum, __m256 a, __m256 b) {
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(*sum) : "x"(a), "x"(b));
}

/* sums += x @ weight for `count` rows and `num_tiles` tiles of a pair. Prefetches weights into the L2 cache `ahead`
 * bytes before use, and into the L1 cache the rows at `upcoming`, which lie there as x's do, unless it is NULL. Every
 * call passes constants for const parameters. */
INLINE void multiply_held(float *sums, const int64_t sums_stride, const float *x, const int64_t row_stride,
                          int64_t line_stride, const element *weight, int64_t num_lines, const int count,
                          const int num_tiles, const int ahead, const char *upcoming) {
    const int num_parts = 2 * num_tiles; /* of 8 outputs */
    __m256 s[HELD_ROWS][4], w[4];
    for (int row = 0; row < count; row++)
        for (int i = 0; i < num_parts; i++) s[row][i] = _mm256_load_ps(sums + row * sums_stride + 8 * i);
    for (int64_t line = 0; line < num_lines; line++, weight += 2 * TILE, x += line_stride) {
        const element *at = weight;
        if (upcoming != NULL)
            for (int row = 0; row < count; row++)
                _mm_prefetch(upcoming + (line * line_stride + row * row_stride) * (int64_t)sizeof *x, _MM_HINT_T0);
#pragma GCC unroll 2
        for (const float *input = x; input < x + LINE; at += TILE / 16) {
            if (ahead) _mm_prefetch((const char *)at + ahead, _MM_HINT_T1);
            for (int i = 0; i < num_parts; i++) w[i] = first_weights(at + i / 2 * TILE + i % 2 * (TILE / 32));
            for (int row = 0; row < count; row++) {
                __m256 value = _mm256_broadcast_ss(input + row * row_stride);
                for (int i = 0; i < num_parts; i++) accumulate(&s[row][i], value, w[i]);
            }
            input++;
#ifdef ELEMENT_BF16
            for (int i = 0; i < num_parts; i++) w[i] = second_weights(at + i / 2 * TILE + i % 2 * (TILE / 32));
            for (int row = 0; row < count; row++) {
                __m256 value = _mm256_broadcast_ss(input + row * row_stride);
                for (int i = 0; i < num_parts; i++) accumulate(&s[row][i], value, w[i]);
            }
            input++;
#endif
        }
    }
    for (int row = 0; row < count; row++)
        for (int i = 0; i < num_parts; i++) _mm256_store_ps(sums + row * sums_stride + 8 * i, s[row][i]);
}

/* Multiplies one tile of each pair, for any count up to HELD_ROWS. */
INLINE void multiply_tile(float *sums, const int64_t sums_stride, const float *x, const int64_t row_stride,
                          int64_t line_stride, const element *weight, int64_t num_lines, int64_t count,
                          const int ahead, const char *upcoming) {
#define HELD(rows)                                                                                                     \
    if (count == rows)                                                                                                 \
        multiply_held(sums, sums_stride, x, row_stride, line_stride, weight, num_lines, rows, 1, ahead, upcoming)
    HELD(1);
    HELD(2);
    HELD(3);
    HELD(4);
    HELD(5);
    HELD(6);
#undef HELD
}

/* Multiplies rows [0, num_rows) by a pair of tiles: weight [num_lines][2 tiles]. Input i of a row is
 * x[i / LINE * line_stride + row * row_stride + i % LINE]. upcoming: as of multiply_held, for all rows. */
INLINE void multiply_near(float *sums, const int64_t sums_stride, const float *x, const int64_t row_stride,
                          int64_t line_stride, int64_t num_rows, const element *weight, int64_t num_lines,
                          const char *upcoming) {
    int64_t num_pieces = divide_up(num_rows, HELD_ROWS);
    for (int64_t piece = 0, row = 0, end; piece < num_pieces; piece++, row = end) {
        end = num_rows * (piece + 1) / num_pieces;
        float *to = sums + row * sums_stride;
        const float *from = x + row * row_stride;
        if (end - row == 1)
            multiply_held(to, sums_stride, from, row_stride, line_stride, weight, num_lines, 1, 2, 0, NULL);
        else if (end - row == 2)
            multiply_held(to, sums_stride, from, row_stride, line_stride, weight, num_lines, 2, 2, 0, NULL);
        else
            for (int side = 0; side < 2; side++)
                multiply_tile(to + side * 16, sums_stride, from, row_stride, line_stride, weight + side * TILE,
                              num_lines, end - row, 0,
                              upcoming == NULL || side ? NULL : upcoming + row * row_stride * (int64_t)sizeof *x);
    }
}

/* Packs one line of 16 keys (keys past `last` repeat it) into a tile: word i of a key goes to the tile's line i. */
INLINE void pack_keys(element *tile, const element *const *keys, int64_t last, int64_t d, int64_t left) {
    for (int64_t first = 0; first < 16; first += 8) {
        Ints r[8], t[8];
        for (int64_t i = 0; i < 8; i++) r[i] = load_line(keys[min64(first + i, last)] + d, left);
        for (int i = 0; i < 8; i += 2) {
            t[i] = interleave_low_words(r[i], r[i + 1]);
            t[i + 1] = interleave_high_words(r[i], r[i + 1]);
        }
        for (int i = 0; i < 8; i += 2) { /* pairs t[0], t[2]; t[1], t[3]; t[4], t[6]; t[5], t[7] */
            r[i] = interleave_low_pairs(t[i - i % 4 / 2], t[i - i % 4 / 2 + 2]);
            r[i + 1] = interleave_high_pairs(t[i - i % 4 / 2], t[i - i % 4 / 2 + 2]);
        }
        __m256i *to = (__m256i *)((uint32_t *)tile + first);
        for (int i = 0; i < 4; i++, to += 2) {
            to[0] = _mm256_permute2x128_si256(r[i].low, r[i + 4].low, 0x20);
            to[8] = _mm256_permute2x128_si256(r[i].low, r[i + 4].low, 0x31);
            to[16] = _mm256_permute2x128_si256(r[i].high, r[i + 4].high, 0x20);
            to[24] = _mm256_permute2x128_si256(r[i].high, r[i + 4].high, 0x31);
        }
    }
}

/* Packs 32 elements from d on (`left` of them exist) of values[0], in bf16 also of values[1], into a line of a pair of
 * tiles. Values past `last` repeat it. */
INLINE void pack_value(element *tiles, const element *const *values, int64_t last, int64_t d, int64_t left) {
    const element *first = values[min64(0, last)] + d;
#ifdef ELEMENT_BF16
    Ints a = load_line(first, left), b = load_line(values[min64(1, last)] + d, left);
    __m256i pairs[4] = {_mm256_unpacklo_epi16(a.low, b.low), _mm256_unpackhi_epi16(a.low, b.low),
                        _mm256_unpacklo_epi16(a.high, b.high), _mm256_unpackhi_epi16(a.high, b.high)};
    for (int side = 0; side < 2; side++)
        store_any(tiles + side * TILE, (Ints){_mm256_permute2x128_si256(pairs[2 * side], pairs[2 * side + 1], 0x20),
                                              _mm256_permute2x128_si256(pairs[2 * side], pairs[2 * side + 1], 0x31)});
#else
    store_any(tiles, load_line(first, left));
    store_any(tiles + TILE, load_line(first + 16, max64(0, left - 16)));
#endif
}

#endif
#endif
