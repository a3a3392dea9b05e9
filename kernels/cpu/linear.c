/* Linear layers, for any number of rows.
 *
 * A piece of work is some pairs of tiles, of one or of several linears in a row. A part of the rows that fits in the L2
 * cache is multiplied by one pair after another, 32 rows at a time. Each output is summed over the inputs in one fixed
 * order, so that a row's bits do not depend on the other rows or on the number of threads.
 */
#include "activations.h"
#include "avx2.h"
#include "avx512.h"
#include "codes.h"
#include "low_rank.h"

#define CACHED_BYTES (1 << 20) /* of operands kept in the L2 cache */
#if defined(HAS_TILES)
#define CACHED_LINES 1 /* lines of a pair of tiles that are multiplied by all rows of a block before the next ones */
#elif defined(__AVX512F__)
#define CACHED_LINES 4 /* 8 KiB: stay in the L1 cache */
#else
#define CACHED_LINES 8 /* 16 KiB */
#endif

/* The weights to prefetch into the L2 cache: `step` lines per line of the rows. */
typedef struct {
    const char *next;
    int64_t step;
} Ahead;

INLINE void fetch_ahead(Ahead *ahead) {
    for (int64_t i = 0; i < ahead->step; i++, ahead->next += 64) _mm_prefetch(ahead->next, _MM_HINT_T1);
}

/* ── sums of a block of rows and a pair of tiles, and their output ───────────────────────────────────────────────── */

/* The usual outputs have code of their own: those without activation outside a panel, and gated silu. */
typedef enum { PLAIN, GATED_SILU, OTHER } Form;

typedef struct {
    _Alignas(64) float sums[BLOCK_ROWS][PAIR_OUTPUTS];
    Floats bias[2], factor;
    Mask masks[2]; /* of existing outputs */
    int64_t num_rows, num_finished;
    OutputKind kind;
    Form form;
    const Linear *linear;
    int64_t panel_rows; /* of the target, from the block's first row on */
    char *groups[2]; /* address of the first output of each group's first row */
    int64_t row_bytes; /* between rows */
    Expansion expansion; /* of adapters, without runs once it is added to the sums */
    const Team *team;
    int64_t num_early; /* pieces of the stage that `expand` waits for */
} Block;

/* Returns how often a block is multiplied by some lines of a pair of tiles. */
INLINE int64_t num_chunks(const Linear *w) {
#ifdef HAS_CODES
    if (w->num_parts && !w->has_float_products) return divide_up(w->num_lines, CODE_LINES);
#endif
    return divide_up(w->num_lines, CACHED_LINES);
}

static void describe(Block *block, const Product *product, int64_t pair, int64_t row, int64_t num_rows) {
    const Linear *w = product->weight;
    const Output *out = &product->out;
    const Rows *target = &out->target;
    int64_t column = pair * (w->is_gated ? 16 : 32), end = w->num_outputs;
    if (target->panel_rows) end = target->stride; /* write the padding too: zeros, as the weight's */
    block->kind = out->kind;
    block->factor = fill16(out->factor);
    block->linear = w;
    block->panel_rows = target->panel_rows ? target->panel_rows - row : 0;
    if (w->is_gated) block->form = w->activation == SILU ? GATED_SILU : OTHER;
    else block->form = w->activation == NO_ACTIVATION && !target->panel_rows ? PLAIN : OTHER;
    block->num_rows = num_rows, block->num_finished = 0;
    block->expansion.num_runs = block->expansion.num_left = 0;
    if (product->adapted != NULL)
        begin_expansion(&block->expansion, product, pair, row, num_chunks(w));
    int64_t bytes = out->kind == STORE_FLOAT ? sizeof(float) : sizeof(element);
    block->row_bytes = target->panel_rows ? 64 : target->stride * bytes;
    for (int side = 0; side < 2; side++) {
        block->bias[side] = w->bias ? load_some(w->bias + pair * 32 + side * 16, 0xffff) : zero16();
        block->masks[side] = lanes(end - column - side * 16);
        int64_t first = row + side * GROUP_ROWS;
        block->groups[side] = target->panel_rows ? (char *)rows_at(target, first, column)
                                                 : (char *)target->data + (first * target->stride + column) * bytes;
    }
}

