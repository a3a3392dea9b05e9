"""TokenTexts: caches the text of each token by itself, for logprobs."""

from __future__ import annotations

from .tokenizer import Tokenizer


class TokenTexts(dict[int, str]):
    """Token id → its text, decoded alone on first use."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text
