"""Lookup of a checkpoint's folder by its name: a folder, a GGUF file, an id of the Hugging Face hub, or the demo.

The hub's client is imported only for a hub id.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ...ipc.errors import ConfigError
from ...ipc.spec.config.engine_config import EngineConfig
from ...ipc.spec.config.weight_files import INDEX_NAME, check_regular, file_by_tensor
from .downloads.hub_name import HubName, not_of_the_hub, parse_hub_name
from .gguf.choice import NO_MMPROJ, SUFFIX
from .gguf.encoder_choice import with_encoder
from .gguf.folder import gguf_in

logger = logging.getLogger("tokenloom.supervisor")

DEMO_FOLDER = Path(__file__).resolve().parents[2] / "demo"
_READ = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".safetensors", SUFFIX)


def is_model_name(name: str) -> bool:
    """Whether `name` can name a model: it is `demo`, an existing folder or file, or a model of the hub."""
    return name == "demo" or os.path.exists(name) or parse_hub_name(name) is not None


def find_checkpoint(
    name: str | None,
    revision: str | None,
    option: str = "--model",
    config: EngineConfig | None = None,
    spare: Path | None = None,
) -> Path:
    """Return the folder of a checkpoint, or of the files made for a GGUF file and the encoder that --mmproj means. The
    files of a model of the hub, which may be owner/name:Q4_K_M, are downloaded unless they are cached. None means the
    demo model.
    `spare`: holds the files made for a GGUF file if the cache cannot be written, such as an engine's run directory.
    ConfigError, about `option`, if it is not found or cannot be used. For --tokenizer no weights are downloaded."""
    config = config or EngineConfig()
    mmproj = NO_MMPROJ if option == "--tokenizer" else config.mmproj
    if name is not None and os.path.isdir(name):
        folder = Path(name).resolve()
        _check_files(folder)
        file = gguf_in(folder)
        return folder if file is None else with_encoder(file, mmproj, spare)
    if name is not None and os.path.isfile(name):
        return with_encoder(Path(name), mmproj, spare)
    if name in (None, "demo"):
        return DEMO_FOLDER
    found = parse_hub_name(name)
    if found is None or _is_file_name(found):
        raise ConfigError(f"{option} {_no_model(name)}")
    from .downloads.fetch import fetch  # a tenth of the imports of a start

    has_weights = option != "--tokenizer" and config.load_format != "dummy"
    fetched = fetch(found, revision, f"{option} {name}", config, has_weights=has_weights)
    if fetched.first is None:
        return fetched.snapshot
    logger.info("of %s the GGUF file %s is served", found.repository, fetched.first)
    return with_encoder(fetched.place, mmproj, spare, fetched.mmproj)


def _is_file_name(name: HubName) -> bool:
    """Whether `name` has the form of a repository's, but is the path of a GGUF file."""
    return name.part is None and name.repository.endswith(SUFFIX)


def _no_model(name: str) -> str:
    """Return the message for a name that names no model."""
    if name.endswith(SUFFIX) and ":" not in name:
        return f"{name}: there is no such file"
    return not_of_the_hub(name) or (
        f"{name} is neither a folder, a GGUF file, a hub id of the form owner/name, nor demo"
    )


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
