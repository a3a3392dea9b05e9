/* Updates of linears by adapters, see low_rank.h: packing, grouping of rows, and both products.
 *
 * Rows of one slot are multiplied some at a time, each in the order of sums that it has alone, so that a row's bits
 * depend on the row and its slot only.
 */
#include "low_rank.h"

#define WORD ((int64_t)(4 / sizeof(element))) /* elements of a word */

/* ── packing ─────────────────────────────────────────────────────────────────────────────────────────────────────── */

INLINE int64_t words_of(int64_t rank) { return divide_up(rank, WORD); }

/* Returns the outputs of a tile of a pair, in the order of the weight that was packed. */
static Range outputs_of(const Linear *w, int64_t pair, int side) {
    int64_t first = w->is_gated ? 16 * pair : 32 * pair + 16 * side, shift = w->is_gated && side ? w->num_outputs : 0;
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

INLINE int64_t lines_of(const Segment *segment) { return segment->num_words[0] + segment->num_words[1]; }

/* Lists the segments, unless NULL; returns their number, and adds up the lines of their B. */
static int64_t list_segments(const Linear *w, const LowRankPart *parts, int64_t num_parts, Segment *segments,
                             int64_t *num_lines) {
    int64_t count = 0;
    Segment last = {0};
    for (int64_t pair = 0; pair < w->num_pairs; pair++) {
        Segment next = {.first_pair = pair, .end_pair = pair + 1};
        for (int side = 0; side < 2; side++) {
            Range words = words_read(parts, num_parts, outputs_of(w, pair, side));
            next.first_words[side] = words.start, next.num_words[side] = words.stop - words.start;
        }
        if (lines_of(&next) == 0) continue;
        bool follows = count && last.end_pair == pair;
        for (int side = 0; side < 2; side++)
            follows &= last.first_words[side] == next.first_words[side] && last.num_words[side] == next.num_words[side];
        if (follows) next.first_pair = last.first_pair;
        else count++;
        last = next;
        *num_lines += lines_of(&next);
        if (segments != NULL) segments[count - 1] = next;
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
    m.scale = (float *)take_bytes(memory, &at, has_scale ? w->num_pairs * 128 : 0);
    m.a = (element *)take_bytes(memory, &at, a_bytes);
    m.b = (element *)take_bytes(memory, &at, num_lines * 64);
    m.num_bytes = at;
    if (memory != NULL) {
        memset(memory, 0, (size_t)at);
        *m.update = (LowRank){m.a, m.segments, has_scale ? m.scale : NULL, num_segments, num_rank_tiles, num_words,
                              is_embedding ? w->num_inputs : 0};
    }
    return m;
}

int64_t low_rank_bytes(const Linear *w, const LowRankPart *parts, int64_t num_parts, int32_t has_scale,
                       int32_t is_embedding) {
    return lay_out(w, parts, num_parts, has_scale, is_embedding, NULL).num_bytes;
}

/* Loads values of A or B, at most 16. */
INLINE Floats load_values(const LowRankPart *part, const void *matrix, int64_t at, int64_t count) {
    return part->has_floats ? load_some((const float *)matrix + at, lanes(count))
                            : load16((const element *)matrix + at, lanes(count));
}

/* Writes `count` values of A or B times a factor, at most a line, as words of one lane of adjacent lines. */
static void pack_lane(element *lines, int64_t lane, const LowRankPart *from, const void *matrix, int64_t at,
                      int64_t count, float factor) {
    _Alignas(64) element part[LINE];
    const uint32_t *words = (const uint32_t *)part;
    for (int64_t i = 0; i < LINE; i += 16)
        store16(part + i, 0xffff, multiply16(load_values(from, matrix, at + i, count - i), fill16(factor)));
    for (int64_t word = 0; word < words_of(count); word++) ((uint32_t *)lines)[word * 16 + lane] = words[word];
}

/* Packs the A of all parts below one another: rank i of a part is word_of_part * WORD + i of A x. */
static void pack_a(const Linear *w, const LowRankPart *parts, int64_t num_parts, element *a) {
    for (int64_t i = 0, first = 0; i < num_parts; first += words_of(parts[i++].rank) * WORD)
        for (int64_t line = 0; line < w->num_lines; line++)
            for (int64_t rank = 0; rank < parts[i].rank; rank++) {
                int64_t at = first + rank, column = line * LINE;
                pack_lane(a + (at / 16 * w->num_lines + line) * TILE, at % 16, &parts[i], parts[i].a,
                          rank * w->num_inputs + column, min64(LINE, w->num_inputs - column), 1);
            }
}

/* Transposes the A of an embedding to a row per id. */
static void pack_ids(const Linear *w, const LowRankPart *parts, int64_t num_parts, int64_t num_words, element *a) {
    for (int64_t i = 0, first = 0; i < num_parts; first += words_of(parts[i++].rank) * WORD)
        for (int64_t rank = 0; rank < parts[i].rank; rank++)
            for (int64_t id = 0; id < w->num_inputs; id += 16) {
                _Alignas(64) element part[16];
                int64_t at = rank * w->num_inputs + id;
                store16(part, 0xffff, load_values(&parts[i], parts[i].a, at, w->num_inputs - id));
                for (int64_t j = 0; j < min64(16, w->num_inputs - id); j++)
                    a[(id + j) * num_words * WORD + first + rank] = part[j];
            }
}

/* Packs the rows of B of a tile's outputs into the lines of the words from `first_word` on. */
static void pack_b(const LowRankPart *parts, int64_t num_parts, Range outputs, int64_t first_word, element *lines) {
    for (int64_t i = 0, first = 0; i < num_parts; first += words_of(parts[i++].rank)) {
        const LowRankPart *part = &parts[i];
        int64_t start = max64(outputs.start, part->first_output);
        int64_t stop = min64(outputs.stop, part->first_output + part->num_outputs);
        for (int64_t output = start; output < stop; output++)
            for (int64_t rank = 0; rank < part->rank; rank += LINE)
                pack_lane(lines + (first + rank / WORD - first_word) * LINE, output - outputs.start, part, part->b,
                          (output - part->first_output) * part->rank + rank, min64(LINE, part->rank - rank),
                          part->factor);
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
        for (int64_t pair = segment->first_pair; pair < segment->end_pair; pair++)
            for (int side = 0; side < 2; b += segment->num_words[side++] * LINE)
                pack_b(parts, num_parts, outputs_of(w, pair, side), segment->first_words[side], b);
    }
    for (int64_t tile = 0; scale != NULL && tile < 2 * w->num_pairs; tile++) {
        Range outputs = outputs_of(w, tile / 2, tile % 2);
        store_some(m.scale + tile * 16, 0xffff, load_some(scale + outputs.start, lanes(outputs.stop - outputs.start)));
    }
}

/* ── grouping of rows ────────────────────────────────────────────────────────────────────────────────────────────── */

int32_t *group_rows(const int32_t *slots, int64_t num_rows, int32_t *memory, Adapted *to) {
    int64_t num_blocks = divide_up(num_rows, BLOCK_ROWS);
    int32_t *starts = memory;
    SlotRun *runs = (SlotRun *)(starts + num_blocks + 1), *end = runs;
    /* A run is the rows of one slot in one block of 32, as bits: rows with the slots 3 3 0 5 3 make the runs (slot 3,
     * rows 0b10011) and (slot 5, rows 0b01000). So an update is read once for all its rows of a block. */
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

#define CHAINS 2 /* sums of a row, of even and of odd words, as one sum would wait for the addition before it */
/* Rows that share a load of A or B. Their sums stay in registers, beside the word of a row that all lanes get:
 *     shrink   rows * CHAINS sums, a line of A      AVX-512: 12 * 2 + 1 of 32    AVX2, two registers each: 14 of 16
 *     expand   rows * 2 sums, two lines of B        AVX-512:  4 * 2 + 2 of 32    AVX2:                     12 of 16 */
#ifdef __AVX512F__
#define SHRINK_ROWS 12
#define EXPAND_ROWS 4
#else
#define SHRINK_ROWS 3
#define EXPAND_ROWS 2
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
#pragma GCC unroll 8
        for (int word = 0; word < 16; word += CHAINS)
#pragma GCC unroll 2
            for (int chain = 0; chain < CHAINS; chain++, a += LINE) {
                Ints weights = load_any(a);
#pragma GCC unroll 12
                for (int row = 0; row < count; row++)
                    sums[row][chain] = dot_line(sums[row][chain], fill_words(x[row][word + chain]), weights);
            }
        for (int row = 0; row < count; row++) x[row] += rows->steps[row];
    }
    for (int row = 0; row < count; row++) store16(rows->to[row], 0xffff, add16(sums[row][0], sums[row][1]));
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
            COUNT(7)
            COUNT(8)
            COUNT(9)
            COUNT(10)
            COUNT(11)
            COUNT(12)
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

/* Returns the segment of a pair, or NULL if it has none. */
INLINE const Segment *segment_of(const LowRank *update, int64_t pair) {
    const Segment *segment = update->segments;
    for (int64_t left = update->num_segments; left > 0; left--, segment++)
        if (pair < segment->end_pair) return pair >= segment->first_pair ? segment : NULL;
    return NULL;
}

void begin_expansion(Expansion *expansion, const Product *product, int64_t pair, int64_t row, int64_t num_times) {
    const int32_t *starts = product->adapted->starts + row / BLOCK_ROWS;
    expansion->num_runs = expansion->num_left = starts[1] - starts[0];
    expansion->num_each = divide_up(expansion->num_runs, num_times);
    expansion->product = product, expansion->pair = pair, expansion->row = row;
    expansion->runs = product->adapted->runs + starts[0];
}

void fetch_expansion(Expansion *expansion) {
    const Product *product = expansion->product;
    int64_t pair = expansion->pair, i = expansion->num_runs - expansion->num_left;
    int64_t end = i + min64(expansion->num_left, expansion->num_each);
    expansion->num_left = expansion->num_runs - end;
    for (; i < end; i++) {
        const LowRank *update = product->weight->updates[expansion->runs[i].slot];
        const Segment *segment = update != NULL ? segment_of(update, pair) : NULL;
        expansion->segments[i] = segment;
        if (segment == NULL) continue;
        int64_t num_lines = lines_of(segment);
        const element *b = expansion->b[i] = segment->b + (pair - segment->first_pair) * num_lines * LINE;
        for (const element *last = b + num_lines * LINE; b < last; b += LINE) _mm_prefetch((const char *)b, _MM_HINT_T1);
    }
}

/* The sums of a run's rows, and their words of A x. */
typedef struct {
    float *to[BLOCK_ROWS];
    const int32_t *t[BLOCK_ROWS];
} RunRows;

/* sums += B t for both tiles of a pair, as many words each. Every call passes a constant `count`. */
INLINE void expand_pair(const RunRows *rows, int64_t row, const Segment *segment, const element *b, const int count) {
    Floats first[EXPAND_ROWS], second[EXPAND_ROWS];
    const int32_t *t[EXPAND_ROWS];
    const int64_t num_words = segment->num_words[0], distance = segment->first_words[1] - segment->first_words[0];
    for (int i = 0; i < count; i++) {
        first[i] = load_floats(rows->to[row + i]);
        second[i] = load_floats(rows->to[row + i] + 16);
        t[i] = rows->t[row + i] + segment->first_words[0];
    }
    for (int64_t word = 0; word < num_words; word++, b += LINE) {
        Ints one = load_any(b), other = load_any(b + num_words * LINE);
        for (int i = 0; i < count; i++) {
            first[i] = dot_line(first[i], fill_words(t[i][word]), one);
            second[i] = dot_line(second[i], fill_words(t[i][word + distance]), other);
        }
    }
    for (int i = 0; i < count; i++) {
        store_floats(rows->to[row + i], first[i]);
        store_floats(rows->to[row + i] + 16, second[i]);
    }
}

/* sums += B t for one tile, of a pair of tiles with different numbers of words. */
static void expand_tile(const RunRows *rows, int64_t num_rows, const Segment *segment, int side, const element *b) {
    for (int64_t row = 0; row < num_rows; row++) {
        Floats sum = load_floats(rows->to[row] + side * 16);
        for (int64_t word = 0; word < segment->num_words[side]; word++) {
            Ints t = fill_words(rows->t[row][segment->first_words[side] + word]);
            sum = dot_line(sum, t, load_any(b + word * LINE));
        }
        store_floats(rows->to[row] + side * 16, sum);
    }
}

static void expand_run(const RunRows *rows, int64_t num_rows, const Segment *segment, const element *b) {
    if (segment->num_words[0] != segment->num_words[1]) {
        expand_tile(rows, num_rows, segment, 0, b);
        expand_tile(rows, num_rows, segment, 1, b + segment->num_words[0] * LINE);
        return;
    }
    for (int64_t row = 0, count; row < num_rows; row += count) {
        count = min64(num_rows - row, EXPAND_ROWS);
        if (count == 1) expand_pair(rows, row, segment, b, 1);
        if (count == 2) expand_pair(rows, row, segment, b, 2);
#if EXPAND_ROWS > 2
        if (count == 3) expand_pair(rows, row, segment, b, 3);
        if (count == 4) expand_pair(rows, row, segment, b, 4);
#endif
    }
}

static void scale_rows(const RunRows *rows, int64_t num_rows, const float *scale) {
    for (int64_t row = 0; row < num_rows; row++)
        for (int side = 0; side < 32; side += 16)
            store_floats(rows->to[row] + side, multiply16(load_floats(rows->to[row] + side), load_floats(scale + side)));
}

void expand(const Expansion *expansion, float (*sums)[PAIR_OUTPUTS]) {
    const Product *product = expansion->product;
    const element *shrunk = product->adapted->shrunk + expansion->row * product->adapted->shrunk_stride;
    for (int64_t i = 0; i < expansion->num_runs; i++) {
        const LowRank *update = product->weight->updates[expansion->runs[i].slot];
        const Segment *segment = expansion->segments[i];
        if (update == NULL || (segment == NULL && update->scale == NULL)) continue;
        RunRows rows;
        int64_t num_rows = 0;
        for (uint32_t left = expansion->runs[i].rows; left; left &= left - 1, num_rows++) {
            int64_t number = __builtin_ctz(left);
            rows.to[num_rows] = sums[number];
            rows.t[num_rows] = (const int32_t *)(shrunk + number * product->adapted->shrunk_stride);
        }
        if (segment != NULL) expand_run(&rows, num_rows, segment, expansion->b[i]);
        if (update->scale != NULL) scale_rows(&rows, num_rows, update->scale + expansion->pair * PAIR_OUTPUTS);
    }
}

/* ── embeddings ──────────────────────────────────────────────────────────────────────────────────────────────────── */

/* Adds B t to a row of elements; t: words. */
static void embed_row(const LowRank *update, const int32_t *t, int64_t num_columns, const Rows *out, int64_t row) {
    for (const Segment *segment = update->segments; segment < update->segments + update->num_segments; segment++) {
        const element *b = segment->b;
        for (int64_t tile = 2 * segment->first_pair; tile < 2 * segment->end_pair; tile++) {
            const int32_t *words = t + segment->first_words[tile % 2];
            element *at = rows_at(out, row, tile * 16);
            Mask mask = lanes(num_columns - tile * 16);
            Floats sum = load16(at, mask);
            for (int64_t word = 0; word < segment->num_words[tile % 2]; word++, b += LINE)
                sum = dot_line(sum, fill_words(words[word]), load_any(b));
            if (segment->num_words[tile % 2]) store16(at, mask, sum);
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
