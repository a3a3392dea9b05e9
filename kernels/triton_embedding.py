"""Rows of an embedding table, or of this rank's share of one."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def embedding_kernel(token_ids, table, output, first_id, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(token_ids + token).to(tl.int64) - first_id
    rows = row + columns * 0
    is_ours = (columns < WIDTH) & (rows >= 0) & (rows < num_rows)
    values = tl.load(table + row * WIDTH + columns, mask=is_ours, other=0.0)
    tl.store(output + token * WIDTH + columns, values, mask=columns < WIDTH)


def embedding(token_ids: Tensor, table: Tensor, first_id: int) -> Tensor:
    """Ops.embedding of a plain, contiguous table."""
    num_tokens, width = token_ids.shape[0], table.shape[1]
    output = torch.empty((num_tokens, width), dtype=table.dtype, device=table.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(width, _BLOCK))
        embedding_kernel[grid](
            token_ids, table, output, first_id, table.shape[0], WIDTH=width, BLOCK=_BLOCK, num_warps=4
        )
    return output
