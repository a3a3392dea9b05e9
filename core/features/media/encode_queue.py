"""EncodeQueue: chooses the media that a step encodes, for rows that still have to compute their tokens.

Media are taken in the policy's order of the rows and in their order in a prompt, each only once, as long as they fit
into the encoder cache. Those that are not there yet are encoded; other entries, to which no row is bound, are evicted
for them. At most one medium is partly encoded, and it is completed even if no request needs it any more. Knows no rows
and no blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ....ipc.messages.media import Encode, EncoderProgress, FailedEntry, MediaSpan
from ....ipc.spec.config.engine_spec import EngineSpec
from ....ipc.spec.models.model_config import Encoder
from ....ipc.spec.models.vision_config import Stage
from .encode_throttle import EncodeThrottle, StageWork
from .encoder_cache import EncoderCache, Entry

PRODUCTS_PER_WEIGHT = 6  # multiplications of a piece; a decode step has as many per weight as it has rows
MAX_SKIPS = 3  # most successive steps without a piece because prompts took the encoder's share


class EncodePlan(NamedTuple):
    """The encoder's part of a step."""

    encodes: list[Encode]
    freed_entries: list[int]  # numbers of entries that are freed before `encodes` run


class EncodeQueue:
    """Owner of the encoder cache. `partial`: the medium of which some pieces have been sent and others not."""

    def __init__(self, capacity: int, encoder: Encoder | None, max_embeds: int, max_products: float = math.inf) -> None:
        """max_embeds: largest number of embeddings of the media in one step, if there are several. max_products:
        largest number of multiplications of a piece in the largest stage, unless the piece is a single row."""
        self.cache = EncoderCache(capacity)
        self.partial: Entry | None = None
        self._max_embeds, self.max_products = max_embeds, max_products
        self._encoder = encoder
        self._stages: Sequence[Stage] = () if encoder is None else encoder.stages
        self._num_skipped = 0  # successive steps without a piece
        self.totals = EncoderProgress(capacity=capacity)

    @classmethod
    def of(cls, spec: EngineSpec) -> EncodeQueue:
        """Return the queue of an engine. On a GPU a piece is a whole layer; on a CPU it takes at most about half as
        long as a decode step."""
        most = PRODUCTS_PER_WEIGHT * spec.model.num_layer_weights if spec.device == "cpu" else math.inf
        return cls(spec.encoder_cache_tokens, spec.model.encoder, spec.max_num_batched_tokens, most)

    def reset(self) -> None:
        """Forget all entries: the workers hold none any more. No row may be bound to one."""
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
        """Choose the pieces that `step` runs in addition to its decoding rows and prompts. wanted: spans of rows that
        are not bound to an entry yet, in order."""
        kept, missing = self._first_that_fit(wanted)
        plan = EncodePlan([], [])
        if self.partial is None and not missing:
            throttle.end_burst()
            return plan
        num_wanted = len(missing) + (self.partial is not None)
        seconds, num_embeds = throttle.share_s(num_decodes, num_prompt_tokens, num_wanted), 0
        for span in missing if self.partial is None else [self.partial.span, *missing]:
            num_embeds += span.num_embeds
            if plan.encodes and num_embeds > self._max_embeds:
                break
            count, seconds = self._num_pieces(span, seconds, throttle)
            if not count and (plan.encodes or (num_prompt_tokens and self._num_skipped < MAX_SKIPS)):
                self._num_skipped += not plan.encodes
                break
            self._num_skipped = 0
            self._order(span, max(count, 1), step, kept, plan)
            if self.partial is not None:
                break
        return plan

    def _first_that_fit(self, wanted: Iterable[MediaSpan]) -> tuple[set[bytes], list[MediaSpan]]:
        """Return the digests to keep: those of the pinned entries, and of as many wanted media, from the first, as fit
        into the cache beside these entries. Also return the spans of the wanted media to keep that the cache lacks."""
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

    def _num_pieces(self, span: MediaSpan, seconds: float, throttle: EncodeThrottle) -> tuple[int, float]:
        """Return how many of a medium's next pieces take at most `seconds`, and the seconds left. If the time is
        limited, the first piece runs alone, since its cost differs: it includes reading the file."""
        per_stage, num_rows = self._pieces_per_stage(span), self._rows_of(span)
        total = len(self._stages) * per_stage
        first = 0 if self.partial is None else total - self.partial.num_left
        if seconds == math.inf:
            return total - first, seconds
        number, end = first, total if first else 1
        while number < end:
            stage = self._stages[number // per_stage]
            piece_s = throttle.row_s(stage, num_rows) * num_rows / per_stage
            left = min(end, (number // per_stage + 1) * per_stage) - number  # of the stage
            count = min(int(seconds / piece_s), left)
            seconds, number = seconds - count * piece_s if count else 0.0, number + count
            if count < left:
                break
        return number - first, seconds

    def _order(self, span: MediaSpan, count: int, step: int, kept: set[bytes], plan: EncodePlan) -> None:
        entry, per_stage = self.partial, self._pieces_per_stage(span)
        total = len(self._stages) * per_stage
        if entry is None:
            entry, freed = self.cache.begin(span, step, kept, total)
            plan.freed_entries.extend(freed)
            self.totals.num_encodes += 1
        plan.encodes.append(
            Encode(
                entry=entry.number,
                kind=span.kind,
                digest=span.digest,
                grid=span.grid,
                num_embeds=span.num_embeds,
                pieces_per_stage=per_stage,
                first_piece=total - entry.num_left,
                num_pieces=count,
            )
        )
        entry.num_left -= count
        self.partial = entry if entry.num_left else None

    def _rows_of(self, medium: MediaSpan | Encode) -> int:
        assert self._encoder is not None
        return self._encoder.num_rows(medium.num_embeds)

    def _pieces_per_stage(self, span: MediaSpan) -> int:
        """Return into how many pieces each stage is cut. It depends only on the medium, so that its embeddings do,
        too."""
        assert self._encoder is not None
        num_rows = self._rows_of(span)
        return min(max(math.ceil(self._encoder.num_products(num_rows) / self.max_products), 1), num_rows)

    def work_of(self, encodes: Sequence[Encode]) -> list[StageWork]:
        """Return the parts of stages that these orders run. A first piece that runs alone does not count: its cost
        differs."""
        parts = []
        for each in encodes:
            per_stage, num_rows = each.pieces_per_stage, self._rows_of(each)
            number, end = each.first_piece, each.first_piece + each.num_pieces
            while number < end and end > 1:
                stage, start = number // per_stage, number
                number = min(end, (stage + 1) * per_stage)
                work = (number - start) * num_rows / per_stage
                parts.append(StageWork(self._stages[stage], num_rows, work))
        return parts

    # ── results of steps ─────────────────────────────────────────────────────────────────────────────────────────

    def on_encoded(self, step: int, encodes: Sequence[Encode], failed: Sequence[FailedEntry]) -> dict[bytes, str]:
        """Apply the result of a step with `encodes`; return the errors of media that failed, by digest."""
        error_by_entry = {each.entry: each.error for each in failed}
        errors: dict[bytes, str] = {}
        for encode in encodes:
            entry = self.cache.find(encode.digest)
            if entry is None or entry.number != encode.entry or entry.begun_in > step:
                continue  # it failed in an earlier step
            if encode.entry not in error_by_entry:
                entry.is_ready = encode.first_piece + encode.num_pieces == len(self._stages) * encode.pieces_per_stage
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
