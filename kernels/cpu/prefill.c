/* Prefill attention with AVX-512 or AMX: many query rows per task.
 *
 * A task is up to PREFILL_ROWS query rows of one KV head, ordered by token, then head. KEYS keys and values at a time
 * are packed into pairs of tiles. Strips of 32 query rows compute scores, weights (an online softmax) and weighted
 * values. Sums are float32, weights have the type of elements.
 */
#include "attention.h"
#include "avx512.h"

#include <math.h>
#include <stdlib.h>

#ifdef __AVX512F__

#define STRIP 32 /* query rows: two groups */
#define KEYS 512 /* staged at a time */
#define SCORE_STRIDE (KEYS + 16) /* the padding spreads rows of a tile over the sets of the cache */
#define HIDDEN -1e30f /* score of a masked key; finite, so that differences are finite too */

/* Buffers of a thread. */
typedef struct {
    _Alignas(64) element queries[PREFILL_ROWS / 16 * MAX_HEAD_DIM / LINE * TILE]; /* [group][line][16 rows][LINE] */
    _Alignas(64) element keys[KEYS / 16 * MAX_HEAD_DIM / LINE * TILE]; /* [32 keys][line] pairs of tiles */
    _Alignas(64) element values[MAX_HEAD_DIM / 32][KEYS / LINE][2 * TILE]; /* for 32 elements of LINE keys */
    _Alignas(64) float scores[2][STRIP][SCORE_STRIDE]; /* of two strips */
    _Alignas(64) element weights[2][2][KEYS / LINE][16][LINE]; /* of two strips of two groups */
    _Alignas(64) float sums[PREFILL_ROWS][HEAD_STRIDE]; /* weighted values */
    _Alignas(64) float key_scales[KEYS], value_scales[KEYS]; /* in a cache of bytes */
    float largest[PREFILL_ROWS], sum[PREFILL_ROWS];
    const char *key_rows[KEYS], *value_rows[KEYS];
} Scratch;

/* A strip, and the range of staged keys, in whole lines, that any of its rows attends to. */
typedef struct {
    int64_t number, num_rows;
    int64_t start, stop;
} Strip;

static void stage_queries(Scratch *s, const AttentionTask *task, const element *query, int64_t query_stride,
                          int64_t head_dim) {
    int64_t num_rows = (int64_t)task->num_tokens * task->num_heads, num_lines = divide_up(head_dim, LINE);
    query += task->token * query_stride + task->first_head * head_dim;
    for (int64_t row = 0, head = 0; row < round_up(num_rows, STRIP); row++) {
        element *line = s->queries + row / 16 * num_lines * TILE + row % 16 * LINE;
        for (int64_t i = 0; i < num_lines * LINE; i += LINE, line += TILE) {
            const element *from = query + head * head_dim + i;
            store_any(line, row < num_rows ? load_line(from, head_dim - i) : zero_words());
        }
        if (++head == task->num_heads) head = 0, query += query_stride;
    }
}

/* Packs 32 keys from `at` on into pairs of tiles, one pair for each line of them. */
INLINE void pack_keys(Scratch *s, int64_t at, int64_t head_dim, const CacheKind kind) {
    element *tile = s->keys + at / 32 * divide_up(head_dim, LINE) * 2 * TILE;
    for (int64_t i = 0; i < head_dim; i += LINE, tile += 2 * TILE)
        for (int side = 0; side < 2; side++) {
            __m512i rows[16];
            const char **keys = s->key_rows + at + 16 * side;
            for (int row = 0; row < 16; row++) rows[row] = load_cached(keys[row], i, head_dim - i, kind);
            transpose_16x16(rows);
            for (int row = 0; row < 16; row++) store_any(tile + side * SECOND_TILE + row * TILE_STEP, rows[row]);
        }
}

