"""ChatSession with lists in place of a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import cast

from tokenloom import Client, SamplingParams
from tokenloom.frontend.cli.chat import ChatSession

DEADLINE_S = 30.0


class Engine:
    """Responds with one word; after the first response it raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.num_interrupts = 0

    def stream(self, turns: object, params: object) -> Iterator[str]:
        yield "Lima"

    def tokenize(self, text: str) -> list[int]:
        if not self.num_interrupts:
            self.num_interrupts += 1
            raise KeyboardInterrupt
        return [0]


def test_ctrl_c_after_a_response_does_not_end_the_chat() -> None:
    typed, shown = iter(["first", "second", "/exit"]), list[str]()
    chat = ChatSession(cast(Client, Engine()), SamplingParams(), None, lambda _: next(typed), shown.append)
    chat.run()
    assert shown.count("Lima") == 2 and next(typed, None) is None


def test_a_user_without_a_home_can_chat() -> None:
    script = "import pwd; pwd.getpwuid = {}.__getitem__; import tokenloom.frontend.cli.chat"
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    subprocess.run([sys.executable, "-P", "-c", script], check=True, timeout=DEADLINE_S, cwd="/", env=environment)
