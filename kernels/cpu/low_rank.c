/* Updates of linears by adapters, see low_rank.h: packing, grouping of rows, and both products.
 *
 * Rows of one slot are multiplied some at a time, each in the order of sums that it has alone, so that a row's bits
 * depend on the row and its slot only.
 */
#include "low_rank.h"

#define WORD ((int64_t)(4 / sizeof(element))) /* elements of a word */

/* ── packing ─────────────────────────────────────────────────────────────────────────────────────────────────────── */

INLINE int64_t words_of(int64_t rank) { return divide_up(rank, WORD); }

static int64_t num_tiles(const Linear *w) { return 2 * w->num_pairs; }

/* Returns the outputs of a tile, in the order of the weight that was packed. */
static Range outputs_of(const Linear *w, int64_t tile) {
    bool is_up = w->is_gated && tile >= w->num_pairs;
    int64_t first = 16 * (is_up ? tile - w->num_pairs : tile), shift = is_up ? w->num_outputs : 0;
    return (Range){shift + min64(first, w->num_outputs), shift + min64(first + 16, w->num_outputs)};
}

/* Returns the words of A x that the outputs read; none: an empty range. */
static Range words_read(const LowRankPart *parts, int64_t num_parts, Range outputs) {
    Range words = {0, 0};
    for (int64_t i = 0, first = 0; i < num_parts; first += words_of(parts[i++].rank)) {
        int64_t end = parts[i].first_output + parts[i].num_outputs;
        if (parts[i].first_output >= outputs.stop || end <= outputs.start) continue;
        if (words.stop == 0) words.start = first;
        words.stop = first + words_of(parts[i].rank);
    }
    return words;
}

/* Lists the segments, unless NULL; returns their number, and adds up the lines of their B. */
static int64_t list_segments(const Linear *w, const LowRankPart *parts, int64_t num_parts, Segment *segments,
                             int64_t *num_lines) {
    int64_t count = 0;
    Segment last = {0};
    for (int64_t tile = 0; tile < num_tiles(w); tile++) {
        Range words = words_read(parts, num_parts, outputs_of(w, tile));
        if (words.start == words.stop) continue;
        int64_t num_words = words.stop - words.start;
        bool follows = count && last.end_tile == tile && last.first_word == words.start && last.num_words == num_words;
        if (!follows) last = (Segment){tile, tile, words.start, num_words, NULL}, count++;
        last.end_tile++;
        *num_lines += num_words;
        if (segments != NULL) segments[count - 1] = last;
    }
    return count;
}

/* The parts of an update's memory. */
typedef struct {
    LowRank *update;
    Segment *segments;
    element *a, *b;
    float *scale;
    int64_t num_bytes;
} Memory;

static char *take_bytes(char *base, int64_t *at, int64_t num_bytes) {
    char *start = base + *at;
    *at += round_up(num_bytes, 64);
    return start;
}

static Memory lay_out(const Linear *w, const LowRankPart *parts, int64_t num_parts, bool has_scale, bool is_embedding,
                      void *memory) {
    int64_t num_words = 0, num_lines = 0, at = 0;
    for (int64_t i = 0; i < num_parts; i++) num_words += words_of(parts[i].rank);
    int64_t num_segments = list_segments(w, parts, num_parts, NULL, &num_lines);
    int64_t num_rank_tiles = divide_up(num_words * WORD, 16);
    int64_t a_bytes = is_embedding ? w->num_inputs * num_words * 4 : num_rank_tiles * w->num_lines * 1024;
    Memory m;
    m.update = (LowRank *)take_bytes(memory, &at, sizeof(LowRank));
    m.segments = (Segment *)take_bytes(memory, &at, num_segments * (int64_t)sizeof(Segment));
    m.scale = (float *)take_bytes(memory, &at, has_scale ? num_tiles(w) * 64 : 0);
    m.a = (element *)take_bytes(memory, &at, a_bytes);
    m.b = (element *)take_bytes(memory, &at, num_lines * 64);
    m.num_bytes = at;
    if (memory != NULL)
        *m.update = (LowRank){m.a, m.segments, has_scale ? m.scale : NULL, num_segments, num_rank_tiles, num_words,
                              is_embedding ? w->num_inputs : 0};
    return m;
}

