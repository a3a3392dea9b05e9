"""Runs the requests of a batch in the engine, through /v1/files and /v1/batches: for engines with a state folder.

The engine goes on without this process, and after its own restart. A batch is found again by a digest of IN in its
metadata, as long as its files are there; they are deleted once OUT has all their lines.
"""

from __future__ import annotations

import hashlib
import http.client
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO
from urllib.parse import quote

import msgspec
from tqdm import tqdm

from ....ipc.errors import ConfigError
from ...forms.openai.batches.batch import Batch
from .direct_run import Server
from .http_call import Body, HttpResponse, call, opened
from .line_files import RequestFile, outcome_of

DIGEST = "engine-launch-batch"  # key of the metadata
WINDOW = "30d"
POLL_S = 1.0
PATIENCE_S = 600.0  # with an engine that does not answer

_LIVING = ("validating", "in_progress", "finalizing", "completed")


class _Page(msgspec.Struct, frozen=True):
    """A page of the list of batches."""

    data: list[Batch]
    has_more: bool = False


class _File(msgspec.Struct, frozen=True):
    """An uploaded file."""

    id: str


def has_batches(server: Server) -> bool:
    """Return whether an engine keeps batches."""
    return call("GET", server.url, "/v1/batches?limit=1", None, server.api_key).status == 200


