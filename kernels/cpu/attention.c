/* Attention of few query rows at a time over the paged cache, and the plan that cuts a step into such tasks.
 *
 * A task is one KV head with all query heads that read it (up to 16 query rows) over a range of keys. The context of
 * a decode row is cut every CHUNK keys, at the same places whatever else is in the step; where that gives more than
 * one piece, each leaves its maximum, sum and weighted values, and a second round merges them. A prefill row is cut
 * into blocks of queries; those with many rows go to prefill.c where the processor has tiles.
 */
#include "attention.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ── the plan ────────────────────────────────────────────────────────────────────────────────────────────────────── */

static bool add_task(AttentionPlan *plan, AttentionTask task) {
    if (plan->num_tasks == plan->capacity) {
        int64_t capacity = plan->capacity ? 2 * plan->capacity : 64;
        AttentionTask *tasks = realloc(plan->tasks, (size_t)capacity * sizeof *tasks);
        if (tasks == NULL) return false;
        plan->tasks = tasks;
        plan->capacity = capacity;
    }
    plan->tasks[plan->num_tasks++] = task;
    return true;
}

/* Tasks of tokens [first, first + count) of a row for one KV head, `most_heads` query heads at a time. */
static bool add_head_tasks(AttentionPlan *plan, AttentionTask task, int64_t position, int64_t count,
                           int64_t most_heads) {
    int64_t group = plan->num_heads / plan->num_kv_heads;
    int64_t low = plan->window ? max64(0, position - plan->window + 1) : 0, high = position + count;
    bool is_cut = count == 1 && low / CHUNK != (high - 1) / CHUNK;
    task.position = (int32_t)position;
    task.num_tokens = (int32_t)count;
    for (int64_t head = 0; head < group; head += most_heads) {
        task.first_head = (int32_t)(task.kv_head * group + head);
        task.num_heads = (int32_t)min64(most_heads, group - head);
        task.partial = -1;
        task.num_partials = 0;
        task.first_key = (int32_t)low;
        task.end_key = (int32_t)high;
        if (!is_cut) {
            if (!add_task(plan, task)) return false;
            continue;
        }
        int64_t first_task = plan->num_tasks;
        for (int64_t key = low; key < high; key = (key / CHUNK + 1) * CHUNK) {
            task.first_key = (int32_t)key;
            task.end_key = (int32_t)min64(high, (key / CHUNK + 1) * CHUNK);
            task.partial = plan->num_partial_rows;
            plan->num_partial_rows += task.num_heads;
            if (!add_task(plan, task)) return false;
        }
        plan->tasks[first_task].num_partials = (int32_t)(plan->num_tasks - first_task);
    }
    return true;
}

static bool add_prefill_row(AttentionPlan *plan, const StepRows *rows, int64_t row) {
    int64_t start = rows->query_starts[row], count = rows->query_starts[row + 1] - start;
    int64_t group = plan->num_heads / plan->num_kv_heads;
    int64_t block = max64(1, TASK_ROWS / group), most_heads = min64(group, TASK_ROWS);
    if (has_prefill(plan->head_dim) && count * group > TASK_ROWS && group <= PREFILL_ROWS)
        block = PREFILL_ROWS / group, most_heads = group;
    int64_t num_blocks = divide_up(count, block);
    for (int64_t i = num_blocks - 1; i >= 0; i--) /* the longest first */
        for (int64_t head = 0; head < plan->num_kv_heads; head++) {
            int64_t first = i * block;
            AttentionTask task = {.row = (int32_t)row, .kv_head = (int32_t)head, .token = (int32_t)(start + first)};
            int64_t position = rows->seq_lens[row] - count + first;
            if (!add_head_tasks(plan, task, position, min64(block, count - first), most_heads)) return false;
        }
    return true;
}

static bool add_decode_row(AttentionPlan *plan, const StepRows *rows, int64_t row) {
    int64_t group = plan->num_heads / plan->num_kv_heads;
    for (int64_t head = 0; head < plan->num_kv_heads; head++) {
        AttentionTask task = {.row = (int32_t)row, .kv_head = (int32_t)head, .token = rows->query_starts[row]};
        if (!add_head_tasks(plan, task, rows->seq_lens[row] - 1, 1, min64(group, TASK_ROWS))) return false;
    }
    return true;
}

