/* Mixers with a state, as stages of a step: gated delta nets, Mamba2 and short convolutions. */
#include "state.h"

/* A step's activations of one mixer, in the scratch memory. */
typedef struct {
    element *parts; /* [num_tokens][parts_width]: outputs of `input` */
    element *numbers; /* [num_tokens][numbers_width]: where a and b are */
    element *mixed; /* [num_tokens][channels]: outputs of the convolution */
    float *decay; /* [num_tokens][value_heads] */
    float *step; /* [num_tokens][value_heads]: beta, or Mamba2's dt */
    void *read; /* [num_tokens][value_heads * value_dim]: outputs of the scan */
    int64_t parts_width, numbers_width;
} Parts;

/* Returns an odd number of lines, as rows a power of two apart would share few sets of the cache. */
static int64_t parts_width(const Mixer *mixer) { return (divide_up(mixer->input.num_outputs, LINE) | 1) * LINE; }

/* Lays the activations out from `scratch` on; returns their bytes. */
static int64_t lay_out(const Mixer *mixer, int64_t num_tokens, char *scratch, Parts *parts) {
    int64_t heads = mixer->scan.value_heads, element_bytes = (int64_t)sizeof(element), float_bytes = (int64_t)sizeof(float);
    int64_t read_bytes = mixer->scan.has_float_out ? float_bytes : element_bytes, at = 0;
    parts->parts_width = parts_width(mixer);
    parts->numbers_width = mixer->numbers.num_outputs;
    const int64_t sizes[] = {
        parts->parts_width * element_bytes, parts->numbers_width * element_bytes, mixer->conv.num_channels * element_bytes,
        heads * float_bytes, heads * float_bytes, heads * mixer->scan.value_dim * read_bytes,
    };
    void *places[6];
    for (int i = 0; i < 6; i++) {
        places[i] = scratch + at;
        at += round_up(num_tokens * sizes[i], 64);
    }
    parts->parts = places[0], parts->numbers = places[1], parts->mixed = places[2];
    parts->decay = places[3], parts->step = places[4], parts->read = places[5];
    if (!parts->numbers_width) parts->numbers = parts->parts, parts->numbers_width = parts->parts_width;
    return at;
}

int64_t mixer_scratch(const Mixer *mixer, int64_t num_tokens) {
    Parts parts;
    return lay_out(mixer, num_tokens, NULL, &parts);
}

/* ── stages ──────────────────────────────────────────────────────────────────────────────────────────────────────── */

/* Computes the parts of all tokens. */
static void project(const Mixer *mixer, const Rows *x, int64_t num_tokens, const Parts *parts, const Adapted *adapted,
                    Team *team) {
    Output to_parts = {STORE, {parts->parts, parts->parts_width, 0}, 0};
    Output to_numbers = {STORE, {parts->numbers, parts->numbers_width, 0}, 0};
    Product products[2] = {make_product(&mixer->input, x, num_tokens, &to_parts, adapted)};
    bool has_second = mixer->numbers.num_outputs > 0;
    if (has_second) products[1] = make_product(&mixer->numbers, x, num_tokens, &to_numbers, adapted);
    if (has_second && adapted != NULL) { /* their updates share a scratch memory */
        multiply_products(products, 1, team);
        end_stage(team);
        multiply_products(products + 1, 1, team);
    } else multiply_products(products, has_second ? 2 : 1, team);
    end_stage(team);
}

/* Multiplies a token's parts by their factors; those of u and v by each other. */
static void scale_parts(const Mixer *mixer, element *parts) {
    const element *scales = mixer->input_scales, *factors = parts + mixer->factor_start;
    for (int64_t i = 0; scales != NULL && i < mixer->input.num_outputs; i += 16) {
        Mask mask = lanes(mixer->input.num_outputs - i);
        store16(parts + i, mask, multiply16(load16(parts + i, mask), load16(scales + i, mask)));
    }
    for (int64_t i = 0; mixer->kind == SHORT_CONV && i < mixer->conv.num_channels; i += 16) {
        Mask mask = lanes(mixer->conv.num_channels - i);
        store16(parts + i, mask, multiply16(load16(factors + i, mask), load16(parts + i, mask)));
    }
}

static void scale_all(const Mixer *mixer, int64_t num_tokens, const Parts *parts, Team *team) {
    if (mixer->input_scales == NULL && mixer->kind != SHORT_CONV) return;
    for (Range range; take_share(team, num_tokens, &range); finish_share(team, num_tokens))
        for (int64_t token = range.start; token < range.stop; token++)
            scale_parts(mixer, parts->parts + token * parts->parts_width);
    end_stage(team);
}

