"""Kill every process of an engine while it runs a batch: each line is answered once, as in a calm run.

    python scripts/chaos/batch_kills.py --lines 1000 --kills 20

The engine (--deterministic, float32, --state-dir) runs a batch of --lines chats of up to --tokens tokens in peace, and
then once more while core, worker, frontend and supervisor are killed in turn, each a random moment after the last one
is back. After the supervisor everything has ended, and the same command starts the engine again. Prints how many lines
are missing, double or different, how many tokens each run has computed, and the longest time without a ready frontend.
Exit code 1 if a line is, or if the tokens are more than --most times those of the calm run.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import httpx2
import openai

from tokenloom.scripts.bench.engine_process import Engine, is_alive
from tokenloom.scripts.bench.report import print_json
from tokenloom.scripts.bench.runner import read_options
from tokenloom.tests.support.waiting import wait_until

ENGINE_FLAGS = ("--http", "0", "--device", "cpu", "--num-threads", "1", "--deterministic", "--dtype", "float32")
VICTIMS = ("core", "worker 0", "frontend", "supervisor")
ENDPOINT = "/v1/chat/completions"
GENERATED = re.compile(r"^tokenloom_generation_tokens_total\S* (\S+)$", re.MULTILINE)
PATIENCE_S = 120.0
BATCH_S = 1800.0
OVER = ("completed", "failed", "expired", "cancelled")
Report: TypeAlias = dict[str, object]


class Storm(NamedTuple):
    """A batch and the kills during its second run."""

    lines: int
    kills: int
    tokens: int  # of each answer, at most
    seed: int  # of victims' moments
    pause_s: float  # longest time between a process's return and the next kill


class Outcome(NamedTuple):
    """Files, counts and costs of one run of the batch."""

    lines: list[dict[str, Any]]  # of both files
    counts: dict[str, int]
    tokens: float  # computed
    seconds: float


class Computed:
    """Tokens that an engine has computed, over the ends of its frontends. Each counts from 0."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._before, self._last = engine, 0.0, 0.0

    def read(self) -> float:
        """Return the tokens so far. Called just before a frontend ends, and often enough to notice its successor."""
        try:
            text = httpx2.get(f"{self._engine.url}/metrics", timeout=PATIENCE_S).text
        except httpx2.HTTPError:
            return self._before + self._last
        now = sum(map(float, GENERATED.findall(text)))
        if now < self._last:
            self._before += self._last
        self._last = now
        return self._before + now


def request_line(index: int, tokens: int) -> dict[str, Any]:
    """Return a line: greedy, drawn, with logprobs, or with two answers."""
    body: dict[str, Any] = {
        "model": "tokenloom-demo",
        "messages": [{"role": "user", "content": f"Tell me about the number {index}, please."}],
        "max_tokens": tokens // 2 + index % (tokens // 2 + 1),
        "ignore_eos": True,
        "temperature": index % 2,
    }
    if index % 2:
        body["seed"] = index
    if index % 5 == 1:
        body["logprobs"] = True
    if index % 7 == 1:
        body["n"] = 2
    return {"custom_id": f"line {index}", "method": "POST", "url": ENDPOINT, "body": body}


def input_file(storm: Storm) -> bytes:
    lines = [request_line(index, storm.tokens) for index in range(storm.lines)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def client_of(engine: Engine) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=20, timeout=PATIENCE_S)


