/* Layouts and interfaces of the kernels: lines, tiles, panels, packed linears, teams of threads.
 *
 * Each source is compiled for one element type (elements.h) and one instruction level: AVX2 with FMA, or AVX-512
 * (__AVX512F__), optionally with AVX512-BF16 and AMX (__AVX512BF16__, __AMX_BF16__).
 *
 * Line   64 bytes: LINE elements. A row of a weight or an activation is a whole number of lines, padded with zeros.
 * Tile   16 lines, 1 KiB: LINE inputs x 16 outputs of a weight, in the layout of AMX's second operand. bf16:
 *        [LINE / 2 pairs of inputs][16 outputs][2], float32: [LINE inputs][16 outputs]. Two tiles are a pair: with
 *        AVX-512 their lines alternate, so that reading both is one sequential stream.
 * Panel  an activation [num_rows][num_columns] cut into groups of 16 rows (the last may have fewer) and lines:
 *        [group][line of the row][row of the group][LINE]. A group's lines are AMX's first operand, and every read is
 *        sequential.
 */
#ifndef TOKENLOOM_KERNELS_H
#define TOKENLOOM_KERNELS_H

#include "elements.h"

#include <omp.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))

#if defined(ELEMENT_BF16) && defined(__AMX_BF16__)
#define HAS_TILES
#endif

#define GROUP_ROWS 16 /* rows of a panel's group, outputs of a tile */
#define TILE (LINE * 16) /* elements of a tile */
#ifdef __AVX512F__
#define TILE_STEP (2 * LINE) /* elements between lines of a tile of a pair */
#define SECOND_TILE LINE /* elements from the first to the second tile of a pair */
#else
#define TILE_STEP LINE
#define SECOND_TILE TILE
#endif
#define TILE_STEP_BYTES (TILE_STEP * (int64_t)sizeof(element))
#define WORDS(elements) ((elements) * (int64_t)sizeof(element) / 4)
#define PAIR_OUTPUTS 32 /* outputs of a pair of tiles, the unit of work of a linear */

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

/* ── teams ───────────────────────────────────────────────────────────────────────────────────────────────────────── */

/* The threads of a parallel region pass through the same stages. The work of a stage is cut into pieces, which threads
 * take one at a time; a stage ends when all its pieces are finished. So a thread without a core delays the others by at
 * most the piece that it has taken. */
typedef struct {
    _Alignas(64) atomic_llong taken; /* number of the current stage << 32 | number of its pieces that are taken */
    _Alignas(64) atomic_llong finished; /* number of its pieces that are finished */
    _Alignas(64) atomic_llong early_taken; /* number of the last stage with early pieces << 32 | those that are taken */
    _Alignas(64) atomic_llong early_finished; /* the same of those that are finished */
} Shared;

typedef struct Upcoming Upcoming;

typedef struct {
    int64_t size, stage; /* number of threads; this thread's stage */
    Shared *shared;
    Upcoming *upcoming; /* the keys and values that this thread's products prefetch, or NULL */
} Team;

typedef struct {
    int64_t start, stop;
} Range;

/* The code between them runs in each of `num_threads` threads (a variable of the caller), with a variable `team`. */
#define BEGIN_TEAM                                                                                                     \
    Shared shared_ = {0};                                                                                              \
    _Pragma("omp parallel num_threads(num_threads)") {                                                                 \
        Team team_ = {omp_get_num_threads(), 0, &shared_, NULL}, *team = &team_;
#define END_TEAM                                                                                                       \
        release_tiles();                                                                                               \
    }

/* Takes a piece of this stage, which has `num_pieces`; returns its number, or num_pieces if all are taken. */
INLINE int64_t take_piece(Team *team, int64_t num_pieces) {
    long long taken = atomic_load_explicit(&team->shared->taken, memory_order_acquire);
    while (taken >> 32 == team->stage) {
        int64_t piece = taken & 0xffffffff;
        if (piece == num_pieces && num_pieces) break;
        long long next = num_pieces ? taken + 1 : (team->stage + 1) << 32; /* a stage without work ends at once */
        if (atomic_compare_exchange_weak(&team->shared->taken, &taken, next)) return piece;
    }
    return num_pieces;
}

