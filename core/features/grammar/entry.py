"""Entry: what the core keeps of a request with a grammar. `GrammarManager` owns and changes the entries."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from ...request import Request
from .gate import ConstraintGate
from .mask_fill import GrammarMasks


class GrammarState(Enum):
    """The states in manager.py's picture."""

    PROVING = auto()
    QUEUED = auto()
    OPENING = auto()
    READY = auto()


@dataclass(eq=False)
class Entry:
    """A request with a grammar, and how far the grammar is."""

    request: Request
    gate: ConstraintGate  # the parts of the answer to which the grammar applies
    state: GrammarState = GrammarState.PROVING
    is_suspect: bool = False  # was being opened when a helper was lost: open it alone
    num_losses: int = 0  # of helpers that opened it or made its mask
    num_opened: int = 0  # output tokens that were known when the grammar was sent to be opened; 0 in free text
    late_masks: GrammarMasks | None = None  # masks of the next token that came too late for their step
