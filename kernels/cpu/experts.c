/* A layer with experts, for any number of tokens:
 *
 *     scores of the router → experts of each token → rows of each expert → up → down → weighted sum of each token
 *
 * A pair is a token and one of its experts; pairs are ordered by expert, then token. Up and down are each one stage
 * over all chosen experts (and the shared one), so that threads share experts as they share the outputs of a dense
 * layer, and a step reads each weight once. Each pair's output is stored; a token adds up its own by falling score,
 * so that its bits do not depend on the other tokens.
 */
#include "experts.h"
#include "low_rank.h"

/* Written by one thread, read by all after the end of the stage. */
typedef struct {
    atomic_llong num_routed; /* tokens in all layers of the step so far */
    int64_t num_products; /* chosen experts, and the shared one */
} Grouping;

/* The buffers of a layer, in the scratch memory. */
typedef struct {
    Grouping *grouping;
    float *scores; /* [num_tokens][SCORE_STRIDE] */
    float *shared_gates; /* [num_tokens] */
    float *weights; /* [num_tokens][top_k] */
    int32_t *experts; /* [num_tokens][top_k] */
    int32_t *rows; /* [num_tokens][top_k]: the pair in the order of pairs */
    int32_t *tokens; /* of the pairs in their order */
    int64_t *ends; /* [num_experts] */
    Product *ups, *downs; /* [num_experts + 1] */
    element *outer; /* a row per pair: the expert's inputs, a panel for each expert; then its outputs, row by row */
    element *inner; /* a panel for each expert */
    element *shared_inner, *shared_outer; /* the same with a row per token */
    int64_t outer_stride, inner_stride, shared_stride;
    Adapted *adapted; /* [num_experts + 1]: rows with adapters of each product */
    int32_t *pair_slots; /* of the pairs in their order; then memory of `group_rows` for each expert */
} Buffers;

static void *take_bytes(intptr_t *at, int64_t num_bytes) {
    intptr_t start = *at;
    *at += round_up(num_bytes, 64);
    return (void *)start;
}

/* Returns the end of the buffers. */
static intptr_t lay_out(const Experts *e, int64_t num_tokens, void *scratch, Buffers *b) {
    const int64_t size = sizeof(element), num_experts = e->routing.num_experts;
    int64_t num_pairs = num_tokens * e->routing.top_k;
    intptr_t at = (intptr_t)scratch;
    b->outer_stride = e->up->num_lines * LINE;
    b->inner_stride = e->down->num_lines * LINE;
    b->shared_stride = e->shared_down ? e->shared_down->num_lines * LINE : 0;
    b->grouping = take_bytes(&at, sizeof *b->grouping);
    b->ends = take_bytes(&at, num_experts * (int64_t)sizeof *b->ends);
    b->ups = take_bytes(&at, (num_experts + 1) * (int64_t)sizeof *b->ups);
    b->downs = take_bytes(&at, (num_experts + 1) * (int64_t)sizeof *b->downs);
    b->scores = take_bytes(&at, num_tokens * SCORE_STRIDE(num_experts) * (int64_t)sizeof *b->scores);
    b->shared_gates = take_bytes(&at, num_tokens * (int64_t)sizeof *b->shared_gates);
    b->weights = take_bytes(&at, num_pairs * (int64_t)sizeof *b->weights);
    b->experts = take_bytes(&at, num_pairs * (int64_t)sizeof *b->experts);
    b->rows = take_bytes(&at, num_pairs * (int64_t)sizeof *b->rows);
    b->tokens = take_bytes(&at, num_pairs * (int64_t)sizeof *b->tokens);
    b->outer = take_bytes(&at, num_pairs * b->outer_stride * size);
    b->inner = take_bytes(&at, num_pairs * b->inner_stride * size);
    b->shared_outer = take_bytes(&at, e->shared_up ? num_tokens * b->outer_stride * size : 0);
    b->shared_inner = take_bytes(&at, num_tokens * b->shared_stride * size);
    b->adapted = take_bytes(&at, (num_experts + 1) * (int64_t)sizeof *b->adapted);
    b->pair_slots = take_bytes(&at, (num_pairs + GROUPED_WORDS(num_pairs) + 2 * num_experts) * 4);
    return at;
}

int64_t experts_scratch(const Experts *e, int64_t num_tokens) {
    Buffers buffers;
    return lay_out(e, num_tokens, NULL, &buffers);
}

