"""engine-launch from the outside: its output, its process titles, its exit, and no leftovers."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom import Client, Draining, SamplingParams, StructuredOutputsParams
from tokenloom.ipc.sockets.keys import Keys
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.support.faults import inject
from tokenloom.tests.support.today import at_night, some
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.launched import RECOVERY_S, LaunchedEngine, reconnecting, serve

GREEDY = SamplingParams(temperature=0, max_tokens=16)
LONG = SamplingParams(temperature=0, max_tokens=600, ignore_eos=True)
IDLE_S = 2.0  # long enough to measure idle CPU time


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
        told = engine.lines + engine.log().splitlines()
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


@pytest.mark.parametrize("role", ["core", *at_night("frontend", "worker 0")])
def test_open_requests_finish_even_if_a_process_dies_while_draining(tmp_path: Path, role: str) -> None:
    with LaunchedEngine(tmp_path, "--max-num-seqs", "4", "--max-num-batched-tokens", "64") as engine:
        engine.wait_ready()
        with reconnecting(engine) as client:
            running = client.submit("The capital of France is", LONG)
            deltas = client.stream("The capital of Japan is", LONG)
            next(deltas)
            engine.signal(signal.SIGTERM)
            engine.wait_line("Draining")
            with pytest.raises(Draining):
                while not running.done():
                    client.generate("The capital of Italy is", GREEDY, use_tqdm=False)
            assert not running.done()
            engine.child(role).kill()
            assert len(running.result(timeout=RECOVERY_S).outputs[0].token_ids) == LONG.max_tokens
            assert sum(1 for _ in deltas) > 0
        assert engine.wait_exit() == 0
        engine.check_nothing_is_left()


@pytest.mark.parametrize("role", some(["supervisor", "worker 0", "frontend", "core"], 1))
def test_a_kill_during_the_start_leaves_nothing(tmp_path: Path, role: str) -> None:
    with LaunchedEngine(tmp_path) as engine:
        engine.wait_line("")
        victim = engine.processes()[0] if role == "supervisor" else engine.child(role)
        victim.kill()
        code = engine.wait_exit()
        assert code == (-signal.SIGKILL if role == "supervisor" else 1)
        engine.check_nothing_is_left()


@pytest.mark.parametrize("are_stopped", [*at_night(False), True])
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
            engine.check_nothing_is_left(within_s=2.0)
        assert not (tmp_path / "mine.sock").exists()


def refusal(folder: Path, *options: str) -> str:
    """Return the stderr of an engine that may not start."""
    with Engine(folder, options) as engine:
        assert engine.wait_exit() == 2 and "Traceback" not in engine.log(), engine.log()
    return engine.log()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-tp", "64"], "do not divide among -tp 64"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml cannot be read"),
    ],
)
def test_an_invalid_configuration_exits_2_with_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    lines = [line for line in refusal(tmp_path, *arguments).splitlines() if line.startswith("engine-launch:")]
    assert len(lines) == 1 and message in lines[0]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine that no test harms."""
    folder = tmp_path_factory.mktemp("one")
    tiers = ("--kv-disk", str(folder / "kv"), "--kv-host-bytes", "64M")
    yield from serve(LaunchedEngine(folder, "--listen", f"ipc://{folder}/one.sock", *tiers))


def test_an_address_in_use_is_refused_and_the_first_engine_keeps_serving(engine: Engine, tmp_path: Path) -> None:
    assert "in use by another engine" in refusal(tmp_path, "--listen", engine.address)
    with Client(engine.address) as client:
        assert client.generate("The capital of Italy is", GREEDY, use_tqdm=False)[0].outputs[0].text == " Rome."


def test_a_tcp_port_in_use_is_refused(tmp_path: Path) -> None:
    Keys.generate().save(tmp_path / "hosts.key")
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        keys = ("--hosts-key-file", str(tmp_path / "hosts.key"))
        assert f"cannot listen on {address}" in refusal(tmp_path, "--listen", address, "--insecure")
        assert f"cannot listen on --core-listen {address}" in refusal(tmp_path, "--core-listen", address, *keys)


def memory_at_rest(engine: Engine) -> tuple[int, int]:
    """Wait until an idle worker takes no more memory ahead; return its private and shared MiB."""
    worker, sizes = engine.child("worker 0"), deque[int](maxlen=40)

    def is_at_rest() -> bool:
        sizes.append(worker.memory_info().rss)
        return len(sizes) == sizes.maxlen and len({*sizes}) == 1

    wait_until(is_at_rest, "the worker still takes memory", 60.0)
    memory = worker.memory_info()
    return (memory.rss - memory.shared) >> 20, memory.shared >> 20


@pytest.mark.nightly
def test_an_idle_worker_takes_the_memory_of_the_next_prompts_and_no_more(tmp_path: Path) -> None:
    """A pool of its first block and one of 1 GiB differ by the 256 MiB that are taken ahead; so does the arena."""
    held = list[tuple[int, int]]()
    for index, options in enumerate((["--num-kv-blocks", "2", "--max-model-len", "16"], ["--kv-host-bytes", "48M"])):
        (folder := tmp_path / str(index)).mkdir()
        size = ["--kv-cache-memory-bytes", "1G"] if index else []
        with LaunchedEngine(folder, *options, *size) as engine:
            engine.wait_ready()
            held.append(memory_at_rest(engine))
            assert engine.stop() == 0
    (private, shared), (private_of_large, shared_of_large) = held
    assert 250 <= private_of_large - private <= 290 and 47 <= shared_of_large - shared <= 56, held


def test_an_idle_engine_uses_almost_no_cpu(engine: Engine) -> None:
    with Client(engine.address) as client:
        client.generate("The capital of France is", GREEDY, use_tqdm=False)
        memory_at_rest(engine)

        def cpu_s() -> float:  # the scheduler's nanoseconds: clock ticks round by 10 ms a process
            tasks = [task for each in engine.processes() for task in Path(f"/proc/{each.pid}/task").iterdir()]
            return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

        def cpu_s_of_a_while() -> float:
            before = cpu_s()
            threading.Event().wait(IDLE_S)  # nothing happens, which no event says
            return cpu_s() - before

        # the second while if the work after a request had not settled before the first
        assert cpu_s_of_a_while() <= 0.005 * IDLE_S or cpu_s_of_a_while() <= 0.005 * IDLE_S


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
