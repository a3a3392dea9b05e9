"""The grammar process behind its socket, as the core's loop meets it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from tokenloom.core.features.grammar.host import HOST_IS_UP, GrammarHostLost
from tokenloom.core.features.grammar.process_host import GrammarProcessHost
from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
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
def host(name: str, tmp_path: Path) -> Iterator[GrammarProcessHost]:
    spec = in_folder(make_spec(), tmp_path, tokenizer_folder=str(DEMO_FOLDER))
    host = GrammarProcessHost(spec, is_prover=name == "prover")
    yield host
    host.stop()


def answers(host: GrammarProcessHost, count: int) -> list[GrammarToCore]:
    """Wait for so many answers, as the core's loop does."""
    messages, deadline, poller = list[GrammarToCore](), time.monotonic() + DEADLINE_S, zmq.Poller()
    for waker in host.wakers:
        poller.register(waker, zmq.POLLIN)
    while len(messages) < count:
        assert poller.poll(max(deadline - time.monotonic(), 0) * 1000), "no sign of the process"
        messages += host.receive()
    return messages


def test_the_core_never_waits_for_a_grammar_process_that_is_not_there_yet(host: GrammarProcessHost) -> None:
    for _ in range(2):
        host.send(QUESTION)
    assert host.receive() == [], "the process was waited for"
    first, *rest = answers(host, 3)
    assert first == GrammarOpened(grammar_id=HOST_IS_UP)
    assert all(isinstance(message, GrammarsAdvanced) for message in rest)


def test_a_killed_process_is_reported_once_and_replaced_by_the_next_message(
    name: str, host: GrammarProcessHost
) -> None:
    host.send(CloseGrammars(grammar_ids=b""))
    assert not host.has_process, "there is nothing to close"
    host.send(QUESTION)
    answers(host, 2)
    (process,) = (each for each in psutil.Process().children() if f"tokenloom {name}" in " ".join(each.cmdline()))
    process.kill()
    with pytest.raises(GrammarHostLost, match="was ended by SIGKILL"):
        answers(host, 1)
    assert host.receive() == [] and not host.has_process
    host.send(QUESTION)
    assert len(answers(host, 2)) == 2
