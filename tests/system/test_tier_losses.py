"""Blocks outlive the processes of an engine and the engine itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom import Client
from tokenloom.tests.support.today import at_night
from tokenloom.tests.system.launched import lost, reconnecting
from tokenloom.tests.system.tier_engine import (
    TierEngine,
    ask,
    check_equal,
    compute,
    new_prompts,
    num_readable,
    objects,
    opened,
)

PROMPTS = new_prompts(3, 500, seed=11)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierEngine]:
    root = tmp_path_factory.mktemp("losses")
    with TierEngine(root, root / "kv", "--deterministic") as engine:
        engine.wait_open()
        yield engine
        engine.end()


@pytest.mark.parametrize("role", ["core", *at_night("worker 0", "frontend", "tier")])
def test_blocks_on_the_disk_outlive_every_process(engine: TierEngine, role: str) -> None:
    prompts, is_opened_again = new_prompts(1, 500, seed=sum(role.encode())), role in ("core", "tier")
    with reconnecting(engine) as client:
        held = engine.slot_keys()
        calm = compute(engine, client, prompts)
        engine.wait_slots_released(held)
        num_opened = engine.log().count("blocks of this model")
        with lost(engine, role):
            pass
        if is_opened_again:
            engine.wait_log("blocks of this model", num_opened + 1)
        engine.teach(client)
        client.reset_prefix_cache()
        outputs = ask(client, prompts)
    assert outputs[0].metrics.num_loaded_tokens == {"disk": num_readable(prompts[0])}
    check_equal(calm, outputs)


def test_an_engine_killed_as_a_whole_leaves_its_blocks_to_the_next_one(tmp_path: Path) -> None:
    """Foreign files in its folder do no harm."""
    kv = tmp_path / "kv"
    with TierEngine(tmp_path, kv, "--deterministic") as engine:
        engine.wait_open()
        with Client(engine.address) as client:
            calm = compute(engine, client, PROMPTS)
        engine.kill_all()
    for path in (kv / "notes.txt", objects(kv)[0].with_name("0" * 64), objects(kv)[0].with_name("x")):
        path.write_bytes(b"not a block")
    with opened(tmp_path, kv, "--deterministic") as (engine, client):
        engine.teach(client)
        outputs = ask(client, PROMPTS)
    assert [each.metrics.num_loaded_tokens for each in outputs] == [{"disk": num_readable(PROMPTS[0])}] * len(PROMPTS)
    check_equal(calm, outputs)
