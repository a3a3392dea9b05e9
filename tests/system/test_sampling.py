"""Every sampling parameter has its documented effect through a whole engine, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tokenloom import LLM, AsyncLLM, RequestError, RequestOutput, SamplingParams
from tokenloom.ipc.sampling_params import OutputKind
from tokenloom.tests.system.sampling_engine import BASE, VOCAB_SIZE, make_prompts, open_llm, sampling_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sampling_checkpoint(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as llm:
        yield llm


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_request_with_no_allowed_token_ends_with_an_error(steps_in_flight: int, folder: Path) -> None:
    prompts, calm = make_prompts(3, 5), SamplingParams(seed=1, max_tokens=12, ignore_eos=True)
    barred = [  # at the first token, and after it
        calm.replace(allowed_token_ids=[97], bad_words=["a"], logprobs=2),
        calm.replace(structured_outputs={"regex": "xa+y"}, bad_words=["xa"], temperature=0),
    ]
    with open_llm(folder, steps_in_flight=steps_in_flight) as llm:
        alone = llm.generate([prompts[2]], calm, use_tqdm=False)[0].outputs[0].token_ids
        among = llm.submit(prompts[2], calm)
        for prompt, params in zip(prompts, barred, strict=False):
            with pytest.raises(RequestError, match="no token may come next"):
                llm.generate([prompt], params, use_tqdm=False)
        assert among.result(30).outputs[0].token_ids == alone


def test_answer_i_of_n_equals_the_answer_to_seed_plus_i(llm: LLM) -> None:
    prompt, params = make_prompts(1, 8)[0], SamplingParams(temperature=4.0, n=4, seed=11, max_tokens=12)
    (together,) = llm.generate([prompt], params, use_tqdm=False)
    alone = llm.generate([prompt] * 4, [params.replace(n=1, seed=11 + i) for i in range(4)], use_tqdm=False)
    assert [answer.index for answer in together.outputs] == [0, 1, 2, 3]
    assert [answer.token_ids for answer in together.outputs] == [output.outputs[0].token_ids for output in alone]
    assert len({tuple(answer.token_ids) for answer in together.outputs}) == 4


async def collect_all(
    folder: Path, prompt: list[int], params: SamplingParams, kinds: Sequence[OutputKind]
) -> list[list[RequestOutput]]:
    """Return the outputs of the same request for each kind."""
    outputs: list[list[RequestOutput]] = [[] for _ in kinds]
    async with AsyncLLM(folder, **BASE) as llm:  # type: ignore[arg-type]
        for kind, collected in zip(kinds, outputs, strict=True):
            async for output in llm.generate(prompt, params.replace(output_kind=kind)):
                collected.append(output)
    return outputs


def test_all_output_kinds_deliver_the_same_tokens(folder: Path) -> None:
    prompt = make_prompts(1, 10)[0]
    params = SamplingParams(seed=3, n=2, max_tokens=80, ignore_eos=True, logprobs=1)  # a late reader gets some at once
    cumulative, deltas, last = asyncio.run(collect_all(folder, prompt, params, ("cumulative", "delta", "final_only")))
    assert len(last) == 1 and last[0].finished and cumulative[-1].finished and deltas[-1].finished
    assert [answer.token_ids for answer in last[0].outputs] == [answer.token_ids for answer in cumulative[-1].outputs]
    for index in range(2):
        parts = [answer for output in deltas for answer in output.outputs if answer.index == index]
        whole = last[0].outputs[index]
        assert "".join(part.text for part in parts) == whole.text
        assert [token for part in parts for token in part.token_ids] == whole.token_ids
        assert [token for part in parts for token in part.logprobs or ()] == whole.logprobs
        assert parts[-1].finish_reason == whole.finish_reason
    assert len(deltas) > 2 and len(cumulative) > 2


@pytest.mark.parametrize(("asked", "kept"), [(5, 5), (1, 1), (10_000, 60), (-1, 60)])
def test_truncate_prompt_tokens_keeps_the_last_tokens(asked: int, kept: int, llm: LLM) -> None:
    prompt, params = list(range(60)), SamplingParams(max_tokens=4, truncate_prompt_tokens=asked)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.prompt_token_ids == prompt[-kept:]


def test_truncation_to_the_model_leaves_room_for_the_answer(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, truncate_prompt_tokens=-1)
    prompt = list(range(200)) * 3
    (cut,) = llm.generate([prompt], params, use_tqdm=False)
    assert cut.prompt_token_ids == prompt[-370:] and len(cut.outputs[0].token_ids) <= 30


def double_odd(prompt_ids: Sequence[int], output_ids: Sequence[int], logits: object) -> object:
    """Allow only tokens of one parity, as an operator's logits processor."""
    logits[len(prompt_ids) % 2 :: 2] = -1e9  # type: ignore[index]
    return logits