def run_batch(engine: Engine, storm: Storm, num_kills: int) -> tuple[Outcome, Counter[str], float]:
    """Run the batch under kills; return the outcome, the kills by victim, and the longest pause in seconds."""
    client, computed = client_of(engine), Computed(engine)
    begun, tokens_before = time.monotonic(), computed.read()
    file = client.files.create(file=("batch.jsonl", input_file(storm)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
    draw, kills, longest_s = random.Random(storm.seed), Counter[str](), 0.0
    while batch.status not in OVER:
        assert time.monotonic() - begun < BATCH_S, f"the batch is still {batch.status}"
        time.sleep(draw.uniform(0.3, 1.0) * storm.pause_s if num_kills else 0.2)
        if num_kills > kills.total() and batch.status == "in_progress":
            victim = VICTIMS[kills.total() % len(VICTIMS)]
            kills[victim] += 1
            longest_s = max(longest_s, kill(engine, victim, computed))
            client = client_of(engine)
        computed.read()
        batch = client.batches.retrieve(batch.id)
    counts = batch.request_counts.model_dump() if batch.request_counts is not None else {}
    lines = [
        json.loads(line)
        for file_id in (batch.output_file_id, batch.error_file_id)
        if file_id is not None
        for line in client.files.content(file_id).read().splitlines()
    ]
    seconds = time.monotonic() - begun
    return Outcome(lines, counts, computed.read() - tokens_before, seconds), kills, longest_s


def kill(engine: Engine, victim: str, computed: Computed) -> float:
    """Kill a process; return the seconds until it, or the whole engine, is back."""
    process = engine.child(victim)
    computed.read()
    begun = time.monotonic()
    if victim == "supervisor":
        everything = engine.processes()
        process.kill()
        wait_until(lambda: not any(map(is_alive, everything)), f"a process lives after {victim}", PATIENCE_S)
        engine.start_again(PATIENCE_S)
    else:
        num_back = engine.log().count(f"supervisor: {victim} is back")
        process.kill()
        engine.wait_log(f"supervisor: {victim} is back", num_back + 1, PATIENCE_S)
    return time.monotonic() - begun


def comparable(line: dict[str, Any]) -> Any:
    """Return the parts that are equal in two runs: all but ids, times, and the numbers of cached and drafted tokens."""
    response = line["response"]
    body = {name: value for name, value in (response or {}).get("body", {}).items() if name not in ("id", "created")}
    usage = {name: value for name, value in body.pop("usage", {}).items() if not name.endswith("_details")}
    return line["error"], response and response["status_code"], body, usage


def compare(calm: Outcome, stormy: Outcome) -> Report:
    """Return the lines that are missing, double or different, and the tokens of both runs."""
    num_seen = Counter(line["custom_id"] for line in stormy.lines)
    before = {line["custom_id"]: comparable(line) for line in calm.lines}
    after = {line["custom_id"]: comparable(line) for line in stormy.lines}
    different = [name for name in before if name in after and before[name] != after[name]]
    order = [line["custom_id"] for line in calm.lines] == [line["custom_id"] for line in stormy.lines]
    return {
        "lines": len(stormy.lines),
        "missing": len(before.keys() - after.keys()),
        "double": sum(count > 1 for count in num_seen.values()),
        "different": len(different),
        "same order": order,
        "counts": stormy.counts,
        "tokens in peace": calm.tokens,
        "tokens under kills": stormy.tokens,
        "ratio of tokens": round(stormy.tokens / max(calm.tokens, 1), 4),
        "seconds in peace": round(calm.seconds, 1),
        "seconds under kills": round(stormy.seconds, 1),
        "first different": different[:5],
    }


def measure(storm: Storm) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        flags = (*ENGINE_FLAGS, "--state-dir", f"{folder}/state")
        runtime = Path(folder, "run")
        runtime.mkdir()
        with Engine(runtime, flags) as engine:
            engine.wait_ready()
            calm, _, _ = run_batch(engine, storm, 0)
            stormy, kills, longest_s = run_batch(engine, storm, storm.kills)
            report = compare(calm, stormy) | {"kills": dict(kills), "longest pause in s": round(longest_s, 1)}
            return report | {"exit code": engine.stop()}


OPTIONS = {
    "--lines": (1000,),
    "--kills": (20,),
    "--tokens": (100,),
    "--seed": (0,),
    "--pause": (4.0,),
    "--most": (1.05,),
}


def main(argv: list[str] | None = None) -> int:
    arguments = read_options(__doc__, OPTIONS, argv)
    report = measure(Storm(arguments.lines, arguments.kills, arguments.tokens, arguments.seed, arguments.pause))
    print_json(report, arguments.json)
    faults = ("missing", "double", "different", "exit code")
    is_clean = not any(report[name] for name in faults) and report["same order"] and report["lines"] == arguments.lines
    ratio = report["ratio of tokens"]
    assert isinstance(ratio, float)
    return 0 if is_clean and ratio <= arguments.most else 1


if __name__ == "__main__":
    sys.exit(main())
