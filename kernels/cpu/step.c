/* One step of a whole decoder in one parallel region, equal to the layers of workers/models/decoder.py; for one rank.
 *
 *     embedding → [norm → mixer → output → norm → up → down, or experts] × num_layers → norm → head
 *
 * The mixer is attention (qkv → heads → attention), one with a state (mixers.c), or both: their outputs are added. Layers
 * may leave out the mixer or the MLP, each with its norms. Layers may have cross attention in front of the MLP: norm →
 * query → attention → output, to keys and values that other calls have written.
 *
 * Activations between linears are panels. Output and down projections add directly to the residual stream; those with a
 * norm behind them are added by the norm that follows. Norms of post-norm layers are of the sums: the next norm, or the
 * copy in its place, first normalizes the residual stream itself. In a parallel layer the MLP comes between heads and attention:
 * both have read the stream before anything is added to it. An encoder's layer ends once all its rows have keys and
 * values, and begins before, in a step of other rows.
 */
#include "activations.h"
#include "decoder.h"
#include "low_rank.h"

/* Buffers of a step's activations, all in the scratch memory. */
typedef struct {
    Rows normed, scaled; /* panels; scaled: normed times a factor, without data if no layer needs it */
    element *attended; /* panel of the layer's width: what an output projection multiplies */
    element *inner; /* panel of the MLP's inner activation, as wide as the layer's */
    element *wide; /* [num_tokens][gates_width]: gates and ups, if a layer scales its gates */
    int64_t gates_width;
    element *qkv, *residual;
    element *delta; /* an output that its norm adds to the residual stream; NULL without such norms */
    int64_t qkv_width;
    void *mixer; /* buffers of a layer with a state */
    void *experts; /* buffers of a layer with experts */
} Activations;

/* Returns an odd number of lines, as rows a power of two apart would share few sets of the cache. */
static int64_t qkv_width(const Decoder *d) {
    int64_t width = (d->num_heads + 2 * d->num_kv_heads) * d->head_dim;
    for (int64_t i = 0; i < d->num_layers; i++)
        if (d->layers[i].has_attention) width = max64(width, d->layers[i].attention.qkv.num_outputs);
    return (divide_up(width, LINE) | 1) * LINE;
}

static int64_t hidden_lines(const Decoder *d) { return divide_up(d->hidden_size, LINE); }

/* Returns the lines of the widest input of an output projection. */
static int64_t attended_lines(const Decoder *d) {
    int64_t lines = 0;
    for (int64_t i = 0; i < d->num_layers; i++) {
        const Layer *layer = &d->layers[i];
        if (layer->has_attention) lines = max64(lines, layer->attention.output.num_lines);
        if (layer->mixer != NULL) lines = max64(lines, layer->mixer->output.num_lines);
    }
    return lines;
}

/* Returns whether a layer multiplies the normalized stream by a factor. */
static bool scales_input(const Layer *layer) {
    if (layer->has_attention && layer->attention.input_scale != 1) return true;
    return layer->mixer != NULL && layer->mixer->input_scale != 1;
}

static bool has_scaled_input(const Decoder *d) {
    for (int64_t i = 0; i < d->num_layers; i++)
        if (scales_input(&d->layers[i])) return true;
    return false;
}

/* Returns the lines of the widest inner activation. */
static int64_t inner_lines(const Decoder *d) {
    int64_t lines = 0;
    for (int64_t i = 0; i < d->num_layers; i++) lines = max64(lines, d->layers[i].down.num_lines);
    return lines;
}

static bool has_output_norms(const Decoder *d) {
    for (int64_t i = 0; i < d->num_layers; i++) {
        const Layer *layer = &d->layers[i];
        if (!layer->is_post_norm && (layer->mixer_output_norm.kind || layer->mlp_output_norm.kind)) return true;
    }
    return false;
}

/* Returns the columns of the widest gates and ups that a layer scales. */
static int64_t gates_width(const Decoder *d) {
    int64_t width = 0;
    for (int64_t i = 0; i < d->num_layers; i++)
        if (d->layers[i].has_mlp && d->layers[i].gate_scale != 1) width = max64(width, d->layers[i].up.num_outputs);
    return round_up(width, LINE);
}

