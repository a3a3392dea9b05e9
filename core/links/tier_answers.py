"""TierAnswers: joins the replies of the tier processes on all hosts to one reply to each order.

Each host has a part of every block. A block counts as found, loaded or stored in a tier only if that holds for the
parts of all hosts. A slot belongs to the core again once no host works on it any more. Replies to no open order and
repeated replies are dropped. There is a new object for each set of tier processes, so that replies of earlier ones do
not count.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from ...ipc.codec import decode_ids, encode_ids
from ...ipc.messages.tier import (
    BlocksFound,
    BlocksLoaded,
    BlocksStored,
    ClearTier,
    CoreToTier,
    FindBlocks,
    FlushTier,
    LoadBlocks,
    OpenTier,
    PinBlocks,
    PinnedBlocks,
    SourceState,
    StoreBlocks,
    TierCleared,
    TierFlushed,
    TierOpened,
    TierState,
    TierToCore,
)

logger = logging.getLogger("tokenloom.core")


@dataclass
class _Job:
    """A load or a store of slots, on all hosts."""

    left: list[set[int]]  # by host: the slots that it still works on
    result: dict[int, int]  # by slot in work: for a load 1 = good so far, 0 = bad; for a store, bits of targets

    def end(self, host: int, results: dict[int, int], *, is_last: bool) -> dict[int, int]:
        """Record the results of the slots that a host has finished; with `is_last`, its other slots get the result 0.
        Return the results of the slots that no host works on any more."""
        mine = self.left[host]
        known = {slot: result for slot, result in results.items() if slot in mine}
        if is_last:
            known |= dict.fromkeys(mine - known.keys(), 0)
        for slot, result in known.items():
            self.result[slot] &= result
        mine.difference_update(known)
        return {slot: self.result.pop(slot) for slot in known if not any(slot in left for left in self.left)}


class TierAnswers:
    """Owner of the open orders. With one host, every reply passes unchanged."""

    def __init__(self, num_hosts: int, ask: Callable[[FindBlocks], None]) -> None:
        """ask: sends a question to all hosts, after `expect`."""
        self._num_hosts, self._ask = num_hosts, ask
        self._jobs: dict[int, _Job] = {}
        self._open: dict[tuple[type, int], dict[int, TierToCore]] = {}  # by kind of reply and serial: replies by host
        self._questions: dict[int, FindBlocks] = {}  # by serial
        self._deepest: dict[int, int] = {}  # by serial of a question that is asked again: what the first answers named
        self._states: dict[int, list[SourceState]] = {}  # by host

    def expect(self, order: CoreToTier) -> None:
        """Record an order that is sent to all hosts."""
        if self._num_hosts == 1:
            return
        if isinstance(order, (LoadBlocks, StoreBlocks)):
            slots = list(decode_ids(order.slots))
            bits = [1] * len(slots) if isinstance(order, LoadBlocks) else order.targets
            result = dict(zip(slots, bits, strict=True))
            self._jobs[order.job] = _Job([set(slots) for _ in range(self._num_hosts)], result)
        elif isinstance(order, OpenTier):
            self._open = {key: answers for key, answers in self._open.items() if key[0] is not TierOpened}
            self._open[TierOpened, order.serial] = {}
        elif isinstance(order, FindBlocks):
            self._open[BlocksFound, order.serial] = {}
            self._questions[order.serial] = order
        elif isinstance(order, ClearTier):
            self._open[TierCleared, order.serial] = {}
        elif isinstance(order, FlushTier):
            self._open[TierFlushed, order.serial] = {}

    def place_of(self, order: PinnedBlocks) -> tuple[int, PinnedBlocks]:
        """Return the host that sent the PinBlocks to which `order` replies, and the reply with the serial of that
        host's message."""
        serial, host = divmod(order.serial, self._num_hosts)
        return host, msgspec.structs.replace(order, serial=serial)

    def take(self, host: int, message: TierToCore) -> Iterator[TierToCore]:
        """Process a message of a host and yield the messages for the core. A reply to an order is yielded once all
        hosts have replied, that to a load or store in parts, as slots end on all hosts. TierOpened is logged and not
        yielded if the hosts differ. A TierState is the sum over all hosts, once each has sent one. PinBlocks and other
        messages are yielded at once."""
        if self._num_hosts == 1:
            yield message
        elif isinstance(message, BlocksLoaded):
            results = dict.fromkeys(decode_ids(message.slots), 1) | dict.fromkeys(decode_ids(message.bad_slots), 0)
            if (ended := self._end(host, message, results)) is not None:
                good, bad = ([slot for slot, is_good in ended[0].items() if is_good == wanted] for wanted in (1, 0))
                yield BlocksLoaded(job=message.job, slots=encode_ids(good), bad_slots=encode_ids(bad), is_last=ended[1])
        elif isinstance(message, BlocksStored):
            results = dict(zip(decode_ids(message.slots), message.targets, strict=False))
            if (ended := self._end(host, message, results)) is not None:
                slots, targets = encode_ids(ended[0]), bytes(ended[0].values())
                yield BlocksStored(job=message.job, slots=slots, targets=targets, is_last=ended[1])
        elif isinstance(message, TierState):
            self._states[host] = message.sources
            if len(self._states) == self._num_hosts:
                yield TierState(sources=[_sum(parts) for parts in zip(*self._states.values(), strict=True)])
        elif isinstance(message, PinBlocks):
            yield msgspec.structs.replace(message, serial=message.serial * self._num_hosts + host)
        elif isinstance(message, (TierOpened, BlocksFound, TierCleared, TierFlushed)):
            yield from self._join(host, message)
        else:
            yield message

    def _end(
        self, host: int, message: BlocksLoaded | BlocksStored, results: dict[int, int]
    ) -> tuple[dict[int, int], bool] | None:
        """Record a host's results for a job. Return the results of the slots that no host works on any more, and
        whether the job is complete; None if nothing is new."""
        job = self._jobs.get(message.job)
        if job is None:
            return None
        ended = job.end(host, results, is_last=message.is_last)
        is_over = not any(job.left)
        if is_over:
            del self._jobs[message.job]
        return (ended, is_over) if ended or is_over else None

    def _merge(self, question: FindBlocks, answers: Sequence[BlocksFound]) -> Iterator[BlocksFound]:
        """Yield one answer for all hosts, with the farthest source of each block. If a group needs blocks at the
        smallest boundary that a host with a larger one has not named, ask all hosts again, up to that boundary."""
        end = min(answer.end for answer in answers)
        deepest = min(max(answer.end, answer.deepest) for answer in answers)
        deepest = max(deepest, self._deepest.pop(question.serial, 0))
        found = BlocksFound(serial=question.serial, sources=[], end=end, deepest=deepest if deepest > end else 0)
        if end <= question.least:
            yield msgspec.structs.replace(found, sources=[b""] * len(question.groups))
            return
        by_host = [_sources_at(question, answer, end) for answer in answers]
        known = [sources for sources in by_host if sources is not None]
        if len(known) < len(answers):
            self._deepest[question.serial] = deepest
            self._ask(_up_to(question, end))
            return
        sources = [bytes(map(max, zip(*columns, strict=True))) for columns in zip(*known, strict=True)]
        yield msgspec.structs.replace(found, sources=sources)

    def _join(self, host: int, message: TierOpened | BlocksFound | TierCleared | TierFlushed) -> Iterator[TierToCore]:
        answers = self._open.get((type(message), message.serial))
        if answers is None:
            return
        answers.setdefault(host, message)
        if len(answers) < self._num_hosts:
            return
        del self._open[type(message), message.serial]
        if isinstance(message, BlocksFound):
            found = [each for each in answers.values() if isinstance(each, BlocksFound)]
            yield from self._merge(self._questions.pop(message.serial), found)
        elif isinstance(message, TierOpened) and len({msgspec.structs.astuple(each) for each in answers.values()}) > 1:
            logger.error(
                "the KV tiers stay closed: the hosts have different weights or keys of --kv-key-file: make both equal"
            )
        else:
            yield message


