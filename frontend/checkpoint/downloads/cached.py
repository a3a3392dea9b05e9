"""CachedRepository: the folder of one repository in the hub's cache, as huggingface_hub lays it out.

`blobs/` has each file under its etag, `snapshots/COMMIT/` links to them under their names, `refs/` the commit of a
branch. A blob that is not whole yet has a name of ours, which huggingface_hub counts as an unfinished download.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import msgspec

from ....ipc.errors import ConfigError
from ....ipc.process.machine_memory import gib
from ....ipc.spec.config.engine_config import EngineConfig

FOLDER_REMEDY = "give --download-dir or HF_HOME, a folder with room that this user can write"
PARTIAL = ".tokenloom.incomplete"
DEFAULT_REVISION = "main"


class _Tree(msgspec.Struct, frozen=True):
    """The list of a repository's files, as huggingface_hub keeps it."""

    files: dict[str, msgspec.Raw] = {}


class CachedRepository:
    """The folder of `repository`, which may be missing, below the cache folder of `config` or of the environment.
    ConfigError if that is the home of a user who has none."""

    def __init__(self, repository: str, config: EngineConfig) -> None:
        from huggingface_hub import constants

        cache = Path(config.download_dir or constants.HF_HUB_CACHE)
        try:
            self.cache = cache.expanduser().absolute()
        except RuntimeError:
            raise ConfigError(f"files of the hub cannot be kept in {cache}: no such home: {FOLDER_REMEDY}") from None
        self.folder = self.cache / f"models--{repository.replace('/', '--')}"

    def blob(self, etag: str) -> Path:
        return self.folder / "blobs" / etag

    def partial(self, etag: str) -> Path:
        """Return the path of a blob's part that an earlier download left; it need not exist."""
        return self.folder / "blobs" / f"{etag}{PARTIAL}"

    def snapshot(self, revision: str | None) -> Path | None:
        """Return the folder with the files of a branch, tag or commit; None if none was fetched."""
        name = revision or DEFAULT_REVISION
        if name.startswith("/") or ".." in name:
            return None
        try:
            commit = (self.folder / "refs" / name).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            commit = name
        folder = self.folder / "snapshots" / commit
        return folder if folder.is_dir() else None

    def listed(self, commit: str) -> list[str]:
        """Return the names of all files of the repository at a commit, downloaded or not, from the list that
        huggingface_hub has stored in the cache; empty if it stored none."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return [*msgspec.json.decode((self.folder / "trees" / f"{commit}.json").read_bytes(), type=_Tree).files]
        return []

    def remove_if_empty(self) -> None:
        """Remove the folder if it holds nothing yet."""
        with contextlib.suppress(OSError):  # it is not empty
            (self.folder / "blobs").rmdir()
            self.folder.rmdir()

    def check_room(self, num_bytes: int, what: str, free_bytes: int | None = None) -> None:
        """Raise ConfigError if the disk has no room for `num_bytes` more. free_bytes: None asks the disk."""
        if free_bytes is None:
            there = next(each for each in (self.cache, *self.cache.parents) if each.exists())
            free_bytes = shutil.disk_usage(there).free
        if num_bytes > free_bytes:
            raise ConfigError(
                f"{what} needs {gib(num_bytes)} more in {self.cache}, where {gib(free_bytes)} are free: free "
                f"{gib(num_bytes - free_bytes)} there, or name a folder of another disk with --download-dir or "
                "HF_HUB_CACHE"
            )


def files_in(snapshot: Path) -> list[str]:
    """Return the names of the files in a snapshot, relative to it, without links to blobs that are gone."""
    return sorted(str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file())
