/* What all kernels share: the element type, 64-byte lines, panels, packed linears, teams of threads.
 *
 * Every source is compiled for one element type, bf16 (ELEMENT_BF16) or float32, and for the instructions that the
 * flags allow: AVX-512 always, AVX512-BF16 and AMX where __AVX512BF16__ and __AMX_BF16__ are defined. All arithmetic
 * between a load and a store is float32.
 *
 * Line   64 bytes: LINE elements. A row of a weight or an activation is a whole number of lines, padded with zeros.
 * Tile   16 lines, 1 KiB: LINE inputs x 16 outputs of a weight, as AMX wants its second operand. bf16:
 *        [LINE / 2 pairs of inputs][16 outputs][2], float32: [LINE inputs][16 outputs].
 * Panel  an activation [num_rows][num_columns] cut into groups of 16 rows (the last may have fewer) and lines:
 *        [group][line of the row][row of the group][LINE], so that a group's lines are AMX's first operand and every
 *        read is sequential.
 */
#ifndef TOKENLOOM_KERNELS_H
#define TOKENLOOM_KERNELS_H

#include <immintrin.h>
#include <omp.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

#ifdef ELEMENT_BF16
typedef uint16_t element;
#define LINE 32
#else
typedef float element;
#define LINE 16
#endif

#if defined(ELEMENT_BF16) && defined(__AMX_BF16__)
#define HAS_TILES
#endif

#define GROUP_ROWS 16 /* rows of a panel's group, outputs of a tile */
#define TILE (LINE * 16) /* elements of a tile */
#define PAIR_OUTPUTS 32 /* outputs of two neighbouring tiles, the unit of work of a linear */

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

/* ── vectors ─────────────────────────────────────────────────────────────────────────────────────────────────────── */

/* The lanes of a vector of 16 when `left` elements are left. */
INLINE __mmask16 lanes(int64_t left) { return left >= 16 ? 0xffff : left <= 0 ? 0 : (__mmask16)((1u << left) - 1); }

#ifdef ELEMENT_BF16
INLINE __m512 widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }

/* float32 to bf16, to nearest even; a NaN stays one. */
INLINE __m256i narrow(__m512 v) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(v);
#else
    __m512i bits = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}

/* 16 and 16 elements, side by side. */
INLINE __m512i narrow_pair(__m512 low, __m512 high) {
#ifdef __AVX512BF16__
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
#else
    return _mm512_inserti64x4(_mm512_castsi256_si512(narrow(low)), narrow(high), 1);
#endif
}

INLINE __m512 load16(const element *p, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, p)); }
INLINE void store16(element *p, __mmask16 mask, __m512 v) { _mm256_mask_storeu_epi16(p, mask, narrow(v)); }
#else
INLINE __m512 load16(const element *p, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, p); }
INLINE void store16(element *p, __mmask16 mask, __m512 v) { _mm512_mask_storeu_ps(p, mask, v); }
#endif

/* A line of which `left` elements exist; the others are 0. */
INLINE __m512i load_line(const element *p, int64_t left) {
#ifdef ELEMENT_BF16
    return left >= LINE ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16((__mmask32)((1u << left) - 1), p);
#else
    return _mm512_maskz_loadu_epi32(lanes(left), p);
#endif
}

/* 32 elements as two vectors whose lanes are in an order of their own, the same in load32 and store32. */
typedef struct {
    __m512 a, b;
} Floats32;

#ifdef ELEMENT_BF16
INLINE Floats32 load32(const element *p, int64_t left) { /* a: even elements, b: odd ones */
    __m512i v = left >= 32 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16((__mmask32)((1u << left) - 1), p);
    Floats32 f = {_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)),
                  _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000)))};
    return f;
}
INLINE void store32(element *p, int64_t left, Floats32 f) {
    __m512i even = _mm512_cvtepu16_epi32(narrow(f.a)), odd = _mm512_cvtepu16_epi32(narrow(f.b));
    __m512i v = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
    _mm512_mask_storeu_epi16(p, left >= 32 ? 0xffffffffu : (__mmask32)((1u << left) - 1), v);
}
#else
INLINE Floats32 load32(const element *p, int64_t left) {
    Floats32 f = {_mm512_maskz_loadu_ps(lanes(left), p), _mm512_maskz_loadu_ps(lanes(left - 16), p + 16)};
    return f;
}
INLINE void store32(element *p, int64_t left, Floats32 f) {
    _mm512_mask_storeu_ps(p, lanes(left), f.a);
    _mm512_mask_storeu_ps(p + 16, lanes(left - 16), f.b);
}
#endif

