/* Packs weights into tiles and activations into panels, the layouts of kernels.h.
 *
 * A weight [num_outputs][num_inputs] is packed as [num_pairs][num_lines][2 tiles], so that computing 32 outputs reads
 * one sequential stream.
 */
#include "codes.h"

/* Packs 16 rows of weight [num_outputs][num_inputs] from `first` on into a tile; rows from `end` on are 0. */
static void pack_tile(element *tile, const element *weight, int64_t num_inputs, int64_t first, int64_t end,
                      int64_t line) {
    _Alignas(64) uint32_t words[16][16];
    int64_t left = num_inputs - line * LINE;
    for (int64_t row = 0; row < 16; row++) {
        memset(words[row], 0, 64);
        if (first + row >= end) continue;
        const element *source = weight + (first + row) * num_inputs + line * LINE;
        memcpy(words[row], source, (size_t)min64(left, LINE) * sizeof(element));
    }
    uint32_t *target = (uint32_t *)tile;
    for (int pair = 0; pair < 16; pair++)
        for (int row = 0; row < 16; row++) target[pair * WORDS(TILE_STEP) + row] = words[row][pair];
}

EXPORT int64_t linear_num_pairs(int64_t num_outputs, int32_t is_gated) {
    /* Gated outputs are the next linear's inputs: round up to whole lines. */
    return is_gated ? round_up(num_outputs, LINE) / 16 : divide_up(num_outputs, PAIR_OUTPUTS);
}

/* Fills w->weight unless weight is NULL, and w->bias unless bias is NULL. A gated weight has 2 * num_outputs rows: all gates, then all ups. */
EXPORT void pack_linear(const Linear *w, const element *weight, const element *bias, int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t pair = 0; pair < w->num_pairs; pair++) {
        int64_t first[2] = {pair * 32, pair * 32 + 16}, end[2] = {w->num_outputs, w->num_outputs};
        if (w->is_gated) {
            first[0] = pair * 16;
            first[1] = w->num_outputs + pair * 16;
            end[1] = 2 * w->num_outputs;
        }
        element *tile = (element *)w->weight + pair * w->num_lines * 2 * TILE;
        for (int64_t line = 0; weight != NULL && line < w->num_lines; line++, tile += 2 * TILE)
            for (int side = 0; side < 2; side++)
                pack_tile(tile + side * SECOND_TILE, weight, w->num_inputs, first[side], end[side], line);
        if (bias == NULL) continue;
        for (int side = 0; side < 2; side++) {
            Floats v = load16(bias + first[side], lanes(end[side] - first[side]));
            store_some((float *)w->bias + pair * 32 + side * 16, 0xffff, v);
        }
    }
}

/* Returns the code of an input of a line. line: of the output. */
INLINE int code_at(const uint8_t *line, int64_t input, int num_bits) {
    const int step = (int)input / 4;
    line += input % 4;
    if (num_bits == 8) return line[step * 128];
    if (num_bits == 6) {
        line += step / 4 * 384;
        return step % 4 < 3 ? line[step % 4 * 128] & 63 : line[0] >> 6 | line[128] >> 6 << 2 | line[256] >> 6 << 4;
    }
    const int low = line[step / 2 * 128] >> step % 2 * 4 & 15;
    return num_bits == 4 ? low : low | (line[LINE * PAIR_OUTPUTS / 2] >> step & 1) << 4;
}

/* The numbers of half a line and an output: an element is (code - zero) * scale - min. */
typedef struct {
    float scale, min, zero;
} HalfNumbers;

