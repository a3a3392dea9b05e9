"""Check a GPU completely, in as many calls as it takes: scripts/gpu_check [OUT.json]

Runs the stages of stages.py in the order of their worth: does anything work; tests; kernels and engines beside
their limits; tuning; ranks; large models. Writes OUT.json after every few seconds, and at the end OUT.md, a summary,
and OUT.log, all output. A later call with the same OUT.json goes on where the last one stopped (plan.py): cases
that passed or were measured at this commit on this device are done, all others run. A failed case runs once more, alone
and with blocking launches, for its full trace.

    --seconds N          the time of this call (default 570); a stage that does not fit is left for the next
    --only STAGE …       these stages
    --again STAGE …      these anew, as after a mend
    --rehearse           the whole plan on a fake device with small sizes: figures have no meaning

Works from a bare checkout: a temporary folder with a link `tokenloom` to it is on PYTHONPATH. Exit code 0 if no case
failed and none is left, or if there is no GPU; 1 if a case failed, 2 if a package is missing, 3 if something is left.
Standard library only: separate processes import torch.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from tokenloom.scripts.gpu.cases import BROKEN_EXIT, MAX_ERROR, write_json
from tokenloom.scripts.gpu.plan import Place, Plan, Results, Row, Step, outcome
from tokenloom.scripts.gpu.run import GRACE_S, Ended, run_streamed
from tokenloom.scripts.gpu.stages import ROOT, STAGES, Machine, Started, bare_package
from tokenloom.scripts.gpu.summary import summary

PROBE = """
import importlib.util, json, importlib.metadata as m
names = ("torch", "triton", "transformers", "numpy", "pyzmq", "msgspec", "tokenizers", "pytest", "pytest-xdist",
         "safetensors")
found = {d.name.lower(): d.version for d in m.distributions() if d.name}
needed = ("httptools", "hypothesis", "jinja2", "msgspec", "numpy", "psutil", "pytest", "safetensors", "tokenizers",
          "tqdm", "transformers", "triton", "yaml", "zmq")
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
                        "sm": f"{p.major}{p.minor}", "num_sms": p.multi_processor_count, "cuda": torch.version.cuda}
    else:
        facts["reason"] = "torch sees no CUDA device"
print(json.dumps(facts))
"""
DEFAULT_S, REHEARSAL_S = 570.0, 3000.0
AGAIN_S, LEAST_AGAIN_S, MAX_AGAIN, MAX_AGAIN_SCRIPT = 40.0, 5.0, 12, 2
NUM_LAST_LINES = 400
ENDING_S = 3.0  # after the last stage: the summary
PROBE_S = 300.0
START = "the start of the command"
HANGS = 0.7  # share of a stage's longest time in which one case may still be cut off


def ask_torch(environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-c", PROBE]
    probe = subprocess.run(
        command, capture_output=True, encoding="utf-8", timeout=PROBE_S, cwd="/", env=environment, check=False
    )
    if probe.returncode:
        return {"versions": {}, "gpu": None, "missing": [], "reason": probe.stderr.strip().splitlines()[-1]}
    facts: dict[str, Any] = json.loads(probe.stdout.splitlines()[-1])
    return facts


def commit(root: Path = ROOT) -> str:
    """Return the checkout's commit if no source differs from it; else, or without git, the digest of all sources."""
    git = ["git", "-C", str(root)]
    try:
        head, changes = (
            subprocess.run([*git, *arguments], capture_output=True, encoding="utf-8", check=True, timeout=30).stdout
            for arguments in (
                ("rev-parse", "--short=12", "HEAD"),
                ("status", "--porcelain", "--", "*.py", "*.c", "*.h", "*.toml", "scripts"),
            )
        )
    except (OSError, subprocess.SubprocessError):
        head, changes = "", "unknown"
    return head.strip() if not changes.strip() else f"{head.strip() or 'sources'}+{_digest(root)}"


def _digest(root: Path) -> str:
    digest = hashlib.sha256()
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in ("docs", "build"))
        for name in sorted(files):
            if name.endswith((".py", ".c", ".h", ".toml")):
                file = Path(folder) / name
                digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:8]


