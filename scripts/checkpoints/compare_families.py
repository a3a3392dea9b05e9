"""Time a step of each native dense family beside Llama's of one shape.

    python -m tokenloom.scripts.checkpoints.compare_families

Weights are random. Each round times Llama, then each family, by the CPU time of one thread. `excess` is the ratio of
times divided by the ratio of weights: above 1, a family costs more than its matrices.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tokenloom.ipc.spec.models.families import FAMILIES
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.select import select_ops
from tokenloom.scripts.bench.cases.kernels import CPU, DTYPE, seconds, step_of
from tokenloom.scripts.bench.report import median
from tokenloom.scripts.bench.runner import Case, Setup, run_case
from tokenloom.tests.support.checkpoints import tiny_config
from tokenloom.tests.support.families import CONFIGS
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.models.decoder import DecoderModel
from tokenloom.workers.models.load import load_model

SHAPE = {
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "layer_types": None,
    "no_rope_layers": None,
    "sliding_window": None,
}
GPT2_SHAPE = {"n_embd": 512, "n_layer": 6, "n_head": 8, "n_positions": 2048, "n_inner": 1536, "vocab_size": 8192}
CASES = {"1 row": ([1], [128]), "16 rows": ([1] * 16, [128] * 16), "prompt of 256": ([256], [256])}


def load(family: str, folder: Path) -> DecoderModel:
    """Return the family's model of SHAPE with random weights."""
    fields = tiny_config(family, **(GPT2_SHAPE if family == "gpt2" else SHAPE))
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    dtype = getattr(torch, DTYPE)
    config = load_model_config(folder)
    return load_model(folder, config, 512, dtype, CPU, select_ops(CPU, dtype), ParallelGroup(), is_dummy=True)


def cpu_s(function: Callable[[], object]) -> float:
    begun = time.thread_time()
    function()
    return time.thread_time() - begun


def in_turn(steps: Sequence[Callable[[], object]], setup: Setup) -> list[list[float]]:
    """Return the seconds of steps that run in turn in each round, after two rounds that do not count: on one thread its
    CPU time, else the time by the clock."""
    clock = cpu_s if setup.arguments.threads == 1 else seconds
    return [[clock(step) for step in steps] for _ in range(setup.arguments.rounds + 2)][2:]


def measure(setup: Setup) -> None:
    options, report = setup.arguments, setup.report
    torch.set_num_threads(1)
    report.note("kernels", select_ops(CPU, getattr(torch, DTYPE)).kernels)
    names = options.families or [
        name
        for name, config in CONFIGS.items()
        if config["architectures"][0] in FAMILIES and "text_config" not in config
    ]
    with torch.inference_mode():
        with tempfile.TemporaryDirectory() as folder:
            llama = load("llama", Path(folder))
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                model = load(name, Path(folder))
            weights = model.weight_bytes / llama.weight_bytes
            for case, rows in CASES.items():
                ours, theirs = step_of(model, *rows), step_of(llama, *rows)
                ratios = [cpu_s(ours) / cpu_s(theirs) for _ in range(options.rounds + 1)][1:]
                took = median(ratios)
                report.add(family=name, case=case, time=took, weights=weights, excess=took / weights)


OPTIONS = {"families": ([], "default: all dense ones")}
CASE = Case("families", measure, OPTIONS, model="", rounds=7)


if __name__ == "__main__":
    sys.exit(run_case(CASE, __doc__))
