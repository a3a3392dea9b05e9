/* Products with codes by AVX2, included by code_products.c: 8 outputs at a time. The integers are those of codes_vnni.h and
 * floats are added in the same order, so that both give the same bits. */

INLINE __m256 load_halves(const uint16_t *from) {
    return _mm256_cvtph_ps(_mm_load_si128((const __m128i *)from));
}

INLINE __m256i load_bytes(const uint8_t *from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
}

/* The numbers of a group of inputs, or of a line, and 8 outputs. */
typedef struct {
    __m256 scales, offsets; /* offsets: scale times zero, or min */
} Group;

/* at: of the outputs' scales, in w. */
INLINE Group load_group(const Codes *w, int64_t at) {
    Group found = {.offsets = _mm256_setzero_ps()};
    found.scales = w->halves != NULL ? load_halves(w->halves + at) : _mm256_load_ps(w->scales + at);
    if (w->mins != NULL) found.offsets = load_halves(w->mins + at);
    if (w->zeros != NULL) {
        __m256 codes = _mm256_mul_ps(_mm256_cvtepi32_ps(load_bytes(w->zeros + at)), _mm256_set1_ps(ZERO_STEP));
        found.offsets = _mm256_mul_ps(found.scales, codes);
    }
    return found;
}

/* Returns the codes of 4 inputs x 8 outputs, whose codes of the line begin at `line`. levels: as in Codes, twice. */
INLINE __m256i load_step(const uint8_t *line, const int step, const int num_bits, const bool has_levels, __m256i levels) {
    const __m256i low = _mm256_set1_epi8(15);
    if (num_bits == 8) return _mm256_load_si256((const __m256i *)(line + step * 128));
    if (num_bits == 6) {
        const __m256i six = _mm256_set1_epi8(63), *from = (const __m256i *)(line + step / 4 * 384);
        if (step % 4 < 3) return _mm256_and_si256(_mm256_load_si256(from + step % 4 * 4), six);
        __m256i first = _mm256_and_si256(_mm256_srli_epi16(_mm256_load_si256(from), 6), _mm256_set1_epi8(3));
        __m256i second = _mm256_and_si256(_mm256_srli_epi16(_mm256_load_si256(from + 4), 4), _mm256_set1_epi8(12));
        __m256i third = _mm256_and_si256(_mm256_srli_epi16(_mm256_load_si256(from + 8), 2), _mm256_set1_epi8(48));
        return _mm256_or_si256(_mm256_or_si256(first, second), third);
    }
    __m256i codes = _mm256_load_si256((const __m256i *)(line + step / 2 * 128));
    if (step % 2) codes = _mm256_srli_epi16(codes, 4);
    codes = _mm256_and_si256(codes, low);
    if (num_bits == 4) return has_levels ? _mm256_shuffle_epi8(levels, codes) : codes;
    __m256i high = _mm256_load_si256((const __m256i *)(line + LOW_PLANE_BYTES));
    high = step <= 4 ? _mm256_slli_epi16(high, 4 - step) : _mm256_srli_epi16(high, step - 4);
    return _mm256_or_si256(codes, _mm256_and_si256(high, _mm256_set1_epi8(16)));
}

INLINE __m256i load_levels(const Codes *w) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)w->levels));
}

/* products += codes of steps [first, end) x 8 outputs times these inputs. Codes of 8 bits have a sign: they and the inputs
 * are multiplied as sizes and signs. Products of other codes are summed in 16 bits as long as they fit: two products of a
 * step are at most 254 times the largest code. */
INLINE void add_products(__m256i *products, const uint8_t *at, const int8_t *inputs, const int first, const int end,
                         __m256i levels, const int count, const int num_bits, const NumberKind kind) {
    const bool is_signed = kind == STARTS || kind == LEVELS;
    const int run = is_signed ? 1 : kind == HALF_SCALES ? 2 : num_bits == 4 ? 8 : 4; /* codes below 64, 16, 32 */
#pragma GCC unroll 8
    for (int begin = first; begin < end; begin += run) {
        const int last = begin + run < end ? begin + run : end;
        __m256i sums[CODE_ROWS];
        for (int i = 0; i < count; i++) sums[i] = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int step = begin; step < last; step++) {
            __m256i codes = load_step(at, step, num_bits, kind == LEVELS, levels), sizes = codes;
            if (is_signed) {
                codes = _mm256_xor_si256(codes, _mm256_set1_epi8((char)ZERO_CODE));
                sizes = _mm256_abs_epi8(codes);
            }
            for (int i = 0; i < count; i++) {
                const float *from = (const float *)(const void *)(inputs + i * LINE + 4 * step);
                __m256i four = _mm256_castps_si256(_mm256_broadcast_ss(from));
                __m256i found = _mm256_maddubs_epi16(sizes, is_signed ? _mm256_sign_epi8(four, codes) : four);
                sums[i] = _mm256_add_epi16(sums[i], found);
            }
        }
        for (int i = 0; i < count; i++)
            products[i] = _mm256_add_epi32(products[i], _mm256_madd_epi16(sums[i], _mm256_set1_epi16(1)));
    }
}

