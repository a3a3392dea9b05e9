"""LocalGrammarHelper: a GrammarHelper (helper.py) without a process, for the in-process engine."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ....ipc.messages.grammar import CloseGrammars, CoreToGrammar, GrammarOpened, GrammarToCore, OpenGrammar
from ....ipc.spec.config.engine_spec import EngineSpec
from .helper import HELPER_IS_UP

if TYPE_CHECKING:
    from .server import GrammarServer


class LocalGrammarHelper:
    """Owner of a GrammarServer in the caller's process; answers are ready when `send` returns."""

    has_process = False

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._server: GrammarServer | None = None
        self._answers: deque[GrammarToCore] = deque()

    def send(self, message: CoreToGrammar) -> None:
        server = self._started_server()
        if isinstance(message, OpenGrammar):
            self._answers.append(server.open(message.grammar_id, server.compile(message)))
        elif isinstance(message, CloseGrammars):
            server.close(message.grammar_ids)
        else:
            self._answers.append(server.advance(message))

    def _started_server(self) -> GrammarServer:
        if self._server is None:
            from .server import GrammarServer  # brings llguidance, which few engines need

            self._server = GrammarServer(self._spec)
            self._answers.append(GrammarOpened(grammar_id=HELPER_IS_UP))
        return self._server

    def receive(self) -> list[GrammarToCore]:
        answers, self._answers = list(self._answers), deque()
        return answers

    def stop(self) -> None:
        """Do nothing: there is no process."""