INLINE void put_pair(const Block *block, char *target, Floats first, Floats second) {
    Mask mask0 = block->masks[0], mask1 = block->masks[1];
    if (block->kind == STORE_FLOAT) {
        store_some((float *)target, mask0, first);
        store_some((float *)target + 16, mask1, second);
        return;
    }
    element *at = (element *)target;
#ifdef ELEMENT_BF16
    if (block->kind == STORE && (mask0 & mask1) == 0xffff) { /* a whole line */
        store_any(at, narrow_pair(first, second));
        return;
    }
#endif
    if (block->kind == ADD) {
        first = multiply_add16(first, block->factor, load16(at, mask0));
        second = multiply_add16(second, block->factor, load16(at + 16, mask1));
    }
    store16(at, mask0, first);
    store16(at + 16, mask1, second);
}

/* Writes a row of outputs, for any activation and target. */
static __attribute__((noinline)) void put_other(const Block *block, int64_t row, char *target) {
    const Linear *w = block->linear;
    element *at = (element *)target;
    Floats first = add16(load_floats(block->sums[row]), block->bias[0]);
    Floats second = add16(load_floats(block->sums[row] + 16), block->bias[1]);
    if (w->is_gated) {
        store16(at, block->masks[0], activate_gated_16(w->activation, w->limit, first, second));
        return;
    }
    first = activate_16(w->activation, w->limit, first);
    second = activate_16(w->activation, w->limit, second);
    if (block->panel_rows) {
        int64_t height = min64(GROUP_ROWS, block->panel_rows - row / GROUP_ROWS * GROUP_ROWS);
        store16(at, block->masks[0], first);
        store16(at + (LINE == 32 ? 16 : height * LINE), block->masks[1], second);
    } else put_pair(block, target, first, second);
}

/* Adds the adapters' updates to the sums of the block, before its first row is finished. */
static __attribute__((noinline)) void update_sums(Block *block) {
    await_early(block->team, block->num_early);
    expand(&block->expansion, block->sums);
    block->expansion.num_runs = 0;
}

/* Writes the next `count` rows of the block, or all that are left, to the output. */
INLINE void finish_rows(Block *block, int64_t count) {
    if (block->expansion.num_runs) update_sums(block);
    for (int64_t end = min64(block->num_rows, block->num_finished + count); block->num_finished < end;) {
        int64_t row = block->num_finished++;
        char *target = block->groups[row / GROUP_ROWS] + row % GROUP_ROWS * block->row_bytes;
        if (block->form == OTHER) {
            put_other(block, row, target);
            continue;
        }
        Floats first = add16(load_floats(block->sums[row]), block->bias[0]);
        Floats second = add16(load_floats(block->sums[row] + 16), block->bias[1]);
        if (block->form == GATED_SILU)
            store16((element *)target, block->masks[0], multiply16(silu_16(first), second));
        else put_pair(block, target, first, second);
    }
}

/* ── operands: the rows of a panel as the inner routine reads them ───────────────────────────────────────────────── */

#if defined(ELEMENT_BF16) && !defined(__AVX512F__)
typedef float operand;

/* Widens rows [first, end) of the panel to float32; `first` begins a group. Valid until the thread's next call. */
static const operand *take_operands(const Rows *x, int64_t first, int64_t end) {
    const element *from = x->data + first * x->stride;
    int64_t count = (end - first) * x->stride;
    operand *wide = thread_scratch(count * (int64_t)sizeof *wide);
    for (int64_t i = 0; i < count; i += 16) store_floats(wide + i, load16(from + i, 0xffff));
    return wide;
}
#else
typedef element operand;

static const operand *take_operands(const Rows *x, int64_t first, int64_t end) {
    (void)end;
    return x->data + first * x->stride;
}
#endif

/* ── the elements of a pair of tiles ─────────────────────────────────────────────────────────────────────────────── */

#define UNPACKED_ROWS (4 * BLOCK_ROWS) /* codes become elements once for so many rows, if there are */

/* The lines of a pair of tiles: the weight's, or memory for those that codes become. */
typedef struct {
    element *lines;
    int64_t mask; /* of a line's number: memory for two lines is used in turns */
    const Codes *codes; /* NULL: the lines are there */
    int64_t pair; /* of the codes */
} Elements;

/* Returns the lines for the first block of rows of a piece. Those of codes are valid until the thread's next call of
 * thread_scratch. */
static Elements elements_of(const Linear *w, int64_t pair, bool is_only_block) {
    if (!w->num_parts) return (Elements){(element *)w->weight + pair * w->num_lines * 2 * TILE, -1, NULL, 0};
    const Codes *part = part_of(w, pair);
    int64_t num_bytes = (is_only_block ? 2 : w->num_lines) * 2 * TILE * (int64_t)sizeof(element);
    return (Elements){thread_scratch(num_bytes), is_only_block ? 1 : -1, part, pair - part->first_pair};
}