/* Returns the elements of the dense layers' buffers, a whole number of lines. */
static int64_t dense_elements(const Decoder *d, int64_t num_tokens) {
    int64_t lines = hidden_lines(d) * (has_scaled_input(d) ? 2 : 1) + attended_lines(d) + inner_lines(d);
    int64_t streams = (has_output_norms(d) ? 2 : 1) * num_tokens * d->hidden_size;
    return num_tokens * (lines * LINE + gates_width(d) + qkv_width(d)) + round_up(streams, LINE);
}

static int64_t experts_bytes(const Decoder *d, int64_t num_tokens) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < d->num_layers; i++)
        if (d->layers[i].experts != NULL) bytes = max64(bytes, experts_scratch(d->layers[i].experts, num_tokens));
    return num_tokens ? bytes : 0;
}

static int64_t mixers_bytes(const Decoder *d, int64_t num_tokens) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < d->num_layers; i++)
        if (d->layers[i].mixer != NULL) bytes = max64(bytes, mixer_scratch(d->layers[i].mixer, num_tokens));
    return bytes;
}

/* Returns the elements of scratch memory for a step of num_tokens. */
EXPORT int64_t decoder_scratch(const Decoder *d, int64_t num_tokens) {
    int64_t num_bytes = mixers_bytes(d, num_tokens) + experts_bytes(d, num_tokens);
    return dense_elements(d, num_tokens) + num_bytes / (int64_t)sizeof(element);
}

static Activations lay_out(const Decoder *d, element *scratch, int64_t num_tokens) {
    Activations a;
    int64_t hidden = hidden_lines(d) * LINE;
    a.normed = (Rows){scratch, hidden, num_tokens};
    a.scaled = (Rows){NULL, hidden, num_tokens};
    a.attended = scratch + num_tokens * hidden;
    if (has_scaled_input(d)) {
        a.scaled.data = a.attended;
        a.attended += num_tokens * hidden;
    }
    a.inner = a.attended + num_tokens * attended_lines(d) * LINE;
    a.wide = a.inner + num_tokens * inner_lines(d) * LINE;
    a.gates_width = gates_width(d);
    a.qkv = a.wide + num_tokens * a.gates_width;
    a.qkv_width = qkv_width(d);
    a.residual = a.qkv + num_tokens * a.qkv_width;
    a.delta = has_output_norms(d) ? a.residual + num_tokens * d->hidden_size : NULL;
    a.mixer = scratch + dense_elements(d, num_tokens);
    a.experts = (char *)a.mixer + mixers_bytes(d, num_tokens);
    return a;
}

static const Norm no_norm;

/* What a layer's stages share. */
typedef struct {
    const Decoder *decoder;
    const Step *step;
    const Activations *a;
    const Rows *stream; /* the residual stream */
    Delta pending; /* an output that the next norm adds to the stream */
    const Norm *behind; /* a norm that the next one first applies to the stream itself; or NULL */
    Team *team;
    AttentionPlan *cross_plan; /* or NULL */
    Upcoming *upcoming; /* or NULL: products do not prefetch the next layer's keys and values */
} Run;

/* out = norm(stream) after the pending output is added, and the pending norm applied. */
static void normalize_stream(Run *run, const Norm *norm, const Rows *out) {
    int64_t hidden = run->decoder->hidden_size;
    normalize(run->stream->data, hidden, &run->pending, run->behind, norm, run->step->num_tokens, hidden, out, run->team);
    run->pending.data = NULL;
    run->behind = NULL;
    end_stage(run->team);
}

/* Copies the residual stream, which has passed `depth` layers, if the step keeps it there. */
static void keep_stream(Run *run, int64_t depth) {
    const Step *step = run->step;
    int64_t hidden = run->decoder->hidden_size, num_tokens = step->num_tokens;
    if (step->aux_states == NULL || step->aux_places[depth] < 0) return;
    if (run->pending.data != NULL || run->behind != NULL) normalize_stream(run, &no_norm, &run->a->normed);
    element *to = step->aux_states + step->aux_places[depth] * hidden;
    for (Range range; take_share(run->team, num_tokens, &range); finish_share(run->team, num_tokens))
        for (int64_t token = range.start; token < range.stop; token++)
            memcpy(to + token * step->num_aux * hidden, run->stream->data + token * hidden, (size_t)hidden * sizeof(element));
    end_stage(run->team);
}

static void multiply(const Run *run, const Linear *linear_layer, const Rows *x, const Output *out) {
    linear(linear_layer, x, run->step->num_tokens, out, run->step->adapted, run->team);
    end_stage(run->team);
}