#ifdef ELEMENT_BF16
/* Loads 16 elements from d on of a vector in the cache into the lower halves of words. */
INLINE __m512i load_halves(const char *from, int64_t d, __mmask16 mask, const CacheKind kind) {
    if (kind != ELEMENT_CACHE) return _mm512_srli_epi32(as_words(load_numbers(from + d, mask, kind)), 16);
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, (const element *)from + d));
}
#endif

/* Packs elements [d, d + 32) of LINE values from `at` on into a pair of tiles. */
INLINE void pack_values(Scratch *s, int64_t at, int64_t d, int64_t head_dim, const CacheKind kind) {
    for (int side = 0; side < 2; side++, d += 16) {
        element *tile = s->values[d / 32][at / LINE] + side * SECOND_TILE;
        for (int64_t i = at; i < at + LINE; i += LINE / 16, tile += TILE_STEP) {
#ifdef ELEMENT_BF16
            __mmask16 mask = lanes(head_dim - d);
            __m512i even = load_halves(s->value_rows[i], d, mask, kind);
            __m512i odd = load_halves(s->value_rows[i + 1], d, mask, kind);
            store_any(tile, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
#else
            store_any(tile, load_cached(s->value_rows[i], d, head_dim - d, kind));
#endif
        }
    }
}

#define FETCHED_KEYS 64 /* keys are fetched into the L2 cache so long before they are packed, and their values */

INLINE void fetch_rows(const char *const *rows, int64_t first, int64_t stop, int64_t num_bytes) {
    for (; first < stop; first++) prefetch(rows[first], num_bytes);
}

/* Packs keys and values [first, first + count) of the row into tiles; pads with zeros to a multiple of 32 keys. */
INLINE void stage_kind(Scratch *s, const AttentionPlan *plan, const AttentionTask *task, const Cache *cache,
                       int64_t first, int64_t count, const CacheKind kind) {
    static const element zeros[MAX_HEAD_DIM];
    int64_t padded = round_up(count, 32), head_dim = cache->head_dim, num_bytes = numbers_bytes(kind, head_dim);
    locate(s->key_rows, s->key_scales, plan, task, cache, 0, first, count);
    locate(s->value_rows, s->value_scales, plan, task, cache, 1, first, count);
    for (int64_t i = count; i < padded; i++) s->key_rows[i] = s->value_rows[i] = (const char *)zeros;
    fetch_rows(s->key_rows, 0, min64(padded, FETCHED_KEYS), num_bytes);
    for (int64_t at = 0; at < padded; at += 32) {
        int64_t ahead = min64(padded, at + FETCHED_KEYS);
        fetch_rows(s->key_rows, ahead, min64(padded, ahead + 32), num_bytes);
        fetch_rows(s->value_rows, at, at + 32, num_bytes);
        pack_keys(s, at, head_dim, kind);
    }
    for (int64_t at = 0; at < padded; at += LINE)
        for (int64_t d = 0; d < head_dim; d += 32) pack_values(s, at, d, head_dim, kind);
}

static void stage_keys(Scratch *s, const AttentionPlan *plan, const AttentionTask *task, const Cache *cache,
                       int64_t first, int64_t count) {
    if (cache->kind == INT8_CACHE) stage_kind(s, plan, task, cache, first, count, INT8_CACHE);
    else if (cache->kind == E4M3_CACHE) stage_kind(s, plan, task, cache, first, count, E4M3_CACHE);
    else stage_kind(s, plan, task, cache, first, count, ELEMENT_CACHE);
}

#ifdef HAS_TILES

static void configure_tiles(void) {
    TileConfig config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) shape_tile(&config, tile, 16, 64);
    _tile_loadconfig(&config);
}

/* sums [32 rows][32] += x @ weight, which has [num_lines][2 tiles]; `upper` and `lower` are the lines of 16 rows each.
 * The sums stay in tiles 0 to 3 from a call that begins them (with those in memory, unless they are new) to one that
 * ends them. */
