"""HelperWork: the work of a helper process: it answers one question at a time, until its owner closes the socket.

A question is two frames, the message and bytes that belong to it; an answer is one. The owner's end of the socket is
a HelperProcess (helper_process.py). The process limits its own memory, and the kernel ends it before any other.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from .child import limit_address_space, run_child
from .codec import Decoder, encode
from .process.frames import receive_frame, send_frame
from .process.malloc import return_large_blocks, trim_heap
from .spec.config.engine_spec import EngineSpec

Q = TypeVar("Q")

NICENESS = 5  # below the engine's other processes


class HelperWork(Generic[Q]):
    """Owner of the process's end of the socket."""

    supervisor = None

    def __init__(self, channel: socket.socket, question_type: object, answer: Callable[[Q, bytearray], object]) -> None:
        """`answer` returns the reply to a question with its bytes."""
        self._channel = channel
        self._answer = answer
        self._decoder: Decoder[Q] = Decoder(question_type)

    def run(self) -> None:
        with contextlib.suppress(ConnectionError):
            send_frame(self._channel, [])  # it is ready
            while True:
                self._serve_one()
                trim_heap()  # which has nothing of the last question now

    def close(self) -> None:
        self._channel.close()

    def _serve_one(self) -> None:
        question = self._decoder.decode(receive_frame(self._channel))
        content = receive_frame(self._channel)
        send_frame(self._channel, [encode(self._answer(question, content))])


def run_helper(
    name: str,
    description: str,
    question_type: object,
    new_answer: Callable[[EngineSpec], Callable[[Q, bytearray], object]],
    address_space_bytes: int,
) -> int:
    """Run a helper process and return its exit code. `name`: of the process, in its log. `new_answer`: returns the
    function that answers questions of `question_type`."""
    parser = argparse.ArgumentParser(prog=f"tokenloom {name}", description=description)
    parser.add_argument("--fd", type=int, required=True, help="the descriptor of the socket to the owner")
    channel = socket.socket(fileno=parser.parse_args().fd)
    return_large_blocks()
    limit_address_space(address_space_bytes)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")  # the OOM killer's first choice
    os.nice(NICENESS)
    return run_child(name, lambda spec: HelperWork(channel, question_type, new_answer(spec)))
