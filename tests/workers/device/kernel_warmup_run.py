"""Compile ahead for a checkpoint as a Hopper would: python -m tokenloom.tests.workers.device.kernel_warmup_run FOLDER

Prints JSON: how many kernels were compiled in how many forms, how many loaded and in which threads, and the names of
those that other steps then lacked. More arguments
"deterministic": as with that option; "shared": as the second rank of two; "short": requests are; "adapters": layers
have slots for them; "alone": again without Triton's private part, as `alone` of the JSON; "hanging": then a compiler of
one kernel does not end, with the `error`. Must run without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.adapters.targets import targets_of
from tokenloom.ipc.spec.kv.kv_groups import kv_groups
from tokenloom.ipc.spec.models.model_config import ModelConfig
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.gpu import compile as compile_module
from tokenloom.kernels.gpu.batch_invariant import BatchInvariantTritonOps
from tokenloom.kernels.gpu.compile import compiling, unfinished
from tokenloom.kernels.gpu.ops import TritonOps
from tokenloom.kernels.gpu.sampling.logprobs import logsumexp
from tokenloom.tests.kernels.gpu.loaded_nowhere import LoadedNowhere
from tokenloom.tests.support.waiting import wait_until
from tokenloom.workers.device.device_runner import DeviceRunner
from tokenloom.workers.device.kernel_warmup import (
    META_DEVICE,
    KernelWarmup,
    distinct_layers,
    launch_spans,
    launch_steps,
    run_eagerly,
)
from tokenloom.workers.machine.parallel import NullGroup
from tokenloom.workers.models.decoder import DecoderModel
from tokenloom.workers.models.load import load_model
from tokenloom.workers.sampling.sampling_columns import SamplingColumns
from tokenloom.workers.step.model_step import compute
from tokenloom.workers.step.profile import StepLimits, dummy_step, with_adapters
from tokenloom.workers.weights.adapted_layers import Adaptable

ARCHITECTURE, BLOCK_SIZE, MAX_NUM_SEQS, MAX_NUM_TOKENS = 90, 16, 256, 2048
MAX_MODEL_LEN = 40 if "short" in sys.argv else 1024
HAS_ADAPTERS = "adapters" in sys.argv
HANGING = "begin_decode_kernel"
COMPILE_S = 300.0
GROUP = NullGroup(1, 2) if "shared" in sys.argv else NullGroup()
STEPS = (  # tokens and length of each row
    ([1, 1], [5, 900]),
    ([1] * 3, [17] * 3),
    ([1] * 30, [7] * 30),
    ([1] * 100, [7] * 100),
    ([1, 1, 17], [5, 900, 17]),
    ([3], [3]),
    ([1, 300, 7], [1, 300, 64]),
    ([90] * 11, [1000] * 11),
)
SHORT_STEPS = (([1] * 100, [7] * 100), ([30] * 6, [40] * 6))


def load(folder: Path, config: ModelConfig) -> DecoderModel:
    ops = (BatchInvariantTritonOps if "deterministic" in sys.argv else TritonOps)(ARCHITECTURE)
    adapters = None
    if HAS_ADAPTERS:
        adapters = Adaptable(ops.adapter_space(8, 64), frozenset(targets_of(config)))
    groups = kv_groups(config, MAX_MODEL_LEN, is_grouped=True)
    limits = (MAX_MODEL_LEN, torch.bfloat16, META_DEVICE)
    return load_model(folder, config, *limits, ops, GROUP, adapters=adapters, groups=groups)


def new_caches(model: DecoderModel, num_blocks: int) -> list[torch.Tensor]:
    return [spec.allocate(num_blocks, META_DEVICE) for spec in model.kv_cache_specs(BLOCK_SIZE, torch.bfloat16)]


def compile_or_hang(source: ASTSource, *arguments: object, **options: object) -> object:
    return threading.Event().wait() if source.name == HANGING else compile_kernel(source, *arguments, **options)


@dataclass(frozen=True)
class Nowhere(LoadedNowhere):
    """One of several devices, each of which has its own compiled kernels in memory."""

    device: int = 0

    def get_current_device(self) -> int:
        return self.device


def warm_up(folder: Path, driver: Nowhere) -> KernelWarmup:
    """Begin to compile for a device of which nothing is in memory."""
    triton.runtime.driver.set_active(driver)
    config = load_model_config(folder)

    def launch() -> None:
        model = load(folder, distinct_layers(config))
        limits = StepLimits(MAX_NUM_SEQS, MAX_NUM_TOKENS, MAX_MODEL_LEN)
        launch_steps(
            model,
            new_caches(model, 1),
            limits,
            GROUP,
            has_graphs=True,
            has_adapters=HAS_ADAPTERS,
            has_spans=has_spans(config),
        )

    return KernelWarmup(launch, META_DEVICE)


def has_spans(config: ModelConfig) -> bool:
    return config.vision is not None and config.vision.is_bidirectional


def compile_and_step(folder: Path, driver: Nowhere) -> dict[str, object]:
    """Compile ahead, then launch steps; return the numbers to print."""
    ahead = warm_up(folder, driver)
    ahead.wait(COMPILE_S)
    config = load_model_config(folder)
    model = load(folder, config)
    missing: list[str] = []
    triton.knobs.runtime.jit_cache_hook = lambda fn, **_: missing.append(fn.name)
    with torch.inference_mode(), ThreadPoolExecutor() as threads, compiling(threads):
        kv_caches = new_caches(model, 77)
        runners = [
            DeviceRunner(model, kv_caches, MAX_NUM_SEQS, MAX_MODEL_LEN, GROUP, recorder, has_adapters=HAS_ADAPTERS)
            for recorder in (run_eagerly, None)
        ]
        steps = [
            dummy_step(*step, BLOCK_SIZE, len(kv_caches)) for step in (SHORT_STEPS if "short" in sys.argv else STEPS)
        ]
        for inputs in [*steps, *(map(with_adapters, steps) if HAS_ADAPTERS else ())]:
            for runner in runners:
                runner.rows.clear()  # of rows that had other blocks
                runner.launch(inputs, SamplingColumns.greedy(len(inputs.sampled_rows)))
            logsumexp(compute(model, inputs, kv_caches)[1])  # as of rows with rules or logprobs
            if has_spans(config):
                launch_spans(model, inputs, kv_caches)
    triton.knobs.runtime.jit_cache_hook = None
    forms = Counter(name for name, _ in ahead._kernels)
    loaders = sorted({name.split("_")[0] for name in driver.threads})
    found = {"num_kernels": ahead.num_kernels, "forms": forms, "num_loaded": len(driver.threads)}
    return {**found, "missing": missing, "loaders": loaders}


def hang(folder: Path) -> str:
    """Return the error about a compiler that hangs."""
    triton.compiler.compile = compile_or_hang
    ahead = warm_up(folder, Nowhere(ARCHITECTURE, device=2))
    wait_until(lambda: HANGING in unfinished(ahead._kernels), f"{HANGING} is being compiled", COMPILE_S)
    try:
        ahead.wait(0.1)
    except ConfigError as error:
        return str(error)
    raise AssertionError("it has ended")


def main(folder: Path) -> None:
    found = compile_and_step(folder, Nowhere(ARCHITECTURE, device=0))
    if "alone" in sys.argv:
        mode, compile_module.AsyncCompileMode = compile_module.AsyncCompileMode, None
        found["alone"] = compile_and_step(folder, Nowhere(ARCHITECTURE, device=1))
        compile_module.AsyncCompileMode = mode
    if "hanging" in sys.argv:
        found["error"] = hang(folder)
    print(json.dumps(found), flush=True)
    os._exit(0)  # threads of a compiler that hangs never end


if __name__ == "__main__":
    main(Path(sys.argv[1]))
