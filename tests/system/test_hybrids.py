"""An engine with layers that keep a state: no schedule, prefix, number of answers or draft changes a token or a bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenloom import LLM, RequestOutput, SamplingParams
from tokenloom.tests.support.recurrent_families import HYBRIDS, recurrent_checkpoint
from tokenloom.tests.support.today import some
from tokenloom.tests.system import recorded_drafts
from tokenloom.tests.system.oracle import GreedyOracle
from tokenloom.tests.system.test_parity import SCHEDULES, check_all, make_prompts, serve_staggered
from tokenloom.tests.system.test_speculation import num_drafts

MAX_MODEL_LEN, LONGEST, NUM_ANSWERED, VOCAB_SIZE = 120, 100, 12, 271
PAIRS = [(family, schedule) for family in HYBRIDS for schedule in SCHEDULES]
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_ANSWERED, ignore_eos=True)
CYCLE = [5, 9, 200, 31, 7, 44, 18]


def open_llm(folder: Path, **options: object) -> LLM:
    given = {"in_process": True, "num_threads": 1, "block_size": 8, "max_model_len": MAX_MODEL_LEN, **options}
    return LLM(folder, **given)  # type: ignore[arg-type]


def prompts_of(longest: int) -> list[list[int]]:
    return [[token_id % VOCAB_SIZE for token_id in prompt] for prompt in make_prompts(16, longest, seed=5)]


@pytest.mark.parametrize(("family", "schedule"), some(PAIRS, num_today=5))
def test_greedy_answers_equal_transformers_under_every_schedule(family: str, schedule: str, tmp_path: Path) -> None:
    folder = recurrent_checkpoint(tmp_path, family, seed=3)
    options = dict(SCHEDULES[schedule])
    longest, num_answered = LONGEST, NUM_ANSWERED
    if schedule == "preempted":  # answers that fill blocks
        longest, num_answered = 12, 100
        options["num_kv_blocks"] = 100  # of keys and values, in bytes: 16 answers need twice as many
    prompts = prompts_of(longest)
    with open_llm(folder, **options) as llm:
        if schedule == "preempted":
            params = GREEDY.replace(max_tokens=num_answered)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert sum(output.metrics.num_preemptions for output in outputs) > 0
        else:
            outputs = serve_staggered(llm, prompts, num_answered)
    check_all(GreedyOracle(folder), prompts, outputs, num_answered)


@pytest.mark.parametrize("family", some(["qwen3_5", "lfm2", "bamba"], num_today=1))
def test_a_found_state_changes_no_bit(family: str, tmp_path: Path) -> None:
    """A second turn begins with the first turn's prompt and answer, and its state is that after their last whole
    block."""
    folder, prompt = recurrent_checkpoint(tmp_path, family, seed=3), CYCLE * 7
    params = GREEDY.replace(logprobs=5)
    with open_llm(folder, deterministic=True) as llm:
        (first,) = llm.generate([prompt], params, use_tqdm=False)
        turn = [*prompt, *first.outputs[0].token_ids, 3, 8, 21]
        (second,) = llm.generate([turn], params, use_tqdm=False)
    with open_llm(folder, deterministic=True, enable_prefix_caching=False) as llm:
        (cold,) = llm.generate([turn], params, use_tqdm=False)
    assert second.num_cached_tokens == (len(prompt) + NUM_ANSWERED - 1) // 8 * 8
    assert not cold.num_cached_tokens
    assert logprobs_of(second) == logprobs_of(cold)


def logprobs_of(output: RequestOutput) -> list[dict[int, float]]:
    found = output.outputs[0].logprobs
    assert found is not None
    return [{token_id: each.logprob for token_id, each in position.items()} for position in found]


@pytest.mark.parametrize("family", some(["qwen3_next", "lfm2", "nemotron_h"], num_today=1))
def test_answers_of_one_request_share_the_state_of_its_prompt(family: str, tmp_path: Path) -> None:
    folder, prompt = recurrent_checkpoint(tmp_path, family, seed=3), CYCLE * 7
    with open_llm(folder) as llm:
        (output,) = llm.generate([prompt], GREEDY.replace(n=4), use_tqdm=False)
    oracle = GreedyOracle(folder)
    for answer in output.outputs:
        oracle.check(prompt, answer.token_ids)


@pytest.mark.parametrize("family", some(["qwen3_5", "lfm2", "falcon_h1"], num_today=1))
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_drafts_change_no_token(steps_in_flight: int, family: str, tmp_path: Path) -> None:
    """Four of five drafts are right."""
    folder = recurrent_checkpoint(tmp_path / "model", family, seed=3)
    prompts, params = prompts_of(30)[:6], GREEDY.replace(max_tokens=60)
    with open_llm(folder, speculation="off") as llm:
        answers = llm.generate(prompts, params, use_tqdm=False)
    recorded_drafts.record(tmp_path / "record", "mixed", VOCAB_SIZE, answers, [params] * len(prompts))
    with open_llm(folder, speculation="lookup", steps_in_flight=steps_in_flight) as llm:
        recorded_drafts.use(llm, tmp_path / "record")
        outputs = llm.generate(prompts, params, use_tqdm=False)
    drafted, accepted = num_drafts(outputs)
    assert drafted > accepted > 50
    check_all(GreedyOracle(folder), prompts, outputs, 60)


@pytest.mark.parametrize("family", some(["qwen3_5", "lfm2"], num_today=1))
def test_greedy_answers_equal_transformers_in_all_processes_and_ranks(family: str, tmp_path: Path) -> None:
    folder = recurrent_checkpoint(tmp_path, family, seed=3)
    prompts = prompts_of(LONGEST)
    options = {"device": "cpu", "tensor_parallel_size": 2, "max_num_batched_tokens": 64, "max_num_seqs": 16}
    with LLM(folder, block_size=8, max_model_len=MAX_MODEL_LEN, **options) as llm:  # type: ignore[arg-type]
        outputs = serve_staggered(llm, prompts, NUM_ANSWERED)
    check_all(GreedyOracle(folder), prompts, outputs, NUM_ANSWERED)
