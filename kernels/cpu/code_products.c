/* Products of rows in 8 bits with lines of codes, see codes.h. */
#include "codes.h"

#ifdef HAS_CODES

#ifdef __AVX512VNNI__
#include "codes_vnni.h"
#else
#include "codes_avx2.h"
#endif

/* A piece of work: some rows of a block, at most CODE_ROWS, and some lines of a pair of tiles. */
typedef struct {
    float (*sums)[PAIR_OUTPUTS];
    const RowCodes *x;
    int64_t row, count;
    const Codes *w;
    const uint8_t *codes;
    int64_t pair, line, end, ahead;
} Piece;

#define HELD(rows, num_bits, kind)                                                                                     \
    case rows:                                                                                                         \
        multiply_codes_held(p->sums, p->x, p->row, p->w, p->codes, p->pair, p->line, p->end, p->ahead, rows, num_bits, \
                            kind);                                                                                     \
        break;
#if CODE_ROWS > 4
#define MANY_HELD(num_bits, kind)                                                                                      \
    HELD(3, num_bits, kind) HELD(4, num_bits, kind) HELD(5, num_bits, kind) HELD(6, num_bits, kind)
#else
#define MANY_HELD(num_bits, kind) HELD(3, num_bits, kind) HELD(4, num_bits, kind)
#endif
#define PIECES(name, num_bits, kind)                                                                                   \
    static __attribute__((noinline)) void name(const Piece *p) {                                                      \
        switch (p->count) { HELD(1, num_bits, kind) HELD(2, num_bits, kind) MANY_HELD(num_bits, kind) }               \
    }
PIECES(multiply_bytes, 8, STARTS)
PIECES(multiply_levels, 4, LEVELS)
PIECES(multiply_fours, 4, OFFSETS)
PIECES(multiply_fours_by_line, 4, LINE_NUMBERS)
PIECES(multiply_fours_by_half, 4, HALF_SCALES)
PIECES(multiply_fours_by_pair, 4, HALF_NUMBERS)
PIECES(multiply_fives, 5, OFFSETS)
PIECES(multiply_fives_by_line, 5, LINE_NUMBERS)
PIECES(multiply_sixes_by_half, 6, HALF_SCALES)

static void multiply_piece(const Piece *p) {
    const bool has_fives = p->w->num_bits == 5;
    switch (kind_of(p->w)) {
        case STARTS: return multiply_bytes(p);
        case LEVELS: return multiply_levels(p);
        case OFFSETS: return (has_fives ? multiply_fives : multiply_fours)(p);
        case LINE_NUMBERS: return (has_fives ? multiply_fives_by_line : multiply_fours_by_line)(p);
        case HALF_SCALES: return (p->w->num_bits == 6 ? multiply_sixes_by_half : multiply_fours_by_half)(p);
        case HALF_NUMBERS: return multiply_fours_by_pair(p);
    }
}

/* With fewer rows, the prefetcher of the processor alone does better. A line of codes of 5 bits is not read in order. */
INLINE int64_t fewest_prefetched_rows(const Codes *w) { return w->num_bits == 8 ? 4 : w->num_bits == 5 ? 1 : 2; }

void multiply_codes_rows(float (*sums)[PAIR_OUTPUTS], const RowCodes *x, const Codes *w, int64_t pair, int64_t line,
                         int64_t end) {
    const int64_t num_pieces = divide_up(x->num_rows, CODE_ROWS), line_bytes = code_line_bytes(w);
    const int64_t ahead = x->num_rows < fewest_prefetched_rows(w) ? 0 : (end - line) * line_bytes;
    const uint8_t *codes = w->codes + (pair * x->num_lines + line) * line_bytes;
    Piece piece = {sums, x, 0, 0, w, codes, pair, line, end, ahead};
    for (int64_t i = 0; i < num_pieces; i++, piece.row += piece.count, piece.ahead = 0) {
        piece.count = x->num_rows * (i + 1) / num_pieces - piece.row;
        piece.sums = sums + piece.row;
        multiply_piece(&piece);
    }
}

#endif