/* Returns the normalized stream times a factor, as a panel. */
static Rows scaled_input(const Run *run, float factor) {
    Rows from = run->a->normed, to = run->a->scaled;
    int64_t num_tokens = run->step->num_tokens;
    if (factor == 1) return from;
    for (Range range; take_share(run->team, num_tokens, &range); finish_share(run->team, num_tokens))
        for (int64_t i = range.start * from.stride; i < range.stop * from.stride; i += 16)
            store16(to.data + i, 0xffff, multiply16(load16(from.data + i, 0xffff), fill16(factor)));
    end_stage(run->team);
    return to;
}

/* Returns the panel of what an output projection multiplies. */
static Rows attended_of(const Run *run, const Linear *output) {
    return (Rows){run->a->attended, output->num_lines * LINE, run->step->num_tokens};
}

/* Returns the output that adds `scale` times itself to the stream, or leaves it to the next norm if a norm comes between
 * them; then scale is 1. A norm of the sum is left to the next norm, too. */
static Output to_stream(Run *run, const Layer *layer, const Norm *norm, float scale) {
    float factor = run->decoder->residual_scale * scale;
    int64_t hidden = run->decoder->hidden_size;
    if (run->pending.data != NULL) return (Output){ADD, {run->a->delta, hidden, 0}, 1}; /* the layer's other mixer's */
    if (layer->is_post_norm && norm->kind) run->behind = norm;
    if (layer->is_post_norm || !norm->kind) return (Output){ADD, *run->stream, factor};
    run->pending = (Delta){run->a->delta, hidden, *norm, factor};
    return (Output){STORE, {run->a->delta, hidden, 0}, 0};
}

static const CacheGroup *group_of(const Run *run, int64_t index) {
    return &run->step->groups[run->decoder->layers[index].attention.group];
}

static StepRows rows_of(const Step *step, const CacheGroup *group) {
    StepRows rows = step->rows;
    rows.block_tables = group->block_tables;
    rows.table_stride = group->table_stride;
    return rows;
}

/* Returns the layer's part of the cache. */
static Cache cache_of(const Run *run, int64_t index) {
    const Decoder *d = run->decoder;
    const CacheGroup *group = group_of(run, index);
    int64_t num_bytes = layer_bytes(group->kind, d->num_kv_heads, group->block_size, d->head_dim);
    char *from = group->kv_cache + d->layers[index].attention.cache_layer * num_bytes;
    return (Cache){from, group->block_stride, d->num_kv_heads, group->block_size, d->head_dim, group->kind};
}

/* Computes queries, and writes keys and values. */
static void begin_attention(const Run *run, int64_t index) {
    const Decoder *d = run->decoder;
    const Step *step = run->step;
    const Activations *a = run->a;
    const Attention *layer = &d->layers[index].attention;
    Output to_qkv = {STORE, {a->qkv, a->qkv_width, 0}, 0};
    Rows x = scaled_input(run, layer->input_scale);
    multiply(run, &layer->qkv, &x, &to_qkv);
    Cache cache = cache_of(run, index);
    Heads heads = {a->qkv, a->qkv_width, step->num_tokens, d->num_heads, d->num_kv_heads, d->head_dim};
    HeadRules placed;
    HeadWork work = {&layer->rules, step->positions, group_of(run, index)->slots};
    if (step->cos_sin != NULL && layer->rules.num_rotated) {
        placed = layer->rules, placed.cos_sin = step->cos_sin;
        work.rules = &placed;
    }
    qk_norm_rope_cache(&heads, &work, &cache, run->team);
    end_stage(run->team);
}

/* Multiplies the attended heads by the sigmoid of their gates, in a stage of its own. */
static void gate_heads(const Run *run, const Rows *attended) {
    const Decoder *d = run->decoder;
    int64_t num_tokens = run->step->num_tokens, width = d->num_heads * d->head_dim;
    for (Range range; take_share(run->team, num_tokens, &range); finish_share(run->team, num_tokens))
        for (int64_t token = range.start; token < range.stop; token++) {
            const element *gates = run->a->qkv + token * run->a->qkv_width + width + 2 * d->num_kv_heads * d->head_dim;
            for (int64_t i = 0; i < width; i += 16) {
                Mask mask = lanes(width - i);
                element *at = rows_at(attended, token, i);
                store16(at, mask, multiply16(load16(at, mask), sigmoid_16(load16(gates + i, mask))));
            }
        }
    end_stage(run->team);
}

