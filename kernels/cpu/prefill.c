/* Attention of many query rows at a time with AMX: the blocks of a prefill row.
 *
 * A task is up to PREFILL_ROWS query rows of one KV head, token by token, each with its heads. Keys and values are
 * taken KEYS at a time from the cache's blocks into tiles (for AMX's second operand); then, 32 query rows at a time:
 * scores, weights (an online softmax), weighted values. Sums are float32, weights bf16.
 */
#include "attention.h"

#include <math.h>
#include <stdlib.h>

#ifdef HAS_TILES

#define STRIP 32 /* query rows at once: two groups */
#define KEYS 512 /* at once */
#define HIDDEN -1e30f /* the score of a key that a query may not see; finite, so that differences are */

/* Kept by each thread for the next task. */
typedef struct {
    _Alignas(64) element queries[PREFILL_ROWS / 16 * MAX_HEAD_DIM / LINE * TILE]; /* [group][line][16 rows][LINE] */
    _Alignas(64) element keys[KEYS / 16 * MAX_HEAD_DIM / LINE * TILE]; /* [16 keys][line] tiles: [pair][key][2] */
    _Alignas(64) element values[KEYS / LINE * MAX_HEAD_DIM / 16 * TILE]; /* [LINE keys][16 elements] tiles */
    _Alignas(64) float scores[STRIP][KEYS];
    _Alignas(64) element weights[2][KEYS / LINE][16][LINE]; /* of two groups */
    _Alignas(64) float sums[PREFILL_ROWS][MAX_HEAD_DIM]; /* weighted values */
    float largest[PREFILL_ROWS], sum[PREFILL_ROWS];
} Scratch;

static _Thread_local Scratch *kept_scratch;

static void configure_tiles(void) {
    TileConfig config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) shape_tile(&config, tile, 16, 64);
    _tile_loadconfig(&config);
}

static void stage_queries(Scratch *s, const AttentionTask *task, const element *query, int64_t query_stride,
                          int64_t head_dim) {
    int64_t num_rows = (int64_t)task->num_tokens * task->num_heads, num_lines = divide_up(head_dim, LINE);
    Rows panel = {s->queries, num_lines * LINE, round_up(num_rows, STRIP)};
    for (int64_t row = 0; row < panel.panel_rows; row++) {
        int64_t token = task->token + row / task->num_heads, head = task->first_head + row % task->num_heads;
        for (int64_t i = 0; i < num_lines * LINE; i += LINE) {
            int64_t count = row < num_rows ? min64(LINE, head_dim - i) : 0;
            element *line = rows_at(&panel, row, i);
            if (count) memcpy(line, query + token * query_stride + head * head_dim + i, (size_t)count * 2);
            memset(line + count, 0, (size_t)(LINE - count) * 2);
        }
    }
}

/* Lane j of row i goes to lane i of row j. */
INLINE void transpose_16x16(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 4; i++) {
            t[8 * half + i] = _mm512_shuffle_i32x4(r[8 * half + i], r[8 * half + 4 + i], 0x88);
            t[8 * half + 4 + i] = _mm512_shuffle_i32x4(r[8 * half + i], r[8 * half + 4 + i], 0xdd);
        }
    for (int i = 0; i < 4; i++) { /* column 4c + i lies in 128-bit lane c */
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
}

/* Keys and values [first, first + count) of the row; up to a multiple of 32 keys there are zeros. */
static void stage_keys(Scratch *s, const AttentionPlan *plan, const AttentionTask *task, const Cache *cache,
                       int64_t first, int64_t count) {
    const int32_t *table = plan->rows.block_tables + task->row * plan->rows.table_stride;
    int64_t head_dim = cache->head_dim, num_lines = divide_up(head_dim, LINE), padded = round_up(head_dim, 32);
    static const element zeros[MAX_HEAD_DIM];
    for (int64_t at = 0; at < round_up(count, 32); at += 16) {
        const element *keys[16], *values[16];
        for (int64_t i = 0; i < 16; i++) {
            int64_t key = first + at + i, block = key / cache->block_size, offset = key % cache->block_size;
            bool is_real = at + i < count;
            keys[i] = is_real ? cache_at(cache, table[block], 0, task->kv_head) + offset * head_dim : zeros;
            values[i] = is_real ? cache_at(cache, table[block], 1, task->kv_head) + offset * head_dim : zeros;
        }
        element *tile = s->keys + at / 16 * num_lines * TILE;
        for (int64_t i = 0; i < head_dim; i += LINE, tile += TILE) {
            __mmask16 mask = lanes((head_dim - i) / 2);
            __m512i rows[16];
            for (int row = 0; row < 16; row++) rows[row] = _mm512_maskz_loadu_epi32(mask, keys[row] + i);
            transpose_16x16(rows);
            for (int row = 0; row < 16; row++) _mm512_store_si512(tile + row * LINE, rows[row]);
        }
        tile = s->values + at / LINE * (padded / 16) * TILE + at % LINE / 2 * LINE;
        for (int64_t i = 0; i < padded; i += 16, tile += TILE)
            for (int pair = 0; pair < 8; pair++) {
                __mmask16 mask = lanes(head_dim - i);
                __m512i even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, values[2 * pair] + i));
                __m512i odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, values[2 * pair + 1] + i));
                _mm512_store_si512(tile + pair * LINE, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
            }
    }
}