/* Returns the address of the elements or codes of a pair of tiles. */
INLINE const char *stored_pair(const Linear *w, int64_t pair) {
    if (!w->num_parts) return (const char *)(w->weight + pair * w->num_lines * 2 * TILE);
    const Codes *part = part_of(w, pair);
    return (const char *)part->codes + (pair - part->first_pair) * w->num_lines * code_line_bytes(part);
}

/* Returns the prefetches of what follows a pair of tiles, while `num_blocks` blocks are multiplied by it. following: the
 * next product, or NULL. */
INLINE Ahead ahead_of(const Linear *w, int64_t pair, const Product *following, int64_t num_blocks) {
    int64_t line_bytes = w->num_parts ? code_line_bytes(part_of(w, pair)) : 2 * TILE * (int64_t)sizeof(element);
    const char *next = stored_pair(w, pair + 1);
    if (pair == w->num_pairs - 1 && following != NULL) next = stored_pair(following->weight, 0);
    return (Ahead){next, divide_up(line_bytes / 64, num_blocks)};
}

/* ── a block of rows times a pair of tiles ───────────────────────────────────────────────────────────────────────── */

#ifdef HAS_TILES

/* Tiles 0 to 3: sums of (upper, lower group) x (first, second tile); 4, 5: rows of the groups; 6, 7: the weight. */
static void configure_tiles(int64_t upper, int64_t lower) {
    TileConfig config = {.palette = 1};
    for (int side = 0; side < 2; side++) {
        shape_tile(&config, side, upper, 64);
        shape_tile(&config, 2 + side, lower ? lower : 1, 64);
        shape_tile(&config, 6 + side, 16, 64);
    }
    shape_tile(&config, 4, upper, 64);
    shape_tile(&config, 5, lower ? lower : 1, 64);
    _tile_loadconfig(&config);
}

/* Returns line `line` of a pair of tiles. */
INLINE element *line_of(const Elements *elements, int64_t line) {
    return elements->lines + (line & elements->mask) * 2 * TILE;
}

/* Makes line `line`, if there is one, of its codes. */
INLINE void make_line(const Elements *elements, int64_t num_lines, int64_t line) {
    if (elements->codes != NULL && line < num_lines)
        unpack_codes(line_of(elements, line), elements->codes, elements->pair, num_lines, line);
}

/* x: the first group's lines, then the second group's. is_near: whether another block has just been multiplied by the
 * elements. Rows of the block `before` are written at the same time, as tiles and vectors use different execution units;
 * so is the next line of codes unpacked. */
static void multiply(Block *block, const operand *x, const Elements *elements, int64_t num_lines, int64_t num_rows,
                     Ahead *ahead, bool is_near, Block *before) {
    int64_t rows_per_line = divide_up(before->num_rows, num_lines);
    const element *lower = x + GROUP_ROWS * num_lines * LINE;
    (void)is_near;
    make_line(elements, num_lines, 0);
    _tile_zero(0);
    _tile_zero(1);
    if (num_rows <= GROUP_ROWS) {
        int64_t step = num_rows * LINE;
        for (int64_t line = 0; line < num_lines; line++) {
            const element *weight = line_of(elements, line);
            fetch_ahead(ahead);
            make_line(elements, num_lines, line + 1);
            if (block->expansion.num_left) fetch_expansion(&block->expansion);
            _tile_loadd(4, x + line * step, 64);
            _tile_loadd(6, weight, TILE_STEP_BYTES);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, weight + SECOND_TILE, TILE_STEP_BYTES);
            _tile_dpbf16ps(1, 4, 7);
            finish_rows(before, rows_per_line);
        }
    } else {
        int64_t step = (num_rows - GROUP_ROWS) * LINE;
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t line = 0; line < num_lines; line++) {
            const element *weight = line_of(elements, line);
            fetch_ahead(ahead);
            make_line(elements, num_lines, line + 1);
            if (block->expansion.num_left) fetch_expansion(&block->expansion);
            _tile_loadd(4, x + line * TILE, 64);
            _tile_loadd(6, weight, TILE_STEP_BYTES);
            _tile_loadd(7, weight + SECOND_TILE, TILE_STEP_BYTES);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, lower + line * step, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            finish_rows(before, rows_per_line);
        }
        _tile_stored(2, block->sums[16], sizeof block->sums[0]);
        _tile_stored(3, block->sums[16] + 16, sizeof block->sums[0]);
    }
    _tile_stored(0, block->sums[0], sizeof block->sums[0]);
    _tile_stored(1, block->sums[0] + 16, sizeof block->sums[0]);
}

#elif defined(__AVX512F__)

