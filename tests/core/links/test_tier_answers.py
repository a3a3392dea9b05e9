"""The answers of the tier processes of several hosts become one: a block counts only where all hosts have their part.

The oracle of the random test notes for each slot what each host has said, and when the last one has let go of it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tokenloom.core.kv.hit_rule import longest_hit
from tokenloom.core.links.tier_answers import TierAnswers
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.messages.tier import (
    HERE,
    BlocksFound,
    BlocksLoaded,
    BlocksStored,
    ClearTier,
    FindBlocks,
    FindGroup,
    LoadBlocks,
    OpenTier,
    PinBlocks,
    PinnedBlocks,
    SourceState,
    StoreBlocks,
    TierCleared,
    TierOpened,
    TierState,
    TierToCore,
)
from tokenloom.tests.support.today import some

KEY = bytes(32)


def answers_of(num_hosts: int) -> TierAnswers:
    """Return the answers of hosts that never have to be asked again."""

    def refuse(question: FindBlocks) -> None:
        raise AssertionError(f"asked again: {question}")

    return TierAnswers(num_hosts, refuse)


class HostTier:
    """A tier process that works on jobs in any order and reports slots in any pieces."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._left: dict[int, list[int]] = {}
        self._is_load: dict[int, bool] = {}
        self.results: dict[tuple[int, int], int] = {}  # by job and slot

    def begin(self, job: int, slots: list[int], *, is_load: bool) -> None:
        self._left[job], self._is_load[job] = self._rng.sample(slots, len(slots)), is_load

    @property
    def is_busy(self) -> bool:
        return bool(self._left)

    def owns(self, job: int, slot: int) -> bool:
        return slot in self._left.get(job, [])

    def report(self) -> TierToCore:
        job = self._rng.choice(list(self._left))
        left = self._left[job]
        ended = [left.pop() for _ in range(self._rng.randint(min(1, len(left)), len(left)))]
        is_last = not left
        silent = ended[:1] if is_last and self._rng.random() < 0.3 else []  # the last report ends all others, too
        for slot in ended:
            self.results[job, slot] = 0 if slot in silent else self._rng.randrange(2 if self._is_load[job] else 4)
        if is_last:
            del self._left[job]
        told = [slot for slot in ended if slot not in silent]
        if self._is_load[job]:
            good, bad = ([slot for slot in told if self.results[job, slot] == wanted] for wanted in (1, 0))
            return BlocksLoaded(job=job, slots=encode_ids(good), bad_slots=encode_ids(bad), is_last=is_last)
        targets = bytes(self.results[job, slot] for slot in told)
        return BlocksStored(job=job, slots=encode_ids(told), targets=targets, is_last=is_last)


@pytest.mark.parametrize("seed", range(30))
def test_a_slot_is_the_cores_again_when_all_hosts_are_done_and_good_if_all_have_their_part(seed: int) -> None:
    rng = random.Random(seed)
    hosts = [HostTier(rng) for _ in range(rng.randint(2, 4))]
    answers = answers_of(len(hosts))
    slots_by_job: dict[int, list[int]] = {}
    asked: dict[tuple[int, int], int] = {}
    ended: dict[tuple[int, int], int] = {}
    over: list[int] = []
    for turn in range(200):
        if turn < 100 and rng.random() < 0.3:
            job, slots = len(slots_by_job), rng.sample(range(1, 50), rng.randrange(8))
            is_load = rng.random() < 0.5
            slots_by_job[job] = slots
            if is_load:
                order = LoadBlocks(job=job, keys=KEY * len(slots), slots=encode_ids(slots), sources=bytes(len(slots)))
                asked |= {(job, slot): 1 for slot in slots}
                answers.expect(order)
            else:
                targets = bytes(rng.randrange(1, 4) for _ in slots)
                asked |= {(job, slot): target for slot, target in zip(slots, targets, strict=True)}
                owners = bytes(8 * len(slots))
                answers.expect(
                    StoreBlocks(job=job, keys=KEY * len(slots), slots=encode_ids(slots), targets=targets, owners=owners)
                )
            for host in hosts:
                host.begin(job, slots, is_load=is_load)
        busy = [host for host in hosts if host.is_busy]
        if not busy:
            continue
        host = rng.choice(busy)
        report = host.report()
        for _ in range(1 + (rng.random() < 0.1)):  # some come twice
            for message in answers.take(hosts.index(host), report):
                assert isinstance(message, (BlocksLoaded, BlocksStored))
                for slot, result in results_of(message):
                    assert (message.job, slot) not in ended, "a slot ends twice"
                    assert not any(each.owns(message.job, slot) for each in hosts), "a host still works on it"
                    ended[message.job, slot] = result
                if message.is_last:
                    over.append(message.job)
    while busy := [host for host in hosts if host.is_busy]:
        host = rng.choice(busy)
        for message in answers.take(hosts.index(host), host.report()):
            ended |= {(message.job, slot): result for slot, result in results_of(message)}  # type: ignore[union-attr]
            over += [message.job] if message.is_last else []  # type: ignore[union-attr]
    assert sorted(over) == list(slots_by_job), "a job has no end, or two"
    for (job, slot), wanted in asked.items():
        expected = wanted
        for host in hosts:
            expected &= host.results[job, slot]
        assert ended.pop((job, slot)) == expected
    assert not ended and not answers._jobs


