"""Check a GPU in two calls, of 480 and of 240 seconds: scripts/gpu_check OUT.json

Runs the stages of stages.py in their order, each as a command of its own with a time limit; cases that have passed in
OUT.json are skipped. When all stages had their turn, cases that failed run once more in the time that is left, with
blocking launches. OUT.json is written every few seconds, OUT.log has all output, OUT.md is a summary at the end.

    --seconds N          the time of this call (default 480, of later ones 240); a stage that does not fit is left
    --only STAGE …       these stages
    --rehearse           on a fake device with small sizes: figures have no meaning

Works from a bare checkout: a temporary folder with a link `tokenloom` to it is on PYTHONPATH. Exit code 0 if no case
failed and none is left, or if there is no GPU; 1 if a case failed, 2 if a package is missing or OUT.json is of another
device, 3 if something is left. Standard library only: separate processes import torch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from tokenloom.scripts.gpu.cases import BROKEN_EXIT, MAX_ERROR, write_json
from tokenloom.scripts.gpu.results import Results
from tokenloom.scripts.gpu.run import GRACE_S, Ended, run_command
from tokenloom.scripts.gpu.stages import REHEARSED, ROOT, STAGES, Machine, Stage, bare_package
from tokenloom.scripts.gpu.summary import summary

PROBE = """
import importlib.util, json, importlib.metadata as m
found = {d.name.lower(): d.version for d in m.distributions() if d.name}
names = ("torch", "triton", "transformers", "numpy", "tokenizers", "safetensors", "pytest", "pytest-xdist")
needed = ("httptools", "hypothesis", "jinja2", "msgspec", "numpy", "psutil", "pytest", "safetensors", "tokenizers",
          "tqdm", "transformers", "triton", "xxhash", "yaml", "zmq")
facts = {"versions": {n: found[n] for n in names if n in found}, "gpu": None,
         "missing": [n for n in needed if importlib.util.find_spec(n) is None]}
try:
    import torch
except ImportError:
    facts["reason"] = "torch is not installed"
else:
    if torch.cuda.is_available():
        p = torch.cuda.get_device_properties(0)
        facts["gpu"] = {"name": p.name, "count": torch.cuda.device_count(), "memory_bytes": p.total_memory,
                        "sm": "%d%d" % torch.cuda.get_device_capability(), "num_sms": p.multi_processor_count}
    else:
        facts["reason"] = "torch sees no CUDA device"
