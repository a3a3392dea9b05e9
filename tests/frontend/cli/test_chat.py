"""ChatSession with lists in place of a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Generator
from typing import cast

from tokenloom import SamplingParams
from tokenloom.frontend.cli.attached import Attached, End
from tokenloom.frontend.cli.chat import ChatSession

DEADLINE_S = 30.0


class Engine:
    """Responds with one word and an end."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def stream(self, turns: object, params: object) -> Generator[str, None, End]:
        yield "Lima"
        return End(self.reason, 3)


def chat(lines: list[str], show: Callable[[str], None], reason: str = "stop") -> None:
    """Chat with these lines; all must be read."""
    typed = iter(lines)
    ChatSession(cast(Attached, Engine(reason)), SamplingParams(), None, lambda _: next(typed), show).run()
    assert next(typed, None) is None


def test_ctrl_c_after_a_response_does_not_end_the_chat() -> None:
    shown: list[str] = []

    def show(text: str) -> None:
        shown.append(text)
        if text == "\n" and shown.count("\n") == 1:  # the last thing shown of the first response
            raise KeyboardInterrupt

    chat(["first", "second", "/exit"], show)
    assert shown.count("Lima") == 2


def test_an_answer_cut_by_its_limit_says_so_and_the_stats_count_its_tokens() -> None:
    shown: list[str] = []
    chat(["first", "/stats", "/exit"], shown.append, "length")
    assert " [cut after 3 tokens: /params max_tokens=N allows more]" in shown
    assert any(text.startswith("3 tokens in ") for text in shown)


def test_a_user_without_a_home_can_chat() -> None:
    script = "import pwd; pwd.getpwuid = {}.__getitem__; import tokenloom.frontend.cli.chat"
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    subprocess.run([sys.executable, "-P", "-c", script], check=True, timeout=DEADLINE_S, cwd="/", env=environment)
