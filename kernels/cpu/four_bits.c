/* Fits 4-bit codes, scales and zeros to a weight, as kernels/four_bits.py does, by the same operations in the same order.
 */
#pragma GCC optimize("fp-contract=off") /* each product is rounded before it is added */

#include "kernels.h"

#define FIT_GROUP 32 /* inputs that share a scale and a zero */
#define FIT_ROWS 16 /* rows that are fitted side by side, one in each lane */
#define FIT_MOST 15.0f /* the largest code */
#define ZERO_STEPS 8 /* steps of a zero between two codes */
#define NUM_CUTS 3
#define NUM_ROUNDS 3

static const double CUTS[NUM_CUTS] = {-0.02, 0.02, 0.06};

typedef float Columns[FIT_GROUP][FIT_ROWS];

typedef struct {
    Floats scale, zero;
} Grid;

typedef struct {
    Floats scale, steps; /* of the zero */
} Fit;

INLINE Floats round_to_half(Floats scale) {
    scale = smaller16(larger16(scale, fill16(0x1p-24f)), fill16(65504.0f));
#ifdef __AVX512F__
    return _mm512_cvtph_ps(_mm512_cvtps_ph(scale, _MM_FROUND_TO_NEAREST_INT));
#else
    return (Floats){_mm256_cvtph_ps(_mm256_cvtps_ph(scale.low, _MM_FROUND_TO_NEAREST_INT)),
                    _mm256_cvtph_ps(_mm256_cvtps_ph(scale.high, _MM_FROUND_TO_NEAREST_INT))};
#endif
}

/* Returns the whole number nearest to v, at least 0 and at most `most`. */
INLINE Floats whole_up_to(Floats v, float most) {
    return nearest16(smaller16(larger16(v, zero16()), fill16(most)));
}

INLINE Floats zero_of(Floats steps) { return multiply16(whole_up_to(steps, 255.0f), fill16(1.0f / ZERO_STEPS)); }
INLINE Floats inverse(Floats v) { return divide16(fill16(1.0f), v); }
INLINE Floats times(Floats v, float factor) { return multiply16(v, fill16(factor)); }

INLINE Floats codes_of(Floats x, Floats scale_inverse, Floats zero) {
    return whole_up_to(add16(multiply16(x, scale_inverse), zero), FIT_MOST);
}

INLINE Floats sum_four(const Floats *sums) { return add16(add16(sums[0], sums[2]), add16(sums[1], sums[3])); }

/* Returns the least-squares grid of the codes that `grid` gives, and the squared error of `grid` without the sum of the
 * squares of x. */
static Grid next_grid(const Columns x, Grid grid, Floats sum_x, Floats *error) {
    Floats products[4] = {zero16(), zero16(), zero16(), zero16()}, sum = zero16(), squares = zero16();
    const Floats by = inverse(grid.scale);
    for (int i = 0; i < FIT_GROUP; i += 4)
        for (int j = 0; j < 4; j++) {
            Floats at = load_floats(x[i + j]), codes = codes_of(at, by, grid.zero);
            products[j] = add16(products[j], multiply16(at, codes));
            squares = multiply_add16(codes, codes, squares); /* whole numbers: without an error in any order */
            sum = add16(sum, codes);
        }
    const Floats product = sum_four(products), zero = grid.zero;
    Floats sizes = add16(subtract16(squares, multiply16(zero, times(sum, 2))), times(multiply16(zero, zero), FIT_GROUP));
    Floats both = times(subtract16(product, multiply16(zero, sum_x)), 2);
    *error = multiply16(subtract16(multiply16(sizes, grid.scale), both), grid.scale);
    Floats spread = subtract16(times(squares, FIT_GROUP), multiply16(sum, sum));
    Floats slope = subtract16(times(product, FIT_GROUP), multiply16(sum_x, sum));
    Floats fitted = round_to_half(divide16(slope, larger16(spread, fill16(1.0f))));
    grid.scale = choose(at_least(spread, fill16(1.0f)), fitted, grid.scale);
    grid.zero = zero_of(times(subtract16(sum, multiply16(sum_x, inverse(grid.scale))), (float)ZERO_STEPS / FIT_GROUP));
    return grid;
}

