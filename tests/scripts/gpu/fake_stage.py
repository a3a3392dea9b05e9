"""A command of a stage for test_gpu_check.py: each case does as the JSON file BEHAVIOURS says."""

from __future__ import annotations

import json
import os
import sys
import threading
from functools import partial
from pathlib import Path

from tokenloom.scripts.gpu.cases import Cases, Row, new_parser


def behave(case: str, behaviour: str) -> Row:
    if behaviour == "passes alone":
        behaviour = "passes" if os.environ.get("CUDA_LAUNCH_BLOCKING") else "fails"
    if behaviour == "fails":
        raise ValueError(f"{case} is bad")
    if behaviour == "exits":
        os._exit(7)
    if behaviour == "hangs":
        threading.Event().wait()
    return {"figure": 1.5} if behaviour == "passes" else {"not_measured": behaviour}


def check(folder: Path) -> None:
    if (folder / "is_broken").exists():
        raise RuntimeError("the device is gone")


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("behaviours", type=Path)
    options = parser.parse_args()
    behaviours = json.loads(options.behaviours.read_text())
    cases = Cases.of_options(options, list(behaviours), lambda: check(options.behaviours.parent))
    with options.behaviours.with_name("ran").open("a") as ran:
        for case, behaviour in behaviours.items():
            if cases.wants(case):
                print(case, file=ran, flush=True)
            cases.measure(case, partial(behave, case, behaviour))
    return int(cases.has_failed)


if __name__ == "__main__":
    sys.exit(main())
