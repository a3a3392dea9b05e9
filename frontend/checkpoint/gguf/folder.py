"""The checkpoint folder for a GGUF file: config.json, tokenizer and index, made at the first use and kept in the user's
cache or, if that cannot be written, in the run directory of the engine.

The engine reads it like any checkpoint. The weights stay in place: the folder has links to the files. If a file's path,
size or modification time changes, it gets a new folder. A model with an mmproj file, the encoder of its media, has
another folder than the same model without one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from ....ipc.errors import ConfigError
from ....ipc.spec.config.cache_folder import private_cache
from ....ipc.spec.config.gguf_index import GGUF_INDEX_NAME, GGUF_STATUS_NAME, MMPROJ_LINK, gguf_status
from ....ipc.spec.config.private_folder import make_folder
from ....ipc.spec.models.config_file import LEAVE_OUT, NotNative
from ....ipc.spec.models.model_file import load_model_config
from .choice import PART, first_parts
from .choice import SUFFIX as SUFFIX
from .config import architecture_of, config_of, eos_ids
from .encoders.pooling_files import write_pooling
from .end_tokens import END_TOKENS
from .expert_architectures import further_layers
from .metadata import Metadata
from .mmproj.mmproj_file import ARCHITECTURE as MMPROJ_ARCHITECTURE
from .mmproj.mmproj_file import MmprojFile, mmproj_errors
from .mmproj.projectors import TOKENS as MEDIA_TOKENS
from .reader import GgufFile, read_gguf
from .tensors import index_of
from .tokenizer import write_tokenizer

logger = logging.getLogger("tokenloom.supervisor")

REMEDY = "set XDG_CACHE_HOME to a folder that can be written"
FORM = 7  # version of the files in the folder: another number makes new folders


def gguf_in(folder: Path) -> Path | None:
    """Return the GGUF file, or its first part, in a folder without safetensors; None if there is none. ConfigError if
    there are several."""
    if (folder / GGUF_INDEX_NAME).exists() or any(folder.glob("*.safetensors")):
        return None
    first = first_parts([path.name for path in folder.glob(f"*{SUFFIX}")])
    if len(first) > 1:
        raise ConfigError(f"{folder} has {len(first)} GGUF files, {first[0]} and others: give the path of one")
    return folder / first[0] if first else None


def checkpoint_folder(path: Path, spare: Path | None = None, mmproj: Path | None = None) -> Path:
    """Return the checkpoint folder for the GGUF file at `path`, or for all parts of a split model, and the encoder of
    its media in the file `mmproj`; make it if it is missing. If the cache cannot be written, it is made in `spare`,
    which is logged. ConfigError if a file is missing or not supported, or no folder can be written: UnknownProjector
    and OtherProjector if the model cannot have this encoder."""
    parts = _parts(path)
    key = _key(parts, mmproj)
    try:
        return _made(private_cache("gguf") / key, parts, mmproj)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        own = _spare(spare, f"what is made for {path}", error) / key
        try:
            return _made(own, parts, mmproj)
        except OSError as second:
            raise ConfigError(f"{own} cannot be written either ({second}): {REMEDY}") from None


def add_tokenizer(folder: Path, spare: Path | None = None) -> Path:
    """Write the tokenizer into a folder of `checkpoint_folder`, if its GGUF file has one and it was not written yet. Do
    nothing for other folders. Return the folder with the tokenizer: `folder` or, if that cannot be written, one in
    `spare`. ConfigError if the tokenizer is not supported or cannot be written."""
    first = next(iter(sorted(folder.glob(f"*{SUFFIX}"))), None)
    if first is None or not (folder / GGUF_INDEX_NAME).exists() or (folder / "tokenizer_config.json").exists():
        return folder
    try:
        write_tokenizer(first.resolve(), folder)
        return folder
    except OSError as error:
        own = _spare(spare, f"the tokenizer of {first.resolve()}", error) / f"{folder.name}-tokenizer"
        try:
            make_folder(own)
            write_tokenizer(first.resolve(), own)
            return own
        except OSError as second:
            raise ConfigError(f"{own} cannot be written either ({second}): {REMEDY}") from None


def skipped_layers(folder: Path) -> int:
    """Return how many layers of the GGUF file for a folder of `checkpoint_folder` are not run; 0 for other folders."""
    if not (folder / GGUF_INDEX_NAME).exists():
        return 0
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return int(config.get("num_nextn_predict_layers", 0))


def _spare(spare: Path | None, what: str, error: Exception) -> Path:
    """Return the folder in `spare` for what the cache cannot keep, and log why. ConfigError if there is no `spare`."""
    if spare is None:
        raise ConfigError(f"the cache folder cannot keep {what} ({error}): {REMEDY}")
    logger.warning(
        "the cache folder cannot keep %s (%s), so it lies in the run directory and each start makes it again: %s",
        what,
        error,
        REMEDY,
    )
    return spare / "gguf"


def _made(folder: Path, parts: list[Path], mmproj: Path | None) -> Path:
    """Return `folder`; make it for the GGUF files `parts` and `mmproj` if it is missing. OSError if it cannot be
    written."""
    if (folder / GGUF_INDEX_NAME).exists():
        return folder
    make_folder(folder.parent)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        _write(made, parts, mmproj)
        with contextlib.suppress(FileExistsError, NotADirectoryError):
            made.rename(folder)
    except OSError:
        if not (folder / GGUF_INDEX_NAME).exists():  # if it exists, another process has made it
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _parts(path: Path) -> list[Path]:
    found = PART.search(path.name)
    if found is None:
        return [path.absolute()]
    stem, count = path.name[: found.start()], int(found[2])
    parts = [path.with_name(f"{stem}-{number:05}-of-{count:05}{SUFFIX}") for number in range(1, count + 1)]
    missing = [each.name for each in parts if not each.is_file()]
    if missing:
        raise ConfigError(f"{path}: {len(missing)} of its {count} parts are missing, {missing[0]} and on: fetch them")
    return [each.absolute() for each in parts]


def _key(parts: list[Path], mmproj: Path | None) -> str:
    digest = hashlib.sha256(f"{FORM}".encode())
    for path in (*parts, *([] if mmproj is None else [mmproj])):
        try:
            digest.update(f"\n{path.resolve()} {gguf_status(path)}".encode())
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return digest.hexdigest()[:32]


def _write(folder: Path, parts: list[Path], mmproj: Path | None) -> None:
    links = {f"{number:05}{SUFFIX}": path for number, path in enumerate(parts, 1)}
    files = [read_gguf(path, link, END_TOKENS | MEDIA_TOKENS) for link, path in links.items()]
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    data = Metadata(GgufFile(parts[0], files[0].metadata, tensors, files[0].token_ids), links)
    if data.architecture == MMPROJ_ARCHITECTURE:
        data.refuse("it is an mmproj file, the encoder of a model: give the model's file, and this one as --mmproj")
    config, encoder = config_of(data), None
    if mmproj is not None:
        with mmproj_errors():
            encoder = MmprojFile(mmproj)
            config = encoder.config(data, architecture_of(data).name, config)
            _save(folder / "preprocessor_config.json", encoder.processor())
        links[MMPROJ_LINK] = mmproj
    _save(folder / "config.json", config)
    ends = eos_ids(data)
    if ends:
        _save(folder / "generation_config.json", {"eos_token_id": ends})
    write_pooling(data, folder, links)
    try:
        model = load_model_config(folder, implementation="native")
    except NotNative as error:
        data.refuse(f"{_reason(error, folder).removesuffix(LEAVE_OUT)}: take the model's safetensors")
    except ConfigError as error:
        data.refuse(_reason(error, folder))
    index = index_of(tensors, model, architecture_of(data), further_layers(data))
    index |= {} if encoder is None else encoder.index()
    for link, path in links.items():
        (folder / link).symlink_to(path.resolve())
    (folder / GGUF_STATUS_NAME).write_bytes(msgspec.json.encode({link: gguf_status(links[link]) for link in links}))
    (folder / GGUF_INDEX_NAME).write_bytes(msgspec.json.encode(index))


def _reason(error: ConfigError, folder: Path) -> str:
    return str(error).removeprefix(f"{folder / 'config.json'}: ")


def _save(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
