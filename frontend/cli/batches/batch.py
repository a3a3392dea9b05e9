"""`engine-launch batch IN OUT`: runs the requests of an OpenAI batch file and appends the responses to another file.

Each line of IN is {custom_id, method, url, body}; each line of OUT is {id, custom_id, response, error}. Requests with a
line in OUT, even an error, are skipped, so that a killed run can be continued; an incomplete last line is cut off. An
engine with a state folder runs them by itself, any other one at the requests of this process.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ....ipc.errors import ConfigError
from ...embedded.child_engine import ChildEngine
from ...launcher.engine_record import running_engines
from ...launcher.options.options import config_from_keywords
from ..attach import add_api_key, announce_start
from ..engines import StandardTerminal, check_address, engine_at, engine_meant, url_of
from .direct_run import Server, run_directly
from .http_call import call
from .line_files import RequestFile, read_done
from .stored_run import StoredRun, digest_of, has_batches

DESCRIPTION = (
    "Run the requests of an OpenAI batch file. After a kill, run the command again to continue.\n"
    "Exit code 0: every request succeeded; 1: some have errors."
)
EXAMPLES = [
    "in.jsonl out.jsonl",
    "in.jsonl out.jsonl --model Qwen/Qwen3-0.6B",
    "in.jsonl out.jsonl --url http://10.0.0.7:8000",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", type=Path, metavar="IN", help="lines of {custom_id, method, url, body}")
    parser.add_argument("output", type=Path, metavar="OUT", help="file to which the responses are appended")
    help_text = "a running engine: http://…, or ipc://… or tcp://… of one on this machine; none: the one that runs"
    parser.add_argument("--url", "--address", metavar="URL", help=help_text)
    add_api_key(parser)
    parser.add_argument("--model", metavar="MODEL", help="start an engine for it, which ends with this command")
    help_text = "requests at once, for an engine without --state-dir (default: 64)"
    parser.add_argument("--concurrency", type=int, default=64, metavar="N", help=help_text)


def run(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.concurrency <= 1024:
        raise ConfigError(f"--concurrency must be in [1, 1024], got {arguments.concurrency}")
    with contextlib.closing(RequestFile(arguments.input)) as requests:
        return _run(requests, arguments)


def _run(requests: RequestFile, arguments: argparse.Namespace) -> int:
    if arguments.output.exists() and arguments.output.samefile(arguments.input):
        raise ConfigError(f"{arguments.output} is the file of the requests: give another file for the responses")
    with open(arguments.output, "ab+") as output:
        try:
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another batch is writing {output.name}: wait until it ends") from None
        done = read_done(output)
        todo = [index for index, custom_id in enumerate(requests.custom_ids) if custom_id not in done]
        num_errors = sum(1 for custom_id in requests.custom_ids if done.get(custom_id))
        if todo:
            with _server(arguments) as server:
                if has_batches(server):
                    digest = digest_of(requests, str(arguments.output.resolve()))
                    StoredRun(server, digest, output, done, time.sleep).run(requests)
                    num_errors = sum(1 for custom_id in requests.custom_ids if done.get(custom_id, True))
                else:
                    num_errors += run_directly(requests, todo, output, server, arguments.concurrency)
    print(f"requests: {len(requests)}, with errors: {num_errors}, responses in {arguments.output}", file=sys.stderr)
    return 1 if num_errors else 0


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
def _server(arguments: argparse.Namespace) -> Iterator[Server]:
    """Yield the engine at --url, the one of this user that runs, or a private engine that ends with the context."""
    if (url := _running_url(arguments)) is not None:
        response = call("GET", url, "/v1/models", None, arguments.api_key)
        if response.reason:
            raise ConfigError(response.reason)
        yield Server(url, arguments.api_key)
        return
    announce_start(arguments.model)
    key = secrets.token_hex(16)
    engine = ChildEngine(config_from_keywords("batch", arguments.model, {"http": "0", "api_key": key}))
    try:
        yield Server(engine.http_address or "", key)
    finally:
        engine.stop()
