"""CachedModel: a model in the hub's cache, with its size, its last use and its files; and the removal of one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ....ipc.errors import ConfigError
from ....ipc.spec.config.engine_config import EngineConfig
from ..gguf.choice import all_parts, chosen_first, first_parts, named_firsts, tag_of
from .cached import DEFAULT_REVISION, CachedRepository
from .hub_name import HubName

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRepoInfo, CachedRevisionInfo


class CachedModel(NamedTuple):
    """Model in the hub's cache, or a download that has not ended. `name` is the name by which it can be served; in a
    repository each GGUF file, with all its parts, is a model of its own."""

    name: HubName
    num_bytes: int  # on the disk
    used_at: float  # unix seconds of the last read of a file
    snapshot: Path | None = None  # None: a download that has not come to an end
    first: str | None = None  # the GGUF file, or its first part, in the snapshot; None: safetensors
    blobs: tuple[Path, ...] = ()  # its files in the cache, to which the snapshot has links

    @property
    def place(self) -> Path | None:
        """The path of the model's file or folder."""
        if self.snapshot is None or self.first is None:
            return self.snapshot
        return self.snapshot / self.first


def cached_models(config: EngineConfig) -> list[CachedModel]:
    """Return the models in the hub's cache, in order of name: each GGUF file by itself. Of several revisions with the
    same model the main one counts. A damaged repository is left out."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    cache = CachedRepository("", config).cache
    try:
        found = scan_cache_dir(cache)
    except CacheNotFound:
        return []
    models: dict[HubName, CachedModel] = {}
    for repository in found.repos:
        if repository.repo_type != "model":
            continue
        for revision in sorted(repository.revisions, key=_comes_first):
            listed = CachedRepository(repository.repo_id, config).listed(revision.commit_hash)
            for model in _models_of(repository, revision, listed):
                models.setdefault(model.name, model)
    whole = {name.repository for name in models}
    for repository_name, num_bytes, used_at in _unfinished(cache):
        if repository_name not in whole:
            name = HubName(repository_name)
            models[name] = CachedModel(name, num_bytes, used_at)
    return sorted(models.values(), key=lambda model: str(model.name).lower())


def cached_model(name: HubName, config: EngineConfig) -> CachedModel | None:
    """Return the cached model with a name; None if it is not in the cache. In a repository that has only GGUF files a
    name without a tag means the default file. ConfigError if several files fit the name."""
    models = [model for model in cached_models(config) if model.name.repository == name.repository]
    firsts = {model.first: model for model in models if model.first is not None}
    whole = next((model for model in models if model.first is None), None)
    if name.part is None and (whole is not None or not firsts):
        return whole
    if name.part is not None and not named_firsts([*firsts], name.part):
        return None
    return firsts[chosen_first([*firsts], name.part, str(name))]


def remove_repository(repository: str, config: EngineConfig) -> int:
    """Remove a repository with all that was fetched of it; return the bytes that were freed."""
    from huggingface_hub import scan_cache_dir

    place = CachedRepository(repository, config)
    found = scan_cache_dir(place.cache)
    num_bytes = sum(path.stat().st_size for path in (place.folder / "blobs").glob("*") if path.is_file())
    mine = frozenset(each for each in found.repos if each.repo_path.resolve() == place.folder.resolve())
    for each in mine:  # of this repository alone: a copy of it on the hub has the same commits
        commits = [revision.commit_hash for revision in each.revisions]
        dataclasses.replace(found, repos=mine).delete_revisions(*commits).execute()
    shutil.rmtree(place.folder, ignore_errors=True)
    shutil.rmtree(place.cache / ".locks" / place.folder.name, ignore_errors=True)
    if place.folder.exists():
        raise ConfigError(f"{place.folder} could not be removed: check its permissions")
    return num_bytes


def remove_files(model: CachedModel, config: EngineConfig) -> int:
    """Remove the blobs of a GGUF model, and the links to them in all revisions of its repository; return the bytes that
    were freed. A revision with another file of the same name keeps that file."""
    place = CachedRepository(model.name.repository, config)
    num_bytes = sum(blob.stat().st_size for blob in model.blobs if blob.exists())
    blobs = {*model.blobs}
    for link in [*(place.folder / "snapshots").rglob("*")]:
        if link.is_symlink() and Path(os.path.normpath(link.parent / os.readlink(link))) in blobs:
            link.unlink()
    for blob in blobs:  # itself, not what it may be a link to, which other repositories may share
        with contextlib.suppress(FileNotFoundError):
            blob.unlink()
    return num_bytes


def _comes_first(revision: CachedRevisionInfo) -> tuple[bool, float]:
    return (DEFAULT_REVISION not in revision.refs, -revision.last_modified)


def _models_of(repository: CachedRepoInfo, revision: CachedRevisionInfo, listed: list[str]) -> list[CachedModel]:
    """Return the models of a revision. `listed`: all files of the repository, among which a tag must name one."""
    files = {str(file.file_path.relative_to(revision.snapshot_path)): file for file in revision.files}
    found: list[CachedModel] = []
    of_gguf: set[str] = set()
    firsts = first_parts([*files])
    for first in firsts:
        parts = all_parts([*files], first)
        of_gguf |= {*parts}
        name = HubName(repository.repo_id, tag_of(listed or firsts, first))
        found.append(_model(name, [files[part] for part in parts], revision, first))
    rest = [file for name, file in files.items() if name not in of_gguf]
    if any(file.file_name.endswith(".safetensors") for file in rest) or not firsts:
        found.append(_model(HubName(repository.repo_id), rest, revision, None))
    return found


def _model(name: HubName, files: list[CachedFileInfo], revision: CachedRevisionInfo, first: str | None) -> CachedModel:
    num_bytes = sum({file.blob_path: file.size_on_disk for file in files}.values())
    used_at = max((file.blob_last_accessed for file in files), default=revision.last_modified)
    blobs = tuple({file.blob_path: None for file in files})
    return CachedModel(name, num_bytes, used_at, revision.snapshot_path, first, blobs)


def _unfinished(cache: Path) -> list[tuple[str, int, float]]:
    """Return the repositories of which only parts of files are here: name, bytes, and when the last byte came."""
    found: dict[str, tuple[int, float]] = {}
    for path in cache.glob("models--*/blobs/*.incomplete"):
        with contextlib.suppress(OSError):
            status = path.stat()
            name = path.parent.parent.name.removeprefix("models--").replace("--", "/")
            size, at = found.get(name, (0, 0.0))
            if size + status.st_size:
                found[name] = (size + status.st_size, max(at, status.st_mtime))
    return [(name, *rest) for name, rest in sorted(found.items())]
