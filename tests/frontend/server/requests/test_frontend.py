"""The life of a request; the test sends the messages of client and core."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Callable

import msgspec
import pytest

from tokenloom.frontend.server.helpers.pool import THREAD_BYTES, WAIT_S
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.messages.client import Abort, Accepted
from tokenloom.ipc.messages.core import Finished, Started
from tokenloom.tests.frontend.bench import DEADLINE_S, TOKENIZER, Bench, deltas_of, ids, new_submit
from tokenloom.tests.support.engine_specs import new_spec


def test_a_request_goes_to_the_core_and_its_text_comes_back(bench: Bench) -> None:
    request = bench.core_request(params={"max_tokens": 5, "seed": 7})
    key, prompt, answer = request.children[0].key, ids("The capital"), ids(" of France")
    assert decode_ids(request.prompt_token_ids).tolist() == prompt
    assert (request.max_tokens, request.stop_token_ids, request.children[0].seed) == (5, [2], 7)
    assert bench.heard() == []

    bench.now += 0.25
    bench.core(accepted=[key], started=[Started(key=key, num_cached_tokens=16)])
    assert bench.heard() == [
        Accepted(request_id="r", attempt=0, prompt_token_ids=encode_ids(prompt), prompt="The capital", seed=7)
    ]
    bench.now += 0.5
    bench.tokens((key, 0, answer[:1]))
    (first,) = bench.deltas()
    assert first.metrics is not None and first.num_cached_tokens == 16 and first.finish_reason is None
    assert (first.metrics.arrival_time, first.metrics.first_token_time) == (1e9 + 100, 1e9 + 100.75)
    assert first.metrics.first_scheduled_time == 1e9 + 100.25
    bench.now += 0.5
    bench.tokens((key, 1, answer[1:]))
    (second,) = bench.deltas()
    assert second.metrics is None and second.start == 1 and second.token_ids == encode_ids(answer[1:])
    bench.now += 0.5
    bench.core(finished=[Finished(key=key, reason="length", num_preemptions=3)])
    (last,) = bench.deltas()
    assert first.text + second.text + last.text == " of France"
    assert last.metrics is not None and last.finish_reason == "length" and last.stop_reason is None
    assert (last.metrics.finished_time, last.metrics.num_preemptions) == (1e9 + 101.75, 3)
    assert bench.frontend.num_open_requests == 0 and bench.aborted() == []


EOS, OTHER_END, WORD = 2, 60, 50  # the tokenizer's end, another end in generation_config, a token


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("named", [(), (EOS,), (OTHER_END,), (WORD,), (EOS, OTHER_END, WORD)])
@pytest.mark.parametrize("stop", [[], ["none such"]])
@pytest.mark.parametrize("last", [EOS, OTHER_END, WORD])
def test_a_named_stop_token_is_the_stop_reason(
    ignore_eos: bool, named: tuple[int, ...], stop: list[str], last: int
) -> None:
    """vLLM's rule: the tokenizer's end token ends an answer first, unless it is ignored, and then the named ones do."""
    bench = Bench(model=msgspec.structs.replace(new_spec().model, eos_token_ids=[EOS, OTHER_END]))
    params: dict[str, object] = {"stop_token_ids": list(named), "stop": stop, "ignore_eos": ignore_eos}
    key = bench.submit(params=params)
    ends = {*named, *(() if ignore_eos else (EOS, OTHER_END))}
    assert set(bench.to_core[-1].stop_token_ids) == ends
    reason = "stop" if last in ends else "length"
    bench.tokens((key, 0, [*ids("The"), last]), finished=[Finished(key=key, reason=reason)])
    (delta,) = bench.deltas()
    expected = None if last not in named or (last == EOS and not ignore_eos) else last
    assert (delta.finish_reason, delta.stop_reason) == (reason, expected)
    text = "" if last in {*ends, EOS} else TOKENIZER.decode([last])
    assert (delta.text, delta.token_ids) == (f"The{text}", encode_ids([*ids("The"), last]))


def test_special_tokens_that_a_request_shows_are_text_and_end_tokens_are_not(bench: Bench) -> None:
    user = ids("<|user|>")
    for skip, text in ((True, "The<|user|> capital"), (False, "The<|user|><s> capital")):
        key = bench.submit(shown_token_ids=encode_ids(user), params={"skip_special_tokens": skip})
        tokens = [*ids("The"), *user, *ids("<s>"), *ids(" capital"), EOS]
        bench.tokens((key, 0, tokens), finished=[Finished(key=key, reason="stop")])
        (delta,) = bench.deltas()
        assert (delta.text, decode_ids(delta.token_ids).tolist()) == (text, tokens)


def test_a_stop_string_cuts_the_text_keeps_its_tokens_and_aborts_in_the_core(bench: Bench) -> None:
    key = bench.submit(params={"stop": ["pan", "nic"]})
    tokens = [ids(character)[0] for character in "Don't panic!"]
    bench.tokens((key, 0, tokens[:7]))
    (held,) = bench.deltas()
    assert held.text == "Don't " and len(decode_ids(held.token_ids)) == 7
    bench.tokens((key, 7, tokens[7:]))
    (last,) = bench.deltas()
    assert (last.text, last.finish_reason, last.stop_reason) == ("", "stop", "pan")
    assert decode_ids(last.token_ids).tolist() == tokens[7:9]
    assert bench.aborted() == [key]
    bench.tokens((key, 12, tokens), finished=[Finished(key=key, reason="length")])
    assert bench.heard() == [] and bench.frontend.num_open_requests == 0


def test_text_of_a_stop_string_is_sent_at_the_end_or_before_min_tokens(bench: Bench) -> None:
    key = bench.submit(params={"stop": "a", "min_tokens": 4, "include_stop_str_in_output": True})
    bench.tokens((key, 0, [ids(character)[0] for character in "ababa"]))
    (delta,) = bench.deltas()
    assert (delta.text, delta.stop_reason) == ("ababa", "a")
    key = bench.submit(params={"stop": "Paris!"})
    bench.tokens((key, 0, ids("Paris")))
    assert [delta.text for delta in bench.deltas()] == [""]
    bench.core(finished=[Finished(key=key, reason="length")])
    assert [(delta.text, delta.finish_reason) for delta in bench.deltas()] == [("Paris", "length")]


def test_finished_requests_leave_no_cycles_for_the_garbage_collector(bench: Bench) -> None:
    gc.disable()
    gc.freeze()  # the collector then looks at the objects of these requests alone
    try:
        for request_id in map(str, range(20)):
            key = bench.submit(request_id, params={"n": 2})
            bench.tokens((key, 0, ids("The")), (key + 1, 0, ids("a")))
            bench.core(finished=[Finished(key=key, reason="length"), Finished(key=key + 1, reason="length")])
            bench.submit(request_id)
            bench.say(Abort(request_id=request_id))
            bench.to_core.clear()
            bench.heard()
        assert gc.collect() == 0
    finally:
        gc.unfreeze()
        gc.enable()


def test_token_ids_are_served_without_a_tokenizer() -> None:
    bench = Bench(tokenizer=None)
    key = bench.submit(prompt_token_ids=encode_ids([5, 6, 7]), params={"stop_token_ids": [9]})
    bench.tokens((key, 0, [8, 9]), finished=[Finished(key=key, reason="stop")])
    (delta,) = bench.deltas()
    assert (delta.text, delta.token_ids, delta.stop_reason) == ("", encode_ids([8, 9]), 9)


def test_a_long_prompt_is_tokenized_in_a_thread_and_short_ones_overtake_it() -> None:
    bench = Bench(max_model_len=100_000)
    text = "The capital of France is Paris. " * 300
    assert bench.say(new_submit("long", prompt=text)) == [] and bench.to_core == []
    bench.submit("short")
    bench.to_core.clear()
    bench.wait_for_wakeup()
    assert decode_ids(bench.to_core[0].prompt_token_ids).tolist() == TOKENIZER.encode(text)


def occupy_threads(bench: Bench) -> Callable[[], None]:
    """Occupy all threads of the pool, so that later jobs wait; returns a function that frees them."""
    end, begun = threading.Event(), threading.Semaphore(0)

    def work() -> None:
        begun.release()
        assert end.wait(DEADLINE_S)

    for _ in THREAD_BYTES:
        bench.frontend.intake.run(lambda _: work(), lambda outcome: None)
    assert all(begun.acquire(timeout=DEADLINE_S) for _ in THREAD_BYTES)
    return end.set


def test_timeouts_run_while_a_long_prompt_waits_for_a_thread(bench: Bench) -> None:
    text, release = "x " * 3000, occupy_threads(bench)
    bench.say(new_submit("own", prompt=text, params={"timeout_s": 5, "n": 2}))
    bench.say(new_submit("queue", prompt=text, params={"queue_timeout_s": 6, "timeout_s": 50}))
    bench.say(new_submit("none", prompt=text))
    begun_at = bench.now
    for request_id, after_s in (("own", 5.0), ("queue", 6.0)):
        bench.now = begun_at + after_s - 0.01
        bench.turn()
        assert bench.heard() == []
        bench.now = begun_at + after_s + 0.01
        bench.turn()
        accepted, *_ = heard = bench.heard()
        assert isinstance(accepted, Accepted) and accepted.request_id == request_id
        ends = {(delta.request_id, delta.index, delta.finish_reason) for delta in deltas_of(heard)}
        assert ends == {(request_id, index, "timeout") for index in range(2 if request_id == "own" else 1)}
    bench.now += WAIT_S
    bench.turn()
    (delta,) = bench.deltas()
    assert delta.error is not None and delta.error.kind == "overloaded" and delta.error.retry_after_s > 0
    assert bench.to_core == [] and bench.frontend.num_open_requests == 0
    release()


def test_a_long_prompt_ends_with_its_error_or_an_abort_before_it_is_tokenized() -> None:
    encoded: list[str] = []

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        encoded.append(text)
        return [5] * (len(text) // 10)

    bench = Bench(tokenizer=dataclasses.replace(TOKENIZER, _encode=encode))
    release = occupy_threads(bench)
    (delta,) = bench.news(new_submit("aborted", prompt="a" * 5000), Abort(request_id="aborted"))
    assert delta.finish_reason == "abort"
    bench.say(new_submit("stays", prompt="b" * 5000))
    release()
    while not bench.to_core:
        bench.wait_for_wakeup()
    assert encoded == ["b" * 5000]
    assert "context length is 512" in bench.refusal(new_submit(prompt="c" * 6000)).message
    assert len(bench.to_core) == 1


def test_the_core_gets_the_time_that_a_request_has_waited_since_its_first_submit(bench: Bench) -> None:
    """Also if the client's clock, or that of the frontend before, was set in between."""
    assert bench.core_request("new").waited_s == 0.0
    old = bench.core_request("old", attempt=1, arrival_time=5e9, waited_s=20.0, params={"timeout_s": 60.0})
    assert (old.waited_s, old.arrival_time) == (20.0, 1e9 + bench.now - 20.0)
