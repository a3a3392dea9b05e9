"""Run a batch of many lines, and watch the memory of the frontend and the intake process.

    python scripts/chaos/batch_memory.py --lines 50000

Each line asks for --tokens tokens of a short prompt. Prints the seconds of the check of the file, and of the lines, and
the resident MB of the frontend: at the begin, at each tenth of the lines, and at the end. Exit code 1 if a line has no
answer, or if the frontend grows by more than --most MB after the first tenth.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import openai

from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.bench.report import print_json
from tokenloom.scripts.bench.runner import read_options

ENGINE_FLAGS = ("--http", "0", "--device", "cpu", "--num-threads", "1", "--speculation", "off")
ENDPOINT = "/v1/completions"
OVER = ("completed", "failed", "expired", "cancelled")
PATIENCE_S = 60.0
MB = 1e6


def write_input(path: Path, num_lines: int, num_tokens: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for index in range(num_lines):
            body = {"prompt": f"Number {index} is", "max_tokens": num_tokens, "ignore_eos": True}
            line = {"custom_id": f"line {index}", "method": "POST", "url": ENDPOINT, "body": body}
            file.write(json.dumps(line) + "\n")


def resident_mb(engine: Engine, role: str) -> float:
    process = engine.find(role)
    return 0.0 if process is None else round(process.memory_info().rss / MB, 1)


def measure(engine: Engine, path: Path, num_lines: int) -> dict[str, object]:
    client = openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=5, timeout=PATIENCE_S)
    before = resident_mb(engine, "frontend")
    begun = time.monotonic()
    with path.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    upload_s = time.monotonic() - begun
    batch = client.batches.create(input_file_id=uploaded.id, endpoint=ENDPOINT, completion_window="24h")
    checked_s, intake_mb, by_tenth = 0.0, 0.0, list[float]()
    while batch.status not in OVER:
        time.sleep(0.25)
        batch = client.batches.retrieve(batch.id)
        counts = batch.request_counts
        assert counts is not None
        if batch.status == "validating":
            intake_mb = max(intake_mb, resident_mb(engine, "intake"))
            checked_s = time.monotonic() - begun - upload_s
        elif len(by_tenth) <= 10 * counts.completed // num_lines:
            by_tenth.append(resident_mb(engine, "frontend"))
    counts = batch.request_counts
    assert counts is not None
    return {
        "bytes of the file": path.stat().st_size,
        "lines completed": counts.completed,
        "seconds of the upload": round(upload_s, 1),
        "seconds of the check": round(checked_s, 1),
        "seconds of all": round(time.monotonic() - begun, 1),
        "MB of the intake process": intake_mb,
        "MB before": before,
        "MB at each tenth": by_tenth,
        "MB at the end": resident_mb(engine, "frontend"),
    }


def start_and_measure(num_lines: int, num_tokens: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        path, runtime = Path(folder, "in.jsonl"), Path(folder, "run")
        write_input(path, num_lines, num_tokens)
        runtime.mkdir()
        with Engine(runtime, (*ENGINE_FLAGS, "--state-dir", f"{folder}/state")) as engine:
            engine.wait_ready()
            report = measure(engine, path, num_lines)
            return report | {"exit code": engine.stop()}


OPTIONS = {"--lines": (50_000,), "--tokens": (1,), "--most": (20.0,)}


def main(argv: list[str] | None = None) -> int:
    arguments = read_options(__doc__, OPTIONS, argv)
    report = start_and_measure(arguments.lines, arguments.tokens)
    print_json(report, arguments.json)
    by_tenth = report["MB at each tenth"]
    assert isinstance(by_tenth, list)
    has_grown = max(by_tenth) - by_tenth[min(1, len(by_tenth) - 1)] > arguments.most
    return 1 if has_grown or report["lines completed"] != arguments.lines or report["exit code"] else 0


if __name__ == "__main__":
    sys.exit(main())
