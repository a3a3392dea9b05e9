/* What a sampler asks of whole rows of logits: the few tokens that can win a draw.
 *
 * Meanings as in workers/candidates.py: a token weighs exp((logit - largest) / T); with noise it can win only if its
 * bits are at most weight * noise_scale. Both are tested in float32 by bounds that err towards keeping a token.
 */
#include "noise.h"

#include <math.h>

typedef struct {
    int64_t row; /* of the logits */
    float largest, temperature;
    float least_weight; /* tokens that weigh less are out */
    float counted_weight; /* tokens that weigh less do not count in the total */
    float share; /* out are also those that weigh less than this share of the total; 0: none, and no total */
    float noise_scale; /* 0: without noise */
    uint32_t position, seed_low, seed_high;
} Draw;

static const int32_t STEPS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

INLINE __m512 weigh(const float *logits, __mmask16 mask, const Draw *draw) {
    __m512 below = _mm512_sub_ps(_mm512_maskz_loadu_ps(mask, logits), _mm512_set1_ps(draw->largest));
    return _mm512_maskz_mov_ps(mask, exp2_16(_mm512_mul_ps(below, _mm512_set1_ps(LOG2_E / draw->temperature))));
}

static double total_weight(const float *logits, int64_t vocab_size, const Draw *draw) {
    double total = 0;
    for (int64_t first = 0; first < vocab_size; first += 1024) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = first; i < min64(first + 1024, vocab_size); i += 16) {
            __m512 weight = weigh(logits + i, lanes(vocab_size - i), draw);
            __mmask16 counts = _mm512_cmp_ps_mask(weight, _mm512_set1_ps(draw->counted_weight), _CMP_GE_OQ);
            sum = _mm512_mask_add_ps(sum, counts, sum, weight);
        }
        total += _mm512_reduce_add_ps(sum);
    }
    return total;
}

/* Writes the ids that can win by rising id; returns how many. */
static int64_t list_row(const float *logits, int64_t vocab_size, const Draw *draw, int32_t *token_ids, double *total) {
    *total = draw->share > 0 ? total_weight(logits, vocab_size, draw) : 0;
    __m512 least = _mm512_set1_ps(fmaxf(draw->least_weight, draw->share * (float)*total));
    __m512 scale = _mm512_set1_ps(draw->noise_scale);
    int64_t count = 0;
    for (int64_t first = 0; first < vocab_size; first += 64) {
        __m512i bits[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(),
                           _mm512_setzero_si512()};
        __m512 weights[4];
        __mmask16 kept[4], any = 0;
        for (int i = 0; i < 4; i++) {
            __mmask16 mask = lanes(vocab_size - first - 16 * i);
            weights[i] = weigh(logits + first + 16 * i, mask, draw);
            kept[i] = _mm512_mask_cmp_ps_mask(mask, weights[i], least, _CMP_GE_OQ);
            any |= kept[i];
        }
        if (!any) continue;
        if (draw->noise_scale > 0) token_bits(bits, first, draw->position, 0, draw->seed_low, draw->seed_high);
        for (int i = 0; i < 4; i++) {
            __m512 reach = _mm512_mul_ps(weights[i], scale);
            kept[i] = _mm512_mask_cmp_ps_mask(kept[i], reach, _mm512_cvtepu32_ps(bits[i]), _CMP_GE_OQ);
            __m512i ids = _mm512_add_epi32(_mm512_set1_epi32((int)(first + 16 * i)), _mm512_loadu_si512(STEPS));
            _mm512_mask_compressstoreu_epi32(token_ids + count, kept[i], ids);
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
