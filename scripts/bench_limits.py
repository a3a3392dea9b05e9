"""The least time that a machine allows a workload: arithmetic on a model's shape. Measures nothing, imports no torch.

    limit = Σ over steps of max(weight bytes / read rate, flops / matmul rate)

Steps: the prompts in chunks of the token budget, then one step per answer token for all requests at once. The rates
come from peer_limits.py, measured in the same run: reading a buffer as large as the weights (on a GPU: copying it), and
the matmuls of the model's own linear shapes at MATMUL_TOKENS tokens, where they are fastest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenloom.ipc.model_config import ModelConfig
from tokenloom.scripts.bench_contestant import SCRIPTS, Peer
from tokenloom.scripts.bench_workload import Workload

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Rates:
    """What the machine does just now."""

    read_bytes_per_s: float
    flops_per_s: float


def linear_shapes(model: ModelConfig) -> list[tuple[int, int]]:
    """(out, in) of the fused linears of one layer: q/k/v, attention's output, gate/up, down."""
    heads, kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
    hidden, inner = model.hidden_size, model.intermediate_size
    return [
        ((heads + 2 * kv_heads) * head_dim, hidden),
        (hidden, heads * head_dim),
        (2 * inner, hidden),
        (hidden, inner),
    ]


class Limits:
    """Bytes, flops and seconds of a model's steps."""

    def __init__(self, model: ModelConfig, dtype: str) -> None:
        self._model = model
        self._layer_weights = model.num_layers * sum(num_out * num_in for num_out, num_in in linear_shapes(model))
        self._head_weights = model.vocab_size * model.hidden_size
        self.weight_bytes = (self._layer_weights + self._head_weights) * ITEM_BYTES[dtype]  # read by every step

    def flops(self, num_tokens: int, num_sampled: int, num_pairs: int) -> int:
        """Of a step: linears for `num_tokens`, the head for `num_sampled`, attention for query-key pairs."""
        model = self._model
        attention = 4 * num_pairs * model.num_heads * model.head_dim * model.num_layers
        return 2 * num_tokens * self._layer_weights + 2 * num_sampled * self._head_weights + attention

    def seconds(self, workload: Workload, rates: Rates, budget: int) -> float:
        """The limit of a whole workload."""
        read_s = self.weight_bytes / rates.read_bytes_per_s
        return sum(max(read_s, flops / rates.flops_per_s) for flops in self._step_flops(workload, budget))

    def _step_flops(self, workload: Workload, budget: int) -> Iterator[float]:
        n, num_in, num_out = workload.num_requests, workload.num_in, workload.num_out
        num_steps = -(-n * num_in // budget)
        prefill = self.flops(n * num_in, n, n * num_in * (num_in + 1) // 2)
        yield from [prefill / num_steps] * num_steps
        for position in range(num_in, num_in + num_out - 1):
            yield self.flops(n, n, n * (position + 1))


class LimitsPeer:
    """A process that measures the rates whenever it is asked, between the contestants."""

    def __init__(self, folder: Path, dtype: str, device: str, threads: int) -> None:
        arguments = [str(folder), "--dtype", dtype, "--device", device, "--threads", str(threads)]
        self._peer = Peer("limits", [sys.executable, str(SCRIPTS / "peer_limits.py"), *arguments])
        self.limits = Limits(ModelConfig.load(folder), dtype)

    def measure(self) -> Rates:
        answer = self._peer.ask({})
        return Rates(float(answer["read_bytes_per_s"]), float(answer["flops_per_s"]))

    def close(self) -> None:
        self._peer.close()
