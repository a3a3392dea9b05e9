"""Compile ahead for a checkpoint as a Hopper would: python -m tokenloom.tests.workers.device.kernel_warmup_run FOLDER

Prints JSON: how many kernels were compiled in how many forms, how many loaded and in which threads, and the names of
those that other steps then lacked. A second argument
"alone": triton is without its private part; "deterministic": as with that option; "shared": as the second rank of two;
"short": requests are; "adapters": layers have slots for them; "hanging": the compiler of one kernel does not end. Must
run without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import triton
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

if "alone" in sys.argv:
    del triton.runtime._async_compile.AsyncCompileMode

from tokenloom.ipc.adapters.targets import targets_of
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.models.model_config import ModelConfig
from tokenloom.ipc.models.model_file import load_model_config
from tokenloom.kernels.gpu.batch_invariant import BatchInvariantTritonOps
from tokenloom.kernels.gpu.compile import compiling
from tokenloom.kernels.gpu.ops import TritonOps
from tokenloom.kernels.gpu.sampling.logprobs import logsumexp
from tokenloom.tests.kernels.gpu.loaded_nowhere import LoadedNowhere
from tokenloom.workers.device.device_runner import DeviceRunner
from tokenloom.workers.device.kernel_warmup import (
    META_DEVICE,
    KernelWarmup,
    distinct_layers,
    launch_spans,
    launch_steps,
    run_eagerly,
)
from tokenloom.workers.model_step import compute
from tokenloom.workers.models.decoder import DecoderModel, load_model
from tokenloom.workers.parallel import NullGroup
from tokenloom.workers.profile import dummy_step, with_adapters
from tokenloom.workers.sampling.sampling_columns import SamplingColumns
from tokenloom.workers.weights.adapted_layers import Adaptable

ARCHITECTURE, BLOCK_SIZE, MAX_NUM_SEQS, MAX_NUM_TOKENS = 90, 16, 256, 2048
MAX_MODEL_LEN = 40 if "short" in sys.argv else 1024
HAS_ADAPTERS = "adapters" in sys.argv
HANGS = threading.Event()
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
    return load_model(folder, config, MAX_MODEL_LEN, torch.bfloat16, META_DEVICE, ops, GROUP, adapters=adapters)


def new_cache(model: DecoderModel, num_blocks: int) -> torch.Tensor:
    (spec,) = model.kv_cache_specs(BLOCK_SIZE, torch.bfloat16)
    return spec.allocate(num_blocks, META_DEVICE)


def compile_or_hang(source: ASTSource, *arguments: object, **options: object) -> object:
    if source.name != "begin_decode_kernel":
        return compile_kernel(source, *arguments, **options)
    HANGS.set()
    return threading.Event().wait()


def main(folder: Path) -> None:
    driver = LoadedNowhere(ARCHITECTURE)
    triton.runtime.driver.set_active(driver)
    config = load_model_config(folder)
    has_spans = config.vision is not None and config.vision.is_bidirectional

    def launch() -> None:
        model = load(folder, distinct_layers(config))
        limits, options = (MAX_NUM_SEQS, MAX_NUM_TOKENS, MAX_MODEL_LEN), (GROUP, True, HAS_ADAPTERS)
        launch_steps(model, new_cache(model, 1), *limits, *options, has_spans=has_spans)

    if "hanging" in sys.argv:
        triton.compiler.compile = compile_or_hang
    ahead = KernelWarmup(launch, META_DEVICE)
    if "hanging" in sys.argv:
        HANGS.wait(120.0)  # a busy machine may not have come so far
    try:
        ahead.wait(5.0 if "hanging" in sys.argv else 300.0)
    except ConfigError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        os._exit(0)  # its threads never end
    model = load(folder, config)
    missing: list[str] = []
    triton.knobs.runtime.jit_cache_hook = lambda fn, **_: missing.append(fn.name)
    with torch.inference_mode(), ThreadPoolExecutor() as threads, compiling(threads):
        kv_cache = new_cache(model, 77)
        runners = [
            DeviceRunner(model, kv_cache, MAX_NUM_SEQS, MAX_MODEL_LEN, GROUP, recorder, has_adapters=HAS_ADAPTERS)
            for recorder in (run_eagerly, None)
        ]
        steps = [dummy_step(*step, BLOCK_SIZE) for step in (SHORT_STEPS if "short" in sys.argv else STEPS)]
        for inputs in [*steps, *(map(with_adapters, steps) if HAS_ADAPTERS else ())]:
            for runner in runners:
                runner.rows.clear()  # of rows that had other blocks
                runner.launch(inputs, SamplingColumns.greedy(len(inputs.sampled_rows)))
            logsumexp(compute(model, inputs, kv_cache)[1])  # as of rows with rules or logprobs
            if has_spans:
                launch_spans(model, inputs, kv_cache)
    forms = Counter(name for name, _ in ahead._kernels)
    found = {"num_kernels": ahead.num_kernels, "forms": forms, "num_loaded": len(driver.threads), "missing": missing}
    print(json.dumps(found | {"loaders": sorted({name.split("_")[0] for name in driver.threads})}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
