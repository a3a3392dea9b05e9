"""Every sampling parameter has its documented effect through a whole engine, and no other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tokenloom import LLM, AsyncLLM, RequestError, RequestOutput, SamplingParams
from tokenloom.ipc.params.sampling_params import OutputKind
from tokenloom.tests.system.sampling_engine import (
    BASE,
    folder,
    llm,
    make_prompts,
)

__all__ = ["folder", "llm"]  # fixtures

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_answer_i_of_n_equals_the_answer_to_seed_plus_i(llm: LLM) -> None:
    prompt, params = make_prompts(1, 8)[0], SamplingParams(temperature=4.0, n=4, seed=11, max_tokens=12)
    (together,) = llm.generate([prompt], params, use_tqdm=False)
    alone = llm.generate([prompt] * 4, [params.replace(n=1, seed=11 + i) for i in range(4)], use_tqdm=False)
    assert [answer.index for answer in together.outputs] == [0, 1, 2, 3]
    assert [answer.token_ids for answer in together.outputs] == [output.outputs[0].token_ids for output in alone]
    assert len({tuple(answer.token_ids) for answer in together.outputs}) == 4


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


def test_all_output_kinds_deliver_the_same_tokens(folder: Path) -> None:
    (prompt,) = make_prompts(1, 10)
    params = SamplingParams(seed=3, n=2, max_tokens=80, ignore_eos=True, logprobs=1)  # a late reader gets some at once
    kinds: tuple[OutputKind, ...] = ("cumulative", "delta", "final_only")

    async def collect() -> list[list[RequestOutput]]:
        async with AsyncLLM(folder, **BASE) as llm:  # type: ignore[arg-type]
            return [[each async for each in llm.generate(prompt, params.replace(output_kind=kind))] for kind in kinds]

    cumulative, deltas, (last,) = asyncio.run(collect())
    assert min(len(cumulative), len(deltas)) > 2
    for index, whole in enumerate(last.outputs):
        parts = [answer for output in deltas for answer in output.outputs if answer.index == index]
        assert cumulative[-1].outputs[index].token_ids == whole.token_ids
        assert [token for part in parts for token in part.token_ids] == whole.token_ids
        assert [token for part in parts for token in part.logprobs or ()] == whole.logprobs
        assert ("".join(part.text for part in parts), parts[-1].finish_reason) == (whole.text, whole.finish_reason)
