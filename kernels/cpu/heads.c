/* The step between the QKV projection and attention: norms and rotation of heads, writes to the KV cache.
 *
 * Full rotations, alone or after RMS norms of single heads with shared weights, have code of their own. Norms that span
 * the heads of a token make a token one piece of work.
 */
#include "bytes.h"

#include <math.h>

/* NaN and infinities become 0, so that a request that overflowed does not poison the block's next owner. */
INLINE Floats finite_or_zero(Floats v) { return keep(is_finite16(v), v); }

/* to = rotate(norm(from)); `to` may be `from`. Element i pairs with i + head_dim / 2. */
static void rotate_head(element *to, const element *from, int64_t head_dim, const Norm *norm, const float *cos_sin,
                        bool is_key) {
    int64_t half = head_dim / 2;
    const float *weight = norm->weight;
    Floats scale = fill16(weight ? measure(from, head_dim, norm).scale : 1.0f);
    for (int64_t i = 0; i < half; i += 16) {
        Mask mask = lanes(half - i);
        Floats first = load16(from + i, mask), second = load16(from + half + i, mask);
        if (weight) {
            first = multiply16(multiply16(first, scale), load_some(weight + i, mask));
            second = multiply16(multiply16(second, scale), load_some(weight + half + i, mask));
        }
        Floats cosine = load_some(cos_sin + i, mask), sine = load_some(cos_sin + half + i, mask);
        Floats low = multiply_subtract16(first, cosine, multiply16(second, sine));
        Floats high = multiply_add16(second, cosine, multiply16(first, sine));
        store16(to + i, mask, is_key ? finite_or_zero(low) : low);
        store16(to + half + i, mask, is_key ? finite_or_zero(high) : high);
    }
}

/* A head's norm, rotation and factor. */
typedef struct {
    Norm norm;
    Statistics found;
    const float *cos_sin; /* of the position */
    int64_t num_rotated;
    float factor;
    bool is_key;
} Turn;

INLINE void store_turned(const Turn *turn, element *to, Mask mask, Floats v) {
    v = multiply16(v, fill16(turn->factor));
    store16(to, mask, turn->is_key ? finite_or_zero(v) : v);
}

/* to = factor * rotate(norm(from)); `to` may be `from`. Element i pairs with i + num_rotated / 2. */
static void turn_head(const Turn *turn, element *to, const element *from, int64_t head_dim) {
    int64_t half = turn->num_rotated / 2;
    const float *cosines = turn->cos_sin, *sines = turn->cos_sin + half;
    for (int64_t i = 0; i < half; i += 16) {
        Mask mask = lanes(half - i);
        Floats first = normalized(load16(from + i, mask), &turn->found, &turn->norm, i, mask);
        Floats second = normalized(load16(from + half + i, mask), &turn->found, &turn->norm, half + i, mask);
        Floats cosine = load_some(cosines + i, mask), sine = load_some(sines + i, mask);
        store_turned(turn, to + i, mask, multiply_subtract16(first, cosine, multiply16(second, sine)));
        store_turned(turn, to + half + i, mask, multiply_add16(second, cosine, multiply16(first, sine)));
    }
    for (int64_t i = turn->num_rotated; i < head_dim; i += 16) {
        Mask mask = lanes(head_dim - i);
        store_turned(turn, to + i, mask, normalized(load16(from + i, mask), &turn->found, &turn->norm, i, mask));
    }
}

/* Stores a vector of a cache of bytes: its numbers, rounded once, and its scale. */
static void store_vector(const Cache *cache, char *tile, int64_t offset, const element *from) {
    int64_t head_dim = cache->head_dim;
    char *to = tile + offset * head_dim;
    bool is_int8 = cache->kind == INT8_CACHE;
    Floats largest = zero16();
    for (int64_t i = 0; i < head_dim; i += 16)
        largest = larger16(largest, magnitude16(finite_or_zero(load16(from + i, lanes(head_dim - i)))));
    float scale = largest_of(largest) / (is_int8 ? INT8_LARGEST : E4M3_LARGEST);
    if (scale < 0x1p-126f) scale = 1; /* a quotient of a subnormal scale could pass the largest number */
    for (int64_t i = 0; i < head_dim; i += 16) {
        Mask mask = lanes(head_dim - i);
        Floats v = divide16(finite_or_zero(load16(from + i, mask)), fill16(scale));
        store_bytes(to + i, mask, is_int8 ? to_numbers(v, INT8_CACHE) : to_numbers(v, E4M3_CACHE));
    }
    scales_of(cache, tile)[offset] = scale;
}

static const Norm no_norm;

static void rotate_in_place(const HeadWork *work, element *head, int64_t head_dim, const float *cos_sin) {
    Turn turn = {no_norm, {0, 1}, cos_sin, work->rules->num_rotated, 1.0f, false};
    turn_head(&turn, head, head, head_dim);
}

/* Turns a query or key head by any rules. `spanning`: the statistics of a norm over all heads of the token, which are
 * rotated already if the norm comes after the rotation; else NULL. */
