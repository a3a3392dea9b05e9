"""The files of `engine-launch batch`: the requests of IN, and the responses that OUT holds already."""

from __future__ import annotations

import io
import json
import os
import stat
import threading
from codecs import BOM_UTF8
from pathlib import Path
from typing import BinaryIO

from ....ipc.errors import ConfigError
from ...forms.openai.batches.line import BatchLine, LineFault, read_line

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses")
LINE_PREFIX = b'{"id":"batch_req_'  # of every line of OUT


class RequestFile:
    """The requests of a batch file, in order. Only their ids and places are in memory, but for a file that cannot be
    read twice, such as a pipe. Any thread may read a line, until `close`."""

    def __init__(self, path: Path) -> None:
        """Check all lines. ConfigError with the number of a line that is invalid, repeats a custom_id or does not ask
        for one whole answer."""
        self._path, self._lock = path, threading.Lock()
        self._file: BinaryIO = open(path, "rb")  # noqa: SIM115 - it is open as long as this object
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            with self._file as pipe:
                self._file = io.BytesIO(pipe.read())
        self.custom_ids: list[str] = []
        self.urls: list[str] = []
        self._places: list[tuple[int, int]] = []  # offset and length in bytes, without the line's end
        try:
            self._find_lines()
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _find_lines(self) -> None:
        seen: set[str] = set()
        offset = 0
        for number, whole in enumerate(self._file, start=1):
            begin = offset + len(BOM_UTF8) * (number == 1 and whole.startswith(BOM_UTF8))
            raw = whole[begin - offset :].rstrip()
            offset += len(whole)
            if not raw:
                continue
            line = read_line(raw)
            if isinstance(line, LineFault):
                raise ConfigError(f"{self._path}:{number} is not a batch request: {line.message}")
            if line.url not in PATHS:
                raise ConfigError(
                    f"{self._path}:{number}: {line.url:.200} is not served: POST one of {', '.join(PATHS)}"
                )
            if line.custom_id in seen:
                raise ConfigError(f"{self._path}:{number}: custom_id {line.custom_id!r:.80} is not unique")
            seen.add(line.custom_id)
            self.custom_ids.append(line.custom_id)
            self.urls.append(PATHS[PATHS.index(line.url)])
            self._places.append((begin, len(raw)))

    def __len__(self) -> int:
        return len(self._places)

    def num_bytes(self, index: int) -> int:
        """Return the length of `raw(index)`."""
        return self._places[index][1]

    def raw(self, index: int) -> bytes:
        """Return the bytes of a request, without the line's end."""
        offset, length = self._places[index]
        with self._lock:
            self._file.seek(offset)
            return self._file.read(length)

    def line(self, index: int) -> BatchLine:
        """Return a request. ConfigError if the file has changed."""
        line = read_line(self.raw(index))
        if isinstance(line, LineFault) or line.custom_id != self.custom_ids[index]:
            raise ConfigError(f"{self._path} has changed since it was checked: repeat the command")
        return line


def read_done(output: BinaryIO) -> dict[str, bool]:
    """Read the custom ids in `output`, True for each with an error, and cut off an incomplete last line.

    ConfigError for any other line that is not a response: the file belongs to something else.
    """
    output.seek(0)
    done: dict[str, bool] = {}
    end = 0
    for raw in output:
        if not raw.endswith(b"\n") and LINE_PREFIX.startswith(raw[: len(LINE_PREFIX)]):
            break
        found = outcome_of(raw)
        if found is None:
            raise ConfigError(f"the output is not a response after {end} bytes: {raw[:40]!r}; give another file")
        custom_id, has_error = found
        done[custom_id] = has_error
        end += len(raw)
    output.truncate(end)
    output.seek(end)
    return done


def outcome_of(raw: bytes) -> tuple[str, bool] | None:
    """Return the custom id of a response's line, and whether it is an error; None if it is no such line."""
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("custom_id"), str) or "response" not in value:
        return None
    response = value.get("response") or {}
    return value["custom_id"], bool(value.get("error")) or response.get("status_code") != 200
