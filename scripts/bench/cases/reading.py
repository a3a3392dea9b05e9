"""Measure the reading of answers: microseconds of CPU for a character of thoughts, prose and calls, by their form.

    engine-launch bench reading --pieces 4 12 1000

The text of an answer comes in pieces of so many characters, as a stream of tokens does; parsers are made anew for each
answer. `forced`: calls as a JSON list, of models without a form. Needs no model and no engine.
"""

from __future__ import annotations

import time

from tokenloom.frontend.forms.answer_forms.named import named_form
from tokenloom.frontend.forms.parsers.forced import ForcedParser
from tokenloom.frontend.forms.parsers.names import new_parsers
from tokenloom.frontend.forms.parsers.parts import CallEnd, Parser, parsed
from tokenloom.ipc.codec import JsonObject
from tokenloom.scripts.bench.report import median
from tokenloom.scripts.bench.runner import Case, Setup

PIECES = [4, 12]
NUM_ANSWERS = 200  # that one figure is the mean of
SAID = "I look at the weather in Rio first, since you asked for it.\n"
PROSE = "I look at the weather first, in {both} cities, since you asked for 2 of them; then I compare. " * 10
CODE = "def twice(x):\\n    return x + x\\n" * 60
SCHEMAS: dict[str, JsonObject] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    }
}
OBJECT = '{"city": "Rio de Janeiro", "days": 3}'
CALL = '{"name": "get_weather", "arguments": ' + OBJECT + "}"
HERMES = f"<tool_call>\n{CALL}\n</tool_call>"
LONG = '<tool_call>\n{"name": "write", "arguments": {"text": "' + CODE + '"}}\n</tool_call>'
TAGGED = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nRio de Janeiro\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
LITERAL = '<function_calls>\nget_weather(city="Rio de Janeiro", days=3)\n</function_calls>'
ANSWERS = {  # name of the form and text, by the text
    "prose": ("hermes", PROSE),
    "object": ("hermes", HERMES),
    "two objects": ("hermes", f"{HERMES}\n{HERMES}"),
    "text, object": ("hermes", SAID + HERMES),
    "long object": ("hermes", LONG),
    "json": ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{OBJECT}"),
    "tagged": ("qwen3_coder", SAID + TAGGED),
    "literal": ("olmo3", SAID + LITERAL),
    "forced": ("", f"[{CALL}, {CALL}]"),
}


def parsers_of(name: str) -> list[Parser]:
    """Return new parsers of a form; of a list of forced calls for no name."""
    if not name:
        return [ForcedParser(None)]
    return new_parsers(named_form(name, "none"), SCHEMAS, is_inside_thought=False)


def num_calls(name: str, pieces: list[str]) -> int:
    """Read an answer and return the number of its calls."""
    parsers = parsers_of(name)
    last = len(pieces) - 1
    found = 0
    for place, piece in enumerate(pieces):
        parts = parsed(parsers, piece, is_last=place == last)
        found += sum(type(part) is CallEnd for part in parts)
    return found


def measure(setup: Setup) -> None:
    for size in setup.arguments.pieces:
        for read, (name, text) in ANSWERS.items():
            pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
            wanted = text.count("get_weather") + (read == "long object")
            if (found := num_calls(name, pieces)) != wanted:
                raise SystemExit(f"{read}: {found} calls were read of {wanted}")
            times: list[float] = []
            for _ in range(setup.arguments.rounds):
                start = time.thread_time()
                for _ in range(NUM_ANSWERS):
                    num_calls(name, pieces)
                times.append(1e6 * (time.thread_time() - start) / NUM_ANSWERS)
            us = median(times)
            setup.report.add(piece=size, read=read, characters=len(text), answer_us=us, character_us=us / len(text))


OPTIONS = {"--pieces": (PIECES, "characters of a piece of text")}
CASE = Case("reading of answers", measure, OPTIONS, model="", rounds=9)
