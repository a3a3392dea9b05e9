/* Embeddings in the blocks of a GGUF file: each look-up unpacks one row. */
#include "kernels.h"

void unpack_row(int32_t kind, const uint8_t *row, int64_t num_columns, element *to); /* of blocks.c */

/* Copies rows of blocks, in any places, to [num_rows][row_bytes]. */
EXPORT void copy_block_rows(const uint8_t *const *rows, int64_t num_rows, int64_t row_bytes, uint8_t *to,
                            int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t row = 0; row < num_rows; row++) memcpy(to + row * row_bytes, rows[row], (size_t)row_bytes);
}

void embed_stored(const StoredTable *table, const int32_t *token_ids, int64_t num_tokens, int64_t first_id,
                  const Rows *out, Team *team) {
    const int64_t size = table->num_columns;
    for (Range range; take_share(team, num_tokens, &range); finish_share(team, num_tokens))
        for (int64_t token = range.start; token < range.stop; token++) {
            const int64_t row = token_ids[token] - first_id;
            element *to = rows_at(out, token, 0);
            if (row < 0 || row >= table->num_rows) memset(to, 0, (size_t)size * sizeof(element));
            else unpack_row(table->kind, table->blocks + row * table->row_bytes, size, to);
        }
}

EXPORT void op_embed_stored(const StoredTable *table, const int32_t *token_ids, int64_t num_tokens, int64_t first_id,
                            element *out, int num_threads) {
    BEGIN_TEAM
    Rows rows = {out, table->num_columns, 0};
    embed_stored(table, token_ids, num_tokens, first_id, &rows, team);
    END_TEAM
}
