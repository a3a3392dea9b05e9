/* Attention over a KV cache of int8 by VNNI: products of integers, whose sums are exact in any order.
 *
 * Queries and weights are rounded to whole numbers of two parts, since VNNI multiplies bytes: an element of a query to
 * 128 * high + low, where QUERY_LARGEST stands for the largest magnitude of its head; a weight to 256 * high + low, where
 * WEIGHT_LARGEST stands for the largest of its row in the chunk. So a score becomes a float once, an element of a chunk's
 * weighted values too.
 */
#ifndef TOKENLOOM_INT8_ATTENTION_H
#define TOKENLOOM_INT8_ATTENTION_H

#include "attention.h"

#if defined(ELEMENT_BF16) && defined(__AVX512VNNI__)
#define HAS_INT8_ATTENTION

#define QUERY_LARGEST (127 * 128)
#define WEIGHT_LARGEST 65535
#define LEAST_CHUNK_WEIGHT 0x1p-100f /* what WEIGHT_LARGEST stands for at least: its inverse is finite */
#define KEY_OFFSET 128 /* added to a key's numbers, which are VNNI's unsigned side */
#define REGISTER 64 /* bytes */
#define SCORED_KEYS 16
#define JOINED_VALUES 4 /* values of a product */
#define JOINED_ROWS 4 /* rows whose sums of half a register of numbers stay in registers */

/* The queries of a task as integers, then their weights of a chunk. */
typedef struct {
    _Alignas(64) int8_t queries[TASK_ROWS][2][MAX_HEAD_DIM]; /* high, low; 0 up to a multiple of REGISTER */
    _Alignas(64) uint8_t weights[TASK_ROWS][2][CHUNK]; /* high, low */
    int32_t starts[TASK_ROWS]; /* of scores: -KEY_OFFSET times the query's sum */
    float query_scales[TASK_ROWS], weight_scales[TASK_ROWS];
} Int8Rows;

INLINE __m512i load_register(const char *from, int64_t left) {
    if (left >= REGISTER) return _mm512_loadu_si512(from);
    return _mm512_maskz_loadu_epi8((__mmask64)((1ull << left) - 1), from);
}

/* Rounds a query head; one with an infinity or NaN has the scale NaN. */
INLINE void round_query(Int8Rows *rows, int64_t row, const element *from, int64_t head_dim) {
    Floats largest = zero16();
    bool is_finite = true;
    for (int64_t d = 0; d < head_dim; d += 16) {
        Floats part = load16(from + d, lanes(head_dim - d));
        largest = larger16(largest, magnitude16(part));
        is_finite &= is_finite16(part) == 0xffff;
    }
    const float most = largest_of(largest), scale = is_finite ? most / QUERY_LARGEST : __builtin_nanf("");
    const Floats inverse = fill16(scale >= 0x1p-126f ? 1 / scale : 0);
    __m512i sum = zero_words();
    for (int64_t d = 0; d < round_up(head_dim, REGISTER); d += 16) {
        __m512i whole = _mm512_cvtps_epi32(multiply16(load16(from + d, lanes(head_dim - d)), inverse));
        __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(64)), 7);
        __m512i low = _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 7));
        _mm_store_si128((__m128i *)(rows->queries[row][0] + d), _mm512_cvtsepi32_epi8(high));
        _mm_store_si128((__m128i *)(rows->queries[row][1] + d), _mm512_cvtsepi32_epi8(low));
        sum = _mm512_add_epi32(sum, whole);
    }
    rows->starts[row] = -KEY_OFFSET * _mm512_reduce_add_epi32(sum);
    rows->query_scales[row] = scale;
}

