"""The whole check of a GPU, into one JSON: scripts/gpu_check [OUT.json]

    device, versions, date, commit · every gpu-marked test by name and outcome, kernels first · figures of gpu_goals.py
    beside their limits · figures of gpu_bench.py

The JSON is written anew after each part, so that what was found survives a stop.

Works from a bare checkout: nothing of the project is installed, a temporary folder with a link `tokenloom` to the
checkout stands on PYTHONPATH. Needs no pytest plugin and no setproctitle. Exit code 0 if all tests passed and the
benchmark ran, or if there is no GPU; 1 otherwise. Standard library only: torch is asked in a process of its own.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROBE = """
import json, importlib.metadata as m
names = ("torch", "triton", "transformers", "numpy", "pyzmq", "msgspec", "tokenizers", "pytest", "safetensors")
found = {d.name.lower(): d.version for d in m.distributions() if d.name}
facts = {"versions": {n: found[n] for n in names if n in found}, "gpu": None}
try:
    import torch
except ImportError:
    facts["reason"] = "torch is not installed"
else:
    if torch.cuda.is_available():
        p = torch.cuda.get_device_properties(0)
        facts["gpu"] = {"name": p.name, "count": torch.cuda.device_count(), "memory_bytes": p.total_memory,
                        "sm": f"{p.major}{p.minor}", "num_sms": p.multi_processor_count, "cuda": torch.version.cuda}
    else:
        facts["reason"] = "torch sees no CUDA device"
print(json.dumps(facts))
"""
PYTEST_INI = """[pytest]
addopts = --import-mode=importlib --strict-markers -p no:cacheprovider --tb=short
markers =
    slow: long forms
    gpu: needs a CUDA device
"""
MARK = re.compile(r"^(pytestmark = |\s*@)pytest\.mark\.gpu\b", re.MULTILINE)
OUTCOME = re.compile(r"^(\S*\.py::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
NUM_LAST_LINES = 200
FIRST = {"test_kernels.py": 0, "test_graphs.py": 1}  # what all else stands on


@contextmanager
def bare_package() -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder in which `tokenloom` is the checkout, and the environment in which Python finds it."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        (Path(folder) / "tokenloom").symlink_to(ROOT)
        (Path(folder) / "pytest.ini").write_text(PYTEST_INI)
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        yield Path(folder), {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def ask_torch() -> dict[str, Any]:
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=300, cwd="/")
    if probe.returncode:
        return {"versions": {}, "gpu": None, "reason": probe.stderr.strip().splitlines()[-1]}
    facts: dict[str, Any] = json.loads(probe.stdout.splitlines()[-1])
    return facts


def run_streamed(command: list[str], folder: Path, environment: dict[str, str], timeout_s: float) -> dict[str, Any]:
    """Run with its output shown as it comes; returns code (None: stopped at the limit), all lines and the last ones."""
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    is_late = threading.Event()

    def stop() -> None:
        is_late.set()
        process.kill()

    timer = threading.Timer(timeout_s, stop)
    timer.start()
    lines: deque[str] = deque(maxlen=20_000)
    assert process.stdout is not None
    try:
        with process.stdout as output:
            for line in output:
                print(line, end="", flush=True)
                lines.append(line.rstrip("\n"))
        code = process.wait()
    finally:
        timer.cancel()
    return {"code": None if is_late.is_set() else code, "lines": list(lines)}


def gpu_test_files() -> list[str]:
    """Files with a gpu mark, as paths below the temporary folder."""
    files = sorted((ROOT / "tests").rglob("test_*.py"), key=lambda file: (FIRST.get(file.name, len(FIRST)), file))
    return [f"tokenloom/{file.relative_to(ROOT)}" for file in files if MARK.search(file.read_text())]


def run_tests(folder: Path, environment: dict[str, str], timeout_s: float, files: list[str]) -> dict[str, Any]:
    """Names of the gpu-marked tests in `files` by outcome; good if all ran and none failed."""
    command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", "--rootdir", str(folder), "-v", "-m", "gpu"]
    result = run_streamed([*command, *files], folder, environment, timeout_s)
    names: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for line in result["lines"]:
        if found := OUTCOME.match(line):
            name, outcome = found[1].removeprefix("tokenloom/"), found[2]
            kind = {"PASSED": "passed", "XPASS": "failed", "FAILED": "failed", "ERROR": "failed"}.get(
                outcome, "skipped"
            )
            names[kind].append(name)
    is_good = result["code"] == 0 and bool(names["passed"])
    report: dict[str, Any] = {"ok": is_good, "stopped_at_limit": result["code"] is None, **names}
    if not is_good:
        report["last_lines"] = result["lines"][-NUM_LAST_LINES:]
    return report


def run_script(name: str, folder: Path, environment: dict[str, str], timeout_s: float) -> dict[str, Any]:
    """The figures that a script wrote, all that were there when it ended."""
    file = folder / f"{name}.json"
    command = [sys.executable, "-m", f"tokenloom.scripts.{name}", "--json", str(file)]
    result = run_streamed(command, folder, environment, timeout_s)
    report: dict[str, Any] = {"ok": result["code"] == 0, "stopped_at_limit": result["code"] is None}
    if file.exists():
        report |= json.loads(file.read_text())
    if not report["ok"]:
        report["last_lines"] = result["lines"][-NUM_LAST_LINES:]
    return report


def commit() -> str:
    git = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="where the JSON goes; none: it is printed")
    parser.add_argument("--tests-timeout-s", type=float, default=300)
    parser.add_argument("--goals-timeout-s", type=float, default=90)
    parser.add_argument("--bench-timeout-s", type=float, default=170)
    parser.add_argument("--only", choices=("tests", "goals", "benchmark"), help="leave the other parts out")
    options = parser.parse_args()
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    document: dict[str, Any] = {"date": now, "commit": commit(), "python": sys.version.split()[0], **ask_torch()}
    write(document, options.out)
    if document["gpu"] is None:
        print(f"gpu_check: nothing to check, {document.get('reason')}")
        return 0
    print(f"gpu_check: {document['gpu']['name']}, commit {document['commit']}")
    with bare_package() as (folder, environment):
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "tests": lambda: run_tests(folder, environment, options.tests_timeout_s, gpu_test_files()),
            "goals": lambda: run_script("gpu_goals", folder, environment, options.goals_timeout_s),
            "benchmark": lambda: run_script("gpu_bench", folder, environment, options.bench_timeout_s),
        }
        for name, run in parts.items():
            if options.only in (None, name):
                document[name] = run()
                write(document, options.out)
    if options.out is None:
        print(json.dumps(document, indent=2))
    return 0 if all(document[name]["ok"] for name in parts if name in document) else 1


def write(document: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