/* sum += a * b over lines: 16 lanes, each the products of one pair (bf16) or of one element (float32). */
INLINE __m512 dot_line(__m512 sum, __m512i a, __m512i b) {
#if !defined(ELEMENT_BF16)
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
#elif defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                          _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), sum);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)),
                           _mm512_castsi512_ps(_mm512_and_si512(b, high)), sum);
#endif
}

/* 2^x; -inf gives 0, NaN stays. Relative error below 2^-22 (a polynomial of degree 6 on [-1/2, 1/2]). */
INLINE __m512 exp2_16(__m512 x) {
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(x, whole);
    /* x = ±inf leaves NaN in f; scalef needs something finite there */
    f = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(1e30f), _CMP_NGT_UQ), f);
    __m512 p = _mm512_set1_ps(1.535336188319500e-4f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.339887440266574e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.618437357674640e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.550332471162809e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.402264791363012e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.931472028550421e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

#define LOG2_E 1.4426950408889634f

/* x / (1 + e^-x), as precise as an element is. */
INLINE __m512 silu_16(__m512 x) {
#ifdef ELEMENT_BF16
    __m512 t = _mm512_max_ps(_mm512_set1_ps(-1e4f), _mm512_min_ps(_mm512_set1_ps(1e4f), x)); /* finite, or NaN */
    t = _mm512_mul_ps(t, _mm512_set1_ps(-LOG2_E));
    __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(t, whole);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.00957007f), f, _mm512_set1_ps(0.05591781f)); /* 2^f within 2^-18 */
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.24024745f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69312182f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.99999926f));
    __m512 divisor = _mm512_add_ps(_mm512_scalef_ps(p, whole), _mm512_set1_ps(1.0f));
    return _mm512_mul_ps(x, _mm512_rcp14_ps(divisor));
#else
    __m512 exponential = exp2_16(_mm512_mul_ps(x, _mm512_set1_ps(-LOG2_E)));
    return _mm512_div_ps(x, _mm512_add_ps(exponential, _mm512_set1_ps(1.0f)));
#endif
}

/* Lane i of the answer is the sum of all lanes of v[i]. */
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

/* ── teams ───────────────────────────────────────────────────────────────────────────────────────────────────────── */

/* What the threads of one parallel region share. Zero it before the region. */
typedef struct {
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int generation;
    _Alignas(64) atomic_llong next_task[2]; /* taken in turn: one counts while the other is reset */
} Shared;

typedef struct {
    int id, size;
    Shared *shared;
} Team;

typedef struct {
    int64_t start, stop;
} Range;

/* The code between runs once in each of `num_threads` threads (the caller's variable), with `team`. */
#define BEGIN_TEAM                                                                                                     \
    Shared shared_ = {0};                                                                                              \
    _Pragma("omp parallel num_threads(num_threads)") {                                                                 \
        const Team team_ = {omp_get_thread_num(), omp_get_num_threads(), &shared_}, *team = &team_;
#define END_TEAM                                                                                                       \
        release_tiles();                                                                                               \
    }

/* Waits until all have come: spins, then yields the core to whoever needs it. */
void team_wait(const Team *team);

/* This thread's share of `total` things: neighbours, shares equal to within one. */
INLINE Range share_of(int64_t total, const Team *team) {
    Range range = {total * team->id / team->size, total * (team->id + 1) / team->size};
    return range;
}

/* ── rows: an activation, row by row or as a panel ───────────────────────────────────────────────────────────────── */

typedef struct {
    element *data;
    int64_t stride; /* elements between rows; of a panel the number of columns, a multiple of LINE */
    int64_t panel_rows; /* 0: not a panel */
} Rows;

/* Where element (row, column) lies; those up to the end of its line follow it. */
INLINE element *rows_at(const Rows *rows, int64_t row, int64_t column) {
    if (rows->panel_rows == 0) return rows->data + row * rows->stride + column;
    int64_t first = row / GROUP_ROWS * GROUP_ROWS;
    int64_t height = min64(GROUP_ROWS, rows->panel_rows - first);
    return rows->data + first * rows->stride + (column / LINE * height + row - first) * LINE + column % LINE;
}

/* ── linear.c ────────────────────────────────────────────────────────────────────────────────────────────────────── */

typedef struct {
    const element *weight; /* [num_pairs][num_lines][2 tiles] */
    const float *bias; /* [num_pairs][32], or NULL */
    int64_t num_inputs, num_outputs;
    int64_t num_lines; /* of one output's inputs */
    int64_t num_pairs; /* of tiles */
    int32_t is_gated; /* the tiles of a pair hold gates and their ups: outputs are silu(gate) * up, 16 a pair */
} Linear;

typedef enum {
    STORE, /* elements to `target` */
    STORE_FLOAT, /* float32 to `target` */
    ADD, /* elements are added to what `target` holds */
} OutputKind;