def results_of(message: TierToCore) -> Iterator[tuple[int, int]]:
    if isinstance(message, BlocksLoaded):
        yield from ((slot, 1) for slot in decode_ids(message.slots))
        yield from ((slot, 0) for slot in decode_ids(message.bad_slots))
    elif isinstance(message, BlocksStored):
        yield from zip(decode_ids(message.slots), message.targets, strict=True)


def find(answers: TierAnswers, serial: int) -> None:
    answers.expect(FindBlocks(serial=serial, parent=KEY, token_ids=bytes(16 * 5), block_size=4, groups=[FindGroup()]))


def found(serial: int, *sources: int) -> BlocksFound:
    return BlocksFound(serial=serial, sources=[bytes(sources)], end=len(sources))


def test_blocks_are_found_as_far_as_all_hosts_have_them_at_the_farthest_place() -> None:
    answers = answers_of(3)
    find(answers, 1)
    assert not list(answers.take(0, found(1, 0, 0, 1, 1)))
    assert not list(answers.take(0, found(1))), "an answer comes twice"
    assert not list(answers.take(2, found(1, 0, 1, 0)))
    assert list(answers.take(1, found(1, 0, 0, 0, 0, 0))) == [found(1, 0, 1, 1)]
    assert not list(answers.take(1, found(1, 0, 0, 0, 0, 0))), "the question is answered"
    assert not list(answers.take(1, found(2, 0, 0, 0, 0, 0))), "nobody has asked"


