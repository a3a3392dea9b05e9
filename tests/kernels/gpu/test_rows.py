"""write_rows against torch's own assignments, in the interpreter, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import tokenloom.tests.kernels.gpu.interpreter  # noqa: F401
from tokenloom.kernels.gpu.rows import BLOCK, write_rows
from tokenloom.tests.support.today import some

I32, I64, F32, F64 = torch.int32, torch.int64, torch.float32, torch.float64
COLUMNS = ((I64, ()), (F32, ()), (I32, ()), (F64, ()), (F64, ()), (I32, (2,)))  # last tokens, how they are drawn
SIZES = (0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK)


def values(dtype: torch.dtype, *shape: int) -> Tensor:
    """Draw random bits of every integer width, or random floats."""
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, dtype=dtype)


def choose(of: int, count: int) -> Tensor:
    return torch.randperm(of)[:count]


@pytest.mark.parametrize("seed", some(range(40), 10))
def test_only_the_listed_rows_change(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    num_counted, num_changed, num_cells = (rng.choice(SIZES) for _ in range(3))
    num_rows, width = max(num_counted, num_changed, 1) + rng.choice([0, 5]), rng.choice([1, 3, 700])
    tables = values(I32, num_rows, width)
    num_cells = min(num_cells, tables.numel())
    columns = [values(I32, num_rows), *(values(dtype, num_rows, *shape) for dtype, shape in COLUMNS), tables]
    counted, changed, cells = (
        choose(num_rows, num_counted),
        choose(num_rows, num_changed),
        choose(tables.numel(), num_cells),
    )
    told = [values(dtype, num_changed, *shape) for dtype, shape in COLUMNS]
    counts, block_ids = values(I32, num_counted), values(I32, num_cells)

    wanted = [column.clone() for column in columns]
    wanted[0][counted] = counts
    for column, new in zip(wanted[1:-1], told, strict=True):
        column[changed] = new
    wanted[-1].view(-1)[cells] = block_ids
    changes = [counted, counts, changed, *told, cells, block_ids]
    optional = list[Tensor | None]()
    for is_given in (seed % 2, seed % 3):  # slots of adapters, and shifts of positions
        optional.append(values(I32, num_rows + 1) if is_given else None)
        if is_given:
            changes.append(values(I32, num_changed))
            wanted.append(optional[-1].clone())
            wanted[-1][changed] = changes[-1]
    write_rows(changes, columns, *optional)
    columns += [each for each in optional if each is not None]
    for column, expected in zip(columns, wanted, strict=True):
        assert torch.equal(column, expected)
