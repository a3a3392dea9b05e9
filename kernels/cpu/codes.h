/* Weights of 4, 5, 6 or 8 bits, multiplied as integers: the rows are int8 in the products.
 *
 * A line of a row has a scale of its own, so that a large input costs only its neighbours precision. The products of a
 * line are summed as integers, without error; the lines are added as float32, in their order, whatever other rows there
 * are.
 *
 * A line of a pair of tiles holds, for each step of 4 inputs, 16 outputs x 4 codes of the first tile, then of the
 * second. Codes are unsigned. Those of 4 bits lie in the low halves of the bytes for an even step, in the high ones for
 * the next. Of codes of 5 bits, the low 4 lie so, and behind them a byte with the fifth bits of all 8 steps, the first
 * step's lowest. Codes of 6 bits take 3 bytes for 4 steps: the code of one of the first three steps each, and above it
 * two bits of the fourth's, the lowest in the first byte.
 */
#ifndef TOKENLOOM_CODES_H
#define TOKENLOOM_CODES_H

#include "kernels.h"

#ifdef ELEMENT_BF16
#define HAS_CODES
#endif

#define ZERO_CODE 128 /* of 8 bits */
#define ZERO_STEP 0.125f /* of a code: the unit of zeros of 4 bits */
#define LINE_STEPS (LINE / 4)

/* Returns the part that a pair of tiles belongs to. */
INLINE const Codes *part_of(const Linear *w, int64_t pair) {
    const Codes *part = w->parts + w->num_parts - 1;
    while (part->first_pair > pair) part--;
    return part;
}

INLINE int64_t code_line_bytes(const Codes *codes) { return 2 * 16 * LINE * codes->num_bits / 8; }

/* Returns the row of the weight for an output of a pair of tiles, -1 if there is none. */
INLINE int64_t row_of(const Linear *w, int64_t pair, int64_t output) {
    int64_t side = output / 16, row = w->is_gated ? pair * 16 + output % 16 : pair * 32 + output;
    if (row >= w->num_outputs) return -1;
    return w->is_gated && side ? w->num_outputs + row : row;
}

#ifdef HAS_CODES

#define CODE_LINES 8 /* lines of a pair of tiles that are multiplied by all rows of a block before the next ones */

#define HALF_ZERO 32 /* of codes with scales of half lines; of those of 4 bits it is a quarter */

/* The scale of a line of a row; the sum of its codes, times the scale (for zeros and mins) and times -ZERO_CODE; the sums of
 * its halves in 16 bits each, the first in the low ones; and these times -HALF_ZERO. */
typedef struct {
    float scale, sum;
    int32_t start, half_sums, half_starts[2], unused[2];
} LineScale;

/* Rows as int8, by blocks of BLOCK_ROWS rows (the last may have fewer): [num_lines][rows of the block] lines, and their
 * scales in the same order. */
typedef struct {
    int8_t *codes;
    LineScale *scales;
    int64_t num_rows, num_lines;
} RowCodes;

/* Returns the rows of a block, and where its lines begin. */
INLINE RowCodes block_of(const RowCodes *x, int64_t first) {
    int64_t at = first * x->num_lines;
    return (RowCodes){x->codes + at * LINE, x->scales + at, min64(BLOCK_ROWS, x->num_rows - first), x->num_lines};
}

/* Rounds 16 numbers of at most 127 to int8 and returns their sum. */
INLINE int32_t round_to_codes(Floats values, int8_t *to) {
#ifdef __AVX512F__
    __m512i rounded = _mm512_cvtps_epi32(values);
    _mm_store_si128((__m128i *)to, _mm512_cvtsepi32_epi8(rounded));
    return _mm512_reduce_add_epi32(rounded);
#else
    __m256i low = _mm256_cvtps_epi32(values.low), high = _mm256_cvtps_epi32(values.high);
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    _mm_store_si128((__m128i *)to, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
    __m256i pairs = _mm256_madd_epi16(words, _mm256_set1_epi16(1));
    __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0xb1)));
#endif
}

