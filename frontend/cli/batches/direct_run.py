"""Runs the requests of a batch one by one, from this process: for engines without a state folder."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import BinaryIO, NamedTuple

import msgspec
from tqdm import tqdm

from ....ipc.errors import ConfigError
from ...forms.openai.batches.line import BatchLine, OutputId, answered_line
from .http_call import NO_BODY, call
from .line_files import RequestFile, outcome_of

NUM_TRIES = 8  # of a request that gets 429, 503 or no response
LONGEST_WAIT_S = 30.0


class Server(NamedTuple):
    """The engine that a batch runs on."""

    url: str
    api_key: str | None


def run_directly(requests: RequestFile, todo: list[int], output: BinaryIO, server: Server, width: int) -> int:
    """Run the requests with these indices in `width` daemon threads (Ctrl-C need not wait), append the responses, and
    count the errors. ConfigError if the file of requests has changed."""
    waiting, responses = deque(todo), SimpleQueue[bytes | ConfigError]()

    def work() -> None:
        with contextlib.suppress(IndexError):
            while True:
                index = waiting.popleft()
                try:
                    responses.put(run_line(requests.line(index), server))
                except ConfigError as error:
                    responses.put(error)

    for _ in range(min(width, len(todo))):
        threading.Thread(target=work, daemon=True).start()
    num_errors = 0
    total = len(requests)
    for _ in tqdm(todo, total=total, initial=total - len(todo), unit="request", disable=None):
        line = responses.get()
        if isinstance(line, ConfigError):
            raise line
        output.write(line)
        output.flush()
        found = outcome_of(line)
        num_errors += found is None or found[1]
    return num_errors


def run_line(line: BatchLine, server: Server, sleep: Callable[[float], None] = time.sleep) -> bytes:
    """Run a request and return its line of OUT. An overloaded or lost engine is asked NUM_TRIES times at most; once an
    answer has come, the request is not generated again."""
    wait_s = 0.5
    for attempt in range(1, NUM_TRIES + 1):
        response = call("POST", server.url, line.url, bytes(line.body), server.api_key)
        if response.status not in (0, 429, 503) or attempt == NUM_TRIES:
            break
        sleep(min(response.retry_after_s or wait_s, LONGEST_WAIT_S))
        wait_s *= 2
    line_id = f"batch_req_{secrets.token_hex(12)}"
    if response.body != NO_BODY:  # an error in it is told there, as in the files of /v1/batches
        return answered_line(OutputId(line_id, line.custom_id), response.status, response.request_id, response.body)
    shown = {"status_code": response.status, "request_id": response.request_id, "body": None}
    error = {"code": str(response.status or "unreachable"), "message": response.reason or "the answer is empty"}
    result = {
        "id": line_id,
        "custom_id": line.custom_id,
        "response": shown if response.status else None,
        "error": error,
    }
    return msgspec.json.encode(result) + b"\n"