/* Must be called for each taken piece, after its last write. */
INLINE void finish_piece(Team *team, int64_t num_pieces) {
    if (atomic_fetch_add_explicit(&team->shared->finished, 1, memory_order_acq_rel) != num_pieces - 1) return;
    atomic_store_explicit(&team->shared->finished, 0, memory_order_relaxed);
    atomic_store_explicit(&team->shared->taken, (team->stage + 1) << 32, memory_order_release);
}

/* Waits until this stage ends: spins, then yields the core. */
void end_stage(Team *team);

/* A stage may have early pieces, which write what its pieces read: each thread takes early pieces while there are any,
 * then pieces, and waits for the others' early pieces only where it first reads. */

/* Takes an early piece of this stage; returns its number, or num_pieces if all are taken. */
INLINE int64_t take_early(Team *team, int64_t num_pieces) {
    long long taken = atomic_load_explicit(&team->shared->early_taken, memory_order_acquire);
    while (taken >> 32 <= team->stage) {
        int64_t piece = taken >> 32 == team->stage ? taken & 0xffffffff : 0;
        if (piece == num_pieces) break;
        long long next = (long long)team->stage << 32 | (piece + 1);
        if (atomic_compare_exchange_weak(&team->shared->early_taken, &taken, next)) return piece;
    }
    return num_pieces;
}

/* Must be called for each early piece that was taken, after its last write. */
INLINE void finish_early(Team *team) {
    long long finished = atomic_load_explicit(&team->shared->early_finished, memory_order_acquire), next;
    do next = (finished >> 32 == team->stage ? finished : (long long)team->stage << 32) + 1;
    while (!atomic_compare_exchange_weak(&team->shared->early_finished, &finished, next));
}

/* Waits until all early pieces of this stage are finished; called before a piece of the stage is finished. */
void await_early(const Team *team, int64_t num_pieces);

/* Returns uninitialized memory of this thread, 64-byte aligned, valid until the thread's next call. */
void *thread_scratch(int64_t num_bytes);

/* Returns the range of one of `num_pieces` pieces of `total` items, with sizes that differ by at most one. */
INLINE Range share(int64_t total, int64_t piece, int64_t num_pieces) {
    Range range = {total * piece / num_pieces, total * (piece + 1) / num_pieces};
    return range;
}

/* A stage in pieces of equal size, one per thread:
 *     for (Range range; take_share(team, total, &range); finish_share(team, total)) … */
INLINE int64_t num_shares(int64_t total, const Team *team) { return min64(total, team->size); }
INLINE bool take_share(Team *team, int64_t total, Range *range) {
    int64_t num_pieces = num_shares(total, team), piece = take_piece(team, num_pieces);
    if (piece < num_pieces) *range = share(total, piece, num_pieces);
    return piece < num_pieces;
}
INLINE void finish_share(Team *team, int64_t total) { finish_piece(team, num_shares(total, team)); }

/* A stage in pieces of falling size: a piece per thread for half of the items, then for half of the rest, at last one
 * by one. Few items are split equally. */
INLINE bool is_falling(int64_t total, const Team *team) { return team->size > 1 && total >= 4 * team->size; }
INLINE int64_t num_falling(int64_t total, const Team *team) {
    if (!is_falling(total, team)) return num_shares(total, team);
    int64_t count = 0, left = total;
    for (; left > 2 * team->size; left /= 2) count += team->size;
    return count + left;
}
INLINE bool take_falling(Team *team, int64_t total, Range *range) {
    if (!is_falling(total, team)) return take_share(team, total, range);
    int64_t num_pieces = num_falling(total, team), piece = take_piece(team, num_pieces), left = total;
    if (piece == num_pieces) return false;
    for (; left > 2 * team->size && piece >= team->size; left /= 2) piece -= team->size;
    *range = left > 2 * team->size ? share(left - left / 2, piece, team->size) : (Range){piece, piece + 1};
    range->start += total - left, range->stop += total - left;
    return true;
}
INLINE void finish_falling(Team *team, int64_t total) { finish_piece(team, num_falling(total, team)); }

