"""An operator clears all places of KV blocks, and loads the blocks of a prompt before its request comes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tokenloom.core.features.tiers.options import OffloadOptions
from tokenloom.core.links.frontend_port import handle
from tokenloom.core.links.order_runner import OrderRunner
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.messages.core import Prefetch, Prefetched
from tokenloom.ipc.messages.orders import Hold
from tokenloom.ipc.messages.tier import STORE_ON_DISK
from tokenloom.ipc.process.arena import ArenaShape
from tokenloom.tests.core.fake_adapters import digest_of
from tokenloom.tests.core.fake_media import new_vision, with_images
from tokenloom.tests.core.harness import TURN_S, Harness, prompt_of

PROMPT = prompt_of(random.Random(1), 32)


class Operator:
    """Sends orders to the core of a harness with a disk and no host tier, and keeps the replies."""

    def __init__(self) -> None:
        tiers = OffloadOptions(
            ArenaShape(100, (1,), (1024,)), 4, "cpu", b"{}", 1.0, False, STORE_ON_DISK, has_sources=True
        )
        vision = {"vision": new_vision(), "encoder_cache": 40, "max_item_embeds": 20}
        options = {"num_blocks": 24, "max_num_seqs": 4, "enable_lora": True}
        self.harness = Harness(tiers=tiers, **vision, **options)  # type: ignore[arg-type]
        self.harness.worker.token_s = 1.0  # so that loads are worth it
        self.replies: list[object] = []
        refuse: Callable[[object], None] = pytest.fail
        self.orders = OrderRunner(self.harness.core, self.replies.append, refuse, refuse)
        self.settle()

    def clear(self) -> None:
        self.orders.begin(Hold(order_id="1", action="clear_kv_cache"))

    def begin_prefetch(self, prompt: list[int] = PROMPT, **fields: Any) -> None:
        order = Prefetch(prefetch_id=1, prompt_token_ids=encode_ids(prompt), **fields)
        handle(0, order, self.harness.core, lambda _, message: self.replies.append(message))

    def prefetch(self, salt: str | None = None, adapter: int = 0) -> int:
        """Load the blocks of PROMPT; return the number of its first tokens that are in memory then."""
        digest = digest_of(adapter)
        self.begin_prefetch(cache_salt=salt, adapter_digest=digest)
        self.settle()
        return self.take_prefetched()

    def take_prefetched(self) -> int:
        """Take the reply to a prefetch; return its number of tokens."""
        reply = self.replies.pop()
        assert isinstance(reply, Prefetched)
        return reply.num_tokens

    def settle(self) -> None:
        for _ in range(60):
            self.turn()

    def turn(self) -> None:
        self.harness.now += TURN_S
        self.harness.offload.tick(is_idle=True)
        self.harness.core.step()
        self.harness.answer()
        self.harness.tier.act()
        self.harness.core.scheduler.check_invariants()

    def ask(self, key: int, prompt: list[int], **params: object) -> tuple[int, dict[str, int]]:
        """Run a request; return the tokens that it found, and those from outside the pool."""
        self.harness.add(key, prompt, 1, **params)  # type: ignore[arg-type]
        self.harness.run()
        self.settle()
        return self.harness.cached[key], {str(place): num for place, num in self.harness.loaded[key].items()}


def test_a_prefetched_prompt_is_in_memory_when_its_request_comes() -> None:
    operator = Operator()
    assert operator.prefetch() == 0, "nothing is known yet"
    operator.ask(1, PROMPT)
    operator.harness.core.reset_prefix_cache()
    assert operator.prefetch("a tenant") == 0, "blocks of others"
    assert operator.prefetch() == 32
    num_questions = operator.harness.tier.num_questions
    assert operator.ask(2, PROMPT) == (28, {"disk": 28})
    assert operator.harness.tier.num_questions == num_questions, "all blocks were there"
    assert operator.prefetch() == 32, "in the pool"


def test_a_prefetch_for_an_adapter_loads_its_blocks_and_no_others() -> None:
    operator = Operator()
    operator.ask(1, PROMPT, adapter=1)
    operator.harness.core.reset_prefix_cache()
    assert [operator.prefetch(), operator.prefetch(adapter=2), operator.prefetch(adapter=1)] == [0, 0, 32]
    assert operator.ask(2, PROMPT, adapter=1) == (28, {"disk": 28})


def test_a_prefetch_of_a_prompt_with_an_image_loads_its_blocks_and_those_of_no_other_image() -> None:
    operator = Operator()
    prompt, media = with_images([PROMPT[:6], (1, 15), PROMPT[:11]])
    other = with_images([PROMPT[:6], (2, 15), PROMPT[:11]])[1]
    operator.ask(1, prompt, media=media)
    operator.harness.core.reset_prefix_cache()
    for spans, num_loaded in ((other, 4), (media, 32)):
        operator.begin_prefetch(prompt, media=spans)
        operator.settle()
        assert operator.take_prefetched() == num_loaded
    assert operator.ask(2, prompt, media=media) == (28, {"disk": 28})
    assert sum(operator.harness.worker.encoder.num_begun.values()) == 1, "found, not encoded again"


def test_a_prefetch_ends_after_30_seconds_with_what_is_there() -> None:
    operator = Operator()
    operator.ask(1, PROMPT)
    operator.harness.core.reset_prefix_cache()
    operator.begin_prefetch()
    offload = operator.harness.offload
    assert offload is not None and offload.next_deadline == operator.harness.now + 30.0
    operator.harness.now += 29.9  # the tier process is silent
    offload.tick(is_idle=True)
    assert not operator.replies
    operator.harness.now += 0.2
    offload.tick(is_idle=True)
    assert operator.take_prefetched() == 0
    operator.settle()  # its answer comes late
    assert offload.slots.num_used == 0 and not operator.replies


def test_a_clear_removes_blocks_everywhere_and_is_answered_when_they_are_gone() -> None:
    operator = Operator()
    operator.ask(1, PROMPT)
    assert operator.harness.tier.objects and operator.ask(2, PROMPT)[0] == 28
    operator.clear()
    assert not operator.replies, "the disk still has them"
    operator.settle()
    assert len(operator.replies) == 1 and not operator.harness.tier.objects
    assert operator.ask(3, PROMPT) == (0, {})


def test_two_clears_at_once_get_one_reply_each() -> None:
    operator = Operator()
    for _ in range(2):
        operator.clear()
    operator.turn()
    operator.clear()
    operator.settle()
    assert len(operator.replies) == 3


@pytest.mark.parametrize("num_turns", range(12))
def test_a_clear_amid_writes_and_loads_leaves_nothing_behind(num_turns: int) -> None:
    operator = Operator()
    if num_turns % 2:  # loads are on their way, else writes
        operator.ask(1, PROMPT)
        operator.harness.core.reset_prefix_cache()
    operator.harness.add(2, PROMPT, 1)
    for _ in range(num_turns // 2):
        operator.turn()
    is_waiting = len(operator.harness.core.scheduler.waiting) > 0
    operator.clear()
    operator.harness.run()
    operator.settle()
    assert operator.harness.offload.slots.num_used == 0
    assert len(operator.replies) == 1
    if is_waiting:
        assert operator.harness.cached[2] == 0, "it reads what was cleared"
    else:
        assert not operator.harness.tier.objects, "it was computed before and written after the clear"


def test_a_clear_is_answered_when_the_tier_process_is_lost_and_the_next_one_carries_it_out() -> None:
    operator = Operator()
    operator.ask(1, PROMPT)
    operator.clear()
    operator.harness.lose_tier()
    assert len(operator.replies) == 1 and operator.harness.tier.objects
    operator.settle()
    assert not operator.harness.tier.objects and operator.harness.offload.is_open
    assert operator.ask(2, PROMPT) == (0, {})


def test_a_clear_of_closed_tiers_removes_their_blocks_before_they_open() -> None:
    operator = Operator()
    operator.ask(1, PROMPT)
    offload = operator.harness.offload
    offload.close()
    operator.clear()
    assert len(operator.replies) == 1 and operator.harness.tier.objects
    offload.open("")
    while not offload.is_open:
        assert operator.harness.tier.act()
        operator.turn()
    assert not operator.harness.tier.objects
    assert operator.ask(2, PROMPT) == (0, {})