AttentionPlan *make_attention_plan(const StepRows *rows, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                   int64_t window) {
    AttentionPlan *plan = calloc(1, sizeof *plan);
    if (plan == NULL) return NULL;
    plan->rows = *rows;
    plan->num_heads = num_heads;
    plan->num_kv_heads = num_kv_heads;
    plan->head_dim = head_dim;
    plan->window = window;
    bool is_whole = true;
    for (int64_t row = rows->num_rows - 1; row >= 0 && is_whole; row--) { /* prefill rows, the largest tasks, first */
        int64_t count = rows->query_starts[row + 1] - rows->query_starts[row];
        if (rows->seq_lens[row] <= 0 || count <= 0) continue;
        is_whole = count == 1 ? add_decode_row(plan, rows, row) : add_prefill_row(plan, rows, row);
    }
    if (is_whole && plan->num_partial_rows) {
        int64_t floats = plan->num_partial_rows * partial_floats(head_dim);
        plan->partials = aligned_alloc(64, (size_t)floats * sizeof(float));
        is_whole = plan->partials != NULL;
    }
    if (is_whole) return plan;
    free_attention_plan(plan);
    return NULL;
}

void free_attention_plan(AttentionPlan *plan) {
    if (plan == NULL) return;
    free(plan->tasks);
    free(plan->partials);
    free(plan);
}

/* ── one task ────────────────────────────────────────────────────────────────────────────────────────────────────── */

typedef struct {
    int64_t num_rows; /* query rows: token by token, each with its heads */
    const element *queries[TASK_ROWS];
    int64_t low[TASK_ROWS], high[TASK_ROWS]; /* keys that each may see */
    float largest[TASK_ROWS], sum[TASK_ROWS]; /* of the scores so far, and of 2^(score - largest) */
    _Alignas(64) float scores[TASK_ROWS][CHUNK]; /* then weights */
    _Alignas(64) float values[TASK_ROWS][MAX_HEAD_DIM]; /* weighted; in the order of load32 */
    const element *keys[CHUNK], *value_rows[CHUNK]; /* where each of the chunk's keys lies */
#ifdef HAS_TILES
    _Alignas(64) uint32_t query_tiles[MAX_HEAD_DIM / LINE][16][16]; /* [pair][query row] */
#endif
} Task;

static void begin_task(Task *t, const AttentionPlan *plan, const AttentionTask *task, const element *query,
                       int64_t query_stride) {
    t->num_rows = (int64_t)task->num_tokens * task->num_heads;
    for (int64_t row = 0; row < t->num_rows; row++) {
        int64_t token = row / task->num_heads, head = task->first_head + row % task->num_heads;
        t->queries[row] = query + (task->token + token) * query_stride + head * plan->head_dim;
        t->high[row] = min64(task->end_key, task->position + token + 1);
        t->low[row] = plan->window ? max64(0, task->position + token + 1 - plan->window) : 0;
        t->largest[row] = -INFINITY;
        t->sum[row] = 0;
    }
    memset(t->values, 0, (size_t)t->num_rows * sizeof t->values[0]);
#ifdef HAS_TILES
    int64_t num_lines = divide_up(plan->head_dim, LINE);
    memset(t->query_tiles, 0, (size_t)num_lines * sizeof t->query_tiles[0]);
    for (int64_t row = 0; row < t->num_rows; row++)
        for (int64_t pair = 0; pair < plan->head_dim / 2; pair++)
            memcpy(&t->query_tiles[pair / 16][pair % 16][row], t->queries[row] + 2 * pair, 4);
#endif
}

