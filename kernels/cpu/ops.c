/* Single operations of reference.py, each in a parallel region of its own; their names begin with op_. */
#include "experts.h"
#include "low_rank.h"
#include "state.h"

EXPORT int64_t op_line(void) { return LINE; }

/* panel: num_rows * num_lines * LINE elements of scratch. adapted: of the rows, or NULL. */
EXPORT void op_linear(const Linear *w, const element *x, int64_t x_stride, int64_t num_rows, element *panel,
                      const Output *out, const Adapted *adapted, int num_threads) {
    BEGIN_TEAM
    Rows rows = {panel, w->num_lines * LINE, num_rows};
    fill_panel(&rows, x, x_stride, NULL, num_rows, w->num_inputs, team);
    end_stage(team);
    linear(w, &rows, num_rows, out, adapted, team);
    END_TEAM
}

EXPORT void op_embed_packed(const Linear *w, const int32_t *token_ids, int64_t num_tokens, int64_t first_id,
                            element *out, int num_threads) {
    BEGIN_TEAM
    Rows rows = {out, w->num_inputs, 0};
    embed_packed(w, token_ids, num_tokens, first_id, &rows, team);
    END_TEAM
}

/* Adds the updates of an embedding to the looked up rows [num_tokens][num_columns]. */
EXPORT void op_embed_updates(const LowRank *const *updates, const Adapted *adapted, const int32_t *token_ids, int64_t first_id,
                             int64_t num_columns, element *rows, int num_threads) {
    BEGIN_TEAM
    Rows out = {rows, num_columns, 0};
    embed_updates(updates, adapted, token_ids, first_id, num_columns, &out, team);
    END_TEAM
}

EXPORT void op_normalize(element *x, int64_t stride, const Delta *delta, const Norm *norm, int64_t num_rows,
                         int64_t num_columns, element *out, int num_threads) {
    BEGIN_TEAM
    Rows rows = {out, num_columns, 0};
    normalize(x, stride, delta, NULL, norm, num_rows, num_columns, &rows, team);
    END_TEAM
}

EXPORT void op_qk_norm_rope_cache(const Heads *heads, const HeadWork *work, const Cache *cache, int num_threads) {
    BEGIN_TEAM
    qk_norm_rope_cache(heads, work, cache, team);
    END_TEAM
}

/* out: [num_tokens][num_heads * head_dim]. */
EXPORT void op_attend(AttentionPlan *plan, const element *query, int64_t query_stride, const Cache *cache,
                      const Scoring *scoring, element *out, int64_t out_stride, int num_threads) {
    BEGIN_TEAM
    Rows rows = {out, out_stride, 0};
    attend(plan, query, query_stride, cache, scoring, &rows, team);
    END_TEAM
}

/* scores: [num_tokens][SCORE_STRIDE], overwritten. scratch: experts_scratch bytes. panel: as of op_linear. adapted: of
 * the tokens, with room for experts_rows rows; or NULL. */
EXPORT void op_mix_experts(const Experts *experts, const element *x, int64_t x_stride, int64_t num_tokens,
                           float *scores, element *panel, void *scratch, element *out,
                           const Adapted *adapted, int num_threads) {
    const Linear *up = experts->up;
    Output to_out = {STORE, {out, experts->down->num_outputs, 0}, 0};
    if (num_tokens == 0) return;
    begin_experts(scratch);
    BEGIN_TEAM
    Rows rows = {panel, up->num_lines * LINE, num_tokens};
    fill_panel(&rows, x, x_stride, NULL, num_tokens, up->num_inputs, team);
    end_stage(team);
    mix_experts(experts, &rows, num_tokens, scores, scratch, &to_out, adapted, team);
    END_TEAM
}

EXPORT void op_convolve(const Conv *conv, const Segments *segments, int num_threads) {
    BEGIN_TEAM
    convolve(conv, segments, team);
    END_TEAM
}

EXPORT void op_scan_states(const Scan *scan, const Segments *segments, int num_threads) {
    BEGIN_TEAM
    scan_states(scan, segments, team);
    END_TEAM
}

/* dt, decay: [num_tokens][heads]. */
EXPORT void op_find_decay(const Rates *rates, const element *a, int64_t a_stride, int64_t num_tokens, float *dt,
                          float *decay, int num_threads) {
    int64_t heads = rates->num_heads;
    BEGIN_TEAM
    for (Range range; take_share(team, num_tokens, &range); finish_share(team, num_tokens))
        for (int64_t token = range.start; token < range.stop; token++)
            find_decay(rates, a + token * a_stride, dt + token * heads, decay + token * heads);
    END_TEAM
}

/* out = sigmoid(x) of float32 numbers with `has_floats`, else of elements. */
EXPORT void op_sigmoid(const void *x, void *out, int64_t count, int has_floats, int num_threads) {
    BEGIN_TEAM
    for (Range range; take_share(team, divide_up(count, 16), &range); finish_share(team, divide_up(count, 16)))
        for (int64_t i = range.start * 16; i < range.stop * 16; i += 16) {
            Mask mask = lanes(count - i);
            if (has_floats) store_some((float *)out + i, mask, sigmoid_16(load_some((const float *)x + i, mask)));
            else store16((element *)out + i, mask, sigmoid_16(load16((const element *)x + i, mask)));
        }
    END_TEAM
}

EXPORT void op_normalize_gated(const GatedNorm *gated, int64_t num_tokens, int num_threads) {
    BEGIN_TEAM
    normalize_gated(gated, num_tokens, team);
    END_TEAM
}