/* at: of the output in its pair of tiles. */
static HalfNumbers half_numbers(const Codes *w, int64_t pair, int64_t num_lines, int64_t line, int half, int64_t at) {
    const int64_t group = (pair * w->num_groups + line / w->group_lines) * PAIR_OUTPUTS + at;
    const uint8_t *multiples = w->multiples + (pair * num_lines + line) * 2 * PAIR_OUTPUTS + at;
    HalfNumbers found = {.zero = w->num_bits == 8 || w->levels != NULL ? ZERO_CODE : 0};
    found.scale = w->halves != NULL ? _cvtsh_ss(w->halves[group]) : w->scales[group];
    if (w->mins != NULL) found.min = _cvtsh_ss(w->mins[group]);
    if (w->zeros != NULL) found.zero = ZERO_STEP * (float)w->zeros[group];
    if (w->multiples_kind == LINE_MULTIPLES)
        found.scale *= (float)multiples[0], found.min *= (float)multiples[PAIR_OUTPUTS];
    if (w->multiples_kind == HALF_MULTIPLES) {
        found.scale *= (float)(int8_t)multiples[half * PAIR_OUTPUTS];
        found.zero = (float)(1 << (w->num_bits - 1));
    }
    if (w->multiples_kind == HALF_PAIRS) {
        found.scale *= (float)(multiples[half * PAIR_OUTPUTS] & 15);
        found.min *= (float)(multiples[half * PAIR_OUTPUTS] >> 4);
    }
    return found;
}

/* The same from codes. */
static void embed_codes(const Linear *w, int64_t row, int64_t token, const Rows *out) {
    const bool is_ours = row >= 0 && row < w->num_outputs;
    const int64_t output = is_ours ? row % PAIR_OUTPUTS : 0;
    const Codes *part = part_of(w, is_ours ? row / PAIR_OUTPUTS : 0);
    const int64_t pair = is_ours ? row / PAIR_OUTPUTS - part->first_pair : 0;
    const uint8_t *at = part->codes + pair * w->num_lines * code_line_bytes(part) + output * 4;
    for (int64_t line = 0; line < w->num_lines; line++, at += code_line_bytes(part)) {
        _Alignas(64) float values[LINE] = {0};
        for (int64_t i = 0; is_ours && i < LINE; i += LINE / 2) {
            const HalfNumbers of = half_numbers(part, pair, w->num_lines, line, i != 0, output);
            for (int64_t input = i; input < i + LINE / 2; input++) {
                int code = code_at(at, input, part->num_bits);
                if (part->levels != NULL) code = part->levels[code];
                values[input] = ((float)code - of.zero) * of.scale - of.min;
            }
        }
        element *to = rows_at(out, token, line * LINE);
        int64_t left = w->num_inputs - line * LINE;
        for (int64_t i = 0; i < LINE; i += 16) store16(to + i, lanes(left - i), load_floats(values + i));
    }
}

/* Copies row `row` of the weight to row `token` of `out`; zeros if there is no such row. */
static void embed_token(const Linear *w, int64_t row, int64_t token, const Rows *out) {
    bool is_ours = row >= 0 && row < w->num_outputs;
    const uint32_t *words = (const uint32_t *)w->weight;
    if (is_ours) words += row / 32 * w->num_lines * 512 + row / 16 % 2 * WORDS(SECOND_TILE) + row % 16;
    for (int64_t line = 0; line < w->num_lines; line++) {
        _Alignas(64) uint32_t target[16] = {0};
        if (is_ours)
            for (int pair = 0; pair < 16; pair++) target[pair] = words[line * 512 + pair * WORDS(TILE_STEP)];
        int64_t count = min64(LINE, w->num_inputs - line * LINE);
        memcpy(rows_at(out, token, line * LINE), target, (size_t)count * sizeof(element));
    }
}

void embed_packed(const Linear *w, const int32_t *token_ids, int64_t num_tokens, int64_t first_id, const Rows *out,
                  Team *team) {
    for (Range range; take_share(team, num_tokens, &range); finish_share(team, num_tokens))
        for (int64_t token = range.start; token < range.stop; token++)
            (w->num_parts ? embed_codes : embed_token)(w, token_ids[token] - first_id, token, out);
}

static void fill_row(const Rows *panel, int64_t row, const element *from, int64_t num_columns) {
    element *line = rows_at(panel, row, 0);
    int64_t step = line_step(panel, row);
    for (int64_t left = num_columns; left > 0; left -= LINE, from += LINE, line += step)
        store_any(line, load_line(from, left));
}

void fill_panel(const Rows *panel, const element *x, int64_t stride, const int64_t *row_ids, int64_t num_rows,
                int64_t num_columns, Team *team) {
    for (Range range; take_share(team, num_rows, &range); finish_share(team, num_rows))
        for (int64_t row = range.start; row < range.stop; row++)
            fill_row(panel, row, x + (row_ids ? row_ids[row] : row) * stride, num_columns);
}
