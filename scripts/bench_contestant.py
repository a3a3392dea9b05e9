"""Contestants: whoever generates the same tokens from the same prompts, measured in turn within one run.

`Ours` is an LLM in this process's care; a `Peer` is a program that speaks peer_protocol.py. Both answer with seconds.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenloom import LLM, SamplingParams

SCRIPTS = Path(__file__).resolve().parent
START_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 20.0


class Contestant(Protocol):
    """Its `name` heads its rows in a table."""

    name: str

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Seconds for exactly `max_tokens` greedy tokens of each prompt, all submitted at once."""
        ...

    def close(self) -> None: ...


class Ours:
    """The engine in its own processes, or in this one."""

    def __init__(self, folder: Path, options: Mapping[str, object], in_process: bool = False) -> None:
        self.name = "tokenloom in_process" if in_process else "tokenloom"
        self._llm = LLM(model=folder, in_process=in_process, **options)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        begun = time.perf_counter()
        outputs = self._llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - begun
        _check(self.name, sum(len(output.outputs[0].token_ids) for output in outputs), len(prompts) * max_tokens)
        return seconds

    def close(self) -> None:
        self._llm.close()


class PeerFailed(Exception):
    """A peer ended, was late, or said why it cannot answer."""


class Peer:
    """A process behind peer_protocol.py. `facts` is what it said of itself."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._unread = b""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
            cwd="/",
        )
        try:
            self.facts: dict[str, Any] = self._read(START_TIMEOUT_S)["ready"]
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        answer = self.ask({"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens})
        _check(self.name, answer["num_tokens"], len(prompts) * max_tokens)
        return float(answer["seconds"])

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return self._read(ANSWER_TIMEOUT_S)

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        fd = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            if not select.select([fd], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise PeerFailed(f"{self.name} did not answer within {timeout_s:g} s")
            data = os.read(fd, 1 << 16)
            if not data:
                raise PeerFailed(f"{self.name} ended with exit code {self._process.wait(STOP_TIMEOUT_S)}")
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End of its input ends it; after STOP_TIMEOUT_S it is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def transformers_peer(folder: Path, dtype: str, device: str, threads: int, python: str = sys.executable) -> Peer:
    arguments = [str(folder), "--dtype", dtype, "--device", device, "--threads", str(threads)]
    return Peer("transformers", [python, str(SCRIPTS / "peer_transformers.py"), *arguments])


def _check(name: str, num_tokens: int, num_wanted: int) -> None:
    if num_tokens != num_wanted:
        raise PeerFailed(f"{name} gave {num_tokens} tokens, {num_wanted} were asked for")
