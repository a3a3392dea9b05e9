"""Time one step of a whole model on the CPU kernels, in this process: engine-launch bench kernels [MODEL ...]

The model is loaded as in a worker; a step is the worker's computation from embedding to logits, without sampling. Each
round measures the machine's limits and then every case, as the rates of a shared machine drift by a factor of two.
`vs_one_row` compares decode steps with that of one row with a context of 128 tokens. --forms adds models with quantized
weights and products as integers (int8, int4; stored: the codes of a GGUF file or of another quantized checkpoint), or
with a KV cache of 8 bits (floats+int8-cache), in the same rounds; `times_floats` is their speed relative to the model
with floats, `cpu_times_floats` the same by CPU time, whose least `least_cpu_ms` is: on a machine that is shared, take
one thread and these. Models as in workload.py.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.served_model import served_model, with_floats
from tokenloom.kernels.byte_cache import CACHE_DTYPES, LARGEST, is_bytes, parts
from tokenloom.kernels.cpu.library import load_library
from tokenloom.kernels.cpu.library_store import cached_library
from tokenloom.kernels.cpu.processor import levels_up_to
from tokenloom.kernels.select import select_ops
from tokenloom.scripts.bench.limits import LimitsPeer
from tokenloom.scripts.bench.report import Report, median
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.scripts.bench.workload import find_checkpoint
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.models.load import load_model
from tokenloom.workers.step.kv_cache import KVCacheSpec
from tokenloom.workers.step.model_step import Model, compute
from tokenloom.workers.step.profile import dummy_step

CPU, DTYPE = torch.device("cpu"), "bfloat16"
FLOATS, STORED = "floats", "stored"
BLOCK_SIZE = 16
CASES = {  # new tokens and context of each row
    **{f"decode {rows} x 128": ([1] * rows, [128] * rows) for rows in (1, 4, 8, 16, 32)},
    "decode 16 x 128, 8 of 2048": ([1] * 16 + [8], [128] * 16 + [2048]),
    "8 of 512": ([8], [512]),
    "prefill 1024": ([1024], [1024]),
    **{f"decode {rows} x 8192": ([1] * rows, [8192] * rows) for rows in (1, 4)},
    "512 of 8192": ([512], [8192]),
}
MAX_MODEL_LEN = max(max(lengths) for _, lengths in CASES.values())
ONE_ROW = "decode 1 x 128"


def cache_dtype_of(form: str) -> torch.dtype:
    """Return the dtype of a form's KV cache."""
    cache = form.partition("+")[2].removesuffix("-cache")
    return CACHE_DTYPES[cache] if cache else getattr(torch, DTYPE)


def noisy_pool(spec: KVCacheSpec, num_blocks: int) -> Tensor:
    """Allocate a KV pool with numbers of about 1."""
    pool = spec.allocate(num_blocks, CPU)
    if not is_bytes(pool):
        return pool.normal_()
    numbers, scales = parts(pool.flatten(-2), BLOCK_SIZE)
    numbers.random_(0, 127)
    scales.fill_(1 / LARGEST[pool.dtype])
    return pool


def step_of(
    model: Model, counts: list[int], seq_lens: list[int], cache_dtype: torch.dtype = torch.bfloat16
) -> Callable[[], object]:
    """Return a function that computes a step of different tokens, over rows whose blocks are scattered over a pool of
    noise."""
    inputs = dummy_step(counts, seq_lens, BLOCK_SIZE)
    (group,) = inputs.groups
    shape = group.block_tables.shape
    draw = np.random.default_rng(0)
    tables = draw.permutation(shape[0] * shape[1]).reshape(shape).astype(np.int32) + 1
    token_ids = draw.integers(256, size=len(inputs.token_ids), dtype=np.int32)
    inputs = inputs._replace(groups=[group._replace(block_tables=tables)], token_ids=token_ids)
    (spec,) = model.kv_cache_specs(BLOCK_SIZE, cache_dtype)
    kv_cache = noisy_pool(spec, tables.size + 1)
    return lambda: compute(model, inputs, [kv_cache])