static void turn_any(const HeadWork *work, element *to, element *from, int64_t head_dim, int64_t token, int64_t number,
                     bool is_key, const Statistics *spanning) {
    const HeadRules *rules = work->rules;
    int64_t position = work->positions[token], stride = is_key ? rules->key_stride : rules->query_stride;
    const float *cos_sin = rules->cos_sin + position * rules->num_rotated;
    Turn turn = {is_key ? rules->key_norm : rules->query_norm, {0, 1}, cos_sin, rules->num_rotated, 1.0f, is_key};
    if (turn.norm.weight != NULL) turn.norm.weight += number * stride;
    if (turn.norm.bias != NULL) turn.norm.bias += number * stride;
    if (rules->is_after_rope) {
        if (spanning == NULL) rotate_in_place(work, from, head_dim, cos_sin);
        turn.num_rotated = 0;
    }
    turn.found = spanning != NULL ? *spanning : measure(from, head_dim, &turn.norm);
    if (!is_key && rules->query_scale != NULL) turn.factor = rules->query_scale[position];
    turn_head(&turn, to, from, head_dim);
}

/* `spanning`: statistics of the token's query and key heads, or NULL. */
INLINE void process_head(const Heads *heads, const HeadWork *work, const Cache *cache, int64_t token, int64_t head,
                         const Statistics *spanning, const bool is_usual) {
    const HeadRules *rules = work->rules;
    int64_t head_dim = heads->head_dim, num_rotated = heads->num_heads + heads->num_kv_heads;
    element *from = heads->data + token * heads->stride + head * head_dim;
    const float *cos_sin = rules->cos_sin + work->positions[token] * head_dim;
    if (head < heads->num_heads) {
        if (is_usual) rotate_head(from, from, head_dim, &rules->query_norm, cos_sin, false);
        else turn_any(work, from, from, head_dim, token, head, false, spanning);
        return;
    }
    int64_t slot = work->slots[token];
    if (slot < 0) return;
    int64_t block = slot / cache->block_size, offset = slot % cache->block_size;
    bool is_value = head >= num_rotated;
    int64_t kv_head = head - (is_value ? num_rotated : heads->num_heads);
    char *tile = cache_at(cache, block, is_value, kv_head);
    if (cache->kind != ELEMENT_CACHE && is_value) {
        store_vector(cache, tile, offset, from);
        return;
    }
    _Alignas(64) element rounded[MAX_HEAD_DIM]; /* a key, before it becomes bytes */
    element *to = cache->kind == ELEMENT_CACHE ? (element *)tile + offset * head_dim : rounded;
    if (is_value) {
        for (int64_t i = 0; i < head_dim; i += 16) {
            Mask mask = lanes(head_dim - i);
            store16(to + i, mask, finite_or_zero(load16(from + i, mask)));
        }
        return;
    }
    if (is_usual) rotate_head(to, from, head_dim, &rules->key_norm, cos_sin, true);
    else turn_any(work, to, from, head_dim, token, kv_head, true, spanning ? spanning + 1 : NULL);
    if (cache->kind != ELEMENT_CACHE) store_vector(cache, tile, offset, to);
}

/* Processes all heads of a token, whose norms span them. */
static void process_token(const Heads *heads, const HeadWork *work, const Cache *cache, int64_t token) {
    const HeadRules *rules = work->rules;
    int64_t head_dim = heads->head_dim, num_rotated = heads->num_heads + heads->num_kv_heads;
    element *first = heads->data + token * heads->stride, *keys = first + heads->num_heads * head_dim;
    if (rules->is_after_rope)
        for (int64_t head = 0; head < num_rotated; head++)
            rotate_in_place(work, first + head * head_dim, head_dim,
                            rules->cos_sin + work->positions[token] * rules->num_rotated);
    Statistics found[2] = {measure(first, heads->num_heads * head_dim, &rules->query_norm),
                           measure(keys, heads->num_kv_heads * head_dim, &rules->key_norm)};
    for (int64_t head = 0; head < num_rotated + heads->num_kv_heads; head++)
        process_head(heads, work, cache, token, head, found, false);
}

static bool is_usual_norm(const Norm *norm, int64_t stride) {
    return norm->kind == NO_NORM || (norm->kind == RMS_NORM && norm->weight != NULL && stride == 0);
}

static bool is_usual(const HeadRules *rules, int64_t head_dim) {
    bool is_whole = rules->num_rotated == head_dim && rules->query_scale == NULL;
    return is_whole && !rules->is_after_rope && !rules->spans_heads &&
           is_usual_norm(&rules->query_norm, rules->query_stride) && is_usual_norm(&rules->key_norm, rules->key_stride);
}

void qk_norm_rope_cache(const Heads *heads, const HeadWork *work, const Cache *cache, Team *team) {
    int64_t num_all = heads->num_heads + 2 * heads->num_kv_heads;
    int64_t num_parts = work->rules->spans_heads ? 1 : num_all, total = heads->num_tokens * num_parts;
    bool usual = is_usual(work->rules, heads->head_dim);
    for (Range range; take_share(team, total, &range); finish_share(team, total))
        for (int64_t item = range.start; item < range.stop; item++) {
            int64_t token = item / num_parts, head = item % num_parts;
            if (usual) process_head(heads, work, cache, token, head, NULL, true);
            else if (num_parts == num_all) process_head(heads, work, cache, token, head, NULL, false);
            else process_token(heads, work, cache, token);
        }
}
