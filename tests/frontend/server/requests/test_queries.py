"""Queries to the Frontend: health, info, tokenize; and control commands."""

from __future__ import annotations

import msgspec

from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.errors import ErrorInfo
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.client import (
    Control,
    Deltas,
    Detokenize,
    Done,
    GetHealth,
    GetInfo,
    Health,
    Info,
    QueryFailed,
    Text,
    TokenIds,
    Tokenize,
)
from tokenloom.ipc.messages.core import EngineCoreOutputs, Prefetched
from tokenloom.ipc.messages.orders import Order, Ordered
from tokenloom.ipc.messages.supervisor import Initialize, Progress, SetLogLevel
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.frontend.bench import TOKENIZER, Bench, ids


def health_after(bench: Bench, seconds: float, **progress: object) -> Health:
    """Return the health of an engine that reported its progress `seconds` ago."""
    bench.frontend.on_control_message(msgspec.convert({"num_running": 3, "num_waiting": 4} | progress, Progress))
    bench.wait(seconds)
    (health,) = bench.say(GetHealth(query_id=1))
    assert isinstance(health, Health)
    return health


def test_health_shows_the_last_progress_and_its_age(bench: Bench) -> None:
    health = health_after(bench, 2, step=5, step_age_s=0.5)
    assert health.is_ready and not health.is_stalled
    assert (health.step, health.step_age_s, health.num_running, health.num_waiting) == (5, 2.5, 3, 4)
    assert health_after(bench, 9, step=5, step_age_s=9.5).is_stalled
    assert not health_after(bench, 0, step=6, step_age_s=0.0).is_stalled


def test_an_idle_or_suspended_engine_is_not_stalled(bench: Bench) -> None:
    assert not health_after(bench, 1000, step=5, step_age_s=0.0, num_running=0, num_waiting=0).is_stalled
    assert not health_after(bench, 1, step=5, step_age_s=1000.0, num_running=1, num_waiting=0).is_stalled, "just begun"
    assert not health_after(bench, 5, step=5, step_age_s=0.0).is_stalled
    bench.now += 1000  # no turn meanwhile
    assert not health_after(bench, 0, step=5, step_age_s=1000.0).is_stalled
    assert health_after(bench, 5, step=5, step_age_s=1005.0).is_stalled, "time before the suspension counts"


def test_info_describes_the_served_model(bench: Bench) -> None:
    bench.frontend.on_control_message(
        Initialize(pool=PoolShape(65, 1, (1,)), num_all_blocks=64, max_model_len=512, kernels="C kernels")
    )
    (info,) = bench.say(GetInfo(query_id=4))
    assert isinstance(info, Info) and (info.query_id, info.model, info.num_kv_blocks) == (4, "sample", 64)
    assert info.kernels == "C kernels", "at once, also before the phases of the start"
    assert (info.max_model_len, info.vocab_size, info.eos_token_ids) == (512, 1000, [2])


def test_tokenize_and_detokenize_work_for_short_and_long_texts(bench: Bench) -> None:
    for text in ("The capital", "The capital " * 1000):
        token_ids = encode_ids(TOKENIZER.encode(text))
        heard = bench.ask(Tokenize(query_id=1, prompt=text), Detokenize(query_id=2, token_ids=token_ids))
        assert {each.query_id: each for each in heard} == {  # type: ignore[union-attr]
            1: TokenIds(query_id=1, token_ids=token_ids),
            2: Text(query_id=2, text=text),
        }


def test_an_invalid_query_fails_with_a_request_error(bench: Bench) -> None:
    failed = bench.say(
        Tokenize(query_id=7),
        Detokenize(query_id=8, token_ids=b"abc"),
        Detokenize(query_id=9, token_ids=encode_ids([-1])),
    )
    kinds = {each.query_id: each.error.kind for each in failed if isinstance(each, QueryFailed)}
    assert kinds == dict.fromkeys((7, 8, 9), "request")


def test_outputs_before_a_pause_are_sent_before_its_reply(bench: Bench) -> None:
    key = bench.submit()
    bench.say(Control(query_id=7, action="pause", mode="wait", order_id="pause"))
    columns = {"keys": key, "starts": 0, "counts": 1, "token_ids": 40}
    last = EngineCoreOutputs(**{name: encode_ids([value]) for name, value in columns.items()})
    bench.frontend.on_core_message(last)
    bench.frontend.on_control_message(Ordered(order_id="pause"))
    bench.turn()
    assert [type(message) for message in bench.heard()] == [Deltas, Done]


