"""`engine-launch batch IN OUT`: the requests of an OpenAI batch file, answered into another.

Each line of IN is {custom_id, method, url, body}; each line of OUT {id, custom_id, response, error}, in the order in
which answers come. What OUT holds already is not asked again, so that a run which was killed goes on where it was; a
line that was torn by the kill is cut off.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import secrets
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import msgspec
from tqdm import tqdm

from ..ipc.errors import ConfigError, EngineDead
from .cli_engine import new_parser, run_command

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses")
NUM_TRIES = 8  # of a request that is answered with 429 or 503, or not at all
LONGEST_WAIT_S = 30.0
ANSWER_TIMEOUT_S = 3600.0
BEGINNING = b'{"id":"batch_req_'  # of every line that is written here


class BatchLine(msgspec.Struct, frozen=True):
    """One request of the file."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


def batch(argv: Sequence[str]) -> int:
    """Exit code 0 when every request has an answer, 1 when some have errors."""
    parser = new_parser(
        "batch",
        "Answer the requests of an OpenAI batch file. Run it again after a kill: it goes on where it was.",
        [
            "in.jsonl out.jsonl",
            "in.jsonl out.jsonl --model ./Qwen3-0.6B",
            "in.jsonl out.jsonl --url http://10.0.0.7:8000",
        ],
    )
    parser.add_argument("input", type=Path, help="lines of {custom_id, method, url, body}")
    parser.add_argument("output", type=Path, help="is appended to")
    parser.add_argument("--url", metavar="URL", help="a running engine's --http address; none: start one")
    parser.add_argument("--api-key", metavar="KEY", help="what that engine got as --api-key")
    parser.add_argument("--model", metavar="MODEL", help="without --url: what to serve; none: the demo")
    parser.add_argument("--concurrency", type=int, default=64, metavar="N", help="requests at once (default: 64)")
    arguments = parser.parse_args(argv)
    return run_command("batch", lambda: _batch(arguments))


def _batch(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.concurrency <= 1024:
        raise ConfigError(f"--concurrency must be in [1, 1024], got {arguments.concurrency}")
    lines = read_lines(arguments.input)
    with open(arguments.output, "ab+") as output:
        done = take_up(output)
        todo = [line for line in lines if line.custom_id not in done]
        num_errors = sum(1 for line in lines if done.get(line.custom_id))
        if todo:
            with _server(arguments) as (url, api_key):
                num_errors += _run(todo, len(lines), output, url, api_key, arguments.concurrency)
    print(f"{len(lines)} requests, {num_errors} with errors: {arguments.output}", file=sys.stderr)
    return 1 if num_errors else 0


def read_lines(path: Path) -> list[BatchLine]:
    """The requests of a file; ConfigError names the line that is none."""
    lines: list[BatchLine] = []
    seen: set[str] = set()
    for number, raw in enumerate(path.read_bytes().splitlines(), start=1):
        if not raw.strip():
            continue
        try:
            line = msgspec.json.decode(raw, type=BatchLine)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}:{number} is no request of a batch: {error}") from None
        if line.method != "POST" or line.url not in PATHS:
            raise ConfigError(
                f"{path}:{number}: {line.method} {line.url} is not served: POST one of {', '.join(PATHS)}"
            )
        if line.custom_id in seen:
            raise ConfigError(f"{path}:{number}: custom_id {line.custom_id!r:.80} is there twice")
        seen.add(line.custom_id)
        lines.append(line)
    return lines


def take_up(output: BinaryIO) -> dict[str, bool]:
    """Which custom ids `output` has, and whether with an error. A last line that a kill has torn is cut off; what else
    is no answer is somebody's, and a ConfigError."""
    output.seek(0)
    done: dict[str, bool] = {}
    end = 0
    for raw in output:
        try:
            value = json.loads(raw)
        except ValueError:
            value = None
        if not raw.endswith(b"\n") and BEGINNING.startswith(raw[: len(BEGINNING)]):
            break
        if not isinstance(value, dict) or not isinstance(value.get("custom_id"), str):
            raise ConfigError(f"the output holds something else after {end} bytes: {raw[:40]!r}; give another file")
        response = value.get("response") or {}
        done[value["custom_id"]] = bool(value.get("error")) or response.get("status_code") != 200
        end += len(raw)
    output.truncate(end)
    output.seek(end)
    return done


