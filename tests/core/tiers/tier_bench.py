"""The tier process's surroundings: its supervisor, its core and the arena, over real sockets."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import zmq

from tokenloom.ipc.codec import Decoder, decode_ids, encode, encode_ids
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.base import Hello
from tokenloom.ipc.messages.supervisor import ChildToSupervisor, Initialize, Ready
from tokenloom.ipc.messages.tier import (
    BlocksLoaded,
    BlocksStored,
    LoadBlocks,
    OpenTier,
    StoreBlocks,
    TierOpened,
    TierState,
    TierToCore,
)
from tokenloom.ipc.process.arena import Arena, ArenaShape, new_arena
from tokenloom.ipc.sockets.zmq_sockets import new_socket
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.core.tiers.slots import SLOT_BYTES, content_of, key_of
from tokenloom.tests.support.engine_specs import in_folder, new_spec
from tokenloom.tests.support.waiting import Deadline

DEADLINE_S = 20.0
MessageT = TypeVar("MessageT")


class TierBench:
    """Starts a tier process with a disk below `folder` and an arena of `num_slots`, or of another shape, and talks to
    it."""

    def __init__(self, folder: Path, num_slots: int = 64, shape: ArenaShape | None = None, **options: object) -> None:
        self.folder, self.root = folder, folder / "disk"
        config = EngineConfig(**{"kv_disk": str(self.root), "load_format": "dummy", **options})  # type: ignore[arg-type]
        self.spec = in_folder(new_spec(config=config), folder)
        self.shape = shape or ArenaShape(num_slots, (1,), (SLOT_BYTES,))
        self.arena_fd = new_arena()
        Arena.resize(self.arena_fd, self.shape)
        self.arena = Arena(self.arena_fd, self.shape)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.control = new_socket(self.context, zmq.ROUTER)
        self.control.bind(self.spec.endpoints.control)
        self.core = new_socket(self.context, zmq.DEALER)
        self.core.connect(self.spec.endpoints.tier_of(3))
        self.seen: list[TierToCore] = []
        read_fd, self.lifeline = os.pipe()
        log = (folder / "log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tokenloom.core.tiers.process", "--number", "3", "--arena-fd", str(self.arena_fd)],
            stdin=read_fd,
            stderr=log,
            pass_fds=[self.arena_fd],
            env={**self.spec.environment(), "XDG_CACHE_HOME": str(folder)},
            cwd="/",
        )
        log.close()
        os.close(read_fd)

    # ── supervisor ───────────────────────────────────────────────────────────────────────────────────────────────

    def hear(self, wanted: type[MessageT]) -> MessageT:
        """Return the next message of this type to the supervisor."""
        deadline = Deadline(DEADLINE_S)
        while not deadline.has_passed():
            if self.control.poll(int(deadline.left_s() * 1000)):
                message = Decoder[ChildToSupervisor](ChildToSupervisor).decode(self.control.recv_multipart()[1])
                if isinstance(message, wanted):
                    return message
        raise AssertionError(f"no {wanted.__name__}: {self.log()}")

    def order(self, message: object) -> None:
        self.control.send_multipart([b"tier-3", encode(message)])

    def start(self) -> None:
        self.hear(Hello)
        self.order(Initialize(pool=PoolShape(64, 1, (1,)), arena=self.shape))
        self.hear(Ready)

    def log(self) -> str:
        return (self.folder / "log").read_text()

    # ── core ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def say(self, message: object) -> None:
        self.core.send(encode(message))

    def get(self, wanted: type[MessageT], fits: Callable[[MessageT], bool] = lambda _: True) -> MessageT:
        """Return the first message to the core, of those that no other call returned, that is wanted."""
        deadline = Deadline(DEADLINE_S)
        while True:
            for index, message in enumerate(self.seen):
                if isinstance(message, wanted) and fits(message):
                    del self.seen[index]
                    return message
            if self.core.poll(int(deadline.left_s() * 1000)):
                self.seen.append(Decoder[TierToCore](TierToCore).decode(self.core.recv()))
            elif deadline.has_passed():
                raise AssertionError(f"no {wanted.__name__}, but {self.seen}: {self.log()}")

    def open(self, serial: int = 1, facts: bytes = b"{}") -> bytes:
        """Open the tiers and wait until the disk was scanned; return the namespace."""
        self.say(OpenTier(serial=serial, model_folder="/nonexistent", facts=facts))
        namespace = self.get(TierOpened, lambda message: message.serial == serial).namespace
        self.get(TierState, lambda message: message.sources[0].is_open)
        return namespace

    def fill(self, slots: Sequence[int], numbers: Sequence[int]) -> None:
        for slot, number in zip(slots, numbers, strict=True):
            self.arena.slot(slot)[:] = content_of(key_of(number))

    def store(self, job: int, slots: Sequence[int], numbers: Sequence[int], owner: int = 0, target: int = 1) -> None:
        self.say(
            StoreBlocks(
                job=job,
                keys=b"".join(map(key_of, numbers)),
                slots=encode_ids(slots),
                targets=bytes([target] * len(slots)),
                owners=array("Q", [owner] * len(slots)).tobytes(),
            )
        )

    def put(self, job: int, slots: Sequence[int]) -> None:
        """Fill slots with the blocks of their numbers, and store them."""
        self.fill(slots, slots)
        self.store(job, slots, slots)

    def stored(self, job: int) -> dict[int, int]:
        """Wait for the end of a job; return where each slot's block now is."""
        found: dict[int, int] = {}
        while True:
            message = self.get(BlocksStored, lambda message: message.job == job)
            slots = decode_ids(message.slots)
            assert not found.keys() & set(slots) and len(slots) == len(message.targets)
            found |= zip(slots, message.targets, strict=True)
            if message.is_last:
                return found

    def load(self, job: int, slots: Sequence[int], numbers: Sequence[int], source: int = 0) -> None:
        self.say(
            LoadBlocks(
                job=job,
                keys=b"".join(map(key_of, numbers)),
                slots=encode_ids(slots),
                sources=bytes([source] * len(slots)),
            )
        )

    def loaded(self, job: int) -> dict[int, bool]:
        """Wait for the end of a job; return whether each slot is good."""
        found: dict[int, bool] = {}
        while True:
            message = self.get(BlocksLoaded, lambda message: message.job == job)
            for slots, is_good in ((message.slots, True), (message.bad_slots, False)):
                for slot in decode_ids(slots):
                    assert slot not in found, "reported twice"
                    found[slot] = is_good
            if message.is_last:
                return found

    def close(self) -> None:
        os.close(self.lifeline)
        self.process.wait(DEADLINE_S)
        self.context.destroy(linger=0)
        self.arena.close()
        os.close(self.arena_fd)
