"""WorkerGroup: the core's sockets to the workers: a broadcast of numbered steps, and a queue of their results.

A PUB socket drops messages sent before a SUB has joined, so no step is sent until every rank has replied to a probe.
Steps are kept until their results arrive, and sent again if a worker asks for them. Knows no requests.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Never

import zmq

from ...ipc.codec import encode
from ...ipc.errors import EngineDead
from ...ipc.messages.adapter import SlotContent
from ...ipc.messages.base import Holding, Rank
from ...ipc.messages.supervisor import Listening
from ...ipc.messages.workers import (
    ControlAck,
    ModelRunnerOutput,
    Probe,
    ProbeAck,
    Profile,
    ReloadWeights,
    Resend,
    SchedulerOutput,
    SlotFilled,
    TokenMask,
    WorkerError,
    WorkerToCore,
)
from ...ipc.process.awake_clock import AwakeClock
from ...ipc.sockets.channel import Channel
from ...ipc.sockets.client_auth import GROUP
from ...ipc.sockets.endpoints import tcp_address
from ...ipc.sockets.zmq_sockets import new_socket
from ...ipc.spec.config.engine_spec import EngineSpec

logger = logging.getLogger("tokenloom.core")

PROBE_INTERVAL_S = 0.02  # time between two probes
MAX_UNANSWERED = 16  # most messages kept for resending; more are never in flight


class WorkerGroup:
    """Sockets to the workers of all ranks of one generation, bound when this is made, so that workers may connect at
    any time."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        spec: EngineSpec,
        core_epoch: int,
        generation: int,
        clock: AwakeClock,
    ) -> None:
        self._ranks = spec.ranks
        self.generation = generation
        self._core_epoch = core_epoch
        self._clock = clock
        self._publisher = new_socket(context, zmq.PUB)
        self._publisher.bind(spec.endpoints.steps_of(generation))
        self.results = new_socket(context, zmq.PULL)
        self.results.bind(spec.endpoints.results_of(generation))
        self.listening: Listening | None = None  # addresses for ranks on other hosts; None: there are no other hosts
        if (keys := spec.group_keys) is not None:
            place = tcp_address(spec.host_address, "*")
            steps, results = (keys.listen(socket, GROUP, place) for socket in (self._publisher, self.results))
            self.listening = Listening(generation=generation, steps=steps, results=results)
        self._channel: Channel[WorkerToCore, Never] = Channel(self.results, WorkerToCore, "workers")
        self._unanswered: deque[tuple[int, bytes]] = deque(maxlen=MAX_UNANSWERED)
        self._order_timeout_s = spec.config.start_timeout_s
        self._slots_by_rank: dict[Rank, list[SlotContent]] = {}  # filled adapter slots, from replies to probes
        self._probed_at = self._probe_overdue_at = self._probe_timeout_s = 0.0  # times on `clock`, and a duration
        self.order: ReloadWeights | Profile | None = None  # the order that ranks are carrying out
        self._unacknowledged: set[Rank] = set()  # ranks that have not finished the order
        self.order_error = ""  # why a rank could not carry out the last order; it continues to run
        self.order_overdue_at: float | None = None  # time on `clock`: then the workers count as hung

    def begin_probe(self, timeout_s: float) -> None:
        """Start the wait for the ranks' replies to probes, of at most `timeout_s`, before calls of `go_on_probing`."""
        self._probe_timeout_s = timeout_s
        self._probe_overdue_at = self._clock.look() + timeout_s

    def go_on_probing(self) -> bool:
        """Read replies, and send another probe if the last one is PROBE_INTERVAL_S old. Return whether every rank has
        replied. EngineDead, with the silent ranks, once the time of `begin_probe` is over."""
        for message in self._receive():
            if isinstance(message, ProbeAck):
                self._slots_by_rank[message.rank] = message.slots
        silent = set(self._ranks).difference(self._slots_by_rank)
        now = self._clock.look()
        if silent and now > self._probe_overdue_at:
            ranks = " and ".join(f"worker {rank}" for rank in sorted(silent))
            raise EngineDead(f"{ranks} did not answer the core's probe within {self._probe_timeout_s:g} s")
        if silent and now >= self._probed_at + PROBE_INTERVAL_S:
            self._probed_at = now
            self._publisher.send(encode(Probe(core_epoch=self._core_epoch, generation=self.generation)))
        return not silent

    @property
    def slots(self) -> list[SlotContent]:
        """The filled adapter slots that all ranks had in common when they were probed."""
        first, *others = self._slots_by_rank.values()
        return [content for content in first if all(content in slots for slots in others)]

    def send(self, message: SchedulerOutput | TokenMask) -> None:
        frame = encode(message)
        self._unanswered.append((message.step, frame))
        self._publisher.send(frame)

    def reload(self, step: int, holding: Holding) -> None:
        """Send ReloadWeights in place of step number `step`. `take_done` returns the message once every rank is
        done."""
        self._give(ReloadWeights(step=step, core_epoch=self._core_epoch, generation=self.generation, holding=holding))

    def profile(self, step: int, records: bool) -> None:
        """Send Profile in place of step number `step`: `records` starts a profile, otherwise it ends."""
        self._give(Profile(step=step, core_epoch=self._core_epoch, generation=self.generation, records=records))

    def _give(self, order: ReloadWeights | Profile) -> None:
        self.order, self._unacknowledged, self.order_error = order, set(self._ranks), ""
        self.order_overdue_at = self._clock.now + self._order_timeout_s
        frame = encode(order)
        self._unanswered.append((order.step, frame))
        self._publisher.send(frame)

    def take_done(self) -> ReloadWeights | Profile | None:
        """Return the current reload or profile, once, after every rank has acknowledged it; else None."""
        if self.order is None or self._unacknowledged:
            return None
        order, self.order, self.order_overdue_at = self.order, None, None
        self._unanswered.clear()
        return order

    def receive(self) -> Iterator[ModelRunnerOutput | SlotFilled]:
        """Yield all received results and filled slots, record acknowledgements, and repeat messages that a worker has
        missed. EngineDead for a WorkerError, or if a missed message is no longer kept."""
        for message in self._receive():
            if isinstance(message, ModelRunnerOutput):
                while self._unanswered and self._unanswered[0][0] <= message.step:
                    self._unanswered.popleft()
                yield message
            elif isinstance(message, SlotFilled):
                yield message
            elif isinstance(message, ControlAck):
                self._unacknowledged.discard(message.rank)
                if message.error:
                    self.order_error = f"worker {message.rank}: {message.error}"
            elif isinstance(message, Resend):
                self._resend(message)
            elif isinstance(message, WorkerError):
                raise EngineDead(
                    f"worker {message.rank} failed in step {message.step} ({message.phase}): {message.message}"
                )

    def _receive(self) -> Iterator[WorkerToCore]:
        return (message for message in self._channel.receive() if not self._is_stale(message))

    def _is_stale(self, message: WorkerToCore) -> bool:
        if message.generation != self.generation:
            return True
        return not isinstance(message, (Resend, WorkerError)) and message.core_epoch != self._core_epoch

    def _resend(self, request: Resend) -> None:
        frames = [frame for step, frame in self._unanswered if step >= request.from_step]
        if self._unanswered and self._unanswered[0][0] > request.from_step:
            raise EngineDead(f"worker {request.rank} missed step {request.from_step}, which is no longer kept")
        logger.warning("worker %s missed step %d: sending %d again", request.rank, request.from_step, len(frames))
        for frame in frames:
            self._publisher.send(frame)

    def close(self) -> None:
        self._publisher.close()
        self.results.close()
