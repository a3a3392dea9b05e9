"""Descriptions, defaults, groups and examples of bodies in /openapi.json."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from jsonschema import Draft202012Validator

from tokenloom.frontend.forms.field import ABSENT, GROUP
from tokenloom.frontend.server.http.openapi import GROUPS, SAMPLING, TAGS, Schema
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.tests.frontend.server.http.served_app import ServedApp, serving
from tokenloom.tests.support.engine_specs import new_spec

DEFAULTS = {"temperature": 0.6, "max_tokens": 99}


class App(ServedApp):
    def turn(self) -> None:
        """Answer nothing."""


def document(**changes: Any) -> Schema:
    """Return the document of an engine with these fields of its spec."""

    async def read() -> Schema:
        async with serving(lambda: App(new_spec(**changes), ChatTemplate("{{ messages }}", {}))) as served:
            found: Schema = (await served.http.get("/openapi.json")).json()
            return found

    return asyncio.run(read())


def fields(found: Schema) -> list[tuple[str, Schema, str, Schema]]:
    """Return (component, its schema, field, the field's schema) of all fields."""
    components: Schema = found["components"]["schemas"]
    return [
        (title, schema, name, field)
        for title, schema in components.items()
        for name, field in schema.get("properties", {}).items()
    ]


def test_each_field_has_a_sentence_and_what_holds_without_it() -> None:
    found = fields(document())
    assert len(found) > 600
    for title, schema, name, field in found:
        text = field.get("description", "")
        assert text[:1].isupper() or text.startswith(("json", "llama.cpp")), f"{title}.{name} has no sentence: {text!r}"
        assert text.endswith("."), f"{title}.{name}: {text!r}"
        is_required = name in schema["required"]
        assert is_required or field["default"] is not None or field[ABSENT], f"{title}.{name} has no default"
        assert not (is_required and ABSENT in field), f"{title}.{name} is required and has a default"


def test_fields_stand_in_order_required_then_sampling_then_ours() -> None:
    found = document()
    for title, schema in found["components"]["schemas"].items():
        names = list(schema.get("properties", {}))
        must = [name for name in names if name in schema["required"]]
        assert names[: len(must)] == must, title
        groups = [GROUPS.index(schema["properties"][name][GROUP]) for name in names[len(must) :]]
        assert groups == sorted(groups), title
    chat = list(found["components"]["schemas"]["ChatRequest"]["properties"])
    assert chat[:3] == ["messages", "n", "temperature"] and chat.index("top_k") < chat.index("user")


def test_defaults_are_those_of_the_model() -> None:
    def defaults(found: Schema, title: str, *names: str) -> list[object]:
        return [found["components"]["schemas"][title]["properties"][name]["default"] for name in names]

    plain, tuned = document(), document(default_sampling_params=DEFAULTS)
    assert defaults(plain, "ChatRequest", "temperature", "top_k", "max_tokens") == [1.0, 0, None]
    assert defaults(tuned, "ChatRequest", "temperature", "max_completion_tokens") == [0.6, 99]
    assert defaults(tuned, "MessagesRequest", "temperature", "top_p") == [0.6, 1.0]
    assert defaults(plain, "Options", "temperature", "top_k", "repeat_penalty") == [0.7, 40, 1.0]
    assert defaults(tuned, "Options", "temperature", "top_k", "num_predict") == [0.6, 0, 99]


def test_each_example_is_valid_and_names_the_served_model() -> None:
    found = document(served_model_name="sample")
    num_named = 0
    for path, methods in found["paths"].items():
        for operation in methods.values():
            assert operation["tags"][0] in TAGS, path
            for content in operation.get("requestBody", {}).get("content", {}).values():
                schema = {**content["schema"], "components": found["components"]}
                Draft202012Validator(schema).validate(content["example"])
                num_named += content["example"].get("model") == "sample"
    assert num_named > 10


def test_limits_of_sampling_fields_are_in_their_schemas() -> None:
    found = document()
    for title, _, name, field in fields(found):
        if name in ("temperature", "top_p", "min_p", "presence_penalty", "repeat_penalty"):
            assert field[GROUP] in (SAMPLING, "beyond the API")
            assert any("maximum" in form for form in field["anyOf"]), f"{title}.{name}"


def test_the_document_is_made_once() -> None:
    async def read() -> None:
        async with serving(lambda: App(new_spec(), ChatTemplate("{{ messages }}", {}))) as served:
            first = (await served.http.get("/openapi.json")).content
            begun = time.process_time()
            for _ in range(100):
                assert (await served.http.get("/openapi.json")).content == first
            assert time.process_time() - begun < 1.0, "a hundred more take the time of ten"

    asyncio.run(read())
