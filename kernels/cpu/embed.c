/* The residual stream of a step before its layers: embeddings, positions and media. */
#include "decoder.h"

static void embed_token(const Decoder *d, int64_t id, element *to) {
    bool exists = id >= 0 && id < d->num_ids;
    for (int64_t i = 0; i < d->hidden_size; i += 16) {
        Mask mask = lanes(d->hidden_size - i);
        store16(to + i, mask, load16(d->table + (exists ? id : 0) * d->hidden_size + i, exists ? mask : 0));
    }
}

void embed_tokens(const Decoder *d, const Step *step, const Rows *out, Team *team) {
    int64_t num_tokens = step->num_tokens;
    if (d->packed_table != NULL) {
        embed_packed(d->packed_table, step->token_ids, num_tokens, 0, out, team);
        return;
    }
    if (d->stored_table != NULL) {
        embed_stored(d->stored_table, step->token_ids, num_tokens, 0, out, team);
        return;
    }
    for (Range range; take_share(team, num_tokens, &range); finish_share(team, num_tokens))
        for (int64_t token = range.start; token < range.stop; token++)
            embed_token(d, step->token_ids[token], rows_at(out, token, 0));
}

void place_embeddings(const Decoder *d, const Step *step, element *rows, Team *team) {
    for (Range range; take_share(team, step->num_tokens, &range); finish_share(team, step->num_tokens))
        for (int64_t token = range.start; token < range.stop; token++) {
            element *row = rows + token * d->hidden_size;
            const element *learned = d->learned_positions, *type = d->token_types;
            if (learned != NULL) learned += step->positions[token] * d->hidden_size;
            if (type != NULL && step->token_types != NULL) type += step->token_types[token] * d->hidden_size;
            for (int64_t i = 0; i < d->hidden_size; i += 16) {
                Mask mask = lanes(d->hidden_size - i);
                Floats v = multiply16(load16(row + i, mask), fill16(d->embedding_scale));
                if (learned != NULL) v = add16(v, load16(learned + i, mask));
                if (type != NULL) v = add16(v, load16(type + i, mask));
                store16(row + i, mask, v);
            }
            if (d->embedding_norm.kind) normalize_row(row, &d->embedding_norm, d->hidden_size);
        }
    end_stage(team);
}

void put_media(const Decoder *d, const Media *media, const element *from, bool adds, element *stream, Team *team) {
    for (Range range; take_share(team, media->num_tokens, &range); finish_share(team, media->num_tokens))
        for (int64_t item = range.start; item < range.stop; item++) {
            element *row = stream + media->tokens[item] * d->hidden_size;
            for (int64_t i = 0; i < d->hidden_size; i += 16) {
                Mask mask = lanes(d->hidden_size - i);
                Floats v = load16(from + item * d->hidden_size + i, mask);
                store16(row + i, mask, adds ? add16(load16(row + i, mask), v) : v);
            }
        }
    end_stage(team);
}
