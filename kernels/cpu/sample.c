/* Lists the candidates of a draw, the few tokens of a row of logits that can win.
 *
 * As in workers/sampling/candidates.py a token weighs exp((logit - largest) / T), and with noise it can win only if its
 * bits are at most weight * noise_scale. Both are tested in float32 by bounds that err towards keeping a token.
 */
#include "noise.h"

#include <math.h>

typedef struct {
    int64_t row; /* of the logits */
    float largest, temperature;
    float least_weight; /* tokens of less weight are dropped */
    float counted_weight; /* tokens of less weight do not count in the total */
    float share; /* tokens of less than this share of the total are dropped too; 0: the total is not computed */
    float noise_scale; /* 0: no noise */
    uint32_t position, seed_low, seed_high;
} Draw;

INLINE Floats weigh(const float *logits, Mask mask, const Draw *draw) {
    Floats below = subtract16(load_some(logits, mask), fill16(draw->largest));
    return keep(mask, exp2_16(multiply16(below, fill16(LOG2_E / draw->temperature))));
}

static double total_weight(const float *logits, int64_t vocab_size, const Draw *draw) {
    double total = 0;
    for (int64_t first = 0; first < vocab_size; first += 1024) {
        Floats sum = zero16();
        for (int64_t i = first; i < min64(first + 1024, vocab_size); i += 16) {
            Floats weight = weigh(logits + i, lanes(vocab_size - i), draw);
            sum = add16(sum, keep(at_least(weight, fill16(draw->counted_weight)), weight));
        }
        total += sum_of(sum);
    }
    return total;
}

/* Writes the candidates by rising id; returns their number. */
static int64_t list_row(const float *logits, int64_t vocab_size, const Draw *draw, int32_t *token_ids, double *total) {
    *total = draw->share > 0 ? total_weight(logits, vocab_size, draw) : 0;
    Floats least = fill16(fmaxf(draw->least_weight, draw->share * (float)*total));
    Floats scale = fill16(draw->noise_scale);
    int64_t count = 0;
    for (int64_t first = 0; first < vocab_size; first += 64) {
        Ints bits[4] = {zero_words(), zero_words(), zero_words(), zero_words()};
        Floats weights[4];
        Mask kept[4], any = 0;
        for (int i = 0; i < 4; i++) {
            Mask mask = lanes(vocab_size - first - 16 * i);
            weights[i] = weigh(logits + first + 16 * i, mask, draw);
            kept[i] = mask & at_least(weights[i], least);
            any |= kept[i];
        }
        if (!any) continue;
        if (draw->noise_scale > 0) token_bits(bits, first, draw->position, 0, draw->seed_low, draw->seed_high);
        for (int i = 0; i < 4; i++) {
            Floats reach = multiply16(weights[i], scale);
            kept[i] &= at_least(reach, from_unsigned(bits[i]));
            Ints ids = add_words(fill_words((int)(first + 16 * i)), lane_numbers());
            compress_store(token_ids + count, kept[i], ids);
            count += __builtin_popcount(kept[i]);
        }
    }
    return count;
}

/* token_ids: [num_draws][vocab_size]; counts, totals: [num_draws]. */
EXPORT void list_candidates(const float *logits, int64_t row_stride, int64_t vocab_size, const Draw *draws,
                            int64_t num_draws, int32_t *token_ids, int64_t *counts, double *totals, int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1)
    for (int64_t i = 0; i < num_draws; i++)
        counts[i] = list_row(logits + draws[i].row * row_stride, vocab_size, &draws[i], token_ids + i * vocab_size,
                             &totals[i]);
}