/* ── rows: an activation, row by row or as a panel ───────────────────────────────────────────────────────────────── */

typedef struct {
    element *data;
    int64_t stride; /* elements between rows; of a panel the number of columns, a multiple of LINE */
    int64_t panel_rows; /* 0: not a panel */
} Rows;

/* Returns the address of element (row, column); the rest of its line follows. */
INLINE element *rows_at(const Rows *rows, int64_t row, int64_t column) {
    if (rows->panel_rows == 0) return rows->data + row * rows->stride + column;
    int64_t first = row / GROUP_ROWS * GROUP_ROWS;
    int64_t height = min64(GROUP_ROWS, rows->panel_rows - first);
    return rows->data + first * rows->stride + (column / LINE * height + row - first) * LINE + column % LINE;
}

/* Returns the elements from a line of a panel's row to the next one. */
INLINE int64_t line_step(const Rows *panel, int64_t row) {
    return min64(GROUP_ROWS, panel->panel_rows - row / GROUP_ROWS * GROUP_ROWS) * LINE;
}

/* ── low_rank.c: rows with adapters ──────────────────────────────────────────────────────────────────────────────── */

typedef struct LowRank LowRank; /* the update of a linear's outputs by an adapter, see low_rank.h */

/* Rows of one slot in a block of BLOCK_ROWS rows. */
typedef struct {
    int32_t slot, block;
    uint32_t rows; /* a bit for each row of the block */
} SlotRun;

/* The rows that have an adapter. */
typedef struct {
    const SlotRun *runs; /* [num_runs], in the order of blocks */
    const int32_t *starts; /* [number of blocks + 1]: first run of each block */
    const int32_t *order; /* [num_runs]: the runs in the order of slots, or NULL */
    int64_t num_runs; /* at least 1 */
    const int32_t *slots; /* [number of rows] */
    int64_t num_rank_tiles; /* the largest of all updates */
    element *shrunk; /* scratch memory [rows][shrunk_stride] */
    int64_t shrunk_stride; /* num_rank_tiles * 16 */
} Adapted;

#define BLOCK_ROWS 32 /* rows that a pair of tiles is multiplied with at a time: two groups of a panel */

/* ── pack.c ──────────────────────────────────────────────────────────────────────────────────────────────────────── */

/* As in contract.py; all but the last are also activations without gates. */
typedef enum { NO_ACTIVATION, SILU, GELU, GELU_TANH, QUICK_GELU, RELU, RELU2, CLAMP, SWIGLU_CLAMPED } ActivationKind;

/* Whole numbers by which scales and mins of a group of lines become those of its lines, for 32 outputs each. */
typedef enum {
    NO_MULTIPLES,
    LINE_MULTIPLES, /* unsigned: of the line's scale; of its min */
    HALF_MULTIPLES, /* signed: of the scale of the line's first half; of the second's. Half of the codes' range is 0 */
    HALF_PAIRS, /* for each half of the line: of its scale in the low 4 bits, of its min in the high ones */
} MultiplesKind;

/* A part of a weight in 4 to 8 bits: (code - zero) * scale, code * scale - min, or a level * scale. See codes.h. Pairs of
 * tiles are counted from first_pair. */
typedef struct {
    int64_t first_pair; /* of the weight's */
    const uint8_t *codes; /* [num_pairs][num_lines][2 tiles] */
    const float *scales; /* [num_pairs][32] of outputs that have one group, else NULL */
    const uint16_t *halves; /* [num_pairs][num_groups][32] in half precision of others */
    const uint8_t *zeros; /* the same for 4 bits without mins, in steps; NULL for 8: ZERO_CODE */
    const uint16_t *mins; /* the same in half precision, or NULL */
    const uint8_t *multiples; /* [num_pairs][num_lines][2][32], or NULL */
    const uint8_t *levels; /* [16]: the codes of 8 bits that those of 4 bits stand for, or NULL */
    int64_t num_groups, group_lines; /* groups of inputs; lines of a group */
    int32_t num_bits; /* of a code */
    int32_t multiples_kind; /* a MultiplesKind */
} Codes;

