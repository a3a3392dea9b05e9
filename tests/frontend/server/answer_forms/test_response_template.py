"""A checkpoint's response template becomes a form of literal texts, or names the other reader, or is refused."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenloom.frontend.forms.answer_forms.form import AnswerForm, CallForm
from tokenloom.frontend.server.answer_forms.response_template import form_of, form_of_checkpoint
from tokenloom.frontend.server.text.tokenizer import read_tokenizer_config

FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
THINK = {"open": "<think>", "close": "</think>", "content": "text"}
PARAMETERS = r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"


def template(calls: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    if calls is not None:
        fields["tool_calls"] = {"repeats": True} | calls
    return {"version": 1, "start_anchor": "<|assistant|>", "fields": fields}


def call_form(calls: dict[str, Any]) -> CallForm:
    form = form_of(template(calls))
    assert form.reader == "machine"
    (call,) = form.calls
    return call


def test_json_between_literals_is_an_object() -> None:
    whole = {"type": "function", "function": "{content}"}
    given = {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "content": "json", "transform": whole}
    assert call_form(given) == CallForm(
        kind="object",
        start="<tool_call>",
        next="</tool_call>\n<tool_call>",
        end="</tool_call>",
        name_path=("name",),
        arguments_path=("arguments",),
    )


def test_placeholders_are_paths_into_the_object() -> None:
    function = {"name": "{content.tool.name}", "arguments": "{content.parameters}"}
    transform = {"type": "function", "id": "{content.id}", "function": function}
    call = call_form({"open": ["<call>"], "close": "</call>", "content": "json", "transform": transform})
    assert (call.name_path, call.arguments_path, call.id_path) == (("tool", "name"), ("parameters",), ("id",))


def test_json_without_a_transform_is_a_call_as_in_a_message() -> None:
    call = call_form({"open": "<call>", "close": "</call>", "content": "json"})
    assert (call.name_path, call.arguments_path) == (("function", "name"), ("function", "arguments"))


def test_each_entry_of_a_list_is_a_call() -> None:
    transform = {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}}
    given = {"open": "<|ACT|>", "close": "<|/ACT|>", "content": "json", "transform": transform, "transform_each": True}
    call = call_form(given)
    assert (call.start, call.next, call.end) == ("<|ACT|>[", ", ", "]<|/ACT|>")
    assert (call.name_path, call.arguments_path) == (("tool_name",), ("parameters",))


def test_name_in_the_opening_text_stands_before_json() -> None:
    given = {"open_pattern": r"\[TOOL_CALLS\](?P<name>\w+)\[ARGS\]", "content": "json", "transform": FUNCTION}
    assert call_form(given) == CallForm(kind="json", start="[TOOL_CALLS]", next="\n[TOOL_CALLS]", end="", mid="[ARGS]")


def test_inline_tags_are_tagged_arguments() -> None:
    given = {
        "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "content": "xml-inline",
        "content_args": {"tag_pattern": PARAMETERS},
        "transform": FUNCTION,
    }
    assert call_form(given) == CallForm(
        kind="tagged",
        start="<tool_call>\n<function=",
        next="\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=",
        end="\n</parameter>\n</function>\n</tool_call>",
        first=">\n<parameter=",
        mid=">\n",
        pair="\n</parameter>\n<parameter=",
        empty_next=">\n</function>\n</tool_call>\n<tool_call>\n<function=",
        empty_end=">\n</function>\n</tool_call>",
    )


def test_json_with_bare_keys_and_other_quotes_is_literal() -> None:
    given = {
        "open_pattern": r"<\|call>call:(?P<name>\w+)",
        "close": "<call|>",
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        "transform": FUNCTION,
    }
    assert call_form(given) == CallForm(
        kind="literal",
        start="<|call>call:",
        next="<call|>\n<|call>call:",
        end="<call|>",
        mid="{",
        pair=",",
        assign=":",
        close="}",
        quote='<|"|>',
    )


def test_thought_and_content_have_their_literals() -> None:
    form = form_of(template(reasoning=THINK, content={"open": "<say>", "close": ["</say>", "<eos>"]}))
    assert form == AnswerForm(name="response_template", thought=("<think>", "</think>"), content_open="<say>")


@pytest.mark.parametrize(
    "calls",
    [
        {
            "open_pattern": r"<(?:tool|fn) name=(?P<name>\w+)>",
            "close": "</tool>",
            "content": "json",
            "transform": FUNCTION,
        },
        {"open_pattern": r"<a+>(?P<name>\w+)", "close": "</a>", "content": "json", "transform": FUNCTION},
        {"open": ["<a>", "<b>"], "close": "</a>", "content": "json"},
        {"open_pattern": r"<(?P<name>\w+)>", "close": "</>", "content": "kv-lines", "transform": FUNCTION},
        {"open_pattern": r"<(?P<tool>\w+)>", "close": "</>", "content": "json", "transform": FUNCTION},
        {"open": "<a>", "close": "</a>", "content": "json", "content_args": {"allow_non_json": True}},
        {
            "open": "<a>",
            "close": "</a>",
            "content": "json",
            "transform": {"function": {"name": "f", "arguments": "{content}"}},
        },
    ],
)
def test_other_parts_are_left_to_the_other_reader(calls: dict[str, Any]) -> None:
    given = template(calls, thinking=THINK)
    form = form_of(given)
    assert (form.reader, form.calls, form.thought) == ("response_template", (), ("<think>", "</think>"))
    assert json.loads(form.response_template) == given


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("text", "it is no object"),
        (template(content={}) | {"version": 2}, "only version 1 is known, this is 2"),
        (template(), "it has no fields"),
        (template(plan={"open": "<plan>"}), "'plan' has no place in an answer"),
        (template(content={"until": "<eos>"}), "'content' has parts"),
        (template(thinking=THINK, reasoning=THINK), "thinking and reasoning are one field"),
        (template(content={"content": "int"}), "the field content is text here: 'int' is not"),
        (template({"close": "</a>", "content": "json"}), "nothing opens the field tool_calls"),
        (
            template({"open": "<a>", "content": "xml-inline", "content_args": {"tag_pattern": r"<(?P<key>\w+)>.*"}}),
            "xml-inline is read only where its tags are literal texts",
        ),
    ],
)
def test_refusals_name_the_reason(given: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        form_of(given)


def write_config(folder: Path, **fields: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "X"} | fields))


def test_form_is_read_from_the_files_of_a_checkpoint(tmp_path: Path) -> None:
    write_config(tmp_path, response_template=template(thinking=THINK))
    form = form_of_checkpoint(read_tokenizer_config(tmp_path))
    assert form == AnswerForm(name="response_template", thought=("<think>", "</think>"))


def test_checkpoint_without_one_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_config(tmp_path)
    with caplog.at_level(logging.INFO):
        assert form_of_checkpoint(read_tokenizer_config(tmp_path)) is None
    assert not caplog.records


def test_response_schema_is_named_as_unread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_config(tmp_path, response_schema={"type": "object"})
    with caplog.at_level(logging.INFO):
        assert form_of_checkpoint(read_tokenizer_config(tmp_path)) is None
    (record,) = caplog.records
    assert "response_schema in tokenizer_config.json is not read" in record.getMessage()


UNNAMED = {"open_pattern": r"<(?P<name>\w+)>", "close": "</>", "content": "text"}  # a group that nothing uses


@pytest.mark.parametrize(
    ("given", "reason"), [({"version": 7}, "this is 7"), (template(UNNAMED), "declares named group(s) ['name']")]
)
def test_bad_template_of_a_checkpoint_is_a_warning(
    given: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_config(tmp_path, response_template=given)
    assert form_of_checkpoint(read_tokenizer_config(tmp_path)) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and reason in record.getMessage()


def test_transformers_is_imported_by_its_own_reader_alone() -> None:
    code = (
        "import sys\n"
        "from tokenloom.frontend.server.answer_forms.response_template import form_of_checkpoint\n"
        "given = {'version': 1, 'fields': {'reasoning': {'open': '<a>', 'close': '</a>'}}}\n"
        "print(form_of_checkpoint({'response_template': given}).thought, 'transformers' in sys.modules)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert shown == "('<a>', '</a>') False\n"