class Check:
    """One call: runs the steps of the plan and keeps the files."""

    def __init__(
        self, results: Results, machine: Machine, environment: dict[str, str], out: Path | None, hangs: float = HANGS
    ) -> None:
        self._results, self._machine, self._environment, self._out = results, machine, environment, out
        self._hangs = hangs
        self._log: TextIO | None = out.with_suffix(".log").open("a", encoding="utf-8") if out else None

    def show(self, line: str) -> None:
        print(line, flush=True)
        if self._log is not None:
            self._log.write(line + "\n")
            self._log.flush()

    def run_all(self, plan: Plan, folder: Path, begun: float, seconds: float) -> None:
        """Run the steps of the plan that fit into `seconds` from `begun` on. An interrupt ends them."""
        deadline = begun + seconds - ENDING_S
        self.show(f"gpu_check: {self._results.place.device}, {plan.choice()}")
        if "pytest-xdist" not in self._results.document["versions"]:
            self.show("gpu_check: without pytest-xdist the tests run one by one, which takes several times as long")
        call: dict[str, Any] = {"date": now(), "commit": self._results.place.commit, "arguments": sys.argv[1:]}
        self._results.document["calls"].append(call)
        try:
            for step in plan.steps(lambda: deadline - time.monotonic() - GRACE_S):
                self.run(step, folder, deadline)
                call["seconds"] = round(time.monotonic() - begun, 1)
        except KeyboardInterrupt:
            self.show("gpu_check: stopped")
        call["seconds"] = round(time.monotonic() - begun, 1)

    def finish(self, plan: Plan, options: argparse.Namespace) -> int:
        """Write the document and its summary; return the exit code."""
        left = [stage.name for stage in self._machine.stages() if not self._results.is_done(stage.name)]
        remarks = ["Nothing is left." if not left else f"Left or failed: {', '.join(left)}. Go on with"]
        if left:
            command = ["scripts/gpu_check", *([str(options.out)] if options.out else [])]
            command += ["--rehearse"] if options.rehearse else []
            command += ["--seconds", f"{options.seconds:g}"] if options.seconds else []
            remarks += ["", f"    {shlex.join(command)}"]
        text = summary(self._machine.stages(), self._results, remarks)
        self.show(f"\n{text}")
        self.write()
        if self._out is None:
            print(json.dumps(self._results.document, indent=1))
        else:
            self._out.with_suffix(".md").write_text(text, encoding="utf-8")
        if self._log is not None:
            self._log.close()
        chosen = [stage.name for stage in plan.stages]  # others are left on purpose
        if any(self._results.count(name).failed for name in chosen):
            return 1
        return 3 if set(left) & set(chosen) else 0

    def write(self) -> None:
        if self._out is not None:
            write_json(self._out, self._results.document)

    def run(self, step: Step, folder: Path, deadline: float) -> None:
        """Run a step in `folder`, a bare package; record its rows as they come, and how it ended."""
        stage, begun = step.stage.name, time.monotonic()
        report = folder / "report.json"
        for file in (report, report.with_suffix(".cases")):
            file.unlink(missing_ok=True)
        self.show(f"\n── {stage}: {step.stage.title}; {step.need.name.lower()}, at most {step.limit_s:.0f} s ──")
        started = self._machine.start(stage, folder, step.skip)
        self._results.begin(stage, now())
        environment = self._environment | started.environment

        def follow() -> None:
            self._record(stage, read_report(report))
            self.write()

        ended = Ended(None, [])
        try:
            ended = run_streamed(started.command, folder, environment, step.limit_s, follow=follow, show=self.show)
        finally:  # also on an interrupt
            found = read_report(report)
            broken = blame(found, ended, step, self._hangs)
            self._record(stage, found)
            self._results.end(stage, {"seconds": round(time.monotonic() - begun, 1), "ended": "limit"})
            self.write()
        failed = [row for row in found["rows"] if outcome(row) == "failed"]
        self.ask_again(stage, folder, failed, deadline - time.monotonic())
        self._record(stage, found)
        facts: dict[str, object] = {"seconds": round(time.monotonic() - begun, 1), "code": ended.code}
        facts["ended"] = "limit" if ended.code is None else "broken" if broken else "done"
        facts |= {name: found[name] for name in ("settings", "machine", "notes") if name in found}
        if ended.code != 0:
            facts["last_lines"] = ended.lines[-NUM_LAST_LINES:]
        self._results.end(stage, facts)
        self.write()

    def _record(self, stage: str, report: dict[str, Any]) -> None:
        self._results.record(stage, report["cases"], report["rows"])

    def ask_again(self, stage: str, folder: Path, failed: list[Row], left_s: float) -> None:
        """Run failed cases once more, each alone; add `again` to their rows: their full trace, or "passes alone"."""
        is_script = self._machine.is_script(stage)
        limit_s = min(AGAIN_S * self._machine.factor, left_s - GRACE_S)
        chosen = [
            (row, started)
            for row in failed
            if "again" not in row and (started := self._machine.start_alone(stage, folder, row["case"])) is not None
        ]
        chosen = chosen[: MAX_AGAIN_SCRIPT if is_script else MAX_AGAIN]
        if not chosen or limit_s < LEAST_AGAIN_S:
            return

        def ask(failed: tuple[Row, Started]) -> None:
            row, started = failed
            lines: list[str] = []
            environment = self._environment | started.environment
            ended = run_streamed(started.command, folder, environment, limit_s, show=lines.append)
            row["again"] = "passes alone" if ended.code == 0 else lines[-NUM_LAST_LINES:]

        self.show(f"{stage}: {len(chosen)} failed cases once more, alone")
        with ThreadPoolExecutor(1 if is_script else self._machine.num_processes) as threads:
            for _ in threads.map(ask, chosen):
                pass


