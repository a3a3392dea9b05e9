"""Count the Python calls of one decode token in an engine inside this process, and the changes of file between them:
a measure of a reader's way along a token.

The count is the difference between a long and a short greedy answer of the demo model, divided by their difference in
tokens, so that the start of a request does not enter. Only calls of this project's own functions count, by all threads.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from tokenloom import LLM, SamplingParams

ROOT = str(Path(__file__).resolve().parents[2])
SHORT, LONG = 32, 96  # tokens


class Walk:
    """Recorder of the place of each call of this project's functions, as a context."""

    def __init__(self) -> None:
        self.places: list[tuple[str, str]] = []  # file, function

    def _see(self, frame: FrameType, event: str, _argument: Any) -> None:
        if (
            event == "call"
            and frame.f_code.co_filename.startswith(ROOT)
            and "site-packages" not in frame.f_code.co_filename
        ):
            self.places.append((frame.f_code.co_filename[len(ROOT) + 1 :], frame.f_code.co_name))

    def __enter__(self) -> Walk:
        self.places.clear()
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    @property
    def num_file_changes(self) -> int:
        return sum(a[0] != b[0] for a, b in itertools.pairwise(self.places))


def walk(llm: LLM, num_tokens: int) -> tuple[int, int, Counter[tuple[str, str]]]:
    """Generate one greedy answer; return its calls, changes of file, and calls by place."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    with Walk() as steps:
        llm.generate([[7, 8, 9, num_tokens]], params, use_tqdm=False)
    return len(steps.places), steps.num_file_changes, Counter(steps.places)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--top", type=int, default=0, metavar="N", help="print the N places with the most calls for a token"
    )
    arguments = parser.parse_args()
    with LLM(model="demo", device="cpu", num_threads=1, in_process=True) as llm:
        walk(llm, SHORT)
        short, long = walk(llm, SHORT), walk(llm, LONG)
    span = LONG - SHORT
    calls, changes = (round((after - before) / span) for before, after in zip(short[:2], long[:2], strict=True))
    print(f"one decode token: {calls} Python calls, {changes} changes of file")
    for (file, function), count in (long[2] - short[2]).most_common(arguments.top):
        print(f"{count / span:6.2f} {file}:{function}")


if __name__ == "__main__":
    main()
