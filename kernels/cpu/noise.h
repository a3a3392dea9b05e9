/* Philox4x32-10 (Salmon et al., SC'11) on vectors; kernels/noise.py is the specification. */
#ifndef TOKENLOOM_NOISE_H
#define TOKENLOOM_NOISE_H

#include "kernels.h"

/* Computes the high and low halves of the products of 16 words with `factor`. */
INLINE void multiply_wide(Ints a, uint32_t factor, Ints *high, Ints *low) {
    Ints b = fill_words((int)factor);
    Ints even = multiply_even_words(a, b), odd = multiply_even_words(shift_pairs_right(a, 32), b);
    *high = odd_words_of(odd, shift_pairs_right(even, 32));
    *low = odd_words_of(shift_pairs_left(odd, 32), even);
}

/* Computes the bits of tokens [first, first + 64), 16 per vector; first is a multiple of 4. */
INLINE void token_bits(Ints bits[4], int64_t first, uint32_t position, uint32_t purpose, uint32_t seed_low,
                       uint32_t seed_high) {
    Ints c0 = add_words(fill_words((int)(first / 4)), lane_numbers());
    Ints c1 = fill_words((int)position), c2 = fill_words((int)purpose), c3 = zero_words();
    for (int round = 0; round < 10; round++) {
        Ints high0, low0, high2, low2;
        multiply_wide(c0, 0xd2511f53, &high0, &low0);
        multiply_wide(c2, 0xcd9e8d57, &high2, &low2);
        c0 = xor_words(xor_words(high2, c1), fill_words((int)seed_low));
        c2 = xor_words(xor_words(high0, c3), fill_words((int)seed_high));
        c1 = low2;
        c3 = low0;
        seed_low += 0x9e3779b9;
        seed_high += 0xbb67ae85;
    }
    /* Token 4i + lane has word `lane` of counter i: a 16 x 4 transpose. */
    Ints a = interleave_low_words(c0, c1), b = interleave_high_words(c0, c1);
    Ints c = interleave_low_words(c2, c3), d = interleave_high_words(c2, c3);
    Ints q0 = interleave_low_pairs(a, c), q1 = interleave_high_pairs(a, c); /* counters 4j, 4j + 1 */
    Ints q2 = interleave_low_pairs(b, d), q3 = interleave_high_pairs(b, d);
    Ints even_low = low_quarters(q0, q1), even_high = high_quarters(q0, q1);
    Ints odd_low = low_quarters(q2, q3), odd_high = high_quarters(q2, q3);
    /* even_low has q0 of j = 0, 1, then q1 of j = 0, 1; the result has q0, q1, q2, q3 of each j */
    bits[0] = even_quarters(even_low, odd_low);
    bits[1] = odd_quarters(even_low, odd_low);
    bits[2] = even_quarters(even_high, odd_high);
    bits[3] = odd_quarters(even_high, odd_high);
}

#endif