int64_t low_rank_bytes(const Linear *w, const LowRankPart *parts, int64_t num_parts, int32_t has_scale,
                       int32_t is_embedding) {
    return lay_out(w, parts, num_parts, has_scale, is_embedding, NULL).num_bytes;
}

/* Writes `count` floats, at most a line, as words of one lane of adjacent lines. */
static void pack_lane(element *lines, int64_t lane, const float *from, int64_t count) {
    _Alignas(64) element part[LINE];
    const uint32_t *words = (const uint32_t *)part;
    for (int64_t i = 0; i < LINE; i += 16) store16(part + i, 0xffff, load_some(from + i, lanes(count - i)));
    for (int64_t word = 0; word < words_of(count); word++) ((uint32_t *)lines)[word * 16 + lane] = words[word];
}

/* Packs the A of all parts below one another: rank i of a part is word_of_part * WORD + i of A x. */
static void pack_a(const Linear *w, const LowRankPart *parts, int64_t num_parts, element *a) {
    for (int64_t i = 0, first = 0; i < num_parts; first += words_of(parts[i++].rank) * WORD)
        for (int64_t line = 0; line < w->num_lines; line++)
            for (int64_t rank = 0; rank < parts[i].rank; rank++) {
                int64_t at = first + rank, column = line * LINE;
                pack_lane(a + (at / 16 * w->num_lines + line) * TILE, at % 16,
                          parts[i].a + rank * w->num_inputs + column, min64(LINE, w->num_inputs - column));
            }
}

/* Transposes the A of an embedding to a row per id. */
static void pack_ids(const Linear *w, const LowRankPart *parts, int64_t num_parts, int64_t num_words, element *a) {
    for (int64_t i = 0, first = 0; i < num_parts; first += words_of(parts[i++].rank) * WORD)
        for (int64_t rank = 0; rank < parts[i].rank; rank++)
            for (int64_t id = 0; id < w->num_inputs; id += 16) {
                _Alignas(64) element part[16];
                store16(part, 0xffff, load_some(parts[i].a + rank * w->num_inputs + id, lanes(w->num_inputs - id)));
                for (int64_t j = 0; j < min64(16, w->num_inputs - id); j++)
                    a[(id + j) * num_words * WORD + first + rank] = part[j];
            }
}

/* Packs the rows of B of a tile's outputs, from a segment's first word on. */
static void pack_b(const LowRankPart *parts, int64_t num_parts, Range outputs, const Segment *segment, element *lines) {
    for (int64_t i = 0, first = 0; i < num_parts; first += words_of(parts[i++].rank)) {
        const LowRankPart *part = &parts[i];
        int64_t start = max64(outputs.start, part->first_output);
        int64_t stop = min64(outputs.stop, part->first_output + part->num_outputs);
        for (int64_t output = start; output < stop; output++)
            for (int64_t rank = 0; rank < part->rank; rank += LINE)
                pack_lane(lines + (first + rank / WORD - segment->first_word) * LINE, output - outputs.start,
                          part->b + (output - part->first_output) * part->rank + rank, min64(LINE, part->rank - rank));
    }
}

void pack_low_rank(const Linear *w, const LowRankPart *parts, int64_t num_parts, const float *scale,
                   int32_t is_embedding, void *memory) {
    Memory m = lay_out(w, parts, num_parts, scale != NULL, is_embedding, memory);
    int64_t num_lines = 0;
    list_segments(w, parts, num_parts, m.segments, &num_lines);
    if (is_embedding) pack_ids(w, parts, num_parts, m.update->num_words, m.a);
    else pack_a(w, parts, num_parts, m.a);
    element *b = m.b;
    for (Segment *segment = m.segments; segment < m.segments + m.update->num_segments; segment++) {
        segment->b = b;
        for (int64_t tile = segment->first_tile; tile < segment->end_tile; tile++, b += segment->num_words * LINE)
            pack_b(parts, num_parts, outputs_of(w, tile), segment, b);
    }
    for (int64_t tile = 0; scale != NULL && tile < num_tiles(w); tile++) {
        Range outputs = outputs_of(w, tile);
        store_some(m.scale + tile * 16, 0xffff, load_some(scale + outputs.start, lanes(outputs.stop - outputs.start)));
    }
}

/* ── grouping of rows ────────────────────────────────────────────────────────────────────────────────────────────── */

