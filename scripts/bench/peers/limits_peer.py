"""Measure the machine's current rates: python limits_peer.py MODEL --dtype bfloat16 --device cpu --threads 2

Answers every request of peer_protocol.py with two rates. read_bytes_per_s: a buffer as large as the model's weights,
but at most MAX_READ_BYTES, is read once (on a GPU copied; read and written bytes count). flops_per_s: the matmuls of
one layer at MATMUL_TOKENS tokens (matmul.py). The best of many runs counts, since a limit is a best case.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peer_protocol

MATMUL_TOKENS = {"cpu": 1024, "cuda": 8192}
MAX_READ_BYTES = 2 << 30  # far more than a cache, and little beside an engine that holds most of the memory


def load(options: argparse.Namespace) -> tuple[dict[str, Any], peer_protocol.Answer]:
    import torch

    from tokenloom.ipc.spec.models.model_file import load_model_config
    from tokenloom.scripts.bench.limits import Limits, linear_shapes
    from tokenloom.scripts.bench.peers.matmul import fastest_linear, shortest

    if options.threads:
        torch.set_num_threads(options.threads)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    model = load_model_config(Path(options.model))
    num_bytes = min(Limits(model, options.dtype).weight_bytes, MAX_READ_BYTES)
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source) if device.type == "cuda" else source
    num_tokens = MATMUL_TOKENS[device.type]
    linears = [fastest_linear(shape, num_tokens, dtype, device) for shape in linear_shapes(model)]
    num_flops = sum(2 * num_tokens * num_out * num_in for num_out, num_in in linear_shapes(model))

    reads: list[Callable[[], object]] = [lambda: torch.dot(source, source), source.sum]  # either may be faster
    if device.type == "cuda":
        reads = [lambda: target.copy_(source)]

    def multiply() -> None:
        for linear in linears:
            linear()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        with torch.inference_mode():
            num_moved = source.nbytes * (2 if device.type == "cuda" else 1)
            read_rate = num_moved / min(shortest(read, device) for read in reads)
            return {"read_bytes_per_s": read_rate, "flops_per_s": num_flops / shortest(multiply, device)}

    return {"device": str(device)}, answer


if __name__ == "__main__":
    raise SystemExit(peer_protocol.serve(__doc__, load, dtype="bfloat16", device="cpu", threads=0))
