/* A decoder's layers, one step of it, and the stages before its layers. */
#ifndef TOKENLOOM_DECODER_H
#define TOKENLOOM_DECODER_H

#include "experts.h"
#include "state.h"

typedef struct {
    Linear qkv, output; /* qkv: with has_gates also a gate for each element of the query heads, behind the values */
    HeadRules rules;
    Scoring scoring;
    int64_t window; /* 0: none */
    int64_t group, cache_layer; /* index in Step's groups; of the layer in the group's cache */
    float input_scale, output_scale; /* of x, and of what the layer adds */
    int32_t has_gates; /* the attended heads are multiplied by their sigmoid */
} Attention;

typedef struct {
    Attention attention;
    const Mixer *mixer; /* with a state; or NULL */
    Linear up, down;
    const Experts *experts; /* in place of up and down; or NULL */
    int32_t has_attention, has_mlp;
    float gate_scale; /* not 1: `up` gives gates, then ups, and an activation follows with gates times this */
    ActivationKind activation; /* of scaled gates, with the next one */
    float limit;
    float mlp_output_scale;
    Norm input_norm, mixer_output_norm, mlp_norm, mlp_output_norm; /* of kind NO_NORM if the layer has none */
    int32_t is_parallel; /* without mlp_norm both parts share the normalized input */
    int32_t is_post_norm; /* output norms are of the sums, with which the stream continues */
    Linear cross_query, cross_output; /* of cross attention, with the next two; without it cross_norm has kind NO_NORM */
    Norm cross_norm;
    Scoring cross_scoring;
} Layer;

typedef struct {
    const Layer *layers;
    int64_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim;
    float embedding_scale, residual_scale, logit_scale, logit_softcap;
    Norm final_norm;
    const Linear *packed_table; /* the embedding as the packed weight of the tied head, or NULL */
    const StoredTable *stored_table; /* else as rows of blocks, or NULL */
    const element *table; /* else as [vocabulary][hidden_size] */
    int64_t num_ids;
    const element *learned_positions; /* [positions][hidden_size]: added to the embedding; or NULL */
    const element *token_types; /* [types][hidden_size]: added to the embedding; or NULL */
    Norm embedding_norm; /* of the sum; of kind NO_NORM if there is none */
    const Linear *head; /* or NULL: no token gets logits */
    int32_t is_batch_invariant; /* see make_attention_plan */
} Decoder;

/* Tokens that stand for parts of images. */
typedef struct {
    const int64_t *tokens; /* [num_tokens]: indices of tokens of the step, each once */
    int64_t num_tokens;
    const element *embeds; /* [num_tokens][hidden_size]: in place of their scaled embeddings */
    const element *const *added; /* [num_added]: [num_tokens][hidden_size] each, added behind the first layers */
    int64_t num_added;
} Media;

/* The KV cache of layers that share block tables, and the step's places in it. */
typedef struct {
    char *kv_cache;
    int64_t block_stride, block_size; /* bytes between blocks; tokens of a block */
    CacheKind kind;
    const int64_t *slots; /* [num_tokens] */
    const int32_t *block_tables; /* [num_rows][table_stride] */
    int64_t table_stride;
} CacheGroup;

typedef struct {
    const int32_t *token_ids; /* [num_tokens] */
    const int64_t *positions;
    int64_t num_tokens;
    StepRows rows; /* with the block tables of the first group */
    const CacheGroup *groups;
    element *hidden; /* [num_tokens][hidden_size]: output, after the final norm */
    const int64_t *logits_indices; /* [num_logits]: indices of the tokens that get logits */
    int64_t num_logits;
    float *logits; /* [num_logits][outputs of the head] */
    const States *states; /* of the layers that have one, or NULL */
    const Adapted *adapted, *logits_adapted; /* of the tokens, and of those that get logits; or NULL */
    const LowRank *const *embedding_updates; /* or NULL */
    const Media *media; /* or NULL */
    const float *cos_sin; /* [num_tokens][num_rotated]: by positions 0, 1, …, in place of the layers'; or NULL */
    const int32_t *token_types; /* [num_tokens]: rows of the decoder's token_types; NULL: all 0 */
    const StepRows *cross; /* of cross attention; NULL: the layers leave it out */
    const int64_t *aux_places; /* [num_layers + 1]: by layers passed, the place of the stream in aux_states; -1: none */
    element *aux_states; /* [num_tokens][num_aux][hidden_size]; NULL: none are kept */
    int64_t num_aux;
} Step;

/* ── embed.c ─────────────────────────────────────────────────────────────────────────────────────────────────────── */

/* out: the table's rows of the step's tokens. */
void embed_tokens(const Decoder *d, const Step *step, const Rows *out, Team *team);

/* Scales the embeddings, adds those of positions and types and normalizes the sums, in a stage of its own. rows:
 * [num_tokens][hidden_size]. */
void place_embeddings(const Decoder *d, const Step *step, element *rows, Team *team);

/* Replaces the rows of media's tokens in the stream, or adds to them, in a stage of its own. */
void put_media(const Decoder *d, const Media *media, const element *from, bool adds, element *stream, Team *team);

#endif
