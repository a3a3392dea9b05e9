/* Vectors of 16 lanes for every instruction level.
 *
 * Floats  16 float32
 * Ints    16 words of 32 bits
 * Mask    a bit for each lane, lane 0 the lowest
 *
 * With AVX-512 a vector is one register, with AVX2 a pair of registers. The inner loops of linear.c, attention.c and
 * prefill.c need all registers and use intrinsics directly.
 */
#ifndef TOKENLOOM_VECTOR_H
#define TOKENLOOM_VECTOR_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

typedef uint16_t Mask;

/* Returns the mask of the first `left` lanes, at most 16. */
INLINE Mask lanes(int64_t left) { return left >= 16 ? 0xffff : left <= 0 ? 0 : (Mask)((1u << left) - 1); }

/* ── operations of the same name at both widths: DEFINE_n(name, type, operation) takes n vectors ─────────────────── */

#ifdef __AVX512F__
typedef __m512 Floats;
typedef __m512i Ints;
#define DEFINE_2(name, type, op) INLINE type name(type a, type b) { return _mm512_##op(a, b); }
#define DEFINE_3(name, type, op) INLINE type name(type a, type b, type c) { return _mm512_##op(a, b, c); }
#define DEFINE_SHIFT(name, op) INLINE Ints name(Ints a, const int count) { return _mm512_##op(a, count); }
#define DEFINE_FILL(name, type, lane, op) INLINE type name(lane a) { return _mm512_##op(a); }
#define BITWISE(a, operator, b) (a operator b)
#else
typedef struct {
    __m256 low, high;
} Floats;
typedef struct {
    __m256i low, high;
} Ints;
#define DEFINE_2(name, type, op)                                                                                       \
    INLINE type name(type a, type b) { return (type){_mm256_##op(a.low, b.low), _mm256_##op(a.high, b.high)}; }
#define DEFINE_3(name, type, op)                                                                                       \
    INLINE type name(type a, type b, type c) {                                                                         \
        return (type){_mm256_##op(a.low, b.low, c.low), _mm256_##op(a.high, b.high, c.high)};                          \
    }
#define DEFINE_SHIFT(name, op)                                                                                         \
    INLINE Ints name(Ints a, const int count) { return (Ints){_mm256_##op(a.low, count), _mm256_##op(a.high, count)}; }
#define DEFINE_FILL(name, type, lane, op)                                                                              \
    INLINE type name(lane a) { return (type){_mm256_##op(a), _mm256_##op(a)}; }
#define BITWISE(a, operator, b) ((Ints){a.low operator b.low, a.high operator b.high})
#endif

DEFINE_FILL(fill16, Floats, float, set1_ps)
DEFINE_2(add16, Floats, add_ps)
DEFINE_2(subtract16, Floats, sub_ps)
DEFINE_2(multiply16, Floats, mul_ps)
DEFINE_2(divide16, Floats, div_ps)
DEFINE_2(larger16, Floats, max_ps) /* the second operand if either is NaN */
DEFINE_2(smaller16, Floats, min_ps)
DEFINE_3(multiply_add16, Floats, fmadd_ps) /* a * b + c */
DEFINE_3(multiply_subtract16, Floats, fmsub_ps) /* a * b - c */

DEFINE_FILL(fill_words, Ints, int32_t, set1_epi32)
DEFINE_2(add_words, Ints, add_epi32)
DEFINE_2(multiply_even_words, Ints, mul_epu32) /* unsigned products of 64 bits of words 0, 2, … */
DEFINE_2(interleave_low_words, Ints, unpacklo_epi32) /* within each quarter of 4 words, like the next three */
DEFINE_2(interleave_high_words, Ints, unpackhi_epi32)
DEFINE_2(interleave_low_pairs, Ints, unpacklo_epi64)
DEFINE_2(interleave_high_pairs, Ints, unpackhi_epi64)
DEFINE_SHIFT(shift_left, slli_epi32)
DEFINE_SHIFT(shift_right, srli_epi32)
DEFINE_SHIFT(shift_pairs_left, slli_epi64)
DEFINE_SHIFT(shift_pairs_right, srli_epi64)

INLINE Ints and_words(Ints a, Ints b) { return BITWISE(a, &, b); }
INLINE Ints or_words(Ints a, Ints b) { return BITWISE(a, |, b); }
INLINE Ints xor_words(Ints a, Ints b) { return BITWISE(a, ^, b); }

#undef DEFINE_2
#undef DEFINE_3
#undef DEFINE_SHIFT
#undef DEFINE_FILL
#undef BITWISE

/* ── operations with different code at each width ────────────────────────────────────────────────────────────────── */

#ifdef __AVX512F__

INLINE Floats zero16(void) { return _mm512_setzero_ps(); }
INLINE Ints zero_words(void) { return _mm512_setzero_si512(); }
INLINE Ints lane_numbers(void) { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
INLINE Ints as_words(Floats v) { return _mm512_castps_si512(v); }
INLINE Floats as_floats(Ints v) { return _mm512_castsi512_ps(v); }

/* `floats`: at a multiple of 64 bytes; `any`: at any address; `some`: only the lanes of the mask, others load 0. */
INLINE Floats load_floats(const float *p) { return _mm512_load_ps(p); }
INLINE void store_floats(float *p, Floats v) { _mm512_store_ps(p, v); }
INLINE Ints load_any(const void *p) { return _mm512_loadu_si512(p); }
INLINE void store_any(void *p, Ints v) { _mm512_storeu_si512(p, v); }
INLINE Floats load_some(const float *p, Mask mask) { return _mm512_maskz_loadu_ps(mask, p); }
INLINE void store_some(float *p, Mask mask, Floats v) { _mm512_mask_storeu_ps(p, mask, v); }

INLINE Floats keep(Mask mask, Floats v) { return _mm512_maskz_mov_ps(mask, v); } /* other lanes become 0 */
INLINE Floats choose(Mask mask, Floats v, Floats others) { return _mm512_mask_mov_ps(others, mask, v); }
INLINE Ints odd_words_of(Ints v, Ints even) { return _mm512_mask_mov_epi32(even, 0xaaaa, v); }
INLINE Mask at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); } /* false with NaN */
INLINE Floats magnitude16(Floats v) { return _mm512_abs_ps(v); }
INLINE Mask is_finite16(Floats v) {
    return _mm512_cmp_ps_mask(magnitude16(v), _mm512_set1_ps(__builtin_inff()), _CMP_LT_OQ);
}
INLINE Floats from_unsigned(Ints v) { return _mm512_cvtepu32_ps(v); }
INLINE Floats nearest16(Floats v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE Floats scale16(Floats v, Floats whole) { return _mm512_scalef_ps(v, whole); } /* v * 2^whole */
INLINE Floats reciprocal16(Floats v) { return _mm512_rcp14_ps(v); } /* relative error below 2^-14 */

INLINE float first_of(Floats v) { return _mm512_cvtss_f32(v); }
INLINE float sum_of(Floats v) { return _mm512_reduce_add_ps(v); }
INLINE float largest_of(Floats v) { return _mm512_reduce_max_ps(v); }
INLINE void compress_store(int32_t *p, Mask mask, Ints v) { _mm512_mask_compressstoreu_epi32(p, mask, v); }

/* Concatenate quarters (4 lanes) of a, then of b: 0 and 1; 2 and 3; 0 and 2; 1 and 3. */
INLINE Ints low_quarters(Ints a, Ints b) { return _mm512_shuffle_i32x4(a, b, 0x44); }
INLINE Ints high_quarters(Ints a, Ints b) { return _mm512_shuffle_i32x4(a, b, 0xee); }
INLINE Ints even_quarters(Ints a, Ints b) { return _mm512_shuffle_i32x4(a, b, 0x88); }
INLINE Ints odd_quarters(Ints a, Ints b) { return _mm512_shuffle_i32x4(a, b, 0xdd); }

/* Moves lane j of row i to lane i of row j. */
INLINE void transpose_16x16(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 4; i++) {
            t[8 * half + i] = _mm512_shuffle_i32x4(r[8 * half + i], r[8 * half + 4 + i], 0x88);
            t[8 * half + 4 + i] = _mm512_shuffle_i32x4(r[8 * half + i], r[8 * half + 4 + i], 0xdd);
        }
    for (int i = 0; i < 4; i++) { /* column 4c + i lies in 128-bit lane c */
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
}

#ifdef __AVX512VNNI__
/* sums += 4 unsigned bytes of each lane times the same 4 signed bytes. These stay in memory: with its own choice of
 * instruction forms the compiler runs out of registers. */
INLINE void add_byte_products(Ints *sums, Ints bytes, const int8_t *others) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(*sums) : "v"(bytes), "m"(*(const int32_t *)(const void *)others));
}
#endif

#else

INLINE Floats zero16(void) { return (Floats){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE Ints zero_words(void) { return (Ints){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE Ints lane_numbers(void) {
    return (Ints){_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
INLINE Ints as_words(Floats v) { return (Ints){_mm256_castps_si256(v.low), _mm256_castps_si256(v.high)}; }
INLINE Floats as_floats(Ints v) { return (Floats){_mm256_castsi256_ps(v.low), _mm256_castsi256_ps(v.high)}; }

/* Sets all bits in the lanes of a mask. */
INLINE Ints lane_bits(Mask mask) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i low = _mm256_and_si256(_mm256_set1_epi32(mask), bits);
    __m256i high = _mm256_and_si256(_mm256_set1_epi32(mask >> 8), bits);
    return (Ints){_mm256_cmpeq_epi32(low, bits), _mm256_cmpeq_epi32(high, bits)};
}

INLINE Floats load_floats(const float *p) { return (Floats){_mm256_load_ps(p), _mm256_load_ps(p + 8)}; }
INLINE void store_floats(float *p, Floats v) { _mm256_store_ps(p, v.low), _mm256_store_ps(p + 8, v.high); }
INLINE Ints load_any(const void *p) {
    return (Ints){_mm256_loadu_si256(p), _mm256_loadu_si256((const __m256i *)p + 1)};
}
INLINE void store_any(void *p, Ints v) {
    _mm256_storeu_si256(p, v.low), _mm256_storeu_si256((__m256i *)p + 1, v.high);
}
INLINE Floats load_some(const float *p, Mask mask) {
    if (mask == 0xffff) return (Floats){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
    Ints bits = lane_bits(mask);
    return (Floats){_mm256_maskload_ps(p, bits.low), _mm256_maskload_ps(p + 8, bits.high)};
}
INLINE void store_some(float *p, Mask mask, Floats v) {
    if (mask == 0xffff) {
        _mm256_storeu_ps(p, v.low), _mm256_storeu_ps(p + 8, v.high);
        return;
    }
    Ints bits = lane_bits(mask);
    _mm256_maskstore_ps(p, bits.low, v.low), _mm256_maskstore_ps(p + 8, bits.high, v.high);
}

INLINE Floats keep(Mask mask, Floats v) { return as_floats(and_words(lane_bits(mask), as_words(v))); }
INLINE Floats choose(Mask mask, Floats v, Floats others) {
    Floats bits = as_floats(lane_bits(mask));
    return (Floats){_mm256_blendv_ps(others.low, v.low, bits.low), _mm256_blendv_ps(others.high, v.high, bits.high)};
}
INLINE Ints odd_words_of(Ints v, Ints even) {
    return (Ints){_mm256_blend_epi32(even.low, v.low, 0xaa), _mm256_blend_epi32(even.high, v.high, 0xaa)};
}
#define COMPARE(a, b, how)                                                                                             \
    (Mask)(_mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, how)) |                                                      \
           _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, how)) << 8)
INLINE Mask at_least(Floats a, Floats b) { return COMPARE(a, b, _CMP_GE_OQ); }
INLINE Floats magnitude16(Floats v) { return as_floats(and_words(as_words(v), fill_words(0x7fffffff))); }
INLINE Mask is_finite16(Floats v) { return COMPARE(magnitude16(v), fill16(__builtin_inff()), _CMP_LT_OQ); }
#undef COMPARE
INLINE Floats from_signed(Ints v) { return (Floats){_mm256_cvtepi32_ps(v.low), _mm256_cvtepi32_ps(v.high)}; }
INLINE Floats from_unsigned(Ints v) { /* both halves are exact, and their sum is rounded once */
    Floats low = from_signed(and_words(v, fill_words(0xffff))), high = from_signed(shift_right(v, 16));
    return multiply_add16(high, fill16(65536.0f), low);
}
INLINE Floats nearest16(Floats v) {
    return (Floats){_mm256_round_ps(v.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                    _mm256_round_ps(v.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
INLINE Floats scale16(Floats v, Floats whole) { /* 0 below 2^-126, infinite from 2^128 on */
    whole = smaller16(larger16(whole, fill16(-127.0f)), fill16(128.0f));
    Ints exponent = {_mm256_cvtps_epi32(whole.low), _mm256_cvtps_epi32(whole.high)};
    return multiply16(v, as_floats(shift_left(add_words(exponent, fill_words(127)), 23)));
}
INLINE Floats reciprocal16(Floats v) { return divide16(fill16(1.0f), v); }

INLINE float first_of(Floats v) { return _mm256_cvtss_f32(v.low); }
INLINE float sum_of(Floats v) {
    __m256 both = _mm256_add_ps(v.low, v.high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
INLINE float largest_of(Floats v) {
    __m256 both = _mm256_max_ps(v.low, v.high);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
INLINE void compress_store(int32_t *p, Mask mask, Ints v) {
    int32_t words[16];
    memcpy(words, &v, sizeof words);
    for (unsigned left = mask; left; left &= left - 1) *p++ = words[__builtin_ctz(left)];
}

INLINE Ints low_quarters(Ints a, Ints b) { return (Ints){a.low, b.low}; }
INLINE Ints high_quarters(Ints a, Ints b) { return (Ints){a.high, b.high}; }
INLINE Ints even_quarters(Ints a, Ints b) {
    return (Ints){_mm256_permute2x128_si256(a.low, a.high, 0x20), _mm256_permute2x128_si256(b.low, b.high, 0x20)};
}
INLINE Ints odd_quarters(Ints a, Ints b) {
    return (Ints){_mm256_permute2x128_si256(a.low, a.high, 0x31), _mm256_permute2x128_si256(b.low, b.high, 0x31)};
}

#endif

/* Returns a product that is rounded before it is added to a sum: compilers make one instruction of both. */
INLINE Floats rounded16(Floats product) {
#ifdef __AVX512F__
    __asm__("" : "+v"(product));
#else
    __asm__("" : "+x"(product.low), "+x"(product.high));
#endif
    return product;
}

/* ── functions ───────────────────────────────────────────────────────────────────────────────────────────────────── */

#define LOG2_E 1.4426950408889634f

/* 2^x; -inf gives 0, NaN stays. Relative error below 2^-22 (a polynomial of degree 6 on [-1/2, 1/2]). */
INLINE Floats exp2_16(Floats x) {
    x = smaller16(fill16(200.0f), larger16(fill16(-200.0f), x)); /* finite or NaN */
    Floats whole = nearest16(x), f = subtract16(x, whole);
    Floats p = fill16(1.535336188319500e-4f);
    p = multiply_add16(p, f, fill16(1.339887440266574e-3f));
    p = multiply_add16(p, f, fill16(9.618437357674640e-3f));
    p = multiply_add16(p, f, fill16(5.550332471162809e-2f));
    p = multiply_add16(p, f, fill16(2.402264791363012e-1f));
    p = multiply_add16(p, f, fill16(6.931472028550421e-1f));
    p = multiply_add16(p, f, fill16(1.0f));
    return scale16(p, whole);
}

/* 1 / (1 + e^-x) */
INLINE Floats sigmoid_16(Floats x) {
    return divide16(fill16(1.0f), add16(exp2_16(multiply16(x, fill16(-LOG2_E))), fill16(1.0f)));
}

/* tanh(x) with a relative error below 2^-21: a polynomial up to 0.625, above it by the exponential. */
INLINE Floats tanh_16(Floats x) {
    Floats square = multiply16(x, x), p = fill16(-5.7181373e-3f);
    p = multiply_add16(p, square, fill16(2.0651556e-2f));
    p = multiply_add16(p, square, fill16(-5.3743791e-2f));
    p = multiply_add16(p, square, fill16(1.3331495e-1f));
    p = multiply_add16(p, square, fill16(-3.3333284e-1f));
    Floats small = multiply_add16(multiply16(x, square), p, x);
    Floats power = exp2_16(multiply16(x, fill16(2 * LOG2_E)));
    Floats large = subtract16(fill16(1.0f), divide16(fill16(2.0f), add16(power, fill16(1.0f))));
    return choose(at_least(magnitude16(x), fill16(0.625f)), large, small);
}

#endif