/* Computes scores[row][at .. at + SCORED_KEYS), without the scales of the keys. */
INLINE void score_int8(float (*scores)[CHUNK], int64_t at, const Int8Rows *rows, int64_t num_rows,
                       const char *const *keys, const int64_t head_dim) {
    __m512i sums[TASK_ROWS];
    for (int64_t row = 0; row < num_rows; row++) sums[row] = _mm512_set1_epi32(rows->starts[row]);
    for (int64_t d = 0; d < head_dim; d += REGISTER) {
        __m512i numbers[SCORED_KEYS]; /* then 4 numbers of each key */
#pragma GCC unroll 16
        for (int i = 0; i < SCORED_KEYS; i++) numbers[i] = load_register(keys[i] + d, head_dim - d);
        transpose_16x16(numbers);
#pragma GCC unroll 16
        for (int i = 0; i < SCORED_KEYS; i++)
            numbers[i] = _mm512_xor_si512(numbers[i], _mm512_set1_epi8((char)KEY_OFFSET));
        for (int64_t row = 0; row < num_rows; row++) {
            __m512i high[2] = {zero_words(), zero_words()}, low[2] = {zero_words(), zero_words()};
#pragma GCC unroll 16
            for (int i = 0; i < SCORED_KEYS; i++) {
                add_byte_products(&high[i % 2], numbers[i], rows->queries[row][0] + d + 4 * i);
                add_byte_products(&low[i % 2], numbers[i], rows->queries[row][1] + d + 4 * i);
            }
            __m512i upper = _mm512_slli_epi32(_mm512_add_epi32(high[0], high[1]), 7);
            __m512i lower = _mm512_add_epi32(low[0], low[1]);
            sums[row] = _mm512_add_epi32(sums[row], _mm512_add_epi32(upper, lower));
        }
    }
    for (int64_t row = 0; row < num_rows; row++)
        store_floats(scores[row] + at, multiply16(_mm512_cvtepi32_ps(sums[row]), fill16(rows->query_scales[row])));
}

/* Rounds a row's weights of a chunk, which are not negative; `padded`: their number, a multiple of LINE. */
INLINE void round_weights(Int8Rows *rows, int64_t row, const float *weights, int64_t padded) {
    Floats largest = fill16(LEAST_CHUNK_WEIGHT);
    for (int64_t i = 0; i < padded; i += 16) largest = larger16(largest, load_floats(weights + i));
    const float most = largest_of(largest);
    const Floats inverse = fill16(WEIGHT_LARGEST / most);
    for (int64_t i = 0; i < padded; i += 16) {
        __m512i whole = _mm512_cvtps_epi32(multiply16(load_floats(weights + i), inverse));
        __m128i high = _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 8)), low = _mm512_cvtepi32_epi8(whole);
        _mm_store_si128((__m128i *)(rows->weights[row][0] + i), high);
        _mm_store_si128((__m128i *)(rows->weights[row][1] + i), low);
    }
    rows->weight_scales[row] = most / WEIGHT_LARGEST;
}

/* The numbers of JOINED_VALUES values side by side, 4 elements of each of the 4 quarters of a register: elements
 * 16 quarter + 8 half + (0 .. 4), and the next four. */
typedef struct {
    __m512i first, second;
} JoinedValues;

INLINE JoinedValues join_values(const char *const *values, int64_t d, int64_t left, const int half) {
    __m512i v[JOINED_VALUES], pairs[2];
#pragma GCC unroll 4
    for (int i = 0; i < JOINED_VALUES; i++) v[i] = load_register(values[i] + d, left);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        pairs[i] = half ? _mm512_unpackhi_epi8(v[2 * i], v[2 * i + 1]) : _mm512_unpacklo_epi8(v[2 * i], v[2 * i + 1]);
    return (JoinedValues){_mm512_unpacklo_epi16(pairs[0], pairs[1]), _mm512_unpackhi_epi16(pairs[0], pairs[1])};
}

