"""The core process's surroundings: its supervisor, its frontend and its workers, over real sockets."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from tokenloom.ipc.codec import Decoder, encode
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.base import Hello, Welcome
from tokenloom.ipc.messages.core import CoreToFrontend, EngineCoreOutputs
from tokenloom.ipc.messages.supervisor import ChildToSupervisor, Initialize, Ready, WorkersUp
from tokenloom.ipc.messages.workers import CoreToWorker, Probe, ProbeAck
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.ipc.sockets.zmq_sockets import new_socket
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.tests.core.fake_adapters import adapter_of
from tokenloom.tests.core.fake_worker import FakeWorker, expected_tokens
from tokenloom.tests.core.harness import append_tokens, make_spec, new_message
from tokenloom.tests.support.engine_specs import in_folder
from tokenloom.tests.support.waiting import Deadline

DEADLINE_S = 20.0
MessageT = TypeVar("MessageT")


class Bench:
    """The core's surroundings. `pump` moves messages until a condition holds or the deadline passes."""

    def __init__(self, directory: Path, **options: object) -> None:
        spec = make_spec(block_size=4, step_timeout_s=2.0, start_timeout_s=1.0, **options)
        self.spec: EngineSpec = in_folder(spec, directory)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.control = new_socket(self.context, zmq.ROUTER)
        self.control.bind(self.spec.endpoints.control)
        self.frontend = new_socket(self.context, zmq.DEALER, identity=b"f" * 16)
        self.frontend.connect(self.spec.endpoints.core)
        self.core_epoch = 0
        self.spawn_core()
        self.told: list[ChildToSupervisor] = []
        self.news: list[CoreToFrontend] = []
        self.probes = 0
        self.is_mute = False  # the worker hears but does not answer
        self.fills_by_itself = True  # slots, at once
        self.join(generation=0)

    def spawn_core(self) -> None:
        read_fd, self.lifeline = os.pipe()
        self.core = subprocess.Popen(
            [sys.executable, "-m", "tokenloom.core.process", "--epoch", str(self.core_epoch)],
            stdin=read_fd,
            env=self.spec.environment(),
            cwd="/",
        )
        os.close(read_fd)

    def replace_core(self) -> None:
        """Kill the core; the next one is there, and has not been told of any request."""
        self.core.kill()
        self.core.wait(DEADLINE_S)
        os.close(self.lifeline)
        self.core_epoch += 1
        self.spawn_core()
        self.start()

    def join(self, generation: int) -> None:
        """A worker of `generation` connects."""
        if generation:
            self.steps.close()
            self.results.close()
        self.generation = generation
        self.worker, self.worker_epoch = FakeWorker(64, 4, ranks=self.spec.ranks), self.core_epoch
        self.steps = new_socket(self.context, zmq.SUB)
        self.steps.connect(self.spec.endpoints.steps_of(generation))
        self.results = new_socket(self.context, zmq.PUSH)
        self.results.connect(self.spec.endpoints.results_of(generation))

    def renew_workers(self, generation: int) -> None:
        """A worker of the next generation answers, and the supervisor reports it."""
        self.is_mute = False
        self.join(generation)
        self.order(WorkersUp(generation=generation))

    def pump(self, until: type | None = None, seconds: float = DEADLINE_S) -> list[object]:
        """Move messages until one of type `until` was received, or for `seconds`; return them."""
        seen: list[object] = []
        poller = zmq.Poller()
        for socket in (self.control, self.frontend, self.steps):
            poller.register(socket, zmq.POLLIN)
        deadline = Deadline(seconds)
        while not deadline.has_passed():
            for socket, _ in poller.poll(50):
                seen += self._receive(socket)
            if until is not None and any(isinstance(message, until) for message in seen):
                return seen
        if until is not None:
            raise AssertionError(f"no {until.__name__} within {seconds} s, but {seen}")
        return seen

    def hear(self, wanted: type[MessageT]) -> MessageT:
        """Return the next message of this type."""
        return next(message for message in self.pump(wanted) if isinstance(message, wanted))

    def _receive(self, socket: object) -> Iterator[object]:
        if socket is self.control:
            told = Decoder[ChildToSupervisor](ChildToSupervisor).decode(self.control.recv_multipart()[1])
            self.told.append(told)
            yield told
        elif socket is self.frontend:
            news = Decoder[CoreToFrontend](CoreToFrontend).decode(self.frontend.recv())
            self.news.append(news)
            yield news
        else:
            order = Decoder[CoreToWorker](CoreToWorker).decode(self.steps.recv())
            if isinstance(order, Probe):
                self.probes += 1
                if order.core_epoch > self.worker_epoch:
                    self.worker_epoch = order.core_epoch
                    self.worker.forget_rows()
                for rank in [] if self.is_mute else self.spec.ranks:
                    slots = self.worker.adapters.slots_of(rank)
                    epochs = {"core_epoch": order.core_epoch, "generation": order.generation}
                    self.push(ProbeAck(rank=rank, slots=slots, **epochs))
            elif not self.is_mute and order.core_epoch == self.worker_epoch and order.step == self.worker.num_steps + 1:
                self.worker.adapters.begin(order, ())
                self.push(self.worker.execute(order))
                while self.fills_by_itself and (ranks := self.worker.adapters.busy_ranks):
                    self.push(self.worker.adapters.finish(ranks[0]))
            yield order

    def push(self, message: object) -> None:
        self.results.send(encode(message))

    def order(self, message: object) -> None:
        self.control.send_multipart([b"core-%d" % self.core_epoch, encode(message)])

    def start(self) -> None:
        self.pump(Hello)
        self.order(Initialize(pool=PoolShape(64, 1, (1,))))
        self.pump(Ready)
        self.say(self.hello())
        self.pump(Welcome)

    def hello(self, **changes: object) -> Hello:
        return msgspec.structs.replace(self.spec.hello, **changes)

    def say(self, message: object) -> None:
        self.frontend.send(encode(message))

    def submit(
        self,
        key: int,
        prompt: list[int],
        max_tokens: int = 10,
        outputs: Sequence[int] = (),
        adapter: int = 0,
        num_losses: int = 0,
    ) -> None:
        fields = {"arrival_time": time.time(), "adapter": adapter_of(adapter), "num_losses": num_losses}
        self.say(new_message({key: outputs}, prompt, SamplingParams(max_tokens=max_tokens), **fields))

    def tokens(self) -> dict[int, list[int]]:
        """Return the tokens of each key, in order."""
        found = defaultdict[int, list[int]](list)
        for news in self.news:
            if isinstance(news, EngineCoreOutputs):
                append_tokens(found, news)
        return dict(found)

    def finished(self) -> dict[int, str]:
        return {
            done.key: done.reason for news in self.news if isinstance(news, EngineCoreOutputs) for done in news.finished
        }

    def run_until_finished(self, *keys: int) -> None:
        while not set(keys) <= set(self.finished()):
            self.pump(EngineCoreOutputs)

    def check(self, key: int, prompt: list[int], max_tokens: int = 10) -> None:
        """Run a request to its end, and check its tokens."""
        self.run_until_finished(key)
        assert self.tokens()[key] == expected_tokens(prompt, key, max_tokens, [])

    def close(self) -> None:
        os.close(self.lifeline)
        self.core.wait(DEADLINE_S)
        self.context.destroy(linger=0)
