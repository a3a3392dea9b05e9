"""Check a GPU completely and write the results as one JSON: scripts/gpu_check [OUT.json]

    device, versions, date, commit · every gpu-marked test by name and outcome, those of two GPUs separately; failed
    tests once more, alone and with blocking launches · kernels beside their limits (gpu_goals.py) · engines beside
    theirs (gpu_bench.py)

The JSON is written anew after each part, so that a stop keeps earlier results; a part that fails or exceeds its limit
does not stop the others. The whole check ends within 10 minutes, except for the large models, which run only with
--only.

With pytest-xdist the tests run in parallel: most of their time is kernel compilation, and a fault that breaks one
process's context leaves the other processes intact. Tests that start engine processes run after them, alone.

Works from a bare checkout: nothing of the project is installed, a temporary folder with a link `tokenloom` to the
checkout is on PYTHONPATH. Needs no pytest plugin and no setproctitle. Exit code 0 if all tests passed and the
benchmark ran, or if there is no GPU; 1 otherwise. Standard library only: a separate process imports torch.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
faulthandler_timeout = 90
markers =
    slow: long forms
    gpu: needs a CUDA device
"""
MARK = re.compile(r"^(pytestmark = |\s*@)pytest\.mark\.gpu\b", re.MULTILINE)
_WORD = r"(?P<outcome>PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)"
OUTCOMES = (  # the output of pytest in one process, and under xdist
    re.compile(rf"^(?P<name>\S*\.py::.*?) {_WORD}\b"),
    re.compile(rf"^\[gw\d+\] \[ *\d+%\] {_WORD} (?P<name>\S*\.py::.*?)\s*$"),
)
NUM_LAST_LINES = 2000
LIMITS_S = {"tests": 220, "process_tests": 100, "tensor_parallel": 40, "goals": 120, "benchmark": 240}
LARGE_LIMIT_S = {"large": 540}  # of parts that run only on request
TOTAL_S = 590  # of all parts; the last parts may get less than their limits
AGAIN_S = 40
GRACE_S = 20.0  # from the interrupt at the limit to the kill: pytest-xdist waits 10 s for its processes
ALONE = "test_processes.py"  # measures the device's free memory
SHARED = "test_tensor_parallel.py"  # needs two devices
MAX_PROCESSES = 12  # each holds a context on the device


@contextmanager
def bare_package() -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield a folder in which `tokenloom` links to the checkout, and an environment with that folder on PYTHONPATH."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        (Path(folder) / "tokenloom").symlink_to(ROOT)
        (Path(folder) / "pytest.ini").write_text(PYTEST_INI, encoding="utf-8")
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        on_the_device = {"TRITON_INTERPRET": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        yield Path(folder), {**os.environ, "PYTHONPATH": path, **on_the_device}


def ask_torch() -> dict[str, Any]:
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, encoding="utf-8", timeout=300, cwd="/")
    if probe.returncode:
        return {"versions": {}, "gpu": None, "reason": probe.stderr.strip().splitlines()[-1]}
    facts: dict[str, Any] = json.loads(probe.stdout.splitlines()[-1])
    return facts


def run_streamed(
    command: list[str], folder: Path, environment: dict[str, str], timeout_s: float, grace_s: float = GRACE_S
) -> dict[str, Any]:
    """Run a command and show its output as it arrives; return its exit code (None: timed out) and its last lines."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        start_new_session=True,
    )
    is_late = threading.Event()

    def interrupt() -> None:
        is_late.set()
        process.send_signal(signal.SIGINT)  # on an interrupt pytest still prints the failures

    def kill() -> None:
        os.killpg(process.pid, signal.SIGKILL)  # its children hold the output pipe open, too

    timers = [threading.Timer(timeout_s, interrupt), threading.Timer(timeout_s + grace_s, kill)]
    for timer in timers:
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
        for timer in timers:
            timer.cancel()
    return {"code": None if is_late.is_set() else code, "lines": list(lines)}


def gpu_test_files() -> list[str]:
    """Return the files with a gpu mark, as paths below the temporary folder."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [f"tokenloom/{file.relative_to(ROOT)}" for file in files if MARK.search(file.read_text(encoding="utf-8"))]


