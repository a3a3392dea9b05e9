/* Norms of groups of a token's elements with a gate: norm(x) * silu(gate), or norm(x * silu(gate)). */
#include "state.h"

#include <math.h>

/* Stores some elements of a row; those of a panel may lie in two lines. */
INLINE void store_in_row(const Rows *rows, int64_t row, int64_t column, Mask mask, Floats v) {
    if (!rows->panel_rows || column % 16 == 0) {
        store16(rows_at(rows, row, column), mask, v);
        return;
    }
    element kept[16];
    store16(kept, 0xffff, v);
    for (int i = 0; mask >> i; i++) *rows_at(rows, row, column + i) = kept[i];
}

/* Computes one group of a token; `kept` holds it in between, in float32. */
INLINE void normalize_group(const GatedNorm *gated, int64_t token, int64_t group, float *kept, const bool has_floats) {
    int64_t first = group * gated->group_size, size = gated->group_size;
    const element *gate = gated->gate + token * gated->gate_stride + first;
    const float *weight = gated->norm.weight + group * gated->weight_stride;
    Floats squares = zero16();
    for (int64_t i = 0; i < size; i += 16) {
        Mask mask = lanes(size - i);
        int64_t from = token * gated->x_stride + first + i;
        Floats v = has_floats ? load_some((const float *)gated->x + from, mask) : load16((const element *)gated->x + from, mask);
        if (gated->gates_first) v = multiply16(v, silu_16(load16(gate + i, mask)));
        squares = multiply_add16(v, v, squares);
        store_floats(kept + i, v);
    }
    bool has_norm = gated->norm.kind != NO_NORM;
    Floats scale = fill16(has_norm ? 1.0f / sqrtf(sum_of(squares) / (float)size + gated->norm.eps) : 1.0f);
    for (int64_t i = 0; i < size; i += 16) {
        Mask mask = lanes(size - i);
        Floats v = multiply16(load_floats(kept + i), scale);
        if (gated->norm.weight != NULL) v = multiply16(v, load_some(weight + i, mask));
        if (!gated->gates_first) v = multiply16(v, silu_16(load16(gate + i, mask)));
        store_in_row(&gated->out, token, first + i, mask, v);
    }
    if (!gated->out.panel_rows || group < gated->num_groups - 1) return;
    for (int64_t i = first + size; i < gated->out.stride; i++) *rows_at(&gated->out, token, i) = 0;
}

void normalize_gated(const GatedNorm *gated, int64_t num_tokens, Team *team) {
    float *kept = thread_scratch(round_up(gated->group_size, 16) * (int64_t)sizeof(float));
    int64_t num_tasks = num_tokens * gated->num_groups;
    for (Range range; take_share(team, num_tasks, &range); finish_share(team, num_tasks))
        for (int64_t task = range.start; task < range.stop; task++) {
            int64_t token = task / gated->num_groups, group = task % gated->num_groups;
            if (gated->has_floats) normalize_group(gated, token, group, kept, true);
            else normalize_group(gated, token, group, kept, false);
        }
}
