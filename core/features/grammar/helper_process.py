"""GrammarHelperProcess: a GrammarHelper (helper.py) that starts the grammar process and uses it over a socket."""

from __future__ import annotations

import logging

from ....ipc.codec import encode
from ....ipc.helper_process import HelperLost, HelperProcess, HelperUnavailable
from ....ipc.messages.grammar import CloseGrammars, CoreToGrammar, GrammarToCore
from ....ipc.process.log import is_worth_a_line
from ....ipc.spec.config.engine_spec import EngineSpec

logger = logging.getLogger("tokenloom.core")

MODULE = "tokenloom.core.features.grammar.process"


class GrammarHelperProcess:
    """Owner of the grammar process, which the first message starts."""

    def __init__(self, spec: EngineSpec, *, is_prover: bool = False) -> None:
        """is_prover: the process compiles grammars for a GrammarProver, and makes no masks."""
        options = ["--prover"] if is_prover else []
        self._process: HelperProcess[GrammarToCore] = HelperProcess(MODULE, spec, GrammarToCore, options)
        self._name = "prover of grammars" if is_prover else "grammar process"
        self._num_unstarted = 0
        self._num_ended = 0

    @property
    def has_process(self) -> bool:
        return self._process.has_process

    @property
    def wakers(self) -> list[int]:
        """Descriptors that are readable when there are answers, or the process has ended."""
        return self._process.wakers

    def send(self, message: CoreToGrammar) -> None:
        if isinstance(message, CloseGrammars) and not self.has_process:
            return
        try:
            self._process.start()
        except HelperUnavailable as error:
            self._num_unstarted += 1
            if is_worth_a_line(self._num_unstarted):
                logger.warning("the %s %s", self._name, error)
            raise
        self._process.send([encode(message)])

    def receive(self) -> list[GrammarToCore]:
        try:
            return self._process.receive()
        except HelperLost as loss:
            self._num_ended += 1
            if is_worth_a_line(self._num_ended):
                logger.warning("the %s %s; another one is started when it is needed", self._name, loss)
            raise

    def stop(self) -> None:
        """Kill the process; the next message starts another one."""
        self._process.stop()
