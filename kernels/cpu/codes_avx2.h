/* Products with codes by AVX2, included by codes.h: a tile at a time. The integers are those of codes_vnni.h and floats
 * are added in the same order, so that both give the same bits. */

/* sums += sizes of 4 codes x 8 outputs times these inputs, which have the signs of the codes unless they are unsigned.
 * Two products of a code of 8 bits, at most 128 x 127, fit into 16 bits; so do all 32 of a line with codes below 16. */
INLINE __m256i add_products(__m256i sums, __m256i sizes, __m256i codes, const int8_t *inputs, const bool is_signed) {
    __m256i four = _mm256_castps_si256(_mm256_broadcast_ss((const float *)(const void *)inputs));
    if (!is_signed) return _mm256_add_epi16(sums, _mm256_maddubs_epi16(sizes, four));
    __m256i products = _mm256_maddubs_epi16(sizes, _mm256_sign_epi8(four, codes));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
}

INLINE __m256 load_halves(const uint16_t *from) {
    return _mm256_cvtph_ps(_mm_load_si128((const __m128i *)from));
}

/* Adds the products of a line to 8 outputs of `count` rows. at: their scales, in w. */
INLINE void add_line(float (*sums)[PAIR_OUTPUTS], int64_t output, bool is_first, const LineScale *scales, const Codes *w,
                     int64_t at, const __m256i *products, const int count, const bool is_signed) {
    __m256 factors = w->halves != NULL ? load_halves(w->halves + at) : _mm256_load_ps(w->scales + at);
    __m256 offsets = _mm256_setzero_ps();
    if (w->mins != NULL) offsets = load_halves(w->mins + at);
    if (w->zeros != NULL) {
        __m256i zeros = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(w->zeros + at)));
        offsets = _mm256_mul_ps(factors, _mm256_mul_ps(_mm256_cvtepi32_ps(zeros), _mm256_set1_ps(ZERO_STEP)));
    }
    for (int i = 0; i < count; i++) {
        __m256i words = is_signed ? products[i] : _mm256_madd_epi16(products[i], _mm256_set1_epi16(1));
        __m256 sum = is_first ? _mm256_setzero_ps() : _mm256_load_ps(sums[i] + output);
        __m256 factor = _mm256_mul_ps(factors, _mm256_set1_ps(scales[i].scale));
        sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(words), factor, sum);
        if (!is_signed) sum = _mm256_fnmadd_ps(_mm256_set1_ps(scales[i].sum), offsets, sum);
        _mm256_store_ps(sums[i] + output, sum);
    }
}

/* sums += x @ weight for `count` rows from `row` on and lines [line, end) of a pair of tiles; the first rows of a block
 * prefetch the codes `ahead` bytes before their use. Every call passes constants for const parameters. */
INLINE void multiply_codes_held(float (*sums)[PAIR_OUTPUTS], const RowCodes *x, int64_t row, const Codes *w, int64_t pair,
                                int64_t line, int64_t end, int64_t ahead, const int count, const int num_bits,
                                const bool has_levels) {
    const __m256i low = _mm256_set1_epi8(15), sign = _mm256_set1_epi8((char)ZERO_CODE);
    const bool is_signed = num_bits == 8 || has_levels;
    __m256i levels = low;
    if (has_levels) levels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)w->levels));
    const uint8_t *at = w->codes + (pair * x->num_lines + line) * code_line_bytes(w);
    const int8_t *inputs = x->codes + (line * x->num_rows + row) * LINE;
    const LineScale *scales = x->scales + line * x->num_rows + row;
    for (; line < end; line++, at += code_line_bytes(w), inputs += x->num_rows * LINE, scales += x->num_rows) {
        int64_t group = pair * w->num_groups + line / w->group_lines;
        for (int side = 0; side < 2; side++) {
            __m256i products[2][CODE_ROWS];
            for (int i = 0; i < count; i++) products[0][i] = products[1][i] = _mm256_setzero_si256();
            const uint8_t *from = at + 64 * side;
            for (int step = 0; step < LINE_STEPS; step += 8 / num_bits, from += 128) {
                if (ahead) _mm_prefetch((const char *)from + ahead, _MM_HINT_T1);
                for (int part = 0; part < 2; part++) {
                    const __m256i stored = _mm256_load_si256((const __m256i *)from + part);
                    for (int half = 0; half < 8 / num_bits; half++) {
                        __m256i codes = half ? _mm256_srli_epi16(stored, 4) : stored;
                        if (num_bits == 4) codes = _mm256_and_si256(codes, low);
                        if (has_levels) codes = _mm256_shuffle_epi8(levels, codes);
                        if (is_signed) codes = _mm256_xor_si256(codes, sign);
                        const __m256i sizes = is_signed ? _mm256_abs_epi8(codes) : codes;
                        for (int i = 0; i < count; i++)
                            products[part][i] = add_products(products[part][i], sizes, codes,
                                                             inputs + i * LINE + 4 * (step + half), is_signed);
                    }
                }
            }
            for (int part = 0; part < 2; part++) {
                int64_t output = 16 * side + 8 * part;
                add_line(sums, output, line == 0, scales, w, group * PAIR_OUTPUTS + output, products[part], count,
                         is_signed);
            }
        }
    }
}
