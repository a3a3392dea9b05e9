"""Unknown fields are removed from a body and named; --strict-fields refuses them."""

from __future__ import annotations

import json

import pytest

from tokenloom.frontend.forms.anthropic.request_body import MessagesRequest
from tokenloom.frontend.forms.openai.generation import Body
from tokenloom.frontend.forms.openai.response_body import ResponsesRequest
from tokenloom.frontend.forms.openai.schema import ChatRequest
from tokenloom.frontend.forms.prompt_limits import PromptLimits
from tokenloom.frontend.server.bodies.body_error import UNKNOWN_FIELD, BodyError
from tokenloom.frontend.server.bodies.body_parser import parse_body
from tokenloom.frontend.server.bodies.unknown_fields import MAX_NAMED
from tokenloom.frontend.server.http.control import PauseRequest
from tokenloom.ipc.errors import RequestError

LIMITS = PromptLimits(max_model_len=100, max_answers=100, max_tokens=1000)
MESSAGES = [{"role": "user", "content": "hi"}]
CASES = {
    "max_token": ({"max_token": 5}, ["max_token (did you mean max_tokens?)"]),
    "anything": ({"early_stopping": [{"a": {}}]}, ["early_stopping"]),
    "inside": (
        {"stream": True, "stream_options": {"include_usge": True}},
        ["stream_options.include_usge (did you mean include_usage?)"],
    ),
    "in a list": (
        {"tools": [{"type": "function", "function": {"name": "f", "cache": 1}, "zone": 2}, {}]},
        ["tools[0].function.cache", "tools[0].zone"],
    ),
    "not printable": ({"\u00e9\n": 1}, ["\\xe9"]),
}


@pytest.mark.parametrize("name", CASES)
def test_an_unknown_field_is_named_and_the_rest_decodes_as_without_it(name: str) -> None:
    more, named = CASES[name]
    raw = json.dumps({"messages": MESSAGES, "seed": 3} | more, ensure_ascii=False).encode()
    if name == "in a list":  # the second tool stays invalid
        with pytest.raises(RequestError, match=r"tools: type function must have function\.name: give it"):
            parse_body(raw, ChatRequest, LIMITS)
        raw = raw.replace(b", {}", b"")
    parsed = parse_body(b" " + raw, ChatRequest, LIMITS)
    assert parsed.ignored == named
    assert (parsed.body.seed, parsed.body.messages[0].content) == (3, "hi")
    with pytest.raises(BodyError) as refused:
        parse_body(raw, ChatRequest, LIMITS, is_strict=True)
    assert refused.value.code == UNKNOWN_FIELD