def _run(todo: list[BatchLine], total: int, output: BinaryIO, url: str, api_key: str | None, width: int) -> int:
    """Returns how many answers are errors."""
    waiting, num_errors = deque(todo), 0
    bar = tqdm(total=total, initial=total - len(todo), unit="request", disable=None)
    with ThreadPoolExecutor(width) as pool, bar:
        open_: set[Future[bytes]] = set()
        while waiting or open_:
            while waiting and len(open_) < 2 * width:
                open_.add(pool.submit(ask, waiting.popleft(), url, api_key))
            finished, open_ = wait(open_, return_when=FIRST_COMPLETED)
            for future in finished:
                line = future.result()
                output.write(line)
                output.flush()
                num_errors += b'"error":null' not in line[-20:]
                bar.update()
    return num_errors


def ask(line: BatchLine, url: str, api_key: str | None) -> bytes:
    """The answer's line. An engine that is overloaded or away is asked again."""
    wait_s = 0.5
    for attempt in range(1, NUM_TRIES + 1):
        reason = ""
        try:
            status, request_id, retry_after, body = _post(line, url, api_key)
        except (OSError, http.client.HTTPException) as error:
            status, request_id, retry_after, body = 0, "", "", b"null"
            reason = f"{url} does not answer: {error}"
        if status not in (0, 429, 503) or attempt == NUM_TRIES:
            break
        time.sleep(min(float(retry_after) if retry_after.isdecimal() else wait_s, LONGEST_WAIT_S))
        wait_s *= 2
    is_error = status != 200
    answer = {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": line.custom_id,
        "response": {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)} if status else None,
        "error": {"code": str(status or "unreachable"), "message": reason or f"status {status}"} if is_error else None,
    }
    return msgspec.json.encode(answer) + b"\n"


def _post(line: BatchLine, url: str, api_key: str | None) -> tuple[int, str, str, bytes]:
    """(status, x-request-id, retry-after, body)."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=ANSWER_TIMEOUT_S)
    headers = {"content-type": "application/json"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    try:
        connection.request("POST", parts.path.rstrip("/") + line.url, bytes(line.body), headers)
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    json.loads(body or b"null")
    return answer.status, answer.headers.get("x-request-id", ""), answer.headers.get("retry-after", ""), body or b"null"


@contextmanager
def _server(arguments: argparse.Namespace) -> Iterator[tuple[str, str | None]]:
    """(url, key) of the running engine, or of one that lives as long as this."""
    if arguments.url is not None:
        if not arguments.url.startswith("http://"):
            raise ConfigError(f"--url {arguments.url} must begin with http://")
        yield arguments.url, arguments.api_key
        return
    key = secrets.token_hex(16)
    command = [sys.executable, "-m", "tokenloom.frontend.launch", "--http", "0", "--api-key", key]
    command += [] if arguments.model is None else ["--model", os.path.abspath(arguments.model)]
    lifeline, our_end = os.pipe()
    process = subprocess.Popen(
        [*command, "--lifeline-fd", str(lifeline)], stdout=subprocess.PIPE, cwd="/", pass_fds=[lifeline], text=True
    )
    os.close(lifeline)
    try:
        assert process.stdout is not None
        ready = next((line for line in process.stdout if line.startswith("Ready")), None)
        if ready is None:
            raise EngineDead(f"the engine did not start: exit code {process.wait()}, its reason is above")
        yield next(word for word in ready.split() if word.startswith("http://")), key
    finally:
        process.terminate()
        process.wait()
        os.close(our_end)
