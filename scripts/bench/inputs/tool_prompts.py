"""Tools of several shapes, questions that need them, and a ChatML template with calls in the form of Hermes.

The schemas have parts that small models get wrong: names of an enum, bounds, nested objects, lists, fields that may be
absent. Every conversation starts with calls of other tools, so that a model that is not trained on calls writes some.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from tokenloom.ipc.codec import JsonObject

NUM_SHOWN = 4  # calls of a conversation before its question
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system
You answer every question with a call of a function. The functions:
' }}{% for tool in tools %}{{ tool.function | tojson }}{{ '
' }}{% endfor %}{{ 'A call is written <tool_call>
{"name": NAME, "arguments": OBJECT}
</tool_call><|im_end|>
' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' ~ message.role ~ '
' ~ (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ '
' }}{% endif %}{{ '<tool_call>
{"name": ' ~ (call.function.name | tojson) ~ ', "arguments": ' ~ (call.function.arguments | tojson) ~ '}
</tool_call>' }}
{%- endfor %}{{ '<|im_end|>
' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""


def _object(**properties: object) -> JsonObject:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_TEXT = {"type": "string", "maxLength": 60}
_SCHEMAS = {
    "get_weather": _object(
        city=_TEXT, unit={"enum": ["celsius", "fahrenheit"]}, days={"type": "integer", "minimum": 1, "maximum": 14}
    ),
    "book_flight": _object(
        origin={"type": "string", "pattern": "^[A-Z]{3}$"},
        destination={"type": "string", "pattern": "^[A-Z]{3}$"},
        seats=_object(kind={"enum": ["economy", "business"]}, count={"type": "integer", "minimum": 1, "maximum": 9}),
    ),
    "order_food": _object(
        dishes={
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": _object(name=_TEXT, size={"enum": ["S", "M", "L"]}, spicy={"type": "boolean"}),
        },
    ),
    "set_alarm": _object(
        hour={"type": "integer", "minimum": 0, "maximum": 23},
        minute={"type": "integer", "minimum": 0, "maximum": 59},
        weekdays={"type": "array", "maxItems": 7, "items": {"enum": ["mon", "tue", "wed", "thu", "fri", "sat", "sun"]}},
    ),
    "convert": _object(
        value={"type": "number"},
        source={"enum": ["km", "mile", "kg", "pound"]},
        target={"enum": ["km", "mile", "kg", "pound"]},
    ),
    "find_books": {
        "type": "object",
        "properties": {
            "title": _TEXT,
            "year": {"type": "integer", "minimum": 1450, "maximum": 2100},
            "sort": {"anyOf": [{"enum": ["title", "year"]}, {"type": "null"}]},
        },
        "required": ["title", "sort"],
        "additionalProperties": False,
    },
}
_QUESTIONS = {
    "get_weather": ["How warm will it be in {} this week?", "Do I need an umbrella in {} tomorrow?"],
    "book_flight": ["Book two seats from Lima to {}.", "I want to fly to {} in business class."],
    "order_food": ["I am in {} and hungry: order two pizzas.", "Order a large curry to my hotel in {}."],
    "set_alarm": ["Wake me at half past six on weekdays in {}.", "An alarm for noon on Sunday, {} time."],
    "convert": ["It is 120 km to {}. How many miles is that?", "My bag for {} has 23 kg. And in pounds?"],
    "find_books": ["Find a book about {} from before 1900.", "Which novels are set in {}?"],
}
_PLACES = ("Paris", "Oslo", "Cairo", "Quito", "Hanoi", "Boston", "Nairobi", "Lisbon")
_SHOWN: dict[str, tuple[str, JsonObject]] = {  # a question and the arguments of its call
    "get_weather": ("Is it cold in Rome today?", {"city": "Rome", "unit": "celsius", "days": 1}),
    "book_flight": (
        "One seat from LHR to JFK, please.",
        {"origin": "LHR", "destination": "JFK", "seats": {"kind": "economy", "count": 1}},
    ),
    "order_food": ("A small mild soup.", {"dishes": [{"name": "soup", "size": "S", "spicy": False}]}),
    "set_alarm": ("Wake me at 7:15 on Monday.", {"hour": 7, "minute": 15, "weekdays": ["mon"]}),
    "convert": ("How many pounds are 5.5 kg?", {"value": 5.5, "source": "kg", "target": "pound"}),
    "find_books": ("Find Emma by Jane Austen, of 1815.", {"title": "Emma", "year": 1815, "sort": None}),
}


def schema_of(name: str) -> JsonObject:
    """Return the schema of a tool's arguments. KeyError if no tool has this name."""
    return _SCHEMAS[name]


def tools(names: Sequence[str], *, is_strict: bool) -> list[JsonObject]:
    """Return tools in the form of /v1/chat/completions."""
    strict = {"strict": True} if is_strict else {}
    return [{"type": "function", "function": {"name": name, "parameters": _SCHEMAS[name], **strict}} for name in names]


def conversations(count: int) -> Iterator[tuple[list[Any], list[str]]]:
    """Yield `count` conversations with the names of their tools: those of the calls that it starts with, and the one
    that the last question needs."""
    names = list(_SCHEMAS)
    every = itertools.product(range(2), _PLACES, names)
    for number, (kind, place, name) in enumerate(itertools.islice(itertools.cycle(every), count)):
        first = names.index(name) + 1 + number % 2
        shown = [names[(first + step) % len(names)] for step in range(NUM_SHOWN)]
        question = {"role": "user", "content": _QUESTIONS[name][kind].format(place)}
        yield [*itertools.chain(*map(_called, shown)), question], sorted({name, *shown})


def _called(name: str) -> list[Any]:
    """Return a question, the call that answers it, and the call's result."""
    question, arguments = _SHOWN[name]
    call_id = f"call{len(question):05}"
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "done"},
    ]
