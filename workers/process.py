"""The worker process: python -m tokenloom.workers.process --rank R --generation G

    hello → import torch → load → measured → (initialize) → ready → turns until Stop

The supervisor sends orders on the control socket; the core publishes one numbered stream of steps and receives results
and errors by PUSH. The loop blocks until a message or a finished step arrives, and computes in the same thread. On a
GPU another thread waits for the ends of steps. torch is imported late, so that the hello and the read-ahead of the
checkpoint do not wait for the import.

Exit codes: 0 after Stop, 2 for a configuration that cannot be served, 1 for a fault.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Never, TypeVar

import zmq

from ..ipc.child import EXIT_FAULT, SupervisorChannel, exit_code_of, run_child
from ..ipc.codec import encode
from ..ipc.errors import ProtocolError
from ..ipc.messages import supervisor as messages
from ..ipc.messages.adapter import SlotContent
from ..ipc.messages.base import MemoryTag, Rank
from ..ipc.messages.workers import (
    ControlAck,
    CoreToWorker,
    ProbeAck,
    Profile,
    ReloadWeights,
    Resend,
    SchedulerOutput,
    TokenMask,
    WorkerError,
    WorkerToCore,
)
from ..ipc.process.arena import Arena
from ..ipc.process.faults import maybe_fail
from ..ipc.sockets.channel import Channel
from ..ipc.sockets.keys import Keys
from ..ipc.sockets.zmq_sockets import new_socket
from ..ipc.spec.config.engine_spec import EngineSpec
from .device.completion_notifier import CompletionNotifier
from .machine.cpu_threads import num_cpu_threads, prepare_openmp
from .step_sequencer import StepSequencer, StreamAction
from .weights.readahead import start_readahead

if TYPE_CHECKING:
    from .features.adapters.adapter_loader import AdapterLoader
    from .machine.rendezvous import Rendezvous
    from .model_runner import ModelRunner
    from .worker import Worker

MessageT = TypeVar("MessageT")

logger = logging.getLogger("tokenloom.worker")

PROGRESS_INTERVAL_S = 2.0
IDLE_MS = 20  # time without a message after which memory is taken in advance
LINGER_MS = 1000  # the longest time for which a closing process waits until its last messages are sent


class StepFailedError(Exception):
    """Error of a step or an order of the core on this rank. The cause is chained."""

    def __init__(self, step: int, stage: str) -> None:
        super().__init__(f"step {step} failed at {stage}")
        self.step, self.stage = step, stage


class StoppedError(Exception):
    """Raised when Stop arrives during the start."""


def import_worker() -> type[Worker]:
    """Import torch and the Worker, and return it.

    The garbage collector pauses meanwhile, and never visits what was imported: torch's modules create so many objects
    that collections would take a sixth of the import, and they live as long as the process."""
    gc.disable()
    try:
        from .worker import Worker
    finally:
        gc.freeze()
        gc.enable()
    return Worker


class WorkerProcess:
    """Main loop of a worker. Owns the sockets and the order of messages; the Worker computes."""

    def __init__(
        self,
        spec: EngineSpec,
        rank: Rank,
        generation: int,
        model_folder: Path | None,
        asleep: list[MemoryTag],
        arena_fd: int | None = None,
    ) -> None:
        self._spec, self._arena_fd = spec, arena_fd
        self._model_folder, self._asleep = model_folder or Path(spec.model_folder), asleep
        self._rank, self._generation = rank, generation
        self._sends_results = rank == spec.ranks[0]
        self._sequencer = StepSequencer(generation)
        self._backlog: deque[CoreToWorker] = deque()  # messages of the core that are not handled yet
        self._is_stopping = False
        self._progress_time = 0.0  # time of the last progress message, in monotonic seconds
        self._notifier = CompletionNotifier()
        self._num_stale = 0
        self._adapters: AdapterLoader | None = None  # the worker's loader, if it serves adapters
        self._noted: dict[type, object] = {}  # the supervisor's messages for `_wait_for`, by type
        self._core = ("", "")  # addresses to which the sockets for steps and results are connected
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.supervisor = SupervisorChannel(self._context, spec, spec.identity(f"worker {rank}", generation))
        self._steps: Channel[CoreToWorker, Never] = Channel(
            new_socket(self._context, zmq.SUB), CoreToWorker, "core", self.supervisor.counts
        )
        self._results = new_socket(self._context, zmq.PUSH)
        for socket in (self._steps.socket, self._results):
            spec.secure_to_head(socket)
        self._poller = zmq.Poller()
        for source in (self.supervisor.socket, self._steps.socket, self._notifier.fd):
            self._poller.register(source, zmq.POLLIN)

    def run(self) -> int:
        """Start a worker, and serve steps until Stop or a fault; return the exit code."""
        try:
            worker = self._start()
        except StoppedError:
            worker = None
        except Exception as error:
            self.supervisor.report(error)
            logger.debug("cannot start", exc_info=True)  # the supervisor logs the reason in one line
            return exit_code_of(error)
        try:
            return 0 if worker is None else self._serve(worker)
        finally:
            self._log_dropped()

    def _log_dropped(self) -> None:
        """Log how many frames were dropped, if there were any."""
        num_malformed = self.supervisor.counts.total()
        if num_malformed or self._num_stale:
            logger.info("stops; dropped %d malformed and %d stale frames", num_malformed, self._num_stale)

    def close(self) -> None:
        """Close the sockets; wait for up to LINGER_MS until the last messages are sent."""
        self.supervisor.socket.close(LINGER_MS)
        self._results.close(LINGER_MS)
        self._steps.socket.close()
        self._context.term()

    # ── start ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self) -> Worker:
        """Load a worker, reporting its phases, and return it ready for steps. StoppedError if Stop arrives first."""
        if "weights" not in self._asleep:
            start_readahead(self._model_folder)
        start_time = time.monotonic()
        worker_type = import_worker()
        self.supervisor.send(messages.Phase(name="import torch", duration_s=time.monotonic() - start_time))
        worker = worker_type(self._spec, self._rank.tp, self._generation)
        if self._spec.group_keys is not None:
            worker.rendezvous = self._network_rendezvous(self._spec.group_keys)
        worker.on_progress, self._progress_time = self._on_progress, time.monotonic()
        for phase in worker.load(self._model_folder, self._asleep):
            self.supervisor.send(phase)
        start_time = time.monotonic()
        measured = worker.measure()
        duration_s = time.monotonic() - start_time
        self.supervisor.send(messages.Phase(name="measure memory", duration_s=duration_s, detail=measured.device))
        self.supervisor.send(measured)
        sizes = self._wait_for(messages.Initialize)
        start_time = time.monotonic()
        worker.initialize(sizes.pool, self._map_arena(sizes))
        self.supervisor.send(messages.Phase(name="allocate KV cache", duration_s=time.monotonic() - start_time))
        self._adapters = worker.adapters
        if self._adapters is not None:
            self._poller.register(self._adapters.fd, zmq.POLLIN)
        if self._spec.is_on_head:
            endpoints = self._spec.endpoints
            self._connect(endpoints.steps_of(self._generation), endpoints.results_of(self._generation))
        self.supervisor.send(messages.Ready())
        return worker

    def _on_progress(self, num_done: int, num_all: int) -> None:
        """Send the number of tensors read, at most once in PROGRESS_INTERVAL_S. The message also shows that this
        process is alive."""
        now = time.monotonic()
        if now - self._progress_time >= PROGRESS_INTERVAL_S:
            self._progress_time = now
            progress = messages.PhaseProgress(name="load weights", num_done=num_done, num_all=num_all, unit="tensors")
            self.supervisor.send(progress)

    def _network_rendezvous(self, keys: Keys) -> Rendezvous:
        from .machine.rendezvous import NetworkRendezvous

        def publish(address: str) -> None:
            self.supervisor.send(messages.Meeting(generation=self._generation, address=address))

        place, secret = self._spec.host_address, f"{keys.client_secret}-{self._generation}"
        return NetworkRendezvous(place, secret, publish, lambda: self._wait_for(messages.Meeting).address)

    def _wait_for(self, kind: type[MessageT]) -> MessageT:
        """Wait for a message of this type from the supervisor and return it. StoppedError if Stop arrives first."""
        while not isinstance(message := self._noted.get(kind), kind):
            self._take(self.supervisor.wait())
            if self._is_stopping:
                raise StoppedError
        return message

    def _take(self, message: messages.SupervisorToChild | None) -> None:
        """Handle a message of the supervisor: keep it for `_wait_for`, connect to a new core, or begin to stop."""
        if isinstance(message, messages.Stop):
            self._is_stopping = True
        elif isinstance(message, messages.Initialize):
            self._noted[messages.Initialize] = message
        elif not isinstance(message, (messages.Meeting, messages.Listening)) or message.generation != self._generation:
            return
        elif isinstance(message, messages.Meeting):
            self._noted[messages.Meeting] = message
        elif not self._spec.is_on_head:
            self._connect(message.steps, message.results)

    def _connect(self, steps: str, results: str) -> None:
        """Connect to a core's sockets for steps and results, and disconnect from those of an earlier core."""
        before, self._core = self._core, (steps, results)
        for socket, new, old in zip((self._steps.socket, self._results), self._core, before, strict=True):
            socket.connect(new)
            if old:
                socket.disconnect(old)

    def _map_arena(self, sizes: messages.Initialize) -> Arena | None:
        if sizes.arena is None:
            return None
        if self._arena_fd is None:
            raise ProtocolError("the supervisor has sized an arena that this worker has not inherited")
        num_local = len(self._spec.ranks_on(self._spec.host_of(self._rank)))
        return Arena.sized(self._arena_fd, sizes.arena.share(num_local, self._spec.config.tensor_parallel_size))

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _serve(self, worker: Worker) -> int:
        """Call `_turn` until a step fails, or until Stop has arrived and the backlog is empty; return the exit code."""
        try:
            while self._backlog or not self._is_stopping:
                self._turn(worker)
        except StepFailedError as failure:
            self._report(failure)
            return EXIT_FAULT  # the rows of this rank can no longer be trusted
        worker.close()
        return 0

    def _turn(self, worker: Worker) -> None:
        """Handle the core's next message, or wait for one; then send the results that are ready."""
        if self._backlog:
            self._handle(worker, self._backlog.popleft())
        else:
            self._take_pages(worker)
            if (message := self._receive()) is not None:
                self._backlog.append(message)
        self._send_results(worker)

    def _take_pages(self, worker: Worker) -> None:
        """Once this process has been idle for IDLE_MS, take pages of memory in advance until a message arrives."""
        supply, timeout_ms = worker.page_supply, IDLE_MS
        while supply is not None and not supply.is_done and not self._poller.poll(timeout_ms):
            supply.take_piece()
            timeout_ms = 0

    def _receive(self) -> CoreToWorker | None:
        """Block until a message or a filled adapter slot arrives or the device ends a step. Handle messages of the
        supervisor and filled slots; return the core's message, if any."""
        ready = dict(self._poller.poll())
        if self.supervisor.socket in ready:
            self._take(self.supervisor.receive_one())
        if self._notifier.fd in ready:
            self._notifier.clear()
        if self._adapters is not None and self._adapters.fd in ready:
            self._send_fills(self._adapters)
        return self._steps.receive_one() if self._steps.socket in ready else None

    def _handle(self, worker: Worker, message: CoreToWorker) -> None:
        action = self._sequencer.classify(message)
        if action is StreamAction.EXECUTE and isinstance(message, SchedulerOutput):
            self._execute(worker, message)
        elif action is StreamAction.EXECUTE and isinstance(message, ReloadWeights):
            self._reload(worker, message)
        elif action is StreamAction.EXECUTE and isinstance(message, Profile):
            maybe_fail("worker.profile", self._rank.tp)
            self._acknowledge(message, worker.recorder.switch(message.records))
        if action is StreamAction.RESET:
            worker.reset()
            worker.recorder.drop()
        if action in (StreamAction.RESET, StreamAction.ACKNOWLEDGE):
            self._acknowledge_probe(message.core_epoch)
        elif action is StreamAction.RESEND:
            next_step = self._sequencer.next_step
            self._send_to_core(Resend(rank=self._rank, generation=self._generation, from_step=next_step))
        elif action is StreamAction.STALE:
            self._num_stale += 1

    def _acknowledge_probe(self, core_epoch: int) -> None:
        slots = list[SlotContent]()
        if self._adapters is not None:
            self._send_fills(self._adapters)
            slots = self._adapters.contents
        place = {"core_epoch": core_epoch, "generation": self._generation}
        self._send_to_core(ProbeAck(rank=self._rank, slots=slots, **place))

    def _send_fills(self, adapters: AdapterLoader) -> None:
        for reply in adapters.take():
            self._send_to_core(reply)

    def _execute(self, worker: Worker, step: SchedulerOutput) -> None:
        """Start a step, perhaps while earlier steps still run on the device. StepFailedError if it fails."""
        runner = worker.runner
        assert runner is not None, "initialize comes before steps"
        try:
            copy = runner.start(step, lambda: self._wait_for_mask(step), lambda: self._finish_all(runner))
        except Exception as error:
            raise StepFailedError(step.step, runner.stage) from error
        if copy is not None:
            self._notifier.add(copy.wait)

    def _send_results(self, worker: Worker) -> None:
        """Finish the steps whose tokens are on the host; the group's first rank sends their results to the core.
        StepFailedError if one fails."""
        if (runner := worker.runner) is None:
            return
        try:
            while runner.is_next_done:
                self._finish_step(runner)
        except Exception as error:
            raise StepFailedError(runner.unfinished_step or 0, runner.stage) from error

    def _finish_all(self, runner: ModelRunner) -> None:
        while runner.unfinished_step is not None:
            self._finish_step(runner)

    def _finish_step(self, runner: ModelRunner) -> None:
        result = runner.finish()
        maybe_fail("worker.send", self._rank.tp)
        if self._sends_results:
            self._send_to_core(result)

    def _reload(self, worker: Worker, order: ReloadWeights) -> None:
        try:
            maybe_fail("worker.reload", self._rank.tp)
            worker.hold(order.holding)
        except Exception as error:
            raise StepFailedError(order.step, "reload") from error
        self._acknowledge(order)

    def _acknowledge(self, order: ReloadWeights | Profile, error: str = "") -> None:
        place = {"step": order.step, "core_epoch": order.core_epoch, "generation": self._generation}
        self._send_to_core(ControlAck(rank=self._rank, error=error, **place))

    def _report(self, failure: StepFailedError) -> None:
        """Log the cause of a failed step and send it to the core."""
        cause, step, stage = failure.__cause__, failure.step, failure.stage
        message = f"{type(cause).__name__}: {cause}"
        logger.error("step %d failed at %s: %s", step, stage, message, exc_info=cause)
        self._send_to_core(
            WorkerError(rank=self._rank, generation=self._generation, step=step, phase=stage, message=message)
        )

    def _wait_for_mask(self, step: SchedulerOutput) -> TokenMask | None:
        """Receive messages until the mask of `step` arrives, and return it; keep other messages in the backlog.

        None if the result is no longer needed, because the core was replaced or this process is stopping. The caller
        still completes the step, because other ranks wait for its tokens.
        """
        while not self._is_stopping:
            message = self._receive()
            if isinstance(message, TokenMask) and self._sequencer.is_mask_of(step, message):
                return message
            if message is None:
                continue
            self._backlog.append(message)
            if self._sequencer.has_replaced(step, message):
                return None
        return None

    def _send_to_core(self, message: WorkerToCore) -> None:
        self._results.send(encode(message))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tokenloom worker", description="One rank of an engine; started by it.")
    parser.add_argument("--rank", type=Rank.parse, required=True)
    parser.add_argument("--generation", type=int, required=True)
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--model-folder", type=Path, help="folder of the weights, if they were reloaded")
    parser.add_argument("--asleep", nargs="*", default=[], help="memory that stays empty until it is woken")
    parser.add_argument("--arena-fd", type=int, help="descriptor of the memory for blocks of KV tiers")
    given = parser.parse_args(arguments)

    def new_child(spec: EngineSpec) -> WorkerProcess:
        if spec.group_keys is not None:
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # c10d warns of hosts without DNS
        if spec.device == "cpu":
            prepare_openmp(num_cpu_threads(spec.config.num_threads, len(spec.local_workers(given.rank))))
        return WorkerProcess(spec, given.rank, given.generation, given.model_folder, given.asleep, given.arena_fd)

    return run_child(f"worker {given.rank}", new_child, replica=given.replica)


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)  # the interpreter's exit would wait for ranks of the group that may be gone