/* A line with an infinity or NaN has the scale NaN. */
INLINE void quantize_line(const element *from, int8_t *to, LineScale *found) {
    Floats low = load16(from, 0xffff), high = load16(from + 16, 0xffff);
    float most = largest_of(larger16(magnitude16(low), magnitude16(high)));
    Floats factor = fill16(most > 0 ? 127 / most : 0);
    int32_t first = round_to_codes(multiply16(low, factor), to);
    int32_t second = round_to_codes(multiply16(high, factor), to + 16), sum = first + second;
    float scale = (is_finite16(low) & is_finite16(high)) == 0xffff ? most / 127 : __builtin_nanf("");
    *found = (LineScale){scale, scale * (float)sum, -ZERO_CODE * sum, (int32_t)((uint32_t)second << 16 | (uint16_t)first),
                         {-HALF_ZERO * first, -HALF_ZERO * second}, {0, 0}};
}

/* Quantizes rows [first, end) of a panel. Valid until the thread's next call of thread_scratch. */
INLINE RowCodes take_codes(const Rows *x, int64_t first, int64_t end) {
    int64_t num_lines = x->stride / LINE, count = (end - first) * num_lines;
    LineScale *scales = thread_scratch(count * (LINE + (int64_t)sizeof *scales) + 64);
    int8_t *codes = (int8_t *)(scales + round_up(count, 4));
    const RowCodes all = {codes, scales, end - first, num_lines};
    for (int64_t row = first; row < end; row++) {
        RowCodes block = block_of(&all, (row - first) / BLOCK_ROWS * BLOCK_ROWS);
        const element *line = rows_at(x, row, 0);
        int64_t step = line_step(x, row), at = (row - first) % BLOCK_ROWS;
        for (int64_t i = 0; i < num_lines; i++, line += step, at += block.num_rows)
            quantize_line(line, block.codes + at * LINE, block.scales + at);
    }
    return all;
}

#ifdef __AVX512VNNI__
#define CODE_ROWS 6 /* rows whose sums of a pair of tiles stay in registers */
#else
#define CODE_ROWS 4 /* of 8 outputs */
#endif
#define LOW_PLANE_BYTES (LINE * PAIR_OUTPUTS / 2) /* of a line of codes of 5 bits */

/* How codes, or integer sums of a line of them, become floats. */
typedef enum {
    STARTS, /* codes of 8 bits, whose sums begin at -ZERO_CODE times the inputs */
    LEVELS, /* the same for the levels of codes */
    OFFSETS, /* zeros or mins times the sum of the inputs are subtracted */
    LINE_NUMBERS, /* the same, with a scale and a min for each line, that are multiples of the group's */
    HALF_SCALES, /* scales of half lines, that are multiples of the group's; codes have a zero */
    HALF_NUMBERS, /* scales and mins of half lines, that are multiples of the group's */
} NumberKind;

INLINE NumberKind kind_of(const Codes *w) {
    switch (w->multiples_kind) {
        case LINE_MULTIPLES: return LINE_NUMBERS;
        case HALF_MULTIPLES: return HALF_SCALES;
        case HALF_PAIRS: return HALF_NUMBERS;
        default: return w->levels != NULL ? LEVELS : w->num_bits == 8 ? STARTS : OFFSETS;
    }
}

/* Whether codes have the zero ZERO_CODE, which no offsets stand for. */
INLINE bool has_start(const NumberKind kind) { return kind == STARTS || kind == LEVELS; }

/* sums += x @ weight for the rows of a block and lines [line, end), at most CODE_LINES, of a pair of tiles of a part. */
void multiply_codes_rows(float (*sums)[PAIR_OUTPUTS], const RowCodes *x, const Codes *w, int64_t pair, int64_t line,
                         int64_t end);

#ifdef HAS_TILES
/* Makes a line of a pair of tiles of a part elements, in `to`: those that the codes stand for, rounded once to float32 and
 * once to bfloat16. */
void unpack_codes(element *to, const Codes *w, int64_t pair, int64_t num_lines, int64_t line);
#endif

#endif
#endif
