"""Format errors for Ollama's clients: a status and {"error": message}."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..field import means
from ..openai.errors import HttpError


class OllamaError(msgspec.Struct, frozen=True):
    """Answer to a request that failed, in Ollama's form."""

    error: Annotated[str, means("What happened, with the numbers, and what to do.")]


def has_ollama_errors(path: str) -> bool:
    """Return whether the errors of this path have Ollama's form."""
    return path.startswith("/api/")


def ollama_error(error: HttpError) -> OllamaError:
    return OllamaError(str(error))
