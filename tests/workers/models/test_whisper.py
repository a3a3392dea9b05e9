"""Given the rows of Whisper's encoder, logits of our decoder equal those of transformers, under any schedule: chunks
that end within the clip, steps of clips alone, rows in any mixture."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.messages.workers import NewRow, RowSampling
from tokenloom.ipc.spec.models.model_config import CrossConfig
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.kernels.select import Ops, select_ops
from tokenloom.tests.support.family_checkpoints import reference_model
from tokenloom.tests.support.today import some_pairs
from tokenloom.tests.support.whisper_checkpoints import START_ID, whisper_checkpoint
from tokenloom.tests.workers.models.test_decoder import schedule
from tokenloom.tests.workers.threaded_group import run_ranks
from tokenloom.workers.features.media.clip_inputs import ClipInputs
from tokenloom.workers.features.media.clip_rows import ClipRows
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.models.decoder import DecoderModel
from tokenloom.workers.models.load import load_model
from tokenloom.workers.step.input_batch import InputBatch
from tokenloom.workers.step.model_step import Model, compute, decoder_of

TOLERANCE = 1e-5  # of the largest logit
BLOCK_SIZE, NUM_BLOCKS, CPU = 8, 129, torch.device("cpu")
LENGTHS = {"a": 31, "b": 1, "c": 12, "d": 2, "e": 20}  # decoder tokens of each request


@dataclass
class Clip:
    """A request's decoder tokens, and the encoder rows of its clip."""

    tokens: list[int]
    rows: Tensor  # [num_rows, hidden_size]


def clips_of(folder: Path, lengths: dict[str, int]) -> dict[str, Clip]:
    config, draw = load_model_config(folder), random.Random(0)
    assert config.cross is not None
    generator = torch.Generator().manual_seed(0)
    return {
        name: Clip(
            [START_ID, *(draw.randrange(config.vocab_size) for _ in range(length - 1))],
            torch.randn(config.cross.num_rows, config.hidden_size, generator=generator),
        )
        for name, length in lengths.items()
    }


@torch.inference_mode()
def reference_logits(folder: Path, clips: dict[str, Clip]) -> dict[str, Tensor]:
    model: Any = reference_model(folder)
    return {
        name: model(
            decoder_input_ids=torch.tensor([clip.tokens]),
            encoder_outputs=BaseModelOutput(last_hidden_state=clip.rows[None]),
        ).logits[0]
        for name, clip in clips.items()
    }


