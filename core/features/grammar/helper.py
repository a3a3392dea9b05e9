"""GrammarHelper: the core's helper that compiles grammars and makes masks: a process (helper_process.py), or an object
in its place (local_helper.py)."""

from __future__ import annotations

from typing import Protocol

from ....ipc.messages.grammar import CoreToGrammar, GrammarToCore

NUM_COMPILERS = 2  # grammars that are compiled at once
START_TIMEOUT_S = 60.0  # longest time until a new helper has read the vocabulary
ANSWER_TIMEOUT_S = 5.0  # longest time until a helper that lives has answered
SIGN_S = 1.0  # time without a message from a helper that compiles, before it is asked for a sign of life
REOPEN_S = 1.0  # time until another helper is started after one could not be
HELPER_IS_UP = 0  # the grammar id of a helper's first answer


class GrammarHelper(Protocol):
    """Interface of the object that compiles grammars and makes masks. `send` does not wait; `receive` returns the
    answers so far."""

    @property
    def has_process(self) -> bool:
        """Whether a process runs, whose end `receive` reports."""

    def send(self, message: CoreToGrammar) -> None:
        """Send a message; start the helper if it does not run. HelperUnavailable if it cannot be started."""

    def receive(self) -> list[GrammarToCore]:
        """Return the answers so far; HelperLost, once, if the helper has ended: the next one has no grammars."""

    def stop(self) -> None:
        """End the helper at once; the next message starts a new one."""
