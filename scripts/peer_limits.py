"""Measures what the machine does just now: python peer_limits.py MODEL --dtype bfloat16 --device cpu --threads 2

Answers every request of peer_protocol.py with two rates. read_bytes_per_s: a buffer as large as the model's weights is
read once (on a GPU copied; read and written bytes count). flops_per_s: the matmuls of one layer, weights packed for
oneDNN where that is faster, at MATMUL_TOKENS tokens. The best of many: a limit is what the machine can do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peer_protocol

MIN_REPEATS, MIN_SECONDS = 5, 0.2  # of each measurement: small models need many repeats on a shared machine
MATMUL_TOKENS = {"cpu": 1024, "cuda": 8192}


def load(options: argparse.Namespace) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    import torch

    from tokenloom.ipc.model_config import ModelConfig
    from tokenloom.scripts.bench_limits import Limits, linear_shapes

    if options.threads:
        torch.set_num_threads(options.threads)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    model = ModelConfig.load(Path(options.model))
    source = torch.ones(Limits(model, options.dtype).weight_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source) if device.type == "cuda" else source
    num_tokens = MATMUL_TOKENS[device.type]
    linears = [make_linear(shape, num_tokens, dtype, device) for shape in linear_shapes(model)]
    num_flops = sum(2 * num_tokens * num_out * num_in for num_out, num_in in linear_shapes(model))

    def read() -> None:
        if device.type == "cuda":
            target.copy_(source)
        else:
            torch.dot(source, source)  # one stream, both threads

    def multiply() -> None:
        for linear in linears:
            linear()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        with torch.inference_mode():
            num_bytes = source.nbytes * (2 if device.type == "cuda" else 1)
            read_rate = num_bytes / shortest(read, device)
            return {"read_bytes_per_s": read_rate, "flops_per_s": num_flops / shortest(multiply, device)}

    return {"device": str(device)}, answer


def make_linear(shape: tuple[int, int], num_tokens: int, dtype: Any, device: Any) -> Callable[[], object]:
    """The matmul of one linear layer, in the faster of the forms that torch has for it."""
    import torch

    x = torch.randn(num_tokens, shape[1], device=device).to(dtype)
    weight = torch.randn(shape, device=device).to(dtype)
    forms: list[Callable[[], object]] = [lambda: torch.nn.functional.linear(x, weight)]
    if device.type == "cpu" and torch.backends.mkldnn.is_available():
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, num_tokens)
            packed_form = lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")  # noqa: E731
            packed_form()
            forms.append(packed_form)
        except (RuntimeError, AttributeError):  # this torch has no packed linears for the dtype
            pass
    return min(forms, key=lambda form: shortest(form, device))


def shortest(function: Callable[[], object], device: Any) -> float:
    """Seconds of the fastest of many calls after one to warm up."""
    import torch

    function()
    seconds: list[float] = []
    while len(seconds) < MIN_REPEATS or sum(seconds) < MIN_SECONDS:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    return peer_protocol.serve(lambda: load(options))


if __name__ == "__main__":
    raise SystemExit(main())
