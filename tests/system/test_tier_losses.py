"""Blocks outlive the processes of an engine and the engine itself; damaged and foreign files give no wrong token."""

from __future__ import annotations

import os
import random
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


def damage(paths: list[Path]) -> list[Path]:
    """Flip bits, truncate, swap and replace blocks; return those that were damaged."""
    rng = random.Random(0)
    for path in paths[:4]:  # a flipped bit, in the header or the payload
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    for path in paths[4:6]:
        os.truncate(path, rng.randrange(path.stat().st_size))
    os.truncate(paths[6], 0)
    first, second = paths[7], paths[8]
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    paths[9].write_bytes(os.urandom(paths[9].stat().st_size))
    return paths[:10]


def test_an_engine_killed_as_a_whole_leaves_its_blocks_to_the_next_one(tmp_path: Path) -> None:
    """The next engine removes damaged blocks as it meets them and computes them again; foreign files do no harm."""
    kv = tmp_path / "kv"
    with TierEngine(tmp_path, kv, "--deterministic") as engine:
        engine.wait_open()
        with Client(engine.address) as client:
            calm = compute(engine, client, PROMPTS[:1])
            whole = set(objects(kv))
            for prompt in PROMPTS[1:]:  # its last block alone is not asked for: fetches.MIN_BLOCKS
                before = set(objects(kv))
                calm += compute(engine, client, [prompt])
                whole.add(max(set(objects(kv)) - before, key=lambda path: path.stat().st_mtime_ns))
        engine.kill_all()
    damaged = damage([path for path in objects(kv) if path not in whole][::5])
    contents = {path: path.read_bytes() for path in damaged}
    foreign = [kv / "notes.txt", damaged[0].with_name("0" * 64), damaged[0].with_name("x")]
    for path in foreign:
        path.write_bytes(b"not a block")
    readable = [num_readable(prompt) for prompt in PROMPTS]
    cached: list[list[int]] = []
    with TierEngine(tmp_path, kv, "--deterministic") as engine:
        engine.wait_open()
        with Client(engine.address) as client:
            while cached[-1:] != [readable]:
                assert len(cached) < 12, f"{cached} tokens of {readable} were cached:\n{engine.log()}"
                engine.teach(client)
                client.reset_prefix_cache()
                outputs = ask(client, PROMPTS)
                check_equal(calm, outputs)
                cached.append([output.num_cached_tokens for output in outputs])
        engine.end()
        assert "damaged blocks" in engine.log()
    assert cached[0][0] == readable[0], "whole blocks were not found"
    assert all(found < most for found, most in zip(cached[0][1:], readable[1:], strict=True)), (
        "damaged blocks were used"
    )
    assert all(path.read_bytes() != content for path, content in contents.items()), "damaged blocks are still there"
