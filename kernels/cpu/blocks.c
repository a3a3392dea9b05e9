/* Packs rows of a GGUF file, as they are stored in blocks, into tiles of codes, the layout of codes.h.
 *
 * Reads the mapped file and writes the packed memory, with no copy of a tensor in between. Codes, scales and mins have
 * the bits that `pack_codes` would write for a weight that is read by workers/weights/gguf_blocks.py and, if it has no
 * codes of that many bits, rounded by kernels/quantized.py: the same operations in the same order. A code times its scale
 * has at most 24 bits, so it does not matter whether a product and a min are rounded once or twice. Blocks are those of
 * ggml (ggml-org/ggml, src/ggml-common.h).
 */
#include "codes.h"

/* In the order of BLOCK_KINDS in kernels/stored_rows.py. */
typedef enum { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4 } BlockKind;

/* The rows of a weight. */
typedef struct {
    const uint8_t *const *rows; /* [num_rows]: the first block of each row; NULL: a row of zeros */
    const uint8_t *kinds; /* [num_rows]: the BlockKind of each row; of floats only if `is_by_row` */
    int32_t is_by_row; /* elements are rounded to bf16, then to 8 bits with one scale for the row */
} StoredRows;

#ifdef HAS_CODES

#define CHUNK 8 /* lines that are unpacked at a time: a large block */
#define LEAST_SCALE 1e-12f /* of weights that are rounded to 8 bits */
#define MOST_CODE 127.0f

/* A line of a row: element i is value(codes[i]) * scales[i / 16] - mins[i / 16]. */
typedef struct {
    _Alignas(32) uint8_t codes[LINE];
    float scales[2], mins[2];
} CodedLine;

typedef struct {
    int64_t num_bytes, num_lines; /* of a block */
    uint8_t zero; /* the value of a code is code - zero, */
    const int8_t *levels; /* or levels[code], unless NULL */
} BlockForm;

static const int8_t IQ4_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t FP4_LEVELS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
static const BlockForm FORMS[] = {
    [F32] = {4 * LINE, 1},        [F16] = {2 * LINE, 1},   [BF16] = {2 * LINE, 1},
    [Q4_0] = {18, 1, 8},          [Q4_1] = {20, 1},        [Q5_0] = {22, 1, 16},
    [Q5_1] = {24, 1},             [Q8_0] = {34, 1},        [Q2_K] = {84, CHUNK},
    [Q3_K] = {110, CHUNK, 4},     [Q4_K] = {144, CHUNK},   [Q5_K] = {176, CHUNK},
    [Q6_K] = {210, CHUNK, 32},    [IQ4_NL] = {18, 1, 0, IQ4_LEVELS},
    [IQ4_XS] = {136, CHUNK, 0, IQ4_LEVELS}, [MXFP4] = {17, 1, 0, FP4_LEVELS},
};

/* ── blocks to lines ─────────────────────────────────────────────────────────────────────────────────────────────── */

INLINE __m128i load_half_line(const uint8_t *from) { return _mm_loadu_si128((const __m128i *)from); }
INLINE __m256i load_codes(const uint8_t *from) { return _mm256_loadu_si256((const __m256i *)from); }
INLINE void store_codes(CodedLine *line, __m256i codes) { _mm256_store_si256((__m256i *)line->codes, codes); }
INLINE __m256i bits_of(__m256i codes, int first, int width) {
    __m256i shifted = _mm256_srl_epi16(codes, _mm_cvtsi32_si128(first));
    return _mm256_and_si256(shifted, _mm256_set1_epi8((char)((1 << width) - 1)));
}
/* Returns the low halves of 16 bytes, then the high halves. */
INLINE __m256i nibbles_of(const uint8_t *from) {
    __m128i both = load_half_line(from);
    return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(both, 4), both), _mm256_set1_epi8(15));
}
/* Returns 16 times bit i of 4 bytes as byte i. */
INLINE __m256i fifth_bits(const uint8_t *from) {
    int32_t word;
    memcpy(&word, from, 4);
    const __m256i places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bits = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    __m256i chosen = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(word), places), bits);
    return _mm256_and_si256(_mm256_cmpeq_epi8(chosen, bits), _mm256_set1_epi8(16));
}

