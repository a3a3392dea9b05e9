"""Find within a minute whether anything works on this GPU: python -m tokenloom.scripts.gpu.works --json FILE

    the device         its name and driver, the rate of a copy and of a matrix product
    one kernel         compiled by Triton, launched, compared with plain torch
    one process        the demo model answers as on the CPU, launched kernel by kernel
    CUDA graphs        the same from graphs
    processes          the same through frontend, core and worker

Each is the step before the next: the first that fails shows where to look. Answers are greedy, in float32.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tokenloom import LLM, SamplingParams
from tokenloom.kernels.contract import NO_ACTIVATION
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.kernels.select import select_ops
from tokenloom.scripts.gpu.cases import Cases, Row, new_parser

PROMPTS = [f"The capital of {country} is" for country in ("France", "Japan", "Kenya", "Peru")]
TOLERANCE = 2e-5  # of the largest element, as in tests/gpu/test_kernels.py


@dataclass(frozen=True)
class Sizes:
    """Sizes of all cases."""

    copy_bytes: int
    matmul: int  # rows and columns
    num_prompts: int
    num_tokens: int  # of an answer
    limits: dict[str, int]  # of the engine, beside its defaults


FULL = Sizes(1 << 30, 8192, len(PROMPTS), 24, {"num_kv_blocks": 512, "max_num_seqs": 8})
SMALL_LIMITS = {"num_kv_blocks": 32, "max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 64}
SMALL = Sizes(1 << 20, 64, 2, 3, SMALL_LIMITS)


def milliseconds(run: Callable[[], object], repeats: int = 10) -> float:
    run()
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    for _ in range(repeats):
        run()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / repeats


def the_device(num_bytes: int, size: int) -> Row:
    command = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    driver = subprocess.check_output(command, encoding="utf-8", timeout=30) if shutil.which("nvidia-smi") else None
    source = torch.ones(num_bytes // 4, device="cuda")
    target = torch.empty_like(source)
    matrices = torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(matrices[0])
    copy_ms = milliseconds(lambda: target.copy_(source))
    matmul_ms = milliseconds(lambda: torch.mm(matrices[0], matrices[1], out=product))
    rates = {"copy_TB_per_s": 2 * num_bytes / copy_ms / 1e9, "matmul_TFLOP_per_s": 2 * size**3 / matmul_ms / 1e9}
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    return {
        **rates,
        "driver": driver and driver.strip(),
        "has_compiler": shutil.which("cc") is not None,
        "has_headers": headers.exists(),
    }


def one_kernel() -> Row:
    torch.manual_seed(0)
    x, weight = torch.randn(40, 300), torch.randn(130, 300) / 16
    reference = ReferenceOps()
    expected = reference.linear(x, reference.pack_linear(weight, None, NO_ACTIVATION))
    ops = select_ops(torch.device("cuda"), torch.float32)
    begun = time.perf_counter()
    found = ops.linear(x.cuda(), ops.pack_linear(weight.cuda(), None, NO_ACTIVATION)).cpu()
    error = float((found - expected).abs().max() / expected.abs().max())
    if error > TOLERANCE:
        raise AssertionError(f"a product differs from torch's by {error:.2g} of its largest element")
    return {"relative_error": error, "compiled_and_run_s": time.perf_counter() - begun}


def answers(sizes: Sizes, **options: object) -> list[list[int]]:
    with LLM(**{"dtype": "float32", **sizes.limits, **options}) as llm:  # type: ignore[arg-type]
        params = SamplingParams(temperature=0, max_tokens=sizes.num_tokens, ignore_eos=True)
        prompts = PROMPTS[: sizes.num_prompts]
        turns = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]  # graphs are captured at second steps
    return [output.outputs[0].token_ids for outputs in turns for output in outputs]


def engine(expected: list[list[int]], sizes: Sizes, **options: object) -> Row:
    begun = time.perf_counter()
    found = answers(sizes, device="cuda", **options)
    if found != expected:
        raise AssertionError(f"other tokens than on the CPU: {found} instead of {expected}")
    return {"start_to_end_s": time.perf_counter() - begun, "tokens": sum(map(len, found))}


def main() -> int:
    parser = new_parser(__doc__)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu.works: no GPU is visible", file=sys.stderr)
        return 2
    sizes = SMALL if options.small else FULL
    names = ["the device", "one kernel", "one process", "CUDA graphs", "processes"]
    cases = Cases.of_options(options, names, torch.cuda.synchronize)
    cases.measure(names[0], lambda: the_device(sizes.copy_bytes, sizes.matmul))
    cases.measure(names[1], one_kernel)
    expected = answers(sizes, device="cpu", in_process=True) if any(map(cases.wants, names[2:])) else []
    cases.measure(names[2], lambda: engine(expected, sizes, in_process=True, enforce_eager=True))
    cases.measure(names[3], lambda: engine(expected, sizes, in_process=True))
    cases.measure(names[4], lambda: engine(expected, sizes))
    return int(cases.has_failed)


if __name__ == "__main__":
    sys.exit(main())
