"""RequestOutput and OutputBuilder: cumulative copies with a short repr."""

from __future__ import annotations

import itertools
import random

import pytest

from tokenloom.frontend.client.outputs import OutputBuilder
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.messages.client import Accepted, Delta, RequestMetrics, Submit
from tokenloom.ipc.params.sampling_params import SamplingParams


def new_builder(prompt: str | None = "hello", ids: bytes | None = None) -> OutputBuilder:
    return OutputBuilder(Submit(request_id="r", prompt=prompt, prompt_token_ids=ids, params=SamplingParams()))


@pytest.mark.parametrize("seed", range(20))
def test_the_output_does_not_depend_on_the_cuts_between_deltas(seed: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(50_000) for _ in range(200)]
    cuts = sorted(rng.sample(range(200), rng.randint(7, 40)))
    builder = new_builder()
    for start, end in itertools.pairwise([0, *cuts, 200]):
        text = "".join(map(chr, tokens[start:end]))
        builder.add(Delta(request_id="r", start=start, token_ids=encode_ids(tokens[start:end]), text=text))
    metrics = RequestMetrics(num_preemptions=2, finished_time=5.0)
    builder.add(Delta(request_id="r", start=200, finish_reason="stop", stop_reason=7, metrics=metrics))
    output = builder.build()
    (answer,) = output.outputs
    assert (answer.token_ids, answer.text) == (tokens, "".join(map(chr, tokens)))
    assert (answer.finish_reason, answer.stop_reason, output.finished, output.metrics) == ("stop", 7, True, metrics)


def test_later_updates_do_not_change_an_output_which_has_the_fields_of_vllm() -> None:
    builder = new_builder()
    builder.add(Delta(request_id="r", token_ids=encode_ids([1]), text="a", num_cached_tokens=4))
    first = builder.build()
    builder.add(Delta(request_id="r", start=1, token_ids=encode_ids([2]), text="b", finish_reason="length"))
    second = builder.build()
    shown = [(each.token_ids, each.text, each.finished()) for output in (first, second) for each in output.outputs]
    assert shown == [([1], "a", False), ([1, 2], "ab", True)]
    assert (first.finished, second.finished) == (False, True)
    assert second.num_cached_tokens == 4
    absent = ("lora_request", "encoder_prompt", "encoder_prompt_token_ids", "kv_transfer_params")
    assert {getattr(first, name) for name in absent} == {None}
    assert first.outputs[0].lora_request is first.outputs[0].routed_experts is None


def test_the_metrics_of_several_answers_are_those_of_the_request() -> None:
    builder = OutputBuilder(Submit(request_id="r", params=SamplingParams(n=2)))
    first = RequestMetrics(first_scheduled_time=1.0, first_token_time=2.0, finished_time=5.0, num_drafts=4)
    second = RequestMetrics(first_scheduled_time=3.0, finished_time=4.0, num_drafts=2, num_accepted_drafts=1)
    builder.add(Delta(request_id="r", finish_reason="stop", metrics=first, num_cached_tokens=16))
    builder.add(Delta(request_id="r", index=1, metrics=second, num_cached_tokens=8))
    output = builder.build()
    assert (output.metrics.num_drafts, output.metrics.num_accepted_drafts, output.num_cached_tokens) == (6, 1, 16)
    assert (output.metrics.first_scheduled_time, output.metrics.first_token_time) == (1.0, 2.0)
    assert output.metrics.finished_time == 0.0, "an answer goes on"
    builder.add(Delta(request_id="r", index=1, finish_reason="stop"))
    assert builder.build().metrics.finished_time == 5.0


def test_the_output_has_the_prompt_of_the_core() -> None:
    builder = new_builder()
    assert builder.build().prompt == "hello"
    builder.add(Accepted(request_id="r", attempt=0, prompt_token_ids=encode_ids([5, 6]), prompt="<s>hello", seed=1))
    builder.add(Accepted(request_id="r", attempt=1, prompt_token_ids=encode_ids([5, 6]), prompt=None, seed=1))
    assert (builder.build().prompt, builder.build().prompt_token_ids) == ("<s>hello", [5, 6])
    assert new_builder(None, encode_ids([9])).build().prompt_token_ids == [9]


def test_a_long_output_has_a_short_repr() -> None:
    builder = new_builder("x" * 10_000, None)
    builder.add(Delta(request_id="r", token_ids=encode_ids(range(10_000)), text="y" * 10_000))
    text = repr(builder.build())
    assert len(text) < 1000
    assert "request_id='r'" in text and "10000 characters" in text and "10000 ids" in text
    builder = new_builder("short", encode_ids([1, 2]))
    assert "prompt='short', prompt_token_ids=[1, 2]" in repr(builder.build())