def test_a_paused_engine_is_not_stalled_nor_one_just_resumed(bench: Bench) -> None:
    health_after(bench, 0, step=5, step_age_s=0.0)
    assert health_after(bench, 1, step=5, step_age_s=1.0, is_paused=True).state == "paused"
    bench.now += 100.0
    (health,) = bench.say(GetHealth(query_id=1))
    assert isinstance(health, Health) and not health.is_stalled and health.state == "paused"
    assert health_after(bench, 0, step=5, step_age_s=100.0).state == "ready"
    assert health_after(bench, 11, step=5, step_age_s=111.0).is_stalled


def test_an_order_goes_to_the_supervisor_and_its_reply_to_the_client(bench: Bench) -> None:
    assert bench.say(Control(query_id=3, action="log_level", level="debug", order_id="one")) == []
    assert bench.frontend.outbox.to_supervisor == [Order(order_id="one", action="log_level", level="debug")]
    bench.frontend.on_control_message(Ordered(order_id="two"))  # another frontend's
    assert bench.heard() == [] and bench.frontend.log_level == "info"
    bench.frontend.on_control_message(SetLogLevel(level="debug"))
    bench.frontend.on_control_message(Ordered(order_id="one"))
    bench.turn()
    assert bench.heard() == [Done(query_id=3)] and bench.frontend.log_level == "debug"


def test_an_order_that_a_client_sends_again_is_the_same_one_and_old_clients_give_no_ids(bench: Bench) -> None:
    for query_id in (1, 2):  # it has lost its connection in between
        bench.say(Control(query_id=query_id, action="sleep", order_id="one"))
        bench.say(Control(query_id=query_id + 2, action="sleep", replica=1))
    orders = [order for order in bench.frontend.outbox.to_supervisor if isinstance(order, Order)]
    assert {order.replica for order in orders} == {None}, "only restarts are for one"
    ids = [order.order_id for order in orders]
    assert ids[0] == ids[2] == "one" and len({*ids}) == 3 and all(ids)
    for order_id, error in (("one", None), (ids[1], ErrorInfo("internal", "it cannot"))):
        bench.frontend.on_control_message(Ordered(order_id=order_id, error=error))
    bench.turn()
    first, second, failed = bench.heard()
    assert [first, second] == [Done(query_id=1), Done(query_id=2)]
    assert isinstance(failed, QueryFailed) and failed.query_id == 3
    (refused,) = bench.say(Control(query_id=5, action="sleep", order_id="x" * 101))
    assert isinstance(refused, QueryFailed) and refused.error.kind == "request"


def test_a_prefetch_sends_the_tokens_of_its_prompt_and_tells_how_many_are_there() -> None:
    controls = [Control(query_id=i, action=action) for i, action in enumerate(("clear_kv_cache", "prefetch_kv"))]
    failed = Bench().say(*controls)
    assert ["--kv-disk" in each.error.message for each in failed if isinstance(each, QueryFailed)] == [True] * 2
    bench = Bench(config=EngineConfig(kv_disk="/disk"))
    wrong = bench.say(Control(query_id=1, action="prefetch_kv", prompt_token_ids=encode_ids([5] * 513)))
    assert [type(each) for each in wrong] == [QueryFailed], "it is longer than any request's prompt"
    bench.say(
        Control(query_id=2, action="prefetch_kv", prompt="The capital", cache_salt="a"),
        Control(query_id=3, action="prefetch_kv", prompt_token_ids=encode_ids([5, 6])),
    )
    first, second = bench.to_core
    assert first.prompt_token_ids == encode_ids(ids("The capital")) and first.cache_salt == "a"
    assert second.prompt_token_ids == encode_ids([5, 6]) and second.cache_salt is None
    bench.frontend.on_core_message(Prefetched(prefetch_id=first.prefetch_id, num_tokens=16))
    bench.turn()
    assert bench.heard() == [Done(query_id=2, num_tokens=16)]
