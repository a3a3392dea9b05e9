"""WorkerHarness: plays supervisor and core for one worker group over real sockets."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import zmq

from tokenloom.ipc.codec import Decoder, encode
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.base import Rank
from tokenloom.ipc.messages.supervisor import (
    ChildToSupervisor,
    Failed,
    Initialize,
    Measured,
    Ready,
    Stop,
    SupervisorToChild,
)
from tokenloom.ipc.messages.workers import (
    CoreToWorker,
    ModelRunnerOutput,
    NewRow,
    Probe,
    ProbeAck,
    RowSampling,
    SchedulerOutput,
    SlotFilled,
    WorkerToCore,
)
from tokenloom.ipc.process.arena import Arena, ArenaShape, new_arena
from tokenloom.ipc.sockets.zmq_sockets import new_socket
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.tests.support.engine_specs import new_spec
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.workers import random_schedule
from tokenloom.tests.workers.random_schedule import new_row
from tokenloom.workers.process import WorkerProcess

START_S = 60.0
POLL_MS = 50
GENERATION = 7
NUM_SLOTS = 4  # of the arena
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84]
GREEDY = RowSampling(temperature=0.0)

M = TypeVar("M")


def make_spec(model_folder: Path, run_directory: Path, **options: int | str) -> EngineSpec:
    run_directory.mkdir(parents=True, exist_ok=True)
    return new_spec(
        run_directory=str(run_directory),
        config=EngineConfig(**{"num_threads": 1, "num_kv_blocks": 64, "max_num_seqs": 4, **options}),  # type: ignore[arg-type]
        model=load_model_config(model_folder),
        model_folder=str(model_folder),
        max_model_len=128,
    )


class WorkerHarness:
    """Starts a process for each rank, or with `in_thread` a thread of this process for the only rank, which serves
    `worker` or a worker that it starts itself."""

    def __init__(self, spec: EngineSpec, *, in_thread: bool = False, worker: Any = None) -> None:
        self.spec = spec
        self.size = spec.config.tensor_parallel_size
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = self._bind(zmq.ROUTER, spec.endpoints.control)
        self.publisher = self._bind(zmq.PUB, spec.endpoints.steps_of(GENERATION))
        self._results = self._bind(zmq.PULL, spec.endpoints.results_of(GENERATION))
        self._control_decoder: Decoder[ChildToSupervisor] = Decoder(ChildToSupervisor)
        self._result_decoder: Decoder[WorkerToCore] = Decoder(WorkerToCore)
        self.epoch = -1
        self.step = 0
        self.acks = dict[Rank, ProbeAck]()  # to the probes of this core
        self.fills = list[SlotFilled]()  # that arrived before other results
        self.processes = list[subprocess.Popen[str]]()
        self._lifelines = list[int]()
        self._arena_fd = new_arena()
        self._exit_code = Future[int]()  # of the thread
        if in_thread:
            threading.Thread(target=self._run_rank, args=(worker,), daemon=True).start()
        else:
            for rank in range(self.size):
                self._spawn(rank)

    def _bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = new_socket(self._context, kind)
        socket.bind(address)
        return socket

    def _spawn(self, rank: int) -> None:
        read_fd, write_fd = os.pipe()
        command = [sys.executable, "-P", "-m", "tokenloom.workers.process"]
        command += ["--rank", str(rank), "--generation", str(GENERATION), f"--arena-fd={self._arena_fd}"]
        process = subprocess.Popen(
            command,
            stdin=read_fd,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            pass_fds=[self._arena_fd],
            env=self.spec.environment(),
            cwd="/",
        )
        os.close(read_fd)
        self.processes.append(process)
        self._lifelines.append(write_fd)

    def _run_rank(self, worker: Any) -> None:
        process = WorkerProcess(self.spec, Rank(0, 0), GENERATION, None, [], os.dup(self._arena_fd))
        try:
            self._exit_code.set_result(process._serve(worker) if worker else process.run())
        except BaseException as error:
            self._exit_code.set_exception(error)
        finally:
            process.close()

    # ── supervisor ───────────────────────────────────────────────────────────────────────────────────────────────

    def control_messages(self) -> Iterator[tuple[bytes, ChildToSupervisor]]:
        while True:
            wait_until(lambda: self._control.poll(POLL_MS), "a message of a worker", START_S)
            identity, payload = self._control.recv_multipart()
            yield identity, self._control_decoder.decode(payload)

    def wait_for(self, kind: type[M]) -> M:
        """The next message of this kind from any rank."""
        for _, message in self.control_messages():
            if isinstance(message, kind):
                return message
            assert not isinstance(message, Failed), message.error.message
        raise AssertionError("control_messages ends by raising")

    def tell(self, message: SupervisorToChild) -> None:
        for rank in range(self.size):
            self._control.send_multipart([b"worker-%d-%d" % (rank, GENERATION), encode(message)])

    def tell_raw(self, payload: bytes) -> None:
        self._control.send_multipart([b"worker-0-%d" % GENERATION, payload])

    def start(self, num_slots: int = NUM_SLOTS) -> None:
        """Start the workers, up to their replies to a first probe."""
        measured = [self.wait_for(Measured) for _ in range(self.size)]
        pool = PoolShape.of(min(each.pool_bytes for each in measured), measured[0].block_bytes)
        arena = ArenaShape(num_slots, (1,), (self.size * pool.slab_bytes,))
        Arena.resize(self._arena_fd, arena)
        self.tell(Initialize(pool=pool, arena=arena))
        for _ in range(self.size):
            self.wait_for(Ready)
        self.new_core()

    # ── core ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def publish(self, message: CoreToWorker) -> None:
        self.publisher.send(encode(message))

    def new_core(self) -> None:
        """Begin a core_epoch, in which steps count from 1."""
        self.epoch, self.step = self.epoch + 1, 0
        self.acks.clear()

        def has_all() -> bool:
            self.publish(Probe(core_epoch=self.epoch, generation=GENERATION))
            while self._results.poll(POLL_MS):
                message = self._result_decoder.decode(self._results.recv())
                if isinstance(message, ProbeAck) and message.core_epoch == self.epoch:
                    self.acks[message.rank] = message
                elif isinstance(message, SlotFilled):
                    self.fills.append(message)
            return len(self.acks) == self.size

        wait_until(has_all, "a reply to the probe from each rank")

    def next_step(
        self,
        rows: list[int],
        counts: list[int],
        new_rows: list[NewRow] | None = None,
        appends: list[int] | None = None,
        freed: list[int] | None = None,
    ) -> SchedulerOutput:
        self.step += 1
        step = random_schedule.message(rows, counts, freed, new_rows, appends)
        return msgspec.structs.replace(step, step=self.step, core_epoch=self.epoch, generation=GENERATION)

    def receive(self, kind: type[M]) -> M:
        """Return the next result, which must be of this kind; skip late replies to repeated probes, and keep replies to
        fills."""
        if kind is SlotFilled and self.fills:
            return self.fills.pop(0)  # type: ignore[return-value]
        while True:
            wait_until(lambda: self._results.poll(POLL_MS), f"a {kind.__name__}")
            message = self._result_decoder.decode(self._results.recv())
            if isinstance(message, kind):
                return message
            if isinstance(message, SlotFilled):
                self.fills.append(message)
            else:
                assert isinstance(message, ProbeAck), f"unexpected {message}"

    def execute(self, step: SchedulerOutput) -> list[int]:
        """Run a step and return its sampled tokens."""
        self.publish(step)
        result = self.receive(ModelRunnerOutput)
        assert (result.step, result.core_epoch, result.generation) == (step.step, self.epoch, GENERATION)
        tokens: list[int] = np.frombuffer(result.token_ids, np.int32).tolist()
        return tokens

    def generate(
        self, prompt: list[int], num_tokens: int, sampling: RowSampling, chunk: int = 1000, slot: int = 0
    ) -> list[int]:
        """The answer to one prompt on row 1, prefilled in chunks, with the adapter of a slot."""
        block_size = self.spec.config.block_size
        tokens, num_computed, num_blocks = list(prompt), 0, 0
        new_rows = [msgspec.structs.replace(new_row(1, prompt, 0, sampling), adapter_slot=slot)]
        while len(tokens) < len(prompt) + num_tokens:
            count = min(chunk, len(tokens) - num_computed)
            num_computed += count
            appends = [v for b in range(num_blocks, -(-num_computed // block_size)) for v in (1, 0, b + 1)]
            num_blocks += len(appends) // 3
            tokens += self.execute(self.next_step([1], [count], new_rows, appends))
            new_rows = []
        self.execute(self.next_step([], [], freed=[1]))
        return tokens[len(prompt) :]

    # ── end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def cut_lifelines(self) -> None:
        """Close the lifelines, as the kernel does when the parent is killed."""
        while self._lifelines:
            os.close(self._lifelines.pop())

    def exit_codes(self) -> list[int]:
        """Wait for the end of all ranks."""
        if not self.processes:
            wait_until(self._exit_code.done, "the end of the worker")
            return [self._exit_code.result()]
        wait_until(lambda: all(process.poll() is not None for process in self.processes), "the end of the workers")
        return [process.wait() for process in self.processes]

    def stop(self) -> list[int]:
        """Stop all ranks; return the exit codes."""
        self.tell(Stop())
        return self.exit_codes()

    def close(self) -> None:
        self.cut_lifelines()
        for process in self.processes:
            process.kill()
            process.communicate()
        if not self.processes and not self._exit_code.done():
            self.stop()
        os.close(self._arena_fd)
        self._context.destroy(linger=0)
