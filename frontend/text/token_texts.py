"""TokenTexts: the text of each token by itself, decoded once."""

from __future__ import annotations

from .tokenizer import Tokenizer


class TokenTexts(dict[int, str]):
    """Token id → the text that it decodes to by itself."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text
