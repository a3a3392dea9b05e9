"""Values that are infinite or not numbers are found by their bytes, in every dtype and place."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tokenloom.ipc.adapters.finite_values import PIECE_BYTES, refuse_not_finite
from tokenloom.ipc.adapters.tensor_header import read_header
from tokenloom.ipc.errors import RequestError

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def check(path: Path, *tensors: torch.Tensor) -> None:
    save_file({f"t{number}": tensor for number, tensor in enumerate(tensors)}, path)
    refuse_not_finite(path, read_header(path).values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_finite_value_is_accepted(tmp_path: Path, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    values = [0.0, -0.0, 1.0, info.max, info.min, info.tiny, -info.eps, info.max / 2, info.max / 3]
    noise = torch.randint(0, 256, (80_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)).view(dtype)
    check(tmp_path / "x", torch.tensor(values, dtype=dtype), noise[noise.isfinite()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_is_found(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    rng = random.Random(4)
    size = torch.finfo(dtype).bits // 8
    for place in (0, PIECE_BYTES // size - 1, PIECE_BYTES // size, rng.randrange(PIECE_BYTES // size)):
        tensor = torch.full((PIECE_BYTES // size + 100,), torch.finfo(dtype).max, dtype=dtype)
        tensor[place] = value
        with pytest.raises(RequestError, match="tensor t1 has values that are infinite or not numbers"):
            check(tmp_path / "x", torch.ones(3, dtype=dtype), tensor)