/* scores[32][start..stop) = queries @ keys^T, 32 keys at a time. */
static void score_strip(Scratch *s, int64_t strip, int64_t start, int64_t stop, int64_t num_lines) {
    const element *upper = s->queries + strip * 2 * num_lines * TILE, *lower = upper + num_lines * TILE;
    for (int64_t at = start; at < stop; at += 32) {
        const element *keys = s->keys + at / 16 * num_lines * TILE;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t line = 0; line < num_lines; line++) {
            _tile_loadd(4, upper + line * TILE, 64);
            _tile_loadd(6, keys + line * TILE, 64);
            _tile_loadd(7, keys + (num_lines + line) * TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, lower + line * TILE, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, s->scores[0] + at, sizeof s->scores[0]);
        _tile_stored(1, s->scores[0] + at + 16, sizeof s->scores[0]);
        _tile_stored(2, s->scores[16] + at, sizeof s->scores[0]);
        _tile_stored(3, s->scores[16] + at + 16, sizeof s->scores[0]);
    }
}

/* 2^x for finite x <= 0, within 2^-13: half a bit more than bf16 can hold. */
INLINE __m512 weight_of(__m512 x) {
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.05517132f), f, _mm512_set1_ps(0.24261054f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69326099f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.99992811f));
    return _mm512_scalef_ps(p, whole);
}

