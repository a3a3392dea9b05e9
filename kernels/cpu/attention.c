/* Attention of a few query rows per task over the paged cache: decode tokens, and with AVX2 all of them.
 *
 * A task (see plan.c) has up to TASK_ROWS query rows. Its keys are processed CHUNK at a time in float32: scores,
 * weights (an online softmax), weighted values. Memory is as slow as all of that together, so the next chunk's keys and
 * values are prefetched evenly over the work on this one. With VNNI, a cache of int8 has its own scores and weighted
 * values (int8_attention.h). Splits of decode tokens store their largest score, sum and weighted values; a second stage
 * merges them.
 */
#include "attention.h"
#include "avx2.h"
#include "int8_attention.h"

#include <math.h>

/* ── one task ────────────────────────────────────────────────────────────────────────────────────────────────────── */

#ifdef __AVX512F__
#define SCORED 16 /* keys per call of score_keys */
#else
#define SCORED 32 /* a pair of tiles */
#endif

typedef struct {
    int64_t num_rows; /* query rows: token by token, each with its heads */
    const element *queries[TASK_ROWS];
    int64_t low[TASK_ROWS], high[TASK_ROWS]; /* each attends to keys [low, high) */
    const float *bias[TASK_ROWS]; /* see bias_of */
    float largest[TASK_ROWS], sum[TASK_ROWS]; /* of the scores so far, and of 2^(score - largest) */
    _Alignas(64) float scores[TASK_ROWS][CHUNK]; /* then weights */
    _Alignas(64) float values[TASK_ROWS][HEAD_STRIDE]; /* weighted sums, in the order of load32 */
    const char *keys[CHUNK], *value_rows[CHUNK]; /* addresses of the chunk's keys and values */
    _Alignas(64) float key_scales[CHUNK], value_scales[CHUNK]; /* in a cache of bytes */
    const element *scored[SCORED]; /* keys as elements, whose scores are computed next */
    _Alignas(64) element widened[SCORED * MAX_HEAD_DIM]; /* those of a cache of bytes */
    Prefetch next;
#ifdef HAS_INT8_ATTENTION
    Int8Rows int8; /* of a cache of int8 */
#endif
#if defined(HAS_TILES)
    _Alignas(64) uint32_t query_tiles[MAX_HEAD_DIM / LINE][16][16]; /* [pair][query row] */
#elif !defined(__AVX512F__)
    _Alignas(64) float wide_queries[TASK_ROWS][HEAD_STRIDE];
#endif
} Task;

static void begin_task(Task *t, const AttentionPlan *plan, const AttentionTask *task, const element *query,
                       int64_t query_stride, CacheKind kind, const Scoring *scoring) {
    t->num_rows = (int64_t)task->num_tokens * task->num_heads;
    for (int64_t row = 0; row < t->num_rows; row++) {
        int64_t token = row / task->num_heads, head = task->first_head + row % task->num_heads;
        t->queries[row] = query + (task->token + token) * query_stride + head * plan->head_dim;
        t->high[row] = min64(task->end_key, seen_end(plan, task, token));
        t->low[row] = plan->window ? max64(0, task->position + token + 1 - plan->window) : 0;
        t->bias[row] = bias_of(scoring, head, task->position + token);
        t->largest[row] = task->partial < 0 ? sink_of(scoring, head) : -INFINITY; /* once for all splits */
        t->sum[row] = t->largest[row] == -INFINITY ? 0 : 1;
        memset(t->values[row], 0, (size_t)round_up(plan->head_dim, 32) * sizeof(float));
    }
#ifdef HAS_INT8_ATTENTION
    if (kind == INT8_CACHE) {
        for (int64_t row = 0; row < t->num_rows; row++) round_query(&t->int8, row, t->queries[row], plan->head_dim);
        return;
    }
#else
    (void)kind;
#endif
#if defined(HAS_TILES)
    int64_t num_lines = divide_up(plan->head_dim, LINE);
    memset(t->query_tiles, 0, (size_t)num_lines * sizeof t->query_tiles[0]);
    for (int64_t row = 0; row < t->num_rows; row++)
        for (int64_t pair = 0; pair < plan->head_dim / 2; pair++)
            memcpy(&t->query_tiles[pair / 16][pair % 16][row], t->queries[row] + 2 * pair, 4);
#elif !defined(__AVX512F__)
    for (int64_t row = 0; row < t->num_rows; row++)
        for (int64_t i = 0; i < round_up(plan->head_dim, LINE); i += 16)
            store_floats(t->wide_queries[row] + i, load16(t->queries[row] + i, lanes(plan->head_dim - i)));
#endif
}

