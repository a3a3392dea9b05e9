"""The cache report in the usage of an answer: which tokens of the prompt were computed though they had been computed
before, and why, with a sentence for each reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ...ipc.codec import JsonObject
from ...ipc.messages.base import CacheMisses, CacheReport, DifferenceKind, MissReason, PromptDifference

MAX_SENTENCES = 8

MISSES: dict[MissReason, str] = {
    "evicted": "were evicted{ago}: the KV pool had no room beside newer prompts; give it more blocks, or add KV tiers",
    "evicted_by_others": "were evicted{ago} by requests with another API key or cache_salt",
    "cleared": "were computed before the prefix cache was reset",
    "lost": "were computed before the workers were replaced, or their memory was freed",
    "weights": "were computed with other weights, or before the KV tiers were open",
    "adapter": "were computed with another adapter",
    "salt": "were computed with another cache_salt",
    "concurrent": "were being computed by another request at the same time",
    "window": "are in the cache of some layers, but not of those with a window",
    "state": "are in the cache, but the state of the layers that keep one is not",
    "tier": "are in a KV tier from which loading takes longer than computing",
    "unread": "are in the cache, which this request does not read",
}
DIFFERENCES: dict[DifferenceKind, str] = {
    "time": "a time, a number or an id changed; let it stand at the end, or leave it out",
    "system": "the system prompt changed",
    "tools": "the tools changed",
    "tools_order": "the same tools stand in another order; send them in one order",
    "thoughts": "reasoning of an earlier answer was dropped, by the client or the chat template",
    "answer": "an earlier answer does not stand there as it was generated",
    "message": "an earlier message changed",
    "template": "the chat template wrote something else",
    "text": "the prompt changed",
}


def report_json(reports: Iterable[CacheReport], num_prompt: int, num_cached: int) -> JsonObject:
    """Return the reports on the prompts of a request, added up. num_prompt, num_cached: tokens of all prompts, and
    those that were found."""
    missed, sentences = Counter[str](), list[str]()
    fields: JsonObject = {}
    for report in reports:
        misses = report.misses or CacheMisses()
        for reason, count in misses.num_tokens.items():
            missed[reason] += count
            sentences.append(f"{count} tokens {MISSES[reason].format(ago=_ago(misses.evicted_s))}")
        if misses.evicted_s:
            fields["evicted_seconds_ago"] = misses.evicted_s
        if misses.memory_s:
            fields["memory_seconds"] = misses.memory_s
        if (found := report.difference) is not None:
            missed[found.kind] += found.num_tokens
            fields["first_difference"] = {"kind": found.kind, "field": found.field, "token": found.token}
            sentences.append(sentence_of(found))
    num_new = num_prompt - num_cached - missed.total()
    counts = {"missed_tokens": dict(missed), "new_tokens": max(num_new, 0)}
    return {**counts, **fields, "explanation": sentences[:MAX_SENTENCES]}


def sentence_of(found: PromptDifference) -> str:
    """Return the sentence about a difference."""
    return (
        f"{found.num_tokens} tokens stand behind a difference from an earlier request, in {found.field} at token "
        f"{found.token} of the prompt: {DIFFERENCES[found.kind]}"
    )


def _ago(seconds: float) -> str:
    return f" {seconds:.3g} s before" if seconds else ""
