/* Numbers of 8 bits, as a KV cache of bytes holds them (byte_cache.py): int8, or e4m3 with 4 bits of exponent and 3 of
 * mantissa. Elements hold both exactly. */
#ifndef TOKENLOOM_BYTES_H
#define TOKENLOOM_BYTES_H

#include "kernels.h"

#define E4M3_LARGEST 448.0f
#define INT8_LARGEST 127.0f

/* Loads the bytes of a mask as signed words; others load 0. */
INLINE Ints load_bytes(const char *p, Mask mask) {
#ifdef __AVX512F__
    __m128i bytes = mask == 0xffff ? _mm_loadu_si128((const __m128i *)p) : _mm_maskz_loadu_epi8(mask, p);
    return _mm512_cvtepi8_epi32(bytes);
#else
    __m128i bytes = _mm_setzero_si128();
    if (mask == 0xffff) bytes = _mm_loadu_si128((const __m128i *)p);
    else memcpy(&bytes, p, (size_t)__builtin_popcount(mask));
    return (Ints){_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
#endif
}

/* Stores the lowest bytes of the words of a mask. */
INLINE void store_bytes(char *p, Mask mask, Ints words) {
#ifdef __AVX512F__
    _mm_mask_storeu_epi8(p, mask, _mm512_cvtepi32_epi8(words));
#else
    words = and_words(words, fill_words(0xff));
    __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(words.low, words.high), 0xd8);
    __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    if (mask == 0xffff) _mm_storeu_si128((__m128i *)p, bytes);
    else memcpy(p, &bytes, (size_t)__builtin_popcount(mask));
#endif
}

/* Loads the numbers of a mask; others load 0. */
INLINE Floats load_numbers(const char *p, Mask mask, const CacheKind kind) {
    Ints words = load_bytes(p, mask);
    if (kind == INT8_CACHE) {
#ifdef __AVX512F__
        return _mm512_cvtepi32_ps(words);
#else
        return (Floats){_mm256_cvtepi32_ps(words.low), _mm256_cvtepi32_ps(words.high)};
#endif
    }
    /* Exponent and mantissa become the lowest bits of float32's: a number whose exponent is 120 too small. */
    Ints bits = and_words(shift_left(words, 20), fill_words((int)0x87f00000));
    return multiply16(as_floats(bits), fill16(0x1p120f));
}

/* Returns the bytes of the nearest e4m3 numbers, halves to even, of magnitudes up to E4M3_LARGEST. */
INLINE Ints to_e4m3(Floats v) {
    Floats magnitude = magnitude16(v);
    Ints bits = as_words(magnitude), odd = and_words(shift_right(bits, 20), fill_words(1));
    Ints normal = shift_right(add_words(add_words(bits, odd), fill_words(0x7ffff - (120 << 23))), 20);
    Floats above = add16(magnitude, fill16(0x1p14f)); /* the unit in its last place is 2^-9, the least number */
    Ints subnormal = add_words(as_words(above), fill_words(-0x46800000)); /* the bits of 2^14 */
    Floats number = choose(at_least(magnitude, fill16(0x1p-6f)), as_floats(normal), as_floats(subnormal));
    return or_words(as_words(number), and_words(shift_right(as_words(v), 24), fill_words(0x80)));
}

/* Returns the bytes of the nearest numbers, halves to even, of magnitudes up to the largest number. */
INLINE Ints to_numbers(Floats v, const CacheKind kind) {
    if (kind != INT8_CACHE) return to_e4m3(v);
#ifdef __AVX512F__
    return _mm512_cvtps_epi32(v);
#else
    return (Ints){_mm256_cvtps_epi32(v.low), _mm256_cvtps_epi32(v.high)};
#endif
}

/* Loads a line of elements from d on of a vector in the cache; elements from d + left on are 0. */
INLINE Ints load_cached(const char *from, int64_t d, int64_t left, const CacheKind kind) {
    if (kind == ELEMENT_CACHE) return load_line((const element *)from + d, left);
#ifdef ELEMENT_BF16
    return narrow_pair(load_numbers(from + d, lanes(left), kind), load_numbers(from + d + 16, lanes(left - 16), kind));
#else
    return as_words(load_numbers(from + d, lanes(left), kind));
#endif
}

#endif