#define PREFETCHED_ROWS 8 /* with fewer, the prefetcher of the processor alone does better */
#define FETCHED_LINES 64 /* 4 KiB of the next weight, before adapters' updates are added */

/* While the rows are multiplied by some lines of the weight, the first group's passes prefetch the next ones. Two groups
 * take so long that memory would be idle: the second one's passes prefetch the keys and values of the next attention. */
static void multiply(Block *block, const operand *x, const Elements *elements, int64_t num_lines, int64_t num_rows,
                     Ahead *ahead, bool is_near, Block *before) {
    const element *weight = elements->lines;
    int64_t upper = min64(num_rows, GROUP_ROWS), lower = num_rows - upper;
    int64_t num_fetches = num_rows < PREFETCHED_ROWS ? 0 : num_rows <= HELD_ROWS ? 2 : 1;
    (void)ahead, (void)is_near;
    if (before->expansion.num_runs) /* which takes so long that the prefetcher of the processor would lag behind */
        for (int64_t i = 0; i < FETCHED_LINES; i++) _mm_prefetch((const char *)(weight + i * LINE), _MM_HINT_T0);
    finish_rows(before, BLOCK_ROWS);
    for (int64_t line = 0; line < num_lines; line += CACHED_LINES) {
        const element *at = weight + line * 2 * TILE;
        int64_t count = min64(CACHED_LINES, num_lines - line);
        Fetch fetch = {(const char *)(at + CACHED_LINES * 2 * TILE), num_fetches, NULL};
        if (block->expansion.num_left) fetch_expansion(&block->expansion);
        for (int64_t first = 0; first < num_rows; first += GROUP_ROWS) {
            int64_t height = first ? lower : upper;
            if (first) fetch.count = 0, fetch.upcoming = block->team->upcoming; /* 16 rows have fetched all weights */
            multiply_group(block->sums[first], PAIR_OUTPUTS, line == 0, x + (first * num_lines + line * height) * LINE,
                           height, height, at, count, &fetch);
        }
    }
}

#else

#define AHEAD_BYTES 2048 /* prefetch distance of the first rows of a block */

/* Multiplies rows [0, count) of a group of `height` rows in memory order, for the rows that first load the weight. */
INLINE void multiply_far(float (*sums)[PAIR_OUTPUTS], const float *x, int64_t height, const element *weight,
                         int64_t num_lines, int64_t count) {
    for (int64_t tile = 0; tile < 2 * num_lines; tile++)
        multiply_tile(sums[0] + tile % 2 * 16, PAIR_OUTPUTS, x + tile / 2 * height * LINE, LINE, 0,
                      weight + tile * TILE, 1, count, AHEAD_BYTES, NULL);
}

/* Returns the address of the operands that follow those of some lines and the group that begins with row `first`: of the
 * next group, else of the first group's next lines, else of the next block. NULL: one group stays in the L1 cache. */
INLINE const char *operands_after(const operand *x, int64_t num_lines, int64_t num_rows, int64_t line, int64_t first) {
    int64_t height = min64(GROUP_ROWS, num_rows - first);
    if (num_rows <= GROUP_ROWS) return NULL;
    if (first + height < num_rows) return (const char *)(x + ((first + height) * num_lines + line * height) * LINE);
    if (line + CACHED_LINES >= num_lines) return (const char *)(x + num_rows * num_lines * LINE);
    return (const char *)(x + (line + CACHED_LINES) * GROUP_ROWS * LINE);
}

static void multiply(Block *block, const operand *x, const Elements *elements, int64_t num_lines, int64_t num_rows,
                     Ahead *ahead, bool is_near, Block *before) {
    const element *weight = elements->lines;
    (void)ahead;
    finish_rows(before, BLOCK_ROWS);
    memset(block->sums, 0, (size_t)num_rows * sizeof block->sums[0]);
    for (int64_t line = 0; line < num_lines; line += CACHED_LINES, weight += CACHED_LINES * 2 * TILE) {
        if (block->expansion.num_left) fetch_expansion(&block->expansion);
        for (int64_t first = 0; first < num_rows; first += GROUP_ROWS) {
            int64_t height = min64(GROUP_ROWS, num_rows - first), count = min64(CACHED_LINES, num_lines - line);
            const operand *group = x + (first * num_lines + line * height) * LINE;
            int64_t far = first || is_near ? 0 : height / divide_up(height, HELD_ROWS);
            multiply_far(block->sums + first, group, height, weight, count, far);
            multiply_near(block->sums[first + far], PAIR_OUTPUTS, group + far * LINE, LINE, height * LINE,
                          height - far, weight, count, operands_after(x, num_lines, num_rows, line, first));
        }
    }
}

