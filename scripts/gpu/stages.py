"""Stages of scripts/gpu_check in their fixed order, and the command of each. Standard library only.

Every command takes a list of cases to skip and writes the file of cases.py: pytest with the plugin pytest_plugin.py,
or a script of this folder. Tests in several processes share their cores: most of their time is the compilation of
kernels, and a fault that breaks one process's context leaves the other processes intact. Tests that measure the
device's free memory, or start engines of several processes, run alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MARK = re.compile(r"^(pytestmark = |\s*@|.*marks=)pytest\.mark\.gpu\b", re.MULTILINE)
PYTEST_INI = """[pytest]
addopts = --import-mode=importlib --strict-markers -p no:cacheprovider -p no:faulthandler
    -p tokenloom.scripts.gpu.pytest_plugin
markers =
    nightly: long forms and further cases
    gpu: needs a CUDA device
"""
MAX_PROCESSES = 12  # each holds a context on the device
TEST_LIMIT_S = 120
REHEARSAL_FACTOR = 10  # of times, in an interpreter
FAKE = ROOT / "tests" / "support" / "fake_cuda"


@dataclass(frozen=True)
class Stage:
    """A part of the check. Times in seconds on a device, estimates until one has run it."""

    name: str
    title: str
    expected_s: int
    most_s: int  # one start is stopped after them

    @property
    def least_s(self) -> float:
        """With less left it is not started."""
        return self.expected_s / 3


STAGES = (
    Stage("works", "a kernel, an engine, its graphs, its processes", 40, 100),
    Stage("parity", "kernels as the reference, engines as transformers", 150, 240),
    Stage("graphs", "graphs, steps in flight, reloads, start: no other token", 60, 150),
    Stage("processes", "memory within 2 %, seeds, killed workers", 70, 120),
    Stage("engines", "0.6B beside the roofline; idle time, memory", 110, 180),
    Stage("goals", "kernels beside a copy, SDPA and cuDNN; start", 90, 150),
    Stage("8b", "8B: decode and prompt of 8k beside the roofline", 110, 200),
    Stage("others", "all other tests: media, borrowed layers, KV tiers, speculation", 90, 200),
)
REHEARSED = ("works", "graphs")
TESTS = {  # files by stage, in the order in which they run; `others` has all that are not named
    "parity": ("test_kernels.py", "test_parity.py", "test_quantized.py", "test_adapters.py"),
    "graphs": ("test_graphs.py", "test_reload.py", "test_start.py"),
    "processes": ("test_processes.py",),
}
ALONE = ("processes",)
SCRIPTS = {
    "works": ("works",),
    "engines": ("engines", "--models", "0.6b"),
    "goals": ("goals",),
    "8b": ("engines", "--models", "8b"),
}


class Started(NamedTuple):
    """A command and the variables that it adds to the environment."""

    command: list[str]
    environment: dict[str, str]


@dataclass(frozen=True)
class Machine:
    """The machine that the commands are for."""

    num_cpus: int
    is_rehearsal: bool
    test_limit_s: float = TEST_LIMIT_S  # on a device

    @property
    def factor(self) -> int:
        """How much longer everything takes than on a device."""
        return REHEARSAL_FACTOR if self.is_rehearsal else 1

    def start(self, stage: str, folder: Path, skip: Collection[str]) -> Started:
        """Return the command of a stage without the cases in `skip`. It writes `folder/report.json`."""
        (folder / "skip.json").write_text(json.dumps(sorted(skip)), encoding="utf-8")
        if stage not in SCRIPTS:
            return self.start_tests(folder, test_files(stage), is_alone=stage in ALONE)
        name, *arguments = SCRIPTS[stage]
        command = [sys.executable, "-m", f"tokenloom.scripts.gpu.{name}", *arguments]
        command += ["--json", str(folder / "report.json"), "--skip", str(folder / "skip.json")]
        return Started([*command, "--small"] if self.is_rehearsal else command, {})

    def start_tests(self, folder: Path, files: Sequence[str], *, is_alone: bool) -> Started:
        """Return the command that runs the gpu-marked tests in `files` but those in `folder/skip.json`."""
        num_processes = 1 if is_alone else max(min(MAX_PROCESSES, self.num_cpus), 1)
        command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", "--rootdir", str(folder), "-vv", "-m", "gpu"]
        command += ["--tb=short", "--continue-on-collection-errors"]
        if num_processes > 1 and importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(num_processes), "--max-worker-restart", "100"]
        environment = {
            "GPU_CHECK_REPORT": str(folder / "report.json"),
            "GPU_CHECK_SKIP": str(folder / "skip.json"),
            "GPU_CHECK_TEST_LIMIT_S": str(self.test_limit_s * self.factor),
            "OMP_NUM_THREADS": str(max(self.num_cpus // num_processes, 1)),  # share the cores
        }
        return Started([*command, *files], environment)


def bare_package(folder: Path, is_rehearsal: bool) -> dict[str, str]:
    """Fill a folder in which `tokenloom` links to the checkout; return an environment with it on PYTHONPATH."""
    (folder / "tokenloom").symlink_to(ROOT)
    (folder / "pytest.ini").write_text(PYTEST_INI, encoding="utf-8")
    environment = {"TRITON_INTERPRET": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    folders = [str(folder)]
    if is_rehearsal:
        folders.insert(0, str(FAKE))
        environment |= {"TRITON_INTERPRET": "1", "TOKENLOOM_FAKE_CUDA": "1"}
    path = os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **environment}


def gpu_test_files() -> list[str]:
    """Return the files with a gpu mark, as paths below the temporary folder."""
    files = [file.relative_to(ROOT) for file in sorted((ROOT / "tests").rglob("test_*.py"))]
    files = [file for file in files if "scripts" not in file.parts and file.name != "test_rehearsal.py"]
    return [f"tokenloom/{file}" for file in files if MARK.search((ROOT / file).read_text(encoding="utf-8"))]


def test_files(stage: str) -> list[str]:
    """Return the test files of a stage, in the order in which they run."""
    files = {Path(file).name: file for file in gpu_test_files()}
    if stage == "others":
        elsewhere = {name for names in TESTS.values() for name in names}
        return [file for name, file in files.items() if name not in elsewhere]
    return [files[name] for name in TESTS[stage]]
