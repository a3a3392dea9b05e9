"""MaskFill: the masks that a step waits for; with GrammarMasks, the masks in a helper's answer, and the messages that
order masks and bring them to the workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from ....ipc.codec import decode_ids, encode_ids
from ....ipc.messages.grammar import AdvanceGrammars, GrammarsAdvanced
from ....ipc.messages.workers import TokenMask
from ....ipc.params.sampling_params import SamplingParams
from ...request import Request


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


def order_of(
    advances: Sequence[tuple[int, int]], serial: int, mask_ids: Sequence[int], drafts: Sequence[list[int]]
) -> AdvanceGrammars:
    """Return the message that advances grammars, by pairs of grammar id and token, and orders the masks of `mask_ids`.
    drafts: those of each, or empty."""
    return AdvanceGrammars(
        grammar_ids=encode_ids(grammar_id for grammar_id, _ in advances),
        token_ids=encode_ids(token_id for _, token_id in advances),
        serial=serial,
        mask_ids=encode_ids(mask_ids),
        draft_counts=encode_ids(len(ids) for ids in drafts),
        draft_ids=encode_ids(chain.from_iterable(drafts)),
    )


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
