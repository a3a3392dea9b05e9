"""FetchPlan: the files of a model of the hub that are needed, those that are missing in its cache, and their download.

Without the hub (HF_HUB_OFFLINE, no network) a model that is complete in the cache is taken from there. The hub's client
and tqdm are imported only here, when a model is fetched.
"""

from __future__ import annotations

import contextlib
import glob
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from ....ipc.errors import ConfigError
from ....ipc.process.machine_memory import gib
from ....ipc.spec.config.engine_config import EngineConfig
from ..gguf.choice import ANY_MMPROJ, all_parts, chosen_first, first_parts, mmproj_files, named_firsts
from ..gguf.mmproj.projectors import WITH_ENCODERS
from .cached import CachedRepository, files_in
from .download import LARGEST_BYTES, Download
from .hub_name import HubName
from .repository import HubFile, HubRepository, ask_hub, hub_errors, is_offline

WEIGHT_FILES = ["*.safetensors", "*.safetensors.index.json"]
OTHER_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]


class Fetched(NamedTuple):
    """A model in the cache."""

    snapshot: Path  # the folder with its files
    first: str | None = None  # the GGUF file, or its first part, in it; None: safetensors
    encoder: str | None = None  # the mmproj file in it that belongs to the GGUF file

    @property
    def place(self) -> Path:
        return self.snapshot if self.first is None else self.snapshot / self.first

    @property
    def mmproj(self) -> Path | None:
        return None if self.encoder is None else self.snapshot / self.encoder


class FetchPlan(NamedTuple):
    """What is to be fetched of a repository."""

    repository: HubRepository
    revision: str | None
    files: list[HubFile]  # all that are needed
    missing: list[HubFile]  # of them
    num_missing_bytes: int  # without the parts that an earlier download left
    first: str | None  # as in Fetched
    encoder: str | None  # as in Fetched
    place: CachedRepository

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def fetch(name: HubName, revision: str | None, what: str, config: EngineConfig, *, has_weights: bool = True) -> Fetched:
    """Return the model `name` from the cache, after what is missing there was fetched. `what` begins the ConfigError
    for a model that is not there, `has_weights` is False if its weights are not needed."""
    place = CachedRepository(name.repository, config)
    revision = revision or name.revision
    with hub_errors(what, revision, place.cache):
        if is_offline():
            return _cached(name, revision, what, config, has_weights)
        try:
            repository = ask_hub(name.repository, revision, config.hf_token)
        except Exception:
            with contextlib.suppress(Exception):  # not in the cache either: the hub's error says more
                return _cached(name, revision, what, config, has_weights)
            raise
        return carry_out(plan(name, revision, what, config, repository, has_weights=has_weights), what, config)


def plan(
    name: HubName,
    revision: str | None,
    what: str,
    config: EngineConfig,
    repository: HubRepository,
    *,
    has_weights: bool = True,
    more: tuple[str, ...] = (),
) -> FetchPlan:
    """Return what is to be fetched of a repository that the hub has listed. `more`: patterns of further files.
    ConfigError, which begins with `what`, if no GGUF file, or several, are meant."""
    place = CachedRepository(name.repository, config)
    names = repository.names
    first: str | None = None
    encoder: str | None = None
    if name.part is not None or (has_weights and _is_of_gguf(names)):
        first = chosen_first(names, name.part, what)
        encoder = _encoder(names, config, repository.architecture) if has_weights else None
        wanted = all_parts(names, first) + ([] if encoder is None else [encoder])
    else:
        wanted = _matching(names, OTHER_FILES + (WEIGHT_FILES if has_weights else []))
    kept = {*wanted, *_matching(names, list(more))}
    files = [file for file in repository.files if file.name in kept]
    absent = [file for file in files if not file.etag or not place.blob(file.etag).exists()]
    missing = list({file.etag or file.name: file for file in absent}.values())
    parts = [place.partial(file.etag) for file in missing if file.etag]
    num_missing_bytes = sum(file.num_bytes for file in missing) - sum(p.stat().st_size for p in parts if p.exists())
    return FetchPlan(repository, revision, files, missing, max(num_missing_bytes, 0), first, encoder, place)


