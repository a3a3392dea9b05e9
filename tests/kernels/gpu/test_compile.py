"""Every Triton kernel compiles ahead for Ampere and Hopper, fits their multiprocessors, and uses their tensor cores."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tokenloom.scripts.gpu.compile_kernels import ARCHITECTURES, MAX_SHARED_BYTES
from tokenloom.tests.support.today import DAY

WALL_S = 900  # upper bound; the real limit counts the process's own CPU time
MAX_SPILL_BYTES = 160  # of a thread; float32 attention, which has no tensor cores, may take more
PRODUCTS = ("prefill", "matmul", "linear", "shrink", "expand")
FILL_WGMMA = ("group 48", "group 71")  # query heads that are rows enough for wgmma in decode, too

pytestmark = pytest.mark.timeout(WALL_S + 60)


def run(cache_folder: Path, cpu_s: int, *options: str) -> str:
    """Run Python with these options in a new process, without the interpreter; return its output."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache_folder)
    command = [sys.executable, "-P", *options]
    output, errors = cache_folder / "output", cache_folder / "errors"
    with output.open("w") as stdout, errors.open("w") as stderr:
        process = subprocess.Popen(command, env=environment, cwd=cache_folder, stdout=stdout, stderr=stderr)
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (cpu_s, cpu_s))
        code = process.wait(WALL_S)
    assert code == 0, (code, errors.read_text()[-3000:])
    return output.read_text()


def reports(cache_folder: Path, cpu_s: int, *options: str) -> list[dict[str, object]]:
    lines = run(cache_folder, cpu_s, "-m", "tokenloom.scripts.gpu.compile_kernels", "--json", *options).splitlines()
    return [json.loads(line) for line in lines]


def check(found: list[dict[str, object]], architectures: tuple[int, ...] = ARCHITECTURES) -> None:
    assert {report["architecture"] for report in found} == set(architectures)
    for report in found:
        architecture, label = report["architecture"], str(report["label"])
        assert isinstance(architecture, int)
        assert isinstance(report["shared_bytes"], int)
        assert isinstance(report["spill_bytes"], int)
        assert report["shared_bytes"] <= MAX_SHARED_BYTES[architecture], report
        assert report["spill_bytes"] <= MAX_SPILL_BYTES or "fp32" in label, report
        is_product = any(word in label for word in PRODUCTS) and "fp32" not in label
        is_product |= "decode" in label and any(group in label for group in FILL_WGMMA)
        assert report["has_wgmma"] == (architecture == 90 and is_product), report


def test_kernels_compile_for_the_architecture_of_the_day(tmp_path: Path) -> None:
    """One of seven of the common forms; all compile for both in a nightly run."""
    today, part = ARCHITECTURES[DAY % len(ARCHITECTURES)], ("--first", str(DAY % 7), "--every", "7")
    check(reports(tmp_path, 120, "--quick", "--architectures", str(today), *part), (today,))


NARROW_NORM = """
import torch, triton
from concurrent.futures import ThreadPoolExecutor
from tokenloom.scripts.gpu.compile_kernels import NoDevice, empty
from tokenloom.kernels.gpu.compile import compiling
from tokenloom.kernels.contract import Norm
from tokenloom.kernels.gpu.norm import normalize
triton.runtime.driver.set_active(NoDevice(80))
with torch.inference_mode(), ThreadPoolExecutor(1) as threads, compiling(threads) as kernels:
    normalize(empty((4, 64)), empty((4, 64)), Norm("rms", empty(64), None, 1e-6))
print(*(kernel.asm["ptx"] for kernel in kernels.values()))
"""


def test_the_residual_is_stored_after_all_threads_have_read_it(tmp_path: Path) -> None:
    """128 threads read each of 64 elements twice; the interpreter, which runs them in order, cannot show the race."""
    code = run(tmp_path, 60, "-c", NARROW_NORM)
    assert code.count("st.global") == 2
    assert -1 < code.rindex("bar.sync") < code.index("st.global")


@pytest.mark.nightly
def test_all_forms_of_attention_compile_for_both_architectures(tmp_path: Path) -> None:
    check(reports(tmp_path, 400))