int32_t *group_rows(const int32_t *slots, int64_t num_rows, int32_t *memory, Adapted *to) {
    int64_t num_blocks = divide_up(num_rows, BLOCK_ROWS);
    int32_t *starts = memory;
    SlotRun *runs = (SlotRun *)(starts + num_blocks + 1), *end = runs;
    for (int64_t block = 0; block < num_blocks; block++) {
        SlotRun *first = end;
        starts[block] = (int32_t)(first - runs);
        for (int64_t row = block * BLOCK_ROWS; row < min64(num_rows, (block + 1) * BLOCK_ROWS); row++) {
            if (slots[row] == 0) continue;
            SlotRun *run = end;
            while (run > first && run[-1].slot != slots[row]) run--; /* rows of a slot are often neighbours */
            if (run == first) *end = (SlotRun){slots[row], (int32_t)block, 0}, run = ++end;
            run[-1].rows |= 1u << row % BLOCK_ROWS;
        }
    }
    starts[num_blocks] = (int32_t)(end - runs);
    to->slots = slots, to->runs = runs, to->starts = starts, to->order = NULL;
    to->num_runs = end - runs;
    return (int32_t *)end;
}

int64_t step_words(int64_t num_rows, int64_t num_slots) { return GROUPED_WORDS(num_rows) + num_rows + num_slots + 2; }

void group_step(const int32_t *slots, int64_t num_rows, int64_t num_slots, int32_t *memory, Adapted *to) {
    int32_t *order = group_rows(slots, num_rows, memory, to), *ends = order + to->num_runs;
    memset(ends, 0, (size_t)(num_slots + 2) * sizeof *ends);
    for (int64_t i = 0; i < to->num_runs; i++) ends[to->runs[i].slot + 1]++;
    for (int64_t slot = 0; slot <= num_slots; slot++) ends[slot + 1] += ends[slot];
    for (int64_t i = 0; i < to->num_runs; i++) order[ends[to->runs[i].slot]++] = (int32_t)i;
    to->order = order;
}

/* ── A x ─────────────────────────────────────────────────────────────────────────────────────────────────────────── */

/* Each row has CHAINS sums, of every CHAINS-th word, as one sum would wait for the additions before it. */
#ifdef __AVX512F__
#define SHRINK_ROWS 6
#define CHAINS 4
#define EXPAND_ROWS 8
#else
#define SHRINK_ROWS 3
#define CHAINS 2
#define EXPAND_ROWS 3
#endif

/* Rows of a panel, read line by line, and of the result. */
typedef struct {
    const int32_t *x[SHRINK_ROWS];
    int64_t steps[SHRINK_ROWS]; /* words from a line to the next */
    element *to[SHRINK_ROWS];
} ShrunkRows;

/* Multiplies rows by 16 ranks of A. Every call passes a constant `count`. */
INLINE void shrink_rows(const ShrunkRows *rows, const element *a, int64_t num_lines, const int count) {
    Floats sums[SHRINK_ROWS][CHAINS];
    const int32_t *x[SHRINK_ROWS];
    for (int row = 0; row < count; row++) {
        x[row] = rows->x[row];
        for (int chain = 0; chain < CHAINS; chain++) sums[row][chain] = zero16();
    }
    for (int64_t line = 0; line < num_lines; line++) {
#pragma GCC unroll 4
        for (int word = 0; word < 16; word += CHAINS)
#pragma GCC unroll 4
            for (int chain = 0; chain < CHAINS; chain++, a += LINE) {
                Ints weights = load_any(a);
                for (int row = 0; row < count; row++)
                    sums[row][chain] = dot_line(sums[row][chain], fill_words(x[row][word + chain]), weights);
            }
        for (int row = 0; row < count; row++) x[row] += rows->steps[row];
    }
    for (int row = 0; row < count; row++) {
        Floats sum = add16(sums[row][0], sums[row][1]);
        if (CHAINS == 4) sum = add16(sum, add16(sums[row][2], sums[row][CHAINS - 1]));
        store16(rows->to[row], 0xffff, sum);
    }
}

