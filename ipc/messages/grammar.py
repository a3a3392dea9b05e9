"""core ⇄ grammar process, DEALER/DEALER: grammars in, masks out."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ..errors import ErrorInfo
from ..structured_outputs import GrammarKind
from .base import Message


class OpenGrammar(Message, frozen=True, kw_only=True, tag="open_grammar"):
    """Compile a grammar and take it past the tokens that the answer already has; answered by GrammarOpened."""

    grammar_id: int  # the core's number for one answer's place in its grammar
    kind: GrammarKind
    text: str
    token_ids: bytes = b""  # int32: output tokens so far


class CloseGrammars(Message, frozen=True, kw_only=True, tag="close_grammars"):
    grammar_ids: list[int]


class AdvanceGrammars(Message, frozen=True, kw_only=True, tag="advance_grammars"):
    """Take in one token each, then make the masks of `mask_ids`; answered by GrammarsAdvanced."""

    grammar_ids: bytes  # int32 [n]
    token_ids: bytes  # int32 [n]
    serial: int  # comes back with the answer
    mask_ids: bytes = b""  # int32 [m]


CoreToGrammar: TypeAlias = OpenGrammar | CloseGrammars | AdvanceGrammars


class GrammarOpened(Message, frozen=True, kw_only=True, tag="grammar_opened"):
    grammar_id: int
    is_complete: bool = False  # the tokens it has are all that it can have
    error: ErrorInfo | None = None


class GrammarFailure(msgspec.Struct, frozen=True):
    grammar_id: int
    error: ErrorInfo


class GrammarsAdvanced(Message, frozen=True, kw_only=True, tag="grammars_advanced"):
    """Masks in the order asked for; complete and failed grammars have none."""

    serial: int
    mask_ids: bytes = b""  # int32 [m]
    bits: bytes = b""  # uint32 [m, ceil(vocab_size / 32)], as in TokenMask
    jump_counts: bytes = b""  # int32 [m]: tokens that must follow, of which the mask leaves the first; 0: a choice
    jump_ids: bytes = b""  # int32, flat: sum(jump_counts)
    complete_ids: bytes = b""  # int32: nothing can follow the tokens taken in
    failures: list[GrammarFailure] = []


GrammarToCore: TypeAlias = GrammarOpened | GrammarsAdvanced