/* Attends with the queries in a->qkv; the projection of the result goes to `out`. */
static void attend_and_project(const Run *run, int64_t index, AttentionPlan *plan, const Scoring *scoring,
                               bool has_gates, const Linear *output, const Output *out) {
    const Activations *a = run->a;
    Cache cache = cache_of(run, index);
    Rows attended = attended_of(run, output);
    attend(plan, a->qkv, a->qkv_width, &cache, scoring, &attended, run->team);
    end_stage(run->team);
    if (has_gates) gate_heads(run, &attended);
    multiply(run, output, &attended, out);
}

/* Lets products prefetch the keys and values of a layer. */
static void foresee(const Run *run, int64_t index) {
    const Decoder *d = run->decoder;
    bool attends = index < d->num_layers && d->layers[index].has_attention;
    run->team->upcoming = attends ? run->upcoming : NULL;
    if (run->team->upcoming == NULL) return;
    *run->upcoming = (Upcoming){.rows = rows_of(run->step, group_of(run, index)), .cache = cache_of(run, index), .window = d->layers[index].attention.window,
                                .step = run->team->size, .block = omp_get_thread_num()};
}

static void end_attention(Run *run, int64_t index, AttentionPlan *plan) {
    const Layer *layer = &run->decoder->layers[index];
    const Attention *own = &layer->attention;
    foresee(run, index + 1);
    Output out = to_stream(run, layer, &layer->mixer_output_norm, own->output_scale);
    attend_and_project(run, index, plan, &own->scoring, own->has_gates, &own->output, &out);
}

/* Runs the layer's mixer with a state. */
static void run_mixer(Run *run, int64_t index) {
    const Layer *layer = &run->decoder->layers[index];
    const Mixer *mixer = layer->mixer;
    const Step *step = run->step;
    Rows x = scaled_input(run, mixer->input_scale), panel = attended_of(run, &mixer->output);
    mix_states(mixer, &x, step->num_tokens, step->states, run->a->mixer, &panel, step->adapted, run->team);
    foresee(run, index + 1);
    Output out = to_stream(run, layer, &layer->mixer_output_norm, mixer->output_scale);
    multiply(run, &mixer->output, &panel, &out);
}

static void attend_across(Run *run, int64_t index) {
    const Layer *layer = &run->decoder->layers[index];
    normalize_stream(run, &layer->cross_norm, &run->a->normed);
    Output to_query = {STORE, {run->a->qkv, run->a->qkv_width, 0}, 0}, out = to_stream(run, layer, &no_norm, 1);
    multiply(run, &layer->cross_query, &run->a->normed, &to_query);
    attend_and_project(run, index, run->cross_plan, &layer->cross_scoring, false, &layer->cross_output,
                       &out);
}

/* Computes the inner activation of a layer that scales its gates. */
static void run_scaled_gates(const Run *run, const Layer *layer, const Rows *inner) {
    const Activations *a = run->a;
    int64_t num_tokens = run->step->num_tokens, width = layer->up.num_outputs / 2;
    Output to_wide = {STORE, {a->wide, a->gates_width, 0}, 0};
    multiply(run, &layer->up, &a->normed, &to_wide);
    for (Range range; take_share(run->team, num_tokens, &range); finish_share(run->team, num_tokens))
        for (int64_t token = range.start; token < range.stop; token++) {
            const element *gates = a->wide + token * a->gates_width, *ups = gates + width;
            for (int64_t i = 0; i < inner->stride; i += 16) {
                Mask mask = lanes(width - i);
                Floats gate = multiply16(load16(gates + i, mask), fill16(layer->gate_scale));
                Floats v = activate_gated_16(layer->activation, layer->limit, gate, load16(ups + i, mask));
                store16(rows_at(inner, token, i), 0xffff, keep(mask, v));
            }
        }
    end_stage(run->team);
}

