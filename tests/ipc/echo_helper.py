"""A helper process for tests: python -m tokenloom.tests.ipc.echo_helper --fd N

Answers with the question and the size of its bytes, except for four questions: "end" ends it with exit code 3,
"close" closes its socket, "compute" keeps it busy for one millisecond a byte, "hang" does not.
"""

from __future__ import annotations

import os
import sys
import time

from tokenloom.ipc.helper_work import run_helper

MODULE = "tokenloom.tests.ipc.echo_helper"
ADDRESS_SPACE_BYTES = 1 << 30


def answer(question: str, content: bytearray) -> list[str | int]:
    if question == "end":
        os._exit(3)
    if question == "close":
        os.closerange(3, 1 << 16)
    if question in ("close", "hang"):
        time.sleep(60)
    if question == "compute":
        end = time.process_time() + len(content) / 1000
        while time.process_time() < end:
            pass
    return [question, len(content)]


if __name__ == "__main__":
    sys.exit(run_helper("echo", "Echoes.", str, lambda spec: answer, ADDRESS_SPACE_BYTES))
