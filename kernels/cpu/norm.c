/* RMS norms, alone or fused with the residual addition before them. */
#include "kernels.h"

#include <math.h>

/* x += delta unless delta is NULL; returns the sum of squares of x. */
static float add_and_square(element *x, const element *delta, int64_t num_columns) {
    Floats even = zero16(), odd = even;
    for (int64_t i = 0; i < num_columns; i += 32) {
        int64_t left = min64(32, num_columns - i);
        Floats32 v = load32(x + i, left);
        if (delta != NULL) {
            Floats32 d = load32(delta + i, left);
            v.a = add16(v.a, d.a);
            v.b = add16(v.b, d.b);
            store32(x + i, left, v);
            v = load32(x + i, left); /* the rounded values */
        }
        even = multiply_add16(v.a, v.a, even);
        odd = multiply_add16(v.b, v.b, odd);
    }
    return sum_of(add16(even, odd));
}

/* to = from * scale * weight, and zeros in a panel's padding. */
static void write_norm(const element *from, Floats scale, const float *weight, int64_t num_columns, const Rows *out,
                       int64_t row) {
    int64_t padded = out->panel_rows ? out->stride : num_columns;
    for (int64_t i = 0; i < padded; i += LINE) {
        element *to = rows_at(out, row, i);
        for (int64_t j = i; j < i + LINE; j += 16) {
            Mask mask = lanes(num_columns - j);
            Floats v = multiply16(multiply16(load16(from + j, mask), scale), load_some(weight + j, mask));
            store16(to + (j - i), lanes(padded - j), v);
        }
    }
}

void rms_norm(element *x, int64_t stride, const element *delta, int64_t delta_stride, const float *weight,
              float eps, int64_t num_rows, int64_t num_columns, const Rows *out, Team *team) {
    for (Range range; take_share(team, num_rows, &range); finish_share(team, num_rows))
        for (int64_t row = range.start; row < range.stop; row++) {
            element *from = x + row * stride;
            float squares = add_and_square(from, delta ? delta + row * delta_stride : NULL, num_columns);
            Floats scale = fill16(1.0f / sqrtf(squares / (float)num_columns + eps));
            write_norm(from, scale, weight, num_columns, out, row);
        }
}