def _sources_at(question: FindBlocks, answer: BlocksFound, end: int) -> list[bytes] | None:
    """Return the sources of the blocks that the groups need at `end`, a boundary up to that of a host's answer; None if
    the answer does not have all of them."""
    first = question.start // question.block_size
    sources = []
    for group, known in zip(question.groups, answer.sources, strict=True):
        begin = max(end - group.needed, first) if group.needed else first
        num_before = begin - (answer.end - len(known))  # blocks of the answer that are not needed
        if num_before < 0:
            return None
        sources.append(known[num_before : num_before + end - begin])
    return sources


def _up_to(question: FindBlocks, end: int) -> FindBlocks:
    """Return the question for boundaries up to `end` alone."""
    num_blocks = end - question.start // question.block_size
    groups = [msgspec.structs.replace(group, here=group.here[:num_blocks]) for group in question.groups]
    tokens = question.token_ids[: 4 * num_blocks * question.block_size]
    return msgspec.structs.replace(question, token_ids=tokens, groups=groups)


def _sum(parts: Sequence[SourceState]) -> SourceState:
    """Return the sum of the states of one source on all hosts. It is open if it is open on all, broken if it is broken
    on any, and has the first error."""
    first, *others = parts
    for part in others:
        changes: dict[str, object] = {}
        for name in first.__struct_fields__:
            one, other = getattr(first, name), getattr(part, name)
            if name == "is_open":
                changes[name] = one and other
            elif name == "rejected":
                changes[name] = {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}
            elif isinstance(one, (bool, str)):
                changes[name] = one or other
            else:
                changes[name] = one + other
        first = msgspec.structs.replace(first, **changes)
    return first