INLINE float half_at(const uint8_t *from) {
    uint16_t half;
    memcpy(&half, from, 2);
    return _cvtsh_ss(half);
}
INLINE uint32_t word_at(const uint8_t *from) {
    uint32_t word;
    memcpy(&word, from, 4);
    return word;
}

INLINE void set_numbers(CodedLine *line, float scale, float min) {
    line->scales[0] = line->scales[1] = scale;
    line->mins[0] = line->mins[1] = min;
}

/* Multiplies 8 whole numbers of a byte each by a factor. */
INLINE void scale_bytes(uint32_t low, uint32_t high, float factor, float *to) {
    __m256i words = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)((uint64_t)high << 32 | low)));
    _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_cvtepi32_ps(words), _mm256_set1_ps(factor)));
}

/* Sets the scales and mins of Q4_K and Q5_K: 6 bits each, in 12 bytes behind two halves. */
INLINE void set_k_numbers(const uint8_t *block, CodedLine *lines) {
    const uint32_t first = word_at(block + 4), second = word_at(block + 8), last = word_at(block + 12);
    float scales[CHUNK], mins[CHUNK];
    scale_bytes(first & 0x3f3f3f3f, (last & 0x0f0f0f0f) | (first >> 6 & 0x03030303) << 4, half_at(block), scales);
    scale_bytes(second & 0x3f3f3f3f, (last >> 4 & 0x0f0f0f0f) | (second >> 6 & 0x03030303) << 4, half_at(block + 2), mins);
    for (int i = 0; i < CHUNK; i++) set_numbers(lines + i, scales[i], mins[i]);
}

static void read_q2_k(const uint8_t *block, CodedLine *lines) {
    const float scale = half_at(block + 80), min = half_at(block + 82);
    for (int i = 0; i < CHUNK; i++) {
        store_codes(lines + i, bits_of(load_codes(block + 16 + i / 4 * 32), i % 4 * 2, 2));
        for (int half = 0; half < 2; half++) {
            lines[i].scales[half] = scale * (float)(block[2 * i + half] & 15);
            lines[i].mins[half] = min * (float)(block[2 * i + half] >> 4);
        }
    }
}

/* Returns the scale of half line `at`, 6 bits in two places. */
INLINE int q3_k_multiple(const uint8_t *block, int at) {
    return ((block[96 + at % 8] >> at / 8 * 4 & 15) | (block[104 + at % 4] >> at / 4 * 2 & 3) << 4) - 32;
}

static void read_q3_k(const uint8_t *block, CodedLine *lines) {
    const float factor = half_at(block + 108);
    for (int i = 0; i < CHUNK; i++) {
        __m256i low = bits_of(load_codes(block + 32 + i / 4 * 32), i % 4 * 2, 2);
        store_codes(lines + i, _mm256_or_si256(low, _mm256_slli_epi16(bits_of(load_codes(block), i, 1), 2)));
        for (int half = 0; half < 2; half++) {
            lines[i].scales[half] = factor * (float)q3_k_multiple(block, 2 * i + half);
            lines[i].mins[half] = 0;
        }
    }
}

static void read_q4_k(const uint8_t *block, CodedLine *lines) {
    set_k_numbers(block, lines);
    for (int i = 0; i < CHUNK; i++) store_codes(lines + i, bits_of(load_codes(block + 16 + i / 2 * 32), i % 2 * 4, 4));
}

static void read_q5_k(const uint8_t *block, CodedLine *lines) {
    set_k_numbers(block, lines);
    for (int i = 0; i < CHUNK; i++) {
        __m256i low = bits_of(load_codes(block + 48 + i / 2 * 32), i % 2 * 4, 4);
        store_codes(lines + i, _mm256_or_si256(low, _mm256_slli_epi16(bits_of(load_codes(block + 16), i, 1), 4)));
    }
}

static void read_q6_k(const uint8_t *block, CodedLine *lines) {
    const float factor = half_at(block + 208);
    for (int i = 0; i < CHUNK; i++) {
        __m256i low = bits_of(load_codes(block + i / 4 * 64 + i % 2 * 32), i % 4 / 2 * 4, 4);
        __m256i high = bits_of(load_codes(block + 128 + i / 4 * 32), i % 4 * 2, 2);
        store_codes(lines + i, _mm256_or_si256(low, _mm256_slli_epi16(high, 4)));
        for (int half = 0; half < 2; half++) {
            lines[i].scales[half] = factor * (float)(int8_t)block[192 + 2 * i + half];
            lines[i].mins[half] = 0;
        }
    }
}

