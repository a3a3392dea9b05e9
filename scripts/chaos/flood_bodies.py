"""Send large HTTP bodies of every form beside four streams: /health stays fast, no stream stalls or breaks.

    python scripts/chaos/flood_bodies.py --megabytes 1 8 31

Starts an engine on the demo model with one compute thread. Sends the most expensive bodies to each endpoint: one text,
many texts, token ids, lists of one token, chats of one long and of many short messages, huge schemas, biases and tools,
a text to be truncated, and --answers answers in one request. Meanwhile one process requests /health fifty times a
second, and another one streams. Prints the statuses by form, the times of /health in ms, the longest gap between two
events of a stream, and whether the frontend was replaced. Exit code 1 if any of these is out of bounds.
"""

from __future__ import annotations

import http.client
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.bench.report import percentile, print_json
from tokenloom.scripts.bench.runner import read_options
from tokenloom.scripts.chaos import load_http
from tokenloom.scripts.chaos.hostile_bystander import Watch

ENGINE_FLAGS = ("--http", "0", "--device", "cpu", "--num-threads", "1")
HEALTH_LIMIT_MS = 200.0  # p99
GAP_LIMIT_S = 2.0  # between two events; the CPUs are shared with the senders and, at 31 MB, with tokenization
PROBE_INTERVAL_S = 0.02
NUM_STREAMS = 4
PATIENCE_S = 300.0
EXPECTED = (200, 400, 413, 503)  # served, or refused with a reason

Bodies = Iterator[tuple[str, str, bytes]]  # path, form, body


def bodies(megabytes: float) -> Bodies:
    """Yield one body of each form, of about this size."""
    size = int(megabytes * (1 << 20))
    text, ids = b"a " * (size // 2 - 100), b"1," * (size // 2 - 100) + b"1"
    many = b",".join([b'"%s"' % (b"a " * (size // 4096 - 8))] * 2047)
    single = b"[1]," * (size // 4 - 100) + b"[1]"
    turns = b'{"role":"user","content":"a"},' * (size // 30 - 10) + b'{"role":"user","content":"a"}'
    objects = b"{}," * (size // 3 - 200) + b"{}"
    bias = b",".join(b'"%d":1' % each for each in range(size // 12))
    completion, chat, embedding = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
    question = b'"messages":[{"role":"user","content":"a"}],"max_tokens":4'
    yield completion, "text", b'{"prompt":"%s"}' % text
    yield completion, "truncated text", b'{"prompt":"%s","truncate_prompt_tokens":16,"max_tokens":4}' % text
    yield completion, "token ids", b'{"prompt":[%s]}' % ids
    yield completion, "2047 texts", b'{"prompt":[%s],"max_tokens":1}' % many
    yield completion, "lists of one token", b'{"prompt":[%s],"max_tokens":1}' % single
    yield completion, "biases", b'{"prompt":"a","logit_bias":{%s}}' % bias
    yield completion, "schema", b'{"prompt":"a","guided_json":{"enum":[%s]}}' % objects
    yield chat, "one message", b'{"messages":[{"role":"user","content":"%s"}]}' % text
    yield chat, "many messages", b'{"messages":[%s],"max_tokens":4}' % turns
    yield (
        chat,
        "tools",
        b'{%s,"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":[%s]}}}]}' % (question, objects),
    )
    yield "/v1/responses", "text", b'{"input":"%s"}' % text
    yield "/v1/messages", "text", b'{"max_tokens":4,"messages":[{"role":"user","content":"%s"}]}' % text
    yield embedding, "text", b'{"input":"%s"}' % text
    yield embedding, "token ids", b'{"input":[%s]}' % ids
    yield "/tokenize", "text", b'{"prompt":"%s"}' % text
    yield "/tokenize", "many messages", b'{"messages":[%s]}' % turns
    yield "/detokenize", "token ids", b'{"tokens":[%s]}' % ids


def many_answers(num_answers: int) -> Bodies:
    """Yield one request for `num_answers` answers, in whole prompts of 128 answers."""
    fields = {"prompt": ["a"] * (num_answers // 128), "n": 128, "max_tokens": 1}
    yield "/v1/completions", f"{num_answers} answers", json.dumps(fields).encode()


def ask(url: str, path: str, body: bytes) -> tuple[int, str]:
    """Send a body; return the status and the beginning of the answer, or status 0 and the error without an answer."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=PATIENCE_S)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()[:300].decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def flood(sizes: Sequence[float], num_answers: int, only: str = "") -> dict[str, object]:
    with tempfile.TemporaryDirectory() as runtime, Engine(Path(runtime), ENGINE_FLAGS) as engine:
        engine.wait_ready()
        frontend = engine.child("frontend").pid
        prober = load_http.start_probe(engine.url, PROBE_INTERVAL_S)
        watch = Watch(engine.url, engine.address, NUM_STREAMS, 0, counts_first=False)
        answers: dict[str, str] = {}
        unexpected: list[str] = []
        try:
            forms = [
                *(each for size in sizes for each in bodies(size)),
                *(many_answers(num_answers) if num_answers else ()),
            ]
            for path, form, body in forms:
                if only not in f"{path} {form}":
                    continue
                begun = time.monotonic()
                status, text = ask(engine.url, path, body)
                name = f"{path}, {form}, {len(body) / (1 << 20):.1f} MB"
                answers[name] = f"{status} after {time.monotonic() - begun:.2f} s: {text[:160]}"
                print(name, answers[name], file=sys.stderr)
                if status not in EXPECTED:
                    unexpected.append(name)
            times_ms, failures = json.loads(prober.communicate(timeout=PATIENCE_S)[0])
            gaps, cut = watch.take()
            now = engine.find("frontend")
            was_replaced = now is None or now.pid != frontend
            code = engine.stop()
        finally:
            watch.close()
            prober.kill()
            prober.communicate()
    return {
        "answers": answers,
        "/health in ms": {"p50": statistics.median(times_ms), "p99": percentile(times_ms, 99), "max": max(times_ms)},
        "longest gap of a stream in s": max(gaps),
        "frontend was replaced": was_replaced,
        "failures": [*unexpected, *failures, *cut],
        "exit code": code,
    }


def is_clean(report: dict[str, object]) -> bool:
    health, gap_s = report["/health in ms"], report["longest gap of a stream in s"]
    assert isinstance(health, dict) and isinstance(gap_s, float)
    is_quick = health["p99"] <= HEALTH_LIMIT_MS and gap_s <= GAP_LIMIT_S
    return is_quick and not report["failures"] and not report["frontend was replaced"] and report["exit code"] == 0


OPTIONS = {
    "--megabytes": ([1.0, 8.0, 31.0],),
    "--answers": (16384, "0: no request for many answers"),
    "--only": ("", "send only the forms with this in path or name"),
}


def main(argv: list[str] | None = None) -> int:
    arguments = read_options(__doc__, OPTIONS, argv)
    report = flood(arguments.megabytes, arguments.answers, arguments.only)
    print_json(report, arguments.json)
    return 0 if is_clean(report) else 1


if __name__ == "__main__":
    sys.exit(main())