class StoredRun:
    """The batches of one IN and OUT, one for each url. Their lines are appended to `output`, each once."""

    def __init__(
        self, server: Server, digest: str, output: BinaryIO, done: dict[str, bool], sleep: Callable[[float], None]
    ) -> None:
        """`digest`: of the requests and of OUT. `done`: the custom ids in `output`, True for each with an error."""
        self._server, self._digest, self._output, self._done, self._sleep = server, digest, output, done, sleep

    def run(self, requests: RequestFile) -> None:
        """Run the requests that are not done, and append their responses. ConfigError if the engine refuses or fails
        them as a whole."""
        for url in dict.fromkeys(sorted(requests.urls)):
            of_url = [index for index, each in enumerate(requests.urls) if each == url]
            wanted = {requests.custom_ids[index] for index in of_url}
            before = self._find(url)
            if before is not None:
                self._finish(before, wanted)
            todo = [index for index in of_url if requests.custom_ids[index] not in self._done]
            if todo:
                self._finish(self._create(url, Upload(requests, todo)), wanted)

    def _find(self, url: str) -> Batch | None:
        """Return the batch that an earlier run has created, if its results can still be had."""
        for batch in self._batches():
            is_ours = (batch.metadata or {}).get(DIGEST) == self._digest and batch.endpoint == url
            if is_ours and batch.status in _LIVING:
                is_there = batch.status != "completed" or all(map(self._exists, _files_of(batch)))
                return batch if is_there else None
        return None

    def _batches(self) -> Iterator[Batch]:
        after = ""
        while True:
            page = msgspec.json.decode(self._ask("GET", f"/v1/batches?limit=100{after}").body, type=_Page)
            yield from page.data
            if not page.has_more:
                return
            after = f"&after={quote(page.data[-1].id)}"

    def _exists(self, file_id: str) -> bool:
        return call("GET", self._server.url, f"/v1/files/{quote(file_id)}", None, self._server.api_key).status == 200

    def _create(self, url: str, upload: Upload) -> Batch:
        kind = f"multipart/form-data; boundary={upload.boundary}"
        uploaded = self._ask("POST", "/v1/files", upload, kind)
        request = {
            "input_file_id": msgspec.json.decode(uploaded.body, type=_File).id,
            "endpoint": url,
            "completion_window": WINDOW,
            "metadata": {DIGEST: self._digest},
        }
        created = self._ask("POST", "/v1/batches", msgspec.json.encode(request))
        return msgspec.json.decode(created.body, type=Batch)

    def _finish(self, batch: Batch, wanted: set[str]) -> None:
        """Wait for the end of a batch, append the lines with the `wanted` ids that OUT lacks, and delete its files."""
        batch = self._wait(batch)
        if batch.errors is not None and batch.errors.data:
            fault = batch.errors.data[0]
            raise ConfigError(f"{batch.id} has failed: line {fault.line}: {fault.message}")
        for file_id in _files_of(batch):
            self._append(file_id, wanted)
        for file_id in (batch.input_file_id, *_files_of(batch)):
            call("DELETE", self._server.url, f"/v1/files/{quote(file_id)}", None, self._server.api_key)

    def _wait(self, batch: Batch) -> Batch:
        """Ask for the batch until it is over."""
        print(f"{batch.id} goes on in the engine; to wait again, repeat the command", file=sys.stderr)
        path = f"/v1/batches/{quote(batch.id)}"
        with tqdm(total=batch.request_counts.total or None, unit="request", disable=None) as bar:
            while True:
                counts = batch.request_counts
                bar.total = counts.total
                bar.update(counts.completed + counts.failed - bar.n)
                if batch.status in ("completed", "failed", "expired", "cancelled"):
                    return batch
                self._sleep(POLL_S)
                batch = msgspec.json.decode(self._ask("GET", path).body, type=Batch)

    def _append(self, file_id: str, wanted: set[str]) -> None:
        """Append the lines of a file that OUT lacks."""
        path = f"/v1/files/{quote(file_id)}/content"
        try:
            with opened("GET", self._server.url, path, None, self._server.api_key) as response:
                if response.status != 200:
                    raise ConfigError(f"{file_id} cannot be read: status {response.status}")
                for raw in response:
                    found = outcome_of(raw)
                    if found is not None and found[0] in wanted and found[0] not in self._done:
                        self._done[found[0]] = found[1]
                        self._output.write(raw)
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"{self._server.url} does not answer: {error}: repeat the command") from None
        self._output.flush()

    def _ask(self, method: str, path: str, body: Body = None, content_type: str = "application/json") -> HttpResponse:
        """Return the answer of status 200; ConfigError for another one. An engine that does not answer, or is busy, is
        asked again for PATIENCE_S."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            answer = call(method, self._server.url, path, body, self._server.api_key, content_type)
            if answer.status == 200:
                return answer
            if answer.status not in (0, 503) or time.monotonic() > deadline:
                raise ConfigError(f"{method} {path}: {answer.reason}")
            self._sleep(max(answer.retry_after_s, POLL_S))


class Upload:
    """The form with requests as the file of a batch. It is read from the file of requests as it is sent, and may be
    sent again."""

    def __init__(self, requests: RequestFile, indices: Sequence[int]) -> None:
        self._requests, self._indices = requests, indices
        self.boundary = secrets.token_hex(16)
        head = (
            f'--{self.boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{self.boundary}\r\nContent-Disposition: form-data; name="file"; filename="batch.jsonl"\r\n\r\n'
        )
        self._head, self._tail = head.encode(), f"\r\n--{self.boundary}--\r\n".encode()

    @property
    def num_bytes(self) -> int:
        lines = sum(self._requests.num_bytes(index) + 1 for index in self._indices)
        return len(self._head) + lines + len(self._tail)

    def __iter__(self) -> Iterator[bytes]:
        yield self._head
        for index in self._indices:
            yield self._requests.raw(index) + b"\n"
        yield self._tail


def digest_of(requests: RequestFile, output_path: str) -> str:
    """Return the same text for the same requests and the same OUT alone."""
    found = hashlib.sha256(output_path.encode(errors="surrogateescape"))
    for index in range(len(requests)):
        found.update(msgspec.json.encode(requests.line(index)) + b"\n")
    return found.hexdigest()


def _files_of(batch: Batch) -> list[str]:
    return [each for each in (batch.output_file_id, batch.error_file_id) if each is not None]
