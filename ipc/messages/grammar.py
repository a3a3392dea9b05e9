"""Messages between the core and its grammar process, over a stream socket: the core sends grammars and tokens, the
grammar process sends token masks."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ..errors import ErrorInfo
from ..params.structured_outputs import GrammarKind
from .base import Message

RESTART = -1


class OpenGrammar(Message, frozen=True, kw_only=True, tag="open_grammar"):
    """Order to compile a grammar and advance it by tokens of the answer, up to one that completes it. The reply is
    GrammarOpened."""

    grammar_id: int  # the core's number for the grammar state of one answer
    kind: GrammarKind
    text: str
    token_ids: bytes = b""  # int32: output tokens so far, from the first that the grammar applies to
    repeats: bool = False  # once it is complete, RESTART brings it back to its start


class CloseGrammars(Message, frozen=True, kw_only=True, tag="close_grammars"):
    grammar_ids: list[int]


class AdvanceGrammars(Message, frozen=True, kw_only=True, tag="advance_grammars"):
    """Order to advance grammar i by token i, for all i, then make the masks of `mask_ids`. The reply is
    GrammarsAdvanced. RESTART in place of a token brings a grammar that repeats back to its start.

    For a grammar with drafts a mask is also made after each draft, up to the first that it forbids; drafts do not
    advance it."""

    grammar_ids: bytes  # int32 [n]
    token_ids: bytes  # int32 [n]
    serial: int  # repeated in the reply
    mask_ids: bytes = b""  # int32 [m]
    draft_counts: bytes = b""  # int32 [m]: number of drafts of each grammar of mask_ids; empty: no drafts
    draft_ids: bytes = b""  # int32, flat: sum(draft_counts)


CoreToGrammar: TypeAlias = OpenGrammar | CloseGrammars | AdvanceGrammars


class GrammarOpened(Message, frozen=True, kw_only=True, tag="grammar_opened"):
    """Reply to OpenGrammar. A grammar that is complete or has an error is closed."""

    grammar_id: int
    is_complete: bool = False  # the grammar allows no further token
    num_tokens: int = 0  # of the order's tokens: those that completed the grammar, if it is complete
    error: ErrorInfo | None = None


class GrammarFailure(msgspec.Struct, frozen=True):
    grammar_id: int
    error: ErrorInfo


class GrammarsAdvanced(Message, frozen=True, kw_only=True, tag="grammars_advanced"):
    """Reply to AdvanceGrammars: the requested masks, in order; complete and failed grammars have none."""

    serial: int
    mask_ids: bytes = b""  # int32 [m]
    mask_counts: bytes = b""  # int32 [m]: number of masks of each, as in TokenMask.counts; empty: 1 each
    bits: bytes = b""  # uint32 [sum(mask_counts), ceil(vocab_size / 32)], as in TokenMask
    jump_counts: bytes = b""  # int32 [m]: number of jump-forward tokens; the mask allows only the first of them
    jump_ids: bytes = b""  # int32, flat: sum(jump_counts)
    complete_ids: bytes = b""  # int32: grammars that allow no further token; closed, unless they repeat
    failures: list[GrammarFailure] = []


GrammarToCore: TypeAlias = GrammarOpened | GrammarsAdvanced