static void read_iq4_xs(const uint8_t *block, CodedLine *lines) {
    const float factor = half_at(block);
    for (int i = 0; i < CHUNK; i++) {
        const int low = block[4 + i / 2] >> i % 2 * 4 & 15, high = block[2 + i / 4] >> i % 4 * 2 & 3;
        store_codes(lines + i, nibbles_of(block + 8 + 16 * i));
        set_numbers(lines + i, factor * (float)((low | high << 4) - 32), 0);
    }
}

/* Returns 2^(exponent - 128). */
INLINE float power_of(uint8_t exponent) {
    const uint32_t bits = exponent < 2 ? 0x00200000u << exponent : (exponent - 1u) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return power;
}

/* Unpacks a block, FORMS[kind].num_lines lines. */
static void read_block(BlockKind kind, const uint8_t *block, CodedLine *lines) {
    switch (kind) {
        case Q4_0:
        case IQ4_NL:
            store_codes(lines, nibbles_of(block + 2));
            return set_numbers(lines, half_at(block), 0);
        case Q4_1:
            store_codes(lines, nibbles_of(block + 4));
            return set_numbers(lines, half_at(block), -half_at(block + 2));
        case Q5_0:
            store_codes(lines, _mm256_or_si256(nibbles_of(block + 6), fifth_bits(block + 2)));
            return set_numbers(lines, half_at(block), 0);
        case Q5_1:
            store_codes(lines, _mm256_or_si256(nibbles_of(block + 8), fifth_bits(block + 4)));
            return set_numbers(lines, half_at(block), -half_at(block + 2));
        case Q8_0:
            store_codes(lines, load_codes(block + 2));
            return set_numbers(lines, half_at(block), 0);
        case MXFP4:
            store_codes(lines, nibbles_of(block + 1));
            return set_numbers(lines, power_of(block[0]), 0);
        case Q2_K: return read_q2_k(block, lines);
        case Q3_K: return read_q3_k(block, lines);
        case Q4_K: return read_q4_k(block, lines);
        case Q5_K: return read_q5_k(block, lines);
        case Q6_K: return read_q6_k(block, lines);
        case IQ4_XS: return read_iq4_xs(block, lines);
        default: return; /* floats have no codes */
    }
}

/* Unpacks `count` lines of a row, whole blocks, from line `first` on. */
static void read_lines(BlockKind kind, const uint8_t *row, int64_t first, int64_t count, CodedLine *lines) {
    const BlockForm *form = &FORMS[kind];
    const uint8_t *block = row + first / form->num_lines * form->num_bytes;
    for (int64_t i = 0; i < count; i += form->num_lines, block += form->num_bytes) read_block(kind, block, lines + i);
}

/* ── lines to floats and codes ───────────────────────────────────────────────────────────────────────────────────── */

typedef struct {
    Floats low, high;
} FloatLine;

INLINE Floats from_bytes(__m128i v) {
#ifdef __AVX512F__
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(v));
#else
    return (Floats){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)),
                    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)))};
#endif
}

INLINE Floats from_halves(const uint8_t *from) {
#ifdef __AVX512F__
    return _mm512_cvtph_ps(load_codes(from));
#else
    return (Floats){_mm256_cvtph_ps(load_half_line(from)), _mm256_cvtph_ps(load_half_line(from + 16))};
#endif
}

INLINE Floats floats_of(const CodedLine *line, const BlockForm *form, int half) {
    __m128i codes = _mm_load_si128((const __m128i *)line->codes + half);
    if (form->levels != NULL) codes = _mm_shuffle_epi8(load_half_line((const uint8_t *)form->levels), codes);
    else codes = _mm_sub_epi8(codes, _mm_set1_epi8((char)form->zero));
    return subtract16(multiply16(from_bytes(codes), fill16(line->scales[half])), fill16(line->mins[half]));
}

INLINE FloatLine float_line(const CodedLine *line, const BlockForm *form) {
    return (FloatLine){floats_of(line, form, 0), floats_of(line, form, 1)};
}

