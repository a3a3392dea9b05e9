/* Codes and their products by AVX-512's VNNI, included by code_products.c and code_elements.c: a pair of tiles at a
 * time. */

/* The numbers of a group of inputs, or of a line, and a pair of tiles. */
typedef struct {
    __m512 scales[2], offsets[2]; /* offsets: scale times zero, or min */
} Group;

INLINE __m512 load_halves(const uint16_t *from) {
    return _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)from));
}

INLINE Group load_group(const Codes *w, int64_t group) {
    Group found = {.offsets = {zero16(), zero16()}};
    for (int side = 0; side < 2; side++) {
        int64_t at = group * PAIR_OUTPUTS + side * 16;
        found.scales[side] = w->halves != NULL ? load_halves(w->halves + at) : _mm512_load_ps(w->scales + at);
        if (w->mins != NULL) found.offsets[side] = load_halves(w->mins + at);
        if (w->zeros == NULL) continue;
        __m128i zeros = _mm_load_si128((const __m128i *)(w->zeros + at));
        __m512 codes = multiply16(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(zeros)), fill16(ZERO_STEP));
        found.offsets[side] = multiply16(found.scales[side], codes);
    }
    return found;
}

INLINE __m512i load_multiples(const uint8_t *from) {
    return _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)from));
}

/* Returns the multiples of the scales of half a line. */
INLINE __m512i scale_multiples(__m512i stored, const NumberKind kind) {
    return kind == HALF_SCALES ? _mm512_srai_epi32(_mm512_slli_epi32(stored, 24), 24)
                               : _mm512_and_si512(stored, _mm512_set1_epi32(15));
}

/* Returns the numbers of a line. */
INLINE Group multiply_group_by(const Group *group, const uint8_t *multiples) {
    Group found;
    for (int side = 0; side < 2; side++) {
        __m512 of_scale = _mm512_cvtepi32_ps(load_multiples(multiples + side * 16));
        __m512 of_min = _mm512_cvtepi32_ps(load_multiples(multiples + PAIR_OUTPUTS + side * 16));
        found.scales[side] = multiply16(group->scales[side], of_scale);
        found.offsets[side] = multiply16(group->offsets[side], of_min);
    }
    return found;
}

/* Returns the codes of 4 inputs x 16 outputs. line: of the tile. levels: as in Codes, four times. */
INLINE __m512i load_step(const uint8_t *line, const int step, const int num_bits, const bool has_levels, __m512i levels) {
    const __m512i low = _mm512_set1_epi8(15);
    if (num_bits == 8) return _mm512_load_si512(line + step * 128);
    if (num_bits == 6) {
        const __m512i six = _mm512_set1_epi8(63);
        line += step / 4 * 384;
        if (step % 4 < 3) return _mm512_and_si512(_mm512_load_si512(line + step % 4 * 128), six);
        __m512i first = _mm512_srli_epi16(_mm512_load_si512(line), 6);
        __m512i second = _mm512_srli_epi16(_mm512_load_si512(line + 128), 4);
        __m512i third = _mm512_srli_epi16(_mm512_load_si512(line + 256), 2);
        first = _mm512_ternarylogic_epi32(_mm512_set1_epi8(12), second, first, 0xca); /* second where the mask is 1 */
        return _mm512_and_si512(_mm512_ternarylogic_epi32(_mm512_set1_epi8(48), third, first, 0xca), six);
    }
    __m512i codes = _mm512_load_si512(line + step / 2 * 128);
    if (step % 2) codes = _mm512_srli_epi16(codes, 4);
    if (num_bits == 4) {
        codes = _mm512_and_si512(codes, low);
        return has_levels ? _mm512_shuffle_epi8(levels, codes) : codes;
    }
    __m512i high = _mm512_load_si512(line + LOW_PLANE_BYTES);
    high = step <= 4 ? _mm512_slli_epi16(high, 4 - step) : _mm512_srli_epi16(high, step - 4);
    high = _mm512_and_si512(high, _mm512_set1_epi8(16));
    return _mm512_ternarylogic_epi32(codes, low, high, 0xea); /* codes & low | high */
}

INLINE __m512i load_levels(const Codes *w) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)w->levels));
}