/* Computes 16 ranks, `tile`, of A x for a run of rows. */
static void shrink_run(const Product *product, const SlotRun *run, const LowRank *update, int64_t tile) {
#define COUNT(rows_)                                                                                                   \
    case rows_:                                                                                                        \
        shrink_rows(&rows, a, num_lines, rows_);                                                                       \
        break;
    const Adapted *adapted = product->adapted;
    int64_t num_lines = product->weight->num_lines;
    const element *a = update->a + tile * num_lines * TILE;
    uint32_t left = run->rows;
    while (left) {
        ShrunkRows rows;
        int num_left = __builtin_popcount(left), num_passes = (num_left + SHRINK_ROWS - 1) / SHRINK_ROWS;
        int count = (num_left + num_passes - 1) / num_passes;
        for (int i = 0; i < count; i++, left &= left - 1) {
            int64_t row = run->block * BLOCK_ROWS + __builtin_ctz(left);
            rows.x[i] = (const int32_t *)rows_at(&product->x, row, 0);
            rows.steps[i] = WORDS(line_step(&product->x, row));
            rows.to[i] = adapted->shrunk + row * adapted->shrunk_stride + tile * 16;
        }
        switch (count) {
            COUNT(1)
            COUNT(2)
            COUNT(3)
#if SHRINK_ROWS > 3
            COUNT(4)
            COUNT(5)
            COUNT(6)
#endif
        }
    }
#undef COUNT
}

int64_t shrink(const Product *products, int64_t num_products, Team *team) {
    int64_t num_pieces = 0, first = 0, piece;
    for (int64_t i = 0; i < num_products; i++) {
        const Adapted *adapted = products[i].adapted;
        if (adapted != NULL) num_pieces += adapted->num_runs * adapted->num_rank_tiles;
    }
    const Product *product = products;
    for (; (piece = take_early(team, num_pieces)) < num_pieces; finish_early(team)) {
        const Adapted *adapted;
        for (;; product++) {
            adapted = product->adapted;
            int64_t count = adapted != NULL ? adapted->num_runs * adapted->num_rank_tiles : 0;
            if (piece - first < count) break;
            first += count;
        }
        int64_t number = (piece - first) / adapted->num_rank_tiles, tile = (piece - first) % adapted->num_rank_tiles;
        const SlotRun *run = &adapted->runs[adapted->order != NULL ? adapted->order[number] : number];
        const LowRank *update = product->weight->updates[run->slot];
        if (update != NULL && tile < update->num_rank_tiles) shrink_run(product, run, update, tile);
    }
    return num_pieces;
}

/* ── B (A x) ─────────────────────────────────────────────────────────────────────────────────────────────────────── */

/* Returns the segment of a tile, or NULL if it has none. */
INLINE const Segment *segment_of(const LowRank *update, int64_t tile) {
    const Segment *segment = update->segments;
    for (int64_t left = update->num_segments; left > 0; left--, segment++)
        if (tile < segment->end_tile) return tile >= segment->first_tile ? segment : NULL;
    return NULL;
}

INLINE int64_t tile_of(const Linear *w, int64_t pair, int side) {
    return w->is_gated ? side * w->num_pairs + pair : 2 * pair + side;
}

/* sums += B t for rows of words t. Every call passes a constant `count`. */
INLINE void expand_rows(float *const *to, const int32_t *const *t, const element *b, int64_t num_words,
                        const int count) {
    Floats sums[EXPAND_ROWS];
    for (int row = 0; row < count; row++) sums[row] = load_floats(to[row]);
    for (int64_t word = 0; word < num_words; word++) {
        Ints weights = load_any(b + word * LINE);
        for (int row = 0; row < count; row++) sums[row] = dot_line(sums[row], fill_words(t[row][word]), weights);
    }
    for (int row = 0; row < count; row++) store_floats(to[row], sums[row]);
}

/* Adds a tile's B t to the sums of `num_rows` rows, whose first sums and words are at to[row] and t[row]. */
static void expand_tile(float **to, const int32_t **t, int64_t num_rows, const element *b, int64_t num_words) {
#define COUNT(rows)                                                                                                    \
    case rows:                                                                                                         \
        expand_rows(to, t, b, num_words, rows);                                                                        \
        break;
    while (num_rows > 0) {
        int64_t count = divide_up(num_rows, divide_up(num_rows, EXPAND_ROWS));
        switch (count) {
            COUNT(1)
            COUNT(2)
            COUNT(3)
#if EXPAND_ROWS > 3
            COUNT(4)
            COUNT(5)
            COUNT(6)
            COUNT(7)
            COUNT(8)
#endif
        }
        num_rows -= count, to += count, t += count;
    }
#undef COUNT
}

