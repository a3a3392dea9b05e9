"""Protocol between a benchmark and a peer process: one JSON object per line.

    the peer      {"ready": {…}}                                     once, when it can serve
    benchmark     {"prompts": [[…], …], "max_tokens": 64}            again and again; end of file ends the peer
    the peer      {"seconds": 1.5, "num_tokens": 2048}               or {"error": "…"}

Standard library only: peers run in Python environments without tokenloom. Output of the peer's libraries goes to
stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def serve(
    description: str | None, load: Callable[[argparse.Namespace], tuple[dict[str, Any], Answer]], **flags: Any
) -> int:
    """Read the command line (MODEL and `flags`, with their defaults), load, report ready, answer until stdin ends.

    `load` returns facts about the peer, and the function that answers a request.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name, default in flags.items():
        kind: dict[str, Any] = {"action": "store_true"} if default is False else {"type": type(default)}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, **kind)
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    facts, answer = load(options)
    answers.write(json.dumps({"ready": facts}) + "\n")
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as error:  # the benchmark reports it and ends this process
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
    return 0
