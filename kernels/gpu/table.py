"""Tile shapes of the attention kernels per (architecture, head_dim, query heads per KV head, bytes of an element).

There is no tuning at run time: scripts/gpu/tune_kernels.py writes `gpu_table.json` beside this file on a GPU. Without
an entry a rule gives a shape that fits into shared memory. Knows no kernel.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from .launch import next_power_of_2

TABLE_PATH = Path(__file__).with_name("gpu_table.json")


@dataclass(frozen=True)
class DecodeShape:
    """Launch parameters of decode attention."""

    tile: int  # keys per iteration
    min_tiles: int  # fewest tiles of a split, so that its partial results are small compared with its keys and values
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class PrefillShape:
    """Launch parameters of prefill attention."""

    block_m: int  # query rows of a program
    tile: int  # keys per iteration
    num_warps: int
    num_stages: int


class AttentionKind(NamedTuple):
    """Properties that determine the launch parameters of attention."""

    architecture: int
    head_dim: int
    group: int  # query heads per KV head
    element_size: int  # bytes

    @property
    def key(self) -> str:
        """The key of this kind's entry in the table."""
        return f"sm_{self.architecture}/dim {self.head_dim}/group {self.group}/bytes {self.element_size}"

    @property
    def is_large(self) -> bool:
        """Whether a multiprocessor has 227 KB of shared memory; consumer GPUs, even sm_120, have 99 KB."""
        return 90 <= self.architecture < 120


@lru_cache
def read_table() -> dict[str, dict[str, dict[str, int]]]:
    """Return the tuned shapes by AttentionKind.key, "decode" or "prefill", and field; {} if there is no file. The file
    is read once."""
    entries: dict[str, dict[str, dict[str, int]]] = {}
    if TABLE_PATH.exists():
        entries = json.loads(TABLE_PATH.read_text(encoding="utf-8"))
    return entries


def group_rows(group: int) -> int:
    """Return `group` query heads padded to the query rows of a program: a power of two that tl.dot supports."""
    return max(16, next_power_of_2(group))


def decode_shape(kind: AttentionKind) -> DecodeShape:
    """Return the launch parameters of decode attention: tuned, or from a rule with at least 256 keys per split."""
    entry = read_table().get(kind.key, {}).get("decode")
    if entry is not None:
        return DecodeShape(**entry)
    if kind.element_size > 2:  # no tensor cores for float32: larger tiles spill registers
        return DecodeShape(16, 16, num_warps=4, num_stages=2 if kind.head_dim <= 256 else 1)
    tile = 64 if kind.head_dim <= 128 else 32 if kind.head_dim <= 256 else 16
    # A key's block id is loaded before the key, so each load gets half of the stages. With 5 stages one tile is in
    # flight while another is computed; with 7 two are, enough for one program per multiprocessor to use the bandwidth.
    return DecodeShape(tile, 256 // tile, num_warps=4, num_stages=7 if kind.is_large else 5)


def prefill_shape(kind: AttentionKind) -> PrefillShape:
    """Return the launch parameters of prefill attention: tuned, or from a rule."""
    entry = read_table().get(kind.key, {}).get("prefill")
    if entry is not None:
        return PrefillShape(**entry)
    if kind.element_size > 2:  # see decode_shape
        if kind.head_dim > 256:
            return PrefillShape(16, 16, num_warps=4, num_stages=1)
        return PrefillShape(max(32, group_rows(kind.group)), 16, num_warps=4, num_stages=2)
    if kind.head_dim <= 128:
        # Tiles of 64 keys make wgmma bound by shared memory bandwidth, and the work per tile takes its issue slots.
        return PrefillShape(128, 128, num_warps=8, num_stages=5) if kind.is_large else PrefillShape(128, 64, 8, 3)
    if kind.head_dim > 256:
        return PrefillShape(64, 16, num_warps=8, num_stages=3) if kind.is_large else PrefillShape(32, 16, 8, 2)
    return PrefillShape(128 if kind.is_large else 64, 32, num_warps=8, num_stages=3)