def read_report(file: Path) -> dict[str, Any]:
    """Return a command's report so far: cases (None: unknown), running and rows."""
    found: dict[str, Any] = {"cases": None, "running": {}, "rows": []}
    if file.exists():
        found |= json.loads(file.read_text(encoding="utf-8"))
    return found


def blame(report: dict[str, Any], ended: Ended, step: Step, hangs: float) -> bool:
    """Fail the cases that were running when the command ended by itself, its start if it came to no case, and at its
    limit a case that took `hangs` of the longest time that the stage ever gets. Return whether the command broke off,
    so that other cases may be left that can still run."""
    last, limit_s = "\n".join(ended.lines)[-MAX_ERROR:], step.limit_s
    for case, begun in report["running"].items():
        ran_s = time.time() - begun
        if ended.code is not None:
            report["rows"].append({"case": case, "error": f"{last}\nexit code {ended.code} while it ran"})
        elif limit_s >= step.stage.most_s and ran_s > hangs * limit_s:
            reason = f"it had run for {ran_s:.0f} s when the stage's {limit_s:.0f} s ended"
            report["rows"].append({"case": case, "error": f"{last}\n{reason}", "again": "not asked: it would hang"})
    is_broken = ended.code is not None and (bool(report["running"]) or ended.code == BROKEN_EXIT)
    if ended.code and report["cases"] is None:
        report["cases"] = [START]
        report["rows"].append({"case": START, "error": f"{last}\nexit code {ended.code}", "again": "not asked"})
    return is_broken


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def obstacle(facts: dict[str, Any], known: dict[str, Any] | None, options: argparse.Namespace) -> str:
    """Return the reason to run nothing, if there is one."""
    if facts["gpu"] is None:
        return f"nothing to check, {facts.get('reason')}"
    if facts["missing"]:
        return f"put these packages on PYTHONPATH first: {', '.join(facts['missing'])}"
    if known is not None and known.get("is_rehearsal", options.rehearse) != options.rehearse:
        return f"{options.out} is of {'a device' if options.rehearse else 'a rehearsal'}: give another file"
    return ""


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [stage.name for stage in STAGES]
    parser.add_argument("out", nargs="?", type=Path, help="file for the JSON (default: print it); goes on if it exists")
    parser.add_argument(
        "--seconds", type=float, help=f"of this call (default {DEFAULT_S:g}, {REHEARSAL_S:g} to rehearse)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="STAGE", default=names, help=f"of {', '.join(names)}"
    )
    parser.add_argument("--again", nargs="+", choices=names, metavar="STAGE", default=[], help="measure anew")
    parser.add_argument("--rehearse", action="store_true", help="on a fake device, with small sizes")
    return parser.parse_args(arguments)


def main() -> int:
    begun, options = time.monotonic(), parse()
    signal.signal(signal.SIGTERM, interrupt)
    machine = Machine(len(os.sched_getaffinity(0)), options.rehearse)
    known = json.loads(options.out.read_text(encoding="utf-8")) if options.out and options.out.exists() else None
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        environment = bare_package(Path(name), options.rehearse)
        facts = ask_torch(environment)
        if reason := obstacle(facts, known, options):
            print(f"gpu_check: {reason}")
            if known is None and options.out is not None:
                write_json(options.out, {"date": now(), "commit": commit(), **facts})
            return 0 if facts["gpu"] is None else 2
        results = Results(Place(commit(), facts["gpu"]["name"], options.rehearse), known)
        results.document |= {"date": now(), "python": sys.version.split()[0], **facts}
        for stage in options.again:
            results.forget(stage)
        plan = Plan([each for each in machine.stages() if each.name in options.only], results, facts["gpu"]["count"])
        check = Check(results, machine, environment, options.out)
        check.run_all(plan, Path(name), begun, options.seconds or (REHEARSAL_S if options.rehearse else DEFAULT_S))
        return check.finish(plan, options)


if __name__ == "__main__":
    sys.exit(main())