INLINE void multiply_strip(float *sums, int64_t stride, bool is_new, bool begins, bool ends, const element *upper,
                           const element *lower, int64_t num_rows, const element *weight, int64_t num_lines) {
    int64_t bytes = stride * (int64_t)sizeof *sums;
    (void)num_rows;
    if (is_new) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else if (begins) {
        _tile_loadd(0, sums, bytes);
        _tile_loadd(1, sums + 16, bytes);
        _tile_loadd(2, sums + 16 * stride, bytes);
        _tile_loadd(3, sums + 16 * stride + 16, bytes);
    }
    for (int64_t line = 0; line < num_lines; line++, weight += 2 * TILE) {
        _tile_loadd(4, upper + line * TILE, 64);
        _tile_loadd(6, weight, TILE_STEP_BYTES);
        _tile_loadd(7, weight + SECOND_TILE, TILE_STEP_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, lower + line * TILE, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    if (!ends) return;
    _tile_stored(0, sums, bytes);
    _tile_stored(1, sums + 16, bytes);
    _tile_stored(2, sums + 16 * stride, bytes);
    _tile_stored(3, sums + 16 * stride + 16, bytes);
}

#else

static void configure_tiles(void) {}

/* The same with sums that stay in memory, for `num_rows` rows. */
INLINE void multiply_strip(float *sums, int64_t stride, bool is_new, bool begins, bool ends, const element *upper,
                           const element *lower, int64_t num_rows, const element *weight, int64_t num_lines) {
    Fetch fetch = {NULL, 0, NULL};
    (void)begins, (void)ends;
    multiply_group(sums, stride, is_new, upper, 16, min64(num_rows, 16), weight, num_lines, &fetch);
    multiply_group(sums + 16 * stride, stride, is_new, lower, 16, num_rows - 16, weight, num_lines, &fetch);
}

#endif

/* scores[32][32 keys from `at` on] = queries @ keys^T */
INLINE void score_keys(Scratch *s, const Strip *strip, int64_t at, int64_t num_lines) {
    const element *queries = s->queries + strip->number * 2 * num_lines * TILE;
    multiply_strip(s->scores[strip->number % 2][0] + at, SCORE_STRIDE, true, true, true, queries,
                   queries + num_lines * TILE, strip->num_rows, s->keys + at / 32 * num_lines * 2 * TILE, num_lines);
}

/* 2^x for finite x <= 0; in bf16 with an error of at most 2^-13, small compared with the rounding of the weight. */
INLINE __m512 weight_of(__m512 x) {
#ifndef ELEMENT_BF16
    return exp2_16(x);
#endif
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.05517132f), f, _mm512_set1_ps(0.24261054f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69326099f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.99992811f));
    return _mm512_scalef_ps(p, whole);
}

/* Turns the scores of a query row into weights, with has_scales times the values' scales; it attends to keys [low, high)
 * of the staged ones. bias: those of the staged keys, or NULL. */
