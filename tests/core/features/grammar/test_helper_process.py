"""The grammar process behind its socket, as the core's loop meets it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from tokenloom.core.features.grammar.helper import HELPER_IS_UP
from tokenloom.core.features.grammar.helper_process import GrammarHelperProcess
from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.ipc.helper_process import HelperLost
from tokenloom.ipc.messages.grammar import (
    AdvanceGrammars,
    CloseGrammars,
    GrammarOpened,
    GrammarsAdvanced,
    GrammarToCore,
)
from tokenloom.tests.core.harness import make_spec
from tokenloom.tests.support.engine_specs import in_folder

DEADLINE_S = 60.0
QUESTION = AdvanceGrammars(grammar_ids=b"", token_ids=b"", serial=0)


@pytest.fixture(params=["grammar", "prover"])
def name(request: pytest.FixtureRequest) -> str:
    """The name of the process."""
    return str(request.param)


@pytest.fixture
def helper(name: str, tmp_path: Path) -> Iterator[GrammarHelperProcess]:
    spec = in_folder(make_spec(), tmp_path, tokenizer_folder=str(DEMO_FOLDER))
    helper = GrammarHelperProcess(spec, is_prover=name == "prover")
    yield helper
    helper.stop()


def answers(helper: GrammarHelperProcess, count: int) -> list[GrammarToCore]:
    """Wait for so many answers, as the core's loop does."""
    messages, deadline, poller = list[GrammarToCore](), time.monotonic() + DEADLINE_S, zmq.Poller()
    for waker in helper.wakers:
        poller.register(waker, zmq.POLLIN)
    while len(messages) < count:
        assert poller.poll(max(deadline - time.monotonic(), 0) * 1000), "no sign of the process"
        messages += helper.receive()
    return messages


def test_the_core_never_waits_for_a_grammar_process_that_is_not_there_yet(helper: GrammarHelperProcess) -> None:
    for _ in range(2):
        helper.send(QUESTION)
    assert helper.receive() == [], "the process was waited for"
    first, *rest = answers(helper, 3)
    assert first == GrammarOpened(grammar_id=HELPER_IS_UP)
    assert all(isinstance(message, GrammarsAdvanced) for message in rest)


def test_a_killed_process_is_reported_once_and_replaced_by_the_next_message(
    name: str, helper: GrammarHelperProcess
) -> None:
    helper.send(CloseGrammars(grammar_ids=b""))
    assert not helper.has_process, "there is nothing to close"
    helper.send(QUESTION)
    answers(helper, 2)
    (process,) = (each for each in psutil.Process().children() if f"tokenloom {name}" in " ".join(each.cmdline()))
    process.kill()
    with pytest.raises(HelperLost, match="was ended by SIGKILL"):
        answers(helper, 1)
    assert helper.receive() == [] and not helper.has_process
    helper.send(QUESTION)
    assert len(answers(helper, 2)) == 2