@pytest.mark.parametrize("seed", some(range(100), 30))
def test_hosts_agree_on_the_largest_boundary_at_which_all_have_what_all_groups_need(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks, first, num_hosts = rng.randrange(1, 30), rng.choice([0, 2]), rng.randint(2, 3)
    needed = [0, *(rng.choice([1, 3, 6]) for _ in range(rng.randrange(3)))]
    groups = [FindGroup(needed=count, here=bytes(rng.random() < 0.3 for _ in range(num_blocks))) for count in needed]
    question = FindBlocks(
        serial=1,
        parent=KEY,
        token_ids=bytes(16 * num_blocks),
        block_size=4,
        groups=groups,
        start=4 * first,
        least=first,
    )
    share = rng.choice([0.7, 0.95])
    places = [  # by host, group and block; None: the host lacks it
        [[rng.choice([0, 1]) if rng.random() < share else None for _ in range(num_blocks)] for _ in needed]
        for _ in range(num_hosts)
    ]

    def answer_of(host: int, asked: FindBlocks) -> BlocksFound:
        """Return the answer of a host's finder."""
        count = len(asked.token_ids) // 16
        here = [group.here for group in asked.groups]
        assert {len(each) for each in here} == {count}

        def has(group: int, index: int) -> bool:
            return here[group][index] == 1 or places[host][group][index] is not None

        hit = longest_hit(count, [each.needed or None for each in asked.groups], has)
        end = hit.num_blocks
        deepest = first + hit.deepest if hit.deepest > end else 0
        if not end:
            return BlocksFound(serial=1, sources=[b""] * len(needed), end=first, deepest=deepest)
        sources = [
            bytes(HERE if here[group][i] else places[host][group][i] or 0 for i in range(begin, end))
            for group, begin in enumerate(max(end - each.needed, 0) if each.needed else 0 for each in asked.groups)
        ]
        return BlocksFound(serial=1, sources=sources, end=first + end, deepest=deepest)

    asked: list[FindBlocks] = []
    answers = TierAnswers(num_hosts, asked.append)
    asked.append(question)
    replies: list[TierToCore] = []
    while asked:
        order = asked.pop()
        answers.expect(order)
        for host in rng.sample(range(num_hosts), num_hosts):
            replies += answers.take(host, answer_of(host, order))

    def all_have(group: int, index: int) -> bool:
        return groups[group].here[index] == 1 or all(of[group][index] is not None for of in places)

    hit = longest_hit(num_blocks, [count or None for count in needed], all_have)
    end = hit.num_blocks
    (reply,) = replies
    assert isinstance(reply, BlocksFound) and reply.end == first + end
    assert reply.deepest == (first + hit.deepest if hit.deepest > end else 0)
    for group, count in enumerate(needed):
        begin = max(end - count, 0) if count else 0
        expected = [
            HERE if groups[group].here[i] else max(of[group][i] or 0 for of in places) for i in range(begin, end)
        ]
        assert list(reply.sources[group]) == expected
    assert not answers._questions and not answers._open and not answers._deepest


def test_tiers_open_when_all_hosts_name_the_same_weights_for_the_last_order(caplog: pytest.LogCaptureFixture) -> None:
    answers = answers_of(2)
    for serial in (1, 2):
        answers.expect(OpenTier(serial=serial, model_folder="", facts=b""))
    for host in (0, 1):
        assert not list(answers.take(host, TierOpened(serial=1, namespace=KEY)))
    assert not list(answers.take(1, TierOpened(serial=2, namespace=KEY)))
    assert list(answers.take(0, TierOpened(serial=2, namespace=KEY))) == [TierOpened(serial=2, namespace=KEY)]
    answers.expect(OpenTier(serial=3, model_folder="", facts=b""))
    assert not list(answers.take(0, TierOpened(serial=3, namespace=KEY)))
    assert not list(answers.take(1, TierOpened(serial=3, namespace=b"\1" * 32)))
    assert "the KV tiers stay closed: the hosts have different weights" in caplog.text


def test_a_clear_is_done_when_all_hosts_have_cleared() -> None:
    answers = answers_of(2)
    answers.expect(ClearTier(serial=1))
    assert not list(answers.take(1, TierCleared(serial=1)))
    assert list(answers.take(0, TierCleared(serial=1))) == [TierCleared(serial=1)]


def test_each_host_gets_the_answer_to_its_own_pins() -> None:
    answers = answers_of(3)
    questions = [next(answers.take(host, PinBlocks(serial=5, keys=KEY))) for host in range(3)]
    serials = [question.serial for question in questions if isinstance(question, PinBlocks)]
    assert len(set(serials)) == 3
    for host, serial in enumerate(serials):
        assert answers.place_of(PinnedBlocks(serial=serial, slots=b"")) == (host, PinnedBlocks(serial=5, slots=b""))


def test_states_are_added_up_when_all_hosts_have_told_theirs() -> None:
    answers = answers_of(2)
    one = SourceState(name="disk", is_open=True, num_objects=2, read_s=0.5, rejected={"key": 1})
    other = SourceState(name="disk", is_broken=True, error="full", num_objects=3, rejected={"key": 1, "mac": 2})
    assert not list(answers.take(1, TierState(sources=[other])))
    (state,) = answers.take(0, TierState(sources=[one]))
    assert isinstance(state, TierState)
    (source,) = state.sources
    assert (source.name, source.is_open, source.is_broken, source.error) == ("disk", False, True, "full")
    assert (source.num_objects, source.read_s, source.rejected) == (5, 0.5, {"key": 2, "mac": 2})


def test_with_one_host_every_answer_passes_unchanged() -> None:
    answers = answers_of(1)
    for message in (found(9, 0), PinBlocks(serial=5, keys=KEY)):
        assert list(answers.take(0, message)) == [message]
