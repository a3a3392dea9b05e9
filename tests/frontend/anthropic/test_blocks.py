"""The blocks of a message do not depend on how the text is split into deltas, and its events build them."""

from __future__ import annotations

import json
from typing import Any

import jiter
import pytest
from hypothesis import given

from tokenloom.frontend.forms.anthropic.blocks import SIGNATURE, BlockWriter, Event, partial_object
from tokenloom.tests.frontend.forms.parsers.cuts import ANSWER_TEXTS, ANSWERS, CALL, PLACES, cut, read_deltas


def written(pieces: list[str], **changes: Any) -> tuple[BlockWriter, list[Event]]:
    """Return the writer after an answer and its events, for one delta per piece of text."""
    writer, events = BlockWriter(), list[Event]()
    for parts in read_deltas(pieces, **changes):
        events += writer.write(parts)
    return writer, [*events, *writer.close()]


def assembled(events: list[Event]) -> list[dict[str, Any]]:
    """Build blocks from events as Anthropic's client does."""
    blocks: list[dict[str, Any]] = []
    torn = ""
    for kind, fields in events:
        event: Any = fields
        assert event["index"] == len(blocks) - (kind != "content_block_start"), "at most one block is open"
        if kind == "content_block_start":
            blocks.append(dict(event["content_block"]))
            torn = ""
        elif kind == "content_block_delta":
            delta, block = event["delta"], blocks[-1]
            if delta["type"] == "input_json_delta":
                torn += delta["partial_json"]
                block["input"] = jiter.from_json(torn.encode(), partial_mode=True) if torn else {}
            else:
                field = delta["type"].removesuffix("_delta")
                block[field] += delta[field]
    return blocks


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for block in blocks:
        assert block["type"] != "tool_use" or block["id"].startswith("toolu_")
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


@given(ANSWERS, PLACES)
def test_events_build_the_same_blocks_for_any_deltas(answer: str, places: list[int]) -> None:
    whole, _ = written([answer])
    writer, events = written(cut(answer, places))
    assert assembled(events) == writer.blocks
    assert without_ids(writer.blocks) == without_ids(whole.blocks)
    assert writer.has_calls == whole.has_calls


def test_thoughts_texts_and_calls_are_blocks_in_order() -> None:
    writer, events = written([ANSWER_TEXTS[3]])
    assert without_ids(writer.blocks) == [
        {"type": "thinking", "thinking": "why", "signature": SIGNATURE},
        {"type": "text", "text": "I look. "},
        {"type": "tool_use", "name": "f", "input": {"a": [1, {"b": "x"}]}},
        {"type": "tool_use", "name": "f", "input": {"a": [1, {"b": "x"}]}},
    ]
    assert writer.has_calls
    kinds = [str(fields["delta"]["type"]) for kind, fields in events if kind == "content_block_delta"]  # type: ignore[index]
    assert kinds == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta", "input_json_delta"]


def test_an_incomplete_call_does_not_count_as_a_call() -> None:
    writer, _ = written([CALL[:56]])
    assert without_ids(writer.blocks) == [{"type": "tool_use", "name": "f", "input": {"a": [1, {}]}}]
    assert not writer.has_calls


@pytest.mark.parametrize("value", [{}, {"a": 12, "b": [True, None, -1.5e3]}, {"a": {"b": [{"c": 'x, "{[y'}], "d": ""}}])
def test_incomplete_objects_read_as_in_anthropics_client(value: object) -> None:
    text = json.dumps(value)
    for end in range(1, len(text) + 1):
        assert partial_object(text[:end]) == jiter.from_json(text[:end].encode(), partial_mode=True), text[:end]


@pytest.mark.parametrize(
    "text", ["", "[1]", '"x"', "nonsense, {[", '{"a": nonsense, "b": 1}', "[" * 100_000, '{"a":"\\']
)
def test_text_other_than_an_object_reads_as_an_empty_object(text: str) -> None:
    assert partial_object(text) == {}