typedef struct {
    OutputKind kind;
    Rows target; /* data is float * for STORE_FLOAT; a panel only for STORE */
} Output;

/* out = x @ weight^T + bias. x: a panel of [num_rows][num_lines * LINE]. */
void linear(const Linear *w, const Rows *x, int64_t num_rows, const Output *out, const Team *team);

/* Copy x [num_rows][num_columns] into a panel, whose padding becomes 0. */
void fill_panel(const Rows *panel, const element *x, int64_t stride, int64_t num_rows, int64_t num_columns,
                const Team *team);

/* Rows of the weight as they were before packing, 0 for ids outside [first_id, first_id + num_outputs). */
void embed_packed(const Linear *w, const int64_t *token_ids, int64_t num_tokens, int64_t first_id, const Rows *out,
                  const Team *team);

/* ── norm.c ──────────────────────────────────────────────────────────────────────────────────────────────────────── */

/* out = x / rms(x) * weight for rows [0, num_rows); with `delta`, x += delta first. A panel's padding becomes 0. */
void rms_norm(element *x, int64_t stride, const element *delta, int64_t delta_stride, const element *weight,
              float eps, int64_t num_rows, int64_t num_columns, const Rows *out, const Team *team);

/* ── heads.c ─────────────────────────────────────────────────────────────────────────────────────────────────────── */

/* The KV cache [num_blocks][num_layers][2][num_kv_heads][block_size][head_dim] at one layer. */
typedef struct {
    element *data; /* of block 0 in this layer */
    int64_t block_stride; /* elements from a block to the next */
    int64_t num_kv_heads, block_size, head_dim;
} Cache;

INLINE element *cache_at(const Cache *cache, int64_t block, int side, int64_t head) {
    int64_t tile = cache->block_size * cache->head_dim;
    return cache->data + block * cache->block_stride + (side * cache->num_kv_heads + head) * tile;
}

/* One step's query, key and value heads, side by side: [num_tokens][num_heads + 2 * num_kv_heads][head_dim]. */
typedef struct {
    element *data;
    int64_t stride; /* elements between tokens */
    int64_t num_tokens, num_heads, num_kv_heads, head_dim;
} Heads;

typedef struct {
    const element *query_norm, *key_norm; /* [head_dim], or NULL */
    float eps;
    const float *cos_sin; /* [positions][head_dim]: cosines, then sines */
    const int64_t *positions; /* [num_tokens] */
    const int64_t *slots; /* [num_tokens], < 0: do not write */
} HeadWork;

/* Normalize query and key heads, rotate them, write keys and values to the cache; queries stay in `heads`. */
void prepare_heads(const Heads *heads, const HeadWork *work, const Cache *cache, const Team *team);

/* ── attention.c ─────────────────────────────────────────────────────────────────────────────────────────────────── */

/* The rows (requests) of a step; decode rows, with one token each, come first. */
typedef struct {
    const int32_t *block_tables; /* [num_rows][table_stride] */
    int64_t table_stride;
    const int32_t *seq_lens; /* [num_rows] */
    const int32_t *query_starts; /* [num_rows + 1] */
    int64_t num_rows;
} StepRows;

typedef struct AttentionPlan AttentionPlan;

/* The work of one step for layers of one shape and window (0: none), cut into tasks. NULL without memory. */
EXPORT AttentionPlan *make_attention_plan(const StepRows *rows, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                   int64_t window);
EXPORT void free_attention_plan(AttentionPlan *plan);

/* Causal attention: query heads at `query` ([token * stride + head * head_dim]) to `out` [num_tokens][heads * dim].
 * All threads must have passed a barrier since the step's keys and values were written. */
void attend(AttentionPlan *plan, const element *query, int64_t query_stride, const Cache *cache, float scale,
            const Rows *out, const Team *team);

/* Takes the next of the tasks that the team shares; counts from 0. */
INLINE int64_t take_task(const Team *team, int turn) { return atomic_fetch_add(&team->shared->next_task[turn], 1); }

/* ── AMX ─────────────────────────────────────────────────────────────────────────────────────────────────────────── */

#ifdef HAS_TILES
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t num_rows[16];
} TileConfig;

/* Give tile `index` a shape of rows x bytes. */
INLINE void shape_tile(TileConfig *config, int index, int64_t rows, int64_t bytes) {
    config->num_rows[index] = (uint8_t)rows;
    config->row_bytes[index] = (uint16_t)bytes;
}
#endif

/* To be called by each thread before it leaves a parallel region. */
INLINE void release_tiles(void) {
#ifdef HAS_TILES
    _tile_release();
#endif
}

#endif
