"""The grammar process behind its socket, as the core's loop meets it."""

from __future__ import annotations

import time
from pathlib import Path

import zmq

from tokenloom.core.features.grammar.host import HOST_IS_UP
from tokenloom.core.features.grammar.process_host import GrammarProcessHost
from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.ipc.messages.grammar import AdvanceGrammars, GrammarOpened, GrammarsAdvanced, GrammarToCore
from tokenloom.tests.core.harness import make_spec
from tokenloom.tests.support.engine_specs import in_folder

DEADLINE_S = 60.0


def test_the_core_never_waits_for_a_grammar_process_that_is_not_there_yet(tmp_path: Path) -> None:
    spec = in_folder(make_spec(), tmp_path, tokenizer_folder=str(DEMO_FOLDER))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    host = GrammarProcessHost(context, spec, spec.endpoints.grammar_of(0))
    try:
        for _ in range(2):
            host.send(AdvanceGrammars(grammar_ids=b"", token_ids=b"", serial=0))
        assert not list(tmp_path.iterdir()), "the process was waited for"
        messages, deadline = list[GrammarToCore](), time.monotonic() + DEADLINE_S
        poller = zmq.Poller()
        for waker in host.wakers:
            poller.register(waker, zmq.POLLIN)
        while len(messages) < 3:
            assert poller.poll(max(deadline - time.monotonic(), 0) * 1000), "no sign of the process"
            messages += host.receive()
        assert messages[0] == GrammarOpened(grammar_id=HOST_IS_UP)
        assert all(isinstance(message, GrammarsAdvanced) for message in messages[1:])
    finally:
        host.stop()
        context.destroy(linger=0)
    assert not list(tmp_path.iterdir()), "its socket is left behind"
