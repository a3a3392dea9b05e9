"""LLM and AsyncLLM: start, keywords and end of a private engine, with fake launchers and with the demo model."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tokenloom.frontend.client.async_client import AsyncClient
from tokenloom.frontend.client.client import Client
from tokenloom.frontend.embedded.child_engine import ChildEngine
from tokenloom.frontend.embedded.in_process_transport import InProcessTransport
from tokenloom.frontend.launcher.options.options import config_from_keywords
from tokenloom.frontend.llm import LLM
from tokenloom.ipc.errors import ConfigError, EngineDead, InternalError, RequestError, TokenloomError
from tokenloom.ipc.messages.client import ClientMessage, FrontendMessage
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.frontend.fake_frontend import DEADLINE_S, FORBIDDEN, FakeService, expected_text, greedy

LAUNCHER = """
import json, os, sys, time
config = os.environ["TOKENLOOM_CONFIG"]
os.write(2, b"first words\\n")

def tell(answer):
    os.write(1, json.dumps(answer).encode() + b"\\n")
    os.close(1)

def serve():
    tell({"addresses": ["ipc://" + json.loads(config)["model"]]})
    while os.read(0, 1):
        pass
"""
LAUNCHERS = {
    "serves": "serve()",
    "is stubborn": "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); serve(); time.sleep(100)",
    "dies": "os.write(2, b'out of luck\\n'); sys.exit(3)",
    "refuses": "tell({'error': {'kind': 'config', 'message': 'no such model'}}); sys.exit(2)",
}
HANGS = ["sh", "-c", "echo first words >&2; exec cat"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ChildEngine]]:
    handles = []

    def start(launcher: str, **options: object) -> ChildEngine:
        script = tmp_path / "launcher.py"
        script.write_text(LAUNCHER + LAUNCHERS.get(launcher, ""))
        command = HANGS if launcher == "hangs" else [sys.executable, str(script)]
        handle = ChildEngine(EngineConfig(model="x", **options), command)  # type: ignore[arg-type]
        handles.append(handle)
        return handle

    before = set(threading.enumerate())
    yield start
    for handle in handles:
        handle.stop()
        assert not Path(f"/proc/{handle.pid}").exists()
    assert set(threading.enumerate()) == before


def test_an_engine_reports_its_address_and_ends_with_its_lifeline(
    start: Callable[..., ChildEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    handle = start("serves", api_key="for our eyes only")
    assert handle.addresses == ["ipc://x"]
    assert b"only" not in Path(f"/proc/{handle.pid}/cmdline").read_bytes()
    assert os.getsid(handle.pid) == handle.pid, "Ctrl-C in the terminal is the program's, not the engine's"
    handle.stop()
    assert not Path(f"/proc/{handle.pid}").exists()
    handle.stop()
    assert "first words" in capsys.readouterr().err


def test_a_program_without_standard_streams_can_start_an_engine(tmp_path: Path) -> None:
    script, answer = tmp_path / "launcher.py", tmp_path / "answer"
    script.write_text(LAUNCHER + LAUNCHERS["serves"])
    program = (
        "import os, sys\n"
        "for fd in range(3):\n"
        "    os.close(fd)\n"
        "from tokenloom.frontend.embedded.child_engine import ChildEngine\n"
        "from tokenloom.ipc.spec.config.engine_config import EngineConfig\n"
        f"handle = ChildEngine(EngineConfig(model='x'), [sys.executable, {str(script)!r}])\n"
        f"open({str(answer)!r}, 'w').write(handle.addresses[0])\n"
        "handle.stop()\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=DEADLINE_S, cwd="/").returncode == 0
    assert answer.read_text() == "ipc://x"


def test_an_engine_that_ignores_sigterm_is_killed(start: Callable[..., ChildEngine]) -> None:
    handle = start("is stubborn")
    handle.stop_timeout_s = handle.terminate_timeout_s = 0.1
    handle.stop()
    handle._watcher.join(DEADLINE_S)
    assert not Path(f"/proc/{handle.pid}").exists()


@pytest.mark.parametrize(
    ("launcher", "error_type", "words"),
    [
        ("dies", EngineDead, r"(?s)exited with code 3.*first words.*out of luck"),
        ("refuses", ConfigError, "no such model"),
        ("hangs", EngineDead, r"(?s)did not start within 2 s.*first words.*start_timeout_s"),
    ],
)
def test_a_failed_start_raises_its_reason(
    start: Callable[..., ChildEngine], launcher: str, error_type: type[Exception], words: str
) -> None:
    with pytest.raises(error_type, match=words):
        start(launcher, **({"start_timeout_s": 2.0} if launcher == "hangs" else {}))


def test_a_killed_engine_is_an_error_with_the_signal_and_its_last_lines(start: Callable[..., ChildEngine]) -> None:
    handle = start("serves")
    told: list[TokenloomError] = []
    has_told = threading.Event()
    handle.on_death(lambda error: (told.append(error), has_told.set()))  # type: ignore[func-returns-value]
    os.kill(handle.pid, signal.SIGKILL)
    assert has_told.wait(DEADLINE_S)
    assert "killed by SIGKILL" in str(told[0]) and "first words" in str(told[0])
    late: list[TokenloomError] = []
    handle.on_death(late.append)
    assert late == told


# ── keywords ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_field_of_the_configuration_is_a_keyword(tmp_path: Path) -> None:
    config = config_from_keywords("LLM", tmp_path, {"max_num_seqs": 16, "dtype": torch.bfloat16, "listen": None})
    assert config == EngineConfig(model=str(tmp_path), max_num_seqs=16, dtype="bfloat16", log_level="warning")
    assert config_from_keywords("LLM", None, {"log_level": "debug"}).log_level == "debug"


def test_an_unknown_keyword_is_a_type_error_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"LLM\(\) .* 'temperature': it is a parameter of a request, write Sampling"):
        config_from_keywords("LLM", tmp_path, {"temperature": 0})
    with pytest.raises(TypeError, match=r"did you mean gpu_memory_utilization\?"):
        config_from_keywords("LLM", tmp_path, {"gpu_mem": 0.5})
    with pytest.raises(TypeError, match=r"LLM\(\) got an unexpected keyword argument 'tensor_paralel_size'.*parallel"):
        LLM(tensor_paralel_size=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"start_timeout_s": float("inf")}, "start_timeout_s"),
        ({"drain_timeout_s": float("nan")}, "drain_timeout_s"),
        ({"http": "0", "in_process": True}, "in_process serves no HTTP"),
        ({"kv_host_bytes": 1 << 30, "in_process": True}, "in_process has no KV tiers"),
    ],
)
def test_an_invalid_value_is_refused_before_a_process_starts(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(**options)  # type: ignore[arg-type]


# ── in process ───────────────────────────────────────────────────────────────────────────────────────────────────────


class FakeEngine:
    """FakeService as an engine in this process."""

    def __init__(self) -> None:
        self.service = FakeService()
        self.threads: set[threading.Thread] = set()
        self.is_closed = False
        self.error: Exception | None = None
        self.interrupts = 0  # signals during the next step

    def send(self, message: ClientMessage) -> None:
        self.service.take(bytes(16), message)

    def step(self, timeout_s: float) -> list[FrontendMessage]:
        assert timeout_s > 0
        self.threads.add(threading.current_thread())
        if self.error is not None:
            raise self.error
        for _ in range(self.interrupts):
            signal.raise_signal(signal.SIGINT)
            self.interrupts -= 1
        self.service.generate()
        messages, self.service.outbox = [message for _, message in self.service.outbox], []
        return messages

    def close(self) -> None:
        self.is_closed = True


class FakeLLM(Client):
    def __init__(self, engine: FakeEngine) -> None:
        transport = InProcessTransport(engine)
        self._attach(transport, transport.close)


class FakeAsyncLLM(AsyncClient):
    def __init__(self, engine: FakeEngine) -> None:
        transport = InProcessTransport(engine, in_background=True)
        self._attach(transport, transport.close)


def test_in_process_the_waiting_thread_runs_the_engine() -> None:
    engine = FakeEngine()
    with FakeLLM(engine) as llm:
        outputs = llm.generate(["a", "b"], [greedy(5), greedy(30)], use_tqdm=False)
        assert [output.outputs[0].text for output in outputs] == [expected_text("a", 5), expected_text("b", 30)]
        assert "".join(llm.stream("c", greedy(9))) == expected_text("c", 9)
        futures = [llm.submit(prompt, greedy(7)) for prompt in "de"]
        assert [future.result(DEADLINE_S).outputs[0].text for future in futures] == [
            expected_text("d", 7),
            expected_text("e", 7),
        ]
        assert llm.info().model == "fake" and repr(llm) == "<FakeLLM fake at this process>"
        with pytest.raises(RequestError, match="forbidden"):
            llm.generate(FORBIDDEN, use_tqdm=False)
    assert engine.threads == {threading.current_thread()}
    assert engine.is_closed
    with pytest.raises(RequestError, match="closed"):
        llm.generate("p")


def test_in_process_a_callback_may_use_the_engine_again() -> None:
    with FakeLLM(FakeEngine()) as llm:
        texts: list[str] = []
        future = llm.submit("a", greedy(3))
        future.add_done_callback(
            lambda future: texts.append(llm.generate("b", greedy(4), use_tqdm=False)[0].outputs[0].text)
        )
        llm.generate("c", greedy(9), use_tqdm=False)
        assert texts == [expected_text("b", 4)]


def test_in_process_many_threads_run_the_engine_in_turn() -> None:
    with FakeLLM(FakeEngine()) as llm:
        texts: dict[str, str] = {}

        def work(name: str) -> None:
            for index in range(20):
                prompt = f"{name}{index}"
                texts[prompt] = llm.generate(prompt, greedy(20), use_tqdm=False)[0].outputs[0].text

        threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert len(texts) == 80
        assert all(text == expected_text(prompt, 20) for prompt, text in texts.items())


def test_in_process_a_bug_is_raised_in_wait_and_engine_dead_in_every_request() -> None:
    engine = FakeEngine()
    with FakeLLM(engine) as llm:
        engine.error = ZeroDivisionError("a bug")
        with pytest.raises(ZeroDivisionError) as raised:
            llm.generate("p", use_tqdm=False)
        assert raised.value.__context__ is None, "no other error is in its traceback"
        engine.error = EngineDead("no memory")
        for _ in range(2):
            with pytest.raises(EngineDead, match="no memory"):
                llm.generate("p", use_tqdm=False)


@pytest.mark.usefixtures("no_ignored_signals")
def test_in_process_ctrl_c_takes_effect_between_turns() -> None:
    engine = FakeEngine()
    with FakeLLM(engine) as llm:
        engine.interrupts = 1
        with pytest.raises(KeyboardInterrupt):
            llm.generate("p", greedy(30), use_tqdm=False)
        assert engine.interrupts == 0, "the turn went on to its end"
        assert llm.generate("p", greedy(30), use_tqdm=False)[0].outputs[0].text == expected_text("p", 30)
        engine.interrupts = 2
        with pytest.raises(KeyboardInterrupt):
            llm.generate("p", use_tqdm=False)
        assert engine.interrupts == 1, "the second does not wait"
        engine.interrupts = 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_process_a_thread_runs_the_engine_for_an_event_loop() -> None:
    engine = FakeEngine()
    before = set(threading.enumerate())

    async def main() -> None:
        async with FakeAsyncLLM(engine) as llm:
            outputs = [output async for output in llm.generate("p", greedy(20))]
            assert outputs[-1].outputs[0].text == expected_text("p", 20)
            engine.error = ZeroDivisionError("a bug")
            with pytest.raises(InternalError, match="ZeroDivisionError: a bug"):
                await anext(llm.generate("p"))

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
    assert set(threading.enumerate()) == before
    assert engine.threads.isdisjoint(before)


# ── the demo model ───────────────────────────────────────────────────────────────────────────────────────────────────

SCRIPT = """
import os, psutil, sys, tokenloom
llm = tokenloom.LLM(num_threads=1, max_num_seqs=8, num_kv_blocks=256)
(output,) = llm.generate(["The capital of France is"], tokenloom.SamplingParams(temperature=0, max_tokens=8))
print(output.outputs[0].text, flush=True)
print(psutil.Process().children()[0].pid, flush=True)
sys.stdin.read()
os.kill(os.getpid(), 9)
"""


def test_a_killed_script_without_a_main_guard_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert "Paris" in process.stdout.readline()
        engine = int(process.stdout.readline())
        engine_fd = os.pidfd_open(engine)
        process.stdin.close()
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
    assert select.select([engine_fd], [], [], DEADLINE_S)[0], "the engine outlived the program"
    os.close(engine_fd)


def test_a_dead_engine_ends_every_wait_with_its_exit_code() -> None:
    others = set(psutil.Process().children())  # engines that other tests share
    with LLM(num_threads=1, max_num_seqs=8, num_kv_blocks=256) as llm:
        assert "Paris" in llm.generate("The capital of France is", greedy(8), use_tqdm=False)[0].outputs[0].text
        stream = llm.stream("1 + 1", SamplingParams(max_tokens=1500, ignore_eos=True))
        next(stream)
        (engine,) = set(psutil.Process().children()) - others
        engine.kill()
        with pytest.raises(EngineDead, match="SIGKILL"):
            list(stream)
        with pytest.raises(EngineDead, match="SIGKILL"):
            llm.generate("p")


def test_in_process_there_is_no_frontend_to_replace() -> None:
    with LLM(in_process=True, dtype="float32", max_model_len=64, max_num_seqs=2) as llm:
        with pytest.raises(InternalError, match="no frontend of its own to replace"):
            llm.reload_frontends()
        assert llm.generate("A", greedy(2), use_tqdm=False)[0].outputs[0].token_ids
