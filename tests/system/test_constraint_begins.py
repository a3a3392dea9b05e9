"""From each begin on, an answer of a real engine follows its grammar to the grammar's end, and is free elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tokenloom import LLM, Client, RequestError, RequestOutput, SamplingParams, StructuredOutputsParams
from tokenloom.ipc.params.call_form import CallForm
from tokenloom.ipc.params.calls_constraint import CallsConstraint
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.system.launched import LaunchedEngine

BEGIN_ID, LENGTH = 256, 120
GRAMMAR = r'start: <[256]> "call " /[a-z]{3,12}/ "(" /[0-9]{1,4}/ ");"'
CALL = re.compile(rb"call [a-z]{3,12}\([0-9]{1,4}\);")
CALLS = StructuredOutputsParams(grammar=GRAMMAR, begin="<|begin|>", repeats=True)
PROMPTS = ["The weather", "{", "日本", "Call something: "]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights with a byte vocabulary."""
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "random", max_position_embeddings=512)


SPELLED = re.compile(rb'~![ \n]{0,9}f\(\{[ \n\t]*"a"[ \n\t]*:[ \n\t]*(1|23)[ \n\t]*\};')
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 23]}}, "required": ["a"], "additionalProperties": False}
FORM = CallForm(kind="json", start="~!", next="", end=";", mid="(")
IN_PROSE = StructuredOutputsParams(calls=CallsConstraint(form=FORM, tools={"f": SCHEMA}, has_text=True).to_text())


def params(seed: int, **more: object) -> SamplingParams:
    """Sampling in which a begin comes about each 16 tokens."""
    fields = {
        "logit_bias": {BEGIN_ID: 14.0},
        "temperature": 4.0,
        "structured_outputs": CALLS,
        "ignore_eos": True,
        **more,
    }
    return SamplingParams(max_tokens=LENGTH, seed=seed, **fields)  # type: ignore[arg-type]


def answers(llm: Client, **more: object) -> list[list[int]]:
    wanted = [params(seed, **more) for seed in range(3 * len(PROMPTS))]
    outputs = llm.generate(PROMPTS * 3, wanted, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def num_calls(token_ids: list[int]) -> int:
    """Return the number of whole calls; AssertionError unless each begin starts one, except at the end of the text."""
    rest, count = list(token_ids), 0
    while BEGIN_ID in rest:
        rest = rest[rest.index(BEGIN_ID) + 1 :]
        text = bytes(token_id if token_id < 256 else 0 for token_id in rest)
        if (call := CALL.match(text)) is None:
            assert len(rest) < 24 and 0 not in text, text
            return count
        count += 1
        rest = rest[call.end() :]
    return count


@pytest.mark.parametrize(
    "options", [{}, {"steps_in_flight": 1}, {"enable_prefix_caching": False}, {"speculation": "off"}]
)
def test_each_begin_starts_a_call_whatever_else_the_engine_does(folder: Path, options: dict[str, object]) -> None:
    with LLM(folder, in_process=True, num_threads=1, max_num_seqs=8, **options) as llm:  # type: ignore[arg-type]
        found = answers(llm)
        free = answers(llm, structured_outputs=None)
    assert sum(map(num_calls, found)) > 20
    assert all(len(token_ids) == LENGTH for token_ids in found), "a call does not end the answer"
    for mine, plain in zip(found, free, strict=True):
        first = plain.index(BEGIN_ID) if BEGIN_ID in plain else LENGTH
        assert mine[: first + 1] == plain[: first + 1], "the text before the first begin is free"


def num_spelled(token_ids: list[int]) -> int:
    """Return the number of whole calls whose begin is text; AssertionError unless each begin starts one."""
    text = bytes(token_id if token_id < 256 else 0 for token_id in token_ids)
    places = [found.start() for found in re.finditer(b"~!", text)]
    calls = [SPELLED.match(text, place) for place in places]
    assert all(call is not None or len(text) - place < 60 for call, place in zip(calls, places, strict=True)), text
    return sum(call is not None for call in calls)


@pytest.mark.parametrize(
    "options", [{}, {"steps_in_flight": 1}, {"enable_prefix_caching": False}, {"speculation": "off"}]
)
def test_text_that_becomes_a_begin_starts_a_call_and_other_prose_is_free(
    folder: Path, options: dict[str, object]
) -> None:
    bias = {"logit_bias": {ord("~"): 17.0, ord("!"): 17.0}, "temperature": 4.0}
    with LLM(folder, in_process=True, num_threads=1, max_num_seqs=8, **options) as llm:  # type: ignore[arg-type]
        found = answers(llm, structured_outputs=IN_PROSE, **bias)
        free = answers(llm, structured_outputs=None, **bias)
    assert sum(map(num_spelled, found)) > 10
    assert all(len(token_ids) == LENGTH for token_ids in found), "a call does not end the answer"
    for mine, plain in zip(found, free, strict=True):
        first = plain.index(ord("~"))
        assert mine[: first + 1] == plain[: first + 1], "the text before a begin is free"
    behind = [token_ids[token_ids.index(ord("~")) :] for token_ids in found]
    prose = bytes(token_id for token_ids in behind for token_id in token_ids if token_id < 256)
    assert re.search(rb"[^~\x80-\xff][\x80-\xbf]", prose), "and so is that behind it: masks allow no torn characters"


def test_processes_give_the_answers_of_one_process(folder: Path) -> None:
    with LLM(folder, in_process=True, num_threads=1, max_num_seqs=8) as llm:
        expected = answers(llm) + answers(llm, structured_outputs=IN_PROSE)
    with LLM(folder, num_threads=1, max_num_seqs=8) as llm:
        assert answers(llm) + answers(llm, structured_outputs=IN_PROSE) == expected


def test_an_answer_behind_a_begin_ends_with_it_unless_it_repeats(folder: Path) -> None:
    once = StructuredOutputsParams(grammar=GRAMMAR, begin="<|begin|>")
    with LLM(folder, in_process=True, num_threads=1, max_num_seqs=8) as llm:
        output: RequestOutput = llm.generate(["a"], [params(0, structured_outputs=once)], use_tqdm=False)[0]
    assert output.outputs[0].finish_reason == "stop"
    token_ids = list(output.outputs[0].token_ids)
    assert token_ids[0] == BEGIN_ID and num_calls(token_ids) == 1


def test_a_begin_that_the_vocabulary_does_not_add_is_refused(engine: LaunchedEngine) -> None:
    unknown = StructuredOutputsParams(regex="a", begin="<call>", repeats=True)
    with Client(engine.address) as client, pytest.raises(RequestError, match="no added token of this model"):
        client.generate(["a"], [SamplingParams(structured_outputs=unknown)], use_tqdm=False)
