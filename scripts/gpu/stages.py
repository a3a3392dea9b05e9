"""Stages of scripts/gpu_check in the order of their worth, and the command of each. Standard library only.

Every command takes the cases to skip and writes the file of cases.py: pytest with the plugin pytest_plugin.py, or a
script of this folder. Tests in several processes share their cores: most of their time is the compilation of kernels,
and a fault that breaks one process's context leaves the other processes intact. Tests that measure the device's free
memory, or start engines of several processes, run alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tokenloom.scripts.gpu.plan import Stage

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

STAGES = (  # name, content, seconds on a device: expected, least, most
    Stage("works", "a kernel, an engine, its graphs, its processes", 40, 20, 100),
    Stage("parity", "kernels as the reference, engines as transformers", 150, 40, 240),
    Stage("graphs", "graphs, steps in flight, reloads, start: no other token", 60, 30, 150),
    Stage("processes", "memory within 2 %, seeds, killed workers", 70, 30, 120),
    Stage("goals", "kernels beside a copy, SDPA and cuDNN; start", 90, 30, 150),
    Stage("engines", "0.6B beside the roofline; idle time, memory", 110, 60, 180),
    Stage("8b", "8B: decode and prompt of 8k beside the roofline", 110, 70, 200),
    Stage("others", "all other tests: media, borrowed layers, KV tiers, speculation", 90, 40, 200),
    Stage("transformers", "0.6B beside transformers' continuous batching", 180, 80, 260),
    Stage("tune", "faster shapes of attention, for gpu_table.json", 120, 45, 240),
    Stage("ranks", "two ranks on one device over gloo", 40, 25, 90),
    Stage("nccl", "two ranks on two devices over NCCL", 60, 30, 120, num_devices=2),
    Stage("14b", "14B beside the roofline and transformers", 460, 200, 540),
)

PARALLEL = {  # test files by stage, in the order in which they run; `others` has all that are not named
    "parity": ("test_kernels.py", "test_parity.py", "test_quantized.py", "test_decoder.py", "test_adapters.py"),
    "graphs": ("test_graphs.py", "test_reload.py", "test_start.py"),
}
ALONE = {
    "processes": ("test_processes.py",),
    "ranks": ("test_shared_device.py",),
    "nccl": ("test_tensor_parallel.py",),
}
OWN_CASES = tuple(
    f"0.6b: {case}" for case in ("steps of one row", "steps of many rows", "one row", "many rows", "requests", "memory")
)
SCRIPTS = {
    "works": ("first",),
    "goals": ("goals",),
    "engines": ("engines", "--models", "0.6b", "--case", *OWN_CASES),
    "transformers": ("engines", "--models", "0.6b", "--case", "0.6b: transformers"),
    "tune": ("tune_kernels", "--dry-run", "--head-dims", "128", "--groups", "4", "2", "5"),
    "8b": ("engines", "--models", "8b"),
    "14b": ("engines", "--models", "14b"),
}
ALONE_AGAIN = ("works", "goals")  # scripts: their failed cases run once more, with blocking launches


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
    def num_processes(self) -> int:
        """The processes that tests share the machine in."""
        return max(min(MAX_PROCESSES, self.num_cpus), 1)

    @property
    def factor(self) -> int:
        """How much longer everything takes than on a device."""
        return REHEARSAL_FACTOR if self.is_rehearsal else 1

    def is_script(self, stage: str) -> bool:
        return stage in SCRIPTS

    def stages(self) -> list[Stage]:
        """Return the stages; a rehearsal's have no limit of their own."""
        if not self.is_rehearsal:
            return list(STAGES)
        return [
            Stage(each.name, each.title, each.expected_s, 20, each.most_s * self.factor, each.num_devices)
            for each in STAGES
        ]

    def start(self, stage: str, folder: Path, skip: Sequence[str]) -> Started:
        """Return the command of a stage without the cases in `skip`. It writes `folder/report.json`."""
        report, selection = folder / "report.json", folder / "selection.json"
        if stage in SCRIPTS:
            selection.write_text(json.dumps(list(skip)), encoding="utf-8")
            return Started(
                [*self._script(stage), "--json", str(report), "--skip", str(selection)], self._variables(stage)
            )
        selection.write_text(json.dumps({"only": None, "skip": list(skip)}), encoding="utf-8")
        return self.start_tests(stage, folder, test_files(stage), is_alone=stage in ALONE)

    def start_tests(self, stage: str, folder: Path, files: Sequence[str], *, is_alone: bool) -> Started:
        """Return the command that runs the gpu-marked tests in `files`, as `folder/selection.json` says."""
        num_processes = 1 if is_alone else self.num_processes
        command = [*self._pytest(folder), "--tb=short", "--continue-on-collection-errors"]
        if num_processes > 1 and importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(num_processes), "--max-worker-restart", "100"]
        limit_s = self.test_limit_s * self.factor
        environment = {
            "GPU_CHECK_REPORT": str(folder / "report.json"),
            "GPU_CHECK_SELECTION": str(folder / "selection.json"),
            "GPU_CHECK_TEST_LIMIT_S": str(limit_s),
            "OMP_NUM_THREADS": str(max(self.num_cpus // num_processes, 1)),  # share the cores
        }
        return Started([*command, *files], environment | self._variables(stage))

    def start_alone(self, stage: str, folder: Path, case: str) -> Started | None:
        """Return the command that runs one failed case with its full trace and blocking launches: this shows the
        failing kernel, and separates the tests that failed only because another had broken the process's context.
        None if the stage's cases cannot run alone in little time."""
        environment = {"CUDA_LAUNCH_BLOCKING": "1", **self._variables(stage)}
        if stage in SCRIPTS:
            return Started([*self._script(stage), "--case", case], environment) if stage in ALONE_AGAIN else None
        return Started(
            [*self._pytest(folder), "--tb=long", "-p", "no:tokenloom.scripts.gpu.pytest_plugin", case], environment
        )

    def _script(self, stage: str) -> list[str]:
        name, *arguments = SCRIPTS[stage]
        small = ["--small"] if self.is_rehearsal else []
        return [sys.executable, "-m", f"tokenloom.scripts.gpu.{name}", *arguments, *small]

    def _pytest(self, folder: Path) -> list[str]:
        return [sys.executable, "-m", "pytest", "-c", "pytest.ini", "--rootdir", str(folder), "-vv", "-m", "gpu"]

    def _variables(self, stage: str) -> dict[str, str]:
        if not self.is_rehearsal:
            return {}
        (num_devices,) = [each.num_devices for each in STAGES if each.name == stage] or [1]
        return {"TOKENLOOM_FAKE_CUDA": str(num_devices)}


def bare_package(folder: Path, is_rehearsal: bool) -> dict[str, str]:
    """Fill a folder in which `tokenloom` links to the checkout; return an environment with it on PYTHONPATH."""
    (folder / "tokenloom").symlink_to(ROOT)
    (folder / "pytest.ini").write_text(PYTEST_INI, encoding="utf-8")
    environment = {"TRITON_INTERPRET": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    folders = [str(folder)]
    if is_rehearsal:
        folders.insert(0, str(FAKE))
        environment |= {"TRITON_INTERPRET": "1", "TOKENLOOM_FAKE_CUDA": "2"}
    path = os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **environment}


def gpu_test_files() -> list[str]:
    """Return the files with a gpu mark, as paths below the temporary folder."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    files = [file for file in files if "scripts" not in file.parent.parts[-1:]]
    return [f"tokenloom/{file.relative_to(ROOT)}" for file in files if MARK.search(file.read_text(encoding="utf-8"))]


def test_files(stage: str) -> list[str]:
    """Return the test files of a stage, in the order in which they run."""
    named = PARALLEL | ALONE
    files = {Path(file).name: file for file in gpu_test_files()}
    if stage == "others":
        elsewhere = {name for names in named.values() for name in names}
        return [file for name, file in files.items() if name not in elsewhere]
    return [files[name] for name in named[stage] if name in files]