/* Find the keys [first, first + count) of the task's row. */
static void locate(Task *t, const AttentionPlan *plan, const AttentionTask *task, const Cache *cache, int64_t first,
                   int64_t count) {
    const int32_t *table = plan->rows.block_tables + task->row * plan->rows.table_stride;
    for (int64_t i = 0; i < count;) {
        int64_t block = (first + i) / cache->block_size, offset = (first + i) % cache->block_size;
        const element *keys = cache_at(cache, table[block], 0, task->kv_head);
        const element *values = cache_at(cache, table[block], 1, task->kv_head);
        for (; offset < cache->block_size && i < count; offset++, i++) {
            t->keys[i] = keys + offset * cache->head_dim;
            t->value_rows[i] = values + offset * cache->head_dim;
        }
    }
}

INLINE void prefetch(const element *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch((const char *)from + i, _MM_HINT_T0);
}

INLINE __m512i query_line(const element *p, int64_t left) {
#ifdef ELEMENT_BF16
    return left >= LINE ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16((__mmask32)((1u << left) - 1), p);
#else
    return _mm512_maskz_loadu_epi32(lanes(left), p);
#endif
}

/* Scores of 16 keys, those past `count` taken from the last one. */
static void score_16(Task *t, int64_t at, int64_t count, int64_t head_dim) {
    for (int64_t row = 0; row < t->num_rows; row++) {
        __m512 sums[16];
        for (int64_t i = 0; i < 16; i++) {
            const element *key = t->keys[min64(at + i, count - 1)];
            sums[i] = _mm512_setzero_ps();
            for (int64_t j = 0; j < head_dim; j += LINE)
                sums[i] = dot_line(sums[i], query_line(t->queries[row] + j, head_dim - j),
                                   query_line(key + j, head_dim - j));
        }
        _mm512_store_ps(t->scores[row] + at, reduce_16x16(sums));
    }
}

#ifdef HAS_TILES
/* Tile 0: scores [16 keys][16 query rows]; 1, 2: a line of 16 keys, of queries; 3, 4: the same for half a line. */
static void configure_tiles(void) {
    TileConfig config = {.palette = 1};
    for (int tile = 0; tile < 3; tile++) shape_tile(&config, tile, 16, 64);
    shape_tile(&config, 3, 16, 32);
    shape_tile(&config, 4, 8, 64);
    _tile_loadconfig(&config);
}

/* The same for 16 keys that are neighbours in one block. */
static void score_tile(Task *t, int64_t at, int64_t head_dim) {
    _Alignas(64) float sums[16][16];
    int64_t stride = head_dim * (int64_t)sizeof(element), line = 0;
    _tile_zero(0);
    for (; (line + 1) * LINE <= head_dim; line++) {
        _tile_loadd(1, t->keys[at] + line * LINE, stride);
        _tile_loadd(2, t->query_tiles[line], 64);
        _tile_dpbf16ps(0, 1, 2);
    }
    if (head_dim % LINE) {
        _tile_loadd(3, t->keys[at] + line * LINE, stride);
        _tile_loadd(4, t->query_tiles[line], 64);
        _tile_dpbf16ps(0, 3, 4);
    }
    _tile_stored(0, sums, 64);
    __m512i column = _mm512_mullo_epi32(_mm512_set1_epi32(16), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,
                                                                                 12, 13, 14, 15));
    for (int64_t row = 0; row < t->num_rows; row++)
        _mm512_store_ps(t->scores[row] + at, _mm512_i32gather_ps(column, sums[0] + row, 4));
}
#endif

