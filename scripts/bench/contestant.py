"""Contestants: engines that generate the same tokens from the same prompts, measured in turn within one run.

`Ours` wraps a client of this engine; a `Peer` is a program that speaks peer_protocol.py. Both return seconds.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenloom import Client, SamplingParams
from tokenloom.scripts.bench.processes import signal_tree
from tokenloom.scripts.bench.report import Report, median
from tokenloom.scripts.bench.workload import Workload

PEERS = Path(__file__).resolve().parent / "peers"
START_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 20.0
WARM_UP_TOKENS = 8


class Contestant(Protocol):
    """An engine under measurement; `name` labels its rows in a table."""

    name: str

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Return the seconds to generate exactly `max_tokens` greedy tokens for each prompt, all submitted at once."""
        ...

    def close(self) -> None: ...


class Ours:
    """This engine, behind its client."""

    def __init__(self, client: Client, name: str = "tokenloom", **params: Any) -> None:
        """Wrap `client`; `params` override the greedy sampling parameters."""
        self.name = name
        self._client = client
        self._params = SamplingParams(temperature=0.0, ignore_eos=True).replace(**params)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        params = self._params.replace(max_tokens=max_tokens)
        begun = time.perf_counter()
        outputs = self._client.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - begun
        lengths = {len(output.outputs[0].token_ids) for output in outputs}
        assert lengths == {max_tokens}, f"answers of {lengths} tokens, {max_tokens} were asked for"
        return seconds

    def close(self) -> None:
        self._client.close()


def measure_in_turn(
    contestants: Sequence[Contestant], workload: Workload, rounds: int, report: Report, heading: str = "engine"
) -> dict[str, list[float]]:
    """Warm up, then measure the contestants in turn in each round; return their seconds by name and report rows."""
    seconds: dict[str, list[float]] = {each.name: [] for each in contestants}
    for each in contestants:
        each.generate(workload.prompts("warm-up"), min(WARM_UP_TOKENS, workload.num_out))
    num_out = workload.num_requests * workload.num_out
    for number in range(rounds):
        for each in contestants:
            took = each.generate(workload.prompts(number), workload.num_out)
            seconds[each.name].append(took)
            rates = {"out_tokens_per_s": num_out / took}
            rates["all_tokens_per_s"] = (num_out + workload.num_requests * workload.num_in) / took
            report.add(round=number + 1, **{heading: each.name}, seconds=took, **rates)
    return seconds


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median of the rounds' ratios."""
    return median([one / other for one, other in zip(numerators, denominators, strict=True)])


class PeerFailed(Exception):
    """Error: a peer exited, missed its deadline or reported an error."""


class Peer:
    """A process that speaks peer_protocol.py. `facts` are those of its ready message.

    Between its answers it is stopped with all its children, since engines that only wait may still use processor time
    and caches of the one that is measured.
    """

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
            signal_tree(self.pid, signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        answer = self.ask({"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens})
        if answer["num_tokens"] != len(prompts) * max_tokens:
            wanted = len(prompts) * max_tokens
            raise PeerFailed(f"{self.name} generated {answer['num_tokens']} tokens, {wanted} were requested")
        return float(answer["seconds"])

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        signal_tree(self.pid, signal.SIGCONT)
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._read(ANSWER_TIMEOUT_S)
        signal_tree(self.pid, signal.SIGSTOP)
        return answer

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
        """Close the peer's stdin, which ends it; kill it after STOP_TIMEOUT_S."""
        assert self._process.stdin is not None and self._process.stdout is not None
        signal_tree(self.pid, signal.SIGCONT)
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def transformers_peer(folder: Path, dtype: str, device: str, threads: int, python: str = sys.executable) -> Peer:
    arguments = [str(folder), "--dtype", dtype, "--device", device, "--threads", str(threads)]
    return Peer("transformers", [python, str(PEERS / "transformers_peer.py"), *arguments])
