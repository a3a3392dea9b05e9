"""Time the CPU operations of a layer with a state beside transformers' torch forms and the layer's linears.

    engine-launch bench states

One thread computes a gated delta net in the shape of Qwen3-Next in bf16: 2,048 hidden, 16 key heads, 32 value heads of
128 x 128, a convolution of 4 taps over 8,192 channels; without norms of queries and keys. Each round takes every part
of every case in turn; microseconds are CPU time of the thread for a token, the least of all rounds. `times_kernel` is
the median over the rounds of a torch form relative to the kernel, `of_linears` that of a part relative to the linears.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from tokenloom.kernels.contract import Norm, StateMetadata
from tokenloom.kernels.cpu.cpu_ops import load_cpu_ops
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.scripts.bench.report import median
from tokenloom.scripts.bench.runner import Case, Setup

HIDDEN, KEY_HEADS, VALUE_HEADS, DIM, NUM_TAPS = 2048, 16, 32, 128, 4
NUM_KEYS, NUM_VALUES = KEY_HEADS * DIM, VALUE_HEADS * DIM
NUM_CHANNELS = 2 * NUM_KEYS + NUM_VALUES
CASES = {"prompt of 256": (1, 256), "prompt of 8": (1, 8), "1 row": (1, 1), "8 rows": (8, 1)}  # rows, tokens of each
LINEARS = "linears"

Part = Callable[[], object]


def step_of(num_rows: int, num_tokens: int) -> StateMetadata:
    """Return the metadata of rows that update their states in place, in blocks from 1 on."""
    starts = [0, *accumulate([num_tokens] * num_rows)]
    blocks = torch.arange(1, num_rows + 1, dtype=torch.int32)
    return StateMetadata(torch.tensor(starts, dtype=torch.int32), blocks, blocks)


def parts_of(ops: ReferenceOps, num_rows: int, num_tokens: int) -> dict[str, Part]:
    """Return the parts of a layer by name, with the torch form of each part that has one behind it."""
    dtype, metadata, total = torch.bfloat16, step_of(num_rows, num_tokens), num_rows * num_tokens
    x, mixed, gate = (torch.randn(total, width).to(dtype) for width in (HIDDEN, NUM_CHANNELS, NUM_VALUES))
    weight = torch.randn(NUM_TAPS, NUM_CHANNELS).t()
    q, k, v = (torch.unflatten(part, 1, (-1, DIM)) for part in torch.split(mixed, [NUM_KEYS, NUM_KEYS, NUM_VALUES], 1))
    k.copy_(F.normalize(k.float(), dim=-1))
    decay, beta = torch.rand(2, total, VALUE_HEADS)
    block = torch.zeros(num_rows + 1, VALUE_HEADS * DIM * DIM + NUM_TAPS * NUM_CHANNELS)
    scans = torch.unflatten(block[:, : VALUE_HEADS * DIM * DIM], 1, (VALUE_HEADS, DIM, DIM))
    inputs = torch.zeros(num_rows + 1, NUM_TAPS - 1, NUM_CHANNELS, dtype=dtype)
    norm = Norm("rms", torch.ones(DIM), None, 1e-6)
    shapes = ((2 * NUM_KEYS + 2 * NUM_VALUES, HIDDEN), (2 * VALUE_HEADS, HIDDEN), (HIDDEN, NUM_VALUES))
    into, gates, out = (ops.pack_linear(torch.randn(shape).to(dtype), None) for shape in shapes)
    scan = theirs.torch_recurrent_gated_delta_rule if num_tokens == 1 else theirs.torch_chunk_gated_delta_rule
    rows = [torch.unflatten(each, 0, (num_rows, num_tokens)) for each in (q, k, v)]
    logs, factors = (torch.unflatten(each, 0, (num_rows, num_tokens)) for each in (decay.log(), beta))
    mixed_rows = torch.unflatten(mixed, 0, (num_rows, num_tokens)).transpose(1, 2)
    their_weight, their_inputs = weight.to(dtype).contiguous(), inputs[1:].transpose(1, 2).contiguous()
    their_norm = theirs.Qwen3NextRMSNormGated(DIM).to(dtype)

    def compute_linears() -> Tensor:
        ops.linear(x, into)
        ops.linear(x, gates)
        return ops.linear(gate, out)

    return {
        LINEARS: compute_linears,
        "scan": lambda: ops.state_scan(q, k, v, decay, beta, scans, metadata),
        "scan, torch": lambda: scan(
            *rows, g=logs, beta=factors, initial_state=scans[1:], output_final_state=True, use_qk_l2norm_in_kernel=False
        ),
        "convolution": lambda: ops.causal_conv(mixed, weight, None, "silu", inputs, metadata),
        "convolution, torch": lambda: theirs.causal_conv1d_update(mixed_rows, their_inputs, their_weight, None, "silu"),
        "gated norm": lambda: ops.gated_norm(gate, gate, norm, VALUE_HEADS, "norm_then_silu"),
        "gated norm, torch": lambda: their_norm(gate.view(-1, DIM), gate.view(-1, DIM)),
    }


def seconds(part: Part) -> float:
    begun = time.thread_time()
    part()
    return time.thread_time() - begun


def measure(setup: Setup) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ops = load_cpu_ops(torch.bfloat16, isa=setup.arguments.cpu_isa)
    setup.report.note("kernels", ops.kernels)
    with torch.inference_mode():
        parts = {(case, name): part for case in CASES for name, part in parts_of(ops, *CASES[case]).items()}
        took: dict[tuple[str, str], list[float]] = {key: [] for key in parts}
        for _ in range(setup.arguments.rounds):
            for key, part in parts.items():
                part()  # the part before it has left other data in the caches
                took[key].append(seconds(part))
    for (case, name), values in took.items():
        kernel = name.removesuffix(", torch")
        num_rows, num_tokens = CASES[case]
        row = {"us_per_token": min(values) / num_rows / num_tokens * 1e6}
        for column, other in (("times_kernel", kernel), ("of_linears", LINEARS)):
            if name != other:
                pairs = zip(values, took[case, other], strict=True)
                row[column] = median([one_s / other_s for one_s, other_s in pairs])
        setup.report.add(case=case, part=name, **row)


OPTIONS = {"--cpu-isa": ("auto", "as of engine-launch")}
CASE = Case("states", measure, OPTIONS, model="", rounds=10)