def carry_out(plan: FetchPlan, what: str, config: EngineConfig) -> Fetched:
    """Fetch what is missing and return the model in the cache. ConfigError if the disk has no room for it; besides, the
    errors of the hub's client and of its HTTP library."""
    from huggingface_hub import snapshot_download

    from .progress import NoProgress, bytes_bar

    def announce(line: str) -> None:
        bar.write(line, file=sys.stderr)

    plan.place.check_room(plan.num_missing_bytes, what)
    own = [file for file in plan.missing if file.etag and file.num_bytes <= LARGEST_BYTES]
    if own:
        with contextlib.closing(bytes_bar(plan.repository.repository, sum(file.num_bytes for file in own))) as bar:
            Download(plan.place, _opener(plan.repository, config.hf_token), bar, announce).run(own)
    snapshot = snapshot_download(  # finds the blobs and makes the links to them
        plan.repository.repository,
        revision=plan.revision,
        allow_patterns=[glob.escape(file.name) for file in plan.files],
        cache_dir=plan.place.cache,
        token=config.hf_token,
        tqdm_class=NoProgress if len(own) == len(plan.missing) else None,
    )
    return Fetched(Path(snapshot), plan.first, plan.encoder)


def fetch_elsewhere(repository: HubRepository, patterns: list[str], cache: Path, token: str | None) -> Path:
    """Fetch the files that match `patterns` into another cache and return their folder. Raises the errors of the hub's
    client and of its HTTP library."""
    from huggingface_hub import snapshot_download

    from .progress import NoProgress

    found = snapshot_download(
        repository.repository,
        revision=repository.commit,
        allow_patterns=patterns,
        cache_dir=cache,
        token=token,
        tqdm_class=NoProgress,
    )
    return Path(found)


def describe(plan: FetchPlan) -> str:
    """Say how much is to be fetched, and where it goes."""
    count = f"{len(plan.files)} file{'s' * (len(plan.files) != 1)}, {gib(plan.num_bytes)}"
    if not plan.missing:
        return f"{plan.repository.repository}: {count}, all in {plan.place.cache}"
    left = "" if plan.num_missing_bytes == plan.num_bytes else f", {gib(plan.num_missing_bytes)} of them to fetch"
    return f"{plan.repository.repository}: {count}{left}, into {plan.place.cache}"


def _opener(repository: HubRepository, token: str | None) -> Callable[[HubFile, int], object]:
    """Return the function that asks the hub for a file from a byte on."""
    from huggingface_hub import constants, get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    headers = build_hf_headers(token=token) | {"Accept-Encoding": "identity"}  # a range is one of the stored bytes

    @contextlib.contextmanager
    def open_at(file: HubFile, begin: int) -> Iterator[object]:
        url = hf_hub_url(repository.repository, file.name, revision=repository.commit)
        of_range = {"Range": f"bytes={begin}-"} if begin else {}
        timeout_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers | of_range, timeout=timeout_s) as response:
            hf_raise_for_status(response)
            yield response

    return open_at


def _cached(name: HubName, revision: str | None, what: str, config: EngineConfig, has_weights: bool) -> Fetched:
    """Return a model that is complete in the cache; else raise a ConfigError or the error of the hub's client."""
    from huggingface_hub import snapshot_download

    place = CachedRepository(name.repository, config)
    snapshot = place.snapshot(revision)
    if snapshot is not None:
        names = files_in(snapshot)
        if name.part is not None and not named_firsts(names, name.part):
            here = ", ".join(first_parts(names)) or "none"
            raise ConfigError(
                f"{what}: of its GGUF files {here:.300} are in {place.cache}; HF_HUB_OFFLINE forbids to fetch others: "
                "unset it, or name one of these"
            )
        if name.part is not None or (has_weights and _is_of_gguf(names)):
            return Fetched(snapshot, chosen_first(names, name.part, what), _encoder(names, config))
    found = snapshot_download(
        name.repository,
        revision=revision,
        allow_patterns=OTHER_FILES + (WEIGHT_FILES if has_weights else []),
        cache_dir=place.cache,
        local_files_only=True,
    )
    return Fetched(Path(found))


def _encoder(names: list[str], config: EngineConfig, architecture: str | None = None) -> str | None:
    """Return the mmproj file among `names` that belongs to the GGUF files; None if there is none, the options name
    another or none, or models of this architecture have none that is served. architecture: None if it is not known."""
    if config.mmproj != ANY_MMPROJ or architecture not in (None, *WITH_ENCODERS):
        return None
    return next(iter(mmproj_files(names)), None)


def _is_of_gguf(names: list[str]) -> bool:
    """Whether a repository has GGUF files but no safetensors."""
    return bool(first_parts(names)) and not _matching(names, WEIGHT_FILES)


def _matching(names: list[str], patterns: list[str]) -> list[str]:
    """Return the names that match a pattern, as the hub's client does: a star is for folders, too."""
    return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]