/* sums += the products of a line with 8 outputs. at: of their codes in the line. */
INLINE void add_line(__m256 *sums, const uint8_t *at, const int8_t *inputs, const LineScale *scales, Group numbers,
                     const uint8_t *multiples, __m256i levels, const int count, const int num_bits,
                     const NumberKind kind) {
    if (kind == LINE_NUMBERS) {
        numbers.scales = _mm256_mul_ps(numbers.scales, _mm256_cvtepi32_ps(load_bytes(multiples)));
        numbers.offsets = _mm256_mul_ps(numbers.offsets, _mm256_cvtepi32_ps(load_bytes(multiples + PAIR_OUTPUTS)));
    }
    __m256i products[CODE_ROWS];
    for (int i = 0; i < count; i++) products[i] = _mm256_setzero_si256();
    add_products(products, at, inputs, 0, LINE_STEPS, levels, count, num_bits, kind);
    for (int i = 0; i < count; i++) {
        __m256 factor = _mm256_mul_ps(numbers.scales, _mm256_set1_ps(scales[i].scale));
        sums[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products[i]), factor, sums[i]);
        if (!has_start(kind)) sums[i] = _mm256_fnmadd_ps(_mm256_set1_ps(scales[i].sum), numbers.offsets, sums[i]);
    }
}

/* The same with scales of half lines: their sums, times the multiples, are whole numbers below 2^24. start_shift: of the
 * sums' starts. */
INLINE void add_halves(__m256 *sums, const uint8_t *at, const int8_t *inputs, const LineScale *scales, Group numbers,
                       const uint8_t *multiples, const int start_shift, const int count, const int num_bits,
                       const NumberKind kind) {
    __m256 whole[CODE_ROWS];
    __m256i min_pairs = _mm256_setzero_si256();
    for (int i = 0; i < count; i++) whole[i] = _mm256_setzero_ps();
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        __m256i stored = load_bytes(multiples + half * PAIR_OUTPUTS), products[CODE_ROWS];
        __m256i factors = kind == HALF_SCALES ? _mm256_srai_epi32(_mm256_slli_epi32(stored, 24), 24)
                                              : _mm256_and_si256(stored, _mm256_set1_epi32(15));
        const __m256 scale = _mm256_cvtepi32_ps(factors);
        min_pairs = _mm256_or_si256(min_pairs, _mm256_slli_epi32(_mm256_srli_epi32(stored, 4), 16 * half));
        for (int i = 0; i < count; i++)
            products[i] = kind == HALF_SCALES ? _mm256_set1_epi32(scales[i].half_starts[half] >> start_shift)
                                              : _mm256_setzero_si256();
        add_products(products, at, inputs, LINE_STEPS / 2 * half, LINE_STEPS / 2 * (half + 1), min_pairs, count, num_bits,
                     kind);
        for (int i = 0; i < count; i++) whole[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products[i]), scale, whole[i]);
    }
    for (int i = 0; i < count; i++) {
        const __m256 scale = _mm256_set1_ps(scales[i].scale);
        sums[i] = _mm256_fmadd_ps(whole[i], _mm256_mul_ps(numbers.scales, scale), sums[i]);
        if (kind != HALF_NUMBERS) continue;
        __m256i mins = _mm256_madd_epi16(_mm256_set1_epi32(scales[i].half_sums), min_pairs);
        sums[i] = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(mins), _mm256_mul_ps(numbers.offsets, scale), sums[i]);
    }
}

/* sums += x @ weight for `count` rows from `row` on and lines [line, end) of a pair of tiles, whose codes are at `at`; the
 * first rows of a block prefetch the codes `ahead` bytes before their use. Every call passes constants for const
 * parameters. */
INLINE void multiply_codes_held(float (*sums)[PAIR_OUTPUTS], const RowCodes *x, int64_t row, const Codes *w,
                                const uint8_t *at, int64_t pair, int64_t line, int64_t end, int64_t ahead,
                                const int count, const int num_bits, const NumberKind kind) {
    const __m256i levels = kind == LEVELS ? load_levels(w) : _mm256_setzero_si256();
    const int start_shift = num_bits == 6 ? 0 : 2;
    const int8_t *inputs = x->codes + (line * x->num_rows + row) * LINE;
    const LineScale *scales = x->scales + line * x->num_rows + row;
    const uint8_t *multiples = w->multiples + (pair * x->num_lines + line) * 2 * PAIR_OUTPUTS;
    for (; line < end; line++, at += 128 * num_bits, multiples += 2 * PAIR_OUTPUTS) {
        int64_t group = (pair * w->num_groups + line / w->group_lines) * PAIR_OUTPUTS;
        if (ahead)
            for (int i = 0; i < 2 * num_bits; i++) _mm_prefetch((const char *)at + ahead + 64 * i, _MM_HINT_T1);
        for (int output = 0; output < PAIR_OUTPUTS; output += 8) {
            const Group numbers = load_group(w, group + output);
            const uint8_t *of_outputs = multiples + output;
            __m256 held[CODE_ROWS];
            for (int i = 0; i < count; i++)
                held[i] = line ? _mm256_load_ps(sums[i] + output) : _mm256_setzero_ps();
            if (kind == HALF_SCALES || kind == HALF_NUMBERS)
                add_halves(held, at + 4 * output, inputs, scales, numbers, of_outputs, start_shift, count, num_bits, kind);
            else add_line(held, at + 4 * output, inputs, scales, numbers, of_outputs, levels, count, num_bits, kind);
            for (int i = 0; i < count; i++) _mm256_store_ps(sums[i] + output, held[i]);
        }
        inputs += x->num_rows * LINE, scales += x->num_rows;
    }
}