INLINE void weigh_row(Scratch *s, const Strip *strip, int64_t row, int64_t low, int64_t high, const Scoring *scoring,
                      const float *bias, int64_t padded, bool has_scales) {
    int64_t index = strip->number * STRIP + row, start = strip->start, stop = strip->stop;
    float *scores = s->scores[strip->number % 2][row], scale = exponent_factor(scoring);
    if (has_scales) scale_scores(scores + start, s->key_scales + start, stop - start);
    if (scoring->softcap) cap_scores(scores + start, stop - start, scoring);
    if (bias != NULL) add_biases(scores + start, bias + start, min64(stop, high) - start, scoring);
    if (low > start || high < stop)
        for (int64_t i = start; i < stop; i += 16) {
            __mmask16 seen = lanes(high - i) & (__mmask16)~lanes(low - i);
            _mm512_mask_storeu_ps(scores + i, (__mmask16)~seen, _mm512_set1_ps(HIDDEN));
        }
    __m512 highest = _mm512_max_ps(_mm512_load_ps(scores + start), _mm512_load_ps(scores + start + 16));
    for (int64_t i = start + 32; i < stop; i += 32)
        highest = _mm512_max_ps(highest, _mm512_max_ps(_mm512_load_ps(scores + i), _mm512_load_ps(scores + i + 16)));
    float before = s->largest[index], largest = fmaxf(before, _mm512_reduce_max_ps(highest) * scale);
    __m512 factor = _mm512_set1_ps(scale), offset = _mm512_set1_ps(largest);
    __m512 sum_a = _mm512_setzero_ps(), sum_b = sum_a;
    element *weights = s->weights[strip->number % 2][row / 16][start / LINE][row % 16];
    for (int64_t i = start; i < stop; i += 32, weights += 32 / LINE * TILE) {
        __m512 a = weight_of(_mm512_fmsub_ps(_mm512_load_ps(scores + i), factor, offset));
        __m512 b = weight_of(_mm512_fmsub_ps(_mm512_load_ps(scores + i + 16), factor, offset));
        sum_a = _mm512_add_ps(sum_a, a);
        sum_b = _mm512_add_ps(sum_b, b);
        if (has_scales) {
            a = _mm512_mul_ps(a, _mm512_load_ps(s->value_scales + i));
            b = _mm512_mul_ps(b, _mm512_load_ps(s->value_scales + i + 16));
        }
#ifdef ELEMENT_BF16
        store_any(weights, narrow_pair(a, b));
#else
        store_floats(weights, a);
        store_floats(weights + TILE, b);
#endif
    }
    float sum = _mm512_reduce_add_ps(_mm512_add_ps(sum_a, sum_b));
    if (before != largest) { /* rescale the earlier sums */
        __m512 alpha = exp2_16(_mm512_set1_ps(before - largest));
        s->sum[index] *= _mm512_cvtss_f32(alpha);
        for (int64_t i = 0; i < padded; i += 16)
            _mm512_store_ps(s->sums[index] + i, _mm512_mul_ps(alpha, _mm512_load_ps(s->sums[index] + i)));
    }
    s->largest[index] = largest;
    s->sum[index] += sum;
}

#define PART 4 /* lines of keys per call of add_values: short, so that vector work can be interleaved */

/* Adds weights @ values to the strip's sums, for 32 elements from d on and PART lines of keys from `first` on. */
INLINE void add_values(Scratch *s, const Strip *strip, int64_t d, int64_t first) {
    element(*weights)[KEYS / LINE][16][LINE] = s->weights[strip->number % 2];
    int64_t start = strip->start / LINE, stop = strip->stop / LINE, end = min64(stop, first + PART);
    multiply_strip(s->sums[strip->number * STRIP] + d, HEAD_STRIDE, false, first == start, end == stop,
                   weights[0][first][0], weights[1][first][0], strip->num_rows, s->values[d / 32][first], end - first);
}

/* Returns the strip with its range of the keys [first, first + count). */
static Strip strip_at(int64_t number, const AttentionPlan *plan, const AttentionTask *task, int64_t first,
                      int64_t count) {
    int64_t num_rows = (int64_t)task->num_tokens * task->num_heads;
    int64_t last_row = min64(num_rows, (number + 1) * STRIP) - 1;
    int64_t earliest = task->position + number * STRIP / task->num_heads;
    int64_t token = last_row / task->num_heads, end = seen_end(plan, task, token);
    while (plan->rows.see_until != NULL && token-- > number * STRIP / task->num_heads)
        end = max64(end, seen_end(plan, task, token));
    int64_t low = plan->window ? max64(0, earliest - plan->window + 1 - first) : 0;
    Strip strip = {number, min64(STRIP, num_rows - number * STRIP), low / 32 * 32,
                   round_up(max64(0, min64(count, end - first)), 32)};
    if (strip.start > strip.stop) strip.start = strip.stop;
    return strip;
}

/* Pipelines three strips: scores of the newest, weights of the one before, weighted values of the oldest. Scores and
 * values use tiles, weights use vectors, so each piece of tile work is followed by some rows of vector work. */
