/* Packs codes of weights into tiles, the layout of codes.h. */
#include "codes.h"

EXPORT int32_t op_has_codes(void) {
#ifdef HAS_CODES
    return 1;
#else
    return 0;
#endif
}

/* Whether products as floats can read codes. */
EXPORT int32_t op_unpacks_codes(void) {
#ifdef HAS_TILES
    return 1;
#else
    return 0;
#endif
}

/* The codes of a weight as Python has them, [num_rows][num_inputs] and [num_rows][num_groups]. */
typedef struct {
    const uint8_t *codes;
    const float *scales; /* or halves, as in Codes */
    const uint16_t *halves;
    const uint8_t *zeros; /* NULL for 8 bits, and with mins */
    const uint16_t *mins;
} PlainCodes;

static void pack_line(const Linear *w, const uint8_t *const *rows, int64_t line, uint8_t *to) {
    const int per_byte = 8 / w->parts->num_bits;
    for (int64_t step = 0; step < LINE_STEPS; step += per_byte)
        for (int64_t output = 0; output < PAIR_OUTPUTS; output++)
            for (int64_t i = 0; i < 4; i++) {
                uint8_t byte = 0;
                for (int half = 0; half < per_byte; half++) {
                    int64_t input = line * LINE + (step + half) * 4 + i;
                    bool exists = rows[output] != NULL && input < w->num_inputs;
                    byte = (uint8_t)(byte | (exists ? rows[output][input] << 4 * half : 0));
                }
                to[step / per_byte * 128 + output * 4 + i] = byte;
            }
}

/* Fills the only part of a weight. Outputs that do not exist have scale 0. */
EXPORT void pack_codes(const Linear *w, const PlainCodes *from, int num_threads) {
    const Codes *codes = w->parts;
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t pair = 0; pair < w->num_pairs; pair++) {
        const uint8_t *rows[PAIR_OUTPUTS];
        for (int64_t output = 0; output < PAIR_OUTPUTS; output++) {
            int64_t row = row_of(w, pair, output);
            rows[output] = row < 0 ? NULL : from->codes + row * w->num_inputs;
            for (int64_t group = 0; group < codes->num_groups; group++) {
                int64_t to = (pair * codes->num_groups + group) * PAIR_OUTPUTS + output;
                int64_t at = row * codes->num_groups + group;
                if (from->scales != NULL) ((float *)codes->scales)[to] = row < 0 ? 0 : from->scales[at];
                if (from->halves != NULL) ((uint16_t *)codes->halves)[to] = row < 0 ? 0 : from->halves[at];
                if (from->zeros != NULL) ((uint8_t *)codes->zeros)[to] = row < 0 ? 0 : from->zeros[at];
                if (from->mins != NULL) ((uint16_t *)codes->mins)[to] = row < 0 ? 0 : from->mins[at];
            }
        }
        uint8_t *to = (uint8_t *)codes->codes + pair * w->num_lines * code_line_bytes(codes);
        for (int64_t line = 0; line < w->num_lines; line++, to += code_line_bytes(codes)) pack_line(w, rows, line, to);
    }
}
