"""Every sampling parameter through a whole engine: logprobs are transformers', and no schedule changes an answer."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest

from tokenloom import LLM, AsyncLLM, RequestError, RequestOutput, SamplingParams, StructuredOutputsParams
from tokenloom.frontend.logprobs import Logprob, TokenLogprobs
from tokenloom.ipc.sampling_params import OutputKind, child_seed
from tokenloom.tests.checkpoints import tiny_checkpoint
from tokenloom.tests.sampling_reference import Wanted, scores

from .logprob_oracle import LogprobOracle, check_token

VOCAB_SIZE = 300  # most ids are bytes, so that answers have text
MAX_TOKENS = 24
NEAR_TIE = 1e-4

BASE: dict[str, object] = {"in_process": True, "num_threads": 1, "max_model_len": 400, "block_size": 8}
SCHEDULES: dict[str, dict[str, object]] = {
    "preempted": {"num_kv_blocks": 34, "max_num_seqs": 16, "max_num_batched_tokens": 128, "max_model_len": 160},
    "chunked": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
    "prefix hit": {},
    "overlapped": {"steps_in_flight": 2, "enable_prefix_caching": False, "max_num_seqs": 6},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "llama", vocab_size=VOCAB_SIZE, num_hidden_layers=2)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> LogprobOracle:
    return LogprobOracle(folder)


def open_llm(folder: Path, **options: object) -> LLM:
    return LLM(folder, **(BASE | options))  # type: ignore[arg-type]


def make_prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    stem = [rng.randrange(256) for _ in range(40)]
    return [stem[: rng.randrange(41)] + [rng.randrange(256) for _ in range(rng.randrange(1, 40))] for _ in range(count)]


# ── logprobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("schedule", ["plain", *SCHEDULES])
def test_logprobs_of_prompts_and_answers_are_those_of_transformers(
    schedule: str, folder: Path, oracle: LogprobOracle
) -> None:
    prompts = make_prompts(12, 1)
    params = [
        SamplingParams(
            temperature=i % 2 * 4, seed=i, max_tokens=16, ignore_eos=True, logprobs=i % 7, prompt_logprobs=i % 5
        )
        for i in range(12)
    ]
    with open_llm(folder, **SCHEDULES.get(schedule, {})) as llm:
        if schedule == "prefix hit":
            llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    if schedule == "preempted":
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for output, wanted in zip(outputs, params, strict=True):
        check_output(oracle, output, wanted.logprobs or 0, wanted.prompt_logprobs or 0)


def check_output(oracle: LogprobOracle, output: RequestOutput, num_top: int, num_prompt_top: int) -> None:
    prompt, answer = output.prompt_token_ids, output.outputs[0]
    expected = oracle.logprobs([*prompt, *answer.token_ids])
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
    for i, (token_id, found) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        check_token(expected[len(prompt) + i - 1], token_id, found, num_top)
    own = [found[token_id].logprob for token_id, found in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(own), abs=1e-6)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    for i, told in enumerate(output.prompt_logprobs[1:], 1):
        assert told is not None
        check_token(expected[i - 1], prompt[i], told, num_prompt_top)


def replace(found: TokenLogprobs, token_id: int, **changes: object) -> TokenLogprobs:
    old = found[token_id]
    values = {"logprob": old.logprob, "rank": old.rank, "decoded_token": old.decoded_token} | changes
    return found | {token_id: Logprob(**values)}  # type: ignore[arg-type]


def swap(found: TokenLogprobs) -> TokenLogprobs:
    first, second, third, *rest = found.items()
    return dict([first, third, second, *rest])


MUTATIONS: dict[str, Callable[[TokenLogprobs, list[int]], TokenLogprobs]] = {
    "a wrong rank": lambda found, ids: replace(found, ids[0], rank=found[ids[0]].rank + 1),
    "a wrong rank of another": lambda found, ids: replace(found, ids[2], rank=found[ids[2]].rank + 1),
    "a swapped pair": lambda found, ids: swap(found),
    "a NaN": lambda found, ids: replace(found, ids[1], logprob=float("nan")),
    "a logprob off by 0.001": lambda found, ids: replace(found, ids[0], logprob=found[ids[0]].logprob + 1e-3),
    "another token": lambda found, ids: {299 - each: logprob for each, logprob in found.items()},
    "one too few": lambda found, ids: {each: found[each] for each in ids[:-2]},
    "the likeliest left out": lambda found, ids: {
        each: Logprob(found[each].logprob, found[each].rank - (each != ids[0])) for each in ids if each != ids[1]
    },
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_checker_sees(mutation: str, folder: Path, oracle: LogprobOracle) -> None:
    prompt = make_prompts(1, 3)[0]
    params = SamplingParams(temperature=5.0, seed=4, max_tokens=30, ignore_eos=True, logprobs=5)
    with open_llm(folder) as llm:
        answer = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
    expected = oracle.logprobs([*prompt, *answer.token_ids])
    assert answer.logprobs is not None
    num_checked = 0
    for i, (token_id, found) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        row = expected[len(prompt) + i - 1]
        check_token(row, token_id, found, 5)
        if len(found) == 6:  # the token is not among the likeliest
            num_checked += 1
            with pytest.raises(AssertionError):
                check_token(row, token_id, MUTATIONS[mutation](found, list(found)), 5)
    assert num_checked > 3


@pytest.mark.parametrize("num_tokens", [1500, pytest.param(8190, marks=pytest.mark.slow)])
def test_logprobs_of_a_long_prompt_take_bounded_memory(num_tokens: int, tmp_path: Path) -> None:
    """All logits at once would take 600 KB per token. The engine's processes are measured at their peaks."""
    folder = tiny_checkpoint(tmp_path / "m", "llama", vocab_size=151_936, max_position_embeddings=8192)
    prompt = random.Random(1).choices(range(151_936), k=num_tokens)
    options: dict[str, object] = {"max_model_len": 8192, "enable_prefix_caching": False, "num_kv_blocks": 1100}
    with LLM(folder, num_threads=1, max_num_batched_tokens=2048, block_size=8, **options) as llm:  # type: ignore[arg-type]
        processes = psutil.Process().children(recursive=True)
        assert len(processes) >= 4, "supervisor, frontend, core and worker"
        for _ in range(2):
            llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
        before = reset_peaks(processes)
        output = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=20), use_tqdm=False)[0]
        added = sum(peak_bytes(process) for process in processes) - before
    assert len(output.prompt_logprobs or ()) == num_tokens
    assert added < 256 << 20, f"{added >> 20} MiB more at the peak"


