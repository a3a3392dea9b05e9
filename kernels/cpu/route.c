/* The router's decision for one token, as `route` of reference.py. Vectors cover experts, 16 at a time. */
#include "experts.h"

#define NEVER (-__builtin_inff()) /* the choice never falls on it while another expert is left */
#define LOWEST -1e30f /* in place of scores that are not finite: any experts will do, but distinct ones */

INLINE Floats exp16(Floats x) { return exp2_16(multiply16(x, fill16(LOG2_E))); }

/* Replaces the scores by probabilities; those that pad the last vector become LOWEST or 0. */
static void normalize_scores(float *values, int64_t num_experts, ScoreKind kind) {
    Floats lowest = fill16(LOWEST), one = fill16(1.0f), largest = lowest, sum = zero16();
    for (int64_t i = 0; i < num_experts; i += 16) {
        Mask mask = lanes(num_experts - i);
        Floats v = load_some(values + i, mask);
        v = choose(mask & is_finite16(v), v, lowest);
        largest = larger16(largest, v);
        if (kind == SIGMOID) v = divide16(one, add16(one, exp16(subtract16(zero16(), v))));
        store_floats(values + i, v);
    }
    if (kind != SOFTMAX) return;
    largest = fill16(largest_of(largest));
    for (int64_t i = 0; i < num_experts; i += 16) {
        Floats power = exp16(subtract16(load_floats(values + i), largest));
        sum = add16(sum, power);
        store_floats(values + i, power);
    }
    sum = fill16(sum_of(sum));
    for (int64_t i = 0; i < num_experts; i += 16) store_floats(values + i, divide16(load_floats(values + i), sum));
}

/* Closes all but the best groups; of equal ones those with higher numbers. worth: [num_groups] of scratch. */
static void close_groups(const Routing *r, float *choice, float *worth) {
    int64_t size = r->num_experts / r->num_groups;
    for (int64_t group = 0; group < r->num_groups; group++) {
        float best = NEVER, second = NEVER;
        for (const float *at = choice + group * size; at < choice + (group + 1) * size; at++) {
            if (*at > best) second = best, best = *at;
            else if (*at > second) second = *at;
        }
        worth[group] = r->sums_two_best ? best + second : best;
    }
    for (int64_t left = r->num_groups; left > r->top_groups; left--) {
        int64_t worst = -1;
        for (int64_t group = 0; group < r->num_groups; group++) /* a closed group is worth infinity */
            if (worth[group] < __builtin_inff() && (worst < 0 || worth[group] <= worth[worst])) worst = group;
        worth[worst] = __builtin_inff();
        for (int64_t i = worst * size; i < (worst + 1) * size; i++) choice[i] = NEVER;
    }
}

/* Returns the first of the largest values; `padded` is a multiple of 16. */
static int64_t index_of_largest(const float *values, int64_t padded) {
    Floats largest = load_floats(values);
    for (int64_t i = 16; i < padded; i += 16) largest = larger16(largest, load_floats(values + i));
    largest = fill16(largest_of(largest));
    for (int64_t i = 0; i < padded; i += 16) {
        Mask found = at_least(load_floats(values + i), largest);
        if (found) return i + __builtin_ctz(found);
    }
    return 0;
}

static void weigh(const Routing *r, const float *probabilities, const int32_t *experts, float *weights) {
    float largest = NEVER, total = 0;
    for (int64_t rank = 0; rank < r->top_k; rank++) {
        weights[rank] = probabilities[experts[rank]];
        if (weights[rank] > largest) largest = weights[rank];
    }
    for (int64_t rank = 0; rank < r->top_k; rank++) {
        if (r->score == SOFTMAX_OF_CHOSEN) weights[rank] = first_of(exp16(fill16(weights[rank] - largest)));
        total += weights[rank];
    }
    for (int64_t rank = 0; rank < r->top_k; rank++) {
        if (r->is_normalized || r->score == SOFTMAX_OF_CHOSEN) weights[rank] /= total;
        if (r->expert_scales != NULL) weights[rank] *= r->expert_scales[experts[rank]];
        weights[rank] *= r->scale;
    }
}

void route(const Routing *r, float *scores, int32_t *experts, float *weights) {
    int64_t padded = SCORE_STRIDE(r->num_experts);
    float *choice = thread_scratch((padded + r->num_groups) * (int64_t)sizeof *choice);
    normalize_scores(scores, r->num_experts, r->score);
    for (int64_t i = 0; i < r->num_experts; i += 16) {
        Mask mask = lanes(r->num_experts - i);
        Floats v = load_floats(scores + i);
        if (r->choice_bias != NULL) v = add16(v, load_some(r->choice_bias + i, mask));
        store_floats(choice + i, choose(mask, v, fill16(NEVER)));
    }
    if (r->num_groups > 1) close_groups(r, choice, choice + padded);
    for (int64_t rank = 0; rank < r->top_k; rank++) {
        experts[rank] = (int32_t)index_of_largest(choice, padded);
        choice[experts[rank]] = NEVER;
    }
    weigh(r, scores, experts, weights);
}
