"""The core against a worker that checks every read of its cache: any schedule brings the tokens of a request alone."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import msgspec
import pytest

from tokenloom.core.features.crash_isolation import CRASHES_TO_FAIL
from tokenloom.core.hang_detector import FIRST_LIMIT_S, MIN_LIMIT_S
from tokenloom.core.kv.block_pool import BlockPool
from tokenloom.core.kv.block_record import BlockRecord
from tokenloom.core.scheduling.scheduler import MAX_SKIPS
from tokenloom.core.scheduling.step.batch import Batch
from tokenloom.ipc.codec import encode_ids, num_ids
from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.params.pooling_params import PoolingParams
from tokenloom.ipc.process.awake_clock import steady_time
from tokenloom.tests.core.fake_worker import expected_tokens, next_token
from tokenloom.tests.core.harness import Harness, prompt_of


def test_a_small_pool_preempts_and_loses_nothing() -> None:
    harness = Harness(num_blocks=20, max_num_seqs=8, max_num_batched_tokens=16)
    rng = random.Random(1)
    lengths = [rng.randrange(1, 12) for _ in range(16)]
    for key, length in enumerate(lengths):
        harness.add(key, prompt_of(rng, length), 40)
    harness.run()
    assert harness.core.stats.num_step_tokens == sum(lengths) + 16 * 40, "a token counts once, however often computed"
    assert harness.core.scheduler.num_recomputed_tokens >= harness.core.scheduler.num_preemptions > 0
    assert harness.finished[0].num_preemptions == 0, "the oldest gave way"
    for key in range(16):
        harness.check(key)


def test_a_prompt_that_is_scored_is_not_taken_to_hang_by_the_time_of_those_that_are_not() -> None:
    harness = Harness()
    harness.add(0, [1, 2, 3, 4])
    harness.run()

    def patience_s() -> float:
        harness.core.step()
        overdue_at, now = harness.core.overdue_at, time.monotonic()
        assert overdue_at is not None
        harness.run()
        return round(overdue_at - now)

    harness.add(1, [5, 6, 7, 8])
    assert patience_s() == MIN_LIMIT_S
    harness.add(2, [5, 6, 7, 9], prompt_logprobs=1)
    assert patience_s() == FIRST_LIMIT_S


def test_a_prefix_is_computed_once_and_at_least_one_token_is_recomputed() -> None:
    harness = Harness()
    prompt = prompt_of(random.Random(2), 32)
    harness.add(0, prompt)
    harness.run()
    computed = harness.worker.num_computed_tokens
    harness.add(1, prompt)
    harness.run_to_the_end()
    assert harness.cached == {0: 0, 1: 28}
    assert harness.worker.num_computed_tokens - computed == 4 + 7


def test_a_model_with_states_shares_no_blocks_not_even_among_the_answers_of_a_request() -> None:
    harness = Harness()
    model = msgspec.structs.replace(harness.spec.model, has_state=True)
    harness.spec = msgspec.structs.replace(harness.spec, model=model)
    harness.renew_core()
    prompt = prompt_of(random.Random(2), 32)
    for key in range(2):
        harness.add(key, prompt)
        harness.run_to_the_end()
    assert harness.cached == {0: 0, 1: 0}
    harness.add(2, prompt, n=2)
    harness.core.step()
    assert [request.num_cached_tokens for request in harness.core.scheduler.rows.requests()] == [0, 0]


def test_an_emptied_cache_has_no_hits_and_running_requests_continue(tmp_path: Path) -> None:
    harness, rng = Harness(record=tmp_path / "blocks"), random.Random(5)
    first, other = prompt_of(rng, 32), prompt_of(rng, 32)
    harness.add(0, first, 40)
    harness.add(1, other, 1)
    harness.turns(10)
    harness.core.reset_prefix_cache()
    harness.add(2, first, 40)
    harness.add(3, other, 4)
    harness.run()
    assert (harness.cached[2], harness.cached[3]) == (0, 0)
    for key in range(4):
        harness.check(key)
    harness.add(4, other, 4)
    harness.run()
    assert harness.cached[4] == 28, "what came after is found"


def test_the_map_of_the_pool_tells_the_state_of_each_block() -> None:
    pool = BlockPool(11)
    cached, shared, used, given_back = pool.allocate(4)
    pool.cache_block(cached, b"key")
    pool.touch([shared, shared])
    pool.free([cached, given_back])
    expected = {cached: 1, shared: 3, used: 2}
    assert list(pool.sample(10)) == [expected.get(block, 0) for block in range(1, 11)]
    assert list(pool.sample(4)) == [expected.get(block, 0) for block in (1, 4, 7, 10)]


def test_a_block_reused_while_its_step_is_in_flight_is_not_recorded(tmp_path: Path) -> None:
    path, keys = tmp_path / "blocks", [b"a" * 32, b"b" * 32]
    pool = BlockPool(3, [BlockRecord(path, [3], 0)])
    blocks = pool.allocate(2)
    for block, key in zip(blocks, keys, strict=True):
        pool.cache_block(block, key)
    published = pool.take_pending()
    pool.free(blocks)
    pool.allocate(1)
    pool.mark_written(published)
    assert BlockRecord(path, [3], 0).key_by_block() == {blocks[1]: keys[1]}
    assert BlockPool(3, [], BlockRecord(path, [3], 0).key_by_block()).lookup(keys[1]) == blocks[1]
    assert BlockRecord(tmp_path / "others", [3], 0).namespace != BlockRecord(path, [3], 0).namespace
    pool.cache_block(blocks[0], keys[0])
    pool.clear_index()
    assert not pool.take_pending(), "what workers were to write that are gone"


def test_a_block_with_a_token_that_is_still_in_flight_is_not_found() -> None:
    harness = Harness(block_size=1)
    harness.add(0, [1, 2, 3])
    harness.turn()
    harness.core.step()
    harness.abort(0)
    harness.add(1, [1, 2, 3, *harness.tokens[0], 0, 7])  # an empty row holds zeros
    harness.run_to_the_end()


def test_outputs_are_cached_for_the_next_turn_of_a_chat() -> None:
    harness = Harness()
    prompt = prompt_of(random.Random(4), 10)
    harness.add(0, prompt, 11)
    harness.run()
    harness.add(1, [*prompt, *harness.tokens[0], 5, 6, 7])
    harness.run()
    assert harness.cached[1] == 20  # the last token of an answer is never computed


def test_a_resumed_request_that_has_its_stop_finishes_without_a_step() -> None:
    harness = Harness()
    harness.add(0, [1, 2], 20, outputs=[5, 6], stop=[6], min_tokens=2)
    harness.add(1, [1, 6], 20, stop=[6])
    harness.take()
    assert harness.finished[0].reason == "stop" and harness.finished.keys() == {0}, "a prompt may end in a stop token"


@pytest.mark.parametrize(("policy", "order"), [("priority", [2, 1, 0]), ("fcfs", [0, 1, 2])])
def test_priority_runs_the_lower_value_first_if_it_counts(policy: str, order: list[int]) -> None:
    harness = Harness(max_num_seqs=1, scheduling_policy=policy)
    for key, priority in enumerate([5, 0, -3]):
        harness.add(key, [1, 2, 3], priority=priority)
    harness.run()
    assert list(harness.finished) == order


def test_a_request_that_does_not_fit_lets_others_pass_but_not_for_ever() -> None:
    harness = Harness(num_blocks=33, max_num_seqs=4)
    harness.add(0, [1] * 40, 40)
    harness.turn()
    harness.add(1, [2] * 120, 8)  # the whole pool
    for key in range(2, 400):
        harness.add(key, [key], 3 + key % 5)
    harness.run()
    order = list(harness.finished)
    assert 4 < order.index(1) <= MAX_SKIPS + 4, "the large one neither blocks the small ones nor waits for all"
    for key in (0, 1, 2, 399):
        harness.check(key)


def test_a_long_prompt_leaves_room_for_short_ones() -> None:
    harness = Harness(max_num_seqs=8, max_num_batched_tokens=32)
    harness.add(0, [1] * 200, 8)
    harness.add(1, [2] * 4, 1)
    harness.run()
    assert list(harness.finished) == [1, 0]


@pytest.mark.parametrize(("threshold", "chunk"), [(0, 16), (10, 10)])
def test_a_prompt_among_others_takes_its_chunk_of_a_step(threshold: int, chunk: int) -> None:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    harness = Harness(**sizes, long_prefill_token_threshold=threshold)
    harness.add(0, [1] * 40)
    harness.add(1, [2] * 40)
    harness.turn()
    assert harness.worker.num_computed_tokens == 2 * chunk


def test_a_prompt_alone_takes_whole_steps() -> None:
    harness = Harness(max_num_seqs=8, max_num_batched_tokens=64)
    harness.add(0, [1] * 200, 1)
    harness.run()
    assert harness.worker.num_steps == 4


def test_a_prompt_among_many_streams_adds_half_a_step_to_their_long_steps() -> None:
    harness = Harness(num_blocks=128, max_num_seqs=16, max_num_batched_tokens=1024, steps_in_flight=1)
    worker = harness.worker
    worker.step_s, worker.token_s = 1.0, 0.01
    harness.add(0, [1] * 200, 1)
    harness.run()
    for key in range(1, 9):
        harness.add(key, [key], 30)
    harness.turns(4)
    harness.add(9, [9] * 200)
    before = worker.num_computed_tokens
    harness.turn()
    assert 8 + 30 <= worker.num_computed_tokens - before <= 8 + 54, "0.5 · 1.08 s, of 10 to 15 ms each"
    harness.run_to_the_end()


def test_answers_that_have_begun_go_on_one_after_the_other() -> None:
    harness = Harness(max_num_seqs=8, max_num_batched_tokens=32, steps_in_flight=1)
    for key in range(4):
        prompt = [key + 1] * 30
        harness.add(key, prompt, outputs=[next_token(prompt, key)])
    harness.turn()
    assert [len(harness.tokens[key]) for key in range(4)] == [2, 1, 1, 1], "a step's whole budget went to the first"
    harness.run_to_the_end()


def test_an_answer_that_goes_on_at_once_does_not_wait_while_others_are_computed_again(tmp_path: Path) -> None:
    harness = Harness(128, tmp_path / "blocks", max_num_seqs=8, max_num_batched_tokens=64, steps_in_flight=1)
    harness.add(0, [1] * 30, 20)
    harness.turns(4)
    for key in (1, 2):
        harness.add(key, prompt := [key + 1] * 90, outputs=[next_token(prompt, key)])
    harness.lose_core(num_done=0)
    num_tokens, num_computed = len(harness.tokens[0]), harness.worker.num_computed_tokens
    harness.turn()
    assert len(harness.tokens[0]) == num_tokens + 1
    assert harness.worker.num_computed_tokens - num_computed < 2 * 4 + 64 // 4, "a quarter of the budget for all others"
    harness.run_to_the_end()


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    harness = Harness(num_blocks=9)
    harness.add(0, [1] * 30, 8)
    harness.take()
    assert harness.error_of(0).startswith("request: 30 prompt tokens") and "need 10 KV blocks" in harness.error_of(0)
    for key, num_prompt in ((2, 0), (3, 249)):
        harness.add(key, [1] * num_prompt, 8)
        harness.take()
        assert harness.error_of(key).startswith("request: ") and "max_model_len 256" in harness.error_of(key)
    harness.add(1, [1] * 25, 8)
    harness.run()
    harness.check(1)


@pytest.mark.parametrize("limit", [{"max_waiting_requests": 2}, {"max_waiting_tokens": 2}], ids=str)
def test_a_full_queue_answers_overloaded_but_takes_resubmissions(limit: dict[str, int]) -> None:
    harness = Harness(**limit)
    for key in range(3):
        harness.add(key, [1])
    harness.take()
    assert list(harness.finished) == [2]
    error = harness.finished[2].error
    assert error is not None and error.kind == "overloaded" and error.retry_after_s > 0
    counted = {
        "max_waiting_requests": harness.core.stats.num_refused_for_requests,
        "max_waiting_tokens": harness.core.stats.num_refused_for_tokens,
    }
    assert counted == {name: int(name in limit) for name in counted}
    harness.add(3, [1], outputs=[next_token([1], 3)])
    harness.run()
    harness.check(3)


@pytest.mark.parametrize(
    ("num_prompt", "num_answers", "words"),
    [(1, 11, "n is 11 .* at most 10 answers"), (52, 5, "52 tokens; .* 256 prompt tokens")],
)
def test_a_request_for_too_large_a_share_of_the_queue_is_refused_for_good(
    num_prompt: int, num_answers: int, words: str
) -> None:
    harness = Harness(max_waiting_requests=40, max_waiting_tokens=1024)
    harness.add(0, [1] * num_prompt, n=num_answers)
    harness.take()
    errors = [finished.error for finished in harness.finished.values()]
    assert [error.kind for error in errors if error is not None] == ["request"] * num_answers
    assert re.search(words, harness.error_of(0))
    harness.add(20, [1] * num_prompt, n=4)
    assert harness.core.num_requests == 4


def test_an_equal_attempt_is_ignored_and_a_higher_one_replaces() -> None:
    harness = Harness()
    harness.add(0, [1, 2, 3])
    harness.turn()
    have = list(harness.tokens[0])
    harness.add(0, [1, 2, 3], outputs=have)
    assert harness.core.num_requests == 1
    harness.turn()
    assert len(harness.tokens[0]) > len(have), "an equal attempt has stopped the stream"
    have = list(harness.tokens[0])
    harness.add(0, [1, 2, 3], outputs=have, attempt=1)
    assert harness.core.num_requests == 1
    harness.run_to_the_end()
    harness.add(1, [1, 2, 3], 5)
    harness.turn()
    harness.add(1, [1, 2, 3], 5, outputs=expected_tokens([1, 2, 3], 1, 5, []), attempt=1)
    harness.take()
    assert harness.finished[1].reason == "length" and harness.core.num_requests == 0, "it has all its tokens"


def test_mean_pooling_computes_the_whole_prompt_and_last_token_pooling_reads_the_cache() -> None:
    harness = Harness(max_num_batched_tokens=16, max_num_seqs=4)
    prompt = prompt_of(random.Random(8), 33)
    harness.add(0, prompt, pooling=PoolingParams(method="mean"))
    harness.run()
    harness.add(1, prompt, pooling=PoolingParams(method="mean"))
    harness.add(2, prompt, pooling=PoolingParams(method="last"))
    harness.add(3, prompt)
    harness.run()
    assert harness.cached == {0: 0, 1: 0, 2: 32, 3: 32}
    for key in range(4):
        harness.check(key)


def test_deadlines_end_requests_in_the_queue_and_while_they_run() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add(0, [1, 2, 3], 100, timeout_s=50.0)  # arrives at 1.0
    harness.add(1, [1, 2, 3], 100, queue_timeout_s=30.0)  # arrives at 2.0
    harness.add(2, [1, 2, 3], 5, queue_timeout_s=1e6)
    harness.turns(5)
    assert harness.core.deadlines.next == 32.0
    harness.core.expire(31.9)
    assert not harness.finished
    harness.core.expire(32.0)
    harness.take()
    assert {key: done.reason for key, done in harness.finished.items()} == {1: "timeout"}
    harness.core.expire(51.0)
    harness.take()
    assert harness.finished[0].reason == "timeout"
    assert harness.tokens[0] == expected_tokens([1, 2, 3], 0, 100, [])[: len(harness.tokens[0])]
    harness.run()
    harness.check(2)


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("pooled", [], "0 rows were embedded, 1 had to be"),
        ("prompt_logprobs", 0, "rows that were not in it"),
        ("prompt_logprobs", 4, "rows that were not in it"),
    ],
)
def test_a_result_for_other_rows_than_the_step_is_refused(field: str, value: object, what: str) -> None:
    harness = Harness(steps_in_flight=1, max_num_seqs=8, max_num_batched_tokens=64)
    harness.add(0, [1, 2])
    harness.add(1, [1] * 18)
    harness.add(2, [2] * 18, prompt_logprobs=1)
    harness.add(3, [3] * 18, pooling=PoolingParams(method="last"))
    harness.turn()
    harness.abort(0)
    harness.core.step()  # of rows 1, 2 and 3
    result = harness.worker.answer()
    assert result is not None and result.prompt_logprobs is not None
    if isinstance(value, int):
        rows = encode_ids([value] * num_ids(result.prompt_logprobs.rows))
        value = msgspec.structs.replace(result.prompt_logprobs, rows=rows)
    with pytest.raises(ProtocolError, match=what):
        harness.core.on_result(msgspec.structs.replace(result, **{field: value}))


@pytest.mark.parametrize("num_outputs", [0, 3])
def test_a_lone_request_fails_at_the_third_worker_group_that_it_crashes(num_outputs: int) -> None:
    harness = Harness()
    harness.add(0, [1, 2, 3], 20)
    harness.run_with_deadly_workers(lambda: harness.computes(0) and len(harness.tokens[0]) >= num_outputs)
    assert harness.finished[0].reason == "error" and harness.generation == CRASHES_TO_FAIL


def test_a_deadline_counts_the_time_that_a_request_has_waited_whatever_its_senders_clock_says() -> None:
    harness = Harness(max_num_seqs=1)
    core, now = harness.core, steady_time()
    for key, arrival_time in enumerate((now - 3600.0, now + 3600.0)):  # senders whose clocks were set
        harness.add(key, [1, 2, 3], 100, timeout_s=50.0, arrival_time=arrival_time, waited_s=20.0)
    core.expire(now + 29.0)
    assert core.num_requests == 2
    core.expire(now + 31.0)
    assert core.num_requests == 0


def test_progress_is_reported_at_intervals_under_load_and_at_once_for_a_pause_and_its_end() -> None:
    harness = Harness()
    harness.add(1, [1, 2, 3], max_tokens=50)
    core, now = harness.core, 1000.0
    assert core.progress(now) is not None and core.progress(now) is None
    for is_paused in (True, False):
        if is_paused:
            core.pause("keep")
        else:
            core.resume()
        progress = core.progress(now)
        assert progress is not None and progress.is_paused == is_paused
        assert core.progress(now) is None


def batches_of_steps(harness: Harness, num_steps: int) -> list[Batch]:
    batches = []
    for _ in range(num_steps):
        harness.core.step()
        entry = harness.core.scheduler.ledger.oldest
        assert entry is not None
        batches.append(entry.batch)
        result = harness.worker.answer()
        assert result is not None
        harness.core.on_result(result)
        harness.take()
    return batches


def test_decode_steps_share_a_batch_until_a_row_comes_or_goes() -> None:
    harness = Harness(steps_in_flight=1)
    harness.add(0, [1, 2, 3], 40)
    harness.add(1, [4, 5], 20)
    prompts, *decodes = batches_of_steps(harness, 12)  # over the ends of two blocks
    assert prompts is not decodes[0]
    assert set(decodes) == {decodes[0]}
    harness.add(2, [6], 40)
    *_, with_another = batches_of_steps(harness, 3)
    assert with_another is not decodes[0]
    harness.core.abort(0, [2])
    *_, without_it = batches_of_steps(harness, 2)
    assert without_it is not with_another
    harness.run()
    for key in (0, 1):
        harness.check(key)


def test_a_step_that_scores_a_prompt_shares_nothing_with_the_decodes_after_it() -> None:
    harness = Harness(steps_in_flight=1, max_num_seqs=1, max_num_batched_tokens=2)
    harness.add(0, [5, 6, 7], 8, prompt_logprobs=1)  # two tokens, and one
    assert [batch.scores_prompts for batch in batches_of_steps(harness, 4)] == [True, True, False, False]
