"""EncodeQueue: chooses the media that a step encodes, for rows that still have to compute their tokens.

Media are wanted in the policy's order of the rows and their order in a prompt, equal ones once. As many of the first
as fit into the encoder cache are kept or encoded; entries that no row is bound to give way to them. One medium at a
time is half encoded, and is completed even if nobody wants it any more. Knows no rows and no blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...ipc.messages.media import Encode, EncoderProgress, FailedEntry, MediaSpan
from .encode_throttle import EncodeThrottle
from .encoder_cache import EncoderCache, Entry


class EncodePlan(NamedTuple):
    """Part of a step."""

    encodes: list[Encode]
    freed_entries: list[int]  # before they are run


class EncodeQueue:
    """Owns the encoder cache. `partial`: the medium with some layers sent and others not."""

    def __init__(self, capacity: int, num_layers: int, patches_per_embed: int, max_embeds: int) -> None:
        """num_layers: of the encoder. max_embeds: of media that one step encodes, if there are several."""
        self.cache = EncoderCache(capacity, num_layers)
        self.partial: Entry | None = None
        self._num_layers, self._patches_per_embed, self._max_embeds = num_layers, patches_per_embed, max_embeds
        self.totals = EncoderProgress(capacity=capacity)

    def reset(self) -> None:
        """Note that the workers hold no entries any more. No row may be bound to one."""
        self.cache.reset()
        self.partial = None

    # ── a step is made ───────────────────────────────────────────────────────────────────────────────────────────

    def plan(
        self,
        wanted: Iterable[MediaSpan],
        step: int,
        throttle: EncodeThrottle,
        num_decodes: int,
        num_prompt_tokens: int,
    ) -> EncodePlan:
        """Choose the layers that `step` runs beside its decoding rows and its prompts. wanted: media of rows that are
        not bound to an entry, the first in order first."""
        kept, missing = self._first_that_fit(wanted)
        plan = EncodePlan([], [])
        if self.partial is None and not missing:
            return plan
        num_wanted = len(missing) + (self.partial is not None)
        seconds, num_embeds = throttle.share_s(num_decodes, num_prompt_tokens, num_wanted), 0
        for span in missing if self.partial is None else [self.partial.span, *missing]:
            num_embeds += span.num_embeds
            if plan.encodes and num_embeds > self._max_embeds:
                break
            num_done = 0 if self.partial is None else self.partial.num_layers
            count = self._num_layers_of(span, num_done, seconds, throttle)
            if not count and plan.encodes:
                break
            seconds -= throttle.seconds(self.patches_of(span)) * max(count, 1)
            self._order(span, max(count, 1), step, kept, plan)
            if self.partial is not None:
                break
        return plan

    def _first_that_fit(self, wanted: Iterable[MediaSpan]) -> tuple[set[bytes], list[MediaSpan]]:
        """Return the digests of the first wanted media that fit into the cache together, beside entries that must stay,
        and those of them that are not in it."""
        pinned = [entry for entry in self.cache.entries() if self.cache.is_pinned(entry)]
        room = self.cache.capacity - sum(entry.span.num_embeds for entry in pinned)
        kept, missing = {entry.span.digest for entry in pinned}, list[MediaSpan]()
        for span in wanted:
            if span.digest in kept:
                continue
            room -= span.num_embeds
            if room < 0:
                break
            kept.add(span.digest)
            if self.cache.find(span.digest) is None:
                missing.append(span)
        return kept, missing

    def _num_layers_of(self, span: MediaSpan, num_done: int, seconds: float, throttle: EncodeThrottle) -> int:
        """Return how many of a medium's layers take at most `seconds`. Beside decoding rows the first one goes alone,
        since its cost, with reading the file, is another."""
        num_left = self._num_layers - num_done
        if seconds == math.inf:
            return num_left
        return min(throttle.num_layers(self.patches_of(span), seconds), num_left if num_done else 1)

    def _order(self, span: MediaSpan, count: int, step: int, kept: set[bytes], plan: EncodePlan) -> None:
        entry = self.partial
        if entry is None:
            entry, freed = self.cache.begin(span, step, kept)
            plan.freed_entries.extend(freed)
            self.totals.num_encodes += 1
        plan.encodes.append(
            Encode(
                entry=entry.number,
                kind=span.kind,
                digest=span.digest,
                grid=span.grid,
                num_embeds=span.num_embeds,
                first_layer=entry.num_layers,
                num_layers=count,
            )
        )
        entry.num_layers += count
        self.partial = None if self.cache.is_whole(entry) else entry

    def patches_of(self, medium: MediaSpan | Encode) -> int:
        return medium.num_embeds * self._patches_per_embed

    def work_of(self, encodes: Sequence[Encode]) -> tuple[int, int]:
        """Return the patches of the largest of these media, and their layers × patches. A first layer that runs alone
        does not count: its cost is another."""
        counted = [each for each in encodes if each.first_layer or each.num_layers > 1]
        work = sum(each.num_layers * self.patches_of(each) for each in counted)
        return max(map(self.patches_of, counted), default=0), work

    # ── a step's result is taken in ──────────────────────────────────────────────────────────────────────────────

    def on_encoded(self, step: int, encodes: Sequence[Encode], failed: Sequence[FailedEntry]) -> dict[bytes, str]:
        """Apply the result of a step with `encodes`; return the errors of the media that could not be encoded."""
        error_by_entry = {each.entry: each.error for each in failed}
        errors: dict[bytes, str] = {}
        for encode in encodes:
            entry = self.cache.find(encode.digest)
            if entry is None or entry.number != encode.entry or entry.begun_in > step:
                continue  # it failed in an earlier step
            if encode.entry not in error_by_entry:
                entry.is_ready = encode.first_layer + encode.num_layers == self._num_layers
                continue
            errors[encode.digest] = error_by_entry[encode.entry]
            self.partial = None if self.partial is entry else self.partial
            self.cache.remove(entry)
            self.totals.num_failed += 1
        return errors

    def progress(self) -> EncoderProgress:
        totals, cache = self.totals, self.cache
        totals.num_entries, totals.num_used_embeds = len(cache), cache.num_used
        return totals
