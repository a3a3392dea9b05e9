"""engine-launch from the outside: its output, its process titles, its exit, and no leftovers."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from tokenloom import Client, Draining, SamplingParams, StructuredOutputsParams
from tokenloom.ipc.codec import Decoder, encode, num_ids
from tokenloom.ipc.keys import Keys
from tokenloom.ipc.messages.base import PROTOCOL_VERSION, Hello, Ping
from tokenloom.ipc.messages.client import CREDIT_WINDOW, Credit, Delta, Deltas, FrontendMessage, Submit
from tokenloom.ipc.sockets import new_socket
from tokenloom.scripts.engine_process import Engine
from tokenloom.tests.support.faults import inject
from tokenloom.tests.system.launched import LaunchedEngine

GREEDY = SamplingParams(temperature=0, max_tokens=16)
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)


def test_the_command_serves_and_a_signal_ends_it_cleanly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)  # stands in for systemd with Type=notify
    manager.bind(str(tmp_path / "notify"))
    manager.settimeout(60)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    options = ("--hang-timeout-s", "1e9", "--start-timeout-s", "1e9")
    with manager, LaunchedEngine(tmp_path, *options) as engine:
        address = engine.wait_ready()
        assert manager.recv(1000).startswith(b"READY=1\nSTATUS=serves tokenloom-demo at ipc://")
        titles = sorted(" ".join(process.cmdline()).strip() for process in engine.processes()[1:])
        assert titles == ["tokenloom core", "tokenloom frontend", "tokenloom worker 0"]
        for phase in ("tokenizer loaded", "load weights", "KV cache", "workers joined"):
            assert any(phase in line for line in engine.lines), f"no line reports {phase}"
        told = engine.lines + engine.errors.read_text().splitlines()
        assert sum("KV cache: " in line for line in told) == 1
        assert all(re.match(r"\d\d:\d\d:\d\d INFO \w+|Ready at ", line) for line in told), told
        with Client(address, connect_timeout_s=1e9) as one, Client(address) as two:
            assert one.generate("The capital of France is", GREEDY, use_tqdm=False)[0].outputs[0].text == " Paris."
            assert "".join(two.stream("The capital of Japan is", GREEDY)) == " Tokyo."
            assert two.health().is_ready and two.info().max_model_len >= 2048
        engine.signal(signal.SIGINT)
        assert manager.recv(1000).startswith(b"STOPPING=1\n")
        assert engine.wait_exit() == 0
        engine.check_nothing_is_left()


def test_a_first_signal_drains_and_a_second_aborts(tmp_path: Path) -> None:
    with LaunchedEngine(tmp_path, "--max-num-seqs", "4", "--max-num-batched-tokens", "64") as engine:
        with Client(engine.wait_ready()) as client:
            longer = LONG.replace(max_tokens=1800)
            running = client.submit("The capital of France is", longer)
            deltas = client.stream("The capital of Japan is", longer)
            next(deltas)
            engine.signal(signal.SIGTERM)
            engine.wait_line("Draining")
            with pytest.raises(Draining):
                while not running.done():
                    client.generate("The capital of Italy is", GREEDY, use_tqdm=False)
            assert len(running.result(timeout=60).outputs[0].token_ids) == 1800
            assert sum(1 for _ in deltas) > 0
        assert engine.wait_exit() == 0
        engine.check_nothing_is_left()


@pytest.mark.parametrize("role", ["frontend", "core", "worker 0"])
def test_open_requests_finish_even_if_a_process_dies_while_draining(tmp_path: Path, role: str) -> None:
    with LaunchedEngine(tmp_path) as engine:
        with Client(engine.wait_ready()) as client:
            running = client.submit("The capital of France is", LONG.replace(max_tokens=1000))
            deltas = client.stream("The capital of Japan is", LONG.replace(max_tokens=1000))
            next(deltas)
            engine.signal(signal.SIGTERM)
            engine.wait_line("Draining")
            engine.child(role).kill()
            assert len(running.result(timeout=60).outputs[0].token_ids) == 1000
            assert sum(1 for _ in deltas) > 0
        assert engine.wait_exit() == 0
        engine.check_nothing_is_left()


def test_a_draining_engine_stops_only_after_a_slow_reader_has_everything(tmp_path: Path) -> None:
    decoder: Decoder[FrontendMessage] = Decoder(FrontendMessage)
    num_tokens = 2 * CREDIT_WINDOW
    submit = Submit(request_id="r", params=LONG.replace(max_tokens=num_tokens), prompt="The capital of France is")
    found: list[Delta] = []
    with LaunchedEngine(tmp_path, "--speculation", "off") as engine:  # a delta is a token
        address = engine.wait_ready()
        with Client(address) as watcher, zmq.Context() as context, new_socket(context, zmq.DEALER) as socket:
            socket.connect(address)
            socket.send(encode(Hello(protocol_version=PROTOCOL_VERSION)))
            socket.send(encode(submit))
            deadline = time.monotonic() + 60

            def read(until: Callable[[], bool]) -> None:
                while not until():
                    assert time.monotonic() < deadline, found
                    if socket.poll(500):
                        message = decoder.decode(socket.recv())
                        found.extend(message.deltas if isinstance(message, Deltas) else [])
                    else:
                        socket.send(encode(Ping()))  # keeps the lease

            read(lambda: len(found) == CREDIT_WINDOW and watcher.health().num_running == 0)
            engine.signal(signal.SIGTERM)
            engine.wait_line("Draining")
            with pytest.raises(subprocess.TimeoutExpired):
                engine.wait_exit(1.0)
            socket.send(encode(Credit(count=CREDIT_WINDOW)))
            read(lambda: found[-1].finish_reason is not None)
            assert found[-1].finish_reason == "length"
            assert sum(num_ids(delta.token_ids) for delta in found) == num_tokens
        assert engine.wait_exit() == 0


@pytest.mark.parametrize("role", ["supervisor", "frontend", "core", "worker 0"])
def test_a_kill_during_the_start_leaves_nothing(tmp_path: Path, role: str) -> None:
    with LaunchedEngine(tmp_path) as engine:
        engine.wait_line("")
        victim = engine.processes()[0] if role == "supervisor" else engine.child(role)
        victim.kill()
        code = engine.wait_exit()
        assert code == (-signal.SIGKILL if role == "supervisor" else 1)
        engine.check_nothing_is_left()


@pytest.mark.parametrize("are_stopped", [False, True])
def test_all_processes_end_with_a_killed_supervisor(tmp_path: Path, are_stopped: bool) -> None:
    with LaunchedEngine(tmp_path, "--listen", f"ipc://{tmp_path}/mine.sock") as engine:
        address = engine.wait_ready()
        assert address == f"ipc://{tmp_path}/mine.sock"
        with Client(address) as client:
            client.generate("Yes or no?", GREEDY.replace(structured_outputs=StructuredOutputsParams(choice=["yes"])))
            stream = client.stream("The capital of France is", LONG)
            next(stream)
            children = engine.processes()[1:]
            assert len(children) == 5, "worker, core, frontend, prover, grammar"
            for child in children:
                if are_stopped:
                    child.suspend()
            engine.signal(signal.SIGKILL)
            begun = time.monotonic()
            engine.check_nothing_is_left(within_s=2.0)
            assert time.monotonic() - begun < 2.0
        assert not (tmp_path / "mine.sock").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nowhere"], "neither a folder, a GGUF file, a hub id of the form owner/name, nor demo"),
        (["--block-size", "0"], "--block-size must be in [1, 1024], got 0"),
        (["--tp", "64"], "do not divide among --tensor-parallel-size 64"),
        (["--num-kv-blocks", "1"], "--num-kv-blocks must be in [2,"),
        (["--listen", "tcp://127.0.0.1:99999"], "99999"),
        (["--listen", "tcp://127.0.0.1:0"], "would admit anyone: give --key-file"),
        (["--listen", "tcp://127.0.0.1:0", "--key-file", "/nowhere"], "cannot read the key file /nowhere"),
        (["--default-timeout-s", "9", "--max-timeout-s", "3"], "is above --max-timeout-s 3"),
        (["--max-model-len", "9999999"], "above the model's max_position_embeddings"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml cannot be read"),
    ],
)
def test_an_invalid_configuration_exits_2_with_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    with LaunchedEngine(tmp_path, *arguments) as engine:
        assert engine.wait_exit() == 2
        errors = engine.errors.read_text()
        lines = [line for line in errors.splitlines() if line.startswith("engine-launch:")]
        assert len(lines) == 1 and message in lines[0], errors
        assert "Traceback" not in errors


def test_an_address_in_use_is_refused_and_the_first_engine_keeps_serving(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/one.sock"
    with LaunchedEngine(tmp_path, "--listen", address) as first:
        first.wait_ready()
        with LaunchedEngine(tmp_path / "", "--listen", address) as second:
            assert second.wait_exit() == 2 and "in use by another engine" in second.errors.read_text()
            with Client(address) as client:
                assert client.generate("The capital of Italy is", GREEDY, use_tqdm=False)[0].outputs[0].text == " Rome."
            first.signal(signal.SIGTERM)
            assert first.wait_exit() == 0


def test_a_tcp_port_in_use_is_refused(tmp_path: Path) -> None:
    Keys.generate().save(tmp_path / "hosts.key")
    with LaunchedEngine(tmp_path, "--listen", "tcp://127.0.0.1:0", "--insecure") as first:
        address = first.wait_ready()
        assert address.startswith("tcp://127.0.0.1:") and not address.endswith(":0")
        for option, words in (
            ("", ["--listen", address, "--insecure"]),
            ("--core-listen ", ["--core-listen", address, "--hosts-key-file", str(tmp_path / "hosts.key")]),
        ):
            with Engine(tmp_path, words) as second:
                assert second.wait_exit() == 2
                errors = second.errors.read_text()
                assert "Traceback" not in errors and f"cannot listen on {option}{address}" in errors
        with Client(address) as client:
            assert client.info().vocab_size > 0
        first.signal(signal.SIGTERM)
        assert first.wait_exit() == 0


def memory_at_rest(engine: LaunchedEngine) -> tuple[int, int]:
    """Wait until an idle worker takes no more memory ahead; return its private and shared MiB."""
    deadline, held, since = time.monotonic() + 60.0, 0, 0.0
    while True:
        memory = engine.child("worker 0").memory_info()
        if memory.rss != held:
            held, since = memory.rss, time.monotonic()
        elif time.monotonic() - since > 0.4:
            return (memory.rss - memory.shared) >> 20, memory.shared >> 20
        assert time.monotonic() < deadline, "the worker still takes memory"
        time.sleep(0.05)


def test_an_idle_worker_takes_the_memory_of_the_next_prompts_and_no_more(tmp_path: Path) -> None:
    """A pool of its first block and one of 1 GiB differ by the 256 MiB that are taken ahead; so does the arena."""
    held = list[tuple[int, int]]()
    for index, options in enumerate((["--num-kv-blocks", "2", "--max-model-len", "16"], ["--kv-host-bytes", "48M"])):
        (folder := tmp_path / str(index)).mkdir()
        size = ["--kv-cache-memory-bytes", "1G"] if index else []
        with LaunchedEngine(folder, *options, *size) as engine:
            engine.wait_ready()
            held.append(memory_at_rest(engine))
            engine.signal(signal.SIGTERM)
            assert engine.wait_exit() == 0
    (private, shared), (private_of_large, shared_of_large) = held
    assert 250 <= private_of_large - private <= 290 and 47 <= shared_of_large - shared <= 56, held


@pytest.mark.parametrize("has_tiers", [False, True])
def test_an_idle_engine_uses_almost_no_cpu(has_tiers: bool, tmp_path: Path) -> None:
    options = ["--kv-disk", str(tmp_path / "kv"), "--kv-host-bytes", "64M"] if has_tiers else []
    with LaunchedEngine(tmp_path, *options) as engine:
        with Client(engine.wait_ready()) as client:
            client.generate("The capital of France is", GREEDY, use_tqdm=False)
            memory_at_rest(engine)
            time.sleep(0.5)  # until the work after a request has settled

            def cpu_s() -> float:  # the scheduler's nanoseconds: clock ticks round by 10 ms a process
                tasks = [task for each in engine.processes() for task in Path(f"/proc/{each.pid}/task").iterdir()]
                return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

            before, begun = cpu_s(), time.monotonic()
            time.sleep(4.0)  # long enough to measure idle CPU time
            assert (cpu_s() - before) / (time.monotonic() - begun) <= 0.005
        engine.signal(signal.SIGTERM)
        assert engine.wait_exit() == 0


def test_the_installed_command_lists_its_flags_in_help() -> None:
    script = Path(sys.executable).with_name("engine-launch")
    text = subprocess.run([script, "--help=all"], capture_output=True, text=True, timeout=30, check=True).stdout
    for flag in ("--tensor-parallel-size", "--tp", "--max-model-len", "--listen", "--config"):
        assert flag in text


@pytest.mark.nightly
def test_a_slow_engine_start_is_logged_to_stderr_and_leaves_stdout_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENLOOM_FAULTS", str(tmp_path))
    inject(tmp_path, "worker.load", "delay 8", 0)
    program = "from tokenloom import LLM\nwith LLM(device='cpu', num_threads=1): print('done')"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, cwd="/", timeout=60)
    assert done.returncode == 0 and done.stdout == "done\n"
    assert re.search(r"^\d\d:\d\d:\d\d INFO supervisor: still starting: worker 0", done.stderr, re.MULTILINE)
