/* Updates of linears by adapters: for the rows of a slot y += B (A x), with A [rank][inputs] and B [outputs][rank].
 *
 * An update has one or more parts, each of consecutive outputs, with ranks of its own. All parts read the same inputs,
 * so that their A lie below one another: `shrink` computes A x for all of them, and `expand` adds B (A x) to the sums
 * of a pair of tiles before they are scaled, biased and stored.
 *
 * Word  32 bits: one float32 or a pair of bf16, as in tiles. Matrices are lines of 16 words: a line has a word of 16
 *       ranks (A) or of 16 outputs (B), so that a line times the broadcast word of a row adds to 16 sums at once.
 */
#ifndef TOKENLOOM_LOW_RANK_H
#define TOKENLOOM_LOW_RANK_H

#include "kernels.h"

/* Pairs of tiles that read the same words of A x, each tile its own. */
typedef struct {
    int64_t first_pair, end_pair;
    int64_t first_words[2], num_words[2]; /* of A x; where a tile's outputs differ in them, B is padded with zeros */
    const element *b; /* [end_pair - first_pair] lines of the first tile, then lines of the second */
} Segment;

struct LowRank {
    const element *a; /* [num_rank_tiles][words of the padded inputs] lines; of an embedding [num_ids][num_words] words */
    const Segment *segments; /* [num_segments], by rising pairs */
    const float *scale; /* [num_pairs][32]: factors of the base's and the adapter's sum; or NULL */
    int64_t num_segments, num_rank_tiles;
    int64_t num_words, num_ids; /* of an embedding */
};

/* A part as an adapter's file has it. */
typedef struct {
    int64_t first_output, num_outputs, rank; /* in the order of the outputs of the weight that was packed */
    const void *a, *b; /* [rank][num_inputs], [num_outputs][rank], both of elements or both of floats */
    int32_t has_floats;
    float factor; /* of b, multiplied in float32 */
} LowRankPart;

/* Returns the bytes of an update. Of an embedding, w has the ids as inputs, and no gates. */
EXPORT int64_t low_rank_bytes(const Linear *w, const LowRankPart *parts, int64_t num_parts, int32_t has_scale,
                              int32_t is_embedding);

/* Packs an update, a LowRank and its arrays, into memory at a multiple of 64 bytes. scale: [outputs of the packed
 * weight], or NULL. */
EXPORT void pack_low_rank(const Linear *w, const LowRankPart *parts, int64_t num_parts, const float *scale,
                          int32_t is_embedding, void *memory);

/* Lists the runs of rows with adapters, without their order, in memory of GROUPED_WORDS; returns its used end. */
#define GROUPED_WORDS(num_rows) (3 * (num_rows) + divide_up(num_rows, BLOCK_ROWS) + 1)
int32_t *group_rows(const int32_t *slots, int64_t num_rows, int32_t *memory, Adapted *to);

/* The same with the order. memory: step_words words. */
EXPORT int64_t step_words(int64_t num_rows, int64_t num_slots);
EXPORT void group_step(const int32_t *slots, int64_t num_rows, int64_t num_slots, int32_t *memory, Adapted *to);

/* Computes A x of the rows with adapters in early pieces of the products' stage; returns their number. */
int64_t shrink(const Product *products, int64_t num_products, Team *team);

/* The update of the sums of a block of rows and a pair of tiles. Its runs are looked up, and their lines of B
 * prefetched, some at a time while the sums are computed. */
typedef struct {
    int64_t num_runs, num_left; /* of the block; of them not looked up yet */
    int64_t num_each; /* that are looked up at a time */
    const Product *product;
    int64_t pair, row; /* the block's first row */
    const SlotRun *runs;
    const Segment *segments[BLOCK_ROWS]; /* by run; NULL: none */
    const element *b[BLOCK_ROWS];
} Expansion;

/* Looks up no run yet; `num_times` calls of fetch_expansion will look up all. */
void begin_expansion(Expansion *expansion, const Product *product, int64_t pair, int64_t row, int64_t num_times);
void fetch_expansion(Expansion *expansion);

/* Adds B (A x) to the sums, and scales them; all runs have been looked up. */
void expand(const Expansion *expansion, float (*sums)[PAIR_OUTPUTS]);

/* Adds the updates of an embedding to the rows that were looked up, in a stage. */
void embed_updates(const LowRank *const *updates, const Adapted *adapted, const int32_t *token_ids, int64_t first_id,
                   int64_t num_columns, const Rows *out, Team *team);

#endif
