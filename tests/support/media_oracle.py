"""Greedy answers of transformers to prompts with media, in float32: what the oracles of images and of audio share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

MediumT = TypeVar("MediumT")

NEAR_TIE = 1e-3  # in logits with a standard deviation of about 3
TYPES_OF_TOKENS = ("token_type_ids", "mm_token_type_ids")  # 0: text


class Expanded(NamedTuple):
    """A prompt as transformers takes it: token ids and the arguments of its media."""

    token_ids: list[int]
    inputs: dict[str, Any]


class MediaOracle(ABC, Generic[MediumT]):
    """Transformers' model and tokenizer of a checkpoint."""

    model: Any
    tokenizer: Any

    @property
    @abstractmethod
    def placeholder_id(self) -> int:
        """The token in whose place an embedding of a medium stands."""

    @abstractmethod
    def expand(self, prompt: str, media: Sequence[MediumT]) -> Expanded:
        """Return the token ids with all placeholders and the inputs of the media."""

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt of a chat, one marker a medium, without the token that the tokenizer puts first."""
        text: str = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return text.removeprefix(self.tokenizer.bos_token)

    def generate(self, prompt: str, media: Sequence[MediumT] = (), max_tokens: int = 12) -> list[int]:
        """Return greedy tokens without the prompt's. A prompt holds one marker a medium, as `expand` takes it."""
        return self.generate_batch([(prompt, media)], max_tokens)[0]

    def generate_batch(
        self, prompts: Sequence[tuple[str, Sequence[MediumT]]], max_tokens: int, min_tokens: int = 0
    ) -> list[list[int]]:
        """Return the greedy tokens of prompts that have equal numbers of tokens, in one batch."""
        batch = [self.expand(prompt, media) for prompt, media in prompts]
        ids = torch.tensor([each.token_ids for each in batch])
        with torch.inference_mode():
            output = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                **{name: torch.cat([each.inputs[name] for each in batch]) for name in batch[0].inputs},
                do_sample=False,
                max_new_tokens=max_tokens,
                min_new_tokens=min_tokens,
                pad_token_id=self.tokenizer.pad_token_id,
                return_dict_in_generate=False,
            )
        rows: list[list[int]] = output[:, ids.shape[1] :].tolist()
        return rows

    def check(self, prompt: str, media: Sequence[MediumT], answer: Sequence[int]) -> None:
        """Check that each token of the answer has the highest logit given all before it, up to near ties, in one
        forward pass: the answer is then that of `generate`, by induction."""
        expanded = self.expand(prompt, media)
        inputs = dict(expanded.inputs)
        for name in TYPES_OF_TOKENS:
            if name in inputs:
                zeros = torch.zeros((1, len(answer)), dtype=inputs[name].dtype)
                inputs[name] = torch.cat([inputs[name], zeros], dim=1)
        ids = torch.tensor([[*expanded.token_ids, *answer]])
        with torch.inference_mode():
            logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits
        rows = logits[0, len(expanded.token_ids) - 1 : -1]
        misses = rows.max(dim=-1).values - rows[torch.arange(len(answer)), torch.tensor(list(answer))]
        worst = int(misses.argmax())
        assert misses[worst] <= NEAR_TIE, (
            f"token {worst} of {len(answer)} misses by {float(misses[worst]):.5f} after {len(media)} media: "
            f"{list(answer)}, {rows.argmax(dim=-1).tolist()} expected given the tokens before"
        )

    def span(self, prompt: str, media: Sequence[MediumT]) -> tuple[int, int]:
        """Return the index of the first placeholder of a prompt and the one behind its last."""
        (places,) = np.nonzero(np.array(self.expand(prompt, media).token_ids) == self.placeholder_id)
        return int(places[0]), int(places[-1]) + 1
