"""check_operator: refuses requests about the whole engine that come with the key of one caller among others."""

from __future__ import annotations

from ...forms.openai.errors import HttpError
from .continuation import current


def check_operator() -> None:
    """Raise HttpError 403 if the request carries a key with a name, which is that of one caller among others."""
    key = current().api_key
    if key is not None and key.name:
        raise HttpError(403, f"key {key.name} may not control the engine: send one of --api-key, which has no name")
