/* Philox4x32-10 (Salmon et al., SC'11) on vectors; what the words mean stands in kernels/noise.py. */
#ifndef TOKENLOOM_NOISE_H
#define TOKENLOOM_NOISE_H

#include "kernels.h"

/* High and low halves of the 16 products of 32-bit words. */
INLINE void multiply_wide(__m512i a, uint32_t factor, __m512i *high, __m512i *low) {
    __m512i b = _mm512_set1_epi32((int)factor);
    __m512i even = _mm512_mul_epu32(a, b), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), b);
    *high = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd);
    *low = _mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32));
}

/* The bits of tokens [first, first + 64), 16 in each vector; first is a multiple of 4. */
INLINE void token_bits(__m512i bits[4], int64_t first, uint32_t position, uint32_t purpose, uint32_t seed_low,
                       uint32_t seed_high) {
    const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i c0 = _mm512_add_epi32(_mm512_set1_epi32((int)(first / 4)), steps);
    __m512i c1 = _mm512_set1_epi32((int)position), c2 = _mm512_set1_epi32((int)purpose), c3 = _mm512_setzero_si512();
    for (int round = 0; round < 10; round++) {
        __m512i high0, low0, high2, low2;
        multiply_wide(c0, 0xd2511f53, &high0, &low0);
        multiply_wide(c2, 0xcd9e8d57, &high2, &low2);
        c0 = _mm512_xor_si512(_mm512_xor_si512(high2, c1), _mm512_set1_epi32((int)seed_low));
        c2 = _mm512_xor_si512(_mm512_xor_si512(high0, c3), _mm512_set1_epi32((int)seed_high));
        c1 = low2;
        c3 = low0;
        seed_low += 0x9e3779b9;
        seed_high += 0xbb67ae85;
    }
    /* Token 4i + lane has word `lane` of counter i: a 16 x 4 transpose. */
    __m512i a = _mm512_unpacklo_epi32(c0, c1), b = _mm512_unpackhi_epi32(c0, c1);
    __m512i c = _mm512_unpacklo_epi32(c2, c3), d = _mm512_unpackhi_epi32(c2, c3);
    __m512i q0 = _mm512_unpacklo_epi64(a, c), q1 = _mm512_unpackhi_epi64(a, c); /* counters 4j, 4j + 1 */
    __m512i q2 = _mm512_unpacklo_epi64(b, d), q3 = _mm512_unpackhi_epi64(b, d);
    __m512i even_low = _mm512_shuffle_i32x4(q0, q1, 0x44), even_high = _mm512_shuffle_i32x4(q0, q1, 0xee);
    __m512i odd_low = _mm512_shuffle_i32x4(q2, q3, 0x44), odd_high = _mm512_shuffle_i32x4(q2, q3, 0xee);
    /* even_low: q0 of j = 0, 1, then q1 of j = 0, 1; wanted: q0, q1, q2, q3 of each j */
    bits[0] = _mm512_shuffle_i32x4(even_low, odd_low, 0x88);
    bits[1] = _mm512_shuffle_i32x4(even_low, odd_low, 0xdd);
    bits[2] = _mm512_shuffle_i32x4(even_high, odd_high, 0x88);
    bits[3] = _mm512_shuffle_i32x4(even_high, odd_high, 0xdd);
}

#endif
