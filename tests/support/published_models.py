"""Published checkpoints as far as a load plan needs them: config.json at full size, tensor names and shapes.

A file of `tests/workers/models/published/` describes one. "tensors" maps patterns of names to shapes, "ignored" lists
patterns of tensors that a text engine does not use: vision towers, layers for speculation, causal masks, tied heads.
"{0-4,7}" in a pattern stands for each of these numbers.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "workers" / "models" / "published"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


@dataclass(frozen=True)
class PublishedModel:
    """`config`: its config.json. `shapes`: of each tensor that a text engine needs. `ignored`: names of the others."""

    repository: str
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    ignored: frozenset[str]

    @property
    def architecture(self) -> str:
        return str(self.config["architectures"][0])


def read_published(name: str) -> PublishedModel:
    """Read the file of the model `name`, one of NAMES."""
    raw = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    shapes: dict[str, tuple[int, ...]] = {}
    for pattern, shape in raw["tensors"].items():
        names = list(expand(pattern))
        assert shapes.keys().isdisjoint(names), f"{name}: {pattern} names tensors of another pattern"
        shapes |= dict.fromkeys(names, tuple(shape))
    ignored = frozenset(name for pattern in raw["ignored"] for name in expand(pattern))
    assert ignored.isdisjoint(shapes), f"{name}: {sorted(ignored & shapes.keys())} are both needed and ignored"
    return PublishedModel(raw["repository"], raw["config"], shapes, ignored)


def expand(pattern: str) -> Iterator[str]:
    """Yield each name that a pattern stands for."""
    *parts, last = re.split(r"\{([\d,-]+)\}", pattern)
    for numbers in itertools.product(*(list(_numbers(ranges)) for ranges in parts[1::2])):
        yield "".join(f"{text}{number}" for text, number in zip(parts[::2], numbers, strict=True)) + last


def _numbers(ranges: str) -> Iterator[int]:
    """Yield the numbers of "0-4,7"."""
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
