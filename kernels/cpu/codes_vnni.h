/* Products with codes by AVX-512's VNNI, included by codes.h: a pair of tiles at a time. */
/* The numbers of a group of inputs and a pair of tiles. */
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

/* sums += codes of 4 inputs x 16 outputs times these inputs. The inputs stay in memory: with its own choice of
 * instruction forms the compiler runs out of registers. */
INLINE void add_products(__m512i *sums, __m512i codes, const int8_t *inputs) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(*sums) : "v"(codes), "m"(*(const int32_t *)(const void *)inputs));
}

/* Returns the levels, four times. */
INLINE __m512i load_levels(const Codes *w) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)w->levels));
}

INLINE __m512i level_of(__m512i codes, __m512i levels, const bool has_levels) {
    return has_levels ? _mm512_shuffle_epi8(levels, codes) : codes;
}

/* sums += x @ weight for `count` rows from `row` on and lines [line, end) of a pair of tiles; the first rows of a block
 * prefetch the codes `ahead` bytes before their use. Every call passes constants for const parameters. */
INLINE void multiply_codes_held(float (*sums)[PAIR_OUTPUTS], const RowCodes *x, int64_t row, const Codes *w, int64_t pair,
                                int64_t line, int64_t end, int64_t ahead, const int count, const int num_bits,
                                const bool has_levels) {
    const __m512i low = _mm512_set1_epi8(15);
    const __m512i levels = has_levels ? load_levels(w) : low;
    const bool has_start = num_bits == 8 || has_levels; /* else offsets stand for zeros */
    const uint8_t *at = w->codes + (pair * x->num_lines + line) * code_line_bytes(w);
    const int8_t *codes = x->codes + (line * x->num_rows + row) * LINE;
    const LineScale *scales = x->scales + line * x->num_rows + row;
    __m512 first[CODE_ROWS], second[CODE_ROWS];
    for (int i = 0; i < count; i++) {
        first[i] = line ? _mm512_load_ps(sums[i]) : _mm512_setzero_ps();
        second[i] = line ? _mm512_load_ps(sums[i] + 16) : _mm512_setzero_ps();
    }
    int64_t group = pair * w->num_groups + line / w->group_lines, left = w->group_lines - line % w->group_lines;
    Group numbers = load_group(w, group);
    for (; line < end; line++, left--, codes += x->num_rows * LINE, scales += x->num_rows) {
        if (left == 0) numbers = load_group(w, ++group), left = w->group_lines;
        __m512i a[CODE_ROWS], b[CODE_ROWS];
        for (int i = 0; i < count; i++) a[i] = b[i] = has_start ? _mm512_set1_epi32(scales[i].start) : zero_words();
#pragma GCC unroll 8
        for (int step = 0; step < LINE_STEPS; step += 8 / num_bits, at += 128) {
            __m512i one = _mm512_load_si512(at), two = _mm512_load_si512(at + 64);
            if (ahead) {
                _mm_prefetch((const char *)at + ahead, _MM_HINT_T1);
                _mm_prefetch((const char *)at + ahead + 64, _MM_HINT_T1);
            }
            __m512i one_low = num_bits == 8 ? one : level_of(_mm512_and_si512(one, low), levels, has_levels);
            __m512i two_low = num_bits == 8 ? two : level_of(_mm512_and_si512(two, low), levels, has_levels);
#pragma GCC unroll 6
            for (int i = 0; i < count; i++) {
                add_products(&a[i], one_low, codes + i * LINE + 4 * step);
                add_products(&b[i], two_low, codes + i * LINE + 4 * step);
            }
            if (num_bits == 8) continue;
            one = level_of(_mm512_and_si512(_mm512_srli_epi16(one, 4), low), levels, has_levels);
            two = level_of(_mm512_and_si512(_mm512_srli_epi16(two, 4), low), levels, has_levels);
#pragma GCC unroll 6
            for (int i = 0; i < count; i++) {
                add_products(&a[i], one, codes + i * LINE + 4 * step + 4);
                add_products(&b[i], two, codes + i * LINE + 4 * step + 4);
            }
        }
#pragma GCC unroll 6
        for (int i = 0; i < count; i++) {
            __m512 scale = _mm512_set1_ps(scales[i].scale);
            first[i] = multiply_add16(_mm512_cvtepi32_ps(a[i]), multiply16(numbers.scales[0], scale), first[i]);
            second[i] = multiply_add16(_mm512_cvtepi32_ps(b[i]), multiply16(numbers.scales[1], scale), second[i]);
            if (!has_start) {
                __m512 sum = _mm512_set1_ps(scales[i].sum);
                first[i] = _mm512_fnmadd_ps(sum, numbers.offsets[0], first[i]);
                second[i] = _mm512_fnmadd_ps(sum, numbers.offsets[1], second[i]);
            }
        }
    }
    for (int i = 0; i < count; i++) {
        _mm512_store_ps(sums[i], first[i]);
        _mm512_store_ps(sums[i] + 16, second[i]);
    }
}
