"""LaunchTable: the shapes of attention programs per (architecture, head_dim, group, bytes of an element).

No tuning at run time: `gpu_table.json` beside this file is written by scripts/tune_kernels.py on a GPU. An entry
that is missing falls back to the nearest rule that fits into shared memory. Knows no kernel.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

TABLE_PATH = Path(__file__).with_name("gpu_table.json")


@dataclass(frozen=True)
class DecodeShape:
    """tile: keys at once; min_tiles: fewest tiles of a chunk, so that partials stay small beside keys and values."""

    tile: int
    min_tiles: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class PrefillShape:
    """block_m: query rows of a program; tile: keys at once."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int


def table_key(architecture: int, head_dim: int, group: int, element_size: int) -> str:
    return f"sm_{architecture}/dim {head_dim}/group {group}/bytes {element_size}"


@lru_cache
def _entries(path: Path) -> dict[str, dict[str, dict[str, int]]]:
    entries: dict[str, dict[str, dict[str, int]]] = (
        json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    )
    return entries


def _is_large(architecture: int) -> bool:
    """Whether a multiprocessor shares 227 KB; what is for desks shares 99 KB, Blackwell included."""
    return 90 <= architecture < 120


def decode_shape(architecture: int, head_dim: int, group: int, element_size: int) -> DecodeShape:
    """How decode attention is launched; a chunk holds at least 256 keys."""
    entry = _entries(TABLE_PATH).get(table_key(architecture, head_dim, group, element_size), {}).get("decode")
    if entry is not None:
        return DecodeShape(**entry)
    if element_size > 2:  # no tensor cores for float32: larger tiles spill registers
        return DecodeShape(16, 16, num_warps=4, num_stages=2)
    tile = 64 if head_dim <= 128 else 32
    # A key's block is loaded before the key: each load has half of the stages. Of 5 one tile arrives while another is
    # computed; of 7 two do, so that one program on a multiprocessor has its share of the memory's bandwidth in flight.
    return DecodeShape(tile, 256 // tile, num_warps=4, num_stages=7 if _is_large(architecture) else 5)


def prefill_shape(architecture: int, head_dim: int, group: int, element_size: int) -> PrefillShape:
    """How prefill attention is launched."""
    entry = _entries(TABLE_PATH).get(table_key(architecture, head_dim, group, element_size), {}).get("prefill")
    if entry is not None:
        return PrefillShape(**entry)
    if element_size > 2:  # likewise
        return PrefillShape(32, 16, num_warps=4, num_stages=2)
    is_large = _is_large(architecture)
    if head_dim <= 128:
        # 128 keys: wgmma with 64 reads shared memory as fast as it goes, and the rest of a tile costs its issue slots
        return PrefillShape(128, 128, num_warps=8, num_stages=5) if is_large else PrefillShape(128, 64, 8, 3)
    return PrefillShape(128 if is_large else 64, 32, num_warps=8, num_stages=3)


def write_table(entries: dict[str, tuple[DecodeShape, PrefillShape]], path: Path = TABLE_PATH) -> None:
    """Replace these entries of the table, keep the others."""
    merged = dict(_entries(path))
    merged.update({key: {"decode": asdict(d), "prefill": asdict(p)} for key, (d, p) in entries.items()})
    path.write_text(json.dumps(dict(sorted(merged.items())), indent=1) + "\n", encoding="utf-8")
    _entries.cache_clear()
