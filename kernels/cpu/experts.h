/* Layers with experts: a router chooses some of many MLPs for each token; their weighted outputs are added. */
#ifndef TOKENLOOM_EXPERTS_H
#define TOKENLOOM_EXPERTS_H

#include "kernels.h"

/* ── route.c ─────────────────────────────────────────────────────────────────────────────────────────────────────── */

/* As in contract.py. */
typedef enum { SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN } ScoreKind;

typedef struct {
    ScoreKind score;
    int32_t sums_two_best; /* a group's score is the sum of its two best; else its best */
    int32_t is_normalized;
    float scale;
    const float *choice_bias, *expert_scales; /* [num_experts], or NULL */
    int64_t num_experts, top_k, num_groups, top_groups;
} Routing;

#define SCORE_STRIDE(num_experts) round_up(num_experts, 16)

/* Chooses the experts of a token, in falling order of their scores for the choice, and their weights; both [top_k].
 * scores: the router's outputs, 64-byte aligned, with room for SCORE_STRIDE; overwritten. */
void route(const Routing *routing, float *scores, int32_t *experts, float *weights);

/* ── experts.c ───────────────────────────────────────────────────────────────────────────────────────────────────── */

typedef struct {
    Routing routing;
    const Linear *up, *down; /* [num_experts] */
    const Linear *router; /* NULL: the scores are given */
    const Linear *shared_up, *shared_down; /* of the expert that every token passes, or NULL */
    const Linear *shared_gate; /* its output is multiplied by the sigmoid of this linear's; or NULL */
} Experts;

/* Returns the bytes of scratch memory of a layer for num_tokens. */
EXPORT int64_t experts_scratch(const Experts *experts, int64_t num_tokens);

/* Must be called for scratch memory, at a multiple of 64 bytes, before a team passes it to `mix_experts`. */
void begin_experts(void *scratch);

/* out = the weighted sum of each token's experts, added to the target or stored. x: a panel of num_tokens rows.
 * scores: [num_tokens][SCORE_STRIDE], overwritten; NULL: the router's. adapted: of the tokens, with scratch memory for
 * experts_rows rows; or NULL. Ends its last stage. */
void mix_experts(const Experts *experts, const Rows *x, int64_t num_tokens, float *scores, void *scratch,
                 const Output *out, const Adapted *adapted, Team *team);

/* Returns the rows of `Adapted.shrunk` that a layer needs: those of the pairs, and of the shared expert. */
INLINE int64_t experts_rows(const Experts *experts, int64_t num_tokens) {
    return num_tokens * (experts->routing.top_k + 1);
}

#endif
