"""GrammarHost: compiles grammars and makes masks, in a process (process_host.py) or in the caller (local_host.py)."""

from __future__ import annotations

from typing import Protocol

from ....ipc.messages.grammar import CoreToGrammar, GrammarToCore

NUM_COMPILERS = 2  # grammars that are compiled at once
START_TIMEOUT_S = 60.0  # longest time until a new host has read the vocabulary
ANSWER_TIMEOUT_S = 5.0  # longest time until a host that lives has answered
SIGN_S = 1.0  # time without a message from a host that compiles, before it is asked for a sign of life
REOPEN_S = 1.0  # time until another host is started after one could not be
HOST_IS_UP = 0  # the grammar id of a host's first answer


class GrammarHostLost(Exception):
    """Error: the host has ended. The next message starts a new one, which has no grammars."""


class GrammarHostUnavailable(Exception):
    """Error: no host can be started now."""


class GrammarHost(Protocol):
    """Interface of the object that compiles grammars and makes masks. `send` does not wait; `receive` returns the
    answers so far."""

    @property
    def has_process(self) -> bool:
        """Whether a process runs, whose end `receive` reports."""

    def send(self, message: CoreToGrammar) -> None:
        """Send a message; start the host if it does not run. GrammarHostUnavailable if it cannot be started."""

    def receive(self) -> list[GrammarToCore]:
        """Return the answers so far; GrammarHostLost, once, if the host has ended."""

    def stop(self) -> None:
        """End the host at once; the next message starts a new one."""