static void convolve_parts(const Mixer *mixer, const Parts *parts, const States *states, Team *team) {
    Conv conv = mixer->conv;
    conv.x = parts->parts, conv.x_stride = parts->parts_width;
    conv.states = states->inputs[mixer->index];
    conv.block_stride = states->block_bytes / (int64_t)sizeof(element);
    conv.out = parts->mixed;
    convolve(&conv, &states->segments, team);
    end_stage(team);
}

/* Computes the decay of a token's heads, with beta or dt. */
static void find_rates(const Mixer *mixer, int64_t token, const Parts *parts) {
    int64_t heads = mixer->scan.value_heads;
    const element *numbers = parts->numbers + token * parts->numbers_width;
    float *step = parts->step + token * heads;
    find_decay(&mixer->rates, numbers + mixer->decay_start, step, parts->decay + token * heads);
    if (mixer->kind == MAMBA2) return;
    for (int64_t head = 0; head < heads; head += 16) {
        Mask mask = lanes(heads - head);
        Floats beta = sigmoid_16(load16(numbers + mixer->beta_start + head, mask));
        store_some(step + head, mask, multiply16(beta, fill16(mixer->beta_scale)));
    }
}

/* Normalizes a token's queries and keys. */
static void normalize_keys(const Mixer *mixer, element *mixed) {
    int64_t key_dim = mixer->scan.key_dim;
    for (int64_t head = 0; head < mixer->scan.key_heads; head++) {
        normalize_row(mixed + mixer->query_start + head * key_dim, &mixer->query_norm, key_dim);
        normalize_row(mixed + mixer->key_start + head * key_dim, &mixer->key_norm, key_dim);
    }
}

static void prepare_scan(const Mixer *mixer, int64_t num_tokens, const Parts *parts, Team *team) {
    for (Range range; take_share(team, num_tokens, &range); finish_share(team, num_tokens))
        for (int64_t token = range.start; token < range.stop; token++) {
            find_rates(mixer, token, parts);
            if (mixer->kind == GATED_DELTA) normalize_keys(mixer, parts->mixed + token * mixer->conv.num_channels);
        }
    end_stage(team);
}

static void scan_parts(const Mixer *mixer, const Parts *parts, const States *states, Team *team) {
    Scan scan = mixer->scan;
    scan.q = parts->mixed + mixer->query_start;
    scan.k = parts->mixed + mixer->key_start;
    scan.v = parts->mixed + mixer->value_start;
    scan.q_stride = scan.k_stride = scan.v_stride = mixer->conv.num_channels;
    scan.decay = parts->decay;
    scan.beta = mixer->kind == GATED_DELTA ? parts->step : NULL;
    scan.factors = mixer->kind == MAMBA2 ? parts->step : NULL;
    scan.states = states->scans[mixer->index];
    scan.block_stride = states->block_bytes / (int64_t)sizeof(float);
    scan.out = parts->read;
    scan_states(&scan, &states->segments, team);
    end_stage(team);
}

static void gate_read(const Mixer *mixer, int64_t num_tokens, const Parts *parts, const Rows *out, Team *team) {
    GatedNorm gated = mixer->gated;
    gated.x = parts->read, gated.x_stride = mixer->scan.value_heads * mixer->scan.value_dim;
    gated.gate = parts->parts + mixer->gate_start, gated.gate_stride = parts->parts_width;
    gated.out = *out;
    normalize_gated(&gated, num_tokens, team);
    end_stage(team);
}

/* out = z * the convolution's outputs, with zeros in the panel's padding. */
static void gate_mixed(const Mixer *mixer, int64_t num_tokens, const Parts *parts, const Rows *out, Team *team) {
    int64_t num_channels = mixer->conv.num_channels;
    for (Range range; take_share(team, num_tokens, &range); finish_share(team, num_tokens))
        for (int64_t token = range.start; token < range.stop; token++) {
            const element *gate = parts->parts + token * parts->parts_width + mixer->gate_start;
            const element *mixed = parts->mixed + token * num_channels;
            for (int64_t i = 0; i < out->stride; i += 16) {
                Mask mask = lanes(num_channels - i);
                store16(rows_at(out, token, i), 0xffff, multiply16(load16(gate + i, mask), load16(mixed + i, mask)));
            }
        }
    end_stage(team);
}

void mix_states(const Mixer *mixer, const Rows *x, int64_t num_tokens, const States *states, void *scratch,
                const Rows *out, const Adapted *adapted, Team *team) {
    Parts parts;
    lay_out(mixer, num_tokens, scratch, &parts);
    project(mixer, x, num_tokens, &parts, adapted, team);
    scale_all(mixer, num_tokens, &parts, team);
    convolve_parts(mixer, &parts, states, team);
    if (mixer->kind == SHORT_CONV) {
        gate_mixed(mixer, num_tokens, &parts, out, team);
        return;
    }
    prepare_scan(mixer, num_tokens, &parts, team);
    scan_parts(mixer, &parts, states, team);
    gate_read(mixer, num_tokens, &parts, out, team);
}
