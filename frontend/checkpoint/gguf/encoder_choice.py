"""Choice of the mmproj file of a GGUF model: the one that --mmproj names, or one beside the model."""

from __future__ import annotations

import logging
from pathlib import Path

from ....ipc.errors import ConfigError
from ....ipc.spec.models.model_file import load_model_config
from .choice import ANY_MMPROJ, NO_MMPROJ, SUFFIX, first_parts, mmproj_files
from .folder import checkpoint_folder
from .mmproj.mmproj_file import MEND, OtherProjector
from .mmproj.projectors import UnknownProjector

logger = logging.getLogger("tokenloom.supervisor")


def with_encoder(path: Path, mmproj: str, spare: Path | None = None, fetched: Path | None = None) -> Path:
    """Return the checkpoint folder for the GGUF file at `path` and the encoder that `mmproj`, the value of the option,
    means. `fetched`: the mmproj file of a model of the hub.

    A file beside the model whose family is not served, or that belongs to another model, is passed over, and the log
    says so. ConfigError, besides those of `checkpoint_folder`: the option names a file that cannot be used, or the only
    model in a folder has the encoder of another one.
    """
    if mmproj == NO_MMPROJ:
        return checkpoint_folder(path, spare)
    if mmproj != ANY_MMPROJ:
        if not Path(mmproj).is_file():
            raise ConfigError(
                f"--mmproj {mmproj}: there is no such file; it may be a file, {ANY_MMPROJ} or {NO_MMPROJ}"
            )
        folder = checkpoint_folder(path, spare, Path(mmproj))
        logger.info("%s encoded by %s", _media(folder), mmproj)
        return folder
    found = mmproj_beside(path) if fetched is None else [fetched]
    for file in found:
        try:
            folder = checkpoint_folder(path, spare, file)
        except UnknownProjector as error:
            logger.warning("text alone is served: %s", error)
        except OtherProjector as error:
            if len(_models_in(path.parent)) <= 1 and len(found) == 1:
                raise ConfigError(f"{error}; {MEND}") from None
            logger.info("not used: %s", error)
        else:
            others = f", one of {len(found)} such files: --mmproj FILE takes another" if len(found) > 1 else ""
            logger.info("%s encoded by %s%s; %s", _media(folder), file, others, MEND)
            return folder
    return checkpoint_folder(path, spare)


def mmproj_beside(path: Path) -> list[Path]:
    """Return the mmproj files in the folder of a model, the best one first."""
    return [path.parent / name for name in mmproj_files(_names_in(path.parent))]


def _media(folder: Path) -> str:
    encoder = load_model_config(folder).encoder
    return "audio is" if encoder is not None and encoder.kind == "audio" else "images are"


def _models_in(folder: Path) -> list[str]:
    return first_parts(_names_in(folder))


def _names_in(folder: Path) -> list[str]:
    return [each.name for each in folder.glob(f"*{SUFFIX}")]
