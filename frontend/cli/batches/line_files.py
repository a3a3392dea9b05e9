"""The files of `engine-launch batch`: the requests of IN, and the responses that OUT holds already."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import BinaryIO

from ....ipc.errors import ConfigError
from ...forms.openai.batches.line import BatchLine, LineFault, read_line

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses")
LINE_PREFIX = b'{"id":"batch_req_'  # of every line of OUT


def read_lines(path: Path) -> list[BatchLine]:
    """Read the requests of a batch file; ConfigError with the number of a line that is invalid, repeats a custom_id or
    does not ask for one whole answer."""
    lines: list[BatchLine] = []
    seen: set[str] = set()
    for number, raw in enumerate(path.read_bytes().removeprefix(BOM_UTF8).splitlines(), start=1):
        if not raw.strip():
            continue
        line = read_line(raw)
        if isinstance(line, LineFault):
            raise ConfigError(f"{path}:{number} is not a batch request: {line.message}")
        if line.url not in PATHS:
            raise ConfigError(f"{path}:{number}: {line.url:.200} is not served: POST one of {', '.join(PATHS)}")
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
