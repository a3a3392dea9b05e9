/* One step of a whole decoder in one parallel region, equal to the layers of workers/models/decoder.py; for one rank.
 *
 *     embedding → [norm → qkv → heads → attention → output → norm → gated MLP → down] × num_layers → norm → head
 *
 * Activations between linears are panels. Output and down projections add directly to the residual stream.
 */
#include "kernels.h"

typedef struct {
    Linear qkv, output, gate_up, down;
    const float *input_norm, *post_norm, *query_norm, *key_norm; /* the last two may be NULL */
    int64_t window; /* 0: none */
} Layer;

typedef struct {
    const Layer *layers;
    int64_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim;
    float eps, scale;
    const float *final_norm;
    const float *cos_sin;
    const Linear *packed_table; /* the embedding as the packed weight of the tied head, or NULL */
    const element *table; /* else as [vocabulary][hidden_size] */
    int64_t num_ids;
    const Linear *head;
    int32_t is_batch_invariant; /* see make_attention_plan */
} Decoder;

typedef struct {
    const int32_t *token_ids; /* [num_tokens] */
    const int64_t *positions, *slots;
    int64_t num_tokens;
    StepRows rows;
    element *kv_cache;
    int64_t block_size;
    element *hidden; /* [num_tokens][hidden_size]: output, after the final norm */
    const int64_t *logits_indices; /* [num_logits]: indices of the tokens that get logits */
    int64_t num_logits;
    float *logits; /* [num_logits][outputs of the head] */
} Step;

/* Buffers of a step's activations, all in the scratch memory. */
typedef struct {
    Rows normed, attended, gated; /* panels */
    element *qkv, *residual;
    int64_t qkv_width;
} Activations;

/* Returns an odd number of lines, as rows a power of two apart would share few sets of the cache. */
static int64_t qkv_width(const Decoder *d) {
    return (divide_up((d->num_heads + 2 * d->num_kv_heads) * d->head_dim, LINE) | 1) * LINE;
}

/* Returns the elements of scratch memory for a step of num_tokens. */
EXPORT int64_t decoder_scratch(const Decoder *d, int64_t num_tokens) {
    const Layer *layer = &d->layers[0];
    int64_t lines = layer->qkv.num_lines + layer->output.num_lines + layer->down.num_lines;
    return num_tokens * (lines * LINE + qkv_width(d) + d->hidden_size);
}

static Activations lay_out(const Decoder *d, element *scratch, int64_t num_tokens) {
    const Layer *layer = &d->layers[0];
    Activations a;
    Rows *panels[3] = {&a.normed, &a.attended, &a.gated};
    int64_t lines[3] = {layer->qkv.num_lines, layer->output.num_lines, layer->down.num_lines};
    for (int i = 0; i < 3; i++) {
        *panels[i] = (Rows){scratch, lines[i] * LINE, num_tokens};
        scratch += num_tokens * lines[i] * LINE;
    }
    a.qkv = scratch;
    a.qkv_width = qkv_width(d);
    a.residual = scratch + num_tokens * a.qkv_width;
    return a;
}

static void embed_token(const Decoder *d, int64_t id, element *to) {
    bool exists = id >= 0 && id < d->num_ids;
    for (int64_t i = 0; i < d->hidden_size; i += 16) {
        Mask mask = lanes(d->hidden_size - i);
        store16(to + i, mask, load16(d->table + (exists ? id : 0) * d->hidden_size + i, exists ? mask : 0));
    }
}

static void embed(const Decoder *d, const Step *step, const Rows *out, Team *team) {
    int64_t num_tokens = step->num_tokens;
    if (d->packed_table != NULL) {
        embed_packed(d->packed_table, step->token_ids, num_tokens, 0, out, team);
        return;
    }
    for (Range range; take_share(team, num_tokens, &range); finish_share(team, num_tokens))
        for (int64_t token = range.start; token < range.stop; token++)
            embed_token(d, step->token_ids[token], rows_at(out, token, 0));
}

