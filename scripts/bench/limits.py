"""Compute a workload's least time on a machine from the model's shape. Measures nothing, imports no torch.

    limit = Σ over steps of max(weight bytes / read rate, flops / matmul rate)
    roofline = the same with attention's cache reads added, for requests of different lengths

Steps: the prompts in chunks of the token budget, then one step per answer token for all requests at once. The rates
come from limits_peer.py, measured in the same run: reading a buffer as large as the weights (on a GPU: copying it), and
the matmuls of the model's own linear shapes at MATMUL_TOKENS tokens, where they are fastest.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenloom.ipc.spec.models.model_config import ModelConfig
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.scripts.bench.contestant import PEERS, Peer
from tokenloom.scripts.bench.workload import Workload

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Rates:
    """The machine's current rates."""

    read_bytes_per_s: float
    flops_per_s: float


def linear_shapes(model: ModelConfig) -> list[tuple[int, int]]:
    """Return (out, in) of one layer's fused linears: q/k/v, attention output, gate/up, down (of one expert)."""
    heads, kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
    hidden, inner = (
        model.hidden_size,
        model.intermediate_size if model.experts is None else model.experts.intermediate_size,
    )
    qkv_and_output = [((heads + 2 * kv_heads) * head_dim, hidden), (hidden, heads * head_dim)]
    return qkv_and_output + _mlp_shapes(hidden, inner, model.activation.is_gated)


def _mlp_shapes(hidden: int, inner: int, is_gated: bool = True) -> list[tuple[int, int]]:
    return [(inner * (2 if is_gated else 1), hidden), (hidden, inner)]


def _num_weights(shapes: list[tuple[int, int]]) -> int:
    return sum(num_out * num_in for num_out, num_in in shapes)


class Limits:
    """Bytes, flops and seconds of a model's steps. In a layer with experts, a step reads only the experts that its
    tokens choose, if they choose at random."""

    def __init__(self, model: ModelConfig, dtype: str) -> None:
        self._model = model
        self._item_bytes = ITEM_BYTES[dtype]
        hidden, experts = model.hidden_size, model.experts
        num_mixed = model.num_expert_layers
        self._dense_weights = model.num_layers * _num_weights(linear_shapes(model)[:2])
        self._dense_weights += (model.num_layers - num_mixed) * _num_weights(
            _mlp_shapes(hidden, model.intermediate_size, model.activation.is_gated)
        )
        self._expert_weights = 0  # of one expert in all MoE layers
        if experts is not None:
            self._dense_weights += num_mixed * experts.num_experts * hidden  # routers
            self._dense_weights += num_mixed * _num_weights(_mlp_shapes(hidden, experts.shared_size))
            self._expert_weights = num_mixed * _num_weights(_mlp_shapes(hidden, experts.intermediate_size))
        self._head_weights = model.vocab_size * hidden
        num_experts = 0 if experts is None else experts.num_experts
        num_weights = self._dense_weights + self._head_weights + num_experts * self._expert_weights
        self.weight_bytes = num_weights * self._item_bytes  # of all matrices

    def read_bytes(self, num_tokens: int) -> float:
        """Return the bytes of weights that a step of `num_tokens` tokens reads."""
        experts, num_weights = self._model.experts, float(self._dense_weights + self._head_weights)
        if experts is not None:
            idle = (1 - experts.top_k / experts.num_experts) ** num_tokens
            num_weights += experts.num_experts * (1 - idle) * self._expert_weights
        return num_weights * self._item_bytes

    def kv_bytes(self, num_tokens: int) -> int:
        """Return the bytes of keys and values of `num_tokens` tokens in all layers."""
        model = self._model
        return 2 * num_tokens * model.num_layers * model.num_kv_heads * model.head_dim * self._item_bytes

    def flops(self, num_tokens: int, num_sampled: int, num_pairs: int) -> int:
        """Return a step's flops: linears for `num_tokens`, the head for `num_sampled`, attention for `num_pairs`."""
        model = self._model
        attention = 4 * num_pairs * model.num_heads * model.head_dim * model.num_layers
        top_k = 0 if model.experts is None else model.experts.top_k
        weights_per_token = self._dense_weights + top_k * self._expert_weights
        return 2 * num_tokens * weights_per_token + 2 * num_sampled * self._head_weights + attention

    def seconds(self, workload: Workload, rates: Rates, budget: int) -> float:
        """Return the least seconds for a whole workload; `budget`: prompt tokens in a step."""
        return sum(
            max(self.read_bytes(num_tokens) / rates.read_bytes_per_s, flops / rates.flops_per_s)
            for num_tokens, flops in self._steps(workload, budget)
        )

    def decode_seconds(self, workload: Workload, rates: Rates) -> float:
        """Return the least seconds for the answer tokens after the first."""
        first = dataclasses.replace(workload, num_out=1)
        return self.seconds(workload, rates, 1 << 30) - self.seconds(first, rates, 1 << 30)

    def roofline_seconds(self, requests: Sequence[tuple[int, int]], rates: Rates) -> float:
        """Return the least seconds for requests of (prompt, answer) tokens: all prompts at once, then one step for each
        further token of the requests that still run."""
        num_in = sum(num_in for num_in, _ in requests)
        pairs = sum(num_in * (num_in + 1) // 2 for num_in, _ in requests)
        steps = [(self.read_bytes(num_in), self.flops(num_in, len(requests), pairs))]
        for position in range(1, max(num_out for _, num_out in requests)):
            lengths = [num_in + position for num_in, num_out in requests if num_out > position]
            n, context = len(lengths), sum(lengths)
            steps.append((self.read_bytes(n) + self.kv_bytes(context), self.flops(n, n, context)))
        return sum(max(size / rates.read_bytes_per_s, flops / rates.flops_per_s) for size, flops in steps)

    def _steps(self, workload: Workload, budget: int) -> Iterator[tuple[int, float]]:
        """Yield the tokens and flops of each step."""
        n, num_in, num_out = workload.num_requests, workload.num_in, workload.num_out
        num_steps = -(-n * num_in // budget)
        prefill = self.flops(n * num_in, n, n * num_in * (num_in + 1) // 2)
        yield from [(n * num_in // num_steps, prefill / num_steps)] * num_steps
        for position in range(num_in, num_in + num_out - 1):
            yield n, self.flops(n, n, n * (position + 1))


class LimitsPeer:
    """A process that measures the machine's rates on request, between the contestants."""

    def __init__(self, folder: Path, dtype: str, device: str, threads: int) -> None:
        arguments = [str(folder), "--dtype", dtype, "--device", device, "--threads", str(threads)]
        self._peer = Peer("limits", [sys.executable, str(PEERS / "limits_peer.py"), *arguments])
        self.limits = Limits(load_model_config(folder), dtype)

    def measure(self) -> Rates:
        answer = self._peer.ask({})
        return Rates(float(answer["read_bytes_per_s"]), float(answer["flops_per_s"]))

    def close(self) -> None:
        self._peer.close()
