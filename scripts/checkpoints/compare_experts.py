"""Time decode steps of a model with experts beside a dense one.

    python -m tokenloom.scripts.checkpoints.compare_experts [CASE ...]

The model has Qwen3-MoE's layers, with 32 experts of which a token chooses 4; weights are random. For each case the
dense model is a Llama that reads as many weights: its MLP is as wide as the experts that the step reads, if tokens
choose at random. Each round times one step of both: the CPU time of one thread, or with --threads the time by the
clock. The rates are bytes of weights that a step reads, by its time; `of_dense` is their ratio.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from tokenloom.ipc.spec.models.model_config import ModelConfig
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.select import select_ops
from tokenloom.scripts.bench.cases.kernels import CPU, DTYPE, step_of
from tokenloom.scripts.bench.inputs.make_checkpoint import Config, config_of
from tokenloom.scripts.bench.limits import Limits
from tokenloom.scripts.bench.report import median
from tokenloom.scripts.bench.runner import Case, Setup, run_case
from tokenloom.scripts.checkpoints.compare_families import in_turn
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.models.load import load_model

HIDDEN, LAYERS, HEADS, KV_HEADS, VOCAB = 1024, 24, 16, 4, 8192
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "tie_word_embeddings": True}
CASES = {
    "1 row": ([1], [128]),
    "4 rows": ([1] * 4, [128] * 4),
    "16 rows": ([1] * 16, [128] * 16),
}


def read_config(fields: Config) -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        return load_model_config(Path(folder))


def with_experts() -> ModelConfig:
    return read_config(config_of("qwen3_moe", HIDDEN, LAYERS, HEADS, KV_HEADS, 2048, VOCAB, **EXPERTS))


def dense(inner: int) -> ModelConfig:
    return read_config(config_of("llama", HIDDEN, LAYERS, HEADS, KV_HEADS, inner, VOCAB))


def dense_like(config: ModelConfig, num_tokens: int) -> ModelConfig:
    """Return a dense model whose step reads as many weights as one of `config` with `num_tokens` tokens."""
    read_bytes = Limits(config, DTYPE).read_bytes(num_tokens)
    narrow, wide = (Limits(dense(inner), DTYPE).weight_bytes for inner in (32, 64))
    return dense(round((read_bytes - narrow) / (wide - narrow)) * 32 + 32)


def make_step(config: ModelConfig, counts: list[int], seq_lens: list[int]) -> Callable[[], object]:
    dtype = getattr(torch, DTYPE)
    ops = select_ops(CPU, dtype)
    model = load_model(Path(), config, 2048, dtype, CPU, ops, ParallelGroup(), is_dummy=True)
    return step_of(model, counts, seq_lens)


def measure(setup: Setup) -> None:
    options, report = setup.arguments, setup.report
    torch.set_num_threads(options.threads)
    report.note("kernels", select_ops(CPU, getattr(torch, DTYPE)).kernels)
    config = with_experts()
    with torch.inference_mode():
        for case in options.cases or CASES:
            counts, seq_lens = CASES[case]
            peer = dense_like(config, sum(counts))
            steps = make_step(config, counts, seq_lens), make_step(peer, counts, seq_lens)
            sizes = Limits(config, DTYPE).read_bytes(sum(counts)), Limits(peer, DTYPE).weight_bytes
            took = in_turn(steps, setup)
            report.add(
                case=case,
                MB=sizes[0] / 1e6,
                experts_ms=median([ours for ours, _ in took]) * 1e3,
                dense_ms=median([theirs for _, theirs in took]) * 1e3,
                experts_GB_s=median([sizes[0] / ours for ours, _ in took]) / 1e9,
                dense_GB_s=median([sizes[1] / theirs for _, theirs in took]) / 1e9,
                of_dense=median([sizes[0] / ours / (sizes[1] / theirs) for ours, theirs in took]),
            )


OPTIONS = {"cases": ([], f"of {', '.join(CASES)}; default: all"), "--threads": (1,)}
CASE = Case("experts", measure, OPTIONS, model="", rounds=40)


if __name__ == "__main__":
    sys.exit(run_case(CASE, __doc__))
