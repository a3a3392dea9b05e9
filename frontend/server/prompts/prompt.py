"""A request's prompt as tokens, and what the core is to know of the request."""

from __future__ import annotations

import msgspec

from ....ipc.messages.client import Child
from ....ipc.messages.core import EngineCoreRequest
from ....ipc.messages.media import MediaSpan


class Prompt(msgspec.Struct, frozen=True):
    """Tokenized prompt. `text`: None for token ids, and for a long chat that an intake process rendered."""

    token_ids: bytes
    text: str | None
    spans: list[MediaSpan] = []


class ProcessedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a request that never changes, not even when a process is replaced."""

    prompt: Prompt
    children: list[Child]  # at least one, with their seeds
    core: EngineCoreRequest  # without children; prompt + max_tokens ≤ max_model_len