/* Scores of a query row to weights for keys [start, stop) of the chunk, of which it sees [low, high). */
static void weigh_row(Scratch *s, int64_t strip, int64_t row, int64_t start, int64_t stop, int64_t low, int64_t high,
                      float scale, int64_t padded) {
    int64_t index = strip * STRIP + row;
    float *scores = s->scores[row];
    if (low > start || high < stop)
        for (int64_t i = start; i < stop; i += 16) {
            __mmask16 seen = lanes(high - i) & (__mmask16)~lanes(low - i);
            _mm512_mask_storeu_ps(scores + i, (__mmask16)~seen, _mm512_set1_ps(HIDDEN));
        }
    __m512 highest = _mm512_max_ps(_mm512_load_ps(scores + start), _mm512_load_ps(scores + start + 16));
    for (int64_t i = start + 32; i < stop; i += 32)
        highest = _mm512_max_ps(highest, _mm512_max_ps(_mm512_load_ps(scores + i), _mm512_load_ps(scores + i + 16)));
    float before = s->largest[index], largest = fmaxf(before, _mm512_reduce_max_ps(highest) * (scale * LOG2_E));
    __m512 factor = _mm512_set1_ps(scale * LOG2_E), offset = _mm512_set1_ps(largest);
    __m512 sum_a = _mm512_setzero_ps(), sum_b = sum_a;
    element *weights = s->weights[row / 16][start / LINE][row % 16];
    for (int64_t i = start; i < stop; i += 32, weights += TILE) {
        __m512 a = weight_of(_mm512_fmsub_ps(_mm512_load_ps(scores + i), factor, offset));
        __m512 b = weight_of(_mm512_fmsub_ps(_mm512_load_ps(scores + i + 16), factor, offset));
        sum_a = _mm512_add_ps(sum_a, a);
        sum_b = _mm512_add_ps(sum_b, b);
        _mm512_store_si512(weights, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
    float sum = _mm512_reduce_add_ps(_mm512_add_ps(sum_a, sum_b));
    if (before != largest) { /* what was summed before weighs less now */
        __m512 fade = exp2_16(_mm512_set1_ps(before - largest));
        s->sum[index] *= _mm512_cvtss_f32(fade);
        for (int64_t i = 0; i < padded; i += 16)
            _mm512_store_ps(s->sums[index] + i, _mm512_mul_ps(fade, _mm512_load_ps(s->sums[index] + i)));
    }
    s->largest[index] = largest;
    s->sum[index] += sum;
}

/* sums of the strip += weights @ values over keys [start, stop). */
static void add_values(Scratch *s, int64_t strip, int64_t start, int64_t stop, int64_t padded) {
    float(*sums)[MAX_HEAD_DIM] = s->sums + strip * STRIP;
    for (int64_t d = 0; d < padded; d += 32) {
        _tile_loadd(0, sums[0] + d, sizeof sums[0]);
        _tile_loadd(1, sums[0] + d + 16, sizeof sums[0]);
        _tile_loadd(2, sums[16] + d, sizeof sums[0]);
        _tile_loadd(3, sums[16] + d + 16, sizeof sums[0]);
        for (int64_t at = start / LINE; at < stop / LINE; at++) {
            const element *values = s->values + (at * (padded / 16) + d / 16) * TILE;
            _tile_loadd(4, s->weights[0][at], 64);
            _tile_loadd(6, values, 64);
            _tile_loadd(7, values + TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, s->weights[1][at], 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, sums[0] + d, sizeof sums[0]);
        _tile_stored(1, sums[0] + d + 16, sizeof sums[0]);
        _tile_stored(2, sums[16] + d, sizeof sums[0]);
        _tile_stored(3, sums[16] + d + 16, sizeof sums[0]);
    }
}

static void write_rows(const Scratch *s, const AttentionPlan *plan, const AttentionTask *task, const Rows *out) {
    int64_t head_dim = plan->head_dim, num_rows = (int64_t)task->num_tokens * task->num_heads;
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t token = task->token + row / task->num_heads, head = task->first_head + row % task->num_heads;
        __m512 share = _mm512_set1_ps(1.0f / s->sum[row]);
        _Alignas(64) element values[MAX_HEAD_DIM];
        for (int64_t i = 0; i < head_dim; i += 16)
            store16(values + i, 0xffff, _mm512_mul_ps(share, _mm512_load_ps(s->sums[row] + i)));
        write_row(out, token, head * head_dim, values, head_dim);
        if (head == plan->num_heads - 1) clear_padding(out, token, plan->num_heads * head_dim);
    }
}

void prefill_task(const AttentionPlan *plan, const AttentionTask *task, const element *query, int64_t query_stride,
                  const Cache *cache, float scale, const Rows *out) {
    if (kept_scratch == NULL) kept_scratch = aligned_alloc(64, round_up(sizeof(Scratch), 64));
    if (kept_scratch == NULL) abort(); /* 1.3 MiB for each thread: the machine is lost */
    Scratch *s = kept_scratch;
    int64_t heads = task->num_heads, num_rows = task->num_tokens * heads, num_strips = divide_up(num_rows, STRIP);
    int64_t padded = round_up(plan->head_dim, 32), num_lines = divide_up(plan->head_dim, LINE);
    configure_tiles();
    stage_queries(s, task, query, query_stride, plan->head_dim);
    for (int64_t row = 0; row < num_strips * STRIP; row++) {
        s->largest[row] = HIDDEN;
        s->sum[row] = 0;
        memset(s->sums[row], 0, (size_t)padded * sizeof(float));
    }
    for (int64_t first = task->first_key / 32 * 32; first < task->end_key; first += KEYS) {
        int64_t count = min64(KEYS, task->end_key - first);
        stage_keys(s, plan, task, cache, first, count);
        for (int64_t strip = 0; strip < num_strips; strip++) {
            int64_t last_row = min64(num_rows, (strip + 1) * STRIP) - 1;
            int64_t earliest = task->position + strip * STRIP / heads, latest = task->position + last_row / heads;
            int64_t low = plan->window ? max64(0, earliest - plan->window + 1 - first) : 0;
            int64_t start = low / 32 * 32, stop = round_up(min64(count, latest + 1 - first), 32);
            if (start >= stop) continue;
            score_strip(s, strip, start, stop, num_lines);
            for (int64_t row = 0; row < STRIP; row++) { /* rows past the last one see what the last one sees */
                int64_t position = task->position + min64(strip * STRIP + row, num_rows - 1) / heads - first;
                weigh_row(s, strip, row, start, stop, plan->window ? position - plan->window + 1 : 0,
                          min64(count, position + 1), scale, padded);
            }
            add_values(s, strip, start, stop, padded);
        }
    }
    write_rows(s, plan, task, out);
}

#else

void prefill_task(const AttentionPlan *plan, const AttentionTask *task, const element *query, int64_t query_stride,
                  const Cache *cache, float scale, const Rows *out) {
    (void)plan, (void)task, (void)query, (void)query_stride, (void)cache, (void)scale, (void)out;
    abort(); /* has_prefill() is false: no such task is planned */
}

#endif