def test_a_logits_processor_runs_only_if_the_operator_allows_it(folder: Path, llm: LLM) -> None:
    path = "tokenloom.tests.system.test_sampling:double_odd"
    params = SamplingParams(max_tokens=10, logits_processors=[path])
    with open_llm(folder, allowed_logits_processors=path) as allowing:
        output = allowing.generate([[1, 2, 3]], params, use_tqdm=False)[0]
        assert {token % 2 for token in output.outputs[0].token_ids} == {0}
    with pytest.raises(RequestError, match="--allowed-logits-processors"):
        llm.generate([[1, 2, 3]], params, use_tqdm=False)


CHANGING: dict[str, dict[str, object]] = {
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "logit_bias": {"logit_bias": {65: 60.0}},
    "allowed_token_ids": {"allowed_token_ids": [66, 67]},
    "max_tokens": {"max_tokens": 3},
    "temperature": {"temperature": 6.0, "seed": 1},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 2},
}


@pytest.mark.parametrize("name", CHANGING)
def test_each_parameter_changes_the_answer(name: str, llm: LLM) -> None:
    params = [GREEDY, GREEDY.replace(**CHANGING[name])]
    plain, changed = llm.generate(make_prompts(1, 12) * 2, params, use_tqdm=False)
    assert changed.outputs[0].token_ids != plain.outputs[0].token_ids


def test_bad_words_never_come(llm: LLM) -> None:
    (prompt,) = make_prompts(1, 12)
    only_abc = GREEDY.replace(allowed_token_ids=[97, 98, 99])
    words: list[list[str]] = [["a"], ["a", "b"], ["a", "bb"]]
    params = [only_abc.replace(bad_words=each) for each in words]
    one, two, pair = (each.outputs[0].text for each in llm.generate([prompt] * 3, params, use_tqdm=False))
    assert one == "b" * 12 and two == "c" * 12
    assert "a" not in pair and "bb" not in pair
    with pytest.raises(RequestError, match="no token may come next"):  # no continuation is left after "c"
        llm.generate([prompt], only_abc.replace(bad_words=["a", "b", "cc"]), use_tqdm=False)


def test_a_stop_token_ends_the_answer_from_min_tokens_on(llm: LLM) -> None:
    (prompt,) = make_prompts(1, 12)
    first = llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids[0]
    stopping = GREEDY.replace(stop_token_ids=[first])
    params = [stopping, stopping.replace(min_tokens=5)]
    seen, late = (each.outputs[0].token_ids for each in llm.generate([prompt] * 2, params, use_tqdm=False))
    assert len(seen) == 1 and first not in late[:5] and len(late) >= 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": 21}, "--max-logprobs"),
        ({"prompt_logprobs": 21}, "--max-logprobs"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "ids are 0 to"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "ids are 0 to"),
        ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2}, "only tokens that end"),
    ],
)
def test_parameters_outside_the_models_limits_are_refused_with_numbers(
    fields: dict[str, object], message: str, llm: LLM
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([[1, 2, 3]], SamplingParams(**fields), use_tqdm=False)  # type: ignore[arg-type]