static void run_mlp(Run *run, const Layer *layer) {
    const Rows *x = &run->a->normed;
    int64_t num_tokens = run->step->num_tokens;
    Rows inner = {run->a->inner, layer->down.num_lines * LINE, num_tokens};
    Output to_inner = {STORE, inner, 0}, out = to_stream(run, layer, &layer->mlp_output_norm, layer->mlp_output_scale);
    if (layer->experts != NULL) {
        mix_experts(layer->experts, x, num_tokens, NULL, run->a->experts, &out, run->step->adapted, run->team);
        return;
    }
    if (layer->gate_scale != 1) run_scaled_gates(run, layer, &inner);
    else multiply(run, &layer->up, x, &to_inner);
    multiply(run, &layer->down, &inner, &out);
}

/* Runs the layer up to its keys and values: its mixer with a state, and the MLP of a parallel layer. */
static void begin_layer(Run *run, int64_t index) {
    const Layer *layer = &run->decoder->layers[index];
    if (!layer->has_attention && layer->mixer == NULL) return;
    normalize_stream(run, &layer->input_norm, &run->a->normed);
    if (layer->mixer != NULL) run_mixer(run, index);
    if (layer->has_attention) begin_attention(run, index);
    if (!layer->is_parallel) return;
    if (layer->mlp_norm.kind) normalize_stream(run, &layer->mlp_norm, &run->a->normed);
    run_mlp(run, layer);
}

static void end_layer(Run *run, int64_t index, AttentionPlan *plan) {
    const Layer *layer = &run->decoder->layers[index];
    if (layer->has_attention) end_attention(run, index, plan);
    if (layer->is_parallel) return;
    if (run->cross_plan != NULL) attend_across(run, index);
    if (!layer->has_mlp) return;
    normalize_stream(run, &layer->mlp_norm, &run->a->normed);
    run_mlp(run, layer);
}

#define MAX_PLANS 8 /* different pairs of a group and a sliding window in one model */

/* The attention plans of a step: for each group and window, that of its first layer. */
typedef struct {
    AttentionPlan *plans[MAX_PLANS];
    const Attention *layers[MAX_PLANS]; /* NULL behind the last plan */
} Plans;

/* Returns the index of a layer's plan, or that of the first free place. */
static int plan_at(const Plans *all, const Attention *layer) {
    int at = 0;
    while (at < MAX_PLANS && all->layers[at] != NULL &&
           (all->layers[at]->window != layer->window || all->layers[at]->group != layer->group))
        at++;
    return at;
}

/* Makes the plans of all layers; false without memory or with too many plans. */
static bool make_plans(const Decoder *d, const Step *step, Plans *all) {
    for (int64_t i = 0; i < d->num_layers; i++) {
        const Attention *layer = &d->layers[i].attention;
        if (!d->layers[i].has_attention) continue;
        int at = plan_at(all, layer);
        if (at == MAX_PLANS) return false;
        if (all->layers[at] != NULL) continue;
        all->layers[at] = layer;
        StepRows rows = rows_of(step, &step->groups[layer->group]);
        all->plans[at] = make_attention_plan(&rows, d->num_heads, d->num_kv_heads, d->head_dim, layer->window,
                                             d->is_batch_invariant);
        if (all->plans[at] == NULL) return false;
    }
    return true;
}

/* Scales and caps the logits, in a stage of its own. */
static void finish_logits(const Decoder *d, float *logits, int64_t count, Team *team) {
    Floats scale = fill16(d->logit_scale), cap = fill16(d->logit_softcap), inner = fill16(1.0f / d->logit_softcap);
    end_stage(team);
    for (Range range; take_share(team, count, &range); finish_share(team, count))
        for (int64_t i = range.start; i < range.stop; i += 16) {
            Mask mask = lanes(range.stop - i);
            Floats v = multiply16(load_some(logits + i, mask), scale);
            if (d->logit_softcap) v = multiply16(cap, tanh_16(multiply16(v, inner)));
            store_some(logits + i, mask, v);
        }
}

/* Computes the logits of the tokens at logits_indices. Reuses the `normed` panel, which is free by then. */
static void score(const Run *run) {
    const Decoder *d = run->decoder;
    const Step *step = run->step;
    Team *team = run->team;
    if (step->num_logits == 0) return;
    int64_t num_outputs = d->head->num_outputs;
    Rows panel = {run->a->normed.data, run->a->normed.stride, step->num_logits};
    Output to_logits = {STORE_FLOAT, {(element *)step->logits, num_outputs, 0}, 0};
    fill_panel(&panel, step->hidden, d->hidden_size, step->logits_indices, step->num_logits, d->hidden_size, team);
    end_stage(team);
    linear(d->head, &panel, step->num_logits, &to_logits, step->logits_adapted, team);
    if (d->logit_scale != 1 || d->logit_softcap) finish_logits(d, step->logits, step->num_logits * num_outputs, team);
}

