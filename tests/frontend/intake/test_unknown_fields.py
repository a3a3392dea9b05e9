"""Unknown fields are removed from a body and named; --strict-fields refuses them."""

from __future__ import annotations

import json

import pytest

from tokenloom.frontend.http.control import PauseRequest
from tokenloom.frontend.intake.body_error import UNKNOWN_FIELD, BodyError
from tokenloom.frontend.intake.body_parser import parse_body
from tokenloom.frontend.intake.unknown_fields import MAX_NAMED
from tokenloom.frontend.openai.forms.schema import ChatRequest
from tokenloom.frontend.text.prompt_limits import PromptLimits
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