static void run_layer(const Decoder *d, int64_t index, const Step *step, AttentionPlan *plan, const Activations *a,
                      const Rows *residual, Team *team) {
    const Layer *layer = &d->layers[index];
    int64_t num_tokens = step->num_tokens, hidden = d->hidden_size;
    Output to_qkv = {STORE, {a->qkv, a->qkv_width, 0}}, to_residual = {ADD, *residual}, to_gated = {STORE, a->gated};
    int64_t layer_size = 2 * d->num_kv_heads * step->block_size * d->head_dim;
    Cache cache = {step->kv_cache + index * layer_size, d->num_layers * layer_size, d->num_kv_heads, step->block_size,
                   d->head_dim};
    Heads heads = {a->qkv, a->qkv_width, num_tokens, d->num_heads, d->num_kv_heads, d->head_dim};
    HeadWork work = {layer->query_norm, layer->key_norm, d->eps, d->cos_sin, step->positions, step->slots};

    rms_norm(residual->data, hidden, NULL, 0, layer->input_norm, d->eps, num_tokens, hidden, &a->normed, team);
    end_stage(team);
    linear(&layer->qkv, &a->normed, num_tokens, &to_qkv, team);
    end_stage(team);
    qk_norm_rope_cache(&heads, &work, &cache, team);
    end_stage(team);
    attend(plan, a->qkv, a->qkv_width, &cache, d->scale, &a->attended, team);
    end_stage(team);
    linear(&layer->output, &a->attended, num_tokens, &to_residual, team);
    end_stage(team);
    rms_norm(residual->data, hidden, NULL, 0, layer->post_norm, d->eps, num_tokens, hidden, &a->normed, team);
    end_stage(team);
    linear(&layer->gate_up, &a->normed, num_tokens, &to_gated, team);
    end_stage(team);
    linear(&layer->down, &a->gated, num_tokens, &to_residual, team);
    end_stage(team);
}

#define MAX_WINDOWS 8 /* different sliding windows in one model */

/* Makes a plan for each different window of the layers; false without memory or with too many windows. */
static bool make_plans(const Decoder *d, const Step *step, AttentionPlan **plans, int64_t *windows) {
    for (int64_t i = 0; i < d->num_layers; i++) {
        int at = 0;
        while (at < MAX_WINDOWS && plans[at] != NULL && windows[at] != d->layers[i].window) at++;
        if (at == MAX_WINDOWS) return false;
        if (plans[at] != NULL) continue;
        windows[at] = d->layers[i].window;
        plans[at] = make_attention_plan(&step->rows, d->num_heads, d->num_kv_heads, d->head_dim, windows[at],
                                        d->is_batch_invariant);
        if (plans[at] == NULL) return false;
    }
    return true;
}

/* Computes the logits of the tokens at logits_indices. Reuses the `normed` panel, which is free by then. */
static void score(const Decoder *d, const Step *step, const Activations *a, Team *team) {
    if (step->num_logits == 0) return;
    Rows panel = {a->normed.data, a->normed.stride, step->num_logits};
    Output to_logits = {STORE_FLOAT, {(element *)step->logits, d->head->num_outputs, 0}};
    fill_panel(&panel, step->hidden, d->hidden_size, step->logits_indices, step->num_logits, d->hidden_size, team);
    end_stage(team);
    linear(d->head, &panel, step->num_logits, &to_logits, team);
}

/* Returns 0, or -1 without memory. */
EXPORT int decoder_step(const Decoder *d, const Step *step, element *scratch, int num_threads) {
    AttentionPlan *plans[MAX_WINDOWS] = {NULL};
    int64_t windows[MAX_WINDOWS] = {0};
    bool is_ready = make_plans(d, step, plans, windows);
    if (is_ready) {
        Activations activations = lay_out(d, scratch, step->num_tokens);
        Rows stream = {activations.residual, d->hidden_size, 0}, hidden = {step->hidden, d->hidden_size, 0};
        BEGIN_TEAM
        embed(d, step, &stream, team);
        end_stage(team);
        for (int64_t i = 0; i < d->num_layers; i++) {
            int at = 0;
            while (windows[at] != d->layers[i].window) at++;
            run_layer(d, i, step, plans[at], &activations, &stream, team);
        }
        rms_norm(stream.data, d->hidden_size, NULL, 0, d->final_norm, d->eps, step->num_tokens, d->hidden_size,
                 &hidden, team);
        end_stage(team);
        score(d, step, &activations, team);
        END_TEAM
    }
    for (int i = 0; i < MAX_WINDOWS; i++) free_attention_plan(plans[i]);
    return is_ready ? 0 : -1;
}
