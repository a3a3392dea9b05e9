"""Blocks that come back from slots or from a disk give the tokens, and with --deterministic the bits, of computed ones.

Each test checks that blocks came back: after `reset_prefix_cache` the pool is empty, so that cached tokens are from a
tier.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom import Client, PoolingParams, RequestOutput
from tokenloom.ipc.messages.metrics import Counter, Histogram
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.tier_engine import (
    BLOCK_SIZE,
    DEADLINE_S,
    GREEDY,
    TierEngine,
    ask,
    check_equal,
    compute,
    new_prompts,
    num_readable,
    objects,
    opened,
)

SLOT_BYTES = 32 << 10  # of the demo model in fp32
NUM_SLOTS = 24
LENGTH = 488  # more blocks than slots
PROMPTS = new_prompts(4, LENGTH, seed=1)
LAST = PoolingParams(method="last")
SAMPLED = GREEDY.replace(temperature=1.0, seed=3, n=3)


# ── a disk, through an arena that is smaller than a prompt, in chunks ────────────────────────────────────────────────


class Disk:
    """An engine whose disk has blocks of all PROMPTS, and the answers that were computed."""

    def __init__(self, engine: TierEngine, client: Client) -> None:
        self.engine, self.client = engine, client
        self.greedy = compute(engine, client, PROMPTS[:1])
        self.sampled = compute(engine, client, PROMPTS[1:2], SAMPLED)
        self.salted = compute(engine, client, PROMPTS[2:3], GREEDY.replace(cache_salt="a"))
        assert engine.kv is not None
        num_written = len(objects(engine.kv))
        (self.embedding,) = client.embed([PROMPTS[3]], LAST, use_tqdm=False)
        engine.wait_written(num_written + LENGTH // BLOCK_SIZE)
        engine.teach(client)

    def ask(self, prompt: list[int], params: object = GREEDY) -> RequestOutput:
        """Ask with an empty pool."""
        self.client.reset_prefix_cache()
        return ask(self.client, [prompt], params)[0]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    root = tmp_path_factory.mktemp("disk")
    options = ["--kv-host-bytes", str(NUM_SLOTS * SLOT_BYTES), "--max-num-batched-tokens", "128", "--deterministic"]
    with opened(root, root / "kv", *options) as (engine, client):
        yield Disk(engine, client)


def test_a_prompt_larger_than_the_arena_comes_back_from_the_disk(disk: Disk) -> None:
    output = disk.ask(PROMPTS[0])
    assert output.num_cached_tokens == num_readable(PROMPTS[0]) > BLOCK_SIZE * NUM_SLOTS
    from_disk = output.metrics.num_loaded_tokens["disk"]  # the others are in slots, since they were computed
    assert from_disk >= num_readable(PROMPTS[0]) - BLOCK_SIZE * NUM_SLOTS
    check_equal(disk.greedy, [output])


def test_a_prompt_takes_the_blocks_that_it_shares_and_computes_the_others(disk: Disk) -> None:
    seeds = itertools.count(2)

    def num_loaded() -> int:
        prompt = PROMPTS[0][:330] + new_prompts(1, 150, seed=next(seeds))[0]
        computed = disk.ask(prompt, GREEDY.replace(cache_salt="computed"))
        output = disk.ask(prompt)
        check_equal([computed], [output])
        assert computed.num_cached_tokens == 0
        return output.num_cached_tokens

    assert wait_until(num_loaded) == 320  # a disk that a busy machine makes slow is not asked each time


def test_several_answers_to_a_prompt_continue_the_loaded_blocks(disk: Disk) -> None:
    output = disk.ask(PROMPTS[1], SAMPLED)
    assert output.num_cached_tokens == num_readable(PROMPTS[1])
    check_equal(disk.sampled, [output])
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3


def test_an_embedding_by_the_last_token_equals_the_computed_one(disk: Disk) -> None:
    disk.client.reset_prefix_cache()
    (output,) = disk.client.embed([PROMPTS[3]], LAST, use_tqdm=False)
    assert disk.embedding.num_cached_tokens == 0 and output.num_cached_tokens == num_readable(PROMPTS[3])
    assert list(output.outputs.embedding) == list(disk.embedding.outputs.embedding)


def test_logprobs_of_a_prompt_are_computed_though_its_blocks_are_on_the_disk(disk: Disk) -> None:
    output = disk.ask(PROMPTS[0], GREEDY.replace(prompt_logprobs=1))
    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == LENGTH
    check_equal(disk.greedy, [output])


# ── slots ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """An engine whose pool holds two prompts at most; evicted blocks go to slots."""
    options = ["--num-kv-blocks", "73", "--max-model-len", "640", "--kv-host-bytes", "64M", "--deterministic"]
    options += ["--speculation", "off"]  # wrong guesses count as computed
    with opened(tmp_path_factory.mktemp("slots"), None, *options) as (_, client):
        yield client


def test_evicted_blocks_come_back_from_slots(slots: Client) -> None:
    prompts = new_prompts(6, 400, seed=4)
    computed = ask(slots, prompts)
    slots.reset_prefix_cache()
    outputs = ask(slots, prompts)
    assert all(output.num_cached_tokens == 0 for output in computed)
    assert [output.metrics.num_loaded_tokens for output in outputs[:2]] == [{"host": num_readable(prompts[0])}] * 2
    check_equal(computed, outputs)


def num_computed(client: Client) -> int:
    """Return the number of tokens computed so far, once the core has reported all that it has answered."""

    def find() -> int:
        is_idle = not client.health().num_running
        metrics = {each.name.removeprefix("tokenloom_"): each for each in client.get_metrics()}
        prompts, answers = metrics["prompt_tokens_total"], metrics["generation_tokens_total"]
        reported, computed = metrics["iteration_tokens"], metrics["scheduled_tokens_total"]
        assert isinstance(prompts, Counter) and isinstance(answers, Counter) and isinstance(computed, Counter)
        assert isinstance(reported, Histogram)
        return computed.value if is_idle and reported.sum >= prompts.value + answers.value else 0

    return wait_until(find, "all answers are reported", DEADLINE_S)


def test_preempted_requests_get_their_tokens_back_from_slots(slots: Client) -> None:
    """At most 5 percent of the tokens that preemptions took are computed again."""
    prompts, params = new_prompts(4, 500, seed=5), GREEDY.replace(max_tokens=100)
    computed = ask(slots, prompts, params)
    salted = params.replace(cache_salt="together")
    before = num_computed(slots)
    outputs = slots.generate(prompts, salted, use_tqdm=False)
    num_needed = sum(len(prompt) + params.max_tokens - 1 for prompt in prompts)
    num_again = num_computed(slots) - before - num_needed
    num_preempted = slots.health().num_recomputed_tokens
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert 0 <= num_again <= 0.05 * num_preempted
    check_equal(computed, outputs)


def test_a_folder_in_use_costs_one_line_and_no_request(disk: Disk, tmp_path: Path) -> None:
    with TierEngine(tmp_path, disk.engine.kv) as loser:
        loser.wait_ready()
        loser.wait_log("another engine uses this folder")
        with Client(loser.address) as client:
            outputs = ask(client, PROMPTS[:1])
            client.reset_prefix_cache()
            loaded = ask(client, PROMPTS[:1])[0].metrics.num_loaded_tokens
            assert "disk" not in loaded  # blocks may still be in the slots that were to be written
        loser.end()
        assert loser.log().count("another engine uses") == 1
    check_equal(disk.greedy, outputs, tolerance=1e-4)
    check_equal(disk.greedy, [disk.ask(PROMPTS[0])])
