"""No schedule changes an answer under an adapter: all equal peft's, in a batch that mixes adapters and the base."""

from __future__ import annotations

import pytest

from tokenloom import RequestOutput, SamplingParams
from tokenloom.tests.support.today import some
from tokenloom.tests.system.adapter_engine import (
    BLOCK_SIZE,
    Models,
    Requests,
    check_strength,
    lora,
    make_models,
    make_requests,
    open_llm,
)

pytest.importorskip("peft")

WINDOWED = "gemma3_text"  # in two KV groups
UNTIED = {"tie_word_embeddings": False}  # else this family repeats its input
SCHEDULES: dict[str, dict[str, object]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
    "preempted": {"num_kv_blocks": 24, "max_num_seqs": 16, "max_num_batched_tokens": 128, "max_loras": 3},
    "two steps in flight": {"steps_in_flight": 2, "enable_prefix_caching": False, "max_num_seqs": 6, "max_loras": 3},
    "two slots": {"max_loras": 2, "max_num_seqs": 8},
    "one slot": {"max_loras": 1, "max_num_batched_tokens": 64},
    "plain torch": {"enforce_reference": True, "max_loras": 4},
    "two ranks": {"in_process": False, "tensor_parallel_size": 2, "max_loras": 3, "max_num_batched_tokens": 64},
}
USUAL = ("plain", "chunked", "preempted", "two steps in flight", "two slots")
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", WINDOWED)
CASES = [
    *some([("llama", schedule) for schedule in USUAL], num_today=2),
    *some([(WINDOWED, schedule) for schedule in USUAL], num_today=1),
    *(
        pytest.param(family, schedule, marks=pytest.mark.nightly)
        for family in FAMILIES
        for schedule in SCHEDULES
        if family not in ("llama", WINDOWED) or schedule not in USUAL
        if family != "llama" or schedule != "two ranks"  # it has three heads here
    ),
]
NUM_REQUESTS = 14  # each of six adapters and the base twice


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Models]:
    """Return the models that the tests have made so far, by family."""
    return {}


def models_of(family: str, models: dict[str, Models], tmp_path_factory: pytest.TempPathFactory) -> Models:
    if family not in models:
        fields = UNTIED if family == WINDOWED else {}
        models[family] = make_models(tmp_path_factory.mktemp(family), family, **fields)
    return models[family]


@pytest.mark.parametrize(("family", "schedule"), CASES)
def test_no_schedule_changes_an_answer_under_an_adapter(
    family: str, schedule: str, models: dict[str, Models], tmp_path_factory: pytest.TempPathFactory
) -> None:
    own = models_of(family, models, tmp_path_factory)
    requests = make_requests(own.names, NUM_REQUESTS, seed=3)
    with open_llm(own, **SCHEDULES[schedule]) as llm:
        outputs = requests.run(llm)
        if schedule == "plain":
            check_strength(llm, own.names)
    requests.check(own.oracle, outputs)
    if schedule == "preempted":
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    check_seeded(own, requests, outputs)


def check_seeded(models: Models, requests: Requests, outputs: list[RequestOutput]) -> None:
    """Check that the seeded answers are those of requests that run alone."""
    with open_llm(models, steps_in_flight=1, enable_prefix_caching=False) as llm:
        for adapter, output, params in zip(requests.adapters, outputs, requests.params, strict=True):
            if params.temperature:
                (alone,) = llm.generate([output.prompt_token_ids], params, use_tqdm=False, lora_request=lora(adapter))
                assert [each.token_ids for each in alone.outputs] == [each.token_ids for each in output.outputs]


@pytest.mark.parametrize("family", ["llama", WINDOWED])
def test_prefix_hits_are_those_of_the_same_content(
    family: str, models: dict[str, Models], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The key of a block names the content of its adapter: neither another adapter's blocks are used, nor those of an
    adapter that had the name before; and the blocks are found again when the name gets its first content back."""
    own = models_of(family, models, tmp_path_factory)
    prompt, params = list(range(100, 141)), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    num_readable = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    with open_llm(own, lora_modules=[f"{name}={own.adapters[name]}" for name in ("a0", "a1")], max_loras=2) as llm:

        def ask(name: str, content: str) -> int:
            (output,) = llm.generate([prompt], params, use_tqdm=False, lora_request=lora(name))
            own.oracle.check(content, output, params)
            return output.num_cached_tokens

        cold = [ask(name, name) for name in ("", "a0", "a1")]
        warm = [ask(name, name) for name in ("a1", "", "a0")]
        llm.load_adapter("a0", own.adapters["a2"], load_inplace=True)
        changed = [ask("a0", "a2"), ask("a0", "a2"), ask("a1", "a1")]
        llm.load_adapter("a0", own.adapters["a0"], load_inplace=True)
        back = [ask("a0", "a0"), ask("a1", "a1"), ask("", "")]
    assert cold == [0, 0, 0]
    assert warm == [num_readable] * 3
    assert changed == [0, num_readable, num_readable]
    assert back == [num_readable] * 3
