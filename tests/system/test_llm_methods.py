"""The methods of LLM that programs for vLLM call, on a whole engine: each behaves as in vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
import transformers

from tokenloom import LLM, AsyncClient, BeamSearchParams, Client, RequestError, SamplingParams
from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.scripts.train.draft_answers import answers
from tokenloom.scripts.train.train_draft import demo_prompts
from tokenloom.tests.support.template_shapes import template_of
from tokenloom.tests.system.launched import LaunchedEngine

GREEDY = SamplingParams(temperature=0, max_tokens=8)
CHAT = [{"role": "user", "content": "What is the capital of Peru?"}, {"role": "assistant", "content": "The capital"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options: dict[str, Any] = {"num_threads": 1, "device": "cpu", "dtype": "float32", "num_kv_blocks": 512}
    with LLM(DEMO_FOLDER, in_process=True, **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def theirs() -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(DEMO_FOLDER))


# ── chat ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "options",
    [
        {"continue_final_message": True, "add_generation_prompt": False},
        {"add_generation_prompt": False},
        {"chat_template": "{{ documents[0].text }}{{ x }}{{ messages[-1].content }}", "documents": [{"text": "d"}]},
    ],
)
def test_a_chat_becomes_the_same_prompt_as_in_transformers(llm: LLM, theirs: Any, options: Any) -> None:
    (output,) = llm.chat(CHAT, GREEDY, use_tqdm=False, **options, chat_template_kwargs={"x": 7})
    assert output.prompt == theirs.apply_chat_template(CHAT, tokenize=False, x=7, **options)
    assert output.outputs[0].token_ids


UNIT = {"type": "object", "properties": {"unit": {"enum": ["celsius"]}}, "required": ["unit"]}
CALLED: Any = {
    "tools": [
        {"type": "function", "function": {"name": "weather", "parameters": UNIT | {"additionalProperties": False}}}
    ],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "chat_template": template_of("object/hermes"),
}
CALL_TEXT = '<tool_call>\n{"name": "weather", "arguments": {"unit": "celsius"}}\n</tool_call>'


def test_a_chat_with_tools_returns_the_call_and_goes_on_behind_it(llm: LLM) -> None:
    """The model is not trained on calls: the constraint makes it write one."""
    (output,) = llm.chat(CHAT[:1], SamplingParams(temperature=0, max_tokens=128), use_tqdm=False, **CALLED)
    answer = output.outputs[0]
    assert answer.text.strip() == CALL_TEXT
    (call,) = answer.tool_calls
    assert call["function"] == {"name": "weather", "arguments": '{"unit": "celsius"}'}
    assert answer.message == {"role": "assistant", "content": None, "tool_calls": [call]}
    turns: Any = [*CHAT[:1], answer.message, {"role": "tool", "tool_call_id": call["id"], "content": "17 degrees"}]
    (second,) = llm.chat(turns, GREEDY, use_tqdm=False, **CALLED | {"tool_choice": "none"})
    assert second.prompt is not None and CALL_TEXT in second.prompt
    assert second.outputs[0].tool_calls == []


# ── the tokenizer ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_get_tokenizer_returns_transformers_tokenizer_which_agrees_with_the_engine(llm: LLM, theirs: Any) -> None:
    tokenizer = llm.get_tokenizer()
    for text in ("The capital of France is", " 漢字 <|end|>\n", "x"):
        assert tokenizer.encode(text) == llm.tokenize(text) == theirs.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == llm.detokenize(llm.tokenize(text))
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == theirs.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.eos_token_id in llm.info().eos_token_ids
    tokenizer.chat_template = "mine"
    assert llm.get_tokenizer().chat_template == theirs.chat_template


# ── beam search ──────────────────────────────────────────────────────────────────────────────────────────────────────

TEXTS = ["The capital of France is", "A dog", "The capital of Peru is Lima. The capital of Italy is Rome. The capital"]


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(str(DEMO_FOLDER), dtype=torch.float32).eval()


@pytest.mark.parametrize("text", TEXTS)
def test_beams_without_a_length_penalty_equal_transformers_generate(llm: LLM, model: Any, text: str) -> None:
    theirs = model.generate(
        torch.tensor([llm.tokenize(text)]), num_beams=4, num_return_sequences=4, max_new_tokens=8, do_sample=False,
        length_penalty=0.0, pad_token_id=3, output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    (output,) = llm.beam_search(text, BeamSearchParams(beam_width=4, max_tokens=8, length_penalty=0.0))
    expected = [[token_id for token_id in tokens if token_id != 3] for tokens in theirs.sequences.tolist()]
    assert [beam.tokens for beam in output.sequences] == expected
    totals = [beam.cum_logprob for beam in output.sequences]
    assert totals == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-3)


def test_beams_reuse_their_common_prefix_from_the_cache(llm: LLM) -> None:
    prompt, computed_tokens = [5 + i % 90 for i in range(320)], []
    llm.reset_prefix_cache()
    run = llm.generate

    def counted(prompts: Any, *arguments: Any, **options: Any) -> Any:
        outputs = run(prompts, *arguments, **options)
        computed_tokens.extend(len(each.prompt_token_ids) - each.num_cached_tokens for each in outputs)
        return outputs

    llm.generate = counted  # type: ignore[method-assign]
    try:
        llm.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True))
    finally:
        del llm.generate
    assert computed_tokens[0] == 320 and max(computed_tokens[1:]) <= 32, "one block per beam and a partial one"


def test_an_async_chat_has_the_calls_in_its_last_output(engine: LaunchedEngine) -> None:
    async def chat() -> list[Any]:
        params = SamplingParams(temperature=0, max_tokens=128)
        async with AsyncClient(engine.address) as client:
            return [output async for output in client.chat(CHAT[:1], params, **CALLED)]

    *others, last = asyncio.run(chat())
    assert others and not any(output.outputs[0].tool_calls for output in others)
    assert [call["function"]["name"] for call in last.outputs[0].tool_calls] == ["weather"]


def test_an_async_beam_search_finds_the_same_beams(engine: LaunchedEngine) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6)

    async def search() -> Any:
        async with AsyncClient(engine.address) as client:
            return await client.beam_search(TEXTS[0], params)

    with Client(engine.address) as client:
        (output,) = client.beam_search(TEXTS[0], params)
    assert asyncio.run(asyncio.wait_for(search(), 60)) == output


def test_an_invalid_beam_search_is_refused_before_it_begins(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"beam_width must be an integer|beam_width must be in \[1"):
        BeamSearchParams(beam_width=0, max_tokens=5)
    with pytest.raises(RequestError, match="structured_outputs is not served in a beam search"):
        BeamSearchParams(beam_width=2, max_tokens=5, structured_outputs={"regex": "a"})
    with pytest.raises(RequestError, match="max_tokens is 5000, max_model_len is"):
        llm.beam_search("x", BeamSearchParams(beam_width=2, max_tokens=5000))
    with pytest.raises(RequestError, match="lora_request"):
        llm.beam_search("x", BeamSearchParams(beam_width=2, max_tokens=5), lora_request=object())


def test_an_automatic_max_model_len_is_the_longest_that_the_kv_pool_holds() -> None:
    options: dict[str, Any] = {"in_process": True, "device": "cpu", "num_threads": 1, "block_size": 16}
    with LLM("demo", max_model_len="auto", num_kv_blocks=9, **options) as llm:
        assert llm.info().max_model_len == 128
        (output,) = llm.generate([[7] * 100], SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 28
        with pytest.raises(RequestError, match="maximum context length is 128 tokens"):
            llm.generate([[7] * 128], use_tqdm=False)
    with LLM("demo", max_model_len=-1, **options) as llm:
        assert llm.info().max_model_len == 2048


# ── answers for the training of a draft head ──────────────────────────────────────────────────────────────────────────


def test_answers_to_train_with_are_the_models_own(llm: LLM) -> None:
    prompts = demo_prompts(Random(0))
    texts = [each for some in answers(llm, prompts, 0.0, 8, Random(1), 24) for each in some]
    again = llm.generate([{"prompt_token_ids": each.prompt} for each in texts], GREEDY, use_tqdm=False)
    are_greedy = [text.answer == list(output.outputs[0].token_ids) for text, output in zip(texts, again, strict=True)]
    assert len(texts) == 24 and 4 < sum(text.is_greedy for text in texts) < 20
    assert all(is_greedy for text, is_greedy in zip(texts, are_greedy, strict=True) if text.is_greedy)
    assert not all(are_greedy)