LEFT_OUT: dict[str, tuple[type[Body], str, list[str]]] = {
    "tools of a response": (
        ResponsesRequest,
        """{
  "input": "hi",
  "tools": [
    {"type": "web_search", "filters": {"a": 1}},
    {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}},
    {"type": "mcp", "name": 7}
  ]
}""",
        ["tools[0] of type web_search", "tools[2] of type mcp"],
    ),
    "tools in a namespace": (
        ResponsesRequest,
        """{
  "input": "hi",
  "tools": [
    {
      "type": "namespace", "name": "n",
      "tools": [
        {"type": "image_generation"},
        {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
      ]
    }
  ]
}""",
        ["tools[0].tools[0] of type image_generation"],
    ),
    "items": (
        ResponsesRequest,
        """{
  "input": [
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
    {"type": "local_shell_call", "call_id": "c", "action": {}},
    {"type": "local_shell_call_output", "call_id": "c", "output": {"stdout": "x"}},
    {"type": "computer_call_output", "output": {"type": "computer_screenshot"}},
    {"type": "mcp_list_tools", "tools": []}, {"type": "compaction", "encrypted_content": "x"},
    {"role": "user", "content": "hi"},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "x"}
  ]
}""",
        [
            "input[0] of type web_search_call",
            "input[1] of type local_shell_call",
            "input[2] of type local_shell_call_output",
            "input[3] of type computer_call_output",
            "input[4] of type mcp_list_tools",
            "input[5] of type compaction",
        ],
    ),
    "tools of a chat": (
        ChatRequest,
        """{
  "messages": [{"role": "user", "content": "hi"}],
  "tools": [{"type": "web_search_preview"}, {"function": {"name": "f"}}]
}""",
        ["tools[0] of type web_search_preview"],
    ),
    "tools of a message": (
        MessagesRequest,
        """{
  "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1,
  "tools": [
    {"name": "web_search", "type": "web_search_20250305", "max_uses": 5},
    {"type": "bash_20250124", "name": "bash"}, {"type": "custom", "name": "f", "input_schema": {}},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}
  ],
  "container": "c", "mcp_servers": [{"url": "x"}]
}""",
        [
            "tools[0] of type web_search_20250305",
            "tools[1] of type bash_20250124",
            "tools[3] of type text_editor_20250728",
            "container",
            "mcp_servers",
        ],
    ),
    "blocks": (
        MessagesRequest,
        """{
  "max_tokens": 1,
  "messages": [
    {"role": "user", "content": "hi"},
    {
      "role": "assistant",
      "content": [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": {"error_code": "x"}},
        {"type": "text", "text": "found"}, {"type": "tool_use", "id": "t", "name": "f", "input": {}}
      ]
    },
    {
      "role": "user",
      "content": [
        {
          "type": "tool_result", "tool_use_id": "t",
          "content": [{"type": "tool_reference", "tool_name": "f"}, {"type": "text", "text": "x"}]
        }
      ]
    }
  ]
}""",
        [
            "messages[1].content[0] of type server_tool_use",
            "messages[1].content[1] of type web_search_tool_result",
            "messages[2].content[0].content[0] of type tool_reference",
        ],
    ),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_only_another_server_can_run_or_read_is_left_out_and_named(name: str) -> None:
    body_type, body, named = LEFT_OUT[name]
    raw = body.encode()
    parsed = parse_body(raw, body_type, LIMITS)
    assert sorted(parsed.ignored) == sorted(named)
    lists = [each for each in (getattr(parsed.body, "tools", None), getattr(parsed.body, "input", None)) if each]
    kept = [each.type for listed in lists if not isinstance(listed, str) for each in listed]
    assert set(kept) <= {"function", "namespace", "custom", "message", "function_call", "function_call_output"}
    with pytest.raises(BodyError, match=r"not served|unknown field"):
        parse_body(raw, body_type, LIMITS, is_strict=True)


@pytest.mark.parametrize(
    ("body_type", "body", "place"),
    [
        (ResponsesRequest, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        (ResponsesRequest, {"input": [{"type": "mesage", "role": "user", "content": "hi"}]}, "input"),
        (ResponsesRequest, {"input": "hi", "tool_choice": {"type": "web_search"}}, "tool_choice"),
        (ChatRequest, {"messages": MESSAGES, "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ],
)
def test_what_the_caller_says_or_chooses_is_never_left_out(
    body_type: type[Body], body: dict[str, object], place: str
) -> None:
    with pytest.raises(BodyError, match=f"{place}.* is of type .*, which is not served") as refused:
        parse_body(json.dumps(body).encode(), body_type, LIMITS)
    assert refused.value.param == place


def test_at_most_max_named_unknown_fields_are_named() -> None:
    body = {"messages": MESSAGES} | {f"{number}{'x' * 200}": 0 for number in range(50)}
    ignored = parse_body(json.dumps(body).encode(), ChatRequest, LIMITS).ignored
    assert len(ignored) == MAX_NAMED and sum(map(len, ignored)) < 1000


def test_an_order_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(BodyError, match="unknown field `mod`"):
        parse_body(b'{"mod": "wait"}', PauseRequest, LIMITS)


@pytest.mark.parametrize("broken", [b"]", b"", b'"\xff"}', b'"\\ud800"}', b"[" * 100_000])
def test_a_syntax_error_after_an_unknown_field_is_the_bodys_error(broken: bytes) -> None:
    with pytest.raises(BodyError):
        parse_body(b'{"messages": [], "nope": 1, "user": ' + broken, ChatRequest, LIMITS)
    with pytest.raises(BodyError):
        parse_body(b'{"messages": [], "nope": ' + broken + b"]", ChatRequest, LIMITS)
