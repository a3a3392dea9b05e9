"""A schema is obeyed in every spelling in which it may come, or refused by name; it is never ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenloom.frontend.forms.anthropic.request_body import MessagesRequest
from tokenloom.frontend.forms.anthropic.request_body import chat_request as chat_of_message
from tokenloom.frontend.forms.openai.generation import Generation
from tokenloom.frontend.forms.openai.params import (
    constraint_field,
    refuse_unserved,
    sampling_params,
    structured_outputs,
)
from tokenloom.frontend.forms.openai.response_body import ResponsesRequest, chat_request
from tokenloom.frontend.forms.openai.schema import ChatRequest, CompletionRequest
from tokenloom.frontend.forms.prompt_limits import PromptLimits
from tokenloom.frontend.server.api.openai.chat import chat_params
from tokenloom.frontend.server.bodies.body_error import BodyError
from tokenloom.frontend.server.bodies.body_parser import OTHER_FORMATS, parse_body
from tokenloom.frontend.server.bodies.unknown_fields import MAX_NAMED
from tokenloom.ipc.errors import RequestError

LIMITS = PromptLimits(max_model_len=100, max_answers=1, max_tokens=1000)
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OTHER = {"type": "object"}


def chat(**fields: Any) -> ChatRequest:
    return parse_body(json.dumps({"messages": MESSAGES} | fields).encode(), ChatRequest, LIMITS).body


def response(**fields: Any) -> Generation:
    body = parse_body(json.dumps({"input": "hi"} | fields).encode(), ResponsesRequest, LIMITS).body
    return chat_request(body)


def form(kind: str, **fields: object) -> dict[str, object]:
    return {"response_format": {"type": kind} | fields}


@pytest.mark.parametrize(
    "fields",
    [
        form("json_schema", json_schema={"name": "s", "schema": SCHEMA, "strict": True}),
        form("json_schema", json_schema={"schema": SCHEMA}),
        form("json_schema", json_schema=SCHEMA),
        form("json_schema", schema=SCHEMA),
        form("json_schema", schema=SCHEMA, name="s", strict=True),
        form("json_schema", value=SCHEMA),
        form("json_object", value=SCHEMA),
        form("json_object", schema=SCHEMA),
        form("json_object", json_schema=SCHEMA),
        form("json_object", json_schema={"name": "s", "schema": SCHEMA}),
        form("json", value=SCHEMA),
        form("json", schema=SCHEMA),
        form("json_schema", schema=SCHEMA, value=SCHEMA),
        {"json_schema": SCHEMA},
        {"guided_json": SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True, "includes_thought": False}},
        {"guided_json": SCHEMA, "json_schema": SCHEMA} | form("json_object", schema=SCHEMA),
    ],
)
def test_every_spelling_of_a_schema_is_obeyed(fields: dict[str, object]) -> None:
    for made in (chat(**fields), response(**fields)):
        found = structured_outputs(made)
        assert found is not None and found.text == json.dumps(SCHEMA) and found.kind == "json"


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        (form("regex", value="a+"), "regex", "a+"),
        (form("regex", pattern="a+"), "regex", "a+"),
        (form("grammar", grammar='root ::= "a"'), "lark", 'root ::= "a"'),
        (form("grammar", value='root ::= "a"'), "lark", 'root ::= "a"'),
        ({"grammar": 'root ::= "a"'}, "lark", 'root ::= "a"'),
        ({"guided_grammar": 'root ::= "a"'}, "lark", 'root ::= "a"'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choice", '["a", "b"]'),
        (form("json_object"), "json", json.dumps(OTHER, separators=(",", ":"))),
        (form("json", value=json.dumps(SCHEMA)), "json", json.dumps(SCHEMA)),
    ],
)
def test_every_spelling_of_another_constraint_is_obeyed(fields: dict[str, object], kind: str, text: str) -> None:
    found = structured_outputs(chat(**fields))
    assert found is not None and (found.kind, found.text) == (kind, text)


@pytest.mark.parametrize("fields", [{}, form("text"), {"structured_outputs": {}}])
def test_a_body_without_constraint_has_none(fields: dict[str, object]) -> None:
    assert structured_outputs(chat(**fields)) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (form("json_schema", schema=SCHEMA, value=OTHER), r"2 ways \(response_format.schema, response_format.value\)"),
        (
            form("json_schema", schema=SCHEMA) | {"guided_json": OTHER},
            r"2 ways \(guided_json, response_format.schema\)",
        ),
        ({"guided_json": SCHEMA, "structured_outputs": {"json": OTHER}}, r"\(structured_outputs.json, guided_json\)"),
        ({"json_schema": SCHEMA, "grammar": "x"}, r"\(json_schema, grammar\): give one"),
        (form("json_object") | {"guided_json": SCHEMA}, r"2 ways \(guided_json, response_format\)"),
        (form("json_schema"), "response_format.json_schema.schema is missing"),
        (form("json_schema", json_schema={"name": "s"}), "response_format.json_schema.schema is missing"),
        (form("json"), "response_format.value is missing"),
        (form("regex"), "response_format.pattern is missing"),
        (form("grammar"), "response_format.grammar is missing"),
        (form("text", schema=SCHEMA), "response_format.schema has no effect with the type text"),
        (form("regex", value="a", schema=SCHEMA), "response_format.schema has no effect with the type regex"),
    ],
)
def test_constraints_that_differ_or_are_missing_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        structured_outputs(chat(**fields))


@pytest.mark.parametrize("name", sorted(OTHER_FORMATS))
def test_a_schema_in_a_field_that_is_not_read_is_refused_by_name(name: str) -> None:
    with pytest.raises(BodyError, match=f"{name} is another server's name of response_format") as refused:
        chat(**{f"unread {i}": i for i in range(MAX_NAMED)}, **{name: SCHEMA})
    assert refused.value.param == name


@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_the_schema_of_a_responses_text_is_obeyed_whatever_its_type(kind: str) -> None:
    found = structured_outputs(response(text={"format": {"type": kind, "name": "s", "schema": SCHEMA}}))
    assert found is not None and found.text == json.dumps(SCHEMA)
    with pytest.raises(RequestError, match="has no effect with the type text"):
        structured_outputs(response(text={"format": {"type": "text", "schema": SCHEMA}}))


def test_two_schemas_of_a_message_must_be_one() -> None:
    form_of = {"type": "json_schema", "schema": SCHEMA}
    body = {"messages": MESSAGES, "max_tokens": 1, "output_format": form_of}

    def made(**fields: object) -> ChatRequest:
        return chat_of_message(parse_body(json.dumps(body | fields).encode(), MessagesRequest, LIMITS).body)

    found = structured_outputs(made(output_config={"format": form_of}))
    assert found is not None and found.text == json.dumps(SCHEMA)
    with pytest.raises(RequestError, match=r"output_format and output_config\.format differ"):
        made(output_config={"format": form_of | {"schema": OTHER}})


def test_errors_name_the_field_of_the_constraint() -> None:
    assert constraint_field(chat(**form("json_object", value=SCHEMA))) == "response_format.value"
    assert constraint_field(chat(json_schema=SCHEMA)) == "json_schema"
    assert (
        constraint_field(chat(structured_outputs={"json": SCHEMA})) == constraint_field(chat()) == "structured_outputs"
    )


def test_best_of_zero_draws_no_more_answers_than_are_returned() -> None:
    assert sampling_params(chat(best_of=0, n=2), max_tokens=1).best_of is None
    with pytest.raises(RequestError, match="best_of is 3 and n is 2"):
        sampling_params(chat(best_of=3, n=2), max_tokens=1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio is not served by this engine: answers are text"),
        ({"modalities": ["text", "audio"]}, r'modalities is not .*: answers are text, send \["text"\]'),
        ({"use_beam_search": True}, "use_beam_search is not served by this engine: leave it out"),
    ],
)
def test_a_field_that_is_not_served_is_refused_with_the_way_around_it(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        refuse_unserved(chat(**fields))
    refuse_unserved(chat(functions=[{"name": "f"}], function_call="auto", modalities=["text"], use_beam_search=False))


def test_a_suffix_is_refused_with_the_way_around_it() -> None:
    body = parse_body(b'{"prompt": "def f(", "suffix": "return 1"}', CompletionRequest, LIMITS).body
    with pytest.raises(
        RequestError, match=r"suffix is not served .*: put the prompt and the suffix into `prompt`, with"
    ):
        refuse_unserved(body)


def test_each_field_reaches_the_parameter_of_its_name() -> None:
    given: dict[str, Any] = {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "temperature": 2.0, "seed": 7, "stop": ["x"]}
    given |= {"presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 2.0, "min_tokens": 2}
    given |= {"stop_token_ids": [5], "allowed_token_ids": [5], "bad_words": ["x"], "thinking_token_budget": 3}
    given |= {"truncate_prompt_tokens": 3, "priority": -5, "timeout_s": 9.0, "queue_timeout_s": 9.0}
    given |= {"include_stop_str_in_output": True, "ignore_eos": True, "skip_special_tokens": False}
    given |= {"spaces_between_special_tokens": False, "truncation_side": "right", "cache_salt": "s"}
    for body in (chat(**given), response(**given)):
        params = chat_params(body)
        assert {name: getattr(params, name) for name in given} == given
    assert chat_params(chat(logit_bias={"5": -100})).logit_bias == {5: -100}


def test_logprobs_that_cannot_be_returned_are_refused() -> None:
    with pytest.raises(RequestError, match="prompt_logprobs is not served in a stream"):
        sampling_params(chat(stream=True, prompt_logprobs=1), max_tokens=1)
    with pytest.raises(RequestError, match="logprob_token_ids needs logprobs"):
        sampling_params(chat(logprob_token_ids=[5]), max_tokens=1)
