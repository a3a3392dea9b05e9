"""Each parameter changes tokens exactly as a plain numpy reference does, under any schedule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tokenloom.ipc.errors import ConfigError, ProtocolError
from tokenloom.ipc.messages.workers import RowSampling
from tokenloom.tests.support.sampling_reference import F64, Wanted, processed, scores
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.history_model import VOCAB_SIZE, logits_after
from tokenloom.tests.workers.random_schedule import (
    RandomSchedule,
    Request,
    execute,
    frame,
    message,
    new_row,
    new_runner,
)
from tokenloom.workers.sampling.logits_processors import apply_processors, load_processors
from tokenloom.workers.sampling.row_processors import RowProcessors, TokenCounts


def prefer_new(prompt_ids: Sequence[int], output_ids: Sequence[int], logits: Tensor) -> Tensor:
    """An operator's processor: one above the last output, and one above the last prompt token, become likelier."""
    boosted = logits.clone()
    boosted[((output_ids[-1] if output_ids else 0) + 1) % len(logits)] += 3.0
    boosted[(prompt_ids[-1] + 1) % len(logits)] += 2.0
    return boosted


def prefer_new_in_numpy(prompt: Sequence[int], outputs: Sequence[int], logits: F64) -> F64:
    return prefer_new(prompt, outputs, torch.from_numpy(logits)).numpy()


ODD = list(range(1, VOCAB_SIZE, 2))
PAIRS = [[a, b] for a in range(VOCAB_SIZE) for b in (a, (7 * a + 1) % VOCAB_SIZE, (5 * a + 9) % VOCAB_SIZE)]

CASES: dict[str, dict[str, object]] = {
    "presence_penalty": {"presence_penalty": 1.7},
    "negative presence_penalty": {"presence_penalty": -1.5},
    "frequency_penalty": {"frequency_penalty": 0.9},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "repetition_penalty below 1": {"repetition_penalty": 0.6},
    "all penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "logit_bias": {"logit_bias": {3: 4.0, 17: -100.0, 200: 2.5}},
    "allowed_token_ids": {"allowed_token_ids": ODD},
    "bad_words": {"bad_words": [[5], [11], *PAIRS[:200], [1, 2, 3]]},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": list(range(150))},
    "logits_processors": {"processor": prefer_new_in_numpy},
    "everything": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.3,
        "logit_bias": {3: 4.0, 200: 2.5},
        "allowed_token_ids": [*ODD, 200],
        "bad_words": [[5], *PAIRS],
        "min_tokens": 4,
        "stop_token_ids": [200],
        "processor": prefer_new_in_numpy,
    },
}


def to_row(wanted: Wanted) -> RowSampling:
    return RowSampling(
        temperature=wanted.temperature,
        top_k=wanted.top_k,
        top_p=wanted.top_p,
        min_p=wanted.min_p,
        seed=wanted.seed,
        presence_penalty=wanted.presence_penalty,
        frequency_penalty=wanted.frequency_penalty,
        repetition_penalty=wanted.repetition_penalty,
        bias_ids=frame(*wanted.logit_bias),
        bias_values=np.array(list(wanted.logit_bias.values()), np.float32).tobytes(),
        allowed_token_ids=frame(*wanted.allowed_token_ids),
        bad_words=[frame(*word) for word in wanted.bad_words],
        min_tokens=wanted.min_tokens,
        stop_token_ids=frame(*wanted.stop_token_ids),
        logits_processors=[0] if wanted.processor else [],
    )


class WantedSchedule(RandomSchedule):
    """Make a random schedule with `fields` in two of three requests, at different temperatures."""

    def __init__(self, seed: int, fields: dict[str, object]) -> None:
        self.fields = fields
        self.wanted: list[Wanted] = []
        super().__init__(seed)

    def _request(self) -> Request:
        request = super()._request()
        sampling = request.sampling
        base = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        fields = self.fields if len(self.wanted) % 3 else {}
        wanted = Wanted(**(base | {"seed": sampling.seed} | fields))  # type: ignore[arg-type]
        self.wanted.append(wanted)
        return Request(request.prompt, to_row(wanted), min(request.limit, 16))


def serve(schedule: RandomSchedule) -> list[list[int]]:
    schedule.run(new_runner(processors=[prefer_new]))
    return [request.outputs for request in schedule.requests]


def reference(prompt: list[int], wanted: Wanted, count: int) -> list[int]:
    outputs: list[int] = []
    for _ in range(count):
        logits = logits_after([*prompt, *outputs])[0].numpy().astype(np.float64)
        outputs.append(int(scores(logits, prompt, outputs, wanted).argmax()))
    return outputs