/* Scores of the chunk's keys to weights 2^(score - largest); those that a row may not see weigh 0. */
static void weigh(Task *t, int64_t first, int64_t count, float scale, int64_t head_dim) {
    __m512 factor = _mm512_set1_ps(scale * LOG2_E);
    for (int64_t row = 0; row < t->num_rows; row++) {
        float *scores = t->scores[row];
        int64_t low = t->low[row] - first, high = min64(count, t->high[row] - first);
        __m512 highest = _mm512_set1_ps(-INFINITY);
        for (int64_t i = 0; i < count; i += 16) {
            __mmask16 seen = lanes(high - i) & (__mmask16)~lanes(low - i);
            __m512 score = _mm512_mul_ps(_mm512_load_ps(scores + i), factor);
            score = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, score);
            _mm512_store_ps(scores + i, score);
            highest = _mm512_max_ps(highest, score);
        }
        float largest = fmaxf(t->largest[row], _mm512_reduce_max_ps(highest));
        __m512 offset = _mm512_set1_ps(largest == -INFINITY ? 0 : largest), sum = _mm512_setzero_ps();
        for (int64_t i = 0; i < count; i += 16) {
            __m512 weight = exp2_16(_mm512_sub_ps(_mm512_load_ps(scores + i), offset));
            _mm512_store_ps(scores + i, weight);
            sum = _mm512_add_ps(sum, weight);
        }
        if (t->largest[row] != -INFINITY && t->largest[row] != largest) { /* what was summed before weighs less now */
            __m512 fade = exp2_16(_mm512_set1_ps(t->largest[row] - largest));
            t->sum[row] *= _mm512_cvtss_f32(fade);
            for (int64_t i = 0; i < round_up(head_dim, 32); i += 16)
                _mm512_store_ps(t->values[row] + i, _mm512_mul_ps(fade, _mm512_load_ps(t->values[row] + i)));
        }
        t->largest[row] = largest;
        t->sum[row] += _mm512_reduce_add_ps(sum);
    }
}

/* values[first .. first + rows) += weights * value rows; `rows` is a constant at every call. */
INLINE void add_values(Task *t, int64_t first, int64_t count, int64_t head_dim, const int rows) {
    for (int64_t d = 0; d < head_dim; d += 32) {
        __m512 a[8], b[8];
        for (int row = 0; row < rows; row++) {
            a[row] = _mm512_load_ps(t->values[first + row] + d);
            b[row] = _mm512_load_ps(t->values[first + row] + d + 16);
        }
        for (int64_t i = 0; i < count; i++) {
            Floats32 value = load32(t->value_rows[i] + d, head_dim - d);
#pragma GCC unroll 8
            for (int row = 0; row < rows; row++) {
                __m512 weight = _mm512_set1_ps(t->scores[first + row][i]);
                a[row] = _mm512_fmadd_ps(weight, value.a, a[row]);
                b[row] = _mm512_fmadd_ps(weight, value.b, b[row]);
            }
        }
        for (int row = 0; row < rows; row++) {
            _mm512_store_ps(t->values[first + row] + d, a[row]);
            _mm512_store_ps(t->values[first + row] + d + 16, b[row]);
        }
    }
}

static void add_all_values(Task *t, int64_t count, int64_t head_dim) {
    for (int64_t row = 0; row < t->num_rows;) {
        int64_t left = t->num_rows - row;
        if (left >= 8) add_values(t, row, count, head_dim, 8), row += 8;
        else if (left >= 4) add_values(t, row, count, head_dim, 4), row += 4;
        else if (left == 3) add_values(t, row, count, head_dim, 3), row += 3;
        else if (left == 2) add_values(t, row, count, head_dim, 2), row += 2;
        else add_values(t, row, count, head_dim, 1), row += 1;
    }
}

static void attend_chunk(Task *t, const Cache *cache, int64_t first, int64_t count, float scale) {
    int64_t head_dim = cache->head_dim, bytes = head_dim * (int64_t)sizeof(element);
    for (int64_t i = 0; i < min64(32, count); i++) prefetch(t->keys[i], bytes);
    for (int64_t at = 0; at < count; at += 16) {
        for (int64_t i = at; i < min64(at + 16, count); i++) {
            if (i + 32 < count) prefetch(t->keys[i + 32], bytes);
            prefetch(t->value_rows[i], bytes);
        }
#ifdef HAS_TILES
        if (cache->block_size % 16 == 0 && (first + at) % 16 == 0 && head_dim % 16 == 0) {
            score_tile(t, at, head_dim); /* reads to the end of the block: what lies there is finite and not seen */
            continue;
        }
#endif
        score_16(t, at, count, head_dim);
    }
    weigh(t, first, count, scale, head_dim);
    add_all_values(t, count, head_dim);
}