/* Chunks begin at multiples of 16 keys, so that 16 keys are adjacent in a block; keys before first_key are masked. */
INLINE int64_t first_chunk(const AttentionTask *task) { return task->first_key / 16 * 16; }

/* Finds SCORED keys; those past `count` repeat the last one. */
INLINE void find_keys(Task *t, int64_t at, int64_t count, const int64_t head_dim, const CacheKind kind) {
    for (int64_t i = 0; i < SCORED; i++) {
        const char *key = t->keys[min64(at + i, count - 1)];
        element *wide = t->widened + i * round_up(head_dim, 32);
        t->scored[i] = kind == ELEMENT_CACHE ? (const element *)key : wide;
        if (kind == ELEMENT_CACHE) continue;
        for (int64_t d = 0; d < head_dim; d += LINE) store_any(wide + d, load_cached(key, d, head_dim - d, kind));
    }
}

#ifdef __AVX512F__

/* Returns a vector whose lane i is the sum of the lanes of v[i]. */
INLINE __m512 reduce_16x16(const __m512 v[16]) {
    __m512 s[8], y[4], z[2];
    for (int i = 0; i < 8; i++)
        s[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d a = _mm512_castps_pd(s[2 * i]), b = _mm512_castps_pd(s[2 * i + 1]);
        y[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    for (int i = 0; i < 2; i++)
        z[i] = _mm512_add_ps(_mm512_shuffle_f32x4(y[2 * i], y[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(y[2 * i], y[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(z[0], z[1], 0x88), _mm512_shuffle_f32x4(z[0], z[1], 0xdd));
}

/* Computes the scores of the keys found, which are those from `at` on. */
INLINE void score_keys(Task *t, int64_t at, const int64_t head_dim) {
    for (int64_t row = 0; row < t->num_rows; row++) {
        Floats sums[16];
        for (int64_t i = 0; i < 16; i++) {
            const element *key = t->scored[i];
            sums[i] = zero16();
            for (int64_t j = 0; j < head_dim; j += LINE)
                sums[i] = dot_line(sums[i], load_line(t->queries[row] + j, head_dim - j),
                                   load_line(key + j, head_dim - j));
        }
        store_floats(t->scores[row] + at, reduce_16x16(sums));
    }
}

#else

/* Computes the scores of the keys found, which are those from `at` on. */
static void score_keys(Task *t, int64_t at, int64_t head_dim) {
    _Alignas(64) element tiles[MAX_HEAD_DIM / LINE * 2 * TILE];
    int64_t num_lines = divide_up(head_dim, LINE);
    for (int64_t i = 0; i < 2 * num_lines; i++) {
        int64_t d = i / 2 * LINE;
        pack_keys(tiles + i * TILE, t->scored + i % 2 * 16, 15, d, head_dim - d);
    }
    for (int64_t row = 0; row < t->num_rows; row++)
        for (int64_t i = at; i < at + SCORED; i += 16) store_floats(t->scores[row] + i, zero16());
    multiply_near(t->scores[0] + at, CHUNK, t->wide_queries[0], HEAD_STRIDE, LINE, t->num_rows, tiles, num_lines, NULL);
}

#endif

#ifdef HAS_TILES
/* Tile 0: scores [16 keys][16 query rows]; 1, 2: a line of 16 keys, of queries; 3, 4: the same for half a line. */
static void configure_tiles(void) {
    TileConfig config = {.palette = 1};
    for (int tile = 0; tile < 3; tile++) shape_tile(&config, tile, 16, 64);
    shape_tile(&config, 3, 16, 32);
    shape_tile(&config, 4, 8, 64);
    _tile_loadconfig(&config);
}

/* Computes the scores of the keys found, which are `stride` elements apart. */
static void score_tile(Task *t, int64_t at, int64_t head_dim, int64_t stride) {
    _Alignas(64) float sums[16][16];
    int64_t line = 0;
    stride *= (int64_t)sizeof(element);
    _tile_zero(0);
    for (; (line + 1) * LINE <= head_dim; line++) {
        _tile_loadd(1, t->scored[0] + line * LINE, stride);
        _tile_loadd(2, t->query_tiles[line], 64);
        _tile_dpbf16ps(0, 1, 2);
    }
    if (head_dim % LINE) {
        _tile_loadd(3, t->scored[0] + line * LINE, stride);
        _tile_loadd(4, t->query_tiles[line], 64);
        _tile_dpbf16ps(0, 3, 4);
    }
    _tile_stored(0, sums, 64);
    Ints column = shift_left(lane_numbers(), 4);
    for (int64_t row = 0; row < t->num_rows; row++)
        store_floats(t->scores[row] + at, _mm512_i32gather_ps(column, sums[0] + row, 4));
}
#endif

/* Turns the chunk's scores into weights 2^(score - largest), with has_scales times the values' scales; masked keys get 0. */
static void weigh(Task *t, int64_t first, int64_t count, const Scoring *scoring, int64_t head_dim, bool has_scales) {
    Floats factor = fill16(exponent_factor(scoring));
    int64_t padded = round_up(count, LINE);
    for (int64_t row = 0; row < t->num_rows; row++) {
        float *scores = t->scores[row];
        int64_t low = t->low[row] - first, high = min64(count, t->high[row] - first);
        Floats highest = fill16(-INFINITY);
        if (has_scales) scale_scores(scores, t->key_scales, padded);
        if (scoring->softcap) cap_scores(scores, padded, scoring);
        if (scoring->bias != NULL) add_biases(scores, t->bias[row] + first, high, scoring);
        for (int64_t i = 0; i < padded; i += 16) {
            Mask seen = lanes(high - i) & (Mask)~lanes(low - i);
            Floats score = multiply16(load_floats(scores + i), factor);
            if (seen != 0xffff) score = choose(seen, score, fill16(-INFINITY));
            store_floats(scores + i, score);
            highest = larger16(highest, score);
        }
        float largest = fmaxf(t->largest[row], largest_of(highest));
        Floats offset = fill16(largest == -INFINITY ? 0 : largest), sum = zero16();
        for (int64_t i = 0; i < padded; i += 16) {
            Floats weight = exp2_16(subtract16(load_floats(scores + i), offset));
            sum = add16(sum, weight);
            if (has_scales) weight = multiply16(weight, load_floats(t->value_scales + i));
            store_floats(scores + i, weight);
        }
        if (t->largest[row] != -INFINITY && t->largest[row] != largest) { /* rescale the earlier sums */
            Floats alpha = exp2_16(fill16(t->largest[row] - largest));
            t->sum[row] *= first_of(alpha);
            for (int64_t i = 0; i < round_up(head_dim, 32); i += 16)
                store_floats(t->values[row] + i, multiply16(alpha, load_floats(t->values[row] + i)));
        }
        t->largest[row] = largest;
        t->sum[row] += sum_of(sum);
    }
}

#ifdef __AVX512F__

#define HELD_ROWS 8 /* rows whose sums of 32 elements stay in registers */

/* Loads elements [d, d + 32) of a value, of which `left` exist, in the order of store_value. */
INLINE Floats32 load_value(const char *from, int64_t d, int64_t left, const CacheKind kind) {
    if (kind == ELEMENT_CACHE) return load32((const element *)from + d, left);
    return (Floats32){load_numbers(from + d, lanes(left), kind), load_numbers(from + d + 16, lanes(left - 16), kind)};
}

/* values[first .. first + rows) += weights * value rows; every call passes a constant `rows`. */
INLINE void add_values(Task *t, int64_t first, int64_t count, const int64_t head_dim, const CacheKind kind,
                       const int rows) {
    for (int64_t d = 0; d < head_dim; d += 32) {
        Floats a[HELD_ROWS], b[HELD_ROWS];
        for (int row = 0; row < rows; row++) {
            a[row] = load_floats(t->values[first + row] + d);
            b[row] = load_floats(t->values[first + row] + d + 16);
        }
        for (int64_t i = 0; i < count; i++) {
            fetch_next(&t->next);
            Floats32 value = load_value(t->value_rows[i], d, head_dim - d, kind);
#pragma GCC unroll 8
            for (int row = 0; row < rows; row++) {
                Floats weight = fill16(t->scores[first + row][i]);
                a[row] = multiply_add16(weight, value.a, a[row]);
                b[row] = multiply_add16(weight, value.b, b[row]);
            }
        }
        for (int row = 0; row < rows; row++) {
            store_floats(t->values[first + row] + d, a[row]);
            store_floats(t->values[first + row] + d + 16, b[row]);
        }
    }
}

INLINE void add_all_values(Task *t, int64_t count, const int64_t head_dim, const CacheKind kind) {
    for (int64_t row = 0; row < t->num_rows;) {
        int64_t left = t->num_rows - row;
        if (left >= 8) add_values(t, row, count, head_dim, kind, 8), row += 8;
        else if (left >= 4) add_values(t, row, count, head_dim, kind, 4), row += 4;
        else if (left == 3) add_values(t, row, count, head_dim, kind, 3), row += 3;
        else if (left == 2) add_values(t, row, count, head_dim, kind, 2), row += 2;
        else add_values(t, row, count, head_dim, kind, 1), row += 1;
    }
}

#else

/* Packs elements [d, d + 32) of the values of a line of tiles from `at` on; values past `count` repeat the last one. */
INLINE void pack_values(Task *t, element *tiles, int64_t at, int64_t count, int64_t d, int64_t left, const CacheKind kind) {
    _Alignas(64) element wide[LINE / 16][32];
    const element *values[LINE / 16];
    for (int64_t i = 0; i < LINE / 16; i++) {
        const char *value = t->value_rows[min64(at + i, count - 1)];
        values[i] = kind == ELEMENT_CACHE ? (const element *)value + d : wide[i];
        if (kind == ELEMENT_CACHE) continue;
        for (int64_t j = 0; j < 32; j += LINE) store_any(wide[i] + j, load_cached(value, d + j, left - j, kind));
    }
    pack_value(tiles, values, LINE / 16 - 1, 0, left);
}

INLINE void add_all_values(Task *t, int64_t count, const int64_t head_dim, const CacheKind kind) {
    _Alignas(64) element tiles[CHUNK / LINE * 2 * TILE]; /* for 32 elements of the values */
    int64_t num_lines = divide_up(count, LINE);
    for (int64_t d = 0; d < head_dim; d += 32) {
        for (int64_t i = 0; i < num_lines * LINE; i += LINE / 16) {
            fetch_next(&t->next), fetch_next(&t->next);
            pack_values(t, tiles + i / LINE * 2 * TILE + i % LINE * 16, i, count, d, head_dim - d, kind);
        }
        multiply_near(t->values[0] + d, HEAD_STRIDE, t->scores[0], CHUNK, LINE, t->num_rows, tiles, num_lines, NULL);
    }
}

#endif

INLINE void attend_keys(Task *t, const Cache *cache, int64_t first, int64_t count, const Scoring *scoring,
                        const int64_t head_dim, const CacheKind kind) {
    int64_t num_lines = SCORED * divide_up(numbers_bytes(kind, head_dim), 64) + (kind != ELEMENT_CACHE);
    for (int64_t at = 0; at < count; at += SCORED) {
        for (int64_t i = 0; i < num_lines; i++) fetch_next(&t->next);
        find_keys(t, at, count, head_dim, kind);
#ifdef HAS_TILES
        if (kind != ELEMENT_CACHE && head_dim % 16 == 0) {
            score_tile(t, at, head_dim, round_up(head_dim, 32));
            continue;
        }
        if (cache->block_size % 16 == 0 && (first + at) % 16 == 0 && head_dim % 16 == 0) {
            score_tile(t, at, head_dim, head_dim); /* keys past `count` are read to the block's end, and masked */
            continue;
        }
#endif
        score_keys(t, at, head_dim);
    }
    weigh(t, first, count, scoring, head_dim, kind != ELEMENT_CACHE);
    add_all_values(t, count, head_dim, kind);
}

#ifdef HAS_INT8_ATTENTION

/* The same for a cache of int8, as integers. */
INLINE void attend_int8(Task *t, int64_t first, int64_t count, const Scoring *scoring, const int64_t head_dim) {
    const int64_t num_lines = SCORED_KEYS * divide_up(head_dim, 64) + 2; /* the scales of keys and of values, too */
    for (int64_t i = count; i < round_up(count, SCORED_KEYS); i++) {
        t->keys[i] = t->keys[count - 1];
        t->value_rows[i] = t->value_rows[count - 1];
    }
    for (int64_t at = 0; at < count; at += SCORED_KEYS) {
        for (int64_t i = 0; i < num_lines; i++) fetch_next(&t->next);
        score_int8(t->scores, at, &t->int8, t->num_rows, t->keys + at, head_dim);
    }
    weigh(t, first, count, scoring, head_dim, true);
    for (int64_t row = 0; row < t->num_rows; row++) round_weights(&t->int8, row, t->scores[row], round_up(count, LINE));
    add_int8_values(t->values, &t->int8, t->num_rows, t->value_rows, round_up(count, JOINED_VALUES), head_dim, &t->next);
}

#endif

/* With code of its own for the usual sizes of heads. */
static void attend_chunk(Task *t, const Cache *cache, int64_t first, int64_t count, const Scoring *scoring) {
    int64_t head_dim = cache->head_dim;
    if (cache->kind == E4M3_CACHE) attend_keys(t, cache, first, count, scoring, head_dim, E4M3_CACHE);
#ifdef HAS_INT8_ATTENTION
    else if (cache->kind == INT8_CACHE && head_dim == 64) attend_int8(t, first, count, scoring, 64);
    else if (cache->kind == INT8_CACHE && head_dim == 128) attend_int8(t, first, count, scoring, 128);
    else if (cache->kind == INT8_CACHE) attend_int8(t, first, count, scoring, head_dim);
#else
    else if (cache->kind == INT8_CACHE && head_dim == 64) attend_keys(t, cache, first, count, scoring, 64, INT8_CACHE);
    else if (cache->kind == INT8_CACHE && head_dim == 128) attend_keys(t, cache, first, count, scoring, 128, INT8_CACHE);
    else if (cache->kind == INT8_CACHE) attend_keys(t, cache, first, count, scoring, head_dim, INT8_CACHE);
#endif
    else if (head_dim == 64) attend_keys(t, cache, first, count, scoring, 64, ELEMENT_CACHE);
    else if (head_dim == 128) attend_keys(t, cache, first, count, scoring, 128, ELEMENT_CACHE);
    else attend_keys(t, cache, first, count, scoring, head_dim, ELEMENT_CACHE);
}

/* Lists the memory of keys and values [first, first + count). */
static void list_spans(Prefetch *to, const AttentionPlan *plan, const AttentionTask *task, const Cache *cache, int64_t first,
                       int64_t count) {
    int64_t num_bytes = numbers_bytes(cache->kind, cache->head_dim), num_spans = 0;
    for (int side = 0; side < 2; side++)
        for (int64_t i = 0; i < count;) {
            Piece piece = piece_at(plan, task, cache, side, first + i, count - i);
            const int64_t scale_bytes = cache->kind == ELEMENT_CACHE ? 0 : piece.count * (int64_t)sizeof(float);
            const bool is_whole = piece.count == cache->block_size; /* its scales follow it */
            int64_t adjacent = piece.count * num_bytes + (is_whole ? scale_bytes : 0);
            to->spans[num_spans++] = (Span){piece.tile + piece.offset * num_bytes, adjacent};
            if (scale_bytes && !is_whole)
                to->spans[num_spans++] = (Span){(char *)(scales_of(cache, piece.tile) + piece.offset), scale_bytes};
            i += piece.count;
        }
    to->num_spans = num_spans, to->span = to->offset = 0;
}

/* Stores 32 elements of a query row's output, of which `left` exist, in the order of load_value. */
INLINE void store_value(element *to, int64_t left, Floats32 v, CacheKind kind) {
    if (kind == ELEMENT_CACHE) {
        store32(to, left, v);
        return;
    }
    store16(to, lanes(left), v.a);
    store16(to + 16, lanes(left - 16), v.b);
}

/* Writes one query row's output, its weighted values / sum; the last head also clears the panel's padding. */
static void write_head(const AttentionPlan *plan, CacheKind kind, const Rows *out, int64_t token, int64_t head,
                       const float *values, float sum) {
    int64_t head_dim = plan->head_dim;
    Floats share = fill16(1.0f / sum);
    _Alignas(64) element row[MAX_HEAD_DIM];
    for (int64_t i = 0; i < head_dim; i += 32) {
        Floats32 v = {multiply16(share, load_floats(values + i)),
                      multiply16(share, load_floats(values + i + 16))};
        store_value(row + i, min64(32, head_dim - i), v, kind);
    }
    write_row(out, token, head * head_dim, row, head_dim);
    if (head == plan->num_heads - 1) clear_padding(out, token, plan->num_heads * head_dim);
}

/* `next` follows in this thread, NULL at the end; is_fetched: this task was the `next` of the one before. */
static void run_task(AttentionPlan *plan, const AttentionTask *task, const element *query, int64_t query_stride,
                     const Cache *cache, const Scoring *scoring, const Rows *out, const AttentionTask *next,
                     bool is_fetched) {
    Task t;
    begin_task(&t, plan, task, query, query_stride, cache->kind, scoring);
#ifdef HAS_TILES
    configure_tiles();
#endif
    for (int64_t key = first_chunk(task); key < task->end_key; key += CHUNK) {
        int64_t count = min64(CHUNK, task->end_key - key), after = key + CHUNK;
        const AttentionTask *follower = after < task->end_key ? task : next;
        if (follower == next && next != NULL) after = first_chunk(next);
        int64_t num_after = follower == NULL ? 0 : min64(CHUNK, follower->end_key - after);
        if (!is_fetched) {
            list_spans(&t.next, plan, task, cache, key, count);
            for (int64_t i = 0; i < t.next.num_spans; i++) prefetch(t.next.spans[i].from, t.next.spans[i].num_bytes);
        }
        locate(t.keys, t.key_scales, plan, task, cache, 0, key, count);
        locate(t.value_rows, t.value_scales, plan, task, cache, 1, key, count);
        if (follower != NULL) list_spans(&t.next, plan, follower, cache, after, num_after);
        else t.next.num_spans = 0;
        is_fetched = true;
        attend_chunk(&t, cache, key, count, scoring);
    }
    for (int64_t row = 0; row < t.num_rows; row++) {
        if (task->partial < 0) {
            write_head(plan, cache->kind, out, task->token + row / task->num_heads, task->first_head + row % task->num_heads,
                       t.values[row], t.sum[row]);
            continue;
        }
        float *partial = plan->partials + (task->partial + row) * partial_floats(plan->head_dim);
        partial[0] = t.largest[row];
        partial[1] = t.sum[row];
        memcpy(partial + 16, t.values[row], (size_t)round_up(plan->head_dim, 32) * sizeof(float));
    }
}

const char *take_upcoming(Upcoming *u, int64_t num_bytes) {
    const StepRows *rows = &u->rows;
    int64_t block_size = u->cache.block_size;
    int64_t end = layer_bytes(u->cache.kind, u->cache.num_kv_heads, block_size, u->cache.head_dim);
    for (; u->row < rows->num_rows; u->row++) {
        int64_t first = u->window ? max64(0, rows->seq_lens[u->row] - u->window) / block_size : 0;
        int64_t num_blocks = divide_up(rows->seq_lens[u->row], block_size) - first;
        if (u->block < num_blocks) {
            const int32_t *table = rows->block_tables + u->row * rows->table_stride;
            const char *at = cache_at(&u->cache, table[first + u->block], 0, 0) + u->offset;
            u->offset += num_bytes;
            if (u->offset >= end) u->offset = 0, u->block += u->step;
            return at;
        }
        u->block -= max64(0, num_blocks);
    }
    return NULL;
}

/* Merges the partial results of decode tokens and one KV head; `task` is the first of their splits. */
static void merge_partials(const AttentionPlan *plan, const AttentionTask *task, CacheKind kind,
                           const Scoring *scoring, const Rows *out) {
    int64_t size = partial_floats(plan->head_dim);
    int64_t num_rows = (int64_t)task->num_tokens * task->num_heads, stride = num_rows * size;
    for (int64_t row = 0; row < num_rows; row++) {
        const float *first = plan->partials + (task->partial + row) * size;
        int64_t token = task->token + row / task->num_heads, head = task->first_head + row % task->num_heads;
        float sink = sink_of(scoring, head), largest = sink, sum = 0;
        for (int64_t i = 0; i < task->num_partials; i++) largest = fmaxf(largest, first[i * stride]);
        if (sink != -INFINITY) sum = first_of(exp2_16(fill16(sink - largest)));
        _Alignas(64) float values[MAX_HEAD_DIM] = {0};
        for (int64_t i = 0; i < task->num_partials; i++) {
            const float *partial = first + i * stride;
            if (partial[0] == -INFINITY && partial[1] == 0) continue;
            Floats alpha = exp2_16(fill16(partial[0] - largest));
            sum += partial[1] * first_of(alpha);
            for (int64_t d = 0; d < round_up(plan->head_dim, 32); d += 16)
                store_floats(values + d, multiply_add16(alpha, load_floats(partial + 16 + d),
                                                            load_floats(values + d)));
        }
        write_head(plan, kind, out, token, head, values, sum);
    }
}

void attend(AttentionPlan *plan, const element *query, int64_t query_stride, const Cache *cache,
            const Scoring *scoring, const Rows *out, Team *team) {
    int64_t num_tasks = plan->num_tasks;
    bool is_fetched = false;
    for (int64_t i = take_piece(team, num_tasks), after; i < num_tasks; finish_piece(team, num_tasks), i = after) {
        after = take_piece(team, num_tasks);
        const AttentionTask *task = &plan->tasks[i], *next = after < num_tasks ? &plan->tasks[after] : NULL;
#ifdef __AVX512F__
        if (!task->is_decode && is_prefill(task->num_tokens, task->num_heads, plan->head_dim)) {
            prefill_task(plan, task, query, query_stride, cache, scoring, out);
            is_fetched = false;
            continue;
        }
#endif
        run_task(plan, task, query, query_stride, cache, scoring, out, next, is_fetched);
        is_fetched = true;
    }
    if (plan->num_partial_rows == 0) return;
    end_stage(team);
    for (int64_t i; (i = take_piece(team, num_tasks)) < num_tasks; finish_piece(team, num_tasks))
        if (plan->tasks[i].num_partials) merge_partials(plan, &plan->tasks[i], cache->kind, scoring, out);
}
