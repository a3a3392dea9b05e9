"""Format errors for Ollama's clients: a status and {"error": message}."""

from __future__ import annotations

import msgspec

from ..openai.errors import HttpError


class OllamaError(msgspec.Struct, frozen=True):
    error: str


def has_ollama_errors(path: str) -> bool:
    """Return whether the errors of this path have Ollama's form."""
    return path.startswith("/api/")


def ollama_error(error: HttpError) -> OllamaError:
    return OllamaError(str(error))
