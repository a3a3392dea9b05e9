"""needed_text: the part of a text that is tokenized."""

from __future__ import annotations

from ....ipc.params.sampling_params import CutSide
from ...forms.prompt_limits import PromptLimits
from ..text.tokenizer import Tokenizer


def needed_text(text: str, tokenizer: Tokenizer, limits: PromptLimits, cut_side: CutSide | None) -> str:
    """Return `text` without a part whose tokens a truncation at `cut_side` drops. Without a truncation return all of
    it; RequestError if it is certain not to fit."""
    if cut_side is not None:
        return tokenizer.kept(text, limits.max_model_len, cut_side)
    limits.check_text(text)
    limits.check_part(text, tokenizer.kept(text, limits.max_model_len + 1, "right"))
    return text
