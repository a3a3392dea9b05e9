"""Measure the packing of quantized weights for the CPU kernels, from a file's blocks and from codes in plain torch.

    engine-launch bench packing --megabytes 400

Writes a GGUF file of random blocks in the shapes of Qwen3-8B, with the formats of a Q4_K_M file: for each layer, query,
key and output Q4_K, value Q6_K beside them, gates and ups Q4_K, down Q4_K and Q6_K in turn; a tied embedding Q6_K, with
a 16th of the ids. In each round, a process of its own packs all of it in each of the two ways. CPU seconds (user and
system) are those from the opened file to the last packed matrix; the peak of the memory is beyond that of the imports;
"packed" is the size of the result.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from tokenloom.ipc.spec.config.gguf_index import BLOCKS, GGUF_INDEX_NAME, GGUF_STATUS_NAME, GgufTensor, gguf_status
from tokenloom.kernels.contract import GATED_SILU, NO_ACTIVATION
from tokenloom.kernels.cpu.cpu_ops import load_cpu_ops
from tokenloom.kernels.quantized import quantize
from tokenloom.scripts.bench.report import median
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.workers.weights.checkpoint import TensorSlice
from tokenloom.workers.weights.gguf_checkpoint import GgufCheckpoint

FILE = "00001.gguf"
HIDDEN, HEADS, KV_HEADS, INNER, IDS = 4096, 4096, 1024, 12288, 9496
EMBEDDING = "embedding"
WAYS = ("blocks", "torch")
HALVES = {"Q4_K": (0, 2), "Q6_K": (208,)}  # places of half-precision numbers in a block


class Cost(NamedTuple):
    """What a process needed to pack a file."""

    user_s: float
    system_s: float
    wall_s: float
    peak_mb: float
    packed_mb: float


def layers(num_layers: int) -> Iterator[list[list[tuple[str, str, tuple[int, int]]]]]:
    """Yield, for each layer, its packed matrices: for each the name, format and shape of the parts."""
    for layer in range(num_layers):
        down = "Q6_K" if layer % 2 else "Q4_K"
        projections = (("q", "Q4_K", HEADS), ("k", "Q4_K", KV_HEADS), ("v", "Q6_K", KV_HEADS))
        yield [
            [(f"{layer}.{name}", kind, (size, HIDDEN)) for name, kind, size in projections],
            [(f"{layer}.o", "Q4_K", (HIDDEN, HEADS))],
            [(f"{layer}.{name}", "Q4_K", (INNER, HIDDEN)) for name in ("gate", "up")],
            [(f"{layer}.down", down, (HIDDEN, INNER))],
        ]


def write_file(folder: Path, num_layers: int) -> float:
    """Write the file and its index; return its size in MB."""
    parts = [part for layer in layers(num_layers) for matrix in layer for part in matrix]
    index, rng = {}, np.random.default_rng(1)
    with (folder / FILE).open("wb") as file:
        for name, kind, shape in [*parts, (EMBEDDING, "Q6_K", (IDS, HIDDEN))]:
            elements, num_bytes = BLOCKS[kind]
            blocks = rng.integers(0, 256, (shape[0] * shape[1] // elements, num_bytes), dtype=np.uint8)
            for at in HALVES[kind]:
                numbers = rng.uniform(0.0005, 0.002, len(blocks)).astype(np.float16)
                blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)
            index[name] = GgufTensor(file=FILE, kind=kind, shape=shape, offset=file.tell())
            file.write(blocks.tobytes())
    (folder / GGUF_INDEX_NAME).write_bytes(msgspec.json.encode(index))
    status = gguf_status(folder / FILE)
    (folder / GGUF_STATUS_NAME).write_bytes(msgspec.json.encode({FILE: status}))
    return status[0] / 1e6


def pack(folder: Path, num_layers: int, way: str, num_threads: int) -> Cost:
    """Pack the file's matrices in one of WAYS."""
    torch.set_num_threads(num_threads)
    ops = load_cpu_ops(torch.bfloat16, has_integer_products=True)
    assert ops.has_integer_products, "the kernels multiply no codes on this processor"
    kept, before, begun = [], resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    with GgufCheckpoint(folder, torch.bfloat16, torch.device("cpu")) as checkpoint:
        checkpoint.keeps_blocks = way == "blocks"
        for layer in layers(num_layers):
            for parts in layer:
                slices = [TensorSlice(name, shape) for name, _, shape in parts]
                activation = GATED_SILU if len(parts) == 2 else NO_ACTIVATION
                kept.append(ops.pack_linear(checkpoint.load_matrix(*slices), None, activation))
        table = TensorSlice(EMBEDDING, (IDS, HIDDEN))
        rows = checkpoint.load_rows(table) if way == "blocks" else None
        kept.append(ops.pack_linear(quantize(checkpoint.load(table), "int8") if rows is None else rows, None))
    after, wall_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - begun
    return Cost(
        after.ru_utime - before.ru_utime,
        after.ru_stime - before.ru_stime,
        wall_s,
        (after.ru_maxrss - before.ru_maxrss) * 1024 / 1e6,
        sum(each.nbytes for each in kept) / 1e6,
    )


def measure(setup: Setup) -> None:
    report, asked = setup.report, setup.arguments
    folder = Path(setup.stack.enter_context(TemporaryDirectory(prefix="tokenloom-packing-", dir=asked.folder)))
    num_layers = max(round((asked.megabytes - 32) / 118), 1)
    file_mb = write_file(folder, num_layers)
    costs: dict[str, list[Cost]] = {way: [] for way in WAYS}
    for _ in range(asked.rounds):
        for way in WAYS:
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                costs[way].append(process.submit(pack, folder, num_layers, way, asked.num_threads).result())
    seconds = {way: median([each.user_s + each.system_s for each in costs[way]]) for way in WAYS}
    for way in WAYS:
        middle = {name: median([getattr(each, name) for each in costs[way]]) for name in Cost._fields}
        times = seconds[way] / seconds["blocks"]
        report.add(packed_from=way, file_mb=file_mb, cpu_s=seconds[way], **middle, times=times)


OPTIONS = {
    "--megabytes": (400, "size of the file"),
    "--num-threads": (2,),
    "--folder": ("", "where the file is written for the time of the measurement; default: the system's folder", Path),
}
CASE = Case("packing", measure, OPTIONS, model="", rounds=3)
