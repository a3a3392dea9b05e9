/* Elements, the type of weights, activations and the cache: bf16 (with ELEMENT_BF16) or float32.
 *
 * Loads convert to float32 vectors, stores convert back.
 */
#ifndef TOKENLOOM_ELEMENTS_H
#define TOKENLOOM_ELEMENTS_H

#include "vector.h"

#ifdef ELEMENT_BF16
typedef uint16_t element;
#define LINE 32
#else
typedef float element;
#define LINE 16
#endif

/* load16, store16: the elements of a mask, at most 16; other lanes load 0. */
#ifdef ELEMENT_BF16
#ifdef __AVX512F__

INLINE Floats widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }

/* float32 to bf16, rounded to nearest even; NaN stays NaN. */
INLINE __m256i narrow(Floats v) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(v);
#else
    __m512i bits = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}

/* Narrows two vectors to 32 adjacent elements. */
INLINE Ints narrow_pair(Floats low, Floats high) {
#ifdef __AVX512BF16__
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
#else
    return _mm512_inserti64x4(_mm512_castsi256_si512(narrow(low)), narrow(high), 1);
#endif
}

INLINE Floats load16(const element *p, Mask mask) { return widen(_mm256_maskz_loadu_epi16(mask, p)); }
INLINE void store16(element *p, Mask mask, Floats v) { _mm256_mask_storeu_epi16(p, mask, narrow(v)); }

#else

INLINE __m256 widen8(__m128i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16)); }
INLINE Floats widen(const element *p) {
    return (Floats){widen8(_mm_loadu_si128((const __m128i *)p)), widen8(_mm_loadu_si128((const __m128i *)p + 1))};
}

/* float32 to bf16 in the upper half of each word, rounded to nearest even; NaN stays NaN. */
INLINE __m256i round8(__m256 v) {
    __m256i bits = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), is_nan);
}
INLINE __m256i narrow(Floats v) {
    __m256i low = _mm256_srli_epi32(round8(v.low), 16), high = _mm256_srli_epi32(round8(v.high), 16);
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
}
INLINE Ints narrow_pair(Floats low, Floats high) { return (Ints){narrow(low), narrow(high)}; }

static __attribute__((noinline, unused)) Floats load_first(const element *p, Mask mask) {
    element part[16] = {0};
    memcpy(part, p, (size_t)__builtin_popcount(mask) * sizeof *p);
    return widen(part);
}
static __attribute__((noinline, unused)) void store_first(element *p, Mask mask, Floats v) {
    __m256i part = narrow(v);
    memcpy(p, &part, (size_t)__builtin_popcount(mask) * sizeof *p);
}
INLINE Floats load16(const element *p, Mask mask) { return mask == 0xffff ? widen(p) : load_first(p, mask); }
INLINE void store16(element *p, Mask mask, Floats v) {
    if (mask == 0xffff) _mm256_storeu_si256((__m256i *)p, narrow(v));
    else store_first(p, mask, v);
}

#endif
#else
INLINE Floats load16(const element *p, Mask mask) { return load_some(p, mask); }
INLINE void store16(element *p, Mask mask, Floats v) { store_some(p, mask, v); }
#endif

/* Loads a line; elements from `left` on are 0. */
INLINE Ints load_line(const element *p, int64_t left) {
#ifndef __AVX512F__
    if (left >= LINE) return load_any(p);
    element part[LINE] = {0};
    memcpy(part, p, (size_t)left * sizeof *p);
    return load_any(part);
#elif defined(ELEMENT_BF16)
    return left >= LINE ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16((__mmask32)((1u << left) - 1), p);
#else
    return _mm512_maskz_loadu_epi32(lanes(left), p);
#endif
}

/* 32 elements as two vectors, in an internal order that load32 and store32 share. */
typedef struct {
    Floats a, b;
} Floats32;

#if defined(ELEMENT_BF16) && defined(__AVX512F__)
INLINE Floats32 load32(const element *p, int64_t left) { /* a: even elements, b: odd ones */
    __m512i v = left >= 32 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16((__mmask32)((1u << left) - 1), p);
    Floats32 f = {_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)),
                  _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000)))};
    return f;
}
INLINE void store32(element *p, int64_t left, Floats32 f) {
    __m512i even = _mm512_cvtepu16_epi32(narrow(f.a)), odd = _mm512_cvtepu16_epi32(narrow(f.b));
    __m512i v = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
    _mm512_mask_storeu_epi16(p, left >= 32 ? 0xffffffffu : (__mmask32)((1u << left) - 1), v);
}
#else
INLINE Floats32 load32(const element *p, int64_t left) {
    Floats32 f = {load16(p, lanes(left)), load16(p + 16, lanes(left - 16))};
    return f;
}
INLINE void store32(element *p, int64_t left, Floats32 f) {
    store16(p, lanes(left), f.a);
    store16(p + 16, lanes(left - 16), f.b);
}
#endif

/* x / (1 + e^-x), with the precision of an element. */
INLINE Floats silu_16(Floats x) {
#ifdef ELEMENT_BF16
    Floats t = larger16(fill16(-1e4f), smaller16(fill16(1e4f), x)); /* finite or NaN */
    t = multiply16(t, fill16(-LOG2_E));
    Floats whole = nearest16(t), f = subtract16(t, whole);
    Floats p = multiply_add16(fill16(0.00957007f), f, fill16(0.05591781f)); /* 2^f within 2^-18 */
    p = multiply_add16(p, f, fill16(0.24024745f));
    p = multiply_add16(p, f, fill16(0.69312182f));
    p = multiply_add16(p, f, fill16(0.99999926f));
    return multiply16(x, reciprocal16(add16(scale16(p, whole), fill16(1.0f))));
#else
    Floats exponential = exp2_16(multiply16(x, fill16(-LOG2_E)));
    return divide16(x, add16(exponential, fill16(1.0f)));
#endif
}

/* sum += a * b over a line: each of 16 lanes adds the products of one pair (bf16) or one element (float32). */
INLINE Floats dot_line(Floats sum, Ints a, Ints b) {
#if !defined(ELEMENT_BF16)
    return multiply_add16(as_floats(a), as_floats(b), sum);
#elif defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
    const Ints high = fill_words((int)0xffff0000);
    sum = multiply_add16(as_floats(shift_left(a, 16)), as_floats(shift_left(b, 16)), sum);
    return multiply_add16(as_floats(and_words(a, high)), as_floats(and_words(b, high)), sum);
#endif
}

#endif
