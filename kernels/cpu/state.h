/* Layers with a state: causal convolutions, scans and gated norms, as in reference_state.py.
 *
 * A task is a range of a row's channels, or a head and some of its columns: it goes through all tokens of the row that are
 * in the step, in order. No two tasks share a number that one of them writes, and a number's sums have a fixed order. So
 * its bits depend neither on the threads nor on how the row was cut into steps. */
#ifndef TOKENLOOM_STATE_H
#define TOKENLOOM_STATE_H

#include "kernels.h"

/* Segments of a step's tokens, and the blocks with the states before and after each. */
typedef struct {
    const int32_t *starts; /* [num_segments + 1] */
    const int32_t *reads, *writes; /* [num_segments], < 0: zeros; do not write */
    int64_t num_segments;
} Segments;

/* Returns whether a segment goes on from the one before it. The first task of a row computes all of its segments. */
INLINE bool continues_row(const Segments *segments, int64_t segment) {
    if (segment == 0 || segment == segments->num_segments) return false;
    return segments->reads[segment] >= 0 && segments->reads[segment] == segments->writes[segment - 1];
}

/* ── conv.c ──────────────────────────────────────────────────────────────────────────────────────────────────────── */

#define MAX_TAPS 8

typedef struct {
    const element *x; /* [num_tokens][x_stride] */
    int64_t x_stride, num_channels, num_taps;
    const float *factors; /* [num_taps][num_channels], that of the newest token last */
    const float *bias; /* [num_channels], or NULL */
    int32_t has_silu;
    element *states; /* [blocks][num_taps - 1][num_channels], oldest token first */
    int64_t block_stride; /* elements between blocks */
    element *out; /* [num_tokens][num_channels] */
} Conv;

void convolve(const Conv *conv, const Segments *segments, Team *team);

/* ── scan.c ──────────────────────────────────────────────────────────────────────────────────────────────────────── */

#define MAX_KEY_DIM 256

/* q, k, v and out are elements, or with `has_floats` float32. Strides count their numbers from token to token. */
typedef struct {
    const void *q, *k; /* [num_tokens][key_heads][key_dim] */
    const void *v; /* [num_tokens][value_heads][value_dim] */
    int64_t q_stride, k_stride, v_stride;
    const float *decay, *beta; /* [num_tokens][value_heads]; beta: NULL without the delta rule */
    float *states; /* [blocks][value_heads][key_dim][value_dim] */
    int64_t block_stride; /* floats between blocks */
    int64_t key_heads, value_heads;
    int64_t key_dim; /* at most MAX_KEY_DIM */
    int64_t value_dim; /* a multiple of 16 */
    void *out; /* [num_tokens][value_heads][value_dim] */
    int32_t has_floats;
} Scan;

void scan_states(const Scan *scan, const Segments *segments, Team *team);

/* ── gated_norm.c ────────────────────────────────────────────────────────────────────────────────────────────────── */

typedef struct {
    const void *x; /* [num_tokens][x_stride]: elements, or with `has_floats` float32 */
    const element *gate; /* [num_tokens][gate_stride] */
    int64_t x_stride, gate_stride;
    int64_t num_groups, group_size; /* of a token's elements; each group is normalized by itself */
    Norm norm; /* its weight is [group_size] */
    int64_t weight_stride; /* between the weights of two groups; 0: they share one */
    int32_t gates_first;
    int32_t has_floats;
    element *out; /* [num_tokens][num_groups * group_size] */
} GatedNorm;

void normalize_gated(const GatedNorm *gated, int64_t num_tokens, Team *team);

#endif
