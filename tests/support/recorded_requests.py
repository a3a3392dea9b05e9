"""Requests that other people's clients send, kept as forms in tests/clients/recorded: a file for each client.

A form has the fields, types and names of a body, and `…` for each text: prompts and descriptions are the clients' own,
and ids differ in each run. The nightly tests run the clients and compare the requests that they send with the forms;
the default run sends the forms, filled with short texts. `LOOM_RECORD=1` writes the files anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tokenloom.tests.support.recording_proxy import Exchange

FOLDER = Path(__file__).parents[1] / "clients" / "recorded"
TEXT = "…"
FILLING = "x"
LONGEST = 4  # tokens of an answer to a filled form
_LIMITS = ("max_tokens", "num_predict", "max_output_tokens")
_TEXTS = frozenset(  # fields whose text is left out
    (
        *("text", "content", "description", "instructions", "prompt", "input", "output", "arguments", "definition"),
        *("id", "call_id", "tool_call_id", "tool_use_id", "user_id", "prompt_cache_key", "signature", "thinking"),
        *("system", "images", "url", "data"),
    )
)
_OPAQUE = frozenset(("client_metadata", "metadata"))  # fields whose texts are all left out
_HEADERS = ("accept", "content-type", "anthropic-version", "anthropic-beta", "x-openai-internal-codex-responses-lite")


class RecordedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request's form, and the fields of its answer that the client reads."""

    method: str
    path: str
    headers: Mapping[str, str] = {}  # those that matter
    body: Any = None
    status: int = 200
    reads: list[str] = []  # paths of fields in the answer, or in one line of it; a number is an index

    @property
    def filled(self) -> Any:
        """The body with short texts, and for a short answer."""
        return _filled(self.body)


class RecordedClient(msgspec.Struct, frozen=True, kw_only=True):
    client: str
    version: str
    source: str  # where the requests are from
    requests: list[RecordedRequest]


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str) -> RecordedClient:
    return msgspec.json.decode((FOLDER / f"{name}.json").read_bytes(), type=RecordedClient)


def check_recorded(name: str, version: str, exchanges: Iterable[Exchange]) -> None:
    """Compare the requests that a client sent with the recorded ones; each form once, in any order."""
    known = load(name) if (FOLDER / f"{name}.json").exists() else None
    sent: dict[str, RecordedRequest] = {}
    for each in exchanges:
        headers = {key: each.headers[key] for key in _HEADERS if key in each.headers}
        form = RecordedRequest(
            method=each.method, path=each.path, headers=headers, body=form_of(each.body), status=each.status
        )
        sent[_key(form)] = form
    if os.environ.get("LOOM_RECORD"):
        _write(name, version, sent, known)
    known = load(name)
    assert (version, sorted(sent)) == (known.version, sorted(map(_key, known.requests)))


def form_of(value: Any, *, is_text: bool = False, is_opaque: bool = False) -> Any:
    """Return the form of a decoded JSON value."""
    if isinstance(value, dict):
        return {
            key: form_of(each, is_text=key in _TEXTS, is_opaque=is_opaque or key in _OPAQUE)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [form_of(each, is_text=is_text, is_opaque=is_opaque) for each in value]
    if isinstance(value, str) and (is_text or is_opaque):
        return TEXT
    return value


def _filled(form: Any) -> Any:
    if isinstance(form, dict):
        filled = {key: _filled(each) for key, each in form.items()}
        limits = {key: min(each, LONGEST) for key, each in filled.items() if key in _LIMITS and isinstance(each, int)}
        return filled | limits
    if isinstance(form, list):
        return [_filled(each) for each in form]
    return FILLING if form == TEXT else form


def _key(request: RecordedRequest) -> str:
    """Return the request as text, without the fields that the client reads."""
    return json.dumps(
        [request.method, request.path, dict(request.headers), request.body, request.status], sort_keys=True
    )


def _write(name: str, version: str, sent: Mapping[str, RecordedRequest], known: RecordedClient | None) -> None:
    """Write a client's file. The fields that it reads stay as they are for the same method and path."""
    before = {(each.method, each.path): each for each in (known.requests if known else ())}
    requests = []
    for each in sent.values():
        old = before.get((each.method, each.path), RecordedRequest(method="", path=""))
        requests.append(msgspec.structs.replace(each, reads=old.reads))
    client = known.client if known else name
    source = known.source if known else "sent by the client itself in a nightly test"
    written = RecordedClient(client=client, version=version, source=source, requests=requests)
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps(msgspec.to_builtins(written), ensure_ascii=False, indent=1)
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")
