"""The methods of LLM that programs written for vLLM call, on a whole engine: each does what it does there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import transformers

from tokenloom import LLM, RequestError, SamplingParams
from tokenloom.frontend.supervisor.resolve import DEMO_FOLDER

GREEDY = SamplingParams(temperature=0, max_tokens=8)
CHAT = [{"role": "user", "content": "What is the capital of Peru?"}, {"role": "assistant", "content": "The capital"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEMO_FOLDER, num_threads=1, device="cpu", num_kv_blocks=512) as llm:
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
def test_a_chat_becomes_the_prompt_that_transformers_makes_of_it(llm: LLM, theirs: Any, options: Any) -> None:
    (output,) = llm.chat(CHAT, GREEDY, use_tqdm=False, **options, chat_template_kwargs={"x": 7})
    assert output.prompt == theirs.apply_chat_template(CHAT, tokenize=False, x=7, **options)
    assert output.outputs[0].token_ids


def test_a_template_that_fails_is_the_request_s_error(llm: LLM) -> None:
    with pytest.raises(RequestError, match="not a Jinja template"):
        llm.chat(CHAT, GREEDY, use_tqdm=False, chat_template="{% for %}")
    with pytest.raises(RequestError, match="contradict"):
        llm.chat(CHAT, GREEDY, use_tqdm=False, continue_final_message=True, add_generation_prompt=True)
