"""The tool, the question and the results of the tool loops of Python clients.

A loop asks the question, runs the tool for each call of the answer, sends the results back and returns the last answer.
It is played in two modes: the model may call, or may call, but as the tool's schema says.
"""

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

MODEL = "tokenloom-demo"
SERVER = sys.argv[1]
URL = SERVER + "/v1"
MODES = ("auto", "strict")
QUESTION = "How warm is it in Lima?"
Unit = Literal["celsius", "fahrenheit"]


def weather(city: str, days: int, unit: Unit, places: list[str]) -> str:
    """Tells the weather of a city on the coming days, at each of its places."""
    ran.append(["weather", {"city": city, "days": days, "unit": unit, "places": places}])
    return f"17 degrees in {city}"


PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "unit": {"enum": ["celsius", "fahrenheit"]},
    "places": {"type": "array", "items": {"type": "string"}},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": list(PROPERTIES),
    "additionalProperties": False,
}
ran: list[list[Any]] = []  # calls that the current loop has run
found: dict[str, dict[str, object]] = {mode: {} for mode in MODES}  # results by mode and loop


def run(name: str, arguments: str | dict[str, Any]) -> str:
    """Run a call by its name and its arguments."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"weather": weather}[name](**given)


def loop(play: Callable[[str], object]) -> Callable[[str], object]:
    """Decorate a loop, which takes a mode and returns its results; it runs at once, and its error is a result."""
    for mode in found:
        ran.clear()
        try:
            found[mode][play.__name__] = {"seen": play(mode), "ran": list(ran)}
        except Exception as error:
            found[mode][play.__name__] = f"{type(error).__name__}: {error}"[:1500]
    return play
