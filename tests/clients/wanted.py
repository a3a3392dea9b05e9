"""Answers that the scripts of Python clients request: a nested form with one allowed value for each field.

A model of any quality must give them, so that a difference is an error of the protocol.
"""

import json
import sys
from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel, Field

MODEL = "tokenloom-demo"
URL = sys.argv[1] + "/v1"
QUESTION = "What is the capital of Peru?"
RESULT = "found"
TOO_LONG = "hello " * 4000
CUT_AT = 12  # tokens, in the middle of a forced call's arguments


class Street(BaseModel):
    """A street of the address."""

    name: Literal["Union"]
    number: Literal[7] = Field(description="on the door")


class Address(BaseModel):
    """The place that is asked for."""

    city: Literal["Lima"]
    street: Street
    others: list[Street] = Field(min_length=1, max_length=1)


UNION = {"name": "Union", "number": 7}
ADDRESS = {"city": "Lima", "street": UNION, "others": [UNION]}


def is_wanted(found: object) -> bool:
    """Return whether `found` is the address: an object, a dict or JSON."""
    if isinstance(found, BaseModel):
        found = found.model_dump()
    return (json.loads(found) if isinstance(found, str) else found) == ADDRESS


def error_of(call: Callable[[], object]) -> str:
    """Return the class name of the error that `call` raises."""
    try:
        return f"none, but {call()!r:.300}"
    except Exception as error:
        return type(error).__name__


class Seen(dict[str, object]):
    """Results of a script by check; the result of a failed check is its error."""

    def __call__(self, check: Callable[[], object]) -> Callable[[], object]:
        """Decorate a check; it runs at once."""
        try:
            self[check.__name__] = check()
        except Exception as error:
            self[check.__name__] = f"{type(error).__name__}: {error}"[:600]
        return check