print(json.dumps(facts))
"""
FIRST_S, LATER_S, REHEARSAL_S = 480.0, 240.0, 1800.0
ENDING_S = 3.0  # after the last stage: the summary
PROBE_S = 300.0
START = "the start of the command"


def ask_torch(environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-c", PROBE]
    probe = subprocess.run(
        command, capture_output=True, encoding="utf-8", timeout=PROBE_S, cwd="/", env=environment, check=False
    )
    if probe.returncode:
        return {"versions": {}, "gpu": None, "missing": [], "reason": probe.stderr.strip().splitlines()[-1]}
    facts: dict[str, Any] = json.loads(probe.stdout.splitlines()[-1])
    return facts


def commit() -> str:
    """Return the checkout's commit, marked if files differ from it; "unknown" without git."""
    git = ["git", "-C", str(ROOT)]
    try:
        head, changes = (
            subprocess.run([*git, *words], capture_output=True, encoding="utf-8", check=True, timeout=30).stdout.strip()
            for words in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{head}+changes" if changes else head


class Check:
    """One call: runs the stages and keeps the files."""

    def __init__(self, results: Results, machine: Machine, package: Path, environment: dict[str, str], out: Path):
        """`package`: the folder of a bare package, which `environment` names."""
        self._results, self._machine, self._out = results, machine, out
        self._package, self._environment = package, environment
        self._commit = str(results.document["commit"])
        self._log = out.with_suffix(".log")

    def show(self, line: str) -> None:
        print(line, flush=True)
        with self._log.open("a", encoding="utf-8") as log:
            print(line, file=log)

    def run_all(self, stages: list[Stage], begun: float, seconds: float) -> None:
        """Run the stages that fit into `seconds` from `begun` on, then the failed cases. An interrupt ends them."""
        deadline = begun + seconds - ENDING_S
        if "pytest-xdist" not in self._results.document["versions"]:
            self.show("gpu_check: without pytest-xdist the tests run one by one, which takes several times as long")
        call: dict[str, Any] = {"date": now(), "commit": self._commit, "arguments": sys.argv[1:]}
        self._results.document["calls"].append(call)

        def left_s() -> float:
            call["seconds"] = round(time.monotonic() - begun, 1)
            return deadline - time.monotonic() - GRACE_S

        try:
            for is_again in (False, True):
                for stage in stages:
                    self._run_stage(stage, is_again, left_s)
        except KeyboardInterrupt:
            self.show("gpu_check: stopped")
        left_s()

    def _run_stage(self, stage: Stage, is_again: bool, left_s: Callable[[], float]) -> None:
        """Run the cases of a stage that have no outcome, or those that failed. A command that breaks off at a case is
        started anew for the others."""
        tried = set[str]()
        while True:
            cases, rows = self._results.cases(stage.name), self._results.rows(stage.name)
            wanted = set(self._results.failed(stage.name) if is_again else set(cases or ()) - rows.keys()) - tried
            if not wanted and (is_again or cases is not None):
                return
            limit_s = min(stage.most_s * self._machine.factor, left_s())
            if limit_s < stage.least_s:
                return
            self.show(f"\n── {stage.name}: {stage.title}; at most {limit_s:.0f} s {'(again) ' * is_again}──")
            names, is_broken = self._run(stage, set(cases or ()) - wanted, is_again, limit_s)
            if not is_broken or names <= tried:
                return
            tried |= names

    def _run(self, stage: Stage, skip: set[str], is_again: bool, limit_s: float) -> tuple[set[str], bool]:
        """Run a command; record its rows as they come, and how it ended. Return the cases that ran, and whether it
        broke off, so that others can still run."""
        begun, report = time.monotonic(), self._package / "report.json"
        for file in (report, report.with_suffix(".cases")):
            file.unlink(missing_ok=True)
        started = self._machine.start(stage.name, self._package, skip)
        environment = self._environment | started.environment | ({"CUDA_LAUNCH_BLOCKING": "1"} if is_again else {})

        def follow() -> None:
            self._record(stage.name, read_report(report))

        ended = interrupted = Ended(None, "")
        try:
            ended = run_command(started.command, self._package, environment, limit_s, self._log, follow=follow)
        finally:
            found = read_report(report)
            has_had_all = ended is not interrupted and limit_s == stage.most_s * self._machine.factor
            is_broken = blame(found, ended, has_had_all)
            facts: dict[str, object] = {"date": now(), "commit": self._commit, "code": ended.code}
            facts |= {name: found[name] for name in ("settings", "machine") if name in found}
            facts |= {"seconds": round(time.monotonic() - begun, 1), "output": ended.output if ended.code else ""}
            self._results.end(stage.name, facts)
            self._record(stage.name, found)
        return {row["case"] for row in found["rows"]}, is_broken

    def _record(self, stage: str, report: dict[str, Any]) -> None:
        self._results.record(stage, report["cases"], report["rows"], self._commit)
        write_json(self._out, self._results.document)

    def finish(self, stages: list[Stage], command: list[str]) -> int:
        """Write the document and its summary; return the exit code. `command` goes on with the rest."""
        counts = {stage.name: self._results.count(stage.name) for stage in stages}
        left = [name for name, count in counts.items() if count.failed or count.left is None or count.left]
        remark = f"Left or failed: {', '.join(left)}. Go on with\n\n    {shlex.join(command)}"
        text = summary(stages, self._results, remark if left else "Nothing is left.")
        self.show(f"\n{text}")
        write_json(self._out, self._results.document)
        self._out.with_suffix(".md").write_text(text, encoding="utf-8")
        return 1 if any(count.failed for count in counts.values()) else 3 if left else 0


def read_report(file: Path) -> dict[str, Any]:
    """Return a command's report so far: cases (None: unknown), running and rows."""
    found: dict[str, Any] = {"cases": None, "running": {}, "rows": []}
    if file.exists():
        found |= json.loads(file.read_text(encoding="utf-8"))
    return found


def blame(report: dict[str, Any], ended: Ended, has_had_all: bool) -> bool:
    """Fail the cases that were running when the command ended by itself or `has_had_all` of its stage's time, and its
    start if it came to no case. Return whether the command broke off, so that others may be left that can still run."""
    last = ended.output[-MAX_ERROR:]
    if ended.code is not None or has_had_all:
        how = "cut off at the stage's limit" if ended.code is None else f"exit code {ended.code} while it ran"
        report["rows"] += [{"case": case, "error": f"{last}\n{how}"} for case in report["running"]]
    if ended.code and report["cases"] is None:
        report["cases"] = [START]
        report["rows"].append({"case": START, "error": f"{last}\nexit code {ended.code}"})
    return ended.code is not None and (bool(report["running"]) or ended.code == BROKEN_EXIT)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def obstacle(facts: dict[str, Any], known: dict[str, Any] | None, is_rehearsal: bool) -> str:
    """Return the reason to run nothing, if there is one."""
    if facts["gpu"] is None:
        return f"nothing to check, {facts.get('reason')}"
    if facts["missing"]:
        return f"put these packages on PYTHONPATH first: {', '.join(facts['missing'])}"
    device = known and known.get("gpu")
    if known and device and (known["is_rehearsal"], device["name"]) != (is_rehearsal, facts["gpu"]["name"]):
        return f"the file is of {'a rehearsal' if known['is_rehearsal'] else device['name']}: give another one"
    return ""


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [stage.name for stage in STAGES]
    parser.add_argument("out", type=Path, metavar="OUT.json", help="goes on if it exists")
    parser.add_argument("--seconds", type=float, help="of this call")
    parser.add_argument("--only", nargs="+", choices=names, metavar="STAGE", help=f"of {', '.join(names)}")
    parser.add_argument("--rehearse", action="store_true", help=f"by default {' and '.join(REHEARSED)}")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, interrupt)
    known = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else None
    chosen = options.only or (REHEARSED if options.rehearse else names)
    stages = [stage for stage in STAGES if stage.name in chosen]
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        environment = bare_package(Path(name), options.rehearse)
        facts = {"date": now(), "commit": commit(), "is_rehearsal": options.rehearse, **ask_torch(environment)}
        if reason := obstacle(facts, known, options.rehearse):
            print(f"gpu_check: {reason}")
            if known is None:
                write_json(options.out, facts)
            return 0 if facts["gpu"] is None else 2
        results = Results(known)
        results.document |= facts
        machine = Machine(len(os.sched_getaffinity(0)), options.rehearse)
        check = Check(results, machine, Path(name), environment, options.out)
        default_s = REHEARSAL_S if options.rehearse else LATER_S if results.document["calls"] else FIRST_S
        check.run_all(stages, begun, options.seconds or default_s)
        return check.finish(stages, ["scripts/gpu_check", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
