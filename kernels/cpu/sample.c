/* What a sampler asks of whole rows of logits: the largest, and the few tokens that can win a draw.
 *
 * Meanings as in workers/candidates.py: a token weighs exp((logit - largest) / T); with noise it can win only if its
 * bits are at most weight * noise_scale. Both are tested in float32 by bounds that err towards keeping a token.
 */
#include "noise.h"

typedef struct {
    int64_t row; /* of the logits */
    float largest, temperature;
    float least_weight; /* tokens that weigh less are out */
    float noise_scale; /* 0: without noise */
    uint32_t position, seed_low, seed_high;
} Draw;

static const int32_t STEPS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* The lowest id of the largest; a NaN is larger than all. */
static int64_t largest_id(const float *logits, int64_t vocab_size) {
    __m512 best = _mm512_loadu_ps(logits); /* overwritten where the row is shorter */
    __m512i ids = _mm512_loadu_si512(STEPS), best_ids = ids;
    best = _mm512_mask_mov_ps(_mm512_set1_ps(-1.0f / 0.0f), lanes(vocab_size), best);
    for (int64_t i = 16; i < vocab_size; i += 16) {
        __mmask16 mask = lanes(vocab_size - i);
        __m512 v = _mm512_maskz_loadu_ps(mask, logits + i);
        ids = _mm512_add_epi32(ids, _mm512_set1_epi32(16));
        __mmask16 is_settled = _mm512_cmp_ps_mask(best, best, _CMP_UNORD_Q); /* a NaN came before */
        mask &= _mm512_cmp_ps_mask(v, best, _CMP_NLE_UQ) & (__mmask16)~is_settled;
        best = _mm512_mask_mov_ps(best, mask, v);
        best_ids = _mm512_mask_mov_epi32(best_ids, mask, ids);
    }
    __mmask16 among = _mm512_cmp_ps_mask(best, best, _CMP_UNORD_Q);
    if (!among) among = _mm512_cmp_ps_mask(best, _mm512_set1_ps(_mm512_reduce_max_ps(best)), _CMP_EQ_OQ);
    return _mm512_mask_reduce_min_epi32(among, best_ids);
}

EXPORT void largest_ids(const float *logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size,
                        int64_t *token_ids, int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t row = 0; row < num_rows; row++) token_ids[row] = largest_id(logits + row * row_stride, vocab_size);
}

/* Writes the ids that can win by rising id; returns how many. `total`: the weight of all tokens. */
static int64_t list_row(const float *logits, int64_t vocab_size, const Draw *draw, int32_t *token_ids, double *total) {
    __m512 largest = _mm512_set1_ps(draw->largest), factor = _mm512_set1_ps(LOG2_E / draw->temperature);
    __m512 least = _mm512_set1_ps(draw->least_weight), scale = _mm512_set1_ps(draw->noise_scale);
    int64_t count = 0;
    double sum = 0;
    for (int64_t first = 0; first < vocab_size; first += 64) {
        __m512 weights[4], partial = _mm512_setzero_ps();
        __mmask16 kept[4], any = 0;
        for (int i = 0; i < 4; i++) {
            __mmask16 mask = lanes(vocab_size - first - 16 * i);
            __m512 logit = _mm512_maskz_loadu_ps(mask, logits + first + 16 * i);
            weights[i] = exp2_16(_mm512_mul_ps(_mm512_sub_ps(logit, largest), factor));
            kept[i] = _mm512_mask_cmp_ps_mask(mask, weights[i], least, _CMP_GE_OQ);
            any |= kept[i];
            partial = _mm512_mask_add_ps(partial, mask, partial, weights[i]);
        }
        sum += _mm512_reduce_add_ps(partial);
        if (!any) continue;
        __m512i bits[4];
        if (draw->noise_scale > 0)
            token_bits(bits, first, draw->position, 0, draw->seed_low, draw->seed_high);
        for (int i = 0; i < 4; i++) {
            if (draw->noise_scale > 0)
                kept[i] = _mm512_mask_cmp_ps_mask(kept[i], _mm512_mul_ps(weights[i], scale), _mm512_cvtepu32_ps(bits[i]),
                                                  _CMP_GE_OQ);
            __m512i ids = _mm512_add_epi32(_mm512_set1_epi32((int)(first + 16 * i)), _mm512_loadu_si512(STEPS));
            _mm512_mask_compressstoreu_epi32(token_ids + count, kept[i], ids);
            count += __builtin_popcount(kept[i]);
        }
    }
    *total = sum;
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