typedef struct {
    const element *weight; /* [num_pairs][num_lines][2 tiles], or NULL with codes */
    const Codes *parts; /* [num_parts] of codes, in the order of their pairs of tiles */
    int64_t num_parts; /* 0: elements */
    const float *bias; /* [num_pairs][32], or NULL */
    int64_t num_inputs, num_outputs;
    int64_t num_lines; /* of one output's inputs */
    int64_t num_pairs; /* of tiles */
    int32_t is_gated; /* a pair holds a tile of gates and one of ups: 16 outputs act(gate) * up */
    ActivationKind activation;
    float limit; /* of CLAMP and SWIGLU_CLAMPED */
    int32_t has_float_products; /* codes become elements in products; else the rows are rounded to integers */
    const LowRank *const *updates; /* by slot, or NULL: the linear has no slots. Another thread stores those of slots
                                    * that no step uses; slot 0 has none */
} Linear;

/* Copies x [num_rows][num_columns], or its rows `row_ids` unless NULL, into a panel; its padding becomes 0. */
void fill_panel(const Rows *panel, const element *x, int64_t stride, const int64_t *row_ids, int64_t num_rows,
                int64_t num_columns, Team *team);

/* An embedding whose rows are blocks, as GGUF files store them. */
typedef struct {
    const uint8_t *blocks; /* [num_rows][row_bytes] */
    int64_t num_rows, row_bytes, num_columns; /* num_columns: elements of a row, whole blocks */
    int32_t kind; /* a BlockKind of blocks.c that is not a kind of floats */
} StoredTable;

/* Looks up rows as elements; 0 for ids outside [first_id, first_id + num_rows). out: not a panel. */
void embed_stored(const StoredTable *table, const int32_t *token_ids, int64_t num_tokens, int64_t first_id,
                  const Rows *out, Team *team);

/* Looks up rows of the unpacked weight, of elements or of codes of 8 bits in one part; 0 for ids outside [first_id, first_id + num_outputs). */
void embed_packed(const Linear *w, const int32_t *token_ids, int64_t num_tokens, int64_t first_id, const Rows *out,
                  Team *team);

/* ── linear.c ────────────────────────────────────────────────────────────────────────────────────────────────────── */

typedef enum {
    STORE, /* store elements */
    STORE_FLOAT, /* store float32 */
    ADD, /* add `factor` times the outputs to the elements of `target` */
} OutputKind;

typedef struct {
    OutputKind kind;
    Rows target; /* data is float * for STORE_FLOAT; a panel only for STORE */
    float factor;
} Output;

/* One product of a stage: out = act(x @ weight^T + bias). */
typedef struct {
    const Linear *weight;
    Rows x; /* a panel of [num_rows][num_lines * LINE] */
    Output out;
    int64_t num_rows;
    int64_t part_rows; /* that fit in the L2 cache */
    int64_t num_items; /* pairs of tiles times parts of the rows */
    const Adapted *adapted; /* NULL: no row has an adapter for this linear */
} Product;

/* adapted: of the rows, or NULL. */
Product make_product(const Linear *w, const Rows *x, int64_t num_rows, const Output *out, const Adapted *adapted);

/* Computes the products, which do not read each other's outputs, in one stage. */
void multiply_products(const Product *products, int64_t num_products, Team *team);

INLINE void linear(const Linear *w, const Rows *x, int64_t num_rows, const Output *out, const Adapted *adapted,
                   Team *team) {
    Product product = make_product(w, x, num_rows, out, adapted);
    multiply_products(&product, 1, team);
}

/* ── norm.c ──────────────────────────────────────────────────────────────────────────────────────────────────────── */

typedef enum { NO_NORM, RMS_NORM, LAYER_NORM } NormKind;

