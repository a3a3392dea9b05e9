"""Time steps of transformers' layers beside native ones.

    python -m tokenloom.scripts.checkpoints.compare_fallback [CASE ...]

Both have equal weights. Each round times a step of both in turn: the time by the clock, or on one thread its CPU time.
`ratio` is the median of fallback / native; `differs` is the largest difference of their logits, as a share of the
largest logit. Decode steps follow each other. Models as in
workload.py.
"""

from __future__ import annotations

import sys

import torch

from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.select import select_ops
from tokenloom.scripts.bench.cases.hybrids import MAX_MODEL_LEN, Step, step_of
from tokenloom.scripts.bench.cases.kernels import CPU, DTYPE
from tokenloom.scripts.bench.report import median
from tokenloom.scripts.bench.runner import Case, Setup, run_case
from tokenloom.scripts.bench.workload import find_checkpoint
from tokenloom.scripts.checkpoints.compare_families import in_turn
from tokenloom.workers.borrowed.load import load_borrowed
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.models.load import load_model

CASES = {"1 row": (1, 1), "16 rows": (16, 1), "prompt of 256": (1, 256)}  # rows, new tokens of each


def difference(ours: Step, theirs: Step) -> float:
    """Compute a step of each and return how far their logits are apart."""
    expected, logits = ours().clone(), theirs()
    return float((logits - expected).abs().max() / expected.abs().max())


def measure(setup: Setup) -> None:
    options, report = setup.arguments, setup.report
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, DTYPE)
    folder, ops = find_checkpoint(options.model, DTYPE), select_ops(CPU, dtype)
    report.note("kernels", ops.kernels)
    native = load_model(folder, load_model_config(folder), MAX_MODEL_LEN, dtype, CPU, ops, ParallelGroup())
    config = load_model_config(folder, implementation="transformers")
    fallback = load_borrowed(folder, config, EngineConfig(skip_self_check=True), MAX_MODEL_LEN, dtype, CPU, ops)
    with torch.inference_mode():
        for case in options.cases or CASES:
            steps = [step_of(model, *CASES[case]) for model in (native, fallback)]
            took = in_turn(steps, setup)
            report.add(
                case=case,
                native_ms=median([ours for ours, _ in took]) * 1e3,
                fallback_ms=median([theirs for _, theirs in took]) * 1e3,
                ratio=median([theirs / ours for ours, theirs in took]),
                differs=difference(*steps),
            )


OPTIONS = {
    "cases": ([], f"of {', '.join(CASES)}; default: all"),
    "--model": ("0.6b",),
    "--threads": (1,),
}
CASE = Case("fallback", measure, OPTIONS, model="", rounds=40)


if __name__ == "__main__":
    sys.exit(run_case(CASE, __doc__))