/* Reads a line of a row of floats. */
static FloatLine read_floats(BlockKind kind, const uint8_t *row, int64_t line, int64_t num_inputs) {
    const int64_t size = FORMS[kind].num_bytes / LINE, left = min64(LINE, num_inputs - line * LINE);
    _Alignas(64) uint8_t stored[4 * LINE] = {0};
    memcpy(stored, row + line * LINE * size, (size_t)(left * size));
    if (kind == F32) return (FloatLine){load_floats((float *)stored), load_floats((float *)stored + 16)};
    if (kind == F16) return (FloatLine){from_halves(stored), from_halves(stored + 32)};
    return (FloatLine){load16((element *)stored, 0xffff), load16((element *)stored + 16, 0xffff)};
}

/* The largest magnitude of some numbers, and whether none of them is NaN. */
typedef struct {
    Floats most;
    Mask is_number;
} Extent;

INLINE Extent wider(Extent extent, Floats v) {
    return (Extent){larger16(magnitude16(v), extent.most), extent.is_number & at_least(v, v)};
}

/* Returns the scale by which numbers of this extent become codes of 8 bits. */
INLINE float scale_of(Extent extent) {
    if (extent.is_number != 0xffff) return __builtin_nanf("");
    const float scale = largest_of(extent.most) / MOST_CODE;
    return scale > LEAST_SCALE ? scale : LEAST_SCALE;
}

/* Rounds a line to codes of 8 bits. Numbers that are not finite become any codes: their scale is not finite either. */
INLINE void round_line(FloatLine line, float scale, uint8_t *to) {
    _Alignas(32) int8_t codes[LINE];
    round_to_codes(divide16(line.low, fill16(scale)), codes);
    round_to_codes(divide16(line.high, fill16(scale)), codes + 16);
    const __m256i signs = _mm256_set1_epi8((char)ZERO_CODE);
    _mm256_storeu_si256((__m256i *)to, _mm256_xor_si256(_mm256_load_si256((const __m256i *)codes), signs));
}

/* Writes a line's codes of 8 bits and returns its scale. */
INLINE float line_to_bytes(BlockKind kind, const CodedLine *line, uint8_t *to) {
    const BlockForm *form = &FORMS[kind];
    if (kind == Q8_0 || kind == Q5_0) {
        const __m256i shift = _mm256_set1_epi8((char)(ZERO_CODE - form->zero));
        _mm256_storeu_si256((__m256i *)to, _mm256_add_epi8(_mm256_load_si256((const __m256i *)line->codes), shift));
        return line->scales[0];
    }
    const FloatLine values = float_line(line, form);
    const float scale = scale_of(wider(wider((Extent){zero16(), 0xffff}, values.low), values.high));
    round_line(values, scale, to);
    return scale;
}

/* Writes 16 codes of 6 bits as 12 bytes: two bits of each of the last four lie above the others. */
INLINE void half_line_to_sixes(__m128i codes, uint8_t *to) {
    const __m128i last = _mm_srlv_epi32(_mm_shuffle_epi32(codes, 0xff), _mm_setr_epi32(0, 2, 4, 0));
    const __m128i above = _mm_slli_epi16(_mm_and_si128(last, _mm_set1_epi8(3)), 6);
    const __m128i words = _mm_or_si128(codes, above);
    _mm_storel_epi64((__m128i *)to, words);
    const int third = _mm_extract_epi32(words, 2);
    memcpy(to + 8, &third, 4);
}

