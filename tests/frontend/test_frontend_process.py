"""The frontend as a process; the test plays supervisor, core and clients."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import pytest
import zmq

from tokenloom.frontend.listening.client_sender import MAX_UNREAD_BYTES, SHARE
from tokenloom.ipc.codec import Decoder, encode, encode_ids
from tokenloom.ipc.errors import ErrorInfo
from tokenloom.ipc.messages.base import PROTOCOL_VERSION, Hello, Message, Ping, Pong, Refused, Welcome
from tokenloom.ipc.messages.client import (
    Accepted,
    ClientMessage,
    Deltas,
    FrontendMessage,
    GetHealth,
    GetInfo,
    Health,
    Submit,
    TokenIds,
    Tokenize,
)
from tokenloom.ipc.messages.core import EngineCoreOutputs, EngineCoreRequest, Finished, FrontendToCore
from tokenloom.ipc.messages.supervisor import (
    AnswersPings,
    ChildToSupervisor,
    Drain,
    Drained,
    Failed,
    Phase,
    Ready,
    Stop,
)
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.ipc.sockets.addresses import RunDirectory
from tokenloom.ipc.sockets.endpoints import Endpoints
from tokenloom.ipc.sockets.zmq_sockets import MAX_CLIENT_MESSAGE_BYTES, new_socket
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.tests.frontend.server.text.samples import backend_json, new_tokenizer
from tokenloom.tests.support.engine_specs import new_spec
from tokenloom.tests.support.waiting import wait_until

DEADLINE_S = 30.0
REQUEST = Submit(request_id="r", params=SamplingParams(), prompt="The capital")
T = TypeVar("T")


class Engine:
    """Supervisor, core and clients of one frontend process."""

    def __init__(self, run_directory: RunDirectory, *arguments: str, **changes: Any) -> None:
        self.run_directory = run_directory
        folder = run_directory.path / "model"
        folder.mkdir()
        (folder / "tokenizer.json").write_text(backend_json("byte_level"))
        fields = {"run_directory": str(run_directory.path), **changes}
        self.spec: EngineSpec = new_spec(tokenizer_folder=str(folder), max_model_len=100_000, **fields)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.control = new_socket(self.context, zmq.ROUTER)
        self.control.bind(self.spec.endpoints.control)
        self.core = new_socket(self.context, zmq.ROUTER)
        self.core.bind(self.spec.endpoints.core)
        self._from_child: Decoder[ChildToSupervisor] = Decoder(ChildToSupervisor)
        self._from_frontend: Decoder[FrontendToCore] = Decoder(FrontendToCore)
        self._from_server: Decoder[FrontendMessage] = Decoder(FrontendMessage)
        self._clients: list[zmq.Socket[bytes]] = []
        self.identity = self.core_identity = b""
        read_fd, self.lifeline = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tokenloom.frontend.server.process", *arguments],
            stdin=read_fd,
            env=self.spec.environment(),
            start_new_session=True,
        )
        os.close(read_fd)

    def from_child(self, kind: type[T]) -> T:
        """Return the next message of type `kind` from the process to its supervisor."""
        while True:
            self.identity, frame = _receive(self.control)
            message = self._from_child.decode(frame)
            if isinstance(message, kind):
                return message
            assert not isinstance(message, Failed), message.error

    def at_core(self, kind: type[T]) -> T:
        while True:
            self.core_identity, frame = _receive(self.core)
            message = self._from_frontend.decode(frame)
            if isinstance(message, kind):
                return message

    def supervisor_says(self, frame: bytes) -> None:
        self.control.send_multipart([self.identity, frame])

    def core_says(self, message: Welcome | EngineCoreOutputs) -> None:
        self.core.send_multipart([self.core_identity, encode(message)])

    def start(self) -> str:
        """Bring the process to Ready; return the address of its client socket."""
        hello = self.from_child(Hello)
        assert (hello.run_id, hello.fingerprint) == (self.spec.run_id, self.spec.fingerprint)
        address = self.listening()
        core_hello = self.at_core(Hello)
        assert (core_hello.run_id, core_hello.fingerprint) == (self.spec.run_id, self.spec.fingerprint)
        self.core_says(Welcome(protocol_version=PROTOCOL_VERSION, run_id=self.spec.run_id))
        self.from_child(Ready)
        return address

    def listening(self) -> str:
        """Return the address of the client socket, once it is bound."""
        phase = self.from_child(Phase)
        while phase.name != "listen":
            phase = self.from_child(Phase)
        return phase.detail

    def connect(self, address: str) -> zmq.Socket[bytes]:
        socket = new_socket(self.context, zmq.DEALER)
        socket.connect(address)
        self._clients.append(socket)
        return socket

    def client(self, address: str) -> zmq.Socket[bytes]:
        socket = self.connect(address)
        say(socket, Hello(protocol_version=PROTOCOL_VERSION))
        assert isinstance(self.hear(socket), Welcome)
        return socket

    def hear(self, client: zmq.Socket[bytes]) -> FrontendMessage:
        return self._from_server.decode(_receive(client)[-1])

    def close(self) -> None:
        self.context.destroy(linger=0)
        with contextlib.suppress(OSError):
            os.close(self.lifeline)
        self.process.wait(DEADLINE_S)
        self.run_directory.remove()


def _receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    assert socket.poll(int(DEADLINE_S * 1000)), "nothing came"
    return socket.recv_multipart()


def say(client: zmq.Socket[bytes], message: ClientMessage) -> None:
    client.send(encode(message))


def columns(key: int, start: int, *token_ids: int) -> dict[str, bytes]:
    found = {"keys": [key], "starts": [start], "counts": [len(token_ids)], "token_ids": token_ids}
    return {name: encode_ids(values) for name, values in found.items()}


@pytest.fixture
def run_directory() -> Iterator[RunDirectory]:
    directory = RunDirectory.create()
    yield directory
    directory.remove()


@pytest.fixture
def engine(run_directory: RunDirectory) -> Iterator[Engine]:
    engine = Engine(run_directory)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Engine, str]]:
    """A process for tests that leave it as it was, and the address of its clients."""
    engine = Engine(RunDirectory.create())
    yield engine, engine.start()
    engine.close()


@pytest.mark.parametrize("number", [0, 1])
def test_the_first_frontend_waits_for_all_cores_and_its_successor_for_one(
    number: int, run_directory: RunDirectory
) -> None:
    options = ("--number", str(number))
    with closing(Engine(run_directory, *options, config=EngineConfig(data_parallel_size=2))) as engine:
        welcome = Welcome(protocol_version=PROTOCOL_VERSION, run_id=engine.spec.run_id)
        with new_socket(engine.context, zmq.ROUTER) as second:
            second.bind(engine.spec.endpoints.of_replica(1).core)
            address = engine.listening()
            engine.at_core(Hello)
            identity, _ = _receive(second)
            engine.core_says(welcome)
            engine.from_child(AnswersPings)  # from now on its silence is a hang, although it is not ready
            if number == 0:
                say(engine.client(address), REQUEST)
                engine.at_core(EngineCoreRequest)
                engine.supervisor_says(encode(Ping()))
                assert isinstance(engine.from_child((Ready, Pong)), Pong)  # type: ignore[arg-type]
                second.send_multipart([identity, encode(welcome)])
            engine.from_child(Ready)


def test_drained_follows_the_last_output_and_stop_loses_none(engine: Engine) -> None:
    client = engine.client(engine.start())
    assert psutil.Process(engine.process.pid).cmdline()[0].strip() == "tokenloom frontend"
    say(client, REQUEST)
    key = engine.at_core(EngineCoreRequest).children[0].key
    engine.supervisor_says(encode(Drain()))
    engine.supervisor_says(encode(Ping()))
    assert isinstance(engine.from_child(Message), Pong), "nothing is drained while the core has the request"
    finished = [Finished(key=key, reason="length")]
    engine.core_says(EngineCoreOutputs(accepted=[key], finished=finished, **columns(key, 0, 40, 41)))
    engine.from_child(Drained)
    engine.supervisor_says(encode(Stop()))
    assert engine.process.wait(DEADLINE_S) == 0
    assert isinstance(engine.hear(client), Accepted)
    last = engine.hear(client)
    assert isinstance(last, Deltas) and last.deltas[0].finish_reason == "length"
    assert last.deltas[0].token_ids == encode_ids([40, 41])


def test_the_client_in_the_protocol_document_works_as_it_stands(served: tuple[Engine, str]) -> None:
    engine, address = served
    document = Path(__file__).resolve().parents[2] / "docs/reference/protocol.md"
    (code,) = re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    client = subprocess.Popen([sys.executable, "-P", "-c", code, address], stdout=subprocess.PIPE, text=True)
    request = engine.at_core(EngineCoreRequest)
    assert request.max_tokens == 32 and request.params.temperature == 0
    key, answer = request.children[0].key, new_tokenizer("byte_level").encode(" Paris, and that is it.")
    for start, token_id in enumerate(answer):
        engine.core_says(EngineCoreOutputs(**columns(key, start, token_id)))
    engine.core_says(EngineCoreOutputs(finished=[Finished(key=key, reason="stop")]))
    output, _ = client.communicate(timeout=DEADLINE_S)
    assert (output, client.returncode) == (" Paris, and that is it.", 0)


def test_malformed_frames_get_a_reply_and_do_not_stop_the_process(served: tuple[Engine, str]) -> None:
    engine, address = served
    client = engine.client(address)
    client.send(b"\xff\xff")
    assert isinstance(engine.hear(client), Refused)
    client.send_multipart([b"", b"\x01", encode(GetHealth(query_id=1))])
    assert isinstance(engine.hear(client), Health)
    engine.supervisor_says(b"junk")
    engine.core.send_multipart([engine.core_identity, b"junk"])
    engine.connect(address).send(b"x" * (MAX_CLIENT_MESSAGE_BYTES + 1))
    engine.process.send_signal(signal.SIGINT)
    say(client, GetHealth(query_id=2))
    assert isinstance(engine.hear(client), Health)


def test_the_idle_process_does_not_wake(served: tuple[Engine, str]) -> None:
    engine, address = served
    client = engine.client(address)
    say(client, Tokenize(query_id=1, prompt="The capital of France " * 1000))  # a thread tokenizes it
    ids = engine.hear(client)
    assert isinstance(ids, TokenIds) and len(ids.token_ids) > 4000
    process = psutil.Process(engine.process.pid)
    windows = []
    for _ in range(3):  # one may have the end of other work; a timer wakes the process in each
        wakes, cpu_s = process.num_ctx_switches().voluntary, sum(process.cpu_times()[:2])
        threading.Event().wait(0.5)
        windows.append((process.num_ctx_switches().voluntary - wakes, sum(process.cpu_times()[:2]) - cpu_s))
    assert any(wakes <= 1 and cpu_s <= 0.01 for wakes, cpu_s in windows), windows


def test_a_client_that_reads_nothing_costs_bounded_memory_which_is_returned_when_it_leaves(
    run_directory: RunDirectory,
) -> None:
    share = MAX_UNREAD_BYTES / (SHARE + 1)  # of one client alone
    template = run_directory.path / "template"
    template.write_text(f"{{# {'x' * 400_000} #}}")  # Info has it
    engine = Engine(run_directory, config=EngineConfig(chat_template=str(template)))
    try:
        address = engine.start()
        process, other = psutil.Process(engine.process.pid), engine.client(address)
        idle = new_socket(engine.context, zmq.DEALER)
        idle.setsockopt(zmq.RCVHWM, 1)  # else its own ZeroMQ reads all
        idle.connect(address)
        say(idle, Hello(protocol_version=PROTOCOL_VERSION))
        before = process.memory_info().rss
        for query_id in range(500):
            say(idle, GetInfo(query_id=query_id))
            say(other, Ping())
            assert isinstance(engine.hear(other), Pong)
        assert 0.55 * share < process.memory_info().rss - before < 1.9 * share, "of 200 MB"
        idle.close()

        def is_returned() -> bool:
            say(other, Ping())
            return isinstance(engine.hear(other), Pong) and process.memory_info().rss - before < 0.3 * share

        wait_until(is_returned)
    finally:
        engine.close()


def test_a_free_port_is_found_and_reported(run_directory: RunDirectory) -> None:
    endpoints = Endpoints.in_folder(run_directory.path, "tcp://127.0.0.1:0")
    with closing(Engine(run_directory, endpoints=endpoints)) as engine:
        address = engine.start()
        assert address.startswith("tcp://127.0.0.1:") and not address.endswith((":0", ":*"))
        engine.client(address)


@pytest.mark.parametrize("what", ["port", "tokenizer"])
def test_an_invalid_configuration_is_one_line_and_exit_2(run_directory: RunDirectory, what: str) -> None:
    with contextlib.ExitStack() as stack:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.destroy, 0)
        taken = new_socket(context, zmq.ROUTER)
        taken.bind("tcp://127.0.0.1:0")
        address = taken.getsockopt_string(zmq.LAST_ENDPOINT)
        changes = {"endpoints": Endpoints.in_folder(run_directory.path, address)} if what == "port" else {}
        engine = Engine(run_directory, **changes)
        stack.callback(engine.close)
        if what == "tokenizer":
            (run_directory.path / "model" / "tokenizer.json").write_text("{")
        failed = engine.from_child(Failed)
        assert failed.error.kind == "config" and "\n" not in failed.error.message
        expected = f"cannot listen on {address}: Address already in use" if what == "port" else "tokenizer.json"
        assert expected in failed.error.message
        assert engine.process.wait(DEADLINE_S) == 2


def test_the_process_ends_with_its_parent_and_removes_the_run_directory(engine: Engine) -> None:
    engine.client(engine.start())
    os.close(engine.lifeline)
    wait_until(lambda: engine.process.poll() is not None, timeout_s=3)
    assert not engine.run_directory.path.exists()


def test_a_refusal_by_the_core_ends_the_process_with_the_reason(engine: Engine) -> None:
    engine.at_core(Hello)
    refused = Refused(error=ErrorInfo("protocol", "another run"))
    engine.core.send_multipart([engine.core_identity, msgspec.msgpack.encode(refused)])
    assert engine.from_child(Failed).error == ErrorInfo("protocol", "another run")
    assert engine.process.wait(DEADLINE_S) == 1


def test_the_process_imports_what_is_heavy_with_the_http_server_at_most() -> None:
    code = "import sys, tokenloom.frontend.server.process\nprint(HEAVY & sys.modules.keys())\n"
    code += "import tokenloom.frontend.server.http.server\nprint(HEAVY & sys.modules.keys())\n"
    heavy = "HEAVY = {'torch', 'transformers', 'numpy', 'prometheus_client'}\n"
    found = subprocess.run([sys.executable, "-P", "-c", heavy + code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n{'prometheus_client'}\n", found.stdout
