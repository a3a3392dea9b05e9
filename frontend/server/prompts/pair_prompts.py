"""PairPrompts: the prompts of pairs of texts, such as a query and a document, and their truncation.

A pair has the form of the tokenizer's own template, such as [CLS] a [SEP] b [SEP], or that of the model's PairTemplate.
"""

from __future__ import annotations

from ....ipc.codec import encode_ids
from ....ipc.errors import RequestError
from ....ipc.params.sampling_params import CutSide
from ....ipc.spec.models.pooling.pooling_config import PairTemplate
from ..text.tokenizer import Tokenizer
from .prompt import Prompt


class PairPrompts:
    """Maker of the prompts of pairs for one model."""

    def __init__(self, tokenizer: Tokenizer, template: PairTemplate | None) -> None:
        """`template`: None for the tokenizer's own form."""
        self._tokenizer, self._template = tokenizer, template

    def prompt(self, first: str, second: str, num_kept: int | None, cut_side: CutSide | None) -> Prompt:
        """Return the prompt of a pair. If it has more than `num_kept` tokens, cut it at `cut_side`: of both texts, the
        longer first; of a template, its body. RequestError if no token of the texts would be left."""
        if self._template is not None:
            return self._templated(self._template, first, second, num_kept)
        return self._own(first, second, num_kept, cut_side or "right")

    def _own(self, first: str, second: str, num_kept: int | None, cut_side: CutSide) -> Prompt:
        ids, kinds = self._tokenizer.encode_pair(first, second, num_kept, cut_side)
        first_type_tokens = kinds.index(1) if 1 in kinds else None
        return Prompt(encode_ids(ids), None, first_type_tokens=first_type_tokens)

    def _templated(self, template: PairTemplate, first: str, second: str, num_kept: int | None) -> Prompt:
        body = template.body.replace("{query}", first, 1).replace("{document}", second, 1)
        prefix, ids, suffix = (
            self._tokenizer.encode(text, add_special_tokens=False) for text in (template.prefix, body, template.suffix)
        )
        if num_kept is not None:
            room = num_kept - len(prefix) - len(suffix)
            if room < 1:
                raise RequestError(
                    f"a pair is cut to {num_kept} tokens, the model's template alone has {len(prefix) + len(suffix)}: "
                    "raise truncate_prompt_tokens"
                )
            ids = ids[:room]
        return Prompt(encode_ids([*prefix, *ids, *suffix]), None)
