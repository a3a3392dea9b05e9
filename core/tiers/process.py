"""The tier process: python -m tokenloom.core.tiers.process --number N --replica R --host H --arena-fd F

Finds, loads and stores KV blocks for the core: on a disk, in a remote store and at other engines. A replica has one on
each of its hosts, for the parts of blocks that the host's ranks hold. It is a child of the supervisor, or of another
host's agent; `number` tells it from those that it replaces.
One loop receives orders and sends reports; everything that may block runs in threads. Knows slots, but no blocks of the
pool and no requests.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time

import msgspec
import zmq

from ...ipc.child import SupervisorChannel, run_child
from ...ipc.codec import decode_ids
from ...ipc.errors import Overloaded, ProtocolError, TokenloomError
from ...ipc.messages.supervisor import Initialize, Ready, Stop, TierListening
from ...ipc.messages.tier import (
    SOURCES,
    BlocksLoaded,
    BlocksStored,
    CancelLoad,
    ClearTier,
    CoreToTier,
    FindBlocks,
    FlushTier,
    LoadBlocks,
    OpenTier,
    PinnedBlocks,
    SourceState,
    StoreBlocks,
    TierCleared,
    TierFlushed,
    TierOpened,
    TierState,
    TierToCore,
)
from ...ipc.process.arena import Arena
from ...ipc.process.faults import maybe_fail
from ...ipc.shortages.failure import RETRY_S, failure_of
from ...ipc.shortages.threads import Threads, start_thread
from ...ipc.sockets.channel import Channel
from ...ipc.sockets.client_auth import GROUP, ZapHandler
from ...ipc.sockets.endpoints import tcp_address
from ...ipc.sockets.zmq_sockets import new_socket
from ...ipc.spec.config.engine_spec import EngineSpec, host_process_name
from ..kv.block_hash import KEY_BYTES
from .finder import Finder
from .lane import Lane, SlotItem
from .namespace import digest_weights, namespace_of_parts, new_namespace, read_secret
from .network.peer_server import PeerServer
from .pins import Pins
from .reports import LoadJob, Reports, StoreJob
from .source import Item, Namespace
from .sources import listen_address, new_sources

logger = logging.getLogger("tokenloom.tiers")

LOAD_LIMIT_S = 30.0  # time from an order to load to the start of its last read
MAX_QUEUED_BYTES = 256 << 20  # most bytes waiting to be written, but at most a quarter of the arena
STATE_INTERVAL_S = 1.0
FLUSH_S = 2.0  # time after Stop for queued writes; a little later the supervisor kills this process
DIGEST_NICENESS = 19


class TierProcess:
    """The tier process: its sockets, the arena and the sources. `run` serves until the supervisor sends Stop."""

    _arena: Arena  # set by Initialize

    def __init__(self, spec: EngineSpec, number: int, host: int, arena_fd: int) -> None:
        self._spec, self._number, self._host, self._arena_fd = spec, number, host, arena_fd
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.supervisor = SupervisorChannel(self._context, spec, spec.identity(host_process_name("tier", host), number))
        self._zap: ZapHandler | None = None  # for the core, if this is another host than the core's
        self._has_core = False  # whether the core has sent an order
        self._reports = Reports()
        self._pins = Pins(self._reports.put)
        self._peer_server: PeerServer | None = None
        self._loads: dict[int, LoadJob] = {}
        self._stores: set[int] = set()  # numbers of the jobs that have not ended
        self._flushes: dict[int, set[int]] = {}  # by serial: the jobs that must end first
        self._opening = threading.Lock()
        self._open_serial = 0  # that of the last OpenTier
        self._error = ""  # why the weights' digest is missing
        self._may_open_later = False  # whether that error is a shortage
        self._queue_lock = threading.Lock()
        self._queued_bytes = 0  # that the slots of blocks take that wait to be written
        self._sent: list[SourceState] = []
        self._state_due = 0.0  # when the next TierState may be sent

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        self._secret = read_secret(self._spec.config.kv_key_file)
        if not self._wait_for_initialize():
            return
        shape = self._arena.shape
        self._max_queued = min(shape.num_bytes // 4, MAX_QUEUED_BYTES)
        self._sources = new_sources(self._spec, self._reports)
        self._lanes = {number: Lane(source, 1 << number) for number, source in self._sources.items()}
        self._finder = Finder(self._sources, shape.slot_bytes, self._reports.put)
        if (address := listen_address(self._spec)) is not None:
            disk = self._sources.get(SOURCES.index("disk"))
            mode = int(self._spec.config.listen_mode, 8)
            self._peer_server = PeerServer(address, self._secret, self._pins, self._arena.slot, disk, mode)
        socket = self._listen()
        self._core: Channel[CoreToTier, TierToCore] = Channel(socket, CoreToTier, "core")
        self.supervisor.send(Ready())
        poller = zmq.Poller()
        for source in (self.supervisor.socket, socket, *([] if self._zap is None else [self._zap.socket])):
            poller.register(source, zmq.POLLIN)
        while not any(isinstance(message, Stop) for message in self.supervisor.receive()):
            if self._zap is not None:
                self._zap.answer()
            for order in self._core.receive():
                self._has_core = True
                self._obey(order)
            if self._has_core:  # sending before the core has connected would block, and its key could not be admitted
                poller.register(self._reports.wake_fd, zmq.POLLIN)
                self._send()
            poller.poll(self._patience_ms())
        deadline = time.monotonic() + FLUSH_S
        for lane in self._lanes.values():
            lane.finish_stores(deadline)

    def _wait_for_initialize(self) -> bool:
        """Wait for Initialize and map the arena with the shape in it; return False if Stop arrives instead.
        ProtocolError if Initialize has no arena."""
        while not isinstance(message := self.supervisor.wait(), Stop):
            if isinstance(message, Initialize):
                if message.arena is None:
                    raise ProtocolError("Initialize has no arena, but a tier process was started")
                shape = message.arena.share(len(self._spec.ranks_on(self._host)), len(self._spec.ranks))
                self._arena = Arena.sized(self._arena_fd, shape)
                return True
        return False

    def _listen(self) -> zmq.Socket[bytes]:
        """Return the socket for the core. If the core is on another host, report the address to the supervisor."""
        socket = new_socket(self._context, zmq.DEALER)
        if self._spec.is_on_head or self._spec.group_keys is None:
            socket.bind(self._spec.endpoints.tier_of(self._number))
            return socket
        self._zap = ZapHandler(self._context, self._spec.group_keys.client_public, GROUP)
        place = tcp_address(self._spec.host_address, "*")
        self.supervisor.send(TierListening(address=self._spec.group_keys.listen(socket, GROUP, place)))
        return socket

    def close(self) -> None:
        if self._peer_server is not None:
            self._peer_server.close()
        self._context.destroy(linger=200)

    # ── reports ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _patience_ms(self) -> int | None:
        """Return the longest time to poll, in ms; None: until a message or a report arrives."""
        if not self._has_core:
            return None
        now = time.monotonic()
        waits = [] if self._reports.due is None else [self._reports.due - now]
        if self._states() != self._sent:
            waits.append(self._state_due - now)
        return max(int(min(waits) * 1000) + 1, 0) if waits else None

    def _send(self) -> None:
        for message in self._reports.take():
            self._core.send(message)
            if isinstance(message, BlocksLoaded) and message.is_last:
                self._loads.pop(message.job, None)
            elif isinstance(message, BlocksStored) and message.is_last:
                self._stores.discard(message.job)
                for awaited in self._flushes.values():
                    awaited.discard(message.job)
        for serial in [serial for serial, awaited in self._flushes.items() if not awaited]:
            del self._flushes[serial]
            self._core.send(TierFlushed(serial=serial))
        now = time.monotonic()
        if now >= self._state_due and (states := self._states()) != self._sent:
            self._sent, self._state_due = states, now + STATE_INTERVAL_S
            self._core.send(TierState(sources=states))

    def _states(self) -> list[SourceState]:
        return [
            msgspec.structs.replace(
                (state := lane.source.state()), queued_bytes=lane.queued_bytes, error=self._error or state.error
            )
            for lane in self._lanes.values()
        ]

    # ── orders ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _obey(self, order: CoreToTier) -> None:
        maybe_fail("tier.receive")
        try:
            if isinstance(order, FindBlocks):
                self._finder.find(order)
            elif isinstance(order, LoadBlocks):
                self._load(order)
            elif isinstance(order, CancelLoad):
                if order.job in self._loads:
                    self._loads[order.job].is_cancelled = True
            elif isinstance(order, StoreBlocks):
                self._store(order)
            elif isinstance(order, PinnedBlocks):
                self._pins.take(order)
            elif isinstance(order, FlushTier):
                self._flushes[order.serial] = set(self._stores)
            elif isinstance(order, ClearTier):
                start_thread("clear", self._clear, order.serial)
            else:
                self._open_serial = order.serial
                start_thread("open", self._open, order)
        except ProtocolError as error:
            self._core.count_malformed(error)

    def _blocks(self, keys: bytes, slots: bytes, others: int, owners: bytes = b"") -> list[SlotItem]:
        """Return the slots and keys as pairs. ProtocolError unless there are as many keys as slots and `others`, all
        valid."""
        numbers = decode_ids(slots)
        if not len(keys) / KEY_BYTES == len(numbers) == others or (owners and len(owners) != 8 * others):
            raise ProtocolError(f"{len(keys)} bytes of keys, {len(numbers)} slots and {others} sources or targets")
        self._arena.shape.check(numbers)
        of_owners = memoryview(owners or bytes(8 * others)).cast("Q")
        return [
            SlotItem(number, Item(keys[i * KEY_BYTES : (i + 1) * KEY_BYTES], self._arena.slot(number), of_owners[i]))
            for i, number in enumerate(numbers)
        ]

    def _load(self, order: LoadBlocks) -> None:
        blocks = self._blocks(order.keys, order.slots, len(order.sources))
        job = LoadJob(order.job, len(blocks), self._reports, time.monotonic() + LOAD_LIMIT_S)
        self._loads[job.number] = job
        for number in sorted(set(order.sources)):
            chosen = [block for block, source in zip(blocks, order.sources, strict=True) if source == number]
            if number in self._lanes:
                self._lanes[number].load(job, chosen)
            else:
                for block in chosen:
                    job.end(block.slot, 0)

    def _store(self, order: StoreBlocks) -> None:
        blocks = self._blocks(order.keys, order.slots, len(order.targets), order.owners)
        job = StoreJob(order.job, len(blocks), self._reports, self._leave_queue)
        self._stores.add(job.number)
        taken: dict[int, list[SlotItem]] = {number: [] for number in self._lanes}
        for block, targets in zip(blocks, order.targets, strict=True):
            lanes = [number for number in self._lanes if targets & 1 << number]
            if not lanes or not self._enter_queue(block.slot):
                job.end(block.slot, 0)
                continue
            job.expect(block.slot, len(lanes))
            for number in lanes:
                taken[number].append(block)
        for number, some in taken.items():
            if some:
                self._lanes[number].store(job, some)

    def _enter_queue(self, slot: int) -> bool:
        """Count a slot that is to be written and return True; return False if the queue is full."""
        num_bytes = self._place_bytes(slot)
        with self._queue_lock:
            has_room = not self._queued_bytes or self._queued_bytes + num_bytes <= self._max_queued
            self._queued_bytes += num_bytes if has_room else 0
            return has_room

    def _leave_queue(self, slot: int) -> None:
        with self._queue_lock:
            self._queued_bytes -= self._place_bytes(slot)

    def _place_bytes(self, slot: int) -> int:
        """Return how many bytes of the arena a slot takes."""
        return self._arena.shape.stride(self._arena.shape.group_of(slot))

    def _open(self, order: OpenTier) -> None:
        """Compute the digest of the weights and open all sources, unless another OpenTier has arrived. If a resource
        has run out, try again later; after another failure the sources stay closed."""
        begun = time.monotonic()
        while (digest := self._namespace(order)) is None:
            if order.serial != self._open_serial or not self._may_open_later:
                return
            time.sleep(RETRY_S)
        with self._opening:
            if order.serial != self._open_serial:
                return
            self._error = ""
            of_parts = namespace_of_parts(digest, self._spec.ranks_on(self._host), len(self._spec.ranks))
            namespace = Namespace(of_parts, self._secret, self._arena.shape.slot_bytes)
            for source in self._sources.values():
                source.open(namespace)
            if self._peer_server is not None:
                self._peer_server.open(namespace)
        logger.info("KV tiers opened, namespace %s (%.2f s)", digest.hex()[:16], time.monotonic() - begun)
        self._reports.put(TierOpened(serial=order.serial, namespace=digest))

    def _namespace(self, order: OpenTier) -> bytes | None:
        """Return the namespace of the weights. If they cannot be read, set the error to show and return None."""
        try:
            with Threads(1, "digest", _yield_to_others) as background:
                folder = order.model_folder or self._spec.model_folder
                weights = background.submit(digest_weights, self._spec, folder).result()
            return new_namespace(weights, order.facts, self._secret)
        except (TokenloomError, OSError) as error:
            failure = failure_of(error, "the weights cannot be read")
            self._may_open_later = isinstance(failure, Overloaded)
            if self._error != str(failure):
                logger.error("the KV tiers stay closed%s: %s", " for now" * self._may_open_later, failure)
            self._error = str(failure)
            self._reports.touch()
            return None

    def _clear(self, serial: int) -> None:
        for lane in self._lanes.values():
            lane.drop_stores()
            lane.source.clear()
        self._reports.put(TierCleared(serial=serial))


def _yield_to_others() -> None:
    """Give this thread the lowest priority. Threads that it starts would inherit that."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), DIGEST_NICENESS)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tokenloom tier", description="Moves KV blocks; started by the supervisor.")
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--host", type=int, default=0)
    parser.add_argument("--arena-fd", type=int, required=True)
    given = parser.parse_args()
    return run_child(
        host_process_name("tier", given.host),
        lambda spec: TierProcess(spec, number=given.number, host=given.host, arena_fd=given.arena_fd),
        replica=given.replica,
    )


if __name__ == "__main__":
    sys.exit(main())
