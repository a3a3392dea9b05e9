"""MaskFill: the masks that a step waits for; with OpenThought, which finds the first token that has a mask, and
GrammarMasks, the masks in a helper's answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ....ipc.codec import decode_ids, encode_ids
from ....ipc.messages.grammar import GrammarsAdvanced
from ....ipc.messages.workers import TokenMask
from ....ipc.params.sampling_params import SamplingParams
from ...request import Request


class OpenThought:
    """Detector of the end of the reasoning with which an answer starts; the grammar applies only after it. Call
    `append` with each token of the answer in order, until `is_over`."""

    def __init__(self, end: bytes, tokens: bytes) -> None:
        """end, tokens: int32. end: the tokens that end the reasoning; empty: there is no reasoning. tokens: the answer
        so far."""
        self._end = decode_ids(end).tolist()
        self._recent: list[int] = []
        self.is_over = not end
        self.num_tokens = 0  # tokens of the reasoning so far, with its end
        for token_id in decode_ids(tokens):
            if not self.is_over:
                self.append(token_id)

    def append(self, token_id: int) -> None:
        self.num_tokens += 1
        self._recent = [*self._recent, token_id][-len(self._end) :]
        self.is_over = self._recent == self._end


@dataclass
class MaskFill:
    """The masks that the oldest step in flight waits for."""

    grammar_ids: list[int]  # grammars whose masks the helper makes
    there: list[GrammarMasks]  # known masks, of other rows of the step
    deadline: float  # by the clock; then the step continues without the rows of `grammar_ids`


class GrammarMasks(NamedTuple):
    """Masks of one grammar: for its next token, and for the token after each of its first drafts."""

    grammar_id: int
    bits: bytes
    num_masks: int
    jump_ids: list[int]  # jump-forward tokens

    def may_jump(self, params: SamplingParams) -> bool:
        """Return whether there are jump-forward tokens that may skip sampling: two or more, no logprobs are requested
        and no other rule could veto them. A single token is left to the step in flight, which samples it."""
        is_told = params.num_logprobs is not None or params.thinking_token_budget is not None
        is_ruled = params.bad_words or params.allowed_token_ids or params.min_tokens or params.logits_processors
        return len(self.jump_ids) > 1 and not (is_told or is_ruled)


def masks_in(message: GrammarsAdvanced) -> Iterator[GrammarMasks]:
    """Yield the masks of each grammar in a helper's answer."""
    ids, jump_counts, jump_ids = (
        decode_ids(each) for each in (message.mask_ids, message.jump_counts, message.jump_ids)
    )
    counts = decode_ids(message.mask_counts) if message.mask_counts else [1] * len(ids)
    width, place, start = len(message.bits) // max(sum(counts), 1), 0, 0
    for grammar_id, count, num_jumps in zip(ids, counts, jump_counts, strict=True):
        end = place + count * width
        yield GrammarMasks(grammar_id, message.bits[place:end], count, jump_ids[start : start + num_jumps].tolist())
        place, start = end, start + num_jumps


def token_mask(
    running: Sequence[tuple[Request, GrammarMasks]], step: int, *, core_epoch: int, generation: int
) -> TokenMask:
    """Return the message that brings the workers the masks of requests that have a row."""
    counts = [masks.num_masks for _, masks in running]
    return TokenMask(
        step=step,
        core_epoch=core_epoch,
        generation=generation,
        rows=encode_ids(request.row for request, _ in running),
        bits=b"".join(masks.bits for _, masks in running),
        counts=encode_ids(counts) if any(count != 1 for count in counts) else b"",
    )
