"""`engine-launch batch IN OUT`: runs the requests of an OpenAI batch file and appends the responses to another file.

Each line of IN is {custom_id, method, url, body}; each line of OUT is {id, custom_id, response, error}, in order of
completion. Requests with a line in OUT, even an error, are skipped, so that a killed run can be continued; an
incomplete last line is cut off.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import http.client
import json
import secrets
import sys
import threading
import time
from codecs import BOM_UTF8
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO, NamedTuple
from urllib.parse import urlsplit

import msgspec
from tqdm import tqdm

from ...ipc.errors import ConfigError
from ..embedded.child_engine import ChildEngine
from ..launcher.engine_record import running_engines
from ..launcher.options.options import config_from_keywords
from .attach import add_api_key, announce_start
from .engines import StandardTerminal, check_address, engine_at, engine_meant, url_of
from .http_engine import message_of, new_connection

DESCRIPTION = (
    "Run the requests of an OpenAI batch file. After a kill, run the command again to continue.\n"
    "Exit code 0: every request succeeded; 1: some have errors."
)
EXAMPLES = [
    "in.jsonl out.jsonl",
    "in.jsonl out.jsonl --model Qwen/Qwen3-0.6B",
    "in.jsonl out.jsonl --url http://10.0.0.7:8000",
]
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses")
NUM_TRIES = 8  # of a request that gets 429, 503 or no response
LONGEST_WAIT_S = 30.0
ANSWER_TIMEOUT_S = 3600.0
LINE_PREFIX = b'{"id":"batch_req_'  # of every line of OUT


class BatchLine(msgspec.Struct, frozen=True):
    """One request of an OpenAI batch file."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class BatchBody(msgspec.Struct, frozen=True):
    """Fields of a body that ask for something else than one whole answer."""

    stream: object = None
    background: object = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", type=Path, metavar="IN", help="lines of {custom_id, method, url, body}")
    parser.add_argument("output", type=Path, metavar="OUT", help="file to which the responses are appended")
    help_text = "a running engine: http://…, or ipc://… or tcp://… of one on this machine; none: the one that runs"
    parser.add_argument("--url", "--address", metavar="URL", help=help_text)
    add_api_key(parser)
    parser.add_argument("--model", metavar="MODEL", help="start an engine for it, which ends with this command")
    parser.add_argument("--concurrency", type=int, default=64, metavar="N", help="requests at once (default: 64)")