def run_tests(
    folder: Path, environment: dict[str, str], timeout_s: float, files: list[str], num_processes: int = 1
) -> dict[str, Any]:
    """Run the gpu-marked tests in `files` and return their names by outcome; good if all ran and none failed.

    Failed tests run once more, each in its own process with blocking launches: this shows the failing kernel, and
    separates the tests that failed only because another test had broken the process's context.
    """
    command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", "--rootdir", str(folder), "-vv", "-m", "gpu"]
    alone = list(command)
    if num_processes > 1 and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(num_processes)]
    result = run_streamed([*command, *files], folder, environment, timeout_s)
    names: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for line in result["lines"]:
        if found := next(filter(None, (form.match(line) for form in OUTCOMES)), None):
            kind = {"PASSED": "passed", "XPASS": "failed", "FAILED": "failed", "ERROR": "failed"}.get(
                found["outcome"], "skipped"
            )
            names[kind].append(found["name"])
    is_good = result["code"] == 0 and bool(names["passed"])
    report: dict[str, Any] = {"ok": is_good, "stopped_at_limit": result["code"] is None, **names}
    if not is_good:
        report["last_lines"] = result["lines"][-NUM_LAST_LINES:]
        blocking, failed = {**environment, "CUDA_LAUNCH_BLOCKING": "1"}, names["failed"][:MAX_PROCESSES]
        with ThreadPoolExecutor(MAX_PROCESSES) as threads:
            again = threads.map(lambda name: run_streamed([*alone, name], folder, blocking, AGAIN_S), failed)
            report["again"] = {
                name: "passes alone" if each["code"] == 0 else each["lines"][-NUM_LAST_LINES:]
                for name, each in zip(failed, again, strict=True)
            }
    return report


def run_shared(
    folder: Path, environment: dict[str, str], timeout_s: float, files: list[str], num_devices: int
) -> dict[str, Any]:
    """Run the tests that need two devices; with one device report them as not measured, which is no failure."""
    if num_devices < 2:
        return {"ok": True, "not_measured": "tensor parallelism over NCCL: one GPU is visible, two are needed"}
    return run_tests(folder, environment, timeout_s, files)


def run_script(
    name: str, folder: Path, environment: dict[str, str], timeout_s: float, *arguments: str
) -> dict[str, Any]:
    """Run a script and return the figures that it wrote before its end."""
    file = folder / f"{name}.json"
    command = [sys.executable, "-m", f"tokenloom.scripts.{name}", "--json", str(file), *arguments]
    result = run_streamed(command, folder, environment, timeout_s)
    report: dict[str, Any] = {"ok": result["code"] == 0, "stopped_at_limit": result["code"] is None}
    if file.exists():
        report |= json.loads(file.read_text(encoding="utf-8"))
    if not report["ok"]:
        report["last_lines"] = result["lines"][-NUM_LAST_LINES:]
    return report


def commit() -> str:
    git = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, encoding="utf-8", check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="file for the JSON (default: print it)")
    parts_s = LIMITS_S | LARGE_LIMIT_S
    parser.add_argument("--only", nargs="+", choices=parts_s, default=list(LIMITS_S), help="leave others out")
    options = parser.parse_args()
    deadline = time.monotonic() + TOTAL_S
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    document: dict[str, Any] = {"date": now, "commit": commit(), "python": sys.version.split()[0], **ask_torch()}
    write(document, options.out)
    if document["gpu"] is None:
        print(f"gpu_check: nothing to check, {document.get('reason')}")
        return 0
    print(f"gpu_check: {document['gpu']['name']}, commit {document['commit']}")
    with bare_package() as (folder, environment):
        files = gpu_test_files()
        beside = [file for file in files if not file.endswith((ALONE, SHARED))]
        alone, shared = ([file for file in files if file.endswith(name)] for name in (ALONE, SHARED))
        num_processes = min(MAX_PROCESSES, os.cpu_count() or 1)
        num_devices = document["gpu"]["count"]
        threads = {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // num_processes, 1))}  # share the cores
        parts: dict[str, Callable[[float], dict[str, Any]]] = {
            "tests": lambda limit_s: run_tests(folder, environment | threads, limit_s, beside, num_processes),
            "process_tests": lambda limit_s: run_tests(folder, environment, limit_s, alone),
            "tensor_parallel": lambda limit_s: run_shared(folder, environment, limit_s, shared, num_devices),
            "goals": lambda limit_s: run_script("gpu_goals", folder, environment, limit_s),
            "benchmark": lambda limit_s: run_script("gpu_bench", folder, environment, limit_s),
            "large": lambda limit_s: run_script("gpu_bench", folder, environment, limit_s, "--models", "8b", "14b"),
        }
        for name, run in parts.items():
            if name in options.only:
                begun = time.monotonic()
                limit_s = min(parts_s[name], deadline - begun - GRACE_S)
                report = run(limit_s) if limit_s > 0 else {"ok": False, "not_measured": "no time was left"}
                document[name] = {**report, "seconds": round(time.monotonic() - begun, 1)}
                write(document, options.out)
    if options.out is None:
        print(json.dumps(document, indent=2))
    return 0 if all(document[name]["ok"] for name in parts if name in document) else 1


def write(document: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