/* The same for a line whose scales are those of its outputs, or of their groups. sums: of the first tile, of the second. */
INLINE void add_line(__m512 (*sums)[CODE_ROWS], const uint8_t *at, const int8_t *inputs, const LineScale *scales,
                     const Group *numbers, __m512i levels, const int count, const int num_bits, const NumberKind kind) {
    __m512i a[CODE_ROWS], b[CODE_ROWS];
#pragma GCC unroll 6
    for (int i = 0; i < count; i++) a[i] = b[i] = has_start(kind) ? _mm512_set1_epi32(scales[i].start) : zero_words();
#pragma GCC unroll 8
    for (int step = 0; step < LINE_STEPS; step++) {
        __m512i one = load_step(at, step, num_bits, kind == LEVELS, levels);
        __m512i two = load_step(at + 64, step, num_bits, kind == LEVELS, levels);
#pragma GCC unroll 6
        for (int i = 0; i < count; i++) {
            add_byte_products(&a[i], one, inputs + i * LINE + 4 * step);
            add_byte_products(&b[i], two, inputs + i * LINE + 4 * step);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < count; i++) {
        __m512 scale = _mm512_set1_ps(scales[i].scale), sum = _mm512_set1_ps(scales[i].sum);
        sums[0][i] = multiply_add16(_mm512_cvtepi32_ps(a[i]), multiply16(numbers->scales[0], scale), sums[0][i]);
        sums[1][i] = multiply_add16(_mm512_cvtepi32_ps(b[i]), multiply16(numbers->scales[1], scale), sums[1][i]);
        if (has_start(kind)) continue;
        sums[0][i] = _mm512_fnmadd_ps(sum, numbers->offsets[0], sums[0][i]);
        sums[1][i] = _mm512_fnmadd_ps(sum, numbers->offsets[1], sums[1][i]);
    }
}

/* The same with scales of half lines: their sums, times the multiples, are whole numbers below 2^24. start_shift: of the
 * sums' starts. */
INLINE void add_halves(__m512 (*sums)[CODE_ROWS], const uint8_t *at, const int8_t *inputs, const LineScale *scales,
                       const Group *numbers, const uint8_t *multiples, const int start_shift, const int count,
                       const int num_bits, const NumberKind kind) {
#pragma GCC unroll 2
    for (int side = 0; side < 2; side++) {
        __m512 whole[CODE_ROWS];
        __m512i min_pairs = zero_words();
#pragma GCC unroll 6
        for (int i = 0; i < count; i++) whole[i] = zero16();
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            __m512i stored = load_multiples(multiples + half * PAIR_OUTPUTS + side * 16), products[CODE_ROWS];
            __m512i factors = scale_multiples(stored, kind);
            const __m512 scale = _mm512_cvtepi32_ps(factors);
            if (kind == HALF_NUMBERS)
                min_pairs = _mm512_or_si512(min_pairs, _mm512_slli_epi32(_mm512_srli_epi32(stored, 4), 16 * half));
#pragma GCC unroll 6
            for (int i = 0; i < count; i++)
                products[i] = kind == HALF_SCALES ? _mm512_set1_epi32(scales[i].half_starts[half] >> start_shift)
                                                  : zero_words();
#pragma GCC unroll 4
            for (int step = LINE_STEPS / 2 * half; step < LINE_STEPS / 2 * (half + 1); step++) {
                __m512i codes = load_step(at + side * 64, step, num_bits, false, zero_words());
#pragma GCC unroll 6
                for (int i = 0; i < count; i++) add_byte_products(&products[i], codes, inputs + i * LINE + 4 * step);
            }
#pragma GCC unroll 6
            for (int i = 0; i < count; i++)
                whole[i] = multiply_add16(_mm512_cvtepi32_ps(products[i]), scale, whole[i]);
        }
#pragma GCC unroll 6
        for (int i = 0; i < count; i++) {
            const __m512 scale = _mm512_set1_ps(scales[i].scale);
            sums[side][i] = multiply_add16(whole[i], multiply16(numbers->scales[side], scale), sums[side][i]);
            if (kind != HALF_NUMBERS) continue;
            __m512i mins = _mm512_madd_epi16(_mm512_set1_epi32(scales[i].half_sums), min_pairs);
            sums[side][i] = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(mins), multiply16(numbers->offsets[side], scale),
                                             sums[side][i]);
        }
    }
}

/* sums += x @ weight for `count` rows from `row` on and lines [line, end) of a pair of tiles, whose codes are at `at`; the
 * first rows of a block prefetch the codes `ahead` bytes before their use. Every call passes constants for const
 * parameters. */
INLINE void multiply_codes_held(float (*sums)[PAIR_OUTPUTS], const RowCodes *x, int64_t row, const Codes *w,
                                const uint8_t *at, int64_t pair, int64_t line, int64_t end, int64_t ahead,
                                const int count, const int num_bits, const NumberKind kind) {
    const __m512i levels = kind == LEVELS ? load_levels(w) : zero_words();
    const int start_shift = num_bits == 6 ? 0 : 2;
    const int8_t *inputs = x->codes + (line * x->num_rows + row) * LINE;
    const LineScale *scales = x->scales + line * x->num_rows + row;
    const uint8_t *multiples = w->multiples + (pair * x->num_lines + line) * 2 * PAIR_OUTPUTS;
    __m512 held[2][CODE_ROWS];
#pragma GCC unroll 6
    for (int i = 0; i < count; i++) {
        held[0][i] = line ? _mm512_load_ps(sums[i]) : zero16();
        held[1][i] = line ? _mm512_load_ps(sums[i] + 16) : zero16();
    }
    int64_t group = pair * w->num_groups + line / w->group_lines, left = w->group_lines - line % w->group_lines;
    Group numbers = load_group(w, group);
    for (; line < end; line++, left--, at += 128 * num_bits, multiples += 2 * PAIR_OUTPUTS) {
        if (left == 0) numbers = load_group(w, ++group), left = w->group_lines;
        if (ahead)
            for (int i = 0; i < 2 * num_bits; i++) _mm_prefetch((const char *)at + ahead + 64 * i, _MM_HINT_T1);
        if (kind == HALF_SCALES || kind == HALF_NUMBERS)
            add_halves(held, at, inputs, scales, &numbers, multiples, start_shift, count, num_bits, kind);
        else if (kind == LINE_NUMBERS) {
            const Group of_line = multiply_group_by(&numbers, multiples);
            add_line(held, at, inputs, scales, &of_line, levels, count, num_bits, kind);
        } else add_line(held, at, inputs, scales, &numbers, levels, count, num_bits, kind);
        inputs += x->num_rows * LINE, scales += x->num_rows;
    }
#pragma GCC unroll 6
    for (int i = 0; i < count; i++) {
        _mm512_store_ps(sums[i], held[0][i]);
        _mm512_store_ps(sums[i] + 16, held[1][i]);
    }
}
