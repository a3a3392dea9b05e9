"""TierLink: the core's sockets to the tier processes, of which each host has one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import zmq

from ...ipc.messages.supervisor import ArenaLost, Initialize, TierDown, TierUp
from ...ipc.messages.tier import CoreToTier, PinnedBlocks, TierToCore
from ...ipc.sockets.channel import Channel
from ...ipc.sockets.zmq_sockets import new_socket
from ...ipc.spec.config.engine_spec import EngineSpec
from ..features.tiers.offload import Offload
from ..features.tiers.options import Tiers, options_of
from ..kv.block_record import BlockRecord
from .tier_answers import TierAnswers


class TierLink:
    """Owner of the sockets, which connects to each new set of tier processes. Messages are dropped while there is none.
    `arena`: number of the current arena. An arena outlives workers and cores; a new one, with a higher number, replaces
    it after the loss of a host."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], spec: EngineSpec, arena: int) -> None:
        self._context, self._spec, self.arena = context, spec, arena
        self._channels: list[Channel[TierToCore, CoreToTier]] = []  # by host
        self._answers = TierAnswers(1, self.send)

    @property
    def wakers(self) -> list[zmq.Socket[bytes]]:
        """The sockets to poll."""
        return [channel.socket for channel in self._channels]

    def tiers(self, message: Initialize) -> Tiers | None:
        """Return the tiers, which are the places for blocks outside the pool; None if the engine has none."""
        if message.arena is None:
            return None
        record = BlockRecord(self._spec.own_file("slots"), message.arena.ids.all_blocks, self.arena)
        return Tiers(options_of(self._spec, message.arena, message.kernels), self.send, record)

    def go_on(self, offload: Offload | None, *, is_idle: bool) -> None:
        """Pass the replies of the tier processes to `offload`, if there is one, and let it do the work that is due."""
        if offload is not None:
            for message in self.receive():
                offload.on_message(message)
            offload.tick(is_idle=is_idle)

    def on_notice(self, message: TierUp | TierDown | ArenaLost, offload: Offload | None, model_folder: str) -> None:
        """Apply a notice of the supervisor. offload: None until the core has made it. model_folder: folder of the
        weights in use."""
        if isinstance(message, ArenaLost):
            if message.arena > self.arena and offload is not None:
                offload.lose_slots(message.arena)
            self.arena = max(self.arena, message.arena)
        elif isinstance(message, TierUp):
            self.connect(message.number, message.others)
            self.open(offload, model_folder)
        elif offload is not None:
            self.close()
            offload.on_tier_lost()

    def open(self, offload: Offload | None, model_folder: str) -> None:
        """Let `offload` use the tier processes, if there are any, for the weights in `model_folder`."""
        if offload is not None and self._channels:
            offload.open("" if model_folder == self._spec.model_folder else model_folder)

    def connect(self, number: int, others: Sequence[str] = ()) -> None:
        """Connect to tier process `number` of this host, if this host has ranks, and to the tier processes at the
        addresses `others` of other hosts."""
        self.close()
        here = [self._spec.endpoints.tier_of(number)] if 0 in self._spec.hosts else []
        for address in (*here, *others):
            socket = new_socket(self._context, zmq.DEALER)
            if address in others and self._spec.group_keys is not None:
                self._spec.group_keys.secure_client(socket)
            socket.connect(address)
            self._channels.append(Channel(socket, TierToCore, "tier process"))
        self._answers = TierAnswers(len(self._channels), self.send)

    def send(self, message: CoreToTier) -> None:
        if isinstance(message, PinnedBlocks) and self._channels:
            host, message = self._answers.place_of(message)
            self._channels[host].send(message)
            return
        self._answers.expect(message)
        for channel in self._channels:
            channel.send(message)

    def receive(self) -> Iterator[TierToCore]:
        """Yield the messages for the core: replies once all hosts have sent theirs, others at once."""
        for host, channel in enumerate(self._channels):
            for message in channel.receive():
                yield from self._answers.take(host, message)

    def close(self) -> None:
        """Close the connections and drop all messages in them."""
        for channel in self._channels:
            channel.socket.close(linger=0)
        self._channels = []