class ClipRun:
    """Computes requests with clips by InputBatch and ClipRows. Stale blocks of the cache hold large numbers."""

    def __init__(
        self,
        model: Model,
        cross: CrossConfig,
        clips: dict[str, Clip],
        seed: int = 0,
        stored: torch.dtype | None = None,
    ) -> None:
        """stored: dtype of a cache of bytes."""
        self.model, self.cross, self.clips = model, cross.in_blocks(BLOCK_SIZE), clips
        self.batch = InputBatch(len(clips), 128, BLOCK_SIZE, [NUM_BLOCKS])
        self.rows = ClipRows(len(clips), self.cross, BLOCK_SIZE)
        given = [clip.rows for clip in clips.values()]
        padding, dtype = torch.zeros_like(given[0][:1]), stored or given[0].dtype
        self.inputs = ClipInputs(self.rows, lambda entry, first, n: given[entry - 1][first : first + n], padding)
        (spec,) = model.kv_cache_specs(BLOCK_SIZE, dtype)
        self.kv_cache = torch.full(spec.shape(NUM_BLOCKS), 100, dtype=dtype)
        self.row_of = {name: row for row, name in enumerate(clips)}
        free = list(range(1, NUM_BLOCKS))
        random.Random(seed).shuffle(free)
        for name, clip in clips.items():
            row, count = self.row_of[name], self.cross.num_tokens + len(clip.tokens)
            self.admit(name)
            self.rows.bind(np.array([[row, 0, 1 + row]], np.int32))
            blocks = [free.pop() for _ in range(-(-count // BLOCK_SIZE))]
            self.batch.append_blocks(np.array([[row, 0, block] for block in blocks], np.int32))

    def admit(self, name: str) -> None:
        ids = [START_ID] * self.cross.num_tokens + self.clips[name].tokens
        new_row = NewRow(
            row=self.row_of[name],
            token_ids=encode_ids(ids),
            num_prompt_tokens=len(ids),
            num_computed_tokens=0,
            sampling=RowSampling(),
            spans=encode_ids((0, self.cross.num_tokens, 1, 1, 1)),
        )
        self.batch.admit(new_row)
        self.rows.admit(new_row)

    @torch.inference_mode()
    def step(self, counts: dict[str, int]) -> dict[str, Tensor]:
        """Compute the next tokens of each request; return the logits of its decoder tokens: [n, vocab] (rank 0)."""
        layout = self.batch.layout(encode_ids(map(self.row_of.get, counts)), encode_ids(counts.values()))  # type: ignore[arg-type]
        inputs = self.inputs.prepare(self.batch.prepare(layout))
        hidden, _ = compute(self.model, inputs, [self.kv_cache])
        logits = self.model.compute_logits(hidden)
        self.batch.advance(layout)
        inputs = decoder_of(inputs)
        names, starts = list(self.row_of), inputs.query_starts
        return {names[row]: logits[starts[i] : starts[i + 1]].clone() for i, row in enumerate(inputs.rows.tolist())}

    def run(self, steps: list[dict[str, int]]) -> dict[str, Tensor]:
        logits: dict[str, list[Tensor]] = {name: [] for name in self.clips}
        for step in steps:
            for name, part in self.step(step).items():
                logits[name].append(part)
        return {name: torch.cat(parts) for name, parts in logits.items()}


def load_decoder(
    folder: Path,
    ops: Ops,
    group: ParallelGroup | None = None,
    block_size: int = BLOCK_SIZE,
    dtype: torch.dtype = torch.float32,
) -> DecoderModel:
    config = load_model_config(folder)
    assert config.cross is not None
    config = replace(config, cross=config.cross.in_blocks(block_size))
    return load_model(folder, config, 128, dtype, CPU, ops, group or ParallelGroup())


def check(folder: Path, ops: Ops, seed: int, group: ParallelGroup | None = None) -> None:
    config, clips = load_model_config(folder), clips_of(folder, LENGTHS)
    assert config.cross is not None
    run = ClipRun(load_decoder(folder, ops, group), config.cross, clips)
    lengths = {name: run.cross.num_tokens + length for name, length in LENGTHS.items()}
    actual = run.run(schedule(lengths, seed))
    if group is not None and group.rank:
        return
    for name, expected in reference_logits(folder, clips).items():
        tolerance = TOLERANCE * expected.abs().max().item()
        torch.testing.assert_close(actual[name], expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(("num_rows", "seed"), some_pairs([37, 40, 32], range(3), every=3))
def test_logits_equal_transformers_under_any_schedule(num_rows: int, seed: int, tmp_path: Path) -> None:
    """Clips of whole blocks, and those that leave a block's end empty."""
    folder = whisper_checkpoint(tmp_path, max_source_positions=num_rows, seed=seed)
    check(folder, ReferenceOps(), seed)


@pytest.mark.parametrize("make", [ReferenceOps, lambda: select_ops(CPU, torch.float32)])
def test_two_ranks_compute_the_same(make: Any, tmp_path: Path) -> None:
    folder = whisper_checkpoint(tmp_path)
    run_ranks(2, lambda group: check(folder, make(), 5, group))


def test_a_row_has_the_same_bits_with_any_neighbours_and_chunks(tmp_path: Path) -> None:
    folder = whisper_checkpoint(tmp_path)
    config, clips = load_model_config(folder), clips_of(folder, LENGTHS)
    assert config.cross is not None
    ops = select_ops(CPU, torch.float32, is_batch_invariant=True)
    alone = ClipRun(load_decoder(folder, ops), config.cross, {"a": clips["a"]}, seed=1)
    together = ClipRun(load_decoder(folder, ops), config.cross, clips)
    lengths = {name: together.cross.num_tokens + length for name, length in LENGTHS.items()}
    one, other = alone.run([{"a": lengths["a"]}]), together.run(schedule(lengths, 6))
    assert torch.equal(one["a"], other["a"])


def test_the_content_of_a_clips_blocks_depends_on_the_clip_alone(tmp_path: Path) -> None:
    """Even behind its last row, so that places outside the pool can keep them by their keys."""
    folder = whisper_checkpoint(tmp_path, max_source_positions=33)
    config, clips = load_model_config(folder), clips_of(folder, {"a": 3})
    assert config.cross is not None
    contents = []
    for stale in (2.0, 3.0):
        run = ClipRun(load_decoder(folder, ReferenceOps()), config.cross, clips)
        run.kv_cache.fill_(stale)
        run.step({"a": run.cross.num_tokens + 1})
        layout = run.batch.layout(encode_ids([0]), encode_ids([1]))
        tables = run.rows.split(run.batch.prepare(layout)).clip_tables
        assert tables.size * BLOCK_SIZE == run.cross.num_tokens > run.cross.num_rows
        contents.append(run.kv_cache[torch.from_numpy(tables[0].astype(np.int64))])
    assert torch.equal(*contents)


def test_a_row_without_a_clip_or_with_nothing_else_is_refused(tmp_path: Path) -> None:
    rows = ClipRows(4, CrossConfig(num_rows=5, num_tokens=8), 4)
    row = NewRow(
        row=0, token_ids=encode_ids([1] * 9), num_prompt_tokens=9, num_computed_tokens=0, sampling=RowSampling()
    )
    for spans, count in ((b"", 9), (encode_ids((0, 8, 1, 1, 1)), 8), (encode_ids((1, 8, 1, 1, 1)), 12)):
        with pytest.raises(ProtocolError, match="must begin with a clip of 8 tokens"):
            rows.admit(replace(row, spans=spans, token_ids=encode_ids([1] * count)))
