"""Two engines' tier processes share blocks: through Redis, and straight from one's host memory."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tokenloom.core.kv.block_hash import block_keys
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.messages.tier import (
    BlocksFound,
    FindBlocks,
    FindGroup,
    LoadBlocks,
    PinBlocks,
    PinnedBlocks,
    UnpinSlots,
)
from tokenloom.tests.core.tiers.network.redis_server import RedisServer, needs_redis
from tokenloom.tests.core.tiers.slots import content_of, key_of
from tokenloom.tests.core.tiers.tier_bench import TierBench
from tokenloom.tests.support.waiting import wait_until

DISK, REMOTE, PEER = range(3)
STORE_REMOTELY = 2


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def start(stack: contextlib.ExitStack, folder: Path, **options: object) -> TierBench:
    folder.mkdir()
    bench = TierBench(folder, 64, None, **options)
    stack.callback(bench.close)
    bench.start()
    return bench


def key_file(folder: Path) -> str:
    path = folder / "secret"
    path.write_text("thirty-two characters of a secret")
    path.chmod(0o600)
    return str(path)


@needs_redis
def test_blocks_that_one_process_stores_in_redis_another_loads(stack: contextlib.ExitStack, tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    stack.callback(server.close)
    options = {"kv_remote": server.unix_url, "kv_key_file": key_file(tmp_path)}
    writer, reader = (start(stack, tmp_path / name, **options) for name in ("a", "b"))
    assert writer.open() == reader.open()
    slots = range(1, 16)
    writer.fill(slots, slots)
    writer.store(1, slots, slots, target=STORE_REMOTELY)
    assert writer.stored(1) == dict.fromkeys(slots, STORE_REMOTELY)
    reader.load(2, range(31, 47), range(1, 17), source=REMOTE)
    assert reader.loaded(2) == {**dict.fromkeys(range(31, 46), True), 46: False}
    assert all(reader.arena.slot(30 + number) == content_of(key_of(number)) for number in slots)
    assert b"thirty-two" not in (reader.log() + writer.log()).encode()


@pytest.mark.parametrize("has_secret", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_blocks_in_the_arena_of_one_process_are_loaded_by_another(
    stack: contextlib.ExitStack, tmp_path: Path, has_secret: bool
) -> None:
    options = {"kv_key_file": key_file(tmp_path)} if has_secret else {}
    giver = start(stack, tmp_path / "a", kv_listen=f"ipc://{tmp_path}/giver", **options)
    taker = start(stack, tmp_path / "b", kv_peers=f"ipc://{tmp_path}/giver", **options)
    namespace = giver.open()
    assert taker.open() == namespace
    tokens = np.arange(4 * 10, dtype=np.int32).tobytes()
    keys = list(block_keys(namespace, tokens, 4))
    for number, each in enumerate(keys[:6]):
        giver.arena.slot(10 + number)[:] = content_of(each)

    def answer_pin() -> None:
        """Answer as the giver's core, and see the slots given back."""
        question = giver.get(PinBlocks)
        asked = [question.keys[at : at + 32] for at in range(0, len(question.keys), 32)]
        slots = [10 + keys.index(key) if key in keys[:6] else -1 for key in asked]
        giver.say(PinnedBlocks(serial=question.serial, slots=encode_ids(slots)))
        assert list(decode_ids(giver.get(UnpinSlots).slots)) == [slot for slot in slots if slot >= 0]

    serials = itertools.count(1)

    def find() -> bytes:
        """Look the blocks up; a busy machine may miss the limit of a lookup."""
        serial = next(serials)
        groups = [FindGroup()]
        taker.say(FindBlocks(serial=serial, parent=namespace, token_ids=tokens, block_size=4, groups=groups))
        if giver.core.poll(1000):
            answer_pin()
        return taker.get(BlocksFound, lambda message: message.serial == serial).sources[0]

    wait_until(lambda: find() == bytes([PEER]) * 6)
    taker.say(LoadBlocks(job=2, keys=b"".join(keys), slots=encode_ids(range(1, 11)), sources=bytes([PEER]) * 10))
    answer_pin()
    assert taker.loaded(2) == {slot: slot <= 6 for slot in range(1, 11)}
    assert all(taker.arena.slot(number + 1) == content_of(keys[number]) for number in range(6))
