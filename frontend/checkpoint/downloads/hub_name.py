"""HubName: a model of the Hugging Face hub as people write it: owner/name, owner/name:Q4_K_M, or the address of a page.

Knows only the forms of names: asks neither the hub nor its cache.
"""

from __future__ import annotations

import re
from typing import NamedTuple

SUFFIX = ".gguf"  # of the file that an address names
_HOST = re.compile(r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/", re.IGNORECASE)
_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+))?")  # after the colon: a part of a GGUF file's name
_PAGE = re.compile(r"(\w[\w.-]*/\w[\w.-]*)/(?:tree|blob|resolve)/([\w.-]+)(?:/([\w./-]+))?")  # revision, file
_TAGGED = re.compile(r"(\w[\w.-]*):([\w.-]+)")


class HubName(NamedTuple):
    """A repository, and what is wanted of it."""

    repository: str  # owner/name
    part: str | None = None  # a GGUF file's path, or a word in its name such as Q4_K_M; None: the usual choice
    revision: str | None = None  # None: the default branch

    def __str__(self) -> str:
        return self.repository if self.part is None else f"{self.repository}:{self.part}"


def parse_hub_name(text: str) -> HubName | None:
    """Return the model that `text` names, None if it has none of the forms. The addresses of a repository's page, of
    its branch and of a GGUF file in it are names, too; `:latest` means no particular file."""
    host = _HOST.match(text)
    if host is not None:
        text = text[host.end() :].partition("?")[0].partition("#")[0].rstrip("/")
        if (page := _PAGE.fullmatch(text)) is not None:
            repository, revision, file = page.groups()
            is_gguf = file is not None and file.endswith(SUFFIX)
            return HubName(repository, file if is_gguf else None, None if revision == "main" else revision)
    found = _ID.fullmatch(text)
    if found is None:
        return None
    repository, part = found.groups()
    return HubName(repository, None if part is None or part.lower() == "latest" else part)


def not_of_the_hub(text: str) -> str | None:
    """Return the message for a name of Ollama's library, NAME:TAG without an owner; None if `text` is none."""
    found = _TAGGED.fullmatch(text)
    if found is None:
        return None
    return (
        f"{text} is a name of Ollama's library, which is not read here: give a repository of the hub with GGUF files, "
        "as hf.co/OWNER/NAME:Q4_K_M, or a GGUF file"
    )
