/* Scans: each token of a row changes the states of its heads and reads them.
 *
 * A task copies a tile of a head's state, all of its rows and some columns, to memory that stays in the L1 cache, and
 * goes through the row's tokens. Decode and prefill run the same instructions. */
#include "state.h"

#ifdef __AVX512F__
#define MAX_VECTORS 2 /* of a tile's row */
#else
#define MAX_VECTORS 1 /* the sums and a row of the state fill the 16 registers */
#endif
#define NUM_COLUMNS (16 * MAX_VECTORS)
#define NUM_SUMS 4 /* sums over a tile's rows have so many parts: part i has rows i, i + NUM_SUMS, … */

typedef struct {
    _Alignas(64) float rows[MAX_KEY_DIM][NUM_COLUMNS];
    _Alignas(64) float keys[2][MAX_KEY_DIM]; /* of the current token and of the next one, in turn */
    _Alignas(64) float query[MAX_KEY_DIM];
    int64_t num_rows; /* a multiple of NUM_SUMS; those behind key_dim are 0 */
} Tile;

typedef struct {
    Floats part[NUM_SUMS][MAX_VECTORS];
} Sums;

INLINE Floats load_number16(const void *p, int64_t i, Mask mask, const bool has_floats) {
    if (has_floats) return load_some((const float *)p + i, mask);
    return load16((const element *)p + i, mask);
}

/* ── a tile and its memory ───────────────────────────────────────────────────────────────────────────────────────── */

/* Reads a tile, zeros if `from` is NULL; prefetches as many bytes of the next head: the columns of a tile lie too far apart
 * for the processor to do so. */
INLINE void read_tile(Tile *tile, const float *from, const float *next_head, int64_t key_dim, int64_t stride,
                      const int num_vectors) {
    tile->num_rows = round_up(key_dim, NUM_SUMS);
    for (int64_t row = 0; row < tile->num_rows; row++)
        for (int i = 0; i < num_vectors; i++) {
            Floats v = zero16();
            if (from != NULL && row < key_dim) {
                v = load_some(from + row * stride + 16 * i, 0xffff);
                _mm_prefetch((const char *)(next_head + row * NUM_COLUMNS + 16 * i), _MM_HINT_T1);
            }
            store_floats(tile->rows[row] + 16 * i, v);
        }
}

INLINE void write_tile(const Tile *tile, float *to, int64_t key_dim, int64_t stride, const int num_vectors) {
    for (int64_t row = 0; row < key_dim; row++)
        for (int i = 0; i < num_vectors; i++)
            store_some(to + row * stride + 16 * i, 0xffff, load_floats(tile->rows[row] + 16 * i));
}

/* ── one token ───────────────────────────────────────────────────────────────────────────────────────────────────── */

INLINE void clear_sums(Sums *sums, const int num_vectors) {
    for (int part = 0; part < NUM_SUMS; part++)
        for (int i = 0; i < num_vectors; i++) sums->part[part][i] = zero16();
}

INLINE Floats total_of(const Sums *sums, int i) {
    return add16(add16(sums->part[0][i], sums->part[1][i]), add16(sums->part[2][i], sums->part[3][i]));
}

/* Returns the sums of the tile's rows, each times its number of a key. */
INLINE Sums sum_rows(const Tile *tile, const float *key, const int num_vectors) {
    Sums sums;
    clear_sums(&sums, num_vectors);
    for (int64_t row = 0; row < tile->num_rows; row += NUM_SUMS)
#pragma GCC unroll 4
        for (int part = 0; part < NUM_SUMS; part++)
            for (int i = 0; i < num_vectors; i++)
                sums.part[part][i] = multiply_add16(fill16(key[row + part]), load_floats(tile->rows[row + part] + 16 * i),
                                                    sums.part[part][i]);
    return sums;
}

/* rows = decay * rows + key * change. Returns in `read` the sums of the new rows times the query, and with `sums_next` in
 * `next` those times the next token's key: the bits of sum_rows, without reading the rows again. */
INLINE void change_rows(Tile *tile, float decay, const float *key, const Floats *change, const float *next_key,
                        Sums *read, Sums *next, const int num_vectors, const bool sums_next) {
    const Floats factor = fill16(decay);
    clear_sums(read, num_vectors);
    if (sums_next) clear_sums(next, num_vectors);
    for (int64_t row = 0; row < tile->num_rows; row += NUM_SUMS)
#pragma GCC unroll 4
        for (int part = 0; part < NUM_SUMS; part++)
            for (int i = 0; i < num_vectors; i++) {
                float *at = tile->rows[row + part] + 16 * i;
                Floats v = multiply16(factor, load_floats(at));
                v = multiply_add16(fill16(key[row + part]), change[i], v);
                store_floats(at, v);
                read->part[part][i] = multiply_add16(fill16(tile->query[row + part]), v, read->part[part][i]);
                if (sums_next)
                    next->part[part][i] = multiply_add16(fill16(next_key[row + part]), v, next->part[part][i]);
            }
}

/* ── a row's tokens ──────────────────────────────────────────────────────────────────────────────────────────────── */

/* Some columns of a head in a row: the part of its state that a task computes. */
typedef struct {
    const Scan *scan;
    int64_t head, column;
} Part;

