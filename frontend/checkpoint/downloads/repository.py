"""HubRepository: what the hub says of a repository: its files with their sizes, and the facts on its page.

The hub's client is imported only when a repository is asked for.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ....ipc.errors import ConfigError
from .cached import FOLDER_REMEDY

TIMEOUT_S = 20.0  # for the list of a repository
_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST)


class HubFile(NamedTuple):
    """A file of a repository."""

    name: str  # with the folders that it is in
    num_bytes: int
    etag: str  # of its content: SHA-256 of a large file, git's id of another; "": not known, nor is the size


class HubRepository(NamedTuple):
    """A repository at one commit. A fact that the hub does not name is None."""

    repository: str
    commit: str
    files: list[HubFile]
    license: str | None = None
    num_parameters: int | None = None
    architecture: str | None = None  # this and the next two are of GGUF files
    context_length: int | None = None
    chat_template: str | None = None

    @property
    def names(self) -> list[str]:
        return [file.name for file in self.files]


def ask_hub(repository: str, revision: str | None, token: str | None) -> HubRepository:
    """Ask the hub for a repository. Raises the errors of the hub's client and of its HTTP library."""
    from huggingface_hub import HfApi

    info = HfApi(token=token).model_info(repository, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
    files = [
        HubFile(each.rfilename, each.size or 0, _etag(each.lfs.sha256 if each.lfs else each.blob_id, each.size))
        for each in info.siblings or []
    ]
    gguf = info.gguf or {}
    count = gguf.get("total") or (info.safetensors.total if info.safetensors else None)
    named = getattr(info.card_data, "license", None)
    return HubRepository(
        repository,
        info.sha or "",
        files,
        license=named if isinstance(named, str) else None,
        num_parameters=count if isinstance(count, int) else None,
        architecture=gguf.get("architecture"),
        context_length=gguf.get("context_length"),
        chat_template=gguf.get("chat_template"),
    )


def _etag(found: str | None, size: int | None) -> str:
    """Return the etag of a file whose size is known; "" if the server, such as a mirror, does not tell."""
    return "" if found is None or size is None else found


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids to ask the hub."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@contextlib.contextmanager
def hub_errors(what: str, revision: str | None, cache: Path) -> Iterator[None]:
    """Turn errors of the hub's client and of its HTTP library into a ConfigError, which begins with `what` and says
    what to do. `cache`: where fetched models are."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except GatedRepoError:
        why = "the hub requires its licence to be accepted: do so on its page and give HF_TOKEN or --hf-token"
    except RepositoryNotFoundError:
        why = "it is neither a folder nor a repository of the hub; a private one needs HF_TOKEN or --hf-token"
    except RevisionNotFoundError:
        why = f"the hub has no revision {revision} of it"
    except ConfigError:
        raise
    except Exception as error:  # OSError, and errors of the HTTP library of the hub's client
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        if isinstance(error, OSError) and error.errno in _UNWRITABLE:
            why = f"its files cannot be kept in {cache} ({reason}): {FOLDER_REMEDY}"
        elif constants.HF_HUB_OFFLINE:
            why = f"it is no folder and not in {cache}; HF_HUB_OFFLINE forbids to fetch it: unset it, or give a folder"
        else:
            why = (
                f"it is no folder and cannot be fetched from {constants.ENDPOINT} ({reason}): check the network "
                "or give a folder; HF_ENDPOINT names a mirror, HF_TOKEN a key, HF_HUB_OFFLINE=1 uses the cache alone"
            )
    else:
        return
    raise ConfigError(f"{what}: {why}")
