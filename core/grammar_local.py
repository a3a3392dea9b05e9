"""Grammars in the caller's process, for the in-process engine: a GrammarHost (grammar.py) without a socket."""

from __future__ import annotations

from collections import deque

from ..ipc.engine_spec import EngineSpec
from ..ipc.messages import CloseGrammars, CoreToGrammar, GrammarOpened, GrammarToCore, OpenGrammar
from .grammar import HOST_IS_UP
from .grammar_server import GrammarServer


class GrammarLocalHost:
    """Grammars in the caller's process: answers are ready when `send` returns."""

    def __init__(self, spec: EngineSpec) -> None:
        self._server = GrammarServer(spec)
        self._answers: deque[GrammarToCore] = deque([GrammarOpened(grammar_id=HOST_IS_UP)])

    def send(self, message: CoreToGrammar) -> None:
        if isinstance(message, OpenGrammar):
            self._answers.append(self._server.open(message.grammar_id, self._server.compile(message)))
        elif isinstance(message, CloseGrammars):
            self._server.close(message.grammar_ids)
        else:
            self._answers.append(self._server.advance(message))

    def receive(self) -> list[GrammarToCore]:
        answers, self._answers = list(self._answers), deque()
        return answers

    def stop(self) -> None:
        """Nothing runs by itself."""
