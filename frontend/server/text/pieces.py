"""Pieces: the text that each token adds when it is not the first of a text.

Most tokenizers make a text by joining the pieces of its tokens. A decoder may remove the space with which a text
begins: a token that is decoded alone may lack the space of its piece, and has it if decoded after other text.
"""

from __future__ import annotations

import json

from ....ipc.codec import JsonObject
from ...forms.logprobs import UNDECODABLE
from .token_bytes import bytes_of
from .tokenizer import Tokenizer

_LOCAL_STEPS = {"ByteLevel", "WordPiece", "Metaspace", "BPEDecoder", "ByteFallback", "Fuse", "Replace", "Strip"}


class PieceTable(dict[int, "str | bytes"]):
    """Token id → the piece that the token adds after other text, computed on first use: str if it consists of whole
    characters, else bytes."""

    def __init__(self, tokenizer: Tokenizer, probe: int | None, hidden_ids: frozenset[int]) -> None:
        """`probe`: a result of `find_probe`; if None, a token's piece is the text that it decodes to alone.
        `hidden_ids`: tokens that have no piece."""
        super().__init__()
        self._tokenizer = tokenizer
        self._probe = [] if probe is None else [probe]
        self._hidden_ids = hidden_ids
        self._prefix = tokenizer.decode(self._probe, skip_special_tokens=False)

    def __missing__(self, token_id: int) -> str | bytes:
        piece: str | bytes = ""
        if self.is_visible(token_id):
            text = self._tokenizer.decode([*self._probe, token_id], skip_special_tokens=False)
            is_prefixed = text.startswith(self._prefix)
            piece = self._exact(token_id, text[len(self._prefix) :]) if is_prefixed else self.at_start(token_id)
        self[token_id] = piece
        return piece

    def at_start(self, token_id: int) -> str | bytes:
        """Return the piece of a token that nothing visible precedes."""
        if not self.is_visible(token_id):
            return ""
        return self._exact(token_id, self._tokenizer.decode([token_id], skip_special_tokens=False))

    def is_visible(self, token_id: int) -> bool:
        """Return whether a token may add to the text; unknown and hidden ids have no effect on it."""
        return token_id not in self._hidden_ids and self._tokenizer.has_token(token_id)

    def _exact(self, token_id: int, text: str) -> str | bytes:
        """Return `text`, or, if the token by itself is not valid UTF-8, its bytes."""
        if UNDECODABLE not in text:
            return text
        spelled = bytes_of(self._tokenizer.token_string(token_id))
        return text if spelled is None else spelled


def find_probe(tokenizer: Tokenizer) -> int | None:
    """Return a token of ASCII text that, put before any other token, makes that token decode to its piece; None if
    there is none."""
    for token_id in range(tokenizer.size):
        text = tokenizer.decode([token_id], skip_special_tokens=True)
        twice = tokenizer.decode([token_id, token_id], skip_special_tokens=True)
        if text.isascii() and text.isalnum() and twice.startswith(text) and len(twice) > len(text):
            return token_id
    return None


def comes_in_pieces(tokenizer: Tokenizer) -> bool:
    """Return whether a token always adds the same text, except at the start of a text."""
    if tokenizer.backend is None:
        return False
    is_fused = False
    for step in decoder_steps(tokenizer):
        kind = step["type"]
        if kind not in _LOCAL_STEPS:
            return False
        is_edge_strip = kind == "Strip" and step["stop"] == 0 and step["start"] in (0, 1)
        if is_fused and not is_edge_strip:
            return False
        is_fused = is_fused or kind == "Fuse"
    return True


def decoder_steps(tokenizer: Tokenizer) -> list[JsonObject]:
    """Return the steps of a backend's decoder in order, in the form of tokenizer.json; [] if it has no decoder."""
    if tokenizer.backend is None or tokenizer.backend.decoder is None:
        return []
    decoder = json.loads(tokenizer.backend.decoder.__getstate__())
    steps: list[JsonObject] = []
    pending = [decoder]
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending = step["decoders"] + pending
        else:
            steps.append(step)
    return steps
