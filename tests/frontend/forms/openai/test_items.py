"""Output items do not depend on how the text is split into deltas, and their events build them."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given

from tokenloom.frontend.forms.openai.items import Event, ItemWriter
from tokenloom.frontend.forms.parsers.parts import Arguments, CallBegin, CallEnd, Content
from tokenloom.tests.frontend.forms.parsers.cuts import ANSWER_TEXTS, ANSWERS, PLACES, cut, read_deltas


def written(pieces: list[str]) -> tuple[list[Any], list[Event]]:
    """Return the items of an answer and their events, for one delta per piece of text."""
    writer, events = ItemWriter("x"), list[Event]()
    for parts in read_deltas(pieces):
        events += writer.write(parts)
    events += writer.finish(is_whole=True)
    return writer.items, events


@example(ANSWER_TEXTS[2], [25])
@given(ANSWERS, PLACES)
def test_items_do_not_depend_on_the_deltas(answer: str, places: list[int]) -> None:
    items, events = written(cut(answer, places))
    assert items == written([answer])[0]
    text_by_item: dict[object, str] = {}
    for _, fields in events:
        if "delta" in fields:
            text_by_item[fields["item_id"]] = text_by_item.get(fields["item_id"], "") + str(fields["delta"])
    shown = {item["id"]: item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in items}
    assert text_by_item == shown


def test_leading_white_space_belongs_to_the_message() -> None:
    (item,), _ = written(["<think></think>", " ", " said"])
    assert item["content"][0]["text"] == "  said"


def test_white_space_alone_is_no_message() -> None:
    assert written([" ", "\n"])[0] == []


def test_logprobs_of_tokens_without_text_come_before_the_end_of_their_message() -> None:
    said, last = {"token": "Hi"}, {"token": "<|end|>"}
    for turns in ([[said, last]], [[said], [last]]):
        writer, events = ItemWriter("x"), list[Event]()
        for number, logprobs in enumerate(turns):
            events += writer.write([Content("Hi")] if number == 0 else [], logprobs)
        events += writer.finish(is_whole=True)
        deltas: list[Any] = [fields["logprobs"] for kind, fields in events if kind.endswith(".delta")]
        assert [each for delta in deltas for each in delta] == writer.items[0]["content"][0]["logprobs"] == [said, last]


def test_a_call_of_a_tool_in_a_namespace_names_both() -> None:
    writer = ItemWriter("x", {"mcp__shop__find": {"name": "find", "namespace": "mcp__shop"}})
    parts = [CallBegin("mcp__shop__find"), Arguments("{}"), CallEnd(""), CallBegin("now"), CallEnd("")]
    events = [*writer.write(parts), *writer.finish(is_whole=True)]
    assert [(item["name"], item.get("namespace")) for item in writer.items] == [("find", "mcp__shop"), ("now", None)]
    assert [item["status"] for item in writer.items] == ["completed", "incomplete"], "the second has no arguments"
    added: list[Any] = [fields["item"] for kind, fields in events if kind == "response.output_item.added"]
    assert [(item["name"], item.get("namespace")) for item in added] == [("find", "mcp__shop"), ("now", None)]


def test_a_call_keeps_the_id_that_the_model_wrote() -> None:
    writer = ItemWriter("x")
    parts = [
        CallBegin("f", "functions.f:0"),
        Arguments("{}"),
        CallEnd(""),
        CallBegin("f"),
        Arguments("{}"),
        CallEnd(""),
    ]
    assert [*writer.write(parts), *writer.finish(is_whole=True)]
    assert [(item["id"], item["call_id"]) for item in writer.items] == [
        ("fc_x0", "functions.f:0"),
        ("fc_x1", "call_x1"),
    ]