void begin_experts(void *scratch) {
    Grouping *grouping = scratch;
    atomic_store(&grouping->num_routed, 0);
}

static void add_products(Buffers *b, const Linear *up, const Linear *down, const Rows *x, const Rows *inner,
                         element *outer, const Adapted *adapted) {
    Output to_inner = {STORE, *inner, 0}, to_outer = {STORE, {outer, b->outer_stride, 0}, 0};
    int64_t number = b->grouping->num_products++, num_rows = x->panel_rows;
    b->ups[number] = make_product(up, x, num_rows, &to_inner, adapted);
    b->downs[number] = make_product(down, inner, num_rows, &to_outer, adapted);
}

/* Returns rows of the scratch memory from `row` on for rows with adapters; NULL if there are none. */
static const Adapted *with_scratch(Adapted *adapted, const Adapted *step, int64_t row) {
    adapted->num_rank_tiles = step->num_rank_tiles, adapted->shrunk_stride = step->shrunk_stride;
    adapted->shrunk = step->shrunk + row * step->shrunk_stride;
    return adapted->num_runs ? adapted : NULL;
}

/* Writes the slots of the pairs, those of their tokens; lists the rows with adapters of each expert. */
static void group_slots(const Experts *e, int64_t num_pairs, Buffers *b, const Adapted *step) {
    int32_t *memory = b->pair_slots + num_pairs;
    for (int64_t row = 0; row < num_pairs; row++) b->pair_slots[row] = step->slots[b->tokens[row]];
    for (int64_t expert = 0, start = 0; expert < e->routing.num_experts; start = b->ends[expert++])
        memory = group_rows(b->pair_slots + start, b->ends[expert] - start, memory, &b->adapted[expert]);
}

/* Orders the pairs, and lists the products of the experts that have any. An expert that all tokens have chosen reads
 * the layer's input itself. */
static void group_pairs(const Experts *e, const Rows *x, int64_t num_tokens, Buffers *b, const Adapted *step) {
    int64_t num_experts = e->routing.num_experts, top_k = e->routing.top_k, num_pairs = num_tokens * top_k, start = 0;
    memset(b->ends, 0, (size_t)num_experts * sizeof *b->ends);
    for (int64_t pair = 0; pair < num_pairs; pair++) b->ends[b->experts[pair]]++;
    for (int64_t expert = 0; expert < num_experts; expert++) {
        int64_t count = b->ends[expert];
        b->ends[expert] = start;
        start += count;
    }
    for (int64_t pair = 0; pair < num_pairs; pair++) {
        b->rows[pair] = (int32_t)b->ends[b->experts[pair]]++;
        b->tokens[b->rows[pair]] = (int32_t)(pair / top_k);
    }
    if (step != NULL) group_slots(e, num_pairs, b, step);
    b->grouping->num_products = 0;
    for (int64_t expert = 0, start = 0; expert < num_experts; start = b->ends[expert++]) {
        int64_t count = b->ends[expert] - start;
        if (count == 0) continue;
        element *outer = b->outer + start * b->outer_stride;
        Rows gathered = {outer, b->outer_stride, count};
        Rows inner = {b->inner + start * b->inner_stride, b->inner_stride, count};
        const Adapted *adapted = step != NULL ? with_scratch(&b->adapted[expert], step, start) : NULL;
        add_products(b, e->up + expert, e->down + expert, count == num_tokens ? x : &gathered, &inner, outer, adapted);
    }
    if (e->shared_up == NULL) return;
    Rows inner = {b->shared_inner, b->shared_stride, num_tokens};
    const Adapted *adapted = NULL;
    if (step != NULL) {
        b->adapted[num_experts] = *step;
        adapted = with_scratch(&b->adapted[num_experts], step, num_pairs);
    }
    add_products(b, e->shared_up, e->shared_down, x, &inner, b->shared_outer, adapted);
}

/* Computes the scores of the experts and of the shared one's gate. */
static void score_experts(const Experts *e, const Rows *x, int64_t num_tokens, const Buffers *b, const Adapted *step,
                          Team *team) {
    Output to_scores = {STORE_FLOAT, {(element *)b->scores, SCORE_STRIDE(e->routing.num_experts), 0}, 0};
    Output to_gates = {STORE_FLOAT, {(element *)b->shared_gates, 1, 0}, 0};
    Product products[2] = {make_product(e->router, x, num_tokens, &to_scores, step)};
    Adapted of_gate;
    if (step != NULL) of_gate = *step, step = with_scratch(&of_gate, step, num_tokens);
    if (e->shared_gate != NULL) products[1] = make_product(e->shared_gate, x, num_tokens, &to_gates, step);
    multiply_products(products, e->shared_gate != NULL ? 2 : 1, team);
    end_stage(team);
}

