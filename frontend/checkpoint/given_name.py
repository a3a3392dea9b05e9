"""The model as the operator gave it: its name in requests, and in messages in place of a folder of a cache."""

from __future__ import annotations

import os
from pathlib import Path

from .downloads.hub_name import parse_hub_name


def default_name(model: str | None) -> str:
    """Return the name in requests of a model without --served-model-name: as the operator gave it, but the repository's
    for the address of a page."""
    page = parse_hub_name(model) if model is not None and "://" in model else None
    return str(page) if page is not None else model or "tokenloom-demo"


def name_as_given(message: str, given: str | None, folder: Path) -> str:
    """Return a message with the model as the operator gave it in place of `folder`, in which its files are: that of the
    hub's cache, or the one that was made for a GGUF file."""
    if given is None or os.path.realpath(given) == str(folder):
        return message
    return message.replace(f"{folder}/", f"{given}: ").replace(str(folder), given)