static void scale_rows(float **to, int64_t num_rows, const float *scale) {
    for (int64_t row = 0; row < num_rows; row++)
        store_floats(to[row], multiply16(load_floats(to[row]), load_floats(scale)));
}

void expand(const Product *product, int64_t pair, int64_t row, float (*sums)[PAIR_OUTPUTS]) {
    const Linear *w = product->weight;
    const Adapted *adapted = product->adapted;
    int64_t block = row / BLOCK_ROWS;
    for (int64_t i = adapted->starts[block]; i < adapted->starts[block + 1]; i++) {
        const SlotRun *run = &adapted->runs[i];
        const LowRank *update = w->updates[run->slot];
        if (update == NULL) continue;
        float *to[BLOCK_ROWS];
        const int32_t *t[BLOCK_ROWS];
        for (int side = 0; side < 2; side++) {
            int64_t tile = tile_of(w, pair, side), num_rows = 0;
            const Segment *segment = segment_of(update, tile);
            if (segment == NULL && update->scale == NULL) continue;
            int64_t first_word = segment != NULL ? segment->first_word : 0;
            for (uint32_t left = run->rows; left; left &= left - 1, num_rows++) {
                int64_t number = __builtin_ctz(left);
                to[num_rows] = sums[number] + side * 16;
                t[num_rows] = (const int32_t *)(adapted->shrunk + (row + number) * adapted->shrunk_stride) + first_word;
            }
            if (segment != NULL)
                expand_tile(to, t, num_rows, segment->b + (tile - segment->first_tile) * segment->num_words * LINE,
                            segment->num_words);
            if (update->scale != NULL) scale_rows(to, num_rows, update->scale + tile * 16);
        }
    }
}

void fetch_expand(const Product *product, int64_t pair, int64_t row, int64_t part, int64_t num_parts) {
    const Linear *w = product->weight;
    const Adapted *adapted = product->adapted;
    int64_t block = row / BLOCK_ROWS, first = adapted->starts[block];
    Range range = share(adapted->starts[block + 1] - first, part, num_parts);
    for (int64_t i = first + range.start; i < first + range.stop; i++) {
        const LowRank *update = w->updates[adapted->runs[i].slot];
        if (update == NULL) continue;
        for (int side = 0; side < 2; side++) {
            int64_t tile = tile_of(w, pair, side);
            const Segment *segment = segment_of(update, tile);
            if (segment == NULL) continue;
            const element *b = segment->b + (tile - segment->first_tile) * segment->num_words * LINE;
            for (int64_t word = 0; word < segment->num_words; word++)
                _mm_prefetch((const char *)(b + word * LINE), _MM_HINT_T1);
        }
    }
}

/* ── embeddings ──────────────────────────────────────────────────────────────────────────────────────────────────── */

/* Adds B t to a row of elements; t: words. */
static void embed_row(const LowRank *update, const int32_t *t, int64_t num_columns, const Rows *out, int64_t row) {
    for (const Segment *segment = update->segments; segment < update->segments + update->num_segments; segment++) {
        const element *b = segment->b;
        for (int64_t tile = segment->first_tile; tile < segment->end_tile; tile++) {
            element *at = rows_at(out, row, tile * 16);
            Mask mask = lanes(num_columns - tile * 16);
            Floats sum = load16(at, mask);
            for (int64_t word = segment->first_word; word < segment->first_word + segment->num_words; word++, b += LINE)
                sum = dot_line(sum, fill_words(t[word]), load_any(b));
            store16(at, mask, sum);
        }
    }
}

void embed_updates(const LowRank *const *updates, const Adapted *adapted, const int32_t *token_ids, int64_t first_id,
                   int64_t num_columns, const Rows *out, Team *team) {
    for (Range range; take_share(team, adapted->num_runs, &range); finish_share(team, adapted->num_runs))
        for (const SlotRun *run = adapted->runs + range.start; run < adapted->runs + range.stop; run++) {
            const LowRank *update = updates[run->slot];
            if (update == NULL) continue;
            for (uint32_t left = run->rows; left; left &= left - 1) {
                int64_t row = run->block * BLOCK_ROWS + __builtin_ctz(left), id = token_ids[row] - first_id;
                if (id >= 0 && id < update->num_ids)
                    embed_row(update, (const int32_t *)update->a + id * update->num_words, num_columns, out, row);
            }
        }
}