/* Chooses the experts of each token; the thread that finishes the last token groups the pairs. */
static void choose_experts(const Experts *e, const Rows *x, int64_t num_tokens, float *scores, Buffers *b,
                           const Adapted *step, Team *team) {
    int64_t stride = SCORE_STRIDE(e->routing.num_experts), top_k = e->routing.top_k;
    for (Range range; take_share(team, num_tokens, &range); finish_share(team, num_tokens)) {
        for (int64_t token = range.start; token < range.stop; token++)
            route(&e->routing, scores + token * stride, b->experts + token * top_k, b->weights + token * top_k);
        int64_t count = range.stop - range.start;
        bool is_last = (atomic_fetch_add(&b->grouping->num_routed, count) + count) % num_tokens == 0;
        if (is_last) group_pairs(e, x, num_tokens, b, step);
    }
    end_stage(team);
}

static void copy_row(const Rows *from, int64_t from_row, const Rows *to, int64_t to_row) {
    const element *source = rows_at(from, from_row, 0);
    element *target = rows_at(to, to_row, 0);
    int64_t source_step = line_step(from, from_row), target_step = line_step(to, to_row);
    for (int64_t column = 0; column < to->stride; column += LINE, source += source_step, target += target_step)
        store_any(target, load_any(source));
}

/* Copies the input rows of each pair into its expert's panel. */
static void gather(const Rows *x, int64_t num_pairs, const Buffers *b, Team *team) {
    for (Range range; take_share(team, num_pairs, &range); finish_share(team, num_pairs)) {
        const Product *product = b->ups;
        int64_t first = 0; /* pair of the product */
        for (int64_t row = range.start; row < range.stop; row++) {
            for (; row - first >= product->num_rows; product++) first += product->num_rows;
            if (product->x.data != x->data) copy_row(x, b->tokens[row], &product->x, row - first);
        }
    }
    end_stage(team);
}

INLINE Floats add_weighted(Floats sum, float weight, const element *row, int64_t i, Mask mask) {
    return multiply_add16(fill16(weight), load16(row + i, mask), sum);
}

static void add_up(const Experts *e, int64_t token, const Buffers *b, const Output *out) {
    int64_t top_k = e->routing.top_k, hidden = e->down->num_outputs;
    const float *weights = b->weights + token * top_k;
    const int32_t *rows = b->rows + token * top_k;
    const element *shared = b->shared_outer + token * b->outer_stride;
    float gate = 1;
    if (e->shared_gate != NULL)
        gate = 1 / (1 + first_of(exp2_16(fill16(-LOG2_E * b->shared_gates[token]))));
    for (int64_t i = 0; i < hidden; i += 16) {
        Mask mask = lanes(hidden - i);
        element *target = out->target.data + token * out->target.stride + i;
        Floats sum = zero16();
        for (int64_t rank = 0; rank < top_k; rank++)
            sum = add_weighted(sum, weights[rank], b->outer + rows[rank] * b->outer_stride, i, mask);
        if (e->shared_up != NULL) sum = add_weighted(sum, gate, shared, i, mask);
        if (out->kind == ADD) sum = multiply_add16(fill16(out->factor), sum, load16(target, mask));
        store16(target, mask, sum);
    }
}

void mix_experts(const Experts *e, const Rows *x, int64_t num_tokens, float *scores, void *scratch, const Output *out,
                 const Adapted *adapted, Team *team) {
    Buffers b;
    if (num_tokens == 0) return;
    lay_out(e, num_tokens, scratch, &b);
    if (scores == NULL) {
        scores = b.scores;
        score_experts(e, x, num_tokens, &b, adapted, team);
    }
    choose_experts(e, x, num_tokens, scores, &b, adapted, team);
    if (num_tokens > 1) gather(x, num_tokens * e->routing.top_k, &b, team);
    multiply_products(b.ups, b.grouping->num_products, team);
    end_stage(team);
    multiply_products(b.downs, b.grouping->num_products, team);
    end_stage(team);
    for (Range range; take_share(team, num_tokens, &range); finish_share(team, num_tokens))
        for (int64_t token = range.start; token < range.stop; token++) add_up(e, token, &b, out);
    end_stage(team);
}