/* Scales to a mean square of 1 (RMS), or shifts to a mean of 0 before (LAYER), then applies weight and bias. */
typedef struct {
    NormKind kind;
    float eps;
    const float *weight, *bias; /* a number per element, or NULL: ones, zeros */
} Norm;

typedef struct {
    float mean, scale;
} Statistics;

/* Returns the mean to subtract from x [count], and the scale to multiply with. */
Statistics measure(const element *x, int64_t count, const Norm *norm);

/* Normalizes elements i, i + 1, … of a row. */
INLINE Floats normalized(Floats v, const Statistics *found, const Norm *norm, int64_t i, Mask mask) {
    v = multiply16(subtract16(v, fill16(found->mean)), fill16(found->scale));
    if (norm->weight != NULL) v = multiply16(v, load_some(norm->weight + i, mask));
    return norm->bias == NULL ? v : add16(v, load_some(norm->bias + i, mask));
}

/* What is added to rows: factor * norm(data). */
typedef struct {
    const element *data; /* NULL: nothing is added */
    int64_t stride;
    Norm norm;
    float factor;
} Delta;

/* out = norm(x) for rows [0, num_rows), after `delta` is added to x and, unless `behind` is NULL, x becomes behind(x), both
 * in place. A panel's padding becomes 0. */
void normalize(element *x, int64_t stride, const Delta *delta, const Norm *behind, const Norm *norm, int64_t num_rows,
               int64_t num_columns, const Rows *out, Team *team);

/* x = norm(x), a row of its own. */
void normalize_row(element *x, const Norm *norm, int64_t num_columns);

/* ── heads.c ─────────────────────────────────────────────────────────────────────────────────────────────────────── */

/* The numbers of a KV cache: elements, or bytes with a float32 scale for each vector, see bytes.h. */
typedef enum { ELEMENT_CACHE, INT8_CACHE, E4M3_CACHE } CacheKind;

#define MAX_HEAD_DIM 512 /* in a cache of bytes, and in attention */

/* The KV cache [num_blocks][num_layers][2][num_kv_heads][block_size][head_dim] at one layer. In a cache of bytes the scales
 * [block_size] follow each tile [block_size][head_dim]. */
typedef struct {
    char *data; /* of block 0 in this layer */
    int64_t block_stride; /* bytes between blocks */
    int64_t num_kv_heads, block_size, head_dim;
    CacheKind kind;
} Cache;

/* Returns the bytes of a vector's numbers. */
INLINE int64_t numbers_bytes(CacheKind kind, int64_t head_dim) {
    return head_dim * (kind == ELEMENT_CACHE ? (int64_t)sizeof(element) : 1);
}

/* Returns the bytes of a layer in a block. */
INLINE int64_t layer_bytes(CacheKind kind, int64_t num_kv_heads, int64_t block_size, int64_t head_dim) {
    int64_t scale_bytes = kind == ELEMENT_CACHE ? 0 : (int64_t)sizeof(float);
    return 2 * num_kv_heads * block_size * (numbers_bytes(kind, head_dim) + scale_bytes);
}

/* Returns the address of a tile. */
INLINE char *cache_at(const Cache *cache, int64_t block, int side, int64_t head) {
    int64_t both = layer_bytes(cache->kind, 1, cache->block_size, cache->head_dim);
    return cache->data + block * cache->block_stride + (side * cache->num_kv_heads + head) * (both / 2);
}

/* Returns the address of the scales of a tile in a cache of bytes. */
INLINE float *scales_of(const Cache *cache, char *tile) { return (float *)(tile + cache->block_size * cache->head_dim); }

/* One step's query, key and value heads, side by side: [num_tokens][num_heads + 2 * num_kv_heads][head_dim]. */
typedef struct {
    element *data;
    int64_t stride; /* elements between tokens */
    int64_t num_tokens, num_heads, num_kv_heads, head_dim;
} Heads;

