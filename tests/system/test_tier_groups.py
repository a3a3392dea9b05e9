"""Models with windows and states keep their blocks in slots and on a disk: what comes back has the bits of a cold
engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tokenloom import Client, RequestOutput
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.recurrent_families import recurrent_checkpoint
from tokenloom.tests.support.today import some
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.loss_turns import turn_of
from tokenloom.tests.system.tier_engine import (
    BLOCK_SIZE,
    DEADLINE_S,
    GREEDY,
    TierEngine,
    ask,
    check_equal,
    new_prompts,
    num_loaded,
    num_readable,
    objects,
    opened,
)

pytestmark = turn_of("groups in tiers")

WINDOW = 64  # tokens: four blocks, less than a chunk and than a prompt
LENGTH, ANSWER = 488, 41
PARAMS = GREEDY.replace(max_tokens=ANSWER)
FLAGS = ("--deterministic", "--max-num-batched-tokens", "128")
NUM_IDS = 256
STEMS = [[token % NUM_IDS for token in prompt] for prompt in new_prompts(3, LENGTH, seed=7)]
MORE = [[token % NUM_IDS for token in prompt] for prompt in new_prompts(3, 30, seed=8)]


@pytest.fixture(scope="module", params=some(["windows", "states"], 1))
def flags(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("model") / "m"
    if request.param == "states":
        recurrent_checkpoint(folder, "qwen3_5", max_position_embeddings=2048)
    else:
        tiny_checkpoint(folder, "gemma3_text", sliding_window=WINDOW, max_position_embeddings=2048)
    # With drafts, the last step of an answer may leave no state at its end.
    return ["--model", str(folder), "--speculation", "off", *FLAGS]


class Calm(list[RequestOutput]):
    """The answers of an engine without tiers to all stems and to the turns after them, each of an empty cache.
    `turns`: the prompts of these."""

    turns: list[list[int]]


@pytest.fixture(scope="module")
def calm(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Calm:
    found = Calm()
    with opened(tmp_path_factory.mktemp("calm"), None, *flags, "--no-enable-prefix-caching") as (_, client):
        found += ask(client, STEMS, PARAMS)
        said = [list(output.outputs[0].token_ids) for output in found]
        found.turns = [[*stem, *answer, *more] for stem, answer, more in zip(STEMS, said, MORE, strict=True)]
        found += ask(client, found.turns, PARAMS)
    return found


def wait_settled(kv: Path) -> None:
    """Wait until no object is added to the disk any more."""
    counts = [-1]

    def is_settled() -> bool:
        counts.append(len(objects(kv)))
        time.sleep(0.5)
        return counts[-1] == counts[-2] > 0

    wait_until(is_settled, "the disk is settled", DEADLINE_S)


def test_after_a_kill_of_everything_the_next_turn_goes_on_where_the_answer_ended(
    flags: list[str], calm: Calm, tmp_path: Path
) -> None:
    kv = tmp_path / "kv"
    with TierEngine(tmp_path, kv, *flags) as engine:
        engine.wait_open()
        with Client(engine.address) as client:
            outputs = ask(client, STEMS, PARAMS)
        wait_settled(kv)
        engine.kill_all()
    check_equal(calm[: len(STEMS)], outputs)
    ends = (LENGTH + ANSWER - 1) // BLOCK_SIZE
    with opened(tmp_path, kv, *flags) as (engine, client):
        for turn in calm.turns:
            found = wait_until(partial(client.prefetch_kv, turn), "no block is found", DEADLINE_S)
            assert found == ends * BLOCK_SIZE > num_readable(STEMS[0])
        outputs = ask(client, calm.turns, PARAMS)
        assert num_loaded(outputs, "disk") == len(STEMS) * ends * BLOCK_SIZE
    check_equal(calm[len(STEMS) :], outputs)


@pytest.fixture(scope="module")
def host(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TierEngine, Client]]:
    """An engine whose pool holds little more than one prompt, and whose slots hold all."""
    root = tmp_path_factory.mktemp("host")
    options = ["--num-kv-blocks", "40", "--kv-host-bytes", "64M", "--kv-disk-bytes", "1G"]
    with opened(root, root / "kv", *flags, *options) as (engine, client):
        yield engine, client


@pytest.mark.parametrize("role", some(["", "core", "worker 0", "tier"], 2))
def test_turns_come_back_from_slots_whatever_is_killed(host: tuple[TierEngine, Client], calm: Calm, role: str) -> None:
    engine, client = host
    outputs = ask(client, STEMS, PARAMS)
    check_equal(calm[: len(STEMS)], outputs)
    if role:
        killed = engine.child(role)
        killed.kill()
        wait_until(
            lambda: (new := engine.find(role)) is not None and new.pid != killed.pid, "it is replaced", DEADLINE_S
        )
    outputs = ask(client, calm.turns, PARAMS)
    check_equal(calm[len(STEMS) :], outputs)
    assert num_loaded(outputs, "host") > 0, "the pool holds one prompt, the slots all"
    if role != "worker 0":  # it takes the blocks of the pool with it
        assert min(output.num_cached_tokens for output in outputs) >= num_readable(STEMS[0])
    client.clear_kv_cache()
