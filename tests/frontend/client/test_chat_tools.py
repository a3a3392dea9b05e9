"""Tools of a chat ask for the constraint and the prompt of the HTTP API, and answers with calls become messages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tokenloom.frontend.client.base_client import new_tools
from tokenloom.frontend.client.chat_tools import ChatTools
from tokenloom.frontend.client.outputs import OutputBuilder
from tokenloom.frontend.forms.answer_forms.named import named_form
from tokenloom.frontend.forms.call_options import chat_form
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.client import Accepted, AnswerFormIs, ChatMessage, Delta, Submit
from tokenloom.ipc.params.calls_constraint import CallsConstraint
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.ipc.params.structured_outputs import StructuredOutputsParams
from tokenloom.tests.frontend.forms.parsers.cuts import CALL

SCHEMA = {"type": "object", "properties": {"a": {"type": "array"}}}
TOOL: Any = {"type": "function", "function": {"name": "f", "description": "It.", "parameters": SCHEMA}}
STRICT: Any = {"type": "function", "function": TOOL["function"] | {"strict": True}}
FORM = AnswerFormIs(
    query_id=1, form=msgspec.to_builtins(named_form("hermes", "think")), call_token="<tool_call>", marker_ids=b"ids."
)
READ = [{"type": "function", "function": {"name": "f", "arguments": '{"a": [1, {"b": "x"}]}'}}]


def applied(tools: ChatTools, options: Any, params: SamplingParams | None = None, found: AnswerFormIs = FORM) -> Submit:
    chat = [ChatMessage("user", "x")]
    submit = Submit(request_id="r", params=params or SamplingParams(), chat=chat, chat_form=chat_form(options))
    return tools.apply(submit, found)


def submitted(**options: Any) -> tuple[ChatTools, Submit]:
    tools = new_tools(options)  # type: ignore[arg-type]
    assert tools is not None
    return tools, applied(tools, options)


def output_of(tools: ChatTools, submit: Submit, *pieces: str, begins_in_thought: bool = False) -> Any:
    builder = OutputBuilder(submit, tools)
    builder.add(
        Accepted(
            request_id="r", attempt=0, prompt_token_ids=b"", prompt="", seed=0, begins_in_thought=begins_in_thought
        )
    )
    for piece in pieces:
        builder.add(Delta(request_id="r", token_ids=encode_ids([1]), text=piece))
        assert builder.build().outputs[0].message is None
    builder.add(Delta(request_id="r", finish_reason="stop"))
    return builder.build().outputs[0]


def without_ids(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in call.items() if name != "id"} for call in calls]


def test_a_chat_without_tools_asks_nothing() -> None:
    assert new_tools({}) is None
    assert new_tools({"tools": [], "tool_choice": "auto"}) is None


def test_an_answer_has_its_calls_beside_the_text() -> None:
    tools, submit = submitted(tools=[TOOL])
    assert (submit.params.structured_outputs, submit.shown_token_ids) == (None, b"ids.")
    output = output_of(tools, submit, "<think>Hm.</think>I ", f"look. {CALL}")
    assert output.text == f"<think>Hm.</think>I look. {CALL}"
    assert without_ids(output.tool_calls) == READ
    message = {"role": "assistant", "content": "I look. ", "reasoning": "Hm.", "tool_calls": output.tool_calls}
    assert output.message == message
    only = output_of(tools, submit, "Hm.</think>", CALL, begins_in_thought=True).message
    assert (only["content"], only["reasoning"]) == (None, "Hm.")
    plain = output_of(tools, submit, "No.")
    assert (plain.message, plain.tool_calls) == ({"role": "assistant", "content": "No."}, [])


def test_the_template_gets_the_tools_as_from_the_http_api() -> None:
    _, submit = submitted(tools=[STRICT], chat_template_kwargs={"x": 1})
    assert submit.chat_form is not None
    assert submit.chat_form.variables == {"x": 1, "tools": [TOOL]}
    tools, hidden = submitted(tools=[TOOL], tool_choice="none")
    assert hidden.chat_form is not None and hidden.chat_form.variables == {}
    assert output_of(tools, hidden, CALL).message == {"role": "assistant", "content": CALL}


@pytest.mark.parametrize(
    ("options", "has_text", "has_one_call"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, False, False),
        ({"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}, False, True),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, False, True),
        ({"tools": [STRICT]}, False, False),
    ],
)
def test_forced_and_strict_calls_are_constrained_in_the_form_of_the_model(
    options: Any, has_text: bool, has_one_call: bool
) -> None:
    tools, submit = submitted(**options)
    given = submit.params.structured_outputs
    assert given is not None and given.calls is not None
    constraint = CallsConstraint.from_text(given.calls)
    assert constraint is not None and constraint.tools == {"f": SCHEMA}
    assert (constraint.has_text, constraint.has_one_call) == (has_text, has_one_call)
    assert without_ids(output_of(tools, submit, CALL).tool_calls) == READ


def test_forced_calls_of_a_model_without_a_form_are_a_json_list() -> None:
    options: Any = {"tools": [TOOL], "tool_choice": "required"}
    tools = ChatTools(options)
    submit = applied(tools, options, found=AnswerFormIs(query_id=1, form={}))
    assert submit.params.structured_outputs is not None and submit.params.structured_outputs.json
    calls = output_of(tools, submit, '[{"name": "f", "parameters": {"a": [1, {"b": "x"}]}}]').tool_calls
    assert without_ids(calls) == READ


def test_strict_without_effect_is_a_warning() -> None:
    options: Any = {"tools": [STRICT]}
    with pytest.warns(UserWarning, match="strict of tools has no effect"):
        applied(ChatTools(options), options, found=AnswerFormIs(query_id=1, form={}))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tools": [{"type": "function"}]}, "tools of chat"),
        ({"tools": ["f"]}, "tools of chat"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice names 'g'"),
        ({"tool_choice": "required"}, "tools is empty"),
        ({"tools": [TOOL], "tool_choice": "all"}, "tools of chat"),
    ],
)
def test_invalid_tools_are_refused(options: Any, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        new_tools(options)


def test_a_forced_call_is_refused_beside_another_constraint() -> None:
    options: Any = {"tools": [TOOL], "tool_choice": "required"}
    with pytest.raises(RequestError, match="give one"):
        applied(
            ChatTools(options), options, SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
        )
