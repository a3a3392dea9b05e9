/* Lines of codes as elements of tiles, see codes.h. */
#include "codes.h"

#ifdef HAS_TILES

#include "codes_vnni.h"

/* The numbers of half a line and a pair of tiles: an element is code * scale - offset, rounded once. */
typedef struct {
    __m512 scales[2], offsets[2];
} HalfLine;

/* numbers: of the line, or of its group if halves have multiples. */
INLINE HalfLine half_line(const Group *numbers, const uint8_t *multiples, const int half, const int num_bits,
                          const NumberKind kind) {
    HalfLine found;
    for (int side = 0; side < 2; side++) {
        __m512 scale = numbers->scales[side], offset = numbers->offsets[side];
        if (kind == HALF_SCALES || kind == HALF_NUMBERS) {
            __m512i stored = load_multiples(multiples + half * PAIR_OUTPUTS + side * 16);
            scale = multiply16(scale, _mm512_cvtepi32_ps(scale_multiples(stored, kind)));
            offset = multiply16(offset, _mm512_cvtepi32_ps(_mm512_srli_epi32(stored, 4)));
        }
        if (kind == HALF_SCALES) offset = multiply16(scale, fill16((float)(1 << (num_bits - 1))));
        if (has_start(kind)) offset = multiply16(scale, fill16(ZERO_CODE));
        found.scales[side] = scale, found.offsets[side] = offset;
    }
    return found;
}

/* Returns the elements of the codes in the bytes number `at` and `at + 1` of 16 words, side by side. */
INLINE __m512i pair_elements(__m512i codes, const int at, __m512 scale, __m512 offset) {
    const __m512i byte = _mm512_set1_epi32(255);
    const __m512i side_by_side = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                                  22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i first = _mm512_and_si512(at ? _mm512_srli_epi32(codes, 8 * at) : codes, byte);
    __m512i second = _mm512_and_si512(_mm512_srli_epi32(codes, 8 * (at + 1)), byte);
    __m512 low = _mm512_fmsub_ps(_mm512_cvtepi32_ps(first), scale, offset);
    __m512 high = _mm512_fmsub_ps(_mm512_cvtepi32_ps(second), scale, offset);
    return _mm512_permutexvar_epi16(side_by_side, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

/* A line of codes of a pair of tiles, and where its elements go. */
typedef struct {
    element *to;
    const uint8_t *codes, *multiples;
    Group numbers;
    __m512i levels;
} Unpacked;

INLINE void unpack(const Unpacked *line, const int num_bits, const NumberKind kind) {
#pragma GCC unroll 8
    for (int step = 0; step < LINE_STEPS; step++) {
        const HalfLine of = half_line(&line->numbers, line->multiples, step / (LINE_STEPS / 2), num_bits, kind);
#pragma GCC unroll 2
        for (int side = 0; side < 2; side++) {
            __m512i codes = load_step(line->codes + side * 64, step, num_bits, kind == LEVELS, line->levels);
            element *to = line->to + side * SECOND_TILE + 2 * step * TILE_STEP;
            _mm512_store_si512(to, pair_elements(codes, 0, of.scales[side], of.offsets[side]));
            _mm512_store_si512(to + TILE_STEP, pair_elements(codes, 2, of.scales[side], of.offsets[side]));
        }
    }
}

#define UNPACK(name, num_bits, kind) \
    static __attribute__((noinline)) void name(const Unpacked *line) { unpack(line, num_bits, kind); }
UNPACK(unpack_bytes, 8, STARTS)
UNPACK(unpack_levels, 4, LEVELS)
UNPACK(unpack_fours, 4, OFFSETS)
UNPACK(unpack_fours_by_half, 4, HALF_SCALES)
UNPACK(unpack_fours_by_pair, 4, HALF_NUMBERS)
UNPACK(unpack_fives, 5, OFFSETS)
UNPACK(unpack_sixes_by_half, 6, HALF_SCALES)

void unpack_codes(element *to, const Codes *w, int64_t pair, int64_t num_lines, int64_t line) {
    const NumberKind kind = kind_of(w);
    const int64_t at = pair * num_lines + line;
    Unpacked found = {to, w->codes + at * code_line_bytes(w), w->multiples + at * 2 * PAIR_OUTPUTS};
    found.numbers = load_group(w, pair * w->num_groups + line / w->group_lines);
    found.levels = kind == LEVELS ? load_levels(w) : zero_words();
    if (kind == LINE_NUMBERS) found.numbers = multiply_group_by(&found.numbers, found.multiples);
    switch (kind) {
        case STARTS: return unpack_bytes(&found);
        case LEVELS: return unpack_levels(&found);
        case OFFSETS:
        case LINE_NUMBERS: return (w->num_bits == 5 ? unpack_fives : unpack_fours)(&found);
        case HALF_SCALES: return (w->num_bits == 6 ? unpack_sixes_by_half : unpack_fours_by_half)(&found);
        case HALF_NUMBERS: return unpack_fours_by_pair(&found);
    }
}

#endif
