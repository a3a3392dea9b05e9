/* Query, key and value heads between their projection and attention: norms, rotation, the write to the cache. */
#include "kernels.h"

#include <math.h>

/* NaN and infinities become 0: what a request that overflowed leaves behind must not poison the block's next owner. */
INLINE __m512 finite_or_zero(__m512 v) {
    __mmask16 is_finite = _mm512_cmp_ps_mask(_mm512_abs_ps(v), _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
    return _mm512_maskz_mov_ps(is_finite, v);
}

static float inverse_rms(const element *head, int64_t head_dim, float eps) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < head_dim; i += 16) {
        __m512 v = load16(head + i, lanes(head_dim - i));
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    return 1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)head_dim + eps);
}

/* to = rotate(norm(from)); `to` may be `from`. Element i goes with i + head_dim / 2. */
static void rotate_head(element *to, const element *from, int64_t head_dim, const element *norm, float eps,
                        const float *cos_sin, bool is_key) {
    int64_t half = head_dim / 2;
    __m512 scale = _mm512_set1_ps(norm ? inverse_rms(from, head_dim, eps) : 1.0f);
    for (int64_t i = 0; i < half; i += 16) {
        __mmask16 mask = lanes(half - i);
        __m512 first = load16(from + i, mask), second = load16(from + half + i, mask);
        if (norm) {
            first = _mm512_mul_ps(_mm512_mul_ps(first, scale), load16(norm + i, mask));
            second = _mm512_mul_ps(_mm512_mul_ps(second, scale), load16(norm + half + i, mask));
        }
        __m512 cosine = _mm512_maskz_loadu_ps(mask, cos_sin + i), sine = _mm512_maskz_loadu_ps(mask, cos_sin + half + i);
        __m512 low = _mm512_fmsub_ps(first, cosine, _mm512_mul_ps(second, sine));
        __m512 high = _mm512_fmadd_ps(second, cosine, _mm512_mul_ps(first, sine));
        store16(to + i, mask, is_key ? finite_or_zero(low) : low);
        store16(to + half + i, mask, is_key ? finite_or_zero(high) : high);
    }
}

void prepare_heads(const Heads *heads, const HeadWork *work, const Cache *cache, const Team *team) {
    int64_t head_dim = heads->head_dim, num_rotated = heads->num_heads + heads->num_kv_heads;
    int64_t num_all = num_rotated + heads->num_kv_heads;
    Range range = share_of(heads->num_tokens * num_all, team);
    for (int64_t item = range.start; item < range.stop; item++) {
        int64_t token = item / num_all, head = item % num_all;
        element *from = heads->data + token * heads->stride + head * head_dim;
        const float *cos_sin = work->cos_sin + work->positions[token] * head_dim;
        if (head < heads->num_heads) {
            rotate_head(from, from, head_dim, work->query_norm, work->eps, cos_sin, false);
            continue;
        }
        int64_t slot = work->slots[token];
        if (slot < 0) continue;
        int64_t block = slot / cache->block_size, offset = slot % cache->block_size;
        bool is_value = head >= num_rotated;
        int64_t kv_head = head - (is_value ? num_rotated : heads->num_heads);
        element *to = cache_at(cache, block, is_value, kv_head) + offset * head_dim;
        if (!is_value) {
            rotate_head(to, from, head_dim, work->key_norm, work->eps, cos_sin, true);
            continue;
        }
        for (int64_t i = 0; i < head_dim; i += 16) {
            __mmask16 mask = lanes(head_dim - i);
            store16(to + i, mask, finite_or_zero(load16(from + i, mask)));
        }
    }
}