/* One query row's weighted values to its place in the output; the last head also clears the panel's padding. */
static void write_head(const AttentionPlan *plan, const Rows *out, int64_t token, int64_t head, const float *values,
                       float sum) {
    int64_t head_dim = plan->head_dim;
    __m512 share = _mm512_set1_ps(1.0f / sum);
    _Alignas(64) element row[MAX_HEAD_DIM];
    for (int64_t i = 0; i < head_dim; i += 32) {
        Floats32 v = {_mm512_mul_ps(share, _mm512_load_ps(values + i)),
                      _mm512_mul_ps(share, _mm512_load_ps(values + i + 16))};
        store32(row + i, min64(32, head_dim - i), v);
    }
    write_row(out, token, head * head_dim, row, head_dim);
    if (head == plan->num_heads - 1) clear_padding(out, token, plan->num_heads * head_dim);
}

static void run_task(AttentionPlan *plan, const AttentionTask *task, const element *query, int64_t query_stride,
                     const Cache *cache, float scale, const Rows *out) {
    Task t;
    begin_task(&t, plan, task, query, query_stride);
#ifdef HAS_TILES
    configure_tiles();
#endif
    /* Chunks begin at multiples of 16 keys, so that they are neighbours in a block; what is too early is not seen. */
    for (int64_t key = task->first_key / 16 * 16; key < task->end_key; key += CHUNK) {
        int64_t count = min64(CHUNK, task->end_key - key);
        locate(&t, plan, task, cache, key, count);
        attend_chunk(&t, cache, key, count, scale);
    }
    for (int64_t row = 0; row < t.num_rows; row++) {
        if (task->partial < 0) {
            write_head(plan, out, task->token + row / task->num_heads, task->first_head + row % task->num_heads,
                       t.values[row], t.sum[row]);
            continue;
        }
        float *partial = plan->partials + (task->partial + row) * partial_floats(plan->head_dim);
        partial[0] = t.largest[row];
        partial[1] = t.sum[row];
        memcpy(partial + 16, t.values[row], (size_t)round_up(plan->head_dim, 32) * sizeof(float));
    }
}

/* Merge what the chunks of one decode row and KV head have left; `task` is the first of them. */
static void merge_partials(const AttentionPlan *plan, const AttentionTask *task, const Rows *out) {
    int64_t size = partial_floats(plan->head_dim);
    for (int64_t row = 0; row < task->num_heads; row++) {
        const float *first = plan->partials + (task->partial + row) * size;
        int64_t stride = task->num_heads * size;
        float largest = -INFINITY, sum = 0;
        for (int64_t i = 0; i < task->num_partials; i++) largest = fmaxf(largest, first[i * stride]);
        _Alignas(64) float values[MAX_HEAD_DIM] = {0};
        for (int64_t i = 0; i < task->num_partials; i++) {
            const float *partial = first + i * stride;
            if (partial[0] == -INFINITY && partial[1] == 0) continue;
            __m512 fade = exp2_16(_mm512_set1_ps(partial[0] - largest));
            sum += partial[1] * _mm512_cvtss_f32(fade);
            for (int64_t d = 0; d < round_up(plan->head_dim, 32); d += 16)
                _mm512_store_ps(values + d, _mm512_fmadd_ps(fade, _mm512_load_ps(partial + 16 + d),
                                                            _mm512_load_ps(values + d)));
        }
        write_head(plan, out, task->token, task->first_head + row, values, sum);
    }
}

void attend(AttentionPlan *plan, const element *query, int64_t query_stride, const Cache *cache, float scale,
            const Rows *out, const Team *team) {
    for (int64_t i; (i = take_task(team, 0)) < plan->num_tasks;) {
        const AttentionTask *task = &plan->tasks[i];
        if (task->num_tokens * task->num_heads > TASK_ROWS)
            prefill_task(plan, task, query, query_stride, cache, scale, out);
        else
            run_task(plan, task, query, query_stride, cache, scale, out);
    }
    team_wait(team);
    if (team->id == 0) atomic_store(&team->shared->next_task[0], 0);
    if (plan->num_partial_rows == 0) return;
    for (int64_t i; (i = take_task(team, 1)) < plan->num_tasks;)
        if (plan->tasks[i].num_partials) merge_partials(plan, &plan->tasks[i], out);
    team_wait(team);
    if (team->id == 0) atomic_store(&team->shared->next_task[1], 0);
}