def run(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.concurrency <= 1024:
        raise ConfigError(f"--concurrency must be in [1, 1024], got {arguments.concurrency}")
    lines = read_lines(arguments.input)
    if arguments.output.exists() and arguments.output.samefile(arguments.input):
        raise ConfigError(f"{arguments.output} is the file of the requests: give another file for the responses")
    with open(arguments.output, "ab+") as output:
        try:
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another batch is writing {output.name}: wait until it ends") from None
        done = read_done(output)
        todo = [line for line in lines if line.custom_id not in done]
        num_errors = sum(1 for line in lines if done.get(line.custom_id))
        if todo:
            with _server(arguments) as (url, api_key):
                num_errors += _run_all(todo, len(lines), output, url, api_key, arguments.concurrency)
    print(f"requests: {len(lines)}, with errors: {num_errors}, responses in {arguments.output}", file=sys.stderr)
    return 1 if num_errors else 0


def read_lines(path: Path) -> list[BatchLine]:
    """Read the requests of a batch file; ConfigError with the number of a line that is invalid, repeats a custom_id or
    does not ask for one whole answer."""
    lines: list[BatchLine] = []
    seen: set[str] = set()
    for number, raw in enumerate(path.read_bytes().removeprefix(BOM_UTF8).splitlines(), start=1):
        if not raw.strip():
            continue
        try:
            line = msgspec.json.decode(raw, type=BatchLine)
            body = msgspec.json.decode(line.body, type=BatchBody)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{path}:{number} is not a batch request: {error}") from None
        for name in body.__struct_fields__:
            if getattr(body, name) is True:
                raise ConfigError(
                    f"{path}:{number}: {name} is true, but a line of a batch gets one whole answer: leave it out"
                )
        if line.method != "POST" or line.url not in PATHS:
            raise ConfigError(
                f"{path}:{number}: {line.method} {line.url} is not served: POST one of {', '.join(PATHS)}"
            )
        if line.custom_id in seen:
            raise ConfigError(f"{path}:{number}: custom_id {line.custom_id!r:.80} is not unique")
        seen.add(line.custom_id)
        lines.append(line)
    return lines


def read_done(output: BinaryIO) -> dict[str, bool]:
    """Read the custom ids in `output`, True for each with an error, and cut off an incomplete last line.

    ConfigError for any other line that is not a response: the file belongs to something else.
    """
    output.seek(0)
    done: dict[str, bool] = {}
    end = 0
    for raw in output:
        try:
            value = json.loads(raw)
        except ValueError:
            value = None
        if not raw.endswith(b"\n") and LINE_PREFIX.startswith(raw[: len(LINE_PREFIX)]):
            break
        if not isinstance(value, dict) or not isinstance(value.get("custom_id"), str) or "response" not in value:
            raise ConfigError(f"the output is not a response after {end} bytes: {raw[:40]!r}; give another file")
        response = value.get("response") or {}
        done[value["custom_id"]] = bool(value.get("error")) or response.get("status_code") != 200
        end += len(raw)
    output.truncate(end)
    output.seek(end)
    return done


def _run_all(todo: list[BatchLine], total: int, output: BinaryIO, url: str, api_key: str | None, width: int) -> int:
    """Run `todo` in `width` daemon threads (Ctrl-C need not wait), append the responses, and count the errors."""
    waiting, responses = deque(todo), SimpleQueue[bytes]()

    def work() -> None:
        with contextlib.suppress(IndexError):
            while True:
                responses.put(run_line(waiting.popleft(), url, api_key))

    for _ in range(min(width, len(todo))):
        threading.Thread(target=work, daemon=True).start()
    num_errors = 0
    for _ in tqdm(todo, total=total, initial=total - len(todo), unit="request", disable=None):
        line = responses.get()
        output.write(line)
        output.flush()
        num_errors += b'"error":null' not in line[-20:]
    return num_errors


def run_line(line: BatchLine, url: str, api_key: str | None, sleep: Callable[[float], None] = time.sleep) -> bytes:
    """Run a request and return its line of OUT. An overloaded or lost engine is asked NUM_TRIES times at most; once an
    answer has come, the request is not generated again."""
    wait_s = 0.5
    for attempt in range(1, NUM_TRIES + 1):
        response = call("POST", url, line.url, bytes(line.body), api_key)
        if response.status not in (0, 429, 503) or attempt == NUM_TRIES:
            break
        sleep(min(response.retry_after_s or wait_s, LONGEST_WAIT_S))
        wait_s *= 2
    shown = {"status_code": response.status, "request_id": response.request_id, "body": msgspec.Raw(response.body)}
    error = {"code": str(response.status or "unreachable"), "message": response.reason} if response.reason else None
    result = {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": line.custom_id,
        "response": shown if response.status else None,
        "error": error,
    }
    return msgspec.json.encode(result) + b"\n"


class HttpResponse(NamedTuple):
    """Response to one HTTP request; status 0: no whole response."""

    status: int
    body: bytes = b"null"  # JSON in one line
    reason: str = ""  # of an error
    request_id: str = ""
    retry_after_s: float = 0.0


def call(method: str, url: str, path: str, body: bytes | None, api_key: str | None) -> HttpResponse:
    """Send one HTTP request. The result has the reason if the response is not a 200 with JSON."""
    parts = urlsplit(url)
    connection = new_connection(parts, ANSWER_TIMEOUT_S)
    headers = {"content-type": "application/json"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    try:
        connection.request(method, parts.path.rstrip("/") + path, body, headers)
        response = connection.getresponse()
        data = response.read()
    except (OSError, http.client.HTTPException) as error:
        return HttpResponse(0, reason=f"{url} does not answer: {error}")
    finally:
        connection.close()
    retry_after = response.headers.get("retry-after", "")
    answer = HttpResponse(
        response.status,
        request_id=response.headers.get("x-request-id", ""),
        retry_after_s=float(retry_after) if retry_after.isdecimal() else 0.0,
    )
    try:
        value = msgspec.json.decode(data or b"null")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        kind_of_body = response.headers.get("content-type", "no type")
        return answer._replace(reason=f"status {response.status} with {kind_of_body:.80}, which is not JSON: {error}")
    reason = "" if response.status == 200 else f"status {response.status}: {_message(value)}"
    return answer._replace(body=b" ".join((data or b"null").splitlines()), reason=reason)


def _message(value: object) -> str:
    """Return the message of an OpenAI error object, or `value` as text."""
    message = message_of(value)
    return str(value) if message is None else message


def _running_url(arguments: argparse.Namespace) -> str | None:
    """Return the URL of a running engine to use; None: start one. ConfigError if the engine meant has no HTTP."""
    engines = running_engines()
    if arguments.url is None:
        found = engine_meant(arguments.model, engines, StandardTerminal())
        if found is None:
            return None
        return url_of(found)
    if arguments.model is not None:
        raise ConfigError("--url and --model name two engines: give one of them")
    if check_address(arguments.url).startswith("http"):
        return str(arguments.url)
    if (found := engine_at(arguments.url, engines)) is None:
        raise ConfigError(f"no engine of this user serves at {arguments.url}: give the URL of its HTTP server")
    return url_of(found)


@contextlib.contextmanager
def _server(arguments: argparse.Namespace) -> Iterator[tuple[str, str | None]]:
    """Yield (url, key) of the engine at --url, of the one of this user that runs, or of a private engine that ends with
    the context."""
    if (url := _running_url(arguments)) is not None:
        response = call("GET", url, "/v1/models", None, arguments.api_key)
        if response.reason:
            raise ConfigError(response.reason)
        yield url, arguments.api_key
        return
    announce_start(arguments.model)
    key = secrets.token_hex(16)
    engine = ChildEngine(config_from_keywords("batch", arguments.model, {"http": "0", "api_key": key}))
    try:
        yield engine.http_address or "", key
    finally:
        engine.stop()