/* Norms and rotation of a layer's query and key heads. */
typedef struct {
    Norm query_norm, key_norm; /* of [head_dim], or of [heads][head_dim] */
    int64_t query_stride, key_stride; /* from one head's weights to the next one's; 0: all heads have the same */
    int32_t spans_heads; /* one norm over all heads of a token */
    int32_t is_after_rope; /* the norms come after the rotation */
    const float *cos_sin; /* [positions][num_rotated]: cosines, then sines */
    int64_t num_rotated; /* elements of a head; 0: heads are not rotated */
    const float *query_scale; /* [positions]: factors of the query heads, or NULL */
} HeadRules;

typedef struct {
    const HeadRules *rules;
    const int64_t *positions; /* [num_tokens] */
    const int64_t *slots; /* [num_tokens], < 0: do not write */
} HeadWork;

/* Normalizes and rotates query and key heads; writes keys and values to the cache, queries back to `heads`. */
void qk_norm_rope_cache(const Heads *heads, const HeadWork *work, const Cache *cache, Team *team);

/* ── attention.c ─────────────────────────────────────────────────────────────────────────────────────────────────── */

/* The rows (requests) of a step; decode rows, with one token each, come first. */
typedef struct {
    const int32_t *block_tables; /* [num_rows][table_stride] */
    int64_t table_stride;
    const int32_t *seq_lens; /* [num_rows] */
    const int32_t *query_starts; /* [num_rows + 1] */
    int64_t num_rows;
    const int32_t *see_until; /* by token of the step: the last key that it attends to; NULL: its own */
    const int32_t *has_drafts; /* [num_rows]: not 0 for a known token and its drafts; NULL: there are none */
    int32_t are_windows_two_sided; /* a window ends as far behind a token as it begins before it */
} StepRows;

/* A thread's share of the keys and values that the next attention reads: every `step`th block of the rows. A block's keys
 * and values in one layer lie side by side. */
struct Upcoming {
    StepRows rows;
    Cache cache;
    int64_t window; /* 0: none */
    int64_t step, row, block; /* block: counted from the first that the row reads */
    int64_t offset; /* of the next bytes in the block */
};

/* Takes the next `num_bytes`; returns their address, or NULL if all are taken. */
const char *take_upcoming(Upcoming *upcoming, int64_t num_bytes);

typedef struct AttentionPlan AttentionPlan;

/* Plans attention of one step for layers of one shape and window (0: none). Returns NULL without memory.
 * is_batch_invariant: a token's bits do not depend on the rest of the step. */
EXPORT AttentionPlan *make_attention_plan(const StepRows *rows, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                   int64_t window, int32_t is_batch_invariant);
EXPORT void free_attention_plan(AttentionPlan *plan);

/* How scores become weights: they are multiplied by `scale`, capped to softcap * tanh(score / softcap) unless softcap is
 * 0, added to the bias of their distance, and share the softmax with the head's sink. */
typedef struct {
    float scale, softcap;
    const float *sinks; /* [num_heads]: the score of one more key without a value; or NULL */
    const float *bias; /* [num_heads][num_distances], by key's index - query's index, 0 in the middle; or NULL */
    int64_t num_distances;
} Scoring;

/* Attention of the heads at query[token * stride + head * head_dim] to out [num_tokens][num_heads * head_dim].
 * Takes one or two stages; an earlier stage has written the step's keys and values. */
void attend(AttentionPlan *plan, const element *query, int64_t query_stride, const Cache *cache,
            const Scoring *scoring, const Rows *out, Team *team);

/* ── AMX ─────────────────────────────────────────────────────────────────────────────────────────────────────────── */

#ifdef HAS_TILES
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t num_rows[16];
} TileConfig;

/* Gives tile `index` a shape of rows x bytes. */
INLINE void shape_tile(TileConfig *config, int index, int64_t rows, int64_t bytes) {
    config->num_rows[index] = (uint8_t)rows;
    config->row_bytes[index] = (uint16_t)bytes;
}
#endif

/* Each thread calls this before it leaves a parallel region. */
INLINE void release_tiles(void) {
#ifdef HAS_TILES
    _tile_release();
#endif
}

#endif
