/* The attention plan of a step, for attention.c and prefill.c. */
#ifndef TOKENLOOM_ATTENTION_H
#define TOKENLOOM_ATTENTION_H

#include "bytes.h"

#include <string.h>

#define CHUNK 256 /* keys of a split of a decode token, and keys per iteration of a task */
#ifdef __AVX512F__
#define TASK_ROWS 16 /* query rows of a task of attention.c */
#ifdef HAS_TILES
#define FEW_ROWS TASK_ROWS /* query rows of a prefill row that attention.c still computes */
#else
#define FEW_ROWS 5
#endif
#else
#define TASK_ROWS 24 /* more rows share the cost of packing a task's keys and values into tiles */
#endif
#define PREFILL_ROWS 512 /* query rows of a task of prefill.c */
#define HEAD_STRIDE (MAX_HEAD_DIM + 16) /* the padding spreads rows over the sets of the cache */

typedef struct {
    int32_t row, kv_head;
    int32_t first_head, num_heads; /* query heads of that KV head */
    int32_t token, num_tokens; /* the first token's index in the step */
    int32_t position; /* of the first token in its request */
    int32_t first_key, end_key;
    int32_t is_decode; /* of decode tokens */
    int32_t num_partials; /* in the first task of split tokens the number of splits, else 0 */
    int64_t partial; /* index of its first partial row; -1: it writes the output itself */
} AttentionTask;

struct AttentionPlan {
    StepRows rows;
    int64_t num_heads, num_kv_heads, head_dim, window;
    int32_t is_batch_invariant;
    AttentionTask *tasks;
    int64_t num_tasks, capacity;
    float *partials; /* [num_partial_rows]: largest, sum, 14 unused, then weighted values in the order of load32 */
    int64_t num_partial_rows;
};

INLINE int64_t partial_floats(int64_t head_dim) { return 16 + round_up(head_dim, 32); }

/* Returns the end of the keys that the task's token `index` attends to. */
INLINE int64_t seen_end(const AttentionPlan *plan, const AttentionTask *task, int64_t index) {
    const int32_t *see_until = plan->rows.see_until;
    int64_t own = task->position + index, last = see_until == NULL ? own : see_until[task->token + index];
    if (plan->rows.are_windows_two_sided && plan->window) last = min64(last, own + plan->window - 1);
    return 1 + last;
}

/* Whether prefill.c computes so many tokens of a prefill row, else attention.c. */
INLINE bool is_prefill(int64_t num_tokens, int64_t num_heads, int64_t head_dim) {
#ifdef __AVX512F__
    return head_dim % 16 == 0 && num_tokens > 1 && num_tokens * num_heads > FEW_ROWS;
#else
    (void)num_tokens, (void)num_heads, (void)head_dim;
    return false;
#endif
}

/* Keys or values of one block. */
typedef struct {
    char *tile;
    int64_t offset, count; /* from the tile's first vector on */
} Piece;

/* Returns the first piece of the row's keys (side 0) or values (1) [first, first + count). */
INLINE Piece piece_at(const AttentionPlan *plan, const AttentionTask *task, const Cache *cache, int side, int64_t first,
                      int64_t count) {
    int64_t block = first / cache->block_size, offset = first - block * cache->block_size;
    int32_t id = plan->rows.block_tables[task->row * plan->rows.table_stride + block];
    return (Piece){cache_at(cache, id, side, task->kv_head), offset, min64(count, cache->block_size - offset)};
}

/* Finds the addresses of keys or values [first, first + count); of a cache of bytes also their scales, followed by 0 up to
 * a multiple of 32. Keys in blocks before that of the task's first key are masked, but a weight of 0 times NaN is NaN, and
 * their block may be the null block: each stands for the first key of that block, with scale 0. */
INLINE void locate(const char **at, float *scales, const AttentionPlan *plan, const AttentionTask *task,
                   const Cache *cache, int side, int64_t first, int64_t count) {
    int64_t num_bytes = numbers_bytes(cache->kind, cache->head_dim), i = 0;
    int64_t start = task->first_key / cache->block_size * cache->block_size;
    if (first < start) {
        const char *known = piece_at(plan, task, cache, side, start, 1).tile;
        for (; first + i < start; i++) {
            at[i] = known;
            if (cache->kind != ELEMENT_CACHE) scales[i] = 0;
        }
    }
    while (i < count) {
        Piece piece = piece_at(plan, task, cache, side, first + i, count - i);
        const char *from = piece.tile + piece.offset * num_bytes;
        if (cache->kind != ELEMENT_CACHE)
            memcpy(scales + i, scales_of(cache, piece.tile) + piece.offset, (size_t)piece.count * sizeof *scales);
        for (int64_t end = i + piece.count; i < end; i++, from += num_bytes) at[i] = from;
    }
    if (cache->kind != ELEMENT_CACHE)
        for (; i % 32; i++) scales[i] = 0;
}