/* Writes a line's codes of 4 to 6 bits, to which `shift` is added, as codes.h has them for an output. */
INLINE void line_to_bits(const CodedLine *line, int num_bits, uint8_t shift, uint8_t *to) {
    const __m256i all = _mm256_load_si256((const __m256i *)line->codes);
    const __m256i codes = _mm256_add_epi8(all, _mm256_set1_epi8((char)shift));
    if (num_bits == 6) {
        half_line_to_sixes(_mm256_castsi256_si128(codes), to);
        half_line_to_sixes(_mm256_extracti128_si256(codes, 1), to + 12);
        return;
    }
    const __m256i four = _mm256_and_si256(codes, _mm256_set1_epi8(15));
    const __m128 low = _mm_castsi128_ps(_mm256_castsi256_si128(four));
    const __m128 high = _mm_castsi128_ps(_mm256_extracti128_si256(four, 1));
    const __m128i even = _mm_castps_si128(_mm_shuffle_ps(low, high, 0x88));
    const __m128i odd = _mm_castps_si128(_mm_shuffle_ps(low, high, 0xdd));
    _mm_storeu_si128((__m128i *)to, _mm_or_si128(even, _mm_slli_epi16(odd, 4)));
    if (num_bits == 4) return;
    __m256i fifth = _mm256_sllv_epi32(bits_of(codes, 4, 1), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    fifth = _mm256_or_si256(fifth, _mm256_shuffle_epi32(fifth, 0x4e));
    fifth = _mm256_or_si256(fifth, _mm256_shuffle_epi32(fifth, 0xb1)); /* of the words of each half line */
    const int word = _mm256_extract_epi32(fifth, 0) | _mm256_extract_epi32(fifth, 4);
    memcpy(to + LINE / 2, &word, 4);
}

/* Sets the multiples of a block's lines, see MultiplesKind, and the places of its scale and min in half precision. */
static void read_multiples(BlockKind kind, const uint8_t *block, uint8_t (*to)[2], const uint8_t **numbers) {
    switch (kind) {
        case Q4_K:
        case Q5_K:
            for (int i = 0; i < CHUNK; i++) {
                const uint8_t *at = block + 4 + i % 4;
                to[i][0] = (uint8_t)(i < 4 ? at[0] & 63 : (at[8] & 15) | at[0] >> 6 << 4);
                to[i][1] = (uint8_t)(i < 4 ? at[4] & 63 : at[8] >> 4 | at[4] >> 6 << 4);
            }
            numbers[0] = block, numbers[1] = block + 2;
            return;
        case Q2_K:
            memcpy(to, block, 2 * CHUNK);
            numbers[0] = block + 80, numbers[1] = block + 82;
            return;
        case Q3_K:
            for (int at = 0; at < 2 * CHUNK; at++) to[at / 2][at % 2] = (uint8_t)q3_k_multiple(block, at);
            numbers[0] = block + 108;
            return;
        default: /* Q6_K */
            memcpy(to, block + 192, 2 * CHUNK);
            numbers[0] = block + 208;
    }
}

/* ── codes to tiles ──────────────────────────────────────────────────────────────────────────────────────────────── */

/* Writes a line of a pair of tiles: word i of the codes of output o, at rows + o * stride, becomes word i * 32 + o. */
static void write_line(const uint8_t *rows, int64_t stride, int num_bits, uint8_t *to) {
    for (int64_t word = 0; word < num_bits; word += 4, rows += 16, to += 16 * PAIR_OUTPUTS)
        for (int64_t output = 0; output < PAIR_OUTPUTS; output += 4) {
            const uint8_t *from = rows + output * stride;
            __m128i a = load_half_line(from), b = load_half_line(from + stride);
            __m128i c = load_half_line(from + 2 * stride), d = load_half_line(from + 3 * stride);
            __m128i low[2] = {_mm_unpacklo_epi32(a, b), _mm_unpacklo_epi32(c, d)};
            __m128i high[2] = {_mm_unpackhi_epi32(a, b), _mm_unpackhi_epi32(c, d)};
            __m128i *target = (__m128i *)(to + output * 4);
            _mm_store_si128(target, _mm_unpacklo_epi64(low[0], low[1]));
            if (word + 1 == num_bits) continue;
            _mm_store_si128(target + PAIR_OUTPUTS / 4, _mm_unpackhi_epi64(low[0], low[1]));
            if (word + 2 == num_bits) continue;
            _mm_store_si128(target + 2 * PAIR_OUTPUTS / 4, _mm_unpacklo_epi64(high[0], high[1]));
            _mm_store_si128(target + 3 * PAIR_OUTPUTS / 4, _mm_unpackhi_epi64(high[0], high[1]));
        }
}

static void set_group(const Codes *codes, int64_t pair, int64_t group, int64_t output, float scale, float min) {
    const int64_t at = (pair * codes->num_groups + group) * PAIR_OUTPUTS + output;
    if (codes->scales != NULL) ((float *)codes->scales)[at] = scale;
    if (codes->halves != NULL) ((uint16_t *)codes->halves)[at] = (uint16_t)_cvtss_sh(scale, _MM_FROUND_TO_NEAREST_INT);
    if (codes->mins != NULL) ((uint16_t *)codes->mins)[at] = (uint16_t)_cvtss_sh(min, _MM_FROUND_TO_NEAREST_INT);
}

/* Sets an output's numbers of a group that is a block; block: NULL for zeros. */
static void set_multiples(const Linear *w, const Codes *codes, int64_t pair, int64_t line, int64_t output, BlockKind kind,
                          const uint8_t *block) {
    const uint8_t *numbers[2] = {NULL, NULL};
    uint8_t multiples[CHUNK][2] = {{0}};
    uint16_t halves[2] = {0, 0};
    if (block != NULL) read_multiples(kind, block, multiples, numbers);
    for (int i = 0; i < 2; i++)
        if (numbers[i] != NULL) memcpy(&halves[i], numbers[i], 2);
    const int64_t at = (pair * codes->num_groups + line / CHUNK) * PAIR_OUTPUTS + output;
    ((uint16_t *)codes->halves)[at] = halves[0];
    if (codes->mins != NULL) ((uint16_t *)codes->mins)[at] = halves[1];
    uint8_t *to = (uint8_t *)codes->multiples + (pair * w->num_lines + line) * 2 * PAIR_OUTPUTS + output;
    for (int i = 0; i < 2 * CHUNK; i++) to[i * PAIR_OUTPUTS] = multiples[i / 2][i % 2];
}

/* Packs a pair of tiles of a part whose groups are lines or blocks. rows: of its outputs, -1: none. */
static void pack_lines(const Linear *w, const Codes *codes, const StoredRows *from, int64_t pair, const int64_t *rows) {
    const int num_bits = codes->num_bits;
    const int64_t line_bytes = LINE * num_bits / 8;
    uint8_t *to = (uint8_t *)codes->codes + pair * w->num_lines * code_line_bytes(codes);
    for (int64_t first = 0; first < w->num_lines; first += CHUNK) {
        const int64_t count = min64(CHUNK, w->num_lines - first);
        _Alignas(64) uint8_t chunk[PAIR_OUTPUTS][CHUNK * LINE];
        for (int64_t output = 0; output < PAIR_OUTPUTS; output++) {
            const uint8_t *row = rows[output] < 0 ? NULL : from->rows[rows[output]];
            const BlockKind kind = row == NULL ? Q4_0 : (BlockKind)from->kinds[rows[output]];
            const BlockForm *form = &FORMS[kind];
            CodedLine lines[CHUNK];
            if (row != NULL) read_lines(kind, row, first, count, lines);
            else memset(chunk[output], 0, sizeof chunk[output]);
            if (codes->multiples != NULL)
                set_multiples(w, codes, pair, first, output, kind,
                              row == NULL ? NULL : row + first / form->num_lines * form->num_bytes);
            const uint8_t shift = codes->multiples_kind == HALF_MULTIPLES ? (1 << (num_bits - 1)) - form->zero : 0;
            for (int64_t i = 0; i < count; i++) {
                float scale = row != NULL ? lines[i].scales[0] : 0, min = row != NULL ? lines[i].mins[0] : 0;
                uint8_t *target = chunk[output] + i * line_bytes;
                if (row != NULL && num_bits < 8) line_to_bits(lines + i, num_bits, shift, target);
                else if (row != NULL) scale = line_to_bytes(kind, lines + i, target);
                if (codes->multiples == NULL) set_group(codes, pair, first + i, output, scale, min);
                if (codes->zeros == NULL) continue;
                int64_t at = (pair * codes->num_groups + first + i) * PAIR_OUTPUTS + output;
                ((uint8_t *)codes->zeros)[at] = (uint8_t)(row != NULL ? form->zero / ZERO_STEP : 0);
            }
        }
        for (int64_t i = 0; i < count; i++, to += code_line_bytes(codes))
            write_line(chunk[0] + i * line_bytes, sizeof chunk[0], num_bits, to);
    }
}

/* Reads a row as elements, zeros behind its inputs, and returns their extent. */
static Extent read_elements(const StoredRows *from, int64_t row, int64_t num_inputs, int64_t num_lines, element *to) {
    const BlockKind kind = (BlockKind)from->kinds[row];
    Extent extent = {zero16(), 0xffff};
    for (int64_t first = 0; first < num_lines; first += CHUNK) {
        const int64_t count = min64(CHUNK, num_lines - first);
        CodedLine lines[CHUNK];
        if (kind > BF16) read_lines(kind, from->rows[row], first, count, lines);
        for (int64_t i = 0; i < count; i++, to += LINE) {
            FloatLine line;
            if (kind > BF16) line = float_line(lines + i, &FORMS[kind]);
            else line = read_floats(kind, from->rows[row], first + i, num_inputs);
            store16(to, 0xffff, line.low), store16(to + 16, 0xffff, line.high);
            extent = wider(wider(extent, load16(to, 0xffff)), load16(to + 16, 0xffff));
        }
    }
    return extent;
}

static int64_t row_bytes_of(int32_t kind, int64_t num_columns) {
    return num_columns / LINE / FORMS[kind].num_lines * FORMS[kind].num_bytes;
}

/* Unpacks a row of blocks to elements, for embed_blocks.c. Kernels without codes do nothing. */
void unpack_row(int32_t kind, const uint8_t *row, int64_t num_columns, element *to) {
    const uint8_t number = (uint8_t)kind;
    const StoredRows from = {&row, &number, 0};
    read_elements(&from, 0, num_columns, num_columns / LINE, to);
}

/* Packs a pair of tiles of a part with one scale for each output. */
static void pack_whole_rows(const Linear *w, const Codes *part, const StoredRows *from, int64_t pair,
                            const int64_t *rows) {
    const int64_t size = w->num_lines * LINE;
    uint8_t *codes = thread_scratch((PAIR_OUTPUTS + (int64_t)sizeof(element)) * size);
    element *elements = (element *)(codes + PAIR_OUTPUTS * size);
    for (int64_t output = 0; output < PAIR_OUTPUTS; output++) {
        const int64_t row = rows[output];
        uint8_t *to = codes + output * size;
        memset(to, row < 0 ? 0 : ZERO_CODE, (size_t)size);
        float scale = row < 0 ? 0 : LEAST_SCALE;
        if (row >= 0 && from->rows[row] != NULL) {
            scale = scale_of(read_elements(from, row, w->num_inputs, w->num_lines, elements));
            for (int64_t i = 0; i < size; i += LINE)
                round_line((FloatLine){load16(elements + i, 0xffff), load16(elements + i + 16, 0xffff)}, scale, to + i);
        }
        memset(to + w->num_inputs, 0, (size_t)(size - w->num_inputs));
        set_group(part, pair, 0, output, scale, 0);
    }
    uint8_t *to = (uint8_t *)part->codes + pair * w->num_lines * code_line_bytes(part);
    for (int64_t i = 0; i < w->num_lines; i++, to += code_line_bytes(part)) write_line(codes + i * LINE, size, 8, to);
}

#else

void unpack_row(int32_t kind, const uint8_t *row, int64_t num_columns, element *to) {
    (void)kind, (void)row, (void)num_columns, (void)to;
}

static int64_t row_bytes_of(int32_t kind, int64_t num_columns) { return (void)kind, (void)num_columns, 0; }

#endif

/* Returns the bytes of a row of blocks, a kind that is none of floats. */
EXPORT int64_t block_row_bytes(int32_t kind, int64_t num_columns) { return row_bytes_of(kind, num_columns); }

/* Fills the parts of a weight, whose groups are lines or blocks, or rows if `is_by_row`. Outputs that do not exist have
 * scale 0. */
EXPORT void pack_blocks(const Linear *w, const StoredRows *from, int num_threads) {
#ifdef HAS_CODES
#pragma omp parallel for num_threads(num_threads) schedule(dynamic)
    for (int64_t pair = 0; pair < w->num_pairs; pair++) {
        int64_t rows[PAIR_OUTPUTS];
        for (int64_t output = 0; output < PAIR_OUTPUTS; output++) rows[output] = row_of(w, pair, output);
        const Codes *part = part_of(w, pair);
        (from->is_by_row ? pack_whole_rows : pack_lines)(w, part, from, pair - part->first_pair, rows);
    }
#else
    (void)w, (void)from, (void)num_threads;
#endif
}
