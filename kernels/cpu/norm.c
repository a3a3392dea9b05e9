/* Norms of rows, alone or fused with the residual addition before them, and norms of query and key heads. */
#include "kernels.h"

#include <math.h>

/* ── statistics ──────────────────────────────────────────────────────────────────────────────────────────────────── */

static float mean_of(const element *x, int64_t count) {
    Floats sum = zero16();
    for (int64_t i = 0; i < count; i += 16) sum = add16(sum, load16(x + i, lanes(count - i)));
    return sum_of(sum) / (float)count;
}

Statistics measure(const element *x, int64_t count, const Norm *norm) {
    if (norm->kind == NO_NORM) return (Statistics){0, 1};
    Statistics found = {norm->kind == LAYER_NORM ? mean_of(x, count) : 0, 0};
    Floats mean = fill16(found.mean), squares = zero16();
    for (int64_t i = 0; i < count; i += 16) {
        Mask mask = lanes(count - i);
        Floats v = load16(x + i, mask);
        if (norm->kind == LAYER_NORM) v = keep(mask, subtract16(v, mean));
        squares = multiply_add16(v, v, squares);
    }
    found.scale = 1.0f / sqrtf(sum_of(squares) / (float)count + norm->eps);
    return found;
}

/* As `measure` for an RMS norm, by two sums. */
static float inverse_rms(const element *x, int64_t count, float eps) {
    Floats even = zero16(), odd = even;
    for (int64_t i = 0; i < count; i += 32) {
        Floats32 v = load32(x + i, min64(32, count - i));
        even = multiply_add16(v.a, v.a, even);
        odd = multiply_add16(v.b, v.b, odd);
    }
    return 1.0f / sqrtf(sum_of(add16(even, odd)) / (float)count + eps);
}

/* ── rows ────────────────────────────────────────────────────────────────────────────────────────────────────────── */

/* x += factor * norm(delta) */
static void add_delta(element *x, const element *delta, const Norm *norm, float factor, int64_t num_columns) {
    Statistics found = measure(delta, num_columns, norm);
    Floats scale = fill16(factor);
    for (int64_t i = 0; i < num_columns; i += 16) {
        Mask mask = lanes(num_columns - i);
        Floats v = normalized(load16(delta + i, mask), &found, norm, i, mask);
        store16(x + i, mask, multiply_add16(scale, v, load16(x + i, mask)));
    }
}

/* to = norm(from), and zeros in a panel's padding. `is_usual`: an RMS norm with weights. */
INLINE void write_norm(const element *from, const Statistics *found, const Norm *norm, int64_t num_columns,
                       const Rows *out, int64_t row, const bool is_usual) {
    int64_t padded = out->panel_rows ? out->stride : num_columns;
    Floats scale = fill16(found->scale);
    for (int64_t i = 0; i < padded; i += LINE) {
        element *to = rows_at(out, row, i);
        for (int64_t j = i; j < i + LINE; j += 16) {
            Mask mask = lanes(num_columns - j);
            Floats v = load16(from + j, mask);
            if (is_usual) v = multiply16(multiply16(v, scale), load_some(norm->weight + j, mask));
            else v = keep(mask, normalized(v, found, norm, j, mask));
            store16(to + (j - i), lanes(padded - j), v);
        }
    }
}

/* to = norm(from) for one row of `out`; `from` may be that row. */
INLINE void normalize_one(const element *from, const Norm *norm, int64_t num_columns, const Rows *out, int64_t row) {
    if (norm->kind == RMS_NORM && norm->weight != NULL) {
        Statistics found = {0, inverse_rms(from, num_columns, norm->eps)};
        write_norm(from, &found, norm, num_columns, out, row, true);
    } else {
        Statistics found = measure(from, num_columns, norm);
        write_norm(from, &found, norm, num_columns, out, row, false);
    }
}

void normalize_row(element *x, const Norm *norm, int64_t num_columns) {
    Rows out = {x, num_columns, 0};
    normalize_one(x, norm, num_columns, &out, 0);
}

void normalize(element *x, int64_t stride, const Delta *delta, const Norm *behind, const Norm *norm, int64_t num_rows,
               int64_t num_columns, const Rows *out, Team *team) {
    for (Range range; take_share(team, num_rows, &range); finish_share(team, num_rows))
        for (int64_t row = range.start; row < range.stop; row++) {
            element *from = x + row * stride;
            if (delta->data != NULL)
                add_delta(from, delta->data + row * delta->stride, &delta->norm, delta->factor, num_columns);
            if (behind != NULL) normalize_row(from, behind, num_columns);
            normalize_one(from, norm, num_columns, out, row);
        }
}
