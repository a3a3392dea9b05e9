/* The attention plan: cuts the work of a step into tasks.
 *
 * A task is one KV head, the query heads that read it, and a range of keys. The context of a decode token is cut at
 * multiples of CHUNK keys, independent of the rest of the step; if there is more than one split, each gives a partial
 * result. A known token and its drafts are decode tokens, so that each has the bits that it has alone; those whose cuts
 * are the same share tasks of up to TASK_ROWS query rows. A prefill row is cut into blocks of up to PREFILL_ROWS query
 * rows, those of attention.c of TASK_ROWS. In a batch-invariant plan each token is a decode token, so that chunked prefill
 * does not move the cuts.
 */
#include "attention.h"

#include <stdlib.h>

static bool add_task(AttentionPlan *plan, AttentionTask task) {
    if (plan->num_tasks == plan->capacity) {
        int64_t capacity = plan->capacity ? 2 * plan->capacity : 64;
        AttentionTask *tasks = realloc(plan->tasks, (size_t)capacity * sizeof *tasks);
        if (tasks == NULL) return false;
        plan->tasks = tasks;
        plan->capacity = capacity;
    }
    plan->tasks[plan->num_tasks++] = task;
    return true;
}

/* Keys [low, high) that some tokens attend to. */
typedef struct {
    int64_t low, high;
} KeyRange;

static KeyRange keys_of(const AttentionPlan *plan, const AttentionTask *task, int64_t token) {
    int64_t low = plan->window ? max64(0, task->position + token - plan->window + 1) : 0;
    return (KeyRange){low, seen_end(plan, task, token)};
}

static bool has_same_cuts(KeyRange a, KeyRange b) {
    return a.low / CHUNK == b.low / CHUNK && (a.high - 1) / CHUNK == (b.high - 1) / CHUNK;
}

/* Adds the tasks of the template's tokens for one KV head. */
static bool add_head_tasks(AttentionPlan *plan, AttentionTask task) {
    int64_t group = plan->num_heads / plan->num_kv_heads, most_heads = task.num_heads;
    KeyRange keys = keys_of(plan, &task, 0);
    for (int64_t i = 1; i < task.num_tokens; i++) keys.high = max64(keys.high, keys_of(plan, &task, i).high);
    bool is_cut = task.is_decode && keys.low / CHUNK != (keys.high - 1) / CHUNK;
    for (int64_t head = 0; head < group; head += most_heads) {
        task.first_head = (int32_t)(task.kv_head * group + head);
        task.num_heads = (int32_t)min64(most_heads, group - head);
        task.partial = -1;
        task.num_partials = 0;
        task.first_key = (int32_t)keys.low;
        task.end_key = (int32_t)keys.high;
        if (!is_cut) {
            if (!add_task(plan, task)) return false;
            continue;
        }
        int64_t first_task = plan->num_tasks;
        for (int64_t key = keys.low; key < keys.high; key = (key / CHUNK + 1) * CHUNK) {
            task.first_key = (int32_t)key;
            task.end_key = (int32_t)min64(keys.high, (key / CHUNK + 1) * CHUNK);
            task.partial = plan->num_partial_rows;
            plan->num_partial_rows += task.num_tokens * task.num_heads;
            if (!add_task(plan, task)) return false;
        }
        plan->tasks[first_task].num_partials = (int32_t)(plan->num_tasks - first_task);
    }
    return true;
}

static bool add_row(AttentionPlan *plan, const StepRows *rows, int64_t row) {
    int64_t start = rows->query_starts[row], count = rows->query_starts[row + 1] - start;
    int64_t group = plan->num_heads / plan->num_kv_heads;
    int64_t block = max64(1, TASK_ROWS / group), most_heads = min64(group, TASK_ROWS);
    bool is_decode = plan->is_batch_invariant || (rows->has_drafts != NULL && rows->has_drafts[row]);
    if (!is_decode && is_prefill(count, group, plan->head_dim) && group <= PREFILL_ROWS)
        block = PREFILL_ROWS / group, most_heads = group;
    AttentionTask all = {.row = (int32_t)row, .token = (int32_t)start};
    all.position = (int32_t)(rows->seq_lens[row] - count);
    for (int64_t end = count, first; end > 0; end = first) { /* longest context first */
        first = is_decode ? end - 1 : (end - 1) / block * block;
        if (is_decode)
            while (first > max64(0, end - block) && has_same_cuts(keys_of(plan, &all, first - 1), keys_of(plan, &all, first)))
                first--;
        AttentionTask task = all;
        task.token += (int32_t)first;
        task.position += (int32_t)first;
        task.num_tokens = (int32_t)(end - first);
        task.num_heads = (int32_t)(task.num_tokens == 1 ? min64(group, TASK_ROWS) : most_heads);
        task.is_decode = is_decode || task.num_tokens == 1;
        for (task.kv_head = 0; task.kv_head < plan->num_kv_heads; task.kv_head++)
            if (!add_head_tasks(plan, task)) return false;
    }
    return true;
}

AttentionPlan *make_attention_plan(const StepRows *rows, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                   int64_t window, int32_t is_batch_invariant) {
    AttentionPlan *plan = calloc(1, sizeof *plan);
    if (plan == NULL) return NULL;
    plan->rows = *rows;
    plan->num_heads = num_heads;
    plan->num_kv_heads = num_kv_heads;
    plan->head_dim = head_dim;
    plan->window = window;
    plan->is_batch_invariant = is_batch_invariant;
    bool is_whole = true;
    for (int64_t row = rows->num_rows - 1; row >= 0 && is_whole; row--) { /* prefill rows have the largest tasks */
        int64_t count = rows->query_starts[row + 1] - rows->query_starts[row];
        if (rows->seq_lens[row] <= 0 || count <= 0) continue;
        is_whole = add_row(plan, rows, row);
    }
    if (is_whole && plan->num_partial_rows) {
        int64_t floats = plan->num_partial_rows * partial_floats(head_dim);
        plan->partials = aligned_alloc(64, (size_t)floats * sizeof(float));
        is_whole = plan->partials != NULL;
    }
    if (is_whole) return plan;
    free_attention_plan(plan);
    return NULL;
}

void free_attention_plan(AttentionPlan *plan) {
    if (plan == NULL) return;
    free(plan->tasks);
    free(plan->partials);
    free(plan);
}