@pytest.mark.parametrize("name", some(list(CASES), 2))
def test_tokens_equal_the_reference_and_differ_from_unprocessed_ones(name: str) -> None:
    schedule = WantedSchedule(len(name), CASES[name])
    outputs = serve(schedule)
    for request, wanted in zip(schedule.requests, schedule.wanted, strict=True):
        assert request.outputs == reference(request.prompt, wanted, request.limit)
    assert outputs != serve(WantedSchedule(len(name), {})), "the parameter changes nothing"


@pytest.mark.parametrize("name", CASES)
def test_every_logit_equals_the_reference(name: str) -> None:
    rng = np.random.default_rng(len(name))
    wanted = Wanted(**CASES[name])  # type: ignore[arg-type]
    logits = rng.normal(0, 3, (6, VOCAB_SIZE)).astype(np.float32)
    ends = [[], [1, 2], [9, 2], [2], [7, 50], [1, 2, 1, 2]]  # the last output tokens, for bad words
    histories = [(rng.integers(0, 30, 9).tolist(), [*rng.integers(0, 30, len(end)).tolist(), *end]) for end in ends]
    rules = {
        i: RowProcessors(new_row(i, [*prompt, *outputs], 0, to_row(wanted), len(prompt)), [prefer_new], VOCAB_SIZE)
        for i, (prompt, outputs) in enumerate(histories)
        if i != 4
    }
    found = torch.from_numpy(logits.copy())
    apply_processors(found, rules)
    for i, (prompt, outputs) in enumerate(histories):
        expected = logits[i] if i == 4 else processed(logits[i].astype(np.float64), prompt, outputs, wanted)
        assert np.allclose(found[i].numpy(), expected, atol=1e-5)


def test_counts_follow_the_output_and_grow() -> None:
    rng = np.random.default_rng(0)
    prompt, outputs = rng.integers(0, 300, 50).astype(np.int32), rng.integers(0, 300, 400).astype(np.int32)
    grown = TokenCounts(prompt, outputs[:3])
    for token_id in outputs[3:].tolist():
        grown.append(token_id)
    found = dict(zip(grown.token_ids.tolist(), grown.counts.tolist(), strict=True))
    whole = TokenCounts(prompt, outputs)
    assert found == dict(zip(whole.token_ids.tolist(), whole.counts.tolist(), strict=True))
    assert found == {each: outputs.tolist().count(each) for each in {*prompt.tolist(), *outputs.tolist()}}


@pytest.mark.parametrize(
    ("sampling", "what"),
    [
        (RowSampling(allowed_token_ids=frame(VOCAB_SIZE)), "name the tokens"),
        (RowSampling(bad_words=[frame(3, -1)]), "name the tokens"),
        (RowSampling(bias_ids=frame(3)), "1 bias ids, 0 values"),
    ],
)
def test_a_row_with_invalid_parameters_is_refused(sampling: RowSampling, what: str) -> None:
    with pytest.raises(ProtocolError, match=what):
        execute(new_runner(), message(new_rows=[new_row(0, [1], 0, sampling)]))


@pytest.mark.parametrize("path", ["no_such_module:function", "math:nothing", "math:pi", "math"])
def test_a_processor_that_cannot_be_loaded_is_a_config_error_with_its_path(path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        load_processors(path)


def test_a_processor_that_takes_extra_args_gets_those_of_its_request() -> None:
    def only(
        prompt_ids: Sequence[int], output_ids: Sequence[int], logits: Tensor, extra_args: dict[str, int]
    ) -> Tensor:
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor([extra_args.get("only", 3)]), 0.0)

    def nothing(prompt_ids: Sequence[int], output_ids: Sequence[int], logits: Tensor, **others: object) -> Tensor:
        assert not others
        return logits

    runner = new_runner(processors=[only, nothing])
    rows = [
        new_row(row, [1], 0, RowSampling(temperature=0.0, logits_processors=[0, 1], extra_args=extra_args))
        for row, extra_args in enumerate([{"only": 17, "other": None}, {}, {"only": 40}])
    ]
    appends = [value for row in range(3) for value in (row, 0, row + 1)]
    sampled = execute(runner, message([0, 1, 2], [1, 1, 1], new_rows=rows, appends=appends))
    assert sampled.token_ids == [17, 3, 40]


def test_processors_are_loaded_in_the_operators_order() -> None:
    assert [each.__name__ for each in load_processors("math:sqrt, math:floor")] == ["sqrt", "floor"]
