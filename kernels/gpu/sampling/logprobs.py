"""Log-sum-exp of each row of logits in one launch; a row's bits do not depend on other rows."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def logsumexp_kernel(logits, output, vocab_size, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    steps = tl.arange(0, BLOCK)
    logits += row * row_stride
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in tl.range(0, vocab_size, BLOCK):
        ids = start + steps
        largest = tl.maximum(largest, tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf")))
    m = tl.max(largest, axis=0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocab_size, BLOCK):
        ids = start + steps
        total += tl.exp(tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf")) - m)
    tl.store(output + row, m + tl.log(tl.sum(total, axis=0)))


def logsumexp(logits: Tensor) -> Tensor:
    """Compute log Σ exp of each row of logits [n, vocab] float32 (rows may be strided): [n] float32."""
    output = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        logsumexp_kernel[(len(logits),)](logits, output, logits.shape[1], logits.stride(0), BLOCK=_BLOCK, num_warps=8)
    return output