def reset_peaks(processes: Sequence[psutil.Process]) -> int:
    """Bytes that the processes hold now, from which their peaks are counted anew."""
    for process in processes:
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")
    return sum(peak_bytes(process) for process in processes)


def peak_bytes(process: psutil.Process) -> int:
    (line,) = [line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "VmHWM" in line]
    return int(line.split()[1]) << 10


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_request_whose_rules_leave_no_token_ends_with_an_error_that_says_so(
    steps_in_flight: int, folder: Path
) -> None:
    prompts, calm = make_prompts(3, 5), SamplingParams(seed=1, max_tokens=12, ignore_eos=True)
    barred = [  # at once, and after the first token
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


# ── every combination under every schedule ───────────────────────────────────────────────────────────────────────────

SCHEMA = {
    "type": "object",
    "properties": {"key": {"type": "string", "pattern": "^[a-zB%]{2,9}$"}, "number": {"type": "integer"}},
    "required": ["key", "number"],
    "additionalProperties": False,
}
FEATURES: dict[str, dict[str, object]] = {
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "bad_words": {"bad_words": ["a", "th", "\u00e9", "B"], "logit_bias": {65: 2.0}},
    "n=3": {"n": 3},
    "stop strings": {"stop": ["q", "%", "zz"], "min_tokens": 3},
    "schema": {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
}
ALL_COMBINATIONS = [
    [name for bit, name in enumerate(FEATURES) if number >> bit & 1] for number in range(1 << len(FEATURES))
]


def pairwise(combinations: list[list[str]]) -> list[list[str]]:
    """Few of these in which any two features are both there, both missing, and each alone."""
    pairs = {
        (first, second, has_first, has_second)
        for first, second in itertools.combinations(FEATURES, 2)
        for has_first, has_second in itertools.product((False, True), repeat=2)
    }

    def shown(names: list[str]) -> set[tuple[str, str, bool, bool]]:
        return {pair for pair in pairs if (pair[0] in names, pair[1] in names) == pair[2:]}

    chosen: list[list[str]] = []
    while pairs:
        chosen.append(max(combinations, key=lambda names: len(shown(names))))
        pairs -= shown(chosen[-1])
    return chosen


PAIRWISE = pairwise(ALL_COMBINATIONS)
COMBINATIONS = [
    pytest.param(names, marks=() if names in PAIRWISE else pytest.mark.slow, id=" ".join(names) or "plain")
    for names in ALL_COMBINATIONS
]


def make_params(names: Sequence[str], count: int) -> list[SamplingParams]:
    fields = {key: value for name in names for key, value in FEATURES[name].items()}
    return [
        SamplingParams(temperature=(0.0, 2.5, 5.0)[i % 3], top_p=0.95, seed=i, max_tokens=MAX_TOKENS, **fields)  # type: ignore[arg-type]
        for i in range(count)
    ]


@pytest.mark.parametrize("names", COMBINATIONS)
def test_no_schedule_changes_an_answer(names: list[str], folder: Path, oracle: LogprobOracle) -> None:
    prompts, params = make_prompts(12, len(names)), make_params(names, 12)
    with open_llm(folder, steps_in_flight=1, enable_prefix_caching=False) as llm:
        plain = [llm.generate([each], one, use_tqdm=False)[0] for each, one in zip(prompts, params, strict=True)]
    assert all(len(output.outputs) == one.n for output, one in zip(plain, params, strict=True))
    num_excuses = num_tokens = 0
    for schedule, options in SCHEDULES.items():
        with open_llm(folder, **options) as llm:
            if schedule == "prefix hit":
                llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
            outputs = llm.generate(prompts, params, use_tqdm=False)
        if schedule == "preempted":
            assert sum(output.metrics.num_preemptions for output in outputs) > 0
        if schedule == "prefix hit" and "logprobs" not in names:
            assert sum(output.num_cached_tokens > 0 for output in outputs) > 6
        for expected, found, one in zip(plain, outputs, params, strict=True):
            num_excuses += compare(oracle, expected, found, one)
            num_tokens += sum(len(answer.token_ids) for answer in found.outputs)
    assert num_excuses <= max(1, num_tokens // 1000)


def compare(oracle: LogprobOracle, expected: RequestOutput, found: RequestOutput, params: SamplingParams) -> int:
    """AssertionError unless both are the same up to near ties; returns how many of those there were."""
    num_excuses = 0
    assert found.finished and found.prompt_token_ids == expected.prompt_token_ids
    for mine, other in zip(expected.outputs, found.outputs, strict=True):
        if mine.token_ids != other.token_ids:
            check_near_tie(oracle, expected, mine.token_ids, other.token_ids, params, mine.index)
            num_excuses += 1
            continue
        assert (mine.index, mine.text, mine.finish_reason, mine.stop_reason) == (
            other.index,
            other.text,
            other.finish_reason,
            other.stop_reason,
        )
        check_same_logprobs(mine.logprobs, other.logprobs)
    check_same_logprobs((expected.prompt_logprobs or [None])[1:], (found.prompt_logprobs or [None])[1:])
    return num_excuses


def check_same_logprobs(mine: Sequence[object] | None, other: Sequence[object] | None) -> None:
    assert (mine is None) == (other is None) and len(mine or ()) == len(other or ())
    for expected, found in zip(mine or (), other or (), strict=True):
        assert isinstance(expected, dict) and isinstance(found, dict)
        assert [each.logprob for each in found.values()] == pytest.approx(
            [each.logprob for each in expected.values()], abs=NEAR_TIE
        )
        assert next(iter(found)) == next(iter(expected)), "the token itself comes first"


def check_near_tie(
    oracle: LogprobOracle,
    output: RequestOutput,
    mine: list[int],
    other: list[int],
    params: SamplingParams,
    index: int,
) -> None:
    """The first difference is a draw whose two scores are closer than NEAR_TIE."""
    i = next(i for i, (first, second) in enumerate(zip(mine, other, strict=False)) if first != second)
    prompt = output.prompt_token_ids
    logits = oracle.logprobs([*prompt, *mine[:i]])[-1].numpy()
    wanted = Wanted(
        temperature=params.temperature,
        top_p=1.0 if params.structured_outputs else params.top_p,  # of what the mask leaves, which is not known here
        seed=child_seed(params.seed or 0, index),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias or {},
    )
    found = scores(np.asarray(logits, np.float64), prompt, mine[:i], wanted)
    assert abs(found[mine[i]] - found[other[i]]) <= NEAR_TIE, f"token {i} is {other[i]}, alone it was {mine[i]}"


# ── n answers, kinds of output, prompts that are cut ─────────────────────────────────────────────────────────────────


def test_answer_i_of_n_is_the_answer_to_seed_plus_i(folder: Path) -> None:
    prompt = make_prompts(1, 8)[0]
    with open_llm(folder) as llm:
        together = llm.generate([prompt], SamplingParams(temperature=4.0, n=4, seed=11, max_tokens=12), use_tqdm=False)[
            0
        ]
        alone = llm.generate(
            [prompt] * 4,
            [SamplingParams(temperature=4.0, seed=11 + i, max_tokens=12) for i in range(4)],
            use_tqdm=False,
        )
    assert [answer.index for answer in together.outputs] == [0, 1, 2, 3]
    assert [answer.token_ids for answer in together.outputs] == [output.outputs[0].token_ids for output in alone]
    assert len({tuple(answer.token_ids) for answer in together.outputs}) == 4


def test_a_seeded_answer_is_the_same_alone_and_among_64(folder: Path) -> None:
    prompts = make_prompts(65, 9)
    params = [SamplingParams(temperature=4.0, seed=i, max_tokens=12, ignore_eos=True) for i in range(65)]
    with open_llm(folder, max_num_seqs=65) as llm:
        alone = llm.generate([prompts[7]], params[7], use_tqdm=False)[0].outputs[0].token_ids
        among = llm.generate(prompts, params, use_tqdm=False)[7].outputs[0].token_ids
        again = llm.generate([prompts[7]], params[7].replace(seed=8), use_tqdm=False)[0].outputs[0].token_ids
    assert alone == among != again


async def collect_all(
    folder: Path, prompt: list[int], params: SamplingParams, kinds: Sequence[OutputKind]
) -> list[list[RequestOutput]]:
    """The outputs of the same request for each kind."""
    outputs: list[list[RequestOutput]] = [[] for _ in kinds]
    async with AsyncLLM(folder, **BASE) as llm:  # type: ignore[arg-type]
        for kind, collected in zip(kinds, outputs, strict=True):
            async for output in llm.generate(prompt, params.replace(output_kind=kind)):
                collected.append(output)
    return outputs


def test_output_kinds_say_the_same_in_their_ways(folder: Path) -> None:
    prompt = make_prompts(1, 10)[0]
    params = SamplingParams(seed=3, n=2, max_tokens=10, ignore_eos=True, logprobs=1)
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
def test_a_prompt_is_cut_to_its_last_tokens(asked: int, kept: int, folder: Path) -> None:
    prompt = list(range(60))
    with open_llm(folder) as llm:
        output = llm.generate([prompt], SamplingParams(max_tokens=4, truncate_prompt_tokens=asked), use_tqdm=False)[0]
        assert output.prompt_token_ids == prompt[-kept:]
        longer = list(range(200)) * 3
        cut = llm.generate([longer], SamplingParams(max_tokens=30, truncate_prompt_tokens=-1), use_tqdm=False)[0]
        assert len(cut.prompt_token_ids) == 370 and len(cut.outputs[0].token_ids) <= 30


def double_odd(prompt_ids: Sequence[int], output_ids: Sequence[int], logits: object) -> object:
    """An operator's processor: only tokens of the other parity than the prompt's length come."""
    logits[len(prompt_ids) % 2 :: 2] = -1e9  # type: ignore[index]
    return logits


def test_a_processor_runs_only_where_the_operator_allows_it(folder: Path) -> None:
    path = "tokenloom.tests.system.test_sampling:double_odd"
    params = SamplingParams(max_tokens=10, logits_processors=[path])
    with open_llm(folder, allowed_logits_processors=path) as llm:
        output = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0]
        assert {token % 2 for token in output.outputs[0].token_ids} == {0}
    with open_llm(folder) as llm, pytest.raises(RequestError, match="--allowed-logits-processors"):
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


def test_each_parameter_changes_the_answer(folder: Path) -> None:
    prompt = make_prompts(1, 12)[0]
    base = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with open_llm(folder) as llm:
        plain = llm.generate([prompt], base, use_tqdm=False)[0].outputs[0]
        for name, fields in CHANGING.items():
            answer = llm.generate([prompt], base.replace(**fields), use_tqdm=False)[0].outputs[0]
            assert answer.token_ids != plain.token_ids, name
        only_a = base.replace(allowed_token_ids=[97, 98, 99])
        texts = [
            llm.generate([prompt], only_a.replace(**fields), use_tqdm=False)[0].outputs[0].text
            for fields in ({}, {"bad_words": ["a"]}, {"bad_words": ["a", "b"]}, {"bad_words": ["a", "bb"]})
        ]
        with pytest.raises(RequestError, match="no token may come next"):  # nothing is left after "c"
            llm.generate([prompt], only_a.replace(bad_words=["a", "b", "cc"]), use_tqdm=False)
        seen = llm.generate([prompt], base.replace(stop_token_ids=[plain.token_ids[0]]), use_tqdm=False)[0].outputs[0]
        later = base.replace(stop_token_ids=[plain.token_ids[0]], min_tokens=5)
        late = llm.generate([prompt], later, use_tqdm=False)[0].outputs[0]
    assert texts[2] == "c" * 12 and "a" not in texts[1]
    assert texts[1] == "b" * 12 and "a" not in texts[3] and "bb" not in texts[3]
    assert len(seen.token_ids) == 1 and plain.token_ids[0] not in late.token_ids[:5] and len(late.token_ids) >= 5


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
def test_what_this_model_cannot_serve_is_refused_with_the_numbers(
    fields: dict[str, object], message: str, folder: Path
) -> None:
    with open_llm(folder) as llm, pytest.raises(RequestError, match=message):
        llm.generate([[1, 2, 3]], SamplingParams(**fields), use_tqdm=False)  # type: ignore[arg-type]