def seconds(function: Callable[[], object]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def median_quotient(values: list[float], others: list[float]) -> float:
    return median([one / other for one, other in zip(values, others, strict=True)])


def load(folder: Path, form: str, cpu_isa: str) -> tuple[Model, str]:
    """Load a model with floats, or with weights of another form and products as integers; return it and the kernels."""
    dtype, weights = getattr(torch, DTYPE), form.partition("+")[0]
    quantization = "none" if weights in (FLOATS, STORED) else weights
    config = served_model(EngineConfig(quantization=quantization), folder)  # type: ignore[arg-type]
    if weights == FLOATS:
        config = with_floats(config)
    ops = select_ops(CPU, dtype, cpu_isa=cpu_isa, has_integer_products=weights != FLOATS)
    return load_model(folder, config, MAX_MODEL_LEN, dtype, CPU, ops, ParallelGroup()), ops.kernels


def measure_model(name: str, forms: list[str], cases: list[str], num_rounds: int, cpu_isa: str, report: Report) -> None:
    folder = find_checkpoint(name, DTYPE)
    steps: dict[tuple[str, str], Callable[[], object]] = {}
    for form in forms:
        model, kernels = load(folder, form, cpu_isa)
        report.note("kernels", kernels)
        report.note(f"weights of {name} in {form}, MiB", model.weight_bytes / 2**20)
        steps |= {(form, case): step_of(model, *CASES[case], cache_dtype_of(form)) for case in cases}
    took: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    cpu: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    shares: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    peer = LimitsPeer(folder, DTYPE, "cpu", torch.get_num_threads())
    try:
        for _ in range(num_rounds):
            rates = peer.measure()
            for case in cases:
                rows = CASES[case]
                num_tokens, num_rows = sum(rows[0]), len(rows[0])
                pairs = sum(count * length - count * (count - 1) // 2 for count, length in zip(*rows, strict=True))
                flops = peer.limits.flops(num_tokens, num_rows, pairs)
                limit_s = max(peer.limits.read_bytes(num_tokens) / rates.read_bytes_per_s, flops / rates.flops_per_s)
                for form in forms:
                    steps[form, case]()  # the case before it has left other data in the caches
                    cpu_before_s = time.process_time()
                    took[form, case].append(seconds(steps[form, case]))
                    cpu[form, case].append(time.process_time() - cpu_before_s)
                    shares[form, case].append(limit_s / took[form, case][-1])
    finally:
        peer.close()
    for (form, case), values in took.items():
        ms = {"least_ms": min(values) * 1e3, "median_ms": median(values) * 1e3}
        vs_one = median_quotient(values, took[form, ONE_ROW])
        if form == FLOATS:
            beside = {"share_of_limit": median(shares[form, case])}
        else:
            beside = {
                "times_floats": median_quotient(took[FLOATS, case], values),
                "cpu_times_floats": median_quotient(cpu[FLOATS, case], cpu[form, case]),
            }
        least_cpu_ms = min(cpu[form, case]) * 1e3
        report.add(model=name, form=form, case=case, **ms, least_cpu_ms=least_cpu_ms, vs_one_row=vs_one, **beside)


def measure(setup: Setup) -> None:
    options, report = setup.arguments, setup.report
    torch.set_num_threads(options.threads or torch.get_num_threads())
    report.note("threads", torch.get_num_threads())
    for level in levels_up_to(options.cpu_isa)[:1]:
        with tempfile.TemporaryDirectory() as folder:
            for name in ("first", "later"):
                load_s = seconds(lambda: load_library(cached_library(level, True, Path(folder))))  # noqa: B023
                report.note(f"{name} load of the kernels for {level}, s", load_s)
    with torch.inference_mode():
        for name in options.models:
            forms, cases = [FLOATS, *options.forms], [ONE_ROW, *(each for each in options.cases if each != ONE_ROW)]
            measure_model(name, forms, cases, options.rounds, options.cpu_isa, report)


OPTIONS = {
    "models": (["135m", "0.6b"], "as of other benchmarks"),
    "--forms": ([], "beside floats: int8, int4, stored, or with +int8-cache or +fp8-cache behind these or floats"),
    "--cases": (list(CASES), "of steps"),
    "--threads": (0, "0: torch's default"),
    "--cpu-isa": ("auto", "as of engine-launch"),
}
CASE = Case("kernels", measure, OPTIONS, model="", rounds=20)