#endif

/* ── the same with codes ─────────────────────────────────────────────────────────────────────────────────────────── */

#ifdef HAS_CODES

static void multiply_codes(Block *block, const RowCodes *x, int64_t row, const Linear *w, int64_t pair,
                           Block *before) {
    const RowCodes rows = block_of(x, row);
    const Codes *part = part_of(w, pair);
    finish_rows(before, BLOCK_ROWS);
    for (int64_t line = 0; line < w->num_lines; line += CODE_LINES) {
        if (block->expansion.num_left) fetch_expansion(&block->expansion);
        multiply_codes_rows(block->sums, &rows, part, pair - part->first_pair, line,
                            min64(w->num_lines, line + CODE_LINES));
    }
}

#endif

Product make_product(const Linear *w, const Rows *x, int64_t num_rows, const Output *out, const Adapted *adapted) {
    int64_t row_bytes = w->num_lines * LINE * (int64_t)sizeof(operand);
    int64_t least_rows = w->has_float_products ? UNPACKED_ROWS : BLOCK_ROWS;
    int64_t cached_rows = max64(least_rows, CACHED_BYTES / row_bytes / BLOCK_ROWS * BLOCK_ROWS);
    int64_t num_parts = max64(1, divide_up(num_rows, cached_rows));
    int64_t part_rows = round_up(divide_up(num_rows, num_parts), BLOCK_ROWS);
    if (w->updates == NULL) adapted = NULL;
    return (Product){w, *x, *out, num_rows, part_rows, num_rows ? num_parts * w->num_pairs : 0, adapted};
}

void multiply_products(const Product *products, int64_t num_products, Team *team) {
    int64_t num_items = 0, first = 0 /* item of the product */, configured = 0, taken = -1;
    for (int64_t i = 0; i < num_products; i++) num_items += products[i].num_items;
    const Product *product = products, *last = products + num_products - 1;
    const operand *operands = NULL;
#ifdef HAS_CODES
    RowCodes codes;
#endif
    /* Two blocks take turns: the outputs of one are finished while the next is multiplied.
     *     multiply   block 0   block 1   block 2
     *     finish               block 0   block 1   block 2
     * The last one is finished before its piece is: when all pieces are, the next stage may read every output. Adapters'
     * updates are added as late as that, so that other threads' early pieces of `shrink` have mostly ended by then. */
    Block blocks[2], *block = &blocks[0], *before = &blocks[1];
    before->num_rows = before->num_finished = before->expansion.num_runs = 0;
    block->team = before->team = team;
    block->num_early = before->num_early = shrink(products, num_products, team);
    for (Range range; take_falling(team, num_items, &range); finish_falling(team, num_items)) {
        for (int64_t item = range.start; item < range.stop; item++) {
            for (; item - first >= product->num_items; product++) first += product->num_items, taken = -1;
            const Linear *w = product->weight;
            int64_t part = (item - first) / w->num_pairs, pair = (item - first) % w->num_pairs;
            int64_t start = part * product->part_rows, end = min64(product->num_rows, start + product->part_rows);
            int64_t num_blocks = divide_up(end - start, BLOCK_ROWS);
            Ahead ahead = ahead_of(w, pair, product < last ? product + 1 : NULL, num_blocks);
            Elements elements = {0};
#ifdef HAS_CODES
            const bool has_integers = w->num_parts && !w->has_float_products;
            if (has_integers && taken != part) codes = take_codes(&product->x, start, end), taken = part;
            if (!has_integers)
#endif
                elements = elements_of(w, pair, num_blocks == 1);
            if (taken != part) operands = take_operands(&product->x, start, end), taken = part;
            for (int64_t row = start; row < end; row += BLOCK_ROWS) {
                int64_t count = min64(BLOCK_ROWS, end - row);
#ifdef HAS_TILES
                if (configured != count) configure_tiles(min64(count, GROUP_ROWS), count - min64(count, GROUP_ROWS));
                configured = count;
#endif
                describe(block, product, pair, row, count);
#ifdef HAS_CODES
                if (has_integers) multiply_codes(block, &codes, row - start, w, pair, before);
                else
#endif
                    multiply(block, operands + (row - start) * product->x.stride, &elements, w->num_lines, count,
                             &ahead, row > start, before);
                elements.codes = NULL; /* its lines are there */
                Block *other = before;
                before = block;
                block = other;
            }
        }
        finish_rows(before, BLOCK_ROWS);
    }
    (void)configured;
}
