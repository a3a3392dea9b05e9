"""The answers that the scripts of Python clients ask for: of a nested form, and with a single value in each place.

So a model without wisdom answers them, and what differs from them is the protocol's fault.
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
    """Whether `found` is the address: as an object, a dict or JSON."""
    if isinstance(found, BaseModel):
        found = found.model_dump()
    return (json.loads(found) if isinstance(found, str) else found) == ADDRESS


def error_of(call: Callable[[], object]) -> str:
    """The name of the error that `call` ends with."""
    try:
        return f"none, but {call()!r:.300}"
    except Exception as error:
        return type(error).__name__


class Seen(dict[str, object]):
    """What a script has seen, by check; a check that fails gives its error and leaves the others alone."""

    def __call__(self, check: Callable[[], object]) -> Callable[[], object]:
        """Decorates a check, which runs at once."""
        try:
            self[check.__name__] = check()
        except Exception as error:
            self[check.__name__] = f"{type(error).__name__}: {error}"[:600]
        return check