/* Runs the only layer of `d` on the residual stream step->hidden, in place. */
EXPORT void layer_step(const Decoder *d, const Step *step, AttentionPlan *plan, element *scratch, int num_threads) {
    Activations activations = lay_out(d, scratch, step->num_tokens);
    Rows stream = {step->hidden, d->hidden_size, 0};
    BEGIN_TEAM
    Run run = {d, step, &activations, &stream, {0}, NULL, team, NULL, NULL};
    begin_layer(&run, 0);
    end_layer(&run, 0, plan);
    if (run.pending.data != NULL || run.behind != NULL) normalize_stream(&run, &no_norm, &activations.normed);
    END_TEAM
}

EXPORT int64_t encoder_width(const Decoder *d) { return qkv_width(d); }

/* Ends a layer (-1: none) of the rows step->hidden, in place, and begins the next one, if there is one. `heads`, rows
 * of encoder_width: queries of the layer, then of the next one. */
EXPORT void encoder_step(const Decoder *d, const Step *step, int64_t index, AttentionPlan *plan, element *heads,
                         element *scratch, int num_threads) {
    Activations activations = lay_out(d, scratch, step->num_tokens);
    activations.qkv = heads;
    Rows stream = {step->hidden, d->hidden_size, 0};
    BEGIN_TEAM
    Run run = {d, step, &activations, &stream, {0}, NULL, team, NULL, NULL};
    if (index >= 0) end_layer(&run, index, plan);
    if (index + 1 < d->num_layers) begin_layer(&run, index + 1);
    END_TEAM
}

/* Returns whether embeddings of tokens are not the residual stream yet. */
static bool has_places(const Decoder *d) {
    bool has_sum = d->learned_positions != NULL || d->token_types != NULL;
    return has_sum || d->embedding_scale != 1 || d->embedding_norm.kind;
}

/* Returns 0, or -1 without memory. */
EXPORT int decoder_step(const Decoder *d, const Step *step, element *scratch, int num_threads) {
    Plans all = {{NULL}, {NULL}};
    AttentionPlan *cross_plan = NULL;
    bool is_ready = make_plans(d, step, &all);
    if (is_ready && step->cross != NULL) {
        cross_plan = make_attention_plan(step->cross, d->num_heads, d->num_kv_heads, d->head_dim, 0, d->is_batch_invariant);
        is_ready = cross_plan != NULL;
    }
    if (is_ready) {
        Activations activations = lay_out(d, scratch, step->num_tokens);
        Rows stream = {activations.residual, d->hidden_size, 0}, hidden = {step->hidden, d->hidden_size, 0};
        if (experts_bytes(d, step->num_tokens)) begin_experts(activations.experts);
        const Media *media = step->media;
        BEGIN_TEAM
        Upcoming upcoming;
        Run run = {d, step, &activations, &stream, {0}, NULL, team, cross_plan, &upcoming};
        foresee(&run, 0);
        embed_tokens(d, step, &stream, team);
        end_stage(team);
        if (step->adapted != NULL && step->embedding_updates != NULL) {
            embed_updates(step->embedding_updates, step->adapted, step->token_ids, 0, d->hidden_size, &stream, team);
            end_stage(team);
        }
        if (has_places(d)) place_embeddings(d, step, stream.data, team);
        if (media != NULL) put_media(d, media, media->embeds, false, stream.data, team);
        for (int64_t i = 0; i < d->num_layers; i++) {
            const Layer *layer = &d->layers[i];
            keep_stream(&run, i);
            begin_layer(&run, i);
            end_layer(&run, i, layer->has_attention ? all.plans[plan_at(&all, &layer->attention)] : NULL);
            if (media != NULL && i < media->num_added) put_media(d, media, media->added[i], true, stream.data, team);
        }
        keep_stream(&run, d->num_layers);
        normalize_stream(&run, &d->final_norm, &hidden);
        score(&run);
        END_TEAM
    }
    for (int i = 0; i < MAX_PLANS; i++) free_attention_plan(all.plans[i]);
    free_attention_plan(cross_plan);
    return is_ready ? 0 : -1;
}
