"""Compare the errors of int4 and int8 with those of llama.cpp's formats of 4 bits, on matrices of floats.

    python -m tokenloom.scripts.checkpoints.compare_rounding [FOLDER]

FOLDER has safetensors files; without it, and beside it, matrices are drawn. A figure is the root of the mean square of
the errors of all matrices, as a share of that of their elements. Only matrices that each format can hold count: Q4_K
takes 256 inputs at a time. Q4_0 and Q4_1 are gguf-py's; Q4_K, which gguf-py only reads, is that of
tests/kernels/q4_k.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from tokenloom.ipc.spec.config.weight_files import weight_paths
from tokenloom.kernels.quantized import Kind, quantize
from tokenloom.scripts.bench.runner import Case, Setup, run_case
from tokenloom.tests.kernels.q4_k import round_to_q4_k

Matrix: TypeAlias = NDArray[np.float32]
Matrices: TypeAlias = Callable[[], Iterator[Matrix]]
SHAPE, NUM_DRAWN = (512, 1536), 2
DRAWS: dict[str, Callable[[np.random.Generator], Matrix]] = {
    "normal": lambda rng: rng.standard_normal(SHAPE).astype(np.float32),
    "Laplace": lambda rng: rng.laplace(size=SHAPE).astype(np.float32),
    "Student, 4 degrees": lambda rng: rng.standard_t(4, size=SHAPE).astype(np.float32),
    "Student, 3 degrees": lambda rng: rng.standard_t(3, size=SHAPE).astype(np.float32),
}


def ours(kind: Kind) -> Callable[[Matrix], Matrix]:
    return lambda matrix: quantize(torch.from_numpy(matrix), kind).dequantize().numpy()


def theirs(name: str) -> Callable[[Matrix], Matrix]:
    kind = gguf.GGMLQuantizationType[name]
    return lambda matrix: gguf.dequantize(gguf.quantize(matrix, kind), kind)


FORMS: dict[str, Callable[[Matrix], Matrix]] = {
    "int4": ours("int4"),
    "Q4_K": round_to_q4_k,
    "Q4_1": theirs("Q4_1"),
    "Q4_0": theirs("Q4_0"),
    "int8": ours("int8"),
}


def stored(folder: Path) -> Iterator[Matrix]:
    """Yield the matrices of layers in a folder, as all formats can hold them."""
    from safetensors.torch import load_file

    for path in weight_paths(folder):
        for name, tensor in load_file(path).items():
            if tensor.dim() == 2 and "embed" not in name and tensor.shape[1] % 256 == 0:
                yield tensor.float().numpy()


def drawn(draw: Callable[[np.random.Generator], Matrix]) -> Iterator[Matrix]:
    rng = np.random.default_rng(0)
    for _ in range(NUM_DRAWN):
        yield draw(rng)


def measure(setup: Setup) -> None:
    folder = setup.arguments.folder
    sources: dict[str, Matrices] = {name: lambda draw=draw: drawn(draw) for name, draw in DRAWS.items()}  # type: ignore[misc]
    if folder:
        sources[folder] = lambda: stored(Path(folder))
    for name, matrices in sources.items():
        square, errors = 0.0, dict.fromkeys(FORMS, 0.0)
        for matrix in matrices():
            square += float((matrix.astype(np.float64) ** 2).sum())
            for form, rounded in FORMS.items():
                errors[form] += float(((rounded(matrix).astype(np.float64) - matrix) ** 2).sum())
        found = {form: (error / square) ** 0.5 for form, error in errors.items()}
        setup.report.add(matrices=name, **found, times_q4_k=found["int4"] / found["Q4_K"])


CASE = Case("rounding", measure, {"folder": ("", "of safetensors files")}, model="", rounds=0)


if __name__ == "__main__":
    sys.exit(run_case(CASE, __doc__))