/* Adds 4 elements of each quarter of a register to those of a row's weighted values from `to` on, of which `left` exist. */
INLINE void add_quarters(float *to, int64_t left, Floats v) {
    const __m128 quarters[4] = {_mm512_castps512_ps128(v), _mm512_extractf32x4_ps(v, 1), _mm512_extractf32x4_ps(v, 2),
                                _mm512_extractf32x4_ps(v, 3)};
#pragma GCC unroll 4
    for (int quarter = 0; quarter < 4; quarter++)
        if (16 * quarter < left) {
            float *at = to + 16 * quarter;
            _mm_store_ps(at, _mm_add_ps(_mm_load_ps(at), quarters[quarter]));
        }
}

INLINE __m512i fill_bytes(const uint8_t *from) {
    int32_t word;
    memcpy(&word, from, sizeof word);
    return _mm512_set1_epi32(word);
}

/* values[first .. first + count) += weights * half of the numbers of the registers at `d`. Every call passes constants for
 * count and half. */
INLINE void add_int8_half(float (*values)[HEAD_STRIDE], const Int8Rows *rows, int64_t first, const char *const *from,
                          int64_t num_values, int64_t d, int64_t left, Prefetch *next, const int count, const int half) {
    __m512i high[JOINED_ROWS][2], low[JOINED_ROWS][2];
#pragma GCC unroll 4
    for (int row = 0; row < count; row++) high[row][0] = high[row][1] = low[row][0] = low[row][1] = zero_words();
    for (int64_t i = 0; i < num_values; i += JOINED_VALUES) {
        const JoinedValues joined = join_values(from + i, d, left, half);
        fetch_next(next), fetch_next(next);
#pragma GCC unroll 4
        for (int row = 0; row < count; row++) {
            const __m512i upper = fill_bytes(rows->weights[first + row][0] + i);
            const __m512i lower = fill_bytes(rows->weights[first + row][1] + i);
            high[row][0] = _mm512_dpbusd_epi32(high[row][0], upper, joined.first);
            high[row][1] = _mm512_dpbusd_epi32(high[row][1], upper, joined.second);
            low[row][0] = _mm512_dpbusd_epi32(low[row][0], lower, joined.first);
            low[row][1] = _mm512_dpbusd_epi32(low[row][1], lower, joined.second);
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < count; row++)
#pragma GCC unroll 2
        for (int side = 0; side < 2; side++) {
            __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[row][side], 8), low[row][side]);
            Floats v = multiply16(_mm512_cvtepi32_ps(sum), fill16(rows->weight_scales[first + row]));
            const int at = 8 * half + 4 * side;
            add_quarters(values[first + row] + d + at, left - at, v);
        }
}

INLINE void add_int8_rows(float (*values)[HEAD_STRIDE], const Int8Rows *rows, int64_t first, const char *const *from,
                          int64_t num_values, const int64_t head_dim, Prefetch *next, const int count) {
    for (int64_t d = 0; d < head_dim; d += REGISTER) {
        add_int8_half(values, rows, first, from, num_values, d, head_dim - d, next, count, 0);
        add_int8_half(values, rows, first, from, num_values, d, head_dim - d, next, count, 1);
    }
}

/* values[row] += weights * value rows. num_values: a multiple of JOINED_VALUES. */
INLINE void add_int8_values(float (*values)[HEAD_STRIDE], const Int8Rows *rows, int64_t num_rows,
                            const char *const *from, int64_t num_values, const int64_t head_dim, Prefetch *next) {
    for (int64_t row = 0; row < num_rows; row += JOINED_ROWS) {
        switch (min64(JOINED_ROWS, num_rows - row)) {
            case 1: add_int8_rows(values, rows, row, from, num_values, head_dim, next, 1); break;
            case 2: add_int8_rows(values, rows, row, from, num_values, head_dim, next, 2); break;
            case 3: add_int8_rows(values, rows, row, from, num_values, head_dim, next, 3); break;
            default: add_int8_rows(values, rows, row, from, num_values, head_dim, next, 4); break;
        }
    }
}

#endif
#endif
