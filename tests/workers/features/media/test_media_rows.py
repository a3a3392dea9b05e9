"""Spans of rows become the placeholders, positions and masks of a plain model of the prompt, under any schedule."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.messages.workers import NewRow, RowSampling
from tokenloom.ipc.spec.models.vision_config import VisionConfig, VisionFamily
from tokenloom.workers.features.media.media_rows import MediaPlan, MediaRows
from tokenloom.workers.step.input_batch import InputBatch
from tokenloom.workers.step.step_inputs import StepInputs

IMAGE_ID, MARKER_ID, MERGE = 7, 8, 2
MAX_ROWS, MAX_LEN, BLOCK_SIZE = 4, 400, 4


def vision(family: VisionFamily) -> VisionConfig:
    return VisionConfig(
        family=family,
        image_token_id=IMAGE_ID,
        hidden_size=8,
        num_layers=2,
        patch_size=2,
        merge_size=MERGE,
        is_bidirectional=family == "gemma3",
    )


@dataclass
class Prompt:
    """A prompt made of parts: a number is so much text, a pair an image of rows × columns merged patches."""

    parts: list[int | tuple[int, int]]
    has_markers: bool = False  # between the rows of an image
    token_ids: list[int] = field(default_factory=list)
    spans: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    places: dict[int, tuple[int, int]] = field(default_factory=dict)  # index -> span, embedding
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    see_until: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        position = 0
        for part in self.parts:
            start = len(self.token_ids)
            if isinstance(part, int):
                self.token_ids += [1] * part
                self.see_until += range(start, start + part)
                self.positions += [(position + i,) * 3 for i in range(part)]
                position += part
                continue
            rows, columns = part
            for row in range(rows):
                for column in range(columns):
                    self.places[len(self.token_ids)] = (len(self.spans), row * columns + column)
                    self.token_ids.append(IMAGE_ID)
                    self.positions.append((position, position + row, position + column))
                if self.has_markers and row < rows - 1:
                    self.token_ids.append(MARKER_ID)
                    self.positions.append((0, 0, 0))
            position += max(rows, columns)
            end = len(self.token_ids)
            self.see_until += [end - 1] * (end - start)
            self.spans.append((start, end - start, 1, rows * MERGE, columns * MERGE))

    def new_row(self, row: int, num_computed: int = 0) -> NewRow:
        return NewRow(
            row=row,
            token_ids=np.array(self.token_ids, np.int32).tobytes(),
            num_prompt_tokens=len(self.token_ids),
            num_computed_tokens=num_computed,
            sampling=RowSampling(),
            spans=np.array(self.spans, np.int32).tobytes(),
        )


IMAGES = st.tuples(st.integers(1, 5), st.integers(1, 5))
PROMPTS = st.lists(st.one_of(st.integers(1, 6), IMAGES), min_size=1, max_size=7).map(lambda parts: [*parts, 1])


class Rows:
    """Rows of prompts in an InputBatch and in MediaRows; entry 10 × row + span + 1 for each span."""

    def __init__(self, prompts: list[Prompt], computed: list[int], family: VisionFamily, has_axes: bool) -> None:
        self.prompts, self.computed = prompts, list(computed)
        self.media = MediaRows(MAX_ROWS, vision(family), MERGE if has_axes else None)
        self.batch = InputBatch(MAX_ROWS, MAX_LEN, BLOCK_SIZE, [1 + MAX_ROWS * MAX_LEN // BLOCK_SIZE])
        blocks = MAX_LEN // BLOCK_SIZE
        for row, prompt in enumerate(prompts):
            self.batch.admit(prompt.new_row(row, computed[row]))
            self.media.admit(prompt.new_row(row, computed[row]))
            ids = 1 + row * blocks + np.arange(blocks)
            self.batch.append_blocks(np.stack((np.full(blocks, row), np.zeros(blocks), ids), 1).astype(np.int32))
            bindings = [(row, span, 10 * row + span + 1) for span in range(len(prompt.spans))]
            self.media.bind(np.array(bindings, np.int32).reshape(-1, 3))

    def step(self, counts: dict[int, int]) -> tuple[StepInputs, MediaPlan | None]:
        frames = [np.array(list(each), np.int32).tobytes() for each in (counts, counts.values())]
        layout = self.batch.layout(*frames)
        inputs = self.batch.prepare(layout)
        plan = self.media.plan(inputs)
        self.batch.advance(layout)
        for row, count in counts.items():
            self.computed[row] += count
        return inputs, plan


def check(prompts: list[Prompt], inputs: StepInputs, plan: MediaPlan | None, has_axes: bool, sees_ahead: bool) -> None:
    tokens, embeds, positions, see_until = list[int](), list[tuple[int, int]](), list[tuple[int, ...]](), list[int]()
    token = 0
    for i, row in enumerate(inputs.rows.tolist()):
        for _ in range(inputs.query_starts[i], inputs.query_starts[i + 1]):
            index = int(inputs.positions[token])
            positions.append(prompts[row].positions[index] if has_axes else (index,) * 3)
            see_until.append(prompts[row].see_until[index])
            if index in prompts[row].places:
                span, embed = prompts[row].places[index]
                tokens.append(token)
                embeds.append((10 * row + span + 1, embed))
            token += 1
    given = MediaPlan() if plan is None else plan
    ours = inputs.positions if given.positions is None else given.positions
    assert np.array_equal(np.broadcast_to(ours, (3, token)).T, positions)
    assert (given.tokens is None) == (not tokens)
    if tokens:
        assert given.tokens is not None
        assert given.tokens.tolist() == tokens
        pieces = [(piece.entry, piece.first + i) for piece in given.pieces for i in range(piece.num_embeds)]
        assert pieces == embeds
    assert (given.see_until is not None) == (sees_ahead and bool(tokens))
    if given.see_until is not None:
        assert given.see_until.tolist() == see_until


@settings(max_examples=30, deadline=None)
@given(st.lists(PROMPTS, min_size=1, max_size=3), st.sampled_from(["qwen2_vl", "pixtral", "gemma3"]), st.data())
def test_any_chunks_of_any_prompts_get_their_media(
    parts: list[list[int | tuple[int, int]]], family: VisionFamily, data: st.DataObject
) -> None:
    has_axes, has_markers = family == "qwen2_vl", family == "pixtral"
    prompts = [Prompt(each, has_markers) for each in parts]
    computed = [data.draw(st.integers(0, len(prompt.token_ids) - 1)) for prompt in prompts]
    rows = Rows(prompts, computed, family, has_axes)
    while left := [row for row in range(len(prompts)) if rows.computed[row] < len(prompts[row].token_ids)]:
        chosen = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        limits = {row: len(prompts[row].token_ids) - rows.computed[row] for row in chosen}
        counts = {row: data.draw(st.integers(1, limit)) for row, limit in limits.items()}
        inputs, plan = rows.step(counts)
        check(prompts, inputs, plan, has_axes, sees_ahead=family == "gemma3")


def test_generated_tokens_follow_the_last_position_of_the_prompt() -> None:
    prompt, text = Prompt([3, (4, 2), 2]), Prompt([5])
    rows = Rows([prompt, text], [0, 0], "qwen3_vl", True)
    rows.step({0: len(prompt.token_ids), 1: 5})
    last = prompt.positions[-1][0]
    for step in range(3):
        rows.batch.append_tokens(np.array([0, 1], np.int32), np.array([1, 1]))
        _, plan = rows.step({0: 1, 1: 1})
        assert plan is not None
        assert plan.is_behind_spans
        assert plan.positions is not None
        assert plan.positions.tolist() == [last + 1 + step, 5 + step]
    rows.media.free(np.array([0], np.int32))
    rows.batch.append_tokens(np.array([1], np.int32), np.array([1]))
    assert rows.step({1: 1})[1] is None
    assert not rows.media.shifts.any()


def test_rows_of_text_cost_no_plan() -> None:
    rows = Rows([Prompt([4, (2, 2), 3]), Prompt([9])], [0, 0], "llava", False)
    assert rows.step({1: 4})[1] is None
    assert rows.step({0: 8})[1] is not None
    assert rows.step({0: 2, 1: 1})[1] is None


def test_spans_that_do_not_fit_are_refused() -> None:
    media = MediaRows(MAX_ROWS, vision("qwen2_vl"), MERGE)
    prompt = Prompt([2, (2, 3), 1])
    for spans in ([1, 2, 3], [-1, 6, 1, 4, 6], [4, 6, 1, 4, 6], [2, 6, 1, 4, 8], [2, 4, 1, 4, 4, 5, 4, 1, 4, 4]):
        prompt.spans = [tuple(spans)]  # type: ignore[list-item]
        with pytest.raises(ProtocolError):
            media.admit(prompt.new_row(0))
    with pytest.raises(ProtocolError, match="no such span"):
        media.bind(np.array([[0, 0, 1]], np.int32))


def test_placeholders_without_an_entry_are_refused() -> None:
    rows = Rows([Prompt([2, (2, 2), 1])], [0], "llava", False)
    rows.media.clear()
    rows.media.admit(rows.prompts[0].new_row(0))
    with pytest.raises(ProtocolError, match="has no entry yet"):
        rows.step({0: 4})
