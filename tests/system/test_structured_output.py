"""Every answer conforms to its structure, and an invalid grammar fails only its own request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import jsonschema
import pytest

from tokenloom import LLM, Client, RequestError, RequestOutput, SamplingParams, StructuredOutputsParams
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.system.launched import LaunchedEngine
from tokenloom.tests.system.malformed_grammars import deep_grammars, malformed_grammars
from tokenloom.tests.system.schemas import SCHEMAS, Schema

PROMPTS = ("The capital of France is", "{", "Answer in JSON: ", "42", "日本")
MAX_TOKENS = 1400
MODELS = ("demo", "random")
MAX_BYTES = 4  # of a character


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Start random weights with a byte vocabulary in this process."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("models") / "random", max_position_embeddings=2048)
    with LLM(folder, in_process=True, num_threads=1, max_num_seqs=64, num_kv_blocks=4000) as tiny:
        yield tiny


@pytest.fixture
def demo(engine: LaunchedEngine) -> Iterator[Client]:
    with Client(engine.address) as demo:
        yield demo


@pytest.fixture
def engines(demo: Client, tiny: LLM) -> dict[str, Client]:
    return {"demo": demo, "random": tiny}


def conforms(text: str, schema: Schema) -> None:
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(text))


def generate_all(llm: Client, repeats: int) -> None:
    """Generate `repeats` answers for each schema at temperature 1 and check them with an independent validator."""
    asked = [(name, repeat) for repeat in range(repeats) for name in SCHEMAS]
    params = [
        SamplingParams(
            max_tokens=MAX_TOKENS,
            seed=1000 * repeat + i,
            structured_outputs=StructuredOutputsParams(json=SCHEMAS[name]),
        )
        for i, (name, repeat) in enumerate(asked)
    ]
    outputs = llm.generate([PROMPTS[i % len(PROMPTS)] for i in range(len(asked))], params, use_tqdm=False)
    for (name, _), output in zip(asked, outputs, strict=True):
        answer = output.outputs[0]
        assert answer.finish_reason == "stop", f"{name}: {answer.text[:200]!r} … did not end"
        conforms(answer.text, SCHEMAS[name])


@pytest.mark.parametrize("model", MODELS)
def test_every_answer_parses_and_validates(engines: dict[str, Client], model: str) -> None:
    generate_all(engines[model], 1)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("model", MODELS)
def test_500_answers_parse_and_validate(engines: dict[str, Client], model: str) -> None:
    generate_all(engines[model], -(-500 // len(SCHEMAS)))


def test_the_budget_of_a_thought_that_the_model_opens_ends_it_at_a_whole_character(tiny: LLM) -> None:
    """Each token is a byte, so that most budgets are used up amid a character."""
    schema: Schema = {"type": "object", "properties": {"a": {"enum": [1, 23]}}, "required": ["a"]}
    constraint = StructuredOutputsParams(json=schema, thought=("<think>", "</think>"))
    brace, first, *_ = tiny.get_tokenizer().encode("{日", add_special_tokens=False)
    budgets = range(12)
    params = [
        SamplingParams(
            max_tokens=MAX_TOKENS,
            seed=budget,
            structured_outputs=constraint,
            thinking_token_budget=budget,
            logit_bias={brace: -100.0, first: 100.0},  # so that a thought comes first, with long characters
        )
        for budget in budgets
    ]
    outputs = tiny.generate([PROMPTS[0]] * len(budgets), params, use_tqdm=False)
    num_late = 0
    for budget, output in zip(budgets, outputs, strict=True):
        opening, _, rest = output.outputs[0].text.partition("<think>")
        thought, closing, answer = rest.partition("</think>")
        assert not opening.strip() and closing, output.outputs[0].text
        conforms(answer, schema)
        num_bytes = len(thought.encode())
        assert "\N{REPLACEMENT CHARACTER}" not in thought and num_bytes < budget + MAX_BYTES
        num_late += num_bytes > budget
    assert num_late > 4


@pytest.mark.parametrize("model", ["demo", pytest.param("random", marks=pytest.mark.nightly)])
def test_jump_forward_tokens_change_no_answer(engines: dict[str, Client], model: str) -> None:
    """With logprobs every token is drawn; without them the tokens that a schema forces are not."""
    jumping = [
        SamplingParams(
            max_tokens=(40, 300)[i % 2],
            temperature=i % 3,
            seed=i,
            structured_outputs=StructuredOutputsParams(json=schema),
            stop=["e"] if i % 5 == 4 else None,
            repetition_penalty=1.0 + i % 4 / 10,
        )
        for i, schema in enumerate(SCHEMAS.values())
    ]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(jumping))]
    jumped = engines[model].generate(prompts, jumping, use_tqdm=False)
    drawn = engines[model].generate(prompts, [each.replace(logprobs=0) for each in jumping], use_tqdm=False)
    for mine, other in zip(jumped, drawn, strict=True):
        expected, found = other.outputs[0], mine.outputs[0]
        assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
        assert (found.finish_reason, found.stop_reason) == (expected.finish_reason, expected.stop_reason)


@pytest.mark.parametrize("steps_in_flight", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_no_schedule_changes_a_structured_answer(tiny: LLM, tmp_path: Path, steps_in_flight: int) -> None:
    """One step in flight, chunks and preemptions give the tokens of the plain run."""
    folder = tiny_checkpoint(tmp_path / "random", max_position_embeddings=2048)
    names = ["order", "all kinds", "list by recursion", "tool call", "array of arrays"] * 2
    params = [
        SamplingParams(max_tokens=400, seed=i, structured_outputs=StructuredOutputsParams(json=SCHEMAS[name]))
        for i, name in enumerate(names)
    ]
    prompts = [PROMPTS[i % len(PROMPTS)] * 3 for i in range(len(names))]
    plain = tiny.generate(prompts, params, use_tqdm=False)
    options = {"num_kv_blocks": 3 + 512 // 8, "block_size": 8, "max_num_batched_tokens": 24, "max_num_seqs": 16}
    options |= {"steps_in_flight": steps_in_flight, "max_model_len": 512, "num_threads": 1}
    with LLM(folder, in_process=True, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in outputs] == [each.outputs[0].token_ids for each in plain]
    assert max(each.metrics.num_preemptions if each.metrics else 0 for each in outputs) > 0


# ── bad grammars ─────────────────────────────────────────────────────────────────────────────────────────────────────


def refuse_all(engine: LaunchedEngine, llm: Client, grammars: list[StructuredOutputsParams]) -> int:
    """Submit grammars among valid requests, which must succeed; return the number of refused grammars."""
    good = SamplingParams(max_tokens=300, seed=7, structured_outputs=StructuredOutputsParams(json=SCHEMAS["person"]))
    plain = SamplingParams(max_tokens=20, seed=7)
    expected = [llm.generate(PROMPTS[0], each, use_tqdm=False)[0].outputs[0].token_ids for each in (good, plain)]
    workers = lasting_processes(engine)
    assert len(workers) >= 3, "frontend, core and worker"
    num_refused = 0
    for start in range(0, len(grammars), 50):
        bad: list[Future[RequestOutput]] = [
            llm.submit(PROMPTS[1], SamplingParams(max_tokens=4, structured_outputs=each))
            for each in grammars[start : start + 50]
        ]
        others = [llm.submit(PROMPTS[0], each) for each in (good, plain)]
        assert [each.result(120).outputs[0].token_ids for each in others] == expected
        for future in bad:
            error = future.exception(120)
            assert error is None or isinstance(error, RequestError), error
            num_refused += error is not None
    assert lasting_processes(engine) == workers, "a process was replaced"
    return num_refused


def lasting_processes(engine: LaunchedEngine) -> set[int]:
    """Return the pids of the engine, the prover apart, which an extreme grammar may kill."""
    lines = {each.pid: " ".join(each.cmdline()) for each in engine.processes()}
    return {pid for pid, line in lines.items() if "tokenloom" in line and "prover" not in line}


def test_malformed_grammars_fail_only_their_own_requests(engine: LaunchedEngine, demo: Client) -> None:
    grammars = malformed_grammars(120, seed=0)
    assert refuse_all(engine, demo, grammars) > 100


def test_deep_grammars_fail_only_their_own_requests(engine: LaunchedEngine, demo: Client) -> None:
    assert refuse_all(engine, demo, list(deep_grammars())) >= 8


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_2000_malformed_grammars_fail_only_their_own_requests(engine: LaunchedEngine, demo: Client) -> None:
    assert refuse_all(engine, demo, malformed_grammars(2200, seed=1)) > 2000
