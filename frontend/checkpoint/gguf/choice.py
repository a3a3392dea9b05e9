"""Choice of one model among the GGUF files of a repository or folder, by their names alone.

A model may be split over files `…-00001-of-00003.gguf`. A file with `mmproj` in its name is no model, but the encoder
of one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from ....ipc.errors import ConfigError

SUFFIX = ".gguf"
USUAL = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q5_K_M", "Q8_0")  # formats that are taken if none is named, the first one first
ANY_MMPROJ, NO_MMPROJ = "auto", "none"  # values of --mmproj besides a file
MMPROJ_FORMATS = ("BF16", "F16", "F32", "Q8_0")  # likewise, of encoders
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_FORMAT = re.compile(r"(?:[IT]?Q\d\w*|B?F(?:P)?(?:16|32)|MXFP4\w*)", re.IGNORECASE)


def is_first_part(name: str) -> bool:
    """Whether a GGUF file is a whole model or its first part."""
    part = PART.search(name)
    return not is_mmproj(name) and (part is None or int(part[1]) == 1)


def is_mmproj(name: str) -> bool:
    """Whether a GGUF file holds the encoder of a model's media."""
    return "mmproj" in PurePath(name).name.lower()


def mmproj_files(names: Sequence[str]) -> list[str]:
    """Return the mmproj files in the order in which one is taken: by MMPROJ_FORMATS, others last, then by name."""
    found = sorted(name for name in names if name.endswith(SUFFIX) and is_mmproj(name))
    return sorted(found, key=lambda name: [not _with_word([name], each) for each in MMPROJ_FORMATS])


def first_parts(names: Sequence[str]) -> list[str]:
    """Return the GGUF files that are whole models or first parts, in order of name."""
    return sorted(name for name in names if name.endswith(SUFFIX) and is_first_part(name))


def all_parts(names: Sequence[str], first: str) -> list[str]:
    """Return the files of the model with this first part, in order."""
    split = PART.search(first)
    if split is None:
        return [first]
    return [name for name in sorted(names) if name.startswith(first[: split.start()]) and PART.search(name)]


def chosen_first(names: Sequence[str], part: str | None, what: str) -> str:
    """Return the GGUF file, or its first part, that `part` names: its path, or a whole word in it, in any case. Without
    `part` it is the first of USUAL that one file has, or the only file. ConfigError, which begins with `what`, unless
    there is exactly one such file."""
    firsts = first_parts(names)
    if part is None:
        return _usual(firsts, what)
    found = named_firsts(names, part)
    if len(found) != 1:
        shown = ", ".join(found or firsts) or "none"
        raise ConfigError(f"{what}: {len(found)} GGUF files have {part!r} in their names, one must: {shown:.500}")
    return found[0]


def named_firsts(names: Sequence[str], part: str) -> list[str]:
    """Return the GGUF files, or first parts, that `part` names: one by its path, else all with this word."""
    firsts = first_parts(names)
    return [part] if part in firsts else _with_word(firsts, part)


def tag_of(names: Sequence[str], first: str) -> str:
    """Return the shortest text that names the model with this first part among the files `names`: its format, or its
    name without the suffix."""
    firsts = first_parts(names)
    return format_of(first) if _with_word(firsts, format_of(first)) == [first] else _stem(first)


def format_of(first: str) -> str:
    """Return the format that a GGUF file has in its name, such as Q4_K_M; "" if it has none."""
    words = re.split(r"[-.]", _stem(first))
    return next((word for word in reversed(words) if _FORMAT.fullmatch(word)), "")


def _usual(firsts: Sequence[str], what: str) -> str:
    for word in USUAL:
        if len(found := _with_word(firsts, word)) == 1:
            return found[0]
    if len(firsts) == 1:
        return firsts[0]
    named = f"as {what.split()[-1]}:{tag_of(firsts, firsts[0])}" if firsts else "of another repository"
    raise ConfigError(f"{what} has {len(firsts)} GGUF files: name one, {named}: {', '.join(firsts):.500}")


def _with_word(firsts: Sequence[str], word: str) -> list[str]:
    if not word:
        return []
    bounded = re.compile(rf"(?:^|[-./_]){re.escape(word.removesuffix(SUFFIX))}(?=[-./]|$)", re.IGNORECASE)
    return [name for name in firsts if bounded.search(name.removesuffix(SUFFIX))]


def _stem(first: str) -> str:
    return PART.sub("", PurePath(first).name).removesuffix(SUFFIX)