/* Multiplies `count` scores at a multiple of 64 bytes by the scales of their keys. */
INLINE void scale_scores(float *scores, const float *scales, int64_t count) {
    for (int64_t i = 0; i < count; i += 16)
        store_floats(scores + i, multiply16(load_floats(scores + i), load_floats(scales + i)));
}

/* Fetches memory into the L2 cache. */
INLINE void prefetch(const char *from, int64_t num_bytes) {
    for (int64_t i = 0; i < num_bytes; i += 64) _mm_prefetch(from + i, _MM_HINT_T1);
}

/* Bytes to prefetch. */
typedef struct {
    const char *from;
    int64_t num_bytes;
} Span;

/* The keys, then values, of the next chunk or task, prefetched line by line. */
typedef struct {
    Span spans[4 * CHUNK];
    int64_t num_spans, span, offset;
} Prefetch;

/* Prefetches in the order of memory, which the hardware prefetcher follows. */
INLINE void fetch_next(Prefetch *next) {
    if (next->span >= next->num_spans) return;
    const Span *span = &next->spans[next->span];
    _mm_prefetch(span->from + next->offset, _MM_HINT_T1);
    next->offset += 64;
    if (next->offset >= span->num_bytes) next->offset = 0, next->span++;
}

/* Applies scale and soft cap to `count` scores at a multiple of 64 bytes. */
static inline void cap_scores(float *scores, int64_t count, const Scoring *scoring) {
    Floats inner = fill16(scoring->scale / scoring->softcap), cap = fill16(scoring->softcap);
    for (int64_t i = 0; i < count; i += 16)
        store_floats(scores + i, multiply16(cap, tanh_16(multiply16(load_floats(scores + i), inner))));
}

/* Returns the biases of a head's query at index `position`, from those of key 0 on; NULL if there are none. */
INLINE const float *bias_of(const Scoring *scoring, int64_t head, int64_t position) {
    return scoring->bias == NULL ? NULL : scoring->bias + head * scoring->num_distances + scoring->num_distances / 2 - position;
}

/* Applies the scale, unless a cap has applied it, to `count` scores, and adds their biases. */
static inline void add_biases(float *scores, const float *bias, int64_t count, const Scoring *scoring) {
    const float scale = scoring->softcap ? 1.0f : scoring->scale;
    for (int64_t i = 0; i < count; i++) scores[i] = scores[i] * scale + bias[i];
}

/* Returns the factor that turns scores, with or without a cap or biases, into exponents of 2. */
INLINE float exponent_factor(const Scoring *scoring) {
    return (scoring->softcap || scoring->bias != NULL ? 1.0f : scoring->scale) * LOG2_E;
}

/* Returns the exponent of a head's sink; without one -infinity. */
INLINE float sink_of(const Scoring *scoring, int64_t head) {
    return scoring->sinks == NULL ? -__builtin_inff() : scoring->sinks[head] * LOG2_E;
}

/* Runs a task of more than TASK_ROWS query rows. */
void prefill_task(const AttentionPlan *plan, const AttentionTask *task, const element *query, int64_t query_stride,
                  const Cache *cache, const Scoring *scoring, const Rows *out);

/* Copies elements to columns [column, column + count) of a row, across the lines of a panel. */
INLINE void write_row(const Rows *out, int64_t row, int64_t column, const element *from, int64_t count) {
    while (count > 0) {
        int64_t piece = out->panel_rows ? min64(count, LINE - column % LINE) : count;
        memcpy(rows_at(out, row, column), from, (size_t)piece * sizeof(element));
        from += piece, column += piece, count -= piece;
    }
}

/* Clears a panel's row from `column` to the end of its line. */
INLINE void clear_padding(const Rows *out, int64_t row, int64_t column) {
    if (out->panel_rows && column % LINE)
        memset(rows_at(out, row, column), 0, (size_t)(LINE - column % LINE) * sizeof(element));
}

#endif
