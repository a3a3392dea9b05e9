/* Layers with a state: causal convolutions, scans and gated norms, as in reference_state.py, and the mixers of them.
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

/* q, k and v are elements, or with `has_floats` float32; so is out with `has_float_out`. Strides count their numbers from token to token. */
typedef struct {
    const void *q, *k; /* [num_tokens][key_heads][key_dim] */
    const void *v; /* [num_tokens][value_heads][value_dim] */
    int64_t q_stride, k_stride, v_stride;
    const float *decay, *beta; /* [num_tokens][value_heads]; beta: NULL without the delta rule */
    const float *factors; /* [num_tokens][value_heads]: v is multiplied by them before it changes a state; or NULL */
    const float *skip; /* [value_heads]: times v, is added to what is read; or NULL */
    float *states; /* [blocks][value_heads][key_dim][value_dim] */
    int64_t block_stride; /* floats between blocks */
    int64_t key_heads, value_heads;
    int64_t first_key; /* with `are_keys_tiled` value head h reads key head (first_key + h) % key_heads, else as many read
                        * each key head, one after the other */
    int64_t key_dim; /* at most MAX_KEY_DIM */
    int64_t value_dim; /* a multiple of 16 */
    void *out; /* [num_tokens][value_heads][value_dim] */
    int32_t are_keys_tiled, has_floats, has_float_out;
} Scan;

void scan_states(const Scan *scan, const Segments *segments, Team *team);

/* ── decay.c ─────────────────────────────────────────────────────────────────────────────────────────────────────── */

/* How fast heads forget, by a number of the token: dt = softplus(a + dt_bias), kept between limits. */
typedef struct {
    const float *rate, *dt_bias; /* [num_heads] */
    float min_dt, max_dt;
    int64_t num_heads;
} Rates;

/* Computes dt and exp(rate * dt) of a token's heads. */
void find_decay(const Rates *rates, const element *a, float *dt, float *decay);

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
    Rows out; /* [num_tokens][num_groups * group_size]; a panel's padding becomes 0 */
} GatedNorm;

void normalize_gated(const GatedNorm *gated, int64_t num_tokens, Team *team);

/* ── mixers.c ────────────────────────────────────────────────────────────────────────────────────────────────────── */

/* The states in the blocks of a group, by layer of the group, and a step's segments. */
typedef struct {
    float *const *scans;
    element *const *inputs; /* of the convolutions */
    int64_t block_bytes; /* between blocks */
    Segments segments;
} States;

typedef enum { GATED_DELTA, MAMBA2, SHORT_CONV } MixerKind;

/* A layer's mixer: product → convolution → scan → gated norm, or product → convolution → product of elements. Its parts of
 * a token (StateConfig) are outputs of `input`, in which those of the convolution come first; a and b may be outputs of
 * `numbers`. Starts count elements of these. Of conv, scan and gated the step's own fields are not set. */
typedef struct {
    MixerKind kind;
    Linear input, numbers, output; /* numbers: without outputs if `input` has a and b */
    const element *input_scales; /* [outputs of input]: factors, or NULL */
    float input_scale, output_scale; /* of x, and of what the layer adds */
    int64_t index; /* of the layer in States */
    int64_t query_start, key_start, value_start; /* in the convolution's outputs */
    int64_t gate_start, factor_start; /* in the outputs of `input` */
    int64_t decay_start, beta_start; /* in those of `numbers`, or of `input` */
    Conv conv;
    Scan scan;
    GatedNorm gated;
    Norm query_norm, key_norm; /* of heads of GATED_DELTA */
    Rates rates;
    float beta_scale;
} Mixer;

/* Returns the bytes of scratch memory for a step of num_tokens. */
int64_t mixer_scratch(const Mixer *mixer, int64_t num_tokens);

/* Computes what the output projection multiplies, in stages of its own. x, out: panels. out: as wide as the lines of
 * `output`. adapted: of the tokens, or NULL. */
void mix_states(const Mixer *mixer, const Rows *x, int64_t num_tokens, const States *states, void *scratch,
                const Rows *out, const Adapted *adapted, Team *team);

#endif
