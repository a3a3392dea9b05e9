"""The error of an unreadable body names the field and the mend."""

from __future__ import annotations

from codecs import BOM_UTF8

import pytest

from tokenloom.frontend.forms.openai.params import structured_outputs
from tokenloom.frontend.forms.openai.schema import CompletionRequest
from tokenloom.frontend.forms.prompt_limits import PromptLimits
from tokenloom.frontend.server.bodies.body_error import BodyError
from tokenloom.frontend.server.bodies.body_parser import parse_body
from tokenloom.ipc.errors import RequestError
from tokenloom.tests.support.engine_specs import new_spec

LIMITS = PromptLimits.of(new_spec(), None)


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


@pytest.mark.parametrize(
    ("raw", "message", "param"),
    [
        (rb'{"prompt":"a\ud800"}', "prompt holds a lone surrogate at character 1: give valid Unicode", "prompt"),
        (rb'{"prompt":"a\ud800b"}', "prompt holds a lone surrogate at character 1: give valid Unicode", "prompt"),
        (rb'{"prompt":"\udc00"}', "prompt holds a lone surrogate at character 0: give valid Unicode", "prompt"),
        (
            rb'{"prompt":["x","\ud800"]}',
            "prompt[1] holds a lone surrogate at character 0: give valid Unicode",
            "prompt",
        ),
        (
            rb'{"prompt":"x","logit_bias":{"\ud800":1}}',
            "a key of logit_bias holds a lone surrogate at character 0: give valid Unicode",
            "logit_bias",
        ),
        (
            rb'{"prompt":"x","\ud800":1}',
            "a key of the body holds a lone surrogate at character 0: give valid Unicode",
            None,
        ),
        (b'{"user":"x","prompt":"a\xff"}', "the body is not UTF-8 at byte 23: encode it so", None),
        (
            b'{"prompt":"x","response_format":{}}',
            "the body cannot be read: Object missing required field `type` - at `$.response_format`",
            "response_format.type",
        ),
        (b'{"user":"x"}', "the body cannot be read: Object missing required field `prompt`", "prompt"),
        (b'{"prompt":"a', "the body ends in the midst of its JSON, after 12 bytes: send all of it", None),
        (
            b'{"prompt":"[[[","guided_json":' + nested(5000) + b"}",
            "guided_json is nested too deep to be read: use fewer levels",
            "guided_json",
        ),
        (
            b'{"prompt":"x","temprature":1}',
            "the body cannot be read: Object contains unknown field `temprature`",
            "temprature",
        ),
    ],
)
def test_the_error_of_an_unreadable_body_names_field_and_mend(raw: bytes, message: str, param: str | None) -> None:
    with pytest.raises(BodyError) as caught:
        parse_body(raw, CompletionRequest, LIMITS, is_strict=True)
    assert (str(caught.value), caught.value.param) == (message, param)


@pytest.mark.parametrize(
    ("raw", "begin", "end"),
    [
        (b'{"prompt":"x","truncation_side":"%s"}', "Invalid enum value 'aaa", "aaa' - at `$.truncation_side`"),
        (b'{"prompt":"x","%s":1}', "Object contains unknown field `aaa", "aaa`"),
    ],
)
def test_a_long_value_or_name_is_quoted_in_part(raw: bytes, begin: str, end: str) -> None:
    with pytest.raises(BodyError) as caught:
        parse_body(raw % (b"a" * 1_000_000), CompletionRequest, LIMITS, is_strict=True)
    message = str(caught.value).removeprefix("the body cannot be read: ")
    assert message.startswith(begin) and message.endswith(end) and len(message) < 1_000, message
    assert len(caught.value.param or "") < 1_000


@pytest.mark.parametrize(
    ("field", "start", "end"),
    [
        ("guided_json", b'"guided_json":', b""),
        ("structured_outputs.json", b'"structured_outputs":{"json":', b"}"),
        (
            "response_format.json_schema.schema",
            b'"response_format":{"type":"json_schema","json_schema":{"schema":',
            b"}}",
        ),
    ],
)
def test_the_error_of_too_deep_nesting_names_the_field(field: str, start: bytes, end: bytes) -> None:
    body = parse_body(b'{"prompt":"x",' + start + nested(300) + end + b"}", CompletionRequest, LIMITS).body
    with pytest.raises(RequestError, match=rf"^{field} is nested 300 levels deep, at most 124 .*: use fewer levels"):
        structured_outputs(body)


def test_prompts_times_answers_are_limited_before_prompts_are_checked() -> None:
    raw = b'{"prompt":[%s],"n":128}' % b",".join([b'""'] * 200)  # an empty prompt would be refused too
    with pytest.raises(RequestError, match=r"n is 128 and the prompts are 200: .* at most 16384 answers"):
        parse_body(raw, CompletionRequest, LIMITS)


# ── marks of editors ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_a_byte_order_mark_before_a_body_is_no_part_of_it(kind: type[bytes]) -> None:
    for body in (b'{"prompt": "x"}', b' {"prompt": "x", "unknown": 1}'):
        plain, marked = (parse_body(kind(raw), CompletionRequest, LIMITS) for raw in (body, BOM_UTF8 + body))
        assert marked == plain and marked.body.prompt == "x"
    with pytest.raises(RequestError, match="cannot be read"):
        parse_body(b'{"prompt": ' + BOM_UTF8 + b'"x"}', CompletionRequest, LIMITS)