/* Returns the address of a part's first row in a block, NULL for block -1. */
INLINE float *state_at(const Part *part, int64_t block) {
    const Scan *scan = part->scan;
    if (block < 0) return NULL;
    return scan->states + block * scan->block_stride + part->head * scan->key_dim * scan->value_dim + part->column;
}

/* Loads the key or the query of a token for the part's head; numbers behind key_dim become 0. */
INLINE void load_vector(float *to, const Part *part, const void *from, int64_t stride, int64_t token) {
    const Scan *scan = part->scan;
    int64_t head = part->head * scan->key_heads / scan->value_heads;
    if (scan->are_keys_tiled) head = (scan->first_key + part->head) % scan->key_heads;
    int64_t first = token * stride + head * scan->key_dim;
    for (int64_t i = 0; i < scan->key_dim; i += 16)
        store_floats(to + i, load_number16(from, first + i, lanes(scan->key_dim - i), scan->has_floats));
}

/* Computes the vector to add, times the key, to the rows. sums: of the rows times the key, for the delta rule. */
INLINE void find_change(Floats *change, const Part *part, int64_t token, const Sums *sums, const int num_vectors) {
    const Scan *scan = part->scan;
    int64_t number = token * scan->value_heads + part->head;
    for (int i = 0; i < num_vectors; i++) {
        int64_t first = token * scan->v_stride + part->head * scan->value_dim + part->column + 16 * i;
        change[i] = load_number16(scan->v, first, 0xffff, scan->has_floats);
        if (scan->factors != NULL) change[i] = multiply16(change[i], fill16(scan->factors[number]));
        if (scan->beta == NULL) continue;
        Floats rest = multiply_add16(fill16(-scan->decay[number]), total_of(sums, i), change[i]);
        change[i] = multiply16(fill16(scan->beta[number]), rest);
    }
}

INLINE void store_read(const Part *part, int64_t token, const Sums *read, const int num_vectors) {
    const Scan *scan = part->scan;
    int64_t first = (token * scan->value_heads + part->head) * scan->value_dim + part->column;
    int64_t of_value = token * scan->v_stride + part->head * scan->value_dim + part->column;
    for (int i = 0; i < num_vectors; i++) {
        Floats v = total_of(read, i);
        if (scan->skip != NULL) {
            Floats value = load_number16(scan->v, of_value + 16 * i, 0xffff, scan->has_floats);
            v = add16(v, rounded16(multiply16(fill16(scan->skip[part->head]), value)));
        }
        if (scan->has_float_out) store_some((float *)scan->out + first + 16 * i, 0xffff, v);
        else store16((element *)scan->out + first + 16 * i, 0xffff, v);
    }
}

/* Computes the tokens of a row from its first segment on. */
INLINE void scan_row(const Part *part, const Segments *segments, int64_t segment, Tile *tile, const int num_vectors) {
    const Scan *scan = part->scan;
    int64_t last = segment, token = segments->starts[segment];
    while (continues_row(segments, last + 1)) last++;
    int64_t stop = segments->starts[last + 1];
    const bool has_delta = scan->beta != NULL;
    float *key = tile->keys[0], *next_key = tile->keys[1];
    Sums read, sums;
    const float *from = state_at(part, segments->reads[segment]), *next_head = NULL;
    if (from != NULL) next_head = from - part->column + scan->key_dim * (scan->value_dim + part->column);
    read_tile(tile, from, next_head, scan->key_dim, scan->value_dim, num_vectors);
    if (token < stop) load_vector(key, part, scan->k, scan->k_stride, token);
    if (token < stop && has_delta) sums = sum_rows(tile, key, num_vectors);
    for (; segment <= last; segment++) {
        for (; token < segments->starts[segment + 1]; token++) {
            Floats change[MAX_VECTORS];
            find_change(change, part, token, &sums, num_vectors);
            load_vector(tile->query, part, scan->q, scan->q_stride, token);
            if (token + 1 < stop) load_vector(next_key, part, scan->k, scan->k_stride, token + 1);
            float decay = scan->decay[token * scan->value_heads + part->head];
            bool sums_next = has_delta && token + 1 < stop;
            if (sums_next) change_rows(tile, decay, key, change, next_key, &read, &sums, num_vectors, true);
            else change_rows(tile, decay, key, change, next_key, &read, &sums, num_vectors, false);
            store_read(part, token, &read, num_vectors);
            float *free_key = key;
            key = next_key, next_key = free_key;
        }
        if (segments->writes[segment] >= 0)
            write_tile(tile, state_at(part, segments->writes[segment]), scan->key_dim, scan->value_dim, num_vectors);
    }
}

void scan_states(const Scan *scan, const Segments *segments, Team *team) {
    int64_t num_parts = divide_up(scan->value_dim, NUM_COLUMNS), num_heads = scan->value_heads;
    int64_t num_tasks = segments->num_segments * num_heads * num_parts;
    Tile tile;
    for (Range range; take_falling(team, num_tasks, &range); finish_falling(team, num_tasks))
        for (int64_t task = range.start; task < range.stop; task++) {
            int64_t segment = task / num_parts / num_heads;
            if (continues_row(segments, segment)) continue;
            Part part = {scan, task / num_parts % num_heads, task % num_parts * NUM_COLUMNS};
            bool is_full = scan->value_dim - part.column >= NUM_COLUMNS;
            if (is_full) scan_row(&part, segments, segment, &tile, MAX_VECTORS);
            else scan_row(&part, segments, segment, &tile, 1);
        }
}
