"""The rules of timestamps and suppressed tokens give the scores of transformers' processors, for any answer so far."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.spec.models.model_config import OutputRules
from tokenloom.tests.workers.random_schedule import new_row
from tokenloom.workers.sampling.logits_processors import LogitsProcessors, apply_processors

VOCAB_SIZE, END_ID, START_ID, NO_TIMESTAMPS_ID, FIRST_TIME = 90, 50, 51, 59, 60
RULES = OutputRules(
    suppressed_ids=[3, 7, START_ID],
    first_suppressed_ids=[11, END_ID],
    no_timestamps_id=NO_TIMESTAMPS_ID,
    max_first_timestamp=5,
    end_id=END_ID,
)
PROMPT = [START_ID, 52]


def theirs(prompt: list[int], outputs: list[int], logits: Tensor, rules: OutputRules) -> Tensor:
    """Transformers' scores of one row: [vocab]."""
    config: Any = GenerationConfig(eos_token_id=END_ID, bos_token_id=END_ID)
    config.no_timestamps_token_id = rules.no_timestamps_id
    config.max_initial_timestamp_index = rules.max_first_timestamp
    begin, ids = len(prompt), torch.tensor([[*prompt, *outputs]])
    scores = SuppressTokensAtBeginLogitsProcessor(rules.first_suppressed_ids, begin)(ids, logits[None])
    scores = SuppressTokensLogitsProcessor(rules.suppressed_ids)(ids, scores)
    if rules.no_timestamps_id is not None and rules.no_timestamps_id not in prompt:
        scores = WhisperTimeStampLogitsProcessor(config, begin)(ids, scores)
    return scores[0]


def random_outputs(rng: np.random.Generator) -> list[int]:
    """An answer that mostly follows the rules, with times that rise and others that do not."""
    outputs, time = list[int](), FIRST_TIME
    for _ in range(rng.integers(0, 12)):
        if rng.random() < 0.5:
            time = min(time + int(rng.integers(0, 4)), VOCAB_SIZE - 1)
            outputs.append(time if rng.random() < 0.9 else int(rng.integers(FIRST_TIME, VOCAB_SIZE)))
        else:
            outputs.append(int(rng.integers(0, END_ID)))
    return outputs


@pytest.mark.parametrize("max_first", [5, 0, None, 100])
def test_scores_of_any_answer_are_those_of_transformers(max_first: int | None) -> None:
    """Rows with timestamps, without them, and of the next token of each answer, in one batch."""
    rng = np.random.default_rng(3)
    rules = OutputRules(
        **{name: getattr(RULES, name) for name in RULES.__struct_fields__} | {"max_first_timestamp": max_first}
    )
    num_forced = 0
    for _ in range(40):
        histories = [
            (PROMPT if rng.random() < 0.8 else [*PROMPT, NO_TIMESTAMPS_ID], random_outputs(rng)) for _ in range(8)
        ]
        processors = LogitsProcessors(VOCAB_SIZE, (), rules)
        for row, (prompt, outputs) in enumerate(histories):
            num_known = int(rng.integers(0, len(outputs) + 1))  # resumed with these
            processors.admit(new_row(row, [*prompt, *outputs[:num_known]], num_prompt=len(prompt)))
            for token_id in outputs[num_known:]:
                processors.append(np.array([row], np.int32), np.array([token_id]))
        logits = torch.from_numpy(rng.normal(0, 2, (8, VOCAB_SIZE)).astype(np.float32))
        logits[:, FIRST_TIME:] += float(rng.choice([-6.0, -1.0, 2.0]))
        expected = torch.stack([theirs(*history, row, rules) for history, row in zip(histories, logits, strict=True)])
        found = logits.clone()
        apply_processors(found, processors.of(np.arange(8, dtype=np.int32)))
        assert torch.equal(found, expected)
        num_forced += int((found[:, :FIRST_TIME].isneginf().all(dim=1)).sum())
    assert 20 < num_forced < 320, "the sum over times decides sometimes"


def test_a_row_with_allowed_tokens_needs_no_time() -> None:
    """So that one token may name the language of a clip."""
    processors = LogitsProcessors(VOCAB_SIZE, (), RULES)
    row = new_row(0, PROMPT)
    sampling = msgspec.structs.replace(row.sampling, allowed_token_ids=encode_ids([53, 54]))
    processors.admit(msgspec.structs.replace(row, sampling=sampling))
    logits = torch.zeros(1, VOCAB_SIZE)
    apply_processors(logits, processors.of(np.array([0], np.int32)))
    assert logits[0].isfinite().nonzero().flatten().tolist() == [53, 54]


def test_an_answer_without_rules_keeps_its_logits() -> None:
    processors = LogitsProcessors(VOCAB_SIZE)
    processors.admit(new_row(0, PROMPT))
    assert not processors.of(np.array([0], np.int32))