/* Fits the columns of x. */
static Fit fit_columns(const Columns x) {
    Floats least = zero16(), largest = zero16(), sums[4] = {zero16(), zero16(), zero16(), zero16()};
    Mask is_finite = 0xffff;
    for (int i = 0; i < FIT_GROUP; i++) {
        Floats at = load_floats(x[i]);
        least = smaller16(least, at), largest = larger16(largest, at);
        is_finite &= is_finite16(at);
        sums[i % 4] = i < 4 ? at : add16(sums[i % 4], at);
    }
    const Floats width = subtract16(largest, least), sum_x = sum_four(sums);
    Floats best_error = fill16(__builtin_inff()), error;
    Grid best = {fill16(__builtin_nanf("")), zero16()};
    for (int low = 0; low < NUM_CUTS; low++)
        for (int high = 0; high < NUM_CUTS; high++) {
            Grid grid = {round_to_half(times(width, (float)((1 - CUTS[low] - CUTS[high]) / 15))), zero16()};
            Floats first = add16(times(width, (float)CUTS[low]), least);
            grid.zero = zero_of(times(multiply16(first, inverse(grid.scale)), -ZERO_STEPS));
            for (int round = 0; round < NUM_ROUNDS; round++) {
                const Grid next = next_grid(x, grid, sum_x, &error);
                const Mask is_better = at_least(best_error, error);
                best_error = choose(is_better, error, best_error);
                best.scale = choose(is_better, grid.scale, best.scale);
                best.zero = choose(is_better, grid.zero, best.zero);
                grid = next;
            }
        }
    best.scale = choose(is_finite, best.scale, fill16(__builtin_nanf("")));
    return (Fit){best.scale, keep(is_finite, times(best.zero, ZERO_STEPS))};
}

/* Fits group `group` of 16 rows, of which `count` exist; stores their codes [FIT_GROUP][FIT_ROWS]. */
static Fit fit_rows(const element *rows, int64_t num_inputs, int64_t group, int64_t count, uint8_t (*codes)[FIT_ROWS]) {
    _Alignas(64) float plain[FIT_ROWS][FIT_GROUP];
    _Alignas(64) Columns x;
    for (int64_t row = 0; row < FIT_ROWS; row++) {
        const element *from = rows + row * num_inputs + group * FIT_GROUP;
        store_floats(plain[row], row < count ? load16(from, 0xffff) : zero16());
        store_floats(plain[row] + 16, row < count ? load16(from + 16, 0xffff) : zero16());
    }
    for (int i = 0; i < FIT_GROUP; i++)
        for (int row = 0; row < FIT_ROWS; row++) x[i][row] = plain[row][i];
    const Fit fit = fit_columns(x);
    const Floats by = inverse(fit.scale), zero = times(fit.steps, 1.0f / ZERO_STEPS);
    for (int i = 0; i < FIT_GROUP; i++) {
        _Alignas(64) float whole[FIT_ROWS];
        store_floats(whole, codes_of(load_floats(x[i]), by, zero));
        for (int row = 0; row < FIT_ROWS; row++) codes[i][row] = (uint8_t)whole[row];
    }
    return fit;
}

/* Fits weight [num_rows][num_inputs], where num_inputs is a multiple of 2 * FIT_GROUP. packed: [num_rows][num_inputs / 2],
 * byte b with the code of input b in its low half and that of input num_inputs / 2 + b in its high half; scales and
 * zeros: [num_rows][groups], zeros in steps. */
EXPORT void fit_four_bits(const element *weight, int64_t num_rows, int64_t num_inputs, uint8_t *packed, float *scales,
                          uint8_t *zeros, int num_threads) {
    const int64_t num_groups = num_inputs / FIT_GROUP, half = num_groups / 2;
#pragma omp parallel for num_threads(num_threads) schedule(dynamic)
    for (int64_t first = 0; first < num_rows; first += FIT_ROWS) {
        const int64_t count = min64(FIT_ROWS, num_rows - first);
        for (int64_t group = 0; group < half; group++) {
            uint8_t codes[2][FIT_GROUP][FIT_ROWS];
            for (int side = 0; side < 2; side++) {
                const int64_t chosen = group + side * half;
                const Fit fit = fit_rows(weight + first * num_inputs, num_inputs, chosen, count, codes[side]);
                _Alignas(64) float found[2][FIT_ROWS];
                store_floats(found[0], fit.scale), store_floats(found[1], fit.steps);
                for (int64_t row = 0; row < count; row++) {
                    scales[(first + row) * num_groups + chosen] = found[0][row];
                    zeros[(first + row) * num_groups + chosen] = (uint8_t)found[1][row];
                }
            }
            for (int64_t row = 0; row < count; row++) {
                uint8_t *to = packed + (first + row) * num_inputs / 2 + group * FIT_GROUP;
                for (int i = 0; i < FIT_GROUP; i++) to[i] = (uint8_t)(codes[0][i][row] | codes[1][i][row] << 4);
            }
        }
    }
}
