"""Prompt and ProcessedRequest: a request's prompt as tokens, and the parts of a request that the core needs."""

from __future__ import annotations

import msgspec

from ....ipc.messages.client import Child
from ....ipc.messages.core import EngineCoreRequest
from ....ipc.messages.media import MediaSpan


class Prompt(msgspec.Struct, frozen=True):
    """Tokenized prompt. `text` is None if the prompt was given as token ids, or is a long chat that an intake process
    rendered."""

    token_ids: bytes
    text: str | None
    spans: list[MediaSpan] = []
    first_type_tokens: int | None = None  # as in PoolingParams


class ProcessedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a request that never changes, even if a process is replaced."""

    prompt: Prompt
    children: list[Child]  # at least one, with their seeds
    core: EngineCoreRequest  # without children; prompt + max_tokens ≤ max_model_len