static void advance(Scratch *s, const AttentionPlan *plan, const AttentionTask *task, const Strip strips[3],
                    int64_t first, int64_t count, const Scoring *scoring, bool has_scales) {
    int64_t padded = round_up(plan->head_dim, 32), num_lines = divide_up(plan->head_dim, LINE);
    const Strip *scored = &strips[0], *weighed = &strips[1], *added = &strips[2];
    int64_t num_scores = (scored->stop - scored->start) / 32;
    int64_t num_parts = divide_up((added->stop - added->start) / LINE, PART);
    int64_t num_pieces = max64(1, num_scores + num_parts * (padded / 32));
    int64_t num_rows = weighed->num_rows, row = weighed->start < weighed->stop ? 0 : num_rows;
    for (int64_t piece = 0; piece < num_pieces; piece++) {
        if (piece < num_scores) {
            score_keys(s, scored, scored->start + piece * 32, num_lines);
        } else if (num_parts) {
            int32_t d = (int32_t)(piece - num_scores) / (int32_t)num_parts, part = (int32_t)(piece - num_scores) % (int32_t)num_parts;
            add_values(s, added, d * 32, added->start / LINE + part * PART);
        }
        for (; row < num_rows * (piece + 1) / num_pieces; row++) {
            int64_t index = weighed->number * STRIP + row;
            int64_t token = (int32_t)index / task->num_heads, end = seen_end(plan, task, token) - first;
            int64_t low = plan->window ? task->position + token - first - plan->window + 1 : 0;
            const float *bias = bias_of(scoring, task->first_head + index % task->num_heads, task->position + token);
            if (bias != NULL) bias += first;
            weigh_row(s, weighed, row, low, min64(count, end), scoring, bias, padded, has_scales);
        }
    }
}

static void write_rows(const Scratch *s, const AttentionPlan *plan, const AttentionTask *task, const Rows *out) {
    int64_t head_dim = plan->head_dim, row = 0;
    for (int64_t token = task->token; token < task->token + task->num_tokens; token++)
        for (int64_t head = task->first_head; head < task->first_head + task->num_heads; head++, row++) {
            __m512 share = _mm512_set1_ps(1.0f / s->sum[row]);
            for (int64_t i = 0; i < head_dim; i += 16) /* head_dim is a multiple of 16: within a line */
                store16(rows_at(out, token, head * head_dim + i), 0xffff,
                        _mm512_mul_ps(share, _mm512_load_ps(s->sums[row] + i)));
            if (head == plan->num_heads - 1) clear_padding(out, token, plan->num_heads * head_dim);
        }
}

void prefill_task(const AttentionPlan *plan, const AttentionTask *task, const element *query, int64_t query_stride,
                  const Cache *cache, const Scoring *scoring, const Rows *out) {
    Scratch *s = thread_scratch(sizeof *s);
    int64_t num_strips = divide_up((int64_t)task->num_tokens * task->num_heads, STRIP);
    configure_tiles();
    stage_queries(s, task, query, query_stride, plan->head_dim);
    for (int64_t row = 0; row < num_strips * STRIP; row++) {
        s->largest[row] = fmaxf(HIDDEN, sink_of(scoring, task->first_head + row % task->num_heads));
        s->sum[row] = s->largest[row] == HIDDEN ? 0 : 1;
        memset(s->sums[row], 0, (size_t)round_up(plan->head_dim, 32) * sizeof(float));
    }
    for (int64_t first = task->first_key / 32 * 32; first < task->end_key; first += KEYS) {
        int64_t count = min64(KEYS, task->end_key - first);
        stage_keys(s, plan, task, cache, first, count);
        Strip strips[3] = {{0}};
        for (int64_t i = 0; i < num_strips + 2; i++) {
            strips[2] = strips[1];
            strips[1] = strips[0];
            strips[0] = i < num_strips ? strip_at(i, plan, task, first, count) : (Strip){i, 0, 0, 0};
            advance(s, plan, task, strips, first, count, scoring, cache->kind != ELEMENT_CACHE);
        }
    }
    write_rows(s, plan, task, out);
}

#endif
