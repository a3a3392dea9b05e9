"""Lookup of a checkpoint's folder by its name: a folder, a GGUF file, an id of the Hugging Face hub, or the demo.

The hub's client is imported only for a hub id.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from ...ipc.errors import ConfigError
from ...ipc.spec.config.engine_config import EngineConfig
from ...ipc.spec.config.weight_files import INDEX_NAME, check_regular, file_by_tensor
from .gguf.folder import SUFFIX, checkpoint_folder, chosen_parts, gguf_in

DEMO_FOLDER = Path(__file__).resolve().parents[2] / "demo"
_HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+))?")  # after the colon: a part of a GGUF file's name
_WEIGHT_FILES = ["*.safetensors", "*.safetensors.index.json"]
_OTHER_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_READ = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".safetensors", SUFFIX)


def is_model_name(name: str) -> bool:
    """Whether `name` can name a model: it is `demo`, an existing folder or file, or of the form owner/name."""
    return name == "demo" or os.path.exists(name) or _HUB_ID.fullmatch(name) is not None


def find_checkpoint(
    name: str | None, revision: str | None, option: str = "--model", config: EngineConfig | None = None
) -> Path:
    """Return the folder of a checkpoint, or of the files made for a GGUF file. The files of a hub id, which may be
    owner/name:Q4_K_M, are downloaded unless they are cached. None means the demo model.
    ConfigError, about `option`, if it is not found or cannot be used. For --tokenizer no weights are downloaded."""
    if name is not None and os.path.isdir(name):
        folder = Path(name).resolve()
        _check_files(folder)
        file = gguf_in(folder)
        return folder if file is None else checkpoint_folder(file)
    if name is not None and os.path.isfile(name):
        return checkpoint_folder(Path(name))
    if name in (None, "demo"):
        return DEMO_FOLDER
    found = _HUB_ID.fullmatch(name)
    if name.endswith(SUFFIX) and ":" not in name:
        raise ConfigError(f"{option} {name}: there is no such file")
    if found is None:
        raise ConfigError(
            f"{option} {name} is neither a folder, a GGUF file, a hub id of the form owner/name, nor demo"
        )
    repository, part = found.groups()
    config = config or EngineConfig()
    if part is not None:
        return checkpoint_folder(_fetch(repository, [], revision, option, config, part))
    has_weights = option != "--tokenizer" and config.load_format != "dummy"
    return _fetch(repository, _OTHER_FILES + (_WEIGHT_FILES if has_weights else []), revision, option, config)


def _check_files(folder: Path) -> None:
    """Raise ConfigError if a file of a checkpoint is a pipe, a device, a socket or a folder, which could block when
    opened; or if its index is damaged, since workers that met it during a reload would have to be replaced."""
    try:
        found = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}") from None
    for path in found:
        if path.name.endswith(_READ):
            check_regular(path)
    if (folder / INDEX_NAME).exists():
        file_by_tensor(folder)


def _fetch(
    name: str,
    patterns: list[str],
    revision: str | None,
    option: str,
    config: EngineConfig,
    part: str | None = None,
) -> Path:
    """Fetch the files of a repository that match `patterns`, and return their folder. With `part`: fetch the GGUF file,
    in all its parts, that has it in its name, and return the path of the first part. ConfigError if that fails."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    from .hub_progress import HubProgress

    try:
        if part is not None and not constants.HF_HUB_OFFLINE:
            listed = HfApi(token=config.hf_token).list_repo_files(name, revision=revision)
            patterns = chosen_parts(listed, part, f"{option} {name}")
        folder = Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=patterns or None,
                cache_dir=config.download_dir,
                token=config.hf_token,
                tqdm_class=None if sys.stderr.isatty() else HubProgress,  # a terminal shows the hub's own bars
            )
        )
        if part is None:
            return folder
        cached = [str(path.relative_to(folder)) for path in folder.rglob(f"*{SUFFIX}")]
        return folder / chosen_parts(cached, part, f"{option} {name}")[0]
    except GatedRepoError:
        why = "the hub requires its licence to be accepted: do so on its page and give HF_TOKEN or --hf-token"
    except RepositoryNotFoundError:
        why = "it is neither a folder nor a repository of the hub; a private one needs HF_TOKEN or --hf-token"
    except RevisionNotFoundError:
        why = f"the hub has no revision {revision} of it"
    except ConfigError:
        raise
    except Exception as error:  # OSError, and errors of the HTTP library of the hub's client
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        if constants.HF_HUB_OFFLINE:
            cache = config.download_dir or constants.HF_HUB_CACHE
            why = f"it is no folder and not in {cache}; HF_HUB_OFFLINE forbids to fetch it: unset it, or give a folder"
        else:
            why = (
                f"it is no folder and cannot be fetched from {constants.ENDPOINT} ({reason}): check the network "
                "or give a folder; HF_ENDPOINT names a mirror, HF_TOKEN a key, HF_HUB_OFFLINE=1 uses the cache alone"
            )
    raise ConfigError(f"{option} {name}: {why}")
