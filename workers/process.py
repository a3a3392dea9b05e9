"""The worker process: python -m tokenloom.workers.process --spec JSON --rank R --generation G

    hello → import torch → load → measured → (initialize) → ready → probes and steps until Stop

The supervisor speaks on the control socket, the core in one numbered stream; results and errors go back by PUSH. The
loop blocks until something comes and computes in the same thread, so nothing of ours wakes during a step. torch is
imported late: the hello and the pages of the checkpoint do not wait for it.

Exit codes: 0 after Stop, 2 for a configuration that cannot be served, 1 for a fault.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from ..ipc.codec import Decoder, encode
from ..ipc.config.engine_spec import EngineSpec
from ..ipc.errors import ConfigError, ProtocolError, error_info
from ..ipc.messages.base import MemoryTag
from ..ipc.messages.supervisor import (
    ChildToSupervisor,
    Failed,
    Initialize,
    Phase,
    PhaseProgress,
    Ready,
    SetLogLevel,
    Stop,
    SupervisorToChild,
)
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
from ..ipc.process import log
from ..ipc.process.faults import maybe_fail
from ..ipc.process.lifeline import start_lifeline
from ..ipc.process.signals import ignore_group_signals
from ..ipc.process.title import set_title
from ..ipc.sockets import new_socket
from .cpu_threads import num_cpu_threads, prepare_openmp
from .device.completion_notifier import CompletionNotifier
from .step_sequencer import StepSequencer, StreamAction
from .weights.readahead import start_readahead

if TYPE_CHECKING:
    from .worker import Worker

logger = logging.getLogger("tokenloom.worker")

EXIT_FAULT = 1
EXIT_CONFIG = 2
PROGRESS_INTERVAL_S = 2.0
LAST_WORDS_MS = 1000  # how long a process that ends waits for its messages to leave

Socket = zmq.Socket[bytes]


class WorkerProcess:
    """Owns the sockets and the order of things; the work is the Worker's."""

    def __init__(
        self, spec: EngineSpec, rank: int, generation: int, model_folder: Path, asleep: list[MemoryTag]
    ) -> None:
        self._spec = spec
        self._model_folder, self._asleep = model_folder, asleep
        self._rank = rank
        self._generation = generation
        self._sequencer = StepSequencer(generation)
        self._backlog: deque[CoreToWorker] = deque()  # came while a mask was waited for
        self._is_stopping = False
        self._told_at = 0.0  # how far the weights have been read; monotonic seconds
        self._watch = CompletionNotifier()
        self._num_malformed = 0
        self._num_stale = 0
        self._context: zmq.Context[Socket] = zmq.Context()
        self._control = new_socket(self._context, zmq.DEALER, identity=b"worker-%d-%d" % (rank, generation))
        self._control.connect(spec.address("control"))
        self._steps = new_socket(self._context, zmq.SUB)
        self._results = new_socket(self._context, zmq.PUSH)
        self._control_decoder: Decoder[SupervisorToChild] = Decoder(SupervisorToChild)
        self._step_decoder: Decoder[CoreToWorker] = Decoder(CoreToWorker)

    def run(self) -> int:
        """The whole life; returns the exit code."""
        try:
            worker = self._start()
        except Exception as error:
            self._tell(Failed(error=error_info(error)))
            logger.debug("cannot start", exc_info=True)  # the supervisor says why in one line
            return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAULT
        try:
            return 0 if worker is None else self._serve(worker)
        except Exception as error:
            logger.exception("cannot go on")
            self._tell(Failed(error=error_info(error)))
            return EXIT_FAULT
        finally:
            logger.info("stops; dropped %d malformed and %d stale frames", self._num_malformed, self._num_stale)

    def close(self) -> None:
        """Give what was sent last a moment to leave."""
        self._control.close(LAST_WORDS_MS)
        self._results.close(LAST_WORDS_MS)
        self._steps.close()
        self._context.term()

    # ── start ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self) -> Worker | None:
        """A worker that is ready for steps; None if the supervisor says Stop before."""
        self._tell(self._spec.hello)
        if "weights" not in self._asleep:
            start_readahead(self._model_folder)
        begun = time.monotonic()
        from .worker import Worker

        self._tell(Phase(name="import torch", duration_s=time.monotonic() - begun))
        worker = Worker(self._spec, self._rank, self._generation)
        worker.on_progress, self._told_at = self._on_progress, time.monotonic()
        for phase in worker.load(self._model_folder, self._asleep):
            self._tell(phase)
        begun = time.monotonic()
        measured = worker.measure()
        self._tell(Phase(name="measure memory", duration_s=time.monotonic() - begun, detail=measured.device))
        self._tell(measured)
        num_blocks = self._wait_for_size()
        if num_blocks is None:
            return None
        begun = time.monotonic()
        worker.initialize(num_blocks)
        self._tell(Phase(name="allocate KV cache", duration_s=time.monotonic() - begun))
        self._steps.connect(self._spec.address(f"workers-{self._generation}"))
        self._results.connect(self._spec.address(f"results-{self._generation}"))
        self._tell(Ready())
        return worker

    def _on_progress(self, num_done: int, num_all: int) -> None:
        """Tell now and then how far the weights have been read, which is a sign of life, too."""
        now = time.monotonic()
        if now - self._told_at >= PROGRESS_INTERVAL_S:
            self._told_at = now
            self._tell(PhaseProgress(name="load weights", num_done=num_done, num_all=num_all, unit="tensors"))

    def _wait_for_size(self) -> int | None:
        """Block until Initialize brings the number of KV blocks; None for Stop."""
        while True:
            message = self._receive_control(0)
            if isinstance(message, Initialize):
                return message.num_blocks
            if isinstance(message, Stop):
                return None

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _serve(self, worker: Worker) -> int:
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._steps, zmq.POLLIN)
        poller.register(self._watch.fd, zmq.POLLIN)
        while True:
            while self._backlog:
                if not self._obey(worker, self._backlog.popleft()):
                    return EXIT_FAULT
            if self._is_stopping:
                worker.close()
                return 0
            ready = dict(poller.poll())
            if self._control in ready and isinstance(self._receive_control(zmq.NOBLOCK), Stop):
                self._is_stopping = True
            if self._watch.fd in ready:
                self._watch.clear()
                if not self._answer(worker):
                    return EXIT_FAULT
            if self._steps in ready and (message := self._receive_step()) is not None:
                self._backlog.append(message)

    def _obey(self, worker: Worker, message: CoreToWorker) -> bool:
        """Act on a message of the core. False if a step failed: this worker's state can no longer be trusted."""
        action = self._sequencer.classify(message)
        if action is StreamAction.EXECUTE and isinstance(message, SchedulerOutput):
            return self._execute(worker, message)
        if action is StreamAction.EXECUTE and isinstance(message, ReloadWeights):
            return self._reload(worker, message)
        if action is StreamAction.EXECUTE and isinstance(message, Profile):
            self._profile(worker, message)
        if action is StreamAction.RESET:
            worker.reset()
            worker.recorder.drop()
        if action in (StreamAction.RESET, StreamAction.ACKNOWLEDGE):
            self._push(ProbeAck(rank=self._rank, core_epoch=message.core_epoch, generation=self._generation))
        elif action is StreamAction.RESEND:
            self._push(Resend(rank=self._rank, generation=self._generation, from_step=self._sequencer.next_step))
        elif action is StreamAction.STALE:
            self._num_stale += 1
        return True

    def _execute(self, worker: Worker, step: SchedulerOutput) -> bool:
        """Start a step, and answer all that are done. It may be started while the one before still runs."""
        try:
            tokens = worker.start(step, lambda: self._wait_for_mask(step), lambda: self._finish_all(worker))
        except Exception as error:
            self._report(error, step.step, worker.stage)
            return False
        if tokens is not None:
            self._watch.add(tokens.wait)
        return self._answer(worker)

    def _answer(self, worker: Worker) -> bool:
        """Answer what is done. False if a step failed on the device."""
        try:
            while worker.is_next_done:
                self._finish(worker)
        except Exception as error:
            self._report(error, worker.unfinished_step or 0, worker.stage)
            return False
        return True

    def _finish_all(self, worker: Worker) -> None:
        while worker.unfinished_step is not None:
            self._finish(worker)

    def _finish(self, worker: Worker) -> None:
        result = worker.finish()
        maybe_fail("worker.send", self._rank)
        if result is not None:
            self._push(result)

    def _reload(self, worker: Worker, order: ReloadWeights) -> bool:
        try:
            maybe_fail("worker.reload", self._rank)
            worker.hold(order.holding)
        except Exception as error:
            self._report(error, order.step, "reload")
            return False
        self._acknowledge(order)
        return True

    def _profile(self, worker: Worker, order: Profile) -> None:
        maybe_fail("worker.profile", self._rank)
        self._acknowledge(order, worker.recorder.switch(order.records))

    def _acknowledge(self, order: ReloadWeights | Profile, error: str = "") -> None:
        place = {"step": order.step, "core_epoch": order.core_epoch, "generation": self._generation}
        self._push(ControlAck(rank=self._rank, error=error, **place))

    def _report(self, error: Exception, step: int, phase: str) -> None:
        """Tell the core that this rank cannot go on."""
        message = f"{type(error).__name__}: {error}"
        logger.exception("step %d failed at %s: %s", step, phase, message)
        self._push(WorkerError(rank=self._rank, generation=self._generation, step=step, phase=phase, message=message))

    def _wait_for_mask(self, step: SchedulerOutput) -> TokenMask | None:
        """The mask that `step` samples by. None when its result is not wanted any more: the core was replaced, or this
        process is to stop; then the step still ends, so that other ranks are not left waiting for its tokens."""
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._steps, zmq.POLLIN)
        while not self._is_stopping:
            ready = dict(poller.poll())
            if self._control in ready and isinstance(self._receive_control(zmq.NOBLOCK), Stop):
                self._is_stopping = True
            if self._steps not in ready or (message := self._receive_step()) is None:
                continue
            if isinstance(message, TokenMask) and self._sequencer.is_mask_of(step, message):
                return message
            self._backlog.append(message)
            if self._sequencer.has_replaced(step, message):
                return None
        return None

    # ── frames ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _tell(self, message: ChildToSupervisor) -> None:
        self._control.send(encode(message))

    def _push(self, message: WorkerToCore) -> None:
        self._results.send(encode(message))

    def _receive_control(self, flags: int) -> SupervisorToChild | None:
        """The supervisor's next message; None for a malformed one."""
        frames = self._control.recv_multipart(flags)
        try:
            message = self._control_decoder.decode(frames[-1])
        except ProtocolError as error:
            self._count_malformed("the supervisor", error)
            return None
        if isinstance(message, SetLogLevel):
            log.set_level(message.level)
        return message

    def _receive_step(self) -> CoreToWorker | None:
        """The core's next message; None for a malformed one."""
        frames = self._steps.recv_multipart(zmq.NOBLOCK)
        try:
            return self._step_decoder.decode(frames[-1])
        except ProtocolError as error:
            self._count_malformed("the core", error)
            return None

    def _count_malformed(self, sender: str, error: ProtocolError) -> None:
        self._num_malformed += 1
        if log.is_worth_a_line(self._num_malformed):
            logger.warning("from %s: %s (%d malformed so far)", sender, error, self._num_malformed)


def main(arguments: Sequence[str] | None = None) -> int:
    ignore_group_signals()
    parser = argparse.ArgumentParser(prog="tokenloom worker", description="One rank of an engine; started by it.")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--generation", type=int, required=True)
    parser.add_argument("--model-folder", help="where the weights are, if they were reloaded from elsewhere")
    parser.add_argument("--asleep", nargs="*", default=[], help="what is not held in memory before it is woken")
    options = parser.parse_args(arguments)
    set_title(f"tokenloom worker {options.rank}")
    start_lifeline()
    spec = EngineSpec.from_environment()
    log.configure(f"worker {options.rank}", spec.config.log_level)
    if spec.device == "cpu":
        prepare_openmp(num_cpu_threads(spec.config.num_threads, spec.config.tensor_parallel_size))
    folder = Path(options.model_folder or spec.model_folder)
    process = WorkerProcess(spec, options.rank, options.generation, folder, options.asleep)
    try:
        return process.run()
    finally:
        process.close()


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)  # an interpreter's end waits for peers of the group that may be gone
