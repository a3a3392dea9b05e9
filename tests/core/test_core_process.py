"""The core as a process, with this test as its supervisor, its frontend and its workers, over real sockets."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import zmq

from tokenloom.ipc.codec import Decoder, decode_ids, encode, encode_ids
from tokenloom.ipc.engine_spec import EngineSpec
from tokenloom.ipc.messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    ChildHello,
    ChildToSupervisor,
    CoreChild,
    CoreToFrontend,
    CoreToWorker,
    EngineCoreOutputs,
    EngineCoreRequest,
    Hello,
    Initialize,
    Ping,
    Pong,
    Probe,
    ProbeAck,
    Ready,
    Refused,
    ReplaceWorkers,
    Resend,
    SchedulerOutput,
    Stop,
    Unknown,
    Welcome,
    WorkerError,
    WorkersDown,
    WorkersUp,
)
from tokenloom.ipc.sampling_params import SamplingParams
from tokenloom.ipc.sockets import new_socket

from .fake_worker import FakeWorker, expected_tokens
from .harness import make_spec

DEADLINE_S = 20.0


class Bench:
    """The core's surroundings. `pump` moves messages until a condition holds or the deadline passes."""

    def __init__(self, directory: Path) -> None:
        self.spec: EngineSpec = msgspec.structs.replace(
            make_spec(block_size=4, step_timeout_s=2.0), run_directory=str(directory)
        )
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.control = new_socket(self.context, zmq.ROUTER)
        self.control.bind(self.spec.address("control"))
        self.frontend = new_socket(self.context, zmq.DEALER, identity=b"f" * 16)
        self.frontend.connect(self.spec.address("core"))
        self.core_epoch = 0
        self.spawn_core()
        self.told: list[ChildToSupervisor] = []
        self.news: list[CoreToFrontend] = []
        self.probes = 0
        self.is_mute = False  # the worker hears but does not answer
        self.join(generation=0)

    def spawn_core(self) -> None:
        read_fd, self.lifeline = os.pipe()
        arguments = ["--lifeline-fd", str(read_fd), "--epoch", str(self.core_epoch)]
        self.core = subprocess.Popen(
            [sys.executable, "-m", "tokenloom.core.process", *arguments],
            pass_fds=[read_fd],
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
        self.worker, self.worker_epoch = FakeWorker(64, 4), self.core_epoch
        self.steps = new_socket(self.context, zmq.SUB)
        self.steps.connect(self.spec.address(f"workers-{generation}"))
        self.results = new_socket(self.context, zmq.PUSH)
        self.results.connect(self.spec.address(f"results-{generation}"))

    def pump(self, until: type | None = None, seconds: float = DEADLINE_S) -> list[object]:
        """Move messages until one of type `until` was received (or for `seconds`); returns what came."""
        seen: list[object] = []
        poller = zmq.Poller()
        for socket in (self.control, self.frontend, self.steps):
            poller.register(socket, zmq.POLLIN)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for socket, _ in poller.poll(50):
                seen += self._receive(socket)
            if until is not None and any(isinstance(message, until) for message in seen):
                return seen
        if until is not None:
            raise AssertionError(f"no {until.__name__} within {seconds} s, but {seen}")
        return seen

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
                if not self.is_mute:
                    self.push(ProbeAck(rank=0, core_epoch=order.core_epoch, generation=order.generation))
            elif not self.is_mute and order.core_epoch == self.worker_epoch and order.step == self.worker.num_steps + 1:
                self.push(self.worker.execute(order))
            yield order

    def push(self, message: object) -> None:
        self.results.send(encode(message))

    def order(self, message: object) -> None:
        self.control.send_multipart([b"core-%d" % self.core_epoch, encode(message)])

    def start(self) -> None:
        self.pump(ChildHello)
        self.order(Initialize(num_blocks=64))
        self.pump(Ready)
        self.say(self.hello())
        self.pump(Welcome)

    def hello(self, **changes: object) -> Hello:
        hello = Hello(protocol_version=PROTOCOL_VERSION, run_id=self.spec.run_id, fingerprint=self.spec.fingerprint)
        return msgspec.structs.replace(hello, **changes)

    def say(self, message: object) -> None:
        self.frontend.send(encode(message))

    def submit(self, key: int, prompt: list[int], max_tokens: int = 10, outputs: Sequence[int] = ()) -> None:
        self.say(
            EngineCoreRequest(
                children=[CoreChild(key=key, seed=key, output_token_ids=encode_ids(outputs))],
                prompt_token_ids=encode_ids(prompt),
                params=SamplingParams(max_tokens=max_tokens),
                max_tokens=max_tokens,
                stop_token_ids=[],
                arrival_time=time.time(),
            )
        )

    def tokens(self) -> dict[int, list[int]]:
        """What each key has received, in order."""
        found: dict[int, list[int]] = {}
        for news in self.news:
            if isinstance(news, EngineCoreOutputs):
                ids = list(decode_ids(news.token_ids))
                for key, start, count in zip(
                    decode_ids(news.keys), decode_ids(news.starts), decode_ids(news.counts), strict=True
                ):
                    mine = found.setdefault(key, [])
                    assert start == len(mine)
                    mine += ids[:count]
                    del ids[:count]
        return found

    def finished(self) -> dict[int, str]:
        return {
            done.key: done.reason for news in self.news if isinstance(news, EngineCoreOutputs) for done in news.finished
        }

    def run_until_finished(self, *keys: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not set(keys) <= set(self.finished()):
            assert time.monotonic() < deadline, f"only {self.finished()} finished"
            self.pump(seconds=0.02)

    def close(self) -> None:
        os.close(self.lifeline)
        self.core.wait(DEADLINE_S)
        self.context.destroy(linger=0)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    try:
        yield bench
    finally:
        bench.close()


def test_requests_travel_through_sockets(bench: Bench) -> None:
    bench.start()
    for key in range(5):
        bench.submit(key, [key + 1] * 7)
    bench.run_until_finished(*range(5))
    assert bench.tokens() == {key: expected_tokens([key + 1] * 7, key, 10, []) for key in range(5)}
    bench.order(Stop())
    assert bench.core.wait(DEADLINE_S) == 0


def test_before_hello_the_answer_is_unknown_and_another_run_is_refused(bench: Bench) -> None:
    bench.start()
    stranger = new_socket(bench.context, zmq.DEALER, identity=b"s" * 16)
    stranger.connect(bench.spec.address("core"))
    decoder: Decoder[CoreToFrontend] = Decoder(CoreToFrontend)
    stranger.send(encode(AbortRequests(keys=[1])))
    assert stranger.poll(5000) and isinstance(decoder.decode(stranger.recv()), Unknown)
    stranger.send(encode(bench.hello(run_id="f" * 16)))
    assert stranger.poll(5000)
    refused = decoder.decode(stranger.recv())
    assert isinstance(refused, Refused) and "f" * 16 in refused.error.message
    stranger.close()


def test_a_worker_that_missed_a_step_gets_it_again(bench: Bench) -> None:
    bench.start()
    bench.is_mute = True
    bench.submit(0, [1, 2, 3])
    bench.pump(SchedulerOutput)
    bench.is_mute = False
    bench.push(Resend(rank=0, generation=0, from_step=1))
    bench.run_until_finished(0)
    assert bench.tokens()[0] == expected_tokens([1, 2, 3], 0, 10, [])


@pytest.mark.parametrize("how", ["error", "nonsense", "silence"])
def test_a_failed_group_is_replaced_and_streams_go_on(bench: Bench, how: str) -> None:
    bench.start()
    for key in range(3):
        bench.submit(key, [key + 1] * 9, 60)
    bench.pump(EngineCoreOutputs)
    bench.is_mute = True
    if how == "error":
        bench.push(WorkerError(rank=0, generation=0, step=2, phase="execute", message="RuntimeError: boom"))
    elif how == "nonsense":
        bench.push(bench.worker.execute(msgspec.structs.replace(_empty_step(bench), step=bench.worker.num_steps + 1)))
    seen = bench.pump(ReplaceWorkers)
    reason = next(message.reason for message in seen if isinstance(message, ReplaceWorkers))
    assert {"error": "boom", "nonsense": "makes no sense", "silence": "hang"}[how] in reason
    bench.is_mute = False
    bench.join(generation=1)
    bench.order(WorkersUp(generation=1))
    bench.run_until_finished(0, 1, 2)
    assert bench.tokens() == {key: expected_tokens([key + 1] * 9, key, 60, []) for key in range(3)}


def test_a_new_core_lets_streams_go_on_from_what_the_workers_have_computed(bench: Bench) -> None:
    bench.start()
    prompt = list(range(100))
    bench.submit(0, prompt, 60)
    while len(bench.tokens().get(0, ())) < 10:
        bench.pump(EngineCoreOutputs)
    bench.replace_core()
    had, num_computed = bench.tokens()[0], bench.worker.num_computed_tokens
    bench.submit(0, prompt, 60, had)
    bench.run_until_finished(0)
    assert bench.tokens()[0] == expected_tokens(prompt, 0, 60, [])
    assert bench.worker.num_computed_tokens - num_computed < (60 - len(had)) + 3 * 4, "the prompt is computed again"


def test_workers_that_do_not_answer_a_new_core_are_replaced(bench: Bench) -> None:
    """The first group says nothing, the second is lost while it is probed; the supervisor is answered all the time."""
    bench.is_mute = True
    bench.pump(ChildHello)
    bench.order(Initialize(num_blocks=64))
    bench.pump(Probe)
    bench.order(Ping())
    bench.pump(Pong, seconds=1.0)
    (replace,) = [each for each in bench.pump(ReplaceWorkers) if isinstance(each, ReplaceWorkers)]
    assert replace.generation == 0 and "worker 0 did not answer the core's probe within 2 s" in replace.reason
    bench.join(generation=1)
    bench.order(WorkersUp(generation=1))
    bench.pump(Probe)
    bench.order(WorkersDown(generation=1, reason="killed"))
    bench.pump(ReplaceWorkers, seconds=1.0)
    bench.is_mute = False
    bench.join(generation=2)
    bench.order(WorkersUp(generation=2))
    bench.say(bench.hello())
    bench.pump(Welcome)
    bench.submit(0, [1, 2, 3])
    bench.run_until_finished(0)
    assert bench.tokens()[0] == expected_tokens([1, 2, 3], 0, 10, [])


def _empty_step(bench: Bench) -> SchedulerOutput:
    return SchedulerOutput(step=1, core_epoch=0, generation=bench.generation, rows=b"", counts=b"")


def test_malformed_frames_stop_nothing(bench: Bench) -> None:
    bench.start()
    rng = random.Random(0)
    valid = encode(AbortRequests(keys=[1, 2, 3]))
    for _ in range(500):
        frame = bytearray(valid)
        frame[rng.randrange(len(frame))] = rng.randrange(256)
        bench.frontend.send(bytes(frame) if rng.random() < 0.5 else rng.randbytes(rng.randrange(50)))
        bench.results.send(rng.randbytes(rng.randrange(50)))
    bench.submit(900, [1, 2, 3])
    bench.run_until_finished(900)


def test_the_core_dies_with_its_lifeline(bench: Bench) -> None:
    bench.start()
    os.close(bench.lifeline)
    begun = time.monotonic()
    bench.core.wait(2.0)
    assert time.monotonic() - begun < 1.0
    bench.lifeline = os.open(os.devnull, os.O_RDONLY)


def test_an_idle_core_does_not_wake(bench: Bench) -> None:
    bench.start()
    bench.submit(0, [1, 2, 3])
    bench.run_until_finished(0)
    bench.pump(seconds=0.3)

    def switches() -> int:
        status = Path(f"/proc/{bench.core.pid}/status").read_text()
        return sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)

    before = switches()
    bench.pump(seconds=1.0)
    assert switches() - before <= 5
