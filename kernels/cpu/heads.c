/* The step between the QKV projection and attention: norms and rotation of heads, writes to the KV cache. */
#include "kernels.h"

#include <math.h>

/* NaN and infinities become 0, so that a request that overflowed does not poison the block's next owner. */
INLINE Floats finite_or_zero(Floats v) { return keep(is_finite16(v), v); }

static float inverse_rms(const element *head, int64_t head_dim, float eps) {
    Floats squares = zero16();
    for (int64_t i = 0; i < head_dim; i += 16) {
        Floats v = load16(head + i, lanes(head_dim - i));
        squares = multiply_add16(v, v, squares);
    }
    return 1.0f / sqrtf(sum_of(squares) / (float)head_dim + eps);
}

/* to = rotate(norm(from)); `to` may be `from`. Element i pairs with i + head_dim / 2. */
static void rotate_head(element *to, const element *from, int64_t head_dim, const float *norm, float eps,
                        const float *cos_sin, bool is_key) {
    int64_t half = head_dim / 2;
    Floats scale = fill16(norm ? inverse_rms(from, head_dim, eps) : 1.0f);
    for (int64_t i = 0; i < half; i += 16) {
        Mask mask = lanes(half - i);
        Floats first = load16(from + i, mask), second = load16(from + half + i, mask);
        if (norm) {
            first = multiply16(multiply16(first, scale), load_some(norm + i, mask));
            second = multiply16(multiply16(second, scale), load_some(norm + half + i, mask));
        }
        Floats cosine = load_some(cos_sin + i, mask), sine = load_some(cos_sin + half + i, mask);
        Floats low = multiply_subtract16(first, cosine, multiply16(second, sine));
        Floats high = multiply_add16(second, cosine, multiply16(first, sine));
        store16(to + i, mask, is_key ? finite_or_zero(low) : low);
        store16(to + half + i, mask, is_key ? finite_or_zero(high) : high);
    }
}

static void process_head(const Heads *heads, const HeadWork *work, const Cache *cache, int64_t token, int64_t head) {
    int64_t head_dim = heads->head_dim, num_rotated = heads->num_heads + heads->num_kv_heads;
    element *from = heads->data + token * heads->stride + head * head_dim;
    const float *cos_sin = work->cos_sin + work->positions[token] * head_dim;
    if (head < heads->num_heads) {
        rotate_head(from, from, head_dim, work->query_norm, work->eps, cos_sin, false);
        return;
    }
    int64_t slot = work->slots[token];
    if (slot < 0) return;
    int64_t block = slot / cache->block_size, offset = slot % cache->block_size;
    bool is_value = head >= num_rotated;
    int64_t kv_head = head - (is_value ? num_rotated : heads->num_heads);
    element *to = cache_at(cache, block, is_value, kv_head) + offset * head_dim;
    if (!is_value) {
        rotate_head(to, from, head_dim, work->key_norm, work->eps, cos_sin, true);
        return;
    }
    for (int64_t i = 0; i < head_dim; i += 16) {
        Mask mask = lanes(head_dim - i);
        store16(to + i, mask, finite_or_zero(load16(from + i, mask)));
    }
}

void qk_norm_rope_cache(const Heads *heads, const HeadWork *work, const Cache *cache, Team *team) {
    int64_t num_all = heads->num_heads + 2 * heads->num_kv_heads, total = heads->num_tokens * num_all;
    for (Range range; take_share(team, total, &range); finish_share(team, total))
        for (int64_t item = range.start; item < range.stop; item++)
            process_head(heads, work, cache, item / num_all, item % num_all);
}
